"""What the bench commands share: checks of flags, progress, and a loop's times as a record."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from absl import flags

from jax_ep.bench.timing import DEVICE_TIMERS, Loop, WallTime
from jax_ep.cli.info import versions

TIMERS = ("auto", *DEVICE_TIMERS, "none")  # what --device_timer takes


def integers(flag: str, values: Sequence[str]) -> list[int]:
    """The values of a list flag as positive integers."""
    if not all(value.isdecimal() and int(value) > 0 for value in values):
        raise flags.Error(f"--{flag}: {','.join(values)!r} is not a list of positive integers")
    return [int(value) for value in values]


def check_names(flag: str, values: Iterable[str], allowed: Iterable[str]) -> None:
    """Every value of a list flag must be one of `allowed`."""
    allowed = list(allowed)
    for value in values:
        if value not in allowed:
            raise flags.Error(f"--{flag}: {value!r} is not one of {', '.join(allowed)}")


def check_ranks(ranks: Iterable[int]) -> None:
    for num_ranks in ranks:
        if num_ranks > len(jax.devices()):
            raise flags.Error(f"--ranks: {num_ranks} ranks, but {len(jax.devices())} devices")


def check_outputs(**paths: str | None) -> None:
    """Refuses files that could not be written, by flag; before what takes long, not after it."""
    for flag, path in paths.items():
        if path is None:
            continue
        if flag == "plot":
            _check_plot(path)
        existed = os.path.lexists(path)
        try:
            with open(path, "a", encoding="utf-8"):
                pass
        except OSError as error:
            raise flags.Error(f"--{flag}: cannot write {path!r}: {error.strerror}") from error
        if not existed:
            os.remove(path)


def _check_plot(path: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise flags.Error("--plot needs matplotlib: pip install 'jax_ep[examples]'")
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    suffix = os.path.splitext(path)[1].removeprefix(".").lower()
    if suffix not in kinds:
        raise flags.Error(f"--plot: {path!r} does not end in one of .{', .'.join(sorted(kinds))}")


def offer_cpu_devices(count: int) -> None:
    """Asks for `count` virtual CPU devices, unless XLA_FLAGS or a started backend has decided."""
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass


def devices_in_words(devices: Sequence[jax.Device]) -> str:
    return f"{len(devices)} x {devices[0].device_kind}"


def first_line(error: Exception) -> str:
    """What an error is, without what compilers and runtimes append to it."""
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
    """Times in microseconds: "wall", and "device", which is None where nothing sees its kernels.

    `timer` is one of TIMERS; `spaced` is as in `Loop.device_time`.
    """
    wall = loop.wall_time(repeats)
    device = device_times(loop, timer, device_repeats, spaced)
    return {"wall": wall_record(wall)} | device


def wall_record(wall: WallTime) -> dict[str, float]:
    return {"median_us": wall.median, "low_us": wall.low, "high_us": wall.high}


def device_times(loop: Loop, timer: str, repeats: int, spaced: bool = True) -> dict[str, Any]:
    """The "device" of `times`, and what kept it from being measured as "device_error"."""
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
    """Everything measured, and on what; `facts` are of the whole run."""
    record = {
        "command": ["python", "-m", "jax_ep", *sys.argv[1:]],
        "versions": versions(),
        "devices": devices_in_words(jax.devices()),
        **facts,
        "rows": rows,
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(record, file, indent=1)


_started = time.monotonic()


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(f"{time.monotonic() - _started:6.1f}s {text}", file=sys.stderr, flush=True)
