"""What the page shows: the last minute of the gateway's metrics, as one JSON value.

Rates and quantiles come from the difference between the series now and a checkpoint of about a
minute ago. Requests are those of this gateway; queue and replicas are those of the whole cluster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from deployments.gpu.reading import HARMLESS_REASONS
from deployments.metrics import Registry
from engine.metrics import PHASES, SLO_KINDS

WINDOW_S = 60.0
CHECKPOINT_EVERY_S = 5.0
FRESH_S = 1.0
"""A body this young is sent again: a hundred viewers cost what one costs."""

QUANTILES = (0.5, 0.95, 0.99)

_REQUESTS = "tailrace_requests_total"
_TTFT = "tailrace_request_ttft_seconds"
_ITL = "tailrace_request_itl_seconds"
_E2E = "tailrace_request_duration_seconds"
_PHASE = "tailrace_request_phase_seconds"
_SLO = "tailrace_slo_requests_total"
_GOOD = "tailrace_goodput_requests_total"
_QUEUE_WAIT = "tailrace_queue_duration_seconds"
_GRANTS = "tailrace_queue_grants_total"
_REFUSALS = "tailrace_queue_refusals_total"
_STEP_TOKENS = "vllm:iteration_tokens_total"
_GENERATED = "vllm:generation_tokens_total"
_STEPS = "tailrace_engine_step_seconds"

_CHECKED = (
    *(_REQUESTS, _TTFT, _ITL, _E2E, _PHASE, _SLO, _GOOD, _QUEUE_WAIT, _GRANTS, _REFUSALS),
    *(_STEP_TOKENS, _GENERATED, _STEPS),
)
"""The families of which a difference is shown."""

_Key = tuple[str, str | None, tuple[str, ...]]
_Value = float | list[float]
_Row = tuple[str | None, dict[str, str], _Value]


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    at_s: float
    values: dict[_Key, _Value]


class LiveView:
    """One gateway's view. Times are of one steady clock, `at` in answers of the wall clock."""

    def __init__(self, registry: Registry, wall_clock: Callable[[], float]) -> None:
        self._registry = registry
        self._wall_clock = wall_clock
        self._checkpoints: deque[_Checkpoint] = deque()
        self._body = b""
        self._body_at_s = float("-inf")

    def checkpoint(self, now: float) -> None:
        """Remember the series as they are, if the last time is long enough ago. Call at least every
        few seconds: who looks first sees a minute, too."""
        points = self._checkpoints
        if points and now - points[-1].at_s < CHECKPOINT_EVERY_S:
            return
        points.append(_Checkpoint(now, self._take()))
        while len(points) > 1 and now - points[1].at_s >= WINDOW_S:
            points.popleft()

    def body(self, now: float, build: Callable[[dict[str, Any]], dict[str, Any]]) -> bytes:
        """`build` of the snapshot as JSON, made at most once a second."""
        if now - self._body_at_s >= FRESH_S:
            self._body = orjson.dumps(build(self.snapshot(now)))
            self._body_at_s = now
        return self._body

    def snapshot(self, now: float) -> dict[str, Any]:
        """Everything the page shows of metrics. Seconds, bytes and shares, never text to display;
        null is not known."""
        self.checkpoint(now)
        oldest = self._checkpoints[0]
        window = _Window(self._registry, oldest, now)
        return {
            "at": self._wall_clock(),
            "gateway": self._registry.replica,
            "window_s": round(window.seconds, 1),
            "revision": window.gauge("tailrace_config_revision"),
            "version": window.label("tailrace_build_info", "version", role="gateway"),
            "totals": _totals(window),
            "tiers": _tiers(window),
            "queues": _queues(window),
            "pools": _pools(window),
        }

    def _take(self) -> dict[_Key, _Value]:
        taken: dict[_Key, _Value] = {}
        for name in _CHECKED:
            for replica, labels, value in self._registry.family(name):
                taken[name, replica, tuple(labels.values())] = value
        return taken


