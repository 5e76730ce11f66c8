"""Decides which rank holds which experts, and how many copies an expert has.

A slot is the memory for one expert's weights; each of the N ranks has P / N of the P slots.
`balance` and `place_by_affinity` run on the host, in NumPy, and return a `Placement`: small arrays
whose shapes depend only on sizes, so that a layer compiles once for all placements. `choose_slots`
runs in the traced program.
"""

from jax_ep.placement.by_affinity import place_by_affinity as place_by_affinity
from jax_ep.placement.by_load import balance as balance
from jax_ep.placement.choice import choose_slots as choose_slots
from jax_ep.placement.load import LoadTracker as LoadTracker
from jax_ep.placement.table import Placement as Placement
from jax_ep.placement.weights import redistribute as redistribute
from jax_ep.placement.weights import to_experts as to_experts
from jax_ep.placement.weights import to_slots as to_slots
