"""The JAX that the kernels need, and the mark of the tests that need it."""

from __future__ import annotations

import importlib
import types

import jax
import pytest

KERNELS_RUN = jax.__version_info__ >= (0, 11)
WHY_NOT = f"the kernels need JAX 0.11 or newer, and this is {jax.__version__}"

needs_kernels = pytest.mark.skipif(not KERNELS_RUN, reason=WHY_NOT)


def forget(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """Makes a module lack a name, which may be that of a class and its attribute, for one test."""
    first, *rest = name.split(".")
    owner, view = importlib.import_module(module), None
    # A deprecated name, or an enumeration's, is no attribute that can be set or deleted.
    if rest:
        others = set(dir(getattr(owner, first))).difference(rest)
        view = types.SimpleNamespace(**dict.fromkeys(others, object()))
    monkeypatch.setattr(owner, first, view, raising=False)
