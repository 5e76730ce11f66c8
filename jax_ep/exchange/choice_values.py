"""Sends one value per (token, choice), such as its weight, to the row of the choice, and back.

Each call runs one collective of `jax_ep.collectives` over the ranks. If the exchange runs with
implementation="pallas" or None, the collective selects its algorithm by a table of measured times.
Otherwise it is XLA's collective.
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

    Returns [R], one value per row; rows without a choice are zero. `implementation` is the argument
    of the exchange. It decides whether the collective that sends the values may be a Pallas kernel.
    """
    values, routes, collective = _operands(values, handle, implementation)

    def stack(x: jax.Array) -> jax.Array:
        return all_gather(x[None], **collective)

    def send(values: jax.Array, *routes: jax.Array) -> jax.Array:
        return xla.choices_to_rows(values, Routes(*routes), stack=stack, capacity=handle.capacity)

    return replicated_over_explicit_axes(send, values, *routes)


def rows_to_choices(values: jax.Array, handle: Handle, implementation: Implementation) -> jax.Array:
    """Sends values [R], one per receive-buffer row, back to the (token, choice) of each row.

    Returns [T, K]; choices without a row are zero. This function is the transpose of
    `choices_to_rows`. `implementation` is the argument of the exchange. It decides whether the
    collective that sends the values may be a Pallas kernel.
    """
    values, routes, collective = _operands(values, handle, implementation)
    swap = functools.partial(all_to_all, **collective)

    def send(values: jax.Array, *routes: jax.Array) -> jax.Array:
        return xla.rows_to_choices(values, Routes(*routes), swap=swap)

    return replicated_over_explicit_axes(send, values, *routes)


def _operands(
    values: jax.Array, handle: Handle, implementation: Implementation
) -> tuple[jax.Array, Routes, dict[str, Any]]:
    """Returns the values, the handle's routes, and the collective's `axis_name` and `algorithm`.

    The values and routes are cast to vary over the same mesh axes (vma), as the collective needs.
    """
    values, *arrays = match_varying((values, *handle.routes), handle.axis_name)
    algorithm = algorithm_next_to(implementation)
    return values, Routes(*arrays), dict(axis_name=handle.axis_name, algorithm=algorithm)
