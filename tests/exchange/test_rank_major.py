"""Tests of the rank-major layout, and of permuting its rows by expert and back."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.contract import (
    AXIS,
    ROUTINGS,
    Case,
    after_the_wire,
    assert_bitwise_equal,
    assert_equal,
    most_ranks,
    per_rank,
    random_bits,
    routing,
    small_integers,
    small_weights,
    with_nan_elsewhere,
)
from support.selection import quick

import jax_ep
from jax_ep import reference

WIRE = jnp.float8_e4m3fn


CASES = [
    # Arguments: num_ranks, num_tokens, hidden, top_k, num_experts, dtype.
    Case(1, 1, 33, 3, 2, "bfloat16"),
    Case(2, 9, 40, 4, 6, "float16"),
    Case(8, 3, 8, 16, 16, "float32"),
    Case(8, 7, 24, 3, 8, "bfloat16"),
]


def sizes(case: Case) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a case's arrays, stacked by rank on axis 0."""
    n, t, h, k = case.num_ranks, case.num_tokens, case.hidden, case.top_k
    return {"x": (n, t, h), "choices": (n, t, k), "rows": (n, n, t, h), "lists": (n, n, t, k)}


def dispatch(case: Case, x: Any, topk_idx: Any, implementation: Any, **options: Any) -> Any:
    options = dict(num_experts=case.num_experts, axis_name=AXIS, layout="rank") | options
    return jax_ep.dispatch(x, topk_idx, implementation=implementation, **options)


@pytest.mark.parametrize("case", quick(CASES, CASES[1]), ids=str)
def test_everything_equals_the_reference(case, implementation):
    """Tokens must be equal bit for bit, and sums exactly, since they are of small integers."""
    rng = np.random.default_rng(0)
    shapes = sizes(case)

    def everything(x: Any, topk_idx: Any, weights: Any, g: Any, g_weights: Any, y: Any, g_out: Any):
        def send(x: Any, weights: Any) -> Any:
            sent = dispatch(case, x, topk_idx, implementation, topk_weights=weights)
            return (sent.tokens, sent.topk_weights), sent

        (tokens, there), pull, sent = jax.vjp(send, x, weights, has_aux=True)
        plain, pull_plain = jax.vjp(lambda x: send(x, None)[0][0], x)
        out, pull_out = jax.vjp(
            lambda y: jax_ep.combine(y, sent.handle, implementation=implementation), y
        )
        like = jax_ep.dispatch_like(x[:, ::2], sent.handle, implementation=implementation)
        grads = pull((g, g_weights)), pull_plain(g), pull_out(g_out)
        return tokens, sent.local_topk_idx, there, plain, like, grads, out

    run = jax.jit(per_rank(everything, case.num_ranks, check_vma=CASES.index(case) % 3 != 0))
    for kind in ROUTINGS:
        topk_idx = routing(kind, case, rng)
        x = random_bits(rng, shapes["x"], case.dtype)
        weights = small_weights(rng, shapes["choices"], "float32")
        received = reference.rank_dispatch(
            list(x), list(topk_idx), list(weights), num_experts=case.num_experts
        )
        local = [r.local_topk_idx for r in received]
        # A row of a token without an expert is NaN, to show that none is read.
        is_sent = (np.stack(local) >= 0).any(axis=-1)
        g, y = (
            with_nan_elsewhere(small_integers(rng, shapes["rows"], case.dtype), is_sent)
            for _ in range(2)
        )
        g_weights = small_weights(rng, shapes["lists"], "float32")
        g_out = small_integers(rng, shapes["x"], case.dtype)
        arrays = (x, topk_idx, weights, g, g_weights, y, g_out)
        tokens, local_topk_idx, there, plain, like, grads, out = run(*arrays)
        grads, plain_grads, grad_y = grads
        message = f"routing {kind!r}"
        assert_bitwise_equal(tokens, np.stack([r.tokens for r in received]), message)
        assert_bitwise_equal(plain, tokens, message)
        assert_bitwise_equal(like, tokens[..., ::2], message)
        assert_bitwise_equal(local_topk_idx, np.stack(local), message)
        assert_bitwise_equal(there, np.stack([r.topk_weights for r in received]), message)
        assert_equal(grads[0], np.stack(reference.rank_combine(list(g), local)), message)
        assert_bitwise_equal(grads[0], plain_grads[0], message)
        here = np.stack(local) >= 0
        expected = np.where(here, g_weights, 0).sum(axis=0)
        assert_equal(grads[1], expected.astype(np.float32), message)
        assert_equal(out, np.stack(reference.rank_combine(list(y), local)), message)
        sent_back = reference.rank_dispatch(
            list(g_out), list(topk_idx), num_experts=case.num_experts
        )
        assert_equal(grad_y[0], np.stack([r.tokens for r in sent_back]), message)


