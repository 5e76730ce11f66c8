"""Experts that multiply float8: forward and backward against NumPy, in layers and alone."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.meshes import expert_mesh

import jax_ep
from jax_ep import MoEConfig, MoEParams, linen
from jax_ep.formats import FLOAT8_MATRICES, FLOAT8_ROWS
from jax_ep.moe.expert_matmuls import QuantizedExperts

FLOAT8 = jnp.float8_e4m3fn
SIZES = [20, 0, 31, 9]
ROWS, H, F = 64, 256, 128


def operands(dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    shapes = (ROWS, H), (len(SIZES), H, F), (len(SIZES), H, F), (len(SIZES), F, H)
    arrays = [rng.standard_normal(shape) / np.sqrt(shape[-2]) for shape in shapes]
    arrays[0] *= np.sqrt(ROWS)
    return [jnp.asarray(array, dtype) for array in arrays], jnp.asarray(SIZES, jnp.int32)


def rounded(x, format=FLOAT8_ROWS):
    """The numbers that float8 stores, in float64."""
    x = np.asarray(x).astype(np.float32)
    return np.asarray(format.decode(format.encode(x), np.float32)).astype(np.float64)


def by_group(function):
    """Applies a function of a group's number and rows to each group; rows of no group are 0."""
    ends = np.cumsum(SIZES)
    parts = [function(e, slice(end - SIZES[e], end)) for e, end in enumerate(ends)]
    return np.concatenate([*parts, np.zeros((ROWS - ends[-1], parts[0].shape[1]))])


def silu(x):
    return x / (1 + np.exp(-x))


