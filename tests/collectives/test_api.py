"""Tests of the collectives against float64 and `jax.lax`, on all rank counts, with gradients."""

from __future__ import annotations

import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.kernels import lowered, needs_kernels, on_ranks
from support.meshes import RANK_COUNTS, cuda_mesh, expert_mesh, mesh
from support.selection import quick

from jax_ep.collectives import api as collectives
from jax_ep.collectives import table as collectives_table
from jax_ep.collectives.algorithms import ALGORITHMS, Problem
from jax_ep.collectives.api import all_reduce_rms_norm
from jax_ep.runtime import availability

AXIS = "expert"
SHARDED, REPLICATED = P(AXIS), P()
LINEAR = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
EVERYWHERE = ("xla", "unfused")


def supported(op: str) -> list[str | None]:
    """Returns the algorithms that run on this machine; on GPUs also None."""
    names = ALGORITHMS[op].names
    if availability.unavailable_reason():
        return [name for name in names if name in EVERYWHERE]
    return [None, *names]


CASES = [(op, algorithm) for op in LINEAR for algorithm in supported(op)]


def lax_function(op: str, axis_name: Any = AXIS):
    return {
        "all_reduce": lambda x: lax.psum(x, axis_name),
        "all_gather": lambda x: lax.all_gather(x, axis_name, tiled=True),
        "reduce_scatter": lambda x: lax.psum_scatter(x, axis_name, tiled=True),
        "all_to_all": lambda x: lax.all_to_all(x, axis_name, 0, 0, tiled=True),
    }[op]


def function(op: str, algorithm: str | None = None, axis_name: Any = AXIS):
    return lambda x: getattr(collectives, op)(x, axis_name, algorithm=algorithm)


def expected(op: str, x: np.ndarray) -> np.ndarray:
    """Computes a collective in float64; operands and results of all ranks are stacked, [N, ...]."""
    num_ranks, x = len(x), x.astype(np.float64)
    if op == "all_reduce":
        return np.stack([x.sum(0)] * num_ranks)
    if op == "all_gather":
        return np.stack([x.reshape(-1, *x.shape[2:])] * num_ranks)
    if op == "reduce_scatter":
        return x.sum(0).reshape(num_ranks, -1, *x.shape[2:])
    return x.reshape(num_ranks, num_ranks, -1, *x.shape[2:]).swapaxes(0, 1).reshape(x.shape)


def run(apply, num_ranks: int, x: np.ndarray, check_vma: bool = False) -> np.ndarray:
    """Runs `apply` on operands x [N, ...] of N ranks; returns the ranks' results, [N, ...]."""

    def on_one_rank(x):
        return jax.tree.map(lambda y: y[None], apply(x[0]))

    mapped = on_ranks(on_one_rank, expert_mesh(num_ranks), check_vma=check_vma)
    return jax.tree.map(np.asarray, mapped(x))


def normal(shape: tuple[int, ...], dtype: Any = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


# ---------------------------------------------------------------------- values of the collectives


@pytest.mark.parametrize(
    ("shape", "dtype"),
    quick([((16, 3, 129), "bfloat16"), ((24,), "float16")], ((16, 3, 129), "bfloat16")),
    ids=str,
)
@pytest.mark.parametrize("num_ranks", quick(RANK_COUNTS, RANK_COUNTS[-1]))
@pytest.mark.parametrize(("op", "algorithm"), CASES)
def test_values(op, algorithm, num_ranks, shape, dtype):
    x = normal((num_ranks, *shape), dtype)
    got = run(function(op, algorithm), num_ranks, x)
    want = expected(op, x)
    assert got.dtype == x.dtype and got.shape == want.shape
    if op in ("all_gather", "all_to_all"):
        np.testing.assert_array_equal(got.astype(np.float64), want)
        return
    eps = float(jnp.finfo(dtype).eps)
    # XLA may round after each of the additions.
    if algorithm in (None, "xla"):
        eps *= num_ranks
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=eps, atol=2 * eps)
    if op == "all_reduce":
        assert all(np.array_equal(got[0], other) for other in got)


