"""Tests of elementwise functions in PTX: computed by NumPy, and on a GPU against XLA's bits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from support import emitted
from support.kernels import lowered, needs_kernels

from pallas_kernels.fabric import elementwise
from pallas_kernels.fabric.elementwise import Elementwise, NotSupported

FUNCTIONS = {
    "silu": jax.nn.silu,
    "squared relu": lambda x: jax.nn.relu(x) ** 2,
    "gelu": jax.nn.gelu,
    "exp": lambda x: jnp.exp(jnp.minimum(x, 4.0)),
    "clamped": lambda x: jnp.clip(x, -7.0, 7.0) - jnp.abs(x),
    "comparisons": lambda x: (x >= 1) * x + jnp.where(x <= -1, x, 2) - (x == 0) * 3.0 + (x < 4),
    "gradient of a clip": lambda x: jax.vjp(lambda x: jnp.clip(jax.nn.silu(x), -7, 1), x)[1](x)[0],
    "polynomial": lambda x: 0.5 + 0.25 * x**2 + 0.125 * jnp.abs(x) ** 3,
}
REFUSED = {
    "exact gelu": (functools.partial(jax.nn.gelu, approximate=False), "it uses erfc"),
    "unordered comparison": (lambda x: jnp.where(x != 0, x, 1), "it uses ne"),
    "fourth power": (lambda x: x**4, "the power 4"),
    "array": (lambda x: x * jnp.arange(2.0)[1:][0], "captures arrays|it uses"),
    "not elementwise": (lambda x: jax.nn.softmax(x, axis=-1), "cannot be traced with scalars"),
    "of two arrays": (lambda x, y: x * y, "cannot be traced"),
    "dtype": (lambda x: x.astype(jnp.bfloat16), "float32|result"),
}


# Skipped with older versions of JAX, whose XLA computes tanh in another way.
@needs_kernels
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_the_instructions_compute(name):
    jaxpr = Elementwise(FUNCTIONS[name], 1)._jaxpr.jaxpr
    x = np.concatenate([np.linspace(-9, 9, 61), [0, -0.0, 1e-5, -90, 90]]).astype(np.float32)
    (got,) = emitted.run_kernel(lambda: elementwise._emit(jaxpr, [x[:, None]]))
    np.testing.assert_allclose(got[:, 0], FUNCTIONS[name](x), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("name", REFUSED)
def test_functions_that_are_refused(name):
    function, message = REFUSED[name]
    with pytest.raises(NotSupported, match=message):
        Elementwise(function, 1)


def apply(function, x):
    """Applies `function` in a kernel to x [64 * n, 64] float32."""
    emitted = Elementwise(function, 1)

    def kernel(x_ref, out_ref):
        rows = pl.ds(lax.axis_index("block") * 64, 64)
        values = plgpu.load(x_ref.at[rows], layout=plgpu.Layout.WGMMA, optimized=False)
        out_ref[rows, :] = emitted(values)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        grid=(x.shape[0] // 64,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(x)


@needs_kernels
def test_lowers_for_cuda():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert "@mosaic_gpu" in lowered(jax.jit(functools.partial(apply, jax.nn.gelu)), x)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="compares with XLA's GPU kernels")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_bits_are_those_of_xla(name):
    """A kernel must compute each activation function with the same bits as XLA."""
    bits = jnp.arange(2**16, dtype=jnp.uint16)
    x = lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32).reshape(1024, 64)
    got = np.asarray(jax.jit(functools.partial(apply, FUNCTIONS[name]))(x))
    want = np.asarray(jax.jit(FUNCTIONS[name])(x))
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert np.all(same), np.asarray(x)[~same][:8]
