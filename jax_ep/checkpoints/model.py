"""Loads all weights of a published model at once, and writes a model as a published directory."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jax_ep import checks
from jax_ep.checkpoints import api, safetensors
from jax_ep.checkpoints.api import Counter, PathLike, PlannedArray, Progress, Quantized
from jax_ep.checkpoints.architectures import Tensor
from jax_ep.checkpoints.block import Block, for_each, layer_of, moe_layers, new_block
from jax_ep.checkpoints.config import CONFIG, quantization_of, read_config
from jax_ep.checkpoints.encodings import PACKED, Encoding, belongs_to_quantized, open_tensor
from jax_ep.checkpoints.safetensors import INDEX, ONE_FILE, Directory, Index
from jax_ep.formats import QuantizedArray
from jax_ep.moe.config import MoEConfig
from jax_ep.moe.params import MoEParams

# Returns the sharding of a weight from its published name and its shape.
ShardingOf = Callable[[str, tuple[int, ...]], Sharding]

# The number of arrays that are read at a time. Each has a shard in the host's memory.
_READERS = 4


class PublishedModel(NamedTuple):
    """All weights of a published model.

    Attributes:
        config: the contents of config.json.
        moe_configs, moe: the configuration and the parameters of each MoE block, by the number of
            its layer.
        weights: all weights that are in no MoE block, and those in a block that the layer does not
            hold (`partial`), by their published names, in their published shapes, such as [out, in]
            for a projection.
    """

    config: dict[str, Any]
    moe_configs: dict[int, MoEConfig]
    moe: dict[int, MoEParams]
    weights: dict[str, jax.Array]


def load_model(
    directory: PathLike,
    *,
    layers: Iterable[int] | None = None,
    mesh: Mesh | None = None,
    param_dtype: Any = None,
    quantized: Quantized = None,
    partial: bool = False,
    sharding: ShardingOf | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> PublishedModel:
    """Loads all weights of a published model: every MoE block, and all other weights by name.

    Several threads read at a time. A process reads only the shards of its own devices, and holds at
    most four shards besides the results. Errors are those of `load_moe_params`.

    Args:
        directory, mesh, quantized, progress, fields: as in `jax_ep.checkpoints.load_moe_params`,
            for all MoE blocks.
        layers: the numbers of the layers to load; None: all. Weights that belong to no layer are
            loaded in any case.
        param_dtype: the dtype of all parameters, as in `jax_ep.checkpoints.load_moe_params`.
            Integers keep their dtype. Float8 weights outside of MoE blocks are dequantized.
        partial: whether MoE blocks may have tensors that the layer does not hold
            (`jax_ep.checkpoints.load_others`). They become `weights`.
        sharding: a function (name, shape) -> `jax.sharding.Sharding` for `weights`. None: they are
            replicated on the mesh.
    """
    api.check_arguments(mesh, param_dtype, quantized)
    files = Directory(directory)
    wanted = None if layers is None else set(layers)
    numbers = [n for n in moe_layers(files) if wanted is None or n in wanted]
    plans = {
        n: api.plan_load(files, n, mesh, param_dtype, quantized, fields, partial) for n in numbers
    }
    # Blocks that are planned alike need one check.
    shapes = {n: tuple(array.shape for array in p.arrays.values()) for n, p in plans.items()}
    for plan in {(p.config, shapes[n]): p for n, p in plans.items()}.values():
        plan.check_call()
    config = read_config(files.path)
    of_mesh = api.ambient_mesh() if mesh is None else mesh
    everywhere: Sharding = SingleDeviceSharding(jax.devices()[0])
    if of_mesh is not None:
        everywhere = NamedSharding(of_mesh, PartitionSpec())
    others: dict[str, PlannedArray] = {}
    opened = _open_weights(files, config, [p.block for p in plans.values()], wanted)
    for name, stored in opened.items():
        split = everywhere if sharding is None else sharding(name, stored.shape)
        is_float = jnp.issubdtype(stored.dtype, jnp.floating)
        dtype = np.dtype(param_dtype or stored.dtype) if is_float else stored.dtype
        read = functools.partial(_read_weight, stored)
        others[name] = PlannedArray(read, stored.shape, split, dtype)
    arrays = [*others.values(), *(array for p in plans.values() for array in p.arrays.values())]
    counter = Counter(sum(a.num_bytes() for a in arrays), progress or api.print_progress)
    with ThreadPoolExecutor(_READERS) as pool:
        # Yields what is loaded in the order of `arrays`: the weights, then block after block. Each
        # `zip` ends with its first argument, and leaves the rest of `loaded` to the next one.
        loaded = pool.map(lambda array: array.load(counter), arrays)
        weights = dict(zip(others, loaded, strict=False))
        moe = {
            n: MoEParams.of(**dict(zip(p.arrays, loaded, strict=False))) for n, p in plans.items()
        }
    return PublishedModel(config, {n: p.config for n, p in plans.items()}, moe, weights)


def _open_weights(
    files: Directory, config: Mapping[str, Any], blocks: list[Block], wanted: set[int] | None
) -> dict[str, Encoding]:
    """Opens the tensors that become `PublishedModel.weights`, of the `wanted` layers; None: all."""
    quantization = quantization_of(config, files.path)
    opened: dict[str, Encoding] = {}
    for block in blocks:
        opened |= {block.prefix + name: stored for name, stored in block.open_others().items()}
    in_blocks = {name for block in blocks for name in block.names_in_its_modules()}
    for name in files.files:
        layer = layer_of(name)
        is_wanted = wanted is None or layer is None or layer in wanted
        if name in in_blocks or not is_wanted:
            continue
        # Scales are read with their tensor; packed values are the tensor `base` itself.
        base = name.removesuffix(PACKED)
        if base != name or not belongs_to_quantized(files, name):
            opened[base] = open_tensor(files, base, quantization)
    return opened


def _read_weight(
    stored: Encoding, index: Index, like: jax.ShapeDtypeStruct, counter: Counter
) -> np.ndarray:
    """Reads a slice of a weight that is in no MoE block, as `PlannedArray.read`."""
    values = stored.read(index).astype(like.dtype, copy=False)
    counter(values.nbytes)
    return values


def holds_model(path: Path) -> bool:
    """Returns whether a directory has files of a model, even of one that is not complete."""
    return any(any(path.glob(pattern)) for pattern in (CONFIG, "*.safetensors*", "*.bin*"))


def save_model(
    directory: PathLike,
    config: Mapping[str, Any],
    moe: Mapping[int, MoEParams] | Sequence[MoEParams],
    weights: Mapping[str, jax.Array],
    *,
    dtype: Any = None,
    max_file_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes a model as a published directory: config.json, safetensors files and their index.

    In several processes, all of them call this function with the same arguments, and see the
    directory. A process writes the tensors that its devices hold, such as its own experts. A tensor
    of which no process holds all parts is gathered first. With `overwrite`, the old index and
    config.json are removed before the first file is replaced. The new ones are written last. So an
    interrupted call leaves the old model, or a directory that cannot be loaded.

    Args:
        directory: the directory, which is created if there is none.
        config: the contents of config.json, with a known `model_type` and no
            `quantization_config`.
        moe: the parameters of each MoE block, by the number of its layer, or in the order of the
            layers. They have a matrix for each expert, not slot; see `jax_ep.placement.to_experts`.
        weights: all other weights, by their published names; see `PublishedModel`.
        dtype: the dtype in which floating-point weights are written, except selection biases. None:
            their own; quantized matrices are dequantized.
        max_file_bytes: a file has at most so many bytes of tensors, unless one tensor has more.
        overwrite: whether the model may take the place of one that is in the directory.
        progress: as in `load_model`, of the bytes written.

    Raises:
        ValueError: the directory has files of a model, and `overwrite` is False; the architecture
            is unknown; `config` has a `quantization_config`; a parameter's name or shape is not
            that of the published block; or `weights` lacks a tensor of a block.
    """
    path = Path(directory)
    if not overwrite and holds_model(path):
        raise ValueError(f"{path} must hold no model, but does; overwrite=True replaces it.")
    if config.get("quantization_config"):
        raise ValueError(
            "config must have no quantization_config, since weights are written as numbers, but "
            f"has {config['quantization_config']!r}."
        )
    if dtype is not None:
        dtype = checks.as_dtype_of_arrays("dtype", dtype)
    layers = dict(moe) if isinstance(moe, Mapping) else dict(enumerate(moe))
    arrays = list(_stored_arrays(path, config, layers, weights, dtype))
    files = _in_files([entry for array in arrays for entry in array.entries()], max_file_bytes)
    process = jax.process_index()
    own_files = {name: group for name, group in files.items() if group[0].writer == process}
    path.mkdir(parents=True, exist_ok=True)
    scratch = path / f".writing-{process}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    # Each of these calls waits for all processes to reach it.
    multihost_utils.sync_global_devices("jax_ep.save_model: begins")
    _write_files(scratch, own_files, arrays, progress or api.print_progress)
    # The old model goes only after all processes have written the new one, and before any file of
    # the new one takes the place of an old one.
    multihost_utils.sync_global_devices("jax_ep.save_model: has written")
    old_files = _withdraw(path) if process == 0 else set()
    multihost_utils.sync_global_devices("jax_ep.save_model: moves")
    for file in own_files:
        os.replace(scratch / file, path / file)
    shutil.rmtree(scratch)
    multihost_utils.sync_global_devices("jax_ep.save_model: has moved")
    if process == 0:
        _publish(path, config, files)
        for file in old_files - set(files):
            (path / file).unlink(missing_ok=True)
    multihost_utils.sync_global_devices("jax_ep.save_model: ends")


