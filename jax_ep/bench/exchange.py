"""`python -m jax_ep bench`: times the exchange, compared with collectives of plain JAX.

Every call is timed in two ways: by the host's clock around a compiled loop of dependent calls, and
on GPUs by CUPTI, which sees each kernel. Bandwidths follow from the slowest rank's device time
where there is one, and elsewhere from the wall time.

Columns: "rows" are the rows of a receive buffer that tokens fill, mean over ranks: one for each
(token, choice), or in the rank-major layout one for each (token, rank). Logical GB/s count these
rows, wire GB/s those that must cross to another rank, one for each (token, other rank that it
chose), whatever an implementation sends beyond them; MB is 10^6 and GB is 10^9 bytes. "Floor" is
the time that no implementation can beat on this machine (`jax_ep.bench.floor`), "set by" says
whether the link or the memory sets it, and "of floor" is the floor over the measured time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep.bench import floor, measuring, report
from jax_ep.bench.baselines import AXIS, BASELINES, Case, unavailable_reason
from jax_ep.bench.flags import BenchFlags, Iterations
from jax_ep.bench.operations import (
    DIRECTIONS,
    OF_RANK_MAJOR,
    OPERATIONS,
    QUANTIZED,
    Work,
    make_operation,
    rows_needed,
    uniform_routing,
)
from jax_ep.bench.timing import Loop
from jax_ep.exchange import quantization
from jax_ep.exchange.memory import LAYOUTS
from jax_ep.exchange.selection import IMPLEMENTATIONS, Problem
from jax_ep.flags import Error, check_experts
from jax_ep.runtime import availability, hosts

WIRE_DTYPES = tuple(jnp.dtype(dtype).name for dtype in quantization.DTYPES)

FLAGS = BenchFlags()
_OPS = FLAGS.choices("ops", OPERATIONS, OPERATIONS, "The operations to measure.")
_TOKENS = FLAGS.tokens("128,4096", "32,128")
_RANKS = FLAGS.ranks()
_DTYPE = FLAGS.dtype("the rows")
_HIDDEN = FLAGS.integer(
    "hidden",
    None,
    "H, the hidden size: values of a token. Default: 7168 on GPUs and 256 on CPUs.",
)
_NUM_EXPERTS = FLAGS.integer("num_experts", 256, "E, experts of all ranks together.")
_TOP_K = FLAGS.integer("top_k", 8, "K, distinct experts that each token chooses.")
_CAPACITY_FACTOR = FLAGS.capacity_factor()
_ALIGNMENT = FLAGS.integer(
    "expert_alignment",
    1,
    "Rows that the start of each expert's block in the receive buffer is a multiple of.",
)
_IMPLEMENTATIONS = FLAGS.implementations(IMPLEMENTATIONS.names, "the exchange", "all that run here")
_BASELINES = FLAGS.baselines(BASELINES, "collectives of plain JAX", "all that run here")
_HOST_CAPACITY = FLAGS.integer(
    "host_capacity",
    None,
    "The most rows that a rank sends to each other host, for two_level in the layout expert. "
    "JAX_EP_DEVICES_PER_HOST says which devices share a host. Default: all rows.",
)
_LAYOUTS = FLAGS.choices(
    "layouts",
    ["expert"],
    LAYOUTS,
    "The orders of received rows to measure: by expert, or by source rank and token.",
)
_WIRE_DTYPES = FLAGS.choices(
    "wire_dtype",
    ["none"],
    ["none", *WIRE_DTYPES],
    "The dtypes to send rows of a dispatch, sums of a combine and cotangents of a gradient in; a "
    "round_trip quantizes its dispatch alone. none: rows are sent as they are. group_by_expert, "
    "which sends nothing, then permutes the float8 rows of --output=quantized.",
)
_OUTPUT = FLAGS.choice(
    "output",
    "dequantized",
    ["dequantized", "quantized"],
    "What a dispatch with a wire dtype returns: rows of --dtype, or float8 rows and scales.",
)
_CHECK = FLAGS.check("every element with jax_ep.reference")
_TIMING = FLAGS.timing(Iterations(20, 60, 400), 5, least_iterations=10)
_ITERATIONS_OF_RAGGED = 20  # `lax.ragged_all_to_all` takes milliseconds
_UNROLL = FLAGS.integer(
    "unroll",
    10,
    "Calls in the body of the loop whose wall time is measured, as in a model of that many layers; "
    "the host launches the loop's own kernels once for all of them.",
)
_SEED = FLAGS.seed("routing and rows")
_JSON = FLAGS.json()
_PLOT = FLAGS.plot("wall times over the number of tokens")


def run() -> int:
    FLAGS.check_outputs()
    devices = measuring.find_devices(max(_RANKS.value or [8]))
    ranks = _RANKS.value or [len(devices)]
    measuring.check_ranks(ranks, len(devices))
    platform = devices[0].platform
    _check_flags(ranks, platform)
    cases = list(_cases(ranks, platform))
    if not cases:
        raise Error(
            "nothing to measure: no operation of --ops is in the --layouts, takes the "
            "--wire_dtype and has one of the --implementations or --baselines"
        )

    bandwidths = floor.measure(devices[: max(ranks)])
    gb_per_s = {
        "peer_copy_gb_per_s": bandwidths.link and bandwidths.link / 1e9,
        "memory_copy_gb_per_s": bandwidths.memory and bandwidths.memory / 1e9,
    }
    rows = []
    for row in _measure_all(cases, bandwidths):
        rows.append(row)
        if _JSON.value:  # as it goes: a run that is ended early leaves what it has
            measuring.write_json(_JSON.value, rows, **gb_per_s)
    measuring.progress("")
    _compare_with_ragged(rows)

    print(f"{measuring.devices_in_words(devices)}, jax {jax.__version__}")
    if bandwidths.memory:
        print(f"copies in a GPU's memory: {bandwidths.memory / 1e9:.0f} GB/s read and written")
    if bandwidths.link:
        print(f"copies between two GPUs: {bandwidths.link / 1e9:.0f} GB/s one way")
    print(
        f"H={rows[0]['hidden']} E={_NUM_EXPERTS.value} K={_TOP_K.value}, "
        f"{_calls(rows)} calls a loop, {_TIMING.repeats.value} loops\n"
    )
    print(report.table(rows, by_kernel=_TIMING.by_kernel.value))
    if _JSON.value:
        measuring.write_json(_JSON.value, rows, **gb_per_s)
    if _PLOT.value:
        sizes = f"H={rows[0]['hidden']}, E={_NUM_EXPERTS.value}, K={_TOP_K.value}"
        machine = measuring.devices_in_words(devices)
        report.plot(rows, _PLOT.value, f"Times of an exchange: {sizes}\n{machine}")
    return 1 if any("error" in row for row in rows) else 0


def _measure_all(
    cases: Sequence[dict[str, Any]], bandwidths: floor.Bandwidths
) -> Iterator[report.Row]:
    """Measures each distinct program once; yields a row for each case, with its floor."""
    measured: dict[str, dict[str, Any]] = {}
    for number, case in enumerate(cases, 1):
        measuring.progress(f"[{number}/{len(cases)}] {report.name(case)}")
        program = _program(case)
        if program not in measured:
            measured[program] = measure(case)
        row = case | measured[program]
        if "error" not in row:
            row |= floor.record(floor.traffic(case["op"], make_work(case)), bandwidths)
            if "floor_us" in row:
                row["floor_fraction"] = row["floor_us"] / _microseconds(row)
        yield row


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Measures a case; returns the fields of its row, or {"error": text} if that fails."""
    try:
        return _measure(case)
    except Exception as error:  # one case that fails must not cost the others their results
        return {"error": measuring.first_line(error)}


