"""Who leads each model's two admission queues, as a gateway's `/metrics` says it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_SERIES: Final = re.compile(r"tailrace_queue_leads\{(.*)\} (\S+)")
_LABEL: Final = re.compile(r'(\w+)="([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """One model's, by the names of their actors, as far as they report to that gateway."""

    model: str
    leading: tuple[str, ...]
    """Two for a moment after one took over: what the dead one said last is kept for ten seconds."""

    standing_by: tuple[str, ...]

    def __str__(self) -> str:
        if not self.leading:
            leads = "no queue leads"
        elif len(self.leading) == 1:
            leads = f"{self.leading[0]} leads"
        else:
            leads = f"one of {' and '.join(self.leading)} has just taken over"
        others = ", ".join(f"{name} stands by" for name in self.standing_by)
        return f"{leads}, {others or 'none stands by'}"


def from_metrics(text: str) -> dict[str, Queues]:
    """By model."""
    leads: dict[str, dict[str, bool]] = {}
    for line in text.splitlines():
        match = _SERIES.fullmatch(line)
        labels: dict[str, str] = dict(_LABEL.findall(match[1])) if match else {}
        if match and labels.keys() >= {"model", "replica"}:
            leads.setdefault(labels["model"], {})[labels["replica"]] = float(match[2]) == 1
    return {
        model: Queues(
            model=model,
            leading=tuple(name for name in sorted(queues) if queues[name]),
            standing_by=tuple(name for name in sorted(queues) if not queues[name]),
        )
        for model, queues in leads.items()
    }
