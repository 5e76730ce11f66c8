"""Grouped matmuls of float8 rows and matrices on Hopper's tensor cores.

Rows have a float32 scale for each 128 columns of a row, and matrices have one for each 128 x 128
block. The tensor cores add float8 products with a precision of about 14 bits. So they sum only 128
products at a time. Each sum is multiplied by its row's and block's scales, and added to a total.

In a step of 128 along K, a thread block multiplies a tile of the rows `lhs` by two tiles of the
matrices `rhs`, for two halves of a tile of the output `out`:

  lhs [R, K]                  rhs [L, N, K]                     out [R, N]
  128 rows x 128 of K  times  2 x [128 columns x 128 of K]  =   2 x [128 rows x 128 columns]

Operands are copied to a ring of stages in shared memory (`operand_ring`). Two compute warpgroups
multiply them, each 64 rows of an output tile by the two matrix tiles of 128 columns, the *halves*,
one after the other. In `float8_matmul` the halves are adjacent columns of one matrix; in
`float8_gated_matmul` they are the same columns of two matrices. The registers of a compute
warpgroup hold the totals of both halves, and the accumulators of one half. While one compute
warpgroup adds scaled sums to its totals, the other one uses the tensor cores. Most tiles of one
matrix are *narrow*: of one half, whose totals and accumulators leave registers for a loader.

A group's last tile may have 64 rows or fewer. In `float8_matmul` each compute warpgroup then
multiplies these rows by one of the halves; in `float8_gated_matmul` the second one has no work.

Both operands are stored with K innermost, as the tensor cores require of float8 operands.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import float8, mosaic
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fabric.mosaic import Value, arith, vector
from pallas_kernels.formats import FLOAT8_ROWS, Scaled
from pallas_kernels.matmul import register_tiles, tensor_cores
from pallas_kernels.matmul.chosen_groups import Groups, output_rows
from pallas_kernels.matmul.kernel import (
    COMPUTERS,
    Kernel,
    even_bands,
    launch,
    stage_of,
    swizzled,
    zeros,
)
from pallas_kernels.matmul.operand_ring import Feed, Feeder, Loader, Slot, stage_after
from pallas_kernels.matmul.quantized_tiles import max_of, with_shuffled
from pallas_kernels.matmul.register_tiles import Target
from pallas_kernels.matmul.row_blocks import BLOCK
from pallas_kernels.matmul.row_tiles import BEGIN, END, FIRST, GROUP, table_of
from pallas_kernels.matmul.store import Position

# The number of rows of an output tile that each compute warpgroup computes.
ROWS = BLOCK // COMPUTERS
# The most matrix tiles of 128 columns by which a compute warpgroup multiplies its rows.
HALVES = 2
# The bytes of a right operand that a band of tiles should read: a third of the second level of the
# cache. Measured with K from 768 to 28672, and N from 768 to 14336.
_BAND_BYTES = 2**24
# A compute warpgroup stores an output tile in several parts. A row of a part has this many bytes.
_ROW_BYTES = 128
# If groups have fewer rows than this on average, a kernel takes the time to read the matrices, of
# which tiles of two halves have more under way. Measured with 1 to 8 and with 256 rows.
_FEW_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Float8Tiles:
    """The options of the float8 kernels: pipeline stages, order and width of output tiles."""

    # Of 128 of K each; at least 3, and an even number without a loader.
    num_stages: int = 4
    # Columns of output tiles in a band; see `Kernel.tile_position`.
    band: int = 8
    # Columns of an output tile: 128 of each matrix, or 256 of one matrix.
    block_n: int = BLOCK
    # Whether a computer waits for a step's operands and scales while it multiplies the step before.
    waits_ahead: bool = True

    # In both methods, `few_rows` is whether groups have fewer than `_FEW_ROWS` rows on average. A
    # computer then waits for memory, and should release a stage before it waits.

    @classmethod
    def of(cls, width: int, depth: int, few_rows: bool) -> Float8Tiles:
        """Returns the fastest tiles for matrices [K, `width`]; `depth` is K, summed over pairs."""
        if few_rows:
            return cls(block_n=HALVES * BLOCK, waits_ahead=False)
        return cls(num_stages=6, band=band_in_cache(width, BLOCK, depth))

    @classmethod
    def of_gated(cls, width: int, few_rows: bool) -> Float8Tiles:
        """Returns the fastest tiles for two matrices of `width` columns each."""
        return cls(band=even_bands(width, BLOCK, most=8), waits_ahead=not few_rows)


def band_in_cache(width: int, block_n: int, depth: int) -> int:
    return even_bands(width, block_n, max(_BAND_BYTES // (block_n * depth), 1))


def float8_matmul(
    pairs: Sequence[tuple[Scaled, Scaled]],
    groups: Groups,
    *,
    dtype: Any,
    num_blocks: int,
    num_waves: int = 1,
    zero_unused: bool = False,
    tiles: Float8Tiles | None = None,
) -> jax.Array:
    """Multiplies each row by its group's matrix, and sums the products over (rows, matrices) pairs.

    Args:
      pairs: one or more pairs (rows [R, K], matrices [L, N, K]), float8 with scales. The matrix of
        group l is the transpose of matrices[l]. R is a multiple of 8.
      groups: [L] int32, the number of rows of each group, in order; or S chosen groups of at most
        64 rows, where R is their height, or S times the height.
      dtype: the dtype of the result: bfloat16, float16 or float32.

    The others are as for `grouped_matmul.grouped_matmul`; `tiles` None: those of `Float8Tiles.of`.

    Returns:
      [R, N] of `dtype`, or [S * height, N] for chosen groups. The products of all pairs are summed
      in float32, and each sum is rounded once.
    """
    lhs, rhs = pairs[0]
    num_rows, width = output_rows(groups, lhs.values.shape[0]), rhs.values.shape[1]
    few_rows = num_rows < _FEW_ROWS * rhs.values.shape[0]
    depths = tuple(rows.values.shape[1] for rows, _ in pairs)
    kernel = _Product(
        tiles=tiles or Float8Tiles.of(width, sum(depths), few_rows),
        num_blocks=num_blocks,
        width=width,
        depths=depths,
        dtype=jnp.dtype(lhs.values.dtype),
        out_dtype=jnp.dtype(dtype),
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
    )


def float8_gated_matmul(
    lhs: Scaled,
    rhs: tuple[Scaled, Scaled],
    groups: Groups,
    gating: Elementwise,
    *,
    keep: bool,
    num_blocks: int,
    num_waves: int = 1,
    tiles: Float8Tiles | None = None,
) -> tuple[Scaled, ...]:
    """Computes gating(lhs @ rhs[0][group].T, lhs @ rhs[1][group].T), and quantizes the result.

    Args:
      lhs: rows [R, K], float8 with scales; R is a multiple of 8.
      rhs: two arrays of transposed matrices [L, N, K], float8 with scales.
      groups: as for `float8_matmul`, but R is the height of chosen groups.
      gating: an elementwise function of the two float32 products.
      keep: whether to return the two products, too.
      num_blocks, num_waves: as for `grouped_matmul.grouped_matmul`.
      tiles: None: those of `Float8Tiles.of_gated`.

    Returns:
      The gated product, rows [R, N], or [S * height, N] for chosen groups, float8 of lhs's dtype
      with scales; with `keep` also the two products. Rows past the last group are undefined.
    """
    num_rows = output_rows(groups, lhs.values.shape[0])
    num_groups, width, _ = rhs[0].values.shape
    kernel = _GatedProduct(
        tiles=tiles or Float8Tiles.of_gated(width, num_rows < _FEW_ROWS * num_groups),
        num_blocks=num_blocks,
        width=width,
        depths=(lhs.values.shape[1],),
        dtype=jnp.dtype(lhs.values.dtype),
        out_dtype=jnp.dtype(lhs.values.dtype),
        shared_rows=lhs.values.shape[0] < num_rows,
        gating=gating,
        keep=keep,
        num_waves=num_waves,
    )
    values = jax.ShapeDtypeStruct((num_rows, width), lhs.values.dtype)
    scales = jax.ShapeDtypeStruct((num_rows, width // BLOCK), jnp.float32)
    # The next matmul takes the scales of the hidden values transposed.
    transposed = jax.ShapeDtypeStruct(scales.shape[::-1], jnp.float32)
    results = _run(
        kernel,
        _operands(lhs, *rhs),
        groups,
        [values, transposed, *[values, scales] * (kernel.outputs - 1)],
        "grouped_matmul_float8_gated",
    )
    (hidden, hidden_scales), *products = zip(results[::2], results[1::2], strict=True)
    return Scaled(hidden, hidden_scales.T), *(Scaled(*product) for product in products)


def _operands(rows: Scaled, *matrices: Scaled) -> list[jax.Array]:
    # Transposed, the scales of a tile's rows are contiguous and can be copied at once.
    return [rows.values, rows.scales.T, *(array for each in matrices for array in each)]


def _run(kernel, operands, groups, out_type, name):
    num_rows = operands[0].shape[0]
    table = table_of(groups, (BLOCK,), num_rows)
    return launch(kernel, kernel.scratch_types(), out_type, name)(*operands, table)


class Computer(NamedTuple):
    """A compute warpgroup, and what it works with."""

    number: jax.Array
    feeder: Feeder
    outs: Sequence[Any]
    scratch: dict[str, Any]
    # Whether the computers start products in turns, one each. Otherwise those that feed the ring
    # often start at the same time. Then both add at the same time, while the tensor cores wait.
    takes_turns: bool


@dataclasses.dataclass(frozen=True)
class Float8Kernel(Kernel):
    """Base class of the float8 kernels: the operand ring, the sums, and the stores."""

    depths: tuple[int, ...]  # K of each pair of operands
    dtype: Any  # of the operands, float8
    out_dtype: Any
    # Whether all row tiles multiply the same rows, the first of each left operand.
    shared_rows: bool

    # The number of right operands of a tile: 2 if its halves are columns of two of them.
    num_matrices: ClassVar[int]
    # Whether each row of the left operand has its own scales. If not, 128 rows share their scales.
    rows_have_scales: ClassVar[bool] = True

    @property
    def halves(self) -> int:
        """The number of tiles of 128 columns that a compute warpgroup multiplies its rows by."""
        return self.num_matrices * self.tiles.block_n // BLOCK

    @property
    def has_loader(self) -> bool:
        return self.halves == 1

    @property
    def steps(self) -> int:
        return sum(self.depths) // BLOCK

    @property
    def chunk(self) -> int:
        """The number of output columns that are stored at a time: 128 bytes of a row."""
        return _ROW_BYTES // self.out_dtype.itemsize

    def scratch_types(self) -> dict[str, Any]:
        stages, transforms = self.tiles.num_stages, swizzled(self.dtype)
        # At `full` arrive the copies of `left`, row scales and matrices, and `fill_stage` itself.
        arrivals = 2 + self.rows_have_scales + self.num_matrices
        types = dict(
            left=plgpu.SMEM((stages, BLOCK, BLOCK), self.dtype, transforms=transforms),
            right=plgpu.SMEM(
                (stages, self.halves * BLOCK, BLOCK), self.dtype, transforms=transforms
            ),
            block_scales=plgpu.SMEM((stages, self.halves), jnp.float32),
            # The rows that a computer is storing; see `store_rows_through`.
            staged=plgpu.SMEM((COMPUTERS, ROWS, self.chunk), self.out_dtype),
            full=plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=COMPUTERS, num_barriers=stages),
        )
        if self.rows_have_scales:
            types["row_scales"] = plgpu.SMEM((stages, BLOCK), jnp.float32)
        return types

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        # Each operand is two arrays, values and scales.
        num_operands = 2 * (1 + self.num_matrices) * len(self.depths)
        operands, table, outs = refs[:num_operands], refs[num_operands], refs[num_operands + 1 :]
        # The last entry of the table of row tiles has their number, and that of rows in groups.
        last = table.shape[0] - 1
        num_tiles = table[last, 0]

        def look_up(index):
            tile, left_edge = self.tile_position(index, num_tiles)
            first, begin, end = (table[tile, i] for i in (FIRST, BEGIN, END))
            return Position(first, begin, end, left_edge)

        used_rows = table[last, 1]
        loader = _RowLoader(self, scratch, operands, table, num_tiles)
        self.walk_tiles(num_tiles * self.tile_columns, look_up, loader, outs, scratch, used_rows)

    def walk_tiles(
        self,
        total: jax.Array,
        look_up: Any,
        loader: Loader,
        outs: Any,
        scratch: Any,
        used_rows: jax.Array | int = 0,
    ) -> None:
        """Loads, computes and stores this block's share of all `total` output tiles."""
        # `look_up(index)` returns the `tile` for `compute_tile`; `used_rows` is for `finish`.
        tiles, num_stages = self.block_tiles(total), self.tiles.num_stages
        feeder = Feeder(loader, tiles, scratch["empty"], num_stages, self.has_loader)
        # Tiles of one half have a loader, except in tests.
        takes_turns = self.tiles.waits_ahead and not feeder.has_loader and self.halves == HALVES

        def compute(number):
            computer = Computer(number, feeder, outs, scratch, takes_turns)

            def one_tile(tile, _, carry):
                return self.compute_tile(computer, tile, *carry)

            if takes_turns:  # computer 0 has the first turn
                pl.when(number == 1)(tensor_cores.give_turn)
            used, _ = tiles.walk(look_up, one_tile, (jnp.int32(0), feeder.start()))
            if takes_turns:
                pl.when(number == 0)(tensor_cores.wait_for_turn)
            feeder.finish(used)
            self.finish(computer, used_rows)

        self.take_roles(feeder.run, compute)

    def finish(self, computer: Computer, used_rows: Any) -> None:
        """Runs in each compute warpgroup after its last output tile."""

    def compute_tile(
        self, computer: Computer, tile: Any, used: jax.Array, feed: Feed | None
    ) -> tuple[jax.Array, Feed | None]:
        """Computes and stores a compute warpgroup's part of an output tile."""
        # Takes and returns the number of steps multiplied or skipped so far, and the feed.
        raise NotImplementedError

    def columns_of(self, left_edge: Any) -> Any:
        """Returns the range of columns of each right operand that a step multiplies by."""
        return pl.ds(left_edge, self.tiles.block_n)

    def block_scales(
        self, scales: Sequence[Any], left_edge: Any, at: Callable[[Any, Any], Any]
    ) -> list[Any]:
        """Returns references to the scale of each half's block of the right operands in a step."""
        # `scales` has an array for each right operand. `at(array, i)` refers to the scale of the
        # 128 columns from 128 * i on.
        block = lax.div(left_edge, jnp.int32(BLOCK))
        if self.num_matrices > 1:
            return [at(array, block) for array in scales]
        # Past the output's end, the second half gets the scale of the first, which is not used.
        last = self.width // BLOCK - 1
        return [at(scales[0], jnp.minimum(block + half, last)) for half in range(self.halves)]

    def fill_stage(
        self,
        scratch: Any,
        slot: Slot,
        left: Any,
        left_scales: Any,
        rights: Sequence[Any],
        block_scales: Sequence[jax.Array],
    ) -> None:
        """Starts the copies of one step's tiles and scales to its stage, which is empty."""
        # References in global memory: `left` [128, 128], `left_scales` [128], or None if not
        # `rows_have_scales`, and `rights` [block_n, 128]. `block_scales` has one of each half.
        stage = stage_of(slot.number, self.tiles.num_stages)
        full = scratch["full"].at[stage]
        if slot.left:
            plgpu.copy_gmem_to_smem(left, scratch["left"].at[stage], full)
            if self.rows_have_scales:
                plgpu.copy_gmem_to_smem(left_scales, scratch["row_scales"].at[stage], full)
        if not slot.right:
            return
        width = self.tiles.block_n
        for i, right in enumerate(rights):
            destination = scratch["right"].at[stage, i * width : (i + 1) * width]
            plgpu.copy_gmem_to_smem(right, destination, full)
        for half, scale in enumerate(block_scales):
            scratch["block_scales"][stage, half] = scale
        plgpu.barrier_arrive(full)

    def accumulate_halves(
        self,
        computer: Computer,
        used: jax.Array,
        feed: Feed | None,
        row: Any,
        first_half: Any,
        num_halves: jax.Array | int,
        steps: jax.Array | int,
    ) -> tuple[tuple[jax.Array, ...], Feed | None]:
        """Multiplies the tiles of the ring's next `steps` steps, and sums the scaled products.

        Computes 64 rows, from `row` on in the left operand's tiles, and `num_halves` halves of 128
        columns, from half `first_half` on. `used` is the number of steps before. Returns `halves`
        sums, [64, 128] float32, the first for `first_half`, zero if not computed; and the new feed.
        """
        scratch, num_stages = computer.scratch, self.tiles.num_stages
        zeros_of_halves = (zeros((ROWS, BLOCK), jnp.float32),) * self.halves

        def wait_for(stage):
            # Waits for the operands of a step; returns the scales of its rows, None if they have
            # none, and those of its blocks.
            row_scales = None
            plgpu.barrier_wait(scratch["full"].at[stage])
            if self.rows_have_scales:
                of_rows = scratch["row_scales"].at[stage, pl.ds(row, ROWS)]
                layout = plgpu.Layout.WGMMA.reduce(1)
                row_scales = plgpu.load(of_rows, layout=layout, optimized=False)
            # If `first_half` is 1, the last half would be past the end, and is not computed.
            return row_scales, [
                scratch["block_scales"][stage, jnp.minimum(first_half + i, self.halves - 1)]
                for i in range(self.halves)
            ]

        # For each product, which operands are loaded during it: (left, right).
        loaded = [[(True, True)], *[[]] * (self.halves - 1)]
        if computer.takes_turns:
            loaded = [[(True, False)], [(False, True)]]

        def step(n, carry):
            totals, feed, scales, stage = carry
            if not self.tiles.waits_ahead:
                scales = wait_for(stage)
            next_stage = stage_after(stage, num_stages)
            product = tensor_cores.start_float8_product(
                scratch["left"], scratch["right"], stage, row, first_half, computer.takes_turns
            )
            row_scales, block_scales = scales
            sums, next_scales = [], None
            for i, (total, scale) in enumerate(zip(totals, block_scales, strict=True)):
                # While the tensor cores compute a product: wait for the next step, feed the ring.
                if i == 0 and self.tiles.waits_ahead:
                    wait_for_next = functools.partial(wait_for, next_stage)
                    next_scales = lax.cond(n + 1 < steps, wait_for_next, lambda: scales)
                for left, right in loaded[i]:
                    feed = computer.feeder.follow(Slot(used + n, left, right), feed)
                total, product = tensor_cores.add_float8_product(
                    total, product, i, num_halves, row_scales, scale
                )
                sums.append(total)
            plgpu.barrier_arrive(scratch["empty"].at[stage])
            return tuple(sums), feed, next_scales, next_stage

        def all_steps(feed):
            stage = stage_of(used, num_stages)
            first_scales = wait_for(stage) if self.tiles.waits_ahead else None
            carry = zeros_of_halves, feed, first_scales, stage
            return lax.fori_loop(0, steps, step, carry)[:2]

        # The sum of an empty group has no step, so `all_steps` would wait for operands that never
        # arrive. A constant number of steps is never 0.
        if isinstance(steps, int):
            return all_steps(feed)
        return lax.cond(steps > 0, all_steps, lambda feed: (zeros_of_halves, feed), feed)

    def skip(self, computer: Computer, used: jax.Array, feed: Feed | None) -> Feed | None:
        """Releases a tile's stages that this warpgroup does not multiply; passes on its turns."""

        def step(i, feed):
            stage = stage_of(used + i, self.tiles.num_stages)
            plgpu.barrier_wait(computer.scratch["full"].at[stage])
            plgpu.barrier_arrive(computer.scratch["empty"].at[stage])
            if computer.takes_turns:
                for _ in range(self.halves):
                    tensor_cores.wait_for_turn()
                    tensor_cores.give_turn()
            return computer.feeder.follow(Slot(used + i), feed)

        return lax.fori_loop(0, self.steps, step, feed)


