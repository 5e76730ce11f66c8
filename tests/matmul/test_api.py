"""Tests of the grouped matmul against float64 NumPy, with every implementation that runs here."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.float8 import SUM_ERROR
from support.kernels import KERNELS_RUN, lowered, needs_kernels
from support.matmuls import (
    AVAILABLE,
    GROUP_SIZES,
    NUM_ROWS,
    TOLERANCE,
    F,
    H,
    assert_close,
    available_implementations,
    expected,
    gradient_shapes,
    operands,
)
from support.selection import quick

import jax_ep
from jax_ep.formats import FLOAT8_MATRICES, FLOAT8_ROWS, MXFP4, Float8, Transposed
from jax_ep.matmul.api import grouped_matmul
from jax_ep.matmul.backend import Problem
from jax_ep.matmul.primitives import IMPLEMENTATIONS


@functools.partial(jax.jit, static_argnums=4)
def product_and_gradients(lhs, rhs, sizes, grad, implementation):
    out, vjp = jax.vjp(
        lambda a, b: grouped_matmul(a, b, sizes, implementation=implementation), lhs, rhs
    )
    return out, *vjp(grad)


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("case", quick([*GROUP_SIZES], "empty groups", "past R"))
@pytest.mark.parametrize(
    ("implementation", "dtype"),
    quick(AVAILABLE, *(each for each in AVAILABLE if each[1] == "bfloat16")),
)
def test_product_and_gradients(implementation, dtype, case):
    sizes = GROUP_SIZES[case]
    args = operands(NUM_ROWS, sizes, dtype)
    got = product_and_gradients(*args, implementation)
    total = sum(sizes)
    for mine, want in zip(got, expected(*args), strict=True):
        assert_close(mine, want, dtype)
    assert not np.any(np.asarray(got[0])[total:]), "the product past the last group"
    assert not np.any(np.asarray(got[1])[total:]), "the gradient of lhs past the last group"
    empty = np.asarray(args[2]) == 0
    assert not np.any(np.asarray(got[2])[empty]), "the gradient of an empty group's matrix"


def test_without_jit_and_with_numpy_operands():
    lhs, rhs, sizes, grad = operands(40, [3, 20, 0], "float32")
    got = grouped_matmul(np.asarray(lhs), np.asarray(rhs), np.asarray(sizes, np.int64))
    assert_close(got, expected(lhs, rhs, sizes, grad)[0], "float32")


def test_second_order_gradient():
    lhs, rhs, sizes, _ = operands(30, [10, 0, 20], "float32")

    def loop(lhs, rhs):
        ids = np.repeat(np.arange(3), np.asarray(sizes))
        return jnp.einsum("rh,rhf->rf", lhs, rhs[ids])

    def squared(lhs, rhs, multiply):
        gradients = jax.grad(lambda *args: jnp.sum(jnp.sin(multiply(*args))), (0, 1))(lhs, rhs)
        return sum(jnp.sum(each**2) for each in gradients)

    with jax.default_matmul_precision("highest"):
        got, wanted = (
            jax.jit(jax.grad(functools.partial(squared, multiply=multiply), (0, 1)))(lhs, rhs)
            for multiply in (lambda lhs, rhs: grouped_matmul(lhs, rhs, sizes), loop)
        )
    for mine, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, want, rtol=0, atol=100 * TOLERANCE["float32"])


@pytest.mark.parametrize("jit", quick([False, True], True))
def test_who_looks_for_nan_is_told_where_one_is_made(jit):
    """With jax_debug_nans, the error for a product with NaN must name grouped_matmul."""
    lhs = jnp.ones((8, H)).at[0, 0].set(jnp.inf)
    rhs, sizes = jnp.zeros((2, H, F)), jnp.array([4, 4], jnp.int32)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan.* grouped_matmul"):
        (jax.jit(grouped_matmul) if jit else grouped_matmul)(lhs, rhs, sizes)


# In TF32, GPUs' default for float32, two programs may round differently.
@jax.default_matmul_precision("highest")
def test_vmap():
    lhs, rhs, sizes, _ = operands(50, [20, 0, 30], "float32")
    stacked = jnp.stack([lhs, 2 * lhs])
    both = jax.vmap(lambda x: grouped_matmul(x, rhs, sizes))(stacked)
    for one, x in zip(both, stacked, strict=True):
        np.testing.assert_array_equal(one, grouped_matmul(x, rhs, sizes))
    matrices = jnp.stack([rhs, -rhs], axis=3)
    many = jax.vmap(lambda w: grouped_matmul(lhs, w, sizes), in_axes=3, out_axes=2)(matrices)
    np.testing.assert_array_equal(many[:, :, 0], -many[:, :, 1])


# ---- lowering for CUDA, on any machine -------------------------------------------------------

# Shapes (R, H, F, L): R rows, L matrices [H, F].
CUDA_SHAPES = [
    # Few rows in each group need tiles of 256 columns.
    (1024, 2048, 7168, 64),
    (333, 64, 192, 3),
    (1, 64, 64, 4),
]


def loss(lhs, rhs, sizes, implementation=None):
    out = grouped_matmul(lhs, rhs, sizes, implementation=implementation)
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


@needs_kernels
@pytest.mark.parametrize("shape", quick(CUDA_SHAPES, CUDA_SHAPES[1], unpack=False), ids=str)
def test_lowers_for_cuda(shape):
    dtype = jnp.float16 if shape[0] % 16 else jnp.bfloat16
    gradients = jax.grad(functools.partial(loss, implementation="pallas"), (0, 1))
    text = lowered(jax.jit(gradients), *gradient_shapes(*shape, dtype))
    assert text.count("@mosaic_gpu") >= 3, "product, dlhs and drhs"
    assert "ragged_dot" not in text


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((64, 100, 64, 2), "bfloat16"), ((64, 128, 64, 2), "float32"), (("r", 64, 64, 2), "bfloat16")],
    ids=str,
)
def test_what_no_kernel_multiplies_lowers_without_one(shape, dtype):
    """GPUs multiply it in blocks of rows, also if the number of rows is symbolic."""
    gradients = jax.jit(jax.grad(loss, (0, 1)))
    num_rows, *others = shape
    if num_rows == "r":
        (num_rows,) = jax.export.symbolic_shape("r")
    shapes = gradient_shapes(num_rows, *others, jnp.dtype(dtype))

    def text(function):
        return jax.export.export(function, platforms=["cuda"])(*shapes).mlir_module()

    assert not re.search("mosaic_gpu|ragged_dot", text(gradients))
    by_xla = jax.grad(functools.partial(loss, implementation="xla"), (0, 1))
    assert "ragged_dot" in text(jax.jit(by_xla))


@pytest.mark.slow
@needs_kernels
def test_one_trace_lowers_for_two_platforms():
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(*gradient_shapes(64, 128, 64, 2, jnp.bfloat16))
    assert "@mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "@mosaic_gpu" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    for name in ("grouped_matmul", "grouped_matmul_drhs"):
        assert f" {name}[" in str(traced.jaxpr), "a primitive that a reader of the jaxpr can see"


# ---- quantized operands ----------------------------------------------------------------------

QUANTIZED_SIZES = [3, 0, 150, 21]
ROWS_OF_FORMATS = {
    "array": None,
    "float8": FLOAT8_ROWS,
    "float8, power of two": Float8.of(jnp.float8_e4m3fn, (1, 128), power_of_two=True),
    "float8 of 64": Float8.of(jnp.float8_e4m3fn, (1, 64)),
}
MATRICES_OF_FORMATS = {
    "array": None,
    "float8": FLOAT8_MATRICES,
    "float8 transposed": Transposed.of(FLOAT8_MATRICES),
    "MXFP4 transposed": Transposed.of(MXFP4),
}


def quantized_operands(of_rows, of_matrices, dtype="bfloat16"):
    """Returns lhs, rhs and the group sizes; rows past the last group are NaN."""
    rng = np.random.default_rng(0)
    lhs = rng.standard_normal((256, 256))
    lhs[sum(QUANTIZED_SIZES) :] = np.nan
    rhs = rng.standard_normal((len(QUANTIZED_SIZES), 256, 384)) / 16
    both = [
        x if format is None else jax_ep.quantize(x, format)
        for x, format in (
            (jnp.asarray(lhs, dtype), ROWS_OF_FORMATS[of_rows]),
            (jnp.asarray(rhs, dtype), MATRICES_OF_FORMATS[of_matrices]),
        )
    ]
    return *both, jnp.asarray(QUANTIZED_SIZES, jnp.int32)


def numbers(x):
    """Returns the numbers of an operand in float64."""
    wide = x.dequantize(jnp.float32) if isinstance(x, jax_ep.QuantizedArray) else x
    return np.asarray(wide).astype(np.float64)


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("of_matrices", quick([*MATRICES_OF_FORMATS], "float8"))
@pytest.mark.parametrize("of_rows", quick([*ROWS_OF_FORMATS], "array", "float8"))
@pytest.mark.parametrize(
    "implementation", quick([None, *available_implementations((256, 384), "bfloat16")], None)
)
def test_quantized_operands(implementation, of_rows, of_matrices):
    """Values times scales are multiplied, and the result is rounded once."""
    lhs, rhs, sizes = quantized_operands(of_rows, of_matrices)
    multiply = functools.partial(grouped_matmul, implementation=implementation)
    got = jax.jit(multiply)(lhs, rhs, sizes)
    x, w, used = numbers(lhs), numbers(rhs), sum(QUANTIZED_SIZES)
    nothing = np.zeros((len(x), w.shape[2]))
    want, _, _ = expected(x, w, QUANTIZED_SIZES, nothing)
    magnitudes, _, _ = expected(abs(x), abs(w), QUANTIZED_SIZES, nothing)
    error = float(jnp.finfo(jnp.bfloat16).eps) / 2
    exact = of_rows in ("float8", "float8, power of two") and of_matrices.startswith("float8")
    bound = (SUM_ERROR if exact else 2 * error) * magnitudes + error * abs(want)
    assert got.dtype == jnp.bfloat16
    assert (abs(np.asarray(got).astype(np.float64) - want) <= bound)[:used].all()
    assert not np.any(np.asarray(got)[used:])
    if implementation is None and of_rows == "float8":
        both = jax.tree.map(lambda part: jnp.stack([part, part[::-1]]), lhs)
        mapped = jax.jit(jax.vmap(multiply, (0, None, None)))(both, rhs, sizes)
        np.testing.assert_array_equal(np.asarray(mapped[0]), np.asarray(got))


def test_the_gradient_beside_a_quantized_operand():
    """It must be that of the dequantized operand, which itself has none."""
    for of_rows, of_matrices in (("array", "MXFP4 transposed"), ("float8", "array")):
        lhs, rhs, sizes = quantized_operands(of_rows, of_matrices)

        which = 0 if of_rows == "array" else 1
        dense = [x.dequantize() if isinstance(x, jax_ep.QuantizedArray) else x for x in (lhs, rhs)]
        gradient = jax.jit(jax.grad(loss, which))
        got, want = gradient(lhs, rhs, sizes), gradient(*dense, sizes)
        assert_close(got, np.asarray(want).astype(np.float64), "bfloat16")
        assert np.any(np.asarray(got))
        with pytest.raises(TypeError, match=r"[lr]hs is stored quantized, .* has no gradient"):
            jax.vjp(grouped_matmul, lhs, rhs, sizes)


@pytest.mark.slow
def test_numbers_quantized_by_numpy():
    """NumPy's default dtype is float64, which JAX arrays do not have without `jax_enable_x64`."""
    rng = np.random.default_rng(0)
    lhs = jax_ep.quantize(rng.standard_normal((64, 128)), FLOAT8_ROWS)
    sizes = jnp.asarray([20, 0, 30], jnp.int32)
    for format in (FLOAT8_MATRICES, Transposed.of(MXFP4)):
        rhs = jax_ep.quantize(rng.standard_normal((3, 128, 128)), format)
        assert lhs.dtype == rhs.dtype == np.float64
        got = grouped_matmul(lhs, rhs, sizes)
        want, _, _ = expected(numbers(lhs), numbers(rhs), sizes, np.zeros((64, 128)))
        assert_close(got, want, "float32")


