"""The quantised types of GGUF: what their blocks hold, as numbers and as codes.

Layouts and arithmetic are ggml's (ggml-common.h, `block_*`; ggml-quants.c, `dequantize_row_*`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.quantisation.codes import BLOCK, CodedMatrix
from engine.weights.mapped_file import SERIAL_ELEMENTS

Codes = tuple[Tensor, Tensor, "Tensor | None"]
"""Of `[blocks, bytes]`: codes uint8 `[blocks, elements]`, and float32 scales and minimums
`[blocks, elements / 32]`."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """How one type stores a block of consecutive elements of a row."""

    elements: int
    num_bytes: int
    unpack: Callable[[Tensor], Tensor]
    """`[blocks, bytes]` to `[blocks, elements]` float32."""

    bits: int = 0
    codes: Callable[[Tensor], Codes] | None = None
    """None: not a type that `CodedMatrix` can hold without loss."""


def dequantise(
    type_name: str, packed: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Unpack quantised rows.

    packed: uint8, the bytes of whole rows, `[..., bytes per row]`. Returns `shape` in `dtype`; the
    arithmetic is float32, as ggml's own.
    """
    kind = BLOCK_TYPES[type_name]
    blocks = packed.reshape(-1, kind.num_bytes)
    out = torch.empty(blocks.shape[0], kind.elements, dtype=dtype)
    step = SERIAL_ELEMENTS // kind.elements
    for start in range(0, blocks.shape[0], step):
        out[start : start + step] = kind.unpack(blocks[start : start + step])
    return out.view(shape)


def coded_matrix(type_name: str, packed: Tensor, shape: tuple[int, ...]) -> CodedMatrix:
    """The rows of a matrix `[out, in]` as codes in groups of 32, without loss."""
    kind = BLOCK_TYPES[type_name]
    assert kind.codes is not None, type_name
    out, size = shape
    blocks = packed.reshape(-1, kind.num_bytes)
    codes = torch.empty(blocks.shape[0], kind.elements, dtype=torch.uint8)
    scales = torch.empty(blocks.shape[0], kind.elements // BLOCK)
    minimums: Tensor | None = None
    step = SERIAL_ELEMENTS // kind.elements
    for start in range(0, blocks.shape[0], step):
        part = slice(start, start + step)
        codes[part], scales[part], lowest = kind.codes(blocks[part])
        if lowest is not None:
            if minimums is None:
                minimums = torch.empty_like(scales)
            minimums[part] = lowest
    groups = size // BLOCK
    return CodedMatrix(
        bits=kind.bits,
        group=BLOCK,
        codes=codes.view(out, size),
        scales=scales.view(out, groups),
        minimums=None if minimums is None else minimums.view(out, groups),
    )


def _halves(data: Tensor) -> Tensor:
    """float16 columns of a block, `[blocks, n]` float32."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """`[blocks, n]` bytes to `[blocks, 2 * n]`: of each 16 (32) bytes the low halves come first."""
    run = min(data.shape[1], 32)
    runs = data.reshape(data.shape[0], -1, 1, run)
    return torch.cat((runs & 15, runs >> 4), dim=2).reshape(data.shape[0], -1)


def _codes_q4_0(blocks: Tensor) -> Codes:
    return _nibbles(blocks[:, 2:]), _halves(blocks[:, :2]), None


def _codes_q4_1(blocks: Tensor) -> Codes:
    both = _halves(blocks[:, :4])
    return _nibbles(blocks[:, 4:]), both[:, :1], both[:, 1:]


def _codes_q8_0(blocks: Tensor) -> Codes:
    # From two's complement to an offset of 128.
    return blocks[:, 2:] ^ 128, _halves(blocks[:, :2]), None


def _codes_q4_k(blocks: Tensor) -> Codes:
    scales, minimums = _scales_k(blocks)
    return _nibbles(blocks[:, 16:]), scales, minimums


def _codes_q5_k(blocks: Tensor) -> Codes:
    scales, minimums = _scales_k(blocks)
    # Bit g of byte i is the fifth of element i of group g.
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> shifts & 1) << 4  # [blocks, 8, 32]
    return _nibbles(blocks[:, 48:]) | fifth.view(-1, 256), scales, minimums


def _scales_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minimums of the 8 groups of 32: 6 bits each, times two numbers of the block."""
    both, packed = _halves(blocks[:, :4]), blocks[:, 4:16]
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=1)
    return both[:, :1] * scales.float(), -(both[:, 1:] * minimums.float())


def _unpack_q6_k(blocks: Tensor) -> Tensor:
    # Two halves of 128 elements: 64 bytes of low nibbles, 32 bytes of upper pairs of bits.
    low = _nibbles_by_64(blocks[:, :128])
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    upper = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    values = (low | upper.reshape(-1, 256) << 4).float().sub_(32.0)
    scales = blocks[:, 192:208].view(torch.int8).float().mul_(_halves(blocks[:, 208:]))
    return (values.view(-1, 16, 16) * scales[:, :, None]).view(-1, 256)


def _nibbles_by_64(data: Tensor) -> Tensor:
    runs = data.reshape(data.shape[0], -1, 1, 64)
    return torch.cat((runs & 15, runs >> 4), dim=2).reshape(data.shape[0], -1)


def _of_codes(codes: Callable[[Tensor], Codes], zero: int) -> Callable[[Tensor], Tensor]:
    def unpack(blocks: Tensor) -> Tensor:
        values, scales, minimums = codes(blocks)
        grouped = values.float().view(blocks.shape[0], -1, BLOCK)
        if minimums is None:
            grouped.sub_(zero)
        grouped.mul_(scales[:, :, None])
        if minimums is not None:
            grouped.add_(minimums[:, :, None])
        return grouped.view(blocks.shape[0], -1)

    return unpack


def _coded(elements: int, num_bytes: int, bits: int, codes: Callable[[Tensor], Codes]) -> BlockType:
    unpack = _of_codes(codes, 1 << (bits - 1))
    return BlockType(elements, num_bytes, unpack, bits, codes)


BLOCK_TYPES: Mapping[str, BlockType] = {
    "Q4_0": _coded(32, 18, 4, _codes_q4_0),
    "Q4_1": _coded(32, 20, 4, _codes_q4_1),
    "Q8_0": _coded(32, 34, 8, _codes_q8_0),
    "Q4_K": _coded(256, 144, 4, _codes_q4_k),
    "Q5_K": _coded(256, 176, 8, _codes_q5_k),
    "Q6_K": BlockType(256, 210, _unpack_q6_k),
}
