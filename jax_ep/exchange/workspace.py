"""Counts the buffers that one call of an exchange holds: name -> bytes per rank."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from jax_ep.exchange.interface import Rows
from jax_ep.exchange.routes import CHUNK
from jax_ep.runtime import environment
from pallas_kernels.exchange import plan as plans
from pallas_kernels.fabric.hardware import WORD_BYTES, align_up
from pallas_kernels.formats import PLAIN, RowFormat

_FLOAT32 = jnp.dtype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class CallSizes:
    """The sizes, dtype and layout of one exchange call, from which its memory is counted."""

    num_tokens: int  # T, of each rank
    hidden: int  # H
    num_experts: int  # E
    top_k: int  # K
    num_ranks: int  # N
    dtype: jnp.dtype  # of the caller's rows
    capacity: int  # the rows of a receive buffer: R, or N·T in the rank-major layout
    by_rank: bool  # whether the layout is rank-major
    wire: RowFormat  # the format in which rows or sums are sent
    quantized: bool  # whether a dispatch returns float8 rows and scales
    num_hosts: int  # M
    rows_to_host: int  # the rows that a rank sends to each other host: T, or the host_capacity

    @property
    def pairs(self) -> int:
        return self.num_ranks * self.num_tokens  # of (source rank, token)

    def rows(self, count: int) -> int:
        return count * self.hidden * self.dtype.itemsize

    def sent_rows(self, count: int) -> int:
        return count * self.wire.row_bytes(self.hidden, self.dtype)

    def quantized_rows(self, count: int) -> int:
        """Returns the bytes of `count` quantized rows; 0 if rows are sent in their own dtype."""
        return self.sent_rows(count) if self.wire.quantized else 0

    def gathered(self, size: int) -> int:
        """Returns `size`, the bytes of an all-gather's result; 0 for one rank, which needs none."""
        return size if self.num_ranks > 1 else 0

    def routes(self) -> int:
        """Returns the bytes of a dispatch's `Routes` or `RankRoutes`, without its topk_idx."""
        counts = 0 if self.by_rank else self.num_ranks * self.num_experts
        return WORD_BYTES * (self.pairs * self.top_k + counts)

    @property
    def padded_hidden(self) -> int:
        return plans.padded_hidden(self.hidden, self.dtype, self.wire)

    @property
    def row(self) -> plans.Row:
        return plans.Row(self.padded_hidden, self.dtype, self.wire)

    @property
    def sizes(self) -> plans.Sizes:
        return plans.Sizes(
            num_tokens=self.num_tokens,
            num_ranks=self.num_ranks,
            top_k=self.top_k,
            num_experts=self.num_experts,
        )

    @property
    def low_latency(self) -> plans.LowLatencyPlan | None:
        return plans.for_low_latency(self.row, self.sizes, self.num_ranks, environment.num_blocks())

    def padded_rows(self, count: int) -> int:
        """Returns the bytes of padded copies of `count` rows; 0 if the kernels need no padding."""
        padded = self.padded_hidden
        return 0 if padded == self.hidden else count * padded * self.dtype.itemsize


def of_call(operation: str, kernels: bool, sizes: CallSizes) -> dict[str, int]:
    """Returns the buffers of a "dispatch", "dispatch_like", "dispatch_grad" or "combine"."""
    if sizes.num_hosts > 1:
        return _of_two_levels(operation, kernels, sizes)
    return _of_kernels(operation, sizes) if kernels else _of_xla(operation, sizes)


def _of_kernels(operation: str, sizes: CallSizes) -> dict[str, int]:
    """Computes `of_call` for "pallas"; raises ValueError if the kernels cannot run."""
    rows = Rows(
        hidden=sizes.hidden,
        dtype=sizes.dtype,
        num_ranks=sizes.num_ranks,
        list_words=sizes.top_k,
        num_experts=sizes.num_experts,
        wire=sizes.wire,
    )
    if reason := rows.unavailable_reason():
        raise ValueError(f'implementation="pallas" cannot run: {reason}.')
    if operation in ("combine", "dispatch_grad"):
        padded = {"padded rows": sizes.padded_rows(sizes.num_tokens + sizes.capacity)}
        if sizes.low_latency:  # the sums arrive in symmetric memory, which is not counted
            return padded
        plan = plans.for_combine(sizes.row, sizes.sizes, environment.num_blocks())
        return plans.combine_workspace(plan, sizes.row, sizes.sizes) | padded
    received = sizes.capacity * sizes.row.sent_bytes
    if sizes.padded_hidden == sizes.hidden and (sizes.quantized or not sizes.wire.quantized):
        received = 0  # the kernel writes the rows directly into the result
    held = {"padded rows": sizes.padded_rows(sizes.num_tokens), "received rows": received}
    if sizes.by_rank:
        # In the rank-major layout, the kernel of dispatch also sends other rows and cotangents.
        plan = plans.for_rank_dispatch(sizes.row, sizes.sizes, environment.num_blocks())
        return plans.rank_dispatch_workspace(plan, sizes.sizes) | held
    if operation == "dispatch_like":  # whose routes are known, and need no buffer
        return held
    if sizes.low_latency:
        return sizes.low_latency.dispatch_workspace() | held
    plan = plans.for_dispatch(sizes.row, sizes.sizes, environment.num_blocks())
    return plans.dispatch_workspace(plan, sizes.sizes) | held


