"""Implements the backend "pallas": this library's own kernels, for Hopper GPUs.

The kernels (`pallas_kernels.matmul`) are imported when the first program that uses them is lowered,
so a machine without GPUs does not load them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jax_ep.matmul.backend import Backend, Pairs, Problem, added, pad_rows, symbolic_rows_reason
from jax_ep.matmul.gating import Gating
from jax_ep.matmul.groups import Groups
from jax_ep.runtime import availability
from pallas_kernels.matmul.chosen_groups import ChosenGroups, output_rows
from pallas_kernels.mxfp4 import MXFP4

if TYPE_CHECKING:
    from pallas_kernels.matmul.drhs import DrhsTiles
    from pallas_kernels.matmul.grouped_matmul import Tiles
    from pallas_kernels.matmul.quantized_tiles import Scaled

# _MULTIPLES[has_scales] holds the dtypes that the kernels multiply, for operands with or without
# scales. It maps each dtype to a number that must divide both dimensions of each group's matrix.
_MULTIPLES = {
    False: {jnp.dtype(jnp.bfloat16): 64, jnp.dtype(jnp.float16): 64},
    True: {jnp.dtype(jnp.float8_e4m3fn): 128},
}
# If groups have fewer rows than this on average, the speed is limited by reading their matrices, so
# other tile sizes are chosen.
_FEW_ROWS = 64
# Matrices in MXFP4: if groups have at most `_VERY_FEW_ROWS` rows on average, tiles have the heights
# `_LOW`, which single warps multiply (`pallas_kernels.matmul.warp_products`). If they have at least
# `_MANY_ROWS`, tiles have the heights `_HIGH`. Measured with 8, 16, 32, 64, 128, 256 and 512 rows.
_VERY_FEW_ROWS, _MANY_ROWS = 16, 96
_LOW = (8, 16, 24, 32)
_HIGH = (64, 96, 128, 144, 160, 176, 192, 208, 232, 256)
# The most waves of thread blocks of a kernel, and the least number of multiplications of a wave,
# which take about 200 us in bfloat16. Each wave after the first costs a few microseconds.
_MOST_WAVES, _LEAST_MULTIPLICATIONS = 4, 64 * 10**9
# The number of streaming multiprocessors of an H100 or H200 SXM, for which tile sizes are chosen.
HOPPER_CORES = 132


def unavailable_reason(problem: Problem) -> str | None:
    """Returns why the kernels do not support a grouped matmul, or None if they do.

    The reason completes an error message after "cannot run here: ".
    """
    if reason := symbolic_rows_reason(problem):
        return reason
    dtype = jnp.dtype(problem.dtype)
    multiples = _MULTIPLES[problem.has_scales]
    if dtype not in multiples:
        names = " and ".join(each.name for each in multiples)
        return (
            f"it multiplies {names}, not {dtype}{'' if problem.has_scales else ' without scales'}"
        )
    multiple, sides = multiples[dtype], list(problem.matrix_shape)
    if any(side % multiple for side in sides):
        return f"both sides of each group's matrix must be multiples of {multiple}, but are {sides}"
    return _platform_reason(problem.platform)


def _platform_reason(platform: str | None) -> str | None:
    """Returns why the kernels cannot run on a platform, such as "cpu", or None if they can.

    `platform` is None during tracing, when the platform is not known.
    """
    if platform not in ("cuda", None):
        return f"its kernels are for NVIDIA Hopper GPUs, and this program is for {platform}"
    if reason := availability.jax_unavailable_reason():
        return reason
    if platform is None:
        return None
    if reason := availability.mosaic_unavailable_reason():
        return reason
    device = jax.devices()[0]
    # Without a GPU here, the program is compiled for another machine. Its GPU is not known, so it
    # is not checked.
    if device.platform != "gpu":
        return None
    capability = float(device.compute_capability)
    if not 9 <= capability < 10:
        return (
            "its kernels need an NVIDIA GPU of compute capability 9 (Hopper), and this one "
            f"has {capability}"
        )
    return None


def in_32_bits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a function that traces a kernel, to run with default types of 32 bits.

    Kernels compute indices as int32, also in programs whose default integers have 64 bits
    (`jax_enable_x64`).
    """

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        with jax.enable_x64(False):
            return function(*args, **options)

    return run


