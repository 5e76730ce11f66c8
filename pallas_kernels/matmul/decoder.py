"""Decodes MXFP4 matrices in a grouped matmul, between shared memory and the tensor cores.

A quantized matrix is stored transposed, [N, K]. The loader warpgroup copies it to the ring's stages
as it is stored: a stage has 32 bytes and two scales of each of `block_n` columns, for 64 of K. The
compute warpgroups decode their columns to bfloat16 in registers, from where the tensor cores can
read an operand:

  memory --> stage of the ring     --> registers of a compute warpgroup --> tensor cores
             64 float4, 2 scales       64 bfloat16
             of each column            of each column

**The numbers of a thread.** Of each column, a thread holds those numbers k with k mod 8 = 2q or
2q + 1, where q = lane mod 4 (PTX ISA, "Register fragments for wgmma.mma_async.m64nNk16"). They are
byte q of each word of 8 float4 numbers.

**A table in shared memory** has the two numbers of each of the 256 bytes, as two bfloat16 in a
word. Each lane of a warp has its own copy of it, so that 32 lanes read words of 32 banks. A compute
warpgroup looks its numbers up while the tensor cores multiply those of the step before. When they
are done, it only has to multiply the numbers by their scales.
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

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.hardware import LANES, WARP, WORD_BYTES
from pallas_kernels.fabric.mosaic import Value, arith, llvm, vector
from pallas_kernels.formats import E8M0, bitcast
from pallas_kernels.matmul.kernel import CHUNK, COMPUTERS, STEP, swizzled
from pallas_kernels.matmul.quantized_tiles import Scaled, bits_of_e8m0, pointer_to
from pallas_kernels.mxfp4 import MXFP4

# In a stage, a column has this many bytes of numbers, and this many scales, each in a word.
NUMBER_BYTES = STEP // MXFP4.numbers_per_value
SCALES = STEP // MXFP4.block[1]
COLUMN_BYTES = NUMBER_BYTES + SCALES * WORD_BYTES
# A tensor core instruction multiplies 64 columns. A warp holds 16 of them, and a thread two: column
# lane / 4 of the 16, and the one 8 after it.
_COLUMNS, _OF_WARP, _APART = 64, 16, 8
# The words of numbers of a column; those of numbers and scales; and those of a thread's columns.
_WORDS = NUMBER_BYTES // WORD_BYTES
_LINE = _WORDS + SCALES
_PER_THREAD = 2 * _LINE
# The table of bytes: a word for each byte and lane.
_BYTES = 256
TABLE_BYTES = _BYTES * WARP * WORD_BYTES
# The hardware's barrier at which the compute warpgroups wait until the table is filled. Mosaic uses
# the first few barriers.
_TABLE_BARRIER = 8
# The shape of the register array of loaded words.
_LOADED = (LANES * _PER_THREAD,)


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["scales", "table", "room"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Staged:
    """Shared memory of a decoder, besides the ring of the matmul.

    Outside the kernel's body, the attributes are types of scratch; inside, references to it.

    Attributes:
      scales: the stages of scales, [stages, matrices * block_n * 2] int32. A scale is a word of two
        equal bfloat16, or its code in Pallas' interpreter.
      table: the table of bytes, [256 * 32] int32; None in Pallas' interpreter.
      room: None on a GPU. In Pallas' interpreter, whose tensor cores do not read registers, decoded
        columns are stored there: [2, parts, 64, 64] bfloat16, for each compute warpgroup and part.
    """

    scales: Any
    table: Any
    room: Any

    @classmethod
    def types(cls, num_stages: int, columns: int, parts: int, interpreted: bool) -> Staged:
        """Returns the types of the scratch.

        Args:
          num_stages: the number of stages of the ring.
          columns: the number of columns of a tile, times the number of matrices.
          parts: the number of parts of 64 columns that a compute warpgroup decodes in a step.
          interpreted: whether Pallas' GPU interpreter runs the kernel.
        """
        scales = plgpu.SMEM((num_stages, columns * SCALES), jnp.int32)
        if not interpreted:
            return cls(scales, plgpu.SMEM((_BYTES * WARP,), jnp.int32), None)
        shape = COMPUTERS, parts, _COLUMNS, STEP
        return cls(scales, None, plgpu.SMEM(shape, jnp.bfloat16, transforms=swizzled(jnp.bfloat16)))


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Stages scales, and decodes staged matrices.

    Attributes:
      matrices: references to one or two arrays of matrices: values [L, N, K / 2] uint8 and scales
        [L, N, K / 32] uint8.
      values: reference to the ring's stages of values, [stages, (matrices,) block_n, 32] uint8.
      staged: the stages of scales.
      block_n: the number of columns of a tile.
    """

    matrices: Sequence[Scaled]
    values: Any
    staged: Staged
    block_n: int

    @property
    def scales(self) -> Any:
        return self.staged.scales

    @property
    def interpreted(self) -> bool:
        return self.staged.room is not None

    # ------------------------------------------------------------------- the loader warpgroup

    @property
    def _per_loader(self) -> int:
        """The number of scales that a thread of the loader warpgroup stages in a step."""
        return self.scales.shape[1] // LANES

    def load_scales(self, group: jax.Array, left_edge: jax.Array, step: jax.Array) -> jax.Array:
        """Starts to load the scales of one step of a group's columns, from `left_edge` on.

        Returns the codes of the scales, [matrices * block_n * 2] int32 in registers.
        """
        if self.interpreted:
            return self._interpreted_scales(group, left_edge, step)
        _, width, of_column = self.matrices[0].scales.shape
        shape = self.scales.shape[1:]

        def emit(*values: Any) -> Any:
            *memrefs, group, left_edge, step = values
            group, left_edge, step = (mosaic.scalar(each) for each in (group, left_edge, step))
            own = arith.addi(left_edge, arith.shrui(mosaic.lane(), mosaic.i32(1)))
            place = arith.addi(
                arith.muli(step, mosaic.i32(SCALES)), arith.andi(mosaic.lane(), mosaic.i32(1))
            )
            codes = []
            for i in range(self._per_loader):
                matrix, first = divmod(i * LANES // SCALES, self.block_n)
                # The last tile may reach past the last column.
                column = arith.minui(arith.addi(own, mosaic.i32(first)), mosaic.i32(width - 1))
                row = arith.addi(arith.muli(group, mosaic.i32(width)), column)
                codes.append(_load_byte(pointer_to(memrefs[matrix], row, of_column, place, 1)))
            of_all = mosaic.vector_type(len(codes), mosaic.integer_type(32))
            all_codes = vector.from_elements(of_all, codes)
            return mosaic.array_of([all_codes], shape, self._per_loader, is_signed=True)

        operands = [*(each.scales for each in self.matrices), group, left_edge, step]
        layouts = [mosaic.REFERENCE] * len(self.matrices) + [mosaic.SCALAR] * 3
        result = mosaic.in_registers(shape, jnp.int32, self._per_loader)
        return mosaic.inline(emit, operands, layouts, result)

    def stage_scales(self, stage: jax.Array, codes: jax.Array) -> None:
        """Stores the result of `load_scales` in a stage; waits until all threads have done so."""
        if self.interpreted:
            self.scales[stage] = codes
            plgpu.commit_smem()
            return
        line = self.scales.shape[1]

        def emit(scales: Value, codes: Any, stage: Any) -> None:
            word = mosaic.integer_type(32)
            own = arith.addi(arith.muli(mosaic.scalar(stage), mosaic.i32(line)), mosaic.lane())
            (codes,) = mosaic.registers(codes)
            for i in range(self._per_loader):
                at = arith.addi(own, mosaic.i32(i * LANES))
                scale = _scale_of(vector.extract(codes, [], [i]))
                llvm.store(scale, mosaic.element_pointer(mosaic.pointer(scales), at, word))
            mosaic.barrier()

        layouts = [mosaic.REFERENCE, mosaic.strided(codes.shape, self._per_loader), mosaic.SCALAR]
        mosaic.inline(emit, [self.scales, codes, stage], layouts)

    def _interpreted_scales(
        self, group: jax.Array, left_edge: jax.Array, step: jax.Array
    ) -> jax.Array:
        own = pl.ds(step * SCALES, SCALES)
        parts = []
        for _, scales in self.matrices:
            for first in range(0, self.block_n, CHUNK):
                begin = jnp.minimum(left_edge + first, scales.shape[1] - CHUNK)
                parts.append(scales[group, pl.ds(begin, CHUNK), own])
        return jnp.concatenate(parts).reshape(-1).astype(jnp.int32)

    # ----------------------------------------------------------------- the compute warpgroups

    def fill_table(self, computer: jax.Array) -> None:
        """Fills half of the table, and waits until the other compute warpgroup has filled the rest.

        `computer` is the index of this warpgroup, 0 or 1.
        """
        if self.interpreted:
            return
        num_warps = LANES // WARP
        of_warp = _BYTES // (COMPUTERS * num_warps)

        def fill(i: jax.Array, _: None) -> None:
            def emit(table: Value, first: Any) -> None:
                warp = arith.divui(mosaic.lane(), mosaic.i32(WARP))
                byte = arith.addi(mosaic.scalar(first), arith.muli(warp, mosaic.i32(of_warp)))
                word = mosaic.integer_type(32)
                place = mosaic.element_pointer(mosaic.pointer(table), _entry(byte), word)
                llvm.store(_bfloat16_of_byte(byte), place)

            first = computer * (num_warps * of_warp) + i
            mosaic.inline(emit, [self.staged.table, first], [mosaic.REFERENCE, mosaic.SCALAR])

        lax.fori_loop(0, of_warp, fill, None)
        threads = COMPUTERS * LANES
        mosaic.inline(
            lambda: mosaic.asm(f"bar.sync {_TABLE_BARRIER}, {threads};", "~{memory}"), [], []
        )

    def load(self, stage: jax.Array, matrix: Any, first: Any) -> jax.Array:
        """Looks up 64 columns of a matrix in a stage, from column `first` of the tile on.

        `matrix` is the index of the matrix. Returns an array in registers for `decode`: numbers
        without their scales, and scales.
        """
        line = jnp.int32(matrix * self.block_n + first)
        if self.interpreted:
            return self._interpreted_decode(stage, line)

        def emit(values: Value, scales: Value, table: Value, stage: Any, line: Any) -> Any:
            own = arith.addi(_own_line(), mosaic.scalar(line))
            lines = self.scales.shape[1] // SCALES
            own = arith.addi(own, arith.muli(mosaic.scalar(stage), mosaic.i32(lines)))
            word = mosaic.integer_type(32)
            of_values, of_scales = (
                mosaic.element_pointer(
                    mosaic.pointer(ref), arith.muli(own, mosaic.i32(words)), word
                )
                for ref, words in ((values, _WORDS), (scales, SCALES))
            )
            # Of a word, byte q, and zeros in place of the other bytes.
            quad = arith.andi(mosaic.lane(), mosaic.i32(3))
            selector = arith.ori(quad, mosaic.i32(0x4440))
            words = []
            for half in range(2):
                for i in range(0, _WORDS, 4):
                    for four in _load_words(of_values, half * _APART * _WORDS + i, 4):
                        byte = _chosen(four, mosaic.i32(0), selector)
                        place = mosaic.element_pointer(mosaic.pointer(table), _entry(byte), word)
                        words.append(llvm.load(word, place))
                words += _load_words(of_scales, half * _APART * SCALES, SCALES)
            of_all = mosaic.vector_type(len(words), word)
            words = vector.from_elements(of_all, words)
            return mosaic.array_of([words], _LOADED, _PER_THREAD, is_signed=True)

        operands = [self.values, self.scales, self.staged.table, stage, line]
        layouts = [mosaic.REFERENCE] * 3 + [mosaic.SCALAR] * 2
        result = mosaic.in_registers(_LOADED, jnp.int32, _PER_THREAD)
        return mosaic.inline(emit, operands, layouts, result)

    def decode(self, loaded: jax.Array, computer: jax.Array, part: int) -> Any:
        """Decodes the result of `load`, for the part `part` of the warpgroup `computer`.

        Returns [64, 64] bfloat16 in registers, in the layout in which the tensor cores read an
        operand.
        """
        if self.interpreted:
            stored = self.staged.room.at[computer, part]
            stored[...] = loaded
            plgpu.commit_smem()
            return stored

        def emit(loaded: Any) -> Any:
            (words,) = mosaic.registers(loaded)
            words = [vector.extract(words, [], [i]) for i in range(_PER_THREAD)]
            # The caller has waited until the tensor cores no longer read the result's registers.
            words = mosaic.opaque(words)
            first, second = (
                _scaled(words[i : i + _WORDS], words[i + _WORDS : i + _LINE]) for i in (0, _LINE)
            )
            return _operand([pair for both in zip(first, second, strict=True) for pair in both])

        shape = _COLUMNS, STEP
        result = plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=plgpu.Layout.WGMMA)
        return mosaic.inline(emit, [loaded], [mosaic.strided(_LOADED, _PER_THREAD)], result)

    def _interpreted_decode(self, stage: jax.Array, line: jax.Array) -> jax.Array:
        values = self.values[stage].reshape(-1, NUMBER_BYTES)
        scales = bitcast(self.scales[stage].astype(jnp.uint8), E8M0).reshape(-1, SCALES)
        own = (lax.dynamic_slice_in_dim(part, line, _COLUMNS) for part in (values, scales))
        return MXFP4.decode(tuple(own), jnp.bfloat16)


