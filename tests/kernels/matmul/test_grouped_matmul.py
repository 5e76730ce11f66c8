"""Tests of the grouped matmul in Pallas' GPU interpreter, with race detection."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.kernels import needs_kernels
from support.matmuls import assert_close, expected, operands
from support.simulator import KernelError, interpret, simulated

from jax_ep.matmul import pallas as backend
from pallas_kernels.matmul import kernel
from pallas_kernels.matmul.grouped_matmul import Matrices, Product, Tiles, grouped_matmul
from pallas_kernels.matmul.mxfp4_matmul import Mxfp4Matrices


def run(pairs, group_sizes, tiles, transpose_rhs=False, zero_unused=True):
    """Runs `grouped_matmul` in the interpreter, which raises an error if there is a race.

    Args:
        pairs: (rows, matrices of the groups) for each product; the products are added.
        group_sizes: [L] int32, the rows of each group.
        tiles: the kernel's `Tiles`.
        transpose_rhs: whether the matrices are transposed.
        zero_unused: whether the kernel writes zeros past the last group.

    Returns:
        The sum of the products, [R, N].
    """
    options = dict(transpose_rhs=transpose_rhs, tiles=tiles, zero_unused=zero_unused)
    return interpret(lambda: grouped_matmul(pairs, group_sizes, num_blocks=2, **options))


@pytest.mark.parametrize("least_tiles", [1, 8])
@pytest.mark.parametrize("num_waves", [1, 2, 3])
def test_waves_walk_over_all_tiles_in_order(monkeypatch, num_waves, least_tiles):
    """Each tile belongs to one thread block, and a wave's tiles come before the next wave's."""
    monkeypatch.setattr(kernel, "_LEAST_TILES", least_tiles)
    walker = kernel.Kernel(Tiles((16,), 128, 3, 1), 4, 128, num_waves=num_waves)

    @functools.partial(jax.vmap, axis_name="block", axis_size=4 * num_waves, in_axes=None)
    def walked(total):
        def body(tile, exists, found):
            return found.at[tile].add(jnp.asarray(exists, jnp.int32))

        none = jnp.zeros(100, jnp.int32)
        tiles = walker.block_tiles(total)
        return tiles.walk(lambda tile: tile, body, none, once_more=True)

    for total in (0, 1, 3, 4, 5, 13, 32, 33, 64, 65, 99, 100):
        found = np.asarray(jax.jit(walked)(jnp.int32(total))).reshape(num_waves, 4, 100)
        np.testing.assert_array_equal(found.sum((0, 1)), np.arange(100) < total)
        of_tile = found.sum(1).argmax(0)[:total]
        assert np.all(np.diff(of_tile) >= 0)
        most = max(-(-total // (4 * num_waves)), least_tiles)
        assert found.sum(2).max() <= most
        assert len(set(of_tile)) == -(-total // (4 * most))


@simulated
@pytest.mark.slow
def test_rows_past_the_last_group_may_stay_as_they_are():
    lhs, rhs, group_sizes, _ = operands(48, [3, 0, 21], "bfloat16")
    tiles = Tiles((16, 32), 128, 3, 1)
    left, zeroed = (
        np.asarray(run([(lhs, rhs)], group_sizes, tiles, zero_unused=zero_unused))
        for zero_unused in (False, True)
    )
    np.testing.assert_array_equal(left[:24], zeroed[:24])
    assert np.all(np.isnan(left[24:].astype(np.float32))) and not np.any(zeroed[24:])


@simulated
@pytest.mark.parametrize(
    ("num_rows", "sizes", "width", "tiles"),
    [
        # Groups lie within a tile, span several tiles, are empty, or start off a multiple of 8
        # rows.
        (136, [3, 0, 70, 21], 128, Tiles((16, 48, 64), 128, 3, 2)),
        # The output is one and a half tiles wide. Each compute warpgroup has 128 of a tile's 256
        # columns, in two parts of 64.
        (80, [0, 37, 30], 384, Tiles((32,), 256, 3, 1)),
        # The output has 64 columns, all in the first compute warpgroup's half of the tile.
        (320, [1, 300, 19], 64, Tiles((136, 256), 128, 3, 3)),
        # There are three columns of tiles in two bands: the first has two of them, the second one.
        (80, [0, 73, 0], 384, Tiles((48, 80), 128, 3, 1, 2)),
        # Tiles are higher than the whole array, and some groups have no rows.
        (8, [5, 0], 128, Tiles((64, 256), 128, 3, 1)),
        (8, [0, 0], 128, Tiles((64,), 128, 3, 1)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_product(num_rows, sizes, width, tiles):
    args = operands(num_rows, sizes, "bfloat16", matrix_shape=(128, width))
    lhs, rhs, group_sizes, grad = args
    out = run([(lhs, rhs)], group_sizes, tiles)
    dlhs = run([(grad, rhs)], group_sizes, tiles, transpose_rhs=True)
    both = run([(lhs, rhs), (grad[:, :64], rhs[:, :64])], group_sizes, tiles)
    want_out, want_dlhs, _ = expected(*args)
    of_second, *_ = expected(grad[:, :64], rhs[:, :64], group_sizes, grad)
    for got, want in ((out, want_out), (dlhs, want_dlhs), (both, want_out + of_second)):
        assert_close(got, want, "bfloat16")
        assert not np.any(np.asarray(got)[sum(sizes) :])


@simulated
def test_a_race_is_found(monkeypatch):
    """Sending a tile from shared memory before it is complete must be found as a race."""
    monkeypatch.setattr("pallas_kernels.matmul.store.plgpu.commit_smem", lambda: None)
    lhs, rhs, group_sizes, _ = operands(80, [0, 37, 30], "bfloat16")
    with pytest.raises(KernelError, match="a race"):
        run([(lhs, rhs)], group_sizes, Tiles((32,), 128, 3, 1))


@needs_kernels
@pytest.mark.parametrize("registers_move", [False, True])
def test_tiles_chosen_for_many_shapes(monkeypatch, registers_move):
    monkeypatch.setattr(backend, "REGISTERS_MOVE", registers_move)
    for num_rows in (8, 1000, 32768):
        for num_groups in (1, 32):
            for num_cols in (64, 128, 192, 320, 768, 2880, 7168):
                tiles = backend.product_tiles(num_rows, num_groups, num_cols)
                assert num_cols % tiles.part == 0
                assert tiles.num_stages >= 3 and tiles.num_buffers >= 2
    # Many rows with few columns get half as high tiles, so that all multiprocessors have one.
    assert backend.product_tiles(1024, 1, 2048).heights == (64, 128)
    highest = [backend.product_tiles(num_rows, 64, 2048).block_m for num_rows in (16384, 36864)]
    assert highest == ([256, 256] if registers_move else [144, 176])
    assert backend.product_tiles(1152, 64, 2048).block_n == 256


def test_a_loader_where_registers_are_enough(monkeypatch):
    """Without `setmaxnreg`, only kernels with few sums in a thread have a loader warpgroup."""
    sizes = dict(num_blocks=1, width=256, depths=(64,), transpose_rhs=False, shared_rows=False)

    def has_loader(registers_move, matrices, *tiles):
        monkeypatch.setattr(kernel, "REGISTERS_MOVE", registers_move)
        product = Product(tiles=Tiles(*tiles), matrices=matrices, zero_unused=False, **sizes)
        return product.has_loader

    for height, columns, in_bfloat16, in_mxfp4 in (
        (176, 128, True, False),
        (208, 128, False, False),
        (128, 128, True, True),
        (64, 256, True, True),
        (128, 256, False, False),
    ):
        tiles = (height,), columns, 3, 2
        assert has_loader(False, Matrices, *tiles) == in_bfloat16
        assert has_loader(False, Mxfp4Matrices, *tiles) == in_mxfp4
        assert has_loader(True, Matrices, *tiles)


def test_columns_in_bands_of_about_the_same_width():
    for num_cols, block_n, most, want in (
        (2048, 128, 16, 16),
        (7168, 128, 16, 14),
        (768, 256, 16, 3),
        # There are 23 columns of tiles, which two bands divide: 12 in the first, 11 in the second.
        (2880, 128, 16, 12),
        (64, 128, 16, 1),
    ):
        assert backend.band(num_cols, block_n, most) == want


def test_tiles_that_cannot_be_are_refused():
    for heights in ((20, 64), (64, 264), (64, 32), (0, 64), ()):
        with pytest.raises(
            ValueError, match="heights must be multiples of 8 from 8 to 256 in rising order"
        ):
            Tiles(heights, 128, 3, 1)
    for block_n in (32, 192, 512):
        with pytest.raises(ValueError, match="block_n must be 64, 128 or 256"):
            Tiles((64,), block_n, 3, 1)
    for buffers, says in (
        ((2, 1), "num_stages must be at least 3"),
        ((3, 0), "num_buffers must be positive"),
        ((3, 1, 0), "band at least 1"),
    ):
        with pytest.raises(ValueError, match=says):
            Tiles((64,), 128, *buffers)
    lhs, rhs, group_sizes, _ = operands(64, [3, 0], "bfloat16", matrix_shape=(64, 192))
    with pytest.raises(ValueError, match="block_n must be at least 128 .* but is 64"):
        tiles = Tiles((32,), 64, 3, 1)
        grouped_matmul([(lhs, rhs)], group_sizes, transpose_rhs=False, tiles=tiles, num_blocks=2)
    with pytest.raises(ValueError, match="must be a multiple of 128 for block_n=256, but is 192"):
        tiles = Tiles((32,), 256, 3, 1)
        grouped_matmul([(lhs, rhs)], group_sizes, transpose_rhs=False, tiles=tiles, num_blocks=2)
