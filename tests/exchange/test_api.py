"""Tests of dispatch and combine against `jax_ep.reference`, on every number of ranks."""

from __future__ import annotations

import dataclasses
import functools
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
    most_ranks,
    owned_rows,
    per_rank,
    program,
    random_bits,
    routing,
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

# ----------------------------------------------------------------------- results for many shapes

CASES = [
    # Arguments: num_ranks, num_tokens, hidden, top_k, num_experts, dtype,
    # capacity, expert_alignment.
    Case(1, 7, 33, 3, 2, "bfloat16", 11, 8),
    Case(1, 512, 1024, 2, 4, "float32"),
    Case(2, 5, 8, 3, 4, "bfloat16"),
    Case(2, 3, 1, 2, 2, "float16", 1),
    Case(2, 9, 40, 4, 6, "float16", 130, 128),
    Case(4, 5, 17, 5, 4, "float16", None, 8),
    Case(4, 4, 64, 8, 8, "float32", 13, 4),
    Case(8, 9, 16, 4, 24, "float32", 20, 8),
    Case(8, 3, 8, 16, 16, "bfloat16", None, 8),
    Case(2, 9, 16, 4, 6, "float32", 17, 1, "fair"),
    Case(8, 9, 16, 4, 24, "bfloat16", 27, 8, "fair"),
]


@pytest.mark.parametrize("case", quick(CASES, CASES[7], CASES[9]), ids=str)
def test_everything_equals_the_reference(case: Case, implementation: Implementation):
    """Tokens must be equal bit for bit, and sums exactly, since they are of small integers."""
    rng = np.random.default_rng(0)
    run = program(case, implementation, check_vma=CASES.index(case) % 3 != 0)
    for kind in ROUTINGS:
        inputs = some_inputs(case, kind, rng)
        assert_outputs(run(inputs), run_reference(case, inputs), f"routing {kind!r}")


@pytest.mark.parametrize("case", quick([CASES[5], CASES[8]], CASES[8]), ids=str)
def test_sums_of_any_floats_are_close_and_repeat_bit_for_bit(case, implementation):
    rng = np.random.default_rng(1)
    run = program(case, implementation)
    by_token = (case.num_ranks, case.num_tokens, case.hidden)
    by_row = (case.num_ranks, case.num_rows, case.hidden)
    inputs = Inputs(
        x=rng.normal(size=by_token).astype(case.dtype),
        topk_idx=routing("uniform", case, rng),
        grad_tokens=rng.normal(size=by_row).astype(case.dtype),
        y=rng.normal(size=by_row).astype(case.dtype),
        topk_weights=rng.random((case.num_ranks, case.num_tokens, case.top_k), np.float32),
        grad_out=rng.normal(size=by_token).astype(case.dtype),
    )
    first, second = run(inputs), run(inputs)
    jax.tree.map(assert_bitwise_equal, first, second)

    expected = run_reference(case, inputs)
    floats = ("x", "grad_tokens", "y", "topk_weights", "grad_out")
    absolute = {name: np.abs(getattr(inputs, name).astype(np.float32)) for name in floats}
    magnitude = run_reference(
        dataclasses.replace(case, dtype="float32"), inputs._replace(**absolute)
    )
    for name in ("grad_x", "out", "grad_y", "grad_weights", "plain_out", "plain_grad_y"):
        terms = case.hidden if name == "grad_weights" else case.top_k
        sums = (getattr(outputs, name) for outputs in (first, expected, magnitude))
        assert_sum_close(*sums, terms, name)


