"""Tests of the source tree: each module has tests, and imports have no cycles."""

from __future__ import annotations

import ast
import graphlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TESTS = {"jax_ep": "tests", "pallas_kernels": "tests/kernels"}

# Modules without a test file of their own name, and the files that test them.
ELSEWHERE = {
    # Benchmarks share tests, which run the commands.
    "jax_ep/bench/estimate.py": "tests/bench/test_commands.py",
    "jax_ep/bench/matmul_baselines.py": "tests/bench/test_matmul.py",
    "jax_ep/bench/matmul_operations.py": "tests/bench/test_matmul.py",
    "jax_ep/bench/report.py": "tests/bench/test_commands.py",
    "jax_ep/bench/runner.py": "tests/bench/test_commands.py",
    "jax_ep/bench/suite.py": "tests/bench/test_commands.py",
    "jax_ep/bench/decode.py": "tests/bench/test_commands.py",
    "jax_ep/bench/operations.py": "tests/bench/test_exchange.py",
    # All implementations of a collective, an exchange or a matmul share the tests of their API.
    "jax_ep/collectives/algorithms.py": "tests/collectives/test_api.py",
    "jax_ep/collectives/pallas.py": "tests/kernels/collectives/test_collectives.py",
    "jax_ep/collectives/primitives.py": "tests/collectives/test_api.py",
    "jax_ep/collectives/xla.py": "tests/collectives/test_api.py",
    "jax_ep/exchange/gradients.py": "tests/exchange/test_api.py",
    "jax_ep/exchange/interface.py": "tests/exchange/test_pallas.py",
    "jax_ep/exchange/primitives.py": "tests/exchange/test_api.py",
    "jax_ep/exchange/rail.py": "tests/exchange/test_two_level.py",
    "jax_ep/exchange/workspace.py": "tests/exchange/test_memory.py",
    "jax_ep/exchange/xla.py": "tests/exchange/test_api.py",
    "jax_ep/matmul/backend.py": "tests/matmul/test_api.py",
    "jax_ep/matmul/float8_pallas.py": "tests/matmul/test_float8.py",
    "jax_ep/matmul/gating.py": "tests/matmul/test_unquantized.py",
    "jax_ep/matmul/loop.py": "tests/matmul/test_api.py",
    "jax_ep/matmul/pallas.py": "tests/matmul/test_api.py",
    "jax_ep/matmul/primitives.py": "tests/matmul/test_api.py",
    "jax_ep/matmul/xla.py": "tests/matmul/test_api.py",
    # A block is found by what its config.json says.
    "jax_ep/checkpoints/config.py": "tests/checkpoints/test_block.py",
    # The examples run the models whole, in one process and in several.
    "jax_ep/models/launch.py": "tests/test_examples.py",
    "jax_ep/models/published.py": "tests/checkpoints/test_transformers.py",
    # The tests of `info` check the versions that it prints.
    "jax_ep/version.py": "tests/cli/test_info.py",
    # Tests of the exchange make the objects through which ranks communicate.
    "jax_ep/runtime/fabric.py": "tests/exchange/test_pallas.py",
    # The road of a call of the layer.
    "jax_ep/moe/call_checks.py": "tests/moe/test_layer.py",
    "jax_ep/moe/held_experts.py": "tests/moe/test_expert_matmuls.py",
    "jax_ep/moe/rank.py": "tests/moe/test_layer.py",
    # Kernels in one table share tests; float8 kernels are tested with their operands'
    # quantization.
    "pallas_kernels/matmul/quantized_tiles.py": "tests/kernels/matmul/test_quantize.py",
    "pallas_kernels/matmul/row_blocks.py": "tests/kernels/matmul/test_float8.py",
    "pallas_kernels/collectives/with_signals.py": "tests/kernels/collectives/test_collectives.py",
    "pallas_kernels/collectives/all_reduce_rms_norm.py": (
        "tests/kernels/collectives/test_collectives.py"
    ),
    # These are parts of kernels, tested by running a kernel.
    "pallas_kernels/matmul/register_tiles.py": "tests/kernels/matmul/test_grouped_matmul.py",
    "pallas_kernels/matmul/tensor_cores.py": "tests/kernels/matmul/test_float8.py",
    "pallas_kernels/collectives/tiles.py": "tests/kernels/collectives/test_collectives.py",
    "pallas_kernels/exchange/combine.py": "tests/kernels/exchange/test_dispatch.py",
    "pallas_kernels/exchange/expert_rows.py": "tests/kernels/exchange/test_dispatch.py",
    "pallas_kernels/exchange/low_latency_combine.py": "tests/kernels/exchange/test_low_latency.py",
    "pallas_kernels/exchange/low_latency_dispatch.py": "tests/kernels/exchange/test_low_latency.py",
    "pallas_kernels/exchange/rank_dispatch.py": "tests/kernels/exchange/test_dispatch.py",
    "pallas_kernels/exchange/sender.py": "tests/kernels/exchange/test_dispatch.py",
    "pallas_kernels/fabric/compiler.py": "tests/kernels/fabric/test_mosaic.py",
    "pallas_kernels/fabric/requirements.py": "tests/kernels/fabric/test_mosaic.py",
    "pallas_kernels/fabric/float8.py": "tests/kernels/exchange/test_quantized_rows.py",
    "pallas_kernels/fabric/hardware.py": "tests/kernels/exchange/test_plan.py",
    "pallas_kernels/fabric/memory_map.py": "tests/kernels/fabric/test_symmetric.py",
    "pallas_kernels/fabric/low_latency.py": "tests/kernels/collectives/test_low_latency.py",
    "pallas_kernels/fabric/vectors.py": "tests/kernels/exchange/test_dispatch.py",
    "pallas_kernels/matmul/float8_drhs.py": "tests/kernels/matmul/test_float8.py",
    "pallas_kernels/matmul/kernel.py": "tests/kernels/matmul/test_grouped_matmul.py",
    "pallas_kernels/matmul/mxfp4_matmul.py": "tests/kernels/matmul/test_decoder.py",
    "pallas_kernels/matmul/store.py": "tests/kernels/matmul/test_grouped_matmul.py",
    "pallas_kernels/matmul/warp_products.py": "tests/kernels/matmul/test_decoder.py",
    "pallas_kernels/routing/plan.py": "tests/kernels/routing/test_top_k.py",
}


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
    assert without == set(ELSEWHERE)


