"""Who asks when: the arrival patterns of the benchmarks, over anything that streams answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.bench.client import StreamResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, in the words of both sides."""

    prompt_ids: tuple[int, ...] = ()
    """What an engine in this process gets."""

    path: str = "/v1/completions"
    body: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the server gets. Both must come to the same tokens."""

    max_tokens: int = 16


class Target(Protocol):
    """Where requests go."""

    async def warm(self, count: int) -> None:
        """Be ready for so many at once."""
        ...

    async def ask(self, ask: Ask) -> StreamResult: ...


async def closed_loop(target: Target, asks: Sequence[Ask], concurrency: int) -> list[StreamResult]:
    """`concurrency` callers, each with its next request as soon as its last was answered."""
    await target.warm(concurrency)
    queue = iter(enumerate(asks))
    results: dict[int, StreamResult] = {}

    async def caller() -> None:
        for i, ask in queue:
            results[i] = await target.ask(ask)

    await asyncio.gather(*(caller() for _ in range(min(concurrency, len(asks)))))
    return [results[i] for i in range(len(asks))]


async def arrivals(target: Target, asks: Sequence[Ask], over_s: float) -> list[StreamResult]:
    """Requests that start at even distances within `over_s`, all at once if that is 0."""
    await target.warm(len(asks))
    loop = asyncio.get_running_loop()
    # A moment for the connections to settle; the first is as late as all the others.
    started_s = loop.time() + 0.05

    async def one(i: int, ask: Ask) -> StreamResult:
        await asyncio.sleep(started_s + over_s * i / len(asks) - loop.time())
        return await target.ask(ask)

    return list(await asyncio.gather(*(one(i, ask) for i, ask in enumerate(asks))))
