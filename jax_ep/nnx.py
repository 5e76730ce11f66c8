"""Defines `MoE`, the MoE layer for Flax NNX; `jax_ep.moe` has the computation."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import spmd
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jax_ep.checks import as_axes, warn
from jax_ep.exchange.interface import Implementation
from jax_ep.matmul.primitives import Implementation as MatmulImplementation
from jax_ep.moe import losses, routing
from jax_ep.moe import params as moe_params
from jax_ep.moe.call_checks import Call
from jax_ep.moe.config import MoEConfig, Router, WeightsOn, check_config
from jax_ep.moe.expert_matmuls import QuantizedExperts
from jax_ep.moe.expert_mlp import Activation
from jax_ep.moe.fsdp import assign_axes
from jax_ep.moe.held_experts import quantize_by_rules
from jax_ep.moe.layer import run_layer
from jax_ep.moe.mesh import Axes, AxisRules, axes_on_mesh, shard
from jax_ep.moe.metrics import MoEMetrics
from jax_ep.moe.params import MoEParams, ParameterOptions
from jax_ep.placement.table import Placement
from jax_ep.placement.weights import ADAPTERS


class RouterState(nnx.Variable):
    """The type of the router's selection bias, which is state that gradients do not train."""


class Gate(nnx.Module):
    """Holds the kernel [H, R] for R experts to choose among and, if any, its bias [R] float32."""

    def __init__(self, rows: int, config: MoEConfig, options: ParameterOptions, rngs: nnx.Rngs):
        # `rows` is H, or the size of `router_x`'s last axis.
        init: Any = options.gate_init
        kernel = init(rngs.params(), (rows, config.num_choosable), options.param_dtype)
        self.kernel = _param(kernel, "gate", config)
        self.bias = _bias(config) if options.selection_bias else None


