"""Tests of experts with float8 matmuls: alone against the reference, and in layers on meshes."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import float8 as operands
from support.float8 import KINDS, error_of_norm
from support.kernels import needs_kernels
from support.meshes import expert_mesh, mesh
from support.selection import quick

import jax_ep
from jax_ep import MoEConfig, MoEParams, reference
from jax_ep.matmul import float8
from jax_ep.matmul.backend import Problem
from jax_ep.matmul.primitives import IMPLEMENTATIONS, default_platform

pytestmark = pytest.mark.usefixtures("exact_matmuls")

FLOAT8 = jnp.float8_e4m3fn
SIZES = [20, 0, 31, 9]
ROWS, H, F = 64, 256, 128
HERE = IMPLEMENTATIONS.available(Problem((H, F), float8.DTYPE, default_platform(), ROWS, True))


def numbers(kind="random", dtype=jnp.bfloat16):
    """Returns tokens, whose numbers are of a kind of `support.float8.KINDS`, and three matrices.

    The matrices wi_0, wi_1 and wo are stacked over the experts.
    """
    tokens = operands.numbers(kind, (ROWS, H))
    shapes = (len(SIZES), H, F), (len(SIZES), H, F), (len(SIZES), F, H)
    matrices = [operands.numbers("random", s, i) / s[1] ** 0.5 for i, s in enumerate(shapes)]
    return [jnp.asarray(array, dtype) for array in (tokens, *matrices)]


GROUP_SIZES = np.asarray(SIZES, np.int32)


@pytest.mark.parametrize("implementation", quick(HERE, HERE[0]))
@pytest.mark.parametrize("kind", quick(KINDS, "nan"))
def test_experts_and_gradients_are_those_of_the_reference(kind, implementation):
    tokens, *matrices = numbers(kind, jnp.float32)
    # The gate's gradient multiplies three of these numbers, which must not overflow in float32.
    if kind == "huge":
        tokens = tokens.at[5].multiply(1e-21)
    grad = operands.numbers("random", (ROWS, H), 9)

    def run(tokens, *matrices):
        return jax_ep.expert_mlp(
            tokens, *matrices, GROUP_SIZES, matmul_dtype=FLOAT8, implementation=implementation
        )

    out, vjp = jax.vjp(run, tokens, *matrices)
    tokens, *matrices = (np.asarray(each) for each in (tokens, *matrices))
    sizes = np.array(SIZES)
    want = (
        reference.float8_expert_mlp(tokens, sizes, *matrices),
        *reference.float8_expert_mlp_grad(grad, tokens, sizes, *matrices),
    )
    # Other orders of summation round a few hidden values to another float8 number. One such value
    # may change a row by 2^-8 of its norm, so the bound is on the mean square over all rows.
    bound = 2.0**-6 if implementation == "pallas" else 2.0**-9
    for mine, theirs in zip((out, *vjp(jnp.asarray(grad))), want, strict=True):
        mine = np.asarray(mine).astype(np.float64)
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
        # Compare the norms of each row of tokens, or of each expert's matrix.
        off, norms = (
            np.linalg.norm(np.nan_to_num(each, nan=0.0).reshape(len(each), -1), axis=1)
            for each in (mine - theirs, theirs)
        )
        relative = off / np.maximum(norms, 2.0**-117)
        assert np.sqrt(np.mean(relative**2)) <= bound


@needs_kernels
def test_kernels_may_be_named_for_matrices_of_any_dtype():
    """The kernels do not multiply float32, but these matrices are quantized first."""
    tokens, *matrices = numbers(dtype=jnp.float32)
    run = functools.partial(jax_ep.expert_mlp, implementation="pallas")
    quantized = functools.partial(run, matmul_dtype=FLOAT8)
    assert jax.eval_shape(quantized, tokens, *matrices, GROUP_SIZES).shape == tokens.shape
    with pytest.raises(ValueError, match="it multiplies bfloat16 and float16, not float32"):
        jax.eval_shape(run, tokens, *matrices, GROUP_SIZES)


def rounded_swiglu(gate, up):
    return (jax.nn.silu(gate) * up).astype(jnp.bfloat16)


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["activation of another dtype", "not gated", "biased"])
def test_gradients_are_near_those_of_bfloat16(kind):
    x, wi_0, wi_1, wo = numbers()
    weights = {"wi_0": wi_0, "wi_1": None if kind == "not gated" else wi_1, "wo": wo}
    if kind == "biased":
        weights["wi_0_bias"] = jnp.full((len(SIZES), F), 0.1, jnp.bfloat16)
        weights["wo_bias"] = jnp.ones((len(SIZES), H), jnp.bfloat16)
    activation = rounded_swiglu if kind == "activation of another dtype" else jax.nn.silu
    grad = jax.random.normal(jax.random.key(1), (ROWS, H), jnp.bfloat16)

    def run(matmul_dtype, x, weights):
        options = dict(group_sizes=GROUP_SIZES, activation=activation, matmul_dtype=matmul_dtype)
        return jax_ep.expert_mlp(x, **weights, **options)

    results = []
    for dtype in (None, FLOAT8):
        out, vjp = jax.vjp(functools.partial(run, dtype), x, weights)
        results.append(jax.tree.leaves((out, vjp(grad))))
    for want, got in zip(*results, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        # A result depends on three products. Each has two operands with rounding errors of 2^-5 on
        # average.
        assert error_of_norm(got, want) < 0.12
        assert np.isfinite(np.asarray(got).astype(np.float32)).all()


# F is 2 * 128, so that two ranks along a tensor axis have a block of 128 each.
EXPERTS, K, WIDE = 8, 2, 256
CONFIG = MoEConfig(
    num_experts=EXPERTS, num_experts_per_token=K, matmul_dtype=FLOAT8, dtype=jnp.float32
)
SPLIT = ("expert", "tensor")


def params_of(biased=False, **others):
    make = jax.nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
    shapes = {"gate": (H, EXPERTS), "wi_0": (EXPERTS, H, WIDE), "wi_1": (EXPERTS, H, WIDE)}
    shapes |= {"wo": (EXPERTS, WIDE, H)}
    params = {n: make(jax.random.key(i), shape) for i, (n, shape) in enumerate(shapes.items())}
    widths = {"wi_0_bias": WIDE, "wi_1_bias": WIDE, "wo_bias": H} if biased else {}
    for name, width in widths.items():
        params[name] = jax.random.normal(jax.random.key(width), (EXPERTS, width))
    return MoEParams.of(**params | others)


def x_of(shape=(8, 8)):
    return jax.random.normal(jax.random.key(9), (*shape, H))


def loss(params, x, config, once=True):
    quantized = jax_ep.quantize_experts(params, config) if once else None
    out, metrics = jax_ep.moe_layer(params, x, config, quantized_experts=quantized)
    return jnp.sum(jnp.sin(jnp.arange(out.size).reshape(out.shape)) * out), (out, metrics)


def run(params, x, config, once=True):
    """Returns the output, and the gradients of the parameters and of x."""
    step = functools.partial(loss, config=config, once=once)
    grads, (out, _) = jax.jit(jax.grad(step, argnums=(0, 1), has_aux=True))(params, x)
    return jax.device_get((out, grads))


def assert_near(got, want, bound):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert error_of_norm(a, b) < bound, (jax.tree_util.keystr(path), error_of_norm(a, b))


@functools.cache
def without_mesh(biased, options):
    return run(params_of(biased), x_of(), dataclasses.replace(CONFIG, **dict(options)))


# For the matrices' gradients, an expert's rows are quantized in blocks of several rows. If its
# tokens are on several ranks, the blocks have other rows than without a mesh. The gradients then
# differ by the rounding errors of both, each of two operands with 2^-5 on average.
OTHER_BLOCKS = 2 * 2**0.5 * 2.0**-5
WIRE, TENSOR = dict(wire_dtype=FLOAT8), dict(tensor_axis="tensor")
SPLIT_TOKENS = dict(batch_axes=SPLIT)
OF_TWO = dict(activation=lambda gate, up: jnp.tanh(gate) * (up + 1))
HOSTS = ("host", "expert")
# A case is (mesh shape, axes, options with and without the mesh, options on the mesh only).
LAYERS = {
    "plain": ((4,), ("expert",), {}, WIRE),
    "clamp": ((4,), ("expert",), dict(clamp=0.5), WIRE),
    "activation of two": ((4,), ("expert",), OF_TWO, WIRE),
    # Float8 on the wire would round rows that are multiplied by weights once more.
    "weights on input": ((4,), ("expert",), dict(weights_on="input"), {}),
    "biases": ((2, 2), SPLIT, {}, TENSOR),
    "tensor axis": ((2, 2), SPLIT, {}, WIRE | TENSOR),
    "split tokens": ((2, 2), SPLIT, {}, WIRE | TENSOR | SPLIT_TOKENS),
    "hosts": ((2, 2), HOSTS, {}, WIRE | dict(expert_axis=HOSTS)),
    "data": ((2, 2), ("data", "expert"), {}, WIRE),
    "no experts' axis": ((4,), ("data",), {}, WIRE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_a_mesh_is_that_without(name, monkeypatch):
    shape, axes, options, on_mesh = LAYERS[name]
    if "host" in axes:
        monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", "2")
    biased = name == "biases"
    want_out, (want, want_dx) = without_mesh(biased, tuple(options.items()))
    config = dataclasses.replace(CONFIG, **options, **on_mesh)
    with jax.set_mesh(mesh(shape, axes)):
        out, (grads, dx) = run(params_of(biased), x_of(), config)
    assert_near((out, dx), (want_out, want_dx), 2.0**-10)
    of_matrices = OTHER_BLOCKS if "data" in axes else 2.0**-10
    for parameter, grad in grads._asdict().items():
        if grad is not None:
            bound = of_matrices if parameter in ("wi_0", "wi_1", "wo") else 2.0**-10
            assert_near(grad, getattr(want, parameter), bound)


@pytest.mark.parametrize("wire_dtype", [None, FLOAT8])
def test_tokens_are_sent_as_float8(wire_dtype):
    """With and without a wire_dtype, tokens that float8 matmuls multiply are sent as float8."""
    config = dataclasses.replace(CONFIG, wire_dtype=wire_dtype)
    with jax.set_mesh(expert_mesh(4)):
        layer = functools.partial(jax_ep.moe_layer, config=config)
        traced = str(jax.make_jaxpr(layer)(params_of(), x_of()))
    assert re.search(r"f8_e4m3fn[^=]*= ep_dispatch\[", traced)


@pytest.mark.slow
def test_the_gradient_of_a_symbolic_number_of_tokens_is_exported():
    """XLA multiplies a symbolic number of rows, so the result is that of XLA's matmuls."""
    (tokens,) = jax.export.symbolic_shape("t")

    def grad_of(**changes):
        config = dataclasses.replace(CONFIG, **changes)
        loss = lambda params, x: jnp.sum(jax_ep.moe_layer(params, x, config)[0] ** 2)  # noqa: E731
        return jax.jit(jax.grad(loss))

    given = params_of(), x_of((24,))
    x = jax.ShapeDtypeStruct((tokens, H), jnp.float32)
    got = jax.export.export(grad_of())(given[0], x).call(*given)
    assert_near(got, grad_of(matmul_implementation="xla")(*given), 2.0**-10)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", HERE)
