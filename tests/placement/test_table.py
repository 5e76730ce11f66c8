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


def test_arrays_agree_and_do_not_change_shape_with_the_load():
    rng = np.random.default_rng(3)
    shapes = set()
    for kind in ("zipf", "lognormal"):
        placed = balance(random_loads(kind, 3, 12, rng), num_slots=20, num_ranks=4)
        shapes.add(tuple(leaf.shape for leaf in jax.tree.leaves(placed)))
        for layer in range(3):
            for expert in range(12):
                slots = placed.slots_of_expert[layer, expert]
                held = np.flatnonzero(placed.expert_of_slot[layer] == expert)
                np.testing.assert_array_equal(slots[: len(held)], held)
                assert np.all(slots[len(held) :] == -1)
                assert placed.num_copies[layer, expert] == len(held)
    assert shapes == {((3, 20), (3, 12, 9), (3, 12))}


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


def test_load_of_ranks_of_one_layer():
    placed = balance(LOADS, num_slots=16, num_ranks=8)
    of_layers = placed.rank_load(LOADS)
    assert of_layers.shape == (2, 8)
    for layer in range(2):
        np.testing.assert_array_equal(placed[layer].rank_load(LOADS[layer]), of_layers[layer])


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


@pytest.mark.parametrize(
    "trace, options, message",
    [
        (TRACE[..., 0], {}, r"trace must .*\(2, 4\)"),
        (TRACE + 7, dict(num_experts=4), "num_experts must be above .* of trace, 7, but is 4"),
        (TRACE, dict(max_imbalance=0.9), "max_imbalance must be at least 1, but is 0.9"),
    ],
)
def test_errors_of_place_by_affinity_name_the_argument(trace, options, message):
    with pytest.raises(ValueError, match=message):
        place_by_affinity(trace, num_ranks=2, **options)


def test_a_load_of_another_shape_is_named():
    placed = balance(LOAD, num_slots=16, num_ranks=8)
    for of, load, message in (
        (placed, LOAD[:1], r"load must have shape .*\(2, 12\), but has shape \(1, 12\)"),
        (placed[0], LOAD, r"load must be an array of numbers \[E\], but has shape \(2, 12\)"),
        (placed[0], LOAD[0, :6], r"load must have shape \[E\] = \(12,\), but has shape \(6,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            of.rank_load(load)


def test_what_makes_no_placement_is_named():
    with pytest.raises(ValueError, match="no slot for expert 2 in layer 0"):
        Placement.of([[0, 1, 1, 1]], num_experts=3, num_ranks=2)
    with pytest.raises(ValueError, match="ids below num_experts=3.* -?[0-9]+ to 3"):
        Placement.of([[0, 1, 2, 3]], num_experts=3, num_ranks=2)
    with pytest.raises(ValueError, match="path must end in .json or .npz"):
        Placement.load("placement.txt")
