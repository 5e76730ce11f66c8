"""Tests of `routed_experts` against experts and combine apart, and gradients in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.contract import AXIS, Case, implementations, most_ranks, per_rank, routing
from support.dense_moe import random_params
from support.kernels import needs_kernels
from support.matmuls import available_implementations
from support.meshes import cuda_mesh, expert_mesh, mesh
from support.selection import quick

import jax_ep
from jax_ep import reference
from jax_ep.exchange import xla
from jax_ep.exchange.routes import counts_here, row_groups
from jax_ep.matmul.backend import Backend
from jax_ep.moe.routed_experts import routed_experts

H, F, T, K, E = 64, 64, 12, 3, 8
TOLERANCE = {"float32": 1e-5 if jax.default_backend() == "cpu" else 3e-3, "bfloat16": 3e-2}


def make_operands(case, kind="uniform", seed=0):
    """Draws x, topk_idx, weights, wi_0, wi_1, wo and the output's cotangent, stacked by rank."""
    rng = np.random.default_rng(seed)
    ranks, local = case.num_ranks, case.num_experts // case.num_ranks
    topk_idx = routing(kind, case, rng)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal((ranks, *shape)), case.dtype)

    wi_0, wi_1 = (normal(local, H, F, scale=H**-0.5) for _ in range(2))
    wo = normal(local, F, H, scale=F**-0.5)
    weights = jnp.asarray(rng.uniform(0.1, 1, topk_idx.shape), jnp.float32)
    return normal(T, H), topk_idx, weights, wi_0, wi_1, wo, normal(T, H)


def layer(case, exchange=None, matmul=None, apart=False):
    """Returns a layer on one rank, which calls `expert_mlp` and `combine` instead if `apart`."""

    def run(x, topk_idx, weights, *experts):
        sent = case.dispatch(x, topk_idx, exchange)
        if apart:
            y = jax_ep.expert_mlp(sent.tokens, *experts, sent.group_sizes, implementation=matmul)
            return jax_ep.combine(y, sent.handle, weights, implementation=exchange)
        return routed_experts(
            sent, *experts, weights, implementation=exchange, matmul_implementation=matmul
        )

    return run


@functools.cache
def output_and_gradients(case, exchange, matmul, apart=False):
    """Jits `layer` with the gradients of x, weights, wi_0, wi_1 and wo, on all ranks."""

    def on_rank(x, topk_idx, weights, wi_0, wi_1, wo, grad):
        def run(x, weights, *experts):
            return layer(case, exchange, matmul, apart)(x, topk_idx, weights, *experts)

        out, vjp = jax.vjp(run, x, weights, wi_0, wi_1, wo)
        return out, *vjp(grad)

    return jax.jit(per_rank(on_rank, case.num_ranks))


def dense(x, topk_idx, kept, weights, wi_0, wi_1, wo, bias=None, weights_on="output"):
    """Computes the layer choice by choice; the operands are stacked by rank.

    `kept` [ranks, T, K] says which choices have a row.
    """
    # Each choice gets the matrices of its expert, [ranks, T, K, ...].
    wi_0, wi_1, wo = (w.reshape(-1, *w.shape[2:])[topk_idx] for w in (wi_0, wi_1, wo))
    scale = weights[..., None]
    seen = x[:, :, None] * (scale if weights_on == "input" else jnp.ones_like(scale))
    hidden = jax.nn.silu(jnp.einsum("rtkh,rtkhf->rtkf", seen, wi_0))
    y = jnp.einsum("rtkf,rtkfh->rtkh", hidden * jnp.einsum("rtkh,rtkhf->rtkf", seen, wi_1), wo)
    if bias is not None:
        y += bias.reshape(-1, H)[topk_idx]
    y = y * scale if weights_on == "output" else y
    return jnp.sum(jnp.where(kept[..., None], y, 0), axis=2)


def kept_choices(case, x, topk_idx):
    sent = reference.dispatch(list(np.asarray(x)), list(topk_idx), **case.options)
    return np.stack([received.routes.rows for received in sent]) >= 0