def test_what_is_told_is_there():
    missing = {file for file in ELSEWHERE.values() if not (REPOSITORY / file).exists()}
    assert not missing


def imported(path: Path) -> Iterator[str]:
    """Yields the modules that a file imports, at its top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(module: str) -> str | None:
    """Returns the folder inside a package that has the module, or the module itself if in none."""
    package, *rest = module.split(".")
    if package not in TESTS:
        return None
    return ".".join([package, *rest[:1]]) if rest and is_module(package, rest[0]) else package


def is_module(package: str, name: str) -> bool:
    path = REPOSITORY / package / name
    return path.is_dir() or path.with_suffix(".py").exists()


def test_rooms_import_each_other_one_way():
    arrows = defaultdict(set)
    for package in TESTS:
        for path in (REPOSITORY / package).rglob("*.py"):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            source = room(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
            arrows[source] |= {room(module) for module in imported(path)} - {source, None}
    assert {"jax_ep.runtime", "pallas_kernels.fabric"} <= arrows["jax_ep.exchange"]
    # The method raises CycleError with the packages of a cycle.
    graphlib.TopologicalSorter(arrows).prepare()


def module_of(name: str) -> str | None:
    """Returns the module of this repository's packages that an imported name is in, or None."""
    parts = name.split(".")
    for length in (len(parts), len(parts) - 1):
        path = REPOSITORY.joinpath(*parts[:length]).with_suffix(".py")
        if parts[0] in TESTS and path.exists():
            return ".".join(parts[:length])
    return None


def test_modules_import_each_other_one_way():
    arrows = {}
    for package in TESTS:
        for path in (REPOSITORY / package).rglob("*.py"):
            module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
            arrows[module] = {module_of(name) for name in imported(path)} - {module, None}
    assert "jax_ep.exchange.primitives" in arrows["jax_ep.exchange.gradients"]
    # The method raises CycleError with the modules of a cycle.
    graphlib.TopologicalSorter(arrows).prepare()
