"""What the gateway reports about its requests, in one place: names, labels, when.

Aggregated per drain of a stream, never per token. Time per output token is that of `vllm bench`,
(duration - ttft) / (tokens - 1). Inter-token latency is the gap between two writes, spread over the
tokens of the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from deployments.gateway.prepare import TIER
from deployments.link.messages import StreamEvent, Usage

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


class Metrics(Protocol):
    """A registry. Names and label sets are those of the one metric catalogue."""

    def inc(self, name: str, value: float = 1.0, **labels: str) -> None: ...

    def set(self, name: str, value: float, **labels: str) -> None: ...

    def observe(self, name: str, value: float, **labels: str) -> None: ...

    def render(self) -> str:
        """All of it in Prometheus' text format."""
        ...


class RequestMeter:
    """Reports one request."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.model = "unknown"
        """A served model's name: clients' own inventions must not become label values."""

    def inflight(self, count: int) -> None:
        self._metrics.set(INFLIGHT, count, model=self.model)

    def first_token(self, ttft_s: float, streaming: bool) -> None:
        how = "true" if streaming else "false"
        self._metrics.observe(TTFT, ttft_s, model=self.model, tier=TIER, streaming=how)

    def itl(self, gap_s: float) -> None:
        self._metrics.observe(ITL, gap_s, model=self.model, tier=TIER)

    def finished(
        self, duration_s: float, ttft_s: float | None, usage: Usage, num_choices: int
    ) -> None:
        labels = {"model": self.model, "tier": TIER}
        metrics = self._metrics
        metrics.observe(INPUT_TOKENS, usage.prompt_tokens, **labels)
        metrics.observe(OUTPUT_TOKENS, usage.completion_tokens, **labels)
        metrics.observe(CACHED_TOKENS, usage.cached_tokens, **labels)
        tokens = usage.completion_tokens / num_choices
        if ttft_s is not None and tokens > 1:
            metrics.observe(TPOT, (duration_s - ttft_s) / (tokens - 1), **labels)

    def disconnected(self, phase: str) -> None:
        self._metrics.inc(DISCONNECTS, model=self.model, phase=phase)

    def ended(self, code: str, duration_s: float, phases: Sequence[tuple[str, float]]) -> None:
        """`code` is the HTTP status, or that of a failure after 200 was sent; `phases` the seconds
        spent in each, which add up to the duration."""
        self._metrics.inc(REQUESTS, model=self.model, tier=TIER, code=code)
        self._metrics.observe(DURATION, duration_s, model=self.model, tier=TIER)
        for phase, seconds in phases:
            self._metrics.observe(PHASE, seconds, model=self.model, tier=TIER, phase=phase)


class Pace:
    """Inter-token latency of one request's streams, one observation a write."""

    def __init__(self, meter: RequestMeter) -> None:
        self._meter = meter
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
                self._meter.itl((now_s - last_s) / steps)
