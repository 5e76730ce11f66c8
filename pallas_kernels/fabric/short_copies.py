"""Copies of short rows into shared memory, in any number of whole 16 bytes.

Pallas' own copies from global memory are of multiples of 128 bytes, a share for each thread to
announce. These go 16 bytes to a thread, in groups that each thread counts for itself.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import ptx
from pallas_kernels.fabric.plan import LANES

_BYTES = 16


def begin(fabric: fb.Fabric, source: Any, destination: Any) -> None:
    """Starts a copy of a contiguous 1D part of this rank's global memory, in the open group."""
    if fabric.interpret:
        destination[...] = source[...]
        return
    num_pieces, rest = divmod(source.shape[0] * jnp.dtype(source.dtype).itemsize, _BYTES)
    if rest:
        raise ValueError(f"a copy must be of whole {_BYTES} bytes, but is of {source.shape}.")

    def emit(ctx: Any, source_ref: ir.Value, destination_ref: ir.Value) -> None:
        del ctx
        i8, i32 = ir.IntegerType.get_signless(8), ir.IntegerType.get_signless(32)
        thread = ptx.lane()
        pointers = [mgpu.utils.memref_ptr(ref) for ref in (destination_ref, source_ref)]
        for first in range(0, num_pieces, LANES):
            piece = arith.addi(thread, arith.constant(i32, first))
            there = arith.cmpi(arith.CmpIPredicate.ult, piece, arith.constant(i32, num_pieces))
            copying = scf.IfOp(there)
            with ir.InsertionPoint(copying.then_block):
                offset = arith.muli(piece, arith.constant(i32, _BYTES))
                llvm.inline_asm(
                    None,
                    [mgpu.utils.getelementptr(pointer, [offset], i8) for pointer in pointers],
                    f"cp.async.cg.shared.global [$0], [$1], {_BYTES};",
                    "l,l",
                    has_side_effects=True,
                )
                scf.yield_([])

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2)(emit)(source, destination)


def commit_group(fabric: fb.Fabric) -> None:
    """Closes the open group, which may be empty."""
    _all_threads(fabric, "cp.async.commit_group;")


def wait(fabric: fb.Fabric, allowed: int) -> None:
    """Waits for all but the last `allowed` groups; what they brought, bulk copies see too."""
    _all_threads(fabric, f"cp.async.wait_group {allowed};")
    plgpu.commit_smem()


def _all_threads(fabric: fb.Fabric, text: str) -> None:
    if fabric.interpret:
        return

    def emit(ctx: Any) -> None:
        del ctx
        llvm.inline_asm(None, [], text, "", has_side_effects=True)

    plgpu.inline_mgpu()(emit)()
