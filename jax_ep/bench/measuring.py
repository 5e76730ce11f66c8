"""What the bench commands share: devices, progress, and a loop's times as a record."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jax_ep.bench.timing import DEVICE_TIMERS, Loop, WallTime
from jax_ep.cli.flags import Error
from jax_ep.cli.info import versions


def find_devices(cpu_devices: int) -> list[jax.Device]:
    """Finds all devices; asks for so many virtual ones where there is but a CPU.

    Raises `Error` if JAX finds no backend. XLA_FLAGS or a started backend may have decided the
    number of CPU devices already.
    """
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        except RuntimeError:
            pass
    try:
        return jax.devices()
    except RuntimeError as error:
        raise Error(f"JAX finds no device: {error}") from error


def check_ranks(ranks: Iterable[int], num_devices: int) -> None:
    """Raises `Error` unless there are devices for each number of ranks."""
    for num_ranks in ranks:
        if num_ranks > num_devices:
            raise Error(f"--ranks: {num_ranks} ranks, but {num_devices} devices")


def devices_in_words(devices: Sequence[jax.Device]) -> str:
    return f"{len(devices)} x {devices[0].device_kind}"


def first_line(error: Exception) -> str:
    """Names an error, without what compilers and runtimes append to it."""
    text = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {text}"


def times(
    loop: Loop,
    repeats: int,
    timer: str,
    *,
    device_repeats: int = 2,
    spaced: bool = True,
) -> dict[str, Any]:
    """Measures microseconds: "wall", and "device", which is None where nothing sees its kernels.

    `timer` is one of `flags.TIMERS`; `spaced` is as in `Loop.device_time`.
    """
    wall = loop.wall_time(repeats)
    device = device_times(loop, timer, device_repeats, spaced)
    return {"wall": wall_record(wall)} | device


def wall_record(wall: WallTime) -> dict[str, float]:
    return {"median_us": wall.median, "low_us": wall.low, "high_us": wall.high}


def device_times(loop: Loop, timer: str, repeats: int, spaced: bool = True) -> dict[str, Any]:
    """Measures the "device" of `times`; "device_error" is what kept it from being measured."""
    if loop.mesh.devices.flat[0].platform != "gpu" or timer == "none":
        return {"device": None}
    try:
        device = loop.device_time(repeats, DEVICE_TIMERS if timer == "auto" else (timer,), spaced)
    except RuntimeError as error:  # the wall time stands without it
        return {"device": None, "device_error": str(error)}
    return {
        "device": {
            "median_us": device.median,
            "slowest_us": device.slowest,
            "low_us": device.low,
            "high_us": device.high,
            "timer": device.timer,
            "of_loop_us": device.of_loop,
            "by_kernel_us": device.by_kernel,
        }
    }


def write_json(path: str, rows: Sequence[dict[str, Any]], **facts: Any) -> None:
    """Writes everything measured so far, and on what; `facts` are of the whole run."""
    devices = devices_in_words(jax.devices())
    save_json(path, run_record() | {"devices": devices, **facts, "rows": rows})


def run_record() -> dict[str, Any]:
    """Records the command that runs, and the versions that it runs on."""
    return {"command": ["python", "-m", "jax_ep", *sys.argv[1:]], "versions": _versions()}


_versions = functools.cache(versions)


def save_json(path: str, record: dict[str, Any]) -> None:
    """Writes a file at once, where that can be: whoever ends this program finds it whole."""
    text = json.dumps(record, indent=1)
    try:
        if not os.path.isfile(path) and os.path.lexists(path):
            raise OSError("a pipe or device cannot be replaced")
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{path}.part", path)
    except OSError:  # nor can a file in a folder that is not ours
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


_started = time.monotonic()


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(f"{time.monotonic() - _started:6.1f}s {text}", file=sys.stderr, flush=True)
