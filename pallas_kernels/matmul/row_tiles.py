"""Computes the table of row tiles: how a grouped matmul cuts each group's rows into tiles.

A letter stands for 8 rows of group a, b or c, and a tile may be 16 or 32 rows high:

  group of the rows           a a a a a a a a a a b b b b c c c c c c
  tile within the group       0 0 0 0 1 1 1 1 2 2 0 0 0 0 0 0 0 0 1 1

XLA needs four launches for the table: two cumulative sums, a search, and a gather. A small kernel
computes it, with a thread block for each group, which sums the rows and the tiles of all groups
before its own. Tile heights are an operand, so all matmuls of a program share one kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.fabric import compiler, mosaic
from pallas_kernels.fabric.hardware import ROW_ALIGNMENT, WARP
from pallas_kernels.fabric.mosaic import Value, arith
from pallas_kernels.matmul.chosen_groups import ChosenGroups, Groups

# The table's columns: a tile's group, its first row, and its rows in the group, [begin, end).
GROUP, FIRST, BEGIN, END = range(4)
# The number of heights is padded to a multiple of this, so that more matmuls share one kernel.
_HEIGHTS = 8
# A table has room for the number of tiles of this height, even if the matmul's tiles are higher. So
# the tables of all matmuls with tiles of 64 rows or more have one shape, and one compiled kernel.
_LOW = 64


def most_tiles(
    num_groups: int, heights: Sequence[int], num_rows: int, alignment: int = ROW_ALIGNMENT
) -> int:
    """Returns the number of tiles for which a table has room, which groups never exceed."""
    # A group's first tile may begin before the group, its last may be partly empty.
    height = min(heights[-1], _LOW)
    return (num_rows + (alignment - 1) * num_groups) // height + num_groups


def table_of(groups: Groups, heights: tuple[int, ...], num_rows: int) -> jax.Array:
    if isinstance(groups, ChosenGroups):
        return groups.table
    return row_tiles(groups, heights, num_rows)


def row_tiles(
    group_sizes: jax.Array,
    heights: tuple[int, ...],
    num_rows: int,
    alignment: int = ROW_ALIGNMENT,
) -> jax.Array:
    """Returns the table of row tiles: which rows each tile of a grouped matmul has.

    A group is cut into as few tiles as possible, given the largest of `heights`. These tiles have
    equal heights, but the last one may be lower. Negative sizes are 0; `num_rows` cuts groups off.

    Args:
      group_sizes: [L] int32, the number of rows of each group, in order.
      heights: the numbers of rows that a tile may have, multiples of `alignment` in rising order.
      alignment: a tile's first row is a multiple of it; a power of two.

    Returns:
      [most_tiles + 1, 4] int32: a tile's group, its first row, and the range [begin, end) of its
      rows that belong to the group. The last entry instead begins with the number of tiles, and the
      number of rows in groups. Entries between these are undefined, but entry 0 is valid even
      without tiles, since kernels look it up before they know the number.
    """
    most = most_tiles(group_sizes.shape[0], heights, num_rows, alignment)
    padded = [*heights, *[heights[-1]] * (-len(heights) % _HEIGHTS)]
    return _call(group_sizes, jnp.asarray(padded, jnp.int32), most, num_rows, alignment)


def _lowest(heights: Sequence[Any], rows: jax.Array) -> jax.Array:
    """Returns the least of the tile `heights` that is at least `rows`; if none is, the largest."""
    lowest = jnp.full_like(rows, heights[-1])
    for height in reversed(heights[:-1]):
        lowest = jnp.where(rows <= height, height, lowest)
    return lowest


# Jitted, so that a program with several matmuls traces the kernel only once.
@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _call(
    group_sizes: jax.Array, heights: jax.Array, most: int, num_rows: int, alignment: int
) -> jax.Array:
    """Computes the table of `row_tiles` by a kernel; it has room for `most` tiles."""
    num_groups, num_heights = group_sizes.shape[0], heights.shape[0]

    def kernel(sizes: Any, all_heights: Any, table: Any) -> None:
        # Each block writes the tiles of one group; the last one has no group, and writes totals.
        group = lax.axis_index("block")
        heights = [all_heights[i] for i in range(num_heights)]

        def write(entry, *numbers):
            for column, number in enumerate(numbers):
                table[entry, column] = number

        zero = jnp.int32(0)
        start, tiles_before = _rows_and_tiles_before(sizes, group, heights[-1], num_rows, alignment)

        @pl.when(group < num_groups)
        def _group():
            # The group has rows [start, end), without those cut off.
            end = jnp.minimum(start + jnp.clip(sizes[group], 0, num_rows), num_rows)
            first = start - lax.rem(start, alignment)
            # The number of tiles of the largest height that cover rows [first, end).
            tiles = lax.div(end - first + (heights[-1] - 1), heights[-1])
            tiles = jnp.where(end > start, tiles, 0)
            # The lowest height at which so many tiles cover these rows.
            divisor = jnp.maximum(tiles, 1)
            height = _lowest(heights, lax.div(end - first + (divisor - 1), divisor))

            def write_tile(i, _):
                row = first + i * height
                end_of_tile = jnp.minimum(row + height, end)
                write(tiles_before + i, group, row, jnp.maximum(row, start), end_of_tile)

            lax.fori_loop(0, tiles, write_tile, None)

        @pl.when(group == num_groups)
        def _totals():
            # Kernels read only the first two numbers, of tiles and of rows.
            write(most, tiles_before, start, start, start)

            # Kernels look entry 0 up before they know the number of tiles.
            @pl.when(tiles_before == 0)
            def _no_tiles():
                write(0, zero, zero, zero, zero)

    return compiler.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((most + 1, 4), jnp.int32),
        num_blocks=num_groups + 1,
        kernel_name="row_tiles",
    )(group_sizes, heights)


def _rows_and_tiles_before(
    sizes: Any, end_group: jax.Array, height: jax.Array, num_rows: int, alignment: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of rows and of tiles of all groups before group `end_group`."""
    # `sizes` is [L] int32, in memory; `height` is the largest of the tile heights.
    # Each thread of a warp sums the rows of a few neighbouring groups. By a prefix sum over the
    # warp, it gets the rows before its groups, from which it computes their tiles.
    num_groups = sizes.shape[0]
    groups_of_thread = -(-num_groups // WARP)

    def emit(sizes: Any, *numbers: Any) -> list[Any]:
        end_group, height = (mosaic.scalar(number) for number in numbers)
        zero, most_rows = mosaic.i32(0), mosaic.i32(num_rows)
        lane = arith.andi(mosaic.warpgroup_thread(), mosaic.i32(WARP - 1))
        first = mosaic.mul(lane, groups_of_thread)

        def cut_sum(a: Value, b: Value) -> Value:
            # Adds numbers of rows, cut off at `num_rows`.
            return arith.minsi(mosaic.add(a, b), most_rows)

        group_rows = []
        for i in range(groups_of_thread):
            group = mosaic.add(first, i)
            # Groups from `end_group` on count as empty, and so do indices past the last group.
            valid = arith.minui(group, mosaic.i32(num_groups - 1))
            size = arith.minsi(arith.maxsi(mosaic.element_at(sizes, valid), zero), most_rows)
            group_rows.append(arith.select(mosaic.below(group, end_group), size, zero))
        # The rows of this thread's groups and, after the loop, also of all threads before.
        inclusive = functools.reduce(cut_sum, group_rows)
        for distance in (1, 2, 4, 8, 16):
            other = mosaic.shuffle_up(inclusive, distance)
            exists = mosaic.below(mosaic.i32(distance - 1), lane)
            inclusive = cut_sum(inclusive, arith.select(exists, other, zero))
        # The rows of all threads before, without this one.
        start = mosaic.shuffle_up(inclusive, 1)
        start = arith.select(mosaic.equal(lane, zero), zero, start)
        tiles = zero
        for size in group_rows:
            end = cut_sum(start, size)
            # The first tile may begin above the group.
            above = arith.andi(start, mosaic.i32(alignment - 1))
            to_cover = mosaic.add(above, arith.subi(end, start))
            rounded_up = mosaic.add(to_cover, arith.subi(height, mosaic.i32(1)))
            group_tiles = arith.divui(rounded_up, height)
            tiles = mosaic.add(tiles, arith.select(mosaic.equal(start, end), zero, group_tiles))
            start = end
        # The last thread has the rows of all groups before `end_group`.
        rows = mosaic.warp_max(start)
        return [mosaic.splat(each, is_signed=True) for each in (rows, mosaic.warp_total(tiles))]

    return mosaic.inline(emit, [sizes, end_group, height], [mosaic.INT32] * 2)
