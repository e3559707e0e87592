"""Azure Public Dataset, LLM inference traces of 2023 and 2024.

The original CSV has `TIMESTAMP,ContextTokens,GeneratedTokens`; lines of `{"t", "in", "out"}` are
the same with arrivals in seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from cluster.replay.trace import Row, TraceRequest, csv_rows, json_rows

CSV_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
JSON_FIELDS = ("t", "in", "out")

_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(\.\d+)?(?:([+-]\d\d):?(\d\d)|Z)?")


def read_csv(path: Path) -> Iterator[TraceRequest]:
    """Raises TraceError."""
    for row in csv_rows(path):
        yield TraceRequest(
            at_s=_timestamp(row),
            input_tokens=row.count("ContextTokens"),
            output_tokens=row.count("GeneratedTokens"),
        )


def read_jsonl(path: Path) -> Iterator[TraceRequest]:
    """Raises TraceError."""
    for row in json_rows(path):
        yield TraceRequest(
            at_s=row.seconds("t"), input_tokens=row.count("in"), output_tokens=row.count("out")
        )


def _timestamp(row: Row) -> float:
    """Seconds of the epoch. datetime itself takes six digits of a second, these have seven."""
    _, value = row.get("TIMESTAMP")
    match = _TIME.fullmatch(value.strip())
    if match is None:
        raise row.error(f"TIMESTAMP={value!r}: must be like 2023-11-16 18:15:46.6805900")
    day, time, fraction, hours, minutes = match.groups()
    try:
        moment = datetime.fromisoformat(f"{day} {time}{hours or '+00'}:{minutes or '00'}")
    except ValueError as error:
        raise row.error(f"TIMESTAMP={value!r}: {error}") from None
    return moment.astimezone(timezone.utc).timestamp() + float(fraction or 0)
