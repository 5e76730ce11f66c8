"""The JAX primitives of the exchange: shapes, varying-axes types, and which kernel serves where.

Six primitives, all without effects, all called inside `shard_map` over `axis_name`:

  ep_dispatch       x [T, H], topk_idx [T, K]      -> tokens [R, H], rows [N, T, K], counts [N, E],
                                                     *layout
  ep_dispatch_like  x [T, H], *routes              -> tokens [R, H]
  ep_combine        y [R, H], *routes, weights?    -> out [T, H]
  ep_combine_grad   g [T, H], *routes, weights, y  -> dy [R, H], dweights [T, K]
  ep_rank_dispatch  x [T, H], topk_idx, weights?   -> tokens [N, T, H], local_topk_idx [N, T, K],
                                                      weights [N, T, K]?
  ep_rank_combine   y [N, T, H], *rank routes      -> out [T, H]

With a `wire_dtype`, what a dispatch gives for tokens is two arrays: rows in it, and their scales
(`jax_ep.exchange.quantization`); a combine rounds the sums that it sends. `routes` and `layout` are
the arrays of their namesakes in `jax_ep.exchange.routes`, rank routes those of `RankRoutes`;
weights are float32. Each primitive lowers to the Pallas kernels on the GPUs they serve, and to
XLA's collectives everywhere else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from jax_ep.exchange import pallas as pallas_exchange
from jax_ep.exchange import quantization
from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.routes import Layout, RankRoutes, Routes
from jax_ep.runtime import cuda_driver
from pallas_kernels.fabric.plan import SHARED_MEMORY_BYTES

Implementation = Literal["pallas", "xla"] | None
IMPLEMENTATIONS = ("pallas", "xla")
Received = tuple[jax.Array, ...]  # rows; or with a wire_dtype, rows in it and their scales


def pallas_unavailable_reason(devices: list[jax.Device] | None = None) -> str | None:
    """Why the Pallas kernels cannot serve these devices (default: all), or None if they can."""
    devices = jax.devices() if devices is None else devices
    platforms = sorted({device.platform for device in devices})
    if platforms != ["gpu"]:
        return f"it needs NVIDIA GPUs, and the devices here are {', '.join(platforms)}"
    if len({device.process_index for device in devices}) > 1:
        return "it needs all GPUs in one process, and these belong to several"
    for device in devices:
        capability = getattr(device, "compute_capability", "0.0")
        if float(capability) < 9.0:
            return (
                f"it needs compute capability 9.0 or newer, and {device.device_kind} has "
                f"{capability}"
            )
        shared = getattr(device, "shared_memory_per_block_optin", SHARED_MEMORY_BYTES)
        if shared < SHARED_MEMORY_BYTES:
            return (
                f"it needs {SHARED_MEMORY_BYTES} bytes of shared memory for a thread block, and "
                f"{device.device_kind} has {shared}"
            )
    return _peers_unavailable_reason(devices)


def _peers_unavailable_reason(devices: list[jax.Device]) -> str | None:
    """Which GPU cannot address the memory of which; None if all can, or if the driver won't say."""
    ordinals = [device.local_hardware_id for device in devices]
    for device, row in zip(devices, cuda_driver.peer_access(ordinals) or (), strict=False):
        for peer, can in zip(devices, row, strict=True):
            if not can:
                return (
                    "it needs peer access between all GPUs, and the CUDA driver offers none from "
                    f"GPU {device.id} to GPU {peer.id}"
                )
    return None


def mesh_unavailable_reason() -> str | None:
    """Why no kernel can serve within the shard_map that is being traced, or None if one may."""
    mesh = jax.sharding.get_abstract_mesh()
    left_out = tuple(axis for axis in mesh.auto_axes if mesh.shape[axis] > 1)
    if left_out:
        return f"it needs shard_map over all axes of the mesh, and {left_out} are left out of it"
    return None


def lowering_unavailable_reason(
    ctx: mlir.LoweringRuleContext, axis_name: tuple[str, ...]
) -> str | None:
    """Why no kernel between the ranks of an axis can serve in the program that is being lowered."""
    if "cuda" not in (ctx.platforms or ctx.module_context.platforms):
        return "it needs NVIDIA GPUs, and this program is compiled for another platform"
    is_here = jax.default_backend() == "gpu"  # else this lowers for a machine that is not
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    if mesh is not None and math.prod(mesh.shape[name] for name in axis_name) > 1:
        if isinstance(mesh, jax.sharding.Mesh):
            ids = [device.id for device in mesh.devices.flat]
            if sorted(ids) != list(range(len(ids))):
                return f"it needs a mesh of the machine's first devices, and here it is of {ids}"
        elif is_here and mesh.size < jax.device_count():  # a larger one is for another machine
            return "it needs to know the devices, and shard_map was given an abstract mesh of some"
    return pallas_unavailable_reason() if is_here else None


