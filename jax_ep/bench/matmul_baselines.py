"""Wraps grouped matmuls of other libraries, which `bench matmul` compares with this library's.

"mosaic" is JAX's own pair of Pallas kernels for Hopper GPUs; "tokamax" is the Python package
tokamax. Both wrappers have the interface that `jax_ep.matmul.backend` defines. "torch" is PyTorch's
grouped matmul, which runs outside of JAX; see `jax_ep.bench.matmul_torch`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.bench import matmul_torch
from jax_ep.bench.matmul_operations import Case
from jax_ep.bench.matmul_torch import TORCH
from jax_ep.matmul import float8, loop, pallas, primitives, xla
from jax_ep.matmul.backend import Backend, Problem, pad_rows, zero_tail


def mosaic_blocks(short: bool, num_cols: int) -> dict[str, int]:
    """Chooses the block sizes with which JAX's "mosaic" kernels are called.

    A block of the result has 64 rows if `short`, and else 128. Short blocks waste less on groups of
    few rows, because the kernel pads the last block of each group. They are also for results whose
    number of rows is not a multiple of 128. `num_cols` is the number of columns of the result.
    Returns keyword arguments of the kernels.
    """
    return {
        "block_m": 64 if short else 128,
        "block_n": 128 if num_cols % 128 == 0 else 64,
        "block_k": 64,
        "max_concurrent_steps": 4,
        "grid_block_n": 1,
    }


def mosaic_product(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
) -> jax.Array:
    """Multiplies each row by its group's matrix with JAX's kernel `ragged_dot_mgpu`.

    A row of the result depends only on the same row of lhs, so NaNs in rows of lhs past the last
    group do not spread. The kernel leaves the result's rows past the last group unwritten. A
    `jnp.where` then makes these rows zero; XLA fuses it into the next operation.
    """
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    num_rows, num_cols = len(lhs), rhs.shape[1 if transpose_rhs else 2]
    short = num_rows < 96 * len(rhs)
    with jax.enable_x64(False):
        out = ragged_dot_mgpu.ragged_dot(
            pad_rows(lhs),
            rhs,
            group_sizes=group_sizes,
            transpose_rhs=transpose_rhs,
            **mosaic_blocks(short, num_cols),
        )
    return zero_tail(out[:num_rows], group_sizes)


def mosaic_drhs(lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Computes the gradient of rhs with JAX's kernel `transposed_ragged_dot_mgpu`.

    The kernel reads blocks of `block_k` rows. It multiplies rows of a block that belong to another
    group, or to none, by zero. But zero times NaN is NaN, and the rows past the last group may be
    NaN. So the `block_k` rows after the last group are first set to zero, in place if XLA can. The
    kernel does not read further rows.
    """
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    blocks = mosaic_blocks(lhs.shape[1] % 128 != 0, grad.shape[1])
    lhs, grad = pad_rows(lhs), pad_rows(grad)
    with _core_count_known(transposed_ragged_dot_mgpu), jax.enable_x64(False):
        return transposed_ragged_dot_mgpu.transposed_ragged_dot(
            _zero_rows_after_end(lhs, group_sizes, blocks["block_k"]),
            _zero_rows_after_end(grad, group_sizes, blocks["block_k"]),
            group_sizes=group_sizes,
            **blocks,
        )


@contextlib.contextmanager
def _core_count_known(module: Any) -> Iterator[None]:
    """A context in which the kernel of `module` can be lowered on a machine without a GPU.

    The kernel reads the core count of JAX's first device, which a CPU lacks. In the context, the
    name `jax` in `module` refers to an object whose first device has the core count of an H100 or
    H200 SXM. On a machine with a GPU the context does nothing, so it affects only programs that are
    lowered for GPUs ahead of time.
    """
    if jax.devices()[0].platform == "gpu":
        yield
        return

    class Hopper:
        def devices(self):
            return [types.SimpleNamespace(core_count=pallas.HOPPER_CORES)]

        def __getattr__(self, name):
            return getattr(jax, name)

    module.jax = Hopper()
    try:
        yield
    finally:
        module.jax = jax


def _zero_rows_after_end(x: jax.Array, group_sizes: jax.Array, count: int) -> jax.Array:
    """Sets the `count` rows of x that follow the last group to zero; returns the changed x.

    All other rows keep their values. The rows of x are ordered by group, and `group_sizes` holds
    the number of rows of each group.
    """
    count = min(count, x.shape[0])
    end = jnp.sum(group_sizes)
    first = jnp.minimum(end, x.shape[0] - count)
    window = lax.dynamic_slice_in_dim(x, first, count)
    live = first + jnp.arange(count, dtype=jnp.int32) < end
    return lax.dynamic_update_slice_in_dim(x, jnp.where(live[:, None], window, 0), first, 0)


def tokamax_product(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool
) -> jax.Array:
    """Multiplies each row by its group's matrix with `tokamax.ragged_dot_general`.

    tokamax chooses the kernel and its tile sizes itself.
    """
    import tokamax

    out = tokamax.ragged_dot_general(
        pad_rows(lhs),
        rhs,
        group_sizes,
        xla.product_dims(transpose_rhs),
        preferred_element_type=lhs.dtype,
    )
    return zero_tail(out[: lhs.shape[0]], group_sizes)