@pytest.mark.parametrize(
    ("index_dtype", "dtype"),
    quick(
        [("int8", "float32"), ("uint32", "float8_e4m3fn"), ("int64", "float32")],
        ("uint32", "float8_e4m3fn"),
        ("int64", "float32"),
    ),
)
def test_any_integer_dtype_names_experts(index_dtype, dtype, implementation):
    """An int64 id that only a cast to 32 bits would make an expert must choose no expert."""
    if implementation == "pallas" and dtype == "float8_e4m3fn":
        pytest.skip("the kernels move no float8 rows")
    case = Case(most_ranks(2), 6, 8, 2, 128, dtype, capacity=32)
    rng = np.random.default_rng(3)
    topk_idx = routing("uniform", case, rng).astype(index_dtype)
    topk_idx[0, 0, 0] = np.array(-1).astype(index_dtype)
    if index_dtype == "int64":
        topk_idx[0, 1:3, 0] = [2**32, -(2**32) + 1]
    x = small_integers(rng, (case.num_ranks, case.num_tokens, case.hidden), case.dtype)
    ones = np.ones(topk_idx.shape, np.float32)
    with jax.enable_x64(index_dtype == "int64"):
        run = jax.jit(per_rank(exchanged(case, implementation), case.num_ranks))
        tokens, out = jax.device_get(run(x, topk_idx))
    expected = exchanged_by_reference(case, x, topk_idx.astype(np.int64), ones, x)
    assert_bitwise_equal(tokens, np.stack(expected.rows[0]))
    assert_equal(out, expected.out)


def test_combine_accumulates_in_float32(implementation: Implementation):
    """256 + 1 - 256 must be 1: it is summed in float32, since bfloat16 cannot represent 257."""
    case = Case(most_ranks(4), 1, 8, 3, 4, "bfloat16", 8)
    x = np.zeros((case.num_ranks, 1, 8), case.dtype)
    topk_idx = np.full((case.num_ranks, 1, 3), -1, np.int32)
    topk_idx[0] = 3

    def bring_back(x: Any, topk_idx: Any) -> Any:
        sent = case.dispatch(x, topk_idx, implementation)
        y = jnp.asarray([256, 1, -256, *[0] * 5], x.dtype)[:, None] + sent.tokens
        return jax_ep.combine(y, sent.handle, implementation=implementation)

    out = jax.jit(per_rank(bring_back, case.num_ranks))(x, topk_idx)
    np.testing.assert_array_equal(np.asarray(out[0], np.float32), 1.0)


@pytest.mark.parametrize("capacity", quick([None, 7], 7))
def test_another_payload_follows_the_routes_there_and_back(capacity, implementation):
    """The rows of dispatch_like and of combine may have another width and dtype than x."""
    case = Case(most_ranks(4), 5, 16, 3, 8, "bfloat16", capacity, 4)
    rng = np.random.default_rng(6)
    x = small_integers(rng, (case.num_ranks, 5, 16), case.dtype)
    other = random_bits(rng, (case.num_ranks, 5, 8), "float32")
    topk_idx = routing("masked", case, rng)
    routes = [d.routes for d in send_by_reference(case, x, topk_idx)]
    y, grad = (
        with_nan_elsewhere(
            small_integers(rng, (case.num_ranks, case.num_rows, 8), "float32"),
            owned_rows(routes, case.num_rows),
        )
        for _ in range(2)
    )
    weights = small_weights(rng, topk_idx.shape, "bfloat16")
    grad_out = small_integers(rng, other.shape, "float32")

    def run(x: Any, topk_idx: Any, other: Any, grad: Any, y: Any, weights: Any, g: Any) -> Any:
        handle = case.dispatch(x, topk_idx, implementation).handle
        options: dict[str, Any] = dict(implementation=implementation)
        sent, pull = jax.vjp(lambda a: jax_ep.dispatch_like(a, handle, **options), other)
        out, pull_out = jax.vjp(lambda y, w: jax_ep.combine(y, handle, w, **options), y, weights)
        return sent, *pull(grad), out, *pull_out(g)

    arrays = x, topk_idx, other, grad, y, weights, grad_out
    sent, grad_other, out, *grads = jax.jit(per_rank(run, case.num_ranks))(*arrays)
    assert_bitwise_equal(sent, np.stack(reference.dispatch_like(list(other), routes)))
    assert_equal(grad_other, np.stack(reference.dispatch_grad(list(grad), routes)))
    assert_equal(out, np.stack(reference.combine(list(y), routes, weights)))
    expected = reference.combine_grad(list(grad_out), list(y), routes, weights)
    for got, want in zip(grads, expected, strict=True):
        assert_equal(got, np.stack(want))