def lower_by_position(
    ctx: mlir.LoweringRuleContext, function: Callable[..., Any], *operands: Any, **params: Any
) -> Any:
    """Lowers a function of several results, with kernels that know a rank by its place in the mesh.

    So does XLA, but Mosaic's lowering asks for devices in their order where it means those places.
    """
    context: Any = ctx.module_context.axis_context
    mesh = getattr(context, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh):
        devices = sorted(mesh.devices.flat, key=lambda device: device.id)
    elif isinstance(mesh, jax.sharding.AbstractMesh) and mesh.size == jax.device_count():
        devices = jax.devices()
    else:
        devices = []
    if mesh is not None and devices:
        in_order = np.asarray(devices).reshape(tuple(mesh.shape.values()))
        mesh = jax.sharding.Mesh(in_order, mesh.axis_names, axis_types=mesh.axis_types)
        context = type(context)(mesh, context.manual_axes)
        ctx = ctx.replace(module_context=ctx.module_context.replace(axis_context=context))
    return mlir.lower_fun(function, multiple_results=True)(ctx, *operands, **params)


def devices_by_place(ctx: mlir.LoweringRuleContext) -> tuple[int, ...]:
    """Which GPU of this process is at each place of the mesh of the program being lowered."""
    mesh = getattr(ctx.module_context.axis_context, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh):
        ordinals = [device.local_hardware_id for device in mesh.devices.flat]
        return tuple(i if ordinal is None else ordinal for i, ordinal in enumerate(ordinals))
    return tuple(range(mesh.size if mesh is not None else 1))


def place() -> jax.Array:
    """[1] int32: which place of its mesh this device is at, as `devices_by_place` counts."""
    return _place_p.bind()


_place_p = Primitive("ep_place")


@_place_p.def_abstract_eval
def _place_shape() -> jax.core.ShapedArray:
    return jax.core.ShapedArray((1,), jnp.int32)


def _lower_place(ctx: mlir.LoweringRuleContext) -> list[Any]:
    # Not `lax.axis_index`: that is a kernel of its own, where this is a word that XLA sets.
    del ctx
    i32 = ir.IntegerType.get_signless(32)
    word = stablehlo.bitcast_convert(ir.RankedTensorType.get((), i32), stablehlo.partition_id())
    return [stablehlo.reshape(ir.RankedTensorType.get((1,), i32), word)]


mlir.register_lowering(_place_p, _lower_place)


def choose_implementation(
    implementation: Implementation,
    payload: jax.Array | jax.ShapeDtypeStruct,
    *,
    num_ranks: int,
    top_k: int,
    num_experts: int,
    wire_dtype: jnp.dtype | None = None,
) -> Implementation:
    """What to bind: "xla" where only it is sure to serve, else None, or the name that was given.

    `wire_dtype` is what a dispatch sends its rows in, or a combine its sums; None is the dtype of
    `payload`.

    Raises ValueError, with the reason, if a named implementation is sure not to serve. What this
    cannot know yet is decided when the program is lowered.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation must be one of {IMPLEMENTATIONS} or None, but is {implementation!r}."
        )
    if implementation == "xla":
        return "xla"
    reason = mesh_unavailable_reason() or pallas_exchange.unavailable_reason(
        payload.shape[-1], payload.dtype, num_ranks, top_k, num_experts, wire_dtype
    )
    if implementation is None:
        return None if reason is None else "xla"
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None and device.platform != "gpu":
        reason = f"it needs NVIDIA GPUs, and the mesh here is of {device.platform} devices"
    elif device is not None and jax.default_backend() == "gpu":
        reason = reason or pallas_unavailable_reason()
    if reason is None:
        return implementation
    raise _refusal(reason)


def _refusal(reason: str) -> ValueError:
    return ValueError(
        f'implementation="pallas" cannot serve here: {reason}. '
        "implementation=None picks one that does."
    )


def choose_implementations(
    implementation: Implementation,
    rows: jax.Array,
    *,
    axis_name: tuple[str, ...],
    top_k: int,
    num_experts: int,
    wire_dtypes: tuple[jnp.dtype | None, jnp.dtype | None],
) -> tuple[Implementation, Implementation]:
    """What to bind for rows, and for their cotangents; each has its own wire dtype."""
    choose = functools.partial(
        choose_implementation,
        implementation,
        rows,
        num_ranks=lax.axis_size(axis_name),
        top_k=top_k,
        num_experts=num_experts,
    )
    of_rows, of_cotangents = wire_dtypes
    return choose(wire_dtype=of_rows), choose(wire_dtype=of_cotangents)


def dispatch(x: jax.Array, topk_idx: jax.Array, **params: Any) -> tuple[Received, Routes, Layout]:
    """Binds `ep_dispatch`: this rank's choices become routes, and its tokens follow them."""
    x, topk_idx = vary_alike((x, topk_idx), params["axis_name"])
    results = ep_dispatch_p.bind(x, topk_idx, **params)
    *received, rows, counts = results[: -len(Layout._fields)]
    layout = Layout(*results[-len(Layout._fields) :])
    return tuple(received), Routes(topk_idx, rows, counts), layout


