"""Loads routing data into shared memory, a slice at a time, and compacts lists of rows.

Routing data is a flat array with an entry for each of a token's top-k choices, such as the row of
the choice. A window is the slice of it that a thread block holds in shared memory at a time.
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
    """Loads the same slice of several arrays into shared memory, by the calling warpgroup.

    Args:
      fabric: how ranks reach each other.
      window: the length of the slice and of the arrays.
      entry: the index of the first entry that the caller needs.
      *held: pairs (buffer, sources). The buffer is [n, window.width] in shared memory and has n
        sources. A source is a tuple of the index of a row of the buffer, the array [...,
        window.total] in any rank's global memory to load the row from, and the indices of this
        array's leading dimensions.

    Returns:
      The index in the arrays of the slice's first entry, `entry` or less, a scalar int32.
    """
    start = window.start(entry)
    entries = pl.ds(start, window.width)
    loaded = [
        [(row, ref.at[(*place, entries)][...]) for row, ref, *place in sources]
        for _, sources in held
    ]
    # Other threads of the warpgroup may still read the previous window, which is overwritten next.
    fabric.barrier()
    for of_buffers in zip(*loaded, strict=True):
        for (buffer, _), (row, value) in zip(held, of_buffers, strict=True):
            buffer[row] = value
    fabric.barrier()
    return start


def places_in_list(kept: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """Computes the positions of a stable partition that moves the kept entries to the front.

    Args:
      kept: a scalar bool for each entry, true if the entry is kept.

    Returns:
      The number of kept entries, a scalar int32, and the new position of each entry, a list of
      scalar int32. Entries that are not kept follow the kept ones.
    """
    numbers = [one.astype(jnp.int32) for one in kept]
    count = sum(numbers, jnp.int32(0))
    places, before, behind = [], jnp.int32(0), count
    for one, number in zip(kept, numbers, strict=True):
        places.append(jnp.where(one, before, behind))
        before, behind = before + number, behind + (1 - number)
    return count, places
