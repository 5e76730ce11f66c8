"""Converts experts' weights and optimizer state between experts and slots, and moves them.

The functions take any pytree, such as a train state, and change only leaves of experts: those whose
path has a key that names an expert's parameter, such as "wi_0".
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
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jax_ep import checks
from jax_ep.checks import AxisName
from jax_ep.exchange.api import dispatch
from jax_ep.exchange.interface import Implementation
from jax_ep.placement.table import Array, Placement
from jax_ep.runtime.jax_compat import is_traced

# The most bytes that a rank receives in one dispatch of `redistribute`, unless a row for each slot
# is more. Each dispatch moves equally many rows of every slot.
_PIECE_BYTES = 64 * 2**20

# The most bytes of a dispatched row, unless the weights' last axis is longer. Rows are nearly as
# long, because short rows are dispatched slowly.
_ROW_BYTES = 16 * 2**10

# Maps the bytes of a weight to a floating dtype of that size, since `dispatch` sends floating
# numbers. Elsewhere the bits are integers, because XLA may change the bits of a NaN.
_CARRIERS = {1: jnp.float8_e4m3fn, 2: jnp.bfloat16, 4: jnp.float32, 8: jnp.float64}

# The names of a layer's parameters whose first axis is the experts.
ADAPTERS = tuple(f"{name}_lora_{part}" for name in ("wi_0", "wi_1", "wo") for part in "ab")
ROUTED_WEIGHTS = ("wi_0", "wi_1", "wo", "wi_0_bias", "wi_1_bias", "wo_bias", *ADAPTERS)


def to_slots(tree: Any, placement: Placement) -> Any:
    """Copies the weights of E experts into the P slots of a placement; an empty slot is zero.

    Args:
        tree: a pytree; its leaves of experts are [E, ...], or [layers, E, ...] for the placement
            of several layers. NumPy arrays stay NumPy arrays.
        placement: the placement of one layer, `placement[layer]`, or of several.

    Returns:
        The tree, in which the leaves of experts are [P, ...] or [layers, P, ...]. A leaf keeps its
        dtype and kind of memory, and its sharding unless this would split slots unevenly: then all
        ranks have all slots. Inside `jax.jit`, XLA chooses shardings over Auto axes.

    Raises:
        ValueError: the shape of a leaf of experts begins with other sizes, or there is none.
    """
    slots = np.asarray(placement.expert_of_slot)
    lead = np.shape(placement.num_copies)
    return _map_experts(lambda leaf: _take(leaf, slots), tree, lead, size_name="E")


def to_experts(tree: Any, placement: Placement) -> Any:
    """Takes each expert's weights from the first slot that holds it: the inverse of `to_slots`.

    The leaves of experts are [P, ...] or [layers, P, ...], and become [E, ...] or [layers, E, ...].
    Else as `to_slots`.
    """
    first_slots = np.asarray(placement.slots_of_expert)[..., 0]
    lead = np.shape(placement.expert_of_slot)
    return _map_experts(lambda leaf: _take(leaf, first_slots), tree, lead, size_name="P")


def _take(leaf: Any, index: Array) -> Any:
    """Gathers entries `index`, [n] or [layers, n], of a leaf's experts or slots; -1 gives zeros."""
    gather = functools.partial(_gather, index=index)
    is_wide_float = jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits >= 8
    if isinstance(leaf, np.ndarray) or not is_wide_float:
        return gather(leaf)

    # Gathers floats as integers, because XLA may add floats of several devices to gather them,
    # which flushes subnormal floats to zero. Integers have no tangent, so the custom JVP rule
    # gathers the tangent.
    @jax.custom_jvp
    def gather_bits(leaf: jax.Array) -> jax.Array:
        return gather(leaf.view(f"uint{jnp.finfo(leaf.dtype).bits}")).view(leaf.dtype)

    gather_bits.defjvps(lambda tangent, out, leaf: gather(tangent))
    return gather_bits(leaf)


