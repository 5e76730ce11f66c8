"""What every kernel is written against: its rank, its peers' buffers, signals, and a way to run it.

Two fabrics give the same kernel body two ways to run:

  Gpus     each rank has a GPU; see `symmetric`.
  Stacked  all ranks' buffers are stacked along a leading axis of one array and the rank is a grid
           axis. The simulator of the tests makes a fabric of it that runs whole kernels, all ranks
           at once, in Pallas' GPU interpreter with race detection.

A block talks only to the blocks of its own index on other ranks, but for what block 0 sends all of
a peer's when it begins. So a grid may be larger than the GPU without a deadlock, as long as every
rank starts its blocks in order.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import ptx
from pallas_kernels.fabric.plan import LANES

NOWHERE = -1  # in place of a row, or of an expert
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS


class Ranks(Protocol):
    """What a kernel runs on."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def stacked(self) -> bool:
        """Whether all of them are on one device."""

    @property
    def interpret(self) -> Any:
        """The options of Pallas' GPU interpreter; None on a GPU."""

    @property
    def operands(self) -> Sequence[jax.Array]:
        """What the fabric needs from outside of the kernel: the first operands of it."""

    def scratch_types(self, num_buffers: int) -> dict[str, Any]:
        """What the fabric keeps in shared memory, where peers reach so many buffers."""

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of a buffer of all ranks of this device, given that of one rank."""

    def enter(
        self, operands: Sequence[Any], buffers: Sequence[Any], *, name: str, num_blocks: int,
        reads: bool, **scratch: Any,
    ) -> None:  # fmt: skip
        """Begins a call; see `symmetric.Gpus.enter`."""


class Fabric(Ranks, Protocol):
    """What connects the ranks of a kernel."""

    def connect(self) -> None:
        """Waits until this warpgroup may use `peer`."""

    def rank(self) -> jax.Array: ...

    def mine(self, ref: Any) -> Any:
        """This rank's part of a buffer."""

    def peer(self, ref: Any, rank: Any) -> Any:
        """The same buffer on another rank."""

    def signal(self, channel: int, count: Any, *, release: bool = True) -> None:
        """Tells every rank that this block has come to `count` on a channel."""

    def wait(self, channel: int, count: Any, what: str) -> None:
        """Waits until this block of every rank has come to `count` on a channel."""

    def send_words(self, words: Any) -> None:
        """Sends int32 words to every rank."""

    def receive_words(self, words: Any, what: str) -> None:
        """Waits for the words of every rank."""

    def barrier(self) -> None:
        """All threads of this warpgroup come here before any goes on."""

    def async_fence(self) -> None:
        """What this warpgroup has waited for, its bulk copies see too."""

    def stage(self, number: int) -> None:
        """Names a point of a kernel at which a test may hold ranks back by different times."""


@dataclasses.dataclass(frozen=True)
class Stacked:
    """Ranks stacked along the leading axis of every buffer of one device."""

    num_ranks: int
    interpret: Any = None

    stacked = True
    operands = ()

    def scratch_types(self, num_buffers: int) -> dict[str, Any]:
        return {}

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (self.num_ranks, *shape)

    def enter(self, operands: Sequence[Any], buffers: Sequence[Any], **_: Any) -> None:
        pass

    def connect(self) -> None:
        pass

    def rank(self) -> jax.Array:
        return lax.axis_index("rank")

    def mine(self, ref: Any) -> Any:
        return ref.at[self.rank()]

    def peer(self, ref: Any, rank: Any) -> Any:
        return ref.at[rank]

    def signal(self, channel: int, count: Any, *, release: bool = True) -> None:
        raise NotImplementedError("ranks on one device signal each other only in the simulator.")

    def wait(self, channel: int, count: Any, what: str) -> None:
        raise NotImplementedError("ranks on one device wait for each other only in the simulator.")

    def send_words(self, words: Any) -> None:
        raise NotImplementedError("ranks on one device send words only in the simulator.")

    def receive_words(self, words: Any, what: str) -> None:
        raise NotImplementedError("ranks on one device receive words only in the simulator.")

    def barrier(self) -> None:
        raise NotImplementedError("ranks on one device meet only in the simulator.")

    def async_fence(self) -> None:
        pass

    def stage(self, number: int) -> None:
        pass


