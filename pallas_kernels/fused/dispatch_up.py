"""Dispatch, and the experts' gated up-projection of the rows while they arrive, in one kernel.

The first blocks exchange rows as `DispatchBySource` says. The others multiply as `GatedProduct`
says, round by round, and await a round's rows before its first tile. There are more blocks than a
GPU runs at a time: the last ones of those that multiply start when the exchange ends, and so have
fewer tiles.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.expert_rows import ExpertRows
from pallas_kernels.exchange.plan import Row
from pallas_kernels.exchange.sender import Sender
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fabric.plan import Plan
from pallas_kernels.fused.by_source import RECEIVED, SENT, DispatchBySource
from pallas_kernels.matmul.gated_matmul import GatedProduct
from pallas_kernels.matmul.grouped_matmul import Tiles


def dispatch_up(
    x: jax.Array,
    topk_idx: jax.Array,
    rhs: tuple[jax.Array, jax.Array],
    gating: Elementwise,
    *,
    keep: bool,
    num_experts: int,
    fabric: fb.Fabric,
    plan: Plan,
    capacity: int,
    expert_alignment: int,
    tiles: Tiles,
    num_cores: int,
    head_start: int,
    fair: bool = False,
    zero_unused: bool = True,
) -> tuple[Any, ...]:
    """Computes `dispatch.dispatch`, and `gated_matmul.gated_product` of the rows it receives.

    With stacked ranks, every array has a leading axis of N.

    Args:
      x: [T, H] bfloat16 or float16; H a multiple of 64.
      topk_idx: [T, K] int32.
      rhs: two [L, H, F] of x's dtype: the matrices of this rank's experts; F is a multiple of
        tiles.part.
      gating: an elementwise function of two arrays.
      keep: whether to return the products too.
      num_experts: E.
      fabric: how ranks reach each other.
      plan: of the blocks that exchange rows, which must be fewer than `num_cores`.
      capacity: R, a multiple of 8.
      expert_alignment: the rows of each expert start at a multiple of this.
      tiles: tile sizes of the products, and depth of buffers.
      num_cores: blocks that the GPU runs at a time, and blocks that multiply.
      head_start: tiles of each of the blocks that multiply from the start, before the others start.
      fair, zero_unused: as of `dispatch.dispatch`; zero_unused also of the products.

    Returns:
      The seven of `dispatch.dispatch`; a tuple of hidden [R, F] and, with `keep`, of the two
      products, [R, F] each, whose rows past the last expert's are zero; and the table of
      `DispatchBySource.table`.
    """
    num_tokens, top_k = topk_idx.shape[-2:]
    lead = x.shape[:-2]
    row = x.shape[-1], x.dtype, None
    exchange = DispatchBySource(
        top_k,
        False,
        Sender(fabric, plan, num_tokens, *row, num_words=top_k),
        ExpertRows(
            fabric,
            plan.num_blocks,
            num_experts,
            capacity,
            expert_alignment,
            Row(*row).parts,
            fair=fair,
            zero_unused=zero_unused,
            fetched=False,
        ),
        heights=tiles.heights,
    )
    product = UpProduct(
        tiles,
        num_cores,
        bool(fabric.interpret),
        rhs[0].shape[-1],
        (x.shape[-1],),
        capacity,
        False,
        zero_unused,
        gating,
        keep,
        fabric=fabric,
        first_block=plan.num_blocks,
        num_local_experts=num_experts // fabric.num_ranks,
        head_start=head_start,
    )
    kernel = DispatchUp(exchange, product)
    flat = (*lead, num_tokens * top_k)
    choices = exchange.sender.window.pad(topk_idx.reshape(flat), fb.NOWHERE)
    hidden = jax.ShapeDtypeStruct((capacity, product.width), x.dtype)
    results = fb.kernel(
        fabric,
        kernel,
        name="ep_dispatch_up",
        num_blocks=plan.num_blocks + num_cores,
        num_warpgroups=3,
        out_type=[*exchange.out_type(), exchange.table, *[hidden] * product.outputs],
        scratch_types={},
        shared=[i + len(rhs) for i in exchange.shared],
    )(x, choices, *rhs)
    *received, table = results[: -product.outputs]
    *products, hidden = results[-product.outputs :]
    return *exchange.shaped(received, topk_idx.shape), (hidden, *products), table


@dataclasses.dataclass(frozen=True)
class DispatchUp:
    """The kernel of `dispatch_up`: blocks that exchange rows, and then blocks that multiply."""

    exchange: DispatchBySource
    product: UpProduct

    def __call__(self, *refs: Any) -> None:
        exchange, product = self.exchange, self.product
        mine = exchange.fabric.mine
        x, choices, *rhs = refs[: 2 + product.matrices]
        *received, table = refs[2 + product.matrices : -product.outputs]
        outs = refs[-product.outputs :]
        exchanges = lax.axis_index("block") < exchange.plan.num_blocks

        # The memory of either kind of block; they use the same.
        @pl.when(exchanges)
        def _exchange():
            pl.run_scoped(
                lambda **scratch: exchange(x, choices, *received, table, **scratch),
                collective_axes="warpgroup",
                **exchange._scratch_types(),
            )

        @pl.when(jnp.logical_not(exchanges))
        def _multiply():
            operands = [mine(received[0]), *map(mine, rhs), mine(table), *map(mine, outs)]
            pl.run_scoped(
                lambda **scratch: product(*operands, **scratch),
                collective_axes="warpgroup",
                **product.scratch_types(x.dtype),
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpProduct(GatedProduct):
    """The blocks that multiply.

    Attributes:
      fabric: how ranks reach each other.
      first_block: the number of blocks before them, which exchange rows.
      num_local_experts: L.
      head_start: as of `dispatch_up`.
    """

    fabric: fb.Fabric
    first_block: int
    num_local_experts: int
    head_start: int

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        self.fabric.await_reports(SENT, 1, self.first_block)
        super().__call__(*refs, **scratch)
        plgpu.wait_smem_to_gmem(0)

    def block(self) -> jax.Array:
        return lax.axis_index("block") - self.first_block

    def order_of(self, table: Any) -> tuple[Any, jax.Array, jax.Array]:
        num_ranks = self.fabric.num_ranks
        last = table.shape[0] - 1 - num_ranks
        ends = [table[last + 1 + i, 0] for i in range(num_ranks)]
        return ends, table[last, 0], table[last, 1]

    def place(self, index: jax.Array, rows: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the place of a tile; those of a round come before those of the next."""
        begin, end = jnp.int32(0), rows[0]
        for before, after in zip(rows, rows[1:], strict=False):
            later = index >= before * self.columns
            begin, end = jnp.where(later, before, begin), jnp.where(later, after, end)
        row, left_edge = super().place(index - begin * self.columns, end - begin)
        return begin + row, left_edge

    def await_rows(self, group: jax.Array, stage: jax.Array) -> tuple[jax.Array, jax.Array]:
        number = lax.div(group, jnp.int32(self.num_local_experts))

        @pl.when(number > stage)
        def _():
            self.fabric.await_reports(RECEIVED, number, self.first_block)

        return lax.rem(group, jnp.int32(self.num_local_experts)), jnp.maximum(stage, number)

    def each_of(self, total: jax.Array, look_up: Any, body: Any, carry: Any) -> Any:
        block, head_start = self.block(), self.head_start
        early = self.num_blocks - self.first_block  # run while rows are exchanged
        head = head_start * early

        def index_of(turn):
            late = head + (turn - head_start) * self.num_blocks
            return block + jnp.where(turn < head_start, turn * early, late)

        def turns_of(tiles, blocks):
            return jnp.maximum(lax.div(tiles - block + (blocks - 1), jnp.int32(blocks)), 0)

        first = jnp.where(block < early, 0, head_start)
        end = jnp.where(total > head, head_start + turns_of(total - head, self.num_blocks), 0)
        end = jnp.where((total <= head) & (block < early), turns_of(total, early), end)

        def looked_up(turn):
            return look_up(jnp.minimum(index_of(turn), jnp.maximum(total - 1, 0)))

        def step(turn, both):
            tile, carry = both
            return looked_up(turn + 1), body(tile, carry)

        return lax.fori_loop(first, end, step, (looked_up(first), carry))[1]