@dataclasses.dataclass(frozen=True)
class _RowLoader:
    """An `operand_ring.Loader`: copies tiles of rows and of groups' matrices, pair by pair."""

    kernel: Float8Kernel
    scratch: Any
    # Of each pair: the rows and their scales, then each matrix and the scales of its blocks.
    operands: Sequence[Any]
    table: Any
    num_tiles: jax.Array

    def find(self, index: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns an output tile's group, first row in each left operand, and first column."""
        row_tile, left_edge = self.kernel.tile_position(index, self.num_tiles)
        group, first_row = (self.table[row_tile, column] for column in (GROUP, FIRST))
        if self.kernel.shared_rows:
            # Shared rows begin at row 0. Pallas would refuse a constant 0, because there may be
            # fewer than 128 rows, past which copies read zeros.
            first_row = jnp.minimum(first_row, 0)
        return group, first_row, left_edge

    def steps_of(self, _: Any) -> int:
        return self.kernel.steps

    def _of_pair(self, step: jax.Array, body: Callable[[Sequence[Any], jax.Array], Any]) -> Any:
        """Returns body(operands of a pair, step of the pair), for step number `step` of a tile."""
        per_pair = 2 * (1 + self.kernel.num_matrices)

        # A tile's steps run through the depth of one pair after the other.
        def of_pairs_from(k: int, step: jax.Array) -> Any:
            operands = self.operands[k * per_pair : (k + 1) * per_pair]
            of_this = functools.partial(body, operands, step)
            if k + 1 == len(self.kernel.depths):
                return of_this()
            steps = self.kernel.depths[k] // BLOCK
            return lax.cond(step < steps, of_this, lambda: of_pairs_from(k + 1, step - steps))

        return of_pairs_from(0, step)

    def read_ahead(self, tile: Any, step: jax.Array) -> list[jax.Array]:
        """Returns the scales of a step's matrix blocks; past the last step, those of the last."""
        group, _, left_edge = tile

        def read(operands: Sequence[Any], i: jax.Array) -> list[jax.Array]:
            def at(scales: Any, block: Any) -> Any:
                return scales.at[group, block, i]

            return [each[...] for each in self.kernel.block_scales(operands[3::2], left_edge, at)]

        return self._of_pair(jnp.minimum(step, self.kernel.steps - 1), read)

    def load(self, tile: Any, step: jax.Array, slot: Slot, ahead: Any) -> None:
        group, first, left_edge = tile
        rows = pl.ds(first, BLOCK)
        columns = self.kernel.columns_of(left_edge)

        def fill(operands: Sequence[Any], i: jax.Array) -> None:
            values, scales, *matrices_and_scales = operands
            inner = pl.ds(i * BLOCK, BLOCK)
            self.kernel.fill_stage(
                self.scratch,
                slot,
                left=values.at[rows, inner],
                left_scales=scales.at[i, rows],
                rights=[m.at[group, columns, inner] for m in matrices_and_scales[::2]],
                block_scales=ahead,
            )

        self._of_pair(step, fill)


@dataclasses.dataclass(frozen=True)
class _Product(Float8Kernel):
    """The kernel of `float8_matmul`: the halves are adjacent columns of one matrix."""

    zero_unused: bool

    num_matrices = 1

    def compute_tile(self, computer, tile: Position, used, feed):
        first, begin, end, left_edge = tile
        # Of a short tile, each warpgroup computes all rows of one half; else its rows of both.
        is_short = (end - first <= ROWS) & (self.halves > 1)
        row = jnp.where(is_short, 0, computer.number * ROWS)
        first_half = jnp.where(is_short, computer.number, 0)
        num_halves = jnp.where(is_short, 1, self.halves)
        totals, feed = self.accumulate_halves(
            computer, used, feed, row, first_half, num_halves, self.steps
        )
        top, left = first + row, left_edge + first_half * BLOCK
        for half, total in enumerate(totals):
            left_of_half = left + half * BLOCK
            is_stored = (left_of_half < self.width) & (top < end)
            if half == 1:
                is_stored &= jnp.logical_not(is_short)

            @pl.when(is_stored)
            def _store() -> None:
                target = Target(top, left_of_half, begin - top, end - top)
                self.store_half(computer, total, target)

        return used + self.steps, feed

    def store_half(self, computer: Computer, total: jax.Array, target: Target) -> None:
        """Stores rows of `total`, this warpgroup's part of a half, [64, 128] float32."""
        (out,), room = computer.outs, computer.scratch["staged"].at[computer.number]
        for first_column in range(0, BLOCK, self.chunk):
            part = total[:, first_column : first_column + self.chunk].astype(self.out_dtype)
            target_of_part = target._replace(left=target.left + first_column)
            register_tiles.store_rows_through(room, out, part, target_of_part)

    def finish(self, computer: Computer, used_rows: jax.Array) -> None:
        """Zeroes this warpgroup's share of the rows from `used_rows` on, if `zero_unused`."""
        if not self.zero_unused:
            return
        (out,), room = computer.outs, computer.scratch["staged"].at[computer.number]
        zero_chunk = zeros((ROWS, self.chunk), self.out_dtype)
        # The compute warpgroups of all blocks take turns at chunks of 64 rows.
        worker = lax.axis_index("block") * COMPUTERS + computer.number
        register_tiles.each_zero_chunk(
            used_rows,
            out.shape,
            (ROWS, self.chunk),
            worker,
            self.all_blocks * COMPUTERS,
            functools.partial(register_tiles.store_rows_through, room, out, zero_chunk),
        )


@dataclasses.dataclass(frozen=True)
class _GatedProduct(Float8Kernel):
    """The kernel of `float8_gated_matmul`: the halves are the products with both matrices."""

    gating: Elementwise
    keep: bool

    num_matrices = HALVES

    @property
    def outputs(self) -> int:
        return 3 if self.keep else 1

    def compute_tile(self, computer, tile: Position, used, feed):
        first, begin, end, left_edge = tile
        row = computer.number * ROWS
        top = first + row

        def compute(feed: Feed | None) -> Feed | None:
            products, feed = self.accumulate_halves(
                computer, used, feed, row, 0, HALVES, self.steps
            )
            target = Target(top, left_edge, begin - top, end - top)
            of_scales = target._replace(left=lax.div(left_edge, jnp.int32(BLOCK)))
            store = functools.partial(self.store_quantized, computer, target, of_scales)
            store(self.gating(*products), index=0)
            if self.keep:
                for i, product in enumerate(products):
                    store(product, index=1 + i)
            return feed

        # A short tile has no rows for the second warpgroup.
        feed = lax.cond(top < end, compute, lambda feed: self.skip(computer, used, feed), feed)
        return used + self.steps, feed

    def store_quantized(
        self, computer: Computer, target: Target, of_scales: Target, rows: jax.Array, index: int
    ) -> None:
        """Quantizes [64, 128] float32, and stores the group's rows of it: result number `index`."""
        # `target` and `of_scales` are where values and scales are stored.
        values, scales = _quantize(rows)
        out, out_scales = computer.outs[2 * index : 2 * index + 2]
        room = computer.scratch["staged"].at[computer.number]
        register_tiles.store_rows_through(room, out, values, target)
        # The scales of the gated product, result 0, are transposed.
        register_tiles.store_column(out_scales, scales, of_scales, to_row=index == 0)


def _quantize(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Multiplies each row of [64, 128] by 1 / scale; returns float32 numbers and scales [64]."""
    # `store_rows_through` rounds the numbers to float8.
    layout = plgpu.Layout.WGMMA
    results = [
        plgpu.ShapeDtypeStruct(rows.shape, jnp.float32, layout=layout),
        plgpu.ShapeDtypeStruct(rows.shape[:1], jnp.float32, layout=layout.reduce(1)),
    ]
    return tuple(mosaic.inline(_emit_quantize, [(rows, layout)], results))


def _emit_quantize(rows: mosaic.Array) -> list[mosaic.Array]:
    """Emits `_quantize` for one thread, which has 32 numbers of each of two rows."""
    pairs = mosaic.registers(rows)
    numbers = [vector.extract(pair, [], [i]) for pair in pairs for i in range(2)]

    def of_row(values: Sequence[Any], row: int) -> list[Any]:
        # Returns the thread's values of its row 0 or 1; pairs alternate between the rows.
        return [value for i, value in enumerate(values) if i // 2 % 2 == row]

    def without_infinities() -> list[Value]:
        # Returns the numbers, NaN for infinities, and each row's largest magnitude without these.
        are_finite, bits = zip(*map(float8.magnitude, numbers), strict=True)
        clean = map(float8.or_nan, numbers, are_finite)
        return [*clean, *(max_of(of_row(bits, row)) for row in range(2))]

    # The bits of each row's largest magnitude. Infinities are rare, so a thread looks for them only
    # if one is its largest. The maximum ignores NaN, and a NaN stays one when it is multiplied.
    largest = [float8.largest_magnitude(of_row(numbers, row)) for row in range(2)]
    all_finite = mosaic.below(max_of(largest), float8.INFINITY)
    *numbers, first, second = mosaic.unless(all_finite, without_infinities, [*numbers, *largest])
    # Four adjacent threads have a part of each of the two rows.
    largest = with_shuffled(with_shuffled([first, second], distance=1), distance=2)
    scales = [float8.scale(FLOAT8_ROWS, bits) for bits in largest]
    # In relocatable code `rcp.rn` is a call, and a call serializes the tensor cores.
    inverses = list(map(float8.branchless_reciprocal, scales))
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
