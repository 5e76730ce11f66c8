"""Defines `MoE`, the MoE layer for Flax Linen; `jax_ep.moe` has the computation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import spmd

from jax_ep import checks
from jax_ep.exchange.interface import Implementation
from jax_ep.formats import QuantizedArray
from jax_ep.matmul.primitives import Implementation as MatmulImplementation
from jax_ep.moe import losses, routing
from jax_ep.moe import params as moe_params
from jax_ep.moe.call_checks import Call
from jax_ep.moe.config import MoEConfig, Router, WeightsOn, check_config
from jax_ep.moe.expert_matmuls import EXPERT_MATRICES, QuantizedExperts
from jax_ep.moe.expert_mlp import Activation
from jax_ep.moe.held_experts import quantize_by_rules
from jax_ep.moe.layer import run_layer
from jax_ep.moe.metrics import MoEMetrics
from jax_ep.moe.params import MoEParams, ParameterOptions
from jax_ep.placement.table import Placement

ROUTER_STATE = "router_state"


class LogicallyPartitioned(nn.LogicallyPartitioned):
    """A Flax box of a parameter with logical axes, to which `nn.scan` may add an unnamed one."""

    # Flax's own class raises an error unless `metadata_params` name the added axis.

    __eq__ = nn.LogicallyPartitioned.__eq__

    def add_axis(self, index: int, params: Mapping[Any, Any]) -> Any:
        return super().add_axis(index, {nn.PARTITION_NAME: None, **params})

    def remove_axis(self, index: int, params: Mapping[Any, Any]) -> Any:
        return super().remove_axis(index, {nn.PARTITION_NAME: None, **params})


class Gate(nn.Module):
    """Holds the router's kernel [H, R] and, with `selection_bias`, its bias [R] float32."""

    num_choosable: int  # R, the number of experts that the router chooses among
    selection_bias: bool
    kernel_init: nn.initializers.Initializer
    param_dtype: Any

    @nn.compact
    def __call__(self, hidden: int) -> tuple[jax.Array, jax.Array | None]:
        """Returns the kernel [hidden, R], and the selection bias [R] or None."""
        if self.has_variable("params", "bias"):
            raise ValueError(
                'gate.bias is no parameter: the selection bias is in the collection "router_state" '
                "(selection_bias=True), and a trained bias of the logits is the parameter "
                "gate_bias (use_gate_bias=True). Move it there."
            )
        init: Any = _partitioned(self.kernel_init, "gate")
        kernel = self.param("kernel", init, (hidden, self.num_choosable), self.param_dtype)
        if not self.selection_bias:
            return kernel, None
        if not (
            self.has_variable(ROUTER_STATE, "bias") or self.is_mutable_collection(ROUTER_STATE)
        ):
            raise ValueError(
                'selection_bias=True keeps gate.bias in the collection "router_state", and it is '
                "not here. Pass that collection to apply, as init returned it; in nn.scan, set "
                'variable_axes={"params": 0, "router_state": 0}.'
            )
        bias = self.variable(ROUTER_STATE, "bias", jnp.zeros, (self.num_choosable,), jnp.float32)
        return kernel, bias.value


