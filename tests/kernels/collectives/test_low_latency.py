"""Tests of the low-latency protocol: simulated with ranks delayed, and a program's channels."""

from __future__ import annotations

import dataclasses
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
    places,
)
from support.kernels import lowered, needs_kernels, on_ranks
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
from jax_ep.runtime import availability, jax_compat, symmetric_memory
from pallas_kernels.collectives import low_latency as ll
from pallas_kernels.collectives import tiles
from pallas_kernels.collectives.all_reduce_rms_norm import low_latency_all_reduce_rms_norm
from pallas_kernels.collectives.tiles import TilePlan, tile_length
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import memory_map
from pallas_kernels.fabric.low_latency import Channels, Endpoint, TileMemory
from pallas_kernels.fabric.memory_map import MAX_WORKERS


def run(name: str, x: np.ndarray, channels: SimulatedChannels, plan: TilePlan) -> np.ndarray:
    """Simulates a kernel; x and the result are stacked by the rank's place in the mesh."""
    return simulate(lambda: call(name, channels, jnp.asarray(x), plan=plan))


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


MESHES = {
    "first": Groups((2, 3), (0,)),
    "second": Groups((2, 3), (1,)),
    "both": Groups((2, 2), (0, 1)),
    "both_swapped": Groups((2, 2), (1, 0)),
    "outer": Groups((2, 2, 2), (2, 0)),
}


@simulated
@pytest.mark.parametrize("groups", quick(MESHES, "both_swapped"))
def test_groups_of_a_mesh_whose_devices_are_in_any_order(groups):
    count = math.prod(groups.shape)
    devices = np.random.default_rng(count).permutation(count)
    num_ranks = groups.places.shape[1]
    for name in ("two_shot", "all_to_all", "all_gather"):
        shape, expected = KERNELS[name]
        x = operand((count, *shape(num_ranks, 1024)[1:]), "bfloat16")
        channels = simulated_channels(groups.channels, map(int, devices))
        out = run(name, x, channels, TilePlan(1, 1))
        assert_same_bits(out, groups.each(expected, x))


@pytest.mark.slow
@simulated
def test_calls_of_all_kernels_one_after_another():
    """Calls of all kernels, one after another with the same tile buffers, must be right."""
    memory, mesh = TileContents(), (2, 2)
    plans = (TilePlan(2, 1), TilePlan(1, 1), TilePlan(1, 2))
    for i, name in enumerate([*KERNELS, *KERNELS]):
        shape, expected = KERNELS[name]
        groups = Groups(mesh, ((0,), (1,), (1, 0))[i % 3])
        x = operand((4, *shape(groups.places.shape[1], 2048)[1:]), "bfloat16", seed=i)
        # From the sixth call on, the program has its GPUs in another order.
        devices = (0, 1, 2, 3) if i < 5 else (2, 0, 3, 1)
        channels = simulated_channels(groups.channels, devices, memory)
        assert_same_bits(run(name, x, channels, plans[i % 3]), groups.each(expected, x))


@needs_kernels
def test_what_needs_more_than_there_is_is_refused():
    channels = Channels(((1, 2),), (0, 1), TileMemory(memory_map.BASE, 2))
    for name, size, plan in (
        # The call needs five tiles.
        ("all_gather", 5 * 512, TilePlan(1, 1)),
        # The call needs six tiles.
        ("two_shot", 3 * 512, TilePlan(1, 1)),
        # The call needs 513 workers.
        ("one_shot", 513 * 512, TilePlan(513, 1)),
    ):
        x = jnp.zeros(KERNELS[name][0](2, size)[1:], jnp.float32)
        with pytest.raises(
            ValueError,
            match=r"room for 512 worker warpgroups that send 4 tiles each, but .*TilePlan.* has",
        ):
            getattr(ll, name)(places(2)[0], x, channels=channels, plan=plan)
    for two_shot, rows, hidden in ((False, 5, 512), (False, 3, 1024), (True, 2, 1536)):
        x = jnp.zeros((rows, hidden))
        options = dict(
            eps=0.1, hidden=hidden, two_shot=two_shot, channels=channels, plan=TilePlan(1, 1)
        )
        with pytest.raises(
            ValueError,
            match="512 worker warpgroups that send 4 tiles each, but .* has 1 that send [56]",
        ):
            low_latency_all_reduce_rms_norm(places(2)[0], x, x, x[0], **options)


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


