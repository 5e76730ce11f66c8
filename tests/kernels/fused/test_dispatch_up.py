"""Dispatch and up-projection in one kernel, in the simulator, against the plain reference."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from support.contract import assert_bitwise_equal, small_integers
from support.selection import quick
from support.simulator import simulate, simulated, simulated_ranks
from support.stacked import Problem

from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fabric.plan import Plan
from pallas_kernels.fused.dispatch_up import dispatch_up
from pallas_kernels.matmul.grouped_matmul import Tiles

WIDTH = 128


@dataclasses.dataclass(frozen=True)
class Layer(Problem):
    """A dispatch, and matrices whose products with its rows are exact."""

    dtype: str = "bfloat16"

    def __str__(self) -> str:
        return super().__str__()

    @functools.cached_property
    def x(self) -> np.ndarray:
        shape = (self.num_ranks, self.num_tokens, self.hidden)
        return small_integers(self._generator(), shape, jnp.dtype(self.dtype))

    @functools.cached_property
    def matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """Two [N, L, H, F]."""
        shape = self.num_ranks, self.num_experts // self.num_ranks, self.hidden, WIDTH
        both = self._generator().integers(-2, 3, (2, *shape))
        return tuple(both.astype(jnp.dtype(self.dtype)))

    @functools.cached_property
    def hidden_and_products(self) -> list[np.ndarray]:
        """[N, R, F] each."""
        dtype = jnp.dtype(self.dtype)
        products = np.zeros((2, self.num_ranks, self.num_rows, WIDTH), dtype)
        for rank, sizes in enumerate(self.layout.group_sizes):
            ends = np.cumsum(sizes)
            for expert, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
                rows = self.tokens[rank, start:end].astype(np.float32)
                for product, matrices in zip(products, self.matrices, strict=True):
                    matrix = matrices[rank, expert].astype(np.float32)
                    product[rank, start:end] = (rows @ matrix).astype(dtype)
        gate, up = products.astype(np.float32)
        return [(gate * up + gate).astype(dtype), *products]


TILES = Tiles((16, 32), 128, 2, 1)
CASES: dict[str, tuple[Layer, Plan]] = {
    "one_rank": (Layer(1, 9, 64, 2, 4, capacity=24), Plan(1, 3)),
    "two_ranks": (Layer(2, 20, 64, 2, 4, capacity=80), Plan(2, 3, 2, step_tokens=2)),
    "four_ranks": (Layer(4, 6, 64, 3, 8, "skewed", capacity=72), Plan(1, 3, step_tokens=2)),
    "empty": (Layer(2, 5, 64, 2, 4, "empty", capacity=16), Plan(2, 3)),
    "one_expert": (Layer(2, 30, 64, 4, 4, "one_expert", capacity=240), Plan(2, 3)),
    "masked": (Layer(2, 17, 64, 3, 6, "masked", capacity=104), Plan(3, 3, window_tokens=4)),
    "aligned": (Layer(2, 11, 64, 3, 4, alignment=8, capacity=96), Plan(2, 3)),
    "overflow": (Layer(2, 11, 64, 3, 4, "skewed", capacity=24), Plan(2, 3)),
    "fair": (Layer(2, 11, 64, 3, 4, "skewed", capacity=24, overflow="fair"), Plan(2, 3)),
    "fewer_tokens_than_blocks": (Layer(2, 3, 64, 2, 4, capacity=16), Plan(4, 3)),
}


def run(layer: Layer, plan: Plan, keep: bool, head_start: int, cores: int) -> Any:
    return functools.partial(
        dispatch_up,
        jnp.asarray(layer.x),
        jnp.asarray(layer.topk_idx),
        tuple(map(jnp.asarray, layer.matrices)),
        Elementwise(lambda gate, up: gate * up + gate, 2),
        keep=keep,
        num_experts=layer.num_experts,
        fabric=simulated_ranks(layer.num_ranks),
        plan=plan,
        capacity=layer.num_rows,
        expert_alignment=layer.alignment,
        tiles=TILES,
        num_cores=cores,
        head_start=head_start,
        fair=layer.overflow == "fair",
    )


def check_table(layer: Layer, table: np.ndarray) -> None:
    """Every tile has rows of one expert and one source alone, and together they have all rows."""
    num_ranks, per_rank = layer.num_ranks, layer.num_experts // layer.num_ranks
    for rank in range(num_ranks):
        *tiles, (total, live, *_) = table[rank][:-num_ranks]
        ends = table[rank][-num_ranks:, 0]
        owner = np.full((layer.num_rows, 2), -1)  # of each row: the round and the expert
        for source, (indices, rows) in enumerate(
            zip(layer.topk_idx, layer.rows[rank], strict=True)
        ):
            kept = (rows >= 0) & (rows < layer.num_rows)
            owner[rows[kept], 0] = (rank - source) % num_ranks
            owner[rows[kept], 1] = indices[kept] - rank * per_rank
        seen = np.zeros(layer.num_rows, int)
        for number, (group, first, begin, end) in enumerate(tiles[:total]):
            assert first % 8 == 0 and first <= begin < end <= first + TILES.block_m
            assert number < ends[group // per_rank]
            assert group // per_rank == 0 or number >= ends[group // per_rank - 1]
            of_tokens = owner[begin:end][owner[begin:end, 0] >= 0]  # others: zeros between experts
            assert np.all(of_tokens == divmod(group, per_rank))
            seen[begin:end] += 1
        np.testing.assert_array_equal(seen, np.arange(layer.num_rows) < live)
        assert live == min(layer.layout.group_sizes[rank].sum(), layer.num_rows)


@simulated
@pytest.mark.parametrize("case", quick([*CASES], "two_ranks"))
def test_dispatch_up(case):
    layer, plan = CASES[case]
    keep, head_start = case != "masked", int(case != "aligned")
    results = simulate(run(layer, plan, keep, head_start, plan.num_blocks + 2))
    (tokens,), rows, counts, *layout, products, table = results
    check_table(layer, table)
    assert_bitwise_equal(tokens, layer.tokens, "tokens")
    np.testing.assert_array_equal(rows, layer.rows, "rows")
    np.testing.assert_array_equal(counts, layer.counts, "counts")
    described = ("group_sizes", "expert_counts", "num_dropped", "rows_needed")
    for name, got in zip(described, layout, strict=True):
        wanted = getattr(layer.layout, name)
        np.testing.assert_array_equal(got.reshape(wanted.shape), wanted, name)
    wanted = layer.hidden_and_products[: len(products)]
    assert len(products) == (3 if keep else 1)
    for name, got, want in zip(("hidden", "gate", "up"), products, wanted, strict=False):
        assert_bitwise_equal(got, want, name)
