"""Finds the MoE block of a layer in a directory of safetensors files, and reads and writes it.

A block is the part of a decoder layer with router and experts. `jax_ep.checkpoints.architectures`
says which tensors hold its parameters.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep import checks
from jax_ep.checkpoints.architectures import (
    PARAMETER_AXES,
    TABLE,
    Architecture,
    OneOf,
    Tensor,
    Tensors,
    architectures,
    published_root,
    root_parts,
)
from jax_ep.checkpoints.encodings import (
    BLOCKS,
    Encoding,
    Float8,
    Plain,
    Quantization,
    float8_tensors,
    format_of,
    mxfp4_tensors,
    open_tensor,
)
from jax_ep.checkpoints.functions import MAKE
from jax_ep.checkpoints.safetensors import Directory, Index
from jax_ep.formats import Format, QuantizedArray, Transposed
from jax_ep.moe.params import MATRICES

# A parameter or a slice of one: an np.ndarray, or a QuantizedArray of NumPy arrays.
Parameter = Any

CONFIG = "config.json"

# _WRAPPERS are prefixes that PEFT, torch.compile, data parallelism and activation checkpointing add
# to the names of a PyTorch module. _ROOTS are all words that may precede "layers." in the name of a
# decoder's tensor.
_WRAPPERS = (
    "base_model",
    "module",
    "_orig_mod",
    "_forward_module",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
)
_ROOTS = (*root_parts(), *_WRAPPERS)

# Matches the beginning of a decoder layer's tensor names, such as "model.layers.3.". Its groups are
# the part that ends with "layers.", the layer's number, and the "." with any _WRAPPERS after it.
_LAYER = re.compile(
    rf"((?:(?:{'|'.join(_ROOTS)})\.)*layers\.)([0-9]+)(\.(?:(?:{'|'.join(_WRAPPERS)})\.)*)"
)
# Matches the names of a decoder's embedding and last norm. The group is the part of the name before
# the embedding's or norm's own name, such as "model.".
_OUTSIDE = re.compile(rf"((?:(?:{'|'.join(_ROOTS)})\.)*)(?:embed\w*|\w*norm\w*)\.weight")

_QUANTIZATIONS = ("fp8", "mxfp4")

# A stored matrix is read in pieces of _ROWS rows. Each piece is copied, and transposed if that is
# needed, in tiles of _COLUMNS columns, because such a tile fits in the CPU's caches.
_ROWS, _COLUMNS = 256, 64


@dataclasses.dataclass(frozen=True)
class Block:
    """The MoE block of one layer in a directory, for reading and writing slices of its parameters.

    Attributes:
        directory: the directory with the safetensors files.
        architecture: how models of this architecture are published.
        fields: the fields of `jax_ep.MoEConfig` that config.json determines.
        sizes: the size of each axis, by its letter in `jax_ep.checkpoints.architectures`.
        prefix: the prefix of the names of the block's tensors, such as "model.layers.3.".
        tensors: the tensors that hold the block's parameters.
        quantization: the quantization that config.json states.
        num_slots: P, if the experts' parameters are read as P slots, where slot s holds the stored
            expert s % E; None if their first axis is the E stored experts.
        like: the prefix of another layer's block in the directory, if this block is to be added.
            This block takes its tensor names and encodings. None if the directory has no block.
    """

    directory: Directory
    architecture: Architecture
    fields: Mapping[str, Any]
    sizes: dict[str, int]
    prefix: str
    tensors: Tensors
    quantization: Quantization
    num_slots: int | None = None
    like: str | None = None

    def params(self) -> tuple[str, ...]:
        """Returns the names of the block's parameters in `jax_ep.MoEParams`."""
        return tuple(param for tensor in self.tensors for param in tensor.params)

    def shape(self, param: str) -> tuple[int, ...]:
        """Returns the shape of the whole parameter `param`."""
        held = {"E": self.sizes["E"] if self.num_slots is None else self.num_slots}
        return tuple((self.sizes | held)[letter] for letter in PARAMETER_AXES[param])

    def dtype(self, param: str) -> np.dtype:
        """Returns the dtype in which a parameter is stored, or bfloat16 if it is quantized.

        If experts are stored in several dtypes, it is the least one that has all their numbers.
        """
        tensor = self._tensor(param)
        return jnp.result_type(*{self.open(tensor, e).dtype for e in self._experts_of(tensor)})

    def format(self, param: str) -> Format | None:
        """Returns the quantized format in which a parameter is stored, or None for plain numbers.

        Raises:
            ValueError: the matrices of the experts are stored in different formats.
        """
        tensor = self._tensor(param)
        opened = (self.open(tensor, e) for e in self._experts_of(tensor))
        found = {self._format(each, tensor, param) for each in opened}
        if len(found) > 1:
            names = sorted("none" if format is None else format.name for format in found)
            raise ValueError(
                f"{param} must be in one format in {self.directory.path} to stay quantized, but "
                f"the formats of its experts are {', '.join(names)}; leave quantized at None."
            )
        return found.pop()

    def _format(self, encoding: Encoding, tensor: Tensor, param: str) -> Format | None:
        """Returns the quantized format of the parameter `param` in a stored tensor.

        The format is a `Transposed` one if the tensor stores the parameter's matrices transposed,
        and None if the tensor is not quantized. `encoding` is the opened `tensor`.
        """
        format = format_of(encoding)
        letters = tensor.axes.replace("G", "").replace(" ", "")
        same_order = letters[-2:] == PARAMETER_AXES[param][-2:]
        return format if format is None or same_order else Transposed.of(format)

    def open(self, tensor: Tensor, expert: int) -> Encoding:
        """Opens a stored tensor of the block: that of `expert`, if each expert has its own."""
        name = self.prefix + tensor.name.format(e=expert)
        return open_tensor(self.directory, name, self.quantization)

    def _stored_shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(_size(token, self.sizes) for token in tensor.axes.split())

    def check(self) -> None:
        """Raises ValueError if the block lacks a tensor, or has a misshapen or unknown tensor."""
        directory, prefix, models = self.directory, self.prefix, self.architecture.models
        for tensor in self.tensors:
            wanted = self._stored_shape(tensor)
            for expert in self._experts_of(tensor):
                name = prefix + tensor.name.format(e=expert)
                if name not in directory.files:
                    raise ValueError(
                        f"{directory.path} must hold {name} of shape {wanted}, as {models} do, but "
                        "does not."
                    )
                shape = self.open(tensor, expert).shape
                if shape != wanted:
                    raise ValueError(
                        f"{name} in {directory.path / directory.files[name]} must have shape "
                        f"{wanted}, [{tensor.axes.replace(' ', ', ')}] as {CONFIG} says, but has "
                        f"{shape}."
                    )
        rooms = {prefix + name.partition(".")[0] + "." for name in _names(self.architecture)}
        free = range(self.sizes["E"], self.sizes["R"])
        unused = {prefix + n.format(e=e) for n in self.architecture.unused for e in free}
        stored = unused.union(self.stored())
        unknown = [n for n in directory.files if n.startswith(tuple(rooms)) and n not in stored]
        if unknown:
            raise ValueError(
                f"{directory.path} holds {min(unknown)}, which {models} do not have in an MoE "
                f"block ({len(unknown)} such tensors), so its meaning is not known."
            )

    def _tensor(self, param: str) -> Tensor:
        return next(tensor for tensor in self.tensors if param in tensor.params)

    def _experts_of(self, tensor: Tensor) -> range:
        """Returns the experts with a stored tensor of their own; only 0 if one has all of them."""
        return range(self.sizes["E"] if "{e}" in tensor.name else 1)

    def read(
        self,
        param: str,
        index: Index,
        dtype: np.dtype,
        done: Callable[[int], None],
        format: Format | None = None,
    ) -> Parameter:
        """Reads a slice of a parameter, without reading bytes that the slice does not need.

        Args:
            param: the parameter's name in `jax_ep.MoEParams`.
            index: a slice for each axis of the parameter.
            dtype: the dtype of the result.
            done: called with a number of bytes when these have been read: after each expert, or
                once for a parameter without experts.
            format: the quantized format of the result; the slice must consist of whole blocks of
                this format. Numbers that are stored in this format are not quantized again. None:
                the result is a plain array.

        Returns:
            The slice, in newly allocated memory that a CPU device can use without a copy: an
            np.ndarray, or with a `format` a `QuantizedArray` of NumPy arrays.
        """
        tensor, axes = self._tensor(param), PARAMETER_AXES[param]
        shape = self.shape(param)
        taken = {
            letter: slice(*part.indices(size)[:2])
            for letter, part, size in zip(axes, index, shape, strict=True)
        }
        sizes = tuple(part.stop - part.start for part in taken.values())
        out = _empty(sizes, dtype) if format is None else _empty_quantized(sizes, format, dtype)

        def read_part(slot: int | None) -> None:
            part, into, expert = taken, out, None
            if slot is not None:
                expert = slot % self.sizes["E"]
                part = taken | {"E": slice(expert, expert + 1)}
                into = _entry(out, slot - taken["E"].start)
            where, letters = _place(tensor, param, part, self.sizes)
            encoding = self.open(tensor, expert or 0)
            if isinstance(into, QuantizedArray):
                is_stored = self._format(encoding, tensor, param) == into.format
                _copy_quantized(encoding, where, into, is_stored, letters[-2:] == axes[-2:])
            else:
                into = _in_order(into, axes if expert is None else axes[1:], letters)
                _copy(encoding, where, into)
            done(sum(part.nbytes for part in jax.tree.leaves(into)))

        _for_each(read_part, _experts(axes, taken))
        return out

    def write(self, params: Mapping[str, Parameter], into: Directory) -> None:
        """Writes all parameters of the block to `into`, a directory that has the block's tensors.

        `params` maps names to NumPy arrays, or to `QuantizedArray` objects of NumPy arrays. A
        `QuantizedArray` in the stored format is written with its own values and scales. Any other
        `QuantizedArray` is dequantized, and then encoded like the tensor.
        """
        block = dataclasses.replace(self, directory=into)
        whole = {letter: slice(0, size) for letter, size in self.sizes.items()}
        for tensor in self.tensors:
            write_part = functools.partial(block._write_part, tensor, params, whole)
            _for_each(write_part, _experts(PARAMETER_AXES[tensor.params[0]], whole))

    def _write_part(
        self,
        tensor: Tensor,
        params: Mapping[str, Parameter],
        whole: Mapping[str, slice],
        expert: int | None,
    ) -> None:
        """Writes one expert's part of a stored tensor, or the whole tensor if `expert` is None.

        Args:
            tensor: the stored tensor.
            params: the whole parameters, by name.
            whole: maps the letter of each axis to the slice that takes the whole axis.
            expert: the number of the expert.
        """
        encoding = self.open(tensor, expert or 0)
        region = tuple(
            slice(expert, expert + 1) if token == "E" and expert is not None else slice(0, n)
            for token, n in zip(tensor.axes.split(), encoding.shape, strict=True)
        )
        arrays = {param: params[param] for param in tensor.params}
        if expert is not None:
            arrays = {param: _entry(array, expert) for param, array in arrays.items()}
        if not isinstance(encoding, Plain) and all(
            getattr(array, "format", None) == self._format(encoding, tensor, param)
            for param, array in arrays.items()
        ):
            taken = whole if expert is None else {**whole, "E": slice(expert, expert + 1)}
            for param, array in arrays.items():
                where, _ = _place(tensor, param, taken, self.sizes)
                lead = (None,) * (len(where) - array.ndim)
                encoding.write_parts(where, array.values[lead], array.scales[lead])
            return
        arrays = {
            param: array.dequantize(np.float32) if isinstance(array, QuantizedArray) else array
            for param, array in arrays.items()
        }
        shape = tuple(part.stop - part.start for part in region)
        values = np.empty(shape, arrays[tensor.params[0]].dtype)
        for param, array in arrays.items():
            taken, letters = whole, PARAMETER_AXES[param]
            if expert is not None:
                taken, letters = {**whole, "E": slice(0, 1)}, letters[1:]
            where, order = _place(tensor, param, taken, self.sizes)
            array = _in_order(array, letters, order)
            values[where] = array.reshape(values[where].shape)
        encoding.write(region, values)

    def new_tensors(
        self, dtypes: Mapping[str, np.dtype]
    ) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Describes the tensors that must be created to add this block to a directory.

        Args:
            dtypes: maps each parameter's name to its dtype, which tensors that are not quantized
                get.

        Returns:
            A dict that maps the name of each tensor, scales included, to its dtype and shape.
        """
        stored: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        for tensor in self.tensors:
            shape = self._stored_shape(tensor)
            for expert in self._experts_of(tensor):
                name = self.prefix + tensor.name.format(e=expert)
                scales = self._new_float8_scales(tensor, expert)
                if name.endswith(BLOCKS):
                    stored |= mxfp4_tensors(name, shape)
                elif scales is not None:
                    stored |= float8_tensors(name, shape, self.quantization.block, scales)
                else:
                    stored[name] = dtypes[tensor.params[0]], shape
        return stored

    def _new_float8_scales(self, tensor: Tensor, expert: int) -> np.dtype | None:
        """Returns the dtype of the scales of a new tensor; None if it will not be float8.

        `expert` is the number of an expert, used only if each expert has its own tensor.
        """
        name = tensor.name.format(e=expert)
        if self.like is not None and self.like + name in self.directory.files:
            encoding = open_tensor(self.directory, self.like + name, self.quantization)
            return encoding.scale_dtype if isinstance(encoding, Float8) else None
        if tensor.params[0] in MATRICES and self.quantization.is_float8(self.prefix + name):
            return np.dtype(np.float32)
        return None

    def stored(self) -> list[str]:
        """Returns the full names of all tensors in which the block is stored, scales included."""
        return [
            name
            for tensor in self.tensors
            for expert in self._experts_of(tensor)
            for name in self.open(tensor, expert).stored
        ]


def open_block(path: str | os.PathLike[str], layer: int) -> Block:
    """Finds the MoE block of a layer in the directory `path`, and checks its tensors.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the layer has no MoE block; the architecture or quantization is unknown; or a
            tensor of the block is missing, has a wrong shape or is unknown. The message says which.
    """
    directory = Directory(path)
    row, keys = _look_up(directory.path, layer)
    prefix = _find_prefix(directory, row, layer)
    if prefix is None:
        raise ValueError(_not_found(directory, row, keys, layer))
    block = _block(directory, row, prefix, keys)
    block.check()
    return block


def plan_block(path: str | os.PathLike[str], layer: int) -> Block | None:
    """Makes the `Block` of a layer that a directory lacks, in order to add it to the directory.

    The names of the new block's tensors begin with a prefix, such as "model.layers.3." for layer 3.
    The prefix is the first of these:

    1. If the directory has MoE blocks: the prefix of the nearest one, with the new layer's number.
    2. If it has tensors of layers: the prefix of the nearest layer, with the new layer's number.
    3. If it has an embedding or a last norm: the words before this tensor's own name, such as
       "model.", followed by "layers.3.".
    4. Otherwise: the prefix in the published model.

    Returns:
        The block, or None if the directory `path` already has the block of this layer.
    """
    directory = Directory(path, may_be_empty=True)
    row, keys = _look_up(directory.path, layer)
    if _find_prefix(directory, row, layer) is not None:
        return None
    blocks, _ = _routers(directory, row)
    if blocks:
        nearest = min(blocks, key=lambda number: abs(number - layer))
        like = _only(blocks[nearest], directory, row, nearest)
        return _block(directory, row, _renumbered(like, layer), keys, like)
    layers = [found for name in directory.files if (found := _LAYER.match(name))]
    if layers:
        nearest_name = min(layers, key=lambda found: abs(int(found[2]) - layer))[0]
        return _block(directory, row, _renumbered(nearest_name, layer), keys)
    outside = [found for name in directory.files if (found := _OUTSIDE.fullmatch(name))]
    root = outside[0][1] if outside else keys.root
    return _block(directory, row, f"{root}layers.{layer}.", keys)


def _renumbered(prefix: str, layer: int) -> str:
    return _LAYER.sub(rf"\g<1>{layer}\g<3>", prefix, count=1)


def _routers(directory: Directory, row: Architecture) -> tuple[dict[int, list[str]], list[str]]:
    """Finds the weight tensors of all routers in a directory; every MoE block has such a tensor.

    Returns:
        A dict that maps the number of each layer with a router to the prefixes of its MoE blocks,
        such as "model.layers.3."; and a list of the router tensors whose names have a prefix of
        another form, which does not tell their layer.
    """
    blocks: dict[int, list[str]] = {}
    others = []
    gate = _gate(row)
    for name in directory.files:
        if name == gate or name.endswith("." + gate):
            prefix = name.removesuffix(gate)
            if found := _LAYER.fullmatch(prefix):
                blocks.setdefault(int(found[2]), []).append(prefix)
            else:
                others.append(name)
    return blocks, others


def _find_prefix(directory: Directory, row: Architecture, layer: int) -> str | None:
    """Returns the prefix of the tensor names of a layer's MoE block, such as "model.layers.3.".

    Returns None if the layer has no MoE block. Raises ValueError if it has several.
    """
    prefixes = _routers(directory, row)[0].get(layer)
    return None if prefixes is None else _only(prefixes, directory, row, layer)


def _only(prefixes: list[str], directory: Directory, row: Architecture, layer: int) -> str:
    if len(prefixes) > 1:
        names = ", ".join(sorted(prefix + _gate(row) for prefix in prefixes))
        raise ValueError(
            f"layer {layer} of {directory.path} must have one MoE block, but has {len(prefixes)}: "
            f"{names}."
        )
    return prefixes[0]


def _not_found(directory: Directory, row: Architecture, keys: _Keys, layer: int) -> str:
    """Returns the error message for a layer without an MoE block.

    The message lists tensors of the directory that may belong to it, for the user to rename.
    """
    gate = _gate(row)
    blocks, others = _routers(directory, row)
    said = (
        f"layer {layer} of {directory.path} must have an MoE block, with a tensor "
        f"{keys.root}layers.{layer}.{gate}, but has none; "
        + (f"layers {sorted(blocks)} have one." if blocks else "no layer has one.")
    )
    if others:
        what = "Other routers there"
    elif not blocks:
        what = "Tensors there"
        module = gate.removesuffix("weight")
        others = [name for name in directory.files if module in name]
        others = others or [name for name in directory.files if f"layers.{layer}." in name]
        others = others or list(directory.files)
    if others:
        more = ", .." if len(others) > 3 else ""
        said += (
            f" {what} are {', '.join(sorted(others)[:3])}{more}: names must be "
            f"<root>layers.{layer}.{gate}, with a root that is empty or made of "
            f"{', '.join(part + '.' for part in _ROOTS)}; rename the tensors, or save the model "
            "merged and without what wraps it."
        )
    return said


def _look_up(path: Path, layer: int) -> tuple[Architecture, _Keys]:
    """Reads config.json; returns the model's architecture, and a `_Keys` to look up its values."""
    checks.check_integer("layer", layer, least=0)
    config, is_part = _read_config(path)
    row = find_architecture(config, path)
    root = published_root(config["model_type"], is_part)
    return row, _Keys(config, row, layer, path / CONFIG, root)