def _program(case: dict[str, Any]) -> str:
    """Returns a text that identifies the program of a case; cases with equal texts share it.

    A baseline has one program for all operations of a direction.
    """
    if case["implementation"] in BASELINES:
        case = case | {"op": DIRECTIONS[case["op"]]}
    return str(sorted(case.items()))


def _measure(case: dict[str, Any]) -> dict[str, Any]:
    devices = jax.devices()[: case["ranks"]]
    work = make_work(case)
    plain = work.case()
    row_bytes = work.wire_row_bytes(quantized=False)
    wire_row_bytes = work.wire_row_bytes(quantized=work.wire_dtype is not None)
    if case["op"] == "round_trip":
        row_bytes, wire_row_bytes = 2 * row_bytes, wire_row_bytes + row_bytes
    if case["implementation"] in BASELINES:
        direction = DIRECTIONS[case["op"]]
        baseline = BASELINES[case["implementation"]](plain, direction)
        arrays, prepare, step = baseline.arrays, baseline.prepare, baseline.step
        wire_rows = baseline.wire_rows
    else:
        operation = make_operation(case["op"], work, case["implementation"], case["seed"])
        arrays, prepare, step = operation.arrays, operation.prepare, operation.step
        wire_rows = 0.0 if case["op"] in OF_RANK_MAJOR else plain.wire_rows()
    mesh = Mesh(np.asarray(devices), (AXIS,))
    loop = Loop(prepare, step, arrays, mesh, case["iterations"], case["unroll"])

    if case["check"]:
        state, outputs = jax.device_get((loop.state, loop.outputs()))
        if case["implementation"] in BASELINES:
            _check_baseline(baseline, state, outputs, plain)
        else:
            operation.check(state, outputs)

    by_rank = case["layout"] == "rank" and case["op"] not in OF_RANK_MAJOR
    filled = plain.tokens() if by_rank else plain.pairs()
    result: dict[str, Any] = {
        "capacity": work.capacity,
        "checked": case["check"],
        "rows": float(filled.sum()) / case["ranks"],
        "wire_rows": wire_rows,
        "wire_bytes": wire_rows * wire_row_bytes,
        **measuring.times(
            loop,
            case["repeats"],
            case["device_timer"],
            device_repeats=min(case["repeats"], 3),
        ),
    }
    seconds = _microseconds(result) * 1e-6
    result["logical_gb_per_s"] = result["rows"] * row_bytes / seconds / 1e9
    result["wire_gb_per_s"] = result["wire_bytes"] / seconds / 1e9
    return result


