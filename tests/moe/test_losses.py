"""Tests of balance losses in each convention against NumPy, with their gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.logits import E, T, derivative, random_logits
from support.meshes import expert_mesh, mesh
from support.selection import quick

from jax_ep import reference
from jax_ep.exchange.routes import count_experts
from jax_ep.moe import losses, routing


@pytest.mark.parametrize("dtype", quick(["uint8", "int8", "uint32"], "uint8"))
def test_load_balance_loss_with_ids_of_any_integer_dtype(dtype):
    """Ids may have any integer dtype, even one that cannot hold E; other ids count nowhere."""
    experts = 300
    rng = np.random.default_rng(9)
    probs = rng.uniform(size=(40, experts)).astype(np.float32)
    topk_idx = rng.integers(0, 100, (40, 3)).astype(dtype)
    want = reference.load_balance_loss(probs, topk_idx.astype(np.int32))
    got = losses.load_balance_loss(jnp.asarray(probs), jnp.asarray(topk_idx))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("none", quick([-1, E + 3], E + 3))
def test_ids_of_no_expert_are_choices_of_none(none):
    routed = routing.top_k_routing(jnp.asarray(random_logits()), 2)
    absent = jnp.arange(T)[:, None] >= 10
    got = losses.load_balance_loss(routed.probs, jnp.where(absent, none, routed.topk_idx))
    want = losses.load_balance_loss(routed.probs[:10], routed.topk_idx[:10])
    np.testing.assert_allclose(got, want, rtol=1e-6)
    one_of_two = routed.topk_idx.at[:, 1].set(none)
    want = losses.load_balance_loss(routed.probs, routed.topk_idx.at[:, 1].set(-1))
    assert losses.load_balance_loss(routed.probs, one_of_two) == want
    counts = np.bincount(routed.topk_idx[:, 0], minlength=E)
    np.testing.assert_array_equal(count_experts(one_of_two, E), counts)
    assert losses.load_balance_loss(routed.probs, jnp.full((T, 2), none)) == 0.0


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


def test_load_balance_loss_and_its_gradient():
    logits = random_logits(3, tokens=6)
    topk_idx = reference.top_k_routing(logits, 2).topk_idx

    def loss(logits):
        return losses.load_balance_loss(jax.nn.softmax(logits), jnp.asarray(topk_idx))

    def want(logits):
        return reference.load_balance_loss(reference.top_k_routing(logits, 2).probs, topk_idx)

    value, grad = jax.jit(jax.value_and_grad(loss))(jnp.asarray(logits))
    np.testing.assert_allclose(value, want(logits), rtol=1e-6)
    np.testing.assert_allclose(grad, derivative(want, logits), atol=1e-6)


@pytest.mark.parametrize(
    "dtype", quick(["float32", "bfloat16", "float16", "float64"], "float32", "float16")
)
def test_the_loss_of_the_smallest_and_largest_scores(dtype):
    """The loss must be right for scores from the smallest normal number to near the largest."""
    loss_and_gradient = jax.jit(jax.value_and_grad(losses.load_balance_loss))
    with jax.enable_x64(dtype == "float64"):
        bits = jnp.finfo(dtype)
        rows = jnp.array([[1, 2, 3, 2], [3, 1, 1, 3], [1, 1, 2, 2], [2, 2, 2, 1]], dtype)
        idx = jnp.array([[2, 1], [0, 3], [3, 2], [0, 2]], jnp.int32)
        want = reference.load_balance_loss(np.asarray(rows, np.float64), np.asarray(idx))
        for factor in (4 * float(bits.tiny), 2.0 ** (bits.maxexp - 6)):
            scores = rows * jnp.asarray(factor, dtype)
            loss, grad = loss_and_gradient(scores, idx)
            np.testing.assert_allclose(loss, want, rtol=1e-6)
            assert loss.dtype == jnp.float32 and np.all(jnp.isfinite(grad))
        for zero in (jnp.zeros_like(rows), rows.at[1].set(0)):
            loss, grad = loss_and_gradient(zero, idx)
            assert np.isfinite(loss) and np.all(np.isfinite(grad))
            assert zero.any() or loss == 0


def test_router_z_loss_and_its_gradient():
    logits = random_logits(4, tokens=6) * 3
    value, grad = jax.jit(jax.value_and_grad(losses.router_z_loss))(jnp.asarray(logits))
    np.testing.assert_allclose(value, reference.router_z_loss(logits), rtol=1e-6)
    np.testing.assert_allclose(grad, derivative(reference.router_z_loss, logits), atol=1e-5)
    for mask in (np.arange(6) < 4, np.array([1, 1, 1, 1, 0, 0], np.int32)):
        got = jax.jit(losses.router_z_loss)(jnp.asarray(logits), mask=jnp.asarray(mask))
        np.testing.assert_allclose(got, reference.router_z_loss(logits[:4]), rtol=1e-6)


@pytest.mark.parametrize("check_vma", quick([True, False], True))
@pytest.mark.parametrize("shape", quick([(1,), (8,), (2, 4)], (2, 4), unpack=False))
def test_losses_over_ranks_equal_those_of_all_tokens(shape, check_vma):
    # Tokens of each rank prefer other experts, so that the mean of the ranks' losses is wrong.
    lean = np.repeat(np.eye(E)[:8] * 4, T // 8, axis=0)
    logits = jnp.asarray(random_logits(5) + lean, jnp.float32)

    def both(logits, axis_name=None):
        routed = routing.top_k_routing(logits, 2)
        return losses.load_balance_loss(
            routed.probs, routed.topk_idx, axis_name=axis_name
        ) + 0.1 * losses.router_z_loss(logits, axis_name=axis_name)

    axes = ("expert", "data")[: len(shape)]
    on_ranks = functools.partial(
        jax.shard_map, mesh=mesh(shape, axes), in_specs=P(axes), check_vma=check_vma
    )
    of_all = functools.partial(both, axis_name=axes)
    sharded, inside = on_ranks(of_all, out_specs=P()), on_ranks(jax.grad(of_all), out_specs=P(axes))
    value, grad = jax.jit(jax.value_and_grad(sharded))(logits)
    want_value, want_grad = jax.jit(jax.value_and_grad(both))(logits)
    np.testing.assert_allclose(value, want_value, rtol=1e-6)
    np.testing.assert_allclose(grad, want_grad, atol=1e-7)
    # Under check_vma=False the gradients are those of the sum of all ranks' losses.
    num_losses = 1 if check_vma else np.prod(shape)
    np.testing.assert_allclose(jax.jit(inside)(logits) / num_losses, want_grad, atol=1e-7)
    if shape != (1,):
        own = np.mean([jax.jit(both)(part) for part in np.split(logits, np.prod(shape))])
        assert abs(own - want_value) > 1e-3


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


def test_sequences_of_several_layers_are_pooled():
    """Sums of parts of the same sequences must add up to those of the whole ones."""
    convention: Any = "deepseek_v3"
    logits = [jnp.asarray(random_logits(seed)) for seed in (1, 2)]
    layers = [routing.top_k_routing(each, 2) for each in logits]
    ids = jnp.arange(len(logits[0])) % 3
    wanted, sums = [], []
    for routed in layers:
        options: Any = dict(num_sequences=4, sequence_ids=ids)  # the last sequence is empty
        loss = losses.load_balance_loss(
            routed.probs, routed.topk_idx, convention=convention, **options
        )
        wanted.append(loss)
        halves = []
        for part in (slice(None, 5), slice(5, None)):
            options["sequence_ids"] = ids[part]
            halves.append(losses.balance_sums(routed.probs[part], routed.topk_idx[part], **options))
        sums.append(jax.tree.map(jnp.add, *halves))
    for pooled in (sums, jax.tree.map(lambda *a: jnp.stack(a), *sums)):
        got = losses.pooled_load_balance_loss(pooled, convention=convention)
        np.testing.assert_allclose(got, np.mean(wanted), rtol=1e-6)


def test_the_loss_of_all_microbatches_from_counts_of_a_first_pass():
    """The recipe of docs/training.md must give the value and gradient of the pooled loss."""
    logits = jnp.stack([jnp.asarray(random_logits(seed)) for seed in range(3)])

    def sums(logits):
        routed = routing.top_k_routing(logits, 2)
        return losses.in_float32(losses.balance_sums(routed.probs, routed.topk_idx))

    def pooled(logits):
        return losses.pooled_load_balance_loss(jax.vmap(sums)(logits), convention="switch")

    def of_microbatch(logits, total):
        own = total._replace(probs=sums(logits).probs)
        return losses.pooled_load_balance_loss(own, convention="switch")

    total = jax.tree.map(lambda x: x.sum(axis=0), jax.jit(jax.vmap(sums))(logits))
    step = jax.jit(jax.value_and_grad(of_microbatch))
    each = [step(one, total) for one in logits]
    want = jax.jit(jax.value_and_grad(pooled))(logits)
    np.testing.assert_allclose(sum(loss for loss, _ in each), want[0], rtol=1e-6)
    np.testing.assert_allclose(jnp.stack([grad for _, grad in each]), want[1], atol=1e-8)


@pytest.mark.parametrize("num_ranks", quick([1, 4], 4))
def test_the_sequence_wise_loss_and_its_gradient(num_ranks):
    """Sequences may be whole on each rank, or be given by ids that cut them anywhere."""
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


PROBS, IDX = np.full((4, 8), 0.1, np.float32), np.zeros((4, 2), np.int32)
DEEPSEEK: dict = dict(convention="deepseek_v3", num_sequences=3)


@pytest.mark.parametrize(
    "probs, topk_idx, options, error, message",
    [
        (PROBS[0], IDX, {}, ValueError, "probs must be"),
        (IDX, IDX, {}, TypeError, "probs must be a floating array"),
        (PROBS, IDX[:3], {}, ValueError, r"topk_idx .* \(3, 2\)"),
        (PROBS, PROBS, {}, TypeError, "topk_idx must be an integer array"),
        (PROBS, IDX, dict(axis_name="data"), ValueError, r"axis_name \('data',\) is not bound"),
        (PROBS, IDX, dict(convention="mixtral"), ValueError, "convention must .* is 'mixtral'"),
        (PROBS, IDX, DEEPSEEK | dict(num_sequences=None), ValueError, "num_sequences must be a nu"),
        (PROBS, IDX, dict(num_sequences=2), ValueError, "num_sequences must be None for .*switch'"),
        (PROBS, IDX, dict(sequence_ids=IDX[:, 0]), ValueError, "sequence_ids must be None for"),
        (PROBS, IDX, DEEPSEEK, ValueError, r"num_sequences must divide the 4 .*\(4, 8\), but is 3"),
        (PROBS, IDX, DEEPSEEK | dict(sequence_ids=IDX[:3, 0]), ValueError, r"sequence_ids .*\(3,"),
        (PROBS, IDX, DEEPSEEK | dict(sequence_ids=PROBS[:, 0]), TypeError, "sequence_ids must be"),
    ],
)
def test_errors_of_load_balance_losses(probs, topk_idx, options, error, message):
    with pytest.raises(error, match=message):
        losses.load_balance_loss(probs, topk_idx, **options)


@pytest.mark.parametrize(
    "logits, options, error, message",
    [
        (PROBS[0], {}, ValueError, "logits must be"),
        (IDX, {}, TypeError, "logits must be a floating array"),
        (PROBS, dict(axis_name="data"), ValueError, r"axis_name \('data',\) is not bound here"),
        (PROBS, dict(mask=np.ones(3, bool)), ValueError, r"mask must .* but has shape \(3,\)"),
        (PROBS, dict(mask=np.ones(4)), TypeError, "mask must be a bool or integer array"),
    ],
)
def test_errors_of_the_z_loss(logits, options, error, message):
    with pytest.raises(error, match=message):
        losses.router_z_loss(logits, **options)


def test_factors_of_any_dtype_leave_the_loss_float32():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        for dtype in (jnp.bfloat16, jnp.float64):
            loss = losses.load_balance_loss(
                PROBS, IDX, convention="deepseek_v3", num_sequences=2,
                expert_factors=jnp.ones(8, dtype),
            )  # fmt: skip
            assert loss.dtype == jnp.float32


@pytest.mark.parametrize("form", ["list", "stacked", "added"])
@pytest.mark.parametrize("layers, log_tokens", quick([(64, 22), (60, 26), (1, 29)], (60, 26)))
@pytest.mark.parametrize("convention, even", [("switch", 1), ("transformers", 8)])
def test_sums_of_counts_do_not_overflow(convention, even, layers, log_tokens, form):
    """64 layers of 2^22 tokens with 8 choices each have 2^31 choices."""
    experts, tokens = 128, 2**log_tokens
    each = losses.BalanceSums(
        jnp.full(experts, 8 * tokens // experts, jnp.int32),
        jnp.full(experts, tokens / experts, jnp.float32),
        jnp.int32(tokens),
    )

    def loss(probs):
        sums: Any = [each._replace(probs=probs)] * layers
        if form == "stacked":
            sums = jax.tree.map(lambda *a: jnp.stack(a), *sums)
        elif form == "added":
            sums = jax.tree.map(lambda *a: sum(a), *map(losses.in_float32, sums))
        return losses.pooled_load_balance_loss(sums, convention=convention)

    value, grad = jax.jit(jax.value_and_grad(loss))(each.probs)
    np.testing.assert_allclose(value, even, rtol=1e-5)
    np.testing.assert_allclose(grad, np.full(experts, even / tokens), rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        dict(convention="switch"),
        dict(convention="deepseek_v3", num_sequences=2),
        dict(convention="deepseek_v3", num_sequences=2, sequence_ids=np.zeros(0, int)),
    ],
    ids=str,
)
def test_losses_of_no_tokens_are_zero(options):
    def both(x):
        return losses.load_balance_loss(x, IDX[:0], **options) + losses.router_z_loss(x)

    loss, grad = jax.jit(jax.value_and_grad(both))(PROBS[:0])
    assert loss == 0 and grad.shape == (0, 8)


def test_what_cannot_be_pooled_is_named():
    sums = losses.balance_sums(PROBS, IDX)
    with pytest.raises(ValueError, match=r"sums must be those of sequences, \[B, E\], for"):
        losses.pooled_load_balance_loss(sums, convention="deepseek_v3")
    for nothing in ([], None):
        with pytest.raises(TypeError, match="sums must be a BalanceSums or an iterable of them"):
            losses.pooled_load_balance_loss(nothing)  # type: ignore[arg-type]
    fewer = losses.balance_sums(PROBS[:, :4], IDX)
    with pytest.raises(ValueError, match=r"sums must all have the same number .* \[4, 8\]"):
        losses.pooled_load_balance_loss([sums, fewer])
