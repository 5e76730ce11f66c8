"""Reads and writes slices of tensors in memory-mapped files of the safetensors format.

A file consists of the length of its header (8 bytes, little-endian), the header (JSON: name →
dtype, shape and byte offsets), and the tensors' bytes. The `safetensors` package is not used,
because it cannot read bfloat16 and float8 tensors as NumPy arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import mmap
import operator
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"

_TYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_DTYPES = {name: np.dtype(kind) for name, kind in _TYPES.items()}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Index = tuple[slice, ...]
# The dtype and the shape of each tensor, by its name.
TensorTypes = Mapping[str, tuple[np.dtype, tuple[int, ...]]]


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a tensor is stored in a safetensors file, and its dtype and shape."""

    name: str
    file: Path
    kind: str  # its dtype in the file's header, such as "BF16"
    shape: tuple[int, ...]
    start: int  # the offset in the file, in bytes
    num_bytes: int

    @property
    def dtype(self) -> np.dtype:
        """The NumPy dtype of `kind`; ValueError if `_DTYPES` lacks it."""
        # Raised here, not by `read_header`: a tensor that is never read may have any dtype.
        if self.kind not in _DTYPES:
            raise ValueError(
                f"{self.name} in {self.file} must have a dtype among {', '.join(_DTYPES)} to be "
                f"read, but has {self.kind}."
            )
        return _DTYPES[self.kind]


class Directory:
    """Reads and writes the tensors in a directory of safetensors files, by name; thread-safe.

    `files` maps tensors to names of files.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, writable: bool = False, may_be_empty: bool = False
    ):
        """Lists the tensors of a directory, from its index or its single safetensors file."""
        self.path = Path(path)
        self._access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._maps: dict[str, mmap.mmap] = {}
        self._entries: dict[str, dict[str, Entry]] = {}
        self._lock = threading.Lock()
        # If there is an index, safetensors files that the index does not name are ignored.
        if (self.path / INDEX).exists():
            self.files: dict[str, str] = _read_index(self.path / INDEX)["weight_map"]
        elif (self.path / ONE_FILE).exists():
            self.files = dict.fromkeys(read_header(self.path / ONE_FILE), ONE_FILE)
        elif may_be_empty:
            self.files = {}
        else:
            raise FileNotFoundError(
                f"{self.path} must hold {ONE_FILE} or {INDEX}, but has neither; tensors are read "
                "from a local directory as it was published."
            )

    def entry(self, name: str) -> Entry:
        """Returns the `Entry` of a tensor; raises if its file is missing or does not hold it."""
        file = self.files[name]
        if file not in self._entries:
            if not (self.path / file).exists():
                raise FileNotFoundError(
                    f"{self.path} must hold {file} with {name}, as {INDEX} says, but does not: is "
                    f"the download complete? A {ONE_FILE} is read where there is no {INDEX}."
                )
            self._entries[file] = read_header(self.path / file)
        if name not in self._entries[file]:
            raise ValueError(f"{self.path / file} must hold {name}, as {INDEX} says, but does not.")
        return self._entries[file][name]

    def read(self, name: str, index: Index) -> np.ndarray:
        """Reads a slice of the tensor `name` from its file; returns a copy in C order."""
        with self._slice(name, index) as view:
            return view.copy(order="C")

    def write(self, name: str, index: Index, values: np.ndarray) -> None:
        """Writes `values`, of the tensor's dtype, to a slice of the tensor `name` in its file."""
        with self._slice(name, index) as view:
            assert (values.dtype, values.shape) == (view.dtype, view.shape), name
            view[...] = values

    @contextlib.contextmanager
    def _slice(self, name: str, index: Index) -> Iterator[np.ndarray]:
        """Yields a view of a slice of a tensor in its memory-mapped file."""
        entry = self.entry(name)
        mapped = self._mapped(self.files[name])
        count = math.prod(entry.shape)
        whole = np.frombuffer(mapped, entry.dtype, count, entry.start).reshape(entry.shape)
        # With `...`, a tensor without axes is a view, too.
        view = whole[(*index, Ellipsis)]  # type: ignore[arg-type]
        yield view
        # The slice's pages go back to the operating system, which also writes changed ones to the
        # file, so that large files do not fill memory.
        if view.size and hasattr(mmap, "MADV_DONTNEED"):
            file_start = whole.ctypes.data - entry.start  # an address in memory
            first, last = (b - file_start for b in np.lib.array_utils.byte_bounds(view))
            first -= first % mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, first, last - first)

    def _mapped(self, file: str) -> mmap.mmap:
        """Returns the memory map of a file, which is made once, by the first thread that asks."""
        with self._lock:
            if file not in self._maps:
                # A writable map needs a file that is open for reading, too.
                mode = "r+b" if self._access == mmap.ACCESS_WRITE else "rb"
                with open(self.path / file, mode) as opened:
                    self._maps[file] = mmap.mmap(opened.fileno(), 0, access=self._access)
            return self._maps[file]


