"""Loads routing data into shared memory, a slice at a time, and moves valid entries to the front.

Routing data is a flat array [T·K] with an entry for each of the K choices of each token, such as
the receive-buffer row of the choice. A window is the slice of such an array that a thread block
holds in shared memory at a time. From a window, kernels list the valid entries of each token, such
as the rows that it has on one rank.
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
    """Loads the same slice of several arrays into buffers in shared memory.

    All threads of the calling warpgroup must call this function. The slice is taken on the arrays'
    last axis, and has `window.width` entries.

    Args:
      fabric: how ranks reach each other.
      window: the length of the slice, and of the last axis of the arrays.
      entry: the index on the last axis of the first entry that the caller needs.
      *held: pairs (buffer, sources). `buffer` is [n, window.width] in shared memory. `sources` has
        a tuple (i, array, *indices) for each row i of the buffer. `array` is [..., window.total] in
        any rank's global memory. Row i gets the slice of array[indices], a 1D array.

    Returns:
      The index of the slice's first entry on the last axis, a scalar int32. It is less than `entry`
      if a slice from `entry` on would pass the end of the arrays.
    """
    start = window.start(entry)
    entries = pl.ds(start, window.width)
    loaded = [
        [(row, ref.at[(*indices, entries)][...]) for row, ref, *indices in sources]
        for _, sources in held
    ]
    # Until this barrier, other threads of the warpgroup may still read the previous slice.
    fabric.barrier()
    for of_buffers in zip(*loaded, strict=True):
        for (buffer, _), (row, value) in zip(held, of_buffers, strict=True):
            buffer[row] = value
    fabric.barrier()
    return start


def places_in_list(kept: Sequence[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """Computes where each entry of a list goes if the kept entries are moved to the front.

    The kept entries stay in order. The other entries follow them, in order, too.

    Args:
      kept: a scalar bool for each entry of the list, true if the entry is kept.

    Returns:
      count: the number of kept entries, a scalar int32.
      places: the new position of each entry, a list of scalar int32.
    """
    numbers = [one.astype(jnp.int32) for one in kept]
    count = sum(numbers, jnp.int32(0))
    places, before, behind = [], jnp.int32(0), count
    for one, number in zip(kept, numbers, strict=True):
        places.append(jnp.where(one, before, behind))
        before, behind = before + number, behind + (1 - number)
    return count, places
