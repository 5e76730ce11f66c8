"""Routers and balance losses against plain NumPy, their gradients against differences of it."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.meshes import RANK_COUNTS, expert_mesh, mesh
from support.selection import quick

from jax_ep import reference
from jax_ep.moe import routing

T, E = 24, 16
OPTIONS = [
    dict(k=1),
    dict(k=4),
    dict(k=E, normalize=False),
    dict(k=3, score="sigmoid"),
    dict(k=3, score="sigmoid", normalize=False, scale=2.5),
    dict(k=4, num_groups=4, groups_kept=1),
    dict(k=4, score="sigmoid", num_groups=4, groups_kept=2, scale=2.5, biased=True),
    dict(k=5, num_groups=16, groups_kept=5),
    dict(k=2, biased=True),
    dict(k=3, score="sqrt_softplus", scale=1.5, biased=True),
    dict(k=3, score="sigmoid", choose_by="logit", num_groups=4, groups_kept=2, biased=True),
    dict(k=3, num_groups=4, groups_kept=2, group_score="max", normalize=False, scale=16.0),
]


def random_logits(seed: int = 0, tokens: int = T) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(tokens, E)).astype(np.float32)


def random_bias() -> np.ndarray:
    return np.random.default_rng(99).normal(scale=0.3, size=E).astype(np.float32)


def derivative(f, at: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """The gradient of a scalar NumPy function, by central differences in float64."""
    at = at.astype(np.float64)
    grad = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[index] = eps
        grad[index] = (f(at + step) - f(at - step)) / (2 * eps)
    return grad


def norm_error(got, want):
    got = np.asarray(got).astype(np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


@pytest.mark.parametrize("gate_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_are_those_of_float32(dtype, gate_dtype):
    """And so are the gradients, to sixteen bits, on every platform; compiled, as XLA sees fit."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(60, 500)), dtype)
    gate = jnp.asarray(rng.normal(size=(500, E)), gate_dtype)
    grad = jnp.asarray(rng.normal(size=(60, E)), jnp.float32)

    @jax.jit
    def run(x, gate, grad):
        with jax.default_matmul_precision("float32" if dtype == "float32" else "default"):
            logits, vjp = jax.vjp(routing.router_logits, x, gate)
            return logits, *vjp(grad)

    logits, dx, dgate = run(x, gate, grad)
    exact_x, exact_gate, exact_grad = (np.asarray(a).astype(np.float64) for a in (x, gate, grad))
    assert logits.dtype == jnp.float32 and norm_error(logits, exact_x @ exact_gate) < 1e-6
    for got, like, want in (
        (dx, x, exact_grad @ exact_gate.T),
        (dgate, gate, exact_x.T @ exact_grad),
    ):
        assert got.dtype == like.dtype
        assert norm_error(got, want) < (1e-5 if like.dtype == jnp.float32 else 3e-3)


def test_logits_of_an_infinite_gate_are_infinite():
    gate = jnp.array([[jnp.inf, 1.0, -jnp.inf]])
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = routing.router_logits(jnp.full((2, 1), 2, dtype), gate)
        np.testing.assert_array_equal(logits, np.array([[np.inf, 2, -np.inf]] * 2))


def test_logits_of_bfloat16_are_bfloat16_products():
    x = jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)
    gate = jax.ShapeDtypeStruct((512, 64), jnp.float32)

    def loss(x, gate):
        return jnp.sum(jnp.sin(routing.router_logits(x, gate)))

    traced = jax.jit(jax.grad(loss, (0, 1))).trace(x, gate)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 3
    for line in products:
        operands = line.split(" : (")[1].split(" -> ")[0]
        assert operands.count("xbf16>") == 2, line


