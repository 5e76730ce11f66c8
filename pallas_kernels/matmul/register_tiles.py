"""Moves tiles and columns between registers, shared memory and global memory.

The functions are called while a kernel is traced. `store_rows`, `store_rows_through` and
`store_column` store results of the tensor cores to global memory, `store_transposed` to shared
memory. `write_registers` and `read_registers` pass an array from one warpgroup to another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import float8, mosaic
from pallas_kernels.fabric.hardware import WARPGROUP
from pallas_kernels.fabric.mosaic import Array, Value, arith, llvm, vector


def store_rows(
    out: Any,
    values: jax.Array,
    top: jax.Array,
    left: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    layout: Any,
) -> None:
    """Stores rows [begin, end) of a tile of 16-bit floats from registers to global memory.

    No other row is written. Each thread stores its elements directly, without a detour through
    shared memory.

    Args:
      out: a reference to the 2D output.
      values: [rows, columns] in registers.
      top: the row of `out` for row 0 of `values`.
      left: the column of `out` for column 0 of `values`. The address of out[top, left] must be a
        multiple of the size of a thread's vectors.
      begin: the first row of `values` to store.
      end: the row after the last one to store.
      layout: the register layout of `values`. In it, each vector that a thread holds consists of
        neighbouring elements of a row.
    """

    def emit(out: Value, values: Array, *scalars: Array) -> None:
        top, left, begin, end = (mosaic.scalar(number) for number in scalars)
        word, width = mosaic.integer_type(32), mosaic.i64(mosaic.width_of(out))

        def wide(number: Value) -> Value:
            return arith.extui(mosaic.integer_type(64), number)

        for register, (row, column) in mosaic.placed_registers(values):
            inside = mosaic.within(row, begin, end)
            first = arith.muli(wide(arith.addi(top, row)), width)
            offset = arith.addi(first, wide(arith.addi(left, column)))
            count = mosaic.vector_length_of(register) // 2
            words = vector.bitcast(mosaic.vector_type(count, word), register)
            places = ", ".join(f"${i + 2}" for i in range(count))
            mosaic.asm(
                "{ .reg .pred p; setp.ne.b32 p, $1, 0; "
                f"@p st.global{'' if count == 1 else f'.v{count}'}.b32 [$0], {{{places}}}; }}",
                "l" + ",r" * (1 + count),
                llvm.ptrtoint(mosaic.integer_type(64), mosaic.pointer_at(out, offset)),
                arith.extui(word, inside),
                *(vector.extract(words, [], [i]) for i in range(count)),
            )

    numbers = [top, left, begin, end]
    layouts = [mosaic.REFERENCE, layout, *[mosaic.SCALAR] * len(numbers)]
    mosaic.inline(emit, [out, values, *numbers], layouts)


def store_rows_through(
    room: Any,
    out: Any,
    values: jax.Array,
    top: jax.Array,
    left: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    *,
    interpreted: bool,
) -> None:
    """Stores rows [begin, end) of an array from registers to global memory, through shared memory.

    No other row is written. In registers, each thread has pieces of several rows. Each warp puts
    its 16 rows into shared memory, and reads them such that 8 threads store 128 bytes of a row. The
    warps need not wait for each other. All threads of a warp must reach the call, even if `begin`
    and `end` exclude some of the warp's rows.

    Args:
      room: a reference to [64, columns] in shared memory, of `out`'s dtype. A row has 128 bytes.
      out: a reference to the 2D output in global memory.
      values: [64, columns] in the layout `plgpu.Layout.WGMMA`, of `out`'s dtype, or float32 if
        `out` is float8.
      top: the row of `out` for row 0 of `values`.
      left: the column of `out` for column 0 of `values`. The address of every stored row,
        out[top + i, left], must be a multiple of 16; so must the bytes of a row of `out`.
      begin: the first row of `values` to store.
      end: the row after the last one to store.
      interpreted: whether Pallas' GPU interpreter runs the kernel.
    """
    num_rows, columns = values.shape
    size = jnp.dtype(out.dtype).itemsize
    assert num_rows == 64 and columns * size == 128, (values.shape, out.dtype)
    if interpreted:
        room[...] = values.astype(room.dtype)
        whole = (begin <= 0) & (end >= num_rows)

        @pl.when(whole)
        def _():
            out[pl.ds(top, num_rows), pl.ds(left, columns)] = room[...]

        def one_row(row, _):
            @pl.when((row >= begin) & (row < end))
            def _():
                out[top + row, pl.ds(left, columns)] = room[row]

        pl.when(~whole)(lambda: lax.fori_loop(0, num_rows, one_row, None))
        return
    out_dtype = out.dtype

    def emit(room: Value, out: Value, values: Array, *scalars: Array) -> None:
        top, left, begin, end = (mosaic.scalar(number) for number in scalars)
        byte, word, wide = (mosaic.integer_type(bits) for bits in (8, 32, 64))
        line = mosaic.vector_type(4, word)

        def in_room(row: Value, column: Value) -> Value:
            # The row's units of 16 bytes are swizzled, so that the threads of a warp access
            # different banks of shared memory.
            unit = arith.xori(arith.shrui(column, mosaic.i32(4)), arith.andi(row, mosaic.i32(7)))
            offset = arith.ori(arith.shli(unit, mosaic.i32(4)), arith.andi(column, mosaic.i32(15)))
            offset = arith.addi(arith.muli(row, mosaic.i32(128)), offset)
            return mosaic.element_pointer(mosaic.pointer(room), offset, byte)

        for pair, (row, column) in mosaic.placed_registers(values):
            if size == 1:
                numbers = [vector.extract(pair, [], [i]) for i in range(2)]
                kind = float8.PTX_TYPES[jnp.dtype(out_dtype)]
                text = f"cvt.rn.satfinite.{kind}x2.f32 $0, $2, $1;"
                pair = mosaic.asm(text, "=h,f,f", *numbers, returns=mosaic.integer_type(16))
            at = in_room(row, arith.muli(column, mosaic.i32(size)))
            llvm.store(pair, at, alignment=2 * size)
        mosaic.asm("bar.warp.sync 0xffffffff;", "~{memory}")

        # A warp copies four rows at a time, and a thread 16 bytes of one of them. All copies are
        # loaded before the first is stored, and no branch is in between, so that a warp waits once.
        number = mosaic.warpgroup_thread()
        first = arith.shli(arith.shrui(number, mosaic.i32(5)), mosaic.i32(4))
        first = arith.addi(first, arith.andi(arith.shrui(number, mosaic.i32(3)), mosaic.i32(3)))
        column = arith.shli(arith.andi(number, mosaic.i32(7)), mosaic.i32(4))
        stride = mosaic.width_of(out) * size
        offset = arith.muli(arith.extui(wide, arith.addi(top, first)), mosaic.i64(stride))
        left_bytes = arith.addi(arith.muli(left, mosaic.i32(size)), column)
        start = arith.addi(offset, arith.extui(wide, left_bytes))
        start = llvm.ptrtoint(wide, mosaic.element_pointer(mosaic.pointer(out), start, byte))
        rows = [arith.addi(first, mosaic.i32(i)) for i in range(0, 16, 4)]
        lines = [llvm.load(line, in_room(row, column), alignment=16) for row in rows]
        for i, (row, loaded) in enumerate(zip(rows, lines, strict=True)):
            mosaic.asm(
                "{ .reg .pred p; setp.ne.b32 p, $1, 0;"
                " @p st.global.v4.b32 [$0], {$2, $3, $4, $5}; }",
                "l,r,r,r,r,r",
                arith.addi(start, mosaic.i64(4 * i * stride)),
                arith.extui(word, mosaic.within(row, begin, end)),
                *(vector.extract(loaded, [], [j]) for j in range(4)),
            )
        mosaic.asm("bar.warp.sync 0xffffffff;", "~{memory}")

    numbers = [top, left, begin, end]
    layouts = [*[mosaic.REFERENCE] * 2, plgpu.Layout.WGMMA, *[mosaic.SCALAR] * len(numbers)]
    mosaic.inline(emit, [room, out, values, *numbers], layouts)


def store_column(
    out: Any,
    values: jax.Array,
    top: jax.Array,
    column: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    *,
    to_row: bool = False,
    interpreted: bool,
) -> None:
    """Stores elements [begin, end) of a float32 vector in registers to a column of an array.

    For begin <= i < end, values[i] is stored to out[top + i, column]. Nothing else is written.

    Args:
      out: a reference to the 2D float32 output.
      values: [rows] float32 in registers, in the layout of a row reduction of WGMMA accumulators,
        `plgpu.Layout.WGMMA.reduce(1)`.
      top: the row of `out` for element 0 of `values`.
      column: the column of `out`.
      begin: the first element to store.
      end: the element after the last one to store.
      to_row: whether `out` is the transpose of such an array, so that the elements are stored to
        row `column`, from column `top` on.
      interpreted: whether Pallas' GPU interpreter runs the kernel.
    """
    if interpreted:

        def store(i: Any, _: Any) -> None:
            @pl.when((i >= begin) & (i < end))
            def _() -> None:
                out[(column, top + i) if to_row else (top + i, column)] = values[i]

        jax.lax.fori_loop(0, values.shape[0], store, None)
        return

    def emit(out: Value, values: Array, *scalars: Array) -> None:
        top, column, begin, end = (mosaic.scalar(number) for number in scalars)
        # Each element is held by four neighbouring threads. The first of them stores it.
        is_first = mosaic.equal(arith.andi(mosaic.warpgroup_thread(), mosaic.i32(3)), mosaic.i32(0))
        for register, (row,) in mosaic.placed_registers(values):
            inside = arith.andi(is_first, mosaic.within(row, begin, end))
            first, second = arith.addi(top, row), column
            if to_row:
                first, second = second, first
            offset = arith.addi(arith.muli(first, mosaic.i32(mosaic.width_of(out))), second)
            with mosaic.when(inside):
                llvm.store(vector.extract(register, [], [0]), mosaic.pointer_at(out, offset))

    numbers = [top, column, begin, end]
    layouts = [mosaic.REFERENCE, plgpu.Layout.WGMMA.reduce(1), *[mosaic.SCALAR] * len(numbers)]
    mosaic.inline(emit, [out, values, *numbers], layouts)


def load_column(ref: Any, first: jax.Array, count: int, last: int) -> jax.Array:
    """Loads floats from global memory, a number for each row of an array of the tensor cores.

    Args:
      ref: [N], a reference to global memory that the kernel does not write.
      first: the index of the first number.
      count: the number of numbers, a multiple of 64.
      last: the largest index; numbers past it are those at this index.

    Returns:
      [count] float32, in the layout `plgpu.Layout.WGMMA.reduce(1)`.
    """

    def emit(ref: Value, first: Array) -> Array:
        kind, own, values = mosaic.element_of(ref), mosaic.tensor_core_row(), []
        for tile in range(0, count, 64):
            for half in (0, 8):
                index = arith.addi(arith.addi(mosaic.scalar(first), own), mosaic.i32(tile + half))
                value = mosaic.element_at(ref, arith.minui(index, mosaic.i32(last)))
                is_wide = kind == mosaic.float_type()
                values.append(value if is_wide else arith.extf(mosaic.float_type(), value))
        return mosaic.tensor_core_rows(values, count, mosaic.float_type())

    result = plgpu.ShapeDtypeStruct((count,), jnp.float32, layout=plgpu.Layout.WGMMA.reduce(1))
    return mosaic.inline(emit, [ref, first], [mosaic.REFERENCE, mosaic.SCALAR], result)


def store_transposed(ref: Any, values: jax.Array) -> None:
    """Stores the transpose of an array [columns, rows] in registers to shared memory.

    The array has 16-bit floats, in the layout `plgpu.Layout.WGMMA` of tensor core accumulators.
    `ref` is [rows, columns], with a 128-byte swizzle.
    """
    ref.transpose((1, 0))[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)


def zero_rows_outside(
    ref: Any, begin: jax.Array, end: jax.Array, transforms: Sequence[Any]
) -> None:
    """Zeroes all rows of a tile in shared memory but the rows [begin, end).

    `ref` is the tile, [rows, columns] of 16-bit floats. `transforms` are its Mosaic transforms: it
    is stored as blocks of 8 rows of 128 bytes, with a 128-byte swizzle. The swizzle only permutes
    pieces of 16 bytes within a row of a block. The function zeroes whole rows, so it can ignore the
    swizzle.
    """
    rows, columns = ref.shape
    # A block is 8 rows by 64 columns (128 bytes). Each 8 rows of `ref` are stored as `blocks`
    # blocks, from left to right. A row of `ref` is cut into pieces of 16 bytes: 8 in each of these
    # blocks, `pieces` in total.
    blocks = columns // 64
    pieces = 8 * blocks
    begin = jnp.clip(begin, 0, rows)
    end = jnp.clip(end, begin, rows)

    def emit(ref: Value, first: Array, *scalars: Array) -> None:
        begin, end, count = (mosaic.scalar(number) for number in scalars)
        index = arith.addi(mosaic.scalar(first), mosaic.warpgroup_thread())
        row = arith.divui(index, mosaic.i32(pieces))
        piece = arith.remui(index, mosaic.i32(pieces))
        before = mosaic.below(row, begin)
        row = arith.select(before, row, arith.addi(row, arith.subi(end, begin)))
        block = arith.addi(
            arith.muli(arith.divui(row, mosaic.i32(8)), mosaic.i32(blocks)),
            arith.divui(piece, mosaic.i32(8)),
        )
        offset = arith.addi(
            arith.muli(block, mosaic.i32(1024)),
            arith.addi(
                arith.muli(arith.remui(row, mosaic.i32(8)), mosaic.i32(128)),
                arith.muli(arith.remui(piece, mosaic.i32(8)), mosaic.i32(16)),
            ),
        )
        mosaic.asm(
            "{ .reg .pred p; setp.ne.b32 p, $1, 0; @p st.shared.v4.b32 [$0], {$2, $2, $2, $2}; }",
            "r,r,r",
            arith.addi(mosaic.address(ref, 32), offset),
            arith.extui(mosaic.integer_type(32), mosaic.below(index, count)),
            mosaic.i32(0),
        )

    count = (rows - (end - begin)) * pieces

    def step(i: jax.Array, _: None) -> None:
        numbers = [i * WARPGROUP, begin, end, count]
        layouts = [plgpu.RefType(tuple(transforms)), *[mosaic.SCALAR] * len(numbers)]
        mosaic.inline(emit, [ref, *numbers], layouts)

    lax.fori_loop(0, lax.div(count + (WARPGROUP - 1), jnp.int32(WARPGROUP)), step, None)


def write_registers(room: Any, values: jax.Array) -> None:
    """Writes each thread's registers of an array to shared memory, for `read_registers`.

    Waits until all threads of the warpgroup have done so.

    The array is [64, columns] of 16-bit floats in the layout `plgpu.Layout.WGMMA`. `room` is a
    reference to shared memory of the same shape and dtype, in which elements get another order.
    """

    def emit(room: Value, values: Array) -> None:
        word = mosaic.integer_type(32)
        words = [
            vector.extract(vector.bitcast(mosaic.vector_type(1, word), pair), [], [0])
            for pair in mosaic.registers(values)
        ]
        for first, count, place in _own_words(room, len(words)):
            several = vector.from_elements(
                mosaic.vector_type(count, word), words[first : first + count]
            )
            llvm.store(several, place, alignment=4 * count)
        mosaic.asm("", "~{memory}")
        mosaic.barrier()

    mosaic.inline(emit, [room, values], [mosaic.REFERENCE, plgpu.Layout.WGMMA])


def read_registers(room: Any) -> jax.Array:
    """Returns the array that another warpgroup has written to `room` by `write_registers`.

    Waits until all threads of the warpgroup have read it. A thread reads the places to which it
    would write, so the warpgroup may then write to `room`.
    """
    shape, dtype = room.shape, jnp.dtype(room.dtype)

    def emit(room: Value) -> Array:
        word, kind = mosaic.integer_type(32), mosaic.element_of(room)
        words: list[Value] = []
        mosaic.asm("", "~{memory}")
        for _, count, place in _own_words(room, shape[0] * shape[1] // (2 * WARPGROUP)):
            several = llvm.load(mosaic.vector_type(count, word), place, alignment=4 * count)
            words += [vector.extract(several, [], [i]) for i in range(count)]
        # The words must have arrived before the barrier.
        words = mosaic.opaque(words)
        mosaic.barrier()
        of_two, one = mosaic.vector_type(2, kind), mosaic.vector_type(1, word)
        pairs = [vector.bitcast(of_two, vector.from_elements(one, [each])) for each in words]
        return mosaic.tensor_core_array(pairs, shape, kind)

    result = plgpu.ShapeDtypeStruct(shape, dtype, layout=plgpu.Layout.WGMMA)
    return mosaic.inline(emit, [room], [mosaic.REFERENCE], result)


def _own_words(room: Value, num_words: int) -> Iterator[tuple[int, int, Value]]:
    """Emits pointers to a thread's `num_words` words in shared memory, for up to 4 words each.

    Neighbouring threads have neighbouring places, so that a warp accesses all banks.

    Yields:
      (first, count, pointer): `pointer` is the place of the words `first` to `first` + `count` - 1.
    """
    count = math.gcd(num_words, 4)
    for first in range(0, num_words, count):
        own = arith.addi(
            arith.muli(mosaic.warpgroup_thread(), mosaic.i32(count)), mosaic.i32(first * WARPGROUP)
        )
        yield (
            first,
            count,
            mosaic.element_pointer(mosaic.pointer(room), own, mosaic.integer_type(32)),
        )
