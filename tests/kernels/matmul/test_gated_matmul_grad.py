"""The gradient of a gated product in Pallas' GPU interpreter, with race detection, and lowered."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from support import simulator
from support.kernels import needs_kernels
from support.selection import quick
from support.simulator import KernelError, interpret, simulated

from jax_ep.matmul import loop
from jax_ep.matmul import pallas as backend
from jax_ep.matmul.backend import GateGradient, gated_grad
from jax_ep.moe import expert_mlp
from jax_ep.moe.expert_mlp import Experts, HiddenUnit
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.matmul import gated_matmul_grad
from pallas_kernels.matmul.gated_matmul_grad import gated_product_grad
from pallas_kernels.matmul.grouped_matmul import Tiles

SWIGLU = HiddenUnit()
CLAMPED_GELU = HiddenUnit(activation=jax.nn.gelu, clamp=1.5)
SMALL = dict(num_rows=40, sizes=[3, 0, 21], depth=64, width=128)


def operands(num_rows, sizes, depth, width, weighted=True):
    """grad, rhs, both products, weights and sizes: NaN past the last group, and in one row of it.

    Sums of products of grad and rhs are exact, so that their order does not matter.
    """
    rng = np.random.default_rng(0)
    grad = rng.integers(-3, 4, (num_rows, depth)) / 8
    rhs = rng.integers(-3, 4, (len(sizes), width, depth)) / 4
    products = rng.standard_normal((2, num_rows, width))
    weights = rng.uniform(0.1, 1, num_rows)
    for rows in (grad, *products, weights):
        rows[sum(sizes) :] = np.nan
    products[1, sum(sizes[:-1]) - 1] = np.nan  # the next group's tile has this row too
    grad, rhs, *products = (jnp.asarray(each, jnp.bfloat16) for each in (grad, rhs, *products))
    weights = jnp.asarray(weights, jnp.float32) if weighted else None
    return grad, rhs, tuple(products), weights, jnp.asarray(sizes, jnp.int32)


def run(args, unit, tiles):
    """The results of a kernel that looks for races, and raises if there are any."""
    results = 3 if args[3] is None else 4
    gradient = Elementwise(GateGradient(unit), results, results)
    options = dict(tiles=tiles, num_blocks=2, interpret=simulator.INTERPRETER)
    return interpret(lambda: gated_product_grad(*args, gradient, **options))


def expected(args, unit):
    """What XLA makes of the product, and zeros past the last group."""
    grad, rhs, products, weights, sizes = args
    dhidden = loop.product(grad, rhs, sizes, transpose_rhs=True)
    live = np.arange(len(grad)) < np.sum(sizes)
    results = jax.jit(gated_grad, static_argnums=0)(unit, dhidden, products, weights)
    return [np.where(live if rows.ndim == 1 else live[:, None], rows, 0) for rows in results]


def check(args, unit, tiles):
    got, want = run(args, unit, tiles), expected(args, unit)
    assert [each.dtype for each in got] == [each.dtype for each in want]
    assert np.any(np.isnan(want[0].astype(np.float32)))
    for mine, theirs in zip(got[:3], want, strict=False):
        mine, theirs = (np.asarray(array).astype(np.float32) for array in (mine, theirs))
        # XLA's code for CPUs differs with what it fuses: a few last bits do too.
        np.testing.assert_allclose(mine, theirs, rtol=2**-7, atol=1e-6)
        assert np.mean((mine != theirs) & ~np.isnan(theirs)) < 1e-3
    for mine, theirs in zip(got[3:], want[3:], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@simulated
def test_gated_product_grad():
    check(operands(**SMALL), SWIGLU, Tiles((16, 40), 128, 2, 3, num_ahead=1))


@simulated
@pytest.mark.parametrize(
    ("num_rows", "sizes", "width", "unit", "weighted", "tiles"),
    [
        # Groups within a tile, over several, empty, and starting off a multiple of 8 rows.
        (136, [3, 0, 70, 21], 128, CLAMPED_GELU, True, Tiles((48, 64), 128, 2, 5, num_ahead=2)),
        # More chunks ahead than are staged; the second computer has no columns of the last tile.
        (208, [1, 180, 19], 192, SWIGLU, False, Tiles((96, 160), 128, 2, 4, num_ahead=4)),
        # Two columns of chunks a computer, and two bands of tiles.
        (80, [0, 61, 12], 512, SWIGLU, True, Tiles((40, 80), 256, 2, 6, num_ahead=3)),
    ],
    ids=str,
)
@pytest.mark.slow
def test_more_shapes(num_rows, sizes, width, unit, weighted, tiles):
    check(operands(num_rows, sizes, 128, width, weighted), unit, tiles)


@simulated
@pytest.mark.slow
def test_no_rows_at_all():
    args = operands(**SMALL)
    args = *args[:4], jnp.zeros_like(args[4])
    for result in run(args, SWIGLU, Tiles((16, 40), 128, 2, 3, num_ahead=1)):
        assert not np.any(np.asarray(result))


@simulated
@pytest.mark.parametrize("step", ["commit_smem", "wait_smem_to_gmem", "barrier_wait"])
@pytest.mark.slow
def test_a_race_is_found(step, monkeypatch):
    """Race detection is alive: a step of what this kernel does with its chunks is left out."""
    others = vars(plgpu) | {step: lambda *_, **__: None}
    monkeypatch.setattr(gated_matmul_grad, "plgpu", types.SimpleNamespace(**others))
    args = operands(num_rows=80, sizes=[0, 64, 10], depth=64, width=128)
    with pytest.raises(KernelError, match="a race"):
        run(args, SWIGLU, Tiles((32, 64), 128, 2, 3, num_ahead=1))


@needs_kernels
def test_tiles_chosen_for_many_shapes_fit_the_kernel():
    for num_rows in (1152, 36864):
        for num_cols in (64, 192, 768, 2048, 14336):
            tiles = backend.gated_grad_tiles(num_rows, 64, num_cols)
            assert tiles.num_slots >= 3 and tiles.num_staged >= 3 and tiles.num_ahead == 2


@simulated
def test_tiles_that_cannot_be_are_refused():
    args = operands(**SMALL)
    for staged, ahead in ((2, 1), (3, 0)):
        with pytest.raises(ValueError, match="one chunk is read ahead and 3 are staged"):
            run(args, SWIGLU, Tiles((16, 40), 128, 2, staged, num_ahead=ahead))


FUSED = "grouped_matmul_gated_grad"


@needs_kernels
@pytest.mark.parametrize("weighted", quick([True, False], True))
def test_lowers_for_cuda(weighted):
    """float16, a number of rows that is not a multiple of 8, and a last chunk of fewer rows."""
    shapes = (100, 128), (4, 192, 128), (100, 192)
    grad, rhs, rows = (jax.ShapeDtypeStruct(shape, jnp.float16) for shape in shapes)
    weights = jax.ShapeDtypeStruct((100,), jnp.float32) if weighted else None
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)

    def gradients(*args):
        tiles = gated_matmul_grad.fitting_tiles((8, 40))
        return backend.gated_product_grad(*args, CLAMPED_GELU, tiles=tiles)

    traced = jax.jit(gradients).trace(grad, rhs, (rows, rows), weights, sizes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 2 and FUSED in text
    assert [out.shape for out in traced.out_info] == [(100, 192)] * 3 + [(100,)] * weighted


def backward(num_rows, hidden, mlp, groups, dtype, unit=SWIGLU, **changes):
    """An expert MLP's forward and backward pass, with weights, and the types of its arguments."""

    def forward_and_backward(tokens, experts, grad, weights, sizes):
        _, saved = expert_mlp.forward(tokens, experts, sizes, unit, "pallas")
        return expert_mlp.backward(saved, grad, weights, unit, "pallas")

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    tokens, up = array(num_rows, hidden), array(groups, hidden, mlp)
    experts = Experts(up, up, array(groups, mlp, hidden))._replace(**changes)
    weights, sizes = array(num_rows, dtype=jnp.float32), array(groups, dtype=jnp.int32)
    return jax.jit(forward_and_backward), (tokens, experts, tokens, weights, sizes)


