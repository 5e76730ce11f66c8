"""Grouped matmul on Hopper's tensor cores: rows in groups, one matrix for each group.

The kernel cuts each group's rows into row tiles, and the output's columns into tiles of `block_n`.
In this diagram the groups are a, b and c, a letter stands for 8 rows, and a box is an output tile:

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

`pallas_kernels.matmul.kernel` describes the warpgroups' roles. The loader warpgroup (`_Loader`)
copies tiles of the rows and of their group's matrix into a ring in shared memory. The two compute
warpgroups (`Computer`) multiply them, and store the sums by `pallas_kernels.matmul.store`. A
kernel with another epilogue, or with several matrices for each group, is a subclass of `Product`.

Matrices may be stored in MXFP4. The compute warpgroups then decode them
(`pallas_kernels.matmul.decoder`). Tiles of few rows are multiplied by instructions of single warps
(`pallas_kernels.matmul.warp_products`), all others by those of a warpgroup.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric.hardware import SHARED_MEMORY_BYTES
from pallas_kernels.formats import E8M0, bitcast
from pallas_kernels.matmul import register_tiles, warp_products
from pallas_kernels.matmul.chosen_groups import ChosenGroups, output_rows
from pallas_kernels.matmul.decoder import (
    COLUMN_BYTES,
    NUMBER_BYTES,
    TABLE_BYTES,
    Decoder,
    Staged,
    transforms_of_numbers,
)
from pallas_kernels.matmul.kernel import (
    CHUNK,
    COMPUTERS,
    OTHER_BYTES,
    STEP,
    Kernel,
    OperandRing,
    TileSource,
    aligned,
    check_buffers,
    launch,
    transposed,
    zeros,
)
from pallas_kernels.matmul.quantized_tiles import Scaled
from pallas_kernels.matmul.row_tiles import BEGIN, END, FIRST, GROUP, table_of
from pallas_kernels.matmul.store import STORED_ROWS, Buffers, Position, Store

# How long stages with matrices in MXFP4 may be along K, besides 64: the first of these lengths that
# divides K and leaves room for `_LEAST_STAGES` stages.
_LONG_STEPS, _LEAST_STAGES = (256, 192, 128), 3
# If compute warpgroups pass products to each other, and a tile has more rows than this, each of
# them passes half of the rows.
_MOST_PASSED = 128


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tile sizes of `product`, and the numbers of its stages and buffers in shared memory.

    Attributes:
      heights: the numbers of rows that an output tile may have, in rising order. They are multiples
        of 8 up to 256, which one tensor core instruction can multiply.
      block_n: columns of an output tile, 128 or 256; each compute warpgroup computes half of them.
        In a gated product it may also be 64: each compute warpgroup then computes one of the two
        products.
      num_stages: number of pipeline stages in the ring, at least 2.
      num_buffers: number of 32 x 64 buffers through which each compute warpgroup stores results.
      band: number of columns of output tiles in a band. A band is some adjacent columns of tiles,
        over the whole height of the output. The thread blocks compute the output band by band, and
        within a band row of tiles by row of tiles.
      step: how long a stage's operand tiles are along K, the contraction dimension: 64, or a
        multiple of it for matrices in MXFP4. It divides K.
    """

    heights: tuple[int, ...]
    block_n: int
    num_stages: int
    num_buffers: int
    band: int = 1
    step: int = STEP

    @classmethod
    def fitting(
        cls,
        heights: tuple[int, ...],
        block_n: int,
        band: int = 1,
        *,
        num_matrices: int = 1,
        mxfp4_depth: int | None = None,
    ) -> Tiles:
        """Returns the tile sizes with as many stages and buffers as fit into shared memory.

        There are at most 6 stages. The memory that they leave is used for buffers through which
        results are stored, at most 8 for each compute warpgroup. Stages with matrices in MXFP4 are
        256, 192, 128 or 64 long along K: as long as divides K and leaves room for 3 stages. A step
        has fixed costs, besides the time of the rows that it multiplies.

        Args:
          heights, block_n, band: attributes of the result.
          num_matrices: the number of matrices of each group; a stage holds a tile of each of them.
          mxfp4_depth: K if the matrices are in MXFP4, else None.
        """
        operand, chunk = 2 * STEP, 2 * CHUNK * STORED_ROWS
        room = SHARED_MEMORY_BYTES - OTHER_BYTES
        of_column = operand if mxfp4_depth is None else COLUMN_BYTES
        stage = operand * heights[-1] + of_column * num_matrices * block_n
        if block_n < COMPUTERS * CHUNK:
            # A compute warpgroup passes its product to the other one.
            room -= 2 * block_n * passed_at_once(heights[-1])
        if mxfp4_depth is not None:
            room -= TABLE_BYTES
        of_stages, step = room - COMPUTERS * (1 + num_matrices) * chunk, STEP
        if mxfp4_depth is not None:
            fitting = (s for s in _LONG_STEPS if of_stages >= _LEAST_STAGES * stage * (s // STEP))
            step = next((s for s in fitting if mxfp4_depth % s == 0), STEP)
        stage *= step // STEP
        stages = min(of_stages // stage, 6)
        buffers = min((room - stages * stage) // (COMPUTERS * chunk), 8)
        return cls(heights, block_n, stages, buffers, band, step)

    @property
    def block_m(self) -> int:
        """The largest number of rows that an output tile may have."""
        return self.heights[-1]

    @property
    def part(self) -> int:
        """The number of columns that a compute warpgroup computes: half of an output tile's.

        If a tile has only 64 columns, it is all of them.
        """
        return max(self.block_n // COMPUTERS, CHUNK)

    def __post_init__(self) -> None:
        rising = list(self.heights) == sorted(set(self.heights))
        whole = all(height % 8 == 0 and 8 <= height <= 256 for height in self.heights)
        if not self.heights or not rising or not whole or self.block_n not in (64, 128, 256):
            raise ValueError(
                "heights must be multiples of 8 from 8 to 256 in rising order, and block_n must be "
                f"64, 128 or 256, but the tile sizes are {self}."
            )
        if self.num_buffers < 1:
            raise ValueError(f"num_buffers must be positive, but the tile sizes are {self}.")
        if self.step < STEP or self.step % STEP:
            raise ValueError(f"step must be a multiple of {STEP}, but the tile sizes are {self}.")
        check_buffers(self)


def passed_at_once(block_m: int) -> int:
    """Returns how many rows of a product compute warpgroups pass to each other at a time.

    `block_m` is the number of rows of a tile, a multiple of 16 if it is more than 128.
    """
    return block_m if block_m <= _MOST_PASSED else block_m // 2


def product(
    pairs: Sequence[tuple[jax.Array, jax.Array | Scaled]],
    groups: jax.Array | ChosenGroups,
    *,
    transpose_rhs: bool,
    tiles: Tiles,
    num_blocks: int,
    num_waves: int = 1,
    zero_unused: bool = True,
    interpret: Any = None,
) -> jax.Array:
    """Multiplies each row by its group's matrix, and sums the products over (lhs, rhs) pairs.

    Rows past the last tile of the last group are not read.

    Args:
      pairs: one or more pairs (lhs [R, K], rhs [L, K, N]), where lhs holds the rows and rhs[l] is
        the matrix of group l. All are bfloat16, or all float16. With `transpose_rhs`, rhs is
        [L, N, K]. R is a multiple of 8, K of 64, N of tiles.part. K may differ between pairs. With
        `transpose_rhs`, the only rhs may be in MXFP4, if lhs is bfloat16.
      groups: [L] int32, the number of rows of each group, in order; or chosen groups, whose height
        is the only one of `tiles.heights`. R is then the height or, if each of the S groups has its
        own rows, S times the height.
      transpose_rhs: whether each rhs holds the transposes of the matrices.
      tiles: tile sizes, number of pipeline stages, and number of store buffers.
      num_blocks: number of thread blocks that run at the same time.
      num_waves: number of waves of thread blocks; see `kernel.Kernel.walk`.
      zero_unused: whether rows past the last group become zero; else they are not written.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      [R, N] of the operands' dtype, or [S * height, N] for chosen groups. The products of all pairs
      are summed in float32, and each sum is rounded once.
    """
    lhs, rhs = pairs[0]
    is_quantized, num_rows = isinstance(rhs, Scaled), output_rows(groups, lhs.shape[0])
    width = jax.tree.leaves(rhs)[0].shape[1 if transpose_rhs else 2]
    depths = tuple(lhs.shape[1] for lhs, _ in pairs)
    kernel = Product(
        tiles,
        num_blocks,
        bool(interpret),
        width,
        depths,
        transpose_rhs=transpose_rhs,
        zero_unused=zero_unused,
        shared_rows=lhs.shape[0] < num_rows,
        is_quantized=is_quantized,
        num_waves=num_waves,
    )
    table = table_of(groups, tiles.heights, num_rows, interpreted=bool(interpret))
    return launch(
        kernel,
        kernel.scratch_types(lhs.dtype),
        jax.ShapeDtypeStruct((num_rows, width), lhs.dtype),
        f"grouped_matmul{'_mxfp4' if is_quantized else ''}",
        interpret,
    )(*(operand for lhs, rhs in pairs for operand in (lhs, *parts(rhs))), table)


def parts(matrices: jax.Array | Scaled) -> list[jax.Array]:
    """Returns the operands of the kernel for an array of matrices, quantized or not."""
    return [bitcast(x, jnp.uint8) if x.dtype == E8M0 else x for x in jax.tree.leaves(matrices)]


@dataclasses.dataclass(frozen=True)
class Product(Kernel):
    """The kernel of `product`.

    The tensor cores compute the transpose of an output tile, [columns, rows]. The second dimension
    of an instruction's result may be any multiple of 8, so the height of a tile can be fitted to
    the number of rows of its group.

    Attributes:
      depths: for each pair of operands, K, the length of the contraction dimension.
      transpose_rhs: whether the matrices are [L, N, K] instead of [L, K, N].
      zero_unused: whether the kernel zeroes the rows past the last group.
      shared_rows: whether all row tiles multiply the same rows, the first ones of each lhs.
      is_quantized: whether the matrices are in MXFP4, as values and scales.
    """

    depths: tuple[int, ...]
    transpose_rhs: bool
    zero_unused: bool
    shared_rows: bool
    is_quantized: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def num_matrices(self) -> int:
        """Returns by how many matrices the kernel multiplies a group's rows of each lhs."""
        return 1

    @property
    def outputs(self) -> int:
        return 1

    @property
    def num_biases(self) -> int:
        """Returns the number of arrays of biases, which are the operands before the table."""
        return 0

    @property
    def steps(self) -> int:
        """Returns the number of steps in which a tile is summed, over the depths of all pairs."""
        return sum(self.depths) // self.tiles.step

    @property
    def multiplies_by_warps(self) -> bool:
        """Returns whether `pallas_kernels.matmul.warp_products` multiplies the tiles."""
        return self.is_quantized and self.tiles.block_m <= warp_products.MOST_ROWS

    @property
    def holds(self) -> bool:
        """Returns whether a compute warpgroup stores a tile while it multiplies the next one.

        If so, its registers hold the finished tile's results next to the accumulators of the next
        tile. If not, it stores each tile before it multiplies the next one.
        """
        # Decoding needs registers, too.
        return not (self.is_quantized and self.tiles.block_m > 128)

    def results(
        self,
        total: jax.Array,
        biases: Sequence[jax.Array],
        dtype: Any,
        columns: slice,
        rows: slice,
    ) -> tuple[jax.Array, ...]:
        """Computes some elements of the outputs from the accumulators: the kernel's epilogue.

        Args:
          total: float32 accumulators [tiles.part, num_matrices * tiles.block_m] of a compute
            warpgroup. They hold the transposed product of the tile's rows and each matrix, side by
            side.
          biases: float32 [tiles.part], the biases of the warpgroup's columns, if there are any.
          dtype: dtype of the outputs.
          columns: the columns to return, counted in the warpgroup's half of the tile.
          rows: the rows of the tile to return.

        Returns:
          For each output an array [columns, rows] of `dtype`.
        """
        return (total[columns, rows].astype(dtype),)

    def __post_init__(self) -> None:
        if self.tiles.block_n < COMPUTERS * CHUNK and self.num_matrices < COMPUTERS:
            raise ValueError(
                f"block_n must be at least {COMPUTERS * CHUNK} where a group has one matrix, but "
                f"is {self.tiles.block_n}."
            )
        step = self.tiles.step
        if any(depth % step for depth in self.depths) or (step > STEP and not self.is_quantized):
            raise ValueError(
                f"step must divide K, and be {STEP} for matrices that are not in MXFP4, but is "
                f"{step} for K of {self.depths}."
            )
        if self.width % self.tiles.part:
            raise ValueError(
                f"N, the columns of the matrices, must be a multiple of {self.tiles.part} for "
                f"block_n={self.tiles.block_n}, but is {self.width}."
            )

    def scratch_types(self, dtype: Any) -> dict[str, Any]:
        tiles = self.tiles
        right = (tiles.block_n, STEP) if self.transpose_rhs else (STEP, tiles.block_n)
        # A compute warpgroup stores a 32 x 64 chunk of every output at a time, each through its own
        # buffer. So it needs at least as many buffers as there are outputs.
        num_buffers = max(tiles.num_buffers, self.outputs)
        types: dict[str, Any] = dict(
            ring=OperandRing.types(
                dtype, tiles.num_stages, (tiles.block_m, tiles.step), right, self.num_matrices
            ),
            buffers=Buffers.types(dtype, num_buffers, self.interpreted),
        )
        if self.is_quantized:
            stages = tiles.num_stages
            several = (self.num_matrices,) if self.num_matrices > 1 else ()
            pieces = tiles.step // STEP
            shape = stages, *several, tiles.block_n, pieces * NUMBER_BYTES
            transforms = () if self.interpreted else transforms_of_numbers(pieces)
            ring = types["ring"]
            if self.multiplies_by_warps and not self.interpreted:
                rows = plgpu.SMEM(ring.left.shape, dtype, transforms=warp_products.ROW_TRANSFORMS)
                ring = dataclasses.replace(ring, left=rows)
            types["ring"] = dataclasses.replace(
                ring,
                right=plgpu.SMEM(shape, jnp.uint8, transforms=transforms),
                # The loader also arrives when it has stored the scales.
                full=plgpu.Barrier(num_arrivals=2 + self.num_matrices, num_barriers=stages),
            )
            types["staged"] = Staged.types(
                stages,
                pieces,
                columns=self.num_matrices * tiles.block_n,
                parts=self.num_matrices * tiles.part // CHUNK * pieces,
                interpreted=self.interpreted,
            )
        return types

    def __call__(
        self,
        *refs: Any,
        ring: OperandRing,
        buffers: Buffers,
        staged: Staged | None = None,
        **scratch: Any,
    ) -> None:
        *others, table = refs[: -self.outputs]
        outs = refs[-self.outputs :]
        count = len(others) - self.num_biases
        operands, biases = others[:count], others[count:]
        last = table.shape[0] - 1
        row_tiles = _RowTiles(table, self.tiles.heights, table[last, 0], table[last, 1])
        decoder, loader = None, _Loader(self, ring, row_tiles, operands)
        if staged is not None:
            lhs, *others = operands
            matrices = [Scaled(*others[i : i + 2]) for i in range(0, len(others), 2)]
            decoder = Decoder(matrices, ring.right, staged, self.tiles.block_n)
            operands = [lhs, *(values for values, _ in matrices)]
            loader = _QuantizedLoader(self, ring, row_tiles, operands, decoder)

        def compute(number: jax.Array) -> None:
            if decoder is not None:
                decoder.fill_table(number)
            sizes = self.tiles.block_m, self.tiles.part
            store = Store(outs, buffers.of(number), *sizes, self.interpreted)
            self.computer(ring, row_tiles, store, number, decoder, biases, **scratch).run()

        self.take_roles(loader.run, compute)

    def computer(self, *work: Any) -> Computer:
        """Returns the work of a compute warpgroup, for the fields of `Computer` past the first."""
        return Computer(self, *work)


@dataclasses.dataclass(frozen=True)
class _RowTiles:
    """The row tiles of all groups, read from the table that the kernel takes as an operand.

    Attributes:
      table: a reference to the result of `row_tiles`, [most_tiles + 1, 4] int32.
      heights: the numbers of rows that a tile may have, in rising order.
      count: int32, the number of row tiles.
      num_rows: int32, the number of rows that belong to groups.
    """

    table: Any
    heights: tuple[int, ...]
    count: jax.Array
    num_rows: jax.Array

    def height_index(self, tile: jax.Array) -> jax.Array:
        """Returns the index of the least of `heights` that holds the rows of tile number `tile`."""
        rows = self.table[tile, END] - self.table[tile, FIRST]
        lower = (rows > height for height in self.heights[:-1])
        return sum((each.astype(jnp.int32) for each in lower), jnp.int32(0))


@dataclasses.dataclass(frozen=True)
class _Loader:
    """The loader warpgroup's work: copies the operand tiles of each output tile into the ring.

    `operands` are references to the operands: for each pair its lhs, and then its arrays of
    matrices.
    """

    kernel: Product
    ring: OperandRing
    row_tiles: _RowTiles
    operands: Sequence[Any]

    def run(self) -> None:
        total = self.row_tiles.count * self.kernel.tile_columns
        used = self.kernel.walk(total, self._look_up, self._load_tile, jnp.int32(0))
        self.ring.drain(used)

    def _look_up(self, index: jax.Array) -> tuple[jax.Array, ...]:
        """Returns what the loader must know of output tile number `index`.

        The result is (group, first row, first column, index in `heights` of the tile's height).
        """
        tile, left_edge = self.kernel.tile_position(index, self.row_tiles.count)
        table = self.row_tiles.table
        first = jnp.int32(0) if self.kernel.shared_rows else table[tile, FIRST]
        return table[tile, GROUP], first, left_edge, self.row_tiles.height_index(tile)

    def _load_tile(self, tile: Sequence[jax.Array], _: Any, used: jax.Array) -> jax.Array:
        """Copies all operand tiles of an output tile into the ring, step by step, pair by pair.

        `tile` is a result of `_look_up`. `used` is the number of steps that this block has copied
        into the ring before this tile. Returns the number after this tile.
        """
        # The number of operands of a pair: its lhs and its arrays of matrices.
        together = 1 + self.kernel.num_matrices
        for k, depth in enumerate(self.kernel.depths):
            lhs, *rhs = self.operands[k * together : (k + 1) * together]
            fill = functools.partial(self._fill_stage, tile, lhs, rhs)
            used = lax.fori_loop(0, depth // self.kernel.tiles.step, fill, used)
        return used

    def _fill_stage(
        self, tile: Sequence[jax.Array], lhs: Any, rhs: Sequence[Any], i: jax.Array, used: jax.Array
    ) -> jax.Array:
        group, first, left_edge, height_index = tile
        step = self.kernel.tiles.step
        inner = of_rhs = pl.ds(i * step, step)
        if self.kernel.is_quantized:
            num_bytes = step // STEP * NUMBER_BYTES
            of_rhs = pl.ds(i * num_bytes, num_bytes)
        columns = pl.ds(pl.multiple_of(left_edge, CHUNK), self.kernel.tiles.block_n)
        index = (columns, of_rhs) if self.kernel.transpose_rhs else (of_rhs, columns)
        of_heights = [
            lhs.at[pl.ds(aligned(first), height), inner] for height in self.row_tiles.heights
        ]
        rights = [TileSource([matrix.at[group, *index]]) for matrix in rhs]
        return self.ring.fill(used, TileSource(of_heights, height_index), rights)


@dataclasses.dataclass(frozen=True)
class _QuantizedLoader(_Loader):
    """The loader warpgroup's work where matrices are in MXFP4: it also copies their scales.

    Bulk copies cannot copy a few bytes of each column, so the threads of the warpgroup do. They
    load the scales of a step two steps before they store them.
    """

    decoder: Decoder

    def _load_tile(self, tile: Sequence[jax.Array], _: Any, used: jax.Array) -> jax.Array:
        (lhs, *rhs), decoder = self.operands, self.decoder
        group, _, left_edge, _ = tile
        steps = self.kernel.steps

        def load(i: Any) -> jax.Array:
            return decoder.load_scales(group, left_edge, jnp.minimum(i, steps - 1))

        def one_step(i: jax.Array, carry: Any) -> Any:
            used, codes, following = carry
            last = load(i + 2)
            stage = self.ring.stage_of(used)
            used = self._fill_stage(tile, lhs, rhs, i, used)
            decoder.stage_scales(stage, codes)
            plgpu.barrier_arrive(self.ring.full.at[stage])
            return used, following, last

        carry = used, load(jnp.int32(0)), load(jnp.int32(1))
        return lax.fori_loop(0, steps, one_step, carry)[0]


@dataclasses.dataclass(frozen=True)
class Computer:
    """The work of a compute warpgroup: computes and stores half of the columns of each output tile.

    `number` is the index of the warpgroup, 0 or 1. `row_tiles` describes the row tiles, and `store`
    writes results to the outputs. `decoder` decodes quantized matrices, and is None for others.
    `biases` are references to arrays [L, N], one for each matrix of a group, or there are none.
    """

    kernel: Product
    ring: OperandRing
    row_tiles: _RowTiles
    store: Store
    number: jax.Array
    decoder: Decoder | None
    biases: Sequence[Any]

    def run(self) -> None:
        kernel, zero = self.kernel, jnp.int32(0)
        total = self.row_tiles.count * kernel.tile_columns
        nothing = zeros(self._shape, self._dtype, plgpu.Layout.WGMMA, kernel.interpreted)
        held = (nothing,) * kernel.outputs if kernel.holds else ()
        # Before the first tile, there is no tile to store. The carry then has the position of tile
        # 0 with an empty range of rows, [begin, begin). A constant would not do: the position must
        # vary over the same mesh axes (vma) as those of later tiles.
        some, *_ = self._look_up(zero)
        carry = zero, (some._replace(end=some.begin), held)
        kernel.walk(total, self._look_up, self._compute_tile, carry, once_more=kernel.holds)
        self._zero_unused()

    def _zero_unused(self) -> None:
        """Zeroes this warpgroup's share of the rows past the last group, if the kernel is to."""
        if self.kernel.zero_unused:
            worker = lax.axis_index("block") * COMPUTERS + self.number
            self.store.zeros_from(
                self.row_tiles.num_rows, worker, self.kernel.all_blocks * COMPUTERS
            )

    @property
    def _dtype(self) -> Any:
        return self.store.outs[0].dtype

    @property
    def _shape(self) -> tuple[int, int]:
        """The shape [columns, rows] in which this warpgroup computes its half of an output tile.

        The tensor cores compute the transpose of a tile, since the second dimension of their
        result, here the tile's rows, may be any multiple of 8.
        """
        return self.kernel.tiles.part, self.kernel.tiles.block_m

    @property
    def _first_column(self) -> Any:
        """Returns the first column of an output tile that this warpgroup computes."""
        return self.number * self.kernel.tiles.part

    def _look_up(self, index: jax.Array) -> tuple[Position, jax.Array, jax.Array]:
        """Looks up what this warpgroup must know of output tile number `index`.

        Returns:
          position: the position in the outputs of the half tile that this warpgroup computes.
          height_index: the index of the tile's height in `self.row_tiles.heights`.
          group: the tile's group.
        """
        tile, left_edge = self.kernel.tile_position(index, self.row_tiles.count)
        left_edge += self._first_column
        first, begin, end = (self.row_tiles.table[tile, column] for column in (FIRST, BEGIN, END))
        position = Position(first, begin, end, left_edge)
        return position, self.row_tiles.height_index(tile), self.row_tiles.table[tile, GROUP]

    def _load_biases(self, group: jax.Array, left_edge: jax.Array) -> list[jax.Array]:
        """Loads the biases of a group for the columns of this warpgroup, from `left_edge` on.

        Returns float32 [tiles.part] for each of `self.biases`, in the layout
        `plgpu.Layout.WGMMA.reduce(1)`. Those past the last column repeat its bias.
        """
        part, width = self.kernel.tiles.part, self.kernel.width
        if self.kernel.interpreted:
            own = pl.ds(jnp.minimum(left_edge, width - part), part)
            return [each[group, own].astype(jnp.float32) for each in self.biases]
        return [
            register_tiles.load_column(each.at[group], left_edge, part, width - 1)
            for each in self.biases
        ]

    def _compute_tile(
        self, tile: tuple[Position, jax.Array, jax.Array], exists: Any, carry: Any
    ) -> Any:
        """Computes this warpgroup's half of a tile, and stores that half or the previous tile's.

        If `self.kernel.holds`, the previous tile is stored from registers while this tile is
        multiplied. Else this tile is stored after it is multiplied.

        Args:
          tile: the result of `_look_up`.
          exists: whether there is a tile to compute. It is False only in a call after the last
            tile, which stores the last tile.
          carry: (the number of steps that this warpgroup has multiplied so far, (the position of
            the previous tile, its results in registers)).

        Returns:
          The carry for the next tile.
        """
        used, (position_before, held) = carry
        position, height_index, group = tile
        biases = self._load_biases(group, position.left_edge)
        steps = self.kernel.steps
        own_steps = jnp.where(exists, steps, 0)
        num_chunks = self.store.num_chunks
        at_a_step = -(-num_chunks // steps)

        def store_held(step: jax.Array) -> None:
            results = functools.partial(_cut, held)
            self.store.chunks(step * at_a_step, at_a_step, position_before, results)

        total = self._sum_up(
            used,
            own_steps,
            (self.kernel.tiles.part, self.kernel.num_matrices * self.kernel.tiles.block_m),
            height_index,
            store_held if self.kernel.holds else None,
            steps if self.kernel.holds else 0,
        )
        results = functools.partial(self.kernel.results, total, biases, self._dtype)
        if self.kernel.holds:
            held = results(*(slice(0, size) for size in self._shape))
        else:
            self.store.chunks(0, num_chunks, position, results)
        return used + own_steps, (position, held)

    def _sum_up(
        self,
        used: jax.Array,
        steps: Any,
        shape: tuple[int, int],
        height_index: jax.Array,
        meanwhile: Callable[[jax.Array], None] | None = None,
        least_steps: int = 0,
    ) -> jax.Array:
        """Sums the products of a tile of heights[height_index] rows over the next `steps` steps.

        The other arguments are those of `OperandRing.accumulate`.
        """
        if self.decoder is None or not self.kernel.multiplies_by_warps:
            multiply = functools.partial(self._multiply, height_index)
            return self.ring.accumulate(
                used, steps, shape, multiply, meanwhile, least_steps, self._running
            )

        # `warp_products` multiplies all pieces of a part. Parts are in the order of their places.
        in_order = sorted(self._encoded_parts, key=lambda part: part[0])
        parts = [each for _, (piece, *each) in in_order if piece == 0]
        decoder, left = self.decoder, self.ring.left

        def add(totals: jax.Array, stage: jax.Array) -> jax.Array:
            def of_height(height: int) -> jax.Array:
                return warp_products.add_products(totals, left, stage, decoder, parts, height)

            branches = [functools.partial(of_height, height) for height in self.row_tiles.heights]
            return lax.switch(height_index, branches)

        nothing = zeros(shape, jnp.float32, plgpu.Layout.WGMMA, self.kernel.interpreted)
        return self.ring.accumulate_complete(used, steps, nothing, add, meanwhile, least_steps)

    @property
    def _running(self) -> int:
        """The number of matmuls of a step that may still run when the step ends."""
        return (
            self.kernel.num_matrices if self.decoder is None else min(len(self._encoded_parts), 2)
        )

    def _multiply(
        self, height_index: jax.Array, accumulator: Any, stage: jax.Array, _: jax.Array
    ) -> None:
        """Starts the matmuls of stage `stage`, for a tile of heights[height_index] rows."""
        if self.decoder is None:
            of_height = functools.partial(self._multiply_staged, accumulator, stage)
        else:
            of_height = functools.partial(self._multiply_decoded, accumulator, stage, self.decoder)
        lax.switch(
            height_index,
            [functools.partial(of_height, height) for height in self.row_tiles.heights],
        )

    def _multiply_staged(self, accumulator: Any, stage: jax.Array, height: int) -> None:
        rows = transposed(self.ring.left.at[stage, :height])
        for i, columns in enumerate(self._staged_columns(stage)):
            first = i * self.kernel.tiles.block_m
            plgpu.wgmma(accumulator.at[:, first : first + height], columns, rows)

    def _multiply_decoded(
        self, accumulator: Any, stage: jax.Array, decoder: Decoder, height: int
    ) -> None:
        """Decodes part by part, while the tensor cores multiply the part before."""
        parts = self._encoded_parts
        loaded = decoder.load(stage, *parts[0][1])
        for i, ((top, left), (piece, _, _)) in enumerate(parts):
            # The tensor cores may read registers until their matmul is complete. So before a part
            # is decoded, the matmul of the part that these registers held last must be complete.
            plgpu.wgmma_wait(min(len(parts) - 1, 1))
            columns = decoder.decode(loaded, self.number, i)
            position = slice(top, top + CHUNK), slice(left, left + height)
            rows = self.ring.left.at[stage, :height, piece * STEP : (piece + 1) * STEP]
            plgpu.wgmma(accumulator.at[position], columns, transposed(rows))
            if i + 1 < len(parts):
                loaded = decoder.load(stage, *parts[i + 1][1])

    @property
    def _encoded_parts(self) -> list[tuple[tuple[int, int], tuple[int, Any, Any]]]:
        """The parts in which this warpgroup decodes its columns of each matrix.

        A part is a piece of 64 columns. It is described by the first column and row of its product
        in the accumulator, and by (the piece, the index of the matrix, the first column in the
        tile).
        """
        tiles = self.kernel.tiles
        return [
            ((first, i * tiles.block_m), (piece, i, self._first_column + first))
            for piece in range(tiles.step // STEP)
            for i in range(self.kernel.num_matrices)
            for first in range(0, tiles.part, CHUNK)
        ]

    def _staged_columns(self, stage: jax.Array) -> list[Any]:
        """Returns references to this warpgroup's columns of each matrix, [part, 64], in a stage."""
        mine = pl.ds(self._first_column, self.kernel.tiles.part)
        tiles = self.ring.right_tiles(stage)
        if self.kernel.transpose_rhs:
            return [tile.at[mine] for tile in tiles]
        return [transposed(tile.at[:, mine]) for tile in tiles]


def _cut(arrays: Sequence[jax.Array], columns: slice, rows: slice) -> tuple[jax.Array, ...]:
    return tuple(array[columns, rows] for array in arrays)
