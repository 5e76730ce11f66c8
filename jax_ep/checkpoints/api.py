"""Loads one layer's MoE block (router and experts) of a published model, and writes it back."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jax_ep import checks
from jax_ep.checkpoints.architectures import PARAMETER_AXES
from jax_ep.checkpoints.block import Block, OtherModelError, open_block, plan_block
from jax_ep.checkpoints.safetensors import Directory, adding, rewriting
from jax_ep.checks import as_axes, as_dtype_of_arrays
from jax_ep.formats import FLOAT8_MATRICES, MXFP4, Format, QuantizedArray, Transposed
from jax_ep.moe.call_checks import check_placement
from jax_ep.moe.config import MoEConfig, check_compute_dtype, check_config
from jax_ep.moe.layer import moe_layer
from jax_ep.moe.lora import init_lora, merge_lora
from jax_ep.moe.params import LOGICAL_AXES, MATRICES, MoEParams, ParameterOptions
from jax_ep.nnx import MoE, variables_of
from jax_ep.placement.table import Placement
from jax_ep.placement.weights import ADAPTERS, ROUTED_WEIGHTS, to_experts
from jax_ep.runtime import jax_compat

# Called with the bytes loaded so far, and the bytes to load in total.
Progress = Callable[[int, int], None]

PathLike = str | os.PathLike[str]

# See `load_moe_params`.
Quantized = Literal["keep", "float8", "mxfp4"] | Format | None
NAMED_FORMATS: dict[Any, Format] = {"float8": FLOAT8_MATRICES, "mxfp4": MXFP4}


def load_moe_params(
    directory: PathLike,
    layer: int,
    *,
    mesh: Mesh | None = None,
    param_dtype: Any = None,
    quantized: Quantized = None,
    partial: bool = False,
    progress: Progress | None = None,
    **fields: Any,
) -> tuple[MoEConfig, MoEParams]:
    """Loads the configuration and parameters of one layer's MoE block.

    Files are memory-mapped. A process reads only the shards of its own devices, and holds at most
    one of them in memory besides the results.

    Args:
        directory: a directory as published, with config.json and safetensors files.
        layer: the number of the decoder's layer, from 0.
        mesh: the mesh over which to spread the experts (along `expert_axis`) and their hidden width
            F (along `tensor_axis`), and under which the layer is called: `jax.set_mesh(mesh)`.
            None: the ambient mesh, or else one device.
        param_dtype: the dtype of the parameters, floating and of 16 bits or more; the selection
            bias is always float32. None: the stored dtype, or bfloat16 for stored float8 and MXFP4.
            Quantized parameters dequantize to it. Give float32 to train them: bfloat16 parameters
            lose updates below 1/512 of a value.
        quantized: the matrices that become `jax_ep.QuantizedArray` objects, which have no gradient.
            None: none. "keep": those of routed and shared experts that the files hold as float8 or
            MXFP4, with the same bytes. "float8" (`jax_ep.formats.FLOAT8_MATRICES`), "mxfp4"
            (`jax_ep.formats.MXFP4`) or another `jax_ep.Format`: the routed experts', in this format
            stored as [out, in] (`jax_ep.formats.Transposed`), with the files' bytes if they fit.
        partial: whether the block may have tensors that the layer does not hold, and that
            `load_others` returns.
        progress: called as progress(bytes loaded, bytes to load), both of this process. None draws
            a progress bar on standard error if that is a terminal.
        fields: fields of `jax_ep.MoEConfig` to set or to change, such as `expert_axis`. With
            `num_slots`, slot s holds a copy of expert s % E (`Placement.in_order`).

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the model is not supported; a tensor is missing, misshapen or unknown; a field
            or `quantized` does not suit the block; or the mesh does not divide it.
        TypeError: an argument has the wrong type, or a keyword is no field of `jax_ep.MoEConfig`.
    """
    check_arguments(mesh, param_dtype, quantized)
    planned = plan_load(Directory(directory), layer, mesh, param_dtype, quantized, fields, partial)
    planned.check_call()
    total = sum(array.num_bytes() for array in planned.arrays.values())
    counter = Counter(total, progress or print_progress)
    loaded = {name: array.load(counter) for name, array in planned.arrays.items()}
    return planned.config, MoEParams.of(**loaded)


def check_arguments(mesh: Any, param_dtype: Any, quantized: Any) -> None:
    """Raises TypeError for arguments of `load_moe_params` that are not of their type."""
    if param_dtype is not None:
        as_dtype_of_arrays("param_dtype", param_dtype)
        hint = '; quantized="float8" holds experts as float8'
        check_compute_dtype(param_dtype, hint, name="param_dtype")
    if mesh is not None:
        checks.check_mesh(mesh)
    is_name = isinstance(quantized, str) and quantized in ("keep", *NAMED_FORMATS)
    if not (quantized is None or is_name or isinstance(quantized, Format)):
        raise TypeError(
            'quantized must be None, "keep", "float8", "mxfp4" or a jax_ep.Format, but is '
            f"{checks.described(quantized)}."
        )


@dataclasses.dataclass(frozen=True)
class PlannedArray:
    """How an array is to be loaded, shard by shard."""

    read: Callable[..., Any]  # (slices of the axes, their `struct`, counter) -> a part of the array
    shape: tuple[int, ...]
    sharding: Sharding
    dtype: np.dtype  # of the array; with a format, the one that it dequantizes to
    format: Format | None = None  # None: it does not become a `QuantizedArray`

    def struct(self, shape: tuple[int, ...]) -> Any:
        """Returns the array, or a part of shape `shape`, as `jax.ShapeDtypeStruct` leaves."""
        format, dtype = self.format, self.dtype
        if format is None:
            return jax.ShapeDtypeStruct(shape, dtype)
        values: Any = jax.ShapeDtypeStruct(format.values_shape(shape), format.dtype)
        scales: Any = jax.ShapeDtypeStruct(format.scales_shape(shape), format.scale_dtype)
        return QuantizedArray(values, scales, format, dtype)

    def _shards(self) -> dict[tuple[tuple[int, int], ...], list[jax.Device]]:
        """Maps each shard, (start, stop) for each axis, to devices of this process that hold it."""
        # Replicas have equal bounds. Slices could not be the keys, since Python 3.11 hashes none.
        devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
        for device, index in self.sharding.addressable_devices_indices_map(self.shape).items():
            assert index is not None
            bounds = tuple(part.indices(n)[:2] for part, n in zip(index, self.shape, strict=True))
            devices.setdefault(bounds, []).append(device)
        return devices

    def num_bytes(self) -> int:
        """Returns the bytes of all shards that this process loads."""
        parts = jax.tree.leaves(self.struct(self.sharding.shard_shape(self.shape)))
        return len(self._shards()) * sum(part.size * part.dtype.itemsize for part in parts)

    def load(self, counter: Counter) -> Any:
        """Reads this process's shards onto their devices, and makes the array of them."""
        shape, sharding, format = self.shape, self.sharding, self.format
        like = self.struct(sharding.shard_shape(shape))
        shards: list[Any] = []
        # A shard that several devices of this process hold is read once.
        for bounds, devices in self._shards().items():
            part = self.read(tuple(slice(*pair) for pair in bounds), like, counter)
            shards += jax.block_until_ready([jax.device_put(part, device) for device in devices])
            # Frees the shard's host memory before the next one is read, unless a CPU uses it.
            del part
        # The spec is of the array's axes; `Transposed` stores these in another order.
        if format is not None and isinstance(sharding, NamedSharding):
            spec = PartitionSpec(*format.stored_order(tuple(sharding.spec)))
            sharding = NamedSharding(sharding.mesh, spec)

        # Of a `QuantizedArray`, values and scales are made of the shards' values and scales.
        def make(whole: jax.ShapeDtypeStruct, *parts: jax.Array) -> jax.Array:
            return jax.make_array_from_single_device_arrays(whole.shape, sharding, list(parts))

        return jax.tree.map(make, self.struct(shape), *shards)


