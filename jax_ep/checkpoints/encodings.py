"""Reads and writes published tensors, stored plainly, as float8 with scales, or as MXFP4.

Each encoding reads slices of a tensor as numbers and writes numbers back to slices. Numbers that
are written back unchanged keep their bytes: a block is written only if its numbers differ from what
the stored block decodes to.
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
    """A tensor of floating numbers, stored as they are.

    Attributes:
        directory: the directory with the tensor.
        name: the name of the tensor.
    """

    directory: Directory
    name: str

    @property
    def stored(self) -> tuple[str, ...]:
        """The names of the stored tensors that this one is made of."""
        return (self.name,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.directory.entry(self.name).shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype that the tensor is read in by default."""
        return self.directory.entry(self.name).dtype

    def read(self, index: Index) -> np.ndarray:
        """Reads a slice, in `dtype`."""
        return self.directory.read(self.name, index)

    def write(self, index: Index, values: np.ndarray) -> None:
        """Writes values to a slice, rounded to `dtype`; unchanged values keep their bytes."""
        if values.dtype == self.dtype:
            self.directory.write(self.name, index, values)
            return
        old = self.read(index)
        changed = _differ(old, values)
        self.directory.write(self.name, index, np.where(changed, values.astype(self.dtype), old))


def _differ(old: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Returns where `values` differ from `old`, cast to their dtype; two NaNs are equal."""
    old = old.astype(values.dtype)
    return (old != values) & ~(np.isnan(old) & np.isnan(values))


@dataclasses.dataclass(frozen=True)
class _InBlocks:
    """A tensor that is stored in a format of `jax_ep.formats`.

    A block that reaches past the end of the tensor is filled up with zeros while it is encoded.

    Attributes:
        directory, name: as in `Plain`.
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
        """Reads a slice, in float32."""
        blocks, within = self._blocks(index)
        numbers = self.format.decode(self._load(blocks), np.float32)
        return numbers[(..., *within)]

    def write(self, index: Index, values: np.ndarray) -> None:
        """Writes values to a slice of whole blocks; unchanged blocks keep their bytes."""
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
        """Reads the values and scales of a slice of whole blocks, as they are stored."""
        return self._load(self._whole_blocks(index))

    def write_parts(self, index: Index, values: np.ndarray, scales: np.ndarray) -> None:
        """Writes what `read_parts` returned to a slice of whole blocks."""
        self._store(self._whole_blocks(index), values, scales)

    def _whole_blocks(self, index: Index) -> Index:
        """Returns the index of the blocks that a slice consists of.

        Raises:
            ValueError: the slice has parts of blocks.
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
        """Returns the index of the blocks that hold a slice, and the slice's place within them."""
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
        """The shape of a block in numbers, without a leading axis of size 1."""
        return self.format.block[1:] if self.format.block[0] == 1 else self.format.block

    @property
    def _values_block(self) -> tuple[int, ...]:
        """The shape of a block in stored values, each of which may hold several numbers."""
        return *self._block[:-1], self._block[-1] // self.format.numbers_per_value

    def _padded(self, array: np.ndarray) -> np.ndarray:
        """Pads an array [.., rows, columns] with zeros to whole blocks."""
        block = self._block
        widths = [(0, -n % size) for n, size in zip(array.shape[-len(block) :], block, strict=True)]
        if not any(after for _, after in widths):
            return array
        return np.pad(array, [(0, 0)] * (array.ndim - len(block)) + widths)

    def _any_of_block(self, flags: np.ndarray) -> np.ndarray:
        """Returns for each block of [.., rows, columns] whether one of its flags is true."""
        for axis, size in enumerate(self._block, start=-len(self._block)):
            starts = np.arange(0, flags.shape[axis], size)
            flags = np.logical_or.reduceat(flags, starts, axis=axis)
        return flags

    def _encode(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.format.encode(values)

    def _load(self, blocks: Index) -> tuple[np.ndarray, np.ndarray]:
        """Reads the values and the scales of blocks, as the format has them."""
        raise NotImplementedError

    def _store(self, blocks: Index, values: np.ndarray, scales: np.ndarray) -> None:
        """Writes the values and the scales of blocks."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Float8(_InBlocks):
    """float8_e4m3fn numbers with a float32 scale for each block of rows and columns (DeepSeek-V3).

    A number is the stored number times its block's entry of `<name>_scale_inv`, whose shape is
    [.., rows / block, columns / block], rounded up.

    Attributes:
        directory, name: as in `Plain`.
        block: rows and columns of a block.
        power_of_two: whether new scales are powers of two, for programs that read exponents alone.
    """

    block: tuple[int, int]
    power_of_two: bool = False

    @property
    def stored(self) -> tuple[str, ...]:
        return self.name, self.name + SCALE_SUFFIX

    @property
    def format(self) -> formats.Float8:
        scale_dtype = self.directory.entry(self.name + SCALE_SUFFIX).dtype
        return formats.Float8.of(_FLOAT8, self.block, scale_dtype, self.power_of_two)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor.

        Raises:
            ValueError: the shape of the scales does not fit the blocks.
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
        """Returns the slices of the stored values that belong to a slice of blocks."""
        block = self._block
        last = zip(blocks[-len(block) :], self.shape[-len(block) :], block, strict=True)
        ends = (slice(b.start * size, min(b.stop * size, n)) for b, n, size in last)
        return *blocks[: -len(block)], *ends


@dataclasses.dataclass(frozen=True)
class MXFP4(_InBlocks):
    """Pairs of float4_e2m1 in bytes, with an exponent for 32 numbers of the last axis (GPT-OSS).

    `<name>_blocks` [.., G, 16] uint8 holds the values of `jax_ep.formats.MXFP4`, and
    `<name>_scales` [.., G] uint8 the bytes of its scales.

    Attributes:
        directory, name: as in `Plain`; the name ends in "_blocks".
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
        """The shape of the decoded tensor.

        Raises:
            ValueError: the shape of the scales does not fit the blocks.
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
    """The quantization of a model, as config.json states it.

    Attributes:
        method: "fp8", "mxfp4", or None for a model that is not quantized.
        block: rows and columns that share a scale, where tensors are float8.
        power_of_two: whether scales of float8 blocks are powers of two (`scale_fmt` "ue8m0").
        kept: names of modules that are not quantized, or parts of names.
    """

    method: str | None = None
    block: tuple[int, int] = (128, 128)
    power_of_two: bool = False
    kept: tuple[str, ...] = ()

    def is_float8(self, name: str) -> bool:
        """Returns whether a new matrix of this name, of an MLP, is stored as float8."""
        module = f".{name.removesuffix('.weight')}."
        return self.method == "fp8" and not any(f".{part}." in module for part in self.kept)


def format_of(encoding: Encoding) -> formats.Format | None:
    """Returns the format of a tensor's blocks; None for a tensor that is stored plainly."""
    return None if isinstance(encoding, Plain) else encoding.format


def open_tensor(directory: Directory, name: str, quantization: Quantization) -> Encoding:
    """Returns a stored tensor with its encoding.

    Raises:
        ValueError: the tensor is not floating, and no scales are stored with it, or its dtype is
            not known.
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
    """Returns the dtypes and shapes of the tensors that store a tensor of `shape` as float8."""
    format = formats.Float8.of(_FLOAT8, block, scale_dtype)
    scales = format.scale_dtype, format.scales_shape(shape)
    return {name: (format.dtype, shape), name + SCALE_SUFFIX: scales}


def mxfp4_tensors(name: str, shape: tuple[int, ...]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Returns the dtypes and shapes of the tensors that store a tensor of `shape` as MXFP4.

    Raises:
        ValueError: the last axis is not made of whole blocks.
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
