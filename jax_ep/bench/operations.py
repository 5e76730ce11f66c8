"""Defines the operations of dispatch and combine that `bench` times, with checks of results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jax_ep import QuantizedArray, combine, dispatch, group_by_expert, reference, sum_by_token
from jax_ep.bench.baselines import AXIS, Case, random_rows, rank_seeds
from jax_ep.exchange import quantization
from pallas_kernels.formats import PLAIN, RowFormat

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Work:
    """The routing, sizes and dtypes of an exchange (dispatch and combine) to measure.

    Attributes:
      topk_idx: [N * T, K] int32 global expert ids, distinct within a row.
      num_ranks: N, the number of ranks.
      num_experts: E, the number of experts of all ranks together.
      hidden: H, the number of values of a row.
      dtype: the rows' dtype.
      capacity: R, the number of rows of the receive buffer; None: enough for any routing.
      expert_alignment: each expert's block of rows starts at a multiple of this number.
      layout: the order of received rows: "expert" (expert-major) or "rank" (rank-major).
      wire_dtype: the dtype in which rows (tokens, partial sums or cotangents) are sent to other
        ranks. None: the dtype that they already have.
      output: what a dispatch with a wire_dtype returns: "dequantized" rows, or "quantized" rows and
        scales.
      num_hosts: M, the number of hosts that the ranks run on.
      host_capacity: the most rows that a rank sends to each other host, in the layout "expert";
        None: no limit.
    """

    topk_idx: Array
    num_ranks: int
    num_experts: int
    hidden: int
    dtype: Any
    capacity: int | None
    expert_alignment: int = 1
    layout: str = "expert"
    wire_dtype: Any = None
    output: str = "dequantized"
    num_hosts: int = 1
    host_capacity: int | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.topk_idx) // self.num_ranks

    def case(self) -> Case:
        """Returns the routing and sizes of this work as a `Case`, which the baselines take."""
        ranks = self.topk_idx // (self.num_experts // self.num_ranks)
        return Case(ranks, self.num_ranks, self.hidden, self.dtype)

    def routes(self) -> list[reference.Routes]:
        """Computes with `jax_ep.reference` where an expert-major dispatch sends each token.

        Returns a list with the `Routes` of each rank: two arrays [T, K], which hold for each choice
        of each token the destination rank, and the row in that rank's receive buffer.
        """
        topk_idx = np.split(self.topk_idx, self.num_ranks)
        nothing = [np.zeros((self.num_tokens, 1), np.float32)] * self.num_ranks
        return [received.routes for received in self.reference_dispatch(nothing, topk_idx)]

    @property
    def wire(self) -> RowFormat:
        """The row format for `wire_dtype`: which values and scales are sent for a row."""
        return quantization.wire_format(self.wire_dtype)

    def received(self, x=None) -> list[reference.RankDispatched]:
        """Computes with the NumPy reference what each rank receives in a rank-major dispatch.

        `x` is a list of each rank's tokens [T, H]. With None, tokens are zeros [T, 1], so only the
        routing in the result is of use.
        """
        if x is None:
            x = [np.zeros((self.num_tokens, 1), np.float32)] * self.num_ranks
        topk_idx = np.split(self.topk_idx, self.num_ranks)
        return reference.rank_dispatch(x, topk_idx, num_experts=self.num_experts)

    def reference_dispatch(self, x, topk_idx):
        """Computes with the NumPy reference what each rank receives in an expert-major dispatch.

        `x` is a list of each rank's tokens [T, H]. `topk_idx` is a list of the expert ids [T, K]
        that each rank's tokens chose.
        """
        return reference.dispatch(
            x,
            topk_idx,
            num_experts=self.num_experts,
            capacity=self.capacity,
            expert_alignment=self.expert_alignment,
            num_hosts=self.num_hosts,
            host_capacity=self.host_capacity,
        )


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation on one `Work`, in the form that `timing.Loop` takes.

    Attributes:
      arrays: host arrays [N * B, ...], each with B rows for each of the N ranks.
      prepare: makes a rank's operands from its B rows of each array.
      step: runs the operation on a rank's operands.
      check: a function (operands, results) of host arrays with a leading axis of ranks; it raises
        AssertionError unless the results agree with `jax_ep.reference`.
    """

    arrays: tuple[Array, ...]
    prepare: Callable[..., Any]
    step: Callable[[Any], Any]
    check: Callable[[Any, Any], None]


def uniform_routing(num_tokens: int, num_experts: int, top_k: int, seed: int) -> Array:
    """Draws K distinct experts for each token, all equally likely: [num_tokens, K] int32."""
    scores = np.random.default_rng(seed).random((num_tokens, num_experts), np.float32)
    return np.argpartition(scores, top_k - 1, axis=1)[:, :top_k].astype(np.int32)