@dataclasses.dataclass(frozen=True)
class PlannedLoad:
    """How each parameter of a block is to be loaded, by its name."""

    block: Block
    config: MoEConfig
    arrays: dict[str, PlannedArray]
    mesh: Mesh | None  # over which the arrays are split

    def check_call(self) -> None:
        """Traces a call of the layer, so that an unsupported one raises before loading."""
        config = self.config
        params = {name: array.struct(array.shape) for name, array in self.arrays.items()}
        hidden = self.block.shape("wi_0")[1]
        x = jax.ShapeDtypeStruct((1, 1, hidden), config.dtype or params["wi_0"].dtype)
        inputs: dict[str, Any] = {}
        # Without a gate, the caller chooses the experts.
        if "gate" not in params:
            choices = (1, 1, config.num_experts_per_token)
            inputs["topk_idx"] = jax.ShapeDtypeStruct(choices, np.int32)
            inputs["topk_weights"] = jax.ShapeDtypeStruct(choices, np.float32)
        elif (router_dim := self.block.shape("gate")[0]) != hidden:
            inputs["router_x"] = jax.ShapeDtypeStruct((1, 1, router_dim), x.dtype)
        placement = None
        if config.num_slots is not None:
            sizes = {"num_experts": config.num_experts, "num_slots": config.num_slots}
            ranks = {} if self.mesh is None else self.mesh.shape
            ranks_of_axes = (ranks.get(axis, 1) for axis in as_axes(config.expert_axis))
            placement = Placement.in_order(**sizes, num_ranks=math.prod(ranks_of_axes))[0]
        # `config` may name implementations of another machine, so the call is traced with "xla",
        # which every machine has. With a host_capacity_factor, only None is allowed.
        between_hosts = config.host_capacity_factor is not None
        config = dataclasses.replace(
            config, implementation=None if between_hosts else "xla", matmul_implementation="xla"
        )
        call = functools.partial(moe_layer, config=config, placement=placement)
        with contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            jax.eval_shape(call, MoEParams.of(**params), x, **inputs)


