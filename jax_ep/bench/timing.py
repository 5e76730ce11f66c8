"""Times a function that every rank of a mesh runs: its wall time, and its device time by kernel.

Both times are measured on a compiled loop that calls the function. Each iteration depends on the
previous one, so XLA can neither hoist a call out of the loop, nor drop it, nor overlap it with the
next one.

The host launches kernels on one device after the other, which limits a loop of short calls: first
devices wait for their peers. The wall time includes this wait. For the device time, a kernel that
only waits (the spacer) runs after each call, so that the host gets ahead, and the time of the
loop's own kernels is subtracted.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep.runtime import jax_compat

# One launch of a kernel: its name, and its microseconds.
Kernel = tuple[str, float]
SPACER = "spacer"
SPACER_MICROSECONDS = 250  # a wait in which the host gets ahead of the devices
_COPY_BYTES = 2**30


class DeviceTime(NamedTuple):
    """The microseconds that one call keeps a device busy: the sum of everything it launches.

    `median_us` is over ranks and calls, `slowest_us` the largest of the ranks' medians, and
    `by_kernel_us` the mean over ranks, including the loop's own kernels.
    """

    median_us: float
    slowest_us: float
    by_kernel_us: dict[str, float]


_tracing = threading.Lock()
AXIS = "expert"  # of every measured mesh


def expert_mesh(num_ranks: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:num_ranks]), (AXIS,))


def on_ranks(function: Callable[..., Any], mesh: Mesh) -> Any:
    """Jits a function of one rank for arrays with a leading axis of ranks."""

    def on_rank(*stacked: Any) -> Any:
        own = jax.tree.map(lambda leaf: leaf[0], stacked)
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], function(*own))

    spec = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=spec, out_specs=spec))


def compiled(function: Any, *arguments: Any) -> Any:
    """Compiles a jitted function for the arguments' shapes; several threads may call it at once."""
    # When several threads traced, with jax 0.11.2, one failed once with StoreException.
    with _tracing:
        traced = function.trace(*arguments)
    return traced.lower().compile()


class Loop:
    """A compiled loop that calls `step` on every rank of a mesh, `iterations` times.

    `step` maps a rank's part of `state` to arrays, which are all computed in every iteration; the
    arrays of `state` have a leading axis of ranks. The loop's own kernels are launched once for
    `unroll` calls.
    """

    def __init__(
        self, step: Callable[[Any], Any], state: Any, mesh: Mesh, iterations: int, unroll: int = 1
    ):
        self.step, self.state, self.mesh, self.iterations = step, state, mesh, iterations
        self.compiled = self._compile_loop(_add_up, unroll)

    def _compile_loop(self, after: Any, unroll: int = 1) -> Any:
        loop = on_ranks(lambda state: self._loop(state, after, unroll), self.mesh)
        return compiled(loop, self.state)

    def _loop(
        self, state: Any, after: Callable[[jax.Array, list[jax.Array]], jax.Array], unroll: int
    ) -> Any:
        """Runs the loop on one rank; each call of `step` waits for a link, a scalar."""
        # `after` makes the next link of the link and a call's results, so that calls run in order.
        # All outputs must be computed whole. XLA for GPUs computes what passes through a barrier.
        # XLA for CPUs drops barriers, then what nothing reads, so there the loop carries outputs.
        carry_outputs = self.mesh.devices.flat[0].platform == "cpu"

        def body(_, carry):
            link, out = carry
            state_now, link, _ = lax.optimization_barrier((state, link, out))
            out = self._varying(lax.optimization_barrier(self.step(state_now)))
            link = self._varying(after(link, [leaf for leaf in jax.tree.leaves(out) if leaf.size]))
            return link, out if carry_outputs else None

        before_first = None
        if carry_outputs:
            types = jax.eval_shape(self.step, state)
            before_first = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), types)
        carry = self._varying((jnp.float32(0), before_first))
        return lax.fori_loop(0, self.iterations, body, carry, unroll=unroll)

    def _varying(self, tree: Any) -> Any:
        return jax_compat.match_varying(tree, (AXIS,))

    def outputs(self) -> Any:
        """Calls `step` once; returns its result, with a leading axis of ranks.

        Before, memory of the results' sizes is filled with NaN and freed, so that an element that
        `step` does not write is most likely NaN.
        """
        call = self.call  # compiled first, since that may take the memory that is filled
        shapes = jax.eval_shape(on_ranks(self.step, self.mesh), self.state)
        split = NamedSharding(self.mesh, PartitionSpec(AXIS))
        fill = jax.jit(lambda: jax.tree.map(_poison, shapes), out_shardings=split)
        jax.block_until_ready(fill())
        return call(self.state)

    @functools.cached_property
    def call(self) -> Any:
        """The compiled program of one call of `step` on every rank."""
        return compiled(on_ranks(self.step, self.mesh), self.state)

    def run(self) -> float:
        """Runs the loop once; returns the microseconds of an iteration."""
        start = time.perf_counter()
        jax.block_until_ready(self.compiled(self.state))
        return (time.perf_counter() - start) / self.iterations * 1e6

    def device_time(self, repeats: int, spaced: bool = True) -> DeviceTime:
        """Measures one call of `step` in `repeats` runs of the loop.

        If `spaced`, the spacer runs after each call, and the time of the loop's own kernels is
        subtracted. Calls that take milliseconds need neither.
        """
        device = self._traced_time(repeats, spaced)
        if not spaced:
            return device
        own = _own_microseconds(self.mesh)
        return device._replace(median_us=device.median_us - own, slowest_us=device.slowest_us - own)

    def _traced_time(self, repeats: int, spaced: bool) -> DeviceTime:
        """Measures the device time of a call, including the loop's own kernels."""
        loop = self._compile_loop(_wait_on_device) if spaced else self.compiled
        jax.block_until_ready(loop(self.state))

        def run() -> None:
            for _ in range(repeats):
                jax.block_until_ready(loop(self.state))

        return summarize(traced_launches(run, self.mesh.size), repeats * self.iterations)


