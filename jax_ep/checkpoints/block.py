"""Finds the MoE block of a layer in a directory of safetensors files, and reads and writes it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_ep.checkpoints import architectures, encodings
from jax_ep.checkpoints.architectures import PARAMETER_AXES, Architecture, OneOf, Tensor, Tensors
from jax_ep.checkpoints.config import CONFIG, WRITTEN, Keys, look_up, quantization_of
from jax_ep.checkpoints.encodings import BLOCKS, Blockwise, Encoding, Plain, Scaled, open_tensor
from jax_ep.checkpoints.safetensors import Directory, Index, TensorTypes
from jax_ep.formats import Float8, Format, QuantizedArray, Transposed
from jax_ep.moe.params import MATRICES

# A parameter or a slice of one: an np.ndarray, or a QuantizedArray of NumPy arrays.
Parameter = Any

# Prefixes that PEFT, torch.compile, data parallelism and activation checkpointing add to the names
# of a PyTorch module.
_WRAPPERS = (
    "base_model",
    "module",
    "_orig_mod",
    "_forward_module",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
)
# All words that may precede "layers." in the name of a decoder's tensor.
_ROOTS = (*architectures.root_parts(), *_WRAPPERS)

# The roots of several decoders with experts in one directory: Qwen3-Omni's.
_DECODERS = {"thinker", "talker"}

# Matches the beginning of a decoder layer's tensor names, such as "model.layers.3.", in three
# groups: up to "layers." or "blocks.", the layer's number, and the rest.
_LAYER = re.compile(
    rf"((?:(?:{'|'.join(_ROOTS)})\.)*(?:layers|blocks)\.)([0-9]+)(\.(?:(?:{'|'.join(_WRAPPERS)})\.)*)"
)
# Matches names of a decoder's embedding and last norm, whose last axis is the model's hidden size.
_OUTSIDE = re.compile(rf"(?:(?:{'|'.join(_ROOTS)})\.)*(?:embed_tokens|norm)\.weight")

# A stored matrix is read in pieces of _ROWS rows, each of which is copied, and perhaps transposed,
# in tiles of _COLUMNS columns that fit in the CPU's caches.
_ROWS, _COLUMNS = 256, 64


class OtherModelError(ValueError):
    """A directory's tensors are not those of the model that its config.json describes."""


