"""Averages the loads of experts (how often each is chosen) over training steps."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

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
        decay: each update multiplies `total` and `weight` by this factor before it adds its counts
            to `total` and 1 to `weight`. A decay of 1 - 1 / n averages over about n steps.
    """

    total: Any
    weight: Any
    decay: float

    @classmethod
    def of(cls, shape: tuple[int, ...], *, decay: float = 0.99) -> LoadTracker:
        """Makes a tracker without updates, for counts of shape [layers, E] or [E].

        Raises:
            ValueError: `decay` is not above 0 and below 1.
        """
        checks.check_number("decay", decay)
        if decay >= 1:
            raise ValueError(f"decay must be above 0 and below 1, but is {decay}.")
        return cls(jnp.zeros(shape, jnp.float32), jnp.zeros((), jnp.float32), float(decay))

    def update(self, counts: Any) -> LoadTracker:
        """Returns a tracker that includes one more step; this tracker stays as it is.

        Args:
            counts: [layers, E] or [E], how often each expert was chosen in the step, such as
                `MoEMetrics.expert_counts`.

        Raises:
            ValueError: the shape of `counts` is not the one given to `LoadTracker.of`.
        """
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
        """How often each expert is chosen in a step, the moving average over steps.

        [layers, E] or [E] float32; 0 before the first update. Pass it to `balance`.
        """
        return self.total / jnp.maximum(self.weight, jnp.finfo(jnp.float32).tiny)


register_for_export(LoadTracker)