class _Window:
    """Series now, and their growth since a checkpoint. `replica` None means all processes."""

    def __init__(self, registry: Registry, since: _Checkpoint, now: float) -> None:
        self._registry = registry
        self._since = since.values
        self._families: dict[str, dict[str | None, list[_Row]]] = {}
        self.seconds = now - since.at_s

    def rows(self, name: str, *, replica: str | None = None, **labels: str) -> Iterator[_Row]:
        """Series of a family with these labels."""
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = {}
            for row in self._registry.family(name):
                family.setdefault(row[0], []).append(row)
        chosen = family.values() if replica is None else (family.get(replica, ()),)
        for rows in chosen:
            for row in rows:
                if labels.items() <= row[1].items():
                    yield row

    def gauge(self, name: str, *, replica: str | None = None, **labels: str) -> float | None:
        """The sum of what matches; None where nothing does."""
        found = self._numbers(name, replica, labels)
        return sum(found) if found else None

    def highest(self, name: str, *, replica: str | None = None, **labels: str) -> float | None:
        """The highest of what matches; None where nothing does."""
        return max(self._numbers(name, replica, labels), default=None)

    def _numbers(self, name: str, replica: str | None, labels: dict[str, str]) -> list[float]:
        rows = self.rows(name, replica=replica, **labels)
        return [value for _, _, value in rows if not isinstance(value, list)]

    def label(
        self, name: str, label: str, *, replica: str | None = None, **labels: str
    ) -> str | None:
        return next((has[label] for _, has, _ in self.rows(name, replica=replica, **labels)), None)

    def growth(self, name: str, *, replica: str | None = None, **labels: str) -> list[float] | None:
        """By how much the matching series grew together: `[sum, *bucket counts]` of histograms,
        `[value]` of counters. None where nothing matches."""
        total: list[float] | None = None
        for owner, has, value in self.rows(name, replica=replica, **labels):
            now = value if isinstance(value, list) else [value]
            then = self._since.get((name, owner, tuple(has.values())), 0.0)
            before = then if isinstance(then, list) else [then] * len(now)
            if len(before) != len(now) or any(b > n for b, n in zip(before, now, strict=True)):
                before = [0.0] * len(now)  # the process began anew, and so did its counts
            grown = [n - b for n, b in zip(now, before, strict=True)]
            total = grown if total is None else [a + b for a, b in zip(total, grown, strict=True)]
        return total

    def count(self, name: str, *, replica: str | None = None, **labels: str) -> float | None:
        """Growth of counters, observations of histograms."""
        grown = self.growth(name, replica=replica, **labels)
        return None if grown is None else sum(grown[1:]) if len(grown) > 1 else grown[0]

    def rate(self, name: str, *, replica: str | None = None, **labels: str) -> float | None:
        """Growth of counters a second."""
        grown = self.count(name, replica=replica, **labels)
        return self.per_second(grown)

    def per_second(self, amount: float | None) -> float | None:
        if amount is None or self.seconds <= 0:
            return None
        return _rounded(amount / self.seconds)

    def spread(self, name: str, **labels: str) -> dict[str, Any] | None:
        """Mean and quantiles of what was observed. None where nothing was."""
        grown = self.growth(name, **labels)
        if grown is None or sum(grown[1:]) <= 0:
            return None
        total, *counts = grown
        number = sum(counts)
        bounds = self._registry.catalogue[name].buckets
        found: dict[str, Any] = {"count": int(number), "mean": _rounded(total / number)}
        for q in QUANTILES:
            found[f"p{q * 100:g}"] = _rounded(quantile(bounds, counts, q))
        # Above the last bound nothing more is known than that.
        found["beyond"] = [f"p{q * 100:g}" for q in QUANTILES if _is_beyond(counts, q)]
        return found

    def values_of(self, name: str, *keys: str) -> list[tuple[str, ...]]:
        """Combinations of label values that there are, sorted."""
        return sorted({tuple(has[key] for key in keys) for _, has, _ in self.rows(name)})