# ------------------------------------------------------------------- inside transformations of JAX


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
    forward = per_rank(exchanged(case, implementation), case.num_ranks)
    gradient = jax.grad(lambda x: jnp.sum(forward(x, topk_idx)[1]))
    for jaxpr in (jax.make_jaxpr(forward)(x, topk_idx), jax.make_jaxpr(gradient)(x)):
        assert all(executions(jaxpr.jaxpr, name) for name in ("ep_dispatch", "ep_combine"))
        assert not jaxpr.effects


@pytest.mark.slow
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


@pytest.mark.slow
def test_vmap_over_rows_of_the_same_choices_is_one_exchange_after_another(implementation):
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
            ((2, 4), ("data", "expert"), ("expert",)),
            ((4, 2), ("expert", "data"), ("expert",)),
            ((2, 2, 2), ("a", "data", "b"), ("b", "a")),
        ],
        ((2, 2, 2), ("a", "data", "b"), ("b", "a")),
    ),
)
def test_each_data_row_of_a_mesh_dispatches_alone(
    shape, names, axis_name, check_vma, implementation
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


@pytest.mark.slow
def test_the_other_axis_may_be_of_an_outer_shard_map(implementation):
    groups = most_ranks(2)
    num_ranks = most_ranks(8) // groups
    case, x, topk_idx, weights = _sample(num_ranks, groups)
    exchange = exchanged(case, implementation)

    def on_one_rank(x: Any, topk_idx: Any, weights: Any) -> Any:
        return exchange(x[0], topk_idx[0], weights[0])[1][None]

    def over(axis: str, function: Any) -> Any:
        specs = dict(in_specs=P(axis), out_specs=P(axis), check_vma=False)
        return jax.shard_map(function, axis_names={axis}, **specs)

    def on_one_group(x: Any, topk_idx: Any, weights: Any) -> Any:
        x, topk_idx, weights = x[0], topk_idx[0], weights[0]
        ranks = over(AXIS, on_one_rank)
        out, pull = jax.vjp(lambda x, w: ranks(x, topk_idx, w), x, weights)
        return jax.tree.map(lambda a: a[None], (out, *pull(x)))

    with jax.set_mesh(mesh((groups, num_ranks), ("data", AXIS))):
        run = jax.jit(over("data", on_one_group))
        out, grad_x, grad_weights = run(x, topk_idx, np.stack([weights] * groups))
    for group in range(groups):
        expected = exchanged_by_reference(case, x[group], topk_idx[group], weights, x[group])
        assert_equal(out[group], expected.out)
        assert_equal(grad_x[group], expected.grad_x)
        assert_equal(grad_weights[group], expected.grad_weights)


@pytest.mark.parametrize("check_vma", quick([True, False], True), ids=["vma", "no_vma"])
def test_what_every_rank_shares_may_stay_replicated(check_vma, implementation):
    """Operands may be replicated over the ranks; their gradients must be sums over the ranks."""
    case, x, topk_idx, weights = _sample(most_ranks(4), 1)
    one = x[0, 0], topk_idx[0, 0], weights[0]
    exchange = exchanged(case, implementation, shift=1)
    run = jax.shard_map(
        lambda *arrays: exchange(*arrays)[1][None],
        mesh=expert_mesh(case.num_ranks),
        in_specs=P(),
        out_specs=P(AXIS),
        check_vma=check_vma,
    )
    direction = small_integers(np.random.default_rng(15), x[0].shape, "float32")

    def loss(x: Any, weights: Any) -> Any:
        out = run(x, one[1], weights)
        return jnp.sum(out * direction), out

    grads, out = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(one[0], one[2])
    on_all = (np.stack([array] * case.num_ranks) for array in one)
    expected = exchanged_by_reference(case, *on_all, direction, shift=1)
    assert_equal(out, expected.out)
    assert_equal(grads[0], expected.grad_x.sum(axis=0))
    assert_equal(grads[1], expected.grad_weights.sum(axis=0))


# ------------------------------------------------------------------------------------------ errors

FUNCTIONS = ("dispatch", "combine", "dispatch_like")
RANK, FLOAT8, INT = dict(layout="rank"), dict(wire_dtype=jnp.float8_e4m3fn), "int32"


def assert_raises(function: str, change: dict[str, Any], message: str, num_ranks: int = 1) -> None:
    """Asserts that tracing a call of `function`, with some arguments changed, raises an error.

    A change of an argument is its new value or, of an array, the new (shape, dtype).
    "rank_combine" is a combine in the rank-major layout.
    """
    arrays = dict(x=((5, 8), "float32"), topk_idx=((5, 2), INT))
    if function == "combine":
        arrays |= dict(y=((9, 8), "float32"), topk_weights=((5, 2), "float32"))
    if function == "rank_combine":
        arrays |= dict(y=((1, 5, 8), "float32"))
    arrays |= {name: value for name, value in change.items() if isinstance(value, tuple)}
    usual = dict(num_experts=4, axis_name=AXIS, implementation="xla")
    layout = RANK if function == "rank_combine" else dict(capacity=9)

    def call(_: Any) -> Any:
        filled = {name: jnp.zeros(*array) for name, array in arrays.items() if name != "axis_name"}
        options = change | filled
        x, topk_idx = options.pop("x"), options.pop("topk_idx")
        if function == "dispatch":
            return jax_ep.dispatch(x, topk_idx, **usual | options).tokens
        handle = jax_ep.dispatch(jnp.zeros((5, 8)), topk_idx, **usual, **layout).handle
        options.setdefault("implementation", "xla")
        if function == "dispatch_like":
            return jax_ep.dispatch_like(x, handle, **options)
        return jax_ep.combine(options.pop("y"), handle, **options)

    # The call is traced but not compiled, so that any error is one of tracing.
    with pytest.raises((ValueError, TypeError), match=message):
        jax.make_jaxpr(per_rank(call, num_ranks))(np.zeros((num_ranks, 1), np.float32))


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        ("dispatch", dict(x=((5, 8), INT)), "x must be a floating array.* int32"),
        ("dispatch", dict(x=((5,), "float32")), r"x must be .*\[T, H\].*\(5,\)"),
        ("dispatch", dict(x=((5, 8), "float4_e2m1fn")), "x must be .* 8 bits or more.* float4"),
        ("dispatch", dict(topk_idx=((5, 2), "float32")), "topk_idx must be an integer.* float32"),
        ("dispatch", dict(topk_idx=((4, 2), INT)), r"topk_idx must .*\(5, 8\).*\(4, 2\)"),
        ("dispatch", dict(capacity=0), "capacity must be .* 0"),
        ("dispatch", dict(capacity=2**31), "capacity must be at most 2147483"),
        ("dispatch", dict(num_experts=0), "num_experts must be .* 0"),
        ("dispatch", dict(num_experts=4.0), r"num_experts must be .*integer.* 4\.0"),
        ("dispatch", dict(expert_alignment=0), "expert_alignment must be .* 0"),
        ("dispatch", dict(expert_alignment=2**31 - 1), "expert_alignment must be at most"),
        ("dispatch", dict(overflow="last"), "overflow must be .*tail.*fair.*last"),
        ("dispatch", dict(layout="row"), "layout must be .* 'row'"),
        ("dispatch", dict(axis_name="nowhere"), r"axis_name .*nowhere.*inside jax\.shard_map"),
        ("dispatch", dict(zero_unused=2), "zero_unused must be True or False, but is 2"),
        ("dispatch", RANK | dict(zero_unused=1), "zero_unused must be True or False, but is 1"),
        ("dispatch", RANK | dict(zero_unused=False), "zero_unused must be True.* but is False"),
        ("dispatch", RANK | dict(capacity=7), "capacity must be None .* but is 7"),
        ("dispatch", RANK | dict(overflow="fair"), "overflow must .*'fair'. See group_by_expert"),
        ("dispatch", RANK | dict(host_capacity=2), "host_capacity must be None .* but is 2"),
        ("dispatch", dict(host_capacity=0), "host_capacity must be at least 1, but is 0"),
        ("dispatch", dict(host_capacity=2), "host_capacity .* but is 2 with implementation='xla'"),
        ("dispatch", RANK | dict(topk_weights=((5, 3), "float32")), "topk_weights must .*5, 3"),
        ("dispatch", RANK | dict(topk_weights=((5, 2), INT)), "topk_weights must be .* int32"),
        ("dispatch", dict(topk_weights=((5, 2), "float32")), "topk_weights .* only with layout="),
        ("dispatch", dict(wire_dtype="int8"), "wire_dtype must be None or float8_e4m3fn"),
        ("dispatch", dict(grad_wire_dtype="int8"), "grad_wire_dtype must be None or float8"),
        ("dispatch", FLOAT8 | dict(x=((5, 200), "float32")), "float8_e4m3fn needs .* x has 200"),
        ("dispatch", FLOAT8 | dict(x=((5, 128), "float8_e4m3fn")), "x must .* 16 bits or more"),
        ("dispatch", FLOAT8 | dict(output="raw"), "output must be .* 'raw'"),
        ("dispatch", dict(output="quantized"), "needs a wire_dtype"),
        ("combine", dict(y=((8, 8), "float32")), r"y must .* 9 rows, but has shape \(8, 8\)"),
        ("combine", dict(y=((9,), "float32")), r"y must be .*\[R, H\].*\(9,\)"),
        ("combine", dict(y=((9, 8), INT)), "y must be a floating array.* int32"),
        ("combine", FLOAT8 | dict(y=((9, 200), "float32")), "y has 200 columns"),
        ("combine", dict(topk_weights=((5, 3), "float32")), "topk_weights must .*5, 2.*5, 3"),
        ("combine", dict(topk_weights=((5, 2), INT)), "topk_weights must be a floating.* int32"),
        ("rank_combine", dict(y=((1, 4, 8), "float32")), r"y must have .*\(1, 5\).*\(1, 4, 8\)"),
        ("rank_combine", dict(y=((1, 5, 8), INT)), "y must be a floating array.* int32"),
        ("rank_combine", dict(topk_weights=((5, 2), "float32")), "topk_weights must be None"),
        ("dispatch_like", dict(x=((4, 8), "float32")), r"x must .* 5 tokens.*\(4, 8\)"),
        ("dispatch_like", dict(x=((5, 8), INT)), "x must be a floating array.* int32"),
        *((name, dict(implementation="nccl"), "implementation .*xla.*nccl") for name in FUNCTIONS),
    ],
)
def test_errors_name_the_argument(function: str, change: dict[str, Any], message: str):
    assert_raises(function, change, message)


