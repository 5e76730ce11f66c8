"""Read a Qwen3-MoE as published: a directory with config.json and safetensors files.

`jax_ep.checkpoints` loads the MoE block of each layer; what is here reads the sizes and all other
weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import processes
from jax.sharding import Mesh

from jax_ep.bench.decoder import TENSOR_AXIS, DecoderConfig
from jax_ep.checkpoints import load_moe_params
from jax_ep.checkpoints.safetensors import Directory, create


def read_config(folder: Path) -> DecoderConfig:
    """Returns the sizes of the model; raises SystemExit if it is none that the examples compute."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from error
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type", "default")
    if config["model_type"] != "qwen3_moe" or kind != "default" or config.get("mlp_only_layers"):
        raise SystemExit(f"{folder} must be a Qwen3-MoE with experts in every layer, and no YaRN.")
    heads = config["num_attention_heads"]
    return DecoderConfig(
        vocab=config["vocab_size"],
        hidden=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        mlp_dim=config["moe_intermediate_size"],
        num_experts=config["num_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        normalize=config["norm_topk_prob"],
        epsilon=config["rms_norm_eps"],
        rotary_base=rotary.get("rope_theta") or config["rope_theta"],
        tied=config.get("tie_word_embeddings", False),
    )


def read_weight(files: Directory, name: str) -> np.ndarray:
    """Returns a whole weight by its published name, such as "model.norm.weight"."""
    return files.read(name, (slice(None),) * len(files.entry(name).shape))


def load_params(folder: Path, like: Any, mesh: Mesh) -> Any:
    """Loads the parameters of `jax_ep.bench.decoder.Decoder`, whose modules have published names.

    `like` has the parameters' shapes, dtypes and shardings on the mesh. A published matrix is
    transposed, with heads flattened.
    """
    files = Directory(folder)
    tensor_axis = TENSOR_AXIS if TENSOR_AXIS in mesh.axis_names else None
    experts: dict[str, Any] = {}

    def load(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        layer, *inner = (key.key for key in path)
        if inner and inner[0] == "mlp":
            if layer not in experts:
                number = int(layer.removeprefix("layers_"))
                _, experts[layer] = load_moe_params(
                    folder, number, mesh=mesh, dtype=leaf.dtype, tensor_axis=tensor_axis
                )
            return jax.device_put(getattr(experts[layer], inner[1]), leaf.sharding)
        module = ".".join([layer.replace("_", ".", layer.startswith("layers_")), *inner[:-1]])
        value = read_weight(files, f"{module if layer == 'lm_head' else f'model.{module}'}.weight")
        if "kernel" in inner or layer == "lm_head":
            value = value.T.reshape(leaf.shape)
        return processes.distribute(value.astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(load, like)


def write_random_model(folder: Path) -> None:
    """Writes a tiny model as a published one is."""
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
