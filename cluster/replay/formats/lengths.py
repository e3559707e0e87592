"""Vidur's CSVs of lengths (arXiv summarisation and others): no arrivals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cluster.replay.trace import TraceRequest, csv_rows

FIELDS = ("num_prefill_tokens", "num_decode_tokens")


def read(path: Path) -> Iterator[TraceRequest]:
    """Raises TraceError."""
    for row in csv_rows(path):
        yield TraceRequest(
            at_s=None,
            input_tokens=row.count("num_prefill_tokens"),
            output_tokens=row.count("num_decode_tokens"),
        )