def _calls(rows: list[report.Row]) -> str:
    """Returns the numbers of calls in the loops of all rows, such as "60, 400"."""
    return ", ".join(map(str, sorted({row["iterations"] for row in rows})))


def _microseconds(row: report.Row) -> float:
    """Returns a row's device time on the slowest rank, or else its wall time, in microseconds."""
    device = row["device"]
    return row["wall"]["median_us"] if device is None else device["slowest_us"]


_routing = functools.lru_cache(maxsize=4)(uniform_routing)  # cached: takes a second for large T


def make_work(case: dict[str, Any]) -> Work:
    """Makes the `Work` of a case; its routing depends on neither operation nor implementation."""
    topk_idx = _routing(
        case["ranks"] * case["tokens"], case["num_experts"], case["top_k"], case["seed"]
    )
    capacity = None
    if case["capacity_factor"]:
        needed = rows_needed(topk_idx, case["ranks"], case["num_experts"], case["expert_alignment"])
        wanted = math.ceil(case["capacity_factor"] * case["tokens"] * case["top_k"])
        capacity = max(needed, wanted)
    return Work(
        topk_idx,
        case["ranks"],
        case["num_experts"],
        case["hidden"],
        jnp.dtype(case["dtype"]),
        capacity,
        case["expert_alignment"],
        case["layout"],
        None if case["wire_dtype"] == "none" else jnp.dtype(case["wire_dtype"]),
        "dequantized" if case["wire_dtype"] == "none" else case["output"],
        len(set(hosts.hosts_of(jax.devices()[: case["ranks"]]))),
        case["host_capacity"],
    )


def _cases(ranks: list[int], platform: str) -> Iterator[dict[str, Any]]:
    on_gpu = platform == "gpu"
    tokens = _TOKENS.value or ([128, 4096] if on_gpu else [32, 128])
    baselines = _BASELINES.value
    if baselines is None:
        baselines = [name for name in BASELINES if unavailable_reason(name, platform) is None]
    for num_ranks in ranks:
        implementations = _IMPLEMENTATIONS.value
        if implementations is None:
            implementations = IMPLEMENTATIONS.available(_problem(num_ranks))
        for num_tokens in tokens:
            for op in _OPS.value:
                for way in _ways(op, implementations, baselines):
                    limited = (way["implementation"], way["layout"]) == ("two_level", "expert")
                    yield way | {
                        "op": op,
                        "host_capacity": _HOST_CAPACITY.value if limited else None,
                        "tokens": num_tokens,
                        "ranks": num_ranks,
                        "dtype": _DTYPE.value,
                        "output": _OUTPUT.value,
                        "hidden": _hidden(platform),
                        "num_experts": _NUM_EXPERTS.value,
                        "top_k": _TOP_K.value,
                        "capacity_factor": _CAPACITY_FACTOR.value,
                        "expert_alignment": _ALIGNMENT.value,
                        "iterations": _iterations(way["implementation"], num_tokens),
                        "unroll": _UNROLL.value,
                        "repeats": _TIMING.repeats.value,
                        "device_timer": _TIMING.timer.value,
                        "check": _CHECK.value,
                        "seed": _SEED.value,
                    }


