"""Runs collectives between the ranks along mesh axes by the fastest algorithm; start at `api`."""

from jax_ep.collectives.api import all_gather as all_gather
from jax_ep.collectives.api import all_reduce as all_reduce
from jax_ep.collectives.api import all_reduce_rms_norm as all_reduce_rms_norm
from jax_ep.collectives.api import all_to_all as all_to_all
from jax_ep.collectives.api import reduce_scatter as reduce_scatter
