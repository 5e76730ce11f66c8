"""Loads, stores and sums of vectors of up to 16 bytes, one instruction each, in any rank's memory.

Pallas knows the alignment of this rank's own buffers only, and loads a peer's memory element by
element. Here the caller promises the alignment: each part of memory starts at a multiple of the
vector's bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.mosaic import Value, arith, llvm, vector
from pallas_kernels.fabric.plan import LANES, VECTOR_BYTES

_WARP = 32
_WARPS = LANES // _WARP
_GLOBAL_MEMORY = 1  # address space


def load(fabric: fb.Ranks, ref: Any, elements: int) -> jax.Array:
    """Loads a contiguous 1D part of any rank's global memory, `elements` neighbours to a thread."""
    if fabric.interpret:
        return fb.load(fabric, ref, elements)
    is_integer = jnp.issubdtype(ref.dtype, jnp.integer)
    is_signed = bool(jnp.issubdtype(ref.dtype, jnp.signedinteger)) if is_integer else None

    def emit(context: Any, memref: Value) -> Any:
        del context
        of_thread = mosaic.vector_type(elements, mosaic.element_of(memref))
        num_bytes = elements * jnp.dtype(ref.dtype).itemsize
        pointers = _pointers(memref, num_bytes, ref.shape[0] // (LANES * elements))
        alignment = min(VECTOR_BYTES, num_bytes)
        loaded = [llvm.load(of_thread, pointer, alignment=alignment) for pointer in pointers]
        return mosaic.array_of(loaded, ref.shape, elements, is_signed)

    array = mosaic.in_registers(ref.shape, ref.dtype, elements)
    return mosaic.inline(emit, [ref], [mosaic.REFERENCE], array)


def store(fabric: fb.Ranks, refs: Sequence[Any], value: jax.Array, elements: int) -> None:
    """Stores an array in registers to each of several contiguous 1D parts of global memory.

    A thread holds `elements` neighbours. All addresses are computed before the first store.
    """
    if fabric.interpret:
        for ref in refs:
            ref[...] = value
        return

    def emit(context: Any, array: Any, *memrefs: Value) -> None:
        del context
        num_bytes = elements * jnp.dtype(value.dtype).itemsize
        registers = mosaic.registers(array)
        pointers = [_pointers(memref, num_bytes, len(registers)) for memref in memrefs]
        for of_ref in pointers:
            for register, pointer in zip(registers, of_ref, strict=True):
                llvm.store(register, pointer, alignment=min(VECTOR_BYTES, num_bytes))

    layouts = [mosaic.strided(value.shape, elements), *[mosaic.REFERENCE] * len(refs)]
    mosaic.inline(emit, [value, *refs], layouts)


def rotate(
    fabric: fb.Ranks, parts: Sequence[jax.Array], first: jax.Array, elements: int
) -> list[jax.Array]:
    """Rotates a list of N arrays: result[(first + i) % N] is parts[i], with 0 <= first < N.

    `first` is a scalar of the kernel; `elements` is how many neighbours a thread holds.
    """
    parts, bit = list(parts), 1
    while bit < len(parts):
        turned = [parts[i - bit] for i in range(len(parts))]
        parts = _select(fabric, (first & bit) != 0, turned, parts, elements)
        bit *= 2
    return parts


def _select(
    fabric: fb.Ranks,
    predicate: jax.Array,
    yes: Sequence[jax.Array],
    no: Sequence[jax.Array],
    elements: int,
) -> list[jax.Array]:
    """Selects one of two lists of arrays, without a branch."""
    if fabric.interpret:
        return [jnp.where(predicate, a, b) for a, b in zip(yes, no, strict=True)]
    shape, dtype = no[0].shape, no[0].dtype

    def emit(context: Any, choice: Any, *arrays: Any) -> Any:
        del context
        choice, half = mosaic.scalar(choice), len(arrays) // 2
        return [
            mosaic.array_of(
                [
                    arith.select(choice, x, y)
                    for x, y in zip(mosaic.registers(a), mosaic.registers(b), strict=True)
                ],
                shape,
                elements,
                b.is_signed,
            )
            for a, b in zip(arrays[:half], arrays[half:], strict=True)
        ]

    layouts = [mosaic.SCALAR, *[mosaic.strided(shape, elements)] * (2 * len(no))]
    arrays = [mosaic.in_registers(shape, dtype, elements)] * len(no)
    return mosaic.inline(emit, [predicate, *yes, *no], layouts, arrays)


SUMS_OF_WARPGROUP = _WARPS


def partial_sums(fabric: fb.Ranks, value: jax.Array, ref: Any, elements: int) -> None:
    """Sums a float32 vector by warps: writes SUMS_OF_WARPGROUP partial sums to shared memory."""
    if fabric.interpret:
        ref[...] = jnp.sum(value.reshape(_WARPS, -1), axis=1)
        return

    def emit(context: Any, memref: Value, array: Any) -> None:
        del context
        parts = [
            vector.extract(register, [], [i])
            for register in mosaic.registers(array)
            for i in range(elements)
        ]
        while len(parts) > 1:
            odd = parts[len(parts) // 2 * 2 :]
            parts = [arith.addf(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
        total = mosaic.warp_sum(parts[0], _WARP)
        thread = mosaic.lane()
        lane_of_warp = arith.remui(thread, mosaic.i32(_WARP))
        with mosaic.when(mosaic.equal(lane_of_warp, mosaic.i32(0))):
            warp = arith.divui(thread, mosaic.i32(_WARP))
            base = mosaic.pointer(memref)
            llvm.store(total, mosaic.element_pointer(base, warp, mosaic.float_type()))

    layouts = [mosaic.REFERENCE, mosaic.strided(value.shape, elements)]
    mosaic.inline(emit, [ref, value], layouts)


def store_total(fabric: fb.Fabric, sums: Any, ref: Any, index: jax.Array) -> None:
    """Adds the SUMS_OF_WARPGROUP partial sums of a vector, in order, and stores them to ref[index].

    `sums` is the shared memory that `partial_sums` wrote; the caller puts a barrier between the two
    functions. `ref` may be any rank's global memory.
    """
    if fabric.interpret:
        ref[index] = functools.reduce(jnp.add, [sums[i] for i in range(_WARPS)])
        return

    def emit(context: Any, sums_ref: Value, to: Value) -> None:
        del context
        f32 = mosaic.float_type()
        with mosaic.when(mosaic.equal(mosaic.lane(), mosaic.i32(0))):
            base = mosaic.pointer(sums_ref)
            parts = [
                llvm.load(f32, mosaic.element_pointer(base, mosaic.i32(i), f32))
                for i in range(_WARPS)
            ]
            llvm.store(functools.reduce(arith.addf, parts), mosaic.pointer(to))

    mosaic.inline(emit, [sums, ref.at[pl.ds(index, 1)]], [mosaic.REFERENCE] * 2)


def _pointers(memref: Value, num_bytes: int, count: int) -> list[Value]:
    """Emits the addresses of this thread's `count` vectors, of `num_bytes` each, in a memref."""
    thread = mosaic.lane()
    offset = arith.extui(mosaic.integer_type(64), arith.muli(thread, mosaic.i32(num_bytes)))
    base = arith.addi(mosaic.address(memref), offset)
    pointer = llvm.PointerType.get(_GLOBAL_MEMORY)
    return [
        llvm.inttoptr(pointer, arith.addi(base, mosaic.i64(i * LANES * num_bytes)))
        for i in range(count)
    ]
