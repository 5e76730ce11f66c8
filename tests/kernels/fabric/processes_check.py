"""Checks that kernels give the same bits in any number of processes, on this machine's GPUs.

`python processes_check.py` runs the same programs in one process, and in one process for each GPU.
Such a process sees all GPUs or only its own. The check compares the collectives with NumPy bit for
bit, and the exchange and its gradients with `jax_ep.reference` under all routings of
`support.contract`. It repeats the exchange while ranks are delayed at random, and prints a table.

Before that, it kills one of the processes in the middle of a loop. The other processes must end
soon, and say in which op which rank waited for which. The check exits with 1 if anything differs.
pytest does not collect it.

`python processes_check.py --share=8` runs 8 processes on one GPU, which runs their kernels in
turns. It checks the results of 8 ranks on a machine with one GPU.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep.runtime import cuda_driver
from pallas_kernels.exchange.plan import Row, Sizes, for_low_latency

sys.path.insert(0, str(Path(__file__).parents[2]))
from support import contract, kernels
from support.processes import free_address

AXIS = "expert"
# How long a kernel waits for a killed process.
TIMEOUT_SECONDS = 5.0
# After this time without a heartbeat, jax.distributed ends the remaining processes.
HEARTBEAT_SECONDS = 10
NUM_EXPERTS, TOP_K, NUM_TOKENS, HIDDEN = 16, 4, 67, 1024
# Which GPUs a process sees: all, its own, or one that all processes share.
ALL, OWN, SHARED = "all", "own", "shared"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--share", type=int, help="processes, all on the first GPU")
    parser.add_argument("--process", help="NUMBER/COUNT, for those that are started")
    parser.add_argument("--coordinator")

    parser.add_argument("--endless", action="store_true")
    args = parser.parse_args()
    if args.process is not None:
        run(args)
        return 0
    count = args.share or number_of_gpus()
    if args.share:
        ways = {"on one GPU": (count, SHARED)}
    else:
        ways = {"one process": (1, ALL), "a process a GPU": (count, ALL)}
        ways["each sees its own"] = (count, OWN)
    failed = False
    if count > 1:
        said = after_one_is_killed(count, SHARED if args.share else ALL)
        print(f"{'one is killed':<20}{said or 'FAILED'}", flush=True)
        failed = not said
    for name, (processes, sees) in ways.items():
        print(f"{name:<20}{start(processes, sees, args.repeats)}", flush=True)
    return failed


def number_of_gpus() -> int:
    lines = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return len(lines.stdout.splitlines())


def start(processes: int, sees: str, repeats: int) -> str:
    """Runs the programs and checks in `processes` processes; returns what process 0 printed."""
    running = launch(processes, sees, "--repeats", str(repeats))
    texts = [process.communicate(timeout=300)[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(
            f"a process failed: {[p.returncode for p in running]}\n" + "\n".join(texts)
        )
    return texts[0].splitlines()[-1]


def launch(
    processes: int, sees: str, *flags: str, stderr: int | None = None
) -> list[subprocess.Popen[str]]:
    coordinator = free_address()
    if sees == SHARED:
        flags = (*flags, "--share", str(processes))
    running = []
    for i in range(processes):
        environment = dict(os.environ)
        if sees != ALL:
            environment["CUDA_VISIBLE_DEVICES"] = str(i if sees == OWN else 0)
        if sees == SHARED:
            environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.8 / processes:.3f}"
        command = [sys.executable, __file__, "--process", f"{i}/{processes}"]
        command += ["--coordinator", coordinator, *flags]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        running.append(process)
    return running


def after_one_is_killed(processes: int, sees: str) -> str:
    """Kills the last of `processes` processes in its loop, and waits for the end of the others."""
    running = launch(processes, sees, "--endless", stderr=subprocess.STDOUT)
    try:
        for process in running:
            assert process.stdout is not None
            while "looping" not in (line := process.stdout.readline()):
                if not line:
                    raise SystemExit("a process ended before its loop")
        time.sleep(0.5)
        running[-1].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        texts = [process.communicate(timeout=TIMEOUT_SECONDS + 30)[0] for process in running[:-1]]
        took = time.monotonic() - killed
    except subprocess.TimeoutExpired:
        return ""
    finally:
        for process in running:
            process.kill()
    said = re.search(r"jax_ep: [\w ]+: rank \d+ waited over .* for rank \d+", "\n".join(texts))
    if said is None or any(process.returncode == 0 for process in running[:-1]):
        print("\n".join(text[-2000:] for text in texts))
        return ""
    return f"the others ended after {took:.1f} s: {said.group()}"


def run(args: Any) -> None:
    """Runs the programs and checks of one process."""
    if args.endless:
        os.environ["JAX_EP_TIMEOUT_SECONDS"] = str(TIMEOUT_SECONDS)
    number, count = map(int, args.process.split("/"))
    if args.share:
        pass_for_another_gpu(number)
    if count > 1:
        ids = None if "CUDA_VISIBLE_DEVICES" in os.environ else [number]
        seconds = HEARTBEAT_SECONDS if args.endless else 100
        # A GPU that runs kernels in turns ends a kernel late.
        if args.endless and args.share:
            seconds *= 2
        jax.distributed.initialize(
            args.coordinator,
            count,
            number,
            local_device_ids=ids,
            heartbeat_timeout_seconds=seconds,
        )
    mesh = Mesh(np.asarray(jax.devices()), (AXIS,))
    if args.endless:
        repeat(mesh, sys.maxsize)
    for name, program, operand, want in collectives(mesh):
        for shard in program(operand).addressable_shards:
            rank = shard.index[0].start or 0
            if np.asarray(shard.data).tobytes() != want[rank].tobytes():
                raise SystemExit(f"{name} is wrong at {rank}")
    check_contract(mesh)
    alike = repeat(mesh, args.repeats)
    if number == 0:
        print(f"the contract holds, {alike}")


def pass_for_another_gpu(number: int) -> None:
    """Makes the GPU that all processes share look like a different GPU in each process."""
    uuid = cuda_driver.uuid
    cuda_driver.uuid = lambda ordinal: f"{uuid(ordinal)}, {number}"


def check_contract(mesh: Mesh) -> None:
    """Checks the exchange against the reference, with and without the low-latency protocol."""
    for hidden, few in ((5120, True), (256, False)):
        case = contract.Case(mesh.size, 6, hidden, 3, 4 * mesh.size, "bfloat16", 20)
        names = "num_tokens", "num_ranks", "top_k", "num_experts"
        sizes = Sizes(**{name: getattr(case, name) for name in names})
        plan = for_low_latency(Row(hidden, jnp.bfloat16), sizes, mesh.size)
        assert (plan is not None) == few
        contract.check_ranks_here(case, mesh, contract.ROUTINGS, "pallas")


def arrays(num_ranks: int) -> tuple[np.ndarray, ...]:
    """Draws the tokens, choices and weights of all ranks, [N * T, ...] each."""
    rng, rows = np.random.default_rng(0), num_ranks * NUM_TOKENS
    choices = np.stack([rng.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(rows)])
    x = rng.standard_normal((rows, HIDDEN)).astype(jnp.bfloat16)
    weights = rng.random((rows, TOP_K)).astype(np.float32)
    return x, choices.astype(np.int32), weights


def inputs(mesh: Mesh) -> list[jax.Array]:
    sharding = NamedSharding(mesh, P(AXIS))
    return [contract.shared(array, sharding) for array in arrays(mesh.size)]


def on_ranks(mesh: Mesh, function: Callable[..., Any]) -> Any:
    def stacked(*args: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[None], function(*args))

    return kernels.on_ranks(stacked, mesh)


def exchange(mesh: Mesh) -> Any:
    """Jits dispatch, combine and their gradients.

    No collective of XLA's runs between them, since NCCL's kernels wait for a lost rank forever.
    """

    def step(x: Any, choices: Any, weights: Any) -> Any:
        def forward(x: Any, weights: Any) -> Any:
            received = jax_ep.dispatch(
                x,
                choices,
                num_experts=NUM_EXPERTS,
                axis_name=AXIS,
                capacity=3 * NUM_TOKENS * TOP_K // 4,
                implementation="pallas",
            )
            y = received.tokens * 2
            out = jax_ep.combine(y, received.handle, weights, implementation="pallas")
            total = jnp.sum(out.astype(jnp.float32) ** 2)
            return total, (received.tokens, received.group_sizes, out)

        return jax.grad(forward, (0, 1), has_aux=True)(x, weights)

    return on_ranks(mesh, step)


def collectives(mesh: Mesh) -> Any:
    """Yields each collective's name, program and operand, and each rank's expected result."""
    num_rows = 64 // mesh.size * mesh.size
    sent = arrays(mesh.size)[0].reshape(mesh.size, NUM_TOKENS, -1)[:, :num_rows]
    total = functools.reduce(np.add, sent.astype(np.float32)).astype(sent.dtype)
    parts = sent.reshape(mesh.size, mesh.size, -1, HIDDEN)
    # These results must be equal bit for bit.
    want = {
        "all_reduce": [total] * mesh.size,
        "all_gather": [sent.reshape(-1, HIDDEN)] * mesh.size,
        "reduce_scatter": np.split(total, mesh.size),
        "all_to_all": parts.swapaxes(0, 1).reshape(sent.shape),
    }
    for operation, algorithms in (
        ("all_reduce", ("one_shot", "two_shot", "one_shot_ll", "two_shot_ll")),
        ("all_gather", ("direct", "ll")),
        ("reduce_scatter", ("direct", "ll")),
        ("all_to_all", ("direct", "ll")),
    ):
        for algorithm in algorithms:
            function = getattr(jax_ep, operation)

            def collective(x: Any, function: Any = function, algorithm: str = algorithm) -> Any:
                return function(x[:num_rows], AXIS, algorithm=algorithm)

            name = f"{operation} {algorithm}"
            yield name, on_ranks(mesh, collective), inputs(mesh)[0], want[operation]


def repeat(mesh: Any, repeats: int) -> str:
    """Repeats the exchange `repeats` times, while this process is late at random."""
    operands, program = inputs(mesh), exchange(mesh)

    def bits(results: Any) -> list[bytes]:
        leaves = jax.tree.leaves(results)
        return [np.asarray(s.data).tobytes() for leaf in leaves for s in leaf.addressable_shards]

    expected, rng = bits(program(*operands)), np.random.default_rng(jax.process_index())
    for i in range(repeats):
        if rng.random() < 0.2:
            # This process is late.
            time.sleep(rng.random() * 0.002)
        results = program(*operands)
        if i == 0:
            print("looping", flush=True)
        if i % 10 == 0 and bits(results) != expected:
            raise SystemExit(f"repeat {i} differs")
    return f"{repeats} repeats alike"


if __name__ == "__main__":
    sys.exit(main())
