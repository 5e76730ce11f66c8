"""Shared by tests of dispatch and combine: cases, routings, inputs, the reference's results."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ep
from jax_ep import reference
from jax_ep.formats import FLOAT8_ROWS, Format
from support.meshes import expert_mesh

AXIS = "expert"
Implementation = Literal["pallas", "xla", "two_level"]


def implementations() -> tuple[Implementation, ...]:
    """Returns the exchange implementations to test: "xla", and on Hopper or newer "pallas"."""
    device = jax.devices()[0]
    if device.platform == "gpu" and float(getattr(device, "compute_capability", 0)) >= 9:
        return ("xla", "pallas")
    return ("xla",)


def most_ranks(limit: int) -> int:
    """Returns the largest power of two up to `limit` for which this machine has devices."""
    return max(n for n in (1, 2, 4, 8) if n <= min(limit, len(jax.devices())))


@dataclasses.dataclass(frozen=True)
class Case:
    """The static arguments of a dispatch: sizes, dtype and options."""

    num_ranks: int
    num_tokens: int
    hidden: int
    top_k: int
    num_experts: int
    dtype: str = "float32"
    capacity: int | None = None
    expert_alignment: int = 1
    overflow: str = "tail"

    def __str__(self) -> str:
        fair = "-fair" if self.overflow == "fair" else ""
        return (
            f"N{self.num_ranks}-T{self.num_tokens}-H{self.hidden}-K{self.top_k}"
            f"-E{self.num_experts}-{self.dtype}-R{self.capacity}-A{self.expert_alignment}{fair}"
        )

    @property
    def num_rows(self) -> int:
        """R, a receive buffer's rows: `capacity`, or those that fit any routing."""
        if self.capacity is not None:
            return self.capacity
        local_experts = self.num_experts // self.num_ranks
        sizes = self.num_ranks, self.num_tokens, self.top_k, local_experts, self.expert_alignment
        return reference.dropless_capacity(*sizes)

    @property
    def options(self) -> dict[str, Any]:
        return {
            "num_experts": self.num_experts,
            "capacity": self.capacity,
            "expert_alignment": self.expert_alignment,
            "overflow": self.overflow,
        }

    def dispatch(
        self, x: Any, topk_idx: Any, implementation: Implementation | None, **options: Any
    ) -> Any:
        options = {"axis_name": AXIS, **self.options, **options}
        return jax_ep.dispatch(x, topk_idx, implementation=implementation, **options)


# --------------------------------------------------------------------------------------- inputs

ROUTINGS = (
    "uniform",
    "skewed",
    "masked",
    "strange_ids",
    "repeated",
    "one_rank",
    "one_expert",
    "idle_sources",
    "empty",
)


