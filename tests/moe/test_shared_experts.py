"""Tests of shared experts whose matrices are quantized; `test_layer` tests the others."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import float8 as operands
from support.contract import assert_bitwise_equal
from support.float8 import error_of_norm
from support.kernels import needs_kernels
from support.meshes import mesh
from support.selection import quick

import jax_ep
from jax_ep import MoEConfig, MoEParams, reference
from jax_ep.formats import FLOAT8_MATRICES, MXFP4, Transposed
from jax_ep.moe import shared_experts
from jax_ep.moe.mesh import LayerMesh
from jax_ep.moe.params import SHARED_WEIGHTS

pytestmark = pytest.mark.usefixtures("exact_matmuls")

FLOAT8 = jnp.float8_e4m3fn
E, H, F, S, TOKENS = 4, 128, 256, 256, 32
CONFIG = MoEConfig(
    num_experts=E, num_experts_per_token=2, matmul_dtype=FLOAT8, dtype=jnp.float32
)  # fmt: skip
SHAPES = {"shared_wi_0": (H, S), "shared_wi_1": (H, S), "shared_wo": (S, H)}
FORMATS = {
    "float8": Transposed.of(FLOAT8_MATRICES),
    "in order": FLOAT8_MATRICES,
    "mxfp4": Transposed.of(MXFP4),
}


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch):
    """Lets the few tokens of these tests be quantized, as many are."""
    monkeypatch.setattr(shared_experts, "LEAST_QUANTIZED_TOKENS", 1)


def make_params(dtype=jnp.float32):
    """Makes parameters of which only the shared experts contribute to the output."""

    def normal(seed, shape):
        return jnp.asarray(operands.numbers("random", shape, seed) / shape[-2] ** 0.5, dtype)

    return MoEParams.of(
        gate=normal(0, (H, E)),
        wi_0=normal(1, (E, H, F)),
        wi_1=normal(2, (E, H, F)),
        wo=jnp.zeros((E, F, H), dtype),
        **{name: normal(3 + i, shape) for i, (name, shape) in enumerate(SHAPES.items())},
    )


def make_x(kind="random", num_tokens=TOKENS, dtype=jnp.float32):
    return jnp.asarray(operands.numbers(kind, (num_tokens, H), 9), dtype)


PROBE = operands.numbers("random", (TOKENS, H), 10)


def results(output, params, x):
    """Returns the output, and the gradients of x and of the shared experts' matrices."""

    def loss(shared, x):
        out = output(params._replace(**shared), x)
        return jnp.sum(out * PROBE[: len(x)]), out

    shared = {name: getattr(params, name) for name in SHARED_WEIGHTS}
    (dshared, dx), out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(shared, x)
    return jax.device_get([out, dx, *dshared.values()])


def gradient_of_x(output, params, x):
    """Returns the gradient of x alone, which exists for matrices that are stored quantized, too."""

    def loss(x):
        return jnp.sum(output(params, x).astype(jnp.float32) * PROBE[: len(x)])

    return jax.device_get(jax.jit(jax.grad(loss))(x))


def layer_of(config):
    """Returns a function (params, x) that runs the layer."""
    return lambda params, x: jax_ep.moe_layer(params, x, config)[0]


def alone(config):
    """Returns a function (params, x) that runs only the shared experts of a layer."""
    return jax.jit(lambda params, x: shared_experts.output(params, x, config, LayerMesh((), ())))


def stored(params, format):
    return params._replace(**{
        name: jax_ep.quantize(getattr(params, name), format) for name in SHARED_WEIGHTS
    })  # fmt: skip


def numbers_of(params):
    return params._replace(**{name: getattr(params, name).dequantize() for name in SHARED_WEIGHTS})


@pytest.mark.parametrize("kind", quick(["random", "skewed", "zero"], "skewed"))
def test_float8_matmuls_are_those_of_the_reference(kind):
    params, x = make_params(), make_x(kind)
    shared = [np.asarray(getattr(params, name))[None] for name in SHARED_WEIGHTS]
    sizes = np.array([TOKENS])
    want = (
        reference.float8_expert_mlp(np.asarray(x), sizes, *shared),
        *reference.float8_expert_mlp_grad(PROBE, np.asarray(x), sizes, *shared),
    )
    # As for routed experts, other orders of summation round a few hidden values otherwise.
    bound = 2.0**-6 if jax.default_backend() == "gpu" else 2.0**-9
    for mine, theirs in zip(results(alone(CONFIG), params, x), want, strict=True):
        assert np.abs(theirs).max() > 0
        assert error_of_norm(mine, theirs.reshape(mine.shape)) < bound
    # The reference without rounding is further away, so the operands were quantized.
    exact = reference.expert_mlp(np.asarray(x), sizes, *shared)
    assert error_of_norm(want[0], exact) > 2.0**-5


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape, axes, options",
    [
        ((2, 2), ("expert", "tensor"), {"tensor_axis": "tensor"}),
        ((2, 2), ("expert", "data"), {"fsdp_axes": {"embed": "data"}}),
        ((4,), ("data",), {}),
    ],
)
def test_a_layer_on_a_mesh_is_that_without(shape, axes, options):
    """Every rank has other tokens, so the blocks of the matrices' gradients have other rows."""
    params, x = make_params(), make_x()
    want = results(layer_of(CONFIG), params, x)
    with jax.set_mesh(mesh(shape, axes)):
        got = results(layer_of(dataclasses.replace(CONFIG, **options)), params, x)
    for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert error_of_norm(mine, theirs) < (2.0**-10 if i < 2 else 2 * 2**0.5 * 2.0**-5)


