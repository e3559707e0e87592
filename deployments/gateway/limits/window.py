"""How much was taken in the last minute. Pure: no clock, no I/O.

A sliding window in slots: what was taken in one slot counts until the whole slot is older than the
window, so over no stretch of `window_s` is more than the limit taken, not by one token. (A token
bucket lets twice the limit through after a quiet minute, a fixed window at its border.)

```
   slot  k-60                                          k
    |-----|-----|-----|- … -|-----|-----|-----|-----|--- now
    |<------------- all of these count ----------------->|
```
"""

from __future__ import annotations

import math
from dataclasses import dataclass

SLOTS = 60
"""Slots of a window. What waits for room waits up to a sixtieth longer than it would have to."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a limit stands, for `x-ratelimit-*` headers."""

    limit: int
    remaining: int
    reset_s: float
    """Until everything taken has run out of the window."""


class SlidingWindow:
    """Takings of one key against one limit. `now` in seconds of a clock that only runs forwards."""

    def __init__(self, window_s: float = 60.0) -> None:
        self.window_s = window_s
        self._slot_s = window_s / SLOTS
        self._slots: dict[int, int] = {}  # ascending
        self._total = 0

    @property
    def idle(self) -> bool:
        return not self._slots

    def taken(self, now: float) -> int:
        """Of the last window."""
        self._expire(now)
        return self._total

    def wait_s(self, limit: int, cost: int, now: float) -> float:
        """Seconds until `cost` fits: 0 it fits now, infinite it never will."""
        if cost > limit:
            return math.inf
        self._expire(now)
        excess = self._total + cost - limit
        if excess <= 0:
            return 0.0
        for slot, amount in self._slots.items():
            excess -= amount
            if excess <= 0:
                return max(0.0, self._ends(slot) - now)
        return 0.0  # unreachable: all of the total is in the slots

    def take(self, cost: int, now: float) -> int:
        """Count `cost` as taken now, whatever the limit. Returns the slot, for `give_back`."""
        self._expire(now)
        slot = self._slot(now)
        if self._slots:  # a caller whose clock went back must not upset the order
            slot = max(slot, next(reversed(self._slots)))
        self._slots[slot] = self._slots.get(slot, 0) + cost
        self._total += cost
        return slot

    def give_back(self, slot: int, amount: int) -> None:
        """Part of what was taken in `slot` was not used."""
        held = self._slots.get(slot)
        if held is not None:
            returned = min(held, amount)
            self._slots[slot] = held - returned
            self._total -= returned

    def standing(self, limit: int, now: float) -> Standing:
        self._expire(now)
        reset_s = 0.0
        for slot, amount in self._slots.items():
            if amount:
                reset_s = max(0.0, self._ends(slot) - now)
        return Standing(limit, max(0, limit - self._total), reset_s)

    def _slot(self, now: float) -> int:
        return math.floor(now / self._slot_s)

    def _ends(self, slot: int) -> float:
        """When the slot counts no more."""
        return (slot + 1 + SLOTS) * self._slot_s

    def _expire(self, now: float) -> None:
        while self._slots:
            slot = next(iter(self._slots))
            if self._ends(slot) > now:
                return
            self._total -= self._slots.pop(slot)
