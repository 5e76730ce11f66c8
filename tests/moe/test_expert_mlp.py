"""Tests of the gated expert MLP against float64 NumPy, and of its residuals."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P
from support import meshes
from support.kernels import needs_kernels
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


def operands(num_rows, sizes, dtype, seed=0):
    rng = np.random.default_rng(seed)
    groups = len(sizes)
    tokens = rng.standard_normal((num_rows, H))
    grad = rng.standard_normal((num_rows, H))
    tokens[sum(sizes) :] = np.nan
    grad[sum(sizes) :] = np.nan
    wi_0 = rng.standard_normal((groups, H, F)) / np.sqrt(H)
    wi_1 = rng.standard_normal((groups, H, F)) / np.sqrt(H)
    wo = rng.standard_normal((groups, F, H)) / np.sqrt(F)
    arrays = [jnp.asarray(x, dtype) for x in (tokens, wi_0, wi_1, wo)]
    return arrays, jnp.asarray(sizes, jnp.int32), jnp.asarray(grad, dtype)


def expected(weights, sizes, grad):
    """Returns the output and the gradients of tokens, wi_0, wi_1 and wo, in float64."""
    tokens, wi_0, wi_1, wo, grad = (np.asarray(x).astype(np.float64) for x in (*weights, grad))
    out, dtokens = np.zeros(tokens.shape), np.zeros(tokens.shape)
    dwi_0, dwi_1, dwo = np.zeros(wi_0.shape), np.zeros(wi_1.shape), np.zeros(wo.shape)
    start = 0
    for e, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        start += size
        x, g = tokens[rows], grad[rows]
        a, b = x @ wi_0[e], x @ wi_1[e]
        sigmoid = 1 / (1 + np.exp(-a))
        silu, dsilu = a * sigmoid, sigmoid * (1 + a * (1 - sigmoid))
        out[rows] = (silu * b) @ wo[e]
        dh = g @ wo[e].T
        da, db = dh * b * dsilu, dh * silu
        dtokens[rows] = da @ wi_0[e].T + db @ wi_1[e].T
        dwi_0[e], dwi_1[e], dwo[e] = x.T @ da, x.T @ db, (silu * b).T @ g
    return out, dtokens, dwi_0, dwi_1, dwo


def assert_close(got, want, dtype):
    assert got.dtype == jnp.dtype(dtype)
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype] * max(1, abs(want).max()))


@functools.partial(jax.jit, static_argnums=3)
def output_and_gradients(weights, sizes, grad, implementation):
    out, vjp = jax.vjp(lambda *w: expert_mlp(*w, sizes, implementation=implementation), *weights)
    return out, *vjp(grad)


@pytest.mark.parametrize("case", quick([*CASES], "empty and huge"))
@pytest.mark.parametrize(("implementation", "dtype"), AVAILABLE)
def test_output_and_gradients(implementation, dtype, case):
    weights, sizes, grad = operands(NUM_ROWS, CASES[case], dtype)
    total = sum(CASES[case])
    got = output_and_gradients(weights, sizes, grad, implementation)
    for mine, want in zip(got, expected(weights, sizes, grad), strict=True):
        assert_close(mine, want, dtype)
    assert not np.any(np.asarray(got[0])[total:])
    assert not np.any(np.asarray(got[1])[total:])
    empty = np.asarray(sizes) == 0
    for gradient in got[2:]:
        assert not np.any(np.asarray(gradient)[empty])


def test_another_activation():
    (tokens, *weights), sizes, _ = operands(40, [10, 30], "float32")
    got = expert_mlp(tokens, *weights, sizes, activation=jnp.tanh)
    for start, stop, e in ((0, 10, 0), (10, 40, 1)):
        x = np.asarray(tokens[start:stop])
        wi_0, wi_1, wo = (np.asarray(w[e]) for w in weights)
        want = (np.tanh(x @ wi_0) * (x @ wi_1)) @ wo
        assert_close(got[start:stop], want, "float32")


def test_an_activation_without_a_hash():
    class Tanh:
        __hash__ = None

        def __call__(self, x):
            return jnp.tanh(x)

    (tokens, *weights), sizes, _ = operands(40, [10, 30], "float32")
    got, want = (
        jax.jit(jax.grad(lambda x, f=f: jnp.sum(expert_mlp(x, *weights, sizes, activation=f))))(
            tokens
        )
        for f in (Tanh(), jnp.tanh)
    )
    np.testing.assert_array_equal(got, want)


def unusual(weights, seed=0, gated=True):
    """Returns two dicts of arguments of `expert_mlp`: random biases, and unusual functions.

    The functions are a custom gating with a clamp or, without `gated`, a custom activation.
    `weights` are the matrices of the MLP.
    """
    rng = np.random.default_rng(seed)
    groups, _, mlp = weights[0].shape
    shapes = dict(wi_0_bias=mlp, wi_1_bias=mlp, wo_bias=H)
    biases = {n: jnp.asarray(rng.standard_normal((groups, d))) for n, d in shapes.items()}
    if not gated:
        del biases["wi_1_bias"]
        return biases, dict(activation=lambda h: jax.nn.relu(h) ** 2)
    return biases, dict(gating=lambda gate, up: (up + 1) * jnp.tanh(gate), clamp=clamp_of(weights))


def clamp_of(weights):
    """Returns the bound to which pre-activations are clamped in tests with these matrices.

    For bfloat16 no value reaches the bound, since its rounding could decide what is clamped.
    """
    return 1.0 if weights[0].dtype == jnp.float32 else 30.0


@functools.partial(jax.jit, static_argnames="gated")
def unusual_results(tokens, weights, biases, sizes, grad, gated=True):
    _, options = unusual(weights, gated=gated)

    def layer(tokens, weights, biases):
        wi_0, wi_1, wo = weights if gated else (weights[0], None, weights[1])
        return expert_mlp(tokens, wi_0, wi_1, wo, sizes, **biases, **options)

    out, vjp = jax.vjp(layer, tokens, weights, biases)
    return out, *vjp(grad)


def unusual_reference(tokens, weights, biases, sizes, clamp, gated=True):
    """Computes the output of `unusual_results` row by row, by operations that JAX differentiates.

    Each row is multiplied by the matrices of its group. Rows past the last group are zeros.
    """
    groups = np.repeat(np.arange(len(sizes)), sizes)
    x, pre = tokens[: len(groups)], []
    for i in range(2 if gated else 1):
        pre.append(jnp.einsum("rh,rhf->rf", x, weights[i][groups]) + biases[f"wi_{i}_bias"][groups])
    if gated:
        hidden = (jnp.clip(pre[1], -clamp, clamp) + 1) * jnp.tanh(jnp.minimum(pre[0], clamp))
    else:
        hidden = jnp.maximum(pre[0], 0) ** 2
    out = jnp.einsum("rf,rfh->rh", hidden, weights[-1][groups]) + biases["wo_bias"][groups]
    return jnp.zeros(tokens.shape).at[: len(groups)].set(out)


@pytest.mark.parametrize("gated", quick([True, False], True))
@pytest.mark.parametrize("case", quick(["empty and huge", "all empty"], "empty and huge"))
@pytest.mark.parametrize("dtype", quick([*TOLERANCE], "float32"))
def test_biases_clamps_and_units_of_ones_own(dtype, case, gated):
    (tokens, *weights), sizes, grad = operands(NUM_ROWS, CASES[case], dtype)
    weights = weights if gated else [weights[0], weights[2]]
    biases, _ = unusual(weights, gated=gated)
    # The gradient jumps at the clamp, and TF32 could round values to its other side.
    with jax.default_matmul_precision("highest"):
        out, dtokens, dweights, dbiases = unusual_results(
            tokens, weights, biases, sizes, grad, gated=gated
        )
    total = sum(CASES[case])
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), (tokens, weights, biases, grad))
    there = (np.arange(NUM_ROWS) < total)[:, None]
    wide = (jnp.where(there, wide[0], 0), *wide[1:3], jnp.where(there, wide[3], 0))
    reference = functools.partial(
        unusual_reference, sizes=np.asarray(sizes), clamp=clamp_of(weights), gated=gated
    )
    with jax.default_matmul_precision("highest"):
        want, vjp = jax.vjp(reference, *wide[:3])
        want_tokens, *want_rest = vjp(wide[3])
    assert not np.any(np.asarray(out)[total:]) and not np.any(np.asarray(dtokens)[total:])
    assert_close(out, np.asarray(want), dtype)
    assert_close(dtokens, np.asarray(want_tokens), dtype)
    for mine, wanted in zip(dweights, want_rest[0], strict=True):
        assert_close(mine, np.asarray(wanted), dtype)
    for name, mine in dbiases.items():
        assert_close(mine.astype(dtype), np.asarray(want_rest[1][name]), dtype)


def test_float64_experts_have_float64_biases():
    """Biases of float64 experts, and their gradients, must not be rounded to float32."""
    sizes = CASES["empty and huge"]
    with jax.enable_x64(True):
        (tokens, *weights), group_sizes, grad = operands(NUM_ROWS, sizes, "float64")
        biases, _ = unusual(weights)
        tokens, grad = (a.at[sum(sizes) :].set(0) for a in (tokens, grad))
        got = unusual_results(tokens, weights, biases, group_sizes, grad)
        reference = functools.partial(
            unusual_reference, sizes=np.asarray(sizes), clamp=clamp_of(weights)
        )
        out, vjp = jax.vjp(reference, tokens, weights, biases)
        for mine, want in zip(*map(jax.tree.leaves, (got, (out, *vjp(grad)))), strict=True):
            assert mine.dtype == jnp.float64
            np.testing.assert_allclose(mine, want, rtol=0, atol=1e-12 * max(1, abs(want).max()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_strict_promotion(dtype):
    weights, sizes, grad = operands(NUM_ROWS, CASES["even"], dtype)
    biases, _ = unusual(weights[1:])

    def results():
        plain = output_and_gradients(weights, sizes, grad, None)
        if dtype == "float32":
            return plain
        return plain, unusual_results(weights[0], weights[1:], biases, sizes, grad)

    want = results()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = results()
    jax.tree.map(np.testing.assert_array_equal, got, want)


def saved_shapes(function, *args):
    """Returns the shapes of a function's residuals, without its arguments."""
    _, vjp = jax.vjp(function, *args)
    mine = {id(x) for x in jax.tree.leaves(args)}
    leaves = [x for x in jax.tree.leaves(vjp) if hasattr(x, "shape") and id(x) not in mine]
    return sorted(x.shape for x in leaves if x.ndim > 1)


