"""Tests of safetensors files, read and written in slices."""

from __future__ import annotations

import json
import os

import jax.numpy as jnp
import numpy as np
import pytest
from support.published import publish, safetensors_bytes

from jax_ep.checkpoints.safetensors import (
    INDEX,
    ONE_FILE,
    Directory,
    adding,
    create,
    read_header,
    rewriting,
)

WHOLE = slice(None)


@pytest.mark.parametrize(
    "dtype, name, stored",
    [
        (np.float32, "F32", bytes.fromhex("0000803f 000000c0")),
        (np.float16, "F16", bytes.fromhex("003c 00c0")),
        (jnp.bfloat16, "BF16", bytes.fromhex("803f 00c0")),
        (jnp.float8_e4m3fn, "F8_E4M3", bytes.fromhex("38 c0")),
    ],
)
def test_reads_bytes_written_by_hand(tmp_path, dtype, name, stored):
    """The numbers 1 and -2, written byte by byte after another tensor, must be read."""
    entry = {"dtype": name, "shape": [2, 1], "data_offsets": [1, 1 + len(stored)]}
    other = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "other": other, "x": entry}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\7" + stored)
    directory = Directory(tmp_path)
    assert set(directory.files) == {"other", "x"}
    read = directory.read("x", (WHOLE, WHOLE))
    assert read.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(read.astype(np.float32), [[1], [-2]])
    assert directory.read("x", (slice(1, 2), WHOLE)).astype(np.float32).tolist() == [[-2]]


def test_counts_only_the_bytes_of_the_slice(tmp_path):
    x = np.arange(60, dtype=np.float32).reshape(5, 12)
    directory = Directory(publish(tmp_path, {}, {"x": x}))
    np.testing.assert_array_equal(directory.read("x", (slice(1, 3), slice(1, 12, 2))), x[1:3, 1::2])
    assert directory.bytes_read == 2 * 6 * 4


def test_what_was_read_leaves_the_process(tmp_path):
    """Reading must give the mapped pages of a file back to the system.

    The system counts the pages that a process has read as memory of the process.
    """
    x = np.zeros((64, 1 << 17), np.float32)
    directory = Directory(publish(tmp_path, {}, {"x": x}))

    def mapped_kib() -> int:
        (line,) = (s for s in open("/proc/self/status") if s.startswith("RssFile"))
        return int(line.split()[1])

    before = mapped_kib()
    for row in range(64):
        directory.read("x", (slice(row, row + 1), WHOLE))
    assert directory.bytes_read == x.nbytes
    assert mapped_kib() - before < x.nbytes / 1024 / 8


def test_finds_tensors_of_several_files_by_the_index(tmp_path):
    a, b = np.ones(3, np.float32), np.full(2, 2, jnp.bfloat16)
    directory = Directory(publish(tmp_path, {}, {"a": a}, {"b": b}))
    np.testing.assert_array_equal(directory.read("a", (WHOLE,)), a)
    np.testing.assert_array_equal(directory.read("b", (slice(1, 2),)), b[1:])


def test_writes_slices(tmp_path):
    file = tmp_path / "model.safetensors"
    bfloat16 = np.dtype(jnp.bfloat16)
    create(file, {"a": (np.dtype(np.float32), (2, 3)), "b": (bfloat16, (4,))})
    directory = Directory(tmp_path, writable=True)
    directory.write("a", (slice(1, 2), slice(0, 3, 2)), np.array([[5, 6]], np.float32))
    directory.write("b", (slice(2, 3),), np.array([7], bfloat16))
    read = Directory(tmp_path)
    assert read.read("a", (WHOLE, WHOLE)).tolist() == [[0, 0, 0], [5, 0, 6]]
    assert read.read("b", (WHOLE,)).astype(np.float32).tolist() == [0, 0, 7, 0]
    assert len(file.read_bytes()) == read.entry("b").start + 8


def test_rewriting_replaces_whole_files_or_nothing(tmp_path):
    folder, cache = tmp_path / "model", tmp_path / "cache"
    x, y = np.zeros(2, np.float32), np.ones(2, np.float32)
    publish(folder, {}, {"x": x}, {"y": y})
    directory = Directory(folder)
    first = folder / directory.files["x"]
    first.rename(cache)
    first.symlink_to(cache)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    with pytest.raises(ZeroDivisionError), rewriting(directory, ["x"]) as new:
        new.write("x", (WHOLE,), y)
        raise ZeroDivisionError
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before

    with rewriting(directory, ["x"]) as new:
        new.write("x", (WHOLE,), y)
    assert Directory(folder).read("x", (WHOLE,)).tolist() == [1, 1]
    assert not first.is_symlink() and cache.read_bytes() == before[first.name]
    assert {p.name for p in folder.iterdir()} == set(before)


