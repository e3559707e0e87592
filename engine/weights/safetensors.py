"""Weights from a directory with `config.json` and safetensors files (transformers' layout)."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.models.architecture import Activation, Architecture, Llama3Scaling, Rope
from engine.quantisation.codes import CodedMatrix
from engine.text.json_file import as_list, as_object, read_json
from engine.text.tokenizer import eos_ids_from_directory
from engine.weights.checkpoint import Checkpoint, Lazy, Span, check_tensors, fingerprint
from engine.weights.mapped_file import MappedFile, convert
from engine.weights.packed import PackedFormat, PackedMatrix, even_groups, packed_format

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ACTIVATIONS: Mapping[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_INDEX = "model.safetensors.index.json"

_TOP = {"model.embed_tokens.weight": "embed", "model.norm.weight": "norm", "lm_head.weight": "head"}
_LAYER = {
    "input_layernorm.weight": "attn_norm",
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "self_attn.q_proj.bias": "q.bias",
    "self_attn.k_proj.bias": "k.bias",
    "self_attn.v_proj.bias": "v.bias",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
_DERIVED = re.compile(r".*\.rotary_emb\.inv_freq")
"""Tables that old checkpoints saved beside the weights."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8}
_TYPES = _DTYPES | _INTEGERS


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: file, bytes from its beginning, shape and type name."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    type_name: str


def load_safetensors(path: Path, dtype: torch.dtype) -> Checkpoint:
    """Open a model directory; tensors are converted to `dtype` when asked for.

    Raises ConfigError for an unsupported family, rope or quantisation, for missing, surplus and
    misshapen tensors, and for files that were cut short.
    """
    config = read_json(path / "config.json")
    stored = _stored_tensors(path)
    quantised = packed_format(path / "config.json", config)
    modules = quantised.modules(set(stored)) if quantised else {}
    architecture = architecture_from_config(
        path / "config.json",
        config,
        eos_token_ids=eos_ids_from_directory(path),
        has_head="lm_head.weight" in stored or "lm_head" in modules,
        has_bias="model.layers.0.self_attn.q_proj.bias" in stored,
    )
    files = {file: MappedFile(file) for file in sorted({entry.path for entry in stored.values()})}
    packed = {
        _canonical_name(f"{module}.weight"): parts
        for module, parts in modules.items()
        if module != "lm_head" or not architecture.tied_embeddings
    }
    inside = {raw for parts in modules.values() for raw in parts.values()}
    canonical: dict[str, str] = {}
    for raw, entry in stored.items():
        if _DERIVED.fullmatch(raw) or raw in inside:
            continue
        if raw == "lm_head.weight" and architecture.tied_embeddings:
            continue
        name = _canonical_name(raw)
        if modules and name == raw and raw.endswith(".bias") and _is_zero(files, entry):
            continue  # GPTQ's writers give every matrix a bias
        canonical[name] = raw
    shapes = {name: stored[raw].shape for name, raw in canonical.items()}
    readers: dict[str, Callable[[], Tensor]] = {}
    slices: dict[str, Callable[[int, Span], Tensor]] = {}
    coded: dict[str, Callable[[], CodedMatrix]] = {}
    needed = architecture.tensor_shapes()
    for name, parts in packed.items():
        assert quantised is not None
        shapes[name] = needed.get(name, ())
        if len(shapes[name]) != 2:
            continue  # which is told below
        stored_parts = {part: stored[raw] for part, raw in parts.items()}
        matrix = _PackedReader(path, name, shapes[name], quantised, stored_parts, files)
        readers[name] = functools.partial(matrix.expand, dtype)
        if matrix.has_codes:
            coded[name] = matrix.coded
    check_tensors(path, architecture, shapes)
    for name, raw in canonical.items():
        entry = stored[raw]
        if entry.type_name not in _DTYPES:
            raise ConfigError(
                f"{entry.path}: tensor {raw!r} is stored as {entry.type_name}: supported are "
                f"{', '.join(_DTYPES)}"
            )
        readers[name] = functools.partial(_read, files[entry.path], entry, dtype)
        slices[name] = functools.partial(_read_part, files[entry.path], entry, dtype)
    return Checkpoint(
        architecture=architecture,
        tensors=Lazy(readers, slices),
        coded=Lazy(coded),
        fingerprint=fingerprint(architecture, dtype, files),
    )


