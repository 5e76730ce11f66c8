"""Loads windows of routes, and sorts their entries into lists.

A window is the part of a flat array of words that a block holds in shared memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.exchange.plan import Window
from pallas_kernels.fabric import fabric as fb


def open_window(
    fabric: fb.Fabric,
    window: Window,
    entry: jax.Array,
    *held: tuple[Any, Iterable[tuple[Any, ...]]],
) -> jax.Array:
    """Loads a window of words into shared memory, by one warpgroup.

    Args:
      fabric: how ranks reach each other.
      window: how many entries the window has.
      entry: the first entry that the warpgroup needs.
      *held: pairs of a buffer [n, window.width] in shared memory and its n sources. A source is a
        tuple: the buffer's row, the array [..., window.total] of any rank that is loaded into it,
        and the indices of that array's leading dimensions.

    Returns:
      The index, in the arrays, of the window's first entry.
    """
    start = window.start(entry)
    entries = pl.ds(start, window.width)
    loaded = [
        [(row, ref.at[(*place, entries)][...]) for row, ref, *place in sources]
        for _, sources in held
    ]
    fabric.barrier()  # threads may still read the previous window
    for of_buffers in zip(*loaded, strict=True):
        for (buffer, _), (row, value) in zip(held, of_buffers, strict=True):
            buffer[row] = value
    fabric.barrier()
    return start


def places_in_list(kept: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the places of entries in a list that begins with the kept entries, in order.

    Args:
      kept: whether each entry is kept, scalar bools.

    Returns:
      How many entries are kept, and the place of each entry; all others come after the kept ones.
    """
    numbers = [one.astype(jnp.int32) for one in kept]
    count = sum(numbers, jnp.int32(0))
    places, before, behind = [], jnp.int32(0), count
    for one, number in zip(kept, numbers, strict=True):
        places.append(jnp.where(one, before, behind))
        before, behind = before + number, behind + (1 - number)
    return count, places
