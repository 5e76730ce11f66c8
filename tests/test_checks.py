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
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_mlp import expert_mlp
from jax_ep.moe.params import MoEParams
from jax_ep.moe.routed_experts import routed_experts

X, IDX, WEIGHTS = (
    np.zeros((4, 8), np.float32),
    np.zeros((4, 2), np.int32),
    np.ones((4, 2), np.float32),
)
LOGITS, SIZES = np.zeros((4, 4), np.float32), np.zeros(4, np.int32)
WI, WO = np.zeros((4, 8, 16), np.float32), np.zeros((4, 16, 8), np.float32)
GATE, SHARED_WI, SHARED_WO = (
    np.zeros((8, 4), np.float32),
    np.zeros((8, 16), np.float32),
    np.zeros((16, 8), np.float32),
)
CONFIG = MoEConfig(num_experts=4, num_experts_per_token=2)


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
    return moe.moe_layer(MoEParams(GATE, WI, WI, WO)._replace(**changes), x, CONFIG, mask)


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
SHARED: dict = dict(shared_wi_0=SHARED_WI, shared_wi_1=SHARED_WO, shared_wo=SHARED_WO)
# Calls on two ranks, and what their TypeError or ValueError says.
TYPES_ON_RANKS = {
    "x": (lambda: dispatch(x=[[1.0]]), "x must be a floating array [T, H], but is the"),
    "topk_idx": (lambda: dispatch(topk_idx=None), "topk_idx must be .*, but is None"),
    "handle": (lambda: combine(handle=lambda sent: sent), "handle .* Dispatched; pass received.ha"),
    "handle of the rank-major layout": (
        lambda: combine(handle=lambda sent: dispatch(layout="rank")),
        "handle must be .* a RankDispatched; pass received.handle",
    ),
    "no handle": (lambda: combine(), "handle must be .*, but is None"),
    "handle of dispatch_like": (
        lambda: jax_ep.dispatch_like(X, dispatch()),
        "pass received.handle",
    ),
    "y": (lambda: combine([1.0], lambda s: s.handle), "y must be .* the list [1.0]"),
    "grouped": (lambda: regroup(grouped=NONE), "grouped must be .*, but is None"),
    "grouped, its handle": (
        lambda: regroup(grouped=lambda grouped: grouped.handle),
        "grouped must be .*, but is of type Handle",
    ),
    "received": (lambda: regroup(received=NONE), "received must be .*, but is None"),
    "y to be summed": (lambda: regroup(y=[2]), "y must be .*, but is the list [2]"),
    "received of group_by_expert": (
        lambda: jax_ep.group_by_expert(dispatch(layout="rank").handle),
        "received must be .*, but is of type RankHandle",
    ),
    "received of routed_experts": (
        lambda: routed_experts(None, WI, WI, WO, WEIGHTS),
        "received must be .*, but is None",
    ),
}
VALUES_ON_RANKS = {
    "capacity": (lambda: dispatch(capacity=2**31), "capacity must be at most 21474836"),
    "expert_alignment": (
        lambda: dispatch(expert_alignment=2**30),
        "expert_alignment must be at most 715827878, so that the 2 experts",
    ),
    "load_balance_loss": (
        lambda: losses.load_balance_loss(LOGITS, IDX, axis_name="data"),
        "axis_name ('data',) is not bound here",
    ),
    "router_z_loss": (
        lambda: losses.router_z_loss(LOGITS, axis_name="data"),
        "axis_name ('data',) is not bound here",
    ),
}
# Calls outside of a shard_map.
TYPES = {
    "tokens": (lambda: mlp(tokens=None), "tokens must be .*, but is None"),
    "group_sizes": (lambda: mlp(group_sizes=[1]), "group_sizes must be an integer array [L], but"),
    "x of a layer": (lambda: layer(x=None), "x must be .*H=8], but is None"),
    "mask of a layer": (lambda: layer(mask=[True]), "mask must be a bool or integer"),
    "logits": (lambda: routing.top_k_routing([1.0], 1), "logits must be .* the list"),
    "probs": (lambda: losses.load_balance_loss(None, IDX), "probs must be"),
    "expert_counts": (
        lambda: routing.update_expert_bias(jnp.zeros(4), [1, 2, 3, 4], 0.1),
        "expert_counts must be .* the list",
    ),
    "lhs": (lambda: jax_ep.grouped_matmul([1], WI, SIZES), "lhs must be .* the list"),
}
VALUES = {
    "shared_wo alone": (
        lambda: layer(shared_wo=SHARED_WO),
        "shared_wo must be given together or be None, but only shared_wo is given",
    ),
    "shared_wi_1 of a layer": (
        lambda: layer(**SHARED),
        "shared_wi_1 must have shape (8, 16) .*, but has shape (16, 8)",
    ),
    "axis_name of the loss": (
        lambda: losses.load_balance_loss(LOGITS, IDX, axis_name="expert"),
        "axis_name ('expert',) is not bound here",
    ),
}


def pattern(message: str) -> str:
    return ".*".join(re.escape(part) for part in message.split(".*"))


@pytest.mark.parametrize("case", TYPES_ON_RANKS | VALUES_ON_RANKS | TYPES | VALUES)
def test_bad_input(case):
    call, message = (TYPES_ON_RANKS | VALUES_ON_RANKS | TYPES | VALUES)[case]
    error = TypeError if case in TYPES_ON_RANKS | TYPES else ValueError
    with pytest.raises(error, match=pattern(message)):
        on_ranks(call) if case in TYPES_ON_RANKS | VALUES_ON_RANKS else call()


@pytest.mark.parametrize(
    ("axis_name", "error", "message"),
    [
        (("expert", "expert"), ValueError, "each mesh axis once, but is ('expert', 'expert')"),
        (None, TypeError, "axis_name must be the name of a mesh axis .*, but is None"),
        (0, TypeError, "axis_name must be the name of a mesh axis .*, but is 0"),
        (("expert", 1), TypeError, "axis_name must be .*, but is ('expert', 1)"),
    ],
)
@pytest.mark.parametrize("name", ["dispatch", "all_reduce", "all_to_all", "all_reduce_rms_norm"])
def test_axes_that_are_none(name, axis_name, error, message):
    with pytest.raises(error, match=pattern(message)):
        if name == "dispatch":
            on_ranks(lambda: dispatch(axis_name=axis_name))
        operands = (X, X, X[0]) if name == "all_reduce_rms_norm" else (X,)
        on_ranks(lambda: getattr(jax_ep, name)(*operands, axis_name))


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
