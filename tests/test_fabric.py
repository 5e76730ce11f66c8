"""Ranks and their rendezvous; on GPUs, the exchange kernels with ranks out of step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import Case as ContractCase
from contract import assert_bitwise_equal, routing, small_integers, small_weights
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import routes, xla_exchange
from jax_ep.primitives import pallas_unavailable_reason
from jax_ep.routes import Routes
from pallas_kernels import combine as combine_kernel
from pallas_kernels import combine_grad as combine_grad_kernel
from pallas_kernels import dispatch as dispatch_kernel
from pallas_kernels import fabric as fb
from pallas_kernels.plan import Plan

NUM_DEVICES = len(jax.devices())
needs_gpus = pytest.mark.skipif(
    pallas_unavailable_reason() is not None or NUM_DEVICES < 2,
    reason=f"{pallas_unavailable_reason() or 'there is one GPU'}",
)

TIMEOUT_SECONDS = 20.0
LONGEST_DELAY_NS = 200_000
NUM_STAGES = 4


@pytest.mark.parametrize("sizes", [(1,), (8,), (2, 4), (4, 1, 2)])
def test_ranks_are_numbered_as_the_axes_name_them(sizes):
    names = tuple("abc"[: len(sizes)])
    fabric = fb.Mesh(names, sizes)
    assert fabric.num_ranks == np.prod(sizes)
    for rank in range(fabric.num_ranks):
        coordinates = {name: int(i) for name, i in fabric._device_id(rank).items()}
        expected = np.unravel_index(rank, sizes)
        assert coordinates == dict(zip(names, map(int, expected), strict=True))


def test_shapes_of_buffers():
    assert fb.Mesh(("a",), (4,)).shape((2, 3)) == (2, 3)
    assert fb.Stacked(4).shape((2, 3)) == (4, 2, 3)


# ------------------------------------------------------------------------------------ the programs


@dataclasses.dataclass(frozen=True)
class Work:
    """What every rank exchanges in one program."""

    num_ranks: int
    top_k: int = 4
    num_tokens: int = 67
    hidden: int = 256
    dtype: str = "bfloat16"
    alignment: int = 2
    plan: Plan = Plan(16, 4, 2, step_tokens=2, mailbox_steps=2)

    def __str__(self) -> str:
        return f"N{self.num_ranks}-K{self.top_k}"

    @property
    def num_experts(self) -> int:
        return 4 * self.num_ranks

    @property
    def capacity(self) -> int:  # some rows are dropped
        return 3 * self.num_tokens * self.top_k // 4

    def inputs(self) -> tuple[np.ndarray, ...]:
        """x [N T, H], topk_idx and weights [N T, K], y [N R, H]."""
        rng = np.random.default_rng(self.num_ranks)
        sizes = (self.num_ranks, self.num_tokens, self.hidden, self.top_k, self.num_experts)
        idx = routing("masked", ContractCase(*sizes), rng)
        x = rng.standard_normal((*idx.shape[:2], self.hidden)).astype(jnp.dtype(self.dtype))
        y_shape = (self.num_ranks * self.capacity, self.hidden)
        return (
            x.reshape(-1, self.hidden),
            idx.reshape(-1, self.top_k),
            small_weights(rng, (idx.size // self.top_k, self.top_k), np.float32),
            small_integers(rng, y_shape, jnp.dtype(self.dtype)),
        )

    def by_kernels(self, fabric: fb.Mesh, x: Any, topk_idx: Any, weights: Any, y: Any) -> Any:
        """A dispatch, another payload along its routes, two combines, and a gradient."""
        plan, num_experts = self.plan, self.num_experts
        counts = routes.count_experts(topk_idx, num_experts)
        common: dict[str, Any] = dict(fabric=fabric, plan=plan)
        options = dict(common, capacity=self.capacity, expert_alignment=self.alignment)
        tokens, rows, all_counts, *_ = dispatch_kernel.dispatch(x, topk_idx, counts, **options)
        again = dispatch_kernel.dispatch_like(-x, rows, all_counts, **options)
        dy, dweights = combine_grad_kernel.combine_grad(
            whole(x), weights, y, topk_idx, rows, all_counts, expert_alignment=self.alignment,
            **common,
        )  # fmt: skip
        common["num_experts"] = num_experts
        out = combine_kernel.combine(y, weights, topk_idx, rows, **common)
        plain = combine_kernel.combine(y, None, topk_idx, rows, **common)
        return tokens, again, out, plain, dy, dweights

    def by_xla(self, x: Any, topk_idx: Any, weights: Any, y: Any) -> Any:
        axis: dict[str, Any] = dict(axis_name=("expert",))
        options = dict(axis, capacity=self.capacity, expert_alignment=self.alignment)
        (tokens,), rows, counts, _ = xla_exchange.dispatch(
            x, topk_idx, num_experts=self.num_experts, **options
        )
        route = Routes(topk_idx, rows, counts)
        (again,) = xla_exchange.dispatch_like(-x, route, **options)
        out = xla_exchange.combine(y, weights, route, **axis)
        plain = xla_exchange.combine(y, None, route, **axis)
        grads = xla_exchange.combine_grad(
            whole(x), weights, y, route, expert_alignment=self.alignment, **axis
        )
        return tokens, again, out, plain, *grads

    def fabric(self, seed: int | None = None) -> fb.Mesh:
        """One whose ranks are late by random times, unless there is no seed."""
        fabric = fb.Mesh(("expert",), (self.num_ranks,), TIMEOUT_SECONDS)
        if seed is None:
            return fabric
        rng = np.random.default_rng(seed)
        delays = rng.integers(0, LONGEST_DELAY_NS, (NUM_STAGES, self.num_ranks))
        delays[rng.random(delays.shape) < 0.3] = 0
        return dataclasses.replace(fabric, delays_ns=tuple(map(tuple, delays.tolist())))

    def differences(self, fabric: fb.Mesh, repeats: int, *inputs: jax.Array) -> jax.Array:
        """[1]: elements that differ, in `repeats` runs, from the first run.

        Every run has two dispatches in flight, of different tokens, and all that follows them.
        """

        def bits(array: jax.Array) -> jax.Array:
            return lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")

        def run(i: Any) -> list[jax.Array]:
            # The barrier keeps XLA from taking the kernels out of the loop.
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
    """Rounded, so that sums of products with small integers are exact in any order."""
    return jnp.round(x)


def on_all_ranks(function: Callable[..., Any], mesh: Any) -> Any:
    sharded = jax.shard_map(
        function, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False
    )
    return jax.jit(sharded)


@pytest.mark.parametrize("work", [Work(2), Work(8, top_k=3)], ids=str)
def test_the_programs_for_gpus_lower(work):
    mesh = AbstractMesh((work.num_ranks,), ("expert",), axis_types=(AxisType.Auto,))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in work.inputs()]
    fabric = work.fabric(seed=0)
    for function, num_kernels in (
        (lambda *inputs: work.by_kernels(fabric, *inputs), 5),
        (lambda *inputs: work.differences(fabric, 1000, *inputs), 20),
    ):
        traced = on_all_ranks(function, mesh).trace(*shapes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        calls = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
        assert len(calls) == num_kernels


# ------------------------------------------------------------------------------------------ on GPUs


def gpu_counts() -> list[int]:
    return [n for n in (2, 4, 8) if n <= NUM_DEVICES]


@needs_gpus
@pytest.mark.parametrize("num_ranks", gpu_counts())
@pytest.mark.parametrize("top_k", [3, 4])
def test_ranks_out_of_step_change_nothing(num_ranks, top_k):
    work = Work(num_ranks, top_k)
    mesh = Mesh(np.asarray(jax.devices()[:num_ranks]), ("expert",))
    inputs = work.inputs()
    expected = jax.device_get(on_all_ranks(work.by_xla, mesh)(*inputs))
    for seed in (None, 0, 1, 2, 3):
        fabric = work.fabric(seed)
        program = on_all_ranks(lambda *args, fabric=fabric: work.by_kernels(fabric, *args), mesh)
        results = jax.device_get(program(*inputs))
        names = (
            "dispatch",
            "dispatch_like",
            "combine",
            "combine without weights",
            "dy",
            "dweights",
        )
        for name, got, want in zip(names, results, expected, strict=True):
            assert_bitwise_equal(got, want, f"{name}, seed {seed}")


@needs_gpus
@pytest.mark.parametrize(("seed", "repeats"), [(None, 1000), (7, 1000)])
def test_a_thousand_repeats_are_alike(seed, repeats):
    work = Work(max(gpu_counts()))
    mesh = Mesh(np.asarray(jax.devices()[: work.num_ranks]), ("expert",))
    fabric = work.fabric(seed)
    program = on_all_ranks(lambda *inputs: work.differences(fabric, repeats, *inputs), mesh)
    different = np.asarray(program(*work.inputs()))
    np.testing.assert_array_equal(different, np.zeros(work.num_ranks))


def meshes() -> dict[str, Callable[[], tuple[Mesh, str | tuple[str, ...]]]]:
    """Meshes that are not simply all devices in order, and the axis of the experts."""
    devices, half = np.asarray(jax.devices()), NUM_DEVICES // 2
    two_axes = devices[: 2 * half].reshape(2, half)
    return {
        "subset": lambda: (Mesh(devices[-half:], ("expert",)), "expert"),
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
    """The kernels give what XLA gives; where devices are not the first ones, they refuse."""
    mesh, axis_name = meshes()[kind]()
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    num_ranks = int(np.prod([mesh.shape[name] for name in names]))
    work, num_shards = Work(num_ranks), mesh.size
    rng = np.random.default_rng(0)
    rows = num_shards * work.num_tokens
    x = small_integers(rng, (rows, work.hidden), jnp.dtype(work.dtype))
    topk_idx = rng.integers(-1, work.num_experts, (rows, work.top_k)).astype(np.int32)
    weights = small_weights(rng, topk_idx.shape, np.float32)

    def run(implementation: Any) -> Any:
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
            total = jax.lax.psum(out, axis_name)  # XLA's own, between the same ranks
            return sent.tokens, out, total + jnp.zeros_like(out)

        spec = P(mesh.axis_names)
        abstract = mesh.abstract_mesh if kind == "abstract" else mesh
        sharded = jax.shard_map(on_one_rank, mesh=abstract, in_specs=spec, out_specs=spec)
        arrays = jax.device_put((x, topk_idx, weights), NamedSharding(mesh, spec))
        return jax.device_get(jax.jit(sharded)(*arrays))

    expected = run("xla")
    if kind == "subset":
        with pytest.raises(ValueError, match="devices"):
            run("pallas")
        results = run(None)
    else:
        results = run("pallas")
    for name, got, want in zip(("dispatch", "combine", "psum"), results, expected, strict=True):
        assert_bitwise_equal(got, want, name)
