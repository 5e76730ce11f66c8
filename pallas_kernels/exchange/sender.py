"""Implements the warpgroups of a dispatch kernel that send a block's tokens to other ranks.

The expert-major dispatches (`dispatch`) and the rank-major dispatch (`rank_dispatch`) use it. The
sender takes the block's tokens in order. It fetches a token's row into a ring in shared memory, and
writes it to the receive buffer of every rank that gets the token:

    x[t] --copy--> stage of the ring ======== link ========> tokens[row] of each peer
                   list of t for the peer --- link --------> lists[rank, t] of each peer
                         signal: a step has arrived -------> block b of each peer

If the wire format is quantized, rows are fetched into a ring of their own, from which another
warpgroup, the quantizer, quantizes them into the sender's ring.

The kernel may send each peer a list of int32 words along with a token (`list of t` above): either
the numbers of the token's rows in the peer's receive buffer, or the ids of the peer's experts that
get the token. A step is a few tokens that are signalled together. The signal of a step is sent
while the next step's tokens are being sent. The kernel that uses the sender implements `Routes`,
which gives the list and the receive-buffer row of each token.
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

from pallas_kernels.exchange import quantized_rows, short_rows
from pallas_kernels.exchange.plan import Plan, Row, Window, windows
from pallas_kernels.exchange.windows import open_window
from pallas_kernels.fabric import fabric as fb

# The kind of signal by which a block tells its peers that the tokens of a step have been written. A
# block without tokens sends it once.
PUT = 0

# The words that are sent to one rank along with a token: K or more int32 scalars, for example the
# token's rows in that rank's receive buffer.
List = Sequence[jax.Array]


class SenderRefs(NamedTuple):
    """The arrays in global memory that a sender reads and writes."""

    # [T, H], the rows of this rank's tokens.
    x: Any
    # The receive buffer of R rows: an array [R, columns] of values and, if quantized, an array of
    # scales.
    tokens: Sequence[Any]
    # [N, T·num_words] int32: for each source rank, the `num_words` words that arrive with each of
    # its tokens. None if no words are sent.
    lists: Any


class SenderScratch(NamedTuple):
    """The shared memory of a sender with a ring of S stages, one row in each."""

    # [sources, window.width] int32: a slice of each array that `Routes.sources` returns. It has the
    # routing data of the tokens to be sent next.
    words: Any
    # The ring's S stages, whose rows have the format in which they are sent: an array [S, columns]
    # of values and, if rows are quantized, an array of scales.
    stages: Sequence[Any]
    # [S, H], the rows of the S stages before they are quantized. None if rows are sent unquantized.
    wide_stages: Any
    # [S, N, num_words] int32: for the token in each stage, the words (see `List`) for each of the N
    # ranks.
    lists: Any
    # [S] barriers: `full[s]` completes when an input row has arrived in stage s.
    full: Any
    # [S] barriers: `quantized[s]` completes when the quantizer has written a quantized row to stage
    # s, and `sent[s]` when the sender no longer reads that row. None if rows are sent unquantized.
    quantized: Any
    sent: Any


class Routes(Protocol):
    """The interface by which a dispatch kernel gives its sender the destinations of each token."""

    def sources(self) -> Sequence[Any]:
        """Returns the arrays of routing data, [T·num_words] int32 each, in global memory.

        Each array has `num_words` words for each of this rank's tokens, such as the experts that
        the token chooses. The sender loads slices of the arrays into `SenderScratch.words`, from
        which `lists` computes the token's lists.
        """

    def lists(self, entry: jax.Array, ranks: Sequence[jax.Array]) -> Sequence[List]:
        """Returns one token's lists: for each of `ranks`, the int32 words about the token.

        The words for a rank are, for example, the token's rows in that rank's receive buffer.
        `entry` is the column of `SenderScratch.words` where the token's routing data begins.
        """

    def row(self, words: List, i: jax.Array) -> jax.Array:
        """Returns the row of a rank's receive buffer that the sender writes a token to.

        The token is the i-th of the block, and `words` is its list for that rank, which `lists`
        returned. Returns NOWHERE if the rank does not get the token.
        """

    def further_rows(self, words: List) -> Sequence[jax.Array]:
        """Returns a token's rows in this rank's receive buffer, except the one that `row` returns.

        The sender writes the token to these rows, too. (At another rank, that rank's receiver
        warpgroup copies the token to its other rows.) `words` is the token's list for this rank.
        Entries of the result that are NOWHERE are skipped.
        """


@dataclasses.dataclass(frozen=True)
class Sender:
    """Sends a block's tokens to all ranks that get them, by one or two warpgroups of a kernel.

    The kernel calls the methods from its body: `send` and what must precede it in one warpgroup,
    the sender, and `quantize` in another, the quantizer, if the wire format is quantized. The
    kernel allocates the shared memory that `scratch` describes, and passes it to the methods.

    Attributes:
      fabric: how ranks reach each other.
      plan: the number of blocks, the number of tokens that a block sends between two signals (a
        step), and the number of rows in its ring in shared memory.
      num_tokens: T, the number of this rank's tokens.
      row: the size of an input row, and of the row in the format it is sent in.
      num_words: the number of int32 words of routing data for a token in each array of
        `Routes.sources`, and the number of words that a rank gets with a token.
      num_sources: the number of arrays that `Routes.sources` returns.
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
        """The slice of the arrays of `Routes.sources` that the sender holds in shared memory."""
        return windows(self.plan, self.num_tokens, self.num_words)[0]

    @property
    def step_window(self) -> Window:
        """The slice of one source rank's routing data that the receiver warpgroup loads at a time.

        Routing data is `num_words` int32 for each token, such as the token's rows on this rank. The
        slice has the words of one step: the tokens that a block sends between two signals.
        """
        return windows(self.plan, self.num_tokens, self.num_words)[1]

    def scratch(self) -> SenderScratch:
        """Returns the types of the shared memory that the kernel must allocate for the sender."""
        stages, row = self.plan.num_stages, self.row
        wide = plgpu.SMEM((stages, row.hidden), row.dtype) if row.wire.quantized else None
        return SenderScratch(
            words=plgpu.SMEM((self.num_sources, self.window.width), jnp.int32),
            stages=[plgpu.SMEM((stages, columns), t) for columns, t in row.parts],
            wide_stages=wide,
            lists=plgpu.SMEM((stages, self.fabric.num_ranks, self.num_words), jnp.int32),
            full=plgpu.Barrier(num_barriers=stages),
            quantized=plgpu.Barrier(num_barriers=stages) if row.wire.quantized else None,
            sent=plgpu.Barrier(num_barriers=stages) if row.wire.quantized else None,
        )

    def range(self) -> tuple[jax.Array, jax.Array]:
        """Returns this block's first token and its number of tokens, two int32 scalars."""
        return self.plan.tokens_of_block(lax.axis_index("block"), self.num_tokens)

    def num_steps(self) -> jax.Array:
        _, num_tokens = self.range()
        return lax.div(num_tokens + (self.step_tokens - 1), jnp.int32(self.step_tokens))

    def peers(self) -> list[jax.Array]:
        """Returns all N ranks, this rank included, in the order in which this block sends to them.

        The order differs between blocks, to spread the load over the links.
        """
        num_ranks = self.fabric.num_ranks
        offset = fb.first_peer(self.fabric)
        return [lax.rem(i + offset, jnp.int32(num_ranks)) for i in range(num_ranks)]

    @property
    def num_warpgroups(self) -> int:
        """The number of warpgroups: the sender and, if the wire is quantized, the quantizer."""
        return 2 if self.row.wire.quantized else 1

    def fetch_first(self, x: Any, scratch: SenderScratch) -> None:
        """Starts to copy the rows of this block's first tokens into the ring, one to each stage.

        `x` is [T, H] in global memory, the rows of this rank's tokens.
        """
        first, count = self.range()

        def fetch(i: jax.Array, _: None) -> None:
            self._fetch(x, first + i, i, scratch)

        lax.fori_loop(0, jnp.minimum(count, self.plan.num_stages), fetch, None)

    def quantize(self, x: Any, scratch: SenderScratch) -> None:
        """Quantizes the rows of this block's tokens, by a warpgroup of their own.

        Runs while the sender sends earlier rows, and fetches all rows but those of `fetch_first`.
        Only for a quantized wire format. `x` is [T, H] in global memory, the rows of this rank's
        tokens.
        """
        first_token, num_tokens = self.range()
        num_stages = self.plan.num_stages

        def quantize_token(i: jax.Array, _: None) -> None:
            stage, ahead = lax.rem(i, jnp.int32(num_stages)), i + num_stages
            plgpu.barrier_wait(scratch.full.at[stage])
            pl.when(i >= num_stages)(lambda: plgpu.barrier_wait(scratch.sent.at[stage]))
            parts = [part.at[stage] for part in scratch.stages]
            wide = scratch.wide_stages.at[stage]
            quantized_rows.quantize_row(self.fabric, self.row.wire, wide, *parts)
            # After this fence, every thread has read the input row, so that it may be overwritten.
            # The fence also makes the quantized row visible to the copies that send it.
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch.quantized.at[stage])
            pl.when(ahead < num_tokens)(lambda: self._fetch(x, first_token + ahead, ahead, scratch))

        lax.fori_loop(0, num_tokens, quantize_token, None)

    def open_window(self, routes: Routes, i: Any, scratch: SenderScratch) -> None:
        """Loads the routing data of the block's next tokens, from the i-th on, to `scratch.words`.

        The routing data are the arrays of `routes.sources()`. A call loads the data of
        `window.tokens` tokens.
        """
        first_token, refs = self.range()[0], routes.sources()
        entry = (first_token + i) * self.num_words
        open_window(self.fabric, self.window, entry, (scratch.words, enumerate(refs)))

    def send(self, refs: SenderRefs, routes: Routes, scratch: SenderScratch) -> None:
        """Sends all tokens of this block to the ranks that get them, with a signal for each step.

        A step is `step_tokens` tokens; its signal tells all peers that the tokens have arrived. The
        caller must have called `fetch_first`, and `open_window` for the block's first token. If the
        wire format is quantized, another warpgroup must call `quantize`.
        """
        fabric, plan, window = self.fabric, self.plan, self.window
        lag, num_stages, step_tokens = plan.store_lag, plan.num_stages, self.step_tokens
        ready = scratch.quantized if self.row.wire.quantized else scratch.full
        rank, peers = fabric.rank(), self.peers()
        first_token, num_tokens = self.range()

        def put_row(stage: jax.Array, row: jax.Array, locate: Callable[[Any], Any]) -> None:
            """Writes the row in a stage to row `row` of one rank's receive buffer, if `row` >= 0.

            `locate` maps a reference to this rank's receive buffer to that of the destination rank.
            """
            for part, ref in zip(scratch.stages, refs.tokens, strict=True):
                fb.put_if(fabric, row >= 0, part.at[stage], locate(ref).at[row])

        def send_token(i: jax.Array, _: None) -> None:
            in_window = lax.rem(i, jnp.int32(window.tokens))
            pl.when((in_window == 0) & (i > 0))(lambda: self.open_window(routes, i, scratch))
            stage, entry = lax.rem(i, jnp.int32(num_stages)), (first_token + i) * self.num_words

            # `peers` contains this rank, at a position that differs between blocks. To find this
            # rank's list in `lists_of_peers` would cost a select for each word. So it is computed a
            # second time instead, as the last result of `routes.lists`.
            in_words = entry - window.start(entry - in_window * self.num_words)
            *lists_of_peers, list_here = routes.lists(in_words, [*peers, rank])
            rows = [routes.row(words, i) for words in lists_of_peers]
            further = routes.further_rows(list_here)
            if refs.lists is not None:
                self._put_lists(stage, entry, refs.lists, peers, lists_of_peers, scratch)
            plgpu.barrier_wait(ready.at[stage])
            for peer, row in zip(peers, rows, strict=True):
                put_row(stage, row, functools.partial(fabric.peer, rank=peer))
            values, *scales = (fabric.mine(ref) for ref in refs.tokens)
            for row in further:
                fb.put_if(fabric, row >= 0, scratch.stages[0].at[stage], values.at[row])
            for ref, part in zip(scales, scratch.stages[1:], strict=True):
                short_rows.store_each(fabric, part.at[stage], ref, further)
            plgpu.commit_smem_to_gmem_group()

            # A stage may be refilled once the copies that send its row have read it. After this
            # wait, only the copies of the last `lag` tokens may still be reading.
            plgpu.wait_smem_to_gmem(lag, wait_read_only=True)
            ahead = i - lag + num_stages

            @pl.when((i >= lag) & (ahead < num_tokens))
            def refill() -> None:
                if self.row.wire.quantized:
                    plgpu.barrier_arrive(scratch.sent.at[lax.rem(i - lag, jnp.int32(num_stages))])
                else:
                    self._fetch(refs.x, first_token + ahead, ahead, scratch)

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
        """Signals to all peers that the tokens of all steps before `step` have been written.

        The caller has issued the writes of step `step`, which has `num_sent` tokens, as one group
        of copies for each token. Groups complete in order. So the earlier steps' tokens have
        arrived once only the last `num_sent` groups are under way. The wait instruction needs a
        constant number. So if `step` has fewer tokens than others, it waits for all groups.
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
        """Writes a token's list for each peer to lists_ref[rank, entry:] in the peer's memory.

        A list whose size is a multiple of 16 bytes is written by a bulk copy from `scratch.lists`,
        and any other list word by word.

        Args:
          stage: the ring stage of the token, whose part of `scratch.lists` the copies read.
          entry: the index of the list's first word in `lists_ref[rank]`, where `rank` is this rank.
          lists_ref: `SenderRefs.lists`.
          peers: the N ranks in sending order.
          lists_of_peers: the token's list for each of `peers`.
          scratch: the sender's shared memory.
        """
        fabric, num_words = self.fabric, self.num_words
        rank = fabric.rank()
        # The size of a bulk copy must be a multiple of 16 bytes, that is, of 4 words.
        if num_words % 4:
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
        """Starts to copy row `token` of x, the row of the block's i-th token, into the ring."""
        stage = lax.rem(i, jnp.int32(self.plan.num_stages))
        ring = scratch.wide_stages if self.row.wire.quantized else scratch.stages[0]
        plgpu.copy_gmem_to_smem(
            self.fabric.mine(x).at[token],
            ring.at[stage],
            scratch.full.at[stage],
            oob_mode=fb.IN_BOUNDS,
        )
