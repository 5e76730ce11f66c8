"""Checks that kernels give the same bits in any number of processes, on this machine's GPUs.

`python processes_check.py` runs the same programs in one process, and in one process for each GPU.
Such a process sees all GPUs or only its own. The check compares every result bit for bit, and the
exchange and its gradients with `jax_ep.reference` under all routings of `support.contract`. It
repeats the exchange while ranks are delayed at random, and prints a table.

Before that, it kills one of the processes in the middle of a loop. The other processes must end
soon, say in which op which rank waited for which, and leave nothing on a GPU. The check exits with
1 if anything differs. pytest does not collect it.

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
import tempfile
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
from jax_ep.collectives.algorithms import ALGORITHMS
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
    parser.add_argument("--results")
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
    with tempfile.TemporaryDirectory() as folder:
        expected, failed = None, 0
        if count > 1:
            path = Path(folder) / "killed"
            said = after_one_is_killed(count, SHARED if args.share else ALL, path)
            print(f"{'one is killed':<20}{said or 'FAILED'}", flush=True)
            failed += not said
        for name, (processes, sees) in ways.items():
            path = Path(folder) / name.replace(" ", "_")
            texts = start(processes, sees, path, args.repeats)
            found = gather(path)
            same = "reference" if expected is None else differences(expected, found)
            expected = expected or found
            failed += same not in ("reference", "same bits")
            print(f"{name:<20}{len(found)} results, {same}; {texts}", flush=True)
    return bool(failed)


def number_of_gpus() -> int:
    lines = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    return len(lines.stdout.splitlines())


def start(processes: int, sees: str, path: Path, repeats: int) -> str:
    """Runs the programs and checks in `processes` processes; returns what process 0 printed."""
    running = launch(processes, sees, path, "--repeats", str(repeats))
    texts = [process.communicate(timeout=300)[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit(
            f"a process failed: {[p.returncode for p in running]}\n" + "\n".join(texts)
        )
    return texts[0].strip()


def launch(
    processes: int, sees: str, path: Path, *flags: str, stderr: int | None = None
) -> list[subprocess.Popen[str]]:
    path.mkdir()
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
        command += ["--coordinator", coordinator, "--results", str(path), *flags]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        running.append(process)
    return running


def after_one_is_killed(processes: int, sees: str, path: Path) -> str:
    """Kills the last of `processes` processes in its loop, and waits for the end of the others."""
    running = launch(processes, sees, path, "--endless", stderr=subprocess.STDOUT)
    try:
        for process in running:
            assert process.stdout is not None
            while "looping" not in (line := process.stdout.readline()):
                if not line:
                    raise SystemExit("a process ended before its loop")
        time.sleep(0.5)
        running[-1].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        texts = [output_of(process, TIMEOUT_SECONDS + 30) for process in running[:-1]]
        took = time.monotonic() - killed
    finally:
        for process in running:
            process.kill()
    held = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    text = "\n".join(texts)
    said = re.search(r"jax_ep: [\w ]+: rank \d+ waited over .* for rank \d+", text)
    ended = all(process.returncode not in (0, -signal.SIGKILL) for process in running[:-1])
    if not said or not ended or took > TIMEOUT_SECONDS + 30:
        print(text)
        return ""
    return f"the others ended after {took:.1f} s, {max(map(int, held))} MiB held: {said.group()}"


def output_of(process: subprocess.Popen[str], seconds: float) -> str:
    """Returns what a process writes until it ends; kills it after `seconds`."""
    try:
        return process.communicate(timeout=seconds)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


def gather(path: Path) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = {}
    for file in sorted(path.glob("*.npz")):
        found.update(np.load(file))
    return found


def differences(expected: dict[str, np.ndarray], found: dict[str, np.ndarray]) -> str:
    names = set(expected) ^ set(found)
    names |= {
        name
        for name in set(expected) & set(found)
        if expected[name].tobytes() != found[name].tobytes()
    }
    return f"DIFFERENT: {', '.join(sorted(names))}" if names else "same bits"


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
        repeat(mesh, sys.maxsize, lambda i: i or print("looping", flush=True), loss=False)
    results, loss = {}, not args.share
    for name, program, operands, want in programs(mesh, loss):
        shards = jax.tree.leaves(program(*operands))
        for i, array in enumerate(shards):
            for shard in array.addressable_shards:
                rank = shard.index[0].start or 0
                key = f"{name}.{i} at {rank}"
                results[key] = np.asarray(shard.data).view(np.uint8)
                if want is not None and np.asarray(shard.data).tobytes() != want[rank].tobytes():
                    raise SystemExit(f"{key} is wrong")
    np.savez(Path(args.results) / f"{number}.npz", **results)
    check_contract(mesh)
    alike = repeat(mesh, args.repeats, loss=loss)
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
        sizes = Sizes(num_tokens=6, num_ranks=mesh.size, top_k=3, num_experts=case.num_experts)
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

    return kernels.on_ranks(stacked, mesh, check_vma=True)


def exchange(mesh: Mesh, loss: bool) -> Any:
    """Jits dispatch, combine and their gradients."""
    capacity = 3 * NUM_TOKENS * TOP_K // 4
    case = contract.Case(mesh.size, NUM_TOKENS, HIDDEN, TOP_K, NUM_EXPERTS, capacity=capacity)

    def step(x: Any, choices: Any, weights: Any) -> Any:
        def forward(x: Any, weights: Any) -> Any:
            received = case.dispatch(x, choices, "pallas")
            y = received.tokens * 2
            out = jax_ep.combine(y, received.handle, weights, implementation="pallas")
            total = jnp.sum(out.astype(jnp.float32) ** 2)
            return total, (received.tokens, received.group_sizes, out)

        (total, kept), gradients = jax.value_and_grad(forward, (0, 1), has_aux=True)(x, weights)
        # NCCL's kernels would wait for a lost rank forever, so leave them out then.
        if not loss:
            return kept, gradients
        return kept, gradients, jax.lax.psum(total, AXIS) + jnp.zeros_like(total)

    return on_ranks(mesh, step)


def programs(mesh: Mesh, loss: bool) -> Any:
    """Yields a program's name, function and operands, and each rank's expected result or None."""
    all_tokens, *_ = arrays(mesh.size)
    operands = inputs(mesh)
    yield "exchange", exchange(mesh, loss), operands, None
    x = operands[0]
    num_rows = 64 // mesh.size * mesh.size
    sent = all_tokens.reshape(mesh.size, NUM_TOKENS, -1)[:, :num_rows]
    total = functools.reduce(np.add, sent.astype(np.float32)).astype(sent.dtype)
    parts = sent.reshape(mesh.size, mesh.size, -1, HIDDEN)
    # These results must be equal bit for bit.
    want = {
        "all_reduce": [total] * mesh.size,
        "all_gather": [sent.reshape(-1, HIDDEN)] * mesh.size,
        "reduce_scatter": np.split(total, mesh.size),
        "all_to_all": parts.swapaxes(0, 1).reshape(sent.shape),
    }
    for operation, of_ranks in want.items():
        for algorithm in sorted(set(ALGORITHMS[operation].names) - {"xla", "multimem"}):
            function = getattr(jax_ep, operation)

            def collective(x: Any, function: Any = function, algorithm: str = algorithm) -> Any:
                out = function(x[:num_rows], AXIS, algorithm=algorithm)
                # Adding zeros of x makes the result vary over the ranks (vma).
                return out + jnp.zeros_like(x[:1])

            name = f"{operation} {algorithm}"
            yield name, on_ranks(mesh, collective), [x], of_ranks


def repeat(
    mesh: Any, repeats: int, tell: Callable[[int], Any] = lambda i: None, loss: bool = True
) -> str:
    """Repeats the exchange `repeats` times, while this process is late at random."""
    operands, program = inputs(mesh), exchange(mesh, loss)

    def bits(results: Any) -> list[bytes]:
        leaves = jax.tree.leaves(results)
        return [np.asarray(s.data).tobytes() for leaf in leaves for s in leaf.addressable_shards]

    expected, rng = bits(program(*operands)), np.random.default_rng(jax.process_index())
    for i in range(repeats):
        if rng.random() < 0.2:
            # This process is late.
            time.sleep(rng.random() * 0.002)
        results = program(*operands)
        tell(i)
        if i % 10 == 0 and bits(results) != expected:
            raise SystemExit(f"repeat {i} differs")
    if bits(results) != expected:
        raise SystemExit("the last repeat differs")
    return f"{repeats} repeats alike"


if __name__ == "__main__":
    sys.exit(main())
