"""Defines the arguments of a call of the layer, and checks them before its computation begins."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_ep import checks
from jax_ep.formats import FLOAT8_MATRICES, QuantizedArray
from jax_ep.moe import expert_matmuls
from jax_ep.moe.config import MoEConfig, check_config
from jax_ep.moe.expert_matmuls import QuantizedExperts
from jax_ep.moe.mesh import AxisRules, LayerMesh, check_mesh_is_set, check_sharding_of_experts
from jax_ep.moe.params import LOGICAL_AXES, SHARED_WEIGHTS, MoEParams, check_params
from jax_ep.placement.table import Placement
from jax_ep.placement.weights import ADAPTERS, ROUTED_WEIGHTS


class Call(NamedTuple):
    """The arrays of one call, as in `moe_layer`; each is None or has x's leading dimensions."""

    x: jax.Array
    mask: jax.Array | None = None
    router_x: jax.Array | None = None
    topk_idx: jax.Array | None = None
    topk_weights: jax.Array | None = None
    sequence_ids: jax.Array | None = None  # int32; given if a sequence may be on several ranks


def check_call(params: MoEParams, call: Call, config: MoEConfig) -> None:
    """Raises TypeError or ValueError for what is wrong on any mesh, naming the argument."""
    check_types(params, config)
    check_config(config)
    check_params(params, config.num_choosable, config.constant_experts)
    expert_matmuls.check_same_kind(params, expert_matmuls.EXPERT_MATRICES)
    _check_tokens(call.x, call.mask, params.wi_0.shape[1], config)
    _check_router(params, call, config)
    if config.matmul_dtype is not None and any(
        getattr(params, name) is not None for name in ADAPTERS
    ):
        raise ValueError(
            "matmul_dtype must be None where experts have adapters, such as wi_0_lora_a, but is "
            f"{config.matmul_dtype!r}. The matrices may be stored quantized."
        )


def check_on_mesh(
    params: MoEParams,
    config: MoEConfig,
    placement: Placement | None,
    quantized: QuantizedExperts | None,
    where: LayerMesh,
    axis_rules: AxisRules,
    in_init: bool | None,
) -> None:
    """Checks the arguments that `check_call` is not given, and what must fit the mesh; raises."""
    # `axis_rules` and `in_init` are as in `run_layer`.
    check_placement(placement, config.num_experts, config.num_slots, where.num_ranks())
    check_experts(params, config, where)
    check_sharding_of_experts(params.wi_0, config, where, axis_rules, in_init)
    _check_shared_experts(params, config, where)
    _check_quantized(quantized, params, config.matmul_dtype)


def check_types(params: Any, config: Any) -> None:
    for name, value, kind in (("params", params, MoEParams), ("config", config, MoEConfig)):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {kind.__name__}, but is {checks.described(value)}.")


def _check_tokens(x: jax.Array, mask: jax.Array | None, hidden: int, config: MoEConfig) -> None:
    checks.check_array("x", x, None, jnp.floating, f"[..., H={hidden}]")
    if x.ndim < 1 or x.shape[-1] != hidden:
        raise ValueError(f"x must be [..., H={hidden}], but has shape {x.shape}.")
    if config.balance_convention == "deepseek_v3" and x.ndim < 2:
        raise ValueError(
            'x must be [..., sequence, H] for balance_convention="deepseek_v3", but has shape '
            f"{x.shape}."
        )
    if mask is not None:
        checks.check_array("mask", mask, None, checks.MASK, "[...], x's without its last axis")
        checks.check_shape("mask", mask, x.shape[:-1], f"one value per token of x {x.shape}")


def _check_router(params: MoEParams, call: Call, config: MoEConfig) -> None:
    x, k = call.x, config.num_experts_per_token
    for name, kind, last in (
        ("router_x", jnp.floating, "H'"),
        ("topk_idx", jnp.integer, f"K={k}"),
        ("topk_weights", jnp.floating, f"K={k}"),
    ):
        array = getattr(call, name)
        if array is None:
            continue
        checks.check_array(name, array, None, kind, f"[..., {last}]")
        if array.shape[:-1] != x.shape[:-1] or (name != "router_x" and array.shape[-1] != k):
            raise ValueError(
                f"{name} must be [..., {last}] for the tokens of x {x.shape}, but has shape "
                f"{array.shape}."
            )
    if call.topk_weights is not None and call.topk_idx is None:
        raise ValueError("topk_weights must be given together with topk_idx, but topk_idx is None.")
    if call.topk_weights is not None and call.router_x is not None:
        raise ValueError(
            "router_x must be None where topk_weights is given, since no router runs that could "
            f"read it, but it is an array of shape {call.router_x.shape}."
        )
    if config.router is not None:
        _check_own_router(params, call)
    if params.gate is None:
        _check_without_gate(params, call, config)
        return
    name, array = ("x", x) if call.router_x is None else ("router_x", call.router_x)
    if call.topk_weights is None and array.shape[-1] != params.gate.shape[0]:
        raise ValueError(
            f"{name} must be [..., H={params.gate.shape[0]}] for gate {params.gate.shape}, but has "
            f"shape {array.shape}."
        )


def _check_own_router(params: MoEParams, call: Call) -> None:
    if params.bias is not None:
        raise ValueError(
            "bias must be None (selection_bias=False) where MoEConfig.router is set: the layer "
            f"gives that router no selection bias, but it is an array of shape {params.bias.shape}."
        )
    if call.topk_idx is not None and call.topk_weights is None:
        raise ValueError(
            "topk_weights must be given together with topk_idx where MoEConfig.router is set, "
            "because that router gives weights only to its own choices, but topk_weights is None."
        )


