"""Decodes MXFP4 matrices in a grouped matmul, between shared memory and the tensor cores.

A quantized matrix is stored transposed, [N, K], and copied to the ring's stages as it is. A stage
consists of *pieces* of 64 of K, with 32 bytes and two scales of each of `block_n` columns. The
compute warpgroups decode their columns piece by piece to registers, as a tensor core operand.

**The numbers of a thread.** Of each column, a thread holds those numbers k with k mod 8 = 2q or 2q
+ 1, where q = lane mod 4 (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16"). They are
byte q of each word of 8 float4 numbers.

**A table in shared memory** has the two numbers of each of the 256 bytes, as two bfloat16 in a
word. Each lane of a warp has its own copy of it, so that 32 lanes read words of 32 banks. A compute
warpgroup looks its numbers up while the tensor cores multiply those of the piece before. When they
are done, it only has to multiply the numbers by their scales.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.hardware import VECTOR_BYTES, WARP, WARPGROUP, WORD_BYTES
from pallas_kernels.fabric.mosaic import Value, arith, llvm, vector
from pallas_kernels.formats import MXFP4, Scaled
from pallas_kernels.matmul.kernel import COMPUTERS, STEP
from pallas_kernels.matmul.quantized_tiles import bits_of_e8m0, past, pointer_to

# In a piece, 64 of K, a column has this many bytes of numbers, and two scales, which share a word.
NUMBER_BYTES = STEP // MXFP4.numbers_per_value
SCALES = STEP // MXFP4.block[1]
COLUMN_BYTES = NUMBER_BYTES + WORD_BYTES
# A step has fixed costs, so stages are as long along K as they may be.
STEPS = 256, 192, 128, STEP
# A tensor core instruction multiplies 64 columns. A thread holds two of them, 8 apart.
_COLUMNS, _APART = 64, 8
# A thread loads four words of a column's numbers at once: a vector.
_VECTOR = VECTOR_BYTES // WORD_BYTES
# In a piece, the words of numbers of a column; with the word of its scales; of a thread's columns.
_WORDS = NUMBER_BYTES // WORD_BYTES
_WITH_SCALES = _WORDS + 1
_PER_THREAD = 2 * _WITH_SCALES
# The selector by which `mosaic.chosen_bytes(word, 0, selector)` takes byte 0 of a word, and zeros
# in place of the others: the digits 4. The last digit is the byte's index.
_BYTE_0 = 0x4440
# The table of bytes: a word for each byte and lane.
_BYTES = 256
TABLE_BYTES = _BYTES * WARP * WORD_BYTES
# The hardware's barrier for the table; Mosaic uses the first few barriers.
_TABLE_BARRIER = 8
# The shape of the register array of loaded words.
_LOADED = (WARPGROUP * _PER_THREAD,)


class Staged(NamedTuple):
    """Shared memory of a decoder, besides the ring: types of scratch, or references to it."""

    # [stages, pieces * matrices * block_n] int32: a column's two scales in a piece, as bfloat16.
    scales: Any
    # The table of bytes, [256 * 32] int32.
    table: Any

    @classmethod
    def types(cls, num_stages: int, pieces: int, columns: int) -> Staged:
        """Returns types of scratch for `columns` columns of all matrices of a tile."""
        scales = plgpu.SMEM((num_stages, pieces * columns), jnp.int32)
        return cls(scales, plgpu.SMEM((_BYTES * WARP,), jnp.int32))


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Stages scales, and decodes staged matrices."""

    # One or two arrays: values [L, N, K / 2] uint8 and scales [L, N, K / 32] uint8.
    matrices: Sequence[Scaled]
    values: Any  # the ring's stages, [stages, (matrices,) block_n, pieces * 32] uint8
    staged: Staged
    block_n: int  # columns of a tile: a multiple of 128, or with two matrices also 64

    @property
    def scales(self) -> Any:
        return self.staged.scales

    @property
    def pieces(self) -> int:
        return self.values.shape[-1] // NUMBER_BYTES

    @property
    def stage_columns(self) -> int:
        """The number of columns in a stage: `block_n` of each matrix, matrix by matrix."""
        return self.scales.shape[1] // self.pieces

    # ------------------------------------------------------------------- the loader warpgroup

    @property
    def _columns_of_thread(self) -> int:
        """The number of columns whose scales a thread of the loader warpgroup stages."""
        return self.stage_columns // WARPGROUP

    @property
    def _loaded_bytes(self) -> int:
        """The number of scales' codes, each a byte, that a thread loads at once: 2, 4 or 8."""
        return math.gcd(SCALES * self.pieces, self.matrices[0].scales.shape[2], 8)

    @property
    def _words_of_column(self) -> int:
        """The number of words into which a thread loads the codes of a column."""
        return SCALES * self.pieces // min(self._loaded_bytes, WORD_BYTES)

    def load_scales(self, group: jax.Array, left_edge: jax.Array, step: jax.Array) -> jax.Array:
        """Starts to load a step's scales of a group's columns; returns words for `stage_scales`."""
        # N, the number of columns of a matrix, and K / 32, the number of scales of a column.
        _, width, scales_of_column = self.matrices[0].scales.shape
        num_bytes = self._loaded_bytes
        count = self._columns_of_thread * self._words_of_column  # words of a thread
        shape = (count * WARPGROUP,)

        def emit(*values: Any) -> Any:
            *memrefs, group, left_edge, step = values
            group, left_edge, step = (mosaic.scalar(each) for each in (group, left_edge, step))
            # The index of the step's first code among a column's.
            first_code = mosaic.mul(step, SCALES * self.pieces)
            # Tiles of 64 columns are of two matrices: half of the threads load the second's scales.
            is_second = mosaic.below(mosaic.i32(self.block_n - 1), mosaic.warpgroup_thread())
            words = []
            for i in range(self._columns_of_thread):
                # Thread t loads scales of the stage's columns t, 128 + t and so on.
                matrix, first = divmod(i * WARPGROUP, self.block_n)
                columns_at_once = min(self.block_n, WARPGROUP)
                number = arith.andi(mosaic.warpgroup_thread(), mosaic.i32(columns_at_once - 1))
                column = mosaic.add(left_edge, mosaic.add(number, first))
                # The last tile may reach past the last column.
                column = arith.minui(column, mosaic.i32(width - 1))
                row = mosaic.add(mosaic.mul(group, width), column)
                pointer = pointer_to(memrefs[matrix], row, scales_of_column, first_code, size=1)
                if self.block_n < WARPGROUP:
                    second_pointer = pointer_to(
                        memrefs[matrix + 1], row, scales_of_column, first_code, size=1
                    )
                    pointer = arith.select(is_second, second_pointer, pointer)
                for offset in range(0, SCALES * self.pieces, num_bytes):
                    words += _load_codes(past(pointer, offset), num_bytes)
            vector_type = mosaic.vector_type(len(words), mosaic.integer_type(32))
            all_words = vector.from_elements(vector_type, words)
            return mosaic.array_of([all_words], shape, count, is_signed=True)

        operands = [*(each.scales for each in self.matrices), group, left_edge, step]
        return mosaic.inline(emit, operands, mosaic.in_registers(shape, jnp.int32, count))

    def stage_scales(self, stage: jax.Array, codes: jax.Array) -> None:
        """Stores the result of `load_scales` in a stage; waits for all threads of the warpgroup."""
        count = self._columns_of_thread * self._words_of_column  # words of a thread
        words_of_stage = self.scales.shape[1]
        # A loaded word has this many pairs of codes: each piece's pair is one word in the stage.
        pairs_of_word = self.pieces // self._words_of_column

        def emit(scales: Value, codes: Any, stage: Any) -> None:
            word = mosaic.integer_type(32)
            start_of_stage = mosaic.mul(mosaic.scalar(stage), words_of_stage)
            first = mosaic.add(start_of_stage, mosaic.warpgroup_thread())
            (words,) = mosaic.registers(codes)
            for i in range(self._columns_of_thread):
                for piece in range(self.pieces):
                    word_index, pair = divmod(piece, pairs_of_word)
                    two_codes = vector.extract(words, [], [i * self._words_of_column + word_index])
                    two_codes = arith.shrui(two_codes, mosaic.i32(16 * pair))
                    at = mosaic.add(first, piece * self.stage_columns + i * WARPGROUP)
                    place = mosaic.pointer_at(scales, at, word)
                    llvm.store(_scales_of(two_codes), place)
            mosaic.barrier()

        mosaic.inline(emit, [self.scales, (codes, mosaic.strided(codes.shape, count)), stage])

    # ----------------------------------------------------------------- the compute warpgroups

    def fill_table(self, computer: jax.Array) -> None:
        """Fills half of the table, and waits until the other warpgroup has filled the rest."""
        # Each warp fills the entries of `warp_bytes` bytes, and each lane its own copy of them.
        num_warps = WARPGROUP // WARP
        warp_bytes = _BYTES // (COMPUTERS * num_warps)

        def fill(i: jax.Array, _: None) -> None:
            def emit(table: Value, first: Any) -> None:
                warp = arith.divui(mosaic.warpgroup_thread(), mosaic.i32(WARP))
                byte = mosaic.add(mosaic.scalar(first), mosaic.mul(warp, warp_bytes))
                word = mosaic.integer_type(32)
                place = mosaic.pointer_at(table, _entry(byte), word)
                llvm.store(_bfloat16_of_byte(byte), place)

            first = computer * (num_warps * warp_bytes) + i
            mosaic.inline(emit, [self.staged.table, first])

        lax.fori_loop(0, warp_bytes, fill, None)
        threads = COMPUTERS * WARPGROUP
        mosaic.inline(lambda: mosaic.asm(f"bar.sync {_TABLE_BARRIER}, {threads};", "~{memory}"), [])

    def load(self, stage: jax.Array, piece: int, matrix: Any, first: Any) -> jax.Array:
        """Looks up a piece of 64 columns of a matrix, from column `first` on, for `decode`."""
        # The result has, for each of a thread's two columns, words of numbers and one of scales.
        first_of_part = jnp.int32(matrix * self.block_n + first)
        pieces, stage_columns = self.pieces, self.stage_columns

        def emit(values: Value, scales: Value, table: Value, stage: Any, first_of_part: Any) -> Any:
            # The thread's first column, counted in the stage.
            column = mosaic.add(mosaic.tensor_core_row(), mosaic.scalar(first_of_part))
            word = mosaic.integer_type(32)
            stage = mosaic.scalar(stage)
            column_of_values = mosaic.add(column, mosaic.mul(stage, stage_columns))
            at = mosaic.mul(column_of_values, _WORDS * pieces)
            values_start = mosaic.pointer_at(values, at, word)
            piece_of_ring = mosaic.add(mosaic.mul(stage, pieces), piece)
            column_of_scales = mosaic.add(column, mosaic.mul(piece_of_ring, stage_columns))
            scales_start = mosaic.pointer_at(scales, column_of_scales, word)
            q = arith.andi(mosaic.warpgroup_thread(), mosaic.i32(3))
            selector = arith.ori(q, mosaic.i32(_BYTE_0))
            table_of_lane = _own_table(table)
            lane = arith.andi(mosaic.warpgroup_thread(), mosaic.i32(WARP - 1))
            column_modulo_8 = arith.shrui(lane, mosaic.i32(2))
            words = []
            for half in range(2):
                # The thread's second column is `_APART` columns after the first.
                words_before = mosaic.i32(half * _APART * _WORDS * pieces)
                for i in range(0, _WORDS, _VECTOR):
                    index = (piece * _WORDS + i) // _VECTOR
                    vector_place = _place_of_vector(index, column_modulo_8, pieces)
                    place = mosaic.add(words_before, mosaic.mul(vector_place, _VECTOR))
                    start = mosaic.element_pointer(values_start, place, word)
                    for eight_numbers in mosaic.load_numbers(start, _VECTOR):
                        words.append(_look_up(table_of_lane, eight_numbers, selector))
                start = mosaic.element_pointer(scales_start, mosaic.i32(half * _APART), word)
                words += mosaic.load_numbers(start, 1)
            all_words = vector.from_elements(mosaic.vector_type(len(words), word), words)
            return mosaic.array_of([all_words], _LOADED, _PER_THREAD, is_signed=True)

        values = self.values, plgpu.RefType(transforms_of_numbers(pieces))
        operands = [values, self.scales, self.staged.table, stage, first_of_part]
        return mosaic.inline(emit, operands, mosaic.in_registers(_LOADED, jnp.int32, _PER_THREAD))

    def decode(self, loaded: jax.Array) -> Any:
        """Decodes the result of `load`: returns [64, 64] bfloat16 in the layout WGMMA."""

        def emit(loaded: Any) -> Any:
            (all_words,) = mosaic.registers(loaded)
            words = [vector.extract(all_words, [], [i]) for i in range(_PER_THREAD)]
            # The caller has waited until the tensor cores no longer read the result's registers.
            # The compiler must not move code that overwrites them before this wait.
            words = mosaic.opaque(words)
            first, second = (
                _scaled(words[start : start + _WORDS], words[start + _WORDS])
                for start in (0, _WITH_SCALES)
            )
            # Pairs of both columns alternate. A word becomes a vector of two bfloat16.
            pairs = [pair for both in zip(first, second, strict=True) for pair in both]
            kind = mosaic.element_type(jnp.bfloat16)
            two_numbers = mosaic.vector_type(2, kind)
            one_word = mosaic.vector_type(1, mosaic.integer_type(32))
            vectors = [vector.from_elements(one_word, [pair]) for pair in pairs]
            registers = [vector.bitcast(two_numbers, each) for each in vectors]
            return mosaic.tensor_core_array(registers, shape, kind)

        shape = _COLUMNS, STEP
        result = plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA)
        return mosaic.inline(emit, [(loaded, mosaic.strided(_LOADED, _PER_THREAD))], result)


