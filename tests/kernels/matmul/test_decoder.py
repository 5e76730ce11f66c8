"""Tests of the grouped matmuls by matrices in MXFP4, which the kernels decode.

tests/matmul/test_weight_only.py compares all numbers of the format; on a GPU, these kernels decode
them there.
"""

from __future__ import annotations

import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from support import matmuls
from support.float8 import swiglu
from support.kernels import needs_kernels
from support.selection import quick
from support.simulator import KernelError, interpret, simulated

from jax_ep.formats import MXFP4, quantize
from jax_ep.matmul import pallas as backend
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fabric.hardware import SHARED_MEMORY_BYTES, align_up
from pallas_kernels.formats import Scaled
from pallas_kernels.matmul.chosen_groups import chosen_groups
from pallas_kernels.matmul.decoder import Decoder
from pallas_kernels.matmul.gated_matmul import gated_matmul
from pallas_kernels.matmul.grouped_matmul import Tiles
from pallas_kernels.matmul.mxfp4_matmul import mxfp4_matmul
from pallas_kernels.matmul.operand_ring import OperandRing

# The number of rows, and those of each group: groups lie within a tile, are empty, start off a
# multiple of 8 rows, or span several tiles.
FEW = 40, [3, 0, 21]
MORE = 136, [3, 0, 70, 21]


SWIGLU = Elementwise(swiglu, 2)


def operands(num_rows, sizes, depth, width):
    """Returns rows [R, K], two arrays of matrices [L, N, K] in MXFP4, and the group sizes.

    Rows past the last group and matrices of empty groups are NaN.
    """
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((num_rows, depth))
    rows[sum(sizes) :] = np.nan
    numbers = rng.standard_normal((2, len(sizes), width, depth)) / np.sqrt(depth)
    # Give each block of 32 numbers another scale.
    exponents = rng.integers(-3, 3, (*numbers.shape[:-1], depth // 32))
    numbers *= np.exp2(exponents).repeat(32, axis=-1)
    numbers[:, np.asarray(sizes) == 0] = np.nan
    matrices = [quantize(jnp.asarray(each, jnp.bfloat16), MXFP4) for each in numbers]
    return jnp.asarray(rows, jnp.bfloat16), matrices, jnp.asarray(sizes, jnp.int32)


def scaled(matrices):
    return Scaled(matrices.values, matrices.scales)


def run_product(rows, matrices, groups, tiles, **options):
    return mxfp4_matmul(
        rows,
        scaled(matrices),
        groups,
        tiles=tiles,
        num_blocks=2,
        **options,
    )


def run_gated(rows, matrices, groups, tiles, keep, **options):
    return gated_matmul(
        rows,
        (scaled(matrices[0]), scaled(matrices[1])),
        groups,
        SWIGLU,
        keep=keep,
        tiles=tiles,
        num_blocks=2,
        **options,
    )


def multiplied(rows, matrices, sizes):
    """Multiplies each group's rows, and rounds the products to bfloat16."""
    dense = np.asarray(matrices.dequantize(jnp.float32)).swapaxes(1, 2)
    nothing = np.zeros((len(rows), dense.shape[2]))
    return jnp.asarray(matmuls.expected(rows, dense, sizes, nothing)[0], jnp.bfloat16)


def gated(*products):
    return swiglu(*(each.astype(jnp.float32) for each in products)).astype(jnp.bfloat16)


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
            "few rows, two parts": (FEW, 256, 256, Tiles((8, 16, 24), 256, 3, 2, step=256)),
        },
        "small",
    ),
)
def test_product(problem, depth, width, tiles):
    rows, (matrices, _), sizes = operands(*problem, depth, width)
    got = interpret(lambda: run_product(rows, matrices, sizes, tiles))
    assert_close(got, multiplied(rows, matrices, problem[1]))
    assert not np.any(got[sum(problem[1]) :])


@simulated
@pytest.mark.parametrize("keep", quick([True, False], True))
@pytest.mark.parametrize(
    ("problem", "depth", "width", "tiles"),
    quick(
        {
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
            "few rows, long steps": (FEW, 384, 128, Tiles((8, 32), 128, 3, 3, step=192)),
            "few rows, wide": (FEW, 128, 256, Tiles((8, 16, 24), 256, 3, 3)),
            "few rows, narrow": (FEW, 256, 128, Tiles((8, 16, 24), 64, 3, 3, step=128)),
        },
        "small",
    ),
)
def test_gated_product(problem, depth, width, tiles, keep):
    rows, matrices, sizes = operands(*problem, depth, width)
    got = interpret(lambda: run_gated(rows, matrices, sizes, tiles, keep))
    products = [multiplied(rows, each, problem[1]) for each in matrices]
    want = [gated(*products), *products][: 3 if keep else 1]
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert_close(mine, theirs)
        assert not np.any(mine[sum(problem[1]) :])
    if keep:
        np.testing.assert_array_equal(got[0], gated(*map(jnp.asarray, got[1:])))