class MoE(nnx.Module):
    """Mixture of MLP experts, spread over the ranks of a mesh axis.

    Replaces the MLP of a transformer block: `y, metrics = layer(x)` with x [..., H], y of x's
    shape, and `metrics` a `jax_ep.MoEMetrics` of losses, expert counts and drops for all
    ranks. The losses reach the training loss only if you add them. `jax_ep.moe_layer` says on
    which mesh the layer runs. On any mesh, the shapes of the parameters are the same.

    The parameters are those of `jax_ep.MoEParams`, as `nnx.Param`, low-rank adapters as
    `nnx.LoRAParam`; those that the options leave out are None. If `num_slots` is P, the experts'
    parameters are [P, ...]: each of the P slots holds a copy of one expert. At first, slot s holds
    expert s modulo E, as in `jax_ep.placement.Placement.in_order`. With `selection_bias` there is
    gate.bias (`RouterState`), which only `update_bias` changes and every rank has.

    Under `jax.set_mesh`, the parameters are created sharded: each logical axis over the mesh axes
    that `nnx.logical_axis_rules` gives for it. Without a rule, "exp" is sharded over `expert_axis`,
    "mlp" over `tensor_axis`, each logical axis in `fsdp_axes` also over its axes there, and any
    other over the mesh axis of its name, if any. No mesh axis splits two dimensions of a parameter.
    The layer stores the rules, and uses them in calls outside `nnx.logical_axis_rules`.

    Args:
      hidden: H, the hidden size of a token.
      mlp_dim: F, the hidden size of one expert.
      num_experts: E, the number of routed experts.
      num_experts_per_token: K, the number of experts that each token chooses.
      num_shared_experts, ..., gate_init: which parameters there are, and how they are initialized;
        see `jax_ep.moe.params.ParameterOptions`.
      router_dim: H', the size of the last axis of `router_x`, if calls are given `router_x`; None
        means H.
      rngs: random number generators, of which the stream "params" initializes the parameters.
      score, ..., matmul_implementation: what the layer computes, and how; see `jax_ep.MoEConfig`.

    Raises:
      TypeError: JAX arrays cannot have `param_dtype`.
      ValueError: mesh axes do not divide a parameter, a rule names an axis that the mesh lacks, or
        an argument configures a gate that gate_init=None leaves out.
    """

    config: MoEConfig
    gate: Gate | None
    wi_0: nnx.Param
    wo: nnx.Param

    if TYPE_CHECKING:
        # Tells type checkers the type of all parameters except wi_0 and wo.
        def __getattr__(self, name: str) -> nnx.Param | None: ...

    def __init__(
        self,
        hidden: int,
        mlp_dim: int,
        *,
        num_experts: int,
        num_experts_per_token: int,
        num_shared_experts: int = 0,
        shared_dim: int | None = None,
        use_shared_gate: bool = False,
        gated: bool = True,
        use_mlp_bias: bool = False,
        selection_bias: bool = False,
        use_gate_bias: bool = False,
        use_expert_scale: bool = False,
        lora_rank: int = 0,
        param_dtype: Any = jnp.float32,
        kernel_init: moe_params.Initializer = moe_params.default_kernel_init,
        gate_init: moe_params.Initializer | None = moe_params.default_kernel_init,
        router_dim: int | None = None,
        rngs: nnx.Rngs,
        score: routing.Score = "softmax",
        choose_by: routing.ChooseBy = "score",
        num_groups: int = 1,
        groups_kept: int = 1,
        group_score: routing.GroupScore = "top2",
        normalize: bool = True,
        normalize_epsilon: float = 0.0,
        scale: float = 1.0,
        router: Router | None = None,
        router_dtype: Any = jnp.float32,
        logit_softcap: float | None = None,
        balance_convention: losses.Convention = "switch",
        capacity_factor: float | None = None,
        host_capacity_factor: float | None = None,
        num_slots: int | None = None,
        zero_experts: int = 0,
        identity_experts: int = 0,
        constant_experts: int = 0,
        free_expert_factor: float = 1.0,
        record_choices: bool = False,
        token_chunks: int = 1,
        wire_dtype: Any = None,
        activation: Activation = jax.nn.silu,
        clamp: float | None = None,
        matmul_dtype: Any = None,
        weights_on: WeightsOn = "output",
        shared_activation: Activation | None = None,
        lora_scale: float = 1.0,
        dtype: Any = None,
        expert_axis: str | tuple[str, ...] = "expert",
        batch_axes: str | tuple[str, ...] | None = None,
        sequence_axes: str | tuple[str, ...] | None = None,
        fsdp_axes: Mapping[str, str | tuple[str, ...]] | None = None,
        tensor_axis: str | tuple[str, ...] | None = None,
        implementation: Implementation = None,
        matmul_implementation: MatmulImplementation = None,
    ):
        # The arguments are named like the fields of both classes.
        given = types.SimpleNamespace(**locals())
        options, config = ParameterOptions.of_layer(given), MoEConfig.of(given)
        self.config = config
        check_config(config)
        moe_params.check_parameter_options(options, router_dim)
        if (mesh := _mesh_of_state()) is not None:
            axes_on_mesh(config, mesh)  # raises an error if the mesh lacks them
        rules = spmd.get_logical_axis_rules()
        # Tuples, since NNX hashes static attributes.
        self.axis_rules = tuple((n, tuple(a) if isinstance(a, list) else a) for n, a in rules)
        # `gate` is assigned once, since NNX does not let an attribute change from None to a module.
        rows = hidden if router_dim is None else router_dim
        self.gate = None if gate_init is None else Gate(rows, config, options, rngs)
        shapes = moe_params.weight_shapes(config, options, hidden, mlp_dim)
        for name in moe_params.WEIGHTS:
            param = None
            if (shape := shapes.get(name)) is not None:
                init = moe_params.initializer(name, config, options)
                param = _param(init(rngs.params(), shape, options.param_dtype), name, config)
            setattr(self, name, param)

    def __call__(
        self,
        x: jax.Array,
        mask: jax.Array | None = None,
        *,
        placement: Placement | None = None,
        router_x: jax.Array | None = None,
        topk_idx: jax.Array | None = None,
        topk_weights: jax.Array | None = None,
        quantized_experts: QuantizedExperts | None = None,
    ) -> tuple[jax.Array, MoEMetrics]:
        """Runs the layer on tokens x [..., H]; `jax_ep.moe_layer` describes the arguments.

        Returns the output, [..., H], and the `jax_ep.MoEMetrics` of all ranks' tokens. Raises
        ValueError or TypeError, naming it, if an argument or attribute does not fit.
        """
        params, rules = self._params(), self._axis_rules()
        call = Call(x, mask, router_x, topk_idx, topk_weights)
        return run_layer(params, call, self.config, placement, quantized_experts, axis_rules=rules)

    def quantize_experts(self) -> QuantizedExperts:
        """Quantizes the experts' matrices once, for several calls; see `jax_ep.quantize_experts`.

        For a stack of layers, call it under `nnx.vmap`.
        """
        return quantize_by_rules(self._params(), self.config, axis_rules=self._axis_rules())

    def _axis_rules(self) -> AxisRules:
        return tuple(spmd.get_logical_axis_rules()) or self.axis_rules

    def _params(self) -> MoEParams:
        return MoEParams.of(**{name: v.get_value() for name, v in variables_of(self).items()})

    def update_bias(
        self, expert_counts: jax.Array, rate: float | jax.Array, *, zero_mean: bool = False
    ) -> None:
        """Updates the selection bias to balance loads; see `jax_ep.update_expert_bias`.

        Call it once per training step, with its `MoEMetrics.expert_counts` [R], or [layers, R] for
        a stack of layers. Raises ValueError if there is no bias, or if the counts have another
        shape.
        """
        bias = None if self.gate is None else self.gate.bias
        if bias is None:
            raise ValueError("update_bias needs selection_bias=True")
        value = bias.get_value()
        bias.set_value(routing.update_expert_bias(value, expert_counts, rate, zero_mean=zero_mean))


