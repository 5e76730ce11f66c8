"""The gated expert MLP: three grouped matmuls with a memory-frugal gradient of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_ep import checks
from jax_ep.matmul import api as gmm
from jax_ep.runtime.jax_compat import match_varying

Activation = Callable[[jax.Array], jax.Array]


def expert_mlp(
    tokens: jax.Array,
    wi_0: jax.Array,
    wi_1: jax.Array,
    wo: jax.Array,
    group_sizes: jax.Array,
    *,
    activation: Activation = jax.nn.silu,
    implementation: gmm.Implementation = None,
) -> jax.Array:
    """Runs each row through its group's expert: (activation(x @ wi_0) * (x @ wi_1)) @ wo.

    With SiLU this is the SwiGLU layer of Shazeer, "GLU Variants Improve Transformer" (2020).
    The product of the two halves is computed in float32, in one pass over them.

    **What is kept for the backward pass**: `tokens` and the two pre-activations, x @ wi_0 and
    x @ wi_1 (R·(H + 2F) values); the gated product is computed again. The kept values carry the
    names "dispatched_tokens" and "expert_pre_activations" (`jax.ad_checkpoint.checkpoint_name`),
    so that a `jax.checkpoint` policy can choose: for example
    `jax.checkpoint_policies.save_only_these_names("dispatched_tokens")` keeps R·H values and
    computes the two products again.

    Rows past the last group may hold anything; the result and the gradient of `tokens` are zero
    there, and they contribute nothing to the other gradients, as in `grouped_matmul`.

    Args:
      tokens: [R, H] floating: rows in group order, as in `Dispatched.tokens`.
      wi_0: [L, H, F], the dtype of tokens: the projection that the activation is applied to.
      wi_1: [L, H, F]: the other one.
      wo: [L, F, H]: the projection back.
      group_sizes: [L] integer: rows of each expert's block; their sum is at most R.
      activation: an elementwise function of one array, finite at zero.
      implementation: as in `grouped_matmul`.

    Returns:
      [R, H], the dtype of tokens.

    Raises:
      TypeError, ValueError: an argument does not fit, or the named implementation cannot serve
        it here; the message says why.
    """
    check_operands(tokens, wi_0, wi_1, wo, group_sizes, implementation)
    operands = (tokens, wi_0, wi_1, wo, jnp.asarray(group_sizes, jnp.int32))
    return _expert_mlp(*match_varying(operands, ()), activation, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _expert_mlp(tokens, wi_0, wi_1, wo, group_sizes, activation, implementation):
    return forward(tokens, wi_0, wi_1, wo, group_sizes, activation, implementation)[0]


def _backward(activation, implementation, saved, grad):
    return *backward(saved, grad, None, activation, implementation), None


def forward(
    tokens: jax.Array,
    wi_0: jax.Array,
    wi_1: jax.Array,
    wo: jax.Array,
    group_sizes: jax.Array,
    activation: Activation,
    implementation: gmm.Implementation,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Returns the output [R, H] and what `backward` needs.

    The operands must be checked and have one varying-axes type.
    """
    tokens = checkpoint_name(tokens, "dispatched_tokens")
    pre_0, pre_1 = (
        checkpoint_name(
            gmm.product(tokens, wi, group_sizes, implementation), "expert_pre_activations"
        )
        for wi in (wi_0, wi_1)
    )
    out = gmm.product(_gate(activation, pre_0, pre_1), wo, group_sizes, implementation)
    return out, (tokens, pre_0, pre_1, wi_0, wi_1, wo, group_sizes)


def backward(
    saved: tuple[jax.Array, ...],
    grad: jax.Array,
    weights: jax.Array | None,
    activation: Activation,
    implementation: gmm.Implementation,
) -> tuple[jax.Array, ...]:
    """Returns the gradients of tokens, wi_0, wi_1, wo, and of the weights if there are any.

    With weights [R] float32 the gradients are those of weights[:, None] * output: each weight
    multiplies its row of the gated product, which the output is linear in.
    """
    tokens, pre_0, pre_1, wi_0, wi_1, wo, group_sizes = saved
    dgated = gmm.product(grad, wo, group_sizes, implementation, True)
    factors = (pre_0, pre_1) if weights is None else (pre_0, pre_1, weights)
    gated, gate_vjp = jax.vjp(functools.partial(_gate, activation), *factors)
    dpre_0, dpre_1, *dweights = gate_vjp(dgated)
    dwo = gmm.drhs(gated, grad, group_sizes, implementation)
    dwi_0 = gmm.drhs(tokens, dpre_0, group_sizes, implementation)
    dwi_1 = gmm.drhs(tokens, dpre_1, group_sizes, implementation)
    pairs = (dpre_0, wi_0), (dpre_1, wi_1)
    dtokens = gmm.sum_of_products(pairs, group_sizes, implementation, True)
    return dtokens, dwi_0, dwi_1, dwo, *dweights


_expert_mlp.defvjp(forward, _backward)


def _gate(
    activation: Activation, pre_0: jax.Array, pre_1: jax.Array, weights: jax.Array | None = None
) -> jax.Array:
    dtype = jnp.float32 if pre_0.dtype.itemsize < 4 else pre_0.dtype
    gated = activation(pre_0.astype(dtype)) * pre_1.astype(dtype)
    if weights is not None:
        gated *= weights.astype(dtype)[:, None]
    return gated.astype(pre_0.dtype)


def check_operands(
    tokens: jax.Array,
    wi_0: jax.Array,
    wi_1: jax.Array,
    wo: jax.Array,
    group_sizes: jax.Array,
    implementation: gmm.Implementation,
) -> None:
    """Raises what `expert_mlp` says it raises."""
    for name, weights in (("wi_0", wi_0), ("wi_1", wi_1), ("wo", wo)):
        shape = "[L, F, H]" if name == "wo" else "[L, H, F]"
        checks.check_array(name, weights, 3, jnp.floating, shape, may_be_empty=False)
    checks.check_array("tokens", tokens, 2, jnp.floating, "[R, H]", may_be_empty=False)
    checks.check_array("group_sizes", group_sizes, 1, jnp.integer, "[L]")
    num_experts, hidden, mlp = wi_0.shape
    expected = {
        "tokens": (tokens.shape[0], hidden),
        "wi_1": (num_experts, hidden, mlp),
        "wo": (num_experts, mlp, hidden),
        "group_sizes": (num_experts,),
    }
    arrays = {"tokens": tokens, "wi_1": wi_1, "wo": wo, "group_sizes": group_sizes}
    for name, wanted in expected.items():
        if arrays[name].shape != wanted:
            raise ValueError(
                f"{name} must have shape {wanted} for wi_0 [L, H, F] of shape {wi_0.shape}, but "
                f"has shape {arrays[name].shape}."
            )
    for name in ("wi_0", "wi_1", "wo"):
        dtype = {"wi_0": wi_0, **arrays}[name].dtype
        if dtype != tokens.dtype:
            raise TypeError(
                f"{name} must have the dtype of tokens, {tokens.dtype}, but has {dtype}; "
                "cast it with .astype."
            )
    gmm.check_implementation(implementation, wi_0)
