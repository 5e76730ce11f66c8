"""The JAX primitives of the collectives: shapes, varying-axes types, and which algorithm serves.

Five primitives, all without effects, all called inside `shard_map` over `axis_name`, N ranks:

  ep_all_reduce           x [...]                               -> [...]
  ep_all_gather           x [n, ...]                            -> [N * n, ...]
  ep_reduce_scatter       x [N * n, ...]                        -> [n, ...]
  ep_all_to_all           x [N * n, ...]                        -> [N * n, ...]
  ep_all_reduce_rms_norm  x [..., H], residual [..., H], scale  -> normalized, new_residual

The first four are linear and know their transposes. Each primitive lowers to the Pallas kernels
where they serve and, if no algorithm is named, where the table says that they are faster; and to
XLA's collectives everywhere else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.collectives import pallas as pallas_collectives
from jax_ep.collectives import table
from jax_ep.collectives.pallas import Transport
from jax_ep.runtime import availability, jax_compat, multicast, symmetric_memory
from jax_ep.runtime.jax_compat import Primitive, Program, result_type, to_varying, varying_axes

AxisName = tuple[str, ...]
Algorithm = str | None

FUSED = (
    "fused",
    "fused_one_shot_ll",
    "fused_two_shot_ll",
    "fused_one_shot",
    "fused_two_shot",
)
# "xla" and None are served everywhere, "multimem" by JAX's own kernels, the others by ours.
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("one_shot_ll", "two_shot_ll", "one_shot", "two_shot", "xla", "multimem"),
    "all_gather": ("ll", "direct", "xla"),
    "reduce_scatter": ("ll", "direct", "xla"),
    "all_to_all": ("ll", "direct", "xla"),
    "all_reduce_rms_norm": (*FUSED, "unfused", "xla"),
}


def xla(op: str, x: jax.Array, axis_name: AxisName) -> jax.Array:
    """The collective as XLA offers it."""
    if op == "all_reduce":
        return lax.psum(x, axis_name)
    if op == "all_gather":
        return lax.all_gather(x, axis_name, axis=0, tiled=True)
    if op == "reduce_scatter":
        return lax.psum_scatter(x, axis_name, scatter_dimension=0, tiled=True)
    return lax.all_to_all(x, axis_name, 0, 0, tiled=True)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, dtype: Any) -> jax.Array:
    """Normalizes the last axis by its root mean square, in float32, and scales it."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    x = x.astype(wide)
    factor = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * factor * scale.astype(wide)).astype(dtype)


def add(total: jax.Array, residual: jax.Array) -> jax.Array:
    """The sum in float32, in residual's dtype."""
    wide = jnp.promote_types(residual.dtype, jnp.float32)
    return (total.astype(wide) + residual.astype(wide)).astype(residual.dtype)


def unavailable_reason(
    op: str, algorithm: str, x: Any, num_ranks: int, here: str | None
) -> str | None:
    """Why the algorithm cannot serve x, or None if it can; "xla" and "unfused" always can.

    `here`: why no kernel can serve, if that is known.
    """
    if algorithm in ("xla", "unfused"):
        return None
    if here is not None:
        return here
    if reason := pallas_collectives.payload_unavailable_reason(
        op, algorithm, x.shape, x.dtype, num_ranks
    ):
        return reason
    if reason := availability.tracing_unavailable_reason():
        return reason
    if jax.default_backend() != "gpu":  # this lowers for a machine that is not here
        return None
    if algorithm == "multimem":
        return multicast.unavailable_reason()
    if reason := availability.unavailable_reason():
        return reason
    if pallas_collectives.is_ll(algorithm):
        regions = symmetric_memory.here()
        return regions if isinstance(regions, str) else None
    return None