def test_what_is_kept_for_the_backward_pass():
    """The MLP must keep the tokens and two pre-activations for its backward pass.

    A policy of jax.checkpoint may keep fewer arrays.
    """
    rows = 80
    (tokens, *weights), sizes, _ = operands(rows, [50, 30], "float32")

    def layer(x, *weights):
        # Like dispatch, this makes a new array, so that it counts as a residual.
        return jnp.sum(expert_mlp(checkpoint_name(jnp.sin(x), "made"), *weights, sizes))

    kept = saved_shapes(jax.jit(layer), tokens, *weights)
    assert kept.count((rows, F)) == 2, kept
    names = jax.checkpoint_policies.save_only_these_names

    def kept_under(*to_save):
        eqns = jax.make_jaxpr(
            lambda *a: jax.vjp(jax.checkpoint(layer, policy=names(*to_save)), *a)[1](1.0)
        )(tokens, *weights)
        return [str(eqns).count(f"keep={keep}") for keep in (False, True)]

    # If nothing is kept, the forward pass makes the hidden values only, and the backward pass
    # computes the pre-activations again.
    assert kept_under() == [1, 1]
    assert kept_under("expert_pre_activations") == [0, 1]


@pytest.mark.parametrize("matmul_dtype", [None, "float8_e4m3fn"], ids=str)
def test_the_gradient_of_tokens_follows_that_of_wo(matmul_dtype):
    """A barrier must order them, so that the output's gradient is not held any longer.

    If nothing needs the gradient of wo, it must still not be computed.
    """
    sizes = jnp.asarray([200, 100], jnp.int32)
    shapes = (300, 2 * H), (2, 2 * H, F), (2, 2 * H, F), (2, F, 2 * H)
    args = [jnp.ones(shape, jnp.bfloat16) for shape in shapes]

    def loss(*args):
        return jnp.sum(expert_mlp(*args, sizes, matmul_dtype=matmul_dtype).astype(jnp.float32))

    def of_tokens(*args):
        return jax.vjp(loss, *args)[1](1.0)[0]

    program = jax.make_jaxpr(of_tokens)(*args).jaxpr
    barriers = [eqn for eqn in program.eqns if eqn.primitive.name == "optimization_barrier"]
    (barrier,) = (b for b in barriers if any(v.aval.shape == shapes[-1] for v in b.outvars))
    after = set(barrier.outvars)
    for eqn in program.eqns[program.eqns.index(barrier) + 1 :]:
        if any(not isinstance(v, Literal) and v in after for v in eqn.invars):
            after.update(eqn.outvars)
    assert program.outvars[0] in after

    optimized = jax.jit(of_tokens).lower(*args).compile().as_text() or ""
    made = re.findall(r"= \(?\w+\[2,(?:128,128)\]\S* (\S+?)\(", optimized)
    assert "parameter" in made and not {"dynamic-update-slice", "while"} & set(made), made


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("mesh_shape", [(1, 1), (1, 2), (2, 4)], ids=str)
@pytest.mark.slow
def test_inside_shard_map(mesh_shape, check_vma):
    """In a shard_map, experts split over one axis and tokens over two must give right gradients.

    The layer is under jax.checkpoint, in a scan.
    """
    mesh = meshes.mesh(mesh_shape, ("data", "expert"))
    data, experts = mesh_shape
    ranks = data * experts
    parts = [operands(60, [20, 0, 35], "float32", seed) for seed in range(ranks)]
    tokens = jnp.concatenate([part[0][0] for part in parts])
    grad = jnp.concatenate([part[2] for part in parts])
    weights = [jnp.concatenate([part[0][i] for part in parts[:experts]]) for i in (1, 2, 3)]
    sizes = parts[0][1]

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(("data", "expert")), P("expert"), P("expert"), P("expert"), P()),
        out_specs=P(("data", "expert")),
        check_vma=check_vma,
    )
    def layer(tokens, *weights_and_sizes):
        @jax.checkpoint
        def step(total, _):
            return total + expert_mlp(tokens, *weights_and_sizes), None

        return jax.lax.scan(step, jnp.zeros_like(tokens), None, length=2)[0] / 2

    out, vjp = jax.vjp(lambda *a: layer(*a, sizes), tokens, *weights)
    got = vjp(grad)
    rows, groups = 60, 3
    want_weights = [np.zeros(w.shape) for w in weights]
    for rank in range(ranks):
        mine = slice(rank * rows, (rank + 1) * rows)
        e = rank % experts
        block = slice(e * groups, (e + 1) * groups)
        args = [tokens[mine], *(w[block] for w in weights)]
        want_out, want_tokens, *wants = expected(args, sizes, grad[mine])
        assert_close(out[mine], want_out, "float32")
        assert_close(got[0][mine], want_tokens, "float32")
        for total, want in zip(want_weights, wants, strict=True):
            total[block] += want
    for mine, want in zip(got[1:], want_weights, strict=True):
        assert_close(mine, want, "float32")