def test_tokens_that_are_quantized_give_the_same(implementation):
    """Rows of a quantized dispatch are multiplied as they are; matrices get their gradients."""
    tokens, *matrices = numbers()
    quantized = jax_ep.quantize(tokens, jax_ep.formats.FLOAT8_ROWS)

    def run(tokens, matrices, matmul_dtype=FLOAT8):
        return jax_ep.expert_mlp(
            tokens, *matrices, GROUP_SIZES, matmul_dtype=matmul_dtype, implementation=implementation
        )

    @jax.jit
    def values_and_gradients(tokens):
        out, vjp = jax.vjp(functools.partial(run, tokens), matrices)
        return out, vjp(out)

    got, want = values_and_gradients(quantized), values_and_gradients(tokens)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert np.any(got[0])
    with pytest.raises(TypeError, match=r"tokens is stored quantized, .* has no gradient"):
        jax.vjp(run, quantized, matrices)
    with pytest.raises(TypeError, match=r"tokens must be .*, but is a QuantizedArray"):
        run(quantized, matrices, matmul_dtype=None)


@pytest.mark.parametrize(
    "format",
    [
        jax_ep.formats.FLOAT8_ROWS,
        jax_ep.formats.Transposed.of(jax_ep.formats.Float8.of(jnp.float8_e5m2, (1, 64))),
    ],
    ids=["as operands", "transposed"],
)
def test_tokens_in_any_format_and_dtype(format):
    """Tokens of other formats are quantized again; NumPy may have quantized them from float64."""
    x, *matrices = (np.asarray(each, np.float64) for each in numbers(dtype=jnp.float32))
    tokens = jax_ep.quantize(x, format)
    got, want = (
        jax_ep.expert_mlp(each, *matrices, GROUP_SIZES, matmul_dtype=FLOAT8)
        for each in (tokens, tokens.dequantize(np.float64))
    )
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=0, atol=0.02 * np.abs(want).max())


