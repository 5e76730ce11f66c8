"""Tests of the exchange kernels' plans and workspaces, at sizes of all kinds."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pallas_kernels.exchange import plan as plans
from pallas_kernels.exchange.plan import Row, Sizes
from pallas_kernels.fabric import memory_map
from pallas_kernels.fabric.hardware import SHARED_MEMORY_BYTES, WARPGROUP
from pallas_kernels.formats import FLOAT8_ROWS, PLAIN

WIRE = FLOAT8_ROWS
ROWS = [
    Row(7168, jnp.bfloat16),
    Row(2048, jnp.float32),
    Row(512, jnp.float16, WIRE),
    Row(14336, jnp.bfloat16),
]
# Each case is (num_tokens, num_ranks, top_k, num_experts).
SIZES = [(1, 1, 1, 1), (17, 2, 3, 4), (128, 8, 8, 256), (4096, 8, 8, 256)]


def sizes_of(num_tokens: int, num_ranks: int, top_k: int, num_experts: int = 256) -> Sizes:
    return Sizes(num_tokens=num_tokens, num_ranks=num_ranks, top_k=top_k, num_experts=num_experts)


@pytest.mark.parametrize(("num_tokens", "num_ranks", "top_k", "num_experts"), SIZES)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_plans_fit_shared_memory(row, num_tokens, num_ranks, top_k, num_experts):
    """The plans' rings of rows must fit in shared memory."""
    sizes = sizes_of(num_tokens, num_ranks, top_k, num_experts)
    assert plans.fits_shared_memory(row, num_ranks=num_ranks, top_k=top_k, num_experts=num_experts)
    of_dispatch = plans.for_dispatch(row, sizes)
    of_ranks = plans.for_rank_dispatch(row, sizes, weighted=True)
    of_combine = plans.for_combine(row, sizes)
    held = {
        of_dispatch: of_dispatch.num_stages * row.stage_bytes
        + of_dispatch.num_copy_stages * row.sent_bytes,
        of_ranks: of_ranks.num_stages * row.stage_bytes,
        of_combine: 8 * of_combine.step_tokens * num_ranks * (2 * top_k + 1),
    }
    for plan, size in held.items():
        assert size < SHARED_MEMORY_BYTES and plan.num_stages >= 2
        assert 1 <= plan.num_blocks <= num_tokens


@pytest.mark.parametrize(("num_ranks", "top_k"), [(2, 8), (8, 4), (16, 10), (16, 32)])
def test_sizes_that_fit_can_be_planned(num_ranks, top_k):
    """`for_dispatch` must find a plan for all sizes that `fits_shared_memory` accepts."""
    for num_experts in (64, 1536, 2048, 3072, 3840):
        sizes = dict(num_ranks=num_ranks, top_k=top_k, num_experts=num_experts)
        for row in (Row(512, jnp.bfloat16), Row(512, jnp.float32, WIRE), Row(1024, jnp.bfloat16)):
            if plans.fits_shared_memory(row, **sizes):
                plans.for_dispatch(row, Sizes(num_tokens=4096, **sizes))


@pytest.mark.parametrize("wire", [PLAIN, WIRE])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("hidden", [64, 2880, 7168, 8224, 16448])
def test_a_row_is_whole_tiles_of_whole_vectors(hidden, dtype, wire):
    """A combine's tiles must divide a row and be whole 16-byte vectors."""
    row = Row(plans.padded_hidden(hidden, dtype, wire), dtype, wire)
    tile, vector = plans.combine_tile(row), 16 // jnp.dtype(dtype).itemsize
    assert row.hidden % tile == 0 and tile % vector == 0
    assert not wire.quantized or tile % plans.ROW_MULTIPLE == 0
    assert WARPGROUP * vector // 2 <= tile <= 4 * WARPGROUP * vector or tile == row.hidden


@pytest.mark.parametrize(
    ("step_tokens", "plan_of"),
    [(1, plans.for_combine), (2, plans.for_dispatch), (2, plans.for_rank_dispatch)],
)
def test_a_signal_can_count_the_steps_of_a_limited_number_of_blocks(step_tokens, plan_of):
    """A plan must be refused if a block takes more steps than a signal can count."""
    row, most = ROWS[0], 2**memory_map.COUNT_BITS - 1
    assert plan_of(row, sizes_of(128, 8, 8), 20).num_blocks == 20
    num_tokens = most * step_tokens
    plan = plan_of(row, sizes_of(num_tokens, 8, 8), 1)
    assert plan.steps_per_block(num_tokens) == most > 2**16
    with pytest.raises(ValueError, match=r"NUM_BLOCKS\) must be at least 2 .* is 1\."):
        plan_of(row, sizes_of(num_tokens + 1, 8, 8), 1)
