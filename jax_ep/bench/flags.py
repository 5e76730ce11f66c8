"""Flags that several bench commands share."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jax_ep.bench.timing import DEVICE_TIMERS
from jax_ep.flags import Flags, Holder
from pallas_kernels.exchange.plan import FEW_TOKENS

DTYPES = ("bfloat16", "float16", "float32")
TIMERS = ("auto", *DEVICE_TIMERS, "none")


class Iterations(NamedTuple):
    """The default of --iterations, on CPUs and on GPUs.

    On GPUs a compiled loop takes about 450 microseconds to start, which its calls share.
    """

    on_cpus: int
    many_tokens: int
    few_tokens: int  # up to FEW_TOKENS a rank


class Timing(NamedTuple):
    """The flags that say how loops (`timing.Loop`) are timed, and what one of them defaults to."""

    iterations: Holder
    repeats: Holder
    timer: Holder
    by_kernel: Holder
    default_iterations: Iterations

    def iterations_of(self, num_tokens: int) -> int:
        """Returns --iterations, or its default for so many tokens a rank."""
        if self.iterations.value is not None:
            return self.iterations.value
        if jax.default_backend() != "gpu":
            return self.default_iterations.on_cpus
        few = num_tokens <= FEW_TOKENS
        return self.default_iterations.few_tokens if few else self.default_iterations.many_tokens


class BenchFlags(Flags):
    def timing(
        self, iterations: int | Iterations, repeats: int, *, least_iterations: int
    ) -> Timing:
        """Defines --iterations, --repeats, --device_timer and --by_kernel.

        `iterations` and `repeats` are defaults; `least_iterations` is the least that is allowed.
        """
        text, default = "Dependent calls in one loop.", None
        if isinstance(iterations, int):
            default, iterations = iterations, Iterations(iterations, iterations, iterations)
        else:
            text += (
                f" Default: on GPUs {iterations.many_tokens}, or {iterations.few_tokens} of up to "
                f"{FEW_TOKENS} tokens a rank, fewer of what takes milliseconds; "
                f"{iterations.on_cpus} on CPUs."
            )
        return Timing(
            self.integer("iterations", default, text, least_iterations),
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
            iterations,
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