GIVEN = ["rows", "layer", "chunks", "stored", "gate"]
SECOND = {
    "grad of grad": lambda f, x: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2))(x),
    "jacrev of grad": lambda f, x: jax.jacrev(jax.grad(f))(x),
    "in jit": lambda f, x: jax.jit(jax.grad(lambda x: jnp.sum(jax.jit(jax.grad(f))(x))))(x),
    "of the cotangent": lambda f, x: jax.grad(lambda g: jnp.sum(jax.vjp(f, x)[1](g)[0]))(f(x)),
}


@pytest.mark.parametrize("second", quick(SECOND, "grad of grad"))
@pytest.mark.parametrize("given", quick(GIVEN, "rows"))
def test_second_derivatives_are_refused_by_the_options_name(given, second):
    """Without the refusal, derivatives that pass through a quantization would be zero."""
    rows, *matrices = numbers()
    config = dataclasses.replace(CONFIG, token_chunks=2 if given == "chunks" else 1)
    params = params_of()
    if given == "stored":
        store = lambda w: jax_ep.quantize(w, jax_ep.formats.FLOAT8_MATRICES)  # noqa: E731
        params = jax.tree.map(store, params._replace(gate=None))._replace(gate=params.gate)

    def run(x):
        if given == "rows":
            return jnp.sum(jax_ep.expert_mlp(x, *matrices, GROUP_SIZES, matmul_dtype=FLOAT8))
        of = (params._replace(gate=x), x_of()) if given == "gate" else (params, x)
        return jnp.sum(jax_ep.moe_layer(*of, config)[0])

    x = {"rows": rows, "gate": params.gate}.get(given, x_of())
    with pytest.raises(TypeError, match="matmul_dtype must be None where second derivatives"):
        second(run, x)


