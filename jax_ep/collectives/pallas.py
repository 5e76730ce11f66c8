"""Runs the collectives as Pallas kernels: pads operands and spreads them over thread blocks.

Importing this module loads Mosaic. Its collectives run inside `shard_map`, on two ranks or more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_ep.collectives import xla
from jax_ep.runtime import availability
from jax_ep.runtime.fabric import channels_of, domain_of, of_axis
from pallas_kernels.collectives import all_reduce_rms_norm as all_reduce_rms_norm_kernel
from pallas_kernels.collectives import low_latency as low_latency_kernels
from pallas_kernels.collectives import with_signals
from pallas_kernels.collectives.tiles import TilePlan, tile_length
from pallas_kernels.fabric import memory_map
from pallas_kernels.fabric.hardware import align_up, vector_length

Kernel = Callable[..., jax.Array]

# A kernel has at most one thread block for each of a Hopper GPU's 132 multiprocessors.
_MAX_BLOCKS = 132
_MAX_WARPGROUPS = 4
# The kernel of all_reduce_rms_norm instead has up to 8 thread blocks for each multiprocessor, so
# that one block sums over the ranks while another block normalizes its rows.
_MAX_ROW_BLOCKS = 1056
# A tile is the part of an array that a warpgroup holds in registers at a time. The number of
# warpgroups of every thread block grows with the array. It is the array's number of tiles divided
# by _FEW_TILES, but at least 1 and at most _MAX_WARPGROUPS. So the tiles of a small array are
# spread over many blocks.
_FEW_TILES = 64
# If each warpgroup had more than _MANY_ROUNDS tiles to process, tiles of twice the size are used.
_MANY_ROUNDS = 2
# The longest row of all_reduce_rms_norm: a thread holds at most 32 elements of a row, and a thread
# block has at most 512 threads.
_MAX_HIDDEN = 16384

# Sending data over NVLink twice instead of once adds a latency of 1.5 us, in which the link could
# send this many bytes.
_BYTES_OF_A_TRIP = 2**19


def unavailable_reason(
    algorithm: str, op: str, operands: Sequence[Any], num_ranks: int
) -> str | None:
    """Returns why a kernel cannot compute a collective, on a machine that runs kernels."""
    x = operands[0]
    # The other kernels move any dtype, as bits.
    if op in ("all_reduce", "reduce_scatter", "all_reduce_rms_norm") or _is_low_latency(algorithm):
        for name, operand in zip(("x", "residual", "scale"), operands, strict=False):
            if reason := availability.dtype_unavailable_reason(name, operand.dtype):
                return reason
    if 0 in x.shape:
        return f"x is empty, its shape is {x.shape}"
    if math.prod(x.shape) >= 2**31:
        return f"x has {math.prod(x.shape)} elements, and the kernels support fewer than 2^31"
    if op == "all_reduce_rms_norm" and x.shape[-1] > _MAX_HIDDEN:
        return f"it supports rows of at most {_MAX_HIDDEN} elements, not {x.shape[-1]}"
    if not _is_low_latency(algorithm):
        return None
    # The mesh's GPUs count unless this host's are known: `domain` is None if the program is lowered
    # for another machine, and a string that says why there is none.
    num_gpus = max(num_ranks, jax.sharding.get_abstract_mesh().size)
    domain = domain_of(num_gpus)
    if isinstance(domain, str):
        return domain
    if domain is not None:
        num_gpus, most = domain.num_gpus, memory_map.MAX_LOW_LATENCY_GPUS
        if num_gpus > most:
            return f"it runs on hosts of at most {most} GPUs, and this host has {num_gpus}"
    return no_room_reason(op, algorithm, x.shape, x.dtype, num_ranks, num_gpus)


def _is_low_latency(algorithm: str) -> bool:
    return algorithm.endswith("ll")


def no_room_reason(
    op: str, algorithm: str, shape: tuple[int, ...], dtype: Any, num_ranks: int, num_gpus: int
) -> str | None:
    """Returns why x does not fit in the low-latency buffers; with more GPUs they are smaller."""
    # `workers` is the call's number of warpgroups. Each sends a peer `tiles` tiles, in all trips.
    trips = 2 if "two_shot" in algorithm else 1
    if op == "all_reduce_rms_norm":
        grid = _RowGrid.of(algorithm, math.prod(shape[:-1]), shape[-1], dtype, num_ranks)
        tiles_of_row = -(-_num_tiles(shape[-1], dtype) // grid.num_warpgroups)
        # In two shots, a rank sums and sends one of the N rows of a block.
        rows = 1 if trips == 2 else grid.rows_per_block
        workers, tiles = grid.num_blocks * grid.num_warpgroups, trips * rows * tiles_of_row
    else:
        sends_all_of_x = algorithm == "one_shot_ll" or op == "all_gather"
        num_elements = math.prod(shape) if sends_all_of_x else -(-math.prod(shape) // num_ranks)
        num_tiles = _num_tiles(num_elements, dtype)
        workers = min(num_tiles, memory_map.MAX_WORKERS)
        tiles = trips * -(-num_tiles // memory_map.MAX_WORKERS)
    most = memory_map.tiles_of_channel(num_gpus)
    if workers > memory_map.MAX_WORKERS or tiles > most:
        return (
            f"x, {shape} {jnp.dtype(dtype).name}, is too large for the buffers of the low-latency "
            f"protocol: it needs {workers} warpgroups that send {tiles} tiles each, and on a host "
            f"of {num_gpus} GPUs there is room for {memory_map.MAX_WORKERS} with {most} tiles each"
        )
    return None


@dataclasses.dataclass(frozen=True)
class PallasCollectives:
    """Implements the methods of `jax_ep.collectives.xla.XlaCollectives` by kernels."""

    algorithm: str
    axis_name: tuple[str, ...]

    def all_reduce(self, x: jax.Array) -> jax.Array:
        if self.algorithm.startswith("one_shot"):
            flat = _pad(x.reshape(-1))
            out = self._run(with_signals.one_shot, low_latency_kernels.one_shot, flat, flat.size)
        else:
            # Rank r sums shard r of every rank's x.
            num_ranks = self._num_ranks
            shard = _padded_size(-(-x.size // num_ranks), x.dtype)
            padding = shard * num_ranks - x.size
            shards = jnp.pad(x.reshape(-1), (0, padding)) if padding else x
            shards = shards.reshape(num_ranks, shard)
            out = self._run(with_signals.two_shot, low_latency_kernels.two_shot, shards, shard)
        return out.reshape(-1)[: x.size].reshape(x.shape)

    def all_gather(self, x: jax.Array) -> jax.Array:
        flat = _pad(self._bits(x).reshape(-1))
        kernels = with_signals.all_gather, low_latency_kernels.all_gather
        out = self._run(*kernels, flat, flat.size)
        out = out[:, : x.size].reshape(-1, *x.shape[1:])
        return lax.bitcast_convert_type(out, x.dtype)

    def reduce_scatter(self, x: jax.Array) -> jax.Array:
        shards = x.reshape(self._num_ranks, -1)
        padded = _pad(shards)
        kernels = with_signals.reduce_scatter, low_latency_kernels.reduce_scatter
        out = self._run(*kernels, padded, padded.shape[1])
        return out[: shards.shape[1]].reshape(-1, *x.shape[1:])

    def all_to_all(self, x: jax.Array) -> jax.Array:
        shards = self._bits(x).reshape(self._num_ranks, -1)
        padded = _pad(shards)
        kernels = with_signals.all_to_all, low_latency_kernels.all_to_all
        out = self._run(*kernels, padded, padded.size)
        return lax.bitcast_convert_type(out[:, : shards.shape[1]].reshape(x.shape), x.dtype)

    def all_reduce_rms_norm(
        self, x: jax.Array, residual: jax.Array, scale: jax.Array, *, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        if not self.algorithm.startswith("fused"):
            return xla.unfused(self.all_reduce, x, residual, scale, eps=eps)
        num_ranks, hidden = self._num_ranks, x.shape[-1]
        algorithm = self.algorithm
        if algorithm == "fused":
            # In one shot, a rank sends N - 1 times x. Two shots send 2 / N of that, in two trips.
            saved = (num_ranks - 1) * (1 - 2 / num_ranks) * x.size * x.dtype.itemsize
            algorithm = "fused_two_shot" if saved > _BYTES_OF_A_TRIP else "fused_one_shot"
        # scale [H] becomes scales [1, H], whose only row the kernels take.
        rows, residuals, scales = (
            _pad(array.reshape(-1, hidden), x.dtype) for array in (x, residual, scale)
        )
        num_rows, padded_hidden = rows.shape
        grid = _RowGrid.of(algorithm, num_rows, padded_hidden, x.dtype, num_ranks)
        fabric = of_axis(self.axis_name, x)
        results = all_reduce_rms_norm_kernel.all_reduce_rms_norm(
            rows,
            residuals,
            scales[0],
            eps=eps,
            hidden=hidden,
            two_shot=algorithm.startswith("fused_two_shot"),
            fabric=channels_of(fabric) if _is_low_latency(algorithm) else fabric,
            plan=TilePlan(grid.num_blocks, grid.num_warpgroups),
        )
        normalized, new_residual = (out[:, :hidden].reshape(x.shape) for out in results)
        return normalized, new_residual

    @property
    def _num_ranks(self) -> int:
        return lax.axis_size(self.axis_name)

    def _run(
        self, signal_kernel: Kernel, low_latency_kernel: Kernel, x: jax.Array, num_elements: int
    ) -> jax.Array:
        """Runs the algorithm's kernel on padded x; plans `signal_kernel` for `num_elements`."""
        fabric = of_axis(self.axis_name, x)
        if not _is_low_latency(self.algorithm):
            return signal_kernel(x, fabric=fabric, plan=_plan(num_elements, x.dtype))
        # In low-latency kernels, a warpgroup handles the same tiles of every shard.
        plan = _plan(x.shape[-1], x.dtype, for_low_latency=True)
        return low_latency_kernel(x, channels=channels_of(fabric), plan=plan)

    def _bits(self, x: jax.Array) -> jax.Array:
        """Returns x as unsigned integers for kernels with signals, which thus move any dtype."""
        if _is_low_latency(self.algorithm):
            return x
        return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


