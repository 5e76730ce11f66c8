"""Tests of expert loads averaged over steps."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.meshes import mesh

from jax_ep.placement import LoadTracker


def test_the_average_forgets_by_the_decay():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 100, (5, 3, 4))
    tracker = LoadTracker.of((3, 4), decay=0.8)
    assert not np.any(tracker.load)
    update = jax.jit(LoadTracker.update)
    for step in counts:
        tracker = update(tracker, step)
    weights = 0.8 ** np.arange(4, -1, -1)
    want = np.einsum("s,sle->le", weights, counts) / weights.sum()
    np.testing.assert_allclose(tracker.load, want, rtol=1e-6)


def test_sums_of_counts_do_not_overflow():
    tracker, most = LoadTracker.of((2,), decay=0.5), 2**31 - 1
    for _ in range(4):
        tracker = jax.jit(LoadTracker.update)(tracker, np.array([most, 1], np.int32))
    np.testing.assert_allclose(tracker.load, [most, 1], rtol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_tracker_is_on_all_devices_of_the_mesh(kind):
    """One that is restored onto its own shardings must take counts that are on the mesh."""
    devices = mesh((2,), ("expert",), kind)
    with jax.set_mesh(devices):
        tracker = LoadTracker.of((4,))
        restored = jax.tree.map(lambda a: jax.device_put(np.asarray(a), a.sharding), tracker)
        counts = jax.device_put(np.arange(4), NamedSharding(devices, P()))
        updated = jax.jit(LoadTracker.update)(restored, counts)
    assert tracker.total.sharding.device_set == set(devices.devices.flat)
    np.testing.assert_allclose(updated.load, np.arange(4), rtol=1e-6)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="decay must be above 0 and below 1, but is 1"):
        LoadTracker.of((4,), decay=1.0)
    with pytest.raises(ValueError, match=r"counts must have shape \(4,\).* shape \(3,\)"):
        LoadTracker.of((4,)).update(np.ones(3))
