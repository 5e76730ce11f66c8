"""Defines `MoE`, the MoE layer for Flax NNX; `jax_ep.moe` has the computation."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import spmd
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jax_ep.checks import as_axes
from jax_ep.moe import params as moe_params
from jax_ep.moe import routing
from jax_ep.moe.config import MoEConfig, check_config
from jax_ep.moe.expert_matmuls import QuantizedExperts
from jax_ep.moe.fsdp import assign_axes
from jax_ep.moe.layer import quantize_by_rules, run_layer
from jax_ep.moe.mesh import AxisRules, shard
from jax_ep.moe.metrics import MoEMetrics
from jax_ep.moe.options import documented, pop_options, takes
from jax_ep.moe.params import (
    Initializer,
    MoEParams,
    ParameterOptions,
    check_parameter_options,
)
from jax_ep.moe.router import RouterInputs
from jax_ep.placement.table import Placement


class RouterState(nnx.Variable):
    """The type of the router's selection bias, which is state that gradients do not train."""


class Gate(nnx.Module):
    """Holds the router's kernel [H, E] and, with `selection_bias`, its selection bias [E] float32.

    Here E is the number of experts that the router chooses among, including the free experts (zero,
    identity and constant experts).
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        *,
        selection_bias: bool,
        kernel_init: Initializer,
        param_dtype: Any,
        config: MoEConfig,
        rngs: nnx.Rngs,
    ):
        kernel = kernel_init(rngs.params(), (hidden, num_experts), param_dtype)
        self.kernel = _param(kernel, "gate", config)
        self.bias = RouterState(jnp.zeros(num_experts, jnp.float32)) if selection_bias else None


@documented(ParameterOptions, parameters=moe_params.table())
class MoE(nnx.Module):
    """Mixture of MLP experts, spread over the ranks of a mesh axis.

    Replaces the MLP of a transformer block: `y, metrics = layer(x)` with x [..., H], y of x's
    shape, and `metrics` a `jax_ep.MoEMetrics` of losses, expert counts and drops for all
    ranks. The losses reach the training loss only if you add them. `jax_ep.moe_layer` says on
    which mesh the layer runs. On any mesh, the shapes of the parameters are the same, and the
    output is the same up to rounding.

    Parameters (`nnx.Param`), each with its shape, its logical axes (map "exp" to the mesh's expert
    axis) and the options that it needs:
      {parameters}
    A parameter that the options leave out is None. H is the hidden size of a token, F that of an
    expert, and S that of all shared experts together. R is the number of experts that the router
    chooses among: the E experts, and the free experts (zero, identity and constant experts). C is
    the number of constant experts. If `num_slots` is P, the parameters with "exp" have P instead of
    E in their shapes: each of the P slots holds a copy of one expert. At first, slot s holds expert
    s modulo E, as in `jax_ep.placement.Placement.in_order`. With `selection_bias` there is
    gate.bias [R] (`RouterState`), which only `update_bias` changes.

    If a mesh is set, or given as `mesh`, the parameters are created sharded: each logical axis over
    the mesh axes that `nnx.logical_axis_rules` gives for it. Without a rule, "exp" is sharded over
    `expert_axis`, "mlp" over `tensor_axis`, each logical axis in `fsdp_axes` also over the axes
    that `fsdp_axes` gives for it, and any other logical axis over none. A rule does not apply to a
    parameter of which another rule already splits a dimension over the same mesh axis. Rules that
    contradict `fsdp_axes` raise an error in a call. On a mesh without
    `expert_axis`, every rank has all experts. The layer stores the rules, and uses them in calls
    that are made outside `nnx.logical_axis_rules`.

    The arguments from `num_shared_experts` to `gate_init` are the fields of `ParameterOptions`.
    They decide which parameters there are, and how they are initialized.

    Args:
      hidden: H, the hidden size of a token.
      mlp_dim: F, the hidden size of one expert.
      num_experts: E, the number of routed experts.
      num_experts_per_token: K, the number of experts that each token chooses.
      {ParameterOptions}
      router_dim: H', the size of the last axis of `router_x`, if calls are given `router_x`; None
        means H.
      rngs: random number generators, of which the stream "params" initializes the parameters.
      fields: the other fields of `jax_ep.MoEConfig`.

    Raises:
      TypeError: a keyword is not a field of `jax_ep.MoEConfig`, or JAX arrays cannot have
        `param_dtype`.
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

    @takes(ParameterOptions, before="router_dim", others=True)
    def __init__(
        self,
        hidden: int,
        mlp_dim: int,
        *,
        num_experts: int,
        num_experts_per_token: int,
        router_dim: int | None = None,
        rngs: nnx.Rngs,
        **fields: Any,
    ):
        options = pop_options(ParameterOptions, fields)
        self.config = config = MoEConfig(
            num_experts=num_experts, num_experts_per_token=num_experts_per_token, **fields
        )
        check_config(config)
        check_parameter_options(options, router_dim)
        make_gate = functools.partial(
            Gate,
            hidden if router_dim is None else router_dim,
            config.num_choosable,
            selection_bias=options.selection_bias,
            param_dtype=options.param_dtype,
            config=config,
            rngs=rngs,
        )
        self.axis_rules = _hashable(spmd.get_logical_axis_rules())
        # `gate` is assigned once, since NNX does not let an attribute change from None to a module.
        init = options.gate_init
        self.gate = None if init is None else make_gate(kernel_init=init)
        shapes = moe_params.weight_shapes(config, options, hidden, mlp_dim)
        for name in moe_params.WEIGHTS:
            param = None
            if (shape := shapes.get(name)) is not None:
                init = moe_params.initializer(name, config, options)
                weight = init(rngs.params(), shape, options.param_dtype)
                param = _param(weight, name, config)
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
        """Runs the layer on tokens x.

        Args:
          x: [..., H] floating, for example [batch, sequence, H].
          mask: [...] bool or integer, or None: tokens with False or 0 go to no routed expert, and
            the metrics do not count them.
          placement: the experts' placement, for a layer with `num_slots`; see `jax_ep.moe_layer`.
          router_x, topk_idx, topk_weights: the router's input, the caller's choices of experts and
            their weights, each with x's leading dimensions, or None; see `jax_ep.moe_layer`.
          quantized_experts: with `matmul_dtype`, what `quantize_experts` returned for the same
            parameters; None quantizes the experts in each call.

        Returns:
          The output, [..., H], and the `jax_ep.MoEMetrics` of all ranks' tokens.

        Raises:
          ValueError, TypeError: an argument or attribute does not fit; the message names it.
        """
        inputs = RouterInputs(router_x, topk_idx, topk_weights)
        return run_layer(
            self._params(),
            x,
            self.config,
            mask,
            placement,
            inputs,
            quantized_experts,
            axis_rules=self._axis_rules(),
        )

    def quantize_experts(self) -> QuantizedExperts:
        """Quantizes the experts' matrices once, for several calls; see `jax_ep.quantize_experts`.

        A training step with microbatches calls this method before the first microbatch, and passes
        the result to each call as `quantized_experts`. For a stack of layers, call it under
        `nnx.vmap`.

        Returns:
          The quantized matrices, sharded like the parameters.

        Raises:
          ValueError: `matmul_dtype` is None, or a rank's part of a matrix does not consist of whole
            blocks of 128 x 128 numbers.
        """
        return quantize_by_rules(self._params(), self.config, axis_rules=self._axis_rules())

    def _axis_rules(self) -> AxisRules:
        return tuple(spmd.get_logical_axis_rules()) or self.axis_rules

    def _params(self) -> MoEParams:
        """Returns the layer's parameters and selection bias as arrays, for `run_layer`."""
        gate = self.gate
        params: dict[str, Any] = {"gate": None, "bias": None}
        if gate is not None:
            params = {"gate": gate.kernel, "bias": gate.bias}
        params |= {name: getattr(self, name) for name in moe_params.WEIGHTS}
        arrays: Any = {name: None if v is None else v.get_value() for name, v in params.items()}
        return MoEParams(**arrays)

    def update_bias(self, expert_counts: jax.Array, rate: float | jax.Array) -> None:
        """Updates the selection bias to balance loads; see `jax_ep.update_expert_bias`.

        Call it once per training step.

        Args:
          expert_counts: [R]: `MoEMetrics.expert_counts` of the step, with R the number of experts,
            free experts included; [layers, R] for a stack of layers.
          rate: the change of the bias per step.

        Raises:
          ValueError: there is no bias, or the counts have another shape.
        """
        bias = None if self.gate is None else self.gate.bias
        if bias is None:
            raise ValueError("update_bias needs selection_bias=True")
        bias.set_value(routing.update_expert_bias(bias.get_value(), expert_counts, rate))


