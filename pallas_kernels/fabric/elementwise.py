"""Elementwise float32 functions within a kernel, with the arithmetic of XLA's own GPU kernels.

XLA rounds every operation (it never contracts a product and a sum to an FMA), divides by
`div.full`, inverts by `rcp.approx`, and has its own `exp` and `tanh`. Pallas' lowerings differ in
the last bits. So this module emits a function's jaxpr as the PTX that XLA emits for it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.mosaic import Value

Function = Callable[..., Any]


class NotSupported(Exception):
    """Raised for a function that `Elementwise` cannot emit; the message names the reason."""


@dataclasses.dataclass(frozen=True)
class Elementwise:
    """An elementwise function of `arity` float32 arrays, to be called within a kernel.

    `function` returns an array, or a tuple of arrays if `results` is above 1. Raises NotSupported
    if this module cannot emit one of its operations.
    """

    function: Function
    arity: int
    results: int = 1

    def __post_init__(self) -> None:
        _check(self._jaxpr.jaxpr)

    @functools.cached_property
    def _jaxpr(self) -> Any:
        # The closed jaxpr of the function on float32 scalars.
        scalar = jax.ShapeDtypeStruct((), jnp.float32)
        try:
            closed = jax.make_jaxpr(self.function)(*[scalar] * self.arity)
        except Exception as error:
            raise NotSupported(f"it cannot be traced with scalars: {error}") from error
        if closed.consts:
            raise NotSupported("it captures arrays")
        scalars = [((), jnp.float32)] * self.results
        if [(aval.shape, aval.dtype) for aval in closed.out_avals] != scalars:
            raise NotSupported(f"its result is {closed.out_avals} for float32 scalars")
        return closed

    def __call__(self, *arrays: jax.Array) -> jax.Array:
        """Applies the function, of one result, to register arrays of one shape and layout WGMMA."""
        jaxpr = self._jaxpr.jaxpr
        layout = plgpu.Layout.WGMMA

        def emit(*operands: Any) -> Any:
            return mosaic.elementwise(lambda *values: _emit(jaxpr, values)[0], *operands)

        result = plgpu.ShapeDtypeStruct(arrays[0].shape, jnp.float32, layout=layout)
        return mosaic.inline(emit, [(array, layout) for array in arrays], result)

    def emit(self, *values: Value, approximate: bool = False) -> list[Value]:
        """Emits PTX by which each thread applies the function to float32 scalars of its own.

        Returns the results. If `approximate`, exp and logistic take fewer instructions; exp(x) has
        a relative error of about 2^-22 + |x| * 2^-24.
        """
        return _emit(self._jaxpr.jaxpr, values, _APPROXIMATE if approximate else _EMIT)


def _instruction(name: str, operands: int) -> Callable[..., Value]:
    """Returns a function that emits the PTX instruction `name` on `operands` float32 numbers."""
    text = ", ".join([f"${i}" for i in range(operands + 1)])

    # An equation's parameters are passed, too.
    def emit(*values: Value, **_: Any) -> Value:
        return _ptx(f"{name} {text};", *values)

    return emit


def _ptx(text: str, *values: Value) -> Value:
    constraints = ",".join(["=f", *["f"] * len(values)])
    return mosaic.asm(text, constraints, *values, returns=mosaic.float_type())


_add = _instruction("add.rn.f32", 2)
_sub = _instruction("sub.rn.f32", 2)
_mul = _instruction("mul.rn.f32", 2)
_max = _instruction("max.NaN.f32", 2)
_min = _instruction("min.NaN.f32", 2)
_neg = _instruction("neg.f32", 1)
_abs = _instruction("abs.f32", 1)
_fma = _instruction("fma.rn.f32", 3)
# Comparisons give 1 or 0, as float32.
_compare = {name: _instruction(f"set.{name}.f32.f32", 2) for name in ("eq", "ge", "gt", "le", "lt")}
_quotient = _instruction("div.full.f32", 2)


def _exp(x: Value) -> Value:
    # The instructions of NVIDIA's libdevice: x / ln 2 is split into an integer, clamped to
    # float32's exponents, and a rest f. The result is 2^f * 2^integer. As floats of about 3 * 2^22
    # have no fraction, adding 0f4B400001 = 3 * 2^22 + 1 rounds, and leaves the integer's biased
    # exponent in the low bits of j. 0f3FB8AA3B and 0f32A57060 are the high and the low part of
    # 1 / ln 2, 0f3BBB989D is 1 / (252 ln 2), 0f437C0000 is 252, 0fCB40007F is -(3 * 2^22 + 127).
    return _ptx(
        "{ .reg .f32 t, j, k, f; .reg .b32 s;"
        " fma.rn.f32 t, $1, 0f3BBB989D, 0f3F000000;"
        " cvt.sat.f32.f32 t, t;"
        " mov.f32 k, 0f437C0000;"
        " mov.f32 f, 0f4B400001;"
        " fma.rm.f32 j, t, k, f;"
        " add.rn.f32 k, j, 0fCB40007F;"
        " neg.f32 k, k;"
        " fma.rn.f32 f, $1, 0f3FB8AA3B, k;"
        " fma.rn.f32 f, $1, 0f32A57060, f;"
        " mov.b32 s, j;"
        " shl.b32 s, s, 23;"
        " mov.b32 k, s;"
        " ex2.approx.ftz.f32 f, f;"
        " mul.rn.f32 $0, f, k; }",
        x,
    )


def _logistic(x: Value) -> Value:
    # 1 / d by rcp.approx, for d = exp(-x) + 1. ptxas emits seven instructions for it, since the
    # result is subnormal for d above 2^126. That of d / 4 never is, and has the same bits.
    # 0f3E800000 is 1 / 4.
    return _ptx(
        "{ .reg .f32 r;"
        " fma.rn.f32 r, $1, 0f3E800000, 0f3E800000;"
        " rcp.approx.ftz.f32 r, r;"
        " mul.rn.f32 $0, r, 0f3E800000; }",
        _exp(_neg(x)),
    )


def _tanh(x: Value) -> Value:
    """Emits tanh(x), by the same operations as XLA."""

    # A tiny x is the result. Else x is clamped to where tanh does not round to 1 or -1, and the
    # result is an odd polynomial of x divided by an even one. Their coefficients are given as bits,
    # from the highest power on.
    def constant(bits: int) -> Value:
        return mosaic.f32(float(np.uint32(bits).view(np.float32)))

    def polynomial(square: Value, first: int, *rest: int) -> Value:
        total = constant(first)
        for bits in rest:
            total = _fma(square, total, constant(bits))
        return total

    clamped = _ptx(
        "{ .reg .pred p; .reg .f32 t;"
        " setp.ge.f32 p, $1, 0f40FFF644;"
        " selp.f32 t, 0f40FFF644, $1, p;"
        " setp.le.f32 p, t, 0fC0FFF644;"
        " selp.f32 $0, 0fC0FFF644, t, p; }",
        x,
    )
    square = _mul(clamped, clamped)
    odd = (0xA59F25C0, 0x2A61337E, 0xAEBD37FF, 0x335C0041, 0x3779434A, 0x3A270DED, 0x3BA059DC)
    even = (0x35A0D3D8, 0x38F895D6, 0x3B14AA05, 0x3BA059DD)
    ratio = _quotient(_mul(clamped, polynomial(square, *odd)), polynomial(square, *even))
    return _ptx(
        "{ .reg .pred p; .reg .f32 t;"
        " abs.f32 t, $1;"
        " setp.lt.f32 p, t, 0f39D1B717;"
        " selp.f32 $0, $2, $3, p; }",
        x,
        clamped,
        ratio,
    )


def _power(x: Value, *, y: int) -> Value:
    # `_check` refuses a y that is not 2 or 3.
    square = _mul(x, x)
    return square if y == 2 else _mul(square, x)


def _select(condition: Value, if_false: Value, if_true: Value, **_: Any) -> Value:
    # `condition` is 1 or 0, as float32.
    text = "{ .reg .pred p; setp.ne.f32 p, $1, 0f00000000; selp.f32 $0, $3, $2, p; }"
    return _ptx(text, condition, if_false, if_true)


def _same(x: Value, **_: Any) -> Value:
    return x


# Emits a JAX primitive, given the operands of an equation and its parameters by keyword.
_EMIT: dict[str, Callable[..., Value]] = {
    "add": _add,
    "add_any": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _quotient,
    "neg": _neg,
    "max": _max,
    "min": _min,
    "abs": _abs,
    "exp": lambda x, **_: _exp(x),
    "logistic": lambda x, **_: _logistic(x),
    "tanh": lambda x, **_: _tanh(x),
    "one_minus_square": lambda x, **_: _sub(mosaic.f32(1.0), _mul(x, x)),
    "square": lambda x, **_: _mul(x, x),
    "integer_pow": _power,
    **_compare,
    "select_n": _select,
    "clamp": lambda low, x, high, **_: _min(_max(x, low), high),
    "convert_element_type": _same,
    "copy": _same,
    # JAX sums a gradient over the axes along which the operand was broadcast. A scalar has no axes,
    # so its sum is the scalar itself.
    "reduce_sum": _same,
}


def _fast_exp(x: Value, **_: Any) -> Value:
    return _ptx("ex2.approx.ftz.f32 $0, $1;", _mul(x, mosaic.f32(1 / math.log(2))))


def _fast_logistic(x: Value, **_: Any) -> Value:
    power = _ptx("ex2.approx.ftz.f32 $0, $1;", _mul(x, mosaic.f32(-1 / math.log(2))))
    return _ptx("rcp.approx.ftz.f32 $0, $1;", _add(power, mosaic.f32(1.0)))


_APPROXIMATE = _EMIT | {"exp": _fast_exp, "logistic": _fast_logistic}


def _inner(equation: Any) -> Any:
    """Returns the closed jaxpr that an equation calls, if it captures no arrays; else None."""
    if equation.primitive.name not in ("jit", "pjit", "closed_call", "custom_jvp_call"):
        return None
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return inner if inner is not None and not inner.consts else None


def _check(jaxpr: Any) -> None:
    """Raises NotSupported if the jaxpr has an equation that `_emit` cannot emit."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inner = _inner(equation)
        if inner is not None:
            _check(inner.jaxpr)
            continue
        if name not in _EMIT:
            raise NotSupported(f"it uses {name}")
        if name == "integer_pow" and equation.params["y"] not in (2, 3):
            raise NotSupported(f"it uses the power {equation.params['y']}")
        if equation.params.get("accuracy") is not None:
            raise NotSupported(f"it asks for the accuracy of {name}")
        # Booleans come from comparisons, and int32 numbers are literals; both are held as float32.
        dtypes = [jnp.float32]
        if name in ("convert_element_type", "select_n", *_compare):
            dtypes.append(jnp.bool_)
        if name == "convert_element_type":
            dtypes.append(jnp.int32)
        for variable in (*equation.invars, *equation.outvars):
            if variable.aval.shape or variable.aval.dtype not in dtypes:
                raise NotSupported(f"{name} has an operand or a result of {variable.aval}")


def _emit(
    jaxpr: Any, arguments: Sequence[Value], instructions: dict[str, Any] = _EMIT
) -> list[Value]:
    """Emits the equations of a jaxpr of scalars; returns the values of its results."""
    known = dict(zip(jaxpr.invars, arguments, strict=True))

    def read(variable: Any) -> Value:
        # Only literals have an attribute `val`.
        if hasattr(variable, "val"):
            return mosaic.f32(float(variable.val))
        return known[variable]

    for equation in jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        inner = _inner(equation)
        if inner is not None:
            results = _emit(inner.jaxpr, operands, instructions)
        else:
            results = [instructions[equation.primitive.name](*operands, **equation.params)]
        known.update(zip(equation.outvars, results, strict=True))
    return [read(variable) for variable in jaxpr.outvars]
