"""Tests of weights by expert and by slot, and of moving them to another placement."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from support.contract import random_bits
from support.loads import random_loads
from support.meshes import expert_mesh, mesh, skip_without
from support.selection import quick

from jax_ep.placement import Placement, balance, redistribute, to_experts, to_slots

LAYERS, E, SLOTS, N = 2, 6, 12, 4
ONE = Placement.of([[0, 1, 2, 3, 4, 5, *[5] * 6]], num_experts=E, num_ranks=N)


def placements():
    rng = np.random.default_rng(0)
    options = dict(num_slots=SLOTS, num_ranks=N)
    yield Placement.in_order(num_experts=E, layers=LAYERS, **options)
    for _ in range(2):
        yield balance(random_loads("zipf", LAYERS, E, rng) ** 2, **options)
    # In layer 0, seven slots have copies of expert 5, so one slot must send it to several. Layer 1
    # has empty slots (-1).
    slots = [[0, 1, 2, 3, 4, 5, *[5] * 6], [5, *[-1] * 6, 4, 3, 2, 1, 0]]
    yield Placement.of(slots, num_experts=E, num_ranks=N)


def permutation():
    """Returns two placements of 4 experts in 4 slots of 2 ranks: in order, and [3, 1, 0, 2]."""
    before = Placement.in_order(num_experts=4, num_slots=4, num_ranks=2)[0]
    return before, Placement.of([[3, 1, 0, 2]], num_experts=4, num_ranks=2)[0]


def tree(rng):
    """Returns a tree like a train state: weights, optimizer states, and leaves without experts."""
    weights = {
        "wi_0": random_bits(rng, (LAYERS, E, 3, 5), np.float32),
        "wo": random_bits(rng, (LAYERS, E, 4), jnp.bfloat16),
    }
    state = {"wi_0": rng.integers(0, 99, (LAYERS, E), np.int32)}
    # The gate's leading sizes equal those of the experts' weights, but it must not be moved.
    return {"params": weights | {"gate": np.ones((LAYERS, E))}, "opt": [state, np.int32(3)]}


def assert_same_bits(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_slots_hold_their_experts_and_give_them_back():
    rng = np.random.default_rng(1)
    weights = tree(rng)
    for placement in placements():
        by_slot = to_slots(weights, placement)
        assert by_slot["params"]["gate"] is weights["params"]["gate"]
        for layer, slots in enumerate(placement.expert_of_slot):
            for slot, expert in enumerate(slots):
                got = by_slot["params"]["wi_0"][layer, slot].tobytes()
                want = weights["params"]["wi_0"][layer, max(expert, 0)].tobytes()
                assert got == (want if expert >= 0 else bytes(len(want)))
        assert_same_bits(to_experts(by_slot, placement), weights)
        one = jax.tree.map(lambda leaf: leaf[1] if np.ndim(leaf) else leaf, weights)
        assert_same_bits(to_experts(to_slots(one, placement[1]), placement[1]), one)


def test_sharded_weights_give_back_every_bit():
    """Sharded weights must come back bit for bit, even subnormals and -0."""
    placement = Placement.in_order(num_experts=E, num_slots=SLOTS, num_ranks=N)[0]
    weights = {"wo": np.array([[1e-39], [-0.0], [1e-39], [-0.0], [3], [-1e-39]], np.float32)}
    by_slot = to_slots(weights, placement)
    sharding = NamedSharding(expert_mesh(N), P("expert"))
    assert_same_bits(to_experts(jax.device_put(by_slot, sharding), placement), weights)


@pytest.mark.parametrize("memory_kind", quick(["device", "pinned_host"], "device"))
@pytest.mark.parametrize("kind", quick([AxisType.Auto, AxisType.Explicit], AxisType.Auto), ids=str)
@pytest.mark.parametrize(
    "spec",
    quick([P(("expert", "fsdp")), P("expert", None, "fsdp"), P()], P("expert", None, "fsdp")),
    ids=str,
)
def test_weights_by_slot_and_by_expert_are_split_alike(spec, kind, memory_kind):
    devices = mesh((2, 2), ("expert", "fsdp"), kind)
    skip_without(memory_kind, devices)
    sharding = NamedSharding(devices, spec, memory_kind=memory_kind)
    weights = random_bits(np.random.default_rng(3), (8, 3, 4), jnp.bfloat16)
    placement = Placement.in_order(num_experts=8, num_slots=12, num_ranks=2)[0]
    by_slot = to_slots({"wo": jax.device_put(weights, sharding)}, placement)["wo"]
    for leaf in (by_slot, to_experts({"wo": by_slot}, placement)["wo"]):
        assert leaf.sharding.is_equivalent_to(sharding, 3) and leaf.dtype == jnp.bfloat16
        assert leaf.sharding.memory_kind == sharding.memory_kind
    assert_same_bits(by_slot, to_slots({"wo": weights}, placement)["wo"])
    # Six slots cannot be split over four ranks.
    uneven = Placement.in_order(num_experts=4, num_slots=6, num_ranks=2)[0]
    by_slot = to_slots({"wo": jax.device_put(weights[:4], sharding)}, uneven)["wo"]
    split = P() if spec == P(("expert", "fsdp")) else spec
    assert by_slot.sharding.is_equivalent_to(sharding.update(spec=split), 3)


@pytest.mark.parametrize("memory_kind", ["device", "pinned_host"])
def test_weights_of_one_device_stay_in_its_memory(memory_kind):
    skip_without(memory_kind, expert_mesh(2))
    sharding = SingleDeviceSharding(jax.devices()[1], memory_kind=memory_kind)
    weights = np.random.default_rng(3).random((8, 3), np.float32)
    placement = Placement.in_order(num_experts=8, num_slots=12, num_ranks=2)[0]
    by_slot = to_slots({"wo": jax.device_put(weights, sharding)}, placement)["wo"]
    assert by_slot.sharding == sharding
    np.testing.assert_array_equal(by_slot, to_slots({"wo": weights}, placement)["wo"])


def test_weights_by_slot_have_gradients():
    """An expert's gradient must be the sum over its slots; an empty slot must have none."""
    slots = [[5, *[-1] * 6, 4, 3, 2, 1, 0]]
    placement = Placement.of(slots, num_experts=E, num_ranks=N)[0]
    rng = np.random.default_rng(5)
    by_expert, by_slot = (jnp.asarray(rng.integers(-9, 9, (n, 3)), jnp.float32) for n in (E, SLOTS))

    def of_slots(leaf):
        return to_slots({"wo": leaf}, placement)["wo"]

    def of_experts(leaf):
        return to_experts({"wo": leaf}, placement)["wo"]

    held = np.zeros((SLOTS, E), np.float32)
    for slot, expert in enumerate(placement.expert_of_slot):
        held[slot, expert] = expert >= 0
    first = np.eye(SLOTS, dtype=np.float32)[placement.slots_of_expert[:, 0]]
    for function, matrix, x, g in (
        (of_slots, held, by_expert, by_slot),
        (of_experts, first, by_slot, by_expert),
    ):
        out, pull = jax.vjp(jax.jit(function), x)
        np.testing.assert_array_equal(out, matrix @ x)
        np.testing.assert_array_equal(pull(g)[0], matrix.T @ g)
        np.testing.assert_array_equal(jax.jvp(function, (x,), (x + 1,))[1], matrix @ (x + 1))


