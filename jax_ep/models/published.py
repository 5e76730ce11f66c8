"""Loads a published directory as a `jax_ep.models` decoder, and writes a decoder as one."""

from __future__ import annotations

import functools
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_ep.checkpoints import load_model, save_model
from jax_ep.checkpoints.api import NAMED_FORMATS, Progress, Quantized
from jax_ep.checkpoints.config import read_config
from jax_ep.formats import Format, Transposed, quantize
from jax_ep.models.axes import on_mesh, spec_of_moe, spec_of_weight
from jax_ep.models.config import PUBLISHED, SIZES, DecoderConfig
from jax_ep.models.decoder import Params, init_moe, init_weights, layer_shapes, shared_shapes
from jax_ep.models.generation import Model
from jax_ep.placement.weights import ROUTED_WEIGHTS

# The files of a published directory that belong to its tokenizer, or say how to generate text.
_COPIED = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja", "generation_config.json"),
)


def config_of(model: Path | str, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Returns the config.json of a directory or of a model in `PUBLISHED`, with other sizes."""
    # `sizes` maps keys of a Qwen3-MoE's config.json to values. For a directory, it may only lower
    # the number of layers; anything else raises ValueError.
    if isinstance(model, Path):
        published = read_config(model)
        # A model that `DecoderConfig.of` refuses later may lack this key.
        most = published.get("num_hidden_layers", math.inf)
        for name, key in SIZES.items():
            if key in sizes and (name != "num_layers" or sizes[key] > most):
                wanted = f"at most {most}" if name == "num_layers" else "left out"
                raise ValueError(f"{name} must be {wanted} for {model}, but is {sizes[key]}.")
        return {**published, **sizes}
    published = PUBLISHED[model]
    # GPT-OSS calls two of them otherwise.
    if "num_local_experts" in published:
        keys = {"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"}
        sizes = {keys.get(key, key): value for key, value in sizes.items()}
    return {**published, **sizes}


def load_params(
    directory: Path, config: DecoderConfig, mesh: Mesh, param_dtype: Any, shardings: Any = None
) -> Params:
    """Loads the parameters of `config.num_layers` layers to be trained, dequantized.

    They are loaded with the shardings in which a step uses them (`jax_ep.models.decoder.specs`),
    and then moved to `shardings`, a `Params` of those between steps; None: they stay.
    """
    of_moe = on_mesh(config, mesh).moe
    params = _load(
        directory,
        config,
        mesh=mesh,
        param_dtype=param_dtype,
        sharding=lambda name, shape: NamedSharding(mesh, spec_of_weight(name, shape, mesh)),
        tensor_axis=of_moe.tensor_axis,
        fsdp_axes=of_moe.fsdp_axes,
    )
    return params if shardings is None else jax.device_put(params, shardings)


def save_params(
    directory: str | Path,
    published: Mapping[str, Any],
    params: Params,
    *,
    dtype: Any = None,
    source: str | Path | None = None,
) -> None:
    """Writes parameters as a published directory, see `jax_ep.checkpoints.save_model`.

    `published` is the model's config.json, which is written with the number of layers of `params`
    and without "quantization_config". `dtype` is the written weights' dtype; None: the parameters'
    own. `source` is a directory whose tokenizer and generation options are copied; None: none.
    """
    config = dict(published) | {"num_hidden_layers": len(params.moe)}
    config.pop("quantization_config", None)
    config.pop("torch_dtype", None)  # the older name of "dtype"
    config["dtype"] = str(jnp.dtype(dtype or jax.tree.leaves(params)[0].dtype))
    if config.get("layer_types"):
        config["layer_types"] = config["layer_types"][: len(params.moe)]
    save_model(directory, config, params.moe, params.weights, dtype=dtype)
    if source is not None and jax.process_index() == 0:
        for name in _COPIED:
            if (Path(source) / name).exists():
                shutil.copy(Path(source) / name, directory)


def load_decoder(
    directory: Path,
    mesh: Mesh,
    param_dtype: Any,
    *,
    quantized: Quantized = None,
    progress: Progress | None = None,
    **fields: Any,
) -> tuple[DecoderConfig, Model]:
    """Loads a published model to decode: experts are split over the mesh, other weights replicated.

    The mesh has the axis "expert". `param_dtype` is the dtype of weights that are not quantized.
    `fields` replace fields of the `MoEConfig`. Other arguments are as in
    `jax_ep.checkpoints.load_model`.
    """
    published = read_config(directory)
    generation = directory / "generation_config.json"
    if generation.exists():
        published["eos_token_id"] = json.loads(generation.read_text()).get("eos_token_id")
    config = DecoderConfig.of(published, directory).replace(**fields)
    config = _with_slots(config, mesh)
    params = _load(
        directory,
        config,
        mesh=mesh,
        param_dtype=param_dtype,
        quantized=quantized,
        progress=progress,
        num_slots=config.moe.num_slots,
        **fields,
    )
    return config, Model.of(params, config, mesh.size)


def random_decoder(
    config: DecoderConfig,
    mesh: Mesh,
    param_dtype: Any,
    *,
    quantized: Literal["float8", "mxfp4"] | Format | None = None,
) -> tuple[DecoderConfig, Model]:
    """Makes a model with random weights, split and quantized as `load_decoder` does."""
    config = on_mesh(_with_slots(config, mesh), mesh)
    format: Any = NAMED_FORMATS.get(quantized, quantized)
    everywhere = NamedSharding(mesh, PartitionSpec())
    # Jits a function that draws weights; all devices hold its results whole.
    draw = functools.partial(jax.jit, out_shardings=everywhere)

    @jax.jit
    def draw_block(key: jax.Array) -> Any:
        params = init_moe(key, config, param_dtype)
        arrays = {name: w for name, w in params._asdict().items() if w is not None}
        for name, w in arrays.items():
            if format is not None and name in ROUTED_WEIGHTS and w.ndim == 3:
                # Quantizes the transposed matrices, as published files do.
                arrays[name] = quantize(w, Transposed.of(format))
            # Only the axis of experts is split, as in `load_decoder`.
            split = NamedSharding(mesh, PartitionSpec(*spec_of_moe(name, config, mesh)[:1]))
            arrays[name] = jax.lax.with_sharding_constraint(arrays[name], split)
        return params._replace(**arrays)

    draw_layer = draw(lambda key: init_weights(key, layer_shapes(config), param_dtype))
    draw_shared = draw(lambda key: init_weights(key, shared_shapes(config), param_dtype))
    # As in `Decoder.init`: after the first key, two for each layer.
    first, *keys = jax.random.split(jax.random.key(0), 2 * config.num_layers + 1)
    weights = draw_shared(first)
    for i in range(config.num_layers):
        weights |= {f"model.layers.{i}.{name}": w for name, w in draw_layer(keys[2 * i]).items()}
    params = Params(weights, [draw_block(key) for key in keys[1::2]])
    return config, Model.of(params, config, mesh.size)


def _with_slots(config: DecoderConfig, mesh: Mesh) -> DecoderConfig:
    """Adds slots for copies until all devices have equally many; none if experts divide evenly."""
    experts = config.num_experts
    copies = -experts % mesh.size
    return config.replace(num_slots=experts + copies) if copies else config


def _load(directory: Path, config: DecoderConfig, **arguments: Any) -> Params:
    """Calls `load_model` for the layers of `config`; ValueError if a weight is missing or wrong."""
    loaded = load_model(directory, layers=range(config.num_layers), **arguments)
    wanted = shared_shapes(config)
    for i in range(config.num_layers):
        of_layer = layer_shapes(config).items()
        wanted |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer}
    for name, shape in wanted.items():
        weight = loaded.weights.get(name)
        if weight is None or weight.shape != shape:
            found = "is not there" if weight is None else f"has shape {weight.shape}"
            raise ValueError(f"{name} in {directory} must have shape {shape}, but {found}.")
    return Params({name: loaded.weights[name] for name in wanted}, list(loaded.moe.values()))
