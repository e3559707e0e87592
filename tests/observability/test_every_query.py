"""Every query of every panel, variable, rule and alert returns data from a running cluster."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
from serving import Cluster
from watching import GATEWAY_JOB, Watched, watching

from dashboards.alerts import alerts
from dashboards.boards import boards
from dashboards.check import label_values
from dashboards.panels import VARIABLES
from dashboards.promql import read
from dashboards.ray_names import JOB as RAY_JOB
from dashboards.ray_names import families
from dashboards.service_level import service_level
from engine.metrics import CATALOGUE

pytestmark = pytest.mark.cluster

T = TypeVar("T")

JOBS = (GATEWAY_JOB, RAY_JOB)

PATIENCE_S = 300.0
"""Ray's agents are ten seconds late by themselves, and on a busy machine minutes."""

MUST_BE_EMPTY = {
    "tailrace_gpu_": "no replica here owns a GPU",
    "absent": "absent() has a value only while the series is gone",
}
"""By what an expression reads: why it has no value now."""


@pytest.fixture(scope="module")
def watched(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watching(cluster, tmp_path_factory.mktemp("prometheus")) as watched:
        yield watched


def filled_in(expr: str, job: str) -> str:
    """As Grafana would send it."""
    values = {"job": job, "model": ".*", "tier": ".*", "replica": ".*"}
    values |= {"window": "1m", "replica_hour": "1"}
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], expr)


def reason(expr: str) -> str | None:
    """Why an expression must have no value now; None where it must have one."""
    if expr.startswith("absent("):
        return MUST_BE_EMPTY["absent"]
    if any(s.name.startswith("tailrace_gpu_") for s in read(expr).selectors):
        return MUST_BE_EMPTY["tailrace_gpu_"]
    return None


def wrong(watched: Watched, expressions: list[tuple[str, str]]) -> list[str]:
    """Those that have no value and should, or have one and should not.

    What Ray lost of a series that never changes, such as a target, is said again within a minute.
    """
    left = expressions

    def found() -> list[str]:
        told: list[str] = []
        for where, expr in tuple(left):
            values, why = watched.prometheus.values(expr), reason(expr)
            if bool(values) == bool(why):
                told.append(f"{where}: {len(values)} values, {why or 'expected some'}\n  {expr}")
            else:
                left.remove((where, expr))
        return told

    return none_left(found)


def none_left(found: Callable[[], T]) -> T:
    """What is found when nothing is found any more, or when patience has run out."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := found()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("board", boards(), ids=lambda board: board.uid)
def test_every_query_of_every_panel_returns_data(watched: Watched, board, job: str) -> None:
    expressions = [
        (f"{panel.title}, {query.legend}", filled_in(query.expr, job))
        for panel in board.panels
        for query in panel.queries
    ]
    assert wrong(watched, expressions) == []


@pytest.mark.parametrize("job", JOBS)
def test_every_recorded_series_is_there(watched: Watched, job: str) -> None:
    expressions = [
        (rule.record, f'{rule.record}{{job="{job}"}}') for rule in service_level().recordings
    ]
    assert wrong(watched, expressions) == []


def test_every_condition_of_every_alert_has_a_value_while_all_is_well(watched: Watched) -> None:
    expressions = [
        (alert.name, condition.expr)
        for group in alerts()
        for alert in group.alerts
        for condition in alert.conditions
    ]
    assert wrong(watched, expressions) == []


def test_every_rule_evaluates_and_none_that_means_a_defect_fires(watched: Watched) -> None:

    def unwell() -> list[tuple[str, str]]:
        rules = watched.prometheus.rules()
        return [(r["name"], r["lastError"]) for r in rules if r["health"] != "ok"]

    assert none_left(unwell) == []
    defects = {"TailraceNoFigures", "TailracePhaseSumOff", "TailraceBlocksLeaked"}
    defects |= {"TailraceKVCorrupt", "TailraceQueueAway"}

    def broken() -> set[str]:
        rules = watched.prometheus.rules()
        active = {r["name"] for r in rules if r["type"] == "alerting" and r["state"] != "inactive"}
        return active & defects

    # What Ray's agent hears while it starts may be off for a moment; a defect stays.
    assert none_left(broken) == set()


@pytest.mark.parametrize("job", JOBS)
def test_every_variable_has_something_to_choose(watched: Watched, job: str) -> None:
    pools = [(app, pool) for app in ("fake", "tiny") for pool in ("Prefill", "Decode")]
    running = {replica for at in pools for replica in watched.cluster.pids(*at)}
    wanted = {"job": set(JOBS), "model": {"fake", "tiny"}, "tier": {"default"}, "replica": running}

    def missing() -> dict[str, set[str]]:
        left: dict[str, set[str]] = {}
        for name, variable in VARIABLES.items():
            if variable.query:
                selector, label = label_values(variable.query)
                offered = watched.prometheus.label_values(filled_in(selector, job), label)
                assert name != "job" or offered <= set(JOBS)
                if not offered or wanted.get(name, set()) - offered:
                    left[name] = wanted.get(name, set()) - offered
        return left

    assert none_left(missing) == {}


@pytest.mark.parametrize("job", JOBS)
def test_every_metric_of_the_catalogue_is_served_and_no_other(watched: Watched, job: str) -> None:
    wanted = {
        name
        for metric in CATALOGUE.values()
        if not metric.name.startswith("tailrace_gpu_")
        for name, _ in families(metric)
    }

    def ours() -> set[str]:
        served = watched.prometheus.label_values(f'{{job="{job}"}}', "__name__")
        return {name for name in served if name.startswith(("tailrace_", "vllm:"))}

    assert none_left(lambda: wanted - ours()) == set()
    assert ours() - wanted == set(), "undeclared"


def test_both_ways_of_scraping_tell_the_same_once_the_load_is_over(watched: Watched) -> None:
    watched.load.stop()
    told = {job: f'sum by (model, code) (tailrace_requests_total{{job="{job}"}})' for job in JOBS}
    here, there = told[GATEWAY_JOB], told[RAY_JOB]
    same = f"absent({here} != on (model, code) {there}) and on () count({here}) == count({there})"
    watched.prometheus.wait_for(same, within_s=PATIENCE_S)
    codes = {series["metric"]["code"] for series in watched.prometheus.query(here)}
    assert {"200", "400", "404", "499"} <= codes
