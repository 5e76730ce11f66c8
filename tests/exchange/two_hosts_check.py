"""Checks the exchange between two GPUs that pass for two hosts; times it and NCCL.

    python tests/exchange/two_hosts_check.py

Starts two processes, each with one GPU, which pass for two hosts. They check the exchange and its
gradients against `jax_ep.reference` under every routing of `support.contract`, for few tokens, for
many, and with a host_capacity. They then time dispatch, combine and the gradient of a weighted
combine in compiled loops, next to collectives that move the same rows. NCCL would use NVLink
between the two GPUs, which hosts do not have; NCCL_P2P_DISABLE=1 prevents it. pytest does not
collect this file.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(_TESTS), str(_TESTS.parent)]
AXIS = "expert"
# The sizes of what is timed: tokens of a rank, and the calls in a loop.
NUM_TOKENS, HIDDEN, NUM_EXPERTS, TOP_K, NUM_CALLS = 4096, 7168, 256, 8, 40


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="two CPU devices, for the check alone")
    parser.add_argument("--process", type=int, help="the number of one that this program starts")
    parser.add_argument("--coordinator")
    arguments = parser.parse_args()
    if arguments.process is None:
        return start(arguments.cpu)
    run(arguments)
    return 0


def start(cpu: bool) -> int:
    """Starts both processes; returns the first exit status that is not 0, else 0."""
    from support.processes import free_address

    coordinator, running = free_address(), []
    for process in range(2):
        environment = os.environ | {"JAX_EP_DEVICES_PER_HOST": "1"}
        environment |= {"JAX_PLATFORMS": "cpu"} if cpu else {"CUDA_VISIBLE_DEVICES": str(process)}
        command = [sys.executable, __file__, *sys.argv[1:]]
        command += [f"--process={process}", f"--coordinator={coordinator}"]
        running.append(subprocess.Popen(command, env=environment))
    return next(filter(None, [process.wait() for process in running]), 0)


def run(arguments: Any) -> None:
    """Runs the checks and timings of one process; process 0 prints the times."""
    import jax
    import numpy as np
    from jax.sharding import Mesh
    from support import contract

    jax.distributed.initialize(arguments.coordinator, 2, arguments.process)
    mesh = Mesh(np.asarray(jax.devices()), (AXIS,))
    limits: list[dict[str, int]] = [{}, dict(num_hosts=2, host_capacity=20)]
    for num_tokens, limit in ((6, limits[0]), (300, limits[0]), (300, limits[1])):
        case = contract.Case(2, num_tokens, 256, 3, 8, "bfloat16", 3 * num_tokens)
        contract.check_ranks_here(case, mesh, contract.ROUTINGS, "two_level", **limit)
    if arguments.process == 0:
        print("the contract holds", flush=True)
    # XLA for CPUs removes results that a loop does not read, so there is nothing to time.
    if arguments.cpu:
        return
    for name, microseconds in times(mesh):
        if arguments.process == 0:
            low, median, high = microseconds
            print(f"{name:<28}{median:9.1f}  ({low:.1f} - {high:.1f})", flush=True)


def times(mesh: Any) -> Any:
    """Yields (name, least, median and most microseconds of a call) of each operation."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    from support import kernels
    from support.contract import shared

    import jax_ep

    num_rows = 2 * NUM_TOKENS
    rng, sharding = np.random.default_rng(0), NamedSharding(mesh, P(AXIS))
    on_ranks = functools.partial(kernels.on_ranks, mesh=mesh)

    def timed(step: Callable[..., Any], *operands: Any) -> tuple[float, float, float]:
        def loop(*operands: Any) -> Any:
            def call(_: Any, before: Any) -> Any:
                # A call begins when the call before it has ended; the barrier is their only
                # dependence.
                now, _ = lax.optimization_barrier((operands, before))
                first = jax.tree.leaves(lax.optimization_barrier(step(*now)))[0]
                return first.reshape(-1)[:1].astype(jnp.float32)

            return lax.fori_loop(0, NUM_CALLS, call, jnp.zeros(1))

        program, found = on_ranks(loop), []
        for _ in range(8):
            begin = time.perf_counter()
            jax.block_until_ready(program(*operands))
            found.append((time.perf_counter() - begin) / NUM_CALLS * 1e6)
        return min(found[1:]), statistics.median(found[1:]), max(found[1:])

    def dispatch(x: Any, topk_idx: Any) -> Any:
        sent = jax_ep.dispatch(
            x,
            topk_idx,
            num_experts=NUM_EXPERTS,
            axis_name=AXIS,
            capacity=NUM_TOKENS * TOP_K * 9 // 8,
        )
        return sent.tokens, sent.handle

    def combine_grad(g: Any, y: Any, handle: Any, weights: Any) -> Any:
        return jax.vjp(lambda *both: jax_ep.combine(both[0], handle, both[1]), y, weights)[1](g)

    tokens = rng.standard_normal((num_rows, HIDDEN)).astype(jnp.bfloat16)
    choices = np.argsort(rng.random((num_rows, NUM_EXPERTS)), axis=1)[:, :TOP_K]
    weights = rng.random((num_rows, TOP_K)).astype(np.float32)
    arrays = (tokens, choices.astype(np.int32), weights)
    x, topk_idx, weights = (shared(array, sharding) for array in arrays)
    y, handle = on_ranks(dispatch)(x, topk_idx)
    both = on_ranks(lambda x: jnp.stack([x, x]))(x)

    def scatter(both: Any) -> Any:
        return lax.psum_scatter(both, AXIS, scatter_dimension=0)

    yield "all-gather of the rows", timed(lambda x: lax.all_gather(x, AXIS), x)
    yield "ppermute", timed(lambda x: lax.ppermute(x, AXIS, [(0, 1), (1, 0)]), x)
    yield "reduce-scatter", timed(scatter, both)
    yield "dispatch", timed(dispatch, x, topk_idx)
    yield "combine", timed(jax_ep.combine, y, handle, weights)
    yield "gradient of the combine", timed(combine_grad, x, y, handle, weights)


if __name__ == "__main__":
    sys.exit(main())
