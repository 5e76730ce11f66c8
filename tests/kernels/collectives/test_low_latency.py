"""Tests of the low-latency protocol: simulated with ranks delayed, and a program's channels."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from support import simulator
from support.collectives import (
    AXIS,
    KERNELS,
    assert_same_bits,
    call,
    in_rank_order,
    one_axis,
    operand,
)
from support.kernels import lowered, needs_kernels, on_ranks, pass_for_gpus
from support.meshes import cuda_mesh
from support.selection import quick
from support.simulator import (
    KernelError,
    SimulatedChannels,
    TileContents,
    simulate,
    simulated,
    simulated_channels,
)

from jax_ep.collectives import api as collectives
from jax_ep.runtime import jax_compat
from pallas_kernels.collectives import low_latency as ll
from pallas_kernels.collectives import tiles
from pallas_kernels.collectives.tiles import TilePlan, tile_length
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import memory_map
from pallas_kernels.fabric.low_latency import Channels, Endpoint, TileMemory

# ------------------------------------------------------------------ groups of ranks, and room


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups into which axes of a mesh divide its places; each group communicates alone."""

    shape: tuple[int, ...]
    # The axes of the ranks; the last one varies fastest.
    axes: tuple[int, ...]

    @property
    def channels(self) -> tuple[tuple[int, int], ...]:
        strides = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        return tuple((strides[axis], self.shape[axis]) for axis in self.axes)

    @property
    def places(self) -> np.ndarray:
        """Returns the place in the mesh of each rank of each group, [groups, N]."""
        places = np.arange(math.prod(self.shape)).reshape(self.shape)
        others = [axis for axis in range(len(self.shape)) if axis not in self.axes]
        num_ranks = math.prod(self.shape[axis] for axis in self.axes)
        return places.transpose(*others, *self.axes).reshape(-1, num_ranks)

    def each(self, expected: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
        """Computes the expected results of a collective that each group runs alone."""
        results = [expected(x[group]) for group in self.places]
        order = np.argsort(self.places.reshape(-1))
        return np.concatenate(results)[order]


@simulated
@pytest.mark.parametrize(
    ("mesh", "axes"), quick([((2, 2), (1, 0)), ((2, 3), (0,))], ((2, 2), (1, 0)))
)
def test_calls_of_all_kernels_one_after_another(mesh, axes):
    """Calls of all kernels, one after another with the same tile buffers, must be right."""
    memory, count = TileContents(), math.prod(mesh)
    groups, alone = Groups(mesh, axes), Groups(mesh, (1,))
    devices = tuple(map(int, np.random.default_rng(count).permutation(count)))
    for i, name in enumerate(KERNELS):
        shape, expected = KERNELS[name]
        ranks = (groups, alone)[i % 2]
        x = operand((count, *shape(ranks.places.shape[1], 2048)[1:]), "bfloat16", seed=i)
        channels = simulated_channels(ranks.channels, devices, memory)
        run = functools.partial(call, name, channels, jnp.asarray(x), plan=TilePlan(1, 1 + i % 2))
        assert_same_bits(simulate(run), ranks.each(expected, x))


@needs_kernels
@pytest.mark.parametrize(
    ("name", "size", "plan"),
    [
        # The calls need six tiles, and 513 workers.
        ("two_shot", 3 * 512, TilePlan(1, 1)),
        ("one_shot", 513 * 512, TilePlan(513, 1)),
    ],
)
def test_what_needs_more_than_there_is_is_refused(name, size, plan):
    channels = Channels(((1, 2),), (0, 1), TileMemory(memory_map.BASE, 2))
    x = jnp.zeros(KERNELS[name][0](2, size)[1:], jnp.float32)
    with pytest.raises(AssertionError, match=f"{name}_ll', TilePlan"):
        getattr(ll, name)(x, channels=channels, plan=plan)


# ----------------------------------------------- the protocol in the simulator, with ranks delayed


def wait_for_the_others(simulation: Any, thread: Any) -> None:
    """Makes the first GPU wait until the others need it to go on."""
    if thread.block_id == 0:
        simulation.fall_behind(thread)


class LateToTake(SimulatedChannels):
    """Channels in which a GPU sends its tiles on time, but takes the others' as late as it can."""

    def hold_back(self, point, rank):
        if point == 1:
            simulator._on_host(wait_for_the_others)


def sum_and_go_on(endpoint: Endpoint, part: jax.Array) -> jax.Array:
    """Makes one call of the low-latency protocol within a kernel: sums `part` over the ranks."""
    endpoint.delay_point(0)
    endpoint.send(0, [part] * len(endpoint.peers))
    endpoint.delay_point(1)
    total = endpoint.sum(0, part)
    endpoint.delay_point(2)
    endpoint.close()
    return total * 0.5 + endpoint.rank.astype(jnp.float32)


def several_calls(
    x: np.ndarray,
    several: Sequence[SimulatedChannels],
    calls: int,
    kind: type[Endpoint] = Endpoint,
) -> np.ndarray:
    """Makes calls of the low-latency protocol within one kernel; `kind` may have a fault.

    Within a kernel, a rank may run ahead of others. Between two, the simulator lets all meet.
    """
    first, tile = several[0], tile_length(x.dtype)

    def body(index_ref: Any, x_ref: Any, out_ref: Any) -> None:
        worker = lax.axis_index("warpgroup")
        where = pl.ds(worker * tile, tile)
        part = tiles.load(first.mine(x_ref).at[where])
        for i in range(calls):
            channels = several[i % len(several)]
            endpoint = kind(channels, channels.mine(index_ref)[0], worker, "a test")
            part = sum_and_go_on(endpoint, part)
        tiles.store(first.mine(out_ref).at[where], part)

    def run() -> jax.Array:
        kernel = fb.kernel(
            first,
            body,
            name="several_calls",
            num_blocks=1,
            num_warpgroups=x.shape[1] // tile,
            out_type=[jax.ShapeDtypeStruct(x.shape[1:], x.dtype)],
            scratch_types={},
        )
        return kernel(first.mesh_index, jnp.asarray(x))[0]

    return simulate(run)


def integers(num_places: int) -> np.ndarray:
    """Draws operands [places, size] of small integers, with two tiles, for two workers."""
    shape = (num_places, 2 * tile_length("float32"))
    return np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32)