def expected(case, x, topk_idx, weights, *rest):
    """Computes `output_and_gradients` in float64, without dropped choices."""
    kept = kept_choices(case, x, topk_idx)
    with jax.enable_x64(True):
        wide = (np.asarray(a).astype(np.float64) for a in (x, weights, *rest))
        x, weights, *experts, grad = wide

        def run(x, weights, *experts):
            return dense(x, topk_idx, kept, weights, *experts)

        out, vjp = jax.vjp(jax.jit(run), x, weights, *map(jnp.asarray, experts))
        return jax.device_get((out, *vjp(grad)))


def assert_close(got, want, dtype):
    for name, a, b in zip(("out", "x", "weights", "wi_0", "wi_1", "wo"), got, want, strict=True):
        assert a.dtype == (jnp.float32 if name == "weights" else jnp.dtype(dtype)), name
        atol = TOLERANCE[dtype] * max(1, abs(b).max())
        a = np.asarray(a).astype(np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=name)


# Each case is (routing, capacity, alignment).
CASES = {
    "uniform": ("uniform", None, 1),
    "overflowing": ("uniform", 20, 1),
    "aligned and overflowing": ("skewed", 44, 8),
    "masked": ("masked", None, 8),
    "one expert again and again": ("repeated", None, 1),
    "none": ("empty", 16, 1),
}


@pytest.mark.parametrize("name", quick([*CASES], "overflowing"))
@pytest.mark.parametrize("num_ranks", quick([1, 4], 4))
@pytest.mark.parametrize("dtype", quick([*TOLERANCE], "bfloat16"))
@pytest.mark.parametrize("exchange", implementations())
def test_output_and_gradients(exchange, dtype, num_ranks, name):
    kind, capacity, alignment = CASES[name]
    case = Case(most_ranks(num_ranks), T, H, K, E, dtype, capacity, alignment)
    operands = make_operands(case, kind)
    got = output_and_gradients(case, exchange, None)(*operands)
    assert_close(got, expected(case, *operands), dtype)
    apart = output_and_gradients(case, exchange, None, apart=True)(*operands)
    np.testing.assert_array_equal(got[0], apart[0])


@pytest.fixture
def unused_rows_are_nan(monkeypatch):
    """Makes the portable functions leave NaN in unused rows, which kernels may leave unwritten.

    Returns the names of the functions that have done so.
    """

    def poison(rows, group_sizes):
        unused = jnp.arange(rows.shape[0]) >= jnp.sum(group_sizes)
        return jnp.where(unused.reshape(-1, *[1] * (rows.ndim - 1)), jnp.nan, rows)

    poisoned = []

    def of_matmul(function):
        def run(self, lhs, *args, zero_unused=True, **options):
            results = function(self, lhs, *args, zero_unused=zero_unused, **options)
            if zero_unused:
                return results
            poisoned.append(function.__name__)
            sizes = args[0] if function.__name__ == "sum_of_products" else args[1]
            return jax.tree.map(lambda rows: poison(rows, sizes), results)

        return run

    for name in ("sum_of_products", "gated_product"):
        monkeypatch.setattr(Backend, name, of_matmul(getattr(Backend, name)))
    plain = {name: getattr(xla, name) for name in ("dispatch_by_choices", "dispatch_like")}

    def sizes_of(routes, config):
        counts = counts_here(routes.counts, config.rank())
        return row_groups(
            counts, config.capacity, config.expert_alignment, config.overflow
        ).group_sizes

    def dispatch(x, topk_idx, config):
        received, routes, described = plain["dispatch_by_choices"](x, topk_idx, config)
        return of_exchange("dispatch_by_choices", received, routes, config), routes, described

    def dispatch_like(x, routes, config):
        return of_exchange(
            "dispatch_like", plain["dispatch_like"](x, routes, config), routes, config
        )

    def of_exchange(name, rows, routes, config):
        if config.zero_unused:
            return rows
        poisoned.append(name)
        return jax.tree.map(lambda part: poison(part, sizes_of(routes, config)), rows)

    monkeypatch.setattr(xla, "dispatch_by_choices", dispatch)
    monkeypatch.setattr(xla, "dispatch_like", dispatch_like)
    jax.clear_caches()
    yield poisoned
    jax.clear_caches()


