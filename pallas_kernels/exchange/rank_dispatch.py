"""Dispatch into the rank-major layout: token t of source rank r lies in row r · T + t.

T is the number of tokens of each rank. The row of a token at a peer follows from the source rank
and the token alone, and a token has one row at a peer however many of its experts the peer has. So
ranks exchange nothing before they send rows, and copy no row after it has arrived. In the diagram,
rank s sends its token t to rank d, whose receive buffer is `tokens`:

    rank s, sender                              rank d
    x[t] --> ring -------------- link --------> tokens[s·T + t]
    experts of t at d, weights - link --------> lists[s, t]       --> receiver: no expert here?
                                                tokens[s·T + t] = 0 <--
    signal: a step of tokens is there --------> block b

Block b of every rank handles the same tokens, with two or three warpgroups:

  sender     writes rows and lists to the peers' memory (`sender` describes it); a list holds a
             token's local expert ids at the peer, with -1 for choices of other ranks' experts, and
             optionally the routing weights;
  receiver   reads the lists as they arrive, and writes zeros to the row of a token that has no
             expert on this rank;
  quantizer  quantizes the rows that the sender sends, if the wire format is quantized.
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
    """Sends each token, with its local expert ids and weights, to the ranks of its experts.

    Each rank receives tokens in the rank-major layout: token t of source rank r in row r · T + t.
    T is the number of tokens of each rank, H the hidden size, K the number of choices of a token,
    and N the number of ranks. If all ranks are simulated on one device (`fabric.stacked`), every
    array has a leading axis of N.

    Args:
      x: [T, H], the rows of this rank's tokens; H · itemsize is a multiple of 128 bytes.
      topk_idx: [T, K] int32, the experts that each token chooses.
      topk_weights: [T, K] float32, the routing weights to send, or None.
      num_experts: E, the number of experts on all ranks together.
      fabric: how ranks reach each other.
      plan: the number of blocks, the number of tokens that a block sends between two signals (a
        step), and the number of rows in its ring in shared memory.
      wire: the format of rows sent and received. If it is quantized, H is a multiple of 512.

    Returns:
      tokens: the receive buffer ([N · T, H],), or with a quantized wire ([N · T, H], scales
        [N · T, H / 128]). The row of a token without an expert on this rank is zero.
      local_topk_idx: [N, T, K] int32, for each choice, the index of its expert among this rank's
        experts, or -1 if it is another rank's expert.
      topk_weights: [N, T, K] float32, 0 where the choice is of another rank's expert; None if no
        weights were given.
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
    """The shared memory of the kernel of `rank_dispatch`."""

    sender: SenderScratch
    # [N, window] int32: for each source rank, the lists of local expert ids and weights that have
    # arrived with the tokens of a step (those sent between two signals).
    step_lists: Any
    # A row of zeros, which the receiver copies to rows without a token: an array of values and, if
    # rows are quantized, an array of scales.
    zeros: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class _RankDispatch:
    """The kernel of `rank_dispatch`.

    Attributes:
      num_experts: E, the number of experts on all ranks together.
      top_k: K, the number of experts chosen for each token.
      sender: writes a token's row to the ranks that have an expert of the token, and a list about
        the token to every rank. The list for a rank has a word for each of the K choices: the index
        of the expert among that rank's experts, or -1 if another rank has the expert. If weights
        are sent, the bits of K float32 weights follow.
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
            num_warpgroups=1 + sender.num_warpgroups,
            out_type=[
                *(jax.ShapeDtypeStruct((num_rows, width), t) for width, t in sender.row.parts),
                jax.ShapeDtypeStruct((num_ranks, sender.window.total), jnp.int32),
            ],
            scratch_types=dict(scratch=self.scratch()),
            shared=tuple(range(2, 3 + len(sender.row.parts))),
        )(*operands)

    def scratch(self) -> _Scratch:
        """Returns the types of the kernel's shared memory."""
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
            sender.send(SenderRefs(x, tokens, lists), routes, scratch.sender)

        @pl.when(warpgroup == 1)
        def receive() -> None:
            self._receive(lists, tokens, scratch)

        if sender.num_warpgroups > 1:
            pl.when(warpgroup == 2)(lambda: sender.quantize(x, scratch.sender))

    def has_expert(self, words: List) -> jax.Array:
        """Returns whether a token chooses an expert of one rank, a scalar bool.

        `words` is the token's list for the rank. Its first K words are local expert ids, or -1 for
        experts of other ranks.
        """
        return fb.any_row(words[: self.top_k])

    def _receive(self, lists: Any, tokens: Sequence[Any], scratch: _Scratch) -> None:
        """Runs the receiver warpgroup: waits for tokens, and zeroes rows of tokens not sent here.

        The receive buffer has a row for every token of every rank, but a token is only sent to this
        rank if it chooses one of the rank's experts.

        Args:
          lists: [N, T·num_words] int32 in global memory: for each source rank, the words that it
            sends for each of its tokens. The first K of a token are local expert ids, or -1 for
            choices of other ranks' experts.
          tokens: the receive buffer: an array [N · T, H] of values and, if rows are quantized, an
            array of scales.
          scratch: the kernel's shared memory.
        """
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
        def wait_for_peers() -> None:
            # A block without tokens receives no step. It still waits for one signal of each peer,
            # since a call may end only after the last signal of every peer.
            fabric.wait(PUT, 1, "dispatch")

        plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True)
class _Routes:
    """Implements `sender.Routes` for the rank-major layout.

    A token's row at another rank follows from the source rank and the token's index alone.

    Attributes:
      kernel: the kernel of `rank_dispatch`.
      words: [T·num_words] int32 in global memory. For each token of this rank it has the K experts
        that the token chooses and then, if weights are sent, the bits of K float32 weights.
      scratch: the kernel's shared memory.
    """

    kernel: _RankDispatch
    words: Any
    scratch: _Scratch

    def sources(self) -> list[Any]:
        """Returns a list of one array: `words`, the experts and weights of this rank's tokens."""
        return [self.kernel.fabric.mine(self.words)]

    def lists(self, entry: jax.Array, ranks: Sequence[jax.Array]) -> list[List]:
        """Returns one token's list for each of `ranks`: K local expert ids, then any weights.

        A choice of another rank's expert has the id -1 and the weight 0. `entry` is the column of
        `SenderScratch.words`, the loaded routing data, where the token's words begin.
        """
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
        """Returns the row of a rank's receive buffer that this block's i-th token gets.

        Returns NOWHERE if the token is not sent to the rank. `words` is the token's list for the
        rank; the token is sent if the list has an expert of the rank.
        """
        sender = self.kernel.sender
        first_token, _ = sender.range()
        row = sender.fabric.rank() * sender.num_tokens + first_token + i
        return jnp.where(self.kernel.has_expert(words), row, fb.NOWHERE)

    def further_rows(self, words: List) -> list[jax.Array]:
        """Returns no rows, since a token has one row at each rank."""
        return []
