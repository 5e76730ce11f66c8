"""`python -m jax_ep bench`: times dispatch and combine, compared with collectives of plain JAX.

Every call is timed in two ways: by the host's clock around a compiled loop of dependent calls, and
on GPUs by a profiler that sees each kernel. Bandwidths follow from the slowest rank's device time
if it was measured, and else from the wall time.

The columns of the table are:

  "rows"          the rows of a receive buffer that tokens fill, mean over ranks: one for each
                  (token, choice), or in the rank-major layout one for each (token, rank).
  "logical GB/s"  the bytes of "rows" divided by the time. GB is 10^9 bytes.
  "wire GB/s"     the bytes of the rows that cross to another rank, divided by the time. A token
                  crosses once to each other rank that has an expert of the token.
  "floor us"      the time that no implementation can beat on this machine (`jax_ep.bench.floor`).
  "set by"        the bandwidth that determines the floor: of the link between GPUs, or of memory.
  "of floor"      the floor divided by the measured time.
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

from jax_ep.bench import floor, report, runner
from jax_ep.bench.baselines import AXIS, BASELINES, Baseline, unavailable_reason
from jax_ep.bench.flags import WIRE_DTYPES, BenchFlags, Iterations, wire_format
from jax_ep.bench.operations import (
    DIRECTIONS,
    OF_RANK_MAJOR,
    OPERATIONS,
    QUANTIZED,
    Operation,
    Work,
    make_operation,
    rows_needed,
    uniform_routing,
)
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import Loop
from jax_ep.exchange.memory import LAYOUTS
from jax_ep.exchange.selection import IMPLEMENTATIONS, Problem
from jax_ep.flags import Error, check_experts
from jax_ep.runtime import availability, hosts
from pallas_kernels.formats import PLAIN

FLAGS = BenchFlags()
_OPS = FLAGS.choices("ops", OPERATIONS, OPERATIONS, "The operations to measure.")
_TOKENS = FLAGS.tokens("128,4096", "32,128")
_DTYPE = FLAGS.dtype("the rows")
_HIDDEN = FLAGS.integer(
    "hidden",
    None,
    "H, the hidden size: the number of values of a token. Default: 7168 on GPUs and 256 on CPUs.",
)
_NUM_EXPERTS = FLAGS.integer("num_experts", 256, "E, the number of experts of all ranks together.")
_TOP_K = FLAGS.integer("top_k", 8, "K, the number of distinct experts that each token chooses.")
_CAPACITY_FACTOR = FLAGS.capacity_factor()
_ALIGNMENT = FLAGS.integer(
    "expert_alignment",
    1,
    "Each expert's block in the receive buffer starts at a row that is a multiple of this number.",
)
_IMPLEMENTATIONS = FLAGS.implementations(IMPLEMENTATIONS.names, "the exchange", "all that run here")
_BASELINES = FLAGS.baselines(BASELINES, "collectives of plain JAX", "all that run here")
_HOST_CAPACITY = FLAGS.integer(
    "host_capacity",
    None,
    "The most rows that a rank sends to each other host, for the implementation two_level and the "
    "layout expert. JAX_EP_DEVICES_PER_HOST says which devices share a host. Default: all rows.",
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
    WIRE_DTYPES,
    "The dtypes in which a dispatch sends rows, a combine sums and a gradient cotangents; of a "
    "round_trip, only the dispatch is quantized. none: all are sent as they are. group_by_expert "
    "sends nothing; with float8_e4m3fn and --output=quantized, it permutes float8 rows.",
)
_OUTPUT = FLAGS.choice(
    "output",
    "dequantized",
    ["dequantized", "quantized"],
    "What a dispatch with a wire dtype returns: rows of --dtype, or float8 rows and scales.",
)
_TIMING = FLAGS.timing(Iterations(20, 60, 400), 5, least_iterations=10)
# The default number of calls in a timed loop of `lax.ragged_all_to_all`, which takes milliseconds.
_ITERATIONS_OF_RAGGED = 20
_UNROLL = FLAGS.integer(
    "unroll",
    10,
    "The number of calls in the body of the timed loop, as in a model of that many layers. The "
    "kernels of the loop itself are launched only once for all of these calls.",
)
_SEED = FLAGS.seed("routing and rows")
_SHARED = FLAGS.share(
    plot="wall times over the number of tokens",
    timing=_TIMING,
    check=FLAGS.check("every element with jax_ep.reference"),
)


def run() -> int:
    return runner.run(ExchangeBench())


class ExchangeCase(runner.Case):
    """Measures one operation by one implementation or baseline.

    A baseline is the same program for all operations that move rows in the same direction: from
    tokens to experts, or back. So it is measured only once per direction. All cases share the dict
    `measured`, which maps the programs that were measured to their results.
    """

    device_repeats = 3

    def __init__(self, row: Row, bandwidths: floor.Bandwidths, measured: dict[str, Row]):
        super().__init__(name(row), [row])
        self.row, self.bandwidths, self.measured = row, bandwidths, measured
        self.direction = DIRECTIONS.get(row["op"], "")
        self.is_baseline = row["implementation"] in BASELINES

    def prepare(self) -> Operation | Baseline:
        work = make_work(self.row)
        if self.is_baseline:
            return BASELINES[self.row["implementation"]](work.case(), self.direction)
        return make_operation(self.row["op"], work, self.row["implementation"], self.row["seed"])

    def build(self, row: Row, shared: Operation | Baseline) -> Loop:
        mesh = Mesh(np.asarray(jax.devices()[: row["ranks"]]), (AXIS,))
        return Loop(
            shared.prepare, shared.step, shared.arrays, mesh, row["iterations"], row["unroll"]
        )

    def check(self, row: Row, loop: Loop, shared: Operation | Baseline) -> bool:
        shared.check(*jax.device_get((loop.state, loop.outputs())))
        return True

    def measure(self, run: runner.Run) -> list[Row]:
        program = self.row | ({"op": self.direction} if self.is_baseline else {})
        text = str(sorted(program.items()))
        if text not in self.measured:
            (self.measured[text],) = super().measure(run)
        row = self.measured[text] | self.row
        if "wall" in row:
            row |= floor.record(floor.traffic(row["op"], make_work(row)), self.bandwidths)
            if "floor_us" in row:
                row["floor_fraction"] = row["floor_us"] / _microseconds(row)
        return [row]

    def results(self, row: Row) -> Row:
        work = make_work(row)
        plain = work.case()
        row_bytes = PLAIN.row_bytes(work.hidden, work.dtype)
        wire_row_bytes = work.wire.row_bytes(work.hidden, work.dtype)
        if row["op"] == "round_trip":
            row_bytes, wire_row_bytes = 2 * row_bytes, wire_row_bytes + row_bytes
        sends = row["op"] not in OF_RANK_MAJOR
        wire_rows = plain.wire_rows() if sends else 0.0
        if self.is_baseline:
            wire_rows = BASELINES[row["implementation"]](plain, self.direction).wire_rows
        filled = plain.tokens() if row["layout"] == "rank" and sends else plain.pairs()
        rows, seconds = float(filled.sum()) / row["ranks"], _microseconds(row) * 1e-6
        return {
            "capacity": work.capacity,
            "rows": rows,
            "wire_rows": wire_rows,
            "wire_bytes": wire_rows * wire_row_bytes,
            "logical_gb_per_s": rows * row_bytes / seconds / 1e9,
            "wire_gb_per_s": wire_rows * wire_row_bytes / seconds / 1e9,
        }


class ExchangeBench(runner.Bench):
    flags, shared = FLAGS, _SHARED
    columns = (
        report.text("op"),
        Column("tokens", "tokens"),
        Column("ranks", "ranks"),
        report.text("dtype"),
        report.text("layout", usual="expert"),
        report.text("wire", "wire_dtype", usual="none"),
        report.text("implementation"),
        report.CHECKED,
        Column("rows", "rows", "{:.0f}"),
        Column("device us", "device.median_us", "{:.1f}"),
        Column("slowest", "device.slowest_us", "{:.1f}"),
        *report.WALL,
        Column(
            "wire MB",
            lambda row: row["wire_bytes"] / 1e6 if "wire_bytes" in row else None,
            "{:.3g}",
        ),
        Column("logical GB/s", "logical_gb_per_s", "{:.3g}"),
        Column("wire GB/s", "wire_gb_per_s", "{:.3g}"),
        Column("floor us", "floor_us", "{:.1f}"),
        report.text("set by", "floor_set_by"),
        Column("of floor", "floor_fraction", "{:.0%}"),
        Column("vs ragged", "speedup_over_ragged", "{:.1f}x"),
    )

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> list[ExchangeCase]:
        platform = devices[0].platform
        _check_flags(ranks, platform)
        rows = list(_rows(ranks, platform))
        if not rows:
            raise Error(
                "nothing to measure: none of the --ops exists with the given --layouts, "
                "--wire_dtype, --implementations and --baselines"
            )
        self.rows, self.bandwidths = rows, floor.measure(devices[: max(ranks)])
        self.facts = {
            "peer_copy_gb_per_s": self.bandwidths.link and self.bandwidths.link / 1e9,
            "memory_copy_gb_per_s": self.bandwidths.memory and self.bandwidths.memory / 1e9,
        }
        measured: dict[str, Row] = {}
        return [ExchangeCase(row, self.bandwidths, measured) for row in rows]

    def header(self) -> list[str]:
        lines = []
        if self.bandwidths.memory:
            copied = self.bandwidths.memory / 1e9
            lines.append(f"copies in a GPU's memory: {copied:.0f} GB/s read and written")
        if self.bandwidths.link:
            lines.append(f"copies between two GPUs: {self.bandwidths.link / 1e9:.0f} GB/s one way")
        calls = ", ".join(map(str, sorted({row["iterations"] for row in self.rows})))
        return [*lines, f"{self._sizes()}, {calls} calls a loop, {_TIMING.repeats.value} loops"]

    def _sizes(self) -> str:
        return "H={hidden}, E={num_experts}, K={top_k}".format(**self.rows[0])

    def name(self, row: Row) -> str:
        return name(row)

    def compare(self, rows: list[Row]) -> None:
        """Adds to each row its speed-up in wall time over the baseline "ragged_all_to_all".

        The field is "speedup_over_ragged". It compares equal operations, tokens and ranks.
        """

        def work(row: Row) -> tuple[Any, ...]:
            return row["op"], row["tokens"], row["ranks"]

        ragged = {
            work(row): row["wall"]["median_us"]
            for row in rows
            if row["implementation"] == "ragged_all_to_all" and "wall" in row
        }
        for row in rows:
            if work(row) in ragged and "wall" in row:
                row["speedup_over_ragged"] = ragged[work(row)] / row["wall"]["median_us"]

    def draw(self, rows: Sequence[Row], path: str, machine: str) -> None:
        """Plots wall times over the number of tokens per rank, in a panel for each operation."""
        panels: report.Panels = {}
        for row in (row for row in rows if "wall" in row):
            label = ", ".join([f"{row['ranks']} ranks", row["dtype"], *_way(row)])
            points = panels.setdefault(row["op"], {}).setdefault(label, [])
            points.append((row["tokens"], row["wall"]["median_us"]))
        report.lines(
            panels,
            path,
            title=f"Times of an exchange: {self._sizes()}\n{machine}",
            x_label="tokens per rank",
            y_label="in-loop wall time, us",
        )


def name(row: Row) -> str:
    """Describes a row's program in words: operation, tokens, ranks, dtype and implementation."""
    case = f"{row['op']}, {row['tokens']} tokens, {row['ranks']} ranks, {row['dtype']}"
    return ", ".join([case, *_way(row)])


