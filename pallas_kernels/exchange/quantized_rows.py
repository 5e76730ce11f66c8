"""Rows to float8 and back within a kernel, by a whole warpgroup: see `quantize` for the format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_kernels.exchange.quantize import (
    BLOCK,
    MIN_SCALE,
    SCALE_OF_LARGEST,
    dequantize,
    quantize,
)
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import ptx
from pallas_kernels.fabric.plan import LANES

_WARP = 32
_VALUES = BLOCK // _WARP  # of a thread
_INFINITY = 0x7F800000  # as bits; NaNs are above it
_NAN = 0x7FC00000
_AT_ONCE = 7  # blocks of a warp whose steps overlap
_GLOBAL_MEMORY = 1  # address space


def quantize_row(fabric: fb.Fabric, source: Any, values: Any, scales: Any) -> None:
    """Quantizes one row in shared memory, [H] of up to 4 bytes, by a whole warpgroup.

    H is a multiple of `ROW_MULTIPLE`. A warp takes a block at a time, a thread 4 of its values.
    Whoever reads `values` and `scales`, or writes to `source`, needs a barrier first.
    """
    if fabric.interpret:
        values[...], scales[...] = quantize(source[...], values.dtype)
        return
    if values.dtype != jnp.float8_e4m3fn:
        raise NotImplementedError(f"rows can be sent as float8_e4m3fn, not as {values.dtype}.")

    def emit(ctx: Any, source_ref: ir.Value, values_ref: ir.Value, scales_ref: ir.Value) -> None:
        del ctx
        f32 = ir.F32Type.get()
        source_type = ir.MemRefType(source_ref.type).element_type
        pointers = [mgpu.utils.memref_ptr(ref) for ref in (source_ref, values_ref, scales_ref)]
        thread = ptx.lane()
        warp, lane = (op(thread, _integer(_WARP)) for op in (arith.divui, arith.remui))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, lane, _integer(0))
        warps = LANES // _WARP
        num_blocks = source.shape[0] // BLOCK // warps

        def load(i: int) -> tuple[ir.Value, ir.Value, ir.Value]:
            block = arith.addi(warp, _integer(i * warps))
            column = arith.addi(
                arith.muli(block, _integer(BLOCK)), arith.muli(lane, _integer(_VALUES))
            )
            elements = llvm.load(
                ir.VectorType.get((_VALUES,), source_type),
                mgpu.utils.getelementptr(pointers[0], [column], source_type),
                alignment=_VALUES * jnp.dtype(source.dtype).itemsize,
            )
            return block, column, elements

        for first in range(0, num_blocks, _AT_ONCE):
            loaded = [load(i) for i in range(first, min(first + _AT_ONCE, num_blocks))]
            results = [_quantize_block(elements, source_type) for _, _, elements in loaded]
            for (block, column, _), (quantized, scale) in zip(loaded, results, strict=True):
                values_at = mgpu.utils.getelementptr(
                    pointers[1], [column], ir.IntegerType.get_signless(8)
                )
                llvm.store(quantized, values_at, alignment=_VALUES)
                if_first = scf.IfOp(is_first)
                with ir.InsertionPoint(if_first.then_block):
                    llvm.store(scale, mgpu.utils.getelementptr(pointers[2], [block], f32))
                    scf.yield_([])

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)(emit)(source, values, scales)


def _quantize_block(elements: ir.Value, element_type: ir.Type) -> tuple[ir.Value, ir.Value]:
    """A thread's 4 elements of its warp's block -> their 4 float8 as int32, the block's scale."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    wide, finite = [], []
    largest = _integer(0)  # as bits: those of floats that are not negative are in the floats' order
    for i in range(_VALUES):
        element = llvm.extractelement(elements, _integer(i))
        wide.append(element if element_type == f32 else arith.extf(f32, element))
        magnitude = arith.andi(arith.bitcast(i32, wide[i]), _integer(0x7FFFFFFF))
        finite.append(arith.cmpi(arith.CmpIPredicate.ult, magnitude, _integer(_INFINITY)))
        largest = arith.maxui(largest, arith.select(finite[i], magnitude, _integer(0)))
    largest = _asm(i32, "redux.sync.max.u32 $0, $1, 0xffffffff;", "=r,r", largest)
    scale = arith.mulf(arith.bitcast(f32, largest), _float(SCALE_OF_LARGEST))
    scale = arith.maximumf(scale, _float(MIN_SCALE))
    inverse = _reciprocal(scale)
    nan = arith.bitcast(f32, _integer(_NAN))
    scaled = [
        arith.select(ok, arith.mulf(value, inverse), nan)
        for value, ok in zip(wide, finite, strict=True)
    ]
    quantized = _asm(
        i32,
        "{ .reg .b16 low, high;"
        " cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;"
        " mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f",
        *scaled,
    )
    return quantized, scale


def _reciprocal(scale: ir.Value) -> ir.Value:
    """1 / scale, rounded as IEEE 754 says.

    These are the steps of `rcp.rn` where nothing is subnormal, without its branch for the rest, so
    that blocks overlap.
    """
    return _asm(
        ir.F32Type.get(),
        "{ .reg .f32 near, error;"
        " rcp.approx.ftz.f32 near, $1;"
        " neg.f32 error, near;"
        " fma.rn.f32 error, $1, error, 0f3F800000;"
        " fma.rn.f32 $0, near, error, near; }",
        "=f,f",
        scale,
    )


