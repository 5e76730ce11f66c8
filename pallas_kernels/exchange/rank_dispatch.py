"""Dispatch into the rank-major layout: token t of source rank r lies in row r · T + t.

T is the number of tokens of each rank. A token has one row at a peer however many of its experts
the peer has, and the row follows from the source rank and the token alone. So ranks exchange
nothing before they send rows, and copy no row after it has arrived. Rank s sends its token t to
rank d, whose receive buffer is `tokens`:

  rank s, sender                              rank d
  x[t] --> ring -------------- link --------> tokens[s·T + t]
  experts of t at d, weights - link --------> lists[s, t]       --> receiver: no expert here?
                                              tokens[s·T + t] = 0 <--
  signal: a step of tokens is there --------> block b

Block b of every rank handles the same tokens, with two or three warpgroups:

- sender: writes rows and lists to the peers' memory (see `sender`). A list holds a token's local
  expert ids at the peer, with -1 for choices of other ranks' experts, and optionally the routing
  weights.
- receiver: reads the lists as they arrive, and writes zeros to the row of a token that has no
  expert on this rank.
- quantizer: quantizes the rows that the sender sends, if the wire format is quantized.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.plan import Plan, Row
from pallas_kernels.exchange.sender import PUT, List, Sender
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.hardware import padded_columns
from pallas_kernels.formats import PLAIN, RowFormat


def rank_dispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    topk_weights: jax.Array | None,
    *,
    num_experts: int,
    fabric: fb.Fabric,
    plan: Plan,
    wire: RowFormat = PLAIN,
) -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array | None]:
    """Sends each token, with its local expert ids and weights, to the ranks of its experts.

    Takes `expert_dispatch`'s arguments but `buffer`, and topk_weights, [T, K] float32, or None.

    Returns:
      tokens: the receive buffer ([N · T, H],), or with a quantized wire ([N · T, H], scales [N · T,
        H / 128]). The row of a token without an expert on this rank is zero.
      local_topk_idx: [N, T, K] int32, the index of each choice's expert among this rank's experts,
        or -1.
      topk_weights: [N, T, K] float32, 0 where the choice is of another rank's expert; or None.
    """
    num_tokens, top_k = topk_idx.shape[-2:]
    lead, num_ranks = x.shape[:-2], fabric.num_ranks
    words = topk_idx
    if topk_weights is not None:
        bits = lax.bitcast_convert_type(topk_weights, jnp.int32)
        words = jnp.concatenate([topk_idx, bits], axis=-1)
    num_words = words.shape[-1]
    row = Row(x.shape[-1], x.dtype, wire)
    sender = Sender(fabric, plan, num_tokens, row, num_words=num_words)
    kernel = _RankDispatch(num_experts, top_k, sender)
    num_rows = num_ranks * num_tokens
    *parts, lists = fb.kernel(
        fabric,
        kernel,
        name="ep_rank_dispatch",
        num_blocks=plan.num_blocks,
        num_warpgroups=1 + sender.num_warpgroups,
        out_type=[
            *(jax.ShapeDtypeStruct((num_rows, columns), t) for columns, t in row.parts),
            jax.ShapeDtypeStruct((num_ranks, sender.window.total), jnp.int32),  # lists
        ],
        scratch_types=dict(scratch=kernel.scratch()),
        # Peers write to all results, which follow the 2 operands.
        shared=tuple(range(2, 3 + len(row.parts))),
    )(x, sender.window.pad(words.reshape(*lead, num_tokens * num_words), fb.NOWHERE))
    lists = lists[..., : num_tokens * num_words].reshape(*lead, num_ranks, num_tokens, num_words)
    if topk_weights is None:
        return tuple(parts), lists, None
    weights = lax.bitcast_convert_type(lists[..., top_k:], jnp.float32)
    return tuple(parts), lists[..., :top_k], weights


@dataclasses.dataclass(frozen=True)
class _RankDispatch:
    """The kernel of `rank_dispatch`."""

    num_experts: int
    top_k: int
    # A list has for each of the K choices the expert's index at the rank, or -1, then the bits of K
    # float32 weights if these are sent.
    sender: Sender

    @property
    def fabric(self) -> fb.Fabric:
        return self.sender.fabric

    def scratch(self) -> fb.Scratch:
        sender = self.sender
        return fb.Scratch(
            sender=sender.scratch(),
            # For each source rank, the lists that have arrived with a step's tokens.
            step_lists=plgpu.SMEM((self.fabric.num_ranks, sender.step_window.width), jnp.int32),
            # A row of zeros, which the receiver copies to rows without a token.
            zeros=[plgpu.SMEM((padded_columns(width, t),), t) for width, t in sender.row.parts],
        )

    def __call__(self, *refs: Any, scratch: fb.Scratch) -> None:
        x, words, *tokens, lists = refs
        fabric, sender, warpgroup = self.fabric, self.sender, lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def send() -> None:
            routes = _Routes(self, words, scratch)
            fabric.delay_point(0)
            sender.fetch_first(x, scratch.sender)
            fabric.connect()
            sender.open_window(routes, 0, scratch.sender)
            sender.send(x, tokens, lists, routes, scratch.sender)

        @pl.when(warpgroup == 1)
        def receive() -> None:
            self._receive(lists, tokens, scratch)

        if sender.num_warpgroups > 1:
            pl.when(warpgroup == 2)(lambda: sender.quantize(x, scratch.sender))

    def has_expert(self, words: List) -> jax.Array:
        return fb.any_row(words[: self.top_k])

    def _receive(self, lists: Any, tokens: Sequence[Any], scratch: fb.Scratch) -> None:
        """Runs the receiver: waits for tokens, and zeroes rows of tokens not sent here."""
        # `lists` are [N, T·num_words], and `tokens` the receive buffer's values and scales.
        fabric, sender, window = self.fabric, self.sender, self.sender.step_window
        num_ranks, step_tokens, num_words = fabric.num_ranks, sender.step_tokens, sender.num_words
        first_token, num_tokens = sender.range()
        for part in scratch.zeros:
            part[...] = jnp.zeros(part.shape, part.dtype)
        plgpu.commit_smem()  # copies from shared memory see the zeros

        def receive_step(step: jax.Array, _: None) -> None:
            fabric.wait(PUT, step + 1, "dispatch")
            fabric.delay_point(2)
            first_of_step = first_token + step * step_tokens
            sources = ((source, fabric.mine(lists), source) for source in range(num_ranks))
            start = window.start(first_of_step * num_words)
            fb.load_slices(fabric, pl.ds(start, window.width), (scratch.step_lists, sources))

            def zero_if_not_sent(pair: jax.Array, _: None) -> None:
                """Zeroes the row of the step's i-th token of `source` if it has no expert here."""
                source, i = lax.rem(pair, num_ranks), lax.div(pair, num_ranks)
                entry = (first_of_step + i) * num_words - start
                ids = [scratch.step_lists[source, entry + choice] for choice in range(self.top_k)]
                row = source * sender.num_tokens + first_of_step + i
                for part, ref, (columns, _dtype) in zip(
                    scratch.zeros, tokens, sender.row.parts, strict=True
                ):
                    zeros = part.at[pl.ds(0, columns)]
                    fb.put_if(~self.has_expert(ids), zeros, fabric.mine(ref).at[row])

            tokens_of_step = jnp.minimum(num_tokens - step * step_tokens, step_tokens)
            lax.fori_loop(0, tokens_of_step * num_ranks, zero_if_not_sent, None)
            plgpu.commit_smem_to_gmem_group()

        num_steps = sender.num_steps()
        lax.fori_loop(0, num_steps, receive_step, None)

        @pl.when(num_steps == 0)
        def wait_for_peers() -> None:
            # A block without tokens receives no step. It still waits for one signal of each peer,
            # since a call may end only after the last signal of every peer.
            fabric.wait(PUT, 1, "dispatch")

        plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class _Routes:
    """`sender.Routes` for the rank-major layout."""

    kernel: _RankDispatch
    # [T·num_words] int32 in global memory: each token's experts, and weights if these are sent.
    words: Any
    scratch: fb.Scratch

    def sources(self) -> list[Any]:
        return [self.kernel.fabric.mine(self.words)]

    def lists(self, entry: jax.Array, ranks: Sequence[jax.Array]) -> list[List]:
        """Returns a token's list for each rank; another rank's choice has id -1 and weight 0."""
        kernel = self.kernel
        words = [self.scratch.sender.words[0, entry + i] for i in range(kernel.sender.num_words)]
        experts, weights = words[: kernel.top_k], words[kernel.top_k :]
        per_rank = jnp.int32(kernel.num_experts // kernel.fabric.num_ranks)
        lists: list[List] = []
        for rank in ranks:
            local_ids = [expert - rank * per_rank for expert in experts]
            is_local = [(e >= 0) & (e < per_rank) for e in local_ids]
            ids = [jnp.where(ok, e, fb.NOWHERE) for ok, e in zip(is_local, local_ids, strict=True)]
            if weights:
                ids += [jnp.where(ok, w, 0) for ok, w in zip(is_local, weights, strict=True)]
            lists.append(ids)
        return lists

    def row(self, words: List, i: jax.Array) -> jax.Array:
        """Returns the row of the block's i-th token; NOWHERE if `words` has no expert."""
        sender = self.kernel.sender
        first_token, _ = sender.range()
        row = sender.fabric.rank() * sender.num_tokens + first_token + i
        return jnp.where(self.kernel.has_expert(words), row, fb.NOWHERE)

    def further_rows(self, words: List) -> list[jax.Array]:
        return []  # a token has one row at a rank