def _of_xla(operation: str, sizes: CallSizes) -> dict[str, int]:
    """Computes `of_call` for "xla"."""
    if operation in ("combine", "dispatch_grad"):
        return _sums_of_xla(sizes, weighted=operation == "combine")
    choices = sizes.num_tokens * sizes.top_k
    tokens = {
        "gathered tokens": sizes.gathered(sizes.sent_rows(sizes.pairs)),
        "quantized rows": sizes.quantized_rows(sizes.num_tokens),
    }
    if sizes.by_rank:
        gathered = sizes.gathered(WORD_BYTES * sizes.pairs * sizes.top_k)
        return tokens | {"gathered choices": gathered, "routes": sizes.routes()}
    tokens |= {
        "received rows": sizes.quantized_rows(sizes.capacity),
        # One word for each row: its choice. Two for each choice of all ranks: its row and number.
        "choice of each row": WORD_BYTES * (sizes.capacity + 2 * sizes.pairs * sizes.top_k),
    }
    if operation == "dispatch_like":
        return tokens
    return {
        # The message of each rank has its choices, their positions, and counts of all experts.
        "gathered choices": WORD_BYTES * sizes.num_ranks * (2 * choices + sizes.num_experts),
        # `routes.count_choices` pads the choices to whole chunks.
        "counting choices": WORD_BYTES * align_up(choices, CHUNK) * sizes.num_experts,
        "routes": sizes.routes(),
        **tokens,
    }


def _sums_of_xla(sizes: CallSizes, *, weighted: bool) -> dict[str, int]:
    """Returns the buffers, name -> bytes, of a sum of rows by token, `weighted` or not."""
    sums = sizes.pairs * sizes.hidden * WORD_BYTES
    rounded = sizes.sent_rows(sizes.pairs)
    weights = sizes.gathered(WORD_BYTES * sizes.pairs * sizes.top_k)
    received = {
        "received sums": sizes.gathered(rounded),
        "widened sums": sums if sizes.wire.quantized else 0,
    }
    if sizes.by_rank:
        return {"sent sums": rounded, **received}
    return {
        "partial sums": sums,
        "rounded sums": 0 if rounded == sums else sizes.gathered(rounded),
        **received,
        "gathered weights": weights if weighted else 0,
    }


def gradients_of_rows(sizes: CallSizes) -> dict[str, int]:
    """Returns the buffers of a weighted combine's gradient besides those of its dispatch_like."""
    numbers = WORD_BYTES * sizes.pairs * sizes.top_k  # one for each choice of all ranks
    return {
        "g in the rows": sizes.rows(sizes.capacity),
        "products with y": WORD_BYTES * sizes.capacity * sizes.hidden,
        "gathered weights": sizes.gathered(numbers),
        "weights and their gradient by row": 2 * WORD_BYTES * sizes.capacity,
        "weights' gradient by rank": numbers + sizes.gathered(numbers),
    }


def _of_two_levels(operation: str, kernels: bool, sizes: CallSizes) -> dict[str, int]:
    """Computes `of_call` for "two_level", with the buffers inside a host."""
    num_hosts, num_tokens, rows_to_host = sizes.num_hosts, sizes.num_tokens, sizes.rows_to_host
    ranks_per_host = sizes.num_ranks // num_hosts
    is_sum = operation in ("combine", "dispatch_grad")
    # On hosts with one rank each, XLA computes the sums, as in `two_level`.
    kernels = kernels and not (is_sum and ranks_per_host == 1)
    # One call inside the host then has the tokens of all hosts, as in `Rail.of_tokens`.
    at_once = kernels and num_tokens <= plans.FEW_TOKENS
    tokens_of_call = num_tokens
    if at_once:  # as many as `Rail.rows`: received from all hosts, and own ones not among them
        tokens_of_call = num_hosts * rows_to_host + (num_tokens if rows_to_host < num_tokens else 0)
    inside = dataclasses.replace(  # the sizes of the exchange inside a host
        sizes,
        num_tokens=tokens_of_call,
        num_experts=sizes.num_experts // num_hosts,
        num_ranks=ranks_per_host,
        capacity=ranks_per_host * tokens_of_call if sizes.by_rank else sizes.capacity,
        wire=PLAIN,
        quantized=False,
        num_hosts=1,
    )
    # The rank-major kernels of a host take and return rows sorted by the source rank's number
    # within its host. XLA copies rows between this order and the order of all N source ranks.
    reordered = inside.rows(ranks_per_host * tokens_of_call) if sizes.by_rank and kernels else 0
    weights = 0 if sizes.by_rank else WORD_BYTES * num_hosts * rows_to_host * sizes.top_k
    held = {
        "weights of the rail": weights if operation == "combine" else 0,
        "rows inside a host": reordered,
    }
    if is_sum:
        return held | _sums_workspace(operation, kernels, sizes, inside, at_once)
    return held | _rows_workspace(operation, kernels, sizes, inside, at_once)


