"""Figures of one run. What each means is in `definitions.py`.

Nothing here is ever NaN or infinite: what cannot be said is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.replay.outcome import RESULTS, Outcome, Run
from cluster.report.definitions import LATENCIES
from cluster.report.definitions import as_json as definitions
from cluster.report.prices import PriceTable
from cluster.report.resample import Floats, Interval, Resamples, block_length, nearest_rank
from cluster.report.targets import DEFAULT_TARGETS, Targets, targets_of

SCHEMA = 1
"""Version of `report.json`."""

PERCENTS = (50.0, 95.0, 99.0, 99.9)
SLO_MULTIPLES = (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
MAX_GROUPS = 50
"""Tenants with figures of their own; the rest are told of together."""

OTHER_GROUP = "(all others)"
_MAX_ADDITIONS = 60_000_000
"""Of one figure's bootstrap: figures of very many values take fewer resamples."""

Slo = Mapping[str, Targets]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    num_resamples: int = 400
    seed: int = 1
    level: float = 0.95


def summarise(
    run: Run,
    outcomes: Sequence[Outcome],
    slo: Slo | None = None,
    prices: PriceTable | None = None,
    *,
    bootstrap: Bootstrap | None = None,
) -> dict[str, Any]:
    """All figures, ready for JSON: in all, and by tier, tenant and source of the mix.

    `slo` are the targets by tier, `DEFAULT_TARGETS` unless given. `outcomes` may be in any order
    and may be empty.
    """
    slo = DEFAULT_TARGETS if slo is None else slo
    bootstrap = bootstrap or Bootstrap()
    outcomes = sorted(outcomes, key=lambda each: each.index)
    duration_s = duration_of(outcomes)
    whole = _group(outcomes, slo, duration_s, bootstrap)
    return {
        "schema": SCHEMA,
        "label": run.label,
        "run": run.to_json(),
        "duration_s": duration_s,
        "complete": run.end is not None and not run.end.interrupted,
        "num_unfinished": run.end.num_unfinished if run.end else None,
        "slo": {tier: targets_of(slo, tier).to_json() for tier in _names(outcomes, "tier")},
        "bootstrap": {
            "num_resamples": bootstrap.num_resamples,
            "seed": bootstrap.seed,
            "level": bootstrap.level,
        },
        "all": whole,
        "tiers": _by(outcomes, "tier", slo, duration_s, bootstrap, whole),
        "tenants": _by(outcomes, "tenant", slo, duration_s, bootstrap, whole),
        "sources": _by(outcomes, "source", slo, duration_s, bootstrap, whole),
        "lateness_s": _distribution(np.array([each.lateness_s for each in outcomes])),
        "client": _client(run, duration_s),
        "errors": _errors(outcomes),
        "cost": None if prices is None else _cost(prices, whole, duration_s),
        "definitions": definitions(),
    }


# One request


def num_output_tokens(outcome: Outcome) -> int:
    """As the server counts; one a chunk where it does not tell."""
    if outcome.output_tokens is not None:
        return outcome.output_tokens
    return len(outcome.chunk_times)


def last_token_s(outcome: Outcome) -> float | None:
    """When the last chunk with content came."""
    return outcome.chunk_times[-1] if outcome.chunk_times else outcome.first_token_s


def ttft_s(outcome: Outcome) -> float | None:
    if outcome.first_token_s is None:
        return None
    return outcome.first_token_s - outcome.sent_s


def itl_s(outcome: Outcome) -> float | None:
    tokens, last_s = num_output_tokens(outcome), last_token_s(outcome)
    if outcome.first_token_s is None or last_s is None or tokens < 2:
        return None
    return (last_s - outcome.first_token_s) / (tokens - 1)


def _tpot_s(outcome: Outcome) -> float | None:
    tokens = num_output_tokens(outcome)
    if outcome.first_token_s is None or tokens < 2:
        return None
    return (outcome.end_s - outcome.first_token_s) / (tokens - 1)


def _ntpot_s(outcome: Outcome) -> float | None:
    tokens, last_s = num_output_tokens(outcome), last_token_s(outcome)
    return None if last_s is None or not tokens else (last_s - outcome.sent_s) / tokens


