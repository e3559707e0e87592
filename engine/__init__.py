"""One model on one tensor-parallel group: requests in, tokens and text out, a step at a time.

No Ray, no HTTP, and no clock in its decisions. Names that need torch are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "CacheConfig": "engine.config",
    "ConfigError": "engine.errors",
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "EngineError": "engine.errors",
    "EngineRunner": "engine.runner",
    "FinishReason": "engine.request",
    "ModelConfig": "engine.config",
    "Overloaded": "engine.errors",
    "Request": "engine.request",
    "RequestError": "engine.errors",
    "SampledToken": "engine.request",
    "SamplingParams": "engine.request",
    "SchedulerConfig": "engine.config",
    "TransferError": "engine.errors",
    "build_engine": "engine.build",
    "load_text": "engine.text.text_model",
}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(home), name)