def _hidden(platform: str) -> int:
    return _HIDDEN.value or (7168 if platform == "gpu" else 256)


def _iterations(implementation: str, num_tokens: int) -> int:
    iterations = _TIMING.iterations_of(num_tokens)
    if implementation.startswith("ragged_all_to_all") and _TIMING.iterations.value is None:
        return min(iterations, _ITERATIONS_OF_RAGGED)
    return iterations


def _ways(op: str, implementations: list[str], baselines: list[str]) -> Iterator[dict[str, str]]:
    """Yields the layout, wire dtype and implementation of each way to run an operation.

    The baselines are among them.
    """
    for layout in _LAYOUTS.value:
        if layout != "rank" and op in OF_RANK_MAJOR:
            continue
        for wire_dtype in _WIRE_DTYPES.value:
            available = implementations
            if wire_dtype != "none":
                if op not in QUANTIZED:
                    continue
                if op == "group_by_expert":  # which permutes float8 rows, always by "xla"
                    if _OUTPUT.value != "quantized":
                        continue
                    available = ["xla"]
            for implementation in available:
                yield {
                    "layout": layout,
                    "wire_dtype": wire_dtype,
                    "implementation": implementation,
                }
    if op in DIRECTIONS:
        for baseline in baselines:
            yield {"layout": "expert", "wire_dtype": "none", "implementation": baseline}


def _problem(num_ranks: int) -> Problem:
    """Returns an exchange between the first devices, of whatever rows."""
    return Problem(availability.Machine(jax.devices()[:num_ranks]))


def _check_flags(ranks: list[int], platform: str) -> None:
    if _OUTPUT.value == "quantized" and set(_WIRE_DTYPES.value) <= {"none"}:
        raise Error(f"--output: quantized rows need a wire dtype, --wire_dtype={WIRE_DTYPES[0]}")
    if set(_WIRE_DTYPES.value) - {"none"} and _hidden(platform) % quantization.BLOCK:
        raise Error(
            f"--wire_dtype: rows of --hidden={_hidden(platform)} values are not whole blocks of "
            f"{quantization.BLOCK}"
        )
    for name in _BASELINES.value or []:
        if reason := unavailable_reason(name, platform):
            raise Error(f"--baselines: {name} cannot run here: {reason}")
    for num_ranks in ranks:
        for name in _IMPLEMENTATIONS.value or ():
            if reason := IMPLEMENTATIONS[name].unavailable_reason(_problem(num_ranks)):
                raise Error(f"--implementations: {name} cannot run here: {reason}")
        check_experts(_NUM_EXPERTS.value, num_ranks, _TOP_K.value)
    if _HOST_CAPACITY.value and "two_level" not in (_IMPLEMENTATIONS.value or ()):
        raise Error("--host_capacity: is of two_level, which --implementations must name")


def _check_baseline(baseline, state, outputs, plain: Case) -> None:
    expected = baseline.expected(state)
    tolerance = 0.0 if baseline.exact else plain.num_ranks**2 * float(jnp.finfo(plain.dtype).eps)
    error = np.abs(outputs.astype(np.float32) - expected.astype(np.float32))
    assert np.all(error <= tolerance), f"off by up to {error.max()}, tolerance {tolerance}"


def _compare_with_ragged(rows: list[report.Row]) -> None:
    """Adds to each row its speed-up, in wall time, over the baseline `lax.ragged_all_to_all`."""

    def work(row):
        return row["op"], row["tokens"], row["ranks"], row["dtype"]

    ragged = {
        work(row): row["wall"]["median_us"]
        for row in rows
        if row["implementation"] == "ragged_all_to_all" and "wall" in row
    }
    for row in rows:
        if work(row) in ragged and "wall" in row:
            row["speedup_over_ragged"] = ragged[work(row)] / row["wall"]["median_us"]
