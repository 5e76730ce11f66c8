"""Tests of safetensors files, read and written in slices."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from support.published import publish, safetensors_bytes

from jax_ep.checkpoints.safetensors import (
    INDEX,
    ONE_FILE,
    Directory,
    adding,
    read_header,
    rewriting,
)

WHOLE = slice(None)


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
    assert mapped_kib() - before < x.nbytes / 1024 / 8


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
    with (
        pytest.raises(ValueError, match="free for a new block, but .* holds x; rename"),
        adding(Directory(tmp_path), "x.safetensors", {"z": (x.dtype, x.shape)}),
    ):
        pass


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


def test_a_file_that_the_index_does_not_name_is_not_read(tmp_path):
    x, y = np.zeros(2, np.float32), np.ones(2, np.float32)
    publish(tmp_path, {}, {"x": x}, {"y": x})
    publish(tmp_path, {}, {"x": y, "stray": y})
    directory = Directory(tmp_path)
    assert set(directory.files) == {"x", "y"}
    assert directory.read("x", (WHOLE,)).tolist() == [0, 0]
    with rewriting(directory, ["x"]) as new:
        new.write("x", (WHOLE,), x + 2)
    assert Directory(tmp_path).read("x", (WHOLE,)).tolist() == [2, 2]
    (tmp_path / ONE_FILE).write_bytes(b"<!DOCTYPE html>")
    assert set(Directory(tmp_path).files) == {"x", "y"}
    # An index may name a file that is called as one without an index.
    file = Directory(tmp_path).files["x"]
    (tmp_path / file).rename(tmp_path / ONE_FILE)
    (tmp_path / INDEX).write_text((tmp_path / INDEX).read_text().replace(file, ONE_FILE))
    assert Directory(tmp_path).read("x", (WHOLE,)).tolist() == [2, 2]


@pytest.mark.parametrize("kind, bits", [("C64", 64), ("F4", 4), ("F12_OF_TOMORROW", 12)])
def test_a_dtype_that_is_not_known_hinders_only_its_own_tensor(tmp_path, kind, bits):
    """Tensors next to it must be read and written, and its bytes must count in total_size."""
    data = bytes(8 * bits // 8)
    x = np.arange(3, dtype=np.float32)
    f32 = {"dtype": "F32", "shape": [3]}
    header = {
        "before": f32 | {"data_offsets": [0, 12]},
        "odd": {"dtype": kind, "shape": [2, 4], "data_offsets": [12, 12 + len(data)]},
        "after": f32 | {"data_offsets": [12 + len(data), 24 + len(data)]},
    }
    file = tmp_path / "a.safetensors"
    file.write_bytes(with_header(json.dumps(header), x.tobytes() + data + x.tobytes()))
    weight_map = dict.fromkeys(header, "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    directory = Directory(tmp_path)
    np.testing.assert_array_equal(directory.read("before", (WHOLE,)), x)
    with pytest.raises(ValueError, match=f"odd in .*a.safetensors must have a dtype .* has {kind}"):
        directory.read("odd", (WHOLE, WHOLE))
    with rewriting(directory, ["after"]) as new:
        new.write("after", (WHOLE,), x + 1)
    assert file.read_bytes()[-24 - len(data) :] == x.tobytes() + data + (x + 1).tobytes()
    with adding(Directory(tmp_path), "b.safetensors", {"b": (x.dtype, (1,))}):
        pass
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 24 + len(data) + 4


def with_header(header, data):
    """Returns the bytes of a safetensors file."""
    return len(header.encode()).to_bytes(8, "little") + header.encode() + data


@pytest.mark.parametrize("offsets, more, message", [
    ([(0, 12), (8, 20)], 0, "b in .* byte 12 .* where a ends, .* at 8: its data_offsets overlap"),
    ([(12, 24), (4, 16)], 0, "b in .* at byte 0 .* the header ends, .* leave a hole"),
    ([(0, 12), (16, 28)], 4, "b in .* byte 12 .* where a ends, .* at 16: .* leave a hole"),
    ([(0, 12), (12, 24)], 4, "must have [0-9]+ bytes, as the data_offsets .* say, but has"),
    ([(0, 12), (20, 32)], 0, "b in .* its data_offsets are 20 and 32: is the download complete"),
    ([(0, 12), (-12, 0)], 0, "b in .* its data_offsets are -12 and 0"),
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
    file.write_bytes(with_header(json.dumps(entries), bytes(24 + more)))
    with pytest.raises(ValueError, match=message):
        read_header(file)


def test_tensors_may_follow_each_other_in_any_order_and_be_empty(tmp_path):
    f32 = {"dtype": "F32", "shape": [3]}
    none = {"dtype": "F32", "shape": [0, 3]}
    header = {
        "__metadata__": {"format": "pt"},
        "b": f32 | {"data_offsets": [12, 24]},
        "between": none | {"data_offsets": [12, 12]},
        "a": f32 | {"data_offsets": [0, 12]},
        "last": none | {"data_offsets": [24, 24]},
    }
    (tmp_path / ONE_FILE).write_bytes(with_header(json.dumps(header), bytes(24)))
    directory = Directory(tmp_path)
    assert set(directory.files) == {"a", "b", "between", "last"}
    assert directory.read("between", (WHOLE, WHOLE)).shape == (0, 3)
    assert directory.read("b", (WHOLE,)).tolist() == [0, 0, 0]


def test_a_name_twice_is_refused(tmp_path):
    entry = '{"dtype": "F32", "shape": [3], "data_offsets": [%d, %d]}'
    text = f'{{"a": {entry % (0, 12)}, "a": {entry % (12, 24)}}}'
    (tmp_path / ONE_FILE).write_bytes(with_header(text, bytes(24)))
    with pytest.raises(ValueError, match="named once, but a is named twice"):
        Directory(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(ValueError, match="json must .*named once, but a is named twice"):
        Directory(tmp_path)


WHOLE_FILE = safetensors_bytes({"x": np.zeros(4, np.float32)})
NEGATIVE = '{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}'


@pytest.mark.parametrize("data, message", [
    (b"<!DOCTYPE html><p>404", "model.safetensors is not a safetensors file: its header"),
    (with_header("{a:1", b""), "its header is not JSON"),
    (with_header('{"a": 3}', bytes(4)), "must have dtype, shape and two"),
    (with_header(NEGATIVE, bytes(4)), "a in .* its data_offsets are"),
    (WHOLE_FILE[:-1], "x in .* must have 16 bytes .* download complete"),
])  # fmt: skip
def test_a_damaged_file_is_named(tmp_path, data, message):
    (tmp_path / ONE_FILE).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        Directory(tmp_path)


def test_a_damaged_index_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="must hold model.safetensors or model.safetensors"):
        Directory(tmp_path)
    publish(tmp_path, {}, {"x": np.zeros(4, np.float32)}, {"y": np.zeros(4, np.float32)})
    index = tmp_path / INDEX
    written = index.read_text()
    for text in ("{}", "[]", '{"weight_map": {"x": 1}}'):
        index.write_text(text)
        with pytest.raises(ValueError, match="must have a weight_map from tensors to files"):
            Directory(tmp_path)
    index.write_text(written.replace('"y"', '"z"'))
    with pytest.raises(ValueError, match="must hold z, as .*index.json says, but does not"):
        Directory(tmp_path).entry("z")
    (tmp_path / json.loads(written)["weight_map"]["x"]).unlink()
    with pytest.raises(FileNotFoundError, match="must hold model-00001-of-00002.* with x, as"):
        Directory(tmp_path).entry("x")