@dataclasses.dataclass(frozen=True)
class Block:
    """The MoE block of one layer in a directory; reads and writes slices of its parameters."""

    directory: Directory
    architecture: Architecture
    fields: Mapping[str, Any]  # of `jax_ep.MoEConfig`, from config.json
    sizes: dict[str, int]  # by the letters of `jax_ep.checkpoints.architectures`
    prefix: str  # of the names of the block's tensors, such as "model.layers.3."
    tensors: Tensors  # in which the block is stored
    quantization: encodings.Quantization  # that config.json states
    # P: parameters are read as P slots, and slot s holds the stored expert s % E. None: as experts.
    num_slots: int | None = None
    # The prefix of another block, whose names and encodings a block to be added takes; None if
    # there is none.
    like: str | None = None

    def params(self) -> tuple[str, ...]:
        return tuple(param for tensor in self.tensors for param in tensor.params)

    def others(self) -> dict[str, str]:
        """Maps the names, after `prefix`, of tensors that hold no parameter to their full names."""
        return {t.name: self.prefix + t.name for t in self.tensors if not t.params}

    def axes(self, param: str) -> str:
        """Returns the letters of a parameter's axes."""
        axes = PARAMETER_AXES[param]
        return axes.replace("H", "D") if "D" in self._tensor(param).axes else axes

    def shape(self, param: str) -> tuple[int, ...]:
        """Returns the shape of a parameter; with `num_slots`, of its slots instead of experts."""
        num_matrices = self.sizes["E"] if self.num_slots is None else self.num_slots
        sizes = self.sizes | {"E": num_matrices}
        return tuple(sizes[letter] for letter in self.axes(param))

    def check_shapes(self, params: Mapping[str, Any], subject: str, hint: str = "") -> None:
        """Raises ValueError unless `params` have the block's names and shapes."""
        # The message calls them `subject`, and ends with `hint`.
        wanted = {name: self.shape(name) for name in self.params()}
        shapes = {name: value.shape for name, value in params.items()}
        if shapes != wanted:
            raise ValueError(
                f"{subject} must have the shapes of the block in {self.directory.path}, {wanted}, "
                f"but has {shapes}{hint}."
            )

    def dtype(self, param: str) -> np.dtype:
        """Returns a dtype that holds all experts' stored numbers; bfloat16 if quantized."""
        tensor = self._tensor(param)
        return jnp.result_type(*{self.open(tensor, e).dtype for e in self._experts_of(tensor)})

    def format(self, param: str) -> Format | None:
        """Returns the one quantized format of a stored parameter, or None for plain numbers."""
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
        """Returns the quantized format of `param` in `tensor`, which `encoding` has opened."""
        format = encoding.format
        letters = tensor.axes.replace("G", "").replace(" ", "")
        same_order = letters[-2:] == PARAMETER_AXES[param][-2:]
        return format if format is None or same_order else Transposed.of(format)

    def open(self, tensor: Tensor, expert: int) -> Encoding:
        """Opens a stored tensor of the block, or if each expert has one, the tensor of `expert`."""
        name = self.prefix + tensor.name.format(e=expert)
        # `open_tensor` refuses integers without scales, such as a table of experts by token id.
        if not tensor.params and jnp.issubdtype(self.directory.entry(name).dtype, jnp.integer):
            return Plain(self.directory, name)
        return open_tensor(self.directory, name, self.quantization)

    def names_of(self, tensor: Tensor) -> list[str]:
        """Returns the full names of a tensor, one for each expert or one for all."""
        return [self.prefix + tensor.name.format(e=e) for e in self._experts_of(tensor)]

    def stored_shape(self, tensor: Tensor) -> tuple[int, ...]:
        return tuple(_size(token, self.sizes) for token in tensor.axes.split())

    def check(self) -> None:
        """Raises OtherModelError unless all tensors of the block are there, in shape, and known."""
        directory, prefix, models = self.directory, self.prefix, self.architecture.models
        for tensor in self.tensors:
            wanted = self.stored_shape(tensor)
            for name, expert in zip(self.names_of(tensor), self._experts_of(tensor), strict=True):
                if not encodings.is_stored(directory, name):
                    raise OtherModelError(
                        f"{directory.path} must hold {name} of shape {wanted}, as {models} do, but "
                        "does not."
                    )
                shape = self.open(tensor, expert).shape
                # A tensor that holds no parameter (`others`) may have any shape.
                if tensor.params and shape != wanted:
                    raise OtherModelError(
                        f"{name} in {directory.path} must have shape "
                        f"{wanted}, [{tensor.axes.replace(' ', ', ')}] as {CONFIG} says, but has "
                        f"{shape}."
                    )
        # Experts that the router can choose, such as LongCat-Flash's identity experts.
        without_weights = range(self.sizes["E"], self.sizes["R"])
        unused = {
            prefix + name.format(e=expert)
            for name in self.architecture.unused
            for expert in without_weights
        }
        unknown = set(self.names_in_its_modules()) - unused.union(self.stored())
        if unknown:
            raise OtherModelError(
                f"{directory.path} holds {min(unknown)}, which {models} do not have in an MoE "
                f"block ({len(unknown)} such tensors), so its meaning is not known."
            )

    def names_in_its_modules(self) -> list[str]:
        """Lists the directory's tensors in the modules that hold the block, such as "mlp."."""
        # They are the block's, its scales, or of another model: nothing else is in these modules.
        tensors: list[Tensor] = []
        for item in self.architecture.tensors:
            tensors += itertools.chain(*item.layouts) if isinstance(item, OneOf) else [item]
        begins = tuple(f"{self.prefix}{tensor.name.partition('.')[0]}." for tensor in tensors)
        return [name for name in self.directory.files if name.startswith(begins)]

    def check_belongs(self) -> None:
        """Raises OtherModelError if the directory, which lacks the block, holds another model."""
        directory, models = self.directory, self.architecture.models
        if found := self.names_in_its_modules():
            raise OtherModelError(
                f"{directory.path} holds {min(found)}, which {models} do not have in a layer "
                "without an MoE block."
            )
        # A router's name of another architecture, or another hidden size, shows another model.
        routers = {_gate(row) for row in architectures.TABLE} - {_gate(self.architecture)}
        for name in directory.files:
            layer = _LAYER.match(name)
            if layer and name[layer.end() :] in routers:
                raise OtherModelError(f"{directory.path} holds {name}, which {models} do not have.")
            # A partial download may lack the file.
            if _OUTSIDE.fullmatch(name) and (directory.path / directory.files[name]).exists():
                shape = directory.entry(name).shape
                wanted = self.sizes.get("D", self.sizes["H"])
                if shape[-1:] != (wanted,):
                    raise OtherModelError(
                        f"{name} in {directory.path} must have {wanted} columns, as {CONFIG} says, "
                        f"but has shape {shape}."
                    )
        if self.like is not None:
            # A partial download lacks files; the tensors that it has are the model's.
            with contextlib.suppress(FileNotFoundError):
                dataclasses.replace(self, prefix=self.like, like=None).check()

    def _tensor(self, param: str) -> Tensor:
        return next(tensor for tensor in self.tensors if param in tensor.params)

    def _experts_of(self, tensor: Tensor) -> range:
        """Returns the experts with a stored tensor of their own; only 0 if one has all of them."""
        return range(self.sizes["E"] if "{e}" in tensor.name else 1)

    def read(self, param: str, index: Index, like: Any, done: Callable[[int], None]) -> Parameter:
        """Reads the slice `index` of a parameter in the form of `like`, and no unneeded bytes.

        `like` is a `jax.ShapeDtypeStruct`, or a `QuantizedArray` of them: then the slice has whole
        blocks, and numbers that are stored in its format are not quantized again. `done` is called
        with numbers of bytes that have been read.
        """
        tensor, axes, shape = self._tensor(param), self.axes(param), self.shape(param)
        # By the letters of the axes.
        slices = {
            letter: slice(*part.indices(size)[:2])
            for letter, part, size in zip(axes, index, shape, strict=True)
        }
        out = jax.tree.map(lambda part: _empty(part.shape, part.dtype), like)

        def read_part(slot: int | None) -> None:
            # Fills the part of a slot in `out`; None: all of `out`, which has no slots.
            of_slot, into = slices, out
            if slot is not None:
                expert = slot % self.sizes["E"]
                of_slot = slices | {"E": slice(expert, expert + 1)}
                into = _entry(out, slot - slices["E"].start)
            self._read_into(into, tensor, param, of_slot)
            done(sum(array.nbytes for array in jax.tree.leaves(into)))

        is_whole = self.parts(tensor) == [None]
        for_each(read_part, [None] if is_whole else range(slices["E"].start, slices["E"].stop))
        return out

    def _read_into(
        self, into: Parameter, tensor: Tensor, param: str, slices: Mapping[str, slice]
    ) -> None:
        """Reads a part of a parameter, `slices` by the letters of its axes, into an array."""
        # If the tensor is read expert by expert, the part has one expert, and `into` no axis E.
        encoding = self.open(tensor, slices["E"].start if "E" in slices else 0)
        letters = self.axes(param)[-into.ndim :]
        stored_index, stored_letters = _place(tensor, param, slices, self.sizes)
        if not isinstance(into, QuantizedArray):
            # A view in the order of the stored axes, which `_copy` fills.
            _copy(encoding, stored_index, _in_order(into, letters, stored_letters))
            return
        is_same = self._format(encoding, tensor, param) == into.format
        if isinstance(encoding, Blockwise) and is_same:
            parts = encoding.read_parts(stored_index)
        else:
            numbers = encoding.read(stored_index).astype(np.float32)
            # Drops any stored axis of experts, which has one entry here.
            numbers = numbers.reshape(numbers.shape[-2:])
            is_transposed = stored_letters[-2:] != letters[-2:]
            parts = into.format.encode(numbers.T if is_transposed else numbers)
        for array, values in zip(jax.tree.leaves(into), parts, strict=True):
            array[...] = values.reshape(array.shape)

    def open_others(self) -> dict[str, Encoding]:
        """Opens the tensors of `others`, by their names after `prefix`."""
        return {t.name: self.open(t, 0) for t in self.tensors if not t.params}

    def write(
        self, params: Mapping[str, Parameter], into: Directory, others: Mapping[str, np.ndarray]
    ) -> None:
        """Writes the parameters and the tensors of `others` to a directory that has the tensors."""
        # A `QuantizedArray` in the stored format is written with its own values and scales; another
        # is dequantized and encoded like the tensor.
        block = dataclasses.replace(self, directory=into)
        for tensor in self.tensors:
            if tensor.name in others:
                array = others[tensor.name]
                block.open(tensor, 0).write((slice(None),) * array.ndim, array)
            if not tensor.params:
                continue

            def write_part(expert: int | None, tensor: Tensor = tensor) -> None:
                arrays = {param: _entry(params[param], expert) for param in tensor.params}
                block.write_part(tensor, arrays, expert)

            for_each(write_part, self.parts(tensor))

    def parts(self, tensor: Tensor) -> list[int | None]:
        """Lists the experts of a tensor, which are read or written one by one; [None]: at once."""
        by_expert = PARAMETER_AXES[tensor.params[0]][0] == "E"
        return list(range(self.sizes["E"])) if by_expert else [None]

    def write_part(
        self, tensor: Tensor, arrays: Mapping[str, Parameter], expert: int | None
    ) -> None:
        """Writes one expert's part of a stored tensor, or the whole tensor if `expert` is None."""
        # `arrays` has the tensor's parameters by name; with `expert`, this expert's, without E.
        encoding = self.open(tensor, expert or 0)
        if isinstance(encoding, Blockwise) and all(
            getattr(array, "format", None) == self._format(encoding, tensor, param)
            for param, array in arrays.items()
        ):
            self._write_quantized(encoding, tensor, arrays, expert)
            return
        arrays = {
            param: array.dequantize(np.float32) if isinstance(array, QuantizedArray) else array
            for param, array in arrays.items()
        }
        # The part to write, `values`, is like a tensor of one expert: its parameters are joined
        # before they are encoded, because a block may have numbers of both.
        sizes = self.sizes if expert is None else self.sizes | {"E": 1}
        whole = {letter: slice(0, size) for letter, size in sizes.items()}
        shape = tuple(_size(token, sizes) for token in tensor.axes.split())
        values = np.empty(shape, arrays[tensor.params[0]].dtype)
        for param, array in arrays.items():
            part, stored_letters = _place(tensor, param, whole, sizes)
            array = _in_order(array, self.axes(param)[-array.ndim :], stored_letters)
            values[part] = array.reshape(values[part].shape)
        # Experts follow each other along an axis E or EF; other axes are written whole.
        region = tuple(
            slice((expert or 0) * n, (expert or 0) * n + n) if token[0] == "E" else slice(0, n)
            for token, n in zip(tensor.axes.split(), shape, strict=True)
        )
        encoding.write(region, values)

    def _write_quantized(
        self, encoding: Blockwise, tensor: Tensor, arrays: Mapping[str, Any], expert: int | None
    ) -> None:
        """Writes as `write_part`: values and scales of arrays in the tensor's own format."""
        slices = {letter: slice(0, size) for letter, size in self.sizes.items()}
        if expert is not None:
            slices["E"] = slice(expert, expert + 1)
        for param, array in arrays.items():
            stored_index, _ = _place(tensor, param, slices, self.sizes)
            # An expert's array lacks the tensor's axis E.
            lead = (None,) * (len(stored_index) - array.ndim)
            encoding.write_parts(stored_index, array.values[lead], array.scales[lead])

    def new_tensors(
        self, dtypes: Mapping[str, np.dtype], others: Mapping[str, np.ndarray] = {}
    ) -> TensorTypes:
        """Returns the dtype and shape of each tensor, scales included, of a block to be added."""
        # `dtypes` has the parameters' dtypes by name, and `others` the tensors of `load_others`.
        stored: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
        for tensor in self.tensors:
            if not tensor.params:
                if (array := others.get(tensor.name)) is not None:
                    stored[self.prefix + tensor.name] = array.dtype, array.shape
                continue
            shape = self.stored_shape(tensor)
            for name in self.names_of(tensor):
                scale_dtype = self._new_scale_dtype(tensor, name.removeprefix(self.prefix))
                if name.endswith(BLOCKS):
                    stored |= encodings.mxfp4_tensors(name, shape)
                elif scale_dtype is not None:
                    stored |= encodings.float8_tensors(
                        name, shape, self.quantization.block, scale_dtype
                    )
                else:
                    stored[name] = dtypes[tensor.params[0]], shape
        return stored

    def _new_scale_dtype(self, tensor: Tensor, name: str) -> np.dtype | None:
        """Returns the dtype of the scales of a new tensor; None if it will not be float8."""
        # The new tensor takes the encoding of the tensor of this name in the block `self.like`.
        counterpart = None
        if self.like is not None and encodings.is_stored(self.directory, self.like + name):
            counterpart = open_tensor(self.directory, self.like + name, self.quantization)
        # Refuses encodings that are read, but not written.
        if isinstance(counterpart, Scaled) or (
            tensor.params[0] in MATRICES and self.quantization.method not in (None, *WRITTEN)
        ):
            raise ValueError(
                f"an MoE block can only be added to a directory that holds experts as plain "
                f"numbers, or as float8 or MXFP4 that are written, but {self.directory.path} has "
                f"quant_method {self.quantization.method!r} and another quantization."
            )
        if counterpart is not None:
            format = counterpart.format
            return format.scale_dtype if isinstance(format, Float8) else None
        if tensor.params[0] in MATRICES and self.quantization.is_float8(self.prefix + name):
            return np.dtype(np.float32)  # as in published models
        return None

    def stored(self) -> list[str]:
        """Returns the full names of all tensors in which the block is stored, scales included."""
        return [
            name
            for tensor in self.tensors
            for expert in self._experts_of(tensor)
            for name in self.open(tensor, expert).stored
        ]