class LateToCome(SimulatedChannels):
    def hold_back(self, point, rank):
        if point == 0:
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
    *,
    kind: type[Endpoint] = Endpoint,
    call: Callable[[Endpoint, jax.Array], jax.Array] = sum_and_go_on,
) -> np.ndarray:
    """Makes several calls of the low-latency protocol within one kernel.

    Between two kernels, the simulator makes all ranks wait for each other. Within one kernel, a
    rank may run ahead of others from call to call.

    Args:
        x: [places, size], the operands of the first call, by place in the mesh.
        several: the channels; the calls use them in turn.
        calls: the number of calls.
        kind: the class of the endpoints, which may have a fault.
        call: function (endpoint, a tile) -> the tile for the next call.

    Returns:
        The result of the last call, [places, size].
    """
    first, tile = several[0], tile_length(x.dtype)

    def body(index_ref: Any, x_ref: Any, out_ref: Any) -> None:
        worker = lax.axis_index("warpgroup")
        where = pl.ds(worker * tile, tile)
        part = tiles.load(first, first.mine(x_ref).at[where])
        for i in range(calls):
            channels = several[i % len(several)]
            part = call(kind(channels, channels.mesh_index(index_ref), worker, "a test"), part)
        tiles.store(first, first.mine(out_ref).at[where], part)

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
        return kernel(places(len(x)), jnp.asarray(x))[0]

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
@pytest.mark.parametrize(
    "kind", quick([SimulatedChannels, LateToTake, LateToCome], LateToTake, LateToCome)
)
@pytest.mark.parametrize("num_ranks", quick([2, 3], 3))
def test_calls_overtake_no_tile_buffer(num_ranks, kind):
    x, channels, groups = (
        integers(num_ranks),
        one_axis(num_ranks, kind=kind),
        Groups((num_ranks,), (0,)),
    )
    # With an odd number of calls, the next kernel begins with the second set of tile buffers.
    for calls in (5, 3):
        assert_same_bits(several_calls(x, [channels], calls), after_calls(x, [groups], calls))


@simulated
@pytest.mark.parametrize("kind", quick([SimulatedChannels, LateToTake, LateToCome], LateToTake))
def test_calls_of_alternating_groups_overtake_no_tile_buffer(kind):
    """Calls that alternate between groups of ranks must not overwrite a tile before it is taken."""
    memory, x = TileContents(), integers(4)
    several = [Groups((2, 2), axes) for axes in ((0,), (1,), (0, 1))]
    channels = [
        simulated_channels(groups.channels, (3, 1, 0, 2), memory, kind=kind) for groups in several
    ]
    got = several_calls(x, channels, calls=7)
    assert_same_bits(got, after_calls(x, several, calls=7))


class AlwaysTheSameSet(Endpoint):
    def _buffer(self, sender, receiver, calls, index):
        return super()._buffer(sender, receiver, calls & 0, index)


class NeverClosed(Endpoint):
    def close(self):
        pass


class ClosedTwiceByRank0(Endpoint):
    def close(self):
        self._calls = [calls + (self.rank == 0) for calls in self._calls]
        super().close()


class OneSetForAllSenders(Endpoint):
    def _buffer(self, sender, receiver, calls, index):
        return super()._buffer(receiver + 1, receiver, calls, index)


FAULTS = {
    "one set of buffers": (AlwaysTheSameSet, 2, LateToTake, 4, "a tile of rank 1 overtakes one"),
    "calls not counted": (NeverClosed, 2, LateToTake, 4, "a tile of rank 1 overtakes one"),
    "senders share buffers": (OneSetForAllSenders, 3, LateToTake, 1, "overtakes"),
    "counts that differ": (
        ClosedTwiceByRank0, 2, SimulatedChannels, 3,
        r"a test: rank . waits for a tile of \[.\]|overtakes",
    ),
}  # fmt: skip