@pytest.mark.parametrize("check_vma", [True, False])
def test_logits_with_a_gate_that_all_ranks_share(check_vma):
    """Its gradient is the sum over the ranks."""
    devices = mesh((2,), ("data",))
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.normal(size=(8, 32)), jnp.bfloat16)
    gate = jnp.asarray(rng.normal(size=(32, E)), jnp.float32)
    specs = P("data"), P()
    logits = jax.shard_map(
        routing.router_logits,
        mesh=devices,
        in_specs=specs,
        out_specs=P("data"),
        check_vma=check_vma,
    )
    got, vjp = jax.vjp(jax.jit(logits), x, gate)
    want, want_vjp = jax.vjp(routing.router_logits, x, gate)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for a, b in zip(vjp(got), want_vjp(want), strict=True):
        np.testing.assert_allclose(
            a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-2, atol=1e-3
        )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_matches_the_reference(options):
    options = dict(options)
    bias = random_bias() if options.pop("biased", False) else None
    route = jax.jit(functools.partial(routing.top_k_routing, **options))
    got = route(jnp.asarray(random_logits()), bias=None if bias is None else jnp.asarray(bias))
    want = reference.top_k_routing(random_logits(), bias=bias, **options)
    assert [a.dtype for a in got] == [jnp.int32, jnp.float32, jnp.float32]
    np.testing.assert_array_equal(got.topk_idx, want.topk_idx)
    np.testing.assert_allclose(got.topk_weights, want.topk_weights, rtol=2e-6)
    np.testing.assert_allclose(got.probs, want.probs, rtol=2e-6, atol=1e-9)


def test_group_score_is_the_sum_of_the_two_best():
    # Group 0 has the single best expert, group 1 the best pair.
    logits = jnp.log(jnp.asarray([[0.5, 0.02, 0.01, 0.3, 0.29, 0.01]], jnp.float32) / 0.5)
    routed = routing.top_k_routing(logits, 2, num_groups=2, groups_kept=1)
    np.testing.assert_array_equal(routed.topk_idx, [[3, 4]])


def test_equal_scores_take_the_lower_ids():
    routed = routing.top_k_routing(jnp.zeros((2, E)), 3)
    np.testing.assert_array_equal(routed.topk_idx, [[0, 1, 2]] * 2)


def test_bias_steers_the_choice_and_nothing_else():
    logits = jnp.asarray(random_logits())
    bias = jnp.zeros(E).at[7].set(10.0)
    plain = routing.top_k_routing(logits, 2, score="sigmoid", normalize=False)
    steered = routing.top_k_routing(logits, 2, score="sigmoid", normalize=False, bias=bias)
    np.testing.assert_array_equal(steered.topk_idx[:, 0], 7)
    np.testing.assert_allclose(steered.topk_weights[:, 0], jax.nn.sigmoid(logits[:, 7]), rtol=1e-6)
    np.testing.assert_array_equal(steered.probs, plain.probs)

    def total(bias):
        return jnp.sum(
            routing.top_k_routing(logits, 2, score="sigmoid", bias=bias).topk_weights ** 2
        )

    np.testing.assert_array_equal(jax.grad(total)(bias), 0.0)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("normalize", [True, False])
def test_gradient_of_the_weights(score, normalize):
    logits = random_logits(1, tokens=4)
    mix = np.random.default_rng(2).normal(size=(4, 3))
    options = dict(k=3, score=score, normalize=normalize, scale=1.5, num_groups=4, groups_kept=2)

    def total(logits):
        return jnp.sum(routing.top_k_routing(logits, **options).topk_weights * mix)

    want = derivative(
        lambda x: np.sum(reference.top_k_routing(x, **options).topk_weights * mix), logits
    )
    np.testing.assert_allclose(jax.grad(total)(jnp.asarray(logits)), want, atol=2e-6)


def test_a_group_may_be_worth_its_best_expert():
    # Group 0 has the single best expert, group 1 the best pair.
    logits = jnp.log(jnp.asarray([[0.5, 0.02, 0.01, 0.3, 0.29, 0.01]], jnp.float32) / 0.5)
    routed = routing.top_k_routing(logits, 2, num_groups=2, groups_kept=1, group_score="max")
    np.testing.assert_array_equal(routed.topk_idx, [[0, 1]])


