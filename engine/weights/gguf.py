"""Weights from a GGUF file: Llama, Qwen2 and Qwen3 families, plain and quantised types."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.models.architecture import Architecture, Llama3Scaling, Rope
from engine.quantisation.codes import CodedMatrix
from engine.text.gguf_header import GGUFHeader, TensorInfo, read_gguf_header
from engine.text.tokenizer import eos_ids_from_gguf
from engine.weights.checkpoint import Checkpoint, Lazy, Span, check_tensors, fingerprint
from engine.weights.gguf_blocks import BLOCK_TYPES, coded_matrix, dequantise
from engine.weights.mapped_file import MappedFile, convert

_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_TOP = {"token_embd.weight": "embed", "output_norm.weight": "norm", "output.weight": "head"}
_LAYER = {
    "attn_norm.weight": "attn_norm",
    "attn_q.weight": "q",
    "attn_k.weight": "k",
    "attn_v.weight": "v",
    "attn_output.weight": "o",
    "attn_q.bias": "q.bias",
    "attn_k.bias": "k.bias",
    "attn_v.bias": "v.bias",
    "attn_q_norm.weight": "q_norm",
    "attn_k_norm.weight": "k_norm",
    "ffn_norm.weight": "mlp_norm",
    "ffn_gate.weight": "gate",
    "ffn_up.weight": "up",
    "ffn_down.weight": "down",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+)")
_ROPE_FACTORS = "rope_freqs.weight"

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_gguf(path: Path, dtype: torch.dtype) -> Checkpoint:
    """Open a GGUF file; tensors are dequantised to `dtype` when asked for.

    Raises ConfigError for an unsupported architecture, tensor type or rope, for missing tensors,
    and for a file that was cut short.
    """
    header = read_gguf_header(path)
    canonical = {name: _canonical_name(name) for name in header.tensors if name != _ROPE_FACTORS}
    file = MappedFile(path)
    architecture = _architecture(header, set(canonical.values()), file)
    check_tensors(
        path, architecture, {name: header.tensors[raw].shape for raw, name in canonical.items()}
    )
    readers: dict[str, Callable[[], Tensor]] = {}
    slices: dict[str, Callable[[int, Span], Tensor]] = {}
    coded: dict[str, Callable[[], CodedMatrix]] = {}
    for raw, name in canonical.items():
        info = header.tensors[raw]
        if info.type_name not in _PLAIN and info.type_name not in BLOCK_TYPES:
            raise ConfigError(
                f"{path}: tensor {raw!r} is stored as {info.type_name}: supported are "
                f"{', '.join((*_PLAIN, *BLOCK_TYPES))}; quantise the model to one of those"
            )
        heads = _interleaved_heads(architecture, name)
        readers[name] = functools.partial(_read, file, info, heads, dtype)
        slices[name] = functools.partial(_read_part, file, info, heads, dtype)
        if info.type_name in BLOCK_TYPES and BLOCK_TYPES[info.type_name].codes is not None:
            coded[name] = functools.partial(_read_codes, file, info, heads)
    return Checkpoint(
        architecture=architecture,
        tensors=Lazy(readers, slices),
        coded=Lazy(coded),
        fingerprint=fingerprint(architecture, dtype, [path]),
    )


def _canonical_name(name: str) -> str:
    block = _BLOCK_NAME.fullmatch(name)
    if block and block[2] in _LAYER:
        return f"layers.{int(block[1])}.{_LAYER[block[2]]}"
    return _TOP.get(name, name)


def _architecture(header: GGUFHeader, names: set[str], file: MappedFile) -> Architecture:
    family = header.require("general.architecture", str)
    if family not in _ARCHITECTURES:
        raise ConfigError(
            f"{header.path}: architecture {family!r} is not supported in GGUF: "
            f"{', '.join(_ARCHITECTURES)} are (Mistral files say llama)"
        )

    def number(key: str) -> int:
        return header.require(f"{family}.{key}", int)

    def real(key: str) -> float:
        # Stored as float32; the shortest decimal is the number its config.json had.
        return _shortest(header.require(f"{family}.{key}", float))

    if header.get(f"{family}.expert_count", int, 0):
        raise ConfigError(f"{header.path}: a mixture of experts: only dense models are supported")
    hidden, heads = number("embedding_length"), number("attention.head_count")
    head_dim = header.get(f"{family}.attention.key_length", int, hidden // max(heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        value = header.get(f"{family}.{key}", int, head_dim)
        if value != head_dim:
            raise ConfigError(
                f"{header.path}: {family}.{key}={value} differs from the head size {head_dim}: "
                "only equal sizes are supported"
            )
    embed = header.tensors.get("token_embd.weight")
    if embed is None:
        raise ConfigError(f"{header.path}: no tensor 'token_embd.weight': not a decoder")
    theta = header.get(f"{family}.rope.freq_base", float, 10_000.0)
    return Architecture(
        name=family,
        vocab_size=embed.shape[0],
        hidden_size=hidden,
        num_layers=number("block_count"),
        num_heads=heads,
        num_kv_heads=header.get(f"{family}.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        intermediate_size=number("feed_forward_length"),
        norm_eps=real("attention.layer_norm_rms_epsilon"),
        rope=_rope(header, family, head_dim, _shortest(theta), file),
        max_context_tokens=number("context_length"),
        tied_embeddings="head" not in names,
        qkv_bias="layers.0.q.bias" in names,
        qk_norm=family == "qwen3",
        window=header.get(f"{family}.attention.sliding_window", int) or None,
        eos_token_ids=eos_ids_from_gguf(header),
        bos_token_id=header.get("tokenizer.ggml.bos_token_id", int),
    )


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32."""
    stored = torch.tensor(value, dtype=torch.float32)
    for digits in range(1, 9):
        candidate = float(f"{value:.{digits}g}")
        if torch.tensor(candidate, dtype=torch.float32) == stored:
            return candidate
    return value


