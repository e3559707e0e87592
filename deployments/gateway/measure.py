"""What the gateway reports about its requests, in one place: names, labels, when.

Aggregated per drain of a stream, never per token. Time per output token is that of `vllm bench`,
(duration - ttft) / (tokens - 1). Inter-token latency is the gap between two writes, spread over the
tokens of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from deployments.gateway.prepare import TIER
from deployments.link.messages import StreamEvent, Usage
from deployments.metrics import Counter, Gauge, Histogram, Registry

REQUESTS = "tailrace_requests_total"
DURATION = "tailrace_request_duration_seconds"
TTFT = "tailrace_request_ttft_seconds"
ITL = "tailrace_request_itl_seconds"
TPOT = "tailrace_request_tpot_seconds"
INPUT_TOKENS = "tailrace_request_input_tokens"
OUTPUT_TOKENS = "tailrace_request_output_tokens"
CACHED_TOKENS = "tailrace_request_cached_tokens"
PHASE = "tailrace_request_phase_seconds"
INFLIGHT = "tailrace_requests_inflight"
DISCONNECTS = "tailrace_client_disconnects_total"

UNKNOWN = "unknown"
"""Model of a request that was not understood, or asks for none of ours: clients' own inventions
must not become label values."""


class Series:
    """The series of one model and tier. Each is looked up once, when it is first needed."""

    def __init__(self, registry: Registry, model: str, tier: str) -> None:
        self._registry = registry
        self._model = model
        self._tier = tier
        self._ttft: dict[bool, Histogram] = {}
        self._requests: dict[str, Counter] = {}
        self._phases: dict[str, Histogram] = {}

    @cached_property
    def inflight(self) -> Gauge:
        return self._registry.gauge(INFLIGHT, model=self._model)

    @cached_property
    def itl(self) -> Histogram:
        return self._histogram(ITL)

    @cached_property
    def tpot(self) -> Histogram:
        return self._histogram(TPOT)

    @cached_property
    def duration(self) -> Histogram:
        return self._histogram(DURATION)

    @cached_property
    def input_tokens(self) -> Histogram:
        return self._histogram(INPUT_TOKENS)

    @cached_property
    def output_tokens(self) -> Histogram:
        return self._histogram(OUTPUT_TOKENS)

    @cached_property
    def cached_tokens(self) -> Histogram:
        return self._histogram(CACHED_TOKENS)

    def ttft(self, streaming: bool) -> Histogram:
        found = self._ttft.get(streaming)
        if found is None:
            found = self._histogram(TTFT, streaming="true" if streaming else "false")
            self._ttft[streaming] = found
        return found

    def requests(self, code: str) -> Counter:
        found = self._requests.get(code)
        if found is None:
            found = self._registry.counter(REQUESTS, model=self._model, tier=self._tier, code=code)
            self._requests[code] = found
        return found

    def phase(self, phase: str) -> Histogram:
        found = self._phases.get(phase)
        if found is None:
            found = self._phases[phase] = self._histogram(PHASE, phase=phase)
        return found

    def disconnects(self, phase: str) -> Counter:
        return self._registry.counter(DISCONNECTS, model=self._model, phase=phase)

    def _histogram(self, name: str, **labels: str) -> Histogram:
        return self._registry.histogram(name, model=self._model, tier=self._tier, **labels)


class RequestMeter:
    """The series of all models and tiers."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._series: dict[tuple[str, str], Series] = {}

    def of(self, model: str, tier: str = TIER) -> Series:
        found = self._series.get((model, tier))
        if found is None:
            found = self._series[model, tier] = Series(self._registry, model, tier)
        return found


def report_finish(
    series: Series, duration_s: float, ttft_s: float | None, usage: Usage, num_choices: int
) -> None:
    """A request was answered whole."""
    series.input_tokens.observe(usage.prompt_tokens)
    series.output_tokens.observe(usage.completion_tokens)
    series.cached_tokens.observe(usage.cached_tokens)
    tokens = usage.completion_tokens / num_choices
    if ttft_s is not None and tokens > 1:
        series.tpot.observe((duration_s - ttft_s) / (tokens - 1))


def report_end(
    series: Series, code: str, duration_s: float, phases: Sequence[tuple[str, float]]
) -> None:
    """A request is over. `code` is the HTTP status, or that of a failure after 200 was sent;
    `phases` the seconds spent in each, which add up to the duration."""
    series.requests(code).inc()
    series.duration.observe(duration_s)
    for phase, seconds in phases:
        series.phase(phase).observe(seconds)


class Pace:
    """Inter-token latency of one request's streams, one observation a write."""

    def __init__(self, itl: Histogram) -> None:
        self._itl = itl
        self._last_s: dict[int, float] = {}

    def count(self, prompt: int, events: Sequence[StreamEvent], now_s: float) -> None:
        if len(events) == 1:
            steps = len(events[0].token_ids)
        else:
            # Choices run side by side: the step count is that of the one that moved most.
            tokens: dict[int, int] = {}
            for event in events:
                tokens[event.choice] = tokens.get(event.choice, 0) + len(event.token_ids)
            steps = max(tokens.values(), default=0)
        if steps:
            last_s = self._last_s.get(prompt)
            self._last_s[prompt] = now_s
            if last_s is not None:
                self._itl.observe((now_s - last_s) / steps)