@needs_kernels
@pytest.mark.parametrize(
    ("of_rows", "of_matrices", "dtypes"),
    quick(
        [
            ("float8", "float8 transposed", {"f8E4M3FN"}),
            ("array", "MXFP4 transposed", {"bf16", "ui8"}),
            ("float8", "array", {"bf16"}),
        ],
        ("array", "MXFP4 transposed", {"bf16", "ui8"}),
    ),
)
def test_what_kernels_multiply(of_rows, of_matrices, dtypes):
    multiply = functools.partial(grouped_matmul, implementation="pallas")
    text = lowered(jax.jit(multiply), *quantized_operands(of_rows, of_matrices))
    calls = [line for line in text.splitlines() if "@mosaic_gpu" in line and "x384x" in line]
    assert calls, "the product"
    (operands,) = re.findall(r": \((.*?)\) ->", calls[0])
    assert set(re.findall(r"x(f8E4M3FN|bf16|ui8)>", operands)) == dtypes


@pytest.mark.parametrize("implementation", available_implementations((H, F), "float32"))
def test_no_rows(implementation):
    rhs, sizes = jnp.ones((2, H, F)), jnp.zeros(2, jnp.int32)
    out, *gradients = product_and_gradients(
        jnp.ones((0, H)), rhs, sizes, jnp.ones((0, F)), implementation
    )
    assert out.shape == (0, F) and gradients[0].shape == (0, H)
    np.testing.assert_array_equal(gradients[1], np.zeros(rhs.shape))


