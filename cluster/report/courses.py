"""How a run went: what the plots draw, from its outcomes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.replay.outcome import Outcome
from cluster.report.resample import Floats, nearest_rank

_POSITIONS = 60
_MIN_IN_WINDOW = 5


def rolling(times: Floats, values: Floats, percents: Sequence[float]) -> tuple[Floats, Floats]:
    """Percentiles of `values` in a window around each of evenly spaced moments.

    The window is a twelfth of the span, wider where that holds fewer than five values. Returns
    moments `[m]` and percentiles `[percents, m]`.
    """
    n = len(values)
    if n < _MIN_IN_WINDOW:
        return np.zeros(0), np.zeros((len(percents), 0))
    order = np.argsort(times, kind="stable")
    times, values = times[order], values[order]
    moments = np.linspace(times[0], times[-1], _POSITIONS)
    half = (times[-1] - times[0]) / 24
    rows = np.empty((len(percents), len(moments)))
    for column, moment in enumerate(moments):
        low, high = np.searchsorted(times, (moment - half, moment + half + 1e-9))
        while high - low < _MIN_IN_WINDOW:
            # Whichever neighbour is nearer, while there is one on that side.
            before = moment - times[low - 1] if low else np.inf
            after = times[high] - moment if high < n else np.inf
            low, high = (low - 1, high) if before <= after else (low, high + 1)
        window = np.sort(values[low:high])
        for row, percent in enumerate(percents):
            rows[row, column] = window[nearest_rank(len(window), percent)]
    return moments, rows


def in_flight(begins: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """How many intervals were open at each moment at which that changed."""
    if not len(begins):
        return np.zeros(0), np.zeros(0)
    times = np.concatenate([begins, ends])
    steps = np.concatenate([np.ones(len(begins)), -np.ones(len(ends))])
    # What ends and what begins at one moment: the end first, or a busy slot would count twice.
    order = np.lexsort((steps, times))
    return times[order], np.cumsum(steps[order])


def thinned(times: Floats, levels: Floats, most: int = 1500) -> tuple[Floats, Floats]:
    """A step curve of at most about `most` points: the highest level of every slice of time."""
    if len(times) <= most:
        return times, levels
    edges = np.linspace(times[0], times[-1], most + 1)
    slices = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, most - 1)
    highest = np.full(most, -np.inf)
    np.maximum.at(highest, slices, levels)
    kept = np.isfinite(highest)
    return edges[:-1][kept], highest[kept]


def averaged(times: Floats, levels: Floats, most: int = 80) -> tuple[Floats, Floats]:
    """At most `most` points: the means of neighbouring samples."""
    if len(times) <= most:
        return times, levels
    parts = np.array_split(np.arange(len(times)), most)
    return (
        np.array([times[part].mean() for part in parts]),
        np.array([levels[part].mean() for part in parts]),
    )


def cumulative(values: Floats, most: int = 400) -> tuple[Floats, Floats]:
    """Values in order, and the share that does not exceed each; the tail is never thinned."""
    n = len(values)
    ordered = np.sort(values)
    shares = np.arange(1, n + 1) / n
    if n <= 2 * most:
        return ordered, shares
    kept = np.unique(
        np.concatenate([np.linspace(0, n - 1, most).astype(int), np.arange(n)[-most:]])
    )
    return ordered[kept], shares[kept]


def counts_over_time(times: Floats, span: tuple[float, float], bins: int = 40) -> Floats:
    """How many of `times` fall into each of `bins` equal parts of `span`."""
    low, high = span
    return np.histogram(times, bins=bins, range=(low, high if high > low else low + 1.0))[0].astype(
        np.float64
    )


def queue_spans(outcomes: Sequence[Outcome]) -> tuple[Floats, Floats]:
    """When requests entered and left the server's queue, as near as phases tell: they follow each
    other from the moment the last attempt was sent."""
    begins: list[float] = []
    ends: list[float] = []
    for each in outcomes:
        if "queue" not in each.phases:
            continue
        at_s = each.attempt_s
        for phase, seconds in each.phases.items():
            if phase == "queue":
                begins.append(at_s)
                ends.append(at_s + seconds)
                break
            at_s += seconds
    return np.array(begins), np.array(ends)
