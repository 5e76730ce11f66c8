"""The names of JAX and Mosaic that kernels need, most of them private or unstable.

If the installed JAX lacks one, the kernels can still be imported: `unavailable_reason` says what is
missing, and tracing a kernel raises NotImplementedError.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from typing import Any

import jax

# Maps a module of JAX to those of its names that the kernels use.
REQUIRED = {
    "jax.experimental.mosaic.gpu": (
        "FragmentedArray.splat WGMMA_LAYOUT WGMMA_ROW_LAYOUT WGStridedFragLayout"
    ).split(),
    "jax.experimental.mosaic.gpu.launch_context": (
        "LaunchContext.to_remote Scratch._find_alloc_load_and_device_ptr Scratch.finalize_size"
    ).split(),
    "jax.experimental.mosaic.gpu.utils": (
        "bitwidth dtype_to_ir_type getelementptr memref_ptr ptr_as_memref thread_idx "
        "warp_tree_reduce warpgroup_barrier"
    ).split(),
    "jax.experimental.pallas": "cdiv ds kernel next_power_of_2 run_scoped when".split(),
    "jax.experimental.pallas.mosaic_gpu": (
        "ACC Barrier CompilerParams Layout.TILED Layout.WGMMA Layout.WGMMA_TRANSPOSED "
        "Layout.WG_SPLAT Layout.WG_STRIDED LoweringSemantics.Lane OOBFillMode.PROMISE_IN_BOUNDS "
        "RefType SMEM ShapeDtypeStruct SwizzleTransform Tiling TilingTransform WarpMesh "
        "barrier_arrive barrier_wait broadcasted_iota commit_smem commit_smem_to_gmem_group "
        "copy_gmem_to_smem copy_smem_to_gmem inline_mgpu kernel layout_cast load remote_ref "
        "wait_smem_to_gmem wgmma wgmma_wait"
    ).split(),
    "jaxlib.mlir.dialects.arith": (
        "CmpIPredicate addf addi andi bitcast cmpi constant divui extf extui index_cast maximumf "
        "maxsi maxui minsi minui mulf muli ori remui select shli shrsi shrui subi truncf trunci "
        "xori"
    ).split(),
    "jaxlib.mlir.dialects.gpu": "Dimension barrier block_id printf".split(),
    "jaxlib.mlir.dialects.llvm": (
        "PointerType addrspacecast bitcast extractelement extractvalue ArrayType inline_asm "
        "intr_fma inttoptr load ptrtoint store"
    ).split(),
    "jaxlib.mlir.dialects.scf": "ForOp IfOp WhileOp condition yield_".split(),
    "jaxlib.mlir.dialects.vector": "bitcast extract from_elements insert".split(),
    "jaxlib.mlir.ir": (
        "F32Type FloatAttr InsertionPoint IntegerType MemRefType StridedLayoutAttr Type TypeAttr "
        "VectorType"
    ).split(),
    "jaxlib.mlir.passmanager": "PassManager".split(),
}


def module(path: str) -> Any:
    """Imports the module at `path`; None if the installed JAX lacks it."""
    try:
        return importlib.import_module(path)
    except ImportError:
        return None


def _attribute(owner: Any, path: str) -> Any:
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        for name in path.split("."):
            owner = getattr(owner, name, None)
    return owner


@functools.cache
def unavailable_reason() -> str | None:
    """Returns why the kernels cannot run with the installed JAX, or None if they can."""
    missing = []
    for path, names in REQUIRED.items():
        found = module(path)
        if found is None:
            missing.append(path)
        else:
            missing += [f"{path}.{name}" for name in names if _attribute(found, name) is None]
    return f"JAX {jax.__version__} lacks {', '.join(missing)}" if missing else None
