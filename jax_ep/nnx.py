"""The MoE layer for Flax NNX: declares parameters; `jax_ep.moe` has the math."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import spmd
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jax_ep import checks
from jax_ep.checks import as_axes
from jax_ep.moe import params as moe_params
from jax_ep.moe import routing
from jax_ep.moe.config import MoEConfig, check_config
from jax_ep.moe.layer import run_layer
from jax_ep.moe.mesh import shard
from jax_ep.moe.metrics import MoEMetrics
from jax_ep.moe.params import Initializer, MoEParams
from jax_ep.moe.router import RouterInputs
from jax_ep.placement.table import Placement


class RouterState(nnx.Variable):
    """State of a router that is not trained by gradients: the selection bias."""


class Gate(nnx.Module):
    """The router's parameters: kernel [H, E], and the selection bias [E] if there is one."""

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


class MoE(nnx.Module):
    """Mixture of MLP experts, spread over the ranks of a mesh axis.

    Replaces the MLP of a transformer block: `y, metrics = layer(x)` with x [..., H], y of x's
    shape, and `metrics` a `jax_ep.MoEMetrics` of losses, expert counts and drops for all
    ranks; the losses reach the training loss only if you add them. `jax_ep.moe_layer` says on
    which mesh it runs. The shapes of the parameters do not depend on the mesh, nor does the output
    but for rounding.

    Parameters (`nnx.Param`), with their logical axes (map "exp" to the mesh's expert axis):
      gate.kernel  [H, E]               ("embed", None)
      wi_0, wi_1   [E, H, F]            ("exp", "embed", "mlp"); with `gated=False` no wi_1
      wo           [E, F, H]            ("exp", "mlp", "embed")
      wi_0_bias, wi_1_bias [E, F]       ("exp", "mlp"), with `use_mlp_bias`, else None
      wo_bias      [E, H]               ("exp", "embed"), with `use_mlp_bias`, else None
      shared_wi_0, shared_wi_1 [H, S]   ("embed", "mlp"), with shared experts, else None
      shared_wo    [S, H]               ("mlp", "embed")
      shared_gate  [H, 1]               ("embed", None), with `use_shared_gate`, else None
      gate_bias    [E]                  (None,), with `use_gate_bias`, else None
      expert_scale [E]                  (None,), with `use_expert_scale`, else None
    With `constant_experts` there are constant_value [C, H] and constant_gate [C, H, 2], else None.
    Where `num_slots` is P, wi_0, wi_1 and wo have P instead of E, placed as
    `jax_ep.placement.Placement.in_order` until they are moved. With `selection_bias` there is
    gate.bias [E] (`RouterState`), which only `update_bias` changes.

    With a mesh set, or given as `mesh`, they are created sharded over it, each logical axis over
    the mesh axes that `nnx.logical_axis_rules` gives for it. Without a rule, "exp" is sharded over
    `expert_axis`, "mlp" over `tensor_axis`, and the others are not sharded. A mesh without
    `expert_axis` gives every rank all experts.

    Args:
      hidden: H.
      mlp_dim: F, the hidden size of one expert.
      num_experts: E.
      num_experts_per_token: K.
      num_shared_experts: the number of experts of width F that every token goes to.
      shared_dim: S, the width of all shared experts together, in place of num_shared_experts * F.
      use_shared_gate: multiply their output by a sigmoid of x @ shared_gate (Qwen2-MoE).
      gated: experts, shared ones too, have a gate; without it (Nemotron-H) there is no wi_1.
      use_mlp_bias: routed experts' matmuls have biases (GPT-OSS).
      selection_bias: keep a DeepSeek-V3 selection bias, which changes only the choice of experts.
      use_gate_bias: add a trained bias to the logits, for choice and weights (GPT-OSS).
      use_expert_scale: multiply each choice's weight by a trained factor of its expert (Gemma 4).
      param_dtype: dtype of the parameters.
      kernel_init: initializer of one expert's matrix, called for each expert with [H, F] or [F, H].
      gate_init: initializer of gate.kernel; None: `gate` is None, and each call is given
        `topk_idx` and `topk_weights`, or `router` needs no logits.
      router_dim: the size of `router_x`, where calls are given one; None: H.
      rngs: gives the key "params".
      fields: the other fields of `jax_ep.MoEConfig`.

    Raises:
      TypeError: a keyword is no field of `jax_ep.MoEConfig`, or an array cannot have `param_dtype`.
      ValueError: a parameter does not divide over the mesh axes of its logical axes, a rule names
        no axis of the mesh, or an argument is of a gate that gate_init=None leaves out.
    """

    gate: Gate | None
    gate_bias: nnx.Param | None
    expert_scale: nnx.Param | None
    wi_0: nnx.Param
    wi_1: nnx.Param | None
    wo: nnx.Param
    wi_0_bias: nnx.Param | None
    wi_1_bias: nnx.Param | None
    wo_bias: nnx.Param | None
    shared_gate: nnx.Param | None
    constant_value: nnx.Param | None
    constant_gate: nnx.Param | None
    shared_wi_0: nnx.Param | None
    shared_wi_1: nnx.Param | None
    shared_wo: nnx.Param | None

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
        param_dtype: Any = jnp.float32,
        kernel_init: Initializer = moe_params.default_kernel_init,
        gate_init: Initializer | None = moe_params.default_kernel_init,
        router_dim: int | None = None,
        rngs: nnx.Rngs,
        **fields: Any,
    ):
        self.config = MoEConfig(
            num_experts=num_experts, num_experts_per_token=num_experts_per_token, **fields
        )
        check_config(self.config)
        checks.as_dtype_of_arrays("param_dtype", param_dtype)
        checks.check_bool("selection_bias", selection_bias)
        make_gate = functools.partial(
            Gate,
            hidden if router_dim is None else router_dim,
            self.config.num_choosable,
            selection_bias=selection_bias,
            param_dtype=param_dtype,
            config=self.config,
            rngs=rngs,
        )
        # NNX lets an attribute be set to None or to a module, but not to the one after the other.
        self.gate = None if gate_init is None else make_gate(kernel_init=gate_init)
        if gate_init is None:
            moe_params.check_without_gate(selection_bias=selection_bias, router_dim=router_dim)
        shapes = moe_params.weight_shapes(
            num_experts,
            hidden,
            mlp_dim,
            num_shared_experts,
            shared_dim=shared_dim,
            gated=gated,
            use_gate_bias=use_gate_bias,
            use_expert_scale=use_expert_scale,
            use_mlp_bias=use_mlp_bias,
            use_shared_gate=use_shared_gate,
            num_slots=self.config.num_slots,
            num_free=self.config.num_free,
            num_constant=self.config.constant_experts,
        )
        for name in moe_params.WEIGHTS:
            param = None
            if (shape := shapes.get(name)) is not None:
                init = moe_params.initializer(name, kernel_init, num_experts, self.config.num_slots)
                weight = init(rngs.params(), shape, param_dtype)
                param = _param(weight, name, self.config)
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
    ) -> tuple[jax.Array, MoEMetrics]:
        """Runs the layer.

        Args:
          x: [..., H] floating, for example [batch, sequence, H].
          mask: [...] bool or integer, or None: tokens that are False or 0 go to no routed expert
            and count in no metric.
          placement: with `num_slots`, which expert each slot holds; see `jax_ep.moe_layer`.
          router_x, topk_idx, topk_weights: see `jax_ep.moe_layer`.

        Returns:
          The output, [..., H], and the metrics.

        Raises:
          ValueError, TypeError: an argument or attribute does not fit; the message names it.
        """
        gate = self.gate
        params: dict[str, Any] = {"gate": None, "bias": None}
        if gate is not None:
            params = {"gate": gate.kernel, "bias": gate.bias}
        params |= {name: getattr(self, name) for name in moe_params.WEIGHTS}
        arrays: Any = {name: None if v is None else v.get_value() for name, v in params.items()}
        inputs = RouterInputs(router_x, topk_idx, topk_weights)
        rules = dict(spmd.get_logical_axis_rules())
        return run_layer(
            MoEParams(**arrays),
            x,
            self.config,
            mask,
            placement,
            inputs,
            axis_rules=rules,
        )

    def update_bias(self, expert_counts: jax.Array, rate: float | jax.Array) -> None:
        """Steps the selection bias against the load; see `jax_ep.update_expert_bias`.

        Call it once per training step.

        Args:
          expert_counts: [E]: `MoEMetrics.expert_counts` of the step; [layers, E] for a stack.
          rate: the step of the bias.

        Raises:
          ValueError: there is no bias, or the counts have another shape.
        """
        bias = None if self.gate is None else self.gate.bias
        if bias is None:
            raise ValueError("update_bias needs selection_bias=True")
        bias.set_value(routing.update_expert_bias(bias.get_value(), expert_counts, rate))


