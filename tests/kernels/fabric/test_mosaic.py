"""The one door to Mosaic's internals: nobody goes around it, and what is missing is named."""

from __future__ import annotations

import importlib
import pathlib
import re
import subprocess
import sys

import pytest
from support.kernels import needs_kernels

import pallas_kernels
from pallas_kernels.fabric import mosaic

PRIVATE = re.compile(
    r"\b(jaxlib|jax\.experimental\.mosaic|jax\.experimental import mosaic|jax\._src)\b"
)


def test_no_other_module_imports_internals():
    root = pathlib.Path(pallas_kernels.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(PRIVATE.search(line) for line in path.read_text().splitlines() if "import" in line)
    }
    assert not found
    assert PRIVATE.search("from jaxlib.mlir import ir")
    assert PRIVATE.search("from jax.experimental.mosaic import gpu")


@needs_kernels
def test_this_jax_has_all_of_it():
    assert mosaic.unavailable_reason() is None


@needs_kernels
@pytest.mark.parametrize("path", mosaic._REQUIRED)
def test_whatever_is_missing_is_named(path, monkeypatch):
    module, _, name = path.rpartition(".")
    # A deprecated name is no attribute that can be deleted.
    monkeypatch.setattr(importlib.import_module(module), name, None, raising=False)
    assert mosaic.unavailable_reason().endswith(f"lacks {path}")


LOWER = """
import sys, jax, jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu
sys.modules["{module}"] = None
from pallas_kernels.collectives.all_gather import all_gather
from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.symmetric import Gpus
from pallas_kernels.fabric.tiles import Plan
assert "{module}" in mosaic.unavailable_reason()
fabric = Gpus((), (0,), jnp.zeros((1,), jnp.int32))
x = jax.ShapeDtypeStruct((1024,), jnp.float32)
traced = jax.jit(lambda x: all_gather(x, fabric=fabric, plan=Plan(1, 1))).trace(x)
try:
    traced.lower(lowering_platforms=("cuda",))
except NotImplementedError as error:
    assert "the kernels need {module}." in str(error), error
else:
    raise AssertionError("the kernel was lowered")
"""


@needs_kernels
@pytest.mark.parametrize("module", ["jax.experimental.mosaic.gpu", "jaxlib.mlir.dialects.llvm"])
def test_a_kernel_that_needs_a_missing_module_says_so(module):
    """And modules of kernels are imported without it."""
    subprocess.run([sys.executable, "-c", LOWER.format(module=module)], check=True)
