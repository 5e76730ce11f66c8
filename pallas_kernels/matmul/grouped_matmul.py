"""Grouped matmul on Hopper's tensor cores: rows in groups, one matrix for each group.

The rows of every group are cut into tiles of their own, and the columns of the output into tiles of
`block_n`. Groups are a, b and c, a letter stands for 8 rows, and a box is an output tile:

  rows [R, K]    matrices [L, K, N]      output [R, N]
  a              a        b              +---+---+---+
  a              +-----+  +-----+        |   |   |   |  tiles of a's rows times a's matrix
  a              |     |  |     |  ...   +---+---+---+
  b              |     |  |     |        |   |   |   |  of b's
  b              +-----+  +-----+        +---+---+---+
  c                                      |   |   |   |  of c's
  -                                      +---+---+---+
  -  past the last group                  zeros, or as they were

Tiles start at a multiple of 8 rows, the height of the tensor cores' shared-memory tiles, so a tile
may begin with up to 7 rows of the group before, and end with rows of the next one. These are
multiplied, too, and not stored.

`pallas_kernels.matmul.kernel` has the warpgroups' roles: the loader (`_Loader`) copies tiles of the
rows and of their group's matrix into the ring, and the computers (`_Computer`) multiply and store
them (`pallas_kernels.matmul.store`). A kernel that computes something else from the sums, or has
several matrices per group, overrides members of `Product`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric.hardware import SHARED_MEMORY_BYTES
from pallas_kernels.matmul.kernel import (
    CHUNK,
    COMPUTERS,
    OTHER_BYTES,
    STEP,
    Choice,
    Kernel,
    Ring,
    aligned,
    check_buffers,
    launch,
    transposed,
    zeros,
)
from pallas_kernels.matmul.row_tiles import BEGIN, END, FIRST, GROUP, row_tiles
from pallas_kernels.matmul.store import STORED_ROWS, Buffers, Place, Store


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tile sizes of a `product`, and the depth of its buffers in shared memory.

    Attributes:
      heights: the numbers of rows that a block's output tile may have, in rising order: multiples
        of 8 up to 256, as one instruction of the tensor cores multiplies.
      block_n: width of a block's output tile, 128 or 256; each computer takes half of it.
      num_stages: depth of the ring, in operand tiles of 64 along the summed dimension.
      num_buffers: 32 x 64 chunks of its results that a computer may have on their way to memory.
      band: how many columns of tiles the blocks sweep together, from the first row to the last.
    """

    heights: tuple[int, ...]
    block_n: int
    num_stages: int
    num_buffers: int
    band: int = 1

    @classmethod
    def fitting(
        cls, heights: tuple[int, ...], block_n: int, band: int = 1, *, matrices: int = 1
    ) -> Tiles:
        """Returns tiles with the deepest ring that fits, of at most 6 stages, and buffers.

        A stage holds a tile of each of a group's `matrices`.
        """
        operand, chunk = 2 * STEP, 2 * CHUNK * STORED_ROWS
        room = SHARED_MEMORY_BYTES - OTHER_BYTES
        stage = operand * (heights[-1] + matrices * block_n)
        stages = min((room - COMPUTERS * (1 + matrices) * chunk) // stage, 6)
        buffers = min((room - stages * stage) // (COMPUTERS * chunk), 8)
        return cls(heights, block_n, stages, buffers, band)

    @property
    def block_m(self) -> int:
        """The most rows of a block's output tile."""
        return self.heights[-1]

    @property
    def part(self) -> int:
        """Columns of a computer's part of an output tile."""
        return self.block_n // COMPUTERS

    def __post_init__(self) -> None:
        rising = list(self.heights) == sorted(set(self.heights))
        whole = all(height % 8 == 0 and 8 <= height <= 256 for height in self.heights)
        if not self.heights or not rising or not whole or self.block_n not in (128, 256):
            raise ValueError(
                "a tile is of rows in multiples of 8 up to 256, heights in rising order, and of "
                f"128 or 256 columns, not {self}."
            )
        if self.num_buffers < 1:
            raise ValueError(f"num_buffers must be positive, not {self}.")
        check_buffers(self)


def product(
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
    tiles: Tiles,
    num_blocks: int,
    zero_unused: bool = True,
    interpret: Any = None,
) -> jax.Array:
    """Multiplies each row by its group's matrix, and sums the products of all pairs.

    Args:
      pairs: (lhs [R, K], rhs [L, K, N]) pairs of bfloat16 or float16, all of one dtype; rhs is
        [L, N, K] with `transpose_rhs`. R is a multiple of 8, K of 64, N of tiles.part.
      group_sizes: [L] int32, rows of each group, in order.
      transpose_rhs: whether the matrices are given transposed.
      tiles: tile sizes, and depth of buffers.
      num_blocks: thread blocks to use.
      zero_unused: whether rows past the last group are zero; else they are not written.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      [R, N] of the operands' dtype. Sums are float32, in the same accumulators for all pairs, and
      are rounded once. The kernel reads rows past the last group no further than the last group's
      last tile.
    """
    lhs, rhs = pairs[0]
    num_rows, width = lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    depths = tuple(lhs.shape[1] for lhs, _ in pairs)
    kernel = Product(
        tiles,
        num_blocks,
        bool(interpret),
        width,
        depths,
        transpose_rhs=transpose_rhs,
        zero_unused=zero_unused,
    )
    table = row_tiles(group_sizes, tiles.heights, num_rows, interpreted=bool(interpret))
    return launch(
        kernel,
        kernel.scratch_types(lhs.dtype),
        jax.ShapeDtypeStruct((num_rows, width), lhs.dtype),
        "grouped_matmul",
        interpret,
    )(*(operand for pair in pairs for operand in pair), table)


@dataclasses.dataclass(frozen=True)
class Product(Kernel):
    """The kernel of `product`: sums over pairs of the given depths, K.

    The tensor cores compute tiles transposed, columns of the output by rows: the number of rows of
    an instruction is then free in steps of 8, and a tile is as high as its rows need.
    """

    depths: tuple[int, ...]
    transpose_rhs: bool
    zero_unused: bool

    @property
    def matrices(self) -> int:
        """Returns how many matrices of a group multiply the same rows."""
        return 1

    @property
    def outputs(self) -> int:
        return 1

    @property
    def holds(self) -> bool:
        """Returns whether registers have room for a tile's results next to the accumulators.

        If so, a tile is stored while the next one is multiplied.
        """
        return True

    def results(
        self, total: jax.Array, dtype: Any, columns: slice, rows: slice
    ) -> tuple[jax.Array, ...]:
        """Returns the elements at some columns and rows of each output, [columns, rows].

        `total` are the accumulators, [part, block_m] for each of `matrices`, side by side.
        """
        return (total[columns, rows].astype(dtype),)

    def __post_init__(self) -> None:
        if self.width % self.tiles.part:
            raise ValueError(
                f"the output's {self.width} columns are not whole parts of {self.tiles.part}, half "
                f"a tile's."
            )

    def scratch_types(self, dtype: Any) -> dict[str, Any]:
        tiles = self.tiles
        right = (tiles.block_n, STEP) if self.transpose_rhs else (STEP, tiles.block_n)
        num_buffers = max(tiles.num_buffers, self.outputs)  # at least one of each output
        return dict(
            ring=Ring.types(dtype, tiles.num_stages, (tiles.block_m, STEP), right, self.matrices),
            buffers=Buffers.types(dtype, num_buffers, self.interpreted),
        )

    def __call__(self, *refs: Any, ring: Ring, buffers: Buffers) -> None:
        *operands, table = refs[: -self.outputs]
        outs = refs[-self.outputs :]
        last = table.shape[0] - 1
        tiles = _RowTiles(table, self.tiles.heights, table[last, 0], table[last, 1])
        loader = _Loader(self, ring, tiles, operands)

        def compute(number: jax.Array) -> None:
            sizes = self.tiles.block_m, self.tiles.part
            store = Store(outs, buffers.of(number), *sizes, self.interpreted)
            _Computer(self, ring, tiles, store, number).run()

        self.take_roles(loader.run, compute)


@dataclasses.dataclass(frozen=True)
class _RowTiles:
    """The tiles that the rows are cut into, in the kernel's body.

    Attributes:
      table: a reference to what `row_tiles` returns.
      heights: the heights that a tile may have, in rising order.
      count: how many tiles there are.
      num_rows: how many rows are in groups.
    """

    table: Any
    heights: tuple[int, ...]
    count: jax.Array
    num_rows: jax.Array

    def kind_of(self, tile: jax.Array) -> jax.Array:
        """Returns the index in `heights` of the lowest that holds the tile's rows."""
        rows = self.table[tile, END] - self.table[tile, FIRST]
        lower = (rows > height for height in self.heights[:-1])
        return sum((each.astype(jnp.int32) for each in lower), jnp.int32(0))


@dataclasses.dataclass(frozen=True)
class _Loader:
    """The loader; `operands` are references to the rows and to the matrices of each pair."""

    kernel: Product
    ring: Ring
    rows: _RowTiles
    operands: Sequence[Any]

    def run(self) -> None:
        total = self.rows.count * self.kernel.tile_columns
        used = self.kernel.walk(total, self._look_up, self._load_tile, jnp.int32(0))
        self.ring.drain(used)

    def _look_up(self, index: jax.Array) -> tuple[jax.Array, ...]:
        """Returns a tile's group, first row and column, and the index of its height."""
        tile, left_edge = self.kernel.place(index, self.rows.count)
        table = self.rows.table
        return table[tile, GROUP], table[tile, FIRST], left_edge, self.rows.kind_of(tile)

    def _load_tile(self, tile: Sequence[jax.Array], _: Any, used: jax.Array) -> jax.Array:
        """Fills the stages of a tile's steps, over all pairs; returns the steps used so far."""
        together = 1 + self.kernel.matrices  # operands that are loaded together
        for k, depth in enumerate(self.kernel.depths):
            lhs, *rhs = self.operands[k * together : (k + 1) * together]
            fill = functools.partial(self._fill_stage, tile, lhs, rhs)
            used = lax.fori_loop(0, depth // STEP, fill, used)
        return used

    def _fill_stage(
        self, tile: Sequence[jax.Array], lhs: Any, rhs: Sequence[Any], i: jax.Array, used: jax.Array
    ) -> jax.Array:
        group, first, left_edge, kind = tile
        inner = pl.ds(i * STEP, STEP)
        columns = pl.ds(pl.multiple_of(left_edge, CHUNK), self.kernel.tiles.block_n)
        place = (columns, inner) if self.kernel.transpose_rhs else (inner, columns)
        of_heights = [lhs.at[pl.ds(aligned(first), height), inner] for height in self.rows.heights]
        rights = [Choice([matrix.at[group, *place]]) for matrix in rhs]
        return self.ring.fill(used, Choice(of_heights, kind), rights)


@dataclasses.dataclass(frozen=True)
class _Computer:
    """The computer of index `number`: multiplies and stores its columns of each tile."""

    kernel: Product
    ring: Ring
    rows: _RowTiles
    store: Store
    number: jax.Array

    def run(self) -> None:
        kernel, zero = self.kernel, jnp.int32(0)
        total = self.rows.count * kernel.tile_columns
        nothing = zeros(self._shape, self._dtype, plgpu.Layout.WGMMA, kernel.interpreted)
        held = (nothing,) * kernel.outputs if kernel.holds else ()
        carry = zero, (Place(zero, zero, zero, zero), held)
        kernel.walk(total, self._look_up, self._compute_tile, carry, once_more=kernel.holds)
        if kernel.zero_unused:
            worker = lax.axis_index("block") * COMPUTERS + self.number
            self.store.zeros_from(self.rows.num_rows, worker, kernel.num_blocks * COMPUTERS)

    @property
    def _dtype(self) -> Any:
        return self.store.outs[0].dtype

    @property
    def _shape(self) -> tuple[int, int]:
        """The shape of a result of a tile: columns by rows."""
        return self.kernel.tiles.part, self.kernel.tiles.block_m

    def _look_up(self, index: jax.Array) -> tuple[Place, jax.Array]:
        """Returns a tile's place, and the index of its height."""
        tile, left_edge = self.kernel.place(index, self.rows.count)
        left_edge += self.number * self.kernel.tiles.part
        first, begin, end = (self.rows.table[tile, column] for column in (FIRST, BEGIN, END))
        return Place(first, begin, end, left_edge), self.rows.kind_of(tile)

    def _compute_tile(self, tile: tuple[Place, jax.Array], exists: Any, carry: Any) -> Any:
        """Multiplies a tile if it `exists`, and stores a tile.

        If results are held in registers, the previous tile is stored, else this one. `carry` is the
        number of steps used so far, and the place and the results of the previous tile.
        """
        used, (place_before, held) = carry
        place, kind = tile
        steps = sum(self.kernel.depths) // STEP
        own_steps = jnp.where(exists, steps, 0)
        num_chunks = self.store.num_chunks
        at_a_step = -(-num_chunks // steps)

        def store_held(step: jax.Array) -> None:
            results = functools.partial(_cut, held)
            self.store.chunks(step * at_a_step, at_a_step, place_before, results)

        total = self.ring.accumulate(
            used,
            own_steps,
            (self.kernel.tiles.part, self.kernel.matrices * self.kernel.tiles.block_m),
            functools.partial(self._multiply, kind),
            store_held if self.kernel.holds else None,
            steps if self.kernel.holds else 0,
        )
        results = functools.partial(self.kernel.results, total, self._dtype)
        if self.kernel.holds:
            held = results(*(slice(0, size) for size in self._shape))
        else:
            self.store.chunks(0, num_chunks, place, results)
        return used + own_steps, (place, held)

    def _multiply(self, kind: jax.Array, accumulator: Any, stage: jax.Array, _: jax.Array) -> None:
        """Starts to multiply a stage's operands, with as many rows as the tile is high."""
        multiply = functools.partial(self._multiply_rows, accumulator, stage)
        lax.switch(kind, [functools.partial(multiply, height) for height in self.rows.heights])

    def _multiply_rows(self, accumulator: Any, stage: jax.Array, height: int) -> None:
        tiles = self.kernel.tiles
        mine = pl.ds(self.number * tiles.part, tiles.part)
        rows = transposed(self.ring.left.at[stage, :height])
        for i, matrix in enumerate(self.ring.right_tiles(stage)):
            transpose = self.kernel.transpose_rhs
            columns = matrix.at[mine] if transpose else transposed(matrix.at[:, mine])
            first = i * tiles.block_m
            plgpu.wgmma(accumulator.at[:, first : first + height], columns, rows)


def _cut(arrays: Sequence[jax.Array], columns: slice, rows: slice) -> tuple[jax.Array, ...]:
    return tuple(array[columns, rows] for array in arrays)
