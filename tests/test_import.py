"""Tests of what is imported when: `import jax_ep` loads no kernels, and no conftest.py JAX."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys
import jax
before = set(sys.modules)
import jax_ep
print(json.dumps(sorted(set(sys.modules) - before)))
"""
# These modules plan kernels or are shared with XLA; they import nothing that only kernels need.
PLANS = {"pallas_kernels", "pallas_kernels.exchange", "pallas_kernels.fabric"}
PLANS |= {"pallas_kernels.exchange.plan", "pallas_kernels.formats"}
PLANS |= {"pallas_kernels.fabric.memory_map", "pallas_kernels.fabric.hardware"}
PLANS |= {"pallas_kernels.matmul", "pallas_kernels.matmul.row_blocks"}
PLANS |= {"pallas_kernels.matmul.chosen_groups", "pallas_kernels.fabric.requirements"}
PLANS |= {"pallas_kernels.routing", "pallas_kernels.routing.plan"}
# pytest loads a conftest.py before the hooks of tests/conftest.py set JAX's environment variables.
CONFTESTS = """
import runpy, sys
for path in sys.argv[1:]:
    runpy.run_path(path)
    assert "jax" not in sys.modules, path
"""


def test_kernels_and_parts_that_are_not_used_are_not_loaded():
    """`import jax_ep` after `import jax`, on CPUs, must load none of them."""
    command = [sys.executable, "-c", PROGRAM]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    loaded = set(json.loads(done.stdout))
    assert "jax_ep.exchange.api" in loaded
    assert {name for name in loaded if name.split(".")[0] == "pallas_kernels"} <= PLANS
    for package in ("jax.experimental.pallas", "jax.experimental.mosaic", "flax"):
        assert not [name for name in loaded if f"{name}.".startswith(f"{package}.")]
    for part in ("linen", "nnx", "checkpoints", "reference", "exchange.pallas", "bench", "cli"):
        assert f"jax_ep.{part}" not in loaded


def test_no_conftest_imports_jax():
    tests = Path(__file__).parent
    command = [sys.executable, "-c", CONFTESTS, *map(str, tests.rglob("conftest.py"))]
    environment = {**os.environ, "PYTHONPATH": str(tests)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