@pytest.mark.parametrize("shape", [(), (1,), (2, 0), (1, 5, 7)], ids=str)
def test_all_reduce_takes_any_shape(shape):
    x = normal((2, *shape))
    got = run(function("all_reduce"), 2, x)
    np.testing.assert_allclose(got, expected("all_reduce", x), rtol=1e-6)


@pytest.mark.skipif(bool(availability.unavailable_reason()), reason="XLA may quiet NaNs")
def test_what_is_only_moved_keeps_its_bits():
    bits = np.random.default_rng(0).integers(0, 2**16, (2, 4, 33), dtype=np.uint16)
    # All bit patterns include every kind of NaN.
    x = bits.view(jnp.bfloat16)
    for op in ("all_gather", "all_to_all"):
        got = run(function(op, "direct"), 2, x).view(np.uint16)
        want = expected(op, bits).astype(np.uint16)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "axis_name", quick(["data", ("expert", "data")], ("expert", "data"), unpack=False)
)
@pytest.mark.parametrize(("op", "algorithm"), CASES)
def test_meshes_of_several_axes(op, algorithm, axis_name):
    x = normal((4 * 8, 3))

    def results(apply):
        both = mesh((2, 2), ("data", "expert"))
        return on_ranks(lambda x: apply(x).reshape(-1), both)(x)

    got, want = results(function(op, algorithm, axis_name)), results(lax_function(op, axis_name))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------- gradients of the collectives


@pytest.mark.parametrize("check_vma", quick([True, False], True))
@pytest.mark.parametrize(("op", "algorithm"), CASES)
def test_gradients_are_those_of_lax(op, algorithm, check_vma):
    """The gradients of each collective must equal those of its counterpart in `jax.lax`."""
    num_ranks = min(4, len(jax.devices()))
    x, out_specs = normal((num_ranks * 8, 3)), REPLICATED if op == "all_reduce" else SHARDED

    def gradients(apply):
        mapped = jax.shard_map(
            lambda x: jnp.tanh(apply(x)),
            mesh=expert_mesh(num_ranks),
            in_specs=SHARDED,
            out_specs=out_specs,
            check_vma=check_vma,
        )
        weights = normal(jax.eval_shape(mapped, x).shape, seed=1)
        return jax.jit(jax.grad(lambda x: jnp.sum(mapped(x) * weights)))(x)

    got, want = gradients(function(op, algorithm)), gradients(lax_function(op))
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", quick(LINEAR, "all_reduce", "reduce_scatter"))
def test_transforms(op):
    """jvp, second derivatives, checkpoint, scan and vmap must give what they give for `jax.lax`."""
    num_ranks = min(2, len(jax.devices()))
    x = normal((num_ranks, 4, 4, 3))

    def results(apply):
        def loss(x):
            return jnp.sum(jnp.cos(jax.checkpoint(apply)(x)) ** 2)

        def everything(x):
            first = x[0]
            tangent = jax.jvp(apply, (first,), (jnp.sin(first),))[1]
            second = jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(first)
            scanned = lax.scan(lambda total, x: (total + loss(x), apply(x)), 0.0, x)
            return tangent, second, scanned, jax.vmap(apply, 1, 0)(x)

        return run(everything, num_ranks, x)

    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, results(function(op)), results(lax_function(op)))


@pytest.mark.parametrize("in_axes", quick([(1, None), (None, 1)], (1, None), unpack=False), ids=str)
def test_a_batch_of_rms_norms(in_axes):
    num_ranks = min(2, len(jax.devices()))
    x, scale = normal((num_ranks, 3, 3, 5)), normal((5,))

    def norms(x, algorithm):
        norm = functools.partial(
            all_reduce_rms_norm, scale=scale, axis_name="expert", algorithm=algorithm
        )
        x, residual = (x if axis is not None else x[0] for axis in in_axes)
        return jnp.stack(jax.vmap(lambda *xs: norm(*xs), in_axes)(x, residual))

    got, want = (run(lambda x, a=a: norms(x, a), num_ranks, x) for a in (None, "xla"))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@needs_kernels
