"""Tests of the kernels of a gate's gradient, in bfloat16 and float8, by the code that they emit."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from support import emitted
from support import float8 as operands

from jax_ep.formats import FLOAT8_ROWS, QuantizedArray
from jax_ep.matmul.float8 import GateGradient
from pallas_kernels.formats import Scaled
from pallas_kernels.matmul import float8_gate_gradient, gate_gradient
from pallas_kernels.matmul.row_blocks import row_blocks

SIZES, LIVE = operands.BLOCK_SIZES, operands.BLOCK_LIVE
ROWS, F = 300, 256


def _bfloat16(kind, seed):
    return np.asarray(jnp.asarray(operands.numbers(kind, (ROWS, F), seed), jnp.bfloat16))


@pytest.mark.parametrize(
    ("kind", "gating", "num_used"),
    [
        ("random", operands.shifted, 200),
        ("nan", operands.swiglu, 300),
        ("random", operands.swiglu, 129),
        ("random", operands.swiglu, 0),
        ("random", operands.swiglu, 400),
    ],
)
def test_gate_gradient(monkeypatch, kind, gating, num_used):
    """The results must be those of NumPy, within a rounding to bfloat16."""
    emitted.emulate(monkeypatch)
    dhidden, gate, up = arrays = [_bfloat16(kind if i else "random", i) for i in range(3)]
    weights = np.random.default_rng(0).random(ROWS, np.float32)
    weights[0] = 0.0
    function = gate_gradient.gradient_of(gating)
    *got, dweights = gate_gradient.gate_gradient(
        function, *map(jnp.asarray, (*arrays, weights)), jnp.int32(num_used)
    )
    used = min(num_used, ROWS)
    whole = [each.astype(np.float32) for each in (dhidden, gate, up)]
    dgate, dup, hidden, products = operands.gate_gradient(*whole, weights, gating)
    for result, want, before in zip(got, (hidden, dgate, dup), arrays, strict=True):
        np.testing.assert_array_equal(result[used:], before[used:])
        numbers, want = result[:used].astype(np.float64), want[:used]
        np.testing.assert_array_equal(np.isnan(numbers), np.isnan(want))
        error = np.abs(numbers - want) - 2.0**-8 * np.abs(want)
        # A float32 number is rounded to bfloat16; the terms of a derivative may cancel.
        assert not (error > 1e-5).any()
    wanted = products[:used].sum(axis=1)
    numbers = np.asarray(dweights)[:used]
    np.testing.assert_array_equal(np.isnan(numbers), np.isnan(wanted))
    finite = np.isfinite(wanted)
    bound = 1e-5 * np.abs(products[:used][finite]).sum(axis=1) + 1e-30
    assert not (np.abs(numbers[finite] - wanted[finite]) > bound).any()


@pytest.mark.parametrize(
    ("kind", "of_dhidden", "gating"),
    [
        ("random", "random", operands.shifted),
        ("nan", "random", operands.swiglu),
        ("random", "infinity", operands.swiglu),
    ],
)
def test_float8_gate_gradient(monkeypatch, kind, of_dhidden, gating):
    emitted.emulate(monkeypatch)
    dhidden = np.asarray(jnp.asarray(operands.rows_in_blocks(of_dhidden), jnp.bfloat16))
    gate, up = (
        operands.rows(operands.rows_in_blocks(each, i)) for i, each in enumerate((kind, "random"))
    )
    weights = np.random.default_rng(0).random(operands.BLOCK_ROWS, np.float32)
    blocks, _ = row_blocks(jnp.asarray(SIZES, jnp.int32), operands.BLOCK_ROWS)
    of_rows, (*turned, hidden), sums = float8_gate_gradient.gate_gradient(
        gate_gradient.gradient_of(gating),
        jnp.asarray(dhidden),
        Scaled(gate.values, gate.scales),
        Scaled(up.values, up.scales),
        jnp.asarray(weights),
        blocks,
    )
    rows = [QuantizedArray(*each, FLOAT8_ROWS, jnp.bfloat16) for each in of_rows]
    whole = GateGradient(tuple(zip(rows, turned, strict=True)), hidden, sums.sum(axis=1))
    numbers = [np.asarray(each.dequantize(jnp.float32)) for each in (gate, up)]
    live = [each[:LIVE].astype(np.float32) for each in (dhidden, *numbers, weights)]
    operands.assert_gate_gradient(whole, operands.gate_gradient(*live, gating), SIZES)
