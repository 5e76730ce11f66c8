"""Matmuls of a few bfloat16 rows by quantized matrices (weight-only quantization).

In decoding, a matmul takes the time to read the matrices of the groups that the rows chose
(`chosen_groups`). This kernel reads them as they are stored, in float8 or MXFP4. A matrix [K, N] is
stored transposed, [N, K]. A thread block computes some columns of the output for one chosen group.
Each of its 8 warps computes 16 columns, for all T rows, and sums over every `splits`-th chunk of
128 of K; then `splits` warps add up their sums in shared memory. With 4 splits, the warps divide
the matrix like this:

               K: 128   128   128   128   128   128   ...
                  +-----+-----+-----+-----+-----+-----+
    16 columns    |  0  |  1  |  2  |  3  |  0  |  1  |
                  +-----+-----+-----+-----+-----+-----+
    16 columns    |  4  |  5  |  6  |  7  |  4  |  5  |
                  +-----+-----+-----+-----+-----+-----+

**Tensor cores multiply float16.** float16 represents every float8_e4m3fn number, and every float4
number divided by 64; a few instructions convert them. A number of a row is divided by a scale, a
power of two for each chunk, so that float16 represents it exactly unless it is tiny.

**Each thread scales its own sums.** The instruction `mma.sync` multiplies 16 columns by 8 rows, and
sums over 16 of K: 4 numbers of each thread of a *quad*, 4 adjacent threads (PTX ISA, "Matrix
fragments for mma.m16n8k16"). A thread loads 16 adjacent bytes of each of its two columns, c and
c + 8, where c = lane / 4. In MXFP4 these numbers have a scale of their own, so they must not be
added to those of the quad's other threads. So an instruction multiplies only two rows, a and b:

  row of the instruction               0  1   2  3   4  5   6  7
  has numbers of                       a  b   a  b   a  b   a  b
  at the places in K of thread         0  0   1  1   2  2   3  3, and zeros elsewhere

Thread t gets the sums of rows 2 * t and 2 * t + 1: those of its own numbers, whose scale it knows.
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

from pallas_kernels.fabric import compiler, float8, mosaic
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fabric.hardware import VECTOR_BYTES, WARP, WARPGROUP, WORD_BYTES
from pallas_kernels.fabric.mosaic import Value, arith, llvm
from pallas_kernels.formats import E8M0, FLOAT8_MATRICES, MXFP4, Format, Scaled, bitcast
from pallas_kernels.matmul import tensor_cores
from pallas_kernels.matmul.chosen_groups import ChosenGroups, output_rows
from pallas_kernels.matmul.kernel import quotient_and_rest
from pallas_kernels.matmul.quantized_tiles import (
    BFLOAT16,
    PTX_TYPE,
    Packed,
    bits_of_e8m0,
    max_of,
    pointer_to,
    share,
)
from pallas_kernels.matmul.row_tiles import BEGIN, END, FIRST, GROUP

_WARPS = 8
# A warp computes this many columns of the output, and a thread two of them, 8 apart.
_COLUMNS, _APART = 16, 8
# A warp sums over chunks of this many of K. A float8 scale belongs to a chunk.
_CHUNK = 128
# Four threads hold the numbers of a column.
_QUAD = 4
# An instruction multiplies this many rows of the matmul.
_ROWS_AT_ONCE = 2
# The exponent of a chunk's largest number, scaled: the number is at least 2^12 and below 2^13.
# float16 numbers are below 2^16, and represent bfloat16 numbers exactly from 2^-17 on.
_LARGEST_EXPONENT = 12
# How many chunks of rows a warp loads before it begins to load matrices.
_ROW_LOADS = 4
# The most vectors of 16 bytes of matrices that a thread loads ahead. So many take 64 registers.
_VECTORS_AHEAD = 16
# The bytes of zeros in shared memory: 16 float16 numbers, which replace 16 numbers of a row.
_ZERO_BYTES = 32
# The most rows that a matmul may have. With so many, a thread needs 240 of its 255 registers.
MOST_ROWS = 16
# The most bytes of shared memory for the scaled rows.
_MOST_BYTES = 128 * 1024


def unsupported_reason(format: Format, num_rows: int, depth: int, width: int) -> str | None:
    """Returns why the kernel cannot multiply T rows by matrices [depth, width], or None."""
    if format not in (FLOAT8_MATRICES, MXFP4):
        return f"it decodes float8_e4m3fn with blocks of 128 x 128, and MXFP4, not {format.name}"
    row_multiple, column_multiple = format.block[1], max(_COLUMNS, format.block[0])
    if depth < _CHUNK or depth % row_multiple or width % column_multiple:
        return (
            f"matrices must have a multiple of {row_multiple} rows, at least {_CHUNK}, and a "
            f"multiple of {column_multiple} columns, but have {depth} and {width}"
        )
    padded = -(-depth // _CHUNK) * _CHUNK
    if not 0 < num_rows <= MOST_ROWS or 2 * num_rows * padded > _MOST_BYTES:
        return f"it does not support {num_rows} rows of {depth} numbers"
    return None


def weight_only_matmul(
    rows: jax.Array,
    matrices: Sequence[Scaled],
    biases: Sequence[jax.Array | None],
    groups: ChosenGroups,
    *,
    num_rows: int,
    format: Format,
    gating: Elementwise | None = None,
) -> jax.Array:
    """Multiplies all rows by the matrices of each chosen group, and applies `gating`.

    In each chunk of 128 of a row, a number is represented exactly if its magnitude is at least
    2^-29 times the largest one, and else with an error of at most 2^-37 times the largest one.

    Args:
      rows: [T, K] bfloat16 for all S groups, or [S * height, K]: T rows of each group, from row s *
        height on.
      matrices: one array of matrices, or two, [K, N] for each of L groups, given as their
        transposes [L, N, K] in `format`, with values and scales.
      biases: for each array of matrices, [L, N] bfloat16, float16 or float32, or None.
      groups: the chosen groups.
      num_rows: T.
      gating: an elementwise function of the products as float32; None returns the only product.

    Returns:
      [S * height, N] bfloat16: gating(product + bias, ...). The products are summed in float32 and
      rounded to bfloat16 before biases are added. Only T rows of each tile are written.
    """
    depth, width = rows.shape[1], matrices[0].values.shape[1]
    total = output_rows(groups, len(rows))
    sizes = _Sizes(
        num_rows=num_rows,
        depth=depth,
        width=width,
        num_matrices=len(matrices),
        format=format,
        gating=gating,
        shared_rows=len(rows) < total,
        has_bias=tuple(bias is not None for bias in biases),
    )
    parts = [
        part if part.dtype != E8M0 else bitcast(part, jnp.uint8)
        for each in matrices
        for part in each
    ]
    operands = [rows, *parts, *(bias for bias in biases if bias is not None), groups.table]

    def kernel(*refs: Any, **scratch: Any) -> None:
        table, out = refs[-2:]
        tile, block = quotient_and_rest(lax.axis_index("block"), jnp.int32(sizes.blocks_of_columns))
        group, first_row, begin, end = (table[tile, each] for each in (GROUP, FIRST, BEGIN, END))

        # Tiles past the last, and those of a choice of no group, are left out.
        @pl.when((tile < table[table.shape[0] - 1, 0]) & (begin < end))
        def _() -> None:
            memrefs = [*refs[:-2], out, *scratch.values()]
            _compute_block(sizes, memrefs, group, block, first_row)

    return compiler.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((total, width), rows.dtype),
        scratch_types=sizes.scratch_types(),
        num_blocks=(len(groups.table) - 1) * sizes.blocks_of_columns,
        num_warpgroups=_WARPS * WARP // WARPGROUP,
        auto_barriers=False,  # the emitted code has its own
        kernel_name=f"weight_only_{'' if gating is None else 'gated_'}{format.name}",
    )(*operands)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The sizes of a `weight_only_matmul`, and how warps and thread blocks divide it."""

    # A *strip* is 16 adjacent columns of the output, which `splits` warps of a block compute. In a
    # *step*, each of them multiplies by another chunk of K: in step i by number i * splits + split.
    num_rows: int  # T
    depth: int  # K
    width: int  # N
    num_matrices: int
    format: Format
    gating: Elementwise | None
    shared_rows: bool  # whether all groups multiply the same rows
    has_bias: tuple[bool, ...]

    @property
    def is_float8(self) -> bool:
        return self.format == FLOAT8_MATRICES

    @property
    def chunks(self) -> int:
        """The number of chunks of K; the last one may be shorter than the others."""
        return -(-self.depth // _CHUNK)

    @property
    def splits(self) -> int:
        """The number of warps that together compute the same columns."""
        # With at least two whole chunks of K, each warp has enough to load at a time.
        return next((n for n in (8, 4, 2) if self.depth // _CHUNK >= 2 * n), 1)

    @property
    def steps(self) -> int:
        return -(-self.chunks // self.splits)

    @property
    def steps_ahead(self) -> int:
        """The number of steps whose parts of the matrices a thread loads ahead."""
        # In a step, a thread loads one or two vectors of 16 bytes of each of its two columns.
        vectors = 2 * self.num_matrices * (2 if self.is_float8 else 1)
        return max(1, _VECTORS_AHEAD // vectors)

    @property
    def strips(self) -> int:
        """The number of strips that a thread block computes at a time, in a round."""
        return _WARPS // self.splits

    @property
    def rounds(self) -> int:
        # Every block scales all rows, which takes longer with more rows. So with more rows, fewer
        # blocks compute more rounds each: at most 8, which leaves at least an eighth of the blocks.
        return min(self.num_rows, 8, -(-self.width // (_COLUMNS * self.strips)))

    @property
    def blocks_of_columns(self) -> int:
        """The number of thread blocks of a group. The last one may reach past the last column."""
        return -(-self.width // (_COLUMNS * self.strips * self.rounds))

    @property
    def first_zero_byte(self) -> int:
        """Where the zeros begin, which follow the scaled rows in shared memory."""
        return 2 * self.num_rows * self.chunks * _CHUNK

    def scratch_types(self) -> dict[str, Any]:
        sums = _WARPS * self.num_matrices * self.num_rows * _COLUMNS
        return dict(
            # Scaled rows, float16 [T, chunks * 128], and zeros after them.
            rows=plgpu.SMEM(((self.first_zero_byte + _ZERO_BYTES) // WORD_BYTES,), jnp.float32),
            scales=plgpu.SMEM((self.num_rows * self.chunks,), jnp.float32),  # [T, chunks]
            sums=plgpu.SMEM((sums,), jnp.float32),  # [warps, num_matrices, T, 16]
        )


def _compute_block(sizes: _Sizes, refs: Any, group: Any, block: Any, first_row: Any) -> None:
    """Computes a block's columns of the output's rows from `first_row` on, round by round."""
    # `block` is the number of this thread block among those of the group.

    def compute(round_of_block: Any, scales_rows: bool) -> None:
        def emit(*values: Any) -> None:
            scalars = map(mosaic.scalar, values[-3:])
            _Thread(sizes, values[:-3], *scalars).run(scales_rows)

        mosaic.inline(emit, [*refs, group, block * sizes.rounds + round_of_block, first_row])

    # Rows are scaled in the first round, and stay in shared memory.
    compute(0, scales_rows=True)
    if sizes.rounds > 1:
        lax.fori_loop(1, sizes.rounds, lambda i, _: compute(i, scales_rows=False), None)


class _Thread:
    """A thread in a round, in which its block computes `strips` strips. Emits the thread's code."""

    def __init__(
        self, sizes: _Sizes, memrefs: Any, group: Value, round_number: Value, first_row: Value
    ) -> None:
        # `memrefs` are input rows, matrices, biases, output and scratch. `round_number` counts the
        # rounds of all blocks of the group. `first_row` is a row of the output.
        self.sizes, self.group = sizes, group
        self.round_number, self.first_row = round_number, first_row
        self.source, *operands, self.out, self.rows, self.scales, self.sums = memrefs
        num_parts = 2 * sizes.num_matrices
        self.biases = operands[num_parts:]
        self.thread = mosaic.thread()
        self.warp, self.lane = mosaic.divided(self.thread, WARP)
        # The warp computes strip number `strip` of the round, over each chunk number `split` mod
        # `splits`. Past the last column, it computes the last strip again, which is not stored.
        self.strip, self.split = mosaic.divided(self.warp, sizes.splits)
        # The thread is number `quad_thread` of quad `quad`, with columns `quad` and `quad` + 8.
        self.quad, self.quad_thread = mosaic.divided(self.lane, _QUAD)
        # Each has the values and the scales of an array of matrices.
        self.matrices = [_Matrices(self, *operands[i : i + 2]) for i in range(0, num_parts, 2)]

    def run(self, scales_rows: bool) -> None:
        """Computes and stores the round's results; with `scales_rows`, it first scales the rows."""
        sizes = self.sizes
        # The first loads of rows come before those of matrices, which take longer.
        starts = range(0, sizes.num_rows * sizes.chunks, _WARPS) if scales_rows else range(0)
        chunks = [self.load_chunk(start) for start in starts[:_ROW_LOADS]]
        for step in range(min(sizes.steps_ahead, sizes.steps)):
            for each in self.matrices:
                each.load(step)
        if scales_rows:
            chunks += [self.load_chunk(start) for start in starts[_ROW_LOADS:]]
            for start, words in zip(starts, chunks, strict=True):
                self.scale_chunk(start, words)
            with mosaic.when(mosaic.below(self.thread, _ZERO_BYTES // WORD_BYTES)):
                at = mosaic.add(self.thread, sizes.first_zero_byte // WORD_BYTES)
                share(self.rows, at, [mosaic.i32(0)])
        # All threads have stored their part of the rows, or read the sums of the last round.
        mosaic.block_barrier()
        for step in range(sizes.steps):
            if step + sizes.steps_ahead < sizes.steps:
                for each in self.matrices:
                    each.load(step + sizes.steps_ahead)
            self.add_products(step)
        self.share_sums()
        # All warps have stored their sums.
        mosaic.block_barrier()
        results = sizes.strips * sizes.num_rows * _COLUMNS
        for start in range(0, results, _WARPS * WARP):
            index = mosaic.add(self.thread, start)
            with mosaic.when(mosaic.below(index, results)):
                self.store_result(index)

    def column_of(self, strip: Value) -> Value:
        """Returns the first column of strip number `strip` of this round."""
        strip = mosaic.add(mosaic.mul(self.round_number, self.sizes.strips), strip)
        return mosaic.mul(strip, _COLUMNS)

    # ------------------------------------------------------------------------------- rows

    def part_of_chunk(self, start: int) -> tuple[Value, Value, Value, Value]:
        """Returns which four numbers this thread scales: (chunk, exists, row, first number)."""
        # Chunks are numbered through all rows. From `start` on, each warp scales one. For a warp
        # past the last, `exists` (i1) is false, and the rest is that of the last chunk.
        count = self.sizes.num_rows * self.sizes.chunks
        chunk_of_warp = mosaic.add(self.warp, start)
        exists = mosaic.below(chunk_of_warp, count)
        chunk = arith.minui(chunk_of_warp, mosaic.i32(count - 1))
        row, chunk_of_row = mosaic.divided(chunk, self.sizes.chunks)
        number = mosaic.add(mosaic.mul(chunk_of_row, _CHUNK), mosaic.mul(self.lane, 4))
        return chunk, exists, row, number

    def load_chunk(self, start: int) -> list[Value]:
        """Loads the numbers of `part_of_chunk`, two in a word; zeros past the end of the row."""
        _, _, row, number = self.part_of_chunk(start)
        inside = mosaic.below(number, self.sizes.depth)
        number = arith.select(inside, number, mosaic.i32(0))
        source_row = row if self.sizes.shared_rows else mosaic.add(self.first_row, row)
        address = _address(self.source, source_row, self.sizes.depth, number, size=2)
        words = _load("ld.global.nc.v2.b32", 2, address, 0)
        return [arith.select(inside, word, mosaic.i32(0)) for word in words]

    def scale_chunk(self, start: int, words: Sequence[Value]) -> None:
        """Scales the result of `load_chunk`, and shares float16 numbers and the chunk's scale."""
        chunk, exists, row, number = self.part_of_chunk(start)
        numbers = BFLOAT16.numbers(words)
        scale, inverse = _scale_of_chunk(numbers)
        scaled = [arith.mulf(each, inverse) for each in numbers]
        row_length = self.sizes.chunks * _CHUNK
        byte = mosaic.mul(mosaic.add(mosaic.mul(row, row_length), number), 2)
        pairs, pair_bytes = [(0, 1), (2, 3)], WORD_BYTES
        if not self.sizes.is_float8:
            # Pairs of 8 numbers must be ordered like those of `_float8_of_float4`: (0, 2), (4, 6),
            # (1, 3), (5, 7). One thread has the first four numbers, the next thread the others.
            pairs, pair_bytes = [(0, 2), (1, 3)], 2 * WORD_BYTES
            byte = arith.subi(byte, arith.andi(number, mosaic.i32(4)))
        for i, pair in enumerate(pairs):
            at = mosaic.add(byte, i * pair_bytes)
            pointer = mosaic.pointer_at(self.rows, at, mosaic.integer_type(8))
            word = Packed(jnp.float16).pair(*(scaled[j] for j in pair))
            with mosaic.when(exists):
                llvm.store(word, pointer, alignment=4)
        with mosaic.when(arith.andi(exists, mosaic.equal(self.lane, 0))):
            share(self.scales, chunk, [scale])

    def load_rows(self, first: int, step: int) -> tuple[list[Value], list[Value]]:
        """Loads the thread's 16 words of rows `first` and, if any, the next, and their scales."""
        # The thread holds row `quad` of the instruction: a row of the matmul, the second one if
        # `quad` is odd, at the places of thread `quad` / 2 of a quad, and zeros elsewhere.
        sizes = self.sizes
        thread_with_numbers, row_of_two = mosaic.divided(self.quad, _ROWS_AT_ONCE)
        count = min(_ROWS_AT_ONCE, sizes.num_rows - first)
        row = arith.minui(mosaic.add(row_of_two, first), mosaic.i32(first + count - 1))
        chunk = mosaic.add(self.split, step * sizes.splits)
        # Past the last chunk, numbers are zeros, but the scales that are read must exist.
        if (step + 1) * sizes.splits > sizes.chunks:
            chunk = arith.minui(chunk, mosaic.i32(sizes.chunks - 1))
        # The thread's places are 2 vectors of 16 float8 numbers, 64 apart, or one of 32 float4.
        in_chunk = mosaic.mul(self.quad_thread, 16 if sizes.is_float8 else 32)
        chunk_of_rows = mosaic.add(mosaic.mul(row, sizes.chunks), chunk)
        at = mosaic.mul(mosaic.add(mosaic.mul(chunk_of_rows, _CHUNK), in_chunk), 2)
        has_numbers = mosaic.equal(thread_with_numbers, self.quad_thread)
        if (inside := self.inside(step)) is not None:
            has_numbers = arith.andi(has_numbers, inside)
        start = arith.select(has_numbers, at, mosaic.i32(sizes.first_zero_byte))
        # The bytes from the first 16 float16 numbers to the others. All zeros are the same 16.
        apart = mosaic.i32(2 * 64 if sizes.is_float8 else 2 * 16)
        apart = arith.select(has_numbers, apart, mosaic.i32(0))
        words = []
        for i in range(2):
            start_of_half = mosaic.add(start, apart) if i else start
            for j in range(0, 32, VECTOR_BYTES):
                place = mosaic.add(start_of_half, j)
                pointer = mosaic.pointer_at(self.rows, place, mosaic.integer_type(8))
                address = llvm.ptrtoint(mosaic.integer_type(32), pointer)
                words += _load("ld.shared.v4.b32", 4, address, 0)
        row_scales = [
            mosaic.element_at(self.scales, mosaic.add(chunk, (first + i) * sizes.chunks))
            for i in range(count)
        ]
        return words, row_scales

    def inside(self, step: int) -> Value | None:
        """Returns whether the thread's places of a step are in K (i1); None if all threads' are."""
        sizes = self.sizes
        if (step + 1) * sizes.splits * _CHUNK <= sizes.depth:
            return None
        chunk = mosaic.add(self.split, step * sizes.splits)
        # In MXFP4, the last chunk may have fewer blocks of 32, one of which belongs to each thread.
        in_chunk = mosaic.mul(self.quad_thread, 0 if sizes.is_float8 else sizes.format.block[1])
        number = mosaic.add(mosaic.mul(chunk, _CHUNK), in_chunk)
        return mosaic.below(number, sizes.depth)

    # ------------------------------------------------------------------------------- sums

    def add_products(self, step: int) -> None:
        """Multiplies all rows by the columns that `_Matrices.load` has loaded for a step."""
        decoded = [each.decode(step) for each in self.matrices]
        for row in range(0, self.sizes.num_rows, _ROWS_AT_ONCE):
            words, row_scales = self.load_rows(row, step)
            for each, columns in zip(self.matrices, decoded, strict=True):
                each.multiply(columns, words, row_scales, row)

    def share_sums(self) -> None:
        """Adds up the sums of the threads of each quad, and stores them in shared memory."""
        for i, each in enumerate(self.matrices):
            for row in range(self.sizes.num_rows):
                totals = [mosaic.warp_sum(total, _QUAD) for total in each.totals[row]]
                with mosaic.when(mosaic.equal(self.quad_thread, 0)):
                    for j, total in enumerate(totals):
                        column = mosaic.add(self.quad, j * _APART)
                        at = self.index_of_sum(self.warp, i, mosaic.i32(row), column)
                        share(self.sums, at, [arith.bitcast(mosaic.integer_type(32), total)])

    def index_of_sum(self, warp: Value, matrix: int, row: Value, column: Value) -> Value:
        """Returns the index in `sums` of a warp's sum for a matrix, a row and a column."""
        matrix_index = mosaic.add(mosaic.mul(warp, self.sizes.num_matrices), matrix)
        row_index = mosaic.add(mosaic.mul(matrix_index, self.sizes.num_rows), row)
        return mosaic.add(mosaic.mul(row_index, _COLUMNS), column)

    def store_result(self, index: Value) -> None:
        """Computes number `index` of the round's results from the warps' sums, and stores it."""
        # `index` is (strip * T + row) * 16 + column of the strip.
        sizes = self.sizes
        row_of_strips, column_of_strip = mosaic.divided(index, _COLUMNS)
        strip, row = mosaic.divided(row_of_strips, sizes.num_rows)
        column = mosaic.add(self.column_of(strip), column_of_strip)
        biases = iter(self.biases)
        bfloat16 = mosaic.element_type(jnp.bfloat16)
        numbers = []
        for i, has_bias in enumerate(sizes.has_bias):
            warp_sums = []
            for split in range(sizes.splits):
                warp = mosaic.add(mosaic.mul(strip, sizes.splits), split)
                at = self.index_of_sum(warp, i, row, column_of_strip)
                warp_sums.append(mosaic.element_at(self.sums, at))
            rounded = arith.truncf(bfloat16, functools.reduce(arith.addf, warp_sums))
            number = arith.extf(mosaic.float_type(), rounded)
            if has_bias:
                number = arith.addf(number, self.load_bias(next(biases), column))
            numbers.append(number)
        result = numbers[0] if sizes.gating is None else sizes.gating.emit(*numbers)[0]
        with mosaic.when(mosaic.below(column, sizes.width)):
            out_row = mosaic.add(self.first_row, row)
            pointer = pointer_to(self.out, out_row, sizes.width, column, size=2)
            llvm.store(arith.truncf(bfloat16, result), pointer)

    def load_bias(self, memref: Value, column: Value) -> Value:
        """Loads the group's bias of a column, from [L, N], as float32."""
        kind = mosaic.element_of(memref)
        # The last block may reach past the last column.
        column = arith.minui(column, mosaic.i32(self.sizes.width - 1))
        at = pointer_to(memref, self.group, self.sizes.width, column, mosaic.bytes_of(kind))
        bias = llvm.load(kind, at)
        return bias if kind == mosaic.float_type() else arith.extf(mosaic.float_type(), bias)


# A thread's two columns in one step: the words of each, and the scale of each.
_Columns = tuple[list[list[Value]], list[Value]]


class _Matrices:
    """A thread's numbers of one array of matrices, and its sums of products with them."""

    def __init__(self, thread: _Thread, values: Value, scales: Value) -> None:
        self.thread = thread
        sizes = thread.sizes
        last = mosaic.i32(sizes.width - _COLUMNS)
        column = arith.minui(thread.column_of(thread.strip), last)
        # All groups' columns are numbered one after the other.
        group_column = mosaic.mul(thread.group, sizes.width)
        thread_column = mosaic.add(group_column, mosaic.add(column, thread.quad))
        # The bytes of a chunk, and of a column.
        self.chunk_bytes = _CHUNK // sizes.format.numbers_per_value
        self.column_bytes = sizes.depth * self.chunk_bytes // _CHUNK
        # `self.values` and `self.scales` are the addresses of the thread's first vector and scale.
        first_byte = mosaic.add(
            mosaic.mul(thread.split, self.chunk_bytes), mosaic.mul(thread.quad_thread, VECTOR_BYTES)
        )
        self.values = _address(values, thread_column, self.column_bytes, first_byte, size=1)
        if sizes.is_float8:
            block = arith.divui(mosaic.add(group_column, column), mosaic.i32(_CHUNK))
            self.scales = _address(scales, block, sizes.chunks, thread.split, size=4)
        else:
            # The scales of a column: up to four for each chunk, one for each thread of a quad.
            self.column_scales = sizes.depth // sizes.format.block[1]
            first_scale = mosaic.add(mosaic.mul(thread.split, _QUAD), thread.quad_thread)
            self.scales = _address(scales, thread_column, self.column_scales, first_scale, size=1)
        # For each row, the thread's sums of both of its columns.
        self.totals = [[mosaic.f32(0.0)] * 2 for _ in range(sizes.num_rows)]
        self.loaded: list[_Columns] = []  # of each step

    def load(self, step: int) -> None:
        """Starts to load a step's words of the thread's two columns, and their scales or codes."""
        sizes = self.thread.sizes
        inside = self.thread.inside(step)
        # The step's chunk, counted from the warp's first, at which the addresses are.
        chunk = step * sizes.splits
        columns = []
        for i in range(2):
            words = []
            # The quad's four threads load adjacent vectors.
            for byte in range(0, self.chunk_bytes, _QUAD * VECTOR_BYTES):
                start = chunk * self.chunk_bytes + byte + i * _APART * self.column_bytes
                words += _load(_LOAD_ONCE, 4, self.values, start, inside)
            if inside is not None:
                words = [arith.select(inside, word, mosaic.i32(0)) for word in words]
            columns.append(words)
        if sizes.is_float8:
            scale = _load("ld.global.nc.f32", 1, self.scales, 4 * chunk, inside)
            self.loaded.append((columns, [scale, scale]))
            return
        starts = [_QUAD * chunk + i * _APART * self.column_scales for i in range(2)]
        scales = [_load("ld.global.nc.u8", 1, self.scales, start, inside) for start in starts]
        if inside is not None:
            # Where not inside, `_load` gives both columns one code, which may be NaN.
            scales = [arith.select(inside, scale, mosaic.i32(_CODE_OF_ONE)) for scale in scales]
        self.loaded.append((columns, scales))

    def decode(self, step: int) -> _Columns:
        """Converts what `load` loaded to words of float16 pairs, and scales to float32."""
        # In MXFP4, the numbers of each word get another order: 0, 2, 4, 6, 1, 3, 5, 7.
        columns, scales = self.loaded[step]
        if not self.thread.sizes.is_float8:
            columns = [_each_converted(words, _float8_of_float4) for words in columns]
            bits = (bits_of_e8m0(scale, fraction_bits=23) for scale in scales)
            scales = [arith.bitcast(mosaic.float_type(), each) for each in bits]
        return [_each_converted(words, _float16_of_float8) for words in columns], scales

    def multiply(
        self, decoded: _Columns, row_words: Sequence[Value], row_scales: Sequence[Value], first: int
    ) -> None:
        """Multiplies decoded columns by rows `first` and the next, if any; adds to the totals."""
        # `row_words` and `row_scales` are the result of `_Thread.load_rows`.
        (left, right), scales = decoded  # of the thread's two columns
        # sums[2 * i + row] is that of the thread's column i and one of the two rows.
        sums = [mosaic.f32(0.0)] * 4
        for i in range(0, len(left), 2):
            # An instruction takes two words of each column.
            four = [left[i], right[i], left[i + 1], right[i + 1]]
            sums = tensor_cores.add_warp_product(four, row_words[i : i + 2], sums, jnp.float16)
        for row, row_scale in enumerate(row_scales):
            if not self.thread.sizes.is_float8:
                row_scale = arith.mulf(row_scale, mosaic.f32(_FLOAT4_DIVISOR))
            for i in range(2):
                scaled = arith.mulf(sums[2 * i + row], row_scale)
                total = self.totals[first + row][i]
                self.totals[first + row][i] = llvm.intr_fma(scaled, scales[i], total)


# A load of matrices, which are used once.
_LOAD_ONCE = "ld.global.nc.L1::no_allocate.v4.b32"
# The code of the scale 1 in MXFP4.
_CODE_OF_ONE = 127
# The bits of a float4 number, placed in a float8, give the number divided by this.
_FLOAT4_DIVISOR = 64.0


def _scale_of_chunk(numbers: Sequence[Value]) -> tuple[Value, Value]:
    """Returns the bits of a chunk's scale, a power of two, and 1 / scale (float32)."""
    # `numbers` are this thread's, and the warp's threads together have the chunk's.
    largest = mosaic.warp_max(max_of(float8.magnitude(each)[1] for each in numbers))
    # In float32, the exponent's 8 bits begin at bit 23. The largest number's exponent, less 12, is
    # that of the scale, but at least 1: the scale is not subnormal.
    exponent = arith.maxui(
        arith.andi(largest, mosaic.i32(0x7F800000)), mosaic.i32((_LARGEST_EXPONENT + 1) << 23)
    )
    scale = arith.subi(exponent, mosaic.i32(_LARGEST_EXPONENT << 23))
    # The biased exponents of 2^e and 2^-e add up to 254.
    return scale, arith.bitcast(mosaic.float_type(), arith.subi(mosaic.i32(254 << 23), scale))


def _each_converted(words: Sequence[Value], convert: Callable[[Value], list[Value]]) -> list[Value]:
    """Returns the words into which `convert` converts each word, one after the other."""
    return [part for word in words for part in convert(word)]


def _float8_of_float4(word: Value) -> list[Value]:
    """Converts 8 float4 numbers to float8, divided by 64: a word of the even, one of the odd."""

    # Sign, exponent and fraction have 1, 2 and 1 bits in float4, and 1, 4 and 3 bits in float8. So
    # a number's bits s e e f go to the places s - - e e f - - of a byte.
    def merged(signs: Value, sizes: Value) -> Value:
        sign = arith.andi(signs, mosaic.i32(0x80808080))
        return arith.ori(sign, arith.andi(sizes, mosaic.i32(0x1C1C1C1C)))

    even = merged(arith.shli(word, mosaic.i32(4)), arith.shli(word, mosaic.i32(2)))
    return [even, merged(word, arith.shrui(word, mosaic.i32(2)))]


def _float16_of_float8(word: Value) -> list[Value]:
    """Converts the four float8_e4m3fn numbers in a word to float16, two in a word."""
    parts = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; "
    converted = [f"cvt.rn.f16x2.{PTX_TYPE}x2 $0, {half}; }}" for half in ("low", "high")]
    word_type = mosaic.integer_type(32)
    return [llvm.inline_asm(word_type, [word], parts + text, "=r,r") for text in converted]


def _address(memref: Value, row: Value, width: int, column: Value, size: int) -> Value:
    """Emits the 64-bit address of `pointer_to`, for the PTX of `_load`."""
    pointer = pointer_to(memref, row, width, column, size)
    return llvm.ptrtoint(mosaic.integer_type(64), pointer)


def _load(
    instruction: str, count: int, address: Value, offset: int, inside: Value | None = None
) -> Any:
    """Loads `count` numbers, a list if several, from `address` + `offset` bytes."""
    # Where not `inside` (i1; None: all are), loads from `address`; the caller ignores the result.
    if inside is not None:
        address = mosaic.add(address, arith.select(inside, mosaic.i64(offset), mosaic.i64(0)))
        offset = 0
    is_float = instruction.endswith("f32")
    element = mosaic.float_type() if is_float else mosaic.integer_type(32)
    names = ", ".join(f"${i}" for i in range(count))
    loaded = llvm.inline_asm(
        mosaic.struct_type([element] * count) if count > 1 else element,
        [address],
        f"{instruction} {'{' + names + '}' if count > 1 else names}, [${count}+{offset}];",
        ",".join(["=f" if is_float else "=r"] * count + ["r" if "shared" in instruction else "l"]),
        has_side_effects=True,
    )
    return [llvm.extractvalue(element, loaded, [i]) for i in range(count)] if count > 1 else loaded
