"""Reads a published model's config.json: its row of the table, sizes, fields and quantization."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_ep import checks
from jax_ep.checkpoints.architectures import TABLE, Architecture, architectures, published_root
from jax_ep.checkpoints.encodings import Quantization
from jax_ep.checkpoints.functions import MAKE

CONFIG = "config.json"

# Values of quant_method: of quantizations that are read and written, and of all that are read.
WRITTEN = ("fp8", "mxfp4")
QUANTIZATIONS = (*WRITTEN, "mxfp8", "compressed-tensors", "modelopt")


def read_config(path: Path) -> dict[str, Any]:
    """Reads config.json in the directory `path`; raises ValueError unless it is a JSON object."""
    file = path / CONFIG
    if not file.exists():
        raise FileNotFoundError(f"{path} must hold {CONFIG} as published, but does not.")
    try:
        config = json.loads(file.read_text())
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"{file} must be a JSON object, as published.")
    return config


def quantization_of(config: Mapping[str, Any], path: Path) -> Quantization:
    """Reads `quantization_config` in a config.json; raises ValueError if it is not supported."""
    stated = config.get("quantization_config") or {}
    method = stated.get("quant_method")
    if method is not None and method not in QUANTIZATIONS:
        raise ValueError(
            f"quantization_config of {path / CONFIG} must have a quant_method among "
            f"{', '.join(QUANTIZATIONS)}, but has {method!r}."
        )
    block = stated.get("weight_block_size") or Quantization.block
    if not (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    ):
        raise ValueError(
            f"weight_block_size of {path / CONFIG} must be two positive integers, but is {block!r}."
        )
    return Quantization(
        method=method,
        block=tuple(block),
        power_of_two=str(stated.get("scale_fmt")).lower() == "ue8m0",
        kept=tuple(stated.get("modules_to_not_convert") or stated.get("ignored_layers") or ()),
    )


def look_up(path: Path, layer: int, config: Mapping[str, Any] | None = None) -> Keys:
    """Returns the `Keys` of the model in `path`; `config` is its config.json, None: it is read."""
    checks.check_integer("layer", layer, least=0)
    config, is_multimodal = _language_model(read_config(path) if config is None else config)
    row = _find_architecture(config, path)
    root = published_root(config["model_type"], is_multimodal)
    return Keys(config, row, layer, path / CONFIG, root)


@dataclasses.dataclass(frozen=True)
class Keys:
    """Looks up values of config.json by the keys in an `Architecture`, such as "a|b" or "a*b"."""

    config: Mapping[str, Any]
    row: Architecture
    layer: int  # the entry to take of a value that is a list with one for each layer
    file: Path
    root: str  # the beginning of the published tensor names, such as "model.layers."

    def value(self, key: str) -> Any:
        """Returns the value of a key or its default; for "a|b", of the first key that is there."""
        names = key.split("|")
        found = [v for name in names if (v := _value(self.config, name)) is not None]
        found += [self.row.defaults[name] for name in names if name in self.row.defaults]
        if not found:
            raise ValueError(f"{self.file} must have {' or '.join(names)}, but does not.")
        value = found[0]
        if not isinstance(value, list):
            return value
        if self.layer >= len(value):
            raise ValueError(
                f"{' or '.join(names)} of {self.file} must have an entry for layer {self.layer}, "
                f"but has {len(value)}."
            )
        return value[self.layer]

    def integer(self, key: str) -> int:
        """Returns the value of a key that must be an integer; for "a*b", a product of two."""
        factors = [self.value(factor) for factor in key.split("*")]
        for value in factors:
            if not isinstance(value, int) or value < 0:
                raise ValueError(
                    f"{key} of {self.file} must be integers from 0 on, but is {factors}."
                )
        return math.prod(factors)

    def field(self, field: str, key: str) -> Any:
        """Returns the value for a field of `jax_ep.MoEConfig`, from `key` in config.json."""
        value = self.value(key)
        make = MAKE.get(key) or MAKE.get(field)
        try:
            return value if make is None else make(value)
        except ValueError as error:
            raise ValueError(f"{key} of {self.file} {error}") from error


def _language_model(config: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Returns a config.json's part for the language model, and whether it has other parts."""
    # Qwen3-Omni nests its decoder's `text_config` in a `thinker_config`. The quantization may be
    # stated outside of the `text_config`.
    nested = config.get("thinker_config", config).get("text_config")
    if nested is None:
        return dict(config), False
    return {"quantization_config": config.get("quantization_config")} | nested, True


def _find_architecture(config: Mapping[str, Any], path: Path) -> Architecture:
    """Returns the first row of TABLE for a model; ValueError if none supports its config.json."""
    model_type = config.get("model_type")
    rows = [row for row in TABLE if model_type in row.model_types]
    if not rows:
        raise ValueError(
            f"model_type of {path / CONFIG} must be one of {', '.join(sorted(architectures()))}, "
            f"but is {model_type!r}."
        )
    wrong = ""
    for row in rows:
        unsupported = [
            (key, allowed)
            for key, allowed in row.only.items()
            if (value := _value(config, key)) is not None and value not in allowed
        ]
        if not unsupported:
            return row
        key, allowed = unsupported[0]
        wrong += (
            f" {key} must be {' or '.join(map(repr, allowed)) or 'null'} for {row.models}, but is "
            f"{_value(config, key)!r}."
        )
    raise ValueError(f"{path / CONFIG} describes a {model_type!r} that is not supported:{wrong}")


def _value(config: Any, key: str) -> Any:
    """Returns the value of a key, such as "a" or "a.b", or None if it is not there."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else None
    return config
