"""Tests of the fabric over symmetric memory, as far as they need no GPU."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from support.kernels import needs_kernels
from support.meshes import cuda_mesh
from support.selection import quick

import jax_ep
from jax_ep.exchange.rows import Rows
from jax_ep.runtime.fabric import of_axis
from pallas_kernels.exchange import plan as plans
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import memory_map
from pallas_kernels.fabric.symmetric import Gpus

AXIS = "expert"


def lowered(function: Any, num_ranks: int, *arrays: jax.ShapeDtypeStruct) -> str:
    """Lowers `function` for CUDA; `arrays` have the shapes of one rank."""
    mesh, spec = cuda_mesh((num_ranks,), (AXIS,)), P(AXIS)
    sharded = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    arrays = tuple(
        jax.ShapeDtypeStruct((num_ranks * a.shape[0], *a.shape[1:]), a.dtype) for a in arrays
    )
    return jax.jit(sharded).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def arrays(num_tokens: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the shapes of x, topk_idx and weights."""
    return (
        jax.ShapeDtypeStruct((num_tokens, 512), jnp.bfloat16),
        jax.ShapeDtypeStruct((num_tokens, 4), jnp.int32),
        jax.ShapeDtypeStruct((num_tokens, 4), jnp.float32),
    )


def send(x: Any, topk_idx: Any, weights: Any, **options: Any) -> Any:
    return jax_ep.dispatch(
        x, topk_idx, num_experts=16, axis_name=AXIS, implementation="pallas", **options
    )


def dispatch(x: Any, topk_idx: Any, weights: Any) -> Any:
    return send(x, topk_idx, weights).tokens


def rank_dispatch(x: Any, topk_idx: Any, weights: Any) -> Any:
    sent = send(x, topk_idx, weights, layout="rank", topk_weights=weights)
    return sent.tokens, sent.topk_weights


def combine(x: Any, topk_idx: Any, weights: Any) -> Any:
    sent = send(x, topk_idx, weights)
    return jax_ep.combine(sent.tokens, sent.handle, weights, implementation="pallas")


def gradient(x: Any, topk_idx: Any, weights: Any) -> Any:
    """Computes gradients through a dispatch and a combine, which need four kernels."""

    def total(x: Any, weights: Any) -> Any:
        return jnp.sum(combine(x, topk_idx, weights).astype(jnp.float32) ** 2)

    return jax.grad(total, argnums=(0, 1))(x, weights)


# Maps each function to its number of kernels.
OPS = {dispatch: 1, rank_dispatch: 1, combine: 2, gradient: 4}
COLLECTIVES = [
    (jax_ep.all_reduce, "one_shot"),
    (jax_ep.all_reduce, "two_shot"),
    (jax_ep.all_gather, "direct"),
    (jax_ep.reduce_scatter, "direct"),
    (jax_ep.all_to_all, "direct"),
]


def assert_alone(text: str, num_kernels: int) -> None:
    """Asserts that each call is one kernel, and that neither XLA nor NVSHMEM connects the ranks."""
    calls = [line for line in text.splitlines() if "stablehlo.custom_call @mosaic_gpu" in line]
    assert len(calls) == num_kernels
    assert "uses_xla_collective_metadata = true" not in text
    assert "nvshmem" not in text.lower()
    for other in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"):
        assert f"stablehlo.{other}" not in text
    # A call's first operand is this rank's place, and no operand is aliased with a result.
    for call in calls:
        operands = call.rpartition(" : (")[2]
        assert operands.startswith("tensor<1xi32>"), call
        assert "output_operand_aliases = []" in call or "output_operand_aliases" not in call


@needs_kernels
@pytest.mark.parametrize("num_ranks", quick([1, 2, 8], 2))
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
def test_an_exchange_is_kernels_alone(op, num_ranks):
    assert_alone(lowered(op, num_ranks, *arrays(plans.FEW_TOKENS)), OPS[op])


@needs_kernels
@pytest.mark.parametrize(
    ("op", "algorithm"),
    [pytest.param(*each, id=f"{each[0].__name__}-{each[1]}") for each in COLLECTIVES],
)
def test_a_collective_is_a_kernel_alone(op, algorithm):
    run = functools.partial(op, axis_name=AXIS, algorithm=algorithm)
    assert_alone(lowered(run, 4, jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16)), 1)


@needs_kernels
@pytest.mark.parametrize("num_tokens", [plans.FEW_TOKENS, plans.FEW_TOKENS + 1])
def test_choices_are_counted_by_the_kernel(num_tokens):
    """The dispatch kernel must count the choices itself, instead of taking counts as an operand.

    So it has three operands: the rank's place in the mesh, x and topk_idx.
    """
    text = lowered(dispatch, 2, *arrays(num_tokens))
    (call,) = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    operands, _, _ = call.rpartition(" : (")[2].partition(") -> ")
    assert operands.count("tensor<") == 3


# ---------------------------------------------------------------------------- the layout of a heap


