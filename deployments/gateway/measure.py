"""What the gateway reports about its requests, in one place: names, labels, when.

Aggregated per drain of a stream, never per token. Time per output token is that of `vllm bench`,
(duration - ttft) / (tokens - 1). Inter-token latency is the gap between two writes, spread over the
tokens of the second and counted once for each of them: the histogram's sum over its count is time
over tokens, as load generators mean it, however tokens were gathered into writes. What a request is
judged by is said in `engine.metrics` and decided in `slo`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from deployments.gateway.slo import Ending, Timing, verdicts
from deployments.gateway.tiers import DEFAULT_TIER, Targets
from deployments.link.messages import StreamEvent, Usage
from deployments.metrics import Counter, Gauge, Histogram, Registry
from engine.metrics import SLO_KINDS

OFFERED = "tailrace_requests_offered_total"
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
QUEUE = "tailrace_queue_duration_seconds"
FINISHES = "tailrace_request_finishes_total"
TOKENS_IN = "tailrace_input_tokens_total"
TOKENS_OUT = "tailrace_output_tokens_total"
JUDGED = "tailrace_slo_requests_total"
GOOD_REQUESTS = "tailrace_goodput_requests_total"
GOOD_TOKENS = "tailrace_goodput_tokens_total"

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
        self._queue: dict[str, Histogram] = {}
        self._finishes: dict[str, Counter] = {}

    @cached_property
    def offered(self) -> Counter:
        return self._counter(OFFERED)

    @cached_property
    def tokens_in(self) -> Counter:
        return self._counter(TOKENS_IN)

    @cached_property
    def tokens_out(self) -> Counter:
        return self._counter(TOKENS_OUT)

    @cached_property
    def good_requests(self) -> Counter:
        return self._counter(GOOD_REQUESTS)

    @cached_property
    def good_tokens(self) -> Counter:
        return self._counter(GOOD_TOKENS)

    @cached_property
    def judged(self) -> dict[tuple[str, bool], Counter]:
        """By kind of target and verdict. All of them from the first one on: a share needs both."""
        return {
            (kind, met): self._counter(JUDGED, slo=kind, met="true" if met else "false")
            for kind in SLO_KINDS
            for met in (True, False)
        }

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
            found = self._requests[code] = self._counter(REQUESTS, code=code)
        return found

    def finishes(self, reason: str) -> Counter:
        found = self._finishes.get(reason)
        if found is None:
            found = self._finishes[reason] = self._counter(FINISHES, reason=reason)
        return found

    def queue(self, outcome: str) -> Histogram:
        found = self._queue.get(outcome)
        if found is None:
            found = self._queue[outcome] = self._histogram(QUEUE, outcome=outcome)
        return found

    def phase(self, phase: str) -> Histogram:
        found = self._phases.get(phase)
        if found is None:
            found = self._phases[phase] = self._histogram(PHASE, phase=phase)
        return found

    def disconnects(self, phase: str) -> Counter:
        return self._registry.counter(DISCONNECTS, model=self._model, phase=phase)

    def _counter(self, name: str, **labels: str) -> Counter:
        return self._registry.counter(name, model=self._model, tier=self._tier, **labels)

    def _histogram(self, name: str, **labels: str) -> Histogram:
        return self._registry.histogram(name, model=self._model, tier=self._tier, **labels)


class RequestMeter:
    """The series of all models and tiers."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._series: dict[tuple[str, str], Series] = {}

    def of(self, model: str, tier: str = DEFAULT_TIER) -> Series:
        found = self._series.get((model, tier))
        if found is None:
            found = self._series[model, tier] = Series(self._registry, model, tier)
        return found


def mean_gap_s(
    duration_s: float, ttft_s: float | None, tokens: int, num_choices: int
) -> float | None:
    """Time per output token; None where no choice has two tokens."""
    steps = tokens / num_choices - 1
    return None if ttft_s is None or steps <= 0 else (duration_s - ttft_s) / steps


def report_finish(series: Series, usage: Usage, gap_s: float | None) -> None:
    """A request was answered whole."""
    series.input_tokens.observe(usage.prompt_tokens)
    series.output_tokens.observe(usage.completion_tokens)
    series.cached_tokens.observe(usage.cached_tokens)
    if gap_s is not None:
        series.tpot.observe(gap_s)


def report_end(
    series: Series, status: str, duration_s: float, phases: Sequence[tuple[str, float]]
) -> None:
    """A request is over. `status` is HTTP's, or that of a failure after 200 was sent; `phases` the
    seconds spent in each, which add up to the duration."""
    series.requests(status).inc()
    series.duration.observe(duration_s)
    for phase, seconds in phases:
        series.phase(phase).observe(seconds)


def report_verdict(
    series: Series, targets: Targets | None, status: int, timing: Timing, tokens: int
) -> None:
    """Whether a request that is over met the targets of its tier; `tokens` is its output."""
    if targets is None:
        return
    ending = ending_of(status)
    judged, found = series.judged, verdicts(targets, ending, timing)
    for kind, met in found.items():
        judged[kind, met].inc()
    good = ending is Ending.ANSWERED and all(found.values())
    # Also when it was not: from its first request on a tier has a goodput, if only of 0.
    series.good_requests.inc(good)
    series.good_tokens.inc(tokens if good else 0)


def ending_of(status: int) -> Ending:
    """How a request ended, by the status of its answer."""
    if status < 400:
        return Ending.ANSWERED
    if status == 499:
        return Ending.LEFT
    return Ending.FAILED if status in (408, 429) or status >= 500 else Ending.REFUSED


class Pace:
    """Inter-token latency of one request's streams, taken once a write."""

    def __init__(self, itl: Histogram | None) -> None:
        """None: nothing is measured."""
        self._itl = itl
        self._last_s: dict[int, float] = {}
        self._held: dict[int, int] = {}

    def hold(self, prompt: int, events: Sequence[StreamEvent]) -> None:
        """Tokens without text yet: they go out with the next write."""
        if self._itl is None:
            return
        self._held[prompt] = self._held.get(prompt, 0) + _steps(events)

    def count(self, prompt: int, events: Sequence[StreamEvent], now_s: float) -> None:
        """A write that ended at `now_s`."""
        if self._itl is None:
            return
        steps = _steps(events)
        if self._held:
            steps += self._held.pop(prompt, 0)
        if steps:
            last_s = self._last_s.get(prompt)
            self._last_s[prompt] = now_s
            if last_s is not None:
                self._itl.observe((now_s - last_s) / steps, steps)


def _steps(events: Sequence[StreamEvent]) -> int:
    """Tokens of the choice that moved most: choices run side by side."""
    if len(events) == 1:
        return len(events[0].token_ids)
    tokens: dict[int, int] = {}
    for event in events:
        tokens[event.choice] = tokens.get(event.choice, 0) + len(event.token_ids)
    return max(tokens.values(), default=0)