@simulated
@pytest.mark.parametrize(
    "tiles",
    quick(
        {
            "few rows, narrow": Tiles((8, 24), 64, 3, 2),
            "several tiles": Tiles((32, 64), 128, 3, 2),
        },
        "few rows, narrow",
    ),
)
def test_gated_product_with_biases(tiles):
    rows, matrices, sizes = operands(*FEW, 128, 128)
    rng, live = np.random.default_rng(1), sum(FEW[1])
    biases = tuple(
        jnp.asarray(rng.standard_normal((len(FEW[1]), 128)), dtype)
        for dtype in (jnp.bfloat16, jnp.float32)
    )
    (got,) = interpret(lambda: run_gated(rows, matrices, sizes, tiles, False, biases=biases))
    numbers = []
    for each, bias in zip(matrices, biases, strict=True):
        product = np.asarray(multiplied(rows, each, FEW[1])).astype(np.float32)[:live]
        numbers.append(product + np.repeat(np.asarray(bias).astype(np.float32), FEW[1], axis=0))
    assert_close(got[:live], swiglu(*map(jnp.asarray, numbers)).astype(jnp.bfloat16))


@simulated
@pytest.mark.slow
def test_products_of_chosen_groups():
    """The first product must read the same rows for each group, the second the group's own."""
    given = np.asarray([[3, 0], [0, -1], [2, 3]], np.int32)
    # Row 3 and those after it are NaN. No row chooses group 1, whose matrices are NaN, too.
    sizes, depth, width = [1, 0, 1, 1], 192, 128
    x, wi, _ = operands(8, sizes, depth, width)
    _, (wo, _), _ = operands(8, sizes, width, depth + 64)
    groups, at = chosen_groups(jnp.asarray(given), len(sizes))

    def run():
        common = dict(zero_unused=False)
        (hidden,) = run_gated(x, wi, groups, Tiles((8,), 64, 3, 1), False, **common)
        return hidden, run_product(hidden, wo, groups, Tiles((8,), 128, 3, 1), **common)

    hidden, out = interpret(run)
    for row, choice in np.argwhere(given >= 0):
        own = slice(at[row, choice], at[row, choice] + 1)
        only = (np.arange(len(sizes)) == given[row, choice]).astype(np.int32)
        products = (multiplied(x[row : row + 1], each, only) for each in wi)
        assert_close(hidden[own], gated(*products))
        assert_close(out[own], multiplied(hidden[own], wo, only))


@simulated
@pytest.mark.slow
def test_scales_that_are_stored_too_late_are_found(monkeypatch):
    """A stage that is said to be full before its scales are stored must be found as a race."""
    stage_scales, fill, arrive = Decoder.stage_scales, OperandRing.fill, plgpu.barrier_arrive
    rings = []

    def noted(ring, *args):
        rings.append(ring)
        return fill(ring, *args)

    def late(decoder, stage, codes):
        arrive(rings[-1].full.at[stage])
        stage_scales(decoder, stage, codes)

    without = types.SimpleNamespace(**vars(plgpu) | {"barrier_arrive": lambda barrier: None})
    monkeypatch.setattr(OperandRing, "fill", noted)
    monkeypatch.setattr(Decoder, "stage_scales", late)
    # The loader warpgroup's own arrival, after it has stored the scales, is the only one there.
    monkeypatch.setattr("pallas_kernels.matmul.mxfp4_matmul.plgpu", without)
    rows, (matrices, _), sizes = operands(*FEW, 128, 128)
    with pytest.raises(KernelError, match="a race"):
        interpret(lambda: run_product(rows, matrices, sizes, Tiles((16, 32), 128, 3, 2)))


@simulated
@pytest.mark.slow
def test_scales_in_a_stage_that_is_in_use_are_found(monkeypatch):
    """Scales that overwrite those of a stage in use must be found as a race."""
    stage_scales = Decoder.stage_scales
    monkeypatch.setattr(
        Decoder, "stage_scales", lambda self, stage, codes: stage_scales(self, 1 - stage, codes)
    )
    rows, (matrices, _), sizes = operands(*FEW, 192, 128)
    with pytest.raises(KernelError, match="a race"):
        interpret(lambda: run_product(rows, matrices, sizes, Tiles((16, 32), 128, 3, 2)))


