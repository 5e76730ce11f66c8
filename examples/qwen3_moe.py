"""Read a published Qwen3-MoE checkpoint: a directory with config.json and safetensors files.

`jax_ep.checkpoints` loads the MoE block of each layer. This file reads the model's sizes and all
other weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import processes
from jax.sharding import Mesh

from jax_ep.bench.decoder import TENSOR_AXIS, DecoderConfig, fsdp_axes
from jax_ep.checkpoints import load_moe_params
from jax_ep.checkpoints.safetensors import Directory


def read_config(folder: Path) -> DecoderConfig:
    """Returns the model's sizes; raises SystemExit if the examples do not support the model."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from error
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type", "default")
    if config["model_type"] != "qwen3_moe" or kind != "default" or config.get("mlp_only_layers"):
        raise SystemExit(
            f"{path} must be that of a Qwen3-MoE with experts in every layer and rope_type "
            f"default, but has model_type {config['model_type']!r}, mlp_only_layers "
            f"{config.get('mlp_only_layers')} and rope_type {kind!r}."
        )
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
    """Reads a whole weight by its published name, such as "model.norm.weight"."""
    return files.read(name, (slice(None),) * len(files.entry(name).shape))


def load_params(folder: Path, like: Any, mesh: Mesh) -> Any:
    """Loads a checkpoint as the parameters of `jax_ep.bench.decoder.Decoder`.

    The decoder's modules have the names of the published weights. Published matrices are
    transposed. Those of attention are also reshaped, to separate axes for heads and head size.

    Args:
        folder: the checkpoint directory.
        like: a tree of the parameters' shapes, dtypes and shardings on the mesh.
        mesh: the mesh, whose tensor axis, if there is one, splits the experts' columns, and whose
            fsdp axis splits every matrix (`jax_ep.bench.decoder.fsdp_axes`).
    """
    files = Directory(folder)
    fields: dict[str, Any] = {
        "tensor_axis": TENSOR_AXIS if TENSOR_AXIS in mesh.axis_names else None,
        "fsdp_axes": fsdp_axes(read_config(folder).num_experts, mesh),
    }
    # The MoE parameters of the layer that was loaded last.
    experts: dict[str, Any] = {}

    def load(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        layer, *inner = (key.key for key in path)
        if inner and inner[0] == "mlp":
            if layer not in experts:
                experts.clear()
                number = int(layer.removeprefix("layers_"))
                _, experts[layer] = load_moe_params(
                    folder, number, mesh=mesh, dtype=leaf.dtype, **fields
                )
            return jax.device_put(getattr(experts[layer], inner[1]), leaf.sharding)
        module = ".".join([layer.replace("_", ".", layer.startswith("layers_")), *inner[:-1]])
        value = read_weight(files, f"{module if layer == 'lm_head' else f'model.{module}'}.weight")
        if "kernel" in inner or layer == "lm_head":
            value = value.T.reshape(leaf.shape)
        return processes.distribute(value.astype(leaf.dtype), leaf.sharding)

    return jax.tree_util.tree_map_with_path(load, like)
