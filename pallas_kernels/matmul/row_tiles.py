"""Computes the table of row tiles: how a grouped matmul cuts each group's rows into tiles.

In this example a letter stands for 8 rows of group a, b or c, and a tile may be 16 or 32 rows high.
Below each letter is the number of its tile within the group:

  group of the rows           a a a a a a a a a a b b b b c c c c c c
  tile within the group       0 0 0 0 1 1 1 1 2 2 0 0 0 0 0 0 0 0 1 1

A small kernel computes the table, with a thread block for each group. A group's block sums the rows
and the tiles of all groups before it, and writes the entries of its own tiles. The threads of a
warp divide the groups among them. XLA needs four launches to compute this table: a cumulative sum
of the groups' rows, a cumulative sum of their tiles, a search, and a gather.

The allowed tile heights are an operand of the kernel. So all matmuls of a program share one
kernel, though their tile heights differ.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.hardware import ROW_ALIGNMENT, WARP
from pallas_kernels.fabric.mosaic import Value, arith, llvm
from pallas_kernels.matmul.chosen_groups import ChosenGroups
from pallas_kernels.matmul.row_blocks import row_ranges

# The columns of the table of row tiles: a tile's group, its first row, and the range [begin, end)
# of its rows that belong to the group.
GROUP, FIRST, BEGIN, END = range(4)
# The number of heights is padded to a multiple of this, so that more matmuls share one kernel.
_HEIGHTS = 8
# A table of row tiles has room for the number of tiles of this height, even if the matmul's tiles
# are higher and therefore fewer. So the tables of all matmuls with tiles of 64 rows or more have
# the same shape, and one compiled kernel computes them.
_LOW = 64


def most_tiles(num_groups: int, heights: Sequence[int], num_rows: int) -> int:
    """Returns the number of tiles for which a table of row tiles has room.

    All groups together never have more tiles. The bound takes into account that a group's first
    tile begins at a multiple of 8, up to 7 rows before the group, and that its last tile may end
    after the group.
    """
    height = min(heights[-1], _LOW)
    return (num_rows + (ROW_ALIGNMENT - 1) * num_groups) // height + num_groups


def table_of(
    groups: jax.Array | ChosenGroups,
    heights: tuple[int, ...],
    num_rows: int,
    *,
    interpreted: bool,
) -> jax.Array:
    """Returns the table of row tiles for group sizes [L], or that of chosen groups.

    The other arguments are those of `row_tiles`.
    """
    if isinstance(groups, ChosenGroups):
        return groups.table
    return row_tiles(groups, heights, num_rows, interpreted=interpreted)


def row_tiles(
    group_sizes: jax.Array, heights: tuple[int, ...], num_rows: int, *, interpreted: bool = False
) -> jax.Array:
    """Returns the table of row tiles: which rows each tile of a grouped matmul has.

    A group is cut into as few tiles as possible, given the largest of `heights`. These tiles have
    equal heights, but the last one may be lower.

    Args:
      group_sizes: [L] int32, the number of rows of each group, in order. A negative size counts as
        0, and groups are cut off at `num_rows`.
      heights: the numbers of rows that a tile may have, multiples of 8 in rising order.
      num_rows: the number of rows of the operand, an upper bound of the rows in groups.
      interpreted: whether XLA computes the table, on any machine, instead of a kernel on a GPU.

    Returns:
      [most_tiles + 1, 4] int32. An entry describes a tile: its group, its first row (a multiple of
      8), and the range [begin, end) of its rows that belong to the group. The last entry instead
      begins with the number of tiles, and the number of rows in groups. Entries after the last tile
      and before the last entry are undefined. Entry 0 is valid even if there are no tiles, since
      kernels look it up before they know the number of tiles.
    """
    return (by_xla if interpreted else by_kernel)(group_sizes, heights, num_rows)


def by_xla(group_sizes: jax.Array, heights: tuple[int, ...], num_rows: int) -> jax.Array:
    num_groups = group_sizes.shape[0]
    starts, ends = row_ranges(group_sizes, num_rows)
    group_sizes = ends - starts
    first = starts // ROW_ALIGNMENT * ROW_ALIGNMENT
    counts = jnp.where(group_sizes > 0, -((first - ends) // heights[-1]), 0)
    height = _lowest(list(heights), -((first - ends) // jnp.maximum(counts, 1)))
    tile_ends = jnp.cumsum(counts, dtype=jnp.int32)
    most = most_tiles(num_groups, heights, num_rows)
    tile = jnp.arange(most + 1, dtype=jnp.int32)
    group = jnp.sum(tile[:, None] >= tile_ends[:-1], axis=1, dtype=jnp.int32)
    row = first[group] + (tile - (tile_ends - counts)[group]) * height[group]
    end = jnp.minimum(row + height[group], ends[group])
    table = jnp.stack([group, row, jnp.maximum(row, starts[group]), end], axis=1)
    totals = jnp.stack([tile_ends[-1], ends[-1], ends[-1], ends[-1]])
    return jnp.where(tile[:, None] == most, totals, table)


def _lowest(heights: Sequence[Any], rows: jax.Array) -> jax.Array:
    """Returns the least of the tile `heights` that is at least `rows`; if none is, the largest."""
    lowest = jnp.full_like(rows, heights[-1])
    for height in reversed(heights[:-1]):
        lowest = jnp.where(rows <= height, height, lowest)
    return lowest


def by_kernel(
    group_sizes: jax.Array, heights: tuple[int, ...], num_rows: int, *, interpret: Any = None
) -> jax.Array:
    """Computes the table that `row_tiles` returns by a Pallas kernel.

    `interpret` is the options of Pallas' GPU interpreter, or None to run on a GPU. The other
    arguments are those of `row_tiles`.
    """
    most = most_tiles(group_sizes.shape[0], heights, num_rows)
    padded = [*heights, *[heights[-1]] * (-len(heights) % _HEIGHTS)]
    call = _call if interpret else _call_once
    return call(group_sizes, jnp.asarray(padded, jnp.int32), most, num_rows, interpret)


def _call(
    group_sizes: jax.Array, heights: jax.Array, most: int, num_rows: int, interpret: Any
) -> jax.Array:
    num_groups, num_heights = group_sizes.shape[0], heights.shape[0]

    def kernel(sizes: Any, all_heights: Any, table: Any) -> None:
        own = lax.axis_index("block")
        heights = [all_heights[i] for i in range(num_heights)]

        def cut_off(size, start):
            """Returns the rows of a group that starts at row `start`, without those cut off."""
            size = jnp.clip(size, 0, num_rows)
            return jnp.minimum(start + size, num_rows) - start

        def tiles_of(start, size):
            """Returns the number of tiles of a group of `size` rows that starts at row `start`."""
            return jnp.where(
                size > 0,
                lax.div(lax.rem(start, ROW_ALIGNMENT) + size + (heights[-1] - 1), heights[-1]),
                0,
            )

        def write(entry, *values):
            for column, value in enumerate(values):
                table[entry, column] = value

        def count_one(group, totals):
            rows, tiles = totals
            size = cut_off(sizes[group], rows)
            return rows + size, tiles + tiles_of(rows, size)

        zero = jnp.int32(0)
        if interpret:
            start, before = lax.fori_loop(zero, own, count_one, (zero, zero))
        else:
            start, before = _rows_and_tiles_before(sizes, own, heights[-1], num_rows)

        @pl.when(own < num_groups)
        def _group():
            size = cut_off(sizes[own], start)
            first = start - lax.rem(start, ROW_ALIGNMENT)
            tiles = tiles_of(start, size)
            parts = jnp.maximum(tiles, 1)
            height = _lowest(heights, lax.div(start + size - first + (parts - 1), parts))

            def write_tile(i, _):
                row = first + i * height
                end = jnp.minimum(row + height, start + size)
                write(before + i, own, row, jnp.maximum(row, start), end)

            lax.fori_loop(0, tiles, write_tile, None)

        @pl.when(own == num_groups)
        def _totals():
            write(most, before, start, start, start)

            @pl.when(before == 0)
            def _no_tiles():
                write(0, zero, zero, zero, zero)

    return mosaic.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((most + 1, 4), jnp.int32),
        grid=(num_groups + 1,),
        grid_names=("block",),
        interpret=interpret,
        kernel_name="row_tiles",
    )(group_sizes, heights)


def _rows_and_tiles_before(
    sizes: Any, own: jax.Array, height: jax.Array, num_rows: int
) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of rows and of tiles of all groups before group `own`.

    `sizes` is a reference to the sizes of the groups, and `height` the largest height of a tile.
    Each thread of a warp sums the rows of a few neighbouring groups. By a prefix sum over the warp,
    it gets the rows before its groups, from which it computes their tiles.
    """
    num_groups = sizes.shape[0]
    count = -(-num_groups // WARP)

    def emit(sizes: Any, *numbers: Any) -> list[Any]:
        own, height = (mosaic.scalar(number) for number in numbers)
        zero, most, word = mosaic.i32(0), mosaic.i32(num_rows), mosaic.integer_type(32)
        lane = arith.andi(mosaic.warpgroup_thread(), mosaic.i32(WARP - 1))
        first = arith.muli(lane, mosaic.i32(count))

        def added(a: Value, b: Value) -> Value:
            return arith.minsi(arith.addi(a, b), most)

        all_rows = []
        for i in range(count):
            group = arith.addi(first, mosaic.i32(i))
            within = arith.minui(group, mosaic.i32(num_groups - 1))
            place = mosaic.element_pointer(mosaic.pointer(sizes), within, word)
            size = arith.minsi(arith.maxsi(llvm.load(word, place), zero), most)
            all_rows.append(arith.select(mosaic.below(group, own), size, zero))
        inclusive = functools.reduce(added, all_rows)
        for distance in (1, 2, 4, 8, 16):
            other = mosaic.shuffle_up(inclusive, distance)
            exists = mosaic.below(mosaic.i32(distance - 1), lane)
            inclusive = added(inclusive, arith.select(exists, other, zero))
        start = mosaic.shuffle_up(inclusive, 1)
        start = arith.select(mosaic.equal(lane, zero), zero, start)
        tiles = zero
        for size in all_rows:
            end = added(start, size)
            above = arith.andi(start, mosaic.i32(ROW_ALIGNMENT - 1))
            high = arith.addi(above, arith.subi(end, start))
            high = arith.addi(high, arith.subi(height, mosaic.i32(1)))
            some = arith.divui(high, height)
            tiles = arith.addi(tiles, arith.select(mosaic.equal(start, end), zero, some))
            start = end
        # The last thread has the rows of all groups before `own`.
        rows = mosaic.warp_max(start)
        return [mosaic.splat(each, is_signed=True) for each in (rows, mosaic.warp_total(tiles))]

    scalar = plgpu.ShapeDtypeStruct((), jnp.int32, layout=mosaic.SCALAR)
    layouts = [mosaic.REFERENCE, *[mosaic.SCALAR] * 2]
    start, before = mosaic.inline(emit, [sizes, own, height], layouts, [scalar] * 2)
    return start, before


# The function that calls the kernel is jitted, so that a program with several matmuls traces the
# kernel only once.
_call_once = functools.partial(jax.jit, static_argnums=(2, 3, 4))(_call)