@pytest.mark.parametrize("weights_on", quick(["output", "input"], "output"))
@pytest.mark.parametrize("name", quick([*CASES], "aligned and overflowing"))
def test_rows_that_no_token_gets_are_never_read(name, weights_on, unused_rows_are_nan):
    """No product, activation, bias, combine or gradient may read rows to which no token is sent."""
    kind, capacity, alignment = CASES[name]
    case = Case(most_ranks(4), T, H, K, E, "float32", 80 if capacity else None, alignment)
    x, topk_idx, weights, *experts, grad = make_operands(case, kind)
    rng = np.random.default_rng(3)
    biases = [
        jnp.asarray(rng.normal(size=(*wi.shape[:2], wi.shape[3])), jnp.float32) for wi in experts
    ]

    def on_rank(with_biases, zero_unused, x, topk_idx, weights, experts, biases, grad):
        def run(x, weights, experts, biases):
            sent = jax_ep.dispatch(
                x, topk_idx, axis_name=AXIS, zero_unused=zero_unused, implementation="xla",
                **case.options,
            )  # fmt: skip
            named = zip(("wi_0_bias", "wi_1_bias", "wo_bias"), biases, strict=True)
            return routed_experts(
                sent, *experts, weights, **(dict(named) if with_biases else {}),
                weights_on=weights_on, implementation="xla", matmul_implementation="xla",
            )  # fmt: skip

        out, vjp = jax.vjp(run, x, weights, experts, biases)
        return out, *vjp(grad)

    for with_biases in (False, True):
        results = []
        for zero_unused in (True, False):
            function = functools.partial(on_rank, with_biases, zero_unused)
            mapped = jax.jit(per_rank(function, case.num_ranks))
            results.append(mapped(x, topk_idx, weights, experts, biases, grad))
            poisoned = set(unused_rows_are_nan)
            assert {"sum_of_products", "dispatch_like"} <= poisoned
            assert ("dispatch_by_choices" in poisoned) is not zero_unused or with_biases
        jax.tree.map(np.testing.assert_array_equal, *results)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results[0]))


def test_the_gradient_of_received_rows_is_zero_where_they_are(unused_rows_are_nan):
    """A user may scale all rows of the buffer: the scale's gradient is a sum over all rows."""
    case = Case(most_ranks(4), T, H, K, E, "float32")
    x, topk_idx, weights, *experts, grad = make_operands(case)

    def on_rank(x, topk_idx, weights, *rest):
        *experts, grad = rest
        sent = case.dispatch(x, topk_idx, "xla")

        def run(scale, together):
            rows = sent.tokens * scale
            if together:
                changed = dataclasses.replace(sent, tokens=rows)
                options = dict(implementation="xla", matmul_implementation="xla")
                return routed_experts(changed, *experts, weights, **options)
            y = jax_ep.expert_mlp(rows, *experts, sent.group_sizes, implementation="xla")
            return jax_ep.combine(y, sent.handle, weights, implementation="xla")

        both = (jax.vjp(functools.partial(run, together=t), jnp.ones(H)) for t in (True, False))
        return [vjp(grad)[0] for _, vjp in both]

    # GPUs multiply float32 in TF32 by default.
    with jax.default_matmul_precision("highest"):
        program = jax.jit(per_rank(on_rank, case.num_ranks))
        got, want = program(x, topk_idx, weights, *experts, grad)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert "dispatch_like" in unused_rows_are_nan and np.isfinite(want).all()


def gradients_of_layer(**options):
    """Returns a jitted function that computes a layer's gradients, and its operands."""
    config = jax_ep.MoEConfig(num_experts=E, num_experts_per_token=K, **options)

    def total(params, x):
        return jax_ep.moe_layer(params, x, config)[0].sum()

    x = jnp.asarray(np.random.default_rng(1).normal(size=(16, H)), jnp.float32)
    return jax.jit(jax.grad(total, (0, 1))), (random_params(H, F, scale=1.0), x)