def _param(value: jax.Array, name: str, config: MoEConfig) -> nnx.Param:
    """Returns `value` as an `nnx.Param` with the logical axes of parameter `name`, sharded.

    The mesh is the ambient mesh or else `config.mesh`. If all axes of an ambient mesh are Auto,
    Flax's eager sharding shards the parameter. Otherwise this function does, and turns eager
    sharding off. On Explicit axes, an optimizer's state then takes its sharding from the
    parameter's type. Eager sharding would take it from the logical axes, but a stack of layers may
    lack the logical axis of its leading dimension.
    """
    axes: tuple[str | None, ...] = moe_params.LOGICAL_AXES[name]
    ambient = jax.sharding.get_abstract_mesh()
    mesh = config.mesh if ambient.empty else ambient
    if mesh is None or ambient.manual_axes or not nnx.using_eager_sharding():
        return nnx.Param(value, out_sharding=axes, eager_sharding=False)

    rules: dict[str, Any] = dict(spmd.get_logical_axis_rules())
    further = dict(zip(axes, config.further_axes_of(axes), strict=True))
    held = _axes_of(mesh, (*as_axes(config.expert_axis), *further.get("exp", ())))
    missing = [axis for axis in axes if axis is not None and axis not in rules]
    defaults: dict[str, Any] = {a: a if a in mesh.axis_names else None for a in missing}
    if "exp" in defaults:
        defaults["exp"] = held or None
    for axis, own in (("mlp", config.tensor_axis or ()), ("embed", ())):
        if axis in defaults and (named_axes := (*as_axes(own), *further.get(axis, ()))):
            defaults[axis] = _axes_of(mesh, named_axes) or None
    named = rules | defaults
    if "exp" in axes and not held:
        # Without an expert axis on the mesh, every rank has all experts (data parallelism).
        if name == "wi_0":
            _warn_of_rule(named["exp"], mesh, config)
        named["exp"] = None
    axes, spec = _without_repeats(axes, named, [axis for axis in axes if further[axis]])
    if "exp" in axes:
        _check_divides(value, spec[0], mesh, config)
    all_auto = set(mesh.axis_types) == {AxisType.Auto}
    flax_can = not ambient.empty and all_auto and spec[0] == rules.get(str(axes[0]), spec[0])
    if not flax_can:
        value = shard(value, mesh, PartitionSpec(*spec))
    metadata: Any = {"sharding_rules": tuple(defaults.items())} if defaults else {}
    return nnx.Param(value, out_sharding=axes, eager_sharding=flax_can, **metadata)


