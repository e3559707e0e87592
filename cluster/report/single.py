"""The report of one run as a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from cluster.replay.outcome import Outcome
from cluster.report import plots
from cluster.report.chart import number
from cluster.report.definitions import DEFINITIONS, LATENCIES
from cluster.report.figures import PERCENTS, Slo, percent_key
from cluster.report.page import Cell, Page, Row, table
from cluster.report.plots import View, views_of

_LATE_S = 0.005
"""At its 99th percentile a client this late still measures servers, not itself."""


def page(
    summary: Mapping[str, Any],
    outcomes: Sequence[Outcome],
    slo: Slo,
    *,
    pools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """HTML of `summarise`'s figures and the outcomes they are of."""
    run = summary["run"]
    out = Page(f"{run['label']}: replay of {run['started_at'][:16].replace('T', ' ')} UTC")
    out.paragraph(headline(summary))
    for line in doubts(summary):
        out.paragraph(line, "note")
    out.heading("Latency")
    out.paragraph(
        "Seconds, of requests answered in full. Below each figure its interval; ⌃ marks a "
        "percentile that is merely the largest of too few values.",
        "soft",
    )
    out.parts.append(latency_table(summary["all"]))
    out.heading("Goodput and rates")
    share_table(out, groups(summary))
    out.heading("Plots")
    everything = [View("all requests", outcomes)]
    tiers = views_of(_split(outcomes, "tier"))
    drawn = plots.all_of(everything, slo, tiers if len(tiers) > 1 else everything)
    out.figures([*drawn, *plots.pools({"": pools})])
    error_table(out, summary)
    group_tables(out, groups(summary)[1:])
    out.heading("Targets, cost, intervals")
    targets_table(out, summary)
    cost_table(out, summary)
    bootstrap_note(out, summary)
    definitions_table(out)
    provenance(out, run)
    return out.render()


def headline(summary: Mapping[str, Any]) -> str:
    """The run in a few sentences."""
    run, every = summary["run"], summary["all"]
    requests = every["requests"]
    offered = requests["offered"]
    if not offered:
        return f"No request was offered to {run['url']}, so there are no figures."
    load = (
        f"at {number(run['rate'])} requests a second (open loop)"
        if run["loop"] == "open" and run["rate"]
        else f"in {'an open' if run['loop'] == 'open' else 'a closed'} loop"
    )
    text = (
        f"{offered:,} requests were offered to {run['url']} {load} over "
        f"{number(summary['duration_s'])} s. {requests['ok']:,} were answered in full, "
        f"{requests['shed']:,} shed, {requests['error'] + requests['timeout']:,} failed or timed "
        f"out"
    )
    if requests["disconnected"]:
        text += f", {requests['disconnected']:,} were left by the client as planned"
    text += f". Goodput is {share(every['goodput'])} of what was offered"
    ttft = every["latency"]["ttft_scheduled_s"]
    if ttft:
        text += (
            f"; the first token came within {seconds(ttft['p50']['value'])} for half of the "
            f"answers and within {seconds(ttft['p99']['value'])} for 99 % of them"
        )
    return text + "."


def doubts(summary: Mapping[str, Any]) -> list[str]:
    """What a reader should know before believing the figures."""
    run, every = summary["run"], summary["all"]
    lines: list[str] = []
    if run["end"] is None:
        lines.append("The run was cut off: what was in flight then is in no figure.")
    elif run["end"]["interrupted"]:
        lines.append(
            f"The run was interrupted: {summary['num_unfinished']:,} requests of the schedule have "
            "no outcome. Long answers that were under way are missing, so latencies look better "
            "than they were."
        )
    late = summary["lateness_s"]
    if late and late["p99"]["value"] > _LATE_S:
        lines.append(
            f"The client was late: p99 of its schedule lateness is {seconds(late['p99']['value'])}."
            " Figures from sending are too good by as much; figures from schedule are not."
        )
    used = summary["client"]["cpu_share"]
    if used is not None and used > 0.8 * summary["client"]["processes"]:
        lines.append(
            f"The client used {used:.2f} CPUs in {summary['client']['processes']} processes: it "
            "was near its own limit, and times may be its own."
        )
    count = every["requests"]["ok"]
    if 0 < count < 100:
        lines.append(f"Only {count} answers: every p99 below is the slowest one.")
    return lines


