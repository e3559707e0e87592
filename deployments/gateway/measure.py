"""What the gateway reports about its requests, in one place: names, labels, when.

Aggregated per drain of a stream, never per token. Time per output token is that of `vllm bench`,
(duration - ttft) / (tokens - 1). Inter-token latency is the gap between two writes, spread over the
tokens of the second.
"""

from __future__ import annotations

from collections.abc import Sequence

from deployments.gateway.prepare import TIER
from deployments.link.messages import StreamEvent, Usage
from deployments.metrics import Histogram, Registry

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


class RequestMeter:
    """Reports one request."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.model = "unknown"
        """A served model's name: clients' own inventions must not become label values."""

    def _histogram(self, name: str, **labels: str) -> Histogram:
        return self._registry.histogram(name, model=self.model, tier=TIER, **labels)

    def inflight(self, count: int) -> None:
        self._registry.gauge(INFLIGHT, model=self.model).set(count)

    def first_token(self, ttft_s: float, streaming: bool) -> None:
        self._histogram(TTFT, streaming="true" if streaming else "false").observe(ttft_s)

    def itl(self) -> Histogram:
        """The series, for a stream to keep."""
        return self._histogram(ITL)

    def finished(
        self, duration_s: float, ttft_s: float | None, usage: Usage, num_choices: int
    ) -> None:
        self._histogram(INPUT_TOKENS).observe(usage.prompt_tokens)
        self._histogram(OUTPUT_TOKENS).observe(usage.completion_tokens)
        self._histogram(CACHED_TOKENS).observe(usage.cached_tokens)
        tokens = usage.completion_tokens / num_choices
        if ttft_s is not None and tokens > 1:
            self._histogram(TPOT).observe((duration_s - ttft_s) / (tokens - 1))

    def disconnected(self, phase: str) -> None:
        self._registry.counter(DISCONNECTS, model=self.model, phase=phase).inc()

    def ended(self, code: str, duration_s: float, phases: Sequence[tuple[str, float]]) -> None:
        """`code` is the HTTP status, or that of a failure after 200 was sent; `phases` the seconds
        spent in each, which add up to the duration."""
        self._registry.counter(REQUESTS, model=self.model, tier=TIER, code=code).inc()
        self._histogram(DURATION).observe(duration_s)
        for phase, seconds in phases:
            self._histogram(PHASE, phase=phase).observe(seconds)


class Pace:
    """Inter-token latency of one request's streams, one observation a write."""

    def __init__(self, meter: RequestMeter) -> None:
        self._itl = meter.itl()
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
