"""Copies of short rows from global to shared memory, of any multiple of 16 bytes.

Pallas' own copies must be multiples of 128 bytes, since each of the 128 threads announces an equal
share. Here each thread copies 16 bytes at a time with `cp.async`, and waits for its own copies by
groups.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.hardware import LANES, VECTOR_BYTES
from pallas_kernels.fabric.mosaic import Value, arith


def begin(fabric: fb.Fabric, source: Any, destination: Any) -> None:
    """Starts a copy of a contiguous 1D part of this rank's global memory to shared memory.

    The copy joins the open group, which `commit_group` closes.
    """
    if fabric.interpret:
        destination[...] = source[...]
        return
    num_pieces, rest = divmod(source.shape[0] * jnp.dtype(source.dtype).itemsize, VECTOR_BYTES)
    if rest:
        raise ValueError(
            f"a copy must be of whole {VECTOR_BYTES} bytes, but source is {source.dtype} of shape "
            f"{source.shape}."
        )

    def emit(source_ref: Value, destination_ref: Value) -> None:
        byte, thread = mosaic.integer_type(8), mosaic.lane()
        bases = [mosaic.pointer(ref) for ref in (destination_ref, source_ref)]
        for first in range(0, num_pieces, LANES):
            piece = arith.addi(thread, mosaic.i32(first))
            with mosaic.when(mosaic.below(piece, mosaic.i32(num_pieces))):
                offset = arith.muli(piece, mosaic.i32(VECTOR_BYTES))
                mosaic.asm(
                    f"cp.async.cg.shared.global [$0], [$1], {VECTOR_BYTES};",
                    "l,l",
                    *(mosaic.element_pointer(base, offset, byte) for base in bases),
                )

    mosaic.inline(emit, [source, destination], [mosaic.REFERENCE] * 2)


def commit_group(fabric: fb.Fabric) -> None:
    """Closes the open group of copies, which may be empty."""
    _all_threads(fabric, "cp.async.commit_group;")


def wait(fabric: fb.Fabric, allowed: int) -> None:
    """Waits for all groups of copies but the last `allowed`, and shows their data to bulk copies.

    Every thread waits for its own part of each group, and then for the warpgroup's other threads.
    """
    _all_threads(fabric, f"cp.async.wait_group {allowed};")
    plgpu.commit_smem()


def _all_threads(fabric: fb.Fabric, text: str) -> None:
    if not fabric.interpret:
        mosaic.inline(lambda: mosaic.asm(text), [], [])