def _rope(header: GGUFHeader, family: str, head_dim: int, theta: float, file: MappedFile) -> Rope:
    scaling = header.get(f"{family}.rope.scaling.type", str, "none")
    if scaling != "none" and header.get(f"{family}.rope.scaling.factor", float, 1.0) != 1.0:
        raise ConfigError(
            f"{header.path}: rope scaling {scaling!r} is not supported: none and llama3 are"
        )
    info = header.tensors.get(_ROPE_FACTORS)
    if info is None:
        return Rope(theta=theta)
    if info.type_name != "F32" or info.shape != (head_dim // 2,):
        raise ConfigError(
            f"{header.path}: {_ROPE_FACTORS} is {info.type_name} {list(info.shape)}, expected F32 "
            f"[{head_dim // 2}]"
        )
    factors = file.view(info.offset, info.shape, torch.float32).clone()
    return Rope(theta=theta, llama3=_llama3_scaling(header.path, factors, head_dim, theta))


def _llama3_scaling(path: Path, factors: Tensor, head_dim: int, theta: float) -> Llama3Scaling:
    """GGUF stores what Llama 3.1's scaling divides each frequency by, not its parameters.

    All published models share low 1, high 4 and 8,192 positions; the factor is the largest divisor.
    Accepted only if they reproduce the stored divisors.
    """
    scaling = Llama3Scaling(
        factor=round(float(factors.max()), 3),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context_tokens=8192,
    )
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    turns = scaling.original_context_tokens / (2 * torch.pi * theta**exponents)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / scaling.factor + smooth)
    if not torch.allclose(expected, factors.double(), rtol=1e-3):
        raise ConfigError(
            f"{path}: {_ROPE_FACTORS} is not the scaling of Llama 3.1 (factor {scaling.factor}, "
            "low 1, high 4, 8192 positions): use the model's safetensors directory"
        )
    return scaling


def _interleaved_heads(architecture: Architecture, name: str) -> int | None:
    """Heads of a tensor whose rows are in the order of GGML's adjacent-pair rotation, else None."""
    if architecture.name != "llama":
        return None
    part = name.rpartition("layers.")[2].partition(".")[2]
    if part in ("q", "q.bias"):
        return architecture.num_heads
    return architecture.num_kv_heads if part in ("k", "k.bias") else None


def _read(file: MappedFile, info: TensorInfo, heads: int | None, dtype: torch.dtype) -> Tensor:
    if info.type_name not in _PLAIN:
        return dequantise(info.type_name, _packed(file, info, heads), info.shape, dtype)
    rows = file.view(info.offset, info.shape, _PLAIN[info.type_name])
    return convert(rows if heads is None else _half_split(rows, heads), dtype)


def _read_part(
    file: MappedFile,
    info: TensorInfo,
    heads: int | None,
    dtype: torch.dtype,
    dim: int,
    span: Span,
) -> Tensor:
    """Rows, in whole heads where heads are interleaved, or columns."""
    first, last = span
    if dim == 0 and heads is not None:
        heads = heads * (last - first) // info.shape[0]
    if info.type_name in _PLAIN:
        part = file.view(info.offset, info.shape, _PLAIN[info.type_name])
        part = part.narrow(dim, first, last - first)
        return convert(part if heads is None else _half_split(part, heads), dtype)
    packed = _packed(file, info, None)
    if dim == 0:
        packed = packed[first:last]
    if heads is not None:
        packed = _half_split(packed, heads)
    if dim == 0:
        return dequantise(info.type_name, packed, (last - first, *info.shape[1:]), dtype)
    # The blocks that hold these columns, then what they hold beside them is cut off.
    kind = BLOCK_TYPES[info.type_name]
    from_block, to_block = first // kind.elements, -(-last // kind.elements)
    packed = packed[:, from_block * kind.num_bytes : to_block * kind.num_bytes]
    shape = (info.shape[0], (to_block - from_block) * kind.elements)
    whole = dequantise(info.type_name, packed.contiguous(), shape, dtype)
    begin = first - from_block * kind.elements
    return whole[:, begin : begin + last - first].contiguous()


def _read_codes(file: MappedFile, info: TensorInfo, heads: int | None) -> CodedMatrix:
    return coded_matrix(info.type_name, _packed(file, info, heads), info.shape)


def _packed(file: MappedFile, info: TensorInfo, heads: int | None) -> Tensor:
    """The bytes of each row, `[..., bytes per row]`."""
    assert info.num_bytes is not None, "types of unknown size were refused"
    row_bytes = info.num_bytes * info.shape[-1] // math.prod(info.shape)
    rows = file.view(info.offset, (*info.shape[:-1], row_bytes), torch.uint8)
    return rows if heads is None else _half_split(rows, heads)


def _half_split(rows: Tensor, heads: int) -> Tensor:
    """Rows from pairs `(0, 1), (2, 3), ...` to pairs `(0, d/2), (1, d/2 + 1), ...` of each head.

    Quantisation runs along the row, so that packed rows are moved like plain ones.
    """
    count = rows.shape[0]
    pairs = rows.reshape(heads, count // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)
