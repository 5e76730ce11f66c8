"""Tests of the grouped matmuls by matrices in MXFP4, which kernels decode, and of all gated ones.

tests/matmul/test_weight_only.py compares all numbers of the format; on a GPU, these kernels decode
them there. It also lowers these kernels.
"""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from support import matmuls
from support.float8 import scaled, swiglu
from support.kernels import needs_kernels
from support.selection import quick
from support.simulator import interpret, simulated

from jax_ep.formats import MXFP4, QuantizedArray, quantize
from jax_ep.matmul import pallas as backend
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fabric.hardware import SHARED_MEMORY_BYTES, align_up
from pallas_kernels.formats import Scaled
from pallas_kernels.matmul.chosen_groups import chosen_groups
from pallas_kernels.matmul.gated_matmul import gated_matmul
from pallas_kernels.matmul.grouped_matmul import Tiles, grouped_matmul
from pallas_kernels.matmul.mxfp4_matmul import Mxfp4Matrices

# The number of rows, and those of each group: groups lie within a tile, are empty, start off a
# multiple of 8 rows, or span several tiles.
FEW = 40, [3, 0, 21]
MORE = 136, [3, 0, 70, 21]


def operands(num_rows, sizes, depth, width, is_mxfp4=True):
    """Returns rows [R, K], two arrays of matrices, and the group sizes.

    Matrices are [L, N, K] in MXFP4, or [L, K, N] in bfloat16. Rows past the last group and matrices
    of empty groups are NaN.
    """
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((num_rows, depth))
    rows[sum(sizes) :] = np.nan
    numbers = rng.standard_normal((2, len(sizes), width, depth)) / np.sqrt(depth)
    # Give each block of 32 numbers another scale.
    exponents = rng.integers(-3, 3, (*numbers.shape[:-1], depth // 32))
    numbers *= np.exp2(exponents).repeat(32, axis=-1)
    numbers[:, np.asarray(sizes) == 0] = np.nan
    matrices = [jnp.asarray(each, jnp.bfloat16) for each in numbers]
    matrices = [quantize(m, MXFP4) if is_mxfp4 else m.swapaxes(1, 2) for m in matrices]
    return jnp.asarray(rows, jnp.bfloat16), matrices, jnp.asarray(sizes, jnp.int32)


def run_product(rows, matrices, groups, tiles):
    options = dict(transpose_rhs=True, format=Mxfp4Matrices, tiles=tiles, num_blocks=2)
    return interpret(lambda: grouped_matmul([(rows, scaled(matrices))], groups, **options))


def multiplied(rows, matrices, sizes):
    """Multiplies each group's rows, and rounds the products to bfloat16."""
    if isinstance(matrices, QuantizedArray):
        matrices = matrices.dequantize(jnp.float32).swapaxes(1, 2)
    dense = np.asarray(matrices)
    nothing = np.zeros((len(rows), dense.shape[2]))
    return jnp.asarray(matmuls.expected(rows, dense, sizes, nothing)[0], jnp.bfloat16)


def assert_close(got, want):
    got, want = (np.asarray(each).astype(np.float32) for each in (got, want))
    # Sums in another order round a few products differently, by 2^-8 of their value.
    np.testing.assert_allclose(got, want, rtol=2**-6, atol=2**-6)


@simulated
@pytest.mark.parametrize(
    ("problem", "depth", "width", "tiles"),
    quick(
        {
            "small": (FEW, 128, 128, Tiles((16, 32), 128, 3, 2)),
            # There is one step, so the scales of no other step are loaded meanwhile.
            "one step": (FEW, 64, 128, Tiles((16, 32), 128, 3, 1)),
            # Each compute warpgroup decodes its columns of a tile in two parts of 64.
            "two parts": (MORE, 192, 256, Tiles((32, 64), 256, 3, 2)),
            # There are three columns of tiles in two bands.
            "bands": (MORE, 192, 384, Tiles((32, 48), 128, 3, 1, 2)),
            # Tiles are so high that each is stored before the next one is multiplied.
            "high tiles": ((160, [1, 140, 19]), 192, 256, Tiles((64, 192), 128, 3, 2)),
            # Each of the two parts of a warpgroup's columns consists of two pieces of K.
            "long steps": (MORE, 256, 256, Tiles((32, 64), 256, 3, 2, step=128)),
            "low tiles, two parts": (FEW, 256, 256, Tiles((8, 16, 24), 256, 3, 2, step=256)),
        },
        "small",
    ),
)
def test_product(problem, depth, width, tiles):
    rows, (matrices, _), sizes = operands(*problem, depth, width)
    got = run_product(rows, matrices, sizes, tiles)
    assert_close(got, multiplied(rows, matrices, problem[1]))
    assert not np.any(got[sum(problem[1]) :])


# Of matrices in MXFP4.
GATED = {
    "small": (FEW, 128, 128, Tiles((16, 32), 128, 3, 3)),
    "several tiles": (MORE, 192, 256, Tiles((32, 64), 128, 3, 3)),
    # Each compute warpgroup computes one of the products.
    "narrow tiles": (MORE, 192, 128, Tiles((8, 32), 64, 3, 3)),
    # Tiles are so high that each compute warpgroup stores half of the rows.
    "high narrow tiles": ((160, [1, 140, 19]), 192, 128, Tiles((64, 192), 64, 3, 3)),
    # The halves are no multiple of the 32 rows that are stored at a time.
    "halves of 72 rows": ((160, [1, 140, 19]), 192, 128, Tiles((64, 144), 64, 3, 3)),
    # A stage is longer than the 64 of K that are decoded at a time.
    "long steps": (MORE, 512, 256, Tiles((32, 64), 128, 3, 3, step=256)),
    "low narrow tiles, long steps": (FEW, 384, 128, Tiles((8, 16), 64, 3, 3, step=192)),
}
GATED_IN_BFLOAT16 = {
    "bfloat16, small": (FEW, 64, 128, Tiles((16, 32), 128, 3, 1)),
    "bfloat16, several tiles": (MORE, 128, 128, Tiles((32, 64), 128, 3, 2)),
    # Each compute warpgroup stores two parts of 64 columns.
    "bfloat16, two parts": (FEW, 64, 256, Tiles((16, 32), 256, 3, 3)),
    "bfloat16, narrow tiles": (FEW, 128, 128, Tiles((8, 32), 64, 3, 2)),
    "bfloat16, high tiles": ((160, [1, 140, 19]), 64, 128, Tiles((64, 192), 64, 4, 3)),
}


@simulated
@pytest.mark.parametrize(
    ("keep", "has_biases"), quick([(True, True), (False, False), (False, True)], (True, True))
)
@pytest.mark.parametrize("name", quick([*GATED, *GATED_IN_BFLOAT16], "small", "bfloat16, small"))
def test_gated_product(name, keep, has_biases):
    problem, depth, width, tiles = (GATED | GATED_IN_BFLOAT16)[name]
    sizes = problem[1]
    rows, matrices, groups = operands(*problem, depth, width, is_mxfp4=name in GATED)
    biases = matmuls.gate_biases(len(sizes), width) if has_biases else None
    options = dict(keep=keep, tiles=tiles, num_blocks=2, biases=biases)
    pair = tuple(scaled(each) if name in GATED else each for each in matrices)
    got = interpret(lambda: gated_matmul(rows, pair, groups, Elementwise(swiglu, 2), **options))
    products = [multiplied(rows, each, sizes) for each in matrices]
    want = [matmuls.swiglu_of_groups(products, sizes, biases), *products][: 3 if keep else 1]
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs)
        assert not np.any(mine[sum(sizes) :])
    if keep:
        np.testing.assert_array_equal(got[0], matmuls.swiglu_of_groups(got[1:], sizes, biases))


# ------------------------------------------------------------------------------------- tile sizes

ROWS = 8, 100, 1000, 4096, 32768
WIDTHS = 64, 192, 768, 2048, 2880, 14336


@pytest.fixture
def launched(monkeypatch):
    """Yields a list that gets (kernel, scratch types) of each launch, in place of launching it."""
    launches = []

    def launch(kernel, scratch_types, out_type, *_):
        launches.append((kernel, scratch_types))
        return lambda *operands: jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_type)

    monkeypatch.setattr("pallas_kernels.matmul.grouped_matmul.launch", launch)
    return launches


