"""The queue in front of the running requests: by priority, which ageing raises, then by arrival."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine.request import RequestId
from engine.scheduling.requests import Tracked


class WaitingQueue:
    """One line for each priority, so that finding the next request never sorts.

    Within a line `queued_at` never decreases from front to back: the front has aged the most.
    """

    def __init__(self, ageing_s: float) -> None:
        self.ageing_s = ageing_s
        self._lines: dict[int, OrderedDict[RequestId, Tracked]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Tracked]:
        """By priority, then from front to back; ageing left out."""
        for priority in sorted(self._lines):
            yield from self._lines[priority].values()

    def append(self, tracked: Tracked) -> None:
        line = self._lines.setdefault(tracked.request.priority, OrderedDict())
        if line:  # a caller whose clock went back must not upset the order
            tracked.queued_at = max(tracked.queued_at, next(reversed(line.values())).queued_at)
        line[tracked.request_id] = tracked
        self._length += 1

    def put_back(self, tracked: Tracked, now: float) -> None:
        """Queue a preempted request first in its line. The time it waited before still counts."""
        line = self._lines.setdefault(tracked.request.priority, OrderedDict())
        tracked.queued_at = now - tracked.waited_s
        if line:  # it stands in front of the oldest, so it is treated as no younger
            tracked.queued_at = min(tracked.queued_at, next(iter(line.values())).queued_at)
        line[tracked.request_id] = tracked
        line.move_to_end(tracked.request_id, last=False)
        self._length += 1

    def remove(self, tracked: Tracked) -> None:
        priority = tracked.request.priority
        del self._lines[priority][tracked.request_id]
        if not self._lines[priority]:
            del self._lines[priority]
        self._length -= 1

    def aged_priority(self, tracked: Tracked, now: float) -> int:
        """Each `ageing_s` in the queue raises a request by one level (lower is more urgent)."""
        waited_s = max(0.0, now - tracked.queued_at)
        return tracked.request.priority - int(waited_s // self.ageing_s)

    def first(self, now: float) -> Tracked | None:
        """Next to be admitted: best aged priority, then arrival. Paused ones stand aside."""
        fronts = [f for line in self._lines.values() if (f := _front(line)) is not None]
        return min(fronts, key=lambda t: (self.aged_priority(t, now), t.arrival), default=None)

    def most_urgent(self) -> Tracked | None:
        """Front of the line with the most urgent priority, ageing left out."""
        for priority in sorted(self._lines):
            front = _front(self._lines[priority])
            if front is not None:
                return front
        return None


def _front(line: OrderedDict[RequestId, Tracked]) -> Tracked | None:
    return next((tracked for tracked in line.values() if not tracked.paused), None)
