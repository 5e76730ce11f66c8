"""Tests that every exchange kernel lowers for CUDA without a GPU, or says why it cannot."""

from __future__ import annotations

import dataclasses
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from support.kernels import needs_kernels
from support.meshes import cuda_mesh, mesh
from support.selection import quick

import jax_ep
from jax_ep.exchange import pallas as pallas_exchange
from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.interface import Config
from jax_ep.runtime import availability, jax_compat, symmetric_memory
from pallas_kernels.exchange import dispatch as dispatch_kernel
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import memory_map

# tests/runtime has the tests of errors with older versions of JAX.
pytestmark = needs_kernels

DISPATCH, LIKE = "ep_dispatch", "ep_dispatch_like"
COMBINE = "ep_combine"


@dataclasses.dataclass(frozen=True)
class Shapes:
    num_tokens: int
    hidden: int
    top_k: int
    num_experts: int
    dtype: Any = "bfloat16"
    mesh: tuple[tuple[str, int], ...] = (("expert", 8),)
    axis_name: str | tuple[str, ...] = "expert"
    capacity: int | None = None
    alignment: int = 1
    overflow: Any = "tail"

    def __str__(self) -> str:
        mesh = "x".join(str(size) for _, size in self.mesh)
        return (
            f"{mesh}-T{self.num_tokens}-H{self.hidden}-K{self.top_k}-E{self.num_experts}"
            f"-{jnp.dtype(self.dtype)}"
        )


def ranks(num_ranks: int) -> dict[str, Any]:
    return dict(mesh=(("expert", num_ranks),))


def lowered(shapes: Shapes, implementation: str | None, function: Any, mesh: Any = None) -> str:
    """Returns the text of `function(shapes, implementation, x, topk_idx, weights)` for CUDA."""
    names, sizes = zip(*shapes.mesh, strict=True)
    mesh = cuda_mesh(sizes, names) if mesh is None else mesh

    def on_one_rank(*arrays: jax.Array) -> Any:
        return function(shapes, implementation, *arrays)

    sharded = jax.shard_map(on_one_rank, mesh=mesh, in_specs=P(names), out_specs=P(names))
    rows = shapes.num_tokens * mesh.size
    arrays = (
        jax.ShapeDtypeStruct((rows, shapes.hidden), shapes.dtype),
        jax.ShapeDtypeStruct((rows, shapes.top_k), jnp.int32),
        jax.ShapeDtypeStruct((rows, shapes.top_k), jnp.float32),
    )
    return jax.jit(sharded).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def kernels(text: str) -> list[str]:
    """Returns the sorted names of the exchange's kernels in a lowered program."""
    calls = [line for line in text.splitlines() if "@mosaic_gpu" in line]
    names = [re.search(r"ep_dispatch_like|ep_dispatch|ep_combine", call) for call in calls]
    assert all(names), "a kernel without a name of ours"
    return sorted(name.group() for name in names if name)


def send(shapes: Shapes, implementation: Any, x: jax.Array, topk_idx: jax.Array) -> Any:
    return jax_ep.dispatch(
        x,
        topk_idx,
        num_experts=shapes.num_experts,
        axis_name=shapes.axis_name,
        capacity=shapes.capacity,
        expert_alignment=shapes.alignment,
        overflow=shapes.overflow,
        implementation=implementation,
    )


def forward(shapes: Shapes, implementation: Any, x: Any, topk_idx: Any, weights: Any) -> Any:
    sent = send(shapes, implementation, x, topk_idx)
    again = jax_ep.dispatch_like(x, sent.handle, implementation=implementation)
    y = sent.tokens + again
    return (
        jax_ep.combine(y, sent.handle, weights, implementation=implementation),
        jax_ep.combine(y, sent.handle, implementation=implementation),
    )


def backward(shapes: Shapes, implementation: Any, x: Any, topk_idx: Any, weights: Any) -> Any:
    """Computes the gradients of `forward`: of a dispatch, a dispatch_like and two combines."""

    def outputs(x: jax.Array, weights: jax.Array) -> Any:
        return forward(shapes, implementation, x, topk_idx, weights)

    out, pull = jax.vjp(outputs, x, weights)
    return pull(out)


