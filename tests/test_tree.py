"""Tests of the source tree: each module has tests, and imports have no cycles."""

from __future__ import annotations

import ast
import graphlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
TESTS = {"jax_ep": "tests", "pallas_kernels": "tests/kernels"}

# (folder, modules without a test file of their own name, the file that tests them instead). Of a
# file test_NAME.py in the tests of the same folder, only NAME is given. Benchmarks, implementations
# of one operation and kernels of one table share tests, and a part of a kernel is tested by running
# a kernel.
SHARED_TESTS = (
    ("jax_ep", "implementations", "tests/matmul/test_api.py"),
    ("jax_ep", "version", "tests/cli/test_info.py"),
    ("jax_ep/bench", "decode estimate report suite", "commands"),
    ("jax_ep/bench", "operations", "exchange"),
    ("jax_ep/checkpoints", "architectures config", "block"),
    ("jax_ep/collectives", "algorithms primitives xla", "api"),
    ("jax_ep/collectives", "pallas", "tests/kernels/collectives/test_collectives.py"),
    ("jax_ep/exchange", "gradients primitives routes xla", "api"),
    ("jax_ep/exchange", "workspace", "memory"),
    ("jax_ep/exchange", "interface", "pallas"),
    ("jax_ep/exchange", "permute", "rank_major"),
    ("jax_ep/exchange", "rail", "two_level"),
    ("jax_ep/matmul", "backend loop pallas primitives xla", "api"),
    ("jax_ep/matmul", "gating", "unquantized"),
    ("jax_ep/models", "published", "tests/checkpoints/test_transformers.py"),
    ("jax_ep/models", "launch", "tests/test_examples.py"),
    ("jax_ep/moe", "held_experts", "slots"),
    ("jax_ep/moe", "call_checks rank", "layer"),
    ("jax_ep/runtime", "fabric", "tests/exchange/test_pallas.py"),
    ("pallas_kernels/collectives", "all_reduce_rms_norm tiles with_signals", "collectives"),
    ("pallas_kernels/exchange", "combine expert_rows rank_dispatch sender", "dispatch"),
    ("pallas_kernels/exchange", "low_latency_combine low_latency_dispatch", "low_latency"),
    ("pallas_kernels/fabric", "compiler requirements", "mosaic"),
    ("pallas_kernels/fabric", "hardware", "tests/kernels/exchange/test_plan.py"),
    ("pallas_kernels/fabric", "memory_map", "symmetric"),
    ("pallas_kernels/fabric", "low_latency", "tests/kernels/collectives/test_low_latency.py"),
    ("pallas_kernels/fabric", "vectors", "tests/kernels/exchange/test_dispatch.py"),
    ("pallas_kernels/fabric", "float8", "tests/kernels/exchange/test_quantized_rows.py"),
    ("pallas_kernels/matmul", "gated_matmul mxfp4_matmul", "decoder"),
    ("pallas_kernels/matmul", "float8_drhs row_blocks tensor_cores", "float8"),
    ("pallas_kernels/matmul", "kernel register_tiles store", "grouped_matmul"),
    ("pallas_kernels/matmul", "float8_gate_gradient", "gate_gradient"),
    ("pallas_kernels/matmul", "quantized_tiles", "quantize"),
    ("pallas_kernels/routing", "plan", "top_k"),
)


def elsewhere() -> dict[str, str]:
    """Returns module path -> the path of the file that tests it, for `SHARED_TESTS`."""
    found = {}
    for folder, names, file in SHARED_TESTS:
        package, _, inner = folder.partition("/")
        path = file if "/" in file else f"{TESTS[package]}/{inner}/test_{file}.py"
        found |= {f"{folder}/{name}.py": path for name in names.split()}
    return found


def modules() -> dict[str, str]:
    """Returns module path -> the path of the test file of the same name."""
    found = {}
    for package, tests in TESTS.items():
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            if not path.name.startswith("__"):
                folder = path.relative_to(REPOSITORY / package).parent
                file = Path(tests) / folder / f"test_{path.name}"
                found[path.relative_to(REPOSITORY).as_posix()] = file.as_posix()
    return found


def test_every_module_has_a_test_file_of_its_name_or_one_that_is_told():
    without = {module for module, file in modules().items() if not (REPOSITORY / file).exists()}
    assert without == set(elsewhere())
    assert all((REPOSITORY / file).exists() for file in elsewhere().values())


def imported(path: Path) -> Iterator[str]:
    """Yields the modules that a file imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(name: str) -> str | None:
    """Returns the folder inside a package that has the module, or the module itself if in none."""
    package, *rest = name.removesuffix(".__init__").split(".")
    if package not in TESTS:
        return None
    path = REPOSITORY.joinpath(package, *rest[:1])
    is_module = path.is_dir() or path.with_suffix(".py").exists()
    return ".".join([package, *rest[:1]]) if is_module else package


def module(name: str) -> str | None:
    """Returns the module of this repository's packages that an imported name is in, or None."""
    parts = name.split(".")
    for length in (len(parts), len(parts) - 1):
        path = REPOSITORY.joinpath(*parts[:length]).with_suffix(".py")
        if parts[0] in TESTS and path.exists():
            return ".".join(parts[:length])
    return None


@pytest.mark.parametrize(
    ("owner", "source", "target"),
    [
        (room, "jax_ep.exchange", "pallas_kernels.fabric"),
        (module, "jax_ep.exchange.gradients", "jax_ep.exchange.primitives"),
    ],
)
def test_imports_have_no_cycles(owner, source, target):
    """Neither rooms nor modules may import each other in a circle; one import is known."""
    arrows = defaultdict(set)
    for package in TESTS:
        for path in (REPOSITORY / package).rglob("*.py"):
            own = owner(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))
            arrows[own] |= {owner(name) for name in imported(path)} - {own, None}
    assert target in arrows[source]
    # The method raises CycleError with the rooms or modules of a cycle.
    graphlib.TopologicalSorter(arrows).prepare()