def open_block(path: str | os.PathLike[str] | Directory, layer: int) -> Block:
    """Finds the MoE block of a layer in the directory `path`, and checks its tensors."""
    directory = path if isinstance(path, Directory) else Directory(path)
    keys = look_up(directory.path, layer)
    prefix = _find_prefix(directory, keys, layer)
    if prefix is None:
        raise ValueError(_not_found(directory, keys))
    block = _block(directory, prefix, keys)
    block.check()
    return block


def plan_block(path: str | os.PathLike[str], layer: int, *, replaces: bool = False) -> Block | None:
    """Makes the `Block` of a layer that a directory lacks, in order to add it to the directory.

    With `replaces`, the block takes the place of what the directory holds for this layer, and takes
    no names and encodings from its other blocks. Returns None if the directory has the block.
    """
    directory = Directory(path, may_be_empty=True)
    keys = look_up(directory.path, layer)
    prefix = _find_prefix(directory, keys, layer)
    if prefix is not None:
        return _block(directory, prefix, keys) if replaces else None
    like = None
    # The prefix is that of the nearest MoE block, else of the nearest layer, else of the published
    # model, with this layer's number.
    blocks, _ = _routers(directory, keys)
    layers = [found for name in directory.files if (found := _LAYER.match(name))]
    if blocks and not replaces:
        nearest = min(blocks, key=lambda number: abs(number - layer))
        prefix = like = _find_prefix(directory, keys, nearest)
    elif layers:
        prefix = min(layers, key=lambda found: abs(int(found[2]) - layer))[0]
    else:
        prefix = f"{keys.root}{layer}."
    assert prefix is not None
    renumbered = _LAYER.sub(rf"\g<1>{layer}\g<3>", prefix, count=1)
    block = _block(directory, renumbered, keys, like)
    if not replaces:
        block.check_belongs()
    return block