def transforms_of_numbers(pieces: int) -> tuple[Any, ...]:
    """Returns the Mosaic transforms of the values in the ring's stages."""
    # Swizzled, so that a warp's threads load from different banks; not for one or three pieces.
    if pieces not in (2, 4):
        return ()
    column_bytes = pieces * NUMBER_BYTES
    return plgpu.TilingTransform((8, column_bytes)), plgpu.SwizzleTransform(column_bytes)


def _place_of_vector(index: int, column: Value, pieces: int) -> Value:
    """Emits where a column, given modulo 8, has its vector of 16 bytes number `index`."""
    place = mosaic.i32(index)
    if not transforms_of_numbers(pieces):
        return place
    # A swizzle of 128 bytes permutes a column's vectors by the column. Of 64 bytes, as columns of
    # two pieces have, it is the same for each two columns.
    return arith.xori(place, column if pieces == 4 else arith.shrui(column, mosaic.i32(1)))


def _own_table(table: Value) -> Value:
    """Emits the address of the first word of this lane's copy of the table."""
    bytes_before = mosaic.mul(_entry(mosaic.i32(0)), WORD_BYTES)
    return mosaic.add(mosaic.address(table, 32), bytes_before)


def _look_up(table: Value, word: Value, selector: Value) -> Value:
    """Looks up the two numbers of byte `selector` - _BYTE_0 of `word`: two bfloat16 in a word."""
    byte = mosaic.chosen_bytes(word, mosaic.i32(0), selector)
    place = mosaic.add(table, mosaic.mul(byte, WARP * WORD_BYTES))
    return llvm.load(mosaic.integer_type(32), mosaic.shared_pointer(place))


