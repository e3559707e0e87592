"""The numbers that a group of weights may take: equal steps, one of which is exactly zero."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

WHOLE_RANGE: Final = (1.0,)
SHRINKS: Final = (1.0, 0.96, 0.92, 0.88, 0.84, 0.8, 0.75, 0.7)
"""Shares of a group's range that are tried: cutting off the largest numbers can cost less than the
coarser steps that they force upon the others."""

_SMALLEST: Final = 2.0**-24
"""Of float16. Smaller scales are of no weight that matters, whatever they are stored in."""


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """`w = scale * (code - zero)` with codes of `bits` bits, for any number of groups.

    Scales are numbers that the type holds in which they are stored. Zeros are whole numbers from 1
    on: GPTQ's file format stores one less, and has no sign for it.
    """

    bits: int
    scales: Tensor
    """float32, one for each group."""

    zeros: Tensor
    """float32, of the same shape."""

    def codes(self, weight: Tensor) -> Tensor:
        """The nearest codes, float32, of `[*groups, n]` or of one number a group."""
        scales, zeros = self._beside(weight)
        return (weight / scales + zeros).round_().clamp_(0, (1 << self.bits) - 1)

    def values(self, codes: Tensor) -> Tensor:
        """What codes stand for."""
        scales, zeros = self._beside(codes)
        return (codes - zeros) * scales

    def nearest(self, weight: Tensor) -> Tensor:
        """The nearest numbers of the grid."""
        return self.values(self.codes(weight))

    def _beside(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.ndim == self.scales.ndim:
            return self.scales, self.zeros
        return self.scales[..., None], self.zeros[..., None]


def fit(
    grouped: Tensor,
    bits: int,
    *,
    symmetric: bool,
    shrinks: Sequence[float] = WHOLE_RANGE,
    curvature: Tensor | None = None,
    stored: torch.dtype = torch.float16,
) -> Grid:
    """The grid of each group of weights `[..., n]` that leaves the least error.

    curvature: `[n, n]`, or `[groups, n, n]` for weights `[..., groups, n]`: the error `e` of a
    group costs `e @ curvature @ e`, with the second moment of the inputs what it does to the
    output. None: its square. stored: what scales will be kept in.
    """
    steps = (1 << bits) - 1
    low, high = grouped.amin(-1).clamp_(max=0.0), grouped.amax(-1).clamp_(min=0.0)
    best: Grid | None = None
    least = low
    for shrink in shrinks:
        if symmetric:
            reach = torch.maximum(-low, high) * shrink
            # 4 bits: -8 to 7 around a middle of 8; 8 bits have no use for -128.
            scales = _stored(reach / (7.5 if bits == 4 else 127.0), stored)
            zeros = torch.full_like(scales, float(1 << (bits - 1)))
        else:
            scales = _stored((high - low) * (shrink / steps), stored)
            zeros = (-low * shrink / scales).round_().clamp_(1.0, float(steps))
        grid = Grid(bits, scales, zeros)
        if len(shrinks) == 1:
            return grid
        error = cost(grid.nearest(grouped) - grouped, curvature)
        if best is None:
            best, least = grid, error
            continue
        better = error < least
        least = torch.where(better, error, least)
        best = Grid(
            bits,
            torch.where(better, grid.scales, best.scales),
            torch.where(better, grid.zeros, best.zeros),
        )
    assert best is not None, "no share of the range was to be tried"
    return best


def cost(error: Tensor, curvature: Tensor | None) -> Tensor:
    """What errors `[..., n]` cost, see `fit`."""
    if curvature is None:
        return error.square().sum(-1)
    if curvature.ndim == 2:
        return (error @ curvature).mul_(error).sum(-1)
    return torch.einsum("...gn,gnm->...gm", error, curvature).mul_(error).sum(-1)


def _stored(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales as `dtype` has them, never zero."""
    if dtype != torch.bfloat16:
        # float32 too: times a zero, a number of 11 bits is still exact in it (`PackedMatrix`).
        return scales.clamp(_SMALLEST, torch.finfo(torch.float16).max).half().float()
    return scales.clamp(min=_SMALLEST).to(dtype).float()
