"""Moves tiles and columns between registers, shared memory and global memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import float8, mosaic
from pallas_kernels.fabric.hardware import WARPGROUP
from pallas_kernels.fabric.mosaic import Array, Value, arith, llvm, vector
from pallas_kernels.matmul.kernel import quotient_and_rest


class Target(NamedTuple):
    """Where a tile is stored: element [0, 0] at (top, left), and of its rows only [begin, end)."""

    top: jax.Array
    left: jax.Array
    begin: jax.Array
    end: jax.Array


def store_rows(out: Any, values: jax.Array, target: Target, layout: Any) -> None:
    """Stores rows of a tile of 16-bit floats from registers to global memory.

    The address of out[top, left] must be a multiple of the size of a vector. In the register layout
    `layout`, a thread's vectors are neighbouring elements of a row.
    """

    def emit(out: Value, values: Array, *scalars: Array) -> None:
        top, left, begin, end = map(mosaic.scalar, scalars)
        word, width = mosaic.integer_type(32), mosaic.i64(mosaic.width_of(out))

        for register, (row, column) in mosaic.placed_registers(values):
            inside = mosaic.within(row, begin, end)
            first = mosaic.mul(mosaic.widen(mosaic.add(top, row)), width)
            offset = mosaic.add(first, mosaic.widen(mosaic.add(left, column)))
            # One store of a register's words, without a branch, if the row is in the range.
            count = mosaic.vector_length_of(register) // 2
            words = vector.bitcast(mosaic.vector_type(count, word), register)
            operands = ", ".join(f"${i + 2}" for i in range(count))
            mosaic.asm(
                "{ .reg .pred p; setp.ne.b32 p, $1, 0; "
                f"@p st.global{'' if count == 1 else f'.v{count}'}.b32 [$0], {{{operands}}}; }}",
                "l" + ",r" * (1 + count),
                llvm.ptrtoint(mosaic.integer_type(64), mosaic.pointer_at(out, offset)),
                arith.extui(word, inside),
                *(vector.extract(words, [], [i]) for i in range(count)),
            )

    mosaic.inline(emit, [out, (values, layout), *target])


def store_rows_through(room: Any, out: Any, values: jax.Array, target: Target) -> None:
    """Stores rows of an array from registers to global memory, through shared memory.

    In registers, each thread has pieces of several rows. Each warp puts its 16 rows into shared
    memory, and reads them such that 8 threads store the 128 bytes of a row, a *unit* of 16 bytes
    each. The warps need not wait for each other. All threads of a warp must reach the call.

    Args:
      room: [64, columns] in shared memory, of `out`'s dtype. A row has 128 bytes.
      out: 2D in global memory. Rows have a multiple of 16 bytes, and so has the address of out[top,
        left].
      values: [64, columns] in the layout WGMMA, of `out`'s dtype, or float32 if `out` is float8.
    """
    num_rows, columns = values.shape
    dtype = jnp.dtype(out.dtype)
    assert num_rows == 64 and columns * dtype.itemsize == 128, (values.shape, dtype)

    def emit(room: Value, out: Value, values: Array, *scalars: Array) -> None:
        _fill_room(room, values, dtype)
        mosaic.asm("bar.warp.sync 0xffffffff;", "~{memory}")
        _copy_from_room(room, out, dtype.itemsize, *map(mosaic.scalar, scalars))
        # The warp's next call overwrites its rows in `room`.
        mosaic.asm("bar.warp.sync 0xffffffff;", "~{memory}")

    mosaic.inline(emit, [room, out, (values, plgpu.Layout.WGMMA), *target])


def _place_in_room(row: Value, column: Value) -> Value:
    """Emits where the `room` of `store_rows_through` has byte `column` of a row."""
    # Row r has its unit u at place u XOR (r mod 8), so a warp's threads access different banks.
    four, seven, fifteen = map(mosaic.i32, (4, 7, 15))
    unit = arith.xori(arith.shrui(column, four), arith.andi(row, seven))
    offset = arith.ori(arith.shli(unit, four), arith.andi(column, fifteen))
    return mosaic.add(mosaic.mul(row, 128), offset)


def _fill_room(room: Value, values: Array, dtype: Any) -> None:
    """Emits the stores of this thread's numbers, rounded if `dtype` is float8."""
    byte, half = map(mosaic.integer_type, (8, 16))
    start_of_room, size = mosaic.pointer(room), dtype.itemsize
    registers = list(mosaic.placed_registers(values))
    offsets = [_place_in_room(row, mosaic.mul(column, size)) for _, (row, column) in registers]
    # A register has a pair of neighbouring numbers of a row.
    for (pair, _), offset in zip(registers, offsets, strict=True):
        if size == 1:
            numbers = [vector.extract(pair, [], [i]) for i in range(2)]
            text = f"cvt.rn.satfinite.{float8.PTX_TYPES[dtype]}x2.f32 $0, $2, $1;"
            pair = mosaic.asm(text, "=h,f,f", *numbers, returns=half)
        pointer = mosaic.element_pointer(start_of_room, offset, byte)
        llvm.store(pair, pointer, alignment=2 * size)


