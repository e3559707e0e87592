"""Mooncake's traces (FAST'25): lines of `timestamp` (ms), lengths and the prompt's block chain.

A block has 512 tokens, the last of a prompt may have fewer. Arrivals of the conversation trace come
in ticks of 3 s with up to 28 requests on one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from cluster.replay.trace import Row, TraceRequest, json_rows

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
BLOCK_TOKENS = 512


def read(path: Path) -> Iterator[TraceRequest]:
    """Raises TraceError."""
    for row in json_rows(path):
        tokens = row.count("input_length")
        yield TraceRequest(
            at_s=row.seconds("timestamp", scale=1e-3),
            input_tokens=tokens,
            output_tokens=row.count("output_length"),
            chain=_chain(row, tokens),
        )


def _chain(row: Row, input_tokens: int) -> tuple[int, ...]:
    _, ids = row.get("hash_ids")
    if not isinstance(ids, list) or not all(type(each) is int for each in cast("list[Any]", ids)):
        raise row.error(f"hash_ids={str(cast('Any', ids))[:60]}: must be a list of whole numbers")
    chain = tuple(cast("list[int]", ids))
    if len(chain) > -(-input_tokens // BLOCK_TOKENS):
        raise row.error(
            f"{len(chain)} hash_ids, but input_length={input_tokens} has "
            f"{-(-input_tokens // BLOCK_TOKENS)} blocks of {BLOCK_TOKENS} tokens"
        )
    return chain


def spread_ticks(requests: Sequence[TraceRequest], tick_s: float) -> list[TraceRequest]:
    """Requests that share an arrival, spread evenly over the tick that they stand for.

    `tick_s` is the tick's length; a tick that is followed by another sooner ends there, so that
    order is kept.
    """
    spread: list[TraceRequest] = []
    first = 0
    while first < len(requests):
        at_s = requests[first].at_s
        assert at_s is not None, "this format has arrivals"
        last = first
        while last < len(requests) and requests[last].at_s == at_s:
            last += 1
        length_s = tick_s
        if last < len(requests):
            length_s = min(tick_s, cast("float", requests[last].at_s) - at_s)
        spread += (
            replace(request, at_s=at_s + length_s * i / (last - first))
            for i, request in enumerate(requests[first:last])
        )
        first = last
    return spread
