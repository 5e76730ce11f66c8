"""Lets a grouped matmul of few rows multiply all of them by the matrix of each chosen group.

Sorting rows by group takes several small kernels. With few rows, a matmul takes the time to read
the matrices, and it costs no time to multiply more rows by a matrix. So each chosen group
multiplies all rows, and a row later uses only the products with the matrices that it chose. Here 3
tokens choose the groups (a, c), (c, d) and (a, d). The rows, and each letter of the output, are a
tile of 8 rows, of which the first 3 belong to the tokens:

  choices [T, K]        chosen groups      rows [8, D]   matrices      output [S * 8, N]
  token 0    a  c       0   a                 x       *  of a     -->  a  token 0 uses row 0, ...
  token 1    c  d       1   c                 x       *  of c     -->  c  token 0 uses row 8, ...
  token 2    a  d       2   d                 x       *  of d     -->  d  token 1 uses row 17, ...

XLA computes the table of these tiles, in one launch for one token, and in three for several.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.fabric.hardware import ROW_ALIGNMENT


@functools.partial(jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=["height"])
@dataclasses.dataclass(frozen=True)
class ChosenGroups:
    """The groups that a few rows chose. Each of them has one row tile, which holds all T rows.

    If T is 1, each choice of the row has a tile instead, even if two choices are of one group.
    """

    # [S + 1, 4] int32, as `row_tiles.row_tiles` returns it, with room for S tiles. Tile i is rows
    # i * height to (i + 1) * height - 1 of a matmul's output.
    table: Any
    # T, rounded up to a multiple of 8.
    height: int


# How rows belong to groups: the number of rows of each group, [L] int32, in order; or the groups
# that a few rows chose. Gradients of matrices support only the former.
Groups = jax.Array | ChosenGroups


def chosen_groups(choices: jax.Array, num_groups: int) -> tuple[ChosenGroups, jax.Array]:
    """Returns the groups that rows chose, and which output row has the product for each choice.

    Args:
      choices: [T, K] int32, the groups that each of T rows chose; outside of [0, num_groups): none.

    Returns:
      The chosen groups, and the output row of each choice's product, [T, K] int32; -1 for none.
    """
    num_rows, num_choices = choices.shape
    height = -(-num_rows // ROW_ALIGNMENT) * ROW_ALIGNMENT
    exists = (choices >= 0) & (choices < num_groups)
    if num_rows == 1:
        # This saves launches that find equal choices. A choice of no group has a tile without rows.
        groups = jnp.where(exists, choices, 0)[0]
        tile_of_choice = jnp.arange(num_choices, dtype=jnp.int32)[None]
        rows_of_tile, num_tiles = exists[0].astype(jnp.int32), jnp.int32(num_choices)
    else:
        groups, tile_of_choice, num_tiles = _distinct_groups(choices, num_groups)
        rows_of_tile = jnp.int32(num_rows)
    first = jnp.arange(groups.shape[0], dtype=jnp.int32) * height
    # The columns GROUP, FIRST, BEGIN and END; then the last entry: numbers of tiles and of rows.
    columns = jnp.broadcast_arrays(groups, first, first, first + rows_of_tile)
    totals = jnp.full(4, num_tiles * height).at[0].set(num_tiles)
    table = jnp.concatenate([jnp.stack(columns, axis=1), totals[None]])
    row_in_tile = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    rows = jnp.where(exists, tile_of_choice * height + row_in_tile, -1)
    return ChosenGroups(table, height), rows


def _distinct_groups(choices: jax.Array, num_groups: int) -> tuple[jax.Array, ...]:
    """Returns each tile's group [S], each choice's tile [T, K], and the number of tiles []."""
    # Tile i belongs to the i-th chosen group, and tiles past the last to any. ends[g] is the number
    # of chosen groups among groups 0 to g.
    every_group = jnp.arange(num_groups, dtype=jnp.int32)
    is_chosen = jnp.any(choices.reshape(-1) == every_group[:, None], axis=1)
    ends = jnp.cumsum(is_chosen, dtype=jnp.int32)
    tile = jnp.arange(min(choices.size, num_groups), dtype=jnp.int32)
    groups = jnp.sum(ends <= tile[:, None], axis=1, dtype=jnp.int32)
    count = ends.at[choices].get(mode="fill", fill_value=0, wrap_negative_indices=False)
    return jnp.minimum(groups, num_groups - 1), count - 1, ends[-1]


def of_gathered(groups: ChosenGroups) -> tuple[jax.Array, ChosenGroups]:
    """Returns the chosen groups' indices [S], and the same groups for `matrices[indices]`.

    A caller that must dequantize matrices gathers them first, to dequantize only chosen ones.
    """
    # The gathered matrix of tile i has index i. The table's last entry has totals, which stay.
    indices = groups.table[:-1, 0]
    group_column = jnp.arange(len(groups.table), dtype=jnp.int32).at[-1].set(groups.table[-1, 0])
    table = jnp.concatenate([group_column[:, None], groups.table[:, 1:]], axis=1)
    return indices, ChosenGroups(table, groups.height)


def output_rows(groups: Groups, num_rows: int) -> int:
    """Returns how many rows a grouped matmul's output has: S * height for chosen groups, else R."""
    if isinstance(groups, ChosenGroups):
        return (groups.table.shape[0] - 1) * groups.height
    return num_rows


def group_of_row(groups: Groups, num_rows: int) -> jax.Array:
    """Returns the index of each row's group, [R] int32; L for rows past the last of L groups.

    For chosen groups the result is [S * height]; tiles past the last one have any group's index.
    """
    if isinstance(groups, ChosenGroups):
        tile_groups = groups.table[:-1, :1]
        return jnp.broadcast_to(tile_groups, (len(tile_groups), groups.height)).reshape(-1)
    ends = jnp.cumsum(groups, dtype=jnp.int32)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    return jnp.sum(rows[:, None] >= ends[None], axis=1, dtype=jnp.int32)
