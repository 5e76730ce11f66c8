"""Tests of arguments, configurations and programs at the limits of dispatch and combine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.contract import most_ranks
from support.meshes import expert_mesh
from support.selection import quick

import jax_ep

AXIS = "expert"
X = np.arange(8 * 128, dtype=np.float32).reshape(8, 128) / 64
TOPK_IDX = np.array([[0, 1], [2, 3], [1, -1], [3, 3], [0, 2], [-1, -1], [2, 1], [3, 0]], np.int32)
WEIGHTS = np.linspace(0.5, 1.5, 16, dtype=np.float32).reshape(8, 2)


def expert_major(x: Any, topk_idx: Any, weights: Any, **options: Any) -> jax.Array:
    got = jax_ep.dispatch(x, topk_idx, num_experts=4, axis_name=AXIS, **options)
    return jax_ep.combine(got.tokens * 2, got.handle, weights)


def rank_major(x: Any, topk_idx: Any, weights: Any) -> jax.Array:
    options = dict(num_experts=4, axis_name=AXIS, layout="rank", topk_weights=weights)
    got = jax_ep.dispatch(x, topk_idx, **options)
    grouped = jax_ep.group_by_expert(got)
    return jax_ep.combine(jax_ep.sum_by_token(grouped.tokens * 2, grouped, got), got.handle)


def float8(x: Any, topk_idx: Any, weights: Any) -> jax.Array:
    return expert_major(x, topk_idx, weights, wire_dtype=jnp.float8_e4m3fn, expert_alignment=4)


def mapped(function: Any, mesh: Any = None, **options: Any) -> Any:
    mesh = expert_mesh(most_ranks(2)) if mesh is None else mesh
    return jax.shard_map(function, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), **options)


def gradients(function: Any, mesh: Any = None, **options: Any) -> Any:
    def loss(x: Any, weights: Any, topk_idx: Any) -> Any:
        return jnp.sum(mapped(function, mesh, **options)(x, topk_idx, weights) ** 2)

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


# ------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    ("capacity", "wire", "exchange"), [(None, None, "xla"), (8, jnp.float8_e4m3fn, None)]
)
def test_without_tokens_all_rows_and_gradients_are_zero(capacity, wire, exchange):
    options: Any = dict(implementation=exchange)

    def on_rank(x: Any, topk_idx: Any, weights: Any) -> Any:
        of_dispatch = dict(num_experts=4, axis_name=AXIS, wire_dtype=wire, **options)
        got = jax_ep.dispatch(x, topk_idx, capacity=capacity, **of_dispatch)
        like = jax_ep.dispatch_like(x, got.handle, wire_dtype=wire, **options)
        out = jax_ep.combine(got.tokens + like, got.handle, weights, **options)
        out += jax_ep.combine(got.tokens, got.handle, **options)
        groups = got.group_sizes, got.expert_counts, got.dropped_counts, got.handle.routes.counts
        return out, got.tokens, (groups, got.rows_needed[None], got.num_dropped[None])

    def loss(x: Any, weights: Any) -> Any:
        out, tokens, rest = mapped(on_rank)(x, TOPK_IDX[:0], weights)
        return jnp.sum(out) + jnp.sum(tokens), (out, tokens, rest)

    found = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(X[:0], WEIGHTS[:0])
    grads, (out, tokens, rest) = found
    assert out.shape == grads[0].shape == (0, 128) and grads[1].shape == (0, 2)
    assert tokens.shape == (most_ranks(2) * (capacity or 0), 128)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((tokens, rest)))


def test_without_tokens_the_rank_major_layout_is_empty():
    options: Any = dict(num_experts=4, axis_name=AXIS, layout="rank", wire_dtype=jnp.float8_e4m3fn)

    def on_rank(x: Any, topk_idx: Any, weights: Any) -> Any:
        got: Any = jax_ep.dispatch(x, topk_idx, topk_weights=weights, **options)
        kept: Any = jax_ep.dispatch(x, topk_idx, output="quantized", **options)
        grouped = jax_ep.group_by_expert(got, expert_alignment=4)
        sums = jax_ep.sum_by_token(grouped.tokens, grouped, got)
        quantized = jax_ep.group_by_expert(kept, expert_alignment=4)
        sizes = grouped.group_sizes, quantized.group_sizes, quantized.tokens.dequantize()
        return jax_ep.combine(sums, got.handle), sizes

    def loss(x: Any, weights: Any) -> Any:
        out, sizes = mapped(on_rank)(x, TOPK_IDX[:0], weights)
        return jnp.sum(out), (out, sizes)

    grads, (out, sizes) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(X[:0], WEIGHTS[:0])
    assert [grad.shape for grad in grads] == [(0, 128), (0, 2)]
    assert out.shape == (0, 128) and not any(np.any(leaf) for leaf in jax.tree.leaves(sizes))


def test_the_largest_alignment_counts_its_rows():
    num_ranks = most_ranks(2)
    num_local = 4 // num_ranks
    most = 1 + (2**31 - 1 - 16) // (num_local + 1)

    def rows_needed(x: Any, topk_idx: Any) -> Any:
        options = dict(num_experts=4, axis_name=AXIS, capacity=8, expert_alignment=most)
        return jax_ep.dispatch(x, topk_idx, **options).rows_needed[None]

    found = jax.jit(mapped(rows_needed))(X, TOPK_IDX)
    # Every expert is chosen, so each needs a block.
    assert found.tolist() == [num_local * most] * num_ranks


@pytest.mark.parametrize("function", [expert_major, rank_major])
def test_an_axis_of_vmap_is_no_axis_of_ranks(function):
    stacked = (array.reshape(2, 4, -1) for array in (X, TOPK_IDX, WEIGHTS))
    with pytest.raises(ValueError, match=r"axis_name .*must name mesh axes.*jax\.vmap"):
        jax.vmap(function, axis_name=AXIS)(*stacked)


def test_forward_mode_is_refused():
    call = jax.jit(mapped(lambda x: expert_major(x, TOPK_IDX[: x.shape[0]], None)))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(call, (X,), (X,))


# -------------------------------------------------------------------------- configurations


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("function", [expert_major, rank_major, float8])
def test_nothing_is_promoted_implicitly(function):
    def both(x: Any, topk_idx: Any, weights: Any) -> Any:
        out, pull = jax.vjp(lambda x, w: function(x, topk_idx, w), x, weights)
        return pull(out)

    arrays = jnp.asarray(X, "bfloat16"), jnp.asarray(TOPK_IDX), jnp.asarray(WEIGHTS, "bfloat16")
    jax.jit(mapped(both)).lower(*arrays)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX lacks Explicit axes in shard_map")
@pytest.mark.needs_devices(4)
@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("spec", [P((AXIS, "data")), P(AXIS, "data")], ids=str)
@pytest.mark.parametrize("function", [expert_major, rank_major])
def test_the_axes_that_shard_map_leaves_out_may_be_explicit(function, spec, check_vma):
    expected = gradients(function)(X, WEIGHTS, TOPK_IDX)
    mesh = jax.make_mesh((2, 2), ("data", AXIS), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, P(AXIS))
        x = jax.device_put(X, NamedSharding(mesh, spec))
        weights, topk_idx = (jax.device_put(array, rows) for array in (WEIGHTS, TOPK_IDX))
        options = dict(axis_names={AXIS}, check_vma=check_vma)
        got = gradients(function, mesh, **options)(x, weights, topk_idx)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


# ---------------------------------------------------------------------------------- export


def on_ranks(array: np.ndarray) -> jax.Array:
    return jax.device_put(array, NamedSharding(expert_mesh(most_ranks(2)), P(AXIS)))


def test_a_program_for_several_platforms_runs_here():
    if jax.default_backend() != "cpu":
        pytest.skip("CPUs are one of the platforms")
    call = jax.jit(mapped(expert_major))
    exported = export.export(call, platforms=("cpu", "cuda"))(X, TOPK_IDX, WEIGHTS)
    got = jax.jit(exported.call)(*map(on_ranks, (X, TOPK_IDX, WEIGHTS)))
    np.testing.assert_array_equal(got, call(X, TOPK_IDX, WEIGHTS))


@pytest.mark.parametrize("layout", quick(["expert", "rank"], "expert"))
def test_what_a_dispatch_returns_can_be_exported(layout):
    pytest.importorskip("flatbuffers", reason="jax.export needs it to serialize")

    def call(x: Any, topk_idx: Any) -> Any:
        options = dict(num_experts=4, axis_name=AXIS, layout=layout)
        return jax.tree.map(lambda a: a[None], jax_ep.dispatch(x, topk_idx, **options))

    program = jax.jit(mapped(call))
    exported = export.export(program)(X, TOPK_IDX)
    got = jax.jit(export.deserialize(exported.serialize()).call)(on_ranks(X), on_ranks(TOPK_IDX))
    want = program(X, TOPK_IDX)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    "options", quick([{"expert_alignment": 4}, {"layout": "rank"}], {"layout": "rank"}), ids=str
)
def test_the_number_of_tokens_may_be_symbolic(options):
    (num_tokens,) = export.symbolic_shape("t")

    def call(x: Any, topk_idx: Any) -> Any:
        got = jax_ep.dispatch(x, topk_idx, num_experts=4, axis_name=AXIS, **options)
        return jax_ep.combine(got.tokens, got.handle)

    shapes = (
        jax.ShapeDtypeStruct((2 * num_tokens, 128), jnp.float32),
        jax.ShapeDtypeStruct((2 * num_tokens, 2), jnp.int32),
    )
    program = jax.jit(mapped(call, expert_mesh(1)))
    got = jax.jit(export.export(program)(*shapes).call)(X, TOPK_IDX)
    np.testing.assert_array_equal(got, program(X, TOPK_IDX))
    if most_ranks(2) > 1:
        exported = export.export(jax.jit(mapped(call)))(*shapes)
        assert "t" in str(exported.out_avals[0].shape[0])