SHAPES = [
    Shapes(128, 7168, 8, 256),
    Shapes(4096, 7168, 8, 256, capacity=40000, alignment=128),
    Shapes(1, 7168, 16, 512),
    Shapes(16, 512, 8, 384),
    Shapes(4096, 2880, 4, 128, **ranks(4)),
    Shapes(300, 4096, 6, 64, "float16", **ranks(2)),
    Shapes(17, 40, 3, 4, "float32", **ranks(2), capacity=1),
    Shapes(63, 131, 5, 12, "float16", **ranks(4), alignment=3),
    # A rank alone combines up to 128 tokens by XLA.
    Shapes(129, 1, 1, 1, "float32", **ranks(1)),
    Shapes(200, 64, 2, 6, **ranks(1)),
    Shapes(2, 8192, 13, 16, "float32", mesh=(("data", 2), ("expert", 4))),
    Shapes(129, 1024, 8, 64, mesh=(("a", 2), ("b", 4)), axis_name=("a", "b")),
    Shapes(129, 1024, 8, 64, mesh=(("a", 2), ("b", 4)), axis_name=("b", "a")),
    Shapes(5, 256, 7, 8, mesh=(("expert", 2), ("data", 4)), axis_name="expert"),
    Shapes(128, 7168, 8, 256, capacity=1000, alignment=8, overflow="fair"),
    Shapes(300, 64, 6, 2, "float16", **ranks(2), capacity=30, overflow="fair"),
    Shapes(33, 64, 2, 8, mesh=(("a", 2), ("b", 2)), axis_name=("b", "a")),
]


BACKWARD = [COMBINE] * 4 + [DISPATCH, LIKE, LIKE, LIKE]


@pytest.mark.parametrize("shapes", quick(SHAPES, SHAPES[-1]), ids=str)
def test_lowers_to_the_kernels(shapes):
    best, named = lowered(shapes, None, forward), lowered(shapes, "pallas", backward)
    assert kernels(best) == [COMBINE, COMBINE, DISPATCH, LIKE]
    assert kernels(lowered(shapes, None, backward)) == BACKWARD
    # The backward pass has two more plain combines, and dispatches the cotangents of both combines.
    assert kernels(named) == BACKWARD
    for symbol in ("multimem", "nvshmem", "multicast"):
        assert symbol not in best and symbol not in named


@pytest.mark.parametrize("shapes", [SHAPES[0], SHAPES[7]], ids=str)
def test_xla_lowers_without_a_kernel(shapes):
    for function in (forward, backward):
        text = lowered(shapes, "xla", function)
        assert "mosaic" not in text
    if shapes.num_experts > 1:
        assert "all_gather" in text and "all_to_all" in text


@pytest.mark.parametrize("function", [forward, backward])
@pytest.mark.slow
def test_no_small_collectives_beside_the_kernels(function):
    """Only the gradient of a weighted combine sends the weights and their cotangents by others."""

    def unweighted(shapes, implementation, x, topk_idx, weights):
        del weights
        return function(shapes, implementation, x, topk_idx, None)

    text = lowered(SHAPES[0], "pallas", unweighted)
    for collective in ("all_gather", "all_reduce", "all_to_all", "collective_permute"):
        assert f"stablehlo.{collective}" not in text


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (Shapes(4, 128, 2, 8, "float8_e4m3fn"), "dtype of the rows is float8_e4m3fn"),
        (Shapes(4, 65536, 2, 8), "too long for shared memory"),
        (Shapes(4, 32768, 2, 8, "float32"), "too long for shared memory"),
    ],
    ids=str,
)
def test_a_payload_that_cannot_be_served(shapes, reason):
    def tokens(shapes, implementation, x, topk_idx, weights):
        del weights
        return send(shapes, implementation, x, topk_idx).tokens

    assert "mosaic" not in lowered(shapes, None, tokens)
    with pytest.raises(ValueError, match=f'implementation="pallas" cannot run here.*{reason}'):
        lowered(shapes, "pallas", tokens)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_a_mesh_axis_may_be_left_out_of_shard_map(implementation):
    """implementation=None must choose "xla" if the shard_map leaves out a mesh axis."""

    def on_one_rank(x: jax.Array, topk_idx: jax.Array) -> jax.Array:
        options = dict(num_experts=8, axis_name="expert", implementation=implementation)
        sent = jax_ep.dispatch(x, topk_idx, **options)
        return jax_ep.combine(sent.tokens, sent.handle, implementation=implementation)

    sharded = jax.shard_map(
        on_one_rank,
        mesh=cuda_mesh((2, 4), ("data", "expert")),
        in_specs=P("expert"),
        out_specs=P("expert"),
        axis_names={"expert"},
    )
    arrays = jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((8, 2), jnp.int32)
    text = jax.jit(sharded).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic" not in text


