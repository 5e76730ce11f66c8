"""All-reduce, residual add and RMSNorm in one pass over the data.

Block b of every rank handles the same rows of [T, H]; each of its warpgroups has some tiles of
every row:

  one_shot   x of all ranks -- link --> sums in registers --> + residual --> RMSNorm --> results
  two_shot   x of all ranks -- link --> sums of every N-th tile --> link --> normalized of all ranks
             normalized --> sums in registers --> + residual --> RMSNorm --> results

Every rank adds its own residual and normalizes all rows itself, so residuals may differ between
ranks. The fusion of these operations comes from TokenWeave (Gond et al., 2025), which also splits
the normalization over ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.collectives import low_latency, tiles
from pallas_kernels.collectives.tiles import TilePlan
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric import vectors
from pallas_kernels.fabric.hardware import vector_length
from pallas_kernels.fabric.low_latency import Channels, Endpoint

# The kind of signal that a block sends after its last access to other ranks' memory: it has written
# its sums to all ranks (two_shot), or has read all ranks' inputs (one_shot).
_SUMMED = 0


def all_reduce_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    hidden: int,
    two_shot: bool,
    fabric: fb.Fabric | Channels,
    plan: TilePlan,
) -> tuple[jax.Array, jax.Array]:
    """Sums x over ranks, adds the residual, and normalizes each row by its root mean square.

    Args:
      x: [T, H] floating; a row is a whole number of 16-byte vectors, and at least one tile.
      residual: [T, H] floating.
      scale: [H] floating, the RMSNorm weight that multiplies each normalized row.
      eps: a constant added to the mean square.
      hidden: how many of the H columns are data. The others are zeros, and not counted by the mean.
      two_shot: whether each rank sums one N-th of the data and sends the sums to all ranks.
      fabric: the ranks; `Channels` give the same bits over the low-latency protocol.
      plan: has at least T / N blocks for two shots over `Channels`; `num_vectors` is taken as 1.

    Returns:
      normalized: [T, H] of x's dtype, the normalized new residual times `scale`.
      new_residual: [T, H] of residual's dtype, the sum over ranks, rounded to x's dtype, plus the
        residual; rounded before it is normalized.
    """
    num_rows, padded = x.shape[-2:]
    body = _Body(num_rows, padded, x.dtype, residual.dtype, hidden, eps, two_shot, fabric, plan)
    operands = x, residual, scale
    scratch_types = dict(scratch=body.scratch())
    if isinstance(fabric, Channels):
        # Of each tile of a row: one shot sends all rows of a block, two shots a row and a sum.
        sends_per_tile = 2 if two_shot else body.rows_per_block
        results = low_latency.call(
            body.two_shot_low_latency if two_shot else body.one_shot_low_latency,
            operands,
            body.out_type,
            channels=fabric,
            plan=plan,
            num_sends=sends_per_tile * body.tiles_of_warpgroup,
            name=f"ep_all_reduce_rms_norm_{'two' if two_shot else 'one'}_shot_ll",
            scratch_types=scratch_types,
        )
    else:
        results = fb.kernel(
            fabric,
            body,
            name="ep_all_reduce_rms_norm",
            num_blocks=plan.num_blocks,
            num_warpgroups=plan.num_warpgroups,
            out_type=body.out_type,
            scratch_types=scratch_types,
            # Peers read x, and with two shots write to `normalized`, which follows the 3 operands.
            shared=(0, 3) if two_shot else (0,),
        )(*operands)
    normalized, new_residual = results
    return normalized, new_residual


class _Refs(NamedTuple):
    x: Any
    residual: Any
    scale: Any
    normalized: Any  # in a two-shot kernel with signals, peers first write the sums of rows here
    new_residual: Any


class _Row(NamedTuple):
    """A row to normalize: the tiles of it that this warpgroup handles, in registers."""

    index: Any
    sums: Sequence[jax.Array]  # over ranks, in x's dtype
    residual: Sequence[jax.Array]
    scale: Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class _Body:
    """The kernels' bodies: `__call__` with signals, two methods over the low-latency protocol."""

    num_rows: int
    padded: int  # H, with padding
    dtype: Any
    residual_dtype: Any
    hidden: int
    eps: float
    two_shot: bool
    fabric: Any  # `Channels` with the low-latency protocol
    plan: TilePlan

    @property
    def out_type(self) -> list[jax.ShapeDtypeStruct]:
        shape = (self.num_rows, self.padded)
        return [jax.ShapeDtypeStruct(shape, dtype) for dtype in (self.dtype, self.residual_dtype)]

    def scratch(self) -> fb.Scratch:
        sums = self.plan.num_warpgroups * vectors.SUMS_OF_WARPGROUP
        return fb.Scratch(
            # Each warp's part of the sum of squares of a row. Consecutive rows use the two halves
            # in turn: when a row's sums are written, those of the row before may still be read.
            squares=plgpu.SMEM((2, sums), jnp.float32),
            together=plgpu.Barrier(num_arrivals=self.plan.num_warpgroups),
        )

    @property
    def vector(self) -> int:
        return vector_length(self.dtype)

    @property
    def tile(self) -> int:
        return tiles.tile_length(self.dtype)

    @property
    def tiles_per_row(self) -> int:
        return pl.cdiv(self.padded, self.tile)

    @property
    def tiles_of_warpgroup(self) -> int:
        return pl.cdiv(self.tiles_per_row, self.plan.num_warpgroups)

    @property
    def rows_per_block(self) -> int:
        return pl.cdiv(self.num_rows, self.plan.num_blocks)

    def __call__(self, *arrays: Any, scratch: fb.Scratch) -> None:
        """Runs the body of both kernels with signals, one-shot and two-shot."""
        fabric = self.fabric
        refs, here = _Refs(*arrays), _Refs(*map(fabric.mine, arrays))
        first_row = lax.axis_index("block") * self.rows_per_block
        num_rows = jnp.clip(self.num_rows - first_row, 0, self.rows_per_block)
        fabric.delay_point(0)
        fabric.connect()
        scale = self._load(here.scale)
        # If each block has one row, its residual is loaded before the waits for peers, which hides
        # the load.
        has_one_row = self.plan.num_blocks == self.num_rows
        only_residual = self._load(here.residual, first_row) if has_one_row else None

        def norm_row(i: jax.Array, _: None) -> None:
            row = first_row + i
            residual, half = self._load(here.residual, row), lax.rem(i, jnp.int32(2))
            sums = self._row_of_sums(refs, row)
            self._norm(_Row(row, sums, residual, scale), here, half, scratch)

        if self.two_shot:
            self._sum_share(refs, first_row, num_rows)
            fabric.delay_point(1)
            self._meet(scratch)
            self._signal(release=True)
            fabric.wait(_SUMMED, 1, "all_reduce_rms_norm")
            fabric.delay_point(2)
        if only_residual is None:
            lax.fori_loop(0, num_rows, norm_row, None)
            if not self.two_shot:
                fabric.delay_point(1)
                self._meet(scratch)
                self._signal(release=False)
        else:
            row = _Row(first_row, self._row_of_sums(refs, first_row), only_residual, scale)
            signal = None
            if not self.two_shot:
                fabric.delay_point(1)
                # `_norm` signals once all warpgroups have read the row of all ranks.
                signal = functools.partial(self._signal, release=False)
            self._norm(row, here, 0, scratch, signal)
        if not self.two_shot:
            fabric.wait(_SUMMED, 1, "all_reduce_rms_norm")

    def one_shot_low_latency(self, endpoint: Endpoint, *arrays: Any, scratch: fb.Scratch) -> None:
        """Runs the body of the one-shot kernel over the low-latency protocol."""
        # Blocks past the last row compute it again: all blocks send and receive equally many tiles.
        refs, num_tiles = _Refs(*arrays), self.tiles_of_warpgroup
        first_row = lax.axis_index("block") * self.rows_per_block
        rows = [jnp.minimum(first_row + i, self.num_rows - 1) for i in range(self.rows_per_block)]
        for i, row in enumerate(rows):
            for j, tile in enumerate(self._load(refs.x, row)):
                endpoint.send(i * num_tiles + j, [tile] * len(endpoint.peers))
        scale = self._load(refs.scale)
        endpoint.delay_point(1)
        for i, row in enumerate(rows):
            residual, row_of_x = self._load(refs.residual, row), self._load(refs.x, row)
            sums = [endpoint.sum(i * num_tiles + j, tile) for j, tile in enumerate(row_of_x)]
            self._norm(_Row(row, sums, residual, scale), refs, i % 2, scratch)

    def two_shot_low_latency(self, endpoint: Endpoint, *arrays: Any, scratch: fb.Scratch) -> None:
        """Runs the body of the two-shot kernel over the low-latency protocol."""
        # A block handles N rows; rank r sums row number r, and sends the sum to all ranks. Rows
        # past the last one are the last one again.
        refs, num_tiles = _Refs(*arrays), self.tiles_of_warpgroup
        first_row = lax.axis_index("block") * self.fabric.num_ranks
        ranks = [endpoint.rank, *endpoint.peers]
        rows = [jnp.minimum(first_row + rank, self.num_rows - 1) for rank in ranks]
        row_here, *rows_of_peers = rows
        # A warpgroup first sends a peer `num_tiles` tiles of x, and then as many of the sum.
        parts = [self._load(refs.x, row) for row in rows_of_peers]
        for j in range(num_tiles):
            endpoint.send(j, [part[j] for part in parts])
        scale, residual = self._load(refs.scale), self._load(refs.residual, row_here)
        part_here = self._load(refs.x, row_here)
        endpoint.delay_point(1)
        sums = [endpoint.sum(j, tile) for j, tile in enumerate(part_here)]
        for j, tile in enumerate(sums):
            endpoint.send(num_tiles + j, [tile] * len(rows_of_peers))
        self._norm(_Row(row_here, sums, residual, scale), refs, 0, scratch)
        received = range(num_tiles, 2 * num_tiles)
        arrived = [endpoint.receive(index, (self.tile,), self.dtype) for index in received]
        for i, row in enumerate(rows_of_peers):
            sums = [tiles_of_peers[i] for tiles_of_peers in arrived]
            residual = self._load(refs.residual, row)
            self._norm(_Row(row, sums, residual, scale), refs, (i + 1) % 2, scratch)

    def _load(self, ref: Any, *row: Any) -> list[jax.Array]:
        return [vectors.load(ref.at[(*row, where)], self.vector) for where in self._my_tiles()]

    def _sum_share(self, refs: _Refs, first_row: jax.Array, num_rows: jax.Array) -> None:
        """Sums every N-th tile of the block's rows; stores it to `normalized` of all ranks."""
        fabric, per_row = self.fabric, jnp.int32(self.tiles_per_row)
        rank, warpgroup = fabric.rank(), lax.axis_index("warpgroup")
        # This warpgroup sums the tiles start, start + stride and so on, counted over all rows.
        stride = fabric.num_ranks * self.plan.num_warpgroups
        start = rank + fabric.num_ranks * warpgroup

        def sum_tile(i: jax.Array, _: None) -> None:
            index = start + i * stride
            row = first_row + lax.div(index, per_row)
            columns = self._slice(lax.rem(index, per_row))
            total = tiles.sum_of_ranks(fabric, refs.x, row, columns)
            tiles.put(fabric, refs.normalized, (row, columns), total.astype(self.dtype))

        count = lax.div(num_rows * per_row - start + (stride - 1), jnp.int32(stride))
        lax.fori_loop(0, jnp.maximum(count, 0), sum_tile, None)

    def _row_of_sums(self, refs: _Refs, row: jax.Array) -> list[jax.Array]:
        """Returns this warpgroup's tiles of row `row` of the sum over ranks, in x's dtype."""
        if not self.two_shot:
            return [
                tiles.sum_of_ranks(self.fabric, refs.x, row, where).astype(self.dtype)
                for where in self._my_tiles()
            ]
        return self._load(self.fabric.mine(refs.normalized), row)

    def _norm(
        self,
        row: _Row,
        refs: _Refs,
        half: Any,
        scratch: fb.Scratch,
        signal: Callable[[], None] | None = None,
    ) -> None:
        """Adds the residual to a row of sums, normalizes the result, and stores both.

        `half`, 0 or 1, is that of `scratch.squares`; `signal` tells peers that this block
        has read their inputs; None: the caller does, or no signal is needed.
        """
        fabric, vector, warpgroup = self.fabric, self.vector, lax.axis_index("warpgroup")
        totals = [
            (tile.astype(jnp.float32) + residual.astype(jnp.float32)).astype(self.residual_dtype)
            for tile, residual in zip(row.sums, row.residual, strict=True)
        ]
        for total, where in zip(totals, self._my_tiles(), strict=True):
            vectors.store([refs.new_residual.at[row.index, where]], total, vector)

        values = [total.astype(jnp.float32) for total in totals]
        squares_of_tiles = [
            self._without_overlap(i, value * value) for i, value in enumerate(values)
        ]
        square = functools.reduce(jnp.add, squares_of_tiles)
        parts = pl.ds(warpgroup * vectors.SUMS_OF_WARPGROUP, vectors.SUMS_OF_WARPGROUP)
        squares = scratch.squares.at[half]
        vectors.partial_sums(square, squares.at[parts], vector)
        self._meet(scratch)
        # All warpgroups have the row's sums, so this block has read all it needs of peers' inputs.
        if signal:
            signal()
        # For the tests' simulator. On a GPU, `_meet` synchronizes all threads of the block.
        fabric.barrier()
        total_square = squares[0]
        for i in range(1, self.plan.num_warpgroups * vectors.SUMS_OF_WARPGROUP):
            total_square = total_square + squares[i]
        factor = lax.rsqrt(total_square * (1 / self.hidden) + self.eps)
        for value, weight, where in zip(values, row.scale, self._my_tiles(), strict=True):
            normal = value * factor * weight.astype(jnp.float32)
            tiles.store(refs.normalized.at[row.index, where], normal.astype(self.dtype))

    def _my_tiles(self) -> list[Any]:
        # The last tile of a row is moved back until it ends with the row, and may overlap the tile
        # before. Warpgroups past the last tile have it, too, and store equal values to it.
        return [self._slice(index) for index in self._my_indices()]

    def _my_indices(self) -> list[jax.Array]:
        """Returns the index in the row of each tile of this warpgroup; may exceed the last tile."""
        return [
            lax.axis_index("warpgroup") + i * self.plan.num_warpgroups
            for i in range(self.tiles_of_warpgroup)
        ]

    def _slice(self, index: jax.Array) -> Any:
        """Returns the columns of tile number `index`, or of the last tile."""
        return pl.ds(jnp.minimum(index * self.tile, self.padded - self.tile), self.tile)

    def _without_overlap(self, i: int, value: jax.Array) -> jax.Array:
        """Returns `value`, with zeros where an earlier tile contains elements of the i-th tile."""
        # So a sum over all tiles counts each element of the row once.
        index = self._my_indices()[i]
        # No tile was moved back if tiles fill the row and no warpgroup's i-th tile is past it.
        fills_row = self.tiles_per_row * self.tile == self.padded
        if fills_row and (i + 1) * self.plan.num_warpgroups <= self.tiles_per_row:
            return value
        moved_by = index * self.tile - jnp.minimum(index * self.tile, self.padded - self.tile)
        position = fb.iota(self.tile, self.vector)
        return jnp.where(position >= moved_by, value, jnp.zeros_like(value))

    def _meet(self, scratch: fb.Scratch) -> None:
        plgpu.barrier_arrive(scratch.together)
        plgpu.barrier_wait(scratch.together)

    def _signal(self, *, release: bool) -> None:
        """Signals to peers that this block has made its last access to their memory."""

        @pl.when(lax.axis_index("warpgroup") == 0)
        def signal() -> None:
            self.fabric.signal(_SUMMED, 1, release=release)
