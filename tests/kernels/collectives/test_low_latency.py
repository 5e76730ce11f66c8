"""Tests of the low-latency protocol: simulated, lowered for CUDA, and on GPUs out of step."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from support import simulator
from support.collectives import (
    AXIS,
    KERNELS,
    LOWERED,
    NORM_CASES,
    assert_same_bits,
    by_rank,
    check_norm,
    delays,
    in_rank_order,
    lower_for_cuda,
    norm_operands,
    on_gpus,
    operand,
)
from support.kernels import needs_kernels
from support.meshes import RANK_COUNTS, cuda_mesh, expert_mesh
from support.processes import output_of_a_failure
from support.selection import quick
from support.simulator import (
    KernelError,
    SimulatedChannels,
    TileContents,
    simulate,
    simulated_channels,
)

from jax_ep.collectives import api as collectives
from jax_ep.collectives import pallas as pallas_collectives
from jax_ep.runtime import availability, jax_compat, symmetric_memory
from pallas_kernels.collectives import low_latency as ll
from pallas_kernels.collectives import tiles
from pallas_kernels.collectives.all_reduce_rms_norm import low_latency_all_reduce_rms_norm
from pallas_kernels.collectives.tiles import TilePlan, tile_length
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import memory_map
from pallas_kernels.fabric.low_latency import Channels, Endpoint
from pallas_kernels.fabric.memory_map import MAX_WORKERS
from pallas_kernels.fabric.sentinel_words import TileMemory

simulated = simulator.simulated
LL_LOWERED = [case for case in LOWERED if case[1].endswith("ll")]


def one_axis(num_ranks: int, **options: Any) -> SimulatedChannels:
    return simulated_channels([(1, num_ranks)], range(num_ranks), **options)


def run(name: str, x: np.ndarray, channels: SimulatedChannels, plan: TilePlan) -> np.ndarray:
    """Simulates a kernel; x and the result are stacked by the rank's place in the mesh."""
    kernel = getattr(ll, name)
    return simulate(lambda: kernel(places(len(x)), jnp.asarray(x), channels=channels, plan=plan))


def places(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.int32)[:, None]


# ------------------------------------------------------------------------ kernels in the simulator


@simulated
@pytest.mark.parametrize(
    ("num_ranks", "dtype", "size", "plan"),
    quick(
        [
            # Each worker has two tiles.
            (2, "bfloat16", 4 * 1024, TilePlan(2, 1)),
            (3, "float16", 2 * 1024, TilePlan(1, 2)),
            # The last tile is moved back over the one before.
            (2, "float32", 512 + 4, TilePlan(1, 1)),
            # With four ranks, a float32 sum depends on its order.
            (4, "float32", 512, TilePlan(1, 1)),
        ],
        (4, "float32", 512, TilePlan(1, 1)),
    ),
)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name, num_ranks, dtype, size, plan):
    _, shape, expected = KERNELS[name]
    x = operand(shape(num_ranks, size), dtype)
    assert_same_bits(run(name, x, one_axis(num_ranks), plan), expected(x))


