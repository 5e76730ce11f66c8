"""Defines baselines for dispatch and combine: one XLA collective each, called through plain JAX.

Each baseline moves rows in one direction: "out", as dispatch and the gradient of combine do, or
"back", as combine and the gradient of dispatch do. A baseline is the collective alone: rows are
already packed in the order of sending, offsets and counts are known, and received rows are not
copied or summed (except for the sum that is part of reduce-scatter). So its time is a lower bound
for a dispatch or combine built from this collective.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

AXIS = "expert"
Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A collective that moves rows in one direction of an exchange, for `timing.Loop`.

    Attributes:
      arrays: host arrays [N * B, ...], with B rows for each of the N ranks.
      prepare: makes a rank's operands from its B rows of each array, as in `timing.Loop`.
      step: runs the collective on a rank's operands, over the mesh axis `AXIS`.
      expected: computes the right result of `step` from the operands; operands and result have a
        leading axis of ranks.
      tolerance: the largest absolute error that an element of the result may have.
      wire_rows: the number of rows that a rank sends to other ranks, mean over ranks.
    """

    arrays: tuple[Array, ...]
    prepare: Callable[..., Any]
    step: Callable[[Any], Any]
    expected: Callable[[Any], Array]
    wire_rows: float
    tolerance: float = 0.0

    def check(self, operands: Any, results: Any) -> None:
        """Raises AssertionError unless all ranks' results are within `tolerance` of `expected`."""
        error = np.abs(results.astype(np.float32) - self.expected(operands).astype(np.float32))
        within = np.all(error <= self.tolerance)
        assert within, f"off by up to {error.max()}, tolerance {self.tolerance}"


@dataclasses.dataclass(frozen=True)
class Case:
    """The routing and sizes of an exchange (dispatch and combine) to measure.

    `routing` [N * T, K] holds, for each of the T tokens of each of the N ranks, the destination
    ranks of its K choices, -1 for no choice.
    """

    routing: Array
    num_ranks: int
    hidden: int
    dtype: Any

    @property
    def num_tokens(self) -> int:
        return len(self.routing) // self.num_ranks

    def pairs(self) -> Array:
        """Counts the (token, choice) pairs by source rank and destination rank: [N, N]."""
        by_source = self.routing.reshape(self.num_ranks, -1)
        ranks = range(self.num_ranks)
        return np.stack([(by_source == rank).sum(axis=1) for rank in ranks], axis=1)

    def tokens(self) -> Array:
        """Counts the tokens by source rank and destination rank: [N, N].

        A token counts once for each rank that has at least one of the experts that it chose.
        """
        by_source = self.routing.reshape(self.num_ranks, self.num_tokens, -1)
        ranks = range(self.num_ranks)
        return np.stack([(by_source == rank).any(axis=2).sum(axis=1) for rank in ranks], axis=1)

    def wire_rows(self) -> float:
        """Counts the rows that a rank must send to other ranks, as the mean over ranks.

        A token is sent as one row to each other rank that has an expert that the token chose.
        """
        return _off_diagonal_mean(self.tokens())