def _check_without_gate(params: MoEParams, call: Call, config: MoEConfig) -> None:
    if call.topk_weights is None and config.router is None:
        raise ValueError(
            "gate must be an array [H, R], but is None: without it, each call must be given "
            "topk_idx and topk_weights, or MoEConfig.router must choose."
        )
    for name in ("gate_bias", "bias"):
        if getattr(params, name) is not None:
            raise ValueError(
                f"{name} must be None where gate is None: it is added to the logits of a gate."
            )


def check_placement(
    placement: Placement | None, num_experts: int, num_slots: int | None, num_ranks: int = 1
) -> None:
    if placement is None and num_slots is None:
        return
    if not isinstance(placement, Placement):
        raise TypeError(
            f"placement must say which expert each slot holds (num_slots={num_slots}), as a "
            f"jax_ep.placement.Placement of this layer, but is {checks.described(placement)}."
        )
    shapes = placement.expert_of_slot.shape, placement.num_copies.shape
    if shapes != ((num_slots,), (num_experts,)):
        raise ValueError(
            f"placement must be of this layer, with {num_slots} slots and {num_experts} experts, "
            f"but expert_of_slot has shape {shapes[0]} and num_copies {shapes[1]}. Pass "
            "placement[layer] if it is the placement of several layers."
        )
    if num_ranks not in (1, placement.num_ranks):  # A single rank has all slots.
        raise ValueError(
            f"placement must be for the {num_ranks} ranks along expert_axis, but is for "
            f"{placement.num_ranks}: make it with num_ranks={num_ranks}."
        )


def check_experts(params: MoEParams, config: MoEConfig, where: LayerMesh) -> None:
    check_mesh_is_set(params.wi_0, where)
    num_ranks = where.num_ranks()
    if config.num_held % num_ranks:
        name = "num_experts" if config.num_slots is None else "num_slots"
        raise ValueError(
            f"{name} must be a multiple of the {num_ranks} ranks along expert_axis "
            f"{where.expert_axes}, but is {config.num_held}."
        )
    allowed = {config.num_held}
    # In the caller's shard_map, wi_0, wi_1 and wo may hold only this rank's experts instead of all.
    if where.mesh is None:
        allowed.add(config.num_held // num_ranks)
    for name in ROUTED_WEIGHTS:
        if (array := getattr(params, name)) is not None and array.shape[0] not in allowed:
            raise ValueError(
                f"{name} must hold {' or '.join(map(str, sorted(allowed)))} experts along its "
                f"first axis (num_experts={config.num_experts}, or the slots of num_slots or "
                f"placement), but has shape {array.shape}."
            )
    if where.mesh is not None and where.tensor_axes:
        _check_columns(params, where)
    if not where.expert_axes and config.implementation == "pallas":
        raise ValueError(
            'implementation="pallas" exchanges rows between the ranks of expert_axis '
            f"{config.expert_axis!r}, and there is no mesh with that axis here; set one with "
            "jax.set_mesh, or leave implementation at None."
        )


def _check_columns(params: MoEParams, where: LayerMesh) -> None:
    """Raises ValueError unless the tensor ranks divide F and S, and split no quantized block."""
    num_ranks = where.num_tensor_ranks()
    widths = {"wi_0": params.wi_0.shape[2]}
    if params.shared_wo is not None:
        widths["shared_wo"] = params.shared_wo.shape[0]
    for name, width in widths.items():
        if width % num_ranks:
            raise ValueError(
                f"{name} must have a width that is a multiple of the {num_ranks} ranks along "
                f"tensor_axis {where.tensor_axes}, but it is {width}, of shape "
                f"{getattr(params, name).shape}."
            )
    for name, array in params._asdict().items():
        if isinstance(array, QuantizedArray):
            sizes = zip(array.shape, LOGICAL_AXES[name], strict=True)
            shape = tuple(size // num_ranks if axis == "mlp" else size for size, axis in sizes)
            array.format.check_shape(f"{name} on one of {num_ranks} ranks of tensor_axis", shape)


def _check_shared_experts(params: MoEParams, config: MoEConfig, where: LayerMesh) -> None:
    if params.shared_wo is None:
        return
    expert_matmuls.check_same_kind(params, SHARED_WEIGHTS)
    if config.matmul_dtype is not None:
        hidden, width = params.shared_wi_0.shape  # type: ignore
        on_a_rank = " on a rank" if where.num_parts() > 1 else ""
        shape = hidden, width // where.num_parts()
        FLOAT8_MATRICES.check_shape(f"with matmul_dtype, shared_wi_0{on_a_rank}", shape)


def _check_quantized(quantized: Any, experts: Any, matmul_dtype: Any) -> None:
    if quantized is None:
        return
    if not isinstance(quantized, QuantizedExperts):
        raise TypeError(
            "quantized_experts must be None or what jax_ep.quantize_experts returns, but is "
            f"{checks.described(quantized)}."
        )
    if matmul_dtype is None:
        raise ValueError("quantized_experts must be None where matmul_dtype is None.")
    expert_matmuls.check_are_arrays("quantized_experts must be None", experts)
    for name, of_name in quantized._asdict().items():
        matrices = getattr(experts, name)
        shape = None if matrices is None else matrices.shape
        found = None if of_name is None else of_name.matrices.shape
        if found != shape:
            raise ValueError(
                f"quantized_experts.{name} must have the shape of {name}, {shape}, but has {found}."
            )
