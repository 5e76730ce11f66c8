"""Plans the thread blocks, shared memory and workspace of the dispatch and combine kernels.

A function `for_<kernel>` returns the static choices of that kernel, such as its number of thread
blocks. A function `<kernel>_workspace` returns the global memory that a call of that kernel
allocates in addition to its results, as a dict from the buffer's name to its bytes per rank. The
kernels take the shapes of these buffers from this module.

This module imports neither Pallas nor Mosaic, so that machines without a GPU can compute sizes.
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

Parts = list[tuple[int, jax.typing.DTypeLike]]

# The size of a row that is sent must be a multiple of this many bytes.
ROW_BYTES = 128
# A quantized row must have a multiple of this many columns: each of a warpgroup's 4 warps then
# quantizes whole blocks of 128 values, and the float32 scales fill whole 16-byte vectors.
ROW_MULTIPLE = 512
# This many bytes of shared memory are reserved for barriers and for the alignment of buffers.
_PADDING_BYTES = 16 * 1024
_WINDOW_TOKENS = 16
# A ring buffer in shared memory holds at most this many rows.
_RING_STAGES = 16

# The time of a call with at most this many tokens per rank is mostly latency. A larger call is
# limited by the bandwidth of the links.
FEW_TOKENS = 256
# This number of thread blocks was the fastest on 2, 4 and 8 H200s.
_NUM_BLOCKS = 128

# The following constants tune the combine kernel. They were measured on 2 H200s.
# To sum a token's rows, a worker warpgroup loads at most this many rows at a time.
ROWS_OF_SUM = 4
# The sums that a thread block sends to one rank between two signals take at most this many bytes,
# unless a single sum is larger.
_STEP_BYTES = 16 * 1024
_RECEIVE_STEPS = 4
_COMBINE_WORKERS = 5
# A tile is the columns of a row that a worker warpgroup sums at a time. Each thread holds about
# this many 16-byte vectors of a tile in registers.
_TILE_VECTORS = 2

# The following constants tune the kernel of combine's gradient.
# A worker warpgroup multiplies a token's cotangent with this many rows at a time.
ROWS_OF_COTANGENT = 2
_GRAD_WORKERS = 5
# The ring in shared memory holds at most this many cotangents for each worker warpgroup.
_GRAD_DEPTH = 3

# The following constants tune a dispatch of more than FEW_TOKENS tokens.
# The rows that a block sends between two signals take about this many bytes.
_DISPATCH_BYTES = 32 * 1024
_COPY_STAGES = 16


def padded_hidden(hidden: int, dtype: jax.typing.DTypeLike, wire: RowFormat = PLAIN) -> int:
    """Returns the hidden size rounded up to the number of columns that the kernels need.

    A plain row is padded to a multiple of ROW_BYTES bytes. A row that will be quantized is padded
    to a multiple of ROW_MULTIPLE columns.
    """
    columns = ROW_BYTES // jnp.dtype(dtype).itemsize
    return align_up(hidden, ROW_MULTIPLE if wire.quantized else columns)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The choices that a dispatch or combine kernel is compiled with, such as its number of blocks.

    A block sends its tokens in steps: after each step of `step_tokens` tokens it signals its peers.

    Attributes:
      num_blocks: the number of thread blocks per rank.
      num_stages: the number of rows in a sender's ring buffer in shared memory, or of cotangents
        in the ring of combine's gradient. Combine has no ring.
      store_lag: how many later tokens a sender sends before a token's stage of the ring may be
        refilled. Meanwhile the copies out of the stage have time to read it. Less than
        `num_stages`.
      window_tokens: the number of tokens whose routing data (the receive-buffer rows or the experts
        of their top-k choices) a block holds in shared memory at a time.
      step_tokens: the number of tokens that a block sends between two signals.
      num_copy_stages: the number of rows in the ring through which a dispatch's receiver warpgroup
        copies a received row to the other rows that the token has on this rank.
      receive_steps: the number of steps whose sums a combine's receive buffer holds.
      num_workers: the number of worker warpgroups in a block. They share the work of computing the
        sums of a combine, or of multiplying the cotangents of its gradient.
    """

    num_blocks: int
    num_stages: int = 2
    store_lag: int = 1
    window_tokens: int = 16
    step_tokens: int = 1
    num_copy_stages: int = 2
    receive_steps: int = 3
    num_workers: int = 2

    def __post_init__(self) -> None:
        if not 0 <= self.store_lag < self.num_stages:
            raise ValueError(f"store_lag must be less than num_stages, but the plan is {self}.")
        # A combine uses three steps at once: it reads the sums received for one step, sends the
        # sums of the next step, and lists the rows of the step after that.
        if self.receive_steps < 3:
            raise ValueError(f"receive_steps must be at least 3, but the plan is {self}.")

    def tokens_per_block(self, num_tokens: int) -> int:
        return -(-num_tokens // self.num_blocks)

    def steps_per_block(self, num_tokens: int) -> int:
        return -(-self.tokens_per_block(num_tokens) // self.step_tokens)

    def tokens_of_block(self, block: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
        """Returns the first token of a block and its number of tokens, two int32 scalars.

        Every rank gives the same range of its T tokens to the block of the same index.
        """
        per_block = self.tokens_per_block(num_tokens)
        first = block * per_block
        return first, jnp.clip(num_tokens - first, 0, per_block)


@dataclasses.dataclass(frozen=True)
class Window:
    """The slice of a flat [T·K] routing array that a block holds in shared memory at a time.

    Such an array has an entry for each of the K choices of each token, for example the choice's
    receive-buffer row. When a block has used up a slice, it loads the slice of its next tokens.
    """

    # The number of tokens whose entries a slice has.
    tokens: int
    # The number of entries that a load reads: tokens · K, rounded up to a multiple of WARPGROUP.
    width: int
    # The number of entries of the whole flat array, including its padding.
    total: int

    @classmethod
    def of(cls, tokens: int, plan: Plan, num_tokens: int, top_k: int) -> Window:
        tokens = min(tokens, plan.tokens_per_block(num_tokens))
        width = align_up(tokens * top_k, WARPGROUP)
        return cls(tokens, width, max(width, num_tokens * top_k))

    def start(self, entry: jax.Array) -> jax.Array:
        """Returns where in the flat array to begin to load a slice that contains `entry`.

        The result is `entry` or, if a slice of `width` entries from `entry` would pass the end of
        the array, the last index from which a slice fits. `entry` and the result are indices in the
        array, scalar int32.
        """
        return jnp.minimum(entry, self.total - self.width)

    def pad(self, flat: jax.Array, value: int) -> jax.Array:
        return pad_last(flat, self.total - flat.shape[-1], value)


def pad_last(array: jax.Array, amount: int, value: int = 0) -> jax.Array:
    """Appends `amount` entries of `value` to the last axis of an array."""
    widths = [(0, 0)] * (array.ndim - 1) + [(0, amount)]
    return jnp.pad(array, widths, constant_values=value)


@dataclasses.dataclass(frozen=True)
class Row:
    """The size of an input row of a kernel, and the size of that row in the format it is sent in.

    Attributes:
      hidden: H, the hidden size in columns, padded by `padded_hidden`.
      dtype: the dtype of the input row.
      wire: the format in which rows are sent, plain or quantized.
    """

    hidden: int
    dtype: jax.typing.DTypeLike
    wire: RowFormat = PLAIN

    @property
    def parts(self) -> Parts:
        """The number of columns and the dtype of each part of a row in the format it is sent in.

        A plain row has one part, its values. A quantized row has two parts, its values and its
        scales, which are stored in separate arrays.
        """
        return self.wire.row_parts(self.hidden, self.dtype)

    @property
    def sent_bytes(self) -> int:
        return self.wire.row_bytes(self.hidden, self.dtype)

    @property
    def stage_bytes(self) -> int:
        """The bytes of one stage of a sender's ring buffer in shared memory.

        A stage holds the input row and, if rows are quantized, the quantized row too.
        """
        wide = self.hidden * jnp.dtype(self.dtype).itemsize
        return wide + self.sent_bytes if self.wire.quantized else wide

    def room(self, words: int) -> int:
        """Returns how many bytes of shared memory a kernel has left for rows in ring buffers.

        Subtracts what else the kernel keeps in shared memory: `words` 32-bit words, one row of
        zeros, and a reserve for barriers.
        """
        zeros = sum(
            padded_columns(columns, dtype) * jnp.dtype(dtype).itemsize
            for columns, dtype in self.parts
        )
        return SHARED_MEMORY_BYTES - WORD_BYTES * words - _PADDING_BYTES - zeros


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of one call of a dispatch or combine kernel, besides those of a row.

    Attributes:
      num_tokens: T, the number of tokens of each rank.
      num_ranks: N, the number of ranks.
      top_k: K, the number of experts chosen for each token.
      num_experts: E, the number of experts on all ranks together.
    """

    num_tokens: int
    num_ranks: int
    top_k: int
    num_experts: int


def fits_shared_memory(row: Row, *, num_ranks: int, top_k: int, num_experts: int) -> bool:
    """Returns whether the kernels of dispatch, combine and combine's gradient fit in shared memory.

    Each kernel keeps routing data in shared memory. Besides, a dispatch needs room for 3 rows in
    its rings, a combine for the lists of rows to add in a step of one token, and combine's gradient
    for one cotangent in its ring.
    """
    words = _dispatch_words(num_ranks, top_k, num_experts)
    return (
        row.room(words) // row.stage_bytes >= 3
        and _combine_step(row, num_ranks, top_k) >= 1
        and _combine_grad_stages(row, num_ranks, top_k, num_experts) >= 1
    )


def _with_few_steps(plan: Plan, num_tokens: int) -> Plan:
    """Checks that the blocks of a plan have few enough steps, and returns the plan unchanged.

    A block signals each step of `step_tokens` tokens to its peers. The signal carries the number of
    steps so far, in COUNT_BITS bits.

    Raises:
      ValueError: a block of the plan has more steps than COUNT_BITS bits can count.
    """
    most = 2**memory_map.COUNT_BITS - 1
    if plan.steps_per_block(num_tokens) > most:
        least = -(-num_tokens // (most * plan.step_tokens))
        raise ValueError(
            f"num_blocks (JAX_EP_NUM_BLOCKS) must be at least {least} for {num_tokens} tokens: a "
            f"block sends {plan.step_tokens} tokens a step and signals at most {most} steps, but "
            f"num_blocks is {plan.num_blocks}."
        )
    return plan


# ------------------------------------------------------------------------- low-latency protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class LowLatencyPlan(Sizes):
    """The sizes and block counts that a kernel over the low-latency protocol is compiled with.

    The kernel is a dispatch, a combine or a combine's gradient. The protocol is for few tokens. It
    cuts rows into tiles, which the warpgroups of all thread blocks send and receive. The inherited
    attributes are the sizes of the call.

    Attributes:
      hidden: H, the hidden size in columns, padded by `padded_hidden`.
      dtype: the dtype of rows and of sums of rows.
      num_gpus: the number of GPUs of the ranks' host that share symmetric memory; at least N.
      max_blocks: the largest number of thread blocks to use.
      max_stages: the largest number of rows that a kernel holds in shared memory.
    """

    hidden: int
    dtype: jax.typing.DTypeLike
    num_gpus: int
    # This many warpgroups of each block send and receive tiles.
    warpgroups = 4
    max_blocks: int = memory_map.MAX_WORKERS // warpgroups
    max_stages: int = 2 * _RING_STAGES

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
        """The number of rows that a kernel's ring in shared memory has room for.

        All low-latency kernels use the same number: that of the kernel with the least room left.
        """
        # A dispatch keeps the top-k choices of all ranks' tokens in shared memory, one word each.
        choices = self.num_ranks * align_up(self.num_tokens * self.top_k, WARPGROUP)
        # Combine's gradient needs up to 24 words for each choice of each token of a block, for
        # every rank: 16 partial sums of the choice's inner product, the whole inner product, the
        # choice's weight, and its entries in lists of row numbers.
        sums = 24 * self.num_ranks * self.tokens_per_block * self.top_k
        # A dispatch counts each expert's choices and finds where the expert's rows start and end,
        # in arrays of one word per expert. The number of arrays is rounded up.
        words = (7 + 2 * self.num_ranks) * (count_width(self.num_experts) + WARPGROUP)
        row = Row(self.hidden, self.dtype)
        return min(self.max_stages, row.room(words + max(choices, sums)) // row.stage_bytes)

    def dispatch_workspace(self) -> dict[str, int]:
        """Returns the bytes per rank that `low_latency_dispatch.dispatch` allocates, by buffer.

        The one buffer, "routes", has two things for every source rank: the receive-buffer row of
        each choice of its tokens, and how often the tokens choose each expert.
        """
        words = self.num_tokens * self.top_k + count_width(self.num_experts)
        return {"routes": WORD_BYTES * self.num_ranks * words}

    def fits(self) -> bool:
        """Returns whether the low-latency protocol and shared memory have room for this plan."""
        return (
            1 < self.num_ranks <= self.num_gpus <= memory_map.MAX_LOW_LATENCY_GPUS
            and self.hidden >= self.tile
            and self.tokens_per_block * self.tiles_of_worker
            <= memory_map.tiles_of_channel(self.num_gpus)
            and self.num_tokens * self.top_k <= memory_map.MAX_VALUES // 2
            and self.num_experts <= 2**15  # expert ids are sent as 16-bit integers
            and self.num_stages > 0
        )


def for_low_latency(
    row: Row, sizes: Sizes, num_gpus: int, num_blocks: int | None = None
) -> LowLatencyPlan | None:
    """Returns the `LowLatencyPlan` of the low-latency kernels, or None if they cannot run.

    The kernels cannot run with quantized rows, or with sizes for which `LowLatencyPlan.fits` is
    false. `num_gpus` is the number of GPUs of the ranks' host that share symmetric memory.
    `num_blocks` is the largest number of thread blocks to use; None means as many as the protocol
    has room for.
    """
    plan = LowLatencyPlan(
        **dataclasses.asdict(sizes), hidden=row.hidden, dtype=row.dtype, num_gpus=num_gpus
    )
    if num_blocks is not None:
        plan = dataclasses.replace(plan, max_blocks=min(num_blocks, plan.max_blocks))
    return plan if not row.wire.quantized and plan.fits() else None


# ------------------------------------------------------------------------------------- dispatch


def windows(plan: Plan, num_tokens: int, num_words: int) -> tuple[Window, Window]:
    """Returns the sizes of the slices of routing data that a dispatch loads into shared memory.

    The routing data is a flat array, [T * num_words] int32, with `num_words` words for each token.
    The sender loads the routing data of `plan.window_tokens` tokens at a time. The receiver loads
    the routing data of one step at a time, which is the tokens that a block sends between two
    signals. The array is padded so that it is at least as long as either slice.

    Returns:
      The sender's window and the receiver's. Both have the same `total`, the padded array's length.
    """
    both = [
        Window.of(tokens, plan, num_tokens, num_words)
        for tokens in (plan.window_tokens, plan.step_tokens)
    ]
    total = max(window.total for window in both)
    of_sender, of_step = (dataclasses.replace(window, total=total) for window in both)
    return of_sender, of_step


def count_width(num_experts: int) -> int:
    """Returns the length of an array with a count for each expert: E, rounded up.

    A warpgroup reads or writes such an array an element for each thread, so the length is a
    multiple of its number of threads.
    """
    return align_up(num_experts, WARPGROUP)


def _group_words(num_ranks: int, num_experts: int) -> int:
    """Returns how many int32 words `ExpertScratch` takes in shared memory, except its row of zeros.

    The words hold how often each rank's tokens choose each expert, the workspace of a prefix sum
    over experts, and where each expert's rows end, without and with padding.
    """
    return (num_ranks + 2 + 2) * count_width(num_experts)


def _dispatch_words(num_ranks: int, top_k: int, num_experts: int, step_tokens: int = 2) -> int:
    """Returns how many int32 words of routing data a dispatch keeps in shared memory.

    They hold slices of the routing arrays, lists of tokens' receive-buffer rows, and how often
    experts are chosen.
    """
    windows = align_up(_WINDOW_TOKENS * top_k, WARPGROUP) + align_up(step_tokens * top_k, WARPGROUP)
    choices = num_ranks * windows
    lists = (_RING_STAGES + step_tokens) * num_ranks * top_k
    next_rows = count_width(num_experts) + WARPGROUP
    return _group_words(num_ranks, num_experts) + next_rows + choices + lists


def for_dispatch(row: Row, sizes: Sizes, num_blocks: int | None = None) -> Plan:
    """Returns the `Plan` for the kernels of `dispatch.dispatch` and `dispatch.dispatch_like`.

    `num_blocks` is the largest number of thread blocks to use; None means _NUM_BLOCKS, the number
    measured to be fastest.
    """
    few, step_tokens = sizes.num_tokens <= FEW_TOKENS, 2
    # In a call of many tokens, the rows of a step (the tokens between two signals) take about
    # _DISPATCH_BYTES, and its routing data, K words for each token, fits in WARPGROUP words.
    if not few:
        step_tokens = max(2, min(_DISPATCH_BYTES // row.sent_bytes, WARPGROUP // sizes.top_k))

    def room_for_rows(step_tokens: int) -> int:
        words = _dispatch_words(sizes.num_ranks, sizes.top_k, sizes.num_experts, step_tokens)
        return row.room(words)

    # The longer a step is, the longer are its lists in shared memory, and the fewer rows fit there.
    # Two rows must fit, one in the sender's ring and one in the receiver's, so steps are shortened
    # until they do. With 2 tokens they do, as `fits_shared_memory` requires.
    while step_tokens > 2 and room_for_rows(step_tokens) < 2 * row.stage_bytes:
        step_tokens -= 1
    room = room_for_rows(step_tokens)
    in_ring = room // row.stage_bytes
    num_copy_stages = min(8, 2 * in_ring // 3) if few else max(1, min(_COPY_STAGES, in_ring // 3))
    # The receiver's ring holds values without scales.
    columns, dtype = row.parts[0]
    copied_bytes = columns * jnp.dtype(dtype).itemsize
    num_stages = min(_RING_STAGES, (room - num_copy_stages * copied_bytes) // row.stage_bytes)
    plan = Plan(
        num_blocks=min(num_blocks or _NUM_BLOCKS, sizes.num_tokens),
        num_stages=num_stages,
        store_lag=num_stages // 2,
        window_tokens=_WINDOW_TOKENS,
        num_copy_stages=num_copy_stages,
        step_tokens=step_tokens,
    )
    return _with_few_steps(plan, sizes.num_tokens)


def dispatch_workspace(plan: Plan, sizes: Sizes) -> dict[str, int]:
    """Returns the bytes per rank that `dispatch.dispatch` allocates, by buffer.

    The one buffer, "routes", has two things for every source rank: the receive-buffer row of each
    choice of its tokens, and how often the tokens choose each expert.
    """
    entries = windows(plan, sizes.num_tokens, sizes.top_k)[0].total
    return {"routes": WORD_BYTES * sizes.num_ranks * (entries + count_width(sizes.num_experts))}


def for_rank_dispatch(
    row: Row, sizes: Sizes, num_blocks: int | None = None, *, weighted: bool = False
) -> Plan:
    """Returns the `Plan` with which the kernel of `rank_dispatch.rank_dispatch` is compiled.

    `weighted` is whether routing weights are sent with the choices of experts. `num_blocks` is the
    largest number of thread blocks to use; None means _NUM_BLOCKS, the number measured to be
    fastest.
    """
    list_words = sizes.top_k * (2 if weighted else 1)
    choices = align_up(_WINDOW_TOKENS * list_words, WARPGROUP)
    choices += sizes.num_ranks * align_up(2 * list_words, WARPGROUP)
    lists = _RING_STAGES * sizes.num_ranks * list_words
    num_stages = min(_RING_STAGES, row.room(choices + lists) // row.stage_bytes)
    plan = Plan(
        num_blocks=min(num_blocks or _NUM_BLOCKS, sizes.num_tokens),
        num_stages=num_stages,
        store_lag=num_stages // 2,
        window_tokens=_WINDOW_TOKENS,
        step_tokens=2,
    )
    return _with_few_steps(plan, sizes.num_tokens)


def rank_dispatch_workspace(plan: Plan, sizes: Sizes) -> dict[str, int]:
    """Returns the bytes per rank that `rank_dispatch.rank_dispatch` allocates, by buffer.

    The one buffer, "routes", has for every source rank the local expert ids of its tokens' choices.
    Routing weights that are sent take as much again, which is not counted.
    """
    entries = windows(plan, sizes.num_tokens, sizes.top_k)[0].total
    return {"routes": WORD_BYTES * sizes.num_ranks * entries}


# -------------------------------------------------------------------------------------- combine


def _combine_words(step_tokens: int, num_ranks: int, top_k: int) -> int:
    """Returns how many 32-bit words a combine keeps in shared memory.

    A step is the tokens whose sums a block sends between two signals: `step_tokens` of each rank.
    For one step, the block keeps the receive-buffer row and the routing weight of each choice. For
    two steps, it keeps a list for each sum, of the rows to add and their weights.
    """
    windows = 2 * num_ranks * align_up(step_tokens * top_k, WARPGROUP)
    return windows + 2 * step_tokens * num_ranks * (1 + 2 * align_up(top_k, ROWS_OF_SUM))


def _combine_step(row: Row, num_ranks: int, top_k: int) -> int:
    """Returns how many tokens' sums a block of a combine sends to each rank between two signals.

    It is the largest number up to _WINDOW_TOKENS for which the sums take at most _STEP_BYTES and
    the lists of the rows to add fit in shared memory. It is 1 if a single sum takes more bytes. It
    is 0 if even the lists of one token do not fit.
    """
    room = (SHARED_MEMORY_BYTES - _PADDING_BYTES) // WORD_BYTES
    row_bytes = row.hidden * jnp.dtype(row.dtype).itemsize
    most = max(1, min(_STEP_BYTES // row_bytes, _WINDOW_TOKENS))
    fitting = (n for n in range(most, 0, -1) if _combine_words(n, num_ranks, top_k) <= room)
    return next(fitting, 0)


def for_combine(row: Row, sizes: Sizes, num_blocks: int | None = None) -> Plan:
    """Returns the `Plan` with which the kernel of `combine.combine` is compiled.

    `num_blocks` is the largest number of thread blocks to use; None means _NUM_BLOCKS, the number
    measured to be fastest.
    """
    plan = Plan(
        num_blocks=min(num_blocks or _NUM_BLOCKS, sizes.num_tokens),
        step_tokens=_combine_step(row, sizes.num_ranks, sizes.top_k),
        receive_steps=_RECEIVE_STEPS,
        num_workers=_COMBINE_WORKERS,
    )
    return _with_few_steps(plan, sizes.num_tokens)


def combine_tile(row: Row) -> int:
    """Returns how many columns of a row a warpgroup of a combine sums at a time."""
    vector = vector_length(row.dtype)
    units = row.hidden // (ROW_MULTIPLE if row.wire.quantized else vector)
    least = -(-row.hidden // (_TILE_VECTORS * WARPGROUP * vector))
    # Chooses the number of tiles. All tiles have the same length, so their number must divide
    # `units`, the length of a row in tiles of the smallest size. With `least` tiles or more, a
    # thread holds at most _TILE_VECTORS vectors of a tile. So the numbers from `least` to 4 ·
    # `least` are tried first, and smaller ones only if none of these divides `units`.
    numbers = [*range(least, 4 * least + 1), *range(least, 0, -1)]
    return row.hidden // next(number for number in numbers if units % number == 0)


def combine_receive_buffer(
    plan: Plan, row: Row, num_tokens: int, num_ranks: int
) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of the arrays of a combine's receive buffer, which ranks write sums into.

    A sum is sent in the format of `row`: values and, if quantized, scales. Each of these two parts
    has an array [blocks, steps, N, tokens of a step, columns], where N is the number of ranks that
    send sums.
    """
    steps = min(plan.receive_steps, plan.steps_per_block(num_tokens))
    tokens = min(plan.step_tokens, plan.tokens_per_block(num_tokens))
    sums = (plan.num_blocks, steps, num_ranks, tokens)
    return [jax.ShapeDtypeStruct((*sums, columns), dtype) for columns, dtype in row.parts]


def combine_workspace(plan: Plan, row: Row, sizes: Sizes) -> dict[str, int]:
    """Returns the bytes per rank of the buffer in which `combine.combine` receives sums."""
    parts = combine_receive_buffer(plan, row, sizes.num_tokens, sizes.num_ranks)
    return {"receive buffer": sum(part.size * part.dtype.itemsize for part in parts)}


# ------------------------------------------------------------------------- gradient of a combine


def _combine_grad_stages(row: Row, num_ranks: int, top_k: int, num_experts: int) -> int:
    """Returns how many cotangents the kernel of combine's gradient can hold in shared memory.

    Each cotangent is a row of H columns. A stage of the kernel's ring holds a cotangent and a list
    of the expert outputs (rows of y) to multiply it with.
    """
    window_words = 2 * num_ranks * align_up(_WINDOW_TOKENS * top_k, WARPGROUP)
    count_words = _group_words(num_ranks, num_experts)
    list_words = 2 + 3 * align_up(top_k, ROWS_OF_COTANGENT)
    # This kernel sends plain rows, whatever the format of `row`.
    sent = Row(row.hidden, row.dtype)
    row_bytes = padded_columns(row.hidden, row.dtype) * jnp.dtype(row.dtype).itemsize
    return sent.room(window_words + count_words) // (row_bytes + WORD_BYTES * list_words)


def for_combine_grad(row: Row, sizes: Sizes, num_blocks: int | None = None) -> Plan:
    """Returns the `Plan` with which the kernel of `combine_grad.combine_grad` is compiled.

    `num_blocks` is the largest number of thread blocks to use; None means _NUM_BLOCKS, the number
    measured to be fastest.
    """
    stages = _combine_grad_stages(row, sizes.num_ranks, sizes.top_k, sizes.num_experts)
    num_workers = min(_GRAD_WORKERS, stages)
    return Plan(
        num_blocks=min(num_blocks or _NUM_BLOCKS, sizes.num_tokens),
        num_stages=num_workers * min(_GRAD_DEPTH, stages // num_workers),
        store_lag=0,
        window_tokens=_WINDOW_TOKENS,
        num_workers=num_workers,
    )
