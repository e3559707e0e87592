"""PromQL that panels share."""

from __future__ import annotations

REQUESTS = 'job=~"$job", model=~"$model", tier=~"$tier"'
"""Selects series of requests."""

MODEL = 'job=~"$job", model=~"$model"'
POOL = 'job=~"$job", model=~"$model", replica=~"$replica"'
ENGINE = 'job=~"$job", model_name=~"$model", replica=~"$replica"'
"""Selects the engine's own series, which have vLLM's label."""


def rate(name: str, select: str, by: str) -> str:
    """Events a second, summed to `by`."""
    return f"sum by ({by}) (rate({name}{{{select}}}[$window]))"


def quantile(q: float, name: str, select: str, by: str = "") -> str:
    """Quantile `q` of a histogram, by the labels `by`."""
    labels = f"le, {by}" if by else "le"
    return (
        f"histogram_quantile({q:g}, sum by ({labels}) (rate({name}_bucket{{{select}}}[$window])))"
    )


def mean(name: str, select: str, by: str) -> str:
    """Mean of a histogram. No value where nothing was observed."""
    return f"{rate(f'{name}_sum', select, by)} / ({rate(f'{name}_count', select, by)} > 0)"


def share(part: str, whole: str) -> str:
    """`part / whole`, without a value where the whole is 0."""
    return f"{part} / ({whole} > 0)"


def part(name: str, select: str, by: str) -> str:
    """How a rate is shared out by the labels `by`: adds up to 1."""
    return f"{rate(name, select, by)} / on () group_left () ({total(name, select)} > 0)"


def total(name: str, select: str) -> str:
    """Events a second, all together."""
    return f"sum(rate({name}{{{select}}}[$window]))"
