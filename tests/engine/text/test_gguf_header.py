from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.errors import ConfigError
from engine.text.gguf_header import read_gguf_header


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.u32", 7)
    writer.add_int64("a.i64", -8)
    writer.add_float32("a.f32", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "déjà vu")
    writer.add_array("a.strings", ["x", "", "日本"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("two", np.zeros((4, 32), np.float32), raw_dtype=None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_and_tensors_are_read_as_they_were_written(small_file: Path):
    header = read_gguf_header(small_file)
    values = {key: header.metadata[key] for key in header.metadata if key.startswith("a.")}
    assert values == {
        "a.u32": 7,
        "a.i64": -8,
        "a.f32": 0.5,
        "a.bool": True,
        "a.string": "déjà vu",
        "a.strings": ["x", "", "日本"],
        "a.numbers": [1, 2, 3],
    }
    one = header.tensors["one"]
    assert (one.shape, one.type_name, one.num_bytes) == ((2, 3), "F32", 24)
    raw = small_file.read_bytes()[one.offset : one.offset + 24]
    assert np.frombuffer(raw, np.float32).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_file_cut_anywhere_is_refused_with_its_name_and_size(small_file: Path, tmp_path: Path):
    whole = small_file.read_bytes()
    end = max(t.offset + (t.num_bytes or 0) for t in read_gguf_header(small_file).tensors.values())
    for size in range(end):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=rf"cut\.gguf.*\b{size}\b"):
            read_gguf_header(cut)


def test_a_cut_in_the_tensor_data_names_the_expected_size(small_file: Path, tmp_path: Path):
    whole = small_file.read_bytes()
    end = max(t.offset + (t.num_bytes or 0) for t in read_gguf_header(small_file).tensors.values())
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: end - 1])
    with pytest.raises(ConfigError, match=f"describes {end} bytes, the file has {end - 1}"):
        read_gguf_header(cut)


def test_a_damaged_byte_in_the_header_never_escapes_as_another_error(
    small_file: Path, tmp_path: Path
):
    whole = bytearray(small_file.read_bytes())
    refused = 0
    for position in range(min(len(whole), 700)):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        path = tmp_path / "damaged.gguf"
        path.write_bytes(damaged)
        try:
            read_gguf_header(path)
        except ConfigError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (b"PK\x03\x04" + b"\0" * 100, "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "metadata keys"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 1 << 58),
            "strings",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q2sI", 2, b"\xff\xff", 4), "UTF-8"),
    ],
)
def test_garbage_is_refused(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "garbage.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"garbage\.gguf.*{message}"):
        read_gguf_header(path)


def test_a_missing_key_and_a_key_of_another_type_are_refused(small_file: Path):
    header = read_gguf_header(small_file)
    with pytest.raises(ConfigError, match=r"no 'llama\.block_count'"):
        header.require("llama.block_count", int)
    with pytest.raises(ConfigError, match=r"'a\.string' is a str"):
        header.get("a.string", int)
