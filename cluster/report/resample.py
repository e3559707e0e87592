"""Confidence intervals for figures of requests that follow each other.

Latencies of neighbouring requests are alike: they waited in the same queue. A bootstrap that draws
requests one by one would call a figure certain that is not. The stationary bootstrap draws runs of
neighbours whose lengths are geometric (Politis and Romano, JASA 1994), with the mean length that
the data's own correlation asks for (Politis and White, Econometric Reviews 2004, as corrected by
Patton, Politis and White, 2009).

A resample is how often each request is in it. So one set of resamples serves every figure of the
same requests, gaps of one request stay together, and no resample is ever sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MIN_REQUESTS = 10
"""Fewer say nothing about their own spread, and no interval is given."""


@dataclass(frozen=True, slots=True)
class Interval:
    """`level` of the resamples lie between, the rest half below and half above."""

    low: float
    high: float


def nearest_rank(count: int, percent: float) -> int:
    """0-based index, in sorted order, of the smallest of `count` values that at least `percent` %
    of them do not exceed. Always a value that was measured."""
    # Rounded first: 0.55 * 100 is a hair above 55.
    return max(0, int(np.ceil(round(percent / 100 * count, 9))) - 1)


def block_length(series: Floats) -> float:
    """Mean length of a block for `series`, in order of time; 1 where it has no correlation."""
    n = len(series)
    if n < 2 * MIN_REQUESTS or float(np.ptp(series)) == 0.0:
        return 1.0
    centred = series - series.mean()
    near = max(5, int(np.ceil(np.sqrt(np.log10(n)))))
    most = min(n - 1, int(np.ceil(np.sqrt(n))) + near)
    covariance = np.array([centred[: n - k] @ centred[k:] / n for k in range(most + 1)])
    correlation = np.abs(covariance / covariance[0])
    threshold = 2.0 * np.sqrt(np.log10(n) / n)
    quiet = correlation[1:] < threshold
    lag = next(
        (m for m in range(most - near + 1) if quiet[m : m + near].all()),
        max((k + 1 for k in range(most) if not quiet[k]), default=0),
    )
    window = min(2 * max(lag, 1), most)
    lags = np.arange(-window, window + 1)
    share = np.abs(lags) / window
    weights = np.where(share <= 0.5, 1.0, 2.0 * (1.0 - share))
    spectrum = weights * covariance[np.abs(lags)]
    spread = 2.0 * spectrum.sum() ** 2
    slope = (spectrum * np.abs(lags)).sum()
    if spread <= 0.0:
        return 1.0
    length = (2.0 * slope**2 / spread) ** (1 / 3) * n ** (1 / 3)
    longest = np.ceil(min(3.0 * np.sqrt(n), n / 3))
    return float(min(max(length, 1.0), longest))


class Resamples:
    """`[resamples, requests]`: how often each request of a sequence is in each resample."""

    def __init__(
        self, num_requests: int, *, length: float, num_resamples: int, seed: int, level: float
    ) -> None:
        """`length` is the mean block; `level` the share that intervals cover, such as 0.95."""
        self.length = length
        self._tails = (100 * (1 - level) / 2, 100 * (1 + level) / 2)
        rng = np.random.default_rng(seed)
        n = num_requests
        counts = np.zeros((num_resamples if n >= MIN_REQUESTS else 0, n), dtype=np.float32)
        at = np.arange(n)
        for row in counts:
            starts_here = rng.random(n) < 1.0 / length
            starts_here[0] = True
            begin = np.maximum.accumulate(np.where(starts_here, at, 0))
            first = rng.integers(0, n, size=n)
            row[:] = np.bincount((first[begin] + at - begin) % n, minlength=n)
        self._counts = counts

    def quantiles(
        self,
        values: Floats,
        owners: NDArray[np.intp],
        percents: tuple[float, ...],
        *,
        max_additions: int,
    ) -> list[Interval | None]:
        """Intervals of percentiles of `values`; see `quantile_table`."""
        table = self.quantile_table(values, owners, percents, max_additions=max_additions)
        return [self.interval(column) for column in table.T]

    def mean(self, values: Floats, owners: NDArray[np.intp]) -> Interval | None:
        """Of the mean of `values`, each belonging to the request `owners` names."""
        n = self._counts.shape[1]
        return self.ratio(
            np.bincount(owners, weights=values, minlength=n).astype(np.float64),
            np.bincount(owners, minlength=n).astype(np.float64),
        )

    def ratio(self, above: Floats, below: Floats) -> Interval | None:
        """Of a sum over requests divided by another; one number a request each."""
        return self.interval(self.ratio_column(above, below))

    # What intervals are made of: a figure of every resample, NaN where it has none.

    def quantile_table(
        self,
        values: Floats,
        owners: NDArray[np.intp],
        percents: tuple[float, ...],
        *,
        max_additions: int,
    ) -> Floats:
        """`[resamples, percents]` of `values`, each belonging to the request `owners` names: one
        a request or many.

        Where all resamples would take more than `max_additions` additions, fewer are used, but
        never fewer than 100.
        """
        if not len(values):
            return np.full((len(self._counts), len(percents)), np.nan)
        order = np.argsort(values, kind="stable")
        ordered, ordered_owners = values[order], owners[order]
        rows = self._counts[: max(100, max_additions // len(values))]
        table = np.full((len(rows), len(percents)), np.nan)
        for out, row in zip(table, rows, strict=True):
            reached = np.cumsum(row[ordered_owners], dtype=np.float64)
            if reached[-1] == 0:
                continue  # None of the requests that have such a value was drawn.
            ranks = [nearest_rank(int(reached[-1]), percent) + 1 for percent in percents]
            out[:] = ordered[np.searchsorted(reached, ranks)]
        return table

    def ratio_column(self, above: Floats, below: Floats) -> Floats:
        """`[resamples]`: sum of `above` over sum of `below`."""
        divisors = self._counts @ below
        sums = self._counts @ above
        kept = divisors > 0
        return np.divide(sums, divisors, out=np.full(len(sums), np.nan), where=kept)

    def interval(self, values: Floats) -> Interval | None:
        """What most of a column lies between; None of too few requests, or nothing."""
        values = values[np.isfinite(values)]
        if not len(values):
            return None
        low, high = np.percentile(values, self._tails)
        return Interval(float(low), float(high))
