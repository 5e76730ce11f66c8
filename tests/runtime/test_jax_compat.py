"""Tests that JAX may lack internals: results stay equal, and refusals name what is missing."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from support.kernels import KERNELS_RUN
from support.processes import environment_of_program

import jax_ep
from jax_ep.matmul import pallas as pallas_matmul
from jax_ep.matmul.backend import Problem
from jax_ep.runtime import availability, jax_compat

# This program removes an internal of JAX, imports jax_ep anew, and dispatches. JAX itself still has
# the internal, since only another module's reference to it is removed.
PROGRAM = """
import importlib, json, sys, types
import jax, jax.numpy as jnp
import flax.linen, flax.nnx, jax.extend.core, jax._src.dispatch  # before anything is missing
import jax.experimental.pallas.mosaic_gpu
from jax.interpreters import ad, batching, mlir, pxla
from jax.sharding import PartitionSpec as P

mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
of_any_devices = jax.sharding.AbstractMesh(
    (2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.arange(16.0).reshape(4, 4)
w, sizes = jnp.ones((2, 4, 3)), jnp.array([1, 2])
topk_idx = jnp.array([[0, 1], [2, 3], [1, -1], [3, 3]], jnp.int32)

def layer(implementation, mesh=mesh):
    def of_rank(x, topk_idx):
        options = dict(implementation=implementation)
        got = jax_ep.dispatch(x, topk_idx, num_experts=4, axis_name="expert", **options)
        return jax_ep.combine(2 * got.tokens, got.handle, **options)
    mapped = jax.shard_map(of_rank, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"))
    return lambda x: mapped(x, topk_idx)

def refusal(function, *args):
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""

class View:
    '''A module or a type without one of its names, as whoever imports it from now on sees it.'''
    def __init__(self, of, hidden):
        self._of, self._hidden = of, hidden
    def __getattr__(self, name):
        if name == self._hidden:
            raise AttributeError(name)
        return getattr(self._of, name)

def without(path):
    '''Removes what the path names; returns what puts it back.'''
    module, _, name = path.rpartition(".")
    if path == "jax.typeof(x).mat":
        typeof, jax.typeof = jax.typeof, lambda x: View(typeof(x), "mat")
        return lambda: setattr(jax, "typeof", typeof)
    package, _, last = module.rpartition(".")
    # Modules of jax._src see each other as attributes of their package, which stay.
    parent = types.SimpleNamespace() if package == "jax._src" else sys.modules[package]
    held = importlib.import_module(module)
    sys.modules[module] = None  # the module itself
    if name != "*":
        sys.modules[module] = View(held, name)
        setattr(parent, last, sys.modules[module])

    def restore():
        sys.modules[module] = held
        setattr(parent, last, held)
    return restore

found = {}
for path in sys.argv[1:]:
    for name in [name for name in sys.modules if name.split(".")[0] in ("jax_ep",)]:
        del sys.modules[name]
    restore = without(path)
    try:
        import jax_ep
        out = jax.jit(layer("xla"))(x)
        grad = jax.jit(jax.grad(lambda x: jnp.sum(layer("xla")(x) ** 2))).lower(x)
        products = jax.jit(jax.grad(lambda x: jnp.sum(jax_ep.grouped_matmul(x, w, sizes))))
        total = jax.shard_map(
            lambda x: jax_ep.all_reduce(x, "expert", algorithm="xla"), mesh=mesh,
            in_specs=P("expert"), out_specs=P(), check_vma=False)
        found[path] = dict(
            out=out.tolist(), grad=grad.out_info.shape, products=products.lower(x).out_info.shape,
            total=jax.jit(total).lower(x).out_info.shape,
            is_missing=jax_ep.runtime.jax_compat._find(path) is None,
            pallas=refusal(jax.jit(layer("pallas", of_any_devices)).trace, x))
    except Exception as error:
        found[path] = dict(error=f"{type(error).__name__}: {error}")
    finally:
        restore()
print(json.dumps(found))
"""

# A name that nobody looks for.
NOTHING = "jax.interpreters.mlir.nothing"
# Without these names, there are no primitives, and kernels refuse.
OF_PRIMITIVES = [
    "jax.core.ShapedArray",
    "jax.extend.core.Primitive",
    "jax.interpreters.ad.deflinear2",
    "jax.interpreters.batching.primitive_batchers",
    "jax.interpreters.mlir.lower_fun",
    "jax.interpreters.mlir.register_lowering",
    "jax.interpreters.xla.apply_primitive",
    # Remove the whole module.
    "jax.interpreters.mlir.*",
]
OTHERS = [
    "jax._src.dispatch.*",
    "jax._src.distributed.global_state",
    "jax._src.mesh.get_concrete_mesh",
    "jax.interpreters.partial_eval.dce_rules",
    "jax.interpreters.pxla.thread_resources",
    "jaxlib.mlir.dialects.stablehlo.*",
    "jax.typeof(x).mat",
]


SOME = [OF_PRIMITIVES[-1], OTHERS[0], OTHERS[-1]]
MISSING = {"some": SOME, "others": [*OF_PRIMITIVES[:-1], *OTHERS[1:-1]]}


@pytest.mark.slow
@pytest.mark.parametrize("paths", MISSING.values(), ids=MISSING)
def test_xla_computes_the_same_without_a_name_and_kernels_refuse(paths):
    environment = environment_of_program(
        fast=True, JAX_PLATFORMS="cpu", XLA_FLAGS="--xla_force_host_platform_device_count=2"
    )
    command = [sys.executable, "-c", PROGRAM, NOTHING, *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for path in paths:
        got = found[path]
        assert "error" not in got and got["is_missing"], got
        for name in ("out", "grad", "products", "total"):
            np.testing.assert_array_equal(got[name], found[NOTHING][name], err_msg=name)
        if KERNELS_RUN and path in OF_PRIMITIVES:
            assert got["pallas"].startswith('ValueError: implementation="pallas"'), path
            assert path.removesuffix(".*") in got["pallas"]


def test_what_is_missing_is_not_found(monkeypatch):
    """A missing internal must not be found; its feature is left out, or an error names it."""
    monkeypatch.setattr(jax_compat, "_find", lambda path: None)
    assert jax_compat.distributed_client() is None
    monkeypatch.setattr(jax_compat, "_dce_rules", None)
    options: Any = dict(abstract_eval=lambda x: x, lower=lambda *_: (), inline=lambda x: x)
    assert jax_compat.define_primitive("of_test", unused=lambda *_: (), **options)


def test_an_address_that_jax_does_not_give_is_an_error():
    array = jnp.zeros(1)
    assert jax_compat.address_of(array) == array.unsafe_buffer_pointer()
    shards = [types.SimpleNamespace(data=object())]
    with pytest.raises(NotImplementedError, match="lacks jax.Array.unsafe_buffer_pointer"):
        jax_compat.address_of(types.SimpleNamespace(addressable_shards=shards))


ROOT = pathlib.Path(jax_ep.__file__).parent
# Private or unstable names of JAX, outside of strings and comments.
UNSTABLE = re.compile(
    r"^[^#`\"\n]*\b(jaxlib|jax\._src|jax\.(core|extend|interpreters|lib|export)"
    r"|jax import (core|extend|interpreters|export|lib)"
    r"|jax\.experimental(\.| import )(mosaic|pallas)"
    r"|\w\.(aval|client|platform_version|unsafe_buffer_pointer))\b",
    re.M,
)


def test_no_other_module_uses_internals():
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("bench/"):
            uses = UNSTABLE.search(path.read_text())
            assert bool(uses) == (name == "runtime/jax_compat.py"), (name, uses)


def program(**module_context: Any) -> jax_compat.Program:
    context = types.SimpleNamespace(
        module_context=types.SimpleNamespace(**module_context), avals_in=()
    )
    context.replace = lambda **_: context
    return jax_compat.Program(context)


def test_a_program_that_says_nothing_has_no_kernels():
    silent = program()
    assert silent.platforms == () and silent.mesh is None and silent.for_export
    reason = availability.Lowered(silent).unavailable_reason(("expert",))
    assert reason is not None


def test_old_versions_of_jax_have_no_kernels(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    for reason in (
        availability.jax_unavailable_reason(),
        availability.tracing_unavailable_reason(),
        availability.Lowered(program(platforms=("cuda",))).unavailable_reason(("expert",)),
    ):
        assert reason == "it needs JAX 0.11 or newer, and this is JAX 0.10.2"
    for_cpu = availability.Lowered(program(platforms=("cpu",))).unavailable_reason(("expert",))
    # A newer JAX would not help on a CPU, so the reason is another one.
    assert for_cpu is not None and "needs NVIDIA GPUs" in for_cpu
    product = Problem((64, 64), jnp.bfloat16, "cpu")
    by_kernel = pallas_matmul.unavailable_reason(product)
    assert by_kernel is not None and "for NVIDIA Hopper GPUs" in by_kernel


def devices_of(mesh: Any) -> np.ndarray | None:
    return program(axis_context=types.SimpleNamespace(mesh=mesh)).mesh_devices


def test_the_devices_of_a_mesh(monkeypatch):
    devices = np.asarray(jax.devices()[::-1]).reshape(-1, 1)
    mesh = Mesh(devices, ("a", "b"))
    np.testing.assert_array_equal(devices_of(mesh), devices)
    assert devices_of(None) is None and program().mesh_devices is None
    assert devices_of(mesh.abstract_mesh) is None
    with jax.set_mesh(mesh):
        np.testing.assert_array_equal(devices_of(mesh.abstract_mesh), devices)
        for shape, names in (
            ((len(devices) + 1, 1), ("a", "b")),
            ((len(devices), 1), ("a", "c")),
            ((len(devices),), ("a",)),
        ):
            assert devices_of(AbstractMesh(shape, names)) is None
        monkeypatch.setattr(jax_compat, "_concrete_mesh", None)
        assert devices_of(mesh.abstract_mesh) is None and devices_of(mesh) is not None


def test_primitives_run_where_jit_is_disabled():
    lhs, rhs = jnp.ones((4, 8)), jnp.ones((2, 8, 3))
    with jax.disable_jit():
        out = jax_ep.grouped_matmul(lhs, rhs, jnp.array([1, 3]))
        routed = jax_ep.top_k_routing(jnp.arange(8.0).reshape(2, 4), 2)
    np.testing.assert_array_equal(out, np.full((4, 3), 8.0))
    np.testing.assert_array_equal(routed.topk_idx, [[3, 2]] * 2)