NARROW = dict(wi_0=np.ones((EXPERTS, H, 64)), wi_1=np.ones((EXPERTS, H, 64)))
NARROW |= dict(wo=np.ones((EXPERTS, 64, H)))
WHOLE = "wi_0 must have whole blocks of 128 x 128"


@pytest.mark.parametrize(
    ("changes", "params", "error", "message"),
    [
        (dict(matmul_dtype=None), {}, ValueError, "config.matmul_dtype must be a dtype"),
        (dict(matmul_dtype=jnp.bfloat16), {}, ValueError, "matmul_dtype must be None or float8_e4"),
        ({}, NARROW, ValueError, WHOLE),
        (None, {}, TypeError, "config must be MoEConfig"),
        ({}, None, TypeError, "params must be MoEParams"),
    ],
)
def test_experts_that_cannot_be_quantized_are_refused(changes, params, error, message):
    config = None if changes is None else dataclasses.replace(CONFIG, **changes)
    params = {} if params is None else params_of(**params)
    with pytest.raises(error, match=message):
        jax_ep.quantize_experts(params, config)


@pytest.mark.slow
def test_quantized_experts_must_fit():
    config, quantized = dataclasses.replace(CONFIG, matmul_dtype=None), params_of().wi_0
    with pytest.raises(TypeError, match="quantized_experts must be None or what"):
        jax_ep.moe_layer(params_of(), x_of(), CONFIG, quantized_experts=quantized)
    quantized = jax_ep.quantize_experts(params_of(), CONFIG)
    with pytest.raises(ValueError, match="quantized_experts must be None where matmul_dtype"):
        jax_ep.moe_layer(params_of(), x_of(), config, quantized_experts=quantized)
    for token_chunks in (1, 2):
        config = dataclasses.replace(CONFIG, token_chunks=token_chunks)
        with pytest.raises(ValueError, match=WHOLE):
            jax_ep.moe_layer(params_of(**NARROW), x_of(), config)
    of_rank = rf"wi_0 on a rank must have whole blocks .* \({EXPERTS // 2}, {H}, 64\)"
    with jax.set_mesh(expert_mesh(2)), pytest.raises(ValueError, match=of_rank):
        jax_ep.moe_layer(params_of(**NARROW), x_of(), CONFIG)
    with jax.set_mesh(expert_mesh(3)), pytest.raises(ValueError, match="num_experts must be a mul"):
        jax_ep.quantize_experts(params_of(), CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_experts_are_quantized_in_the_shard_map_of_the_caller(check_vma):
    tokens, axes = P(("expert", "data")), ("expert", "data")
    config = dataclasses.replace(CONFIG, batch_axes=axes)

    def layer(params, x):
        quantized = jax_ep.quantize_experts(params, config)
        return jax_ep.moe_layer(params, x, config, quantized_experts=quantized)[0]

    specs = MoEParams(gate=P(), wi_0=P("expert"), wi_1=P("expert"), wo=P("expert"))
    x = x_of().reshape(-1, H)
    run = jax.shard_map(
        layer,
        mesh=mesh((2, 2), axes),
        in_specs=(specs, tokens),
        out_specs=tokens,
        check_vma=check_vma,
    )
    out = jax.jit(run)(params_of(), x)
    assert_near(out, jax_ep.moe_layer(params_of(), x, CONFIG)[0], 2.0**-10)


KEPT = {"dispatched_tokens": H, "expert_pre_activations": 2 * WIDE}


def kept(function, *args):
    """Returns shapes and dtypes of the residuals that a function saves for its backward pass."""
    return jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], *args))


