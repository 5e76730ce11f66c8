"""The environment variables that the kernels' calls obey, read when a program is lowered."""

from __future__ import annotations

import os

_TIMEOUT_SECONDS = 100.0
_LONGEST_TIMEOUT_SECONDS = 1e9  # kernels count nanoseconds in 64 bits


def timeout_seconds() -> float:
    """JAX_EP_TIMEOUT_SECONDS: how long a kernel waits for a peer before it gives up.

    Raises ValueError unless it is a positive number of seconds up to 1e9.
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
    """JAX_EP_NUM_BLOCKS: the most thread blocks of a kernel; None for those measured to be fastest.

    It may leave part of the GPU to a kernel that runs at the same time. Raises ValueError unless it
    is a positive integer.
    """
    text = os.environ.get("JAX_EP_NUM_BLOCKS")
    if text is None:
        return None
    try:
        blocks = int(text)
    except ValueError:
        blocks = 0
    if blocks < 1:
        raise ValueError(f"JAX_EP_NUM_BLOCKS must be a positive int, but is {text!r}.")
    return blocks
