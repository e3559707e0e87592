"""Keys and values as codes: int8 or fp8, symmetric, with one scale for each token's head.

    scale = largest / 127            float32, of the row's `head_dim` numbers
    code = round(x / scale)          to the even one of two, from -127 to 127
    x ~ code * scale                 at most scale / 2 away

fp8 is e4m3 (OCP FP8, no infinity): `largest / 448`, and the nearest of its numbers, of 3 bits
behind the leading one: at most 1 / 16 of x away, where that is not below the least of its steps.

A row that is not finite has a scale that is not a number: it does not turn into one that is. The
rounding of a row depends on nothing but the row: not on the batch, the chunk or the page.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127
LARGEST_FP8 = 448.0


def to_codes(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Rows `[..., head_dim]` to codes of that shape and of `dtype`, and scales `[...]`, float32."""
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    largest = LARGEST if dtype == torch.int8 else LARGEST_FP8
    scales = (wide.abs().amax(dim=-1) / largest).to(torch.float32)
    unit = torch.where(scales > 0, scales, 1.0).to(wide.dtype)
    codes = wide / unit.unsqueeze(-1)
    if dtype == torch.int8:
        codes = torch.round(codes)
    codes = codes.nan_to_num_().clamp_(-largest, largest)
    return codes.to(dtype), scales + (scales - scales)


def from_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes `[..., head_dim]` with scales `[...]` stand for, computed in `dtype`."""
    return codes.to(dtype) * scales.to(dtype).unsqueeze(-1)
