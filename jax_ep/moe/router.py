"""Runs the router of an MoE layer, which chooses K experts for each token of one rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.exchange.routes import expert_ids
from jax_ep.moe import routing
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.params import MoEParams
from jax_ep.moe.routing import Routing


class RouterInputs(NamedTuple):
    """The optional arguments of a call of the layer that concern the router; a pytree.

    Attributes:
        router_x: [..., H'] floating: for each token, the row that the router reads. Its size H' may
            differ from the hidden size H. None means that the router reads the layer's tokens.
        topk_idx: [..., K] integer: expert ids that the caller has chosen, where -1 chooses no
            expert. None means that the router chooses.
        topk_weights: [..., K] floating: the weights of `topk_idx`. None means that they are
            computed from the logits.
    """

    router_x: jax.Array | None = None
    topk_idx: jax.Array | None = None
    topk_weights: jax.Array | None = None


def route(
    params: MoEParams, x: jax.Array, inputs: RouterInputs, mask: jax.Array | None, config: MoEConfig
) -> tuple[Routing, jax.Array | None]:
    """Chooses K experts for each of T tokens and weighs them, or weighs the caller's choices.

    Args:
        params: the parameters of the layer.
        x: [T, H'] floating: for each token, the row that the router reads. H' is the hidden size H,
            unless the layer's call gives rows of another size as `router_x`.
        inputs: the arguments of the layer's call. Only `topk_idx` and `topk_weights` are used: the
            caller's choices and their weights, [T, K] each, or None.
        mask: [T] bool, or None: a token whose mask is False chooses no expert.
        config: the configuration of the layer.

    Returns:
        The routing, and the logits [T, E] float32. The logits are None if the layer has no gate or
        if the caller gives the weights.
    """
    logits = None
    if inputs.topk_weights is None and params.gate is not None:
        logits = routing.router_logits(x, params.gate, params.gate_bias, config.router_dtype)
    options = config.routing_options()
    if inputs.topk_weights is not None:
        assert inputs.topk_idx is not None
        weights = inputs.topk_weights.astype(jnp.float32)
        if mask is not None:
            weights = jnp.where(mask[:, None], weights, 0.0)
        routed = Routing(expert_ids(inputs.topk_idx, config.num_choosable), weights)
    elif inputs.topk_idx is not None:
        assert logits is not None
        routed = routing.routing_of_choices(logits, inputs.topk_idx, options)
    elif config.router is not None:
        routed = _checked(config.router(x, logits), x.shape[0], config)
    else:
        assert logits is not None
        k = config.num_experts_per_token
        routed = routing.choose_experts(logits, k, params.bias, options)

    topk_idx, topk_weights = routed.topk_idx, routed.topk_weights
    if params.expert_scale is not None:
        # An id that names no expert, such as -1, gets the factor 0 and adds to no gradient. The
        # gradient is a sum over all choices. That of an indexed read would be a scatter-add, which
        # adds them in another order each time on GPUs.
        scale = params.expert_scale.astype(jnp.float32)
        is_chosen = topk_idx[..., None] == jnp.arange(scale.size, dtype=topk_idx.dtype)
        topk_weights *= jnp.sum(jnp.where(is_chosen, scale, 0.0), axis=-1)
    if mask is not None:
        topk_idx = jnp.where(mask[:, None], topk_idx, -1)
    return Routing(topk_idx, topk_weights, routed.probs), logits


def makes_distinct_choices(inputs: RouterInputs, config: MoEConfig) -> bool:
    """Returns whether the K choices of each token are known to be K different experts.

    They are if the library's router makes the choices. Choices that the caller or the caller's
    router makes may repeat an expert.
    """
    return inputs.topk_idx is None and config.router is None


def check_router(params: MoEParams, x: jax.Array, inputs: RouterInputs, config: MoEConfig) -> None:
    """Raises ValueError or TypeError if `inputs` do not fit x, `params` or `config`.

    x is [..., H], the layer's tokens. The message names the argument that does not fit.
    """
    lead, k = x.shape[:-1], config.num_experts_per_token
    for name, kind, last in (
        ("router_x", jnp.floating, "H'"),
        ("topk_idx", jnp.integer, f"K={k}"),
        ("topk_weights", jnp.floating, f"K={k}"),
    ):
        array = getattr(inputs, name)
        if array is None:
            continue
        checks.check_array(name, array, None, kind, f"[..., {last}]")
        if array.shape[:-1] != lead or (name != "router_x" and array.shape[-1] != k):
            raise ValueError(
                f"{name} must be [..., {last}] for the tokens of x {x.shape}, but has shape "
                f"{array.shape}."
            )
    if inputs.topk_weights is not None and inputs.topk_idx is None:
        raise ValueError("topk_weights must be given together with topk_idx, but topk_idx is None.")
    if inputs.topk_weights is not None and inputs.router_x is not None:
        raise ValueError(
            "router_x must be None where topk_weights is given, since no router runs that could "
            f"read it, but it is an array of shape {inputs.router_x.shape}."
        )
    if config.router is not None:
        _check_own_router(params, inputs)
    if params.gate is None:
        _check_without_gate(params, inputs, config)
        return
    name, array = ("x", x) if inputs.router_x is None else ("router_x", inputs.router_x)
    if inputs.topk_weights is None and array.shape[-1] != params.gate.shape[0]:
        raise ValueError(
            f"{name} must be [..., H={params.gate.shape[0]}] for gate {params.gate.shape}, but has "
            f"shape {array.shape}."
        )


def _check_own_router(params: MoEParams, inputs: RouterInputs) -> None:
    if params.bias is not None:
        raise ValueError(
            "bias must be None (selection_bias=False) where MoEConfig.router is set: the layer "
            f"gives that router no selection bias, but it is an array of shape {params.bias.shape}."
        )
    if inputs.topk_idx is not None and inputs.topk_weights is None:
        raise ValueError(
            "topk_weights must be given together with topk_idx where MoEConfig.router is set, "
            "because that router gives weights only to its own choices, but topk_weights is None."
        )


def _check_without_gate(params: MoEParams, inputs: RouterInputs, config: MoEConfig) -> None:
    if inputs.topk_weights is None and (config.router is None or inputs.topk_idx is not None):
        raise ValueError(
            "gate must be an array [H, R], but is None: without it, each call must be given "
            "topk_idx and topk_weights, or MoEConfig.router must choose."
        )
    for name in ("gate_bias", "bias"):
        if getattr(params, name) is not None:
            raise ValueError(
                f"{name} must be None where gate is None: it is added to the logits of a gate."
            )


def _checked(routed: Any, num_tokens: int, config: MoEConfig) -> Routing:
    """Casts `routed`, the result of the caller's function `config.router`, to `Routing`'s dtypes.

    Raises TypeError or ValueError if `routed` is not a `Routing` of `num_tokens` tokens.
    """
    if not isinstance(routed, Routing):
        raise TypeError(
            f"router must return a jax_ep.Routing, but returned {checks.described(routed)}."
        )
    num_experts, k = config.num_choosable, config.num_experts_per_token
    arrays: tuple[tuple[str, jax.Array | None, Any, int], ...] = (
        ("topk_idx", routed.topk_idx, jnp.integer, k),
        ("topk_weights", routed.topk_weights, jnp.floating, k),
        ("probs", routed.probs, jnp.floating, num_experts),
    )
    for name, array, kind, last in arrays:
        if array is None and name == "probs":
            continue
        shape = (num_tokens, last)
        checks.check_array(f"{name} of router", array, 2, kind, str(list(shape)))
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name} of router must have shape {shape}, but has shape {array.shape}."
            )
    return Routing(
        expert_ids(routed.topk_idx, num_experts),
        routed.topk_weights.astype(jnp.float32),
        None if routed.probs is None else routed.probs.astype(jnp.float32),
    )