def _write_files(
    folder: Path, files: dict[str, list[_Entry]], arrays: list[_Stored], progress: Progress
) -> None:
    """Writes this process's `files`, by file name; all processes must call it: see `_Stored`."""
    for file, entries in files.items():
        tensors = {entry.name: (entry.dtype, entry.shape) for entry in entries}
        safetensors.create(folder / file, tensors)
    index = {entry.name: file for file, entries in files.items() for entry in entries}
    # `Directory` reads this index; that of the whole model is written later.
    safetensors.write_index(folder, {"weight_map": index})
    into = Directory(folder, writable=True)
    total = sum(entry.num_bytes for entries in files.values() for entry in entries)
    counter = Counter(total, progress)
    for array in arrays:
        array.write(into, counter)


class _Entry(NamedTuple):
    """A tensor to write, and the process that writes it."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    writer: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class _Stored:
    """Arrays that are stored together: a weight, or the parameters of one tensor of a block."""

    arrays: dict[str, Any]  # by name, each perhaps a `QuantizedArray`
    dtype: np.dtype  # of the stored tensors
    names: list[str]  # of the stored tensors: of one, or of one for each expert
    shape: tuple[int, ...]  # of each stored tensor
    of_block: tuple[Block, Tensor] | None = None  # None: a weight outside of blocks

    def entries(self) -> list[_Entry]:
        writers, _ = self._writers()
        pairs = zip(self.names, writers, strict=True)
        return [_Entry(name, self.dtype, self.shape, writer) for name, writer in pairs]

    def write(self, into: Directory, counter: Counter) -> None:
        """Writes this process's tensors. All processes must call it, since some are gathered."""
        writers, shardings = self._writers()
        arrays = jax.tree.map(_gather, self.arrays, shardings)

        def write_part(expert: int | None) -> None:
            parts = {
                name: _on_host(array, expert).astype(self.dtype, copy=False)
                for name, array in arrays.items()
            }
            if self.of_block is None:
                into.write(self.names[0], (), parts[self.names[0]])
            else:
                block, tensor = self.of_block
                dataclasses.replace(block, directory=into).write_part(tensor, parts, expert)
            counter(sum(part.nbytes for part in parts.values()))

        parts = [None] if self.of_block is None else self.of_block[0].parts(self.of_block[1])
        # A tensor that has all experts has one writer, which writes their parts one by one.
        if len(writers) == 1:
            writers *= len(parts)
        pairs = zip(parts, writers, strict=True)
        for_each(write_part, [part for part, writer in pairs if writer == jax.process_index()])

    def _writers(self) -> tuple[list[int], dict[str, Any]]:
        """Returns the process that writes each tensor, and the shardings to gather arrays to."""
        # The writer has all parts of the tensor; arrays are gathered as little as this needs.
        # With a tensor for each expert, row e of the arrays goes to tensor e.
        by_row = len(self.names) > 1
        shardings = jax.tree.map(lambda array: array.sharding, self.arrays)
        # Tries the arrays as they are (None), then split along the first axis, then replicated.
        for split_axes in (None, 1, 0):
            if split_axes is not None:
                shardings = jax.tree.map(lambda s, n=split_axes: _gathered(s, n), shardings)
            leaves = zip(jax.tree.leaves(self.arrays), jax.tree.leaves(shardings), strict=True)
            holders, *of_others = [_first_holders(s, a.shape, by_row) for a, s in leaves]
            # One process must have a tensor's rows of all arrays, such as wi_0 and wi_1.
            if None not in holders and all(other == holders for other in of_others):
                return [writer for writer in holders if writer is not None], shardings
        raise AssertionError("a replicated array is whole in each process")


