"""The collectives on the Pallas kernels: how payloads are padded and kernels are spread.

What is here is policy; the kernels themselves are in `pallas_kernels`. The functions run inside
`shard_map` over `axis_name`, on two ranks or more.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep import pallas_exchange
from pallas_kernels import all_gather as all_gather_kernel
from pallas_kernels import all_reduce as all_reduce_kernel
from pallas_kernels import all_reduce_rms_norm as all_reduce_rms_norm_kernel
from pallas_kernels import all_to_all as all_to_all_kernel
from pallas_kernels import reduce_scatter as reduce_scatter_kernel
from pallas_kernels.plan import align_up
from pallas_kernels.tiles import Plan, tile_length
from pallas_kernels.vectors import length as vector_length

AxisName = tuple[str, ...]

_SUMMED_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_MAX_BLOCKS = 132  # one for each multiprocessor of a Hopper GPU
_MAX_WARPGROUPS = 4
_MAX_ROW_BLOCKS = 1056  # of all_reduce_rms_norm: blocks in several waves overlap their halves
_FEW_TILES = 64  # a small payload is spread over this many blocks before one gets a second tile
_MANY_ROUNDS = 2  # with more than this, warpgroups take two tiles at a time
_MAX_HIDDEN = 16384  # of all_reduce_rms_norm: 32 elements of a row to a thread

_forced_plan: contextvars.ContextVar[Plan | None] = contextvars.ContextVar("plan", default=None)

# A second trip costs about this many bytes' worth of time on the link: 1.5 us of NVLink.
_BYTES_OF_A_TRIP = 2**19


@contextlib.contextmanager
def forced_plan(plan: Plan | None) -> Iterator[None]:
    """For benchmarks and tests: what is lowered within takes this plan instead of its own."""
    token = _forced_plan.set(plan)
    try:
        yield
    finally:
        _forced_plan.reset(token)


def payload_unavailable_reason(op: str, shape: tuple[int, ...], dtype: Any) -> str | None:
    """Why the kernel of `op` cannot serve such an x, or None if it can."""
    if (
        op in ("all_reduce", "reduce_scatter", "all_reduce_rms_norm")
        and dtype not in _SUMMED_DTYPES
    ):
        names = ", ".join(jnp.dtype(d).name for d in _SUMMED_DTYPES)
        return f"x is {jnp.dtype(dtype).name}, not one of {names}"
    if 0 in shape:
        return f"x is empty, its shape is {shape}"
    if math.prod(shape) >= 2**31:
        return f"x has {math.prod(shape)} elements, and the kernels count in 32 bits"
    if op == "all_reduce_rms_norm" and shape[-1] > _MAX_HIDDEN:
        return f"a row of {shape[-1]} elements is longer than {_MAX_HIDDEN}"
    return None


def all_reduce(x: jax.Array, *, axis_name: AxisName, algorithm: str) -> jax.Array:
    """Sums any shape over ranks: "one_shot" or "two_shot"."""
    fabric = pallas_exchange.mesh_fabric(axis_name)
    if algorithm == "one_shot":
        flat = _pad(x.reshape(-1))
        plan = _plan(flat.size, x.dtype)
        out = all_reduce_kernel.one_shot(flat, fabric=fabric, plan=plan)
    else:
        shard = _padded_size(-(-x.size // fabric.num_ranks), x.dtype)
        padding = shard * fabric.num_ranks - x.size
        shards = jnp.pad(x.reshape(-1), (0, padding)) if padding else x
        plan = _plan(shard, x.dtype)
        shards = shards.reshape(fabric.num_ranks, shard)
        out = all_reduce_kernel.two_shot(shards, fabric=fabric, plan=plan).reshape(-1)
    return out[: x.size].reshape(x.shape)


def all_gather(x: jax.Array, *, axis_name: AxisName) -> jax.Array:
    """[n, ...] -> [N * n, ...]."""
    flat = _pad(_bits(x).reshape(-1))
    out = all_gather_kernel.all_gather(
        flat, fabric=pallas_exchange.mesh_fabric(axis_name), plan=_plan(flat.size, flat.dtype)
    )
    out = out[:, : x.size].reshape(-1, *x.shape[1:])
    return lax.bitcast_convert_type(out, x.dtype)


def reduce_scatter(x: jax.Array, *, axis_name: AxisName) -> jax.Array:
    """[N * n, ...] -> [n, ...]."""
    fabric = pallas_exchange.mesh_fabric(axis_name)
    shards = x.reshape(fabric.num_ranks, -1)
    padded = _pad(shards)
    out = reduce_scatter_kernel.reduce_scatter(
        padded, fabric=fabric, plan=_plan(padded.shape[1], x.dtype)
    )
    return out[: shards.shape[1]].reshape(-1, *x.shape[1:])


def all_to_all(x: jax.Array, *, axis_name: AxisName) -> jax.Array:
    """[N * n, ...] by destination -> [N * n, ...] by source."""
    fabric = pallas_exchange.mesh_fabric(axis_name)
    shards = _bits(x).reshape(fabric.num_ranks, -1)
    padded = _pad(shards)
    plan = _plan(padded.size, padded.dtype)
    out = all_to_all_kernel.all_to_all(padded, fabric=fabric, plan=plan)
    return lax.bitcast_convert_type(out[:, : shards.shape[1]].reshape(x.shape), x.dtype)


def all_reduce_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    *,
    axis_name: AxisName,
    eps: float,
    algorithm: str,
) -> tuple[jax.Array, jax.Array]:
    """Sums [..., H] over ranks, adds the residual and normalizes; see `collectives`."""
    fabric, hidden = pallas_exchange.mesh_fabric(axis_name), x.shape[-1]
    if algorithm == "fused":
        algorithm = _fused_algorithm(fabric.num_ranks, x.size * x.dtype.itemsize)
    rows, old, weights = (_pad(a.reshape(-1, hidden), x.dtype) for a in (x, residual, scale))
    num_rows, padded = rows.shape
    rows_per_block = -(-num_rows // _MAX_ROW_BLOCKS)
    num_warpgroups = min(-(-padded // tile_length(x.dtype)), _MAX_WARPGROUPS)
    normalized, new_residual = all_reduce_rms_norm_kernel.all_reduce_rms_norm(
        rows,
        old,
        weights[0],
        eps=eps,
        hidden=hidden,
        two_shot=algorithm == "fused_two_shot",
        fabric=fabric,
        plan=_forced_plan.get() or Plan(-(-num_rows // rows_per_block), num_warpgroups),
    )
    normalized, new_residual = (out[:, :hidden] for out in (normalized, new_residual))
    return normalized.reshape(x.shape), new_residual.reshape(x.shape)


def _fused_algorithm(num_ranks: int, num_bytes: int) -> str:
    """Two shots are worth their second trip once one shot's reads take longer."""
    saved = (num_ranks - 1) * (1 - 2 / num_ranks) * num_bytes
    return "fused_two_shot" if saved > _BYTES_OF_A_TRIP else "fused_one_shot"


