"""jax_ep: expert parallelism for Mixture-of-Experts in JAX, with dispatch, combine and MoE layers.

`jax_ep.linen` and `jax_ep.nnx` have the Flax layers, `jax_ep.checkpoints` loads published models,
`jax_ep.placement` places experts on ranks, and `jax_ep.reference` defines in plain NumPy what the
functions must compute. These modules are imported when they are first used.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from jax_ep.collectives.api import (
    all_gather,
    all_reduce,
    all_reduce_rms_norm,
    all_to_all,
    reduce_scatter,
)
from jax_ep.exchange.api import combine, dispatch, dispatch_like
from jax_ep.exchange.interface import Dispatched, Handle, RankDispatched, RankHandle
from jax_ep.exchange.memory import workspace_bytes
from jax_ep.exchange.permute import group_by_expert, sum_by_token
from jax_ep.formats import Format, QuantizedArray, quantize
from jax_ep.matmul.api import grouped_matmul
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.expert_mlp import expert_mlp
from jax_ep.moe.held_experts import quantize_experts
from jax_ep.moe.layer import moe_layer
from jax_ep.moe.lora import init_lora, merge_lora
from jax_ep.moe.losses import (
    BalanceSums,
    balance_sums,
    load_balance_loss,
    pooled_load_balance_loss,
    router_z_loss,
)
from jax_ep.moe.metrics import MoEMetrics
from jax_ep.moe.params import MoEParams
from jax_ep.moe.routed_experts import routed_experts
from jax_ep.moe.routing import (
    Routing,
    top_k_routing,
    update_expert_bias,
)
from jax_ep.version import __version__ as __version__

if _TYPE_CHECKING:
    from jax_ep import checkpoints, formats, linen, nnx, placement, reference


__all__ = [
    "BalanceSums",
    "Dispatched",
    "Format",
    "Handle",
    "MoEConfig",
    "MoEMetrics",
    "MoEParams",
    "QuantizedArray",
    "RankDispatched",
    "RankHandle",
    "Routing",
    "all_gather",
    "all_reduce",
    "all_reduce_rms_norm",
    "all_to_all",
    "balance_sums",
    "checkpoints",
    "combine",
    "dispatch",
    "dispatch_like",
    "expert_mlp",
    "formats",
    "group_by_expert",
    "grouped_matmul",
    "linen",
    "load_balance_loss",
    "init_lora",
    "merge_lora",
    "moe_layer",
    "nnx",
    "placement",
    "pooled_load_balance_loss",
    "quantize",
    "quantize_experts",
    "reduce_scatter",
    "reference",
    "routed_experts",
    "router_z_loss",
    "sum_by_token",
    "top_k_routing",
    "update_expert_bias",
    "workspace_bytes",
]


def __getattr__(name: str) -> _Any:
    if name in ("checkpoints", "linen", "nnx", "placement", "reference"):
        return _importlib.import_module(f"jax_ep.{name}")
    raise AttributeError(f"module 'jax_ep' has no attribute {name!r}")
