"""Whether boards, rules and alerts say only what exists, and all of it.

- Every metric that an expression reads is in the catalogue or recorded by a rule, with the labels
  it is asked for.
- Every metric of the catalogue is on a board.
- Every board is a valid Grafana dashboard, and every panel's options and query are those of its
  kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib import resources
from typing import Any

from dashboards.panels import VARIABLES, Board
from dashboards.promql import read
from dashboards.ray_names import families
from dashboards.rules import Group
from engine.metrics import CATALOGUE

_EVERYWHERE = frozenset({"job", "instance", "replica"})
"""Labels that every series has: Prometheus and our own processes put them there."""


def findings(boards: Iterable[Board], groups: Iterable[Group]) -> list[str]:
    """What is wrong, one line each. `groups` without those that rename Ray's series."""
    boards, groups = tuple(boards), tuple(groups)
    known = _known(groups)
    found: list[str] = []
    for where, expr in expressions(boards, groups):
        try:
            found += [f"{where}: {problem}" for problem in _problems(expr, known)]
        except ValueError as error:
            found.append(f"{where}: {error}")
    if not found:
        shown = _shown(boards, groups)
        found += [
            f"{name}: declared, and on no dashboard; add a panel that says what to do about it"
            for name in CATALOGUE
            if name not in shown
        ]
    return found


def _shown(boards: tuple[Board, ...], groups: tuple[Group, ...]) -> set[str]:
    """Metrics that panels read, by themselves or through recorded series."""
    recorded = {rule.record: rule.expr for group in groups for rule in group.recordings}
    queries = [query for board in boards for panel in board.panels for query in panel.queries]
    left = [query.expr for query in queries]
    shown: set[str] = set()
    while left:
        names = {_family(selector.name) for selector in read(left.pop()).selectors} - shown
        shown |= names
        left += [recorded[name] for name in names if name in recorded]
    return shown


def expressions(boards: Iterable[Board], groups: Iterable[Group]) -> Iterator[tuple[str, str]]:
    """`(where it stands, PromQL)` of everything that is evaluated."""
    for board in boards:
        for name in board.variables:
            query = VARIABLES[name].query
            if query:  # label_values(selector, label)
                yield f"{board.uid}, variable {name}", label_values(query)[0]
        for panel in board.panels:
            for number, query in enumerate(panel.queries):
                yield f"{board.uid}, {panel.title!r}, query {number + 1}", query.expr
    for group in groups:
        for rule in group.recordings:
            yield f"{group.name}, {rule.record}", rule.expr
        for alert in group.alerts:
            for condition in alert.conditions:
                yield f"{group.name}, {alert.name}", condition.expr


def label_values(query: str) -> tuple[str, str]:
    """`(selector, label)` of a variable's query."""
    inside = query.removeprefix("label_values(").removesuffix(")")
    selector, _, label = inside.rpartition(",")
    return selector, label.strip()


def dashboard_findings(value: dict[str, Any]) -> list[str]:
    """What Grafana's own schema says against a dashboard's JSON. Needs `jsonschema`."""
    import jsonschema

    def against(schema: dict[str, Any], part: Any, where: str) -> list[str]:
        errors = jsonschema.Draft7Validator(schema).iter_errors(part)
        return [
            f"{where}{''.join(f'.{step}' for step in error.absolute_path)}: {error.message[:200]}"
            for error in errors
        ]

    schema, uid = _schema(), value.get("uid", "?")
    found = against(schema["dashboard"], value, f"{uid}: ")
    for panel in value.get("panels", ()):
        if panel.get("type") == "row":
            continue
        where = f"{uid}, {panel.get('title')!r}: "
        kind = schema["panels"].get(panel.get("type"))
        if kind is None:
            found.append(f"{where}type {panel.get('type')!r} is not one of those used here")
            continue
        if "options" in panel:
            # The types demand what Grafana fills in by itself.
            options = {k: v for k, v in kind["options"].items() if k != "required"}
            found += against(options, panel["options"], f"{where}options")
        custom = panel.get("fieldConfig", {}).get("defaults", {}).get("custom")
        if custom is not None:
            found += against(
                {k: v for k, v in kind.get("custom", {"not": {}}).items() if k != "required"},
                custom,
                f"{where}custom",
            )
    return found


@lru_cache(maxsize=1)
def _schema() -> dict[str, Any]:
    return json.loads(
        resources.files("dashboards").joinpath("schema/grafana-11.6.json").read_text()
    )


def _known(groups: Iterable[Group]) -> dict[str, frozenset[str]]:
    """Labels by name of everything that can be read."""
    known = {
        name: frozenset(labels)
        for metric in CATALOGUE.values()
        for name, labels in families(metric)
    }
    for group in groups:
        known.update({rule.record: frozenset(rule.labels) for rule in group.recordings})
    return known


def _problems(expr: str, known: dict[str, frozenset[str]]) -> Iterator[str]:
    reading = read(expr)
    labels = set(_EVERYWHERE)
    counted = {"revision"} if "count_values" in expr else set[str]()
    for selector in reading.selectors:
        if selector.name not in known:
            yield f"{selector.name} is neither in the catalogue nor recorded by a rule"
            continue
        labels |= known[selector.name]
        for label, _ in selector.labels:
            if label not in known[selector.name] | _EVERYWHERE:
                yield f"{selector.name} has no label {label!r}"
    for label in sorted(reading.grouping - labels - counted):
        yield f"groups by {label!r}, which nothing here has"


def _family(name: str) -> str:
    for suffix in ("_bucket", "_sum", "_count"):
        base = name.removesuffix(suffix)
        if base != name and base in CATALOGUE and CATALOGUE[base].kind == "histogram":
            return base
    return name
