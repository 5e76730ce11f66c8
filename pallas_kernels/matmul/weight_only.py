"""Matmuls of a few bfloat16 rows by quantized matrices (weight-only quantization).

Where a group has few rows, a matmul takes the time to read its matrices. This kernel reads them as
they are stored, in float8 or MXFP4. A matrix [K, N] is stored transposed, [N, K]. A thread block
multiplies the rows of one tile, and computes some columns of the output for them, in *rounds*. In a
round, each warp computes a *strip* of 16 columns. In each *step*, it sums over a *chunk* of K: 64
bytes of each column, which are 4 vectors of 16 bytes, and 128 numbers in MXFP4 or 64 in float8. It
sums over every `splits`-th chunk; then the block adds up the sums of `splits` warps, which they
leave in shared memory. With 8 warps and 4 splits, they divide a matrix like this in a round (a
number stands for a warp):

      chunks of K   0     1     2     3     4     5    ...
                 +-----+-----+-----+-----+-----+-----+
    16 columns   |  0  |  1  |  2  |  3  |  0  |  1  |
                 +-----+-----+-----+-----+-----+-----+
    16 columns   |  4  |  5  |  6  |  7  |  4  |  5  |
                 +-----+-----+-----+-----+-----+-----+

**Copies run ahead.** A warp copies what it decodes to its own part of the *ring*, in shared memory,
by `cp.async`. It copies for one or two steps ahead, also for the next round. So within a round, it
waits for no other warp. A step's copies go to a *stage*, one of two or three parts of the ring.

**The order of K.** The instruction `mma.sync` multiplies 16 columns by 8 rows, and sums over 16 of
K, of which each thread of a *quad*, 4 adjacent threads, has 4 (PTX ISA, "Matrix fragments for
mma.m16n8k16"). Any order of K will do, if columns and rows have the same. So thread q of a quad
takes vector number q of a chunk of each of its two columns, c and c + 8, where c = lane / 4, and of
row c the numbers at the same places.

**Tensor cores multiply bfloat16 or float16.** The bits of a float4 number, placed at the end of a
bfloat16 number's exponent and the start of its fraction, represent the number divided by 2^126. One
multiplication applies 2^126 and the scale, which belongs to the 32 numbers of one thread; a scale
above 1 takes a second one. float16 represents every float8_e4m3fn number. So for float8, a number
of a row is divided by a scale, a power of two for each chunk, such that float16 represents it
exactly unless it is tiny. Sums of a chunk are multiplied by both scales.
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
from pallas_kernels.fabric.hardware import (
    HOPPER_CORES,
    ROW_ALIGNMENT,
    SHARED_MEMORY_BYTES,
    VECTOR_BYTES,
    WARP,
    WARPGROUP,
    WORD_BYTES,
)
from pallas_kernels.fabric.mosaic import Value, arith, llvm
from pallas_kernels.formats import E8M0, FLOAT8_MATRICES, MXFP4, Format, Scaled, bitcast
from pallas_kernels.matmul import tensor_cores
from pallas_kernels.matmul.chosen_groups import ChosenGroups, Groups, output_rows
from pallas_kernels.matmul.decoder import multiplied
from pallas_kernels.matmul.kernel import OTHER_BYTES, quotient_and_rest
from pallas_kernels.matmul.quantized_tiles import (
    BFLOAT16,
    PTX_TYPE,
    Packed,
    bits_of_e8m0,
    max_of,
    pointer_to,
    with_shuffled,
)
from pallas_kernels.matmul.row_tiles import BEGIN, END, GROUP, row_tiles

# A warp computes this many columns of the output at a time, and a thread two of them, 8 apart.
_COLUMNS, _APART = 16, 8
# Four threads hold the numbers of a column.
_QUAD = 4
_CHUNK_BYTES = _QUAD * VECTOR_BYTES
# An instruction multiplies this many rows.
_ROWS = ROW_ALIGNMENT
# The bfloat16 or float16 numbers of a row in a vector.
_ROW_NUMBERS = VECTOR_BYTES // 2
# A float8 scale belongs to a block of this many columns and rows.
_BLOCK = FLOAT8_MATRICES.block[1]
# The most rows of a tile, and the most bytes of these rows.
MOST_ROWS, _MOST_ROW_BYTES = 16, 112 * 1024
# The warps of a block, and the most blocks that a multiprocessor runs at a time. Three run only if
# threads have at most 80 registers.
_WARPS, _MOST_BLOCKS = 8, 3
# The warps of a block that leaves no room for another.
_WARPS_ALONE = 16
# The most rounds: with more, the blocks that end last take too long.
_MOST_ROUNDS = 3
# Bytes of shared memory that are left to the L1 cache, which holds the scales of the next steps.
_CACHE_BYTES = 48 * 1024
# The code of the scale 1 in MXFP4.
_CODE_OF_ONE = 127
# The exponent of a chunk's largest number, scaled, unless it is tiny: any up to 15 would do, since
# float16 numbers are below 2^16. They represent bfloat16 numbers exactly from 2^-17 on.
_LARGEST_EXPONENT = 12


def unsupported_reason(format: Format, num_rows: int, depth: int, width: int) -> str | None:
    """Returns why the kernel cannot multiply T rows by matrices [depth, width], or None."""
    if format not in (FLOAT8_MATRICES, MXFP4):
        return f"it decodes float8_e4m3fn with blocks of 128 x 128, and MXFP4, not {format.name}"
    row_multiple, column_multiple = format.block[1], max(_COLUMNS, format.block[0])
    if depth % row_multiple or width % column_multiple:
        return (
            f"matrices must have a multiple of {row_multiple} rows and a multiple of "
            f"{column_multiple} columns, but have {depth} and {width}"
        )
    if not 0 < num_rows <= MOST_ROWS or 2 * num_rows * depth > _MOST_ROW_BYTES:
        return (
            f"it supports up to {MOST_ROWS} rows, of {_MOST_ROW_BYTES} bytes together, not "
            f"{num_rows} rows of {depth} numbers"
        )
    return None


def weight_only_matmul(
    rows: jax.Array,
    matrices: Sequence[Scaled],
    biases: Sequence[jax.Array | None],
    groups: Groups,
    *,
    num_rows: int,
    format: Format,
    gating: Elementwise | None = None,
) -> jax.Array:
    """Multiplies rows by the matrices of their group, and applies `gating`.

    For float8, in each chunk of 64 of a row, a number is represented exactly if its magnitude is at
    least 2^-29 times the largest one, and else with an error of at most 2^-37 times the largest.

    Args:
      rows: [R, K] bfloat16 in group order; for S chosen groups [T, K], which all of them multiply,
        or [S * height, K]: T rows of each group, from row s * height on.
      matrices: one array of matrices, or two, [K, N] for each of L groups, given as their
        transposes [L, N, K] in `format`, with values and scales.
      biases: for each array of matrices, [L, N] bfloat16, float16 or float32, or None.
      groups: the number of rows of each group, [L] int32; or chosen groups.
      num_rows: the most rows of a tile, T; for chosen groups the number of rows of each.
      gating: an elementwise function of the products as float32; None returns the only product.

    Returns:
      [R, N] or [S * height, N] bfloat16: gating(product + bias, ...). The products are summed in
      float32 and rounded to bfloat16 before biases are added. Only rows of groups are written, and
      of chosen groups only T of each.
    """
    depth, width = rows.shape[1], matrices[0].values.shape[1]
    total = output_rows(groups, len(rows))
    if isinstance(groups, ChosenGroups):
        # Rows that choose the same group leave tiles unused, about a fifth of many.
        table, num_used = groups.table, 0.8 * (len(groups.table) - 1)
    else:
        table = row_tiles(groups, (num_rows,), total, alignment=1)
        num_used = min(len(groups), total)
    sizes = _Sizes(
        num_rows=num_rows,
        depth=depth,
        width=width,
        num_used=num_used,
        num_matrices=len(matrices),
        format=format,
        gating=gating,
        same_rows=len(rows) < total,
        has_bias=tuple(bias is not None for bias in biases),
    )
    parts = [
        part if part.dtype != E8M0 else bitcast(part, jnp.uint8)
        for each in matrices
        for part in each
    ]
    operands = [rows, *parts, *(bias for bias in biases if bias is not None), table]

    def kernel(*refs: Any, row_vectors: Any, ring: Any) -> None:
        *others, table, out = refs
        tile, block = quotient_and_rest(lax.axis_index("block"), jnp.int32(sizes.blocks_of_tile))
        group, begin, end = (table[tile, each] for each in (GROUP, BEGIN, END))

        # Tiles past the last, and those of a choice of no group, are left out. The comparison of
        # `group` always holds. It makes the kernel load the number before the branch.
        @pl.when((tile < table[table.shape[0] - 1, 0]) & (begin < end) & (group >= 0))
        def _() -> None:
            memrefs = [*others, out, row_vectors, ring]
            _compute_block(sizes, memrefs, group, block, begin, end - begin)

    return compiler.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((total, width), rows.dtype),
        scratch_types=sizes.scratch_types(),
        num_blocks=(len(table) - 1) * sizes.blocks_of_tile,
        num_warpgroups=sizes.num_threads // WARPGROUP,
        auto_barriers=False,  # the emitted code has its own
        kernel_name=f"weight_only_{'' if gating is None else 'gated_'}{format.name}",
    )(*operands)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The sizes of a `weight_only_matmul`, and how warps and thread blocks divide it."""

    num_rows: int  # T
    depth: int  # K
    width: int  # N
    num_used: float  # the expected number of tiles that have rows
    num_matrices: int
    format: Format
    gating: Elementwise | None
    same_rows: bool  # whether all groups multiply the same rows
    has_bias: tuple[bool, ...]

    @property
    def is_float8(self) -> bool:
        return self.format == FLOAT8_MATRICES

    @property
    def dtype(self) -> Any:
        """What the tensor cores multiply."""
        return jnp.float16 if self.is_float8 else jnp.bfloat16

    @property
    def chunk_numbers(self) -> int:
        """The numbers of a column in a chunk."""
        return _CHUNK_BYTES * self.format.numbers_per_value

    @property
    def chunks(self) -> int:
        """The number of chunks of a column, rounded up to whole steps."""
        return self.steps * self.splits

    @property
    def splits(self) -> int:
        """The number of warps that together compute the same columns."""
        # As many as the GPU can run at the same time; but each sums over 256 of K or more.
        warps_of_one = self.num_used * self.width / _COLUMNS
        most = _MOST_BLOCKS * _WARPS * HOPPER_CORES / warps_of_one
        return next((n for n in (8, 4, 2) if n <= most and 256 * n <= self.depth), 1)

    @property
    def steps(self) -> int:
        return -(-self.depth // (self.chunk_numbers * self.splits))

    @property
    def vectors_of_step(self) -> int:
        """The number of vectors of a row that a thread multiplies in a step."""
        return self.chunk_numbers // (_QUAD * _ROW_NUMBERS)

    @property
    def vectors_of_row(self) -> int:
        """The number of vectors of a row in shared memory, with zeros past K."""
        return self.chunks * self.chunk_numbers // _ROW_NUMBERS

    @property
    def row_bytes(self) -> int:
        return self.vectors_of_row * VECTOR_BYTES

    @property
    def scale_bytes(self) -> int:
        """The bytes of a row's scales."""
        return self.chunks * WORD_BYTES if self.is_float8 else 0

    @property
    def blocks_at_once(self) -> int:
        """The number of thread blocks that a multiprocessor runs at the same time."""
        return next((n for n in (_MOST_BLOCKS, 2) if self._stages(n, _WARPS) >= 2), 1)

    @property
    def num_warps(self) -> int:
        return _WARPS_ALONE if self.blocks_at_once == 1 else _WARPS

    @property
    def num_threads(self) -> int:
        return self.num_warps * WARP

    @property
    def strips_at_once(self) -> int:
        return self.num_warps // self.splits

    @property
    def strips(self) -> int:
        return self.width // _COLUMNS

    @property
    def rounds(self) -> int:
        # Each block of a tile loads all its rows. So all tiles together have about as many blocks
        # as run at the same time.
        blocks = max(1, round(self.blocks_at_once * HOPPER_CORES / self.num_used))
        return min(-(-self._rounds_of_tile // blocks), _MOST_ROUNDS)

    @property
    def blocks_of_tile(self) -> int:
        """The number of thread blocks of a tile. The last one may reach past the last column."""
        return -(-self._rounds_of_tile // self.rounds)

    @property
    def _rounds_of_tile(self) -> int:
        return -(-self.strips // self.strips_at_once)

    @property
    def steps_ahead(self) -> int:
        """How many steps early copies start."""
        stages = self._stages(self.blocks_at_once, self.num_warps, _CACHE_BYTES)
        return 2 if stages >= 3 and self.rounds * self.steps >= 2 else 1

    def _stages(self, blocks: int, num_warps: int, cache: int = 0) -> int:
        """Returns how many stages fit if a processor runs `blocks` blocks, and has a `cache`."""
        room = (SHARED_MEMORY_BYTES - cache) // blocks - OTHER_BYTES
        room -= self.num_rows * (self.row_bytes + self.scale_bytes)
        return room // (num_warps * WARP * self._stage_bytes_of_thread)

    @property
    def stage_bytes(self) -> int:
        return self.num_threads * self._stage_bytes_of_thread

    @property
    def _stage_bytes_of_thread(self) -> int:
        # Of each array of matrices, the vectors of two columns and a word of scales.
        return self.num_matrices * (2 * VECTOR_BYTES + WORD_BYTES)

    def scratch_types(self) -> dict[str, Any]:
        row_words = self.num_rows * (self.row_bytes + self.scale_bytes) // WORD_BYTES
        ring_words = (1 + self.steps_ahead) * self.stage_bytes // WORD_BYTES
        return dict(
            # The rows' vectors, [chunks, vectors_of_step, T, 4], and their scales, [chunks, T].
            row_vectors=plgpu.SMEM((row_words,), jnp.float32),
            # Stages: [2 * num_matrices, threads] vectors, and [num_matrices, threads] words.
            ring=plgpu.SMEM((ring_words,), jnp.float32),
        )


def _compute_block(
    sizes: _Sizes, refs: Any, group: Any, block: Any, first: Any, count: Any
) -> None:
    """Computes block number `block` of the columns of `count` rows of the output, from `first`."""

    def emit(*values: Any) -> None:
        _Thread(sizes, values[:-4], *map(mosaic.scalar, values[-4:])).run()

    mosaic.inline(emit, [*refs, group, block, first, count])


class _Thread:
    """A thread of a block. Its methods emit its code."""

    def __init__(
        self, sizes: _Sizes, memrefs: Any, group: Value, block: Value, first: Value, count: Value
    ) -> None:
        # `memrefs` are input rows, matrices, biases, output and scratch.
        self.sizes, self.group, self.first, self.count = sizes, group, first, count
        self.source, *operands, self.out, row_vectors, ring = memrefs
        self.biases = operands[2 * sizes.num_matrices :]
        self.rows, self.ring = mosaic.address(row_vectors, 32), mosaic.address(ring, 32)
        self.thread = mosaic.thread()
        self.warp, self.lane, self.quad, self.quad_thread = _place(self.thread)
        # The warp computes strip number `strip` of a round, over each chunk number `split` mod
        # `splits`. The block's strips end before `end_strip`.
        strip, self.split = mosaic.divided(self.warp, sizes.splits)
        self.first_strip = mosaic.mul(block, sizes.rounds * sizes.strips_at_once)
        self.strip = mosaic.add(self.first_strip, strip)
        end = mosaic.add(self.first_strip, sizes.rounds * sizes.strips_at_once)
        self.end_strip = arith.minui(end, mosaic.i32(sizes.strips))
        self.num_vectors = mosaic.mul(count, sizes.vectors_of_row)  # of all rows
        self.matrices = [
            _Matrices(self, i, *operands[2 * i : 2 * i + 2]) for i in range(sizes.num_matrices)
        ]

    def run(self) -> None:
        """Computes and stores the block's results."""
        sizes = self.sizes
        # The first loads of rows come before the copies of matrices, which take longer.
        first_vectors = self.load_vectors(self.thread)
        strip, step = self.strip, mosaic.i32(0)
        for stage in range(sizes.steps_ahead):
            self.start(strip, step, mosaic.i32(stage))
            strip, step = self.after(strip, step)
        self.share_rows(first_vectors)
        mosaic.block_barrier()

        def compute_round(turn: Value, state: list[Value]) -> list[Value]:
            # `state` is the strip and the step whose copies are next, and the next step's stage.
            parts = -(-sizes.num_rows // _ROWS)
            zeros = [mosaic.f32(0.0)] * (4 * sizes.num_matrices * parts)
            strip, step, stage, *sums = mosaic.carried(
                sizes.steps, self.take_step, [*state, *zeros]
            )
            # The stage of the last step is free until another step begins.
            last_stage = self.stage_before(stage)
            self.share_sums(last_stage, sums)
            # All warps have stored their sums.
            mosaic.block_barrier()
            first_strip = mosaic.add(self.first_strip, mosaic.mul(turn, sizes.strips_at_once))
            self.store_results(last_stage, first_strip)
            if sizes.rounds > 1:
                # All threads have read the sums.
                mosaic.block_barrier()
            return [strip, step, stage]

        mosaic.carried(sizes.rounds, compute_round, [strip, step, mosaic.i32(0)])

    # ------------------------------------------------------------------------------- steps

    def after(self, strip: Value, step: Value) -> tuple[Value, Value]:
        """Returns the strip and the step that follow."""
        step = mosaic.add(step, 1)
        is_past = mosaic.equal(step, self.sizes.steps)
        next_strip = mosaic.add(strip, self.sizes.strips_at_once)
        return arith.select(is_past, next_strip, strip), arith.select(is_past, mosaic.i32(0), step)

    def address_of_stage(self, stage: Value) -> Value:
        return mosaic.add(self.ring, mosaic.mul(stage, self.sizes.stage_bytes))

    def stage_before(self, stage: Value) -> Value:
        last = mosaic.i32(self.sizes.steps_ahead)
        return arith.select(mosaic.equal(stage, 0), last, arith.subi(stage, mosaic.i32(1)))

    def chunk_of(self, step: Value) -> Value:
        return mosaic.add(mosaic.mul(step, self.sizes.splits), self.split)

    def start(self, strip: Value, step: Value, stage: Value) -> None:
        """Starts to copy the matrices' numbers and scales of a step to a stage."""
        # Past the last strip, a warp computes numbers that `store_results` leaves out.
        with mosaic.when(mosaic.below(strip, self.end_strip)):
            for each in self.matrices:
                each.copy(strip, self.chunk_of(step), stage)
        mosaic.asm("cp.async.commit_group;", "~{memory}")

    def stage_after(self, stage: Value) -> Value:
        is_last = mosaic.equal(stage, self.sizes.steps_ahead)
        return arith.select(is_last, mosaic.i32(0), mosaic.add(stage, 1))

    def take_step(self, step: Value, carry: list[Value]) -> list[Value]:
        """Starts the copies of a later step, and adds the products of this step to the sums."""
        ahead = self.sizes.steps_ahead
        strip, later_step, stage, *sums = carry
        # This step's copies are complete, in all threads of the warp.
        mosaic.asm(f"cp.async.wait_group {ahead - 1};", "~{memory}")
        mosaic.asm("bar.warp.sync 0xffffffff;", "~{memory}")
        # The stage of the step before is free, and takes the later step's numbers.
        self.start(strip, later_step, self.stage_before(stage))
        chunk = self.chunk_of(step)
        words = [each.load(stage) for each in self.matrices]
        scales = [each.load_scales(stage, chunk) for each in self.matrices]
        if self.sizes.is_float8:
            sums = self.plus_float8(chunk, words, scales, sums)
        else:
            sums = self.plus_float4(chunk, words, scales, sums)
        return [*self.after(strip, later_step), self.stage_after(stage), *sums]

    def plus_float4(self, chunk: Value, words: Any, codes: Any, sums: list[Value]) -> list[Value]:
        """Adds products of MXFP4 numbers, in `words` of each column of each array of matrices."""

        def by_one() -> list[Value]:
            def decode(matrix: int, column: int, vector: int) -> list[Value]:
                # 2^126 times the scale 2^(code - 127) has the biased exponent code + 126.
                bits = mosaic.add(mosaic.mul(codes[matrix][column], 0x00800080), 0x3F003F00)
                pairs = _pairs_of_float4(words[matrix][column][vector])
                return [multiplied(pair, bits) for pair in pairs]

            return self.plus_products(chunk, decode, sums)

        def by_two() -> list[Value]:
            # Hides that both branches decode the same words: LLVM would decode them before.
            hidden = [[mosaic.opaque(column) for column in matrix] for matrix in words]

            def decode(matrix: int, column: int, vector: int) -> list[Value]:
                bits = bits_of_e8m0(codes[matrix][column], fraction_bits=7)
                scales = mosaic.chosen_bytes(bits, bits, mosaic.i32(0x1010))
                pairs = _pairs_of_float4(hidden[matrix][column][vector])
                power = mosaic.i32(0x7E807E80)  # 2^126 in both halves
                return [multiplied(multiplied(pair, power), scales) for pair in pairs]

            return self.plus_products(chunk, decode, sums)

        # No scale is above 1, and no code above 127, if no code has bit 7. All threads of a warp
        # take the same branch, as `mma.sync` must.
        all_codes = functools.reduce(arith.ori, [code for matrix in codes for code in matrix])
        is_small = mosaic.below(mosaic.warp_max(all_codes), _CODE_OF_ONE + 1)
        return mosaic.either(is_small, by_one, by_two, [each.type for each in sums])

    def plus_float8(self, chunk: Value, words: Any, scales: Any, sums: list[Value]) -> list[Value]:
        """Adds products of float8 numbers, in `words` of each column of each array of matrices."""

        def decode(matrix: int, column: int, vector: int) -> list[Value]:
            # The 8 numbers at the places of a row's vector are two words.
            two = words[matrix][column][2 * vector : 2 * vector + 2]
            return [pair for word in two for pair in _pairs_of_float8(word)]

        products = self.plus_products(chunk, decode, [mosaic.f32(0.0)] * len(sums))
        factors = []
        for part in range(len(sums) // (4 * len(scales))):
            row_scales = self.load_row_scales(chunk, part)
            for (scale,) in scales:
                # Of the two rows by the first column, and by the second.
                factors += [arith.mulf(scale, row_scale) for row_scale in row_scales * 2]
        return list(map(llvm.intr_fma, products, factors, sums))

    def plus_products(
        self, chunk: Value, decode: Callable[[int, int, int], list[Value]], sums: list[Value]
    ) -> list[Value]:
        """Adds the products of all rows and a chunk of both columns of each array of matrices.

        `decode(matrix, column, vector)` returns the words, two numbers each, at the places of a
        vector of a row. The sums of each *part*, 8 rows of the tile, are for each array of matrices
        those of two rows by the first column, and then by the second.
        """
        sizes, rows = self.sizes, self.address_of_rows(chunk)
        of_part = 4 * sizes.num_matrices
        parts = [sums[i : i + of_part] for i in range(0, len(sums), of_part)]
        for vector in range(sizes.vectors_of_step):
            columns = [[decode(i, j, vector) for j in range(2)] for i in range(sizes.num_matrices)]
            for i, old in enumerate(parts):
                plus = functools.partial(self.plus_part, rows, i, vector, columns, old)
                # The first part always has rows.
                is_empty = mosaic.below(self.count, i * _ROWS + 1)
                parts[i] = mosaic.unless(is_empty, plus, old) if i else plus()
        return [each for part in parts for each in part]

    def plus_part(
        self, rows: Value, part: int, vector: int, columns: Any, sums: list[Value]
    ) -> list[Value]:
        """Adds the products of a vector of each row of a part to the part's sums."""
        row = self.load_row(rows, part, vector)
        new = []
        for i, (left, right) in enumerate(columns):
            four_sums = sums[4 * i : 4 * i + 4]
            for j in range(0, len(row), 2):
                # An instruction takes two words of each column.
                four = [left[j], right[j], left[j + 1], right[j + 1]]
                four_sums = tensor_cores.add_warp_product(
                    four, row[j : j + 2], four_sums, self.sizes.dtype
                )
            new += four_sums
        return new

    # ------------------------------------------------------------------------------- rows

    def load_vectors(self, first: Value) -> list[list[Value]]:
        """Loads 2 or 4 vectors, `num_threads` apart, from `first` on, counted in all rows."""
        at_once = 2 if self.sizes.is_float8 else 4  # with more, float8 takes more registers
        return [
            self.load_vector(mosaic.add(first, i * self.sizes.num_threads)) for i in range(at_once)
        ]

    def load_vector(self, index: Value) -> list[Value]:
        """Loads a vector of a row; zeros past K and the last row."""
        row, vector = mosaic.divided(index, self.sizes.vectors_of_row)
        number = mosaic.mul(vector, _ROW_NUMBERS)
        exists = arith.andi(
            mosaic.below(index, self.num_vectors), mosaic.below(number, self.sizes.depth)
        )
        zero = mosaic.i32(0)
        first = zero if self.sizes.same_rows else self.first
        source_row = mosaic.add(first, arith.select(exists, row, zero))
        column = arith.select(exists, number, zero)
        pointer = pointer_to(self.source, source_row, self.sizes.depth, column, size=2)
        return [arith.select(exists, word, zero) for word in mosaic.load_numbers(pointer, 4)]

    def share_rows(self, first_vectors: list[list[Value]]) -> None:
        """Stores the rows to shared memory; `first_vectors` are those that are loaded already."""
        self.share_vectors(self.thread, first_vectors)
        at_once = len(first_vectors) * self.sizes.num_threads
        # Whole warps take turns, since they exchange numbers.
        end = arith.andi(mosaic.add(self.num_vectors, WARP - 1), mosaic.i32(-WARP))
        with mosaic.loop(mosaic.add(self.thread, at_once), end, at_once) as first:
            self.share_vectors(first, self.load_vectors(first))

    def share_vectors(self, first: Value, vectors: list[list[Value]]) -> None:
        """Stores loaded vectors and, for float8, their chunks' scales."""
        sizes = self.sizes
        for i, words in enumerate(vectors):
            index = mosaic.add(first, i * sizes.num_threads)
            exists = mosaic.below(index, self.num_vectors)
            row, vector = mosaic.divided(index, sizes.vectors_of_row)
            chunk, in_chunk = mosaic.divided(vector, sizes.vectors_of_step * _QUAD)
            quad_thread, of_thread = mosaic.divided(in_chunk, sizes.vectors_of_step)
            if sizes.is_float8:
                words, scale = _as_float16(words)
                with mosaic.when(arith.andi(exists, mosaic.equal(in_chunk, 0))):
                    llvm.store(scale, mosaic.shared_pointer(self.address_of_scale(chunk, row)))
            else:
                # In the order of `_pairs_of_float4`.
                words = [
                    mosaic.chosen_bytes(words[j], words[j + 2], mosaic.i32(selector))
                    for j in range(2)
                    for selector in (0x5410, 0x7632)
                ]
            at = mosaic.add(mosaic.mul(chunk, sizes.vectors_of_step), of_thread)
            at = mosaic.add(mosaic.mul(at, sizes.num_rows), row)
            at = mosaic.add(mosaic.mul(at, _QUAD), quad_thread)
            address = mosaic.add(self.rows, mosaic.mul(at, VECTOR_BYTES))
            with mosaic.when(exists):
                mosaic.store_numbers(words, mosaic.shared_pointer(address))

    def address_of_rows(self, chunk: Value) -> Value:
        at = mosaic.mul(chunk, self.sizes.vectors_of_step * self.sizes.num_rows * _QUAD)
        return mosaic.add(self.rows, mosaic.mul(mosaic.add(at, self.quad_thread), VECTOR_BYTES))

    def load_row(self, address: Value, part: int, vector: int) -> list[Value]:
        """Loads a vector of the thread's row in a part, from `address_of_rows` on."""
        # Past the last row, any row will do, since its products are not used.
        row = mosaic.add(self.quad, part * _ROWS)
        row = arith.minui(row, mosaic.i32(self.sizes.num_rows - 1))
        at = mosaic.add(row, vector * self.sizes.num_rows)
        address = mosaic.add(address, mosaic.mul(at, _QUAD * VECTOR_BYTES))
        return mosaic.load_numbers(mosaic.shared_pointer(address), 4)

    def address_of_scale(self, chunk: Value, row: Value) -> Value:
        at = mosaic.add(mosaic.mul(chunk, self.sizes.num_rows), row)
        start = mosaic.add(self.rows, self.sizes.num_rows * self.sizes.row_bytes)
        return mosaic.add(start, mosaic.mul(at, WORD_BYTES))

    def load_row_scales(self, chunk: Value, part: int) -> list[Value]:
        """Loads a chunk's scales of the two rows of a part whose sums the thread has."""
        first = mosaic.add(mosaic.mul(self.quad_thread, 2), part * _ROWS)
        last = mosaic.i32(self.sizes.num_rows - 1)
        rows = [arith.minui(mosaic.add(first, i), last) for i in range(2)]
        addresses = [self.address_of_scale(chunk, row) for row in rows]
        return [llvm.load(mosaic.float_type(), mosaic.shared_pointer(each)) for each in addresses]

    # ------------------------------------------------------------------------------- sums

    def share_sums(self, stage: Value, sums: Sequence[Value]) -> None:
        """Stores the thread's sums of a round in shared memory."""
        # The thread's place is computed again, so that it takes no registers during the steps.
        warp, _, quad, quad_thread = _place(mosaic.thread())
        for i, total in enumerate(sums):
            part, of_part = divmod(i, 4 * self.sizes.num_matrices)
            matrix, of_matrix = divmod(of_part, 4)
            column, row_of_two = divmod(of_matrix, 2)
            row = mosaic.add(mosaic.mul(quad_thread, 2), part * _ROWS + row_of_two)
            with mosaic.when(mosaic.below(row, self.count)):
                own_column = mosaic.add(quad, column * _APART)
                llvm.store(total, self.pointer_to_sum(stage, warp, matrix, row, own_column))

    def pointer_to_sum(
        self, stage: Value, warp: Value, matrix: int, row: Value, column: Value
    ) -> Value:
        """Returns a pointer to a warp's sum for an array of matrices, a row and a column."""
        # The sums [num_matrices, T, 16] replace the warp's vectors, which are in pieces of 512
        # bytes, one for each column of a thread. Two hold a matrix's sums of up to 16 rows.
        sizes, warp_bytes = self.sizes, WARP * VECTOR_BYTES
        at = mosaic.mul(mosaic.add(row, matrix * sizes.num_rows), _COLUMNS)
        at = mosaic.mul(mosaic.add(at, column), WORD_BYTES)
        vector, rest = mosaic.divided(at, warp_bytes)
        of_vector = mosaic.mul(vector, sizes.num_threads * VECTOR_BYTES)
        of_warp = mosaic.mul(warp, warp_bytes)
        start = self.address_of_stage(stage)
        return mosaic.shared_pointer(mosaic.add(start, of_vector, of_warp, rest))

    def store_results(self, stage: Value, first_strip: Value) -> None:
        """Computes a round's results from the warps' sums, and stores them."""
        sizes = self.sizes
        columns = sizes.strips_at_once * _COLUMNS
        row, column_of_round = mosaic.divided(mosaic.thread(), columns)
        column = mosaic.add(mosaic.mul(first_strip, _COLUMNS), column_of_round)
        # The last block may reach past the last column.
        is_inside = mosaic.below(column, sizes.width)
        end = arith.select(is_inside, self.count, mosaic.i32(0))
        with mosaic.loop(row, end, sizes.num_threads // columns) as row:
            strip, column_of_strip = mosaic.divided(column_of_round, _COLUMNS)
            first_warp = mosaic.mul(strip, sizes.splits)
            pointers = [
                [
                    self.pointer_to_sum(stage, mosaic.add(first_warp, i), j, row, column_of_strip)
                    for i in range(sizes.splits)
                ]
                for j in range(sizes.num_matrices)
            ]
            result = self.result(pointers, column)
            out_row = mosaic.add(self.first, row)
            llvm.store(result, pointer_to(self.out, out_row, sizes.width, column, size=2))

    def result(self, pointers: Sequence[Sequence[Value]], column: Value) -> Value:
        """Computes a number of the output from the sums of `splits` warps for each matrix."""
        f32, bfloat16 = mosaic.float_type(), mosaic.element_type(jnp.bfloat16)
        biases = iter(self.biases)
        numbers = []
        for of_matrix, has_bias in zip(pointers, self.sizes.has_bias, strict=True):
            total = functools.reduce(arith.addf, [llvm.load(f32, each) for each in of_matrix])
            number = arith.extf(f32, arith.truncf(bfloat16, total))
            if has_bias:
                number = arith.addf(number, self.load_bias(next(biases), column))
            numbers.append(number)
        gating = self.sizes.gating
        return arith.truncf(bfloat16, numbers[0] if gating is None else gating.emit(*numbers)[0])

    def load_bias(self, memref: Value, column: Value) -> Value:
        """Loads the group's bias of a column, from [L, N], as float32."""
        kind = mosaic.element_of(memref)
        at = pointer_to(memref, self.group, self.sizes.width, column, mosaic.bytes_of(kind))
        bias = llvm.load(kind, at)
        return bias if kind == mosaic.float_type() else arith.extf(mosaic.float_type(), bias)


class _Matrices:
    """A thread's part of one array of matrices."""

    def __init__(self, thread: _Thread, index: int, values: Value, scales: Value) -> None:
        self.thread, self.sizes, self.index = thread, thread.sizes, index
        self.column_bytes = self.sizes.depth // self.sizes.format.numbers_per_value
        self.num_scales = self.sizes.depth // self.sizes.format.block[1]  # of a column or block
        # The addresses of the thread's first vector, and of the first scale, of the group.
        first_column = mosaic.mul(thread.group, self.sizes.width)
        own_column = mosaic.add(first_column, thread.quad)
        first_byte = mosaic.mul(thread.quad_thread, VECTOR_BYTES)
        self.values = _address(values, own_column, self.column_bytes, first_byte, size=1)
        # A scale of float8 belongs to 128 columns. A scale of MXFP4 is a byte.
        columns, num_bytes = (_BLOCK, WORD_BYTES) if self.sizes.is_float8 else (1, 1)
        first_row = arith.divui(first_column, mosaic.i32(columns))
        self.scales = _address(scales, first_row, self.num_scales, mosaic.i32(0), num_bytes)

    def copy(self, strip: Value, chunk: Value, stage: Value) -> None:
        """Starts to copy a chunk of the thread's two columns, and its scales; zeros past K."""
        start = mosaic.add(
            mosaic.mul(strip, _COLUMNS * self.column_bytes), mosaic.mul(chunk, _CHUNK_BYTES)
        )
        num_bytes = mosaic.i32(VECTOR_BYTES)
        if (inside := self.inside(chunk)) is not None:
            zero = mosaic.i32(0)
            start, num_bytes = (arith.select(inside, each, zero) for each in (start, num_bytes))
        source = mosaic.add(self.values, mosaic.widen(start))
        for i in range(2):
            past = i * _APART * self.column_bytes
            mosaic.asm(
                # The L2 cache loads 128 bytes: this chunk, and the one beside it, needed soon.
                f"cp.async.cg.shared.global.L2::128B [$0], [$1+{past}], {VECTOR_BYTES}, $2;",
                "r,l,r,~{memory}",
                *(self.slot(stage, i), source, num_bytes),
            )
        start, exists = self.own_scales(strip, chunk)
        slot = mosaic.add(self.slot_of_scales(stage), mosaic.mul(self.thread.lane, WORD_BYTES))
        with mosaic.when(exists):
            mosaic.asm(
                f"cp.async.ca.shared.global [$0], [$1], {WORD_BYTES};",
                "r,l,~{memory}",
                *(slot, mosaic.add(self.scales, mosaic.widen(start))),
            )

    def inside(self, chunk: Value) -> Value | None:
        """Returns whether the thread's part of a chunk is in K (i1); None if it always is."""
        sizes = self.sizes
        if sizes.chunks * sizes.chunk_numbers == sizes.depth:
            return None
        # In MXFP4, the last chunk may have fewer blocks of 32, one of which belongs to each thread.
        in_chunk = 0 if sizes.is_float8 else sizes.format.block[1]
        number = mosaic.mul(chunk, sizes.chunk_numbers)
        number = mosaic.add(number, mosaic.mul(self.thread.quad_thread, in_chunk))
        return mosaic.below(number, sizes.depth)

    def own_scales(self, strip: Value, chunk: Value) -> tuple[Value, Value]:
        """Returns the first byte of the scales that the thread copies, and if it copies any."""
        if self.sizes.is_float8:
            # One scale for the whole warp; past K, the last one.
            block = arith.divui(strip, mosaic.i32(_BLOCK // _COLUMNS))
            row = arith.divui(chunk, mosaic.i32(_BLOCK // self.sizes.chunk_numbers))
            row = arith.minui(row, mosaic.i32(self.num_scales - 1))
            at = mosaic.add(mosaic.mul(block, self.num_scales), row)
            return mosaic.mul(at, WORD_BYTES), mosaic.equal(self.thread.lane, 0)
        # A chunk of a column has four scales, a byte each, which may be in two words. Two threads
        # copy the two words of each column.
        column, second = mosaic.divided(self.thread.lane, 2)
        word = arith.andi(mosaic.mul(column, self.num_scales), mosaic.i32(-WORD_BYTES))
        start = mosaic.add(
            mosaic.mul(strip, _COLUMNS * self.num_scales),
            mosaic.mul(chunk, _QUAD),
            word,
            mosaic.mul(second, WORD_BYTES),
        )
        # A second word that is not needed may be past the end of the array.
        return start, mosaic.below(start, self.sizes.width * self.num_scales)

    def slot(self, stage: Value, column: int) -> Value:
        """Returns the address of the thread's vector of one of its two columns in a stage."""
        first = (2 * self.index + column) * self.sizes.num_threads * VECTOR_BYTES
        of_thread = mosaic.mul(self.thread.thread, VECTOR_BYTES)
        return mosaic.add(self.thread.address_of_stage(stage), of_thread, first)

    def slot_of_scales(self, stage: Value) -> Value:
        """Returns the address of the warp's words of scales in a stage."""
        vector_bytes = 2 * self.sizes.num_matrices * VECTOR_BYTES
        first = self.sizes.num_threads * (vector_bytes + self.index * WORD_BYTES)
        of_warp = mosaic.mul(self.thread.warp, WARP * WORD_BYTES)
        return mosaic.add(self.thread.address_of_stage(stage), of_warp, first)

    def load(self, stage: Value) -> list[list[Value]]:
        """Loads the words of the chunk that `copy` has copied, of each column."""
        pointers = [mosaic.shared_pointer(self.slot(stage, i)) for i in range(2)]
        return [mosaic.load_numbers(pointer, 4) for pointer in pointers]

    def load_scales(self, stage: Value, chunk: Value) -> list[Value]:
        """Loads the float8 scale of a chunk, or the codes of both columns' scales."""
        start = self.slot_of_scales(stage)
        if self.sizes.is_float8:
            return [llvm.load(mosaic.float_type(), mosaic.shared_pointer(start))]
        # Where a column's codes begin in its first word: the same for both, which are 8 apart.
        quad = self.thread.quad
        rest = arith.andi(mosaic.mul(quad, self.num_scales), mosaic.i32(WORD_BYTES - 1))
        start = mosaic.add(start, mosaic.mul(quad, 2 * WORD_BYTES), rest, self.thread.quad_thread)
        inside, codes = self.inside(chunk), []
        for i in range(2):
            pointer = mosaic.shared_pointer(mosaic.add(start, i * _APART * 2 * WORD_BYTES))
            code = llvm.load(mosaic.integer_type(8), pointer)
            code = arith.extui(mosaic.integer_type(32), code)
            if inside is not None:
                # Past K, the scale of zeros must not be NaN.
                code = arith.select(inside, code, mosaic.i32(_CODE_OF_ONE))
            codes.append(code)
        return codes


def _place(thread: Value) -> tuple[Value, Value, Value, Value]:
    """Returns a thread's warp, its lane, its quad in the warp, and its number in the quad."""
    warp, lane = mosaic.divided(thread, WARP)
    # A thread loads columns `quad` and `quad` + 8 of a strip, and row `quad` of each 8. Its sums
    # are of these columns and of rows 2 * quad_thread and 2 * quad_thread + 1.
    return warp, lane, *mosaic.divided(lane, _QUAD)


def _pairs_of_float4(word: Value) -> list[Value]:
    """Converts 8 float4 numbers to bfloat16, divided by 2^126: numbers i and i + 4 in word i."""
    # Of a number's bits s e e f, s becomes a bfloat16 number's sign, and e e f become the last bits
    # of its exponent and the first of its fraction.
    return [
        arith.ori(
            arith.andi(_shifted(word, 12 - 4 * i), mosaic.i32(0x80008000)),
            arith.andi(_shifted(word, 6 - 4 * i), mosaic.i32(0x01C001C0)),
        )
        for i in range(4)
    ]


def _shifted(word: Value, bits: int) -> Value:
    """Emits a shift to the left, or to the right if `bits` is negative."""
    if bits < 0:
        return arith.shrui(word, mosaic.i32(-bits))
    return arith.shli(word, mosaic.i32(bits)) if bits else word


def _pairs_of_float8(word: Value) -> list[Value]:
    """Converts the four float8_e4m3fn numbers in a word to float16, two in a word."""
    parts = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; "
    converted = [f"cvt.rn.f16x2.{PTX_TYPE}x2 $0, {half}; }}" for half in ("low", "high")]
    word_type = mosaic.integer_type(32)
    return [llvm.inline_asm(word_type, [word], parts + text, "=r,r") for text in converted]


def _as_float16(words: Sequence[Value]) -> tuple[list[Value], Value]:
    """Scales 8 bfloat16 numbers of a chunk, and rounds them to float16; also returns the scale."""
    numbers = BFLOAT16.numbers(words)
    largest = [max_of(float8.magnitude(each)[1] for each in numbers)]
    # 8 adjacent threads have the numbers of a chunk.
    for distance in (1, 2, 4):
        largest = with_shuffled(largest, distance)
    # In float32, the exponent's 8 bits begin at bit 23. The largest number's exponent, less 12, is
    # that of the scale, but at least 1: the scale is not subnormal.
    exponent = arith.maxui(
        arith.andi(largest[0], mosaic.i32(0x7F800000)), mosaic.i32((_LARGEST_EXPONENT + 1) << 23)
    )
    scale = arith.subi(exponent, mosaic.i32(_LARGEST_EXPONENT << 23))
    # The biased exponents of 2^e and 2^-e add up to 254.
    inverse = arith.bitcast(mosaic.float_type(), arith.subi(mosaic.i32(254 << 23), scale))
    scaled = [arith.mulf(number, inverse) for number in numbers]
    pairs = [Packed(jnp.float16).pair(*scaled[i : i + 2]) for i in range(0, len(scaled), 2)]
    return pairs, arith.bitcast(mosaic.float_type(), scale)


def _address(memref: Value, row: Value, width: int, column: Value, size: int) -> Value:
    """Emits the 64-bit address of `pointer_to`, for PTX."""
    pointer = pointer_to(memref, row, width, column, size)
    return llvm.ptrtoint(mosaic.integer_type(64), pointer)
