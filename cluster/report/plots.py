"""The plots of a report: each draws one or several views, such as tiers of a run or runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.replay.outcome import Outcome
from cluster.report import courses
from cluster.report.chart import NUM_COLOURS, Axis, Guide, Series, Stack, chart, number, stacked
from cluster.report.figures import Slo, goodput_by_multiple, itl_s
from cluster.report.page import figure
from cluster.report.resample import Floats, nearest_rank

ValueOf = Callable[[Outcome], "float | None"]


@dataclass(frozen=True, slots=True)
class View:
    """Requests that are drawn in one colour."""

    name: str
    outcomes: Sequence[Outcome]
    colour: int = 0


def views_of(groups: Mapping[str, Sequence[Outcome]]) -> list[View]:
    """One a group; what is beyond the palette is left out, the smallest first."""
    largest = sorted(groups, key=lambda name: -len(groups[name]))[:NUM_COLOURS]
    kept = [name for name in groups if name in largest]
    return [View(name, groups[name], colour) for colour, name in enumerate(kept)]


def ttft_from_schedule(outcome: Outcome) -> float | None:
    if outcome.first_token_s is None:
        return None
    return outcome.first_token_s - outcome.scheduled_s


def e2e_from_schedule(outcome: Outcome) -> float:
    return outcome.end_s - outcome.scheduled_s


def over_time(title: str, label: str, views: Sequence[View], value_of: ValueOf) -> str:
    """A dot a request answered in full, and rolling p50 and p99."""
    series: list[Series] = []
    rows: list[list[str]] = []
    for view in views:
        times, values = _column(view, value_of)
        name = f"{view.name} " if len(views) > 1 else ""
        moments, (p50, p99) = courses.rolling(times, values, (50.0, 99.0))
        series.append(
            Series(
                name=f"{name}request",
                xs=times.tolist(),
                ys=values.tolist(),
                kind="scatter",
                colour=view.colour,
            )
        )
        for label_of, ys, dash in (("p50", p50, 0), ("p99", p99, 1)):
            series.append(
                Series(
                    name=f"{name}{label_of}",
                    xs=moments.tolist(),
                    ys=ys.tolist(),
                    colour=view.colour + (1 if len(views) == 1 else 0),
                    dash=dash,
                )
            )
        for i in range(0, len(moments), 6):
            rows.append([view.name, number(moments[i]), number(p50[i]), number(p99[i])])
    caption = (
        "Each dot is a request, at the time it was due. Lines are percentiles in a window of a "
        "twelfth of the run; with fewer than 100 requests in it the p99 is the slowest of them."
    )
    svg = chart(
        title,
        f"{label} of each request over the time of the run, with rolling p50 and p99.",
        series,
        x=Axis(label="time in the run, s", low=0.0, tight=True),
        y=Axis(label=label, log=True),
    )
    return figure(title, svg, caption, ["", "time s", "p50", "p99"], rows)


def cumulative(title: str, label: str, views: Sequence[View], value_of: ValueOf) -> str:
    """The share of requests that were at least as quick."""
    series: list[Series] = []
    rows: list[list[str]] = []
    for view in views:
        _, values = _column(view, value_of)
        xs, ys = courses.cumulative(values)
        name = f"{view.name} (n = {len(values)})"
        series.append(_cdf_line(name, xs, ys, view.colour))
        if len(values):
            rows.append([name, *_percentiles(values)])
    svg = chart(
        title,
        f"Share of requests answered within a {label}.",
        series,
        x=Axis(label=label, log=True),
        y=Axis(label="share of requests answered", low=0.0, high=1.0),
        guides=[Guide(name="p99", y=0.99)] if any(rows) else [],
    )
    caption = "A curve further left is quicker. Only requests answered in full."
    return figure(title, svg, caption, ["", "p50", "p95", "p99", "p99.9"], rows)


def tail(title: str, label: str, views: Sequence[tuple[str, Floats, int]]) -> str:
    """The share that is slower, on a scale where each tenth is as wide: (name, values, colour)."""
    series: list[Series] = []
    rows: list[list[str]] = []
    for name, values, colour in views:
        values = values[values > 0]
        xs, ys = courses.cumulative(values)
        rest = 1.0 - ys
        shown = f"{name} (n = {len(values)})"
        # The largest has nobody above it, and zero has no place on this scale.
        series.append(_cdf_line(shown, xs[:-1], rest[:-1], colour))
        if len(values):
            rows.append([shown, *_percentiles(values)])
    most = max((len(values) for _, values, _ in views), default=1)
    svg = chart(
        title,
        f"Share that is slower than a {label}, on a logarithmic scale: the tail.",
        series,
        x=Axis(label=label, log=True),
        y=Axis(
            label="share slower", log=True, low=10.0 ** -np.ceil(np.log10(max(most, 10))), high=1
        ),
        guides=[Guide(name="p99", y=0.01)] if rows else [],
    )
    caption = "Lower and further left is better. Where a curve crosses 0.01 is its p99."
    return figure(title, svg, caption, ["", "p50", "p95", "p99", "p99.9"], rows)


def goodput(views: Sequence[View], slo: Slo) -> str:
    """Share of everything offered that met all targets, had these been tighter or looser."""
    title = "Goodput against targets"
    series: list[Series] = []
    rows: list[list[str]] = []
    for view in views:
        points = goodput_by_multiple(view.outcomes, slo)
        if not points:
            continue
        multiples = [point["multiple"] for point in points]
        shares = [point["share"] for point in points]
        series.append(
            Series(
                name=view.name,
                xs=multiples,
                ys=shares,
                colour=view.colour,
                dash=view.colour,
                marks=True,
            )
        )
        rows += [[view.name, number(m), f"{s:.3f}"] for m, s in zip(multiples, shares, strict=True)]
    svg = chart(
        title,
        "Share of offered requests that met all targets of their tier, by multiple of the targets.",
        series,
        x=Axis(label="targets multiplied by", log=True),
        y=Axis(label="share of requests offered", low=0.0, high=1.0),
    )
    caption = (
        "At 1 the targets are those stated with the intervals. What was shed or failed is a "
        "miss everywhere, "
        "so a curve that ends below 1 shows them."
    )
    return figure(title, svg, caption, ["", "multiple", "share"], rows)


def phases(views: Sequence[View]) -> str:
    """Where the time to the first token went: on average, and for the slowest hundredth."""
    title = "Phases of the time to the first token"
    names: list[str] = []
    for view in views:
        for each in view.outcomes:
            names += [name for name in each.phases if name not in names]
    stacks: list[Stack] = []
    rows: list[list[str]] = []
    for view in views:
        told = [
            each
            for each in view.outcomes
            if each.result == "ok" and each.phases and each.first_token_s is not None
        ]
        if not told:
            continue
        told.sort(key=_attempt_ttft_s)
        slowest = told[nearest_rank(len(told), 99) :]
        prefix = f"{view.name} " if len(views) > 1 else ""
        for name, those in ((f"{prefix}mean", told), (f"{prefix}slowest 1 %", slowest)):
            parts = [
                float(np.mean([each.phases.get(phase, 0.0) for each in those])) for phase in names
            ]
            ttft = float(np.mean([_attempt_ttft_s(each) for each in those]))
            parts.append(max(0.0, ttft - sum(parts)))
            stacks.append(Stack(name=name, parts=parts))
            rows.append([f"{name} (n = {len(those)})", *map(number, parts), number(sum(parts))])
    shown = [*names, "elsewhere"]
    svg = stacked(
        title,
        "Mean seconds in each phase up to the first token, of all requests and of the slowest 1 %.",
        stacks,
        shown,
        x=Axis(label="seconds from sending to the first token"),
    )
    caption = (
        "As the server tells in the head of each answer. Elsewhere is the rest of what the client "
        "saw: network, proxy, and the client itself."
    )
    return figure(title, svg, caption, ["", *shown, "total"], rows)


def flight(views: Sequence[View]) -> str:
    """Requests under way, and those of them that waited in the server's queue."""
    title = "Requests in flight and in the queue"
    series: list[Series] = []
    rows: list[list[str]] = []
    for view in views:
        begins = np.array([each.sent_s for each in view.outcomes])
        ends = np.array([each.end_s for each in view.outcomes])
        prefix = f"{view.name}, " if len(views) > 1 else ""
        spans = [("in flight", (begins, ends), 0)]
        if len((queue := courses.queue_spans(view.outcomes))[0]):
            spans.append(("in the server's queue", queue, 1))
        for name, (low, high), dash in spans:
            times, levels = courses.in_flight(low, high)
            if not len(times):
                continue
            widths = np.diff(times, append=times[-1])
            mean = float((levels * widths).sum() / max(float(widths.sum()), 1e-9))
            rows.append([f"{prefix}{name}", f"{mean:.2f}", f"{levels.max():.0f}"])
            times, levels = courses.thinned(times, levels)
            series.append(
                Series(
                    name=f"{prefix}{name}",
                    xs=times.tolist(),
                    ys=levels.tolist(),
                    kind="step",
                    colour=view.colour if len(views) > 1 else dash,
                    dash=dash,
                )
            )
    svg = chart(
        title,
        "How many requests were under way, and how many of them waited in the queue, over time.",
        series,
        x=Axis(label="time in the run, s", low=0.0, tight=True),
        y=Axis(label="requests", low=0.0),
    )
    caption = (
        "A level that only grows is a load above capacity. Who was in the queue follows from the "
        "phases of requests that were answered."
    )
    return figure(title, svg, caption, ["", "mean", "most"], rows)