def _quantization(keys: _Keys) -> Quantization:
    """Reads `quantization_config` in config.json; raises ValueError if it is not supported."""
    said = keys.config.get("quantization_config") or {}
    method = said.get("quant_method")
    if method is not None and method not in _QUANTIZATIONS:
        raise ValueError(
            f"quantization_config of {keys.file} must have a quant_method among "
            f"{', '.join(_QUANTIZATIONS)}, but has {method!r}."
        )
    block = said.get("weight_block_size") or Quantization.block
    if not (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    ):
        raise ValueError(
            f"weight_block_size of {keys.file} must be two positive integers, but is {block!r}."
        )
    return Quantization(
        method=method,
        block=tuple(block),
        power_of_two=str(said.get("scale_fmt")).lower() == "ue8m0",
        kept=tuple(said.get("modules_to_not_convert") or said.get("ignored_layers") or ()),
    )


def _block(
    directory: Directory, row: Architecture, prefix: str, keys: _Keys, like: str | None = None
) -> Block:
    """Makes the `Block` of one layer.

    Args:
        directory: the directory that has the block, or to which it is to be added.
        row: the architecture of the model.
        prefix: the prefix of the block's tensor names, such as "model.layers.3.".
        keys: looks up values of config.json.
        like: for a block that is to be added, the prefix of an existing block. Where weights may be
            stored in alternative tensors (`OneOf`), the new block takes the existing one's choice.
    """
    quantization = _quantization(keys)
    fields = {field: keys.field(field, key) for field, key in row.fields.items()}
    sizes = {letter: 0 for axes in PARAMETER_AXES.values() for letter in axes} | {"1": 1}
    sizes |= {letter: keys.integer(key) for letter, key in row.sizes.items()}
    sizes["R"] = sizes["E"] + fields.get("identity_experts", 0)
    return Block(
        directory=directory,
        architecture=row,
        fields={**row.fixed, **fields, "num_experts": sizes["E"]},
        sizes=sizes,
        prefix=prefix,
        tensors=_stored(directory, row, like or prefix, sizes, keys, quantization.method),
        quantization=quantization,
        like=like,
    )


