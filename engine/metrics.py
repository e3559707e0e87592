"""The catalogue of metrics: what exists, under which name, with which labels, buckets and meaning.

Values only. `deployments.metrics` holds the numbers, dashboards read the declarations, and neither
invents a name. Engine series keep vLLM's names, because gateways and dashboards elsewhere know them;
all else is `tailrace_`, in base units, with `_total` on counters.

Labels are closed sets (model, tier, role, phase, outcome, reason), never ids of requests or keys.
`replica` is added by the process that shows other replicas' series, so nothing here uses it.

What the clocks mean:

- The client's time to first token is `tailrace_request_ttft_seconds`, from the request's arrival at
  the gateway. `vllm:time_to_first_token_seconds` starts when the engine got the request, and where
  prefill runs elsewhere it includes the wait for KV.
- An inter-token latency is one gap between two tokens; time per output token is a request's mean.
- The phases of `tailrace_request_phase_seconds` follow each other without gap or overlap: they add
  up to the request's duration.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED_LABELS = frozenset({"le", "quantile", "replica"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One family of series."""

    name: str
    kind: Kind
    unit: Literal["", "seconds", "bytes", "tokens", "ratio", "blocks"]
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()
    """Upper bounds, inclusive, ascending, without +Inf. Histograms only."""

    def __post_init__(self) -> None:
        assert _NAME.fullmatch(self.name), f"{self.name}: not a metric name"
        assert all(_LABEL.fullmatch(label) for label in self.labels), f"{self.name}: {self.labels}"
        assert not _RESERVED_LABELS & set(self.labels), f"{self.name}: reserved label"
        assert len(set(self.labels)) == len(self.labels), f"{self.name}: a label twice"
        assert bool(self.buckets) == (self.kind == "histogram"), f"{self.name}: buckets"
        assert list(self.buckets) == sorted(set(self.buckets)), f"{self.name}: buckets unsorted"
        assert self.kind != "counter" or self.name.endswith("_total"), f"{self.name}: no _total"


# vLLM's boundaries, so that quantiles compare, with finer ones where its coarsest step hides a CPU
# or a fast decoder: its inter-token histogram starts at 10 ms, its queue histogram at 300 ms.
TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS = (
    *(0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
DURATION_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8),
    *(1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TRANSFER_BUCKETS = (
    *(0.001, 0.002, 0.003, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0),
)
STEP_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0),
)
TOKEN_BUCKETS = tuple(float(d * 10**e) for e in range(6) for d in (1, 2, 5))
ITERATION_BUCKETS = (1.0, 8.0, *(float(2**e) for e in range(4, 15)))

PHASES = (
    *("tokenize", "queue", "route", "prefill_queue", "prefill"),
    *("kv_transfer", "decode_queue", "decode", "stream"),
)
"""Values of the label `phase`, in the order a request passes them."""


def _counter(name: str, labels: tuple[str, ...], help: str, unit: str = "") -> Metric:
    return Metric(name=name, kind="counter", unit=unit, labels=labels, help=help)  # pyright: ignore[reportArgumentType]


def _gauge(name: str, labels: tuple[str, ...], help: str, unit: str = "") -> Metric:
    return Metric(name=name, kind="gauge", unit=unit, labels=labels, help=help)  # pyright: ignore[reportArgumentType]
