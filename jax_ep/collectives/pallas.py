"""The collectives on the Pallas kernels: how payloads are padded and kernels are spread.

What is here is policy; the kernels themselves are in `pallas_kernels`. The functions run inside
`shard_map` over `axis_name`, on two ranks or more.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.exchange import pallas as pallas_exchange
from jax_ep.runtime import symmetric_memory
from jax_ep.runtime.jax_compat import match_varying, place
from pallas_kernels.collectives import all_gather as all_gather_kernel
from pallas_kernels.collectives import all_reduce as all_reduce_kernel
from pallas_kernels.collectives import all_reduce_rms_norm as all_reduce_rms_norm_kernel
from pallas_kernels.collectives import all_to_all as all_to_all_kernel
from pallas_kernels.collectives import low_latency as ll_collectives
from pallas_kernels.collectives import reduce_scatter as reduce_scatter_kernel
from pallas_kernels.fabric import low_latency as ll
from pallas_kernels.fabric.fabric import Mesh
from pallas_kernels.fabric.plan import align_up, vector_length
from pallas_kernels.fabric.tiles import Plan, tile_length

AxisName = tuple[str, ...]
Kernel = Callable[..., jax.Array]

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
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


def is_ll(algorithm: str) -> bool:
    """Whether it communicates by LL."""
    return algorithm.endswith("ll")


def payload_unavailable_reason(
    op: str, algorithm: str, shape: tuple[int, ...], dtype: Any, num_ranks: int
) -> str | None:
    """Why the kernel cannot serve such an x, or None if it can."""
    sums = op in ("all_reduce", "reduce_scatter", "all_reduce_rms_norm")
    if (sums or is_ll(algorithm)) and dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(d).name for d in _DTYPES)
        return f"x is {jnp.dtype(dtype).name}, not one of {names}"
    if 0 in shape:
        return f"x is empty, its shape is {shape}"
    if math.prod(shape) >= 2**31:
        return f"x has {math.prod(shape)} elements, and the kernels count in 32 bits"
    if op == "all_reduce_rms_norm" and shape[-1] > _MAX_HIDDEN:
        return f"a row of {shape[-1]} elements is longer than {_MAX_HIDDEN}"
    if is_ll(algorithm):
        workers, slots = _ll_needs(op, algorithm, shape, dtype, num_ranks)
        if workers > ll.MAX_WORKERS or slots > ll.MAX_SLOTS:
            return (
                f"x, {shape} {jnp.dtype(dtype).name}, is more than LL has room for: {workers} "
                f"workers with {slots} slots, where it has {ll.MAX_WORKERS} with {ll.MAX_SLOTS}"
            )
    return None


@dataclasses.dataclass(frozen=True)
class Transport:
    """Which kernels, between which ranks.

    Attributes:
      algorithm: any but "xla", "unfused" and "multimem".
      axis_name: of the ranks.
      devices: the GPU at each place of the mesh; of matter to LL alone.
    """

    algorithm: str
    axis_name: AxisName
    devices: tuple[int, ...] = ()

    @property
    def fabric(self) -> Mesh:
        return pallas_exchange.mesh_fabric(self.axis_name)

    def channels(self) -> ll.Channels:
        regions = symmetric_memory.here() if jax.default_backend() == "gpu" else None
        assert not isinstance(regions, str), regions
        return ll.Channels(
            self.fabric.axes(),
            self.devices,
            regions or symmetric_memory.elsewhere(len(self.devices)),
            self.fabric.timeout_s,
        )

    def run(self, kernel: Kernel, by_ll: Kernel, x: jax.Array, size: int) -> jax.Array:
        """One of two kernels on x [..., S].

        `size`: the elements that each rank's blocks go over; by LL they are S.
        """
        if not is_ll(self.algorithm):
            return kernel(x, fabric=self.fabric, plan=_plan(size, x.dtype))
        here, x = match_varying((place(), x), self.axis_name)
        plan = _plan(x.shape[-1], x.dtype, by_ll=True)
        return by_ll(here, x, channels=self.channels(), plan=plan)


def _ll_needs(
    op: str, algorithm: str, shape: tuple[int, ...], dtype: Any, num_ranks: int
) -> tuple[int, int]:
    """The workers of a call, and the slots of each: of tiles that it receives from a peer."""
    shots = 2 if "two_shot" in algorithm else 1
    if op == "all_reduce_rms_norm":
        num_rows, num_warpgroups = math.prod(shape[:-1]), _warpgroups_of_row(shape[-1], dtype)
        rows = _ll_rows_per_block(num_rows, num_warpgroups, shots == 2, num_ranks)
        tiles_of_row = -(-_num_tiles(shape[-1], dtype) // num_warpgroups)
        tiles = tiles_of_row * (1 if shots == 2 else rows)
        return -(-num_rows // rows) * num_warpgroups, shots * tiles
    whole = algorithm == "one_shot_ll" or op == "all_gather"
    num_tiles = _num_tiles(-(-math.prod(shape) // (1 if whole else num_ranks)), dtype)
    return min(num_tiles, ll.MAX_WORKERS), shots * -(-num_tiles // ll.MAX_WORKERS)


def all_reduce(x: jax.Array, transport: Transport) -> jax.Array:
    """Sums any shape over ranks."""
    if transport.algorithm.startswith("one_shot"):
        flat = _pad(x.reshape(-1))
        out = transport.run(all_reduce_kernel.one_shot, ll_collectives.one_shot, flat, flat.size)
    else:
        num_ranks = transport.fabric.num_ranks
        shard = _padded_size(-(-x.size // num_ranks), x.dtype)
        padding = shard * num_ranks - x.size
        shards = jnp.pad(x.reshape(-1), (0, padding)) if padding else x
        shards = shards.reshape(num_ranks, shard)
        out = transport.run(all_reduce_kernel.two_shot, ll_collectives.two_shot, shards, shard)
    return out.reshape(-1)[: x.size].reshape(x.shape)


def all_gather(x: jax.Array, transport: Transport) -> jax.Array:
    """[n, ...] -> [N * n, ...]."""
    flat = _pad(_to_move(x, transport).reshape(-1))
    out = transport.run(all_gather_kernel.all_gather, ll_collectives.all_gather, flat, flat.size)
    out = out[:, : x.size].reshape(-1, *x.shape[1:])
    return lax.bitcast_convert_type(out, x.dtype)


def reduce_scatter(x: jax.Array, transport: Transport) -> jax.Array:
    """[N * n, ...] -> [n, ...]."""
    shards = x.reshape(transport.fabric.num_ranks, -1)
    padded = _pad(shards)
    kernels = reduce_scatter_kernel.reduce_scatter, ll_collectives.reduce_scatter
    out = transport.run(*kernels, padded, padded.shape[1])
    return out[: shards.shape[1]].reshape(-1, *x.shape[1:])


def all_to_all(x: jax.Array, transport: Transport) -> jax.Array:
    """[N * n, ...] by destination -> [N * n, ...] by source."""
    shards = _to_move(x, transport).reshape(transport.fabric.num_ranks, -1)
    padded = _pad(shards)
    kernels = all_to_all_kernel.all_to_all, ll_collectives.all_to_all
    out = transport.run(*kernels, padded, padded.size)
    return lax.bitcast_convert_type(out[:, : shards.shape[1]].reshape(x.shape), x.dtype)


def all_reduce_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    transport: Transport,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """Sums [..., H] over ranks, adds the residual and normalizes; see `collectives`."""
    fabric, hidden, algorithm = transport.fabric, x.shape[-1], transport.algorithm
    if algorithm == "fused":
        algorithm = _fused_algorithm(fabric.num_ranks, x.size * x.dtype.itemsize)
    rows, old, weights = (_pad(a.reshape(-1, hidden), x.dtype) for a in (x, residual, scale))
    num_rows, padded = rows.shape
    num_warpgroups = _warpgroups_of_row(padded, x.dtype)
    two_shot = algorithm.startswith("fused_two_shot")
    if is_ll(algorithm):
        rows_per_block = _ll_rows_per_block(num_rows, num_warpgroups, two_shot, fabric.num_ranks)
    else:
        rows_per_block = -(-num_rows // _MAX_ROW_BLOCKS)
    plan = _forced_plan.get() or Plan(-(-num_rows // rows_per_block), num_warpgroups)
    sizes: dict[str, Any] = dict(eps=eps, hidden=hidden, two_shot=two_shot, plan=plan)
    if is_ll(algorithm):
        operands = match_varying((place(), rows, old, weights[0]), transport.axis_name)
        normalized, new_residual = all_reduce_rms_norm_kernel.all_reduce_rms_norm_ll(
            *operands, channels=transport.channels(), **sizes
        )
    else:
        normalized, new_residual = all_reduce_rms_norm_kernel.all_reduce_rms_norm(
            rows, old, weights[0], fabric=fabric, **sizes
        )
    normalized, new_residual = (out[:, :hidden] for out in (normalized, new_residual))
    return normalized.reshape(x.shape), new_residual.reshape(x.shape)


def _fused_algorithm(num_ranks: int, num_bytes: int) -> str:
    """Two shots are worth their second trip once one shot's reads take longer."""
    saved = (num_ranks - 1) * (1 - 2 / num_ranks) * num_bytes
    return "fused_two_shot" if saved > _BYTES_OF_A_TRIP else "fused_one_shot"


