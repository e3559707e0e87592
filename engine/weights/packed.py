"""Matrices as GPTQ, AWQ and compressed-tensors store them: integers of 4 or 8 bits in 32-bit words.

    w[o, k] = scales[o, g] * (codes[o, k] - zeros[o, g]),  g = group_of[k]

Layouts after AutoGPTQ and GPTQModel (`qlinear`, `pack`), AutoAWQ (`WQLinear_GEMM.from_linear`) and
compressed-tensors (`pack_quantized.py`, `naive_quantized.py`), N outputs, K inputs, groups of G:

    GPTQ                qweight [K / 8, N], along K from the low bits on; qzeros [K / G, N / 8],
                        one less than the zero (format v1) or the zero (v2); scales [K / G, N];
                        g_idx [K]
    AWQ                 qweight [K, N / 8] and qzeros [K / G, N / 8], nibbles of the outputs
                        0 2 4 6 1 3 5 7; scales [K / G, N]
    compressed-tensors  weight_packed [N, K / 8], a code is 8 more than its number; weight_scale
    (pack-quantized)    [N, K / G]; weight_zero_point [N / 8, K / G], packed likewise along N;
                        weight_g_idx [K]; weight_shape
    (int-quantized)     weight int8 [N, K]; weight_scale and weight_zero_point [N, 1]

With 8 bits a word holds 4 numbers instead of 8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.quantisation.codes import BLOCK, CodedMatrix
from engine.text.json_file import as_object

Method = Literal["gptq", "awq", "pack-quantized", "int-quantized"]

_SUFFIXES: Mapping[Method, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gptq": (("qweight", "qzeros", "scales"), ("g_idx",)),
    "awq": (("qweight", "qzeros", "scales"), ()),
    "pack-quantized": (
        ("weight_packed", "weight_scale", "weight_shape"),
        ("weight_zero_point", "weight_g_idx"),
    ),
    "int-quantized": (("weight", "weight_scale"), ("weight_zero_point",)),
}
"""What a matrix consists of, and what it may have besides."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that each nibble of a word belongs to, from the low bits on."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """One matrix, unpacked but not multiplied out."""

    bits: int
    codes: Tensor
    """uint8 `[out, in]`."""

    scales: Tensor
    """float32 `[out, groups]`."""

    zeros: Tensor
    """int32 `[out, groups]`."""

    group_of: Tensor
    """int64 `[in]`."""

    def expand(self, dtype: torch.dtype) -> Tensor:
        """`[out, in]` in `dtype`; the arithmetic is float32 or wider, as the formats define it."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        weight = (self.codes.to(wide) - self.zeros.to(wide)[:, self.group_of]).mul_(
            self.scales.to(wide)[:, self.group_of]
        )
        return weight.to(dtype)

    def coded(self) -> CodedMatrix:
        """The same weight as codes, without loss. Its groups must be `even_groups`."""
        even = even_groups(self.group_of)
        assert even is not None
        group, order = even
        ordered = not torch.equal(order, torch.arange(order.shape[0]))
        middle = bool((self.zeros == 1 << (self.bits - 1)).all())
        return CodedMatrix(
            bits=self.bits,
            group=group,
            codes=self.codes[:, order].contiguous() if ordered else self.codes,
            scales=self.scales,
            # Exact: a scale has 11 bits, a zero 9 at most.
            minimums=None if middle else self.scales * -self.zeros.float(),
            order=order.int() if ordered else None,
        )


def even_groups(group_of: Tensor) -> tuple[int, Tensor] | None:
    """The size of the groups and the order of the inputs that puts them one behind another.

    None where groups are not equal, but for the last one, or no multiple of what codes need.
    """
    size = group_of.shape[0]
    group = int((group_of == 0).sum())
    if group == size:
        group = -(-size // BLOCK) * BLOCK
    order = torch.argsort(group_of, stable=True)
    if group == 0 or group % BLOCK:
        return None
    return (group, order) if torch.equal(group_of[order], torch.arange(size) // group) else None


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How the quantised matrices of one checkpoint are stored."""

    method: Method
    bits: int
    """Of GPTQ and AWQ; 0: the shapes tell."""

    group: int
    """Of GPTQ and AWQ; -1: all inputs."""

    zero_is_stored: bool = False
    """GPTQ: format v2, whose zeros are not one less."""

    def modules(self, names: set[str]) -> dict[str, dict[str, str]]:
        """Module to part to tensor name, of every quantised matrix among `names`."""
        needed, optional = _SUFFIXES[self.method]
        found: dict[str, dict[str, str]] = {}
        for name in names:
            module, _, part = name.rpartition(".")
            if part == needed[-1] or (part == needed[0] and part != "weight"):
                found.setdefault(module, {})
        for module, parts in found.items():
            for part in (*needed, *optional):
                if f"{module}.{part}" in names:
                    parts[part] = f"{module}.{part}"
                elif part in needed:
                    raise ConfigError(
                        f"{module} is quantised but has no {part!r}: is the checkpoint complete?"
                    )
        return found

    def fault(self, shapes: Mapping[str, tuple[int, ...]], expected: tuple[int, ...]) -> str | None:
        """Why parts of these shapes make no matrix `[out, in]`. None: they do."""
        out, size = expected
        if self.method == "int-quantized":
            want = {"weight": (out, size)}
        elif self.method == "pack-quantized":
            words = shapes["weight_packed"][-1]
            if words not in (-(-size // 8), -(-size // 4)):
                return f"weight_packed is {list(shapes['weight_packed'])} for {list(expected)}"
            want = {"weight_packed": (out, words)}
        else:
            per_word = 32 // self.bits
            groups = 1 if self.group == -1 else -(-size // self.group)
            packed = (size // per_word, out) if self.method == "gptq" else (size, out // per_word)
            want = {
                "qweight": packed,
                "qzeros": (groups, out // per_word),
                "scales": (groups, out),
            }
        for part, shape in want.items():
            if shapes[part] != shape:
                return f"{part} is {list(shapes[part])}, expected {list(shape)}"
        return None

    def group_of(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        order: Tensor | None,
        size: int,
    ) -> Tensor:
        """The group of each of `size` inputs; order: what is stored about it, if anything is."""
        # -1 everywhere says that there is no order.
        if order is not None and not bool((order < 0).all()):
            return order.long()
        group = self.group
        if "weight_scale" in shapes:
            scales = shapes["weight_scale"]
            groups = scales[-1] if len(scales) == 2 else 1
            group = -(-size // groups) if group < 1 or groups == 1 else group
        return torch.arange(size) // (size if group == -1 else group)

    def read(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> PackedMatrix:
        """A matrix `[out, in]` from its parts."""
        shapes = {part: tuple(tensor.shape) for part, tensor in parts.items()}
        order = parts.get("g_idx", parts.get("weight_g_idx"))
        codes, scales, zeros, bits = self._unpack(parts, shape)
        return PackedMatrix(bits, codes, scales, zeros, self.group_of(shapes, order, shape[1]))

    def _unpack(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        if self.method == "gptq":
            zeros = unpack_words(parts["qzeros"], self.bits, dim=1) + (not self.zero_is_stored)
            return (
                unpack_words(parts["qweight"], self.bits, dim=0).T.to(torch.uint8).contiguous(),
                parts["scales"].T.float().contiguous(),
                zeros.T.contiguous(),
                self.bits,
            )
        if self.method == "awq":
            return (
                _unpack_awq(parts["qweight"]).to(torch.uint8),
                parts["scales"].T.float().contiguous(),
                _unpack_awq(parts["qzeros"]),
                4,
            )
        return self._compressed(parts, shape)

    def _compressed(
        self, parts: Mapping[str, Tensor], shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        out, size = shape
        zeros = parts.get("weight_zero_point")
        if self.method == "int-quantized":
            bits = 8
            codes = parts["weight"].view(torch.uint8) ^ 128
        else:
            bits = 4 if parts["weight_packed"].shape[1] == -(-size // 8) else 8
            codes = unpack_words(parts["weight_packed"], bits, dim=1)[:, :size].to(torch.uint8)
            if zeros is not None:
                zeros = unpack_words(zeros, bits, dim=0)[:out] - (1 << (bits - 1))
        scales = parts["weight_scale"].float()
        scales = scales.reshape(-1, scales.shape[-1] if scales.ndim == 2 else 1).expand(out, -1)
        groups = scales.shape[1]
        middle = torch.full((out, groups), 1 << (bits - 1), dtype=torch.int32)
        if zeros is not None:
            middle += zeros.to(torch.int32).reshape(-1, groups)
        return codes.contiguous(), scales.contiguous(), middle, bits


def _unpack_awq(words: Tensor) -> Tensor:
    place = torch.argsort(torch.tensor(AWQ_ORDER))
    values = unpack_words(words, 4, dim=1).view(words.shape[0], -1, 8)
    return values[:, :, place].reshape(words.shape[0], -1).T.contiguous()


def unpack_words(words: Tensor, bits: int, *, dim: int) -> Tensor:
    """The numbers in int32 words, low bits first, along `dim`; int32."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    shape = list(words.shape)
    shape[dim] *= len(shifts)
    spread = words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (words.ndim - 1 - dim))
    return (spread & ((1 << bits) - 1)).reshape(shape)


def packed_format(where: object, config: Mapping[str, Any]) -> PackedFormat | None:
    """How a `config.json` says that its checkpoint is quantised. None: not at all.

    Raises ConfigError naming what is not supported.
    """
    section = as_object(config.get("quantization_config"))
    if not section:
        return None
    method = section.get("quant_method")

    def refuse(what: str, supported: str) -> ConfigError:
        return ConfigError(
            f"{where}: weights quantised by {method!r} with {what} are not supported: {supported} "
            "are; use such a checkpoint, the unquantised one, or a GGUF file"
        )

    if method == "compressed-tensors":
        return _compressed_format(section, refuse)
    if method not in ("gptq", "awq"):
        raise ConfigError(
            f"{where}: weights quantised with {method!r} are not supported: gptq, awq and "
            "compressed-tensors are; use such a checkpoint, the unquantised one, or a GGUF file"
        )
    bits, group = section.get("bits", section.get("w_bit")), section.get("group_size", -1)
    if not isinstance(group, int) or (group < 1 and group != -1):
        raise refuse(f"group_size={group!r}", "whole numbers and -1")
    if method == "awq":
        version = str(section.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise refuse(f"bits={bits!r} and version={version!r}", "4 bits in version 'gemm'")
        return PackedFormat("awq", 4, group)
    stored = section.get("checkpoint_format", "gptq")
    if bits not in (4, 8) or stored not in ("gptq", "gptq_v2"):
        raise refuse(
            f"bits={bits!r} and checkpoint_format={stored!r}",
            "4 and 8 bits in 'gptq' and 'gptq_v2'",
        )
    return PackedFormat("gptq", bits, group, zero_is_stored=stored == "gptq_v2")


def _compressed_format(section: Mapping[str, Any], refuse: Any) -> PackedFormat:
    stored = section.get("format")
    if stored not in ("pack-quantized", "int-quantized"):
        raise refuse(f"format={stored!r}", "'pack-quantized' and 'int-quantized'")
    if as_object(section.get("sparsity_config")).get("format", "dense") != "dense":
        raise refuse("sparse weights", "dense ones")
    sizes: set[int] = set()
    for group in as_object(section.get("config_groups")).values():
        weights = as_object(as_object(group).get("weights"))
        kind = weights.get("type"), weights.get("num_bits")
        if kind not in (("int", 4), ("int", 8)):
            raise refuse(f"{kind[0]} weights of {kind[1]} bits", "int weights of 4 and 8 bits")
        strategy = weights.get("strategy")
        if strategy not in ("group", "channel", "tensor"):
            raise refuse(f"strategy={strategy!r}", "'group', 'channel' and 'tensor'")
        size = weights.get("group_size")
        sizes.add(size if strategy == "group" and isinstance(size, int) else -1)
    return PackedFormat(stored, 0, sizes.pop() if len(sizes) == 1 else -1)
