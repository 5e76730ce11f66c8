"""The warpgroups of a dispatch kernel that send a block's tokens to other ranks.

The sender takes the block's tokens in order. It fetches a token's row into a ring in shared memory,
and writes it to the receive buffer of every rank that gets the token:

  x[t] --copy--> stage of the ring ======== link ========> tokens[row] of each peer
                 list of t for the peer --- link --------> lists[rank, t] of each peer
                       signal: a step has arrived -------> block b of each peer

If the wire format is quantized, rows are fetched into a ring of their own, from which another
warpgroup, the quantizer, quantizes them into the sender's ring. A list has int32 words: the numbers
of the token's rows in the peer's receive buffer, or the ids of the peer's experts that get the
token. A step is a few tokens that are signalled together, while the next step's tokens are being
sent. The kernel implements `Routes`, which gives the list and the row of each token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.exchange.plan import Plan, Row, Window, windows
from pallas_kernels.fabric import fabric as fb

# The kind of signal: the tokens of a step have been written. A block without tokens sends it once.
PUT = 0

# The words that are sent to one rank along with a token: K or more int32 scalars.
List = Sequence[jax.Array]


class Routes(Protocol):
    """How a dispatch kernel gives its sender the destinations of each token."""

    def sources(self) -> Sequence[Any]:
        """Returns the arrays of routing data, [T·num_words] int32 in any rank's memory."""

    def lists(self, entry: jax.Array, ranks: Sequence[jax.Array]) -> Sequence[List]:
        """Returns a token's list for each rank, from `words[:, entry:]` of the scratch."""

    def row(self, words: List, i: jax.Array) -> jax.Array:
        """Returns the row of a rank's buffer that gets the block's i-th token, or NOWHERE."""

    def further_rows(self, words: List) -> Sequence[jax.Array]:
        """Returns a token's rows in this rank's receive buffer besides that of `row`."""


