"""Who may run next, and where: the decision core of the admission queue. No clock, no I/O.

```
decode reports ──► slots taken ┐
                               ├─► free slots ──► head of the queue ──► Granted | Refused
promises, not yet reported ────┘
```

A grant is a promise from the moment it is made until a report of its replica lists it, its gateway
releases it, or it expires. From then on the reports alone say what is taken, whoever granted it, so
a restarted queue is right as soon as the replicas have reported.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

from deployments.explain.queueing import Arrival, QueueFacts, Standing, top
from deployments.link.messages import Acquire, Grant, Report
from engine.errors import ConfigError, EngineError, Overloaded, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """What an operator bounds."""

    max_waiting: int = 1024
    """Entries that may wait at once; one more is refused with `queue_full`."""

    max_wait_s: float = 60.0
    """Longest wait of any entry, also of one without a deadline; then `queue_timeout`."""

    no_replica_wait_s: float = 10.0
    """Longest wait while no decode replica takes work; then `no_replicas`."""

    grant_expiry_s: float = 2.0
    """A grant that no report shows after this long is void and its slots are free again."""

    def __post_init__(self) -> None:
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting={self.max_waiting}: must be 0 or more")
        for name in ("max_wait_s", "no_replica_wait_s", "grant_expiry_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name}={value}: must be above 0")


@dataclass(frozen=True, slots=True)
class Granted:
    """Tell `gateway_id` that its `ticket` may submit."""

    gateway_id: str
    ticket: int
    grant: Grant


@dataclass(frozen=True, slots=True)
class Refused:
    """Tell `gateway_id` that its `ticket` will not be served."""

    gateway_id: str
    ticket: int
    error: EngineError


Action = Granted | Refused

OrderKey = tuple[int, int]
"""Smaller is served first."""


def order_key(acquire: Acquire, arrival: int) -> OrderKey:
    """First come, first served within a priority."""
    return (acquire.priority, arrival)


@dataclass(slots=True)
class _Waiter:
    gateway_id: str
    acquire: Acquire
    key: OrderKey
    since: float
    deadline: float
    arrival: Arrival
    waiting: bool = True


@dataclass(slots=True)
class _Promise:
    gateway_id: str
    replica_id: str
    n: int
    expires_at: float


@dataclass(slots=True)
class _Replica:
    report: Report
    reported: int
    """Choices alive there, by its own account."""

    promised: int = 0
    last_chosen: int = 0

    @property
    def usable(self) -> bool:
        return not self.report.draining and self.report.slots > 0

    @property
    def free(self) -> int:
        return self.report.slots - self.reported - self.promised


@dataclass(slots=True)
class _Alarms:
    """Times at which something expires. Entries that no longer matter are skipped when due."""

    heap: list[tuple[float, int, _Waiter | int]] = field(
        default_factory=list[tuple[float, int, "_Waiter | int"]]
    )
    pushed: int = 0

    def push(self, at: float, what: _Waiter | int) -> None:
        self.pushed += 1
        heapq.heappush(self.heap, (at, self.pushed, what))


class AdmissionQueue:
    """One model's queue. Events in (`now` in seconds of any steady clock), actions out.

    Every `acquire` is answered exactly once, by `Granted` or `Refused`, unless its gateway
    abandoned it or was lost. The order is strict: an entry that does not fit yet lets nobody pass,
    so a request for many choices cannot starve behind requests for few.
    """

    def __init__(self, epoch: int, limits: QueueLimits | None = None) -> None:
        """`epoch` must be higher than that of every queue before this one."""
        self.epoch = epoch
        self._limits = limits or QueueLimits()
        self._replicas: dict[str, _Replica] = {}
        self._promises: dict[int, _Promise] = {}
        self._waiters: dict[tuple[str, int], _Waiter] = {}
        self._order: list[tuple[OrderKey, _Waiter]] = []
        self._alarms = _Alarms()
        self._arrivals = 0
        self._grants = 0
        self._without_replica_since: float | None = None
        self._standing = Standing()
        self._waiting_at: Counter[int] = Counter()
        """Entries that wait, by priority."""

        self._interval_s: float | None = None
        """Smoothed time between grants while entries waited."""

        self._last_grant: float | None = None

    # Events

    def replica_reported(self, report: Report, now: float) -> list[Action]:
        """A decode replica's account replaces its last one."""
        replica = self._replicas.get(report.replica_id)
        reported = sum(n for _, _, n in report.grants) + report.ungranted
        if replica is None:
            promised = sum(
                p.n for p in self._promises.values() if p.replica_id == report.replica_id
            )
            replica = _Replica(report, reported, promised)
            self._replicas[report.replica_id] = replica
        else:
            replica.report, replica.reported = report, reported
        for epoch, grant_id, _ in report.grants:
            if epoch == self.epoch:
                self._drop_promise(grant_id)
        return self._serve(now)

    def replica_lost(self, replica_id: str, now: float) -> list[Action]:
        """Its link ended. Promises stay until they expire: their gateways may still reach it."""
        self._replicas.pop(replica_id, None)
        return self._serve(now)

    def gateway_lost(self, gateway_id: str, now: float) -> list[Action]:
        """Its entries and promises are void. What it had submitted is in decode's reports."""
        for waiter in [w for w in self._waiters.values() if w.gateway_id == gateway_id]:
            self._leave(waiter)
        for grant_id in [g for g, p in self._promises.items() if p.gateway_id == gateway_id]:
            self._drop_promise(grant_id)
        return self._serve(now)

    def acquire(self, gateway_id: str, acquire: Acquire, now: float) -> list[Action]:
        """Ask for a grant. Raises ValueError for a ticket that already waits."""
        if (gateway_id, acquire.ticket) in self._waiters:
            raise ValueError(f"ticket {acquire.ticket} of {gateway_id!r} already waits")
        if acquire.n < 1:
            raise ValueError(f"ticket {acquire.ticket} of {gateway_id!r} asks for n={acquire.n}")
        actions = self._serve(now)
        if len(self._waiters) >= self._limits.max_waiting and not self._fits_at_once(acquire):
            retry_s = self._estimate_s(len(self._waiters))
            error = Overloaded(
                f"{len(self._waiters)} requests wait for this model, the limit is "
                f"{self._limits.max_waiting}: try again in {retry_s:.0f} s",
                code="queue_full",
                retry_after_s=retry_s,
            )
            return [*actions, Refused(gateway_id, acquire.ticket, error)]
        wait_s = self._limits.max_wait_s
        if acquire.remaining_ms is not None:
            wait_s = min(wait_s, acquire.remaining_ms / 1000)
        self._arrivals += 1
        key = order_key(acquire, self._arrivals)
        waiter = _Waiter(gateway_id, acquire, key, now, now + wait_s, self._arrival(acquire))
        self._waiting_at[acquire.priority] += 1
        self._waiters[gateway_id, acquire.ticket] = waiter
        heapq.heappush(self._order, (waiter.key, waiter))
        self._alarms.push(waiter.deadline, waiter)
        return actions + self._serve(now)

    def abandon(self, gateway_id: str, ticket: int, now: float) -> list[Action]:
        """The caller gave up waiting. Too late is not an error: the grant is on its way, and its
        gateway releases it."""
        waiter = self._waiters.get((gateway_id, ticket))
        if waiter is None:
            return []
        self._leave(waiter)
        return self._serve(now)

    def release(self, gateway_id: str, grant_id: int, now: float) -> list[Action]:
        """The request of a grant ended or was never submitted. A grant that decode has listed is
        freed by decode's report, not by this."""
        promise = self._promises.get(grant_id)
        if promise is None or promise.gateway_id != gateway_id:
            return []
        self._drop_promise(grant_id)
        return self._serve(now)

    def tick(self, now: float) -> list[Action]:
        """Let expire what is due. Needed at `next_alarm`, harmless at any time."""
        return self._serve(now)

    # Questions

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    @property
    def free_slots(self) -> dict[str, int]:
        """Slots left for each replica that takes work. Negative where two queues over-granted."""
        return {key: r.free for key, r in self._replicas.items() if r.usable}

    @property
    def num_slots(self) -> int:
        """Choices that all replicas that take work run at once."""
        return sum(r.report.slots for r in self._replicas.values() if r.usable)

    @property
    def waiting_tokens(self) -> int:
        """What those who wait may cost together."""
        return sum(waiter.acquire.cost_tokens for waiter in self._waiters.values())

    def oldest_age_s(self, now: float) -> float:
        """How long the longest has waited; 0 when nobody does."""
        return now - self._longest_waiting().since if self._waiters else 0.0

    def next_alarm(self) -> float | None:
        """When `tick` is needed next, or None."""
        heap = self._alarms.heap
        while heap and not self._matters(heap[0][2]):
            heapq.heappop(heap)
        times = [heap[0][0]] if heap else []
        if self._without_replica_since is not None and self._waiters:
            times.append(self._no_replica_deadline(self._longest_waiting()))
        return min(times, default=None)

    def check(self) -> None:
        """Our own invariants; for tests and idle moments."""
        promised: dict[str, int] = {}
        for promise in self._promises.values():
            promised[promise.replica_id] = promised.get(promise.replica_id, 0) + promise.n
        for replica_id, replica in self._replicas.items():
            assert replica.promised == promised.get(replica_id, 0), "promises drifted"
        assert self._waiting_at == Counter(w.acquire.priority for w in self._waiters.values())
        live = [w for _, w in self._order if w.waiting]
        assert len(live) == len(self._waiters), "an entry is lost or doubled"
        assert all(self._waiters[w.gateway_id, w.acquire.ticket] is w for w in live)
        armed = {id(what) for _, _, what in self._alarms.heap if isinstance(what, _Waiter)}
        assert all(id(w) in armed for w in live), "an entry would never expire"
        expiring = {what for _, _, what in self._alarms.heap if isinstance(what, int)}
        assert self._promises.keys() <= expiring, "a promise would never expire"

    # Inside

    def _serve(self, now: float) -> list[Action]:
        """Expire what is due, then grant from the head for as long as it fits."""
        actions = self._expire(now)
        usable = [r for r in self._replicas.values() if r.usable]
        if usable:
            self._without_replica_since = None
        elif self._without_replica_since is None:
            self._without_replica_since = now
        while usable and (waiter := self._head()) is not None:
            n = waiter.acquire.n
            most = max(r.report.slots for r in usable)
            if n > most:
                self._leave(waiter)
                actions.append(
                    Refused(
                        waiter.gateway_id,
                        waiter.acquire.ticket,
                        RequestError(
                            f"n={n}: no replica of this model runs more than {most} choices at "
                            "once; ask for fewer",
                            param="n",
                        ),
                    )
                )
                continue
            replica = min(usable, key=lambda r: (-r.free, r.last_chosen))
            if replica.free < n:
                break
            actions.append(self._grant(waiter, replica, now))
        if len(self._order) > 2 * len(self._waiters) + 64:
            self._order = [entry for entry in self._order if entry[1].waiting]
            heapq.heapify(self._order)
        alarms = self._alarms
        if len(alarms.heap) > 2 * (len(self._waiters) + len(self._promises)) + 64:
            alarms.heap = [entry for entry in alarms.heap if self._matters(entry[2])]
            heapq.heapify(alarms.heap)
        return actions

    def _expire(self, now: float) -> list[Action]:
        actions: list[Action] = []
        heap = self._alarms.heap
        while heap and heap[0][0] <= now:
            what = heapq.heappop(heap)[2]
            if not isinstance(what, _Waiter):
                self._drop_promise(what)
            elif what.waiting:
                actions.append(self._time_out(what, now))
        if self._without_replica_since is not None:
            for waiter in list(self._waiters.values()):
                if self._no_replica_deadline(waiter) <= now:
                    actions.append(self._time_out(waiter, now))
        return actions

    def _time_out(self, waiter: _Waiter, now: float) -> Refused:
        waited_s = now - waiter.since
        if self._without_replica_since is not None:
            retry_s = self._limits.no_replica_wait_s
            error = Overloaded(
                f"no decode replica of this model takes work, after a wait of {waited_s:.1f} s: "
                f"try again in {retry_s:.0f} s",
                code="no_replicas",
                retry_after_s=retry_s,
            )
        else:
            ahead = sum(1 for other in self._waiters.values() if other.key < waiter.key)
            retry_s = self._estimate_s(ahead + 1)
            error = Overloaded(
                f"waited {waited_s:.1f} s of at most {waiter.deadline - waiter.since:.1f} s for a "
                f"free slot, {ahead} requests are still ahead: try again in {retry_s:.0f} s",
                code="queue_timeout",
                retry_after_s=retry_s,
            )
        self._leave(waiter)
        return Refused(waiter.gateway_id, waiter.acquire.ticket, error)

    def _grant(self, waiter: _Waiter, replica: _Replica, now: float) -> Granted:
        if len(self._waiters) > 1 and self._last_grant is not None:
            interval_s = now - self._last_grant
            smoothed_s = self._interval_s
            self._interval_s = (
                interval_s if smoothed_s is None else 0.9 * smoothed_s + 0.1 * interval_s
            )
        self._last_grant = now
        self._leave(waiter)
        self._grants += 1
        grant_id = self._grants
        n = waiter.acquire.n
        facts = self._facts(waiter, now)
        expires_at = now + self._limits.grant_expiry_s
        self._promises[grant_id] = _Promise(
            waiter.gateway_id, replica.report.replica_id, n, expires_at
        )
        self._alarms.push(expires_at, grant_id)
        replica.promised += n
        replica.last_chosen = grant_id
        grant = Grant(
            grant_id=grant_id,
            epoch=self.epoch,
            replica_id=replica.report.replica_id,
            expiry_ms=int(self._limits.grant_expiry_s * 1000),
            facts=facts,
        )
        return Granted(waiter.gateway_id, waiter.acquire.ticket, grant)

    def _arrival(self, acquire: Acquire) -> Arrival:
        """The queue as this entry finds it, before it joins."""
        waiting = {_tier(p): count for p, count in self._waiting_at.items()}
        ahead = sum(n for p, n in self._waiting_at.items() if p <= acquire.priority)
        return self._standing.arrived(waiting, ahead)

    def _facts(self, waiter: _Waiter, now: float) -> QueueFacts:
        """Of a grant about to be made, for whoever explains it."""
        scores = top((key, r.free) for key, r in self._replicas.items() if r.usable)
        tier = _tier(waiter.acquire.priority)
        waited_s = now - waiter.since
        return self._standing.granted(tier, waiter.arrival, waited_s, "most free slots", scores)

    def _drop_promise(self, grant_id: int) -> None:
        promise = self._promises.pop(grant_id, None)
        if promise is not None:
            replica = self._replicas.get(promise.replica_id)
            if replica is not None:
                replica.promised -= promise.n

    def _leave(self, waiter: _Waiter) -> None:
        waiter.waiting = False
        priority = waiter.acquire.priority
        self._waiting_at[priority] -= 1
        if not self._waiting_at[priority]:
            del self._waiting_at[priority]
        del self._waiters[waiter.gateway_id, waiter.acquire.ticket]

    def _head(self) -> _Waiter | None:
        while self._order and not self._order[0][1].waiting:
            heapq.heappop(self._order)
        return self._order[0][1] if self._order else None

    def _matters(self, what: _Waiter | int) -> bool:
        return what.waiting if isinstance(what, _Waiter) else what in self._promises

    def _fits_at_once(self, acquire: Acquire) -> bool:
        """True when nobody waits and a replica has room, so that even `max_waiting=0` serves."""
        room = max((r.free for r in self._replicas.values() if r.usable), default=0)
        return not self._waiters and room >= acquire.n

    def _longest_waiting(self) -> _Waiter:
        return next(iter(self._waiters.values()))  # dicts keep the order of arrival

    def _no_replica_deadline(self, waiter: _Waiter) -> float:
        assert self._without_replica_since is not None
        since = max(waiter.since, self._without_replica_since)
        return since + self._limits.no_replica_wait_s

    def _estimate_s(self, ahead: int) -> float:
        """When `ahead` entries will have been served, at the pace of late: between 1 and 60 s."""
        pace_s = self._interval_s if self._interval_s is not None else 1.0
        return min(max(ahead * pace_s, 1.0), 60.0)


def _tier(priority: int) -> str:
    """What a priority is called in explanations."""
    if priority == 0:
        return "default"
    return "resumed" if priority < -(1 << 15) else f"priority {priority}"
