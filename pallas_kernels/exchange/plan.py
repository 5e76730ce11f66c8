"""Plans the thread blocks, shared memory and workspace of the dispatch and combine kernels.

A function `for_<kernel>` returns the static choices of that kernel, with at most `num_blocks`
thread blocks, by default _NUM_BLOCKS. A function `<kernel>_workspace` returns the global memory
that a call allocates besides its results: buffer's name -> bytes per rank. Imports neither Pallas
nor Mosaic, so that machines without a GPU can compute sizes.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.fabric import memory_map
from pallas_kernels.fabric.hardware import (
    SHARED_MEMORY_BYTES,
    WARPGROUP,
    WORD_BYTES,
    align_up,
    padded_columns,
    vector_length,
)
from pallas_kernels.formats import PLAIN, RowFormat

# The size of a row that is sent must be a multiple of this many bytes.
ROW_BYTES = 128
# A quantized row must have a multiple of this many columns: each of a warpgroup's 4 warps then
# quantizes whole blocks of 128 values, and the float32 scales fill whole 16-byte vectors.
ROW_MULTIPLE = 512
# This many bytes of shared memory are reserved for barriers and for the alignment of buffers.
_PADDING_BYTES = 16 * 1024
# A window of a dispatch's sender and a step of a combine have at most this many tokens.
_WINDOW_TOKENS = 16
# A ring buffer in shared memory holds at most this many rows.
_RING_STAGES = 16

# The time of a call with at most this many tokens per rank is mostly latency. A larger call is
# limited by the bandwidth of the links.
FEW_TOKENS = 256
# The low-latency protocol was measured for at most this many choices of each rank, whose weights it
# sends as values. It has room for MAX_VALUES.
_FEW_CHOICES = 2048
# This number of thread blocks was the fastest on 2, 4 and 8 H200s.
_NUM_BLOCKS = 128

# Combine, measured on 2 H200s. A worker warpgroup loads at most this many of a token's rows at a
# time.
ROWS_OF_SUM = 4
# The sums that a thread block sends to one rank between two signals take at most this many bytes,
# unless a single sum is larger.
_STEP_BYTES = 16 * 1024
_RECEIVE_STEPS = 4
_COMBINE_WORKERS = 5
# Each thread holds about this many 16-byte vectors of a tile, the columns of a row that a worker
# warpgroup sums at a time.
_TILE_VECTORS = 2

# A dispatch of more than FEW_TOKENS tokens. The rows that a block sends between two signals take
# about this many bytes.
_DISPATCH_BYTES = 32 * 1024
_COPY_STAGES = 16  # the most rows in the receiver's ring


def padded_hidden(hidden: int, dtype: jax.typing.DTypeLike, wire: RowFormat = PLAIN) -> int:
    """Returns the hidden size rounded up to the number of columns that the kernels need."""
    columns = ROW_BYTES // jnp.dtype(dtype).itemsize
    return align_up(hidden, ROW_MULTIPLE if wire.quantized else columns)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The choices that a dispatch or combine kernel is compiled with."""

    num_blocks: int  # thread blocks per rank
    num_stages: int = 2  # rows in a sender's ring in shared memory
    # Later tokens that a sender sends before a token's stage may be refilled, so that the copies
    # out of the stage have time to read it. Less than `num_stages`.
    store_lag: int = 1
    # Tokens whose routing data a block holds in shared memory at a time.
    window_tokens: int = _WINDOW_TOKENS
    step_tokens: int = 1  # tokens that a block sends between two signals
    num_copy_stages: int = 2  # rows in the ring of a dispatch's receiver
    # Steps whose sums a combine's receive buffer holds, at least 3: a combine reads the sums
    # received for one step, sends the sums of the next, and lists the rows of the one after that.
    receive_steps: int = 3
    num_workers: int = 2  # worker warpgroups of a block of combine

    def tokens_per_block(self, num_tokens: int) -> int:
        return -(-num_tokens // self.num_blocks)

    def steps_per_block(self, num_tokens: int) -> int:
        return -(-self.tokens_per_block(num_tokens) // self.step_tokens)

    def tokens_of_block(self, block: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
        """Returns the first token of a block and its number of tokens, the same on every rank."""
        per_block = self.tokens_per_block(num_tokens)
        first = block * per_block
        return first, jnp.clip(num_tokens - first, 0, per_block)


@dataclasses.dataclass(frozen=True)
class Window:
    """The slice of a flat [T·K] routing array that a block holds in shared memory at a time."""

    tokens: int
    width: int  # tokens · K, rounded up to a multiple of WARPGROUP
    total: int  # the number of entries of the padded array

    @classmethod
    def of(cls, tokens: int, plan: Plan, num_tokens: int, top_k: int) -> Window:
        """Returns the window of `tokens` tokens, or of all tokens of a block if these are fewer."""
        tokens = min(tokens, plan.tokens_per_block(num_tokens))
        width = align_up(tokens * top_k, WARPGROUP)
        return cls(tokens, width, max(width, num_tokens * top_k))

    def start(self, entry: jax.Array) -> jax.Array:
        """Returns `entry`, moved back if a slice of `width` entries from it would not fit."""
        return jnp.minimum(entry, self.total - self.width)

    def pad(self, flat: jax.Array, value: int) -> jax.Array:
        """Appends entries of `value` to `flat`, [..., T·K], up to `total` entries."""
        return pad_last(flat, self.total - flat.shape[-1], value)


def pad_last(array: jax.Array, amount: int, value: int = 0) -> jax.Array:
    """Appends `amount` entries of `value` to the last axis of an array."""
    widths = [(0, 0)] * (array.ndim - 1) + [(0, amount)]
    return jnp.pad(array, widths, constant_values=value)


@dataclasses.dataclass(frozen=True)
class Row:
    """The size of an input row of a kernel, and of that row in the format it is sent in."""

    hidden: int  # padded by `padded_hidden`
    dtype: jax.typing.DTypeLike
    wire: RowFormat = PLAIN

    @property
    def parts(self) -> list[tuple[int, jax.typing.DTypeLike]]:
        """(columns, dtype) of a sent row's values and, if it is quantized, of its scales."""
        return self.wire.row_parts(self.hidden, self.dtype)

    @property
    def sent_bytes(self) -> int:
        return self.wire.row_bytes(self.hidden, self.dtype)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of a sender's ring: the input row and a quantized sent row."""
        input_bytes = self.hidden * jnp.dtype(self.dtype).itemsize
        return input_bytes + self.sent_bytes if self.wire.quantized else input_bytes

    def room(self, words: int) -> int:
        """Returns the bytes of shared memory left for rows, besides `words` 32-bit words."""
        # A dispatch keeps a row of zeros, which it copies to the rows that get no token.
        bytes_of_zeros = sum(
            padded_columns(columns, dtype) * jnp.dtype(dtype).itemsize
            for columns, dtype in self.parts
        )
        return SHARED_MEMORY_BYTES - WORD_BYTES * words - _PADDING_BYTES - bytes_of_zeros


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of one call of a dispatch or combine kernel, besides those of a row."""

    num_tokens: int  # of each rank
    num_ranks: int
    top_k: int
    num_experts: int  # on all ranks


@dataclasses.dataclass(frozen=True)
class ReceiveBuffer:
    """Each rank's receive buffer in the expert-major layout, of R rows."""

    capacity: int  # R
    alignment: int = 1  # the rows of each expert start at a multiple of this number
    # How a rank drops rows if more than R would arrive. If true, each of its experts keeps at most
    # q rows, where q is the largest number with which the kept rows fit, and a dispatch's result
    # `rows` is R for a dropped row. If false, the rank drops the rows that would lie at row R or
    # beyond.
    fair: bool = False
    zero_unused: bool = True  # whether rows past the last expert's are zero; else undefined


def fits_shared_memory(row: Row, *, num_ranks: int, top_k: int, num_experts: int) -> bool:
    # A dispatch needs room for 3 rows with the shortest steps: one of its two rings then has 2, and
    # fetches a row while it stores another. A combine needs room for the lists of one token.
    words = _dispatch_words(num_ranks, top_k, num_experts)
    return row.room(words) // row.stage_bytes >= 3 and _combine_step(row, num_ranks, top_k) >= 1


def _checked_plan(plan: Plan, num_tokens: int) -> Plan:
    """Returns the plan; raises ValueError if a signal cannot count a block's steps."""
    max_steps = 2**memory_map.COUNT_BITS - 1
    if plan.steps_per_block(num_tokens) > max_steps:
        min_blocks = -(-num_tokens // (max_steps * plan.step_tokens))
        raise ValueError(
            f"num_blocks (JAX_EP_NUM_BLOCKS) must be at least {min_blocks} for {num_tokens} "
            f"tokens: a block sends {plan.step_tokens} tokens a step and signals at most "
            f"{max_steps} steps, but num_blocks is {plan.num_blocks}."
        )
    return plan


# ------------------------------------------------------------------------- low-latency protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowLatencyPlan(Sizes):
    """The sizes and block counts that a kernel over the low-latency protocol is compiled with."""

    hidden: int  # padded by `padded_hidden`
    dtype: jax.typing.DTypeLike
    num_gpus: int  # GPUs of the host that share symmetric memory; at least N
    # This many warpgroups of each block send and receive tiles.
    warpgroups = 4
    max_blocks: int = memory_map.MAX_WORKERS // warpgroups
    max_stages: int = 2 * _RING_STAGES  # the most rows that a kernel holds in shared memory

    @property
    def vector(self) -> int:
        return vector_length(self.dtype)

    @property
    def tile(self) -> int:
        """The number of columns of a tile of 2 KiB, the unit in which the kernels send a row."""
        return WARPGROUP * self.vector

    @property
    def num_tiles(self) -> int:
        return -(-self.hidden // self.tile)

    @property
    def tiles_of_worker(self) -> int:
        return -(-self.num_tiles // self.warpgroups)

    @property
    def tokens_per_block(self) -> int:
        return -(-self.num_tokens // self.max_blocks)

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.tokens_per_block)

    @property
    def num_stages(self) -> int:
        """How many rows, up to `max_stages`, fit in shared memory besides a kernel's lists."""
        # A dispatch keeps the top-k choices of all ranks' tokens in shared memory, one word each.
        choices = self.num_ranks * align_up(self.num_tokens * self.top_k, WARPGROUP)
        # A combine keeps 4 words for each choice of each token of a block, for every rank: weight,
        # and entries in lists of row numbers.
        lists = 4 * self.num_ranks * self.tokens_per_block * self.top_k
        # A dispatch has arrays of a word per expert, and some more: for each source rank, counts of
        # choices and next rows; 5 for groups (2 of ends, 1 of starts, 2 of workspace), taken as 7.
        words = (7 + 2 * self.num_ranks) * (count_width(self.num_experts) + WARPGROUP)
        row = Row(self.hidden, self.dtype)
        return min(self.max_stages, row.room(words + max(choices, lists)) // row.stage_bytes)

    def dispatch_workspace(self) -> dict[str, int]:
        """Returns the workspace of `low_latency_dispatch`."""
        # The row of each choice of every source rank's tokens, and each expert's count.
        words = self.num_tokens * self.top_k + count_width(self.num_experts)
        return {"routes": WORD_BYTES * self.num_ranks * words}

    def fits(self) -> bool:
        """Returns whether the low-latency protocol and shared memory have room for this plan."""
        tiles_for_peer = self.tokens_per_block * self.tiles_of_worker  # that a warpgroup sends
        return (
            1 < self.num_ranks <= self.num_gpus <= memory_map.MAX_LOW_LATENCY_GPUS
            and self.hidden >= self.tile  # a row has at least one whole tile
            and tiles_for_peer <= memory_map.tiles_of_channel(self.num_gpus)
            and self.num_tokens * self.top_k <= _FEW_CHOICES
            and self.num_experts <= 2**15  # expert ids are sent as 16-bit integers
            and self.num_stages > 0
        )


def for_low_latency(
    row: Row, sizes: Sizes, num_gpus: int, num_blocks: int | None = None
) -> LowLatencyPlan | None:
    """Returns the `LowLatencyPlan` of the low-latency kernels, or None if they cannot run.

    `num_gpus` is the number of GPUs of the host that share symmetric memory. The plan has at most
    `num_blocks` thread blocks, if that is not None, and no more than the protocol has room for.
    """
    plan = LowLatencyPlan(
        **dataclasses.asdict(sizes), hidden=row.hidden, dtype=row.dtype, num_gpus=num_gpus
    )
    if num_blocks is not None:
        plan = dataclasses.replace(plan, max_blocks=min(num_blocks, plan.max_blocks))
    return plan if not row.wire.quantized and plan.fits() else None


# ------------------------------------------------------------------------------------- dispatch


def windows(plan: Plan, num_tokens: int, num_words: int) -> tuple[Window, Window]:
    """Returns the slices of routing data that a dispatch's sender and receiver load at a time."""
    # A token has `num_words` words of routing data. Both slice arrays of the same length, `total`.
    both = [
        Window.of(tokens, plan, num_tokens, num_words)
        for tokens in (plan.window_tokens, plan.step_tokens)
    ]
    total = max(window.total for window in both)
    of_sender, of_step = (dataclasses.replace(window, total=total) for window in both)
    return of_sender, of_step


def count_width(num_experts: int) -> int:
    """Returns E rounded up to whole warpgroups, the length of an array of counts by expert."""
    return align_up(num_experts, WARPGROUP)


def _dispatch_words(num_ranks: int, top_k: int, num_experts: int, step_tokens: int = 2) -> int:
    """Returns how many 32-bit words of shared memory a dispatch needs besides its rows."""
    # The default of `step_tokens` is that of the shortest steps; see `for_dispatch`.
    of_sender, of_step = (align_up(n * top_k, WARPGROUP) for n in (_WINDOW_TOKENS, step_tokens))
    # The rows of choices in both windows; `dispatch_like` reads those of this rank's tokens at
    # every rank.
    choices = num_ranks * (of_sender + of_step)
    # The lists in the sender's ring, and those of the receiver, `step_copies`.
    lists = (_RING_STAGES + step_tokens) * num_ranks * top_k
    # One for each expert, and some for choices that name none; see `dispatch._Dispatch.scratch`.
    next_rows = count_width(num_experts) + WARPGROUP
    # Of `ExpertRows`: for each expert, counts by source rank, and ends without and with padding.
    counts, prefix_sum, ends = num_ranks, 2, 2
    groups = (counts + prefix_sum + ends) * count_width(num_experts)
    return groups + next_rows + choices + lists


def for_dispatch(row: Row, sizes: Sizes, num_blocks: int | None = None) -> Plan:
    """Returns the `Plan` of the kernels of `expert_dispatch` and `dispatch.dispatch_like`."""
    few_tokens = sizes.num_tokens <= FEW_TOKENS
    step_tokens, room = _dispatch_step(row, sizes)
    # The receiver's ring gets up to two thirds of the rows that fit if there are few tokens, else
    # one third, and the sender's ring the remaining room. The limits of 8 and _COPY_STAGES rows
    # leave the rest to the sender's ring where many rows fit.
    fitting = room // row.stage_bytes
    if few_tokens:
        num_copy_stages = min(8, 2 * fitting // 3)
    else:
        num_copy_stages = max(1, min(_COPY_STAGES, fitting // 3))
    # The receiver's ring holds values without scales.
    columns, dtype = row.parts[0]
    copied_bytes = columns * jnp.dtype(dtype).itemsize
    num_stages = min(_RING_STAGES, (room - num_copy_stages * copied_bytes) // row.stage_bytes)
    plan = Plan(
        num_blocks=min(num_blocks or _NUM_BLOCKS, sizes.num_tokens),
        num_stages=num_stages,
        store_lag=num_stages // 2,
        num_copy_stages=num_copy_stages,
        step_tokens=step_tokens,
    )
    return _checked_plan(plan, sizes.num_tokens)


def _dispatch_step(row: Row, sizes: Sizes) -> tuple[int, int]:
    """Returns the tokens that a dispatch sends between two signals, and the bytes left for rows."""
    # With few tokens, steps are short, so that receivers start early. Else a step's rows take about
    # _DISPATCH_BYTES, and its routing data, K words for each token, fits in WARPGROUP words.
    most = 2
    if sizes.num_tokens > FEW_TOKENS:
        most = max(2, min(_DISPATCH_BYTES // row.sent_bytes, WARPGROUP // sizes.top_k))
    # The longer a step is, the longer are its lists in shared memory, and the fewer rows fit there.
    # Two rows must fit, one in the sender's ring and one in the receiver's, so steps are shortened
    # until they do. With 2 tokens they do, as `fits_shared_memory` requires.
    for step_tokens in range(most, 1, -1):
        words = _dispatch_words(sizes.num_ranks, sizes.top_k, sizes.num_experts, step_tokens)
        if row.room(words) >= 2 * row.stage_bytes:
            break
    return step_tokens, row.room(words)


def dispatch_workspace(plan: Plan, sizes: Sizes) -> dict[str, int]:
    """Returns the workspace of `expert_dispatch`."""
    # The row of each choice of every source rank's tokens, and each expert's count.
    entries = windows(plan, sizes.num_tokens, sizes.top_k)[0].total
    return {"routes": WORD_BYTES * sizes.num_ranks * (entries + count_width(sizes.num_experts))}


def for_rank_dispatch(
    row: Row, sizes: Sizes, num_blocks: int | None = None, *, weighted: bool = False
) -> Plan:
    """Returns the `Plan` of `rank_dispatch`, where routing weights are sent if `weighted`."""
    step_tokens = 2  # the tokens between two signals: few, so that receivers start early
    list_words = sizes.top_k * (2 if weighted else 1)
    # The sender's window of this rank's tokens, and the lists that every rank sends in a step.
    window_words = align_up(_WINDOW_TOKENS * list_words, WARPGROUP)
    window_words += sizes.num_ranks * align_up(step_tokens * list_words, WARPGROUP)
    lists_in_ring = _RING_STAGES * sizes.num_ranks * list_words
    num_stages = min(_RING_STAGES, row.room(window_words + lists_in_ring) // row.stage_bytes)
    plan = Plan(
        num_blocks=min(num_blocks or _NUM_BLOCKS, sizes.num_tokens),
        num_stages=num_stages,
        store_lag=num_stages // 2,
        step_tokens=step_tokens,
    )
    return _checked_plan(plan, sizes.num_tokens)


def rank_dispatch_workspace(plan: Plan, sizes: Sizes) -> dict[str, int]:
    # The local expert ids of every source rank's choices.
    entries = windows(plan, sizes.num_tokens, sizes.top_k)[0].total
    return {"routes": WORD_BYTES * sizes.num_ranks * entries}


# -------------------------------------------------------------------------------------- combine


def _combine_words(step_tokens: int, num_ranks: int, top_k: int) -> int:
    # The row and the weight of each choice in a step, and for two steps a list for each sum: the
    # number of rows to add, these rows and their weights.
    windows = 2 * num_ranks * align_up(step_tokens * top_k, WARPGROUP)
    return windows + 2 * step_tokens * num_ranks * (1 + 2 * align_up(top_k, ROWS_OF_SUM))


def _combine_step(row: Row, num_ranks: int, top_k: int) -> int:
    """Returns how many tokens a step of a combine has; 0 if not even one token's lists fit."""
    # Workers load rows into registers, so all shared memory is for lists.
    room_words = (SHARED_MEMORY_BYTES - _PADDING_BYTES) // WORD_BYTES
    row_bytes = row.hidden * jnp.dtype(row.dtype).itemsize
    step_tokens = max(1, min(_STEP_BYTES // row_bytes, _WINDOW_TOKENS))
    while step_tokens and _combine_words(step_tokens, num_ranks, top_k) > room_words:
        step_tokens -= 1
    return step_tokens


def for_combine(row: Row, sizes: Sizes, num_blocks: int | None = None) -> Plan:
    """Returns the `Plan` of the kernel of `combine.combine`."""
    plan = Plan(
        num_blocks=min(num_blocks or _NUM_BLOCKS, sizes.num_tokens),
        step_tokens=_combine_step(row, sizes.num_ranks, sizes.top_k),
        receive_steps=_RECEIVE_STEPS,
        num_workers=_COMBINE_WORKERS,
    )
    return _checked_plan(plan, sizes.num_tokens)


def combine_tile(row: Row) -> int:
    """Returns how many columns of a row a warpgroup of a combine sums at a time."""
    vector = vector_length(row.dtype)
    # All tiles have equally many columns, so their number divides that of the smallest tiles.
    max_tiles = row.hidden // (ROW_MULTIPLE if row.wire.quantized else vector)
    # With `enough` tiles or more, a thread holds at most _TILE_VECTORS vectors of a tile, so these
    # are tried first. With more than 4 · `enough`, over half of the threads would have no vector.
    enough = -(-row.hidden // (_TILE_VECTORS * WARPGROUP * vector))
    numbers = [*range(enough, 4 * enough + 1), *range(enough, 0, -1)]
    return row.hidden // next(number for number in numbers if max_tiles % number == 0)


def combine_receive_buffer(
    plan: Plan, row: Row, num_tokens: int, num_ranks: int
) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of the arrays into which ranks write sums for this rank.

    A sum's values and, if quantized, its scales: [blocks, steps, source ranks, tokens of a step,
    columns].
    """
    steps = min(plan.receive_steps, plan.steps_per_block(num_tokens))
    tokens = min(plan.step_tokens, plan.tokens_per_block(num_tokens))
    sums = (plan.num_blocks, steps, num_ranks, tokens)
    return [jax.ShapeDtypeStruct((*sums, columns), dtype) for columns, dtype in row.parts]


def combine_workspace(plan: Plan, row: Row, sizes: Sizes) -> dict[str, int]:
    """Returns the workspace of `combine.combine`: the buffer in which it receives sums."""
    parts = combine_receive_buffer(plan, row, sizes.num_tokens, sizes.num_ranks)
    return {"receive buffer": sum(part.size * part.dtype.itemsize for part in parts)}
