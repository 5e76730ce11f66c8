"""The ways to compute a grouped matmul, one pair of functions each: the product, and d(rhs).

Every pair obeys one contract, with `num_rows = sum(group_sizes) <= R`:

  <name>_product(lhs [R, K], rhs [L, K, N], group_sizes [L]) -> [R, N]
      out[r] = lhs[r] @ rhs[group of r], or lhs[r] @ rhs[group of r].T for rhs [L, N, K] with
      `transpose_rhs`; rows from num_rows on are zero, whatever lhs holds there.
  <name>_drhs(lhs [R, K], grad [R, N], group_sizes [L]) -> [L, K, N]
      out[l] = lhs[rows of l].T @ grad[rows of l]; zero for an empty group; rows from num_rows on
      contribute nothing, whatever the two operands hold there.

Sums are float32 (float64 for float64 operands); results have the operands' dtype.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange.primitives import vary_alike
from pallas_kernels.matmul import grouped_matmul as pallas

# ---- "loop": rows by group, tile by tile -----------------------------------------------------
#
# `lax.ragged_dot` on a CPU multiplies every row by every group's matrix. Two nested loops do the
# least work instead: over the groups, and over the tiles of rows that a group really has. The
# tile is the smallest that still keeps the CPU's matmul busy, since a group's last tile is padded.
_PRODUCT_TILE = 32
_DRHS_TILE = 64


def loop_product(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool
) -> jax.Array:
    """The product as a loop over groups and their row tiles: any platform, best on a CPU."""
    num_cols = rhs.shape[1 if transpose_rhs else 2]
    tile = min(_PRODUCT_TILE, lhs.shape[0])
    tiles = (group_sizes + (tile - 1)) // tile
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    contract = (((1,), (1 if transpose_rhs else 0,)), ((), ()))

    def one_group(group, out):
        matrix = lax.dynamic_index_in_dim(rhs, group, 0, keepdims=False)

        def one_tile(i, out):
            first, live = _tile_rows(lhs, ends, group_sizes, group, i, tile)
            rows = lax.dynamic_slice_in_dim(lhs, first, tile)
            products = lax.dot_general(
                rows, matrix, contract, preferred_element_type=_accumulator(lhs.dtype)
            ).astype(out.dtype)
            old = lax.dynamic_slice_in_dim(out, first, tile)
            new = jnp.where(live[:, None], products, old)
            return lax.dynamic_update_slice_in_dim(out, new, first, 0)

        return lax.fori_loop(0, tiles[group], one_tile, out)

    zeros = jnp.zeros((lhs.shape[0], num_cols), lhs.dtype)
    zeros, ends = vary_alike((zeros, ends, lhs), ())[:2]
    return lax.fori_loop(0, rhs.shape[0], one_group, zeros)


def loop_drhs(lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """d(rhs) as a loop over groups and their row tiles: any platform, best on a CPU."""
    tile = min(_DRHS_TILE, lhs.shape[0])
    dtype = _accumulator(lhs.dtype)
    tiles = (group_sizes + (tile - 1)) // tile
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)

    def one_group(group, out):
        def one_tile(i, total):
            first, live = _tile_rows(lhs, ends, group_sizes, group, i, tile)
            left = jnp.where(live[:, None], lax.dynamic_slice_in_dim(lhs, first, tile), 0)
            right = jnp.where(live[:, None], lax.dynamic_slice_in_dim(grad, first, tile), 0)
            contract = (((0,), (0,)), ((), ()))
            return total + lax.dot_general(left, right, contract, preferred_element_type=dtype)

        total = lax.fori_loop(0, tiles[group], one_tile, jnp.zeros_like(out[0], dtype))
        return lax.dynamic_update_index_in_dim(out, total.astype(out.dtype), group, 0)

    zeros = jnp.zeros((group_sizes.shape[0], lhs.shape[1], grad.shape[1]), lhs.dtype)
    zeros, ends = vary_alike((zeros, ends, lhs), ())[:2]
    return lax.fori_loop(0, group_sizes.shape[0], one_group, zeros)


def _tile_rows(lhs, ends, group_sizes, group, i, tile):
    """First row of the group's tile i, moved up if it would pass R, and which rows are its own."""
    start = ends[group] - group_sizes[group] + i * tile
    first = jnp.minimum(start, lhs.shape[0] - tile)
    rows = first + jnp.arange(tile, dtype=jnp.int32)
    return first, (rows >= start) & (rows < ends[group])


