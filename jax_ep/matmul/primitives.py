"""Has the table of the grouped matmuls' backends, and defines primitives that are lowered to them.

A primitive is lowered to the fastest backend of the platform that the program is compiled for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh

from jax_ep.implementations import Implementations
from jax_ep.matmul import blocks, loop, pallas, tokamax, xla
from jax_ep.matmul.backend import Backend, Problem
from jax_ep.runtime import jax_compat

Implementation = Literal["pallas", "tokamax", "blocks", "xla", "loop"] | None
# The backends, in the order in which implementation=None tries them. The fastest comes first, by
# the times in the section "Grouped matmul" of pallas_kernels/TUNING.md.
IMPLEMENTATIONS = Implementations(
    (pallas.BACKEND, tokamax.BACKEND, blocks.BACKEND, loop.BACKEND, xla.BACKEND),
    layer_argument="matmul_implementation",
)
# The platforms for which primitives register a lowering. All other platforms share one lowering.
_PLATFORMS = ("cpu", "cuda")
_OTHER_PLATFORM = "another platform"


def check_implementation(
    implementation: Implementation, rhs: Any, name: str = "implementation", matmul_dtype: Any = None
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
    """Selects the backend for a `Problem` with these properties."""
    problem = Problem(matrix_shape, dtype, platform, num_rows, has_scales)
    return IMPLEMENTATIONS.select(implementation, problem)


def default_platform() -> str:
    """Returns the platform of JAX's default backend: "cuda" or "rocm" instead of JAX's "gpu"."""
    platform = jax.default_backend()
    if platform != "gpu":
        return platform
    return "rocm" if jax_compat.is_rocm(jax.devices()[0]) else "cuda"


# The cache is bounded, since params may hold a new function in each call.
@functools.lru_cache(maxsize=4096)
def _result_types(compute, tree, types, **params):
    """Returns the types of the results for operands of these types, and the results' tree."""
    # These are the types that the default for another platform gives: it is XLA's.
    params |= {"implementation": None, "platform": _OTHER_PLATFORM}
    by_xla = functools.partial(compute, **params)
    # Types do not depend on a mesh, and not all functions can be traced over Explicit axes.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        results = jax.eval_shape(by_xla, *jax.tree.unflatten(tree, types))
    leaves, returned = jax.tree.flatten(results)
    return tuple(leaves), returned


def define(
    name: str, compute: Callable[..., Any], unused: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Defines a primitive, and returns the function (*operands, **params) that applies it.

    It computes `compute(*operands, platform=..., **params)`, whose keyword-only arguments are
    `platform` and `params`, among them `implementation`. All implementations return pytrees of the
    same shapes and dtypes. Further parameters of the primitive are `tree`, the structure of the
    operands, and `types`, those of the results. `jax.vmap` runs it element after element. `unused`
    is a rule as for `define_primitive`, which need not reduce the parameter `types`.
    """
    # Jitted, so that a program with many matmuls of one shape traces each kernel only once.
    arguments = inspect.signature(compute).parameters.values()
    static = [each.name for each in arguments if each.kind is each.KEYWORD_ONLY]
    compute = jax.jit(compute, static_argnames=static)

    def abstract_eval(first, *_, types, **__):
        # All results vary over the same mesh axes as the first operand.
        return [jax_compat.result_type(first, each.shape, each.dtype) for each in types]

    def run(platform, *leaves, tree, types, **params):
        operands = jax.tree.unflatten(tree, leaves)
        return jax.tree.leaves(compute(*operands, platform=platform, **params))

    def lower(program: jax_compat.Program, *leaves, **params):
        # The rule for all other platforms may also be that of a program for several platforms.
        platform, *further = program.platforms or (_OTHER_PLATFORM,)
        if further or platform not in _PLATFORMS:
            platform = _OTHER_PLATFORM
        return program.lower(functools.partial(run, platform), *leaves, **params)

    def batch(operands, dims, **params):
        results = jax_compat.one_by_one(functools.partial(primitive.bind, **params), operands, dims)
        return results, [0] * len(results)

    def without_unused(used, params):
        assert unused is not None
        reduced, kept, operands = unused(used, params)  # `kept` and `operands` are indices
        types = tuple(params["types"][i] for i in kept)
        return reduced | {"types": types}, kept, operands

    primitive = jax_compat.define_primitive(
        name,
        abstract_eval=abstract_eval,
        lower=lower,
        inline=lambda *leaves, **params: run(default_platform(), *leaves, **params),
        batch=batch,
        platforms=(None, *_PLATFORMS),
        unused=None if unused is None else without_unused,
    )

    def apply(*operands: Any, **params: Any) -> Any:
        leaves, tree = jax.tree.flatten(operands)
        leaf_types = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        types, returned = _result_types(compute, tree, leaf_types, **params)
        params |= {"tree": tree, "types": types}
        bind_leaves = functools.partial(primitive.bind, **params)
        results = jax_compat.replicated_over_explicit_axes(bind_leaves, *leaves)
        return jax.tree.unflatten(returned, results)

    return apply
