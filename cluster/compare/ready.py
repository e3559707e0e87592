"""Comparisons by name: what is switched, and what it is measured on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from cluster.compare.edits import MODEL_BUILDER, Edit, applications, edited, edits_of, rechecked
from cluster.config import ServeConfig
from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A configuration under a name of its own."""

    name: str
    config: ServeConfig
    changes: tuple[str, ...] = ()
    """What was changed in the file, for the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """A comparison that any configuration of ours can be put to."""

    text: str
    variants: Callable[[ServeConfig], list[Variant]]


def variant(name: str, config: ServeConfig, edits: Sequence[Edit]) -> Variant:
    """Raises ConfigError where an edit cannot be made."""
    return Variant(
        name=name,
        config=edited(config, edits, label=name),
        changes=tuple(str(edit) for edit in edits),
    )


def apart_and_together(config: ServeConfig) -> list[Variant]:
    """The configuration with its prefill pool, and the same replicas all serving whole requests.

    Threads and memory of a replica stay what they are. Raises ConfigError without a prefill pool.
    """
    data = copy.deepcopy(config.data)
    changes: list[str] = []
    for application in applications(data, MODEL_BUILDER):
        deployments = {each["name"]: each for each in application.get("deployments") or ()}
        prefill, decode = deployments.get("Prefill"), deployments.get("Decode")
        if prefill is None or decode is None or application["args"].get("prefill") is False:
            continue
        replicas = _replicas(prefill) + _replicas(decode)
        application["args"]["prefill"] = False
        application["deployments"] = [d for n, d in deployments.items() if n != "Prefill"]
        decode["num_replicas"] = replicas
        # What belongs to transfers has nothing to say here and may stay.
        changes.append(f"{application['name']}: no Prefill, {replicas} Decode replicas")
    if not changes:
        raise ConfigError(
            f"{config.source}: no model in it has a prefill and a decode pool, so there is nothing "
            "to put together; write both, with prefill: true"
        )
    return [
        Variant(name="apart", config=config),
        Variant(
            name="together",
            config=rechecked(config, data, label="together"),
            changes=tuple(changes),
        ),
    ]


def _replicas(deployment: dict[str, Any]) -> int:
    number = deployment.get("num_replicas", 1)
    if not isinstance(number, int):
        raise ConfigError(
            f"{deployment['name']}: num_replicas={number!r}: give a number, or the two sides "
            "cannot have equally many replicas"
        )
    return number


def _of(*choices: tuple[str, dict[str, Any]]) -> Callable[[ServeConfig], list[Variant]]:
    def variants(config: ServeConfig) -> list[Variant]:
        return [variant(name, config, edits_of(values)) for name, values in choices]

    return variants


def _chunk(tokens: int) -> tuple[str, dict[str, Any]]:
    pools = ("Prefill", "Decode")
    values = {f"{pool}.user_config.max_chunk_tokens": tokens for pool in pools}
    return f"chunk {tokens}", values


READY: dict[str, Ready] = {
    "pd": Ready(
        text="prefill and decode on replicas of their own, or together on as many replicas",
        variants=apart_and_together,
    ),
    "prefix-cache": Ready(
        text="with and without the prefix cache; a trace with shared prefixes shows it",
        variants=_of(
            ("cache", {"args.prefix_caching": True}), ("no cache", {"args.prefix_caching": False})
        ),
    ),
    "chunk": Ready(
        text="most prompt tokens of one request in one step: 256, 64 and 512",
        variants=_of(_chunk(256), _chunk(64), _chunk(512)),
    ),
    "block-size": Ready(
        text="tokens a KV block, the unit of the prefix cache: 16, 32 and 64",
        variants=_of(
            ("block 16", {"args.block_tokens": 16}),
            ("block 32", {"args.block_tokens": 32}),
            ("block 64", {"args.block_tokens": 64}),
        ),
    ),
    "local-prefill": Ready(
        text="longest missing part of a prompt that a decode replica computes itself: 64, 0, 256",
        variants=_of(
            ("local 64", {"Decode.user_config.local_prefill_tokens": 64}),
            ("local 0", {"Decode.user_config.local_prefill_tokens": 0}),
            ("local 256", {"Decode.user_config.local_prefill_tokens": 256}),
        ),
    ),
}
"""The first variant of each is what others are compared with."""


def ladder(config: ServeConfig, path: Path) -> list[Variant]:
    """Rungs of a file, each with the changes of all before it and its own.

    ```yaml
    - name: bare
      set: {args.prefix_caching: false}
    - name: prefix cache
      set: {args.prefix_caching: true}
    ```

    Raises ConfigError naming the rung at fault.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--ladder {path}: {error}") from error
    if not isinstance(document, list) or len(cast("list[Any]", document)) < 2:
        raise ConfigError(f"--ladder {path}: must be a list of two rungs or more")
    rungs: list[Variant] = []
    values: dict[str, Any] = {}
    for rung in cast("list[Any]", document):
        if not isinstance(rung, dict) or set(rung) != {"name", "set"}:
            raise ConfigError(f"--ladder {path}: {rung!r}: a rung has `name` and `set`")
        if not isinstance(rung["set"], dict):
            raise ConfigError(f"--ladder {path}: {rung['name']!r}: set must map paths to values")
        values |= rung["set"]
        made = variant(str(rung["name"]), config, edits_of(values))
        rungs.append(
            Variant(
                name=made.name,
                config=made.config,
                changes=tuple(str(edit) for edit in edits_of(rung["set"])),
            )
        )
    return rungs
