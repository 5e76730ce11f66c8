"""Compares the results of two programs, for --check."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.formats import QuantizedArray


def agree(got: Any, wanted: Any, tolerance: float, exceptions: float = 0.0) -> None:
    """Raises AssertionError unless two pytrees of arrays agree.

    Integers must be equal. Two rows of floats (along the last axis) differ if the norm of their
    difference is more than `tolerance` times the sum of the expected row's norm and the root mean
    square of all expected rows' norms. The share `exceptions` of an array's rows may differ.
    """
    is_leaf = lambda leaf: isinstance(leaf, QuantizedArray)  # noqa: E731
    found, structure = jax.tree_util.tree_flatten_with_path(got, is_leaf)
    expected = jax.tree.leaves(wanted, is_leaf)
    assert str(structure) == str(jax.tree.structure(wanted, is_leaf)), "not the same arrays"
    for (path, array), right in zip(found, expected, strict=True):
        name = jax.tree_util.keystr(path)
        array, right = (
            each.dequantize(jnp.float32) if is_leaf(each) else each for each in (array, right)
        )
        assert array.shape == right.shape, f"{name}: shape {array.shape}, not {right.shape}"
        if not jnp.issubdtype(array.dtype, jnp.inexact):
            assert np.array_equal(array, right), f"{name}: {array} is not {right}"
        elif array.size:
            count, worst = (float(number) for number in _differing_rows(array, right, tolerance))
            rows = array.size // array.shape[-1]
            assert count <= exceptions * rows, (
                f"{name}: {count:.0f} of {rows} rows differ, by up to {worst:.3g} of a row's norm "
                f"(tolerance {tolerance:.3g})"
            )


@jax.jit
def _differing_rows(
    got: jax.Array, wanted: jax.Array, tolerance: float
) -> tuple[jax.Array, jax.Array]:
    """Returns how many rows differ by more than `tolerance`, and the largest difference."""
    got, wanted = got.astype(jnp.float32), wanted.astype(jnp.float32)
    error = jnp.linalg.norm(got - wanted, axis=-1)
    size = jnp.linalg.norm(wanted, axis=-1)
    relative = error / jnp.maximum(size + jnp.sqrt(jnp.mean(size**2)), 1e-30)
    # Written as ~(... <= ...), the comparison also counts rows with NaN as different.
    return jnp.sum(~(relative <= tolerance)), jnp.max(relative)
