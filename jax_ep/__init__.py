"""jax_ep: expert parallelism for Mixture-of-Experts in JAX, with dispatch, combine and MoE layers.

`jax_ep.linen` and `jax_ep.nnx` have the Flax layers, `jax_ep.checkpoints` loads published models,
`jax_ep.placement` places experts on ranks, and `jax_ep.reference` defines in plain NumPy what the
functions must compute. These modules are imported when they are first used.
"""

import importlib as _importlib
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from jax_ep.collectives.api import all_gather as all_gather
from jax_ep.collectives.api import all_reduce as all_reduce
from jax_ep.collectives.api import all_reduce_rms_norm as all_reduce_rms_norm
from jax_ep.collectives.api import all_to_all as all_to_all
from jax_ep.collectives.api import reduce_scatter as reduce_scatter
from jax_ep.exchange.api import combine as combine
from jax_ep.exchange.api import dispatch as dispatch
from jax_ep.exchange.api import dispatch_like as dispatch_like
from jax_ep.exchange.interface import Dispatched as Dispatched
from jax_ep.exchange.interface import Handle as Handle
from jax_ep.exchange.interface import RankDispatched as RankDispatched
from jax_ep.exchange.interface import RankHandle as RankHandle
from jax_ep.exchange.memory import workspace_bytes as workspace_bytes
from jax_ep.exchange.permute import group_by_expert as group_by_expert
from jax_ep.exchange.permute import sum_by_token as sum_by_token
from jax_ep.formats import Format as Format
from jax_ep.formats import QuantizedArray as QuantizedArray
from jax_ep.formats import quantize as quantize
from jax_ep.matmul.api import grouped_matmul as grouped_matmul
from jax_ep.moe.config import MoEConfig as MoEConfig
from jax_ep.moe.expert_mlp import expert_mlp as expert_mlp
from jax_ep.moe.held_experts import quantize_experts as quantize_experts
from jax_ep.moe.layer import moe_layer as moe_layer
from jax_ep.moe.lora import init_lora as init_lora
from jax_ep.moe.lora import merge_lora as merge_lora
from jax_ep.moe.losses import BalanceSums as BalanceSums
from jax_ep.moe.losses import balance_sums as balance_sums
from jax_ep.moe.losses import load_balance_loss as load_balance_loss
from jax_ep.moe.losses import pooled_load_balance_loss as pooled_load_balance_loss
from jax_ep.moe.losses import router_z_loss as router_z_loss
from jax_ep.moe.metrics import MoEMetrics as MoEMetrics
from jax_ep.moe.params import MoEParams as MoEParams
from jax_ep.moe.routed_experts import routed_experts as routed_experts
from jax_ep.moe.routing import Routing as Routing
from jax_ep.moe.routing import top_k_routing as top_k_routing
from jax_ep.moe.routing import update_expert_bias as update_expert_bias
from jax_ep.version import __version__ as __version__

if _TYPE_CHECKING:
    from jax_ep import checkpoints as checkpoints
    from jax_ep import formats as formats
    from jax_ep import linen as linen
    from jax_ep import nnx as nnx
    from jax_ep import placement as placement
    from jax_ep import reference as reference


def __getattr__(name: str) -> _Any:
    if name in ("checkpoints", "linen", "nnx", "placement", "reference"):
        return _importlib.import_module(f"jax_ep.{name}")
    raise AttributeError(f"module 'jax_ep' has no attribute {name!r}")