@functools.cache
def _own_microseconds(mesh: Mesh) -> float:
    """Measures the microseconds per call that a `Loop` on `mesh` spends in its own kernels."""
    loop = Loop(lambda state: state, jnp.zeros((mesh.size, 1)), mesh, iterations=20)
    return loop._traced_time(repeats=2, spaced=True).median_us


def _poison(array: jax.ShapeDtypeStruct) -> jax.Array:
    """Makes an array filled with NaN or, for integers, the largest integer of the dtype."""
    if jnp.issubdtype(array.dtype, jnp.integer):
        return jnp.full(array.shape, jnp.iinfo(array.dtype).max, array.dtype)
    return jnp.full(array.shape, jnp.nan, array.dtype)


def _add_up(link: jax.Array, results: list[jax.Array]) -> jax.Array:
    """Returns a next link that depends on all results; the factor keeps it small."""
    return link + sum(leaf.reshape(-1)[0].astype(jnp.float32) for leaf in results) * 1e-6


def _wait_on_device(link: jax.Array, results: list[jax.Array]) -> jax.Array:
    """Returns `link` after a wait, by the spacer, which starts once the results are computed."""
    # Imported here, because it loads Mosaic, which machines without GPUs may lack.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.fabric import fabric

    def wait(link_ref, *refs):
        fabric.pause(SPACER_MICROSECONDS * 1000)
        refs[-1][0] = link_ref[0]

    options = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    out_type = jax.ShapeDtypeStruct((1,), link.dtype)
    kernel = plgpu.kernel(wait, out_type=out_type, compiler_params=options, kernel_name=SPACER)
    return kernel(link.reshape(1), *(leaf.reshape(-1) for leaf in results)).reshape(())


def traced_launches(
    run: Callable[[], None],
    num_devices: int,
    label: Callable[[Any], str] | None = None,
    gives_way: Callable[[str], bool] | None = None,
) -> list[list[Kernel]]:
    """Profiles `run`; returns the launches on each GPU, as `launches_by_device` lists them."""
    options = jax.profiler.ProfileOptions()
    # Only the events of devices are read.
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            run()
        (path,) = Path(directory).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    launches = launches_by_device(profile, label, gives_way)
    if len(launches) != num_devices:
        raise RuntimeError(f"the trace has kernels of {len(launches)} GPUs, not of {num_devices}")
    return launches


