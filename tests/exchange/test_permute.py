"""Tests of permuting rank-major rows by expert and back, against the expert-major layout."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.contract import AXIS, Case, assert_bitwise_equal, per_rank, routing
from support.selection import quick

import jax_ep

CASES = [
    # Arguments: num_ranks, num_tokens, hidden, top_k, num_experts, dtype.
    Case(1, 1, 33, 3, 2, "bfloat16"),
    Case(4, 11, 8, 3, 12, "bfloat16"),
    Case(2, 6, 8, 3, 8, "bfloat16", 9, 1, "fair"),
]


@functools.cache
def layouts(case: Case, implementation: str, alignment: int) -> Any:
    """Jits a function that runs an MoE layer in both layouts and returns results and gradients."""

    def experts(tokens: Any) -> Any:
        return (tokens * tokens + 1).astype(tokens.dtype)

    def by_expert(x: Any, weights: Any, topk_idx: Any) -> Any:
        sent = case.dispatch(x, topk_idx, implementation, expert_alignment=alignment)
        y = experts(sent.tokens)
        return jax_ep.combine(y, sent.handle, weights, implementation=implementation), sent.tokens

    def by_rank(x: Any, weights: Any, topk_idx: Any) -> Any:
        received = jax_ep.dispatch(
            x,
            topk_idx,
            num_experts=case.num_experts,
            axis_name=AXIS,
            layout="rank",
            topk_weights=weights,
            implementation=implementation,
        )
        grouped = jax_ep.group_by_expert(
            received,
            capacity=case.capacity,
            expert_alignment=alignment,
            overflow=case.overflow,
        )
        y = experts(grouped.tokens)
        sums = jax_ep.sum_by_token(y, grouped, received)
        out = jax_ep.combine(sums, received.handle, implementation=implementation)
        return out, grouped.tokens

    def both(x: Any, weights: Any, topk_idx: Any, g: Any) -> Any:
        results = []
        for function in (by_expert, by_rank):
            out, pull, tokens = jax.vjp(
                lambda x, w, f=function: f(x, w, topk_idx), x, weights, has_aux=True
            )
            results.append((out, tokens, pull(g)))
        return results

    return jax.jit(per_rank(both, case.num_ranks))


@pytest.mark.parametrize("kind", ["masked", "repeated", "one_rank"])
@pytest.mark.parametrize("case", quick(CASES, CASES[2]), ids=str)
def test_both_layouts_agree_bit_for_bit(case, kind, implementation):
    rng = np.random.default_rng(1)
    by_token = case.num_ranks, case.num_tokens
    x, g = (rng.normal(size=(*by_token, case.hidden)).astype(case.dtype) for _ in range(2))
    weights = rng.random((*by_token, case.top_k), np.float32)
    topk_idx = routing(kind, case, rng)
    run = layouts(case, implementation, 4)
    by_expert, by_rank = run(x, weights, topk_idx, g)
    assert_bitwise_equal(by_rank[0], by_expert[0], "out")
    assert_bitwise_equal(by_rank[1], by_expert[1], "tokens")
    assert_bitwise_equal(by_rank[2][0], by_expert[2][0], "dx")
    # The weights' gradient is a float32 sum over H, whose order XLA may choose differently.
    np.testing.assert_allclose(by_rank[2][1], by_expert[2][1], rtol=1e-5, atol=1e-5)
    again = run(x, weights, topk_idx, g)
    jax.tree.map(assert_bitwise_equal, again, [by_expert, by_rank])


def test_grouping_refuses_what_is_not_of_the_rank_layout():
    def on_rank(_: Any) -> Any:
        x, topk_idx = jnp.ones((4, 8)), jnp.zeros((4, 2), jnp.int32)
        options: dict[str, Any] = dict(num_experts=2, axis_name="expert")
        expert = jax_ep.dispatch(x, topk_idx, **options)
        received = jax_ep.dispatch(x, topk_idx, layout="rank", **options)
        grouped = jax_ep.group_by_expert(received)
        with pytest.raises(TypeError, match="received must be the RankDispatched of a dispatch"):
            jax_ep.group_by_expert(expert)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="received must be"):
            jax_ep.sum_by_token(grouped.tokens, grouped, expert)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="grouped must be the Dispatched that group_by_expert"):
            jax_ep.sum_by_token(expert.tokens, expert, received)
        return x

    jax.make_jaxpr(per_rank(on_rank, 1))(np.zeros((1, 1), np.float32))
