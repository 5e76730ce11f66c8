"""Grouped matmul on Hopper's tensor cores: rows in groups, one matrix for each group.

There are two kernels, `product` and `drhs`. In both, a fixed number of blocks walk the tiles of the
output, each with three warpgroups:

  loader    (one) copies operand tiles into a ring in shared memory, ahead of the computers;
  computers (two) multiply the operand tiles, each for half of the output tile, and store it.

`product` cuts the rows of every group into tiles of its own. No tile covers rows past the last
group; those output rows are filled with zeros. `drhs` cuts the sum over a group's rows into steps,
and clears, in shared memory, the rows of its first and last step that belong to another group. So a
NaN in another group's row, or past the last group, never enters an accumulator.

Tiles start at a multiple of 8 rows, the height of the tensor cores' shared-memory tiles, so a
tile may hold up to 7 rows of the group before.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.fabric import drain
from pallas_kernels.fabric.plan import SHARED_MEMORY_BYTES
from pallas_kernels.matmul.row_tiles import BEGIN, END, FIRST, GROUP, ROW_ALIGNMENT, row_tiles

CHUNK = 64  # rows and columns that a computer stores at a time, and the width of a swizzled tile
_COMPUTERS = 2
_LOADER = 2  # the loader's warpgroup; the computers are 0 and 1
_OTHER_BYTES = 2560  # shared memory set aside for barriers and for Mosaic


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tile sizes of a grouped matmul, and the depth of its buffers in shared memory.

    Attributes:
      block_m: height of a block's output tile, 64 or 128. At 128 each computer takes half the rows;
        at 64 each takes half the columns.
      block_n: width of a block's output tile, a multiple of 64, or of 128 if block_m is 64.
      num_slots: depth of the ring, in operand tiles of 64 along the summed dimension.
      num_staged: 64 x 64 chunks of its results that a computer may stage on their way to memory.
      band: how many columns of tiles the blocks sweep together, from the first row to the last.
    """

    block_m: int
    block_n: int
    num_slots: int
    num_staged: int
    band: int = 1

    @classmethod
    def fitting(
        cls, block_m: int, block_n: int, band: int = 1, *, matrices: int = 1, outputs: int = 1
    ) -> Tiles:
        """Returns tiles with staging for output tiles and the deepest ring that then fits.

        The ring has at most 6 slots. A slot holds tiles of as many `matrices` of a group. Of a tile
        of several `outputs`, up to 4 chunks are staged at a time.
        """
        chunks = outputs * block_m * block_n // (CHUNK * CHUNK * _COMPUTERS)
        chunks = min(chunks, 4) if outputs > 1 else chunks
        chunk, operand = 2 * CHUNK * CHUNK, 2 * CHUNK
        staging = _COMPUTERS * chunk * (chunks + 1)  # one more for zeros
        slot = operand * (block_m + matrices * block_n)
        slots = (SHARED_MEMORY_BYTES - _OTHER_BYTES - staging) // slot
        return cls(block_m, block_n, min(slots, 6), chunks, band)

    @property
    def split_rows(self) -> bool:
        return self.block_m > CHUNK

    @property
    def part(self) -> int:
        """Width of a computer's part of an output tile; the part is 64 rows high."""
        return self.block_n if self.split_rows else self.block_n // _COMPUTERS

    @property
    def staged(self) -> int:
        """Chunks that a computer stages at a time: a divisor of the chunks of its part."""
        return math.gcd(self.num_staged, self.part // CHUNK)

    def __post_init__(self) -> None:
        if self.block_m not in (CHUNK, _COMPUTERS * CHUNK) or self.part % CHUNK:
            raise ValueError(f"block sizes must be 64 or 128 by a multiple of 64, not {self}.")


def product(
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
    tiles: Tiles,
    num_blocks: int,
    interpret: Any = None,
) -> jax.Array:
    """Multiplies each row by its group's matrix, and sums the products of all pairs.

    Args:
      pairs: (lhs [R, K], rhs [L, K, N]) pairs of bfloat16 or float16, all of one dtype; rhs is
        [L, N, K] with `transpose_rhs`. R is a multiple of 8, K of 64, N of tiles.block_n.
      group_sizes: [L] int32, rows of each group, in order.
      transpose_rhs: whether the matrices are given transposed.
      tiles: tile sizes, and depth of buffers.
      num_blocks: thread blocks to use.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      [R, N] of the operands' dtype. Sums are float32, in the same accumulators for all pairs, and
      are rounded once. Rows past the last group are zero; the kernel reads them no further than the
      last group's last tile.
    """
    lhs, rhs = pairs[0]
    num_rows, width = lhs.shape[0], rhs.shape[1 if transpose_rhs else 2]
    depths = tuple(lhs.shape[1] for lhs, _ in pairs)
    kernel = Product(tiles, num_blocks, bool(interpret), width, depths, num_rows, transpose_rhs)
    table = row_tiles(group_sizes, tiles.block_m, num_rows, interpreted=bool(interpret))
    return launch(
        kernel,
        kernel.scratch_types(lhs.dtype),
        jax.ShapeDtypeStruct((num_rows, width), lhs.dtype),
        "grouped_matmul",
        interpret,
    )(*(operand for pair in pairs for operand in pair), table)


def drhs(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    *,
    tiles: Tiles,
    num_blocks: int,
    interpret: Any = None,
) -> jax.Array:
    """Multiplies each group's rows of lhs, transposed, by its rows of grad: the gradient of rhs.

    Args:
      lhs: [R, K] bfloat16 or float16; R is a multiple of 8, K of 64.
      grad: [R, N] of lhs's dtype; N is a multiple of tiles.block_n.
      group_sizes: [L] int32, rows of each group, in order.
      tiles: tile sizes, and depth of buffers.
      num_blocks: thread blocks to use.
      interpret: the options of Pallas' GPU interpreter, or None to run on a GPU.

    Returns:
      [L, K, N] of the operands' dtype, zero for an empty group. Sums are float32.
    """
    num_groups = group_sizes.shape[0]
    shape = num_groups, lhs.shape[1], grad.shape[1]
    kernel = _Drhs(tiles, num_blocks, bool(interpret), grad.shape[1], *shape[:2])
    return launch(
        kernel,
        kernel.scratch_types(lhs.dtype),
        jax.ShapeDtypeStruct(shape, lhs.dtype),
        "grouped_matmul_drhs",
        interpret,
    )(lhs, grad, _group_steps(group_sizes, lhs.shape[0]))


def _group_steps(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """Returns how the rows of each group are cut into steps of 64, [L, 4] int32.

    An entry is the number of steps (at least one), the first row of the first step (a multiple of
    8), and the range [begin, end) of the group's rows.
    """
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    starts = ends - group_sizes
    first = jnp.minimum(starts, num_rows - ROW_ALIGNMENT) // ROW_ALIGNMENT * ROW_ALIGNMENT
    steps = jnp.maximum(-((first - ends) // CHUNK), 1)
    return jnp.stack([steps, first, starts, ends], axis=1)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The common base of the kernels: the ring, and the order of tiles."""

    tiles: Tiles
    num_blocks: int
    interpreted: bool
    width: int  # columns of the output

    @property
    def matrices(self) -> int:
        """Returns how many right operand tiles a slot holds; each has an accumulator of its own."""
        return 1

    @property
    def outputs(self) -> int:
        return 1

    @property
    def staged(self) -> int:
        """Returns how many chunks a computer has room to stage."""
        return self.tiles.staged

    def __post_init__(self) -> None:
        if self.width % self.tiles.block_n:
            raise ValueError(
                f"the output's {self.width} columns are not whole tiles of {self.tiles.block_n}."
            )

    def ring(self, dtype: Any, left: tuple[int, int], right: tuple[int, ...]) -> dict[str, Any]:
        slots, operand = self.tiles.num_slots, _swizzled(dtype)
        return dict(
            left=plgpu.SMEM((slots, *left), dtype, transforms=operand),
            right=plgpu.SMEM((slots, *right), dtype, transforms=operand),
            staged=plgpu.SMEM((_COMPUTERS, self.staged, CHUNK, CHUNK), dtype, transforms=operand),
            full=plgpu.Barrier(num_arrivals=1 + self.matrices, num_barriers=slots),
            empty=plgpu.Barrier(num_arrivals=_COMPUTERS, num_barriers=slots),
        )

    def each_of(
        self,
        total: jax.Array,
        look_up: Callable[[jax.Array], Any],
        body: Callable[[Any, Any], Any],
        carry: Any,
    ) -> Any:
        """Runs `body(look_up(tile), carry)` for this block's share of `total` tiles.

        The next tile is looked up before the body runs on the current one, to hide the latency of
        the look-up.
        """
        block, stride = lax.axis_index("block"), self.num_blocks
        mine = lax.div(total - block + (stride - 1), jnp.int32(stride))

        def looked_up(i):
            return look_up(jnp.minimum(block + i * stride, jnp.maximum(total - 1, 0)))

        def step(i, both):
            tile, carry = both
            following = looked_up(i + 1)
            return following, body(tile, carry)

        return lax.fori_loop(0, mine, step, (looked_up(0), carry))[1]

    def place(self, index: jax.Array, rows: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the row of tiles and the first column of the output tile of an index.

        Tiles are numbered band by band: a band is `tiles.band` columns of tiles, over all `rows`.
        """
        columns, band = self.width // self.tiles.block_n, self.tiles.band
        band = band if columns % band == 0 else columns
        whole, rest = _divmod(index, rows * band)
        row, column = _divmod(rest, jnp.int32(band))
        return row, (whole * band + column) * self.tiles.block_n

    def fill(self, scratch: Any, used: jax.Array, left: Any, *right: Any) -> jax.Array:
        """Copies operand tiles, one left and one or more right, into the ring's next slot.

        Waits until the slot is empty.
        """
        slot = lax.rem(used, jnp.int32(self.tiles.num_slots))

        @pl.when(used >= self.tiles.num_slots)
        def _():
            plgpu.barrier_wait(scratch["empty"].at[slot])

        full = scratch["full"].at[slot]
        plgpu.copy_gmem_to_smem(left, scratch["left"].at[slot], full)
        tiles = scratch["right"].at[slot]
        for i, operand in enumerate(right):
            plgpu.copy_gmem_to_smem(operand, tiles if len(right) == 1 else tiles.at[i], full)
        return used + 1

    def accumulate(
        self,
        scratch: Any,
        used: jax.Array,
        steps: Any,
        multiply: Callable[[Any, jax.Array, jax.Array], None],
    ) -> jax.Array:
        """Runs `multiply(accumulator, slot, step)` on the ring's next `steps` slots; frees them.

        `multiply` starts one matmul for each of `matrices`. Returns the accumulator: a computer's
        part of an output tile, or of those of all `matrices` side by side.
        """
        num_slots = jnp.int32(self.tiles.num_slots)

        def scope(accumulator):
            def step(i, _):
                slot = lax.rem(used + i, num_slots)
                plgpu.barrier_wait(scratch["full"].at[slot])
                multiply(accumulator, slot, i)
                # Once the step before this one has ended, its slot is free.
                plgpu.wgmma_wait(self.matrices)

                @pl.when(i > 0)
                def _():
                    plgpu.barrier_arrive(scratch["empty"].at[lax.rem(used + i - 1, num_slots)])

            lax.fori_loop(0, steps, step, None)
            total = accumulator[...]
            plgpu.barrier_arrive(scratch["empty"].at[lax.rem(used + steps - 1, num_slots)])
            return total

        return pl.run_scoped(scope, plgpu.ACC((CHUNK, self.matrices * self.tiles.part)))

    def pass_by(self, scratch: Any, used: jax.Array, steps: Any) -> None:
        """Waits for the ring's next `steps` slots, and frees them without use."""

        def step(i, _):
            slot = lax.rem(used + i, jnp.int32(self.tiles.num_slots))
            plgpu.barrier_wait(scratch["full"].at[slot])
            plgpu.barrier_arrive(scratch["empty"].at[slot])

        lax.fori_loop(0, steps, step, None)

    def part_of_left(self, left: Any, computer: jax.Array, axis: int) -> Any:
        """Returns the rows of the left operand, along `axis`, that a computer multiplies."""
        if not self.tiles.split_rows:
            return left
        mine = pl.ds(computer * CHUNK, CHUNK)
        return left.at[mine] if axis == 0 else left.at[:, mine]

    def part_of_right(self, right: Any, computer: jax.Array, axis: int) -> Any:
        """Returns the columns of the right operand, along `axis`, that a computer multiplies."""
        mine: Any = slice(None)
        if not self.tiles.split_rows:
            mine = pl.ds(computer * self.tiles.part, self.tiles.part)
        return right.at[mine] if axis == 0 else right.at[:, mine]

    def corner(self, top: Any, left_edge: Any, computer: jax.Array) -> tuple[Any, Any]:
        """Returns the first row and column of a computer's part of the tile at (top, left_edge)."""
        if self.tiles.split_rows:
            return top + computer * CHUNK, left_edge
        return top, left_edge + computer * self.tiles.part

    def store_part(
        self, staged: Any, results: Callable[[slice], Iterable[jax.Array]], outs: Sequence[Any]
    ) -> None:
        """Stores a computer's part of a tile to `outs`, as many chunks at a time as it may stage.

        `results(columns)` returns what goes to these columns of each of `outs`.
        """
        for first in range(0, self.tiles.part // CHUNK, self.tiles.staged):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            columns = [
                slice((first + i) * CHUNK, (first + i + 1) * CHUNK)
                for i in range(self.tiles.staged)
            ]
            places = [out.at[:, column] for column in columns for out in outs]
            chunks = (chunk for column in columns for chunk in results(column))
            for i, chunk in enumerate(chunks):
                staged.at[i][...] = chunk
            plgpu.commit_smem()
            for i, place in enumerate(places):
                plgpu.copy_smem_to_gmem(staged.at[i], place)


@dataclasses.dataclass(frozen=True)
class Product(Kernel):
    """The kernel of `product`: sums over pairs of the given depths, K."""

    depths: tuple[int, ...]
    num_rows: int
    transpose_rhs: bool

    def scratch_types(self, dtype: Any) -> dict[str, Any]:
        tiles = self.tiles
        right: tuple[int, ...] = tiles.block_n, CHUNK
        if not self.transpose_rhs:
            right = right[::-1]
        if self.matrices > 1:
            right = self.matrices, *right
        return self.ring(dtype, (tiles.block_m, CHUNK), right) | dict(
            # Zeros, to store by single rows, which a swizzled tile does not allow.
            plain=plgpu.SMEM((_COMPUTERS, CHUNK, CHUNK), dtype),
        )

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        *operands, table = refs[: -self.outputs]
        outs = refs[-self.outputs :]
        warpgroup = lax.axis_index("warpgroup")
        last = table.shape[0] - 1
        num_tiles, num_live_rows = table[last, 0], table[last, 1]
        total = num_tiles * (self.width // self.tiles.block_n)

        @pl.when(warpgroup == _LOADER)
        def _load():
            _set_registers(40, "decrease", self.interpreted)

            def look_up(index):
                tile, left_edge = self.place(index, num_tiles)
                return table[tile, GROUP], table[tile, FIRST], left_edge

            def one_tile(tile, used):
                group, first, left_edge = tile
                rows = pl.ds(_aligned(first), self.tiles.block_m)
                cols = pl.ds(pl.multiple_of(left_edge, CHUNK), self.tiles.block_n)
                together = 1 + self.matrices  # operands that are loaded together
                for k, depth in enumerate(self.depths):
                    lhs, *rhs = operands[k * together : (k + 1) * together]

                    def step(i, used, lhs=lhs, rhs=rhs):
                        inner = pl.ds(i * CHUNK, CHUNK)
                        place = (cols, inner) if self.transpose_rhs else (inner, cols)
                        right = (matrix.at[group, *place] for matrix in rhs)
                        return self.fill(scratch, used, lhs.at[rows, inner], *right)

                    used = lax.fori_loop(0, depth // CHUNK, step, used)
                return used

            used = self.each_of(total, look_up, one_tile, jnp.int32(0))
            drain(scratch["empty"], used, self.tiles.num_slots)

        @pl.when(warpgroup != _LOADER)
        def _compute():
            _set_registers(232, "increase", self.interpreted)

            def look_up(index):
                tile, left_edge = self.place(index, num_tiles)
                top, left_edge = self.corner(table[tile, FIRST], left_edge, warpgroup)
                begin = jnp.clip(table[tile, BEGIN] - top, 0, CHUNK)
                end = jnp.clip(table[tile, END] - top, 0, CHUNK)
                return top, left_edge, begin, end

            def one_tile(tile, used):
                self._one_tile(tile, outs, warpgroup, used, scratch)
                return used + sum(self.depths) // CHUNK

            self.each_of(total, look_up, one_tile, jnp.int32(0))
            self._zero_tail(outs, num_live_rows, warpgroup, scratch["plain"].at[warpgroup])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def multiply(self, accumulator: Any, left: Any, right: Any, computer: jax.Array) -> None:
        """Starts the matmuls of a computer's part of the operand tiles."""
        if self.transpose_rhs:
            right = _transposed(self.part_of_right(right, computer, 0))
        else:
            right = self.part_of_right(right, computer, 1)
        plgpu.wgmma(accumulator, left, right)

    def results(self, total: jax.Array, columns: slice, dtype: Any) -> Iterator[jax.Array]:
        """Yields what goes to some columns of each output, of the accumulators' `total`."""
        yield total[:, columns].astype(dtype)

    def _one_tile(
        self, tile: Any, outs: Sequence[Any], computer: jax.Array, used: jax.Array, scratch: Any
    ) -> None:
        """Computes and stores a computer's part of a tile: its rows [begin, end) of the group."""
        top, left_edge, begin, end = tile
        steps = sum(self.depths) // CHUNK

        def multiply(accumulator, slot, _):
            left = self.part_of_left(scratch["left"].at[slot], computer, 0)
            self.multiply(accumulator, left, scratch["right"].at[slot], computer)

        @pl.when(end > begin)
        def _some():
            total = self.accumulate(scratch, used, steps, multiply)

            def results(columns):
                return self.results(total, columns, outs[0].dtype)

            @pl.when(end - begin == CHUNK)
            def _whole():
                rows = pl.ds(_aligned(top), CHUNK)
                cols = pl.ds(pl.multiple_of(left_edge, CHUNK), self.tiles.part)
                parts = [out.at[rows, cols] for out in outs]
                self.store_part(scratch["staged"].at[computer], results, parts)

            @pl.when(end - begin < CHUNK)
            def _some_rows():
                plain = scratch["plain"].at[computer]
                for chunk in range(0, self.tiles.part, CHUNK):
                    chunks = results(slice(chunk, chunk + CHUNK))
                    for out, values in zip(outs, chunks, strict=True):
                        place = top, left_edge + chunk
                        if not self.interpreted:
                            mosaic.store_rows(out, values, *place, begin, end)
                            continue
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        mosaic.store_plain(plain, values)
                        plgpu.commit_smem()
                        _store_rows(plain, begin, end, out, top, pl.ds(place[1], CHUNK))

        @pl.when(end <= begin)
        def _none():
            self.pass_by(scratch, used, steps)

    def _zero_tail(
        self, outs: Sequence[Any], start: jax.Array, computer: jax.Array, zeros: Any
    ) -> None:
        """Writes zeros to the rows of `outs` from `start` on; all blocks' computers share them."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        mosaic.store_plain(zeros, _zeros((CHUNK, CHUNK), outs[0].dtype, self.interpreted))
        plgpu.commit_smem()
        columns = jnp.int32(self.width // CHUNK)
        first_chunk = lax.div(start, jnp.int32(CHUNK))
        chunks = -(-self.num_rows // CHUNK) - first_chunk
        workers = jnp.int32(self.num_blocks * _COMPUTERS)
        me = lax.axis_index("block") * _COMPUTERS + computer

        def one_chunk(i, _):
            row, column = _divmod(me + i * workers, columns)
            first = (first_chunk + row) * CHUNK
            begin = jnp.maximum(start - first, 0)
            end = jnp.minimum(self.num_rows - first, CHUNK)
            cols = pl.ds(column * CHUNK, CHUNK)
            for out in outs:
                _store_rows(zeros, begin, end, out, first, cols)

        lax.fori_loop(0, lax.div(chunks * columns - me + (workers - 1), workers), one_chunk, None)


@dataclasses.dataclass(frozen=True)
class _Drhs(Kernel):
    """The kernel of `drhs`."""

    num_groups: int
    height: int  # rows of the output of a group, K

    def scratch_types(self, dtype: Any) -> dict[str, Any]:
        tiles = self.tiles
        return self.ring(dtype, (CHUNK, tiles.block_m), (CHUNK, tiles.block_n)) | dict(
            cleared=plgpu.Barrier(num_arrivals=_COMPUTERS),
        )

    def __call__(self, lhs: Any, grad: Any, table: Any, out: Any, **scratch: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        tiles = self.tiles
        # The last tile may reach past K. What it reads there is zero, and is not stored.
        rows, columns = -(-self.height // tiles.block_m), self.width // tiles.block_n
        total = jnp.int32(self.num_groups * rows * columns)

        def look_up(index):
            group, rest = _divmod(index, jnp.int32(rows * columns))
            row, left_edge = self.place(rest, jnp.int32(rows))
            steps = tuple(table[group, i] for i in range(4))
            return group, row * tiles.block_m, left_edge, *steps

        @pl.when(warpgroup == _LOADER)
        def _load():
            _set_registers(40, "decrease", self.interpreted)

            def one_tile(tile, used):
                _, top, left_edge, steps, first, _, _ = tile

                def step(i, used):
                    inner = pl.ds(_aligned(first + i * CHUNK), CHUNK)
                    return self.fill(
                        scratch,
                        used,
                        lhs.at[inner, pl.ds(pl.multiple_of(top, CHUNK), tiles.block_m)],
                        grad.at[inner, pl.ds(pl.multiple_of(left_edge, CHUNK), tiles.block_n)],
                    )

                return lax.fori_loop(0, steps, step, used)

            used = self.each_of(total, look_up, one_tile, jnp.int32(0))
            drain(scratch["empty"], used, self.tiles.num_slots)

        @pl.when(warpgroup != _LOADER)
        def _compute():
            _set_registers(232, "increase", self.interpreted)

            def one_tile(tile, used):
                group, top, left_edge, steps, first, begin, end = tile

                def multiply(accumulator, slot, i):
                    left, right = scratch["left"].at[slot], scratch["right"].at[slot]
                    row = first + i * CHUNK

                    @pl.when((row < begin) | (row + CHUNK > end))
                    def _():
                        # Each computer clears part of what both of them will read.
                        for operand in (left, right):
                            self._clear(operand, begin - row, end - row, warpgroup)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(scratch["cleared"])
                        plgpu.barrier_wait(scratch["cleared"])

                    left = self.part_of_left(left, warpgroup, 1)
                    right = self.part_of_right(right, warpgroup, 1)
                    plgpu.wgmma(accumulator, _transposed(left), right)

                total = self.accumulate(scratch, used, steps, multiply)
                top, left_edge = self.corner(top, left_edge, warpgroup)
                rows = pl.ds(pl.multiple_of(top, CHUNK), CHUNK)
                cols = pl.ds(pl.multiple_of(left_edge, CHUNK), tiles.part)

                @pl.when(top < self.height)
                def _():
                    self.store_part(
                        scratch["staged"].at[warpgroup],
                        lambda columns: [total[:, columns].astype(out.dtype)],
                        [out.at[group, rows, cols]],
                    )

                return used + steps

            self.each_of(total, look_up, one_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _clear(self, operand: Any, begin: jax.Array, end: jax.Array, computer: jax.Array) -> None:
        """Sets the rows of an operand outside [begin, end) to zero, by chunks of columns.

        The two computers take turns at the chunks.
        """
        row = _rows_of_chunk(self.interpreted)
        mine = (row >= begin) & (row < end)

        def clear(column: Any) -> None:
            part = operand.at[:, pl.ds(column, CHUNK)]
            values = part[...]
            part[...] = jnp.where(mine, values, jnp.zeros_like(values))

        columns = operand.shape[1] // CHUNK
        for pair in range(columns // _COMPUTERS):
            clear((pair * _COMPUTERS + computer) * CHUNK)
        if columns % _COMPUTERS:

            @pl.when(computer == 0)
            def _():
                clear((columns - 1) * CHUNK)


def _store_rows(
    source: Any, begin: jax.Array, end: jax.Array, out: Any, first: jax.Array, cols: Any
) -> None:
    """Stores rows [begin, end) of an unswizzled chunk to the rows of `out` from first + begin on.

    A copy has a static height, so there is one copy for each power of two in the number of rows.
    """
    count, height = end - begin, CHUNK
    while height:

        @pl.when((count & height) != 0)
        def _(height=height, begin=begin):
            plgpu.copy_smem_to_gmem(
                source.at[pl.ds(begin, height)], out.at[pl.ds(first + begin, height), cols]
            )

        begin += count & height
        height //= 2


def launch(
    kernel: Kernel,
    scratch_types: dict[str, Any],
    out_type: Any,
    name: str,
    interpret: Any,
) -> Callable[..., Any]:
    """Returns the function of arrays that runs a kernel on its blocks of three warpgroups."""
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(kernel.num_blocks,),
        grid_names=("block",),
        num_threads=_COMPUTERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
        kernel_name=name,
    )


def _swizzled(dtype: Any) -> tuple[Any, ...]:
    """Returns the transforms to the tensor cores' layout: swizzled tiles of 8 rows of 128 bytes."""
    columns = 128 // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((ROW_ALIGNMENT, columns)), plgpu.SwizzleTransform(128)


def _aligned(row: jax.Array) -> jax.Array:
    return pl.multiple_of(row, ROW_ALIGNMENT)


def _divmod(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.div(a, b), lax.rem(a, b)


def _transposed(ref: Any) -> Any:
    return ref.transpose((1, 0))


def _set_registers(count: int, action: Any, interpreted: bool) -> None:
    if not interpreted:
        plgpu.set_max_registers(count, action=action)


def _rows_of_chunk(interpreted: bool) -> jax.Array:
    shape = (CHUNK, CHUNK)
    if interpreted:
        return lax.broadcasted_iota(jnp.int32, shape, 0)
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)


def _zeros(shape: tuple[int, int], dtype: Any, interpreted: bool) -> jax.Array:
    zeros = jnp.zeros(shape, dtype)
    return zeros if interpreted else plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)