def plan_load(
    directory: Directory,
    layer: int,
    mesh: Mesh | None,
    param_dtype: Any,
    quantized: Quantized,
    fields: dict[str, Any],
    partial: bool = False,
) -> PlannedLoad:
    """Plans what `load_moe_params` loads; raises its errors, but for those of `check_call`."""
    block = open_block(directory, layer)
    if block.others() and not partial:
        raise ValueError(
            f"partial must be True for layer {layer} of {block.directory.path}, because the layer "
            f"does not hold {', '.join(block.others().values())}: jax_ep.checkpoints.load_others "
            "returns them."
        )
    config = MoEConfig(**(dict(block.fields) | fields))
    check_config(config)
    for name in ("num_experts", "zero_experts", "identity_experts", "constant_experts"):
        if getattr(config, name) != (stored := block.fields.get(name, 0)):
            raise ValueError(
                f"{name} must be {stored}, as in the stored block, but is {getattr(config, name)}."
            )
    block = dataclasses.replace(block, num_slots=config.num_slots)
    if mesh is None:
        mesh = ambient_mesh()
    formats = _formats(block, quantized)
    arrays = {}
    for name in block.params():
        arrays[name] = PlannedArray(
            functools.partial(block.read, name),
            block.shape(name),
            _sharding(name, block, config, mesh),
            np.dtype(np.float32 if name == "bias" else param_dtype or block.dtype(name)),
            formats.get(name),
        )
        _check_blocks(name, arrays[name])
    return PlannedLoad(block, config, arrays, mesh)


