"""Finds what assembles the kernels' PTX for GPUs, and reads what the assembler reports.

JAX's CUDA plugin assembles with ptxas or, since JAX 0.12, with the library libnvJitLink where it
can be loaded. libnvJitLink makes relocatable code: it ignores `setmaxnreg`, and calls functions for
some divisions.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax

PTXAS, NVJITLINK = "ptxas", "libnvJitLink"
NVJITLINK_FILE = "libnvJitLink.so.13"
# The oldest JAX whose plugin is built with libnvJitLink.
_NVJITLINK_SINCE = (0, 12)
# The environment in which Mosaic prints the assembler's report of each kernel that it compiles.
REPORTS = {"MOSAIC_GPU_DUMP_PTXAS": "1"}

_KERNEL = re.compile(
    r"Compiling entry function '(\w+?)_mosaic_gpu_kernel'(.*?)Used (\d+) reg", re.S
)
_SPILLED = re.compile(r"(\d+) bytes spill stores")
_SERIALIZED = re.compile(
    r"wgmma.mma_async instructions are serialized.*?function '(\w+?)_mosaic_gpu_kernel'"
)
# The line that libnvJitLink writes for a kernel that it has linked; ptxas does not link.
_LINKED = re.compile(r"^info +: used \d+ registers", re.M)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What the assembler reports of a kernel."""

    name: str
    registers: int  # of a thread
    spilled: int  # bytes of registers that a thread stores to memory for lack of them
    serialized: bool  # whether tensor-core instructions of kernels of this name are serialized


def reported(report: str) -> list[Kernel]:
    """Parses the output of a process that compiled kernels with the environment `REPORTS`."""
    serialized = _SERIALIZED.findall(report)
    return [
        Kernel(
            name=name,
            registers=int(registers),
            spilled=max(map(int, _SPILLED.findall(properties)), default=0),
            serialized=name in serialized,
        )
        for name, properties, registers in _KERNEL.findall(report)
    ]


def run_reporting(program: str) -> tuple[bool, str]:
    """Runs Python code in a new process with `REPORTS`; returns its success and what it prints."""
    environment = os.environ | REPORTS
    # A program from the cache is not assembled.
    environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    # This process may have allocated most of the GPU's memory.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, errors="replace"
    )
    return done.returncode == 0, done.stdout + done.stderr


def author(report: str) -> str:
    return NVJITLINK if _LINKED.search(report) else PTXAS


def name() -> str:
    """Returns which assembler JAX's CUDA plugin uses in this process, `PTXAS` or `NVJITLINK`."""
    return PTXAS if _nvjitlink() is None else NVJITLINK


def version() -> str | None:
    """Returns the version of the assembler `name()`, such as "13.5", or None if it is not found."""
    if library := _nvjitlink():
        parts = ctypes.c_uint(), ctypes.c_uint()
        library.nvJitLinkVersion(*map(ctypes.byref, parts))
        return ".".join(str(part.value) for part in parts)
    installed = (folder / "bin" / "ptxas" for folder in _folders())
    program = next((str(path) for path in installed if path.exists()), shutil.which("ptxas"))
    if program is None:
        return None
    done = subprocess.run([program, "--version"], capture_output=True, text=True)
    found = re.search(r"release (\S+),", done.stdout)
    return found and found[1]


def _nvjitlink() -> ctypes.CDLL | None:
    """Loads libnvJitLink where the plugin does; returns None if the plugin does not use it."""
    if jax.__version_info__ < _NVJITLINK_SINCE:
        return None
    for path in (NVJITLINK_FILE, *(folder / "lib" / NVJITLINK_FILE for folder in _folders())):
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            continue
    return None


def _folders() -> list[Path]:
    # Where NVIDIA's packages for CUDA 13, on which the plugin depends, are installed.
    try:
        spec = importlib.util.find_spec("nvidia.cu13")
    except ImportError:
        return []
    return [Path(path) for path in (spec and spec.submodule_search_locations) or ()]
