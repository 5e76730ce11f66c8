"""All-reduce, residual add and RMSNorm in one pass over the data.

Block b of every rank handles the same rows of [T, H]; its warpgroups share each row.

  one_shot  every rank reads its block's rows from all ranks, sums them, and normalizes the sums
            from registers;
  two_shot  every rank sums a share of its block's rows and writes the sums to the `normalized`
            output of all ranks; once all shares have arrived, each rank normalizes them in place.

    one_shot   x of all ranks -- link --> sums in registers --> + residual --> RMSNorm --> results
    two_shot   x of all ranks -- link --> sums of a share --> link --> normalized of all ranks
               normalized --> sums in registers --> + residual --> RMSNorm --> results

Every rank adds its own residual and normalizes all rows itself, so residuals may differ between
ranks. The fusion is TokenWeave's (Gond et al., 2025), which also splits the normalization over
ranks.
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
from pallas_kernels.fabric.low_latency import Endpoint

# The kind of signal: this block has put the sums of its share (two_shot) or has read all inputs
# (one_shot).
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
        scratch_types=dict(scratch=body.scratch()),
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
        scratch_types=dict(scratch=body.scratch()),
    )
    return normalized, new_residual


class _Refs(NamedTuple):
    """The arrays in global memory."""

    x: Any  # [T, H]; of every rank, but over the low-latency protocol
    residual: Any  # [T, H]
    scale: Any  # [H]
    normalized: Any  # [T, H]; of every rank in two shots, but over the low-latency protocol
    new_residual: Any  # [T, H]


class _Scratch(NamedTuple):
    """The shared memory. Rows use its halves in turn."""

    squares: Any  # [2, warps] float32: partial sums of a row's squares
    together: Any  # barrier: where the block's warpgroups meet


class _Row(NamedTuple):
    """A row to normalize, and this warpgroup's tiles of it."""

    index: Any
    sums: Sequence[jax.Array]
    residual: Sequence[jax.Array]
    scale: Sequence[jax.Array]


