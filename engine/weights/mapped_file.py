"""A file mapped into memory, read as tensors."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ConfigError

SERIAL_ELEMENTS = 32_000
"""Elements converted by one operation: below torch's grain of 32,768, so that no operation opens a
parallel region. Thousands of those cost seconds when replicas that start together share few cores
(the threads of one wait at a barrier while the other's hold the core), and memory sets the pace."""


class MappedFile:
    """Views into one file. The mapping lives as long as a view of it does."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that cannot be read or is empty."""
        try:
            with path.open("rb") as file:
                # A private mapping: torch wants writable memory, and nothing reaches the file.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be mapped ({error})") from error

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """`shape` of `dtype` at byte `offset`: a view, not to be written to."""
        count = math.prod(shape)
        data = torch.frombuffer(
            self._data, dtype=torch.uint8, count=count * dtype.itemsize, offset=offset
        )
        if offset % dtype.itemsize:
            data = data.clone()  # torch reinterprets aligned memory only
        return data.view(dtype).view(shape)


def convert(source: Tensor, dtype: torch.dtype) -> Tensor:
    """A contiguous copy of `source` in `dtype`, made by the calling thread alone."""
    out = torch.empty(source.shape, dtype=dtype)
    flat, target = source.reshape(-1), out.view(-1)
    for start in range(0, flat.numel(), SERIAL_ELEMENTS):
        target[start : start + SERIAL_ELEMENTS] = flat[start : start + SERIAL_ELEMENTS]
    return out
