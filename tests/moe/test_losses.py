"""Tests of balance losses in each convention against NumPy, with their gradients."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.logits import E, T, derivative, random_logits
from support.meshes import RANK_COUNTS, expert_mesh, mesh
from support.selection import quick

from jax_ep import reference
from jax_ep.exchange.routes import count_experts
from jax_ep.moe import losses, routing


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "uint32"])
def test_load_balance_loss_with_ids_of_any_integer_dtype(dtype):
    """Ids may have any integer dtype, even one that cannot hold E; other ids count nowhere."""
    experts = 300
    rng = np.random.default_rng(9)
    probs = rng.uniform(size=(40, experts)).astype(np.float32)
    topk_idx = rng.integers(0, 100, (40, 3)).astype(dtype)
    want = reference.load_balance_loss(probs, topk_idx.astype(np.int32))
    got = losses.load_balance_loss(jnp.asarray(probs), jnp.asarray(topk_idx))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_ids_past_the_last_expert_are_choices_of_none():
    routed = routing.top_k_routing(jnp.asarray(random_logits()), 2)
    absent = jnp.arange(T)[:, None] >= 10
    none = losses.load_balance_loss(routed.probs, jnp.where(absent, -1, routed.topk_idx))
    past = losses.load_balance_loss(routed.probs, jnp.where(absent, E + 3, routed.topk_idx))
    assert past == none
    one_of_two = routed.topk_idx.at[:, 1].set(E)
    got = losses.load_balance_loss(routed.probs, one_of_two)
    want = losses.load_balance_loss(routed.probs, routed.topk_idx.at[:, 1].set(-1))
    assert got == want
    np.testing.assert_array_equal(
        count_experts(one_of_two, E), np.bincount(routed.topk_idx[:, 0], minlength=E)
    )


def test_losses_of_tokens_left_out_that_hold_nan_have_finite_gradients():
    logits = jnp.asarray(random_logits()).at[3].set(jnp.nan)
    mask = jnp.arange(T) != 3

    def both(logits):
        routed = routing.top_k_routing(logits, 2)
        topk_idx = jnp.where(mask[:, None], routed.topk_idx, -1)
        balance = losses.load_balance_loss(jax.lax.stop_gradient(routed.probs) * logits, topk_idx)
        return balance + losses.router_z_loss(logits, mask=mask)

    value, grad = jax.jit(jax.value_and_grad(both))(logits)
    assert np.isfinite(value) and np.all(np.isfinite(np.asarray(grad)[np.asarray(mask)]))
    z_grad = jax.jit(jax.grad(lambda x: losses.router_z_loss(x, mask=mask)))(logits)
    assert not np.any(np.asarray(z_grad)[3])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_load_balance_loss_and_its_gradient(score):
    logits = random_logits(3, tokens=6)
    topk_idx = reference.top_k_routing(logits, 2, score=score).topk_idx

    def loss(logits):
        probs = routing.top_k_routing(logits, 2, score=score).probs
        return losses.load_balance_loss(probs, jnp.asarray(topk_idx))

    def want(logits):
        probs = reference.top_k_routing(logits, 2, score=score).probs
        return reference.load_balance_loss(probs, topk_idx)

    value, grad = jax.value_and_grad(loss)(jnp.asarray(logits))
    np.testing.assert_allclose(value, want(logits), rtol=1e-6)
    np.testing.assert_allclose(grad, derivative(want, logits), atol=1e-6)


@pytest.mark.parametrize("shift", [0, -32, -40, -60, -80])
def test_the_loss_of_sigmoids_is_that_of_their_ratios(shift):
    """The load-balance loss of sigmoid scores must be right, however small the scores are.

    The loss and its gradient depend on the ratios of a token's scores. Adding `shift` to all logits
    makes the scores small.
    """
    logits = random_logits(3, tokens=8)
    topk_idx = routing.top_k_routing(jnp.asarray(logits), 2).topk_idx
    far = np.asarray(logits + np.float32(shift), np.float64)

    def loss(logits, **options):
        return losses.load_balance_loss(jax.nn.sigmoid(logits), topk_idx, **options)

    def want(logits):
        return reference.load_balance_loss(1 / (1 + np.exp(-logits)), np.asarray(topk_idx))

    for options in ({}, dict(convention="deepseek_v3", num_sequences=1)):
        value, grad = jax.value_and_grad(functools.partial(loss, **options))(
            jnp.asarray(far, jnp.float32)
        )
        np.testing.assert_allclose(value, want(far), rtol=1e-6)
        np.testing.assert_allclose(grad, derivative(want, far), rtol=1e-4, atol=1e-6)
    sums = losses.balance_sums(jax.nn.sigmoid(jnp.asarray(far, jnp.float32)), topk_idx)
    pooled = losses.pooled_load_balance_loss([sums, sums], convention="switch")
    np.testing.assert_allclose(pooled, want(far), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_the_loss_of_the_smallest_and_largest_scores(dtype):
    """The loss must be right for scores from the smallest normal number to near the largest.

    Scores of zero have no share.
    """
    with jax.enable_x64(dtype == "float64"):
        bits = jnp.finfo(dtype)
        rows = jnp.array([[1, 2, 3, 2], [3, 1, 1, 3], [1, 1, 2, 2], [2, 2, 2, 1]], dtype)
        idx = jnp.array([[2, 1], [0, 3], [3, 2], [0, 2]], jnp.int32)
        want = reference.load_balance_loss(np.asarray(rows, np.float64), np.asarray(idx))
        for factor in (4 * float(bits.tiny), 2.0 ** (bits.maxexp - 6)):
            scores = rows * jnp.asarray(factor, dtype)
            loss, grad = jax.value_and_grad(losses.load_balance_loss)(scores, idx)
            np.testing.assert_allclose(loss, want, rtol=1e-6)
            assert loss.dtype == jnp.float32 and np.all(jnp.isfinite(grad))
        for zero in (jnp.zeros_like(rows), rows.at[1].set(0)):
            loss, grad = jax.value_and_grad(losses.load_balance_loss)(zero, idx)
            assert np.isfinite(loss) and np.all(np.isfinite(grad))
        assert losses.load_balance_loss(jnp.zeros_like(rows), idx) == 0


def test_load_balance_loss_is_one_when_even_and_num_experts_when_not():
    even = jnp.arange(T * 2, dtype=jnp.int32).reshape(T, 2) % E
    np.testing.assert_allclose(
        losses.load_balance_loss(jnp.full((T, E), 1 / E), even), 1.0, rtol=1e-6
    )
    one = jax.nn.one_hot(jnp.full(T, 3), E)
    np.testing.assert_allclose(
        losses.load_balance_loss(one, jnp.full((T, 1), 3)), float(E), rtol=1e-6
    )


def test_load_balance_loss_ignores_tokens_without_choices():
    routed = routing.top_k_routing(jnp.asarray(random_logits()), 2)
    absent = jnp.arange(T)[:, None] >= 10
    loss = losses.load_balance_loss(routed.probs, jnp.where(absent, -1, routed.topk_idx))
    np.testing.assert_allclose(
        loss, losses.load_balance_loss(routed.probs[:10], routed.topk_idx[:10]), rtol=1e-6
    )
    nothing = losses.load_balance_loss(routed.probs, jnp.full((T, 2), -1))
    assert nothing == 0.0


def test_router_z_loss_and_its_gradient():
    logits = random_logits(4, tokens=6) * 3
    value, grad = jax.value_and_grad(losses.router_z_loss)(jnp.asarray(logits))
    np.testing.assert_allclose(value, reference.router_z_loss(logits), rtol=1e-6)
    np.testing.assert_allclose(grad, derivative(reference.router_z_loss, logits), atol=1e-5)
    mask = np.arange(6) < 4
    np.testing.assert_allclose(
        losses.router_z_loss(jnp.asarray(logits), mask=jnp.asarray(mask)),
        reference.router_z_loss(logits[:4]),
        rtol=1e-6,
    )
    as_integers = losses.router_z_loss(jnp.asarray(logits), mask=jnp.asarray(mask, jnp.int32))
    assert as_integers == losses.router_z_loss(jnp.asarray(logits), mask=jnp.asarray(mask))


@pytest.mark.parametrize("check_vma", quick([True, False], True))
@pytest.mark.parametrize("num_ranks", quick(RANK_COUNTS, 8))
def test_losses_over_ranks_equal_those_of_all_tokens(num_ranks, check_vma):
    # Tokens of each rank prefer other experts, so that the mean of the ranks' losses is wrong.
    lean = np.repeat(np.eye(E)[:8] * 4, T // 8, axis=0)
    logits = jnp.asarray(random_logits(5) + lean, jnp.float32)

    def both(logits, axis_name=None):
        routed = routing.top_k_routing(logits, 2)
        return losses.load_balance_loss(
            routed.probs, routed.topk_idx, axis_name=axis_name
        ) + 0.1 * losses.router_z_loss(logits, axis_name=axis_name)

    sharded = jax.shard_map(
        functools.partial(both, axis_name="expert"),
        mesh=expert_mesh(num_ranks),
        in_specs=P("expert"),
        out_specs=P(),
        check_vma=check_vma,
    )
    value, grad = jax.jit(jax.value_and_grad(sharded))(logits)
    want_value, want_grad = jax.jit(jax.value_and_grad(both))(logits)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    np.testing.assert_allclose(grad, want_grad, atol=1e-7)
    if num_ranks > 1:
        own = np.mean([jax.jit(both)(part) for part in np.split(logits, num_ranks)])
        assert abs(own - want_value) > 1e-3


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.slow
def test_gradients_taken_inside_shard_map(check_vma):
    """jax.grad within a shard_map must give the right gradients of the loss.

    Under check_vma=True they must be exact. Otherwise they are those of the sum of all ranks'
    losses, as with lax.psum.
    """
    num_ranks = 4
    logits = jnp.asarray(random_logits(6))

    def loss(logits, axis_name=None):
        routed = routing.top_k_routing(logits, 2)
        return losses.load_balance_loss(routed.probs, routed.topk_idx, axis_name=axis_name)

    grad = jax.shard_map(
        jax.grad(functools.partial(loss, axis_name="expert")),
        mesh=expert_mesh(num_ranks),
        in_specs=P("expert"),
        out_specs=P("expert"),
        check_vma=check_vma,
    )
    scale = 1 if check_vma else num_ranks
    want = scale * jax.jit(jax.grad(loss))(logits)
    np.testing.assert_allclose(jax.jit(grad)(logits), want, atol=1e-7)


@pytest.mark.slow
def test_losses_over_several_axes():
    logits = jnp.asarray(random_logits(7))

    def both(logits, axis_name=None):
        routed = routing.top_k_routing(logits, 2)
        return (
            losses.load_balance_loss(routed.probs, routed.topk_idx, axis_name=axis_name),
            losses.router_z_loss(logits, axis_name=axis_name),
        )

    axes = ("data", "expert")
    got = jax.shard_map(
        functools.partial(both, axis_name=axes),
        mesh=mesh((2, 4), axes),
        in_specs=P(axes),
        out_specs=P(),
    )
    np.testing.assert_allclose(jax.jit(got)(logits), jax.jit(both)(logits), rtol=1e-6)


def sums_in_numpy(probs, topk_idx):
    """Returns the sums over tokens from which a load-balance loss is computed, in NumPy.

    They are each expert's number of choices [E], its sum of normalized scores [E], and the number
    of tokens with a choice.
    """
    choices, sums, tokens = np.zeros(E), np.zeros(E), 0
    for row, chosen in zip(np.asarray(probs, np.float64), np.asarray(topk_idx), strict=True):
        if np.any(chosen >= 0):
            tokens += 1
            sums += row / row.sum()
            for e in chosen[chosen >= 0]:
                choices[e] += 1
    return choices, sums, tokens


def hugging_face(*layers):
    """Computes transformers' `load_balancing_loss_func` from layers' (probs, topk_idx)."""
    choices, sums, tokens = (
        sum(part) for part in zip(*map(sums_in_numpy, *zip(*layers, strict=True)), strict=True)
    )
    return E * np.sum(choices / tokens * (sums / tokens))


def sequence_wise(probs, topk_idx, lengths):
    """Computes the mean sequence-wise loss of DeepSeek-V3 (eq. 17 to 20)."""
    total, number, start = 0.0, 0, 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        choices, sums, tokens = sums_in_numpy(probs[rows], topk_idx[rows])
        if tokens:
            f = E / (topk_idx.shape[1] * tokens) * choices
            total, number = total + np.sum(f * sums / tokens), number + 1
    return total / number


def test_the_convention_of_transformers_pools_layers():
    layers = [routing.top_k_routing(jnp.asarray(random_logits(seed)), 2)[::2] for seed in (1, 2)]
    layers[1] = layers[1][0].at[5:].set(-1), layers[1][1]
    pairs = [(probs, idx) for idx, probs in layers]
    each = [losses.balance_sums(*pair) for pair in pairs]
    for pooled in (each, iter(each), jax.tree.map(lambda *a: jnp.stack(a), *each)):
        got = losses.pooled_load_balance_loss(pooled)
        np.testing.assert_allclose(got, hugging_face(*pairs), rtol=1e-6)
    got = losses.load_balance_loss(*pairs[0], convention="transformers")
    np.testing.assert_allclose(got, hugging_face(pairs[0]), rtol=1e-6)
    np.testing.assert_allclose(got, 2 * losses.load_balance_loss(*pairs[0]), rtol=1e-6)


@pytest.mark.parametrize("num_ranks", quick([1, 4], 4))
def test_the_sequence_wise_loss_and_its_gradient(num_ranks):
    """The loss must be right for whole sequences on each rank, and for sequences given by ids.

    Ids allow sequences to be cut anywhere; one sequence is empty.
    """
    logits = random_logits(3)
    idx = np.array(routing.top_k_routing(jnp.asarray(logits), 2, score="sigmoid").topk_idx)
    idx[3:6], idx[7] = -1, -1
    cut = [5, 10, 0, 9]
    ids = jnp.asarray(np.repeat(np.arange(4), cut))

    def loss(logits, idx, ids, by_ids):
        probs = jax.nn.sigmoid(logits)
        given = (
            dict(num_sequences=4, sequence_ids=ids)
            if by_ids
            else dict(num_sequences=8 // num_ranks)
        )
        return losses.load_balance_loss(
            probs, idx, convention="deepseek_v3", axis_name="expert", **given
        )

    for by_ids, lengths in ((False, [3] * 8), (True, cut)):
        sharded = jax.shard_map(
            functools.partial(loss, by_ids=by_ids),
            mesh=expert_mesh(num_ranks),
            in_specs=P("expert"),
            out_specs=P(),
        )
        value, grad = jax.jit(jax.value_and_grad(sharded))(
            jnp.asarray(logits), jnp.asarray(idx), ids
        )

        def want(logits, lengths=lengths):
            return sequence_wise(1 / (1 + np.exp(-logits)), idx, lengths)

        np.testing.assert_allclose(value, want(np.asarray(logits, np.float64)), rtol=1e-6)
        np.testing.assert_allclose(grad, derivative(want, logits), atol=1e-6)


PROBS, IDX = jnp.full((4, 8), 0.1), jnp.zeros((4, 2), jnp.int32)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (dict(convention="mixtral"), ValueError, "convention must be one of .* but is 'mixtral'"),
        (dict(convention="deepseek_v3"), ValueError, "num_sequences must be a number for conv"),
        (dict(num_sequences=2), ValueError, "num_sequences must be None for convention 'switch'"),
        (
            dict(sequence_ids=jnp.zeros(4, int)),
            ValueError,
            "sequence_ids must be None for convention 'switch'",
        ),
        (
            dict(convention="deepseek_v3", num_sequences=3),
            ValueError,
            r"num_sequences must divide the 4 tokens of probs \(4, 8\), but is 3",
        ),
        (
            dict(convention="deepseek_v3", num_sequences=3, sequence_ids=jnp.zeros(3, int)),
            ValueError,
            r"sequence_ids must have the 4 tokens .* \(3,\)",
        ),
        (
            dict(convention="deepseek_v3", num_sequences=3, sequence_ids=jnp.zeros(4)),
            TypeError,
            "sequence_ids must be an integer array",
        ),
    ],
)  # fmt: skip
def test_errors_of_conventions(call, error, message):
    with pytest.raises(error, match=message):
        losses.load_balance_loss(PROBS, IDX, **call)


def test_factors_of_any_dtype_leave_the_loss_float32():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        for dtype in (jnp.bfloat16, jnp.float64):
            loss = losses.load_balance_loss(
                PROBS, IDX, convention="deepseek_v3", num_sequences=2,
                expert_factors=jnp.ones(8, dtype),
            )  # fmt: skip
            assert loss.dtype == jnp.float32


def test_what_cannot_be_pooled_is_named():
    sums = losses.balance_sums(PROBS, IDX)
    with pytest.raises(ValueError, match="convention must be one of .* but is 'deepseek_v3'"):
        losses.pooled_load_balance_loss(sums, convention="deepseek_v3")  # type: ignore[arg-type]
    for nothing in ([], None):
        with pytest.raises(TypeError, match="sums must be a BalanceSums or an iterable of them"):
            losses.pooled_load_balance_loss(nothing)  # type: ignore[arg-type]
    fewer = losses.balance_sums(PROBS[:, :4], IDX)
    with pytest.raises(ValueError, match=r"sums must all have the same number .* \[4, 8\]"):
        losses.pooled_load_balance_loss([sums, fewer])
