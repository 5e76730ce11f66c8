"""Dispatch, and the experts' first product of the rows while they arrive, in one kernel.

The first blocks exchange rows, as `ExchangeBlocks` says; the others multiply the rows that have
arrived, as `product_blocks` says. What they compute is bit for bit what the separate kernels do.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.exchange.expert_rows import ExpertRows
from pallas_kernels.exchange.plan import Plan, pad_last
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.elementwise import Elementwise
from pallas_kernels.fused.exchange_blocks import ExchangeBlocks
from pallas_kernels.fused.product_blocks import GatedProductOfArrivingRows, ProductOfArrivingRows
from pallas_kernels.matmul.grouped_matmul import Product, Tiles
from pallas_kernels.matmul.row_tiles import row_tiles


def dispatch_gated(
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
      plan: of the blocks that exchange rows, fewer than `num_cores`.
      capacity: R, a multiple of 8.
      expert_alignment: the rows of each expert start at a multiple of this.
      tiles: tile sizes of the products, and depth of buffers.
      num_cores: blocks that the GPU runs at a time, and blocks that multiply.
      head_start: tiles of each block that multiplies from the start, before the others start.
      fair: as of `dispatch.dispatch`.
      zero_unused: as of `dispatch.dispatch`, and of the products.

    Returns:
      The seven of `dispatch.dispatch`, and a tuple of hidden [R, F] and, with `keep`, of the two
      products, [R, F] each.
    """
    num_tokens, top_k = topk_idx.shape[-2:]
    exchange = _exchange(
        x, num_tokens, top_k, num_experts, capacity, expert_alignment, fabric, plan, tiles,
        routes_known=False, fair=fair, zero_unused=zero_unused,
    )  # fmt: skip
    product = GatedProductOfArrivingRows(
        tiles, num_cores, bool(fabric.interpret), rhs[0].shape[-1], (x.shape[-1],), capacity,
        transpose_rhs=False, zero_unused=zero_unused, gating=gating, keep=keep, fabric=fabric,
        exchange_blocks=plan.num_blocks, head_start=head_start,
    )  # fmt: skip
    choices = exchange.pad(topk_idx.reshape(*topk_idx.shape[:-2], -1))
    received, (*products, hidden) = _Fused(exchange, product).call(
        "dispatch_gated", x, choices, rhs
    )
    tokens, rows, counts, *layout, _ = received
    rows = rows[..., : num_tokens * top_k].reshape(*rows.shape[:-1], num_tokens, top_k)
    return (tokens,), rows, counts[..., :num_experts], *layout, (hidden, *products)