def _own_line() -> Value:
    """Emits the number of a thread's first column, among 64."""
    warp = arith.divui(mosaic.lane(), mosaic.i32(WARP))
    of_warp = arith.shrui(arith.andi(mosaic.lane(), mosaic.i32(WARP - 1)), mosaic.i32(2))
    return arith.addi(arith.muli(warp, mosaic.i32(_OF_WARP)), of_warp)


def _load_byte(pointer: Value) -> Value:
    """Loads a byte of memory that no kernel changes meanwhile, as i32."""
    address = llvm.ptrtoint(mosaic.integer_type(64), pointer)
    word = mosaic.integer_type(32)
    return mosaic.asm("ld.global.nc.u8 $0, [$1];", "=r,l", address, returns=word)


def _load_words(pointer: Value, first: int, count: int) -> list[Value]:
    """Loads `count` words from shared memory, from word `first` after `pointer` on."""
    word = mosaic.integer_type(32)
    start = mosaic.element_pointer(pointer, mosaic.i32(first), word)
    loaded = llvm.load(mosaic.vector_type(count, word), start, alignment=4 * count)
    return [vector.extract(loaded, [], [j]) for j in range(count)]


def _scaled(pairs: Sequence[Value], scales: Sequence[Value]) -> list[Value]:
    """Multiplies a thread's 16 numbers of a column, 8 pairs of bfloat16, by the two scales."""
    of_scale = len(pairs) // len(scales)
    return [_multiplied(pair, scales[i // of_scale]) for i, pair in enumerate(pairs)]


def _operand(pairs: Sequence[Value]) -> Any:
    """Returns the array [64, 64] of which a thread holds `pairs` of bfloat16 in words."""
    kind = mosaic.element_type(jnp.bfloat16)
    one = mosaic.vector_type(1, mosaic.integer_type(32))
    of_two = mosaic.vector_type(2, kind)
    registers = [vector.bitcast(of_two, vector.from_elements(one, [pair])) for pair in pairs]
    return mosaic.tensor_core_array(registers, (_COLUMNS, STEP), kind)


def _scale_of(code: Value) -> Value:
    """Returns the scale with a code as a word of two equal bfloat16."""
    return arith.muli(bits_of_e8m0(code, fraction_bits=7), mosaic.i32(0x10001))


def _entry(byte: Value) -> Value:
    """Returns the place of the table's word for a byte and this lane."""
    of_lane = arith.andi(mosaic.lane(), mosaic.i32(WARP - 1))
    return arith.addi(arith.muli(byte, mosaic.i32(WARP)), of_lane)


# The low and the high bytes of the float4 numbers 0, 0.5, 1, 1.5, 2, 3, 4 and 6 in bfloat16.
_LOW = 0xC0800000, 0xC0804000
_HIGH = 0x3F3F3F00, 0x40404040


def _bfloat16_of_byte(byte: Value) -> Value:
    """Converts the two float4 numbers of a byte to two bfloat16 in a word."""
    low, high = (
        _chosen(mosaic.i32(first), mosaic.i32(last), arith.andi(byte, mosaic.i32(0x77)))
        for first, last in (_LOW, _HIGH)
    )
    # Bytes 0 and 1 of `low` and `high` belong to the first and the second number.
    sizes = _chosen(low, high, mosaic.i32(0x5140))
    signs = arith.ori(arith.shli(byte, mosaic.i32(12)), arith.shli(byte, mosaic.i32(24)))
    return arith.ori(sizes, arith.andi(signs, mosaic.i32(0x80008000)))


def _chosen(low: Value, high: Value, selector: Value) -> Value:
    """Returns four of the 8 bytes of two words; the last four digits of `selector` say which."""
    word = mosaic.integer_type(32)
    return llvm.inline_asm(word, [low, high, selector], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r")


def _multiplied(pair: Value, scale: Value) -> Value:
    """Multiplies two pairs of bfloat16, each in a word."""
    word = mosaic.integer_type(32)
    return llvm.inline_asm(word, [pair, scale], "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r")
