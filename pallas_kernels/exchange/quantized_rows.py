"""Quantizes rows to float8 and dequantizes them within a kernel, by a whole warpgroup.

A row has a float32 scale for every 128 values. The results have the same bits as those of
`pallas_kernels.formats.Float8`, which encodes rows outside kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import float8, mosaic, vectors
from pallas_kernels.fabric.hardware import WARP, WARPGROUP
from pallas_kernels.fabric.mosaic import Value, arith, llvm, vector
from pallas_kernels.formats import FLOAT8_ROWS, Float8, RowFormat

BLOCK = FLOAT8_ROWS.block[1]
# Maps each supported format to the name of its float8 type in PTX.
_PTX_TYPES: dict[RowFormat, str] = {FLOAT8_ROWS: float8.PTX_TYPES[jnp.dtype(FLOAT8_ROWS.dtype)]}
# Each thread of a warp holds this many of the 128 values of a block, which share a scale.
_VALUES = BLOCK // WARP
# A warp quantizes this many blocks of 128 values at a time, so that their loads overlap.
_AT_ONCE = 7


def quantize_row(fabric: fb.Fabric, wire: RowFormat, source: Any, values: Any, scales: Any) -> None:
    """Quantizes one row from shared memory to shared memory, by a whole warpgroup.

    `source` is the row, [H] of a floating dtype of up to 4 bytes. Writes `values` [H] and `scales`
    [H / 128] in the format `wire`. H is a multiple of `ROW_MULTIPLE`. A warp quantizes whole blocks
    of 128 values, of which each thread holds 4. The caller needs a barrier before it reads `values`
    and `scales`, or writes to `source`.
    """
    if fabric.interpret:
        values[...], scales[...] = wire.encode(source[...])
        return

    def emit(source_ref: Value, values_ref: Value, scales_ref: Value) -> None:
        f32 = mosaic.float_type()
        source_type = mosaic.element_of(source_ref)
        pointers = [mosaic.pointer(ref) for ref in (source_ref, values_ref, scales_ref)]
        thread = mosaic.warpgroup_thread()
        warp, lane = (op(thread, mosaic.i32(WARP)) for op in (arith.divui, arith.remui))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, lane, mosaic.i32(0))
        warps = WARPGROUP // WARP
        num_blocks = source.shape[0] // BLOCK // warps

        def load(i: int) -> tuple[Value, Value, Value]:
            block = arith.addi(warp, mosaic.i32(i * warps))
            column = arith.addi(
                arith.muli(block, mosaic.i32(BLOCK)), arith.muli(lane, mosaic.i32(_VALUES))
            )
            elements = llvm.load(
                mosaic.vector_type(_VALUES, source_type),
                mosaic.element_pointer(pointers[0], column, source_type),
                alignment=_VALUES * jnp.dtype(source.dtype).itemsize,
            )
            return block, column, elements

        for first in range(0, num_blocks, _AT_ONCE):
            loaded = [load(i) for i in range(first, min(first + _AT_ONCE, num_blocks))]
            results = [_quantize_block(wire, elements, source_type) for _, _, elements in loaded]
            for (block, column, _), (quantized, scale) in zip(loaded, results, strict=True):
                values_at = mosaic.element_pointer(pointers[1], column, mosaic.integer_type(8))
                llvm.store(quantized, values_at, alignment=_VALUES)
                with mosaic.when(is_first):
                    llvm.store(scale, mosaic.element_pointer(pointers[2], block, f32))

    mosaic.inline(emit, [source, values, scales], [mosaic.REFERENCE] * 3)


def put_row(
    fabric: fb.Fabric, wire: RowFormat, row: jax.Array, parts: Sequence[Any], elements: int
) -> None:
    """Quantizes a float32 row in a warpgroup's registers, and stores it in any rank's memory.

    Args:
      fabric: how ranks reach each other.
      wire: the format to quantize to.
      row: [H or more] float32, in the register layout of `vectors.load_each`.
      parts: two references in global memory, to which the values [H] and the scales [H / 128] are
        stored. H is a multiple of `ROW_MULTIPLE`.
      elements: how many neighbouring values of `row` a thread holds; a divisor of 128.
    """
    values, scales = parts
    if fabric.interpret:
        values[...], scales[...] = wire.encode(row)
        return
    threads, (hidden,) = BLOCK // elements, values.shape

    def emit(array: Any, values_ref: Value, scales_ref: Value) -> None:
        f32, i32 = mosaic.float_type(), mosaic.integer_type(32)
        registers = mosaic.registers(array)
        places = vectors.pointers(values_ref, elements, len(registers))
        block, lane_of_block = (
            op(mosaic.warpgroup_thread(), mosaic.i32(threads)) for op in (arith.divui, arith.remui)
        )
        is_first = mosaic.equal(lane_of_block, mosaic.i32(0))
        for i, (register, place) in enumerate(zip(registers, places, strict=True)):
            words, scale = _quantize_vector(wire, register, elements, threads)
            packed = vector.from_elements(mosaic.vector_type(len(words), i32), words)
            inside = mosaic.below(
                mosaic.warpgroup_thread(), mosaic.i32(hidden // elements - i * WARPGROUP)
            )
            with mosaic.when(inside):
                llvm.store(packed, place, alignment=elements)
            with mosaic.when(arith.andi(inside, is_first)):
                at = arith.addi(block, mosaic.i32(i * WARPGROUP // threads))
                llvm.store(scale, mosaic.element_pointer(mosaic.pointer(scales_ref), at, f32))

    layouts = [mosaic.strided(row.shape, elements), mosaic.REFERENCE, mosaic.REFERENCE]
    mosaic.inline(emit, [row, values, scales], layouts)


def _quantize_vector(
    wire: RowFormat, register: Value, elements: int, threads: int
) -> tuple[list[Value], Value]:
    """Quantizes the vector of float32 values that a thread holds in a register.

    `elements` is the vector's length. A block of 128 values, which share a scale, is spread over
    `threads` neighbouring threads. Returns the float8 values, 4 to an int32, and the scale.
    """
    wide, finite, largest = _largest(
        llvm.extractelement(register, mosaic.i32(i)) for i in range(elements)
    )
    step = 1
    while step < threads:
        largest, step = arith.maxui(largest, mosaic.shuffle(largest, step)), 2 * step
    scale, scaled = _scaled(wire, wide, finite, largest)
    fours = (scaled[i : i + _VALUES] for i in range(0, elements, _VALUES))
    return [float8.packed(_PTX_TYPES[wire], four) for four in fours], scale


def _quantize_block(wire: RowFormat, elements: Value, element_type: Any) -> tuple[Value, Value]:
    """Quantizes a block of 128 values, of which each of a warp's 32 threads holds 4.

    `elements` is the vector of this thread's 4 values, of type `element_type`. Returns the thread's
    4 float8 values, packed in an int32, and the block's float32 scale.
    """
    f32 = mosaic.float_type()

    def widened() -> Iterator[Value]:
        for i in range(_VALUES):
            element = llvm.extractelement(elements, mosaic.i32(i))
            yield element if element_type == f32 else arith.extf(f32, element)

    wide, finite, largest = _largest(widened())
    # All 32 threads of the warp must execute `warp_max`, so no thread may branch around it.
    largest = mosaic.warp_max(largest)
    scale, scaled = _scaled(wire, wide, finite, largest)
    return float8.packed(_PTX_TYPES[wire], scaled), scale


def _largest(values: Iterable[Value]) -> tuple[list[Value], list[Value], Value]:
    """Finds the largest finite magnitude among a thread's float32 values, to compute a scale.

    Returns three things: the values as a list; for each value, whether it is finite; and the bits
    of the largest finite magnitude, an int32.
    """
    wide, finite, largest = [], [], mosaic.i32(0)
    for value in values:
        is_finite, size = float8.magnitude(value)
        wide.append(value)
        finite.append(is_finite)
        largest = arith.maxui(largest, size)
    return wide, finite, largest


def _scaled(
    wire: RowFormat, values: Sequence[Value], finite: Sequence[Value], largest: Value
) -> tuple[Value, list[Value]]:
    """Returns the scale of a block of 128 values, and this thread's values divided by the scale.

    `values` are the block's values that this thread holds, and `finite` says for each of them
    whether it is finite. `largest` has the bits of the largest finite magnitude in the block.
    """
    assert isinstance(wire, Float8)
    scale = float8.scale(wire, largest)
    inverse = float8.branchless_reciprocal(scale)
    return scale, [float8.scaled(*each, inverse) for each in zip(values, finite, strict=True)]


def add_rows(
    fabric: fb.Fabric,
    wire: RowFormat,
    parts: Sequence[Sequence[Any]],
    sent: Sequence[jax.Array],
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """Dequantizes rows in this rank's global memory, and sums them in the order given.

    `parts` is (values, scales): a reference to the values [H] of each row, and one to the scales
    [H / 128] of each row, in the format `wire`. H is a multiple of `ROW_MULTIPLE`. Row i is added
    if the scalar bool sent[i] is true, and ignored otherwise. Returns the sum, [H] of `dtype` in
    registers. It is computed in float32, and rounded once. It starts from 0.0, so that rows of -0.0
    add up to 0.0.
    """
    values, scales = parts
    (hidden,) = values[0].shape
    if fabric.interpret:
        total = jnp.zeros((hidden,), jnp.float32)
        for row, of_blocks, was_sent in zip(values, scales, sent, strict=True):
            row = wire.decode((row[...], of_blocks[...]), jnp.float32)
            total = total + jnp.where(was_sent, row, 0)
        return total.astype(dtype)
    elements = elements_of_sum(hidden)
    num_rows = len(values)

    def emit(*args: Any) -> Any:
        taken = [
            arith.cmpi(arith.CmpIPredicate.ne, mosaic.scalar(flag), mosaic.i32(0))
            for flag in args[:num_rows]
        ]
        rows, of_blocks = args[num_rows : 2 * num_rows], args[2 * num_rows :]
        num_vectors = hidden // (WARPGROUP * elements)
        thread = mosaic.warpgroup_thread()
        first = arith.muli(thread, mosaic.i32(elements))

        def load(i: int) -> list[tuple[list[Value], Value]]:
            column = arith.addi(first, mosaic.i32(i * WARPGROUP * elements))
            return [
                _load_quantized(row, of_row, column, elements, ok)
                for row, of_row, ok in zip(rows, of_blocks, taken, strict=True)
            ]

        totals, ahead = [], load(0)
        for i in range(num_vectors):
            # Loads the next vectors before it adds the present ones, so that both overlap.
            loaded, ahead = ahead, load(i + 1) if i + 1 < num_vectors else []
            totals.append(_rounded(_add_vectors(wire, loaded, elements), dtype))
        return mosaic.array_of(totals, (hidden,), elements)

    layouts = [mosaic.SCALAR] * num_rows + [mosaic.REFERENCE] * (2 * num_rows)
    array = mosaic.in_registers((hidden,), dtype, elements)
    flags = [was_sent.astype(jnp.int32) for was_sent in sent]
    return mosaic.inline(emit, [*flags, *values, *scales], layouts, array)


def elements_of_sum(hidden: int) -> int:
    """Returns how many neighbouring values of the result of `add_rows` each thread holds.

    The caller needs the number to store the result. `hidden` is the result's length.
    """
    return next(size for size in (16, 8, 4) if hidden % (WARPGROUP * size) == 0)


def _load_quantized(
    values: Value, scales: Value, column: Value, elements: int, taken: Value
) -> tuple[list[Value], Value]:
    """Loads `elements` neighbouring float8 values of a row, and the scale of their block.

    This thread's values begin at column `column`. `values` and `scales` are the row in global
    memory. Returns the values, packed 4 to an int32, and the float32 scale. All are 0 if `taken` is
    false, so that the row adds nothing to a sum.
    """
    i8, i32, f32 = (*(mosaic.integer_type(bits) for bits in (8, 32)), mosaic.float_type())
    block = arith.divui(column, mosaic.i32(BLOCK))
    pointer = llvm.PointerType.get(vectors.GLOBAL_MEMORY)
    values_at, scale_at = (
        mosaic.element_pointer(llvm.addrspacecast(pointer, mosaic.pointer(ref)), index, element)
        for ref, index, element in ((values, column, i8), (scales, block, f32))
    )
    words = llvm.load(mosaic.vector_type(elements // 4, i32), values_at, alignment=elements)
    of_words = [llvm.extractelement(words, mosaic.i32(i)) for i in range(elements // 4)]
    scale = llvm.load(f32, scale_at)
    return (
        [arith.select(taken, word, mosaic.i32(0)) for word in of_words],
        arith.select(taken, scale, mosaic.f32(0.0)),
    )


def _add_vectors(
    wire: RowFormat, loaded: Sequence[tuple[list[Value], Value]], elements: int
) -> Value:
    """Dequantizes a thread's values of several rows, and adds up the rows in order, in float32.

    `loaded` has for each row this thread's `elements` float8 values, packed 4 to an int32, and
    their scale. The sum of each column starts from 0.0.
    """
    f32 = mosaic.float_type()
    total = [mosaic.f32(0.0)] * elements
    for words, scale in loaded:
        row = [value for word in words for value in float8.widened(_PTX_TYPES[wire], word)]
        total = [arith.addf(t, arith.mulf(v, scale)) for t, v in zip(total, row, strict=True)]
    return vector.from_elements(mosaic.vector_type(elements, f32), total)


def _rounded(register: Value, dtype: jax.typing.DTypeLike) -> Value:
    """Rounds a thread's vector of float32 to a floating `dtype` of 32 bits or fewer."""
    kind = mosaic.vector_type(mosaic.vector_length_of(register), mosaic.element_type(dtype))
    return register if register.type == kind else arith.truncf(kind, register)
