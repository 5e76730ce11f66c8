"""Plans how the exchange's kernels use blocks and shared memory, and what they allocate.

A function `for_<kernel>` returns the plan of that kernel. A function whose name ends in
`_workspace` returns the buffers that a call of the kernel allocates besides the results that its
caller keeps: a dict from name to bytes per rank. The kernels take the shapes of these buffers from
here.

Nothing here imports Pallas or Mosaic, so sizes are known where kernels do not run.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.fabric import memory_map
from pallas_kernels.fabric.hardware import (
    LANES,
    SHARED_MEMORY_BYTES,
    WORD_BYTES,
    align_up,
    padded_columns,
    vector_length,
)
from pallas_kernels.formats import PLAIN, RowFormat

Parts = list[tuple[int, jax.typing.DTypeLike]]

ROW_BYTES = 128  # a row must be a multiple of this
# A quantized row has a multiple of these columns: 16 bytes of scales, and a block for each warp.
ROW_MULTIPLE = 512
_PADDING_BYTES = 16 * 1024  # shared memory set aside for barriers and for alignment of buffers
_WINDOW_TOKENS = 16
_RING_STAGES = 16  # the most rows that a ring in shared memory holds

# Up to this many tokens per rank, latency decides the time of a call; beyond, the link's bandwidth.
FEW_TOKENS = 256
_NUM_BLOCKS = 128  # the fastest number on 2, 4 and 8 H200s

# The constants of a combine, measured on 2 H200s.
ROWS_OF_SUM = 4  # a worker loads this many rows of a sum at a time
_STEP_BYTES = 16 * 1024  # the most bytes of a step's sums for one owner, if they are several
_RECEIVE_STEPS = 4
_COMBINE_WORKERS = 5
_TILE_VECTORS = 2  # a thread holds this many 16-byte vectors of a row

# The constants of a combine's gradient.
ROWS_OF_COTANGENT = 2  # a worker multiplies this many rows with a cotangent at a time
_GRAD_WORKERS = 5
_GRAD_DEPTH = 3  # each worker has this many cotangents in the ring

# The constant of a dispatch of more than FEW_TOKENS tokens.
_DISPATCH_BYTES = 32 * 1024  # the rows of a step have about these bytes
_COPY_STAGES = 16


def padded_hidden(hidden: int, dtype: jax.typing.DTypeLike, wire: RowFormat = PLAIN) -> int:
    """Returns H rounded up to what the kernels need, in columns.

    A row must be whole lines of 128 bytes; a row that is quantized must be a multiple of
    ROW_MULTIPLE columns.
    """
    columns = ROW_BYTES // jnp.dtype(dtype).itemsize
    return align_up(hidden, ROW_MULTIPLE if wire.quantized else columns)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Static choices of one call of an exchange kernel.

    Attributes:
      num_blocks: thread blocks per rank.
      num_stages: rows that the ring in shared memory holds, if there is one.
      store_lag: the number of latest groups of outgoing copies that may still read their stages
        when the next stage is filled; less than `num_stages`.
      window_tokens: tokens whose routes a block holds in shared memory at a time.
      step_tokens: tokens between two signals.
      num_copy_stages: rows that the receiver of a dispatch holds while it copies them.
      receive_steps: steps that a combine's receive buffer holds.
      num_workers: warpgroups of a block that share its sums, or cotangents.
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
        # While a step is summed, the previous step is read, and the next step is listed.
        if self.receive_steps < 3:
            raise ValueError(f"receive_steps must be at least 3, but the plan is {self}.")

    def tokens_per_block(self, num_tokens: int) -> int:
        return -(-num_tokens // self.num_blocks)

    def steps_per_block(self, num_tokens: int) -> int:
        return -(-self.tokens_per_block(num_tokens) // self.step_tokens)

    def tokens_of_block(self, block: jax.Array, num_tokens: int) -> tuple[jax.Array, jax.Array]:
        """Returns a block's first token and the number of its tokens, the same on every rank."""
        per_block = self.tokens_per_block(num_tokens)
        first = block * per_block
        return first, jnp.clip(num_tokens - first, 0, per_block)


@dataclasses.dataclass(frozen=True)
class Window:
    """The part of a flat array of routes, [T·K], that a block holds in shared memory at a time."""

    tokens: int  # tokens of a window
    width: int  # entries that are loaded: tokens · K, rounded up to whole vectors
    total: int  # entries of the flat array, with its padding

    @classmethod
    def of(cls, tokens: int, plan: Plan, num_tokens: int, top_k: int) -> Window:
        tokens = min(tokens, plan.tokens_per_block(num_tokens))
        width = align_up(tokens * top_k, LANES)
        return cls(tokens, width, max(width, num_tokens * top_k))

    def start(self, entry: jax.Array) -> jax.Array:
        """Returns the first entry to load so that the window holds `entry` and is in bounds."""
        return jnp.minimum(entry, self.total - self.width)

    def pad(self, flat: jax.Array, value: int) -> jax.Array:
        return pad_last(flat, self.total - flat.shape[-1], value)


