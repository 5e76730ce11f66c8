"""Random logits for the tests of routers and losses, and numerical derivatives."""

from __future__ import annotations

import numpy as np

T, E = 24, 16


def random_logits(seed: int = 0, tokens: int = T) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(tokens, E)).astype(np.float32)


def random_bias() -> np.ndarray:
    return np.random.default_rng(99).normal(scale=0.3, size=E).astype(np.float32)


def derivative(f, at: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    """Returns the gradient of the scalar function f at `at`, by central differences in float64."""
    at = at.astype(np.float64)
    grad = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[index] = eps
        grad[index] = (f(at + step) - f(at - step)) / (2 * eps)
    return grad
