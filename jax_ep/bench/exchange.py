"""`python -m jax_ep bench`: times dispatch and combine, compared with XLA's collectives."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp

from jax_ep.bench import operations, report, runner
from jax_ep.bench.operations import BASELINES, OPERATIONS, Work, make_operation, without_handles
from jax_ep.bench.report import Column, Row
from jax_ep.bench.timing import Bandwidths, Loop, compiled, expert_mesh, on_ranks
from jax_ep.exchange import interface
from jax_ep.exchange.memory import LAYOUTS
from jax_ep.exchange.primitives import IMPLEMENTATIONS, Problem
from jax_ep.flags import Args, Error, Flags, check_experts, choice, integer, number, some
from jax_ep.runtime import availability

WIRE_DTYPES = ("none", *(dtype.name for dtype in interface.WIRE_DTYPES))


def add_flags(flags: Flags) -> None:
    flags.add("ops", ",".join(OPERATIONS), "The operations to measure.", some(choice(OPERATIONS)))
    tokens = "T, tokens per rank. Default: 128,4096; on CPUs 32,128."
    flags.add("tokens", None, tokens, some(integer))
    flags.add("hidden", None, "H, the width of a token. Default: 7168; on CPUs 256.", integer)
    flags.add("num_experts", "256", "E, the number of experts of all ranks together.", integer)
    flags.add("top_k", "8", "K, the number of distinct experts that a token chooses.", integer)
    add_capacity_factor(flags)
    names = some(choice(IMPLEMENTATIONS.names), none=True)
    flags.add("implementations", None, "Of this library. Default: all that run here.", names)
    names = some(choice(BASELINES), none=True)
    flags.add("baselines", BASELINES[0], "XLA's collectives to compare with, or empty.", names)
    flags.add("layouts", "expert", "The orders of received rows to measure.", some(choice(LAYOUTS)))
    wire = "The dtypes of what is sent to other ranks; of a round_trip, of the dispatch alone."
    flags.add("wire_dtype", "none", wire, some(choice(WIRE_DTYPES)))
    outputs = choice(("dequantized", "quantized"))
    flags.add("output", "dequantized", "What a dispatch with a wire dtype returns.", outputs)
    # A loop of fewer calls would time its own start.
    runner.add_flags(flags, "results with those of xla", repeats=5, least=10)


def add_capacity_factor(flags: Flags) -> None:
    factor = "Rows of a receive buffer over the mean, but enough to drop none. 0: any routing."
    flags.add("capacity_factor", "1.125", factor, number)


def run(args: Args) -> int:
    return runner.run(ExchangeBench(args))


class ExchangeBench(runner.Bench):
    """A case is one operation on one number of tokens and ranks, in all ways to compute it."""

    columns = (
        Column("wire GB/s", "wire_gb_per_s", "{:.3g}"),
        report.text("floor set by", "floor_set_by"),
    )

    def cases(self, devices: Sequence[jax.Device], ranks: Sequence[int]) -> list[list[Row]]:
        platform = devices[0].platform
        self.args.hidden = self.args.hidden or (7168 if platform == "gpu" else 256)
        self._check_flags(ranks)
        self.measure_bandwidths(devices[: max(ranks)])
        return [
            list(self._rows(op, num_tokens, num_ranks))
            for num_ranks in ranks
            for num_tokens in self.args.tokens or ([128, 4096] if platform == "gpu" else [32, 128])
            for op in self.args.ops
        ]

    def build(self, row: Row, shared: None) -> Loop:
        work, mesh = make_work(row), expert_mesh(row["ranks"])
        prepare, step = make_operation(row["op"], work, row["implementation"])
        # `prepare` makes what `step` takes on a rank from the rank's seed and its tokens' choices.
        seeds_and_choices = operations.rank_seeds(mesh.size), work.topk_idx
        state = compiled(on_ranks(prepare, mesh), *seeds_and_choices)(*seeds_and_choices)
        return Loop(step, state, mesh, row["iterations"], unroll=row["unroll"])

    def check(self, row: Row, loop: Loop, shared: None) -> bool:
        if row["implementation"] in ("xla", *BASELINES):
            return False
        by_xla = row | {"implementation": "xla", "iterations": 1, "unroll": 1}
        other = self.build(by_xla, shared=None)
        got, wanted = without_handles(loop.outputs()), without_handles(other.outputs())
        runner.agree(got, wanted, operations.tolerance(row["op"], make_work(row)))
        return True

    def results(self, row: Row) -> Row:
        work = make_work(row)
        found: Row = {}
        if (sent := operations.sent_bytes(row["op"], work, row["implementation"])) is not None:
            found |= {"wire_bytes": sent, "wire_gb_per_s": sent / runner.time_of(row) / 1e3}
        # What any implementation must send, since none is named.
        must_cross = operations.sent_bytes(row["op"], work) or 0.0
        if least := floor(must_cross, operations.local_bytes(row["op"], work), self.bandwidths):
            found |= {"floor_us": least[0], "floor_set_by": least[1]}
        return found

    def header(self) -> list[str]:
        return ["bfloat16, H={hidden}, E={num_experts}, K={top_k}".format(**vars(self.args))]

    def group(self, row: Row) -> tuple[str, str]:
        return row["op"], "{tokens} tokens, {ranks} ranks".format(**row)

    def program(self, row: Row) -> str:
        usual = {"layout": "expert", "wire_dtype": "none"}
        unusual = [row[key] for key in usual if row[key] != usual[key]]
        return ", ".join([*unusual, row["implementation"]])

    def _rows(self, op: str, num_tokens: int, num_ranks: int) -> Iterator[Row]:
        args = self.args
        names = args.implementations
        if names is None:
            names = IMPLEMENTATIONS.available(_problem(num_ranks))
        ways = [*product(args.layouts, args.wire_dtype, names)]
        if op in operations.DIRECTIONS:
            ways += [("expert", "none", name) for name in args.baselines]
        from_flags = "hidden", "num_experts", "top_k", "capacity_factor", "output"
        for layout, wire_dtype, name in ways:
            yield {
                "op": op,
                "layout": layout,
                "wire_dtype": wire_dtype,
                "implementation": name,
                "tokens": num_tokens,
                "ranks": num_ranks,
                # LLVM takes long to compile an unrolled loop for CPUs.
                "unroll": 10 if jax.default_backend() == "gpu" else 1,
                "iterations": runner.iterations(args, num_tokens, on_cpus=20, many=60, few=400),
                **{key: getattr(args, key) for key in from_flags},
            }

    def _check_flags(self, ranks: Sequence[int]) -> None:
        args = self.args
        if args.output == "quantized" and set(args.wire_dtype) <= {"none"}:
            raise Error(f"--output=quantized needs --wire_dtype={WIRE_DTYPES[1]}")
        for name in args.wire_dtype:
            check_wire_dtype(name, args.hidden)
        for num_ranks in ranks:
            problem = _problem(num_ranks)
            for name in args.implementations or ():
                runner.check_available({name: IMPLEMENTATIONS[name].unavailable_reason(problem)})
            check_experts(args, args.num_experts, num_ranks, args.top_k)


def check_wire_dtype(name: str, hidden: int) -> None:
    block = interface.wire_format(None if name == "none" else name).row_block
    if hidden % block:
        raise Error(f"--wire_dtype needs a multiple of {block} as --hidden, but H is {hidden}")


def make_work(row: Row) -> Work:
    """Makes the exchange that a row measures; its receive buffers have room for all rows."""
    topk_idx = operations.uniform_routing(
        row["ranks"], row["tokens"], row["num_experts"], row["top_k"]
    )
    capacity = None
    if row["capacity_factor"]:
        needed = operations.rows_needed(topk_idx, row["num_experts"])
        capacity = max(needed, math.ceil(row["capacity_factor"] * row["tokens"] * row["top_k"]))
    quantized = row["wire_dtype"] != "none"
    return Work(
        topk_idx=topk_idx,
        num_experts=row["num_experts"],
        hidden=row["hidden"],
        capacity=capacity,
        layout=row["layout"],
        wire_dtype=jnp.dtype(row["wire_dtype"]) if quantized else None,
        output=row["output"] if quantized else "dequantized",
    )


def floor(sent: float, local: float, bandwidths: Bandwidths) -> tuple[float, str] | None:
    """Returns the least microseconds to move bytes, and what sets them; None if all are unknown."""
    times = []
    if bandwidths.link is not None and sent:
        times.append((sent / bandwidths.link * 1e6, "link"))
    if bandwidths.memory is not None:
        times.append((local / bandwidths.memory * 1e6, "memory"))
    return max(times, default=None)


def _problem(num_ranks: int) -> Any:
    return Problem(availability.Machine(jax.devices()[:num_ranks]))
