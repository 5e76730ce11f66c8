"""Tests of experts that are stored quantized: results, and operands that are used as they are."""

from __future__ import annotations

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.contract import assert_bitwise_equal
from support.dense_moe import weight_shapes
from support.flax_layers import LAYERS, as_dict
from support.meshes import expert_mesh, mesh
from support.selection import quick

import jax_ep
from jax_ep import MoEConfig, MoEParams
from jax_ep.formats import FLOAT8_MATRICES, FLOAT8_ROWS, MXFP4, Float8, Transposed
from jax_ep.matmul.float8 import QuantizedMatrices
from jax_ep.moe import shared_experts
from jax_ep.moe.expert_matmuls import QuantizedExperts
from jax_ep.moe.params import LOGICAL_AXES, SHARED_WEIGHTS
from jax_ep.placement import Placement, balance, redistribute, to_experts, to_slots

FLOAT8 = jnp.float8_e4m3fn
MATRICES = ("wi_0", "wi_1", "wo")
STORED = (*MATRICES, *SHARED_WEIGHTS)
AXES = {"exp": "expert", "mlp": "tensor"}
E, H, F = 8, 128, 256
FORMATS = {
    "float8": Transposed.of(FLOAT8_MATRICES),
    "mxfp4": Transposed.of(MXFP4),
    "in order": FLOAT8_MATRICES,
    "bfloat16 scales": Transposed.of(Float8.of(FLOAT8, (128, 128), jnp.bfloat16)),
    "rows": FLOAT8_ROWS,
    "mxfp4 in order": MXFP4,
}
CONFIG = MoEConfig(num_experts=E, num_experts_per_token=2)
X = np.random.default_rng(9).standard_normal((16, H)).astype(jnp.bfloat16)


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch):
    """Lets shared experts quantize the few tokens of these tests, as they do many."""
    monkeypatch.setattr(shared_experts, "LEAST_QUANTIZED_TOKENS", 1)


@pytest.fixture(params=quick(FORMATS, "mxfp4"))
def format(request):
    return request.param


@functools.cache
def stored(format):
    """Makes parameters of a layer with matrices quantized in NumPy."""
    rng = np.random.default_rng(0)

    def numbers(*shape):
        return (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(jnp.bfloat16)

    shapes = {"gate": (H, E)} | weight_shapes(E, H, F, num_shared_experts=1)
    arrays = {name: numbers(*shape) for name, shape in shapes.items()}
    return MoEParams.of(**arrays | {n: jax_ep.quantize(arrays[n], format) for n in STORED})


def numbers_of(params):
    """Returns the parameters with their matrices dequantized."""
    return params._replace(**{name: getattr(params, name).dequantize() for name in STORED})


def sharded(params, mesh):
    """Shards the quantized matrices of parameters over the axes "expert" and "tensor" of a mesh."""
    for name in STORED:
        array = getattr(params, name)
        axes = (AXES.get(axis) for axis in LOGICAL_AXES[name])
        spec = P(*(axis if axis in mesh.axis_names else None for axis in axes))
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), array.specs(spec))
        params = params._replace(**{name: jax.device_put(array, shardings)})
    return params


