"""The matrix products of a decoder on a GPU: 16-bit, fp8, or codes, by what the device computes.

none    weights in the model's dtype, cuBLAS
fp8     e4m3 with a scale an output; x gets one a row on the way     compute capability 8.9
codes   4 or 8 bits as they are stored or rounded                    Triton
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.capabilities import SM80, SM89, Device
from engine.models.linear import CodedLinearLike, LinearLike
from engine.quantisation.codes import CodedMatrix, alike

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
_FP8_MULTIPLE = 16
"""Both sizes of an fp8 product are multiples of it."""


def weights_unavailable(device: Device, quantisation: str) -> str | None:
    """Why a GPU cannot multiply with weights of this kind; None: it can."""
    if quantisation == "fp8" and device.compute < SM89:
        return (
            f"fp8 products need compute capability 8.9, {device.name or 'this device'} has "
            f"{device.compute[0]}.{device.compute[1]}: use int8, int4 or none"
        )
    if quantisation in ("int8", "int4") and "triton" in device.missing:
        return f"{quantisation} on a GPU needs Triton ({device.missing['triton']}): install it"
    if device.compute < SM80:
        return f"compute capability {device.compute[0]}.{device.compute[1]} is below 8.0"
    return None


class DenseLinear:
    """`x @ weight.T + bias` in the weight's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`, rounded once where there is no bias."""
        if self._bias is None:
            return torch.addmm(residual, x, self._weight.t())
        return residual + F.linear(x, self._weight, self._bias)

    def unrounded(self, x: Tensor) -> Tensor:
        """The product in float32: likely tokens tie in 16 bits."""
        if self._weight.dtype in (torch.float32, torch.float64):
            return self(x)
        if x.device.type != "cuda":  # only there has `mm` an output type of its own
            y = x.float() @ self._weight.float().t()
        else:
            y = torch.mm(x, self._weight.t(), out_dtype=torch.float32)
        return y if self._bias is None else y + self._bias.float()


def to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """`[rows, n]` to e4m3 and its scales, float32 `[rows, 1]`: `x = codes * scale`.

    The scale puts each row's largest value at the type's largest. A fixed scale of 1 is the classic
    mistake with this type (vllm#11906).
    """
    largest = x.abs().amax(dim=1, keepdim=True).float()
    scale = (largest / FP8_MAX).clamp_(min=1e-12)
    return (x.float() / scale).clamp_(-FP8_MAX, FP8_MAX).to(FP8), scale


class Fp8Linear:
    """`x @ weight.T + bias` with both in e4m3 and sums in float32 (`torch._scaled_mm`)."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: `[out, in]`, both multiples of 16: see `fp8_fits`."""
        self._dtype = weight.dtype
        codes, scale = to_fp8(weight)
        self._codes = codes
        self._scale = scale.t().contiguous()  # [1, out]
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        codes, scale = to_fp8(x)
        y = torch.ops.aten._scaled_mm.default(
            codes,
            self._codes.t(),  # the kernel wants it column-major, which the transpose is
            scale_a=scale,
            scale_b=self._scale,
            out_dtype=self._dtype,
        )
        return y if self._bias is None else y + self._bias

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`."""
        return residual + self(x)

    def unrounded(self, x: Tensor) -> Tensor:
        """The product as float32. Not meant for a head: it stays in 16 bits."""
        return self(x).float()


def fp8_fits(out: int, size: int) -> bool:
    """Whether the kernel takes a weight of this shape."""
    return out % _FP8_MULTIPLE == 0 and size % _FP8_MULTIPLE == 0


def coded_linear(
    matrix: CodedMatrix, bias: Tensor | None, *, device: torch.device, dtype: torch.dtype
) -> CodedLinearLike:
    """The product with codes as they are kept. Needs Triton."""
    # By name: the module needs Triton, which not every machine that checks this code has.
    return import_module("engine.models.triton_linear").CodedLinear(
        matrix, bias, device=device, dtype=dtype
    )


def stacked(matrices: Sequence[CodedMatrix]) -> CodedMatrix | None:
    """Matrices of the same inputs one below the other; None where they have no common form."""
    same = alike(list(matrices))
    if same is None:
        return None
    first = same[0]
    minimums = [matrix.minimums for matrix in same if matrix.minimums is not None]
    return CodedMatrix(
        bits=first.bits,
        group=first.group,
        codes=torch.cat([matrix.codes for matrix in same]),
        scales=torch.cat([matrix.scales for matrix in same]),
        minimums=torch.cat(minimums) if minimums else None,
        order=first.order,
    )


class DeviceProducts:
    """The products of a decoder on a GPU. See `engine.models.linear.Products`."""

    def __init__(
        self,
        codes: Mapping[str, CodedMatrix],
        *,
        device: torch.device,
        dtype: torch.dtype,
        fp8: bool = False,
    ) -> None:
        """codes: matrices that are kept as codes, by their canonical names. fp8: the others are
        rounded to it, but for those whose shape the kernel does not take."""
        self._codes = codes
        self._device = device
        self._dtype = dtype
        self._fp8 = fp8
        self.num_coded = 0
        self.num_dense = 0

    def coded(self, names: Sequence[str], bias: Tensor | None) -> CodedLinearLike | None:
        """See `Products.coded`."""
        if any(name not in self._codes for name in names):
            return None
        matrix = stacked([self._codes[name] for name in names])
        if matrix is None:
            return None
        self.num_coded += 1
        return coded_linear(matrix, bias, device=self._device, dtype=self._dtype)

    def dense(self, weight: Tensor, bias: Tensor | None) -> LinearLike:
        """See `Products.dense`."""
        if self._fp8 and fp8_fits(*weight.shape):
            self.num_coded += 1
            return Fp8Linear(weight, bias)
        self.num_dense += 1
        return DenseLinear(weight, bias)

    def head(self, weight: Tensor) -> LinearLike:
        """See `Products.head`."""
        return DenseLinear(weight)