def test_no_rows_of_quantized_operands():
    rows, matrices = jnp.ones((0, 128)), jax_ep.quantize(jnp.ones((2, 128, 256)), FLOAT8_MATRICES)
    for lhs in (rows, jax_ep.quantize(rows, FLOAT8_ROWS)):
        out = grouped_matmul(lhs, matrices, jnp.zeros(2, jnp.int32))
        assert out.shape == (0, 256) and out.dtype == lhs.dtype


# ---- errors ----------------------------------------------------------------------------------


def call(lhs=((8, H), "float32"), rhs=((2, H, F), "float32"), sizes=((2,), "int32"), **options):
    arrays = [jnp.zeros(shape, dtype) for shape, dtype in (lhs, rhs, sizes)]
    return grouped_matmul(*arrays, **options)


BY_KERNELS = {"implementation": "pallas"}


def half(depth, dtype="bfloat16"):
    return {"lhs": ((8, depth), dtype), "rhs": ((2, depth, F), dtype)}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lhs": ((8, 4, H), "float32")}, ValueError, r"lhs must be .*\[R, H\].*\(8, 4, 64\)"),
        ({"rhs": ((2, H, 0), "float32")}, ValueError, r"rhs .*no empty axis.*\(2, 64, 0\)"),
        ({"lhs": ((8, H), "int32")}, TypeError, r"lhs must be a floating array .*int32"),
        ({"lhs": ((8, H + 1), "float32")}, ValueError, r"columns of lhs.*\(8, 65\)"),
        ({"rhs": ((H, F), "float32")}, ValueError, r"rhs must be .*\[L, H, F\].*\(64, 128\)"),
        ({"rhs": ((2, H, F), "bfloat16")}, TypeError, r"one dtype.*float32 and bfloat16.*astype"),
        ({"sizes": ((3,), "int32")}, ValueError, r"group_sizes must have one entry.*\(3,\)"),
        ({"sizes": ((2,), "float32")}, TypeError, r"group_sizes must be an integer array"),
        ({"implementation": "cutlass"}, ValueError, r"must be one of .*pallas.*'cutlass'\.$"),
        (BY_KERNELS, ValueError, r'"pallas" cannot run.*not float32'),
        (half(100) | BY_KERNELS, ValueError, r"multiples of 64.*\[100, 128\]"),
        (half(H, "float8_e4m3fn") | BY_KERNELS, ValueError, "not float8_e4m3fn without scales"),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        call(**arguments)


def test_what_runs_where():
    def reason(name, platform, dtype="bfloat16"):
        return IMPLEMENTATIONS[name].unavailable_reason(Problem((H, F), dtype, platform))

    for name in ("blocks", "loop", "xla"):
        assert reason(name, "cpu") is reason(name, "cuda", "float32") is None
    if jax.default_backend() == "cpu":
        assert (reason("pallas", "cuda") is None) == KERNELS_RUN
        why = "it needs JAX 0.11"
        if KERNELS_RUN:
            # At lowering, nothing says whether a layer named the implementation.
            why = '^matmul_implementation="pallas" of a layer, or implementation="pallas" .*cpu'
        with pytest.raises(ValueError, match=why):
            call(**half(H), implementation="pallas")
    assert reason("pallas", "cpu") is not None
