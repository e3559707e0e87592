"""From what a device has to the attention a model gets on it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Literal

import torch

from engine.attention.backend import AttentionBackend
from engine.attention.capabilities import AttentionName, AttentionNeeds, Device, choose
from engine.errors import ConfigError

AttentionChoice = Literal["auto"] | AttentionName


def cuda_device(index: int = 0) -> Device:
    """What this process can say of a CUDA device. Raises ConfigError where there is none."""
    if torch.version.cuda is None:
        raise ConfigError(
            f"accelerator='gpu': torch {torch.__version__} is built without CUDA: install "
            "torch==2.13.0 from PyPI (make serve TORCH=torch==2.13.0 EXTRAS=gpu)"
        )
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"accelerator='gpu': this process sees {count} CUDA devices, number {index} is wanted: "
            "give the replica num_gpus, and check CUDA_VISIBLE_DEVICES and the driver"
        )
    from engine.attention.flash import flash_unavailable

    missing: dict[str, str] = {}
    if (reason := flash_unavailable()) is not None:
        missing["flash_attn"] = reason
    if find_spec("triton") is None:
        missing["triton"] = "Triton is not installed (pip install triton)"
    major, minor = torch.cuda.get_device_capability(index)
    return Device(
        kind="cuda",
        compute=(major, minor),
        missing=missing,
        name=torch.cuda.get_device_name(index),
    )


def make_attention(
    device: Device,
    needs: AttentionNeeds,
    *,
    window: int | None,
    wanted: AttentionChoice = "auto",
    softcap: float = 0.0,
) -> tuple[AttentionName, AttentionBackend]:
    """The backend and its name. Raises ConfigError with what each one lacks.

    window: tokens each token sees.
    """
    name = choose(device, needs, wanted)
    if name == "flash":
        from engine.attention.flash import FlashAttention, flash_calls

        return name, FlashAttention(flash_calls(), window=window, softcap=softcap)
    if name == "varlen":
        from engine.attention.varlen import VarlenAttention, varlen_attn

        return name, VarlenAttention(varlen_attn(), window=window)
    if name == "triton":
        # By name: the module needs Triton, which not every machine that checks this code has.
        kernel = import_module("engine.attention.triton_paged")
        return name, kernel.TritonAttention(window=window, softcap=softcap)
    from engine.attention.cpu import CpuAttention

    return name, CpuAttention(window=window, softcap=softcap)
