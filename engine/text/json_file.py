"""The JSON files beside a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from engine.errors import ConfigError


def read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object a JSON file holds; `missing` instead of an absent file, if given.

    Raises ConfigError naming the file, its size and what is wrong.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        if missing is not None:
            return missing
        raise ConfigError(f"{path}: not found: the model directory is incomplete") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise ConfigError(
            f"{path}: not JSON ({error}; the file has {len(raw)} bytes): cut short? Copy it again"
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return as_object(value)


def as_object(value: Any) -> dict[str, Any]:
    """`value` if it is a JSON object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """`value` if it is a JSON array, else an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []
