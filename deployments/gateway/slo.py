"""Whether a request met the targets of its tier: one verdict a kind of target, or none."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from deployments.gateway.tiers import Targets


class Ending(Enum):
    """How a request ended, as far as the service answers for it."""

    ANSWERED = "answered"
    FAILED = "failed"
    """By us: 5xx, no room, out of time."""

    LEFT = "left"
    """The client went away."""

    REFUSED = "refused"
    """For a fault of its own: nothing to judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What was measured of one request, in seconds. None: it did not get that far."""

    duration_s: float
    queue_s: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    """Mean gap between tokens; also None where there was only one."""


def verdicts(targets: Targets, ending: Ending, timing: Timing) -> dict[str, bool]:
    """By kind of target (`engine.metrics.SLO_KINDS`) whether it was met. Kinds without a target, or
    of which nothing can be said, are left out.

    A request that failed missed whatever it had not met by then. A client that left says nothing
    about what it did not wait for, unless the target had passed before it left.
    """
    found: dict[str, bool] = {}
    if ending is Ending.REFUSED:
        return found
    answered, failed = ending is Ending.ANSWERED, ending is Ending.FAILED
    for kind, target_s, measured_s in (
        ("queue", targets.queue_s, timing.queue_s),
        ("ttft", targets.ttft_s, timing.ttft_s),
        ("e2e", targets.e2e_s, timing.duration_s if answered else None),
    ):
        if target_s is None:
            continue
        if measured_s is not None:
            found[kind] = measured_s <= target_s
        elif failed or timing.duration_s > target_s:
            found[kind] = False
    if targets.itl_s is not None:
        if timing.itl_s is not None:
            found["itl"] = timing.itl_s <= targets.itl_s
        elif failed:
            found["itl"] = False
    return found
