"""Random lives of a queue against an honest world: replicas, gateways, losses, late messages."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.admission.queue import Action, AdmissionQueue, QueueLimits, Refused
from deployments.link.messages import Acquire, Grant, Report

LIMITS = QueueLimits(max_waiting=6, max_wait_s=20.0, no_replica_wait_s=5.0, grant_expiry_s=2.0)
GATEWAYS = ("g1", "g2")
REPLICAS = {"d1": 2, "d2": 5}


@dataclass
class Replica:
    """What really runs at a decode replica, and what it last told the queue."""

    slots: int
    running: dict[int, int] = field(default_factory=dict)
    told: dict[int, int] | None = None
    """None while it has no link to the queue."""


@dataclass
class Promise:
    gateway: str
    grant: Grant
    n: int
    until: float


class World(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.queue = AdmissionQueue(3, LIMITS)
        self.replicas = {name: Replica(slots) for name, slots in REPLICAS.items()}
        self.waiting: dict[tuple[str, int], Acquire] = {}
        self.promises: dict[int, Promise] = {}
        """Granted and not listed, released, expired or void: the test's own account."""

        self.unused: dict[int, Promise] = {}
        """Grants in a gateway's hands that it has neither submitted nor given back."""

        self.tickets = 0

    def taken(self, name: str) -> int:
        told = self.replicas[name].told
        assert told is not None
        promised = sum(p.n for p in self.promises.values() if p.grant.replica_id == name)
        return sum(told.values()) + promised

    def expire(self) -> None:
        for grant_id in [g for g, p in self.promises.items() if p.until <= self.now]:
            del self.promises[grant_id]

    def take(self, actions: list[Action]) -> None:
        """Every answer is for somebody who waits, and no grant exceeds what the reports allow."""
        for action in actions:
            acquire = self.waiting.pop((action.gateway_id, action.ticket))
            if isinstance(action, Refused):
                continue
            grant = action.grant
            promise = Promise(action.gateway_id, grant, acquire.n, self.now + LIMITS.grant_expiry_s)
            self.promises[grant.grant_id] = promise
            self.unused[grant.grant_id] = promise
            replica = self.replicas[grant.replica_id]
            assert replica.told is not None, "granted to a replica that is not there"
            assert self.taken(grant.replica_id) <= replica.slots, "over-granted"

    @rule(gateway=st.sampled_from(GATEWAYS), n=st.integers(1, 6), priority=st.integers(0, 2))
    def acquire(self, gateway: str, n: int, priority: int) -> None:
        self.tickets += 1
        acquire = Acquire(
            ticket=self.tickets, cost_tokens=1, prompt_tokens=1, n=n, priority=priority
        )
        self.waiting[gateway, self.tickets] = acquire
        self.take(self.queue.acquire(gateway, acquire, self.now))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        gateway, ticket = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[gateway, ticket]
        self.take(self.queue.abandon(gateway, ticket, self.now))

    @precondition(lambda self: self.unused)
    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        """Decode has the last word: what does not fit is refused and its grant given back."""
        grant_id = data.draw(st.sampled_from(sorted(self.unused)))
        promise = self.unused.pop(grant_id)
        replica = self.replicas[promise.grant.replica_id]
        if sum(replica.running.values()) + promise.n <= replica.slots:
            replica.running[grant_id] = promise.n
        else:
            self.give_back(promise)

    @precondition(lambda self: self.unused)
    @rule(data=st.data())
    def release_unused(self, data: st.DataObject) -> None:
        self.give_back(self.unused.pop(data.draw(st.sampled_from(sorted(self.unused)))))

    def give_back(self, promise: Promise) -> None:
        self.promises.pop(promise.grant.grant_id, None)
        self.take(self.queue.release(promise.gateway, promise.grant.grant_id, self.now))

    @rule(name=st.sampled_from(sorted(REPLICAS)), data=st.data())
    def finish(self, name: str, data: st.DataObject) -> None:
        running = self.replicas[name].running
        if running:
            del running[data.draw(st.sampled_from(sorted(running)))]

    @rule(name=st.sampled_from(sorted(REPLICAS)))
    def report(self, name: str) -> None:
        replica = self.replicas[name]
        replica.told = dict(replica.running)
        for grant_id in replica.told:
            self.promises.pop(grant_id, None)
        report = Report(
            replica_id=name,
            slots=replica.slots,
            capacity_tokens=1000,
            grants=tuple((3, grant_id, n) for grant_id, n in replica.told.items()),
        )
        self.take(self.queue.replica_reported(report, self.now))

    @rule(name=st.sampled_from(sorted(REPLICAS)), dead=st.booleans())
    def lose_replica(self, name: str, dead: bool) -> None:
        self.replicas[name].told = None
        if dead:
            self.replicas[name].running.clear()
        self.take(self.queue.replica_lost(name, self.now))

    @rule(gateway=st.sampled_from(GATEWAYS))
    def lose_gateway(self, gateway: str) -> None:
        self.waiting = {key: a for key, a in self.waiting.items() if key[0] != gateway}
        for grants in (self.promises, self.unused):
            for grant_id in [g for g, p in grants.items() if p.gateway == gateway]:
                del grants[grant_id]
        self.take(self.queue.gateway_lost(gateway, self.now))

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        """Time passes; the timer rings at every alarm on the way, as the actor's does."""
        end = self.now + seconds
        while (at := self.queue.next_alarm()) is not None and at <= end:
            self.now = max(self.now, at)
            self.expire()
            self.take(self.queue.tick(self.now))
        self.now = end
        self.expire()

    @invariant()
    def holds(self) -> None:
        self.queue.check()
        assert self.queue.num_waiting == len(self.waiting), "an entry was lost"

    @invariant()
    def nobody_waits_while_the_head_would_fit(self) -> None:
        if not self.waiting:
            return
        _, head = min(self.waiting.items(), key=lambda item: (item[1].priority, item[0][1]))
        for name, replica in self.replicas.items():
            if replica.told is not None:
                assert self.taken(name) + head.n > replica.slots, "a free slot lies idle"

    def teardown(self) -> None:
        """Left alone, everybody gets an answer and nothing stays promised."""
        self.wait(LIMITS.max_wait_s + 10)
        assert self.waiting == {}
        assert self.promises == {}
        self.queue.check()
        for name, replica in self.replicas.items():
            replica.running.clear()
            self.report(name)
        assert self.queue.free_slots == REPLICAS
        assert self.queue.next_alarm() is None


World.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestWorld = World.TestCase
