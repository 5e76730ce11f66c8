"""Tests that functions of one rank take explicit axes, and refuse operands sharded over them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from support.meshes import mesh
from support.selection import quick

import jax_ep
from jax_ep import placement


def _one_rank(x, topk_idx, weights, *experts, function=jax_ep.routed_experts, **options):
    sent = jax_ep.dispatch(x, topk_idx, num_experts=8, axis_name=())
    return function(sent, *experts, weights, **options)


ON_EXPLICIT_AXES = {
    "grouped_matmul": lambda a: jax_ep.grouped_matmul(a["x"], a["wi"], a["sizes"]),
    "by XLA": lambda a: jax_ep.grouped_matmul(a["x"], a["wi"], a["sizes"], implementation="xla"),
    "expert_mlp": lambda a: jax_ep.expert_mlp(a["x"], a["wi"], a["wi"], a["wo"], a["sizes"]),
    "an mlp by XLA": lambda a: jax_ep.expert_mlp(
        a["x"], a["wi"], None, a["wo"], a["sizes"], wo_bias=a["wo_bias"], implementation="xla"
    ),
    "routed_experts": lambda a: _one_rank(
        a["x"], a["topk_idx"], a["weights"], a["wi"], a["wi"], a["wo"]
    ),
    "weights on input": lambda a: _one_rank(
        a["x"], a["topk_idx"], a["weights"], a["wi"], a["wi"], a["wo"], weights_on="input"
    ),
    "top_k_routing": lambda a: jax_ep.top_k_routing(a["logits"], 2, bias=a["bias"]).topk_weights,
    "choose_slots": lambda a: placement.choose_slots(
        a["topk_idx"], *(a[name] for name in ("of_slot", "of_expert", "copies")), axis_name=()
    ).astype(jnp.float32),
}


def _explicit_operands() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    shapes = dict(
        x=(16, 8), wi=(8, 8, 16), wo=(8, 16, 8), wo_bias=(8, 8), logits=(16, 8), bias=(8,)
    )
    normal = {name: jnp.asarray(rng.normal(size=s), jnp.float32) for name, s in shapes.items()}
    held = placement.Placement.of(np.arange(16)[None] % 8, num_experts=8, num_ranks=1)[0]
    return normal | dict(
        sizes=jnp.full(8, 2, jnp.int32),
        topk_idx=jnp.asarray(rng.integers(0, 8, (16, 2)), jnp.int32),
        weights=jnp.asarray(rng.uniform(size=(16, 2)), jnp.float32),
        of_slot=jnp.asarray(held.expert_of_slot),
        of_expert=jnp.asarray(held.slots_of_expert),
        copies=jnp.asarray(held.num_copies),
    )


@pytest.mark.parametrize("wrap", quick({"jit": jax.jit, "eager": lambda f: f}, "jit"))
@pytest.mark.parametrize("name", quick([*ON_EXPLICIT_AXES], "expert_mlp", "choose_slots"))
def test_one_rank_of_an_explicit_mesh(name, wrap):
    """On an explicit mesh, functions of one rank must accept replicated operands."""

    def both(operands):
        floats = {k: v for k, v in operands.items() if v.dtype == jnp.float32}
        out, vjp = jax.vjp(lambda f: ON_EXPLICIT_AXES[name](operands | f), floats)
        return out, vjp(jnp.ones_like(out))

    operands = _explicit_operands()
    # On the mesh first: what is found out about types and kept must not need one.
    with jax.set_mesh(mesh((2, 2), ("data", "expert"), AxisType.Explicit)):
        got = wrap(lambda operands: both(operands))(operands)
    want = jax.jit(both)(operands)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize(
    "name, sharded",
    [
        ("grouped_matmul", "x"),
        ("by XLA", "wi"),
        ("grouped_matmul", "sizes"),
        ("expert_mlp", "x"),
        ("expert_mlp", "wo"),
        ("an mlp by XLA", "wo_bias"),
        ("routed_experts", "wi"),
        ("top_k_routing", "logits"),
        ("top_k_routing", "bias"),
        ("choose_slots", "topk_idx"),
        ("choose_slots", "copies"),
    ],
)
def test_operands_sharded_over_explicit_axes_are_named(name, sharded):
    operands = _explicit_operands()
    with jax.set_mesh(mesh((4,), ("expert",), AxisType.Explicit)):
        array = operands[sharded]
        first = () if sharded != "logits" else (None,)
        operands[sharded] = jax.device_put(array, jax.P(*first, "expert"))
        for wrap in (jax.jit, lambda f: f):
            with pytest.raises(ValueError, match="must not be sharded .* inside a jax.shard_map"):
                wrap(ON_EXPLICIT_AXES[name])(operands)