def dispatch_like(x: jax.Array, route: Routes, **params: Any) -> Received:
    """Binds `ep_dispatch_like`."""
    operands = vary_alike((x, *route), params["axis_name"])
    return tuple(ep_dispatch_like_p.bind(*operands, **params))


def combine(
    y: jax.Array, topk_weights: jax.Array | None, route: Routes, **params: Any
) -> jax.Array:
    """Binds `ep_combine`."""
    operands = (y, *route) if topk_weights is None else (y, *route, topk_weights)
    (out,) = ep_combine_p.bind(*vary_alike(operands, params["axis_name"]), **params)
    return out


def combine_grad(
    g: jax.Array, topk_weights: jax.Array, y: jax.Array, route: Routes, **params: Any
) -> tuple[jax.Array, jax.Array]:
    """Binds `ep_combine_grad`."""
    operands = vary_alike((g, *route, topk_weights, y), params["axis_name"])
    dy, dweights = ep_combine_grad_p.bind(*operands, **params)
    return dy, dweights


def choices_to_rows(
    values: jax.Array, route: Routes, *, axis_name: tuple[str, ...], capacity: int
) -> jax.Array:
    """[T, K] numbers, one for each choice -> [R]; by XLA's collectives everywhere."""
    values, *routes = vary_alike((values, *route), axis_name)
    return xla_exchange.choices_to_rows(
        values, Routes(*routes), axis_name=axis_name, capacity=capacity
    )


def rows_to_choices(values: jax.Array, route: Routes, *, axis_name: tuple[str, ...]) -> jax.Array:
    """[R] numbers, one for each row -> [T, K]; by XLA's collectives everywhere."""
    values, *routes = vary_alike((values, *route), axis_name)
    return xla_exchange.rows_to_choices(values, Routes(*routes), axis_name=axis_name)


def rank_dispatch(
    x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None, **params: Any
) -> tuple[Received, RankRoutes, jax.Array | None]:
    """Binds `ep_rank_dispatch`."""
    operands = (x, topk_idx) if topk_weights is None else (x, topk_idx, topk_weights)
    x, topk_idx, *rest = vary_alike(operands, params["axis_name"])
    results = ep_rank_dispatch_p.bind(x, topk_idx, *rest, **params)
    weights = None if topk_weights is None else results.pop()
    *received, local_topk_idx = results
    return tuple(received), RankRoutes(topk_idx, local_topk_idx), weights


def rank_combine(y: jax.Array, route: RankRoutes, **params: Any) -> jax.Array:
    """Binds `ep_rank_combine`."""
    (out,) = ep_rank_combine_p.bind(*vary_alike((y, *route), params["axis_name"]), **params)
    return out


def return_weights(g: jax.Array, route: RankRoutes, axis_name: tuple[str, ...]) -> jax.Array:
    """The cotangent of the weights of an `ep_rank_dispatch`: of [N, T, K], [T, K]."""
    g, *routes = vary_alike((g, *route), axis_name)
    return xla_exchange.return_weights(g, RankRoutes(*routes), axis_name=axis_name)


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


# What each primitive computes, by exchange; `exchange` is one of the two modules.


def _run_dispatch(exchange, x, topk_idx, **params):
    received, rows, counts, layout = exchange.dispatch(x, topk_idx, **params)
    return *received, rows, counts, *layout


def _run_dispatch_like(exchange, x, *route, num_experts, **params):
    del num_experts
    return exchange.dispatch_like(x, Routes(*route), **params)


def _run_combine(exchange, y, topk_idx, rows, counts, weights=None, *, axis_name, wire_dtype, **_):
    route = Routes(topk_idx, rows, counts)
    return (exchange.combine(y, weights, route, axis_name=axis_name, wire_dtype=wire_dtype),)