class MoE(nn.Module):
    """Mixture of MLP experts, spread over the ranks of a mesh axis.

    Replaces the MLP of a transformer block: `y, metrics = MoE(...)(x)` with x [..., H], y of x's
    shape, and `metrics` a `jax_ep.MoEMetrics` of losses, expert counts and drops for all
    ranks. The losses reach the training loss only if you add them. `jax_ep.moe_layer` says on
    which mesh the layer runs. On any mesh, the shapes of the parameters are the same.

    The parameters are those of `jax_ep.MoEParams`, and the gate is gate.kernel. If `num_slots` is
    P, the experts' parameters are [P, ...]: each of the P slots holds a copy of one expert. At
    first, slot s holds expert s modulo E, as in `jax_ep.placement.Placement.in_order`. With
    `selection_bias`, gate.bias is in the collection "router_state", and only `update_bias` changes
    it. In `nn.scan`, list the collections "params" and "router_state" in `variable_axes`.

    Attributes:
      num_experts: E, the number of routed experts.
      num_experts_per_token: K, the number of experts that each token chooses.
      mlp_dim: F, the hidden size of one expert.
      num_shared_experts, ..., gate_init: which parameters there are, and how they are initialized;
        see `jax_ep.moe.params.ParameterOptions`.
      score, ..., matmul_implementation: what the layer computes, and how; see `jax_ep.MoEConfig`.
    """

    num_experts: int
    num_experts_per_token: int
    mlp_dim: int
    num_shared_experts: int = 0
    shared_dim: int | None = None
    use_shared_gate: bool = False
    gated: bool = True
    use_mlp_bias: bool = False
    selection_bias: bool = False
    use_gate_bias: bool = False
    use_expert_scale: bool = False
    lora_rank: int = 0
    param_dtype: Any = jnp.float32
    kernel_init: moe_params.Initializer = moe_params.default_kernel_init
    gate_init: moe_params.Initializer | None = moe_params.default_kernel_init
    _: dataclasses.KW_ONLY
    score: routing.Score = "softmax"
    choose_by: routing.ChooseBy = "score"
    num_groups: int = 1
    groups_kept: int = 1
    group_score: routing.GroupScore = "top2"
    normalize: bool = True
    normalize_epsilon: float = 0.0
    scale: float = 1.0
    router: Router | None = None
    router_dtype: Any = jnp.float32
    logit_softcap: float | None = None
    balance_convention: losses.Convention = "switch"
    capacity_factor: float | None = None
    host_capacity_factor: float | None = None
    num_slots: int | None = None
    zero_experts: int = 0
    identity_experts: int = 0
    constant_experts: int = 0
    free_expert_factor: float = 1.0
    record_choices: bool = False
    token_chunks: int = 1
    wire_dtype: Any = None
    activation: Activation = jax.nn.silu
    clamp: float | None = None
    matmul_dtype: Any = None
    weights_on: WeightsOn = "output"
    shared_activation: Activation | None = None
    lora_scale: float = 1.0
    dtype: Any = None
    expert_axis: str | tuple[str, ...] = "expert"
    batch_axes: str | tuple[str, ...] | None = None
    sequence_axes: str | tuple[str, ...] | None = None
    fsdp_axes: Mapping[str, str | tuple[str, ...]] | None = None
    tensor_axis: str | tuple[str, ...] | None = None
    implementation: Implementation = None
    matmul_implementation: MatmulImplementation = None

    def setup(self) -> None:
        config = MoEConfig.of(self)
        check_config(config)
        moe_params.check_parameter_options(ParameterOptions.of_layer(self))
        if (init := self.gate_init) is not None:
            self.gate = Gate(config.num_choosable, self.selection_bias, init, self.param_dtype)

    @nn.compact
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
        hidden = _columns("x", x)
        kernel = bias = None
        if self.gate_init is not None:
            kernel, bias = self.gate(hidden if router_x is None else _columns("router_x", router_x))
        config, options = MoEConfig.of(self), ParameterOptions.of_layer(self)
        shapes = moe_params.weight_shapes(config, options, hidden, self.mlp_dim)
        weights = {
            name: self._weight(name, shape, moe_params.initializer(name, config, options))
            for name, shape in shapes.items()
        }
        call = Call(x, mask, router_x, topk_idx, topk_weights)
        return run_layer(
            MoEParams.of(gate=kernel, bias=bias, **weights),
            call,
            config,
            placement,
            quantized_experts,
            axis_rules=tuple(spmd.get_logical_axis_rules()),
            in_init=self.is_initializing(),
        )

    def quantize_experts(self) -> QuantizedExperts:
        """Quantizes the experts' matrices once, for several calls; see `jax_ep.quantize_experts`.

        Call it from the parent module, or as `moe.apply({"params": params},
        method="quantize_experts")`; for a stack of layers, under `jax.vmap` over the parameters.
        Also raises ValueError if there are no parameters.
        """
        weights = nn.unbox({
            name: self.get_variable("params", name) for name in EXPERT_MATRICES
        })  # fmt: skip
        if weights["wi_0"] is None or weights["wo"] is None:
            raise ValueError(
                'quantize_experts needs the layer\'s parameters: pass {"params": ...} to apply, as '
                "init returned them."
            )
        rules = tuple(spmd.get_logical_axis_rules())
        return quantize_by_rules(MoEParams.of(**weights), MoEConfig.of(self), axis_rules=rules)

    def _weight(
        self, name: str, shape: tuple[int, ...], init: moe_params.WeightInitializer
    ) -> jax.Array | QuantizedArray:
        """Returns parameter `name` of `shape`, which Linen's `init` makes by the initializer."""
        logical_axes = moe_params.PARAMETERS[name].logical_axes
        if self.has_variable("params", name):
            given = nn.unbox(self.get_variable("params", name))
            if isinstance(given, QuantizedArray):
                return given
            # Flax checks a parameter against `shape`. In the caller's shard_map, a parameter may
            # hold only this rank's experts and columns, so these sizes are the parameter's own.
            # The layer itself checks the number of experts.
            is_of_rank = bool(jax.sharding.get_abstract_mesh().manual_axes)
            split = {"exp", "mlp"} if is_of_rank and self.tensor_axis is not None else {"exp"}
            sizes = zip(logical_axes, given.shape, shape, strict=True)
            shape = tuple(held if axis in split else size for axis, held, size in sizes)
        boxed: Any = _partitioned(init, name)
        return self.param(name, boxed, shape, self.param_dtype)

    def update_bias(
        self, expert_counts: jax.Array, rate: float | jax.Array, *, zero_mean: bool = False
    ) -> None:
        """Updates the selection bias to balance loads; see `jax_ep.update_expert_bias`.

        Call it once per training step, with the collection "router_state" mutable: from the parent
        module, or from outside as `moe.apply(variables, counts, rate, method="update_bias",
        mutable=["router_state"])`. `expert_counts` [R] are the `MoEMetrics.expert_counts` of the
        step. Raises ValueError if there is no bias, or if the counts have another shape.
        """
        if self.gate_init is None:
            raise ValueError("update_bias needs a gate, but gate_init is None")
        bias: jax.Array | None = self.gate.get_variable(ROUTER_STATE, "bias")
        if bias is None:
            raise ValueError("update_bias needs selection_bias=True and an initialized layer")
        bias = routing.update_expert_bias(bias, expert_counts, rate, zero_mean=zero_mean)
        self.gate.put_variable(ROUTER_STATE, "bias", bias)


def _partitioned(init: moe_params.WeightInitializer, name: str) -> Any:
    """Returns an initializer that boxes the result of `init` with the logical axes of `name`."""

    def boxed(*args: Any) -> LogicallyPartitioned:
        return LogicallyPartitioned(init(*args), moe_params.LOGICAL_AXES[name])

    return boxed


def _columns(name: str, x: jax.Array) -> int:
    checks.check_array(name, x, None, jnp.floating, "[..., H]")
    if not x.shape:
        raise ValueError(f"{name} must be [..., H], but is a scalar.")
    return x.shape[-1]
