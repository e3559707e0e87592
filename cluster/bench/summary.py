"""What a list of measurements says, and how two of them compare."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` % of all values do not exceed (nearest rank).

    Always one that was measured: interpolation between the two worst of a few would invent a tail.
    """
    if not values:
        raise ValueError("no percentile of nothing")
    if not 0 < percent <= 100:
        raise ValueError(f"percent={percent}: must be above 0 and at most 100")
    # Rounded first: 0.55 * 100 is a hair above 55.
    rank = math.ceil(round(percent / 100 * len(values), 9))
    return sorted(values)[rank - 1]


@dataclass(frozen=True, slots=True)
class Summary:
    """Of one quantity, in the unit its name says. `p50` is the median, tails are nearest rank."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float], scale: float = 1.0) -> Summary:
        """`scale` is multiplied in, 1000 for seconds to milliseconds."""
        scaled = [value * scale for value in values]
        return cls(
            count=len(scaled),
            mean=statistics.fmean(scaled),
            p50=statistics.median(scaled),
            p90=percentile(scaled, 90),
            p99=percentile(scaled, 99),
            max=max(scaled),
        )

    def to_json(self) -> dict[str, float]:
        return rounded(asdict(self))


def rounded(values: dict[str, float]) -> dict[str, float]:
    """Four digits: more is noise."""
    return {name: significant(value) for name, value in values.items()}


def significant(value: float, digits: int = 4) -> float:
    """`value` rounded to so many significant digits; whole numbers stay whole."""
    if isinstance(value, int) or value == 0 or not math.isfinite(value):
        return value
    return round(value, digits - 1 - math.floor(math.log10(abs(value))))


def compare(ours: float, reference: float) -> dict[str, float]:
    """Both, their difference and their ratio."""
    return rounded(
        {
            "stack": ours,
            "in_process": reference,
            "difference": ours - reference,
            "ratio": ours / reference if reference else math.inf,
        }
    )
