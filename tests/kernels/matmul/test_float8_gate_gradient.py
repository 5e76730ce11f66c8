"""Tests of the float8 kernel of a gate's gradient, by the code that it emits."""

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

SIZES, ROWS, LIVE = operands.BLOCK_SIZES, operands.BLOCK_ROWS, operands.BLOCK_LIVE


@pytest.mark.parametrize(
    ("kind", "of_dhidden", "gating"),
    [
        ("random", "random", operands.shifted),
        ("nan", "random", operands.swiglu),
        ("random", "infinity", operands.swiglu),
    ],
)
def test_gate_gradient(monkeypatch, kind, of_dhidden, gating):
    emitted.emulate(monkeypatch)
    dhidden = np.asarray(jnp.asarray(operands.rows_in_blocks(of_dhidden), jnp.bfloat16))
    gate, up = (
        operands.rows(operands.rows_in_blocks(each, i)) for i, each in enumerate((kind, "random"))
    )
    weights = np.random.default_rng(0).random(ROWS, np.float32)
    blocks, _ = row_blocks(jnp.asarray(SIZES, jnp.int32), ROWS)
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
