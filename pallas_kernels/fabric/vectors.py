"""Loads, stores and sums of 1D arrays in any rank's memory, up to 16 bytes at a time.

Arrays in registers have the layout `mosaic.strided`: each thread holds vectors of `elements`
neighbouring elements, for example 8 of bfloat16.

Each reference must start at a multiple of the vector's bytes, or of 16 if it has more. Pallas knows
the alignment only of this rank's own buffers, and would load a peer's memory element by element.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.hardware import VECTOR_BYTES, WARP, WARPGROUP
from pallas_kernels.fabric.mosaic import Value, arith, llvm, vector

# LLVM's address space of global memory.
GLOBAL_MEMORY = 1
# The number of sums that `partial_sums` computes: one for each warp of a warpgroup.
SUMS_OF_WARPGROUP = WARPGROUP // WARP


def load(ref: Any, elements: int) -> jax.Array:
    """Loads a 1D array, of a multiple of WARPGROUP * elements, from any rank's global memory."""
    is_integer = jnp.issubdtype(ref.dtype, jnp.integer)
    is_signed = bool(jnp.issubdtype(ref.dtype, jnp.signedinteger)) if is_integer else None

    def emit(memref: Value) -> Any:
        of_thread = mosaic.vector_type(elements, mosaic.element_of(memref))
        num_bytes = elements * jnp.dtype(ref.dtype).itemsize
        places = pointers(memref, num_bytes, ref.shape[0] // (WARPGROUP * elements))
        alignment = min(VECTOR_BYTES, num_bytes)
        loaded = [llvm.load(of_thread, pointer, alignment=alignment) for pointer in places]
        return mosaic.array_of(loaded, ref.shape, elements, is_signed)

    array = mosaic.in_registers(ref.shape, ref.dtype, elements)
    return mosaic.inline(emit, [ref], array)


def store(refs: Sequence[Any], value: jax.Array, elements: int) -> None:
    """Stores the first elements of `value` to each of `refs`, as many as these have.

    `value`, 1D in registers, is padded at most as by `load_each`. `refs` are contiguous arrays of
    one size in any rank's memory.
    """
    (size,) = refs[0].shape

    def emit(array: Any, *memrefs: Value) -> None:
        num_bytes = elements * jnp.dtype(value.dtype).itemsize
        registers = mosaic.registers(array)
        places = [pointers(memref, num_bytes, len(registers)) for memref in memrefs]
        for of_ref in places:
            for i, (register, pointer) in enumerate(zip(registers, of_ref, strict=True)):
                guard: Any = contextlib.nullcontext()
                # Past the end of the array, threads store nothing.
                if (i + 1) * WARPGROUP * elements > size:
                    limit = mosaic.i32(size // elements - i * WARPGROUP)
                    guard = mosaic.when(mosaic.below(mosaic.warpgroup_thread(), limit))
                with guard:
                    llvm.store(register, pointer, alignment=min(VECTOR_BYTES, num_bytes))

    mosaic.inline(emit, [(value, mosaic.strided(value.shape, elements)), *refs])


def load_each(
    refs: Sequence[Any],
    wanted: Sequence[jax.Array],
    elements: int,
    *,
    fill: float = 0.0,
    read_only: bool = False,
) -> list[jax.Array]:
    """Loads several 1D arrays of equal size and dtype from any rank's global memory.

    wanted[i], [] bool, is whether refs[i] is loaded; else its memory is not accessed, and the
    result is `fill`. There are no branches, so the loads of all arrays are in flight at once.
    `elements` must fill 16 bytes. `read_only` is whether no thread of any rank writes to the arrays
    while the kernel runs. Returns arrays padded by `fill` to a multiple of WARPGROUP * elements.
    """
    size, dtype = refs[0].shape[0], jnp.dtype(refs[0].dtype)
    num_vectors = -(-size // (WARPGROUP * elements))  # of each thread
    padded_shape = (num_vectors * WARPGROUP * elements,)
    fills = np.full(4 // dtype.itemsize, fill, dtype)
    word_of_fill = int.from_bytes(fills.tobytes(), "little")

    def emit(*args: Any) -> Any:
        flags, memrefs = args[: len(refs)], args[len(refs) :]
        of_thread = mosaic.vector_type(elements, mosaic.element_type(dtype))
        # For each of a thread's vectors, whether it is inside the array (i1). None: in all threads.
        inside = [
            None
            if (i + 1) * WARPGROUP * elements <= size
            else mosaic.below(mosaic.warpgroup_thread(), size // elements - i * WARPGROUP)
            for i in range(num_vectors)
        ]
        arrays = []
        for flag, memref in zip(flags, memrefs, strict=True):
            loaded = []
            places = pointers(memref, VECTOR_BYTES, num_vectors)
            for pointer, is_inside in zip(places, inside, strict=True):
                is_loaded = mosaic.scalar(flag)
                if is_inside is not None:
                    is_loaded = arith.select(is_inside, is_loaded, mosaic.i32(0))
                words = _load_if(is_loaded, pointer, word_of_fill, read_only)
                loaded.append(vector.bitcast(of_thread, words))
            arrays.append(mosaic.array_of(loaded, padded_shape, elements))
        return arrays

    flags = [each.astype(jnp.int32) for each in wanted]
    array = mosaic.in_registers(padded_shape, dtype, elements)
    return list(mosaic.inline(emit, [*flags, *refs], [array] * len(refs)))


def _load_if(is_loaded: Value, pointer: Value, otherwise: int, read_only: bool) -> Value:
    """Emits a load of four words if `is_loaded` (i32) is not 0; else each is `otherwise`."""
    # Callers read a read-only array once, so L1 need not keep it.
    instruction = "ld.global.nc.L1::no_allocate" if read_only else "ld.global"
    text = (
        "{ .reg .pred p; setp.ne.b32 p, $5, 0;"
        f" mov.b32 $0, {otherwise}; mov.b32 $1, {otherwise};"
        f" mov.b32 $2, {otherwise}; mov.b32 $3, {otherwise};"
        f" @p {instruction}.v4.b32 {{$0, $1, $2, $3}}, [$4]; }}"
    )
    i32 = mosaic.integer_type(32)
    four_words = mosaic.struct_type([i32] * 4)
    # By `&`, results do not share a register with the pointer, which is read later.
    words = mosaic.asm(text, "=&r,=&r,=&r,=&r,l,r", pointer, is_loaded, returns=four_words)
    each = [llvm.extractvalue(i32, words, [i]) for i in range(4)]
    return vector.from_elements(mosaic.vector_type(4, i32), each)


def times(value: jax.Array, factor: jax.Array, elements: int) -> jax.Array:
    """Multiplies a float32 array in registers by a float32 scalar, [], and rounds each product."""

    # The compiler could fuse a product by the operator `*`, and a sum that adds it, to an FMA,
    # which does not round the product.
    def emit(array: Any, factor: Any) -> Any:
        f32, by = mosaic.float_type(), mosaic.scalar(factor)
        vectors = []
        for register in mosaic.registers(array):
            numbers = [vector.extract(register, [], [i]) for i in range(elements)]
            products = [
                llvm.inline_asm(f32, [number, by], "mul.rn.f32 $0, $1, $2;", "=f,f,f")
                for number in numbers
            ]
            vectors.append(vector.from_elements(register.type, products))
        return mosaic.array_of(vectors, value.shape, elements)

    array = mosaic.in_registers(value.shape, jnp.float32, elements)
    return mosaic.inline(emit, [(value, mosaic.strided(value.shape, elements)), factor], array)


def constant(size: int, value: float, elements: int) -> jax.Array:
    array = jnp.full((size,), value, jnp.float32)
    return plgpu.layout_cast(array, mosaic.strided((size,), elements))


def rotate(parts: Sequence[jax.Array], first: jax.Array, elements: int) -> list[jax.Array]:
    """Rotates a list of N arrays in registers: parts[i] becomes element (first + i) % N."""
    # `first`, [] int32 from 0 to N - 1, is known only on the GPU, so it cannot index the list. For
    # each bit of it, the list is rotated by that power of two, and the result used if it is set.
    parts = list(parts)
    distance = 1
    while distance < len(parts):
        rotated = [parts[i - distance] for i in range(len(parts))]
        parts = _select((first & distance) != 0, rotated, parts, elements)
        distance *= 2
    return parts


def _select(
    predicate: jax.Array, yes: Sequence[jax.Array], no: Sequence[jax.Array], elements: int
) -> list[jax.Array]:
    """Returns the arrays `yes` if `predicate` is true, else `no`; all have one shape and dtype."""
    shape, dtype = no[0].shape, no[0].dtype

    def emit(condition: Any, *arrays: Any) -> Any:
        is_true = mosaic.scalar(condition)
        results = []
        for a, b in zip(arrays[: len(yes)], arrays[len(yes) :], strict=True):
            registers = zip(mosaic.registers(a), mosaic.registers(b), strict=True)
            selected = [arith.select(is_true, of_a, of_b) for of_a, of_b in registers]
            results.append(mosaic.array_of(selected, shape, elements, b.is_signed))
        return results

    operands = [(each, mosaic.strided(shape, elements)) for each in (*yes, *no)]
    arrays = [mosaic.in_registers(shape, dtype, elements)] * len(no)
    return mosaic.inline(emit, [predicate, *operands], arrays)


def partial_sums(value: jax.Array, ref: Any, elements: int) -> None:
    """Writes the sum of warp i's elements of a float32 array to ref[i] in shared memory."""

    def emit(memref: Value, array: Any) -> None:
        parts = [
            vector.extract(register, [], [i])
            for register in mosaic.registers(array)
            for i in range(elements)
        ]
        # A tree of sums: few of them wait for others.
        while len(parts) > 1:
            odd = parts[len(parts) // 2 * 2 :]
            parts = [arith.addf(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
        total = mosaic.warp_sum(parts[0], WARP)
        thread = mosaic.warpgroup_thread()
        lane_of_warp = arith.remui(thread, mosaic.i32(WARP))
        with mosaic.when(mosaic.equal(lane_of_warp, 0)):
            warp = arith.divui(thread, mosaic.i32(WARP))
            base = mosaic.pointer(memref)
            llvm.store(total, mosaic.element_pointer(base, warp, mosaic.float_type()))

    mosaic.inline(emit, [ref, (value, mosaic.strided(value.shape, elements))])


def pointers(memref: Value, num_bytes: int, count: int) -> list[Value]:
    """Emits pointers to `count` vectors, of `num_bytes` each, of an array, for each thread."""
    # Thread t has the vectors t, t + WARPGROUP and so on.
    thread = mosaic.warpgroup_thread()
    offset = mosaic.widen(mosaic.mul(thread, num_bytes))
    base = mosaic.add(mosaic.address(memref), offset)
    pointer = llvm.PointerType.get(GLOBAL_MEMORY)
    return [
        llvm.inttoptr(pointer, mosaic.add(base, i * WARPGROUP * num_bytes)) for i in range(count)
    ]