def _copy_from_room(
    room: Value, out: Value, size: int, top: Value, left: Value, begin: Value, end: Value
) -> None:
    """Emits the copies of this warp's rows, of elements of `size` bytes, to `out`."""
    # A warp copies four rows at a time, and a thread a unit of one of them. All copies are loaded
    # before the first is stored, and no branch is in between, so that a warp waits once.
    byte, word, wide = map(mosaic.integer_type, (8, 32, 64))
    unit_type, start_of_room = mosaic.vector_type(4, word), mosaic.pointer(room)
    thread = mosaic.warpgroup_thread()
    # The thread's first row is 16 * its warp + its lane / 8, and its unit number lane mod 8.
    first = arith.shli(arith.shrui(thread, mosaic.i32(5)), mosaic.i32(4))
    first = mosaic.add(first, arith.andi(arith.shrui(thread, mosaic.i32(3)), mosaic.i32(3)))
    column = arith.shli(arith.andi(thread, mosaic.i32(7)), mosaic.i32(4))
    stride = mosaic.width_of(out) * size
    offset = mosaic.mul(arith.extui(wide, mosaic.add(top, first)), stride)
    left_bytes = mosaic.add(mosaic.mul(left, size), column)
    start = mosaic.add(offset, arith.extui(wide, left_bytes))
    start = llvm.ptrtoint(wide, mosaic.pointer_at(out, start, byte))
    rows = [mosaic.add(first, i) for i in range(0, 16, 4)]
    offsets = [_place_in_room(row, column) for row in rows]
    places = [mosaic.element_pointer(start_of_room, offset, byte) for offset in offsets]
    units = [llvm.load(unit_type, place, alignment=16) for place in places]
    for i, (row, unit) in enumerate(zip(rows, units, strict=True)):
        mosaic.asm(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.global.v4.b32 [$0], {$2, $3, $4, $5}; }",
            "l,r,r,r,r,r",
            mosaic.add(start, 4 * i * stride),
            arith.extui(word, mosaic.within(row, begin, end)),
            *[vector.extract(unit, [], [j]) for j in range(4)],
        )


def store_column(out: Any, values: jax.Array, target: Target, *, to_row: bool = False) -> None:
    """Stores values[i] to out[top + i, left] for begin <= i < end, and nothing else.

    `values` is float32 in the layout `WGMMA.reduce(1)`. With `to_row`, `out` is transposed.
    """

    def emit(out: Value, values: Array, *scalars: Array) -> None:
        top, left, begin, end = map(mosaic.scalar, scalars)
        # Each element has a register in four neighbouring threads. The first of them stores it.
        is_first = mosaic.equal(arith.andi(mosaic.warpgroup_thread(), mosaic.i32(3)), 0)
        for register, (row,) in mosaic.placed_registers(values):
            inside = arith.andi(is_first, mosaic.within(row, begin, end))
            # The element's indices in `out`.
            first, second = mosaic.add(top, row), left
            if to_row:
                first, second = second, first
            offset = mosaic.add(mosaic.mul(first, mosaic.width_of(out)), second)
            with mosaic.when(inside):
                llvm.store(vector.extract(register, [], [0]), mosaic.pointer_at(out, offset))

    mosaic.inline(emit, [out, (values, plgpu.Layout.WGMMA.reduce(1)), *target])


