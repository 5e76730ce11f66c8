"""Implements the sender of both dispatches: the warpgroup that sends a block's tokens to peers.

It takes the block's tokens in order. It fetches a token's row into a ring in shared memory,
quantizes it if the wire's format says so, and puts it into its row at every rank that gets it:

    x[t] --copy--> stage of the ring --quantize--> stage ==== link ====> tokens[row] of each peer
                                   words of routes ----------- link ---> lists[rank, t] of each peer
                                         signal: a step has arrived ---> block b of each peer

If peers receive lists, each gets a list of words with a token: the token's rows there, or the
peer's experts that get it. A step of tokens is signalled while the next one is being sent. The
kernel that uses the sender decides what the lists say, and which row a token gets (`Routes`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange import quantized_rows
from pallas_kernels.exchange.plan import Plan, Row, Window, windows
from pallas_kernels.exchange.windows import open_window
from pallas_kernels.fabric import fabric as fb

PUT = 0  # the kind of signal: a block sends it after each step, or once if it has no step

List = Sequence[jax.Array]  # the words of a token that a peer receives


class SenderRefs(NamedTuple):
    """The arrays in global memory that a sender reads and writes."""

    x: Any  # [T, H]
    tokens: Sequence[Any]  # the parts of received rows, [R, columns] each
    lists: Any  # [N, T·num_words] int32, by source rank; None where no lists are sent


class SenderScratch(NamedTuple):
    """The shared memory of a sender with a ring of S stages."""

    words: Any  # [sources, window.width] int32: a window of the words of routes
    stages: Sequence[Any]  # for each part of a row, [S, columns], as it is sent
    wide_stages: Any  # [S, H], rows that are quantized next; None with a plain wire
    lists: Any  # [S, N, num_words] int32: the lists of a stage's token, by peer
    full: Any  # [S] barriers: a row has arrived in its stage


class Routes(Protocol):
    """The decisions that a kernel makes about the tokens that its sender sends."""

    def sources(self) -> Sequence[Any]:
        """Returns the arrays, [T·num_words] each, that a window of words is loaded from."""

    def lists(self, entry: jax.Array, ranks: Sequence[jax.Array]) -> Sequence[List]:
        """Returns a list for each of `ranks`, of the token whose words begin at `entry`."""

    def row(self, words: List, i: jax.Array) -> jax.Array:
        """Returns the row of the block's i-th token at a rank, by its list; NOWHERE for none."""

    def further_rows(self, words: List) -> Sequence[jax.Array]:
        """Returns the token's further rows on this rank, by this rank's list; NOWHERE for none."""


