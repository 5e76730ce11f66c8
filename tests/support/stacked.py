"""Operands of the exchange kernels, stacked by rank on axis 0, and their expected results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep import reference
from jax_ep.exchange import routes
from pallas_kernels.exchange import combine as combine_kernel
from pallas_kernels.exchange import dispatch as dispatch_kernel
from pallas_kernels.exchange import rank_dispatch as rank_dispatch_kernel
from pallas_kernels.exchange.plan import Plan, ReceiveBuffer
from pallas_kernels.fabric.fabric import Fabric
from pallas_kernels.formats import FLOAT8_ROWS
from support.contract import (
    Case,
    assert_bitwise_equal,
    assert_equal,
    owned_rows,
    routing,
    send_by_reference,
    small_integers,
    small_weights,
    with_nan_elsewhere,
)


@dataclasses.dataclass(frozen=True)
class Problem:
    """The operands of one dispatch or combine, with the expected results of each kernel."""

    num_ranks: int
    num_tokens: int
    hidden: int
    top_k: int
    num_experts: int
    # The kind of routing, one of `contract.ROUTINGS`.
    kind: str = "uniform"
    dtype: str = "float32"
    capacity: int | None = None
    alignment: int = 1
    weighted: bool = True
    overflow: str = "tail"

    def __str__(self) -> str:
        return f"{self.kind}-{self.case}"

    @functools.cached_property
    def case(self) -> Case:
        return Case(
            self.num_ranks, self.num_tokens, self.hidden, self.top_k, self.num_experts,
            self.dtype, self.capacity, self.alignment, self.overflow,
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        """R, the rows of a receive buffer: `capacity`, or enough for any routing if it is None."""
        return self.case.num_rows

    def _generator(self) -> np.random.Generator:
        return np.random.default_rng(len(str(self)))

    @functools.cached_property
    def topk_idx(self) -> np.ndarray:
        """The experts chosen, [N, T, K] int32."""
        return routing(self.kind, self.case, self._generator())

    @functools.cached_property
    def x(self) -> np.ndarray:
        """The tokens to dispatch, [N, T, H]: normal numbers, no two alike."""
        shape = (self.num_ranks, self.num_tokens, self.hidden)
        return self._generator().standard_normal(shape).astype(jnp.dtype(self.dtype))

    @functools.cached_property
    def dispatched(self) -> list[reference.Dispatched]:
        """The expected results of a dispatch of `x`, one for each rank."""
        return send_by_reference(self.case, self.x, self.topk_idx)

    @property
    def sent(self) -> list[reference.Routes]:
        """The routes of each rank's choices."""
        return [d.routes for d in self.dispatched]

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        """The expected receive buffers, [N, R, H], of a dispatch of `x`."""
        return np.stack([d.tokens for d in self.dispatched])

    @functools.cached_property
    def quantized(self) -> tuple[np.ndarray, np.ndarray]:
        """`x` quantized: float8_e4m3fn values [N, T, H] and scales [N, T, H / 128]."""
        return FLOAT8_ROWS.encode(self.x)

    @functools.cached_property
    def quantized_tokens(self) -> tuple[np.ndarray, ...]:
        """The expected receive buffers of a dispatch of `x` with a wire_dtype."""
        sent = [send_by_reference(self.case, part, self.topk_idx) for part in self.quantized]
        return tuple(np.stack([d.tokens for d in part]) for part in sent)

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """The routes, [N, N, T, K] int32: the row that each choice is sent to at each rank.

        Entry [r, s, t, k] is for choice k of token t of rank s. It is its row in the receive buffer
        of rank r, or -1 if the choice names no expert of rank r. Dropped choices have a row too,
        past the end of the receive buffer.
        """
        dropless = dataclasses.replace(self.case, capacity=None)
        sent = [d.routes for d in send_by_reference(dropless, self.x, self.topk_idx)]
        ranks, rows = np.stack([s.ranks for s in sent]), np.stack([s.rows for s in sent])
        if self.overflow == "fair":
            kept = np.stack([route.rows for route in self.sent])
            rows = np.where(kept < 0, self.num_rows, kept)
        return np.stack([np.where(ranks == r, rows, -1) for r in range(self.num_ranks)])

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """The counts that each rank has, [N, N, E] int32: how often each rank chose each expert."""
        experts = np.arange(self.num_experts)
        counts = (self.topk_idx[..., None] == experts).sum(axis=(1, 2), dtype=np.int32)
        return np.broadcast_to(counts, (self.num_ranks, *counts.shape))

    @functools.cached_property
    def groups(self) -> routes.RowGroups:
        """The expected `RowGroups` of a dispatch, its counts of rows by expert, stacked by rank."""
        fields = routes.RowGroups._fields
        return routes.RowGroups(
            *(np.stack([getattr(d, name) for d in self.dispatched]) for name in fields)
        )

    @functools.cached_property
    def y(self) -> np.ndarray:
        """Receive-buffer rows to combine, [N, R, H]: small integers, whose sums are exact."""
        shape = (self.num_ranks, self.num_rows, self.hidden)
        y = small_integers(self._generator(), shape, jnp.dtype(self.dtype))
        return with_nan_elsewhere(y, owned_rows(self.sent, self.num_rows))

    def _reals(self, shape: tuple[int, ...]) -> np.ndarray:
        """Draws numbers whose magnitude varies by block of 128; some are NaN, infinite or 0."""
        generator, dtype = self._generator(), jnp.dtype(self.dtype)
        blocks = generator.standard_normal((*shape[:-1], shape[-1] // 128, 128))
        largest_power = int(np.log2(float(jnp.finfo(dtype).max)))
        powers = generator.integers(
            max(-100, -largest_power), largest_power // 2, blocks.shape[:-1]
        )
        blocks = (blocks * np.exp2(powers)[..., None]).astype(dtype)
        strange = [np.nan, np.inf, -np.inf, jnp.finfo(dtype).max, -jnp.finfo(dtype).max, 0, -0.0]
        which = generator.integers(0, 200, blocks.shape)
        reals = np.where(which < len(strange), np.take(strange, which, mode="clip"), blocks)
        reals = np.where(generator.random(blocks.shape[:-1])[..., None] < 0.5, reals, blocks)
        return np.where(powers[..., None] % 7 == 0, 0, reals).astype(dtype).reshape(shape)

    @functools.cached_property
    def real_y(self) -> np.ndarray:
        """Receive-buffer rows to combine, [N, R, H]: real numbers, which float8 rounds."""
        return np.where(np.isnan(self.y), self.y, self._reals(self.y.shape))

    @functools.cached_property
    def real_sums(self) -> np.ndarray:
        """Rank-major partial sums to combine, [N, N, T, H]: real numbers, which float8 rounds."""
        return np.where(np.isnan(self.sums), self.sums, self._reals(self.sums.shape))

    @functools.cached_property
    def weights(self) -> np.ndarray | None:
        """The combine weights, [N, T, K] float32; None if `weighted` is False."""
        if not self.weighted:
            return None
        return small_weights(self._generator(), self.topk_idx.shape, np.float32)

    @property
    def _weights_of_ranks(self) -> list[np.ndarray] | None:
        return None if self.weights is None else list(self.weights)

    @functools.cached_property
    def dispatched_by_rank(self) -> list[reference.RankDispatched]:
        """The expected results of a rank-major dispatch of `x`, one for each rank."""
        return self._dispatch_by_rank(self.x)

    def _dispatch_by_rank(self, x: np.ndarray) -> list[reference.RankDispatched]:
        arrays = list(x), list(self.topk_idx), self._weights_of_ranks
        return reference.rank_dispatch(*arrays, num_experts=self.num_experts)

    @property
    def local_topk_idx(self) -> np.ndarray:
        """The expected local ids of a rank-major dispatch, [N, N, T, K] int32."""
        return np.stack([r.local_topk_idx for r in self.dispatched_by_rank])

    @functools.cached_property
    def sums(self) -> np.ndarray:
        """Rank-major partial sums to combine, [N, N, T, H]: small integers, like `y`."""
        shape = (self.num_ranks, self.num_ranks, self.num_tokens, self.hidden)
        sums = small_integers(self._generator(), shape, jnp.dtype(self.dtype))
        return with_nan_elsewhere(sums, (self.local_topk_idx >= 0).any(axis=-1))

    @functools.cached_property
    def combined(self) -> np.ndarray:
        """The expected result of a combine of `y`, [N, T, H]."""
        return np.stack(reference.combine(list(self.y), self.sent, self._weights_of_ranks))

    @functools.cached_property
    def combined_by_wire(self) -> np.ndarray:
        """The expected result of a combine of `real_y` with a wire_dtype, [N, T, H]."""
        y, sums = list(self.real_y.astype(np.float32)), []
        for rank in range(self.num_ranks):
            here = [s._replace(rows=np.where(s.ranks == rank, s.rows, -1)) for s in self.sent]
            with np.errstate(over="ignore", invalid="ignore"):
                sums.append(np.stack(reference.combine(y, here, self._weights_of_ranks)))
        return self._added_after_the_wire(sums)

    @functools.cached_property
    def combined_by_rank_and_wire(self) -> np.ndarray:
        """The expected result of a combine of `real_sums` with a wire_dtype, [N, T, H]."""
        sent = (self.local_topk_idx >= 0).any(axis=-1, keepdims=True)
        return self._added_after_the_wire(list(np.where(sent, self.real_sums, 0)))

    def _added_after_the_wire(self, sums: list[np.ndarray]) -> np.ndarray:
        """Adds the partial sums that the ranks send in float8: one [N, T, H] from each rank."""
        total = np.zeros((self.num_ranks, self.num_tokens, self.hidden), np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            for of_rank in sums:
                total += FLOAT8_ROWS.decode(FLOAT8_ROWS.encode(of_rank), np.float32)
            return total.astype(jnp.dtype(self.dtype))


# Each check function compares a kernel's results, stacked by rank, with the reference's. `wire` is
# the kernel's option.


def check_parts(parts: Any, expected: Sequence[np.ndarray], what: str = "rows") -> None:
    for part, wanted in zip(parts, expected, strict=True):
        assert_bitwise_equal(np.asarray(part).reshape(wanted.shape), wanted, what)


def check_dispatch(problem: Problem, results: Any, wire: Any = None) -> None:
    parts, rows, counts, *groups = results
    check_dispatch_like(problem, parts, wire)
    np.testing.assert_array_equal(rows, problem.rows, "rows")
    np.testing.assert_array_equal(counts, problem.counts, "counts")
    described = ("group_sizes", "expert_counts", "num_dropped", "rows_needed")
    for name, got in zip(described, groups, strict=True):
        wanted = getattr(problem.groups, name)
        np.testing.assert_array_equal(np.asarray(got).reshape(wanted.shape), wanted, name)


def check_dispatch_like(problem: Problem, parts: Any, wire: Any = None) -> None:
    check_parts(parts, problem.quantized_tokens if wire else (problem.tokens,), "tokens")


def check_combine(problem: Problem, out: Any, wire: Any = None) -> None:
    assert_equal(out, problem.combined_by_wire if wire else problem.combined)


def check_rank_dispatch(problem: Problem, results: Any, wire: Any = None) -> None:
    parts, local, weights = results
    received = problem.dispatched_by_rank
    sent = [problem._dispatch_by_rank(x) for x in (problem.quantized if wire else (problem.x,))]
    check_parts(parts, [np.stack([r.tokens for r in part]) for part in sent], "tokens")
    assert_bitwise_equal(local, problem.local_topk_idx, "local_topk_idx")
    if problem.weighted:
        assert_bitwise_equal(weights, np.stack([r.topk_weights for r in received]), "weights")
    else:
        assert weights is None


def check_rank_combine(problem: Problem, out: Any, wire: Any = None) -> None:
    plain = np.stack(reference.rank_combine(list(problem.sums), list(problem.local_topk_idx)))
    assert_equal(out, problem.combined_by_rank_and_wire if wire else plain)


def with_unused_rows(problem: Problem, rows: np.ndarray, value: float) -> np.ndarray:
    """Returns rows [N, R, ...] with `value` in the unused rows past each rank's last expert."""
    used = problem.groups.group_sizes.sum(axis=1)
    unused = np.arange(rows.shape[1]) >= used[:, None]
    assert unused.any() and not unused.all(), "a test of nothing"
    return np.where(unused[..., None], np.asarray(value, rows.dtype), rows)


# Each kernel function below returns a call of its kernel on the operands of a `Problem`: a function
# without arguments, which `simulate` runs. `options` are further options of the kernel.


def _call(kernel: Any, *arrays: np.ndarray | None, **options: Any) -> Any:
    operands = [None if array is None else jnp.asarray(array) for array in arrays]
    return functools.partial(kernel, *operands, **options)


def receive_buffer(problem: Problem, zero_unused: bool = True) -> ReceiveBuffer:
    fair = problem.overflow == "fair"
    return ReceiveBuffer(problem.num_rows, problem.alignment, fair, zero_unused)


def dispatch(
    problem: Problem, plan: Plan, fabric: Fabric, *, zero_unused: bool = True, **options: Any
) -> Any:
    """Returns a call of the dispatch kernel."""
    options |= dict(fabric=fabric, plan=plan, num_experts=problem.num_experts)
    options["buffer"] = receive_buffer(problem, zero_unused)
    return _call(dispatch_kernel.expert_dispatch, problem.x, problem.topk_idx, **options)


def dispatch_like(
    problem: Problem, plan: Plan, fabric: Fabric, *, zero_unused: bool = True, **options: Any
) -> Any:
    """Returns a call of the kernel that dispatches x along the routes `rows` and `counts`."""
    options |= dict(fabric=fabric, plan=plan, buffer=receive_buffer(problem, zero_unused))
    arrays = problem.x, problem.rows, problem.counts
    return _call(dispatch_kernel.dispatch_like, *arrays, **options)


def combine(problem: Problem, plan: Plan, fabric: Fabric, **options: Any) -> Any:
    """Returns a call of the combine kernel on expert-major rows; its result is out [N, T, H]."""
    options |= dict(fabric=fabric, plan=plan, num_experts=problem.num_experts)
    y = problem.real_y if "wire" in options else problem.y
    arrays = y, problem.weights, problem.topk_idx, problem.rows
    return _call(combine_kernel.combine, *arrays, **options)


def rank_dispatch(problem: Problem, plan: Plan, fabric: Fabric, **options: Any) -> Any:
    """Returns a call of the rank-major dispatch kernel."""
    options |= dict(fabric=fabric, plan=plan, num_experts=problem.num_experts)
    arrays = problem.x, problem.topk_idx, problem.weights
    return _call(rank_dispatch_kernel.rank_dispatch, *arrays, **options)


def rank_combine(problem: Problem, plan: Plan, fabric: Fabric, **options: Any) -> Any:
    """Returns a call of the combine kernel on rank-major partial sums, with out [N, T, H]."""
    options |= dict(fabric=fabric, plan=plan, num_experts=problem.num_experts, by_rank=True)
    sums = problem.real_sums if "wire" in options else problem.sums
    rows = sums.reshape(problem.num_ranks, -1, problem.hidden)
    arrays = rows, None, problem.topk_idx, problem.local_topk_idx
    return _call(combine_kernel.combine, *arrays, **options)