def after_calls(x: np.ndarray, several: Sequence[Groups], calls: int) -> np.ndarray:
    def next_operand(x: np.ndarray) -> np.ndarray:
        return in_rank_order(x) * np.float32(0.5) + np.arange(len(x), dtype=np.float32)[:, None]

    for i in range(calls):
        x = several[i % len(several)].each(next_operand, x)
    return x


@simulated
@pytest.mark.parametrize("kind", quick([SimulatedChannels, LateToTake], LateToTake))
@pytest.mark.parametrize(
    ("several", "devices"),
    quick(
        {
            "all": ([Groups((3,), (0,))], (0, 1, 2)),
            # Calls alternate between groups of ranks.
            "groups": ([Groups((2, 2), axes) for axes in ((0,), (1,), (0, 1))], (3, 1, 0, 2)),
        },
        "all",
    ),
)
def test_calls_overtake_no_tile_buffer(several, devices, kind):
    """Calls must not overwrite a tile before it is taken."""
    memory, x = TileContents(), integers(len(devices))
    channels = [
        simulated_channels(groups.channels, devices, memory, kind=kind) for groups in several
    ]
    # With an odd number of calls, the next kernel begins with the second set of tile buffers.
    for calls in (7, 3):
        got = several_calls(x, channels, calls)
        assert_same_bits(got, after_calls(x, several, calls))


class AlwaysTheSameSet(Endpoint):
    def _buffer_number(self, sender, receiver, calls, index):
        return super()._buffer_number(sender, receiver, calls & 0, index)


class SendsATileMore(Endpoint):
    def close(self):
        self.send(3, [jnp.zeros(tile_length("float32"))] * len(self.peers))
        super().close()


FAULTS = {
    "one set of buffers": (AlwaysTheSameSet, 2, LateToTake, 4, "a tile of rank 1 overtakes one"),
    "tiles that nobody takes": (SendsATileMore, 2, SimulatedChannels, 1, "nobody has taken"),
}


@simulated
@pytest.mark.parametrize(
    ("endpoint", "num_ranks", "kind", "calls", "message"), FAULTS.values(), ids=FAULTS
)
def test_a_faulty_endpoint_is_found(endpoint, num_ranks, kind, calls, message):
    with pytest.raises(KernelError, match=message):
        several_calls(integers(num_ranks), [one_axis(num_ranks, kind=kind)], calls, endpoint)


# ------------------------------------------------------------------ programs lowered for CUDA


@needs_kernels
@pytest.mark.parametrize(
    ("num_ranks", "hidden", "algorithm", "most_rows"),
    [
        # Each of two rows has two tiles.
        (2, 4100, "fused_one_shot_ll", 2 * 128),
        # A rank has one row of two tiles, which is sent twice.
        (2, 8192, "fused_two_shot_ll", 2 * 128),
        (2, 8200, "fused_two_shot_ll", 0),
    ],
)
def test_rows_that_a_fused_norm_has_room_for(num_ranks, hidden, algorithm, most_rows):
    def apply(x):
        scale = jnp.ones((hidden,))
        return collectives.all_reduce_rms_norm(x, x, scale, AXIS, algorithm=algorithm)[0]

    def lower(rows):
        program = on_ranks(apply, cuda_mesh((num_ranks,), (AXIS,)))
        return lowered(program, jax.ShapeDtypeStruct((num_ranks * rows, hidden), jnp.bfloat16))

    if most_rows:
        assert lower(most_rows).count("custom_call @mosaic_gpu") == 1
    with pytest.raises(ValueError, match=f'"{algorithm}".*is too large for the buffers'):
        lower(most_rows + 1)


AXES_OF_A_PROGRAM = [("a", ((2, 2),)), ("b", ((1, 2),)), (("b", "a"), ((1, 2), (2, 2)))]


@needs_kernels
@pytest.mark.needs_devices(5)
def test_channels_of_a_program(monkeypatch):
    """A program's channels must know each place's GPU, and the strides of the ranks' axes."""
    gpus, devices = (2, 0, 4, 1), pass_for_gpus(monkeypatch, 5)
    monkeypatch.setattr(jax_compat, "platform_of_traced_mesh", lambda: "gpu")
    mesh = Mesh(np.asarray([devices[4 - i] for i in gpus]).reshape(2, 2), ("a", "b"))
    # The memory is that of all GPUs, since programs on some of them use the same tile buffers.
    memory = TileMemory(memory_map.BASE, 5)
    noted, call = [], ll.call

    def note(*args, channels, **options):
        noted.append(channels)
        return call(*args, channels=channels, **options)

    monkeypatch.setattr(ll, "call", note)
    for axis_name, axes in AXES_OF_A_PROGRAM:
        gather = functools.partial(collectives.all_gather, axis_name=axis_name, algorithm="ll")
        lowered(on_ranks(gather, mesh), jax.ShapeDtypeStruct((16, 1024), jnp.bfloat16))
        channels = noted[-1]
        assert channels.axes == axes and channels.gpus == gpus and channels.memory == memory