def _load_codes(pointer: Value, num_bytes: int) -> list[Value]:
    """Loads 2, 4 or 8 bytes of memory that no kernel changes meanwhile, into words."""
    address = llvm.ptrtoint(mosaic.integer_type(64), pointer)
    word = mosaic.integer_type(32)
    if num_bytes < WORD_BYTES:
        half = mosaic.integer_type(16)
        loaded = mosaic.asm("ld.global.nc.u16 $0, [$1];", "=h,l", address, returns=half)
        return [arith.extui(word, loaded)]
    if num_bytes == WORD_BYTES:
        return [mosaic.asm("ld.global.nc.b32 $0, [$1];", "=r,l", address, returns=word)]
    words = mosaic.struct_type([word] * 2)
    loaded = mosaic.asm("ld.global.nc.v2.b32 {$0, $1}, [$2];", "=r,=r,l", address, returns=words)
    return [llvm.extractvalue(word, loaded, [i]) for i in range(2)]


def _scales_of(codes: Value) -> Value:
    """Converts the two codes in the low half of a word to bfloat16 scales, two in a word."""
    low, high = (
        bits_of_e8m0(
            arith.andi(arith.shrui(codes, mosaic.i32(first)), mosaic.i32(0xFF)), fraction_bits=7
        )
        for first in (0, 8)
    )
    return arith.ori(low, arith.shli(high, mosaic.i32(16)))


