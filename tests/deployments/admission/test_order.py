from __future__ import annotations

import random
from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.admission.order import Entry, FairOrder
from deployments.admission.tiers import TierRule, TierTable
from engine.errors import ConfigError

HIGH = TierRule(name="high", rank=0)
LOW = TierRule(name="low", rank=10, share=0.2)
LOWEST = TierRule(name="lowest", rank=20, share=0.1)


class Line:
    """An order and its arrivals."""

    def __init__(self) -> None:
        self.order = FairOrder()
        self.arrivals = 0

    def add(
        self,
        rule: TierRule = HIGH,
        tenant: str = "a",
        *,
        cost: int = 10,
        weight: float = 1.0,
        resumed: bool = False,
        deadline: float = 60.0,
    ) -> Entry:
        self.arrivals += 1
        entry = Entry(rule, tenant, weight, cost, resumed, deadline, self.arrivals)
        self.order.push(entry)
        self.order.check()
        return entry

    def take(self) -> Entry:
        entry = self.order.candidates()[0]
        self.order.take(entry)
        self.order.check()
        return entry


def test_urgent_tiers_first_then_by_arrival() -> None:
    line = Line()
    low = [line.add(LOW) for _ in range(2)]
    high = [line.add(HIGH) for _ in range(2)]
    assert [line.take() for _ in range(4)] == high + low
    assert len(line.order) == 0


def test_an_earlier_deadline_goes_first_within_a_tenant() -> None:
    line = Line()
    patient, hurried = line.add(deadline=60.0), line.add(deadline=5.0)
    assert [line.take(), line.take()] == [hurried, patient]


def test_what_was_admitted_before_goes_ahead_of_everything() -> None:
    line = Line()
    line.add(HIGH)
    line.add(LOW, "b")
    resumed = line.add(LOW, "c", resumed=True)
    assert line.take() is resumed


def test_a_thousand_requests_of_one_tenant_do_not_hold_up_another() -> None:
    line = Line()
    for _ in range(1000):
        line.add(tenant="flood")
    for _ in range(20):
        line.take()
    polite = [line.add(tenant="polite") for _ in range(5)]
    served = [line.take() for _ in range(12)]
    assert set(polite) <= set(served)


def test_tenants_get_cost_by_weight() -> None:
    line = Line()
    for _ in range(400):
        line.add(tenant="one", cost=10)
        line.add(tenant="three", cost=25, weight=3.0)
    got: Counter[str] = Counter()
    for _ in range(200):
        entry = line.take()
        got[entry.tenant] += entry.cost
    assert got["three"] / got["one"] == pytest.approx(3.0, rel=0.1)


def test_leaving_and_coming_back_does_not_wipe_the_account() -> None:
    """One request at a time from a tenant that took a lot: it still waits for its turn."""
    line = Line()
    line.add(tenant="heavy", cost=1000)
    for _ in range(50):
        line.add(tenant="light", cost=10)
    assert line.take().tenant in ("heavy", "light")
    while "heavy" in {entry.tenant for entry in line.order}:
        line.take()
    line.add(tenant="heavy", cost=1000)
    assert [line.take().tenant for _ in range(10)] == ["light"] * 10


def test_a_flood_from_above_leaves_the_shares_below() -> None:
    line = Line()
    for _ in range(100):
        line.add(LOW, "b", cost=20)
        line.add(LOWEST, "c", cost=50)
    got: Counter[str] = Counter()
    for _ in range(600):
        line.add(HIGH, cost=10)
        entry = line.take()
        got[entry.rule.name] += entry.cost
    total = sum(got.values())
    assert got["low"] / total == pytest.approx(0.2, abs=0.02)
    assert got["lowest"] / total == pytest.approx(0.1, abs=0.02)


def test_a_tier_that_was_idle_has_saved_nothing_up() -> None:
    line = Line()
    line.order.take(line.add(LOW, "b"))
    for _ in range(100):
        line.add(HIGH)
        line.take()
    for _ in range(10):
        line.add(HIGH)
        line.add(LOW, "b")
    assert [line.take().rule.name for _ in range(4)] == ["high"] * 4


