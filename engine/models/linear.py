"""The matrix product of a decoder, with its weight packed once for the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class LinearLike(Protocol):
    """What a decoder's layer multiplies with. See `Linear`."""

    def __call__(self, x: Tensor) -> Tensor: ...
    def add_to(self, residual: Tensor, x: Tensor) -> Tensor: ...
    def unrounded(self, x: Tensor) -> Tensor: ...


class CodedLinearLike(LinearLike, Protocol):
    @property
    def num_bytes(self) -> int:
        """What the weight takes on the device."""
        ...


class Products(Protocol):
    """Makes the products of a decoder that is not on a CPU."""

    def coded(self, names: Sequence[str], bias: Tensor | None) -> CodedLinearLike | None:
        """Of matrices that are kept as codes, one below the other; None where they are not."""
        ...

    def dense(self, weight: Tensor, bias: Tensor | None) -> LinearLike: ...

    def head(self, weight: Tensor) -> LinearLike:
        """Of the vocabulary: every token is chosen by it, so it is not rounded."""
        ...


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Whether this torch has oneDNN's packed product for `dtype`, and it computes what it should.

    The operators are those that torch.compile emits; they are not public, so they are tried first.
    """
    if dtype not in (torch.bfloat16, torch.float32) or not torch.backends.mkldnn.is_available():
        return False
    weight = torch.arange(-12.0, 12.0, dtype=dtype).view(4, 6) / 8
    x = torch.arange(6.0, dtype=dtype).view(1, 6) / 4
    bias = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        plain = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        summed = torch.ops.mkldnn._linear_pointwise.binary(x, bias[None], packed, None, "add")
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    want = F.linear(x.float(), weight.float()) + bias.float()
    return torch.allclose(plain.float(), want, rtol=1e-2) and torch.allclose(
        summed.float(), want, rtol=1e-2
    )


class Linear:
    """`x @ weight.T + bias`, for a weight `[out, in]` that nobody changes afterwards.

    On a CPU, in bfloat16 and float32, the weight is copied into oneDNN's blocked layout: half the
    time of `F.linear` for few rows, where reordering is a large part of the work.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._packed = weight.device.type == "cpu" and _can_pack(weight.dtype)
        self._weight: Tensor = (
            torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._packed else weight
        )
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )  # fmt: skip
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`, rounded once where the product is packed."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise.binary(
                x, residual, self._weight, self._bias, "add"
            )
        return residual + F.linear(x, self._weight, self._bias)

    def unrounded(self, x: Tensor) -> Tensor:
        """The product in float32 (float64 for float64): a bfloat16 result can be too coarse.

        Logits near 20 lie 1/8 apart in bfloat16, so that the likeliest tokens tie. Where the
        product is packed, a second one computes what the first lost in rounding; that costs less
        than a float32 weight would. Unpacked bfloat16 stays as it was rounded.
        """
        product = self(x)
        if product.dtype != torch.bfloat16:
            return product
        if self._packed:
            return product.float().add_(self.add_to(-product, x))
        return product.float()
