"""Which implementations of a grouped matmul run on this machine."""

from __future__ import annotations

from typing import Any

from jax_ep.matmul.api import BACKENDS, default_platform, unavailable_reason


def available_implementations(matrix_shape: tuple[int, int], dtype: Any) -> tuple[str, ...]:
    """Names the implementations that can multiply by matrices [H, F] of a dtype here."""
    platform = default_platform()
    return tuple(
        name
        for name, backend in BACKENDS.items()
        if unavailable_reason(backend, platform, matrix_shape, dtype) is None
    )
