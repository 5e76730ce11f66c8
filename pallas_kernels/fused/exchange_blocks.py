"""The thread blocks of a fused kernel that dispatch rows, in the order of the receiving experts.

Block b of every rank handles the same range of tokens, as in `exchange.dispatch`, with three
warpgroups. But a token leaves for a rank in the order of its first row there (`RowOrder`), so that
the rows of the first experts are complete soon. The warpgroups:

  sender    computes the rows of all its tokens, or reads them from its peers if they are known;
            sends each peer the list of those there; then puts each token into the first of its
            rows at every rank that gets it, and this rank's own tokens into all of theirs;
  receiver  sorts the tokens of its peers in the same way, waits for each step of them, and copies
            a token that several experts of this rank get from its first row to its other rows;
  filler    writes zeros between the experts' rows and behind them, and, where the routes are new,
            its share of the table of tiles that the other blocks multiply.

Blocks report to those that multiply:

  SENT      1 + r: this rank's own tokens are in their rows before row r, and so are the zeros
            between experts' rows, all of them; the table is written;
  RECEIVED  1 + r: the tokens of all other ranks are in their rows before row r.
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
from pallas_kernels.exchange.plan import Plan
from pallas_kernels.exchange.row_order import RowOrder
from pallas_kernels.fabric import fabric as fb
from pallas_kernels.fabric.hardware import LANES, align_up
from pallas_kernels.matmul.row_tiles import count_tiles, most_tiles, write_entry, write_tiles

PUT = 0  # kind of signal: sent after each step
SENT, RECEIVED = range(2)  # kinds of report
_MULTIPLE = 4  # of a block's tokens: a list of their rows is then of whole 16 bytes


@dataclasses.dataclass(frozen=True)
class ExchangeBlocks:
    """The code of the blocks, and their static arguments.

    Attributes:
      fabric: how ranks reach each other.
      plan: number of blocks, tokens of a step, and depth of the rings.
      num_tokens: T.
      top_k: K.
      hidden: H, of rows of the dtype.
      dtype: of rows.
      expert_rows: where rows lie.
      routes_known: whether the rows of the tokens are an operand; else their experts are.
      heights: the numbers of rows that a tile may have, as of `grouped_matmul.Tiles`.
    """

    fabric: fb.Fabric
    plan: Plan
    num_tokens: int
    top_k: int
    hidden: int
    dtype: Any
    expert_rows: ExpertRows
    routes_known: bool
    heights: tuple[int, ...]

    @property
    def num_blocks(self) -> int:
        return self.plan.num_blocks

    @property
    def block_tokens(self) -> int:
        """Tokens of a block; the last blocks may have fewer."""
        return align_up(self.plan.tokens_per_block(self.num_tokens), _MULTIPLE)

    @property
    def step_tokens(self) -> int:
        return min(self.plan.step_tokens, self.block_tokens)

    @property
    def num_steps(self) -> int:
        return -(-self.block_tokens // self.step_tokens)

    @property
    def order(self) -> RowOrder:
        return RowOrder(self.fabric, self.block_tokens, self.top_k, self.expert_rows.capacity)

    @property
    def list_width(self) -> int:
        """Entries of a list of all tokens' rows, or choices: those of all blocks, padded."""
        of_block = self.block_tokens * self.top_k
        return (self.num_blocks - 1) * of_block + self.order.listed

    def shared(self, num_operands: int) -> tuple[int, ...]:
        """Returns which of the kernel's operands and results peers reach: tokens, and rows."""
        return (1, num_operands) if self.routes_known else (num_operands, num_operands + 1)

    def pad(self, lists: jax.Array) -> jax.Array:
        """Pads the last axis of lists of rows or choices, [..., T·K], as the kernel needs them."""
        widths = [(0, 0)] * (lists.ndim - 1) + [(0, self.list_width - lists.shape[-1])]
        return jnp.pad(lists, widths, constant_values=fb.NOWHERE)

    @property
    def table_type(self) -> jax.ShapeDtypeStruct:
        """The table of tiles, as `row_tiles` describes it."""
        of_experts = self.expert_rows
        most = most_tiles(of_experts.num_local_experts, self.heights[-1], of_experts.capacity)
        return jax.ShapeDtypeStruct((most + 1, 4), jnp.int32)

    def out_type(self) -> list[jax.ShapeDtypeStruct]:
        """The types of the results: tokens, and with new routes rows, counts, layout, table."""
        of_experts, num_ranks = self.expert_rows, self.fabric.num_ranks
        tokens = jax.ShapeDtypeStruct((of_experts.capacity, self.hidden), self.dtype)
        if self.routes_known:
            return [tokens]
        per_rank = of_experts.num_local_experts
        return [
            tokens,
            jax.ShapeDtypeStruct((num_ranks, self.list_width), jnp.int32),
            jax.ShapeDtypeStruct((num_ranks, of_experts.count_width), jnp.int32),
            *(jax.ShapeDtypeStruct((size,), jnp.int32) for size in (per_rank, per_rank, 1, 1)),
            self.table_type,
        ]

    def scratch_types(self) -> dict[str, Any]:
        slots, copies, ranks = self.plan.num_slots, self.plan.num_copy_slots, self.fabric.num_ranks
        width, order = self.expert_rows.count_width, self.order
        return dict(
            **self.expert_rows.scratch_types(),
            next_rows=plgpu.SMEM((width + LANES,), jnp.int32),
            tile_ends=plgpu.SMEM((width,), jnp.int32),
            block_choices=plgpu.SMEM((order.listed,), jnp.int32),
            sent={name: kind for name, kind in order.scratch_types(ranks).items()},
            received={name: kind for name, kind in order.scratch_types(ranks).items()},
            slots=plgpu.SMEM((slots, self.hidden), self.dtype),
            copies=plgpu.SMEM((copies, self.hidden), self.dtype),
            step_copies=plgpu.SMEM((ranks * self.step_tokens, 1 + self.top_k), jnp.int32),
            full=plgpu.Barrier(num_barriers=(slots,)),
            copy_full=plgpu.Barrier(num_barriers=(copies,)),
            laid_out=plgpu.Barrier(),
            connected=plgpu.Barrier(),
            filled=plgpu.Barrier(),
        )

    def __call__(self, *refs: Any, sent: Any, received: Any, **scratch: Any) -> None:
        """Runs a block.

        With new routes, refs are x [T, H], choices [width], then the results of `out_type`; with
        known ones x, rows [N, width], tokens, and counts [N, E].
        """
        warpgroup = lax.axis_index("warpgroup")
        if self.routes_known:
            x, rows, tokens, counts = refs
            choices, layout, table = None, (), None
        else:
            x, choices, tokens, rows, counts, *layout, table = refs

        @pl.when(warpgroup == 0)
        def _sender() -> None:
            self.fabric.stage(0)
            if self.routes_known:
                self._read_rows(rows, counts, sent, **scratch)
            else:
                self._find_rows(choices, rows, counts, sent, **scratch)
            self._send(x, tokens, sent, **scratch)

        @pl.when(warpgroup == 1)
        def _receiver() -> None:
            self.fabric.connect()
            if not self.routes_known:
                plgpu.barrier_arrive(scratch["connected"])
            self._receive(rows, tokens, received, **scratch)

        @pl.when(warpgroup == 2)
        def _filler() -> None:
            plgpu.barrier_wait(scratch["laid_out"])
            self.fabric.stage(3)
            if table is not None:
                self._write_table(self.fabric.mine(table), **scratch)
            self.expert_rows.fill_padding([tokens], **scratch)
            plgpu.wait_smem_to_gmem(0)
            plgpu.barrier_arrive(scratch["filled"])
            if layout:
                self.expert_rows.describe(*layout, **scratch)
            if self.expert_rows.zero_unused:
                self.expert_rows.fill_tail([tokens], **scratch)
                plgpu.wait_smem_to_gmem(0)

    @property
    def _first_entry(self) -> jax.Array:
        """The first entry of this block's tokens in a list of all."""
        return lax.axis_index("block") * (self.block_tokens * self.top_k)

    def _of_block(self) -> Any:
        """The entries of a list of all that a block loads: its own, and some behind them."""
        return pl.ds(self._first_entry, self.order.listed)

    # ------------------------------------------------------------------------------------- sender

    def _read_rows(
        self, rows: Any, counts: Any, sent: Any, *, laid_out: Any, **scratch: Any
    ) -> None:
        """Reads the rows of this block's tokens from every rank, and sorts the tokens by them."""
        fabric, num_ranks = self.fabric, self.fabric.num_ranks
        self.expert_rows.fetch_counts(counts, **scratch)
        fabric.connect()
        lists = [
            fabric.peer(rows, peer).at[fabric.rank(), self._of_block()][...]
            for peer in range(num_ranks)
        ]
        for peer, words in enumerate(lists):
            sent["rows"][peer] = words
        self.expert_rows.lay_out(**scratch)
        plgpu.barrier_arrive(laid_out)
        for peer in range(num_ranks):
            self.order.sort(peer, **sent)

    def _find_rows(
        self, choices: Any, rows: Any, counts: Any, sent: Any, *,
        laid_out: Any, connected: Any, **scratch: Any,
    ) -> None:  # fmt: skip
        """Computes the rows of this block's tokens, sends them, and sorts the tokens by them."""
        fabric, of_experts, order = self.fabric, self.expert_rows, self.order
        num_ranks, per_rank = fabric.num_ranks, of_experts.num_local_experts
        of_block = self.block_tokens * self.top_k
        mine = fabric.mine(choices)
        of_experts.send_counts(mine, self.num_tokens * self.top_k, **scratch)
        expert = fb.load(fabric, mine.at[self._of_block()], 1)
        scratch["block_choices"][...] = expert
        end = jnp.minimum(self._first_entry, self.num_tokens * self.top_k)
        of_experts.count_earlier(mine, end, **scratch)
        entry = fb.iota(fabric, order.listed)
        earlier = self._count_equal(expert, entry, scratch["block_choices"])
        of_experts.receive_counts(**scratch)
        of_experts.lay_out(counts, **scratch)
        plgpu.barrier_arrive(laid_out)

        valid = (entry < of_block) & (expert >= 0) & (expert < of_experts.num_experts)
        expert = jnp.where(valid, expert, jnp.zeros_like(expert))
        row = fb.gather(fabric, scratch["next_rows"], expert) + earlier
        if of_experts.fair:
            ends = fb.gather(fabric, scratch["block_ends"].at[0], expert)
            row = jnp.where(row < ends, row, of_experts.capacity)
        owner = lax.div(expert, jnp.int32(per_rank))
        for peer in range(num_ranks):
            sent["rows"][peer] = jnp.where(valid & (owner == peer), row, fb.NOWHERE)
        plgpu.commit_smem()
        plgpu.barrier_wait(connected)
        for peer in range(num_ranks):
            there = fabric.peer(rows, peer).at[fabric.rank(), pl.ds(self._first_entry, of_block)]
            plgpu.copy_smem_to_gmem(
                sent["rows"].at[peer, pl.ds(0, of_block)], there, commit_group=False
            )
        plgpu.commit_smem_to_gmem_group()
        for peer in range(num_ranks):
            order.sort(peer, **sent)

    def _count_equal(self, expert: jax.Array, entry: jax.Array, choices: Any) -> jax.Array:
        """Counts, for each choice of the block, the choices of the same expert before it."""

        def count(token: Any, total: jax.Array) -> jax.Array:
            others = [token * self.top_k + choice for choice in range(self.top_k)]
            for other, theirs in zip(others, [choices[i] for i in others], strict=True):
                same = (expert == theirs) & (entry > other)
                total = total + same.astype(jnp.int32)
            return total

        none = fb.zeros(self.fabric, self.order.listed)
        return lax.fori_loop(0, self.block_tokens, count, none)

    def _send(
        self, x: Any, tokens: Any, sent: Any, *, slots: Any, full: Any, filled: Any, **_: Any
    ) -> None:
        """Puts this block's tokens into their rows, in the order of the rows of each rank."""
        fabric, plan, num_ranks = self.fabric, self.plan, self.fabric.num_ranks
        rank, lag, num_slots = fabric.rank(), plan.store_lag, jnp.int32(plan.num_slots)
        first_token = lax.axis_index("block") * self.block_tokens
        # This rank comes last, and the others in another order in every block.
        turn, others = lax.axis_index("block"), num_ranks - 1
        peers = [lax.rem(turn + i, jnp.int32(max(others, 1))) for i in range(others)]
        peers = [lax.rem(rank + 1 + peer, jnp.int32(num_ranks)) for peer in peers] + [rank]

        def item(number: Any) -> tuple[Any, Any]:
            """Returns the rank and the place in its order of the item of a number."""
            which, place = lax.rem(number, num_ranks), lax.div(number, num_ranks)
            peer = peers[-1]
            for i, other in enumerate(peers[:-1]):
                peer = jnp.where(which == i, other, peer)
            return peer, place

        def fetch(number: Any) -> None:
            peer, place = item(number)

            @pl.when(self._held(sent, peer, place))
            def _() -> None:
                slot = lax.rem(number, num_slots)
                token = first_token + sent["tokens"][peer, place]
                plgpu.copy_gmem_to_smem(
                    fabric.mine(x).at[token], slots.at[slot], full.at[slot], oob_mode=fb.IN_BOUNDS
                )

        total = self.block_tokens * num_ranks

        def put(place: Any, which: int) -> None:
            peer, number = peers[which], place * num_ranks + which
            slot, row = lax.rem(number, num_slots), sent["first_rows"][peer, place]
            held = self._held(sent, peer, place)

            @pl.when(held)
            def _() -> None:
                plgpu.barrier_wait(full.at[slot])

            if which < others:
                fb.put_if(fabric, held, slots.at[slot], fabric.peer(tokens, peer).at[row])
            else:
                entry = sent["tokens"][peer, place] * self.top_k
                for choice in range(self.top_k):
                    row = sent["rows"][peer, jnp.where(held, entry + choice, 0)]
                    kept = held & (row >= 0) & (row < self.expert_rows.capacity)
                    fb.put_if(fabric, kept, slots.at[slot], fabric.mine(tokens).at[row])
            plgpu.commit_smem_to_gmem_group()
            # A slot takes another token once its puts have read it.
            plgpu.wait_smem_to_gmem(lag, wait_read_only=True)
            ahead = number - lag + plan.num_slots

            @pl.when((number >= lag) & (ahead < total))
            def _() -> None:
                fetch(ahead)

        def put_all(place: Any, _: None) -> None:
            for which in range(num_ranks):
                put(place, which)

        def send_step(step: Any, _: None) -> None:
            begin = step * self.step_tokens
            end = jnp.minimum(begin + self.step_tokens, self.block_tokens)
            lax.fori_loop(begin, end, put_all, None)

            @pl.when(step > 0)
            def _() -> (
                None
            ):  # the steps before have arrived once only this one's puts are under way
                lax.cond(
                    end - begin == self.step_tokens,
                    lambda: plgpu.wait_smem_to_gmem(self.step_tokens * num_ranks),
                    lambda: plgpu.wait_smem_to_gmem(0),
                )
                self._tell(step, sent["first_rows"][rank, begin], filled)

        lax.fori_loop(0, min(plan.num_slots, total), lambda i, _: fetch(i), None)
        lax.fori_loop(0, self.num_steps, send_step, None)
        plgpu.wait_smem_to_gmem(0)
        self._tell(jnp.int32(self.num_steps), jnp.int32(self.expert_rows.capacity), filled)

    def _held(self, order: Any, i: Any, place: Any) -> jax.Array:
        """Returns whether the token at a place of an order has a row."""
        return order["first_rows"][i, place] < self.expert_rows.capacity

    def _tell(self, steps: jax.Array, row: jax.Array, filled: Any) -> None:
        """Tells peers that `steps` have arrived, and this rank that its rows before `row` have."""
        self.fabric.stage(1)
        self.fabric.signal(PUT, steps)

        @pl.when(steps == 1)
        def _() -> None:
            plgpu.barrier_wait(filled)

        self.fabric.report(SENT, 1 + row)

    # ----------------------------------------------------------------------------------- receiver

    def _receive(
        self, rows: Any, tokens: Any, received: Any, *,
        copies: Any, copy_full: Any, step_copies: Any, **_: Any,
    ) -> None:  # fmt: skip
        fabric, num_ranks = self.fabric, self.fabric.num_ranks
        capacity, num_copies = self.expert_rows.capacity, jnp.int32(self.plan.num_copy_slots)
        others = [lax.rem(fabric.rank() + i, jnp.int32(num_ranks)) for i in range(1, num_ranks)]

        def begin(i: Any, begun: Any) -> None:
            slot = lax.rem(begun + i, num_copies)
            plgpu.copy_gmem_to_smem(
                fabric.mine(tokens).at[step_copies[i, 0]],
                copies.at[slot],
                copy_full.at[slot],
                oob_mode=fb.IN_BOUNDS,
            )

        def finish(i: Any, begun: Any) -> None:
            slot = lax.rem(begun + i, num_copies)
            plgpu.barrier_wait(copy_full.at[slot])
            for choice in range(self.top_k):
                row = step_copies[i, 1 + choice]
                fb.put_if(fabric, row >= 0, copies.at[slot], fabric.mine(tokens).at[row])
            plgpu.commit_smem_to_gmem_group()

        def list_copies(step: Any) -> jax.Array:
            """Lists the tokens of a step that have several rows here; returns their number.

            An entry holds the first row, then the rows to copy it to, or NOWHERE.
            """
            end = jnp.minimum((step + 1) * self.step_tokens, self.block_tokens)

            def list_place(place: Any, count: jax.Array) -> jax.Array:
                for i in range(len(others)):
                    first = received["first_rows"][i, place]
                    entry = received["tokens"][i, place] * self.top_k
                    entry = jnp.where(first < capacity, entry, 0)
                    further = jnp.int32(0)
                    for choice in range(self.top_k):
                        row = received["rows"][i, entry + choice]
                        kept = (row > first) & (row < capacity)
                        step_copies[count, 1 + choice] = jnp.where(kept, row, fb.NOWHERE)
                        further = further + kept.astype(jnp.int32)
                    step_copies[count, 0] = first  # overwritten unless `count` is raised
                    count = count + ((first < capacity) & (further > 0)).astype(jnp.int32)
                return count

            count = lax.fori_loop(step * self.step_tokens, end, list_place, jnp.int32(0))
            fabric.barrier()
            return count

        def sort_all() -> None:
            for i, source in enumerate(others):
                words = fabric.mine(rows).at[source, self._of_block()]
                received["rows"][i] = fb.load(fabric, words, 1)
            fabric.barrier()
            for i in range(len(others)):
                self.order.sort(i, **received)

        def receive_step(step: Any, begun: jax.Array) -> jax.Array:
            fabric.wait(PUT, step + 1, "dispatch")
            fabric.stage(2)
            fabric.async_fence()
            if not self.routes_known:
                pl.when(step == 0)(sort_all)
            count = list_copies(step)
            lax.fori_loop(0, jnp.minimum(count, num_copies), lambda i, _: begin(i, begun), None)

            def copy_row(i: Any, _: None) -> None:
                finish(i, begun)

                @pl.when(i + num_copies < count)
                def _() -> None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    begin(i + num_copies, begun)

            lax.fori_loop(0, count, copy_row, None)
            plgpu.wait_smem_to_gmem(0)
            row, place = jnp.int32(capacity), (step + 1) * self.step_tokens
            for i in range(len(others)):
                next_row = received["first_rows"][i, jnp.minimum(place, self.block_tokens)]
                row = jnp.minimum(row, next_row)
            fabric.report(RECEIVED, 1 + row)
            return begun + count

        if self.routes_known:
            sort_all()
        lax.fori_loop(0, self.num_steps, receive_step, jnp.int32(0))

    # ------------------------------------------------------------------------------------- filler

    def _write_table(
        self, table: Any, /, *, block_ends: Any, scan: Any, tile_ends: Any, **_: Any
    ) -> None:
        """Writes this block's share of the table of tiles of this rank's experts."""
        fabric, of_experts = self.fabric, self.expert_rows
        per_rank, capacity = of_experts.num_local_experts, of_experts.capacity
        first_expert = fabric.rank() * per_rank
        last_expert = first_expert + per_rank - 1
        local = lax.rem(fb.iota(fabric, of_experts.count_width), jnp.int32(per_rank))
        ends = jnp.minimum(fb.load(fabric, block_ends.at[1], 1), capacity)
        before = fb.gather(
            fabric, block_ends.at[1], jnp.maximum(fb.iota(fabric, of_experts.count_width) - 1, 0)
        )
        starts = jnp.where(local > 0, jnp.minimum(before, capacity), jnp.zeros_like(before))
        tile_ends[...] = of_experts._ends(count_tiles(starts, ends - starts, self.heights), scan)
        fabric.barrier()
        block, num_blocks = lax.axis_index("block"), jnp.int32(self.num_blocks)

        def write_group(i: Any, _: None) -> None:
            group = block + i * num_blocks
            expert = first_expert + group
            end = jnp.minimum(block_ends[1, expert], capacity)
            start = jnp.minimum(block_ends[1, jnp.maximum(expert - 1, 0)], capacity)
            start = jnp.where(group > 0, start, 0)
            entry = tile_ends[expert] - count_tiles(start, end - start, self.heights)
            write_tiles(table, entry, group, start, end - start, self.heights)

        mine = lax.div(per_rank - block + (num_blocks - 1), num_blocks)
        lax.fori_loop(0, jnp.maximum(mine, 0), write_group, None)

        @pl.when(block == 0)
        def _() -> None:
            total, live = tile_ends[last_expert], jnp.minimum(block_ends[1, last_expert], capacity)
            write_entry(table, table.shape[0] - 1, total, live, live, live)

            @pl.when(total == 0)
            def _() -> None:
                write_entry(table, 0, *[jnp.int32(0)] * 4)
