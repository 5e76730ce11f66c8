"""Shared code of the kernels that quantize tiles of 128 rows by 128 columns to float8."""

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
from pallas_kernels.fabric.fabric import update_in_place
from pallas_kernels.fabric.hardware import WARP, WARPGROUP
from pallas_kernels.fabric.mosaic import Value, arith, llvm
from pallas_kernels.formats import FLOAT8_ROWS
from pallas_kernels.matmul.kernel import quotient_and_rest
from pallas_kernels.matmul.row_blocks import BLOCK

PTX_TYPE = float8.PTX_TYPES[jnp.dtype(jnp.float8_e4m3fn)]
# Float8 values in a word.
PER_WORD = 4
# The most words that one instruction loads.
_MOST_WORDS = 4
_PACKED_TYPES = {"bfloat16": "bf16x2", "float16": "f16x2", "float32": "f32"}


def on_tiles(
    name: str,
    operands: Sequence[jax.Array],
    blocks: jax.Array | None,
    out_type: Sequence[jax.ShapeDtypeStruct],
    emit: Callable[..., None],
    *,
    width: int,
    num_warps: int,
    num_shared: int = 0,
    into: Sequence[jax.Array] = (),
) -> list[jax.Array]:
    """Runs a kernel with a thread block for each tile of 128 rows by 128 columns.

    Args:
      blocks: [number of blocks, 2] int32, each block's first row and number of rows, at most 128;
        None: the rows of the first operand, 128 in each block. A block without rows is left out.
      emit: `emit(memrefs, tile)` emits the code of one thread. `memrefs` are the operands, the
        arrays `into`, the results and, if `num_shared` is not 0, shared memory.
      width: number of columns, a multiple of 128.
      num_shared: how many 32-bit numbers the shared memory has.
      into: arrays that the kernel updates in place, copied first if still used elsewhere.

    Returns:
      The updated arrays `into`, and then the results of the types `out_type`.
    """
    tiles = width // BLOCK

    def emit_tile(*values: Any) -> None:
        # The last four are the fields of `Tile`.
        emit(values[:-4], Tile(*map(mosaic.scalar, values[-4:])))

    def kernel(*refs: Any, **scratch: Any) -> None:
        block, column = quotient_and_rest(lax.axis_index("block"), jnp.int32(tiles))
        memrefs = [*refs, *scratch.values()]
        if blocks is None:
            first, count = block * BLOCK, jnp.int32(BLOCK)
            mosaic.inline(emit_tile, [*memrefs, block, column, first, count])
        else:
            # The reference of `blocks` follows those of the operands. `emit` takes only the others.
            block_rows = memrefs.pop(len(operands))
            first, count = block_rows[block, 0], block_rows[block, 1]

            # The condition on `first` always holds. It makes the kernel load `first` together with
            # `count`, not after the branch.
            @pl.when((count > 0) & (first >= 0))
            def _() -> None:
                mosaic.inline(emit_tile, [*memrefs, block, column, first, count])

    num_row_blocks = operands[0].shape[0] // BLOCK if blocks is None else blocks.shape[0]
    shared = dict(shared=plgpu.SMEM((num_shared,), jnp.float32)) if num_shared else {}
    call = compiler.kernel(
        kernel,
        out_type=list(out_type),
        scratch_types=shared,
        num_blocks=num_row_blocks * tiles,
        num_warpgroups=num_warps * WARP // WARPGROUP,
        auto_barriers=False,  # the emitted code has its own
        kernel_name=name,
    )
    inputs = [*operands] if blocks is None else [*operands, blocks]
    updated, results = update_in_place(into, lambda refs: call(*inputs, *refs))
    return [*updated, *results]