def pad_last(array: jax.Array, amount: int, value: int = 0) -> jax.Array:
    """Appends `amount` entries of `value` to the last axis of an array."""
    widths = [(0, 0)] * (array.ndim - 1) + [(0, amount)]
    return jnp.pad(array, widths, constant_values=value)


@dataclasses.dataclass(frozen=True)
class Row:
    """The size of a row of a kernel's input, and of the form in which it is sent.

    Attributes:
      hidden: H, padded as `padded_hidden` says.
      dtype: the input's dtype.
      wire: the format that rows are sent in.
    """

    hidden: int
    dtype: jax.typing.DTypeLike
    wire: RowFormat = PLAIN

    @property
    def parts(self) -> Parts:
        """Columns and dtype of each array that a sent row consists of: values, then scales."""
        return self.wire.row_parts(self.hidden, self.dtype)

    @property
    def sent_bytes(self) -> int:
        return self.wire.row_bytes(self.hidden, self.dtype)

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory of a stage of a sender's ring.

        If rows are quantized, a stage holds the input row and the quantized row.
        """
        wide = self.hidden * jnp.dtype(self.dtype).itemsize
        return wide + self.sent_bytes if self.wire.quantized else wide

    def room(self, words: int) -> int:
        """Returns the bytes of shared memory next to `words` 32-bit words and a row of zeros."""
        zeros = sum(
            padded_columns(columns, dtype) * jnp.dtype(dtype).itemsize
            for columns, dtype in self.parts
        )
        return SHARED_MEMORY_BYTES - WORD_BYTES * words - _PADDING_BYTES - zeros


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a call of the exchange.

    Attributes:
      num_tokens: T.
      num_ranks: N.
      top_k: K.
      num_experts: E.
    """

    num_tokens: int
    num_ranks: int
    top_k: int
    num_experts: int


def fits_shared_memory(row: Row, *, num_ranks: int, top_k: int, num_experts: int) -> bool:
    """Returns whether all kernels of the exchange can run at these sizes.

    Shared memory must hold the stages that each needs.
    """
    words = _dispatch_words(num_ranks, top_k, num_experts)
    return (
        row.room(words) // row.stage_bytes >= 3
        and _combine_step(row, num_ranks, top_k) >= 1
        and _combine_grad_stages(row, num_ranks, top_k, num_experts) >= 1
    )


