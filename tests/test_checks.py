"""Tests of the errors for wrong arguments: every function must name the argument and its value."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.meshes import cuda_mesh

import jax_ep
from jax_ep import checks
from jax_ep.moe import layer as moe
from jax_ep.moe import losses, routing
from jax_ep.moe.expert_mlp import expert_mlp
from jax_ep.moe.routed_experts import routed_experts

X, IDX, WEIGHTS = jnp.zeros((4, 8)), jnp.zeros((4, 2), jnp.int32), jnp.ones((4, 2))
LOGITS, SIZES = jnp.zeros((4, 4)), jnp.zeros(4, jnp.int32)
WI, WO = jnp.zeros((4, 8, 16)), jnp.zeros((4, 16, 8))
GATE, SHARED_WI, SHARED_WO = jnp.zeros((8, 4)), jnp.zeros((8, 16)), jnp.zeros((16, 8))
CONFIG = moe.MoEConfig(num_experts=4, num_experts_per_token=2)


def on_ranks(function: Any) -> None:
    """Traces `function` in a shard_map over two ranks, so that it can use the axis "expert"."""
    mesh = cuda_mesh((2,), ("expert",))

    def run(x: jax.Array) -> jax.Array:
        function()
        return x

    jax.eval_shape(jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P()), X)


def dispatch(x: Any = X, topk_idx: Any = IDX, axis_name: Any = "expert", **options: Any) -> Any:
    return jax_ep.dispatch(x, topk_idx, num_experts=4, axis_name=axis_name, **options)


def layer(x: Any = X, mask: Any = None, **changes: Any) -> Any:
    return moe.moe_layer(moe.MoEParams(GATE, WI, WI, WO)._replace(**changes), x, CONFIG, mask)


def mlp(**changes: Any) -> Any:
    given = dict(tokens=X, wi_0=WI, wi_1=WI, wo=WO, group_sizes=SIZES)
    return expert_mlp(**(given | changes))


def combine(y: Any = None, handle: Any = None) -> Any:
    sent = dispatch()
    return jax_ep.combine(sent.tokens if y is None else y, handle and handle(sent), WEIGHTS)


def regroup(received: Any = None, grouped: Any = None, y: Any = None) -> Any:
    sent = dispatch(layout="rank")
    whole = jax_ep.group_by_expert(sent)
    return jax_ep.sum_by_token(
        whole.tokens if y is None else y,
        whole if grouped is None else grouped(whole),
        sent if received is None else received(sent),
    )


NONE = lambda _: None  # noqa: E731
EXCHANGE = {
    "x": (lambda: dispatch(x=[[1.0]]), TypeError, "x must be a floating array [T, H], but is the"),
    "topk_idx": (lambda: dispatch(topk_idx=None), TypeError, "topk_idx must be .*, but is None"),
    "handle": (
        lambda: combine(handle=lambda sent: sent),
        TypeError,
        "handle must be .* a Dispatched; pass received.handle",
    ),
    "handle of the rank-major layout": (
        lambda: combine(handle=lambda sent: dispatch(layout="rank")),
        TypeError,
        "handle must be .* a RankDispatched; pass received.handle",
    ),
    "no handle": (lambda: combine(), TypeError, "handle must be .*, but is None"),
    "handle of dispatch_like": (
        lambda: jax_ep.dispatch_like(X, dispatch()),
        TypeError,
        "pass received.handle",
    ),
    "y": (lambda: combine([1.0], lambda s: s.handle), TypeError, "y must be .* the list [1.0]"),
    "grouped": (lambda: regroup(grouped=NONE), TypeError, "grouped must be .*, but is None"),
    "grouped, its handle": (
        lambda: regroup(grouped=lambda grouped: grouped.handle),
        TypeError,
        "grouped must be .*, but is of type Handle",
    ),
    "received": (lambda: regroup(received=NONE), TypeError, "received must be .*, but is None"),
    "y to be summed": (lambda: regroup(y=[2]), TypeError, "y must be .*, but is the list [2]"),
    "received of group_by_expert": (
        lambda: jax_ep.group_by_expert(dispatch(layout="rank").handle),
        TypeError,
        "received must be .*, but is of type RankHandle",
    ),
    "received of routed_experts": (
        lambda: routed_experts(None, WI, WI, WO, WEIGHTS),
        TypeError,
        "received must be .*, but is None",
    ),
    "capacity": (
        lambda: dispatch(capacity=2**31),
        ValueError,
        "capacity must be at most 2147483647, but is 2147483648",
    ),
    "expert_alignment": (
        lambda: dispatch(expert_alignment=2**30),
        ValueError,
        "expert_alignment must be at most 715827878, so that the 2 experts",
    ),
    "load_balance_loss": (
        lambda: losses.load_balance_loss(LOGITS, IDX, axis_name="data"),
        ValueError,
        "axis_name ('data',) is not bound here",
    ),
    "router_z_loss": (
        lambda: losses.router_z_loss(LOGITS, axis_name="data"),
        ValueError,
        "axis_name ('data',) is not bound here",
    ),
}
ALONE = {
    "tokens": (lambda: mlp(tokens=None), TypeError, "tokens must be .*, but is None"),
    "wi_0": (lambda: mlp(wi_0=[WI]), TypeError, "wi_0 must be .*, but is the list"),
    "wi_1": (lambda: mlp(wi_1=[1.0]), TypeError, "wi_1 must be .*, but is the list [1.0]"),
    "wo": (lambda: mlp(wo="wo"), TypeError, "wo must be .*, but is 'wo'"),
    "group_sizes": (
        lambda: mlp(group_sizes=[1, 2, 3, 4]),
        TypeError,
        "group_sizes must be an integer array [L], but is the list [1, 2, 3, 4]",
    ),
    "x of a layer": (lambda: layer(x=None), TypeError, "x must be .*H=8], but is None"),
    "wi_0 of a layer": (lambda: layer(wi_0=None), TypeError, "wi_0 must be .*, but is None"),
    "gate of a layer": (lambda: layer(gate=[1]), TypeError, "gate must be .*, but is the list"),
    "mask of a layer": (
        lambda: layer(mask=[True]),
        TypeError,
        "mask must be a bool or integer array",
    ),
    "shared_wo alone": (
        lambda: layer(shared_wo=SHARED_WO),
        ValueError,
        "shared_wo must be given together or be None, but only shared_wo is given",
    ),
    "shared_wi_1 of a layer": (
        lambda: layer(shared_wi_0=SHARED_WI, shared_wi_1=SHARED_WO, shared_wo=SHARED_WO),
        ValueError,
        "shared_wi_1 must have shape (8, 16) .*, but has shape (16, 8)",
    ),
    "logits": (lambda: routing.top_k_routing([1.0], 1), TypeError, "logits must be .* the list"),
    "bias": (
        lambda: routing.top_k_routing(LOGITS, 1, bias=[0.0] * 4),
        TypeError,
        "bias must be .* the list",
    ),
    "k": (
        lambda: routing.top_k_routing(LOGITS, 2.0),
        TypeError,
        "k must be a static integer, but is 2.0",
    ),
    "num_groups": (
        lambda: routing.top_k_routing(LOGITS, 1, num_groups=None),
        TypeError,
        "num_groups must be a static integer, but is None",
    ),
    "logits of the z loss": (lambda: losses.router_z_loss(None), TypeError, "logits must be"),
    "mask of the z loss": (
        lambda: losses.router_z_loss(LOGITS, mask=[True]),
        TypeError,
        "mask must be a bool or integer array",
    ),
    "probs": (lambda: losses.load_balance_loss(None, IDX), TypeError, "probs must be"),
    "topk_idx of the loss": (
        lambda: losses.load_balance_loss(LOGITS, [[0]]),
        TypeError,
        "topk_idx must be .* the list [[0]]",
    ),
    "axis_name of the loss": (
        lambda: losses.load_balance_loss(LOGITS, IDX, axis_name="expert"),
        ValueError,
        "axis_name ('expert',) is not bound here",
    ),
    "bias to update": (
        lambda: routing.update_expert_bias([0.0], SIZES, 0.1),
        TypeError,
        "bias must be .* the list",
    ),
    "expert_counts": (
        lambda: routing.update_expert_bias(jnp.zeros(4), [1, 2, 3, 4], 0.1),
        TypeError,
        "expert_counts must be .* the list",
    ),
    "x of the router": (lambda: routing.router_logits(None, GATE), TypeError, "x must be"),
    "lhs": (lambda: jax_ep.grouped_matmul([1], WI, SIZES), TypeError, "lhs must be .* the list"),
}


def pattern(message: str) -> str:
    return ".*".join(re.escape(part) for part in message.split(".*"))


@pytest.mark.parametrize("case", EXCHANGE)
def test_bad_input_of_an_exchange(case):
    call, error, message = EXCHANGE[case]
    with pytest.raises(error, match=pattern(message)):
        on_ranks(call)


@pytest.mark.parametrize("case", ALONE)
def test_bad_input(case):
    call, error, message = ALONE[case]
    with pytest.raises(error, match=pattern(message)):
        call()


@pytest.mark.parametrize(
    ("axis_name", "error", "message"),
    [
        (("expert", "expert"), ValueError, "each mesh axis once, but is ('expert', 'expert')"),
        (None, TypeError, "axis_name must be the name of a mesh axis .*, but is None"),
        (0, TypeError, "axis_name must be the name of a mesh axis .*, but is 0"),
        (("expert", 1), TypeError, "axis_name must be .*, but is ('expert', 1)"),
    ],
)
@pytest.mark.parametrize(
    "call",
    [
        lambda axis_name: dispatch(axis_name=axis_name),
        lambda axis_name: jax_ep.all_reduce(X, axis_name),
        lambda axis_name: jax_ep.all_to_all(X, axis_name),
        lambda axis_name: jax_ep.all_reduce_rms_norm(X, X, X[0], axis_name),
    ],
    ids=["dispatch", "all_reduce", "all_to_all", "all_reduce_rms_norm"],
)
def test_axes_that_are_none(call, axis_name, error, message):
    with pytest.raises(error, match=pattern(message)):
        on_ranks(lambda: call(axis_name))


def test_axes_of_a_layer_are_named_as_its_attributes():
    with pytest.raises(TypeError, match="expert_axis must be the name of a mesh axis"):
        config = moe.MoEConfig(num_experts=4, num_experts_per_token=2, expert_axis=None)  # type: ignore[arg-type]
        moe.moe_layer(moe.MoEParams(GATE, WI, WI, WO), X, config)


def test_axes_that_are_right():
    assert checks.as_axes("a") == ("a",) and checks.as_axes(["a", "b"]) == ("a", "b")
    assert checks.as_axes(()) == ()


def test_a_dtype_that_arrays_do_not_have_is_named():
    """A dtype that JAX would silently replace by float32 must be refused, and named."""
    for dtype in (jnp.float64, "float64", np.longdouble):
        with pytest.raises(
            TypeError, match="param_dtype must be .* float64 needs .*jax_enable_x64"
        ):
            checks.as_dtype_of_arrays("param_dtype", dtype)
    with jax.enable_x64(True):
        assert checks.as_dtype_of_arrays("dtype", jnp.float64) == np.float64
    assert checks.as_dtype_of_arrays("dtype", jnp.bfloat16) == jnp.bfloat16
