"""Rows to float8 with one float32 scale for every 128 values: for XLA, and for a warpgroup.

Both are the same arithmetic, step by step, so they agree bit for bit wherever XLA divides as IEEE
754 says. What the format keeps and what becomes of strange values is told in `jax_ep.wire`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_kernels import fabric as fb
from pallas_kernels.plan import LANES

BLOCK = 128  # values to a scale
ROW_MULTIPLE = 512  # columns: whole vectors of 16 bytes of scales, and a block for every warp
_MIN_SCALE = 2.0**-117  # so that no product of a value and a scale is subnormal
# A little less than 1 / 448, so that 448 · scale never rounds to more than the largest value.
_SCALE_OF_LARGEST = (1 - 2**-22) / 448
_WARP = 32
_VALUES = BLOCK // _WARP  # of a thread
_INFINITY = 0x7F800000  # as bits; NaNs are above it
_NAN = 0x7FC00000


def quantize(x: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """[..., H] floating -> (rows [..., H] of `dtype`, scales [..., H / 128] float32)."""
    blocks = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, BLOCK)
    finite = jnp.isfinite(blocks)
    largest = jnp.max(jnp.abs(jnp.where(finite, blocks, 0)), axis=-1)
    scales = jnp.maximum(largest * _SCALE_OF_LARGEST, _MIN_SCALE)
    values = jnp.where(finite, blocks * (1 / scales)[..., None], jnp.nan)
    return values.astype(dtype).reshape(x.shape), scales


def quantize_row(fabric: fb.Fabric, source: Any, values: Any, scales: Any) -> None:
    """The same for one row in shared memory, [H] of up to 4 bytes, by a whole warpgroup.

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
        thread = arith.remui(mgpu.utils.thread_idx(), _integer(LANES))
        warp, lane = (op(thread, _integer(_WARP)) for op in (arith.divui, arith.remui))
        is_first = arith.cmpi(arith.CmpIPredicate.eq, lane, _integer(0))
        warps = LANES // _WARP
        for i in range(source.shape[0] // BLOCK // warps):
            block = arith.addi(warp, _integer(i * warps))
            column = arith.addi(
                arith.muli(block, _integer(BLOCK)), arith.muli(lane, _integer(_VALUES))
            )
            source_at = mgpu.utils.getelementptr(pointers[0], [column], source_type)
            elements = llvm.load(
                ir.VectorType.get((_VALUES,), source_type),
                source_at,
                alignment=_VALUES * jnp.dtype(source.dtype).itemsize,
            )
            quantized, scale = _quantize_block(elements, source_type)
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
    scale = arith.mulf(arith.bitcast(f32, largest), _float(_SCALE_OF_LARGEST))
    scale = arith.maximumf(scale, _float(_MIN_SCALE))
    inverse = _asm(f32, "rcp.rn.f32 $0, $1;", "=f,f", scale)
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


def _asm(result: ir.Type, text: str, constraints: str, *operands: ir.Value) -> ir.Value:
    # The operand of `redux` makes it a rendezvous of the warp: no branch may come around it.
    return llvm.inline_asm(result, list(operands), text, constraints, has_side_effects=True)


def _integer(value: int) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    return arith.constant(i32, ir.IntegerAttr.get(i32, value))


def _float(value: float) -> ir.Value:
    f32 = ir.F32Type.get()
    return arith.constant(f32, ir.FloatAttr.get(f32, value))
