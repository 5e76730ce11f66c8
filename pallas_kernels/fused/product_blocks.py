"""The thread blocks of a fused kernel that multiply rows while other blocks exchange them.

They are those of `matmul.grouped_matmul`, but for which tiles a block takes, and when. The first
blocks of a kernel's grid exchange rows, so the GPU runs the first of those that multiply beside
them, the *early* ones. The others, as many as there are blocks that exchange rows, start when these
end, and so have fewer tiles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.hardware import LANES, WARP
from pallas_kernels.matmul.gated_matmul import GatedProduct
from pallas_kernels.matmul.grouped_matmul import Product
from pallas_kernels.matmul.kernel import COMPUTERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ArrivingRows(Product):
    """A product of rows that other blocks of the kernel receive.

    Attributes:
      fabric: how ranks reach each other.
      exchange_blocks: the number of blocks before these, which exchange rows.
      head_start: tiles of each early block before the other blocks start.
    """

    fabric: fb.Fabric
    exchange_blocks: int
    head_start: int

    def scratch_types(self, dtype: Any) -> dict[str, Any]:
        least = plgpu.SMEM((COMPUTERS + 1, LANES // WARP), jnp.int32)
        return dict(super().scratch_types(dtype), least=least)

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        self._await(1, **scratch)  # the table of tiles
        super().__call__(*refs, **scratch)
        plgpu.wait_smem_to_gmem(0)

    def block(self) -> jax.Array:
        return lax.axis_index("block") - self.exchange_blocks

    def _await(self, count: Any, *, least: Any, **_: Any) -> jax.Array:
        own = least.at[lax.axis_index("warpgroup")]
        return self.fabric.await_reports(range(self.exchange_blocks), count, own)

    def await_rows(self, end: jax.Array, there: jax.Array, **scratch: Any) -> jax.Array:
        return lax.cond(
            end < there, lambda: there, lambda: self._await(1 + end, least=scratch["least"])
        )

    def each_of(
        self,
        total: jax.Array,
        look_up: Callable[[jax.Array], Any],
        body: Callable[[Any, Any], Any],
        carry: Any,
    ) -> Any:
        block, head_start = self.block(), self.head_start
        early = self.num_blocks - self.exchange_blocks
        head = head_start * early

        def index_of(turn: jax.Array) -> jax.Array:
            late = head + (turn - head_start) * self.num_blocks
            return block + jnp.where(turn < head_start, turn * early, late)

        def turns_of(tiles: jax.Array, blocks: int) -> jax.Array:
            return jnp.maximum(lax.div(tiles - block + (blocks - 1), jnp.int32(blocks)), 0)

        first = jnp.where(block < early, 0, head_start)
        end = jnp.where(total > head, head_start + turns_of(total - head, self.num_blocks), 0)
        end = jnp.where((total <= head) & (block < early), turns_of(total, early), end)

        def looked_up(turn: jax.Array) -> Any:
            return look_up(jnp.minimum(index_of(turn), jnp.maximum(total - 1, 0)))

        def step(turn: jax.Array, both: Any) -> Any:
            tile, carry = both
            return looked_up(turn + 1), body(tile, carry)

        return lax.fori_loop(first, end, step, (looked_up(first), carry))[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProductOfArrivingRows(_ArrivingRows):
    """`Product` of rows that arrive."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedProductOfArrivingRows(_ArrivingRows, GatedProduct):
    """`GatedProduct` of rows that arrive."""
