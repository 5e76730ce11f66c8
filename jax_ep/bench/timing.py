"""Times a function that every rank of a mesh runs: its wall time, and its device time by kernel.

Both times are measured on a compiled loop that calls the function. Each iteration depends on the
previous one, so XLA can neither hoist a call out of the loop, nor drop it, nor overlap it with the
next one.

The host limits the speed of a loop of short calls: it launches kernels on one device after the
other, and kernels on the first devices wait for their peers on the last one. The wall time includes
this wait. The device time excludes it: while device time is measured, a kernel that only waits (the
spacer) runs after each call, so that the host's launches get ahead of the devices. The time of the
loop's own kernels (its counter and a copy of it) is subtracted from the device time.
"""

from __future__ import annotations

import functools
import glob
import os
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep.runtime import jax_compat

# One launch of a kernel: the kernel's name, and the launch's duration in microseconds.
Kernel = tuple[str, float]
# "trace" is JAX's profiler. "cupti" is JAX's Mosaic GPU profiler, which is cheaper but may crash on
# several GPUs, because its threads append to one list without a lock.
DEVICE_TIMERS = ("trace", "cupti")
# The name of the spacer, a kernel that only waits between two calls, and how long it waits.
SPACER = "spacer"
SPACER_MICROSECONDS = 250


