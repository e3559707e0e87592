"""Products with weights kept as codes of 4 or 8 bits, as Triton kernels.

    y[m, n] = sum over groups g of scale[n, g] * sum over k in g of x[m, k] * (code[n, k] - zero)

A tile of inputs never crosses a group, so codes enter the product as small integers, which every
16-bit type holds exactly, and the scale is applied to the sum: nothing but x is rounded. For many
rows the weight is expanded once and the vendor's product used.

Runs in Triton's interpreter on a CPU: set TRITON_INTERPRET=1 before this is imported.
"""

# Triton's types are those of kernels: calls from Python give numbers for `constexpr`, and launches
# take more than the kernel does. It may also not be installed.
# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from engine.quantisation.codes import CodedMatrix

EXPAND_ROWS = 128
"""From so many rows on, expanding the weight costs less than a slower product."""


@triton.jit
def _product(
    x,
    codes,
    scales,
    minimums,
    out,
    rows,
    columns,
    size,
    groups,
    tiles,
    x_row,
    codes_row,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    MINIMUMS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Inputs `[split * tiles * BLOCK_K, ...)` of one tile of outputs, into `out[split]`."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(2)
    row, column = m < rows, n < columns
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    first = split * tiles * BLOCK_K
    for start in range(first, tl.minimum(first + tiles * BLOCK_K, size), BLOCK_K):
        group = start // GROUP
        scale = tl.load(scales + n.to(tl.int64) * groups + group, mask=column, other=0.0)
        if BITS == 8:
            k = start + tl.arange(0, BLOCK_K)
            a = tl.load(
                x + m[:, None].to(tl.int64) * x_row + k[None, :],
                mask=row[:, None] & (k < size)[None, :],
                other=0.0,
            )
            b = tl.load(
                codes + n[None, :].to(tl.int64) * codes_row + k[:, None],
                mask=column[None, :] & (k < size)[:, None],
                other=ZERO,
            )
            part = tl.dot(a, (b.to(tl.float32) - ZERO).to(a.dtype), input_precision=PRECISION)
            total = tl.sum(a.to(tl.float32), 1)
        else:
            # Two codes a byte, the even input's in the lower half.
            j = start // 2 + tl.arange(0, BLOCK_K // 2)
            even = tl.load(
                x + m[:, None].to(tl.int64) * x_row + 2 * j[None, :],
                mask=row[:, None] & (2 * j < size)[None, :],
                other=0.0,
            )
            odd = tl.load(
                x + m[:, None].to(tl.int64) * x_row + 2 * j[None, :] + 1,
                mask=row[:, None] & (2 * j + 1 < size)[None, :],
                other=0.0,
            )
            b = tl.load(
                codes + n[None, :].to(tl.int64) * codes_row + j[:, None],
                mask=column[None, :] & (2 * j < size)[:, None],
                other=ZERO * 17,
            ).to(tl.int32)
            low = ((b & 15).to(tl.float32) - ZERO).to(even.dtype)
            high = ((b >> 4).to(tl.float32) - ZERO).to(odd.dtype)
            part = tl.dot(even, low, input_precision=PRECISION)
            part += tl.dot(odd, high, input_precision=PRECISION)
            total = tl.sum(even.to(tl.float32), 1) + tl.sum(odd.to(tl.float32), 1)
        acc += part * scale[None, :]
        if MINIMUMS:
            least = tl.load(minimums + n.to(tl.int64) * groups + group, mask=column, other=0.0)
            acc += total[:, None] * least[None, :]
    place = split.to(tl.int64) * rows + m
    tl.store(out + place[:, None] * columns + n[None, :], acc, mask=row[:, None] & column[None, :])


@triton.jit
def _expand(
    codes,
    scales,
    minimums,
    out,
    size,
    groups,
    codes_row,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    MINIMUMS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One run of inputs of one output row, as numbers."""
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < size
    if BITS == 8:
        code = tl.load(codes + n * codes_row + k, mask=inside, other=0).to(tl.int32)
    else:
        byte = tl.load(codes + n * codes_row + k // 2, mask=inside, other=0).to(tl.int32)
        code = (byte >> (4 * (k % 2))) & 15
    scale = tl.load(scales + n * groups + k // GROUP, mask=inside, other=0.0)
    weight = (code.to(tl.float32) - ZERO) * scale
    if MINIMUMS:
        weight += tl.load(minimums + n * groups + k // GROUP, mask=inside, other=0.0)
    tl.store(out + n * size + k, weight.to(out.dtype.element_ty), mask=inside)


def pack_nibbles(codes: Tensor) -> Tensor:
    """`[out, in]` codes below 16, a byte each, to `[out, ceil(in / 2)]`, two a byte."""
    if codes.shape[1] % 2:
        codes = F.pad(codes, (0, 1))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


class CodedLinear:
    """`x @ weight.T + bias` for a matrix of codes on a device."""

    def __init__(
        self,
        matrix: CodedMatrix,
        bias: Tensor | None,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`dtype`: of x and of the result, 16 or 32 bits."""
        self._out, self._size = matrix.codes.shape
        self._bits, self._group = matrix.bits, matrix.group
        # With minimums the code counts as it is.
        self._zero = matrix.zero if matrix.minimums is None else 0
        codes = matrix.codes if matrix.bits == 8 else pack_nibbles(matrix.codes)
        self._codes = codes.to(device).contiguous()
        self._scales = matrix.scales.to(device).contiguous()
        self._minimums = (
            None if matrix.minimums is None else matrix.minimums.to(device).contiguous()
        )
        self._order = None if matrix.order is None else matrix.order.to(device).long()
        self._bias = None if bias is None else bias.to(device=device, dtype=dtype)
        self._dtype = dtype

    @property
    def num_bytes(self) -> int:
        """What the weight takes on the device."""
        parts = [self._codes, self._scales, self._minimums, self._order]
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, in]` to `[rows, out]`."""
        y = self._multiply(x).to(self._dtype)
        return y if self._bias is None else y + self._bias

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`."""
        return residual + self(x)

    def unrounded(self, x: Tensor) -> Tensor:
        """The product in float32."""
        y = self._multiply(x).to(torch.float32)
        return y if self._bias is None else y + self._bias.float()

    def expand(self) -> Tensor:
        """The weight `[out, in]` as numbers, its inputs in the order of the codes."""
        weight = torch.empty((self._out, self._size), dtype=self._dtype, device=self._codes.device)
        block = 1024
        _expand[(self._out, -(-self._size // block))](
            self._codes,
            self._scales,
            self._scales if self._minimums is None else self._minimums,
            weight,
            self._size,
            self._scales.shape[1],
            self._codes.stride(0),
            BITS=self._bits,
            ZERO=self._zero,
            MINIMUMS=self._minimums is not None,
            GROUP=self._group,
            BLOCK=block,
        )
        return weight

    def _multiply(self, x: Tensor) -> Tensor:
        if self._order is not None:
            x = x.index_select(1, self._order)
        x = x.contiguous()
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty((0, self._out))
        if rows >= EXPAND_ROWS:
            return F.linear(x, self.expand())
        # 99 KiB is what the smaller chips have for a program's tiles.
        block_k = math.gcd(self._group, 128 if x.element_size() == 2 else 32)
        block_m, block_n = max(16, triton.next_power_of_2(rows)), 64
        tiles = -(-self._size // block_k)
        # Few rows give few programs: the inputs are shared out too, always in the same pieces.
        splits = max(1, min(4, tiles // 8))
        each = -(-tiles // splits)
        splits = -(-tiles // each)
        out = torch.empty((splits, rows, self._out), dtype=torch.float32, device=x.device)
        grid = (-(-rows // block_m), -(-self._out // block_n), splits)
        _product[grid](
            x,
            self._codes,
            self._scales,
            self._scales if self._minimums is None else self._minimums,
            out,
            rows,
            self._out,
            self._size,
            self._scales.shape[1],
            each,
            x.stride(0),
            self._codes.stride(0),
            BITS=self._bits,
            ZERO=self._zero,
            MINIMUMS=self._minimums is not None,
            GROUP=self._group,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            num_warps=4,
            num_stages=3,
        )
        return out[0] if splits == 1 else out.sum(dim=0)
