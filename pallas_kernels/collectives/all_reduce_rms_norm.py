"""All-reduce, residual add and RMSNorm in one pass over the data.

Block b of every rank handles the same rows of [T, H]; its warpgroups share each row.

  one_shot  every rank reads its block's rows from all ranks, sums them, and normalizes the sums
            from registers;
  two_shot  every rank sums a share of its block's rows and writes the sums to the `normalized`
            output of all ranks; once all shares have arrived, each rank normalizes them in place.

Every rank adds its own residual and normalizes all rows itself, so residuals may differ between
ranks. The fusion is TokenWeave's (Gond et al., 2025), which also splits the normalization over
ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

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

# Kind of signal: this block has put the sums of its share (two_shot) or read all inputs (one_shot).
_SUMMED = 0


def all_reduce_rms_norm(
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    hidden: int,
    two_shot: bool,
    fabric: fb.Fabric,
    plan: TilePlan,
) -> tuple[jax.Array, jax.Array]:
    """Sums x over ranks, adds the residual, and normalizes each row by its root mean square.

    With stacked ranks, every array has a leading axis of N.

    Args:
      x: [T, H] floating; a row is whole vectors of 16 bytes, and at least one tile.
      residual: [T, H] floating.
      scale: [H] floating; multiplies the normalized rows.
      eps: added to the mean square.
      hidden: how many of the H columns are data; the others are zeros that the mean leaves out.
      two_shot: whether every rank sums a share of the rows, instead of all of them.
      fabric: how ranks reach each other.
      plan: number of blocks, and of warpgroups that share a row; its num_vectors is not used.

    Returns:
      normalized [T, H] of x's dtype, and new_residual [T, H] of residual's dtype. The sum is
      rounded to x's dtype before the residual is added; the new residual is rounded to its dtype
      before it is normalized.
    """
    num_rows, padded = x.shape[-2:]
    body = _Body(num_rows, padded, x.dtype, residual.dtype, hidden, eps, two_shot, fabric, plan)
    normalized, new_residual = fb.kernel(
        fabric,
        body,
        name="ep_all_reduce_rms_norm",
        num_blocks=plan.num_blocks,
        num_warpgroups=plan.num_warpgroups,
        out_type=body.out_type,
        scratch_types=body.scratch_types,
        shared=(0, 3) if two_shot else (0,),
    )(x, residual, scale)
    return normalized, new_residual


def low_latency_all_reduce_rms_norm(
    place: jax.Array,
    x: jax.Array,
    residual: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    hidden: int,
    two_shot: bool,
    channels: low_latency.Channels,
    plan: TilePlan,
) -> tuple[jax.Array, jax.Array]:
    """Sums x over ranks, adds the residual and normalizes, over the low-latency protocol.

    Arguments and results are those of `all_reduce_rms_norm`, bit for bit, but for `place`, [1]
    int32, the place of this GPU in the mesh, and `channels`, by which ranks reach each other. With
    `two_shot` a block handles one row for each rank.

    Raises:
      ValueError: the plan has too few blocks, or sends more tiles than there is room for.
    """
    num_rows, padded = x.shape[-2:]
    body = _Body(num_rows, padded, x.dtype, residual.dtype, hidden, eps, two_shot, channels, plan)
    if two_shot and plan.num_blocks * channels.num_ranks < num_rows:
        raise ValueError(
            "in two shots over the low-latency protocol a block has a row for each rank, but "
            f"{plan} has too few for {num_rows} rows of {channels.num_ranks} ranks."
        )
    sends_per_tile = 2 if two_shot else body.rows_per_block
    normalized, new_residual = low_latency.call(
        body.two_shot_low_latency if two_shot else body.one_shot_low_latency,
        place,
        [x, residual, scale],
        body.out_type,
        channels=channels,
        plan=plan,
        num_sends=sends_per_tile * body.tiles_of_warpgroup,
        name=f"ep_all_reduce_rms_norm_{'two' if two_shot else 'one'}_shot_ll",
        scratch_types=body.scratch_types,
    )
    return normalized, new_residual


@dataclasses.dataclass(frozen=True)
class _Body:
    """The kernel of `all_reduce_rms_norm`: its static arguments, and its body."""

    num_rows: int
    padded: int
    dtype: Any
    residual_dtype: Any
    hidden: int
    eps: float
    two_shot: bool
    fabric: Any  # a fabric, or channels of the low-latency protocol
    plan: TilePlan

    def __post_init__(self) -> None:
        if self.padded % self.vector or self.padded < self.tile:
            raise ValueError(
                f"a row must be whole vectors of {self.vector} elements and at least a tile of "
                f"{self.tile}, but has {self.padded}."
            )

    @property
    def out_type(self) -> list[jax.ShapeDtypeStruct]:
        shape = (self.num_rows, self.padded)
        return [jax.ShapeDtypeStruct(shape, dtype) for dtype in (self.dtype, self.residual_dtype)]

    @property
    def scratch_types(self) -> dict[str, Any]:
        sums = self.plan.num_warpgroups * vectors.SUMS_OF_WARPGROUP
        return dict(
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
    def _one_row(self) -> bool:
        """Whether each block has one row, so that it may load its operands before it waits."""
        return self.plan.num_blocks == self.num_rows

    @property
    def tiles_per_row(self) -> int:
        return pl.cdiv(self.padded, self.tile)

    @property
    def tiles_of_warpgroup(self) -> int:
        """The number of tiles of a row that each warpgroup handles."""
        return pl.cdiv(self.tiles_per_row, self.plan.num_warpgroups)

    @property
    def rows_per_block(self) -> int:
        return pl.cdiv(self.num_rows, self.plan.num_blocks)

    def __call__(self, x, residual, scale, normalized, new_residual, *, squares, together):
        fabric = self.fabric
        first = lax.axis_index("block") * self.rows_per_block
        num_rows = jnp.clip(self.num_rows - first, 0, self.rows_per_block)
        operands = functools.partial(self._row, fabric.mine(residual))

        def norm(row, residuals, buffer, signal=None):
            sums = self._row_of_sums(x, normalized, row)
            if signal:
                fabric.delay_point(1)
            refs = (fabric.mine(normalized), fabric.mine(new_residual), buffer, together)
            self._norm(sums, row, residuals, scales, *refs, signal)

        def norm_row(i, _):
            norm(first + i, operands(first + i), squares.at[lax.rem(i, jnp.int32(2))])
            return _

        fabric.delay_point(0)
        fabric.connect()
        scales = self._row(fabric.mine(scale))
        residuals = operands(first) if self._one_row else None
        if self.two_shot:
            self._sum_share(x, normalized, first, num_rows)
            fabric.delay_point(1)
            self._meet(together)
            self._signal(release=True)
            self._wait()
            fabric.delay_point(2)
        if self._one_row:
            signal = None if self.two_shot else lambda: self._signal(release=False)
            norm(first, residuals, squares.at[0], signal)
        else:
            lax.fori_loop(0, num_rows, norm_row, None)
        if not self.two_shot:
            if not self._one_row:
                fabric.delay_point(1)
                self._meet(together)
                self._signal(release=False)
            self._wait()

    def one_shot_low_latency(self, endpoint, x, residual, scale, *results, **scratch):
        """Runs the one-shot kernel over the low-latency protocol.

        Every block handles `rows_per_block` rows: past the end, it computes the last row again.
        """
        first = lax.axis_index("block") * self.rows_per_block
        rows = [jnp.minimum(first + i, self.num_rows - 1) for i in range(self.rows_per_block)]
        count = self.tiles_of_warpgroup
        for i, row in enumerate(rows):
            for j, tile in enumerate(self._row(x, row)):
                endpoint.send(i * count + j, [tile] * len(endpoint.peers))
        scales = self._row(scale)
        endpoint.delay_point(1)
        for i, row in enumerate(rows):
            old, mine = self._row(residual, row), self._row(x, row)
            sums = [endpoint.sum(i * count + j, tile) for j, tile in enumerate(mine)]
            self._norm_low_latency(i, sums, row, old, scales, *results, **scratch)

    def two_shot_low_latency(self, endpoint, x, residual, scale, *results, **scratch):
        """Runs the two-shot kernel over the low-latency protocol.

        Each rank sums one of its block's N rows, and sends the sums to all ranks. Past the end, it
        computes the last row again.
        """
        first = lax.axis_index("block") * self.fabric.num_ranks
        ranks, count = [endpoint.rank, *endpoint.peers], self.tiles_of_warpgroup
        mine, *others = [jnp.minimum(first + rank, self.num_rows - 1) for rank in ranks]
        parts = [self._row(x, row) for row in others]
        for j in range(count):
            endpoint.send(j, [part[j] for part in parts])
        scales, old, part = self._row(scale), self._row(residual, mine), self._row(x, mine)
        endpoint.delay_point(1)
        sums = [endpoint.sum(j, tile) for j, tile in enumerate(part)]
        for j, tile in enumerate(sums):
            endpoint.send(count + j, [tile] * len(others))
        self._norm_low_latency(0, sums, mine, old, scales, *results, **scratch)
        arrived = [endpoint.receive(count + j, (self.tile,), self.dtype) for j in range(count)]
        for i, row in enumerate(others):
            sums, old = [tiles_of_peers[i] for tiles_of_peers in arrived], self._row(residual, row)
            self._norm_low_latency(i + 1, sums, row, old, scales, *results, **scratch)

    def _norm_low_latency(self, i, sums, row, old, scales, *results, squares, together):
        """Adds the residual to the sums of a block's i-th row, normalizes and stores it."""
        normalized, new_residual = results
        refs = (normalized, new_residual, squares.at[i % 2], together)
        self._norm(sums, row, old, scales, *refs, signal=None)

    def _row(self, ref, *row):
        """Loads this warpgroup's tiles of a row of `ref` into registers, a list of arrays."""
        return [
            vectors.load(self.fabric, ref.at[(*row, where)], self.vector)
            for where in self._my_tiles()
        ]

    def _sum_share(self, x, out, first, num_rows):
        """Sums this rank's share, every N-th tile of the block's rows, into all ranks' `out`."""
        fabric, per_row = self.fabric, jnp.int32(self.tiles_per_row)
        rank, warpgroup = fabric.rank(), lax.axis_index("warpgroup")
        share = fabric.num_ranks * self.plan.num_warpgroups
        start = rank + fabric.num_ranks * warpgroup

        def sum_tile(i, _):
            index = start + i * share
            row = first + lax.div(index, per_row)
            where = (row, self._slice(lax.rem(index, per_row)))
            total = tiles.sum_of_ranks(fabric, x, *where)
            tiles.put(fabric, out, where, total.astype(self.dtype))
            return _

        count = lax.div(num_rows * per_row - start + (share - 1), jnp.int32(share))
        lax.fori_loop(0, jnp.maximum(count, 0), sum_tile, None)

    def _row_of_sums(self, x, normalized, row):
        """Returns this warpgroup's tiles of a row of sums, reading peers if in one shot."""
        if not self.two_shot:
            return [
                tiles.sum_of_ranks(self.fabric, x, row, where).astype(self.dtype)
                for where in self._my_tiles()
            ]
        return self._row(self.fabric.mine(normalized), row)

    def _norm(
        self, sums, row, residuals, scales, normalized, new_residual, squares, together, signal
    ):
        """Adds the residual to a row of sums, normalizes it, and stores both results.

        `sums`, `residuals` and `scales` are this warpgroup's tiles. `signal`, if given, is called
        once all warpgroups have read their parts of the row.
        """
        fabric, vector, warpgroup = self.fabric, self.vector, lax.axis_index("warpgroup")
        totals = [
            (total.astype(jnp.float32) + old.astype(jnp.float32)).astype(self.residual_dtype)
            for total, old in zip(sums, residuals, strict=True)
        ]
        for total, where in zip(totals, self._my_tiles(), strict=True):
            vectors.store(fabric, [new_residual.at[row, where]], total, vector)

        values = [total.astype(jnp.float32) for total in totals]
        squares_of_tiles = [self._own(i, value * value) for i, value in enumerate(values)]
        square = functools.reduce(jnp.add, squares_of_tiles)
        parts = pl.ds(warpgroup * vectors.SUMS_OF_WARPGROUP, vectors.SUMS_OF_WARPGROUP)
        vectors.partial_sums(fabric, square, squares.at[parts], vector)
        self._meet(together)
        if signal:
            signal()
        fabric.barrier()  # for the simulator, where a warpgroup arrives as one
        total_square = squares[0]
        for i in range(1, self.plan.num_warpgroups * vectors.SUMS_OF_WARPGROUP):
            total_square = total_square + squares[i]
        factor = lax.rsqrt(total_square * (1 / self.hidden) + self.eps)
        for value, weight, where in zip(values, scales, self._my_tiles(), strict=True):
            normal = value * factor * weight.astype(jnp.float32)
            tiles.store(fabric, normalized.at[row, where], normal.astype(self.dtype))

    def _my_tiles(self):
        """Returns the slices of a row that are this warpgroup's tiles.

        The last tile of a row is moved back so that it ends with the row.
        """
        return [self._slice(index) for index in self._my_indices()]

    def _my_indices(self):
        return [
            lax.axis_index("warpgroup") + i * self.plan.num_warpgroups
            for i in range(self.tiles_of_warpgroup)
        ]

    def _slice(self, index):
        return pl.ds(jnp.minimum(index * self.tile, self.padded - self.tile), self.tile)

    def _own(self, i, value):
        """Sets those elements of this warpgroup's i-th tile to 0 that the tile before also has.

        So the sum of squares counts no element of an overlap twice.
        """
        index = self._my_indices()[i]
        exact = self.tiles_per_row * self.tile == self.padded
        if exact and (i + 1) * self.plan.num_warpgroups <= self.tiles_per_row:
            return value
        counted = index * self.tile - jnp.minimum(index * self.tile, self.padded - self.tile)
        position = fb.iota(self.fabric, self.tile, self.vector)
        return jnp.where(position >= counted, value, jnp.zeros_like(value))

    def _meet(self, together):
        """Makes all warpgroups of the block wait for each other."""
        plgpu.barrier_arrive(together)
        plgpu.barrier_wait(together)

    def _signal(self, *, release):
        """Signals that this block has put the sums of its share, or read all that it needs.

        The caller has made the block's warpgroups wait for each other before.
        """

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            self.fabric.signal(_SUMMED, 1, release=release)

    def _wait(self):
        """Waits for the signal of the block of this index of every rank."""
        self.fabric.wait(_SUMMED, 1, "all_reduce_rms_norm")
