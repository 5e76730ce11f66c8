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
from support.meshes import expert_mesh
from support.selection import quick

import jax_ep
from jax_ep import reference
from jax_ep.exchange import xla
from jax_ep.exchange.routes import counts_here, row_groups
from jax_ep.matmul.backend import Backend
from jax_ep.moe.routed_experts import receive_capacity, routed_experts

H, F, T, K, E = 64, 64, 12, 3, 8
TOLERANCE = {"float32": 1e-5 if jax.default_backend() == "cpu" else 3e-3, "bfloat16": 3e-2}


def make_operands(case, kind="uniform", seed=0):
    """Draws operands and the output's cotangent, stacked by rank.

    They are x, topk_idx, weights, the experts' wi_0, wi_1, wo and wo_bias, and the cotangent.
    """
    rng = np.random.default_rng(seed)
    ranks, local = case.num_ranks, case.num_experts // case.num_ranks
    topk_idx = routing(kind, case, rng)

    def normal(*shape, scale=1.0):
        return jnp.asarray(scale * rng.standard_normal((ranks, *shape)), case.dtype)

    wi_0, wi_1 = (normal(local, H, F, scale=H**-0.5) for _ in range(2))
    experts = wi_0, wi_1, normal(local, F, H, scale=F**-0.5), normal(local, H)
    weights = jnp.asarray(rng.uniform(0.1, 1, topk_idx.shape), jnp.float32)
    return normal(T, H), topk_idx, weights, *experts, normal(T, H)


def layer(case, exchange=None, apart=False, weights_on="output"):
    """Returns a layer on one rank, which calls `expert_mlp` and `combine` instead if `apart`."""

    def run(x, topk_idx, weights, wi_0, wi_1, wo, wo_bias):
        sent = case.dispatch(x, topk_idx, exchange)
        if apart:
            y = jax_ep.expert_mlp(sent.tokens, wi_0, wi_1, wo, sent.group_sizes, wo_bias=wo_bias)
            return jax_ep.combine(y, sent.handle, weights, implementation=exchange)
        options = dict(wo_bias=wo_bias, weights_on=weights_on, implementation=exchange)
        return routed_experts(sent, wi_0, wi_1, wo, weights, **options)

    return run


@functools.cache
def output_and_gradients(case, *of_layer, **options):
    """Jits `layer` with the gradients of x, weights and the experts' parameters, on all ranks."""

    def on_rank(x, topk_idx, weights, *experts_and_grad):
        *experts, grad = experts_and_grad

        def run(x, weights, *experts):
            return layer(case, *of_layer, **options)(x, topk_idx, weights, *experts)

        out, vjp = jax.vjp(run, x, weights, *experts)
        return out, *vjp(grad)

    return jax.jit(per_rank(on_rank, case.num_ranks))


def dense(x, topk_idx, kept, weights, wi_0, wi_1, wo, wo_bias, weights_on="output"):
    """Computes the layer choice by choice; the operands are stacked by rank.

    `kept` [ranks, T, K] says which choices have a row.
    """
    # Each choice gets the parameters of its expert, [ranks, T, K, ...].
    wi_0, wi_1, wo, wo_bias = (
        w.reshape(-1, *w.shape[2:])[topk_idx] for w in (wi_0, wi_1, wo, wo_bias)
    )
    scale = weights[..., None]
    seen = x[:, :, None] * (scale if weights_on == "input" else jnp.ones_like(scale))
    hidden = jax.nn.silu(jnp.einsum("rtkh,rtkhf->rtkf", seen, wi_0))
    y = jnp.einsum("rtkf,rtkfh->rtkh", hidden * jnp.einsum("rtkh,rtkhf->rtkf", seen, wi_1), wo)
    y = (y + wo_bias) * (scale if weights_on == "output" else 1)
    return jnp.sum(jnp.where(kept[..., None], y, 0), axis=2)


def kept_choices(case, x, topk_idx):
    sent = reference.dispatch(list(np.asarray(x)), list(topk_idx), **case.options)
    return np.stack([received.routes.rows for received in sent]) >= 0


