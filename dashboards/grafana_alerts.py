"""Our alerts as rules that Grafana evaluates itself, for those without an Alertmanager.

As Grafana's own import of Prometheus rules does it: the expression returns a series only where the
alert is true, a math node turns any value of it into 1, a threshold fires on that. No data means
that all is well.
"""

from __future__ import annotations

import re
from typing import Any

from dashboards.rules import RUNBOOK, Alert, Group

ORG = 1
_RANGE_S = 600
_EXPRESSION = "__expr__"
_SECONDS = {"s": 1, "m": 60, "h": 3600}


def rule_group(
    group: Group, *, folder_uid: str, datasource_uid: str, runbook: str = RUNBOOK
) -> dict[str, Any]:
    """The body of `PUT /api/v1/provisioning/folder/{folder}/rule-groups/{group}`."""
    return {
        "title": group.name,
        "folderUid": folder_uid,
        "interval": seconds(group.interval),
        "rules": [
            _rule(alert, group.name, folder_uid, datasource_uid, runbook) for alert in group.alerts
        ],
    }


def seconds(duration: str) -> int:
    """Of a duration as Prometheus writes it (`30s`, `2m`, `3h`)."""
    return int(duration[:-1]) * _SECONDS[duration[-1]]


def rule_uid(alert: Alert) -> str:
    """At most 40 characters, stable over pushes."""
    return alert.name.lower()


def _rule(
    alert: Alert, group: str, folder_uid: str, datasource_uid: str, runbook: str
) -> dict[str, Any]:
    annotations = {key: _template(text) for key, text in alert.annotations(runbook).items()}
    return {
        "uid": rule_uid(alert),
        "orgID": ORG,
        "folderUID": folder_uid,
        "ruleGroup": group,
        "title": alert.name,
        "condition": "fires",
        "data": [
            {
                "refId": "query",
                "datasourceUid": datasource_uid,
                "relativeTimeRange": {"from": _RANGE_S, "to": 0},
                "model": {
                    "refId": "query",
                    "datasource": {"type": "prometheus", "uid": datasource_uid},
                    "expr": alert.expr,
                    "instant": True,
                    "range": False,
                },
            },
            _node(
                "any",
                {
                    "type": "math",
                    "expression": "is_number($query) || is_nan($query) || is_inf($query)",
                },
            ),
            _node(
                "fires",
                {
                    "type": "threshold",
                    "expression": "any",
                    "conditions": [{"evaluator": {"type": "gt", "params": [0]}}],
                },
            ),
        ],
        "noDataState": "OK",
        "execErrState": "Error",
        "for": alert.hold,
        "annotations": {**annotations, "__dashboardUid__": alert.dashboard},
        "labels": {"severity": alert.severity},
        "isPaused": False,
    }


def _node(ref: str, model: dict[str, Any]) -> dict[str, Any]:
    source = {"type": _EXPRESSION, "uid": _EXPRESSION}
    return {
        "refId": ref,
        "datasourceUid": _EXPRESSION,
        "queryType": model["type"],
        "relativeTimeRange": {"from": 0, "to": 0},
        "model": {"refId": ref, "datasource": source, **model},
    }


def _template(text: str) -> str:
    """Grafana names a value by its query; Prometheus has but one."""
    return re.sub(r"\$value\b", "$values.query.Value", text)
