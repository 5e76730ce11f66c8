"""Averages the loads of experts (how often each is chosen) over training steps."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_ep import checks
from jax_ep.runtime.jax_compat import register_for_export


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["total", "weight"], meta_fields=["decay"]
)
@dataclasses.dataclass(frozen=True)
class LoadTracker:
    """An exponential moving average of expert loads; a pytree, so it may be part of a train state.

        tracker = LoadTracker.of((layers, E), decay=0.99)
        tracker = tracker.update(metrics.expert_counts)  # each step, in jax.jit or outside
        new = balance(tracker.load, num_slots=64, num_ranks=8)

    Attributes:
        total: [layers, E] or [E] float32, the decayed sum of the counts of all updates.
        weight: [] float32, the decayed number of updates: the same sum for counts of 1.
        decay: the factor of `total` and `weight` in each update. A decay of 1 - 1 / n averages over
            about n steps.
    """

    total: Any
    weight: Any
    decay: float

    @classmethod
    def of(cls, shape: tuple[int, ...], *, decay: float = 0.99) -> LoadTracker:
        """Makes a tracker without updates, for counts of shape [layers, E] or [E].

        If a mesh is set (`jax.set_mesh`), its arrays are on all devices of the mesh.
        """
        checks.check_number("decay", decay)
        if decay >= 1:
            raise ValueError(f"decay must be above 0 and below 1, but is {decay}.")
        ambient = jax.sharding.get_abstract_mesh()
        # Inside `jax.shard_map`, where axes are manual, the arrays get no sharding.
        everywhere = None if ambient.empty or ambient.manual_axes else PartitionSpec()

        def zeros() -> tuple[jax.Array, jax.Array]:
            return jnp.zeros(shape, jnp.float32), jnp.zeros((), jnp.float32)

        total, weight = jax.jit(zeros, out_shardings=everywhere)()
        return cls(total, weight, float(decay))

    def update(self, counts: Any) -> LoadTracker:
        """Returns a tracker that includes one more step's counts, as `MoEMetrics.expert_counts`."""
        counts = jnp.asarray(counts, jnp.float32)
        if counts.shape != jnp.shape(self.total):
            raise ValueError(
                f"counts must have shape {jnp.shape(self.total)}, as the tracker does, but have "
                f"shape {counts.shape}."
            )
        total = self.decay * self.total + counts
        return dataclasses.replace(self, total=total, weight=self.decay * self.weight + 1)

    @property
    def load(self) -> jax.Array:
        """How often each expert is chosen in a step, [layers, E] or [E] float32; 0 at first."""
        return self.total / jnp.maximum(self.weight, jnp.finfo(jnp.float32).tiny)


register_for_export(LoadTracker)
