"""Timing of a per-rank function on a mesh: in-loop wall time, and device time by kernel.

Both times are of a compiled loop whose iterations depend on each other: nothing can be hoisted out
of it, left out of it, or run while the next iteration does.

A loop of short calls is bound by the host, which launches them on one device after the other, and
the kernels of the first devices wait for the last. That is part of the wall time, and not of the
device time: there, a kernel that only waits runs after each call, and the host gets ahead; and what
the loop itself runs on the device, a counter and a copy of it, is taken off.
"""

from __future__ import annotations

import functools
import glob
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

Kernel = tuple[str, float]  # name, microseconds
# JAX's profiler, and its Mosaic GPU profiler: cheaper, but not made for several GPUs: its threads
# add to one list without a lock. Two of nine long runs that used it on four crashed.
DEVICE_TIMERS = ("trace", "cupti")
SPACER = "spacer"  # the kernel that waits after each call
SPACER_MICROSECONDS = 250


class WallTime(NamedTuple):
    """Microseconds of one iteration, until the slowest rank is done; over repeats of the loop."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, times: Sequence[float]) -> WallTime:
        return cls(statistics.median(times), min(times), max(times))


class DeviceTime(NamedTuple):
    """Microseconds that one call keeps the device busy: the sum of everything it launches.

    The trace knows which rank ran what and sees copies and memsets, not only kernels. The Mosaic
    helper sees kernels only, and not whose they were: there `slowest` is `median`.
    """

    median: float  # over ranks and calls
    slowest: float  # the slowest rank's median over calls
    low: float  # 10th percentile over ranks and calls
    high: float  # 90th
    by_kernel: dict[str, float]  # name -> microseconds of one call, mean over ranks; the loop's too
    timer: str  # one of DEVICE_TIMERS
    of_loop: float = 0.0  # what the loop itself runs for each call, and is taken off

    def without(self, of_loop: float) -> DeviceTime:
        """Takes off so many microseconds of each call that are the loop's."""
        times = {
            name: getattr(self, name) - of_loop for name in ("median", "slowest", "low", "high")
        }
        return self._replace(of_loop=of_loop, **times)


class Loop:
    """A compiled loop of `step` over every rank of a one-axis mesh.

    Args:
      prepare: called per rank on its blocks of `arrays`; its result, a pytree of arrays, is made
        once and is not timed. None: `arrays` is that result, the ranks stacked; loops may share it.
      step: called per rank on what `prepare` returned; its result, a pytree of arrays, is wholly
        computed in every iteration.
      arrays: [N * B, ...] each; rank r gets rows r * B ... (r + 1) * B - 1.
      mesh: one axis, N ranks.
      iterations: of the loop.
    """

    def __init__(
        self,
        prepare: Callable[..., Any] | None,
        step: Callable[[Any], Any],
        arrays: Any,
        mesh: Mesh,
        iterations: int,
    ):
        self.mesh, self.iterations = mesh, iterations
        self._step = self._per_rank(step)
        self.state = arrays
        if prepare is not None:
            make_state = self._per_rank(lambda args: prepare(*args), unstack=False)
            self.state = jax.jit(make_state)(tuple(arrays))
        self._step_on_rank = step
        self.compiled = self._compile(spaced=False)

    def _compile(self, spaced: bool) -> Any:
        after = _wait_on_device if spaced else _add_up
        loop = self._per_rank(lambda state: self._loop(state, after))
        return jax.jit(loop).lower(self.state).compile()

    def _loop(self, state: Any, after: Callable[[jax.Array, list[jax.Array]], jax.Array]) -> Any:
        """Traces the loop on one rank; `after(link, results)`, the next link, follows each call."""
        step = self._step_on_rank
        # XLA for GPUs keeps barriers until everything is scheduled, so outputs behind one are
        # whole. XLA for CPUs drops them early: there the loop has to carry the outputs.
        carry_outputs = self.mesh.devices.flat[0].platform == "cpu"

        def body(_, carry):
            link, out = carry
            state_now, link, _ = lax.optimization_barrier((state, link, out))
            out = lax.optimization_barrier(step(state_now))
            link = after(link, [leaf for leaf in jax.tree.leaves(out) if leaf.size])
            return link, out if carry_outputs else None

        nothing = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
            jax.eval_shape(step, state) if carry_outputs else None,
        )
        return lax.fori_loop(0, self.iterations, body, (jnp.float32(0), nothing))

    def outputs(self) -> Any:
        """Calls `step` once: its result with the ranks stacked, each leaf [N, ...]."""
        return jax.jit(self._step)(self.state)

    def wall_time(self, repeats: int) -> WallTime:
        self.run()
        return WallTime.of([self.run() for _ in range(repeats)])

    def run(self) -> float:
        """Runs the loop once: microseconds of one iteration."""
        start = time.perf_counter()
        jax.block_until_ready(self.compiled(self.state))
        return (time.perf_counter() - start) / self.iterations * 1e6

    def device_time(
        self, repeats: int, timers: Sequence[str] = DEVICE_TIMERS, spaced: bool = True
    ) -> DeviceTime:
        """Measures by the first of `timers` that works; RuntimeError, with reasons, if none does.

        `spaced`: whether a wait comes after each call and the loop's own share is taken off, which
        calls of a few milliseconds can do without.
        """
        failures = []
        for timer in timers:
            try:
                device = self.timed_by(timer, repeats, spaced)
                return device.without(_of_a_loop(self.mesh, timer)) if spaced else device
            except Exception as error:  # profilers fail in their own ways; say how and go on
                failures.append(f"{timer}: {type(error).__name__}: {error}")
        raise RuntimeError("; ".join(failures))

    @functools.cached_property
    def _spaced(self) -> Any:
        return self._compile(spaced=True)

    def timed_by(self, timer: str, repeats: int, spaced: bool) -> DeviceTime:
        """Measures by one of `DEVICE_TIMERS`, the loop's own share included."""
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

        return jax.shard_map(
            on_stacked, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )

    def _trace(self, compiled: Any, repeats: int) -> list[list[Kernel]]:
        options = jax.profiler.ProfileOptions()
        options.host_tracer_level = 0
        options.python_tracer_level = 0
        with tempfile.TemporaryDirectory() as directory:
            with jax.profiler.trace(directory, profiler_options=options):
                for _ in range(repeats):
                    jax.block_until_ready(compiled(self.state))
            (path,) = glob.glob(os.path.join(directory, "**", "*.xplane.pb"), recursive=True)
            profile = jax.profiler.ProfileData.from_file(path)
        launches = launches_by_device(profile)
        if len(launches) != self.mesh.size:
            raise RuntimeError(f"saw {len(launches)} busy devices of {self.mesh.size}")
        return launches

    def _cupti(self, compiled: Any, repeats: int) -> list[Kernel]:
        from jax.experimental.mosaic.gpu import profiler

        launches: list[Kernel] = []
        # The helper runs the function once to warm up, then once under CUPTI.
        measured = profiler.measure(compiled, aggregate=False)
        for _ in range(repeats):
            _, timings = measured(self.state)
            launches += [
                (str(name), milliseconds * 1e3)
                for name, milliseconds in timings or ()
                if not str(name).startswith(SPACER)
            ]
        if not launches:
            raise RuntimeError("CUPTI saw no kernel")
        return launches


