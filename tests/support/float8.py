"""Operands of float8 matmuls, quantized on the CPU, and the error bounds of their products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import reference
from jax_ep.formats import FLOAT8_MATRICES, FLOAT8_ROWS, Float8, QuantizedArray, quantize
from pallas_kernels.formats import Scaled
from pallas_kernels.matmul.row_blocks import BLOCK, TransposedRows, padded_rows

KINDS = ("random", "skewed", "zero", "huge", "subnormal", "nan", "infinity")
_FACTORS = {"zero": 0, "huge": 1e33, "subnormal": 1e-39, "nan": np.nan, "infinity": -np.inf}

# A float8 matmul may differ from the float64 sum of its products by this factor times the sum of
# their magnitudes, because tensor cores add 128 products with about 14 bits.
SUM_ERROR = 2.0**-12
# It may also have an error of this factor times the largest product, for each 128 products: tensor
# cores align the products with the largest one, and cut each off at about 2^-13 of it.
CUT_OFF = 128 * 2.0**-13


def numbers(kind: str, shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Draws matrices [..., R, C] of normal float32 numbers, changed as `kind` of `KINDS` says.

    "skewed" gives each row its own magnitude. "zero", "huge", "nan" and "infinity" change row 5 of
    the last matrix.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    last = x.reshape(-1, *shape[-2:])[-1]
    if kind == "skewed":
        x *= np.exp(3 * rng.standard_normal((*shape[:-1], 1))).astype(np.float32)
    elif kind == "subnormal":
        x *= np.float32(_FACTORS[kind])
    elif kind in ("zero", "huge"):
        last[5] *= np.float32(_FACTORS[kind])
    elif kind != "random":
        last[5, 7] = _FACTORS[kind]
    return x


def mixed(shape: Sequence[int], seed: int = 0) -> np.ndarray:
    """Returns rows [R, C] float32 in which the special values of all `KINDS` alternate."""
    x = numbers("skewed", shape, seed)
    for row, factor in enumerate(_FACTORS.values()):
        part = np.s_[7:8] if np.isnan(factor) or np.isinf(factor) else np.s_[:]
        x[2 * row :: 2 * len(_FACTORS), part] *= np.float32(factor)
    return x


def rows(x: np.ndarray) -> QuantizedArray:
    """Quantizes rows [R, K] to float8, with one scale per 128 columns of a row."""
    return _on_device(quantize(x, FLOAT8_ROWS))


def scaled(array: QuantizedArray) -> Scaled:
    """Returns the values and scales of an array, as kernels take them."""
    return Scaled(array.values, array.scales)


def transposed_matrices(x: np.ndarray) -> QuantizedArray:
    """Quantizes matrices [L, K, N], transposed to [L, N, K] as the matmul kernels read them."""
    return matrices(np.ascontiguousarray(x.swapaxes(1, 2)))


def block_sources(sizes: Sequence[int]) -> np.ndarray:
    """Returns, for each row of the groups' blocks of 128 rows, the row it holds; -1 for none."""
    groups = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return np.concatenate([np.pad(g, (0, -len(g) % BLOCK), constant_values=-1) for g in groups])


def transposed_rows(x: np.ndarray, sizes: Sequence[int]) -> TransposedRows:
    """Does in NumPy what `float8.transpose_rows` does with rows [R, K] on the device."""
    padded = np.zeros((padded_rows(len(x), len(sizes)), x.shape[1]), np.float32)
    sources = block_sources(sizes)
    padded[: len(sources)][sources >= 0] = x[: sum(sizes)]
    values, scales = Float8.of(jnp.float8_e4m3fn, (BLOCK, BLOCK)).encode(padded)
    return TransposedRows(jnp.asarray(values.T), jnp.asarray(scales))


def transposed_quantized_rows(rows: QuantizedArray, sizes: Sequence[int]) -> TransposedRows:
    """Does in NumPy what `float8.transpose_rows` does with quantized rows on the device."""
    num_rows, width = rows.values.shape
    height, columns = padded_rows(num_rows, len(sizes)), width // BLOCK
    numbers = np.zeros((height, columns, BLOCK), np.float32)
    own = np.zeros((height, columns), np.float32)
    sources, live = block_sources(sizes), sum(sizes)
    values = np.asarray(rows.values, np.float32).reshape(num_rows, columns, BLOCK)
    numbers[: len(sources)][sources >= 0] = values[:live]
    own[: len(sources)][sources >= 0] = np.asarray(rows.scales)[:live]
    scales = np.maximum(
        own.reshape(-1, BLOCK, columns).max(axis=1), np.float32(FLOAT8_ROWS.least_scale)
    )
    factors = own * np.repeat(1 / scales, BLOCK, axis=0)
    values = (numbers * factors[..., None]).reshape(height, width).astype(jnp.float8_e4m3fn)
    return TransposedRows(jnp.asarray(values.T), jnp.asarray(scales))