def _since_schedule(at_s: float | None, outcome: Outcome) -> float | None:
    return None if at_s is None else at_s - outcome.scheduled_s


_PER_REQUEST: Mapping[str, Callable[[Outcome], float | None]] = {
    "queue_s": lambda each: each.phases.get("queue"),
    "ttft_s": ttft_s,
    "ttft_scheduled_s": lambda each: _since_schedule(each.first_token_s, each),
    "itl_s": itl_s,
    "tpot_s": _tpot_s,
    "ntpot_s": _ntpot_s,
    "e2e_s": lambda each: each.end_s - each.sent_s,
    "e2e_scheduled_s": lambda each: each.end_s - each.scheduled_s,
}


def is_good(outcome: Outcome, targets: Targets) -> bool:
    """Whether it was answered in full and met every target."""
    if outcome.result != "ok":
        return False
    first_s = outcome.end_s if outcome.first_token_s is None else outcome.first_token_s
    gap_s = itl_s(outcome)
    return not (
        _misses(first_s - outcome.scheduled_s, targets.ttft_s)
        or _misses(gap_s, targets.itl_s)
        or _misses(outcome.end_s - outcome.scheduled_s, targets.e2e_s)
    )


def _misses(value: float | None, target: float | None) -> bool:
    return value is not None and target is not None and value > target


def was_awaited(outcome: Outcome) -> bool:
    """Whether its latency is known or endless: of what the client left on purpose it is neither."""
    return outcome.result != "disconnected"


# Many


def duration_of(outcomes: Sequence[Outcome]) -> float:
    """From the first request sent to the last byte of all; 0 for none."""
    if not outcomes:
        return 0.0
    return max(each.end_s for each in outcomes) - min(each.sent_s for each in outcomes)


@dataclass(frozen=True, slots=True)
class Values:
    """Values of requests, and to which request (by place in the group) each belongs."""

    values: Floats
    owners: NDArray[np.intp]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], value_of: Callable[[Outcome], float | None]) -> Values:
        pairs = [
            (value, place)
            for place, each in enumerate(outcomes)
            if each.result == "ok" and (value := value_of(each)) is not None
        ]
        return cls(
            np.array([value for value, _ in pairs], dtype=np.float64),
            np.array([place for _, place in pairs], dtype=np.intp),
        )

    @classmethod
    def gaps(cls, outcomes: Sequence[Outcome]) -> Values:
        """Every gap between two chunks of one request."""
        pieces = [
            (np.diff(np.array(each.chunk_times)), place)
            for place, each in enumerate(outcomes)
            if each.result == "ok" and len(each.chunk_times) > 1
        ]
        if not pieces:
            return cls(np.zeros(0), np.zeros(0, dtype=np.intp))
        return cls(
            np.concatenate([gaps for gaps, _ in pieces]),
            np.concatenate([np.full(len(gaps), place, dtype=np.intp) for gaps, place in pieces]),
        )

    def repeated(self, times: NDArray[np.intp]) -> Values:
        """Each value as often as `times` says for its request."""
        each = times[self.owners]
        return Values(np.repeat(self.values, each), np.repeat(self.owners, each))


def group_values(outcomes: Sequence[Outcome], key: str) -> Values:
    """A latency of `definitions.LATENCIES` of every request that was answered in full."""
    if key == "icl_s":
        return Values.gaps(outcomes)
    if key == "itl_by_token_s":
        times = [max(0, num_output_tokens(each) - 1) for each in outcomes]
        return group_values(outcomes, "itl_s").repeated(np.array(times, dtype=np.intp))
    return Values.of(outcomes, _PER_REQUEST[key])