def rows_needed(topk_idx: Array, num_ranks: int, num_experts: int, expert_alignment: int) -> int:
    """Returns the smallest receive-buffer capacity, in rows, that drops no row on any rank.

    topk_idx [N * T, K] holds expert ids; each expert's rows are padded to `expert_alignment`.
    """
    counts = np.bincount(topk_idx.reshape(-1), minlength=num_experts)
    blocks = -(-counts // expert_alignment) * expert_alignment
    return int(blocks.reshape(num_ranks, -1).sum(axis=1).max())


def make_operation(name: str, work: Work, implementation: str, seed: int) -> Operation:
    """Makes the operation that OPERATIONS calls `name`, such as "dispatch".

    Args:
      name: the name of the operation.
      work: its routing, sizes and dtypes.
      implementation: the implementation that computes it, such as "pallas".
      seed: the seed of its random rows.
    """
    arrays = (rank_seeds(work.num_ranks, seed), work.topk_idx)
    return OPERATIONS[name](work, implementation, arrays)


def _dispatcher(work: Work, implementation: Any, grad_wire_dtype: Any = None) -> Callable[..., Any]:
    options: dict[str, Any] = {"layout": "rank"}
    if work.layout == "expert":
        options = {
            "capacity": work.capacity,
            "expert_alignment": work.expert_alignment,
            "host_capacity": work.host_capacity,
        }

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


def _dispatch(work: Work, implementation: Any, arrays: tuple[Array, ...]) -> Operation:
    call = _dispatcher(work, implementation)

    def prepare(seed, topk_idx):
        return random_rows(seed, (work.num_tokens, work.hidden), work.dtype), topk_idx

    def check(state, out):
        _check_dispatched(work, state, out)

    return Operation(arrays, prepare, lambda state: call(*state), check)


def _check_dispatched(work: Work, state: Any, out: Any) -> None:
    x, topk_idx = state
    names: tuple[str, ...]
    wanted: Sequence[Any]
    if work.layout == "rank":
        names, wanted = ("local_topk_idx",), work.received(x)
    else:
        names = ("group_sizes", "expert_counts", "num_dropped", "rows_needed")
        wanted = work.reference_dispatch(x, topk_idx)
    tolerance = 0.0
    tokens = out.tokens
    # A relative error bound serves as the absolute tolerance, because no value is above 1.
    if work.wire.quantized:
        tolerance = work.wire.relative_error + float(jax.numpy.finfo(work.dtype).eps)
    if isinstance(tokens, QuantizedArray):
        tokens = jax.tree.map(np.asarray, tokens).dequantize(np.float32)
    for rank, received in enumerate(wanted):
        _agree(tokens[rank], received.tokens, f"tokens of rank {rank}", tolerance)
        for name in names:
            _agree(getattr(out, name)[rank], getattr(received, name), f"{name} of rank {rank}")


def _combine(work: Work, implementation: Any, arrays: tuple[Array, ...]) -> Operation:
    call = _dispatcher(work, implementation)

    def prepare(seed, topk_idx):
        x = random_rows(seed, (work.num_tokens, work.hidden), work.dtype)
        received = call(x, topk_idx)
        y = random_rows(seed + 1, received.tokens.shape, work.dtype)
        return y, received.handle, _weights(work, seed + 2, topk_idx.shape)

    def step(state):
        return combine(*state, wire_dtype=work.wire_dtype, implementation=implementation)

    def check(state, out):
        y, _, weights = state
        _check_combined(work, y, weights, out, work.wire)

    return Operation(arrays, prepare, step, check)


def _check_combined(work: Work, y: Any, weights: Any, out: Any, wire: RowFormat) -> None:
    magnitude = 1.0
    if work.layout == "rank":
        magnitude = min(work.num_ranks, work.topk_idx.shape[1])
        wanted = reference.rank_combine(y, [r.local_topk_idx for r in work.received()])
    else:
        wanted = reference.combine(y, work.routes(), weights)
    # Each rank sends its partial sums in the wire format, which rounds them. In a result of at most
    # `magnitude`, the rounding errors of all ranks add up to at most `relative_error * magnitude`.
    tolerance = _tolerance(work, magnitude) + wire.relative_error * magnitude
    _agree_all(out, wanted, "out", tolerance)


def _round_trip(work: Work, implementation: Any, arrays: tuple[Array, ...]) -> Operation:
    """Makes the operation `round_trip`: a dispatch, followed by a combine.

    No experts compute in between, so the combine takes random rows y as the experts' outputs.
    """
    call = _dispatcher(work, implementation)

    def prepare(seed, topk_idx):
        x = random_rows(seed, (work.num_tokens, work.hidden), work.dtype)
        shape = jax.eval_shape(call, x, topk_idx).tokens.shape
        y = random_rows(seed + 1, shape, work.dtype)
        return x, topk_idx, y, _weights(work, seed + 2, topk_idx.shape)

    def step(state):
        x, topk_idx, y, weights = state
        received = call(x, topk_idx)
        return received, combine(y, received.handle, weights, implementation=implementation)

    def check(state, outputs):
        x, topk_idx, y, weights = state
        received, out = outputs
        _check_dispatched(work, (x, topk_idx), received)
        _check_combined(work, y, weights, out, PLAIN)

    return Operation(arrays, prepare, step, check)


def _group_by_expert(work: Work, implementation: Any, arrays: tuple[Array, ...]) -> Operation:
    """Makes the operation `group_by_expert`, which works on one rank without communication.

    It permutes the rows of a rank-major dispatch to expert-major order. Quantized rows and their
    scales are always permuted by the implementation "xla".
    """
    work = dataclasses.replace(work, layout="rank")
    call = _dispatcher(work, implementation)

    def prepare(seed, topk_idx):
        return call(random_rows(seed, (work.num_tokens, work.hidden), work.dtype), topk_idx)

    def step(received):
        return group_by_expert(
            received,
            capacity=work.capacity,
            expert_alignment=work.expert_alignment,
            implementation="xla" if work.output == "quantized" else implementation,
        )

    def check(received, out):
        names = ("tokens", "group_sizes", "expert_counts", "num_dropped", "rows_needed")
        per_rank = work.num_experts // work.num_ranks
        out, tokens_of_ranks = (_with_values(out), np.asarray(_with_values(received).tokens))
        for rank, tokens in enumerate(tokens_of_ranks):
            (wanted,) = reference.dispatch(
                [tokens.reshape(-1, work.hidden)],
                [np.asarray(received.local_topk_idx)[rank].reshape(-1, work.topk_idx.shape[1])],
                num_experts=per_rank,
                capacity=work.capacity,
                expert_alignment=work.expert_alignment,
            )
            for name in names:
                _agree(getattr(out, name)[rank], getattr(wanted, name), f"{name} of rank {rank}")

    return Operation(arrays, prepare, step, check)


def _sum_by_token(work: Work, implementation: Any, arrays: tuple[Array, ...]) -> Operation:
    """Makes the operation `sum_by_token`, which works on one rank without communication.

    For each received token, it sums the rows that the rank's experts computed for the token. A
    rank-major combine then sends these partial sums to the tokens' ranks.
    """
    group = _group_by_expert(_unquantized(work), implementation, arrays)

    def prepare(seed, topk_idx):
        received = group.prepare(seed, topk_idx)
        grouped = group.step(received)
        return random_rows(seed + 1, grouped.tokens.shape, work.dtype), grouped, received

    def step(state):
        return sum_by_token(*state, implementation=implementation)

    def check(state, out):
        y, grouped, received = state
        for rank, rows in enumerate(np.asarray(grouped.handle.routes.rows)):
            # rows[0] is [N * T, K]. For each choice of each of the N * T tokens that this rank can
            # receive, it holds the index of a row of y. (`rows` has a leading axis of length 1.)
            routes = reference.Routes(np.zeros_like(rows[0]), rows[0], len(y[rank]))
            (wanted,) = reference.combine([np.asarray(y[rank])], [routes], None)
            got = np.asarray(out[rank]).reshape(wanted.shape)
            _agree(got, wanted, f"sums of rank {rank}", _tolerance(work, work.topk_idx.shape[1]))

    return Operation(arrays, prepare, step, check)


def _dispatch_grad(work: Work, implementation: Any, arrays: tuple[Array, ...]) -> Operation:
    plain = _unquantized(work)
    call = _dispatcher(plain, implementation, grad_wire_dtype=work.wire_dtype)

    def prepare(seed, topk_idx):
        x = random_rows(seed, (work.num_tokens, work.hidden), work.dtype)
        tokens, backward = jax.vjp(lambda x: call(x, topk_idx).tokens, x)
        return backward, random_rows(seed + 1, tokens.shape, work.dtype)

    def step(state):
        backward, g = state
        (dx,) = backward(g)
        return dx

    def check(state, out):
        _, g = state
        if work.layout == "rank":
            wanted = reference.rank_combine(g, [r.local_topk_idx for r in work.received()])
        else:
            wanted = reference.dispatch_grad(g, work.routes())
        top_k = work.topk_idx.shape[1]
        # Each rank sends its partial sums in the wire format, which rounds them. A result is a sum
        # of K cotangents of at most 1, so the rounding errors of all ranks add up to at most
        # `relative_error * top_k`.
        tolerance = _tolerance(work, top_k) + work.wire.relative_error * top_k
        _agree_all(out, wanted, "dx", tolerance)

    return Operation(arrays, prepare, step, check)


def _combine_grad(work: Work, implementation: Any, arrays: tuple[Array, ...]) -> Operation:
    forward = _combine(_unquantized(work), implementation, arrays)
    options = dict(grad_wire_dtype=work.wire_dtype, implementation=implementation)

    def prepare(seed, topk_idx):
        y, handle, weights = forward.prepare(seed, topk_idx)
        _, backward = jax.vjp(lambda y, weights: combine(y, handle, weights, **options), y, weights)
        g = random_rows(seed + 3, (work.num_tokens, work.hidden), work.dtype)
        return backward, g, y, weights

    def step(state):
        backward, g, _, _ = state
        return backward(g)

    def check(state, out):
        _, g, y, weights = state
        # A value that is halfway between two neighboring numbers of the wire format may be rounded
        # up on the GPU and down by NumPy here. Then the two results differ by the distance between
        # the two neighbors.
        slack = 2 * work.wire.relative_error
        g = work.wire.decode(work.wire.encode(np.asarray(g)), work.dtype)
        if work.layout == "rank":
            _agree_all(out[0], [r.tokens for r in work.received(g)], "dy", slack)
            return
        wanted_dy, wanted_dweights = reference.combine_grad(g, y, work.routes(), weights)
        assert wanted_dweights is not None
        dy, dweights = out
        _agree_all(dy, wanted_dy, "dy", _tolerance(work, 1.0) + slack)
        # A weight's gradient is a float32 sum of H products of numbers below 1. Only few of the
        # products have a factor that NumPy rounds differently than the GPU.
        _agree_all(dweights, wanted_dweights, "dweights", 1e-6 * work.hidden + 2 * slack)

    return Operation(arrays, prepare, step, check)


OPERATIONS: dict[str, Callable[[Work, Any, tuple[Array, ...]], Operation]] = {
    "dispatch": _dispatch,
    "combine": _combine,
    "round_trip": _round_trip,
    "dispatch_grad": _dispatch_grad,
    "combine_grad": _combine_grad,
    "group_by_expert": _group_by_expert,
    "sum_by_token": _sum_by_token,
}
# Maps an operation to the direction in which it moves rows between ranks: "out" from tokens to
# experts, or "back" from experts to tokens. Only baselines of the same direction are comparable.
DIRECTIONS = {
    "dispatch": "out",
    "combine": "back",
    "dispatch_grad": "back",
    "combine_grad": "out",
}
# The names of the operations that can send or permute rows in a wire dtype.
QUANTIZED = tuple(name for name in OPERATIONS if name != "sum_by_token")
# Operations that exist in the rank-major layout only.
OF_RANK_MAJOR = ("group_by_expert", "sum_by_token")


def _with_values(received: Any) -> Any:
    """Replaces tokens, if they are quantized, by their float8 values without the scales.

    A permutation moves these values unchanged, so they can be compared exactly.
    """
    if not isinstance(received.tokens, QuantizedArray):
        return received
    return dataclasses.replace(received, tokens=received.tokens.values)


def _unquantized(work: Work) -> Work:
    return dataclasses.replace(work, wire_dtype=None, output="dequantized")


def _weights(work: Work, seed: jax.Array, shape: tuple[int, ...]) -> jax.Array | None:
    # A rank-major combine takes no weights, because it takes sums that are already weighted.
    if work.layout == "rank":
        return None
    weights = random_rows(seed, shape, np.float32) + 1.5
    return weights / weights.sum(axis=-1, keepdims=True)


def _tolerance(work: Work, magnitude: float) -> float:
    """Returns the largest absolute error that rounding may cause in a combined value.

    The value is at most `magnitude`. Two sums are rounded to the rows' dtype: each rank's partial
    sum, and then the sum over ranks.
    """
    return 2 * magnitude * float(jax.numpy.finfo(work.dtype).eps)


def _agree_all(got: Array, wanted: Sequence[Array], name: str, tolerance: float) -> None:
    for rank, array in enumerate(wanted):
        _agree(got[rank], array, f"{name} of rank {rank}", tolerance)


def _agree(got: Array, wanted: Array, name: str, tolerance: float = 0.0) -> None:
    """Raises AssertionError unless all elements of two arrays differ by at most `tolerance`."""
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape, f"{name}: shape {got.shape}, not {wanted.shape}"
    if tolerance == 0.0:
        wrong = got != wanted
    else:
        error = np.abs(got.astype(np.float32) - wanted.astype(np.float32))
        # Written as ~(... <= ...), the comparison also counts NaN as wrong.
        wrong = ~(error <= tolerance)
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.size} elements differ from the reference, the "
            f"first at {where}: {got[where]}, not {wanted[where]} (tolerance {tolerance:.3g})"
        )