@functools.cache
def _of_a_loop(mesh: Mesh, timer: str) -> float:
    """Measures the microseconds per call that a loop itself runs, but for the wait."""
    loop = Loop(None, lambda state: state, jnp.zeros((mesh.size, 1)), mesh, iterations=20)
    return loop.timed_by(timer, repeats=2, spaced=True).median


def _add_up(link: jax.Array, results: list[jax.Array]) -> jax.Array:
    return link + sum(leaf.reshape(-1)[0].astype(jnp.float32) for leaf in results) * 1e-6


def _wait_on_device(link: jax.Array, results: list[jax.Array]) -> jax.Array:
    from jax.experimental.pallas import mosaic_gpu as plgpu  # not on a machine without GPUs

    from pallas_kernels.fabric import ptx

    def wait(link_ref, *refs):
        ptx.pause(SPACER_MICROSECONDS * 1000)
        refs[-1][0] = link_ref[0]

    options = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
    out_type = jax.ShapeDtypeStruct((1,), link.dtype)
    kernel = plgpu.kernel(wait, out_type=out_type, compiler_params=options, kernel_name=SPACER)
    return kernel(link.reshape(1), *(leaf.reshape(-1) for leaf in results)).reshape(())


def launches_by_device(profile: jax.profiler.ProfileData) -> list[list[Kernel]]:
    """Lists what every GPU ran but spacers, in the order of its start; idle GPUs are left out."""
    devices = []
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU:"):
            continue
        # Other lines ("XLA Ops", "Steps", ...) repeat the streams' time by another name.
        events = [
            (event.start_ns, event.name, event.duration_ns / 1e3)
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
            if not event.name.startswith(SPACER)
        ]
        if events:
            devices.append([(name, duration) for _, name, duration in sorted(events)])
    return devices


def summarize_by_rank(ranks: Iterable[Sequence[Kernel]], calls: int) -> DeviceTime:
    """Computes the device time of one call from all that each rank ran, in order, in `calls` calls.

    A kernel launched m * calls times belongs to each call m times; of one that does not divide
    so, such as the loop's own setup, every call bears an equal share.
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
    """Computes the device time of one call from launches of unknown rank: each kernel's median."""
    durations: dict[str, list[float]] = defaultdict(list)
    for name, duration in launches:
        durations[name].append(duration)
    median, low, high = 0.0, 0.0, 0.0
    by_kernel: dict[str, float] = {}
    for name, values in durations.items():
        values.sort()
        launched = len(values) / (calls * num_ranks)  # times in each call of each rank
        median += launched * statistics.median(values)
        low += launched * values[int(0.1 * (len(values) - 1))]
        high += launched * values[round(0.9 * (len(values) - 1))]
        by_kernel[name] = launched * statistics.fmean(values)
    return DeviceTime(median, median, low, high, _longest_first(by_kernel), "cupti")


def _longest_first(by_kernel: dict[str, float]) -> dict[str, float]:
    return dict(sorted(by_kernel.items(), key=lambda item: -item[1]))
