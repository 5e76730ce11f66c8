"""Grouped matmuls of float8 rows and matrices on Hopper's tensor cores.

Rows have a float32 scale for each 128 columns of a row, and matrices have one for each 128 x 128
block. The tensor cores add float8 products with a precision of about 14 bits. So they sum only 128
products at a time. Each sum is multiplied by the scales of its rows and matrix block, and added to
float32 totals.

The contraction dimension K is cut into steps of 128. In a step, a thread block multiplies a tile of
the rows `lhs` by two tiles of the matrices `rhs`, for two halves of a tile of the output `out`:

    lhs [R, K]                  rhs [L, N, K]                     out [R, N]
    128 rows x 128 of K  times  2 x [128 columns x 128 of K]  =   2 x [128 rows x 128 columns]

A thread block has a loader warpgroup, which copies operands into a ring of stages in shared memory,
and two compute warpgroups, which multiply them (see `pallas_kernels.matmul.kernel`). A compute
warpgroup multiplies 64 rows of an output tile by the two matrix tiles of 128 columns, the *halves*,
one after the other. In `product` the halves are adjacent columns of one matrix; in `gated_product`
they are the same columns of two matrices. The registers of a compute warpgroup hold the totals of
both halves, and the accumulators of one half. While one compute warpgroup adds scaled sums to its
totals, the other one uses the tensor cores.

A group's last tile may have 64 rows or fewer. In `product` each compute warpgroup then multiplies
these rows by one of the two halves; in `gated_product` the second one has nothing to compute.

Both operands are stored with the contraction dimension innermost, which the tensor cores require of
float8 operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import float8, mosaic
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fabric.fabric import drain
from pallas_kernels.fabric.mosaic import Value, arith, vector
from pallas_kernels.formats import FLOAT8_ROWS
from pallas_kernels.matmul import register_tiles, tensor_cores
from pallas_kernels.matmul.chosen_groups import ChosenGroups, output_rows
from pallas_kernels.matmul.kernel import (
    COMPUTERS,
    Kernel,
    aligned,
    check_buffers,
    launch,
    quotient_and_rest,
    swizzled,
)
from pallas_kernels.matmul.quantized_tiles import Scaled, max_of, scale_of, with_shuffled
from pallas_kernels.matmul.row_blocks import BLOCK
from pallas_kernels.matmul.row_tiles import (
    BEGIN,
    END,
    FIRST,
    GROUP,
    table_of,
)

# The number of rows of an output tile that each compute warpgroup computes.
ROWS = BLOCK // COMPUTERS
# A compute warpgroup multiplies its rows by this many matrix tiles of 128 columns, the two halves
# of an output tile.
HALVES = 2
# A compute warpgroup stores an output tile in several parts. A row of a part has this many bytes.
_ROW_BYTES = 128


@dataclasses.dataclass(frozen=True)
class Float8Tiles:
    """The options of the float8 kernels: pipeline stages, and the order and width of output tiles.

    Attributes:
      num_stages: number of pipeline stages in the ring, at least 2. A stage's operand tiles are 128
        long along the contraction dimension.
      band: number of columns of output tiles in a band. A band is some adjacent columns of tiles,
        over the whole height of the output. The thread blocks compute the output band by band, and
        within a band row of tiles by row of tiles.
      block_n: number of columns of an output tile: 256, or 128 if the halves of a tile are the same
        columns of two matrices. Callers keep the default; `gated_product` and `drhs_of_each`
        replace it.
    """

    num_stages: int = 4
    band: int = 8
    block_n: int = HALVES * BLOCK

    def __post_init__(self) -> None:
        check_buffers(self)


def product(
    pairs: Sequence[tuple[Scaled, Scaled]],
    groups: jax.Array | ChosenGroups,
    *,
    dtype: Any,
    num_blocks: int,
    num_waves: int = 1,
    zero_unused: bool = False,
    tiles: Float8Tiles | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Multiplies each row by its group's matrix, and sums the products over (rows, matrices) pairs.

    Args:
      pairs: one or more pairs (rows [R, K], matrices [L, N, K]), float8 with scales. The matrix of
        group l is the transpose of matrices[l]. R is a multiple of 8.
      groups: [L] int32, the number of rows of each group, in order; or S chosen groups of at most
        64 rows, where R is their height, or S times the height.
      dtype: the dtype of the result: bfloat16, float16 or float32.
      num_blocks: number of thread blocks that run at the same time.
      num_waves: number of waves of thread blocks; see `kernel.Kernel.walk`.
      zero_unused: whether rows past the last group become zero; else they are not written.
      tiles: number of pipeline stages and order of tiles, or None for the default.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      [R, N] of `dtype`, or [S * height, N] for chosen groups. The products of all pairs are summed
      in float32, and each sum is rounded once. Without `zero_unused`, the contents of rows past the
      last group are undefined.
    """
    lhs, rhs = pairs[0]
    num_rows, width = output_rows(groups, lhs.values.shape[0]), rhs.values.shape[1]
    kernel = _Product(
        tiles or Float8Tiles(),
        num_blocks,
        bool(interpret),
        width,
        tuple(rows.values.shape[1] for rows, _ in pairs),
        jnp.dtype(lhs.values.dtype),
        jnp.dtype(dtype),
        shared_rows=lhs.values.shape[0] < num_rows,
        zero_unused=zero_unused,
        num_waves=num_waves,
    )
    operands = [array for rows, matrices in pairs for array in _operands(rows, matrices)]
    return _run(
        kernel,
        operands,
        groups,
        jax.ShapeDtypeStruct((num_rows, width), dtype),
        "grouped_matmul_float8",
        interpret,
    )


