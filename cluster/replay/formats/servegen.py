"""Lines as generators of the ServeGen kind write them: one request with its client.

`timestamp` in seconds, `input_tokens` and `output_tokens` (also inside `data`), and where known
`client_id` (a tenant), `session_id` (a conversation), `tier` and `model`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from cluster.replay.trace import Row, TraceRequest, json_rows

FIELDS = ("timestamp", "input_tokens", "output_tokens")


def read(path: Path) -> Iterator[TraceRequest]:
    """Raises TraceError."""
    for outer in json_rows(path):
        nested = outer.values.get("data")
        row = outer
        if isinstance(nested, dict):
            values = {**outer.values, **cast("dict[str, Any]", nested)}
            row = Row(path, outer.line, values)
        yield TraceRequest(
            at_s=row.seconds("timestamp"),
            input_tokens=row.count("input_tokens"),
            output_tokens=row.count("output_tokens"),
            session=row.text("session_id"),
            tenant=row.text("client_id"),
            tier=row.text("tier"),
            model=row.text("model"),
        )
