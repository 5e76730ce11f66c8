"""The operations that `bench` times: dispatch, combine, their gradients, and XLA's collectives.

A baseline is an XLA collective alone: it sends all tokens to all ranks ("out"), or brings back and
sums a row for each (token, rank) ("back"). No dispatch or combine that is built from it is faster.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_ep import Dispatched, RankDispatched, combine, dispatch
from jax_ep.bench.timing import AXIS
from jax_ep.exchange import interface
from pallas_kernels.formats import PLAIN, RowFormat

# Maps an operation to the direction in which it moves rows.
DIRECTIONS = {
    "dispatch": "out",
    "combine": "back",
    "dispatch_grad": "back",
    "combine_grad": "out",
}
BASELINES = ("all_gather_reduce_scatter",)
Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Work:
    """The routing, sizes and dtypes of an exchange (dispatch and combine) to measure.

    `topk_idx` [N, T, K] int32 has the global expert ids of the tokens of all ranks. `capacity` is
    R, the rows of the receive buffer; None: any routing. The other fields are as in `dispatch`.
    """

    topk_idx: Array
    num_experts: int
    hidden: int
    capacity: int | None
    dtype: Any = jnp.bfloat16
    layout: str = "expert"
    wire_dtype: Any = None
    output: str = "dequantized"

    @property
    def num_ranks(self) -> int:
        return self.topk_idx.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.topk_idx.shape[1]

    @property
    def wire(self) -> RowFormat:
        return interface.wire_format(self.wire_dtype)

    @property
    def unquantized(self) -> Work:
        return dataclasses.replace(self, wire_dtype=None, output="dequantized")

    def counts(self, *, dedup: bool) -> Array:
        """Counts the rows from rank to rank, [N, N]: one per choice or, with `dedup`, per token."""
        ranks = self.topk_idx // (self.num_experts // self.num_ranks)
        here = ranks[..., None] == np.arange(self.num_ranks)
        by_token = here.any(axis=2) if dedup else here.sum(axis=2)
        return by_token.sum(axis=1)

    def wire_rows(self, implementation: str = "") -> float | None:
        """Counts the rows that a rank sends to others (mean); for "", what any must send."""
        if implementation == "two_level":
            return None  # unknown: it depends on the hosts
        # XLA's collectives send every token to all ranks.
        if implementation in ("xla", *BASELINES):
            return float((self.num_ranks - 1) * self.num_tokens)
        counts = self.counts(dedup=True)
        return float(counts.sum() - np.trace(counts)) / self.num_ranks


class Operation(NamedTuple):
    """`prepare` makes a rank's state from its seed and choices; `step` is a call to time."""

    prepare: Callable[..., Any]
    step: Callable[[Any], Any]


