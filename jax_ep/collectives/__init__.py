"""Runs collectives between the ranks along mesh axes by the fastest algorithm; start at `api`."""

from jax_ep.collectives.api import (
    all_gather,
    all_reduce,
    all_reduce_rms_norm,
    all_to_all,
    reduce_scatter,
)

__all__ = ["all_gather", "all_reduce", "all_reduce_rms_norm", "all_to_all", "reduce_scatter"]
