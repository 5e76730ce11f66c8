"""Tests of dispatch and combine with float8 on the wire."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.contract import (
    AXIS,
    Case,
    after_the_wire,
    assert_bitwise_equal,
    assert_equal,
    most_ranks,
    owned_rows,
    per_rank,
    routing,
    send_by_reference,
    small_integers,
    small_weights,
    with_nan_elsewhere,
)
from support.selection import quick

import jax_ep
from jax_ep import reference
from jax_ep.exchange.interface import WIRE_FORMATS
from jax_ep.formats import Float8

WIRE = jnp.float8_e4m3fn
wires = pytest.mark.parametrize("wire", WIRE_FORMATS, ids=lambda wire: wire.name)


def bound(x: np.ndarray, wire: Float8) -> np.ndarray:
    """Returns the bound of |arrived - x|, [..., H]: float8's error, and rounding to x's dtype."""
    magnitude = np.abs(x.astype(np.float64)).reshape(*x.shape[:-1], -1, wire.block[1])
    scale = np.maximum(magnitude.max(axis=-1, keepdims=True) / wire.largest, wire.least_scale)
    least = float(jnp.finfo(wire.dtype).smallest_subnormal)
    sent = np.maximum(wire.relative_error * magnitude, least / 2 * scale)
    info = jnp.finfo(x.dtype)
    rounding = float(info.eps) * (magnitude + sent) + float(info.smallest_subnormal)
    return (sent * (1 + 2.0**-20) + rounding).reshape(x.shape)


CASES = [
    Case(2, 4, 256, 3, 8, "float32", 7, 4),
    Case(4, 6, 384, 2, 8, "bfloat16"),
    Case(8, 3, 128, 4, 16, "float16", None, 8),
]


@wires
@pytest.mark.parametrize("case", quick(CASES, CASES[0]), ids=str)
@pytest.mark.parametrize("kind", quick(["masked", "repeated", "one_expert"], "masked"))
def test_dispatch_sends_quantized_rows_and_plain_gradients(case, kind, wire, implementation):
    rng = np.random.default_rng(2)
    capacity = case.num_rows
    x = rng.normal(size=(case.num_ranks, case.num_tokens, case.hidden)).astype(case.dtype)
    x[:, 0, :5] = 0, np.nan, np.inf, jnp.finfo(case.dtype).max, -1
    topk_idx = routing(kind, case, rng)
    plain = send_by_reference(case, x, topk_idx)
    owned = owned_rows([d.routes for d in plain], capacity)
    shape = (case.num_ranks, capacity, case.hidden)
    g = with_nan_elsewhere(rng.normal(size=shape).astype(case.dtype), owned)

    def run(x: Any, topk_idx: Any, g: Any) -> Any:
        def send(x: Any, **options: Any) -> Any:
            return case.dispatch(x, topk_idx, implementation, **options)

        tokens, pull = jax.vjp(lambda x: send(x, wire_dtype=wire.dtype).tokens, x)
        _, pull_plain = jax.vjp(lambda x: send(x).tokens, x)
        quantized = send(x, wire_dtype=wire.dtype, output="quantized")
        options = dict(wire_dtype=wire.dtype, implementation=implementation)
        like, pull_like = jax.vjp(lambda x: jax_ep.dispatch_like(x, quantized.handle, **options), x)
        grads = [pull_rows(g)[0] for pull_rows in (pull, pull_like, pull_plain)]
        return tokens, quantized.tokens, like, grads

    tokens, kept, like, grads = jax.jit(per_rank(run, case.num_ranks))(x, topk_idx, g)
    arrived = after_the_wire(x, implementation, wire)
    expected = send_by_reference(case, arrived, topk_idx)
    assert_equal(tokens, np.stack([d.tokens for d in expected]))
    assert tokens.dtype == x.dtype
    assert kept.values.dtype == wire.dtype and kept.scales.dtype == np.float32
    kept = jax.tree.map(np.asarray, kept)
    assert isinstance(kept, jax_ep.QuantizedArray) and kept.format == wire
    assert kept.shape == tokens.shape and kept.dtype == x.dtype
    assert_equal(kept.dequantize(), tokens)
    assert not np.any(kept.scales[~owned]) and np.all(kept.scales[owned] > 0)
    assert not np.any(kept.values[~owned].view(np.uint8))
    assert_bitwise_equal(like, tokens)
    for grad in grads[:2]:
        assert_bitwise_equal(grad, grads[2])


@wires
@pytest.mark.parametrize("case", quick(CASES, CASES[2]), ids=str)
@pytest.mark.parametrize("weighted", quick([True, False], True), ids=["weighted", "plain"])
def test_combine_rounds_each_ranks_sum(case, weighted, wire, implementation):
    rng = np.random.default_rng(4)
    capacity = case.num_rows
    topk_idx = routing("uniform", case, rng)
    x = small_integers(rng, (case.num_ranks, case.num_tokens, case.hidden), case.dtype)
    routes = [d.routes for d in send_by_reference(case, x, topk_idx)]
    y = rng.normal(size=(case.num_ranks, capacity, case.hidden)).astype(case.dtype)
    y = with_nan_elsewhere(y, owned_rows(routes, capacity))
    weights = small_weights(rng, topk_idx.shape, "float32") if weighted else None
    g = small_integers(rng, x.shape, case.dtype)

    def run(x: Any, topk_idx: Any, y: Any, weights: Any, g: Any) -> Any:
        handle = case.dispatch(x, topk_idx, implementation).handle

        def results(wire_dtype: Any) -> Any:
            def combine(y: Any, weights: Any) -> Any:
                options = dict(wire_dtype=wire_dtype, implementation=implementation)
                return jax_ep.combine(y, handle, weights, **options)

            out, pull = jax.vjp(combine, y, weights)
            return out, pull(g)

        return results(wire.dtype), results(None)

    (out, grads), (_, plain_grads) = jax.jit(per_rank(run, case.num_ranks))(
        x, topk_idx, y, weights, g
    )
    jax.tree.map(assert_bitwise_equal, grads, plain_grads)

    # Add up each rank's float32 sum, and the error that its rounding to float8 may have.
    scalars = None if weights is None else list(weights)
    exact = np.zeros(x.shape, np.float64)
    allowed = np.zeros(x.shape, np.float64)
    for rank in range(case.num_ranks):
        here = [r._replace(rows=np.where(r.ranks == rank, r.rows, -1)) for r in routes]
        sums = np.stack(reference.combine(list(y.astype(np.float32)), here, scalars))
        exact += sums
        allowed += bound(sums, wire)
    allowed += float(jnp.finfo(case.dtype).eps) * (np.abs(exact) + allowed)
    assert np.all(np.abs(np.asarray(out, np.float64) - exact) <= allowed)


@wires
@pytest.mark.parametrize("layout", quick(["expert", "rank"], "rank"))
def test_cotangents_travel_in_float8_only_if_asked(layout, wire, implementation):
    """With grad_wire_dtype, cotangents must be sent in float8."""
    case = Case(most_ranks(4), 5, 256, 3, 8, "bfloat16")
    rng = np.random.default_rng(5)
    x, g_out = (rng.normal(size=(case.num_ranks, 5, 256)).astype(case.dtype) for _ in range(2))
    rows = (case.num_ranks, 5) if layout == "rank" else (case.num_rows,)
    g, y = (rng.normal(size=(case.num_ranks, *rows, 256)).astype(case.dtype) for _ in range(2))
    topk_idx = routing("masked", case, rng)
    weights = small_weights(rng, topk_idx.shape, "float32")

    def run(x: Any, topk_idx: Any, g: Any, y: Any, g_out: Any, weights: Any) -> Any:
        weights = None if layout == "rank" else weights
        usual: Any = dict(num_experts=8, axis_name=AXIS, layout=layout)

        def send(x: Any, **options: Any) -> Any:
            return jax_ep.dispatch(x, topk_idx, implementation=implementation, **usual, **options)

        handle = send(x).handle

        def like(x: Any) -> Any:
            options = dict(grad_wire_dtype=wire.dtype, implementation=implementation)
            return jax_ep.dispatch_like(x, handle, **options)

        def back(y: Any, **wires: Any) -> Any:
            return jax_ep.combine(y, handle, weights, implementation=implementation, **wires)

        _, pull = jax.vjp(lambda x: send(x, grad_wire_dtype=wire.dtype).tokens, x)
        _, pull_like = jax.vjp(like, x)
        _, pull_back = jax.vjp(lambda y: back(y, grad_wire_dtype=wire.dtype), y)
        got = pull(g)[0], pull_like(g)[0], pull_back(g_out)[0]
        # Compare with the gradient of a weighted combine whose cotangent was rounded to float8
        # first. Without the barrier, XLA would remove the rounding.
        quantized = lax.optimization_barrier(wire.encode(g_out))
        rounded = wire.decode(quantized, g_out.dtype)
        _, pull_plain = jax.vjp(back, y)
        plain = jax_ep.combine(g, handle, wire_dtype=wire.dtype, implementation=implementation)
        return got, (plain, plain, pull_plain(rounded)[0])

    got, expected = jax.jit(per_rank(run, case.num_ranks))(x, topk_idx, g, y, g_out, weights)
    jax.tree.map(assert_equal, got, expected)


def test_quantized_rows_refuse_a_gradient():
    case = Case(1, 5, 128, 2, 4)

    def loss(x: Any, topk_idx: Any) -> Any:
        received = case.dispatch(x, topk_idx, "xla", wire_dtype=WIRE, output="quantized")
        return jnp.sum(received.tokens.dequantize(jnp.float32))

    arrays = np.zeros((1, 5, 128), np.float32), np.zeros((1, 5, 2), np.int32)
    with pytest.raises(TypeError, match=r'output="quantized"\) has no gradient'):
        jax.eval_shape(per_rank(jax.grad(loss), 1), *arrays)
