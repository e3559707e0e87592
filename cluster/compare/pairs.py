"""Two sides that were offered the same: how their figures differ, and how sure that is.

Both runs of a pair have the same schedule, so each resample takes the same requests from both. The
figure of several rounds is the geometric mean of their ratios (the mean of their differences);
rounds are resampled too, so that what differs from round to round widens the interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cluster.replay.outcome import Outcome
from cluster.report.figures import (
    Bootstrap,
    Slo,
    duration_of,
    group_values,
    is_good,
    num_output_tokens,
)
from cluster.report.resample import Floats, Resamples, block_length, nearest_rank
from cluster.report.targets import targets_of

Better = Literal["lower", "higher"]
Verdict = Literal["better", "worse", "same"]

_MAX_ADDITIONS = 40_000_000

SMALLEST_RATIO, SMALLEST_DIFFERENCE = 1.02, 0.01
"""What differs by less is called the same, however certain it is."""

_MIN_ROUNDS = 3
"""For an interval of a figure that only whole runs have."""

_LEAST_S = 1e-4
"""Latencies below it count as this much: a ratio of two that are next to nothing says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure that sides are compared by."""

    key: str
    title: str
    better: Better
    how: Literal["ratio", "difference"] = "ratio"
    unit: str = "s"
    latency: str | None = None
    """Key of the latency in `definitions.LATENCIES`, for a percentile of it."""

    percent: float = 50.0
    resampled: bool = True
    """Whether requests of one run tell how far chance goes; else only rounds do."""


def _latency(key: str, title: str, *percents: float) -> list[Figure]:
    return [
        Figure(
            key=f"{key}_p{percent:g}",
            title=f"{title} p{percent:g}",
            better="lower",
            latency=key,
            percent=percent,
        )
        for percent in percents
    ]


FIGURES: tuple[Figure, ...] = (
    *_latency("ttft_scheduled_s", "TTFT", 50, 95, 99),
    *_latency("itl_s", "ITL", 50, 95, 99),
    *_latency("icl_s", "Chunk gap", 99),
    *_latency("e2e_scheduled_s", "End to end", 50, 95, 99),
    *_latency("queue_s", "Queue", 99),
    Figure(
        key="output_tokens_per_s",
        title="Tokens out a second",
        better="higher",
        unit="1/s",
        resampled=False,
    ),
    Figure(key="goodput", title="Goodput", better="higher", how="difference", unit="share"),
    Figure(
        key="unanswered_share",
        title="Shed and failed",
        better="lower",
        how="difference",
        unit="share",
    ),
    Figure(
        key="cached_share",
        title="Cached input tokens",
        better="higher",
        how="difference",
        unit="share",
    ),
)
"""Latencies count from the schedule. What each is: `cluster.report.definitions`."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A figure of one run, and of each of its resamples (NaN where one has none)."""

    value: float | None
    column: Floats


def sampled(
    outcomes: Sequence[Outcome], slo: Slo, *, length: float, bootstrap: Bootstrap, seed: int
) -> dict[str, Sampled]:
    """Every figure of a run. `length` is the mean block, the same for both runs of a pair."""
    outcomes = sorted(outcomes, key=lambda each: each.index)
    resamples = Resamples(
        len(outcomes),
        length=length,
        num_resamples=bootstrap.num_resamples,
        seed=seed,
        level=bootstrap.level,
    )
    out: dict[str, Sampled] = {}
    by_latency: dict[str, list[Figure]] = {}
    for figure in FIGURES:
        if figure.latency is not None:
            by_latency.setdefault(figure.latency, []).append(figure)
    for latency, figures in by_latency.items():
        values = group_values(outcomes, latency)
        percents = tuple(figure.percent for figure in figures)
        table = resamples.quantile_table(
            values.values, values.owners, percents, max_additions=_MAX_ADDITIONS
        )
        ordered = np.sort(values.values)
        for i, figure in enumerate(figures):
            rank = nearest_rank(len(ordered), figure.percent)
            value = float(ordered[rank]) if len(ordered) else None
            out[figure.key] = Sampled(value, table[:, i])
    offered = np.ones(len(outcomes))
    good = _column(outcomes, lambda each: is_good(each, targets_of(slo, each.tier)))
    missed = _column(outcomes, lambda each: each.result in ("shed", "error", "timeout"))
    tokens = _column(outcomes, lambda e: num_output_tokens(e) if e.result == "ok" else 0)
    told = _column(outcomes, lambda e: e.cached_tokens is not None and e.input_tokens is not None)
    cached = told * _column(outcomes, lambda each: each.cached_tokens or 0)
    asked = told * _column(outcomes, lambda each: each.input_tokens or 0)
    for key, above, below in (
        ("goodput", good, offered),
        ("unanswered_share", missed, offered),
        ("cached_share", cached, asked),
    ):
        whole = float(below.sum())
        value = float(above.sum()) / whole if whole else None
        out[key] = Sampled(value, resamples.ratio_column(above, below))
    # A resample has no duration of its own, so this differs between rounds only.
    duration_s = duration_of(outcomes)
    rate = float(tokens.sum()) / duration_s if duration_s > 0 else None
    out["output_tokens_per_s"] = Sampled(rate, np.full(bootstrap.num_resamples, rate or np.nan))
    return out


