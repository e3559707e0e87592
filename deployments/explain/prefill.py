"""What a prefill replica did for one prompt, told with its last message."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from deployments.explain.costs import NOTHING, Estimate, StepCosts

MAX_CHUNKS = 512
"""Chunks told one by one; a longer prompt's later ones are only counted."""


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """One prompt's share of one engine step."""

    end_s: float
    duration_s: float
    tokens: int
    others: int
    """Tokens of other requests in the same step."""

    def to_wire(self) -> list[Any]:
        return [self.end_s, self.duration_s, self.tokens, self.others]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillFacts:
    """Times are of the prefill replica's clock."""

    clock: str
    asked_s: float
    """When the request for this prompt was received."""

    sent_s: float
    """When these facts left."""

    cached_tokens: int
    chunks: tuple[ChunkFacts, ...]
    num_chunks: int
    idle: Estimate
    """What the chunks would have cost alone."""

    def to_wire(self) -> list[Any]:
        return [
            self.clock,
            self.asked_s,
            self.sent_s,
            self.cached_tokens,
            [chunk.to_wire() for chunk in self.chunks],
            self.num_chunks,
            self.idle.to_wire(),
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> PrefillFacts:
        clock, asked_s, sent_s, cached_tokens, chunks, num_chunks, idle = wire
        return cls(
            clock=clock,
            asked_s=asked_s,
            sent_s=sent_s,
            cached_tokens=cached_tokens,
            chunks=tuple(ChunkFacts(*chunk) for chunk in chunks),
            num_chunks=num_chunks,
            idle=Estimate(*idle),
        )


class ChunkLog:
    """The shares of one prompt, as the steps come: four numbers a step that computed some of it."""

    __slots__ = ("_at", "_counts", "asked_s", "cached_tokens", "num_chunks")

    def __init__(self, asked_s: float) -> None:
        self.asked_s = asked_s
        self.cached_tokens = 0
        self.num_chunks = 0
        self._at = array("d")
        """End and duration of each."""

        self._counts = array("q")
        """Own and other tokens of each."""

    def add(self, end_s: float, duration_s: float, tokens: int, others: int) -> None:
        self.num_chunks += 1
        if self.num_chunks <= MAX_CHUNKS:
            self._at.append(end_s)
            self._at.append(duration_s)
            self._counts.append(tokens)
            self._counts.append(others)

    def chunks(self) -> tuple[ChunkFacts, ...]:
        at, counts = self._at, self._counts
        return tuple(
            ChunkFacts(at[i], at[i + 1], counts[i], counts[i + 1]) for i in range(0, len(at), 2)
        )

    def facts(self, clock: str, now_s: float, costs: StepCosts | None) -> PrefillFacts:
        chunks = self.chunks()
        idle = costs.prefill([chunk.tokens for chunk in chunks]) if costs is not None else NOTHING
        return PrefillFacts(
            clock=clock,
            asked_s=self.asked_s,
            sent_s=now_s,
            cached_tokens=self.cached_tokens,
            chunks=chunks,
            num_chunks=self.num_chunks,
            idle=idle,
        )
