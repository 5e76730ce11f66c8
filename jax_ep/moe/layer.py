"""The MoE layer as one function of arrays: the math and the sharding of both Flax layers.

`moe_layer` routes every token, dispatches it to its experts, runs them, combines, and adds the
shared experts, in its own `jax.shard_map` where there is a mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_ep import checks
from jax_ep.checks import as_axes
from jax_ep.exchange.api import Implementation, dispatch
from jax_ep.matmul.api import Implementation as MatmulImplementation
from jax_ep.moe import routing
from jax_ep.moe.routed_experts import routed_experts
from jax_ep.runtime import jax_compat

Initializer = jax.nn.initializers.Initializer

# The logical axes of each parameter; "exp" is the one to map to the mesh's expert axis.
LOGICAL_AXES: dict[str, tuple[str | None, ...]] = {
    "gate": ("embed", None),
    "wi_0": ("exp", "embed", "mlp"),
    "wi_1": ("exp", "embed", "mlp"),
    "wo": ("exp", "mlp", "embed"),
    "shared_wi_0": ("embed", "mlp"),
    "shared_wi_1": ("embed", "mlp"),
    "shared_wo": ("mlp", "embed"),
}

WEIGHTS = tuple(name for name in LOGICAL_AXES if name != "gate")

default_kernel_init = jax.nn.initializers.lecun_normal()


class MoEParams(NamedTuple):
    """E experts, H hidden, F expert hidden ("mlp"), S shared experts. A pytree.

    Attributes:
        gate: [H, E] router kernel.
        wi_0: [E, H, F], goes through the activation.
        wi_1: [E, H, F], is multiplied with it.
        wo: [E, F, H].
        bias: [E] selection bias, or None.
        shared_wi_0: [H, S * F], or None without shared experts, like the next two.
        shared_wi_1: [H, S * F].
        shared_wo: [S * F, H].
    """

    gate: jax.Array
    wi_0: jax.Array
    wi_1: jax.Array
    wo: jax.Array
    bias: jax.Array | None = None
    shared_wi_0: jax.Array | None = None
    shared_wi_1: jax.Array | None = None
    shared_wo: jax.Array | None = None


class MoEMetrics(NamedTuple):
    """What one call of a layer has to say, of all tokens on all ranks. A pytree.

    Attributes:
        load_balance_loss: [] float32, 1 when balanced; see `routing.load_balance_loss`.
        router_z_loss: [] float32; see `routing.router_z_loss`.
        expert_counts: [E] int32: (token, choice) pairs that chose each expert, dropped ones too.
        num_dropped: [] int32: pairs that no expert computed, because a receive buffer was full.
    """

    load_balance_loss: jax.Array
    router_z_loss: jax.Array
    expert_counts: jax.Array
    num_dropped: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Everything about a layer but its parameters.

    Attributes:
        num_experts: E, a multiple of the ranks along `expert_axis`.
        num_experts_per_token: K.
        score, num_groups, groups_kept, normalize, scale: see `routing.top_k_routing`.
        capacity_factor: None for a receive buffer that any routing fits in (nothing is dropped). A
            number c for one of c times the rows that a rank receives on average, T * K, plus room
            for `expert_alignment`; what does not fit is dropped, and counted.
        expert_alignment: each expert's block of rows starts at a multiple of this.
        wire_dtype: None, or `jnp.float8_e4m3fn`, in which tokens cross the wire on their way to the
            experts, H a multiple of 128; see `expert_parallel.dispatch`. What comes back, and every
            gradient, stays in `dtype`.
        activation: of the gated MLP: (activation(x wi_0) * (x wi_1)) wo.
        dtype: of tokens, expert matmuls and output; None: what x and wi_0 promote to. The router
            works in float32.
        expert_axis: the mesh axis, or tuple of axes, that the experts are spread over.
        batch_axes: the mesh axis or axes that the tokens are spread over, the expert axis among
            them. None: every axis of the mesh.
        mesh: the mesh to run on where no ambient mesh is set.
        implementation: of dispatch and combine; see `expert_parallel.dispatch`. "pallas" needs a
            mesh with `expert_axis`.
        matmul_implementation: of the expert matmuls; see `expert_mlp.expert_mlp`.
    """

    num_experts: int
    num_experts_per_token: int
    score: routing.Score = "softmax"
    num_groups: int = 1
    groups_kept: int = 1
    normalize: bool = True
    scale: float = 1.0
    capacity_factor: float | None = None
    expert_alignment: int = 1
    wire_dtype: Any = None
    activation: Callable[[jax.Array], jax.Array] = jax.nn.silu
    dtype: Any = None
    expert_axis: str | tuple[str, ...] = "expert"
    batch_axes: str | tuple[str, ...] | None = None
    mesh: Mesh | None = None
    implementation: Implementation = None
    matmul_implementation: MatmulImplementation = None

    @classmethod
    def of(cls, layer: Any) -> MoEConfig:
        """Reads the attributes of these names off a layer."""
        return cls(**{field.name: getattr(layer, field.name) for field in dataclasses.fields(cls)})