class WallTime(NamedTuple):
    """Microseconds per iteration of a loop: median, minimum and maximum over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: Sequence[float]) -> WallTime:
        return cls(statistics.median(times), min(times), max(times))


class DeviceTime(NamedTuple):
    """The microseconds that one call keeps a device busy: the sum of everything it launches.

    The timer "trace" sees kernels, copies and memsets, and the rank of each. The timer "cupti" sees
    kernels only, and does not know their ranks; with it, `slowest` equals `median`.

    Attributes:
      median: the median over ranks and calls.
      slowest: the slowest rank's median over calls.
      low: the 10th percentile over ranks and calls.
      high: the 90th percentile over ranks and calls.
      by_kernel: the time per call of each kernel by name, also of the loop's own, mean over ranks.
      timer: the profiler, one of DEVICE_TIMERS.
      of_loop: the time per call of the loop's own kernels; the first four values exclude it.
    """

    median: float
    slowest: float
    low: float
    high: float
    by_kernel: dict[str, float]
    timer: str
    of_loop: float = 0.0

    def without(self, of_loop: float) -> DeviceTime:
        """Returns a copy with `of_loop` subtracted from `median`, `slowest`, `low` and `high`."""
        times = {
            name: getattr(self, name) - of_loop for name in ("median", "slowest", "low", "high")
        }
        return self._replace(of_loop=of_loop, **times)


_tracing = threading.Lock()


def _compile_function(function: Callable[[Any], Any], argument: Any) -> Any:
    """Compiles a function for the argument's shapes. Several threads may do this at once.

    Only one of them traces: when several did, with jax 0.11.2, one failed once with StoreException.
    """
    with _tracing:
        traced = jax.jit(function).trace(argument)
    return traced.lower().compile()


class Loop:
    """A compiled loop that calls a function `step` on every rank of a one-axis mesh.

    Args:
      prepare: makes a rank's operands, a pytree of arrays, from its rows of `arrays`. It is called
        once and is not timed. None: `arrays` already are the operands, with a leading axis of
        ranks; several loops may share them.
      step: the function to time, called on a rank's operands. All arrays of its result, a pytree,
        are computed in every iteration.
      arrays: arrays [N * B, ...]; rank r gets rows r * B ... (r + 1) * B - 1.
      mesh: a mesh with one axis of N ranks.
      iterations: how many times the loop calls `step`.
      unroll: the number of calls in the body of the loop whose wall time is measured. The loop's
        own kernels are launched once per body.
    """

    def __init__(
        self,
        prepare: Callable[..., Any] | None,
        step: Callable[[Any], Any],
        arrays: Any,
        mesh: Mesh,
        iterations: int,
        unroll: int = 1,
    ):
        self.mesh, self.iterations = mesh, iterations
        self._step = self._per_rank(step)
        self.state = arrays
        if prepare is not None:
            make_state = self._per_rank(lambda args: prepare(*args), unstack=False)
            self.state = _compile_function(make_state, tuple(arrays))(tuple(arrays))
        self._step_on_rank = step
        self.compiled = self._compile(spaced=False, unroll=unroll)

    def _compile(self, spaced: bool, unroll: int = 1) -> Any:
        after = _wait_on_device if spaced else _add_up
        loop = self._per_rank(lambda state: self._loop(state, after, unroll))
        return _compile_function(loop, self.state)

    def _loop(
        self, state: Any, after: Callable[[jax.Array, list[jax.Array]], jax.Array], unroll: int
    ) -> Any:
        """Runs the loop on one rank, inside `shard_map`; returns the loop's final carry.

        The carry contains a scalar, the link, which each call of `step` passes to the next call.

        Args:
          state: the operands of `step`.
          after: a function (link, arrays of a call's result) -> link for the next call. The link
            makes the next call depend on these arrays.
          unroll: the number of calls in the loop's body.
        """
        step = self._step_on_rank
        # All outputs must be computed whole. XLA for GPUs computes them because they pass through
        # an optimization barrier. XLA for CPUs drops barriers, so there the loop carries outputs.
        carry_outputs = self.mesh.devices.flat[0].platform == "cpu"

        def body(_, carry):
            link, out = carry
            state_now, link, _ = lax.optimization_barrier((state, link, out))
            out = self._varying(lax.optimization_barrier(step(state_now)))
            link = self._varying(after(link, [leaf for leaf in jax.tree.leaves(out) if leaf.size]))
            return link, out if carry_outputs else None

        nothing = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(step, state) if carry_outputs else None,
        )
        carry = self._varying((jnp.float32(0), nothing))
        return lax.fori_loop(0, self.iterations, body, carry, unroll=unroll)

    def _varying(self, tree: Any) -> Any:
        """Casts arrays to vary (vma) over the mesh's axis."""
        axes = self.mesh.axis_names
        return jax.tree.map(lambda leaf: jax_compat.match_varying([leaf], axes)[0], tree)

    def outputs(self) -> Any:
        """Calls `step` once; returns its result, a pytree of arrays [N, ...] over the N ranks.

        Before the call, arrays of the results' sizes are filled with NaN and freed. The results
        most likely get this memory, so that an element that `step` does not write is NaN.
        """
        call = self.call  # compiled first, since that may take the memory that is filled
        shapes = jax.eval_shape(self._step, self.state)
        split = NamedSharding(self.mesh, PartitionSpec(*self.mesh.axis_names))
        fill = jax.jit(lambda: jax.tree.map(_poison, shapes), out_shardings=split)
        jax.block_until_ready(fill())
        return call(self.state)

    @functools.cached_property
    def call(self) -> Any:
        """The compiled program of one call of `step` on every rank. It takes `state`."""
        return _compile_function(self._step, self.state)

    def wall_time(self, repeats: int) -> WallTime:
        self.run()
        return WallTime.of([self.run() for _ in range(repeats)])

    def run(self) -> float:
        """Runs the whole loop once; returns the wall time of one iteration in microseconds."""
        start = time.perf_counter()
        jax.block_until_ready(self.compiled(self.state))
        return (time.perf_counter() - start) / self.iterations * 1e6

    def device_time(
        self, repeats: int, timers: Sequence[str] = DEVICE_TIMERS, spaced: bool = True
    ) -> DeviceTime:
        """Measures the device time of one call of `step` with the first of `timers` that works.

        Args:
          repeats: how many times the loop runs.
          timers: the profilers to try, in this order, a subset of DEVICE_TIMERS.
          spaced: whether the spacer, a kernel that only waits, follows each call, and the time of
            the loop's own kernels is subtracted. Calls that take milliseconds need neither.

        Raises:
          RuntimeError: no timer works; the message has the reasons.
        """
        failures = []
        for timer in timers:
            try:
                device = self.timed_by(timer, repeats, spaced)
                return device.without(_of_a_loop(self.mesh, timer)) if spaced else device
            except Exception as error:
                failures.append(f"{timer}: {type(error).__name__}: {error}")
        raise RuntimeError("; ".join(failures))

    @functools.cached_property
    def _spaced(self) -> Any:
        return self._compile(spaced=True)

    def timed_by(self, timer: str, repeats: int, spaced: bool) -> DeviceTime:
        """Measures the device time of one call of `step`, plus that of the loop's own kernels.

        `timer` is one of DEVICE_TIMERS. The other arguments are those of `device_time`.
        """
        compiled = self._spaced if spaced else self.compiled
        jax.block_until_ready(compiled(self.state))
        calls = repeats * self.iterations
        if timer == "trace":
            return summarize_by_rank(self._trace(compiled, repeats), calls)
        return summarize_mixed(self._cupti(compiled, repeats), calls, self.mesh.size)

    def _per_rank(self, function: Callable[[Any], Any], unstack: bool = True) -> Callable:
        spec = PartitionSpec(*self.mesh.axis_names)

        def on_stacked(tree):
            if unstack:
                tree = jax.tree.map(lambda leaf: leaf[0], tree)
            return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], function(tree))

        return jax.shard_map(on_stacked, mesh=self.mesh, in_specs=spec, out_specs=spec)

    def _trace(self, compiled: Any, repeats: int) -> list[list[Kernel]]:
        def run() -> None:
            for _ in range(repeats):
                jax.block_until_ready(compiled(self.state))

        return traced_launches(run, self.mesh.size)

    def _cupti(self, compiled: Any, repeats: int) -> list[Kernel]:
        from jax.experimental.mosaic.gpu import profiler

        launches: list[Kernel] = []
        # `measured` runs the program twice: once to warm up, then once under CUPTI.
        measured = profiler.measure(compiled, aggregate=False)
        for _ in range(repeats):
            _, timings = measured(self.state)
            launches += [
                (str(name), milliseconds * 1e3)
                for name, milliseconds in timings or ()
                if not str(name).startswith(SPACER)
            ]
        if not launches:
            raise RuntimeError("CUPTI recorded no kernel")
        return launches


