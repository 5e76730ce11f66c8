"""Finds the implementations of a grouped matmul that run on this machine."""

from __future__ import annotations

from typing import Any

from jax_ep.matmul.api import IMPLEMENTATIONS, default_platform
from jax_ep.matmul.backend import Problem


def available_implementations(matrix_shape: tuple[int, int], dtype: Any) -> tuple[str, ...]:
    """Names the implementations that support matrices [H, F] of `dtype` on this machine."""
    return tuple(IMPLEMENTATIONS.available(Problem(matrix_shape, dtype, default_platform())))