def _run_combine_grad(
    exchange, g, topk_idx, rows, counts, weights, y, *, num_experts, capacity, **params
):
    del num_experts, capacity
    return exchange.combine_grad(g, weights, y, Routes(topk_idx, rows, counts), **params)


def _run_rank_dispatch(exchange, x, topk_idx, topk_weights=None, **params):
    return exchange.rank_dispatch(x, topk_idx, topk_weights, **params)


def _run_rank_combine(exchange, y, *route, **params):
    return (exchange.rank_combine(y, RankRoutes(*route), **params),)


# What each primitive returns: (shape, dtype) of every result.


def _received_shapes(lead, x, wire_dtype):
    """Rows [*lead, H], and if they come in a wire_dtype, their scales."""
    if wire_dtype is None:
        return [((*lead, x.shape[1]), x.dtype)]
    scales = (*lead, x.shape[1] // quantization.BLOCK), jnp.float32
    return [((*lead, x.shape[1]), wire_dtype), scales]


def _dispatch_shapes(x, topk_idx, *, num_experts, axis_name, capacity, wire_dtype, **_):
    num_ranks = lax.axis_size(axis_name)
    return [
        *_received_shapes((capacity,), x, wire_dtype),
        ((num_ranks, *topk_idx.shape), jnp.int32),
        ((num_ranks, num_experts), jnp.int32),
        ((num_experts // num_ranks,), jnp.int32),
        ((num_experts // num_ranks,), jnp.int32),
        ((), jnp.int32),
        ((), jnp.int32),
    ]


def _dispatch_like_shapes(x, *_, capacity, wire_dtype, **__):
    return _received_shapes((capacity,), x, wire_dtype)


def _combine_shapes(y, topk_idx, *_, **__):
    return [((topk_idx.shape[0], y.shape[1]), y.dtype)]


def _combine_grad_shapes(g, topk_idx, rows, counts, weights, y, **_):
    return [(y.shape, y.dtype), (weights.shape, jnp.float32)]


def _rank_dispatch_shapes(x, topk_idx, topk_weights=None, *, axis_name, wire_dtype, **_):
    num_ranks = lax.axis_size(axis_name)
    received = _received_shapes((num_ranks, x.shape[0]), x, wire_dtype)
    of_ranks = (num_ranks, *topk_idx.shape)
    weights = [] if topk_weights is None else [(of_ranks, topk_weights.dtype)]
    return [*received, (of_ranks, jnp.int32), *weights]


def _rank_combine_shapes(y, *_, **__):
    return [(y.shape[1:], y.dtype)]


def _primitive(name: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True

    def abstract_eval(*avals, **params):
        # Every result varies as the (alike) operands do.
        return [
            avals[0].update(
                shape=shape,
                dtype=jnp.dtype(dtype),
                weak_type=False,
                manual_axis_type=avals[0].mat,
            )
            for shape, dtype in shapes(*avals, **params)
        ]

    def lower(ctx, *operands, implementation, **params):
        reason = lowering_unavailable_reason(ctx, params["axis_name"])
        function = functools.partial(run, _exchange_serving(implementation, reason))
        return lower_by_position(ctx, function, *operands, **params)

    def no_batching(*_, **__):
        raise NotImplementedError(
            f"{name} cannot be batched by jax.vmap: each call is one exchange between ranks. "
            "Fold the batch axis into the tokens (x [B, T, H] -> [B * T, H]), or loop with "
            "jax.lax.map or jax.lax.scan."
        )

    primitive.def_abstract_eval(abstract_eval)
    mlir.register_lowering(primitive, lower)
    mlir.register_lowering(primitive, lower, platform="cuda")
    batching.primitive_batchers[primitive] = no_batching
    return primitive


def _exchange_serving(implementation: Implementation, reason: str | None) -> Any:
    """The exchange to lower to; `reason`: why the kernels cannot serve, or None if they can."""
    if implementation == "xla":
        return xla_exchange
    if reason is None:
        return pallas_exchange
    if implementation == "pallas":
        raise _refusal(reason)
    return xla_exchange


ep_dispatch_p = _primitive("ep_dispatch", _run_dispatch, _dispatch_shapes)
ep_dispatch_like_p = _primitive("ep_dispatch_like", _run_dispatch_like, _dispatch_like_shapes)
ep_combine_p = _primitive("ep_combine", _run_combine, _combine_shapes)
ep_combine_grad_p = _primitive("ep_combine_grad", _run_combine_grad, _combine_grad_shapes)
ep_rank_dispatch_p = _primitive("ep_rank_dispatch", _run_rank_dispatch, _rank_dispatch_shapes)
ep_rank_combine_p = _primitive("ep_rank_combine", _run_rank_combine, _rank_combine_shapes)
