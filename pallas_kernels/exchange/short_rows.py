"""Stores rows of scales in this rank's memory, by the threads of a warpgroup.

A bulk copy takes the hardware about as long for a row of 64 bytes as for one of 2 KB. So rows of
scales are stored by the threads of a warpgroup, 16 bytes each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.hardware import VECTOR_BYTES, WARPGROUP
from pallas_kernels.fabric.mosaic import Value, arith, llvm


def store_each(fabric: fb.Fabric, source: Any, ref: Any, rows: Sequence[jax.Array]) -> None:
    """Stores a row from shared memory to several rows of an array in this rank's global memory.

    Args:
      fabric: the ranks of the kernel.
      source: the row, [n] of a 32-bit dtype in shared memory; n is a multiple of 4. The caller
        needs a barrier before it writes to `source` again.
      ref: [R, n], the array in global memory.
      rows: the rows of `ref` to which `source` is stored, scalar int32; NOWHERE for none.
    """
    if fabric.interpret:
        for row in rows:

            @pl.when(row >= 0)
            def _(row=row) -> None:
                ref[row] = source[...]

        return
    num_vectors = _vectors_of(ref)

    def emit(source_ref: Value, out: Value, *places: Any) -> None:
        from_row, to_rows = mosaic.pointer(source_ref), mosaic.pointer(out)
        for first in range(0, len(rows) * num_vectors, WARPGROUP):
            unit = arith.addi(mosaic.warpgroup_thread(), mosaic.i32(first))
            number, part = _divided(unit, num_vectors)
            row = mosaic.i32(fb.NOWHERE)
            for i, place in enumerate(places):
                is_own = mosaic.equal(number, mosaic.i32(i))
                row = arith.select(is_own, mosaic.scalar(place), row)
            with mosaic.when(_is_row(row)):
                _store(to_rows, _position(row, num_vectors, part), _load(from_row, part))

    layouts = [mosaic.REFERENCE] * 2 + [mosaic.SCALAR] * len(rows)
    mosaic.inline(emit, [source, ref, *rows], layouts)


def copy_listed(fabric: fb.Fabric, ref: Any, lists: Any, count: jax.Array) -> None:
    """Copies rows of an array in this rank's global memory to other rows of the array.

    Args:
      fabric: the ranks of the kernel.
      ref: [R, n] of a 32-bit dtype, the array in global memory; n is a multiple of 4.
      lists: [most, K] int32 in shared memory: K rows of `ref` each, or NOWHERE in place of a row.
        The first row of a list is copied to its other rows.
      count: how many of the lists to take, the first ones, a scalar int32.
    """
    top_k = lists.shape[1]
    if fabric.interpret:

        def copy(i: jax.Array, _: None) -> None:
            first = jnp.int32(fb.NOWHERE)
            for choice in range(top_k):
                row = lists[i, choice]

                @pl.when((first >= 0) & (row >= 0))
                def _(first=first, row=row) -> None:
                    ref[row] = ref[first]

                first = jnp.where(first >= 0, first, row)

        lax.fori_loop(0, count, copy, None)
        return
    num_vectors = _vectors_of(ref)

    def emit(array: Value, lists_ref: Value, number: Any) -> None:
        rows, words, i32 = mosaic.pointer(array), mosaic.pointer(lists_ref), mosaic.integer_type(32)
        total = arith.muli(mosaic.scalar(number), mosaic.i32(num_vectors))
        with mosaic.loop(mosaic.warpgroup_thread(), total, WARPGROUP) as unit:
            entry, part = _divided(unit, num_vectors)
            start = arith.muli(entry, mosaic.i32(top_k))
            listed = [
                llvm.load(
                    i32, mosaic.element_pointer(words, arith.addi(start, mosaic.i32(choice)), i32)
                )
                for choice in range(top_k)
            ]
            # The first row of the list, and for each further choice whether a row precedes it.
            first, preceded = listed[0], []
            for row in listed[1:]:
                preceded.append(_is_row(first))
                first = arith.select(preceded[-1], first, row)
            with mosaic.when(_is_row(first)):
                value = _load(rows, _position(first, num_vectors, part))
                for row, has_source in zip(listed[1:], preceded, strict=True):
                    with mosaic.when(arith.andi(has_source, _is_row(row))):
                        _store(rows, _position(row, num_vectors, part), value)

    layouts = [mosaic.REFERENCE] * 2 + [mosaic.SCALAR]
    mosaic.inline(emit, [ref, lists, count], layouts)


def _vectors_of(ref: Any) -> int:
    """Returns the number of vectors of 16 bytes in a row of `ref`, [R, n] of a 32-bit dtype."""
    num_vectors, rest = divmod(ref.shape[1] * jnp.dtype(ref.dtype).itemsize, VECTOR_BYTES)
    if rest:
        raise ValueError(
            f"a row must have a multiple of {VECTOR_BYTES} bytes, but ref is {ref.dtype} of shape "
            f"{ref.shape}."
        )
    return num_vectors


def _divided(unit: Value, num_vectors: int) -> tuple[Value, Value]:
    """Emits which row or list a unit of work belongs to, and which vector of the row it is."""
    return tuple(op(unit, mosaic.i32(num_vectors)) for op in (arith.divui, arith.remui))


def _is_row(row: Value) -> Value:
    return arith.cmpi(arith.CmpIPredicate.sge, row, mosaic.i32(0))


def _position(row: Value, num_vectors: int, part: Value) -> Value:
    return arith.addi(arith.muli(row, mosaic.i32(num_vectors)), part)


def _vector() -> Any:
    return mosaic.vector_type(VECTOR_BYTES // 4, mosaic.integer_type(32))


def _load(base: Value, position: Value) -> Value:
    place = mosaic.element_pointer(base, position, _vector())
    return llvm.load(_vector(), place, alignment=VECTOR_BYTES)


def _store(base: Value, position: Value, value: Value) -> None:
    place = mosaic.element_pointer(base, position, _vector())
    llvm.store(value, place, alignment=VECTOR_BYTES)
