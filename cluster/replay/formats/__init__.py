"""The formats of traces, told apart by the fields of their first line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import orjson

from cluster.replay.formats import azure, burstgpt, lengths, mooncake, request_log, servegen
from cluster.replay.trace import Trace, TraceError, TraceRequest, digest, read_bytes

MOONCAKE_TICK_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    name: str
    fields: tuple[str, ...]
    """All are in a file's first line (of JSON) or header (of CSV)."""

    read: Callable[[Path], Iterator[TraceRequest]]
    block_tokens: int = 0


FORMATS: tuple[Format, ...] = (
    Format(
        name="request-log",
        fields=request_log.FIELDS,
        read=request_log.read,
        block_tokens=request_log.BLOCK_TOKENS,
    ),
    Format(
        name="mooncake",
        fields=mooncake.FIELDS,
        read=mooncake.read,
        block_tokens=mooncake.BLOCK_TOKENS,
    ),
    Format(name="azure", fields=azure.JSON_FIELDS, read=azure.read_jsonl),
    Format(name="azure-csv", fields=azure.CSV_FIELDS, read=azure.read_csv),
    Format(name="burstgpt", fields=burstgpt.FIELDS, read=burstgpt.read),
    Format(name="servegen", fields=servegen.FIELDS, read=servegen.read),
    Format(name="lengths", fields=lengths.FIELDS, read=lengths.read),
)
"""The more particular ones first."""


def read_trace(
    path: Path,
    *,
    name: str | None = None,
    format: str | None = None,
    tick_s: float = MOONCAKE_TICK_S,
) -> Trace:
    """The trace in `path`, in order of arrival, its first arrival at 0.

    Requests without a token of prompt or of answer are skipped and counted. `tick_s` is what a
    Mooncake tick is spread over; 0 leaves its requests on one instant.

    Raises:
        TraceError: naming file, line and value; also for a format that nobody knows.
    """
    chosen = _named(format) if format else _detect(path)
    rows = list(chosen.read(path))
    requests = [row for row in rows if row.input_tokens > 0 and row.output_tokens > 0]
    if not requests:
        raise TraceError(f"{path}: no request in it ({len(rows)} rows): give another file")
    if requests[0].at_s is not None:
        requests.sort(key=lambda request: cast("float", request.at_s))
        began_s = cast("float", requests[0].at_s)
        requests = [
            replace(request, at_s=cast("float", request.at_s) - began_s) for request in requests
        ]
        if chosen.name == "mooncake" and tick_s > 0:
            requests = mooncake.spread_ticks(requests, tick_s)
    return Trace(
        name=name or path.stem,
        path=path,
        format=chosen.name,
        sha256=digest(path),
        requests=tuple(requests),
        block_tokens=chosen.block_tokens,
        num_skipped=len(rows) - len(requests),
    )


def _named(name: str) -> Format:
    for each in FORMATS:
        if each.name == name:
            return each
    known = ", ".join(each.name for each in FORMATS)
    raise TraceError(f"format {name!r}: there are {known}")


def _detect(path: Path) -> Format:
    first = next((line for line in read_bytes(path).split(b"\n") if line.strip()), b"")
    fields = _fields(first)
    for each in FORMATS:
        if fields.issuperset(each.fields):
            return each
    known = "; ".join(f"{each.name}: {', '.join(each.fields)}" for each in FORMATS)
    raise TraceError(
        f"{path}:1: fields {', '.join(sorted(fields)) or '(none)'} are of no format known here "
        f"({known}): rename them, or give --format"
    )


def _fields(line: bytes) -> set[str]:
    if line.lstrip().startswith(b"{"):
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            return set()
        nested = value.get("data")
        return {*value, *(nested if isinstance(nested, dict) else ())}
    return {name.strip() for name in line.decode("utf-8-sig", "replace").split(",")}