@needs_kernels
def test_lowers_for_cuda():
    bf16 = jnp.bfloat16
    shapes = (
        jax.ShapeDtypeStruct((1000, 512), bf16),
        jax.ShapeDtypeStruct((4, 512, 256), bf16),
        jax.ShapeDtypeStruct((4, 512, 256), bf16),
        jax.ShapeDtypeStruct((4, 256, 512), bf16),
        jax.ShapeDtypeStruct((4,), jnp.int32),
    )

    def loss(*args):
        return jnp.sum(expert_mlp(*args).astype(jnp.float32))

    traced = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "@mosaic_gpu" in text
    assert "stablehlo.transpose" not in text

    def gated_by_the_matmul(**options):
        traced = jax.jit(functools.partial(expert_mlp, **options)).trace(*shapes)
        return "grouped_matmul_gated" in traced.lower(lowering_platforms=("cuda",)).as_text()

    assert gated_by_the_matmul(activation=jax.nn.gelu, clamp=7.0)
    assert not gated_by_the_matmul(activation=functools.partial(jax.nn.gelu, approximate=False))


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_cotangent_that_is_no_number_stays_in_its_group(value):
    (tokens, *weights), sizes, grad = operands(8, [3, 5], "float32")
    biases = dict(wi_0_bias=jnp.ones((2, F)), wo_bias=jnp.ones((2, H)))

    def layer(biases):
        return expert_mlp(tokens, *weights, sizes, **biases)

    _, vjp = jax.vjp(layer, biases)
    (got,), (want,) = vjp(grad.at[0, 0].set(value)), vjp(grad)
    for name, mine in got.items():
        np.testing.assert_array_equal(mine[1], want[name][1], name)
        assert not np.all(np.isfinite(mine[0]))
    np.testing.assert_array_equal(got["wo_bias"][0, 0], value)
    np.testing.assert_array_equal(got["wo_bias"][0, 1:], want["wo_bias"][0, 1:])


