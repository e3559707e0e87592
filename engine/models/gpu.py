"""A decoder on a GPU, from what a checkpoint holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine.attention.select import cuda_device
from engine.errors import ConfigError
from engine.models.capabilities import lacks
from engine.models.decoder import Decoder
from engine.models.device_linear import DeviceProducts, weights_unavailable

if TYPE_CHECKING:
    from engine.attention.capabilities import Device
    from engine.config import ModelConfig
    from engine.models.architecture import Architecture
    from engine.quantisation.codes import CodedMatrix

logger = logging.getLogger(__name__)

DEVICE = torch.device("cuda", 0)
"""A replica sees the one GPU that it was given."""


def kept_codes(
    config: ModelConfig, device: Device, coded: Mapping[str, CodedMatrix]
) -> Mapping[str, CodedMatrix]:
    """The codes that this device multiplies with; none of them where it expands all.

    Raises ConfigError where the configuration asks for codes that the device cannot multiply with:
    what a file happens to store is expanded instead, with a warning.
    """
    asked = config.quantisation in ("int8", "int4", "fp8")
    kind = config.quantisation if asked else ("int8" if coded else "none")
    reason = weights_unavailable(device, kind)
    if reason is None:
        return coded
    if asked or not coded:
        raise ConfigError(f"model {config.name!r}: quantisation={config.quantisation!r}: {reason}")
    logger.warning(
        "model %s: its quantised weights are expanded and take the memory of that: %s",
        config.name, reason,
    )  # fmt: skip
    return {}


def gpu_decoder(
    config: ModelConfig,
    architecture: Architecture,
    expanded: Mapping[str, Tensor],
    coded: Mapping[str, CodedMatrix],
    dtype: torch.dtype,
    fingerprint: str,
) -> Decoder:
    """expanded: every tensor as numbers. coded: those that are codes. Its attention is chosen when
    its pool is known (`engine.execution.gpu`). Raises ConfigError."""
    found = cuda_device()
    name = str(dtype).removeprefix("torch.")
    lacking = lacks("gpu", architecture, name, config.kv_dtype)
    if lacking is not None:
        raise ConfigError(
            f"model {config.name!r}: accelerator='gpu': {lacking}: use a model, dtype or kv_dtype "
            "that it computes, or accelerator: cpu"
        )
    codes = kept_codes(config, found, coded)
    products = DeviceProducts(codes, device=DEVICE, dtype=dtype, fp8=config.quantisation == "fp8")
    model = Decoder(
        architecture,
        expanded,
        dtype=dtype,
        fingerprint=fingerprint,
        device=DEVICE,
        kv_dtype=config.kv_dtype,
        products=products,
    )
    logger.info(
        "model %s: %s, %s, weights of %d MB, %d of %d products as codes or fp8, KV in %s",
        config.name, found.name, name, model.weight_bytes // 1_000_000,
        products.num_coded, products.num_coded + products.num_dense, model.layout.dtype,
    )  # fmt: skip
    return model
