"""Quantizes rows to float8 and dequantizes them within a kernel, with the bits of `formats.Float8`.

A row has a float32 scale for every 128 values. A whole warpgroup calls the functions.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import float8, mosaic, vectors
from pallas_kernels.fabric.hardware import VECTOR_BYTES, WARP, WARPGROUP, WORD_BYTES
from pallas_kernels.fabric.mosaic import Value, arith, llvm, vector
from pallas_kernels.formats import FLOAT8_ROWS, Float8, RowFormat

BLOCK = FLOAT8_ROWS.block[1]
# Each thread of a warp holds this many of the 128 values of a block, which share a scale.
_VALUES = BLOCK // WARP
# The 32-bit words of a vector of 16 bytes.
_WORDS = VECTOR_BYTES // WORD_BYTES
# A warp quantizes this many blocks of 128 values at a time, so that their loads overlap. A row of
# 7168 values, 14 blocks for each of the 4 warps, takes two rounds.
_AT_ONCE = 7


def quantize_row(wire: RowFormat, source: Any, values: Any, scales: Any) -> None:
    """Quantizes a row [H] in shared memory to values [H] and scales [H / 128] in shared memory.

    H is a multiple of `ROW_MULTIPLE`. The caller needs a barrier before it reads the results, or
    writes to `source`.
    """

    def emit(source_ref: Value, values_ref: Value, scales_ref: Value) -> None:
        f32 = mosaic.float_type()
        source_type = mosaic.element_of(source_ref)
        pointers = [mosaic.pointer(ref) for ref in (source_ref, values_ref, scales_ref)]
        thread = mosaic.warpgroup_thread()
        warp, lane = mosaic.divided(thread, WARP)
        is_first = mosaic.equal(lane, 0)
        warps = WARPGROUP // WARP
        num_blocks = source.shape[0] // BLOCK // warps  # of each warp

        def load(i: int) -> tuple[Value, Value, list[Value]]:
            """Loads this thread's numbers of its warp's i-th block: (block, column, numbers)."""
            block = mosaic.add(warp, i * warps)
            column = mosaic.add(mosaic.mul(block, BLOCK), mosaic.mul(lane, _VALUES))
            pointer = mosaic.element_pointer(pointers[0], column, source_type)
            numbers = mosaic.load_numbers(pointer, _VALUES, source_type)
            if source_type != f32:
                numbers = [arith.extf(f32, number) for number in numbers]
            return block, column, numbers

        for first in range(0, num_blocks, _AT_ONCE):
            loaded = [load(i) for i in range(first, min(first + _AT_ONCE, num_blocks))]
            results = [_quantize(wire, numbers, WARP) for _, _, numbers in loaded]
            for (block, column, _), (words, scale) in zip(loaded, results, strict=True):
                (word,) = words  # this thread's 4 float8 values
                values_at = mosaic.element_pointer(pointers[1], column, mosaic.integer_type(8))
                llvm.store(word, values_at, alignment=_VALUES)
                with mosaic.when(is_first):
                    llvm.store(scale, mosaic.element_pointer(pointers[2], block, f32))

    mosaic.inline(emit, [source, values, scales])


def put_row(wire: RowFormat, row: jax.Array, parts: Sequence[Any], elements: int) -> None:
    """Quantizes a float32 row in a warpgroup's registers, and stores it in any rank's memory.

    Args:
      row: [H or more] float32, in the register layout of `vectors.load_each`.
      parts: values [H] and scales [H / 128] in global memory; H is a multiple of `ROW_MULTIPLE`.
      elements: how many neighbouring values of `row` one vector of a thread holds; divides 128.
    """
    values, scales = parts
    (hidden,) = values.shape
    threads = BLOCK // elements  # that share a scale

    def emit(array: Any, values_ref: Value, scales_ref: Value) -> None:
        f32 = mosaic.float_type()
        registers = mosaic.registers(array)
        pointers = vectors.pointers(values_ref, elements, len(registers))
        block, lane_of_block = mosaic.divided(mosaic.warpgroup_thread(), threads)
        is_first = mosaic.equal(lane_of_block, 0)
        for i, (register, pointer) in enumerate(zip(registers, pointers, strict=True)):
            numbers = [llvm.extractelement(register, mosaic.i32(j)) for j in range(elements)]
            words, scale = _quantize(wire, numbers, threads)
            # Registers past the end of the row are padding.
            inside = mosaic.below(mosaic.warpgroup_thread(), hidden // elements - i * WARPGROUP)
            with mosaic.when(inside):
                mosaic.store_numbers(words, pointer)
            with mosaic.when(arith.andi(inside, is_first)):
                index = mosaic.add(block, i * WARPGROUP // threads)
                llvm.store(scale, mosaic.pointer_at(scales_ref, index, f32))

    mosaic.inline(emit, [(row, mosaic.strided(row.shape, elements)), values, scales])


def _quantize(wire: RowFormat, values: list[Value], threads: int) -> tuple[list[Value], Value]:
    """Quantizes a thread's float32 numbers; returns float8 values, 4 to a word, and their scale."""
    # `threads` neighbouring threads hold the 128 numbers that share the scale. Their magnitudes are
    # compared as integers, by their bits.
    assert isinstance(wire, Float8)
    finite, magnitudes = zip(*map(float8.magnitude, values), strict=True)
    largest = functools.reduce(arith.maxui, magnitudes, mosaic.i32(0))
    # `warp_max` is one instruction, but takes the whole warp; smaller groups need a butterfly. All
    # threads of the warp must execute either, so no thread may branch around it.
    if threads == WARP:
        largest = mosaic.warp_max(largest)
    else:
        distance = 1
        while distance < threads:
            other = mosaic.shuffle(largest, distance)
            largest = arith.maxui(largest, other)
            distance *= 2
    scale = float8.scale(wire, largest)
    inverse = float8.branchless_reciprocal(scale)
    scaled = [
        float8.or_nan(arith.mulf(value, inverse), is_finite)
        for value, is_finite in zip(values, finite, strict=True)
    ]
    fours = (scaled[i : i + WORD_BYTES] for i in range(0, len(scaled), WORD_BYTES))
    return [float8.packed(float8.PTX_TYPES[wire.dtype], four) for four in fours], scale