def _stored_arrays(
    path: Path,
    config: Mapping[str, Any],
    moe: dict[int, MoEParams],
    weights: Mapping[str, jax.Array],
    dtype: np.dtype | None,
) -> Iterator[_Stored]:
    """Yields the weights and the blocks' parameters, grouped by the tensors that store them."""

    def dtype_of(array: Any, name: str = "") -> np.dtype:
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        return np.dtype(array.dtype if dtype is None or not is_float or name == "bias" else dtype)

    for name, weight in weights.items():
        yield _Stored({name: weight}, dtype_of(weight), [name], weight.shape)
    for layer, params in moe.items():
        block = new_block(config, layer, path, weights)
        given = api.arrays_by_name(params, f"moe[{layer}]")
        block.check_shapes(given, f"moe[{layer}]")
        if missing := set(block.others().values()) - set(weights):
            raise ValueError(
                f"weights must hold {', '.join(sorted(missing))} of the MoE block moe[{layer}], as "
                "jax_ep.checkpoints.load_model returns them with partial=True, but do not."
            )
        for tensor in block.tensors:
            if not tensor.params:
                continue
            yield _Stored(
                arrays={name: given[name] for name in tensor.params},
                dtype=dtype_of(given[tensor.params[0]], tensor.params[0]),
                names=block.names_of(tensor),
                shape=block.stored_shape(tensor),
                of_block=(block, tensor),
            )