@pytest.mark.needs_devices(2)
def test_a_batch_of_scales_is_refused():
    def norms(x):
        norm = functools.partial(all_reduce_rms_norm, axis_name="expert")
        return jax.vmap(lambda scale: norm(x, x, scale)[0])(x)

    with pytest.raises(NotImplementedError, match="by jax.vmap over scale; take algorithm="):
        run(norms, 2, normal((2, 3, 3)))


# ----------------------------------------------------------------------------- all_reduce_rms_norm


def norm(x, residual=None, scale=None, **options):
    residual, scale = x if residual is None else residual, x[0] if scale is None else scale
    return all_reduce_rms_norm(x, residual, scale, AXIS, **options)[0]


def norm_of_lax(x, residual, scale, eps=1e-6):
    new_residual = lax.psum(x, AXIS) + residual
    mean_square = jnp.mean(new_residual**2, axis=-1, keepdims=True)
    return new_residual / jnp.sqrt(mean_square + eps) * scale, new_residual


@pytest.mark.parametrize("num_ranks", quick(RANK_COUNTS, RANK_COUNTS[-1]))
@pytest.mark.parametrize(
    ("shape", "dtype", "residual_dtype"),
    quick(
        [((6, 32), "float32", "float32"), ((2, 3, 200), "bfloat16", "float32")],
        ((2, 3, 200), "bfloat16", "float32"),
    ),
    ids=str,
)
@pytest.mark.parametrize("algorithm", supported("all_reduce_rms_norm"))
def test_all_reduce_rms_norm(algorithm, shape, dtype, residual_dtype, num_ranks):
    x = normal((num_ranks, *shape), dtype)
    residual, scale = normal(shape, residual_dtype, 1), normal(shape[-1:], seed=2)
    mapped = jax.shard_map(
        lambda x, *args: all_reduce_rms_norm(x[0], *args, AXIS, eps=1e-3, algorithm=algorithm),
        mesh=expert_mesh(num_ranks),
        in_specs=(SHARDED, REPLICATED, REPLICATED),
        out_specs=REPLICATED,
    )
    normalized, new_residual = map(np.asarray, jax.jit(mapped)(x, residual, scale))
    total = x.astype(np.float64).sum(0) + residual.astype(np.float64)
    want = total / np.sqrt(np.mean(total**2, -1, keepdims=True) + 1e-3) * scale
    eps = 4 * float(jnp.finfo(dtype).eps) * num_ranks
    np.testing.assert_allclose(new_residual, total, rtol=eps, atol=eps)
    np.testing.assert_allclose(normalized.astype(np.float64), want, rtol=eps, atol=eps)
    assert normalized.dtype == x.dtype and new_residual.dtype == residual.dtype