def _plan(num_elements: int, dtype: Any) -> Plan:
    """For so many elements that each rank's blocks have to go over; every block gets as many."""
    if forced := _forced_plan.get():
        return forced
    num_tiles, num_vectors = -(-num_elements // tile_length(dtype)), 1
    if num_tiles > _MANY_ROUNDS * _MAX_BLOCKS * _MAX_WARPGROUPS:
        num_tiles, num_vectors = -(-num_tiles // 2), 2
    num_warpgroups = min(max(num_tiles // _FEW_TILES, 1), _MAX_WARPGROUPS)
    rounds = -(-num_tiles // (_MAX_BLOCKS * num_warpgroups))
    return Plan(-(-num_tiles // (rounds * num_warpgroups)), num_warpgroups, num_vectors)


def _padded_size(size: int, dtype: Any) -> int:
    """Whole vectors, and at least one tile."""
    forced = _forced_plan.get()
    num_vectors = forced.num_vectors if forced else 1
    return max(align_up(size, vector_length(dtype)), tile_length(dtype, num_vectors))


def _pad(x: jax.Array, dtype: Any = None) -> jax.Array:
    """Pads the last axis with zeros, as needed for elements of `dtype` (default: x's)."""
    padding = _padded_size(x.shape[-1], dtype or x.dtype) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]) if padding else x


def _bits(x: jax.Array) -> jax.Array:
    """x as unsigned integers: what is only moved is not converted, whatever its dtype."""
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
