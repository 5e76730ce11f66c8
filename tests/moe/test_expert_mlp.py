"""Tests of the gated expert MLP against float64 NumPy, and of its residuals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from support.matmuls import implementations_with_dtypes
from support.selection import quick

from jax_ep.moe.expert_mlp import expert_mlp

H, F = 64, 128
TOLERANCE = {"float32": 1e-5 if jax.default_backend() == "cpu" else 3e-3, "bfloat16": 3e-2}
AVAILABLE = implementations_with_dtypes((H, F), TOLERANCE)
NUM_ROWS = 400
# All lists have one length, so that one compiled program runs them all.
CASES = {
    "even": [80, 80, 80, 80, 80],
    "empty and huge": [0, 300, 1, 0, 40],
    "far short of R": [2, 0, 9, 0, 0],
    "all empty": [0, 0, 0, 0, 0],
}


# Options of `expert_mlp` that set the hidden unit. Those of `BIASED` also have biases.
UNITS: dict = {
    "plain": {},
    "another activation": dict(activation=jnp.tanh),
    "two arrays and clamp": dict(activation=lambda gate, up: (up + 1) * jnp.tanh(gate)),
    "not gated": dict(activation=lambda h: jax.nn.relu(h) ** 2),
}
BIASED = ("two arrays and clamp", "not gated")


def operands(num_rows, sizes, dtype, unit="plain", seed=0):
    """Returns tokens, a dictionary of matrices and biases, the group sizes, and a cotangent."""
    rng = np.random.default_rng(seed)
    tokens, grad = rng.standard_normal((2, num_rows, H))
    tokens[sum(sizes) :] = grad[sum(sizes) :] = np.nan
    shapes = dict(wi_0=(H, F), wi_1=(H, F), wo=(F, H))
    if unit == "not gated":
        del shapes["wi_1"]
    weights = {
        name: jnp.asarray(rng.standard_normal((len(sizes), *shape)) / np.sqrt(shape[0]), dtype)
        for name, shape in shapes.items()
    }
    if unit in BIASED:
        for name, (_, width) in shapes.items():
            weights[f"{name}_bias"] = jnp.asarray(rng.standard_normal((len(sizes), width)))
    tokens, grad = (jnp.asarray(array, dtype) for array in (tokens, grad))
    return tokens, weights, jnp.asarray(sizes, jnp.int32), grad


def clamp_of(unit, dtype):
    """Returns the bound to which pre-activations are clamped, or None.

    For bfloat16 no value reaches the bound, since its rounding could decide what is clamped.
    """
    return (1.0 if dtype == jnp.float32 else 30.0) if "clamp" in unit else None


def mlp(tokens, weights, sizes, unit="plain", implementation=None):
    given = dict(wi_1=None) | weights
    options = UNITS[unit] | dict(clamp=clamp_of(unit, tokens.dtype), implementation=implementation)
    return expert_mlp(tokens, **given, group_sizes=sizes, **options)


def in_float64(tokens, weights, sizes, unit, clamp):
    """Computes `mlp` row by row, by operations that JAX differentiates.

    Each row is multiplied by the matrices of its group. Rows past the last group are zeros.
    """
    groups = np.repeat(np.arange(len(sizes)), sizes)

    def product(x, name):
        y = jnp.einsum("rk,rkn->rn", x, weights[name][groups])
        return y + weights[f"{name}_bias"][groups] if unit in BIASED else y

    x = tokens[: len(groups)]
    if unit == "not gated":
        hidden = jnp.maximum(product(x, "wi_0"), 0) ** 2
    else:
        gate, up = product(x, "wi_0"), product(x, "wi_1")
        if unit == "plain":
            hidden = gate / (1 + jnp.exp(-gate)) * up
        elif unit == "another activation":
            hidden = jnp.tanh(gate) * up
        else:
            hidden = (jnp.clip(up, -clamp, clamp) + 1) * jnp.tanh(jnp.minimum(gate, clamp))
    return jnp.zeros(tokens.shape).at[: len(groups)].set(product(hidden, "wo"))


def expected(tokens, weights, sizes, grad, unit="plain"):
    """Returns the output, and the gradients of tokens and weights, in float64."""
    sizes, clamp = np.asarray(sizes), clamp_of(unit, tokens.dtype)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: np.asarray(a).astype(np.float64), (tokens, weights, grad))
        tokens, weights, grad = jax.tree.map(jnp.nan_to_num, wide)
        function = functools.partial(in_float64, sizes=sizes, unit=unit, clamp=clamp)
        out, vjp = jax.vjp(function, tokens, weights)
        return jax.device_get((out, *vjp(grad)))


def assert_close(got, want, dtype):
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype] * max(1, abs(want).max()))


@functools.partial(jax.jit, static_argnames=("unit", "implementation"))
def output_and_gradients(tokens, weights, sizes, grad, unit="plain", implementation=None):
    run = functools.partial(mlp, sizes=sizes, unit=unit, implementation=implementation)
    out, vjp = jax.vjp(run, tokens, weights)
    return out, *vjp(grad)


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("unit", quick([*UNITS], "two arrays and clamp"))
@pytest.mark.parametrize("case", quick([*CASES], "empty and huge"))
@pytest.mark.parametrize(("implementation", "dtype"), quick(AVAILABLE, AVAILABLE[0]))
def test_output_and_gradients(implementation, dtype, case, unit):
    arrays = operands(NUM_ROWS, CASES[case], dtype, unit)
    # The gradient jumps at the clamp, and TF32 could round values to its other side.
    with jax.default_matmul_precision("highest"):
        out, dtokens, dweights = output_and_gradients(*arrays, unit, implementation)
    want = expected(*arrays, unit)
    assert out.dtype == dtokens.dtype == jnp.dtype(dtype)
    total = sum(CASES[case])
    assert not np.any(np.asarray(out)[total:]) and not np.any(np.asarray(dtokens)[total:])
    assert_close(out, want[0], dtype)
    assert_close(dtokens, want[1], dtype)
    empty = np.asarray(CASES[case]) == 0
    for name, gradient in dweights.items():
        assert gradient.dtype == arrays[1][name].dtype
        assert_close(gradient, want[2][name], dtype)
        assert not np.any(np.asarray(gradient)[empty])


@pytest.mark.slow
def test_float64_experts_have_float64_biases():
    with jax.enable_x64(True):
        arrays = operands(NUM_ROWS, CASES["empty and huge"], "float64", "not gated")
        got, want = output_and_gradients(*arrays, "not gated"), expected(*arrays, "not gated")
        for mine, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            assert mine.dtype == jnp.float64
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-12 * max(1, abs(other).max()))


def saved_shapes(function, *args):
    """Returns the shapes of a function's residuals, without its arguments."""
    _, vjp = jax.vjp(function, *args)
    mine = {id(x) for x in jax.tree.leaves(args)}
    leaves = [x for x in jax.tree.leaves(vjp) if hasattr(x, "shape") and id(x) not in mine]
    return sorted(x.shape for x in leaves if x.ndim > 1)