@simulated
@pytest.mark.parametrize(
    ("endpoint", "num_ranks", "kind", "calls", "message"), quick(FAULTS, *FAULTS)
)
def test_a_faulty_endpoint_is_found(endpoint, num_ranks, kind, calls, message):
    with pytest.raises(KernelError, match=message):
        several_calls(
            integers(num_ranks), [one_axis(num_ranks, kind=kind)], calls=calls, kind=endpoint
        )


@simulated
def test_a_worker_that_sends_nothing_is_waited_for(monkeypatch):
    def send(self, index, tiles_of_peers, **options):
        @pl.when(self._worker > 0)
        def _() -> None:
            original(self, index, tiles_of_peers, **options)

    original = Endpoint.send
    monkeypatch.setattr(Endpoint, "send", send)
    message = r"ep_all_gather_ll: rank . waits for a tile of \[., .\]"
    with pytest.raises(KernelError, match=message):
        run("all_gather", operand((3, 2048), "bfloat16"), one_axis(3), TilePlan(1, 2))


@simulated
def test_sending_one_way_only_is_overtaken():
    """If a rank only sends, nothing stops it from overwriting tiles: all ranks must send to all."""

    def broadcast(endpoint: Endpoint, part: jax.Array) -> jax.Array:
        @pl.when(endpoint.rank == 1)
        def _() -> None:
            endpoint.send(0, [part])

        endpoint.delay_point(1)

        @pl.when(endpoint.rank == 0)
        def _() -> None:
            endpoint.receive(0, part.shape, part.dtype)

        endpoint.close()
        return part

    channels = one_axis(2, kind=LateToTake)
    # Two calls work, since there are two sets of tile buffers.
    several_calls(integers(2), [channels], calls=2, call=broadcast)
    with pytest.raises(KernelError, match="a tile of rank 1 overtakes"):
        several_calls(integers(2), [channels], calls=3, call=broadcast)


@simulated
def test_a_tile_that_nobody_takes_is_found():
    def send(endpoint: Endpoint, part: jax.Array) -> jax.Array:
        endpoint.send(3, [part])
        return part

    with pytest.raises(KernelError, match="nobody has taken the tiles"):
        several_calls(integers(2), [one_axis(2)], calls=1, call=send)


@pytest.mark.parametrize("num_gpus", [3, 5])
def test_every_tile_buffer_has_a_place_of_its_own(num_gpus):
    """No two tiles may share a tile buffer of the GPU that receives them."""
    endpoint = Endpoint.__new__(Endpoint)
    memory = TileMemory(memory_map.BASE, num_gpus)
    endpoint.channels = Channels(((1, num_gpus),), tuple(range(num_gpus)), memory)
    endpoint._worker = jnp.arange(MAX_WORKERS)
    count = memory_map.num_tile_buffers(num_gpus)
    for receiver in range(num_gpus):
        found = [
            np.asarray(endpoint._buffer(*map(jnp.int32, (sender, receiver, calls)), index))
            for sender in range(num_gpus)
            for calls in (6, 7)
            for index in range(memory_map.tiles_of_channel(num_gpus))
            if sender != receiver
        ]
        np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.arange(count))


# ------------------------------------------------------------------ programs lowered for CUDA


def lower_norm(num_ranks: int, rows: int, hidden: int, algorithm: str) -> str:
    def apply(x):
        scale = jnp.ones((hidden,))
        return collectives.all_reduce_rms_norm(x, x, scale, AXIS, algorithm=algorithm)[0]

    program = on_ranks(apply, cuda_mesh((num_ranks,), (AXIS,)))
    return lowered(program, jax.ShapeDtypeStruct((num_ranks * rows, hidden), jnp.bfloat16))