def output(config, **options):
    """Returns a program (params, x) -> the output and the gradient of x."""

    def loss(x, params):
        y, _ = jax_ep.moe_layer(params, x, config, **options)
        wave = jnp.sin(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return jnp.sum(y.astype(jnp.float32) * wave), y

    return jax.jit(lambda params, x: jax.grad(loss, has_aux=True)(x, params))


def assert_equal(got, want):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_bitwise_equal(np.asarray(one), np.asarray(other))


def test_the_layer_is_that_of_the_numbers(format):
    params, run = stored(format), output(CONFIG)
    grad, y = run(params, X)
    assert y.dtype == grad.dtype == jnp.bfloat16 and np.abs(np.asarray(grad)).max() > 0
    assert_equal((grad, y), run(numbers_of(params), X))


def operands_of(params):
    """Returns `QuantizedExperts` with the stored values and scales of the matrices.

    They have each matrix in both orders of axes, as the matmuls read it. No number is quantized
    anew.
    """

    def operands(array):
        values, scales = array.values, array.scales.astype(np.float32)
        if isinstance(array.format, Transposed):
            values, scales = values.swapaxes(1, 2), scales.swapaxes(1, 2)
        kept = jax_ep.QuantizedArray(jnp.asarray(values), jnp.asarray(scales), FLOAT8_MATRICES)
        return QuantizedMatrices(kept, jax.tree.map(lambda a: a.swapaxes(1, 2), kept))

    return QuantizedExperts(*(operands(getattr(params, name)) for name in MATRICES))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, shape", [("in order", None), ("bfloat16 scales", None), ("float8", (2, 2))]
)
def test_float8_matrices_are_the_operands_as_they_are(name, shape):
    config, params = dataclasses.replace(CONFIG, matmul_dtype=FLOAT8), stored(FORMATS[name])
    # Shared experts stay as they are stored.
    numbers = params._replace(**{n: getattr(params, n).dequantize() for n in MATRICES})
    quantized = operands_of(params)
    if shape is not None:
        on = mesh(shape, ("expert", "tensor"))
        config = dataclasses.replace(config, tensor_axis="tensor")
        params = sharded(params, on)
    run = output(config, quantized_experts=quantized)
    with contextlib.nullcontext() if shape is None else jax.set_mesh(on):
        assert_equal(output(config)(params, X), run(numbers, X))


@pytest.mark.parametrize("name, again", [("float8", False), ("mxfp4", True)])
def test_no_program_quantizes_float8_matrices_again(name, again):
    config = dataclasses.replace(CONFIG, matmul_dtype=FLOAT8)
    program = jax.make_jaxpr(output(config))(stored(FORMATS[name]), X)
    assert ("quantize_float8_matrices" in str(program)) == again


@pytest.mark.slow
def test_other_formats_are_quantized_again_for_float8_matmuls():
    config, params = dataclasses.replace(CONFIG, matmul_dtype=FLOAT8), stored(FORMATS["mxfp4"])
    run = output(config)
    assert_equal(run(params, X), run(numbers_of(params), X))


@pytest.mark.parametrize("shape", quick([(8,), (2, 2)], (2, 2), unpack=False))
def test_ranks_hold_their_own_experts_and_columns(format, shape):
    if format.block[0] == 1 and len(shape) > 1:
        pytest.skip("wo has one block of 128 columns")
    on = mesh(shape, ("expert", "tensor")[: len(shape)])
    config = dataclasses.replace(CONFIG, tensor_axis="tensor" if len(shape) > 1 else None)
    params, numbers = stored(format), numbers_of(stored(format))
    spread = sharded(params, on)
    for name in MATRICES:
        array = getattr(spread, name)
        size = sum(part.nbytes for part in jax.tree.leaves(getattr(params, name)))
        held = [part.addressable_shards[0].data.nbytes for part in jax.tree.leaves(array)]
        assert sum(held) == size / on.size
    run = output(config)
    with jax.set_mesh(on):
        assert_equal(run(spread, X), run(numbers, X))


def test_experts_move_between_slots(format):
    """Experts must keep every bit when they move into slots, to another placement, and back."""
    on = expert_mesh(4)
    placement = Placement.in_order(num_experts=E, num_slots=12, num_ranks=4)[0]
    other = balance(np.arange(1.0, E + 1)[None] ** 2, num_slots=12, num_ranks=4)[0]
    params = stored(format)
    slots = sharded(to_slots(params, placement), on)
    assert slots.wo.shape == (12, F, H)
    moved = redistribute(slots, placement, other, mesh=on)
    assert_equal(to_experts(jax.tree.map(np.asarray, moved), other), params)


