"""Dashboards and rules as files.

```
DIR/
  dashboards/*.json                   one a dashboard
  rules/tailrace.rules.yaml           recording rules
  rules/tailrace.alerts.yaml          alerts
  rules/ray-names.rules.yaml          only where Prometheus scrapes Ray's agents
  provisioning/dashboards.yaml        for Grafana's own file provisioning, with DIR/dashboards
  kubernetes/dashboards.yaml          ConfigMaps that Grafana's sidecar finds by label
  kubernetes/rules.yaml               PrometheusRules for the Prometheus operator
```
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dashboards.alerts import alerts
from dashboards.errors import DashboardError
from dashboards.everything import FOLDER_TITLE, checked
from dashboards.ray_names import ray_names
from dashboards.rules import RUNBOOK, Group, to_yaml
from dashboards.service_level import service_level

RAY_OUTPUT_VARIABLE = "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"
"""Where Ray was told to put its dashboards, if not into its session."""

_LABELS = {"app.kubernetes.io/name": "tailrace", "app.kubernetes.io/component": "dashboards"}


def rule_files(runbook: str = RUNBOOK) -> dict[str, str]:
    """Rule files by name."""
    return {
        "tailrace.rules.yaml": to_yaml((service_level(),), runbook),
        "tailrace.alerts.yaml": to_yaml(alerts(), runbook),
        "ray-names.rules.yaml": to_yaml((ray_names(),), runbook),
    }


def export(directory: Path, *, runbook: str = RUNBOOK, ray_names_too: bool = False) -> list[Path]:
    """Write everything below `directory` and return what was written. Files of a former export that
    no longer exist are removed. Raises DashboardError where it cannot be written.

    `ray_names_too` puts the rules for Ray's names among the PrometheusRules as well.
    """
    values = checked()
    files = {f"dashboards/{value['uid']}.json": _json(value) for value in values}
    files.update({f"rules/{name}": text for name, text in rule_files(runbook).items()})
    files["provisioning/dashboards.yaml"] = _provider(directory / "dashboards")
    files["kubernetes/dashboards.yaml"] = config_maps(values)
    groups = (service_level(), *alerts(), *((ray_names(),) if ray_names_too else ()))
    files["kubernetes/rules.yaml"] = prometheus_rules(groups, runbook)
    written = _write(directory, files)
    for folder, pattern in (("dashboards", "tailrace-*.json"), ("rules", "*.rules.yaml")):
        for old in set((directory / folder).glob(pattern)) - set(written):
            old.unlink()
    return written


def export_to_ray(session: Path, environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Write the dashboards where the Grafana that Ray provisions looks for its own.

    `session` is a Ray session (`/tmp/ray/session_latest`). Raises DashboardError when Ray has not
    written its own there: its dashboard process does so when it starts, emptying the directory.
    """
    told = environ.get(RAY_OUTPUT_VARIABLE)
    directory = Path(told) if told else session / "metrics" / "grafana" / "dashboards"
    if not directory.is_dir():
        raise DashboardError(
            f"{directory}: no such directory; give the session of a Ray whose dashboard runs, or "
            f"set {RAY_OUTPUT_VARIABLE} as it was set for Ray"
        )
    files = {f"{v['uid'].replace('-', '_')}_grafana_dashboard.json": _json(v) for v in checked()}
    return _write(directory, files)


def config_maps(values: list[dict[str, Any]]) -> str:
    """One ConfigMap a dashboard, labelled as Grafana's sidecar expects."""
    documents = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": f"{value['uid']}-dashboard",
                "labels": {**_LABELS, "grafana_dashboard": "1"},
                "annotations": {"grafana_folder": FOLDER_TITLE},
            },
            "data": {f"{value['uid']}.json": _json(value)},
        }
        for value in values
    ]
    return yaml.safe_dump_all(documents, sort_keys=False, width=100)


def prometheus_rules(groups: tuple[Group, ...], runbook: str = RUNBOOK) -> str:
    """One PrometheusRule of the Prometheus operator with all groups."""
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tailrace", "labels": dict(_LABELS)},
        "spec": {"groups": [group.to_json(runbook) for group in groups]},
    }
    return yaml.safe_dump(document, sort_keys=False, width=100)


def _provider(path: Path) -> str:
    provider = {
        "name": "tailrace",
        "folder": FOLDER_TITLE,
        "type": "file",
        "options": {"path": str(path.absolute())},
    }
    return yaml.safe_dump({"apiVersion": 1, "providers": [provider]}, sort_keys=False)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def _write(directory: Path, files: Mapping[str, str]) -> list[Path]:
    written: list[Path] = []
    for name, text in files.items():
        path = directory / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        except OSError as error:
            raise DashboardError(
                f"{path}: {error.strerror or error}; choose another place"
            ) from error
        written.append(path)
    return written