def groups(summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """All requests first, then the tiers, tenants and sources where there is more than one."""
    parts: list[tuple[str, Mapping[str, Any]]] = [("All requests", summary["all"])]
    for kind in ("tier", "tenant", "source"):
        members = summary[f"{kind}s"]
        if len(members) > 1:
            parts += [(f"{kind.capitalize()} {name}", group) for name, group in members.items()]
    return parts


def group_tables(out: Page, parts: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    if not parts:
        return
    out.heading("Latency by tier, tenant and source")
    for name, group in parts:
        out.folded(name, latency_table(group))


def latency_table(group: Mapping[str, Any]) -> str:
    rows: list[Row] = []
    for each in LATENCIES:
        figures = group["latency"][each.key]
        if figures is None:
            rows.append([each.title, "0", *(["–"] * (len(PERCENTS) + 2))])
            continue
        row: list[str | Cell] = [each.title, f"{figures['count']:,}", figure_cell(figures["mean"])]
        row += [figure_cell(figures[percent_key(percent)]) for percent in PERCENTS]
        rows.append([*row, number(figures["max"])])
    return table(
        ["", "n", "mean", *(percent_key(percent) for percent in PERCENTS), "largest"], rows
    )


def figure_cell(figure: Mapping[str, Any], scale: float = 1.0) -> Cell:
    """A value with its interval below it."""
    value, low, high = figure["value"], figure.get("low"), figure.get("high")
    if value is None:
        return Cell("–")
    text = number(scale * value) + (" ⌃" if figure.get("is_max") else "")
    if low is None or high is None:
        return Cell(text)
    return Cell(text, f"{number(scale * low)} to {number(scale * high)}")


def share_table(out: Page, parts: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    rows: list[Row] = []
    for name, group in parts:
        requests = group["requests"]
        rows.append(
            [
                name,
                f"{requests['offered']:,}",
                f"{requests['ok']:,}",
                figure_cell(group["goodput"], 100),
                _rate(group["goodput"]["requests_per_s"]),
                figure_cell(group["shed_share"], 100),
                figure_cell(group["failed_share"], 100),
                figure_cell(group["cached_share"], 100),
                figure_cell(group["predicted_cached_share"], 100),
                _rate(group["requests_per_s"]),
                _rate(group["input_tokens_per_s"]),
                _rate(group["output_tokens_per_s"]),
                f"{requests['retries']:,}",
            ]
        )
    head = ["", "offered", "answered", "goodput %", "good requests/s", "shed %", "failed %"]
    head += ["cached %", "predicted %", "requests/s", "tokens in/s", "tokens out/s", "retries"]
    out.table(head, rows)


def error_table(out: Page, summary: Mapping[str, Any]) -> None:
    if not summary["errors"]:
        return
    out.heading("What went wrong")
    out.words(
        ["Result", "Status", "Example", "Code", "Requests"],
        [
            [
                error["result"],
                str(error["status"] or "–"),
                error["example"] or "–",
                error["code"] or "–",
                str(error["count"]),
            ]
            for error in summary["errors"]
        ],
        broad=True,
    )


def targets_table(out: Page, summary: Mapping[str, Any]) -> None:
    rows: list[Row] = [
        [tier, *("any" if value is None else number(value) for value in targets.values())]
        for tier, targets in summary["slo"].items()
    ]
    if rows:
        out.table(["tier", "TTFT, s", "ITL, s", "end to end, s"], rows, caption="Targets")


def cost_table(out: Page, summary: Mapping[str, Any]) -> None:
    cost = summary["cost"]
    if cost is None:
        out.paragraph("No prices were given, so nothing is said of cost.", "soft")
        return
    currency = cost["currency"]
    rows: list[Row] = [
        [item["name"], number(item["per_hour"]), number(item["units"]), number(item["replicas"])]
        for item in cost["prices"]["items"]
    ]
    out.table(["", f"{currency} an hour", "units", "replicas"], rows, caption="Prices as stated")
    out.table(
        ["", currency],
        [
            ["the run", number(cost["spent"])],
            ["a million tokens, in and out", _rate(cost["per_million_tokens"])],
            ["a million output tokens", _rate(cost["per_million_output_tokens"])],
            [
                "a million output tokens within targets",
                _rate(cost["per_million_good_output_tokens"]),
            ],
        ],
        caption="Cost",
    )


def bootstrap_note(out: Page, summary: Mapping[str, Any]) -> None:
    boot = summary["bootstrap"]
    out.paragraph(
        f"Intervals: {boot['level']:.0%} of {boot['num_resamples']} resamples, seed "
        f"{boot['seed']}, blocks of {summary['all']['block_length']} requests on average.",
        "soft",
    )


def definitions_table(out: Page) -> None:
    out.heading("Definitions")
    out.words(
        ["Figure", "Unit", "What it is", "Elsewhere"],
        [[each.title, each.unit, each.text, each.elsewhere] for each in DEFINITIONS],
        broad=True,
    )


def provenance(out: Page, run: Mapping[str, Any]) -> None:
    """Enough to do it again."""
    out.heading("How this was measured")
    if run["command"]:
        out.subheading("Command")
        out.code(" ".join(run["command"]))
    plain = ("label", "started_at", "url", "endpoint", "stream", "loop", "seed", "num_requests")
    plain += ("rate", "length_factor", "time_factor")
    rows = [[key.replace("_", " "), _plain(run[key])] for key in plain]
    if end := run["end"]:
        rows += [[key.replace("_", " "), _plain(value)] for key, value in end.items()]
    out.words(["Setting", "Value"], [*rows, *_flat(run["settings"])])
    for key, title in (("versions", "Versions"), ("machine", "Machine of the client")):
        if run[key]:
            out.subheading(title)
            out.words(["", ""], _flat(run[key]))
    for key, title in (("sources", "Traces"), ("mix", "Mix"), ("server", "Server")):
        if run[key]:
            out.subheading(title)
            out.code(orjson.dumps(run[key], option=orjson.OPT_INDENT_2).decode())


def share(figure: Mapping[str, Any]) -> str:
    """`92.5 % (90.1 to 94.7)`."""
    if figure["value"] is None:
        return "not known"
    text = f"{100 * figure['value']:.1f} %"
    if figure["low"] is not None:
        text += f" ({100 * figure['low']:.1f} to {100 * figure['high']:.1f})"
    return text


def seconds(value: float) -> str:
    """In the unit that people say."""
    return f"{number(1000 * value)} ms" if value < 1 else f"{number(value)} s"


def _rate(value: float | None) -> str:
    return "–" if value is None else number(value)


def _plain(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}"
    return orjson.dumps(value).decode()


def _flat(values: Mapping[str, Any]) -> list[list[str]]:
    return [[key.replace("_", " "), _plain(value)] for key, value in values.items()]


def _split(outcomes: Sequence[Outcome], field: str) -> dict[str, list[Outcome]]:
    out: dict[str, list[Outcome]] = {}
    for each in outcomes:
        out.setdefault(getattr(each, field), []).append(each)
    return dict(sorted(out.items()))