def choose(
    op: str,
    algorithm: Algorithm,
    x: Any,
    num_ranks: int,
    here: str | None,
    ll: str | None = None,
) -> str:
    """The algorithm that serves x; ValueError, with the reason, if it was named and cannot.

    `ll`: why none by LL can serve, if that is known.
    """

    def reason(name: str) -> str | None:
        of_ll = ll if pallas_collectives.is_ll(name) else None
        return of_ll or unavailable_reason(op, name, x, num_ranks, here)

    if algorithm is not None:
        if why := reason(algorithm):
            raise ValueError(f'{op}: algorithm="{algorithm}" cannot serve here: {why}.')
        return algorithm
    if jax.default_backend() != "gpu":
        return "xla"  # what is fast on a machine that is not here was not measured
    capability = getattr(jax.devices()[0], "compute_capability", None)
    num_bytes = x.size * x.dtype.itemsize * (num_ranks if op == "all_gather" else 1)
    return table.lookup(
        op, num_ranks, num_bytes, capability, serves=lambda name: reason(name) is None
    )


def _ll_unavailable_reason(program: Program) -> str | None:
    """Why nothing by LL can serve in the program that is being lowered, if that is seen from it."""
    if program.for_export:
        return "its program holds addresses of this process, and is to be exported"
    mesh = program.mesh
    if jax.default_backend() == "gpu" and mesh is not None and _is_here(mesh):
        if reason := jax_compat.devices_unavailable_reason():
            return reason
        if isinstance(mesh, jax.sharding.AbstractMesh):
            return (
                "it needs to know the order of the GPUs, and shard_map was given an abstract mesh"
            )
    return None


def _is_here(mesh: Any) -> bool:
    """Whether a mesh may be of the devices of this machine: a larger one is for another."""
    return mesh.size <= jax.device_count()


def lowered_for_devices(x: jax.Array) -> jax.Array:
    """x, in a program that is lowered anew for other GPUs of this machine.

    LL knows the GPUs by number when a program is lowered.
    """
    if jax.default_backend() == "gpu" and _is_here(jax.sharding.get_abstract_mesh()):
        return jax_compat.lowered_anew_for_other_devices(x)
    return x


# What each primitive computes.


def _run(transport: Transport, op: str, x: jax.Array) -> list[jax.Array]:
    if transport.algorithm == "xla":
        return [xla(op, x, transport.axis_name)]
    if transport.algorithm == "multimem":
        return [_multimem(x, transport.axis_name)]
    return [getattr(pallas_collectives, op)(x, transport)]


def _run_rms_norm(
    transport: Transport,
    op: str,
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
) -> list[jax.Array]:
    if transport.algorithm in FUSED:
        return list(getattr(pallas_collectives, op)(x, residual, scale, transport, eps=eps))
    (total,) = _run(transport, "all_reduce", x)
    new_residual = add(total, residual)
    return [rms_norm(new_residual, scale, eps, x.dtype), new_residual]


def _multimem(x: jax.Array, axis_name: AxisName) -> jax.Array:
    """JAX's own kernels: the switch sums float32 shards, and broadcasts them rounded."""
    from jax.experimental.pallas.ops.gpu import all_gather_mgpu, reduce_scatter_mgpu

    num_ranks, num_blocks = lax.axis_size(axis_name), 32
    multiple = num_ranks * 128 * 8
    flat = jnp.pad(x.reshape(-1), (0, -x.size % multiple))
    shard = reduce_scatter_mgpu.reduce_scatter(
        flat.astype(jnp.float32), axis_name=axis_name, num_blocks=num_blocks
    )
    out = all_gather_mgpu.all_gather(
        shard.astype(x.dtype), axis_name=axis_name, num_blocks=num_blocks
    )
    return out[: x.size].reshape(x.shape)


# What each primitive returns: shape and the axes it varies over, from those of x.


def _like_x(x: Any, num_ranks: int, axis_name: AxisName) -> Any:
    return result_type(x, x.shape)


def _reduced(x: Any, num_ranks: int, axis_name: AxisName) -> Any:
    return result_type(x, x.shape, varying=varying_axes(x) - frozenset(axis_name))