@simulated
@pytest.mark.parametrize(
    ("size", "plan"),
    [(1024 + 8, TilePlan(2, 2)), (1024 * 3 - 16, TilePlan(1, 2))],
)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.slow
def test_workers_without_a_tile_of_their_own_share_the_last(name, size, plan):
    """Workers without a tile of their own must repeat the last tile.

    All of them write the same values to it, which the interpreter would report as a race.
    """
    _, shape, expected = KERNELS[name]
    x = operand(shape(2, size), "bfloat16")
    channels = one_axis(2, detect_races=False)
    assert_same_bits(run(name, x, channels, plan), expected(x))
    workers = plan.num_blocks * plan.num_warpgroups
    # Each of the 2 ranks' workers, even one without a tile, must have counted one call.
    assert set(channels.memory.contents.counters.values()) == {1}
    assert len(channels.memory.contents.counters) == 2 * workers


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups into which some axes of a mesh divide its places; each group communicates alone.

    The places of the mesh, one for each GPU, are numbered in row-major order. A group has the
    places that differ only in their indices along `axes`.

    Attributes:
        shape: the mesh's shape.
    """

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
        """Computes the expected results of a collective that each group runs alone.

        `expected` maps the operands of a group's N ranks, [N, ...], to their results. x and the
        returned array are [places of the mesh, ...].
        """
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
        _, shape, expected = KERNELS[name]
        x = operand((count, *shape(num_ranks, 1024)[1:]), "bfloat16")
        channels = simulated_channels(groups.channels, map(int, devices))
        out = run(name, x, channels, TilePlan(1, 1))
        assert_same_bits(out, groups.each(expected, x))


@pytest.mark.slow
@simulated
def test_calls_of_all_kernels_one_after_another():
    """Calls of all kernels, one after another with the same tile buffers, must be right.

    From call to call, the groups of ranks and the number of workers change.
    """
    memory, mesh = TileContents(), (2, 2)
    plans = (TilePlan(2, 1), TilePlan(1, 1), TilePlan(1, 2))
    for call, name in enumerate([*KERNELS, *KERNELS]):
        _, shape, expected = KERNELS[name]
        groups = Groups(mesh, ((0,), (1,), (1, 0))[call % 3])
        x = operand((4, *shape(groups.places.shape[1], 2048)[1:]), "bfloat16", seed=call)
        # From the sixth call on, the program has its GPUs in another order.
        devices = (0, 1, 2, 3) if call < 5 else (2, 0, 3, 1)
        channels = simulated_channels(groups.channels, devices, memory)
        assert_same_bits(run(name, x, channels, plans[call % 3]), groups.each(expected, x))


NORMS_BY_LL = {
    **{name: case for name, case in NORM_CASES.items() if name != "one_rank"},
    "a_last_tile_moved_back": (3, 4, 1032, 1032, "bfloat16", "bfloat16", TilePlan(2, 1)),
}


@simulated
@pytest.mark.parametrize("two_shot", [False, True], ids=["one_shot", "two_shot"])
@pytest.mark.parametrize("case", NORMS_BY_LL.values(), ids=NORMS_BY_LL)
@pytest.mark.slow
def test_all_reduce_rms_norm(case, two_shot):
    num_ranks, rows, hidden, padded, dtype, residual_dtype, plan = case
    arrays = norm_operands(num_ranks, rows, hidden, padded, dtype, residual_dtype)
    if two_shot:
        plan = TilePlan(-(-rows // num_ranks), plan.num_warpgroups)
    # Blocks without a row repeat the last row, which the interpreter would report as a race.
    channels = one_axis(num_ranks, detect_races=plan.num_blocks <= rows)
    options = dict(eps=1e-3, hidden=hidden, two_shot=two_shot, channels=channels, plan=plan)
    operands = [places(num_ranks), *map(jnp.asarray, arrays)]
    # The second call uses the second set of tile buffers.
    for _ in range(2):
        check_norm(
            simulate(lambda: low_latency_all_reduce_rms_norm(*operands, **options)),
            arrays,
            hidden,
            1e-3,
        )


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
        x = jnp.zeros(KERNELS[name][1](2, size)[1:], jnp.float32)
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


@dataclasses.dataclass(frozen=True)
class _Late:
    """An operation of the simulator that makes rank 0 sleep, so that it falls behind."""

    seconds: float = 0.05

    def run(self, simulation: Any, thread: Any, rank: Any) -> None:
        del simulation, thread
        time.sleep(self.seconds * (int(rank) == 0))


class LateToTake(SimulatedChannels):
    """Channels in which rank 0 sends its tiles on time, but takes the tiles of other ranks late."""

    def hold_back(self, point, rank):
        if point == 1:
            simulator._on_host(_Late(), rank)


class VeryLateToTake(SimulatedChannels):
    """Channels in which rank 0 receives so late that the other ranks finish every possible call."""

    def hold_back(self, point, rank):
        if point == 1:
            simulator._on_host(_Late(1.0), rank)


class LateToCome(SimulatedChannels):
    def hold_back(self, point, rank):
        if point == 0:
            simulator._on_host(_Late(), rank)


def sum_and_go_on(endpoint: Endpoint, part: jax.Array) -> jax.Array:
    """Makes one call of the low-latency protocol within a kernel: sums `part` over the ranks.

    `part` is this rank's tile. Returns its tile for the next call, which is exact in float32 if the
    first tiles are small integers.
    """
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
    """Calls that alternate between groups of ranks must not overwrite a tile before it is taken.

    Ranks 0 and 3 share only the last of the three groups, so they exchange tiles in every third
    call.
    """
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


@simulated
@pytest.mark.parametrize("protocol", [AlwaysTheSameSet, NeverClosed])
def test_a_set_that_is_used_twice_is_overtaken(protocol):
    channels = one_axis(2, kind=VeryLateToTake)
    with pytest.raises(KernelError, match="a tile of rank 1 overtakes one that nobody has taken"):
        several_calls(integers(2), [channels], calls=4, kind=protocol)


@simulated
def test_senders_that_share_tile_buffers_are_found():
    with pytest.raises(KernelError, match="overtakes"):
        several_calls(
            integers(3), [one_axis(3, kind=LateToTake)], calls=1, kind=OneSetForAllSenders
        )


@simulated
def test_counts_that_differ_are_found(monkeypatch):
    monkeypatch.setattr(simulator, "WAIT_SECONDS", 0.5)
    with pytest.raises(KernelError, match=r"a test: rank . waits for a tile of \[.\]|overtakes"):
        several_calls(integers(2), [one_axis(2)], calls=3, kind=ClosedTwiceByRank0)


@simulated
def test_a_worker_that_sends_nothing_is_waited_for(monkeypatch):
    def send(self, index, tiles_of_peers, **options):
        @pl.when(self._worker > 0)
        def _() -> None:
            original(self, index, tiles_of_peers, **options)

    original = Endpoint.send
    monkeypatch.setattr(simulator, "WAIT_SECONDS", 0.5)
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

    channels = one_axis(2, kind=VeryLateToTake)
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


@simulated
def test_swapped_tiles_are_found(monkeypatch):
    """Swapped tiles must give wrong values, since the protocol itself cannot tell them apart."""
    original = Endpoint.receive

    def receive(self, index, *args, **options):
        return original(self, 1 - index, *args, **options)

    monkeypatch.setattr(Endpoint, "receive", receive)
    for name in ("one_shot", "all_gather", "reduce_scatter", "all_to_all"):
        _, shape, expected = KERNELS[name]
        x = operand(shape(2, 2048), "bfloat16")
        with pytest.raises(AssertionError, match="not equal"):
            assert_same_bits(run(name, x, one_axis(2), TilePlan(1, 1)), expected(x))


@simulated
def test_two_ranks_on_one_gpu_are_found():
    channels = simulated_channels([(1, 2)], (0, 0))
    with pytest.raises(KernelError, match="takes the memory of GPU 0 for its own"):
        run("all_gather", operand((2, 1024), "bfloat16"), channels, TilePlan(1, 1))


@simulated
def test_tile_buffers_that_are_not_there_are_found(monkeypatch):
    original = Endpoint._buffer
    monkeypatch.setattr(Endpoint, "_buffer", lambda *args: original(*args) + 2 * 512 * 4)
    with pytest.raises(KernelError, match="GPU . has no tile buffer"):
        run("all_gather", operand((2, 1024), "bfloat16"), one_axis(2), TilePlan(1, 1))


@pytest.mark.parametrize("num_gpus", [3, 5])
def test_every_tile_buffer_has_a_place_of_its_own(num_gpus):
    """No two tiles may share a tile buffer of the GPU that receives them.

    The tiles are those of both sets, of all senders and workers, and with all indices in a channel.
    Together they must use all buffers of the GPU.
    """
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


# ---------------------------------------------------------------------- kernels lowered for CUDA


def lower_on(
    mesh: Any, axis_name: Any, op: str, algorithm: str, shape: tuple[int, ...], dtype: Any
) -> str:
    spec = P(mesh.axis_names)
    mapped = jax.shard_map(
        lambda x: getattr(collectives, op)(x, axis_name, algorithm=algorithm),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    return jax.jit(mapped).trace(x).lower(lowering_platforms=("cuda",)).as_text()


@needs_kernels
@pytest.mark.parametrize(("op", "algorithm", "kernel"), LL_LOWERED)
@pytest.mark.parametrize(
    ("num_ranks", "shape", "dtype"),
    [(2, (4, 8192), "bfloat16"), (3, (9, 5), "float16"), (8, (64, 2880), "float32")],
)
def test_a_kernel_alone_without_a_rendezvous_of_xla(op, algorithm, kernel, num_ranks, shape, dtype):
    shape = (num_ranks * shape[0], *shape[1:])
    mesh = cuda_mesh((num_ranks,), (AXIS,))
    text = lower_on(mesh, AXIS, op, algorithm, shape, dtype)
    assert text.count("custom_call @mosaic_gpu") == 1 and kernel in text
    assert "uses_xla_collective_metadata = false" in text
    assert "uses_xla_collective_metadata = true" not in text
    for other in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"):
        assert f"stablehlo.{other}" not in text
    assert f"jax_ep: {kernel}: rank %d waited over 100 s for rank %d (block %d)" in text


@needs_kernels
@pytest.mark.parametrize("shots", ["one", "two"])
@pytest.mark.parametrize(("num_ranks", "hidden"), [(2, 8192), (3, 2880), (8, 5)])
def test_the_fused_norm_is_a_kernel_alone(shots, num_ranks, hidden):
    text = lower_norm(num_ranks, 8, hidden, f"fused_{shots}_shot_ll")
    assert text.count("custom_call @mosaic_gpu") == 1
    assert f"ep_all_reduce_rms_norm_{shots}_shot_ll" in text
    assert "uses_xla_collective_metadata = false" in text


def lower_norm(num_ranks: int, rows: int, hidden: int, algorithm: str) -> str:
    def apply(x):
        scale = jnp.ones((hidden,))
        outs = collectives.all_reduce_rms_norm(x, x, scale, AXIS, algorithm=algorithm)
        return outs[0]

    mesh, spec = cuda_mesh((num_ranks,), (AXIS,)), P(AXIS)
    mapped = jax.shard_map(apply, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((num_ranks * rows, hidden), jnp.bfloat16)
    return jax.jit(mapped).trace(x).lower(lowering_platforms=("cuda",)).as_text()


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
        assert "@mosaic_gpu" in lower_norm(num_ranks, most_rows, hidden, algorithm)
    with pytest.raises(
        ValueError, match=f'"{algorithm}".*is too large for the buffers of the low-latency protocol'
    ):
        lower_norm(num_ranks, most_rows + 1, hidden, algorithm)


@needs_kernels
@pytest.mark.parametrize(
    "axis_name", quick(["a", "b", ("a", "b"), ("b", "a")], "a", ("b", "a"), unpack=False), ids=str
)
def test_meshes_of_two_axes(axis_name):
    mesh = cuda_mesh((2, 4), ("a", "b"))
    for op, algorithm, kernel in LL_LOWERED:
        text = lower_on(mesh, axis_name, op, algorithm, (8 * 8, 640), "bfloat16")
        assert text.count("custom_call @mosaic_gpu") == 1 and kernel in text


@pytest.fixture
def noted_calls(monkeypatch):
    """Returns a list of (channels, plan), one for each low-latency call traced during the test."""
    noted, call = [], ll.call

    def note(*args, channels, plan, **options):
        noted.append((channels, plan))
        return call(*args, channels=channels, plan=plan, **options)

    monkeypatch.setattr(ll, "call", note)
    return noted


AXES_OF_A_PROGRAM = [("a", ((2, 2),)), ("b", ((1, 2),)), (("b", "a"), ((1, 2), (2, 2)))]


@pytest.fixture
def gpus(monkeypatch):
    """Makes the first five devices pass for GPUs that share memory; returns them by GPU number.

    The last device is GPU 0.
    """
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
        lower_on(mesh, axis_name, "all_gather", "ll", (16, 1024), "bfloat16")
        channels, _ = noted_calls[-1]
        assert channels.axes == axes and channels.gpus == order
        assert channels.num_ranks == math.prod(size for _, size in axes)
        # The memory is that of all GPUs, since programs on some of them use the same tile buffers.
        assert channels.memory == TileMemory(memory_map.BASE + 2**40, 5)


@needs_kernels
@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the machine here is known")
def test_channels_of_a_program_for_another_machine(noted_calls):
    """A program for another machine must assume that GPU i is at place i of the mesh.

    This machine has no such GPUs, so the program is only lowered.
    """
    mesh = cuda_mesh((2, 3), ("a", "b"))
    lower_on(mesh, "b", "all_gather", "ll", (18, 1024), "bfloat16")
    channels, _ = noted_calls[-1]
    assert channels.axes == ((1, 3),) and channels.gpus == tuple(range(6))
    assert channels.memory == TileMemory(memory_map.BASE, 6)


@needs_kernels
@pytest.mark.parametrize(("op", "algorithm", "kernel"), LL_LOWERED)
def test_gradients_go_by_ll_too(op, algorithm, kernel):
    backwards = {"all_gather": "ep_reduce_scatter_ll", "reduce_scatter": "ep_all_gather_ll"}

    def grad(x):
        apply = functools.partial(getattr(collectives, op), axis_name=AXIS, algorithm=algorithm)
        return jax.grad(lambda x: jnp.sum(jnp.sin(apply(x))))(x)

    x = jax.ShapeDtypeStruct((2 * 8, 512), jnp.float32)
    mapped = jax.shard_map(
        grad, mesh=cuda_mesh((2,), (AXIS,)), in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
    )
    text = jax.jit(mapped).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
    assert kernel in text and backwards.get(op, kernel) in text


@needs_kernels
def test_a_plan_can_be_forced(noted_calls):
    def plan_of_32_tiles(forced):
        with pallas_collectives.forced_plan(forced):
            lower_for_cuda(
                lambda x: collectives.all_gather(x, AXIS, algorithm="ll"),
                2,
                jax.ShapeDtypeStruct((8, 8192), jnp.bfloat16),
            )
        return noted_calls[-1][1]

    assert plan_of_32_tiles(TilePlan(5, 2)) == TilePlan(5, 2)
    assert plan_of_32_tiles(None) == TilePlan(32, 1)


def test_plans_give_workers_as_many_tiles_as_ll_holds():
    for num_tiles in (1, 5, 64, 127, 129, 200, 257, 511, 512, 513, 1000, 1024, 1025, 2047, 2048):
        plan = pallas_collectives._plan(
            num_tiles * tile_length("float16"), "float16", for_low_latency=True
        )
        workers = plan.num_blocks * plan.num_warpgroups
        rounds = -(-num_tiles // workers)
        assert (
            workers <= MAX_WORKERS
            and rounds <= memory_map.tiles_of_channel(2)
            and plan.num_vectors == 1
        )
        assert rounds == -(-num_tiles // MAX_WORKERS)
        assert (plan.num_blocks - 1) * plan.num_warpgroups * rounds < num_tiles


# ------------------------------------------------------------ kernels on GPUs, with ranks delayed


def channels_here(mesh: Any, axis_names: tuple[str, ...] = (AXIS,), **options: Any) -> Channels:
    """Makes the channels between this rank and others, inside a shard_map over the mesh."""
    strides = {name: math.prod(mesh.axis_sizes[i + 1 :]) for i, name in enumerate(mesh.axis_names)}
    axes = tuple((strides[name], mesh.shape[name]) for name in axis_names)
    # On an abstract mesh, the program is only lowered.
    if isinstance(mesh, AbstractMesh):
        devices = tuple(range(mesh.size))
        return Channels(axes, devices, TileMemory(memory_map.BASE, mesh.size), **options)
    domain = symmetric_memory.domain()
    assert not isinstance(domain, str), domain
    devices = tuple(domain.numbers[device.id] for device in mesh.devices.flat)
    return Channels(axes, devices, TileMemory(domain.base, domain.num_gpus), **options)


# Each step of the loop is (kernel, number of tiles, plan).
STEPS = [
    ("one_shot", 40, TilePlan(8, 4)),
    ("two_shot", 3, TilePlan(3, 1)),
    ("all_gather", 64, TilePlan(8, 4)),
    ("reduce_scatter", 1, TilePlan(1, 1)),
    ("all_to_all", 9, TilePlan(4, 2)),
    ("two_shot", 40, TilePlan(5, 4)),
    ("all_gather", 1, TilePlan(2, 2)),
]
STATE = 64 * tile_length("float32")


def operand_of(name: str, state: Any, size: int, num_ranks: int) -> Any:
    if KERNELS[name][1] is by_rank:
        return state[:size]
    xp = jnp if isinstance(state, jax.Array) else np
    return xp.stack([state[:size] + shard for shard in range(num_ranks)])


def next_state(state: Any, out: Any, rank: Any) -> Any:
    """Returns a rank's state after a call of a collective in the loop of `STEPS`.

    The state [STATE] is what the operands of the next calls are made of. `out`, the result of the
    call on this rank, replaces the first values: by small integers, which are exact and differ
    between ranks.
    """
    xp = jnp if isinstance(state, jax.Array) else np
    total = ((out.sum(0) if out.ndim == 2 else out) + rank) % 16
    return xp.concatenate([total, state[total.size :]])


def loop_of_steps(mesh: Any, calls: int, **options: Any) -> Any:
    num_ranks = mesh.size

    def step(_: Any, state: jax.Array) -> jax.Array:
        channels, index = channels_here(mesh, **options), jax_compat.mesh_index()
        for name, num_tiles, plan in STEPS:
            x = operand_of(name, state, num_tiles * tile_length("float32"), num_ranks)
            out = getattr(ll, name)(index, x, channels=channels, plan=plan)
            state = next_state(state, out, lax.axis_index(AXIS))
        return state

    mapped = jax.shard_map(
        lambda state: lax.fori_loop(0, calls, step, state[0])[None],
        mesh=mesh,
        in_specs=P(AXIS),
        out_specs=P(AXIS),
        check_vma=False,
    )
    return jax.jit(mapped)


def states_after(state: np.ndarray, calls: int) -> np.ndarray:
    num_ranks = len(state)
    for _ in range(calls):
        for name, num_tiles, _ in STEPS:
            size = num_tiles * tile_length("float32")
            x = np.stack([operand_of(name, s, size, num_ranks) for s in state])
            outs = KERNELS[name][2](x)
            state = np.stack([next_state(state[r], outs[r], r) for r in range(num_ranks)])
    return state


@needs_kernels
def test_the_programs_for_gpus_lower():
    """The programs that other tests run on GPUs must trace and lower on any machine."""
    state = jax.ShapeDtypeStruct((4, STATE), jnp.float32)
    loop = loop_of_steps(cuda_mesh((4,), (AXIS,)), 5, delays_ns=delays(4)[-1])
    text = loop.trace(state).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == len(STEPS)
    programs = {
        (4 * 8, 1000): alternating(cuda_mesh((2, 2), ("a", "b")), "ll"),
        (4, 5, 1000): independent_sums(cuda_mesh((4,), (AXIS,)), 5),
    }
    for shape, program in programs.items():
        x = jax.ShapeDtypeStruct(shape, jnp.float32)
        assert "mosaic_gpu" in program.trace(x).lower(lowering_platforms=("cuda",)).as_text()


def test_the_reference_of_the_loop_is_what_jax_computes():
    num_ranks = min(2, len(jax.devices()))
    state = np.random.default_rng(0).integers(0, 16, (num_ranks, STATE)).astype(np.float32)
    by_lax = {
        "one_shot": lambda x: lax.psum(x, AXIS),
        "two_shot": lambda x: lax.psum(x, AXIS),
        "all_gather": lambda x: lax.all_gather(x, AXIS),
        "reduce_scatter": lambda x: lax.psum_scatter(x, AXIS),
        "all_to_all": lambda x: lax.all_to_all(x, AXIS, 0, 0),
    }

    def once(state):
        state = state[0]
        for name, num_tiles, _ in STEPS:
            x = operand_of(name, state, num_tiles * tile_length("float32"), num_ranks)
            state = next_state(state, by_lax[name](x), lax.axis_index(AXIS))
        return state[None]

    mesh = expert_mesh(num_ranks)
    mapped = jax.shard_map(once, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    np.testing.assert_array_equal(jax.jit(mapped)(state), states_after(state, 1))


@on_gpus
@pytest.mark.parametrize("num_ranks", [n for n in RANK_COUNTS if n > 1])
@pytest.mark.parametrize("backwards", [False, True])
def test_calls_in_a_loop_out_of_step(num_ranks, backwards):
    """A loop over the calls of `STEPS` must give the right state while ranks are delayed.

    The kernels, sizes and numbers of workers change from call to call, and each call depends on the
    result of the call before. With `backwards`, the mesh has the GPUs in reverse order.
    """
    mesh, calls = expert_mesh(num_ranks), 9
    if backwards:
        mesh = Mesh(mesh.devices[::-1], (AXIS,))
    state = np.random.default_rng(0).integers(0, 16, (num_ranks, STATE)).astype(np.float32)
    want = states_after(state, calls)
    for delay in [(), *delays(num_ranks)]:
        loop = loop_of_steps(mesh, calls, timeout_s=20.0, delays_ns=delay)
        # The second run begins with the second set of tile buffers.
        for _ in range(2):
            np.testing.assert_array_equal(loop(state), want, err_msg=str(delay))


def alternating(mesh: Any, kind: str) -> Any:
    """Jits a loop of collectives in which each GPU alternates between groups of ranks.

    The groups are those along the axis "a", "b" or both. `kind` is "ll" for collectives over the
    low-latency protocol, else they are XLA's.
    """
    sums, moves = ("one_shot_ll", "ll") if kind == "ll" else ("xla", "xla")

    def step(_: Any, x: jax.Array) -> jax.Array:
        for axes in ("a", "b", ("a", "b"), "a", ("b", "a"), "b"):
            x = collectives.all_reduce(x, axes, algorithm=sums) % 16
            x = x + lax.axis_index(axes)
            x = collectives.all_to_all(x, axes, algorithm=moves)
            gathered = collectives.all_gather(x, axes, algorithm=moves)
            x = collectives.reduce_scatter(gathered, axes, algorithm=moves) % 16
        return x

    spec = P(mesh.axis_names)
    mapped = jax.shard_map(
        lambda x: lax.fori_loop(0, 5, step, x),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    return jax.jit(mapped)


@on_gpus
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
def test_groups_along_either_axis_in_one_program(order):
    devices = jax.devices()
    if len(devices) < 4:
        pytest.skip("needs 4 devices")
    mesh = Mesh(np.asarray([devices[i] for i in order]).reshape(2, 2), ("a", "b"))
    x = np.random.default_rng(0).integers(0, 16, (4 * 8, 1000)).astype(np.float32)
    want = np.asarray(alternating(mesh, "xla")(x))
    for _ in range(3):
        np.testing.assert_array_equal(alternating(mesh, "ll")(x), want)


@on_gpus
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("num_ranks", [n for n in RANK_COUNTS if n > 1])
def test_any_word_arrives(num_ranks, dtype):
    """Any bits must arrive, even the sentinel word for an empty buffer and its replacement."""
    words = np.random.default_rng(0).integers(0, 2**32, (num_ranks, 2 * num_ranks, 512), np.uint32)
    words[:, :, ::3], words[:, :, 4::9] = 0xFFFFFFFF, 0xFFFFFFFE
    words[:, :, 1::6], words[:, :, 2::6] = 0xFFFF0000, 0x0000FFFF
    x = words.view(jnp.dtype(dtype))
    by_numpy = {
        "all_gather": lambda x: [x.reshape(-1, x.shape[-1])] * len(x),
        "all_to_all": lambda x: list(x.reshape(len(x), len(x), 2, -1).swapaxes(0, 1)),
    }
    for op, expected in by_numpy.items():
        got = each_rank(functools.partial(getattr(collectives, op), algorithm="ll"), x)
        want = np.stack(expected(x)).reshape(got.shape)
        np.testing.assert_array_equal(got.view(np.uint32), want.view(np.uint32))


@on_gpus
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("num_ranks", [n for n in RANK_COUNTS if n > 1])
def test_sums_of_what_is_no_number(num_ranks, dtype):
    ones = np.uint32([0xFFFFFFFF]).view(jnp.dtype(dtype))[0]
    values = np.asarray([ones, np.inf, -np.inf, np.nan, -0.0, 0.0, 1.5], jnp.dtype(dtype))
    shares = np.asarray([0.02, 0.02, 0.02, 0.02, 0.2, 0.2, 0.52])
    x = np.random.default_rng(0).choice(values, (num_ranks, 2 * num_ranks, 1000), p=shares)
    x[:, 0], x[:, 1, :500] = ones, -0.0
    with np.errstate(invalid="ignore"):
        want = np.stack([in_rank_order(x)] * num_ranks)
    nans, bits = np.isnan(want.astype(np.float32)), f"uint{8 * x.itemsize}"
    assert nans[:, 0].all() and 0.1 < nans.mean() < 0.9
    for algorithm in ("one_shot_ll", "two_shot_ll"):
        got = each_rank(functools.partial(collectives.all_reduce, algorithm=algorithm), x)
        np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nans)
        np.testing.assert_array_equal(got.view(bits)[~nans], want.view(bits)[~nans])


def each_rank(apply: Callable[..., jax.Array], x: np.ndarray) -> np.ndarray:
    mapped = jax.shard_map(
        lambda x: apply(x[0], axis_name=AXIS)[None],
        mesh=expert_mesh(len(x)),
        in_specs=P(AXIS),
        out_specs=P(AXIS),
        check_vma=False,
    )
    return np.asarray(jax.jit(mapped)(x))


@on_gpus
@pytest.mark.parametrize("num_ranks", [n for n in RANK_COUNTS if n > 1])
@pytest.mark.parametrize(
    ("algorithm", "num_bytes"), [("one_shot_ll", 2**22), ("two_shot_ll", 2**21)]
)
def test_the_largest_payloads_and_odd_ones(algorithm, num_bytes, num_ranks):
    largest = num_bytes // 4 * (num_ranks if algorithm == "two_shot_ll" else 1)
    for size in (largest, largest - 1, largest // 2 + 3, 2 * num_ranks * 512 + 1, 1, largest):
        x = operand((num_ranks, size), "float32", seed=size)
        got = each_rank(functools.partial(collectives.all_reduce, algorithm=algorithm), x)
        assert_same_bits(got, np.stack([in_rank_order(x)] * num_ranks))


@on_gpus
@pytest.mark.parametrize("num_ranks", [n for n in RANK_COUNTS if n > 1])
@pytest.mark.parametrize("two_shot", [False, True], ids=["one_shot", "two_shot"])
def test_all_reduce_rms_norm_out_of_step(two_shot, num_ranks):
    """All-reduces fused with RMSNorm must be right in a loop while ranks are delayed.

    Between two of them, an all-gather uses only some of the workers.
    """
    mesh, calls, rows = expert_mesh(num_ranks), 5, 3 * num_ranks - 1
    arrays = norm_operands(num_ranks, rows, 2048, 2048, "bfloat16", "float32")
    plan = TilePlan(3, 2) if two_shot else TilePlan(rows, 2)
    for delay in [(), *delays(num_ranks)]:

        def loop(x, residual, scale, delay=delay):
            channels = channels_here(mesh, timeout_s=20.0, delays_ns=delay)
            options = dict(eps=1e-3, hidden=2048, two_shot=two_shot, channels=channels, plan=plan)

            def call(_, results):
                # `again` has the values of x, but depends on the results of the last calls, so XLA
                # keeps the order of the calls.
                again = x[0] + jnp.isnan(results[1][0, 0]).astype(x.dtype)
                gathered = ll.all_gather(
                    jax_compat.mesh_index(), again[0], channels=channels, plan=TilePlan(1, 1)
                )
                again = again + jnp.isnan(gathered[0, 0]).astype(x.dtype)
                return tuple(run(again))

            def run(x):
                return low_latency_all_reduce_rms_norm(
                    jax_compat.mesh_index(), x, residual[0], scale[0], **options
                )

            results = lax.fori_loop(1, calls, call, tuple(run(x[0])))
            return jax.tree.map(lambda a: a[None], results)

        spec = P(AXIS)
        mapped = jax.shard_map(loop, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        for _ in range(2):
            check_norm(jax.jit(mapped)(*arrays), arrays, 2048, 1e-3)


def independent_sums(mesh: Any, count: int) -> Any:
    """Jits sums that do not depend on each other; XLA may run them in any order, one at a time."""

    def sums(x: jax.Array) -> jax.Array:
        parts = [x[0, i, : 8 * (i + 1) ** 3] for i in range(count)]
        for _ in range(3):
            parts = [
                collectives.all_reduce(part, AXIS, algorithm=("one_shot_ll", "two_shot_ll")[i % 2])
                / mesh.size
                for i, part in enumerate(parts)
            ]
        return jnp.concatenate(parts)[None]

    spec = P(AXIS)
    return jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


@on_gpus
@pytest.mark.parametrize("num_ranks", [n for n in RANK_COUNTS if n > 1])
def test_calls_that_do_not_depend_on_each_other(num_ranks):
    count = 12
    x = np.random.default_rng(0).integers(-8, 8, (num_ranks, count, 8 * count**3))
    x = x.astype(np.float32)
    mean = x.sum(0) / num_ranks
    want = np.concatenate([mean[i, : 8 * (i + 1) ** 3] for i in range(count)])
    program = independent_sums(expert_mesh(num_ranks), count)
    for _ in range(20):
        np.testing.assert_array_equal(program(x), np.stack([want] * num_ranks))


@on_gpus
@pytest.mark.needs_devices(4)
def test_programs_of_some_of_the_gpus_take_turns():
    """Two programs, one on 2 GPUs and one on 4, must be right if they run alternately.

    The host does not wait for the end of a program before it launches the next one. So the 2 GPUs
    that have no part in the first program may be ahead of the others in the second.
    """
    rng, outs = np.random.default_rng(0), []
    programs = {n: independent_sums(expert_mesh(n), 5) for n in (2, 4)}
    operands = {n: rng.integers(-8, 8, (n, 5, 1000)).astype(np.float32) for n in programs}
    for _ in range(50):
        outs.append({n: program(operands[n]) for n, program in programs.items()})
    for out in outs:
        for n, x in operands.items():
            mean = x.sum(0) / n
            want = np.concatenate([mean[i, : 8 * (i + 1) ** 3] for i in range(5)])
            np.testing.assert_array_equal(out[n], np.stack([want] * n))


LATE = """
import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from support.kernels import needs_kernels
from support.meshes import expert_mesh
from test_low_latency import AXIS, TilePlan, channels_here, jax_compat, ll

