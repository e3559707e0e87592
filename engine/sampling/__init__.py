"""Logits processors, stateless noise and the sampler. Loaded on first use: torch comes along."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.sampling.sampler import Sampler, UnusableLogits, validate_params

__all__ = ["Sampler", "UnusableLogits", "validate_params"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("engine.sampling.sampler"), name)
