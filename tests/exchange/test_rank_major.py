"""Tests of the rank-major layout against the reference and the expert-major layout; its errors."""

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
    implementations,
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


@pytest.fixture(params=implementations())
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


CASES = [
    # Arguments: num_ranks, num_tokens, hidden, top_k, num_experts, dtype.
    Case(1, 5, 8, 2, 4, "float32"),
    Case(1, 1, 33, 3, 2, "bfloat16"),
    Case(2, 5, 16, 2, 8, "bfloat16"),
    Case(2, 9, 40, 4, 6, "float16"),
    Case(4, 6, 16, 2, 8, "float32"),
    Case(4, 5, 17, 5, 4, "float16"),
    Case(4, 11, 8, 3, 12, "bfloat16"),
    Case(8, 7, 24, 3, 8, "bfloat16"),
    Case(8, 1, 33, 1, 8, "float16"),
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_everything_equals_the_reference(case, implementation):
    """Tokens must be equal bit for bit, and sums exactly, since they are of small integers."""
    rng = np.random.default_rng(0)
    shapes = sizes(case)

    def everything(x: Any, topk_idx: Any, weights: Any, g: Any, g_weights: Any, y: Any, g_out: Any):
        def send(x: Any, weights: Any) -> Any:
            sent = jax_ep.dispatch(
                x,
                topk_idx,
                num_experts=case.num_experts,
                axis_name=AXIS,
                layout="rank",
                topk_weights=weights,
                implementation=implementation,
            )
            return (sent.tokens, sent.topk_weights), sent

        (tokens, there), pull, sent = jax.vjp(send, x, weights, has_aux=True)
        plain, pull_plain = jax.vjp(lambda x: send(x, None)[0][0], x)
        out, pull_out = jax.vjp(
            lambda y: jax_ep.combine(y, sent.handle, implementation=implementation), y
        )
        grads = pull((g, g_weights))
        return tokens, sent.local_topk_idx, there, plain, grads, pull_plain(g), out, pull_out(g_out)

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
        tokens, local_topk_idx, there, plain, grads, plain_grads, out, grad_y = run(
            x, topk_idx, weights, g, g_weights, y, g_out
        )
        message = f"routing {kind!r}"
        assert_bitwise_equal(tokens, np.stack([r.tokens for r in received]), message)
        assert_bitwise_equal(plain, tokens, message)
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


def _dispatch(case: Case, x: Any, topk_idx: Any, implementation: Any, **options: Any) -> Any:
    return jax_ep.dispatch(
        x,
        topk_idx,
        num_experts=case.num_experts,
        axis_name=options.pop("axis_name", AXIS),
        layout="rank",
        implementation=implementation,
        **options,
    )


def test_dispatch_like_sends_another_payload_and_has_a_gradient(implementation):
    case = Case(most_ranks(4), 5, 16, 3, 8, "bfloat16")
    rng = np.random.default_rng(3)
    x = small_integers(rng, sizes(case)["x"], case.dtype)
    other = random_bits(rng, (case.num_ranks, 5, 8), "float32")
    topk_idx = routing("masked", case, rng)
    received = reference.rank_dispatch(list(other), list(topk_idx), num_experts=8)
    g = small_integers(rng, (case.num_ranks, case.num_ranks, 5, 8), "float32")
    g = nan_elsewhere(g, received)

    def send_other(x: Any, topk_idx: Any, other: Any, g: Any) -> Any:
        handle = _dispatch(case, x, topk_idx, implementation).handle
        sent, pull = jax.vjp(
            lambda a: jax_ep.dispatch_like(a, handle, implementation=implementation), other
        )
        return sent, *pull(g)

    sent, grad = jax.jit(per_rank(send_other, case.num_ranks))(x, topk_idx, other, g)
    assert_bitwise_equal(sent, np.stack([r.tokens for r in received]))
    local = [r.local_topk_idx for r in received]
    assert_equal(grad, np.stack(reference.rank_combine(list(g), local)))


def test_float8_on_the_wire(implementation):
    case = Case(most_ranks(4), 5, 256, 3, 8, "bfloat16")
    rng = np.random.default_rng(4)
    x = rng.normal(size=sizes(case)["x"]).astype(case.dtype)
    topk_idx = routing("masked", case, rng)
    g = small_integers(rng, sizes(case)["rows"], case.dtype)

    def run(x: Any, topk_idx: Any, g: Any) -> Any:
        def send(x: Any, **options: Any) -> Any:
            return _dispatch(case, x, topk_idx, implementation, **options)

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


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_no_axes_are_one_rank(implementation):
    case = Case(1, 5, 8, 2, 4, "bfloat16")
    rng = np.random.default_rng(5)
    x = random_bits(rng, (5, 8), case.dtype)
    topk_idx = routing("masked", case, rng)
    sent = jax.jit(lambda x, i: _dispatch(case, x, i, implementation, axis_name=()))(x, topk_idx[0])
    (expected,) = reference.rank_dispatch([x], list(topk_idx), num_experts=4)
    assert_bitwise_equal(sent.tokens, expected.tokens)
    assert_bitwise_equal(sent.local_topk_idx, expected.local_topk_idx)
    assert sent.topk_weights is None


def test_a_handle_crosses_jit_checkpoint_and_scan():
    case = Case(most_ranks(4), 5, 8, 2, 8)
    rng = np.random.default_rng(6)
    x = small_integers(rng, sizes(case)["x"], case.dtype)
    topk_idx = routing("uniform", case, rng)

    def loop(x: Any, topk_idx: Any) -> Any:
        @jax.checkpoint
        def step(x: Any, _: Any) -> Any:
            sent = jax.jit(lambda x: _dispatch(case, x, topk_idx, "xla"))(x)
            return jax_ep.combine(sent.tokens, sent.handle), sent.local_topk_idx

        out, pull, lists = jax.vjp(lambda x: jax.lax.scan(step, x, length=2), x, has_aux=True)
        return out, pull(x)[0], lists

    out, grad, _ = jax.jit(per_rank(loop, case.num_ranks))(x, topk_idx)
    local = reference.rank_dispatch(list(x), list(topk_idx), num_experts=8)
    ranks_of_token = sum((r.local_topk_idx >= 0).any(axis=-1).astype(int) for r in local)
    expected = (x * ranks_of_token[..., None] ** 2).astype(x.dtype)
    assert_equal(out, expected)
    assert_equal(grad, expected)


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"capacity": 7},
            r"takes no capacity, expert_alignment or overflow, but they are 7, 1 and",
        ),
        ({"expert_alignment": 8}, r"takes no capacity, expert_alignment or overflow.*None, 8 and"),
        ({"zero_unused": False}, r'zero_unused must be True for layout="rank", but is False'),
        ({"zero_unused": 1, "layout": "expert"}, r"zero_unused must be True or False, but is 1"),
        ({"layout": "row"}, r"layout must be .* 'row'"),
        ({"topk_weights": ((5, 3), "float32")}, r"topk_weights must have .* \(5, 2\).* \(5, 3\)"),
        ({"topk_weights": ((5, 2), "int32")}, r"topk_weights must be a floating array.* int32"),
        (
            {"topk_weights": ((5, 2), "float32"), "layout": "expert"},
            r'topk_weights is an argument of dispatch only with layout="rank"',
        ),
    ],
)
def test_dispatch_errors(options, message):
    options = {"layout": "rank", **options}
    weights = options.pop("topk_weights", None)

    def call(x: Any, topk_idx: Any) -> Any:
        given = {} if weights is None else dict(topk_weights=jnp.zeros(*weights))
        return jax_ep.dispatch(x, topk_idx, num_experts=4, axis_name=AXIS, **options, **given)

    _raises(lambda *arrays: call(*arrays).tokens, message)