def test_what_is_ahead_of_an_entry() -> None:
    line = Line()
    line.add(HIGH, cost=30)
    line.add(LOWEST, cost=70)
    for _ in range(100):
        line.add(LOW, "flood", cost=10)
    entry = Entry(LOW, "polite", 1.0, 10, False, 60.0, 1000)
    count, cost = line.order.ahead(entry)
    assert count == 2  # the urgent one, and one of the flood at equal weight
    # Those and itself are 50, of which the tier below takes a tenth in between.
    assert cost == pytest.approx(50 + 50 / 0.9 * 0.1)


def test_a_share_bounds_what_is_granted_before_a_tier_s_turn() -> None:
    line = Line()
    for _ in range(100):
        line.add(HIGH, cost=10)
    first = Entry(LOW, "a", 1.0, 10, False, 60.0, 1000)
    assert line.order.ahead(first) == (100, 50.0)  # a fifth of that is its own
    line.add(LOW, "a", cost=10)
    second = Entry(LOW, "a", 1.0, 10, False, 60.0, 1001)
    assert line.order.ahead(second) == (101, 100.0)
    # What the tier is owed already comes sooner, and never before its own.
    for _ in range(4):
        line.take()
    assert line.order.ahead(second) == (97, pytest.approx((20 - 8) / 0.2))
    no_share = Entry(TierRule(name="none", rank=10), "a", 1.0, 10, False, 60.0, 1002)
    assert line.order.ahead(no_share)[1] == 960 + 10


arrivals = st.lists(
    st.tuples(
        st.sampled_from([HIGH, LOW, LOWEST]),
        st.sampled_from("abc"),
        st.integers(1, 100),
        st.integers(0, 3),
    ),
    max_size=150,
)


@given(arrivals)
@settings(max_examples=200, deadline=None)
def test_every_entry_is_served_once_and_accounts_hold(steps) -> None:
    line, served, offered = Line(), list[Entry](), list[Entry]()
    for rule, tenant, cost, takes in steps:
        offered.append(line.add(rule, tenant, cost=cost))
        for _ in range(min(takes, len(line.order))):
            served.append(line.take())
    while len(line.order):
        served.append(line.take())
    assert sorted(e.arrival for e in served) == [e.arrival for e in offered]
    assert len(set(map(id, served))) == len(served)


@given(st.integers(0, 10_000), st.floats(0.05, 0.5))
@settings(max_examples=60, deadline=None)
def test_nobody_waits_longer_than_the_share_promises(seed: int, share: float) -> None:
    """However much arrives above, an entry of a tier with a share is served before
    (cost ahead in its tier + its own + slack) / share has been granted in all."""
    rng = random.Random(seed)
    rule = TierRule(name="low", rank=9, share=share)
    line = Line()
    granted = 0
    waiting: deque[tuple[Entry, float]] = deque()
    for _ in range(400):
        for _ in range(rng.randrange(3)):
            line.add(HIGH, rng.choice("xyz"), cost=rng.randrange(1, 50))
        if rng.random() < 0.1:
            ahead = sum(e.cost for e, _ in waiting)
            cost = rng.randrange(1, 50)
            bound = granted + (ahead + cost + 100) / share + 100
            waiting.append((line.add(rule, "low", cost=cost), bound))
        if not len(line.order):
            continue
        entry = line.take()
        granted += entry.cost
        if waiting and entry is waiting[0][0]:
            waiting.popleft()
        assert all(granted <= bound for _, bound in waiting)


def test_a_table_of_tiers_is_checked_and_travels() -> None:
    table = TierTable([HIGH, LOW, LOWEST], revision=4)
    again = TierTable.from_wire(table.to_wire())
    assert (again.rules, again.revision) == (table.rules, 4)
    assert table.rule("gone", 15) == TierRule(name="gone", rank=15)
    with pytest.raises(ConfigError, match=r"add up to 1\.2"):
        TierTable([TierRule(name="a", share=0.6), TierRule(name="b", share=0.6)])
    with pytest.raises(ConfigError, match="'a' is there twice"):
        TierTable([TierRule(name="a"), TierRule(name="a")])
    for fault in ({"share": 1.5}, {"reserved_slots": -1}, {"max_wait_s": 0}):
        with pytest.raises(ConfigError, match=next(iter(fault))):
            TierRule(name="a", **fault)
