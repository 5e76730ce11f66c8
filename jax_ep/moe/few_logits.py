"""Multiplies a few bfloat16 tokens by the router's gate, in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.runtime import availability
from jax_ep.runtime.jax_compat import Program, define_primitive, result_type

# The most tokens that the kernel supports. For more, `routing.router_logits` uses bfloat16 matmuls.
MOST_TOKENS = 16


def few_logits(x: jax.Array, gate: jax.Array) -> jax.Array:
    """Returns x [T, H] bfloat16 @ gate [H, E], [T, E] float32, without a gradient; T <= 16."""
    return _few_logits_p.bind(x, gate)[0]


def _by_xla(x: jax.Array, gate: jax.Array) -> list[jax.Array]:
    wide = x.astype(jnp.float32), gate.astype(jnp.float32)
    return [lax.dot(*wide, precision=lax.Precision.HIGHEST)]


def _by_kernel(x: jax.Array, gate: jax.Array) -> list[jax.Array]:
    from pallas_kernels.routing import logits

    with jax.enable_x64(False):
        return [logits.logits(x, gate)]


def _kernel_runs(program: Program) -> bool:
    if not availability.runs_local_kernels(program):
        return False
    from pallas_kernels.routing import logits

    x, gate = program.operand_types
    return logits.unavailable_reason(x.shape[0], x.shape[1], gate.shape[1]) is None


def _lower(program: Program, *operands: Any) -> Any:
    return program.lower(_by_kernel if _kernel_runs(program) else _by_xla, *operands)


_few_logits_p = define_primitive(
    "ep_few_logits",
    abstract_eval=lambda x, gate: [result_type(x, (x.shape[0], gate.shape[1]), jnp.float32)],
    lower=_lower,
    inline=_by_xla,
    batch=lambda operands, axes: (jax.vmap(_by_xla, axes)(*operands), [0]),
    platforms=(None, "cuda"),
)
