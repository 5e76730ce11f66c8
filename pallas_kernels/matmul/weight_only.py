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
sums over 16 numbers: 4 numbers of each thread of a quad (PTX ISA, "Matrix fragments for
mma.m16n8k16"). A thread loads 16 bytes of each of its two columns, c and c + 8, where c = lane / 4.
These numbers lie next to each other, and have a scale of their own in MXFP4. So each thread of a
quad needs its own sum. Therefore an instruction multiplies only two rows of the matmul. Of its 8
rows, rows 2 * t and 2 * t + 1 hold the two rows' numbers at thread t's places in K, and zeros
elsewhere. The instruction gives the sums with these two rows to thread t of each quad, which knows
their scale.
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
_TOGETHER = 2
# Scaled, the largest number of a chunk of a row is at least 2^_LARGEST and below 2^(_LARGEST + 1).
# float16 numbers are below 2^16, and represent bfloat16 numbers exactly from 2^-17 on.
_LARGEST = 12
# How many chunks of rows a warp loads before it begins to load matrices.
_ROW_LOADS = 4
# The most vectors of 16 bytes of matrices that a thread loads ahead. So many take 64 registers.
_AHEAD = 16
# The bytes of zeros in shared memory: 16 float16 numbers, which replace 16 numbers of a row.
_ZEROS = 32
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

    # A *strip* is 16 adjacent columns of the output, which `splits` warps of a block compute.
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
    def zeros(self) -> int:
        """The first byte of the zeros, which follow the scaled rows in shared memory."""
        return 2 * self.num_rows * self.chunks * _CHUNK

    def scratch_types(self) -> dict[str, Any]:
        sums = _WARPS * self.num_matrices * self.num_rows * _COLUMNS
        return dict(
            # Scaled rows, [T, K] float16, and zeros after them.
            rows=plgpu.SMEM(((self.zeros + _ZEROS) // WORD_BYTES,), jnp.float32),
            scales=plgpu.SMEM((self.num_rows * self.chunks,), jnp.float32),
            sums=plgpu.SMEM((sums,), jnp.float32),  # [warps, num_matrices, T, 16]
        )


def _compute_block(sizes: _Sizes, refs: Any, group: Any, block: Any, first_row: Any) -> None:
    """Computes a block's columns of the output's rows from `first_row` on, round by round."""

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
        # The thread has columns `down` and `down` + 8 of the strip, and place `across` in its quad.
        self.down, self.across = mosaic.divided(self.lane, _QUAD)
        self.matrices = [_Matrices(self, *operands[i : i + 2]) for i in range(0, num_parts, 2)]

    def run(self, scales_rows: bool) -> None:
        """Computes and stores the round's results; with `scales_rows`, it first scales the rows."""
        sizes = self.sizes
        # The first loads of rows come before those of matrices, which take longer.
        starts = range(0, sizes.num_rows * sizes.chunks, _WARPS) if scales_rows else range(0)
        chunks = [self.load_chunk(start) for start in starts[:_ROW_LOADS]]
        # Steps to load ahead; in each, a thread loads one or two vectors of each of its columns.
        ahead = max(1, _AHEAD // (2 * sizes.num_matrices * (2 if sizes.is_float8 else 1)))
        for step in range(min(ahead, sizes.steps)):
            self.load_matrices(step)
        if scales_rows:
            chunks += [self.load_chunk(start) for start in starts[_ROW_LOADS:]]
            for start, words in zip(starts, chunks, strict=True):
                self.scale_chunk(start, words)
            with mosaic.when(mosaic.below(self.thread, _ZEROS // WORD_BYTES)):
                at = mosaic.add(self.thread, sizes.zeros // WORD_BYTES)
                share(self.rows, at, [mosaic.i32(0)])
        # All threads have stored their part of the rows, or read the sums of the last round.
        mosaic.block_barrier()
        for step in range(sizes.steps):
            if step + ahead < sizes.steps:
                self.load_matrices(step + ahead)
            self.add_products(step)
        self.share_sums()
        # All warps have stored their sums.
        mosaic.block_barrier()
        results = sizes.strips * sizes.num_rows * _COLUMNS
        for start in range(0, results, _WARPS * WARP):
            index = mosaic.add(self.thread, start)
            with mosaic.when(mosaic.below(index, results)):
                self.store_result(index)

    def load_matrices(self, step: int) -> None:
        for each in self.matrices:
            each.load(step)

    def column_of(self, strip: Value) -> Value:
        """Returns the first column of strip number `strip` of this round."""
        strip = mosaic.add(mosaic.mul(self.round_number, self.sizes.strips), strip)
        return mosaic.mul(strip, _COLUMNS)

    # ------------------------------------------------------------------------------- rows

    def part_of_chunk(self, start: int) -> tuple[Value, Value, Value, Value]:
        """Returns which four numbers this thread scales: (chunk, exists, row, first number)."""
        # Chunks are numbered through all rows, and the warps take turns at them, from `start` on.
        # Past the last chunk, the row and the numbers are those of the last.
        count = self.sizes.num_rows * self.sizes.chunks
        number_of_chunk = mosaic.add(self.warp, start)
        exists = mosaic.below(number_of_chunk, count)
        index = arith.minui(number_of_chunk, mosaic.i32(count - 1))
        row, chunk_of_row = mosaic.divided(index, self.sizes.chunks)
        number = mosaic.add(mosaic.mul(chunk_of_row, _CHUNK), mosaic.mul(self.lane, 4))
        return index, exists, row, number

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
        """Scales the result of `load_chunk`, and stores float16 numbers and the chunk's scale."""
        index, exists, row, number = self.part_of_chunk(start)
        numbers = BFLOAT16.numbers(words)
        largest = mosaic.warp_max(max_of(float8.magnitude(each)[1] for each in numbers))
        # The scale is 2^(exponent of the largest number - _LARGEST), but never subnormal.
        exponent = arith.maxui(
            arith.andi(largest, mosaic.i32(0x7F800000)), mosaic.i32((_LARGEST + 1) << 23)
        )
        scale = arith.subi(exponent, mosaic.i32(_LARGEST << 23))
        # The biased exponents of 2^e and 2^-e add up to 254.
        inverse = arith.bitcast(mosaic.float_type(), arith.subi(mosaic.i32(254 << 23), scale))
        scaled = [arith.mulf(each, inverse) for each in numbers]
        # Of each 8 numbers of a row, the order is that of `_Matrices.decode`.
        is_float8 = self.sizes.is_float8
        row_length = self.sizes.chunks * _CHUNK
        pairs = [(0, 1), (2, 3)] if is_float8 else [(0, 2), (1, 3)]
        byte = mosaic.mul(mosaic.add(mosaic.mul(row, row_length), number), 2)
        if not is_float8:
            # Of the two threads that have 8 numbers, the second one's pairs follow the first one's.
            byte = arith.subi(byte, arith.andi(number, mosaic.i32(4)))
        for i, pair in enumerate(pairs):
            at = mosaic.add(byte, i * (4 if is_float8 else 8))
            pointer = mosaic.pointer_at(self.rows, at, mosaic.integer_type(8))
            word = Packed(jnp.float16).pair(*(scaled[j] for j in pair))
            with mosaic.when(exists):
                llvm.store(word, pointer, alignment=4)
        with mosaic.when(arith.andi(exists, mosaic.equal(self.lane, 0))):
            share(self.scales, index, [scale])

    def load_rows(self, first: int, step: int) -> tuple[list[Value], list[Value]]:
        """Loads a thread's 16 words of row `first` or the next, and the chunks' scales of both."""
        # The thread holds row `down` of an instruction. These are the numbers of row `down` mod 2
        # at the places of thread `down` / 2 of a quad.
        sizes = self.sizes
        thread_of_quad, row_of_two = mosaic.divided(self.down, _TOGETHER)
        count = min(_TOGETHER, sizes.num_rows - first)
        row = arith.minui(mosaic.add(row_of_two, first), mosaic.i32(first + count - 1))
        chunk = mosaic.add(self.split, step * sizes.splits)
        if (step + 1) * sizes.splits > sizes.chunks:
            chunk = arith.minui(chunk, mosaic.i32(sizes.chunks - 1))
        # A thread's numbers are 2 vectors of 16 float8 numbers, 64 apart, or one of 32 float4.
        in_chunk = mosaic.mul(self.across, 16 if sizes.is_float8 else 32)
        chunk_of_rows = mosaic.add(mosaic.mul(row, sizes.chunks), chunk)
        at = mosaic.mul(mosaic.add(mosaic.mul(chunk_of_rows, _CHUNK), in_chunk), 2)
        # For the numbers of the other threads, and past the end of the row, the thread loads zeros.
        is_own = mosaic.equal(thread_of_quad, self.across)
        if (inside := self.inside(step)) is not None:
            is_own = arith.andi(is_own, inside)
        start = arith.select(is_own, at, mosaic.i32(sizes.zeros))
        # In bytes, from the first half of the words to the second.
        apart = mosaic.i32(2 * 64 if sizes.is_float8 else 2 * 16)
        apart = arith.select(is_own, apart, mosaic.i32(0))
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
        """Returns whether a thread's numbers of a step exist (i1), or None if those of all do."""
        sizes = self.sizes
        if (step + 1) * sizes.splits * _CHUNK <= sizes.depth:
            return None
        chunk = mosaic.add(self.split, step * sizes.splits)
        # In MXFP4, the last chunk may have fewer blocks of 32, one of which belongs to each thread.
        in_chunk = mosaic.mul(self.across, 0 if sizes.is_float8 else sizes.format.block[1])
        number = mosaic.add(mosaic.mul(chunk, _CHUNK), in_chunk)
        return mosaic.below(number, sizes.depth)

    # ------------------------------------------------------------------------------- sums

    def add_products(self, step: int) -> None:
        """Multiplies all rows by the columns that `_Matrices.load` has loaded for a step."""
        decoded = [each.decode(step) for each in self.matrices]
        for row in range(0, self.sizes.num_rows, _TOGETHER):
            words, row_scales = self.load_rows(row, step)
            for each, columns in zip(self.matrices, decoded, strict=True):
                each.multiply(columns, words, row_scales, row)

    def share_sums(self) -> None:
        """Adds up the sums of the threads of each quad, and stores them in shared memory."""
        for i, each in enumerate(self.matrices):
            for row in range(self.sizes.num_rows):
                totals = [mosaic.warp_sum(total, _QUAD) for total in each.totals[row]]
                with mosaic.when(mosaic.equal(self.across, 0)):
                    for j, total in enumerate(totals):
                        column = mosaic.add(self.down, j * _APART)
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


# Words of each of a thread's two columns, and the scale of each.
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
        thread_column = mosaic.add(group_column, mosaic.add(column, thread.down))
        # The bytes of a chunk, and of a column.
        self.chunk_bytes = _CHUNK // sizes.format.numbers_per_value
        self.column_bytes = sizes.depth * self.chunk_bytes // _CHUNK
        # `values` and `scales` are the addresses of the thread's first vector and scale.
        first_byte = mosaic.add(
            mosaic.mul(thread.split, self.chunk_bytes), mosaic.mul(thread.across, VECTOR_BYTES)
        )
        self.values = _address(values, thread_column, self.column_bytes, first_byte, size=1)
        if sizes.is_float8:
            block = arith.divui(mosaic.add(group_column, column), mosaic.i32(_CHUNK))
            self.scales = _address(scales, block, sizes.chunks, thread.split, size=4)
        else:
            # The scales of a column: up to four for each chunk, one for each thread of a quad.
            self.column_scales = sizes.depth // sizes.format.block[1]
            first_scale = mosaic.add(mosaic.mul(thread.split, _QUAD), thread.across)
            self.scales = _address(scales, thread_column, self.column_scales, first_scale, size=1)
        # For each row, the thread's sums of both of its columns.
        self.totals = [[mosaic.f32(0.0)] * 2 for _ in range(sizes.num_rows)]
        self.loaded: list[_Columns] = []  # of each step

    def load(self, step: int) -> None:
        """Starts to load a step's words of the thread's two columns, and scales, in MXFP4 codes."""
        sizes = self.thread.sizes
        inside = self.thread.inside(step)
        # Counted from the warp's first chunk.
        chunk = step * sizes.splits
        columns = []
        for i in range(2):
            words = []
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
            # Where not inside, both are the first column's. A NaN of it must not reach the second.
            scales = [arith.select(inside, scale, mosaic.i32(_CODE_OF_ONE)) for scale in scales]
        self.loaded.append((columns, scales))

    def decode(self, step: int) -> _Columns:
        """Converts what `load` loaded to words of float16 pairs, and scales to float32."""
        # In MXFP4, the numbers of each word get another order: 0, 2, 4, 6, 1, 3, 5, 7.
        columns, scales = self.loaded[step]
        if not self.thread.sizes.is_float8:
            columns = [[part for w in words for part in _float8_of_float4(w)] for words in columns]
            bits = (bits_of_e8m0(scale, fraction_bits=23) for scale in scales)
            scales = [arith.bitcast(mosaic.float_type(), each) for each in bits]
        return [
            [pair for w in words for pair in _float16_of_float8(w)] for words in columns
        ], scales

    def multiply(
        self, decoded: _Columns, row_words: Sequence[Value], row_scales: Sequence[Value], first: int
    ) -> None:
        """Multiplies decoded columns by rows, two at most, from `first` on; adds to the totals."""
        (left, right), scales = decoded  # of the thread's two columns
        # sums[2 * i + row] is that of the thread's column i and one of the two rows.
        sums = [mosaic.f32(0.0)] * 4
        for i in range(0, len(left), 2):
            four = [left[i], right[i], left[i + 1], right[i + 1]]
            sums = tensor_cores.add_warp_product(four, row_words[i : i + 2], sums, jnp.float16)
        for row, row_scale in enumerate(row_scales):
            if not self.thread.sizes.is_float8:
                row_scale = arith.mulf(row_scale, mosaic.f32(_FLOAT4))
            for i in range(2):
                scaled = arith.mulf(sums[2 * i + row], row_scale)
                total = self.totals[first + row][i]
                self.totals[first + row][i] = llvm.intr_fma(scaled, scales[i], total)


# A load of matrices, which are used once.
_LOAD_ONCE = "ld.global.nc.L1::no_allocate.v4.b32"
# The code of the scale 1 in MXFP4.
_CODE_OF_ONE = 127
# The bits of a float4 number, placed in a float8, give the number divided by _FLOAT4.
_FLOAT4 = 64.0


def _float8_of_float4(word: Value) -> list[Value]:
    """Converts 8 float4 numbers to float8, divided by 64: a word of the even, one of the odd."""

    # Sign, exponent and fraction have 1, 2 and 1 bits in float4, and 1, 4 and 3 bits in float8.
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
    pointer = pointer_to(memref, row, width, column, size)
    return llvm.ptrtoint(mosaic.integer_type(64), pointer)


def _load(
    instruction: str, count: int, address: Value, offset: int, inside: Value | None = None
) -> Any:
    """Loads `count` numbers, a list if several, from `address` + `offset` by an `instruction`."""
    # Where not `inside`, loads from `address` itself, which exists; the caller ignores the numbers.
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