@dataclasses.dataclass(frozen=True)
class _RowGrid:
    """Spreads the rows of all_reduce_rms_norm over thread blocks and their warpgroups."""

    rows_per_block: int
    num_blocks: int
    num_warpgroups: int  # of a thread block; each row is divided among them

    @classmethod
    def of(cls, algorithm: str, num_rows: int, hidden: int, dtype: Any, num_ranks: int) -> _RowGrid:
        num_warpgroups = min(_num_tiles(hidden, dtype), _MAX_WARPGROUPS)
        if not _is_low_latency(algorithm):
            rows = -(-num_rows // _MAX_ROW_BLOCKS)
        elif "two_shot" in algorithm:
            rows = num_ranks  # of which each rank sums one
        else:
            # A low-latency call has at most MAX_WORKERS warpgroups.
            rows = -(-num_rows // (memory_map.MAX_WORKERS // num_warpgroups))
        num_blocks = -(-num_rows // rows)
        return cls(rows_per_block=rows, num_blocks=num_blocks, num_warpgroups=num_warpgroups)


def _plan(num_elements: int, dtype: Any, *, for_low_latency: bool = False) -> TilePlan:
    """Returns a `TilePlan` that spreads elements evenly over thread blocks and warpgroups."""
    # The low-latency protocol has tiles of the smallest size, and buffers for MAX_WORKERS
    # warpgroups.
    max_blocks = memory_map.MAX_WORKERS // _MAX_WARPGROUPS if for_low_latency else _MAX_BLOCKS
    num_tiles = _num_tiles(num_elements, dtype)
    num_vectors = 1  # of a thread in a tile
    if num_tiles > _MANY_ROUNDS * max_blocks * _MAX_WARPGROUPS and not for_low_latency:
        num_tiles = -(-num_tiles // 2)
        num_vectors = 2
    num_warpgroups = min(max(num_tiles // _FEW_TILES, 1), _MAX_WARPGROUPS)
    # The fewest blocks with which no warpgroup has more than `rounds` tiles.
    rounds = -(-num_tiles // (max_blocks * num_warpgroups))
    return TilePlan(-(-num_tiles // (rounds * num_warpgroups)), num_warpgroups, num_vectors)


def _num_tiles(num_elements: int, dtype: Any) -> int:
    return -(-num_elements // tile_length(dtype))


def _padded_size(size: int, dtype: Any) -> int:
    return max(align_up(size, vector_length(dtype)), tile_length(dtype))


def _pad(x: jax.Array, dtype: Any = None) -> jax.Array:
    """Pads the last axis of x with zeros to its `_padded_size` for `dtype` (None: x's dtype)."""
    padding = _padded_size(x.shape[-1], dtype or x.dtype) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)]) if padding else x