def _read_index(file: Path) -> dict[str, Any]:
    """Reads an index; ValueError unless its weight_map names files in the index's folder."""
    try:
        index = json.loads(file.read_text(), object_pairs_hook=_without_duplicates)
        files = index["weight_map"]
        if not all(isinstance(name, str) for name in files.values()):
            raise TypeError
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} must have a weight_map from tensors to files; {error}") from error
    for name in set(files.values()):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{file} must name files in its own folder, but names {name!r}.")
    return index


def read_header(file: Path) -> dict[str, Entry]:
    """Returns the `Entry` of each tensor in a file, by name; ValueError if the file is damaged."""
    header, data_start, size = _json_header(file)
    entries: dict[str, Entry] = {}
    for name, stored in header.items():
        try:
            kind, shape = stored["dtype"], tuple(map(operator.index, stored["shape"]))
            first, last = map(operator.index, stored["data_offsets"])
            if not isinstance(kind, str):
                raise TypeError
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(
                f"{name} in {file} must have dtype, shape and two data_offsets, but is {stored}."
            ) from error
        # A known dtype and the shape give the number of bytes, which must agree with the offsets.
        num_bytes = last - first
        if kind in _DTYPES:
            num_bytes = math.prod(shape) * _DTYPES[kind].itemsize
        entries[name] = Entry(name, file, kind, shape, data_start + first, num_bytes)
        inside = 0 <= first <= last <= size - data_start and min(shape, default=0) >= 0
        if last - first != num_bytes or not inside:
            raise ValueError(
                f"{name} in {file} must have {num_bytes} bytes within the file's "
                f"{size}, but its data_offsets are {first} and {last}: is the download complete?"
            )
    # The format allows neither shared bytes nor holes: the tensors must follow each other.
    # `end` is where `previous` ends: the header, and then the tensor before `entry`.
    previous, end = "the header", data_start
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.num_bytes)):
        if entry.start != end:
            raise ValueError(
                f"{entry.name} in {file} must begin at byte {end - data_start} of the data, where "
                f"{previous} ends, but begins at {entry.start - data_start}: its data_offsets "
                f"{'overlap' if entry.start < end else 'leave a hole'}."
            )
        previous, end = entry.name, entry.start + entry.num_bytes
    if end != size:
        raise ValueError(
            f"{file} must have {end} bytes, as the data_offsets of its tensors say, but has {size}."
        )
    return entries


def _json_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """Returns a header's JSON without metadata, where the data begin, and the file's size."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        size = os.fstat(opened.fileno()).st_size
        if not 2 <= length <= size - 8:
            raise ValueError(
                f"{file} is not a safetensors file: its header would be {length} bytes."
            )
        try:
            header = json.loads(opened.read(length), object_pairs_hook=_without_duplicates)
        except ValueError as error:
            raise ValueError(
                f"{file} is not a safetensors file: its header is not JSON; {error}"
            ) from error
    if not isinstance(header, dict):
        raise ValueError(f"{file} is not a safetensors file: its header names no tensors.")
    header.pop("__metadata__", None)
    return header, 8 + length, size


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object as a dict; ValueError if a key is there twice."""
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"each tensor must be named once, but {twice} is named twice")
    return out


