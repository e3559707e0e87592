"""Where a request stood in the admission queue: behind whom, what went first, why that replica."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_SCORES = 8

Scores = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """What the queue knows about one grant when it makes it."""

    ahead: int = 0
    """Entries that were to be served first when this one arrived."""

    waiting: tuple[tuple[str, int], ...] = ()
    """All that waited then, by tier."""

    granted_before: tuple[tuple[str, int], ...] = ()
    """Granted while this one waited, by tier."""

    waited_s: float = 0.0
    """By the queue's own clock."""

    rule: str = ""
    """What the scores are, such as `most free slots`."""

    scores: Scores = ()
    """`(replica, score)` of those that could have taken it, at most `MAX_SCORES`."""

    def to_wire(self) -> list[Any]:
        return [
            self.ahead,
            self.waiting,
            self.granted_before,
            self.waited_s,
            self.rule,
            self.scores,
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> QueueFacts:
        ahead, waiting, granted_before, waited_s, rule, scores = wire
        return cls(
            ahead=ahead,
            waiting=tuple((tier, n) for tier, n in waiting),
            granted_before=tuple((tier, n) for tier, n in granted_before),
            waited_s=waited_s,
            rule=rule,
            scores=tuple((replica, score) for replica, score in scores),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "ahead": self.ahead,
            "waiting": dict(self.waiting),
            "granted_before": dict(self.granted_before),
            "waited_s": self.waited_s,
            "rule": self.rule,
            "scores": {replica: score for replica, score in self.scores},
        }


def top(scores: Iterable[tuple[str, float]], *, highest: bool = True) -> Scores:
    """The best few, best first."""
    ordered = sorted(scores, key=lambda entry: (-entry[1] if highest else entry[1], entry[0]))
    return tuple(ordered[:MAX_SCORES])


@dataclass(frozen=True, slots=True)
class Arrival:
    """The queue as one entry found it."""

    ahead: int
    waiting: tuple[tuple[str, int], ...]
    granted: Mapping[str, int]


class Standing:
    """Counts entries and grants by tier, for the facts of each grant. Pure."""

    def __init__(self) -> None:
        self._granted: Counter[str] = Counter()

    def arrived(self, waiting: Mapping[str, int], ahead: int) -> Arrival:
        """Call before the entry joins; `waiting` counts those that wait, by tier."""
        mix = tuple(sorted((tier, n) for tier, n in waiting.items() if n))
        return Arrival(ahead, mix, dict(self._granted))

    def granted(
        self, tier: str, arrival: Arrival, waited_s: float, rule: str, scores: Scores
    ) -> QueueFacts:
        """Call once for each grant."""
        before = {
            name: total - arrival.granted.get(name, 0)
            for name, total in self._granted.items()
            if total > arrival.granted.get(name, 0)
        }
        self._granted[tier] += 1
        return QueueFacts(
            ahead=arrival.ahead,
            waiting=arrival.waiting,
            granted_before=tuple(sorted(before.items())),
            waited_s=waited_s,
            rule=rule,
            scores=scores,
        )