def new_block(
    config: Mapping[str, Any], layer: int, path: Path, others: Collection[str] = ()
) -> Block:
    """Makes the `Block` of a layer of a model to be written, whose config.json is `config`."""
    # `path` is the directory that errors name. `others` are names of tensors to be written that are
    # no parameters of a layer. A block may have some of them, in one of several layouts.
    keys = look_up(path, layer, config)
    # Lists only `others`, from which `_choose_tensors` sees the block's layout, and nothing that
    # `path` holds now: `path`/new holds nothing.
    directory = Directory(path / "new", may_be_empty=True)
    directory.path, directory.files = path, dict.fromkeys(others, "a file to be written")
    return _block(directory, f"{keys.root}{layer}.", keys)


def moe_layers(directory: Directory) -> list[int]:
    """Returns the numbers of the layers of a directory that have an MoE block, in order."""
    return sorted(_routers(directory, look_up(directory.path, 0))[0])


def layer_of(name: str) -> int | None:
    """Returns the number of the decoder layer that a tensor belongs to by its name, or None."""
    found = _LAYER.match(name)
    return None if found is None else int(found[2])


def _routers(directory: Directory, keys: Keys) -> tuple[dict[int, list[str]], list[str]]:
    """Returns the MoE blocks' prefixes by layer, and the routers' names without a known layer."""
    blocks: dict[int, list[str]] = {}
    others = []
    gate = _gate(keys.row)
    # Roots of other decoders, whose layers have the same numbers and are skipped.
    decoders = _DECODERS - {keys.root.partition(".")[0]}
    for name in directory.files:
        if name.partition(".")[0] in decoders:
            continue
        if name == gate or name.endswith("." + gate):
            prefix = name.removesuffix(gate)
            if found := _LAYER.fullmatch(prefix):
                blocks.setdefault(int(found[2]), []).append(prefix)
            else:
                others.append(name)
    return blocks, others


