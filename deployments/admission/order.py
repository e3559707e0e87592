"""Who is next among those that wait: between tiers, between tenants of a tier, within a tenant.

- **Tiers** go by rank, most urgent first. A tier with a `share` is owed that part of whatever is
  granted past it while it waits; once it is owed the cost of its next entry, that entry goes first.
  So the lower tiers get their shares under any flood from above, and no more.
- **Tenants** of one tier are served by start-time fair queueing (Goyal, Vin, Cheng: "Start-time
  fair queueing", SIGCOMM 1996) on token cost over weight: a tenant that sends a thousand requests
  waits for its own, not others for it.
- **Within a tenant**: what was admitted before (its replica was lost) first, then by deadline, then
  by arrival.

Pure: nothing here knows the time, or whether an entry fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from deployments.admission.tiers import TierRule

MAX_OWED = 4.0
"""A tier is owed at most so many times the cost of its most expensive entry of late: a long wait is
made good, not turned into a monopoly."""


@dataclass(slots=True, eq=False)
class Entry:
    """One that waits. Whoever owns the queue adds what it needs by inheriting."""

    rule: TierRule
    tenant: str
    weight: float
    cost: int
    """Tokens that it may take."""

    resumed: bool
    deadline: float
    arrival: int
    """Running number, unique."""

    waiting: bool = field(default=True, init=False)

    @property
    def key(self) -> tuple[bool, float, int]:
        """Order within a tenant: smaller is first."""
        return (not self.resumed, self.deadline, self.arrival)


@dataclass(slots=True, eq=False)
class _Tenant:
    name: str
    finish: float = 0.0
    """Virtual time at which all it was granted will have been served."""

    start: float = 0.0
    """Virtual time of its next entry."""

    entries: list[tuple[tuple[bool, float, int], Entry]] = field(
        default_factory=list[tuple[tuple[bool, float, int], Entry]]
    )
    waiting: int = 0
    cost: int = 0

    def head(self) -> Entry | None:
        while self.entries and not self.entries[0][1].waiting:
            heapq.heappop(self.entries)
        return self.entries[0][1] if self.entries else None


@dataclass(slots=True, eq=False)
class _Tier:
    rule: TierRule
    tenants: dict[str, _Tenant] = field(default_factory=dict[str, _Tenant])
    """Those that wait."""

    finished: dict[str, float] = field(default_factory=dict[str, float])
    """Virtual finish of tenants that do not wait but are ahead of the virtual time: who leaves and
    comes back a moment later has not paid off what it took."""

    virtual: float = 0.0
    owed: float = 0.0
    largest: float = 0.0
    """Most expensive entry of late."""

    waiting: int = 0
    cost: int = 0
    resumed: int = 0

    @property
    def most_owed(self) -> float:
        return MAX_OWED * max(self.largest, 1.0)

    def next(self) -> Entry | None:
        best: _Tenant | None = None
        first: Entry | None = None
        for tenant in self.tenants.values():
            head = tenant.head()
            if head is None:
                continue
            if head.resumed and (first is None or not first.resumed):
                best, first = tenant, head
                continue
            if first is not None and first.resumed and not head.resumed:
                continue
            if best is None or first is None or (tenant.start, head.key) < (best.start, first.key):
                best, first = tenant, head
        return first


class FairOrder:
    """All entries that wait."""

    def __init__(self) -> None:
        self._tiers: dict[tuple[str, int], _Tier] = {}
        """By name and rank: both may change while entries wait under the old rule."""

    def __len__(self) -> int:
        return sum(tier.waiting for tier in self._tiers.values())

    def __iter__(self) -> Iterator[Entry]:
        """In no order that means anything."""
        for tier in self._tiers.values():
            for tenant in tier.tenants.values():
                for _, entry in tenant.entries:
                    if entry.waiting:
                        yield entry

    def waiting(self) -> dict[str, int]:
        """Entries by tier, of tiers that wait."""
        found: dict[str, int] = {}
        for (name, _), tier in self._tiers.items():
            if tier.waiting:
                found[name] = found.get(name, 0) + tier.waiting
        return found

    def push(self, entry: Entry) -> None:
        tier = self._tiers.get(_key(entry))
        if tier is None:
            tier = self._tiers[_key(entry)] = _Tier(entry.rule)
        tier.rule = entry.rule
        tenant = tier.tenants.get(entry.tenant)
        if tenant is None:
            tenant = tier.tenants[entry.tenant] = _Tenant(entry.tenant)
            tenant.finish = tier.finished.pop(entry.tenant, 0.0)
            tenant.start = max(tier.virtual, tenant.finish)
        heapq.heappush(tenant.entries, (entry.key, entry))
        tenant.waiting += 1
        tenant.cost += entry.cost
        tier.waiting += 1
        tier.cost += entry.cost
        tier.resumed += entry.resumed
        tier.largest = max(tier.largest, float(entry.cost))

    def candidates(self) -> list[Entry]:
        """The next entry of each tier, in the order in which they are to be tried."""
        heads: list[tuple[tuple[bool, float, int], Entry]] = []
        for tier in self._tiers.values():
            if not tier.waiting:
                continue
            entry = tier.next()
            assert entry is not None, "the tier miscounts"
            owed = tier.owed >= entry.cost and tier.rule.share > 0
            # What had been admitted already goes ahead of everything that never was.
            heads.append(((not entry.resumed, -tier.owed if owed else 0.0, tier.rule.rank), entry))
        heads.sort(key=lambda head: head[0])
        return [entry for _, entry in heads]

    def overdue(self, entry: Entry) -> bool:
        """Its tier is owed as much as a tier can be: entries from above keep taking the room that
        this one needs."""
        tier = self._tiers[_key(entry)]
        return tier.rule.share > 0 and tier.owed >= tier.most_owed

    def displaced(self, entry: Entry, places: int) -> Entry | None:
        """Who makes way for `entry`, which does not wait yet, where all `places` are taken; None:
        nobody has to.

        A tier keeps its share of the places; beyond it the least urgent makes way first. Of the
        same tier, a tenant that holds more places for its weight than the newcomer's would. What
        was admitted before makes way for nobody.
        """
        own = self._tiers.get(_key(entry))
        entitled = (own.waiting if own else 0) < int(entry.rule.share * places)
        others = [
            tier
            for tier in self._tiers.values()
            if tier is not own
            and tier.waiting > max(tier.resumed, int(tier.rule.share * places))
            and (tier.rule.rank > entry.rule.rank or entitled)
        ]
        if others:
            tenants = max(others, key=lambda tier: (tier.rule.rank, tier.waiting)).tenants
            least = 0.0
        elif own is not None:
            tenants = {name: t for name, t in own.tenants.items() if name != entry.tenant}
            mine = own.tenants.get(entry.tenant)
            least = ((mine.waiting if mine else 0) + 1) / entry.weight
        else:
            return None
        found: list[tuple[float, Entry]] = []
        for tenant in tenants.values():
            can = [e for _, e in tenant.entries if e.waiting and not e.resumed]
            if can and tenant.waiting / can[0].weight > least:
                last = max(can, key=lambda e: e.key)
                found.append((tenant.waiting / last.weight, last))
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def take(self, entry: Entry) -> None:
        """It was granted: everybody's account moves on."""
        tier = self._tiers[_key(entry)]
        tenant = tier.tenants[entry.tenant]
        tier.virtual = max(tier.virtual, tenant.start)
        tenant.finish = tenant.start + entry.cost / entry.weight
        tenant.start = tenant.finish
        for other in self._tiers.values():
            if other is not tier and other.waiting and other.rule.share > 0:
                owed = other.owed + other.rule.share * entry.cost
                other.owed = min(owed, other.most_owed)
        # What it gets of its own share was not granted past it.
        tier.owed = max(0.0, tier.owed - (1.0 - tier.rule.share) * entry.cost)
        self.discard(entry)

    def discard(self, entry: Entry) -> None:
        """It waits no more, granted or not."""
        entry.waiting = False
        tier = self._tiers[_key(entry)]
        tenant = tier.tenants[entry.tenant]
        tenant.waiting -= 1
        tenant.cost -= entry.cost
        tier.waiting -= 1
        tier.cost -= entry.cost
        tier.resumed -= entry.resumed
        if not tenant.waiting:
            del tier.tenants[entry.tenant]
            if tenant.finish > tier.virtual:
                tier.finished[entry.tenant] = tenant.finish
        elif len(tenant.entries) > 2 * tenant.waiting + 64:
            tenant.entries = [item for item in tenant.entries if item[1].waiting]
            heapq.heapify(tenant.entries)
        if not tier.waiting:
            # An idle tier saves nothing up, and its tenants start afresh together.
            tier.owed = tier.largest = 0.0
            tier.finished.clear()
            tier.virtual = 0.0
        elif len(tier.finished) > 4 * len(tier.tenants) + 64:
            tier.finished = {t: f for t, f in tier.finished.items() if f > tier.virtual}

    def ahead(self, entry: Entry) -> tuple[int, float]:
        """`(entries, token cost)`: who stands before this entry, and what will probably have been
        granted with its own grant, by those who wait now.

        Before it stand more urgent tiers whole, and of its own tier what fairness puts first: the
        tenant's own earlier entries, and of every other tenant as much as it may take meanwhile.
        Shares change what that costs: tiers below take theirs in between, and with one of its own a
        tier's turn comes however much waits above.
        """
        count, above, below = 0, 0.0, list[_Tier]()
        for tier in self._tiers.values():
            if tier.rule.rank < entry.rule.rank:
                count += tier.waiting
                above += tier.cost
            elif tier.rule.rank > entry.rule.rank and tier.waiting and tier.rule.share > 0:
                below.append(tier)
        tier = self._tiers.get(_key(entry))
        entries, own = (0, 0.0) if tier is None else self._ahead_within(tier, entry)
        own += entry.cost
        due = above + own
        left = 1.0 - sum(other.rule.share for other in below)
        if below and left > 0:
            due += sum(min(float(other.cost), other.rule.share * due / left) for other in below)
        if entry.rule.share > 0:
            owed = 0.0 if tier is None else tier.owed
            due = min(due, max(own, (own - owed) / entry.rule.share))
        return count + entries, due

    @staticmethod
    def _ahead_within(tier: _Tier, entry: Entry) -> tuple[int, float]:
        """`(entries, token cost)` before this one in its own tier."""
        count, cost = 0, 0.0
        own_cost = 0
        tenant = tier.tenants.get(entry.tenant)
        if tenant is not None:
            for key, other in tenant.entries:
                if other.waiting and other is not entry and key < entry.key:
                    count += 1
                    own_cost += other.cost
        cost += own_cost
        for name, other_tenant in tier.tenants.items():
            if name == entry.tenant:
                continue
            head = other_tenant.head()
            if head is None:
                continue
            fair = (own_cost + entry.cost) / entry.weight * head.weight
            taken = min(float(other_tenant.cost), fair)
            cost += taken
            count += round(other_tenant.waiting * taken / max(other_tenant.cost, 1))
        return count, cost

    def check(self) -> None:
        """Our own invariants."""
        for name, tier in self._tiers.items():
            live = [
                entry
                for tenant in tier.tenants.values()
                for _, entry in tenant.entries
                if entry.waiting
            ]
            assert tier.waiting == len(live), f"tier {name} miscounts"
            assert tier.cost == sum(entry.cost for entry in live), f"tier {name}: cost drifted"
            assert tier.resumed == sum(entry.resumed for entry in live), f"tier {name}: resumed"
            assert all(tenant.waiting for tenant in tier.tenants.values()), "an empty tenant stays"
            assert tier.owed >= 0, f"tier {name} owes"


def _key(entry: Entry) -> tuple[str, int]:
    return entry.rule.name, entry.rule.rank
