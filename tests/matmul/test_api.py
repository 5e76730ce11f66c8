"""Tests of the grouped matmul against float64 NumPy, with every implementation that runs here."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import float8 as float8_operands
from support import meshes
from support.kernels import KERNELS_RUN, needs_kernels
from support.matmuls import available_implementations
from support.meshes import cuda_mesh
from support.selection import quick

from jax_ep.matmul import pallas
from jax_ep.matmul.api import (
    IMPLEMENTATIONS,
    add_drhs_of_each,
    drhs_of_each,
    gate_gradient,
    gated_product,
    grouped_matmul,
    sum_of_products,
)
from jax_ep.matmul.backend import Problem
from jax_ep.matmul.gating import gate_gradient_of_all
from jax_ep.runtime import jax_compat

H, F = 64, 128
DTYPES = ("float32", "bfloat16", "float16")
# Tolerances relative to the largest value; GPUs multiply float32 in TF32 by default.
TOLERANCE = {"float32": 1e-5 if jax.default_backend() == "cpu" else 2e-3}
TOLERANCE |= {"bfloat16": 1e-2, "float16": 2e-3}

AVAILABLE = [
    pytest.param(name, dtype, id=f"{name}-{dtype}")
    for dtype in DTYPES
    for name in available_implementations((H, F), dtype)
]
NUM_ROWS = 700
# Group sizes by what is special about them. All have six groups, so that one compiled program runs
# them all.
GROUP_SIZES = {
    "even": [116, 116, 116, 116, 116, 116],
    "full": [100, 100, 100, 100, 100, 200],
    "one group": [0, 0, 700, 0, 0, 0],
    "empty groups": [0, 130, 0, 0, 170, 0],
    "one huge group": [1, 640, 0, 3, 7, 2],
    "blocks' edges": [128, 64, 64, 256, 0, 128],
    "far short of R": [5, 0, 20, 0, 0, 1],
    "all empty": [0, 0, 0, 0, 0, 0],
    "past R": [300, 0, 900, 5, 0, 7],
    "far past R": [300, 0, 2**31 - 1000, 5, 0, 7],
}


def operands(num_rows, sizes, dtype, seed=0):
    """Returns lhs [R, H], rhs [L, H, F], group_sizes [L] and a cotangent [R, F].

    Rows past the last group are NaN.
    """
    rng = np.random.default_rng(seed)
    lhs = rng.standard_normal((num_rows, H)).astype(dtype)
    rhs = (rng.standard_normal((len(sizes), H, F)) / np.sqrt(H)).astype(dtype)
    grad = rng.standard_normal((num_rows, F)).astype(dtype)
    lhs[sum(sizes) :] = np.nan
    grad[sum(sizes) :] = np.nan
    return jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(sizes, jnp.int32), jnp.asarray(grad)


def expected(lhs, rhs, sizes, grad):
    """Returns the product and the gradients of lhs and rhs, in float64."""
    lhs, rhs, grad = (np.asarray(x).astype(np.float64) for x in (lhs, rhs, grad))
    out, dlhs, drhs = np.zeros(grad.shape), np.zeros(lhs.shape), np.zeros(rhs.shape)
    start = 0
    for group, size in enumerate(np.asarray(sizes)):
        rows = slice(start, start + size)
        out[rows] = lhs[rows] @ rhs[group]
        dlhs[rows] = grad[rows] @ rhs[group].T
        drhs[group] = lhs[rows].T @ grad[rows]
        start += size
    return out, dlhs, drhs


def assert_close(got, want, dtype):
    assert got.dtype == jnp.dtype(dtype)
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype] * max(1, abs(want).max()))


@functools.partial(jax.jit, static_argnums=4)
def product_and_gradients(lhs, rhs, sizes, grad, implementation):
    out, vjp = jax.vjp(
        lambda a, b: grouped_matmul(a, b, sizes, implementation=implementation), lhs, rhs
    )
    return out, *vjp(grad)


@pytest.mark.parametrize("case", quick([*GROUP_SIZES], "empty groups", "blocks' edges", "past R"))
@pytest.mark.parametrize(("implementation", "dtype"), AVAILABLE)
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


@pytest.mark.parametrize(("implementation", "dtype"), AVAILABLE)
def test_random_group_sizes(implementation, dtype):
    rng = np.random.default_rng(1)
    for seed in range(4):
        sizes = rng.multinomial(rng.integers(NUM_ROWS), rng.dirichlet(np.full(6, 0.3)))
        args = operands(NUM_ROWS, sizes.tolist(), dtype, seed)
        got = product_and_gradients(*args, implementation)
        for mine, want in zip(got, expected(*args), strict=True):
            assert_close(mine, want, dtype)


@pytest.mark.parametrize("transpose_rhs", quick([False, True], True))
@pytest.mark.parametrize(("implementation", "dtype"), AVAILABLE)
def test_sum_of_products(implementation, dtype, transpose_rhs):
    sizes = GROUP_SIZES["empty groups"]
    both = [operands(NUM_ROWS, sizes, dtype, seed) for seed in range(2)]
    grad = both[0][3]
    want = [expected(lhs, rhs, sizes, grad) for lhs, rhs, _, _ in both]
    pairs = tuple(
        (lhs, rhs.transpose(0, 2, 1) if transpose_rhs else rhs) for lhs, rhs, _, _ in both
    )

    @jax.jit
    def sum_and_gradients(pairs, sizes, grad):
        out, vjp = jax.vjp(
            lambda pairs: sum_of_products(pairs, sizes, implementation, transpose_rhs), pairs
        )
        return out, *vjp(grad)

    out, dpairs = sum_and_gradients(pairs, jnp.asarray(sizes, jnp.int32), grad)
    assert_close(out, want[0][0] + want[1][0], dtype)
    assert not np.any(np.asarray(out)[sum(sizes) :])
    for (dlhs, drhs), (_, want_dlhs, want_drhs) in zip(dpairs, want, strict=True):
        assert_close(dlhs, want_dlhs, dtype)
        assert_close(drhs.transpose(0, 2, 1) if transpose_rhs else drhs, want_drhs, dtype)


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


@pytest.mark.parametrize(
    ("keep", "has_biases"), quick([(False, False), (True, True)], (True, True))
)
@pytest.mark.parametrize(("implementation", "dtype"), AVAILABLE)
def test_gated_product(implementation, dtype, keep, has_biases):
    """The gated product must equal, bit for bit, two products and a gate, also under vmap.

    Its gradients are equal within rounding.
    """
    sizes = GROUP_SIZES["empty groups"]
    args = [operands(NUM_ROWS, sizes, dtype, seed) for seed in range(2)]
    lhs, rhs, group_sizes = args[0][0], (args[0][1], args[1][1]), args[0][2]
    shape = 2, rhs[0].shape[0], rhs[0].shape[2]
    of_both = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    biases = tuple(map(jnp.asarray, of_both)) if has_biases else None

    def fused(lhs, rhs, biases):
        return gated_product(lhs, rhs, group_sizes, swiglu, keep, implementation, biases=biases)

    def apart(lhs, rhs, biases):
        products = [grouped_matmul(lhs, r, group_sizes, implementation=implementation) for r in rhs]
        wide = [product.astype(jnp.float32) for product in products]
        for i, bias in enumerate(biases or ()):
            rows = jnp.repeat(bias, group_sizes, axis=0, total_repeat_length=sum(sizes))
            wide[i] += jnp.pad(rows, ((0, NUM_ROWS - sum(sizes)), (0, 0)))
        hidden = swiglu(*wide).astype(dtype)
        return (hidden, *products) if keep else (hidden,)

    @functools.partial(jax.jit, static_argnums=0)
    def values_and_gradients(function, *operands):
        out, vjp = jax.vjp(function, *operands)
        return out, vjp(tuple(args[1][3] for _ in out))

    (out, grads), (want, want_grads) = (
        values_and_gradients(f, lhs, rhs, biases) for f in (fused, apart)
    )
    for mine, theirs in zip(out, want, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
    *of_operands, dbiases = grads
    for mine, theirs in zip(
        jax.tree.leaves(of_operands), jax.tree.leaves(want_grads[:2]), strict=True
    ):
        assert_close(mine, np.asarray(theirs).astype(np.float64), dtype)
    for mine, theirs in zip(dbiases or (), want_grads[2] or (), strict=True):
        assert_close(mine, np.asarray(theirs).astype(np.float64), "float32")
    both = jax.tree.map(lambda bias: jnp.stack([bias, -bias]), biases)
    mapped = jax.jit(jax.vmap(fused, (0, None, 0)))(jnp.stack([lhs, -lhs]), rhs, both)
    np.testing.assert_array_equal(np.asarray(mapped[0][0]), np.asarray(out[0]))


@pytest.mark.parametrize(("implementation", "dtype"), AVAILABLE)
def test_several_gradients_of_matrices(implementation, dtype):
    """`drhs_of_each` of several cotangents must equal `drhs_of_each` of each of them alone.

    It computes the gradients of matrices. The gradients of these gradients must be equal, too.
    """
    sizes = GROUP_SIZES["empty groups"]
    lhs, _, group_sizes, grad = operands(NUM_ROWS, sizes, dtype, 0)
    live = (jnp.arange(NUM_ROWS) < sum(sizes))[:, None]
    lhs, grad = jnp.where(live, lhs, 0), jnp.where(live, grad, 0)
    grads = grad, 2 * grad

    def alone(lhs, grads):
        return tuple(drhs_of_each(lhs, (g,), group_sizes, implementation)[0] for g in grads)

    @functools.partial(jax.jit, static_argnums=0)
    def values_and_gradients(function, *args):
        out, vjp = jax.vjp(function, *args)
        return out, vjp(out)

    (out, (dlhs, dgrads)), (want, (want_dlhs, want_dgrads)) = (
        values_and_gradients(function, lhs, grads)
        for function in (lambda *args: drhs_of_each(*args, group_sizes, implementation), alone)
    )
    for mine, theirs in zip((*out, *dgrads), (*want, *want_dgrads), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
    assert np.any(np.asarray(out[1]))
    assert_close(dlhs, np.asarray(want_dlhs).astype(np.float64), dtype)


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize(("implementation", "dtype"), AVAILABLE)
def test_gradients_of_matrices_are_added_to_sums(implementation, dtype, is_wide):
    """The results, and their gradients, must be those of separate sums."""
    sizes = GROUP_SIZES["empty groups"]
    lhs, _, group_sizes, grad = operands(NUM_ROWS, sizes, dtype, 0)
    live = (jnp.arange(NUM_ROWS) < sum(sizes))[:, None]
    lhs, grad = jnp.where(live, lhs, 0), jnp.where(live, grad, 0)
    kind = "float32" if is_wide else dtype
    shape = 2, len(sizes), lhs.shape[1], grad.shape[1]
    sums = tuple(jnp.asarray(np.random.default_rng(1).normal(size=shape), kind))

    def added(sums, lhs, grads):
        return add_drhs_of_each(sums, lhs, grads, group_sizes, implementation)

    def separately(sums, lhs, grads):
        results = drhs_of_each(lhs, grads, group_sizes, implementation)
        wide = (
            a.astype("float32") + b.astype("float32") for a, b in zip(sums, results, strict=True)
        )
        return tuple(each.astype(kind) for each in wide)

    @functools.partial(jax.jit, static_argnums=0)
    def values_and_gradients(function, *args):
        out, vjp = jax.vjp(function, *args)
        return out, vjp(out)

    got, want = (
        jax.device_get(values_and_gradients(function, sums, lhs, (grad, 2 * grad)))
        for function in (added, separately)
    )
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(np.any(each) for each in jax.tree.leaves(got))
    assert got[0][0].dtype == kind


@pytest.mark.parametrize("case", ["empty groups", "past R", "all empty"])
@pytest.mark.parametrize("implementation, dtype", AVAILABLE)
def test_gate_gradient(implementation, dtype, case):
    """The gradient of a gating must be that of NumPy in the rows of groups, whatever is in others.

    The operands must stay as they are, although the kernel writes to their memory.
    """
    rng, sizes = np.random.default_rng(0), GROUP_SIZES[case]
    used = min(sum(sizes), NUM_ROWS)
    arrays = [rng.standard_normal((NUM_ROWS, F)).astype(np.float32) for _ in range(3)]
    weights = rng.random(NUM_ROWS, np.float32)
    for each in (*arrays, weights):
        each[used:] = np.nan
    dhidden, gate, up = (jnp.asarray(each, dtype) for each in arrays)
    got = jax.jit(lambda *a: gate_gradient(float8_operands.swiglu, *a, implementation))(
        dhidden, (gate, up), jnp.asarray(weights), jnp.asarray(sizes, jnp.int32)
    )
    dgate, dup, hidden, products = float8_operands.gate_gradient(
        *(np.asarray(each[:used]).astype(np.float32) for each in (dhidden, gate, up)),
        weights[:used],
    )
    for result, want in zip(got, (hidden, dgate, dup, products.sum(axis=1)), strict=True):
        assert result.dtype == (dtype if result.ndim == 2 else jnp.float32)
        np.testing.assert_allclose(
            np.asarray(result[:used]).astype(np.float64), want, rtol=TOLERANCE[dtype], atol=1e-4
        )
    for each, before in zip((dhidden, gate, up), arrays, strict=True):
        want = before.astype(each.dtype).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(each).astype(np.float32), want)


def test_second_order_gradient_of_a_gate():
    rng = np.random.default_rng(0)
    dhidden, gate, up = (jnp.asarray(rng.standard_normal((6, 8)), jnp.float32) for _ in range(3))
    weights, sizes = jnp.asarray(rng.random(6), jnp.float32), jnp.asarray([4, 2], jnp.int32)

    def total(function):
        def of(dhidden, products, weights):
            results = function(dhidden, products, weights)
            return sum(jnp.sum(jnp.sin(each)) for each in results)

        return jax.jit(jax.grad(of, (0, 1, 2)))(dhidden, (gate, up), weights)

    swiglu = float8_operands.swiglu
    got = total(lambda *a: gate_gradient(swiglu, *a, sizes, None))
    want = total(lambda *a: gate_gradient_of_all(swiglu, *a))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.skipif(jax_compat._dce_rules is None, reason="this JAX computes all results")
def test_a_gradient_that_nothing_uses_is_not_computed():
    lhs, _, group_sizes, grad = operands(NUM_ROWS, GROUP_SIZES["empty groups"], "float32", 0)

    def gradients(lhs, grad):
        return drhs_of_each(lhs, (grad, 2 * grad, 3 * grad), group_sizes, "loop")

    def alone(lhs, grad):
        return drhs_of_each(lhs, (2 * grad,), group_sizes, "loop")[0]

    def second(lhs, grad):
        return gradients(lhs, grad)[1]

    def products(function):
        return jax.jit(function).trace(lhs, grad).lower().as_text().count("dot_general")

    assert 0 < products(second) == products(alone) < products(gradients)
    got, want = (np.asarray(jax.jit(function)(lhs, grad)) for function in (second, alone))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_rows(dtype):
    """Products with fewer rows than a tile, and an odd number of rows, must be right."""
    for num_rows, sizes in ((1, [0, 1]), (13, [4, 7])):
        args = operands(num_rows, sizes, dtype)
        got = product_and_gradients(*args, None)
        for mine, want in zip(got, expected(*args), strict=True):
            assert_close(mine, want, dtype)


def test_without_jit_and_with_numpy_operands():
    lhs, rhs, sizes, grad = operands(40, [3, 20, 0], "float32")
    got = grouped_matmul(np.asarray(lhs), np.asarray(rhs), np.asarray(sizes, np.int64))
    assert_close(got, expected(lhs, rhs, sizes, grad)[0], "float32")


@pytest.mark.parametrize("dtype", quick(DTYPES, DTYPES[1]))
@pytest.mark.parametrize("implementation", [None, "xla", "loop"])
def test_under_strict_promotion_of_dtypes_and_ranks(implementation, dtype):
    args = operands(40, [3, 20, 0], dtype)
    want = product_and_gradients(*args, implementation)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        got = product_and_gradients(*args, implementation)
    for mine, usual in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(usual))


def test_import_loads_no_kernels():
    code = "import sys, jax_ep.matmul.api; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = done.stdout.split()
    assert "jax_ep.matmul.pallas" in loaded
    kernels = {name for name in loaded if name.startswith("pallas_kernels.matmul")}
    # These modules compute tables by JAX, and import no part of Pallas.
    light = {"chosen_groups", "row_blocks"}
    assert kernels <= {"pallas_kernels.matmul", *(f"pallas_kernels.matmul.{n}" for n in light)}
    assert not any(name.startswith("jax.experimental.pallas") for name in loaded)


def test_second_order_gradient():
    lhs, rhs, sizes, _ = operands(30, [10, 0, 20], "float32")

    def loop(lhs, rhs):
        ids = np.repeat(np.arange(3), np.asarray(sizes))
        return jnp.einsum("rh,rhf->rf", lhs, rhs[ids])

    def slope(multiply):
        def value(lhs, rhs):
            return jnp.sum(jnp.sin(multiply(lhs, rhs)))

        def squared(lhs, rhs):
            return sum(jnp.sum(g**2) for g in jax.grad(value, (0, 1))(lhs, rhs))

        return jax.grad(squared, (0, 1))(lhs, rhs)

    with jax.default_matmul_precision("highest"):
        got, wanted = slope(lambda a, b: grouped_matmul(a, b, sizes)), slope(loop)
    for mine, want in zip(got, wanted, strict=True):
        np.testing.assert_allclose(mine, want, rtol=0, atol=100 * TOLERANCE["float32"])


@pytest.mark.parametrize("jit", [False, True])
def test_who_looks_for_nan_is_told_where_one_is_made(jit):
    """With jax_debug_nans, the error for a product with NaN must name grouped_matmul.

    To find the place, JAX runs the function again, op by op.
    """
    lhs = jnp.ones((8, H)).at[0, 0].set(jnp.inf)
    rhs, sizes = jnp.zeros((2, H, F)), jnp.array([4, 4], jnp.int32)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan.* grouped_matmul"):
        (jax.jit(grouped_matmul) if jit else grouped_matmul)(lhs, rhs, sizes)


# In TF32, GPUs' default for float32, two programs may round differently.
@jax.default_matmul_precision("highest")
def test_checkpoint_scan_and_vmap():
    lhs, rhs, sizes, grad = operands(64, [20, 0, 30], "float32")
    rhs = rhs[:, :, :H]

    @jax.checkpoint
    def step(lhs, _):
        return jnp.tanh(grouped_matmul(lhs, rhs, sizes)), None

    def scanned(lhs):
        return jnp.sum(jax.lax.scan(step, lhs, None, length=3)[0])

    def unrolled(lhs):
        for _ in range(3):
            lhs = jnp.tanh(grouped_matmul(lhs, rhs, sizes))
        return jnp.sum(lhs)

    np.testing.assert_allclose(
        jax.grad(scanned)(lhs), jax.grad(unrolled)(lhs), rtol=0, atol=10 * TOLERANCE["float32"]
    )
    stacked = jnp.stack([lhs[:50], 2 * lhs[:50]])
    both = jax.vmap(lambda x: grouped_matmul(x, rhs, sizes))(stacked)
    for one, x in zip(both, stacked, strict=True):
        np.testing.assert_array_equal(one, grouped_matmul(x, rhs, sizes))
    many = jax.vmap(lambda w: grouped_matmul(lhs[:50], w, sizes), in_axes=3, out_axes=2)(
        jnp.stack([rhs, -rhs], axis=3)
    )
    np.testing.assert_array_equal(many[:, :, 0], -many[:, :, 1])


@pytest.mark.parametrize("check_vma", quick([True, False], True))
@pytest.mark.parametrize(
    ("implementation", "mesh_shape"),
    quick(
        [(None, (1, 1)), (None, (2, 1)), (None, (2, 2)), ("xla", (2, 4)), ("loop", (2, 4))],
        ("xla", (2, 4)),
    ),
    ids=str,
)
def test_inside_shard_map(implementation, mesh_shape, check_vma):
    """Inside shard_map, matrices replicated over `data` must get gradients summed over `data`."""
    mesh = meshes.mesh(mesh_shape, ("data", "expert"))
    data, experts = mesh_shape
    rng = np.random.default_rng(2)
    lhs = rng.standard_normal((data, experts, 50, H)).astype(np.float32)
    rhs = rng.standard_normal((experts, 3, H, F)).astype(np.float32) / 8
    sizes = rng.multinomial(45, [0.5, 0.1, 0.4], size=(data, experts)).astype(np.int32)
    lhs[:, :, 45:] = np.nan

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("data", "expert"), P("expert"), P("data", "expert")),
        out_specs=P("data", "expert"),
        check_vma=check_vma,
    )
    def multiply(lhs, rhs, sizes):
        out = grouped_matmul(lhs[0, 0], rhs[0], sizes[0, 0], implementation=implementation)
        return out[None, None]

    out, vjp = jax.vjp(jax.jit(lambda a, b: multiply(a, b, sizes)), lhs, rhs)
    grad = rng.standard_normal(out.shape).astype(np.float32)
    dlhs, drhs = vjp(jnp.asarray(grad))
    want_drhs = np.zeros(rhs.shape)
    for d in range(data):
        for e in range(experts):
            want = expected(lhs[d, e], rhs[e], sizes[d, e], grad[d, e])
            assert_close(out[d, e], want[0], "float32")
            assert_close(dlhs[d, e], want[1], "float32")
            want_drhs[e] += want[2]
    assert_close(drhs, want_drhs, "float32")


# ---- lowering for CUDA, on any machine -------------------------------------------------------

# Shapes (R, H, F, L): R rows, L matrices [H, F].
CUDA_SHAPES = [
    (4096, 7168, 2048, 32),
    (4096, 2048, 7168, 32),
    (1024, 2048, 768, 16),
    # Few rows in each group need tiles of 256 columns.
    (1024, 2048, 7168, 64),
    (1000, 4096, 14336, 8),
    (333, 64, 192, 3),
    (8, 128, 64, 1),
    (1, 64, 64, 4),
]


def lower_for_cuda(function, *shapes):
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def gradient_shapes(num_rows, hidden, mlp, groups, dtype):
    return (
        jax.ShapeDtypeStruct((num_rows, hidden), dtype),
        jax.ShapeDtypeStruct((groups, hidden, mlp), dtype),
        jax.ShapeDtypeStruct((groups,), jnp.int32),
    )


def loss(lhs, rhs, sizes, implementation=None):
    out = grouped_matmul(lhs, rhs, sizes, implementation=implementation)
    return jnp.sum(jnp.sin(out.astype(jnp.float32)))


@needs_kernels
@pytest.mark.parametrize("shape", quick(CUDA_SHAPES, *CUDA_SHAPES[:2], unpack=False), ids=str)
def test_lowers_for_cuda(shape):
    dtype = jnp.float16 if shape[0] % 16 else jnp.bfloat16
    gradients = jax.grad(functools.partial(loss, implementation="pallas"), (0, 1))
    text = lower_for_cuda(gradients, *gradient_shapes(*shape, dtype))
    assert text.count("@mosaic_gpu") >= 3, "product, dlhs and drhs"
    assert "ragged_dot_general" not in text


@needs_kernels
def test_a_sum_of_products_is_one_kernel_for_cuda():
    def sum_of_two(lhs, rhs, sizes):
        return sum_of_products(((lhs, rhs), (2 * lhs, rhs)), sizes, None)

    shapes = gradient_shapes(1000, 256, 128, 4, jnp.bfloat16)
    # There is one kernel for the sum, and one that divides the groups' rows into tiles.
    assert lower_for_cuda(sum_of_two, *shapes).count("@mosaic_gpu") == 2


@pytest.mark.parametrize(
    ("shape", "dtype"), [((64, 100, 64, 2), "bfloat16"), ((64, 128, 64, 2), "float32")], ids=str
)
def test_what_no_kernel_multiplies_lowers_without_one(shape, dtype):
    text = lower_for_cuda(jax.grad(loss, (0, 1)), *gradient_shapes(*shape, jnp.dtype(dtype)))
    assert "mosaic_gpu" not in text


def test_float8_without_scales_lowers_without_a_kernel():
    """Only operands with scales, of `jax_ep.matmul.float8`, have float8 kernels."""
    lhs, rhs, sizes = gradient_shapes(64, 128, 128, 2, jnp.float8_e4m3fn)
    assert "mosaic_gpu" not in lower_for_cuda(grouped_matmul, lhs, rhs, sizes)
    operands = [jnp.zeros(x.shape, x.dtype) for x in (lhs, rhs, sizes)]
    with pytest.raises(ValueError, match="bfloat16 and float16, not float8_e4m3fn without scales"):
        grouped_matmul(*operands, implementation="pallas")


@needs_kernels
@pytest.mark.parametrize("check_vma", quick([True, False], True))
@pytest.mark.parametrize("implementation", quick([None, "pallas"], None))
def test_lowers_for_cuda_inside_shard_map(implementation, check_vma):
    mesh = cuda_mesh((2, 4), ("data", "expert"))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(("data", "expert")), P("expert"), P(("data", "expert"))),
        out_specs=P(),
        check_vma=check_vma,
    )
    def total_loss(lhs, rhs, sizes):
        return jax.lax.psum(loss(lhs, rhs, sizes, implementation), ("data", "expert"))

    shapes = (
        jax.ShapeDtypeStruct((8 * 500, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((16, 256, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((8 * 4,), jnp.int32),
    )
    assert lower_for_cuda(jax.grad(total_loss, (0, 1)), *shapes).count("@mosaic_gpu") >= 3


@needs_kernels
def test_one_trace_lowers_for_two_platforms():
    traced = jax.jit(jax.grad(loss, (0, 1))).trace(*gradient_shapes(64, 128, 64, 2, jnp.bfloat16))
    assert "@mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "@mosaic_gpu" not in traced.lower(lowering_platforms=("cpu",)).as_text()
    for name in ("grouped_matmul", "grouped_matmul_drhs"):
        assert f" {name}[" in str(traced.jaxpr), "a primitive that a reader of the jaxpr can see"


# ---- errors ----------------------------------------------------------------------------------


def call(lhs=((8, H), "float32"), rhs=((2, H, F), "float32"), sizes=((2,), "int32"), **options):
    arrays = [jnp.zeros(shape, dtype) for shape, dtype in (lhs, rhs, sizes)]
    return grouped_matmul(*arrays, **options)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lhs": ((8, 4, H), "float32")}, ValueError, r"lhs must be .*\[R, H\].*\(8, 4, 64\)"),
        ({"lhs": ((0, H), "float32")}, ValueError, r"lhs .*no empty axis.*\(0, 64\)"),
        ({"lhs": ((8, H), "int32")}, TypeError, r"lhs must be a floating array .*int32"),
        (
            {"lhs": ((8, H + 1), "float32")},
            ValueError,
            r"columns of lhs.*\(8, 65\).*\(2, 64, 128\)",
        ),
        ({"rhs": ((H, F), "float32")}, ValueError, r"rhs must be .*\[L, H, F\].*\(64, 128\)"),
        ({"rhs": ((2, H, F), "bfloat16")}, TypeError, r"one dtype.*float32 and bfloat16.*astype"),
        ({"sizes": ((3,), "int32")}, ValueError, r"group_sizes must have one entry.*\(3,\)"),
        ({"sizes": ((2,), "float32")}, TypeError, r"group_sizes must be an integer array"),
        ({"implementation": "cutlass"}, ValueError, r"must be one of .*pallas.*'cutlass'\.$"),
        ({"implementation": "pallas"}, ValueError, r'"pallas" cannot run.*not float32'),
    ],
)
def test_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        call(**arguments)


def test_a_name_that_cannot_run_says_why():
    half = ((8, 100), "bfloat16"), ((2, 100, F), "bfloat16")
    with pytest.raises(ValueError, match=r"must be multiples of 64, but are \[100, 128\]"):
        call(*half, implementation="pallas")
    if jax.default_backend() == "cpu":
        half = ((8, H), "bfloat16"), ((2, H, F), "bfloat16")
        reason = "Hopper GPUs, and this program is for cpu" if KERNELS_RUN else "it needs JAX 0.11"
        with pytest.raises(ValueError, match=reason):
            call(*half, implementation="pallas")


def test_what_runs_where():
    def reason(name, platform, dtype="bfloat16"):
        return IMPLEMENTATIONS[name].unavailable_reason(Problem((H, F), dtype, platform))

    for name in ("xla", "loop"):
        assert reason(name, "cpu") is reason(name, "cuda", "float32") is None
    if jax.default_backend() == "cpu":
        assert (reason("pallas", "cuda") is None) == KERNELS_RUN
    assert reason("pallas", "cpu") is not None


def test_only_large_products_run_in_waves():
    for lengths, num_waves in (((1024, 2048, 768), 1), ((98304, 2048, 768), 2), ((10**5,) * 3, 4)):
        assert pallas.launch_size(*lengths)["num_waves"] == num_waves