@pytest.mark.parametrize(
    ("y", "weights", "message"),
    [
        (((1, 4, 8), "float32"), None, r"y must have one row .*\(1, 5\).* \(1, 4, 8\)"),
        (((5, 8), "float32"), None, r"y must be a floating array \[N, T, H\], but has shape"),
        (((1, 5, 8), "int32"), None, r"y must be a floating array"),
        (
            ((1, 5, 8), "float32"),
            ((5, 2), "float32"),
            r"topk_weights must be None in the rank-major layout",
        ),
    ],
)
def test_combine_errors(y, weights, message):
    def call(x: Any, topk_idx: Any) -> Any:
        handle = _dispatch(Case(1, 5, 8, 2, 4), x, topk_idx, "xla").handle
        return jax_ep.combine(jnp.zeros(*y), handle, weights and jnp.zeros(*weights))

    _raises(call, message)


def test_dispatch_like_errors():
    def call(x: Any, topk_idx: Any) -> Any:
        handle = _dispatch(Case(1, 5, 8, 2, 4), x, topk_idx, "xla").handle
        return jax_ep.dispatch_like(x[:4], handle)

    _raises(call, r"x must have one row for each of the 5 tokens.* \(4, 8\)")


@pytest.mark.needs_devices(2)
def test_a_handle_of_other_ranks_is_refused():
    def call(x: Any, topk_idx: Any) -> Any:
        handle = _dispatch(Case(1, 5, 8, 2, 4), x, topk_idx, "xla", axis_name=()).handle
        return jax_ep.combine(jnp.zeros((1, 5, 8)), dataclasses.replace(handle, axis_name=(AXIS,)))

    _raises(call, r"local_topk_idx must have shape \[2, T, K\].* \(1, 5, 2\)", 2)


def _raises(call: Any, message: str, num_ranks: int = 1) -> None:
    shapes = ((num_ranks, 5, 8), "float32"), ((num_ranks, 5, 2), "int32")
    with pytest.raises((ValueError, TypeError), match=message):
        jax.eval_shape(per_rank(call, num_ranks), *(jax.ShapeDtypeStruct(*a) for a in shapes))
