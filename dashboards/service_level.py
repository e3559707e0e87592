"""How fast each tier spends its error budget, over the windows that alerts and panels share.

A burn rate of 1 spends exactly the budget. The pairs of windows and factors are those of the SRE
Workbook, chapter 5: the long window says that it matters, the short one that it still goes on.
"""

from __future__ import annotations

from dashboards.rules import Group, Recording

WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
LABELS = ("job", "model", "tier", "slo")


def burn(window: str) -> str:
    """Name of the recorded burn rate over `window`."""
    return f"tailrace:slo_burn:rate{window}"


def misses(window: str) -> str:
    """Name of the recorded share of missed targets over `window`."""
    return f"tailrace:slo_misses:ratio_rate{window}"


def service_level() -> Group:
    """The recording rules."""
    by = ", ".join(LABELS)
    judged = "tailrace_slo_requests_total"
    recordings: list[Recording] = []
    for window in WINDOWS:
        recordings.append(
            Recording(
                record=misses(window),
                expr=(
                    f'sum by ({by}) (rate({judged}{{met="false"}}[{window}]))\n'
                    f"/\n(sum by ({by}) (rate({judged}[{window}])) > 0)"
                ),
                labels=LABELS,
            )
        )
        recordings.append(
            Recording(
                record=burn(window),
                expr=(
                    f"{misses(window)}\n/ on (job, tier) group_left ()\n"
                    "(1 - max by (job, tier) (tailrace_slo_objective_ratio))"
                ),
                labels=LABELS,
            )
        )
    return Group(name="tailrace-service-level", interval="10s", recordings=tuple(recordings))