def test_what_is_kept_for_the_backward_pass():
    rows = 80
    tokens, weights, sizes, _ = operands(rows, [50, 30], "float32")

    def layer(x, weights):
        # Like dispatch, this makes a new array, so that it counts as a residual.
        return jnp.sum(mlp(checkpoint_name(jnp.sin(x), "made"), weights, sizes))

    kept = saved_shapes(jax.jit(layer), tokens, weights)
    assert kept.count((rows, F)) == 2, kept
    names = jax.checkpoint_policies.save_only_these_names

    def kept_under(*to_save):
        eqns = jax.make_jaxpr(
            lambda *a: jax.vjp(jax.checkpoint(layer, policy=names(*to_save)), *a)[1](1.0)
        )(tokens, weights)
        return [str(eqns).count(f"keep={keep}") for keep in (False, True)]

    # If nothing is kept, the forward pass makes the hidden values only, and the backward pass
    # computes the pre-activations again.
    assert kept_under() == [1, 1]
    assert kept_under("expert_pre_activations") == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_a_cotangent_that_is_no_number_stays_in_its_group(value):
    tokens, weights, sizes, grad = operands(8, [3, 5], "float32")
    biases = dict(wi_0_bias=jnp.ones((2, F)), wo_bias=jnp.ones((2, H)))

    def layer(biases):
        return mlp(tokens, weights | biases, sizes)

    _, vjp = jax.vjp(layer, biases)
    (got,), (want,) = vjp(grad.at[0, 0].set(value)), vjp(grad)
    for name, mine in got.items():
        np.testing.assert_array_equal(mine[1], want[name][1], name)
        assert not np.all(np.isfinite(mine[0]))
    np.testing.assert_array_equal(got["wo_bias"][0, 0], value)
    np.testing.assert_array_equal(got["wo_bias"][0, 1:], want["wo_bias"][0, 1:])


