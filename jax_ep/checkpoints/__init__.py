"""Published models: one layer's MoE block out of a directory of safetensors files, and back."""

from jax_ep.checkpoints.api import load_moe, load_moe_params, save_moe
from jax_ep.checkpoints.architectures import Architecture, architectures

__all__ = ["Architecture", "architectures", "load_moe", "load_moe_params", "save_moe"]
