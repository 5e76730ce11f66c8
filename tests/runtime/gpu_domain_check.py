"""Checks symmetric memory on this machine's GPUs: `python gpu_domain_check.py --processes 2`.

Starts processes with one GPU each, or one process with all GPUs, and sets up their domain. Each GPU
then writes, by copies of the driver, into every heap and into a live array of every process. After
that come set-ups that must be refused. The check prints a row for each process and exits with 1 if
any row is wrong. pytest does not collect it, since it needs the GPUs for itself.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
# The uint32 words of the array that GPUs write to.
_WORDS = 1 << 12
# GPUs write into a heap from this 8-byte word of its header on; the words there are unused.
_NOTES = 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--number", type=int, help="of the process, for those that are started")
    parser.add_argument("--address", default="", help="of the coordinator")
    options = parser.parse_args()
    if options.number is not None:
        print(json.dumps(_process(options.number, options.processes, options.address)))
        return 0
    good = True
    for name, expected, environments in _cases(options.processes):
        rows = _start(environments)
        if expected and len({row.get("reason") for row in rows}) > 1:
            print(f"{name:<28} the reasons differ")
            good = False
        for number, row in enumerate(rows):
            reason = row.get("reason", "")
            as_expected = expected in reason if expected else row.get("good", False)
            good &= as_expected
            print(f"{name:<28} {number} {'ok ' if as_expected else 'BAD'} {_render(row)}")
    return 0 if good else 1


def _cases(count: int) -> list[tuple[str, str, list[dict[str, str]]]]:
    """Returns the set-ups to check, as (name, reason, environment of each process)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(count, 8))))
    gpus = visible.split(",")
    if count == 1:
        grows = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        platform = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
        return [("all GPUs", "", [{}]), ("pool grows", "", [grows]), ("platform", "", [platform])]
    own = [{"CUDA_VISIBLE_DEVICES": gpus[i]} for i in range(count)]
    seen = [{"CHECK_LOCAL_DEVICE": str(i)} for i in range(count)]
    same = {"CUDA_VISIBLE_DEVICES": gpus[0], "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.5 / count}"}
    grows = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    platform = {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    version = [{}] * (count - 1) + [{"CHECK_VERSION": "0.0"}]
    return [
        ("each sees all", "", seen),
        ("each sees its own", "", own),
        ("both on one GPU", "belongs to process 0 and to process 1", [same] * count),
        ("pool grows", "may grow", [each | grows for each in own]),
        ("platform allocator", "virtual-memory API", [each | platform for each in own]),
        ("another version", "jax_ep 0.0", [a | b for a, b in zip(own, version, strict=True)]),
    ]


def _start(environments: list[dict[str, str]]) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    command = [sys.executable, __file__, "--processes", str(len(environments))]
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    started = [
        subprocess.Popen(
            [*command, "--address", address, "--number", str(number)],
            env=os.environ | {"PYTHONPATH": path, "JAX_EP_TIMEOUT_SECONDS": "60"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, environment in enumerate(environments)
    ]
    rows = []
    for process in started:
        try:
            output, errors = process.communicate(timeout=180)
            rows.append(json.loads(output.splitlines()[-1]))
        except (subprocess.TimeoutExpired, IndexError, ValueError):
            process.kill()
            errors = process.communicate()[1] if process.poll() is None else errors
            rows.append({"reason": "", "failed": errors[-2000:]})
    return rows


def _render(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"failed:\n{row['failed']}"
    if row["reason"]:
        return f"{row['seconds']:.2f} s, refused: {row['reason']}"
    checks = ", ".join(f"{name} {'ok' if ok else 'BAD'}" for name, ok in row["checks"].items())
    return "\n    ".join([f"{row['seconds']:.2f} s; {checks}", *row["lines"]])


def _process(number: int, count: int, address: str) -> dict[str, Any]:
    """Sets up symmetric memory in process `number` of `count` processes; returns what it found."""
    import jax

    if count > 1:
        local = os.environ.get("CHECK_LOCAL_DEVICE")
        jax.distributed.initialize(
            address, count, number, local_device_ids=0 if local is None else int(local)
        )
    from jax_ep import version
    from jax_ep.runtime import symmetric_memory

    version.__version__ = os.environ.get("CHECK_VERSION", version.__version__)
    jax.devices()
    begin = time.monotonic()
    domain = symmetric_memory.domain()
    seconds = time.monotonic() - begin
    if isinstance(domain, str):
        # The coordinator must stay until all processes have their answer.
        _meet(count, "refused")
        return {"reason": domain, "seconds": seconds}
    checks = _write_to_all(domain, number, count)
    checks["no socket left"] = not glob.glob(f"{tempfile.gettempdir()}/jax_ep-*/")
    lines = symmetric_memory.describe()
    good = all(checks.values())
    return {
        "reason": "",
        "seconds": seconds,
        "checks": checks,
        "lines": lines,
        "good": good,
    }


def _write_to_all(domain: Any, number: int, count: int) -> dict[str, bool]:
    """Writes from each GPU of this process into the heap and into an array of every GPU."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jax_ep.runtime import cuda_driver
    from pallas_kernels.fabric import memory_map

    numbers = domain.numbers
    arrays = {
        numbers[device.id]: jax.device_put(np.zeros(_WORDS, np.uint32), device)
        for device in jax.local_devices()
    }
    ordinals = {numbers[device.id]: device.local_hardware_id for device in jax.local_devices()}
    own = {
        g: array.block_until_ready().addressable_shards[0].data.unsafe_buffer_pointer()
        for g, array in arrays.items()
    }
    addresses = {int(g): a for each in _tell_all(number, count, own) for g, a in each.items()}
    for g, ordinal in ordinals.items():
        heap = domain.base + g * domain.stride
        raw = cuda_driver.read(ordinal, heap + 8 * memory_map.DELTA, 8 * memory_map.MAX_GPUS)
        deltas = np.frombuffer(raw, np.uint64)
        for peer in range(domain.num_gpus):
            word = np.uint32(1000 * (g + 1) + peer)
            there = domain.base + peer * domain.stride + 8 * _NOTES
            cuda_driver.write(ordinal, there + 4 * g, word.tobytes())
            there = (addresses[peer] + int(deltas[peer])) % 2**64
            cuda_driver.write(ordinal, there + 4 * g, word.tobytes())
    _meet(count, "written")
    expected = {g: [1000 * (one + 1) + g for one in range(domain.num_gpus)] for g in own}
    checks = {"heap": True, "array": True, "XLA reads it": True}
    for g, ordinal in ordinals.items():
        there = domain.base + g * domain.stride + 8 * _NOTES
        raw = cuda_driver.read(ordinal, there, 4 * domain.num_gpus)
        checks["heap"] &= np.frombuffer(raw, np.uint32).tolist() == expected[g]
        checks["XLA reads it"] &= int(jnp.sum(arrays[g])) == sum(expected[g])
        checks["array"] &= np.asarray(arrays[g])[: domain.num_gpus].tolist() == expected[g]
    _meet(count, "read")
    return checks


def _tell_all(number: int, count: int, own: dict[int, int]) -> list[dict[str, int]]:
    """Exchanges the addresses of the processes' arrays: one dict, GPU -> address, per process."""
    if count == 1:
        return [{str(g): address for g, address in own.items()}]
    from jax_ep.runtime import processes

    store = processes.store()
    assert store is not None
    store.key_value_set(f"check/{number}", json.dumps(own))
    return [json.loads(store.blocking_key_value_get(f"check/{p}", 60_000)) for p in range(count)]


def _meet(count: int, name: str) -> None:
    if count > 1:
        from jax_ep.runtime import processes

        processes.store().wait_at_barrier(f"check/{name}", 90_000)


if __name__ == "__main__":
    sys.exit(main())
