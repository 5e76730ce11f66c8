"""Loads the MoE block of one layer from a published model's safetensors files, and saves it back.

An MoE block is a decoder layer's router, routed experts and shared experts.
"""

from jax_ep.checkpoints.api import load_moe, load_moe_params, save_moe
from jax_ep.checkpoints.architectures import Architecture, architectures

__all__ = ["Architecture", "architectures", "load_moe", "load_moe_params", "save_moe"]
