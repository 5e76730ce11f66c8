"""Tests that `import jax_ep` loads no kernels, neither Pallas nor Mosaic, and no Flax layers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
import {first}
before = set(sys.modules)
import jax_ep
print(json.dumps(sorted(set(sys.modules) - before)))
"""
# These modules plan kernels or are shared with XLA; they import nothing that only kernels need.
PLANS = {"pallas_kernels", "pallas_kernels.exchange", "pallas_kernels.fabric"}
PLANS |= {"pallas_kernels.exchange.plan", "pallas_kernels.formats", "pallas_kernels.mxfp4"}
PLANS |= {"pallas_kernels.fabric.memory_map", "pallas_kernels.fabric.hardware"}
PLANS |= {"pallas_kernels.matmul", "pallas_kernels.matmul.row_blocks"}
PLANS |= {"pallas_kernels.matmul.chosen_groups", "pallas_kernels.fabric.requirements"}
PLANS |= {"pallas_kernels.routing", "pallas_kernels.routing.plan"}


@pytest.fixture(scope="module")
def loaded() -> set[str]:
    """Returns the modules that `import jax_ep` loads after `import jax`, on CPUs."""
    command = [sys.executable, "-c", PROGRAM.format(first="jax")]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return set(json.loads(done.stdout))


def test_kernels_are_not_loaded(loaded):
    assert "jax_ep.exchange.api" in loaded
    assert {name for name in loaded if name.split(".")[0] == "pallas_kernels"} <= PLANS


@pytest.mark.parametrize("package", ["jax.experimental.pallas", "jax.experimental.mosaic", "flax"])
def test_packages_that_are_not_needed_are_not_loaded(package, loaded):
    assert not [name for name in loaded if name == package or name.startswith(package + ".")]


@pytest.mark.parametrize(
    "name", ["linen", "nnx", "checkpoints", "reference", "exchange.pallas", "bench", "cli"]
)
def test_parts_that_are_not_used_are_not_loaded(name, loaded):
    assert f"jax_ep.{name}" not in loaded
