"""The header of a GGUF file: metadata and where each tensor lies, without the tensors themselves.

Layout (ggml-org/ggml, docs/gguf.md, versions 2 and 3, little endian):

    magic "GGUF" | version u32 | tensor count u64 | key count u64
    keys:    name, value type u32, value
    tensors: name, rank u32, extents u64 (fastest first), type u32, offset u64
    padding to `general.alignment` | tensor data

Read here rather than with the `gguf` package, whose reader takes seconds for a vocabulary of 50,000
strings; a gateway reads nothing but this.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engine.errors import ConfigError

GGML_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    30: ("BF16", 1, 2),
}
"""Type number to name, elements per block and bytes per block."""

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY_DEPTH = 4


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies and how it is stored."""

    name: str
    shape: tuple[int, ...]
    """Slowest extent first, as torch has it."""

    type_name: str
    """`F32`, `Q4_1`, ...; `type 99` for a number this table does not know."""

    offset: int
    """From the beginning of the file."""

    num_bytes: int | None
    """None for a type of unknown block size."""


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything a GGUF file states about itself."""

    path: Path
    size_bytes: int
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def require(self, key: str, kind: type | tuple[type, ...]) -> Any:
        """The value of `key`. Raises ConfigError when it is absent or not of `kind`."""
        value = self.metadata.get(key)
        if value is None:
            raise ConfigError(
                f"{self.path}: the metadata has no {key!r}: not a complete model file"
            )
        return self._checked(key, value, kind)

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """The value of `key` or `default`. Raises ConfigError when it is not of `kind`."""
        value = self.metadata.get(key)
        return default if value is None else self._checked(key, value, kind)

    def _checked(self, key: str, value: Any, kind: type | tuple[type, ...]) -> Any:
        if not isinstance(value, kind):
            raise ConfigError(
                f"{self.path}: metadata {key!r} is a {type(value).__name__}, expected {kind}"
            )
        return value


def read_gguf_header(path: Path) -> GGUFHeader:
    """Read and check the header.

    Raises ConfigError naming the file, and for a file that was cut short the bytes expected and
    found.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise ConfigError(
                    f"{path}: {size} bytes, a GGUF header alone has 24: cut short? Copy it again"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _HeaderParser(path, data, size).parse()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error


class _HeaderParser:
    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.pos = 0

    def parse(self) -> GGUFHeader:
        if self.data[:4] != b"GGUF":
            raise ConfigError(
                f"{self.path}: begins with {self.data[:4]!r}, not b'GGUF' ({self.size} bytes): "
                "not a GGUF file"
            )
        self.pos = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise ConfigError(
                f"{self.path}: GGUF version {version}: 2 and 3 are supported, little endian; "
                "convert the model again"
            )
        num_tensors, num_keys = self.scalar("Q"), self.scalar("Q")
        # A key takes at least 13 bytes and a tensor 24; a larger count would loop over garbage.
        self.expect(num_keys * 13, f"{num_keys} metadata keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"), depth=0)
        self.expect(num_tensors * 24, f"{num_tensors} tensors")
        raw = [self.tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self.garbage(f"general.alignment={alignment!r} is not a power of two")
        start = -(-self.pos // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        end = self.pos
        for name, shape, type_id, offset in raw:
            if offset % alignment:
                self.garbage(f"tensor {name!r} lies at {offset}, not a multiple of {alignment}")
            type_name, num_bytes = self.storage(name, shape, type_id)
            if name in tensors:
                self.garbage(f"tensor {name!r} is listed twice")
            tensors[name] = TensorInfo(name, shape, type_name, start + offset, num_bytes)
            end = max(end, start + offset + (num_bytes or 0))
        if end > self.size:
            raise ConfigError(
                f"{self.path}: cut short: its header describes {end} bytes, the file has "
                f"{self.size}. Copy or download it again"
            )
        return GGUFHeader(self.path, self.size, metadata, tensors)

    def storage(self, name: str, shape: tuple[int, ...], type_id: int) -> tuple[str, int | None]:
        if type_id not in GGML_TYPES:
            return f"type {type_id}", None
        type_name, block, block_bytes = GGML_TYPES[type_id]
        if shape[-1] % block:
            self.garbage(
                f"tensor {name!r} has rows of {shape[-1]}, not a multiple of {block} ({type_name})"
            )
        return type_name, math.prod(shape) // block * block_bytes

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        rank = self.scalar("I")
        if not 1 <= rank <= 4:
            self.garbage(f"tensor {name!r} has {rank} dimensions")
        extents = tuple(self.scalar("Q") for _ in range(rank))
        if 0 in extents:
            self.garbage(f"tensor {name!r} is empty: {extents}")
        return name, extents[::-1], self.scalar("I"), self.scalar("Q")

    def scalar(self, code: str) -> Any:
        width = struct.calcsize("<" + code)
        self.expect(width, "a number")
        (value,) = struct.unpack_from("<" + code, self.data, self.pos)
        self.pos += width
        return value

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        # The one hot loop: a vocabulary and its merges are a few hundred thousand strings.
        data, pos, size = self.data, self.pos, self.size
        length_at = struct.Struct("<Q").unpack_from
        found: list[str] = []
        for _ in range(count):
            if pos + 8 > size:
                self.pos = pos
                self.expect(8, "a string")
            (length,) = length_at(data, pos)
            pos += 8
            end = pos + length
            if end > size:
                self.pos = pos
                self.expect(length, "a string")
            try:
                found.append(data[pos:end].decode())
            except UnicodeDecodeError as error:
                self.garbage(f"the string at byte {pos} is not UTF-8 ({error.reason})")
            pos = end
        self.pos = pos
        return found

    def value(self, type_id: int, depth: int) -> Any:
        if type_id in _SCALARS:
            return self.scalar(_SCALARS[type_id])
        if type_id == _STRING:
            return self.string()
        if type_id != _ARRAY or depth == _MAX_ARRAY_DEPTH:
            self.garbage(f"value type {type_id} at depth {depth} is unknown")
        item_type, count = self.scalar("I"), self.scalar("Q")
        if item_type == _STRING:
            self.expect(count * 8, f"{count} strings")
            return self.strings(count)
        if item_type == _ARRAY:
            self.expect(count * 12, f"{count} arrays")
            return [self.value(_ARRAY, depth + 1) for _ in range(count)]
        if item_type not in _SCALARS:
            self.garbage(f"array item type {item_type} is unknown")
        code = _SCALARS[item_type]
        width = struct.calcsize("<" + code) * count
        self.expect(width, f"{count} numbers")
        values = list(struct.unpack_from(f"<{count}{code}", self.data, self.pos))
        self.pos += width
        return values

    def expect(self, num_bytes: int, what: str) -> None:
        if self.pos + num_bytes > self.size:
            raise ConfigError(
                f"{self.path}: cut short or damaged: {what} at byte {self.pos} need a file of at "
                f"least {self.pos + num_bytes} bytes, it has {self.size}. Copy or download it again"
            )

    def garbage(self, why: str) -> NoReturn:
        raise ConfigError(
            f"{self.path}: damaged near byte {self.pos} of {self.size}: {why}. "
            "Copy or download it again"
        )
