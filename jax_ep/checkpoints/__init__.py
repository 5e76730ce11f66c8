"""Loads published models from safetensors files, and writes them: MoE blocks, and whole models.

An MoE block is a decoder layer's router, routed experts and shared experts.
"""

from jax_ep.checkpoints.api import load_moe as load_moe
from jax_ep.checkpoints.api import load_moe_params as load_moe_params
from jax_ep.checkpoints.api import load_others as load_others
from jax_ep.checkpoints.api import save_moe as save_moe
from jax_ep.checkpoints.architectures import Architecture as Architecture
from jax_ep.checkpoints.architectures import architectures as architectures
from jax_ep.checkpoints.model import PublishedModel as PublishedModel
from jax_ep.checkpoints.model import load_model as load_model
from jax_ep.checkpoints.model import save_model as save_model
