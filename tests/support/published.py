"""Writes model directories like published ones, with small random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep.checkpoints.architectures import architectures
from jax_ep.checkpoints.safetensors import Directory

NAMES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(jnp.bfloat16): "BF16",
    np.dtype(jnp.float8_e4m3fn): "F8_E4M3",
    np.dtype(jnp.float8_e8m0fnu): "F8_E8M0",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int8): "I8",
}
E, H, F, K = 8, 16, 12, 3

Tensors = dict[str, np.ndarray]


def safetensors_bytes(tensors: Tensors) -> bytes:
    header, data = {}, b""
    for name, array in tensors.items():
        offsets = [len(data), len(data) + array.nbytes]
        dtype = NAMES[array.dtype]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def publish(folder: Path, config: dict[str, Any], *files: Tensors) -> Path:
    """Writes config.json and the safetensors files, and an index if there are several files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not files:
        return folder
    if len(files) == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(files[0]))
        return folder
    weight_map = {}
    for i, tensors in enumerate(files, 1):
        name = f"model-{i:05}-of-{len(files):05}.safetensors"
        (folder / name).write_bytes(safetensors_bytes(tensors))
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def numbers(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Draws a matrix of normal numbers; its product with a vector has about the vector's scale."""
    scale = shape[-1] ** -0.5
    return np.random.default_rng(seed).normal(scale=scale, size=shape).astype(dtype)


def config_of(model_type: str) -> dict[str, Any]:
    """Returns a config.json with exactly the keys that the table's row for this model reads."""
    row = architectures()[model_type]
    sizes = {"E": E, "H": H, "F": F, "S": 2 * F}
    values = {"use_expert_bias": True, "model_type": model_type}
    for letter, key in row.sizes.items():
        for factor in key.split("*"):
            values[factor.split("|")[0]] = sizes[letter] if "*" not in key else 2
    for letter in "EHF":
        if letter in row.sizes:
            values[row.sizes[letter].split("|")[0]] = sizes[letter]
    usual = {"num_experts_per_token": K, "activation": "silu", "normalize": True}
    usual["score"] = "softmax"
    for field, key in row.fields.items():
        values.setdefault(key.split("|")[0], usual.get(field, 1))
    values |= {key: allowed[0] for key, allowed in row.only.items() if allowed}
    config: dict = {}
    for key, value in values.items():
        *outer, name = key.split(".")
        inner = config
        for each in outer:
            inner = inner.setdefault(each, {})
        inner[name] = value
    return config


def mixtral(layer: int = 1, dtype: Any = np.float32, **sizes: int) -> tuple[dict, Tensors]:
    """Returns a Mixtral's config.json as a dict, and the tensors of one MoE block."""
    e, h, f = (sizes.get(name, size) for name, size in (("e", E), ("h", H), ("f", F)))
    config = {
        "model_type": "mixtral",
        "num_local_experts": e,
        "num_experts_per_tok": K,
        "hidden_size": h,
        "intermediate_size": f,
        "hidden_act": "silu",
    }
    block = f"model.layers.{layer}.block_sparse_moe"
    tensors = {f"{block}.gate.weight": 4 * numbers(0, e, h, dtype=dtype)}
    for i in range(e):
        shapes = {"w1": (f, h), "w2": (h, f), "w3": (f, h)}
        for j, (name, shape) in enumerate(shapes.items()):
            tensors[f"{block}.experts.{i}.{name}.weight"] = numbers(
                3 * i + j + 1, *shape, dtype=dtype
            )
    return config, tensors


def deepseek_v3(
    layer: int = 1, dtype: Any = np.float32, h: int = H, f: int = F
) -> tuple[dict, Tensors]:
    """Returns a DeepSeek-V3's config.json, and one MoE block's tensors, with two shared experts."""
    config = {
        "model_type": "deepseek_v3",
        "n_routed_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": h,
        "moe_intermediate_size": f,
        "intermediate_size": 5 * f,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "hidden_act": "silu",
    }
    block = f"model.layers.{layer}.mlp"
    tensors = {
        f"{block}.gate.weight": 4 * numbers(0, E, h, dtype=dtype),
        f"{block}.gate.e_score_correction_bias": 0.3 * numbers(99, E),
    }
    owners = [f"experts.{i}" for i in range(E)] + ["shared_experts"]
    for i, owner in enumerate(owners):
        width = 2 * f if owner == "shared_experts" else f
        for j, (name, shape) in enumerate(
            {"gate_proj": (width, h), "up_proj": (width, h), "down_proj": (h, width)}.items()
        ):
            weights = numbers(3 * i + j + 1, *shape, dtype=dtype)
            tensors[f"{block}.{owner}.{name}.weight"] = weights
    return config, tensors


def gpt_oss_in_mxfp4(**fields: Any) -> tuple[dict[str, Any], Tensors]:
    """Returns a GPT-OSS's config.json, and one MoE block's tensors in MXFP4."""
    h = f = 64
    config = {
        "model_type": "gpt_oss",
        "num_local_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": h,
        "intermediate_size": f,
        "quantization_config": {"quant_method": "mxfp4"},
    } | fields
    rng = np.random.default_rng(0)
    tensors = {
        "router.weight": numbers(0, E, h, dtype=jnp.bfloat16),
        "router.bias": numbers(1, E, dtype=jnp.bfloat16),
        "experts.gate_up_proj_bias": numbers(2, E, 2 * f, dtype=jnp.bfloat16),
        "experts.down_proj_bias": numbers(3, E, h, dtype=jnp.bfloat16),
    }
    for name, rows in (("gate_up_proj", 2 * f), ("down_proj", h)):
        blocks = rng.integers(256, size=(E, rows, 2, 16))
        tensors[f"experts.{name}_blocks"] = blocks.astype(np.uint8)
        scales = rng.integers(118, 124, size=(E, rows, 2))
        tensors[f"experts.{name}_scales"] = scales.astype(np.uint8)
    return config, {f"model.layers.1.mlp.{name}": array for name, array in tensors.items()}


def float8_model(
    block: int = 128, h: int = H, f: int = F, scale_dtype: Any = np.float32
) -> tuple[dict[str, Any], Tensors]:
    """Returns config.json and tensors of a DeepSeek-V3 in float8, as it is published."""
    config, tensors = deepseek_v3(h=h, f=f)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    for name in [name for name in tensors if "expert" in name]:
        scales = np.abs(numbers(5, *(-(-n // block) for n in tensors[name].shape))) + 0.01
        tensors[name + "_scale_inv"] = scales.astype(scale_dtype)
        tensors[name] = (100 * tensors[name]).astype(jnp.float8_e4m3fn)
    return config, tensors


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def contents(folder: Path) -> Tensors:
    """Returns all tensors of a directory of safetensors files, by name."""
    files = Directory(folder)
    return {n: files.read(n, (slice(None),) * len(files.entry(n).shape)) for n in files.files}


def assert_same(got: Tensors, want: Tensors) -> None:
    assert sorted(got) == sorted(want)
    for name, array in want.items():
        assert got[name].dtype == array.dtype, name
        np.testing.assert_array_equal(got[name], array, err_msg=name)
