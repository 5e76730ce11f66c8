"""Lists the implementations of the exchange, and says why one does not support a given exchange.

The module of an implementation is imported only in programs that run it, because the kernels load
Mosaic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from jax_ep.exchange.interface import Exchange
from jax_ep.exchange.rows import Rows
from jax_ep.implementations import Implementation, Implementations
from jax_ep.runtime import availability


@dataclasses.dataclass(frozen=True)
class Problem:
    """The properties of an exchange by which its implementation is selected.

    Attributes:
      target: the program, or the devices, that are to run the exchange.
      axis_name: the mesh axes along which ranks are numbered.
      rows: the rows that the exchange sends; None: rows that the kernels support are assumed.
      few_of_one_rank: whether there is a single rank with so few rows that XLA is faster, because
        launching the kernels takes longer.
    """

    target: availability.Target
    axis_name: tuple[str, ...] = ()
    rows: Rows | None = None
    few_of_one_rank: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Exchange(Implementation):
    """An implementation of the exchange; `unavailable_reason` takes a `Problem`.

    Attributes:
      load: a function that imports and returns the `Exchange` for a supported `Problem`.
    """

    load: Callable[[Problem], Exchange]


def _two_level_reason(problem: Problem) -> str | None:
    num_hosts = problem.target.num_hosts(problem.axis_name)
    return num_hosts if isinstance(num_hosts, str) else None


def _load_two_level(problem: Problem) -> Exchange:
    from jax_ep.exchange.two_level import TwoLevel

    num_hosts = problem.target.num_hosts(problem.axis_name)
    assert isinstance(num_hosts, int)
    ranks_per_host = jax.lax.axis_size(problem.axis_name) // num_hosts
    reason = problem.target.unavailable_reason(problem.axis_name, ranks_per_host)
    return TwoLevel(num_hosts, kernels=reason is None)


def _pallas_reason(problem: Problem) -> str | None:
    if problem.rows is not None and (reason := problem.rows.unavailable_reason()):
        return reason
    return problem.target.unavailable_reason(problem.axis_name)


def _load_pallas(problem: Problem) -> Exchange:
    from jax_ep.exchange import pallas

    return pallas


def _load_xla(problem: Problem) -> Exchange:
    from jax_ep.exchange import xla

    return xla


# implementation=None tries the implementations in this order.
IMPLEMENTATIONS = Implementations(
    (
        _Exchange(name="two_level", unavailable_reason=_two_level_reason, load=_load_two_level),
        _Exchange(
            name="pallas",
            unavailable_reason=_pallas_reason,
            is_default=lambda problem: not problem.few_of_one_rank,
            load=_load_pallas,
        ),
        _Exchange(name="xla", load=_load_xla),
    )
)