def _read_config(path: Path) -> tuple[dict[str, Any], bool]:
    """Reads config.json in the directory `path`.

    Returns:
        The configuration of the language model; and whether it was nested under `text_config`, as
        in a multimodal model.
    """
    file = path / CONFIG
    if not file.exists():
        raise FileNotFoundError(f"{path} must hold {CONFIG} as published, but does not.")
    try:
        config = json.loads(file.read_text())
        nested = config.get("text_config")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file} must be a JSON object, as published.") from error
    if nested is None:
        return config, False
    return {key: config[key] for key in config.keys() & {"quantization_config"}} | nested, True


def find_architecture(config: Mapping[str, Any], path: Path) -> Architecture:
    """Returns the architecture of a model from its `config`, the contents of config.json.

    Raises:
        ValueError: the `model_type` is unknown, or config.json has a value that is not supported.
    """
    model_type = config.get("model_type")
    rows = [row for row in TABLE if model_type in row.model_types]
    if not rows:
        raise ValueError(
            f"model_type of {path / CONFIG} must be one of {', '.join(sorted(architectures()))}, "
            f"but is {model_type!r}."
        )
    wrong = ""
    for row in rows:
        other = [
            (key, allowed)
            for key, allowed in row.only.items()
            if config.get(key) is not None and config[key] not in allowed
        ]
        if not other:
            return row
        key, allowed = other[0]
        wrong += (
            f" {key} must be {' or '.join(map(repr, allowed)) or 'null'} for {row.models}, but is "
            f"{config[key]!r}."
        )
    raise ValueError(f"{path / CONFIG} describes a {model_type!r} that is not supported:{wrong}")