def _gathered(x: Any, num_ranks: int, axis_name: AxisName) -> Any:
    return result_type(x, (num_ranks * x.shape[0], *x.shape[1:]))


def _scattered(x: Any, num_ranks: int, axis_name: AxisName) -> Any:
    return result_type(x, (x.shape[0] // num_ranks, *x.shape[1:]))


def _primitive(op: str, run: Callable[..., list[jax.Array]], **rules: Any) -> Primitive:
    def lower(program: Program, x, *operands, axis_name, algorithm, num_ranks, **params):
        here = availability.program_unavailable_reason(program, axis_name)
        aval, ll = program.operand_types[0], _ll_unavailable_reason(program)
        serving = choose(op, algorithm, aval, num_ranks, here, ll)
        if serving == "unfused":
            serving = choose("all_reduce", None, aval, num_ranks, here, ll)
        transport = Transport(serving, axis_name, program.devices)
        function = functools.partial(run, transport, op)
        return program.lower_by_position(function, x, *operands, **params)

    def inline(x, *operands, axis_name, algorithm, num_ranks, **params):
        here = availability.jax_unavailable_reason()
        choose(op, algorithm, x, num_ranks, here)  # raises if it was named
        return run(Transport("xla", axis_name), op, x, *operands, **params)

    return jax_compat.define_primitive(f"ep_{op}", lower=lower, inline=inline, **rules)


def _linear_primitive(
    op: str, result: Callable[..., Any], transpose: Callable[..., jax.Array]
) -> Primitive:
    def abstract_eval(x, *, axis_name, algorithm, num_ranks):
        return [result(x, num_ranks, axis_name)]

    def transpose_rule(cotangents, x, **params):
        return [transpose(cotangents[0], x.aval, **params)]

    def batch(operands, axes, **params):
        # The leading axis is the one that is gathered and scattered: a batch goes last.
        (x,), (axis,) = operands, axes
        return primitive.bind(jnp.moveaxis(x, axis, -1), **params), [x.ndim - 1]

    primitive = _primitive(
        op, _run, abstract_eval=abstract_eval, transpose=transpose_rule, batch=batch
    )
    return primitive


def _transpose_all_reduce(g, x, *, axis_name, **params):
    """lax.psum's: where types vary, one cotangent serves all ranks; else each rank has its own."""
    if varying := varying_axes(x):
        return to_varying(g, varying - varying_axes(g))
    return ep_all_reduce_p.bind(g, axis_name=axis_name, **params)[0]


def _transpose_to(name: str) -> Callable[..., jax.Array]:
    def transpose(g, x, **params):
        del x
        return globals()[name].bind(g, **params)[0]

    return transpose


ep_all_reduce_p = _linear_primitive("all_reduce", _reduced, _transpose_all_reduce)
ep_all_gather_p = _linear_primitive("all_gather", _gathered, _transpose_to("ep_reduce_scatter_p"))
ep_reduce_scatter_p = _linear_primitive(
    "reduce_scatter", _scattered, _transpose_to("ep_all_gather_p")
)
ep_all_to_all_p = _linear_primitive("all_to_all", _like_x, _transpose_to("ep_all_to_all_p"))
PRIMITIVES = {
    "all_reduce": ep_all_reduce_p,
    "all_gather": ep_all_gather_p,
    "reduce_scatter": ep_reduce_scatter_p,
    "all_to_all": ep_all_to_all_p,
}


def _rms_norm_types(x, residual, scale, **_):
    return [result_type(x, x.shape, varying=varying_axes(residual)), residual]


def _batch_rms_norm(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "ep_all_reduce_rms_norm cannot be batched by jax.vmap: fold the batch axis into the rows "
        '(x [B, T, H] is as good as [T, H]), or take algorithm="xla".'
    )


ep_all_reduce_rms_norm_p = _primitive(
    "all_reduce_rms_norm", _run_rms_norm, abstract_eval=_rms_norm_types, batch=_batch_rms_norm
)