def _group(
    outcomes: Sequence[Outcome], slo: Slo, duration_s: float, bootstrap: Bootstrap
) -> dict[str, Any]:
    resamples = _resamples(outcomes, bootstrap)
    counts = Counter(each.result for each in outcomes)
    values = {each.key: group_values(outcomes, each.key) for each in LATENCIES}
    offered = np.ones(len(outcomes))
    awaited = int(_marks(outcomes, was_awaited).sum())
    good = _marks(outcomes, lambda each: is_good(each, targets_of(slo, each.tier)))
    ok = [each for each in outcomes if each.result == "ok"]
    tokens_in = sum(_num_input_tokens(each) for each in ok)
    tokens_out = sum(num_output_tokens(each) for each in ok)
    good_tokens = sum(
        num_output_tokens(each) for each, met in zip(outcomes, good, strict=True) if met
    )
    latency: dict[str, Any] = {}
    for each in LATENCIES:
        latency[each.key] = _figures(values[each.key], resamples)
    for key in ("ttft_scheduled_s", "e2e_scheduled_s"):
        missing = awaited - len(values[key].values)
        if latency[key] is not None:
            latency[key]["over_offered"] = _over_offered(values[key].values, missing)
    reported = _marks(
        outcomes,
        lambda each: (
            each.result == "ok" and each.cached_tokens is not None and each.input_tokens is not None
        ),
    )
    return {
        "requests": {
            "offered": len(outcomes),
            **{result: counts.get(result, 0) for result in RESULTS},
            "retries": sum(each.retries for each in outcomes),
        },
        "block_length": round(resamples.length, 2),
        "latency": latency,
        "goodput": {
            **_share(good, offered, resamples),
            "requests_per_s": _rate(float(good.sum()), duration_s),
            "output_tokens_per_s": _rate(good_tokens, duration_s),
            "by_multiple": goodput_by_multiple(outcomes, slo),
        },
        "shed_share": _share(_marks(outcomes, lambda e: e.result == "shed"), offered, resamples),
        "failed_share": _share(
            _marks(outcomes, lambda e: e.result in ("error", "timeout")), offered, resamples
        ),
        "cached_share": _share(
            reported * np.array([float(each.cached_tokens or 0) for each in outcomes]),
            reported * np.array([float(each.input_tokens or 0) for each in outcomes]),
            resamples,
        ),
        "predicted_cached_share": _share(
            reported * np.array([float(each.predicted_cached_tokens) for each in outcomes]),
            reported * np.array([float(each.planned_input_tokens) for each in outcomes]),
            resamples,
        ),
        "requests_per_s": _rate(len(ok), duration_s),
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "good_output_tokens": good_tokens,
        "input_tokens_per_s": _rate(tokens_in, duration_s),
        "output_tokens_per_s": _rate(tokens_out, duration_s),
        "phases": _phases(outcomes),
    }


def _by(
    outcomes: Sequence[Outcome],
    field: str,
    slo: Slo,
    duration_s: float,
    bootstrap: Bootstrap,
    whole: dict[str, Any],
) -> dict[str, Any]:
    names = Counter(getattr(each, field) for each in outcomes)
    if len(names) == 1:
        return {next(iter(names)): whole}
    kept = {name for name, _ in names.most_common(MAX_GROUPS)}
    members: dict[str, list[Outcome]] = {}
    for each in outcomes:
        name = getattr(each, field)
        members.setdefault(name if name in kept else OTHER_GROUP, []).append(each)
    return {
        name: _group(members[name], slo, duration_s, bootstrap)
        for name in sorted(members, key=lambda name: (name == OTHER_GROUP, name))
    }


def _resamples(outcomes: Sequence[Outcome], bootstrap: Bootstrap) -> Resamples:
    lengths = [block_length(group_values(outcomes, key).values) for key in ("ttft_s", "e2e_s")]
    return Resamples(
        len(outcomes),
        length=max(lengths),
        num_resamples=bootstrap.num_resamples,
        seed=bootstrap.seed,
        level=bootstrap.level,
    )


def _figures(values: Values, resamples: Resamples) -> dict[str, Any] | None:
    figures = _distribution(values.values)
    if figures is None:
        return None
    intervals = resamples.quantiles(
        values.values, values.owners, PERCENTS, max_additions=_MAX_ADDITIONS
    )
    for percent, interval in zip(PERCENTS, intervals, strict=True):
        figures[percent_key(percent)].update(_interval(interval))
    figures["mean"].update(_interval(resamples.mean(values.values, values.owners)))
    return figures


def percent_key(percent: float) -> str:
    """`p50`, `p99.9`."""
    return f"p{percent:g}"