def test_a_bias_on_the_logits_or_on_the_scores():
    # Scores differ by 0.1, logits by 2; a bias of 1 steers the first alone.
    logits, bias = jnp.asarray([[4.0, 2.0]]), jnp.asarray([0.0, 1.0])
    for choose_by, expert in (("score", 1), ("logit", 0)):
        routed = routing.top_k_routing(logits, 1, score="sigmoid", bias=bias, choose_by=choose_by)
        assert routed.topk_idx[0, 0] == expert


def test_softmax_over_the_chosen_is_the_normalized_softmax_over_all():
    logits = jnp.asarray(random_logits() * 5)
    routed = routing.top_k_routing(logits, 3)
    chosen = jnp.take_along_axis(logits, routed.topk_idx, axis=-1)
    np.testing.assert_allclose(routed.topk_weights, jax.nn.softmax(chosen), rtol=1e-5)


def test_choices_made_elsewhere_weigh_as_those_of_the_router():
    logits = jnp.asarray(random_logits())
    options: dict = dict(score="sigmoid", normalize_epsilon=1e-6, scale=2.5)
    want = routing.top_k_routing(logits, 4, **options)
    got = routing.routing_of_choices(logits, want.topk_idx, **options)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    some = want.topk_idx.at[:, 1:].set(-1)
    weights = routing.routing_of_choices(logits, some, **options).topk_weights
    np.testing.assert_array_equal(weights[:, 1:], 0.0)
    np.testing.assert_allclose(weights[:, 0], 2.5, rtol=1e-4)


def test_sqrt_softplus_and_its_derivative_wherever_logits_are():
    def score(x):
        return routing.top_k_routing(x[None], 1, score="sqrt_softplus").probs[0]

    values = np.asarray([-150.0, -90.0, -15.1, -15.0, -1.0, 0.0, 5.0, 90.0])
    got = score(jnp.asarray(values, jnp.float32))
    grad = jax.grad(lambda x: jnp.sum(score(x)))(jnp.asarray(values, jnp.float32))
    want = np.sqrt(np.logaddexp(0, values))
    np.testing.assert_allclose(got, want, rtol=2e-6)
    np.testing.assert_allclose(grad, 0.5 / (1 + np.exp(-values)) / want, rtol=2e-6)
    hopeless = jax.value_and_grad(lambda x: jnp.sum(score(x)))(jnp.full(2, -400.0))
    assert all(np.all(np.isfinite(a)) for a in hopeless)


def test_a_hopeless_token_has_finite_weights_and_gradients():
    logits = jnp.full((2, E), -200.0)

    def total(logits):
        return jnp.sum(routing.top_k_routing(logits, 2, score="sigmoid").topk_weights)

    value, grad = jax.value_and_grad(total)(logits)
    assert np.isfinite(value) and np.all(np.isfinite(grad))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_computes_in_float32_whatever_the_logits(dtype):
    low = jnp.asarray(random_logits()).astype(dtype)
    got = routing.top_k_routing(low, 4)
    want = routing.top_k_routing(low.astype(jnp.float32), 4)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert routing.router_z_loss(low).dtype == jnp.float32
    np.testing.assert_array_equal(
        routing.router_z_loss(low), routing.router_z_loss(low.astype(jnp.float32))
    )
    assert routing.load_balance_loss(got.probs.astype(dtype), got.topk_idx).dtype == jnp.float32


def test_routing_is_a_pytree():
    routed = routing.top_k_routing(jnp.zeros((T, E)), 2)
    doubled = jax.tree.map(lambda leaf: leaf * 2, routed)
    assert isinstance(doubled, routing.Routing)
    assert len(jax.tree.leaves(routed)) == 3


