"""The MoE layer for Flax NNX: declares parameters; `jax_ep.moe` has the math."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import spmd
from jax.sharding import Mesh

from jax_ep.exchange.api import Implementation
from jax_ep.matmul.api import Implementation as MatmulImplementation
from jax_ep.moe import layer as moe
from jax_ep.moe import routing

Initializer = jax.nn.initializers.Initializer


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
        rngs: nnx.Rngs,
    ):
        kernel = kernel_init(rngs.params(), (hidden, num_experts), param_dtype)
        self.kernel = _param(kernel, "gate")
        self.bias = RouterState(jnp.zeros(num_experts, jnp.float32)) if selection_bias else None


class MoE(nnx.Module):
    """Mixture of gated MLP experts, spread over the ranks of a mesh axis.

    Replaces the MLP of a transformer block: `y, metrics = layer(x)` with x [..., H], y of x's
    shape, and `metrics` a `jax_ep.MoEMetrics` of losses, expert counts and drops for all
    ranks; the losses reach the training loss only if you add them. `jax_ep.moe_layer` says on
    which mesh it runs. The output does not depend on the mesh, and neither do the shapes of the
    parameters.

    Parameters (`nnx.Param`), with their logical axes (map "exp" to the mesh's expert axis):
      gate.kernel  [H, E]               ("embed", None)
      wi_0, wi_1   [E, H, F]            ("exp", "embed", "mlp")
      wo           [E, F, H]            ("exp", "mlp", "embed")
      shared_wi_0, shared_wi_1 [H, S·F] ("embed", "mlp"), with S shared experts, else None
      shared_wo    [S·F, H]             ("mlp", "embed")
    and, with `selection_bias`, gate.bias [E] (`RouterState`), which only `update_bias` changes.

    They are born sharded where Flax can do it: with a mesh set and
    `nnx.logical_axis_rules` that resolve their axes; otherwise place them with
    `nnx.get_partition_spec`.

    Args:
      hidden: H.
      mlp_dim: F, the hidden size of one expert.
      num_experts: E.
      num_experts_per_token: K.
      num_shared_experts: S, experts that every token goes to.
      selection_bias: keep a DeepSeek-V3 selection bias.
      param_dtype: dtype of the parameters.
      kernel_init: initializer of one expert's matrix, called for each expert with [H, F] or [F, H].
      gate_init: initializer of gate.kernel.
      rngs: gives the key "params".

    The others are those of `jax_ep.MoEConfig`.
    """

    wi_0: nnx.Param
    wi_1: nnx.Param
    wo: nnx.Param
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
        score: routing.Score = "softmax",
        selection_bias: bool = False,
        num_groups: int = 1,
        groups_kept: int = 1,
        normalize: bool = True,
        scale: float = 1.0,
        capacity_factor: float | None = None,
        expert_alignment: int = 1,
        wire_dtype: Any = None,
        activation: Callable[[jax.Array], jax.Array] = jax.nn.silu,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        expert_axis: str | tuple[str, ...] = "expert",
        batch_axes: str | tuple[str, ...] | None = None,
        mesh: Mesh | None = None,
        implementation: Implementation = None,
        matmul_implementation: MatmulImplementation = None,
        kernel_init: Initializer = moe.default_kernel_init,
        gate_init: Initializer = moe.default_kernel_init,
        rngs: nnx.Rngs,
    ):
        self.config = moe.MoEConfig(
            num_experts=num_experts,
            num_experts_per_token=num_experts_per_token,
            score=score,
            num_groups=num_groups,
            groups_kept=groups_kept,
            normalize=normalize,
            scale=scale,
            capacity_factor=capacity_factor,
            expert_alignment=expert_alignment,
            wire_dtype=wire_dtype,
            activation=activation,
            dtype=dtype,
            expert_axis=expert_axis,
            batch_axes=batch_axes,
            mesh=mesh,
            implementation=implementation,
            matmul_implementation=matmul_implementation,
        )
        self.gate = Gate(
            hidden,
            num_experts,
            selection_bias=selection_bias,
            kernel_init=gate_init,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        init = moe.per_expert(kernel_init)
        shapes = moe.weight_shapes(num_experts, hidden, mlp_dim, num_shared_experts)
        for name in moe.WEIGHTS:
            shape = shapes.get(name)
            weight = None if shape is None else init(rngs.params(), shape, param_dtype)
            setattr(self, name, None if weight is None else _param(weight, name))

    def __call__(
        self, x: jax.Array, mask: jax.Array | None = None
    ) -> tuple[jax.Array, moe.MoEMetrics]:
        """Runs the layer.

        Args:
          x: [..., H] floating, for example [batch, sequence, H].
          mask: [...] bool or None: tokens that are False go to no routed expert and count in no
            metric.

        Returns:
          The output, [..., H], and the metrics.

        Raises:
          ValueError, TypeError: an argument or attribute does not fit; the message names it.
        """
        params = {"gate": self.gate.kernel, "bias": self.gate.bias}
        params |= {name: getattr(self, name) for name in moe.WEIGHTS}
        arrays: Any = {name: None if v is None else v.get_value() for name, v in params.items()}
        return moe.moe_layer(moe.MoEParams(**arrays), x, self.config, mask)

    def update_bias(self, expert_counts: jax.Array, rate: float | jax.Array) -> None:
        """Steps the selection bias against the load; see `jax_ep.update_expert_bias`.

        Call it once per training step.

        Args:
          expert_counts: [E]: `MoEMetrics.expert_counts` of the step.
          rate: the step of the bias.

        Raises:
          ValueError: there is no bias, or the counts have another shape.
        """
        bias = self.gate.bias
        if bias is None:
            raise ValueError("update_bias needs selection_bias=True")
        bias.set_value(routing.update_expert_bias(bias.get_value(), expert_counts, rate))


def _param(value: jax.Array, name: str) -> nnx.Param:
    """An `nnx.Param` with logical axes, sharded now only if they resolve to axes of a mesh.

    Flax's own eager sharding raises where there is no mesh, or no rule for an axis.
    """
    axes = moe.LOGICAL_AXES[name]
    mesh = jax.sharding.get_abstract_mesh()
    rules = dict(spmd.get_logical_axis_rules())
    resolved = [rules.get(a, a) for a in axes if a is not None]
    names = {n for a in resolved if a is not None for n in ((a,) if isinstance(a, str) else a)}
    eager = nnx.using_eager_sharding() and not mesh.manual_axes and names <= set(mesh.axis_names)
    return nnx.Param(value, out_sharding=axes, eager_sharding=eager and not mesh.empty)
