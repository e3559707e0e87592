"""From a model's configuration to the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from engine.config import DType, ModelConfig
from engine.errors import ConfigError
from engine.models.architecture import Architecture
from engine.models.decoder import Decoder
from engine.models.fake import FakeModel
from engine.models.model import Model
from engine.models.tiny import TINY_ARCHITECTURE, tiny_fingerprint, tiny_tensors
from engine.native.decoder import NativeDecoder
from engine.native.library import NativeUnavailable, native_available, variants
from engine.weights.load import load_checkpoint

logger = logging.getLogger(__name__)


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
        if config.backend == "native":
            raise ConfigError(
                f"model {config.name!r}: backend='native': the fake model is Python: use auto"
            )
        return FakeModel()
    if config.source == "tiny":
        dtype = torch.float64 if config.dtype == "auto" else compute_dtype(config.dtype)
        return _decoder(config, TINY_ARCHITECTURE, tiny_tensors(), dtype, tiny_fingerprint(dtype))
    dtype = compute_dtype(config.dtype)
    checkpoint = load_checkpoint(config.source, dtype)
    return _decoder(
        config, checkpoint.architecture, checkpoint.tensors, dtype, checkpoint.fingerprint
    )


def _decoder(
    config: ModelConfig,
    architecture: Architecture,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    fingerprint: str,
) -> Model:
    """The native decoder where the configuration and the machine allow it, else torch's."""
    name = str(dtype).removeprefix("torch.")
    # float64 is for comparing results, also between machines: torch computes it everywhere.
    wanted = config.backend == "native" or (
        config.backend == "auto" and dtype in (torch.bfloat16, torch.float32)
    )
    if wanted:
        reason = native_available(name)
        if reason is None and config.backend == "auto" and variants(name) == ("portable",):
            reason = f"no vector instructions of this processor are known for {name}"
        if reason is None:
            try:
                model = NativeDecoder(architecture, tensors, dtype=dtype, fingerprint=fingerprint)
            except NativeUnavailable as error:
                reason = str(error)
            else:
                logger.info(
                    "model %s: native %s decoder in %s, %d threads",
                    config.name, model.variant, name, model.num_threads,
                )  # fmt: skip
                return model
        if config.backend == "native":
            raise ConfigError(
                f"model {config.name!r}: backend='native': {reason}; or use 'auto' or 'torch'"
            )
        logger.warning(
            "model %s is computed by torch, several times slower: %s", config.name, reason
        )
    return Decoder(architecture, tensors, dtype=dtype, fingerprint=fingerprint)


def compute_dtype(dtype: DType) -> torch.dtype:
    """`auto` is bfloat16 where the CPU multiplies it natively, else float32."""
    if dtype == "auto":
        return torch.bfloat16 if _multiplies_bfloat16() else torch.float32
    return getattr(torch, dtype)


def _multiplies_bfloat16() -> bool:
    # oneDNN's own answer is true for any AVX-512, where it emulates at a third of float32's speed.
    capabilities: Mapping[str, object] = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16"))
