"""Who may run next, and where: the decision core of the admission queue. No clock, no I/O.

```
decode reports ──► slots, KV, prompts under way ┐
                                                ├─► room ──► next by `order` ──► Granted | Refused
promises, not yet reported ─────────────────────┘
```

A grant is a promise from the moment it is made until a report of its replica lists it, its gateway
releases it, or it expires. From then on the reports alone say what is taken, whoever granted it, so
a restarted queue is right as soon as the replicas have reported.

An entry fits a replica that has

- a slot for each choice, counting those of preemptible work that it outranks (the engine takes them
  back within a step; a tier with a share keeps some) and leaving free what is reserved for tiers
  above it,
- KV room for its prompt and the start of its output, likewise,
- and if prompts of its own or more urgent ranks do not load the prefill pool beyond its budget:
  those of less urgent ones make way there, step by step.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import astuple, dataclass, field
from typing import Any

from deployments.admission.order import Entry, FairOrder
from deployments.admission.tiers import TierRule, TierTable
from deployments.explain.queueing import Arrival, QueueFacts, Standing, top
from deployments.link.messages import UNTAKABLE, Acquire, Grant, Report
from engine.errors import ConfigError, EngineError, Overloaded, RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """What an operator bounds."""

    max_waiting: int = 1024
    """Entries that may wait at once; one more, or one that it displaces (`FairOrder.displaced`), is
    refused with `queue_full`."""

    max_wait_s: float = 60.0
    """Longest wait of any entry, whatever its tier allows; then `queue_timeout`."""

    no_replica_wait_s: float = 10.0
    """Longest wait while no decode replica takes work; then `no_replicas`."""

    grant_expiry_s: float = 2.0
    """A grant that no report shows after this long is void and its slots are free again."""

    reserve_output_tokens: int = 256
    """KV that a grant sets aside for each choice's output, if it asks for so much. More is
    overcommitment, which the engines resolve by preemption."""

    max_prefilling_tokens: int = 65_536
    """Prompt tokens under way for each prefill replica, of the waiter's own and more urgent ranks:
    more wait here, where order still counts, rather than there."""

    refuse_hopeless: bool = True
    """Refuse at once who would wait longer than it may or cares to, by the pace of late."""

    def __post_init__(self) -> None:
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting={self.max_waiting}: must be 0 or more")
        for name in ("reserve_output_tokens", "max_prefilling_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be 1 or more")
        for name in ("max_wait_s", "no_replica_wait_s", "grant_expiry_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name}={value}: must be above 0")

    def to_wire(self) -> list[Any]:
        return list(astuple(self))

    @classmethod
    def from_wire(cls, wire: list[Any]) -> QueueLimits:
        """Raises ConfigError on a value out of range, TypeError on another number of them."""
        return cls(**dict(zip(cls.__dataclass_fields__, wire, strict=True)))


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

HOPE = 0.9
"""Share of what an entry can wait that its estimated wait may take. Estimates miss by about a tenth
on either side, and who waits in vain learns late what could have been said at once."""

_PACE_MEMORY = 0.98
"""Weight of a grant against the next one in the pace: about the last fifty count."""


@dataclass(slots=True, eq=False)
class _Waiter(Entry):
    gateway_id: str
    acquire: Acquire
    since: float
    tokens: int
    """KV that its grant sets aside."""

    standing: Arrival = field(init=False)
    due_cost: float = field(init=False)
    """Token cost that was to be granted by the time of its own grant, itself included, when it
    came."""


@dataclass(slots=True)
class _Promise:
    gateway_id: str
    replica_id: str
    waiter: _Waiter
    kept: int
    """Choices in slots that its tier keeps."""

    @property
    def n(self) -> int:
        return self.waiter.acquire.n


@dataclass(slots=True)
class _Replica:
    report: Report
    reported: int
    """Choices alive there, by its own account."""

    promised: int = 0
    promised_tokens: int = 0
    last_chosen: int = 0

    @property
    def usable(self) -> bool:
        return not self.report.draining and self.report.slots > 0

    @property
    def free(self) -> int:
        return self.report.slots - self.reported - self.promised

    @property
    def free_tokens(self) -> int:
        return self.report.capacity_tokens - self.report.held_tokens - self.promised_tokens

    @property
    def over(self) -> int:
        """Choices past the slots, which others here have made way for or will."""
        return max(0, -self.free)

    def outranked(self, rank: int) -> tuple[int, int]:
        """Choices and KV tokens of work here that the engine lets make way for this rank."""
        choices = tokens = 0
        for _, level, n, held in self.report.alive:
            if level is not None and level > rank:
                choices += n
                tokens += held
        return choices, tokens


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


@dataclass(slots=True)
class _Pace:
    """Token cost granted a second of late, while somebody waited."""

    cost: float = 0.0
    seconds: float = 0.0
    grants: float = 0.0
    last: float | None = None

    def granted(self, cost: int, now: float, others_wait: bool) -> None:
        if self.last is not None and others_wait:
            self.cost = _PACE_MEMORY * self.cost + cost
            self.seconds = _PACE_MEMORY * self.seconds + (now - self.last)
            self.grants = _PACE_MEMORY * self.grants + 1
        self.last = now

    @property
    def known(self) -> bool:
        return self.grants >= 5 and self.seconds > 0

    def seconds_for(self, cost: float) -> float | None:
        """None: nothing is known yet."""
        return cost * self.seconds / self.cost if self.known and self.cost > 0 else None


class AdmissionQueue:
    """One model's queue. Events in (`now` in seconds of any steady clock), actions out.

    Every `acquire` is answered exactly once, by `Granted` or `Refused`, unless its gateway
    abandoned it or was lost. An entry that does not fit yet lets nobody pass who is not more
    urgent, so a request for many choices cannot starve behind requests for few; and once its tier
    is owed all that it can be, nobody but into slots reserved for them.
    """

    def __init__(
        self, epoch: int, limits: QueueLimits | None = None, tiers: TierTable | None = None
    ) -> None:
        """`epoch` must be higher than that of every queue before this one."""
        self._epoch = epoch
        self._limits = limits or QueueLimits()
        self._tiers = tiers or TierTable()
        self._replicas: dict[str, _Replica] = {}
        self._promises: dict[int, _Promise] = {}
        self._waiters: dict[tuple[str, int], _Waiter] = {}
        self._order = FairOrder()
        self._alarms = _Alarms()
        self._arrivals = 0
        self._grants = 0
        self._without_replica_since: float | None = None
        self._standing = Standing()
        self._pace = _Pace()

    @property
    def epoch(self) -> int:
        """What its grants carry."""
        return self._epoch

    # Events

    def lead(self, epoch: int) -> None:
        """Grants are of this epoch from now on. What it learnt of the pace when it led before is
        forgotten: the time between would count as slow grants."""
        self._epoch = epoch
        self._pace = _Pace()

    def policy(self, tiers: TierTable, limits: QueueLimits, now: float) -> list[Action]:
        """A gateway's configuration. The highest revision holds; entries that wait keep the rule
        they came under."""
        if tiers.revision < self._tiers.revision:
            return []
        self._tiers, self._limits = tiers, limits
        return self._serve(now)

    def replica_reported(self, report: Report, now: float) -> list[Action]:
        """A decode replica's account replaces its last one."""
        replica = self._replicas.get(report.replica_id)
        reported = sum(n for _, _, n in report.grants) + report.ungranted
        if replica is None:
            promised = [p for p in self._promises.values() if p.replica_id == report.replica_id]
            replica = _Replica(
                report,
                reported,
                sum(p.n for p in promised),
                sum(p.waiter.tokens for p in promised),
            )
            self._replicas[report.replica_id] = replica
        else:
            replica.report, replica.reported = report, reported
        for epoch, grant_id, _ in report.grants:
            if epoch == self._epoch:
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
        waiter = self._enter(gateway_id, acquire, now)
        most, displaced = self._limits.max_waiting, None
        # What was admitted before is bounded by the slots there were: it always finds a place.
        if len(self._waiters) >= most and not waiter.resumed and not self._fits_at_once(waiter):
            displaced = self._order.displaced(waiter, most)
            if displaced is None:
                return [*actions, self._no_place(waiter)]
        hopeless = self._hopeless(waiter, now)
        if hopeless is not None:
            return [*actions, Refused(gateway_id, acquire.ticket, hopeless)]
        if displaced is not None:
            assert isinstance(displaced, _Waiter)
            actions.append(self._no_place(displaced))
            self._leave(displaced)
        self._waiters[gateway_id, acquire.ticket] = waiter
        self._order.push(waiter)
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

    @property
    def tiers(self) -> TierTable:
        return self._tiers

    @property
    def prefilling_tokens(self) -> int:
        """Prompt tokens under way or promised, over the whole pool."""
        return sum(self._prefilling().values())

    def _prefilling(self) -> Counter[int]:
        """The same by rank."""
        found: Counter[int] = Counter()
        for replica in self._replicas.values():
            for rank, tokens in replica.report.prefilling_tokens:
                found[rank] += tokens
        for promise in self._promises.values():
            found[promise.waiter.rule.rank] += promise.waiter.acquire.prompt_tokens
        return found

    def waiting(self) -> dict[str, int]:
        """Entries by tier."""
        return self._order.waiting()

    def oldest_ages_s(self, now: float) -> dict[str, float]:
        """How long the longest of each tier has waited."""
        ages: dict[str, float] = {}
        for waiter in self._waiters.values():  # in the order of arrival
            ages.setdefault(waiter.rule.name, now - waiter.since)
        return ages

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
        self._order.check()
        promised: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for promise in self._promises.values():
            promised[promise.replica_id] += promise.n
            tokens[promise.replica_id] += promise.waiter.tokens
        for replica_id, replica in self._replicas.items():
            assert replica.promised == promised[replica_id], "promises drifted"
            assert replica.promised_tokens == tokens[replica_id], "promised tokens drifted"
        live = [w for w in self._order if isinstance(w, _Waiter)]
        assert len(live) == len(self._order) == len(self._waiters), "an entry is lost or doubled"
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
        if usable and self._waiters:
            self._grant_what_fits(usable, actions, now)
        alarms = self._alarms
        if len(alarms.heap) > 2 * (len(self._waiters) + len(self._promises)) + 64:
            alarms.heap = [entry for entry in alarms.heap if self._matters(entry[2])]
            heapq.heapify(alarms.heap)
        return actions

    def _grant_what_fits(self, usable: list[_Replica], actions: list[Action], now: float) -> None:
        most = max(r.report.slots for r in usable)
        progress = True
        while progress and self._waiters:
            progress = False
            blocked: int | None = None
            held = False
            for entry in self._order.candidates():
                assert isinstance(entry, _Waiter)
                rank = entry.rule.rank
                if blocked is not None and rank >= blocked:
                    continue
                if held and self._unused(entry.rule) < entry.acquire.n:
                    continue
                if entry.acquire.n > most:
                    self._leave(entry)
                    actions.append(_too_many(entry, most))
                    progress = True
                    break
                replica = self._place_for(entry, usable)
                if replica is not None:
                    actions.append(self._grant(entry, replica, now))
                    progress = True
                    break
                # Those above would take the room of what is overdue for ever, a slot at a time.
                # What its own tier's prompts take is not theirs to leave.
                if self._order.overdue(entry) and not self._own_prompts_fill(entry, usable):
                    held = True
                blocked = rank if blocked is None else min(blocked, rank)

    def _place_for(self, waiter: _Waiter, usable: list[_Replica]) -> _Replica | None:
        """The replica with most free slots among those with room for this entry now."""
        rank, n, tokens = waiter.rule.rank, waiter.acquire.n, waiter.tokens
        if not self._prefill_has_room(waiter, usable):
            return None
        reserved = self._reserved_above(rank, n)
        spare = sum(r.free for r in usable) - reserved
        to_spare = self._make_way(rank, usable)
        best: tuple[bool, int, int] | None = None
        chosen: _Replica | None = None
        for replica in usable:
            outranked, held = replica.outranked(rank)
            freed = max(0, min(outranked, to_spare + replica.over))
            free = replica.free if spare >= n else -1
            if max(free, replica.free + freed if freed else -1) < n:
                continue
            reclaimed = held * freed // outranked if freed else 0
            # An idle replica takes what is larger than its pool: the engine decides.
            if replica.reported + replica.promised and replica.free_tokens + reclaimed < tokens:
                continue
            order = (free >= n, replica.free, -replica.last_chosen)
            if best is None or order > best:
                best, chosen = order, replica
        return chosen

    def _make_way(self, rank: int, usable: list[_Replica]) -> int:
        """Choices over the whole pool that make way for this rank, without those that have already.

        A tier with a share keeps that part of the slots, and one at least where there are enough of
        them: a flood from above would starve what it began. The engine takes the least urgent
        first, so behind one that would lose what it keeps nobody makes way.
        """
        alive: Counter[int] = Counter()
        outranked: Counter[tuple[int, int]] = Counter()
        pulling: Counter[tuple[int, int]] = Counter()  # may be taken instead by then
        slots = over = 0
        for replica in usable:
            slots += replica.report.slots
            over += replica.over
            for priority, level, n, _ in replica.report.alive:
                if priority > rank:
                    alive[priority] += n
                    if level == UNTAKABLE:
                        pulling[priority, priority] += n
                    elif level is not None and level > rank:
                        outranked[level, priority] += n
        if not outranked:
            return 0
        kept = self._kept_slots(slots)
        spare = {priority: max(0, n - kept.get(priority, 0)) for priority, n in alive.items()}
        makes_way = 0
        for key in sorted(outranked.keys() | pulling.keys(), reverse=True):
            _, priority = key
            makes_way += min(outranked[key], spare[priority])
            spare[priority] -= outranked[key] + pulling[key]
            if spare[priority] < 0:
                break
        return makes_way - over

    def _kept_slots(self, slots: int) -> dict[int, int]:
        """By rank, of the tiers with a share."""
        shares = {r.rank: r.share for r in self._tiers.rules.values() if r.share > 0}
        least = 1 if len(shares) < slots else 0
        return {rank: max(least, int(share * slots)) for rank, share in shares.items()}

    def _num_kept(self, waiter: _Waiter) -> int:
        """How many of its choices get slots that its tier keeps. The engine has to know: what it
        takes back is the least urgent, whichever tier has more than it keeps."""
        rule, slots = waiter.rule, 0
        if not rule.preemptible or rule.share <= 0:
            return 0
        for replica in self._replicas.values():
            for priority, level, n, _ in replica.report.alive:
                if priority == rule.rank and level is None:
                    slots += n
        slots += sum(p.kept for p in self._promises.values() if p.waiter.rule.rank == rule.rank)
        kept = self._kept_slots(self.num_slots).get(rule.rank, 0)
        return max(0, min(waiter.acquire.n, kept - slots))

    def _reserved_above(self, rank: int, n: int) -> int:
        """Slots kept for tiers more urgent than this rank that they do not use now: never so many
        that `n` choices would not find room when nothing else runs."""
        reserved = 0
        for rule in self._tiers.rules.values():
            if rule.rank < rank:
                reserved += self._unused(rule)
        return min(reserved, max(0, self.num_slots - n))

    def _unused(self, rule: TierRule) -> int:
        """Of the slots that are reserved for this tier."""
        if not rule.reserved_slots:
            return 0
        used = sum(
            n
            for replica in self._replicas.values()
            for priority, _, n, _ in replica.report.alive
            if priority == rule.rank
        )
        used += sum(p.n for p in self._promises.values() if p.waiter.rule.rank == rule.rank)
        return max(0, rule.reserved_slots - used)

    def _prefill_has_room(self, waiter: _Waiter, usable: list[_Replica]) -> bool:
        """Less urgent prompts do not count: prefill replicas compute this one before them."""
        rank = waiter.rule.rank
        under_way = sum(tokens for r, tokens in self._prefilling().items() if r <= rank)
        return under_way == 0 or (
            under_way + waiter.acquire.prompt_tokens <= self._prefill_budget(usable)
        )

    def _own_prompts_fill(self, waiter: _Waiter, usable: list[_Replica]) -> bool:
        """Prompts of its own tier alone leave this one no room in the prefill pool."""
        own = self._prefilling()[waiter.rule.rank]
        return own > 0 and own + waiter.acquire.prompt_tokens > self._prefill_budget(usable)

    def _prefill_budget(self, usable: list[_Replica]) -> int:
        """Prompt tokens of the whole pool."""
        replicas = max((r.report.prefill_replicas for r in usable), default=0)
        return self._limits.max_prefilling_tokens * max(1, replicas or len(usable))

    def _enter(self, gateway_id: str, acquire: Acquire, now: float) -> _Waiter:
        self._arrivals += 1
        rule = self._tiers.rule(acquire.tier, acquire.priority)
        wait_s = min(self._limits.max_wait_s, rule.max_wait_s)
        if acquire.remaining_ms is not None:
            wait_s = min(wait_s, acquire.remaining_ms / 1000)
        output = max(0, acquire.cost_tokens - acquire.prompt_tokens) // acquire.n
        waiter = _Waiter(
            rule=rule,
            tenant=acquire.tenant,
            weight=acquire.weight if acquire.weight > 0 else 1.0,
            cost=max(1, acquire.cost_tokens),
            resumed=acquire.resumed,
            deadline=now + wait_s,
            arrival=self._arrivals,
            gateway_id=gateway_id,
            acquire=acquire,
            since=now,
            tokens=acquire.prompt_tokens
            + acquire.n * min(output, self._limits.reserve_output_tokens),
        )
        ahead, waiter.due_cost = self._order.ahead(waiter)
        waiter.standing = self._standing.arrived(self._order.waiting(), ahead)
        return waiter

    def _hopeless(self, waiter: _Waiter, now: float) -> Overloaded | None:
        """Why this entry would wait in vain, by the pace of late."""
        if not self._limits.refuse_hopeless or not self._waiters or waiter.resumed:
            return None
        ahead = waiter.standing.ahead
        estimate_s = self._pace.seconds_for(waiter.due_cost)
        wait_s = waiter.deadline - now
        if estimate_s is None or ahead == 0 or estimate_s <= HOPE * wait_s:
            return None
        return Overloaded(
            f"{ahead} requests are ahead and the wait would be about {estimate_s:.1f} s, more than "
            f"the {wait_s:.1f} s that this request can wait: try again in {estimate_s:.0f} s, or "
            "allow more time",
            code="queue_timeout",
            retry_after_s=min(max(estimate_s - wait_s, 1.0), 60.0),
        )

    def _no_place(self, waiter: _Waiter) -> Refused:
        """Too many wait already, or more urgent ones came."""
        retry_s = self._estimate_s(len(self._waiters))
        error = Overloaded(
            f"{len(self._waiters)} requests wait for this model, the limit is "
            f"{self._limits.max_waiting}: try again in {retry_s:.0f} s",
            code="queue_full",
            retry_after_s=retry_s,
        )
        return Refused(waiter.gateway_id, waiter.acquire.ticket, error)

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
            ahead, _ = self._order.ahead(waiter)
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
        self._pace.granted(waiter.cost, now, len(self._waiters) > 1)
        self._order.take(waiter)
        del self._waiters[waiter.gateway_id, waiter.acquire.ticket]
        self._grants += 1
        grant_id = self._grants
        facts = self._facts(waiter, now)
        expires_at = now + self._limits.grant_expiry_s
        kept = self._num_kept(waiter)
        self._promises[grant_id] = _Promise(
            waiter.gateway_id, replica.report.replica_id, waiter, kept
        )
        self._alarms.push(expires_at, grant_id)
        replica.promised += waiter.acquire.n
        replica.promised_tokens += waiter.tokens
        replica.last_chosen = grant_id
        grant = Grant(
            grant_id=grant_id,
            epoch=self._epoch,
            replica_id=replica.report.replica_id,
            expiry_ms=int(self._limits.grant_expiry_s * 1000),
            kept=kept,
            facts=facts,
        )
        return Granted(waiter.gateway_id, waiter.acquire.ticket, grant)

    def _facts(self, waiter: _Waiter, now: float) -> QueueFacts:
        """Of a grant about to be made, for whoever explains it."""
        scores = top((key, r.free) for key, r in self._replicas.items() if r.usable)
        name = "resumed" if waiter.resumed else waiter.rule.name
        waited_s = now - waiter.since
        return self._standing.granted(name, waiter.standing, waited_s, "most free slots", scores)

    def _drop_promise(self, grant_id: int) -> None:
        promise = self._promises.pop(grant_id, None)
        if promise is not None:
            replica = self._replicas.get(promise.replica_id)
            if replica is not None:
                replica.promised -= promise.n
                replica.promised_tokens -= promise.waiter.tokens

    def _leave(self, waiter: _Waiter) -> None:
        self._order.discard(waiter)
        del self._waiters[waiter.gateway_id, waiter.acquire.ticket]

    def _matters(self, what: _Waiter | int) -> bool:
        return what.waiting if isinstance(what, _Waiter) else what in self._promises

    def _fits_at_once(self, waiter: _Waiter) -> bool:
        """True when nobody waits and a replica has room, so that even `max_waiting=0` serves."""
        usable = [r for r in self._replicas.values() if r.usable]
        return not self._waiters and self._place_for(waiter, usable) is not None

    def _longest_waiting(self) -> _Waiter:
        return next(iter(self._waiters.values()))  # dicts keep the order of arrival

    def _no_replica_deadline(self, waiter: _Waiter) -> float:
        assert self._without_replica_since is not None
        since = max(waiter.since, self._without_replica_since)
        return since + self._limits.no_replica_wait_s

    def _estimate_s(self, ahead: int) -> float:
        """When `ahead` entries will have been served, at the pace of late: between 1 and 60 s."""
        pace = self._pace
        each_s = pace.seconds / pace.grants if pace.known else 1.0
        return min(max(ahead * each_s, 1.0), 60.0)


def _too_many(waiter: _Waiter, most: int) -> Refused:
    error = RequestError(
        f"n={waiter.acquire.n}: no replica of this model runs more than {most} choices at once; "
        "ask for fewer",
        param="n",
    )
    return Refused(waiter.gateway_id, waiter.acquire.ticket, error)