def quantile(bounds: tuple[float, ...], counts: list[float], q: float) -> float:
    """As Prometheus' `histogram_quantile`: linear inside a bucket, the last bound above it.

    bounds: of the buckets without the infinite one, which `counts` has; counts: of each by itself.
    """
    rank = q * sum(counts)
    seen = 0.0
    for i, count in enumerate(counts):
        if seen + count >= rank and count > 0:
            if i == len(bounds):
                break
            low = bounds[i - 1] if i else 0.0
            return low + (bounds[i] - low) * (rank - seen) / count
        seen += count
    return bounds[-1]


def _is_beyond(counts: list[float], q: float) -> bool:
    return sum(counts[:-1]) < q * sum(counts)


def _totals(window: _Window) -> dict[str, Any]:
    failures = sum(
        window.count(_REQUESTS, code=code) or 0.0
        for (code,) in window.values_of(_REQUESTS, "code")
        if code.startswith("5") or code == "429"
    )
    return {
        "requests_per_s": window.rate(_REQUESTS),
        "output_tokens_per_s": window.rate(_GENERATED),
        "inflight": window.gauge("tailrace_requests_inflight"),
        "failed_per_s": window.per_second(failures),
        "left_per_s": window.rate(_REQUESTS, code="499"),
        "ttft": window.spread(_TTFT),
        "attainment": _attainment(window, {}),
    }


def _tiers(window: _Window) -> list[dict[str, Any]]:
    """`good_ratio` is goodput: of all that ended, whatever became of it, as each request that was
    offered does once."""
    found: list[dict[str, Any]] = []
    for model, tier in window.values_of(_REQUESTS, "model", "tier"):
        of = {"model": model, "tier": tier}
        requests = window.count(_REQUESTS, **of)
        good = window.count(_GOOD, **of)
        spent = {
            phase: window.growth(_PHASE, phase=phase, **of) for phase in PHASES
        }  # [seconds, *counts]
        total_s = sum(grown[0] for grown in spent.values() if grown)
        found.append(
            {
                **of,
                "requests": requests,
                "requests_per_s": window.per_second(requests),
                "good_ratio": None if good is None or not requests else _rounded(good / requests),
                "ttft": window.spread(_TTFT, **of),
                "itl": window.spread(_ITL, **of),
                "e2e": window.spread(_E2E, **of),
                "targets": {
                    kind: window.gauge("tailrace_slo_target_seconds", tier=tier, slo=kind)
                    for kind in SLO_KINDS
                },
                "attainment": _attainment(window, of),
                "objective": window.gauge("tailrace_slo_objective_ratio", tier=tier),
                "phases": {
                    phase: _rounded(grown[0] / total_s)
                    for phase, grown in spent.items()
                    if grown and grown[0] > 0
                },
            }
        )
    return found


def _attainment(window: _Window, of: Mapping[str, str]) -> dict[str, Any]:
    """By kind of target: verdicts in the window and the share that met it."""
    found: dict[str, Any] = {}
    for kind in SLO_KINDS:
        met = window.count(_SLO, slo=kind, met="true", **of)
        missed = window.count(_SLO, slo=kind, met="false", **of)
        if met is None and missed is None:
            continue
        judged = (met or 0.0) + (missed or 0.0)
        found[kind] = {
            "judged": int(judged),
            "ratio": _rounded((met or 0.0) / judged) if judged else None,
        }
    return found


def _queues(window: _Window) -> list[dict[str, Any]]:
    models = {m for (m,) in window.values_of("tailrace_queue_size", "model")}
    models |= {m for (m,) in window.values_of("tailrace_queue_connected", "model")}
    return [
        {
            "model": model,
            "connected": window.gauge("tailrace_queue_connected", model=model),
            "waiting": window.gauge("tailrace_queue_size", model=model),
            "tokens": window.gauge("tailrace_queue_tokens", model=model),
            "oldest_age_s": window.highest("tailrace_queue_oldest_age_seconds", model=model),
            "slots": window.gauge("tailrace_queue_slots", model=model),
            "free_slots": window.gauge("tailrace_queue_free_slots", model=model),
            "granted_per_s": window.rate(_GRANTS, model=model),
            "refused_per_s": window.rate(_REFUSALS, model=model),
            "wait": window.spread(_QUEUE_WAIT, model=model),
        }
        for model in sorted(models)
    ]