def _in_files(entries: list[_Entry], max_bytes: int) -> dict[str, list[_Entry]]:
    """Divides the tensors among files of one writer each; returns the files' tensors by name."""
    groups: list[list[_Entry]] = []
    for writer in sorted({entry.writer for entry in entries}):
        size = math.inf  # so a writer's first tensor begins a file
        for entry in (entry for entry in entries if entry.writer == writer):
            if size + entry.num_bytes > max_bytes:
                groups.append([])
                size = 0
            groups[-1].append(entry)
            size += entry.num_bytes
    return {
        f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)
    }


def _withdraw(path: Path) -> set[str]:
    """Removes index and config.json of a model, if there is one; returns its other files' names."""
    files = {ONE_FILE}
    if (path / INDEX).exists():
        files |= set(Directory(path).files.values())
    for name in (CONFIG, INDEX):
        (path / name).unlink(missing_ok=True)
    return files


def _publish(path: Path, config: Mapping[str, Any], files: dict[str, list[_Entry]]) -> None:
    """Writes the index and config.json, without which no model can be loaded."""
    total = sum(entry.num_bytes for group in files.values() for entry in group)
    weight_map = {entry.name: file for file, group in files.items() for entry in group}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    with safetensors.scratch_folder(path) as scratch:
        (scratch / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n")
        safetensors.write_index(scratch, index)
        # config.json comes last: with it and without an index, an old model of one file would load.
        for name in (INDEX, CONFIG):
            os.replace(scratch / name, path / name)


def _gathered(sharding: Sharding, split_axes: int) -> Sharding:
    """Returns a sharding that splits only the first `split_axes` axes, as `sharding` does."""
    if not isinstance(sharding, NamedSharding):
        raise ValueError(
            "arrays of several processes must have a jax.sharding.NamedSharding to be saved, but "
            f"one has {sharding}."
        )
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:split_axes]))


def _gather(array: jax.Array, sharding: Sharding) -> jax.Array:
    if array.sharding.is_equivalent_to(sharding, array.ndim):
        return array
    return jax.jit(lambda x: x, out_shardings=sharding)(array)


def _first_holders(sharding: Sharding, shape: tuple[int, ...], by_row: bool) -> list[int | None]:
    """Returns for each row the first process that has all of it; None: no process has."""
    # Without `by_row`, the whole array counts as one row.
    held: dict[int, set[tuple[tuple[int, int], ...]]] = {}  # by process: (start, stop) on each axis
    parts: Any = sharding.devices_indices_map(shape)
    for device, index in parts.items():
        box = tuple(part.indices(n)[:2] for part, n in zip(index or (), shape, strict=True))
        held.setdefault(device.process_index, set()).add(box if by_row else ((0, 1), *box))
    if not by_row:
        shape = (1, *shape)
    holders: list[int | None] = [None] * shape[0]
    # Processes are entered in descending order, so that the first one that holds a row stays.
    for process in sorted(held, reverse=True):
        # How many numbers of each row the process has. Boxes of a sharding are equal or disjoint.
        covered = np.zeros(shape[0], np.int64)
        for (first, last), *columns in held[process]:
            covered[first:last] += math.prod(stop - start for start, stop in columns)
        for row in np.flatnonzero(covered == math.prod(shape[1:])):
            holders[row] = process
    return holders


def _on_host(array: Any, row: int | None) -> np.ndarray:
    """Copies a row of an array that this process holds to the host; None: the whole array."""
    if isinstance(array, QuantizedArray):
        array = jax.tree.map(lambda part: _on_host(part, row), array)
        return np.asarray(array.dequantize(np.float32))
    out = np.empty(array.shape if row is None else array.shape[1:], array.dtype)
    # Takes one of the shards that are copies of each other; str, as Python 3.11 hashes no slices.
    for shard in {str(shard.index): shard for shard in array.addressable_shards}.values():
        data = shard.data
        place = tuple(shard.index)  # in `out`
        if row is not None:
            start, stop, _ = place[0].indices(array.shape[0])
            if not start <= row < stop:
                continue
            # The row is an array of its own: JAX keeps an array's host copy with the array. It is
            # computed on a mesh of its device, because the ambient mesh may have more.
            with jax.set_mesh(Mesh(np.array([shard.device]), ("device",))):
                data = lax.dynamic_index_in_dim(data, row - start, keepdims=False)
            place = place[1:]
        out[place] = np.asarray(data)
    return out