@dataclasses.dataclass(frozen=True)
class _Body:
    """The kernels of `all_reduce_rms_norm`: one body for each protocol and number of shots.

    Attributes:
      num_rows: T.
      padded: the columns of a row.
      dtype: the dtype of x and of the normalized rows.
      residual_dtype: the dtype of the residual.
      hidden: the columns that are data.
      eps: added to the mean square.
      two_shot: whether every rank sums a share of the rows, instead of all of them.
      fabric: how ranks reach each other, or channels of the low-latency protocol.
      plan: number of blocks, and of warpgroups that share a row.
    """

    num_rows: int
    padded: int
    dtype: Any
    residual_dtype: Any
    hidden: int
    eps: float
    two_shot: bool
    fabric: Any
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

    def scratch(self) -> _Scratch:
        """Returns the types of the scratch."""
        sums = self.plan.num_warpgroups * vectors.SUMS_OF_WARPGROUP
        return _Scratch(
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
        """Whether each block has one row; it then loads its operands before it waits."""
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

    def __call__(self, *arrays: Any, scratch: _Scratch) -> None:
        fabric = self.fabric
        refs, here = _Refs(*arrays), _Refs(*map(fabric.mine, arrays))
        first = lax.axis_index("block") * self.rows_per_block
        num_rows = jnp.clip(self.num_rows - first, 0, self.rows_per_block)

        def norm(row: Any, residual: Any, half: Any, signal: Any = None) -> None:
            sums = self._row_of_sums(refs, row)
            if signal:
                fabric.delay_point(1)
            self._norm(_Row(row, sums, residual, scale), here, half, scratch, signal)

        def norm_row(i: jax.Array, _: None) -> None:
            norm(first + i, self._load(here.residual, first + i), lax.rem(i, jnp.int32(2)))

        fabric.delay_point(0)
        fabric.connect()
        scale = self._load(here.scale)
        residual = self._load(here.residual, first) if self._one_row else None
        if self.two_shot:
            self._sum_share(refs, first, num_rows)
            fabric.delay_point(1)
            self._meet(scratch)
            self._signal(release=True)
            self._wait()
            fabric.delay_point(2)
        if self._one_row:
            signal = None if self.two_shot else lambda: self._signal(release=False)
            norm(first, residual, 0, signal)
        else:
            lax.fori_loop(0, num_rows, norm_row, None)
        if not self.two_shot:
            if not self._one_row:
                fabric.delay_point(1)
                self._meet(scratch)
                self._signal(release=False)
            self._wait()

    def one_shot_low_latency(self, endpoint: Endpoint, *arrays: Any, scratch: _Scratch) -> None:
        """Runs the one-shot kernel over the low-latency protocol.

        Every block handles `rows_per_block` rows: past the end, it computes the last row again.
        """
        refs, count = _Refs(*arrays), self.tiles_of_warpgroup
        first = lax.axis_index("block") * self.rows_per_block
        rows = [jnp.minimum(first + i, self.num_rows - 1) for i in range(self.rows_per_block)]
        for i, row in enumerate(rows):
            for j, tile in enumerate(self._load(refs.x, row)):
                endpoint.send(i * count + j, [tile] * len(endpoint.peers))
        scale = self._load(refs.scale)
        endpoint.delay_point(1)
        for i, row in enumerate(rows):
            old, mine = self._load(refs.residual, row), self._load(refs.x, row)
            sums = [endpoint.sum(i * count + j, tile) for j, tile in enumerate(mine)]
            self._norm(_Row(row, sums, old, scale), refs, i % 2, scratch)

    def two_shot_low_latency(self, endpoint: Endpoint, *arrays: Any, scratch: _Scratch) -> None:
        """Runs the two-shot kernel over the low-latency protocol.

        Each rank sums one of its block's N rows, and sends the sums to all ranks. Past the end, it
        computes the last row again.
        """
        refs, count = _Refs(*arrays), self.tiles_of_warpgroup
        first = lax.axis_index("block") * self.fabric.num_ranks
        ranks = [endpoint.rank, *endpoint.peers]
        mine, *others = [jnp.minimum(first + rank, self.num_rows - 1) for rank in ranks]
        parts = [self._load(refs.x, row) for row in others]
        for j in range(count):
            endpoint.send(j, [part[j] for part in parts])
        scale, old = self._load(refs.scale), self._load(refs.residual, mine)
        part = self._load(refs.x, mine)
        endpoint.delay_point(1)
        sums = [endpoint.sum(j, tile) for j, tile in enumerate(part)]
        for j, tile in enumerate(sums):
            endpoint.send(count + j, [tile] * len(others))
        self._norm(_Row(mine, sums, old, scale), refs, 0, scratch)
        arrived = [endpoint.receive(count + j, (self.tile,), self.dtype) for j in range(count)]
        for i, row in enumerate(others):
            sums, old = [of_peers[i] for of_peers in arrived], self._load(refs.residual, row)
            self._norm(_Row(row, sums, old, scale), refs, (i + 1) % 2, scratch)

    def _load(self, ref: Any, *row: Any) -> list[jax.Array]:
        """Loads this warpgroup's tiles of a row of `ref` into registers."""
        return [
            vectors.load(self.fabric, ref.at[(*row, where)], self.vector)
            for where in self._my_tiles()
        ]

    def _sum_share(self, refs: _Refs, first: jax.Array, num_rows: jax.Array) -> None:
        """Sums this rank's share of the block's rows into `normalized` of all ranks.

        The share is every N-th tile of `num_rows` rows from `first` on.
        """
        fabric, per_row = self.fabric, jnp.int32(self.tiles_per_row)
        rank, warpgroup = fabric.rank(), lax.axis_index("warpgroup")
        share = fabric.num_ranks * self.plan.num_warpgroups
        start = rank + fabric.num_ranks * warpgroup

        def sum_tile(i: jax.Array, _: None) -> None:
            index = start + i * share
            row = first + lax.div(index, per_row)
            where = (row, self._slice(lax.rem(index, per_row)))
            total = tiles.sum_of_ranks(fabric, refs.x, *where)
            tiles.put(fabric, refs.normalized, where, total.astype(self.dtype))

        count = lax.div(num_rows * per_row - start + (share - 1), jnp.int32(share))
        lax.fori_loop(0, jnp.maximum(count, 0), sum_tile, None)

    def _row_of_sums(self, refs: _Refs, row: jax.Array) -> list[jax.Array]:
        """Returns this warpgroup's tiles of a row of sums; in one shot, reads the peers."""
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
        scratch: _Scratch,
        signal: Callable[[], None] | None = None,
    ) -> None:
        """Adds the residual to a row of sums, normalizes it, and stores both results.

        `half` of the scratch is used. `signal`, if given, is called once all warpgroups have read
        their parts of the row.
        """
        fabric, vector, warpgroup = self.fabric, self.vector, lax.axis_index("warpgroup")
        totals = [
            (total.astype(jnp.float32) + old.astype(jnp.float32)).astype(self.residual_dtype)
            for total, old in zip(row.sums, row.residual, strict=True)
        ]
        for total, where in zip(totals, self._my_tiles(), strict=True):
            vectors.store(fabric, [refs.new_residual.at[row.index, where]], total, vector)

        values = [total.astype(jnp.float32) for total in totals]
        squares_of_tiles = [self._own(i, value * value) for i, value in enumerate(values)]
        square = functools.reduce(jnp.add, squares_of_tiles)
        parts = pl.ds(warpgroup * vectors.SUMS_OF_WARPGROUP, vectors.SUMS_OF_WARPGROUP)
        squares = scratch.squares.at[half]
        vectors.partial_sums(fabric, square, squares.at[parts], vector)
        self._meet(scratch)
        if signal:
            signal()
        fabric.barrier()  # the simulator runs a warpgroup as one thread
        total_square = squares[0]
        for i in range(1, self.plan.num_warpgroups * vectors.SUMS_OF_WARPGROUP):
            total_square = total_square + squares[i]
        factor = lax.rsqrt(total_square * (1 / self.hidden) + self.eps)
        for value, weight, where in zip(values, row.scale, self._my_tiles(), strict=True):
            normal = value * factor * weight.astype(jnp.float32)
            tiles.store(fabric, refs.normalized.at[row.index, where], normal.astype(self.dtype))

    def _my_tiles(self) -> list[Any]:
        """Returns the slices of a row that are this warpgroup's tiles.

        The last tile of a row is moved back so that it ends with the row.
        """
        return [self._slice(index) for index in self._my_indices()]

    def _my_indices(self) -> list[jax.Array]:
        return [
            lax.axis_index("warpgroup") + i * self.plan.num_warpgroups
            for i in range(self.tiles_of_warpgroup)
        ]

    def _slice(self, index: jax.Array) -> Any:
        return pl.ds(jnp.minimum(index * self.tile, self.padded - self.tile), self.tile)

    def _own(self, i: int, value: jax.Array) -> jax.Array:
        """Zeroes the elements of this warpgroup's i-th tile that overlap the previous tile.

        The sum of squares then counts each element once.
        """
        index = self._my_indices()[i]
        exact = self.tiles_per_row * self.tile == self.padded
        if exact and (i + 1) * self.plan.num_warpgroups <= self.tiles_per_row:
            return value
        counted = index * self.tile - jnp.minimum(index * self.tile, self.padded - self.tile)
        position = fb.iota(self.fabric, self.tile, self.vector)
        return jnp.where(position >= counted, value, jnp.zeros_like(value))

    def _meet(self, scratch: _Scratch) -> None:
        """Makes all warpgroups of the block wait for each other."""
        plgpu.barrier_arrive(scratch.together)
        plgpu.barrier_wait(scratch.together)

    def _signal(self, *, release: bool) -> None:
        """Signals that this block has put the sums of its share, or read all that it needs.

        The caller must have made the block's warpgroups wait for each other.
        """

        @pl.when(lax.axis_index("warpgroup") == 0)
        def signal() -> None:
            self.fabric.signal(_SUMMED, 1, release=release)

    def _wait(self) -> None:
        """Waits for the signal of this block's counterpart on every rank."""
        self.fabric.wait(_SUMMED, 1, "all_reduce_rms_norm")
