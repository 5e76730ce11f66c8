"""Finds the versions of the installed software: Python, packages, CUDA plugin and driver."""

from __future__ import annotations

import importlib.metadata
import platform

from jax_ep.runtime import cuda_driver
from jax_ep.version import __version__

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


def versions() -> dict[str, str | None]:
    """Returns the versions of Python, packages, CUDA plugin and driver by name; None if missing."""
    found: dict[str, str | None] = {
        "jax_ep": __version__,
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
    }
    for package in PACKAGES:
        found[package] = _version(package)
    plugins = [f"{name} {_version(name)}" for name in CUDA_PLUGINS if _version(name)]
    found["CUDA plugin"] = ", ".join(plugins) or None
    module, cuda = cuda_driver.kernel_module_version(), cuda_driver.cuda_version()
    found["NVIDIA driver"] = f"{module or 'version unknown'} (CUDA {cuda})" if cuda else module
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
