"""Writes a model source as a directory for `from_pretrained`.

    python -m cluster.compare.peers.export SOURCE DTYPE DIRECTORY

So that peers compute with the very weights that our engine unpacks from a quantised file.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from engine.errors import ConfigError
from engine.models.architecture import Architecture
from engine.text.source import resolve_source
from engine.weights.load import load_checkpoint

_TOP = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    **{part: f"self_attn.{part}_proj" for part in "qkvo"},
    **{part: f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
_MODELS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def export(source: str, dtype: str, directory: Path) -> None:
    """Raises ConfigError for a model that is no GGUF file of a family named above."""
    file = resolve_source(source).files
    checkpoint = load_checkpoint(source, getattr(torch, dtype))
    architecture = checkpoint.architecture
    if architecture.name not in _MODELS:
        raise ConfigError(f"{file}: {architecture.name}: {', '.join(_MODELS)} can be written")
    if file.suffix != ".gguf":
        raise ConfigError(f"{file}: not a .gguf file; transformers reads it as it is")
    # Made beside and moved into place: a directory that is there is whole.
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".new-"))
    try:
        tensors = {_name(name): tensor for name, tensor in checkpoint.tensors.items()}
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
        (made / "config.json").write_text(json.dumps(_config(architecture, dtype), indent=1))
        # From the file as transformers itself reads it, chat template included.
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer.save_pretrained(made)
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(made, directory)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _name(canonical: str) -> str:
    if not canonical.startswith("layers."):
        return f"{_TOP[canonical]}.weight"
    _, layer, part = canonical.split(".", 2)
    part, _, kind = part.partition(".")
    return f"model.layers.{layer}.{_PARTS[part]}.{kind or 'weight'}"


def _config(architecture: Architecture, dtype: str) -> dict[str, Any]:
    a = architecture
    if a.rope.llama3 is not None:
        raise ConfigError(f"{a.name}: scaled rotations are not written; give --peer-model")
    eos = list(a.eos_token_ids)
    return {
        "architectures": [_MODELS[a.name]],
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
        "rope_parameters": {"rope_type": "default", "rope_theta": a.rope.theta},
        "tie_word_embeddings": a.tied_embeddings,
        "hidden_act": {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[a.activation],
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "bos_token_id": a.bos_token_id,
        "torch_dtype": dtype,
    }


if __name__ == "__main__":
    export(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