def _sums_workspace(
    operation: str, kernels: bool, sizes: CallSizes, inside: CallSizes, at_once: bool
) -> dict[str, int]:
    """Returns the buffers of sums in a host and between hosts; `inside`: the sizes in a host."""
    num_hosts, num_tokens, rows_to_host = sizes.num_hosts, sizes.num_tokens, sizes.rows_to_host
    sum_bytes = sizes.sent_rows(1)
    # One call computes the sums for all hosts before they are sent, so those that arrive need
    # their own buffers.
    hosts_held = 2 * num_hosts if at_once else num_hosts
    others = (num_hosts - 1) * num_tokens if rows_to_host < num_tokens else 0
    held = {
        "sums for and of other hosts": hosts_held * rows_to_host * sum_bytes,
        "sums of this host": 0 if at_once else num_tokens * sum_bytes,
        "returned sums, by token": others * sum_bytes,
    }
    # In these cases, the sums inside a host are float32, as in `two_level`.
    if sizes.wire.quantized or (inside.num_ranks > 1 and not sizes.by_rank):
        inside = dataclasses.replace(inside, dtype=_FLOAT32)
    if kernels and inside.dtype != sizes.dtype:
        held["float32 rows and sums"] = inside.rows(sizes.capacity + inside.num_tokens)
    return held | of_call(operation, kernels, inside)


def _rows_workspace(
    operation: str, kernels: bool, sizes: CallSizes, inside: CallSizes, at_once: bool
) -> dict[str, int]:
    """Returns the buffers of rows between hosts and in a host; `inside`: the sizes in a host."""
    num_hosts, num_tokens, rows_to_host = sizes.num_hosts, sizes.num_tokens, sizes.rows_to_host
    # With kernels, memory holds the rows of at most two remote hosts: one host's rows arrive while
    # the other's are forwarded. If one call takes all hosts' tokens, memory holds all hosts' rows.
    # Without kernels, XLA may hold the rows of all remote hosts.
    if at_once:
        arrivals = num_hosts
    else:
        arrivals = min(2, num_hosts - 1) if kernels else num_hosts - 1
    sent_bytes = sizes.sent_rows(1)
    if sizes.wire.quantized:
        sent_bytes = align_up(sent_bytes, plans.ROW_BYTES)  # as `two_level` pads the rows
    rail = arrivals * rows_to_host * sent_bytes
    # With a host_capacity, the rows to send are first picked from x into another buffer, which is
    # as large as the buffer of received rows.
    held = {
        "rows of the rail": rail if rows_to_host == num_tokens else 2 * rail,
        "quantized rows": sizes.quantized_rows(num_tokens),
    }
    if sizes.wire.quantized:
        # The exchange inside a host forwards quantized rows as 32-bit words, typed as float32.
        inside = dataclasses.replace(inside, hidden=sent_bytes // WORD_BYTES, dtype=_FLOAT32)
        held["received rows"] = sizes.quantized_rows(sizes.capacity)
    parts = of_call("dispatch_like", kernels, inside)
    if "gathered tokens" in parts:
        # XLA gathers the tokens of one source host after the other. It holds at most those of this
        # host (T of each rank) and of one other host (rows_to_host of each rank).
        parts["gathered tokens"] += parts["gathered tokens"] * rows_to_host // num_tokens
    if operation == "dispatch" and not sizes.by_rank:
        held |= _choices_workspace(sizes)
    if sizes.by_rank or operation == "dispatch":
        parts["routes"] = sizes.routes()
    return held | {name: size for name, size in parts.items() if size}


def _choices_workspace(sizes: CallSizes) -> dict[str, int]:
    """Returns the buffers in which a dispatch gathers and counts the choices of all hosts."""
    choices = sizes.num_tokens * sizes.top_k
    numbers = 2 * choices + sizes.num_experts  # of a rank: choices, their positions and counts
    # The bytes of a number between hosts, as `two_level` narrows them.
    narrow = 2 if max(choices, sizes.num_experts) < 2**16 - 1 else WORD_BYTES
    return {
        "choices of the rail": narrow * sizes.num_hosts * numbers,
        "gathered choices": (narrow + WORD_BYTES) * sizes.num_ranks * numbers,
        # `routes.count_choices` pads the choices to whole chunks.
        "counting choices": WORD_BYTES * align_up(choices, CHUNK) * sizes.num_experts,
    }
