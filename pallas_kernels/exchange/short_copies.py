"""Copies rows of any multiple of 16 bytes from global to shared memory, by `cp.async`.

An asynchronous copy of Pallas itself must be a multiple of 128 bytes: a barrier is told how many
bytes to expect, and each of a warpgroup's 128 threads announces an equal share of them. With
`cp.async`, each thread copies 16 bytes at a time, and waits for groups of its own copies.
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
    """Starts an asynchronous copy from this rank's global memory to shared memory.

    `source` and `destination` are contiguous 1D references of the same size, a multiple of 16
    bytes. The copy joins the current group of copies, which `commit_group` closes.

    Raises:
      ValueError: the size is no multiple of 16 bytes.
    """
    if fabric.interpret:
        destination[...] = source[...]
        return
    num_pieces, rest = divmod(source.shape[0] * jnp.dtype(source.dtype).itemsize, VECTOR_BYTES)
    if rest:
        raise ValueError(
            f"source must have a multiple of {VECTOR_BYTES} bytes, but is {source.dtype} of shape "
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
    """Closes the current group of asynchronous copies, so that `wait` can wait for it.

    The group consists of the copies begun since the previous call; it may be empty.
    """
    _all_threads(fabric, "cp.async.commit_group;")


def wait(fabric: fb.Fabric, allowed: int) -> None:
    """Waits for all groups of copies except the last `allowed`, which may still be under way.

    Every thread waits for its own copies, and then for the warpgroup's other threads. The copied
    data may then be the source of bulk (TMA) copies out of shared memory.
    """
    _all_threads(fabric, f"cp.async.wait_group {allowed};")
    plgpu.commit_smem()


def _all_threads(fabric: fb.Fabric, text: str) -> None:
    if not fabric.interpret:
        mosaic.inline(lambda: mosaic.asm(text), [], [])