@pytest.mark.parametrize("k", [1, 2, 3])
def test_choices_are_by_logits_where_scores_round_to_the_same(k):
    """sigmoid(25) and sigmoid(30) are 1 in float32; softmax scores far below the best are 0."""
    logits = jnp.asarray([[18.0, 25.0, 30.0, -1.0]])
    routed = routing.top_k_routing(logits, k, score="sigmoid")
    np.testing.assert_array_equal(routed.topk_idx, [[2, 1, 0][:k]])
    routed = routing.top_k_routing(logits, k, score="sigmoid", num_groups=2, groups_kept=2)
    np.testing.assert_array_equal(routed.topk_idx, [[2, 1, 0][:k]])
    low = jnp.asarray([[-300.0, -250.0, 0.0, -200.0]])
    np.testing.assert_array_equal(routing.top_k_routing(low, k).topk_idx, [[2, 3, 1][:k]])
    four = jnp.asarray([[18.0, 25.0, -1.0, -2.0]])
    routed = routing.top_k_routing(four, 2, score="sigmoid", num_groups=2, groups_kept=1)
    np.testing.assert_array_equal(routed.topk_idx, [[1, 0]])


def test_the_constant_of_the_normalization():
    logits = jnp.full((1, E), -12.0)
    score = 1 / (1 + np.exp(12.0))
    for epsilon in (1e-6, 0.0):
        routed = routing.top_k_routing(logits, 2, score="sigmoid", normalize_epsilon=epsilon)
        want = score / (2 * score + epsilon)
        np.testing.assert_allclose(routed.topk_weights, [[want] * 2], rtol=1e-5)
    default = routing.top_k_routing(logits, 2, score="sigmoid")
    np.testing.assert_allclose(default.topk_weights, 0.5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "uint32"])
def test_load_balance_loss_with_ids_of_any_integer_dtype(dtype):
    """Also those that cannot hold E; an id that is no expert's counts nowhere."""
    experts = 300
    rng = np.random.default_rng(9)
    probs = rng.uniform(size=(40, experts)).astype(np.float32)
    topk_idx = rng.integers(0, 100, (40, 3)).astype(dtype)
    want = reference.load_balance_loss(probs, topk_idx.astype(np.int32))
    got = routing.load_balance_loss(jnp.asarray(probs), jnp.asarray(topk_idx))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_ids_past_the_last_expert_are_choices_of_none():
    routed = routing.top_k_routing(jnp.asarray(random_logits()), 2)
    absent = jnp.arange(T)[:, None] >= 10
    none = routing.load_balance_loss(routed.probs, jnp.where(absent, -1, routed.topk_idx))
    past = routing.load_balance_loss(routed.probs, jnp.where(absent, E + 3, routed.topk_idx))
    assert past == none
    one_of_two = routed.topk_idx.at[:, 1].set(E)
    got = routing.load_balance_loss(routed.probs, one_of_two)
    want = routing.load_balance_loss(routed.probs, routed.topk_idx.at[:, 1].set(-1))
    assert got == want
    np.testing.assert_array_equal(
        routing.count_choices(one_of_two, E), np.bincount(routed.topk_idx[:, 0], minlength=E)
    )


def test_losses_of_tokens_left_out_that_hold_nan_have_finite_gradients():
    logits = jnp.asarray(random_logits()).at[3].set(jnp.nan)
    mask = jnp.arange(T) != 3

    def losses(logits):
        routed = routing.top_k_routing(logits, 2)
        topk_idx = jnp.where(mask[:, None], routed.topk_idx, -1)
        balance = routing.load_balance_loss(jax.lax.stop_gradient(routed.probs) * logits, topk_idx)
        return balance + routing.router_z_loss(logits, mask=mask)

    value, grad = jax.value_and_grad(losses)(logits)
    assert np.isfinite(value) and np.all(np.isfinite(grad[mask]))
    assert not np.any(jax.grad(lambda x: routing.router_z_loss(x, mask=mask))(logits)[3])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=lambda dtype: dtype.__name__)
