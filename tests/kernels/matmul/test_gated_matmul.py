"""Tests of the gated product in Pallas' GPU interpreter, with race detection, and on GPUs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import matmuls
from support.float8 import swiglu
from support.kernels import needs_kernels
from support.selection import quick
from support.simulator import interpret, simulated

from jax_ep.matmul import pallas as backend
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.matmul.gated_matmul import gated_matmul
from pallas_kernels.matmul.grouped_matmul import Tiles

SWIGLU = Elementwise(swiglu, 2)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)


def run(lhs, gate, up, sizes, tiles, keep, biases):
    return gated_matmul(
        lhs,
        (gate, up),
        sizes,
        SWIGLU,
        keep=keep,
        tiles=tiles,
        num_blocks=2,
        biases=biases,
    )


def biases_of(sizes, width):
    rng = np.random.default_rng(1)
    return tuple(
        jnp.asarray(rng.standard_normal((len(sizes), width)), dtype)
        for dtype in (jnp.bfloat16, jnp.float32)
    )


def with_biases(products, biases, sizes):
    """Adds each group's biases to the group's rows of the products, in float32."""
    wide = [np.asarray(product).astype(np.float32) for product in products]
    for product, bias in zip(wide, biases, strict=True):
        product[: sum(sizes)] += np.repeat(np.asarray(bias).astype(np.float32), sizes, axis=0)
    return wide


def expected(lhs, gate, up, sizes, biases):
    """Computes the hidden values and both products, rounded where the kernel rounds."""
    nothing = np.zeros((len(lhs), gate.shape[2]))
    products = [matmuls.expected(lhs, each, sizes, nothing)[0] for each in (gate, up)]
    rounded = [jnp.asarray(product, jnp.bfloat16) for product in products]
    hidden = swiglu(*map(jnp.asarray, with_biases(rounded, biases, sizes)))
    return hidden.astype(jnp.bfloat16), *rounded


@simulated
@pytest.mark.parametrize("keep", quick([True, False], True))
@pytest.mark.parametrize(
    ("num_rows", "sizes", "depth", "width", "tiles"),
    [
        # Groups lie within a tile, span several tiles, are empty, or start off a multiple of 8
        # rows.
        slow(136, [3, 0, 70, 21], 128, 128, Tiles((32, 64), 128, 3, 2)),
        (40, [3, 0, 21], 64, 128, Tiles((16, 32), 128, 3, 1)),
        # Each compute warpgroup stores two parts of 64 columns.
        slow(40, [3, 0, 21], 64, 256, Tiles((16, 32), 256, 3, 3)),
        # Each compute warpgroup computes one of the products.
        slow(40, [3, 0, 21], 128, 128, Tiles((8, 32), 64, 3, 2)),
        # Tiles are so high that each compute warpgroup stores half of the rows.
        slow(160, [1, 140, 19], 64, 128, Tiles((64, 192), 64, 3, 3)),
    ],
    ids=str,
)
def test_gated_product(num_rows, sizes, depth, width, tiles, keep):
    """With biases; tests/kernels/matmul/test_decoder.py has the same tests without."""
    (lhs, gate, group_sizes, _), (_, up, *_) = (
        matmuls.operands(num_rows, sizes, "bfloat16", seed, (depth, width)) for seed in range(2)
    )
    args, biases = (lhs, gate, up, group_sizes), biases_of(sizes, width)
    got = interpret(lambda: run(*args, tiles, keep, biases))
    want = expected(*args, biases)[: 3 if keep else 1]
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        mine, theirs = (np.asarray(array).astype(np.float32) for array in (mine, theirs))
        # Sums in another order round a few products differently, by 2^-8 of their value.
        np.testing.assert_allclose(mine, theirs, rtol=2**-6, atol=2**-6)
        assert not np.any(mine[sum(sizes) :])
    if keep:
        hidden, *products = (jnp.asarray(array) for array in got)
        again = swiglu(*map(jnp.asarray, with_biases(products, biases, sizes)))
        np.testing.assert_array_equal(hidden, again.astype(jnp.bfloat16))


@needs_kernels
@pytest.mark.parametrize("registers_move", [False, True])
def test_tiles_chosen_for_many_shapes(monkeypatch, registers_move):
    monkeypatch.setattr(backend, "REGISTERS_MOVE", registers_move)
    for num_rows in (1152, 36864):
        for num_cols in (64, 192, 768, 2048, 14336):
            tiles = backend.gated_tiles(num_rows, 64, num_cols)
            assert num_cols % tiles.part == 0
            assert tiles.num_stages >= 3 and tiles.num_buffers >= 2
    few, many = (backend.gated_tiles(num_rows, 64, 768) for num_rows in (16384, 36864))
    assert (few.block_m, few.block_n) == (144, 128)
    assert (many.block_m, many.block_n) == ((144, 128) if registers_move else (176, 64))
    # With higher tiles there would be too few of them to give every multiprocessor one.
    assert backend.gated_tiles(1024, 1, 768).block_m == 64


@needs_kernels
@pytest.mark.parametrize("keep", [False, True])
def test_lowers_for_cuda(keep):
    """The kernel and its table of row tiles must lower for float16 and rows not a multiple of 8."""
    shapes = ((100, 128), (4, 128, 256), (4, 128, 256))
    args = [jax.ShapeDtypeStruct(shape, jnp.float16) for shape in shapes]
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def gated(lhs, gate, up, sizes):
        return backend.gated_product_by_kernel(lhs, (gate, up), sizes, swiglu, keep)

    traced = jax.jit(gated).trace(*args, sizes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 2
    assert [out.shape for out in traced.out_info] == [(100, 256)] * (3 if keep else 1)