@needs_kernels
@pytest.mark.parametrize(
    ("num_ranks", "hidden", "algorithm", "most_rows"),
    [
        # Each of four rows has one tile.
        (2, 4096, "fused_one_shot_ll", 4 * 128),
        # Each of two rows has two tiles.
        (2, 4100, "fused_one_shot_ll", 2 * 128),
        (4, 1024, "fused_one_shot_ll", 4 * 512),
        # A rank has one row of two tiles, which is sent twice.
        (2, 8192, "fused_two_shot_ll", 2 * 128),
        (8, 1024, "fused_two_shot_ll", 8 * 512),
        (2, 8200, "fused_two_shot_ll", 0),
    ],
)
def test_rows_that_a_fused_norm_has_room_for(num_ranks, hidden, algorithm, most_rows):
    if most_rows:
        text = lower_norm(num_ranks, most_rows, hidden, algorithm)
        assert text.count("custom_call @mosaic_gpu") == 1
        assert "uses_xla_collective_metadata = true" not in text
    with pytest.raises(
        ValueError, match=f'"{algorithm}".*is too large for the buffers of the low-latency protocol'
    ):
        lower_norm(num_ranks, most_rows + 1, hidden, algorithm)


@pytest.fixture
def noted_calls(monkeypatch):
    """Returns a list of (channels, plan), one for each low-latency call traced during the test."""
    noted, call = [], ll.call

    def note(*args, channels, plan, **options):
        noted.append((channels, plan))
        return call(*args, channels=channels, plan=plan, **options)

    monkeypatch.setattr(ll, "call", note)
    return noted


def lower_all_gather(mesh: Any, axis_name: Any, rows: int) -> None:
    program = on_ranks(lambda x: collectives.all_gather(x, axis_name, algorithm="ll"), mesh)
    lowered(program, jax.ShapeDtypeStruct((rows, 1024), jnp.bfloat16))


AXES_OF_A_PROGRAM = [("a", ((2, 2),)), ("b", ((1, 2),)), (("b", "a"), ((1, 2), (2, 2)))]


@pytest.fixture
def gpus(monkeypatch):
    """Makes the first five devices pass for GPUs that share memory; returns them by GPU number."""
    devices = jax.devices()[4::-1]
    if len(devices) < 5:
        pytest.skip("needs 5 devices")
    domain = symmetric_memory.Domain(
        base=memory_map.BASE + 2**40,
        stride=memory_map.STRIDE,
        heap_bytes=memory_map.heap_bytes(5),
        gpus=tuple(symmetric_memory.Gpu(i, d.id, 0, "", 0, 0) for i, d in enumerate(devices)),
    )
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(availability, "unavailable_reason", lambda *_: None)
    monkeypatch.setattr(jax_compat, "devices_unavailable_reason", lambda: None)
    monkeypatch.setattr(jax_compat, "platform_of_traced_mesh", lambda: "gpu")
    monkeypatch.setattr(symmetric_memory, "unavailable_reason", lambda _: None)
    monkeypatch.setattr(symmetric_memory, "domain", lambda: domain)
    return devices


@needs_kernels
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="CPUs are taken for GPUs here")
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 4, 1)], ids=str)
def test_channels_of_a_program(order, gpus, noted_calls):
    """A program's channels must know each place's GPU, and the strides of the ranks' axes."""
    mesh = Mesh(np.asarray([gpus[number] for number in order]).reshape(2, 2), ("a", "b"))
    for axis_name, axes in AXES_OF_A_PROGRAM:
        lower_all_gather(mesh, axis_name, 16)
        channels, _ = noted_calls[-1]
        assert channels.axes == axes and channels.gpus == order
        assert channels.num_ranks == math.prod(size for _, size in axes)
        # The memory is that of all GPUs, since programs on some of them use the same tile buffers.
        assert channels.memory == TileMemory(memory_map.BASE + 2**40, 5)


@needs_kernels
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the machine here is known")
def test_channels_of_a_program_for_another_machine(noted_calls):
    """A program for another machine must assume that GPU i is at place i of the mesh."""
    mesh = cuda_mesh((2, 3), ("a", "b"))
    lower_all_gather(mesh, "b", 18)
    channels, _ = noted_calls[-1]
    assert channels.axes == ((1, 3),) and channels.gpus == tuple(range(6))
    assert channels.memory == TileMemory(memory_map.BASE, 6)