@dataclasses.dataclass(frozen=True)
class Sender:
    """Sends a block's tokens to peers; its methods are steps of a kernel.

    The kernel allocates `scratch`, and passes it to the methods.

    Attributes:
      fabric: how ranks reach each other.
      plan: number of blocks, tokens of a step, and depth of the ring.
      num_tokens: T.
      row: the size of an input row, and of the form in which it is sent.
      num_words: int32 words of routes for each token, and words of a list.
      num_sources: how many arrays hold routes of this rank's tokens.
    """

    fabric: fb.Fabric
    plan: Plan
    num_tokens: int
    row: Row
    num_words: int
    num_sources: int = 1

    @property
    def step_tokens(self) -> int:
        return min(self.plan.step_tokens, self.plan.tokens_per_block(self.num_tokens))

    @property
    def window(self) -> Window:
        """The window of routes that the sender holds in shared memory at a time."""
        return windows(self.plan, self.num_tokens, self.num_words)[0]

    @property
    def step_window(self) -> Window:
        """The window of lists that holds the words of one step."""
        return windows(self.plan, self.num_tokens, self.num_words)[1]

    def scratch(self) -> SenderScratch:
        """Returns the types of the sender's scratch."""
        stages, row = self.plan.num_stages, self.row
        wide = plgpu.SMEM((stages, row.hidden), row.dtype) if row.wire.quantized else None
        return SenderScratch(
            words=plgpu.SMEM((self.num_sources, self.window.width), jnp.int32),
            stages=[plgpu.SMEM((stages, columns), t) for columns, t in row.parts],
            wide_stages=wide,
            lists=plgpu.SMEM((stages, self.fabric.num_ranks, self.num_words), jnp.int32),
            full=plgpu.Barrier(num_barriers=(stages,)),
        )

    def range(self) -> tuple[jax.Array, jax.Array]:
        """Returns this block's first token, and the number of its tokens."""
        return self.plan.tokens_of_block(lax.axis_index("block"), self.num_tokens)

    def num_steps(self) -> jax.Array:
        _, num_tokens = self.range()
        return lax.div(num_tokens + (self.step_tokens - 1), jnp.int32(self.step_tokens))

    def peers(self) -> list[jax.Array]:
        """Returns all ranks, in the order in which this block sends to them."""
        num_ranks = self.fabric.num_ranks
        offset = fb.first_peer(self.fabric)
        return [lax.rem(i + offset, jnp.int32(num_ranks)) for i in range(num_ranks)]

    def fetch_first(self, x: Any, scratch: SenderScratch) -> None:
        """Starts to fetch the rows of this block's first tokens, as many as the ring has stages."""
        first, count = self.range()

        def fetch(i: jax.Array, _: None) -> None:
            self._fetch(x, first + i, i, scratch)

        lax.fori_loop(0, jnp.minimum(count, self.plan.num_stages), fetch, None)

    def make_ready(self, x: Any, i: Any, scratch: SenderScratch) -> None:
        """Waits until the i-th token's row is in its stage; quantizes it if the wire does."""
        first_token, num_tokens = self.range()
        stage = lax.rem(i, jnp.int32(self.plan.num_stages))

        def quantize() -> None:
            """Quantizes the row, and starts to fetch the next one for the row's wide stage."""
            parts = [part.at[stage] for part in scratch.stages]
            wide = scratch.wide_stages.at[stage]
            quantized_rows.quantize_row(self.fabric, self.row.wire, wide, *parts)
            plgpu.commit_smem()  # all threads have read the input; puts see the quantized row
            ahead = i + self.plan.num_stages
            pl.when(ahead < num_tokens)(lambda: self._fetch(x, first_token + ahead, ahead, scratch))

        @pl.when(i < num_tokens)
        def wait() -> None:
            plgpu.barrier_wait(scratch.full.at[stage])
            if self.row.wire.quantized:
                quantize()

    def open_window(self, routes: Routes, i: Any, scratch: SenderScratch) -> None:
        """Loads the words of this block's tokens from the i-th on, from each source."""
        first_token, refs = self.range()[0], routes.sources()
        entry = (first_token + i) * self.num_words
        open_window(self.fabric, self.window, entry, (scratch.words, enumerate(refs)))

    def send(self, refs: SenderRefs, routes: Routes, scratch: SenderScratch) -> None:
        """Sends all tokens of this block.

        The caller has opened the first window (`open_window`) and waited for the first row
        (`make_ready`).
        """
        fabric, plan, window = self.fabric, self.plan, self.window
        lag, num_stages, step_tokens = plan.store_lag, plan.num_stages, self.step_tokens
        rank, peers = fabric.rank(), self.peers()
        first_token, num_tokens = self.range()

        def put_row(stage: jax.Array, row: jax.Array, locate: Callable[[Any], Any]) -> None:
            """Puts a stage's row to `row` of the arrays that `locate` makes of `refs.tokens`."""
            for part, ref in zip(scratch.stages, refs.tokens, strict=True):
                fb.put_if(fabric, row >= 0, part.at[stage], locate(ref).at[row])

        def send_token(i: jax.Array, _: None) -> None:
            in_window = lax.rem(i, jnp.int32(window.tokens))
            pl.when((in_window == 0) & (i > 0))(lambda: self.open_window(routes, i, scratch))
            stage, entry = lax.rem(i, jnp.int32(num_stages)), (first_token + i) * self.num_words

            # This rank's list is read twice. Each block begins its `peers` at another rank, so that
            # finding this rank's list among theirs would cost a select for each word.
            in_words = entry - window.start(entry - in_window * self.num_words)
            *lists_of_peers, list_here = routes.lists(in_words, [*peers, rank])
            for peer, words in zip(peers, lists_of_peers, strict=True):
                row = routes.row(words, i)
                put_row(stage, row, functools.partial(fabric.peer, rank=peer))
            for row in routes.further_rows(list_here):
                put_row(stage, row, fabric.mine)
            if refs.lists is not None:
                self._put_lists(stage, entry, refs.lists, peers, lists_of_peers, scratch)
            plgpu.commit_smem_to_gmem_group()

            # A stage takes another token once its puts have read it.
            plgpu.wait_smem_to_gmem(lag, wait_read_only=True)
            if not self.row.wire.quantized:
                ahead = i - lag + num_stages
                pl.when((i >= lag) & (ahead < num_tokens))(
                    lambda: self._fetch(refs.x, first_token + ahead, ahead, scratch)
                )
            self.make_ready(refs.x, i + 1, scratch)

        def send_step(step: jax.Array, _: None) -> None:
            begin = step * step_tokens
            end = jnp.minimum(begin + step_tokens, num_tokens)
            lax.fori_loop(begin, end, send_token, None)
            pl.when(step > 0)(lambda: self._signal_before(step, end - begin))

        lax.fori_loop(0, self.num_steps(), send_step, None)
        plgpu.wait_smem_to_gmem(0)
        fabric.delay_point(1)
        fabric.signal(PUT, jnp.maximum(self.num_steps(), 1))

    def _signal_before(self, step: jax.Array, num_sent: jax.Array) -> None:
        """Signals the steps before `step`, of which `num_sent` tokens have been sent.

        These steps' puts have arrived once only the puts of `step` are under way.
        """
        lax.cond(
            num_sent == self.step_tokens,
            lambda: plgpu.wait_smem_to_gmem(self.step_tokens),
            lambda: plgpu.wait_smem_to_gmem(0),
        )
        self.fabric.delay_point(1)
        self.fabric.signal(PUT, step)

    def _put_lists(
        self,
        stage: jax.Array,
        entry: jax.Array,
        lists_ref: Any,
        peers: Sequence[jax.Array],
        lists_of_peers: Sequence[List],
        scratch: SenderScratch,
    ) -> None:
        """Puts a token's list for each peer to lists_ref[rank, entry:] of that peer.

        The lists pass through `scratch.lists` if bulk copies can take them.
        """
        fabric, num_words = self.fabric, self.num_words
        rank = fabric.rank()
        if num_words % 4:  # bulk copies need multiples of 16 bytes
            for peer, words in zip(peers, lists_of_peers, strict=True):
                for i, word in enumerate(words):
                    fabric.peer(lists_ref, peer)[rank, entry + i] = word
            return
        for peer, words in zip(peers, lists_of_peers, strict=True):
            for i, word in enumerate(words):
                scratch.lists[stage, peer, i] = word
        plgpu.commit_smem()
        for peer in peers:
            plgpu.copy_smem_to_gmem(
                scratch.lists.at[stage, peer],
                fabric.peer(lists_ref, peer).at[rank, pl.ds(entry, num_words)],
                commit_group=False,
            )

    def _fetch(self, x: Any, token: jax.Array, i: jax.Array, scratch: SenderScratch) -> None:
        """Starts to copy a row of x, the block's i-th, to its stage."""
        stage = lax.rem(i, jnp.int32(self.plan.num_stages))
        ring = scratch.wide_stages if self.row.wire.quantized else scratch.stages[0]
        plgpu.copy_gmem_to_smem(
            self.fabric.mine(x).at[token],
            ring.at[stage],
            scratch.full.at[stage],
            oob_mode=fb.IN_BOUNDS,
        )