def errors(views: Sequence[View]) -> str:
    """How many requests ended otherwise than in full, by time."""
    title = "Requests not answered in full"
    span = (0.0, max((each.end_s for view in views for each in view.outcomes), default=1.0))
    edges = np.linspace(*span, 41)
    series: list[Series] = []
    rows: list[list[str]] = []
    kinds = ("shed", "error", "timeout", "disconnected")
    for view in views:
        for dash, kind in enumerate(kinds):
            ends = np.array([each.end_s for each in view.outcomes if each.result == kind])
            if not len(ends):
                continue
            counts = courses.counts_over_time(ends, span)
            name = f"{view.name}, {kind}" if len(views) > 1 else kind
            rows.append(
                [name, str(len(ends)), number(float(ends.min())), number(float(ends.max()))]
            )
            series.append(
                Series(
                    name=name,
                    xs=edges.tolist(),
                    ys=[*counts.tolist(), float(counts[-1])],
                    kind="step",
                    colour=view.colour if len(views) > 1 else dash,
                    dash=dash,
                )
            )
    width = (span[1] - span[0]) / 40
    svg = chart(
        title,
        "How many requests were shed, failed, timed out or were left, over time.",
        series,
        x=Axis(label="time in the run, s", low=0.0, tight=True),
        y=Axis(label=f"requests in {number(width)} s", low=0.0),
    )
    caption = "By when they ended." if rows else "Every request was answered in full."
    return figure(title, svg, caption, ["", "requests", "first, s", "last, s"], rows)


