"""Dispatch and a product of its rows in one kernel, in the simulator, against the reference."""

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

from pallas_kernels.exchange.plan import Plan
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fused.dispatch_product import dispatch_gated, dispatch_like_product
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


def plan_of(num_blocks: int, step_tokens: int = 4) -> Plan:
    return Plan(num_blocks, 3, 1, step_tokens=step_tokens, num_copy_slots=2)


TILES = Tiles((16, 32), 128, 2, 1)
CASES: dict[str, tuple[Layer, Plan]] = {
    "one_rank": (Layer(1, 9, 64, 2, 4, capacity=24), plan_of(1)),
    "two_ranks": (Layer(2, 20, 64, 2, 4, capacity=80), plan_of(2)),
    "four_ranks": (Layer(4, 6, 64, 3, 8, "skewed", capacity=72), plan_of(1, 2)),
    "empty": (Layer(2, 5, 64, 2, 4, "empty", capacity=16), plan_of(2)),
    "one_expert": (Layer(2, 30, 64, 4, 4, "one_expert", capacity=240), plan_of(2, 8)),
    "masked": (Layer(2, 17, 64, 3, 6, "masked", capacity=104), plan_of(3)),
    "aligned": (Layer(2, 11, 64, 3, 4, alignment=8, capacity=96), plan_of(2, 3)),
    "overflow": (Layer(2, 11, 64, 3, 4, "skewed", capacity=24), plan_of(2)),
    "fair": (Layer(2, 11, 64, 3, 4, "skewed", capacity=24, overflow="fair"), plan_of(2)),
    "fewer_tokens_than_blocks": (Layer(2, 3, 64, 2, 4, capacity=16), plan_of(4)),
}


def options(layer: Layer, plan: Plan, head_start: int) -> dict[str, Any]:
    return dict(
        fabric=simulated_ranks(layer.num_ranks),
        plan=plan,
        capacity=layer.num_rows,
        expert_alignment=layer.alignment,
        tiles=TILES,
        num_cores=plan.num_blocks + 2,
        head_start=head_start,
        fair=layer.overflow == "fair",
    )


@simulated
@pytest.mark.parametrize("case", quick([*CASES], "two_ranks"))
def test_dispatch_gated(case):
    layer, plan = CASES[case]
    keep, head_start = case != "masked", int(case != "aligned")
    call = functools.partial(
        dispatch_gated,
        jnp.asarray(layer.x),
        jnp.asarray(layer.topk_idx),
        tuple(map(jnp.asarray, layer.matrices)),
        Elementwise(lambda gate, up: gate * up + gate, 2),
        keep=keep,
        num_experts=layer.num_experts,
        **options(layer, plan, head_start),
    )
    (tokens,), rows, counts, *layout, products = simulate(call)
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


@simulated
@pytest.mark.parametrize("case", quick([*CASES], "two_ranks"))
def test_dispatch_like_product(case):
    layer, plan = CASES[case]
    matrix, transposed = layer.matrices[0], case in ("two_ranks", "fair")
    call = functools.partial(
        dispatch_like_product,
        *map(jnp.asarray, (layer.x, layer.rows, layer.counts, layer.layout.group_sizes)),
        jnp.asarray(matrix.swapaxes(2, 3) if transposed else matrix),
        transpose_rhs=transposed,
        **options(layer, plan, int(case != "aligned")),
    )
    tokens, product = simulate(call)
    assert_bitwise_equal(tokens, layer.tokens, "tokens")
    assert_bitwise_equal(product, layer.hidden_and_products[1], "product")