@dataclasses.dataclass(frozen=True)
class _Keys:
    """Looks up values of config.json by the keys in an `Architecture`, such as "a|b" or "a*b".

    Attributes:
        config: the contents of config.json.
        row: the architecture, which has default values.
        layer: the number of the layer. If a value is a list with an entry for each layer, its entry
            for this layer is the result.
        file: the path of config.json, for error messages.
        root: the beginning of the model's published tensor names, before "layers.".
    """

    config: Mapping[str, Any]
    row: Architecture
    layer: int
    file: Path
    root: str

    def value(self, key: str) -> Any:
        """Returns the value of a key in config.json; for "a|b", of the first key that is there.

        If the key is absent or null, returns the architecture's default value. If the value is a
        list, with an entry for each layer, returns the entry of `layer`. Raises ValueError if there
        is no value.
        """
        names = key.split("|")
        found = [self.config[name] for name in names if self.config.get(name) is not None]
        found += [self.row.defaults[name] for name in names if name in self.row.defaults]
        if not found:
            raise ValueError(f"{self.file} must have {' or '.join(names)}, but does not.")
        if not isinstance(found[0], list):
            return found[0]
        if self.layer >= len(found[0]):
            raise ValueError(
                f"{' or '.join(names)} of {self.file} must have an entry for layer {self.layer}, "
                f"but has {len(found[0])}."
            )
        return found[0][self.layer]

    def integer(self, key: str) -> int:
        """Returns the value of a key that must be an integer; for "a*b", the product of two values.

        A key "a|b" is looked up as in `value`. Raises ValueError unless all values are integers
        that are not negative.
        """
        factors = [self.value(factor) for factor in key.split("*")]
        for value in factors:
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{key} of {self.file} must be integers, but is {factors}.")
        return math.prod(factors)

    def field(self, field: str, key: str) -> Any:
        """Returns the value for a field of `jax_ep.MoEConfig`, from `key` in config.json.

        If `jax_ep.checkpoints.functions.MAKE` has a function for the field, it converts the value.
        """
        value = self.value(key)
        try:
            return MAKE.get(field, lambda value: value)(value)
        except ValueError as error:
            raise ValueError(f"{key} of {self.file} {error}") from error