def gated_product(
    lhs: Scaled,
    rhs: tuple[Scaled, Scaled],
    groups: jax.Array | ChosenGroups,
    gating: Elementwise,
    *,
    keep: bool,
    num_blocks: int,
    num_waves: int = 1,
    tiles: Float8Tiles | None = None,
    interpret: Any = None,
) -> tuple[Scaled, ...]:
    """Computes gating(lhs @ rhs[0][group].T, lhs @ rhs[1][group].T), and quantizes the result.

    `group` stands for the group of a row of lhs.

    Args:
      lhs: rows [R, K], float8 with scales; R is a multiple of 8.
      rhs: two arrays of transposed matrices [L, N, K], float8 with scales.
      groups: [L] int32, the number of rows of each group, in order; or S chosen groups of at most
        64 rows, whose height is R.
      gating: an elementwise function of the two float32 products.
      keep: whether to return the two products, too.
      num_blocks: number of thread blocks that run at the same time.
      num_waves: number of waves of thread blocks; see `kernel.Kernel.walk`.
      tiles: number of pipeline stages and order of tiles, or None for the default.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      The gated product, rows [R, N], or [S * height, N] for chosen groups, float8 of lhs's dtype
      with scales; with `keep` also the two products, in the same format. The contents of rows past
      the last group are undefined.
    """
    num_rows, width = output_rows(groups, lhs.values.shape[0]), rhs[0].values.shape[1]
    kernel = _GatedProduct(
        dataclasses.replace(tiles or Float8Tiles(), block_n=BLOCK),
        num_blocks,
        bool(interpret),
        width,
        (lhs.values.shape[1],),
        jnp.dtype(lhs.values.dtype),
        jnp.dtype(lhs.values.dtype),
        shared_rows=lhs.values.shape[0] < num_rows,
        gating=gating,
        keep=keep,
        num_waves=num_waves,
    )
    values = jax.ShapeDtypeStruct((num_rows, width), lhs.values.dtype)
    scales = jax.ShapeDtypeStruct((num_rows, width // BLOCK), jnp.float32)
    # The next matmul takes the scales of the hidden values transposed.
    turned = jax.ShapeDtypeStruct(scales.shape[::-1], jnp.float32)
    results = _run(
        kernel,
        _operands(lhs, *rhs),
        groups,
        [values, turned, *[values, scales] * (kernel.outputs - 1)],
        "grouped_matmul_float8_gated",
        interpret,
    )
    (hidden, of_hidden), *products = zip(results[::2], results[1::2], strict=True)
    return Scaled(hidden, of_hidden.T), *(Scaled(*product) for product in products)


def _operands(rows: Scaled, *matrices: Scaled) -> list[jax.Array]:
    """Returns the operands of a kernel: values and scales of `rows`, and of each of `matrices`.

    The scales of the rows are transposed to [K / 128, R], so that the scales of a tile's rows are
    contiguous and can be copied at once.
    """
    return [rows.values, rows.scales.T, *(array for each in matrices for array in each)]


def _run(kernel, operands, groups, out_type, name, interpret):
    num_rows = operands[0].shape[0]
    table = table_of(groups, (BLOCK,), num_rows, interpreted=bool(interpret))
    return launch(kernel, kernel.scratch_types(), out_type, name, interpret)(*operands, table)


@dataclasses.dataclass(frozen=True)
class Float8Kernel(Kernel):
    """Base class of the float8 kernels: the operand ring, the sums, and the stores.

    Attributes:
      depths: for each pair (lhs, rhs) of operands, K, the length of the contraction dimension.
      dtype: float8 dtype of the operands.
      out_dtype: dtype of the outputs' values.
      shared_rows: whether all row tiles multiply the same rows, the first of each left operand.
    """

    depths: tuple[int, ...]
    dtype: Any
    out_dtype: Any
    shared_rows: bool

    # Whether each row of the left operand has its own scales. If not, 128 rows share their scales.
    rows_have_scales: ClassVar[bool] = True

    @property
    def num_matrices(self) -> int:
        """Returns the number of right operands, 1 or 2, of which a stage holds tiles."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        """Returns the number of steps in which an output element is summed.

        The sum runs over the contraction dimensions of all pairs (lhs, rhs) of operands. A step
        adds 128 products.
        """
        return sum(self.depths) // BLOCK

    @property
    def chunk(self) -> int:
        """Returns the number of output columns that are stored at a time: 128 bytes of a row."""
        return _ROW_BYTES // self.out_dtype.itemsize

    def scratch_types(self) -> dict[str, Any]:
        stages, operand = self.tiles.num_stages, swizzled(self.dtype)
        types = dict(
            left=plgpu.SMEM((stages, BLOCK, BLOCK), self.dtype, transforms=operand),
            right=plgpu.SMEM((stages, HALVES * BLOCK, BLOCK), self.dtype, transforms=operand),
            block_scales=plgpu.SMEM((stages, HALVES), jnp.float32),
            staged=plgpu.SMEM((COMPUTERS, ROWS, self.chunk), self.out_dtype),
            full=plgpu.Barrier(
                num_arrivals=2 + self.rows_have_scales + self.num_matrices, num_barriers=stages
            ),
            empty=plgpu.Barrier(num_arrivals=COMPUTERS, num_barriers=stages),
        )
        if self.rows_have_scales:
            types["row_scales"] = plgpu.SMEM((stages, BLOCK), jnp.float32)
        return types

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        num_operands = 2 * (1 + self.num_matrices) * len(self.depths)
        operands, table, outs = refs[:num_operands], refs[num_operands], refs[num_operands + 1 :]
        num_tiles = table[table.shape[0] - 1, 0]
        total_tiles = num_tiles * self.tile_columns

        def look_up(index):
            tile, left_edge = self.tile_position(index, num_tiles)
            return *(table[tile, i] for i in (GROUP, FIRST, BEGIN, END)), left_edge

        used_rows = table[table.shape[0] - 1, 1]
        self.walk_tiles(total_tiles, look_up, operands, outs, scratch, used_rows)

    def walk_tiles(
        self,
        total: jax.Array,
        look_up: Any,
        operands: Any,
        outs: Any,
        scratch: Any,
        used_rows: jax.Array | int = 0,
    ) -> None:
        """Loads the operands of each output tile in one warpgroup; computes it in the other two.

        Args:
          total: int32, the number of output tiles of all thread blocks.
          look_up: maps the index of an output tile, less than `total`, to the description of the
            tile that `load_tile` and `compute_tile` take.
          operands: references to the operands.
          outs: references to the outputs.
          scratch: references to shared memory and barriers, by the names in `scratch_types`.
          used_rows: int32, the number of rows in groups, for `finish`.
        """

        def load():
            def one_tile(tile, _, used):
                return self.load_tile(tile, used, operands, scratch)

            used = self.walk(total, look_up, one_tile, jnp.int32(0))
            drain(scratch["empty"], used, self.tiles.num_stages)

        def compute(computer):
            def one_tile(tile, _, used):
                return self.compute_tile(computer, tile, used, outs, scratch)

            self.walk(total, look_up, one_tile, jnp.int32(0))
            self.finish(computer, used_rows, outs, scratch)

        self.take_roles(load, compute)

    def finish(self, computer: jax.Array, used_rows: Any, outs: Any, scratch: Any) -> None:
        """Runs in each compute warpgroup after its last output tile; does nothing by default.

        `computer` is the index of the warpgroup, and `used_rows` the number of rows in groups.
        `outs` are references to the outputs, and `scratch` those to shared memory, by name.
        """

    def compute_tile(
        self, computer: jax.Array, tile: Any, used: jax.Array, outs: Any, scratch: Any
    ) -> jax.Array:
        """Computes and stores a compute warpgroup's part of an output tile.

        Args:
          computer: the index of the compute warpgroup, 0 or 1.
          tile: the description of the tile.
          used: int32, the number of steps that this warpgroup has multiplied or skipped before.
          outs: references to the outputs.
          scratch: references to shared memory and barriers, by name.

        Returns:
          The new value of `used`.
        """
        raise NotImplementedError

    def columns_of(self, left_edge: Any) -> Any:
        """Returns which columns of each right operand an output tile needs, as a slice.

        The slice begins at `left_edge`. It has 256 columns if there is one right operand, and 128
        if there are two.
        """
        return pl.ds(pl.multiple_of(left_edge, BLOCK), HALVES * BLOCK // self.num_matrices)

    def block_scales(
        self, scales: Sequence[Any], left_edge: Any, at: Callable[[Any, Any], Any]
    ) -> list[Any]:
        """Returns references to the scales of the two halves, 128 columns each, of an output tile.

        If the output ends after the tile's first half, both references are to the scale of the
        first half; the second reference is then not used.

        Args:
          scales: for each right operand, a reference to the array of its scales.
          left_edge: the first column of the output tile.
          at: `at(array, block)` returns a reference to one of the scales in `array`: that of the
            128 columns from 128 * block on.
        """
        block = lax.div(left_edge, jnp.int32(BLOCK))
        if self.num_matrices > 1:
            return [at(of_matrix, block) for of_matrix in scales]
        last = self.width // BLOCK - 1
        return [at(scales[0], jnp.minimum(block + half, last)) for half in range(HALVES)]

    def store(self, *args: Any) -> None:
        """Calls `register_tiles.store_rows_through`."""
        register_tiles.store_rows_through(*args, interpreted=self.interpreted)

    def load_tile(self, tile: Any, used: jax.Array, operands: Any, scratch: Any) -> jax.Array:
        """Copies the operands of an output tile into the ring, step by step.

        `tile` is the description of the output tile. `used` is the number of steps for which the
        loader has filled a stage before. Returns its new value.
        """
        group, first, _, _, left_edge = tile
        # Shared rows begin at row 0. Pallas would refuse a constant 0, because there may be fewer
        # than 128 rows. Copies read zeros past the last row.
        first = jnp.minimum(first, 0) if self.shared_rows else first
        rows = pl.ds(aligned(first), BLOCK)
        together = 2 * (1 + self.num_matrices)
        for k, depth in enumerate(self.depths):
            values, scales, *matrices = operands[k * together : (k + 1) * together]

            def step(i, used, values=values, scales=scales, matrices=matrices):
                inner, columns = pl.ds(i * BLOCK, BLOCK), self.columns_of(left_edge)
                return self.fill_stage(
                    scratch,
                    used,
                    values.at[rows, inner],
                    scales.at[i, rows],
                    [matrix.at[group, columns, inner] for matrix in matrices[::2]],
                    self.block_scales(
                        matrices[1::2], left_edge, lambda scales, block: scales.at[group, block, i]
                    ),
                )

            used = lax.fori_loop(0, depth // BLOCK, step, used)
        return used

    def fill_stage(
        self,
        scratch: Any,
        used: jax.Array,
        left: Any,
        left_scales: Any,
        rights: Sequence[Any],
        block_scales: Sequence[Any],
    ) -> jax.Array:
        """Copies one step's operand tiles and scales into the ring, once the step's stage is empty.

        Args:
          scratch: references to the ring's arrays and barriers, by name.
          used: int32, the number of steps for which the loader has filled a stage before.
          left: reference in global memory to the tile of the left operand.
          left_scales: reference to the scales of the rows of `left`, or to its scale if the rows
            share one.
          rights: reference to the tile of each right operand.
          block_scales: reference to the scale of each half of the output tile's columns.

        Returns:
          `used` + 1.
        """
        stage = lax.rem(used, jnp.int32(self.tiles.num_stages))
        # The scales are loaded first, so that they arrive while the loader waits.
        of_left = 1 if self.rows_have_scales else left_scales[...]
        of_blocks = [scale[...] * of_left for scale in block_scales]

        @pl.when(used >= self.tiles.num_stages)
        def _():
            plgpu.barrier_wait(scratch["empty"].at[stage])

        full = scratch["full"].at[stage]
        plgpu.copy_gmem_to_smem(left, scratch["left"].at[stage], full)
        if self.rows_have_scales:
            plgpu.copy_gmem_to_smem(left_scales, scratch["row_scales"].at[stage], full)
        width = HALVES * BLOCK // len(rights)
        for i, right in enumerate(rights):
            at = scratch["right"].at[stage, i * width : (i + 1) * width]
            plgpu.copy_gmem_to_smem(right, at, full)
        for half, scale in enumerate(of_blocks):
            scratch["block_scales"][stage, half] = scale
        plgpu.barrier_arrive(full)
        return used + 1

    def accumulate_halves(
        self,
        used: jax.Array,
        row: Any,
        first_half: Any,
        num_halves: jax.Array | int,
        steps: jax.Array | int,
        scratch: Any,
    ) -> tuple[jax.Array, ...]:
        """Multiplies the tiles of the ring's next `steps` steps, and sums the scaled products.

        Computes 64 rows of an output tile, in one or both of its halves of 128 columns.

        Args:
          used: int32, the number of steps that this warpgroup has multiplied or skipped before.
          row: the first of the 64 rows in the left operand's tiles.
          first_half: the index of the first half to compute, 0 or 1.
          num_halves: the number of halves to compute, 1 or 2.
          steps: number of steps.
          scratch: references to the ring's arrays and barriers.

        Returns:
          Two sums [64, 128] float32: those of the halves first_half and first_half + 1. The second
          sum is zero if `num_halves` is 1.
        """
        num_stages = jnp.int32(self.tiles.num_stages)
        zero = jnp.zeros((ROWS, BLOCK), jnp.float32)
        if not self.interpreted:
            zero = plgpu.layout_cast(zero, plgpu.Layout.WGMMA)

        def step(i, totals):
            stage = lax.rem(used + i, num_stages)
            plgpu.barrier_wait(scratch["full"].at[stage])
            row_scales = None
            if self.rows_have_scales:
                row_scales = self.load_scales(scratch["row_scales"].at[stage, pl.ds(row, ROWS)])
            # If there is one half, the scale of the second one is not used.
            block_scales = [
                scratch["block_scales"][stage, jnp.minimum(first_half + half, HALVES - 1)]
                for half in range(HALVES)
            ]
            totals = tensor_cores.add_float8_products(
                totals,
                scratch["left"],
                scratch["right"],
                stage,
                row,
                first_half,
                num_halves,
                row_scales,
                block_scales,
                interpreted=self.interpreted,
            )
            # On a GPU the tensor cores read the operands. In Pallas' interpreter the threads do, so
            # there a fence must order their reads before the loader's next copies into the stage.
            if self.interpreted:
                plgpu.commit_smem()
            plgpu.barrier_arrive(scratch["empty"].at[stage])
            return totals

        return lax.fori_loop(0, steps, step, (zero,) * HALVES)

    def load_scales(self, scales: Any) -> jax.Array:
        """Loads the scales of 64 rows from shared memory, as each thread needs them."""
        if self.interpreted:
            return scales[...]
        return plgpu.load(scales, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def skip(self, used: jax.Array, scratch: Any) -> None:
        """Releases the ring's stages with the operands of an output tile, without multiplying them.

        A compute warpgroup that has nothing to compute for the tile calls it instead of
        `accumulate_halves`, since the loader waits until both compute warpgroups release a stage.
        `used` is the number of steps that this warpgroup has multiplied or skipped before.
        """

        def step(i, _):
            stage = lax.rem(used + i, jnp.int32(self.tiles.num_stages))
            plgpu.barrier_wait(scratch["full"].at[stage])
            plgpu.barrier_arrive(scratch["empty"].at[stage])

        lax.fori_loop(0, self.steps, step, None)


@dataclasses.dataclass(frozen=True)
class _Product(Float8Kernel):
    """The kernel of `product`: a tile's two halves of 128 columns are adjacent in one matrix.

    Attributes:
      zero_unused: whether the kernel zeroes the rows past the last group.
    """

    zero_unused: bool

    @property
    def num_matrices(self) -> int:
        return 1

    def compute_tile(self, computer, tile, used, outs, scratch) -> jax.Array:
        _, first, begin, end, left_edge = tile
        is_short = end - first <= ROWS
        row = pl.multiple_of(jnp.where(is_short, 0, computer * ROWS), ROWS)
        first_half = jnp.where(is_short, computer, 0)
        totals = self.accumulate_halves(
            used, row, first_half, jnp.where(is_short, 1, HALVES), self.steps, scratch
        )
        top, left = first + row, left_edge + first_half * BLOCK
        room = scratch["staged"].at[computer]
        for half, total in enumerate(totals):

            def store(total=total, left=left + half * BLOCK):
                self.store_half(total, outs[0], room, top, left, begin - top, end - top)

            exists = (left + half * BLOCK < self.width) & (top < end)
            pl.when(exists & jnp.logical_not(is_short) if half else exists)(store)
        return used + self.steps

    def store_half(
        self, total: jax.Array, out: Any, room: Any, top: Any, left: Any, begin: Any, end: Any
    ) -> None:
        """Stores rows [begin, end) of one half of a tile to `out`.

        `total` is this warpgroup's part of the half, [64, 128] float32. It is converted to the
        dtype of the output and stored `self.chunk` columns at a time. The other arguments are those
        of `register_tiles.store_rows_through`.
        """
        for i in range(0, BLOCK, self.chunk):
            part = total[:, i : i + self.chunk].astype(self.out_dtype)
            self.store(room, out, part, top, left + i, begin, end)

    def finish(self, computer: jax.Array, used_rows: jax.Array, outs: Any, scratch: Any) -> None:
        if not self.zero_unused:
            return
        (out,), room = outs, scratch["staged"].at[computer]
        nothing = jnp.zeros((ROWS, self.chunk), self.out_dtype)
        if not self.interpreted:
            nothing = plgpu.layout_cast(nothing, plgpu.Layout.WGMMA)
        # The rows from `used_rows` on are zeroed in chunks of 64 rows by `self.chunk` columns. The
        # compute warpgroups of all thread blocks take turns at the chunks.
        worker = lax.axis_index("block") * COMPUTERS + computer
        workers, columns = (
            jnp.int32(self.all_blocks * COMPUTERS),
            jnp.int32(self.width // self.chunk),
        )
        first = lax.div(used_rows, jnp.int32(ROWS))
        chunks = (-(-out.shape[0] // ROWS) - first) * columns

        def zero_chunk(i: jax.Array, _: None) -> None:
            row, column = quotient_and_rest(worker + i * workers, columns)
            top = (first + row) * ROWS
            begin, end = used_rows - top, out.shape[0] - top
            self.store(room, out, nothing, top, column * self.chunk, begin, end)

        lax.fori_loop(0, lax.div(chunks - worker + (workers - 1), workers), zero_chunk, None)


@dataclasses.dataclass(frozen=True)
class _GatedProduct(Float8Kernel):
    """The kernel of `gated_product`, whose tiles hold both products that the gating needs.

    The left half of a tile is the product with 128 columns of a group's first matrix, the right
    half the product with the same columns of its second matrix.
    """

    gating: Elementwise
    keep: bool

    @property
    def num_matrices(self) -> int:
        return HALVES

    @property
    def outputs(self) -> int:
        return 3 if self.keep else 1

    def compute_tile(self, computer, tile, used, outs, scratch) -> jax.Array:
        _, first, begin, end, left_edge = tile
        row = pl.multiple_of(computer * ROWS, ROWS)
        top = first + row
        has_rows = top < end

        @pl.when(has_rows)
        def _():
            products = self.accumulate_halves(used, row, 0, HALVES, self.steps, scratch)
            room = scratch["staged"].at[computer]

            def store(rows, index):
                values, scales = _quantize(rows, interpreted=self.interpreted)
                self.store(room, outs[2 * index], values, top, left_edge, begin - top, end - top)
                register_tiles.store_column(
                    outs[2 * index + 1],
                    scales,
                    top,
                    lax.div(left_edge, jnp.int32(BLOCK)),
                    begin - top,
                    end - top,
                    to_row=index == 0,
                    interpreted=self.interpreted,
                )

            store(self.gating(*products, interpreted=self.interpreted), 0)
            if self.keep:
                for i, rows in enumerate(products):
                    store(rows, 1 + i)

        @pl.when(jnp.logical_not(has_rows))
        def _():
            self.skip(used, scratch)

        return used + self.steps


def _quantize(rows: jax.Array, *, interpreted: bool) -> tuple[jax.Array, jax.Array]:
    """Computes a scale for each of the rows [64, 128] float32, and multiplies the row by 1 / scale.

    Returns:
      (numbers, scales). `numbers`, [64, 128], are the rows times 1 / scale. On a GPU they are
      float32, and the caller rounds them to float8; Pallas' interpreter has rounded them already.
      `scales` are [64] float32.
    """
    if interpreted:
        values, scales = FLOAT8_ROWS.encode(rows)
        return values, scales[:, 0]
    layout = plgpu.Layout.WGMMA
    results = [
        plgpu.ShapeDtypeStruct(rows.shape, jnp.float32, layout=layout),
        plgpu.ShapeDtypeStruct(rows.shape[:1], jnp.float32, layout=layout.reduce(1)),
    ]
    return tuple(mosaic.inline(_emit_quantize, [rows], [layout], results))


def _emit_quantize(rows: mosaic.Array) -> list[mosaic.Array]:
    """Emits `_quantize` for one thread, which has 32 numbers of each of two rows.

    Infinities are rare, so a thread looks for them only if its largest magnitude is one. The
    maximum ignores NaN, and a NaN stays one when it is multiplied.
    """
    pairs = mosaic.registers(rows)
    numbers = [vector.extract(pair, [], [i]) for pair in pairs for i in range(2)]

    def of_row(values: Sequence[Any], row: int) -> list[Any]:
        return [value for i, value in enumerate(values) if i // 2 % 2 == row]

    def without_infinities() -> list[Value]:
        is_finite, bits = zip(*(float8.magnitude(number) for number in numbers), strict=True)
        clean = map(float8.or_nan, numbers, is_finite)
        return [*clean, *(max_of(of_row(bits, row)) for row in range(2))]

    sizes = [float8.largest_magnitude(of_row(numbers, row)) for row in range(2)]
    finite = mosaic.below(max_of(sizes), mosaic.i32(float8.INFINITY))
    *numbers, first, second = mosaic.unless(finite, without_infinities, [*numbers, *sizes])
    # Four threads have a part of each of the two rows.
    sizes = with_shuffled(with_shuffled([first, second], 1), 2)
    scales, inverses = zip(*map(scale_of, sizes), strict=True)
    scaled = [arith.mulf(number, inverses[i // 2 % 2]) for i, number in enumerate(numbers)]
    f32 = mosaic.float_type()
    pairs = [
        vector.from_elements(mosaic.vector_type(2, f32), scaled[i : i + 2])
        for i in range(0, len(scaled), 2)
    ]
    return [
        mosaic.tensor_core_array(pairs, rows.shape, f32),
        mosaic.tensor_core_rows(scales, rows.shape[0], f32),
    ]
