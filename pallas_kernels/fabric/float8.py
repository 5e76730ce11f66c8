"""Emits the steps of float8 quantization of one thread, with the bits of `formats.Float8`.

The argument `ptx_type` is a float8 type's name in PTX, such as "e4m3".
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax.numpy as jnp

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.mosaic import Value, arith, llvm
from pallas_kernels.formats import Float8

PTX_TYPES = {jnp.dtype(jnp.float8_e4m3fn): "e4m3", jnp.dtype(jnp.float8_e5m2): "e5m2"}

# As integers, the bits of a positive NaN are larger, and those of a finite positive number smaller.
INFINITY = 0x7F800000
_NAN = 0x7FC00000


def magnitude(value: Value) -> tuple[Value, Value]:
    """Emits whether a float32 is finite (i1), and its magnitude's bits (i32), 0 if it is not."""
    bits = arith.andi(arith.bitcast(mosaic.integer_type(32), value), mosaic.i32(0x7FFFFFFF))
    is_finite = arith.cmpi(arith.CmpIPredicate.ult, bits, mosaic.i32(INFINITY))
    return is_finite, arith.select(is_finite, bits, mosaic.i32(0))


def largest_magnitude(values: Sequence[Value]) -> Value:
    """Emits the bits (i32) of the largest absolute value of float32 numbers, ignoring NaN."""
    # Four maxima, so that few instructions wait for the one before them.
    parts = [functools.reduce(_or_magnitude, values[i::4], mosaic.f32(0.0)) for i in range(4)]
    return arith.bitcast(mosaic.integer_type(32), functools.reduce(_or_magnitude, parts))


def _or_magnitude(largest: Value, value: Value) -> Value:
    # PTX's max ignores a NaN.
    text = "{ .reg .f32 size; abs.f32 size, $2; max.f32 $0, $1, size; }"
    return mosaic.asm(text, "=f,f,f", largest, value, returns=mosaic.float_type())


def scale(format: Float8, largest: Value) -> Value:
    """Emits the float32 scale of a block, from the bits (i32) of its largest magnitude."""
    largest = arith.bitcast(mosaic.float_type(), largest)
    scale = arith.mulf(largest, mosaic.f32(format.scale_of_largest))
    return arith.maximumf(scale, mosaic.f32(format.least_scale))


def reciprocal(scale: Value) -> Value:
    """Emits 1 / scale as float32, rounded to nearest as IEEE 754 defines it."""
    return mosaic.asm("rcp.rn.f32 $0, $1;", "=f,f", scale, returns=mosaic.float_type())


def branchless_reciprocal(scale: Value) -> Value:
    """Emits 1 / scale with the bits of `reciprocal`, but without a branch."""
    # PTX's `rcp.rn` branches for subnormal numbers, which scales and their reciprocals never are.
    # Without the branch, the compiler can interleave the work for several scales, but uses more
    # registers. One step of Newton's method rounds `rcp.approx` correctly.
    return mosaic.asm(
        "{ .reg .f32 near, error;"
        " rcp.approx.ftz.f32 near, $1;"
        " neg.f32 error, near;"
        " fma.rn.f32 error, $1, error, 0f3F800000;"
        " fma.rn.f32 $0, near, error, near; }",
        "=f,f",
        scale,
        returns=mosaic.float_type(),
    )


def or_nan(value: Value, is_finite: Value) -> Value:
    return arith.select(is_finite, value, arith.bitcast(mosaic.float_type(), mosaic.i32(_NAN)))


def packed(ptx_type: str, four: Sequence[Value]) -> Value:
    """Rounds 4 float32 numbers to float8, packed into an int32, the first in the lowest byte."""
    return mosaic.asm(
        "{ .reg .b16 low, high;"
        f" cvt.rn.satfinite.{ptx_type}x2.f32 low, $2, $1;"
        f" cvt.rn.satfinite.{ptx_type}x2.f32 high, $4, $3;"
        " mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f",
        *four,
        returns=mosaic.integer_type(32),
    )


def widened(ptx_type: str, word: Value) -> list[Value]:
    """Converts the 4 float8 numbers in a 32-bit word to float32, beginning with the lowest byte."""
    word_type, float32 = mosaic.integer_type(32), mosaic.float_type()
    halves = mosaic.vector_type(2, mosaic.element_type(jnp.float16))
    # PTX converts float8 only to float16, which represents all its numbers.
    instruction = f"cvt.rn.f16x2.{ptx_type}x2 $0, $1;"
    wide = []
    for shift in (0, 16):
        pair = arith.trunci(mosaic.integer_type(16), arith.shrui(word, mosaic.i32(shift)))
        pair = llvm.bitcast(halves, llvm.inline_asm(word_type, [pair], instruction, "=r,h"))
        halves_of_pair = (llvm.extractelement(pair, mosaic.i32(i)) for i in range(2))
        wide += [arith.extf(float32, half) for half in halves_of_pair]
    return wide
