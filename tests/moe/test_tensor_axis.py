"""Sums and gathers over the tensor axis: those of `jax.lax`, and kernels where they are faster."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.kernels import needs_kernels
from support.meshes import mesh
from support.selection import quick

from jax_ep.collectives import table as collectives_table
from jax_ep.moe import tensor_axis
from jax_ep.moe.mesh import LayerMesh
from jax_ep.runtime import availability, jax_compat, symmetric_memory
from pallas_kernels.fabric import memory_map

T, H, K = 8, 128, 2
RANKS = 2


def where(splits_tokens: bool) -> LayerMesh:
    """Two ranks along the tensor axis, with tokens of their own or the same ones."""
    return LayerMesh((), ("tensor",) if splits_tokens else (), None, ("tensor",))


def outputs(x, ids, weights, factors, splits_tokens, implementation=None):
    """A layer of which each tensor rank computes a part: `factors` [1, H] of this rank."""
    there = where(splits_tokens)
    arrays = x, x, ids, weights
    x, same, ids, weights = tensor_axis.for_all_ranks(arrays, there, implementation)
    assert same is x and ids.dtype == jnp.int32
    part = x * factors * jnp.sum(weights * (ids / 2**20), axis=1, keepdims=True)
    return tensor_axis.sum_over_ranks(part, there, implementation)


def operands(splits_tokens):
    num_tokens = T * RANKS if splits_tokens else T
    x, factors = (
        jax.random.normal(jax.random.key(i), (n, H)) for i, n in ((0, num_tokens), (1, 2))
    )
    weights = jax.random.uniform(jax.random.key(2), (num_tokens, K))
    ids = jax.random.randint(jax.random.key(3), (num_tokens, K), -1, 2**20)
    return x, ids, weights, factors


def mapped(splits_tokens, over, check_vma=True, implementation=None):
    tokens = P("tensor") if splits_tokens else P()
    return jax.shard_map(
        lambda *arrays: outputs(*arrays, splits_tokens, implementation),
        mesh=over,
        in_specs=(tokens, tokens, tokens, P("tensor")),
        out_specs=tokens,
        check_vma=check_vma,
    )


@pytest.mark.parametrize("implementation", quick([None, "xla"], None))
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("splits_tokens", [True, False])
def test_values_and_gradients_are_those_of_whole_experts(splits_tokens, check_vma, implementation):
    x, ids, weights, factors = operands(splits_tokens)

    def loss(function, *arrays):
        return jnp.sum(jnp.sin(function(*arrays)))

    def whole(x, weights, factors):
        return (
            x * jnp.sum(factors, axis=0) * jnp.sum(weights * (ids / 2**20), axis=1, keepdims=True)
        )

    over = mesh((RANKS,), ("tensor",))
    run = mapped(splits_tokens, over, check_vma, implementation)

    def of_ranks(x, weights, factors):
        return run(x, ids, weights, factors)

    got, want = (
        jax.jit(jax.value_and_grad(lambda *arrays, f=f: loss(f, *arrays), (0, 1, 2)))(
            x, weights, factors
        )
        for f in (of_ranks, whole)
    )
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = np.max(np.abs(other))
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4 * scale)


def test_without_a_tensor_axis_nothing_is_moved():
    arrays = tuple(map(jnp.asarray, operands(False)[:3]))
    nowhere = LayerMesh((), (), None, ())
    assert tensor_axis.for_all_ranks(arrays, nowhere, None) == arrays
    assert tensor_axis.sum_over_ranks(arrays[0], nowhere, None) is arrays[0]


@needs_kernels
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="CPUs are taken for GPUs here")
@pytest.mark.parametrize("splits_tokens", [True, False])
def test_kernels_run_where_the_table_says_that_they_are_faster(splits_tokens, monkeypatch):
    """Of the forward and the backward pass; and not where the exchange is to be XLA's."""
    gpus = tuple(symmetric_memory.Gpu(g, g, 0, "", 0, 0) for g in range(RANKS))
    domain = symmetric_memory.Domain(
        memory_map.BASE, memory_map.STRIDE, memory_map.heap_bytes(RANKS), gpus
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(availability, "unavailable_reason", lambda *_: None)
    monkeypatch.setattr(symmetric_memory, "domain", lambda: domain)
    monkeypatch.setattr(symmetric_memory, "unavailable_reason", lambda _: None)
    monkeypatch.setattr(jax_compat, "devices_unavailable_reason", lambda: None)
    measured = collectives_table.current()["9.0"]
    monkeypatch.setattr(collectives_table, "current", lambda: {"": measured})
    monkeypatch.setattr(jax_compat, "platform_of_traced_mesh", lambda: "gpu")

    over = mesh((RANKS,), ("tensor",))
    x, *others = operands(splits_tokens)

    def text(implementation):
        def gradient(x, *others):
            run = mapped(splits_tokens, over, implementation=implementation)
            return jax.grad(lambda x: jnp.sum(jnp.sin(run(x, *others))))(x)

        lowered = jax.jit(gradient).trace(x, *others).lower(lowering_platforms=("cuda",))
        return lowered.as_text()

<<<<<<< HEAD
    kernels, by_xla = text(None), text("xla")
    moved = ("all_gather", "all_reduce", "reduce_scatter")
    assert kernels.count("@mosaic_gpu") >= 2 and "@mosaic_gpu" not in by_xla
    assert not any(f"stablehlo.{name}" in kernels for name in moved)
    assert any(f"stablehlo.{name}" in by_xla for name in moved)
=======
@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(tensor_axis="expert"), "tensor_axis must be another mesh axis than expert_axis"),
        (dict(tensor_axis=("tensor", "x")), r"tensor_axis \('tensor', 'x'\) must name axes"),
        (
            dict(tensor_axis=("tensor", "data"), batch_axes=("expert", "data")),
            r"batch_axes must include all of tensor_axis .* or none .*\('expert', 'data'\)",
        ),
    ],
)
def test_errors_name_the_axis(changes, message):
    with (
        jax.set_mesh(mesh((2, 2, 2), ("data", *AXES))),
        pytest.raises(ValueError, match=message),
    ):
        moe_layer(make_params(), make_x(), dataclasses.replace(CONFIG, **changes))


def test_a_width_that_does_not_divide_is_named():
    params = make_params()._replace(shared_wo=jnp.zeros((9, H)), shared_wi_0=jnp.zeros((H, 9)))
    params = params._replace(shared_wi_1=params.shared_wi_0)
    layer = functools.partial(moe_layer, config=CONFIG)
    with jax.set_mesh(mesh((4, 2), AXES)):
        with pytest.raises(ValueError, match=r"shared_wo must have a width .* 2 ranks .* is 9"):
            jax.eval_shape(layer, params, make_x())
    with jax.set_mesh(mesh((1, 3), AXES)):
        with pytest.raises(ValueError, match=r"wi_0 must have a width .* 3 ranks .* is 8"):
            jax.eval_shape(layer, make_params(), make_x())
>>>>>>> main
