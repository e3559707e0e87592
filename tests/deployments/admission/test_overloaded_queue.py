"""The pure queue while more is asked than its slots can do: open loops on a clock of their own."""

import heapq
import random
from dataclasses import dataclass, field

import pytest

from deployments.admission.queue import Action, AdmissionQueue, Granted, QueueLimits
from deployments.admission.tiers import TierRule, TierTable
from deployments.link.messages import Acquire, Report

SLOTS = 8
SERVICE_S = 0.33
CAPACITY = SLOTS / SERVICE_S
MAX_WAIT_S = 0.7
SETTLED_S = 2.0
OVER_S = 20.0


@dataclass
class Flood:
    """Poisson arrivals at `factor` times what the slots can do."""

    factor: float
    waits: dict[str, list[float]] = field(default_factory=lambda: {"granted": [], "refused": []})

    def __post_init__(self) -> None:
        rules = [TierRule(name="default", max_wait_s=MAX_WAIT_S)]
        self.queue = AdmissionQueue(1, QueueLimits(), TierTable(rules, 1))
        self.rng = random.Random(1)
        self.alive: dict[int, int] = {}
        self.came: dict[int, float] = {}
        self.events: list[tuple[float, int, int]] = []

    def run(self) -> None:
        at = 0.0
        for ticket in range(int(OVER_S * CAPACITY * self.factor)):
            at += self.rng.expovariate(CAPACITY * self.factor)
            heapq.heappush(self.events, (at, 1, ticket))
        self.perform(self.report(0.0), 0.0)
        while self.events:
            now, what, ticket = heapq.heappop(self.events)
            while (alarm := self.queue.next_alarm()) is not None and alarm <= now:
                self.perform(self.queue.tick(alarm), alarm)
            if what == 0:
                del self.alive[ticket]
                self.perform(self.report(now), now)
            else:
                self.came[ticket] = now
                acquire = Acquire(ticket=ticket, cost_tokens=60, prompt_tokens=28)
                self.perform(self.queue.acquire("g", acquire, now), now)

    def report(self, now: float) -> list[Action]:
        grants = tuple((1, grant_id, 1) for grant_id in self.alive.values())
        report = Report(replica_id="d", slots=SLOTS, capacity_tokens=10**9, grants=grants)
        return self.queue.replica_reported(report, now)

    def perform(self, actions: list[Action], now: float) -> None:
        for action in actions:
            came = self.came[action.ticket]
            granted = isinstance(action, Granted)
            if came >= SETTLED_S:
                self.waits["granted" if granted else "refused"].append(now - came)
            if granted:
                self.alive[action.ticket] = action.grant.grant_id
                ends = now + SERVICE_S * self.rng.uniform(0.95, 1.05)
                heapq.heappush(self.events, (ends, 0, action.ticket))
        if any(isinstance(action, Granted) for action in actions):
            self.perform(self.report(now), now)


@pytest.mark.parametrize("factor", [1.5, 2.0, 10.0])
def test_under_overload_every_slot_works_and_nobody_waits_in_vain(factor: float) -> None:
    flood = Flood(factor)
    flood.run()
    rate = len(flood.waits["granted"]) / (OVER_S - SETTLED_S)
    assert rate >= 0.98 * CAPACITY
    assert max(flood.waits["refused"]) == 0.0, "refused after a wait"
    assert max(flood.waits["granted"]) <= MAX_WAIT_S
