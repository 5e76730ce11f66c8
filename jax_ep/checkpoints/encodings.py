"""Reads and writes tensors of published models: plain ones, float8 with scales, and MXFP4.

`Scaled` tensors, quantized otherwise, are read only. A block is the numbers of a quantized tensor
that share a scale. A block is written only if its new numbers differ from the decoded old ones, so
writing unchanged numbers changes no bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep import formats
from jax_ep.checkpoints.safetensors import Directory, Index, TensorTypes

SCALE_SUFFIX = "_scale_inv"
BLOCKS, SCALES, PACKED = "_blocks", "_scales", "_packed"

_FLOAT8 = np.dtype(jnp.float8_e4m3fn)
# The numbers of float4_e2m1, by their bits.
_FLOAT4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_FLOAT4 = np.concatenate([_FLOAT4, -_FLOAT4])


@dataclasses.dataclass(frozen=True)
class Plain:
    """A tensor of floating-point numbers that is stored without quantization."""

    directory: Directory
    name: str
    format = None  # since the numbers are not quantized

    @property
    def stored(self) -> tuple[str, ...]:
        """The names of the stored tensors that make up this tensor: the values and any scales."""
        return (self.name,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.directory.entry(self.name).shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the stored numbers, which is the default dtype of the loaded parameter."""
        return self.directory.entry(self.name).dtype

    def read(self, index: Index) -> np.ndarray:
        return self.directory.read(self.name, index)

    def write(self, index: Index, values: np.ndarray) -> None:
        """Writes `values`, cast to the stored dtype, where they differ from the stored numbers."""
        if values.dtype == self.dtype:
            self.directory.write(self.name, index, values)
            return
        # Stored numbers that were loaded in a narrower dtype, and not changed, keep their bits.
        old = self.read(index)
        changed = _differ(old, values)
        self.directory.write(self.name, index, np.where(changed, values.astype(self.dtype), old))


