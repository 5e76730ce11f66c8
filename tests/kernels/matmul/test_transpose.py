"""Tests of the kernel that transposes quantized rows, by the code that it emits."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from support import emitted
from support import float8 as operands
from support.float8 import assert_same_numbers

from pallas_kernels.matmul import transpose
from pallas_kernels.matmul.quantized_tiles import Scaled
from pallas_kernels.matmul.row_blocks import row_blocks

SIZES = operands.BLOCK_SIZES


@pytest.mark.parametrize("kind", ["skewed", "nan", "huge", "zero"])
def test_transposed_rows(monkeypatch, kind):
    emitted.emulate(monkeypatch)
    rows = operands.rows(operands.rows_in_blocks(kind))
    blocks, _ = row_blocks(jnp.asarray(SIZES, jnp.int32), operands.BLOCK_ROWS)
    got = transpose.transpose_rows(Scaled(rows.values, rows.scales), blocks)
    want = operands.transposed_quantized_rows(rows, SIZES)
    assert_same_numbers(*(operands.live_blocks(each, SIZES) for each in (got, want)))
