"""What is told while a replay runs."""

from __future__ import annotations

import math
from collections import Counter

from cluster.replay.outcome import Outcome

_STEP = math.log(1.02)
"""Values are told apart to 2 %."""


class RoughQuantiles:
    """Quantiles of many positive values in little memory and time."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total = 0

    def add(self, value: float) -> None:
        self._counts[math.floor(math.log(max(value, 1e-6)) / _STEP)] += 1
        self._total += 1

    def quantile(self, share: float) -> float | None:
        """The value that `share` of all do not exceed, up to 2 %. None without values."""
        wanted = math.ceil(share * self._total)
        for step in sorted(self._counts):
            wanted -= self._counts[step]
            if wanted <= 0:
                return math.exp((step + 0.5) * _STEP)
        return None


class Progress:
    """Counts outcomes and says how things stand."""

    def __init__(self, num_requests: int) -> None:
        self._num_requests = num_requests
        self._ttft = RoughQuantiles()
        self._results: Counter[str] = Counter()
        self._last = (0.0, 0)
        self.num_outcomes = 0

    def add(self, outcome: Outcome) -> None:
        self.num_outcomes += 1
        self._results[outcome.result] += 1
        if outcome.first_token_s is not None:
            self._ttft.add(outcome.first_token_s - outcome.scheduled_s)

    def line(self, now_s: float, num_sent: int, in_flight: int) -> str:
        """`now_s` is since the run began; rates are of the time since the last line."""
        then_s, sent_then = self._last
        self._last = (now_s, num_sent)
        rate = (num_sent - sent_then) / (now_s - then_s) if now_s > then_s else 0.0
        results = self._results
        failed = results["error"] + results["timeout"]
        parts = [
            f"{now_s:.0f} s",
            f"{self.num_outcomes}/{self._num_requests} done",
            f"{rate:.1f} sent/s",
            f"{in_flight} in flight",
        ]
        p50, p99 = self._ttft.quantile(0.5), self._ttft.quantile(0.99)
        if p50 is not None and p99 is not None:
            parts.append(f"TTFT p50 {_short(p50)} p99 {_short(p99)}")
        parts.append(f"{results['shed']} shed, {failed} failed")
        return "  ".join(parts)


def _short(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
