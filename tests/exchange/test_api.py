"""Tests of dispatch and combine against `jax_ep.reference`, on every number of ranks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.contract import (
    AXIS,
    ROUTINGS,
    Case,
    Implementation,
    Inputs,
    assert_bitwise_equal,
    assert_equal,
    assert_outputs,
    assert_sum_close,
    exchanged,
    exchanged_by_reference,
    implementations,
    most_ranks,
    owned_rows,
    per_rank,
    program,
    random_bits,
    routing,
    rows_of,
    run_reference,
    send_by_reference,
    small_integers,
    small_weights,
    some_inputs,
    with_nan_elsewhere,
)
from support.hlo import collective_kinds
from support.jaxprs import executions
from support.meshes import expert_mesh, mesh
from support.selection import quick

import jax_ep
from jax_ep import reference


@pytest.fixture(params=implementations())
def implementation(request: pytest.FixtureRequest) -> Implementation:
    return request.param


# ----------------------------------------------------------------------- results for many shapes

CASES = [
    # Arguments: num_ranks, num_tokens, hidden, top_k, num_experts, dtype,
    # capacity, expert_alignment.
    Case(1, 5, 8, 2, 4, "float32"),
    Case(1, 7, 33, 3, 2, "bfloat16", 11, 8),
    Case(1, 1, 16, 1, 1, "float16", 1),
    Case(1, 9, 24, 4, 6, "bfloat16", None, 128),
    Case(2, 5, 16, 2, 8, "bfloat16"),
    Case(2, 3, 1, 2, 2, "float16", 1),
    Case(2, 1, 8, 3, 4, "float32", None, 8),
    Case(2, 9, 40, 4, 6, "float16", 130, 128),
    Case(4, 6, 16, 2, 8, "float32"),
    Case(4, 5, 17, 5, 4, "float16", None, 8),
    Case(4, 1, 8, 2, 16, "bfloat16", 2),
    Case(4, 11, 8, 3, 12, "bfloat16", 300, 128),
    Case(4, 4, 64, 8, 8, "float32", 13, 4),
    Case(8, 4, 8, 2, 16, "float32", None, 128),
    Case(8, 7, 24, 3, 8, "bfloat16"),
    Case(8, 1, 33, 1, 8, "float16", 1),
    Case(8, 9, 16, 4, 24, "float32", 20, 8),
    Case(8, 3, 8, 16, 16, "bfloat16", None, 8),
    Case(1, 7, 33, 3, 6, "bfloat16", 13, 4, "fair"),
    Case(2, 9, 16, 4, 6, "float32", 17, 1, "fair"),
    Case(4, 4, 8, 8, 8, "float16", 3, 2, "fair"),
    Case(8, 9, 16, 4, 24, "bfloat16", 27, 8, "fair"),
]


@pytest.mark.parametrize(
    "case", quick(CASES, CASES[1], CASES[5], CASES[12], CASES[14], CASES[16], CASES[19]), ids=str
)
def test_everything_equals_the_reference(case: Case, implementation: Implementation):
    """Tokens must be equal bit for bit, and sums exactly, since they are of small integers."""
    equals_the_reference(case, implementation, ROUTINGS, check_vma=CASES.index(case) % 3 != 0)


def test_many_tokens_of_a_rank_alone(implementation: Implementation):
    """An exchange of one rank alone with 512 tokens must equal the reference."""
    case = Case(1, 512, 4096, 2, 4, "float32")
    equals_the_reference(case, implementation, ["uniform"], check_vma=True)


def equals_the_reference(
    case: Case, implementation: Implementation, routings: Sequence[str], check_vma: bool
) -> None:
    rng = np.random.default_rng(0)
    capacity = rows_of(case, implementation)
    run = program(case, implementation, check_vma=check_vma)
    for kind in routings:
        inputs = some_inputs(case, kind, rng, capacity)
        assert_outputs(run(inputs), run_reference(case, inputs), f"routing {kind!r}")


@pytest.mark.parametrize(
    "case", quick([CASES[0], CASES[4], CASES[9], CASES[16]], CASES[16]), ids=str
)
def test_sums_of_any_floats_are_close_and_repeat_bit_for_bit(
    case: Case, implementation: Implementation
):
    rng = np.random.default_rng(1)
    capacity = rows_of(case, implementation)
    run = program(case, implementation, check_vma=CASES.index(case) % 3 != 0)
    by_token = (case.num_ranks, case.num_tokens, case.hidden)
    by_row = (case.num_ranks, capacity, case.hidden)
    inputs = Inputs(
        x=rng.normal(size=by_token).astype(case.dtype),
        topk_idx=routing("uniform", case, rng),
        grad_tokens=rng.normal(size=by_row).astype(case.dtype),
        y=rng.normal(size=by_row).astype(case.dtype),
        topk_weights=rng.random((case.num_ranks, case.num_tokens, case.top_k), np.float32),
        grad_out=rng.normal(size=by_token).astype(case.dtype),
    )
    first, second = run(inputs), run(inputs)
    for name in first._fields:
        assert_bitwise_equal(getattr(first, name), getattr(second, name), name)

    expected = run_reference(case, inputs)
    floats = ("x", "grad_tokens", "y", "topk_weights", "grad_out")
    absolute = {name: np.abs(getattr(inputs, name).astype(np.float32)) for name in floats}
    magnitude = run_reference(
        dataclasses.replace(case, dtype="float32"), inputs._replace(**absolute)
    )
    terms = {"grad_weights": case.hidden}
    for name in ("grad_x", "out", "grad_y", "grad_weights", "plain_out", "plain_grad_y"):
        assert_sum_close(
            getattr(first, name),
            getattr(expected, name),
            getattr(magnitude, name),
            terms.get(name, case.top_k),
            name,
        )


def test_no_routing_overflows_the_default_capacity(implementation: Implementation):
    """The default capacity must hold any routing: here all pairs go to one rank."""
    case = Case(most_ranks(4), 8, 8, 2, 4 * most_ranks(4), expert_alignment=8)
    pairs = case.num_ranks * case.num_tokens * case.top_k
    counts = [9, 9, 9, pairs - 27] if pairs > 36 else [9, 1, 1, pairs - 11]
    topk_idx = np.repeat(np.arange(4), counts).reshape(case.num_ranks, case.num_tokens, -1)
    x = np.ones((case.num_ranks, case.num_tokens, case.hidden), np.float32)

    def summary(x: Any, topk_idx: Any) -> Any:
        sent = case.dispatch(x, topk_idx, implementation)
        return sent.num_dropped, sent.rows_needed, jnp.sum(sent.tokens)

    dropped, needed, total = jax.jit(per_rank(summary, case.num_ranks))(
        x, topk_idx.astype(np.int32)
    )
    assert not np.any(dropped)
    assert needed[0] <= rows_of(case, implementation)
    assert total[0] == pairs * case.hidden


@pytest.mark.parametrize("index_dtype", quick(["int8", "int16", "uint32"], "uint32"))
def test_any_integer_dtype_names_experts(index_dtype: str, implementation: Implementation):
    case = Case(most_ranks(2), 6, 8, 2, 128, capacity=32)
    rng = np.random.default_rng(3)
    topk_idx = routing("uniform", case, rng).astype(index_dtype)
    topk_idx[0, 0, 0] = np.array(-1).astype(index_dtype)
    x = small_integers(rng, (case.num_ranks, case.num_tokens, case.hidden), case.dtype)
    ones = np.ones(topk_idx.shape, np.float32)
    tokens, out = jax.jit(per_rank(exchanged(case, implementation), case.num_ranks))(x, topk_idx)
    expected = exchanged_by_reference(case, x, topk_idx.astype(np.int64), ones, x)
    assert_bitwise_equal(tokens, np.stack(expected.rows[0]))
    assert_equal(out, expected.out)


@pytest.mark.parametrize(
    ("dtype", "named"), [("float8_e4m3fn", "xla"), ("float32", None)], ids=["float8", "unnamed"]
)
def test_any_payload_arrives_bit_for_bit(dtype: str, named: Implementation | None):
    """ "xla" must carry float8 rows, and implementation=None must run on all devices."""
    case = Case(most_ranks(8), 5, 16, 3, 8, dtype)
    rng = np.random.default_rng(4)
    x = random_bits(rng, (case.num_ranks, case.num_tokens, case.hidden), case.dtype)
    topk_idx = routing("masked", case, rng)

    def tokens(x: Any, topk_idx: Any) -> Any:
        sent = case.dispatch(x, topk_idx, named)
        return sent.tokens, jax_ep.combine(sent.tokens, sent.handle, implementation=named)

    actual, _ = jax.jit(per_rank(tokens, case.num_ranks))(x, topk_idx)
    expected = send_by_reference(case, x, topk_idx, actual.shape[1])
    assert_bitwise_equal(actual, np.stack([d.tokens for d in expected]))


def test_combine_accumulates_in_float32(implementation: Implementation):
    """256 + 1 - 256 must be 1: it is summed in float32, since bfloat16 cannot represent 257."""
    case = Case(most_ranks(4), 2, 8, 3, 4, "bfloat16", 8)
    topk_idx = np.full((case.num_ranks, 2, 3), -1, np.int32)
    topk_idx[0] = [[3, 3, 3], [0, 0, 0]]
    y = np.tile(np.array([256, 1, -256], case.dtype)[:, None], (1, case.hidden))
    y = np.concatenate([y, y, np.zeros((2, case.hidden), y.dtype)])

    def bring_back(topk_idx: Any, y: Any) -> Any:
        x = jnp.zeros((case.num_tokens, case.hidden), case.dtype)
        sent = case.dispatch(x, topk_idx, implementation)
        return jax_ep.combine(y, sent.handle, implementation=implementation)

    out = jax.jit(per_rank(bring_back, case.num_ranks))(topk_idx, np.stack([y] * case.num_ranks))
    np.testing.assert_array_equal(np.asarray(out[0], np.float32), 1.0)


def test_nothing_leaks_from_one_pair_to_another(implementation: Implementation):
    """NaN and infinity in a token's row or weight must not reach other tokens' results."""
    case = Case(most_ranks(4), 3, 8, 2, 4, "float32", 4)
    topk_idx = np.full((case.num_ranks, 3, 2), -1, np.int32)
    topk_idx[0, :2] = [[0, -1], [-1, 3]]
    # NaN is what 0 / 0 gives for the weights of a masked token.
    weights = np.full(topk_idx.shape, np.nan, np.float32)
    weights[0, 0, 0], weights[0, 1, 1] = np.inf, 2
    y = np.ones((case.num_ranks, 4, 8), np.float32)
    grad_out = np.full((case.num_ranks, 3, 8), np.inf, np.float32)

    def bring_back(topk_idx: Any, y: Any, weights: Any, grad_out: Any) -> Any:
        sent = case.dispatch(jnp.zeros((3, 8)), topk_idx, implementation)
        out, pull = jax.vjp(
            lambda y, w: jax_ep.combine(y, sent.handle, w, implementation=implementation),
            y,
            weights,
        )
        return out, pull(grad_out)[1]

    out, grad_weights = jax.jit(per_rank(bring_back, case.num_ranks))(
        topk_idx, y, weights, grad_out
    )
    expected, expected_grad = np.zeros((case.num_ranks, 3, 8)), np.zeros(topk_idx.shape)
    expected[0, 0], expected[0, 1] = np.inf, 2
    expected_grad[0, 0, 0] = expected_grad[0, 1, 1] = np.inf
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(grad_weights, expected_grad)


@pytest.mark.parametrize(
    ("y_dtype", "weights_dtype"),
    quick(
        [
            ("float32", "bfloat16"),
            ("bfloat16", "float32"),
            ("float16", "float16"),
            ("float32", None),
        ],
        ("bfloat16", "float32"),
        ("float32", None),
    ),
)
def test_combine_takes_another_width_and_other_dtypes(
    y_dtype: str, weights_dtype: str | None, implementation: Implementation
):
    """y may differ from x in hidden size and dtype; weights have their own dtype."""
    case = Case(most_ranks(4), 5, 16, 3, 8, "bfloat16", 40)
    rng = np.random.default_rng(5)
    x = small_integers(rng, (case.num_ranks, 5, 16), case.dtype)
    topk_idx = routing("masked", case, rng)
    y = small_integers(rng, (case.num_ranks, 40, 24), y_dtype)
    grad_out = small_integers(rng, (case.num_ranks, 5, 24), y_dtype)
    weights: Any = None
    if weights_dtype is not None:
        weights = small_weights(rng, topk_idx.shape, weights_dtype)

    def bring_back(x: Any, topk_idx: Any, y: Any, weights: Any, grad_out: Any) -> Any:
        handle = case.dispatch(x, topk_idx, implementation).handle
        out, pull = jax.vjp(
            lambda y, w: jax_ep.combine(y, handle, w, implementation=implementation), y, weights
        )
        return out, *pull(grad_out)

    out, grad_y, grad_weights = jax.jit(per_rank(bring_back, case.num_ranks))(
        x, topk_idx, y, weights, grad_out
    )
    routes = [d.routes for d in send_by_reference(case, x, topk_idx, 40)]
    expected_grads = reference.combine_grad(list(grad_out), list(y), routes, weights)
    assert_equal(out, np.stack(reference.combine(list(y), routes, weights)))
    assert_equal(grad_y, np.stack(expected_grads[0]))
    if weights is None:
        assert grad_weights is None
    else:
        assert_equal(grad_weights, np.stack(expected_grads[1]))


@pytest.mark.parametrize("capacity", [None, 7])
def test_dispatch_like_sends_another_payload_and_has_a_gradient(
    capacity: int | None, implementation: Implementation
):
    case = Case(most_ranks(4), 5, 16, 3, 8, "bfloat16", capacity, 4)
    rng = np.random.default_rng(6)
    rows = rows_of(case, implementation)
    x = small_integers(rng, (case.num_ranks, 5, 16), case.dtype)
    other = random_bits(rng, (case.num_ranks, 5, 8), "float32")
    topk_idx = routing("masked", case, rng)
    routes = [d.routes for d in send_by_reference(case, x, topk_idx, rows)]
    grad = small_integers(rng, (case.num_ranks, rows, 8), "float32")
    grad = with_nan_elsewhere(grad, owned_rows(routes, rows))

    def send_other(x: Any, topk_idx: Any, other: Any, grad: Any) -> Any:
        handle = case.dispatch(x, topk_idx, implementation).handle
        sent, pull = jax.vjp(
            lambda a: jax_ep.dispatch_like(a, handle, implementation=implementation), other
        )
        return sent, *pull(grad)

    sent, grad_other = jax.jit(per_rank(send_other, case.num_ranks))(x, topk_idx, other, grad)
    assert_bitwise_equal(sent, np.stack(reference.dispatch_like(list(other), routes)))
    assert_equal(grad_other, np.stack(reference.dispatch_grad(list(grad), routes)))


def test_no_axes_are_one_rank():
    """With `axis_name=()`, a program on one device must exchange outside of any shard_map."""
    case = Case(1, 5, 8, 2, 4, "bfloat16", 8)
    rng = np.random.default_rng(16)
    x = random_bits(rng, (5, 8), case.dtype)
    topk_idx = routing("masked", case, rng)
    sent = jax.jit(lambda x, i: case.dispatch(x, i, None, axis_name=()))(x, topk_idx[0])
    (expected,) = send_by_reference(case, x[None], topk_idx, 8)
    assert_bitwise_equal(sent.tokens, expected.tokens)
    assert_equal(
        jax.jit(jax_ep.combine)(jnp.ones((8, 8)), sent.handle),
        reference.combine([np.ones((8, 8), np.float32)], [expected.routes])[0],
    )


# ------------------------------------------------------------------- inside transformations of JAX


def _layers(case: Case, implementation: Implementation, style: str) -> Any:
    """Returns a function that adds combine(2 * dispatch(x)) to x, once per layer."""
    exchange = exchanged(case, implementation, scale=2)

    def layer(x: Any, routing_of_layer: Any) -> tuple[Any, None]:
        return x + exchange(x, *routing_of_layer)[1], None

    if "checkpoint" in style:
        layer = jax.checkpoint(layer)

    def run(x: Any, topk_idx: Any, weights: Any) -> Any:
        if "scan" in style:
            return jax.lax.scan(layer, x, (topk_idx, weights))[0]
        for i in range(topk_idx.shape[0]):
            x, _ = layer(x, (topk_idx[i], weights[i]))
        return x

    return run


def _layers_by_reference(case: Case, x: Any, topk_idx: Any, weights: Any, grad: Any) -> Any:
    """Computes `_layers` by the reference, and the gradients of sum(grad * result)."""
    inputs = []
    for layer in range(topk_idx.shape[1]):
        inputs.append((x, topk_idx[:, layer], weights[:, layer]))
        x = x + exchanged_by_reference(case, *inputs[-1], grad, scale=2).out
    grad_weights: list[np.ndarray] = []
    for layer_inputs in reversed(inputs):
        layer = exchanged_by_reference(case, *layer_inputs, grad, scale=2)
        grad_weights.insert(0, layer.grad_weights)
        grad = grad + layer.grad_x
    return x, grad, np.stack(grad_weights, axis=1)


@pytest.mark.parametrize("check_vma", quick([True, False], True), ids=["vma", "no_vma"])
@pytest.mark.parametrize(
    "style", quick(["plain", "checkpoint", "scan", "scan_checkpoint"], "scan_checkpoint")
)
def test_gradients_through_layers(style: str, check_vma: bool, implementation: Implementation):
    """jax.grad outside of the shard_map must be right for three layers, some of which drop rows."""
    case = Case(most_ranks(4), 5, 8, 3, 8, "float32", 14)
    rng = np.random.default_rng(8)
    x = small_integers(rng, (case.num_ranks, 5, 8), "float32")
    kinds = ("uniform", "masked", "skewed")
    topk_idx = np.stack([routing(kind, case, rng) for kind in kinds], axis=1)
    weights = small_weights(rng, topk_idx.shape, "float32")
    direction = small_integers(rng, x.shape, "float32")

    run = per_rank(_layers(case, implementation, style), case.num_ranks, check_vma)

    def loss(x: Any, weights: Any) -> Any:
        out = run(x, topk_idx, weights)
        return jnp.sum(out * direction), out

    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(x, weights)
    expected = _layers_by_reference(case, x, topk_idx, weights, direction)
    assert_equal(out, expected[0], "out")
    assert_equal(grads[0], expected[1], "grad of x")
    assert_equal(grads[1], expected[2], "grad of weights")


def test_a_handle_crosses_jit(implementation: Implementation):
    """A handle must be a valid result of one jitted program and argument of another."""
    case = Case(most_ranks(4), 5, 8, 2, 8, "bfloat16", 9)
    rng = np.random.default_rng(9)
    x = small_integers(rng, (case.num_ranks, 5, 8), case.dtype)
    topk_idx = routing("uniform", case, rng)
    weights = small_weights(rng, topk_idx.shape, "float32")

    send = per_rank(lambda x, i: case.dispatch(x, i, implementation), case.num_ranks)
    sent = jax.jit(send)(x, topk_idx)
    assert isinstance(sent, jax_ep.Dispatched) and isinstance(sent.handle, jax_ep.Handle)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(sent))

    bring_back = per_rank(
        lambda y, h, w: jax_ep.combine(y, h, w, implementation=implementation), case.num_ranks
    )
    out = jax.jit(bring_back)(sent.tokens, sent.handle, weights)
    assert_equal(out, exchanged_by_reference(case, x, topk_idx, weights, x).out)


def test_a_handle_crosses_scan_and_checkpoint(implementation: Implementation):
    """A handle must be a valid carry of a scan, and argument of a checkpointed function."""
    case = Case(most_ranks(4), 5, 8, 2, 8, "float32", 12)
    rng = np.random.default_rng(10)
    x = small_integers(rng, (case.num_ranks, 5, 8), "float32")
    topk_idx = routing("uniform", case, rng)
    weights = small_weights(rng, topk_idx.shape, "float32")
    grad_out = small_integers(rng, x.shape, "float32")

    @jax.checkpoint
    def bring_back(y: Any, handle: Any, weights: Any) -> Any:
        return jax_ep.combine(2 * y, handle, weights, implementation=implementation)

    def run(x: Any, topk_idx: Any, weights: Any, grad_out: Any) -> Any:
        sent = case.dispatch(x, topk_idx, implementation)

        def step(carry: Any, _: Any) -> Any:
            tokens, handle = carry
            return (tokens + sent.tokens, handle), None

        (tokens, handle), _ = jax.lax.scan(step, (sent.tokens, sent.handle), length=2)
        _, pull = jax.vjp(lambda y, w: bring_back(y, handle, w), tokens, weights)
        return bring_back(tokens, handle, weights), *pull(grad_out)

    actual = jax.jit(per_rank(run, case.num_ranks))(x, topk_idx, weights, grad_out)
    expected = exchanged_by_reference(case, x, topk_idx, weights, grad_out, scale=6)
    grad_y = reference.combine_grad(list(grad_out), *expected.rows, list(weights))[0]
    assert_equal(actual[0], expected.out)
    assert_equal(actual[1], 2 * np.stack(grad_y))
    assert_equal(actual[2], expected.grad_weights)


def test_several_dispatches_in_one_program(implementation: Implementation):
    """Two dispatches may be in flight at once and be combined in the reverse order."""
    case = Case(most_ranks(4), 5, 8, 2, 8)
    rng = np.random.default_rng(11)
    x = small_integers(rng, (case.num_ranks, 5, 8), "float32")
    first, second = routing("uniform", case, rng), routing("one_rank", case, rng)

    def run(x: Any, first: Any, second: Any) -> Any:
        a = case.dispatch(x, first, implementation)
        b = case.dispatch(3 * x, second, implementation)
        out_b = jax_ep.combine(b.tokens, b.handle, implementation=implementation)
        return jax_ep.combine(a.tokens, a.handle, implementation=implementation), out_b

    out_a, out_b = jax.jit(per_rank(run, case.num_ranks))(x, first, second)
    assert_equal(out_a, 2 * x)
    assert_equal(out_b, 6 * x)


def test_a_donated_buffer_is_reused(implementation: Implementation):
    case = Case(most_ranks(4), 5, 8, 2, 8)
    rng = np.random.default_rng(12)
    x = small_integers(rng, (case.num_ranks, 5, 8), "float32")
    topk_idx = routing("uniform", case, rng)
    sharding = jax.sharding.NamedSharding(expert_mesh(case.num_ranks), P(AXIS))
    donated = jax.device_put(x, sharding)
    exchange = per_rank(exchanged(case, implementation), case.num_ranks)
    run = jax.jit(lambda x, i: exchange(x, i)[1], donate_argnums=0)
    out = run(donated, jax.device_put(topk_idx, sharding))
    assert donated.is_deleted()
    assert_equal(out, 2 * x)


def test_vmap_says_what_to_do_instead(implementation: Implementation):
    case = Case(most_ranks(2), 3, 8, 2, 4, "float32", 5)
    x = np.zeros((case.num_ranks, 2, 3, 8), np.float32)
    topk_idx = np.zeros((case.num_ranks, 2, 3, 2), np.int32)
    run = per_rank(jax.vmap(exchanged(case, implementation)), case.num_ranks)
    with pytest.raises(NotImplementedError, match=r"jax\.vmap.*Fold the batch axis"):
        jax.jit(run)(x, topk_idx)


def test_the_jaxpr_shows_the_primitives_and_has_no_effects(implementation: Implementation):
    case = Case(most_ranks(4), 5, 8, 2, 8, "float32", 9)
    x = np.zeros((case.num_ranks, 5, 8), np.float32)
    topk_idx = np.zeros((case.num_ranks, 5, 2), np.int32)
    weights = np.zeros(topk_idx.shape, np.float32)

    forward = per_rank(exchanged(case, implementation), case.num_ranks)
    both = jax.make_jaxpr(forward)(x, topk_idx, weights)
    backward = jax.make_jaxpr(
        jax.grad(lambda x, w: jnp.sum(forward(x, topk_idx, w)[1]), argnums=(0, 1))
    )(x, weights)
    for jaxpr in (both, backward):
        assert all(executions(jaxpr.jaxpr, name) for name in ("ep_dispatch", "ep_combine"))
        assert not jaxpr.effects


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_the_hessian_by_reverse_mode(layout, implementation):
    """`jax.jacrev` of a gradient must be the dense Hessian, though it batches the exchange."""
    case = Case(most_ranks(2), 2, 8, 2, 4, "float32")
    rng = np.random.default_rng(22)
    topk_idx = routing("masked", case, rng)
    x = rng.normal(size=(case.num_ranks, 2, 8)).astype(np.float32)
    w = rng.normal(size=topk_idx.shape).astype(np.float32)

    def on_one_rank(x: Any, topk_idx: Any, w: Any) -> Any:
        axes = dict(num_experts=case.num_experts, axis_name=AXIS, implementation=implementation)
        if layout == "expert":
            sent = jax_ep.dispatch(x, topk_idx, **axes)
            return jax_ep.combine(sent.tokens**3, sent.handle, w, implementation=implementation)
        sent = jax_ep.dispatch(x, topk_idx, layout="rank", topk_weights=w, **axes)
        here = jnp.where(sent.local_topk_idx >= 0, sent.topk_weights, 0).sum(-1, keepdims=True)
        return jax_ep.combine(here * sent.tokens**3, sent.handle, implementation=implementation)

    def plain(x: Any, topk_idx: Any, w: Any) -> Any:
        return jnp.sum(jnp.where(topk_idx >= 0, w, 0), axis=-1, keepdims=True) * x**3

    def hessian(forward: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            return jnp.sum(jnp.sin(forward(x, topk_idx, w)))

        return jax.jit(jax.jacrev(jax.grad(loss, (0, 1)), (0, 1)))(x, w)

    got, want = hessian(per_rank(on_one_rank, case.num_ranks)), hessian(plain)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())


def test_vmap_over_rows_of_the_same_choices_is_one_exchange_after_another(
    implementation: Implementation,
):
    case = Case(most_ranks(2), 3, 8, 2, 4, "float32")
    rng = np.random.default_rng(23)
    topk_idx = routing("uniform", case, rng)
    x = rng.normal(size=(case.num_ranks, 2, 3, 8)).astype(np.float32)

    run = per_rank(jax.vmap(exchanged(case, implementation), (0, None)), case.num_ranks)
    assert_equal(jax.jit(run)(x, topk_idx)[1], 2 * x)


# -------------------------------------------------------------------------- meshes of several axes


@functools.cache
def _sample(num_ranks: int, groups: int) -> tuple[Case, np.ndarray, np.ndarray, np.ndarray]:
    case = Case(num_ranks, 3, 8, 2, 8, "float32", 10)
    rng = np.random.default_rng(14)
    x = small_integers(rng, (groups, num_ranks, 3, 8), "float32")
    topk_idx = np.stack([routing("uniform", case, rng) for _ in range(groups)])
    return case, x, topk_idx, small_weights(rng, (num_ranks, 3, 2), "float32")


@pytest.mark.parametrize("check_vma", quick([True, False], True), ids=["vma", "no_vma"])
@pytest.mark.parametrize(
    ("shape", "names", "axis_name"),
    quick(
        [
            ((2, 1), ("data", "expert"), ("expert",)),
            ((1, 4), ("data", "expert"), ("expert",)),
            ((2, 2), ("data", "expert"), ("expert",)),
            ((2, 4), ("data", "expert"), ("expert",)),
            ((4, 2), ("expert", "data"), ("expert",)),
            ((2, 2), ("a", "b"), ("a", "b")),
            ((2, 2), ("a", "b"), ("b", "a")),
            ((4, 2), ("a", "b"), ("a", "b")),
            ((2, 2, 2), ("a", "data", "b"), ("b", "a")),
            ((1, 2), ("a", "b"), ("a", "b")),
        ],
        ((2, 4), ("data", "expert"), ("expert",)),
        ((2, 2, 2), ("a", "data", "b"), ("b", "a")),
    ),
)
def test_each_data_row_of_a_mesh_dispatches_alone(
    shape: tuple[int, ...],
    names: tuple[str, ...],
    axis_name: tuple[str, ...],
    check_vma: bool,
    implementation: Implementation,
):
    """Ranks with other data indices must not exchange.

    Ranks along several axes must be numbered as by `jax.lax.axis_index(axis_name)`.
    """
    sizes = dict(zip(names, shape, strict=True))
    num_ranks, groups = int(np.prod([sizes[a] for a in axis_name])), sizes.get("data", 1)
    case, x, topk_idx, weights = _sample(num_ranks, groups)
    data = "data" if "data" in names else None
    exchange = exchanged(case, implementation, axis_name=axis_name)

    def on_one_rank(x: Any, topk_idx: Any, weights: Any) -> Any:
        return jax.tree.map(lambda a: a[None, None], exchange(x[0, 0], topk_idx[0, 0], weights[0]))

    run = jax.shard_map(
        on_one_rank,
        mesh=mesh(shape, names),
        in_specs=(P(data, axis_name), P(data, axis_name), P(axis_name)),
        out_specs=P(data, axis_name),
        check_vma=check_vma,
    )

    def loss(x: Any, weights: Any) -> Any:
        tokens, out = run(x, topk_idx, weights)
        return jnp.sum(out * x), (tokens, out)

    (grad_x, grad_weights), (tokens, out) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(
        x, weights
    )

    expected_grad_weights = np.zeros_like(weights)
    for group in range(groups):
        expected = exchanged_by_reference(case, x[group], topk_idx[group], weights, x[group])
        assert_bitwise_equal(tokens[group], np.stack(expected.rows[0]))
        assert_equal(out[group], expected.out)
        assert_equal(grad_x[group], expected.out + expected.grad_x)
        expected_grad_weights += expected.grad_weights
    assert_equal(grad_weights, expected_grad_weights)


@pytest.mark.parametrize(
    "style", quick(["automatic", "nested", "nested_no_vma"], "automatic", "nested_no_vma")
)
def test_the_other_axis_may_be_automatic_or_an_outer_shard_map(
    style: str, implementation: Implementation
):
    """Only the expert axis must be manual; others may be automatic or of an outer shard_map."""
    groups = most_ranks(2)
    num_ranks = most_ranks(8) // groups
    case, x, topk_idx, weights = _sample(num_ranks, groups)
    check_vma = style != "nested_no_vma"
    exchange = exchanged(case, implementation)

    def on_one_rank(x: Any, topk_idx: Any, weights: Any) -> Any:
        return exchange(x[0], topk_idx[0], weights[0])[1][None]

    over_experts = jax.shard_map(
        on_one_rank, axis_names={AXIS}, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=check_vma
    )

    def on_one_group(x: Any, topk_idx: Any, weights: Any) -> Any:
        x, topk_idx, weights = x[0], topk_idx[0], weights[0]
        if style == "nested":
            grad_x = grad_weights = None
            out = over_experts(x, topk_idx, weights)
        else:
            out, pull = jax.vjp(lambda x, w: over_experts(x, topk_idx, w), x, weights)
            grad_x, grad_weights = pull(x)
        return jax.tree.map(lambda a: a[None], (out, grad_x, grad_weights))

    run = on_one_group
    if style == "automatic":
        x, topk_idx = x[:1], topk_idx[:1]
    else:
        run = jax.shard_map(
            on_one_group,
            axis_names={"data"},
            in_specs=P("data"),
            out_specs=P("data"),
            check_vma=check_vma,
        )

    def results() -> Any:
        with jax.set_mesh(mesh((groups, num_ranks), ("data", AXIS))):
            return jax.jit(run)(x, topk_idx, np.stack([weights] * len(x)))

    if implementation == "pallas" and style == "automatic" and groups > 1:
        with pytest.raises(ValueError, match="left out of it"):
            results()
        return
    out, grad_x, grad_weights = results()

    for group in range(len(x)):
        expected = exchanged_by_reference(case, x[group], topk_idx[group], weights, x[group])
        assert_equal(out[group], expected.out)
        if style != "nested":
            assert_equal(grad_x[group], expected.grad_x)
            assert_equal(grad_weights[group], expected.grad_weights)


@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
@pytest.mark.parametrize(
    "replicated",
    quick(
        [("x",), ("topk_idx",), ("weights",), ("x", "topk_idx", "weights")],
        ("x", "topk_idx", "weights"),
        unpack=False,
    ),
    ids="-".join,
)
def test_what_every_rank_shares_may_stay_replicated(
    replicated: tuple[str, ...], check_vma: bool, implementation: Implementation
):
    """Operands may be replicated over the ranks; their gradients must be sums over the ranks."""
    case, x, topk_idx, weights = _sample(most_ranks(4), 1)
    values = {"x": x[0], "topk_idx": topk_idx[0], "weights": weights}
    for name in replicated:
        values[name] = values[name][:1]
    specs = {name: P() if name in replicated else P(AXIS) for name in values}

    exchange = exchanged(case, implementation, shift=1)

    def on_one_rank(values: dict[str, Any]) -> Any:
        return exchange(*(values[name][0] for name in ("x", "topk_idx", "weights")))[1][None]

    run = jax.shard_map(
        on_one_rank,
        mesh=expert_mesh(case.num_ranks),
        in_specs=(specs,),
        out_specs=P(AXIS),
        check_vma=check_vma,
    )
    direction = small_integers(np.random.default_rng(15), x[0].shape, "float32")

    def loss(x: Any, weights: Any) -> Any:
        out = run({"x": x, "topk_idx": values["topk_idx"], "weights": weights})
        return jnp.sum(out * direction), out

    (grad_x, grad_weights), out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(
        values["x"], values["weights"]
    )

    full = {k: np.broadcast_to(v, (case.num_ranks, *v.shape[1:])) for k, v in values.items()}
    expected = exchanged_by_reference(
        case, full["x"], full["topk_idx"], full["weights"], direction, shift=1
    )
    expected_x, expected_weights = expected.grad_x, expected.grad_weights
    if "x" in replicated:
        expected_x = expected_x.sum(axis=0, keepdims=True)
    if "weights" in replicated:
        expected_weights = expected_weights.sum(axis=0, keepdims=True)
    assert_equal(out, expected.out)
    assert_equal(grad_x, expected_x)
    assert_equal(grad_weights, expected_weights)


# ------------------------------------------------------------------------------------------ errors

ERRORS = (ValueError, TypeError, NameError, NotImplementedError, RuntimeError)
FUNCTIONS = ("dispatch", "combine", "dispatch_like")


def _assert_raises(patterns: Sequence[str], function: str, num_ranks: int = 1, **change: Any):
    """Asserts that tracing a call of `function` raises an error that matches all `patterns`.

    A change of an argument is its new value or, of an array, the new (shape, dtype).
    """
    arrays = dict(x=((5, 8), "float32"), topk_idx=((5, 2), "int32"))
    if function == "combine":
        arrays |= dict(y=((9, 8), "float32"), topk_weights=((5, 2), "float32"))
    if function == "dispatch_like":
        arrays |= dict(other=((5, 8), "float32"))
    arrays |= {name: value for name, value in change.items() if name in arrays}
    options = {name: value for name, value in change.items() if name not in arrays}
    sizes = {"num_experts": 4, "axis_name": AXIS, "implementation": "xla", "capacity": 9}

    def call(_: Any) -> Any:
        given = {name: jnp.zeros(*array) for name, array in arrays.items()}
        x, topk_idx = given["x"], given["topk_idx"]
        if function == "dispatch":
            return jax_ep.dispatch(x, topk_idx, **sizes | options).tokens
        handle = jax_ep.dispatch(x, topk_idx, **sizes).handle
        options.setdefault("implementation", "xla")
        if function == "combine":
            return jax_ep.combine(given["y"], handle, given["topk_weights"], **options)
        return jax_ep.dispatch_like(given["other"], handle, **options)

    # The call is traced but not compiled, so that any error is one of tracing.
    with pytest.raises(ERRORS) as error:
        jax.make_jaxpr(per_rank(call, num_ranks))(np.zeros((num_ranks, 1), np.float32))
    for pattern in patterns:
        error.match(pattern)


@pytest.mark.parametrize(
    ("function", "change", "patterns"),
    [
        ("dispatch", {"x": ((5, 8), "int32")}, [r"\bx\b", "int32", "float"]),
        ("dispatch", {"x": ((5,), "float32")}, [r"\bx\b", r"\(5,\)", r"\[T, H\]"]),
        ("dispatch", {"x": ((5, 2, 8), "float32")}, [r"\bx\b", r"\(5, 2, 8\)", r"\[T, H\]"]),
        ("dispatch", {"topk_idx": ((5, 2), "float32")}, [r"\btopk_idx\b", "float32", "int"]),
        ("dispatch", {"topk_idx": ((5,), "int32")}, [r"\btopk_idx\b", r"\(5,\)", r"\[T, K\]"]),
        ("dispatch", {"topk_idx": ((4, 2), "int32")}, [r"\btopk_idx\b", r"\b5\b", r"\b4\b"]),
        ("dispatch", {"capacity": 0}, [r"\bcapacity\b", r"\b0\b"]),
        ("dispatch", {"capacity": -3}, [r"\bcapacity\b", "-3"]),
        ("dispatch", {"capacity": 2.5}, [r"\bcapacity\b", r"2\.5", "integer"]),
        ("dispatch", {"num_experts": 0}, [r"\bnum_experts\b", r"\b0\b"]),
        ("dispatch", {"num_experts": 4.0}, [r"\bnum_experts\b", r"4\.0", "integer"]),
        ("dispatch", {"expert_alignment": 0}, [r"\bexpert_alignment\b", r"\b0\b"]),
        ("dispatch", {"overflow": "last"}, [r"\boverflow\b", "last", "tail", "fair"]),
        (
            "dispatch",
            {"layout": "rank", "overflow": "fair"},
            [r"\boverflow\b", "fair", "group_by_expert"],
        ),
        (
            "dispatch",
            {"axis_name": "nowhere"},
            [r"\baxis_name\b", "nowhere", r"call this inside jax\.shard_map"],
        ),
        (
            "dispatch",
            {"axis_name": (AXIS, "nowhere")},
            [r"\baxis_name\b", "nowhere", r"jax\.shard_map"],
        ),
        ("combine", {"y": ((8, 8), "float32")}, [r"\by\b", r"\b8\b", r"\b9\b"]),
        ("combine", {"y": ((9,), "float32")}, [r"\by\b", r"\(9,\)", r"\[R, H\]"]),
        ("combine", {"y": ((9, 0), "float32")}, [r"\by\b", r"\(9, 0\)", r"\[R, H\]"]),
        ("combine", {"y": ((9, 8), "int32")}, [r"\by\b", "int32", "float"]),
        ("combine", {"topk_weights": ((5, 3), "float32")}, ["topk_weights", r"5, 3", r"5, 2"]),
        ("combine", {"topk_weights": ((4, 2), "float32")}, ["topk_weights", r"4, 2", r"5, 2"]),
        ("combine", {"topk_weights": ((5,), "float32")}, ["topk_weights", r"5,\)", r"\[T, K\]"]),
        ("combine", {"topk_weights": ((5, 2), "int32")}, ["topk_weights", "int32", "float"]),
        ("dispatch_like", {"other": ((4, 8), "float32")}, [r"\bx\b", r"\b4\b", r"\b5\b"]),
        ("dispatch_like", {"other": ((5,), "float32")}, [r"\bx\b", r"\(5,\)"]),
        ("dispatch_like", {"other": ((5, 8), "int32")}, [r"\bx\b", "int32", "float"]),
        *(
            (function, {"implementation": "nccl"}, [r"\bimplementation\b", "nccl", "xla", "pallas"])
            for function in FUNCTIONS
        ),
    ],
)
def test_errors(function: str, change: dict[str, Any], patterns: list[str]):
    _assert_raises(patterns, function, **change)


@pytest.mark.needs_devices(2)
def test_experts_must_divide_over_ranks():
    patterns = [r"\bnum_experts\b", r"\b7\b", r"\b2\b", AXIS]
    _assert_raises(patterns, "dispatch", 2, num_experts=7)


def test_dispatch_outside_shard_map():
    case = Case(1, 5, 8, 2, 4)
    with pytest.raises(ValueError, match=rf"axis_name.*{AXIS}.*call this inside jax\.shard_map"):
        case.dispatch(jnp.zeros((5, 8)), jnp.zeros((5, 2), jnp.int32), "xla")


@pytest.mark.skipif(jax.devices()[0].platform == "gpu", reason="the kernels may run here")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_named_implementation_never_falls_back(function: str):
    patterns = [r"\bimplementation\b", "pallas", r"cannot run here: \w+"]
    _assert_raises(patterns, function, implementation="pallas")


def test_a_wide_integer_names_no_other_expert(implementation: Implementation):
    """An int64 id that only a cast to 32 bits would make an expert must choose no expert."""
    with jax.enable_x64(True):
        topk_idx = np.array([[0, 2**32], [-(2**32) + 1, 3]])

        def counts(topk_idx: Any) -> Any:
            x = jnp.ones((2, 64), jnp.float32)
            options: dict[str, Any] = dict(num_experts=4, axis_name=AXIS)
            return jax_ep.dispatch(
                x, topk_idx, implementation=implementation, **options
            ).expert_counts

        got = jax.jit(per_rank(counts, 1))(topk_idx[None])
    np.testing.assert_array_equal(got[0], [1, 0, 0, 1])


@pytest.mark.parametrize("layout", ["expert", "rank"])
def test_one_rank_exchanges_outside_of_jit(layout: Any):
    """Without a mesh, an exchange must give the same values and gradients outside of jit."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((12, 16)), jnp.float32)
    topk_idx = jnp.asarray(rng.integers(0, 4, (12, 2)), jnp.int32)
    weights = jnp.asarray(rng.uniform(0.1, 1, (12, 2)), jnp.float32)

    def exchange(x: jax.Array, weights: jax.Array) -> jax.Array:
        sent = jax_ep.dispatch(
            x,
            topk_idx,
            num_experts=4,
            axis_name=(),
            layout=layout,
            **dict(topk_weights=weights) if layout == "rank" else {},
        )
        if layout == "rank":
            factors = jnp.sum(sent.topk_weights, -1)[..., None]
            return jax_ep.combine(sent.tokens * factors, sent.handle)
        return jax_ep.combine(sent.tokens * 2, sent.handle, weights)

    def both(x: jax.Array, weights: jax.Array) -> Any:
        out, vjp = jax.vjp(exchange, x, weights)
        return out, *vjp(jnp.ones_like(out))

    want = jax.jit(both)(x, weights)
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(assert_close, both(x, weights), want)
    with jax.disable_jit():
        jax.tree.map(assert_close, both(x, weights), want)


# ------------------------------------------------------------------------ exchanges of one rank


def test_a_rank_alone_runs_no_collective():
    @jax.jit
    @functools.partial(jax.shard_map, mesh=expert_mesh(1), in_specs=P(AXIS), out_specs=P(AXIS))
    def exchange(x, topk_idx, topk_weights):
        sent = jax_ep.dispatch(x, topk_idx, num_experts=4, axis_name=AXIS, implementation="xla")
        return jax_ep.combine(sent.tokens, sent.handle, topk_weights, implementation="xla")

    x, topk_idx = jnp.ones((5, 8)), jnp.arange(10, dtype=jnp.int32).reshape(5, 2) % 4
    compiled = exchange.lower(x, topk_idx, jnp.full((5, 2), 0.5)).compile()
    assert not collective_kinds(compiled.as_text())
    np.testing.assert_array_equal(compiled(x, topk_idx, jnp.full((5, 2), 0.5)), x)