def _pools(window: _Window) -> list[dict[str, Any]]:
    pools: dict[tuple[str, str], dict[str, Any]] = {}
    for model, role in window.values_of("tailrace_replicas_up", "model", "role"):
        if role != "queue":
            pools[model, role] = _pool(window, model, role)
    roles = {
        owner: has["role"]
        for owner, has, _ in window.rows("tailrace_build_info")
        if owner is not None
    }
    models = {
        owner: has["model_name"]
        for owner, has, _ in window.rows("vllm:num_requests_running")
        if owner in roles
    }
    for replica in sorted(models.keys() & roles.keys()):
        model, role = models[replica], roles[replica]
        pool = pools.setdefault((model, role), _pool(window, model, role))
        pool["replicas"].append(_replica(window, replica, role))
    return [pools[key] for key in sorted(pools)]


def _pool(window: _Window, model: str, role: str) -> dict[str, Any]:
    of = {"model": model, "role": role}
    return {
        **of,
        "up": window.gauge("tailrace_replicas_up", **of),
        "stale": window.gauge("tailrace_stale_endpoints", **of),
        "replicas": [],
    }


def _replica(window: _Window, replica: str, role: str) -> dict[str, Any]:
    # A prefill replica generates nothing: what it does is tokens through its steps.
    computed = window.growth(_STEP_TOKENS, replica=replica)
    usage = window.gauge("vllm:kv_cache_usage_perc", replica=replica)
    return {
        "id": replica,
        "running": window.gauge("vllm:num_requests_running", replica=replica),
        "waiting": window.gauge("vllm:num_requests_waiting", replica=replica),
        "kv_usage": None if usage is None else _rounded(usage),
        "tokens_per_s": (
            window.rate(_GENERATED, replica=replica)
            if role == "decode"
            else window.per_second(computed[0] if computed else None)
        ),
        "step": window.spread(_STEPS, replica=replica),
        "memory_bytes": window.gauge("tailrace_process_resident_memory_bytes", replica=replica),
        "gpus": _gpus(window, replica),
    }


def _gpus(window: _Window, replica: str) -> list[dict[str, Any]]:
    found = [
        _gpu(window, {"replica": replica, "gpu": has["gpu"], "uuid": has["uuid"]}, up == 1)
        for _, has, up in window.rows("tailrace_gpu_up", replica=replica)
    ]
    return sorted(found, key=lambda device: device["gpu"])


def _gpu(window: _Window, of: dict[str, str], up: bool) -> dict[str, Any]:
    throttled = window.rows("tailrace_gpu_throttled", **of)
    return {
        "gpu": of["gpu"],
        "uuid": of["uuid"],
        "product": window.label("tailrace_gpu_info", "product", **of),
        "up": up,
        "busy": window.gauge("tailrace_gpu_utilization_ratio", part="compute", **of),
        "memory_used_bytes": window.gauge("tailrace_gpu_memory_used_bytes", **of),
        "memory_total_bytes": window.gauge("tailrace_gpu_memory_total_bytes", **of),
        "power_w": window.gauge("tailrace_gpu_power_watts", **of),
        "power_limit_w": window.gauge("tailrace_gpu_power_limit_watts", **of),
        "temperature_c": window.gauge("tailrace_gpu_temperature_celsius", **of),
        "throttled": sorted(
            has["reason"]
            for _, has, holds in throttled
            if holds == 1 and has["reason"] not in HARMLESS_REASONS
        ),
    }


def _rounded(value: float) -> float:
    """Six digits: what a person reads, and half the bytes."""
    return float(f"{value:.6g}")
