"""Tests of the two-level exchange, on devices that pass for hosts, and on several processes.

Its results are compared with `jax_ep.reference`, or bit for bit with "xla".
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from support import meshes
from support.contract import (
    ROUTINGS,
    Case,
    after_the_wire,
    assert_bitwise_equal,
    assert_equal,
    assert_outputs,
    per_rank,
    program,
    routing,
    run_reference,
    send_by_reference,
    small_integers,
    small_weights,
    some_inputs,
)
from support.hlo import received_from_other_hosts
from support.kernels import lowered, needs_kernels
from support.processes import outputs_of_processes
from support.selection import quick
from support.simulator import simulate, simulated, simulated_ranks
from support.stacked import Problem

import jax_ep
from jax_ep import reference
from jax_ep.exchange import rail
from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.interface import Config
from jax_ep.exchange.rail import Rail
from jax_ep.exchange.two_level import TwoLevel
from pallas_kernels.exchange import combine as combine_kernel
from pallas_kernels.exchange import dispatch as dispatch_kernel
from pallas_kernels.exchange.plan import Plan, ReceiveBuffer

WIRE = jnp.float8_e4m3fn


def mesh_of(num_hosts: int, num_axes: int, monkeypatch: pytest.MonkeyPatch) -> Mesh:
    """Makes a mesh of eight ranks, of which each 8 / num_hosts neighbours pass for a host."""
    monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", str(8 // num_hosts))
    if num_axes == 1:
        return meshes.mesh((8,), ("expert",))
    return meshes.mesh((num_hosts, 8 // num_hosts), ("host", "expert"))


# ----------------------------------------------------------------- results against the reference

SMALL = Case(8, 7, 24, 3, 16, "bfloat16", 20, 4)
# A case is (case, hosts, mesh axes, host_capacity, routings, few_tokens). With `few_tokens`, hosts
# are taken in the order of the kernels, all at once if they have so few tokens.
SOME, TWO = ("uniform", "skewed", "masked", "one_rank"), ("uniform", "masked")
CASES = {
    "dropless": (Case(8, 4, 8, 2, 16, "float32", None, 8), 2, 1, None, ROUTINGS, None),
    "a rank a host": (Case(8, 5, 16, 2, 8, "float16"), 8, 2, None, ROUTINGS, None),
    "fair": (Case(8, 9, 16, 4, 24, "float32", 27, 8, "fair"), 4, 2, None, ROUTINGS, None),
    "four hosts' capacity": (SMALL, 4, 1, 2, SOME, None),
    "large capacity": (SMALL, 2, 2, 7, SOME, None),
    "kernels, two hosts": (SMALL, 2, 1, None, TWO, 0),
    "kernels, four hosts' capacity": (SMALL, 4, 1, 2, TWO, 0),
    "kernels, two hosts at once": (SMALL, 2, 1, None, TWO, 9),
}


def take_hosts_as_kernels_do(few_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def of_call(level: TwoLevel, config: Config, _: Any, topk_idx: Any, *__: Any, **___: Any):
        return Rail.of(level.num_hosts, config).of_tokens(topk_idx, True), xla_exchange

    monkeypatch.setattr(TwoLevel, "_select", of_call)
    monkeypatch.setattr(rail, "FEW_TOKENS", few_tokens)


@pytest.mark.parametrize(
    "case, num_hosts, num_axes, host_capacity, routings, few_tokens",
    quick(CASES, "four hosts' capacity", "kernels, two hosts"),
)
def test_everything_equals_the_reference(
    case, num_hosts, num_axes, host_capacity, routings, few_tokens, monkeypatch
):
    """Choices past the host capacity must be dropped and counted, as in the reference."""
    if few_tokens is not None:
        take_hosts_as_kernels_do(few_tokens, monkeypatch)
    mesh = mesh_of(num_hosts, num_axes, monkeypatch)
    rng = np.random.default_rng(0)
    # Bypass the cache of `program`, whose key does not include the patched functions.
    options = dict(check_vma=num_axes == 2, mesh=mesh, host_capacity=host_capacity)
    run = program.__wrapped__(case, "two_level", **options)
    limit = {} if host_capacity is None else dict(num_hosts=num_hosts, host_capacity=host_capacity)
    for kind in routings:
        inputs = some_inputs(case, kind, rng)
        expected = run_reference(case, inputs, **limit)
        fewer = np.any(expected.rows_needed < run_reference(case, inputs).rows_needed)
        assert fewer == (host_capacity is not None and host_capacity < case.num_tokens)
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            assert_outputs(run(inputs), expected, f"routing {kind!r}")


def test_a_combine_rounds_once_for_each_token_and_host(monkeypatch):
    """A combine must round the sum of a token's rows on one host once, from float32 to bfloat16."""
    num_hosts = 2
    mesh = mesh_of(num_hosts, 2, monkeypatch)
    case, rng = Case(8, 16, 32, 6, 16, "bfloat16", 400), np.random.default_rng(1)
    topk_idx = routing("uniform", case, rng)
    y = rng.integers(-255, 256, (8, 400, 32)).astype("bfloat16")
    weights = rng.integers(-63, 64, topk_idx.shape).astype(np.float32)

    def combined(topk_idx: Any, y: Any, weights: Any) -> Any:
        x = jnp.zeros((16, 32), y.dtype)
        sent = case.dispatch(x, topk_idx, "two_level", axis_name=mesh.axis_names)
        return jax_ep.combine(y, sent.handle, weights, implementation="two_level")

    actual = jax.jit(per_rank(combined, 8, mesh=mesh))(topk_idx, y, weights)
    x = np.zeros((8, 16, 32), y.dtype)
    routes = [sent.routes for sent in send_by_reference(case, x, topk_idx)]
    expected = reference.combine(list(y), routes, list(weights), num_hosts=num_hosts)
    assert_equal(actual, np.stack(expected))
    one_level = np.stack(reference.combine(list(y), routes, list(weights)))
    # Rounding once for all hosts gives other values, so the test can tell the two apart.
    assert np.any(np.asarray(actual) != one_level)


