"""From a model's configuration to the model."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.config import DType, ModelConfig
from engine.errors import ConfigError
from engine.models.decoder import Decoder
from engine.models.fake import FakeModel
from engine.models.model import Model
from engine.models.tiny import tiny_model
from engine.weights.load import load_checkpoint


def load_model(config: ModelConfig, *, num_threads: int | None = None) -> Model:
    """Read the weights and build the model, ready for its first pass.

    num_threads: compute threads of this process (torch's setting is global), set before the weights
    are packed. None leaves it as it is. Raises ConfigError.
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    if config.source == "synthetic":
        raise ConfigError(
            f"model {config.name!r}: source='synthetic' is an engine that computes nothing, not a "
            "model: use fake or tiny where a model is needed"
        )
    if config.source == "fake":
        if config.dtype not in ("auto", "float64"):
            raise ConfigError(
                f"model {config.name!r}: dtype={config.dtype!r}: the fake model's KV holds token "
                "ids in float64: use auto or float64"
            )
        return FakeModel()
    if config.source == "tiny":
        return tiny_model(torch.float64 if config.dtype == "auto" else compute_dtype(config.dtype))
    dtype = compute_dtype(config.dtype)
    checkpoint = load_checkpoint(config.source, dtype)
    return Decoder(
        checkpoint.architecture,
        checkpoint.tensors,
        dtype=dtype,
        fingerprint=checkpoint.fingerprint,
    )


def compute_dtype(dtype: DType) -> torch.dtype:
    """`auto` is bfloat16 where the CPU multiplies it natively, else float32."""
    if dtype == "auto":
        return torch.bfloat16 if _multiplies_bfloat16() else torch.float32
    return getattr(torch, dtype)


def _multiplies_bfloat16() -> bool:
    # oneDNN's own answer is true for any AVX-512, where it emulates at a third of float32's speed.
    capabilities: Mapping[str, object] = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))
