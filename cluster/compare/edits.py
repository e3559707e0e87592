"""Changes to a configuration, by path: `--set args.block_tokens=32`."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml

from cluster import config as configuration
from cluster.config import ServeConfig
from engine.errors import ConfigError

MODEL_BUILDER = "deployments.app:model"
GATEWAY_BUILDER = "deployments.app:gateway"

_DEPLOYMENTS = ("Decode", "Gateway", "Prefill")
_OPTIONAL = ("args", "user_config", "ray_actor_options", "http_options")
"""Mappings that a file may leave out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One value to set.

    A path is keys joined by dots; an element of a list is called by its `name`. Paths that begin
    with `args` mean every model application, those with `Prefill`, `Decode` or `Gateway` every
    deployment of that name.
    """

    path: str
    value: Any

    @classmethod
    def parse(cls, text: str) -> Edit:
        """`PATH=VALUE`, the value in YAML. Raises ConfigError."""
        path, equals, value = text.partition("=")
        if not equals or not all(part.strip() for part in path.split(".")):
            raise ConfigError(
                f"{text!r}: an edit reads PATH=VALUE, such as args.block_tokens=32 or "
                "Decode.user_config.max_chunk_tokens=128"
            )
        try:
            return cls(path=path.strip(), value=yaml.safe_load(value))
        except yaml.YAMLError as error:
            raise ConfigError(f"{text!r}: the value is not YAML: {error}") from error

    def __str__(self) -> str:
        # A bare scalar is a document that YAML ends with a line of dots.
        text = yaml.safe_dump(self.value, default_flow_style=True, width=10_000)
        return f"{self.path}={text.partition(chr(10))[0]}"


def edits_of(values: Mapping[str, Any]) -> tuple[Edit, ...]:
    """Of a mapping of paths to values, as a ladder's file has them."""
    return tuple(Edit(path=path, value=value) for path, value in values.items())


def edited(config: ServeConfig, edits: Iterable[Edit], *, label: str) -> ServeConfig:
    """The configuration with the edits made, checked again.

    Raises:
        ConfigError: a path leads nowhere, or the result cannot work.
    """
    edits = tuple(edits)
    data = copy.deepcopy(config.data)
    for edit in edits:
        keys = edit.path.split(".")
        for root, rest in _roots(data, keys, edit):
            _set(root, rest, edit)
    return rechecked(config, data, label=label) if edits else config


def rechecked(config: ServeConfig, data: dict[str, Any], *, label: str) -> ServeConfig:
    """`data` as a configuration that came from `config`. Raises ConfigError."""
    document = configuration.parse(
        yaml.safe_dump(data, sort_keys=False), source=f"{config.source} ({label})"
    )
    checked = configuration.check(document, beside=config.code_dir or Path.cwd())
    return replace(checked, code_dir=config.code_dir)


def applications(data: Mapping[str, Any], builder: str) -> list[dict[str, Any]]:
    """Those of a configuration that `builder` builds."""
    return [each for each in data["applications"] if each.get("import_path") == builder]


def _roots(
    data: dict[str, Any], keys: list[str], edit: Edit
) -> list[tuple[dict[str, Any], list[str]]]:
    if keys[0] == "args":
        return [(each, keys) for each in _some(applications(data, MODEL_BUILDER), edit)]
    if keys[0] in _DEPLOYMENTS:
        found = [
            deployment
            for application in data["applications"]
            for deployment in application.get("deployments") or ()
            if deployment["name"] == keys[0]
        ]
        if len(keys) < 2:
            raise ConfigError(f"{edit}: say what of {keys[0]}, such as {keys[0]}.num_replicas")
        return [(each, keys[1:]) for each in _some(found, edit)]
    return [(data, keys)]


def _some(found: list[dict[str, Any]], edit: Edit) -> list[dict[str, Any]]:
    if not found:
        raise ConfigError(f"{edit}: the configuration has no such application or deployment")
    return found


def _set(root: dict[str, Any], keys: list[str], edit: Edit) -> None:
    at: Any = root
    for place, key in enumerate(keys[:-1]):
        if isinstance(at, dict) and at.get(key) is None and key in _OPTIONAL:
            at[key] = {}
        at = _step(at, key, keys[:place], edit)
    last = keys[-1]
    if isinstance(at, dict):
        cast("dict[str, Any]", at)[last] = edit.value
    elif isinstance(at, list):
        _step(at, last, keys[:-1], edit)
        names = [_name(each) for each in cast("list[Any]", at)]
        cast("list[Any]", at)[names.index(last)] = edit.value
    else:
        raise ConfigError(f"{edit}: {'.'.join(keys[:-1])} is {at!r}, which has no {last!r}")


def _step(at: Any, key: str, before: list[str], edit: Edit) -> Any:
    known = list(at) if isinstance(at, dict) else []
    if isinstance(at, dict) and key in at:
        return at[key]
    if isinstance(at, list):
        known = [_name(each) for each in cast("list[Any]", at)]
        if key in known:
            return at[known.index(key)]
    near = difflib.get_close_matches(key, [str(each) for each in known], n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(map(str, known))}"
    where = ".".join(before) or "the file"
    raise ConfigError(f"{edit}: {where} has no {key!r}{hint if known else ''}")


def _name(each: Any) -> str:
    return str(each.get("name")) if isinstance(each, dict) else str(each)
