"""Loads published models from safetensors files, and writes them: MoE blocks, and whole models.

An MoE block is a decoder layer's router, routed experts and shared experts.
"""

from jax_ep.checkpoints.api import load_moe, load_moe_params, load_others, save_moe
from jax_ep.checkpoints.architectures import Architecture, architectures
from jax_ep.checkpoints.model import PublishedModel, load_model, save_model

__all__ = [
    "Architecture",
    "PublishedModel",
    "architectures",
    "load_model",
    "load_moe",
    "load_moe_params",
    "load_others",
    "save_model",
    "save_moe",
]