def product(
    lhs: jax.Array,
    rhs: jax.Array,
    groups: Groups,
    *,
    transpose_rhs: bool,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Computes `Backend.product` by a kernel; rows of the result past the last group are zero.

    If `tiles` is None, `product_tiles` chooses the tile sizes.
    """
    pairs = [(lhs, rhs)]
    return sum_of_products(pairs, groups, transpose_rhs=transpose_rhs, tiles=tiles)


@in_32_bits
def sum_of_products(
    pairs: Pairs | Sequence[tuple[jax.Array, Scaled]],
    groups: Groups,
    *,
    transpose_rhs: bool,
    zero_unused: bool = True,
    tiles: Tiles | None = None,
) -> jax.Array:
    """Computes `Backend.sum_of_products` by one kernel.

    The kernel adds the products of all pairs in the same float32 accumulators. With
    `transpose_rhs`, the rhs of an only pair may be `Scaled` transposes in MXFP4. If `tiles` is
    None, `product_tiles` or `chosen_tiles` chooses the tile sizes.
    """
    from pallas_kernels.matmul import grouped_matmul as kernels

    lhs, rhs = pairs[0]
    num_groups, num_cols, mxfp4_depth = _sizes(rhs, transpose_rhs)
    num_rows = output_rows(groups, lhs.shape[0])
    if tiles is None and isinstance(groups, ChosenGroups):
        tiles = chosen_tiles(groups, num_cols, mxfp4_depth=mxfp4_depth)
    elif tiles is None:
        tiles = product_tiles(lhs.shape[0], num_groups, num_cols, mxfp4_depth=mxfp4_depth)
    return kernels.product(
        [(pad_rows(lhs), rhs) for lhs, rhs in pairs],
        groups,
        transpose_rhs=transpose_rhs,
        tiles=tiles,
        zero_unused=zero_unused,
        **launch_size(num_rows, sum(lhs.shape[1] for lhs, _ in pairs), num_cols),
    )[:num_rows]


@in_32_bits
def gated_product(
    lhs: jax.Array,
    rhs: tuple[jax.Array, jax.Array] | tuple[Scaled, Scaled],
    groups: Groups,
    gating: Gating,
    keep: bool,
    *,
    biases: tuple[jax.Array, jax.Array] | None = None,
    zero_unused: bool = True,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, ...] | None:
    """Computes `Backend.gated_product` by one kernel.

    `biases` [L, N], if given, are added to the products before `gating` is applied, but not to the
    products that are returned. Each rhs may be `Scaled` transposes in MXFP4. Returns None if the
    kernel does not support the operations of `gating`. If `tiles` is None, `gated_tiles` or
    `chosen_tiles` chooses the tile sizes.
    """
    from pallas_kernels.matmul import gated_matmul as kernels

    num_groups, num_cols, mxfp4_depth = _sizes(rhs[0], False)
    num_rows = output_rows(groups, lhs.shape[0])
    if tiles is None and isinstance(groups, ChosenGroups):
        tiles = chosen_tiles(groups, num_cols, num_matrices=2, mxfp4_depth=mxfp4_depth)
    elif tiles is None:
        tiles = gated_tiles(lhs.shape[0], num_groups, num_cols, mxfp4_depth=mxfp4_depth)
    if (function := as_elementwise(gating)) is None:
        return None
    results = kernels.gated_product(
        pad_rows(lhs),
        rhs,
        groups,
        function,
        keep=keep,
        tiles=tiles,
        biases=biases and (as_kernel_bias(biases[0]), as_kernel_bias(biases[1])),
        zero_unused=zero_unused,
        **launch_size(num_rows, 2 * lhs.shape[1], num_cols),
    )
    return tuple(result[:num_rows] for result in results)


def drhs(
    lhs: jax.Array, grad: jax.Array, group_sizes: jax.Array, *, tiles: DrhsTiles | None = None
) -> jax.Array:
    """Computes `Backend.drhs`, the gradient of rhs, by a kernel; skips rows past the last group.

    If `tiles` is None, `drhs_tiles` chooses the tile sizes.
    """
    return drhs_of_each(lhs, [grad], group_sizes, tiles=tiles)[0]


@in_32_bits
def drhs_of_each(
    lhs: jax.Array,
    grads: Sequence[jax.Array],
    group_sizes: jax.Array,
    sums: Sequence[jax.Array] | None = None,
    *,
    tiles: DrhsTiles | None = None,
) -> tuple[jax.Array, ...]:
    """Computes `Backend.drhs_of_each` by one kernel.

    This is `drhs`, the gradient of rhs, for each cotangent in `grads`. The kernel adds it to `sums`
    in place if these have the dtype of the operands. If `tiles` is None, `drhs_tiles` chooses the
    tile sizes.
    """
    from pallas_kernels.matmul import drhs as kernels

    in_place = sums is not None and all(each.dtype == lhs.dtype for each in sums)
    results = kernels.drhs_of_each(
        pad_rows(lhs),
        [pad_rows(grad) for grad in grads],
        group_sizes,
        sums if in_place else None,
        tiles=tiles or drhs_tiles(grads[0].shape[1]),
        **launch_size(*lhs.shape, sum(grad.shape[1] for grad in grads)),
    )
    return results if in_place else added(sums, results)


@in_32_bits
def gate_gradient(
    gating: Gating,
    dhidden: jax.Array,
    products: Sequence[jax.Array],
    weights: jax.Array,
    group_sizes: jax.Array,
) -> tuple[jax.Array, ...] | None:
    """Computes `Backend.gate_gradient` by one kernel, which leaves out rows past the last group.

    Returns None if the kernel does not support the operations of `gating`, the dtypes or the width.
    """
    from pallas_kernels.matmul import gate_gradient as kernels
    from pallas_kernels.matmul.row_blocks import BLOCK

    gate, up = products
    num_rows, width = dhidden.shape
    if dhidden.dtype != jnp.bfloat16 or weights.dtype != jnp.float32 or width % BLOCK:
        return None
    if (function := gradient_as_elementwise(gating)) is None:
        return None
    num_used = jnp.sum(jnp.clip(group_sizes, 0, num_rows), dtype=jnp.int32)
    return kernels.gate_gradient(function, dhidden, gate, up, weights, num_used)


def as_kernel_bias(bias: jax.Array) -> jax.Array:
    """Returns a bias in a dtype that kernels can add to float32 numbers."""
    return (
        bias if bias.dtype in (jnp.bfloat16, jnp.float16, jnp.float32) else bias.astype(jnp.float32)
    )


def _sizes(rhs: jax.Array | Scaled, transpose_rhs: bool) -> tuple[int, int, int | None]:
    """Returns (number of groups, columns of a group's matrix, its rows K if it is in MXFP4)."""
    if not isinstance(rhs, jax.Array):
        return *rhs.values.shape[:2], rhs.values.shape[2] * MXFP4.numbers_per_value
    return rhs.shape[0], rhs.shape[1 if transpose_rhs else 2], None


def product_tiles(
    num_rows: int, num_groups: int, num_cols: int, *, mxfp4_depth: int | None = None
) -> Tiles:
    """Chooses tile sizes for `product`, whose result is [num_rows, num_cols].

    Larger tiles read less memory per multiplication. But there must be enough tiles to occupy all
    multiprocessors, so a small product gets smaller tiles. `mxfp4_depth` is K if the matrices are
    in MXFP4, else None. In MXFP4, higher tiles decode them fewer times.
    """
    from pallas_kernels.matmul.grouped_matmul import Tiles

    is_quantized = mxfp4_depth is not None
    values = num_rows * num_cols
    heights: tuple[int, ...] = (64, 128, 136, 144, 176, 208, 256)
    block_n = 128
    is_large = values >= HOPPER_CORES * 256 * 128
    if is_quantized and is_large and num_rows >= _FEW_ROWS * num_groups:
        heights = _HIGH if num_rows >= _MANY_ROWS * num_groups else (64, 96, 112, 128)
    elif num_rows < _FEW_ROWS * num_groups:
        wide = num_cols % 256 == 0 and values >= HOPPER_CORES * 64 * 256
        heights, block_n = (32, 64), 256 if wide else 128
        if is_quantized and num_rows <= _VERY_FEW_ROWS * num_groups:
            heights, block_n = _LOW, 256 if num_cols % 256 == 0 else 128
    elif not is_large:
        heights = (64, 128)
    columns = band(num_cols, block_n, 16)
    return Tiles.fitting(heights, block_n, columns, mxfp4_depth=mxfp4_depth)


def gated_tiles(
    num_rows: int, num_groups: int, num_cols: int, *, mxfp4_depth: int | None = None
) -> Tiles:
    """Chooses tile sizes for `gated_product`, whose two products are [num_rows, num_cols] each.

    A block of threads accumulates one tile of each of the two products at the same time, so the
    tiles are smaller than those of `product_tiles`. `mxfp4_depth` is K if the matrices are in
    MXFP4, else None. In MXFP4, many rows get narrow and high tiles, which decode the matrices fewer
    times.
    """
    from pallas_kernels.matmul.grouped_matmul import Tiles

    is_quantized = mxfp4_depth is not None
    few_rows = num_rows < _FEW_ROWS * num_groups
    few_tiles = num_rows * num_cols < HOPPER_CORES * 144 * 128
    heights: tuple[int, ...] = (64, 96, 112, 128, 136, 144)
    block_n = 128
    if is_quantized and num_rows <= _VERY_FEW_ROWS * num_groups:
        heights = _LOW
    elif few_rows or few_tiles:
        heights = (32, 64)
    elif is_quantized:
        heights = _HIGH if num_rows >= _MANY_ROWS * num_groups else (64, 80, 96)
        block_n = 64
    columns = band(num_cols, block_n, 8)
    return Tiles.fitting(heights, block_n, columns, num_matrices=2, mxfp4_depth=mxfp4_depth)


def chosen_tiles(
    groups: ChosenGroups, num_cols: int, *, num_matrices: int = 1, mxfp4_depth: int | None = None
) -> Tiles:
    """Chooses tile sizes for a product of chosen groups, of `num_cols` columns.

    `num_matrices` is the number of matrices of each group by which rows are multiplied.
    `mxfp4_depth` is K if they are in MXFP4, else None.
    """
    from pallas_kernels.matmul.grouped_matmul import Tiles

    num_tiles = (len(groups.table) - 1) * -(-num_cols // 128)
    # Tiles of 128 columns would leave half of the multiprocessors without a tile.
    block_n = 64 if num_matrices > 1 and num_tiles <= HOPPER_CORES // 2 else 128
    columns = band(num_cols, block_n, 8)
    return Tiles.fitting(
        (groups.height,), block_n, columns, num_matrices=num_matrices, mxfp4_depth=mxfp4_depth
    )


def drhs_tiles(num_cols: int) -> DrhsTiles:
    """Chooses tile sizes for `drhs`, which computes gradients of matrices of `num_cols` columns."""
    from pallas_kernels.matmul.drhs import DrhsTiles

    block_n = next(width for width in (256, 192, 128, 64) if num_cols % width == 0)
    return DrhsTiles.fitting(block_n, band(num_cols, block_n, 16))


def band(num_cols: int, block_n: int, most: int) -> int:
    """Chooses `Tiles.band`, the number of tile columns in one band of the output.

    A tile column consists of the output tiles that lie below each other, `block_n` columns wide. A
    band consists of neighbouring tile columns; the kernel computes the output band by band. The
    output is divided into bands of about the same width, of at most `most` tile columns each. The
    tiles that are computed at the same time then form about a square, which reads the least memory.
    """
    columns = -(-num_cols // block_n)
    return -(-columns // -(-columns // most))


def as_elementwise(gating: Gating, arity: int = 2) -> Any:
    """Converts a gating function of `arity` arrays to a form that can be called within a kernel.

    Returns None if the kernels do not support an operation of the function.
    """
    from pallas_kernels.fabric.elementwise import Elementwise, NotSupported

    try:
        return Elementwise(gating, arity)
    except NotSupported:
        return None


def gradient_as_elementwise(gating: Gating) -> Any:
    """Converts the gradient of a gating to a form that can be called within a kernel, or to None.

    The result is `pallas_kernels.matmul.gate_gradient.gradient_of`.
    """
    from pallas_kernels.fabric.elementwise import NotSupported
    from pallas_kernels.matmul.gate_gradient import gradient_of

    try:
        return gradient_of(gating)
    except NotSupported:
        return None


def core_count() -> int:
    """Returns the number of streaming multiprocessors of the first GPU.

    If this machine has no GPU, the program is compiled for another machine, and the number of an
    H100 is returned.
    """
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else HOPPER_CORES


def launch_size(*lengths: int) -> dict[str, Any]:
    """Returns the arguments `num_blocks` and `num_waves` of a kernel with large products.

    With several waves of thread blocks, a kernel loses less time while another kernel holds some of
    the multiprocessors, as a collective does that runs beside it; see
    `pallas_kernels.matmul.kernel.Kernel.walk`.

    Args:
      lengths: their product is the number of multiplications if all rows are in use. If fewer are,
        later waves may have no tiles, and end at once.
    """
    num_waves = min(math.prod(lengths) // _LEAST_MULTIPLICATIONS, _MOST_WAVES)
    return {"num_blocks": core_count(), "num_waves": max(num_waves, 1)}


BACKEND = Backend(
    name="pallas",
    unavailable_reason=unavailable_reason,
    product=product,
    drhs=drhs,
    fused_sum_of_products=sum_of_products,
    fused_gated_product=gated_product,
    fused_drhs_of_each=drhs_of_each,
    fused_gate_gradient=gate_gradient,
    has_chosen_groups=True,
)
