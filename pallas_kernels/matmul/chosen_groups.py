"""Lets a grouped matmul multiply all of a few rows by the matrix of each group that a row chose.

A grouped matmul usually needs its rows in the order of their groups. With few rows, to put them in
this order takes several small kernels, but multiplying a row by another row's matrix takes no time:
the time to read the matrices decides. So each chosen group multiplies all rows, and a row later
uses only the products of its own choices. For 3 tokens that chose the groups (a, c), (c, d) and
(a, d), a letter stands for the 8 rows of a tile, of which the first 3 are the tokens':

  choices [T, K]        chosen groups      rows [8, K]   matrices      output [S * 8, N]
  token 0    a  c       0   a                 x       *  of a     -->  a  token 0 uses row 0, ...
  token 1    c  d       1   c                 x       *  of c     -->  c  token 0 uses row 8, ...
  token 2    a  d       2   d                 x       *  of d     -->  d  token 1 uses row 17, ...

XLA computes the tiles, in one launch for one token and in three for several.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

# The first row of a tile is a multiple of this number, the height of the tensor cores' tiles in
# shared memory.
ROW_ALIGNMENT = 8


@functools.partial(jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=["height"])
@dataclasses.dataclass(frozen=True)
class ChosenGroups:
    """The groups that a few rows chose; each of them has one row tile, of all rows.

    Attributes:
      table: [S + 1, 4] int32, in the form that `row_tiles` returns, for at most S chosen groups.
        Chosen group i has the rows from i * height on of a matmul's output.
      height: the number of rows of a tile: T rows, rounded up to a multiple of 8.
    """

    table: Any
    height: int


def chosen_groups(choices: jax.Array, num_groups: int) -> tuple[ChosenGroups, jax.Array]:
    """Returns the groups that rows chose, and the output row of each (row, choice) pair.

    Args:
      choices: [T, K] int32, the groups that each of T rows chose. A choice outside of [0, L) is of
        no group.
      num_groups: L, the number of groups.

    Returns:
      (groups, rows). `rows` is [T, K] int32: the row of a matmul's output that holds the product of
      a row and the matrix that it chose; -1 for a choice of no group.
    """
    num_rows, num_choices = choices.shape
    height = -(-num_rows // ROW_ALIGNMENT) * ROW_ALIGNMENT
    exists = (choices >= 0) & (choices < num_groups)
    if num_rows == 1:
        # Each choice of the only row gets a tile, so that no launch is needed to look for choices
        # of one group. The tile of a choice of no group has no rows to store.
        groups = jnp.where(exists, choices, 0)[0]
        index = jnp.arange(num_choices, dtype=jnp.int32)[None]
        used, count = exists[0].astype(jnp.int32), jnp.int32(num_choices)
    else:
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


def output_rows(groups: jax.Array | ChosenGroups, num_rows: int) -> int:
    """Returns the number of rows of a matmul's output, for R = `num_rows` rows of its left operand.

    It is R for group sizes [L], and S * height for chosen groups.
    """
    if isinstance(groups, ChosenGroups):
        return (groups.table.shape[0] - 1) * groups.height
    return num_rows