def _plan(num_elements: int, dtype: Any, *, by_ll: bool = False) -> Plan:
    """For so many elements that each rank's blocks have to go over; every block gets as many.

    By LL a warpgroup takes one tile at a time, and there are no more workers than it has slots for.
    """
    if forced := _forced_plan.get():
        return forced
    max_blocks = ll.MAX_WORKERS // _MAX_WARPGROUPS if by_ll else _MAX_BLOCKS
    num_tiles, num_vectors = _num_tiles(num_elements, dtype), 1
    if num_tiles > _MANY_ROUNDS * max_blocks * _MAX_WARPGROUPS and not by_ll:
        num_tiles, num_vectors = -(-num_tiles // 2), 2
    num_warpgroups = min(max(num_tiles // _FEW_TILES, 1), _MAX_WARPGROUPS)
    rounds = -(-num_tiles // (max_blocks * num_warpgroups))
    return Plan(-(-num_tiles // (rounds * num_warpgroups)), num_warpgroups, num_vectors)


def _num_tiles(num_elements: int, dtype: Any) -> int:
    return -(-num_elements // tile_length(dtype))


def _warpgroups_of_row(hidden: int, dtype: Any) -> int:
    return min(_num_tiles(hidden, dtype), _MAX_WARPGROUPS)


def _ll_rows_per_block(num_rows: int, num_warpgroups: int, two_shot: bool, num_ranks: int) -> int:
    return num_ranks if two_shot else -(-num_rows // (ll.MAX_WORKERS // num_warpgroups))


def _padded_size(size: int, dtype: Any) -> int:
    """Whole vectors, and at least one tile."""
    forced = _forced_plan.get()
    num_vectors = forced.num_vectors if forced else 1
    return max(align_up(size, vector_length(dtype)), tile_length(dtype, num_vectors))


def _pad(x: jax.Array, dtype: Any = None) -> jax.Array:
    """Pads the last axis with zeros, as needed for elements of `dtype` (default: x's)."""
    padding = _padded_size(x.shape[-1], dtype or x.dtype) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]) if padding else x


def _to_move(x: jax.Array, transport: Transport) -> jax.Array:
    """x as unsigned integers: what is only moved is not converted, whatever its dtype."""
    if is_ll(transport.algorithm):
        return x
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