def add_rows(
    wire: RowFormat,
    parts: Sequence[Sequence[Any]],
    sent: Sequence[jax.Array],
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Dequantizes rows in this rank's global memory, and sums those that were sent, in order.

    `parts` is (values [H] of each row, scales [H / 128] of each row); `sent` has a [] bool for each
    row. Returns [H] of `dtype` in registers, computed in float32 and rounded once. The sum starts
    from 0.0, so that rows of -0.0 add up to 0.0.
    """
    values, scales = parts
    (hidden,) = values[0].shape
    elements = elements_of_sum(hidden)
    num_rows = len(values)

    def emit(*args: Any) -> Any:
        # For each row a flag, then for each row its values, then for each row its scales.
        flags = [mosaic.unequal(mosaic.scalar(flag), 0) for flag in args[:num_rows]]
        rows, scales_of_rows = args[num_rows : 2 * num_rows], args[2 * num_rows :]
        num_vectors = hidden // (WARPGROUP * elements)
        thread = mosaic.warpgroup_thread()
        first = mosaic.mul(thread, elements)

        def load(i: int) -> list[tuple[list[Value], Value]]:
            """Loads this thread's i-th vector of each row, and the vector's scale."""
            column = mosaic.add(first, i * WARPGROUP * elements)
            return [
                _load_quantized(row, scales_of_row, column, elements, was_sent)
                for row, scales_of_row, was_sent in zip(rows, scales_of_rows, flags, strict=True)
            ]

        narrow = mosaic.vector_type(elements, mosaic.element_type(dtype))
        assert isinstance(wire, Float8)
        kind = float8.PTX_TYPES[wire.dtype]
        totals, ahead = [], load(0)
        for i in range(num_vectors):
            # Loads the next vectors before it adds the present ones, so that both overlap.
            loaded, ahead = ahead, load(i + 1) if i + 1 < num_vectors else []
            # Dequantizes this thread's values, and adds up the rows in order, in float32.
            sums = [mosaic.f32(0.0)] * elements
            for words, scale in loaded:
                row = [value for word in words for value in float8.widened(kind, word)]
                sums = [arith.addf(s, arith.mulf(v, scale)) for s, v in zip(sums, row, strict=True)]
            total = vector.from_elements(mosaic.vector_type(elements, mosaic.float_type()), sums)
            totals.append(total if total.type == narrow else arith.truncf(narrow, total))
        return mosaic.array_of(totals, (hidden,), elements)

    array = mosaic.in_registers((hidden,), dtype, elements)
    flags = [was_sent.astype(jnp.int32) for was_sent in sent]
    return mosaic.inline(emit, [*flags, *values, *scales], array)


def elements_of_sum(hidden: int) -> int:
    """Returns how many neighbouring values of `add_rows`' result [hidden] each thread holds."""
    return next(size for size in (16, 8, 4) if hidden % (WARPGROUP * size) == 0)


def _load_quantized(
    values: Value, scales: Value, column: Value, elements: int, was_sent: Value
) -> tuple[list[Value], Value]:
    """Loads a thread's float8 values, 4 to an int32, and their scale; zeros unless `was_sent`."""
    # Values that were not sent are loaded, too, and then replaced by zeros: without a branch.
    i32, f32 = mosaic.integer_type(32), mosaic.float_type()
    block = arith.divui(column, mosaic.i32(BLOCK))

    def global_pointer(ref: Value, index: Value, element: Any) -> Value:
        """Emits the pointer in global memory to element `index`, of an MLIR type, of `ref`."""
        base = llvm.addrspacecast(llvm.PointerType.get(vectors.GLOBAL_MEMORY), mosaic.pointer(ref))
        return mosaic.element_pointer(base, index, element)

    values_at = global_pointer(values, column, mosaic.integer_type(8))
    scale_at = global_pointer(scales, block, f32)
    loaded = llvm.load(mosaic.vector_type(elements // 4, i32), values_at, alignment=elements)
    words = [llvm.extractelement(loaded, mosaic.i32(i)) for i in range(elements // 4)]
    scale = llvm.load(f32, scale_at)
    words = [arith.select(was_sent, word, mosaic.i32(0)) for word in words]
    return words, arith.select(was_sent, scale, mosaic.f32(0.0))


# -------------------------------------------------------------------------------- rows of scales

# A bulk copy takes the hardware about as long for a row of 64 bytes as for one of 2 KB. So the
# threads of a warpgroup store rows of scales, 16 bytes each.


def store_each(source: Any, ref: Any, rows: Sequence[jax.Array]) -> None:
    """Stores row `source` [n] from shared memory to `rows` of `ref` [R, n] in global memory.

    NOWHERE among `rows` is skipped. n is a multiple of 4, of a 32-bit dtype. The caller needs a
    barrier before it writes to `source` again.
    """
    num_vectors = ref.shape[1] // _WORDS  # of a row

    def emit(source_ref: Value, out: Value, *row_numbers: Any) -> None:
        from_row, to_rows = mosaic.pointer(source_ref), mosaic.pointer(out)
        zero = mosaic.i32(0)
        # Each thread stores one vector at a time: vector `part` of the row row_numbers[i].
        for first in range(0, len(rows) * num_vectors, WARPGROUP):
            unit = mosaic.add(mosaic.warpgroup_thread(), first)
            i, part = mosaic.divided(unit, num_vectors)
            row = mosaic.i32(fb.NOWHERE)  # unless there is a row_numbers[i]; they are in registers
            for j, number in enumerate(row_numbers):
                row = arith.select(mosaic.equal(i, j), mosaic.scalar(number), row)
            with mosaic.when(_is_row(row)):
                words = mosaic.load_numbers(_vector_at(from_row, zero, num_vectors, part), _WORDS)
                mosaic.store_numbers(words, _vector_at(to_rows, row, num_vectors, part))

    mosaic.inline(emit, [source, ref, *rows])


def copy_listed(ref: Any, lists: Any, count: jax.Array) -> None:
    """Copies the first row of each of `count` lists to the other rows of the list.

    `ref` is [R, n] of a 32-bit dtype in this rank's global memory; n is a multiple of 4. `lists` is
    [`count` or more, K] int32 in shared memory, rows of `ref` or NOWHERE.
    """
    top_k = lists.shape[1]
    num_vectors = ref.shape[1] // _WORDS  # of a row

    def emit(array: Value, lists_ref: Value, number: Any) -> None:
        i32 = mosaic.integer_type(32)
        rows_at, lists_at = mosaic.pointer(array), mosaic.pointer(lists_ref)
        total = mosaic.mul(mosaic.scalar(number), num_vectors)
        # Each thread copies one vector at a time: vector `part` of the rows of list `entry`.
        with mosaic.loop(mosaic.warpgroup_thread(), total, WARPGROUP) as unit:
            entry, part = mosaic.divided(unit, num_vectors)
            start = mosaic.mul(entry, top_k)
            listed = [
                llvm.load(i32, mosaic.element_pointer(lists_at, mosaic.add(start, choice), i32))
                for choice in range(top_k)
            ]
            # The first row of the list, and for each further choice whether a row precedes it.
            first, preceded = listed[0], []
            for row in listed[1:]:
                preceded.append(_is_row(first))
                first = arith.select(preceded[-1], first, row)
            with mosaic.when(_is_row(first)):
                words = mosaic.load_numbers(_vector_at(rows_at, first, num_vectors, part), _WORDS)
                for row, has_source in zip(listed[1:], preceded, strict=True):
                    with mosaic.when(arith.andi(has_source, _is_row(row))):
                        mosaic.store_numbers(words, _vector_at(rows_at, row, num_vectors, part))

    mosaic.inline(emit, [ref, lists, count])


def _is_row(row: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.sge, row, mosaic.i32(0))


def _vector_at(base: Value, row: Value, num_vectors: int, part: Value) -> Value:
    """Returns a pointer to vector `part` of 16 bytes of row `row`, which has `num_vectors`."""
    index = mosaic.add(mosaic.mul(row, num_vectors), part)
    return mosaic.element_pointer(base, index, mosaic.vector_type(_WORDS, mosaic.integer_type(32)))
