"""Loads one layer's MoE block of a published model from safetensors files, and saves it back."""

from jax_ep.checkpoints.api import load_moe, load_moe_params, save_moe
from jax_ep.checkpoints.architectures import Architecture, architectures

__all__ = ["Architecture", "architectures", "load_moe", "load_moe_params", "save_moe"]
