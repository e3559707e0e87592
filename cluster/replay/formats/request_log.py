"""The request log of a gateway of ours (`deployments/gateway/request_log.py` writes it)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from cluster.replay.trace import Row, TraceRequest, json_rows

FIELDS = ("log", "at", "prompt_tokens", "max_tokens", "blocks")
BLOCK_TOKENS = 64
VERSION = 1


def read(path: Path) -> Iterator[TraceRequest]:
    """Requests that were refused or left are offered again with the length they asked for.

    Raises TraceError.
    """
    for row in json_rows(path):
        if (version := row.count("log")) != VERSION:
            raise row.error(f"log={version}: this version reads {VERSION}")
        finished = row.text("outcome") == "finished"
        answer = row.count("completion_tokens" if finished else "max_tokens")
        choices = max(1, row.count("choices"))
        yield TraceRequest(
            at_s=row.seconds("at"),
            input_tokens=row.count("prompt_tokens"),
            output_tokens=max(1, answer // choices) if finished else answer,
            chain=_chain(row),
            tier=row.text("tier"),
            tenant=row.text("tenant"),
            model=row.text("model"),
            sampling=_sampling(row),
        )


def _chain(row: Row) -> tuple[str, ...]:
    _, ids = row.get("blocks")
    if not isinstance(ids, list) or not all(isinstance(x, str) for x in cast("list[Any]", ids)):
        raise row.error(f"blocks={str(cast('Any', ids))[:60]}: must be a list of strings")
    return tuple(cast("list[str]", ids))


def _sampling(row: Row) -> dict[str, Any]:
    value = row.values.get("sampling") or {}
    if not isinstance(value, dict):
        raise row.error(f"sampling={value!r}: must be an object")
    return dict(cast("dict[str, Any]", value))
