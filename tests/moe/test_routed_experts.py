"""Tests of `routed_experts` against experts and combine apart, and gradients in float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.contract import AXIS, Case, implementations, most_ranks, per_rank, routing
from support.kernels import needs_kernels
from support.matmuls import available_implementations
from support.meshes import cuda_mesh
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
    """Returns a layer on one rank: (x, topk_idx, weights, wi_0, wi_1, wo) -> out.

    Args:
        case: the static arguments of the dispatch.
        exchange: the implementation of dispatch and combine.
        matmul: that of the grouped matmuls.
        apart: whether to call `expert_mlp` and `combine` instead of `routed_experts`.
    """

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
    """Jits `layer` and its gradients, on all ranks.

    The function takes the operands of `layer` and a cotangent. It returns the output and the
    gradients of x, weights, wi_0, wi_1 and wo.
    """

    def on_rank(x, topk_idx, weights, wi_0, wi_1, wo, grad):
        def run(x, weights, *experts):
            return layer(case, exchange, matmul, apart)(x, topk_idx, weights, *experts)

        out, vjp = jax.vjp(run, x, weights, wi_0, wi_1, wo)
        return out, *vjp(grad)

    return jax.jit(per_rank(on_rank, case.num_ranks))


def expected(case, x, topk_idx, weights, wi_0, wi_1, wo, grad):
    """Computes `output_and_gradients` in float64, choice by choice, without dropped choices."""
    sent = reference.dispatch(list(np.asarray(x)), list(topk_idx), **case.options)
    x, weights, wi_0, wi_1, wo, grad = (
        np.asarray(a).astype(np.float64) for a in (x, weights, wi_0, wi_1, wo, grad)
    )
    out, dx, dweights = np.zeros(x.shape), np.zeros(x.shape), np.zeros(weights.shape)
    dwi_0, dwi_1, dwo = np.zeros(wi_0.shape), np.zeros(wi_1.shape), np.zeros(wo.shape)
    local = case.num_experts // case.num_ranks
    for s, received in enumerate(sent):
        for t, k in zip(*np.nonzero(received.routes.rows >= 0), strict=True):
            e = divmod(topk_idx[s, t, k], local)
            a, b = x[s, t] @ wi_0[e], x[s, t] @ wi_1[e]
            sigmoid = 1 / (1 + np.exp(-a))
            silu, dsilu = a * sigmoid, sigmoid * (1 + a * (1 - sigmoid))
            w, g = weights[s, t, k], grad[s, t]
            y = (silu * b) @ wo[e]
            out[s, t] += w * y
            dweights[s, t, k] = g @ y
            dh = w * (g @ wo[e].T)
            da, db = dh * b * dsilu, dh * silu
            dx[s, t] += da @ wi_0[e].T + db @ wi_1[e].T
            dwi_0[e] += np.outer(x[s, t], da)
            dwi_1[e] += np.outer(x[s, t], db)
            dwo[e] += np.outer(w * silu * b, g)
    return out, dx, dweights, dwi_0, dwi_1, dwo


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
    plain = {name: getattr(xla, name) for name in ("dispatch", "dispatch_like")}

    def sizes_of(routes, config):
        counts = counts_here(routes.counts, config.rank())
        return row_groups(
            counts, config.capacity, config.expert_alignment, config.overflow
        ).group_sizes

    def dispatch(x, topk_idx, config):
        received, routes, described = plain["dispatch"](x, topk_idx, config)
        return of_exchange("dispatch", received, routes, config), routes, described

    def dispatch_like(x, routes, config):
        return of_exchange(
            "dispatch_like", plain["dispatch_like"](x, routes, config), routes, config
        )

    def of_exchange(name, rows, routes, config):
        if config.zero_unused:
            return rows
        poisoned.append(name)
        return jax.tree.map(lambda part: poison(part, sizes_of(routes, config)), rows)

    monkeypatch.setattr(xla, "dispatch", dispatch)
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
            assert ("dispatch" in poisoned) is not zero_unused or with_biases
        jax.tree.map(np.testing.assert_array_equal, *results)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(results[0]))


@pytest.mark.parametrize("matmul", ["xla"])
def test_the_gradient_of_received_rows_is_zero_where_they_are(matmul, unused_rows_are_nan):
    """The gradient of the received rows must be zero in rows to which no token was sent.

    A user may compute something for all rows of the buffer, here a scale. The scale's gradient is a
    sum over all rows.
    """
    case = Case(most_ranks(4), T, H, K, E, "float32")
    x, topk_idx, weights, *experts, grad = make_operands(case)

    def on_rank(x, topk_idx, weights, *rest):
        *experts, grad = rest
        sent = case.dispatch(x, topk_idx, "xla")

        def run(scale, together):
            rows = sent.tokens * scale
            if together:
                changed = dataclasses.replace(sent, tokens=rows)
                options = dict(implementation="xla", matmul_implementation=matmul)
                return routed_experts(changed, *experts, weights, **options)
            y = jax_ep.expert_mlp(rows, *experts, sent.group_sizes, implementation=matmul)
            return jax_ep.combine(y, sent.handle, weights, implementation="xla")

        both = (jax.vjp(functools.partial(run, together=t), jnp.ones(H)) for t in (True, False))
        return [vjp(grad)[0] for _, vjp in both]

    # GPUs multiply float32 in TF32 by default.
    with jax.default_matmul_precision("highest"):
        program = jax.jit(per_rank(on_rank, case.num_ranks))
        got, want = program(x, topk_idx, weights, *experts, grad)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert "dispatch_like" in unused_rows_are_nan and np.isfinite(want).all()


def test_who_looks_for_nans_finds_none_in_unused_rows(unused_rows_are_nan):
    """jax_debug_nans, which checks all results under jit, must find no NaN in unused rows."""
    config = jax_ep.MoEConfig(num_experts=E, num_experts_per_token=K)
    rng = np.random.default_rng(0)
    shapes = {"gate": (H, E), "wi_0": (E, H, F), "wi_1": (E, H, F), "wo": (E, F, H)}
    params = jax_ep.MoEParams(
        **{name: jnp.asarray(rng.normal(size=size), jnp.float32) for name, size in shapes.items()}
    )
    mesh = jax.make_mesh((most_ranks(4),), (AXIS,), axis_types=(AxisType.Auto,))
    x = jnp.asarray(rng.normal(size=(8, H)), jnp.float32)
    with jax.set_mesh(mesh), jax.debug_nans(True):
        grads = jax.grad(lambda p: jax_ep.moe_layer(p, x, config)[0].sum())(params)
    assert not unused_rows_are_nan
    # Forget what was traced under jax_debug_nans.
    jax.clear_caches()
    with jax.set_mesh(mesh):
        again = jax.grad(lambda p: jax_ep.moe_layer(p, x, config)[0].sum())(params)
    assert unused_rows_are_nan
    jax.tree.map(np.testing.assert_array_equal, grads, again)


@pytest.mark.parametrize("capacity_factor", [None, 1.0, 8.0])
def test_the_gate_of_a_mostly_unused_buffer_has_a_primitive_of_its_own(capacity_factor):
    """The gradient of the gate must skip unused rows, if a buffer is mostly unused on average.

    This must not change the gradients of the layer.
    """
    num_ranks = most_ranks(4)
    config = jax_ep.MoEConfig(
        num_experts=E, num_experts_per_token=K, capacity_factor=capacity_factor
    )
    rng = np.random.default_rng(0)
    shapes = {"gate": (H, E), "wi_0": (E, H, F), "wi_1": (E, H, F), "wo": (E, F, H)}
    params = jax_ep.MoEParams(
        **{name: jnp.asarray(rng.normal(size=size), jnp.float32) for name, size in shapes.items()}
    )
    x = jnp.asarray(rng.normal(size=(16, H)), jnp.float32)

    def gradients(params, x):
        return jax.grad(lambda *a: jax_ep.moe_layer(*a, config)[0].sum(), (0, 1))(params, x)

    mesh = jax.make_mesh((num_ranks,), (AXIS,), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        jaxpr = str(jax.make_jaxpr(gradients)(params, x))
        got = jax.jit(gradients)(params, x)
    is_large = capacity_factor == 8.0 or capacity_factor is None
    assert ("gate_gradient[" in jaxpr) == (is_large and num_ranks > 1)
    if is_large:
        # One rank has no unused rows.
        leaves = jax.tree.leaves(got), jax.tree.leaves(gradients(params, x))
        for a, b in zip(*map(jax.device_get, leaves), strict=True):
            assert np.linalg.norm(a - b) <= TOLERANCE["float32"] * np.linalg.norm(b)


def test_a_buffer_of_known_size_for_a_symbolic_number_of_tokens_is_exported():
    """Whether the buffer is mostly unused is then not known.

    JAX cannot run programs of several devices with symbolic shapes.
    """
    (tokens,) = jax.export.symbolic_shape("t")
    devices = jax.make_mesh((1,), (AXIS,), axis_types=(AxisType.Auto,))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=devices, in_specs=P(AXIS), out_specs=P(AXIS))
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
    """With weights_on="input", a row must be multiplied by its weight before the experts.

    Output and gradients are compared with those of each choice alone. There are biases, and choices
    that are dropped.
    """
    case = Case(most_ranks(num_ranks), T, H, K, E, "float32", 20, 1)
    x, topk_idx, weights, *experts, grad = make_operands(case)
    bias = jnp.asarray(np.random.default_rng(3).normal(size=(case.num_ranks, E // num_ranks, H)))
    sent = reference.dispatch(list(np.asarray(x)), list(topk_idx), **case.options)
    kept = np.stack([received.routes.rows for received in sent]) >= 0
    assert not np.all(kept)

    def on_rank(x, topk_idx, weights, bias, *experts_and_grad):
        *experts, grad = experts_and_grad

        def run(x, weights, bias, *experts):
            sent = case.dispatch(x, topk_idx, None)
            return routed_experts(sent, *experts, weights, wo_bias=bias, weights_on="input")

        out, vjp = jax.vjp(run, x, weights, bias, *experts)
        return out, *vjp(grad)

    def dense(x, weights, bias, *experts):
        flat = (w.reshape(-1, *w.shape[2:])[topk_idx] for w in experts)
        # The three arrays have shape [ranks, T, K, ...]: the matrices of each choice's expert.
        wi_0, wi_1, wo = flat
        seen = x[:, :, None] * weights[..., None]
        hidden = jax.nn.silu(jnp.einsum("rtkh,rtkhf->rtkf", seen, wi_0))
        hidden *= jnp.einsum("rtkh,rtkhf->rtkf", seen, wi_1)
        y = jnp.einsum("rtkf,rtkfh->rtkh", hidden, wo) + bias.reshape(-1, H)[topk_idx]
        return jnp.sum(jnp.where(kept[..., None], y, 0), axis=2)

    run = jax.jit(per_rank(on_rank, case.num_ranks, check_vma=check_vma))
    got = run(x, topk_idx, weights, bias, *experts, grad)
    want, vjp = jax.vjp(jax.jit(dense), x, weights, bias, *experts)
    for a, b in zip(got, (want, *vjp(grad)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_an_unknown_place_of_the_weights_is_named():
    case = Case(1, T, H, K, E, "float32", None, 1)
    x, topk_idx, weights, *experts, _ = (a[0] for a in make_operands(case))

    def run(x, topk_idx, weights, *experts):
        sent = case.dispatch(x, topk_idx, None)
        return routed_experts(sent, *experts, weights, weights_on="gate")

    with pytest.raises(ValueError, match="weights_on must be one of .* but is 'gate'"):
        jax.eval_shape(per_rank(run, 1), *(a[None] for a in (x, topk_idx, weights, *experts)))


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
    """The weights of masked or dropped choices must not matter, even if they are NaN.

    Their gradients must be zero.
    """
    kind, capacity, alignment = CASES[name]
    case = Case(most_ranks(4), T, H, K, E, "float32", capacity, alignment)
    x, topk_idx, weights, *others = make_operands(case, kind)
    sent = reference.dispatch(list(np.asarray(x)), list(topk_idx), **case.options)
    rows = np.stack([received.routes.rows for received in sent])
    assert np.any(rows < 0)
    run = output_and_gradients(case, None, None)
    want = run(x, topk_idx, weights, *others)
    got = run(x, topk_idx, jnp.where(rows < 0, jnp.nan, weights), *others)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.any(np.asarray(got[2])[rows < 0])


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_scan_and_checkpoint(check_vma):
    """jax.grad around the shard_map must be right for a scan of rematerialized layers."""
    case = Case(most_ranks(4), T, H, K, E, "float32", 40, 1)
    x, _, _, *experts, grad = make_operands(case)
    rng = np.random.default_rng(2)
    topk_idx = np.stack([routing("uniform", case, rng) for _ in range(2)], axis=1)
    weights = jnp.asarray(rng.uniform(0.1, 1, topk_idx.shape), jnp.float32)

    def total(style):
        def on_rank(x, topk_idx, weights, grad, *experts):
            def step(x, routing_of_layer):
                return x + layer(case, apart=style == "apart")(x, *routing_of_layer, *experts), None

            if style == "loop":
                x, _ = jax.lax.scan(jax.checkpoint(step), x, (topk_idx, weights))
            else:
                for i in range(2):
                    x, _ = step(x, (topk_idx[i], weights[i]))
            return jnp.sum(x * grad)

        run = per_rank(on_rank, case.num_ranks, check_vma)
        return lambda x, weights, *experts: jnp.sum(run(x, topk_idx, weights, grad, *experts))

    gradients = [
        jax.jit(jax.grad(total(style), tuple(range(5))))(x, weights, *experts)
        for style in ("loop", "apart")
    ]
    for loop, apart in zip(*gradients, strict=True):
        atol = TOLERANCE["float32"] * max(1, float(abs(apart).max()))
        np.testing.assert_allclose(loop, apart, rtol=0, atol=atol)


def test_matrices_replicated_over_another_axis():
    """Matrices replicated over another axis must get gradients summed over it."""
    shape = (2, most_ranks(4) // 2) if most_ranks(4) > 1 else (1, 1)
    mesh = jax.make_mesh(shape, ("data", AXIS), axis_types=(AxisType.Auto,) * 2)
    case = Case(shape[1], T, H, K, E)
    parts = [make_operands(case, seed=seed) for seed in range(shape[0])]
    experts, both = parts[0][3:6], ("data", AXIS)

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
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

    def slope(style):
        def squared(x, topk_idx, weights, grad, *experts):
            run = layer(case) if style == "routed" else functools.partial(dense, case)

            def value(x, weights, *experts):
                return jnp.sum(jnp.sin(run(x, topk_idx, weights, *experts)) * grad)

            gradients = jax.grad(value, (0, 1, 2))(x, weights, *experts)
            return sum(jnp.sum(gradient**2) for gradient in gradients)

        run = per_rank(squared, case.num_ranks)
        slope = jax.grad(
            lambda x, weights, wo: jnp.sum(run(x, topk_idx, weights, grad, *experts[:2], wo)),
            (0, 1, 2),
        )
        return jax.jit(slope)(x, weights, experts[2])

    for got, want in zip(slope("routed"), slope("dense"), strict=True):
        atol = 100 * TOLERANCE["float32"] * max(1, float(abs(want).max()))
        np.testing.assert_allclose(got, want, rtol=0, atol=atol)


def dense(case, x, topk_idx, weights, *experts):
    """Computes the layer on every rank with the matrices of all experts."""
    wi_0, wi_1, wo = (jax.lax.all_gather(w, AXIS, tiled=True) for w in experts)
    hidden = jax.nn.silu(jnp.einsum("th,ehf->tef", x, wi_0)) * jnp.einsum("th,ehf->tef", x, wi_1)
    y = jnp.einsum("tef,efh->teh", hidden, wo)
    return jnp.einsum("tk,tkh->th", weights, jnp.take_along_axis(y, topk_idx[:, :, None], 1))


def products(jaxpr):
    return str(jaxpr).count(" grouped_matmul[")


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

        return products(jax.make_jaxpr(per_rank(on_rank, 1))(x, topk_idx, weights, grad, *experts))

    assert again(apart=True) - again(apart=False) == 1, "the product by wo"


@needs_kernels
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.slow
def test_lowers_for_cuda_without_float32_rows(check_vma):
    """In the program for GPUs, no array with the rows of a receive buffer may be float32.

    Excepted are arrays within the gate, since XLA fuses it into one kernel.
    """
    ranks, tokens, hidden, mlp, capacity = 8, 256, 512, 256, 1152
    mesh = cuda_mesh((ranks,), (AXIS,))
    case = Case(ranks, tokens, hidden, 4, 32, "bfloat16", capacity, 1)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(AXIS), out_specs=P(), check_vma=check_vma
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


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(wo=jnp.zeros((E, F + 1, H))), ValueError, r"wo must have shape \(8, 64, 64\)"),
        (dict(wi_1=jnp.zeros((E, H, F), jnp.bfloat16)), TypeError, "wi_1 must have the dtype"),
        (dict(weights=jnp.zeros((T, K + 1))), ValueError, "topk_weights must have"),
        (
            dict(weights=jnp.zeros((T, K), jnp.int32)),
            TypeError,
            "topk_weights must be a floating array",
        ),
        (
            dict(weights=jnp.zeros((K, T)), weights_on="input"),
            ValueError,
            r"topk_weights must have .*\(3, 12\)",
        ),
        (
            dict(weights=jnp.zeros((T, K - 1)), weights_on="input"),
            ValueError,
            "topk_weights must have",
        ),
        (dict(matmul="cutlass"), ValueError, "implementation must be one of .*'cutlass'"),
        (dict(exchange="nccl"), ValueError, "implementation must be one of .*'nccl'"),
    ],
)
def test_errors(change, error, message):
    case = Case(1, T, H, K, E)
    names = ("x", "topk_idx", "weights", "wi_0", "wi_1", "wo")
    operands = dict(zip(names, (jnp.asarray(a[0]) for a in make_operands(case)[:6]), strict=True))
    implementations = {name: change.get(name) for name in ("exchange", "matmul")}
    operands |= {name: value for name, value in change.items() if name in names}

    def on_rank(x, topk_idx, weights, *experts):
        sent = case.dispatch(x, topk_idx, None)
        return routed_experts(
            sent,
            *experts,
            weights,
            implementation=implementations["exchange"],
            matmul_implementation=implementations["matmul"],
            weights_on=change.get("weights_on", "output"),
        )

    with pytest.raises(error, match=message):
        jax.eval_shape(per_rank(on_rank, 1), *(operand[None] for operand in operands.values()))
