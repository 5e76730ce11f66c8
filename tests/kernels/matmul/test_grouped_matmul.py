"""The grouped matmul kernels in Pallas' GPU interpreter, with race detection, on any machine."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import simulator
from support.kernels import needs_kernels
from support.selection import quick
from support.simulator import KernelError, interpret, simulated

from jax_ep.matmul import pallas as backend
from pallas_kernels.matmul import grouped_matmul as pallas
from pallas_kernels.matmul.grouped_matmul import Tiles

NUM_BLOCKS = 2


def operands(num_rows, sizes, depth, width):
    """lhs, rhs and grad in bfloat16, NaN past the last group, and the sizes."""
    rng = np.random.default_rng(0)
    shapes = (num_rows, depth), (len(sizes), depth, width), (num_rows, width)
    lhs, rhs, grad = (rng.standard_normal(shape) for shape in shapes)
    lhs[sum(sizes) :] = np.nan
    grad[sum(sizes) :] = np.nan
    arrays = [jnp.asarray(array, jnp.bfloat16) for array in (lhs, rhs, grad)]
    return (*arrays, jnp.asarray(sizes, jnp.int32))


def options(tiles):
    """Of a kernel that `interpret` runs: it looks for races, and raises if there are any."""
    return dict(tiles=tiles, num_blocks=NUM_BLOCKS, interpret=simulator.INTERPRETER)


def assert_close(got, want):
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-2 * max(1, abs(want).max()))


@simulated
@pytest.mark.parametrize(
    ("num_rows", "sizes", "depth", "tiles"),
    [
        # Groups within a tile, over several, empty, and starting off a multiple of 8 rows.
        (136, [3, 0, 70, 21], 128, Tiles(128, 128, 2, 2)),
        (80, [0, 37, 30], 128, Tiles(64, 128, 2, 1)),
        # A gradient of a tile and a half; two bands of columns.
        (80, [0, 73, 0], 192, Tiles(128, 64, 3, 1)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_data_movement(num_rows, sizes, depth, tiles):
    lhs, rhs, grad, group_sizes = operands(num_rows, sizes, depth, 128)

    def product(*pairs, transpose_rhs=False):
        call = functools.partial(pallas.product, transpose_rhs=transpose_rhs, **options(tiles))
        return interpret(lambda: call(pairs, group_sizes))

    out = product((lhs, rhs))
    dlhs = product((grad, rhs), transpose_rhs=True)
    both = product((lhs, rhs), (grad, rhs[:, :128]))
    drhs = interpret(lambda: pallas.drhs(lhs, grad, group_sizes, **options(tiles)))

    x, w, g = (np.asarray(array).astype(np.float64) for array in (lhs, rhs, grad))
    ends = np.cumsum(sizes)
    want_out, want_dlhs, want_both = np.zeros(g.shape), np.zeros(x.shape), np.zeros(g.shape)
    want_drhs = np.zeros(w.shape)
    for group, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        want_out[start:end] = x[start:end] @ w[group]
        want_dlhs[start:end] = g[start:end] @ w[group].T
        want_both[start:end] = want_out[start:end] + g[start:end] @ w[group, :128]
        want_drhs[group] = x[start:end].T @ g[start:end]
    assert_close(out, want_out)
    assert_close(dlhs, want_dlhs)
    assert_close(both, want_both)
    assert_close(drhs, want_drhs)
    for rows in (out, dlhs, both):
        assert not np.any(np.asarray(rows)[ends[-1] :])


@simulated
@pytest.mark.parametrize("kernel", quick(["product", "drhs"], "product"))
def test_a_race_is_found(kernel, monkeypatch):
    """Race detection is alive: a tile is sent from shared memory before all of it is there."""
    monkeypatch.setattr("pallas_kernels.matmul.grouped_matmul.plgpu.commit_smem", lambda: None)
    lhs, rhs, grad, group_sizes = operands(80, [0, 37, 30], 128, 128)
    tiles = options(Tiles(64, 128, 2, 1))
    with pytest.raises(KernelError, match="a race"):
        if kernel == "product":
            pairs = [(lhs, rhs)]
            interpret(lambda: pallas.product(pairs, group_sizes, transpose_rhs=False, **tiles))
        else:
            interpret(lambda: pallas.drhs(lhs, grad, group_sizes, **tiles))


@needs_kernels
def test_tiles_chosen_for_many_shapes_fit_the_kernels():
    """The choice divides the output, and the kernel fits shared memory: lowering checks it."""
    for num_rows in (8, 1000, 32768):
        for num_groups in (1, 32):
            for num_cols in (64, 128, 192, 320, 768, 2880, 7168):
                tiles = backend.product_tiles(num_rows, num_groups, num_cols)
                assert num_cols % tiles.block_n == 0 and tiles.num_slots >= 3
                assert (num_cols // tiles.block_n) % tiles.band == 0
    for shape in ((7168, 2048), (64, 192), (192, 320), (128, 64)):
        tiles = backend.drhs_tiles(shape[1])
        assert shape[1] % tiles.block_n == 0
        args = [
            jax.ShapeDtypeStruct((1000, shape[0]), jnp.bfloat16),
            jax.ShapeDtypeStruct((1000, shape[1]), jnp.bfloat16),
            jax.ShapeDtypeStruct((4,), jnp.int32),
        ]
        text = jax.jit(backend.drhs).trace(*args).lower(lowering_platforms=("cuda",))
        assert "@mosaic_gpu" in text.as_text()


def test_tiles_that_cannot_be_are_refused():
    for sizes in ((96, 128), (64, 64), (128, 96)):
        with pytest.raises(ValueError, match="64 or 128 by a multiple of 64"):
            Tiles(*sizes, 2, 1)
    lhs, rhs, _, sizes = operands(64, [3, 0], 64, 128)
    three = jnp.tile(rhs[:, :, :64], 3)
    with pytest.raises(ValueError, match="192 columns are not whole tiles of 128"):
        pallas.product(
            [(lhs, three)],
            sizes,
            transpose_rhs=False,
            tiles=Tiles(128, 128, 2, 1),
            num_blocks=2,
        )