def lateness(views: Sequence[View]) -> str:
    """How late the client was."""
    title = "Schedule lateness of the client"
    series: list[Series] = []
    rows: list[list[str]] = []
    for view in views:
        times = np.array([each.scheduled_s for each in view.outcomes])
        late = np.array([1000 * each.lateness_s for each in view.outcomes])
        series.append(
            Series(
                name=view.name,
                xs=times.tolist(),
                ys=late.tolist(),
                kind="scatter",
                colour=view.colour,
            )
        )
        if len(late):
            rows.append([view.name, *_percentiles(late)])
    svg = chart(
        title,
        "How many milliseconds after its time each request was sent.",
        series,
        x=Axis(label="time in the run, s", low=0.0, tight=True),
        y=Axis(label="late by, ms", low=0.0),
    )
    caption = (
        "The client's own part, no fault of the server's. Figures from schedule include it, "
        "figures from sending do not."
    )
    return figure(title, svg, caption, ["ms", "p50", "p95", "p99", "p99.9"], rows)


def pools(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """State of the replicas over time, by run: samples of `pools.PoolSampler`."""
    drawn: list[str] = []
    for key, title, label in (
        ("running", "Requests running in the engines", "requests"),
        ("waiting", "Requests waiting in the engines", "requests"),
        ("kv_usage", "KV memory in use", "share of blocks"),
    ):
        lines: dict[str, tuple[list[float], list[float]]] = {}
        for run, taken in samples.items():
            for sample in taken:
                for replica, value in sample.get(key, {}).items():
                    name = f"{run} {replica}".strip()
                    xs, ys = lines.setdefault(name, ([], []))
                    xs.append(sample["at_s"])
                    ys.append(value)
        names = sorted(lines)[:NUM_COLOURS]
        if not names:
            continue
        series: list[Series] = []
        for i, name in enumerate(names):
            xs, ys = courses.averaged(np.array(lines[name][0]), np.array(lines[name][1]))
            series.append(Series(name=name, xs=xs.tolist(), ys=ys.tolist(), colour=i, dash=i))
        rows = [[n, number(float(np.mean(lines[n][1]))), number(max(lines[n][1]))] for n in names]
        svg = chart(
            title,
            f"{title} over time, one line a replica.",
            series,
            x=Axis(label="time in the run, s", low=0.0, tight=True),
            y=Axis(label=label, low=0.0),
        )
        caption = (
            "From the server's metrics, read while the run went on; means of neighbouring samples."
        )
        drawn.append(figure(title, svg, caption, ["", "mean", "most"], rows))
    return drawn


def chunk_gaps(outcomes: Sequence[Outcome]) -> Floats:
    """Every gap between two chunks of answers that were whole, in seconds."""
    gaps = [np.diff(np.array(e.chunk_times)) for e in outcomes if e.result == "ok"]
    return np.concatenate(gaps) if gaps else np.zeros(0)


def values(outcomes: Sequence[Outcome], value_of: ValueOf) -> Floats:
    return _column(View("", outcomes), value_of)[1]


def all_of(views: Sequence[View], slo: Slo, tiers: Sequence[View]) -> list[str]:
    """Every plot that outcomes alone can give; what is by tier for `tiers`."""
    ttft, e2e = ttft_from_schedule, e2e_from_schedule
    return [
        over_time("TTFT over time", "TTFT from schedule, s", views, ttft),
        cumulative("TTFT, cumulative", "TTFT from schedule, s", tiers, ttft),
        tail(
            "TTFT, the tail",
            "TTFT from schedule, s",
            [(view.name, values(view.outcomes, ttft), view.colour) for view in tiers],
        ),
        tail(
            "Gaps between chunks, the tail",
            "gap between neighbouring chunks, s",
            [(view.name, chunk_gaps(view.outcomes), view.colour) for view in tiers],
        ),
        over_time("ITL over time", "ITL of the request, s", views, itl_s),
        cumulative("ITL, cumulative", "ITL of the request, s", tiers, itl_s),
        over_time("End to end over time", "end to end from schedule, s", views, e2e),
        cumulative("End to end, cumulative", "end to end from schedule, s", tiers, e2e),
        goodput(tiers, slo),
        phases(views),
        flight(views),
        errors(views),
        lateness(views),
    ]


def _column(view: View, value_of: ValueOf) -> tuple[Floats, Floats]:
    """When each was due, and its value, of requests answered in full."""
    pairs = [
        (each.scheduled_s, value)
        for each in view.outcomes
        if each.result == "ok" and (value := value_of(each)) is not None
    ]
    return (
        np.array([time for time, _ in pairs], dtype=np.float64),
        np.array([value for _, value in pairs], dtype=np.float64),
    )


def _cdf_line(name: str, xs: Floats, ys: Floats, colour: int) -> Series:
    return Series(
        name=name, xs=xs.tolist(), ys=ys.tolist(), kind="step", colour=colour, dash=colour
    )


def _percentiles(values: Floats) -> list[str]:
    ordered = np.sort(values)
    return [number(float(ordered[nearest_rank(len(ordered), p)])) for p in (50, 95, 99, 99.9)]


def _attempt_ttft_s(outcome: Outcome) -> float:
    """Of the attempt that was answered: phases are its own."""
    assert outcome.first_token_s is not None, "only asked of requests that have one"
    return outcome.first_token_s - outcome.attempt_s