def test_redistribution_moves_every_bit():
    rng = np.random.default_rng(2)
    weights = tree(rng)
    devices = expert_mesh(N)
    all_placements = list(placements())
    before = all_placements[0]
    by_slot = to_slots(weights, before)

    split = NamedSharding(devices, P(None, "expert"))

    def put(path, leaf):
        of_experts = any(getattr(key, "key", None) in ("wi_0", "wo") for key in path)
        return jax.device_put(leaf, split) if of_experts else leaf

    held = jax.tree.map_with_path(put, by_slot)
    for after in all_placements[1:]:
        seen = []

        def progress(done, total, seen=seen):
            seen.append((done, total))

        moved = redistribute(held, before, after, mesh=devices, progress=progress)
        assert moved["params"]["wi_0"].sharding.spec == P(None, "expert")
        assert_same_bits(to_experts(jax.tree.map(np.asarray, moved), after), weights)
        filled = after.expert_of_slot >= 0
        want = to_slots(weights, after)["params"]["wo"][filled]
        assert np.asarray(moved["params"]["wo"])[filled].tobytes() == want.tobytes()
        assert len(seen) == 3 and seen[-1][0] == seen[-1][1] and seen[0][0] < seen[0][1]
        held, before = moved, after


def test_pieces_are_moved_one_after_the_other_in_place(monkeypatch):
    monkeypatch.setattr("jax_ep.placement.weights._PIECE_BYTES", 100)
    devices = expert_mesh(2)
    before, after = permutation()
    weights = np.random.default_rng(3).random((4, 6, 10, 3), np.float32)
    held = jax.device_put(weights, NamedSharding(devices, P("expert")))
    # These weights are not on the mesh yet.
    once = redistribute({"wo": weights}, before, after, mesh=devices)
    assert once["wo"].sharding.spec == P("expert")
    np.testing.assert_array_equal(once["wo"], weights[[3, 1, 0, 2]])
    moved = redistribute({"wo": held}, before, after, mesh=devices)
    assert held.is_deleted()
    np.testing.assert_array_equal(moved["wo"], weights[[3, 1, 0, 2]])


