"""Tests of routers and balance losses against NumPy, and gradients by finite differences."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.logits import E, derivative, random_bias, random_logits
from support.meshes import mesh
from support.selection import quick

from jax_ep import reference
from jax_ep.moe import losses, routing
from jax_ep.moe.routing import RoutingOptions

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


def norm_error(got, want):
    got = np.asarray(got).astype(np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


# Few tokens have an implementation of their own.
@pytest.mark.parametrize("num_tokens", [16, 60])
@pytest.mark.parametrize("gate_dtype", quick(["float32", "bfloat16"], "float32"))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_are_those_of_float32(dtype, gate_dtype, num_tokens):
    """The router's logits must be as exact as float32, whatever the dtypes of tokens and gate."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(num_tokens, 500)), dtype)
    gate = jnp.asarray(rng.normal(size=(500, E)), gate_dtype)
    grad = jnp.asarray(rng.normal(size=(num_tokens, E)), jnp.float32)

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


def test_logits_in_a_narrow_dtype():
    """bfloat16 logits must be rounded once, after the bias; gradients pass through the rounding."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(60, 50)), jnp.float32)
    gate = jnp.asarray(rng.normal(size=(50, E)), jnp.float32)
    bias, grad = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((E,), (60, E)))
    low = functools.partial(routing.router_logits, dtype=jnp.bfloat16)
    got, vjp = jax.vjp(jax.jit(low), x, gate, bias)
    x_low, gate_low, bias_low = (
        np.asarray(a.astype(jnp.bfloat16)).astype(np.float64) for a in (x, gate, bias)
    )
    exact = x_low @ gate_low + bias_low
    assert got.dtype == jnp.float32 and np.array_equal(got, got.astype(jnp.bfloat16))
    assert 1e-4 < norm_error(got, exact) < 2**-8
    wanted = grad @ gate_low.T, x_low.T @ grad, np.asarray(grad).sum(axis=0)
    for a, want in zip(vjp(grad), wanted, strict=True):
        assert a.dtype == jnp.float32 and norm_error(a, want) < 5e-3


def test_logits_of_an_infinite_gate_are_infinite():
    gate = jnp.array([[jnp.inf, 1.0, -jnp.inf]])
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = routing.router_logits(jnp.full((2, 1), 2, dtype), gate)
        np.testing.assert_array_equal(logits, np.array([[np.inf, 2, -np.inf]] * 2))


@pytest.mark.parametrize("check_vma", quick([True, False], True))
def test_logits_with_a_gate_that_all_ranks_share(check_vma):
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.normal(size=(8, 32)), jnp.bfloat16)
    gate = jnp.asarray(rng.normal(size=(32, E)), jnp.float32)
    options: dict = dict(in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check_vma)
    logits = jax.shard_map(routing.router_logits, mesh=mesh((2,), ("data",)), **options)
    got, vjp = jax.vjp(jax.jit(logits), x, gate)
    want, want_vjp = jax.vjp(jax.jit(routing.router_logits), x, gate)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    for a, b in zip(vjp(got), want_vjp(want), strict=True):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("options", quick(OPTIONS, *OPTIONS[6:12:2], unpack=False), ids=str)
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


@pytest.mark.parametrize("group_score, chosen", [
    ("max", [0, 1]), (1, [0, 1]), ("top2", [3, 4]), (2, [3, 4]), (3, [6, 7]), (9, [6, 7]),
])  # fmt: skip
def test_group_score_is_the_sum_of_the_best(group_score, chosen):
    # Group 0 has the best expert, group 1 the best pair, and group 2 the best three experts.
    probs = [[0.30, 0.01, 0.01, 0.17, 0.17, 0.01, 0.12, 0.12, 0.12]]
    options = dict(num_groups=3, groups_kept=1, group_score=group_score)
    routed = routing.top_k_routing(jnp.log(jnp.asarray(probs, jnp.float32)), 2, **options)
    np.testing.assert_array_equal(routed.topk_idx, [chosen])
    want = reference.top_k_routing(np.log(probs), 2, **options)
    np.testing.assert_array_equal(routed.topk_idx, want.topk_idx)


def test_choices_made_elsewhere_weigh_as_those_of_the_router():
    logits = jnp.asarray(random_logits())
    options: dict = dict(score="sigmoid", normalize_epsilon=1e-6, scale=2.5)
    want = routing.top_k_routing(logits, 4, **options)
    got = routing.routing_of_choices(logits, want.topk_idx, RoutingOptions(**options))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    some = want.topk_idx.at[:, 1:].set(-1)
    weights = routing.routing_of_choices(logits, some, RoutingOptions(**options)).topk_weights
    np.testing.assert_array_equal(weights[:, 1:], 0.0)
    np.testing.assert_allclose(weights[:, 0], 2.5, rtol=1e-4)


def test_sqrt_softplus_and_its_derivative_wherever_logits_are():
    def score(x):
        return routing.top_k_routing(x[None], 1, score="sqrt_softplus").probs[0]

    values = np.asarray([-150.0, -90.0, -15.1, -15.0, -1.0, 0.0, 5.0, 90.0, 800.0])
    got, vjp = jax.vjp(jax.jit(score), jnp.asarray(values, jnp.float32))
    (grad,) = vjp(jnp.ones_like(got))
    want = np.sqrt(np.logaddexp(0, values))
    np.testing.assert_allclose(got, want, rtol=2e-6)
    np.testing.assert_allclose(grad, 0.5 / (1 + np.exp(-values)) / want, rtol=2e-6)
    hopeless = jax.jit(jax.value_and_grad(lambda x: jnp.sum(score(x))))(jnp.full(2, -400.0))
    assert all(np.all(np.isfinite(a)) for a in hopeless)


def test_computes_in_float32_whatever_the_logits():
    low = jnp.asarray(random_logits()).astype(jnp.bfloat16)
    got, want = (routing.top_k_routing(each, 4) for each in (low, low.astype(jnp.float32)))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    loss = losses.router_z_loss(low)
    assert loss.dtype == jnp.float32 and loss == losses.router_z_loss(low.astype(jnp.float32))
    assert losses.load_balance_loss(got.probs.astype(low.dtype), got.topk_idx).dtype == jnp.float32


@pytest.mark.parametrize("k", quick([1, 2, 3], 2))
def test_choices_are_by_logits_where_scores_round_to_the_same(k):
    """sigmoid(25) and sigmoid(30) are 1, and softmax scores far below the best are 0."""
    logits = jnp.asarray([[18.0, 25.0, 30.0, -1.0]])
    routed = routing.top_k_routing(logits, k, score="sigmoid")
    np.testing.assert_array_equal(routed.topk_idx, [[2, 1, 0][:k]])
    routed = routing.top_k_routing(logits, k, score="sigmoid", num_groups=2, groups_kept=2)
    np.testing.assert_array_equal(routed.topk_idx, [[2, 1, 0][:k]])
    low = jnp.asarray([[-300.0, -250.0, 0.0, -200.0]])
    np.testing.assert_array_equal(routing.top_k_routing(low, k).topk_idx, [[2, 3, 1][:k]])


SHIFTS = [0.0, -40.0, -88.0, -1000.0]


@pytest.mark.parametrize("score", quick(["softmax", "sigmoid", "sqrt_softplus"], "sigmoid"))
@pytest.mark.parametrize("shift", quick(SHIFTS, SHIFTS[1]))
@pytest.mark.parametrize("biased", quick([False, True], False))
def test_weights_are_ratios_of_scores_of_any_size(score, shift, biased):
    """Adding `shift` to logits makes scores tiny; ratios and gradients must stay right."""
    logits = np.round(random_logits(1, tokens=4) * 4, 3)
    if score == "softmax":
        # Expert 0 is far above the others, but a bias keeps it from being chosen.
        logits[:, 0] -= shift
        biased = True
    else:
        logits += np.float32(shift)
    bias = np.zeros(E, np.float32) if biased else None
    if score == "softmax":
        bias[0] = -3.0
    mix = np.random.default_rng(2).normal(size=(4, 3))

    def weights(logits, router, **options):
        return router(logits, 3, score=score, scale=1.5, bias=bias, **options).topk_weights

    got, vjp = jax.vjp(jax.jit(lambda x: weights(x, routing.top_k_routing)), jnp.asarray(logits))
    want = weights(logits, reference.top_k_routing)
    np.testing.assert_allclose(got, want, rtol=3e-6)
    slope = derivative(lambda x: np.sum(weights(x, reference.top_k_routing) * mix), logits)
    np.testing.assert_allclose(vjp(jnp.asarray(mix, jnp.float32))[0], slope, atol=3e-6)
    idx = reference.top_k_routing(logits, 3, score=score, bias=bias).topk_idx
    given = routing.routing_of_choices(
        jnp.asarray(logits), jnp.asarray(idx), RoutingOptions(score=score)
    )
    np.testing.assert_allclose(given.topk_weights * 1.5, want, rtol=3e-6)


@pytest.mark.parametrize("score", quick(["softmax", "sigmoid", "sqrt_softplus"], "sigmoid"))
@pytest.mark.parametrize("epsilon", quick([1e-6, 1e-12, 1e-20], 1e-12))
def test_the_constant_of_the_normalization_where_scores_are_below_it(score, epsilon):
    """Weights must be score / (sum of the chosen scores + epsilon), even if the sum is far less."""
    bias = jnp.where(jnp.arange(E) < 3, 100.0, 0.0)
    for shift in SHIFTS:
        logits = np.array(random_logits(1, tokens=4))
        logits[:, :3] += np.float32(shift)
        if score != "softmax":
            logits += np.float32(shift)
        options = dict(score=score, normalize_epsilon=epsilon)
        got, vjp = jax.vjp(
            jax.jit(functools.partial(routing.top_k_routing, k=3, bias=bias, **options)),
            jnp.asarray(logits),
        )
        want = reference.top_k_routing(logits, 3, bias=np.asarray(bias), **options)
        np.testing.assert_allclose(got.topk_weights, want.topk_weights, rtol=1e-4, atol=1e-37)
        ones = jax.tree.map(
            lambda a: np.ones(a.shape, jax.dtypes.float0 if a.dtype == jnp.int32 else a.dtype), got
        )
        assert np.all(np.isfinite(vjp(ones)[0]))


def test_the_weights_of_experts_that_cannot_be_chosen_are_zero():
    logits = jnp.array([[-jnp.inf, -3.0, -jnp.inf, -jnp.inf], [-jnp.inf] * 4])
    for score in ("sigmoid", "sqrt_softplus"):
        weights, vjp = jax.vjp(
            jax.jit(lambda x, score=score: routing.top_k_routing(x, 2, score=score).topk_weights),
            logits,
        )
        np.testing.assert_array_equal(weights, [[1, 0], [0, 0]])
        assert np.all(np.isfinite(vjp(jnp.ones_like(weights))[0]))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("score", ["sigmoid", "sqrt_softplus"])
def test_equal_sums_take_the_lower_ids(score, biased):
    """Of experts or groups whose sums are equal in float32, the first must be chosen."""
    logits = jnp.asarray([[20.0, 25.0, 30.0, 22.0]]) * (1 if score == "sigmoid" else -20)
    options: dict = dict(bias=jnp.zeros(4)) if biased else dict(num_groups=2, groups_kept=1)
    routed = routing.top_k_routing(logits, 2, score=score, **options)
    np.testing.assert_array_equal(routed.topk_idx, [[0, 1]])


@pytest.mark.usefixtures("strict_promotion")
def test_update_expert_bias_follows_the_sign_rule():
    counts = np.stack([np.arange(E) ** 2, np.random.default_rng(0).integers(0, 9000, E)])
    bias = np.stack([random_bias(), random_bias() + 1])
    for b, c in ((bias[0], counts[0]), (bias, counts)):
        got = routing.update_expert_bias(jnp.asarray(b), jnp.asarray(c, jnp.int32), 0.01)
        np.testing.assert_allclose(got, reference.update_expert_bias(b, c, 0.01), rtol=1e-6)
        rate = jnp.float16(0.01)
        rounded = routing.update_expert_bias(jnp.asarray(b), c, rate)
        np.testing.assert_allclose(rounded, got, rtol=1e-4)
        centered = routing.update_expert_bias(jnp.asarray(b), c, 0.01, zero_mean=True)
        drift = np.mean(got - b, axis=-1, keepdims=True)
        np.testing.assert_allclose(centered, got - drift, atol=1e-7)


@pytest.mark.parametrize(("num_experts", "count"), [(7, 2000001), (160, 12345677)])
def test_update_expert_bias_leaves_an_equal_load_alone(num_experts, count):
    got = routing.update_expert_bias(jnp.zeros(num_experts), jnp.full(num_experts, count), 0.001)
    np.testing.assert_array_equal(got, np.zeros(num_experts))


def test_a_token_of_no_choice_has_no_weight_whatever_the_epsilon():
    def weights(logits):
        topk_idx = jnp.array([[-1, -1], [0, 1]])
        return routing.routing_of_choices(logits, topk_idx, RoutingOptions()).topk_weights

    logits = jnp.zeros((2, 4))
    np.testing.assert_array_equal(jax.jit(weights)(logits), [[0, 0], [0.5, 0.5]])
    gradient = jax.jit(jax.grad(lambda logits: weights(logits)[1, 0]))(logits)
    np.testing.assert_array_equal(gradient[0], np.zeros(4))
    assert np.all(np.isfinite(gradient))


LOGITS, IDX, BIAS = np.zeros((4, 8), np.float32), np.zeros((4, 2), np.int32), np.zeros(8)
ONE_GROUP: dict = dict(k=3, num_groups=4, groups_kept=1)


@pytest.mark.parametrize(
    "logits, options, error, message",
    [
        (LOGITS[0], {}, ValueError, r"logits must .*\(8,\)"),
        (IDX, {}, TypeError, "logits must be a floating array .*has dtype int32"),
        (LOGITS, dict(k=0), ValueError, "k must be at least 1, but is 0"),
        (LOGITS, dict(k=9), ValueError, "k must .* 8 .* but is 9"),
        (LOGITS, ONE_GROUP, ValueError, "k must be at most the 2 experts"),
        (LOGITS, dict(score="relu"), ValueError, "score must .*'softmax', 'sigmoid'.* 'relu'"),
        (LOGITS, dict(choose_by="bias"), ValueError, "choose_by must .*'score', 'logit'.* 'bias'"),
        (LOGITS, dict(group_score=0), ValueError, "group_score must be .* but is 0"),
        (LOGITS, dict(num_groups=3), ValueError, "num_groups must divide the 8 experts .* is 3"),
        (LOGITS, dict(num_groups=None), TypeError, "num_groups must be a static integer"),
        (LOGITS, dict(num_groups=2, groups_kept=3), ValueError, "groups_kept .*num_groups=2.* 3"),
        (LOGITS, dict(bias=BIAS[:4]), ValueError, r"bias must .* \(8,\).* but has shape \(4,\)"),
        (LOGITS, dict(bias=BIAS.astype(int)), TypeError, "bias must be a floating array"),
        (LOGITS, dict(scale=np.nan), ValueError, "scale must .* nan"),
        (LOGITS, dict(normalize="no"), TypeError, "normalize must be True or False, but is 'no'"),
    ],
)
def test_errors_of_routers_name_the_argument(logits, options, error, message):
    with pytest.raises(error, match=message):
        routing.top_k_routing(logits, **dict(k=1) | options)


@pytest.mark.parametrize(
    "bias, counts, rate, error, message",
    [
        (BIAS, BIAS[:4], 0.1, ValueError, r"expert_counts must .* \(8,\).* has shape \(4,\)"),
        (BIAS, BIAS, np.ones((4, 1)), ValueError, r"rate must be .* \(8,\), but has .*\(4, 1\)"),
        (BIAS, BIAS, "a", TypeError, "rate must be .* or a number, but is 'a'"),
        (BIAS, BIAS, np.ones(8, bool), TypeError, "rate must be .* a number, but has dtype bool"),
        (LOGITS, LOGITS[0], 0.1, ValueError, r"expert_counts must .* \(4, 8\).* shape \(8,\)"),
        (np.zeros([]), np.zeros([]), 0.1, ValueError, r"bias must .* but has shape \(\)"),
        (BIAS, BIAS * 1j, 0.1, TypeError, "expert_counts must hold real numbers"),
        (BIAS.astype(int), BIAS, 0.1, TypeError, "bias must be a floating array"),
    ],
)
def test_errors_of_bias_updates_name_the_argument(bias, counts, rate, error, message):
    with pytest.raises(error, match=message):
        routing.update_expert_bias(bias, counts, rate)