def _with_few_steps(plan: Plan, num_tokens: int) -> Plan:
    """Returns the plan; raises ValueError unless a signal can count the steps of a block."""
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
    """How rows are spread over the workers of the low-latency protocol, for few tokens.

    Attributes:
      hidden: H, padded as `padded_hidden` says.
      dtype: the dtype of rows and of sums of rows.
      num_gpus: GPUs of the ranks' host that share symmetric memory, N or more.
      max_blocks: the most thread blocks.
      max_stages: the most rows that a kernel holds in shared memory.
    """

    hidden: int
    dtype: jax.typing.DTypeLike
    num_gpus: int
    warpgroups = 4  # this many warpgroups of a block send and receive
    max_blocks: int = memory_map.MAX_WORKERS // warpgroups
    max_stages: int = 2 * _RING_STAGES

    @property
    def vector(self) -> int:
        return vector_length(self.dtype)

    @property
    def tile(self) -> int:
        """Columns of a tile, which fills a tile buffer of the protocol."""
        return LANES * self.vector

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
        """The rows that shared memory holds next to the most 32-bit words that a kernel needs."""
        choices = self.num_ranks * align_up(self.num_tokens * self.top_k, LANES)
        # A gradient needs, for each pair and choice, 16 sums and the words of the rows' list.
        sums = 24 * self.num_ranks * self.tokens_per_block * self.top_k
        # Words for the ends of the experts' groups and for the next rows from each rank. Some words
        # are spare.
        words = (7 + 2 * self.num_ranks) * (count_width(self.num_experts) + LANES)
        row = Row(self.hidden, self.dtype)
        return min(self.max_stages, row.room(words + max(choices, sums)) // row.stage_bytes)

    def dispatch_workspace(self) -> dict[str, int]:
        """Maps the one buffer that `low_latency_dispatch.dispatch` allocates to its bytes."""
        words = self.num_tokens * self.top_k + count_width(self.num_experts)
        return {"routes": WORD_BYTES * self.num_ranks * words}

    def fits(self) -> bool:
        """Returns whether the protocol and shared memory have room for these sizes."""
        return (
            1 < self.num_ranks <= self.num_gpus <= memory_map.MAX_LOW_LATENCY_GPUS
            and self.hidden >= self.tile
            and self.tokens_per_block * self.tiles_of_worker
            <= memory_map.tiles_of_channel(self.num_gpus)
            and self.num_tokens * self.top_k <= memory_map.MAX_VALUES // 2
            and self.num_experts <= 2**15  # ids are sent as 16-bit integers
            and self.num_stages > 0
        )


def for_low_latency(
    row: Row, sizes: Sizes, num_gpus: int, num_blocks: int | None = None
) -> LowLatencyPlan | None:
    """Returns the plan of the kernels over the low-latency protocol, or None if they cannot run.

    They cannot run for quantized rows, and for sizes for which `LowLatencyPlan.fits` is false.
    `num_gpus` counts the GPUs of the ranks' host that share symmetric memory.
    `num_blocks` is the most thread blocks; None: as many as the protocol has workers for.
    """
    plan = LowLatencyPlan(
        **dataclasses.asdict(sizes), hidden=row.hidden, dtype=row.dtype, num_gpus=num_gpus
    )
    if num_blocks is not None:
        plan = dataclasses.replace(plan, max_blocks=min(num_blocks, plan.max_blocks))
    return plan if not row.wire.quantized and plan.fits() else None


# ------------------------------------------------------------------------------------- dispatch


def windows(plan: Plan, num_tokens: int, num_words: int) -> tuple[Window, Window]:
    """Returns the windows of lists in shared memory: the sender's, and the receiver's of one step.

    A token has `num_words` words. Both windows are of flat arrays [T * num_words], which are padded
    for the wider of the two.
    """
    both = [
        Window.of(tokens, plan, num_tokens, num_words)
        for tokens in (plan.window_tokens, plan.step_tokens)
    ]
    total = max(window.total for window in both)
    of_sender, of_step = (dataclasses.replace(window, total=total) for window in both)
    return of_sender, of_step


def count_width(num_experts: int) -> int:
    """Returns the entries of an array of counts: E, padded to whole vectors of a warpgroup."""
    return align_up(num_experts, LANES)


def _group_words(num_ranks: int, num_experts: int) -> int:
    """Returns the int32 words of `ExpertScratch`: all counts, the scan, and the groups' ends."""
    return (num_ranks + 2 + 2) * count_width(num_experts)


def _dispatch_words(num_ranks: int, top_k: int, num_experts: int, step_tokens: int = 2) -> int:
    """Returns the int32 words of routes, lists and counts that a dispatch has in shared memory."""
    windows = align_up(_WINDOW_TOKENS * top_k, LANES) + align_up(step_tokens * top_k, LANES)
    choices = num_ranks * windows
    lists = (_RING_STAGES + step_tokens) * num_ranks * top_k
    next_rows = count_width(num_experts) + LANES
    return _group_words(num_ranks, num_experts) + next_rows + choices + lists


def for_dispatch(row: Row, sizes: Sizes, num_blocks: int | None = None) -> Plan:
    """Returns the plan of `dispatch.dispatch` and `dispatch.dispatch_like`.

    `num_blocks` is the most thread blocks to use; None is the number measured to be fastest.
    """
    few, step_tokens = sizes.num_tokens <= FEW_TOKENS, 2
    if not few:  # as many tokens as the window of lists has room for
        step_tokens = max(2, min(_DISPATCH_BYTES // row.sent_bytes, LANES // sizes.top_k))

    def room_for_rows(step_tokens: int) -> int:
        words = _dispatch_words(sizes.num_ranks, sizes.top_k, sizes.num_experts, step_tokens)
        return row.room(words)

    # The lists of longer steps leave less shared memory for rows, and at least two rows are needed,
    # since one is sent while another is copied. Steps of 2 tokens leave room for 3 rows, or
    # `fits_shared_memory` is false.
    while step_tokens > 2 and room_for_rows(step_tokens) < 2 * row.stage_bytes:
        step_tokens -= 1
    room = room_for_rows(step_tokens)
    in_ring = room // row.stage_bytes
    num_copy_stages = min(8, 2 * in_ring // 3) if few else max(1, min(_COPY_STAGES, in_ring // 3))
    num_stages = min(_RING_STAGES, (room - num_copy_stages * row.sent_bytes) // row.stage_bytes)
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
    """Returns the bytes that `dispatch.dispatch` allocates, by name of the buffer."""
    entries = windows(plan, sizes.num_tokens, sizes.top_k)[0].total
    return {"routes": WORD_BYTES * sizes.num_ranks * (entries + count_width(sizes.num_experts))}


def for_rank_dispatch(
    row: Row, sizes: Sizes, num_blocks: int | None = None, *, weighted: bool = False
) -> Plan:
    """Returns the plan of `rank_dispatch.rank_dispatch`.

    `weighted` is whether weights are sent with the choices. `num_blocks` is the most thread blocks
    to use; None is the number measured to be fastest.
    """
    list_words = sizes.top_k * (2 if weighted else 1)
    choices = align_up(_WINDOW_TOKENS * list_words, LANES)
    choices += sizes.num_ranks * align_up(2 * list_words, LANES)
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
    """Maps the one buffer that `rank_dispatch.rank_dispatch` allocates to its bytes."""
    entries = windows(plan, sizes.num_tokens, sizes.top_k)[0].total
    return {"routes": WORD_BYTES * sizes.num_ranks * entries}


# -------------------------------------------------------------------------------------- combine


def _combine_words(step_tokens: int, num_ranks: int, top_k: int) -> int:
    """Returns the 32-bit words of routes and lists that a combine has in shared memory."""
    windows = 2 * num_ranks * align_up(step_tokens * top_k, LANES)
    return windows + 2 * step_tokens * num_ranks * (1 + 2 * align_up(top_k, ROWS_OF_SUM))


def _combine_step(row: Row, num_ranks: int, top_k: int) -> int:
    """Returns the most tokens of a combine's step that fit; 0 if shared memory is too small."""
    room = (SHARED_MEMORY_BYTES - _PADDING_BYTES) // WORD_BYTES
    row_bytes = row.hidden * jnp.dtype(row.dtype).itemsize
    most = max(1, min(_STEP_BYTES // row_bytes, _WINDOW_TOKENS))
    fitting = (n for n in range(most, 0, -1) if _combine_words(n, num_ranks, top_k) <= room)
    return next(fitting, 0)


def for_combine(row: Row, sizes: Sizes, num_blocks: int | None = None) -> Plan:
    """Returns the plan of `combine.combine`.

    `num_blocks` is the most thread blocks to use; None is the number measured to be fastest.
    """
    plan = Plan(
        num_blocks=min(num_blocks or _NUM_BLOCKS, sizes.num_tokens),
        step_tokens=_combine_step(row, sizes.num_ranks, sizes.top_k),
        receive_steps=_RECEIVE_STEPS,
        num_workers=_COMBINE_WORKERS,
    )
    return _with_few_steps(plan, sizes.num_tokens)


def combine_tile(row: Row) -> int:
    """Returns the columns of a row that a warpgroup of a combine sums at a time."""
    vector = vector_length(row.dtype)
    units = row.hidden // (ROW_MULTIPLE if row.wire.quantized else vector)
    least = -(-row.hidden // (_TILE_VECTORS * LANES * vector))
    # All tiles have the same length, so their number divides the row. If only a number much larger
    # than needed does, tiles are longer instead.
    numbers = [*range(least, 4 * least + 1), *range(least, 0, -1)]
    return row.hidden // next(number for number in numbers if units % number == 0)


def combine_receive_buffer(
    plan: Plan, row: Row, num_tokens: int, num_ranks: int
) -> list[jax.ShapeDtypeStruct]:
    """Returns the types of the arrays that peers put their sums into.

    There is one array for each part of a row, [blocks, steps, N, tokens of a step, columns].
    """
    steps = min(plan.receive_steps, plan.steps_per_block(num_tokens))
    tokens = min(plan.step_tokens, plan.tokens_per_block(num_tokens))
    sums = (plan.num_blocks, steps, num_ranks, tokens)
    return [jax.ShapeDtypeStruct((*sums, columns), dtype) for columns, dtype in row.parts]


def combine_workspace(plan: Plan, row: Row, sizes: Sizes) -> dict[str, int]:
    """Maps the one buffer that `combine.combine` allocates to its bytes."""
    parts = combine_receive_buffer(plan, row, sizes.num_tokens, sizes.num_ranks)
    return {"receive buffer": sum(part.size * part.dtype.itemsize for part in parts)}


# ------------------------------------------------------------------------- gradient of a combine


def _combine_grad_stages(row: Row, num_ranks: int, top_k: int, num_experts: int) -> int:
    """Returns how many cotangents the gradient of a combine has room for in shared memory.

    Each has a list of its rows next to it.
    """
    window_words = 2 * num_ranks * align_up(_WINDOW_TOKENS * top_k, LANES)
    count_words = _group_words(num_ranks, num_experts)
    list_words = 2 + 3 * align_up(top_k, ROWS_OF_COTANGENT)
    sent = Row(row.hidden, row.dtype)  # this kernel quantizes nothing
    row_bytes = padded_columns(row.hidden, row.dtype) * jnp.dtype(row.dtype).itemsize
    return sent.room(window_words + count_words) // (row_bytes + WORD_BYTES * list_words)


def for_combine_grad(row: Row, sizes: Sizes, num_blocks: int | None = None) -> Plan:
    """Returns the plan of `combine_grad.combine_grad`.

    `num_blocks` is the most thread blocks to use; None is the number measured to be fastest.
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
