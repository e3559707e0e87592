"""Weights from a GGUF file: Llama, Qwen2 and Qwen3 families, plain and simply quantised types."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.models.architecture import Architecture, Llama3Scaling, Rope
from engine.text.gguf_header import GGUFHeader, TensorInfo, read_gguf_header
from engine.text.tokenizer import eos_ids_from_gguf
from engine.weights.checkpoint import Checkpoint, LazyTensors, check_tensors, fingerprint
from engine.weights.mapped_file import SERIAL_ELEMENTS, MappedFile, convert

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
_BLOCK_ELEMENTS = 32
_STEP_BLOCKS = SERIAL_ELEMENTS // _BLOCK_ELEMENTS


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
    for raw, name in canonical.items():
        info = header.tensors[raw]
        if info.type_name not in _PLAIN and info.type_name not in _QUANTISED:
            raise ConfigError(
                f"{path}: tensor {raw!r} is stored as {info.type_name}: supported are "
                f"{', '.join((*_PLAIN, *_QUANTISED))}; quantise the model to one of those"
            )
        heads = _interleaved_heads(architecture, name)
        readers[name] = functools.partial(_read, file, info, heads, dtype)
    return Checkpoint(
        architecture=architecture,
        tensors=LazyTensors(readers),
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
    assert info.num_bytes is not None, "types of unknown size were refused"
    if info.type_name in _PLAIN:
        rows = file.view(info.offset, info.shape, _PLAIN[info.type_name])
    else:
        row_bytes = info.num_bytes * info.shape[-1] // _elements(info.shape)
        rows = file.view(info.offset, (*info.shape[:-1], row_bytes), torch.uint8)
    if heads is not None:
        rows = _half_split(rows, heads)
    if info.type_name in _PLAIN:
        return convert(rows, dtype)
    return dequantise(info.type_name, rows, info.shape, dtype)


def _elements(shape: tuple[int, ...]) -> int:
    return functools.reduce(lambda a, b: a * b, shape)


def _half_split(rows: Tensor, heads: int) -> Tensor:
    """Rows from pairs `(0, 1), (2, 3), ...` to pairs `(0, d/2), (1, d/2 + 1), ...` of each head.

    Quantisation runs along the row, so that packed rows are moved like plain ones.
    """
    count = rows.shape[0]
    pairs = rows.reshape(heads, count // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)


def dequantise(
    type_name: str, packed: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Unpack quantised rows.

    packed: uint8, the bytes of whole rows, `[..., bytes per row]`. Returns `shape` in `dtype`; the
    arithmetic is float32, as ggml's own (ggml-quants.c, `dequantize_row_*`).
    """
    block_bytes, unpack = _QUANTISED[type_name]
    blocks = packed.reshape(-1, block_bytes)
    out = torch.empty(blocks.shape[0], _BLOCK_ELEMENTS, dtype=dtype)
    for start in range(0, blocks.shape[0], _STEP_BLOCKS):
        out[start : start + _STEP_BLOCKS] = unpack(blocks[start : start + _STEP_BLOCKS])
    return out.view(shape)


def _halves(data: Tensor) -> Tensor:
    """float16 columns of a block, `[blocks, n]` float32."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor) -> Tensor:
    """`[blocks, 16]` bytes to `[blocks, 32]` float32: all low nibbles, then all high ones."""
    both = torch.empty(data.shape[0], 2, _BLOCK_ELEMENTS // 2, dtype=torch.uint8)
    torch.bitwise_and(data, 15, out=both[:, 0])
    torch.bitwise_right_shift(data, 4, out=both[:, 1])
    return both.view(-1, _BLOCK_ELEMENTS).float()


def _unpack_q4_0(blocks: Tensor) -> Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8.0).mul_(_halves(blocks[:, :2]))


def _unpack_q4_1(blocks: Tensor) -> Tensor:
    scale_and_minimum = _halves(blocks[:, :4])
    return _nibbles(blocks[:, 4:]).mul_(scale_and_minimum[:, :1]).add_(scale_and_minimum[:, 1:])


def _unpack_q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_halves(blocks[:, :2]))


_QUANTISED: Mapping[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "Q4_0": (18, _unpack_q4_0),
    "Q4_1": (20, _unpack_q4_1),
    "Q8_0": (34, _unpack_q8_0),
}
"""Bytes per block of 32, and how to unpack `[blocks, bytes]` to `[blocks, 32]` float32."""
