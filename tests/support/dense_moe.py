"""A small MoE layer for tests: its sizes, random parameters, and its float64 reference output."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import moe_layer, reference
from jax_ep.moe import params as moe_params
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.params import MoEParams, ParameterOptions

E, H, F, K, S = 8, 16, 12, 3, 2
BATCH, SEQUENCE = 8, 4
CONFIG = MoEConfig(num_experts=E, num_experts_per_token=K)


def weight_shapes(num_experts: int, hidden: int, mlp_dim: int, **options: Any) -> dict[str, Any]:
    """Returns the shapes, by name, of the weights of a layer with the given `ParameterOptions`."""
    config = MoEConfig(num_experts=num_experts, num_experts_per_token=1)
    return moe_params.weight_shapes(config, ParameterOptions(**options), hidden, mlp_dim)


def random_arrays(
    hidden: int, mlp_dim: int, scale: float | None = None, seed: int = 0, **parts: Any
) -> dict[str, np.ndarray]:
    """Draws float32 parameters of E experts, with the `ParameterOptions` given by `parts`.

    Without a `scale`, that of a matrix is the inverse square root of its height.
    """
    rng = np.random.default_rng(seed)
    shapes = {"gate": (hidden, E)} | weight_shapes(E, hidden, mlp_dim, **parts)
    arrays = {n: (scale or s[-2] ** -0.5) * rng.normal(size=s) for n, s in shapes.items()}
    return {name: array.astype(np.float32) for name, array in arrays.items()}


def random_params(
    hidden: int = H, mlp_dim: int = F, scale: float = 0.4, seed: int = 0, **parts: Any
) -> MoEParams:
    arrays = random_arrays(hidden, mlp_dim, scale, seed, **parts)
    return MoEParams.of(**{name: jnp.asarray(array) for name, array in arrays.items()})


def make_params(seed: int = 0, bias: bool = False, shared: bool = True) -> MoEParams:
    """Draws parameters as NumPy arrays, with S shared experts if `shared`."""
    weights: Any = random_arrays(H, F, seed=seed, num_shared_experts=S if shared else 0)
    return MoEParams(**weights, bias=np.linspace(-0.2, 0.2, E, dtype=np.float32) if bias else None)


def make_x(
    seed: int = 1, shape: tuple[int, ...] = (BATCH, SEQUENCE), hidden: int = H
) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(*shape, hidden)).astype(np.float32)


def dense(params: MoEParams, x: jax.Array, **router) -> tuple[np.ndarray, np.ndarray]:
    """Computes the layer in float64, each token through all its experts, without an exchange."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    tokens = np.asarray(x, np.float64).reshape(-1, H)
    routed = reference.top_k_routing(tokens @ p.gate, K, bias=p.bias, **router)
    out = reference.moe_layer(tokens, routed.topk_idx, routed.topk_weights, p.wi_0, p.wi_1, p.wo)
    if p.shared_wo is not None:
        out += reference.gated_mlp(tokens, p.shared_wi_0, p.shared_wi_1, p.shared_wo)
    return out.reshape(x.shape), np.bincount(routed.topk_idx.ravel(), minlength=E)


def loss(params, x, mask=None, *, config=CONFIG, layer=moe_layer, **given):
    """Returns a scalar that depends on all outputs of a layer, and (output, metrics)."""
    out, metrics = layer(params, x, config, mask, **given)
    total = jnp.sum(jnp.sin(out.astype(jnp.float32)))
    return total + metrics.load_balance_loss + metrics.router_z_loss, (out, metrics)


def step_of(**options: Any):
    """Returns (params, x) -> (loss, (output, metrics)), and the gradients of both, compiled."""
    return jax.jit(jax.value_and_grad(functools.partial(loss, **options), (0, 1), has_aux=True))


def assert_close(got, want, rtol=2e-5, atol=2e-6):
    got_structure: Any = jax.tree.structure(got)
    assert got_structure == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))
