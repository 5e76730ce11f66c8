"""Builds kernels, and prepares their MLIR modules for Mosaic's compiler."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic, requirements
from pallas_kernels.fabric.mosaic import ir, llvm

passmanager = requirements.module("jaxlib.mlir.passmanager")

# Mosaic's compiler begins with MLIR's canonicalizer, which visits a block from top to bottom and
# takes seconds for loops that carry hundreds of registers. From bottom to top it takes hundredths
# of a second, and leaves Mosaic's own run nothing to change.
_SIMPLIFY = "cse", "canonicalize{top-down=false}"


def kernel(
    body: Callable[..., None],
    *,
    num_blocks: int | None = None,
    num_warpgroups: int | None = None,
    interpret: Any = None,
    auto_barriers: bool = True,
    **options: Any,
) -> Callable[..., Any]:
    """Returns a function of arrays that runs `body` as a kernel, as `plgpu.kernel` does.

    Simplifies the kernel before Mosaic compiles it: Mosaic then takes less than half of the time,
    and compiles a kernel that is part of several programs only once. The grid is `num_blocks`, or
    if None the one in `options`; a block has `num_warpgroups`, or if None one. `auto_barriers` is
    whether Pallas adds barriers around accesses of shared memory. `interpret` has the options of
    Pallas' GPU interpreter, or is None on a GPU. Raises NotImplementedError if this JAX lacks a
    name that kernels need.
    """
    if reason := requirements.unavailable_reason():
        raise NotImplementedError(f"the kernels need Mosaic, and {reason}.")

    def run(*refs: Any, **scratch: Any) -> None:
        if not interpret:
            _simplify_once_lowered()
        body(*refs, **scratch)

    if num_blocks is not None:
        options |= dict(grid=(num_blocks,), grid_names=("block",))
    if num_warpgroups is not None:
        # What Pallas calls a thread is a warpgroup.
        options |= dict(num_threads=num_warpgroups, thread_name="warpgroup")
    parameters = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=not auto_barriers
    )
    return plgpu.kernel(run, compiler_params=parameters, interpret=interpret, **options)


def _simplify_once_lowered() -> None:
    # Mosaic has no hook that runs when a kernel is lowered. Its last step is the method
    # `Scratch.finalize_size`, which emits the host code that makes TMA descriptors. So replace this
    # method, for this kernel alone, by one that then simplifies the kernel.
    # `inline_mgpu` gives `run` the launch context of the kernel while the kernel is lowered.
    def run(context: Any) -> None:
        scratch, finish = context.scratch, context.scratch.finalize_size

        def finish_and_simplify() -> None:
            num_bytes = scratch.next_offset  # of the descriptors, 0 if there are none
            # Find their allocation, by its only use, before `finish` adds other uses.
            found = scratch._find_alloc_load_and_device_ptr() if num_bytes else None
            finish()
            if found:
                allocation, load, _ = found
                _copy_by_words(allocation, load, num_bytes)
            _simplify(context.module)

        scratch.finalize_size = finish_and_simplify

    plgpu.inline_mgpu()(run)()


def _copy_by_words(allocation: Any, load: Any, num_bytes: int) -> None:
    """Changes the type of the TMA descriptors from an array of bytes to one of 64-bit words."""
    # Host code copies the descriptors, an argument of the kernel, element by element. LLVM's time
    # grows faster than the number of elements.
    words = llvm.ArrayType.get(mosaic.integer_type(64), num_bytes // 8)
    allocation.elem_type = ir.TypeAttr.get(words)
    load.result.set_type(words)


def _simplify(module: Any) -> None:
    """Simplifies a kernel's MLIR module, and makes the modules of equal kernels equal."""
    passes, attributes = list(_SIMPLIFY), module.operation.attributes
    # Mosaic compiles equal modules once, but modules of equal kernels differ in source locations
    # and in the name of dump files, which has a counter. Keep both if Mosaic is to dump modules.
    if not any(name.startswith("MOSAIC_GPU_DUMP_") for name in os.environ):
        passes.append("strip-debuginfo")
        attributes["mosaic_gpu.dump_basename"] = attributes["sym_name"]
    pipeline = passmanager.PassManager.parse(f"builtin.module({','.join(passes)})", module.context)
    # Skip the verification after each pass: Mosaic verifies the module later.
    pipeline.enable_verifier(False)
    pipeline.run(module.operation)


# Mosaic starts the program `ptxas`, to ask for its version, whenever a kernel converts a bool to an
# integer: about 100 times a kernel, for 7 ms each time.
def _ask_ptxas_once() -> None:
    bindings = getattr(requirements.module("jax._src.lib.mosaic_gpu"), "_mosaic_gpu_ext", None)
    name = "_get_ptxas_isa_version"
    ask = getattr(bindings, name, None)
    # A function that `functools.cache` made has `cache_info`.
    if ask is not None and not hasattr(ask, "cache_info"):
        setattr(bindings, name, functools.cache(ask))


_ask_ptxas_once()
