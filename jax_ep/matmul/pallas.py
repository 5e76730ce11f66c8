"""Implements the backend "pallas": this library's own kernels, for Hopper GPUs.

The kernels are imported when the first program that uses them is lowered. The functions follow the
contract in `jax_ep.matmul.backend`.
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
from jax_ep.runtime import availability
from pallas_kernels.fabric.hardware import HOPPER_CORES
from pallas_kernels.formats import MXFP4
from pallas_kernels.matmul.chosen_groups import ChosenGroups, Groups, output_rows
from pallas_kernels.matmul.row_blocks import BLOCK

if TYPE_CHECKING:
    from pallas_kernels.formats import Scaled
    from pallas_kernels.matmul.grouped_matmul import Tiles

# _MULTIPLES[has_scales] holds the dtypes that the kernels multiply, for operands with or without
# scales. It maps each dtype to a number that must divide both dimensions of each group's matrix.
_MULTIPLES = {
    False: {jnp.dtype(jnp.bfloat16): 64, jnp.dtype(jnp.float16): 64},
    True: {jnp.dtype(jnp.float8_e4m3fn): 128},
}
# If groups have fewer rows than this on average, the speed is limited by reading their matrices, so
# other tile sizes are chosen.
_FEW_ROWS = 64
# Tiles of up to 176 rows, by 128 columns, leave registers for a loader and for a tile that is held
# until it is stored. Those of more than 144 pay from `_LARGE` rows a group on, on average. Higher
# ones pay without a loader if K is at most `_SHORT`, or 1536 with `_VERY_LARGE` rows, where few
# heights are faster; and not held, beside a loader, from K = `_LONG` on if a group's rows times K
# are at least `_AT_ONCE`. Measured with 72 to 16384 rows, and K of 768 to 28672.
_LARGE, _VERY_LARGE, _SHORT, _LONG = 512, 2048, 1024, 4096
_AT_ONCE = 6 * 2**20
_HEIGHTS = (64, 80, 96, 104, 120, 128, 136, 144)
_HEIGHTS_OF_LARGE = (64, 128, 136, 144, 152, 160, 168, 176)
_HIGHER = (64, 128, 176, 208, 224, 240, 256)
# Matrices in MXFP4: if groups have at most `_VERY_FEW_ROWS` rows on average, tiles have the heights
# `_LOW`, and if they have at least `_MANY_ROWS`, the heights `_HIGH`. Measured with 16 to 512 rows.
_VERY_FEW_ROWS, _MANY_ROWS = 16, 96
_LOW, _HIGH = (16, 32), (64, 128, 176)
# The most waves of thread blocks of a kernel, and the least number of multiplications of a wave,
# which take about 200 us in bfloat16. Each wave after the first costs a few microseconds.
_MOST_WAVES, _LEAST_MULTIPLICATIONS = 4, 64 * 10**9


def unavailable_reason(problem: Problem) -> str | None:
    if reason := symbolic_rows_reason(problem):
        return reason
    dtype = jnp.dtype(problem.dtype)
    multiples = _MULTIPLES[problem.has_scales]
    if dtype not in multiples:
        names = " and ".join(each.name for each in multiples)
        return (
            f"it multiplies {names}, not {dtype}{'' if problem.has_scales else ' without scales'}"
        )
    multiple = multiples[dtype]
    sides = list(problem.matrix_shape)
    if any(side % multiple for side in sides):
        return f"both sides of each group's matrix must be multiples of {multiple}, but are {sides}"
    return _platform_reason(problem.platform)


def _platform_reason(platform: str | None) -> str | None:
    if platform not in ("cuda", None):
        return f"its kernels are for NVIDIA Hopper GPUs, and this program is for {platform}"
    if reason := availability.jax_unavailable_reason():
        return reason
    # While a program is traced, nothing else is checked: it may be lowered for another platform.
    if platform is None:
        return None
    if reason := availability.mosaic_unavailable_reason():
        return reason
    device = jax.devices()[0]
    # Without a GPU here, the program is compiled for another machine, whose GPU is not known.
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
    """Decorates a function that traces a kernel: indices are int32 also under `jax_enable_x64`."""

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        with jax.enable_x64(False):
            return function(*args, **options)

    return run


@in_32_bits
def sum_of_products(
    pairs: Pairs | Sequence[tuple[jax.Array, Scaled]],
    groups: Groups,
    *,
    transpose_rhs: bool,
    zero_unused: bool = True,
) -> jax.Array:
    """Computes `Backend.sum_of_products` by a kernel.

    The rhs of a single pair may be `Scaled` transposes in MXFP4.
    """
    from pallas_kernels.matmul.grouped_matmul import grouped_matmul

    lhs, rhs = pairs[0]
    num_groups, num_cols, mxfp4_depth = _sizes(rhs, transpose_rhs)
    num_rows = output_rows(groups, lhs.shape[0])
    depth = sum(lhs.shape[1] for lhs, _ in pairs)
    if isinstance(groups, ChosenGroups):
        tiles = chosen_tiles(groups, num_cols, mxfp4_depth=mxfp4_depth)
    else:
        tiles = product_tiles(lhs.shape[0], num_groups, num_cols, depth, mxfp4_depth=mxfp4_depth)
    format = None
    if mxfp4_depth is not None:
        from pallas_kernels.matmul.mxfp4_matmul import Mxfp4Matrices

        format = Mxfp4Matrices
    out = grouped_matmul(
        [(pad_rows(lhs), rhs) for lhs, rhs in pairs],
        groups,
        transpose_rhs=transpose_rhs or format is not None,
        format=format,
        tiles=tiles,
        zero_unused=zero_unused,
        **launch_size(num_rows, depth, num_cols),
    )
    return out[:num_rows]


@in_32_bits
def gated_product_by_kernel(
    lhs: jax.Array,
    rhs: tuple[jax.Array, jax.Array] | tuple[Scaled, Scaled],
    groups: Groups,
    gating: Gating,
    keep: bool,
    *,
    biases: tuple[jax.Array, jax.Array] | None = None,
    zero_unused: bool = True,
) -> tuple[jax.Array, ...] | None:
    """Computes `Backend.gated_product` by a kernel; returns None if no kernel can call `gating`.

    Each rhs may be `Scaled` transposes in MXFP4.
    """
    from pallas_kernels.matmul.gated_matmul import gated_matmul

    num_groups, num_cols, mxfp4_depth = _sizes(rhs[0], transpose_rhs=False)
    num_rows = output_rows(groups, lhs.shape[0])
    if isinstance(groups, ChosenGroups):
        tiles = chosen_tiles(groups, num_cols, num_matrices=2, mxfp4_depth=mxfp4_depth)
    else:
        tiles = gated_tiles(
            lhs.shape[0], num_groups, num_cols, lhs.shape[1], mxfp4_depth=mxfp4_depth
        )
    if (function := as_elementwise(gating)) is None:
        return None
    results = gated_matmul(
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


@in_32_bits
def drhs_of_each(
    lhs: jax.Array,
    grads: Sequence[jax.Array],
    group_sizes: jax.Array,
    sums: Sequence[jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    from pallas_kernels.matmul import drhs as kernels

    # The kernel adds in place to sums of the operands' dtype.
    in_place = sums is not None and all(each.dtype == lhs.dtype for each in sums)
    num_cols = grads[0].shape[1]
    # The columns of a tile: the most that divide all columns, a multiple of 64 (`_MULTIPLES`).
    # With few rows, the gradients' bytes set the time, and a loader is worth more than width.
    few_rows = lhs.shape[0] < _FEW_ROWS * group_sizes.shape[0]
    most = kernels.MOST_BESIDE_LOADER if few_rows else 256
    block_n = next(n for n in (256, 192, 128, 64) if n <= most and num_cols % n == 0)
    results = kernels.drhs_of_each(
        pad_rows(lhs),
        [pad_rows(grad) for grad in grads],
        group_sizes,
        sums if in_place else None,
        tiles=kernels.DrhsTiles.fitting(block_n, num_cols),
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
    """Computes `Backend.gate_gradient`; None if no kernel supports the operands or `gating`."""
    from pallas_kernels.matmul import gate_gradient as kernels

    gate, up = products
    num_rows, width = dhidden.shape
    if dhidden.dtype != jnp.bfloat16 or weights.dtype != jnp.float32 or width % BLOCK:
        return None
    if (function := elementwise_gradient(gating)) is None:
        return None
    num_used = jnp.sum(jnp.clip(group_sizes, 0, num_rows), dtype=jnp.int32)
    return kernels.gate_gradient(function, dhidden, gate, up, weights, num_used)


def as_kernel_bias(bias: jax.Array) -> jax.Array:
    is_supported = bias.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)
    return bias if is_supported else bias.astype(jnp.float32)


def _sizes(rhs: jax.Array | Scaled, transpose_rhs: bool) -> tuple[int, int, int | None]:
    """Returns (number of groups, columns of a group's matrix, its rows K if it is in MXFP4)."""
    if not isinstance(rhs, jax.Array):
        return *rhs.values.shape[:2], rhs.values.shape[2] * MXFP4.numbers_per_value
    return rhs.shape[0], rhs.shape[1 if transpose_rhs else 2], None


def product_tiles(
    num_rows: int, num_groups: int, num_cols: int, depth: int, *, mxfp4_depth: int | None = None
) -> Tiles:
    """Chooses tiles; `depth`: K, summed over all pairs; `mxfp4_depth`: K if rhs is in MXFP4."""
    from pallas_kernels.matmul.grouped_matmul import Tiles

    # Larger tiles read less memory, but there must be enough of them to occupy all multiprocessors.
    # The section "Grouped matmul" of pallas_kernels/TUNING.md has the times of many tiles.
    is_quantized = mxfp4_depth is not None
    values = num_rows * num_cols
    heights: tuple[int, ...]  # that a tile may have
    block_n, holds = 128, True
    if num_rows < _FEW_ROWS * num_groups:
        heights = (32, 64)
        is_wide = num_cols % 256 == 0 and values >= HOPPER_CORES * 64 * 256
        if is_quantized and num_rows <= _VERY_FEW_ROWS * num_groups:
            heights, is_wide = _LOW, num_cols % 256 == 0
        block_n = 256 if is_wide else 128
    elif values < HOPPER_CORES * 256 * 128:  # less than such a tile for each multiprocessor
        heights = (64, 128)
    elif is_quantized:
        heights = _HIGH if num_rows >= _MANY_ROWS * num_groups else (64, 96, 112, 128)
    elif depth <= 1536 and num_rows >= _VERY_LARGE * num_groups:
        heights = (64, 128, 256)
    elif num_rows < _LARGE * num_groups:
        heights = _HEIGHTS
    elif depth <= _SHORT:
        heights = _HIGHER
    elif depth >= _LONG and num_rows * depth >= _AT_ONCE * num_groups:
        heights, holds = _HIGHER, False
    else:
        heights = _HEIGHTS_OF_LARGE
    return Tiles.fitting(heights, block_n, num_cols, most=16, mxfp4_depth=mxfp4_depth, holds=holds)


def gated_tiles(
    num_rows: int, num_groups: int, num_cols: int, depth: int, *, mxfp4_depth: int | None = None
) -> Tiles:
    """Chooses tiles of a gated product [num_rows, num_cols]; arguments as for `product_tiles`."""
    from pallas_kernels.matmul.grouped_matmul import Tiles

    is_quantized = mxfp4_depth is not None
    few_rows = num_rows < _FEW_ROWS * num_groups
    few_tiles = num_rows * num_cols < HOPPER_CORES * 144 * 128  # less than one a multiprocessor
    # A tile has `block_n` columns of each product. With 64, registers are left for a loader.
    heights: tuple[int, ...] = _HEIGHTS if num_rows < _LARGE * num_groups else _HEIGHTS_OF_LARGE
    block_n, most = 64, 16 if depth <= _SHORT else 12
    if is_quantized:
        heights, most = (32, 64), 8
        if num_rows <= _VERY_FEW_ROWS * num_groups:
            heights = _LOW
        elif num_rows >= _MANY_ROWS * num_groups:
            heights = _HIGH
    elif few_rows or few_tiles:
        heights, block_n, most = (32, 64), 128, 8
    return Tiles.fitting(heights, block_n, num_cols, most, num_matrices=2, mxfp4_depth=mxfp4_depth)


def chosen_tiles(
    groups: ChosenGroups, num_cols: int, *, num_matrices: int = 1, mxfp4_depth: int | None = None
) -> Tiles:
    """Chooses tiles for chosen groups, each of which has one row tile of `groups.height` rows."""
    from pallas_kernels.matmul.grouped_matmul import Tiles

    # `table` has a row for each chosen group, and one more.
    num_tiles = (len(groups.table) - 1) * -(-num_cols // 128)  # of 128 columns
    # Tiles of 128 columns would leave half of the multiprocessors without a tile, or no room for a
    # loader. Only a gated product supports narrower ones.
    is_narrow = num_tiles <= HOPPER_CORES // 2 or mxfp4_depth is not None
    block_n = 64 if num_matrices > 1 and is_narrow else 128
    options: Any = dict(num_matrices=num_matrices, mxfp4_depth=mxfp4_depth)
    return Tiles.fitting((groups.height,), block_n, num_cols, most=8, **options)


@in_32_bits
def as_elementwise(gating: Gating, arity: int = 2) -> Any:
    """Returns `gating`, of `arity` arrays, in a form that kernels emit; None if they cannot."""
    from pallas_kernels.fabric.elementwise import Elementwise, NotSupported

    try:
        return Elementwise(gating, arity)
    except NotSupported:
        return None


@in_32_bits
def elementwise_gradient(gating: Gating) -> Any:
    """Returns `gradient_of` gating, which kernels emit; None if they cannot."""
    from pallas_kernels.fabric.elementwise import NotSupported
    from pallas_kernels.matmul.gate_gradient import gradient_of

    try:
        return gradient_of(gating)
    except NotSupported:
        return None


def core_count() -> int:
    device = jax.devices()[0]
    # Without a GPU here, the program is compiled for another machine.
    return device.core_count if device.platform == "gpu" else HOPPER_CORES


def launch_size(*lengths: int) -> dict[str, Any]:
    """Returns `num_blocks` and `num_waves` of a kernel for prod(`lengths`) multiplications.

    With several waves of thread blocks, a kernel loses less time while another kernel, such as a
    collective, holds some of the multiprocessors; see `Kernel.block_tiles` of the kernels.
    """
    num_waves = min(math.prod(lengths) // _LEAST_MULTIPLICATIONS, _MOST_WAVES)
    return {"num_blocks": core_count(), "num_waves": max(num_waves, 1)}


class _Pallas(Backend):
    sum_of_products = staticmethod(sum_of_products)
    drhs_of_each = staticmethod(drhs_of_each)

    def gated_product(self, *operands: Any, **options: Any) -> tuple[jax.Array, ...]:
        results = gated_product_by_kernel(*operands, **options)
        return super().gated_product(*operands, **options) if results is None else results

    def gate_gradient(self, *operands: Any) -> tuple[jax.Array, ...]:
        results = gate_gradient(*operands)
        return super().gate_gradient(*operands) if results is None else results


BACKEND = _Pallas(
    name="pallas",
    unavailable_reason=unavailable_reason,
    product=lambda lhs, rhs, groups, **options: sum_of_products([(lhs, rhs)], groups, **options),
    drhs=lambda lhs, grad, group_sizes: drhs_of_each(lhs, [grad], group_sizes)[0],
)