def _param(value: jax.Array, name: str, config: MoEConfig) -> nnx.Param:
    """Returns an `nnx.Param` with logical axes, sharded over the mesh if there is one.

    That is the ambient mesh, or the layer's own. Flax's own eager sharding needs an ambient mesh, a
    rule for each logical axis, and axes of one type; where it lacks them this function shards the
    value itself. On Explicit axes it always does: the array's type then has the sharding, which an
    optimizer's state takes over. Flax would shard that by the logical axes, which are too few in a
    stack that was made without `transform_metadata`.
    """
    axes = moe_params.LOGICAL_AXES[name]
    ambient = jax.sharding.get_abstract_mesh()
    mesh = config.mesh if ambient.empty else ambient
    if mesh is None or ambient.manual_axes or not nnx.using_eager_sharding():
        return nnx.Param(value, out_sharding=axes, eager_sharding=False)

    rules: dict[str, Any] = dict(spmd.get_logical_axis_rules())
    held = _axes_of(mesh, config.expert_axis)
    missing = [axis for axis in axes if axis is not None and axis not in rules]
    defaults: dict[str, Any] = {a: a if a in mesh.axis_names else None for a in missing}
    if "exp" in defaults:
        defaults["exp"] = held or None
    if "mlp" in defaults and config.tensor_axis is not None:
        defaults["mlp"] = _axes_of(mesh, config.tensor_axis) or None
    named = rules | defaults
    spec = [None if axis is None else named[axis] for axis in axes]
    if "exp" in axes:
        if not held:  # data parallelism: every rank has all experts
            if name == "wi_0":
                _warn_of_rule(spec[0], mesh, config)
            spec[0] = None
        _check_divides(value, spec[0], mesh, config)
    all_auto = set(mesh.axis_types) == {AxisType.Auto}
    flax_can = not ambient.empty and all_auto and spec[0] == rules.get(str(axes[0]), spec[0])
    if not flax_can:
        value = shard(value, mesh, PartitionSpec(*spec))
    metadata: Any = {"sharding_rules": tuple(defaults.items())} if defaults else {}
    return nnx.Param(value, out_sharding=axes, eager_sharding=flax_can, **metadata)


def _warn_of_rule(axes: Any, mesh: Mesh | AbstractMesh, config: MoEConfig) -> None:
    """Warns if a rule names axes for the experts where the mesh lacks the layer's."""
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
    """Raises ValueError unless the experts of [E, ...], or the slots, divide over the mesh axes."""
    names = as_axes(axes or ())
    num_ranks = math.prod(mesh.shape.get(axis, 1) for axis in names)
    if weights.shape[0] % num_ranks:
        name = "num_experts" if config.num_slots is None else "num_slots"
        raise ValueError(
            f"{name} must be a multiple of the {num_ranks} ranks along expert_axis {names}, "
            f"but is {weights.shape[0]}."
        )
