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
from support.rows import KINDS, choices, rows
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


def top_k(logits, gathered, k, groups=None, compared=None):
    """Chooses k columns by `compared`, or by the logits; returns them, and `gathered` at them."""
    return choose(logits, k, PLAIN, gathered=gathered, groups=groups, compared=compared)[:2]


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
    want = choices(values, k)
    assert topk_idx.dtype == jnp.int32 and chosen.dtype == jnp.float32
    np.testing.assert_array_equal(topk_idx, want)
    np.testing.assert_array_equal(chosen, np.take_along_axis(probs, want, axis=1))


@pytest.mark.parametrize("groups", [None, Groups(8, 3, 1), Groups(8, 3, 2)], ids=str)
@pytest.mark.parametrize(("experts", "k"), quick([(40, 3), (40, 13), (160, 40)], (40, 3)))
def test_sums_with_a_bias_are_compared_in_float32(experts, k, groups):
    """Of columns whose exact sums differ but are equal in float32, the first must be chosen."""
    compared, bias = rows(50, experts, "random"), rows(1, experts, "ties", 1)[0]
    values = rows(50, experts, "random", 2)

    @jax.jit
    def run(compared):
        return choose(values, k, PLAIN, compared=compared, bias=bias, groups=groups)[0]

    for factor in (1, 2**-30):
        scaled = compared * np.float32(factor)
        np.testing.assert_array_equal(run(scaled), choices(scaled + bias, k, groups), str(factor))


def test_sigmoids_are_compared():
    """Of columns whose sigmoids round to the same number, the first must be chosen."""
    values = rows(9, 64, "ties") * np.float32(30)
    bias = np.zeros(64, np.float32)
    topk_idx, weights, _ = choose(values, 8, PLAIN, sigmoid=True, bias=bias)
    want = choices(np.asarray(jax.nn.sigmoid(values)), 8)
    assert np.any(want != choices(values, 8))
    np.testing.assert_array_equal(topk_idx, want)
    np.testing.assert_array_equal(weights, np.take_along_axis(values, want, axis=1))


def test_types_where_x64_is_enabled():
    compared, bias, logits = rows(12, 16, "ties"), rows(1, 16, "ties", 1)[0], rows(12, 16, "random")
    with jax.enable_x64(True):
        options = dict(groups=Groups(4, 2, 2), compared=compared, bias=bias)
        topk_idx, weights, _ = choose(jnp.asarray(logits), 3, PLAIN, **options)
    assert topk_idx.dtype == jnp.int32 and weights.dtype == jnp.float32
    np.testing.assert_array_equal(topk_idx, choices(compared + bias, 3, Groups(4, 2, 2)))


def test_a_batch_has_one_bias_or_each_its_own():
    compared, bias, logits = rows(12, 16, "ties"), rows(1, 16, "ties", 1)[0], rows(12, 16, "random")

    def run(logits, compared, bias):
        return choose(logits, 3, PLAIN, compared=compared, bias=bias)[0]

    biases = np.stack([bias, bias[::-1]])
    wants = [choices(compared + each, 3) for each in biases]
    members = [a.reshape(3, 4, 16) for a in (logits, compared)]
    of_one = jax.vmap(run, (0, 0, None))(*members, bias)
    np.testing.assert_array_equal(of_one.reshape(12, 3), wants[0])
    np.testing.assert_array_equal(jax.vmap(run, (None, None, 0))(logits, compared, biases), wants)
    of_both = jax.vmap(jax.vmap(run, (0, 0, None)), (None, None, 0))
    got = of_both(*members, biases)
    np.testing.assert_array_equal(got.reshape(2, 12, 3), wants)


@pytest.mark.parametrize("kind", ["random", "ties"])
@pytest.mark.parametrize(("experts", "groups"), quick(GROUPS, "of whole lanes"))
def test_choices_are_of_the_best_groups(experts, groups, kind):
    values, compared = rows(77, experts, kind), rows(77, experts, kind, 1)
    # A group of one expert has no second best.
    want = Groups(groups.number, groups.kept, min(groups.best, experts // groups.number))
    run = jax.jit(top_k, static_argnums=(2, 3))
    topk_idx, _ = run(values, values, 4, groups, compared)
    np.testing.assert_array_equal(topk_idx, choices(compared, 4, want))
    topk_idx, _ = run(values, values, 4, groups)
    np.testing.assert_array_equal(topk_idx, choices(values, 4, want))


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
    """XLA must choose the best groups only where the kernel does not support their sizes."""
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
        (dict(num_groups=8, groups_kept=3, group_score=3), False),
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

    want = choices(np.asarray(values), 3)
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
    chosen = np.take_along_axis(np.asarray(want), choices(np.asarray(values), 3), axis=1)
    np.testing.assert_allclose(weights, 2.5 * chosen, rtol=1e-6)
    np.testing.assert_array_equal(topk_idx, choices(np.asarray(values), 3))

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
        want = choices(values[member], 3)
        np.testing.assert_array_equal(topk_idx[member], want)
        np.testing.assert_array_equal(chosen[member], np.take_along_axis(probs, want, axis=1))
