"""Tests of a placement's arrays, files and errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from support.loads import random_loads

from jax_ep.placement import LoadTracker, Placement, balance, place_by_affinity

LOADS = random_loads("zipf", 2, 12, np.random.default_rng(0))


@pytest.mark.parametrize("name", ["placement.json", "placement.npz"])
def test_saved_and_loaded(name, tmp_path):
    placed = balance(LOADS, num_slots=16, num_ranks=8)
    placed.save(tmp_path / name)
    loaded = Placement.load(tmp_path / name)
    jax.tree.map(np.testing.assert_array_equal, loaded, placed)
    assert loaded.num_ranks == 8
    assert (tmp_path / name).stat().st_size < 2000
    placed[1].save(tmp_path / name)
    loaded = Placement.load(tmp_path / name)
    jax.tree.map(np.testing.assert_array_equal, loaded, placed[1])


@pytest.mark.parametrize(
    "name, content",
    [
        ("placement.npz", ""),
        ("placement.npz", "text"),
        ("placement.json", ""),
        ("placement.json", "[]"),
        ("placement.json", '{"expert_of_slot": [[0.5]], "num_experts": 1, "num_ranks": 1}'),
    ],
)
def test_a_file_without_a_placement_is_refused(name, content, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} must hold a placement that Placement\.save"):
        Placement.load(tmp_path / name)


def test_placements_of_the_same_slots_are_equal():
    options = dict(num_experts=3, num_slots=4, num_ranks=2)
    one, same = Placement.in_order(**options), Placement.in_order(**options)
    assert one == same and one == jax.device_put(same) and one[0] == same[0]
    other = Placement.of([[0, 1, 2, 2]], num_experts=3, num_ranks=2)
    assert one != other and one[0] != other[0] and one != "placement"


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_a_layer_that_a_placement_does_not_have_is_an_error(kind):
    """JAX would clamp the index, and return the placement of another layer."""
    placement = jax.tree.map(kind, Placement.of([[0, 1], [1, 0]], num_experts=2, num_ranks=2))
    assert placement[-1].expert_of_slot.tolist() == [1, 0]
    for layer in (2, -3):
        with pytest.raises(IndexError, match=f"one of the 2 of this Placement, but is {layer}"):
            placement[layer]
    traced = jax.jit(lambda placement, layer: placement[layer].expert_of_slot)
    assert traced(placement, 1).tolist() == [1, 0]


def test_a_program_that_takes_a_placement_can_be_exported():
    placement = Placement.in_order(num_experts=3, num_slots=4, num_ranks=1)[0]
    tracker = LoadTracker.of((3,))

    @jax.jit
    def copies(placement, tracker):
        return placement.num_copies + tracker.load, placement, tracker

    exported = export.export(copies)(placement, tracker).serialize()
    results = export.deserialize(exported).call(placement, tracker)
    np.testing.assert_array_equal(results[0], [2, 1, 1])
    assert results[1] == placement and results[2].decay == tracker.decay


LOAD = np.ones((2, 12))
TRACE = np.zeros((2, 4, 1), int)


@pytest.mark.parametrize(
    "load, options, error, message",
    [
        (LOAD[0], {}, ValueError, r"load must .*\(12,\)"),
        (-LOAD, {}, ValueError, "load must .*negative"),
        (LOAD * 1e308, {}, ValueError, "load .* its sum"),
        (LOAD * 1j, {}, TypeError, "load .* real numbers"),
        (LOAD, dict(num_slots=12), ValueError, "num_slots must .* is 12"),
        (LOAD, dict(num_slots=8), ValueError, "num_slots must .* is 8"),
        (LOAD, dict(num_hosts=3), ValueError, "num_ranks must be a multiple of num_hosts=3, .* 8"),
        (LOAD, dict(num_groups=5), ValueError, "num_groups must divide the 12 experts .* is 5"),
    ],
)
def test_errors_of_balance_name_the_argument(load, options, error, message):
    with pytest.raises(error, match=message):
        balance(load, **dict(num_slots=16, num_ranks=8) | options)


PLACED = balance(LOADS, num_slots=16, num_ranks=8)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: place_by_affinity(TRACE[..., 0], num_ranks=2), r"trace must .*\(2, 4\)"),
        (
            lambda: place_by_affinity(TRACE + 7, num_ranks=2, num_experts=4),
            "num_experts must be above .* of trace, 7, but is 4",
        ),
        (lambda: place_by_affinity(TRACE, num_ranks=2, max_imbalance=0.9), "max_imbalance must"),
        (lambda: PLACED.rank_load(LOAD[:1]), r"load must have shape .*\(2, 12\), .* \(1, 12\)"),
        (lambda: PLACED[0].rank_load(LOAD), r"load must be an array of numbers \[E\], .*\(2, 12\)"),
        (lambda: PLACED[0].rank_load(LOAD[0, :6]), r"load must have shape \[E\] = .*\(6,\)"),
        (lambda: Placement.of([[0, 1, 1, 1]], num_experts=3, num_ranks=2), "for expert 2 in lay"),
        (lambda: Placement.of([[0, 1, 2, 3]], num_experts=3, num_ranks=2), "below num_experts=3"),
        (lambda: Placement.load("placement.txt"), "path must end in .json or .npz"),
    ],
)
def test_errors_name_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
