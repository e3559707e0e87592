"""A model directory in transformers' layout, written tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.models.architecture import Architecture

_TOP: Final = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_PARTS: Final = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    **{part: f"self_attn.{part}_proj" for part in "qkvo"},
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_CLASSES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_TYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
_ROOM_BYTES: Final = 256
"""Of the header, for each tensor: its name, type, shape and place, as JSON."""


def stored_name(canonical: str) -> str:
    """What transformers calls a tensor of ours, without `.weight` or `.bias` at the end."""
    if not canonical.startswith("layers."):
        return _TOP[canonical]
    _, layer, part = canonical.split(".", 2)
    return f"model.layers.{layer}.{_PARTS[part.partition('.')[0]]}"


def stored_tensor_name(canonical: str) -> str:
    """The same with `.weight` or `.bias`."""
    kind = "bias" if canonical.endswith(".bias") else "weight"
    return f"{stored_name(canonical)}.{kind}"


class SafetensorsFile:
    """A safetensors file that grows by a tensor at a time; a context manager.

    The header stands before the data and names every place, so that room is kept for it and filled
    with spaces, which the format allows. Leaving without an error completes the file.
    """

    def __init__(self, path: Path, num_tensors: int) -> None:
        """num_tensors: the most that will be added."""
        self._file = path.open("wb")
        self._room = -(-(num_tensors + 1) * _ROOM_BYTES // 8) * 8
        self._most = num_tensors
        self._header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._end = 0
        self._file.write(bytes(8 + self._room))

    @property
    def num_bytes(self) -> int:
        """Of the tensors so far."""
        return self._end

    def add(self, name: str, tensor: Tensor) -> None:
        assert name not in self._header, name
        assert len(self._header) <= self._most, f"more than {self._most} tensors"
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
        self._header[name] = {
            "dtype": _TYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._end, self._end + data.nbytes],
        }
        self._end += data.nbytes
        self._file.write(data.data)

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            header = json.dumps(self._header).encode()
            assert len(header) <= self._room, f"{len(header)} bytes of header in {self._room}"
            self._file.seek(0)
            self._file.write(self._room.to_bytes(8, "little") + header.ljust(self._room))
        self._file.close()


def model_config(architecture: Architecture, dtype: torch.dtype) -> dict[str, Any]:
    """The `config.json` of a model.

    Raises ConfigError for an architecture that transformers has no class for.
    """
    a = architecture
    if a.name not in _CLASSES:
        raise ConfigError(
            f"{a.name}: no model of transformers: {', '.join(_CLASSES)} can be written"
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": a.rope.theta}
    if a.rope.llama3 is not None:
        scaling = a.rope.llama3
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context_tokens,
        }
    eos = list(a.eos_token_ids)
    config: dict[str, Any] = {
        "architectures": [_CLASSES[a.name]],
        "model_type": a.name,
        "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.intermediate_size,
        "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads,
        "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim,
        "max_position_embeddings": a.max_context_tokens,
        "rms_norm_eps": a.norm_eps,
        "rope_theta": a.rope.theta,
        "rope_parameters": rope,
        "tie_word_embeddings": a.tied_embeddings,
        "hidden_act": {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[a.activation],
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "bos_token_id": a.bos_token_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if a.rope.llama3 is not None:
        config["rope_scaling"] = rope
    if a.window is not None:
        config |= {"sliding_window": a.window, "use_sliding_window": True, "max_window_layers": 0}
    return config
