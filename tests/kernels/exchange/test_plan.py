"""Tests of the exchange kernels' plans and workspaces, at sizes of all kinds."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.exchange import combine as combine_kernel
from pallas_kernels.exchange import plan as plans
from pallas_kernels.exchange.plan import Plan, Row, Sizes, Window, pad_last
from pallas_kernels.exchange.sender import Sender
from pallas_kernels.fabric import memory_map
from pallas_kernels.fabric.hardware import SHARED_MEMORY_BYTES, WARPGROUP, padded_columns
from pallas_kernels.fabric.symmetric import Gpus
from pallas_kernels.formats import FLOAT8_ROWS, PLAIN

WIRE = FLOAT8_ROWS
ROWS = [
    Row(7168, jnp.bfloat16),
    Row(7168, jnp.bfloat16, WIRE),
    Row(2048, jnp.float32),
    Row(512, jnp.float16, WIRE),
    Row(64, jnp.bfloat16),
    Row(14336, jnp.bfloat16),
]
# Each case is (num_tokens, num_ranks, top_k, num_experts).
SIZES = [
    (1, 1, 1, 1),
    (17, 2, 3, 4),
    (128, 8, 8, 256),
    (4096, 8, 8, 256),
    (300, 4, 6, 64),
]


def sizes_of(num_tokens: int, num_ranks: int, top_k: int, num_experts: int = 256) -> Sizes:
    return Sizes(num_tokens=num_tokens, num_ranks=num_ranks, top_k=top_k, num_experts=num_experts)


def nbytes(columns: int, dtype: Any) -> int:
    return columns * jnp.dtype(dtype).itemsize


def test_a_plan_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="store_lag must be less than num_stages"):
        Plan(1, 2, store_lag=2)
    with pytest.raises(ValueError, match="store_lag"):
        Plan(1, 2, store_lag=-1)
    with pytest.raises(ValueError, match="receive_steps must be at least 3"):
        Plan(1, 2, receive_steps=2)


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 128, 129, 4096])
@pytest.mark.parametrize("num_blocks", [1, 3, 64, 128])
def test_blocks_cover_every_token(num_tokens, num_blocks):
    tokens_per_block = Plan(num_blocks, 2).tokens_per_block(num_tokens)
    assert num_blocks * tokens_per_block >= num_tokens
    assert num_blocks * (tokens_per_block - 1) < num_tokens
    of_blocks = [
        Plan(num_blocks, 2).tokens_of_block(jnp.int32(block), num_tokens)
        for block in range(num_blocks)
    ]
    served = [int(first) + i for first, count in of_blocks for i in range(int(count))]
    assert served == list(range(num_tokens))


@pytest.mark.parametrize("num_blocks", [1, 5])
@pytest.mark.parametrize("window_tokens", [1, 3, 16])
@pytest.mark.parametrize("top_k", [1, 3, 8, 16, 40])
@pytest.mark.parametrize("num_tokens", [1, 5, 40, 301])
def test_a_window_holds_its_tokens_and_stays_in_bounds(
    num_tokens, top_k, window_tokens, num_blocks
):
    plan = Plan(num_blocks, 2, window_tokens=window_tokens)
    tokens_per_block = plan.tokens_per_block(num_tokens)
    window = Window.of(window_tokens, plan, num_tokens, top_k)
    assert window.width % WARPGROUP == 0 and 1 <= window.tokens <= tokens_per_block
    flat = jnp.arange(num_tokens * top_k)
    padded = np.asarray(window.pad(flat, -1))
    assert padded.shape == (window.total,)
    for first in range(0, num_blocks * tokens_per_block, tokens_per_block):
        for token in range(first, first + tokens_per_block, window.tokens):
            start = int(window.start(jnp.int32(token * top_k)))
            assert 0 <= start and start + window.width <= window.total
            end = min(token + window.tokens, first + tokens_per_block, num_tokens)
            for entry in range(token * top_k, end * top_k):
                assert padded[start : start + window.width][entry - start] == entry


def test_padding_of_the_last_axis():
    padded = pad_last(jnp.ones((2, 3), jnp.int32), 2, 7)
    np.testing.assert_array_equal(padded, [[1, 1, 1, 7, 7]] * 2)


def test_parts_of_a_row():
    assert Row(512, jnp.float32).parts == [(512, jnp.float32)]
    assert Row(512, jnp.bfloat16, WIRE).parts == [(512, WIRE.dtype), (4, jnp.float32)]
    assert Row(512, jnp.bfloat16).sent_bytes == Row(512, jnp.bfloat16).stage_bytes == 1024
    quantized = Row(512, jnp.bfloat16, WIRE)
    assert quantized.sent_bytes == 512 + 16 and quantized.stage_bytes == 1024 + 512 + 16


def test_padded_rows_are_whole_lines():
    assert plans.padded_hidden(1, jnp.bfloat16) == 64
    assert plans.padded_hidden(64, jnp.bfloat16) == 64
    assert plans.padded_hidden(33, jnp.float32) == 64
    assert plans.padded_hidden(128, jnp.bfloat16, WIRE) == 512


@pytest.mark.parametrize(("num_tokens", "num_ranks", "top_k", "num_experts"), SIZES)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_plans_fit_shared_memory(row, num_tokens, num_ranks, top_k, num_experts):
    """The plans' rings of rows must fit in shared memory.

    The other buffers in shared memory are not added up here; lowering a kernel checks the sum.
    """
    sizes = sizes_of(num_tokens, num_ranks, top_k, num_experts)
    assert plans.fits_shared_memory(row, num_ranks=num_ranks, top_k=top_k, num_experts=num_experts)
    of_dispatch = plans.for_dispatch(row, sizes)
    of_ranks = plans.for_rank_dispatch(row, sizes, weighted=True)
    of_combine = plans.for_combine(row, sizes)
    of_grad = plans.for_combine_grad(row, sizes)
    held = {
        of_dispatch: of_dispatch.num_stages * row.stage_bytes
        + of_dispatch.num_copy_stages * row.sent_bytes,
        of_ranks: of_ranks.num_stages * row.stage_bytes,
        of_combine: 8 * of_combine.step_tokens * num_ranks * (2 * top_k + 1),
        of_grad: of_grad.num_stages * nbytes(padded_columns(row.hidden, row.dtype), row.dtype),
    }
    for plan, size in held.items():
        assert size < SHARED_MEMORY_BYTES and plan.num_stages >= 2
        assert 1 <= plan.num_blocks <= num_tokens
    # The workers of combine's gradient divide the stages of the ring equally.
    assert of_grad.num_stages % of_grad.num_workers == 0


@pytest.mark.parametrize("num_tokens", [128, 4096])
@pytest.mark.parametrize(("num_ranks", "top_k"), [(2, 8), (8, 4), (16, 10), (16, 32)])
def test_sizes_that_fit_can_be_planned(num_ranks, top_k, num_tokens):
    """`for_dispatch` must find a plan for all sizes that `fits_shared_memory` accepts.

    With many experts or choices, the routing data leave little shared memory for rows.
    """
    sizes = dict(num_ranks=num_ranks, top_k=top_k)
    for num_experts in (64, 1536, 2048, 3072, 3840):
        for row in (Row(512, jnp.bfloat16), Row(512, jnp.float32, WIRE), Row(1024, jnp.bfloat16)):
            if plans.fits_shared_memory(row, num_experts=num_experts, **sizes):
                plans.for_dispatch(row, sizes_of(num_tokens, num_ranks, top_k, num_experts))


def test_long_lists_leave_shared_memory_for_rows():
    """A dispatch must have shorter steps where the lists of longer ones leave no room for rows.

    Such a list has the receive-buffer rows of a step's tokens. It lies in shared memory, next to
    the rows. Where there is room, steps must stay long.
    """
    row, sizes = Row(512, jnp.bfloat16), (4096, 8, 4)
    plan = plans.for_dispatch(row, sizes_of(*sizes, 3584))
    assert (plan.step_tokens, plan.num_stages) == (32, 8)
    plan = plans.for_dispatch(row, sizes_of(*sizes, 3840))
    assert (plan.step_tokens, plan.num_stages) == (12, 1)


@pytest.mark.parametrize("wire", [PLAIN, WIRE])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("hidden", [64, 1024, 2048, 2880, 5120, 7168, 8224, 14336, 16448])
def test_a_row_is_whole_tiles_of_whole_vectors(hidden, dtype, wire):
    """A combine's tiles must divide a row and be whole 16-byte vectors.

    A tile must also have from half a vector to four vectors for each thread of a warpgroup, unless
    it is the whole row.
    """
    row = Row(plans.padded_hidden(hidden, dtype, wire), dtype, wire)
    tile, vector = plans.combine_tile(row), 16 // jnp.dtype(dtype).itemsize
    assert row.hidden % tile == 0 and tile % vector == 0
    assert not wire.quantized or tile % plans.ROW_MULTIPLE == 0
    assert WARPGROUP * vector // 2 <= tile <= 4 * WARPGROUP * vector or tile == row.hidden


def test_a_step_of_short_rows_has_more_tokens():
    """The shorter rows are, the more tokens a step must have, up to a limit.

    So the rows of a step have about the same number of bytes. With many choices per token, the
    lists of a step's rows have room for fewer tokens.
    """
    sizes = sizes_of(4096, 8, 8, 64)
    rows = {hidden: Row(hidden, jnp.bfloat16) for hidden in (64, 2048, 7168, 14336)}
    steps = {h: plans.for_combine(row, sizes).step_tokens for h, row in rows.items()}
    assert steps == {64: 16, 2048: 4, 7168: 1, 14336: 1}
    assert plans.for_combine(rows[64], sizes_of(4096, 8, 200, 64)).step_tokens == 5
    steps = {h: plans.for_dispatch(row, sizes).step_tokens for h, row in rows.items()}
    assert steps == {64: 16, 2048: 8, 7168: 2, 14336: 2}
    assert plans.for_dispatch(rows[64], sizes_of(4096, 8, 40, 64)).step_tokens == 3
    assert plans.for_dispatch(rows[64], sizes_of(plans.FEW_TOKENS, 8, 8, 64)).step_tokens == 2


@pytest.mark.parametrize("num_blocks", [1, 20, 500])
def test_blocks_can_be_limited(num_blocks):
    for plan_of in (
        plans.for_dispatch,
        plans.for_rank_dispatch,
        plans.for_combine,
        plans.for_combine_grad,
    ):
        plan = plan_of(ROWS[0], sizes_of(128, 8, 8), num_blocks)
        assert plan.num_blocks == min(num_blocks, 128)


def test_a_signal_can_count_the_steps_of_a_block():
    """A plan must be refused if a block takes more steps than a signal can count.

    The largest count, which is over 2**16, must be accepted.
    """
    row, most = ROWS[0], 2**memory_map.COUNT_BITS - 1
    for step_tokens, plan_of in (
        (1, plans.for_combine),
        (2, plans.for_dispatch),
        (2, plans.for_rank_dispatch),
    ):
        num_tokens = most * step_tokens
        plan = plan_of(row, sizes_of(num_tokens, 8, 8), 1)
        assert plan.steps_per_block(num_tokens) == most > 2**16
        with pytest.raises(ValueError, match=r"NUM_BLOCKS\) must be at least 2 .* is 1\."):
            plan_of(row, sizes_of(num_tokens + 1, 8, 8), 1)


def test_rows_that_are_too_long():
    sizes = dict(num_ranks=8, top_k=8, num_experts=256)
    assert not plans.fits_shared_memory(Row(70016, jnp.bfloat16), **sizes)
    assert not plans.fits_shared_memory(Row(7168, jnp.bfloat16), **{**sizes, "top_k": 300})
    assert not plans.fits_shared_memory(Row(7168, jnp.bfloat16), **{**sizes, "num_experts": 4096})


@pytest.mark.parametrize(("num_tokens", "num_ranks", "top_k", "num_experts"), SIZES)
def test_windows_of_a_sender_and_a_step_are_of_one_array(num_tokens, num_ranks, top_k, num_experts):
    plan = plans.for_dispatch(ROWS[0], sizes_of(num_tokens, num_ranks, top_k, num_experts))
    of_sender, of_step = plans.windows(plan, num_tokens, top_k)
    assert of_sender.total == of_step.total >= num_tokens * top_k
    for window, tokens in ((of_sender, plan.window_tokens), (of_step, plan.step_tokens)):
        alone = Window.of(tokens, plan, num_tokens, top_k)
        assert window == dataclasses.replace(alone, total=of_sender.total)
    fabric = Gpus(((1, num_ranks),), tuple(range(num_ranks)))
    sender = Sender(fabric, plan, num_tokens, ROWS[0], num_words=top_k)
    assert (sender.window, sender.step_window) == (of_sender, of_step)


def test_a_workspace_is_the_size_of_its_arrays():
    sizes = sizes_of(300, 4, 6, 200)
    row = Row(1024, jnp.bfloat16, WIRE)
    plan = plans.for_combine(row, sizes)
    values, scales = plans.combine_receive_buffer(plan, row, 300, 4)
    assert (
        # A block has 3 tokens.
        values.shape == (128, 1, 4, 3, 1024) and values.dtype == WIRE.dtype
    )
    assert scales.shape == (128, 1, 4, 3, 8) and scales.dtype == jnp.float32
    assert plans.combine_workspace(plan, row, sizes) == {
        "receive buffer": math.prod(values.shape) + 4 * math.prod(scales.shape),
    }
    plan = plans.for_dispatch(row, sizes)
    held = plans.dispatch_workspace(plan, sizes)
    entries = plans.windows(plan, 300, 6)[0].total
    assert plans.count_width(200) == 2 * WARPGROUP
    assert held == {"routes": 4 * 4 * (entries + 256)}


def test_the_kernel_allocates_what_its_plan_says(monkeypatch):
    """The combine kernel must allocate its result and then the plan's receive buffer."""
    asked: dict[str, Any] = {}

    def kernel(fabric: Any, body: Any, **options: Any) -> Any:
        asked.update(options)
        return lambda *operands: [operands[0][: options["out_type"][0].shape[0]]]

    monkeypatch.setattr(combine_kernel.fb, "kernel", kernel)
    row = Row(512, jnp.float32)
    plan = plans.for_combine(row, sizes_of(7, 2, 2))
    combine_kernel.combine(
        jnp.zeros((20, 512)), None, jnp.zeros((7, 2), jnp.int32), jnp.zeros((2, 7, 2), jnp.int32),
        fabric=Gpus(((1, 2),), (0, 1)), plan=plan, num_experts=4,
    )  # fmt: skip
    out, *received = asked["out_type"]
    assert out.shape == (7, 512)
    assert received == plans.combine_receive_buffer(plan, row, 7, 2)
    # Peers reach only the receive buffer. It is buffer 4 of the kernel, after the three operands
    # and the result.
    assert asked["shared"] == (4,)


def test_planning_imports_no_pallas():
    """Planning must not import Pallas, since sizes are needed on machines without kernels."""
    modules = "pallas_kernels.exchange.plan", "pallas_kernels.fabric.hardware"
    program = "\n".join(
        [
            "import sys",
            *(f"import {name}" for name in modules),
            "found = [m for m in sys.modules if 'mosaic.gpu' in m or 'l.pallas' in m]",
            "assert not found, found",
        ]
    )
    subprocess.run([sys.executable, "-c", program], check=True)