def test_leaves_of_several_kinds_are_moved():
    """An array that the tree holds twice must be moved once, and one on other axes stays there.

    The placeholders of an optimizer for moments that it does not keep must stay as they are.
    """
    before, after = permutation()
    devices, weights = expert_mesh(2), np.random.default_rng(3).random((4, 4), np.float32)
    other = NamedSharding(mesh((2,), ("data",)), P(None, "data"))
    held = jax.device_put(weights, NamedSharding(devices, P("expert")))
    tree = {
        "params": {"wo": held},
        "average": {"wo": held},
        "elsewhere": {"wo": jax.device_put(weights, other)},
        "bools": {"wo": weights < 0.5},
        "empty": {"wo": np.ones((4, 3, 0))},
        "scalar": {"wo": np.zeros(())},
        "placeholder": {"wo": np.zeros(1, np.float32)},
    }
    seen: list[tuple[int, int]] = []
    moved = redistribute(
        tree, before, after, mesh=devices, progress=lambda *counts: seen.append(counts)
    )
    assert seen[-1][0] == seen[-1][1]
    arrays = {name: leaf["wo"] for name, leaf in moved.items()}
    for name in ("scalar", "placeholder"):
        kept = tree[name]["wo"]
        assert arrays[name] is kept
        for function in (to_slots, to_experts):
            assert function({"wo": weights, "v": {"wo": kept}}, before)["v"]["wo"] is kept
    for name in ("params", "average", "elsewhere"):
        np.testing.assert_array_equal(arrays[name], weights[[3, 1, 0, 2]])
    assert held.is_deleted() and arrays["elsewhere"].sharding == other
    np.testing.assert_array_equal(arrays["bools"], weights[[3, 1, 0, 2]] < 0.5)
    assert arrays["bools"].dtype == bool and arrays["empty"].shape == (4, 3, 0)


@pytest.mark.parametrize(
    "key", [("moe", "wi_0"), ("moe", "wi_0", "value"), "moe/wi_0", "layers.3.wi_0"], ids=str
)
def test_flat_trees_name_experts_in_their_keys(key):
    weights = np.random.default_rng(2).normal(size=(E, 3))
    want = to_slots({"wi_0": weights}, ONE[0])["wi_0"]
    gate = ("moe", "gate") if isinstance(key, tuple) else "moe/gate"
    got = to_slots({key: weights, gate: weights}, ONE[0])
    np.testing.assert_array_equal(got[key], want)
    assert got[gate] is weights and want.shape == (SLOTS, 3)