@pytest.mark.parametrize("top_k", [3, 4])
@pytest.mark.parametrize("exchange", [xla_exchange, pallas_exchange], ids=["xla", "pallas"])
def test_routes_stay_int32_with_64_bit_types(exchange, top_k):
    """Routes and counts must be int32, and tokens float32, also with jax_enable_x64."""

    def types(x, topk_idx, weights):
        config = Config(axis_name=("expert",), num_experts=4, capacity=20, expert_alignment=2)
        (tokens,), routes, groups = exchange.dispatch_by_choices(x, topk_idx, config)
        assert all(a.dtype == jnp.int32 for a in (*routes, *groups))
        (again,) = exchange.dispatch_like(x, routes, config)
        out = exchange.combine(tokens, weights, routes, config)
        assert all(a.dtype == jnp.float32 for a in (tokens, again, out))
        return x

    with jax.enable_x64(True):
        jax.eval_shape(
            jax.shard_map(
                types,
                mesh=cuda_mesh((2,), ("expert",)),
                in_specs=P("expert"),
                out_specs=P("expert"),
                check_vma=False,
            ),
            jax.ShapeDtypeStruct((10, 64), jnp.float32),
            jax.ShapeDtypeStruct((10, top_k), jnp.int32),
            jax.ShapeDtypeStruct((10, top_k), jnp.float32),
        )


def test_the_ranks_of_a_host_count_what_they_drop(monkeypatch):
    """On two hosts of two ranks, each rank must count the dropped choices of its own experts."""
    # The dispatch kernel counts choices in this form: [source rank on the host, expert there].
    counts = jnp.asarray([[1, 2, 3, 4], [10, 20, 30, 40]], jnp.int32)

    def kernel(x, topk_idx, *_, **__):
        zeros = [jnp.zeros(shape, jnp.int32) for shape in ((2,), (2,), (1,), (1,))]
        return (x,), jnp.zeros((2, *topk_idx.shape), jnp.int32), counts, *zeros

    monkeypatch.setattr(dispatch_kernel, "expert_dispatch", kernel)
    monkeypatch.setattr(pallas_exchange.plans, "for_low_latency", lambda *_, **__: None)
    config = Config(axis_name=("expert",), ranks_per_host=2, num_experts=4, capacity=8)

    def dropped(x, topk_idx):
        return pallas_exchange.dispatch_by_choices(x, topk_idx, config)[2].dropped_counts

    run = jax.shard_map(
        dropped, mesh=mesh((4,), ("expert",)), in_specs=P(), out_specs=P("expert"), check_vma=False
    )
    got = jax.jit(run)(jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((8, 2), jnp.int32))
    np.testing.assert_array_equal(got.reshape(4, 2), [[11, 22], [33, 44]] * 2)


@pytest.mark.parametrize(
    ("shapes", "supported"),
    quick(
        [
            (Shapes(4096, 7360, 16, 512), True),
            (Shapes(4096, 10368, 8, 512), True),
            (Shapes(4096, 2880, 16, 512, "float32"), True),
            (Shapes(128, 7168, 8, 1024), True),
            (Shapes(128, 7168, 8, 4096), False),
        ],
        (Shapes(128, 7168, 8, 4096), False),
    ),
    ids=str,
)
def test_none_always_lowers(shapes, supported):
    """implementation=None must choose the kernels if they fit in shared memory, and else "xla"."""
    by_default = lowered(shapes, None, backward)
    assert bool(kernels(by_default)) == supported
    if supported:
        assert kernels(lowered(shapes, "pallas", backward)) == kernels(by_default)
    else:
        with pytest.raises(ValueError, match="cannot run here: a row of 7168.*4096 experts"):
            lowered(shapes, "pallas", backward)


@pytest.mark.parametrize(
    "shapes",
    quick(
        [
            Shapes(128, 7168, 8, 256),
            Shapes(4096, 7168, 8, 256, "float32"),
            Shapes(17, 128, 3, 8, "float16", **ranks(2)),
            Shapes(4096, 10368, 8, 512),
            Shapes(4096, 14336, 8, 256),
            Shapes(128, 16384, 8, 256),
            Shapes(128, 10240, 16, 512, "float32"),
            Shapes(128, 12288, 8, 256, "float32"),
        ],
        Shapes(17, 128, 3, 8, "float16", **ranks(2)),
        Shapes(128, 12288, 8, 256, "float32"),
    ),
    ids=str,
)
def test_quantized_sums_lower_where_they_are_supported(shapes):
    def there_and_back(shapes, implementation, x, topk_idx, weights):
        sent = send(shapes, implementation, x, topk_idx)
        options = dict(wire_dtype=jnp.float8_e4m3fn, implementation=implementation)
        return jax_ep.combine(sent.tokens, sent.handle, weights, **options)

    supported = kernels(lowered(shapes, None, there_and_back))
    if shapes.hidden * jnp.dtype(shapes.dtype).itemsize <= 2**15:
        assert supported == [COMBINE, DISPATCH]
    if COMBINE in supported:
        assert kernels(lowered(shapes, "pallas", there_and_back)) == supported
    else:
        with pytest.raises(ValueError, match="too long for shared memory"):
            lowered(shapes, "pallas", there_and_back)