@functools.cache
def _of_a_loop(mesh: Mesh, timer: str) -> float:
    """Measures the microseconds per call that a `Loop` on `mesh` spends in its own kernels.

    Times a loop whose calls do nothing, with `timer`, one of DEVICE_TIMERS. Kernels that wait
    between calls (the spacer) do not count.
    """
    loop = Loop(None, lambda state: state, jnp.zeros((mesh.size, 1)), mesh, iterations=20)
    return loop.timed_by(timer, repeats=2, spaced=True).median


def _poison(array: jax.ShapeDtypeStruct) -> jax.Array:
    """Makes an array filled with NaN or, for integers, the largest integer of the dtype."""
    if jnp.issubdtype(array.dtype, jnp.integer):
        return jnp.full(array.shape, jnp.iinfo(array.dtype).max, array.dtype)
    return jnp.full(array.shape, jnp.nan, array.dtype)


def _add_up(link: jax.Array, results: list[jax.Array]) -> jax.Array:
    return link + sum(leaf.reshape(-1)[0].astype(jnp.float32) for leaf in results) * 1e-6


def _wait_on_device(link: jax.Array, results: list[jax.Array]) -> jax.Array:
    # Imported here, because it loads Mosaic, which machines without GPUs may lack.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.fabric import ptx

    def wait(link_ref, *refs):
        ptx.pause(SPACER_MICROSECONDS * 1000)
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
    """Calls `run` under JAX's profiler, and lists what each GPU launched during the call.

    Args:
      run: the function to call.
      num_devices: the number of GPUs that are expected to run kernels.
      label: returns the name under which a profiler event is listed. None: the event's own name.
      gives_way: see `launches_by_device`.

    Returns:
      A list with, for each GPU, its launches in the order of their start.

    Raises:
      RuntimeError: fewer or more than `num_devices` GPUs ran kernels.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            run()
        (path,) = glob.glob(os.path.join(directory, "**", "*.xplane.pb"), recursive=True)
        profile = jax.profiler.ProfileData.from_file(path)
    launches = launches_by_device(profile, label, gives_way)
    if len(launches) != num_devices:
        raise RuntimeError(f"the trace has kernels of {len(launches)} GPUs, not of {num_devices}")
    return launches


def launches_by_device(
    profile: jax.profiler.ProfileData,
    label: Callable[[Any], str] | None = None,
    gives_way: Callable[[str], bool] | None = None,
) -> list[list[Kernel]]:
    """Lists the launches of kernels, copies and memsets that a profile shows for each GPU.

    Launches of the spacer, and GPUs without launches, are left out.

    Args:
      profile: the profile.
      label: returns the name under which a profiler event is listed. None: the event's own name.
      gives_way: None: the duration of each launch is counted in full. Else the durations of a GPU
        add up to the time during which anything runs on it: `gives_way` says of a name whether such
        launches count only while no others run; see `shared_durations`.

    Returns:
      A list with, for each GPU, its launches in the order of their start.
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

    Each instant belongs to the launches that run then and do not give way, in equal shares; if
    there are none, to those that give way.

    Args:
      spans: the start and the end of each launch.
      gives_way: for each launch, whether it gives way to others.

    Returns:
      The time of each launch, in the unit of `spans`.
    """
    times = [0.0] * len(spans)
    changes = sorted((at, i) for i, span in enumerate(spans) for at in span)
    running: set[int] = set()
    before = 0.0
    for at, i in changes:
        first = [j for j in running if not gives_way[j]] or running
        for j in first:
            times[j] += (at - before) / len(first)
        before = at
        running ^= {i}
    return times


def summarize_by_rank(ranks: Iterable[Sequence[Kernel]], calls: int) -> DeviceTime:
    """Computes the device time of one call from the launches of each rank during several calls.

    The time of a call on a rank is the sum of the call's launches on this rank. `DeviceTime` says
    how the times of all calls and ranks are combined.

    If a rank launched a kernel m * calls times, each call is taken to have made m consecutive
    launches of it. If the number of a kernel's launches is not a multiple of `calls`, as for
    kernels of the loop's setup, each call gets an equal share of their total time.

    Args:
      ranks: for each rank, its launches in the order of their start.
      calls: the number of calls.
    """
    per_rank: list[list[float]] = []
    by_kernel: dict[str, float] = defaultdict(float)
    for launches in ranks:
        durations: dict[str, list[float]] = defaultdict(list)
        for name, duration in launches:
            durations[name].append(duration)
        totals = [0.0] * calls
        for name, values in durations.items():
            share, rest = divmod(len(values), calls)
            for call in range(calls):
                mine = values[call * share : (call + 1) * share] if not rest else values
                totals[call] += sum(mine) / (1 if not rest else calls)
            by_kernel[name] += sum(values) / calls
        per_rank.append(totals)
    everything = sorted(total for totals in per_rank for total in totals)
    return DeviceTime(
        median=statistics.median(everything),
        slowest=max(statistics.median(totals) for totals in per_rank),
        low=everything[int(0.1 * (len(everything) - 1))],
        high=everything[round(0.9 * (len(everything) - 1))],
        by_kernel=_longest_first({name: us / len(per_rank) for name, us in by_kernel.items()}),
        timer="trace",
    )


def summarize_mixed(launches: Iterable[Kernel], calls: int, num_ranks: int) -> DeviceTime:
    """Computes the device time of one call from a list in which launches of all ranks are mixed.

    It is not known which launches belong to one call. So the median time of a call is estimated:
    for each kernel, the median duration of a launch is multiplied by the number of launches per
    call, and these products are added up. Percentiles are estimated in the same way.

    Args:
      launches: the launches of all ranks, in any order.
      calls: the number of calls that each rank made.
      num_ranks: the number of ranks.
    """
    durations: dict[str, list[float]] = defaultdict(list)
    for name, duration in launches:
        durations[name].append(duration)
    median, low, high = 0.0, 0.0, 0.0
    by_kernel: dict[str, float] = {}
    for name, values in durations.items():
        values.sort()
        # How many times a rank launches the kernel in one call.
        launched = len(values) / (calls * num_ranks)
        median += launched * statistics.median(values)
        low += launched * values[int(0.1 * (len(values) - 1))]
        high += launched * values[round(0.9 * (len(values) - 1))]
        by_kernel[name] = launched * statistics.fmean(values)
    return DeviceTime(median, median, low, high, _longest_first(by_kernel), "cupti")


def _longest_first(by_kernel: dict[str, float]) -> dict[str, float]:
    return dict(sorted(by_kernel.items(), key=lambda item: -item[1]))