@pytest.mark.parametrize(
    "tree, message",
    [
        (np.ones((E, 3)), "tree must have leaves of experts, with one of .*wo"),
        ({"mywo": 1.0}, "tree must have leaves of experts"),
        ([np.ones(3)], "tree must have leaves of experts"),
        ({"wo": np.ones((5, 3))}, r"\['wo'\] must have a shape that begins with .* \(5, 3\)"),
    ],
)
def test_a_tree_without_leaves_of_experts_is_refused(tree, message):
    for function in (to_slots, to_experts):
        with pytest.raises(ValueError, match=message):
            function(tree, ONE)
    assert to_slots({}, ONE) == {}


@pytest.mark.parametrize(
    "num_slots, num_ranks, options, message",
    [
        (16, N, {}, r"expert_of_slot have shapes \(1, 12\) and \(1, 16\)"),
        (SLOTS, 2, {}, "before and after must have the 4 ranks .* 4 and 2"),
        (SLOTS, N, dict(axis_name="foo"), r"axis_name \('foo',\) must name axes of the mesh"),
        (SLOTS, N, dict(mesh=None), "mesh must be a jax.sharding.Mesh of devices"),
    ],
)
def test_errors_name_the_argument(num_slots, num_ranks, options, message):
    after = Placement.in_order(num_experts=E, num_slots=num_slots, num_ranks=num_ranks)
    with pytest.raises((TypeError, ValueError), match=message):
        redistribute({}, ONE, after, **dict(mesh=expert_mesh(N)) | options)


@pytest.mark.parametrize("kind", [np.complex64, jnp.int4, "key", "shape"], ids=str)
def test_what_cannot_be_moved_is_refused_before_anything_is_donated(kind):
    before, after, *_ = placements()
    held = {"wi_0": jnp.ones((LAYERS, SLOTS, 4))}
    if kind == "key":
        held["wo"] = jax.random.split(jax.random.key(0), (LAYERS, SLOTS))
    elif kind == "shape":
        held["wo"] = jnp.ones((LAYERS, SLOTS - 1, 4))
    else:
        held["wo"] = jnp.ones((LAYERS, SLOTS, 4), jnp.int8).astype(kind)
    message = "wo.*a shape that begins with" if kind == "shape" else "a real dtype of 8 bits or mo"
    with pytest.raises(ValueError, match=message):
        redistribute(held, before, after, mesh=expert_mesh(N))
    assert not held["wi_0"].is_deleted()


SPECS = [P(None, "expert"), P("stage", "expert"), P(None, "expert", None, "stage"), P("expert")]
SPECS += [P(None, ("expert", "stage")), P(None, "stage"), P()]


@pytest.mark.parametrize(
    "kind, memory_kind",
    quick(
        [(AxisType.Auto, "device"), (AxisType.Explicit, "device"), (AxisType.Auto, "pinned_host")],
        (AxisType.Explicit, "device"),
    ),
    ids=str,
)
@pytest.mark.parametrize("spec", quick(SPECS, SPECS[1], SPECS[4]), ids=str)
def test_weights_stay_where_they_are_and_the_old_ones_are_deleted(spec, kind, memory_kind):
    devices = mesh((2, 2), ("stage", "expert"), kind)
    skip_without(memory_kind, devices)
    before, after = (
        balance(np.random.default_rng(i).random((2, 4)), num_slots=8, num_ranks=2) for i in (0, 1)
    )
    weights = {"wo": np.random.default_rng(4).random((2, 4, 5, 6), np.float32)}
    sharding = NamedSharding(devices, spec, memory_kind=memory_kind)
    held = jax.device_put(to_slots(weights, before), sharding)
    moved = redistribute(held, before, after, mesh=devices)["wo"]
    np.testing.assert_array_equal(moved, to_slots(weights, after)["wo"])
    assert held["wo"].is_deleted() and moved.sharding.is_equivalent_to(sharding, 4)
    assert moved.sharding.memory_kind == sharding.memory_kind