def load_moe(
    directory: PathLike,
    layer: int,
    *,
    mesh: Mesh | None = None,
    param_dtype: Any = None,
    quantized: Quantized = None,
    partial: bool = False,
    progress: Progress | None = None,
    lora_rank: int = 0,
    rngs: nnx.Rngs | None = None,
    **fields: Any,
) -> MoE:
    """Loads the MoE block of one decoder layer as a Flax NNX layer, `jax_ep.nnx.MoE`.

    The other arguments and the errors are those of `jax_ep.checkpoints.load_moe_params`.

    Args:
        lora_rank: the inner size of the experts' low-rank adapters (`jax_ep.init_lora`); 0: none.
        rngs: the random number generators of the adapters; None: `nnx.Rngs(0)`.
    """
    config, params = load_moe_params(
        directory,
        layer,
        mesh=mesh,
        param_dtype=param_dtype,
        quantized=quantized,
        partial=partial,
        progress=progress,
        **fields,
    )
    if lora_rank:
        params = init_lora(params, lora_rank, (rngs or nnx.Rngs(0)).params())
    return _module(config, params)


def load_others(directory: PathLike, layer: int) -> dict[str, np.ndarray]:
    """Loads the tensors of a layer's MoE block that are no parameters of the layer.

    The caller of the layer applies them; the page "Published models" shows how. The result maps the
    name of each tensor after "layers.<layer>." to its array, as it is stored; quantized tensors
    become float32. Errors are those of `load_moe_params`.
    """
    opened = open_block(directory, layer).open_others().items()
    return {name: stored.read((slice(None),) * len(stored.shape)) for name, stored in opened}


