"""Whose clock a time is on, and how two clocks compare.

Monotonic clocks of two hosts have nothing in common. Every exchange of messages bounds what lies
between them: no message arrives before it was sent.

```
own    ──sent──────────────────────received──►      low  = peer_sent     - own_received
              \\                   /                  high = peer_received - own_sent
peer   ────────received─────sent─────────────►      low <= peer - own <= high
```
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

Exchange = tuple[float, float, float, float]
"""`(own_sent, peer_received, peer_sent, own_received)`, each by its own side's clock."""


@lru_cache(maxsize=1)
def clock_name() -> str:
    """Names this process's monotonic clock: equal names mean equal clocks (one boot, one time
    namespace). Empty where the system does not say: such a clock equals no other."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/time').st_ino}"
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class Offset:
    """By how much a peer's clock is ahead of ours."""

    low_s: float
    high_s: float

    @property
    def seconds(self) -> float:
        return (self.low_s + self.high_s) / 2

    @property
    def uncertainty_s(self) -> float:
        """The true offset is at most this far from `seconds`."""
        return abs(self.high_s - self.low_s) / 2

    def here(self, peer_s: float) -> float:
        """A time of the peer's clock, on ours."""
        return peer_s - self.seconds


SAME = Offset(0.0, 0.0)


def offset(exchanges: Iterable[Exchange], own: str, peer: str) -> Offset | None:
    """What the exchanges leave possible. None when there is no exchange to go by.

    `own` and `peer` are the clocks' names (`clock_name`). Exchanges that contradict each other (a
    clock was stepped, as virtual machines' may be) give the span between them.
    """
    if own and own == peer:
        return SAME
    low, high = float("-inf"), float("inf")
    for own_sent, peer_received, peer_sent, own_received in exchanges:
        low = max(low, peer_sent - own_received)
        high = min(high, peer_received - own_sent)
    if low == float("-inf"):
        return None
    return Offset(min(low, high), max(low, high))