LATE_RANK, DELAY_NS = 1, 2_000_000_000
mesh = expert_mesh(2)


def run(x):
    delays = tuple(DELAY_NS * (rank == LATE_RANK) for rank in range(2))
    channels = channels_here(mesh, timeout_s=0.25, delays_ns=(delays,))
    return ll.all_gather(jax_compat.mesh_index(), x, channels=channels, plan=TilePlan(2, 1))


spec = P(AXIS)
mapped = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
jax.block_until_ready(jax.jit(mapped)(np.zeros(2 * 1024, np.float32)))
"""


@on_gpus
@pytest.mark.needs_devices(2)
def test_a_rank_that_never_comes_ends_the_program():
    """A rank that never comes must end the program: a message says who waits for whom."""
    output = output_of_a_failure(LATE, __file__)
    message = "jax_ep: ep_all_gather_ll: rank 0 waited over 0.25 s for rank 1 (block "
    assert message in output, output


@needs_kernels
def test_a_plan_that_leaves_rows_out_is_refused():
    with pallas_collectives.forced_plan(TilePlan(4, 1)):
        with pytest.raises(
            ValueError,
            match="at least 5 blocks in two shots .* there are 9 rows and 2 ranks, but plan is",
        ):
            lower_norm(2, 9, 1024, "fused_two_shot_ll")