def save_moe(
    layer_or_params: MoE | MoEParams,
    directory: PathLike,
    layer: int,
    *,
    placement: Placement | None = None,
    others: Mapping[str, jax.Array | np.ndarray] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes one layer's MoE block into a directory, in the published format.

    If the directory has the layer's block, its tensors keep their names, shapes, dtypes and
    encodings, and numbers that have not changed keep their bytes. If the directory has config.json
    but not the block, the block is written to a new file and added to the index. The page
    "Published models" says which names and encodings it gets, and how changed numbers are rounded.

    Each file is copied, changed and then replaced. Only one save at a time may write to a
    directory. A save that was killed leaves a folder .rewriting-*, which may be removed.

    Args:
        layer_or_params: the layer, or its parameters. A layer's low-rank adapters are merged into
            the experts' matrices. Arrays are on devices of this process, or replicated.
        directory: the directory that was loaded, a copy of it, or a new directory with the model's
            config.json.
        layer: the number of the decoder's layer, from 0.
        placement: the layer's `jax_ep.placement.Placement` if its experts are in slots, else None.
            An expert with several slots is saved from its first slot.
        others: the tensors that `load_others` returns, by name. None leaves those that the
            directory has as they are.
        overwrite: whether the block may be written into a directory that holds another model: the
            tensors there, or the options of the given NNX layer, differ from what config.json says.
            If tensors of this layer differ, the block takes their place in the index.

    Raises:
        FileNotFoundError, ValueError: in the cases of `load_moe_params`; if the directory holds
            another model, unless `overwrite` is True; if names or shapes of the parameters or sizes
            of the placement do not fit; or if a parameter is split over several processes.
        TypeError: `layer_or_params` is neither an NNX layer nor `MoEParams`.
    """
    given, config = _arrays_to_save(layer_or_params)
    num_slots = None if config is None else config.num_slots
    if num_slots is None and placement is not None:
        num_slots = np.shape(placement.expert_of_slot)[-1]
    block, is_new, removed = _block_to_save(directory, layer, config, overwrite)
    given_others = {name: np.asarray(array) for name, array in (others or {}).items()}
    if given_others.keys() != block.others().keys() and (is_new or given_others):
        raise ValueError(
            f"others must be the tensors {', '.join(block.others()) or '(none)'} of the block in "
            f"{block.directory.path}, but are {', '.join(given_others) or '(none)'}."
        )
    check_placement(placement, block.sizes["E"], num_slots)
    hint = "; if they have a matrix for each slot, give placement"
    dataclasses.replace(block, num_slots=num_slots).check_shapes(given, "layer_or_params", hint)
    _check_is_here(given)
    if is_new:
        dtypes = {name: value.dtype for name, value in given.items()}
        tensors = block.new_tensors(dtypes, given_others)
        files = adding(block.directory, f"model-moe-{layer:05}.safetensors", tensors, removed)
    else:
        files = rewriting(block.directory, block.stored())
    with files as into:
        params = jax.tree.map(np.asarray, given)
        params = params if placement is None else to_experts(params, placement)
        block.write(params, into, given_others)


def _block_to_save(
    directory: PathLike, layer: int, config: MoEConfig | None, overwrite: bool
) -> tuple[Block, bool, list[str]]:
    """Returns the block to write, whether it is added, and names of tensors that it replaces."""
    # `config` is that of an NNX layer, else None. See `overwrite` of `save_moe`.
    try:
        if added := plan_block(directory, layer):
            return added, True, []
        block = open_block(directory, layer)
        if config is not None and not overwrite:
            _check_options(block, config)
        return block, False, []
    except OtherModelError as error:
        if not overwrite:
            hint = "To write the block there all the same, give overwrite=True."
            raise OtherModelError(f"{error} {hint}") from None
        added = plan_block(directory, layer, replaces=True)
        assert added is not None
        return added, True, added.names_in_its_modules()


def _arrays_to_save(layer_or_params: MoE | MoEParams) -> tuple[dict[str, Any], MoEConfig | None]:
    """Returns the parameters by name, and a layer's configuration; merges a layer's adapters."""
    params = layer_or_params
    config = None
    if isinstance(layer_or_params, MoE):
        config = layer_or_params.config
        given = {name: v.get_value() for name, v in variables_of(layer_or_params).items()}
        params = merge_lora(MoEParams.of(**given), config.lora_scale)
    if not isinstance(params, MoEParams):
        raise TypeError(
            "layer_or_params must be a jax_ep.nnx.MoE or MoEParams, but is "
            f"{checks.described(params)}."
        )
    return arrays_by_name(params, "layer_or_params"), config


def arrays_by_name(params: MoEParams, subject: str) -> dict[str, Any]:
    """Returns the parameters that are not None; ValueError, about `subject`, for adapters."""
    given = {name: value for name, value in params._asdict().items() if value is not None}
    if adapters := [name for name in ADAPTERS if name in given]:
        raise ValueError(
            f"{subject} must have no adapters, which no published model has, but has "
            f"{', '.join(adapters)}: merge them with jax_ep.merge_lora."
        )
    return given


def _formats(block: Block, quantized: Quantized) -> dict[str, Format]:
    """Returns the formats of the parameters that become a `QuantizedArray`, by name."""
    quantized = NAMED_FORMATS.get(quantized, quantized)
    if isinstance(quantized, Format):
        # Matrices of routed experts are stored as [out, in], as published ones are.
        format = quantized if isinstance(quantized, Transposed) else Transposed.of(quantized)
        return {n: format for n in block.params() if n in MATRICES and n in ROUTED_WEIGHTS}
    if quantized is None:
        return {}
    # "keep": the formats in which the files hold the matrices.
    found = {name: block.format(name) for name in block.params() if name in MATRICES}
    return {name: format for name, format in found.items() if format is not None}


def _check_blocks(name: str, array: PlannedArray) -> None:
    """Raises ValueError if a sharding puts numbers that share a scale on different devices."""
    if array.format is None:
        return
    part = array.sharding.shard_shape(array.shape)
    rows, columns = array.format.block
    if part[-2] % rows or part[-1] % columns:
        raise ValueError(
            f"quantized must be None for {name} of shape {array.shape}, of which a device would "
            f"hold {part}: as {array.format.name} a device must hold whole blocks of {rows} x "
            f"{columns} numbers."
        )


def ambient_mesh() -> Mesh | None:
    """Returns the mesh of `jax.set_mesh` or of a `with mesh:` statement, or None."""
    mesh = jax.sharding.get_mesh()
    return jax_compat.mesh_of_with_statement() if mesh.empty else mesh


def _sharding(name: str, block: Block, config: MoEConfig, mesh: Mesh | None) -> Sharding:
    """Returns the sharding of a parameter on a mesh; ValueError if the ranks do not divide it."""
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    # By logical axis, the field of `config` whose mesh axes split it. `fsdp_axes` may split any.
    fields = {"exp": "expert_axis", "mlp": "tensor_axis"}
    spec = []
    logical_axes = LOGICAL_AXES[name]  # such as ("exp", "embed", "mlp")
    fsdp_axes = config.fsdp_axes_of(logical_axes)
    dims = zip(block.shape(name), PARAMETER_AXES[name], logical_axes, fsdp_axes, strict=True)
    for size, letter, logical, fsdp in dims:
        field = fields.get(logical or "", "fsdp_axes")  # which an error names
        in_field = () if field == "fsdp_axes" else as_axes(getattr(config, field) or (), field)
        axes = tuple(axis for axis in (*in_field, *fsdp) if axis in mesh.shape)
        num_ranks = math.prod(mesh.shape[axis] for axis in axes)
        if size % num_ranks:
            subject, found = f"the width of {name}", f"{block.directory.path} has {size}."
            if letter == "E" and config.num_slots is not None:
                subject, found = "num_slots", f"is {size}."
            elif letter == "E":
                least = -(-size // num_ranks) * num_ranks
                hint = f"num_slots={least} would hold copies."
                subject, found = "num_experts", f"{block.directory.path} has {size}; {hint}"
            raise ValueError(
                f"{subject} must be a multiple of the {num_ranks} ranks along {field} {axes}, but "
                f"{found}"
            )
        spec.append(axes or None)
    return NamedSharding(mesh, PartitionSpec(*spec))


class Counter:
    """Counts the bytes that several threads have loaded, and calls `report`."""

    def __init__(self, total: int, report: Progress):
        self._total, self._report = total, report
        self._loaded = 0
        self._lock = threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self._loaded += num_bytes
            self._report(self._loaded, self._total)


def print_progress(loaded: int, total: int) -> None:
    """Draws a progress bar on standard error, if it is a terminal."""
    width = 40
    # Called for each piece that is read, which is often, it draws at even percentages only.
    if sys.stderr.isatty() and (loaded == total or loaded * 100 // total % 2 == 0):
        bar = "#" * (loaded * width // total)
        end = "\n" if loaded == total else ""
        sys.stderr.write(f"\r[{bar:{width}}] {loaded / 1e6:.0f} of {total / 1e6:.0f} MB{end}")
        sys.stderr.flush()


def _module(config: MoEConfig, params: MoEParams) -> MoE:
    """Makes an NNX layer that holds `params`, without computing initial parameters first."""
    _, hidden, mlp_dim = params.wi_0.shape
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    options = dataclasses.asdict(ParameterOptions.of_params(params))
    if params.gate is None:
        options["gate_init"] = None
    elif params.gate.shape[0] != hidden:
        options["router_dim"] = params.gate.shape[0]
    # Eager sharding is off: nnx would take the parameters' logical axes, such as "exp", for axes of
    # the ambient mesh.
    with nnx.use_eager_sharding(False):
        layer = jax.eval_shape(lambda: MoE(hidden, mlp_dim, **options, **fields, rngs=nnx.Rngs(0)))
    for name, variable in variables_of(layer).items():
        variable.set_value(getattr(params, name))
    return layer


def _check_options(block: Block, config: MoEConfig) -> None:
    """Raises OtherModelError if a layer's options differ from the stored model's."""
    # Only numbers, strings and booleans are compared: a dtype does not make another model.
    for name, stored in block.fields.items():
        if isinstance(stored, bool | int | float | str) and getattr(config, name) != stored:
            raise OtherModelError(
                f"{name} of layer_or_params must be {stored!r}, as config.json of "
                f"{block.directory.path} says, but is {getattr(config, name)!r}."
            )


def _check_is_here(given: dict[str, Any]) -> None:
    """Raises ValueError unless this process has all numbers of each parameter."""
    # NumPy arrays, which are always here, lack both attributes.
    for name, value in given.items():
        if not all(
            getattr(part, "is_fully_addressable", True) or part.is_fully_replicated
            for part in jax.tree.leaves(value)
        ):
            raise ValueError(
                f"{name} must be on devices of this process to be saved; gather it first, for "
                "example with jax.experimental.multihost_utils.process_allgather."
            )
