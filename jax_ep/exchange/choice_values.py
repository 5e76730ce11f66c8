"""Sends one value per choice, such as its weight, to the choice's row, and back.

Each call is one collective. Where the exchange may run on kernels, the library's collectives choose
the algorithm by their table of measurements; otherwise XLA's collective runs.
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
    """Sends one value per choice, [T, K], to the choice's row; returns [R], zero in other rows.

    `implementation` names the implementation of the exchange.
    """
    values, routes, collective = _operands(values, handle, implementation)

    def stack(x: jax.Array) -> jax.Array:
        return all_gather(x[None], **collective)

    def send(values: jax.Array, *routes: jax.Array) -> jax.Array:
        return xla.choices_to_rows(values, Routes(*routes), stack=stack, capacity=handle.capacity)

    return replicated_over_explicit_axes(send, values, *routes)


def rows_to_choices(values: jax.Array, handle: Handle, implementation: Implementation) -> jax.Array:
    """Sends one value per row, [R], to the row's choice; returns [T, K], zero without a row."""
    values, routes, collective = _operands(values, handle, implementation)
    swap = functools.partial(all_to_all, **collective)

    def send(values: jax.Array, *routes: jax.Array) -> jax.Array:
        return xla.rows_to_choices(values, Routes(*routes), swap=swap)

    return replicated_over_explicit_axes(send, values, *routes)


def _operands(
    values: jax.Array, handle: Handle, implementation: Implementation
) -> tuple[jax.Array, Routes, dict[str, Any]]:
    """Casts values and routes to vary over the same axes; adds the collective's arguments."""
    values, *arrays = match_varying((values, *handle.routes), handle.axis_name)
    algorithm = algorithm_next_to(implementation)
    return values, Routes(*arrays), dict(axis_name=handle.axis_name, algorithm=algorithm)
