"""Tests of the rank-major layout against the reference and the expert-major layout."""

from __future__ import annotations

import dataclasses
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
)

import jax_ep
from jax_ep import reference

WIRE = jnp.float8_e4m3fn


CASES = [
    # Arguments: num_ranks, num_tokens, hidden, top_k, num_experts, dtype.
    Case(1, 1, 33, 3, 2, "bfloat16"),
    Case(2, 9, 40, 4, 6, "float16"),
    Case(4, 5, 17, 5, 4, "float32"),
    Case(8, 7, 24, 3, 8, "bfloat16"),
    Case(8, 3, 8, 16, 16, "float32"),
]


def sizes(case: Case) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a case's arrays, stacked by rank on axis 0."""
    n, t, h, k = case.num_ranks, case.num_tokens, case.hidden, case.top_k
    return {"x": (n, t, h), "choices": (n, t, k), "rows": (n, n, t, h), "lists": (n, n, t, k)}


def nan_elsewhere(rows: np.ndarray, received: list[reference.RankDispatched]) -> np.ndarray:
    """Returns rows [N, N, T, H] with NaN where a token has no expert, to show that none is read."""
    sent = np.stack([(r.local_topk_idx >= 0).any(axis=-1) for r in received])
    return np.where(sent[..., None], rows, np.asarray(np.nan, rows.dtype))


def dispatch(case: Case, x: Any, topk_idx: Any, implementation: Any, **options: Any) -> Any:
    return jax_ep.dispatch(
        x,
        topk_idx,
        num_experts=case.num_experts,
        axis_name=options.pop("axis_name", AXIS),
        layout="rank",
        implementation=implementation,
        **options,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
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
        g, y = (
            nan_elsewhere(small_integers(rng, shapes["rows"], case.dtype), received)
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


def test_float8_on_the_wire(implementation):
    case = Case(most_ranks(4), 5, 256, 3, 8, "bfloat16")
    rng = np.random.default_rng(4)
    x = rng.normal(size=sizes(case)["x"]).astype(case.dtype)
    topk_idx = routing("masked", case, rng)
    g = small_integers(rng, sizes(case)["rows"], case.dtype)

    def run(x: Any, topk_idx: Any, g: Any) -> Any:
        def send(x: Any, **options: Any) -> Any:
            return dispatch(case, x, topk_idx, implementation, **options)

        tokens, pull = jax.vjp(lambda x: send(x, wire_dtype=WIRE).tokens, x)
        _, pull_plain = jax.vjp(lambda x: send(x).tokens, x)
        raw = send(x, wire_dtype=WIRE, output="quantized")
        # The product's values are not float8 numbers, so that the wire rounds them.
        sums = tokens * jnp.asarray(1.3, tokens.dtype)
        back = jax_ep.combine(sums, raw.handle)
        rounded = jax_ep.combine(sums, raw.handle, wire_dtype=WIRE)
        grouped = jax_ep.group_by_expert(raw)
        whole = grouped.tokens.dequantize()
        expected = case.dispatch(x, topk_idx, implementation, wire_dtype=WIRE).tokens
        grads = pull(g)[0], pull_plain(g)[0]
        return tokens, raw.tokens, grads, (back, rounded), (whole, expected)

    tokens, kept, grads, (back, rounded), (whole, expected) = jax.jit(
        per_rank(run, case.num_ranks)
    )(x, topk_idx, g)
    arrived = after_the_wire(x, implementation)
    received = reference.rank_dispatch(list(arrived), list(topk_idx), num_experts=8)
    assert_bitwise_equal(tokens, np.stack([r.tokens for r in received]))
    assert kept.values.dtype == WIRE and kept.scales.dtype == np.float32
    assert_equal(jax.tree.map(np.asarray, kept).dequantize(), tokens)
    assert_bitwise_equal(*grads)
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