def _without_repeats(
    axes: tuple[str | None, ...], rules: Mapping[str, Any], first: Sequence[str | None]
) -> tuple[tuple[str | None, ...], list[Any]]:
    """Returns a parameter's logical axes, and the mesh axes that the rules give each of them.

    The rules apply in their order, but those of the logical axes `first` before all others. If a
    rule gives an axis of the mesh that is already used, its logical axis becomes None, and gets no
    mesh axes.
    """
    in_order = sorted(rules.items(), key=lambda rule: rule[0] not in first)
    parts = assign_axes(axes, in_order)
    kept = tuple(
        axis if axis and (part or not rules[axis]) else None
        for axis, part in zip(axes, parts, strict=True)
    )
    return kept, [None if axis is None else rules[axis] for axis in kept]


def _hashable(rules: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((name, tuple(a) if isinstance(a, list) else a) for name, a in rules)


def _warn_of_rule(axes: Any, mesh: Mesh | AbstractMesh, config: MoEConfig) -> None:
    """Warns if an axis rule shards "exp" over `axes`, but the mesh lacks `config.expert_axis`.

    Every rank then has all experts in spite of the rule.
    """
    if axes := tuple(axis for axis in as_axes(axes or ()) if mesh.shape.get(axis, 1) > 1):
        warnings.warn(
            f'the axis rules shard "exp" over {axes} of the mesh {dict(mesh.shape)}, but it lacks '
            f"expert_axis {as_axes(config.expert_axis)}: every rank has all experts. Set "
            "expert_axis to the axes of the rule, or leave the rule out.",
            stacklevel=4,
        )


def _axes_of(mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in as_axes(axes) if axis in mesh.axis_names)


def _check_divides(
    weights: jax.Array, axes: Any, mesh: Mesh | AbstractMesh, config: MoEConfig
) -> None:
    """Raises ValueError unless the ranks along `axes` divide the leading dimension of `weights`.

    The leading dimension counts experts, or slots if the layer has slots.
    """
    names = as_axes(axes or ())
    num_ranks = math.prod(mesh.shape.get(axis, 1) for axis in names)
    if weights.shape[0] % num_ranks:
        name = "num_experts" if config.num_slots is None else "num_slots"
        further = [axis for axis in names if axis not in as_axes(config.expert_axis)]
        hint = f'; or split "embed" over {further}' if further else ""
        what = f'{names}, over which "exp" is split' if further else f"expert_axis {names}"
        raise ValueError(
            f"{name} must be a multiple of the {num_ranks} ranks along {what}, but is "
            f"{weights.shape[0]}{hint}."
        )