def _find_prefix(directory: Directory, keys: Keys, layer: int) -> str | None:
    """Returns the prefix of a layer's MoE block; None without a block, ValueError for several."""
    prefixes = _routers(directory, keys)[0].get(layer, [])
    if len(prefixes) > 1:
        names = ", ".join(sorted(prefix + _gate(keys.row) for prefix in prefixes))
        raise ValueError(
            f"layer {layer} of {directory.path} must have one MoE block, but has {len(prefixes)}: "
            f"{names}."
        )
    return prefixes[0] if prefixes else None


def _not_found(directory: Directory, keys: Keys) -> str:
    """Returns the error message for a layer without an MoE block, with names of stored tensors."""
    gate, layer = _gate(keys.row), keys.layer
    blocks, others = _routers(directory, keys)
    message = (
        f"layer {layer} of {directory.path} must have an MoE block, with a tensor "
        f"{keys.root}{layer}.{gate}, but has none; "
        + (f"layers {sorted(blocks)} have one." if blocks else "no layer has one.")
    )
    if not blocks:
        module = gate.removesuffix("weight")
        others = others or [name for name in directory.files if module in name]
        others = others or list(directory.files)
    if others:
        message += (
            f" Tensors there are {', '.join(sorted(others)[:3])}: names must be "
            f"<root>layers.{layer}.{gate}, with a root that is empty or made of "
            f"{', '.join(part + '.' for part in _ROOTS)}; rename the tensors, or save the model "
            "merged and without what wraps it."
        )
    return message


