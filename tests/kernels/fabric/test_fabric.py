"""Tests of ranks and their rendezvous; on GPUs, of the exchange kernels with ranks out of step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.collectives import ranks_here
from support.contract import Case as ContractCase
from support.contract import assert_bitwise_equal, routing, small_integers, small_weights
from support.kernels import needs_kernels
from support.meshes import cuda_mesh, expert_mesh
from support.processes import output_of_a_failure

import jax_ep
from jax_ep.exchange import xla as xla_exchange
from jax_ep.exchange.interface import Config
from jax_ep.exchange.routes import RankRoutes
from jax_ep.runtime import availability
from jax_ep.runtime.fabric import of_axis
from pallas_kernels.exchange import combine as combine_kernel
from pallas_kernels.exchange import combine_grad as combine_grad_kernel
from pallas_kernels.exchange import dispatch as dispatch_kernel
from pallas_kernels.exchange import rank_dispatch as rank_dispatch_kernel
from pallas_kernels.exchange.plan import Plan
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import mosaic
from pallas_kernels.fabric.symmetric import Gpus
from pallas_kernels.formats import FLOAT8_ROWS

NUM_DEVICES = len(jax.devices())
needs_gpus = pytest.mark.skipif(
    availability.unavailable_reason() is not None or NUM_DEVICES < 2,
    reason=f"{availability.unavailable_reason() or 'there is one GPU'}",
)

KINDS = ("expert", "rank", "float8")
LONGEST_DELAY_NS = 200_000
NUM_DELAY_POINTS = 4


def test_shapes_of_buffers():
    assert Gpus(((1, 4),), (0, 1, 2, 3)).shape((2, 3)) == (2, 3)


@needs_kernels
def test_what_processes_check_compares_with_the_reference():
    """The comparison with the reference in processes_check.py must pass with the default exchange.

    pytest does not run that program; this test shows that the comparison itself is right.
    """
    path = Path(__file__).with_name("processes_check.py")
    runpy.run_path(str(path))["check_contract"](expert_mesh(2), None)


# --------------------------------------------------------- the programs that the tests on GPUs run


@dataclasses.dataclass(frozen=True)
class Work:
    """One of the exchange programs that tests on GPUs run: its sizes and operands.

    `by_kernels` computes its results by the kernels, and `by_xla` by XLA, to compare the two.
    """

    num_ranks: int
    top_k: int = 4
    # The kind of program: "expert", "rank" or "float8".
    kind: str = "expert"
    num_tokens: int = 67
    hidden: int = 512
    dtype: str = "bfloat16"
    alignment: int = 2
    plan: Plan = Plan(16, 4, 2, step_tokens=2, receive_steps=3)

    def __str__(self) -> str:
        return f"{self.kind}-N{self.num_ranks}-K{self.top_k}"

    @property
    def num_experts(self) -> int:
        return 4 * self.num_ranks

    @property
    def capacity(self) -> int:
        # The capacity is less than the choices that a rank may get, so that some are dropped.
        return 3 * self.num_tokens * self.top_k // 4

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the program's results."""
        if self.kind == "expert":
            combines = "combine", "combine without weights", "dy", "dweights"
            return "dispatch", "dispatch_like", *combines
        if self.kind == "rank":
            return "tokens", "local_topk_idx", "topk_weights", "combine"
        return "tokens", "scales", "dispatch_like", "its scales", "by rank", "scales by rank"

    @property
    def num_kernels(self) -> int:
        return {"expert": 5, "rank": 2, "float8": 3}[self.kind]

    def inputs(self) -> tuple[np.ndarray, ...]:
        """Draws the operands of all ranks, joined along axis 0.

        They are x [N * T, H], topk_idx and weights [N * T, K], and y [N * R, H], where R is the
        capacity. For the kind "rank", y is [N * N * T, H].
        """
        rng = np.random.default_rng(self.num_ranks)
        sizes = (self.num_ranks, self.num_tokens, self.hidden, self.top_k, self.num_experts)
        idx = routing("masked", ContractCase(*sizes), rng)
        x = rng.standard_normal((*idx.shape[:2], self.hidden)).astype(jnp.dtype(self.dtype))
        rows = self.num_ranks * self.num_tokens if self.kind == "rank" else self.capacity
        y_shape = (self.num_ranks * rows, self.hidden)
        return (
            x.reshape(-1, self.hidden),
            idx.reshape(-1, self.top_k),
            small_weights(rng, (idx.size // self.top_k, self.top_k), np.float32),
            small_integers(rng, y_shape, jnp.dtype(self.dtype)),
        )

    def by_kernels(self, fabric: fb.Fabric, x: Any, topk_idx: Any, weights: Any, y: Any) -> Any:
        """Runs the kernels of this program's kind on one rank; returns the results of `names`.

        Kind "expert" runs a dispatch, a dispatch_like along the same routes, two combines and the
        gradient of a combine. "rank" runs a rank-major dispatch and combine. "float8" runs both
        dispatches and a dispatch_like with float8 rows.
        """
        num_experts = self.num_experts
        common: dict[str, Any] = dict(fabric=fabric, plan=self.plan)
        by_expert = dict(common, capacity=self.capacity, expert_alignment=self.alignment)
        by_rank = dict(common, num_experts=num_experts)
        new = dict(by_expert, num_experts=num_experts)

        if self.kind == "rank":
            (tokens,), *sent = rank_dispatch_kernel.rank_dispatch(x, topk_idx, weights, **by_rank)
            out = combine_kernel.combine(y, None, topk_idx, sent[0], by_rank=True, **by_rank)
            return tokens, *sent, out

        if self.kind == "float8":
            by_expert["wire"] = by_rank["wire"] = FLOAT8_ROWS
            new["wire"] = FLOAT8_ROWS
            sent, rows, all_counts, *_ = dispatch_kernel.dispatch(x, topk_idx, **new)
            again = dispatch_kernel.dispatch_like(-x, rows, all_counts, **by_expert)
            ranked, *_ = rank_dispatch_kernel.rank_dispatch(x, topk_idx, None, **by_rank)
            return *sent, *again, *ranked

        (tokens,), rows, all_counts, *_ = dispatch_kernel.dispatch(x, topk_idx, **new)
        (again,) = dispatch_kernel.dispatch_like(-x, rows, all_counts, **by_expert)
        out = combine_kernel.combine(y, weights, topk_idx, rows, **by_rank)
        plain = combine_kernel.combine(y, None, topk_idx, rows, **by_rank)
        grads = combine_grad_kernel.combine_grad(
            whole(x), weights, y, topk_idx, rows, all_counts,
            expert_alignment=self.alignment, **common,
        )  # fmt: skip
        return tokens, again, out, plain, *grads

    def by_xla(self, x: Any, topk_idx: Any, weights: Any, y: Any, *quantized: Any) -> Any:
        """Computes by XLA what `by_kernels` does.

        `quantized` is x in float8 and its scales, quantized by the kernels, because XLA's division
        rounds differently on GPUs.
        """
        axis: dict[str, Any] = dict(axis_name=("expert",), num_experts=self.num_experts)
        by_rank = Config(**axis, layout="rank")
        by_expert = Config(**axis, capacity=self.capacity, expert_alignment=self.alignment)
        _, route, _ = xla_exchange.dispatch(x, topk_idx, by_expert)

        def dispatch(x: Any) -> Any:
            return xla_exchange.dispatch_like(x, route, by_expert)[0]

        def dispatch_by_rank(x: Any, weights: Any = None) -> Any:
            (tokens,), ranks, sent = xla_exchange.rank_dispatch(x, topk_idx, weights, by_rank)
            return tokens.reshape(-1, tokens.shape[-1]), ranks.local_topk_idx, sent

        if self.kind == "rank":
            sent = dispatch_by_rank(x, weights)
            sums = y.reshape(self.num_ranks, self.num_tokens, self.hidden)
            ranks = RankRoutes(topk_idx, sent[1])
            return *sent, xla_exchange.rank_combine(sums, ranks, by_rank)

        if self.kind == "float8":
            values, scales = quantized
            again = dispatch(-values), dispatch(scales)
            return (
                dispatch(values), dispatch(scales), *again,
                dispatch_by_rank(values)[0], dispatch_by_rank(scales)[0],
            )  # fmt: skip

        out = xla_exchange.combine(y, weights, route, by_expert)
        plain = xla_exchange.combine(y, None, route, by_expert)
        grads = xla_exchange.combine_grad(whole(x), weights, y, route, by_expert)
        return dispatch(x), dispatch(-x), out, plain, *grads

    def fabric(self, like: jax.Array, seed: int | None = None) -> Gpus:
        """Makes the fabric inside a shard_map; with a `seed`, ranks are delayed by random times."""
        if seed is None:
            return ranks_here(("expert",), like)
        rng = np.random.default_rng(seed)
        delays = rng.integers(0, LONGEST_DELAY_NS, (NUM_DELAY_POINTS, self.num_ranks))
        delays[rng.random(delays.shape) < 0.3] = 0
        return ranks_here(("expert",), like, tuple(map(tuple, delays.tolist())))

    def run(self, seed: int | None, *inputs: jax.Array) -> Any:
        return self.by_kernels(self.fabric(inputs[0], seed), *inputs)

    def differences(self, seed: int | None, repeats: int, *inputs: jax.Array) -> jax.Array:
        """Runs the program again and again; counts the result elements that ever differ.

        Each run has two independent calls of `by_kernels` with different tokens. Compares `repeats`
        runs with the first run, bit for bit. With a `seed`, ranks are delayed by random times.

        Returns:
            The count on this rank, [1] int32.
        """

        fabric = self.fabric(inputs[0], seed)

        def bits(array: jax.Array) -> jax.Array:
            return lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")

        def run(i: Any) -> list[jax.Array]:
            # The barrier keeps XLA from moving the kernels out of the loop.
            x, topk_idx, weights, y, _ = lax.optimization_barrier((*inputs, i))
            results = (
                self.by_kernels(fabric, x, topk_idx, weights, y),
                self.by_kernels(fabric, x[::-1], topk_idx[::-1], weights[::-1], -y),
            )
            return [bits(array) for array in jax.tree.leaves(results)]

        first = run(jnp.int32(-1))

        def count(i: jax.Array, different: jax.Array) -> jax.Array:
            changes = [jnp.sum(a != b, dtype=jnp.int32) for a, b in zip(run(i), first, strict=True)]
            return different + sum(changes)

        return lax.fori_loop(0, repeats, count, jnp.zeros((1,), jnp.int32))


def whole(x: jax.Array) -> jax.Array:
    """Rounds x to whole numbers, whose sums of products are exact in any order."""
    return jnp.round(x)


def quantized(x: np.ndarray) -> tuple[np.ndarray, ...]:
    return FLOAT8_ROWS.encode(x)


def on_all_ranks(function: Callable[..., Any], mesh: Any) -> Any:
    sharded = jax.shard_map(
        function, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False
    )
    return jax.jit(sharded)


@needs_kernels
@pytest.mark.parametrize(
    "work",
    [Work(2), Work(8, 3), Work(2, 3, "rank"), Work(8, 4, "rank"), Work(4, 4, "float8")],
    ids=str,
)
@pytest.mark.slow
def test_the_programs_for_gpus_lower(work):
    mesh = cuda_mesh((work.num_ranks,), ("expert",))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in work.inputs()]
    for function, times in (
        (functools.partial(work.run, 0), 1),
        (functools.partial(work.differences, 0, 1000), 4),
    ):
        traced = on_all_ranks(function, mesh).trace(*shapes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        calls = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
        assert len(calls) == times * work.num_kernels


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_the_programs_give_as_many_results_as_xla(kind):
    """`Work.by_kernels` and `Work.by_xla` must return equal shapes and dtypes.

    The results must also be as many as `Work.names`.
    """
    work = Work(2, kind=kind)
    mesh = cuda_mesh((2,), ("expert",))
    inputs = work.inputs()
    kernels = on_all_ranks(functools.partial(work.run, None), mesh)
    by_xla = on_all_ranks(work.by_xla, mesh)
    results = jax.eval_shape(kernels, *inputs)
    expected = jax.eval_shape(by_xla, *inputs, *quantized(inputs[0]))
    assert results == expected and len(results) == len(work.names)


@pytest.mark.parametrize(
    ("sizes", "names"),
    [((8,), "a"), ((2, 4), "ab"), ((2, 4), "ba"), ((2, 4), "a"), ((2, 2, 2), "ca")],
)
@pytest.mark.parametrize("gpus", [tuple(range(8)), (3, 1, 4, 15, 9, 2, 6, 5)], ids=str)
def test_a_gpu_knows_its_rank_and_its_peers(sizes, names, gpus, monkeypatch):
    """From its place in the mesh, a kernel must compute `lax.axis_index` and its peers' GPUs."""
    mesh = AbstractMesh(sizes, tuple("abc"[: len(sizes)]), axis_types=(AxisType.Auto,) * len(sizes))
    traced = []

    def trace(x: jax.Array) -> jax.Array:
        traced.append(of_axis(tuple(names), x))
        return x

    spec = P(mesh.axis_names)
    jax.eval_shape(jax.shard_map(trace, mesh=mesh, in_specs=spec, out_specs=spec), np.zeros(8))
    for name in ("inline", "reach_peers"):
        monkeypatch.setattr(mosaic, name, lambda *_: None)
    fabric, along = dataclasses.replace(traced[0], gpus=gpus), [mesh.shape[n] for n in names]
    assert fabric.num_ranks == np.prod(along)
    for number in range(8):
        place = dict(zip(mesh.axis_names, np.unravel_index(number, sizes), strict=True))
        operands = [jnp.full((1,), number, jnp.int32)]
        fabric.enter(operands, [], name="", num_blocks=1, reads=False, fabric_table=None)
        assert fabric.rank() == np.ravel_multi_index([place[name] for name in names], along)
        assert fabric._call.here == gpus[number]
        for rank, gpu in enumerate(fabric._call.peers):
            there = place | dict(zip(names, np.unravel_index(rank, along), strict=True))
            assert gpu == gpus[np.ravel_multi_index(list(there.values()), sizes)]


@needs_kernels
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_wait_that_gives_up_names_op_rank_and_peer(num_ranks):
    work = Work(num_ranks)
    mesh = cuda_mesh((num_ranks,), ("expert",))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in work.inputs()]
    program = on_all_ranks(functools.partial(work.run, None), mesh)
    text = program.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    for op in ("dispatch", "combine"):
        message = f"jax_ep: {op}: rank %d waited over 20 s for rank %d (block %d); giving up."
        assert message in text


# ------------------------------------------------------------------------------------ tests on GPUs


def gpu_counts() -> list[int]:
    return [n for n in (2, 4, 8) if n <= NUM_DEVICES]


@needs_gpus
@pytest.mark.parametrize("num_ranks", gpu_counts())
@pytest.mark.parametrize("top_k", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_out_of_step_change_nothing(kind, num_ranks, top_k):
    work = Work(num_ranks, top_k, kind)
    mesh = Mesh(np.asarray(jax.devices()[:num_ranks]), ("expert",))
    inputs = work.inputs()
    expected = jax.device_get(on_all_ranks(work.by_xla, mesh)(*inputs, *quantized(inputs[0])))
    # The ranks' delays are constants of a program, so each seed needs another program.
    for seed in (None, 0, 1):
        program = on_all_ranks(functools.partial(work.run, seed), mesh)
        results = jax.device_get(program(*inputs))
        for name, got, want in zip(work.names, results, expected, strict=True):
            assert_bitwise_equal(got, want, f"{name}, seed {seed}")


@needs_gpus
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("seed", "repeats"), [(None, 1000), (7, 1000)])
def test_a_thousand_repeats_are_alike(kind, seed, repeats):
    work = Work(max(gpu_counts()), kind=kind)
    mesh = Mesh(np.asarray(jax.devices()[: work.num_ranks]), ("expert",))
    program = on_all_ranks(functools.partial(work.differences, seed, repeats), mesh)
    different = np.asarray(program(*work.inputs()))
    np.testing.assert_array_equal(different, np.zeros(work.num_ranks))


LATE = """
import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

from jax_ep.runtime.fabric import of_axis
from test_fabric import Work, on_all_ranks

LATE_RANK, DELAY_NS = 1, 2_000_000_000


def run(*inputs):
    fabric = of_axis(("expert",), inputs[0])
    delays = tuple(DELAY_NS * (rank == LATE_RANK) for rank in range(fabric.num_ranks))
    return work.by_kernels(dataclasses.replace(fabric, delays_ns=(delays,)), *inputs)


work = Work(2)
program = on_all_ranks(run, Mesh(np.asarray(jax.devices()[:2]), ("expert",)))
jax.block_until_ready(program(*work.inputs()))
"""


@needs_gpus
def test_a_rank_that_never_comes_ends_the_program():
    """A rank that never comes must end the program: a message says who waits for whom."""
    output = output_of_a_failure(LATE, __file__, JAX_EP_TIMEOUT_SECONDS="0.25")
    # The late rank then waits for the one that gave up; which of them prints first is up to CUDA.
    said = re.search(
        r"jax_ep: dispatch: rank (\d) waited over 0.25 s for rank (\d) \(block ", output
    )
    assert said is not None and {*said.groups()} == {"0", "1"}, output


def meshes() -> dict[str, Callable[[], tuple[Mesh, str | tuple[str, ...]]]]:
    """Returns unusual meshes by name, each as a function that makes (mesh, the experts' axes).

    They have some of the machine's GPUs, several axes, or the GPUs in another order.
    """
    devices, half = np.asarray(jax.devices()), NUM_DEVICES // 2
    two_axes = devices[: 2 * half].reshape(2, half)
    return {
        "subset": lambda: (Mesh(devices[-half:], ("expert",)), "expert"),
        "one_of_two": lambda: (Mesh(devices[1::2][::-1], ("expert",)), "expert"),
        "data_expert": lambda: (Mesh(two_axes, ("data", "expert")), "expert"),
        "expert_data": lambda: (Mesh(two_axes, ("expert", "data")), "expert"),
        "both": lambda: (Mesh(two_axes, ("a", "b")), ("a", "b")),
        "both_swapped": lambda: (Mesh(two_axes, ("a", "b")), ("b", "a")),
        "reversed": lambda: (Mesh(devices[::-1], ("expert",)), "expert"),
        "shuffled": lambda: (Mesh(two_axes.T, ("data", "expert")), ("expert", "data")),
        "abstract": lambda: (Mesh(devices, ("expert",)), "expert"),
    }


@needs_gpus
@pytest.mark.parametrize("kind", meshes())
def test_any_mesh_of_one_host(kind):
    """The kernels must give what XLA gives, on any GPUs of a host in any order."""
    mesh, axis_name = meshes()[kind]()
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    num_ranks = int(np.prod([mesh.shape[name] for name in names]))
    work, num_shards = Work(num_ranks), mesh.size
    rng = np.random.default_rng(0)
    rows = num_shards * work.num_tokens
    x = small_integers(rng, (rows, work.hidden), jnp.dtype(work.dtype))
    topk_idx = rng.integers(-1, work.num_experts, (rows, work.top_k)).astype(np.int32)
    weights = small_weights(rng, topk_idx.shape, np.float32)

    def run(implementation: Any, mesh_is_set: bool = kind == "abstract") -> Any:
        def on_one_rank(x: jax.Array, topk_idx: jax.Array, weights: jax.Array) -> Any:
            sent = jax_ep.dispatch(
                x,
                topk_idx,
                num_experts=work.num_experts,
                axis_name=axis_name,
                capacity=work.capacity,
                implementation=implementation,
            )
            out = jax_ep.combine(sent.tokens, sent.handle, weights, implementation=implementation)
            # This is XLA's own collective between the same ranks.
            total = jax.lax.psum(out, axis_name)
            return sent.tokens, out, total + jnp.zeros_like(out)

        spec = P(mesh.axis_names)
        abstract = mesh.abstract_mesh if kind == "abstract" else mesh
        sharded = jax.shard_map(on_one_rank, mesh=abstract, in_specs=spec, out_specs=spec)
        arrays = jax.device_put((x, topk_idx, weights), NamedSharding(mesh, spec))
        with jax.set_mesh(mesh) if mesh_is_set else contextlib.nullcontext():
            return jax.device_get(jax.jit(sharded)(*arrays))

    expected = run("xla")
    if kind == "abstract":
        with pytest.raises(ValueError, match="was given an abstract mesh; use jax.set_mesh"):
            run("pallas", mesh_is_set=False)
    for name, got, want in zip(
        ("dispatch", "combine", "psum"), run("pallas"), expected, strict=True
    ):
        assert_bitwise_equal(got, want, name)
