"""Functions that the bench commands share: finding devices, showing progress, writing results."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jax_ep.flags import Error
from jax_ep.runtime import hosts, jax_compat
from jax_ep.runtime.versions import versions


def find_devices(cpu_devices: int) -> list[jax.Device]:
    """Returns all devices of JAX.

    On CPUs there are `cpu_devices` virtual devices, unless XLA_FLAGS sets another number, or JAX
    has already started and cannot change the number any more. Raises `Error` if JAX finds no
    device, or if it is not known which devices share a host.
    """
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", cpu_devices)
        except RuntimeError:
            pass
    try:
        devices = jax_compat.devices()
    except RuntimeError as error:
        raise Error(f"JAX finds no device: {error}") from error
    try:
        hosts.hosts_of(devices)
    except ValueError as error:
        raise Error(str(error)) from error
    return devices


def check_ranks(ranks: Iterable[int], num_devices: int) -> None:
    """Raises `Error` if a number in `ranks`, the value of --ranks, is above `num_devices`."""
    for num_ranks in ranks:
        if num_ranks > num_devices:
            raise Error(f"--ranks is {num_ranks}, but there are only {num_devices} devices")


def devices_in_words(devices: Sequence[jax.Device]) -> str:
    return f"{len(devices)} x {devices[0].device_kind}"


def held_bytes(compiled: Any) -> dict[str, int | None]:
    """Returns the bytes that a compiled program holds on a device, according to XLA.

    "peak_bytes" counts arguments, results and temporaries, "temp_bytes" temporaries alone. Both are
    None if XLA does not know them.
    """
    if (memory := compiled.memory_analysis()) is None:
        return {"peak_bytes": None, "temp_bytes": None}
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes
    peak += memory.temp_size_in_bytes - memory.alias_size_in_bytes
    return {"peak_bytes": peak, "temp_bytes": memory.temp_size_in_bytes}


def first_line(error: Exception) -> str:
    """Describes an error by its type and the first line of its text, up to 300 characters."""
    text = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {text}"


def write_json(path: str, rows: Sequence[dict[str, Any]], **facts: Any) -> None:
    """Writes the rows of results that a command has so far to a JSON file.

    The file also holds the command line, software versions, devices and the fields `facts`.
    """
    devices = devices_in_words(jax.devices())
    save_json(path, run_record() | {"devices": devices, **facts, "rows": rows})


def run_record() -> dict[str, Any]:
    """Returns the command line and the software versions, as fields for a file of results."""
    return {"command": ["python", "-m", "jax_ep", *sys.argv[1:]], "versions": _versions()}


_versions = functools.cache(versions)


def save_json(path: str, record: dict[str, Any]) -> None:
    """Writes a record as JSON, replacing an existing file atomically if possible.

    An atomic replacement leaves the old file whole if the program ends while it writes. Pipes,
    devices and files in unwritable folders are written in place.
    """
    text = json.dumps(record, indent=1)
    try:
        if not os.path.isfile(path) and os.path.lexists(path):
            raise OSError("a pipe or device cannot be replaced")
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{path}.part", path)
    except OSError:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)


_started = time.monotonic()


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    elif text:
        print(f"{time.monotonic() - _started:6.1f}s {text}", file=sys.stderr, flush=True)
