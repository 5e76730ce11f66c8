"""Traces functions that users give a layer, so that they can be compared by what they compute.

JAX caches compiled programs by static arguments, such as functions. The identity of a function does
not show what it computes, because a value that it reads besides its arguments, such as an attribute
of a bound method, may change between two calls. So `Traced` compares jaxprs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.runtime import jax_compat

# A function that reads a constant of more bytes than this equals only itself, to avoid comparing
# large arrays. Other functions are equal if their jaxprs, including constants, are.
_MOST_BYTES = 1 << 16


class Traced:
    """A function that is compared by the jaxprs of its value and its gradient; it is hashable.

    The function is traced when the object is made. `run_as` stores a jaxpr for given argument
    types. A call with these types evaluates the stored jaxpr, in which values that the function
    reads besides its arguments are constants. A call with other types calls the function itself.

    Args:
        function: the function; its arguments are arrays, None, and pytrees of them.
        samples: lists of argument types. The function is traced for each list, and two `Traced` are
            equal if all of these traces are.
    """

    def __init__(self, function: Callable[..., Any], samples: Iterable[Sequence[Any]]):
        self._function = function
        self._traces: dict[Any, Callable[..., Any]] = {}
        self.key: Any = None
        try:
            self.key = tuple(_trace_key(_with_gradient(function), types) for types in samples)
        # If the function cannot be traced, `key` stays None, and the function equals only itself.
        except Exception:
            pass

    def run_as(self, *types: Any) -> None:
        """Traces the function for arguments of `types`, and stores the jaxpr for later calls.

        The function must return one array. It is also traced for arguments that do not vary over
        mesh axes (vma), which are those of a primitive while it is lowered.
        """
        self._trace(types)
        if any(map(jax_compat.varying_axes, types)):
            self._trace([jax_compat.without_varying(kind) for kind in types])

    def _trace(self, types: Sequence[Any]) -> None:
        jaxpr, _ = trace(self._function, types)
        if (run := jax_compat.function_of_jaxpr(jaxpr)) is not None:
            self._traces[_types_key(jaxpr.in_avals)] = lambda *arrays: run(*arrays)[0]

    def __call__(self, *arrays: Any) -> Any:
        if self._traces:
            run = self._traces.get(_types_key(map(jax.typeof, arrays)))
            if run is not None:
                return run(*arrays)
        return self._function(*arrays)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Traced) and self.key is not None and self.key == other.key

    def __hash__(self) -> int:
        return id(self) if self.key is None else hash(self.key)

    def __repr__(self) -> str:
        return f"Traced({getattr(self._function, '__name__', self._function)})"


def _types_key(types: Iterable[Any]) -> Any:
    return tuple((t.shape, t.dtype, jax_compat.varying_axes(t), t.sharding) for t in types)


def trace(function: Callable[..., Any], types: Sequence[Any]) -> Any:
    """Traces a function for arguments of `types`, without JAX's cache of traces.

    Returns the closed jaxpr and the type of the function's result.
    """
    # JAX caches traces by the identity of the function. Each call makes a new lambda, which is not
    # in the cache.
    return jax.make_jaxpr(lambda *arrays: function(*arrays), return_shape=True)(*types)


def _with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes the value of `function` and its gradient.

    If `function` has a custom gradient, a trace of the returned function thus includes it.
    """

    def both(*arrays: Any) -> Any:
        out, vjp = jax.vjp(function, *arrays)
        return out, vjp(jax.tree.map(_cotangent, out))

    return both


def _cotangent(x: jax.Array) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.ones_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def _trace_key(function: Callable[..., Any], types: Sequence[Any]) -> Any:
    """Returns a hashable key of a function's trace for arguments of `types`.

    Functions with equal keys return the same values, in the same structure.
    """
    jaxpr, result = trace(function, types)
    return _jaxpr_key(jaxpr), jax.tree.structure(result)


def _jaxpr_key(jaxpr: Any) -> Any:
    """Returns a hashable key of a jaxpr: its constants, and its equations.

    Variables are numbered in the order of their first use, so that names do not matter.
    """
    consts = tuple(map(_value_key, getattr(jaxpr, "consts", ())))
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    numbers: dict[Any, int] = {}

    def atom(a: Any) -> Any:
        kind = str(jax_compat.type_of_atom(a))
        if hasattr(a, "val"):
            return kind, _value_key(a.val)
        return kind, numbers.setdefault(a, len(numbers))

    def equation(e: Any) -> Any:
        # The parameters of custom_jvp_call and custom_vjp_call include functions, the derivative
        # rules, which would never compare equal. So the key leaves these functions out. What they
        # compute is in the key nevertheless, since the trace includes the gradient.
        rules = e.primitive.name in ("custom_jvp_call", "custom_vjp_call")
        params = tuple(
            (name, _value_key(value))
            for name, value in sorted(e.params.items())
            if hasattr(value, "eqns") or not rules
        )
        return e.primitive, params, tuple(map(atom, e.invars)), tuple(map(atom, e.outvars))

    inputs = tuple(map(atom, (*jaxpr.constvars, *jaxpr.invars)))
    return consts, inputs, tuple(map(equation, jaxpr.eqns)), tuple(map(atom, jaxpr.outvars))


def _value_key(value: Any) -> Any:
    """Returns a hashable key of a value in a jaxpr: a constant, or a parameter of an equation.

    Raises ValueError for an array that is large or that the caller may change, and TypeError for
    other values that are not hashable.
    """
    if hasattr(value, "eqns"):
        return _jaxpr_key(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_value_key, value))
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        # In Python, 1, 1.0 and True are equal, so the key includes the type to tell them apart.
        return type(value), repr(value)
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        if getattr(value, "nbytes", _MOST_BYTES + 1) > _MOST_BYTES:
            raise ValueError("a large constant")
        array = np.asarray(value)
        if array.shape and array.flags.writeable:
            raise ValueError("a constant that programs share with a caller who may change it")
        return str(array.dtype), array.shape, array.tobytes()
    hash(value)
    return value
