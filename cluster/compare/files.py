"""The files of a comparison."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.compare.findings import Findings
from cluster.compare.page import page
from cluster.errors import ClusterError
from cluster.report.files import write_json


def write_comparison(
    directory: Path, findings: Findings, title: str, value: Mapping[str, Any]
) -> Path:
    """Write `compare.json`, `figures.csv` and `compare.html`, whose path is returned.

    `value` is what `to_json` made of the findings. Raises ClusterError.
    """
    html = directory / "compare.html"
    try:
        write_json(directory / "compare.json", {"title": title, **value})
        _write_csv(directory / "figures.csv", findings)
        html.write_text(page(findings, title))
    except OSError as error:
        raise ClusterError(f"{directory}: cannot write the report ({error.strerror})") from error
    return html


def _write_csv(path: Path, findings: Findings) -> None:
    """One line a figure, round and pair."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["load", "figure", "unit", "round", "side_a", "a", "side_b", "b"])
        for match in findings.matches:
            for each in match.figures:
                values = zip(each.values_a, each.values_b, strict=True)
                for number, (a, b) in enumerate(values, 1):
                    row = (match.load, each.figure.key, each.figure.unit, number)
                    writer.writerow([*row, match.a, a, match.b, b])