# Group sizes for kernels that handle blocks of 128 rows: 3 rows are part of a block, and 150 rows
# need two blocks. Of the 168 rows, the last 15 are in no group.
BLOCK_SIZES = [3, 0, 150]
BLOCK_ROWS, BLOCK_LIVE = 168, sum(BLOCK_SIZES)


def rows_in_blocks(kind: str, seed: int = 0) -> np.ndarray:
    """Returns rows [168, 256] float32 of a kind of `KINDS`, with NaN past the last group."""
    rows = np.full((BLOCK_ROWS, 256), np.nan, np.float32)
    rows[:BLOCK_LIVE] = numbers(kind, (BLOCK_LIVE, 256), seed)
    return rows


def swiglu(gate: Any, up: Any) -> Any:
    return jax.nn.silu(gate) * up


def shifted(gate: Any, up: Any) -> Any:
    """A gating whose value and gradient for zeros are not zero."""
    return jax.nn.sigmoid(gate) * (up + 1)


def gate_gradient(
    dhidden: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray,
    weights: np.ndarray,
    gating: Callable[..., Any] = swiglu,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Computes the gradient of weights * gating(gate, up), in float64 (`swiglu`, `shifted`)."""
    dhidden, gate, up = (each.astype(np.float64) for each in (dhidden, gate, up))
    of_rows = weights.astype(np.float64)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        sigmoid = 1 / (1 + np.exp(-gate))
        first, second, slope = gate * sigmoid, up, sigmoid * (1 + gate * (1 - sigmoid))
        if gating is shifted:
            first, second, slope = sigmoid, up + 1, sigmoid * (1 - sigmoid)
        grad, hidden = dhidden * of_rows, first * second
        return grad * second * slope, grad * first, hidden * of_rows, dhidden * hidden


def assert_gate_gradient(got: Any, want: Sequence[np.ndarray], sizes: Sequence[int]) -> None:
    """Asserts that a `float8.GateGradient` is what `gate_gradient` returned, within rounding."""
    live = sum(sizes)
    *arrays, products = want
    sources = block_sources(sizes)
    for (rows, _), expected in zip(got.dpre, arrays, strict=False):
        numbers = np.asarray(rows.dequantize(jnp.float32))[:live]
        assert_rounded(numbers, expected, np.asarray(rows.scales)[:live])
    for turned, expected in zip((*(t for _, t in got.dpre), got.hidden), arrays, strict=True):
        values, scales = live_blocks(turned, sizes)
        of_rows = np.repeat(scales, BLOCK, axis=0)
        numbers = values.astype(np.float32).T * np.repeat(of_rows, BLOCK, axis=1)
        assert (numbers[sources < 0] == 0).all()
        assert_rounded(numbers[sources >= 0], expected[:live], of_rows[sources >= 0])
    with np.errstate(invalid="ignore"):
        wanted = products.sum(axis=1)
    dweights = np.asarray(got.dweights)[:live]
    np.testing.assert_array_equal(np.isnan(dweights), np.isnan(wanted))
    finite = np.isfinite(wanted)
    bound = 2.0**-7 * np.abs(products[finite]).sum(axis=1) + 1e-30
    assert not (np.abs(dweights[finite] - wanted[finite]) > bound).any()


def assert_encodes(got: Any, numbers: Any) -> None:
    """Asserts that `got`, (values, scales), has the bits of `FLOAT8_ROWS.encode` in NumPy."""
    values, scales = map(np.asarray, got)
    want, wanted_scales = FLOAT8_ROWS.encode(np.asarray(numbers))
    np.testing.assert_array_equal(scales.view(np.uint32), wanted_scales.view(np.uint32))
    bits, wanted_bits = (
        np.where(np.isnan(each.astype(np.float32)), 0x7F, each.view(np.uint8))
        for each in (values, want)
    )
    np.testing.assert_array_equal(bits, wanted_bits)


def assert_same_numbers(got: Sequence[Any], want: Sequence[Any]) -> None:
    """Asserts that arrays are equal, but for the signs of NaN and zero."""
    for mine, theirs in zip(got, want, strict=True):
        mine, theirs = np.asarray(mine), np.asarray(theirs)
        if mine.dtype == jnp.float8_e4m3fn:
            # A NaN may have either sign.
            mine, theirs = (np.where(np.isnan(each), np.nan, each) for each in (mine, theirs))
        np.testing.assert_array_equal(mine, theirs)


def assert_rounded(got: np.ndarray, want: np.ndarray, scales: np.ndarray) -> None:
    """Asserts that `got` [R, C] is `want` rounded to float8 with the scales [R, C / 128]."""
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(want.astype(np.float32))
        bound = 2.0**-4 * 1.1 * np.abs(want) + 2.0**-10 * np.repeat(scales, BLOCK, axis=1) * 1.1
    np.testing.assert_array_equal(np.isnan(got), ~finite)
    assert not (np.abs(got - want)[finite] > bound[finite]).any()


def live_blocks(rows: TransposedRows, sizes: Sequence[int]) -> list[np.ndarray]:
    """Returns the values and scales of the blocks that have rows: those of all groups."""
    count = sum(-(-size // BLOCK) for size in sizes)
    return [np.asarray(rows.values)[:, : count * BLOCK], np.asarray(rows.scales)[:count]]


def matrices(x: np.ndarray) -> QuantizedArray:
    """Quantizes matrices [L, K, N] to float8, with one scale per block of 128 x 128."""
    return _on_device(quantize(x, FLOAT8_MATRICES))


def _on_device(array: QuantizedArray) -> QuantizedArray:
    return jax.tree.map(jnp.asarray, array)


def largest_of_columns(x: np.ndarray) -> np.ndarray:
    """Returns x [..., R, C] with the largest magnitude of each 128 columns at the first of them."""
    sizes, out = _finite_sizes(x), np.zeros_like(x)
    for first in range(0, x.shape[-1], BLOCK):
        out[..., first] = sizes[..., first : first + BLOCK].max(axis=-1)
    return out


def largest_of_rows(x: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Returns what `largest_of_columns` does, for each 128 rows of a group of x [R, C]."""
    finite, out, start = _finite_sizes(x), np.zeros_like(x), 0
    for size in sizes:
        for first in range(start, start + size, BLOCK):
            out[first] = finite[first : min(first + BLOCK, start + size)].max(axis=0)
        start += size
    return out


def _finite_sizes(x: np.ndarray) -> np.ndarray:
    """Returns the magnitudes of x, with zero in place of NaN and infinity."""
    return np.where(np.isfinite(x), np.abs(x), 0)


def assert_within_bound(
    got: Any,
    compute: Callable[..., np.ndarray],
    *operands: Any,
    sizes: Sequence[int],
    largest: Sequence[np.ndarray] | None = None,
) -> None:
    """Asserts that `got` is compute(*operands, sizes), within the float8 sum's error bound."""
    want = compute(*operands, np.array(sizes))
    magnitudes = compute(*map(np.abs, operands), np.array(sizes))
    rounding = float(jnp.finfo(got.dtype).eps) / 2
    got = np.asarray(got).astype(np.float64)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    # XLA on CPUs flushes products below 2^-126 to zero; the last term of the bound allows for it.
    bound = SUM_ERROR * magnitudes + rounding * np.abs(want) + 2.0**-117
    if largest is not None:
        bound += CUT_OFF * compute(*largest, np.array(sizes))
    assert not (np.abs(got - want) > bound).any()


def assert_gated_within_bound(
    got: Sequence[QuantizedArray], lhs: np.ndarray, rhs: Sequence[np.ndarray], sizes: Sequence[int]
) -> None:
    """Asserts that the float8 results of a gated matmul are right: hidden, and products if kept."""
    gate, up = (reference.float8_matmul(lhs, each, np.array(sizes)) for each in rhs)
    off_gate, off_up = (
        SUM_ERROR * reference.float8_matmul(np.abs(lhs), np.abs(each), np.array(sizes))
        for each in rhs
    )
    hidden = gate / (1 + np.exp(-np.clip(gate, -700, 700))) * up
    # The slope of silu is below 1.1.
    off_hidden = 1.1 * (off_gate * np.abs(up) + np.abs(gate) * off_up)
    wanted = ((hidden, off_hidden), (gate, off_gate), (up, off_up))[: len(got)]
    for mine, (want, off) in zip(got, wanted, strict=True):
        assert mine.format == FLOAT8_ROWS
        with np.errstate(over="ignore"):
            # The kernel's products are float32 and may overflow to infinity, so round to float32.
            want = want.astype(np.float32).astype(np.float64)
        values, scales = (
            np.asarray(each).astype(np.float64) for each in (mine.values, mine.scales)
        )
        scales = np.repeat(scales, 128, axis=1)
        np.testing.assert_array_equal(np.isnan(values), ~np.isfinite(want))
        rounding = np.maximum(2.0**-4 * np.abs(want), 2.0**-10 * scales)
        within = np.abs(values * scales - want) <= 1.07 * (rounding + off) + 2.0**-117
        assert within[np.isfinite(want)].all()


def error_of_norm(got: Any, want: Any) -> float:
    """Returns the relative error |got - want| / |want|, in the Euclidean norm."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))
