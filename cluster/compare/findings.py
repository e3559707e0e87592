"""What a contest says: comparisons of every side with the first, and the sentences about them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cluster.compare.contest import Record, Taken, rounds_of
from cluster.compare.pairs import Comparison, compare
from cluster.errors import ClusterError
from cluster.replay.outcome import Outcome, Run
from cluster.report.definitions import as_json as definitions
from cluster.report.figures import Bootstrap, Slo, summarise
from cluster.report.resample import nearest_rank

_FEW = Bootstrap(num_resamples=100)
"""For the figures of single runs: what is compared has intervals of its own."""

_LATE_S = 0.005
_OTHERS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Side B beside side A under one load."""

    load: str
    a: str
    b: str
    figures: tuple[Comparison, ...]
    num_rounds: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that a report shows."""

    record: Record
    sides: tuple[str, ...]
    loads: tuple[str, ...]
    """Those that have a pair."""

    runs: Mapping[str, Mapping[str, Mapping[int, tuple[Taken, Run, list[Outcome]]]]]
    """By load, side and round."""

    matches: tuple[Match, ...]
    slo: Slo

    def match(self, load: str, b: str) -> Match | None:
        """Against the first side."""
        found = (m for m in self.matches if (m.load, m.a, m.b) == (load, self.sides[0], b))
        return next(found, None)


def find(
    record: Record,
    directory: Path,
    slo: Slo,
    *,
    bootstrap: Bootstrap | None = None,
    consecutive: bool = False,
) -> Findings:
    """Compare all sides with the first, and with `consecutive` each with the one before it.

    Raises:
        ClusterError: no pair of runs is complete, or a raw result can't be read.
    """
    bootstrap = bootstrap or Bootstrap()
    runs = rounds_of(record, directory)
    names = tuple(side["name"] for side in record.sides)
    pairs = [(names[0], name) for name in names[1:]]
    if consecutive:
        pairs += itertools.pairwise(names[1:])
    matches: list[Match] = []
    for load in record.loads:
        by_side = runs.get(load, {})
        for a, b in pairs:
            both = sorted(_whole(by_side.get(a, {})) & _whole(by_side.get(b, {})))
            if not both:
                continue
            figures = compare(
                [by_side[a][i][2] for i in both], [by_side[b][i][2] for i in both], slo, bootstrap
            )
            matches.append(Match(load=load, a=a, b=b, figures=tuple(figures), num_rounds=len(both)))
    if not matches:
        raise ClusterError(
            f"{directory}: no two runs under the same load are complete, so there is nothing to "
            "compare; the raw results are kept"
        )
    loads = tuple(load for load in record.loads if any(m.load == load for m in matches))
    return Findings(
        record=record,
        sides=names,
        loads=loads,
        runs=runs,
        matches=tuple(matches),
        slo=slo,
    )


def pooled(rounds: Mapping[int, tuple[Taken, Run, list[Outcome]]]) -> list[Outcome]:
    """Outcomes of all whole rounds of a side."""
    return [each for number in sorted(_whole(rounds)) for each in rounds[number][2]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Where one side is worse than another by more than chance explains."""

    load: str
    loser: str
    winner: str
    figures: tuple[tuple[str, str], ...]
    """Title, and by how much."""


def losses(findings: Findings) -> list[Loss]:
    """By load, in order."""
    found: list[Loss] = []
    for match in findings.matches:
        for loser, winner, verdict in ((match.a, match.b, "better"), (match.b, match.a, "worse")):
            figures = tuple(
                (each.figure.title, change_text(each, turned=verdict == "better"))
                for each in match.figures
                if each.verdict == verdict
            )
            if figures:
                found.append(Loss(load=match.load, loser=loser, winner=winner, figures=figures))
    return found


def sentences(findings: Findings) -> list[str]:
    """Where each side loses, side by side and load by load; what chance explains is left out."""
    found = losses(findings)
    lines: list[str] = []
    for name in findings.sides:
        own = [each for each in found if each.loser == name]
        if not own:
            lines.append(f"{name} loses nowhere by more than chance explains.")
        for loss in own:
            told = "; ".join(f"{title} {change}" for title, change in loss.figures)
            lines.append(f"{name} loses to {loss.winner} at {loss.load}: {told}.")
    return lines