@pytest.mark.parametrize("check_vma", quick([True, False], True))
@pytest.mark.parametrize("varying_residual", quick([False, True], False))
@pytest.mark.parametrize("algorithm", supported("all_reduce_rms_norm"))
def test_gradients_of_all_reduce_rms_norm(algorithm, varying_residual, check_vma):
    num_ranks = min(4, len(jax.devices()))
    x, scale = normal((num_ranks * 6, 32)), normal((32,), seed=2)
    residual = normal((num_ranks * 6 if varying_residual else 6, 32), seed=1)
    of_residual = SHARDED if varying_residual else REPLICATED

    def gradients(apply):
        mapped = jax.shard_map(
            apply,
            mesh=expert_mesh(num_ranks),
            in_specs=(SHARDED, of_residual, REPLICATED),
            out_specs=of_residual,
            check_vma=check_vma,
        )
        weights = normal((2, *residual.shape), seed=3)

        def loss(*args):
            normalized, new_residual = mapped(*args)
            return jnp.sum(normalized * weights[0]) + jnp.sum(new_residual * weights[1])

        return jax.jit(jax.grad(loss, (0, 1, 2)))(x, residual, scale)

    def ours(x, residual, scale):
        return all_reduce_rms_norm(x, residual, scale, AXIS, algorithm=algorithm)

    for got, want in zip(gradients(ours), gradients(norm_of_lax), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_all_reduce_rms_norm_forwards_and_again():
    num_ranks = min(2, len(jax.devices()))
    x = normal((num_ranks, 3, 4, 16))

    def results(apply):
        def everything(x):
            residual, scale = jnp.cos(x[0]), jnp.arange(1.0, 17.0)
            args = (x[1], residual, scale)
            tangents = jax.jvp(apply, args, jax.tree.map(jnp.sin, args))
            loss = lambda *args: sum(jnp.sum(out**3) for out in apply(*args))  # noqa: E731
            return tangents, jax.grad(jax.checkpoint(loss), (0, 1, 2))(*args)

        return run(everything, num_ranks, x)

    ours = functools.partial(all_reduce_rms_norm, axis_name=AXIS)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, results(ours), results(norm_of_lax))


@pytest.mark.usefixtures("strict_promotion")
@pytest.mark.parametrize("algorithm", supported("all_reduce_rms_norm"))
def test_all_reduce_rms_norm_without_implicit_promotion(algorithm):
    num_ranks = min(2, len(jax.devices()))
    x = normal((num_ranks, 6, 32), "bfloat16")
    residual, scale = normal((6, 32), "float32", 1), normal((32,), "float16", 2)

    def loss(x, residual, scale):
        outs = all_reduce_rms_norm(x, residual, scale, AXIS, algorithm=algorithm)
        return sum(jnp.sum(jnp.square(out.astype(jnp.float32))) for out in outs)

    mapped = on_ranks(lambda x: jax.grad(loss)(x[0], residual, scale)[None], expert_mesh(num_ranks))
    mapped.lower(x)


# --------------------------------------------------------------------- meshes with explicit axes


@pytest.mark.needs_devices(4)
@pytest.mark.parametrize("check_vma", quick([True, False], True))
@pytest.mark.parametrize(
    "spec", quick([P(AXIS, "data"), P((AXIS, "data"))], P(AXIS, "data"), unpack=False), ids=str
)
@pytest.mark.parametrize(
    "op", quick([*LINEAR, "all_reduce_rms_norm"], "reduce_scatter", "all_reduce_rms_norm")
)
def test_a_shard_map_that_leaves_out_explicit_axes(op, spec, check_vma):
    """A collective over one axis of a mesh must accept operands sharded over others."""
    explicit = jax.make_mesh((2, 2), ("data", AXIS), axis_types=(AxisType.Explicit,) * 2)
    x = normal((16, 6, 4))
    if op == "all_reduce_rms_norm":
        scale = np.arange(1, 5, dtype=np.float32)
        ours, theirs = (lambda x: norm(x, x, scale)), (lambda x: norm_of_lax(x, x, scale)[0])
    else:
        ours, theirs = function(op), lax_function(op)

    def results(apply, sharding):
        def value_and_gradient(x):
            value, transpose = jax.vjp(apply, x)
            return value, transpose(jnp.sin(value))[0]

        mapped = jax.shard_map(
            value_and_gradient,
            mesh=sharding.mesh,
            axis_names={AXIS},
            in_specs=SHARDED,
            out_specs=(REPLICATED if op == "all_reduce" and check_vma else SHARDED, SHARDED),
            check_vma=check_vma,
        )
        with jax.set_mesh(sharding.mesh):
            return jax.jit(mapped)(jax.device_put(x, sharding))

    want = results(theirs, NamedSharding(expert_mesh(2), SHARDED))
    got = results(ours, NamedSharding(explicit, spec))
    atol = 1e-6 if op in LINEAR else 1e-5
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-5, atol=atol)


