"""Tests of elementwise functions in PTX: computed by NumPy, and on a GPU against XLA's bits."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from support.kernels import needs_kernels

from pallas_kernels.fabric import elementwise, mosaic
from pallas_kernels.fabric.elementwise import Elementwise, NotSupported

FUNCTIONS = {
    "silu": jax.nn.silu,
    "sigmoid": jax.nn.sigmoid,
    "relu": jax.nn.relu,
    "squared relu": lambda x: jax.nn.relu(x) ** 2,
    "gelu": jax.nn.gelu,
    "quick gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "tanh": jnp.tanh,
    "exp": lambda x: jnp.exp(jnp.minimum(x, 4.0)),
    "clamped": lambda x: jnp.clip(x, -7.0, 7.0) - jnp.abs(x),
    "leaky relu": lambda x: jnp.where(x > 0, x, 0.1 * x),
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
    "dtype": (lambda x: x.astype(jnp.bfloat16), "float32|result"),
}


def constant(text):
    """Returns the float32 number of a PTX literal such as 0f3F800000."""
    return np.uint32(int(text.removeprefix("0f"), 16)).view(np.float32)


def fma(a, b, c):
    return np.float32(np.float64(a) * np.float64(b) + np.float64(c))


def run_ptx(text, constraints, *operands, returns=None):
    """Runs a piece of PTX on NumPy scalars; approximate instructions are computed exactly."""
    registers = {f"${i + 1}": operand for i, operand in enumerate(operands)}

    def read(name):
        return constant(name) if name.startswith("0f") else registers[name]

    instructions = {
        "add.rn.f32": lambda a, b: a + b,
        "sub.rn.f32": lambda a, b: a - b,
        "mul.rn.f32": lambda a, b: a * b,
        "max.NaN.f32": np.maximum,
        "min.NaN.f32": np.minimum,
        "neg.f32": lambda a: -a,
        "abs.f32": abs,
        "fma.rn.f32": fma,
        # This instruction rounds down. The function calls it only with results so large that
        # neighbouring float32 numbers differ by 1, so `floor` rounds in the same way.
        "fma.rm.f32": lambda a, b, c: np.float32(np.floor(np.float64(a) * b + c)),
        "rcp.approx.f32": lambda a: np.float32(1) / a,
        "div.full.f32": lambda a, b: a / b,
        "ex2.approx.ftz.f32": np.exp2,
        "cvt.sat.f32.f32": lambda a: np.clip(a, np.float32(0), np.float32(1)),
        "mov.f32": lambda a: a,
        "mov.b32": lambda a: a.view(np.uint32 if a.dtype == np.float32 else np.float32),
        "shl.b32": lambda a, b: np.uint32(int(a) << int(b) & 0xFFFFFFFF),
        "setp.ge.f32": lambda a, b: a >= b,
        "setp.le.f32": lambda a, b: a <= b,
        "setp.lt.f32": lambda a, b: a < b,
        "setp.ne.f32": lambda a, b: a != b,
        "selp.f32": lambda a, b, p: a if p else b,
        "set.eq.f32.f32": lambda a, b: np.float32(a == b),
        "set.ge.f32.f32": lambda a, b: np.float32(a >= b),
        "set.gt.f32.f32": lambda a, b: np.float32(a > b),
        "set.le.f32.f32": lambda a, b: np.float32(a <= b),
        "set.lt.f32.f32": lambda a, b: np.float32(a < b),
    }
    for line in text.strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, result, *arguments = re.split(r"[ ,]+", line.strip())
        values = [np.int32(a) if a.isdigit() else read(a) for a in arguments]
        registers[result] = instructions[name](*values)
    return np.float32(registers["$0"])


# Skipped with older versions of JAX, whose XLA computes tanh in another way.
@needs_kernels
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_the_instructions_compute(name, monkeypatch):
    monkeypatch.setattr(mosaic, "asm", run_ptx)
    monkeypatch.setattr(mosaic, "f32", np.float32)
    monkeypatch.setattr(mosaic, "float_type", lambda: None)
    jaxpr = Elementwise(FUNCTIONS[name], 1)._jaxpr.jaxpr
    x = np.concatenate([np.linspace(-9, 9, 61), [0, -0.0, 1e-5, -90, 90]]).astype(np.float32)
    with np.errstate(over="ignore"):
        got = [elementwise._emit(jaxpr, [value])[0] for value in x]
    np.testing.assert_allclose(got, FUNCTIONS[name](x), rtol=2e-6, atol=2e-7)


def test_functions_of_two_arrays():
    assert Elementwise(lambda gate, up: jax.nn.silu(gate) * up, 2).arity == 2
    with pytest.raises(NotSupported, match="cannot be traced"):
        Elementwise(lambda gate, up: gate * up, 1)


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
        out_ref[rows, :] = emitted(values, interpreted=False)

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
    for function in (jax.nn.gelu, jax.nn.silu):
        traced = jax.jit(functools.partial(apply, function)).trace(x)
        assert "@mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="compares with XLA's GPU kernels")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_bits_are_those_of_xla(name):
    """A kernel must compute each activation function with the same bits as XLA.

    The arguments are all bfloat16 numbers, since a gated matmul in bfloat16 applies the function to
    such numbers.
    """
    bits = jnp.arange(2**16, dtype=jnp.uint16)
    x = lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float32).reshape(1024, 64)
    got = np.asarray(jax.jit(functools.partial(apply, FUNCTIONS[name]))(x))
    want = np.asarray(jax.jit(FUNCTIONS[name])(x))
    same = (got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))
    assert np.all(same), np.asarray(x)[~same][:8]