def test_arrays_may_be_of_numpy():
    tokens, weights, sizes, _ = operands(8, [3, 5], "float32", "not gated")
    arrays = jax.device_get(dict(tokens=tokens, wi_1=None, **weights))
    sizes = np.asarray(sizes)
    got = expert_mlp(**arrays, group_sizes=sizes)
    want = expert_mlp(**jax.tree.map(jnp.asarray, arrays), group_sizes=jnp.asarray(sizes))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "error", "message"),
    [
        ("tokens", (8, H, 1), "float32", ValueError, r"tokens must be .*\(8, 64, 1\)"),
        ("tokens", (8, H + 2), "float32", ValueError, r"tokens must have .*\(8, 64\).*\(8, 66\)"),
        ("tokens", (8, H), "int32", TypeError, r"tokens must be a floating array"),
        ("wi_1", (2, H, F + 1), "float32", ValueError, r"wi_1 must have shape \(2, 64, 128\)"),
        ("wi_1", (2, H, F), "bfloat16", TypeError, r"wi_1 must have the dtype of tokens, float32"),
        ("wo", (2, H, F), "float32", ValueError, r"wo must have shape \(2, 128, 64\)"),
        ("wi_1_bias", (2, F + 1), "float32", ValueError, r"wi_1_bias must have shape \(2, 128\)"),
        ("wo_bias", (H,), "float32", ValueError, r"wo_bias must be .*\[L, H\].* \(64,\)"),
        ("wi_0_bias", (2, F), "int32", TypeError, "wi_0_bias must be a floating array"),
        ("group_sizes", (3,), "int32", ValueError, r"group_sizes must have shape \(2,\)"),
        ("group_sizes", (2,), "float32", TypeError, "group_sizes must be an integer .*float32"),
    ],
)
def test_errors(name, shape, dtype, error, message):
    arrays = dict(tokens=jnp.zeros((8, H)), group_sizes=jnp.zeros(2, jnp.int32))
    arrays |= dict.fromkeys(("wi_0", "wi_1"), jnp.zeros((2, H, F))) | dict(wo=jnp.zeros((2, F, H)))
    with pytest.raises(error, match=message):
        expert_mlp(**arrays | {name: jnp.zeros(shape, dtype)})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(activation="silu"), TypeError, "activation must be a function of gate, or .* 'silu'"),
        (dict(clamp=-1.0), ValueError, "clamp must be above 0.* or None, but is -1.0"),
        (dict(wi_1=None, activation=lambda a, b: a * b), ValueError, "activation .* of one array"),
        (dict(wi_1=None, wi_1_bias=np.ones((2, F))), ValueError, "wi_1_bias must be None where"),
        (dict(activation=lambda a: a[:1]), ValueError, r"activation must .*\(8, 128\).*\(1, 128\)"),
        (dict(activation=lambda a: a > 0), ValueError, "activation must .* returns .*bool"),
        (dict(activation=lambda a: None), ValueError, "activation must be .* but returns None"),
        (dict(activation=lambda a, b: a.T), ValueError, r"activation must be .*\(128, 8\)"),
        (dict(activation=lambda: 1.0), TypeError, "activation failed for an array: .* 0 pos"),
    ],
)
def test_errors_of_units(options, error, message):
    given = dict(wi_1=jnp.zeros((2, H, F))) | options
    arrays = jnp.zeros((8, H)), jnp.zeros((2, H, F)), given.pop("wi_1"), jnp.zeros((2, F, H))
    with pytest.raises(error, match=message):
        expert_mlp(*arrays, jnp.zeros(2, jnp.int32), **given)


@pytest.mark.parametrize("matmul_dtype", quick([None, jnp.float8_e4m3fn], None))
@pytest.mark.parametrize("num_rows", [0, 16])
def test_without_tokens_the_gradients_are_zero(num_rows, matmul_dtype):
    """There may be no rows, or none of a group."""
    shapes = dict(tokens=(num_rows, 128), wi_0=(2, 128, 256), wi_1=(2, 128, 256), wo=(2, 256, 128))
    operands = {name: jnp.ones(shape) for name, shape in shapes.items()}
    operands |= dict(wi_0_bias=jnp.ones((2, 256)), wo_bias=jnp.ones((2, 128)))

    def run(operands):
        sizes = jnp.zeros(2, jnp.int32)
        return expert_mlp(**operands, group_sizes=sizes, matmul_dtype=matmul_dtype)

    out, pull = jax.vjp(jax.jit(run), operands)
    assert out.shape == (num_rows, 128) and out.dtype == jnp.float32
    for name, grad in pull(jnp.ones_like(out))[0].items():
        np.testing.assert_array_equal(grad, np.zeros(operands[name].shape), err_msg=name)