def random_rows(seed: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return jax.random.uniform(jax.random.key(seed), shape, dtype, -1, 1)


def rank_seeds(num_ranks: int) -> Array:
    return np.arange(num_ranks, dtype=np.int32)


# Many programs have the same routing, and drawing it for many tokens takes a second.
@functools.lru_cache(maxsize=4)
def uniform_routing(num_ranks: int, num_tokens: int, num_experts: int, top_k: int) -> Array:
    """Draws K distinct experts for each token, all equally likely: [N, T, K] int32."""
    scores = np.random.default_rng(0).random((num_ranks, num_tokens, num_experts), np.float32)
    return np.argpartition(scores, top_k - 1, axis=-1)[..., :top_k].astype(np.int32)


def rows_needed(topk_idx: Array, num_experts: int) -> int:
    """Returns the smallest receive-buffer capacity, in rows, that drops no row on any rank."""
    counts = np.bincount(topk_idx.reshape(-1), minlength=num_experts)
    return int(counts.reshape(len(topk_idx), -1).sum(axis=1).max())


def _tokens(work: Work, seed: jax.Array) -> jax.Array:
    return random_rows(seed, (work.num_tokens, work.hidden), work.dtype)


def _weights(work: Work, seed: jax.Array) -> jax.Array | None:
    # A rank-major combine takes no weights, because it takes sums that are already weighted.
    if work.layout == "rank":
        return None
    weights = random_rows(seed, work.topk_idx.shape[1:], np.float32) + 1.5  # above 0
    return weights / weights.sum(axis=-1, keepdims=True)


def _dispatcher(work: Work, implementation: Any, grad_wire_dtype: Any = None) -> Callable[..., Any]:
    """Returns the function (x, topk_idx) -> the result of `dispatch`."""
    options: Any = {"capacity": work.capacity} if work.layout == "expert" else {"layout": "rank"}

    def call(x, topk_idx):
        return dispatch(  # type: ignore[call-overload]
            x,
            topk_idx,
            num_experts=work.num_experts,
            axis_name=AXIS,
            wire_dtype=work.wire_dtype,
            grad_wire_dtype=grad_wire_dtype,
            output=work.output,
            implementation=implementation,
            **options,
        )

    return call


# The functions that make an operation, by its name in `OPERATIONS`.
def _dispatch(work: Work, implementation: Any) -> Operation:
    call = _dispatcher(work, implementation)

    def prepare(seed, topk_idx):
        return _tokens(work, seed), topk_idx

    return Operation(prepare, lambda state: call(*state))


def _combine(work: Work, implementation: Any) -> Operation:
    call = _dispatcher(work, implementation)

    def prepare(seed, topk_idx):
        received = call(_tokens(work, seed), topk_idx)
        y = random_rows(seed + 1, received.tokens.shape, work.dtype)
        return y, received.handle, _weights(work, seed + 2)

    def step(state):
        return combine(*state, wire_dtype=work.wire_dtype, implementation=implementation)

    return Operation(prepare, step)


def _round_trip(work: Work, implementation: Any) -> Operation:
    call = _dispatcher(work, implementation)

    def prepare(seed, topk_idx):
        x = _tokens(work, seed)
        y = random_rows(seed + 1, jax.eval_shape(call, x, topk_idx).tokens.shape, work.dtype)
        return x, topk_idx, y, _weights(work, seed + 2)

    def step(state):  # only the dispatch sends in the wire dtype
        x, topk_idx, y, weights = state
        received = call(x, topk_idx)
        return received, combine(y, received.handle, weights, implementation=implementation)

    return Operation(prepare, step)


def _dispatch_grad(work: Work, implementation: Any) -> Operation:
    # Only the gradient, which is timed, is sent in the wire dtype. `backward` is a pytree.
    call = _dispatcher(work.unquantized, implementation, grad_wire_dtype=work.wire_dtype)

    def prepare(seed, topk_idx):
        tokens, backward = jax.vjp(lambda x: call(x, topk_idx).tokens, _tokens(work, seed))
        return backward, random_rows(seed + 1, tokens.shape, work.dtype)

    def step(state):
        backward, g = state
        (dx,) = backward(g)
        return dx

    return Operation(prepare, step)


def _combine_grad(work: Work, implementation: Any) -> Operation:
    # As in `_dispatch_grad`, the forward pass is not timed.
    forward = _combine(work.unquantized, implementation)
    options = dict(grad_wire_dtype=work.wire_dtype, implementation=implementation)

    def prepare(seed, topk_idx):
        y, handle, weights = forward.prepare(seed, topk_idx)
        _, backward = jax.vjp(lambda y, weights: combine(y, handle, weights, **options), y, weights)
        return backward, _tokens(work, seed + 3)

    def step(state):
        backward, g = state
        return backward(g)

    return Operation(prepare, step)


OPERATIONS: dict[str, Callable[[Work, Any], Operation]] = {
    "dispatch": _dispatch,
    "combine": _combine,
    "round_trip": _round_trip,
    "dispatch_grad": _dispatch_grad,
    "combine_grad": _combine_grad,
}


def make_operation(op: str, work: Work, implementation: str) -> Operation:
    """Makes an operation of this library, or the baseline that sends rows in its direction."""
    if implementation not in BASELINES:
        return OPERATIONS[op](work, implementation)
    if DIRECTIONS[op] == "out":
        return Operation(lambda seed, _: _tokens(work, seed), lambda x: lax.all_gather(x, AXIS))
    shape = (work.num_ranks, work.num_tokens, work.hidden)
    return Operation(
        lambda seed, _: random_rows(seed, shape, work.dtype), lambda y: lax.psum_scatter(y, AXIS)
    )


def sent_bytes(op: str, work: Work, implementation: str = "") -> float | None:
    """Returns a rank's bytes to other ranks, mean over ranks; None if unknown; see `wire_rows`."""
    rows = work.wire_rows(implementation)
    row_bytes = work.wire.row_bytes(work.hidden, work.dtype)
    if op == "round_trip":  # whose combine sends rows in the tokens' dtype
        row_bytes += PLAIN.row_bytes(work.hidden, work.dtype)
    return None if rows is None else rows * row_bytes


def local_bytes(op: str, work: Work) -> float:
    """Returns the bytes of a rank's operands and results, mean over ranks."""
    plain = PLAIN.row_bytes(work.hidden, work.dtype)
    wire = work.wire.row_bytes(work.hidden, work.dtype)
    dispatched = wire if work.output == "quantized" else plain
    tokens = work.num_tokens * plain
    # The filled rows of a rank's receive buffer.
    filled = float(work.counts(dedup=work.layout == "rank").sum() / work.num_ranks)
    return {
        "dispatch": tokens + filled * dispatched,
        "combine": filled * plain + tokens,
        "round_trip": tokens + filled * dispatched + filled * plain + tokens,
        "dispatch_grad": filled * plain + tokens,
        # In the layout "expert", a combine takes the router's weights. Their gradient depends on
        # the experts' outputs, which must also be read.
        "combine_grad": tokens + filled * plain * (1 if work.layout == "rank" else 2),
    }[op]


def without_handles(outputs: Any) -> Any:
    """Returns the results of a step that do not depend on the implementation."""
    if isinstance(outputs, tuple):
        return tuple(map(without_handles, outputs))
    dispatched = isinstance(outputs, Dispatched | RankDispatched)
    return dataclasses.replace(outputs, handle=None) if dispatched else outputs


def tolerance(op: str, work: Work) -> float:
    """Returns the tolerance of `agree` for an operation."""
    if op == "dispatch" and not work.wire.quantized:
        return 0.0  # rows are only moved
    # A sum is rounded on the sending rank, to the wire format, and on the receiving rank.
    return 2 * float(jnp.finfo(work.dtype).eps) + work.wire.relative_error