def _gate(row: Architecture) -> str:
    """Returns the name, without prefix, of the router's weights, which every MoE block has."""
    return next(t for t in row.tensors if isinstance(t, Tensor) and "gate" in t.params).name


def _stored(
    directory: Directory,
    row: Architecture,
    prefix: str,
    sizes: Mapping[str, int],
    look_up: _Keys,
    method: str | None,
) -> Tensors:
    """Returns the tensors that an MoE block must have.

    Where there are alternatives (`OneOf`), takes the one whose tensors the directory has under
    `prefix`. If it has none, takes the first alternative that suits the quantization `method`:
    float8 needs a tensor for each expert, MXFP4 needs names that end in `BLOCKS`. Leaves out
    tensors with an axis of size 0, and tensors that do not exist according to config.json.

    Args:
        directory: the directory with the tensors.
        row: the architecture of the model.
        prefix: the prefix of the tensor names.
        sizes: the size of each axis, by its letter.
        look_up: looks up values of config.json.
        method: the quantization method, as in `Quantization`.
    """

    def is_there(tensors: Tensors) -> bool:
        return prefix + tensors[0].name.format(e=0) in directory.files

    def fits(tensors: Tensors) -> bool:
        name = tensors[0].name
        if name.endswith(BLOCKS) or method == "mxfp4":
            return name.endswith(BLOCKS) and method == "mxfp4"
        return method is None or "{e}" in name

    tensors: list[Tensor] = []
    for item in row.tensors:
        if isinstance(item, OneOf):
            suitable = [layout for layout in item.layouts if fits(layout)] or item.layouts
            tensors += next((ts for ts in item.layouts if is_there(ts)), suitable[0])
        else:
            tensors.append(item)
    return tuple(
        tensor
        for tensor in tensors
        if all(_size(token, sizes) for token in tensor.axes.split())
        and (not tensor.where or look_up.value(tensor.where))
    )


