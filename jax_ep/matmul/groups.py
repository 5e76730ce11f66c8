"""Says to which groups the rows of a grouped matmul belong."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.chosen_groups import ChosenGroups

# How rows belong to groups: the number of rows of each group, [L] int32, in order; or the groups
# that a few rows chose. Gradients of matrices support only the former.
Groups = jax.Array | ChosenGroups


def split_groups(groups: Groups) -> tuple[jax.Array, int | None]:
    """Splits groups into an array, an operand of a primitive, and a static parameter.

    The array is [L], or the table [S + 1, 4] of chosen groups. The parameter is the height of the
    chosen groups, or None.
    """
    if isinstance(groups, ChosenGroups):
        return groups.table, groups.height
    return groups, None


def joined_groups(array: Any, height: int | None) -> Any:
    """Undoes `split_groups`: returns the groups. `array` may also be the type of the array."""
    return array if height is None else ChosenGroups(array, height)


def group_of_row(groups: Groups, num_rows: int) -> jax.Array:
    """Returns the index of each row's group, [R] int32; L for rows past the last of L groups.

    `num_rows` is R, the number of rows of a matmul's left operand. For chosen groups the result is
    [S * height], and the tiles past the last chosen group have the index of any group.
    """
    if isinstance(groups, ChosenGroups):
        of_tiles = groups.table[:-1, :1]
        return jnp.broadcast_to(of_tiles, (len(of_tiles), groups.height)).reshape(-1)
    ends = jnp.cumsum(groups, dtype=jnp.int32)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    return jnp.sum(rows[:, None] >= ends[None], axis=1, dtype=jnp.int32)