@pytest.mark.slow
def test_masked_tokens_may_hold_anything():
    params, x = make_params(), make_x()
    mask = np.arange(TOKENS) % 2 == 0

    def with_masked(factor):
        def run(params, x):
            out, _ = jax_ep.moe_layer(params, x, CONFIG, mask)
            return jnp.where(mask[:, None], out, 0)

        masked = jnp.where(mask[:, None], x, x * factor)
        out, _, *dshared = results(run, params, masked)
        return out, dshared

    want = with_masked(0.0)
    for factor in (1e4, np.nan):
        got = with_masked(factor)
        for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert np.abs(theirs).max() > 0
            np.testing.assert_array_equal(mine, theirs)


def test_experts_without_a_gate_and_with_a_shared_gate():
    params = make_params()._replace(wi_1=None, shared_wi_1=None)
    shared = [np.asarray(w)[None] for w in (params.shared_wi_0, params.shared_wo)]
    x, sizes = make_x(), np.array([TOKENS])
    hidden = reference.float8_matmul(np.asarray(x), shared[0], sizes)
    want = reference.float8_matmul(hidden / (1 + np.exp(-hidden)), shared[1], sizes)
    gate = jnp.linspace(-1, 1, H).reshape(H, 1)
    want /= 1 + np.exp(-np.asarray(x, np.float64) @ np.asarray(gate))
    got = alone(CONFIG)(params._replace(shared_gate=gate), x)
    assert error_of_norm(got, want) < 2.0**-6


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [2, 16, 24])
@pytest.mark.parametrize("matmul_dtype", [None, FLOAT8])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_matrices_may_be_stored_quantized(format, matmul_dtype, num_tokens):
    """The output must be that of the numbers; bits may differ where kernels read the matrices."""
    config = dataclasses.replace(CONFIG, matmul_dtype=matmul_dtype, dtype=jnp.bfloat16)
    params, x = stored(make_params(jnp.bfloat16), format), make_x("random", num_tokens)
    got, want = (alone(config)(each, x) for each in (params, numbers_of(params)))
    assert np.abs(np.asarray(want, np.float32)).max() > 0
    if matmul_dtype is None and jax.default_backend() != "gpu":
        assert_bitwise_equal(np.asarray(got), np.asarray(want))
    assert error_of_norm(got, want) < 2.0**-6
    dx, want = (gradient_of_x(alone(config), each, x) for each in (params, numbers_of(params)))
    assert np.abs(want).max() > 0
    assert error_of_norm(dx, want) < 2.0**-6


@needs_kernels
@pytest.mark.parametrize("num_tokens", [1, 16])
def test_a_gpu_reads_mxfp4_as_it_is_stored(num_tokens):
    """A program for GPUs must not contain the dequantized matrices, if there are few tokens."""
    config = dataclasses.replace(CONFIG, matmul_dtype=None, dtype=jnp.bfloat16)
    params = jax.eval_shape(lambda: stored(make_params(jnp.bfloat16), FORMATS["mxfp4"]))
    x = jax.ShapeDtypeStruct((num_tokens, H), jnp.bfloat16)
    text = alone(config).trace(params, x).lower(lowering_platforms=("cuda",)).as_text()
    assert f"{H}x{S}xbf16" not in text and f"{S}x{H}xbf16" not in text
    assert "@mosaic_gpu" in text


def test_bad_matrices_are_named():
    params, x = make_params(), make_x()
    narrow = {name: jnp.ones([96 if n == S else n for n in s]) for name, s in SHAPES.items()}
    with pytest.raises(ValueError, match=r"shared_wi_0 .*128.* \(128, 96\)"):
        jax_ep.moe_layer(params._replace(**narrow), x, CONFIG)
    narrow = {name: w[:, :128] if "wi" in name else w[:128] for name, w in params._asdict().items()
              if name in SHARED_WEIGHTS}  # fmt: skip
    config = dataclasses.replace(CONFIG, tensor_axis="tensor")
    with (
        jax.set_mesh(mesh((2, 2), ("expert", "tensor"))),
        pytest.raises(ValueError, match=r"shared_wi_0 on a rank .*128.* \(128, 64\)"),
    ):
        jax_ep.moe_layer(params._replace(**narrow), x, config)