def _read(file: MappedFile, entry: StoredTensor, dtype: torch.dtype) -> Tensor:
    return convert(file.view(entry.offset, entry.shape, _DTYPES[entry.type_name]), dtype)


def _read_part(
    file: MappedFile, entry: StoredTensor, dtype: torch.dtype, dim: int, span: Span
) -> Tensor:
    whole = file.view(entry.offset, entry.shape, _DTYPES[entry.type_name])
    return convert(whole.narrow(dim, span[0], span[1] - span[0]), dtype)


class _PackedReader:
    """Reads one quantised matrix, in either form, when asked."""

    def __init__(
        self,
        path: Path,
        name: str,
        shape: tuple[int, ...],
        quantised: PackedFormat,
        parts: Mapping[str, StoredTensor],
        files: Mapping[Path, MappedFile],
    ) -> None:
        """Raises ConfigError for parts that are not of the shapes that `shape` needs."""
        self._shape = shape
        self._format = quantised
        self._parts = parts
        self._files = files
        found = {part: entry.shape for part, entry in parts.items()}
        fault = quantised.fault(found, shape)
        if fault:
            raise ConfigError(f"{path}: {name}: {fault}: is it what its config.json says?")
        order = parts.get("g_idx", parts.get("weight_g_idx"))
        group_of = quantised.group_of(
            found, None if order is None else _view(files, order), shape[1]
        )
        self.has_codes = even_groups(group_of) is not None

    def expand(self, dtype: torch.dtype) -> Tensor:
        return self._read().expand(dtype)

    def coded(self) -> CodedMatrix:
        return self._read().coded()

    def _read(self) -> PackedMatrix:
        parts = {part: _view(self._files, entry) for part, entry in self._parts.items()}
        return self._format.read(parts, self._shape)


def _view(files: Mapping[Path, MappedFile], entry: StoredTensor) -> Tensor:
    return files[entry.path].view(entry.offset, entry.shape, _TYPES[entry.type_name])


def _is_zero(files: Mapping[Path, MappedFile], entry: StoredTensor) -> bool:
    if entry.type_name not in _DTYPES:
        return False
    return not _view(files, entry).any()


def _canonical_name(name: str) -> str:
    layer = _LAYER_NAME.fullmatch(name)
    if layer and layer[2] in _LAYER:
        return f"layers.{int(layer[1])}.{_LAYER[layer[2]]}"
    return _TOP.get(name, name)