def test_strict_promotion(dtype):
    """Routers, losses and the bias's step under jax_numpy_*_promotion "strict" and "raise"."""
    logits = jnp.asarray(random_logits()).astype(dtype)

    def everything(logits, bias):
        results = []
        for options in OPTIONS:
            biased = bias if options.get("biased") else None
            options = {name: value for name, value in options.items() if name != "biased"}
            routed = routing.top_k_routing(logits, bias=biased, **options)
            counts = routing.count_choices(routed.topk_idx, E)
            results += [
                routed,
                routing.load_balance_loss(routed.probs.astype(dtype), routed.topk_idx),
                routing.update_expert_bias(bias, counts, jnp.float16(0.5)),
                routing.update_expert_bias(bias, counts, 1),
            ]
        mask = jnp.arange(T) > 3
        return results, routing.router_z_loss(logits), routing.router_z_loss(logits, mask=mask)

    want = everything(logits, jnp.asarray(random_bias()))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = everything(logits, jnp.asarray(random_bias()))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_count_choices_skips_minus_one():
    topk_idx = jnp.asarray([[0, 2], [2, -1], [-1, -1]], jnp.int32)
    np.testing.assert_array_equal(routing.count_choices(topk_idx, 4), [1, 0, 2, 0])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_load_balance_loss_and_its_gradient(score):
    logits = random_logits(3, tokens=6)
    topk_idx = reference.top_k_routing(logits, 2, score=score).topk_idx

    def loss(logits):
        probs = routing.top_k_routing(logits, 2, score=score).probs
        return routing.load_balance_loss(probs, jnp.asarray(topk_idx))

    def want(logits):
        probs = reference.top_k_routing(logits, 2, score=score).probs
        return reference.load_balance_loss(probs, topk_idx)

    value, grad = jax.value_and_grad(loss)(jnp.asarray(logits))
    np.testing.assert_allclose(value, want(logits), rtol=1e-6)
    np.testing.assert_allclose(grad, derivative(want, logits), atol=1e-6)


def test_load_balance_loss_is_one_when_even_and_num_experts_when_not():
    even = jnp.arange(T * 2, dtype=jnp.int32).reshape(T, 2) % E
    np.testing.assert_allclose(
        routing.load_balance_loss(jnp.full((T, E), 1 / E), even), 1.0, rtol=1e-6
    )
    one = jax.nn.one_hot(jnp.full(T, 3), E)
    np.testing.assert_allclose(
        routing.load_balance_loss(one, jnp.full((T, 1), 3)), float(E), rtol=1e-6
    )


def test_load_balance_loss_ignores_tokens_without_choices():
    routed = routing.top_k_routing(jnp.asarray(random_logits()), 2)
    absent = jnp.arange(T)[:, None] >= 10
    loss = routing.load_balance_loss(routed.probs, jnp.where(absent, -1, routed.topk_idx))
    np.testing.assert_allclose(
        loss, routing.load_balance_loss(routed.probs[:10], routed.topk_idx[:10]), rtol=1e-6
    )
    nothing = routing.load_balance_loss(routed.probs, jnp.full((T, 2), -1))
    assert nothing == 0.0


def test_router_z_loss_and_its_gradient():
    logits = random_logits(4, tokens=6) * 3
    value, grad = jax.value_and_grad(routing.router_z_loss)(jnp.asarray(logits))
    np.testing.assert_allclose(value, reference.router_z_loss(logits), rtol=1e-6)
    np.testing.assert_allclose(grad, derivative(reference.router_z_loss, logits), atol=1e-5)
    mask = np.arange(6) < 4
    np.testing.assert_allclose(
        routing.router_z_loss(jnp.asarray(logits), mask=jnp.asarray(mask)),
        reference.router_z_loss(logits[:4]),
        rtol=1e-6,
    )
    as_integers = routing.router_z_loss(jnp.asarray(logits), mask=jnp.asarray(mask, jnp.int32))
    assert as_integers == routing.router_z_loss(jnp.asarray(logits), mask=jnp.asarray(mask))


