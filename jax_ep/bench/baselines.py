"""The exchange as plain JAX offers it: XLA's collectives alone.

Each baseline moves rows in one direction: "out" as dispatch and the gradient of combine do, "back"
as combine and the gradient of dispatch do. It is given everything for nothing: rows already packed
in sending order, routes known, nothing fanned out or summed at the end (except the sum that
reduce-scatter cannot help doing). So a baseline is a lower bound on an exchange built from it.
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
    """One direction of one collective, for `timing.Loop`.

    Attributes:
      arrays: host arrays [N * B, ...], B rows per rank.
      prepare, step: as in `timing.Loop`; they run per rank over the axis `AXIS`.
      expected: from what `prepare` returned, the ranks stacked, what `step` must return.
      exact: whether every bit of it must agree.
      wire_rows: rows that cross between ranks, mean over ranks.
    """

    arrays: tuple[Array, ...]
    prepare: Callable[..., Any]
    step: Callable[[Any], Any]
    expected: Callable[[Any], Array]
    exact: bool
    wire_rows: float


@dataclasses.dataclass(frozen=True)
class Case:
    """An exchange to do; `routing` [N * T, K] holds the rank of each choice, -1 for none."""

    routing: Array
    num_ranks: int
    hidden: int
    dtype: Any

    @property
    def num_tokens(self) -> int:
        return len(self.routing) // self.num_ranks

    def pairs(self) -> Array:
        """Counts (token, choice) pairs: [N, N], from one rank to another."""
        by_source = self.routing.reshape(self.num_ranks, -1)
        ranks = range(self.num_ranks)
        return np.stack([(by_source == rank).sum(axis=1) for rank in ranks], axis=1)

    def tokens(self) -> Array:
        """Counts tokens of one rank that chose any expert of another: [N, N]."""
        by_source = self.routing.reshape(self.num_ranks, self.num_tokens, -1)
        ranks = range(self.num_ranks)
        return np.stack([(by_source == rank).any(axis=2).sum(axis=1) for rank in ranks], axis=1)

    def wire_rows(self) -> float:
        """Counts rows that must cross, one per (token, other rank): the mean over ranks."""
        return _off_diagonal_mean(self.tokens())


def random_rows(seed: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Draws uniformly from [-1, 1); `seed`, an integer array of one element, picks the stream."""
    return jax.random.uniform(jax.random.key(seed.reshape(())), shape, dtype, -1, 1)


def rank_seeds(num_ranks: int, seed: int = 0) -> Array:
    """Makes one seed per rank, for `random_rows`."""
    return np.arange(num_ranks, dtype=np.int32) + 1000 * seed


def all_to_all(case: Case, direction: str) -> Baseline:
    """Exchanges [N, T, H] by `lax.all_to_all`: a slot for every (rank, token), used or not."""
    shape = (case.num_ranks, case.num_tokens, case.hidden)
    return Baseline(
        arrays=(rank_seeds(case.num_ranks),),
        prepare=lambda seed: random_rows(seed, shape, case.dtype),
        step=lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
        expected=lambda x: x.swapaxes(0, 1),
        exact=True,
        wire_rows=(case.num_ranks - 1) * case.num_tokens,
    )


def all_gather_reduce_scatter(case: Case, direction: str) -> Baseline:
    """Sends every token to every rank by `lax.all_gather`; sums back by `lax.psum_scatter`."""
    rows = (case.num_ranks - 1) * case.num_tokens
    if direction == "out":
        shape: tuple[int, ...] = (case.num_tokens, case.hidden)
        return Baseline(
            arrays=(rank_seeds(case.num_ranks),),
            prepare=lambda seed: random_rows(seed, shape, case.dtype),
            step=lambda x: lax.all_gather(x, AXIS),
            expected=lambda x: np.broadcast_to(x, (case.num_ranks, *x.shape)),
            exact=True,
            wire_rows=rows,
        )
    shape = (case.num_ranks, case.num_tokens, case.hidden)
    return Baseline(
        arrays=(rank_seeds(case.num_ranks),),
        prepare=lambda seed: random_rows(seed, shape, case.dtype),
        step=lambda y: lax.psum_scatter(y, AXIS),
        expected=lambda y: y.sum(axis=0, dtype=np.float32),
        exact=False,
        wire_rows=rows,
    )


def ragged_all_to_all(case: Case, direction: str) -> Baseline:
    """Sends one row per (token, choice) by `lax.ragged_all_to_all`, as MoE code commonly does."""
    return _ragged(case, case.pairs(), direction)


def ragged_all_to_all_dedup(case: Case, direction: str) -> Baseline:
    """Sends one row per (token, rank) by `lax.ragged_all_to_all`: the fewest that it can send."""
    return _ragged(case, case.tokens(), direction)


BASELINES: dict[str, Callable[[Case, str], Baseline]] = {
    "ragged_all_to_all": ragged_all_to_all,
    "ragged_all_to_all_dedup": ragged_all_to_all_dedup,
    "all_to_all": all_to_all,
    "all_gather_reduce_scatter": all_gather_reduce_scatter,
}


def unavailable_reason(name: str, platform: str) -> str | None:
    """Says why a baseline cannot run on this platform; None: it can."""
    if name.startswith("ragged") and platform == "cpu":
        return "XLA has no ragged_all_to_all for CPU"
    return None


def _ragged(case: Case, out_counts: Array, direction: str) -> Baseline:
    """Makes a ragged baseline; `out_counts` [N, N]: rows between ranks on the way out."""
    counts = out_counts if direction == "out" else out_counts.T
    send_offsets = np.cumsum(counts, axis=1) - counts  # [source, destination]: in the operand
    recv_offsets = np.cumsum(counts, axis=0) - counts  # [source, destination]: in the output
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
        exact=True,
        wire_rows=_off_diagonal_mean(counts),
    )


def _off_diagonal_mean(counts: Array) -> float:
    return float(counts.sum() - np.trace(counts)) / len(counts)
