"""Runs PyTorch's grouped matmul; `jax_ep.bench.matmul_torch` runs this file as a script.

The script imports nothing of this library, so that JAX does not start in its process. Its argument
is a JSON object with the arguments of `Product`. Each line of its input is a JSON list: a method of
`Product`, and the method's arguments. For each such line it prints one line: the method's result,
or {"error": text}.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any


class Product:
    """Random rows [R, depth], ordered by group, times the groups' matrices [depth, columns].

    With `float8`, operands are float8_e4m3fn instead of bfloat16. They have scales, all 1, for each
    row and for each column of a matrix, and sums are less precise than float32 (`use_fast_accum`).
    The result is bfloat16. With `transposed` or `float8`, the matrices are stored transposed, as
    [columns, depth].
    """

    def __init__(
        self,
        torch: Any,
        depth: int,
        columns: int,
        group_sizes: Sequence[int],
        float8: bool,
        transposed: bool,
    ):
        def random(*shape: int) -> Any:
            numbers = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
            return numbers.to(torch.float8_e4m3fn) if float8 else numbers

        torch.manual_seed(0)
        self.torch, self.ends = torch, [0, *itertools.accumulate(group_sizes)]
        num_rows, num_groups = self.ends[-1], len(group_sizes)
        self.rows = random(num_rows, depth)
        if float8 or transposed:
            self.matrices = random(num_groups, columns, depth).transpose(1, 2)
        else:
            self.matrices = random(num_groups, depth, columns)
        offs = torch.tensor(self.ends[1:], device="cuda", dtype=torch.int32)
        self.function, self.scales = torch._grouped_mm, []
        self.options = {"offs": offs}
        if float8:
            self.function = torch._scaled_grouped_mm
            self.scales = [
                torch.ones(*shape, device="cuda", dtype=torch.float32)
                for shape in ((num_rows,), (num_groups, columns))
            ]
            self.options |= {"out_dtype": torch.bfloat16, "use_fast_accum": True}

    def multiply(self) -> Any:
        return self.function(self.rows, self.matrices, *self.scales, **self.options)

    def times(self, calls: int) -> tuple[float, float]:
        """Returns the microseconds of a call by the host's clock, and by CUDA events."""
        first, last = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        # Uses the GPU, so that it switches from JAX's process to this one before the clock starts.
        self.torch.zeros(1, device="cuda")
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        first.record()
        for _ in range(calls):
            self.multiply()
        last.record()
        self.torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return seconds / calls * 1e6, first.elapsed_time(last) / calls * 1e3

    def errors(self, *groups: int) -> list[float]:
        """Returns the relative error of each group's result.

        It is the norm of the difference from a float32 result, divided by the norm of the latter.
        Only the first 1024 rows of a group are compared, because float32 copies take much memory.
        """
        out, found = self.multiply(), []
        for group in groups:
            start, end = self.ends[group : group + 2]
            rows = slice(start, min(end, start + 1024))
            want = self.rows[rows].float() @ self.matrices[group].float()
            error = (out[rows].float() - want).norm().item()
            found.append(error / max(want.norm().item(), 1e-30))
        return found


def main() -> None:
    # The import is slow, so it comes before the first request, while JAX compiles.
    import torch

    # The GPU is not used before the first request, because that would disturb XLA's autotuning.
    product = None
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        product = product or Product(torch, **json.loads(sys.argv[1]))
        print(json.dumps(getattr(product, method)(*arguments)), flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception as error:
        text = "".join(traceback.format_exception_only(error)).splitlines()[0]
        print(json.dumps({"error": text}), flush=True)
        sys.exit(1)