def _names(row: Architecture) -> list[str]:
    layouts = [item.layouts if isinstance(item, OneOf) else ((item,),) for item in row.tensors]
    return [tensor.name for options in layouts for layout in options for tensor in layout]


def _size(token: str, sizes: Mapping[str, int]) -> int:
    """Returns the size of an axis of a stored tensor from its letters: for "GF", 2 * F."""
    return math.prod(2 if letter == "G" else sizes[letter] for letter in token)


def _place(
    tensor: Tensor, param: str, taken: Mapping[str, slice], sizes: Mapping[str, int]
) -> tuple[Index, str]:
    """Finds the slice of a stored tensor that holds a slice of a parameter.

    Args:
        tensor: the stored tensor.
        param: the name of the parameter.
        taken: maps the letter of each axis of the parameter to the slice to find along this axis.
        sizes: the size of each axis, by its letter.

    Returns:
        A slice for each axis of the tensor; and the letters of the tensor's axes, in the tensor's
        order and without G, to transpose the slice (see `_in_order`).
    """
    g, letters, index = tensor.params.index(param), "", []
    for token in tensor.axes.split():
        letter = token.replace("G", "")
        # The tensor may have an axis "1", of one element, which the parameter lacks. The element is
        # taken. All other axes of the tensor are axes of the parameter.
        part = taken.get(letter, slice(0, 1))
        if token[0] == "G":
            part = slice(g * sizes[letter] + part.start, g * sizes[letter] + part.stop)
        elif token[-1] == "G":
            part = slice(2 * part.start + g, 2 * part.stop - 1 + g, 2)
        index.append(part)
        letters += letter
    return tuple(index), letters


