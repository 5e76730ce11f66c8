"""Tests of float8 in the exchange: first the format, then dispatch and combine with it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support.contract import (
    AXIS,
    Case,
    after_the_wire,
    assert_bitwise_equal,
    assert_equal,
    implementations,
    most_ranks,
    owned_rows,
    per_rank,
    random_bits,
    routing,
    rows_of,
    send_by_reference,
    small_integers,
    small_weights,
    with_nan_elsewhere,
)
from support.kernels import needs_kernels
from support.meshes import cuda_mesh
from support.selection import quick

import jax_ep
from jax_ep import reference
from jax_ep.exchange import xla
from jax_ep.formats import FLOAT8_ROWS, PLAIN

WIRE = jnp.float8_e4m3fn
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(params=implementations())
def implementation(request: pytest.FixtureRequest) -> str:
    return request.param


def bound(x: np.ndarray) -> np.ndarray:
    """Returns the bound of |arrived - x|, [..., H]: float8's error, and rounding to x's dtype."""
    magnitude = np.abs(x.astype(np.float64)).reshape(*x.shape[:-1], -1, 128)
    scale = np.maximum(magnitude.max(axis=-1, keepdims=True) / 448, 2.0**-117)
    sent = np.maximum(2.0**-4 * magnitude, 2.0**-10 * scale)
    info = jnp.finfo(x.dtype)
    rounding = float(info.eps) * (magnitude + sent) + float(info.smallest_subnormal)
    return (sent * (1 + 2.0**-20) + rounding).reshape(x.shape)


# ------------------------------------------------------------------------------- the float8 format


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wire", [PLAIN, FLOAT8_ROWS])
def test_one_array_holds_every_bit(dtype, wire):
    x = random_bits(np.random.default_rng(1), (5, 384), dtype)
    sent = jax.jit(lambda x: xla.pack(x, wire))(x)
    assert sent.nbytes == 5 * wire.row_bytes(384, dtype)
    parts = jax.jit(lambda sent, x: xla.unpack(sent, x, wire))(sent, x)
    expected = jax.jit(wire.encode)(x)
    for part, wanted in zip(parts, expected, strict=True):
        assert_bitwise_equal(np.asarray(part), np.asarray(wanted))


# ----------------------------------------------------------------- dispatch and combine in float8

CASES = [
    Case(1, 5, 128, 2, 4, "bfloat16"),
    Case(2, 4, 256, 3, 8, "float32", 7, 4),
    Case(4, 6, 384, 2, 8, "bfloat16"),
    Case(8, 3, 128, 4, 16, "float16", None, 8),
]


@pytest.mark.parametrize("case", quick(CASES, CASES[1], CASES[3]), ids=str)
@pytest.mark.parametrize("kind", quick(["uniform", "masked", "repeated", "one_expert"], "masked"))
def test_dispatch_sends_quantized_rows_and_plain_gradients(case, kind, implementation):
    rng = np.random.default_rng(2)
    capacity = rows_of(case, implementation)
    x = rng.normal(size=(case.num_ranks, case.num_tokens, case.hidden)).astype(case.dtype)
    x[:, 0, :5] = 0, np.nan, np.inf, jnp.finfo(case.dtype).max, -1
    topk_idx = routing(kind, case, rng)
    plain = send_by_reference(case, x, topk_idx, capacity)
    owned = owned_rows([d.routes for d in plain], capacity)
    shape = (case.num_ranks, capacity, case.hidden)
    g = with_nan_elsewhere(rng.normal(size=shape).astype(case.dtype), owned)

    def run(x: Any, topk_idx: Any, g: Any) -> Any:
        def send(x: Any, **options: Any) -> Any:
            return case.dispatch(x, topk_idx, implementation, **options)

        tokens, pull = jax.vjp(lambda x: send(x, wire_dtype=WIRE).tokens, x)
        _, pull_plain = jax.vjp(lambda x: send(x).tokens, x)
        quantized = send(x, wire_dtype=WIRE, output="quantized")
        return tokens, quantized.tokens, pull(g)[0], pull_plain(g)[0]

    tokens, kept, grad, plain_grad = jax.jit(per_rank(run, case.num_ranks))(x, topk_idx, g)
    arrived = after_the_wire(x, implementation)
    expected = send_by_reference(case, arrived, topk_idx, capacity)
    assert_equal(tokens, np.stack([d.tokens for d in expected]))
    assert tokens.dtype == x.dtype and kept.values.dtype == WIRE and kept.scales.dtype == np.float32
    kept = jax.tree.map(np.asarray, kept)
    assert isinstance(kept, jax_ep.QuantizedArray) and kept.format == FLOAT8_ROWS
    assert kept.shape == tokens.shape and kept.dtype == x.dtype
    assert_equal(kept.dequantize(), tokens)
    assert not np.any(kept.scales[~owned]) and np.all(kept.scales[owned] > 0)
    assert not np.any(kept.values[~owned].view(np.uint8))
    assert_bitwise_equal(grad, plain_grad)


def test_dispatch_like_quantizes_another_payload(implementation):
    case = Case(most_ranks(4), 5, 16, 3, 8, "bfloat16", 9)
    rng = np.random.default_rng(3)
    x = small_integers(rng, (case.num_ranks, 5, 16), case.dtype)
    other = rng.normal(size=(case.num_ranks, 5, 256)).astype(np.float32)
    g = small_integers(rng, (case.num_ranks, 9, 256), "float32")
    topk_idx = routing("masked", case, rng)

    def run(x: Any, topk_idx: Any, other: Any, g: Any) -> Any:
        handle = case.dispatch(x, topk_idx, implementation).handle
        options = dict(wire_dtype=WIRE, implementation=implementation)
        sent, pull = jax.vjp(lambda a: jax_ep.dispatch_like(a, handle, **options), other)
        return sent, *pull(g)

    sent, grad = jax.jit(per_rank(run, case.num_ranks))(x, topk_idx, other, g)
    routes = [d.routes for d in send_by_reference(case, x, topk_idx, 9)]
    arrived = list(after_the_wire(other, implementation))
    assert_bitwise_equal(sent, np.stack(reference.dispatch_like(arrived, routes)))
    assert_equal(grad, np.stack(reference.dispatch_grad(list(g), routes)))


@pytest.mark.parametrize("case", quick(CASES, CASES[1], CASES[3]), ids=str)
@pytest.mark.parametrize("weighted", quick([True, False], True), ids=["weighted", "plain"])
def test_combine_rounds_each_ranks_sum(case, weighted, implementation):
    rng = np.random.default_rng(4)
    capacity = rows_of(case, implementation)
    topk_idx = routing("uniform", case, rng)
    x = small_integers(rng, (case.num_ranks, case.num_tokens, case.hidden), case.dtype)
    routes = [d.routes for d in send_by_reference(case, x, topk_idx, capacity)]
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

        return results(WIRE), results(None)

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
        allowed += bound(sums)
    allowed += float(jnp.finfo(case.dtype).eps) * (np.abs(exact) + allowed)
    assert np.all(np.abs(np.asarray(out, np.float64) - exact) <= allowed)


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_cotangents_travel_in_float8_only_if_asked(layout, implementation):
    """With grad_wire_dtype, cotangents must be sent in float8."""
    case = Case(most_ranks(4), 5, 256, 3, 8, "bfloat16")
    rng = np.random.default_rng(5)
    x, g_out = (rng.normal(size=(case.num_ranks, 5, 256)).astype(case.dtype) for _ in range(2))
    rows = (case.num_ranks, 5) if layout == "rank" else (rows_of(case, implementation),)
    g, y = (rng.normal(size=(case.num_ranks, *rows, 256)).astype(case.dtype) for _ in range(2))
    topk_idx = routing("masked", case, rng)
    weights = small_weights(rng, topk_idx.shape, "float32")

    def run(x: Any, topk_idx: Any, g: Any, y: Any, g_out: Any, weights: Any) -> Any:
        weights = None if layout == "rank" else weights

        def send(x: Any, **options: Any) -> Any:
            return jax_ep.dispatch(
                x,
                topk_idx,
                num_experts=8,
                axis_name=AXIS,
                layout=layout,
                implementation=implementation,
                **options,
            )

        handle = send(x).handle
        _, pull = jax.vjp(lambda x: send(x, grad_wire_dtype=WIRE).tokens, x)
        _, pull_like = jax.vjp(
            lambda x: jax_ep.dispatch_like(
                x, handle, grad_wire_dtype=WIRE, implementation=implementation
            ),
            x,
        )
        _, pull_back = jax.vjp(
            lambda y: jax_ep.combine(
                y, handle, weights, grad_wire_dtype=WIRE, implementation=implementation
            ),
            y,
        )
        # Compare with the gradient of a weighted combine whose cotangent was rounded to float8
        # first.
        # Without the barrier, XLA would remove the rounding.
        quantized = lax.optimization_barrier(FLOAT8_ROWS.encode(g_out))
        rounded = FLOAT8_ROWS.decode(quantized, g_out.dtype)
        _, pull_plain = jax.vjp(
            lambda y: jax_ep.combine(y, handle, weights, implementation=implementation), y
        )
        return (
            (pull(g)[0], pull_like(g)[0], pull_back(g_out)[0]),
            (jax_ep.combine(g, handle, wire_dtype=WIRE, implementation=implementation),) * 2
            + pull_plain(rounded),
        )

    got, expected = jax.jit(per_rank(run, case.num_ranks))(x, topk_idx, g, y, g_out, weights)
    jax.tree.map(assert_equal, got, expected)


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("hidden", "dtype", "options", "message"),
    [
        (200, "float32", {}, r"float8_e4m3fn needs rows of whole blocks of 128.*x has 200 columns"),
        (128, "float32", {"wire_dtype": "int8"}, r"wire_dtype must be None or float8_e4m3fn"),
        (128, "float32", {"wire_dtype": "e4m3"}, r"wire_dtype must be .* 'e4m3'"),
        (
            128,
            "float8_e4m3fn",
            {},
            r"x must have a dtype of 16 bits or more to be sent as float8_e4m3fn",
        ),
        (128, "float32", {"grad_wire_dtype": "int8"}, r"grad_wire_dtype must be None or float8"),
        (128, "float32", {"output": "raw"}, r"output must be .* 'raw'"),
        (128, "float32", {"wire_dtype": None, "output": "quantized"}, r"needs a wire_dtype"),
    ],
)
def test_dispatch_errors(hidden, dtype, options, message):
    options = {"wire_dtype": WIRE, **options}
    x = jax.ShapeDtypeStruct((1, 5, hidden), dtype)
    with pytest.raises((ValueError, TypeError), match=message):
        jax.eval_shape(per_rank(lambda *arrays: sent(*arrays, **options).tokens, 1), x, INDICES)


INDICES = jax.ShapeDtypeStruct((1, 5, 2), "int32")


def sent(x: Any, topk_idx: Any, **options: Any) -> Any:
    return Case(1, 5, x.shape[1], 2, 4).dispatch(x, topk_idx, "xla", **options)


def test_combine_errors():
    def call(x: Any, topk_idx: Any) -> Any:
        received = sent(x, topk_idx)
        return jax_ep.combine(received.tokens, received.handle, wire_dtype=WIRE)

    with pytest.raises(ValueError, match=r"y has 200 columns"):
        jax.eval_shape(per_rank(call, 1), jax.ShapeDtypeStruct((1, 5, 200), "float32"), INDICES)


def test_quantized_rows_refuse_a_gradient():
    def loss(x: Any, topk_idx: Any) -> Any:
        received = sent(x, topk_idx, wire_dtype=WIRE, output="quantized")
        return jnp.sum(received.tokens.dequantize(jnp.float32))

    x = jax.ShapeDtypeStruct((1, 5, 128), "float32")
    with pytest.raises(TypeError, match=r'output="quantized"\) has no gradient'):
        jax.eval_shape(per_rank(jax.grad(loss), 1), x, INDICES)


# -------------------------------------------------------------------- which implementation runs


def lower_for_gpus(function: Any, *shapes: Any) -> str:
    """Lowers `function` on a mesh of 8 ranks for GPUs, without needing one; returns the text."""
    mesh = cuda_mesh((8,), (AXIS,))
    run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return run.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


TOKENS, CHOICES = ((8 * 16, 1024), "bfloat16"), ((8 * 16, 4), "int32")


@needs_kernels
@pytest.mark.parametrize("output", ["dequantized", "quantized"])
def test_the_kernels_quantize_and_write_both_parts(output):
    case = Case(8, 16, 1024, 4, 32, capacity=64)

    def send(x: Any, topk_idx: Any) -> Any:
        sent = case.dispatch(x, topk_idx, "pallas", wire_dtype=WIRE, output=output)
        return sent.tokens, jax_ep.dispatch_like(x, sent.handle, wire_dtype=WIRE)

    text = lower_for_gpus(send, TOKENS, CHOICES)
    calls = [line for line in text.splitlines() if "@mosaic_gpu_v2" in line]
    assert len(calls) == 2
    assert all("(tensor<1xi32>, tensor<16x1024xbf16>" in call for call in calls)
    assert all("(tensor<64x1024xf8E4M3FN>, tensor<64x8xf32>" in call for call in calls)


@needs_kernels
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the mesh is abstract")
@pytest.mark.parametrize("layout", ["expert", "rank"])
@pytest.mark.slow
def test_the_kernels_quantize_sums(layout):
    """Kernels must quantize the sums of a combine, and those of a dispatch's cotangents."""

    def back(x: Any, topk_idx: Any) -> Any:
        def there_and_back(x: Any) -> Any:
            sent = jax_ep.dispatch(
                x, topk_idx, num_experts=32, axis_name=AXIS, layout=layout, grad_wire_dtype=WIRE
            )
            return jax_ep.combine(sent.tokens, sent.handle, wire_dtype=WIRE)

        out, pull = jax.vjp(there_and_back, x)
        return out, pull(out)

    text = lower_for_gpus(back, TOKENS, CHOICES)
    calls = [line for line in text.splitlines() if "@mosaic_gpu_v2" in line]
    # The kernels are a dispatch, a combine and their gradients, which are a combine and a dispatch.
    # The two combines return float8 sums.
    assert len(calls) == 4
    assert sum("x1024xf8E4M3FN>, tensor<" in call for call in calls) == 2
    assert "all_to_all" not in text and "all_gather" not in text


@needs_kernels
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the mesh is abstract")
def test_rows_too_long_to_quantize_their_sums_are_refused():
    """Kernels must refuse rows that are too long for them to quantize sums."""
    case = Case(8, 16, 16384, 4, 32, "float32", capacity=64)
    arrays = ((8 * 16, 16384), "float32"), CHOICES

    def back(implementation: Any) -> Any:
        def run(x: Any, topk_idx: Any) -> Any:
            sent = case.dispatch(x, topk_idx, "xla")
            return jax_ep.combine(
                sent.tokens, sent.handle, wire_dtype=WIRE, implementation=implementation
            )

        return run

    assert "@mosaic_gpu_v2" not in lower_for_gpus(back(None), *arrays)
    with pytest.raises(ValueError, match="too long for shared memory"):
        lower_for_gpus(back("pallas"), *arrays)