@pytest.mark.parametrize("op", LINEAR)
def test_an_empty_array_is_sent_by_no_collective(op):
    """The result must have the shape and the type of one with rows."""
    out_specs = REPLICATED if op == "all_reduce" else SHARDED
    mapped = jax.shard_map(function(op), mesh=expert_mesh(2), in_specs=SHARDED, out_specs=out_specs)
    for shape in ((0, 6), (8, 0)):
        x = np.zeros(shape, np.float32)
        out, transpose = jax.vjp(jax.jit(mapped), x)
        rows = {"all_reduce": 1 / 2, "all_gather": 2, "reduce_scatter": 1 / 2, "all_to_all": 1}
        assert out.shape == (shape[0] * rows[op], shape[1])
        assert transpose(out)[0].shape == shape


def test_the_norm_of_no_rows():
    scale = jnp.ones(6)
    mapped = on_ranks(lambda x: all_reduce_rms_norm(x, x, scale, AXIS), expert_mesh(2))
    assert [out.shape for out in mapped(jnp.zeros((0, 6)))] == [(0, 6)] * 2


# ----------------------------------------------------------------------------------------- errors


def call(apply, shape, dtype: Any = jnp.float32):
    in_specs = SHARDED if shape else REPLICATED
    mapped = on_ranks(apply, expert_mesh(2), in_specs=in_specs, out_specs=SHARDED)
    jax.eval_shape(mapped, jax.ShapeDtypeStruct(shape, dtype))


@pytest.mark.parametrize(
    ("apply", "shape", "message"),
    [
        (function("all_reduce", None, "model"), (4, 2), "axis_name .*'model'.* is not .*shard_map"),
        (lambda x: function("all_to_all")(x > 0), (4, 2), "x must be a floating .* has dtype bool"),
        (lambda x: function("all_reduce")([x]), (4, 2), "x must be a floating .* is the list"),
        (function("reduce_scatter"), (6, 2), r"reduce_scatter: .* x must .*2 ranks.*\(3, 2\); pad"),
        (function("all_to_all"), (6, 2), r"all_to_all: .* x must .*2 ranks.*\(3, 2\); pad"),
        (function("all_gather"), (), "all_gather works along the first axis.*scalar"),
        (function("all_gather", "one_shot"), (4, 2), "algorithm must.*'direct', 'xla'.*'one_shot'"),
        (lambda x: norm(x, eps=-1.0), (4, 4), "eps must be 0 or more and finite"),
        (lambda x: norm(x, eps=float("nan")), (4, 4), "eps must be 0 or more and finite"),
        (lambda x: norm(x, x[:, :3], x[0, :3]), (4, 4), r"residual \(2, 3\) and scale \(3,\)"),
        (lambda x: norm(x, scale=jnp.arange(4)), (4, 4), "scale must be a floating .* int32"),
    ],
)
def test_errors_name_the_argument_and_its_value(apply, shape, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call(apply, shape)


def test_any_floating_dtype_has_a_collective():
    """algorithm=None must support every floating dtype, although summing kernels do not."""
    for op in LINEAR:
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float8_e4m3fn):
            call(function(op), (8, 2), dtype=dtype)


@pytest.mark.skipif(not availability.unavailable_reason(), reason="the kernels run here")
@pytest.mark.parametrize("op", ALGORITHMS)
def test_an_algorithm_that_cannot_run_says_why(op):
    for algorithm in set(ALGORITHMS[op].names) - set(EVERYWHERE):
        apply = functools.partial(norm, algorithm=algorithm)
        if op in LINEAR:
            apply = function(op, algorithm)
        needs = rf'{op}: algorithm="{algorithm}" cannot run here: it needs NVIDIA GPUs'
        with pytest.raises(ValueError, match=needs):
            call(apply, (4, 8))