def _experts(axes: str, taken: Mapping[str, slice]) -> list[int | None]:
    """Lists the numbers of the experts (or slots) in a slice of a parameter, to copy one by one.

    Args:
        axes: the letters of the parameter's axes.
        taken: maps the letter of each axis to the slice to copy; `taken["E"]` is the slice of
            experts or slots.

    Returns:
        The numbers, or [None] for a parameter that is copied as a whole, because it has no axis of
        experts or only one number for each expert.
    """
    if axes[0] != "E" or len(axes) == 1:
        return [None]
    return list(range(taken["E"].start, taken["E"].stop))


def _in_order(array: np.ndarray, axes: str, letters: str) -> np.ndarray:
    """Transposes an array so that its axes have the order in which `letters` lists them.

    `axes` has the letter of each of the array's axes. `letters` may list further letters.
    """
    return array.transpose([axes.index(letter) for letter in letters if letter in axes])


def _copy(source: Encoding, index: Index, into: np.ndarray) -> None:
    """Reads the slice `index` of a stored tensor into the array `into`, decoded and cast.

    The axes of `into` have the order of the tensor's axes.
    """
    if into.ndim < 2:
        into[...] = source.read(index).reshape(into.shape)
        return
    rows = len(index) - 2
    start, step = index[rows].start, index[rows].step or 1
    for first in range(0, into.shape[0], _ROWS):
        last = min(first + _ROWS, into.shape[0])
        part = slice(start + first * step, start + (last - 1) * step + 1, step)
        values = source.read((*index[:rows], part, *index[rows + 1 :]))
        values = values.reshape(last - first, -1).astype(into.dtype, copy=False)
        for column in range(0, into.shape[1], _COLUMNS):
            tile = slice(column, column + _COLUMNS)
            into[first:last, tile] = values[:, tile]