def test_the_parts_of_a_heap_follow_each_other():
    words = {
        "CALLS": memory_map.MAX_GPUS * memory_map.MAX_BLOCKS,
        "SIGNALS": memory_map.SIGNAL_KINDS * memory_map.MAX_BLOCKS * memory_map.MAX_GPUS,
        "ADDRESSES": memory_map.MAX_GPUS * memory_map.MAX_BUFFERS,
        "VALUES": 2 * memory_map.MAX_GPUS * memory_map.MAX_VALUES,
    }
    end = 8 * (memory_map.DELTA + memory_map.MAX_GPUS)
    assert max(memory_map.MAGIC, memory_map.POOL_START, memory_map.POOL_BYTES) < memory_map.DELTA
    assert end <= memory_map.HEADER_BYTES
    for name, size in words.items():
        start = getattr(memory_map, name)
        assert start >= end and start % 8 == 0, name
        end = start + memory_map.WORD64_BYTES * size
    assert memory_map.TILES >= end and memory_map.TILES % 128 == 0
    for num_gpus in (1, 2, 8, memory_map.MAX_GPUS):
        assert memory_map.TILES < memory_map.heap_bytes(num_gpus) <= memory_map.STRIDE


def test_a_heap_is_of_zeros_up_to_the_tiles():
    """A heap must be zero up to its tile buffers, since counts of calls and signals begin at 0."""
    (offset, word, size), *_ = memory_map.contents(2)
    assert (offset, word) == (0, 0) and size >= memory_map.TILES


def test_tiles_are_polled_where_a_heap_is_empty():
    """The call counters must lie in the part of a heap that is filled with zeros at first.

    The tile buffers must be the rest of the heap, which is filled with the word of empty buffers.
    """
    for num_gpus in range(1, memory_map.MAX_LOW_LATENCY_GPUS + 1):
        _, (empty, word, size) = memory_map.contents(num_gpus)
        buffers = memory_map.TILES + 4 * memory_map.NUM_COUNTERS
        assert (empty, word) == (buffers, memory_map.EMPTY) and buffers % 128 == 0
        assert size == memory_map.TILE_BUFFER_BYTES * memory_map.num_tile_buffers(num_gpus)
        assert memory_map.heap_bytes(num_gpus) == empty + size
        buffers_of_pair = 2 * memory_map.MAX_WORKERS * memory_map.tiles_of_channel(num_gpus)
        assert memory_map.num_tile_buffers(num_gpus) == buffers_of_pair * memory_map.num_senders(
            num_gpus
        )
        assert memory_map.NUM_COUNTERS >= memory_map.MAX_WORKERS * num_gpus


def test_more_experts_than_values_are_refused():
    """A dispatch must be refused if it has more experts than a call can send values.

    A rank sends its number of choices of each expert to its peers, as one value per expert.
    """

    def reason(num_experts):
        return Rows(
            hidden=64, dtype=jnp.bfloat16, num_ranks=1, list_words=1, num_experts=num_experts
        ).unavailable_reason()

    assert reason(memory_map.MAX_VALUES) is None
    assert reason(memory_map.MAX_VALUES + 1) == "it supports at most 4096 experts, not 4097"


# ---------------------------------------------------------------------------- arguments of a kernel


def kernel(
    like: jax.Array, *, num_blocks: int = 1, num_buffers: int = 1, reached: int = 0
) -> list[jax.Array]:
    """Runs a kernel in which every rank reads operand number `reached` of rank 0.

    `like` is passed as every operand. The kernel declares that peers reach the first `num_buffers`
    operands. If `reached` is not among them, the fabric must raise an error.
    """
    count = max(num_buffers, reached + 1)

    def body(*refs: Any) -> None:
        fabric.connect()
        source, out = refs[reached], refs[-1]
        out[...] = fb.load(fabric, fabric.peer(source, 0), 1)

    fabric = of_axis((AXIS,), like)
    return fb.kernel(
        fabric,
        body,
        name="ep_try",
        num_blocks=num_blocks,
        num_warpgroups=1,
        out_type=[jax.ShapeDtypeStruct(like.shape, like.dtype)],
        scratch_types={},
        shared=tuple(range(num_buffers)),
    )(*[like] * count)


LIKE = jax.ShapeDtypeStruct((128,), jnp.int32)


@needs_kernels
def test_a_kernel_may_have_as_much_as_there_is():
    sizes = dict(num_blocks=memory_map.MAX_BLOCKS, num_buffers=memory_map.MAX_BUFFERS)
    text = lowered(functools.partial(kernel, **sizes), memory_map.MAX_GPUS, LIKE)
    assert "ep_try" in text and "uses_xla_collective_metadata = true" not in text


@needs_kernels
@pytest.mark.parametrize(
    ("num_ranks", "options", "message"),
    [
        (
            2,
            dict(num_blocks=memory_map.MAX_BLOCKS + 1),
            "ep_try .* 2048 thread blocks, but has 2049",
        ),
        (
            2,
            dict(num_buffers=memory_map.MAX_BUFFERS + 1),
            "ep_try .* 4 buffers .* but has 5 buffers and 2 ranks",
        ),
        (memory_map.MAX_GPUS + 1, {}, "ep_try .* 16 ranks, but has 1 buffers and 17 ranks"),
        (2, dict(reached=1), r"try: peers cannot access .*\(128,\) and dtype int32.*`shared`"),
    ],
    ids=["blocks", "buffers", "ranks", "peer"],
)
def test_a_kernel_that_asks_for_too_much_is_refused(num_ranks, options, message):
    with pytest.raises(ValueError, match=message):
        lowered(functools.partial(kernel, **options), num_ranks, LIKE)


def test_ranks_of_several_axes_are_so_many():
    assert Gpus(((4, 2), (1, 4)), tuple(range(8))).num_ranks == math.prod((2, 4))
    assert Gpus((), (0,)).num_ranks == 1