def _scaled(pairs: Sequence[Value], scales: Value) -> list[Value]:
    """Multiplies a thread's 16 numbers of a column, 8 pairs of bfloat16, by its two scales."""
    # Each scale, twice in a word.
    low, high = (
        mosaic.chosen_bytes(scales, mosaic.i32(0), mosaic.i32(each)) for each in (0x1010, 0x3232)
    )
    half = len(pairs) // 2
    return [multiplied(pair, low if i < half else high) for i, pair in enumerate(pairs)]


def _entry(byte: Value) -> Value:
    """Emits the index in the table of a byte's entry in this lane's copy."""
    lane = arith.andi(mosaic.warpgroup_thread(), mosaic.i32(WARP - 1))
    return mosaic.add(mosaic.mul(byte, WARP), lane)


# The low and the high bytes of the float4 numbers 0, 0.5, 1, 1.5, 2, 3, 4 and 6 in bfloat16.
_LOW = 0xC0800000, 0xC0804000
_HIGH = 0x3F3F3F00, 0x40404040


def _bfloat16_of_byte(byte: Value) -> Value:
    """Converts the two float4 numbers in a byte to bfloat16, two in a word."""
    # The three bits of a number without its sign select a byte of `_LOW` and one of `_HIGH`.
    low, high = (
        mosaic.chosen_bytes(mosaic.i32(first), mosaic.i32(last), arith.andi(byte, mosaic.i32(0x77)))
        for first, last in (_LOW, _HIGH)
    )
    # Bytes 0 and 1 of `low` and `high` belong to the first and the second number.
    sizes = mosaic.chosen_bytes(low, high, mosaic.i32(0x5140))
    # The signs, bits 3 and 7, become bits 15 and 31.
    signs = arith.ori(arith.shli(byte, mosaic.i32(12)), arith.shli(byte, mosaic.i32(24)))
    return arith.ori(sizes, arith.andi(signs, mosaic.i32(0x80008000)))


def multiplied(pair: Value, scale: Value) -> Value:
    """Multiplies two pairs of bfloat16 numbers, each in a word."""
    word = mosaic.integer_type(32)
    return llvm.inline_asm(word, [pair, scale], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r")