def _copy_quantized(
    encoding: Encoding, index: Index, into: QuantizedArray, is_stored: bool, same_order: bool
) -> None:
    """Reads the slice `index` of a stored tensor into the quantized matrix `into`.

    Args:
        encoding: the stored tensor.
        index: a slice for each axis of the tensor.
        into: the quantized matrix, as NumPy arrays to write to.
        is_stored: whether the tensor has the format of `into`. If so, its values and scales are
            copied unchanged. If not, its numbers are decoded and quantized to the format of `into`.
        same_order: whether the tensor stores the matrix as it is, and not transposed.
    """
    if is_stored:
        assert not isinstance(encoding, Plain)
        parts = encoding.read_parts(index)
    else:
        numbers = encoding.read(index).astype(np.float32)
        numbers = numbers.reshape(numbers.shape[-2:])
        parts = into.format.encode(numbers if same_order else numbers.T)
    for part, values in zip(jax.tree.leaves(into), parts, strict=True):
        part[...] = values.reshape(part.shape)


def _entry(array: Parameter, i: int) -> Any:
    """Returns a view of `array[i]`; of a `QuantizedArray`, of its values and scales."""
    return jax.tree.map(lambda part: part[i], array)


def _for_each(function: Callable[[int | None], None], items: list[int | None]) -> None:
    """Calls `function`, which copies one expert's weights, with each of `items`, from `_experts`.

    Uses several threads, which run in parallel because NumPy releases the GIL while it copies.
    """
    if len(items) == 1:
        function(items[0])
        return
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(function, items))


def _empty_quantized(shape: tuple[int, ...], format: Format, dtype: np.dtype) -> QuantizedArray:
    """Allocates an uninitialized quantized array of `shape` and `dtype`; see `_empty`."""
    values: Any = _empty(format.values_shape(shape), format.dtype)
    scales: Any = _empty(format.scales_shape(shape), format.scale_dtype)
    return QuantizedArray(values, scales, format, dtype)


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates an uninitialized array, aligned to 64 bytes for XLA to use it without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + size].view(dtype).reshape(shape)
