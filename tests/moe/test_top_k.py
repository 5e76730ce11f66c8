"""Tests of choosing experts: equal results of kernel and XLA, kernel selection, derivatives."""

from __future__ import annotations

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
from jax_ep.moe.top_k import Operands, Options, choose
from pallas_kernels.routing.plan import Groups, Weighing

PLAIN = Weighing(normalize=False, epsilon=0.0, scale=1.0)

GROUPS = {
    "of whole lanes": (256, Groups(8, 4, 2)),
    "of their best": (160, Groups(8, 3, 1)),
    "of parts of a lane": (96, Groups(6, 2, 2)),
    "of one expert": (32, Groups(32, 9, 2)),
}


def top_k(logits, gathered, k, groups=None, compared=None, bias=None):
    """Chooses k columns by `compared`, or by the logits; returns them, and `gathered` at them."""
    operands = Operands(logits, compared, None if bias is None else bias[None], gathered)
    topk_idx, _, weights = choose(operands, Options(k, PLAIN, groups=groups))
    return topk_idx, weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("number", "experts", "k"), quick([(513, 128, 8), (3, 1, 1), (9, 2000, 33)], (513, 128, 8))
)
def test_choices_are_the_first_of_the_total_order(number, experts, k, kind):
    values, probs = rows(number, experts, kind), rows(number, experts, "random", 1)
    topk_idx, chosen = jax.jit(top_k, static_argnums=2)(values, probs, k)
    want = choices(values, k)
    assert topk_idx.dtype == jnp.int32 and chosen.dtype == jnp.float32
    np.testing.assert_array_equal(topk_idx, want)
    np.testing.assert_array_equal(chosen, np.take_along_axis(probs, want, axis=1))


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("groups", [None, Groups(8, 3, 1), Groups(8, 3, 2)], ids=str)
@pytest.mark.parametrize(("experts", "k"), quick([(40, 3), (160, 40)], (40, 3)))
def test_sums_with_a_bias_are_compared_in_float32(experts, k, groups, x64):
    """Of columns whose exact sums differ but are equal in float32, the first must be chosen."""
    compared, bias = rows(50, experts, "random"), rows(1, experts, "ties", 1)[0]
    values = rows(50, experts, "random", 2)
    with jax.enable_x64(x64):
        run = jax.jit(lambda compared: top_k(values, values, k, groups, compared, bias))
        for factor in (1, 2**-30):
            scaled = compared * np.float32(factor)
            topk_idx, weights = run(scaled)
            assert topk_idx.dtype == jnp.int32 and weights.dtype == jnp.float32
            np.testing.assert_array_equal(topk_idx, choices(scaled + bias, k, groups), str(factor))


def test_a_batch_has_one_bias_or_each_its_own():
    compared, bias, gathered = (rows(12, 16, "ties", seed) for seed in range(3))
    biases = np.stack([bias[0], bias[0, ::-1]])

    def run(compared, gathered, bias):
        return top_k(compared, gathered, 3, compared=compared, bias=bias)

    members = [a.reshape(3, 4, 16) for a in (compared, gathered)]
    of_one = jax.vmap(run, (0, 0, None))
    of_both = jax.vmap(of_one, (None, None, 0))(*members, biases)
    of_each = jax.vmap(run, (None, None, 0))(compared, gathered, biases)
    for i, bias in enumerate(biases):
        want = choices(compared + bias, 3)
        chosen = np.take_along_axis(gathered, want, axis=1)
        for got in (of_one(*members, bias), [a[i] for a in of_both], [a[i] for a in of_each]):
            np.testing.assert_array_equal(got[0].reshape(12, 3), want)
            np.testing.assert_array_equal(got[1].reshape(12, 3), chosen)


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
    devices, rows = mesh((2,), ("data",)), PartitionSpec("data")
    assert kernels_in(lowered(8, 64)) == 1
    assert kernels_in(lowered(2**23 - 1, 256)) == 1
    for text in (
        # The array has more elements than int32 can count.
        lowered(2**23, 256),
        # XLA partitions this program.
        lowered(8, 64, sharding=NamedSharding(devices, rows)),
        lowered(8, 2000),
        lowered(8, 64, k=33),
        lowered(0, 64),
    ):
        assert kernels_in(text) == 0
    on_ranks = jax.shard_map(
        lambda values: top_k(values, values, 4), mesh=devices, in_specs=rows, out_specs=rows
    )
    traced = jax.jit(on_ranks).trace(jax.ShapeDtypeStruct((16, 64), jnp.float32))
    assert kernels_in(traced.lower(lowering_platforms=("cuda",)).as_text()) == 1


def test_derivatives_are_of_what_is_chosen_alone():
    values, probs, of_probs = (rows(5, 16, "random", seed) for seed in range(3))
    want = choices(values, 3)
    run = lambda values, probs: top_k(values, probs, 3)[1]  # noqa: E731
    _, tangent = jax.jvp(run, (values, probs), (values, of_probs))
    np.testing.assert_array_equal(tangent, np.take_along_axis(of_probs, want, axis=1))
    grads = jax.grad(lambda *args: jnp.sum(run(*args)), (0, 1))(values, probs)
    is_chosen = np.zeros_like(probs)
    np.put_along_axis(is_chosen, want, 1, axis=1)
    np.testing.assert_array_equal(grads, (np.zeros_like(values), is_chosen))


def test_softmax_and_weights_follow_from_the_values():
    values = jnp.asarray(rows(1, 16, "random"))

    def ours(values):
        routed = top_k_routing(values, 3, normalize_epsilon=0.25, scale=2.5)
        return jnp.sum(jnp.sin(routed.topk_weights)) + jnp.sum(routed.probs**2)

    def plain(values):
        probs = jax.nn.softmax(values)
        chosen = jnp.take_along_axis(probs, lax.top_k(values, 3)[1], axis=1)
        weights = 2.5 * chosen / (jnp.sum(chosen, axis=1, keepdims=True) + 0.25)
        return jnp.sum(jnp.sin(weights)) + jnp.sum(probs**2)

    for derivative in (jax.grad, jax.hessian):
        got, want = (jax.jit(derivative(f))(values) for f in (ours, plain))
        assert np.any(want)
        np.testing.assert_allclose(got, want, atol=1e-6)