def norm_of_error(got, want):
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def test_forward_is_that_of_the_rounded_operands():
    (x, wi_0, wi_1, wo), sizes = operands()
    got = jax_ep.expert_mlp(x, wi_0, wi_1, wo, sizes, matmul_dtype=FLOAT8)
    x8 = rounded(x)
    w0, w1, w2 = (rounded(w, FLOAT8_MATRICES) for w in (wi_0, wi_1, wo))
    hidden = rounded(by_group(lambda e, rows: silu(x8[rows] @ w0[e]) * (x8[rows] @ w1[e])))
    want = by_group(lambda e, rows: hidden[rows] @ w2[e])
    # The result's rounding, and hidden values that lie halfway between two numbers of float8.
    assert norm_of_error(got, want) < 2**-7
    assert norm_of_error(got, want) < norm_of_error(
        got, jax_ep.expert_mlp(x, wi_0, wi_1, wo, sizes)
    )


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biased", [False, True])
def test_gradients_are_near_those_of_bfloat16(gated, biased):
    (x, wi_0, wi_1, wo), sizes = operands()
    weights = {"wi_0": wi_0, "wi_1": wi_1 if gated else None, "wo": wo}
    if biased:
        weights |= {
            "wi_0_bias": jnp.full((len(SIZES), F), 0.1, jnp.bfloat16),
            "wo_bias": jnp.ones((len(SIZES), H), jnp.bfloat16),
        }
    grad = jax.random.normal(jax.random.key(1), (ROWS, H), jnp.bfloat16)

    def run(matmul_dtype, x, weights):
        rest = {name: w for name, w in weights.items() if name.endswith("bias")}
        return jax_ep.expert_mlp(
            x,
            weights["wi_0"],
            weights["wi_1"],
            weights["wo"],
            sizes,
            matmul_dtype=matmul_dtype,
            **rest,
        )

    results = []
    for dtype in (None, FLOAT8):
        out, vjp = jax.vjp(functools.partial(run, dtype), x, weights)
        results.append(jax.tree.leaves((out, vjp(grad))))
    for want, got in zip(*results, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        # Three products, of two operands that are rounded by 2^-5 on average each.
        assert norm_of_error(got, want) < 0.12
        assert np.isfinite(np.asarray(got).astype(np.float32)).all()


def test_what_is_kept_is_float8():
    (x, wi_0, wi_1, wo), sizes = operands()

    def kept(dtype):
        function = functools.partial(jax_ep.expert_mlp, group_sizes=sizes, matmul_dtype=dtype)
        vjp = jax.eval_shape(lambda *args: jax.vjp(function, *args)[1], x, wi_0, wi_1, wo)
        rows = [each for each in jax.tree.leaves(vjp) if each.shape and each.shape[0] == ROWS]
        return sum(each.size * each.dtype.itemsize for each in rows)

    assert kept(None) == ROWS * (H + 2 * F) * 2
    assert kept(FLOAT8) == ROWS * (H + 2 * F) * (1 + 4 / 128)  # and float32 scales


def layer_of(mesh, **options):
    return linen.MoE(
        mlp_dim=F,
        num_experts=8,
        num_experts_per_token=2,
        dtype=jnp.bfloat16,
        mesh=mesh,
        **options,
    )


def outputs(layer, x, **call):
    variables = layer_of(layer.mesh).init(jax.random.key(0), x)

    def loss(params, x):
        y, _ = layer.apply({**variables, "params": params}, x, **call)
        wave = jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return jnp.sum(y.astype(jnp.float32) * wave), y

    grads, y = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(variables["params"], x)
    return y, *jax.tree.leaves(grads)


@pytest.mark.parametrize("wire_dtype", [None, FLOAT8])
@pytest.mark.parametrize("weights_on", ["output", "input"])
def test_layer(wire_dtype, weights_on):
    mesh = expert_mesh(4)
    x = jax.random.normal(jax.random.key(1), (64, H), jnp.bfloat16)
    want = outputs(layer_of(mesh, weights_on=weights_on), x)
    got = outputs(
        layer_of(mesh, weights_on=weights_on, matmul_dtype=FLOAT8, wire_dtype=wire_dtype), x
    )
    for theirs, mine in zip(want, got, strict=True):
        assert norm_of_error(mine, theirs) < 0.12


def test_the_wire_costs_nothing_more():
    """Rows have the same numbers, quantized before they are sent or on arrival."""
    mesh = expert_mesh(4)
    x = jax.random.normal(jax.random.key(1), (64, H), jnp.bfloat16)
    alone, with_wire = (
        outputs(layer_of(mesh, matmul_dtype=FLOAT8, wire_dtype=wire), x) for wire in (None, FLOAT8)
    )
    np.testing.assert_array_equal(alone[0], with_wire[0])


def test_experts_quantized_once_give_the_same():
    mesh = expert_mesh(4)
    x = jax.random.normal(jax.random.key(1), (64, H), jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), 4)
    make = jax.nn.initializers.lecun_normal(in_axis=-2, out_axis=-1, batch_axis=0)
    params = MoEParams(
        gate=make(keys[0], (H, 8)),
        wi_0=make(keys[1], (8, H, F)),
        wi_1=make(keys[2], (8, H, F)),
        wo=make(keys[3], (8, F, H)),
    )
    config = MoEConfig(
        num_experts=8,
        num_experts_per_token=2,
        mesh=mesh,
        matmul_dtype=FLOAT8,
        dtype=jnp.bfloat16,
        router_dtype=jnp.float32,
    )

    def loss(params, x, once):
        quantized = None
        if once:
            quantized = jax_ep.quantize_experts(params, config)
            assert isinstance(quantized, QuantizedExperts)
        y, _ = jax_ep.moe_layer(params, x, config, quantized_experts=quantized)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    each, once = (
        jax.jit(jax.value_and_grad(functools.partial(loss, once=once)))(params, x)
        for once in (False, True)
    )
    for a, b in zip(jax.tree.leaves(each), jax.tree.leaves(once), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matmul_dtype": jnp.bfloat16}, "matmul_dtype must be None or float8_e4m3fn"),
        ({"matmul_dtype": "float8"}, "matmul_dtype must be None or float8_e4m3fn"),
        ({"width": 64}, "wi_0 must have whole blocks of 128 x 128"),
    ],
)
def test_bad_options(change, message):
    (x, wi_0, wi_1, wo), sizes = operands()
    width = change.pop("width", F)
    options = {"matmul_dtype": FLOAT8} | change
    with pytest.raises(ValueError, match=message):
        jax_ep.expert_mlp(x, wi_0[..., :width], wi_1[..., :width], wo[:, :width], sizes, **options)


def test_quantized_experts_must_fit():
    (_, wi_0, wi_1, wo), _ = operands()
    params = MoEParams(gate=jnp.ones((H, 4)), wi_0=wi_0, wi_1=wi_1, wo=wo)
    config = MoEConfig(num_experts=4, num_experts_per_token=2)
    x = jnp.ones((8, H), jnp.bfloat16)
    with pytest.raises(ValueError, match="config.matmul_dtype must be a dtype"):
        jax_ep.quantize_experts(params, config)
    float8 = MoEConfig(num_experts=4, num_experts_per_token=2, matmul_dtype=FLOAT8)
    quantized = jax_ep.quantize_experts(params, float8)
    with pytest.raises(ValueError, match="quantized_experts must be None where matmul_dtype"):
        jax_ep.moe_layer(params, x, config, quantized_experts=quantized)
    with pytest.raises(TypeError, match="quantized_experts must be None or what"):
        jax_ep.moe_layer(params, x, float8, quantized_experts=wi_0)
