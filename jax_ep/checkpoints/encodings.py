"""Reads and writes tensors of published models: plain ones, float8 with scales, and MXFP4.

Each class reads slices of a stored tensor as decoded numbers, and encodes numbers to write them to
slices. A block is the numbers of a quantized tensor that share a scale. A block is written only if
its new numbers differ from the decoded old ones, so writing unchanged numbers changes no bytes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_ep import formats
from jax_ep.checkpoints.safetensors import Directory, Index

SCALE_SUFFIX = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"

_FLOAT8 = np.dtype(jnp.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class Plain:
    """A tensor of floating-point numbers that is stored without quantization.

    Attributes:
        directory: the directory with the tensor.
        name: the name of the tensor.
    """

    directory: Directory
    name: str

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
        """Reads a slice of the tensor, as an array of the stored dtype."""
        return self.directory.read(self.name, index)

    def write(self, index: Index, values: np.ndarray) -> None:
        """Rounds `values` to the stored dtype and writes them to a slice of the tensor.

        Numbers that have not changed keep their stored bits; they are compared in the dtype of
        `values`. So writing back values that were read and cast to another dtype changes no bytes.
        """
        if values.dtype == self.dtype:
            self.directory.write(self.name, index, values)
            return
        old = self.read(index)
        changed = _differ(old, values)
        self.directory.write(self.name, index, np.where(changed, values.astype(self.dtype), old))


def _differ(old: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Compares stored numbers `old` with new `values`; returns booleans, true where they differ.

    `old` is first cast to the dtype of `values`. Two NaNs count as equal.
    """
    old = old.astype(values.dtype)
    return (old != values) & ~(np.isnan(old) & np.isnan(values))


