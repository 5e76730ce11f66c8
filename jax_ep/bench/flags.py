"""Defines the command-line flags that several commands of `python -m jax_ep bench` share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import jax

from jax_ep.bench.timing import DEVICE_TIMERS
from jax_ep.exchange import quantization
from jax_ep.flags import DTYPES, Flags, Holder
from pallas_kernels.exchange.plan import FEW_TOKENS
from pallas_kernels.formats import RowFormat

# The allowed values of --wire_dtype, the dtype in which rows are sent to other ranks. "none" sends
# rows in the dtype that they already have.
WIRE_DTYPES = ("none", *(dtype.name for dtype in quantization.WIRE_DTYPES))

TIMERS = ("auto", *DEVICE_TIMERS, "none")


def wire_format(name: str) -> RowFormat:
    """Returns the row format (dtype and scales) with which --wire_dtype=`name` sends rows."""
    return quantization.wire_format(None if name == "none" else name)


class Iterations(NamedTuple):
    """The defaults of --iterations, the number of calls in a timed loop.

    On GPUs a compiled loop takes about 450 microseconds to start. A loop of short calls must have
    many calls, so that the start is a small part of the loop's time.

    Attributes:
      on_cpus: the default on CPUs.
      many_tokens: the default on GPUs, for more than FEW_TOKENS tokens per rank.
      few_tokens: the default on GPUs, for up to FEW_TOKENS tokens per rank.
    """

    on_cpus: int
    many_tokens: int
    few_tokens: int


class Timing(NamedTuple):
    """The flags that say how a `timing.Loop` is timed.

    Attributes:
      iterations: the flag --iterations, the number of calls in a timed loop.
      repeats: the flag --repeats, how many times each loop is run and timed.
      timer: the flag --device_timer.
      by_kernel: the flag --by_kernel, whether device times are printed by kernel.
      default_iterations: the values that --iterations has if it is not given.
    """

    iterations: Holder
    repeats: Holder
    timer: Holder
    by_kernel: Holder
    energy: Holder
    default_iterations: Iterations

    def iterations_of(self, num_tokens: int) -> int:
        """Returns the value of --iterations or its default for `num_tokens` tokens per rank."""
        if self.iterations.value is not None:
            return self.iterations.value
        if jax.default_backend() != "gpu":
            return self.default_iterations.on_cpus
        few = num_tokens <= FEW_TOKENS
        return self.default_iterations.few_tokens if few else self.default_iterations.many_tokens


class Shared(NamedTuple):
    """The flags that most bench commands have; None for a flag that this command lacks."""

    json: Holder
    plot: Holder
    ranks: Holder | None
    timing: Timing | None
    check: Holder | None
    seconds: Holder | None


class BenchFlags(Flags):
    def share(
        self,
        *,
        plot: str,
        ranks: str | None = "all devices",
        timing: Timing | None = None,
        check: Holder | None = None,
        seconds: float | None = None,
    ) -> Shared:
        """Defines the flags that a bench command has in common with others.

        The flags are --json, --plot and, unless their arguments are None, --ranks and --seconds.

        Args:
          plot: what the plot shows, for the help of --plot.
          ranks: the default of --ranks in words, for its help; None: the command lacks the flag.
          timing: the flags that `BenchFlags.timing` has already defined for the command, if any.
          check: the flag that `BenchFlags.check` has already defined for the command, if any.
          seconds: the default of --seconds; None: the command lacks the flag.
        """
        return Shared(
            self.json(),
            self.plot(plot),
            None if ranks is None else self.ranks(ranks),
            timing,
            check,
            None if seconds is None else self.seconds(seconds),
        )

    def timing(
        self, iterations: int | Iterations, repeats: int, *, least_iterations: int
    ) -> Timing:
        """Defines --iterations, --repeats, --device_timer, --by_kernel and --energy.

        `iterations` and `repeats` are the flags' defaults. Values of --iterations below
        `least_iterations` are an error.
        """
        text, default = "The number of dependent calls in one timed loop.", None
        if isinstance(iterations, int):
            default, iterations = iterations, Iterations(iterations, iterations, iterations)
        else:
            text += (
                f" Default: on GPUs {iterations.many_tokens}, and {iterations.few_tokens} for up "
                f"to {FEW_TOKENS} tokens per rank, with fewer for what takes milliseconds; on CPUs "
                f"{iterations.on_cpus}."
            )
        return Timing(
            self.integer("iterations", default, text, least_iterations),
            self.integer("repeats", repeats, "How many times each loop is run and timed."),
            self.device_timer(),
            self.boolean(
                "by_kernel", "Print each result's device time by kernel, below the table."
            ),
            self.boolean(
                "energy",
                "Run each loop for two seconds more, and print the energy of an iteration (mJ, all "
                "GPUs), and the mean power (W) and clock (MHz) of a GPU.",
            ),
            iterations,
        )

    def device_timer(self) -> Holder:
        return self.choice(
            "device_timer",
            "auto",
            TIMERS,
            "What measures device times on GPUs. trace: jax.profiler's trace, which knows the rank "
            "of each kernel, copy and memset. cupti: JAX's Mosaic GPU profiler, which sees kernels "
            "only and mixes ranks. auto: the first that works. none: device times are left out.",
        )

    def ranks(self, default: str = "all devices") -> Holder:
        return self.integers(
            "ranks", None, f"N, the numbers of ranks to measure. Default: {default}."
        )

    def tokens(self, on_gpus: str, on_cpus: str) -> Holder:
        return self.integers(
            "tokens",
            None,
            "T, the numbers of tokens per rank to measure. "
            f"Default: {on_gpus} on GPUs and {on_cpus} on CPUs.",
        )

    def dtype(self, of: str, allowed: Iterable[str] = DTYPES) -> Holder:
        return self.choice("dtype", "bfloat16", allowed, f"The dtype of {of}.")

    def capacity_factor(self) -> Holder:
        return self.number(
            "capacity_factor",
            1.125,
            "Rows of a receive buffer, as a multiple of the T * K rows that a rank gets on "
            "average. The buffer is larger where the run's routing needs more rows. 0: room for "
            "any routing.",
        )

    def implementations(self, allowed: Iterable[str], of: str, default: str) -> Holder:
        """Defines --implementations, which selects this library's implementations to measure.

        Args:
          allowed: the names that the flag accepts.
          of: what is implemented, for the help of the flag.
          default: the default in words, for the help.
        """
        return self.choices(
            "implementations",
            None,
            allowed,
            f"This library's implementations of {of} to measure; empty: none. Default: {default}.",
            may_be_empty=True,
        )

    def baselines(self, allowed: Iterable[str], of: str, default: str) -> Holder:
        """Defines --baselines, which selects code of other libraries to measure for comparison.

        Args:
          allowed: the names that the flag accepts.
          of: what the baselines are, for the help of the flag.
          default: the default in words, for the help.
        """
        return self.choices(
            "baselines",
            None,
            allowed,
            f"What the implementations are compared with: {of}; empty: nothing. "
            f"Default: {default}.",
            may_be_empty=True,
        )

    def check(self, what: str) -> Holder:
        return self.boolean("check", f"Before timing, compare {what}; a difference is an error.")

    def seed(self, of: str) -> Holder:
        return self.integer("seed", 0, f"The seed of the random {of}.", least=0)

    def write_table(self) -> Holder:
        return self.output(
            "write_table",
            "The JSON file to write the collectives' lookup table to, merged into what the file "
            "has. Default: no file.",
        )

    def seconds(self, default: float) -> Holder:
        return self.number(
            "seconds",
            default,
            "Seconds from the start, after which no further measurement is begun.",
        )
