"""The JAX primitives of the exchange: shapes, varying-axes types, and which kernel serves where.

Four primitives, all without effects, all called inside `shard_map` over `axis_name`:

  ep_dispatch       x [T, H], topk_idx [T, K]  -> tokens [R, H], rows [N, T, K], counts [N, L]
  ep_dispatch_like  x [T, H], rows             -> tokens [R, H]
  ep_combine        y [R, H], weights?, rows   -> out [T, H]
  ep_combine_grad   g [T, H], weights, y, rows -> dy [R, H], dweights [T, K]

`rows[s, t, k]` is the row here of choice k of token t of rank s: -1 if that choice is not of this
rank, and R or more if it did not fit. Weights are float32. Each primitive lowers to the Pallas
kernels on the GPUs they serve, and to XLA's collectives everywhere else.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jax_ep import xla_exchange

Implementation = str | None
IMPLEMENTATIONS = ("pallas", "xla")


def pallas_unavailable_reason(devices: list[jax.Device] | None = None) -> str | None:
    """Why the Pallas kernels cannot serve these devices (default: all), or None if they can."""
    devices = jax.devices() if devices is None else devices
    return "the Pallas kernels are not part of this version"


def check_implementation(implementation: Implementation, payload: jax.Array) -> None:
    """Raises ValueError, with the reason, if the named implementation cannot serve here."""
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be one of {IMPLEMENTATIONS} or None, but is {implementation!r}."
        )
    if implementation == "pallas":
        reason = pallas_unavailable_reason()
        if reason is not None:
            raise ValueError(f'implementation="pallas" cannot serve here: {reason}.')


def dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    *,
    num_experts: int,
    axis_name: tuple[str, ...],
    capacity: int,
    expert_alignment: int,
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Binds `ep_dispatch`."""
    tokens, rows, counts = _bind(
        ep_dispatch_p,
        (x, topk_idx),
        num_experts=num_experts,
        axis_name=axis_name,
        capacity=capacity,
        expert_alignment=expert_alignment,
        implementation=implementation,
    )
    return tokens, rows, counts


def dispatch_like(
    x: jax.Array,
    rows: jax.Array,
    *,
    axis_name: tuple[str, ...],
    capacity: int,
    implementation: Implementation,
) -> jax.Array:
    """Binds `ep_dispatch_like`."""
    (tokens,) = _bind(
        ep_dispatch_like_p,
        (x, rows),
        axis_name=axis_name,
        capacity=capacity,
        implementation=implementation,
    )
    return tokens


def combine(
    y: jax.Array,
    topk_weights: jax.Array | None,
    rows: jax.Array,
    *,
    axis_name: tuple[str, ...],
    implementation: Implementation,
) -> jax.Array:
    """Binds `ep_combine`."""
    operands = (y, rows) if topk_weights is None else (y, rows, topk_weights)
    (out,) = _bind(ep_combine_p, operands, axis_name=axis_name, implementation=implementation)
    return out


def combine_grad(
    g: jax.Array,
    topk_weights: jax.Array,
    y: jax.Array,
    rows: jax.Array,
    *,
    axis_name: tuple[str, ...],
    implementation: Implementation,
) -> tuple[jax.Array, jax.Array]:
    """Binds `ep_combine_grad`."""
    dy, dweights = _bind(
        ep_combine_grad_p,
        (g, topk_weights, y, rows),
        axis_name=axis_name,
        implementation=implementation,
    )
    return dy, dweights


def _bind(primitive: Primitive, operands: tuple[jax.Array, ...], **params: Any) -> list[Any]:
    return primitive.bind(*vary_alike(operands, params["axis_name"]), **params)


def vary_alike(operands: tuple[jax.Array, ...], axis_name: tuple[str, ...]) -> list[jax.Array]:
    """Makes all operands vary over `axis_name` and over every axis that one of them varies over.

    A collective's result differs from rank to rank, so its operands must be typed as varying;
    the transpose of this cast is the sum over ranks that a replicated operand's gradient needs.
    """
    varying = [jax.typeof(operand).mat.varying for operand in operands]
    axes = frozenset(axis_name).union(*varying)
    return [
        lax.pcast(operand, tuple(sorted(axes - own)), to="varying") if axes - own else operand
        for operand, own in zip(operands, varying, strict=True)
    ]


def _abstract_eval(shapes_and_dtypes):
    """Output avals from input avals; every output varies as the (alike) operands do."""

    def rule(*avals, axis_name, **params):
        mat = avals[0].mat
        return [
            avals[0].update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, manual_axis_type=mat)
            for shape, dtype in shapes_and_dtypes(*avals, axis_name=axis_name, **params)
        ]

    return rule


def _dispatch_shapes(x, topk_idx, *, num_experts, axis_name, capacity, **_):
    num_ranks = lax.axis_size(axis_name)
    return [
        ((capacity, x.shape[1]), x.dtype),
        ((num_ranks, *topk_idx.shape), jnp.int32),
        ((num_ranks, num_experts // num_ranks), jnp.int32),
    ]


def _dispatch_like_shapes(x, rows, *, capacity, **_):
    return [((capacity, x.shape[1]), x.dtype)]


def _combine_shapes(y, rows, *weights, **_):
    return [((rows.shape[1], y.shape[1]), y.dtype)]


def _combine_grad_shapes(g, topk_weights, y, rows, **_):
    return [(y.shape, y.dtype), (topk_weights.shape, jnp.float32)]


def _xla_dispatch(x, topk_idx, *, implementation, **params):
    del implementation
    return xla_exchange.dispatch(x, topk_idx, **params)


def _xla_dispatch_like(x, rows, *, implementation, **params):
    del implementation
    return (xla_exchange.dispatch_like(x, rows, **params),)


def _xla_combine(y, rows, topk_weights=None, *, implementation, **params):
    del implementation
    return (xla_exchange.combine(y, topk_weights, rows, **params),)


def _xla_combine_grad(g, topk_weights, y, rows, *, implementation, **params):
    del implementation
    return xla_exchange.combine_grad(g, topk_weights, y, rows, **params)


def _no_batching(name):
    def rule(*_, **__):
        raise NotImplementedError(
            f"{name} cannot be batched by jax.vmap: each call is one exchange between ranks. "
            "Fold the batch axis into the tokens (x [B, T, H] -> [B * T, H]), or loop with "
            "jax.lax.map or jax.lax.scan."
        )

    return rule


def _primitive(name, shapes_and_dtypes, xla) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(_abstract_eval(shapes_and_dtypes))
    mlir.register_lowering(primitive, mlir.lower_fun(xla, multiple_results=True))
    batching.primitive_batchers[primitive] = _no_batching(name)
    return primitive


ep_dispatch_p = _primitive("ep_dispatch", _dispatch_shapes, _xla_dispatch)
ep_dispatch_like_p = _primitive("ep_dispatch_like", _dispatch_like_shapes, _xla_dispatch_like)
ep_combine_p = _primitive("ep_combine", _combine_shapes, _xla_combine)
ep_combine_grad_p = _primitive("ep_combine_grad", _combine_grad_shapes, _xla_combine_grad)
