"""The base of both kernels of a weighted combine's gradient: operands, results and the filler.

`combine_grad` is the kernel for long rows, `combine_grad_of_short_rows` the one for short rows. In
both, a cotangent crosses the link once per (token, rank), read by the rank that needs it. Every
rank knows the routes, so a block waits for its peers only at its end: it signals that it has read
their memory and written its part of their results, and waits for the same signal of each peer.
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
from pallas_kernels.exchange.plan import Plan, Window, pad_last
from pallas_kernels.fabric import fabric as fb

_DONE = 0  # kind of signal, sent once


@dataclasses.dataclass(frozen=True)
class CombineGrad:
    """A kernel of a weighted combine's gradient: its static arguments, and the filler's code.

    Block b of every rank handles the same range of tokens of every owner, the rank whose tokens
    they are. A subclass adds the other warpgroups: it defines `num_warpgroups` and `__call__`, and
    adds to `scratch_types`.
    """

    num_tokens: int
    hidden: int
    top_k: int
    dtype: Any
    fabric: fb.Fabric
    plan: Plan
    window: Window
    expert_rows: ExpertRows

    @property
    def num_warpgroups(self) -> int:
        raise NotImplementedError

    def scratch_types(self) -> dict[str, Any]:
        """Returns the scratch of the filler, and the windows of all owners' rows and weights."""
        window = (self.fabric.num_ranks, self.window.width)
        return dict(
            **self.expert_rows.scratch_types(),
            window_rows=plgpu.SMEM(window, jnp.int32),
            window_weights=plgpu.SMEM(window, jnp.float32),
        )

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        raise NotImplementedError

    @classmethod
    def run(
        cls, g: jax.Array, topk_weights: jax.Array, y: jax.Array, topk_idx: jax.Array,
        rows: jax.Array, counts: jax.Array, *,
        fabric: fb.Fabric, plan: Plan, expert_alignment: int, fair: bool,
        zero_unused: bool, into: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """Runs the kernel; arguments and results are those of `combine_grad.combine_grad`."""
        lead, (num_ranks, num_tokens, top_k) = rows.shape[:-3], rows.shape[-3:]
        capacity, hidden = y.shape[-2:]
        of_experts = ExpertRows(
            fabric, plan.num_blocks, counts.shape[-1], capacity, expert_alignment,
            parts=[(hidden, y.dtype)], fair=fair, zero_unused=zero_unused,
            adds=into is not None,
        )  # fmt: skip
        window = Window.of(plan.window_tokens, plan, num_tokens, top_k)
        kernel = cls(num_tokens, hidden, top_k, y.dtype, fabric, plan, window, of_experts)
        flat = num_tokens * top_k
        out_type = [
            jax.ShapeDtypeStruct((capacity, hidden), y.dtype),
            jax.ShapeDtypeStruct((flat,), jnp.float32),
        ]
        call = fb.kernel(
            fabric,
            kernel,
            name="ep_combine_grad",
            num_blocks=plan.num_blocks,
            num_warpgroups=kernel.num_warpgroups,
            out_type=out_type if into is None else out_type[1:],
            scratch_types=kernel.scratch_types(),
            shared=(0, 1, 7),
        )
        operands = (
            g,
            window.pad(topk_weights.reshape(*lead, flat), 0),
            y,
            topk_idx.reshape(*lead, flat),
            window.pad(rows.reshape(*lead, num_ranks, flat), fb.NOWHERE),
            pad_last(counts, of_experts.count_width - counts.shape[-1]),
        )
        if into is None:
            dy, dweights = call(*operands)
        else:
            ((dy,), (dweights,)) = fb.update_in_place([into], lambda refs: call(*operands, *refs))
        return dy, dweights.reshape(*lead, num_tokens, top_k)

    def token_range(self) -> tuple[jax.Array, jax.Array]:
        """Returns this block's first token, and the end of its tokens."""
        first, count = self.plan.tokens_of_block(lax.axis_index("block"), self.num_tokens)
        return first, first + count

    def num_windows(self) -> jax.Array:
        """Returns the number of windows of routes that this block's tokens take."""
        first, end = self.token_range()
        return lax.div(end - first + (self.window.tokens - 1), jnp.int32(self.window.tokens))

    def owner(self, i: jax.Array | int) -> jax.Array:
        """Returns the i-th rank in the order in which this block handles owners."""
        offset = fb.first_peer(self.fabric)
        return lax.rem(i + offset, jnp.int32(self.fabric.num_ranks))

    def finish(self) -> None:
        """Signals that this block is done with its peers' memory; waits for the same of each peer.

        The calling warpgroup must know that the block's reads from peers have arrived, and that its
        writes to peers were made.
        """
        fabric = self.fabric
        fabric.stage(1)
        fabric.signal(_DONE, 1)
        fabric.stage(2)
        fabric.wait(_DONE, 1, "the gradient of combine")

    def fill(self, topk_idx: Any, counts: Any, dy: Any, dweights: Any, **scratch: Any) -> None:
        """Writes zeros to dy, as `ExpertRows.fill`, and to dweights of choices of no expert."""
        fabric, of_experts, top_k = self.fabric, self.expert_rows, self.top_k
        of_experts.fetch_counts(counts, **scratch)

        def clear_token(token: jax.Array, _: None) -> None:
            entries = [token * top_k + choice for choice in range(top_k)]
            experts = [fabric.mine(topk_idx)[entry] for entry in entries]
            for entry, expert in zip(entries, experts, strict=True):

                @pl.when((expert < 0) | (expert >= of_experts.num_experts))
                def _(entry: jax.Array = entry) -> None:
                    fabric.mine(dweights)[entry] = jnp.float32(0)

        lax.fori_loop(*self.token_range(), clear_token, None)
        of_experts.lay_out(**scratch)
        of_experts.fill([dy], **scratch)