def variables_of(layer: MoE) -> dict[str, nnx.Variable]:
    """Returns the NNX variables of a layer's parameters, by the names in `MoEParams`."""
    found: dict[str, Any] = {name: getattr(layer, name) for name in moe_params.WEIGHTS}
    if layer.gate is not None:
        found |= {"gate": layer.gate.kernel, "bias": layer.gate.bias}
    return {name: variable for name, variable in found.items() if variable is not None}


def _mesh_of_state() -> AbstractMesh | None:
    """Returns the mesh on which the layer's arrays are created; None if they are not sharded."""
    ambient = jax.sharding.get_abstract_mesh()
    if ambient.empty or ambient.manual_axes or not nnx.using_eager_sharding():
        return None
    return ambient


def _bias(config: MoEConfig) -> RouterState:
    zeros = jnp.zeros(config.num_choosable, jnp.float32)
    mesh = _mesh_of_state()
    return RouterState(zeros if mesh is None else shard(zeros, mesh, PartitionSpec()))


def _param(value: jax.Array, name: str, config: MoEConfig) -> nnx.Param:
    """Returns `value` as a variable with the logical axes of parameter `name`, sharded."""
    axes: tuple[str | None, ...] = moe_params.LOGICAL_AXES[name]
    kind = nnx.LoRAParam if name in ADAPTERS else nnx.Param
    mesh = _mesh_of_state()
    if mesh is None:
        return kind(value, out_sharding=axes, eager_sharding=False)

    given: dict[str, Any] = dict(spmd.get_logical_axis_rules())  # the rules in force
    fsdp = dict(zip(axes, config.fsdp_axes_of(axes), strict=True))  # by logical axis
    defaults = _default_rules(fsdp, given, config, mesh)
    rules = given | defaults
    replaces_rule = False
    if "exp" in axes and not _axes_of(mesh, (*as_axes(config.expert_axis), *fsdp["exp"])):
        # Without an expert axis on the mesh, every rank has all experts (data parallelism).
        if name == "wi_0":  # once for a layer
            _warn_of_rule(rules["exp"], mesh, config)
        replaces_rule = rules["exp"] is not None
        rules["exp"] = None
    axes, spec = _without_repeats(axes, rules, prior=[axis for axis in axes if fsdp[axis]])
    if "exp" in axes:
        _check_divides(value, spec[0], mesh, config)
    # Flax's eager sharding would apply the replaced rule. On Explicit axes, it would shard an
    # optimizer's state by the logical axes, of which a stack of layers may lack one, and not by the
    # parameter's type.
    flax_shards = set(mesh.axis_types) == {AxisType.Auto} and not replaces_rule
    if not flax_shards:
        value = shard(value, mesh, PartitionSpec(*spec))
    # With these rules, Flax finds the mesh axes of this parameter in nnx.get_partition_spec, too.
    metadata: Any = {"sharding_rules": tuple(defaults.items())} if defaults else {}
    return kind(value, out_sharding=axes, eager_sharding=flax_shards, **metadata)