def _block(directory: Directory, prefix: str, keys: Keys, like: str | None = None) -> Block:
    """Makes the `Block` whose tensors' names begin with `prefix`, as config.json describes it."""
    row = keys.row
    quantization = quantization_of(keys.config, keys.file.parent)
    fields = {field: keys.field(field, key) for field, key in row.fields.items()}
    # An axis without a key in `row.sizes` has size 0.
    sizes = {letter: 0 for axes in PARAMETER_AXES.values() for letter in axes} | {"1": 1}
    sizes |= {letter: keys.integer(key) for letter, key in row.sizes.items()}
    sizes["R"] = sizes["E"] + fields.get("identity_experts", 0)
    return Block(
        directory=directory,
        architecture=row,
        fields={**row.fixed, **fields, "num_experts": sizes["E"]},
        sizes=sizes,
        prefix=prefix,
        tensors=_choose_tensors(directory, like or prefix, sizes, keys, quantization),
        quantization=quantization,
        like=like,
    )


def _gate(row: Architecture) -> str:
    """Returns the name, without prefix, of the router's weights, which every MoE block has."""
    assert isinstance(row.tensors[0], Tensor)
    return row.tensors[0].name


def _choose_tensors(
    directory: Directory,
    prefix: str,
    sizes: Mapping[str, int],
    keys: Keys,
    quantization: encodings.Quantization,
) -> Tensors:
    """Returns the tensors that an MoE block must have, in one layout of each `OneOf`."""
    # It is the layout in the directory, and for a new block the first that suits the quantization.

    def is_there(layout: Tensors) -> bool:
        return encodings.is_stored(directory, prefix + layout[0].name.format(e=0))

    def has_shapes(layout: Tensors) -> bool:
        # Whether the stored shapes are those of the layout's axes. A partial download may lack a
        # file, and `is_there` has found the first tensor only: then KeyError is raised.
        with contextlib.suppress(FileNotFoundError, KeyError):
            return all(
                open_tensor(directory, prefix + tensor.name.format(e=0), quantization).shape
                == tuple(_size(token, sizes) for token in tensor.axes.split())
                for tensor in layout
            )
        return False

    def suits_method(layout: Tensors) -> bool:
        # MXFP4 needs names that end in BLOCKS, and float8 a tensor for each expert.
        name = layout[0].name
        if name.endswith(BLOCKS) or quantization.method == "mxfp4":
            return name.endswith(BLOCKS) and quantization.method == "mxfp4"
        return quantization.method is None or "{e}" in name

    tensors: list[Tensor] = []
    for item in keys.row.tensors:
        if isinstance(item, Tensor):
            tensors.append(item)
            continue
        there = [layout for layout in item.layouts if is_there(layout)]
        if len(there) > 1:  # layouts whose tensors have the same names
            there = [layout for layout in there if has_shapes(layout)] or there
        suitable = [layout for layout in item.layouts if suits_method(layout)]
        tensors += (there or suitable or item.layouts)[0]
    # Tensors with an axis of size 0 do not exist.
    return tuple(
        tensor
        for tensor in tensors
        if all(_size(token, sizes) for token in tensor.axes.split())
        and (not tensor.where or keys.value(tensor.where))
    )