@dataclasses.dataclass(frozen=True)
class Sender:
    """Sends a block's tokens to all ranks that get them, by one or two warpgroups of a kernel.

    The kernel calls `send` and what must precede it in one warpgroup, the sender, and `quantize` in
    another, the quantizer, if the wire format is quantized. x is this rank's tokens [T, H].
    """

    fabric: fb.Fabric
    plan: Plan
    num_tokens: int  # T, the tokens of each rank
    row: Row
    num_words: int  # the int32 words of a token in each of `Routes.sources`, and in a list
    num_sources: int = 1  # the number of arrays of `Routes.sources`

    @functools.cached_property
    def step_tokens(self) -> int:
        return min(self.plan.step_tokens, self.plan.tokens_per_block(self.num_tokens))

    @functools.cached_property
    def window(self) -> Window:
        """The slice of the arrays of `Routes.sources` that the sender holds in shared memory."""
        return windows(self.plan, self.num_tokens, self.num_words)[0]

    @functools.cached_property
    def step_window(self) -> Window:
        """The slice of a source rank's routing data, of one step, that the receiver loads."""
        return windows(self.plan, self.num_tokens, self.num_words)[1]

    def scratch(self) -> fb.Scratch:
        """Returns the types of the shared memory that the kernel must allocate for the sender."""
        num_stages, row = self.plan.num_stages, self.row
        wide = plgpu.SMEM((num_stages, row.hidden), row.dtype) if row.wire.quantized else None
        return fb.Scratch(
            # A slice of each array of `Routes.sources`, for the tokens to be sent next.
            words=plgpu.SMEM((self.num_sources, self.window.width), jnp.int32),
            # Rows as they are sent: values and, if quantized, scales.
            stages=[plgpu.SMEM((num_stages, columns), t) for columns, t in row.parts],
            wide_stages=wide,  # rows before they are quantized; None if they are not
            # The list for each rank.
            lists=plgpu.SMEM((num_stages, self.fabric.num_ranks, self.num_words), jnp.int32),
            # An input row has arrived; the quantizer has written a row; the sender no longer reads
            # it. Without a quantizer, the last two are None.
            full=plgpu.Barrier(num_barriers=num_stages),
            quantized=plgpu.Barrier(num_barriers=num_stages) if row.wire.quantized else None,
            sent=plgpu.Barrier(num_barriers=num_stages) if row.wire.quantized else None,
        )

    def range(self) -> tuple[jax.Array, jax.Array]:
        """Returns this block's first token and its number of tokens, int32 []."""
        return self.plan.tokens_of_block(lax.axis_index("block"), self.num_tokens)

    def num_steps(self) -> jax.Array:
        _, num_tokens = self.range()
        return lax.div(num_tokens + (self.step_tokens - 1), jnp.int32(self.step_tokens))

    def peers(self) -> list[jax.Array]:
        """Returns all N ranks in this block's order of sending, to spread load over links."""
        num_ranks = self.fabric.num_ranks
        offset = fb.first_peer(self.fabric)
        return [lax.rem(i + offset, jnp.int32(num_ranks)) for i in range(num_ranks)]

    @property
    def num_warpgroups(self) -> int:
        return 2 if self.row.wire.quantized else 1

    def fetch_first(self, x: Any, scratch: fb.Scratch) -> None:
        """Starts to copy the rows of this block's first tokens into the ring, one to each stage."""
        first, count = self.range()

        def fetch(i: jax.Array, _: None) -> None:
            self._fetch(x, first + i, i, scratch)

        lax.fori_loop(0, jnp.minimum(count, self.plan.num_stages), fetch, None)

    def quantize(self, x: Any, scratch: fb.Scratch) -> None:
        """Quantizes this block's rows in the quantizer, while the sender sends earlier ones."""
        first_token, num_tokens = self.range()
        num_stages = self.plan.num_stages

        def quantize_token(i: jax.Array, _: None) -> None:
            stage = lax.rem(i, jnp.int32(num_stages))
            ahead = i + num_stages  # the next token whose row this stage gets
            plgpu.barrier_wait(scratch.full.at[stage])
            # The sender has read the row that was in the stage before; the first rows follow none.
            pl.when(i >= num_stages)(lambda: plgpu.barrier_wait(scratch.sent.at[stage]))
            parts = [part.at[stage] for part in scratch.stages]
            wide = scratch.wide_stages.at[stage]
            from pallas_kernels.exchange import quantized_rows

            quantized_rows.quantize_row(self.row.wire, wide, *parts)
            # After this fence, every thread has read the input row, so that it may be overwritten.
            # The fence also makes the quantized row visible to the copies that send it.
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.quantized.at[stage])
            pl.when(ahead < num_tokens)(lambda: self._fetch(x, first_token + ahead, ahead, scratch))

        lax.fori_loop(0, num_tokens, quantize_token, None)

    def open_window(self, routes: Routes, i: Any, scratch: fb.Scratch) -> None:
        """Loads to `scratch.words` the routing data of the block's tokens, from the i-th on."""
        first_token, _ = self.range()
        sources = enumerate(routes.sources())
        start = self.window.start((first_token + i) * self.num_words)
        entries = pl.ds(start, self.window.width)
        fb.load_slices(self.fabric, entries, (scratch.words, sources))

    def send(
        self, x: Any, tokens: Sequence[Any], lists: Any, routes: Routes, scratch: fb.Scratch
    ) -> None:
        """Sends all tokens of this block to the ranks that get them, with a signal for each step.

        Before, call `fetch_first`, and `open_window` for the block's first token. The quantizer
        calls `quantize`. `tokens` are the receive buffer's values and, if quantized, scales.
        `lists`, [N, T·num_words] int32, gets the words that arrive with each token of each rank;
        None: none are sent.
        """
        fabric, window, step_tokens = self.fabric, self.window, self.step_tokens
        ready = scratch.quantized if self.row.wire.quantized else scratch.full
        rank, peers = fabric.rank(), self.peers()
        first_token, num_tokens = self.range()

        def send_token(i: jax.Array, _: None) -> None:
            """Sends the block's i-th token from its stage; refills an earlier token's stage."""
            in_window = lax.rem(i, jnp.int32(window.tokens))  # the token's index in the window
            # The kernel has opened the window of the first token.
            pl.when((in_window == 0) & (i > 0))(lambda: self.open_window(routes, i, scratch))
            stage = lax.rem(i, jnp.int32(self.plan.num_stages))
            # The index of the token's first word in a flat array of routing data.
            entry = (first_token + i) * self.num_words

            # `peers` has this rank at a position that differs between blocks. Computing this rank's
            # list a second time costs less than a select for each word.
            window_start = window.start(entry - in_window * self.num_words)  # see `open_window`
            *lists_of_peers, list_here = routes.lists(entry - window_start, [*peers, rank])
            rows = [routes.row(words, i) for words in lists_of_peers]
            further = routes.further_rows(list_here)
            if lists is not None:
                by_peer = list(zip(peers, lists_of_peers, strict=True))
                self._put_lists(stage, entry, lists, by_peer, scratch)
            plgpu.barrier_wait(ready.at[stage])
            for peer, row in zip(peers, rows, strict=True):
                for part, ref in zip(scratch.stages, tokens, strict=True):
                    fb.put_if(row >= 0, part.at[stage], fabric.peer(ref, peer).at[row])
            self._put_further(stage, further, tokens, scratch)
            plgpu.commit_smem_to_gmem_group()
            self._refill(i, x, scratch)

        def send_step(step: jax.Array, _: None) -> None:
            begin = step * step_tokens
            end = jnp.minimum(begin + step_tokens, num_tokens)
            lax.fori_loop(begin, end, send_token, None)
            pl.when(step > 0)(lambda: self._signal_before(step, end - begin))

        lax.fori_loop(0, self.num_steps(), send_step, None)
        plgpu.wait_smem_to_gmem(0)
        fabric.delay_point(1)
        fabric.signal(PUT, jnp.maximum(self.num_steps(), 1))

    def _refill(self, i: jax.Array, x: Any, scratch: fb.Scratch) -> None:
        """Refills the stage of the token that was sent `store_lag` tokens before the i-th."""
        lag, num_stages = self.plan.store_lag, self.plan.num_stages
        first_token, num_tokens = self.range()
        # A stage may be refilled once the copies that send its row have read it. After this wait,
        # only the copies of the last `lag` tokens may still be reading.
        plgpu.wait_smem_to_gmem(lag, wait_read_only=True)
        ahead = i - lag + num_stages  # the next token whose row the stage gets

        @pl.when((i >= lag) & (ahead < num_tokens))
        def refill() -> None:
            if self.row.wire.quantized:  # the quantizer fetches the row
                plgpu.barrier_arrive(scratch.sent.at[lax.rem(i - lag, jnp.int32(num_stages))])
            else:
                self._fetch(x, first_token + ahead, ahead, scratch)

    def _signal_before(self, step: jax.Array, num_sent: jax.Array) -> None:
        """Signals to all peers that the tokens of all steps before `step` have been written."""
        # The caller has issued a group of copies for each of the step's `num_sent` tokens. Groups
        # complete in order, so earlier tokens have arrived once only those are under way. The wait
        # instruction needs a constant; after a shorter step, wait for all groups.
        lax.cond(
            num_sent == self.step_tokens,
            lambda: plgpu.wait_smem_to_gmem(self.step_tokens),
            lambda: plgpu.wait_smem_to_gmem(0),
        )
        self.fabric.delay_point(1)
        self.fabric.signal(PUT, step)

    def _put_further(
        self, stage: jax.Array, rows: Sequence[jax.Array], tokens: Sequence[Any], scratch: Any
    ) -> None:
        """Copies a token from a stage of the ring to its further `rows` in this rank's buffer."""
        values, *scales = (self.fabric.mine(ref) for ref in tokens)
        for row in rows:
            fb.put_if(row >= 0, scratch.stages[0].at[stage], values.at[row])
        if scales:
            # A token may have K - 1 further rows, and a bulk copy takes as long for a row's few
            # scales as for its values. Threads store the scales faster.
            from pallas_kernels.exchange import quantized_rows

            quantized_rows.store_each(scratch.stages[1].at[stage], scales[0], rows)

    def _put_lists(
        self, stage: Any, entry: Any, ref: Any, by_peer: Sequence[tuple[Any, List]], scratch: Any
    ) -> None:
        """Writes a token's list for each peer to the peer's `ref` [this rank, entry:]."""
        fabric, num_words = self.fabric, self.num_words
        rank = fabric.rank()
        # The size of a bulk copy must be a multiple of 16 bytes, that is, of 4 words.
        if num_words % 4:
            for peer, words in by_peer:
                for i, word in enumerate(words):
                    fabric.peer(ref, peer)[rank, entry + i] = word
            return
        for peer, words in by_peer:
            for i, word in enumerate(words):
                scratch.lists[stage, peer, i] = word
        plgpu.commit_smem()
        for peer, _ in by_peer:
            there = fabric.peer(ref, peer).at[rank, pl.ds(entry, num_words)]
            plgpu.copy_smem_to_gmem(scratch.lists.at[stage, peer], there, commit_group=False)

    def _fetch(self, x: Any, token: jax.Array, i: jax.Array, scratch: fb.Scratch) -> None:
        """Starts to copy row `token` of x, the row of the block's i-th token, into the ring."""
        stage = lax.rem(i, jnp.int32(self.plan.num_stages))
        ring = scratch.wide_stages if self.row.wire.quantized else scratch.stages[0]
        fb.fetch(self.fabric.mine(x).at[token], ring.at[stage], scratch.full.at[stage])
