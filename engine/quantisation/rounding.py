"""Quantising a weight that is not: round to nearest, group by group."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from engine.quantisation.codes import CodedMatrix
from engine.weights.mapped_file import SERIAL_ELEMENTS

_SHRINKS: Final = (1.0, 0.94, 0.88, 0.82)
"""Shares of a group's range that are tried for 4 bits: cutting off the largest numbers can cost
less than the coarser steps that they force upon the others."""


def round_to_codes(weight: Tensor, bits: int, group: int) -> CodedMatrix:
    """The codes nearest to a weight `[out, in]`.

    8 bits: symmetric, -127 to 127 times a scale. 4 bits: 16 steps between a minimum and a maximum,
    for each group those of a few ranges that leave the least squared error. Scales and minimums are
    numbers that float16 holds, so that a kernel can keep them in two bytes.
    """
    out, size = weight.shape
    groups = -(-size // group)
    padded = groups * group
    codes = torch.empty((out, size), dtype=torch.uint8)
    scales = torch.empty((out, groups), dtype=torch.float32)
    minimums = torch.empty_like(scales) if bits == 4 else None
    step = max(SERIAL_ELEMENTS // padded, 1)
    for first in range(0, out, step):
        rows = slice(first, first + step)
        part = weight[rows].float()
        # The last number again and again leaves a group's range as it is.
        filled = torch.cat((part, part[:, -1:].expand(-1, padded - size)), dim=1)
        grouped = filled.reshape(part.shape[0], groups, group)
        if bits == 8:
            scale = _half(grouped.abs().amax(-1) / 127)
            code = _divide(grouped, scale).clamp_(-127, 127).add_(128)
        else:
            code, scale, minimum = _with_minimum(grouped)
            assert minimums is not None
            minimums[rows] = minimum
        scales[rows] = scale
        codes[rows] = code.reshape(part.shape[0], padded)[:, :size].to(torch.uint8)
    return CodedMatrix(bits=bits, group=group, codes=codes, scales=scales, minimums=minimums)


def _with_minimum(grouped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = grouped.amin(-1), grouped.amax(-1)
    middle, reach = (low + high) / 2, (high - low) / 2
    best: tuple[Tensor, Tensor, Tensor] | None = None
    least = torch.full_like(low, torch.inf)
    for shrink in _SHRINKS:
        minimum = _half(middle - shrink * reach)
        scale = _half(2 * shrink * reach / 15)
        code = _divide(grouped - minimum[..., None], scale).clamp_(0, 15)
        error = (code * scale[..., None] + minimum[..., None] - grouped).square_().sum(-1)
        if best is None:
            best, least = (code, scale, minimum), error
            continue
        better = error < least
        least = torch.where(better, error, least)
        best = (
            torch.where(better[..., None], code, best[0]),
            torch.where(better, scale, best[1]),
            torch.where(better, minimum, best[2]),
        )
    assert best is not None
    return best


def _half(x: Tensor) -> Tensor:
    return x.clamp(-65504.0, 65504.0).half().float()


def _divide(grouped: Tensor, scale: Tensor) -> Tensor:
    scale = scale[..., None]
    return torch.where(scale == 0, 0.0, grouped / scale).round_()