def _way(row: Row) -> list[str]:
    """Lists a row's implementation, preceded by its layout and wire dtype if not the defaults."""
    usual = {"layout": "expert", "wire_dtype": "none"}
    unusual = [row[key] for key in usual if row[key] != usual[key]]
    return [*unusual, row["implementation"]]


def _microseconds(row: Row) -> float:
    """Returns the slowest rank's device time if it was measured, else the wall time."""
    device = row["device"]
    return row["wall"]["median_us"] if device is None else device["slowest_us"]


# Draws each token's experts. Results are cached, because many programs have the same routing, and
# drawing it for many tokens takes a second.
_routing = functools.lru_cache(maxsize=4)(uniform_routing)


def make_work(case: Row) -> Work:
    """Makes the `Work` (routing, sizes, dtypes) of a row of results.

    The routing is the same for all operations and implementations of the same sizes and seed.
    """
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


def _rows(ranks: Sequence[int], platform: str) -> Iterator[Row]:
    """Yields for each program to measure a dict that identifies the program.

    Its fields are the program's operation, implementation, sizes and options.
    """
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
    """Yields the ways to compute the operation `op` that are to be measured.

    A way is a dict of "layout", "wire_dtype" and "implementation". The last ways are those of the
    baselines, which always send rows in the dtype that the rows have.
    """
    for layout in _LAYOUTS.value:
        if layout != "rank" and op in OF_RANK_MAJOR:
            continue
        for wire_dtype in _WIRE_DTYPES.value:
            available = implementations
            if wire_dtype != "none":
                if op not in QUANTIZED:
                    continue
                # The rows that group_by_expert permutes are float8 only with --output=quantized,
                # and only its implementation "xla" can permute float8 rows.
                if op == "group_by_expert":
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
    """Returns the `Problem` by which implementations say if they run on `num_ranks` devices."""
    return Problem(availability.Machine(jax.devices()[:num_ranks]))


def _check_flags(ranks: Sequence[int], platform: str) -> None:
    if _OUTPUT.value == "quantized" and set(_WIRE_DTYPES.value) <= {"none"}:
        raise Error(f"--output=quantized needs --wire_dtype={WIRE_DTYPES[1]}")
    block = math.lcm(*(wire_format(name).row_block for name in _WIRE_DTYPES.value))
    if _hidden(platform) % block:
        raise Error(
            f"--wire_dtype needs a multiple of {block} as --hidden, but --hidden is "
            f"{_hidden(platform)}"
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
        raise Error(
            "--host_capacity needs two_level in --implementations: no other implementation has it"
        )