def _tokamax_reason(problem: Problem) -> str | None:
    if importlib.util.find_spec("tokamax") is None:
        return "the package tokamax is not installed (pip install 'jax_ep[bench]'; Python >= 3.12)"
    if any(size * jnp.dtype(problem.dtype).itemsize % 16 for size in problem.matrix_shape):
        shape = tuple(problem.matrix_shape)
        return (
            "rows and columns of its matrices must have a multiple of 16 bytes, but the matrices "
            f"are {shape} {jnp.dtype(problem.dtype).name}"
        )
    if problem.platform in (None, "cuda", "tpu"):
        return None
    return f"its kernels are for GPUs and TPUs, and this program is for {problem.platform}"


MOSAIC = Backend(
    name="mosaic",
    unavailable_reason=pallas.unavailable_reason,
    product=mosaic_product,
    drhs=mosaic_drhs,
)
# The gradient of rhs is that of the backend "xla", because tokamax's own (0.0.17) is wrong on an
# H200: for groups with more rows than one block, results were off by a fifth.
TOKAMAX = Backend(
    name="tokamax",
    unavailable_reason=_tokamax_reason,
    product=tokamax_product,
    drhs=xla.drhs,
)


BASELINES = (MOSAIC.name, TOKAMAX.name, TORCH)
IMPLEMENTATIONS = primitives.IMPLEMENTATIONS.names


def unavailable_reason(name: str, matrix: tuple[int, int], dtype: Any) -> str | None:
    """Returns why an implementation or baseline cannot run on this machine, or None if it can.

    `matrix` is (H, F), the shape of each group's matrix, and `dtype` the operands' dtype.
    """
    has_scales = jnp.dtype(dtype) == float8.DTYPE
    problem = Problem(matrix, dtype, primitives.default_platform(), has_scales=has_scales)
    if name == TORCH:
        return matmul_torch.unavailable_reason(problem)
    return _backends()[name].unavailable_reason(problem)


def available(matrix: tuple[int, int], dtype: Any) -> list[Backend]:
    """Returns the backends that can run on this machine, except for those of `other_tiles`.

    `matrix` is (H, F), the shape of each group's matrix, and `dtype` the operands' dtype.
    """
    found = _backends()
    return [found[name] for name in found if unavailable_reason(name, matrix, dtype) is None]


def usual_implementations(case: Case) -> list[str]:
    """Returns the names of the implementations that are measured by default.

    "pallas" is always measured. "xla" and "loop" are slow, so they are measured only for cases with
    `slow=True`, and "loop" only on CPUs.
    """
    if not case.slow:
        return [pallas.BACKEND.name]
    on_cpu = jax.default_backend() == "cpu"
    return [name for name in IMPLEMENTATIONS if name != loop.BACKEND.name or on_cpu]


def _backends() -> dict[str, Backend]:
    """Returns a dict from names to all backends that can be measured.

    It lacks PyTorch, which runs in another process. This is a function and not a constant, because
    tests replace some of the backends.
    """
    return {backend.name: backend for backend in (*primitives.IMPLEMENTATIONS, MOSAIC, TOKAMAX)}


# Tile sizes with which --sweep measures the grouped-matmul kernel. An entry has the allowed numbers
# of rows of a tile, its number of columns (block_n), and the largest allowed `band`. The thread
# blocks compute the result in vertical strips, one after the other, each `band` tiles wide; see
# `pallas_kernels.matmul.grouped_matmul.Tiles`.
PALLAS_TILES = (
    ((128,), 128, 16),
    ((256,), 128, 16),
    ((128, 192, 256), 128, 16),
    ((64, 128, 136, 144, 160, 176, 192), 128, 16),
    ((64, 96, 128, 136, 144), 256, 8),
    ((64, 128, 136, 144, 176, 208, 256), 128, 4),
)
# Tile sizes with which --sweep measures the drhs kernel. An entry has the number of columns of a
# tile (block_n) and the largest allowed `band`. The thread blocks compute each group's result in
# vertical strips, one after the other, each `band` tiles wide.
PALLAS_DRHS_TILES = ((256, 1), (256, 4), (128, 8))


def other_tiles(case: Case, op: str, names: Sequence[str]) -> list[Backend]:
    """Returns variants of the backend "pallas" with the tile sizes that --sweep measures.

    `names` are the names of the measured backends. There are no variants if "pallas" is not one of
    them, or if `op` is "gated". Tiles whose number of columns does not divide that of the result
    are left out.
    """
    if op == "gated" or pallas.BACKEND.name not in names:
        return []
    # This import loads Mosaic, which machines without GPUs may lack.
    from pallas_kernels.matmul.drhs import DrhsTiles
    from pallas_kernels.matmul.grouped_matmul import Tiles

    columns = case.hidden if op in ("dlhs", "sum_of_dlhs") else case.mlp
    kind: Any = Tiles
    shapes: Sequence[tuple[Any, ...]] = PALLAS_TILES
    functions: dict[str, Callable[..., Any]] = dict(
        product=pallas.product, fused_sum_of_products=pallas.sum_of_products
    )
    if op == "drhs":
        kind, shapes, functions = DrhsTiles, PALLAS_DRHS_TILES, dict(drhs=pallas.drhs)
    # The dict keeps one variant per name. If the result has few columns, several entries give the
    # same tiles, and so the same name.
    found = {}
    for *shape, block_n, most in shapes:
        if columns % block_n == 0:
            tiles = kind.fitting(*shape, block_n, pallas.band(columns, block_n, most))
            name = " ".join([pallas.BACKEND.name, *map(str, dataclasses.astuple(tiles))])
            bound: dict[str, Any] = {
                key: functools.partial(each, tiles=tiles) for key, each in functions.items()
            }
            found[name] = dataclasses.replace(pallas.BACKEND, name=name, **bound)
    return list(found.values())
