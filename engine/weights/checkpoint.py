"""A checkpoint: what the decoder is, and its tensors under canonical names, read when asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.models.architecture import Architecture
from engine.quantisation.codes import CodedMatrix

T = TypeVar("T")

Span = tuple[int, int]
"""First and last, the last exclusive."""

_HASH_CHUNK_BYTES = 8 * 1024 * 1024


class Lazy(Mapping[str, T]):
    """Tensors or matrices by canonical name, each read and converted anew on every access.

    So a model that packs its weights never holds the checkpoint twice. Everything is fresh and
    contiguous, and the caller's own.
    """

    def __init__(
        self,
        readers: Mapping[str, Callable[[], T]],
        slices: Mapping[str, Callable[[int, Span], T]] | None = None,
    ) -> None:
        """slices: reads `(dim, span)` of a tensor without the rest of it; see `part`."""
        self._readers = dict(readers)
        self.slices = dict(slices or {})

    def __getitem__(self, name: str) -> T:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def part(tensors: Mapping[str, Tensor], name: str, dim: int, span: Span) -> Tensor:
    """Rows (`dim` 0) or columns (1) of a tensor, contiguous: read alone where that is possible."""
    first, last = span
    read = tensors.slices.get(name) if isinstance(tensors, Lazy) else None
    if read is not None:
        return read(dim, span)
    return (
        tensors[name].narrow(dim, first, last - first).clone(memory_format=torch.contiguous_format)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model's weights, whatever file they come from."""

    architecture: Architecture
    tensors: Mapping[str, Tensor]
    """Exactly the names and shapes of `architecture.tensor_shapes()`, in the dtype asked for."""

    coded: Mapping[str, CodedMatrix] = field(default_factory=dict[str, CodedMatrix])
    """Those matrices that are stored as codes, losslessly; `tensors` has them expanded."""

    fingerprint: str
    """Hex sha256 over weights, arithmetic and dtype: equal means that KV may be exchanged."""


def check_tensors(
    where: Path, architecture: Architecture, found: Mapping[str, tuple[int, ...]]
) -> None:
    """Compare canonical names and shapes with what the architecture needs.

    Raises ConfigError naming every missing, surplus and misshapen tensor (the first few of each).
    """
    needed = architecture.tensor_shapes()
    misshapen = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in needed.items()
        if name in found and found[name] != shape
    ]
    problems = [
        f"{what}: {_some(names)}"
        for what, names in (
            ("missing", [name for name in needed if name not in found]),
            ("not part of this architecture", [name for name in found if name not in needed]),
            ("of the wrong shape", misshapen),
        )
        if names
    ]
    if problems:
        raise ConfigError(
            f"{where}: the tensors do not make a {architecture.name} decoder with "
            f"{architecture.num_layers} layers: {'; '.join(problems)}. Is it complete, and of a "
            "supported variant?"
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:6])
    return shown if len(names) <= 6 else f"{shown} and {len(names) - 6} more"


def fingerprint(architecture: Architecture, dtype: torch.dtype, files: Iterable[Path]) -> str:
    """Digest of everything that decides what KV looks like, the same on every host.

    Hashes whole files at the speed of sha256 (about 1 GB/s), in the order given. Names, EOS and BOS
    do not enter.
    """
    arithmetic = asdict(architecture)
    for name in ("name", "eos_token_ids", "bos_token_id", "max_context_tokens"):
        del arithmetic[name]
    outer = hashlib.sha256(
        json.dumps(["tailrace-weights-1", arithmetic, str(dtype)], sort_keys=True).encode()
    )
    for path in files:
        inner = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK_BYTES):
                inner.update(chunk)
        outer.update(inner.digest())
    return outer.hexdigest()
