"""Tests that every exchange kernel lowers for CUDA without a GPU, or says why it cannot."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from support.contract import AXIS, Case
from support.kernels import lowered as lowered_for_cuda
from support.kernels import needs_kernels, on_ranks, pass_for_gpus
from support.meshes import cuda_mesh, mesh
from support.selection import quick

import jax_ep
from jax_ep.collectives import table
from jax_ep.exchange import pallas as pallas_exchange
from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.interface import Config
from jax_ep.runtime import jax_compat, symmetric_memory
from pallas_kernels.exchange import dispatch as dispatch_kernel
from pallas_kernels.fabric import fabric as fb

# tests/runtime has the tests of errors with older versions of JAX.
pytestmark = needs_kernels

DISPATCH, LIKE = "ep_dispatch", "ep_dispatch_like"
COMBINE = "ep_combine"
# The collectives that send one value per choice, such as its weight. On GPUs they are kernels, too.
OF_VALUES = ["ep_all_gather", "ep_all_to_all"]


def lowered(
    case: Case, implementation: str | None, function: Any, mesh: Any = None, axis_name: Any = AXIS
) -> str:
    """Returns the text of `function(send, implementation, x, topk_idx, weights)` for CUDA."""
    mesh = cuda_mesh((case.num_ranks,), (AXIS,)) if mesh is None else mesh
    rows = case.num_tokens * mesh.size
    arrays = (
        jax.ShapeDtypeStruct((rows, case.hidden), case.dtype),
        jax.ShapeDtypeStruct((rows, case.top_k), jnp.int32),
        jax.ShapeDtypeStruct((rows, case.top_k), jnp.float32),
    )
    send = functools.partial(case.dispatch, implementation=implementation, axis_name=axis_name)
    on_one_rank = functools.partial(function, send, implementation)
    return lowered_for_cuda(on_ranks(on_one_rank, mesh, check_vma=True), *arrays)


def kernels(text: str) -> list[str]:
    """Returns the sorted names of the kernels in a lowered program, without "_ll"."""
    calls = [line for line in text.splitlines() if "@mosaic_gpu" in line]
    known = re.compile("|".join([LIKE, DISPATCH, COMBINE, *OF_VALUES]))
    names = [known.search(call) for call in calls]
    assert all(names), "a kernel without a name of ours"
    return sorted(name.group() for name in names if name)


def kernels_of_rows(text: str) -> list[str]:
    """Returns `kernels` but for those that send one value per choice."""
    return [name for name in kernels(text) if name not in OF_VALUES]


def forward(send: Any, implementation: Any, x: Any, topk_idx: Any, weights: Any) -> Any:
    sent = send(x, topk_idx)
    again = jax_ep.dispatch_like(x, sent.handle, implementation=implementation)
    y = sent.tokens + again
    return (
        jax_ep.combine(y, sent.handle, weights, implementation=implementation),
        jax_ep.combine(y, sent.handle, implementation=implementation),
    )


def backward(send: Any, implementation: Any, x: Any, topk_idx: Any, weights: Any) -> Any:
    """Computes the gradients of `forward`: of a dispatch, a dispatch_like and two combines."""

    def outputs(x: jax.Array, weights: jax.Array) -> Any:
        return forward(send, implementation, x, topk_idx, weights)

    out, pull = jax.vjp(outputs, x, weights)
    return pull(out)


BF16, F16, F32 = "bfloat16", "float16", "float32"
CASES = [
    # Arguments: num_ranks, num_tokens, hidden, top_k, num_experts, dtype,
    # capacity, expert_alignment.
    Case(8, 128, 7168, 8, 256, BF16),
    Case(8, 4096, 7168, 8, 256, BF16, 40000, 128),
    Case(8, 16, 512, 8, 384, BF16),
    Case(2, 17, 40, 3, 4, F32, 1),
    Case(4, 63, 131, 5, 12, F16, None, 3),
    # A rank alone combines up to 128 tokens by XLA.
    Case(1, 129, 1, 1, 1, F32),
    Case(2, 300, 64, 6, 2, F16, 30, 1, "fair"),
    # These rows and choices are as many as fit in shared memory.
    Case(8, 4096, 7360, 16, 512, BF16),
    Case(8, 4096, 10368, 8, 512, BF16),
    Case(8, 4096, 2880, 16, 512, F32),
    Case(8, 128, 7168, 8, 1024, BF16),
]
# Maps a name to a case, the names and sizes of its mesh's axes, and the axes of its ranks.
MESHES = {str(case): (case, {AXIS: case.num_ranks}, AXIS) for case in CASES} | {
    "expert axis last": (Case(4, 2, 8192, 13, 16, F32), dict(data=2, expert=4), AXIS),
    "expert axis first": (Case(2, 5, 256, 7, 8, BF16), dict(expert=2, data=4), AXIS),
    "two axes": (Case(4, 33, 64, 2, 8, BF16), dict(a=2, b=2), ("b", "a")),
}
BACKWARD = [COMBINE] * 4 + [DISPATCH, LIKE, LIKE, LIKE]


@pytest.mark.parametrize("case, axes, axis_name", quick(MESHES, "two axes"))
def test_lowers_to_the_kernels(case, axes, axis_name):
    mesh = cuda_mesh(tuple(axes.values()), tuple(axes))

    def text(implementation: Any, function: Any) -> str:
        return lowered(case, implementation, function, mesh, axis_name)

    best, named = text(None, forward), text("pallas", backward)
    assert kernels(best) == [COMBINE, COMBINE, DISPATCH, LIKE]
    assert kernels_of_rows(text(None, backward)) == BACKWARD
    # The backward pass has two more plain combines, and dispatches the cotangents of both combines.
    assert kernels_of_rows(named) == BACKWARD
    for symbol in ("multimem", "nvshmem", "multicast"):
        assert symbol not in best and symbol not in named


def test_xla_lowers_without_a_kernel():
    text = lowered(CASES[4], "xla", backward)
    assert "mosaic" not in text and "all_gather" in text and "all_to_all" in text


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case(8, 4, 128, 2, 8, "float8_e4m3fn"), "dtype of the rows is float8_e4m3fn"),
        (Case(8, 4, 32768, 2, 8, F32), "too long for shared memory"),
        (Case(8, 128, 7168, 8, 4096, BF16), "a row of 7168.*4096 experts"),
    ],
    ids=str,
)
def test_a_payload_that_cannot_be_served(case, reason):
    def tokens(send, implementation, x, topk_idx, weights):
        return send(x, topk_idx).tokens

    assert "mosaic" not in lowered(case, None, tokens)
    with pytest.raises(ValueError, match=f'implementation="pallas" cannot run here.*{reason}'):
        lowered(case, "pallas", tokens)


def test_a_mesh_axis_may_be_left_out_of_shard_map():
    """implementation=None must choose "xla" if the shard_map leaves out a mesh axis."""

    def on_one_rank(x: jax.Array, topk_idx: jax.Array) -> jax.Array:
        return jax_ep.dispatch(x, topk_idx, num_experts=8, axis_name="expert").tokens

    mesh, expert = cuda_mesh((2, 4), ("data", "expert")), P("expert")
    options = dict(in_specs=expert, out_specs=expert, axis_names={"expert"}, check_vma=True)
    run = on_ranks(on_one_rank, mesh, **options)
    arrays = jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((8, 2), jnp.int32)
    assert "mosaic" not in lowered_for_cuda(run, *arrays)


@pytest.mark.parametrize("exchange", [xla_exchange, pallas_exchange], ids=["xla", "pallas"])
def test_routes_stay_int32_with_64_bit_types(exchange):
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
        kinds = ((10, 64), jnp.float32), ((10, 3), jnp.int32), ((10, 3), jnp.float32)
        shapes = [jax.ShapeDtypeStruct(*kind) for kind in kinds]
        jax.eval_shape(on_ranks(types, cuda_mesh((2,), (AXIS,))), *shapes)


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
    "case",
    [
        pytest.param(Case(2, 17, 128, 3, 8, F16)),
        pytest.param(Case(8, 4096, 14336, 8, 256, BF16), marks=pytest.mark.slow),
        pytest.param(Case(8, 128, 12288, 8, 256, F32)),
    ],
    ids=str,
)
def test_quantized_sums_lower_where_they_are_supported(case):
    def there_and_back(send, implementation, x, topk_idx, weights):
        sent = send(x, topk_idx)
        options = dict(wire_dtype=jnp.float8_e4m3fn, implementation=implementation)
        return jax_ep.combine(sent.tokens, sent.handle, weights, **options)

    supported = kernels(lowered(case, None, there_and_back))
    if case.hidden * jnp.dtype(case.dtype).itemsize <= 2**15:
        assert supported == [COMBINE, DISPATCH]
    if COMBINE in supported:
        assert kernels(lowered(case, "pallas", there_and_back)) == supported
    else:
        with pytest.raises(ValueError, match="too long for shared memory"):
            lowered(case, "pallas", there_and_back)


@pytest.mark.parametrize("num_blocks", [1, 24])
@pytest.mark.slow
def test_the_number_of_blocks_can_be_set(num_blocks, monkeypatch, calls):
    monkeypatch.setenv("JAX_EP_NUM_BLOCKS", str(num_blocks))
    model = dict(hidden=512, num_experts=256, top_k=8, num_ranks=8)
    # A block's receive buffer holds the sums of up to 64 tokens at a time.
    for num_tokens in (4096, 16):
        held = jax_ep.workspace_bytes("combine", "pallas", num_tokens=num_tokens, **model)
        blocks = min(num_blocks, num_tokens)
        # Each token has a sum from each of 8 ranks: 512 columns of 2 bytes.
        of_block = min(64, -(-num_tokens // blocks)) * 8 * 512 * 2
        assert held["receive buffer"] == blocks * of_block
    found = kernels_of_rows(lowered(Case(8, 40, 512, 8, 256, BF16), "pallas", backward))
    assert set(found) == {DISPATCH, LIKE, COMBINE}
    of_rows = [options for _, options in calls if options["name"] in found]
    assert {options["name"] for options in of_rows} == set(found)
    assert {options["num_blocks"] for options in of_rows} == {num_blocks}


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("JAX_EP_NUM_BLOCKS", "many", ""),
        ("JAX_EP_TIMEOUT_SECONDS", "-3", ""),
        ("JAX_EP_NUM_BLOCKS", "2049", " must be .* at most 2048, .* '2049'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(variable, value, message, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=variable + message):
        lowered(Case(8, 16, 64, 2, 8, BF16), "pallas", forward)


@pytest.fixture
def gpus(monkeypatch):
    return functools.partial(pass_for_gpus, monkeypatch)


CASE_OF_TWO, CASE_OF_THREE = Case(2, 8, 64, 2, 8, F32), Case(3, 8, 64, 2, 9, F32)


@pytest.fixture
def calls(monkeypatch):
    """Collects the fabric and the options of each kernel that is traced during a test."""
    noted, kernel = [], fb.kernel

    def note(fabric: Any, *args: Any, **options: Any) -> Any:
        noted.append((fabric, options))
        return kernel(fabric, *args, **options)

    monkeypatch.setattr(fb, "kernel", note)
    return noted


def test_one_value_per_choice_is_sent_by_the_collectives_that_were_measured(gpus, monkeypatch):
    mesh = jax.sharding.Mesh(np.asarray(gpus(2)), ("expert",))
    assert kernels(lowered(CASE_OF_TWO, None, backward, mesh)) == BACKWARD
    lookup = table.lookup

    def of_hopper(op: str, num_ranks: int, num_bytes: int, _: Any, **options: Any) -> str:
        return lookup(op, num_ranks, num_bytes, "9.0", **options)

    monkeypatch.setattr(table, "lookup", of_hopper)
    assert kernels(lowered(CASE_OF_TWO, None, backward, mesh)) == [*OF_VALUES, *BACKWARD]


@pytest.mark.slow
def test_kernels_know_which_gpus_are_at_the_places_of_a_mesh(gpus, calls):
    mesh = jax.sharding.Mesh(np.asarray(gpus(4))[[2, 3, 1]], ("expert",))
    assert kernels(lowered(CASE_OF_THREE, None, forward, mesh))
    assert {fabric.gpus for fabric, _ in calls} == {(1, 0, 2)}


def test_a_program_of_one_gpu_uses_that_gpus_memory(gpus, calls):
    """A program on one GPU, outside of shard_map, must use the memory of that GPU."""

    @jax.jit
    def send(x, topk_idx):
        options = dict(num_experts=8, axis_name=(), implementation="pallas")
        return jax_ep.dispatch(x, topk_idx, **options).tokens

    for i, device in enumerate(gpus(2)):
        sharding = jax.sharding.SingleDeviceSharding(device)
        shapes = ((300, 512), jnp.bfloat16), ((300, 4), jnp.int32)
        arrays = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
        assert kernels(send.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text())
        ((fabric, _),) = calls
        assert fabric.gpus == (1 - i,) and fabric.num_ranks == 1
        calls.clear()


@pytest.mark.parametrize(
    ("num_tokens", "by_kernels"),
    quick(
        [(16, []), (128, [DISPATCH, LIKE]), (129, [COMBINE, COMBINE, DISPATCH, LIKE])],
        (128, [DISPATCH, LIKE]),
    ),
)
def test_few_tokens_of_one_rank_need_no_kernel(num_tokens, by_kernels):
    """A rank alone must move few tokens by XLA, more of them in a combine, if none is named."""
    case = Case(1, num_tokens, 512, 2, 8, BF16)
    assert kernels(lowered(case, None, forward)) == by_kernels
    if num_tokens == 16:
        assert kernels(lowered(case, "pallas", forward))
        # With many rows for few tokens, XLA would take longer.
        assert kernels(lowered(dataclasses.replace(case, expert_alignment=128), None, forward))


@pytest.mark.parametrize(
    ("num_gpus", "supported"), quick([(0, True), (1, True), (2, False)], (2, False))
)
def test_an_abstract_mesh_hides_which_devices_it_is_of(num_gpus, supported, gpus):
    """On an abstract mesh, kernels must be refused if this machine has 2 or more GPUs."""
    if num_gpus:
        gpus(num_gpus)
    mesh = AbstractMesh((2,), ("expert",), axis_types=(AxisType.Auto,))
    assert bool(kernels(lowered(CASE_OF_TWO, None, forward, mesh))) == supported
    if not supported:
        with pytest.raises(ValueError, match="was given an abstract mesh; use jax.set_mesh"):
            lowered(CASE_OF_TWO, "pallas", forward, mesh)


def test_the_mesh_that_is_set_says_which_devices_an_abstract_one_is_of(gpus, calls):
    devices = np.asarray(gpus(4))[[3, 0]]
    mesh = jax.sharding.Mesh(devices, ("expert",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        assert kernels(lowered(CASE_OF_TWO, None, forward, mesh.abstract_mesh))
    assert {fabric.gpus for fabric, _ in calls} == {(0, 3)}


def test_gpus_that_do_not_share_memory_run_no_kernels(gpus, monkeypatch):
    mesh = jax.sharding.Mesh(np.asarray(gpus(2)), ("expert",))
    monkeypatch.setattr(jax_compat, "platform_of_traced_mesh", lambda: "gpu")
    monkeypatch.setattr(symmetric_memory, "unavailable_reason", lambda _: "the pool is gone")
    assert not kernels(lowered(CASE_OF_TWO, None, forward, mesh))
    with pytest.raises(ValueError, match="it needs GPUs that share memory, and the pool is gone"):
        lowered(CASE_OF_TWO, "pallas", forward, mesh)