def add_rows(
    fabric: fb.Fabric,
    values: Sequence[Any],
    scales: Sequence[Any],
    sent: Sequence[jax.Array],
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """The sum of dequantized rows in this rank's global memory, in their order: [H] of `dtype`.

    values[i] is [H] and scales[i] is [H / 128]; H is a multiple of `ROW_MULTIPLE`. A row that was
    not `sent`, a scalar bool, counts as zeros, whatever is in its place. Sums are float32 until
    they are rounded at the end; none is -0.0.
    """
    (hidden,) = values[0].shape
    if fabric.interpret:
        total = jnp.zeros((hidden,), jnp.float32)
        for row, of_blocks, was_sent in zip(values, scales, sent, strict=True):
            row = dequantize(row[...], of_blocks[...], jnp.float32)
            total = total + jnp.where(was_sent, row, 0)
        return total.astype(dtype)
    elements = next(size for size in (16, 8, 4) if hidden % (LANES * size) == 0)
    num_rows = len(values)

    def emit(ctx: Any, *args: Any) -> Any:
        del ctx
        taken = [
            arith.cmpi(arith.CmpIPredicate.ne, flag.registers.item(), _integer(0))
            for flag in args[:num_rows]
        ]
        rows, of_blocks = args[num_rows : 2 * num_rows], args[2 * num_rows :]
        num_vectors = hidden // (LANES * elements)
        thread = ptx.lane()
        first = arith.muli(thread, _integer(elements))

        def load(i: int) -> list[tuple[list[ir.Value], ir.Value]]:
            column = arith.addi(first, _integer(i * LANES * elements))
            return [
                _load_quantized(row, of_row, column, elements, ok)
                for row, of_row, ok in zip(rows, of_blocks, taken, strict=True)
            ]

        totals, ahead = [], load(0)
        for i in range(num_vectors):  # the next vectors are under way while these are added
            loaded, ahead = ahead, load(i + 1) if i + 1 < num_vectors else []
            totals.append(_rounded(_add_vectors(loaded, elements), dtype))
        return mgpu.FragmentedArray(
            _registers=np.array(totals, dtype=object),
            _layout=mgpu.WGStridedFragLayout((hidden,), elements),
            _is_signed=None,
        )

    layout = plgpu.Layout.WG_STRIDED((hidden,), vec_size=elements)
    arg_types = (plgpu.Layout.WG_SPLAT(()),) * num_rows + (plgpu.RefType(),) * (2 * num_rows)
    array = plgpu.ShapeDtypeStruct((hidden,), dtype, layout=layout)
    flags = [was_sent.astype(jnp.int32) for was_sent in sent]
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=array)(emit)(*flags, *values, *scales)


def _load_quantized(
    values: ir.Value, scales: ir.Value, column: ir.Value, elements: int, taken: ir.Value
) -> tuple[list[ir.Value], ir.Value]:
    """A thread's vector of float8, in words of 4, and its scale; zeros unless they are taken."""
    i8, i32, f32 = (*(ir.IntegerType.get_signless(bits) for bits in (8, 32)), ir.F32Type.get())
    block = arith.divui(column, _integer(BLOCK))
    pointer = llvm.PointerType.get(_GLOBAL_MEMORY)
    values_at, scale_at = (
        mgpu.utils.getelementptr(
            llvm.addrspacecast(pointer, mgpu.utils.memref_ptr(ref)), [index], element
        )
        for ref, index, element in ((values, column, i8), (scales, block, f32))
    )
    words = llvm.load(ir.VectorType.get((elements // 4,), i32), values_at, alignment=elements)
    of_words = [llvm.extractelement(words, _integer(i)) for i in range(elements // 4)]
    scale = llvm.load(f32, scale_at)
    return (
        [arith.select(taken, word, _integer(0)) for word in of_words],
        arith.select(taken, scale, _float(0.0)),
    )


def _add_vectors(loaded: Sequence[tuple[list[ir.Value], ir.Value]], elements: int) -> ir.Value:
    """The sum of vectors of float8, each times its scale, from 0 on."""
    f32 = ir.F32Type.get()
    total = [_float(0.0)] * elements
    for words, scale in loaded:
        row = [value for word in words for value in _widened(word)]
        total = [arith.addf(t, arith.mulf(v, scale)) for t, v in zip(total, row, strict=True)]
    vector = llvm.mlir_undef(ir.VectorType.get((elements,), f32))
    for i, value in enumerate(total):
        vector = llvm.insertelement(vector, value, _integer(i))
    return vector


def _rounded(vector: ir.Value, dtype: jax.typing.DTypeLike) -> ir.Value:
    """A vector of float32, in a floating type of that size or a smaller one."""
    element_type = mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype))
    vector_type = ir.VectorType.get(ir.VectorType(vector.type).shape, element_type)
    return vector if vector.type == vector_type else arith.truncf(vector_type, vector)


def _widened(word: ir.Value) -> list[ir.Value]:
    """4 float8_e4m3fn in an int32 -> 4 float32."""
    i16, i32, f32 = (*(ir.IntegerType.get_signless(bits) for bits in (16, 32)), ir.F32Type.get())
    halves = ir.VectorType.get((2,), ir.F16Type.get())
    wide = []
    for shift in (0, 16):
        pair = arith.trunci(i16, arith.shrui(word, _integer(shift)))
        pair = llvm.inline_asm(i32, [pair], "cvt.rn.f16x2.e4m3x2 $0, $1;", "=r,h")
        pair = llvm.bitcast(halves, pair)
        wide += [arith.extf(f32, llvm.extractelement(pair, _integer(i))) for i in range(2)]
    return wide


def _asm(result: ir.Type, text: str, constraints: str, *operands: ir.Value) -> ir.Value:
    # The operand of `redux` makes it a rendezvous of the warp: no branch may come around it.
    return llvm.inline_asm(result, list(operands), text, constraints, has_side_effects=True)


def _integer(value: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def _float(value: float) -> ir.Value:
    f32 = ir.F32Type.get()
    return arith.constant(f32, ir.FloatAttr.get(f32, value))