@pytest.mark.needs_devices(2)
def test_experts_must_divide_over_ranks():
    assert_raises("dispatch", dict(num_experts=7), f"num_experts .* 2 ranks .*{AXIS}.* 7", 2)


@pytest.mark.skipif(jax.devices()[0].platform == "gpu", reason="the kernels may run here")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_named_implementation_never_falls_back(function: str):
    message = r"implementation=.pallas. cannot run here: \w+"
    assert_raises(function, dict(implementation="pallas"), message)


# ------------------------------------------------------------------------ exchanges of one rank


@pytest.mark.parametrize("layout", quick(["expert", "rank"], "expert"))
def test_one_rank_exchanges_without_a_mesh(layout: Any):
    """With `axis_name=()`, a program on one device must exchange inside of jit, and outside."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(small_integers(rng, (12, 16), "float32"))
    topk_idx = jnp.asarray(rng.integers(0, 4, (12, 2)), jnp.int32)
    weights = jnp.asarray(small_weights(rng, (12, 2), "float32"))
    options: dict[str, Any] = dict(num_experts=4, axis_name=(), layout=layout)

    def exchange(x: jax.Array, weights: jax.Array) -> jax.Array:
        if layout == "expert":
            sent = jax_ep.dispatch(x, topk_idx, **options)
            return jax_ep.combine(sent.tokens * 2, sent.handle, weights)
        sent = jax_ep.dispatch(x, topk_idx, topk_weights=weights, **options)
        factors = 2 * jnp.sum(sent.topk_weights, -1)[..., None]
        return jax_ep.combine(sent.tokens * factors, sent.handle)

    def everything(x: jax.Array, weights: jax.Array) -> Any:
        out, pull = jax.vjp(exchange, x, weights)
        return out, *pull(x)

    out = 2 * x * weights.sum(axis=-1, keepdims=True)
    want = out, out, jnp.stack([2 * jnp.sum(x * x, axis=-1)] * 2, axis=-1)
    for function in (jax.jit(everything), everything):
        jax.tree.map(assert_equal, function(x, weights), want)


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