def shared_bytes(scratch_types):
    """Returns the bytes of shared memory that Mosaic allocates; arrays begin at multiples of 1024.

    A barrier has 8 bytes.
    """
    total = 0
    for each in jax.tree.leaves(scratch_types):
        if isinstance(each, plgpu.Barrier):
            total += 8 * math.prod(np.atleast_1d(each.num_barriers))
        else:
            total += align_up(math.prod(each.shape) * jnp.dtype(each.dtype).itemsize, 1024)
    return total


def matrices_of(format, num_groups, depth, width):
    """Returns the type of an array of matrices in bfloat16, or in MXFP4, transposed."""
    of = jax.ShapeDtypeStruct
    if format == "bfloat16":
        return of((num_groups, depth, width), jnp.bfloat16)
    values = of((num_groups, width, depth // 2), jnp.uint8)
    return Scaled(values, of((num_groups, width, depth // 32), MXFP4.scale_dtype))


def product(rows, matrices, groups):
    transpose_rhs = isinstance(matrices, Scaled)
    return backend.sum_of_products([(rows, matrices)], groups, transpose_rhs=transpose_rhs)


def gated(rows, matrices, groups, keep=False):
    return backend.gated_product_by_kernel(rows, (matrices, matrices), groups, swiglu, keep)


FUNCTIONS = {
    "product": product,
    "gated": gated,
    "gated, products kept": functools.partial(gated, keep=True),
}


@needs_kernels
@pytest.mark.parametrize("format", quick(["bfloat16", "mxfp4"], "mxfp4"))
@pytest.mark.parametrize("name", quick([*FUNCTIONS], "gated"))
def test_tiles_chosen_for_many_shapes(name, format, launched):
    """Tiles must fit into shared memory, and the accumulators must leave registers to decode."""

    def of_chosen(rows, matrices, choices):
        return FUNCTIONS[name](rows, matrices, chosen_groups(choices, 32)[0])

    cases = itertools.product(ROWS, (1, 32), (64, 2880), WIDTHS)
    for num_rows, num_groups, depth, width in cases:
        rows = jax.ShapeDtypeStruct((num_rows, depth), jnp.bfloat16)
        matrices = matrices_of(format, num_groups, depth, width)
        sizes = jax.ShapeDtypeStruct((num_groups,), jnp.int32)
        jax.eval_shape(FUNCTIONS[name], rows, matrices, sizes)
        if num_rows <= 128 and num_groups == 32 and name != "gated, products kept":
            choices = jax.ShapeDtypeStruct((num_rows, 4), jnp.int32)
            jax.eval_shape(of_chosen, rows, matrices, choices)
            assert launched[-1][0].tiles.heights == (align_up(num_rows, 8),)
    for kernel, scratch_types in launched:
        tiles = kernel.tiles
        assert shared_bytes(scratch_types) <= SHARED_MEMORY_BYTES
        assert tiles.num_stages >= 3 and tiles.num_buffers >= max(kernel.outputs, 2)
        assert kernel.has_loader or tiles.num_stages % 2 == 0
        assert kernel.width % tiles.part == 0
        # The accumulators may take 128 of the 232 registers of each of the 128 threads.
        of_computer = 1 if tiles.block_n == 64 else kernel.num_matrices
        registers = tiles.part * tiles.block_m * of_computer
        assert format == "bfloat16" or registers <= 128 * 128
