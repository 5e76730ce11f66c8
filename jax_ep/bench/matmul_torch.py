"""Times PyTorch's grouped matmul, which `bench matmul` compares with this library's.

PyTorch cannot run inside a compiled JAX loop. So `TorchLoop` runs `torch_grouped_mm.py` in another
process, which uses the GPU memory that JAX has left, and asks that process for one loop at a time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jax_ep.bench import torch_grouped_mm
from jax_ep.bench.matmul_operations import Case
from jax_ep.bench.timing import DEVICE_TIMERS, DeviceTime, Loop
from jax_ep.matmul import float8
from jax_ep.matmul.backend import Problem

TORCH = "torch"
OPERATIONS = ("product", "dlhs")


class TorchLoop(Loop):
    """A loop of independent calls of PyTorch's grouped matmul, in a process of its own.

    It is timed like other loops, but has no state, compiled program or outputs. Its operands are
    random, with groups of the sizes `group_sizes` and no rows past the last group. With
    `has_float8`, they are float8 instead of bfloat16. `op` is "product" or "dlhs".
    """

    def __init__(
        self,
        case: Case,
        op: str,
        has_float8: bool,
        group_sizes: Sequence[int],
        mesh: Mesh,
        iterations: int,
    ):
        self.mesh, self.iterations = mesh, iterations
        # The largest allowed relative error (in norm) of a group's result.
        self.limit = 3e-2 if has_float8 else 1e-2
        depth, columns = (case.hidden, case.mlp) if op == "product" else (case.mlp, case.hidden)
        product = {"depth": depth, "columns": columns, "group_sizes": list(group_sizes)}
        product |= {"float8": has_float8, "transposed": op == "dlhs"}
        # With -P, Python does not search the script's folder for modules that PyTorch imports.
        self._process = subprocess.Popen(
            [sys.executable, "-P", torch_grouped_mm.__file__, json.dumps(product)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of `torch_grouped_mm.Product` in PyTorch's process; returns its result."""
        assert self._process.stdin is not None and self._process.stdout is not None
        # If the process has ended, its last line of output, which is read below, says why.
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps([method, *arguments]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"PyTorch's process ended with status {self._process.wait()}")
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise RuntimeError(answer["error"])
        return answer

    def run(self) -> float:
        wall, _ = self._ask("times", self.iterations)
        # Uses the GPU, so that it switches back from PyTorch's process to this one before the next
        # loop is timed.
        jax.block_until_ready(jnp.zeros(1) + 1)
        return wall

    def device_time(
        self, repeats: int, timers: Sequence[str] = DEVICE_TIMERS, spaced: bool = True
    ) -> DeviceTime:
        """Measures the time of a call by CUDA events before and after a loop, with no profiler."""
        times = [self._ask("times", self.iterations)[1] for _ in range(repeats)]
        median = statistics.median(times)
        return DeviceTime(median, median, min(times), max(times), {}, "events")

    def check(self, groups: Sequence[int]) -> None:
        """Raises AssertionError unless the result is right for each group in `groups`."""
        for group, error in zip(groups, self._ask("errors", *groups), strict=True):
            text = f"group {group} is off by {error:.1e} of its norm, not {self.limit:g}"
            assert error < self.limit, text

    def close(self) -> None:
        """Ends the process and waits for its end."""
        with contextlib.suppress(BrokenPipeError), self._process:
            pass


def unavailable_reason(problem: Problem) -> str | None:
    """Returns why PyTorch cannot compute a grouped matmul on this machine, or None if it can."""
    dtype = jnp.dtype(problem.dtype)
    if dtype not in (jnp.bfloat16, float8.DTYPE):
        return f"it multiplies bfloat16 and float8, not {dtype}"
    if problem.platform != "cuda":
        return f"its kernels are for NVIDIA GPUs, and this program is for {problem.platform}"
    if importlib.util.find_spec("torch") is None:
        return "the package torch is not installed (pip install torch)"
    return _failure(dtype == float8.DTYPE)


@functools.cache
def _failure(has_float8: bool) -> str | None:
    """Tries PyTorch's grouped matmul on small operands; returns why it fails, or None.

    It fails, for example, in a PyTorch without CUDA, and in one before 2.9, which refuses groups of
    5 and 27 rows.
    """
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("one",))
    loop = TorchLoop(Case("", 32, 128, 128, 2, 32), "product", has_float8, (5, 27), mesh, 1)
    try:
        loop.check((0, 1))
    except (AssertionError, RuntimeError) as error:
        return str(error)
    finally:
        loop.close()
    return None
