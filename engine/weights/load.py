"""From a model source to its weights."""

from __future__ import annotations

import torch

from engine.errors import ConfigError
from engine.text.source import resolve_source
from engine.weights.checkpoint import Checkpoint
from engine.weights.gguf import load_gguf
from engine.weights.safetensors import load_safetensors


def load_checkpoint(source: str, dtype: torch.dtype) -> Checkpoint:
    """Open the weights of a model source (`engine.text.source`), to be read in `dtype`.

    Costs the header and a hash of the files; tensors are read on access. Raises ConfigError, also
    for a built-in model, which has no files.
    """
    if not dtype.is_floating_point:
        raise ConfigError(f"dtype={dtype}: weights are floating point numbers")
    resolved = resolve_source(source)
    load = load_gguf if resolved.kind == "gguf" else load_safetensors
    return load(resolved.files, dtype)
