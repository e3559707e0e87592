"""What work would cost on an idle replica, from steps that had the engine to themselves.

The model, stated in every explanation that uses it:

- A decode step alone costs the median of the last steps that computed one row and nothing else.
- A prompt's chunk of n tokens alone costs `a + b * n`, the least-squares line through the last
  steps that computed a share of one prompt and no other request. Attention's growth with the
  context is in `b` only as far as those prompts were as long.
- A replica that never had such a step says what the line through all of its steps gives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Basis = Literal["alone", "all steps", "none"]


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds, and what they go by."""

    seconds: float | None
    basis: Basis
    samples: int

    def to_wire(self) -> list[float | int | str | None]:
        return [self.seconds, self.basis, self.samples]


NOTHING = Estimate(None, "none", 0)


class StepCosts:
    """Remembers the last `size` steps of each sort. One append a step."""

    def __init__(self, size: int = 64) -> None:
        self._rows = deque[float](maxlen=size)
        self._chunks = deque[tuple[int, float]](maxlen=size)
        self._all = deque[tuple[int, float]](maxlen=size)

    def observe(
        self, duration_s: float, tokens: int, rows: int, prompts: int, prompt_tokens: int
    ) -> None:
        if prompts == 0 and rows == 1 and tokens == 1:
            self._rows.append(duration_s)
        elif prompts == 1 and tokens == prompt_tokens:
            self._chunks.append((tokens, duration_s))
        elif tokens:
            self._all.append((tokens, duration_s))

    def decode_step(self) -> Estimate:
        """One row alone."""
        if self._rows:
            return Estimate(median(self._rows), "alone", len(self._rows))
        return self._by_line(self._everything(), [1])

    def prefill(self, chunks: Sequence[int]) -> Estimate:
        """A prompt computed in chunks of these many tokens, alone."""
        if not chunks:
            return Estimate(0.0, "alone", 0)
        if self._chunks:
            seconds = _line(self._chunks, chunks)
            return Estimate(seconds, "alone", len(self._chunks))
        return self._by_line(self._everything(), chunks)

    def _everything(self) -> list[tuple[int, float]]:
        return [*self._all, *self._chunks, *((1, seconds) for seconds in self._rows)]

    @staticmethod
    def _by_line(points: list[tuple[int, float]], chunks: Sequence[int]) -> Estimate:
        if not points:
            return NOTHING
        return Estimate(_line(points, chunks), "all steps", len(points))


def _line(points: Iterable[tuple[int, float]], at: Sequence[int]) -> float:
    """Sum over `at` of the least-squares line through `points`, neither part below zero."""
    known = list(points)
    n = len(known)
    mean_x = sum(x for x, _ in known) / n
    mean_y = sum(y for _, y in known) / n
    spread = sum((x - mean_x) ** 2 for x, _ in known)
    slope = (
        sum((x - mean_x) * (y - mean_y) for x, y in known) / spread if spread else mean_y / mean_x
    )
    slope = max(slope, 0.0)
    start = max(mean_y - slope * mean_x, 0.0)
    if start == 0.0 and mean_x:
        slope = mean_y / mean_x
    return sum(start + slope * x for x in at)
