"""Converts experts' weights and optimizer state between experts and slots, and moves them.

A slot holds a copy of one expert's weights. The first axis of experts' parameters is P slots in a
layer with slots, and E experts in a layer without. `to_slots` and `to_experts` convert one form to
the other, for checkpoints. `redistribute` moves the weights to the slots of another placement.

All three functions take any pytree, such as a train state. They change only leaves of experts:
leaves whose path has a key that names an expert's parameter, such as "wi_0", "wi_1" or "wo". Such
leaves are the parameters and the optimizer's state for them. Leaves of one element stay as they
are: optax uses them as placeholders for moments that it does not keep.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep import checks
from jax_ep.checks import AxisName
from jax_ep.exchange.api import dispatch
from jax_ep.exchange.interface import Implementation
from jax_ep.placement.table import Array, Placement

# The most bytes that a rank receives in one dispatch of `redistribute`, unless a row for each slot
# is more. `redistribute` cuts the weights of each slot into rows. Each dispatch moves equally many
# rows of every slot, so this bounds the memory that is needed besides the weights.
_PIECE_BYTES = 64 * 2**20

# The most bytes of one of the rows into which `redistribute` cuts weights, unless the weights' last
# axis is longer. Rows are nearly as long as this, because short rows are dispatched slowly.
_ROW_BYTES = 16 * 2**10

# Maps the number of bytes of a weight to a floating dtype of that size. `dispatch` sends floating
# numbers only, so weights of any dtype are sent as numbers with the same bits. Outside of
# `dispatch` the bits are integers, because XLA may change the bits of a NaN.
_CARRIERS = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16, 4: jnp.float32, 8: jnp.float64}

# The names of a layer's parameters whose first axis is the experts.
ROUTED_WEIGHTS = ("wi_0", "wi_1", "wo", "wi_0_bias", "wi_1_bias", "wo_bias")


def to_slots(tree: Any, placement: Placement) -> Any:
    """Copies the weights of E experts into the P slots of a placement; an empty slot is zero.

    Only leaves of experts change: leaves whose path has a key that names an expert's parameter,
    such as "wi_0", "wi_1" or "wo".

    Args:
        tree: a pytree; its leaves of experts are [E, ...], or [layers, E, ...] for the placement
            of several layers. NumPy arrays stay NumPy arrays.
        placement: the placement of one layer, `placement[layer]`, or of several.

    Returns:
        The tree, in which the leaves of experts are [P, ...] or [layers, P, ...].

    Raises:
        ValueError: the shape of a leaf of experts begins with other sizes, or there is no leaf of
            experts.
    """
    slots = np.asarray(placement.expert_of_slot)
    size = "E", np.shape(placement.num_copies)[-1]
    return _map_experts(lambda leaf: _take(leaf, slots), tree, np.shape(placement.num_copies), size)


def to_experts(tree: Any, placement: Placement) -> Any:
    """Takes each expert's weights from the first slot that holds it: the inverse of `to_slots`.

    Args:
        tree: a pytree; its leaves of experts (see `to_slots`) are [P, ...], or [layers, P, ...]
            for the placement of several layers. NumPy arrays stay NumPy arrays.
        placement: the placement of one layer, `placement[layer]`, or of several.

    Returns:
        The tree, in which the leaves of experts are [E, ...] or [layers, E, ...].

    Raises:
        ValueError: the shape of a leaf of experts begins with other sizes, or there is no leaf of
            experts.
    """
    first = np.asarray(placement.slots_of_expert)[..., 0]
    size = "P", np.shape(placement.expert_of_slot)[-1]
    return _map_experts(
        lambda leaf: _take(leaf, first), tree, np.shape(placement.expert_of_slot), size
    )


def _take(leaf: Any, index: Array) -> Any:
    """Gathers entries of `leaf` along its axis of experts or slots; an index of -1 gives zeros.

    `index` is [n] for a leaf [E, ...] or [P, ...] of one layer, and [layers, n] for a leaf with an
    axis of layers in front.
    """
    xp: Any = np if isinstance(leaf, np.ndarray) else jnp
    axis = index.ndim - 1
    if xp is jnp:
        spec = list(jax.typeof(leaf).sharding.spec)
        # JAX cannot gather along an array axis that is split over an Explicit mesh axis. The mesh
        # is given to `reshard`, because the caller may have set no ambient mesh.
        if axis < len(spec) and spec[axis] is not None:
            spec[axis] = None
            mesh = jax.typeof(leaf).sharding.mesh
            leaf = jax.sharding.reshard(leaf, NamedSharding(mesh, PartitionSpec(*spec)))
    index = index.reshape(*index.shape, *(1,) * (leaf.ndim - index.ndim))

    def gather(leaf: Any) -> Any:
        taken = xp.take_along_axis(leaf, xp.asarray(np.maximum(index, 0)), axis)
        if index.min() < 0:
            taken = xp.where(xp.asarray(index) >= 0, taken, xp.zeros((), taken.dtype))
        return taken

    if xp is np or not jnp.issubdtype(leaf.dtype, jnp.floating) or jnp.finfo(leaf.dtype).bits < 8:
        return gather(leaf)

    # Gathers floats as integers, because XLA may add floats of several devices to gather them,
    # which flushes subnormal floats to zero. Integers have no tangent, so the custom JVP rule
    # gathers the tangent.
    @jax.custom_jvp
    def gather_bits(leaf: jax.Array) -> jax.Array:
        return gather(leaf.view(f"uint{jnp.finfo(leaf.dtype).bits}")).view(leaf.dtype)

    gather_bits.defjvps(lambda tangent, taken, leaf: gather(tangent))
    return gather_bits(leaf)


def redistribute(
    tree: Any,
    before: Placement,
    after: Placement,
    *,
    mesh: Mesh,
    axis_name: AxisName = "expert",
    progress: Callable[[int, int], None] | None = None,
    implementation: Implementation = None,
) -> Any:
    """Moves weights and optimizer state to the slots of another placement.

    Every slot of the placement `after` receives the bits of a slot that holds the same expert in
    the placement `before`. The source is on the same rank if that rank has a copy of the expert.
    Otherwise the copies of the expert share the sending evenly. Each leaf is donated, and is
    overwritten in pieces of up to about 64 MiB per rank. So little memory is needed besides the
    tree.

    Call it between steps, outside of `jax.jit`. It compiles a program for each leaf shape and each
    C: the largest number of slots that one slot sends to, rounded up to a power of two.

    Args:
        tree: a pytree, such as a train state; its leaves of experts (see `to_slots`) are
            [P, ...], or [layers, P, ...] for placements of several layers. A leaf whose slots are
            split over `axis_name` keeps its sharding, which may split other dimensions over other
            axes; any other leaf is first split over `axis_name` alone. Each leaf stays in its
            kind of memory, such as "pinned_host".
        before: the placement that the tree has, of one layer or of several.
        after: the placement to move to, with the same numbers of layers, experts, slots and ranks.
        mesh: the mesh on which the weights are.
        axis_name: the mesh axis, or tuple of axes, that the slots are spread over.
        progress: called after each leaf as progress(bytes moved so far, bytes of all leaves).
        implementation: the implementation of the exchange; see `jax_ep.dispatch`.

    Returns:
        The tree with new arrays as leaves of experts; the old arrays are deleted.

    Raises:
        ValueError: the placements have different sizes, or sizes that differ from those of the mesh
            or of a leaf; a leaf has a dtype of less than 8 bits or a complex dtype; there is no
            leaf of experts; or `axis_name` is not an axis of the mesh.
    """
    axes = checks.as_axes(axis_name)
    if not set(axes) <= set(mesh.axis_names):
        raise ValueError(f"axis_name {axes} must name axes of the mesh, but it has {mesh.shape}.")
    num_ranks = math.prod(mesh.shape[axis] for axis in axes)
    shape = np.shape(before.expert_of_slot)
    for name in ("expert_of_slot", "num_copies"):
        if np.shape(getattr(before, name)) != np.shape(getattr(after, name)):
            raise ValueError(
                "before and after must have equal numbers of layers, experts and slots, but "
                f"their {name} have shapes {np.shape(getattr(before, name))} and "
                f"{np.shape(getattr(after, name))}."
            )
    if not before.num_ranks == after.num_ranks == num_ranks:
        raise ValueError(
            f"before and after must have the {num_ranks} ranks along {axes}, but have "
            f"{before.num_ranks} and {after.num_ranks} ranks."
        )
    plan = _destinations(before, after)
    # The index of the slots' axis in leaves of experts: 1 after an axis of layers, else 0.
    axis = len(shape) - 1
    size = "P", shape[-1]
    leaves: list[jax.Array] = []

    # Called for all leaves first, so that an unsupported dtype raises before a leaf is donated.
    def note(leaf: jax.Array) -> None:
        if not _is_of_whole_bytes(leaf.dtype):
            raise ValueError(
                "tree must have leaves of experts whose dtype is bool or a real dtype of 8 bits or "
                f"more, but one of shape {np.shape(leaf)} has dtype {leaf.dtype}."
            )
        leaves.append(leaf)

    _map_experts(note, tree, shape, size)
    total = sum(leaf.nbytes for leaf in leaves)
    done, moved_leaves = 0, dict[int, jax.Array]()

    def move(leaf: jax.Array) -> jax.Array:
        nonlocal done
        # A tree may hold the same array at several places; it is moved once.
        if id(leaf) not in moved_leaves:
            moved_leaves[id(leaf)] = move_one(leaf)
        done += leaf.nbytes
        if progress is not None:
            progress(done, total)
        return moved_leaves[id(leaf)]

    def move_one(leaf: jax.Array) -> jax.Array:
        sharding = getattr(leaf, "sharding", None)
        spec = _split_spec(sharding, mesh, axes, axis)
        of_plan = NamedSharding(mesh, PartitionSpec(*spec[: axis + 1]))
        split = jax.device_put(leaf, NamedSharding(mesh, spec))
        if split.size == 0:
            return split
        moved = _mover(mesh, axes, spec, axis, implementation)(split, jax.device_put(plan, of_plan))
        if isinstance(leaf, jax.Array):
            # Frees a leaf that `device_put` has copied to change its sharding: only the copy was
            # donated.
            leaf.delete()
        kind: str | None = getattr(sharding, "memory_kind", None)
        if kind in (None, moved.sharding.memory_kind):
            return moved
        return jax.device_put(moved, NamedSharding(mesh, spec, memory_kind=kind))

    return _map_experts(move, tree, shape, size)


def _is_of_whole_bytes(dtype: Any) -> bool:
    """Returns whether a dtype is bool, or a floating or integer dtype of at least 8 bits."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits >= 8
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits >= 8
    return jnp.issubdtype(dtype, jnp.bool_)


