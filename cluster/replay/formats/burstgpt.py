"""BurstGPT's CSV: regional Azure OpenAI traffic, some versions of it with sessions.

A row without response tokens is a request that failed there; it cannot be made again with a length
of its own and is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.replay.trace import TraceRequest, csv_rows

FIELDS = ("Timestamp", "Request tokens", "Response tokens")


def read(path: Path) -> Iterator[TraceRequest]:
    """Raises TraceError."""
    for row in csv_rows(path):
        yield TraceRequest(
            at_s=row.seconds("Timestamp"),
            input_tokens=row.count("Request tokens"),
            output_tokens=row.count("Response tokens"),
            session=row.text("Session ID"),
        )
