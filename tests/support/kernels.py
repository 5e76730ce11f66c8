"""Marks the tests that need a JAX recent enough for the kernels."""

from __future__ import annotations

import importlib
import types

import jax
import pytest

KERNELS_RUN = jax.__version_info__ >= (0, 11)
WHY_NOT = f"the kernels need JAX 0.11 or newer, and this is {jax.__version__}"

needs_kernels = pytest.mark.skipif(not KERNELS_RUN, reason=WHY_NOT)


def forget(monkeypatch: pytest.MonkeyPatch, module: str, name: str) -> None:
    """Removes `name` from `module` for one test, as in a JAX that lacks it.

    `name` is that of an attribute, or "Class.attribute".
    """
    first, *rest = name.split(".")
    owner, view = importlib.import_module(module), None
    # A class attribute may be a deprecated name or an enumeration's member, which cannot be
    # deleted. Replace the class by a namespace that has all its other attributes.
    if rest:
        others = set(dir(getattr(owner, first))).difference(rest)
        view = types.SimpleNamespace(**dict.fromkeys(others, object()))
    monkeypatch.setattr(owner, first, view, raising=False)