def _split_spec(sharding: Any, mesh: Mesh, axes: tuple[str, ...], axis: int) -> PartitionSpec:
    """Returns the PartitionSpec with which a leaf of experts' weights is split while it is moved.

    A leaf that is already on `mesh`, with its slots split over the mesh axes `axes`, keeps the
    PartitionSpec of its `sharding`. For any other leaf, only the slots are split, over `axes`.
    `axis` is the index of the leaf's axis of slots.
    """
    if isinstance(sharding, NamedSharding) and axis < len(sharding.spec):
        along = sharding.spec[axis]
        same_mesh = dict(sharding.mesh.shape) == dict(mesh.shape)
        same_devices = sharding.device_set == set(mesh.devices.flat)
        if along is not None and checks.as_axes(along) == axes and same_mesh and same_devices:
            return sharding.spec
    return PartitionSpec(*(None,) * axis, axes)


def _destinations(before: Placement, after: Placement) -> Array:
    """Computes to which slots of `after` each of the P slots of `before` sends its weights.

    Returns [P, C] int32 for placements of one layer, and [layers, P, C] for placements of several.
    Row s lists the slots that receive the weights of slot s, padded with -1. C is the length of the
    longest of these lists, rounded up to a power of two.
    """
    shape = np.shape(before.expert_of_slot)
    num_slots, per_rank = shape[-1], shape[-1] // before.num_ranks
    old = np.asarray(before.expert_of_slot).reshape(-1, num_slots)
    new = np.asarray(after.expert_of_slot).reshape(-1, num_slots)
    sent: list[list[list[int]]] = []
    for held, wanted in zip(old, new, strict=True):
        of_layer: list[list[int]] = [[] for _ in range(num_slots)]
        unchanged_first = np.argsort(held[:num_slots] != wanted, kind="stable")
        for slot in unchanged_first:
            copies = np.flatnonzero(held == wanted[slot])
            if wanted[slot] < 0 or held[slot] == wanted[slot]:
                # A slot that keeps its expert, or becomes empty, receives its own weights: every
                # slot must receive the weights of exactly one slot.
                source = slot
            else:
                far = copies // per_rank != slot // per_rank
                load = [len(of_layer[copy]) for copy in copies]
                source = copies[np.lexsort((load, far))[0]]
            of_layer[source].append(int(slot))
        sent.append(of_layer)
    most = max(len(slots) for of_layer in sent for slots in of_layer)
    # Rounds up to a power of two, because a program is compiled for each width that occurs.
    width = 1 << (most - 1).bit_length()
    padded = [[slots + [-1] * (width - len(slots)) for slots in of_layer] for of_layer in sent]
    return np.asarray(padded, np.int32).reshape(*shape, width)