def test_who_looks_for_nans_finds_none_in_unused_rows(unused_rows_are_nan):
    """jax_debug_nans, which checks all results under jit, must find no NaN in unused rows."""
    gradients, operands = gradients_of_layer()
    with jax.set_mesh(expert_mesh(most_ranks(4))):
        with jax.debug_nans(True):
            grads = gradients(*operands)
        assert not unused_rows_are_nan
        # Forget what was traced under jax_debug_nans.
        jax.clear_caches()
        again = gradients(*operands)
    assert unused_rows_are_nan
    jax.tree.map(np.testing.assert_array_equal, grads, again)


@pytest.mark.parametrize("capacity_factor", [None, 1.0, 8.0])
def test_the_gate_of_a_mostly_unused_buffer_has_a_primitive_of_its_own(capacity_factor):
    """The gradient of the gate must skip unused rows, if a buffer is mostly unused on average."""
    num_ranks = most_ranks(4)
    gradients, operands = gradients_of_layer(capacity_factor=capacity_factor)
    with jax.set_mesh(expert_mesh(num_ranks)):
        jaxpr = str(jax.make_jaxpr(gradients)(*operands))
        got = gradients(*operands)
    is_large = capacity_factor == 8.0 or capacity_factor is None
    assert ("gate_gradient[" in jaxpr) == (is_large and num_ranks > 1)
    if is_large:
        # One rank has no unused rows.
        leaves = jax.tree.leaves(got), jax.tree.leaves(gradients(*operands))
        for a, b in zip(*map(jax.device_get, leaves), strict=True):
            assert np.linalg.norm(a - b) <= TOLERANCE["float32"] * np.linalg.norm(b)


