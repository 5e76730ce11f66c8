"""The sender of both dispatches: one warpgroup of a block, which sends the block's tokens to peers.

It takes the block's tokens in order. It fetches a token's row into a ring in shared memory,
quantizes it if there is a wire_dtype, and puts it into its final row at every rank that gets it. If
peers receive lists, it also puts a list of words to each peer: the token's rows there, or the
peer's experts that get it. A step of tokens is signalled while the next one is being sent. The
kernel that uses the sender decides what the lists say, and which row a token gets.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange import quantized_rows
from pallas_kernels.exchange.plan import Plan, Row, Window, windows
from pallas_kernels.exchange.windows import open_window
from pallas_kernels.fabric import fabric as fb

PUT = 0  # kind of signal: sent after each step, and once by a block that has no step

List = Sequence[jax.Array]  # the words of a token that a peer receives
Sources = Callable[[], Sequence[Any]]  # returns references, each [T·num_words], to read words from


@dataclasses.dataclass(frozen=True)
class Sender:
    """Sends a block's tokens to peers; its methods are steps of a kernel.

    The kernel has the scratch that `scratch_types` returns, and passes it to the methods by name.

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

    def scratch_types(self) -> dict[str, Any]:
        stages = self.plan.num_stages
        types: dict[str, Any] = dict(
            choices=plgpu.SMEM((self.num_sources, self.window.width), jnp.int32),
            stages=[plgpu.SMEM((stages, columns), t) for columns, t in self.row.parts],
            lists=plgpu.SMEM((stages, self.fabric.num_ranks, self.num_words), jnp.int32),
            full=plgpu.Barrier(num_barriers=(stages,)),
        )
        if self.row.wire_dtype is not None:  # input rows, before they are quantized
            types["wide_stages"] = plgpu.SMEM((stages, self.row.hidden), self.row.dtype)
        return types

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

    def fetch_first(self, x: Any, **scratch: Any) -> None:
        """Starts to fetch the rows of this block's first tokens, as many as the ring has stages."""
        first, count = self.range()

        def fetch(i: jax.Array, _: None) -> None:
            self._fetch(x, first + i, i, **scratch)

        lax.fori_loop(0, jnp.minimum(count, self.plan.num_stages), fetch, None)

    def make_ready(
        self, x: Any, i: Any, *, stages: Any, full: Any, wide_stages: Any = None, **_: Any
    ) -> None:
        """Waits until the i-th token's row is in its stage; quantizes it if wire_dtype is set."""
        first_token, num_tokens = self.range()
        stage = lax.rem(i, jnp.int32(self.plan.num_stages))

        @pl.when(i < num_tokens)
        def _() -> None:
            plgpu.barrier_wait(full.at[stage])
            if wide_stages is not None:
                parts = [part.at[stage] for part in stages]
                quantized_rows.quantize_row(self.fabric, wide_stages.at[stage], *parts)
                plgpu.commit_smem()  # all threads have read the input; puts see the quantized row
                ahead = i + self.plan.num_stages

                @pl.when(ahead < num_tokens)
                def _() -> None:
                    rings = dict(stages=stages, full=full, wide_stages=wide_stages)
                    self._fetch(x, first_token + ahead, ahead, **rings)

    def open_window(self, sources: Sources, i: Any, *, choices: Any, **_: Any) -> None:
        """Loads the words of this block's tokens from the i-th on, from each source."""
        first_token, refs = self.range()[0], sources()
        entry = (first_token + i) * self.num_words
        open_window(self.fabric, self.window, entry, (choices, enumerate(refs)))

    def send(
        self, x: Any, sources: Sources, tokens: Sequence[Any], lists_ref: Any, *,
        lists_for: Callable[[jax.Array, Sequence[jax.Array]], Sequence[List]],
        place_of: Callable[[List, jax.Array], jax.Array],
        further_of: Callable[[List], Sequence[jax.Array]] = lambda words: (),
        choices: Any, stages: Any, lists: Any, full: Any, wide_stages: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        """Sends all tokens of this block.

        The caller has opened the first window (`open_window`) and waited for the first row
        (`make_ready`).

        Args:
          x: [T, H].
          sources: returns the arrays of words; called once for each window.
          tokens: the parts of the peers' received rows, each [R, columns].
          lists_ref: [N, T·num_words] by source rank, where peers receive lists; None to send none.
          lists_for: (a token's first entry in `choices`, peers) -> a list for each peer.
          place_of: (the i-th token's list for a peer, i) -> its row at that peer, or NOWHERE.
          further_of: a token's list for this rank -> its further rows here, each or NOWHERE.
        """
        fabric, plan, window = self.fabric, self.plan, self.window
        num_words, lag = self.num_words, plan.store_lag
        num_stages, step_tokens = plan.num_stages, self.step_tokens
        rank, peers = fabric.rank(), self.peers()
        first_token, num_tokens = self.range()

        def send_token(i: jax.Array, carry: None) -> None:
            in_window = lax.rem(i, jnp.int32(window.tokens))

            @pl.when((in_window == 0) & (i > 0))
            def _() -> None:
                self.open_window(sources, i, choices=choices)

            stage, entry = lax.rem(i, jnp.int32(num_stages)), (first_token + i) * num_words
            in_choices = entry - window.start(entry - in_window * num_words)
            # This rank's list comes twice: `peers` begin elsewhere in each block, so that to select
            # it from theirs takes a select for each of their words.
            *lists_of_peers, list_here = lists_for(in_choices, [*peers, rank])
            for peer, words in zip(peers, lists_of_peers, strict=True):
                place = place_of(words, i)
                for part, ref in zip(stages, tokens, strict=True):
                    fb.put_if(fabric, place >= 0, part.at[stage], fabric.peer(ref, peer).at[place])
            for place in further_of(list_here):
                for part, ref in zip(stages, tokens, strict=True):
                    fb.put_if(fabric, place >= 0, part.at[stage], fabric.mine(ref).at[place])
            if lists_ref is not None:
                self._put_lists(lists, stage, lists_ref, rank, entry, peers, lists_of_peers)
            plgpu.commit_smem_to_gmem_group()

            # A stage takes another token once its puts have read it.
            plgpu.wait_smem_to_gmem(lag, wait_read_only=True)
            if wide_stages is None:
                ahead = i - lag + num_stages

                @pl.when((i >= lag) & (ahead < num_tokens))
                def _() -> None:
                    self._fetch(x, first_token + ahead, ahead, stages=stages, full=full)

            self.make_ready(x, i + 1, stages=stages, full=full, wide_stages=wide_stages)
            return carry

        def send_step(step: jax.Array, carry: None) -> None:
            begin = step * step_tokens
            end = jnp.minimum(begin + step_tokens, num_tokens)
            lax.fori_loop(begin, end, send_token, None)

            pl.when(step > 0)(lambda: self._signal_before(step, end - begin))
            return carry

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
        lists: Any,
        stage: jax.Array,
        lists_ref: Any,
        rank: jax.Array,
        entry: jax.Array,
        peers: Sequence[jax.Array],
        lists_of_peers: Sequence[List],
    ) -> None:
        """Puts a token's list for each peer to lists_ref[rank, entry:] of that peer.

        The lists pass through `stage` of `lists` in shared memory, if bulk copies can take them.
        """
        fabric, num_words = self.fabric, self.num_words
        if num_words % 4:  # bulk copies are of whole 16 bytes
            for peer, words in zip(peers, lists_of_peers, strict=True):
                for i, word in enumerate(words):
                    fabric.peer(lists_ref, peer)[rank, entry + i] = word
            return
        for peer, words in zip(peers, lists_of_peers, strict=True):
            for i, word in enumerate(words):
                lists[stage, peer, i] = word
        plgpu.commit_smem()
        for peer in peers:
            plgpu.copy_smem_to_gmem(
                lists.at[stage, peer],
                fabric.peer(lists_ref, peer).at[rank, pl.ds(entry, num_words)],
                commit_group=False,
            )

    def _fetch(
        self,
        x: Any,
        token: Any,
        i: Any,
        *,
        stages: Any,
        full: Any,
        wide_stages: Any = None,
        **_: Any,
    ) -> None:
        stage = lax.rem(i, jnp.int32(self.plan.num_stages))
        (ring,) = stages if wide_stages is None else [wide_stages]
        plgpu.copy_gmem_to_smem(
            self.fabric.mine(x).at[token], ring.at[stage], full.at[stage], oob_mode=fb.IN_BOUNDS
        )
