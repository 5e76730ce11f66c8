"""Dispatch into the rank-major layout: token t of source rank r lies in row r · T + t.

The row of a token at a peer follows from the source rank and the token alone, and a token has one
row there however many of its experts are there. So nothing is exchanged before rows are sent, and
nothing is copied after they have arrived. Block b of every rank handles the same tokens, with two
warpgroups:

  sender    puts rows and lists to the peers (`sender` describes it); a list holds a token's local
            expert ids at the peer, -1 for choices of other ranks, and, if asked for, weights;
  receiver  reads the lists as they arrive, and writes zeros to the row of a token that has no
            expert on this rank.
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

from pallas_kernels.exchange.plan import Plan, Row
from pallas_kernels.exchange.sender import PUT, Sender
from pallas_kernels.exchange.windows import open_window
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.hardware import padded_columns


def rank_dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    *,
    num_experts: int,
    fabric: fb.Fabric,
    plan: Plan,
    wire_dtype: Any = None,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array | None]:
    """Sends rows, and lists of their experts and weights, to the rank-major layout of each rank.

    With stacked ranks, every array has a leading axis of N.

    Args:
      x: [T, H]; H · itemsize a multiple of 128 bytes.
      topk_idx: [T, K] int32.
      topk_weights: [T, K] float32, or None.
      num_experts: E.
      fabric: how ranks reach each other.
      plan: number of blocks, tokens of a step, and depth of the ring.
      wire_dtype: None; or float8_e4m3fn, in which rows are sent and received, with a scale for
        every 128 values; then H is a multiple of 512.

    Returns:
      tokens ([N · T, H],), or with a wire_dtype ([N · T, H], scales [N · T, H / 128]);
      local_topk_idx [N, T, K] int32, -1 where the choice is of another rank's expert;
      topk_weights [N, T, K] float32, 0 where the choice is of another rank's expert, or None if
      none were given.
    """
    num_tokens, top_k = topk_idx.shape[-2:]
    lead, num_ranks = x.shape[:-2], fabric.num_ranks
    choices = topk_idx
    if topk_weights is not None:
        bits = lax.bitcast_convert_type(topk_weights, jnp.int32)
        choices = jnp.concatenate([topk_idx, bits], axis=-1)
    width = choices.shape[-1]
    row = Row(x.shape[-1], x.dtype, wire_dtype)
    sender = Sender(fabric, plan, num_tokens, row, num_words=width)
    kernel = _RankDispatch(num_experts, top_k, sender)
    flat = choices.reshape(*lead, num_tokens * width)
    *parts, lists = kernel.call(x, sender.window.pad(flat, fb.NOWHERE))
    lists = lists[..., : num_tokens * width].reshape(*lead, num_ranks, num_tokens, width)
    if topk_weights is None:
        return tuple(parts), lists, None
    weights = lax.bitcast_convert_type(lists[..., top_k:], jnp.float32)
    return tuple(parts), lists[..., :top_k], weights


@dataclasses.dataclass(frozen=True)
class _RankDispatch:
    """The kernel of `rank_dispatch`: its static arguments, and the warpgroups' code."""

    num_experts: int
    top_k: int
    sender: Sender  # its lists hold `top_k` experts, and then as many weights or none

    @property
    def fabric(self) -> fb.Fabric:
        return self.sender.fabric

    def call(self, *operands: jax.Array) -> tuple[jax.Array, ...]:
        sender, num_ranks = self.sender, self.fabric.num_ranks
        num_rows = num_ranks * sender.num_tokens
        return fb.kernel(
            self.fabric,
            self,
            name="ep_rank_dispatch",
            num_blocks=sender.plan.num_blocks,
            num_warpgroups=2,
            out_type=[
                *(jax.ShapeDtypeStruct((num_rows, width), t) for width, t in sender.row.parts),
                jax.ShapeDtypeStruct((num_ranks, sender.window.total), jnp.int32),
            ],
            scratch_types=self._scratch_types(),
            shared=tuple(range(2, 3 + len(sender.row.parts))),
        )(*operands)

    def _scratch_types(self) -> dict[str, Any]:
        sender = self.sender
        return dict(
            **sender.scratch_types(),
            step_rows=plgpu.SMEM((self.fabric.num_ranks, sender.step_window.width), jnp.int32),
            zeros=[plgpu.SMEM((padded_columns(width, t),), t) for width, t in sender.row.parts],
        )

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        x, choices, *tokens, lists = refs
        warpgroup = lax.axis_index("warpgroup")
        fabric, sender = self.fabric, self.sender

        @pl.when(warpgroup == 0)
        def _sender():
            fabric.delay_point(0)
            sender.fetch_first(x, **scratch)
            fabric.connect()

            def sources():
                return [fabric.mine(choices)]

            sender.open_window(sources, 0, **scratch)
            sender.make_ready(x, 0, **scratch)
            sender.send(
                x,
                sources,
                tokens,
                lists,
                lists_for=functools.partial(self._lists_for, **scratch),
                place_of=self._place_of,
                **scratch,
            )

        @pl.when(warpgroup == 1)
        def _receiver():
            self._receive_lists(lists, tokens, **scratch)

    def _lists_for(self, entry, peers, *, choices, **_):
        """Returns the list that each of `peers` gets of the token whose words start at `entry`."""
        words = [choices[0, entry + i] for i in range(self.sender.num_words)]
        experts, weights = words[: self.top_k], words[self.top_k :]
        per_rank = jnp.int32(self.num_experts // self.fabric.num_ranks)
        lists = []
        for peer in peers:
            local = [expert - peer * per_rank for expert in experts]
            here = [
                (expert >= 0) & (expert < self.num_experts) & (i >= 0) & (i < per_rank)
                for expert, i in zip(experts, local, strict=True)
            ]
            ids = [jnp.where(h, i, fb.NOWHERE) for h, i in zip(here, local, strict=True)]
            ids += [jnp.where(h, w, 0) for h, w in zip(here, weights, strict=False)]
            lists.append(ids)
        return lists

    def _place_of(self, words, i):
        first_token, _ = self.sender.range()
        token = self.fabric.rank() * self.sender.num_tokens + first_token + i
        return jnp.where(self._any_expert(words), token, fb.NOWHERE)

    def _any_expert(self, words):
        return fb.any_row(words[: self.top_k])

    def _receive_lists(self, lists_ref, tokens, *, step_rows, zeros, **_):
        fabric, sender, window = self.fabric, self.sender, self.sender.step_window
        num_ranks, step_tokens, width = fabric.num_ranks, sender.step_tokens, sender.num_words
        first_token, num_tokens = sender.range()
        for part in zeros:
            part[...] = jnp.zeros(part.shape, part.dtype)
        plgpu.commit_smem()

        def receive_step(step, carry):
            fabric.wait(PUT, step + 1, "dispatch")
            fabric.delay_point(2)
            step_token = first_token + step * step_tokens
            sources = ((source, fabric.mine(lists_ref), source) for source in range(num_ranks))
            start = open_window(fabric, window, step_token * width, (step_rows, sources))

            def fill_pair(pair, carry):
                source, i = lax.rem(pair, num_ranks), lax.div(pair, num_ranks)
                entry = (step_token + i) * width - start
                words = [step_rows[source, entry + word] for word in range(self.top_k)]
                row = source * sender.num_tokens + step_token + i
                for part, ref, (columns, _) in zip(zeros, tokens, sender.row.parts, strict=True):
                    fb.put_if(
                        fabric,
                        ~self._any_expert(words),
                        part.at[pl.ds(0, columns)],
                        fabric.mine(ref).at[row],
                    )
                return carry

            pairs = jnp.minimum(num_tokens - step * step_tokens, step_tokens)
            lax.fori_loop(0, pairs * num_ranks, fill_pair, None)
            plgpu.commit_smem_to_gmem_group()
            return carry

        num_steps = sender.num_steps()
        lax.fori_loop(0, num_steps, receive_step, None)

        @pl.when(num_steps == 0)
        def _():  # no token is received, but this rank must not end before its peers have signalled
            fabric.wait(PUT, 1, "dispatch")

        plgpu.wait_smem_to_gmem(0)
