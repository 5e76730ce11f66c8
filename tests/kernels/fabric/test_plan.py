"""How a kernel spreads its work: blocks, windows, vectors."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fabric.plan import LANES, Plan, Window, align_up, pad_last, padded_columns


def test_a_plan_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="store_lag must be less than num_slots"):
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
    assert window.width % LANES == 0 and 1 <= window.tokens <= tokens_per_block
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


def test_padding():
    assert [align_up(n, 8) for n in (0, 1, 8, 9)] == [0, 8, 8, 16]
    assert [padded_columns(n, jnp.bfloat16) for n in (1, 1024, 1025)] == [1024, 1024, 2048]
    assert padded_columns(7168, jnp.float8_e4m3fn) == 8192
    padded = pad_last(jnp.ones((2, 3), jnp.int32), 2, 7)
    np.testing.assert_array_equal(padded, [[1, 1, 1, 7, 7]] * 2)
