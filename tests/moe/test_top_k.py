"""Tests of choosing experts: equal results of kernel and XLA, kernel selection, derivatives."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from support.kernels import needs_kernels
from support.meshes import mesh
from support.rows import (
    KINDS,
    SUMS,
    by_sums,
    comparable,
    descending,
    rows,
    sums,
    within_best_groups,
)
from support.selection import quick

from jax_ep.moe.routing import top_k_routing
from jax_ep.moe.top_k import choose
from pallas_kernels.routing.plan import Groups, Weighing

PLAIN = Weighing(normalize=False, epsilon=0.0, scale=1.0)

GROUPS = {
    "of whole lanes": (256, Groups(8, 4, 2)),
    "of their best": (160, Groups(8, 3, 1)),
    "of parts of a lane": (96, Groups(6, 2, 2)),
    "of one expert": (32, Groups(32, 9, 2)),
}


def top_k(logits, gathered, k, groups=None, scores=None):
    """Chooses the k columns with the largest logits; returns them, and `gathered` at them.

    With `groups`, only columns of the best groups are chosen. `scores` are the scores by which
    groups are compared; if they are None, logits are.
    """
    options = {} if scores is None else {"scores": "softmax", "rounded": scores}
    return choose(logits, k, PLAIN, gathered=gathered, groups=groups, **options)[:2]


def numpy_choices(logits, k, groups=None, scores=None):
    if groups is not None:
        best = min(groups.best, logits.shape[1] // groups.number)
        of_ties = "logit" if scores is logits else "softmax"
        logits = within_best_groups(logits, scores, groups.number, groups.kept, best, of_ties)
    return descending(logits)[:, :k]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("number", "experts", "k"),
    quick(
        [(513, 128, 8), (37, 60, 4), (64, 1024, 32), (3, 1, 1), (70, 33, 5), (9, 2000, 33)],
        (513, 128, 8),
    ),
)
def test_choices_are_the_first_of_the_total_order(number, experts, k, kind):
    values, probs = rows(number, experts, kind), rows(number, experts, "random", 1)
    topk_idx, chosen = jax.jit(top_k, static_argnums=2)(values, probs, k)
    want = numpy_choices(values, k)
    assert topk_idx.dtype == jnp.int32 and chosen.dtype == jnp.float32
    np.testing.assert_array_equal(topk_idx, want)
    np.testing.assert_array_equal(chosen, np.take_along_axis(probs, want, axis=1))


@pytest.mark.parametrize("groups", [None, Groups(8, 3, 1), Groups(8, 3, 2)], ids=str)
@pytest.mark.parametrize(("experts", "k"), quick([(40, 3), (40, 13), (160, 40)], (40, 3)))
def test_sums_are_compared_exactly(experts, k, groups):
    """Columns with equal float32 sums of score and bias must be chosen by their exact sums."""
    options = dict(scores="softmax", groups=groups)
    within = experts if groups is None else experts // groups.number * groups.kept

    @jax.jit
    def run(logits, scores, bias):
        return choose(logits, k, PLAIN, rounded=scores, bias=bias, **options)[0]

    for kind in SUMS:
        scores, bias, logits = sums(50, experts, kind)
        logits = comparable(logits, groups)
        want = by_sums(scores, bias, logits, groups)[:, : min(k, within)]
        np.testing.assert_array_equal(run(logits, scores, bias)[:, :within], want, kind)


@pytest.mark.parametrize("groups", [None, Groups(8, 3, 1), Groups(8, 3, 2)], ids=str)
def test_sums_of_few_tokens_are_compared_exactly(groups):
    """Choices must also be exact if float32 sums are equal for only 3 of 200 tokens."""
    rng = np.random.default_rng(0)

    @jax.jit
    def run(logits, scores, bias):
        options = dict(scores="softmax", rounded=scores, groups=groups)
        return choose(logits, 3, PLAIN, bias=bias, **options)[0]

    for kind in SUMS:
        scores, logits = rng.uniform(size=(2, 200, 40)).astype(np.float32)
        of_ties = sums(3, 40, kind)
        places = [0, 77, 199]
        scores[places], bias, logits[places] = (
            of_ties[0],
            of_ties[1],
            comparable(of_ties[2], groups),
        )
        want = by_sums(scores, bias, logits, groups)[:, :3]
        np.testing.assert_array_equal(run(logits, scores, bias), want, kind)


def test_ties_of_sums_where_x64_is_enabled():
    scores, bias, logits = sums(12, 16, "unlike beyond")
    with jax.enable_x64(True):
        options = dict(scores="softmax", groups=Groups(4, 2, 2), rounded=scores, bias=bias)
        topk_idx, weights, _ = choose(jnp.asarray(logits), 3, PLAIN, **options)
    assert topk_idx.dtype == jnp.int32 and weights.dtype == jnp.float32
    want = by_sums(scores, bias, logits, Groups(4, 2, 2))[:, :3]
    np.testing.assert_array_equal(topk_idx, want)


def test_a_batch_has_one_bias_or_each_its_own():
    scores, bias, logits = sums(12, 16, "unlike beyond")

    def run(logits, scores, bias):
        return choose(logits, 3, PLAIN, scores="softmax", rounded=scores, bias=bias)[0]

    biases = np.stack([bias, bias[::-1]])
    wants = [by_sums(scores, each, logits)[:, :3] for each in biases]
    members = (a.reshape(3, 4, 16) for a in (logits, scores))
    of_one = jax.vmap(run, (0, 0, None))(*members, bias)
    np.testing.assert_array_equal(of_one.reshape(12, 3), wants[0])
    np.testing.assert_array_equal(jax.vmap(run, (None, None, 0))(logits, scores, biases), wants)
    of_both = jax.vmap(jax.vmap(run, (0, 0, None)), (None, None, 0))
    members = (a.reshape(3, 4, 16) for a in (logits, scores))
    got = of_both(*members, biases)
    np.testing.assert_array_equal(got.reshape(2, 12, 3), wants)


@pytest.mark.parametrize("kind", ["random", "ties"])
@pytest.mark.parametrize(("experts", "groups"), quick(GROUPS, "of whole lanes"))
def test_choices_are_of_the_best_groups(experts, groups, kind):
    values, scores = rows(77, experts, kind), rows(77, experts, kind, 1)
    run = jax.jit(top_k, static_argnums=(2, 3))
    topk_idx, _ = run(values, values, 4, groups, scores)
    # If groups are compared by one best score, `choose` may compare logits, since scores grow with
    # logits.
    of_groups = values if groups.best == 1 else scores
    np.testing.assert_array_equal(topk_idx, numpy_choices(values, 4, groups, of_groups))
    topk_idx, _ = run(values, values, 4, groups)
    np.testing.assert_array_equal(topk_idx, numpy_choices(values, 4, groups, values))


def kernels_in(text: str) -> int:
    return text.count("mosaic_gpu_v2")


def lowered(*shape, k=4, groups=None, **options) -> str:
    values = jax.ShapeDtypeStruct(shape, jnp.float32, **options)

    def choose(values, probs):
        return top_k(values, probs, k, groups, values + 1)

    return jax.jit(choose).trace(values, values).lower(lowering_platforms=("cuda",)).as_text()


@needs_kernels
@pytest.mark.parametrize(("experts", "groups"), GROUPS.values(), ids=GROUPS)
def test_one_device_runs_the_kernel(experts, groups):
    """On one device the kernel must choose the experts.

    XLA must choose the best groups only where the kernel does not support their sizes.
    """
    text = lowered(8, experts, groups=groups)
    assert kernels_in(text) == 1
    known = groups in (GROUPS["of whole lanes"][1], GROUPS["of their best"][1])
    sorts = ("chlo.top_k", "mhlo.topk", "stablehlo.sort")
    assert any(name in text for name in sorts) != known


@needs_kernels
def test_xla_sorts_where_the_kernel_does_not_run():
    shards = NamedSharding(mesh((2,), ("data",)), PartitionSpec("data"))
    assert kernels_in(lowered(8, 64)) == 1
    assert kernels_in(lowered(2**23 - 1, 256)) == 1
    for text in (
        # The array has more elements than int32 can count.
        lowered(2**23, 256),
        # XLA partitions this program.
        lowered(8, 64, sharding=shards),
        lowered(8, 2000),
        lowered(8, 64, k=33),
        lowered(0, 64),
    ):
        assert kernels_in(text) == 0


@needs_kernels
@pytest.mark.parametrize(
    ("options", "by_kernel"),
    [
        (dict(), True),
        (dict(num_groups=8, groups_kept=3, group_score="max", choose_by="logit"), True),
        (dict(num_groups=8, groups_kept=3, group_score="max", normalize=False), True),
        (dict(score="sigmoid"), False),
        (dict(num_groups=8, groups_kept=3), False),
    ],
)
def test_the_kernel_makes_the_softmax_where_nothing_else_needs_it(options, by_kernel):
    logits = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    route = functools.partial(top_k_routing, k=4, **options)
    text = jax.jit(route).trace(logits).lower(lowering_platforms=("cuda",)).as_text()
    assert kernels_in(text) == 1
    assert ("stablehlo.exponential" in text or "stablehlo.logistic" in text) != by_kernel
    assert "stablehlo.divide" not in text or not by_kernel


@needs_kernels
def test_ranks_of_a_mesh_run_the_kernel():
    def choose(values):
        return top_k(values, values, 4)

    on_ranks = jax.shard_map(
        choose,
        mesh=mesh((2,), ("data",)),
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    values = jax.ShapeDtypeStruct((16, 64), jnp.float32)
    text = jax.jit(on_ranks).trace(values).lower(lowering_platforms=("cuda",)).as_text()
    assert kernels_in(text) == 1


def test_derivatives_are_of_what_is_chosen_alone():
    values, probs, of_probs = (jnp.asarray(rows(5, 16, "random", seed)) for seed in range(3))

    def choose(values, probs):
        return top_k(values, probs, 3)[1]

    want = numpy_choices(np.asarray(values), 3)
    _, tangent = jax.jvp(choose, (values, probs), (values, of_probs))
    np.testing.assert_array_equal(tangent, np.take_along_axis(np.asarray(of_probs), want, axis=1))
    grads = jax.grad(lambda *args: jnp.sum(choose(*args) ** 2), (0, 1))(values, probs)
    np.testing.assert_array_equal(grads[0], np.zeros_like(values))
    expected = np.zeros_like(probs)
    np.put_along_axis(expected, want, 2 * np.take_along_axis(np.asarray(probs), want, 1), axis=1)
    np.testing.assert_array_equal(grads[1], expected)


def test_softmax_and_weights_follow_from_the_values():
    """Softmax and weights must be right, with first and second derivatives."""
    values = jnp.asarray(rows(3, 16, "random"))
    run = jax.jit(choose, static_argnums=(1, 2), static_argnames="softmax")
    topk_idx, weights, probs = run(values, 3, Weighing(False, 0.0, 2.5), softmax=True)
    want = jax.nn.softmax(values)
    np.testing.assert_allclose(probs, want, rtol=1e-6)
    chosen = np.take_along_axis(np.asarray(want), numpy_choices(np.asarray(values), 3), axis=1)
    np.testing.assert_allclose(weights, 2.5 * chosen, rtol=1e-6)
    np.testing.assert_array_equal(topk_idx, numpy_choices(np.asarray(values), 3))

    def ours(values):
        routed = top_k_routing(values, 3, normalize_epsilon=0.25, scale=2.5)
        return jnp.sum(jnp.sin(routed.topk_weights)) + jnp.sum(routed.probs**2)

    def plain(values):
        probs = jax.nn.softmax(values)
        chosen = jnp.take_along_axis(probs, lax.top_k(values, 3)[1], axis=1)
        weights = 2.5 * chosen / (jnp.sum(chosen, axis=1, keepdims=True) + 0.25)
        return jnp.sum(jnp.sin(weights)) + jnp.sum(probs**2)

    @jax.jit
    def derivatives(values):
        return [[of(f)(values[:1]) for f in (ours, plain)] for of in (jax.grad, jax.hessian)]

    for got, want in derivatives(values):
        assert np.any(want)
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_batch_chooses_for_each_of_its_members():
    values, probs = rows(12, 16, "ties").reshape(3, 4, 16), rows(4, 16, "random", 1)
    topk_idx, chosen = jax.vmap(lambda values: top_k(values, jnp.asarray(probs), 3))(values)
    for member in range(3):
        want = numpy_choices(values[member], 3)
        np.testing.assert_array_equal(topk_idx[member], want)
        np.testing.assert_array_equal(chosen[member], np.take_along_axis(probs, want, axis=1))
