"""When requests are due: arrival processes, and how the offered rate changes over a run."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine.errors import ConfigError


def constant(rate: float) -> Iterator[float]:
    """Even gaps, from 0."""
    count = 0
    while True:
        yield count / rate
        count += 1


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Exponential gaps: nobody knows of anybody else."""
    at_s = 0.0
    while True:
        yield at_s
        at_s += rng.expovariate(rate)


@dataclass(frozen=True, slots=True)
class Ramp:
    """The rate goes evenly from `first` times the base rate to `last` times, then stays there."""

    first: float
    last: float
    over_s: float

    def __post_init__(self) -> None:
        if not (self.first >= 0 and self.last > 0 and self.over_s > 0):
            raise ConfigError(
                f"ramp={self.first:g}:{self.last:g}:{self.over_s:g}: FIRST must be 0 or more, LAST "
                "and SECONDS above 0"
            )


@dataclass(frozen=True, slots=True)
class Bursts:
    """For the first `for_s` of every `every_s` seconds the rate is `times` as high."""

    every_s: float
    for_s: float
    times: float

    def __post_init__(self) -> None:
        if not (0 < self.for_s < self.every_s and self.times > 0):
            raise ConfigError(
                f"bursts={self.every_s:g}:{self.for_s:g}:{self.times:g}: FOR must lie between 0 "
                "and EVERY, TIMES above 0"
            )


@dataclass(frozen=True, slots=True)
class Profile:
    """How many times its base rate the load has at each moment."""

    ramp: Ramp | None = None
    bursts: Bursts | None = None

    def warp(self, times: Iterable[float]) -> Iterator[float]:
        """Arrivals of the base process, in order, moved to where the profile has them.

        The n-th arrival comes when the profile's integral reaches what the base process had at its
        n-th arrival, so that every process keeps its shape and no arrival is lost.
        """
        if self.ramp is None and self.bursts is None:
            yield from times
            return
        pieces = self._pieces()
        start_s, end_s, first, last = next(pieces)
        before = 0.0  # integral up to start_s
        for wanted in times:
            while wanted > before + (area := (first + last) / 2 * (end_s - start_s)):
                before += area
                start_s, end_s, first, last = next(pieces)
            yield start_s + _reach(wanted - before, first, (last - first) / (end_s - start_s))

    def _pieces(self) -> Iterator[tuple[float, float, float, float]]:
        """`(start, end, multiplier at the start, at the end)`; straight in between."""
        start_s, burst = 0.0, self.bursts
        while True:
            end_s, times = math.inf, 1.0
            if burst is not None:
                period = math.floor(start_s / burst.every_s + 1e-9)
                inside = start_s - period * burst.every_s < burst.for_s - 1e-9
                end_s = period * burst.every_s + (burst.for_s if inside else burst.every_s)
                times = burst.times if inside else 1.0
            if self.ramp is not None and start_s < self.ramp.over_s:
                end_s = min(end_s, self.ramp.over_s)
            # Any length does for a piece that never ends: it is followed by its like.
            end_s = min(end_s, start_s + 3600.0)
            yield start_s, end_s, times * self._ramped(start_s), times * self._ramped(end_s)
            start_s = end_s

    def _ramped(self, at_s: float) -> float:
        ramp = self.ramp
        if ramp is None:
            return 1.0
        return ramp.first + (ramp.last - ramp.first) * min(1.0, at_s / ramp.over_s)


def _reach(area: float, first: float, slope: float) -> float:
    """Where the integral of a straight line `first + slope * s` from 0 reaches `area`."""
    root = math.sqrt(max(0.0, first * first + 2 * slope * area))
    return 2 * area / (first + root) if first + root > 0 else 0.0