def _gather(leaf: Any, index: Array) -> Any:
    """Gathers as `_take`; keeps the memory kind, and a sharding that splits the new axis evenly."""
    axis, size = index.ndim - 1, index.shape[-1]
    index = index.reshape(*index.shape, *(1,) * (leaf.ndim - index.ndim))
    xp: Any = np if isinstance(leaf, np.ndarray) else jnp

    def gathered(leaf: Any) -> Any:
        entries = xp.take_along_axis(leaf, xp.asarray(np.maximum(index, 0)), axis)
        if index.min() < 0:
            entries = xp.where(xp.asarray(index) >= 0, entries, xp.zeros((), entries.dtype))
        return entries

    if xp is np:
        return gathered(leaf)
    # XLA gathers from the memory of devices, not of the host, so a leaf is moved there and back.
    sharding: Any = jax.typeof(leaf).sharding if is_traced(leaf) else leaf.sharding
    if isinstance(sharding, SingleDeviceSharding) and leaf.committed:
        leaf = jax.device_put(leaf, SingleDeviceSharding(*sharding.device_set))
        return jax.device_put(gathered(leaf), sharding)
    if not isinstance(sharding, NamedSharding):  # such as an uncommitted array's
        return gathered(leaf)
    mesh, spec = sharding.mesh, sharding.spec
    mesh_axes = checks.as_axes((spec[axis] if axis < len(spec) else None) or ())
    unsplit = PartitionSpec(*spec[:axis], None, *spec[axis + 1 :])
    splits_evenly = size % math.prod(mesh.shape[name] for name in mesh_axes) == 0
    new_sharding = sharding.update(spec=spec if splits_evenly else unsplit)
    # JAX cannot gather along an array axis that is split over an Explicit mesh axis. The mesh is
    # given to `reshard`, because the caller may have set no ambient mesh.
    if any(jax.typeof(leaf).sharding.spec[axis : axis + 1]):
        leaf = jax.sharding.reshard(leaf, NamedSharding(mesh, unsplit))
    if is_traced(leaf):
        # Only shardings over Explicit axes are kept; over Auto axes, XLA chooses.
        is_sharded = any(new_sharding.spec)
        return jax.sharding.reshard(gathered(leaf), new_sharding) if is_sharded else gathered(leaf)
    leaf = jax.device_put(leaf, NamedSharding(mesh, leaf.sharding.spec))
    return jax.device_put(gathered(leaf), new_sharding)


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
    the placement `before`: one on the same rank if that has a copy, else the copies of the expert
    share the sending. Each leaf is donated, and overwritten in pieces of up to about 64 MiB.

    Call it between steps, outside of `jax.jit`. It compiles a program for each leaf shape and each
    C: the largest number of slots that one slot sends to, rounded up to a power of two.

    Args:
        tree: a pytree, such as a train state; its leaves of experts (see `to_slots`) are
            [P, ...], or [layers, P, ...] for placements of several layers. A leaf on the devices of
            `mesh` keeps its sharding; any other leaf is split over `axis_name`. Each leaf stays in
            its kind of memory, such as "pinned_host".
        before: the placement that the tree has, of one layer or of several.
        after: the placement to move to, with the same numbers of layers, experts, slots and ranks.
        mesh: the mesh on which the weights are.
        axis_name: the mesh axis, or tuple of axes, that the slots are spread over.
        progress: called after each leaf as progress(bytes moved so far, bytes of all leaves).
        implementation: the implementation of the exchange; see `jax_ep.dispatch`.

    Returns:
        The tree with new arrays as leaves of experts; the old arrays are deleted.

    Raises:
        TypeError: `mesh` is not a `jax.sharding.Mesh` of devices.
        ValueError: sizes of the placements, the mesh and the leaves differ; a leaf has a dtype of
            less than 8 bits or a complex dtype; or there is no leaf of experts.
    """
    checks.check_mesh(mesh)
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
    leaves: list[jax.Array] = []  # the leaves of experts, which the next line collects
    _map_experts(leaves.append, tree, shape, size_name="P")
    for leaf in leaves:  # before any of them is donated
        if not _can_be_moved(leaf.dtype):
            raise ValueError(
                "tree must have leaves of experts whose dtype is bool or a real dtype of 8 bits or "
                f"more, but one of shape {np.shape(leaf)} has dtype {leaf.dtype}."
            )
    total = sum(leaf.nbytes for leaf in leaves)
    done = 0
    # By the old leaf's id. A tree may hold the same array at several places; it is moved once.
    moved_leaves: dict[int, jax.Array] = {}

    def move(leaf: jax.Array) -> jax.Array:
        nonlocal done
        if id(leaf) not in moved_leaves:
            moved_leaves[id(leaf)] = _move(leaf, plan, mesh, axes, implementation)
        done += leaf.nbytes
        if progress is not None:
            progress(done, total)
        return moved_leaves[id(leaf)]

    return _map_experts(move, tree, shape, size_name="P")


def _move(
    leaf: Any, plan: Array, mesh: Mesh, axes: tuple[str, ...], implementation: Implementation
) -> jax.Array:
    """Moves a leaf to the slots that `plan`, of `_destinations`, names, and deletes the leaf."""
    axis = plan.ndim - 2  # of the slots: 1 after an axis of layers, else 0
    old = getattr(leaf, "sharding", None)  # None for a NumPy array
    is_on_mesh = old is not None and old.device_set == set(mesh.devices.flat)
    # The sharding while rows move. Without a memory kind, it is in the memory of the devices.
    moving: Any = NamedSharding(mesh, PartitionSpec(*(None,) * axis, axes))
    if is_on_mesh and isinstance(old, NamedSharding):
        moving = NamedSharding(old.mesh, old.spec)
    moved = jax.device_put(leaf, moving)
    if moved.size > 0:
        of_plan = NamedSharding(moving.mesh, PartitionSpec(*moving.spec[: axis + 1]))
        # The caller may have set another mesh.
        with jax.set_mesh(moving.mesh):
            move = _mover(moving.mesh, moving.spec, axis, implementation)
            moved = move(moved, jax.device_put(plan, of_plan))
        if isinstance(leaf, jax.Array):
            # Frees a leaf that `device_put` has copied: only the copy was donated.
            leaf.delete()
    kind: str | None = getattr(old, "memory_kind", None)
    new = old if is_on_mesh else NamedSharding(mesh, moving.spec, memory_kind=kind)
    return jax.device_put(moved, new)


def _can_be_moved(dtype: Any) -> bool:
    """Whether the exchange moves values of a dtype: bools, and real numbers of at least a byte."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.finfo(dtype).bits >= 8
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).bits >= 8
    return jnp.issubdtype(dtype, jnp.bool_)


