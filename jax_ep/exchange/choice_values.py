"""Sends one value per (token, choice), such as its weight, to the row of the choice, and back.

Each call runs one collective over the ranks. Where the exchange may run Pallas kernels, the
collective comes from `jax_ep.collectives`, which selects the algorithm by a table of measured
times. Otherwise it is XLA's collective.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from jax_ep.collectives.api import all_gather, all_to_all
from jax_ep.exchange import xla
from jax_ep.exchange.expert_major import Handle
from jax_ep.exchange.interface import Implementation, algorithm_next_to
from jax_ep.exchange.routes import Routes
from jax_ep.runtime.jax_compat import match_varying, replicated_over_explicit_axes


def choices_to_rows(values: jax.Array, handle: Handle, implementation: Implementation) -> jax.Array:
    """Sends values [T, K], one per choice, to the receive-buffer rows of the choices.

    Returns [R], one value per row; rows without a choice are zero. `implementation` is that of the
    exchange, and decides which algorithms the collective may use.
    """
    values, routes, collective = _operands(values, handle, implementation)

    def stack(x: jax.Array) -> jax.Array:
        return all_gather(x[None], **collective)

    def send(values: jax.Array, *routes: jax.Array) -> jax.Array:
        return xla.choices_to_rows(values, Routes(*routes), stack=stack, capacity=handle.capacity)

    return replicated_over_explicit_axes(send, values, *routes)


def rows_to_choices(values: jax.Array, handle: Handle, implementation: Implementation) -> jax.Array:
    """Sends values [R], one per receive-buffer row, back to the rows' (token, choice).

    Returns [T, K]; choices without a row are zero. It is the transpose of `choices_to_rows`.
    `implementation` is that of the exchange, and decides which algorithms the collective may use.
    """
    values, routes, collective = _operands(values, handle, implementation)
    swap = functools.partial(all_to_all, **collective)

    def send(values: jax.Array, *routes: jax.Array) -> jax.Array:
        return xla.rows_to_choices(values, Routes(*routes), swap=swap)

    return replicated_over_explicit_axes(send, values, *routes)


def _operands(
    values: jax.Array, handle: Handle, implementation: Implementation
) -> tuple[jax.Array, Routes, dict[str, Any]]:
    """Returns the values, the routes, and the keyword arguments of the collective.

    The values and routes are cast to vary over the same mesh axes (vma).
    """
    values, *arrays = match_varying((values, *handle.routes), handle.axis_name)
    algorithm = algorithm_next_to(implementation)
    return values, Routes(*arrays), dict(axis_name=handle.axis_name, algorithm=algorithm)