def on_cuda_mesh(apply: Any, spec: P = SHARDED) -> Any:
    return on_ranks(apply, cuda_mesh((2,), (AXIS,)), in_specs=spec, out_specs=spec)


def lower_for_cuda(apply, shape, dtype) -> str:
    return lowered(on_cuda_mesh(apply), jax.ShapeDtypeStruct(shape, dtype))


@needs_kernels
def test_payloads_that_the_kernels_cannot_sum_are_refused():
    with pytest.raises(ValueError, match="x is float8_e4m3fn, not one of bfloat16"):
        lower_for_cuda(function("all_reduce", "one_shot"), (4, 8), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match='"ll" cannot run here: x is float8_e4m3fn, not one of'):
        lower_for_cuda(function("all_gather", "ll"), (4, 8), jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"x is empty, its shape is \(2, 0\)"):
        lower_for_cuda(function("reduce_scatter", "direct"), (4, 0), jnp.float32)
    with pytest.raises(ValueError, match="supports rows of at most 16384 elements, not 20000"):
        lower_for_cuda(functools.partial(norm, algorithm="fused"), (4, 20000), jnp.bfloat16)


@needs_kernels
def test_kernels_are_refused_where_shard_map_leaves_axes_out():
    def traced(algorithm):
        gather = function("all_gather", algorithm)
        mapped = on_ranks(
            gather, cuda_mesh((2, 2), ("data", AXIS)), axis_names={AXIS}, in_specs=SHARDED,
            out_specs=SHARDED, check_vma=True,
        )  # fmt: skip
        return str(jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((4, 8192), jnp.float32)))

    for algorithm in ("direct", "ll"):
        with pytest.raises(
            ValueError, match=r"over all axes of the mesh, and \('data',\) are left out"
        ):
            traced(algorithm)
    assert "all_gather" in traced(None) and "ep_all_gather" not in traced(None)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="something was measured here")
def test_nothing_is_chosen_for_a_machine_that_is_not_here():
    for op in LINEAR:
        assert "mosaic" not in lower_for_cuda(function(op), (16, 8192), jnp.bfloat16)


# Needs the kernels, since without them the jaxpr has XLA's collective instead of `ep_all_gather`
# and so on.
@needs_kernels
def test_the_jaxpr_names_the_collective():
    for op in LINEAR:
        mapped = on_cuda_mesh(function(op))
        jaxpr = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((8, 2), jnp.float32))
        assert f"ep_{op}[" in str(jaxpr) and not jaxpr.effects


@needs_kernels
@pytest.mark.parametrize("name", ["residual", "scale"])
def test_kernels_refuse_operands_of_other_dtypes(name):
    shapes = dict(x=(4, 8), residual=(4, 8), scale=(8,))
    dtypes = dict.fromkeys(shapes, jnp.bfloat16) | {name: jnp.float8_e4m3b11fnuz}
    arrays = [jax.ShapeDtypeStruct(shape, dtypes[each]) for each, shape in shapes.items()]

    def traced(algorithm):
        norm = functools.partial(all_reduce_rms_norm, axis_name=AXIS, algorithm=algorithm)
        return str(jax.make_jaxpr(on_cuda_mesh(norm, REPLICATED))(*arrays))

    for algorithm in set(ALGORITHMS["all_reduce_rms_norm"].names) - {"xla", "unfused"}:
        with pytest.raises(ValueError, match=f'"{algorithm}" cannot run here: {name} is float8'):
            traced(algorithm)
    assert "ep_all_reduce_rms_norm" in traced("unfused")


def test_a_program_without_kernels_asks_no_table(monkeypatch):
    """A program without kernels must not look into the table, so that sizes may be symbolic."""
    (rows,) = jax.export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 8), jnp.float32)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    exported = types.SimpleNamespace(unavailable_reason=lambda *_: "it is exported")
    problem = Problem("all_gather", (x,), 2, (AXIS,), exported)
    assert collectives_table.select(None, problem) == "xla"
