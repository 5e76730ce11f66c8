"""Loads one layer's MoE block (router and experts) of a published model, and writes it back."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jax_ep import checks
from jax_ep.checkpoints.architectures import PARAMETER_AXES
from jax_ep.checkpoints.block import Block, open_block, plan_block
from jax_ep.checkpoints.safetensors import adding, rewriting
from jax_ep.checks import as_axes, as_dtype_of_arrays
from jax_ep.formats import Format, QuantizedArray, Transposed
from jax_ep.moe.config import MoEConfig, check_config
from jax_ep.moe.layer import moe_layer
from jax_ep.moe.params import LOGICAL_AXES, MATRICES, MoEParams, ParameterOptions
from jax_ep.moe.slots import check_placement
from jax_ep.nnx import MoE
from jax_ep.placement.table import Placement
from jax_ep.placement.weights import ROUTED_WEIGHTS, to_experts
from jax_ep.runtime import jax_compat

# A callback that is called with the bytes loaded so far and the bytes to load in total.
Progress = Callable[[int, int], None]

PathLike = str | os.PathLike[str]

# Says which parameters are loaded as a `QuantizedArray`. None: no parameter. "keep": the matrices
# that are quantized in the files. A format: the routed experts' matrices, quantized to this format.
Quantized = Literal["keep"] | Format | None


def load_moe_params(
    directory: PathLike,
    layer: int,
    *,
    mesh: Mesh | None = None,
    dtype: Any = None,
    quantized: Quantized = None,
    progress: Progress | None = None,
    **fields: Any,
) -> tuple[MoEConfig, MoEParams]:
    """Loads the configuration and parameters of one layer's MoE block.

    Files are memory-mapped, and each device's shard is read separately. A process reads only the
    experts of its own devices. Besides the results it holds at most one shard of one parameter in
    memory.

    Args:
        directory: a directory as published, with config.json and safetensors files.
        layer: the number of the decoder's layer, from 0.
        mesh: the mesh over which to spread the experts (along `expert_axis`) and their hidden width
            F (along `tensor_axis`); it becomes the `mesh` of the configuration. None: the ambient
            mesh, or else one device.
        dtype: the dtype of the parameters; the selection bias is always float32. None: the stored
            dtype, or bfloat16 for stored float8 and MXFP4. For quantized parameters, it is the
            dtype that they dequantize to.
        quantized: None: all parameters are plain arrays, dequantized if necessary. "keep": the
            matrices of routed and shared experts that the files hold as float8 or MXFP4 become
            `jax_ep.QuantizedArray` objects with the same bytes. A `jax_ep.Format`, such as
            `jax_ep.formats.FLOAT8_MATRICES` or `MXFP4`: the routed experts' matrices are quantized
            to this format while they are loaded; matrices that the files hold in this format keep
            their bytes. With a format, values and scales have the axis order [out, in], as in most
            published models, although the parameter is [in, out] (`jax_ep.formats.Transposed`).
            With "keep", they have the axis order of the files. Quantized parameters have no
            gradient.
        progress: called as progress(bytes loaded, bytes to load); both count this process only.
            None draws a progress bar on standard error if standard error is a terminal.
        fields: fields of `jax_ep.MoEConfig` to set or to change, such as `expert_axis`. If
            `num_slots` is set to P, the experts' parameters are [P, ...]. Slot s of the P then
            holds a copy of expert s % E, as in `jax_ep.placement.Placement.in_order`.

    Returns:
        The configuration and the parameters.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the architecture or quantization is unknown; the layer has no MoE block; a
            tensor of the MoE block is missing, misshapen or unknown; a field has a value that the
            MoE block or the layer does not support; the mesh does not divide the experts, slots or
            F; or `quantized` does not fit the matrices, for example if numbers that share one scale
            would be on several devices. The message names the cause.
        TypeError: `dtype` is not a floating dtype that JAX arrays can have, `mesh` is not a
            `jax.sharding.Mesh` of devices, `quantized` is neither None nor "keep" nor a format, or
            a keyword is not a field of `jax_ep.MoEConfig`.
    """
    if dtype is not None:
        as_dtype_of_arrays("dtype", dtype)
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh of devices, but is {checks.described(mesh)}."
        )
    is_keep = isinstance(quantized, str) and quantized == "keep"
    if not (quantized is None or is_keep or isinstance(quantized, Format)):
        raise TypeError(
            'quantized must be None, "keep" or a jax_ep.Format, but is '
            f"{checks.described(quantized)}."
        )
    block = open_block(directory, layer)
    config = MoEConfig(**(dict(block.fields) | {"mesh": mesh} | fields))
    check_config(config)
    for name in ("num_experts", "zero_experts", "identity_experts", "constant_experts"):
        if getattr(config, name) != (stored := block.fields.get(name, 0)):
            raise ValueError(
                f"{name} must be {stored}, as in the stored block, but is {getattr(config, name)}."
            )
    block = dataclasses.replace(block, num_slots=config.num_slots)
    if mesh is None:
        mesh = _ambient_mesh()
    shardings = {name: _sharding(name, block, config, mesh) for name in block.params()}
    dtypes = {
        name: np.dtype(np.float32 if name == "bias" else dtype or block.dtype(name))
        for name in block.params()
    }
    formats = _formats(block, quantized)
    for name, format in formats.items():
        _check_blocks(name, format, block.shape(name), shardings[name])
    _check_call(block, config, dtypes, formats)
    total = sum(
        _num_bytes(sharding.shard_shape(block.shape(name)), dtypes[name], formats.get(name))
        * len(_devices_of_parts(sharding, block.shape(name)))
        for name, sharding in shardings.items()
    )
    counter = _Counter(total, progress or _print_progress)
    params: dict[str, Any] = {
        name: _load(block, name, sharding, dtypes[name], formats.get(name), counter)
        for name, sharding in shardings.items()
    }
    return config, MoEParams.of(**params)


def load_moe(
    directory: PathLike,
    layer: int,
    *,
    mesh: Mesh | None = None,
    dtype: Any = None,
    quantized: Quantized = None,
    progress: Progress | None = None,
    **fields: Any,
) -> MoE:
    """Loads the MoE block of one decoder layer as a Flax NNX layer, `jax_ep.nnx.MoE`.

    The arguments and errors are those of `jax_ep.checkpoints.load_moe_params`.
    """
    arguments: dict[str, Any] = dict(mesh=mesh, dtype=dtype, quantized=quantized, progress=progress)
    return _module(*load_moe_params(directory, layer, **arguments, **fields))


def save_moe(
    layer_or_params: MoE | MoEParams,
    directory: PathLike,
    layer: int,
    *,
    placement: Placement | None = None,
) -> None:
    """Writes one layer's MoE block into a directory, in the published format.

    If the directory has the layer's block, its tensors are overwritten in place: they keep their
    names, shapes, dtypes and encodings, and all other tensors stay. Numbers that have not changed
    keep their bytes, so loading and saving again changes no byte of a file. Changed numbers are
    rounded to the stored dtype. In float8 and MXFP4 tensors, blocks with changed numbers get new
    scales. A `QuantizedArray` in the stored format is written with its own values and scales. Each
    file of the block is copied, changed and then replaced, which needs free space for the copies.
    Only one save at a time may write to a directory. A save that was killed leaves a folder
    .rewriting-*, which may be removed.

    If the directory has config.json but not the block, the block is written to a new file and added
    to the index. It takes the tensor names and the encodings (float8 or MXFP4) of the nearest
    other block in the directory. Without any other block, it takes the published names, and the
    encoding that `quantization_config` states. Tensors that are not encoded have the dtypes of the
    parameters.

    Args:
        layer_or_params: the layer, or its parameters. Each array is on devices of this process
            only, or replicated on all of its devices.
        directory: the directory that was loaded, a copy of it, or a new directory with the model's
            config.json.
        layer: the number of the decoder's layer, from 0.
        placement: the layer's `jax_ep.placement.Placement`, which says the expert of each slot.
            Required if slots are the first axis of the experts' parameters (`num_slots`), and None
            if experts are. An expert with several slots is saved from its first slot.

    Raises:
        FileNotFoundError, ValueError: in the cases of `load_moe_params`; if the parameters' names
            or shapes differ from the block's; if a parameter is split over devices of several
            processes; or if the placement has other numbers of experts or slots.
        TypeError: `layer_or_params` is neither an NNX layer nor `MoEParams`.
    """
    num_slots = None if placement is None else np.shape(placement.expert_of_slot)[-1]
    if isinstance(layer_or_params, MoEParams):
        fields = layer_or_params._asdict()
        given = {name: value for name, value in fields.items() if value is not None}
    elif not isinstance(layer_or_params, MoE):
        raise TypeError(
            "layer_or_params must be a jax_ep.nnx.MoE or MoEParams, but is "
            f"{checks.described(layer_or_params)}."
        )
    else:
        variables = _variables(layer_or_params)
        given = {name: variable.get_value() for name, variable in variables.items()}
        num_slots = layer_or_params.config.num_slots
    added = plan_block(directory, layer)
    block = added or open_block(directory, layer)
    check_placement(placement, block.sizes["E"], num_slots)
    _check_saved(dataclasses.replace(block, num_slots=num_slots), given)
    if added:
        tensors = block.new_tensors({name: value.dtype for name, value in given.items()})
        files = adding(block.directory, f"model-moe-{layer:05}.safetensors", tensors)
    else:
        files = rewriting(block.directory, block.stored())
    with files as into:
        params = jax.tree.map(np.asarray, given)
        block.write(params if placement is None else to_experts(params, placement), into)


def _formats(block: Block, quantized: Quantized) -> dict[str, Format]:
    """Returns the format of each parameter that is to be loaded as a `QuantizedArray`, by name.

    `quantized` is the argument of `load_moe_params`.
    """
    if isinstance(quantized, Format):
        format = quantized if isinstance(quantized, Transposed) else Transposed.of(quantized)
        return {n: format for n in block.params() if n in MATRICES and n in ROUTED_WEIGHTS}
    if quantized is None:
        return {}
    found = {name: block.format(name) for name in block.params() if name in MATRICES}
    return {name: format for name, format in found.items() if format is not None}


def _check_blocks(name: str, format: Format, shape: tuple[int, ...], sharding: Sharding) -> None:
    """Raises ValueError if sharding a quantized parameter would split a block between devices.

    The numbers of a block share one scale, so a device must hold whole blocks.

    Args:
        name: the parameter's name, for the error message.
        format: the quantized format of the parameter.
        shape: the shape of the parameter.
        sharding: the sharding of the parameter.
    """
    part = sharding.shard_shape(shape)
    rows, columns = format.block
    if part[-2] % rows or part[-1] % columns:
        raise ValueError(
            f"quantized must be None for {name} of shape {shape}, of which a device would hold "
            f"{part}: as {format.name} a device must hold whole blocks of {rows} x {columns} "
            "numbers."
        )


def _num_bytes(shape: tuple[int, ...], dtype: np.dtype, format: Format | None) -> int:
    if format is None:
        return math.prod(shape) * dtype.itemsize
    return (
        math.prod(format.values_shape(shape)) * format.dtype.itemsize
        + math.prod(format.scales_shape(shape)) * format.scale_dtype.itemsize
    )


def _check_call(
    block: Block, config: MoEConfig, dtypes: dict[str, np.dtype], formats: dict[str, Format]
) -> None:
    """Traces a call of the layer, so that an unsupported configuration raises before loading.

    `dtypes` maps the name of each parameter to its dtype, and `formats` the name of each quantized
    parameter to its format.
    """
    params: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(block.shape(name), dtype) for name, dtype in dtypes.items()
    }
    for name, format in formats.items():
        numbers = params[name]
        values: Any = jax.ShapeDtypeStruct(format.values_shape(numbers.shape), format.dtype)
        scales: Any = jax.ShapeDtypeStruct(format.scales_shape(numbers.shape), format.scale_dtype)
        params[name] = QuantizedArray(values, scales, format, numbers.dtype)
    hidden = block.shape("wi_0")[1]
    x = jax.ShapeDtypeStruct((1, 1, hidden), config.dtype or dtypes["wi_0"])
    placement = None
    if config.num_slots is not None:
        sizes = {"num_experts": config.num_experts, "num_slots": config.num_slots}
        placement = Placement.in_order(**sizes, num_ranks=1)[0]
    # `config` may name implementations that this machine lacks, if another machine will call the
    # layer. So the call is traced with "xla", which every machine has. But a `MoEConfig` with a
    # host_capacity_factor does not allow implementation="xla". It allows None, which chooses an
    # exchange that can run here.
    between_hosts = config.host_capacity_factor is not None
    config = dataclasses.replace(
        config, implementation=None if between_hosts else "xla", matmul_implementation="xla"
    )
    mesh = contextlib.nullcontext() if config.mesh is None else jax.set_mesh(config.mesh)
    with mesh:
        jax.eval_shape(
            lambda params, x: moe_layer(params, x, config, placement=placement),
            MoEParams.of(**params),
            x,
        )


def _load(
    block: Block,
    name: str,
    sharding: Sharding,
    dtype: np.dtype,
    format: Format | None,
    counter: _Counter,
) -> jax.Array | QuantizedArray:
    """Loads the parameter `name` of a block, shard by shard, as a sharded array.

    A shard that several devices of this process hold is read once.

    Args:
        block: the block.
        name: the parameter's name in `jax_ep.MoEParams`.
        sharding: the sharding of the parameter.
        dtype: the dtype of the parameter. A `QuantizedArray` dequantizes to it.
        format: the quantized format of the parameter. None: it becomes a plain array.
        counter: called with the number of bytes of each piece that has been read.
    """
    shape = block.shape(name)
    shards: list[Any] = []
    for index, devices in _devices_of_parts(sharding, shape).items():
        part = block.read(name, tuple(slice(*bounds) for bounds in index), dtype, counter, format)
        shards += jax.block_until_ready([jax.device_put(part, device) for device in devices])
        # Frees the shard's host memory before the next shard is read, unless a CPU device uses it.
        del part
    make = jax.make_array_from_single_device_arrays
    if format is None:
        return make(shape, sharding, shards)
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(*format.stored_order(tuple(sharding.spec)))
        sharding = NamedSharding(sharding.mesh, spec)
    return QuantizedArray(
        make(format.values_shape(shape), sharding, [shard.values for shard in shards]),
        make(format.scales_shape(shape), sharding, [shard.scales for shard in shards]),
        format,
        dtype,
    )


def _devices_of_parts(
    sharding: Sharding, shape: tuple[int, ...]
) -> dict[tuple[tuple[int, int], ...], list[jax.Device]]:
    """Maps each shard of an array of `shape` to the devices of this process that hold the shard.

    A shard is given by a pair (start, stop) for each axis.
    """
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        bounds = tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    return devices


def _ambient_mesh() -> Mesh | None:
    """Returns the mesh that is set by `jax.set_mesh` or a `with mesh:` statement, or None."""
    mesh = jax.sharding.get_mesh()
    return jax_compat.mesh_of_with_statement() if mesh.empty else mesh


def _sharding(name: str, block: Block, config: MoEConfig, mesh: Mesh | None) -> Sharding:
    """Returns the sharding of a parameter on a mesh.

    Experts are split over the mesh axes `config.expert_axis`, and F, the experts' hidden width,
    over `config.tensor_axis`. `config.fsdp_axes` names dimensions that are split over further mesh
    axes. If `mesh` is None, the parameter is on one device.

    Raises:
        ValueError: the number of ranks along a dimension's mesh axes does not divide the dimension.
    """
    if mesh is None:
        return SingleDeviceSharding(jax.devices()[0])
    fields = {"exp": "expert_axis", "mlp": "tensor_axis"}
    spec = []
    logical_axes = LOGICAL_AXES[name]
    dims = zip(
        block.shape(name),
        PARAMETER_AXES[name],
        logical_axes,
        config.further_axes_of(logical_axes),
        strict=True,
    )
    for size, letter, logical, further in dims:
        field = fields.get(logical or "", "fsdp_axes")
        own = () if field == "fsdp_axes" else as_axes(getattr(config, field) or (), field)
        axes = tuple(axis for axis in (*own, *further) if axis in mesh.shape)
        num_ranks = math.prod(mesh.shape[axis] for axis in axes)
        if size % num_ranks:
            what, given = f"the width of {name}", f"{block.directory.path} has {size}."
            if letter == "E" and config.num_slots is not None:
                what, given = "num_slots", f"is {size}."
            elif letter == "E":
                least = -(-size // num_ranks) * num_ranks
                what, given = "num_experts", f"{given[:-1]}; num_slots={least} would hold copies."
            raise ValueError(
                f"{what} must be a multiple of the {num_ranks} ranks along {field} {axes}, but "
                f"{given}"
            )
        spec.append(axes or None)
    return NamedSharding(mesh, PartitionSpec(*spec))


class _Counter:
    """Counts the bytes that several threads have loaded, and reports the progress.

    A thread calls the counter with the number of bytes that it has loaded. The counter adds them up
    and calls `report` with the sum so far and with `total`, the number of bytes to load.
    """

    def __init__(self, total: int, report: Progress):
        self._total, self._report = total, report
        self._loaded = 0
        self._lock = threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self._loaded += num_bytes
            self._report(self._loaded, self._total)


def _print_progress(loaded: int, total: int) -> None:
    """Draws a progress bar, of bytes, on standard error if standard error is a terminal."""
    width = 40
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
    structure = []

    def make() -> Any:
        graph, state = nnx.split(MoE(hidden, mlp_dim, **options, **fields, rngs=nnx.Rngs(0)))
        structure.append(graph)
        return state

    # Eager sharding is off: nnx would take the parameters' logical axes, such as "exp", for axes of
    # the ambient mesh.
    with nnx.use_eager_sharding(False):
        shapes = jax.eval_shape(make)
    layer = nnx.merge(structure[0], shapes)
    for name, variable in _variables(layer).items():
        variable.set_value(getattr(params, name))
    return layer


def _variables(layer: MoE) -> dict[str, nnx.Variable]:
    """Returns the NNX variables of a layer's parameters, by the names in `MoEParams`."""
    found = {name: getattr(layer, name, None) for name in MoEParams._fields}
    if layer.gate is not None:
        found |= {"gate": layer.gate.kernel, "bias": layer.gate.bias}
    return {name: variable for name, variable in found.items() if variable is not None}


def _check_saved(block: Block, given: dict[str, Any]) -> None:
    """Raises ValueError unless the parameters `given` can be saved to the block.

    Names and shapes must be those of the block. Each array must be on devices of this process only,
    or replicated on all of its devices.
    """
    wanted = {name: block.shape(name) for name in block.params()}
    shapes = {name: value.shape for name, value in given.items()}
    if shapes != wanted:
        raise ValueError(
            f"layer_or_params must have the shapes of the block in {block.directory.path}, "
            f"{wanted}, but has {shapes}; if they have a matrix for each slot, give placement."
        )
    for name, value in given.items():
        if not all(
            getattr(part, "is_fully_addressable", True) or part.is_fully_replicated
            for part in jax.tree.leaves(value)
        ):
            raise ValueError(
                f"{name} must be on devices of this process to be saved; gather it first, for "
                "example with jax.experimental.multihost_utils.process_allgather."
            )