def _destinations(before: Placement, after: Placement) -> Array:
    """Lists the slots of `after` that each slot of `before` sends to, [.., P, C], or -1."""
    # C is that of `redistribute`.
    shape = np.shape(before.expert_of_slot)
    num_slots, per_rank = shape[-1], shape[-1] // before.num_ranks
    old = np.asarray(before.expert_of_slot).reshape(-1, num_slots)
    new = np.asarray(after.expert_of_slot).reshape(-1, num_slots)
    sent: list[list[list[int]]] = []  # by layer and source slot, the slots that receive its weights
    for held, wanted in zip(old, new, strict=True):
        of_layer: list[list[int]] = [[] for _ in range(num_slots)]
        # Unchanged slots come first, so that the loads of copies below already count them.
        for slot in np.argsort(held != wanted, kind="stable"):
            copies = np.flatnonzero(held == wanted[slot])
            if wanted[slot] < 0 or held[slot] == wanted[slot]:
                # A slot that keeps its expert, or becomes empty, receives its own weights: every
                # slot must receive the weights of exactly one slot.
                source = slot
            else:
                far = copies // per_rank != slot // per_rank
                load = [len(of_layer[copy]) for copy in copies]
                # The copy that sends least, of those on the same rank if there are any.
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
    mesh: Mesh, spec: PartitionSpec, axis: int, implementation: Implementation
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Makes the jitted function (leaf, plan of `_destinations`) -> leaf, which donates the leaf."""
    # The plan's axes of layers and slots are split over the mesh like the leaf's.
    of_plan = PartitionSpec(*spec[: axis + 1])
    # The mesh axes that split the slots, along which rows are exchanged; there may be none.
    axes = checks.as_axes((spec[axis] if axis < len(spec) else None) or ())

    def on_rank(leaf: jax.Array, plan: jax.Array) -> jax.Array:
        lead = leaf.shape[: axis + 1]
        # The length of a row: the weights' last axis, doubled while `_ROW_BYTES` allow.
        *others, columns = leaf.shape[axis + 1 :] or (1,)
        count = math.prod(others)
        while count % 2 == 0 and 2 * columns * leaf.dtype.itemsize <= _ROW_BYTES:
            columns, count = 2 * columns, count // 2
        # The bits of each slot's weights as M rows: [layers, P / N, M, columns].
        rows = leaf.view(f"uint{8 * leaf.dtype.itemsize}")
        rows = rows.reshape(math.prod(lead[:-1]), lead[-1], -1, columns)
        plan = plan.reshape(*rows.shape[:2], plan.shape[-1])
        rows = _move_rows(rows, plan, axes, implementation)
        return rows.reshape(leaf.shape).view(leaf.dtype)

    moved = jax.shard_map(on_rank, mesh=mesh, in_specs=(spec, of_plan), out_specs=spec)
    return jax.jit(moved, donate_argnums=0)


def _move_rows(
    rows: jax.Array, plan: jax.Array, axes: tuple[str, ...], implementation: Implementation
) -> jax.Array:
    """Sends this rank's slots as rows [layers, P / N, M, columns]; returns those received."""
    # `plan` [layers, P / N, C] is this rank's part of `_destinations`.
    # One `dispatch` sends equally many rows of each slot of one layer, as many as `_PIECE_BYTES`
    # allow. In it, slots take the place of experts: each receives the rows of exactly one slot.
    layers, num_slots, num_rows, columns = rows.shape
    bytes_of_rows = num_slots * columns * rows.dtype.itemsize  # one row of each slot
    most = max(1, _PIECE_BYTES // bytes_of_rows)
    piece = max(size for size in range(1, min(num_rows, most) + 1) if num_rows % size == 0)
    pieces = num_rows // piece

    def move(i: jax.Array, rows: jax.Array) -> jax.Array:
        layer, start = i // pieces, i % pieces * piece
        zero = jnp.zeros_like(layer)  # since all indices must have one dtype
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


def _map_experts(function: Any, tree: Any, lead: tuple[int, ...], *, size_name: str) -> Any:
    """Applies a function to the leaves of experts' weights, whose shapes must begin with `lead`."""
    # `lead` ends with E or P, which `size_name` names in the error.
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
            f"placement has {size_name}={lead[-1]}, but has shape {shape}."
        )

    return jax.tree.map_with_path(visit, tree)


def _of_experts(path: Any) -> bool:
    """Returns whether a key in the path of a leaf names one of `ROUTED_WEIGHTS`."""
    names: list[str] = []
    for entry in path:
        key = getattr(entry, "key", getattr(entry, "name", None))  # of a dict, or an attribute
        # In a flattened dict, a key may be a tuple of names, or names joined by "/" or ".".
        for part in key if isinstance(key, tuple) else (key,):
            names += re.split(r"[./]", part) if isinstance(part, str) else []
    return any(name in ROUTED_WEIGHTS for name in names)
