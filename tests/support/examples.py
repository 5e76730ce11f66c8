"""Imports the example programs as modules, and writes a tiny checkpoint for them to load."""

from __future__ import annotations

import functools
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from jax_ep.checkpoints.safetensors import Directory, create

FOLDER = Path(__file__).parents[2] / "examples"


# Import a program once per process: its absl flags cannot be defined twice.
@functools.cache
def example(name: str) -> Any:
    """Imports an example by its module name, with examples/ on the path, as the examples do."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module(name)


def write_qwen3_moe(folder: Path) -> None:
    """Writes a tiny Qwen3-MoE with random weights, in the files and names of a published one."""
    hidden, mlp, experts, heads, head_dim, vocabulary = 64, 48, 16, 4, 16, 256
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "moe_intermediate_size": mlp,
        "num_experts": experts,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (heads * head_dim // 2, hidden),
        "self_attn.v_proj": (heads * head_dim // 2, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate": (experts, hidden),
    }
    for e in range(experts):
        shapes[f"mlp.experts.{e}.gate_proj"] = shapes[f"mlp.experts.{e}.up_proj"] = (mlp, hidden)
        shapes[f"mlp.experts.{e}.down_proj"] = (hidden, mlp)
    names = {f"model.layers.{i}.{name}.weight": s for i in range(2) for name, s in shapes.items()}
    names |= {"model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,)}
    names |= {"lm_head.weight": (vocabulary, hidden)}
    float32 = np.dtype(np.float32)
    (folder / "config.json").write_text(json.dumps(config))
    create(folder / "model.safetensors", {name: (float32, s) for name, s in names.items()})
    files, rng = Directory(folder, writable=True), np.random.default_rng(0)
    for name, shape in names.items():
        values = (
            rng.normal(scale=shape[-1] ** -0.5, size=shape) if len(shape) > 1 else np.ones(shape)
        )
        files.write(name, (slice(None),) * len(shape), values.astype(float32))