@functools.cache
def _mover(
    mesh: Mesh,
    axes: tuple[str, ...],
    spec: PartitionSpec,
    axis: int,
    implementation: Implementation,
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Makes the jitted function that moves the weights in one leaf of a pytree between slots.

    The function takes two arrays, and returns the new leaf. The first array is the leaf, which is
    donated: [P, ...] for the P slots of one layer, or [layers, P, ...]. The second is the plan, the
    result of `_destinations`: [P, C] or [layers, P, C] int32, the up to C slots that receive the
    weights of each slot.

    Args:
        mesh: the mesh of the leaf.
        axes: the mesh axes that the slots are split over.
        spec: the PartitionSpec of the leaf.
        axis: the index of the leaf's axis of slots: 1 after an axis of layers, else 0.
        implementation: the implementation of `jax_ep.dispatch`.
    """
    # The plan's axes of layers and slots are split over the mesh like those of the leaf.
    of_plan = PartitionSpec(*spec[: axis + 1])

    def on_rank(leaf: jax.Array, plan: jax.Array) -> jax.Array:
        lead = leaf.shape[: axis + 1]
        dtype = leaf.dtype
        columns = _row_length(leaf.shape[axis + 1 :], dtype.itemsize)
        bits = f"uint{8 * dtype.itemsize}"
        rows = leaf.astype(bits) if dtype == jnp.bool_ else lax.bitcast_convert_type(leaf, bits)
        rows = rows.reshape(math.prod(lead[:-1]), lead[-1], -1, columns)
        plan = plan.reshape(*rows.shape[:2], plan.shape[-1])
        rows = _move_rows(rows, plan, axes, implementation)
        rows = rows.reshape(leaf.shape)
        return rows.astype(dtype) if dtype == jnp.bool_ else lax.bitcast_convert_type(rows, dtype)

    moved = jax.shard_map(on_rank, mesh=mesh, in_specs=(spec, of_plan), out_specs=spec)
    return jax.jit(moved, donate_argnums=0)


def _row_length(shape: tuple[int, ...], itemsize: int) -> int:
    """Returns the number of values in a row, if the weights of one expert are cut into equal rows.

    `shape` is the shape of these weights, and `itemsize` the bytes of a value. A row has the length
    of the last axis, doubled as often as `_ROW_BYTES` and the number of values allow.
    """
    length, rows = shape[-1] if shape else 1, math.prod(shape[:-1])
    while rows % 2 == 0 and 2 * length * itemsize <= _ROW_BYTES:
        length, rows = 2 * length, rows // 2
    return length


def _move_rows(
    rows: jax.Array, plan: jax.Array, axes: tuple[str, ...], implementation: Implementation
) -> jax.Array:
    """Sends the weights of this rank's slots, cut into rows, to their destination slots.

    One `dispatch` sends the same number of rows of each slot of one layer. This number is as large
    as `_PIECE_BYTES` of received rows allow, but at least 1. In the dispatch, slots take the place
    of experts: each slot receives the rows of exactly one slot, in order.

    Args:
        rows: [layers, P / N, M, columns], the weights of each of the P / N slots on this rank, cut
            into M rows.
        plan: [layers, P / N, C] int32: for each slot, the list of its up to C destination slots,
            padded with -1.
        axes: the mesh axes that the slots are split over.
        implementation: the implementation of `jax_ep.dispatch`.

    Returns:
        The received rows, in the shape of `rows`.
    """
    layers, num_slots, num_rows, columns = rows.shape
    bytes_of_row = num_slots * columns * rows.dtype.itemsize
    most = max(1, _PIECE_BYTES // bytes_of_row)
    piece = max(size for size in range(1, min(num_rows, most) + 1) if num_rows % size == 0)
    pieces = num_rows // piece

    def move(i: jax.Array, rows: jax.Array) -> jax.Array:
        layer, start = i // pieces, i % pieces * piece
        zero = jnp.zeros_like(layer)
        begin = (layer, zero, start, zero)
        x = lax.dynamic_slice(rows, begin, (1, num_slots, piece, columns))
        slots = lax.dynamic_index_in_dim(plan, layer, keepdims=False)
        received = dispatch(
            lax.bitcast_convert_type(x.reshape(-1, columns), _CARRIERS[x.dtype.itemsize]),
            jnp.repeat(slots, piece, axis=0),
            num_experts=num_slots * checks.num_ranks(axes),
            axis_name=axes,
            capacity=num_slots * piece,
            implementation=implementation,
        )
        bits = lax.bitcast_convert_type(received.tokens, x.dtype)
        return lax.dynamic_update_slice(rows, bits.reshape(x.shape), begin)

    return lax.fori_loop(0, layers * pieces, move, rows)


def _map_experts(function: Any, tree: Any, lead: tuple[int, ...], size: tuple[str, int]) -> Any:
    """Applies a function to the leaves of a tree that hold experts' weights; keeps all others.

    Args:
        function: the function, from a leaf to a new leaf.
        tree: a pytree, such as a train state.
        lead: the sizes that the shape of each leaf of experts must begin with: (E,), (P,),
            (layers, E) or (layers, P).
        size: ("E", E) or ("P", P), which error messages quote.

    Returns:
        The tree with the new leaves.

    Raises:
        ValueError: no leaf holds experts' weights, or the shape of one begins with other sizes.
    """
    name, number = size
    paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
    if paths and not any(map(_of_experts, paths)):
        raise ValueError(
            f"tree must have leaves of experts, with one of {ROUTED_WEIGHTS} in their path, but "
            f"none of its {len(paths)} leaves has one; the first is "
            f"{jax.tree_util.keystr(paths[0])!r}."
        )

    def visit(path: Any, leaf: Any) -> Any:
        if not _of_experts(path):
            return leaf
        shape = np.shape(leaf)
        if shape[: len(lead)] == lead:
            return function(leaf)
        if shape in ((), (1,)):
            # This leaf is optax's placeholder for a moment that the optimizer does not keep.
            return leaf
        raise ValueError(
            f"{jax.tree_util.keystr(path)} must have a shape that begins with {lead}, where the "
            f"placement has {name}={number}, but has shape {shape}."
        )

    return jax.tree.map_with_path(visit, tree)


def _of_experts(path: Any) -> bool:
    """Returns whether a key in a leaf's path is the name of an expert's parameter.

    A key may also be a tuple of names, or names joined by "/" or ".", as in flattened dictionaries.
    """
    keys = (getattr(key, "key", getattr(key, "name", None)) for key in path)
    parts = (part for key in keys for part in (key if isinstance(key, tuple) else (key,)))
    names = (name for part in parts if isinstance(part, str) for name in re.split(r"[./]", part))
    return any(name in ROUTED_WEIGHTS for name in names)
