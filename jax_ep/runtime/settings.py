"""Reads the environment variables for timeouts, thread blocks and devices per host, at lowering."""

from __future__ import annotations

import os

from pallas_kernels.fabric import memory_map

_TIMEOUT_SECONDS = 100.0
# Kernels hold the timeout in nanoseconds as a 64-bit integer, which has room for this many seconds.
_LONGEST_TIMEOUT_SECONDS = 1e9


def timeout_seconds() -> float:
    """Returns JAX_EP_TIMEOUT_SECONDS: how long a kernel waits for a peer before it traps.

    The default is 100. Raises ValueError unless it is a positive number of seconds up to 1e9.
    """
    text = os.environ.get("JAX_EP_TIMEOUT_SECONDS", str(_TIMEOUT_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_TIMEOUT_SECONDS:
        raise ValueError(
            "JAX_EP_TIMEOUT_SECONDS must be a positive float of seconds, at most "
            f"{_LONGEST_TIMEOUT_SECONDS:g}, but is {text!r}."
        )
    return seconds


def num_blocks() -> int | None:
    """Returns JAX_EP_NUM_BLOCKS, the most thread blocks of an exchange kernel; None if not set.

    If it is not set, each kernel uses its fastest measured number. A smaller number leaves part of
    the GPU to other kernels that run at the same time. Raises ValueError unless it is a positive
    integer, at most `pallas_kernels.fabric.memory_map.MAX_BLOCKS`.
    """
    return _positive_int("JAX_EP_NUM_BLOCKS", most=memory_map.MAX_BLOCKS)


def devices_per_host() -> int | None:
    """Returns JAX_EP_DEVICES_PER_HOST, or None if it is not set.

    If it is set to n, each n consecutive devices of `jax.devices()` count as one host. If it is not
    set, JAX tells which devices share a host. Raises ValueError unless it is a positive integer.
    """
    return _positive_int("JAX_EP_DEVICES_PER_HOST")


def _positive_int(name: str, most: int | None = None) -> int | None:
    """Returns the integer of an environment variable, or None if the variable is not set.

    Raises ValueError unless the integer is positive and at most `most` (None: no limit).
    """
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1 or (most is not None and value > most):
        bound = "" if most is None else f", at most {most}"
        raise ValueError(f"{name} must be a positive int{bound}, but is {text!r}.")
    return value
