"""Flags that several bench commands share."""

from __future__ import annotations

from typing import NamedTuple

from jax_ep.bench.timing import DEVICE_TIMERS
from jax_ep.flags import Flags, Holder

DTYPES = ("bfloat16", "float16", "float32")
TIMERS = ("auto", *DEVICE_TIMERS, "none")


class Timing(NamedTuple):
    """The flags that say how loops (`timing.Loop`) are timed."""

    iterations: Holder
    repeats: Holder
    timer: Holder
    by_kernel: Holder


class BenchFlags(Flags):
    def timing(self, iterations: int, repeats: int, *, least_iterations: int) -> Timing:
        """Defines --iterations, --repeats, --device_timer and --by_kernel.

        `iterations` and `repeats` are defaults; `least_iterations` is the least that is allowed.
        """
        return Timing(
            self.integer(
                "iterations", iterations, "Dependent calls in one loop.", least_iterations
            ),
            self.integer("repeats", repeats, "Times each loop is run."),
            self.choice(
                "device_timer",
                "auto",
                TIMERS,
                "CUPTI through jax.profiler's trace (by rank; kernels, copies and memsets) or "
                "through JAX's Mosaic GPU profiler (kernels, ranks mixed). auto: the first that "
                "works.",
            ),
            self.boolean("by_kernel", "Print device times by kernel below the table."),
        )

    def ranks(self, default: str = "all devices") -> Holder:
        return self.integers("ranks", None, f"Rank counts. Default: {default}.")

    def tokens(self, on_gpus: str, on_cpus: str) -> Holder:
        return self.integers(
            "tokens", None, f"Tokens per rank. Default: {on_gpus} on GPUs and {on_cpus} on CPUs."
        )

    def capacity_factor(self) -> Holder:
        return self.number(
            "capacity_factor",
            1.125,
            "Rows of a receive buffer over the T * K that a rank gets on average; raised where the "
            "run's routing needs more. 0: room for any routing.",
        )

    def seconds(self, default: float) -> Holder:
        return self.number("seconds", default, "Start nothing more after this long.")

    def json(self) -> Holder:
        return self.output("json", "Write everything measured to this file.")

    def plot(self) -> Holder:
        return self.output("plot", "Write a plot to this file, such as out.png.")
