"""The three files of a report."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from cluster.errors import ClusterError
from cluster.replay.outcome import Outcome, Run
from cluster.report import single
from cluster.report.figures import (
    Bootstrap,
    Slo,
    is_good,
    itl_s,
    num_output_tokens,
    summarise,
    ttft_s,
)
from cluster.report.prices import PriceTable
from cluster.report.targets import DEFAULT_TARGETS, targets_of

_COLUMNS = (
    *("index", "source", "session", "turn", "tier", "tenant", "model", "result", "status", "code"),
    *("scheduled_s", "sent_s", "attempt_s", "first_token_s", "end_s", "retries"),
    *("planned_input_tokens", "planned_output_tokens", "input_tokens", "output_tokens"),
    *("cached_tokens", "predicted_cached_tokens", "finish_reason", "request_id"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFiles:
    """What was written, and the figures in it."""

    json: Path
    csv: Path
    html: Path
    summary: dict[str, Any]


def write_report(
    directory: Path,
    run: Run,
    outcomes: Sequence[Outcome],
    *,
    slo: Slo | None = None,
    prices: PriceTable | None = None,
    bootstrap: Bootstrap | None = None,
    pools: Sequence[Mapping[str, Any]] = (),
) -> ReportFiles:
    """Write `report.json`, `outcomes.csv` and `report.html` into `directory`, making it.

    `pools` are samples of a `PoolSampler`. Raises ClusterError where nothing can be written.
    """
    slo = DEFAULT_TARGETS if slo is None else slo
    outcomes = sorted(outcomes, key=lambda each: each.index)
    summary = summarise(run, outcomes, slo, prices, bootstrap=bootstrap)
    files = ReportFiles(
        json=directory / "report.json",
        csv=directory / "outcomes.csv",
        html=directory / "report.html",
        summary=summary,
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_json(files.json, {**summary, **({"pools": list(pools)} if pools else {})})
        write_csv(files.csv, outcomes, slo)
        files.html.write_text(single.page(summary, outcomes, slo, pools=pools))
    except OSError as error:
        raise ClusterError(
            f"{directory}: cannot write the report ({error.strerror or error}); "
            "give another directory"
        ) from error
    return files


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")


def write_csv(path: Path, outcomes: Sequence[Outcome], slo: Slo) -> None:
    """One line a request. Times as in `Outcome`, durations and the verdict beside them."""
    phases = sorted({phase for each in outcomes for phase in each.phases})
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        derived = ("ttft_s", "itl_s", "e2e_s", "lateness_s", "tokens", "good")
        writer.writerow([*_COLUMNS, *derived, *(f"phase_{phase}_s" for phase in phases)])
        for each in outcomes:
            writer.writerow(
                [
                    *(_cell(getattr(each, column)) for column in _COLUMNS),
                    _cell(ttft_s(each)),
                    _cell(itl_s(each)),
                    _cell(each.end_s - each.sent_s),
                    _cell(each.lateness_s),
                    num_output_tokens(each),
                    int(is_good(each, targets_of(slo, each.tier))),
                    *(_cell(each.phases.get(phase)) for phase in phases),
                ]
            )


def _cell(value: Any) -> Any:
    """Microseconds are enough."""
    return round(value, 6) if isinstance(value, float) else value