def _stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the directory, by the name it was saved under."""
    if (path / _INDEX).is_file():
        places = as_object(read_json(path / _INDEX).get("weight_map"))
        names = sorted({str(place) for place in places.values()})
        missing = [name for name in names if not (path / name).is_file()]
        if missing or not names:
            raise ConfigError(
                f"{path / _INDEX}: names {len(names)} files, not there: "
                f"{', '.join(missing) or 'none named'}: copy the model again"
            )
        if any("/" in name or "\\" in name for name in names):
            raise ConfigError(f"{path / _INDEX}: names files outside the directory: {names}")
    else:
        names = sorted(file.name for file in path.glob("*.safetensors"))
        if len(names) != 1:
            raise ConfigError(
                f"{path}: {len(names)} safetensors files and no {_INDEX}: need one, or the index"
            )
    stored: dict[str, StoredTensor] = {}
    for name in names:
        for tensor, entry in read_safetensors_header(path / name).items():
            if tensor in stored:
                raise ConfigError(f"{path}: tensor {tensor!r} is in two of its files: {name}")
            stored[tensor] = entry
    return stored


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Names and places of a file's tensors.

    Format: length u64 little endian, JSON header, data (huggingface/safetensors, README). Raises
    ConfigError naming the file, and for one that was cut short the bytes expected and found.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or 8 + length > size:
                raise ConfigError(
                    f"{path}: cut short or not safetensors: its header ends at byte {8 + length}, "
                    f"the file has {size}. Copy or download it again"
                )
            raw = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        header = as_object(json.loads(raw))
        stored = {
            name: _entry(path, 8 + length, as_object(value))
            for name, value in header.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path}: its header of {length} bytes is damaged ({error}): copy or download it again"
        ) from error
    end = 8 + length
    for name, value in header.items():
        if name != "__metadata__":
            end = max(end, 8 + length + as_object(value)["data_offsets"][1])
    if end > size:
        raise ConfigError(
            f"{path}: cut short: its header describes {end} bytes, the file has {size}. Copy or "
            "download it again"
        )
    return stored


def _entry(path: Path, start: int, value: dict[str, Any]) -> StoredTensor:
    shape = tuple(int(extent) for extent in as_list(value["shape"]))
    type_name = str(value["dtype"])
    first, last = (int(offset) for offset in value["data_offsets"])
    width = _TYPES[type_name].itemsize if type_name in _TYPES else None
    if first < 0 or min(shape, default=1) < 0 or last < first:
        raise ValueError(f"bytes {first} to {last} for shape {list(shape)}")
    if width is not None and last - first != math.prod(shape) * width:
        raise ValueError(f"{last - first} bytes for {list(shape)} of {type_name}")
    return StoredTensor(path, start + first, shape, type_name)


def architecture_from_config(
    where: Path,
    config: Mapping[str, Any],
    *,
    eos_token_ids: tuple[int, ...],
    has_head: bool,
    has_bias: bool,
) -> Architecture:
    """The architecture a `config.json` describes; `has_*` say what the weights hold.

    Reads the rope of transformers 5 (`rope_parameters`) and of older versions (`rope_theta`,
    `rope_scaling`). Raises ConfigError naming the key, its value and what is supported.
    """
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise ConfigError(
            f"{where}: model_type={family!r} is not supported: {', '.join(_FAMILIES)} are"
        )

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if not isinstance(value, int):
            raise ConfigError(f"{where}: {key}={value!r}: must be a whole number")
        return value

    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ConfigError(
            f"{where}: hidden_act={activation!r}: {' and '.join(_ACTIVATIONS)} are supported"
        )
    hidden, heads = number("hidden_size"), number("num_attention_heads")
    eps = config.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, (int, float)):
        raise ConfigError(f"{where}: rms_norm_eps={eps!r}: must be a number")
    bos = config.get("bos_token_id")
    return Architecture(
        name=family,
        vocab_size=number("vocab_size"),
        hidden_size=hidden,
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden // max(heads, 1)),
        intermediate_size=number("intermediate_size"),
        norm_eps=float(eps),
        rope=_rope(where, config),
        max_context_tokens=number("max_position_embeddings"),
        tied_embeddings=bool(config.get("tie_word_embeddings", not has_head)),
        qkv_bias=has_bias,
        qk_norm=family == "qwen3",
        activation=_ACTIVATIONS[activation],
        window=_window(where, config, number("num_hidden_layers")),
        eos_token_ids=eos_token_ids,
        bos_token_id=bos if isinstance(bos, int) else None,
    )


def _rope(where: Path, config: Mapping[str, Any]) -> Rope:
    rope = as_object(config.get("rope_parameters")) or as_object(config.get("rope_scaling"))
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if kind not in ("default", "llama3") or partial != 1.0:
        raise ConfigError(
            f"{where}: rope_type={kind!r} with partial_rotary_factor={partial!r} is not supported: "
            "'default' and 'llama3' over the whole head are"
        )
    try:
        if kind == "default":
            return Rope(theta=float(theta))
        return Rope(
            theta=float(theta),
            llama3=Llama3Scaling(
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_context_tokens=int(rope["original_max_position_embeddings"]),
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: rope {dict(rope)!r} is not complete: {error!r}") from error


def _window(where: Path, config: Mapping[str, Any], num_layers: int) -> int | None:
    """The sliding window, if all layers share one."""
    window = config.get("sliding_window")
    if window is None or config.get("use_sliding_window") is False:
        return None
    if not isinstance(window, int):
        raise ConfigError(f"{where}: sliding_window={window!r}: must be a whole number or null")
    kinds = set(map(str, as_list(config.get("layer_types"))))
    if not kinds:
        first = config.get("max_window_layers", 0) if config.get("use_sliding_window") else 0
        kinds = {"sliding_attention" if i >= first else "full_attention" for i in range(num_layers)}
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise ConfigError(
            f"{where}: layers are {', '.join(sorted(kinds))}: all must share one window, or none"
        )
    return window