@pytest.mark.slow
def test_float8_on_the_wire(implementation):
    case = Case(most_ranks(4), 5, 256, 3, 8, "bfloat16")
    rng = np.random.default_rng(4)
    x = rng.normal(size=sizes(case)["x"]).astype(case.dtype)
    topk_idx = routing("masked", case, rng)

    def run(x: Any, topk_idx: Any) -> Any:
        options = dict(wire_dtype=WIRE)
        tokens = dispatch(case, x, topk_idx, implementation, **options).tokens
        raw = dispatch(case, x, topk_idx, implementation, output="quantized", **options)
        # The product's values are not float8 numbers, so that the wire rounds them.
        sums = tokens * jnp.asarray(1.3, tokens.dtype)
        back = jax_ep.combine(sums, raw.handle), jax_ep.combine(sums, raw.handle, **options)
        whole = jax_ep.group_by_expert(raw).tokens.dequantize()
        expected = case.dispatch(x, topk_idx, implementation, **options).tokens
        return tokens, raw.tokens, back, (whole, expected)

    tokens, kept, (back, rounded), (whole, expected) = jax.jit(per_rank(run, case.num_ranks))(
        x, topk_idx
    )
    arrived = after_the_wire(x, implementation)
    received = reference.rank_dispatch(list(arrived), list(topk_idx), num_experts=8)
    assert_bitwise_equal(tokens, np.stack([r.tokens for r in received]))
    assert kept.values.dtype == WIRE and kept.scales.dtype == np.float32
    assert_equal(jax.tree.map(np.asarray, kept).dequantize(), tokens)
    assert_bitwise_equal(whole, expected)
    difference = np.abs(np.asarray(rounded, np.float32) - np.asarray(back, np.float32))
    assert 0 < difference.max() <= 2**-3 * np.abs(np.asarray(back, np.float32)).max()


@pytest.mark.needs_devices(2)
def test_a_handle_of_other_ranks_is_refused():
    def call(x: Any, topk_idx: Any) -> Any:
        handle = dispatch(Case(1, 5, 8, 2, 4), x, topk_idx, "xla", axis_name=()).handle
        return jax_ep.combine(jnp.zeros((1, 5, 8)), dataclasses.replace(handle, axis_name=(AXIS,)))

    arrays = np.zeros((2, 5, 8), np.float32), np.zeros((2, 5, 2), np.int32)
    message = r"local_topk_idx must have shape \[2, T, K\].* \(1, 5, 2\)"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(per_rank(call, 2), *arrays)


# ---------------------------------------------------------------------- rows by expert

PERMUTED = [
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
        received = dispatch(case, x, topk_idx, implementation, topk_weights=weights)
        options: Any = dict(capacity=case.capacity, overflow=case.overflow)
        grouped = jax_ep.group_by_expert(received, expert_alignment=alignment, **options)
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
@pytest.mark.parametrize("case", quick(PERMUTED, PERMUTED[2]), ids=str)
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
        assert isinstance(expert.handle, jax_ep.Handle)
        assert isinstance(received.handle, jax_ep.RankHandle)
        with pytest.raises(TypeError, match="received must be the RankDispatched of a dispatch"):
            jax_ep.group_by_expert(expert)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="received must be"):
            jax_ep.sum_by_token(grouped.tokens, grouped, expert)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="grouped must be the Dispatched that group_by_expert"):
            jax_ep.sum_by_token(expert.tokens, expert, received)
        with pytest.raises(TypeError, match="y must be a floating array"):
            jax_ep.sum_by_token(topk_idx, grouped, received)
        return x

    jax.make_jaxpr(per_rank(on_rank, 1))(np.zeros((1, 1), np.float32))