@dataclasses.dataclass(frozen=True)
class Tile:
    """The tile of 128 rows by 128 columns that a thread block handles; all numbers are i32."""

    block: Value  # the index of the tile's block of rows
    column: Value  # its columns begin at 128 * column
    # The block's first row in the operands, and its number of rows.
    first: Value
    count: Value

    def find(self, row: Value) -> tuple[Value, Value]:
        """Returns whether the block has row `row` of the tile (i1), and which row to read."""
        # The operands may end where the block ends, so past its end, its first row is to be read.
        exists = mosaic.below(row, self.count)
        return exists, mosaic.add(self.first, arith.select(exists, row, mosaic.i32(0)))


def pointer_to(ref: Any, row: Value, width: int, column: Value, size: int) -> Value:
    """Emits a pointer to element (row, column), of `size` bytes, of an array [rows, width]."""
    wide = mosaic.integer_type(64)
    at = mosaic.mul(arith.extui(wide, row), width)
    at = mosaic.mul(mosaic.add(at, arith.extui(wide, column)), size)
    return mosaic.pointer_at(ref, at, mosaic.integer_type(8))


def past(pointer: Value, num_bytes: int) -> Value:
    return mosaic.element_pointer(pointer, mosaic.i64(num_bytes), mosaic.integer_type(8))


def word_at(ref: Any, at: Value) -> Value:
    word = mosaic.integer_type(32)
    return mosaic.element_at(ref, at, word)


def share(ref: Any, at: Value, numbers: list[Value]) -> None:
    """Stores 32-bit numbers to `ref` in shared memory: to consecutive elements from `at` on."""
    word = mosaic.integer_type(32)
    mosaic.store_numbers(numbers, mosaic.pointer_at(ref, at, word))


def shared_words(ref: Any, at: Value, count: int) -> list[Value]:
    """Loads up to 4 consecutive words from `ref[at:]` in shared memory."""
    word = mosaic.integer_type(32)
    return mosaic.load_numbers(mosaic.pointer_at(ref, at, word), count, word)


def shared_numbers(ref: Any, at: Value, count: int) -> list[Value]:
    """Loads up to 4 consecutive float32 numbers from `ref[at:]` in shared memory."""
    f32 = mosaic.float_type()
    return mosaic.load_numbers(mosaic.pointer_at(ref, at, f32), count, f32)


def bits_of_e8m0(code: Value, fraction_bits: int) -> Value:
    """Emits the bits of the scale 2^(code - 127) in a float dtype with 8 exponent bits, as i32."""
    # 2^-127, the scale with code 0, is subnormal; code 255 is NaN.
    half = 1 << (fraction_bits - 1)
    bits = arith.shli(code, mosaic.i32(fraction_bits))
    bits = arith.select(mosaic.equal(code, 0), mosaic.i32(half), bits)
    nan = mosaic.i32(255 << fraction_bits | half)
    return arith.select(mosaic.equal(code, 255), nan, bits)


def max_of(sizes: Any) -> Value:
    return functools.reduce(arith.maxui, sizes)


def with_shuffled(sizes: list[Value], distance: int) -> list[Value]:
    """Emits the elementwise maximum of this lane's `sizes` and those of lane XOR `distance`."""
    return [arith.maxui(size, mosaic.shuffle(size, distance)) for size in sizes]


def scale_of(largest: Value) -> tuple[Value, Value]:
    """Returns a block's scale and 1 / scale, from the bits of its largest magnitude."""
    # With `float8.branchless_reciprocal` some kernels would need more than 64 registers per thread.
    # A multiprocessor would then run one thread block at a time, not two.
    scale = float8.scale(FLOAT8_ROWS, largest)
    return scale, float8.reciprocal(scale)


def rounded_words(numbers: Sequence[Value], factors: Sequence[Value]) -> list[Value]:
    """Multiplies float32 numbers by their factors, and packs them as float8, four in a word."""
    words = []
    for i in range(0, len(numbers), PER_WORD):
        word_slice = slice(i, i + PER_WORD)
        pairs = zip(numbers[word_slice], factors[word_slice], strict=True)
        four = [arith.mulf(number, factor) for number, factor in pairs]
        words.append(float8.packed(PTX_TYPE, four))
    return words


