"""Reads and writes published tensors, stored plainly, as float8 with scales, or as MXFP4.

Each encoding reads slices of a tensor as numbers and writes numbers back to slices. Numbers that
are written back unchanged keep their bytes: a block is written only if its numbers differ from what
the stored block decodes to.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from jax_ep.checkpoints.safetensors import Directory, Index

SCALE_SUFFIX = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"

_FLOAT8 = np.dtype(jnp.float8_e4m3fn)
_FLOAT8_MAX = float(jnp.finfo(jnp.float8_e4m3fn).max)
_FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FLOAT4 = np.concatenate([_FLOAT4, -_FLOAT4])
_MX_BLOCK = 32
# The largest power of two in float4, and the bias of an MX block's exponent.
_FLOAT4_EXPONENT, _MX_BIAS = 2, 127


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
        kept = old.astype(values.dtype) == values
        self.directory.write(self.name, index, np.where(kept, old, values.astype(self.dtype)))


@dataclasses.dataclass(frozen=True)
class Float8:
    """float8_e4m3fn numbers with a float32 scale for each block of rows and columns (DeepSeek-V3).

    A number is the stored number times its block's entry of `<name>_scale_inv`, whose shape is
    [.., rows / block, columns / block], rounded up.

    Attributes:
        directory, name: as in `Plain`.
        block: rows and columns of a block.
        power_of_two: whether new scales are powers of two, for programs that read exponents alone.
    """

    directory: Directory
    name: str
    block: tuple[int, int]
    power_of_two: bool = False

    @property
    def stored(self) -> tuple[str, ...]:
        return self.name, self.name + SCALE_SUFFIX

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor.

        Raises:
            ValueError: the shape of the scales does not fit the blocks.
        """
        shape = self.directory.entry(self.name).shape
        scales = self.directory.entry(self.name + SCALE_SUFFIX).shape
        blocks = _shape_of_scales(shape, self.block)
        if scales != blocks:
            raise ValueError(
                f"{self.name}{SCALE_SUFFIX} must have shape {blocks}, a scale for each block of "
                f"{self.block} of {shape}, but has shape {scales}."
            )
        return shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(jnp.bfloat16)

    @property
    def scale_dtype(self) -> np.dtype:
        return self.directory.entry(self.name + SCALE_SUFFIX).dtype

    def read(self, index: Index) -> np.ndarray:
        return _float8_numbers(*self._read(index))

    def _read(self, index: Index) -> tuple[np.ndarray, np.ndarray]:
        """Reads a slice as stored, and the scale of each of its numbers."""
        values = self.directory.read(self.name, index)
        rows, columns = (
            np.arange(*taken.indices(n)) // block
            for taken, n, block in zip(index[-2:], self.shape[-2:], self.block, strict=True)
        )
        first = rows[0], columns[0]
        span = tuple(slice(a[0], a[-1] + 1) for a in (rows, columns))
        scales = self.directory.read(self.name + SCALE_SUFFIX, (*index[:-2], *span))
        scales = scales[..., rows - first[0], :][..., columns - first[1]]
        return values, scales.astype(np.float32)

    def write(self, index: Index, values: np.ndarray) -> None:
        """Writes values to a slice of whole blocks; unchanged blocks keep their bytes."""
        old, old_scales = self._read(index)
        blocks = functools.partial(_blocks, block=self.block)
        changed = _float8_numbers(old, old_scales).astype(values.dtype) != values
        changed = blocks(changed).any(axis=(-3, -1), keepdims=True)
        if not changed.any():
            return
        numbers = blocks(values.astype(np.float32))
        largest = np.abs(numbers).max(axis=(-3, -1), keepdims=True)
        scales = _float8_scales(largest, self.scale_dtype, self.power_of_two)
        scales = np.where(changed, scales, blocks(old_scales).max(axis=(-3, -1), keepdims=True))
        numbers = np.clip(numbers / scales, -_FLOAT8_MAX, _FLOAT8_MAX)
        encoded = np.where(changed, numbers.astype(_FLOAT8), blocks(old))
        rows, columns = values.shape[-2:]
        encoded = encoded.reshape(*values.shape[:-2], *_padded(values.shape, self.block))
        self.directory.write(self.name, index, encoded[..., :rows, :columns])
        where = tuple(
            slice(taken.indices(n)[0] // block, -(-taken.indices(n)[1] // block))
            for taken, n, block in zip(index[-2:], self.shape[-2:], self.block, strict=True)
        )
        scales = scales[..., 0, :, 0].astype(self.scale_dtype)
        self.directory.write(self.name + SCALE_SUFFIX, (*index[:-2], *where), scales)


def _float8_numbers(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return values.astype(np.float32) * scales


def _float8_scales(largest: np.ndarray, dtype: np.dtype, power_of_two: bool) -> np.ndarray:
    """Returns the scales of blocks with these largest numbers, rounded to `dtype`, as float32.

    A scale is 1 where it would be 0, also where the numbers are too small for one of `dtype`. A
    power of two is the least with which the largest number does not overflow.
    """
    scales = np.where(largest > 0, largest / _FLOAT8_MAX, 1).astype(np.float32)
    if power_of_two or dtype == np.dtype(jnp.float8_e8m0fnu):
        fraction, exponent = np.frexp(scales)
        scales = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
        # The division above may have rounded down to a power of two.
        scales = np.where(scales * np.float32(_FLOAT8_MAX) < largest, 2 * scales, scales)
    scales = scales.astype(dtype).astype(np.float32)
    return np.where(scales > 0, scales, np.float32(1))


def _shape_of_scales(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return *shape[:-2], *(-(-n // b) for n, b in zip(shape[-2:], block, strict=True))


def _padded(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    return tuple(-(-n // b) * b for n, b in zip(shape[-2:], block, strict=True))


def _blocks(values: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """Pads [.., rows, columns] to [.., row blocks, rows, column blocks, columns]."""
    rows, columns = _padded(values.shape, block)
    padding = [(0, 0)] * (values.ndim - 2)
    padding += [(0, rows - values.shape[-2]), (0, columns - values.shape[-1])]
    values = np.pad(values, padding)
    shape = rows // block[0], block[0], columns // block[1], block[1]
    return values.reshape(*values.shape[:-2], *shape)


@dataclasses.dataclass(frozen=True)
class MXFP4:
    """Pairs of float4_e2m1 in bytes, with an exponent for 32 numbers of the last axis (GPT-OSS).

    `<name>_blocks` [.., G, 16] uint8 holds 32 numbers in 16 bytes, the first in the lower half of
    a byte, and `<name>_scales` [.., G] uint8 the power of two they are multiplied by, plus 127
    (Open Compute Project, "Microscaling Formats (MX)", version 1.0).

    Attributes:
        directory, name: as in `Plain`; the name ends in "_blocks".
    """

    directory: Directory
    name: str

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
        *shape, blocks, pairs = self.directory.entry(self.name).shape
        scales = self.directory.entry(self._scales).shape
        if scales != (*shape, blocks) or 2 * pairs != _MX_BLOCK:
            raise ValueError(
                f"{self._scales} must have shape {(*shape, blocks)}, a scale for each block of 16 "
                f"bytes of {self.name} {(*shape, blocks, pairs)}, but has shape {scales}."
            )
        return *shape, blocks * _MX_BLOCK

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(jnp.bfloat16)

    def read(self, index: Index) -> np.ndarray:
        whole, within = self._whole_blocks(index)
        return _float4_numbers(*self._read(whole))[..., within]

    def _whole_blocks(self, index: Index) -> tuple[Index, slice]:
        """Returns the blocks that hold a slice of numbers, and the slice's place within them."""
        start, stop, step = index[-1].indices(self.shape[-1])
        first = start // _MX_BLOCK
        blocks = slice(first, -(-stop // _MX_BLOCK))
        return (*index[:-1], blocks), slice(
            start - first * _MX_BLOCK, stop - first * _MX_BLOCK, step
        )

    def _read(self, whole: Index) -> tuple[np.ndarray, np.ndarray]:
        return self.directory.read(self.name, whole), self.directory.read(self._scales, whole)

    def write(self, index: Index, values: np.ndarray) -> None:
        """Writes values to a slice of whole blocks; unchanged blocks keep their bytes."""
        whole, _ = self._whole_blocks(index)
        old, old_scales = self._read(whole)
        grouped = (*values.shape[:-1], -1, _MX_BLOCK)
        changed = _float4_numbers(old, old_scales).astype(values.dtype) != values
        changed = changed.reshape(grouped).any(axis=-1)
        if not changed.any():
            return
        numbers = values.astype(np.float32).reshape(grouped)
        largest = np.abs(numbers).max(axis=-1)
        exponent = np.frexp(largest)[1] - 1 - _FLOAT4_EXPONENT
        scales = np.where(largest > 0, np.clip(exponent + _MX_BIAS, 0, 254), 0).astype(np.uint8)
        scales = np.where(changed, scales, old_scales)
        codes = _float4_codes(np.ldexp(numbers, _MX_BIAS - scales[..., None].astype(np.int32)))
        encoded = np.where(changed[..., None], codes[..., ::2] | codes[..., 1::2] << 4, old)
        self.directory.write(self.name, whole, encoded)
        self.directory.write(self._scales, whole, scales)


def _float4_numbers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    numbers = np.empty((*blocks.shape[:-1], _MX_BLOCK), np.float32)
    numbers[..., ::2] = _FLOAT4[blocks & 15]
    numbers[..., 1::2] = _FLOAT4[blocks >> 4]
    numbers = np.ldexp(numbers, scales[..., None].astype(np.int32) - _MX_BIAS)
    return numbers.reshape(*blocks.shape[:-2], -1)


def _float4_codes(numbers: np.ndarray) -> np.ndarray:
    """Returns the uint8 code of the nearest float4; halfway between two, the even code."""
    middles = (_FLOAT4[:7] + _FLOAT4[1:8]) / 2
    size = np.abs(numbers)
    below = np.searchsorted(middles, size, side="left")
    above = np.searchsorted(middles, size, side="right")
    code = np.where(below % 2 == 0, below, above).astype(np.uint8)
    return code | (np.signbit(numbers).astype(np.uint8) << 3)


Encoding = Plain | Float8 | MXFP4


@dataclasses.dataclass(frozen=True)
class Quantization:
    """What config.json says of a model's quantized tensors.

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
    scales = scale_dtype, _shape_of_scales(shape, block)
    return {name: (_FLOAT8, shape), name + SCALE_SUFFIX: scales}


def mxfp4_tensors(name: str, shape: tuple[int, ...]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Returns the dtypes and shapes of the tensors that store a tensor of `shape` as MXFP4.

    Raises:
        ValueError: the last axis is not made of whole blocks.
    """
    *rows, columns = shape
    if columns % _MX_BLOCK:
        raise ValueError(
            f"{name} must have rows of a multiple of {_MX_BLOCK} numbers to be stored as MXFP4, as "
            f"quantization_config says, but has shape {shape}."
        )
    blocks, byte = (*rows, columns // _MX_BLOCK), np.dtype(np.uint8)
    return {
        name: (byte, (*blocks, _MX_BLOCK // 2)),
        name.removesuffix(BLOCKS) + SCALES: (byte, blocks),
    }
