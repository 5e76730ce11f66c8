"""Where experts live: which slot of which rank holds which expert, and how many copies there are.

A rank has P / N slots, each with the weights of one expert. `balance` copies and places experts by
their loads; `place_by_affinity` places experts of successive layers that tokens visit one after the
other on one rank. Both run on the host, in NumPy, and return a `Placement` of small arrays, whose
shapes depend on the numbers of layers, experts and slots alone: a layer that takes them as
arguments is not compiled again for another placement. `choose_slots` is the traced part.

`to_slots` and `to_experts` turn weights by expert into weights by slot and back, `redistribute`
moves weights from one placement to another, and `LoadTracker` averages loads over steps.
"""

from jax_ep.placement.by_affinity import place_by_affinity as place_by_affinity
from jax_ep.placement.by_load import balance as balance
from jax_ep.placement.choice import choose_slots as choose_slots
from jax_ep.placement.load import LoadTracker as LoadTracker
from jax_ep.placement.table import Placement as Placement
from jax_ep.placement.weights import redistribute as redistribute
from jax_ep.placement.weights import to_experts as to_experts
from jax_ep.placement.weights import to_slots as to_slots