@dataclasses.dataclass(frozen=True)
class _InBlocks:
    """A quantized tensor, which consists of blocks of numbers that share a scale.

    A block that reaches past the end of the tensor is padded with zeros before it is encoded.

    Attributes:
        directory: the directory with the tensor.
        name: the name of the tensor that holds the values.
    """

    directory: Directory
    name: str

    @property
    def format(self) -> formats.Format:
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(jnp.bfloat16)

    def read(self, index: Index) -> np.ndarray:
        """Reads a slice of the tensor, decoded to float32."""
        blocks, within = self._blocks(index)
        numbers = self.format.decode(self._load(blocks), np.float32)
        return numbers[(..., *within)]

    def write(self, index: Index, values: np.ndarray) -> None:
        """Encodes `values` and writes them to a slice, which must consist of whole blocks.

        A stored block that already decodes to the new numbers keeps its bytes.
        """
        blocks, within = self._blocks(index)
        old = self._load(blocks)
        changed = _differ(self.format.decode(old, np.float32)[(..., *within)], values)
        if not changed.any():
            return
        changed = self._any_of_block(self._padded(changed))
        new = self._encode(self._padded(values))
        of_values = changed
        for axis, size in enumerate(self._values_block, start=-len(self._values_block)):
            of_values = np.repeat(of_values, size, axis=axis)
        parts = np.where(of_values, new[0], old[0]), np.where(changed, new[1], old[1])
        self._store(blocks, *parts)

    def read_parts(self, index: Index) -> tuple[np.ndarray, np.ndarray]:
        """Reads a slice of whole blocks; returns (values, scales), which `format.decode` takes."""
        return self._load(self._whole_blocks(index))

    def write_parts(self, index: Index, values: np.ndarray, scales: np.ndarray) -> None:
        """Writes values and scales, as `read_parts` returns them, to a slice of whole blocks."""
        self._store(self._whole_blocks(index), values, scales)

    def _whole_blocks(self, index: Index) -> Index:
        """Converts a slice of the tensor, in numbers, to the same slice in blocks.

        Returns:
            A slice for each axis. For the tensor's last axes, which are divided into blocks, it
            counts blocks instead of numbers.

        Raises:
            ValueError: the slice has some but not all numbers of a block.
        """
        blocks, within = self._blocks(index)
        for taken, size in zip(within, self._block, strict=True):
            if taken.start or taken.stop % size or taken.step != 1:
                raise ValueError(
                    f"{self.name} must hold each parameter in whole blocks of {self._block} "
                    "numbers to stay quantized, but a block has numbers of several parameters, or "
                    "is partial."
                )
        return blocks

    def _blocks(self, index: Index) -> tuple[Index, list[Any]]:
        """Finds the blocks that contain a slice of the tensor.

        Returns:
            A pair (blocks, within). `blocks` has a slice for each axis of the tensor; for the last
            axes, which are divided into blocks, it counts blocks. `within` has a slice for each of
            these last axes; it takes the numbers of `index` out of the decoded blocks.
        """
        block = self._block
        blocks, within = [], []
        for taken, n, size in zip(
            index[-len(block) :], self.shape[-len(block) :], block, strict=True
        ):
            start, stop, step = taken.indices(n)
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
        """Pads an array [.., rows, columns] with zeros at the ends of its axes, to whole blocks."""
        block = self._block
        widths = [(0, -n % size) for n, size in zip(array.shape[-len(block) :], block, strict=True)]
        if not any(after for _, after in widths):
            return array
        return np.pad(array, [(0, 0)] * (array.ndim - len(block)) + widths)

    def _any_of_block(self, flags: np.ndarray) -> np.ndarray:
        """Reduces booleans [.., rows, columns] to one per block: whether any in it is true."""
        for axis, size in enumerate(self._block, start=-len(self._block)):
            starts = np.arange(0, flags.shape[axis], size)
            flags = np.logical_or.reduceat(flags, starts, axis=axis)
        return flags

    def _encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.format.encode(values)

    def _load(self, blocks: Index) -> tuple[np.ndarray, np.ndarray]:
        """Reads the stored (values, scales) of a slice of blocks, as `_blocks` returns it."""
        raise NotImplementedError

    def _store(self, blocks: Index, values: np.ndarray, scales: np.ndarray) -> None:
        """Writes values and scales, as `format.encode` returns them, to a slice of blocks."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Float8(_InBlocks):
    """A tensor of float8_e4m3fn values, with a scale for each block of a matrix (DeepSeek-V3).

    A number is its stored value times the scale of its block. The scales are in the tensor
    `<name>_scale_inv`, [.., ceil(rows / block rows), ceil(columns / block columns)].

    Attributes:
        directory: the directory with the tensor.
        name: the name of the tensor that holds the values.
        block: the numbers of rows and columns of a block.
        power_of_two: whether new scales are powers of two, for programs that read only the exponent
            of a scale.
    """

    block: tuple[int, int]
    power_of_two: bool = False

    @property
    def stored(self) -> tuple[str, ...]:
        return self.name, self.name + SCALE_SUFFIX

    @property
    def format(self) -> formats.Float8:
        scale_dtype = self.directory.entry(self.name + SCALE_SUFFIX).dtype
        if not jnp.issubdtype(scale_dtype, jnp.floating):
            raise ValueError(
                f"{self.name}{SCALE_SUFFIX} must hold scales of a floating dtype, but has dtype "
                f"{scale_dtype}."
            )
        return formats.Float8.of(_FLOAT8, self.block, scale_dtype, self.power_of_two)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor.

        Raises:
            ValueError: the tensor of scales does not have exactly one scale for each block.
        """
        shape = self.directory.entry(self.name).shape
        scales = self.directory.entry(self.name + SCALE_SUFFIX).shape
        blocks = self.format.scales_shape(shape)
        if scales != blocks:
            raise ValueError(
                f"{self.name}{SCALE_SUFFIX} must have shape {blocks}, a scale for each block of "
                f"{self.block} of {shape}, but has shape {scales}."
            )
        return shape

    @property
    def scale_dtype(self) -> np.dtype:
        return self.format.scale_dtype

    def _encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.format.encode(values, divide=True)

    def _load(self, blocks: Index) -> tuple[np.ndarray, np.ndarray]:
        values = self.directory.read(self.name, self._of_values(blocks))
        return self._padded(values), self.directory.read(self.name + SCALE_SUFFIX, blocks)

    def _store(self, blocks: Index, values: np.ndarray, scales: np.ndarray) -> None:
        index = self._of_values(blocks)
        kept: list[Any] = [slice(each.stop - each.start) for each in index[-len(self._block) :]]
        self.directory.write(self.name, index, values[(..., *kept)])
        self.directory.write(self.name + SCALE_SUFFIX, blocks, scales)

    def _of_values(self, blocks: Index) -> Index:
        """Converts a slice in blocks to one in values, which stops at the end of the tensor."""
        block = self._block
        last = zip(blocks[-len(block) :], self.shape[-len(block) :], block, strict=True)
        ends = (slice(b.start * size, min(b.stop * size, n)) for b, n, size in last)
        return *blocks[: -len(block)], *ends