@pytest.mark.parametrize("framework", LAYERS)
def test_flax_layers_take_them(framework):
    params = stored(FORMATS["mxfp4"])
    options = dict(num_experts=E, num_experts_per_token=2, num_shared_experts=1)
    got, _ = LAYERS[framework](H, F, **options)(as_dict(params), X)
    assert_equal(got, output(CONFIG)(params, X)[1])


@pytest.mark.slow
@pytest.mark.parametrize("matmul_dtype", [None, FLOAT8])
def test_there_is_no_gradient(matmul_dtype):
    """Quantized matrices must have no gradient; the gate's must be the dequantized layer's."""
    config = dataclasses.replace(CONFIG, matmul_dtype=matmul_dtype)
    params = stored(FORMATS["float8"])

    def loss(part, name, params):
        y, _ = jax_ep.moe_layer(params._replace(**{name: part}), X, config)
        return jnp.sum(y.astype(jnp.float32) ** 2)

    for name in ("wi_1", "wo", "shared_wo"):
        with pytest.raises(TypeError, match=f"{name} is stored quantized, .* has no gradient"):
            jax.grad(loss)(jax.tree.map(jnp.asarray, getattr(params, name)), name, params)
    grad = jax.grad(loss)(jnp.asarray(params.gate), "gate", params)
    assert np.isfinite(np.asarray(grad).astype(np.float32)).all() and np.asarray(grad).any()
    if matmul_dtype is None:
        want = jax.grad(loss)(jnp.asarray(params.gate), "gate", numbers_of(params))
        assert_bitwise_equal(np.asarray(grad), np.asarray(want))


def test_what_does_not_fit_is_refused():
    params = stored(FORMATS["float8"])
    mixed = params._replace(wo=numbers_of(params).wo)
    with pytest.raises(TypeError, match="wi_0, wi_1, wo must all be arrays or all be Quantized"):
        jax_ep.moe_layer(mixed, X, CONFIG)
    with pytest.raises(TypeError, match="shared_wi_0, shared_wi_1, shared_wo must all be arrays"):
        jax_ep.moe_layer(params._replace(shared_wo=numbers_of(params).shared_wo), X, CONFIG)
    tokens, sizes = jnp.asarray(X), jnp.full(E, 2)
    with pytest.raises(TypeError, match="wi_0, wi_1, wo must all be arrays or all be Quantized"):
        jax_ep.expert_mlp(tokens, mixed.wi_0, mixed.wi_1, mixed.wo, sizes)
    wide = tokens.astype(jnp.float32)
    with pytest.raises(TypeError, match="wi_0 must have the dtype of tokens, float32"):
        jax_ep.expert_mlp(wide, params.wi_0, params.wi_1, params.wo, sizes)
    gate = jax_ep.quantize(params.gate.astype(np.float32), Transposed.of(MXFP4))
    with pytest.raises(TypeError, match=r"gate must be .*, but is a QuantizedArray"):
        jax_ep.moe_layer(params._replace(gate=gate), X, CONFIG)
    spread = sharded(params, expert_mesh(4))
    with pytest.raises(ValueError, match="wi_0 .* is sharded over .'expert'.* no mesh is set"):
        jax_ep.moe_layer(spread, X, CONFIG)
    float8 = dataclasses.replace(CONFIG, matmul_dtype=FLOAT8)
    with pytest.raises(
        ValueError, match="experts cannot be quantized by quantize_experts where wi_0 is a Quant"
    ):
        jax_ep.quantize_experts(params, float8)
    quantized = jax_ep.quantize_experts(numbers_of(params), float8)
    with pytest.raises(ValueError, match="quantized_experts must be None where wi_0 is a Quant"):
        jax_ep.moe_layer(params, X, float8, quantized_experts=quantized)
    split = dataclasses.replace(CONFIG, tensor_axis="tensor")
    with (
        jax.set_mesh(mesh((1, 4), ("expert", "tensor"))),
        pytest.raises(ValueError, match="wi_0 on one of 4 ranks of tensor_axis must have whole"),
    ):
        jax_ep.moe_layer(params, X, split)
