"""Dispatch into the rank-major layout: token t of source rank r lies in row r · T + t.

The row of a token at a peer follows from the source rank and the token alone, and a token has one
row there however many of its experts are there. So nothing is exchanged before rows are sent, and
nothing is copied after they have arrived:

    rank s, sender                              rank d
    x[t] --> ring -------------- link --------> tokens[s·T + t]
    experts of t at d, weights - link --------> lists[s, t]       --> receiver: no expert here?
                                                tokens[s·T + t] = 0 <--
    signal: a step of tokens is there --------> block b

Block b of every rank handles the same tokens, with two warpgroups:

  sender    puts rows and lists to the peers (`sender` describes it); a list holds a token's local
            expert ids at the peer, -1 for choices of other ranks, and, if asked for, weights;
  receiver  reads the lists as they arrive, and writes zeros to the row of a token that has no
            expert on this rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.plan import Plan, Row
from pallas_kernels.exchange.sender import PUT, List, Sender, SenderRefs, SenderScratch
from pallas_kernels.exchange.windows import open_window
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
    """Sends rows, and lists of their experts and weights, to the rank-major layout of each rank.

    With stacked ranks, every array has a leading axis of N.

    Args:
      x: [T, H]; H · itemsize a multiple of 128 bytes.
      topk_idx: [T, K] int32.
      topk_weights: [T, K] float32, or None.
      num_experts: E.
      fabric: how ranks reach each other.
      plan: number of blocks, tokens of a step, and depth of the ring.
      wire: the format in which rows are sent and received. H is a multiple of 512 if it is
        quantized.

    Returns:
      tokens ([N · T, H],), or with a quantized wire ([N · T, H], scales [N · T, H / 128]);
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
    row = Row(x.shape[-1], x.dtype, wire)
    sender = Sender(fabric, plan, num_tokens, row, num_words=width)
    kernel = _RankDispatch(num_experts, top_k, sender)
    flat = choices.reshape(*lead, num_tokens * width)
    *parts, lists = kernel.call(x, sender.window.pad(flat, fb.NOWHERE))
    lists = lists[..., : num_tokens * width].reshape(*lead, num_ranks, num_tokens, width)
    if topk_weights is None:
        return tuple(parts), lists, None
    weights = lax.bitcast_convert_type(lists[..., top_k:], jnp.float32)
    return tuple(parts), lists[..., :top_k], weights


class _Scratch(NamedTuple):
    """The shared memory of the kernel."""

    sender: SenderScratch
    step_lists: Any  # [N, window] int32: the lists of a step, by source rank
    zeros: Sequence[Any]  # for each part of a row, a row of zeros