def _size(token: str, sizes: Mapping[str, int]) -> int:
    """Returns the size of an axis of a stored tensor from its letters: for "GF", 2 * F."""
    return math.prod(2 if letter == "G" else sizes[letter] for letter in token)


def _place(
    tensor: Tensor, param: str, slices: Mapping[str, slice], sizes: Mapping[str, int]
) -> tuple[Index, str]:
    """Finds the slice of a stored tensor that holds a slice of a parameter."""
    # `slices` and `sizes` have the slices and the sizes of the parameter's axes, by their letters.
    # Returns a slice for each axis of the tensor, and the letters of its axes without G.
    letters, index = "", []
    # An axis with G has two parameters, of which this is number g: they follow each other in "GF",
    # and alternate in "FG". In "E GF H", wi_1 (g = 1) of expert 2 is [2:3, F:2 * F, 0:H].
    g = tensor.params.index(param)
    for token in tensor.axes.split():
        letter = token.replace("G", "")
        # The parameter lacks an axis "1" of the tensor, which has one element.
        part = slices.get(letter, slice(0, 1))
        if letter == "EF":  # the slice has one expert
            first = slices["E"].start * sizes["F"]
            part = slice(first + slices["F"].start, first + slices["F"].stop)
        if token[0] == "G":
            part = slice(g * sizes[letter] + part.start, g * sizes[letter] + part.stop)
        elif token[-1] == "G":
            part = slice(2 * part.start + g, 2 * part.stop - 1 + g, 2)
        index.append(part)
        letters += letter
    return tuple(index), letters


def _in_order(array: np.ndarray, axes: str, letters: str) -> np.ndarray:
    """Transposes an array with axes `axes` to the order of `letters`, some of which it may lack."""
    return array.transpose([axes.index(letter) for letter in letters if letter in axes])


def _copy(source: Encoding, index: Index, into: np.ndarray) -> None:
    """Reads a slice of a stored tensor, decoded and cast, into an array in its axis order."""
    # `into` lacks the tensor's axes before the last two, of which the slice has one entry.
    if into.ndim < 2:
        into[...] = source.read(index).reshape(into.shape)
        return
    row_axis = len(index) - 2
    start, step = index[row_axis].start, index[row_axis].step or 1
    for first in range(0, into.shape[0], _ROWS):
        last = min(first + _ROWS, into.shape[0])
        # The stored rows of this piece; a step of 2 skips the other parameter of "FG".
        part = slice(start + first * step, start + (last - 1) * step + 1, step)
        values = source.read((*index[:row_axis], part, *index[row_axis + 1 :]))
        values = values.reshape(last - first, -1).astype(into.dtype, copy=False)
        for column in range(0, into.shape[1], _COLUMNS):
            tile = slice(column, column + _COLUMNS)
            into[first:last, tile] = values[:, tile]


def _entry(array: Parameter, i: int | None) -> Any:
    """Returns a view of `array[i]`, also of a `QuantizedArray`; None: the whole array."""
    return array if i is None else jax.tree.map(lambda part: part[i], array)


def for_each(function: Callable[[Any], None], items: Sequence[Any]) -> None:
    """Calls `function` with each item, in up to 8 threads, to bound memory; NumPy frees the GIL."""
    if len(items) == 1:
        function(items[0])
        return
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(function, items))


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocates an uninitialized array, aligned to 64 bytes for XLA to use it without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + size].view(dtype).reshape(shape)