def kernel(
    fabric: Ranks,
    body: Callable[..., None],
    *,
    name: str,
    num_blocks: int,
    num_warpgroups: int,
    out_type: Sequence[jax.ShapeDtypeStruct],
    scratch_types: dict[str, Any],
    shared: Sequence[int] = (),
) -> Callable[..., Any]:
    """A kernel of `num_blocks` blocks per rank; `body` gets input, output and scratch refs.

    Args:
      out_type: one rank's.
      shared: which of the inputs and outputs, in this order, peers reach.

    Nothing but `fabric.barrier` orders the threads of a warpgroup: what one thread writes and
    another reads, in shared memory, needs a barrier between the two.
    """
    of_fabric = fabric.scratch_types(len(shared))
    grid: dict[str, Any] = dict(grid=(num_blocks,), grid_names=("block",))
    if fabric.stacked:
        grid = dict(grid=(fabric.num_ranks, num_blocks), grid_names=("rank", "block"))

    def call(*operands: jax.Array) -> Any:
        num_own, reads = len(fabric.operands), any(i < len(operands) for i in shared)

        def run(*refs: Any, **scratch: Any) -> None:
            own, refs = refs[:num_own], refs[num_own:]
            fabric.enter(
                own,
                [refs[i] for i in shared],
                name=name,
                num_blocks=num_blocks,
                reads=reads,
                **{key: scratch.pop(key) for key in of_fabric},
            )
            body(*refs, **scratch)

        wanted = plgpu.kernel(
            run,
            out_type=[jax.ShapeDtypeStruct(fabric.shape(t.shape), t.dtype) for t in out_type],
            scratch_types={**scratch_types, **of_fabric},
            num_threads=num_warpgroups,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
            ),
            interpret=fabric.interpret,
            kernel_name=name,
            **grid,
        )
        # Whatever the caller's default integers are, the body's are int32: only 64-bit payloads,
        # which such a body moves but does not count with, need the wider types.
        wide = any(operand.dtype.itemsize == 8 for operand in operands)
        with jax.enable_x64(wide):
            return wanted(*fabric.operands, *operands)

    return call


def load(fabric: Ranks, ref: Any, vector: int) -> jax.Array:
    """Loads a contiguous 1D vector into registers, `vector` neighbours to a thread."""
    if fabric.interpret:
        return ref[...]
    layout = plgpu.Layout.WG_STRIDED(ref.shape, vec_size=vector)
    return plgpu.load(ref, layout=layout)


def put_if(fabric: Fabric, predicate: jax.Array, source: Any, destination: Any) -> None:
    """Starts a copy from shared memory, in the open group; without a branch on a GPU."""
    if not fabric.interpret:
        plgpu.copy_smem_to_gmem(source, destination, predicate=predicate, commit_group=False)
        return

    @pl.when(predicate)
    def _() -> None:
        plgpu.copy_smem_to_gmem(source, destination, commit_group=False)


def iota(fabric: Fabric, size: int, vector: int = 1) -> jax.Array:
    """[size] int32 in registers, `vector` neighbours to a thread."""
    if fabric.interpret:
        return jnp.arange(size, dtype=jnp.int32)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)
    return plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)


def clear(ref: Any, size: int) -> None:
    """ref[:size] = 0, for whole vectors of int32."""
    for start in range(0, size, LANES):  # a store of more zeros wants a power of two of them
        ref[pl.ds(start, LANES)] = jnp.zeros((LANES,), jnp.int32)


def count(fabric: Fabric, bins: Any, values: jax.Array, num_bins: int) -> None:
    """bins[v] += 1 in shared memory for each of the values [n] in registers that is in range."""
    if fabric.interpret:
        found = jnp.sum(values[:, None] == jnp.arange(bins.shape[0]), axis=0, dtype=jnp.int32)
        bins[...] += jnp.where(jnp.arange(bins.shape[0]) < num_bins, found, 0)
    else:
        ptx.count(bins, values, num_bins)


def first_peer(fabric: Fabric) -> jax.Array:
    """The rank, modulo N, that a block communicates with first; blocks differ in it."""
    return fabric.rank() + lax.axis_index("block")


def any_of(places: Sequence[jax.Array]) -> jax.Array:
    """Whether any of the places is a row, and not NOWHERE."""
    return functools.reduce(operator.or_, [place >= 0 for place in places])


def drain(empty: Any, used: jax.Array, num_slots: int) -> None:
    """Waits until every slot of a ring that was ever filled is empty again."""

    def wait(i: jax.Array, _: None) -> None:
        plgpu.barrier_wait(empty.at[lax.rem(used - 1 - i, jnp.int32(num_slots))])

    lax.fori_loop(0, jnp.minimum(used, num_slots), wait, None)
