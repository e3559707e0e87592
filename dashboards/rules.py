"""Recording rules and alerts as values, and the files Prometheus loads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

RUNBOOK = "docs/runbook.md"
"""Where `runbook_url` points unless an export says otherwise."""

_HEAD = "# Written by `tailrace dashboards export`. Change the code it comes from instead.\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One recorded series family."""

    record: str
    expr: str
    labels: tuple[str, ...]
    """Labels that the recorded series have."""

    constant: tuple[tuple[str, str], ...] = ()
    """Labels put on them."""

    def to_json(self) -> dict[str, Any]:
        rule: dict[str, Any] = {"record": self.record, "expr": self.expr}
        if self.constant:
            rule["labels"] = dict(self.constant)
        return rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """`expr op threshold`; `expr` by itself has a value also while all is well."""

    expr: str
    op: str
    threshold: float

    def __str__(self) -> str:
        return f"({self.expr}) {self.op} {self.threshold:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert. All conditions must hold, for series with the same labels."""

    name: str
    severity: str
    """`page`: somebody must look now. `ticket`: within a day or two."""

    hold: str
    """How long it must be true, as Prometheus writes durations."""

    conditions: tuple[Condition, ...]
    summary: str
    description: str
    """What it means and what to do first; `{{ $labels.x }}` and `{{ $value }}` are filled in."""

    dashboard: str
    """Uid of the dashboard to open."""

    empty: str = ""
    """Why the conditions may have no value on a healthy cluster; empty: they always have one."""

    @property
    def expr(self) -> str:
        return "\nand\n".join(map(str, self.conditions))

    @property
    def anchor(self) -> str:
        return self.name.lower()

    def annotations(self, runbook: str) -> dict[str, str]:
        return {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{runbook}#{self.anchor}",
        }

    def to_json(self, runbook: str) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.hold,
            "labels": {"severity": self.severity},
            "annotations": {**self.annotations(runbook), "dashboard": self.dashboard},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rules that are evaluated together, in order."""

    name: str
    interval: str
    recordings: tuple[Recording, ...] = ()
    alerts: tuple[Alert, ...] = field(default=())

    def to_json(self, runbook: str = RUNBOOK) -> dict[str, Any]:
        rules = [rule.to_json() for rule in self.recordings]
        rules += [alert.to_json(runbook) for alert in self.alerts]
        return {"name": self.name, "interval": self.interval, "rules": rules}


def to_yaml(groups: tuple[Group, ...], runbook: str = RUNBOOK) -> str:
    """A rule file."""
    text = yaml.safe_dump(
        {"groups": [group.to_json(runbook) for group in groups]},
        sort_keys=False,
        width=100,
        allow_unicode=True,
    )
    return _HEAD + text