# ---- "xla": lax.ragged_dot -------------------------------------------------------------------


def xla_product(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool
) -> jax.Array:
    """The product by `lax.ragged_dot_general`: any platform."""
    out = lax.ragged_dot_general(
        _zero_tail(lhs, group_sizes),
        rhs,
        group_sizes,
        _transposed_rhs_dims() if transpose_rhs else _product_dims(),
        preferred_element_type=_accumulator(lhs.dtype),
    )
    return _zero_tail(out.astype(lhs.dtype), group_sizes)


def xla_drhs(lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """d(rhs) by `lax.ragged_dot_general`: any platform."""
    return lax.ragged_dot_general(
        _zero_tail(lhs, group_sizes),
        _zero_tail(grad, group_sizes),
        group_sizes,
        _drhs_dims(),
        preferred_element_type=_accumulator(lhs.dtype),
    ).astype(lhs.dtype)


# ---- "mosaic": JAX's own Pallas kernels for Hopper GPUs --------------------------------------


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How a Mosaic kernel cuts its work: a block of the output is [block_m, block_n], summed
    `block_k` at a time with up to `max_concurrent_steps` loads in flight; thread blocks walk the
    output in columns of `grid_block_n` blocks, so that what they load is still in the L2 cache."""

    block_m: int
    block_n: int
    block_k: int
    max_concurrent_steps: int
    grid_block_n: int


def product_blocks(num_rows: int, num_groups: int, num_cols: int) -> Blocks:
    """Blocks for a product of [num_rows, K] and [num_groups, K, num_cols].

    A group's last block is padded to block_m rows, so groups of few rows get short blocks.
    """
    block_m = 128 if num_rows >= 96 * num_groups else 64
    block_n = 128 if num_cols % 128 == 0 else 64
    return Blocks(block_m, block_n, 64, 4, 1)


def drhs_blocks(num_rows: int, num_cols: int) -> Blocks:
    """Blocks for gradients [num_rows, num_cols] of the groups' matrices."""
    block_m = 128 if num_rows % 128 == 0 else 64
    block_n = 128 if num_cols % 128 == 0 else 64
    return Blocks(block_m, block_n, 64, 4, 1)


def hopper_unavailable_reason(dims: tuple[int, ...], dtype: Any) -> str | None:
    """Why the Hopper kernels cannot multiply matrices of these sizes and dtype, or None."""
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f"it multiplies bfloat16 and float16, not {jnp.dtype(dtype)}"
    if any(dim % 64 for dim in dims):
        return f"it needs both sides of each group's matrix in multiples of 64, not {list(dims)}"
    return None


def mosaic_product(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
    blocks: Blocks | None = None,
) -> jax.Array:
    """The product by `jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`.

    A row of the result depends on its own row of lhs alone, so NaNs past the last group stay
    there; the kernel leaves those rows of the result unwritten, and a select, which XLA fuses
    into what comes next, makes them zero.
    """
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    num_cols = rhs.shape[1 if transpose_rhs else 2]
    blocks = blocks or product_blocks(lhs.shape[0], rhs.shape[0], num_cols)
    num_rows = lhs.shape[0]
    lhs = _pad_rows(lhs, 8)  # It loads and stores tiles of 8 rows.
    with jax.enable_x64(False):
        out = ragged_dot_mgpu.ragged_dot(
            lhs,
            rhs,
            group_sizes=group_sizes,
            transpose_rhs=transpose_rhs,
            **dataclasses.asdict(blocks),
        )
    return _zero_tail(out[:num_rows], group_sizes)


def mosaic_drhs(
    lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array, *, blocks: Blocks | None = None
) -> jax.Array:
    """d(rhs) by `jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu`.

    The kernel reads whole blocks of `block_k` rows and multiplies a stranger's rows by zero,
    which a NaN survives: the rows between the last group's end and its block's end are cleared
    first, in place where XLA can. Rows of later blocks are never read.
    """
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

    blocks = blocks or drhs_blocks(lhs.shape[1], grad.shape[1])
    lhs, grad = _pad_rows(lhs, 8), _pad_rows(grad, 8)  # It loads tiles of 8 rows.
    with _core_count_known(transposed_ragged_dot_mgpu), jax.enable_x64(False):
        return transposed_ragged_dot_mgpu.transposed_ragged_dot(
            _zero_rows_after_end(lhs, group_sizes, blocks.block_k),
            _zero_rows_after_end(grad, group_sizes, blocks.block_k),
            group_sizes=group_sizes,
            **dataclasses.asdict(blocks),
        )


@contextlib.contextmanager
def _core_count_known(module: Any) -> Iterator[None]:
    """Lets a kernel that asks the first device for its core count be lowered without a GPU.

    It is then taken to be that of an H100 or H200 SXM. The machine that runs the program lowers
    it again, so this matters only for lowering ahead of time.
    """
    if jax.devices()[0].platform == "gpu":
        yield
        return

    class Hopper:
        def devices(self):
            return [types.SimpleNamespace(core_count=_MULTIPROCESSORS)]

        def __getattr__(self, name):
            return getattr(jax, name)

    module.jax = Hopper()
    try:
        yield
    finally:
        module.jax = jax


# ---- "pallas": this library's own kernels for Hopper GPUs -----------------------------------


def pallas_tiles(num_rows: int, num_groups: int, num_cols: int) -> pallas.Tiles:
    """Tiles for a product of [num_rows, K] and [num_groups, K, num_cols].

    The larger a tile, the less is read for each multiplication; but a group's last tile is
    padded, and few tiles leave multiprocessors idle.
    """
    for block_m, block_n in ((128, 256), (64, 256), (64, 128)):
        enough_rows = block_m == 64 or num_rows >= 64 * num_groups
        enough_tiles = num_rows * num_cols >= _MULTIPROCESSORS * block_m * block_n
        if num_cols % block_n == 0 and enough_rows and enough_tiles:
            break
    if num_cols % block_n:
        block_m, block_n = 128, _widest(num_cols)
    return pallas.Tiles.fitting(block_m, block_n, _band(num_cols // block_n))


def pallas_drhs_tiles(num_cols: int) -> pallas.Tiles:
    """Tiles for gradients of the groups' matrices, which have num_cols columns."""
    block_n = _widest(num_cols)
    return pallas.Tiles.fitting(128, block_n, _band(num_cols // block_n))


def _widest(num_cols: int) -> int:
    return next(width for width in (256, 192, 128, 64) if num_cols % width == 0)


def _band(columns: int) -> int:
    """The blocks of one sweep together read a rectangle, about as high as it is wide."""
    return max(band for band in range(1, 17) if columns % band == 0)


def pallas_product(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
    tiles: pallas.Tiles | None = None,
) -> jax.Array:
    """The product by `pallas_kernels.grouped_matmul`: rows past the last group are only zeroed."""
    return pallas_sum_of_products(
        [(lhs, rhs)], group_sizes, transpose_rhs=transpose_rhs, tiles=tiles
    )


def pallas_sum_of_products(
    pairs: Sequence[tuple[jax.Array, jax.Array]],
    group_sizes: jax.Array,
    *,
    transpose_rhs: bool,
    tiles: pallas.Tiles | None = None,
) -> jax.Array:
    """The sum of the products of several (lhs, rhs) pairs, in the same accumulators."""
    lhs, rhs = pairs[0]
    num_cols = rhs.shape[1 if transpose_rhs else 2]
    with jax.enable_x64(False):
        return pallas.product(
            [(_pad_rows(lhs, 8), rhs) for lhs, rhs in pairs],
            group_sizes,
            transpose_rhs=transpose_rhs,
            tiles=tiles or pallas_tiles(lhs.shape[0], rhs.shape[0], num_cols),
            num_blocks=_core_count(),
        )[: lhs.shape[0]]


def pallas_drhs(
    lhs: jax.Array,
    grad: jax.Array,
    group_sizes: jax.Array,
    *,
    tiles: pallas.Tiles | None = None,
) -> jax.Array:
    """d(rhs) by `pallas_kernels.grouped_matmul`: rows past the last group meet no accumulator."""
    with jax.enable_x64(False):
        return pallas.drhs(
            _pad_rows(lhs, 8),
            _pad_rows(grad, 8),
            group_sizes,
            tiles=tiles or pallas_drhs_tiles(grad.shape[1]),
            num_blocks=_core_count(),
        )


_MULTIPROCESSORS = 132  # of an H100 or H200 SXM


def _core_count() -> int:
    """Multiprocessors of the first GPU; of a Hopper where there is none, as when lowering ahead."""
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else _MULTIPROCESSORS


# ---- "tokamax": its ragged_dot, where the package is installed -------------------------------


def tokamax_unavailable_reason(matrix_shape: tuple[int, ...], dtype: Any) -> str | None:
    """Why tokamax cannot be used for matrices [H, F], or None."""
    if importlib.util.find_spec("tokamax") is None:
        return "the package tokamax is not installed (pip install tokamax; Python >= 3.12)"
    if any(size * jnp.dtype(dtype).itemsize % 16 for size in matrix_shape):
        return f"its rows must be of whole 16 bytes, but the matrices are {matrix_shape}"
    return None


def tokamax_product(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool
) -> jax.Array:
    """The product by `tokamax.ragged_dot_general`, with the kernel that tokamax picks."""
    import tokamax

    out = tokamax.ragged_dot_general(
        _pad_rows(lhs, 8),
        rhs,
        group_sizes,
        _transposed_rhs_dims() if transpose_rhs else _product_dims(),
        preferred_element_type=lhs.dtype,
    )
    return _zero_tail(out[: lhs.shape[0]], group_sizes)


def tokamax_drhs(lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """d(rhs) by `lax.ragged_dot_general`: tokamax's own, as of 0.0.17, is wrong on an H200.

    Of groups with more rows than one of its blocks it returned sums that were off by a fifth.
    """
    return xla_drhs(lhs, grad, group_sizes)


# ---- what several of them need ---------------------------------------------------------------


@functools.cache
def _product_dims() -> lax.RaggedDotDimensionNumbers:
    return lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([1], [1]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )


@functools.cache
def _transposed_rhs_dims() -> lax.RaggedDotDimensionNumbers:
    return lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([1], [2]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )


@functools.cache
def _drhs_dims() -> lax.RaggedDotDimensionNumbers:
    return lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(([0], [0]), ([], [])),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )


def _accumulator(dtype: Any) -> Any:
    return jnp.promote_types(dtype, jnp.float32)


def _pad_rows(x: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(x, ((0, -x.shape[0] % multiple), (0, 0)))


def _zero_tail(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """x with its rows past the last group set to zero."""
    live = jnp.arange(x.shape[0], dtype=jnp.int32) < jnp.sum(group_sizes)
    return jnp.where(live[:, None], x, 0)


def _zero_rows_after_end(x: jax.Array, group_sizes: jax.Array, count: int) -> jax.Array:
    """x with the first `count` rows past the last group set to zero; the others are not read."""
    count = min(count, x.shape[0])
    end = jnp.sum(group_sizes)
    first = jnp.minimum(end, x.shape[0] - count)
    window = lax.dynamic_slice_in_dim(x, first, count)
    live = first + jnp.arange(count, dtype=jnp.int32) < end
    return lax.dynamic_update_slice_in_dim(x, jnp.where(live[:, None], window, 0), first, 0)
