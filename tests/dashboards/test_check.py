"""Boards and rules say only what exists, and all of it; and what is wrong is found."""

from __future__ import annotations

import ast
import copy
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

import dashboards.everything as everything
from cluster.cli import commands
from dashboards.boards import boards
from dashboards.check import dashboard_findings, findings
from dashboards.errors import CheckFailed
from dashboards.everything import checked, rule_groups
from dashboards.panels import VARIABLES, Board, Panel, Query, Row
from dashboards.rules import Group, Recording
from engine.metrics import CATALOGUE

ROOT = Path(__file__).resolve().parents[2]
PANELS = [(board, panel) for board in boards() for panel in board.panels]


def board(*exprs: str) -> Board:
    queries = tuple(Query(expr) for expr in exprs)
    panel = Panel(title="P", description="Do.", unit="s", queries=queries)
    return Board(uid="u", title="T", description="D", variables=(), rows=(Row("R", (panel,)),))


def about(expr: str, groups: tuple[Group, ...] = ()) -> list[str]:
    """Findings on one more query."""
    before = findings(boards(), rule_groups())
    assert before == []
    return findings((*boards(), board(expr)), (*rule_groups(), *groups))


def test_everything_is_well() -> None:
    assert findings(boards(), rule_groups()) == []
    assert len(checked()) == len(boards())


@pytest.mark.parametrize(
    ("expr", "problem"),
    [
        ("tailrace_no_such", "tailrace_no_such is neither in the catalogue nor recorded"),
        ("tailrace_request_ttft_seconds", "neither in the catalogue"),  # a histogram has parts
        ("tailrace_requests_total_bucket", "neither in the catalogue"),
        ('tailrace_queue_slots{tier="a"}', "tailrace_queue_slots has no label 'tier'"),
        ("sum by (tier) (tailrace_queue_slots)", "groups by 'tier', which nothing here has"),
        ("ray_tailrace_requests_total", "neither in the catalogue"),
        ('{job="a"}', "without a metric name"),
    ],
)
def test_a_query_that_could_return_nothing_is_found(expr: str, problem: str) -> None:
    (found,) = about(expr)
    assert found.startswith("u, 'P', query 1: ")
    assert problem in found


@pytest.mark.parametrize(
    "expr",
    [
        'tailrace_queue_size{job="a", replica="b", model="c"}',
        "sum by (le, replica) (tailrace_request_ttft_seconds_bucket)",
        "tailrace:slo_burn:rate5m",
    ],
)
def test_labels_of_the_catalogue_of_rules_and_of_scraping_are_fine(expr: str) -> None:
    assert about(expr) == []


def test_a_recorded_series_may_be_read_with_its_labels_only() -> None:
    rule = Recording(record="tailrace:x:y", expr="tailrace_queue_size", labels=("model",))
    group = Group(name="g", interval="10s", recordings=(rule,))
    assert about('tailrace:x:y{model="m"}', (group,)) == []
    (found,) = about('tailrace:x:y{tier="t"}', (group,))
    assert "has no label 'tier'" in found


def test_a_metric_on_no_dashboard_is_found() -> None:
    missing = "vllm:kv_cache_usage_perc"
    thinner = tuple(
        replace(
            board,
            rows=tuple(
                Row(
                    row.title,
                    tuple(p for p in row.panels if not any(missing in q.expr for q in p.queries)),
                )
                for row in board.rows
            ),
        )
        for board in boards()
    )
    assert findings(thinner, rule_groups()) == [
        f"{missing}: declared, and on no dashboard; add a panel that says what to do about it"
    ]


def test_what_alerts_alone_read_is_on_no_dashboard_and_what_a_panel_reads_through_a_rule_is() -> (
    None
):
    def missing(*exprs: str) -> set[str]:
        lines = findings((board(*exprs),), rule_groups())
        return {line.split(":")[0] for line in lines if "on no dashboard" in line}

    nothing, burn = missing("vector(1)"), missing("tailrace:slo_burn:rate5m")
    assert "tailrace_stale_endpoints" in nothing & burn
    assert nothing - burn == {"tailrace_slo_requests_total", "tailrace_slo_objective_ratio"}