def _differ(old: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns where `old`, cast to the dtype of `values`, differs from `values`; NaNs are equal."""
    old = old.astype(values.dtype)
    return (old != values) & ~(np.isnan(old) & np.isnan(values))


def _check_scales(
    directory: Directory, name: str, scales: np.ndarray, used: np.ndarray | bool = True
) -> None:
    """Raises ValueError for scales of a damaged file: not finite, negative, or 0 where `used`."""
    # `used` says of each scale whether it scales a number other than 0.
    numbers = scales.astype(np.float32)
    wrong = ~np.isfinite(numbers) | (numbers < 0) | ((numbers == 0) & used)
    if wrong.any():
        raise ValueError(
            f"{name} in {directory.path / directory.files[name]} must hold scales that are finite "
            f"and above 0, but has {numbers[wrong][0]} ({wrong.sum()} of the {wrong.size} scales "
            "that were read)."
        )


@dataclasses.dataclass(frozen=True)
class Blockwise:
    """A quantized tensor of blocks of numbers that share a scale: a matrix in float8, or MXFP4.

    Float8 (DeepSeek-V3): the tensor has float8_e4m3fn values, and `<name>_scale_inv` the scales,
    [.., ceil(rows / block rows), ceil(columns / block columns)]. MXFP4 (GPT-OSS): the last axis is
    divided into G blocks of 32 numbers. `<...>_blocks` [.., G, 16] uint8 has the values, in the
    form of `jax_ep.formats.MXFP4`, and `<...>_scales` [.., G] uint8 the exponents of the scales.
    """

    directory: Directory
    name: str
    scales: str  # the name of the scales
    format: formats.Format

    @property
    def stored(self) -> tuple[str, ...]:
        return self.name, self.scales

    @property
    def _is_mxfp4(self) -> bool:
        return self.format is formats.MXFP4

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in numbers; ValueError unless each block has a scale."""
        shape, scales_shape = (self.directory.entry(name).shape for name in self.stored)
        fits_block = True
        if self._is_mxfp4:
            *lead, blocks, values_per_block = shape
            shape = (*lead, blocks * self._block[0])
            fits_block = (values_per_block,) == self._values_block
        expected = self.format.scales_shape(shape)
        if scales_shape != expected or not fits_block:
            raise ValueError(
                f"{self.scales} must have shape {expected}, a scale for each block of "
                f"{self._block} numbers of {self.name} {shape}, but has shape {scales_shape}."
            )
        return shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(jnp.bfloat16)

    def read(self, index: Index) -> np.ndarray:
        """Reads a slice of the tensor as float32; ValueError for scales of damaged files."""
        blocks, within = self._blocks(index)
        return self.format.decode(self._load_checked(blocks), np.float32)[(..., *within)]

    def write(self, index: Index, numbers: np.ndarray) -> None:
        """Encodes `numbers`, and writes the blocks of the slice `index` that they change."""
        # Each block is whole in the slice, or partial only because the tensor ends there.
        blocks, within = self._blocks(index)
        old = self._load(blocks)
        changed = _differ(self.format.decode(old, np.float32)[(..., *within)], numbers)
        if not changed.any():
            return
        # As in published checkpoints, float8 numbers are divided by their scale before rounding.
        options = {"divide": True} if isinstance(self.format, formats.Float8) else {}
        new_values, new_scales = self.format.encode(self._padded(numbers), **options)
        changed_blocks = self._any_of_block(self._padded(changed))
        # Repeats the flag of a block for each of its values.
        changed_values = np.kron(changed_blocks, np.ones(self._values_block, np.bool_))
        self._store(
            blocks,
            np.where(changed_values, new_values, old[0]),
            np.where(changed_blocks, new_scales, old[1]),
        )

    def read_parts(self, index: Index) -> tuple[np.ndarray, np.ndarray]:
        """Reads a slice of whole blocks; returns (values, scales), which `format.decode` takes."""
        return self._load_checked(self._whole_blocks(index))

    def write_parts(self, index: Index, values: np.ndarray, scales: np.ndarray) -> None:
        """Writes values and scales, as `read_parts` returns them, to a slice of whole blocks."""
        self._store(self._whole_blocks(index), values, scales)

    def _whole_blocks(self, index: Index) -> Index:
        """Converts a slice in numbers to one in blocks; ValueError unless it has whole blocks."""
        # A parameter that stays quantized has no padding, so it cannot take a partial last block.
        blocks, within = self._blocks(index)
        for axis_slice, size in zip(within, self._block, strict=True):
            # A step of 2 takes one of two parameters whose rows or columns alternate.
            if axis_slice.start or axis_slice.stop % size or axis_slice.step != 1:
                raise ValueError(
                    f"{self.name} must hold each parameter in whole blocks of {self._block} "
                    "numbers to stay quantized, but a block has numbers of several parameters, or "
                    "is partial."
                )
        return blocks

    def _blocks(self, index: Index) -> tuple[Index, list[Any]]:
        """Converts a slice in numbers to the blocks that it touches, and its slices within them."""
        block = self._block
        blocks, within = [], []
        for axis_slice, n, size in zip(
            index[-len(block) :], self.shape[-len(block) :], block, strict=True
        ):
            start, stop, step = axis_slice.indices(n)
            first = start // size
            blocks.append(slice(first, -(-stop // size)))
            within.append(slice(start - first * size, stop - first * size, step))
        return (*index[: -len(block)], *blocks), within

    @property
    def _block(self) -> tuple[int, ...]:
        """The shape of a block: (rows, columns), or only (columns,) if blocks have a single row."""
        return self.format.block[1:] if self.format.block[0] == 1 else self.format.block

    @property
    def _values_block(self) -> tuple[int, ...]:
        """The shape of a block in stored values; a value holds one number, or two in MXFP4."""
        return *self._block[:-1], self._block[-1] // self.format.numbers_per_value

    def _padded(self, array: np.ndarray) -> np.ndarray:
        """Pads the blocks that reach past the end of the tensor with zeros."""
        block = self._block
        widths = [(0, -n % size) for n, size in zip(array.shape[-len(block) :], block, strict=True)]
        if not any(after for _, after in widths):
            return array
        return np.pad(array, [(0, 0)] * (array.ndim - len(block)) + widths)

    def _any_of_block(self, flags: np.ndarray) -> np.ndarray:
        """Reduces booleans [.., rows, columns] to one per block: whether any in it is true."""
        for axis, size in enumerate(self._block, start=-len(self._block)):
            flags = np.logical_or.reduceat(flags, range(0, flags.shape[axis], size), axis=axis)
        return flags

    def _load_checked(self, blocks: Index) -> tuple[np.ndarray, np.ndarray]:
        """Reads as `_load`; ValueError for scales of float8 that no block can have."""
        values, scales = self._load(blocks)
        if not self._is_mxfp4:  # whose scales are exponents of two, and never negative or 0
            is_zero = scales.astype(np.float32) == 0
            used = is_zero.any() and self._any_of_block(values.astype(np.float32) != 0)
            _check_scales(self.directory, self.scales, scales, used)
        return values, scales

    def _load(self, blocks: Index) -> tuple[np.ndarray, np.ndarray]:
        """Reads (values, scales) of a slice of blocks, in the form of `format.encode`."""
        values = self.directory.read(self.name, self._index_of_values(blocks))
        scales = self.directory.read(self.scales, blocks).view(self.format.scale_dtype)
        if self._is_mxfp4:  # joins the axis of blocks and that of a block's values
            return values.reshape(*values.shape[:-2], -1), scales
        return self._padded(values), scales

    def _store(self, blocks: Index, values: np.ndarray, scales: np.ndarray) -> None:
        """Writes values and scales, as `_load` returns them, to a slice of blocks."""
        index = self._index_of_values(blocks)
        if self._is_mxfp4:
            values = values.reshape(*scales.shape, -1)
        else:
            # Leaves out the padding of blocks that reach past the end of the tensor.
            kept: list[Any] = [slice(each.stop - each.start) for each in index[-len(self._block) :]]
            values = values[(..., *kept)]
        self.directory.write(self.name, index, values)
        stored_dtype = self.directory.entry(self.scales).dtype
        self.directory.write(self.scales, blocks, scales.view(stored_dtype))

    def _index_of_values(self, blocks: Index) -> Index:
        """Converts a slice in blocks to one in values, which stops at the end of the tensor."""
        if self._is_mxfp4:  # whose values have an axis of blocks
            return blocks
        block = self._block
        last_axes = zip(blocks[-len(block) :], self.shape[-len(block) :], block, strict=True)
        values = (slice(b.start * size, min(b.stop * size, n)) for b, n, size in last_axes)
        return *blocks[: -len(block)], *values


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A quantized tensor that is only read: each block of values has a scale.

    The shapes of values and scales tell the size of a block: a row (compressed-tensors), the whole
    tensor (static float8), 32 numbers of a row (MXFP8), and so on. The dtypes of values and scales
    say what the values are (`_numbers_per_value`): float8_e4m3fn; int8 (compressed-tensors);
    uint8 or int8 for two float4_e2m1 numbers (NVFP4, DeepSeek-V4), the first in the low bits; int32
    for eight integers from -8 to 7, to each of which 8 is added, the first in the lowest bits.
    Scales of dtype uint8 are exponents of two plus 127.
    """

    directory: Directory
    name: str  # in the file, perhaps with "_packed" at the end
    scales: str  # the name of the scales
    format = None  # since no `QuantizedArray` has the tensor's format

    @property
    def _values(self) -> str:
        return self.name if self.name in self.directory.files else self.name + PACKED

    @property
    def _factors(self) -> tuple[str, str]:
        """The names of the tensor's divisor (compressed-tensors) and factor (ModelOpt), if any."""
        return self.name + "_global_scale", self.name + "_scale_2"

    @property
    def stored(self) -> tuple[str, ...]:
        module = self.name.removesuffix("weight")
        # Scales of the module's inputs are not read, but belong to the tensor.
        inputs = module + "input_scale", module + "input_global_scale"
        others = *self._factors, self.name + "_shape", *inputs
        return self._values, self.scales, *(n for n in others if n in self.directory.files)

    @property
    def _per_value(self) -> int:
        entry = self.directory.entry
        return _numbers_per_value(entry(self._values).dtype, entry(self.scales).dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor in numbers; ValueError if `<name>_shape` holds another one."""
        *rows, columns = self.directory.entry(self._values).shape
        shape = (*rows, columns * self._per_value)
        if self.name + "_shape" in self.directory.files:
            stated = tuple(self.directory.read(self.name + "_shape", (slice(None),)).tolist())
            # Integers of another number of bits have another number of columns.
            if stated != shape:
                raise ValueError(
                    f"{self._values} in {self.directory.path} must hold {self._per_value} numbers "
                    f"per value, {shape} in all, but {self.name}_shape is {stated}."
                )
        return shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(jnp.bfloat16)

    def read(self, index: Index) -> np.ndarray:
        """Reads a slice of the tensor, decoded to float32."""
        *rows, columns = index
        start, stop, step = columns.indices(self.shape[-1])
        first, last = start // self._per_value, -(-stop // self._per_value)
        values = self._decoded(self.directory.read(self._values, (*rows, slice(first, last))))
        first_number = first * self._per_value  # of a row; the decoded values begin with it
        values = values[..., start - first_number : stop - first_number : step]
        divisor, factor = map(self._read_factor, self._factors)
        return values * self._scales_of(index, values) * factor / divisor

    def _read_factor(self, name: str) -> np.ndarray:
        """Reads a tensor of `_factors`, a single number, as [1] float32; 1 if there is none."""
        if name not in self.directory.files:
            return np.ones(1, np.float32)
        factor = self.directory.read(name, (slice(None),) * len(self.directory.entry(name).shape))
        _check_scales(self.directory, name, factor)
        return factor.astype(np.float32).ravel()

    def _decoded(self, values: np.ndarray) -> np.ndarray:
        """Decodes stored values [.., columns] to float32 numbers, which are not scaled yet."""
        if self._per_value == 1:
            return values.astype(np.float32)
        if self._per_value == 2:
            nibbles = np.stack([values.view(np.uint8) & 15, values.view(np.uint8) >> 4], axis=-1)
            return _FLOAT4[nibbles].reshape(*values.shape[:-1], -1)
        shifts = np.arange(0, 32, 4, dtype=np.uint32)
        nibbles = values.view(np.uint32)[..., None] >> shifts & 15
        return nibbles.astype(np.float32).reshape(*values.shape[:-1], -1) - 8

    def _scales_of(self, index: Index, values: np.ndarray) -> np.ndarray:
        """Returns the scale of each number in a slice, in float32, and checks the scales."""
        # `values` are the slice's numbers without scales. Where they are 0, a scale may be 0, too.
        num_axes = len(self.directory.entry(self.scales).shape)
        # For each axis, the block of each number in the slice.
        places = [
            np.arange(*axis_slice.indices(n)) // (n // count)
            for axis_slice, n, count in zip(index, self.shape, self._num_blocks(), strict=True)
        ]
        blocks = tuple(slice(place[0], place[-1] + 1) for place in places)
        # The scales may lack last axes, along which there is one block.
        scales = self.directory.read(self.scales, blocks[:num_axes])
        scales = scales.reshape([block.stop - block.start for block in blocks])
        if scales.dtype == np.uint8:
            scales = scales.view(jnp.float8_e8m0fnu)
        scales = scales.astype(np.float32)
        _check_scales(self.directory, self.scales, scales, used=False)
        # Repeats the scale of each block for its numbers.
        of_numbers = scales[np.ix_(*(place - place[0] for place in places))]
        if not scales.all():
            _check_scales(self.directory, self.scales, of_numbers, values != 0)
        return of_numbers

    def _num_blocks(self) -> tuple[int, ...]:
        """Returns the number of blocks along each axis; ValueError if they do not divide it."""
        stored = self.directory.entry(self.scales).shape
        # All 1 if the whole tensor has one scale.
        counts = () if np.prod(stored) == 1 else stored
        counts = (*counts, *(1,) * (len(self.shape) - len(counts)))
        if len(counts) > len(self.shape) or any(
            n % count for n, count in zip(self.shape, counts, strict=False)
        ):
            raise ValueError(
                f"{self.scales} must have a scale for each block of {self.name} {self.shape}, but "
                f"has shape {stored}."
            )
        return counts

    def write(self, index: Index, values: np.ndarray) -> None:
        """Raises ValueError unless the tensor has these values already."""
        if _differ(self.read(index), values).any():
            raise ValueError(
                f"{self.name} in {self.directory.path} is quantized in a way that is only read, "
                "so it cannot be changed; save to a directory that is not quantized."
            )


Encoding = Plain | Blockwise | Scaled


def _numbers_per_value(values: np.dtype, scales: np.dtype) -> int:
    """Returns how many numbers a value of `Scaled` holds; 0 if no format has these dtypes."""
    are_exponents = scales in (np.uint8, jnp.float8_e8m0fnu)
    is_mxfp4 = values in (np.uint8, np.int8) and are_exponents
    is_nvfp4 = values == np.uint8 and scales == _FLOAT8
    if is_mxfp4 or is_nvfp4:
        return 2
    are_floats = jnp.issubdtype(scales, jnp.floating) and scales.itemsize > 1
    if values == _FLOAT8 or (values == np.int8 and are_floats):
        return 1
    return 8 if values == np.int32 and are_floats else 0


@dataclasses.dataclass(frozen=True)
class Quantization:
    """The quantization of a model, as config.json states it in `quantization_config`."""

    method: str | None = None  # such as "fp8" or "mxfp4"; None: not quantized
    block: tuple[int, int] = (128, 128)  # rows and columns of a float8 block
    power_of_two: bool = False  # whether float8 scales are powers of two (`scale_fmt` "ue8m0")
    kept: tuple[str, ...] = ()  # names, or parts of names, of modules that are not quantized

    def is_float8(self, name: str) -> bool:
        """Returns whether an expert's matrix, in a new tensor called `name`, becomes float8."""
        module = f".{name.removesuffix('.weight')}."
        return self.method == "fp8" and not any(f".{part}." in module for part in self.kept)


def is_stored(directory: Directory, name: str) -> bool:
    """Returns whether a directory has a tensor, under its name or as packed numbers."""
    return name in directory.files or name + PACKED in directory.files


def belongs_to_quantized(directory: Directory, name: str) -> bool:
    """Returns whether a tensor holds scales, or the like, of a quantized one in the directory."""
    # It is then read together with the quantized tensor, and is no weight of its own.
    # Names that the quantized one may have: a module's "input_scale" belongs to its "weight".
    bases = {name.rpartition(".")[0] + ".weight"} - {name}
    for suffix in (SCALE_SUFFIX, "_scale", "_scale_2", "_global_scale", "_shape"):
        if name.endswith(suffix):
            bases.add(name.removesuffix(suffix))
    # The names of the tensors in which `base` is stored do not depend on the quantization.
    return any(
        is_stored(directory, base) and name in open_tensor(directory, base, Quantization()).stored
        for base in bases
    )


def open_tensor(directory: Directory, name: str, quantization: Quantization) -> Encoding:
    """Opens a stored tensor: finds its encoding from its name, its dtype and its scales' names."""
    mxfp4_scales = name.removesuffix(BLOCKS) + SCALES
    if name.endswith(BLOCKS) and mxfp4_scales in directory.files:
        return Blockwise(directory, name, mxfp4_scales, formats.MXFP4)
    # compressed-tensors appends PACKED to the names of packed numbers.
    values = name if name in directory.files else name + PACKED
    dtype = directory.entry(values).dtype
    module = name.removesuffix("weight")
    # The names that scales may have, such as "<module>.weight_scale".
    names = name + SCALE_SUFFIX, name + "_scale", module + "scale", module + "qscale_weight"
    with_scales = ""  # for the error message
    if scales := next((scale for scale in names if scale in directory.files), None):
        scale_dtype = directory.entry(scales).dtype
        if _numbers_per_value(dtype, scale_dtype):
            # `Blockwise` can also write, but takes only scales "_scale_inv" that are not uint8.
            if dtype == _FLOAT8 and scales == name + SCALE_SUFFIX and scale_dtype != np.uint8:
                if not jnp.issubdtype(scale_dtype, jnp.floating):
                    raise ValueError(
                        f"{scales} must hold scales of a floating dtype, but has dtype "
                        f"{scale_dtype}."
                    )
                block, power_of_two = quantization.block, quantization.power_of_two
                format = formats.Float8.of(_FLOAT8, block, scale_dtype, power_of_two)
                return Blockwise(directory, name, scales, format)
            return Scaled(directory, name, scales)
        with_scales = f" with {scales} of {scale_dtype}"
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(
            f"{values} in {directory.path / directory.files[values]} must be of a floating dtype, "
            f"or float8_e4m3fn with {name}{SCALE_SUFFIX} or {name}_scale, or MXFP4 in tensors "
            f"{BLOCKS} and {SCALES}, or in another quantized format that is read, but is "
            f"{dtype}{with_scales}."
        )
    return Plain(directory, name)


def float8_tensors(
    name: str, shape: tuple[int, ...], block: tuple[int, int], scale_dtype: np.dtype
) -> TensorTypes:
    """Returns dtype and shape of the two tensors that store a tensor as float8."""
    format = formats.Float8.of(_FLOAT8, block, scale_dtype)
    scales = format.scale_dtype, format.scales_shape(shape)
    return {name: (format.dtype, shape), name + SCALE_SUFFIX: scales}


def mxfp4_tensors(name: str, shape: tuple[int, ...]) -> TensorTypes:
    """Returns dtype and shape of the two tensors that store a tensor of `shape` as MXFP4."""
    format = formats.MXFP4
    format.check_shape(name, shape)
    scales_shape = format.scales_shape(shape)
    bytes_of_block = format.row_block // format.numbers_per_value
    return {
        name: (format.dtype, (*scales_shape, bytes_of_block)),
        name.removesuffix(BLOCKS) + SCALES: (np.dtype(np.uint8), scales_shape),
    }
