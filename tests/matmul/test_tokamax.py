"""Tests of the backend "tokamax" with a stand-in for the package, which needs a GPU."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.matmuls import GROUP_SIZES, NUM_ROWS, assert_close, expected, operands

from jax_ep.matmul import tokamax
from jax_ep.matmul.backend import Problem
from jax_ep.matmul.primitives import IMPLEMENTATIONS


@pytest.fixture
def package(monkeypatch):
    """A module `tokamax` that leaves rows past the last group undefined, as the kernels do."""

    def ragged_dot_general(lhs, rhs, group_sizes, dims, *, preferred_element_type, implementation):
        if module.refuses:
            raise NotImplementedError("Unsupported GPU architecture.")
        assert implementation == "mosaic" and lhs.shape[0] % 8 == 0
        out = jax.lax.ragged_dot_general(
            lhs, rhs, group_sizes, dims, preferred_element_type=jnp.float32
        )
        unused = jnp.arange(lhs.shape[0]) >= group_sizes.sum()
        return jnp.where(unused[:, None], jnp.nan, out).astype(preferred_element_type)

    module = types.ModuleType("tokamax")
    module.__spec__ = importlib.machinery.ModuleSpec("tokamax", None)
    module.ragged_dot_general, module.refuses = ragged_dot_general, False
    monkeypatch.setitem(sys.modules, "tokamax", module)
    tokamax._refusal.cache_clear()
    yield module
    tokamax._refusal.cache_clear()


@pytest.mark.parametrize("case", ["empty groups", "past R", "far past R", "all empty"])
def test_product_and_gradients(package, case):
    sizes = GROUP_SIZES[case]
    lhs, rhs, group_sizes, grad = operands(NUM_ROWS - 3, sizes, "bfloat16")
    used = min(sum(sizes), len(lhs))
    lhs, grad = (jnp.where(jnp.arange(len(x))[:, None] < used, x, 0) for x in (lhs, grad))
    backend = tokamax.BACKEND
    got = (
        backend.product(lhs, rhs, group_sizes, transpose_rhs=False),
        backend.product(grad, rhs, group_sizes, transpose_rhs=True),
        backend.drhs(lhs, grad, group_sizes),
    )
    for mine, want in zip(got, expected(lhs, rhs, group_sizes, grad), strict=True):
        assert_close(mine, want, "bfloat16")
    assert not np.any(np.asarray(got[0])[used:]) and not np.any(np.asarray(got[1])[used:])


def _selected(**problem):
    problem = {"matrix_shape": (1032, 72), "dtype": jnp.bfloat16, "platform": "cuda"} | problem
    return IMPLEMENTATIONS.select(None, Problem(**problem)).name


def test_where_it_is_selected(package, monkeypatch):
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="8.0")
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
    assert _selected() == "tokamax"
    assert _selected(matrix_shape=(1030, 72)) == "blocks"
    assert _selected(dtype=jnp.float32) == "blocks"
    assert _selected(platform="cpu") == "loop"
    assert _selected(platform="another platform") == "xla"


@pytest.mark.parametrize(
    ("is_installed", "message"),
    [(True, "refuses it here: Unsupported GPU architecture"), (False, "not installed")],
)
def test_it_is_not_selected_where_it_cannot_run(package, monkeypatch, is_installed, message):
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="12.0")
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu])
    package.refuses = True
    if not is_installed:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert _selected() == "blocks"
    with pytest.raises(ValueError, match=message):
        IMPLEMENTATIONS.check("tokamax", Problem((64, 64), jnp.bfloat16, "cuda"))