def create(file: Path, tensors: TensorTypes) -> None:
    """Creates a safetensors file of zeros, with the dtypes and shapes of `tensors`."""
    # Some versions of transformers refuse a file whose metadata do not name a format.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    # Spaces after the JSON let the tensors' bytes begin at a multiple of 8.
    encoded += b" " * (-len(encoded) % 8)
    with file.open("wb") as opened:
        opened.write(len(encoded).to_bytes(8, "little") + encoded)
        opened.truncate(8 + len(encoded) + end)


@contextlib.contextmanager
def rewriting(directory: Directory, names: Iterable[str]) -> Iterator[Directory]:
    """Yields a writable `Directory` of copies of the files that hold the tensors `names`.

    On exit, each copy atomically replaces its file. A symbolic link, for example into a shared
    cache, is replaced by a file; its target stays unchanged.
    """
    files = sorted({directory.files[name] for name in names})
    with scratch_folder(directory.path) as scratch:
        for file in files:
            (scratch / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(directory.path / file, scratch / file)
        if (directory.path / INDEX).exists():
            shutil.copyfile(directory.path / INDEX, scratch / INDEX)
        yield Directory(scratch, writable=True)
        for file in files:
            os.replace(scratch / file, directory.path / file)


@contextlib.contextmanager
def adding(
    directory: Directory, file: str, tensors: TensorTypes, removed: Iterable[str] = ()
) -> Iterator[Directory]:
    """Yields a writable `Directory` of a new file called `file`, with `tensors` that are zeros.

    On exit, the file is added to `directory`, whose index names the tensors `removed` no longer.
    """
    index_file = directory.path / INDEX
    if not index_file.exists() and (directory.path / ONE_FILE).exists():
        raise ValueError(
            f"{directory.path} must have an index, {INDEX}, or no tensors for {file} to be added, "
            f"but has {ONE_FILE}, which programs read without an index."
        )
    gone = {*tensors, *removed}
    kept = {name: holder for name, holder in directory.files.items() if name not in gone}
    in_file = [name for name, holder in kept.items() if holder == file]
    if in_file:
        raise ValueError(
            f"{directory.path / file} must be free for a new block, but {INDEX} says that it holds "
            f"{min(in_file)}; rename that file, in the index too."
        )
    index = _read_index(index_file) if index_file.exists() else {}
    index["metadata"] = _metadata_after(directory, dict(index.get("metadata") or {}), kept, tensors)
    index["weight_map"] = kept | dict.fromkeys(tensors, file)
    with scratch_folder(directory.path) as scratch:
        create(scratch / file, tensors)
        write_index(scratch, {"weight_map": dict.fromkeys(tensors, file)})  # for `scratch`
        yield Directory(scratch, writable=True)
        write_index(scratch, index)
        # The index comes last, because the tensors that it names must be there.
        os.replace(scratch / file, directory.path / file)
        os.replace(scratch / INDEX, index_file)


def _metadata_after(
    directory: Directory, metadata: dict[str, int], kept: Iterable[str], added: TensorTypes
) -> dict[str, int]:
    """Updates the sizes in an index's metadata for the tensors that stay and those `added`."""
    lost = [directory.entry(name) for name in directory.files.keys() - set(kept)]
    added_bytes = sum(math.prod(shape) * dtype.itemsize for dtype, shape in added.values())
    if all((directory.path / file).exists() for file in set(directory.files.values())):
        kept_bytes = sum(directory.entry(name).num_bytes for name in kept)
        metadata["total_size"] = added_bytes + kept_bytes
    elif "total_size" in metadata:  # some `kept` cannot be read, as after a partial download
        metadata["total_size"] += added_bytes - sum(entry.num_bytes for entry in lost)
    if "total_parameters" in metadata:
        metadata["total_parameters"] += sum(math.prod(shape) for _, shape in added.values())
        metadata["total_parameters"] -= sum(math.prod(entry.shape) for entry in lost)
    return metadata


def write_index(folder: Path, index: Mapping[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


@contextlib.contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Makes a temporary folder in `path`, and removes it in the end."""
    scratch = Path(tempfile.mkdtemp(prefix=".rewriting-", dir=path))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch)
