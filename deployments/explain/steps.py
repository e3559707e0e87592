"""What each engine step of a replica was: a ring of numbers, written once a step.

A request's journal keeps only when its own tokens came. What shared a step with it, and what ran in
between, is looked up here when somebody asks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One forward pass."""

    end_s: float
    """When its output was known on the event loop, by the replica's monotonic clock."""

    duration_s: float
    tokens: int
    """Computed by the pass: decoding rows and shares of prompts."""

    rows: int
    """Requests that got a token."""

    prompts: int
    """Requests of which a share of the prompt was computed."""

    prompt_tokens: int
    preempted: int
    """Requests that lost their blocks for this step."""


_BATCH = 512


class StepRing:
    """The last `size` steps. Not thread-safe: for the event loop."""

    def __init__(self, size: int = 16_384) -> None:
        self._size = size
        self._ends = array("d", bytes(8 * size))
        self._durations = array("d", bytes(8 * size))
        self._facts = array("Q", bytes(8 * size))
        self._count = 0
        self._new: list[tuple[float, float, int, int, int, int, int]] = []

    def add(
        self,
        end_s: float,
        duration_s: float,
        tokens: int,
        rows: int,
        prompts: int = 0,
        prompt_tokens: int = 0,
        preempted: int = 0,
    ) -> None:
        """`end_s` must not go back. Counts above 65,535 (255 preempted) are kept as that."""
        # Once a step, between passes: the packing is left to a moment when it is done in a row.
        self._new.append((end_s, duration_s, tokens, rows, prompts, prompt_tokens, preempted))
        if len(self._new) >= _BATCH:
            self._settle()

    def _settle(self) -> None:
        new, self._new = self._new, []
        for step in new:
            self._pack(*step)

    def _pack(
        self,
        end_s: float,
        duration_s: float,
        tokens: int,
        rows: int,
        prompts: int,
        prompt_tokens: int,
        preempted: int,
    ) -> None:
        at = self._count % self._size
        self._ends[at] = end_s
        self._durations[at] = duration_s
        self._facts[at] = (
            min(tokens, 0xFFFF)
            | min(rows, 0xFFFF) << 16
            | min(prompt_tokens, 0xFFFF) << 32
            | min(prompts, 0xFF) << 48
            | min(preempted, 0xFF) << 56
        )
        self._count += 1

    def __len__(self) -> int:
        self._settle()
        return min(self._count, self._size)

    @property
    def oldest_s(self) -> float | None:
        """End of the oldest step still known."""
        known = len(self)
        return self._ends[(self._count - known) % self._size] if known else None

    def spent(self, ends: Sequence[float]) -> tuple[float, float] | None:
        """Of the steps that ended at exactly these ascending times: seconds in all, and rows on
        average. None when there are none, or one of them is not known."""
        if not ends:
            return None
        index, size, own_ends = self._first_after(ends[0], including=True), self._size, self._ends
        seconds, rows = 0.0, 0
        for end_s in ends:
            while index < self._count and own_ends[index % size] < end_s:
                index += 1
            if index == self._count or own_ends[index % size] != end_s:
                return None
            seconds += self._durations[index % size]
            rows += self._facts[index % size] >> 16 & 0xFFFF
        return seconds, rows / len(ends)

    def between(self, after_s: float, until_s: float) -> list[Step]:
        """Steps that ended in `(after_s, until_s]`, oldest first."""
        first = self._first_after(after_s, including=False)
        last = self._first_after(until_s, including=False)
        return [self._step(index) for index in range(first, last)]

    def _step(self, index: int) -> Step:
        at = index % self._size
        facts = self._facts[at]
        return Step(
            end_s=self._ends[at],
            duration_s=self._durations[at],
            tokens=facts & 0xFFFF,
            rows=facts >> 16 & 0xFFFF,
            prompt_tokens=facts >> 32 & 0xFFFF,
            prompts=facts >> 48 & 0xFF,
            preempted=facts >> 56 & 0xFF,
        )

    def _first_after(self, at_s: float, *, including: bool) -> int:
        """Number of the first step that ended after `at_s` (or, `including`, at it)."""
        known = len(self)  # packs what is new, so it comes before the count
        low, high = self._count - known, self._count
        while low < high:
            middle = (low + high) // 2
            end_s = self._ends[middle % self._size]
            if end_s < at_s or (end_s == at_s and not including):
                low = middle + 1
            else:
                high = middle
        return low