def _distribution(values: Floats) -> dict[str, Any] | None:
    """Count, mean, percentiles and largest; None of nothing."""
    if not len(values):
        return None
    ordered = np.sort(values)
    out: dict[str, Any] = {"count": len(ordered), "mean": {"value": float(ordered.mean())}}
    for percent in PERCENTS:
        rank = nearest_rank(len(ordered), percent)
        # A tail of one value is not a tail: readers must see that it is only the largest.
        is_max = rank == len(ordered) - 1
        out[percent_key(percent)] = {"value": float(ordered[rank]), "is_max": is_max}
    return {**out, "max": float(ordered[-1])}


def _over_offered(values: Floats, num_missing: int) -> dict[str, float | None]:
    ordered = np.sort(values)
    total = len(ordered) + max(0, num_missing)
    ranks = {percent: nearest_rank(total, percent) for percent in PERCENTS}
    return {
        percent_key(percent): float(ordered[rank]) if rank < len(ordered) else None
        for percent, rank in ranks.items()
    }


def _share(above: Floats, below: Floats, resamples: Resamples) -> dict[str, Any]:
    """A sum over requests divided by another, and its interval; None of nothing."""
    whole = float(below.sum())
    if whole == 0:
        return {"value": None, "low": None, "high": None}
    interval = resamples.ratio(above, below)
    return {"value": float(above.sum()) / whole, **_interval(interval)}


def _interval(interval: Interval | None) -> dict[str, float | None]:
    if interval is None:
        return {"low": None, "high": None}
    return {"low": interval.low, "high": interval.high}


def _marks(outcomes: Sequence[Outcome], holds: Callable[[Outcome], bool]) -> Floats:
    return np.array([float(holds(each)) for each in outcomes], dtype=np.float64)


def _num_input_tokens(outcome: Outcome) -> int:
    return outcome.planned_input_tokens if outcome.input_tokens is None else outcome.input_tokens


def _rate(amount: float, duration_s: float) -> float | None:
    return amount / duration_s if duration_s > 0 else None


def goodput_by_multiple(outcomes: Sequence[Outcome], slo: Slo) -> list[dict[str, float]]:
    """Goodput, had every target been so many times what it is."""
    judged = [(each, targets_of(slo, each.tier)) for each in outcomes]
    if not judged:
        return []
    return [
        {
            "multiple": multiple,
            "share": sum(is_good(each, targets.times(multiple)) for each, targets in judged)
            / len(judged),
        }
        for multiple in SLO_MULTIPLES
    ]


def _phases(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """By phase, in the order in which requests pass them."""
    told: dict[str, list[float]] = {}
    for each in outcomes:
        if each.result == "ok":
            for name, seconds in each.phases.items():
                told.setdefault(name, []).append(seconds)
    return {name: _distribution(np.array(values)) for name, values in told.items()}


def _errors(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """What went wrong, the most frequent first, each with one message as an example."""
    seen: dict[tuple[str, int | None, str | None], list[Outcome]] = {}
    for each in outcomes:
        if each.result in ("shed", "error", "timeout"):
            seen.setdefault((each.result, each.status, each.code), []).append(each)
    return [
        {
            "result": result,
            "status": status,
            "code": code,
            "count": len(those),
            "example": next((each.message for each in those if each.message), None),
        }
        for (result, status, code), those in sorted(seen.items(), key=lambda item: -len(item[1]))
    ]


def _client(run: Run, duration_s: float) -> dict[str, Any]:
    end = run.end
    if end is None:
        return {"cpu_s": None, "processes": None, "cpu_share": None}
    spent = _rate(end.client_cpu_s, end.duration_s or duration_s)
    return {"cpu_s": end.client_cpu_s, "processes": end.client_processes, "cpu_share": spent}


def _cost(prices: PriceTable, whole: dict[str, Any], duration_s: float) -> dict[str, Any]:
    spent = prices.per_hour * duration_s / 3600
    num_in, num_out = whole["input_tokens"], whole["output_tokens"]

    def per_million(tokens: float) -> float | None:
        return 1e6 * spent / tokens if tokens else None

    return {
        "prices": prices.to_json(),
        "currency": prices.currency,
        "spent": spent,
        "per_million_tokens": per_million(num_in + num_out),
        "per_million_output_tokens": per_million(num_out),
        "per_million_good_output_tokens": per_million(whole["good_output_tokens"]),
    }


def _names(outcomes: Sequence[Outcome], field: str) -> list[str]:
    return sorted({getattr(each, field) for each in outcomes})