def _default_rules(
    fsdp: Mapping[str | None, Axes], given: Mapping[str, Any], config: MoEConfig, mesh: AbstractMesh
) -> dict[str, Any]:
    """Returns rules for the logical axes of a parameter that have no rule in `given`."""
    # `fsdp` maps each of its logical axes to the mesh axes that `fsdp_axes` give for it.
    options: dict[str, Any] = {"exp": config.expert_axis, "mlp": config.tensor_axis or ()}
    defaults: dict[str, Any] = {}
    for axis, fsdp_axes in fsdp.items():
        if axis is None or axis in given:
            continue
        named_axes = (*as_axes(options.get(axis, ())), *fsdp_axes)
        if named_axes or axis == "exp":
            defaults[axis] = _axes_of(mesh, named_axes) or None
        else:
            # As in Flax, a logical axis without a rule is the mesh axis of its name.
            defaults[axis] = axis if axis in mesh.axis_names else None
    return defaults


def _without_repeats(
    axes: tuple[str | None, ...], rules: Mapping[str, Any], *, prior: Sequence[str | None]
) -> tuple[tuple[str | None, ...], list[Any]]:
    """Returns the logical axes, None where a mesh axis would be used twice, and their mesh axes."""
    # `rules` has a rule for each of `axes`. Those of `prior`, which `fsdp_axes` splits, come first.
    ordered = sorted(rules.items(), key=lambda rule: rule[0] not in prior)
    kept, spec = [], []
    for axis, assigned in zip(axes, assign_axes(axes, ordered), strict=True):
        mesh_axes = rules[axis] if axis else None
        if mesh_axes and not assigned:  # They split another dimension already.
            axis = mesh_axes = None
        kept.append(axis)
        spec.append(mesh_axes)
    return tuple(kept), spec


def _warn_of_rule(axes: Any, mesh: AbstractMesh, config: MoEConfig) -> None:
    """Warns if a rule shards "exp" over `axes` of a mesh that lacks the expert axis."""
    if axes := tuple(axis for axis in as_axes(axes or ()) if mesh.shape.get(axis, 1) > 1):
        warn(
            f'the axis rules shard "exp" over {axes} of the mesh {dict(mesh.shape)}, but it lacks '
            f"expert_axis {as_axes(config.expert_axis)}: every rank has all experts. Set "
            "expert_axis to the axes of the rule, or leave the rule out.",
        )


def _axes_of(mesh: AbstractMesh, axes: str | Axes) -> Axes:
    return tuple(axis for axis in as_axes(axes) if axis in mesh.axis_names)


def _check_divides(weights: jax.Array, axes: Any, mesh: AbstractMesh, config: MoEConfig) -> None:
    """Raises ValueError unless the ranks along `axes` divide the experts or slots."""
    names = as_axes(axes or ())
    num_ranks = math.prod(mesh.shape.get(axis, 1) for axis in names)
    if weights.shape[0] % num_ranks:
        name = "num_experts" if config.num_slots is None else "num_slots"
        # Axes of `fsdp_axes` or of a rule.
        others = [axis for axis in names if axis not in as_axes(config.expert_axis)]
        hint = f'; or split "embed" over {others}' if others else ""
        of_ranks = f'{names}, over which "exp" is split' if others else f"expert_axis {names}"
        raise ValueError(
            f"{name} must be a multiple of the {num_ranks} ranks along {of_ranks}, but is "
            f"{weights.shape[0]}{hint}."
        )
