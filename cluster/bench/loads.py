"""Who asks when: the arrival patterns of the benchmarks, over anything that streams answers."""

from __future__ import annotations

import asyncio
import random
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
    return await at_times(target, asks, [over_s * i / len(asks) for i in range(len(asks))])


async def at_times(
    target: Target, asks: Sequence[Ask], times_s: Sequence[float]
) -> list[StreamResult]:
    """An open loop: each request at its time, whatever became of those before it."""
    loop = asyncio.get_running_loop()
    # A moment for the connections to settle; the first is as late as all the others.
    started_s = loop.time() + 0.05

    async def one(ask: Ask, at_s: float) -> StreamResult:
        await asyncio.sleep(started_s + at_s - loop.time())
        return await target.ask(ask)

    return list(
        await asyncio.gather(*(one(ask, at) for ask, at in zip(asks, times_s, strict=True)))
    )


def poisson_times(rate: float, over_s: float, rng: random.Random) -> list[float]:
    """Arrivals of a Poisson process of `rate` a second within `over_s`, in order."""
    times: list[float] = []
    at = rng.expovariate(rate)
    while at < over_s:
        times.append(at)
        at += rng.expovariate(rate)
    return times