def num_bytes(arrays):
    return sum(each.size * each.dtype.itemsize for each in arrays)


@pytest.mark.parametrize("wire_dtype", quick([None, FLOAT8], None))
@pytest.mark.parametrize("names", [None, (), ("dispatched_tokens",), tuple(KEPT)], ids=str)
def test_what_is_kept_for_the_backward_pass_is_float8(names, wire_dtype):
    """`names` are the rows that a policy of jax.checkpoint keeps; None is no jax.checkpoint."""
    config = dataclasses.replace(CONFIG, wire_dtype=wire_dtype, dtype=jnp.bfloat16)
    params, x = params_of(), x_of().astype(jnp.bfloat16)
    quantized = None if names is None else jax_ep.quantize_experts(params, config)

    def layer(params, x, quantized):
        return jnp.sum(jax_ep.moe_layer(params, x, config, quantized_experts=quantized)[0])

    if names is not None:
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        layer = jax.checkpoint(layer, policy=policy)
    residuals = kept(lambda params, x: layer(params, x, quantized), params, x)
    rows = -(-x.shape[0] * x.shape[1] * K // 8) * 8
    of_rows = [each for each in residuals if each.ndim > 1 and each.shape[0] == rows]
    assert {each.dtype.name for each in of_rows} <= {"float8_e4m3fn", "float32"}
    widths = KEPT.values() if names is None else map(KEPT.get, names)
    # Float8 rows come with float32 scales, one per 128 values.
    assert num_bytes(of_rows) == rows * sum(widths) * (1 + 4 / 128)
    matrices = [each for each in residuals if each.ndim == 3 and each.shape[0] == EXPERTS]
    if names is None:
        # Each matrix is kept in one order of its axes.
        assert num_bytes(matrices) == 3 * EXPERTS * H * WIDE * (1 + 4 / 128**2)
    else:
        given = jax.tree.leaves((params, quantized))
        assert num_bytes(matrices) <= num_bytes(each for each in given if each.ndim == 3)
