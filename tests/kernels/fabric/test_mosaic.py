"""The one door to Mosaic's internals: nobody goes around it, and what is missing is named."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from jax.sharding import AbstractMesh
from support.kernels import forget, needs_kernels

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


def handles_internals(source: str) -> bool:
    """Whether a module of kernels emits MLIR, or takes Mosaic's arrays apart, without `mosaic`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and any(name.name == "mgpu" for name in node.names):
            return True
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) != "mosaic":
            if node.attr in ("inline_mgpu", "registers", "to_remote"):
                return True
    return False


def test_no_other_module_handles_internals():
    root = pathlib.Path(pallas_kernels.__file__).parent
    found = {
        str(p.relative_to(root)) for p in root.rglob("*.py") if handles_internals(p.read_text())
    }
    assert found == {"fabric/mosaic.py"}


@pytest.mark.parametrize(
    "line",
    [
        "plgpu.inline_mgpu(arg_types=())(emit)()",
        "array.registers.item()",
        "from pallas_kernels.fabric.mosaic import mgpu",
    ],
)
def test_a_way_round_the_door_is_found(line):
    assert handles_internals(line) and not handles_internals("mosaic.registers(array)")


USES = [f"{module}.{name}" for module, names in mosaic._REQUIRED.items() for name in names]
CONTEXT = "jax.experimental.mosaic.gpu.launch_context.LaunchContext.to_remote"  # of an operand
# The modules, by the names that `mosaic` and the kernels have for them.
MODULES = {
    name: getattr(mosaic, name).__name__
    for name in ("mgpu", "ir", "arith", "gpu", "llvm", "scf", "vector")
} | {"pl": "jax.experimental.pallas", "plgpu": "jax.experimental.pallas.mosaic_gpu"}
OPTIONAL = {"jax.experimental.pallas.mosaic_gpu.store"}  # JAX 0.11 lacks it


@pytest.fixture
def forgets():
    """Lets the test change what JAX has, before and after which `mosaic` looks anew."""
    mosaic.unavailable_reason.cache_clear()
    yield
    mosaic.unavailable_reason.cache_clear()


def attributes(path: pathlib.Path) -> set[str]:
    """The dotted names that a module of kernels uses, of the modules that `mosaic` loads."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        module, *names = text.split(".")
        if module in MODULES and all(name.isidentifier() for name in names):
            found.add(".".join([MODULES[module], *names]))
    return found


def parts(path: str) -> list[str]:
    """The dotted names that a dotted name begins with."""
    names = path.split(".")
    return [".".join(names[:count]) for count in range(1, len(names))]


@needs_kernels
def test_the_names_that_kernels_need_are_those_that_they_use():
    used = set().union(*map(attributes, pathlib.Path(pallas_kernels.__file__).parent.rglob("*.py")))
    modules = tuple(f"{module}." for module in MODULES.values())
    needed = {path for path in USES if path.startswith(modules)}
    assert needed - {CONTEXT} <= used
    known = needed.union(OPTIONAL, *map(parts, needed))
    assert not {path for path in used - known if needed.isdisjoint(parts(path))}


@needs_kernels
def test_this_jax_has_all_of_it(forgets):
    assert mosaic.unavailable_reason() is None


@needs_kernels
@pytest.mark.parametrize("path", USES)
def test_whatever_is_missing_is_named(path, forgets, monkeypatch):
    module, name = next(
        (m, n) for m, names in mosaic._REQUIRED.items() for n in names if path == f"{m}.{n}"
    )
    forget(monkeypatch, module, name)
    assert mosaic.unavailable_reason().endswith(f"lacks {path}")


@needs_kernels
def test_peers_are_reached_by_coordinates_alone(monkeypatch):
    """JAX deprecates the type of a device's number; without it, coordinates are all it takes."""
    reached = []

    def remote_ref(ref, device_id):
        reached.append(device_id)
        return ref

    monkeypatch.setattr(mosaic.plgpu, "remote_ref", remote_ref)
    mesh = AbstractMesh((2, 1, 4), ("a", "b", "c"))
    with monkeypatch.context() as inside:
        inside.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
        mosaic.remote_ref("ref", 5)
    assert [tuple(map(int, coordinates)) for coordinates in reached] == [(0, 0, 5)]
    assert mosaic.remote_ref("ref", 0) == "ref"  # without a mesh: the only rank's own
    assert len(reached) == 1


LOWER = """
import sys, jax, jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu
{remove}
from pallas_kernels.collectives.all_gather import all_gather
from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.symmetric import Gpus
from pallas_kernels.collectives.tiles import TilePlan
fabric = Gpus((), (0,), jnp.zeros((1,), jnp.int32))
x = jax.ShapeDtypeStruct((1024,), jnp.float32)
try:
    traced = jax.jit(lambda x: all_gather(x, fabric=fabric, plan=TilePlan(1, 1))).trace(x)
except NotImplementedError as error:
    assert str(error).endswith("lacks {missing}."), error
else:
    raise AssertionError("the kernel was traced")
"""


@needs_kernels
@pytest.mark.parametrize(
    ("missing", "remove"),
    [
        ("jaxlib.mlir.dialects.llvm", 'sys.modules["jaxlib.mlir.dialects.llvm"] = None'),
        (
            "jaxlib.mlir.dialects.gpu.barrier",
            "from jaxlib.mlir.dialects import gpu; del gpu.barrier",
        ),
    ],
)
def test_a_kernel_says_what_is_missing_where_it_is_not_asked_before(missing, remove):
    """And modules of kernels are imported without it."""
    program = LOWER.format(missing=missing, remove=remove)
    subprocess.run([sys.executable, "-c", program], check=True)