@pytest.mark.parametrize("num_blocks", [1, 24])
@pytest.mark.slow
def test_the_number_of_blocks_can_be_set(num_blocks, monkeypatch):
    monkeypatch.setenv("JAX_EP_NUM_BLOCKS", str(num_blocks))
    model = dict(hidden=512, num_experts=256, top_k=8, num_ranks=8)
    # A block's receive buffer holds the sums of up to 64 tokens at a time.
    for num_tokens in (4096, 16):
        held = jax_ep.workspace_bytes("combine", "pallas", num_tokens=num_tokens, **model)
        blocks = min(num_blocks, num_tokens)
        # Each token has a sum from each of 8 ranks: 512 columns of 2 bytes.
        of_block = min(64, -(-num_tokens // blocks)) * 8 * 512 * 2
        assert held["receive buffer"] == blocks * of_block
    kernel, asked = fb.kernel, []

    def note(*args: Any, num_blocks: int, **options: Any) -> Any:
        asked.append(num_blocks)
        return kernel(*args, num_blocks=num_blocks, **options)

    monkeypatch.setattr(fb, "kernel", note)
    found = kernels(lowered(Shapes(40, 512, 8, 256), "pallas", backward))
    assert set(found) == {DISPATCH, LIKE, COMBINE} and set(asked) == {num_blocks}


NO_NUMBERS = ["0", "-3", "many", "nan", "", "1e30"]


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        *(("JAX_EP_NUM_BLOCKS", value, "") for value in NO_NUMBERS),
        *(("JAX_EP_TIMEOUT_SECONDS", value, "") for value in NO_NUMBERS),
        ("JAX_EP_NUM_BLOCKS", "2049", " must be .* at most 2048, .* '2049'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(variable, value, message, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=variable + message):
        lowered(Shapes(16, 64, 2, 8), "pallas", forward)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a mesh of CPUs lowers for GPUs here")
@pytest.mark.parametrize(
    "order",
    quick(
        [slice(None), slice(None, None, -1), [2, 0, 3, 1], slice(2, 4), [3, 1]],
        [2, 0, 3, 1],
        slice(2, 4),
    ),
    ids=str,
)
def test_any_devices_are_served_in_any_order(order):
    devices = np.asarray(jax.devices()[:4])[order]
    mesh = jax.sharding.Mesh(devices, ("expert",))
    assert kernels(lowered(Shapes(8, 64, 2, 8, "float32"), None, forward, mesh))


@pytest.fixture
def gpus(monkeypatch):
    """Returns a function that makes JAX's first devices pass for GPUs that share memory."""

    def pretend(num_gpus: int) -> list[jax.Device]:
        devices = jax.devices()[:num_gpus]
        numbers = {device.id: num_gpus - 1 - i for i, device in enumerate(devices)}
        domain = types.SimpleNamespace(base=memory_map.BASE, numbers=numbers, num_gpus=num_gpus)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "device_count", lambda: num_gpus)
        monkeypatch.setattr(jax, "devices", lambda: devices)
        monkeypatch.setattr(availability, "unavailable_reason", lambda *_: None)
        monkeypatch.setattr(jax_compat, "devices_unavailable_reason", lambda: None)
        monkeypatch.setattr(symmetric_memory, "unavailable_reason", lambda _: None)
        monkeypatch.setattr(symmetric_memory, "domain", lambda: domain)
        return devices

    return pretend


@pytest.fixture
def fabrics(monkeypatch):
    """Collects the fabrics of the kernels that are traced during a test."""
    noted, kernel = [], fb.kernel

    def note(fabric: Any, *args: Any, **options: Any) -> Any:
        noted.append(fabric)
        return kernel(fabric, *args, **options)

    monkeypatch.setattr(fb, "kernel", note)
    return noted


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="CPUs are taken for GPUs here")
@pytest.mark.parametrize(
    "order", quick([[0, 1, 2, 3], [2, 0, 3, 1], [3, 1]], [2, 0, 3, 1], [3, 1]), ids=str
)
def test_kernels_know_which_gpus_are_at_the_places_of_a_mesh(order, gpus, fabrics):
    mesh = jax.sharding.Mesh(np.asarray(gpus(4))[order], ("expert",))
    assert kernels(lowered(Shapes(8, 64, 2, 8, "float32"), None, forward, mesh))
    assert {fabric.gpus for fabric in fabrics} == {tuple(3 - i for i in order)}


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="CPUs are taken for GPUs here")
def test_a_program_of_one_gpu_uses_that_gpus_memory(gpus, fabrics):
    """A program on one GPU, outside of shard_map, must use the memory of that GPU."""
    for i, device in enumerate(gpus(4)):
        x, topk_idx = (
            jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(device))
            for shape, dtype in (((300, 512), jnp.bfloat16), ((300, 4), jnp.int32))
        )
        function = jax.jit(
            lambda x, topk_idx: (
                jax_ep.dispatch(
                    x, topk_idx, num_experts=8, axis_name=(), implementation="pallas"
                ).tokens
            )
        )
        assert kernels(function.trace(x, topk_idx).lower(lowering_platforms=("cuda",)).as_text())
        fabric = fabrics.pop()
        assert fabric.gpus == (3 - i,) and fabric.num_ranks == 1 and not fabrics


