"""Who asks the admission queue when, and what the queue's own rules make of it at best."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.admission.queue import Action, AdmissionQueue, Granted, Refused
from deployments.admission.tiers import TierRule, TierTable
from deployments.link.messages import Acquire, Report

INTERACTIVE, BATCH = "priority", "batch"

TIERS = TierTable(
    [
        TierRule(name=INTERACTIVE, rank=0, preemptible=False),
        # Not preemptible: with preemption nobody urgent ever waits, and there is no order to judge.
        TierRule(name=BATCH, rank=30, preemptible=False),
    ],
    revision=1,
)


@dataclass(frozen=True, slots=True)
class Caller:
    """One request: when it comes and how it is queued."""

    at_s: float
    tier: str

    @property
    def rank(self) -> int:
        return TIERS.rules[self.tier].rank


@dataclass(frozen=True, slots=True)
class Course:
    """How a load went. Times are seconds since its beginning, by caller."""

    started_s: tuple[float, ...]
    ended_s: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        return max(self.ended_s)

    def worst_start_s(self, callers: Sequence[Caller], tier: str) -> float:
        """Longest wait of one tier from its arrival to its start."""
        return max(
            started - caller.at_s
            for caller, started in zip(callers, self.started_s, strict=True)
            if caller.tier == tier
        )


def mixed_callers(
    batch: int = 16, interactive: int = 4, *, every_s: float = 0.01
) -> tuple[Caller, ...]:
    """All batch at once, then interactive ones one after the other, `every_s` apart."""
    return (
        *(Caller(0.0, BATCH) for _ in range(batch)),
        *(Caller(every_s * (i + 1), INTERACTIVE) for i in range(interactive)),
    )


def report_of(alive: Sequence[tuple[int, int, int]], slots: int) -> Report:
    """What a decode replica says that runs these: `(epoch, grant id, rank)` each."""
    by_rank: dict[int, int] = {}
    for _, _, rank in alive:
        by_rank[rank] = by_rank.get(rank, 0) + 1
    return Report(
        replica_id="d1",
        slots=slots,
        capacity_tokens=1_000_000_000,
        grants=tuple((epoch, grant_id, 1) for epoch, grant_id, _ in alive),
        alive=tuple((rank, None, n, n) for rank, n in sorted(by_rank.items())),
    )


def best_course(callers: Sequence[Caller], *, slots: int, service_s: float) -> Course:
    """The same load on the queue's decision core with a clock of its own: messages take no time,
    and requests take exactly `service_s`. Raises AssertionError if the queue refuses one."""
    queue = AdmissionQueue(1, tiers=TIERS)
    started: dict[int, float] = {}
    ended: dict[int, float] = {}
    alive: dict[int, tuple[int, int, int]] = {}
    # Ends come before arrivals of the same moment.
    events: list[tuple[float, int, int]] = [(c.at_s, 1, i) for i, c in enumerate(callers)]
    heapq.heapify(events)

    def perform(actions: list[Action], now: float) -> None:
        while actions:
            granted = False
            for action in actions:
                assert not isinstance(action, Refused), f"refused: {action.error}"
                assert isinstance(action, Granted)
                i = action.ticket
                started[i] = now
                alive[i] = (action.grant.epoch, action.grant.grant_id, callers[i].rank)
                heapq.heappush(events, (now + service_s, 0, i))
                granted = True
            actions = reported(now) if granted else []

    def reported(now: float) -> list[Action]:
        return queue.replica_reported(report_of(list(alive.values()), slots), now)

    perform(reported(0.0), 0.0)
    while events:
        now, what, i = heapq.heappop(events)
        if what == 0:
            ended[i] = now
            del alive[i]
            perform(reported(now), now)
            continue
        caller = callers[i]
        acquire = Acquire(
            ticket=i, cost_tokens=10, prompt_tokens=1, priority=caller.rank, tier=caller.tier
        )
        perform(queue.acquire("g1", acquire, now), now)
    order = range(len(callers))
    return Course(tuple(started[i] for i in order), tuple(ended[i] for i in order))
