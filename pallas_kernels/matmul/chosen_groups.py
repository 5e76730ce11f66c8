"""Lets a grouped matmul of few rows multiply all of them by the matrix of each chosen group.

A grouped matmul usually needs its rows sorted by group, and sorting takes several small kernels.
With few rows, a matmul takes the time to read the matrices, and it costs no time to multiply more
rows by a matrix. So each chosen group multiplies all rows, and a row later uses only the products
with the matrices that it chose. In this example, 3 tokens choose the groups (a, c), (c, d) and
(a, d). The rows, and each letter of the output, are a tile of 8 rows, of which the first 3 belong
to the tokens:

  choices [T, K]        chosen groups      rows [8, K]   matrices      output [S * 8, N]
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

    Attributes:
      table: [S + 1, 4] int32, the table of row tiles as `row_tiles.row_tiles` returns it, with room
        for S tiles. Tile i is rows i * height to (i + 1) * height - 1 of a matmul's output.
      height: the number of rows of a tile: T, rounded up to a multiple of 8.
    """

    table: Any
    height: int


def chosen_groups(choices: jax.Array, num_groups: int) -> tuple[ChosenGroups, jax.Array]:
    """Returns the groups that rows chose, and which output row has the product for each choice.

    Args:
      choices: [T, K] int32, the groups that each of T rows chose. A number outside of [0, L)
        chooses no group.
      num_groups: L, the number of groups.

    Returns:
      groups: the chosen groups, for a grouped matmul.
      rows: [T, K] int32: for each choice of a row, the number of the output row that has the row's
        product with the chosen group's matrix; -1 for a choice of no group.
    """
    num_rows, num_choices = choices.shape
    height = -(-num_rows // ROW_ALIGNMENT) * ROW_ALIGNMENT
    exists = (choices >= 0) & (choices < num_groups)
    if num_rows == 1:
        # Each choice of the only row gets a tile of its own, which saves the launches that would
        # find equal choices. The tile of a choice of no group has no rows to store.
        groups = jnp.where(exists, choices, 0)[0]
        index = jnp.arange(num_choices, dtype=jnp.int32)[None]
        used, count = exists[0].astype(jnp.int32), jnp.int32(num_choices)
    else:
        # Tile i belongs to the i-th of the chosen groups, in the order of their indices.
        most = min(choices.size, num_groups)
        every_group = jnp.arange(num_groups, dtype=jnp.int32)
        is_chosen = jnp.any(choices.reshape(-1) == every_group[:, None], axis=1)
        ends = jnp.cumsum(is_chosen, dtype=jnp.int32)
        tile = jnp.arange(most, dtype=jnp.int32)
        groups = jnp.sum(ends <= tile[:, None], axis=1, dtype=jnp.int32)
        groups = jnp.minimum(groups, num_groups - 1)
        index = ends.at[choices].get(mode="fill", fill_value=0, wrap_negative_indices=False) - 1
        used, count = jnp.int32(num_rows), ends[-1]
    first = jnp.arange(groups.shape[0], dtype=jnp.int32) * height
    columns = jnp.broadcast_arrays(groups, first, first, first + used)
    total = jnp.full(4, count * height).at[0].set(count)
    table = jnp.concatenate([jnp.stack(columns, axis=1), total[None]])
    of_token = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    rows = jnp.where(exists, index * height + of_token, -1)
    return ChosenGroups(table, height), rows


def of_gathered(groups: ChosenGroups) -> tuple[jax.Array, ChosenGroups]:
    """Returns the chosen groups' indices, and the same groups for matrices gathered by them.

    The indices are [S] int32, one for each tile; past the last tile they are those of any groups.
    """
    indices, tiles = groups.table[:-1, 0], jnp.arange(len(groups.table), dtype=jnp.int32)
    first = tiles.at[-1].set(groups.table[-1, 0])
    table = jnp.concatenate([first[:, None], groups.table[:, 1:]], axis=1)
    return indices, ChosenGroups(table, groups.height)


def output_rows(groups: jax.Array | ChosenGroups, num_rows: int) -> int:
    """Returns the number of rows of a grouped matmul's output.

    It is `num_rows`, the number of rows of the left operand, if `groups` are group sizes [L]. It is
    S * height for chosen groups.
    """
    if isinstance(groups, ChosenGroups):
        return (groups.table.shape[0] - 1) * groups.height
    return num_rows