def routing(kind: str, case: Case, rng: np.random.Generator) -> np.ndarray:
    """Returns topk_idx [N, T, K] int32 for one kind of `ROUTINGS`; -1 is a masked choice."""
    shape = (case.num_ranks, case.num_tokens, case.top_k)
    num_experts, last = case.num_experts, case.num_experts - 1
    # A router's choices are distinct, as far as there are enough experts.
    if kind == "uniform":
        order = np.argsort(rng.random((*shape[:2], num_experts)), axis=-1)
        distinct = order[..., : case.top_k]
        idx = np.concatenate([distinct] * case.top_k, axis=-1)[..., : case.top_k]
    elif kind == "skewed":
        weight = 1.0 / np.arange(1, num_experts + 1) ** 2
        idx = rng.choice(num_experts, shape, p=weight / weight.sum())
    elif kind == "masked":
        idx = np.where(rng.random(shape) < 0.5, rng.integers(0, num_experts, shape), -1)
    elif kind == "strange_ids":
        # An id outside of the experts chooses none.
        values = [-2, -128, num_experts, num_experts + 1, 2**31 - 1, -(2**31)]
        idx = rng.integers(0, num_experts, shape)
        idx = np.where(rng.random(shape) < 0.6, rng.choice(values, shape), idx)
    elif kind == "repeated":
        idx = np.broadcast_to(rng.integers(0, num_experts, (*shape[:2], 1)), shape)
    elif kind == "one_rank":
        idx = rng.integers(num_experts - num_experts // case.num_ranks, num_experts, shape)
    elif kind == "one_expert":
        idx = np.full(shape, last)
    elif kind == "idle_sources":
        idx = rng.integers(0, num_experts, shape)
        idx[::2] = -1
    elif kind == "empty":
        idx = np.full(shape, -1)
    else:
        raise ValueError(kind)
    return np.ascontiguousarray(idx, np.int32)


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an array of random bits: NaNs of all payloads, infinities, minus zero, subnormals."""
    itemsize = np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * itemsize), dtype).reshape(shape)


def small_integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Draws integers from -2 to 2; sums of their products are exact in any order and dtype."""
    return rng.integers(-2, 3, shape).astype(dtype)


def small_weights(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return rng.choice([-1.0, 0.5, 1.0, 2.0], shape).astype(dtype)


def owned_rows(routes: list[reference.Routes], capacity: int) -> np.ndarray:
    """Returns [N, R] bool: True for receive-buffer rows to which a (token, choice) was sent."""
    owned = np.zeros((len(routes), capacity), bool)
    for route in routes:
        sent = route.rows >= 0
        owned[route.ranks[sent], route.rows[sent]] = True
    return owned


def with_nan_elsewhere(rows: np.ndarray, owned: np.ndarray) -> np.ndarray:
    """Returns rows [N, R, H] with NaN where `owned` [N, R] is False, to show that none is read."""
    return np.where(owned[..., None], rows, np.asarray(np.nan, rows.dtype))


# ------------------------------------------------------------------- the program that is tested


class Inputs(NamedTuple):
    """The inputs of a dispatch and a combine with their gradients, stacked by rank on axis 0.

    With N ranks, T tokens, K choices of each, R rows in each receive buffer and hidden size H, x
    and grad_out are [N, T, H], grad_tokens and y [N, R, H], topk_idx and topk_weights [N, T, K].
    """

    x: Any
    topk_idx: Any
    grad_tokens: Any
    y: Any
    topk_weights: Any
    grad_out: Any


class Outputs(NamedTuple):
    """The results of a dispatch and a combine with their gradients, stacked by rank on axis 0."""

    tokens: Any
    group_sizes: Any
    expert_counts: Any
    num_dropped: Any
    rows_needed: Any
    dropped_counts: Any
    grad_x: Any
    # The result and the gradients of the combine of y with weights.
    out: Any
    grad_y: Any
    grad_weights: Any
    # The result and the gradient of the combine of y without weights.
    plain_out: Any
    plain_grad_y: Any


def per_rank(
    function: Any, num_ranks: int, check_vma: bool = True, mesh: Mesh | None = None
) -> Any:
    """Maps `function` over the ranks by shard_map; operands and results are stacked by rank."""
    mesh = expert_mesh(num_ranks, AXIS) if mesh is None else mesh

    def on_one_rank(*args: Any) -> Any:
        results = function(*jax.tree.map(lambda a: a[0], args))
        return jax.tree.map(lambda a: a[None], results)

    return jax.shard_map(
        on_one_rank,
        mesh=mesh,
        in_specs=P(mesh.axis_names),
        out_specs=P(mesh.axis_names),
        check_vma=check_vma,
    )


@functools.cache
def program(
    case: Case,
    implementation: Implementation | None,
    check_vma: bool = True,
    mesh: Mesh | None = None,
    **options: Any,
) -> Any:
    """Returns a jitted function, `Inputs` -> `Outputs`; `options` are those of its dispatch."""
    axis_name = AXIS if mesh is None else mesh.axis_names

    def everything(inputs: Inputs) -> Outputs:
        def send(x: Any) -> tuple[Any, Any]:
            sent = case.dispatch(x, inputs.topk_idx, implementation, axis_name=axis_name, **options)
            return sent.tokens, sent

        def bring_back(y: Any, weights: Any) -> Any:
            return jax_ep.combine(y, sent.handle, weights, implementation=implementation)

        tokens, pull_tokens, sent = jax.vjp(send, inputs.x, has_aux=True)
        out, pull_out = jax.vjp(bring_back, inputs.y, inputs.topk_weights)
        plain_out, pull_plain = jax.vjp(lambda y: bring_back(y, None), inputs.y)
        (grad_x,) = pull_tokens(inputs.grad_tokens)
        grad_y, grad_weights = pull_out(inputs.grad_out)
        (plain_grad_y,) = pull_plain(inputs.grad_out)
        return Outputs(
            tokens,
            sent.group_sizes,
            sent.expert_counts,
            sent.num_dropped,
            sent.rows_needed,
            sent.dropped_counts,
            grad_x,
            out,
            grad_y,
            grad_weights,
            plain_out,
            plain_grad_y,
        )

    return jax.jit(per_rank(everything, case.num_ranks, check_vma, mesh))


def send_by_reference(
    case: Case, x: np.ndarray, topk_idx: np.ndarray, **options: Any
) -> list[reference.Dispatched]:
    return reference.dispatch(list(x), list(topk_idx), **case.options, **options)


def run_reference(case: Case, inputs: Inputs, **options: Any) -> Outputs:
    """Computes `Outputs` by `jax_ep.reference`; `options` are those of its dispatch."""
    y, weights, grad_out = (list(a) for a in (inputs.y, inputs.topk_weights, inputs.grad_out))
    sent = send_by_reference(case, inputs.x, inputs.topk_idx, **options)
    routes = [d.routes for d in sent]
    grad_y, grad_weights = reference.combine_grad(grad_out, y, routes, weights)
    plain_grad_y, _ = reference.combine_grad(grad_out, y, routes)
    fields: list[Any] = [
        *([getattr(d, name) for d in sent] for name in reference.Dispatched._fields[:6]),
        reference.dispatch_grad(list(inputs.grad_tokens), routes),
        reference.combine(y, routes, weights),
        grad_y,
        grad_weights,
        reference.combine(y, routes),
        plain_grad_y,
    ]
    return Outputs(*(np.stack(field) for field in fields))


def exchanged(
    case: Case,
    implementation: Implementation | None,
    *,
    scale: float = 1,
    shift: float = 0,
    axis_name: Any = AXIS,
) -> Any:
    """Returns a function of one rank that combines scale * rows + shift, for the rows of x.

    It maps x [T, H], topk_idx and weights [T, K] (or none) to the received rows and the sums.
    """

    def run(x: Any, topk_idx: Any, weights: Any = None) -> tuple[Any, Any]:
        sent = case.dispatch(x, topk_idx, implementation, axis_name=axis_name)
        y = scale * sent.tokens + shift if (scale, shift) != (1, 0) else sent.tokens
        out = jax_ep.combine(y, sent.handle, weights, implementation=implementation)
        return sent.tokens, out

    return run


class Exchanged(NamedTuple):
    """What `exchanged` computes on all ranks, and the gradients of sum(grad * out)."""

    rows: tuple[list[np.ndarray], list[reference.Routes]]  # the rows that are combined, and routes
    out: np.ndarray
    grad_x: np.ndarray
    grad_weights: np.ndarray


def exchanged_by_reference(
    case: Case, x: Any, topk_idx: Any, weights: Any, grad: Any, scale: float = 1, shift: float = 0
) -> Exchanged:
    sent = send_by_reference(case, x, topk_idx)
    y, routes = [scale * d.tokens + shift for d in sent], [d.routes for d in sent]
    out = reference.combine(y, routes, list(weights))
    grad_y, grad_weights = reference.combine_grad(list(grad), y, routes, list(weights))
    grad_x = reference.dispatch_grad([scale * g for g in grad_y], routes)
    return Exchanged((y, routes), *map(np.stack, (out, grad_x, grad_weights)))


def some_inputs(case: Case, kind: str, rng: np.random.Generator) -> Inputs:
    """Draws the inputs of a case: x of random bits, and small integers for all other arrays.

    `kind` is one of `ROUTINGS`. The weights of choices of no expert are NaN, as 0 / 0 gives.
    """
    topk_idx = routing(kind, case, rng)
    by_token = (case.num_ranks, case.num_tokens, case.hidden)
    by_row = (case.num_ranks, case.num_rows, case.hidden)
    x = random_bits(rng, by_token, case.dtype)
    sent = send_by_reference(case, x, topk_idx)
    owned = owned_rows([d.routes for d in sent], case.num_rows)
    names_expert = (topk_idx >= 0) & (topk_idx < case.num_experts)
    weights = small_weights(rng, topk_idx.shape, "float32")
    return Inputs(
        x=x,
        topk_idx=topk_idx,
        grad_tokens=with_nan_elsewhere(small_integers(rng, by_row, case.dtype), owned),
        y=with_nan_elsewhere(small_integers(rng, by_row, case.dtype), owned),
        topk_weights=np.where(names_expert, weights, np.float32(np.nan)),
        grad_out=small_integers(rng, by_token, case.dtype),
    )


# ---------------------------------------------------------------------------------- comparisons


def assert_outputs(
    actual: Outputs,
    expected: Outputs,
    message: str = "",
    pick: Any = lambda actual, expected: (actual, expected),
) -> None:
    """Asserts that the results of dispatch have equal bits, and gradients and sums equal values."""
    sums = Outputs._fields.index("grad_x")
    for i, name in enumerate(Outputs._fields):
        check = assert_bitwise_equal if i < sums else assert_equal
        check(*pick(getattr(actual, name), getattr(expected, name)), f"{name}, {message}")


def check_ranks_here(
    case: Case,
    mesh: Mesh,
    routings: Sequence[str],
    implementation: Implementation | None = None,
    **limit: int,
) -> None:
    """Asserts, for each routing, that this process's ranks compute what the reference does."""
    rng = np.random.default_rng(0)
    options = {name: value for name, value in limit.items() if name != "num_hosts"}
    run = program(case, implementation, True, mesh, **options)
    share = functools.partial(shared, sharding=NamedSharding(mesh, P(mesh.axis_names)))
    for kind in routings:
        inputs = some_inputs(case, kind, rng)
        outputs = run(jax.tree.map(share, inputs))
        assert_outputs(outputs, run_reference(case, inputs, **limit), kind, of_ranks_here)


def shared(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def of_ranks_here(array: jax.Array, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the shards of `array` on this process's devices, and these slices of `expected`."""
    pairs = [(np.asarray(s.data), expected[s.index]) for s in array.addressable_shards]
    actual, expected = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return actual, expected


def bits(array: Any) -> np.ndarray:
    array = np.ascontiguousarray(array)
    return array.view(f"uint{8 * array.dtype.itemsize}")


def assert_bitwise_equal(actual: Any, expected: Any, message: str = "") -> None:
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"{message}: {actual.dtype} != {expected.dtype}"
    assert actual.shape == expected.shape, f"{message}: {actual.shape} != {expected.shape}"
    np.testing.assert_array_equal(bits(actual), bits(expected), err_msg=message)


def assert_equal(actual: Any, expected: Any, message: str = "") -> None:
    """Asserts that two arrays have equal dtypes and values; 0 and -0 are equal."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype, f"{message}: {actual.dtype} != {expected.dtype}"
    np.testing.assert_array_equal(
        actual.astype(np.float64), expected.astype(np.float64), err_msg=message
    )


def assert_sum_close(
    actual: Any, expected: Any, magnitude: Any, num_terms: int, message: str = ""
) -> None:
    """Asserts that `actual` is a float32 sum within its rounding error."""
    actual, expected, magnitude = (np.asarray(a) for a in (actual, expected, magnitude))
    assert actual.dtype == expected.dtype, f"{message}: {actual.dtype} != {expected.dtype}"
    eps = float(jnp.finfo(expected.dtype).eps)
    tolerance = (eps + num_terms * float(np.finfo(np.float32).eps)) * magnitude.astype(np.float64)
    difference = np.abs(actual.astype(np.float64) - expected.astype(np.float64))
    worst = np.max(difference - tolerance, initial=0.0)
    assert np.all(difference <= tolerance + float(jnp.finfo(expected.dtype).tiny)), (
        f"{message}: off by {worst} more than rounding explains"
    )


def after_the_wire(x: np.ndarray, implementation: str, wire: Format = FLOAT8_ROWS) -> np.ndarray:
    """Returns x [..., H] converted to float8 rows and back, as a dispatch delivers it."""
    if implementation == "pallas":
        return wire.decode(wire.encode(x), x.dtype)
    # Encode and decode in two programs: within one, XLA for GPUs removes both conversions.
    quantized = jax.jit(wire.encode)(x)
    return np.asarray(jax.jit(lambda *parts: wire.decode(parts, x.dtype))(*quantized))