def load_column(ref: Any, first: jax.Array, count: int, last: int) -> jax.Array:
    """Loads `count` floats, a multiple of 64, from ref[first:] of a vector in global memory.

    Past its last index, `last`, it repeats ref[last]. Returns float32, `WGMMA.reduce(1)`.
    """

    def emit(ref: Value, first: Array) -> Array:
        # A thread has the elements of two rows, 8 apart, of each 64.
        kind, row = mosaic.element_of(ref), mosaic.tensor_core_row()
        values = []
        for tile in range(0, count, 64):
            for half in (0, 8):
                index = mosaic.add(mosaic.add(mosaic.scalar(first), row), tile + half)
                value = mosaic.element_at(ref, arith.minui(index, mosaic.i32(last)))
                is_wide = kind == mosaic.float_type()
                values.append(value if is_wide else arith.extf(mosaic.float_type(), value))
        return mosaic.tensor_core_rows(values, count, mosaic.float_type())

    result = plgpu.ShapeDtypeStruct((count,), jnp.float32, layout=plgpu.Layout.WGMMA.reduce(1))
    return mosaic.inline(emit, [ref, first], result)


def store_transposed(ref: Any, values: jax.Array) -> None:
    """Stores the transpose of 16-bit floats in the layout WGMMA to swizzled shared memory."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)


def zero_rows_outside(
    ref: Any,
    begin: jax.Array,
    end: jax.Array,
    transforms: Sequence[Any],
    worker: jax.Array,
    num_workers: int,
) -> None:
    """Zeroes all rows of a tile but [begin, end): warpgroup `worker`'s share of `num_workers`."""
    # In shared memory, a tile of 16-bit floats is blocks of 8 rows of 128 bytes. A swizzle only
    # permutes pieces of 16 bytes within a row of a block, so zeroing whole rows can ignore it.
    rows, columns = ref.shape
    blocks = columns // 64
    pieces = 8 * blocks  # of a row
    begin = jnp.clip(begin, 0, rows)
    end = jnp.clip(end, begin, rows)

    def emit(ref: Value, first: Array, *scalars: Array) -> None:
        begin, end, count = map(mosaic.scalar, scalars)
        # Each thread zeroes a piece: number `index` of those in the rows to zero.
        index = mosaic.add(mosaic.scalar(first), mosaic.warpgroup_thread())
        # The rows to zero are numbered without those of [begin, end).
        number, piece = mosaic.divided(index, pieces)
        is_before = mosaic.below(number, begin)
        row = arith.select(is_before, number, mosaic.add(number, arith.subi(end, begin)))
        block_row, row_of_block = mosaic.divided(row, 8)
        block_column, piece_of_row = mosaic.divided(piece, 8)
        block = mosaic.add(mosaic.mul(block_row, blocks), block_column)
        offset = mosaic.add(
            mosaic.mul(block, 1024), mosaic.mul(row_of_block, 128), mosaic.mul(piece_of_row, 16)
        )
        mosaic.asm(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.shared.v4.b32 [$0], {$2, $2, $2, $2}; }",
            "r,r,r",
            mosaic.add(mosaic.address(ref, 32), offset),
            arith.extui(mosaic.integer_type(32), mosaic.below(index, count)),
            mosaic.i32(0),
        )

    count = (rows - (end - begin)) * pieces

    def step(i: jax.Array, _: None) -> None:
        numbers = [(i * num_workers + worker) * WARPGROUP, begin, end, count]
        mosaic.inline(emit, [(ref, plgpu.RefType(tuple(transforms))), *numbers])

    at_once = num_workers * WARPGROUP
    lax.fori_loop(0, lax.div(count + (at_once - 1), jnp.int32(at_once)), step, None)