@dataclasses.dataclass(frozen=True)
class _RankDispatch:
    """The kernel of `rank_dispatch`.

    Attributes:
      num_experts: E.
      top_k: K.
      sender: sends rows and lists; a list holds K experts, then K weights if there are weights.
    """

    num_experts: int
    top_k: int
    sender: Sender

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
            scratch_types=dict(scratch=self.scratch()),
            shared=tuple(range(2, 3 + len(sender.row.parts))),
        )(*operands)

    def scratch(self) -> _Scratch:
        """Returns the types of the scratch."""
        sender = self.sender
        return _Scratch(
            sender=sender.scratch(),
            step_lists=plgpu.SMEM((self.fabric.num_ranks, sender.step_window.width), jnp.int32),
            zeros=[plgpu.SMEM((padded_columns(width, t),), t) for width, t in sender.row.parts],
        )

    def __call__(self, *refs: Any, scratch: _Scratch) -> None:
        x, words, *tokens, lists = refs
        fabric, sender, warpgroup = self.fabric, self.sender, lax.axis_index("warpgroup")

        @pl.when(warpgroup == 0)
        def send() -> None:
            routes = _Routes(self, words, scratch)
            fabric.delay_point(0)
            sender.fetch_first(x, scratch.sender)
            fabric.connect()
            sender.open_window(routes, 0, scratch.sender)
            sender.make_ready(x, 0, scratch.sender)
            sender.send(SenderRefs(x, tokens, lists), routes, scratch.sender)

        @pl.when(warpgroup == 1)
        def receive() -> None:
            self._receive(lists, tokens, scratch)

    def has_expert(self, words: List) -> jax.Array:
        """Returns whether a token's list for a rank has an expert of that rank."""
        return fb.any_row(words[: self.top_k])

    def _receive(self, lists: Any, tokens: Sequence[Any], scratch: _Scratch) -> None:
        """Waits for all rows, and writes zeros to the rows of tokens without an expert here."""
        fabric, sender, window = self.fabric, self.sender, self.sender.step_window
        num_ranks, step_tokens, width = fabric.num_ranks, sender.step_tokens, sender.num_words
        first_token, num_tokens = sender.range()
        for part in scratch.zeros:
            part[...] = jnp.zeros(part.shape, part.dtype)
        plgpu.commit_smem()

        def receive_step(step: jax.Array, _: None) -> None:
            fabric.wait(PUT, step + 1, "dispatch")
            fabric.delay_point(2)
            step_token = first_token + step * step_tokens
            sources = ((source, fabric.mine(lists), source) for source in range(num_ranks))
            start = open_window(fabric, window, step_token * width, (scratch.step_lists, sources))

            def fill_row(pair: jax.Array, _: None) -> None:
                source, i = lax.rem(pair, num_ranks), lax.div(pair, num_ranks)
                entry = (step_token + i) * width - start
                words = [scratch.step_lists[source, entry + word] for word in range(self.top_k)]
                row = source * sender.num_tokens + step_token + i
                for part, ref, (columns, _dtype) in zip(
                    scratch.zeros, tokens, sender.row.parts, strict=True
                ):
                    zeros = part.at[pl.ds(0, columns)]
                    fb.put_if(fabric, ~self.has_expert(words), zeros, fabric.mine(ref).at[row])

            pairs = jnp.minimum(num_tokens - step * step_tokens, step_tokens)
            lax.fori_loop(0, pairs * num_ranks, fill_row, None)
            plgpu.commit_smem_to_gmem_group()

        num_steps = sender.num_steps()
        lax.fori_loop(0, num_steps, receive_step, None)

        @pl.when(num_steps == 0)
        def wait_for_peers() -> None:  # this rank must not end before its peers have signalled
            fabric.wait(PUT, 1, "dispatch")

        plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class _Routes:
    """Implements `sender.Routes` for rows that are known beforehand.

    Attributes:
      kernel: the kernel.
      words: [T·num_words] int32, each token's choices, and then the bits of its weights or none.
      scratch: of the kernel.
    """

    kernel: _RankDispatch
    words: Any
    scratch: _Scratch

    def sources(self) -> list[Any]:
        """Returns this rank's choices and weights."""
        return [self.kernel.fabric.mine(self.words)]

    def lists(self, entry: jax.Array, ranks: Sequence[jax.Array]) -> list[List]:
        """Returns each rank's local experts of a token and their weights; -1 and 0 for others."""
        kernel = self.kernel
        words = [self.scratch.sender.words[0, entry + i] for i in range(kernel.sender.num_words)]
        experts, weights = words[: kernel.top_k], words[kernel.top_k :]
        per_rank = jnp.int32(kernel.num_experts // kernel.fabric.num_ranks)
        lists: list[List] = []
        for rank in ranks:
            local = [expert - rank * per_rank for expert in experts]
            here = [
                (expert >= 0) & (expert < kernel.num_experts) & (i >= 0) & (i < per_rank)
                for expert, i in zip(experts, local, strict=True)
            ]
            ids = [jnp.where(h, i, fb.NOWHERE) for h, i in zip(here, local, strict=True)]
            ids += [jnp.where(h, w, 0) for h, w in zip(here, weights, strict=False)]
            lists.append(ids)
        return lists

    def row(self, words: List, i: jax.Array) -> jax.Array:
        """Returns the row of the block's i-th token of this rank, NOWHERE without an expert."""
        sender = self.kernel.sender
        first_token, _ = sender.range()
        row = sender.fabric.rank() * sender.num_tokens + first_token + i
        return jnp.where(self.kernel.has_expert(words), row, fb.NOWHERE)

    def further_rows(self, words: List) -> list[jax.Array]:
        """Returns no rows, since a token has one row at each rank."""
        return []