def random_rows(seed: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws an array uniformly from [-1, 1). `seed` is an integer array of one element."""
    return jax.random.uniform(jax.random.key(seed.reshape(())), shape, dtype, -1, 1)


def rank_seeds(num_ranks: int, seed: int = 0) -> Array:
    """Returns a different `random_rows` seed for each rank, as an array [N] int32."""
    return np.arange(num_ranks, dtype=np.int32) + 1000 * seed


def all_to_all(case: Case, direction: str) -> Baseline:
    """Makes the baseline of `lax.all_to_all`, which is the same in both directions.

    Every rank sends T rows of H values to each of the N ranks, as if each of its T tokens had
    chosen an expert on every rank.
    """
    shape = (case.num_ranks, case.num_tokens, case.hidden)
    return Baseline(
        arrays=(rank_seeds(case.num_ranks),),
        prepare=lambda seed: random_rows(seed, shape, case.dtype),
        step=lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
        expected=lambda x: x.swapaxes(0, 1),
        wire_rows=(case.num_ranks - 1) * case.num_tokens,
    )


def all_gather_reduce_scatter(case: Case, direction: str) -> Baseline:
    """Makes the baseline in which every token goes to every rank.

    In the direction "out", `lax.all_gather` sends all tokens to all ranks. In the direction "back",
    `lax.psum_scatter` sums the results of all ranks for each token.
    """
    rows = (case.num_ranks - 1) * case.num_tokens
    if direction == "out":
        shape: tuple[int, ...] = (case.num_tokens, case.hidden)
        return Baseline(
            arrays=(rank_seeds(case.num_ranks),),
            prepare=lambda seed: random_rows(seed, shape, case.dtype),
            step=lambda x: lax.all_gather(x, AXIS),
            expected=lambda x: np.broadcast_to(x, (case.num_ranks, *x.shape)),
            wire_rows=rows,
        )
    shape = (case.num_ranks, case.num_tokens, case.hidden)
    return Baseline(
        arrays=(rank_seeds(case.num_ranks),),
        prepare=lambda seed: random_rows(seed, shape, case.dtype),
        step=lambda y: lax.psum_scatter(y, AXIS),
        expected=lambda y: y.sum(axis=0, dtype=np.float32),
        wire_rows=rows,
        tolerance=case.num_ranks**2 * float(jnp.finfo(case.dtype).eps),
    )


def ragged_all_to_all(case: Case, direction: str) -> Baseline:
    """Makes the baseline of `lax.ragged_all_to_all` with one row per (token, choice).

    MoE code in JAX commonly dispatches tokens with this collective and one row per choice.
    """
    return _ragged(case, case.pairs(), direction)


def ragged_all_to_all_dedup(case: Case, direction: str) -> Baseline:
    """Makes the baseline of `lax.ragged_all_to_all` with one row per (token, destination rank).

    No exchange can send fewer rows: a token whose choices share a rank is sent there once.
    """
    return _ragged(case, case.tokens(), direction)


BASELINES: dict[str, Callable[[Case, str], Baseline]] = {
    "ragged_all_to_all": ragged_all_to_all,
    "ragged_all_to_all_dedup": ragged_all_to_all_dedup,
    "all_to_all": all_to_all,
    "all_gather_reduce_scatter": all_gather_reduce_scatter,
}


def unavailable_reason(name: str, platform: str) -> str | None:
    """Returns why the baseline `name` cannot run on a platform, such as "cpu"; None if it can."""
    if name.startswith("ragged") and platform == "cpu":
        return "XLA has no ragged_all_to_all for CPU"
    return None


def _ragged(case: Case, out_counts: Array, direction: str) -> Baseline:
    """Makes a baseline of `lax.ragged_all_to_all`, for given numbers of rows.

    `out_counts` [N, N] holds the number of rows that each source rank (first axis) sends to each
    destination rank (second axis) in the direction "out".
    """
    counts = out_counts if direction == "out" else out_counts.T
    # The rows from rank s to rank d start at row send_offsets[s, d] of the operand of s, and at row
    # recv_offsets[s, d] of the output of d.
    send_offsets = np.cumsum(counts, axis=1) - counts
    recv_offsets = np.cumsum(counts, axis=0) - counts
    send_rows = max(int(counts.sum(axis=1).max()), 1)
    recv_rows = max(int(counts.sum(axis=0).max()), 1)

    def prepare(seed, *routes):
        operand = random_rows(seed, (send_rows, case.hidden), case.dtype)
        return operand, jnp.zeros((recv_rows, case.hidden), case.dtype), *routes

    def expected(state):
        operand, output = np.asarray(state[0]), np.array(state[1])
        for source, destination in np.ndindex(*counts.shape):
            rows = counts[source, destination]
            start, place = send_offsets[source, destination], recv_offsets[source, destination]
            output[destination, place : place + rows] = operand[source, start : start + rows]
        return output

    routes = (send_offsets, counts, recv_offsets, counts.T)
    return Baseline(
        arrays=(
            rank_seeds(case.num_ranks),
            *(array.reshape(-1).astype(np.int32) for array in routes),
        ),
        prepare=prepare,
        step=lambda state: lax.ragged_all_to_all(*state, axis_name=AXIS),
        expected=expected,
        wire_rows=_off_diagonal_mean(counts),
    )


def _off_diagonal_mean(counts: Array) -> float:
    return float(counts.sum() - np.trace(counts)) / len(counts)