@dataclasses.dataclass(frozen=True)
class MXFP4(_InBlocks):
    """A tensor of float4_e2m1 numbers, two in a byte, with a scale for 32 numbers (GPT-OSS).

    The last axis of the tensor is divided into G blocks of 32 numbers. The stored tensor
    `<...>_blocks` [.., G, 16] uint8 holds the values, in the form of `jax_ep.formats.MXFP4`. The
    stored tensor `<...>_scales` [.., G] uint8 holds the scales, which are exponents of two.

    Attributes:
        directory: the directory with the tensor.
        name: the name of the tensor with the values, which ends in "_blocks".
    """

    @property
    def format(self) -> formats.Format:
        return formats.MXFP4

    @property
    def _scales(self) -> str:
        return self.name.removesuffix(BLOCKS) + SCALES

    @property
    def stored(self) -> tuple[str, ...]:
        return self.name, self._scales

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the decoded tensor, in numbers.

        Raises:
            ValueError: the stored blocks do not have 16 bytes each, or the tensor of scales does
                not have exactly one scale for each block.
        """
        *shape, blocks, size = self.directory.entry(self.name).shape
        scales = self.directory.entry(self._scales).shape
        if scales != (*shape, blocks) or (size,) != self._values_block:
            raise ValueError(
                f"{self._scales} must have shape {(*shape, blocks)}, a scale for each block of "
                f"{self._values_block[0]} bytes of {self.name} {(*shape, blocks, size)}, but has "
                f"shape {scales}."
            )
        return *shape, blocks * self._block[0]

    def _load(self, blocks: Index) -> tuple[np.ndarray, np.ndarray]:
        values = self.directory.read(self.name, blocks)
        scales = self.directory.read(self._scales, blocks)
        return values.reshape(*values.shape[:-2], -1), scales.view(self.format.scale_dtype)

    def _store(self, blocks: Index, values: np.ndarray, scales: np.ndarray) -> None:
        self.directory.write(self.name, blocks, values.reshape(*scales.shape, -1))
        self.directory.write(self._scales, blocks, scales.view(np.uint8))


Encoding = Plain | Float8 | MXFP4


@dataclasses.dataclass(frozen=True)
class Quantization:
    """The quantization of a model, as config.json states it in `quantization_config`.

    Attributes:
        method: "fp8", "mxfp4", or None for a model that is not quantized.
        block: the numbers of rows and columns of a float8 block, whose numbers share a scale.
        power_of_two: whether scales of float8 blocks are powers of two (`scale_fmt` "ue8m0").
        kept: names, or parts of names, of the modules that are not quantized.
    """

    method: str | None = None
    block: tuple[int, int] = (128, 128)
    power_of_two: bool = False
    kept: tuple[str, ...] = ()

    def is_float8(self, name: str) -> bool:
        """Returns whether an expert's matrix, in a new tensor called `name`, becomes float8."""
        module = f".{name.removesuffix('.weight')}."
        return self.method == "fp8" and not any(f".{part}." in module for part in self.kept)


def format_of(encoding: Encoding) -> formats.Format | None:
    """Returns the quantized format of a stored tensor; None if it is not quantized."""
    return None if isinstance(encoding, Plain) else encoding.format


def open_tensor(directory: Directory, name: str, quantization: Quantization) -> Encoding:
    """Opens a stored tensor: finds its encoding from its name, its dtype and its scales.

    Raises:
        ValueError: the tensor's dtype is unknown, or the tensor is stored without scales in a dtype
            that is not a floating one of 16 bits or more.
    """
    if name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in directory.files:
        return MXFP4(directory, name)
    dtype = directory.entry(name).dtype
    if dtype == _FLOAT8 and name + SCALE_SUFFIX in directory.files:
        return Float8(directory, name, quantization.block, quantization.power_of_two)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(
            f"{name} in {directory.path / directory.files[name]} must be of a floating dtype, or "
            f"float8_e4m3fn with {name}{SCALE_SUFFIX}, or MXFP4 in tensors {BLOCKS} and {SCALES}, "
            f"but is {dtype}."
        )
    return Plain(directory, name)


def float8_tensors(
    name: str, shape: tuple[int, ...], block: tuple[int, int], scale_dtype: np.dtype
) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Describes the two tensors that store a tensor as float8: its values and its scales.

    Args:
        name: the name of the tensor, which is also the name of its values.
        shape: the shape of the tensor.
        block: the numbers of rows and columns of a block, whose numbers share a scale.
        scale_dtype: the dtype of the scales.

    Returns:
        A dict that maps the name of each of the two tensors to its dtype and shape.
    """
    format = formats.Float8.of(_FLOAT8, block, scale_dtype)
    scales = format.scale_dtype, format.scales_shape(shape)
    return {name: (format.dtype, shape), name + SCALE_SUFFIX: scales}


def mxfp4_tensors(name: str, shape: tuple[int, ...]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Describes the two tensors that store a tensor as MXFP4: its values and its scales.

    Args:
        name: the name of the values, which ends in "_blocks".
        shape: the shape of the decoded tensor.

    Returns:
        A dict that maps the name of each of the two tensors to its dtype and shape.

    Raises:
        ValueError: the last axis is not a multiple of a block's 32 numbers.
    """
    format, block = formats.MXFP4, formats.MXFP4.row_block
    if shape[-1] % block:
        raise ValueError(
            f"{name} must have rows of a multiple of {block} numbers to be stored as MXFP4, as "
            f"quantization_config says, but has shape {shape}."
        )
    scales, byte = format.scales_shape(shape), np.dtype(np.uint8)
    return {
        name: (format.dtype, (*scales, block // format.numbers_per_value)),
        name.removesuffix(BLOCKS) + SCALES: (byte, scales),
    }
