"""What `bench engine --peers` found, for people: lines for a terminal, one HTML file."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from cluster.bench.engine import RATES
from cluster.bench.peers.contest import OURS, TRAFFIC
from cluster.report.chart import Axis, Stack, stacked
from cluster.report.page import Cell, Page, escape, figure

_LABELS = {
    "prefill_512_tok_s": "prefill of 512 tokens, tokens a second",
    "decode_1_tok_s": "decode at batch 1, tokens a second",
    "decode_16_tok_s": "decode at batch 16, tokens a second",
    "requests_per_s": "highest rate of 256 tokens in, 64 out, requests a second",
    "itl_p99_ms": "p99 between a stream's tokens at half the first side's highest rate, ms",
}
_LESS_IS_BETTER = ("itl_p99_ms",)
_KINDS = {"served": "Served over HTTP", "offline": "Without a server"}


def table(result: Mapping[str, Any]) -> list[str]:
    """For a terminal: every ratio, those that we lose included."""
    lines = [f"others' share of the CPUs {100 * result['others_cpu_share']:.0f} %"]
    for name, value in result.items():
        if name.startswith("ratio."):
            lines.append(f"{name.removeprefix('ratio.'):44}{value:8.2f}  {_verdict(name, value)}")
    return lines


def page(result: Mapping[str, Any]) -> str:
    """Self-contained HTML."""
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    out = Page(f"{result['model']}: Tailrace's engine beside others, {when}")
    out.paragraph(
        "Medians of rounds in which every side had its turn; ratios are of one round each, so a "
        "machine whose speed drifts is unkind to all. Ours over theirs: above 1 we are ahead, but "
        "for times, where below 1 is."
    )
    for kind, label in _KINDS.items():
        medians = result["medians"][kind]
        if len(medians) < 2:
            continue
        out.heading(label)
        out.table(("side", *(_LABELS[n] for n in _figures(medians))), _rows(result, kind))
        out.figures([_plot(name, medians) for name in _figures(medians)])
    out.heading("How it was measured")
    out.bullets(
        [
            f"{result['threads']} threads, {platform.machine()}, {_processor()}",
            f"tailrace {_version('tailrace')}, torch {_version('torch')}, "
            f"Python {platform.python_version()}",
            f"others had at most {100 * result['others_cpu_share']:.0f} % of the CPUs in a turn",
        ]
    )
    out.code(" ".join(sys.argv))
    sides = json.dumps(result["sides"], indent=1)
    out.folded("The sides, whole", f"<pre><code>{escape(sides)}</code></pre>")
    out.folded(
        "Every round", f"<pre><code>{escape(json.dumps(result['rounds'], indent=1))}</code></pre>"
    )
    return out.render()


def _figures(medians: Mapping[str, Mapping[str, float]]) -> list[str]:
    there = {name for rows in medians.values() for name in rows}
    return [name for name in (*RATES, *TRAFFIC) if name in there]


def _rows(result: Mapping[str, Any], kind: str) -> list[list[str | Cell]]:
    medians = result["medians"][kind]
    rows: list[list[str | Cell]] = []
    for side, figures in medians.items():
        row: list[str | Cell] = [side]
        for name in _figures(medians):
            value = figures.get(name)
            key = f"ratio.{side.replace('.', '_')}.{name}"
            if value is None:
                row.append("–")
            elif side.startswith(OURS) or key not in result:
                row.append(f"{value:g}")
            else:
                ahead = _ahead(key, result[key])
                below = f"ours {result[key]:g} ×"
                row.append(Cell(f"{value:g}", below, "good" if ahead else "bad"))
        rows.append(row)
    return rows


def _plot(name: str, medians: Mapping[str, Mapping[str, float]]) -> str:
    stacks = [
        Stack(name=side, parts=(rows[name],)) for side, rows in medians.items() if name in rows
    ]
    label = _LABELS[name]
    svg = stacked(label, f"One bar a side: {label}.", stacks, ("median",), x=Axis(label=label))
    better = "shorter" if name in _LESS_IS_BETTER else "longer"
    return figure(label, svg, f"The {better} the bar, the better.", (), ())


def _ahead(name: str, ratio: float) -> bool:
    return ratio <= 1 if name.endswith(_LESS_IS_BETTER) else ratio >= 1


def _verdict(name: str, ratio: float) -> str:
    return "ahead" if _ahead(name, ratio) else "behind"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "?"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            names = [line.partition(":")[2].strip() for line in info if "model name" in line]
            return names[0] if names else platform.processor()
    except OSError:
        return platform.processor()