def test_arrays_may_be_of_numpy():
    rng = np.random.default_rng(0)
    shapes = dict(tokens=(8, H), wi_0=(2, H, F), wi_1=(2, H, F), wo=(2, F, H))
    shapes |= dict(wi_0_bias=(2, F), wi_1_bias=(2, F), wo_bias=(2, H))
    arrays = {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}
    sizes = np.asarray([3, 5], np.int32)
    got = expert_mlp(**arrays, group_sizes=sizes)  # type: ignore[arg-type]
    want = expert_mlp(**jax.tree.map(jnp.asarray, arrays), group_sizes=jnp.asarray(sizes))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "error", "message"),
    [
        ("tokens", (8, H, 1), "float32", ValueError, r"tokens must be .*\(8, 64, 1\)"),
        (
            "tokens",
            (8, H + 2),
            "float32",
            ValueError,
            r"tokens must have shape \(8, 64\).*\(8, 66\)",
        ),
        ("tokens", (8, H), "int32", TypeError, r"tokens must be a floating array"),
        ("wi_1", (2, H, F + 1), "float32", ValueError, r"wi_1 must have shape \(2, 64, 128\)"),
        ("wi_1", (2, H, F), "bfloat16", TypeError, r"wi_1 must have the dtype of tokens, float32"),
        ("wo", (2, H, F), "float32", ValueError, r"wo must have shape \(2, 128, 64\)"),
        ("wi_1_bias", (2, F + 1), "float32", ValueError, r"wi_1_bias must have shape \(2, 128\)"),
        ("wo_bias", (H,), "float32", ValueError, r"wo_bias must be .*\[L, H\].* \(64,\)"),
        ("wi_0_bias", (2, F), "int32", TypeError, "wi_0_bias must be a floating array"),
        ("group_sizes", (3,), "int32", ValueError, r"group_sizes must have shape \(2,\)"),
        (
            "group_sizes",
            (2,),
            "float32",
            TypeError,
            r"group_sizes must be an integer array.*float32",
        ),
    ],
)
def test_errors(name, shape, dtype, error, message):
    arrays = {
        "tokens": jnp.zeros((8, H)),
        "wi_0": jnp.zeros((2, H, F)),
        "wi_1": jnp.zeros((2, H, F)),
        "wo": jnp.zeros((2, F, H)),
        "group_sizes": jnp.zeros((2,), jnp.int32),
    }
    arrays[name] = jnp.zeros(shape, dtype)
    with pytest.raises(error, match=message):
        expert_mlp(**arrays)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(gating="swiglu"), TypeError, "gating must be a function of two arrays.* 'swiglu'"),
        (dict(activation=None), TypeError, "activation must be a function of one array"),
        (dict(clamp=-1.0), ValueError, "clamp must be above 0.* or None, but is -1.0"),
        (dict(wi_1=None, gating=jnp.multiply), ValueError, "gating must be None where wi_1 is"),
        (dict(wi_1=None, wi_1_bias=jnp.ones((2, F))), ValueError, "wi_1_bias must be None where"),
        (
            dict(activation=lambda a: a[:1]),
            ValueError,
            r"activation must be .*\(8, 128\).*\(1, 128\)",
        ),
        (
            dict(activation=lambda a: a.sum()),
            ValueError,
            r"activation must be elementwise.*shape=\(\)",
        ),
        (
            dict(activation=lambda a: a > 0),
            ValueError,
            "activation must be elementwise.* returns .*bool",
        ),
        (dict(activation=lambda a: None), ValueError, "activation must be .* but returns None"),
        (dict(wi_1=None, activation=lambda a: a[:1]), ValueError, "activation must be elementwise"),
        (dict(gating=lambda a, b: a.T), ValueError, r"gating must be elementwise.*\(128, 8\)"),
        (dict(activation=jax.nn.softmax), ValueError, "combines elements of an .* by reduce_max"),
        (
            dict(gating=jax.jit(lambda a, b: a * jnp.roll(b, 1, axis=1))),
            ValueError,
            "gating must be elementwise, but combines elements of an argument by slice",
        ),
        (dict(gating=lambda a: a), TypeError, "gating failed for 2 arrays: .* takes 1 positional"),
    ],
)
def test_errors_of_units(options, error, message):
    given = dict(wi_1=jnp.zeros((2, H, F))) | options
    arrays = jnp.zeros((8, H)), jnp.zeros((2, H, F)), given.pop("wi_1"), jnp.zeros((2, F, H))
    with pytest.raises(error, match=message):
        expert_mlp(*arrays, jnp.zeros(2, jnp.int32), **given)
