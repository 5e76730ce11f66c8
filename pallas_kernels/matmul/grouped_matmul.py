"""Grouped matmul on Hopper's tensor cores: rows in groups, one matrix for each group.

The kernel cuts each group's rows into row tiles, and the output's columns into tiles of `block_n`.
The groups are a, b and c, a letter stands for 8 rows, and a box is an output tile:

  rows [R, K]    matrices [L, K, N]      output [R, N]
  a              a        b              +---+---+---+
  a              +-----+  +-----+        |   |   |   |  tiles of a's rows times a's matrix
  a              |     |  |     |  ...   +---+---+---+
  b              |     |  |     |        |   |   |   |  of b's
  b              +-----+  +-----+        +---+---+---+
  c                                      |   |   |   |  of c's
  -                                      +---+---+---+
  -  rows past the last group             zeros, or not written

Row tiles start at a multiple of 8 rows, since operands lie in shared memory in blocks of 8 rows. So
a row tile may begin with up to 7 rows of the previous group, and end with rows of the next group.
Rows of other groups are multiplied, too, but their products are not stored.

Tiles of the rows and of their group's matrix are copied (`Loader`) into a ring in shared memory
(`operand_ring`). The two compute warpgroups (`Computer`) multiply them, and store the sums by
`store`. A kernel with another epilogue, or with several matrices for each group, is a subclass of
`Product` (`gated_matmul`). Matrices in another format are a subclass of `Matrices`
(`mxfp4_matmul`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric.hardware import SHARED_MEMORY_BYTES, WARPGROUP
from pallas_kernels.formats import Scaled
from pallas_kernels.matmul import operand_ring, register_tiles
from pallas_kernels.matmul.chosen_groups import Groups, output_rows
from pallas_kernels.matmul.kernel import (
    CHUNK,
    COMPUTERS,
    OTHER_BYTES,
    STEP,
    Kernel,
    choose,
    even_bands,
    launch,
    swizzled,
    transposed,
    zeros,
)
from pallas_kernels.matmul.operand_ring import Feed, Feeder, OperandRing, Steps, TileSource
from pallas_kernels.matmul.row_tiles import BEGIN, END, FIRST, GROUP, table_of
from pallas_kernels.matmul.store import STORED_ROWS, Position, Store

# With two, the copies for a step would only start while the step before it is multiplied.
_LEAST_STAGES = 3
# If compute warpgroups pass products to each other, and a tile has more rows than this, each of
# them passes half of the rows: so both apply the gating function, which was measured to be faster.
_MOST_PASSED = 128


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tile sizes of `grouped_matmul`, and the numbers of its stages and buffers."""

    # The numbers of rows that an output tile may have, in rising order: multiples of 8 up to 256.
    heights: tuple[int, ...]
    # Columns of an output tile, 128 or 256; each compute warpgroup computes half of them. Or 64 in
    # a gated product: each compute warpgroup then computes one of the two products.
    block_n: int
    # At least 3, and an even number without a loader.
    num_stages: int
    # Buffers of 32 x 64 through which each compute warpgroup stores results.
    num_buffers: int
    # Columns of output tiles in a band; see `Kernel.tile_position`.
    band: int = 1
    # The length of a stage's tiles along K: 64, or a multiple of it for matrices in MXFP4.
    step: int = STEP
    # Whether a compute warpgroup stores a tile while it multiplies the next one, if it can.
    holds: bool = True

    @classmethod
    def fitting(
        cls,
        heights: tuple[int, ...],
        block_n: int,
        width: int,
        most: int,
        *,
        num_matrices: int = 1,
        mxfp4_depth: int | None = None,
        holds: bool = True,
    ) -> Tiles:
        """Returns the tile sizes with as many stages and buffers as fit into shared memory.

        There are at most 6 stages, and at most 8 buffers for each compute warpgroup. The output has
        `width` columns, and a band at most `most` columns of tiles. A group has `num_matrices`
        matrices: 2 in a gated product. `mxfp4_depth` is K of matrices in MXFP4, or None. Their step
        is the longest of which 3 stages fit.
        """
        # Room is counted in bytes. An unquantized number has two.
        room = SHARED_MEMORY_BYTES - OTHER_BYTES
        column_bytes = 2 * STEP  # of a matrix's column in 64 of K
        steps = [STEP]
        if mxfp4_depth is not None:
            from pallas_kernels.matmul import decoder

            room -= decoder.TABLE_BYTES
            column_bytes = decoder.COLUMN_BYTES
            # The longest is the first.
            steps = [s for s in decoder.STEPS if mxfp4_depth % s == 0 or s == STEP]
        if block_n < COMPUTERS * CHUNK:
            # A compute warpgroup passes its product to the other one.
            room -= 2 * block_n * passed_at_once(heights[-1])
        # Each compute warpgroup has at least 1 + num_matrices buffers: enough for all outputs.
        buffers_bytes = COMPUTERS * 2 * CHUNK * STORED_ROWS  # one for each compute warpgroup
        room_for_stages = room - (1 + num_matrices) * buffers_bytes
        # Of a stage whose step is 64; the bytes of others are proportional to the step.
        short_bytes = 2 * STEP * heights[-1] + column_bytes * num_matrices * block_n
        most_bytes = room_for_stages // _LEAST_STAGES
        step = next((s for s in steps if short_bytes * (s // STEP) <= most_bytes), steps[-1])
        stage_bytes = short_bytes * (step // STEP)
        stages = min(room_for_stages // stage_bytes, 6)
        buffers = min((room - stages * stage_bytes) // buffers_bytes, 8)
        band = even_bands(width, block_n, most)
        return cls(heights, block_n, stages, buffers, band, step, holds)

    @property
    def block_m(self) -> int:
        """The largest number of rows that an output tile may have."""
        return self.heights[-1]

    @property
    def part(self) -> int:
        """The number of columns that a compute warpgroup computes: half of a tile's, or all 64."""
        return max(self.block_n // COMPUTERS, CHUNK)


def passed_at_once(block_m: int) -> int:
    return block_m if block_m <= _MOST_PASSED else block_m // 2


def grouped_matmul(
    pairs: Sequence[tuple[jax.Array, jax.Array | Scaled]],
    groups: Groups,
    *,
    transpose_rhs: bool,
    tiles: Tiles,
    num_blocks: int,
    num_waves: int = 1,
    zero_unused: bool = True,
    format: type[Matrices] | None = None,
) -> jax.Array:
    """Multiplies each row by its group's matrix, and sums the products over (lhs, rhs) pairs.

    Rows past the last tile of the last group are not read.

    Args:
      pairs: one or more pairs (lhs [R, K], rhs [L, K, N]), where rhs[l] is the matrix of group l.
        All are bfloat16, or all float16. With `transpose_rhs`, rhs is [L, N, K]. R is a multiple of
        8, K of 64, N of tiles.part. K may differ between pairs.
      groups: [L] int32, the number of rows of each group, in order; or chosen groups, whose height
        is the only one of `tiles.heights`. R is then the height or, if each of the S groups has its
        own rows, S times the height.
      num_blocks: number of thread blocks that run at the same time.
      num_waves: number of waves of thread blocks; see `Kernel.block_tiles`.
      zero_unused: whether rows past the last group become zero; else they are not written.
      format: the format of the matrices; None: unquantized. `Mxfp4Matrices` takes bfloat16 rows
        and one pair, whose rhs is `Scaled`, with `transpose_rhs`.

    Returns:
      [R, N] of the operands' dtype, or [S * height, N] for chosen groups. The products of all pairs
      are summed in float32, and each sum is rounded once.
    """
    lhs, _ = pairs[0]
    num_rows = output_rows(groups, lhs.shape[0])
    format = format or Matrices
    operands = [part for lhs, rhs in pairs for part in (lhs, *format.operands_of(rhs))]
    kernel = Product(
        tiles=tiles,
        num_blocks=num_blocks,
        width=operands[1].shape[1 if transpose_rhs else 2],
        depths=tuple(lhs.shape[1] for lhs, _ in pairs),
        dtype=lhs.dtype,
        matrices=format,
        transpose_rhs=transpose_rhs,
        zero_unused=zero_unused,
        shared_rows=lhs.shape[0] < num_rows,
        num_waves=num_waves,
    )
    (result,) = kernel.run(operands, groups, num_rows, f"grouped_matmul{format.suffix}")
    return result


@dataclasses.dataclass(frozen=True)
class Product(Kernel):
    """The kernel of `grouped_matmul`.

    The tensor cores compute the transpose of an output tile, [columns, rows]. The second dimension
    of an instruction's result may be any multiple of 8, so tiles can be as high as a group needs.
    """

    depths: tuple[int, ...]  # K of each pair of operands
    dtype: Any  # of the rows and of the outputs
    matrices: type[Matrices]
    transpose_rhs: bool
    zero_unused: bool
    # Whether all row tiles multiply the same rows, the first ones of each lhs.
    shared_rows: bool

    # The numbers of matrices by which a group's rows of each lhs are multiplied, of outputs, and of
    # arrays of biases, which are the operands before the table.
    num_matrices = 1
    outputs = 1
    num_biases = 0

    @property
    def steps(self) -> int:
        return sum(self.depths) // self.tiles.step

    @property
    def accumulators(self) -> int:
        return self.num_matrices * self.tiles.part * self.tiles.block_m // WARPGROUP  # of a thread

    @property
    def has_loader(self) -> bool:
        return not self.tiles.holds or self.accumulators <= self.matrices.most_accumulators

    @property
    def loads_in_one_warp(self) -> bool:
        return self.matrices.loads_in_one_warp

    @property
    def holds(self) -> bool:
        """Whether a compute warpgroup stores a tile while it multiplies the next one."""
        # Its registers then also hold the finished tile's results.
        return self.tiles.holds and self.tiles.block_m <= self.matrices.most_held_rows

    def results(
        self, total: jax.Array, biases: Sequence[jax.Array], columns: slice, rows: slice
    ) -> tuple[jax.Array, ...]:
        """Computes some elements of the outputs from the accumulators: the kernel's epilogue.

        `total`, float32 [tiles.part, num_matrices * tiles.block_m], is the transposed product of
        the tile's rows and each matrix, side by side; `biases` are float32 [tiles.part]. Returns
        for each output an array [columns, rows] of `dtype`.
        """
        return (total[columns, rows].astype(self.dtype),)

    def scratch_types(self) -> dict[str, Any]:
        # A chunk of every output is stored at a time, each through its own buffer.
        num_buffers = max(self.tiles.num_buffers, self.outputs)
        shape = COMPUTERS, num_buffers, STORED_ROWS, CHUNK
        buffers = plgpu.SMEM(shape, self.dtype, transforms=swizzled(self.dtype))
        return dict(buffers=buffers, **self.matrices.types(self))

    def run(
        self, operands: Sequence[jax.Array], groups: Groups, num_rows: int, name: str
    ) -> list[jax.Array]:
        """Launches the kernel; returns its outputs, of `num_rows` rows."""
        out_type = [jax.ShapeDtypeStruct((num_rows, self.width), self.dtype)] * self.outputs
        table = table_of(groups, self.tiles.heights, num_rows)
        call = launch(self, self.scratch_types(), out_type, name)
        return call(*operands, table)

    def __call__(
        self, *refs: Any, ring: OperandRing, buffers: Any, staged: Any = None, **scratch: Any
    ) -> None:
        # The references are operands, biases, the table of row tiles, and outputs. `staged` is what
        # a format of matrices adds to shared memory, `scratch` what a subclass's `computer` takes.
        *others, table = refs[: -self.outputs]
        outs = refs[-self.outputs :]
        num_operands = len(others) - self.num_biases
        operands, biases = others[:num_operands], others[num_operands:]
        # The table's last entry, with the numbers of row tiles and of rows in groups.
        count, num_rows = (table[table.shape[0] - 1, i] for i in range(2))
        row_tiles = RowTiles(table, self.tiles.heights, count, num_rows)
        matrices = self.matrices(self, ring, operands, staged)
        tiles = self.block_tiles(row_tiles.count * self.tile_columns)
        loader = matrices.loader(row_tiles)
        feeder = Feeder(loader, tiles, ring.empty, ring.num_stages, self.has_loader)

        def compute(number: jax.Array) -> None:
            store = Store(
                outs, buffers.at[number], block_m=self.tiles.block_m, part=self.tiles.part
            )
            self.computer(matrices, row_tiles, store, number, biases, feeder, **scratch).run()

        self.take_roles(feeder.run, compute)

    def computer(self, *work: Any) -> Computer:
        """Returns a warpgroup's work; the arguments are the fields of `Computer` after `kernel`."""
        return Computer(self, *work)


@dataclasses.dataclass(frozen=True)
class RowTiles:
    """The row tiles of all groups."""

    table: Any  # the result of `row_tiles`
    heights: tuple[int, ...]
    count: jax.Array
    num_rows: jax.Array  # in groups

    def height_index(self, tile: jax.Array) -> jax.Array:
        """Returns the index of the least of `heights` that holds the rows of tile number `tile`."""
        rows = self.table[tile, END] - self.table[tile, FIRST]
        too_low = (rows > height for height in self.heights[:-1])
        return sum((each.astype(jnp.int32) for each in too_low), jnp.int32(0))


class OperandTile(NamedTuple):
    """What a loader must know of an output tile; int32."""

    group: jax.Array
    first_row: jax.Array  # of lhs
    left_edge: jax.Array  # the first column
    height_index: jax.Array  # in `Tiles.heights`


@dataclasses.dataclass(frozen=True)
class Loader(operand_ring.Loader):
    """Copies the operand tiles of output tiles into the ring, step by step, pair by pair."""

    kernel: Product
    ring: OperandRing
    row_tiles: RowTiles
    operands: Sequence[Any]

    def find(self, index: jax.Array) -> OperandTile:
        table = self.row_tiles.table
        row_tile, left_edge = self.kernel.tile_position(index, self.row_tiles.count)
        first = jnp.int32(0) if self.kernel.shared_rows else table[row_tile, FIRST]
        group, height_index = table[row_tile, GROUP], self.row_tiles.height_index(row_tile)
        return OperandTile(group, first, left_edge, height_index)

    def steps_of(self, _: Any) -> int:
        return self.kernel.steps

    def load(self, tile: OperandTile, step: jax.Array, slot: operand_ring.Slot, ahead: Any) -> None:
        # Only copies load here, so `ahead` is not used. A pair is lhs and arrays of matrices.
        per_pair = 1 + self.kernel.num_matrices
        # A tile's steps run through the depth of one pair after the other.
        first_step = 0
        for pair, depth in enumerate(self.kernel.depths):
            steps = depth // self.kernel.tiles.step
            operands = self.operands[pair * per_pair : (pair + 1) * per_pair]
            fill = functools.partial(self._fill, tile, operands, step - first_step, slot.number)
            if len(self.kernel.depths) == 1:
                fill()
            else:
                pl.when((step >= first_step) & (step < first_step + steps))(fill)
            first_step += steps

    def _fill(
        self, tile: OperandTile, operands: Sequence[Any], step: jax.Array, number: jax.Array
    ) -> None:
        """Fills the stage of step `number` by the operands of a pair, at its step `step`."""
        lhs, *rhs = operands
        length = self.kernel.tiles.step
        inner = pl.ds(step * length, length)
        rhs_inner = self.stored_range(step, inner)
        columns = pl.ds(tile.left_edge, self.kernel.tiles.block_n)
        index = (columns, rhs_inner) if self.kernel.transpose_rhs else (rhs_inner, columns)
        # A copy's shape is static, so there is a candidate for each height.
        rows = [pl.ds(tile.first_row, height) for height in self.row_tiles.heights]
        lhs_tiles = [lhs.at[each, inner] for each in rows]
        rights = [TileSource([matrix.at[tile.group, *index]]) for matrix in rhs]
        self.ring.fill(number, TileSource(lhs_tiles, tile.height_index), rights)

    def stored_range(self, step: jax.Array, inner: Any) -> Any:
        """Returns where a matrix's numbers of step `step`, the range `inner` of K, are stored."""
        return inner


@dataclasses.dataclass(frozen=True)
class Matrices:
    """Unquantized matrices: what loads them to the ring, and what multiplies rows by them."""

    kernel: Product
    ring: OperandRing
    operands: Sequence[Any]  # for each pair its lhs, and then its arrays of matrices
    staged: Any = None  # what else of `types` is in shared memory

    suffix: ClassVar[str] = ""  # of kernels' names
    # Registers can hold the results of a tile of so many rows while the next tile is multiplied.
    most_held_rows: ClassVar[float] = math.inf
    # The most accumulators of a thread beside which 168 registers have room for a held tile, so
    # that there can be a loader: those of a tile of 176 x 128.
    most_accumulators: ClassVar[float] = 88
    loads_in_one_warp: ClassVar[bool] = True

    @classmethod
    def operands_of(cls, matrices: Any) -> list[jax.Array]:
        return [matrices]

    @classmethod
    def types(cls, kernel: Product) -> dict[str, Any]:
        """Returns the types of the format's shared memory."""
        tiles = kernel.tiles
        left = tiles.block_m, tiles.step
        # A subclass whose steps are longer than STEP replaces `right`.
        right = (tiles.block_n, STEP) if kernel.transpose_rhs else (STEP, tiles.block_n)
        return dict(
            ring=OperandRing.types(kernel.dtype, tiles.num_stages, left, right, kernel.num_matrices)
        )

    def loader(self, row_tiles: RowTiles) -> Loader:
        return Loader(self.kernel, self.ring, row_tiles, self.operands)

    def begin(self, computer: jax.Array) -> None:
        """Prepares the compute warpgroup of index `computer`, while the first copies arrive."""

    def sum_products(
        self, starts: Starts, height_index: jax.Array, shape: tuple[int, int], steps: Steps
    ) -> tuple[jax.Array, Feed | None]:
        """Sums the products of a tile of heights[height_index] rows and the columns at `starts`.

        Returns float32 sums of shape `shape`, those of each matrix side by side, and the new feed.
        """

        def multiply(accumulator: Any, stage: jax.Array, _: jax.Array) -> None:
            plgpu.barrier_wait(self.ring.full.at[stage])

            def of_height(height: int) -> None:
                rows = transposed(self.ring.left.at[stage, :height])
                for i, (matrix, first_column) in enumerate(starts):
                    side = i * self.kernel.tiles.block_m
                    columns = self._columns(stage, matrix, first_column)
                    plgpu.wgmma(accumulator.at[:, side : side + height], columns, rows)

            # The shape of an instruction is static.
            heights = self.kernel.tiles.heights
            choose(height_index, [functools.partial(of_height, each) for each in heights])

        return self.ring.accumulate(steps, len(starts), shape, multiply)

    def _columns(self, stage: jax.Array, matrix: Any, first: Any) -> Any:
        """Returns the columns of a stage's tile of a matrix from column `first` on, [part, 64]."""
        tile = self.ring.right_tile(stage, matrix)
        columns = pl.ds(first, self.kernel.tiles.part)
        return tile.at[columns] if self.kernel.transpose_rhs else transposed(tile.at[:, columns])


# The columns by which a compute warpgroup multiplies rows: for each of its products, the index of
# the matrix, and the first of `tiles.part` columns in the matrix's tile.
Starts = Sequence[tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class Computer:
    """The work of a compute warpgroup, 0 or 1: half of the columns of each output tile."""

    kernel: Product
    matrices: Matrices
    row_tiles: RowTiles
    store: Store
    number: jax.Array
    biases: Sequence[Any]  # references to arrays [L, N]
    feeder: Feeder

    def run(self) -> None:
        kernel = self.kernel
        feed = self._begin()
        empty_results = zeros(self._shape, kernel.dtype)
        held = (empty_results,) * kernel.outputs if kernel.holds else ()
        # The carry: the number of steps multiplied, the feed, and the tile held to be stored, which
        # is (its position, its results). Before the first tile, that is the position of tile 0 with
        # an empty range of rows, [begin, begin). A constant would have another type in `shard_map`:
        # it does not vary over mesh axes (vma), as later positions do.
        position, *_ = self._look_up(jnp.int32(0))
        carry = jnp.int32(0), feed, (position._replace(end=position.begin), held)
        used, *_ = self.feeder.tiles.walk(
            self._look_up, self._compute_tile, carry, once_more=kernel.holds
        )
        self.feeder.finish(used)
        self._zero_unused()

    def _begin(self) -> Feed | None:
        """Starts the first copies, and prepares for them meanwhile; returns the feed."""
        feed = self.feeder.start()
        self.matrices.begin(self.number)
        return feed

    def _zero_unused(self) -> None:
        """Zeroes this warpgroup's share of the rows past the last group, if `zero_unused`."""
        if self.kernel.zero_unused:
            # The compute warpgroups of all blocks take turns at chunks of these rows.
            worker = lax.axis_index("block") * COMPUTERS + self.number
            self.store.zeros_from(
                self.row_tiles.num_rows, worker, self.kernel.all_blocks * COMPUTERS
            )

    @property
    def _shape(self) -> tuple[int, int]:
        return self.kernel.tiles.part, self.kernel.tiles.block_m  # (columns, rows) of its half

    @property
    def _first_column(self) -> Any:
        """The first column of an output tile that this warpgroup computes."""
        return self.number * self.kernel.tiles.part

    @property
    def _starts(self) -> Starts:
        return [(i, self._first_column) for i in range(self.kernel.num_matrices)]

    def _look_up(self, index: jax.Array) -> tuple[Position, jax.Array, jax.Array]:
        """Returns a tile's position, the index of its height in `heights`, and its group."""
        tile, left_edge = self.kernel.tile_position(index, self.row_tiles.count)
        left_edge += self._first_column
        first, begin, end = (self.row_tiles.table[tile, column] for column in (FIRST, BEGIN, END))
        position = Position(first, begin, end, left_edge)
        return position, self.row_tiles.height_index(tile), self.row_tiles.table[tile, GROUP]

    def _load_biases(self, group: jax.Array, left_edge: jax.Array) -> list[jax.Array]:
        """Loads the biases of a group, float32 [tiles.part] in the layout `WGMMA.reduce(1)`."""
        part, width = self.kernel.tiles.part, self.kernel.width
        return [
            register_tiles.load_column(each.at[group], left_edge, count=part, last=width - 1)
            for each in self.biases
        ]

    def _compute_tile(
        self, tile: tuple[Position, jax.Array, jax.Array], exists: Any, carry: Any
    ) -> Any:
        """Computes this warpgroup's half of a tile, and stores that half or the previous tile's."""
        used, feed, (position_before, held) = carry
        position, height_index, group = tile
        biases = self._load_biases(group, position.left_edge)
        steps_of_tile = self.kernel.steps
        # If no tile exists any more, only the previous one is stored, in steps without matmuls.
        num_steps = jnp.where(exists, steps_of_tile, 0)
        steps = Steps(used, num_steps, self.feeder, feed)
        if self.kernel.holds:
            store_held = functools.partial(self._store_held, position_before, held)
            steps = steps._replace(meanwhile=store_held, least=steps_of_tile)
        part, block_m = self._shape
        shape = part, self.kernel.num_matrices * block_m
        total, feed = self.matrices.sum_products(self._starts, height_index, shape, steps)
        results = functools.partial(self.kernel.results, total, biases)
        if self.kernel.holds:
            held = results(*(slice(0, size) for size in self._shape))
        else:
            self.store.chunks(0, self.store.num_chunks, position, results)
        return used + num_steps, feed, (position, held)

    def _store_held(self, position: Position, held: Sequence[jax.Array], step: jax.Array) -> None:
        """Stores the chunks of a finished tile that are stored in step `step` of the next one."""
        per_step = -(-self.store.num_chunks // self.kernel.steps)

        def results(columns: slice, rows: slice) -> tuple[jax.Array, ...]:
            return tuple(array[columns, rows] for array in held)

        self.store.chunks(step * per_step, per_step, position, results)