def expected(case, x, topk_idx, weights, *rest, weights_on="output"):
    """Computes `output_and_gradients` in float64, without dropped choices."""
    kept = kept_choices(case, x, topk_idx)
    with jax.enable_x64(True):
        wide = (np.asarray(a).astype(np.float64) for a in (x, weights, *rest))
        x, weights, *experts, grad = wide

        def run(x, weights, *experts):
            return dense(x, topk_idx, kept, weights, *experts, weights_on)

        out, vjp = jax.vjp(jax.jit(run), x, weights, *map(jnp.asarray, experts))
        return jax.device_get((out, *vjp(grad)))


def assert_close(got, want, dtype):
    names = ("out", "x", "weights", "wi_0", "wi_1", "wo", "wo_bias")
    for name, a, b in zip(names, got, want, strict=True):
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


@pytest.mark.parametrize("weights_on", quick(["output", "input"], "output"))
@pytest.mark.parametrize("name", quick([*CASES], "overflowing"))
@pytest.mark.parametrize("num_ranks", quick([1, 4], 4))
@pytest.mark.parametrize("dtype", quick([*TOLERANCE], "float32"))
@pytest.mark.parametrize("exchange", implementations())
def test_output_and_gradients(exchange, dtype, num_ranks, name, weights_on):
    kind, capacity, alignment = CASES[name]
    case = Case(most_ranks(num_ranks), T, H, K, E, dtype, capacity, alignment)
    operands = make_operands(case, kind)
    got = output_and_gradients(case, exchange, weights_on=weights_on)(*operands)
    assert_close(got, expected(case, *operands, weights_on=weights_on), dtype)
    if weights_on == "output":
        apart = output_and_gradients(case, exchange, apart=True)(*operands)
        np.testing.assert_array_equal(got[0], apart[0])


@pytest.fixture
def unused_rows_are_nan(monkeypatch):
    """Makes the portable functions leave NaN in unused rows, which kernels may leave unwritten.

    Returns the names of the functions that have done so.
    """
    poisoned = []

    def poison(name, rows, group_sizes):
        poisoned.append(name)
        used = jnp.sum(group_sizes)

        def of_array(rows):
            unused = jnp.arange(rows.shape[0]) >= used
            return jnp.where(unused.reshape(-1, *[1] * (rows.ndim - 1)), jnp.nan, rows)

        return jax.tree.map(of_array, rows)

    def of_matmul(name, function):
        def run(self, lhs, *args, zero_unused=True, **options):
            results = function(self, lhs, *args, zero_unused=zero_unused, **options)
            sizes = args[0] if name == "sum_of_products" else args[1]
            return results if zero_unused else poison(name, results, sizes)

        return run

    def of_exchange(name, rows, routes, config):
        if config.zero_unused:
            return rows
        counts = counts_here(routes.counts, config.rank())
        options = config.capacity, config.expert_alignment, config.overflow
        return poison(name, rows, row_groups(counts, *options).group_sizes)

    for name in ("sum_of_products", "gated_product"):
        monkeypatch.setattr(Backend, name, of_matmul(name, getattr(Backend, name)))
    by_choices, like = xla.dispatch_by_choices, xla.dispatch_like

    def dispatch(x, topk_idx, config):
        rows, routes, described = by_choices(x, topk_idx, config)
        return of_exchange("dispatch_by_choices", rows, routes, config), routes, described

    def dispatch_like(x, routes, config):
        return of_exchange("dispatch_like", like(x, routes, config), routes, config)

    monkeypatch.setattr(xla, "dispatch_by_choices", dispatch)
    monkeypatch.setattr(xla, "dispatch_like", dispatch_like)
    jax.clear_caches()
    yield poisoned
    jax.clear_caches()