@pytest.mark.parametrize("check_vma", quick([True, False], True))
@pytest.mark.parametrize("num_ranks", quick(RANK_COUNTS, 8))
def test_losses_over_ranks_equal_those_of_all_tokens(num_ranks, check_vma):
    # Each rank's tokens lean to other experts: the mean of the ranks' losses is another number.
    lean = np.repeat(np.eye(E)[:8] * 4, T // 8, axis=0)
    logits = jnp.asarray(random_logits(5) + lean, jnp.float32)

    def losses(logits, axis_name=None):
        routed = routing.top_k_routing(logits, 2)
        return routing.load_balance_loss(
            routed.probs, routed.topk_idx, axis_name=axis_name
        ) + 0.1 * routing.router_z_loss(logits, axis_name=axis_name)

    sharded = jax.shard_map(
        functools.partial(losses, axis_name="expert"),
        mesh=expert_mesh(num_ranks),
        in_specs=P("expert"),
        out_specs=P(),
        check_vma=check_vma,
    )
    value, grad = jax.jit(jax.value_and_grad(sharded))(logits)
    want_value, want_grad = jax.value_and_grad(losses)(logits)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    np.testing.assert_allclose(grad, want_grad, atol=1e-7)
    if num_ranks > 1:
        own = np.mean([losses(part) for part in np.split(logits, num_ranks)])
        assert abs(own - want_value) > 1e-3


@pytest.mark.parametrize("check_vma", quick([True, False], True))
def test_gradients_taken_inside_shard_map(check_vma):
    """Exact under check_vma; without it lax.psum's rule: of the sum over ranks."""
    num_ranks = 4
    logits = jnp.asarray(random_logits(6))

    def loss(logits, axis_name=None):
        routed = routing.top_k_routing(logits, 2)
        return routing.load_balance_loss(routed.probs, routed.topk_idx, axis_name=axis_name)

    grad = jax.shard_map(
        jax.grad(functools.partial(loss, axis_name="expert")),
        mesh=expert_mesh(num_ranks),
        in_specs=P("expert"),
        out_specs=P("expert"),
        check_vma=check_vma,
    )(logits)
    scale = 1 if check_vma else num_ranks
    np.testing.assert_allclose(grad, scale * jax.grad(loss)(logits), atol=1e-7)


@pytest.mark.slow
def test_losses_over_several_axes():
    logits = jnp.asarray(random_logits(7))

    def losses(logits, axis_name=None):
        routed = routing.top_k_routing(logits, 2)
        return (
            routing.load_balance_loss(routed.probs, routed.topk_idx, axis_name=axis_name),
            routing.router_z_loss(logits, axis_name=axis_name),
        )

    axes = ("data", "expert")
    got = jax.shard_map(
        functools.partial(losses, axis_name=axes),
        mesh=mesh((2, 4), axes),
        in_specs=P(axes),
        out_specs=P(),
    )(logits)
    np.testing.assert_allclose(got, losses(logits), rtol=1e-6)


def test_update_expert_bias_follows_the_sign_rule():
    bias, counts = random_bias(), np.arange(E) * 2 + 1
    got = routing.update_expert_bias(jnp.asarray(bias), jnp.asarray(counts, jnp.int32), 0.01)
    np.testing.assert_allclose(got, reference.update_expert_bias(bias, counts, 0.01), rtol=1e-6)
    np.testing.assert_allclose(got - bias, np.where(counts < counts.mean(), 0.01, -0.01), atol=1e-7)
    even = routing.update_expert_bias(jnp.asarray(bias), jnp.full(E, 5), 0.01)
    np.testing.assert_array_equal(even, bias)


def test_update_expert_bias_balances_a_skewed_router():
    logits = jnp.asarray(random_logits(8, tokens=256)) + jnp.linspace(0, 2, E)

    def step(bias, _):
        routed = routing.top_k_routing(logits, 2, score="sigmoid", bias=bias)
        counts = routing.count_choices(routed.topk_idx, E)
        return routing.update_expert_bias(bias, counts, 0.01), jnp.max(counts)

    _, largest = jax.lax.scan(step, jnp.zeros(E), length=200)
    assert largest[0] > 70 and largest[-1] < 45  # 32 would be even


LOGITS, IDX = jnp.zeros((4, 8)), jnp.zeros((4, 2), jnp.int32)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: routing.top_k_routing(LOGITS[0], 1), ValueError, r"logits must .*\(8,\)"),
        (
            lambda: routing.top_k_routing(IDX, 1),
            TypeError,
            "logits must be a floating array .*has dtype int32",
        ),
        (lambda: routing.top_k_routing(LOGITS, 0), ValueError, "k must .* 8 .* but is 0"),
        (lambda: routing.top_k_routing(LOGITS, 9), ValueError, "k must .* 8 .* but is 9"),
        (
            lambda: routing.top_k_routing(LOGITS, 3, num_groups=4, groups_kept=1),
            ValueError,
            "k must be between 1 and the 2 experts",
        ),
        (
            lambda: routing.top_k_routing(LOGITS, 1, score="relu"),  # type: ignore[arg-type]
            ValueError,
            "score must be one of .*'softmax', 'sigmoid'.* but is 'relu'",
        ),
        (
            lambda: routing.top_k_routing(LOGITS, 1, choose_by="bias"),  # type: ignore[arg-type]
            ValueError,
            "choose_by must be one of .*'score', 'logit'.* but is 'bias'",
        ),
        (
            lambda: routing.top_k_routing(LOGITS, 1, group_score=2),  # type: ignore[arg-type]
            ValueError,
            "group_score must be one of .*'top2', 'max'.* but is 2",
        ),
        (
            lambda: routing.top_k_routing(LOGITS, 1, num_groups=3),
            ValueError,
            "num_groups must divide the 8 experts .* but is 3",
        ),
        (
            lambda: routing.top_k_routing(LOGITS, 1, num_groups=2, groups_kept=3),
            ValueError,
            "groups_kept must be .* num_groups=2.* but is 3",
        ),
        (
            lambda: routing.top_k_routing(LOGITS, 1, bias=jnp.zeros(4)),
            ValueError,
            r"bias must .* \(8,\).* but has shape \(4,\)",
        ),
        (
            lambda: routing.top_k_routing(LOGITS, 1, bias=jnp.zeros(8, jnp.int32)),
            TypeError,
            "bias must be a floating array",
        ),
        (lambda: routing.load_balance_loss(LOGITS[0], IDX), ValueError, "probs must be"),
        (lambda: routing.load_balance_loss(IDX, IDX), TypeError, "probs must be a floating array"),
        (lambda: routing.load_balance_loss(LOGITS, IDX[:3]), ValueError, r"topk_idx .* \(3, 2\)"),
        (
            lambda: routing.load_balance_loss(LOGITS, LOGITS),
            TypeError,
            "topk_idx must be an integer array",
        ),
        (lambda: routing.router_z_loss(LOGITS[0]), ValueError, "logits must be"),
        (lambda: routing.router_z_loss(IDX), TypeError, "logits must be a floating array"),
        (
            lambda: routing.router_z_loss(LOGITS, mask=jnp.ones(3, bool)),
            ValueError,
            r"mask must .* but has shape \(3,\)",
        ),
        (
            lambda: routing.router_z_loss(LOGITS, mask=jnp.ones(4)),
            TypeError,
            "mask must be a bool or integer array",
        ),
        (
            lambda: routing.update_expert_bias(jnp.zeros(8), jnp.zeros(4), 0.1),
            ValueError,
            r"expert_counts must .* \(8,\).* but has shape \(4,\)",
        ),
        (
            lambda: routing.update_expert_bias(LOGITS, LOGITS, 0.1),
            ValueError,
            r"bias must .* but has shape \(4, 8\)",
        ),
        (
            lambda: routing.update_expert_bias(jnp.zeros(8, jnp.int32), jnp.zeros(8), 0.1),
            TypeError,
            "bias must be a floating array",
        ),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