def doubts(findings: Findings) -> list[str]:
    """What a reader should know before believing it."""
    lines: list[str] = []
    if findings.record.interrupted:
        lines.append("The comparison was interrupted; pairs that are not complete are left out.")
    fewest = min(match.num_rounds for match in findings.matches)
    if fewest < 3:
        lines.append(
            f"{fewest} round{'s' if fewest > 1 else ''}: what differs from one start of a server "
            "to the next is hardly in the intervals. Repeat with more --rounds before believing a "
            "small difference."
        )
    figures = sum(len(match.figures) for match in findings.matches)
    lines.append(
        f"{figures} figures were compared at 95 %: about one in twenty is called different by "
        "chance alone."
    )
    late = _worst(findings, _lateness)
    if late and late[0] > _LATE_S:
        lines.append(
            f"The client was late: p99 of {1000 * late[0]:.1f} ms in the run of {late[1]}. Client "
            "and server share this machine, so a server that takes all of it delays the client "
            "too; latencies count from the schedule and include it."
        )
    busy = _worst(findings, lambda taken, _: taken.others_cpu_share)
    if busy and busy[0] > _OTHERS:
        lines.append(
            f"Other work took up to {busy[0]:.0%} of this machine (run of {busy[1]}): repeat on a "
            "quiet one."
        )
    smallest = min(
        len(run[2])
        for by in findings.runs.values()
        for side in by.values()
        for run in side.values()
    )
    if smallest < 100:
        lines.append(
            f"A run has as few as {smallest} requests: its p99 is its slowest one. Ratios of p99 "
            "are then ratios of slowest requests."
        )
    return lines


def to_json(findings: Findings) -> dict[str, Any]:
    """Plain values; nothing is NaN."""
    record = findings.record
    return {
        "sides": record.sides,
        "loads": list(findings.loads),
        "interrupted": record.interrupted,
        "capacity_requests_per_s": record.capacity,
        "ready_s": record.ready_s,
        "matches": [
            {
                "load": match.load,
                "a": match.a,
                "b": match.b,
                "rounds": match.num_rounds,
                "figures": [figure.to_json() for figure in match.figures],
            }
            for match in findings.matches
        ],
        "losses": sentences(findings),
        "doubts": doubts(findings),
        "runs": [
            {
                "side": taken.side,
                "load": taken.load,
                "round": taken.round + 1,
                "file": taken.file,
                "rate": run.rate,
                "requests": len(outcomes),
                "others_cpu_share": taken.others_cpu_share,
                "figures": _of_run(summarise(run, outcomes, findings.slo, bootstrap=_FEW)),
            }
            for by_side in findings.runs.values()
            for rounds in by_side.values()
            for taken, run, outcomes in rounds.values()
        ],
        "definitions": definitions(),
    }


def _of_run(summary: Mapping[str, Any]) -> dict[str, Any]:
    kept = ("duration_s", "complete", "all", "tiers", "lateness_s", "client", "errors")
    return {key: summary[key] for key in kept}


def change_text(comparison: Comparison, *, turned: bool = False) -> str:
    """`1.42 × (1.10 to 1.90)`, or points for shares; of A beside B with `turned`."""
    change, low, high = comparison.change, comparison.low, comparison.high
    if change is None:
        return "–"
    if comparison.figure.how == "ratio":
        values = [change, low, high]
        if turned:
            values = [None if each is None else 1 / each for each in (change, high, low)]
        shown = ["–" if each is None else f"{each:.2f}" for each in values]
        return f"{shown[0]} ×" + ("" if low is None else f" ({shown[1]} to {shown[2]})")
    sign = -1 if turned else 1
    values = [change, low, high] if not turned else [change, high, low]
    points = ["–" if each is None else f"{sign * 100 * each:+.1f}" for each in values]
    return f"{points[0]} points" + ("" if low is None else f" ({points[1]} to {points[2]})")


def _whole(rounds: Mapping[int, tuple[Taken, Run, list[Outcome]]]) -> set[int]:
    return {
        i for i, (_, run, _) in rounds.items() if run.end is not None and not run.end.interrupted
    }


def _worst(
    findings: Findings, value_of: Callable[[Taken, list[Outcome]], float | None]
) -> tuple[float, str] | None:
    """The largest value of any run, and whose it is."""
    found = [
        (value, f"{taken.side} at {taken.load}")
        for by_side in findings.runs.values()
        for rounds in by_side.values()
        for taken, _, outcomes in rounds.values()
        if (value := value_of(taken, outcomes)) is not None
    ]
    return max(found, default=None)


def _lateness(_: Taken, outcomes: list[Outcome]) -> float | None:
    late = np.sort([each.lateness_s for each in outcomes])
    return float(late[nearest_rank(len(late), 99)]) if len(late) else None