def each_zero_chunk(
    start: jax.Array,
    out_shape: tuple[int, int],
    chunk_shape: tuple[int, int],
    worker: jax.Array,
    num_workers: int,
    zero: Callable[[Target], None],
) -> None:
    """Zeroes an array's rows from `start` on, by `zero(target)` for a worker's share of chunks."""
    # Worker i of `num_workers` takes chunks i, i + num_workers and so on, of `chunk_shape` each.
    (num_rows, width), (height, columns) = out_shape, chunk_shape
    workers = jnp.int32(num_workers)
    chunks_across = jnp.int32(width // columns)
    # Chunks are numbered row by row, from the row of chunks that has row `start`.
    first_chunk_row = lax.div(start, jnp.int32(height))
    num_chunks = (-(-num_rows // height) - first_chunk_row) * chunks_across

    def one_chunk(i: jax.Array, _: None) -> None:
        chunk_row, chunk_column = quotient_and_rest(worker + i * workers, chunks_across)
        top = (first_chunk_row + chunk_row) * height
        # The range of rows to zero may begin above the chunk, and end below it.
        zero(Target(top, chunk_column * columns, start - top, num_rows - top))

    chunks_of_worker = lax.div(num_chunks - worker + (workers - 1), workers)
    lax.fori_loop(0, chunks_of_worker, one_chunk, None)


def write_registers(room: Any, values: jax.Array) -> None:
    """Writes an array of 16-bit floats, [64, columns] in the layout WGMMA, for `read_registers`.

    Waits until all threads of the warpgroup have done so. Elements get another order in `room`.
    """

    def emit(room: Value, values: Array) -> None:
        word = mosaic.integer_type(32)
        words = [
            vector.extract(vector.bitcast(mosaic.vector_type(1, word), pair), [], [0])
            for pair in mosaic.registers(values)
        ]
        for first, count, place in _own_words(room, len(words)):
            mosaic.store_numbers(words[first : first + count], place)
        # The compiler must not move the stores past the barrier.
        mosaic.asm("", "~{memory}")
        mosaic.barrier()

    mosaic.inline(emit, [room, (values, plgpu.Layout.WGMMA)])


def read_registers(room: Any) -> jax.Array:
    """Returns the array that another warpgroup has written to `room` by `write_registers`."""
    # A thread reads the places to which it would write, and all threads wait until all have read
    # them. So the warpgroup may then write to `room`.
    shape, dtype = room.shape, jnp.dtype(room.dtype)

    def emit(room: Value) -> Array:
        word, kind = mosaic.integer_type(32), mosaic.element_of(room)
        words: list[Value] = []
        # The compiler must not move the loads before the caller's wait.
        mosaic.asm("", "~{memory}")
        for _, count, place in _own_words(room, shape[0] * shape[1] // (2 * WARPGROUP)):
            words += mosaic.load_numbers(place, count)
        # LLVM must not move the loads of these words behind the barrier.
        words = mosaic.opaque(words)
        mosaic.barrier()
        two_numbers, one_word = mosaic.vector_type(2, kind), mosaic.vector_type(1, word)
        pairs = [
            vector.bitcast(two_numbers, vector.from_elements(one_word, [each])) for each in words
        ]
        return mosaic.tensor_core_array(pairs, shape, kind)

    result = plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA)
    return mosaic.inline(emit, [room], result)


def _own_words(room: Value, num_words: int) -> Iterator[tuple[int, int, Value]]:
    """Yields (first, count, pointer): where `count` of a thread's words, from `first` on, are."""
    # Neighbouring threads have neighbouring places, so that a warp accesses all banks.
    count = math.gcd(num_words, 4)
    for first in range(0, num_words, count):
        at = mosaic.add(mosaic.mul(mosaic.warpgroup_thread(), count), first * WARPGROUP)
        pointer = mosaic.pointer_at(room, at, mosaic.integer_type(32))
        yield first, count, pointer
