"""Dashboards as values: what an operator reads, and what to do about it.

How they look is decided once, in `grafana_json`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Look = Literal["lines", "stacked", "stat", "table"]


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression of a panel."""

    expr: str
    legend: str = ""
    """`{{label}}` is filled in. In a table, the column's title."""

    limit: bool = False
    """A target or a limit rather than a measurement: dashed and red."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `width` is in Grafana's 24 columns."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    look: Look = "lines"
    width: int = 8
    height: int = 8
    minimum: float | None = 0.0
    maximum: float | None = None
    red_above: float | None = None
    red_below: float | None = None
    decimals: int | None = None
    empty: str = ""
    """Why it may show nothing on a healthy cluster, which it then says; empty: it may not."""


@dataclass(frozen=True, slots=True)
class Row:
    """A heading with the panels below it."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    description: str
    variables: tuple[str, ...]
    """Names of `VARIABLES` that it offers, in order, besides those that every board has."""

    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        return tuple(panel for row in self.rows for panel in row.panels)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """What a reader chooses at the top."""

    label: str
    description: str
    query: str = ""
    """PromQL's `label_values`; empty: free text or one of `options`."""

    options: tuple[str, ...] = ()
    default: str = ""
    several: bool = True


VARIABLES = {
    "job": Variable(
        label="Scraped as",
        description="The Prometheus job that the figures come from. One at a time: with Ray's "
        "agents and a gateway both scraped, everything is there twice.",
        query='label_values(tailrace_build_info{role="gateway"}, job)',
        several=False,
    ),
    "model": Variable(
        label="Model",
        description="Models that clients ask for.",
        query='label_values(tailrace_request_duration_seconds_count{job=~"$job"}, model)',
    ),
    "tier": Variable(
        label="Tier",
        description="Service tiers.",
        query='label_values(tailrace_slo_objective_ratio{job=~"$job"}, tier)',
    ),
    "replica": Variable(
        label="Replica",
        description="Processes of the pools.",
        query='label_values(vllm:num_requests_running{job=~"$job"}, replica)',
    ),
    "window": Variable(
        label="Window",
        description="What rates and quantiles look back over. A p99.9 needs a thousand requests in "
        "it to mean anything.",
        options=("1m", "5m", "15m", "1h", "6h"),
        default="5m",
    ),
    "gateway": Variable(
        label="Gateway",
        description="Where links lead: the address of a gateway as your browser reaches it.",
        default="http://127.0.0.1:8000",
    ),
    "replica_hour": Variable(
        label="Price of a replica-hour",
        description="What one prefill or decode replica costs an hour, in your currency.",
        default="1",
    ),
}
