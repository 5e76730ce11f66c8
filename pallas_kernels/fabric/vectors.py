"""Vectors of up to 16 bytes between registers and any rank's memory, one instruction each.

Pallas knows the alignment of this rank's own buffers only: what it loads from a peer it loads
element by element. Here the caller vouches for it: a part of memory starts at a multiple of the
vector.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import ptx
from pallas_kernels.fabric.plan import LANES, VECTOR_BYTES

_WARP = 32
_WARPS = LANES // _WARP
_GLOBAL_MEMORY = 1  # address space


def load(fabric: fb.Ranks, ref: Any, elements: int) -> jax.Array:
    """A contiguous 1D part of global memory, `elements` neighbours to a thread."""
    if fabric.interpret:
        return fb.load(fabric, ref, elements)
    layout = plgpu.Layout.WG_STRIDED(ref.shape, vec_size=elements)
    is_integer = jnp.issubdtype(ref.dtype, jnp.integer)
    is_signed = bool(jnp.issubdtype(ref.dtype, jnp.signedinteger)) if is_integer else None

    def emit(ctx: Any, memref: ir.Value) -> Any:
        del ctx
        of_thread = ir.VectorType.get((elements,), ir.MemRefType(memref.type).element_type)
        num_bytes = elements * jnp.dtype(ref.dtype).itemsize
        pointers = _pointers(memref, num_bytes, ref.shape[0] // (LANES * elements))
        alignment = min(VECTOR_BYTES, num_bytes)
        registers = [llvm.load(of_thread, pointer, alignment=alignment) for pointer in pointers]
        return mgpu.FragmentedArray(
            _registers=np.array(registers, dtype=object),
            _layout=mgpu.WGStridedFragLayout(tuple(ref.shape), elements),
            _is_signed=is_signed,
        )

    array = plgpu.ShapeDtypeStruct(ref.shape, ref.dtype, layout=layout)
    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=array)(emit)(ref)


def store(fabric: fb.Ranks, refs: Sequence[Any], value: jax.Array, elements: int) -> None:
    """The same way back, into each of the parts; all are located before the first is written."""
    if fabric.interpret:
        for ref in refs:
            ref[...] = value
        return
    layout = plgpu.Layout.WG_STRIDED(value.shape, vec_size=elements)

    def emit(ctx: Any, array: Any, *memrefs: ir.Value) -> None:
        del ctx
        num_bytes = elements * jnp.dtype(value.dtype).itemsize
        pointers = [_pointers(memref, num_bytes, array.registers.size) for memref in memrefs]
        for of_ref in pointers:
            for register, pointer in zip(array.registers.flat, of_ref, strict=True):
                llvm.store(register, pointer, alignment=min(VECTOR_BYTES, num_bytes))

    arg_types = (layout, *(plgpu.RefType(),) * len(refs))
    plgpu.inline_mgpu(arg_types=arg_types)(emit)(value, *refs)


def rotate(
    fabric: fb.Ranks, parts: Sequence[jax.Array], first: jax.Array, elements: int
) -> list[jax.Array]:
    """parts[i] becomes the one at (first + i) % N, for a scalar 0 <= first < N."""
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
    """One of two lists of vectors, register by register as they are."""
    if fabric.interpret:
        return [jnp.where(predicate, a, b) for a, b in zip(yes, no, strict=True)]
    shape, dtype = no[0].shape, no[0].dtype
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=elements)

    def emit(ctx: Any, choice: Any, *arrays: Any) -> Any:
        del ctx
        i1 = choice.registers.item()
        half = len(arrays) // 2
        return [
            mgpu.FragmentedArray(
                _registers=np.array(
                    [
                        arith.select(i1, x, y)
                        for x, y in zip(a.registers.flat, b.registers.flat, strict=True)
                    ],
                    dtype=object,
                ),
                _layout=b.layout,
                _is_signed=b.is_signed,
            )
            for a, b in zip(arrays[:half], arrays[half:], strict=True)
        ]

    arrays = [plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)] * len(no)
    arg_types = (plgpu.Layout.WG_SPLAT(()), *(layout,) * (2 * len(no)))
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=arrays)(emit)(predicate, *yes, *no)


SUMS_OF_WARPGROUP = _WARPS


def partial_sums(fabric: fb.Fabric, value: jax.Array, ref: Any, elements: int) -> None:
    """Writes float32 sums of a vector's parts, `SUMS_OF_WARPGROUP` of them, to shared memory."""
    if fabric.interpret:
        ref[...] = jnp.sum(value.reshape(_WARPS, -1), axis=1)
        return
    layout = plgpu.Layout.WG_STRIDED(value.shape, vec_size=elements)

    def emit(ctx: Any, memref: ir.Value, array: Any) -> None:
        del ctx
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        parts = [
            vector.extract(register, [], [i])
            for register in array.registers.flat
            for i in range(elements)
        ]
        while len(parts) > 1:
            odd = parts[len(parts) // 2 * 2 :]
            parts = [arith.addf(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
        total = mgpu.utils.warp_tree_reduce(parts[0], arith.addf, _WARP)
        thread = ptx.lane()
        lane = arith.remui(thread, arith.constant(i32, _WARP))
        first = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, lane, arith.constant(i32, 0)))
        with ir.InsertionPoint(first.then_block):
            warp = arith.divui(thread, arith.constant(i32, _WARP))
            base = mgpu.utils.memref_ptr(memref)
            llvm.store(total, mgpu.utils.getelementptr(base, [warp], f32))
            scf.yield_([])

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))(emit)(ref, value)


def store_total(fabric: fb.Fabric, sums: Any, ref: Any, index: jax.Array) -> None:
    """ref[index] = the total of what `partial_sums` wrote, added in order, on any rank.

    Between the two all threads come to a barrier. One of them stores.
    """
    if fabric.interpret:
        ref[index] = functools.reduce(jnp.add, [sums[i] for i in range(_WARPS)])
        return

    def emit(ctx: Any, sums_ref: ir.Value, to: ir.Value) -> None:
        del ctx
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        thread = ptx.lane()
        first = scf.IfOp(arith.cmpi(arith.CmpIPredicate.eq, thread, arith.constant(i32, 0)))
        with ir.InsertionPoint(first.then_block):
            base = mgpu.utils.memref_ptr(sums_ref)
            parts = [
                llvm.load(f32, mgpu.utils.getelementptr(base, [arith.constant(i32, i)], f32))
                for i in range(_WARPS)
            ]
            llvm.store(functools.reduce(arith.addf, parts), mgpu.utils.memref_ptr(to))
            scf.yield_([])

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2)(emit)(sums, ref.at[pl.ds(index, 1)])


def _pointers(memref: ir.Value, num_bytes: int, count: int) -> list[ir.Value]:
    """Where this thread's vectors of `num_bytes` are."""
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    thread = ptx.lane()
    offset = arith.extui(i64, arith.muli(thread, arith.constant(i32, num_bytes)))
    base = arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(memref)), offset)
    pointer = llvm.PointerType.get(_GLOBAL_MEMORY)
    return [
        llvm.inttoptr(pointer, arith.addi(base, arith.constant(i64, i * LANES * num_bytes)))
        for i in range(count)
    ]