def weight_shapes(
    num_experts: int, hidden: int, mlp_dim: int, num_shared_experts: int
) -> dict[str, tuple[int, ...]]:
    """The global shapes of the experts' weights by the names of `MoEParams`."""
    shapes: dict[str, tuple[int, ...]] = {
        "wi_0": (num_experts, hidden, mlp_dim),
        "wi_1": (num_experts, hidden, mlp_dim),
        "wo": (num_experts, mlp_dim, hidden),
    }
    shared_dim = num_shared_experts * mlp_dim
    if shared_dim:
        shapes |= {
            "shared_wi_0": (hidden, shared_dim),
            "shared_wi_1": (hidden, shared_dim),
            "shared_wo": (shared_dim, hidden),
        }
    return shapes


def per_expert(init: Initializer) -> Initializer:
    """An initializer of [E, ...] that draws each expert's matrix on its own, with its own fans."""

    def init_experts(
        key: jax.Array, shape: Any, dtype: Any = None, out_sharding: Any = None
    ) -> jax.Array:
        if len(shape) == 2:
            return init(key, shape, dtype, out_sharding)
        keys = jax.random.split(key, shape[0])
        return jax.vmap(lambda key: init(key, shape[1:], dtype, out_sharding))(keys)

    return init_experts


class _Placement(NamedTuple):
    """Where a call runs. Every axis named here is bound where the math runs."""

    expert_axes: tuple[str, ...]  # none: every rank holds every expert
    batch_axes: tuple[str, ...]
    mesh: Mesh | AbstractMesh | None = None  # of the shard_map to open; None: open none


def moe_layer(
    params: MoEParams, x: jax.Array, config: MoEConfig, mask: jax.Array | None = None
) -> tuple[jax.Array, MoEMetrics]:
    """One MoE layer: same parameters, same output, whatever the mesh.

    Where it runs:
    - inside a `jax.shard_map` that binds `expert_axis`: right there. x is this rank's tokens; wi_0,
      wi_1 and wo are this rank's experts, [E / N, ...], or all of them;
    - else on the ambient mesh (`jax.set_mesh`), on `config.mesh`, or on that of a `with mesh:`
      statement, in its own `shard_map`: experts split over `expert_axis`, tokens over `batch_axes`
      along x's leading dimension, or along all of them flattened and padded where that one does
      not divide. A mesh without `expert_axis` gives every rank all experts: data parallelism;
    - else, with no mesh, unsharded.

    Args:
        params: the parameters; their global shapes do not depend on the mesh.
        x: [..., H] floating.
        config: the rest.
        mask: [...] bool or None: tokens that are False go to no routed expert and count in no
            metric.

    Returns:
        The output, [..., H] of the compute dtype, and `MoEMetrics`, the same on all ranks.

    Raises:
        ValueError, TypeError: at trace time, naming the argument, for whatever does not fit.
    """
    _check(params, x, config, mask)
    placement = _place(config)
    _check_experts(params, config, placement)
    if not placement.expert_axes and config.implementation is None:
        # There is nothing to exchange, and the kernels need a mesh to find their ranks on.
        config = dataclasses.replace(config, implementation="xla")
    if config.dtype is None:
        config = dataclasses.replace(config, dtype=jnp.result_type(x, params.wi_0))
    return _moe_layer(params, x, mask, config, placement)


