"""Tests of `mosaic`, `compiler` and `requirements`: what kernels use of Mosaic's internals."""

from __future__ import annotations

import ast
import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from jax._src.interpreters import mlir
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import core
from jaxlib.mlir import ir, passmanager
from support.kernels import forget, lowered, needs_kernels

import pallas_kernels
from pallas_kernels.collectives.tiles import TilePlan
from pallas_kernels.collectives.with_signals import all_gather
from pallas_kernels.fabric import compiler, mosaic, requirements
from pallas_kernels.fabric.symmetric import Gpus
from pallas_kernels.matmul import grouped_matmul as kernels

PRIVATE = re.compile(
    r"\b(jaxlib|jax\.experimental\.mosaic|jax\.experimental import mosaic|jax\._src)\b"
)


SOURCES = {
    path.relative_to(root).as_posix(): path.read_text()
    for root in [pathlib.Path(pallas_kernels.__file__).parent]
    for path in root.rglob("*.py")
}


def test_kernels_import_no_internals():
    """`mosaic` looks them up by name, as `requirements` lists them."""
    lines = [line for text in SOURCES.values() for line in text.splitlines() if "import" in line]
    assert not any(map(PRIVATE.search, lines))
    assert PRIVATE.search("from jaxlib.mlir import ir")


USES = [f"{module}.{name}" for module, names in requirements.REQUIRED.items() for name in names]
# These names belong to the launch context, an operand, and not to a module.
CONTEXT = {path for path in USES if ".launch_context." in path}
# Name in `mosaic` and the kernels -> the module that it stands for.
MODULES = {
    name: getattr(mosaic, name).__name__
    for name in ("mgpu", "ir", "arith", "gpu", "llvm", "scf", "vector")
} | {
    "passmanager": compiler.passmanager.__name__,
    "pl": "jax.experimental.pallas",
    "plgpu": "jax.experimental.pallas.mosaic_gpu",
}
# JAX 0.11 lacks this name.
OPTIONAL = {"jax.experimental.pallas.mosaic_gpu.store"}


@pytest.fixture
def forgets():
    """Clears what is cached of JAX, before and after a test that changes JAX."""
    requirements.unavailable_reason.cache_clear()
    yield
    requirements.unavailable_reason.cache_clear()


def attributes(source: str) -> set[str]:
    """Returns the dotted names that a module of kernels uses from the modules in `MODULES`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        module, *names = text.split(".")
        if module in MODULES and all(name.isidentifier() for name in names):
            found.add(".".join([MODULES[module], *names]))
    return found


def parts(path: str) -> list[str]:
    """Returns the proper prefixes of a dotted name."""
    names = path.split(".")
    return [".".join(names[:count]) for count in range(1, len(names))]


def test_the_names_that_kernels_need_are_those_that_they_use():
    used = set().union(*map(attributes, SOURCES.values()))
    modules = tuple(f"{module}." for module in MODULES.values())
    needed = {path for path in USES if path.startswith(modules)}
    assert needed - CONTEXT <= used
    known = needed.union(OPTIONAL, *map(parts, needed))
    assert not {path for path in used - known if needed.isdisjoint(parts(path))}


@needs_kernels
@pytest.mark.parametrize("path", USES)
def test_whatever_is_missing_is_named(path, forgets, monkeypatch):
    module, name = next(
        (m, n) for m, names in requirements.REQUIRED.items() for n in names if path == f"{m}.{n}"
    )
    forget(monkeypatch, module, name)
    assert requirements.unavailable_reason().endswith(f"lacks {path}")


def product(x, matrices, sizes):
    return kernels.grouped_matmul(
        [(x, matrices)],
        sizes,
        transpose_rhs=False,
        tiles=kernels.Tiles.fitting((64, 128), 128, 128, 1),
        num_blocks=4,
    )


def lower_product(name, monkeypatch):
    """Lowers a new program that calls `product` in a function named `name`."""
    known: dict[bytes, bytes] = {}
    monkeypatch.setattr(core, "KNOWN_KERNELS", known)
    shapes = [((256, 128), jnp.bfloat16), ((2, 128, 128), jnp.bfloat16), ((2,), jnp.int32)]
    operands = [jax.ShapeDtypeStruct(*each) for each in shapes]
    scope = {"product": product}
    exec(f"def {name}(*operands):\n    return 1 + product(*operands)", scope)
    jax.clear_caches()
    text = lowered(jax.jit(scope[name]), *operands)
    modules = {}
    for code in known.values():
        context = mlir.make_ir_context()
        mgpu.dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        with context:
            module = core._run_serde_pass(ir.Module.parse(code), serialize=False)
        modules[ir.StringAttr(module.operation.attributes["sym_name"]).value] = module
    return set(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', text)), modules


@needs_kernels
def test_programs_that_have_the_same_kernels_compile_them_once(monkeypatch):
    first, modules = lower_product("first", monkeypatch)
    second, _ = lower_product("second", monkeypatch)
    assert set(modules) == {"grouped_matmul", "row_tiles"}
    assert len(first) == 2 and first == second
    for module in modules.values():
        # The kernels are simplified before they are compiled.
        before = module.operation.get_asm()
        with module.context:
            passes = passmanager.PassManager.parse("builtin.module(cse,canonicalize)")
        passes.run(module.operation)
        assert module.operation.get_asm() == before
    # The host copies a kernel's TMA descriptors in words of 64 bits, not byte by byte.
    text = modules["grouped_matmul"].operation.get_asm()
    assert f"!llvm.array<{4 * 128 // 8} x i64>" in text
    assert set(re.findall(r"!llvm.array<\d+ x i8>", text)) == {"!llvm.array<0 x i8>"}


@needs_kernels
def test_a_kernel_says_what_is_missing_where_it_is_not_asked_before(forgets, monkeypatch):
    """Tracing a kernel must raise an error that names what JAX lacks."""
    forget(monkeypatch, "jaxlib.mlir.dialects.gpu", "barrier")
    fabric = Gpus((), (0,), jnp.zeros((1,), jnp.int32))
    gather = functools.partial(all_gather, fabric=fabric, plan=TilePlan(1, 1))
    with pytest.raises(NotImplementedError, match=r"lacks jaxlib\.mlir\.dialects\.gpu\.barrier\."):
        jax.eval_shape(gather, jax.ShapeDtypeStruct((1024,), jnp.float32))