def test_a_buffer_of_known_size_for_a_symbolic_number_of_tokens_is_exported():
    """Whether the buffer is mostly unused is then not known."""
    (tokens,) = jax.export.symbolic_shape("t")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=expert_mesh(1), in_specs=P(AXIS), out_specs=P(AXIS))
    def gradient(x, topk_idx, weights, *experts):
        def total(x):
            received = jax_ep.dispatch(
                x, topk_idx, num_experts=E, axis_name=AXIS, capacity=64, implementation="xla"
            )
            options = dict(implementation="xla", matmul_implementation="xla")
            return jnp.sum(jax_ep.routed_experts(received, *experts, weights, **options))

        return jax.grad(total)(x)

    rng = np.random.default_rng(0)
    shapes = (8, H), (8, K), (8, K), (E, H, F), (E, H, F), (E, F, H)
    args = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    args[1] = jnp.tile(jnp.arange(K), (8, 1))
    types = [jax.ShapeDtypeStruct((tokens, *a.shape[1:]), a.dtype) for a in args[:3]]
    types += [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args[3:]]
    got = jax.jit(jax.export.export(gradient)(*types).call)(*args)
    np.testing.assert_allclose(got, gradient(*args), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.slow
def test_weights_on_the_input(check_vma, num_ranks):
    """With weights_on="input", a row must be multiplied by its weight before the experts."""
    case = Case(most_ranks(num_ranks), T, H, K, E, "float32", 20, 1)
    x, topk_idx, weights, *experts, grad = make_operands(case)
    bias = jnp.asarray(np.random.default_rng(3).normal(size=(case.num_ranks, E // num_ranks, H)))
    kept = kept_choices(case, x, topk_idx)
    assert not np.all(kept)

    def on_rank(x, topk_idx, weights, bias, *experts_and_grad):
        *experts, grad = experts_and_grad

        def run(x, weights, bias, *experts):
            sent = case.dispatch(x, topk_idx, None)
            return routed_experts(sent, *experts, weights, wo_bias=bias, weights_on="input")

        out, vjp = jax.vjp(run, x, weights, bias, *experts)
        return out, *vjp(grad)

    def of_choices(x, weights, bias, *experts):
        return dense(x, topk_idx, kept, weights, *experts, bias, "input")

    run = jax.jit(per_rank(on_rank, case.num_ranks, check_vma=check_vma))
    got = run(x, topk_idx, weights, bias, *experts, grad)
    want, vjp = jax.vjp(jax.jit(of_choices), x, weights, bias, *experts)
    for a, b in zip(got, (want, *vjp(grad)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_scaled_rows_are_refused():
    """Float8 rows must be refused unless they come with their scales."""
    wire, hidden = jnp.float8_e4m3fn, 128

    def run(x, topk_idx, weights, wi, wo):
        sent = jax_ep.dispatch(
            x, topk_idx, num_experts=E, axis_name=AXIS, wire_dtype=wire, output="quantized"
        )
        return routed_experts(sent, wi, None, wo, weights)

    shapes = [((T, hidden), jnp.bfloat16), ((T, K), jnp.int32), ((T, K), jnp.float32)]
    shapes += [((E, hidden, F), wire), ((E, F, hidden), wire)]
    with pytest.raises(TypeError, match=r"received\.tokens must be an array.*\(36, 128\)"):
        jax.eval_shape(per_rank(run, 1), *(jax.ShapeDtypeStruct((1, *s), t) for s, t in shapes))


@pytest.mark.parametrize(
    ("matmul", "dtype"),
    quick(
        [(name, dtype) for dtype in TOLERANCE for name in available_implementations((H, F), dtype)],
        ("loop", "float32"),
    ),
)
def test_matmul_implementations(matmul, dtype):
    case = Case(most_ranks(2), T, H, K, E, dtype, 30, 1)
    operands = make_operands(case, "skewed", seed=1)
    got = output_and_gradients(case, None, matmul)(*operands)
    assert_close(got, expected(case, *operands), dtype)


@pytest.mark.parametrize("name", quick(["overflowing", "masked"], "masked"))
def test_weights_of_choices_without_a_row_count_nowhere(name):
    """The weights of masked or dropped choices may be NaN, and their gradients must be zero."""
    kind, capacity, alignment = CASES[name]
    case = Case(most_ranks(4), T, H, K, E, "float32", capacity, alignment)
    x, topk_idx, weights, *others = make_operands(case, kind)
    lost = ~kept_choices(case, x, topk_idx)
    assert np.any(lost)
    run = output_and_gradients(case, None, None)
    want = run(x, topk_idx, weights, *others)
    got = run(x, topk_idx, jnp.where(lost, jnp.nan, weights), *others)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.any(np.asarray(got[2])[lost])


def test_matrices_replicated_over_another_axis():
    """Matrices replicated over another axis must get gradients summed over it."""
    shape = (2, most_ranks(4) // 2) if most_ranks(4) > 1 else (1, 1)
    case = Case(shape[1], T, H, K, E)
    parts = [make_operands(case, seed=seed) for seed in range(shape[0])]
    experts, both = parts[0][3:6], ("data", AXIS)

    @functools.partial(
        jax.shard_map,
        mesh=mesh(shape, both),
        in_specs=(P(both), P(both), P(both), P(AXIS), P(AXIS), P(AXIS)),
        out_specs=P(both),
    )
    def run(*operands):
        return layer(case)(*(operand[0] for operand in operands))[None]

    x, topk_idx, weights = (jnp.concatenate([part[i] for part in parts]) for i in range(3))
    grad = jnp.concatenate([part[6] for part in parts])
    out, vjp = jax.vjp(jax.jit(lambda x, w, *e: run(x, topk_idx, w, *e)), x, weights, *experts)
    wants = [expected(case, *part[:3], *experts, part[6]) for part in parts]
    rows = [np.concatenate([want[i] for want in wants]) for i in range(3)]
    sums = [sum(want[i] for want in wants) for i in range(3, 6)]
    assert_close((out, *vjp(grad)), (*rows, *sums), "float32")


@pytest.mark.slow
def test_second_order_gradient():
    """Second derivatives must be right; they pass through the gradient's matmuls and exchanges."""
    case = Case(most_ranks(2), T, H, K, E)
    x, topk_idx, weights, *experts, grad = make_operands(case)

    def squared_gradients(run, x, weights, grad, *experts):
        def value(x, weights, *experts):
            return jnp.sum(jnp.sin(run(x, weights, *experts)) * grad)

        gradients = jax.grad(value, (0, 1, 2))(x, weights, *experts)
        return sum(jnp.sum(gradient**2) for gradient in gradients)

    def of_layer(x, topk_idx, weights, grad, *experts):
        run = lambda x, weights, *experts: layer(case)(x, topk_idx, weights, *experts)  # noqa: E731
        return squared_gradients(run, x, weights, grad, *experts)

    def routed(x, weights, wo):
        operands = x, topk_idx, weights, grad, *experts[:2], wo
        return jnp.sum(per_rank(of_layer, case.num_ranks)(*operands))

    def by_choice(x, weights, wo):
        run = lambda x, *rest: dense(x, topk_idx, topk_idx >= 0, *rest)  # noqa: E731
        return squared_gradients(run, x, weights, grad, *experts[:2], wo)

    pair = (jax.jit(jax.grad(f, (0, 1, 2)))(x, weights, experts[2]) for f in (routed, by_choice))
    for got, want in zip(*pair, strict=True):
        atol = 100 * TOLERANCE["float32"] * max(1, float(abs(want).max()))
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)


# Where the kernels cannot run, all collectives are XLA's.
@needs_kernels
def test_weights_travel_by_the_collectives_that_the_implementation_allows():
    case = Case(most_ranks(4), T, H, K, E, "float32", 40, 1)
    operands = make_operands(case)
    for exchange, expected in ((None, case.num_ranks > 1), ("xla", False)):
        program = output_and_gradients(case, exchange, None).trace(*operands).jaxpr
        for name in ("ep_all_gather", "ep_all_to_all"):
            assert (name in str(program)) == expected, (exchange, name)


def test_what_is_kept_and_what_is_computed_again():
    case = Case(1, T, H, K, E, "float32", 40, 1)
    x, topk_idx, weights, *experts, grad = (jnp.asarray(a) for a in make_operands(case))

    def kept(apart):
        def forward(*operands):
            return jax.vjp(
                lambda x, w, *e: layer(case, apart=apart)(x, operands[1], w, *e),
                *(operands[0], *operands[2:]),
            )[1]

        vjp = jax.eval_shape(per_rank(forward, 1), x, topk_idx, weights, *experts)
        return sorted(leaf.shape[1:] for leaf in jax.tree.leaves(vjp))

    both, apart = kept(False), kept(True)
    assert apart.count((40, H)) == both.count((40, H)) + 1, "the experts' output"
    assert (40, F) in both

    def again(apart):
        def on_rank(x, topk_idx, weights, grad, *experts):
            run = jax.checkpoint(lambda *a: layer(case, apart=apart)(a[0], topk_idx, *a[1:]))
            return jax.vjp(run, x, weights, *experts)[1](grad)

        jaxpr = jax.make_jaxpr(per_rank(on_rank, 1))(x, topk_idx, weights, grad, *experts)
        return str(jaxpr).count(" grouped_matmul[")

    assert again(apart=True) - again(apart=False) == 1, "the product by wo"


@needs_kernels
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.slow
def test_lowers_for_cuda_without_float32_rows(check_vma):
    """No array with the rows of a receive buffer may be float32, except within the gate."""
    ranks, tokens, hidden, mlp, capacity = 8, 256, 512, 256, 1152
    case = Case(ranks, tokens, hidden, 4, 32, "bfloat16", capacity, 1)

    @functools.partial(
        jax.shard_map,
        mesh=cuda_mesh((ranks,), (AXIS,)),
        in_specs=P(AXIS),
        out_specs=P(),
        check_vma=check_vma,
    )
    def loss(x, topk_idx, weights, *experts):
        out = layer(case, "pallas", "pallas")(x, topk_idx, weights, *experts)
        return jax.lax.psum(jnp.sum(jnp.sin(out.astype(jnp.float32))), AXIS)

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype)

    args = (
        shape(ranks * tokens, hidden),
        shape(ranks * tokens, 4, dtype=jnp.int32),
        shape(ranks * tokens, 4, dtype=jnp.float32),
        shape(32, hidden, mlp),
        shape(32, hidden, mlp),
        shape(32, mlp, hidden),
    )
    traced = jax.jit(jax.grad(loss, (0, 2, 3, 4, 5))).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert f"tensor<{capacity}x{hidden}xbf16>" in text
    assert f"tensor<{capacity}x{hidden}xf32>" not in text
    assert "stablehlo.transpose" not in text


EACH, FEW = np.zeros((T, K), np.float32), np.zeros((T, K - 1), np.float32)
WIDE_WO, BF16_WI = np.zeros((E, F + 1, H), np.float32), np.zeros((E, H, F), jnp.bfloat16)


@pytest.mark.parametrize(
    ("operands", "options", "error", "message"),
    [
        (dict(wo=WIDE_WO), {}, ValueError, r"wo must have shape \(8, 64, 64\)"),
        (dict(wi_1=BF16_WI), {}, TypeError, "wi_1 must have the dtype"),
        (dict(weights=FEW), {}, ValueError, "topk_weights must have"),
        (dict(weights=EACH.astype(int)), {}, TypeError, "topk_weights must be a floating array"),
        (dict(weights=EACH.T), "input", ValueError, r"topk_weights must have .*\(3, 12\)"),
        (dict(weights=FEW), "input", ValueError, "topk_weights must have"),
        ({}, "gate", ValueError, "weights_on must be one of .* but is 'gate'"),
        ({}, dict(matmul_implementation="cutlass"), ValueError, "implementation .*'cutlass'"),
        ({}, dict(implementation="nccl"), ValueError, "implementation must be one of .*'nccl'"),
    ],
)
def test_errors(operands, options, error, message):
    options = options if isinstance(options, dict) else dict(weights_on=options)
    case = Case(1, T, H, K, E)
    names = ("x", "topk_idx", "weights", "wi_0", "wi_1", "wo")
    given = dict(zip(names, (a[0] for a in make_operands(case)[:6]), strict=True)) | operands

    def on_rank(x, topk_idx, weights, *experts):
        return routed_experts(case.dispatch(x, topk_idx, None), *experts, weights, **options)

    with pytest.raises(error, match=message):
        jax.eval_shape(per_rank(on_rank, 1), *(operand[None] for operand in given.values()))


@pytest.mark.parametrize("output", ["dequantized", "quantized"])
@pytest.mark.parametrize("capacity", [None, 16])
def test_without_tokens_the_gradients_are_zero(capacity, output):
    wi, wo = jnp.ones((4, 128, 256)), jnp.ones((4, 256, 128))
    float8 = jnp.float8_e4m3fn
    options = dict(num_experts=8, capacity=capacity, wire_dtype=float8, output=output)

    def on_rank(x, topk_idx, topk_weights, *weights):
        sent = jax_ep.dispatch(x, topk_idx, axis_name=AXIS, **options)
        return routed_experts(sent, *weights, topk_weights, matmul_dtype=float8)

    def loss(x, topk_weights, *weights):
        of_tokens = (P(AXIS),) * 3
        run = jax.shard_map(
            on_rank,
            mesh=expert_mesh(2),
            in_specs=(*of_tokens, P(), P(), P()),
            out_specs=P(AXIS),
        )
        return jnp.sum(run(x, jnp.zeros((0, K), jnp.int32), topk_weights, *weights))

    args = jnp.ones((0, 128)), jnp.ones((0, K)), wi, wi, wo
    argnums = (0, 1, 2, 3, 4) if output == "dequantized" else (1, 2, 3, 4)
    for i, grad in zip(argnums, jax.jit(jax.grad(loss, argnums))(*args), strict=True):
        np.testing.assert_array_equal(grad, np.zeros(args[i].shape))
