"""Checks that a function that users give as an activation or a gating is elementwise.

The function is traced for arrays of one shape. It is not elementwise if it has an operation that
combines elements along an axis of that shape, as softmax does. Operations along another axis, such
as that of a stack of two branches, are allowed, as are all operations on constants, and those of
which the result does not depend.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jax_ep.runtime import jax_compat

# Operations along an axis that `axes` of the parameters, or another parameter, names.
_ALONG = {
    "argmax": "axes",
    "argmin": "axes",
    **dict.fromkeys(("cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp"), "axis"),
    "concatenate": "dimension",
    "rev": "dimensions",
    "sort": "dimension",
}
_ALONG |= {f"reduce_{name}": "axes" for name in ("sum", "max", "min", "prod", "and", "or", "xor")}
# An axis of at most so many elements may be one of branches that a function stacks. So operations
# along axes as short as this are allowed.
_MOST_BRANCHES = 8
# Operations that combine elements whatever their axes are.
_ALWAYS = {"conv_general_dilated", "fft", "reduce", "top_k"}


def mixing_operation(jaxpr: Any, shape: Sequence[Any]) -> str | None:
    """Returns the name of an operation that combines elements of an argument, or None.

    Args:
      jaxpr: the jaxpr of the function, whose arguments all have the shape `shape`.
      shape: the shape of the function's arguments and of its result.
    """
    jaxpr = _open(jaxpr)
    sizes = frozenset(n for n in shape if not isinstance(n, int) or n > _MOST_BRANCHES)
    try:
        _follow(jaxpr, [True] * len(jaxpr.invars), sizes)
    except _Mixes as found:
        return str(found)
    return None


class _Mixes(Exception):
    """An operation combines elements; the message is its name."""


def _follow(jaxpr: Any, depends: Sequence[bool], sizes: frozenset[Any]) -> list[bool]:
    """Returns for each result of a jaxpr whether it depends on an argument of the function.

    `depends` says so for each input. `sizes` are those of the argument's axes. Raises `_Mixes`
    if an operation combines elements along an axis of such a size.
    """
    dependent = {v for v, each in zip(jaxpr.invars, depends, strict=True) if each}
    for equation in _needed(jaxpr):
        own = _are_in(dependent, equation.invars)
        if any(own):
            results = _results(equation, own, sizes)
            dependent.update(v for v, each in zip(equation.outvars, results, strict=True) if each)
    return _are_in(dependent, jaxpr.outvars)


def _needed(jaxpr: Any) -> list[Any]:
    """Returns the equations of a jaxpr on which its results depend, in order."""
    needed, kept = set(filter(_is_variable, jaxpr.outvars)), []
    for equation in reversed(jaxpr.eqns):
        if any(_are_in(needed, equation.outvars)):
            kept.append(equation)
            needed.update(filter(_is_variable, equation.invars))
    return kept[::-1]


def _check(equation: Any, depends: list[bool], sizes: frozenset[Any]) -> None:
    """Raises `_Mixes` if an operation itself, not a function that it calls, combines elements."""
    name, params, shape = equation.primitive.name, equation.params, _shape(equation.invars[0])
    axes: Iterable[int] = ()
    if name in _ALONG:
        axes = params[_ALONG[name]]
        axes = axes if isinstance(axes, Iterable) else (axes,)
    elif name == "dot_general":
        axes = params["dimension_numbers"][0][0]
    elif name == "slice":
        axes = [i for i, n in enumerate(_shape(equation.outvars[0])) if n != shape[i]]
    elif name in ("gather", "dynamic_slice"):
        # A table of constants may be looked up by the elements of an argument.
        axes = range(len(shape)) if depends[0] else ()
    elif name in _ALWAYS or name.startswith(("reduce_window", "scatter")):
        raise _Mixes(name)
    if any(shape[axis] in sizes for axis in axes):
        raise _Mixes(name)


def _results(equation: Any, depends: list[bool], sizes: frozenset[Any]) -> list[bool]:
    """Returns for each result of an equation whether it depends on an argument of the function."""
    name, params = equation.primitive.name, equation.params
    _check(equation, depends, sizes)
    if name == "cond":
        if depends[0]:
            raise _Mixes(name)
        all_results = [_follow(_open(b), depends[1:], sizes) for b in params["branches"]]
        return [any(each) for each in zip(*all_results, strict=True)]
    if name == "while":
        of_cond, of_body = params["cond_nconsts"], params["body_nconsts"]
        consts, carry = depends[of_cond : of_cond + of_body], depends[of_cond + of_body :]
        carry = _loop(_open(params["body_jaxpr"]), consts, carry, sizes)
        if _follow(_open(params["cond_jaxpr"]), [*depends[:of_cond], *carry], sizes)[0]:
            raise _Mixes(name)
        return carry
    if name == "scan":
        body = _open(params["jaxpr"])
        for operand, inner, each in zip(equation.invars, body.invars, depends, strict=True):
            whole = _shape(operand)
            is_scanned = len(whole) > len(_shape(inner))
            if each and is_scanned and whole[0] in sizes:
                raise _Mixes(name)
        # Which inputs are results of the turn before, only JAX knows: any may depend.
        _follow(body, [True] * len(body.invars), sizes)
        return [True] * len(equation.outvars)
    for inner in params.values():
        called = _open(inner)
        if hasattr(called, "eqns") and len(called.invars) == len(depends):
            return _follow(called, depends, sizes)
    return [True] * len(equation.outvars)


def _loop(body: Any, consts: list[bool], carry: list[bool], sizes: frozenset[Any]) -> list[bool]:
    """Returns which parts of a loop's carry depend on an argument after any number of turns.

    `consts` and `carry` say so for the inputs of the first turn.
    """
    while True:
        results = _follow(body, [*consts, *carry], sizes)
        after = [a or b for a, b in zip(carry, results, strict=True)]
        if after == carry:
            return carry
        carry = after


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _shape(atom: Any) -> tuple[Any, ...]:
    """Returns the shape of a variable or a literal of a jaxpr; () for what is no array."""
    return tuple(getattr(jax_compat.type_of_atom(atom), "shape", ()))


def _is_variable(atom: Any) -> bool:
    """Returns whether an input or output of an equation is a variable, and not a literal."""
    return not hasattr(atom, "val")


def _are_in(variables: set[Any], atoms: Sequence[Any]) -> list[bool]:
    return [_is_variable(atom) and atom in variables for atom in atoms]
