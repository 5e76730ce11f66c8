"""Functions that users give a layer, traced when the layer is called.

JAX, and the library's primitives, keep programs by what they are given. A function's identity does
not say what it computes: what it reads besides its arguments, such as an attribute of a bound
method or an element of a list, may have changed since. `Traced` is compared by the traces instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.runtime import jax_compat

_MOST_BYTES = 1 << 16  # of a constant that is compared


class Traced:
    """A function as it computes now. It equals another of equal traces, gradients included.

    A call with arrays of a type that `run_as` traced evaluates that trace, so that what the
    function reads is read once, however late the call comes. Other calls call the function.

    Args:
        function: the function, of arrays, None, and pytrees of them.
        samples: lists of arguments' types to trace; functions with equal traces are equal.
    """

    def __init__(self, function: Callable[..., Any], samples: Iterable[Sequence[Any]]):
        self._function = function
        self._traces: dict[Any, Callable[..., Any]] = {}
        self.key: Any = None
        try:
            self.key = tuple(_trace_key(_with_gradient(function), types) for types in samples)
        except Exception:  # it cannot be traced so, and equals no other
            pass

    def run_as(self, *types: Any) -> None:
        """Traces the function, which returns one array, for calls with arrays of these types."""
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
    """Returns the closed jaxpr of a function as it computes now, and the type of its result."""
    # JAX keeps traces by the function that it is given: a new one is traced anew.
    return jax.make_jaxpr(lambda *arrays: function(*arrays), return_shape=True)(*types)


def _with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of the same arguments whose trace has the rules of custom gradients."""

    def both(*arrays: Any) -> Any:
        out, vjp = jax.vjp(function, *arrays)
        return out, vjp(jax.tree.map(_cotangent, out))

    return both


def _cotangent(x: jax.Array) -> Any:
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.ones_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)


def _trace_key(function: Callable[..., Any], types: Sequence[Any]) -> Any:
    """Returns a hashable key; functions with equal keys compute the same for these types."""
    jaxpr, result = trace(function, types)
    return _jaxpr_key(jaxpr), jax.tree.structure(result)


def _jaxpr_key(jaxpr: Any) -> Any:
    """Returns a hashable key of a jaxpr: its equations, the variables by number, the constants."""
    consts = tuple(map(_value_key, getattr(jaxpr, "consts", ())))
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    numbers: dict[Any, int] = {}

    def atom(a: Any) -> Any:
        kind = str(jax_compat.type_of_atom(a))
        if hasattr(a, "val"):
            return kind, _value_key(a.val)
        return kind, numbers.setdefault(a, len(numbers))

    def equation(e: Any) -> Any:
        # What rules of custom gradients compute is in the trace of the gradient.
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
    """Returns a hashable key of a constant, or of a parameter of an equation."""
    if hasattr(value, "eqns"):
        return _jaxpr_key(value)
    if isinstance(value, tuple | list):
        return type(value), tuple(map(_value_key, value))
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return type(value), repr(value)  # 1, 1.0 and True are equal
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        if getattr(value, "nbytes", _MOST_BYTES + 1) > _MOST_BYTES:
            raise ValueError("a large constant")
        array = np.asarray(value)
        if array.shape and array.flags.writeable:
            raise ValueError("a constant that programs share with a caller who may change it")
        return str(array.dtype), array.shape, array.tobytes()
    hash(value)
    return value
