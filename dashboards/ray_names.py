"""From the names that Ray's agents serve to those of the gateway's `/metrics`.

Ray prefixes `ray_`, writes `_` for `:` and adds labels of its own (worker, node, session). One
recording rule a series family gives it the name and the labels of the catalogue, the process as
`replica`, and the job `tailrace-ray`: from there on nothing needs to know where figures came from.

An agent drops what its process did not repeat within two reporting intervals, which a busy machine
brings about; a minute's memory keeps such gaps out of rates and alerts.
"""

from __future__ import annotations

from dashboards.rules import Group, Recording
from engine.metrics import CATALOGUE, Metric

JOB = "tailrace-ray"
"""Label `job` of what is read from Ray's agents."""

INTERVAL = "10s"
MEMORY = "1m"


def ray_names() -> Group:
    """The rules for every metric there is. To be loaded only where Ray's agents are scraped."""
    return Group(
        name="tailrace-ray-names",
        interval=INTERVAL,
        recordings=tuple(
            _renamed(name, labels)
            for metric in CATALOGUE.values()
            for name, labels in families(metric)
        ),
    )


def families(metric: Metric) -> list[tuple[str, tuple[str, ...]]]:
    """`(name, labels)` of the series that one metric is on the wire, without `replica`."""
    if metric.kind != "histogram":
        return [(metric.name, metric.labels)]
    return [
        (f"{metric.name}_bucket", (*metric.labels, "le")),
        (f"{metric.name}_sum", metric.labels),
        (f"{metric.name}_count", metric.labels),
    ]


def _renamed(name: str, labels: tuple[str, ...]) -> Recording:
    kept = (*labels, "replica")
    # One process, one series: max only drops Ray's own labels, also while two sessions overlap.
    return Recording(
        record=name,
        expr=f"max by ({', '.join(kept)}) (last_over_time(ray_{name.replace(':', '_')}[{MEMORY}]))",
        labels=(*kept, "job"),
        constant=(("job", JOB),),
    )