@pytest.mark.parametrize("weights_on", quick(["output", "input"], "output"))
@pytest.mark.parametrize("name", quick([*CASES], "aligned and overflowing"))
@pytest.mark.parametrize("biased", quick([False, True], True))
def test_rows_that_no_token_gets_are_never_read(biased, name, weights_on, unused_rows_are_nan):
    """No product, activation, bias, combine or gradient may read rows to which no token is sent.

    A user may scale all rows: where these are zero, so must be the gradients of what scales them.
    """
    kind, capacity, alignment = CASES[name]
    case = Case(most_ranks(4), T, H, K, E, "float32", 80 if capacity else None, alignment)
    x, topk_idx, weights, *experts, wo_bias, grad = make_operands(case, kind)
    of_f = jnp.cos(jnp.arange(F) * jnp.ones((*wo_bias.shape[:2], 1)))
    biases = dict(wi_0_bias=of_f, wi_1_bias=of_f, wo_bias=wo_bias) if biased else {}
    options: dict = dict(weights_on=weights_on, implementation="xla", matmul_implementation="xla")

    def on_rank(zero_unused, x, topk_idx, weights, experts, biases, grad):
        def run(x, weights, experts, biases, scale):
            sent = case.dispatch(x, topk_idx, "xla", zero_unused=zero_unused)
            if zero_unused:
                sent = dataclasses.replace(sent, tokens=sent.tokens * scale)
            return routed_experts(sent, *experts, weights, **options, **biases)

        out, vjp = jax.vjp(run, x, weights, experts, biases, jnp.ones(H))
        *grads, of_scale = vjp(grad)
        return (out, *grads), of_scale

    results = []
    for zero_unused in (True, False):
        run = jax.jit(per_rank(functools.partial(on_rank, zero_unused), case.num_ranks))
        results.append(run(x, topk_idx, weights, experts, biases, grad))
        poisoned = set(unused_rows_are_nan)
        assert {"sum_of_products", "dispatch_like"} <= poisoned
        assert ("dispatch_by_choices" in poisoned) is not zero_unused
    jax.tree.map(np.testing.assert_array_equal, results[0][0], results[1][0])
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results[0]))


@pytest.mark.slow
def test_who_looks_for_nans_finds_none_in_unused_rows(unused_rows_are_nan):
    config = jax_ep.MoEConfig(num_experts=E, num_experts_per_token=K)
    x = np.random.default_rng(1).normal(size=(16, H)).astype(np.float32)
    operands = random_params(H, F, scale=1.0), x
    total = lambda params, x: jax_ep.moe_layer(params, x, config)[0].sum()  # noqa: E731
    gradients = jax.jit(jax.grad(total, (0, 1)))
    with jax.set_mesh(expert_mesh(most_ranks(4))):
        with jax.debug_nans(True):
            grads = gradients(*operands)
        assert not unused_rows_are_nan
        # Forget what was traced under jax_debug_nans.
        jax.clear_caches()
        again = gradients(*operands)
    assert unused_rows_are_nan
    jax.tree.map(np.testing.assert_array_equal, grads, again)


@pytest.mark.slow
def test_a_buffer_of_known_size_for_a_symbolic_number_of_tokens_is_exported():
    """Whether the buffer is mostly unused is then not known."""
    case, rows = Case(1, T, H, K, E, capacity=64), P(AXIS)
    x, topk_idx, weights, *experts, _ = (a[0] for a in make_operands(case))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=expert_mesh(1), in_specs=rows, out_specs=rows)
    def gradient(x, *operands):
        return jax.grad(lambda x: jnp.sum(layer(case, "xla")(x, *operands)))(x)

    (tokens,) = jax.export.symbolic_shape("t")
    given = x, topk_idx, weights
    types = [jax.ShapeDtypeStruct((tokens, *a.shape[1:]), a.dtype) for a in given]
    got = jax.jit(jax.export.export(gradient)(*types, *experts).call)(*given, *experts)
    np.testing.assert_allclose(got, gradient(*given, *experts), rtol=1e-4, atol=1e-4)


def test_scaled_rows_are_refused():
    case, wire = Case(1, T, 128, K, E, "bfloat16"), jnp.float8_e4m3fn

    def run(x, topk_idx, weights, wi, wo):
        sent = case.dispatch(x, topk_idx, None, wire_dtype=wire, output="quantized")
        return routed_experts(sent, wi, None, wo, weights)

    shapes = [((T, 128), jnp.bfloat16), ((T, K), jnp.int32), ((T, K), jnp.float32)]
    shapes += [((E, 128, F), wire), ((E, F, 128), wire)]
    with pytest.raises(TypeError, match=r"received\.tokens must be an array.*\(36, 128\)"):
        jax.eval_shape(per_rank(run, 1), *(jax.ShapeDtypeStruct((1, *s), t) for s, t in shapes))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["overflowing", "masked"])
def test_weights_of_choices_without_a_row_count_nowhere(name):
    kind, capacity, alignment = CASES[name]
    case = Case(most_ranks(4), T, H, K, E, "float32", capacity, alignment)
    x, topk_idx, weights, *others = make_operands(case, kind)
    lost = ~kept_choices(case, x, topk_idx)
    assert np.any(lost)
    run = output_and_gradients(case)
    want = run(x, topk_idx, weights, *others)
    got = run(x, topk_idx, jnp.where(lost, jnp.nan, weights), *others)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not np.any(np.asarray(got[2])[lost])


