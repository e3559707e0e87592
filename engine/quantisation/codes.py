"""A matrix kept as codes: what every quantised format is turned into, and what it stands for."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.weights.mapped_file import SERIAL_ELEMENTS

BLOCK = 32
"""Groups are multiples of so many inputs."""

MAX_GROUP = 256
"""So many products of 16 bits by 8 fit a sum of 32 bits."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedMatrix:
    """A weight `[out, in]` as codes of 4 or 8 bits, each group of inputs with a scale.

        w = scale * (code - zero)       zero is 8 or 128, where there are no minimums
        w = scale * code + minimum      where there are

    Input k of the codes is input `order[k]` of the weight; None: the same.
    """

    bits: int
    group: int
    """Inputs that share a scale, in the order of the codes; the last group may be shorter."""

    codes: Tensor
    """uint8 `[out, in]`, one code a byte."""

    scales: Tensor
    """float32 `[out, groups]`."""

    minimums: Tensor | None = None
    order: Tensor | None = None
    """int32 `[in]`, a permutation."""

    def __post_init__(self) -> None:
        assert self.bits in (4, 8), self.bits
        assert self.group in range(BLOCK, self.group + 1, BLOCK), self.group
        out, size = self.codes.shape
        assert self.codes.dtype == torch.uint8
        for values in (self.scales, self.minimums):
            if values is not None:
                assert values.shape == (out, -(-size // self.group)), values.shape
                assert values.dtype == torch.float32
        if self.order is not None:
            assert self.order.dtype == torch.int32
            assert self.order.shape == (size,)

    @property
    def zero(self) -> int:
        """What a code is less by where there are no minimums."""
        return 1 << (self.bits - 1)

    @property
    def num_bytes(self) -> float:
        """What it takes in a kernel's memory with scales of two bytes."""
        scales = self.scales.numel() * (2 if self.minimums is None else 4)
        return self.codes.numel() * self.bits / 8 + scales

    def expand(self, dtype: torch.dtype) -> Tensor:
        """The weight `[out, in]` in `dtype`, a fresh tensor; the arithmetic is float32 or wider."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        out, size = self.codes.shape
        weight = torch.empty((out, size), dtype=dtype)
        columns = None if self.order is None else self.order.long()
        step = max(SERIAL_ELEMENTS // size, 1)
        for first in range(0, out, step):
            rows = slice(first, first + step)
            codes = self.codes[rows].to(wide)
            scales = self._spread(self.scales[rows], wide)
            if self.minimums is None:
                part = codes.sub_(self.zero).mul_(scales)
            else:
                part = codes.mul_(scales).add_(self._spread(self.minimums[rows], wide))
            if columns is None:
                weight[rows] = part
            else:
                weight[rows, columns] = part.to(dtype)
        return weight

    def _spread(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A value for each input `[rows, in]` from one for each group."""
        return values.to(dtype).repeat_interleave(self.group, dim=1)[:, : self.codes.shape[1]]

    def with_minimums(self) -> CodedMatrix:
        """The same weight with its zero written as minimums (exactly: zero is a power of two)."""
        if self.minimums is not None:
            return self
        return replace(self, minimums=self.scales * -float(self.zero))

    def with_group(self, group: int) -> CodedMatrix:
        """The same weight in smaller groups."""
        if group == self.group:
            return self
        assert self.group % group == 0, (self.group, group)
        size = self.codes.shape[1]
        groups = -(-size // group)

        def split(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            return values.repeat_interleave(self.group // group, dim=1)[:, :groups].contiguous()

        scales = split(self.scales)
        assert scales is not None
        return replace(self, group=group, scales=scales, minimums=split(self.minimums))


def alike(matrices: list[CodedMatrix]) -> list[CodedMatrix] | None:
    """The same weights in one form, as a kernel that computes them together needs.

    None where there is no such form: their inputs are ordered differently.
    """
    first = matrices[0].order
    for matrix in matrices[1:]:
        same = matrix.order is None if first is None else matrix.order is not None
        if not same or (first is not None and not torch.equal(first, matrix.order)):  # pyright: ignore[reportArgumentType]
            return None
    group = math.gcd(*(matrix.group for matrix in matrices))
    group = next(g for g in range(min(group, MAX_GROUP), 0, -BLOCK) if group % g == 0)
    bits = max(matrix.bits for matrix in matrices)
    # Codes of 4 bits are codes of 8 bits too, but for their zero.
    minimums = any(m.minimums is not None or m.bits != bits for m in matrices)
    return [
        replace((m.with_minimums() if minimums else m).with_group(group), bits=bits)
        for m in matrices
    ]