def pair_length(*runs: Sequence[Outcome]) -> float:
    """Mean block for runs that are resampled together."""
    return max(
        block_length(group_values(outcomes, key).values)
        for outcomes in runs
        for key in ("ttft_s", "e2e_s")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One figure of side B beside that of side A."""

    figure: Figure
    values_a: tuple[float | None, ...]
    """By round, like the next."""

    values_b: tuple[float | None, ...]
    change: float | None
    """B / A, or B - A; None where a round has none."""

    low: float | None = None
    high: float | None = None

    @property
    def verdict(self) -> Verdict | None:
        """Of B, where the interval says that it is no chance; None where nothing can be said."""
        if self.change is None or self.low is None or self.high is None:
            return None
        none = 1.0 if self.figure.how == "ratio" else 0.0
        if self.low <= none <= self.high or self._is_slight(self.change):
            return "same"
        lower = self.high < none
        return "better" if lower == (self.figure.better == "lower") else "worse"

    def _is_slight(self, change: float) -> bool:
        if self.figure.how == "difference":
            return abs(change) < SMALLEST_DIFFERENCE
        return max(change, 1 / change) < SMALLEST_RATIO

    def to_json(self) -> dict[str, Any]:
        return {
            "figure": self.figure.key,
            "title": self.figure.title,
            "unit": self.figure.unit,
            "better": self.figure.better,
            "how": self.figure.how,
            "values_a": list(self.values_a),
            "values_b": list(self.values_b),
            "change": self.change,
            "low": self.low,
            "high": self.high,
            "verdict": self.verdict,
        }


def compare(
    rounds_a: Sequence[Sequence[Outcome]],
    rounds_b: Sequence[Sequence[Outcome]],
    slo: Slo,
    bootstrap: Bootstrap,
) -> list[Comparison]:
    """Every figure, over rounds of which the i-th of both sides was offered the same."""
    pairs: list[tuple[dict[str, Sampled], dict[str, Sampled]]] = []
    for number, (a, b) in enumerate(zip(rounds_a, rounds_b, strict=True)):
        length = pair_length(a, b)
        seed = bootstrap.seed + number
        pairs.append(
            (
                sampled(a, slo, length=length, bootstrap=bootstrap, seed=seed),
                sampled(b, slo, length=length, bootstrap=bootstrap, seed=seed),
            )
        )
    return [_compared(figure, pairs, bootstrap) for figure in FIGURES]


def _compared(
    figure: Figure,
    pairs: Sequence[tuple[Mapping[str, Sampled], Mapping[str, Sampled]]],
    bootstrap: Bootstrap,
) -> Comparison:
    of_a = [a[figure.key] for a, _ in pairs]
    of_b = [b[figure.key] for _, b in pairs]
    change = _together(
        figure, [_change(figure, a.value, b.value) for a, b in zip(of_a, of_b, strict=True)]
    )
    low = high = None
    if change is not None and (figure.resampled or len(pairs) >= _MIN_ROUNDS):
        rows = min(len(each.column) for each in (*of_a, *of_b))
        steps = np.array(
            [
                _changes(figure, a.column[:rows], b.column[:rows])
                for a, b in zip(of_a, of_b, strict=True)
            ]
        )
        drawn = _drawn(steps, bootstrap)
        if len(drawn):
            tail = 100 * (1 - bootstrap.level) / 2
            low, high = (float(each) for each in np.percentile(drawn, (tail, 100 - tail)))
            if figure.how == "ratio":
                low, high = math.exp(low), math.exp(high)
    return Comparison(
        figure=figure,
        values_a=tuple(each.value for each in of_a),
        values_b=tuple(each.value for each in of_b),
        change=change,
        low=low,
        high=high,
    )


def _change(figure: Figure, a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return None
    if figure.how == "difference":
        return b - a
    if figure.latency is not None:
        a, b = max(a, _LEAST_S), max(b, _LEAST_S)
    return math.log(b / a) if a > 0 and b > 0 else None


def _together(figure: Figure, changes: Sequence[float | None]) -> float | None:
    known = [each for each in changes if each is not None]
    if not known or len(known) < len(changes):
        return None
    mean = sum(known) / len(known)
    return math.exp(mean) if figure.how == "ratio" else mean


def _changes(figure: Figure, a: Floats, b: Floats) -> Floats:
    """Of each resample, in logarithms where the figure is a ratio; NaN where there is none."""
    if figure.how == "difference":
        return b - a
    if figure.latency is not None:
        a, b = np.maximum(a, _LEAST_S), np.maximum(b, _LEAST_S)
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.log(b / a)
    return np.where(np.isfinite(steps), steps, np.nan)


def _drawn(steps: Floats, bootstrap: Bootstrap) -> Floats:
    """Means over rounds drawn with replacement, each with a resample of its own. `[rounds,
    resamples]` in."""
    num_rounds, num_resamples = steps.shape
    if not num_resamples:
        return np.zeros(0)
    rng = np.random.default_rng(bootstrap.seed)
    size = (max(num_resamples, 1000), num_rounds)
    rounds = rng.integers(0, num_rounds, size=size)
    means = steps[rounds, rng.integers(0, num_resamples, size=size)].mean(axis=1)
    return means[np.isfinite(means)]


def _column(outcomes: Sequence[Outcome], value_of: Callable[[Outcome], float | bool]) -> Floats:
    return np.array([float(value_of(each)) for each in outcomes], dtype=np.float64)
