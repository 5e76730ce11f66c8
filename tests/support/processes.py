"""The processes of a test run, their shares of GPU memory, and programs that tests start."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

_TESTS = Path(__file__).parents[1]

# The fractions of each GPU's memory that XLA's pools take: in all workers of pytest-xdist together,
# and in all programs that the workers start. The rest is for symmetric memory and CUDA contexts,
# about half a GiB for each process.
WORKERS_SHARE, PROGRAMS_SHARE = 0.6, 0.2
COMPILES_FAST = "JAX_DISABLE_MOST_OPTIMIZATIONS"
# Only what hangs takes as many seconds, however busy the machine is.
HANG_SECONDS = 600
# XLA flags that halve compile time for CPUs with jaxlib older than 0.11. Newer versions do not have
# the first flag, and XLA exits if it gets a flag that it does not have.
FAST_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1".split()
_FRACTION, _FRACTION_OF_OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


def take_share_of_gpus(environment: MutableMapping[str, str]) -> None:
    """Sets which GPUs this pytest worker uses, and how much of their memory, before JAX starts.

    With JAX_EP_TEST_GPUS=n each worker has n GPUs for itself. Otherwise all workers use all GPUs,
    and each has an equal share of the memory. A memory fraction that the user has set stays.
    """
    gpus = int(environment.get("JAX_EP_TEST_GPUS", 0))
    if gpus:
        first = gpus * int(environment.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        visible = ",".join(str(first + i) for i in range(gpus))
        environment["CUDA_VISIBLE_DEVICES"] = visible
    if _FRACTION_OF_OLD not in environment:
        environment.setdefault(_FRACTION, _fraction(WORKERS_SHARE, environment))


def compile_fast(environment: MutableMapping[str, str], jaxlib: str | None = None) -> None:
    """Makes JAX compile for CPUs fast, at the cost of slow programs; call it before JAX starts.

    Does nothing if the user has set the variable COMPILES_FAST to a value other than "1".

    Args:
        environment: the environment variables to change.
        jaxlib: jaxlib's version; by default the installed one.
    """
    if environment.setdefault(COMPILES_FAST, "1") != "1":
        return
    version = importlib.metadata.version("jaxlib") if jaxlib is None else jaxlib
    if tuple(map(int, version.split(".")[:2])) < (0, 11):
        flags = environment.get("XLA_FLAGS", "").split()
        environment["XLA_FLAGS"] = " ".join([f for f in flags if f not in FAST_FLAGS] + FAST_FLAGS)


def keep_compiled(environment: MutableMapping[str, str], folder: Path) -> None:
    """Makes JAX keep all compiled programs in `folder`; call it before JAX starts."""
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def free_address() -> str:
    """Returns HOST:PORT with a port of this machine on which no program listens."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def environment_of_program(fast: bool = False, **changes: str) -> dict[str, str]:
    """Returns the environment for a program that a test starts, with its share of GPU memory.

    Args:
        fast: whether the program compiles fast if the tests do; otherwise it compiles as a user's.
        **changes: variables to set.
    """
    environment = {**os.environ, _FRACTION: _fraction(PROGRAMS_SHARE, os.environ)}
    environment.pop(_FRACTION_OF_OLD, None)
    tests_compile_fast = environment.pop(COMPILES_FAST, None) == "1"
    flags = environment.get("XLA_FLAGS", "").split()
    environment["XLA_FLAGS"] = " ".join(flag for flag in flags if flag not in FAST_FLAGS)
    environment |= changes
    if fast and tests_compile_fast:
        compile_fast(environment)
    return environment


def _fraction(share: float, environment: MutableMapping[str, str]) -> str:
    alone = "JAX_EP_TEST_GPUS" in environment
    workers = 1 if alone else int(environment.get("PYTEST_XDIST_WORKER_COUNT", 1))
    return f"{share / workers:.4f}"


def output_of_a_failure(program: str, beside: str, **environment: str) -> str:
    """Runs a Python program that must fail; returns what it prints.

    The program can import `support`, and modules in the folder of the test file `beside`.
    """
    path = os.pathsep.join(map(str, [Path(beside).parent, _TESTS, _TESTS.parent]))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment_of_program(PYTHONPATH=path, **environment),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    return output


def run_jax_ep(*args: str, platforms: str = "cpu") -> subprocess.CompletedProcess[str]:
    """Runs `python -m jax_ep` with the given arguments, on JAX's `platforms`."""
    return subprocess.run(
        [sys.executable, "-m", "jax_ep", *args],
        cwd=_TESTS.parent,
        env=environment_of_program(JAX_PLATFORMS=platforms),
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )


def outputs_of_processes(
    program: str,
    *args: str,
    count: int = 2,
    devices: int = 2,
    changes: Sequence[dict[str, str]] = (),
) -> list[str]:
    """Runs a Python program in processes with some CPU devices each; returns what they print.

    The program's arguments are the address of the coordinator, the process's number, and `args`.
    It can import `support`. `changes` are variables to set in each process's environment.
    """
    environment = environment_of_program(
        fast=True,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS=f"--xla_force_host_platform_device_count={devices}",
        PYTHONPATH=os.pathsep.join(map(str, [_TESTS.parent, _TESTS])),
    )
    address = free_address()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, address, str(i), *args],
            env=environment | (changes[i] if changes else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(count)
    ]
    printed = [process.communicate(timeout=HANG_SECONDS)[0] for process in processes]
    assert not any(process.returncode for process in processes), printed
    return printed
