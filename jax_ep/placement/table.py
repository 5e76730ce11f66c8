"""Defines `Placement`, arrays that say which expert's weights each slot of each rank holds."""

from __future__ import annotations

import dataclasses
import functools
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import checks
from jax_ep.runtime.jax_compat import is_traced, register_for_export

Array = np.ndarray[Any, Any]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["expert_of_slot", "slots_of_expert", "num_copies"],
    meta_fields=["num_ranks"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Says which slot holds which expert, layer by layer; a pytree of int32 arrays.

    A slot holds the weights of one expert. There are E experts and P slots; slot s is on rank
    s // (P / num_ranks). An expert has at most C = P - E + 1 copies. Make a placement with
    `Placement.of` or `Placement.in_order`. A layer's call takes the placement of one layer, whose
    arrays lack the leading axis: `placement[layer]`, or what `jax.lax.scan` gives its body.

    Attributes:
        expert_of_slot: [layers, P] int32, the expert that each slot holds; -1 for an empty slot.
        slots_of_expert: [layers, E, C] int32, the slots that hold each expert, in rising order,
            padded with -1.
        num_copies: [layers, E] int32, the number of slots that hold each expert, at least 1.
        num_ranks: N, the number of ranks.
    """

    expert_of_slot: Array
    slots_of_expert: Array
    num_copies: Array
    num_ranks: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Placement):
            return NotImplemented
        same = self.num_ranks == other.num_ranks
        names = ("expert_of_slot", "slots_of_expert")  # which determine `num_copies`
        return same and all(np.array_equal(getattr(self, n), getattr(other, n)) for n in names)

    @classmethod
    def of(cls, expert_of_slot: Any, *, num_experts: int, num_ranks: int) -> Placement:
        """Makes a placement from the expert of each slot, [layers, P] integers; -1: an empty slot.

        Raises:
            ValueError: num_ranks does not divide P, an id is not below num_experts, or an expert
                has no slot in some layer.
        """
        slots = np.asarray(expert_of_slot)
        checks.check_array("expert_of_slot", slots, 2, jnp.integer, "[layers, P]")
        num_experts = checks.check_integer("num_experts", num_experts)
        num_ranks = checks.check_integer("num_ranks", num_ranks)
        layers, num_slots = slots.shape
        check_slots(num_slots, num_experts, num_ranks)
        if slots.size and not -1 <= slots.min() <= slots.max() < num_experts:
            raise ValueError(
                f"expert_of_slot must hold ids below num_experts={num_experts}, or -1, but holds "
                f"{slots.min()} to {slots.max()}."
            )
        copies = np.zeros((layers, num_experts), np.int32)
        slots_of_expert = np.full((layers, num_experts, num_slots - num_experts + 1), -1, np.int32)
        for layer, slot in zip(*np.nonzero(slots >= 0), strict=True):
            expert = slots[layer, slot]
            # If an expert has more than C copies, another one has none, and an error follows.
            if copies[layer, expert] < slots_of_expert.shape[2]:
                slots_of_expert[layer, expert, copies[layer, expert]] = slot
            copies[layer, expert] += 1
        missing = np.argwhere(copies == 0)
        if len(missing):
            layer, expert = missing[0]
            raise ValueError(f"expert_of_slot has no slot for expert {expert} in layer {layer}.")
        return cls(slots.astype(np.int32), slots_of_expert, copies, num_ranks)

    @classmethod
    def in_order(
        cls, *, num_experts: int, num_slots: int, num_ranks: int, layers: int = 1
    ) -> Placement:
        """Makes the placement that new layers have: in each layer, slot s holds expert s % E."""
        num_slots = checks.check_integer("num_slots", num_slots)
        slots = np.arange(num_slots) % checks.check_integer("num_experts", num_experts)
        tiled = np.tile(slots, (checks.check_integer("layers", layers), 1))
        return cls.of(tiled, num_experts=num_experts, num_ranks=num_ranks)

    def __getitem__(self, layer: int) -> Placement:
        if np.ndim(self.expert_of_slot) != 2:
            raise TypeError("this Placement describes one layer, so it cannot be indexed by layer.")
        # Without this check, an index out of bounds would be clamped if the arrays are JAX arrays.
        layers = np.shape(self.expert_of_slot)[0]
        if not is_traced(layer) and not -layers <= layer < layers:
            raise IndexError(
                f"layer must be one of the {layers} of this Placement, but is {layer}."
            )
        return jax.tree.map(lambda array: array[layer], self)

    def rank_load(self, load: Any) -> Array:
        """Returns the load of each rank: float64 [layers, N], or [N] for one layer's placement.

        The copies of an expert share its load, `load` [layers, E] or [E], evenly. Raises ValueError
        if `load` has another shape, or is negative or not finite.
        """
        copies = np.asarray(self.num_copies)
        shape = "[layers, E]" if copies.ndim == 2 else "[E]"
        load = checked_load(load, shape, copies.ndim)
        if load.shape != copies.shape:
            raise ValueError(
                f"load must have shape {shape} = {copies.shape}, but has shape {load.shape}."
            )
        return rank_load(load, self, np)

    def save(self, path: str | Path) -> None:
        """Writes the placement to a .json or .npz file, which `Placement.load` reads."""
        path = Path(path)
        sizes = {"num_experts": self.num_copies.shape[-1], "num_ranks": self.num_ranks}
        if _suffix(path) == ".json":
            path.write_text(json.dumps(sizes | {"expert_of_slot": self.expert_of_slot.tolist()}))
        else:
            np.savez_compressed(path, expert_of_slot=self.expert_of_slot, **sizes)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: str | Path) -> Placement:
        """Reads a .json or .npz file that `Placement.save` wrote; ValueError if it holds none."""
        path = Path(path)
        is_json = _suffix(path) == ".json"
        try:
            fields = json.loads(path.read_text()) if is_json else read_arrays(path)
            slots = np.asarray(fields["expert_of_slot"])
            placed = cls.of(
                slots[None] if slots.ndim == 1 else slots,
                num_experts=int(fields["num_experts"]),
                num_ranks=int(fields["num_ranks"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} must hold a placement that Placement.save wrote: {error}"
            ) from error
        return placed[0] if slots.ndim == 1 else placed


register_for_export(Placement)


def read_arrays(path: str | Path) -> dict[str, Array]:
    """Reads all arrays of an .npz file, by name. Raises ValueError if it is not an .npz file."""
    try:
        # From an .npy file, np.load returns an array, for which `with` raises TypeError.
        with np.load(path) as arrays:
            return dict(arrays)
    except (TypeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError("it is not an .npz file of arrays, or is damaged") from error


def rank_load(load: Any, placement: Placement, xp: Any) -> Any:
    """Computes `Placement.rank_load` by the module `xp`, NumPy or `jax.numpy`, in load's dtype."""
    slots = xp.asarray(placement.expert_of_slot)
    copies = xp.asarray(placement.num_copies).astype(load.dtype)
    share = xp.take_along_axis(load / copies, xp.maximum(slots, 0), -1)
    share = xp.where(slots >= 0, share, 0)
    return share.reshape(*load.shape[:-1], placement.num_ranks, -1).sum(-1)


def checked_load(load: Any, shape: str = "[layers, E]", ndim: int = 2) -> Array:
    """Returns `load` as float64; raises unless it has `ndim` axes of finite numbers from 0 on."""
    load = np.asarray(load)
    checks.check_array("load", load, ndim, jnp.number, shape, may_be_empty=False)
    load = load.astype(np.float64)
    with np.errstate(over="ignore"):  # of the sum, which is then infinite
        is_finite = np.isfinite(load.sum())
    if not is_finite or load.min() < 0:
        raise ValueError(
            "load must be finite and not negative, and its sum finite, but it ranges from "
            f"{load.min()} to {load.max()}."
        )
    return load


def check_ranks(num_ranks: int, num_hosts: int) -> None:
    checks.check_integer("num_ranks", num_ranks)
    if num_ranks % checks.check_integer("num_hosts", num_hosts):
        raise ValueError(
            f"num_ranks must be a multiple of num_hosts={num_hosts}, but is {num_ranks}."
        )


def check_slots(num_slots: int, num_experts: int, num_ranks: int) -> None:
    if num_slots % num_ranks or num_slots < num_experts:
        raise ValueError(
            f"num_slots must be a multiple of the {num_ranks} ranks and at least the "
            f"{num_experts} experts, but is {num_slots}."
        )


def _suffix(path: Path) -> str:
    """Returns ".json" or ".npz"; raises ValueError if `path` ends in neither."""
    if path.suffix not in (".json", ".npz"):
        raise ValueError(f"path must end in .json or .npz, but is {str(path)!r}.")
    return path.suffix