# Static arguments are hashable, so layers alike are traced once, and eager calls are compiled.
@functools.partial(jax.jit, static_argnames=("config", "placement"))
def _moe_layer(
    params: MoEParams,
    x: jax.Array,
    mask: jax.Array | None,
    config: MoEConfig,
    placement: _Placement,
) -> tuple[jax.Array, MoEMetrics]:
    on_rank = functools.partial(_on_rank, config=config, placement=placement)
    mesh = placement.mesh
    if mesh is None:
        return on_rank(params, x, mask)

    parts = math.prod(mesh.shape[a] for a in placement.batch_axes)
    lead = x.shape[:-1]
    explicit = all(kind == AxisType.Explicit for kind in mesh.axis_types)
    if not lead or lead[0] % parts:
        if mask is None:
            mask = jnp.ones(lead, jnp.bool_)
        num_tokens = math.prod(lead)
        padding = -num_tokens % parts
        x_split = jnp.pad(x.reshape(num_tokens, x.shape[-1]), ((0, padding), (0, 0)))
        mask = jnp.pad(mask.reshape(num_tokens), (0, padding))
    else:
        x_split = x

    tokens_spec = PartitionSpec(placement.batch_axes)
    experts_spec = PartitionSpec(placement.expert_axes)
    params_spec = jax.tree.map(lambda _: PartitionSpec(), params)
    params_spec = params_spec._replace(wi_0=experts_spec, wi_1=experts_spec, wo=experts_spec)
    mask_spec = None if mask is None else tokens_spec
    args, specs = (params, x_split, mask), (params_spec, tokens_spec, mask_spec)
    if explicit:
        args = jax.tree.map(
            lambda arg, spec: jax.sharding.reshard(arg, NamedSharding(mesh, spec)), args, specs
        )
    out, metrics = jax.shard_map(
        on_rank,
        mesh=None if isinstance(mesh, AbstractMesh) else mesh,
        in_specs=specs,
        out_specs=(tokens_spec, PartitionSpec()),
    )(*args)
    if x_split is not x:
        out = out[: math.prod(lead)].reshape(x.shape)
    if explicit:
        # On explicit axes, what is added to x later must be sharded as x is.
        out = jax.sharding.reshard(out, NamedSharding(mesh, jax.typeof(x).sharding.spec))
    return out, metrics


def _on_rank(
    params: MoEParams,
    x: jax.Array,
    mask: jax.Array | None,
    *,
    config: MoEConfig,
    placement: _Placement,
) -> tuple[jax.Array, MoEMetrics]:
    """The layer on one rank's tokens and experts."""
    shape, batch_axes = x.shape, placement.batch_axes
    x = x.reshape(-1, shape[-1])
    logits = routing.router_logits(x, params.gate)
    routed = routing.top_k_routing(
        logits,
        config.num_experts_per_token,
        score=config.score,
        bias=params.bias,
        num_groups=config.num_groups,
        groups_kept=config.groups_kept,
        normalize=config.normalize,
        scale=config.scale,
    )
    topk_idx = routed.topk_idx
    if mask is not None:
        mask = mask.reshape(-1)
        topk_idx = jnp.where(mask[:, None], topk_idx, -1)

    x = x.astype(config.dtype)
    received = dispatch(
        x,
        topk_idx,
        num_experts=config.num_experts,
        axis_name=placement.expert_axes,
        capacity=_capacity(config, x.shape[0], _num_ranks(placement)),
        expert_alignment=config.expert_alignment,
        wire_dtype=config.wire_dtype,
        implementation=config.implementation,
    )
    own_experts = functools.partial(_own_experts, config=config, placement=placement)
    out = routed_experts(
        received,
        own_experts(params.wi_0),
        own_experts(params.wi_1),
        own_experts(params.wo),
        routed.topk_weights,
        activation=config.activation,
        implementation=config.implementation,
        matmul_implementation=config.matmul_implementation,
    )
    if params.shared_wo is not None:
        out += _shared_experts(params, x, config)

    metrics = MoEMetrics(
        routing.load_balance_loss(routed.probs, topk_idx, axis_name=batch_axes),
        routing.router_z_loss(logits, mask=mask, axis_name=batch_axes),
        *lax.psum(
            (routing.count_choices(topk_idx, config.num_experts), received.num_dropped), batch_axes
        ),
    )
    return out.reshape(shape), metrics