def launches_by_device(
    profile: jax.profiler.ProfileData,
    label: Callable[[Any], str] | None = None,
    gives_way: Callable[[str], bool] | None = None,
) -> list[list[Kernel]]:
    """Lists for each GPU in a profile its launches except the spacer's, in the order of start.

    `label` returns the name under which an event is listed; None: its own. `gives_way` returns
    whether launches of a name count only while no others run (`shared_durations`); None: never.
    """
    devices = []
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU:"):
            continue
        # Only the profile's lines "Stream..." are read. Other lines ("XLA Ops", "Steps", ...) show
        # the same time again.
        events = sorted(
            (event.start_ns, label(event) if label else event.name, event.duration_ns)
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
            if not event.name.startswith(SPACER)
        )
        if not events:
            continue
        durations = [duration for *_, duration in events]
        if gives_way is not None:
            spans = [(start, start + duration) for start, _, duration in events]
            durations = shared_durations(spans, [gives_way(name) for _, name, _ in events])
        devices.append(
            [(name, ns / 1e3) for (_, name, _), ns in zip(events, durations, strict=True)]
        )
    return devices


def shared_durations(
    spans: Sequence[tuple[float, float]], gives_way: Sequence[bool]
) -> list[float]:
    """Divides the time during which any of several launches run among them.

    `spans` are the launches' starts and ends. Each instant is shared equally by the launches that
    run then and do not give way; if all give way, by all.
    """
    times = [0.0] * len(spans)
    # At each of these times, launch i starts or ends.
    changes = sorted((at, i) for i, span in enumerate(spans) for at in span)
    running: set[int] = set()
    before = 0.0
    for at, i in changes:
        counted = [j for j in running if not gives_way[j]] or running
        for j in counted:
            times[j] += (at - before) / len(counted)
        before = at
        running ^= {i}
    return times


def summarize(ranks: Iterable[Sequence[Kernel]], calls: int) -> DeviceTime:
    """Computes the device time of one call from each rank's launches during several calls.

    If a rank launched a kernel m * calls times, each call is taken to have made m consecutive
    launches of it. Otherwise, as for kernels of the loop's setup, each call gets an equal share.
    """
    per_rank: list[list[float]] = []
    by_kernel: dict[str, float] = defaultdict(float)
    for launches in ranks:
        durations: dict[str, list[float]] = defaultdict(list)
        for name, duration in launches:
            durations[name].append(duration)
        totals = [0.0] * calls
        for name, values in durations.items():
            per_call, rest = divmod(len(values), calls)
            for call in range(calls):
                of_call = values if rest else values[call * per_call : (call + 1) * per_call]
                totals[call] += sum(of_call) / (calls if rest else 1)
            by_kernel[name] += sum(values) / calls
        per_rank.append(totals)
    longest_first = sorted(by_kernel.items(), key=lambda item: -item[1])
    return DeviceTime(
        median_us=statistics.median(total for totals in per_rank for total in totals),
        slowest_us=max(statistics.median(totals) for totals in per_rank),
        by_kernel_us={name: us / len(per_rank) for name, us in longest_first},
    )


class Bandwidths(NamedTuple):
    """Bytes per second of plain copies; None: not measured."""

    link: float | None = None  # between two GPUs, one way
    memory: float | None = None  # in one GPU, bytes read and bytes written


def measure_bandwidths(devices: Sequence[jax.Device]) -> Bandwidths:
    """Measures copies in the first GPU's memory, and to the second GPU if there is one."""
    if devices[0].platform != "gpu":
        return Bandwidths()
    source = jax.device_put(jnp.zeros(_COPY_BYTES, jnp.uint8), devices[0])
    copy = jax.jit(jnp.copy)
    # A copy in memory reads all bytes and writes them.
    memory = 2 * _COPY_BYTES * _copies_per_second(lambda: copy(source))
    if len(devices) == 1:
        return Bandwidths(memory=memory)
    link = _COPY_BYTES * _copies_per_second(lambda: jax.device_put(source, devices[1]))
    return Bandwidths(link=link, memory=memory)


def _copies_per_second(copy: Callable[[], jax.Array]) -> float:
    """Returns the highest rate of 8 measurements: other work on the machine only lowers it."""
    at_once = 8  # so that the time to start a copy is hidden by the copies before
    jax.block_until_ready(copy())
    best = float("inf")
    for _ in range(8):
        start = time.perf_counter()
        copies = [copy() for _ in range(at_once)]
        jax.block_until_ready(copies)
        best = min(best, time.perf_counter() - start)
        del copies
    return at_once / best