@needs_kernels
@pytest.mark.parametrize(
    ("num_rows", "hidden", "mlp", "groups", "dtype"),
    [
        (36864, 2048, 768, 64, jnp.bfloat16),
        (32768, 7168, 2048, 32, jnp.float16),
    ],
)
@pytest.mark.slow
def test_an_expert_mlp_lowers_for_cuda(num_rows, hidden, mlp, groups, dtype):
    function, args = backward(num_rows, hidden, mlp, groups, dtype)
    traced = function.trace(*args)
    assert FUSED in traced.lower(lowering_platforms=("cuda",)).as_text()
    dtokens, dexperts, dweights = traced.out_info
    for got, of in zip(
        jax.tree.leaves((dtokens, dexperts, dweights)),
        jax.tree.leaves((args[:2], args[3])),
        strict=True,
    ):
        assert (got.shape, got.dtype) == (of.shape, of.dtype)


def test_what_is_not_fused():
    def asks_for_it(**changes):
        function, args = backward(64, 128, 128, 2, jnp.bfloat16, **changes)
        return FUSED in str(function.trace(*args).jaxpr)

    assert asks_for_it()
    assert not asks_for_it(wi_1_bias=jax.ShapeDtypeStruct((2, 128), jnp.bfloat16))
    assert not asks_for_it(wi_1=None)
    args = operands(**SMALL)
    exact_gelu = HiddenUnit(functools.partial(jax.nn.gelu, approximate=False))
    assert backend.gated_product_grad(*args, exact_gelu) is None
    args = *args[:3], args[3].astype(jnp.bfloat16), args[4]
    assert backend.gated_product_grad(*args, SWIGLU) is None