DISPATCHES, COMBINES = ["ep_dispatch", "ep_dispatch_like"], ["ep_combine"] * 2


@pytest.mark.parametrize(
    ("num_tokens", "num_ranks", "by_kernels"),
    [
        (16, 1, []),
        (17, 1, DISPATCHES),
        (128, 1, DISPATCHES),
        (129, 1, COMBINES + DISPATCHES),
        (16, 2, COMBINES + DISPATCHES),
    ],
)
def test_few_tokens_of_one_rank_need_no_kernel(num_tokens, num_ranks, by_kernels):
    """A rank alone must move few tokens by XLA, more of them in a combine, if none is named."""
    shapes = Shapes(num_tokens, 512, 2, 8, **ranks(num_ranks))
    assert kernels(lowered(shapes, None, forward)) == by_kernels
    assert kernels(lowered(shapes, "pallas", forward))
    # With many rows for few tokens, XLA would take longer.
    assert kernels(lowered(dataclasses.replace(shapes, alignment=128), None, forward))


SHAPES_OF_TWO = Shapes(8, 64, 2, 8, "float32")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="CPUs are taken for GPUs here")
@pytest.mark.parametrize(("num_gpus", "supported"), [(0, True), (1, True), (2, False), (8, False)])
def test_an_abstract_mesh_hides_which_devices_it_is_of(num_gpus, supported, gpus):
    """On an abstract mesh, kernels must be refused if this machine has 2 or more GPUs."""
    if num_gpus:
        gpus(num_gpus)
    mesh = AbstractMesh((2,), ("expert",), axis_types=(AxisType.Auto,))
    assert bool(kernels(lowered(SHAPES_OF_TWO, None, forward, mesh))) == supported
    if not supported:
        with pytest.raises(ValueError, match="was given an abstract mesh; use jax.set_mesh"):
            lowered(SHAPES_OF_TWO, "pallas", forward, mesh)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="CPUs are taken for GPUs here")
def test_the_mesh_that_is_set_says_which_devices_an_abstract_one_is_of(gpus, fabrics):
    devices = np.asarray(gpus(4))[[3, 0]]
    mesh = jax.sharding.Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert kernels(lowered(SHAPES_OF_TWO, None, forward, mesh.abstract_mesh))
    assert {fabric.gpus for fabric in fabrics} == {(0, 3)}


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="CPUs are taken for GPUs here")
def test_gpus_that_do_not_share_memory_run_no_kernels(gpus, monkeypatch):
    mesh = jax.sharding.Mesh(np.asarray(gpus(2)), ("expert",))
    monkeypatch.setattr(jax_compat, "platform_of_traced_mesh", lambda: "gpu")
    monkeypatch.setattr(symmetric_memory, "unavailable_reason", lambda _: "the pool is gone")
    assert not kernels(lowered(SHAPES_OF_TWO, None, forward, mesh))
    with pytest.raises(ValueError, match="it needs GPUs that share memory, and the pool is gone"):
        lowered(SHAPES_OF_TWO, "pallas", forward, mesh)
