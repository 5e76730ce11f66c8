"""Both Flax layers with one interface: functions of a dictionary of parameters."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

import jax_ep
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.params import WEIGHTS, MoEParams


def as_dict(params: MoEParams) -> dict[str, Any]:
    """Returns the parameters as both layers name them; the selection bias is left out."""
    weights = {name: w for name in WEIGHTS if (w := getattr(params, name)) is not None}
    return weights if params.gate is None else weights | {"gate": {"kernel": params.gate}}


class Linen:
    def __init__(self, hidden: int, mlp_dim: int, **options: Any):
        self.module, self.hidden = jax_ep.linen.MoE(mlp_dim=mlp_dim, **options), hidden

    @property
    def config(self) -> MoEConfig:
        return MoEConfig.of(self.module)

    def abstract(self, **given: Any) -> tuple[Any, Any]:
        """Returns the abstract parameters with their partition specs, and the abstract bias."""
        x = jnp.zeros((*given.get("topk_idx", jnp.zeros((1, 1))).shape[:-1], self.hidden))
        init = lambda: self.module.init(jax.random.key(0), x, **given)  # noqa: E731
        specs = nn.get_partition_spec(jax.eval_shape(init)["params"])
        made = jax.eval_shape(lambda: nn.unbox(init()))
        state = made.get("router_state")
        return (made["params"], specs), state and state["gate"]["bias"]

    def __call__(self, params: Any, *args: Any, bias: Any = None, **given: Any) -> Any:
        state = {} if bias is None else {"router_state": {"gate": {"bias": bias}}}
        return self.module.apply({"params": params, **state}, *args, **given)

    def quantize_experts(self, params: Any) -> Any:
        return self.module.apply({"params": params}, method="quantize_experts")

    def update_bias(self, params: Any, bias: Any, *args: Any, **options: Any) -> Any:
        state = {} if bias is None else {"router_state": {"gate": {"bias": bias}}}
        options |= dict(method="update_bias", mutable=["router_state"])
        _, state = self.module.apply({"params": params, **state}, *args, **options)
        return state["router_state"]["gate"]["bias"]


class NNX:
    def __init__(self, hidden: int, mlp_dim: int, **options: Any):
        make = lambda: jax_ep.nnx.MoE(hidden, mlp_dim, **options, rngs=nnx.Rngs(0))  # noqa: E731
        self.module = nnx.eval_shape(make)
        self.config = self.module.config

    def abstract(self, **given: Any) -> tuple[Any, Any]:
        """Returns the abstract parameters with their partition specs, and the abstract bias."""
        params = nnx.state(self.module, nnx.Param)
        specs, state = (
            nnx.get_partition_spec(params),
            nnx.state(self.module, jax_ep.nnx.RouterState),
        )
        bias = nnx.to_pure_dict(state)["gate"]["bias"] if jax.tree.leaves(state) else None
        return (nnx.to_pure_dict(params), nnx.to_pure_dict(specs)), bias

    def with_arrays(self, params: Any, bias: Any = None) -> Any:
        graph, state = nnx.split(self.module)
        own = params if bias is None else params | {"gate": params["gate"] | {"bias": bias}}
        nnx.replace_by_pure_dict(state, own)
        return nnx.merge(graph, state)

    def __call__(self, params: Any, *args: Any, bias: Any = None, **given: Any) -> Any:
        return self.with_arrays(params, bias)(*args, **given)

    def quantize_experts(self, params: Any) -> Any:
        return self.with_arrays(params).quantize_experts()

    def update_bias(self, params: Any, bias: Any, *args: Any, **options: Any) -> Any:
        module = self.with_arrays(params, bias)
        module.update_bias(*args, **options)
        return module.gate.bias.get_value()


LAYERS = {"linen": Linen, "nnx": NNX}
