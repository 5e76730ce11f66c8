"""Tests of the kernels that quantize rows and matrices to float8, by the code that they emit."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support import emitted
from support import float8 as operands
from support.float8 import assert_same_numbers
from support.selection import quick

from pallas_kernels.formats import Scaled
from pallas_kernels.matmul.quantize import quantize_matrices, quantize_rows, transpose_rows
from pallas_kernels.matmul.row_blocks import row_blocks

SIZES, ROWS, LIVE = operands.BLOCK_SIZES, operands.BLOCK_ROWS, operands.BLOCK_LIVE
KINDS = ["random", "skewed", "zero", "nan", "infinity", "subnormal"]


@pytest.mark.parametrize("dtype", quick(["bfloat16", "float16", "float32"], "bfloat16"))
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_matrices(monkeypatch, kind, dtype):
    emitted.emulate(monkeypatch)
    matrices = jnp.asarray(operands.numbers(kind, (2, 256, 384)), dtype)
    x = np.asarray(matrices.astype(jnp.float32))
    wanted = operands.matrices(x), operands.transposed_matrices(x)
    for mine, want in zip(quantize_matrices(matrices), wanted, strict=True):
        for part, expected in zip(mine, (want.values, want.scales), strict=True):
            assert np.asarray(part).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize("return_rows", [False, True])
@pytest.mark.parametrize("dtype", quick(["bfloat16", "float32"], "bfloat16"))
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_rows(monkeypatch, kind, dtype, return_rows):
    emitted.emulate(monkeypatch)
    rows = jnp.asarray(operands.rows_in_blocks(kind), dtype)
    x = np.asarray(rows.astype(jnp.float32))
    blocks, _ = row_blocks(jnp.asarray(SIZES, jnp.int32), ROWS)
    kept, got = quantize_rows(rows, blocks, return_rows=return_rows)
    want = operands.transposed_rows(x, SIZES)
    assert_same_numbers(*(operands.live_blocks(each, SIZES) for each in (got, want)))
    assert (kept is not None) == return_rows
    if return_rows:
        in_order = operands.rows(x)
        assert_same_numbers(
            [part[:LIVE] for part in kept], [in_order.values[:LIVE], in_order.scales[:LIVE]]
        )


@pytest.mark.parametrize("kind", ["skewed", "nan", "huge", "zero"])
def test_transposed_rows(monkeypatch, kind):
    emitted.emulate(monkeypatch)
    rows = operands.rows(operands.rows_in_blocks(kind))
    blocks, _ = row_blocks(jnp.asarray(SIZES, jnp.int32), ROWS)
    got = transpose_rows(Scaled(rows.values, rows.scales), blocks)
    want = operands.transposed_quantized_rows(rows, SIZES)
    assert_same_numbers(*(operands.live_blocks(each, SIZES) for each in (got, want)))