def test_a_save_that_was_killed_hinders_none(tmp_path):
    """The temporary folder that a killed save has left must not hinder other saves.

    Its name may have this process's number, since process numbers repeat in a restarted container.
    """
    x = np.zeros(2, np.float32)
    publish(tmp_path, {}, {"x": x}, {"y": x})
    (tmp_path / f".rewriting-{os.getpid()}").mkdir()
    with rewriting(Directory(tmp_path), ["x"]) as new, rewriting(Directory(tmp_path), ["y"]):
        new.write("x", (WHOLE,), x + 1)
    assert Directory(tmp_path).read("x", (WHOLE,)).tolist() == [1, 1]


def test_rewrites_files_in_subfolders_and_no_others(tmp_path):
    x, folder = np.zeros(2, np.float32), tmp_path / "model"
    publish(folder, {}, {"x": x}, {"y": x})
    index = json.loads((folder / INDEX).read_text())
    name = index["weight_map"]["x"]
    (folder / "parts").mkdir()
    (folder / name).rename(folder / "parts" / name)

    def name_in_index(file):
        index["weight_map"]["x"] = str(file)
        (folder / INDEX).write_text(json.dumps(index))

    name_in_index(f"parts/{name}")
    with rewriting(Directory(folder), ["x"]) as new:
        new.write("x", (WHOLE,), x + 1)
    assert Directory(folder).read("x", (WHOLE,)).tolist() == [1, 1]
    for elsewhere in ("../x.safetensors", tmp_path / "x.safetensors"):
        name_in_index(elsewhere)
        with pytest.raises(ValueError, match="must name files in its own folder, but names '"):
            Directory(folder)


@pytest.mark.parametrize("metadata", [None, {"total_size": 0}, {"total_size": 7, "format": "pt"}])
def test_an_index_has_the_bytes_of_all_tensors(tmp_path, metadata):
    """total_size must count all tensors' bytes after a file is added, and after one is replaced."""
    x = np.zeros(2, np.float32)
    publish(tmp_path, {}, {"x": x}, {"y": x})
    index = json.loads((tmp_path / INDEX).read_text()) | {"metadata": metadata, "kept": 1}
    (tmp_path / INDEX).write_text(json.dumps(index))
    for name, shape in {"z": (2,), "x": (3,)}.items():
        with adding(Directory(tmp_path), f"{name}.safetensors", {name: (x.dtype, shape)}) as new:
            new.write(name, (WHOLE,), np.ones(shape, np.float32))
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"] == (metadata or {}) | {"total_size": 4 * (2 + 2 + 3)}
    assert index["kept"] == 1
    assert Directory(tmp_path).read("x", (WHOLE,)).tolist() == [1, 1, 1]


def test_the_index_of_a_part_of_a_download(tmp_path):
    """The bytes of files that are not downloaded must be taken from the index."""
    x = np.zeros(2, np.float32)
    publish(tmp_path, {}, {"x": x}, {"y": x})
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / index["weight_map"]["y"]).unlink()
    index["metadata"] = {"total_size": 16, "total_parameters": 4}
    (tmp_path / INDEX).write_text(json.dumps(index))
    for _ in range(2):
        tensors = {"z": (x.dtype, (3,)), "x": (x.dtype, (2,))}
        with adding(Directory(tmp_path), "new.safetensors", tensors):
            pass
        index = json.loads((tmp_path / INDEX).read_text())
        assert index["metadata"] == {"total_size": 28, "total_parameters": 7}


def test_a_file_with_other_tensors_is_not_replaced(tmp_path):
    x = np.zeros(2, np.float32)
    publish(tmp_path, {}, {"x": x}, {"y": x})
    directory = Directory(tmp_path)
    with (
        pytest.raises(ValueError, match="free for a new block, but .* holds x; rename"),
        adding(directory, directory.files["x"], {"z": (x.dtype, x.shape)}),
    ):
        pass