# ------------------------------------------------------------------------------------- tile sizes

ROWS = 8, 100, 1000, 4096, 8192, 32768
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


def types_of(num_rows, num_groups, depth, width):
    """Returns the types of rows, of an array of matrices in MXFP4, and of group sizes."""
    of = jax.ShapeDtypeStruct
    values = of((num_groups, width, depth // 2), jnp.uint8)
    scales = of((num_groups, width, depth // 32), MXFP4.scale_dtype)
    rows = of((num_rows, depth), jnp.bfloat16)
    return rows, Scaled(values, scales), of((num_groups,), jnp.int32)


def product_of(rows, matrices, groups):
    return backend.sum_of_products([(rows, matrices)], groups, transpose_rhs=True)


def gated_of(rows, matrices, groups, keep=False):
    return backend.gated_product_by_kernel(rows, (matrices, matrices), groups, swiglu, keep)


FUNCTIONS = {
    "product": product_of,
    "gated": gated_of,
    "gated, products kept": functools.partial(gated_of, keep=True),
}


@needs_kernels
@pytest.mark.parametrize("name", FUNCTIONS)
def test_tiles_chosen_for_many_shapes(name, launched):
    """Tiles must fit into shared memory, and the accumulators must leave registers to decode."""
    cases = list(itertools.product(ROWS, (1, 32), (64, 768, 2048, 2880), WIDTHS))
    for sizes in cases:
        jax.eval_shape(FUNCTIONS[name], *types_of(*sizes))
    assert len(launched) == len(cases)
    for kernel, scratch_types in launched:
        tiles = kernel.tiles
        assert shared_bytes(scratch_types) <= SHARED_MEMORY_BYTES
        assert tiles.num_stages >= 3 and tiles.num_buffers >= max(kernel.outputs, 2)
        assert kernel.width % tiles.part == 0
        # The accumulators may take 128 of the 232 registers of each of the 128 threads.
        of_computer = 1 if tiles.block_n == 64 else kernel.num_matrices
        assert tiles.part * tiles.block_m * of_computer <= 128 * 128


@needs_kernels
@pytest.mark.parametrize("name", ["product", "gated"])
def test_tiles_chosen_for_chosen_groups(name, launched):
    cases = [(rows, width) for rows in (1, 8, 40, 128) for width in WIDTHS]
    for num_rows, width in cases:
        rows, matrices, _ = types_of(num_rows, 32, 128, width)

        def call(choices, rows, matrices):
            return FUNCTIONS[name](rows, matrices, chosen_groups(choices, 32)[0])

        jax.eval_shape(call, jax.ShapeDtypeStruct((num_rows, 4), jnp.int32), rows, matrices)
    for (num_rows, _), (kernel, scratch_types) in zip(cases, launched, strict=True):
        assert kernel.tiles.heights == (align_up(num_rows, 8),)
        assert shared_bytes(scratch_types) <= SHARED_MEMORY_BYTES
        assert kernel.tiles.num_stages >= 3 and kernel.width % kernel.tiles.part == 0


# --------------------------------------------------------------------------------------- lowering


@needs_kernels
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("num_rows", quick([100, 4096], 4096))
def test_lowers_for_cuda(name, num_rows):
    """The kernel and its table of row tiles must lower, also with a tile cut off at the edge."""
    traced = jax.jit(FUNCTIONS[name]).trace(*types_of(num_rows, 4, 128, 192))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernel = "grouped_matmul_mxfp4" if name == "product" else "grouped_matmul_gated_mxfp4"
    assert text.count("@mosaic_gpu") == 2 and kernel in text
    assert {out.shape for out in jax.tree.leaves(traced.out_info)} == {(num_rows, 192)}


@needs_kernels
@pytest.mark.parametrize("num_rows", quick([1, 16], 16))
def test_lowers_for_chosen_groups(num_rows):
    """Each product must lower to one kernel, without a kernel for the table of row tiles."""

    def both(choices, x, wi, wo):
        groups, _ = chosen_groups(choices, 4)
        (hidden,) = gated_of(x, wi, groups)
        return product_of(hidden, wo, groups)

    x, wi, _ = types_of(num_rows, 4, 128, 192)
    _, wo, _ = types_of(num_rows, 4, 192, 128)
    traced = jax.jit(both).trace(jax.ShapeDtypeStruct((num_rows, 2), jnp.int32), x, wi, wo)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 2
    assert "grouped_matmul_gated_mxfp4" in text and "grouped_matmul_mxfp4" in text
    tiles, height = (2, 8) if num_rows == 1 else (4, 16)
    assert traced.out_info.shape == (tiles * height, 128)
