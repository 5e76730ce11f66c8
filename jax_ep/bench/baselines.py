"""Defines baselines of the exchange: XLA's collectives alone, as plain JAX offers them.

Each baseline moves rows in one direction: "out", as dispatch and the gradient of combine do, or
"back", as combine and the gradient of dispatch do. All other work is left out: rows are already
packed in the order of sending, routes are known, and nothing is copied or summed at the end (except
for the sum that is part of reduce-scatter). So a baseline is a lower bound on the time of an
exchange built from it.
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
    """One direction of an exchange by one collective, for `timing.Loop`.

    Attributes:
      arrays: host arrays [N * B, ...], B rows per rank.
      prepare: makes a rank's operands from its rows of `arrays`, as in `timing.Loop`.
      step: runs the collective on a rank's operands, over the axis `AXIS`.
      expected: computes what `step` must return from the operands, both with the ranks stacked.
      tolerance: the largest error that a value of the result may have.
      wire_rows: rows that a rank sends to other ranks, mean over ranks.
    """

    arrays: tuple[Array, ...]
    prepare: Callable[..., Any]
    step: Callable[[Any], Any]
    expected: Callable[[Any], Array]
    wire_rows: float
    tolerance: float = 0.0

    def check(self, operands: Any, results: Any) -> None:
        """Raises AssertionError unless the stacked results of all ranks agree with `expected`."""
        error = np.abs(results.astype(np.float32) - self.expected(operands).astype(np.float32))
        within = np.all(error <= self.tolerance)
        assert within, f"off by up to {error.max()}, tolerance {self.tolerance}"


@dataclasses.dataclass(frozen=True)
class Case:
    """An exchange to measure; `routing` [N * T, K] holds the rank of each choice, -1 for none."""

    routing: Array
    num_ranks: int
    hidden: int
    dtype: Any

    @property
    def num_tokens(self) -> int:
        return len(self.routing) // self.num_ranks

    def pairs(self) -> Array:
        """Counts the (token, choice) pairs from each rank to each rank: [source, destination]."""
        by_source = self.routing.reshape(self.num_ranks, -1)
        ranks = range(self.num_ranks)
        return np.stack([(by_source == rank).sum(axis=1) for rank in ranks], axis=1)

    def tokens(self) -> Array:
        """Counts the tokens of each rank with an expert on each rank: [source, destination]."""
        by_source = self.routing.reshape(self.num_ranks, self.num_tokens, -1)
        ranks = range(self.num_ranks)
        return np.stack([(by_source == rank).any(axis=2).sum(axis=1) for rank in ranks], axis=1)

    def wire_rows(self) -> float:
        """Counts the rows that a rank must send, one per (token, other rank): mean over ranks."""
        return _off_diagonal_mean(self.tokens())


def random_rows(seed: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws an array uniformly from [-1, 1); `seed` is an integer array of one element."""
    return jax.random.uniform(jax.random.key(seed.reshape(())), shape, dtype, -1, 1)


def rank_seeds(num_ranks: int, seed: int = 0) -> Array:
    """Returns seeds [N] int32 for `random_rows`, one for each rank."""
    return np.arange(num_ranks, dtype=np.int32) + 1000 * seed


def all_to_all(case: Case, direction: str) -> Baseline:
    """Makes the baseline of `lax.all_to_all`, which sends [N, T, H]: every token to every rank."""
    shape = (case.num_ranks, case.num_tokens, case.hidden)
    return Baseline(
        arrays=(rank_seeds(case.num_ranks),),
        prepare=lambda seed: random_rows(seed, shape, case.dtype),
        step=lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
        expected=lambda x: x.swapaxes(0, 1),
        wire_rows=(case.num_ranks - 1) * case.num_tokens,
    )


def all_gather_reduce_scatter(case: Case, direction: str) -> Baseline:
    """Makes the baseline of `lax.all_gather` "out" and of `lax.psum_scatter` "back"."""
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

    MoE code in JAX commonly sends rows in this way.
    """
    return _ragged(case, case.pairs(), direction)


def ragged_all_to_all_dedup(case: Case, direction: str) -> Baseline:
    """Makes the baseline of `lax.ragged_all_to_all` with one row per (token, rank), the fewest."""
    return _ragged(case, case.tokens(), direction)


BASELINES: dict[str, Callable[[Case, str], Baseline]] = {
    "ragged_all_to_all": ragged_all_to_all,
    "ragged_all_to_all_dedup": ragged_all_to_all_dedup,
    "all_to_all": all_to_all,
    "all_gather_reduce_scatter": all_gather_reduce_scatter,
}


def unavailable_reason(name: str, platform: str) -> str | None:
    """Returns why a baseline cannot run on a platform, such as "cpu", or None if it can."""
    if name.startswith("ragged") and platform == "cpu":
        return "XLA has no ragged_all_to_all for CPU"
    return None


def _ragged(case: Case, out_counts: Array, direction: str) -> Baseline:
    """Makes a baseline of `lax.ragged_all_to_all`.

    `out_counts` [source, destination] are the rows between ranks in the direction "out".
    """
    counts = out_counts if direction == "out" else out_counts.T
    send_offsets = np.cumsum(counts, axis=1) - counts  # [source, destination] offsets in operands
    recv_offsets = np.cumsum(counts, axis=0) - counts  # [source, destination] offsets in the output
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
