"""All there is: boards and rule groups, checked, and as the values that files and Grafana take."""

from __future__ import annotations

import importlib
import json
from functools import lru_cache
from typing import Any

from dashboards.alerts import alerts
from dashboards.boards import boards
from dashboards.check import dashboard_findings, findings
from dashboards.errors import CheckFailed, ExtraMissing
from dashboards.rules import Group
from dashboards.service_level import service_level

FOLDER_UID = "tailrace"
FOLDER_TITLE = "Tailrace"


def rule_groups() -> tuple[Group, ...]:
    """Recording rules and alerts, without those that rename Ray's series."""
    return (service_level(), *alerts())


def dashboards() -> list[dict[str, Any]]:
    """Every dashboard's JSON. Raises ExtraMissing without Grafana's SDK."""
    try:
        build = importlib.import_module("dashboards.grafana_json").build
    except ImportError as error:
        if (error.name or "").startswith("grafana_foundation_sdk"):
            raise ExtraMissing("grafana-foundation-sdk") from None
        raise
    return [build(board) for board in boards()]


def checked() -> list[dict[str, Any]]:
    """As `dashboards`; raises CheckFailed with everything that is wrong."""
    return json.loads(_checked())


@lru_cache(maxsize=1)
def _checked() -> str:
    values = dashboards()
    found = findings(boards(), rule_groups())
    for value in values:
        found += dashboard_findings(value)
    if found:
        raise CheckFailed(found)
    return json.dumps(values)