def load_words(pointer: Value, count: int) -> list[Value]:
    """Loads adjacent 32-bit words: one, two, or a multiple of four."""
    at_once = min(count, _MOST_WORDS)
    words = []
    for i in range(0, count, at_once):
        words += mosaic.load_numbers(past(pointer, 4 * i), at_once)
    return words


# ------------------------------------------------------- numbers packed in words, as in memory


@dataclasses.dataclass(frozen=True)
class Packed:
    """32-bit words of one float32, or of two bfloat16 or float16, low half first.

    Kernels keep numbers packed until they know a block's scale, in half of the registers.
    """

    dtype: Any

    @property
    def size(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    def load(self, pointer: Value, count: int) -> list[Value]:
        """Loads the words with `count` adjacent numbers: one word, two, or a multiple of four."""
        return load_words(pointer, count * self.size // 4)

    def numbers(self, words: Sequence[Value]) -> list[Value]:
        """Converts the numbers of words to float32."""
        f32 = mosaic.float_type()
        if self.size == 4:
            return [arith.bitcast(f32, word) for word in words]
        numbers = []
        if self.dtype == jnp.bfloat16:
            # A bfloat16 number is the upper half of the float32 number.
            half, upper = mosaic.i32(16), mosaic.i32(0xFFFF0000)
            for word in words:
                halves = arith.shli(word, half), arith.andi(word, upper)
                numbers += [arith.bitcast(f32, each) for each in halves]
            return numbers
        two = mosaic.vector_type(2, mosaic.element_type(self.dtype))
        places = mosaic.i32(0), mosaic.i32(1)
        for word in words:
            pair = llvm.bitcast(two, word)
            numbers += [arith.extf(f32, llvm.extractelement(pair, i)) for i in places]
        return numbers

    def pair(self, low: Value, high: Value) -> Value:
        """Rounds two float32 numbers to 16 bits, and packs them into a word."""
        text = f"cvt.rn.{_PACKED_TYPES[jnp.dtype(self.dtype).name]}.f32 $0, $2, $1;"
        return llvm.inline_asm(mosaic.integer_type(32), [low, high], text, "=r,f,f")

    def without_infinities(self, words: Sequence[Value]) -> list[Value]:
        # float8_e4m3fn has no infinities. x * 0 + x is x, or NaN if x is not finite.
        zero = mosaic.i32(0)
        return [self._emit("fma.rn.{type} $0, $1, $2, $1;", word, zero) for word in words]

    def largest(self, words: Sequence[Value]) -> Value:
        """Returns the largest magnitude as float32 bits, leaving out NaN; 0 if all are NaN."""
        # Up to four maxima, so that few instructions wait for the one before them.
        parts = (functools.reduce(self._larger, words[i::4]) for i in range(min(4, len(words))))
        largest = functools.reduce(self._larger, parts, mosaic.i32(0))
        word = mosaic.integer_type(32)
        signed = [arith.bitcast(word, number) for number in self.numbers([largest])]
        magnitudes = [arith.andi(bits, mosaic.i32(0x7FFFFFFF)) for bits in signed]
        return functools.reduce(arith.maxui, magnitudes)

    def _larger(self, a: Value, b: Value) -> Value:
        """Returns the larger magnitudes of two words' numbers, with any sign, ignoring NaN."""
        return self._emit("max.xorsign.abs.{type} $0, $1, $2;", a, b)

    def _emit(self, text: str, *words: Value) -> Value:
        constraints = ",".join(["=r"] + ["r"] * len(words))
        text = text.format(type=_PACKED_TYPES[jnp.dtype(self.dtype).name])
        return llvm.inline_asm(mosaic.integer_type(32), list(words), text, constraints)


BFLOAT16 = Packed(jnp.bfloat16)
