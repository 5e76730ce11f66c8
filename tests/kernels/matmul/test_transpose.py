"""Tests of the kernel that transposes quantized rows, in Pallas' GPU interpreter."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support import float8 as operands
from support import simulator
from support.float8 import assert_same_numbers
from support.simulator import interpret, simulated

from pallas_kernels.matmul import transpose
from pallas_kernels.matmul.quantized_tiles import Scaled
from pallas_kernels.matmul.row_blocks import row_blocks

# A group of two blocks, and one of three rows.
SIZES = [3, 0, 150]
# The last 15 of the 168 rows are in no group.
ROWS, LIVE = 168, sum(SIZES)
GROUP_SIZES = jnp.asarray(SIZES, jnp.int32)


def rows_of(x):
    """Appends rows of NaN, past the last group, to rows x [153, C]; returns [168, C]."""
    return np.concatenate([x, np.full((ROWS - LIVE, x.shape[1]), np.nan, np.float32)])


@simulated
@pytest.mark.parametrize("kind", ["skewed", "nan", "huge", "zero"])
def test_transposed_rows(kind):
    rows = operands.rows(rows_of(operands.numbers(kind, (LIVE, 256))))
    blocks, _ = row_blocks(GROUP_SIZES, ROWS)
    got = interpret(
        lambda: transpose.transpose_rows(
            Scaled(rows.values, rows.scales), blocks, interpret=simulator.INTERPRETER
        )
    )
    want = operands.transposed_quantized_rows(rows, SIZES)
    assert_same_numbers(*(operands.live_blocks(each, SIZES) for each in (got, want)))
