"""Which requests are remembered: the latest ones, and for longer the slowest of each tier."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Ring(Generic[T]):
    """Bounded by `recent` entries plus `slowest` for each of at most `MAX_TIERS` tiers."""

    MAX_TIERS = 16

    def __init__(self, *, recent: int, slowest: int, keep_s: float) -> None:
        """`keep_s` is how long a slow entry stays without being displaced by a slower one."""
        self.recent = recent
        self.slowest = slowest
        self.keep_s = keep_s
        self._recent: OrderedDict[str, T] = OrderedDict()
        self._slow: dict[str, list[tuple[float, int, float, str, T]]] = {}
        """By tier, a heap of `(duration, serial, ended, key, entry)`, the fastest first."""

        self._oldest: dict[str, float] = {}
        """By tier, a time before which nothing in its heap ended."""

        self._serial = itertools.count()

    def add(self, key: str, entry: T, *, tier: str, duration_s: float, now: float) -> bool:
        """Remember an entry; a later one of the same key takes its place among the latest.

        True when it is among the slowest of its tier.
        """
        self._recent.pop(key, None)
        self._recent[key] = entry
        while len(self._recent) > self.recent:
            self._recent.popitem(last=False)
        if not self.slowest or (tier not in self._slow and len(self._slow) >= self.MAX_TIERS):
            return False
        heap = self._slow.setdefault(tier, [])
        if len(heap) >= self.slowest and self._oldest.get(tier, 0.0) <= now - self.keep_s:
            heap[:] = [item for item in heap if item[2] > now - self.keep_s]
            heapq.heapify(heap)
            self._oldest[tier] = min((item[2] for item in heap), default=now)
        item = (duration_s, next(self._serial), now, key, entry)
        if len(heap) < self.slowest:
            heapq.heappush(heap, item)
        elif duration_s > heap[0][0]:
            heapq.heapreplace(heap, item)
        else:
            return False
        return True

    def get(self, key: str) -> T | None:
        entry = self._recent.get(key)
        if entry is None:
            entry = next((e for heap in self._slow.values() for *_, k, e in heap if k == key), None)
        return entry

    def find(self, wanted: Callable[[T], bool]) -> T | None:
        """The latest entry for which `wanted` holds."""
        return next((entry for entry in self if wanted(entry)), None)

    def __iter__(self) -> Iterator[T]:
        """Every entry once, the latest first."""
        seen: set[int] = set()
        slow = sorted(
            (item for heap in self._slow.values() for item in heap),
            key=lambda i: i[1],
            reverse=True,
        )
        for entry in (*reversed(self._recent.values()), *(item[4] for item in slow)):
            if id(entry) not in seen:
                seen.add(id(entry))
                yield entry

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def slow(self, tier: str | None = None) -> list[T]:
        """The slowest, slowest first; of one tier or of all."""
        heaps = self._slow.values() if tier is None else [self._slow.get(tier, [])]
        items = sorted(
            (item for heap in heaps for item in heap), key=lambda item: item[:2], reverse=True
        )
        return [item[4] for item in items]

    def resize(self, *, recent: int, slowest: int, keep_s: float) -> None:
        """Keeps the latest and the slowest."""
        self.recent, self.slowest, self.keep_s = recent, slowest, keep_s
        while len(self._recent) > recent:
            self._recent.popitem(last=False)
        for heap in self._slow.values():
            while len(heap) > slowest:
                heapq.heappop(heap)