def dispatch_like_product(
    x: jax.Array,
    rows: jax.Array,
    counts: jax.Array,
    group_sizes: jax.Array,
    rhs: jax.Array,
    *,
    transpose_rhs: bool,
    fabric: fb.Fabric,
    plan: Plan,
    capacity: int,
    expert_alignment: int,
    tiles: Tiles,
    num_cores: int,
    head_start: int,
    fair: bool = False,
    zero_unused: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Computes `dispatch.dispatch_like`, and `grouped_matmul.product` of the rows it receives.

    With stacked ranks, every array has a leading axis of N.

    Args:
      x: [T, H] bfloat16 or float16; H a multiple of 64.
      rows: [N, T, K] int32, the result of `dispatch`.
      counts: [N, E] int32, the result of `dispatch`.
      group_sizes: [L] int32, the result of `dispatch`.
      rhs: [L, H, F] of x's dtype, or [L, F, H] with `transpose_rhs`: the matrices of this rank's
        experts; F is a multiple of tiles.part.
      transpose_rhs: whether the matrices are given transposed.
      fabric, plan, capacity, expert_alignment, tiles, num_cores, head_start, fair, zero_unused: as
        of `dispatch_gated`.

    Returns:
      tokens [R, H] and the product [R, F].
    """
    num_tokens, top_k = rows.shape[-2:]
    exchange = _exchange(
        x, num_tokens, top_k, counts.shape[-1], capacity, expert_alignment, fabric, plan, tiles,
        routes_known=True, fair=fair, zero_unused=zero_unused,
    )  # fmt: skip
    product = ProductOfArrivingRows(
        tiles, num_cores, bool(fabric.interpret), rhs.shape[-2 if transpose_rhs else -1],
        (x.shape[-1],), capacity, transpose_rhs=transpose_rhs, zero_unused=zero_unused,
        fabric=fabric, exchange_blocks=plan.num_blocks, head_start=head_start,
    )  # fmt: skip
    flat = exchange.pad(rows.reshape(*rows.shape[:-2], -1))
    counts = pad_last(counts, exchange.expert_rows.count_width - counts.shape[-1])
    table = _tables(group_sizes, tiles.heights, capacity, fabric)
    (tokens,), (out,) = _Fused(exchange, product).call(
        "dispatch_like_product", x, flat, (rhs,), counts, table
    )
    return tokens, out


def _tables(group_sizes: Any, heights: tuple[int, ...], num_rows: int, fabric: fb.Fabric) -> Any:
    if not fabric.stacked:
        return row_tiles(group_sizes, heights, num_rows)
    each = [row_tiles(sizes, heights, num_rows, interpreted=True) for sizes in group_sizes]
    return jnp.stack(each)


def _exchange(
    x, num_tokens, top_k, num_experts, capacity, alignment, fabric, plan, tiles, *,
    routes_known, fair, zero_unused,
):  # fmt: skip
    return ExchangeBlocks(
        fabric,
        plan,
        num_tokens,
        top_k,
        x.shape[-1],
        x.dtype,
        ExpertRows(
            fabric,
            plan.num_blocks,
            num_experts,
            capacity,
            alignment,
            [(x.shape[-1], x.dtype)],
            fair=fair,
            zero_unused=zero_unused,
            count_arrivals=None if routes_known else 1,
        ),
        routes_known,
        tiles.heights,
    )


@dataclasses.dataclass(frozen=True)
class _Fused:
    """A kernel of blocks that exchange rows, and then of blocks that multiply them."""

    exchange: ExchangeBlocks
    product: Product

    def call(
        self, name: str, x: jax.Array, lists: jax.Array, rhs: tuple[jax.Array, ...], *known: Any
    ) -> tuple[Any, Any]:
        """Returns the results of the exchange and of the product.

        `lists` are choices, or rows if routes are known; `known` are then the counts and the table.
        """
        exchange, product = self.exchange, self.product
        outs = [jax.ShapeDtypeStruct((product.num_rows, product.width), x.dtype)] * product.outputs
        operands = (x, lists, *known, *rhs)
        shared = exchange.shared(len(operands))
        results = fb.kernel(
            exchange.fabric,
            self,
            name=f"ep_{name}",
            num_blocks=exchange.num_blocks + product.num_blocks,
            num_warpgroups=3,
            out_type=[*exchange.out_type(), *outs],
            scratch_types={},
            shared=shared,
        )(*operands)
        return results[: -product.outputs], results[-product.outputs :]

    def __call__(self, *refs: Any) -> None:
        exchange, product = self.exchange, self.product
        mine, num_known = exchange.fabric.mine, 2 if exchange.routes_known else 0
        x, lists, *refs = refs  # type: ignore[assignment]
        known, rhs = refs[:num_known], refs[num_known : num_known + product.matrices]
        received = refs[num_known + product.matrices : -product.outputs]
        outs, tokens = refs[-product.outputs :], received[0]
        if exchange.routes_known:
            counts, table = known
            received = [tokens, counts]
        else:
            table = received[-1]
        exchanges = lax.axis_index("block") < exchange.num_blocks

        # Both kinds of block use the same memory.
        @pl.when(exchanges)
        def _exchange() -> None:
            pl.run_scoped(
                lambda **scratch: exchange(x, lists, *received, **scratch),
                collective_axes="warpgroup",
                **exchange.scratch_types(),
            )

        @pl.when(jnp.logical_not(exchanges))
        def _multiply() -> None:
            operands = [mine(tokens), *map(mine, rhs), mine(table), *map(mine, outs)]
            pl.run_scoped(
                lambda **scratch: product(*operands, **scratch),
                collective_axes="warpgroup",
                **product.scratch_types(tokens.dtype),
            )
