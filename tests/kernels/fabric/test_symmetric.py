"""Tests of the fabric over symmetric memory, as far as they need no GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.kernels import lowered, needs_kernels, on_ranks
from support.meshes import cuda_mesh

from jax_ep.exchange.interface import Rows
from jax_ep.runtime.fabric import of_axis
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import memory_map

AXIS = "expert"


def lowered_on_ranks(function: Any, num_ranks: int, *arrays: jax.ShapeDtypeStruct) -> str:
    """Lowers `function` for CUDA; `arrays` have the shapes of one rank."""
    of_all = [jax.ShapeDtypeStruct((num_ranks * a.shape[0], *a.shape[1:]), a.dtype) for a in arrays]
    return lowered(on_ranks(function, cuda_mesh((num_ranks,), (AXIS,))), *of_all)


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


def test_more_experts_than_values_are_refused():
    """A dispatch must be refused if it has more experts than a call can send values."""
    most, sizes = memory_map.MAX_VALUES, dict(hidden=64, dtype=jnp.bfloat16, list_words=1)
    assert Rows(num_ranks=1, num_experts=most, **sizes).unavailable_reason() is None
    reason = Rows(num_ranks=1, num_experts=most + 1, **sizes).unavailable_reason()
    assert reason == "it supports at most 4096 experts, not 4097"


# ---------------------------------------------------------------------------- arguments of a kernel


def kernel(
    like: jax.Array, *, num_blocks: int = 1, num_buffers: int = 1, reached: int = 0
) -> list[jax.Array]:
    """Runs a kernel in which every rank reads operand number `reached` of rank 0."""
    count = max(num_buffers, reached + 1)

    def body(*refs: Any) -> None:
        fabric.connect()
        source, out = refs[reached], refs[-1]
        out[...] = fb.load(fabric.peer(source, 0), 1)

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
    text = lowered_on_ranks(functools.partial(kernel, **sizes), memory_map.MAX_GPUS, LIKE)
    assert "ep_try" in text and "uses_xla_collective_metadata = true" not in text


@needs_kernels
@pytest.mark.parametrize(
    ("num_ranks", "options", "kind", "message"),
    [
        (2, dict(num_blocks=memory_map.MAX_BLOCKS + 1), AssertionError, "'ep_try', 2049"),
        (2, dict(num_buffers=memory_map.MAX_BUFFERS + 1), AssertionError, "'ep_try', 5"),
        (memory_map.MAX_GPUS + 1, {}, AssertionError, "'ep_try', 17"),
        (2, dict(reached=1), ValueError, r"try: peers cannot .*\(128,\) and dtype int32.*`shared`"),
    ],
    ids=["blocks", "buffers", "ranks", "peer"],
)
def test_a_kernel_that_asks_for_too_much_is_refused(num_ranks, options, kind, message):
    with pytest.raises(kind, match=message):
        lowered_on_ranks(functools.partial(kernel, **options), num_ranks, LIKE)