@pytest.mark.slow
def test_float8_on_the_wire(monkeypatch):
    """Dispatched rows must be quantized once, on the rank that sends them."""
    mesh = mesh_of(2, 2, monkeypatch)
    case, rng = Case(8, 6, 256, 3, 16, "bfloat16", 40), np.random.default_rng(2)
    topk_idx = routing("uniform", case, rng)
    x = rng.normal(size=(8, 6, 256)).astype("bfloat16")
    y = rng.integers(-15, 16, (8, 40, 256)).astype("bfloat16")

    def exchanged(x: Any, topk_idx: Any, y: Any) -> Any:
        options = dict(axis_name=mesh.axis_names, wire_dtype=WIRE)
        found = []
        for implementation in ("two_level", "xla"):
            sent = case.dispatch(x, topk_idx, implementation, **options)
            kept = case.dispatch(x, topk_idx, implementation, output="quantized", **options)
            found.append((sent.tokens, kept.tokens.values, kept.tokens.scales))
        out = jax_ep.combine(y, kept.handle, wire_dtype=WIRE, implementation="two_level")
        return found, out

    (two, one), out = jax.jit(per_rank(exchanged, 8, mesh=mesh))(x, topk_idx, y)
    for actual, expected, name in zip(two, one, ("tokens", "rows", "scales"), strict=True):
        assert_bitwise_equal(actual, expected, name)

    routes = [sent.routes for sent in send_by_reference(case, x, topk_idx)]
    total = np.zeros((8, 6, 256), np.float32)
    for host in range(2):
        here = [
            route._replace(rows=np.where(route.ranks // 4 == host, route.rows, -1))
            for route in routes
        ]
        sums = np.stack(reference.combine(list(y.astype(np.float32)), here))
        total += after_the_wire(sums, "xla")
    # Allow for a rounding: XLA may fuse the multiplication by the scale with the addition.
    np.testing.assert_allclose(
        np.asarray(out, np.float32), total, rtol=float(jnp.finfo(y.dtype).eps), atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts, num_axes, few_tokens", [(4, 2, None), (2, 1, 0), (2, 1, 9)])
def test_rank_major_is_that_of_one_level(num_hosts, num_axes, few_tokens, monkeypatch):
    if few_tokens is not None:
        take_hosts_as_kernels_do(few_tokens, monkeypatch)
    mesh = mesh_of(num_hosts, num_axes, monkeypatch)
    case, rng = Case(8, 5, 128, 3, 16, "bfloat16"), np.random.default_rng(3)
    topk_idx = routing("masked", case, rng)
    x = small_integers(rng, (8, 5, 128), case.dtype)
    weights = small_weights(rng, topk_idx.shape, "float32")
    y = small_integers(rng, (8, 8, 5, 128), case.dtype)

    def everything(x: Any, topk_idx: Any, weights: Any, y: Any, implementation: str) -> Any:
        def send(x: Any, weights: Any) -> Any:
            sent = jax_ep.dispatch(
                x, topk_idx, num_experts=16, axis_name=mesh.axis_names, layout="rank",
                topk_weights=weights, implementation=implementation,
            )  # fmt: skip
            return (sent.tokens, sent.topk_weights), sent

        def bring_back(y: Any, **options: Any) -> Any:
            return jax_ep.combine(y, sent.handle, implementation=implementation, **options)

        (tokens, sent_weights), pull, sent = jax.vjp(send, x, weights, has_aux=True)
        out, pull_y = jax.vjp(bring_back, y)
        return (
            tokens, sent.local_topk_idx, sent_weights, pull((y, sent_weights)), out, pull_y(x),
            bring_back(y, wire_dtype=WIRE),
        )  # fmt: skip

    def both(*arrays: Any) -> Any:
        return [everything(*arrays, name) for name in ("two_level", "xla")]

    two, one = jax.jit(per_rank(both, 8, num_axes == 2, mesh))(x, topk_idx, weights, y)
    *two, two_float8 = two
    *one, one_float8 = one
    for actual, expected in zip(jax.tree.leaves(two), jax.tree.leaves(one), strict=True):
        assert_equal(actual, expected)
    # "xla" quantizes the sums of each rank, "two_level" those of each host.
    np.testing.assert_allclose(
        np.asarray(two_float8, np.float32), np.asarray(one_float8, np.float32), atol=2
    )


# --------------------------------------------------------- bytes sent between hosts, and kernels


BYTES = {
    "four": (4, None, 3, 3.2),
    "a third": (4, 21, 0.98, 1.15),
}


@pytest.mark.parametrize("case", quick([*BYTES], "four"))
def test_tokens_cross_to_each_host_once(case, monkeypatch):
    """Dispatch and combine, compiled, must send each token between two hosts once."""
    num_hosts, host_capacity, least, most = BYTES[case]
    mesh = mesh_of(num_hosts, 3 - num_hosts // 2, monkeypatch)
    case = Case(8, 64, 1024, 8, 64, "bfloat16", 768)
    hosts = [rank * num_hosts // 8 for rank in range(8)]
    shapes = [
        jax.ShapeDtypeStruct((8, 64, 1024), "bfloat16"),
        jax.ShapeDtypeStruct((8, 64, 8), "int32"),
        jax.ShapeDtypeStruct((8, 64, 8), "float32"),
    ]

    def dispatch(x: Any, topk_idx: Any) -> Any:
        sent = case.dispatch(
            x, topk_idx, None, axis_name=mesh.axis_names, host_capacity=host_capacity
        )
        return sent.tokens, sent.handle

    send, back = (jax.jit(per_rank(f, 8, mesh=mesh)) for f in (dispatch, jax_ep.combine))
    operands = *jax.eval_shape(send, *shapes[:2]), shapes[2]
    for compiled in send.lower(*shapes[:2]).compile(), back.lower(*operands).compile():
        text, unit = compiled.as_text(), 64 * 1024 * 2
        assert least <= received_from_other_hosts(text, hosts) / unit <= most
        # Arrays of these shapes would have the tokens of all ranks.
        assert "[8,64,1024]" not in text and "[512,1024]" not in text
        turns = re.findall(r" = .* collective-permute(?:-start)?\(", text)
        assert len(turns) == num_hosts - 1


@pytest.mark.slow
def test_axes_in_another_order_than_the_mesh_has_them(monkeypatch):
    """Ranks must be numbered along `axis_name`, even if the mesh has its axes in another order."""
    in_order = mesh_of(4, 2, monkeypatch)
    mesh = Mesh(in_order.devices.T, ("expert", "host"))
    rng = np.random.default_rng(7)
    x = rng.normal(size=(8, 5, 8)).astype(np.float32)
    topk_idx = rng.integers(0, 8, (8, 5, 1)).astype(np.int32)

    def there_and_back(x: Any, topk_idx: Any) -> Any:
        sent = jax_ep.dispatch(x, topk_idx, num_experts=8, axis_name=("host", "expert"))
        return jax_ep.combine(sent.tokens, sent.handle)

    spec = jax.sharding.PartitionSpec(("host", "expert"))
    ranks = jax.shard_map(
        lambda *args: there_and_back(*(a[0] for a in args))[None],
        mesh=mesh, in_specs=spec, out_specs=spec,
    )  # fmt: skip
    assert_bitwise_equal(jax.jit(ranks)(x, topk_idx), x)


def test_one_host_is_one_level(monkeypatch):
    mesh = meshes.mesh((8,), ("expert",))
    case = Case(8, 4, 8, 2, 16)

    def text(implementation: Any) -> str:
        def tokens(x: Any, topk_idx: Any) -> Any:
            return case.dispatch(x, topk_idx, implementation).tokens

        arrays = np.zeros((8, 4, 8), np.float32), np.zeros((8, 4, 2), np.int32)
        return jax.jit(per_rank(tokens, 8, mesh=mesh)).lower(*arrays).as_text()

    monkeypatch.delenv("JAX_EP_DEVICES_PER_HOST", raising=False)
    assert text(None) == text("xla")
    with pytest.raises(ValueError, match='"two_level" cannot run here: all ranks .* on one host'):
        text("two_level")
    monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", "3")
    assert text(None) == text("xla")
    with pytest.raises(
        ValueError, match=r"hosts \[0, 0, 0, 1, 1, 1, 2, 2\], and .* equally many ranks\."
    ):
        text("two_level")
    monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", "none")
    with pytest.raises(ValueError, match="JAX_EP_DEVICES_PER_HOST must be a positive int"):
        text("two_level")


def test_no_mesh_is_one_rank():
    x, topk_idx = np.zeros((4, 8), np.float32), np.zeros((4, 2), np.int32)
    options = dict(num_experts=8, axis_name=(), implementation="two_level")
    with pytest.raises(ValueError, match='"two_level" cannot run here: there is no mesh'):
        jax.jit(lambda *args: jax_ep.dispatch(*args, **options).tokens).lower(x, topk_idx)


@needs_kernels
@pytest.mark.parametrize(
    "num_tokens, num_hosts, num_axes, host_capacity",
    quick([(64, 2, 1, None), (300, 2, 2, 20), (300, 4, 1, None)], (64, 2, 1, None)),
)
def test_kernels_run_inside_hosts(num_tokens, num_hosts, num_axes, host_capacity, monkeypatch):
    """For GPUs, one kernel call must handle few tokens of all hosts."""
    per_host = 8 // num_hosts
    monkeypatch.setenv("JAX_EP_DEVICES_PER_HOST", str(per_host))
    shape, names = ((8,), ("expert",))
    if num_axes == 2:
        shape, names = (num_hosts, per_host), ("host", "expert")
    mesh = meshes.cuda_mesh(shape, names)
    case = Case(8, num_tokens, 256, 4, 64, "bfloat16", 8 * num_tokens)

    def everything(x: Any, topk_idx: Any, weights: Any) -> Any:
        def layer(x: Any, weights: Any) -> Any:
            options = dict(axis_name=names, host_capacity=host_capacity, wire_dtype=WIRE)
            sent = case.dispatch(x, topk_idx, None, **options)
            return jnp.sum(jax_ep.combine(sent.tokens, sent.handle, weights))

        def ranks(x: Any, weights: Any) -> Any:
            sent = jax_ep.dispatch(
                x, topk_idx, num_experts=64, axis_name=names, layout="rank", topk_weights=weights
            )
            return jnp.sum(jax_ep.combine(sent.tokens, sent.handle))

        return [jax.grad(f, (0, 1))(x, weights) for f in (layer, ranks)]

    shapes = (
        jax.ShapeDtypeStruct((8, num_tokens, 256), "bfloat16"),
        jax.ShapeDtypeStruct((8, num_tokens, 4), "int32"),
        jax.ShapeDtypeStruct((8, num_tokens, 4), "float32"),
    )
    text = lowered(jax.jit(per_rank(everything, 8, mesh=mesh)), *shapes)
    calls = [line for line in text.splitlines() if "@mosaic_gpu" in line]
    turns = 1 if num_tokens == 64 else num_hosts
    expected = {
        "ep_dispatch_like": 2 * turns,
        "ep_combine": 2 * turns,
        "ep_rank_dispatch": 2 * turns,
    }
    for kernel, count in expected.items():
        found = sum(bool(re.search(rf"{kernel}(_mosaic|\b)", call)) for call in calls)
        assert found == count, kernel


@simulated
@pytest.mark.slow
@pytest.mark.parametrize("in_parts", [False, True])
def test_the_kernels_follow_the_routes_of_several_hosts(in_parts):
    """Kernels inside one of two hosts must give that host's part of the whole exchange."""
    host = 1
    problem = Problem(4, 5, 32, 3, 8, "masked", capacity=13, alignment=2)
    plan, fabric = Plan(2, 4, 2, step_tokens=2), simulated_ranks(2)
    ranks, experts = slice(2 * host, 2 * host + 2), slice(4 * host, 4 * host + 4)
    sources = [[host], [1 - host]] if in_parts else [[0, 1]]

    def on_rails(array: np.ndarray, source: Sequence[int]) -> np.ndarray:
        """Returns the tokens that the G ranks of a host get from the S hosts in `source`."""
        by_host = array.reshape(2, 2, *array.shape[1:])[np.asarray(source)].swapaxes(0, 1)
        return by_host.reshape(2, -1, *array.shape[2:])

    def routes(source: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        rows = np.stack([on_rails(rows, source) for rows in problem.rows[ranks]])
        counts = problem.counts[0][:, experts].reshape(2, 2, 4).sum(axis=0, dtype=np.int32)
        return rows, np.stack([counts] * 2)

    def run(kernel: Callable[..., Any], *arrays: Any, **more: Any) -> Any:
        into = more.pop("into", None)
        more |= {} if into is None else dict(into=into)
        options = dict(fabric=fabric, plan=plan, **more)
        return simulate(functools.partial(kernel, *map(jnp.asarray, arrays), **options))

    y, tokens = problem.y[ranks], None
    here = [
        sent.routes._replace(rows=np.where(sent.routes.ranks // 2 == host, sent.routes.rows, -1))
        for sent in problem.dispatched
    ]
    sums = np.stack(reference.combine(list(problem.y), here, list(problem.weights)))
    for source in sources:
        x, weights = (on_rails(a, source) for a in (problem.x, problem.weights))
        topk_idx = on_rails(problem.topk_idx, source) - experts.start
        rows, counts = routes(source)
        tokens = run(
            dispatch_kernel.dispatch_like, x, rows, counts, into=tokens,
            buffer=ReceiveBuffer(13, problem.alignment),
        )  # fmt: skip
        found = run(combine_kernel.combine, y, weights, topk_idx, rows, num_experts=4)
        assert_equal(found, on_rails(sums, source), "sums")
    assert_bitwise_equal(tokens[0], problem.tokens[ranks], "tokens")


# ----------------------------------------------------------------------------- several processes


# Each process passes for a host, with ranks along two mesh axes, and along one.
OF_A_HOST = """
import sys
import jax
import numpy as np
from jax.sharding import Mesh
from support import contract

num_hosts = int(sys.argv[3])
jax.distributed.initialize(sys.argv[1], num_hosts, int(sys.argv[2]))
devices = np.array(jax.devices())
case = contract.Case(devices.size, 6, 24, 3, 2 * devices.size, "bfloat16", 20)
hosts = Mesh(devices.reshape(num_hosts, -1), ("host", "expert"))
for mesh in (hosts, Mesh(devices, ("expert",))):
    contract.check_ranks_here(case, mesh, contract.ROUTINGS)
"""


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the processes would share the GPUs")
@pytest.mark.parametrize("num_processes, devices", [(2, 4), (4, 2)])
@pytest.mark.slow
def test_between_processes(num_processes, devices):
    outputs_of_processes(OF_A_HOST, str(num_processes), count=num_processes, devices=devices)