def test_a_file_that_the_index_does_not_name_is_not_read(tmp_path):
    x, y = np.zeros(2, np.float32), np.ones(2, np.float32)
    publish(tmp_path, {}, {"x": x}, {"y": x})
    publish(tmp_path, {}, {"x": y, "stray": y})
    directory = Directory(tmp_path)
    assert set(directory.files) == {"x", "y"}
    assert directory.read("x", (WHOLE,)).tolist() == [0, 0]
    with adding(directory, "z.safetensors", {"z": (x.dtype, x.shape)}):
        pass
    with rewriting(Directory(tmp_path), ["x"]) as new:
        new.write("x", (WHOLE,), x + 2)
    stray = Directory(publish(tmp_path / "alone", {}, {"x": y}))
    assert stray.read("x", (WHOLE,)).tolist() == [1, 1]
    assert Directory(tmp_path).read("x", (WHOLE,)).tolist() == [2, 2]
    assert read_header(tmp_path / "model.safetensors").keys() == {"x", "stray"}
    # A damaged file that the index does not name must not matter; one that it names is read.
    (tmp_path / "model.safetensors").write_bytes(b"<!DOCTYPE html>")
    assert set(Directory(tmp_path).files) == {"x", "y", "z"}
    publish(tmp_path / "named", {}, {"x": x}, {"y": x})
    file = Directory(tmp_path / "named").files["x"]
    (tmp_path / "named" / file).rename(tmp_path / "named" / "model.safetensors")
    text = (tmp_path / "named" / INDEX).read_text().replace(file, "model.safetensors")
    (tmp_path / "named" / INDEX).write_text(text)
    assert Directory(tmp_path / "named").read("x", (WHOLE,)).tolist() == [0, 0]


@pytest.mark.parametrize("kind, bits", [
    ("C64", 64), ("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6), ("F8_E4M3FNUZ", 8), ("F8_E5M2FNUZ", 8),
    ("I4", 4), ("F12_OF_TOMORROW", 12),
])  # fmt: skip
def test_a_dtype_that_is_not_known_hinders_only_its_own_tensor(tmp_path, kind, bits):
    """An unknown dtype must be an error only for its own tensor, not for tensors next to it."""
    data = bytes(8 * bits // 8)
    x = np.arange(3, dtype=np.float32)
    header = {
        "before": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]},
        "odd": {"dtype": kind, "shape": [2, 4], "data_offsets": [12, 12 + len(data)]},
        "after": {
            "dtype": "F32", "shape": [3], "data_offsets": [12 + len(data), 24 + len(data)]
        },
    }  # fmt: skip
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + x.tobytes() + data + x.tobytes())
    directory = Directory(tmp_path)
    for name in ("before", "after"):
        np.testing.assert_array_equal(directory.read(name, (WHOLE,)), x)
    with pytest.raises(ValueError, match=f"odd in .*{ONE_FILE} must have a dtype .* has {kind}"):
        directory.read("odd", (WHOLE, WHOLE))
    with rewriting(directory, ["after"]) as new:
        new.write("after", (WHOLE,), x + 1)
    assert file.read_bytes()[-24 - len(data) :] == x.tobytes() + data + (x + 1).tobytes()
    # Adding a file must count the bytes of the tensor of unknown dtype in total_size.
    file.rename(tmp_path / "a.safetensors")
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": dict.fromkeys(header, "a.safetensors")})
    )
    with adding(Directory(tmp_path), "b.safetensors", {"b": (x.dtype, (1,))}):
        pass
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 24 + len(data) + 4
    (tmp_path / "a.safetensors").write_bytes(file_of(header, len(data) - 1))
    with pytest.raises(ValueError, match="after in .* is the download complete"):
        read_header(tmp_path / "a.safetensors")


def file_of(header, num_bytes):
    """Returns the bytes of a safetensors file with the given header and zeros as its data.

    The data has 24 bytes, for two tensors of 12 bytes, and `num_bytes` more.
    """
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(24 + num_bytes)