# Where the kernels cannot run, all collectives are XLA's.
@needs_kernels
@pytest.mark.parametrize("exchange", [None, "xla"])
def test_weights_travel_by_the_collectives_that_the_implementation_allows(exchange):
    case = Case(most_ranks(4), T, H, K, E, "float32", 40, 1)
    program = str(output_and_gradients(case, exchange).trace(*make_operands(case)).jaxpr)
    for name in ("ep_all_gather", "ep_all_to_all"):
        assert (name in program) == (exchange is None and case.num_ranks > 1), name


def test_what_is_kept_and_what_is_computed_again():
    """Experts apart from `combine` keep their output, and compute the product by wo again."""
    case = Case(1, T, H, K, E, "float32", 40, 1)
    x, topk_idx, weights, *experts, grad = (jnp.asarray(a[0]) for a in make_operands(case))

    def kept_and_recomputed(apart):
        def run(x, weights, *experts):
            return layer(case, apart=apart)(x, topk_idx, weights, *experts)

        def on_rank(function):
            return jax.shard_map(function, mesh=expert_mesh(1), in_specs=P(AXIS), out_specs=P(AXIS))

        def gradient(grad, *operands):
            return jax.vjp(jax.checkpoint(run), *operands)[1](grad)

        operands = x, weights, *experts
        kept = jax.eval_shape(on_rank(lambda *a: jax.vjp(run, *a)[1]), *operands)
        shapes = [leaf.shape for leaf in jax.tree.leaves(kept)]
        products = str(jax.make_jaxpr(on_rank(gradient))(grad, *operands)).count(" grouped_matmul[")
        return shapes.count((40, H)), shapes.count((40, F)), products

    together, apart = kept_and_recomputed(False), kept_and_recomputed(True)
    assert apart[0] == together[0] + 1 and together[1] > 0
    assert apart[2] == together[2] + 1


EACH, FEW = np.zeros((T, K), np.float32), np.zeros((T, K - 1), np.float32)


def test_a_receive_buffer_of_too_many_rows_is_refused_by_the_layers_option():
    config = jax_ep.MoEConfig(num_experts=8, num_experts_per_token=2)
    assert receive_capacity(config, 2**28 - 8, 8, True) == 2**31 - 64
    with pytest.raises(ValueError, match="^capacity_factor must .* but is None, with which"):
        receive_capacity(config, 2**28, 8, True)
    config = dataclasses.replace(config, capacity_factor=2.0)
    assert receive_capacity(config, 2**28, 8, True) == 2**30


WIDE_WO, BF16_WI = np.zeros((E, F + 1, H), np.float32), np.zeros((E, H, F), jnp.bfloat16)
ON_INPUT = dict(weights_on="input")


@pytest.mark.parametrize(
    ("operands", "options", "error", "message"),
    [
        (dict(wo=WIDE_WO), {}, ValueError, r"wo must have shape \(8, 64, 64\)"),
        (dict(wi_1=BF16_WI), {}, TypeError, "wi_1 must have the dtype"),
        (dict(weights=FEW), {}, ValueError, "topk_weights must have"),
        (dict(weights=EACH.astype(int)), {}, TypeError, "topk_weights must be a floating array"),
        (dict(weights=FEW), ON_INPUT, ValueError, "topk_weights must have"),
        ({}, dict(weights_on="gate"), ValueError, "weights_on must be one of .* but is 'gate'"),
        ({}, dict(matmul_implementation="cutlass"), ValueError, "implementation .*'cutlass'"),
        ({}, dict(implementation="nccl"), ValueError, "implementation must be one of .*'nccl'"),
    ],
)
def test_errors(operands, options, error, message):
    case = Case(1, T, H, K, E)
    names = ("x", "topk_idx", "weights", "wi_0", "wi_1", "wo")
    given = dict(zip(names, (a[0] for a in make_operands(case)[:6]), strict=True)) | operands

    def on_rank(x, topk_idx, weights, *experts):
        return routed_experts(case.dispatch(x, topk_idx, None), *experts, weights, **options)

    with pytest.raises(error, match=message):
        jax.eval_shape(per_rank(on_rank, 1), *(operand[None] for operand in given.values()))
