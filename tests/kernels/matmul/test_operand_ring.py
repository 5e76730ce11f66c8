"""Tests that kernels give the same bits with and without a loader warpgroup, and in waves."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import float8 as operands
from support.float8 import scaled
from support.selection import quick
from support.simulator import interpret, simulated

from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.matmul import drhs as matmul_drhs
from pallas_kernels.matmul import float8, float8_drhs, kernel
from pallas_kernels.matmul.drhs import DrhsTiles, drhs_of_each
from pallas_kernels.matmul.float8 import Float8Tiles
from pallas_kernels.matmul.gated_matmul import gated_matmul
from pallas_kernels.matmul.grouped_matmul import Product, Tiles, grouped_matmul
from pallas_kernels.matmul.row_blocks import TransposedRows

SIZES = np.asarray([3, 0, 70, 21], np.int32)
ROWS = 104


def random(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def grouped(**options):
    lhs, rhs = random((ROWS, 192)), random((4, 192, 128), 1)
    tiles = Tiles((16, 48), 128, 4, 1)
    return grouped_matmul(
        [(lhs, rhs), (lhs, rhs)], SIZES, transpose_rhs=False, tiles=tiles, **options
    )


def gated(**options):
    lhs, rhs = random((ROWS, 192)), (random((4, 192, 128), 1), random((4, 192, 128), 2))
    gating = Elementwise(lambda gate, up: jax.nn.silu(gate) * up, 2)
    tiles = Tiles((16, 48), 64, 4, 2)
    return gated_matmul(lhs, rhs, SIZES, gating, keep=False, tiles=tiles, **options)[0]


def drhs(**options):
    lhs, grads = random((ROWS, 128)), [random((ROWS, 128), 1), random((ROWS, 128), 2)]
    return drhs_of_each(lhs, grads, SIZES, tiles=DrhsTiles(64, 4), **options)[1]


def float8_product(**options):
    lhs = scaled(operands.rows(operands.mixed((ROWS, 256))))
    rhs = scaled(operands.transposed_matrices(operands.numbers("random", (4, 256, 384))))
    how = dict(dtype=jnp.bfloat16, tiles=Float8Tiles(4, 2, 256), zero_unused=True)
    return float8.float8_matmul([(lhs, rhs), (lhs, rhs)], SIZES, **how, **options)


def float8_gated(**options):
    lhs = scaled(operands.rows(operands.mixed((ROWS, 640))))  # an odd number of steps
    rhs = [operands.numbers("random", (4, 640, 256), seed) for seed in (1, 2)]
    matrices = tuple(scaled(operands.transposed_matrices(each)) for each in rhs)
    gating, how = Elementwise(operands.swiglu, 2), dict(keep=False, tiles=Float8Tiles(4, 2))
    hidden, *_ = float8.float8_gated_matmul(lhs, matrices, SIZES, gating, **how, **options)
    return hidden.values[: SIZES.sum()].astype(jnp.float32)


def float8_matrices(**options):
    rng = np.random.default_rng(0)

    def rows(columns):
        values = jnp.asarray(rng.standard_normal((columns, 1280)), jnp.float8_e4m3fn)
        return TransposedRows(values, jnp.asarray(rng.random((10, columns // 128)), jnp.float32))

    # The second group has no rows.
    blocks = jnp.asarray([[0, 5], [5, 0], [5, 1], [6, 4]], jnp.int32)
    how = dict(dtype=jnp.bfloat16, tiles=Float8Tiles(4, 2))
    return float8_drhs.drhs(rows(128), rows(256), blocks, **how, **options)


CALLS = [grouped, gated, drhs, float8_product, float8_gated, float8_matrices]


@simulated
@pytest.mark.parametrize("call", quick(CALLS, drhs, float8_gated, float8_matrices))
def test_both_load_the_same(monkeypatch, call):
    results = []
    for has_loader in (False, True):
        for each in Product, matmul_drhs._Drhs, float8.Float8Kernel:
            monkeypatch.setattr(each, "has_loader", has_loader)
        results.append(np.asarray(interpret(lambda: call(num_blocks=2))))
    assert results[0].tobytes() == results[1].tobytes() and results[0].any()


@simulated
@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
def test_waves_leave_the_bits_as_they_are(monkeypatch, call):
    monkeypatch.setattr(kernel, "_LEAST_TILES", 1)
    one, three = (
        np.asarray(interpret(lambda num_waves=n: call(num_blocks=1, num_waves=num_waves)))
        for n in (1, 3)
    )
    assert one.tobytes() == three.tobytes() and one.any()