def test_grafanas_schema_finds_what_grafana_would_drop_or_misread() -> None:
    value = checked()[0]
    assert dashboard_findings(value) == []

    def broken(change) -> list[str]:
        copied = copy.deepcopy(value)
        panel = next(p for p in copied["panels"] if p["type"] == "timeseries")
        change(copied, panel)
        return dashboard_findings(copied)

    changes = [
        lambda board, panel: board.update(refersh="10s"),
        lambda board, panel: board.update(title=7),
        lambda board, panel: panel.update(titel="x"),
        lambda board, panel: panel["gridPos"].update(w="12"),
        lambda board, panel: panel["options"]["legend"].update(placement="middle"),
        lambda board, panel: panel["fieldConfig"]["defaults"]["custom"].update(lineWdith=1),
        lambda board, panel: panel["fieldConfig"]["defaults"].update(unti="s"),
        lambda board, panel: panel.update(type="graph"),
        lambda board, panel: board["templating"]["list"][0].update(type="datasuorce"),
    ]
    for number, change in enumerate(changes):
        assert broken(change), f"change {number} was not found"


def test_a_failed_check_says_everything_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = board("tailrace_no_such", "tailrace_nor_this")
    monkeypatch.setattr(everything, "boards", lambda: (*boards(), bad))
    everything._checked.cache_clear()
    try:
        with pytest.raises(CheckFailed) as raised:
            checked()
    finally:
        everything._checked.cache_clear()
    assert len(raised.value.findings) == 2
    assert str(raised.value).count("\n") == 1


def test_the_command_counts_what_there_is() -> None:
    done = CliRunner().invoke(commands, ["dashboards", "check", "--json"])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.output)
    assert figures["dashboards"] == len(boards())
    assert figures["queries"] == sum(len(panel.queries) for _, panel in PANELS)


@pytest.mark.parametrize(("board", "panel"), PANELS, ids=lambda v: getattr(v, "title", None))
def test_every_panel_has_a_unit_a_description_that_says_what_to_do_and_a_way_on(
    board: Board, panel: Panel
) -> None:
    assert panel.unit
    assert 60 < len(panel.description) < 320
    assert panel.description.endswith(".")
    value = next(v for v in checked() if v["uid"] == board.uid)
    (shown,) = [p for p in value["panels"] if p["title"] == panel.title]
    assert shown["description"] == panel.description
    assert shown["fieldConfig"]["defaults"]["unit"] == panel.unit
    assert [link["url"] for link in shown["links"]] == ["${gateway}/dashboard"]
    assert {t["datasource"]["uid"] for t in [shown]} == {"${datasource}"}
    assert [t["refId"] for t in shown["targets"]] == list("ABCDEFGHIJ"[: len(panel.queries)])


@pytest.mark.parametrize("board", boards(), ids=lambda board: board.uid)
def test_variables_that_queries_use_are_offered_and_those_offered_are_used(board: Board) -> None:
    text = json.dumps(next(v for v in checked() if v["uid"] == board.uid))
    used = {name for name in VARIABLES if re.search(rf"\$\{{?{name}\b", text)}
    assert used == set(board.variables)


@pytest.mark.parametrize("board", boards(), ids=lambda board: board.uid)
def test_panels_do_not_overlap_and_stay_on_the_grid(board: Board) -> None:
    value = next(v for v in checked() if v["uid"] == board.uid)
    taken: set[tuple[int, int]] = set()
    for panel in value["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not taken & cells, panel["title"]
        taken |= cells
    ids = [panel["id"] for panel in value["panels"]]
    assert ids == list(range(1, len(ids) + 1))


def test_dashboards_import_declarations_and_errors_alone() -> None:
    allowed = {"engine.metrics", "engine.errors"}
    for path in (ROOT / "dashboards").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                assert top not in {"cluster", "deployments", "ray", "torch"}, path
                assert top != "engine" or name in allowed, path


def test_every_histogram_is_read_by_its_parts() -> None:
    text = " ".join(query.expr for _, panel in PANELS for query in panel.queries)
    for metric in CATALOGUE.values():
        if metric.kind == "histogram":
            assert f"{metric.name}_bucket" in text or f"{metric.name}_sum" in text, metric.name
