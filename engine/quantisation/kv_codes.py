"""Keys and values as codes: int8, symmetric, with one scale for each token's head.

    scale = largest / 127            float32, of the row's `head_dim` numbers
    code = round(x / scale)          to the even one of two, from -127 to 127
    x ~ code * scale                 at most scale / 2 away

A row that is not finite has a scale that is not a number: it does not turn into one that is. The
rounding of a row depends on nothing but the row: not on the batch, the chunk or the page.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 127


def to_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `[..., head_dim]` to codes of that shape, int8, and scales `[...]`, float32."""
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    scales = (wide.abs().amax(dim=-1) / LARGEST).to(torch.float32)
    unit = torch.where(scales > 0, scales, 1.0).to(wide.dtype)
    codes = torch.round(wide / unit.unsqueeze(-1)).nan_to_num_().clamp_(-LARGEST, LARGEST)
    return codes.to(torch.int8), scales + (scales - scales)


def from_codes(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """What codes `[..., head_dim]` with scales `[...]` stand for, computed in `dtype`."""
    return codes.to(dtype) * scales.to(dtype).unsqueeze(-1)