def _capacity(config: MoEConfig, num_tokens: int, num_ranks: int) -> int:
    """Rows of a receive buffer. A token's choices are distinct, so it has at most L on one rank."""
    num_local_experts = config.num_experts // num_ranks
    rows = num_ranks * num_tokens * min(config.num_experts_per_token, num_local_experts)
    if config.capacity_factor is not None:
        average = num_tokens * config.num_experts_per_token
        rows = min(rows, math.ceil(config.capacity_factor * average))
    alignment = config.expert_alignment
    rows += min(rows, num_local_experts) * (alignment - 1)
    return -(-rows // alignment) * alignment


def _own_experts(weights: jax.Array, config: MoEConfig, placement: _Placement) -> jax.Array:
    """This rank's experts, in the compute dtype, of all of them or of none but its own."""
    num_local_experts = config.num_experts // _num_ranks(placement)
    if weights.shape[0] != num_local_experts:
        first = lax.axis_index(placement.expert_axes) * num_local_experts
        weights = lax.dynamic_slice_in_dim(weights, first, num_local_experts)
    return weights.astype(config.dtype)


def _shared_experts(params: MoEParams, x: jax.Array, config: MoEConfig) -> jax.Array:
    """The S experts that every token goes to, as one MLP of S times the width."""
    wi_0, wi_1, wo = (
        w.astype(config.dtype)  # type: ignore[union-attr]
        for w in (params.shared_wi_0, params.shared_wi_1, params.shared_wo)
    )
    return (config.activation(x @ wi_0) * (x @ wi_1)) @ wo


def _place(config: MoEConfig) -> _Placement:
    """Finds the mesh that the call is to run on."""
    ambient = jax.sharding.get_abstract_mesh()
    expert_axes = as_axes(config.expert_axis, "expert_axis")
    if ambient.manual_axes:
        bound = tuple(ambient.manual_axes)
        if not set(expert_axes) & set(ambient.axis_names):
            expert_axes = ()
        elif not set(expert_axes) <= set(bound):
            raise ValueError(
                f"expert_axis {expert_axes} must be bound by the enclosing jax.shard_map, which is "
                f"over {bound}; make it one over the whole mesh {dict(ambient.shape)}"
            )
        return _Placement(expert_axes, _batch_axes(config, expert_axes, bound))

    mesh: Mesh | AbstractMesh | None = config.mesh
    if not ambient.empty and (mesh is None or mesh.shape == ambient.shape):
        mesh = ambient
    elif mesh is None:
        mesh = jax_compat.mesh_of_with_statement()
    if mesh is None:
        return _Placement((), ())

    missing = [a for a in expert_axes if a not in mesh.axis_names]
    if missing and (config.mesh is not None or len(missing) < len(expert_axes)):
        raise ValueError(
            f"expert_axis {expert_axes} must name axes of the mesh, but it has {mesh.shape}."
        )
    if missing:
        expert_axes = ()
    return _Placement(expert_axes, _batch_axes(config, expert_axes, mesh.axis_names), mesh)


def _batch_axes(
    config: MoEConfig, expert_axes: tuple[str, ...], axes: tuple[str, ...]
) -> tuple[str, ...]:
    """The axes that tokens are spread over, of those that are or will be bound."""
    batch_axes = (
        tuple(axes) if config.batch_axes is None else as_axes(config.batch_axes, "batch_axes")
    )
    if not set(expert_axes) <= set(batch_axes) <= set(axes):
        raise ValueError(
            f"batch_axes must be among the mesh axes {axes} and hold expert_axis {expert_axes}, "
            f"but is {batch_axes}."
        )
    return batch_axes


def _num_ranks(placement: _Placement) -> int:
    """N, the ranks that the experts are spread over."""
    if placement.mesh is not None:
        return math.prod(placement.mesh.shape[a] for a in placement.expert_axes)
    return lax.axis_size(placement.expert_axes)


def _check(params: MoEParams, x: jax.Array, config: MoEConfig, mask: jax.Array | None) -> None:
    checks.check_array("gate", params.gate, 2, jnp.floating, "[H, E]")
    hidden = params.gate.shape[0]
    if params.gate.shape[1] != config.num_experts:
        raise ValueError(
            f"gate must be [H, num_experts={config.num_experts}], but has shape "
            f"{params.gate.shape}."
        )
    for name, shape in (("wi_0", "[E, H, F]"), ("wi_1", "[E, H, F]"), ("wo", "[E, F, H]")):
        checks.check_array(name, getattr(params, name), None, jnp.floating, shape)
    _check_shared(params, hidden)
    checks.check_array("x", x, None, jnp.floating, f"[..., H={hidden}]")
    if x.ndim < 1 or x.shape[-1] != hidden:
        raise ValueError(f"x must be [..., H={hidden}], but has shape {x.shape}.")
    if np.prod(x.shape) == 0:
        raise ValueError(f"x must hold at least one token, but has shape {x.shape}.")
    if mask is not None:
        checks.check_array("mask", mask, None, jnp.bool_, "[...], x's without its last axis")
        if mask.shape != x.shape[:-1]:
            raise ValueError(
                f"mask must have one value for each token of x {x.shape}, but has shape "
                f"{mask.shape}."
            )
    if config.capacity_factor is not None and not config.capacity_factor > 0:
        raise ValueError(
            "capacity_factor must be above 0, or None to drop nothing, but is "
            f"{config.capacity_factor}."
        )
    checks.check_integer("expert_alignment", config.expert_alignment)


def _check_shared(params: MoEParams, hidden: int) -> None:
    """All three weights of the shared experts, of shapes that fit each other, or none."""
    names = ("shared_wi_0", "shared_wi_1", "shared_wo")
    given = {name: getattr(params, name) for name in names if getattr(params, name) is not None}
    if not given:
        return
    if len(given) < len(names):
        raise ValueError(
            f"{', '.join(names)} must be given together or be None, but only "
            f"{' and '.join(given)} {'are' if len(given) > 1 else 'is'} given."
        )
    for name, array in given.items():
        shape = "[S * F, H]" if name == "shared_wo" else "[H, S * F]"
        checks.check_array(name, array, 2, jnp.floating, shape)
    shared = given["shared_wi_0"].shape[1]
    for name, array in given.items():
        wanted = (shared, hidden) if name == "shared_wo" else (hidden, shared)
        if array.shape != wanted:
            raise ValueError(
                f"{name} must have shape {wanted} for H={hidden} and shared_wi_0 of shape "
                f"{given['shared_wi_0'].shape}, but has shape {array.shape}."
            )


def _check_experts(params: MoEParams, config: MoEConfig, placement: _Placement) -> None:
    num_ranks = _num_ranks(placement)
    if config.num_experts % num_ranks:
        raise ValueError(
            f"num_experts must be a multiple of the {num_ranks} ranks along expert_axis "
            f"{placement.expert_axes}, but is {config.num_experts}."
        )
    allowed = {config.num_experts}
    if placement.mesh is None:  # inside the caller's shard_map: they may be this rank's own
        allowed.add(config.num_experts // num_ranks)
    for name in ("wi_0", "wi_1", "wo"):
        shape = getattr(params, name).shape
        if len(shape) != 3 or shape[0] not in allowed:
            raise ValueError(
                f"{name} must hold {' or '.join(map(str, sorted(allowed)))} experts "
                f"(num_experts={config.num_experts}), but has shape {shape}."
            )
    if not placement.expert_axes and config.implementation == "pallas":
        raise ValueError(
            'implementation="pallas" exchanges rows between the ranks of expert_axis '
            f"{config.expert_axis!r}, and there is no mesh with that axis here; set one with "
            "jax.set_mesh, or leave implementation at None"
        )
