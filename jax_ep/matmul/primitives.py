"""Has the table of the grouped matmuls' backends, and makes primitives that are lowered to them.

A primitive is lowered to the fastest backend of the platform that the program is compiled for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.implementations import Implementations
from jax_ep.matmul import blocks, loop, pallas, tokamax, xla
from jax_ep.matmul.backend import Backend, Problem
from jax_ep.runtime import jax_compat
from jax_ep.runtime.jax_compat import (
    Primitive,
    Program,
    define_primitive,
    replicated_over_explicit_axes,
    result_type,
)

Implementation = Literal["pallas", "tokamax", "blocks", "xla", "loop"] | None
# The backends, in the order in which implementation=None tries them. The fastest comes first, by
# the times in the section "Grouped matmul" of pallas_kernels/TUNING.md.
IMPLEMENTATIONS = Implementations(
    (pallas.BACKEND, tokamax.BACKEND, blocks.BACKEND, loop.BACKEND, xla.BACKEND),
    layer_argument="matmul_implementation",
)
# The platforms for which primitives register a lowering. All other platforms share one lowering.
_PLATFORMS = ("cpu", "cuda")


def check_implementation(
    implementation: Implementation,
    rhs: Any,
    name: str = "implementation",
    matmul_dtype: Any = None,
) -> None:
    """Raises ValueError, with the reason, if the named implementation cannot multiply by `rhs`.

    `rhs` [L, H, F] is quantized to `matmul_dtype` first, if that is given. `name` is the caller's
    name of the argument `implementation`.
    """
    quantized = matmul_dtype is not None
    dtype = matmul_dtype if quantized else rhs.dtype
    problem = Problem(rhs.shape[1:], dtype, has_scales=quantized)
    IMPLEMENTATIONS.check(implementation, problem, name)


def select(
    implementation: Implementation,
    platform: str | None,
    matrix_shape: Sequence[int],
    dtype: Any,
    num_rows: Any,
    has_scales: bool = False,
) -> Backend:
    """Selects the backend of a grouped matmul, or raises ValueError if it cannot run there."""
    problem = Problem(matrix_shape, dtype, platform, num_rows, has_scales)
    return IMPLEMENTATIONS.select(implementation, problem)


def default_platform() -> str:
    """Returns the platform of JAX's default backend: "cuda" or "rocm" instead of JAX's "gpu"."""
    platform = jax.default_backend()
    if platform != "gpu":
        return platform
    return "rocm" if jax_compat.is_rocm(jax.devices()[0]) else "cuda"


def make_primitive(name: str, result_types: Any, compute: Any, **options: Any) -> Primitive:
    """Makes a JAX primitive with a list of results, which `jax.vmap` runs element after element.

    `result_types(*types, **params)` returns the results' `jax.ShapeDtypeStruct`s, and
    `compute(*operands, platform=..., **params)` the results. `options` are those of
    `define_primitive`.
    """

    def abstract_eval(lhs, *others, **params):
        types = result_types(lhs, *others, **params)
        return [result_type(lhs, each.shape, each.dtype) for each in types]

    def lower(program: Program, *operands, **params):
        platform, *further = program.platforms
        if further or platform not in _PLATFORMS:
            platform = "another platform"
        compute_here = functools.partial(compute, platform=platform)
        return program.lower(compute_here, *operands, **params)

    def one_by_one(operands, dims, **params):
        size = next(
            operand.shape[dim]
            for operand, dim in zip(operands, dims, strict=True)
            if dim is not None
        )
        stacked = [
            jnp.broadcast_to(operand, (size, *operand.shape))
            if dim is None
            else jnp.moveaxis(operand, dim, 0)
            for operand, dim in zip(operands, dims, strict=True)
        ]
        results = lax.map(lambda each: primitive.bind(*each, **params), tuple(stacked))
        return results, [0] * len(results)

    primitive = define_primitive(
        name,
        abstract_eval=abstract_eval,
        lower=lower,
        inline=lambda *operands, **params: compute(
            *operands, platform=default_platform(), **params
        ),
        batch=one_by_one,
        platforms=(None, *_PLATFORMS),
        **options,
    )
    return primitive


def bind(primitive: Primitive, *operands: jax.Array, **params: Any) -> Any:
    """Binds a primitive on any mesh, replicated over the mesh's Explicit axes."""
    bind_here = functools.partial(primitive.bind, **params)
    return replicated_over_explicit_axes(bind_here, *operands)
