"""Which of two queues leads: as events, and between two queues over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.admission.actor import QueueActor
from deployments.admission.client import QueueAway, QueueClient, QueueReporter
from deployments.admission.leading import Leadership
from deployments.admission.queue import QueueLimits
from deployments.admission.tiers import TierRule, TierTable
from deployments.link.client import Backoff
from deployments.link.messages import Grant, Report

SECRET = b"the secret of the test cluster!!"
QUICK = Backoff(first_s=0.01, max_s=0.05)


def test_a_queue_without_another_leads_at_once():
    alone = Leadership()
    alone.peer_away(7)
    assert alone.epoch == 6
    assert alone.leads


def test_of_two_that_begin_together_the_first_leads_and_the_second_hears_it():
    first, second = Leadership(0), Leadership(1)
    second.peer_says(first.epoch, 10)
    first.peer_says(second.epoch, 11)
    second.peer_says(first.epoch, 12)
    assert (first.epoch, second.epoch) == (10, 0)


def test_the_one_that_stood_by_leads_with_a_higher_epoch_whatever_its_clock_says():
    second = Leadership(1)
    second.peer_says(1000, 5)
    second.peer_away(6)
    assert second.epoch == 1003
    # What comes back hears of it, though its own clock was ahead.
    first = Leadership(0)
    first.peer_says(second.epoch, 2000)
    assert not first.leads


def test_of_two_that_lead_the_lower_epoch_stands_by():
    first, second = Leadership(0), Leadership(1)
    first.peer_away(10)
    second.peer_away(10)
    assert (first.epoch, second.epoch) == (10, 11)
    first.peer_says(second.epoch, 12)
    second.peer_says(10, 12)
    assert (first.epoch, second.epoch) == (0, 11)


events = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["says", "away", "dies"]), st.integers(0, 50)),
    max_size=40,
)


@given(events, st.integers(0, 1))
def test_whatever_happened_two_that_hear_each_other_end_with_one_leader(life: Any, speaks: int):
    """What is said arrives late, clocks go wrong, processes die: no epoch comes twice, and once
    both are heard exactly one leads, for good."""
    queues = [Leadership(0), Leadership(1)]
    said = [[0], [0]]
    begun: list[int] = []
    clock = 1000

    def note(place: int) -> None:
        epoch = queues[place].epoch
        if epoch != said[place][-1]:
            said[place].append(epoch)
            if epoch:
                begun.append(epoch)

    for place, what, late in life:
        clock += late - 20  # may go back
        if what == "dies":
            queues[place] = Leadership(place)
            clock = max([clock, *(epoch + 2 for epoch in begun)])  # a start takes a while
        elif what == "away":
            queues[place].peer_away(clock)
        else:
            queues[place].peer_says(said[1 - place][-1 - late % len(said[1 - place])], clock)
        note(place)
    assert len(begun) == len(set(begun))
    for _ in range(3):
        for place in (speaks, 1 - speaks):
            queues[place].peer_says(queues[1 - place].epoch, clock)
    leading = [queue.epoch for queue in queues if queue.leads]
    assert len(leading) == 1
    for place in (0, 1):
        queues[place].peer_says(queues[1 - place].epoch, clock)
    assert [queue.epoch for queue in queues if queue.leads] == leading


class Pair:
    """Two queues that know of each other, a decode replica, gateways."""

    def __init__(self) -> None:
        self.queues: list[QueueActor | None] = [None, None]
        self.closers: list[Callable[[], Awaitable[None]]] = []

    def finder(self, place: int) -> Callable[[], Awaitable[str]]:
        async def find() -> str:
            queue = self.queues[place]
            if queue is None:
                raise LookupError("no queue is there")
            return await queue.address()

        return find

    async def start(self, place: int) -> QueueActor:
        queue = self.queues[place] = QueueActor(
            "m", SECRET, host="127.0.0.1", place=place, find_peer=self.finder(1 - place)
        )
        await queue.address()
        return queue

    async def stop(self, place: int) -> None:
        """As its death looks to everybody else."""
        queue, self.queues[place] = self.queues[place], None
        assert queue is not None
        await queue.close()

    async def snapshot(self, place: int) -> dict[str, Any]:
        queue = self.queues[place]
        assert queue is not None
        return await queue.snapshot()

    async def until(self, place: int, true: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        async def poll() -> dict[str, Any]:
            while True:
                now = await self.snapshot(place)
                if true(now):
                    return now
                await asyncio.sleep(0.002)

        return await asyncio.wait_for(poll(), 240)

    async def gateway(self, name: str = "g") -> QueueClient:
        client = QueueClient(self.finder(0), SECRET, name, find_other=self.finder(1), backoff=QUICK)
        client.set_policy(
            TierTable([TierRule(name="u"), TierRule(name="b", rank=9)], 1), QueueLimits()
        )
        client.start()
        self.closers.append(client.close)
        return client

    async def decode(self, slots: int) -> Decode:
        decode = Decode(self, slots)
        decode.reporter.start()
        self.closers.append(decode.reporter.close)
        decode.report()
        return decode


class Decode:
    """Lists what it runs, reports every change, and takes no more than it has slots."""

    def __init__(self, pair: Pair, slots: int) -> None:
        self.slots = slots
        self.running: dict[tuple[int, int], int] = {}
        self.full = 0
        self.reporter = QueueReporter(
            pair.finder(0), SECRET, "d", find_other=pair.finder(1), backoff=QUICK
        )

    def report(self) -> None:
        grants = tuple((epoch, g, n) for (epoch, g), n in self.running.items())
        self.reporter.changed(
            Report(replica_id="d", slots=self.slots, capacity_tokens=1000, grants=grants)
        )

    def begin(self, grant: Grant) -> bool:
        if len(self.running) >= self.slots:
            self.full += 1
            return False
        self.running[grant.epoch, grant.grant_id] = 1
        self.report()
        return True

    def finish(self, grant: Grant) -> None:
        del self.running[grant.epoch, grant.grant_id]
        self.report()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    yield pair
    for close in pair.closers:
        await close()
    for place in (0, 1):
        if pair.queues[place] is not None:
            await pair.stop(place)


async def both(pair: Pair, slots: int = 1) -> tuple[QueueClient, Decode]:
    """Two queues of which the first leads, and both have their links."""
    await pair.start(0)
    await pair.until(0, lambda now: now["leads"])
    await pair.start(1)
    gateway, decode = await pair.gateway(), await pair.decode(slots)
    for place in (0, 1):
        await pair.until(place, lambda now: now["peer_linked"] and now["gateways"] == ["g"])
        await pair.until(place, lambda now: now["decodes"] == ["d"])
    assert await gateway.wait_available(240)
    return gateway, decode


async def acquire(client: QueueClient, **options: Any) -> Grant:
    return await asyncio.wait_for(client.acquire(cost_tokens=10, prompt_tokens=5, **options), 240)


async def test_the_first_leads_and_whoever_asks_or_reports_goes_to_it(pair: Pair) -> None:
    gateway, _ = await both(pair, 2)
    grant = await acquire(gateway)
    first, second = await pair.snapshot(0), await pair.snapshot(1)
    assert (first["leads"], second["leads"]) == (True, False)
    assert grant.epoch == first["epoch"]
    # What stands by has the tiers, and no slots of its own.
    assert second["tiers"] == ["b", "u"]
    assert second["free_slots"] == {}


async def test_those_who_wait_are_asked_for_where_the_other_leads_in_the_order_of_their_tiers(
    pair: Pair,
) -> None:
    gateway, decode = await both(pair)
    running = await acquire(gateway)
    decode.begin(running)
    order: list[str] = []

    async def ask(tier: str, priority: int) -> None:
        grant = await acquire(gateway, tier=tier, priority=priority)
        order.append(tier)
        assert decode.begin(grant)
        decode.finish(grant)
        gateway.release(grant)

    waiting = [asyncio.create_task(ask(*each)) for each in (("b", 9), ("b", 9), ("u", 0))]
    before = await pair.until(0, lambda now: now["waiting"] == 3)
    await pair.stop(0)
    after = await pair.until(1, lambda now: now["waiting"] == 3)
    assert after["epoch"] > before["epoch"]
    # It knows what the one before it granted.
    assert after["free_slots"] == {"d": 0}
    assert not order
    decode.finish(running)
    await asyncio.gather(*waiting)
    assert order == ["u", "b", "b"]
    assert decode.full == 0
    # What comes back stands by, and takes over in its turn.
    await pair.start(0)
    await pair.until(0, lambda now: now["gateways"] == ["g"] and now["decodes"] == ["d"])
    assert not (await pair.snapshot(0))["leads"]
    grant = await acquire(gateway)
    assert grant.epoch == after["epoch"]
    gateway.release(grant)
    await pair.stop(1)
    await pair.until(0, lambda now: now["epoch"] > after["epoch"])
    assert (await acquire(gateway)).epoch > after["epoch"]


async def test_the_death_of_the_one_that_stands_by_is_not_noticed(pair: Pair) -> None:
    gateway, decode = await both(pair)
    running = await acquire(gateway)
    decode.begin(running)
    waiting = asyncio.create_task(acquire(gateway))
    before = await pair.until(0, lambda now: now["waiting"] == 1)
    await pair.stop(1)
    await pair.until(0, lambda now: not now["peer_linked"])
    decode.finish(running)
    assert (await waiting).epoch == before["epoch"]


async def test_without_either_callers_are_told_and_the_one_that_comes_back_alone_leads(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.admission.client.TAKE_OVER_S", 0.05)
    gateway, decode = await both(pair)
    decode.begin(await acquire(gateway))
    waiting = asyncio.create_task(acquire(gateway))
    await pair.until(0, lambda now: now["waiting"] == 1)
    await pair.stop(1)
    await pair.stop(0)
    with pytest.raises(QueueAway):
        await waiting
    with pytest.raises(QueueAway):
        await acquire(gateway)
    await pair.start(1)
    await pair.until(1, lambda now: now["leads"] and now["free_slots"] == {"d": 0})


async def test_of_two_that_lead_all_go_to_the_higher_and_the_lower_gives_up(pair: Pair) -> None:
    """As after a queue that was stopped: it goes on and believes that it leads."""
    gateway, decode = await both(pair)
    running = await acquire(gateway)
    decode.begin(running)
    waiting = [asyncio.create_task(acquire(gateway)) for _ in range(3)]
    await pair.until(0, lambda now: now["waiting"] == 3)
    second = pair.queues[1]
    assert second is not None
    second._peer_away()
    # The second is asked, the first hears of it.
    after = await pair.until(1, lambda now: now["waiting"] == 3)
    before = await pair.until(0, lambda now: not now["leads"])
    assert (before["waiting"], before["free_slots"]) == (0, {})
    assert (await pair.snapshot(1))["free_slots"] == {"d": 0}
    decode.finish(running)
    for _ in waiting:
        done, left = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        grant = done.pop().result()
        assert grant.epoch == after["epoch"]
        assert decode.begin(grant)
        decode.finish(grant)
        gateway.release(grant)
        waiting = list(left)
    await pair.until(0, lambda now: now["gateways"] == ["g"] and now["peer_linked"])
    assert not (await pair.snapshot(0))["leads"]
    assert (gateway.num_waiting, decode.full) == (0, 0)
