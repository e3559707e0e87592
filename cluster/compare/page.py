"""A comparison as a page: first where each side loses, then everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import yaml

from cluster.compare.findings import Findings, Match, change_text, doubts, losses, pooled
from cluster.compare.pairs import FIGURES, Comparison, Figure
from cluster.replay.outcome import Run
from cluster.report import plots
from cluster.report.chart import Axis, Series, chart, number
from cluster.report.page import Cell, Page, Row, figure, table
from cluster.report.plots import View
from cluster.report.single import definitions_table, provenance

_OVERVIEW = (
    *("ttft_scheduled_s_p50", "ttft_scheduled_s_p99", "itl_s_p50", "itl_s_p99"),
    *("icl_s_p99", "e2e_scheduled_s_p99", "goodput", "output_tokens_per_s"),
)


def page(findings: Findings, title: str) -> str:
    """HTML."""
    out = Page(title)
    out.paragraph(_opening(findings))
    out.heading("Where each side loses")
    out.paragraph(
        "Figures whose interval leaves out “no difference”: the loser's divided by the other's, "
        "or less the other's for shares, with the interval in brackets. Differences below 2 % or "
        "one point are left out.",
        "soft",
    )
    for name in findings.sides:
        own = [each for each in losses(findings) if each.loser == name]
        if not own:
            out.paragraph(f"{name} loses nowhere by more than chance explains.")
        for loss in own:
            out.paragraph(f"{name} loses to {loss.winner} at {loss.load}:")
            out.bullets([f"{title}: {change}" for title, change in loss.figures])
    for line in doubts(findings):
        out.paragraph(line, "note")
    if len(findings.loads) > 1:
        out.heading("By load")
        out.figures([_overview(findings, key) for key in _OVERVIEW])
    for load in findings.loads:
        _load(out, findings, load)
    _sides(out, findings)
    _targets(out, findings)
    definitions_table(out)
    run = _any_run(findings)
    provenance(out, {**run.to_json(), "label": title, "server": {}})
    return out.render()


def _opening(findings: Findings) -> str:
    rounds = max(match.num_rounds for match in findings.matches)
    names = ", ".join(findings.sides[1:])
    text = (
        f"{names} against {findings.sides[0]}: the same requests were offered to each, one side at "
        f"a time, in {rounds} round{'s' if rounds > 1 else ''} with the order turned round each "
        "time. Every side started anew for each round and was warmed up."
    )
    if findings.record.capacity:
        told = "; ".join(
            f"{side} {number(rate)}" for side, rate in findings.record.capacity.items()
        )
        text += (
            f" In a closed loop with {findings.record.capacity_users} users the sides answered so "
            f"many requests a second: {told}. Capacity below means that of {findings.sides[0]}."
        )
    return text


def _load(out: Page, findings: Findings, load: str) -> None:
    out.heading(load[:1].upper() + load[1:])
    by_side = findings.runs[load]
    rates = {run.rate for rounds in by_side.values() for _, run, _ in rounds.values() if run.rate}
    if rates:
        out.paragraph(f"{number(max(rates))} requests a second were offered, open loop.", "soft")
    rows: list[Row] = []
    for name in findings.sides:
        outcomes = pooled(by_side.get(name, {}))
        counts = [str(sum(e.result == kind for e in outcomes)) for kind in _KINDS]
        rows.append([name, str(len(outcomes)), *counts])
    out.table(["", "offered", *_KINDS], rows, caption="Requests of all rounds")
    for name in findings.sides[1:]:
        match = findings.match(load, name)
        if match is not None:
            out.parts.append(_table(match))
    for match in findings.matches:
        if match.load == load and match.a != findings.sides[0]:
            out.folded(f"{match.b} beside {match.a}", _table(match))
    views = [
        View(name, pooled(by_side.get(name, {})), colour)
        for colour, name in enumerate(findings.sides)
    ]
    # Over time rounds lie on top of each other, so only one is drawn.
    firsts = [
        View(name, min(rounds.items())[1][2], colour)
        for colour, name in enumerate(findings.sides)
        if (rounds := by_side.get(name, {}))
    ]
    samples = {
        name: min(rounds.items())[1][0].pools
        for name in findings.sides
        if (rounds := by_side.get(name, {}))
    }
    out.figures([*plots.all_of(firsts, findings.slo, views), *plots.pools(samples)])
    out.paragraph("Plots over time show the first round, the others all rounds.", "soft")


_KINDS = ("ok", "shed", "error", "timeout", "disconnected")


def _table(match: Match) -> str:
    rows: list[Row] = []
    for each in match.figures:
        if not any(value is not None for value in (*each.values_a, *each.values_b)):
            continue
        rows.append(
            [
                Cell(each.figure.title, each.figure.unit),
                _values(each.figure, each.values_a),
                _values(each.figure, each.values_b),
                change_text(each),
                _verdict(each),
            ]
        )
    head = ["", match.a, match.b, f"{match.b} / {match.a}", f"{match.b} is"]
    caption = "Means of the rounds; below them the rounds themselves. Shares differ in points."
    return table(head, rows, caption=caption)


def _values(figure: Figure, values: Sequence[float | None]) -> Cell:
    known = [value for value in values if value is not None]
    if not known:
        return Cell("–")
    show: Callable[[float], str] = number
    if figure.how == "difference":
        show = _percent
    below = " · ".join("–" if value is None else show(value) for value in values)
    return Cell(show(sum(known) / len(known)), below if len(values) > 1 else "")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _verdict(comparison: Comparison) -> Cell:
    verdict = comparison.verdict
    if verdict is None:
        return Cell("not known")
    if verdict == "same":
        return Cell("no different")
    return Cell(verdict, kind="good" if verdict == "better" else "bad")


def _overview(findings: Findings, key: str) -> str:
    """One figure over the loads."""
    told = next(each for each in FIGURES if each.key == key)
    xs, label = _scale(findings)
    series: list[Series] = []
    rows: list[Row] = []
    for colour, name in enumerate(findings.sides):
        ys: list[float] = []
        for load in findings.loads:
            values = [value for value in _values_of(findings, load, name, key) if value is not None]
            ys.append(sum(values) / len(values) if values else float("nan"))
        series.append(Series(name=name, xs=xs, ys=ys, colour=colour, dash=colour, marks=True))
        rows.append([name, *map(number, ys)])
    unit = {"s": ", s", "1/s": ""}.get(told.unit, ", share")
    svg = chart(
        told.title,
        f"{told.title} of each side, by load.",
        series,
        x=Axis(label=label),
        y=Axis(
            label=f"{told.title}{unit}",
            low=0.0 if told.unit != "s" else None,
            high=1.0 if told.unit == "share" else None,
            log=told.unit == "s",
        ),
    )
    return figure(
        told.title,
        svg,
        f"{told.better.capitalize()} is better. Means of the rounds.",
        ["", *findings.loads],
        rows,
    )


def _scale(findings: Findings) -> tuple[list[float], str]:
    """Where loads stand on an axis: their rates where all have one, else their places."""
    rates: list[float] = []
    for load in findings.loads:
        runs = [run for rounds in findings.runs[load].values() for _, run, _ in rounds.values()]
        if not all(run.rate for run in runs):
            return [float(i + 1) for i in range(len(findings.loads))], "load, in order"
        rates.append(max(run.rate or 0.0 for run in runs))
    return rates, "requests offered a second"


def _values_of(findings: Findings, load: str, side: str, key: str) -> Sequence[float | None]:
    for match in findings.matches:
        if match.load != load or side not in (match.a, match.b):
            continue
        each = next(each for each in match.figures if each.figure.key == key)
        return each.values_a if side == match.a else each.values_b
    return ()


def _any_run(findings: Findings) -> Run:
    """All have the same workload, machine and command."""
    by_side = findings.runs[findings.loads[0]]
    return next(run for rounds in by_side.values() for _, run, _ in rounds.values())


def _sides(out: Page, findings: Findings) -> None:
    out.heading("Sides")
    record = findings.record
    rows: list[Row] = []
    for side in record.sides:
        name = side["name"]
        ready = record.ready_s.get(name, [])
        rows.append(
            [
                name,
                side["kind"],
                "; ".join(side.get("changes", [])) or side.get("url") or "as it is",
                ", ".join(f"{each:.0f}" for each in ready) or "–",
                number(record.capacity[name]) if name in record.capacity else "–",
            ]
        )
    out.words(["Side", "Kind", "Changes", "Start, s", "Closed loop, requests/s"], rows, broad=True)
    for side in record.sides:
        text = yaml.safe_dump(side, sort_keys=False, allow_unicode=True)
        escaped = Page("")
        escaped.code(text)
        out.folded(f"{side['name']} in full", "".join(escaped.parts))
    runs: list[Row] = []
    for load in findings.loads:
        for rounds in findings.runs[load].values():
            for taken, run, outcomes in rounds.values():
                others = taken.others_cpu_share
                runs.append(
                    [
                        taken.file,
                        f"{len(outcomes):,}",
                        "–" if run.rate is None else number(run.rate),
                        "–" if others is None else f"{others:.1%}",
                        "–" if run.end is None else number(run.end.client_cpu_s),
                    ]
                )
    out.table(
        ["Raw result", "requests", "requests/s", "other work", "client CPU, s"],
        runs,
        caption="Runs. Other work is what neither the side nor the client took of this machine.",
    )


def _targets(out: Page, findings: Findings) -> None:
    from cluster.report.targets import targets_of

    outcomes = [
        e for load in findings.loads for e in pooled(findings.runs[load][findings.sides[0]])
    ]
    rows: list[Row] = []
    for tier in sorted({each.tier for each in outcomes}):
        targets = targets_of(findings.slo, tier).to_json().values()
        rows.append([tier, *("any" if value is None else number(value) for value in targets)])
    out.table(["tier", "TTFT, s", "ITL, s", "end to end, s"], rows, caption="Targets of goodput")