@pytest.mark.parametrize("offsets, more, message", [
    ([(0, 12), (8, 20)], 0, "b in .* byte 12 .* where a ends, .* at 8: its data_offsets overlap"),
    ([(0, 12), (0, 12)], 0, "b in .* byte 12 .* where a ends, .* at 0: its data_offsets overlap"),
    ([(12, 24), (4, 16)], 0, "b in .* at byte 0 .* the header ends, .* leave a hole"),
    ([(0, 12), (16, 28)], 4, "b in .* byte 12 .* where a ends, .* at 16: .* leave a hole"),
    ([(4, 16), (16, 28)], 4, "a in .* at byte 0 .* where the header ends, .* leave a hole"),
    ([(0, 12), (12, 24)], 4, "must have [0-9]+ bytes, as the data_offsets .* say, but has"),
    ([(0, 12), (20, 32)], 0, "b in .* its data_offsets are 20 and 32: is the download complete"),
    ([(0, 12), (-12, 0)], 0, "b in .* its data_offsets are -12 and 0"),
    ([(0, 12), (24, 12)], 0, "b in .* its data_offsets are 24 and 12"),
    ([(0, 12), (12, 20)], 0, "b in .* must have 12 bytes"),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["F32", "F32_OF_TOMORROW"])
def test_tensors_must_fill_a_file_without_overlap(tmp_path, offsets, more, message, kind):
    entries = {
        name: {"dtype": "F32", "shape": [3], "data_offsets": pair}
        for name, pair in zip("ab", offsets, strict=True)
    }
    entries["b"]["dtype"] = kind
    if kind != "F32" and offsets[1] == (12, 20):
        message = "must have [0-9]+ bytes, as the data_offsets"
    file = tmp_path / ONE_FILE
    file.write_bytes(file_of(entries, more))
    with pytest.raises(ValueError, match=message):
        read_header(file)


def test_tensors_may_follow_each_other_in_any_order_and_be_empty(tmp_path):
    f32 = {"dtype": "F32", "shape": [3]}
    none = {"dtype": "F32", "shape": [0, 3]}
    header = {
        "b": f32 | {"data_offsets": [12, 24]},
        "between": none | {"data_offsets": [12, 12]},
        "a": f32 | {"data_offsets": [0, 12]},
        "last": none | {"data_offsets": [24, 24]},
    }
    (tmp_path / ONE_FILE).write_bytes(file_of(header, 0))
    assert Directory(tmp_path).read("between", (WHOLE, WHOLE)).shape == (0, 3)
    assert Directory(tmp_path).read("b", (WHOLE,)).tolist() == [0, 0, 0]


def test_a_name_twice_is_refused(tmp_path):
    entry = '{"dtype": "F32", "shape": [3], "data_offsets": [%d, %d]}'
    text = f'{{"a": {entry % (0, 12)}, "a": {entry % (12, 24)}}}'.encode()
    file = tmp_path / ONE_FILE
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(24))
    with pytest.raises(ValueError, match="named once, but a is named twice"):
        read_header(file)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(ValueError, match="json must .*named once, but a is named twice"):
        Directory(tmp_path)


def test_errors_name_the_file_and_the_tensor(tmp_path):
    with pytest.raises(FileNotFoundError, match="must hold model.safetensors or model.safetensors"):
        Directory(tmp_path)

    file = tmp_path / "model.safetensors"
    file.write_bytes(b"<!DOCTYPE html><p>404")
    message = "model.safetensors is not a safetensors file: its header"
    with pytest.raises(ValueError, match=message):
        Directory(tmp_path)
    file.write_bytes((4).to_bytes(8, "little") + b"{a:1")
    with pytest.raises(ValueError, match="its header is not JSON"):
        Directory(tmp_path)

    no_name = '{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}'
    for header in ("[1]", '{"a": 3}', '{"a": {"dtype": "F32", "data_offsets": [0, 4]}}', no_name):
        file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
        with pytest.raises(ValueError, match="names no tensors|must have dtype, shape and two"):
            Directory(tmp_path)
    for shape, offsets in (([-1, -1], [0, 4]), ([1], [-4, 0])):
        header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}})
        file.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
        with pytest.raises(ValueError, match="a in .* its data_offsets are"):
            Directory(tmp_path)

    whole = safetensors_bytes({"x": np.zeros(4, np.float32)})
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="x in .* must have 16 bytes .* download complete"):
        read_header(file)
    file.write_bytes(whole[:-1].replace(b'"F32"', b'"C64"'))
    with pytest.raises(ValueError, match="x in .* its data_offsets are 0 and 16: is the download"):
        read_header(file)

    publish(tmp_path, {}, {"x": np.zeros(4, np.float32)}, {"y": np.zeros(4, np.float32)})
    file.unlink()
    index = tmp_path / "model.safetensors.index.json"
    written = index.read_text()
    for text in ("{}", "[]", '{"weight_map": {"x": 1}}'):
        index.write_text(text)
        with pytest.raises(ValueError, match="must have a weight_map from tensors to files"):
            Directory(tmp_path)
    index.write_text(written)
    index.write_text(index.read_text().replace('"y"', '"z"'))
    with pytest.raises(ValueError, match="must hold z, as .*index.json says, but does not"):
        Directory(tmp_path).entry("z")
    (tmp_path / json.loads(written)["weight_map"]["x"]).unlink()
    with pytest.raises(FileNotFoundError, match="must hold model-00001-of-00002.* with x, as"):
        Directory(tmp_path).entry("x")
