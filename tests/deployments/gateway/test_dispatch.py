"""How the gateway places submits when replicas come and go, over real links in one process."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import pytest

from deployments.admission.actor import QueueActor
from deployments.admission.queue import QueueLimits
from deployments.admission.tiers import TierRule, TierTable
from deployments.gateway.backend import Place
from deployments.gateway.dispatch import MAX_LOST_REPLICAS
from deployments.gateway.errors import describe
from deployments.link.link import Link
from deployments.link.messages import Kind, Submit
from engine.errors import Overloaded
from engine.request import FinishReason, Request, SamplingParams

SECRET = b"a secret of the tests, long enough to be one"


def request(i: int, length: int, max_tokens: int) -> Request:
    rng = random.Random(i)
    return Request(
        request_id=f"r{i}",
        prompt_ids=tuple(rng.randrange(32, 127) for _ in range(length)),
        params=SamplingParams(
            max_tokens=max_tokens, seed=rng.getrandbits(64), temperature=1.0, ignore_eos=True
        ),
    )


class Reader:
    """Reads a stream to its end, and tells when its first token is there."""

    def __init__(self, stream, n: int = 1) -> None:
        self.stream = stream
        self.tokens: list[list[int]] = [[] for _ in range(n)]
        self.finish: list[FinishReason | None] = [None] * n
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for events in self.stream:
                for event in events:
                    self.tokens[event.choice].extend(event.token_ids)
                    self.finish[event.choice] = event.finish
        finally:
            await self.stream.aclose()

    async def each_has(self, count: int) -> None:
        while min(map(len, self.tokens)) < count:
            assert not self.task.done()
            await asyncio.sleep(0.005)


async def answer(client, one: Request, n: int = 1) -> list[list[int]]:
    reader = Reader(await client.open(one, n=n, remaining_s=60.0), n)
    await reader.task
    return reader.tokens


async def lose(cluster, name: str) -> None:
    cluster.decode_directory.drop(name)
    await cluster.decodes.pop(name).close()


async def test_what_the_only_replica_had_begun_waits_for_the_next_one(local_cluster):
    cluster = local_cluster(prefill=False)
    # The queue gives up on newcomers long before another replica is there.
    cluster.queue = QueueActor(
        "app", SECRET, host="127.0.0.1", limits=QueueLimits(no_replica_wait_s=0.1)
    )
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    one = request(1, 30, 300)
    expected = await answer(client, one)
    reader = Reader(await client.open(one, n=1, remaining_s=60.0))
    await reader.each_has(5)
    await lose(cluster, "d0")
    with pytest.raises(Overloaded, match="no decode replica") as refused:
        await client.open(request(2, 4, 4), n=1, remaining_s=60.0)
    assert refused.value.code == "no_replicas"
    await asyncio.sleep(0.5)
    assert not reader.task.done()
    await cluster.add_decode("d1")
    await reader.task
    assert reader.tokens == expected
    assert reader.stream.migrations == 1


async def test_losing_the_queue_and_the_only_replica_together_ends_nothing(local_cluster):
    cluster = local_cluster(prefill=False)
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    one = request(8, 30, 300)
    expected = await answer(client, one)
    reader = Reader(await client.open(one, n=1, remaining_s=60.0))
    await reader.each_has(5)
    await cluster.queue.close()
    await lose(cluster, "d0")
    await asyncio.sleep(0.7)
    assert not reader.task.done()
    await cluster.add_decode("d1", report=False)
    await reader.task
    assert reader.tokens == expected


async def test_many_choices_of_one_stream_move_together(local_cluster):
    cluster = local_cluster(prefill=False)
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    one = request(3, 20, 120)
    expected = await answer(client, one, n=12)
    reader = Reader(await client.open(one, n=12, remaining_s=60.0), 12)
    await reader.each_has(3)
    await cluster.add_decode("d1")
    await lose(cluster, "d0")
    await reader.task
    assert reader.tokens == expected
    assert reader.stream.migrations == 12
    assert client.placements.migrated == {"closed": 12, "died": 0, "hung": 0}


async def rest(batches) -> None:
    async for _ in batches:
        pass


async def test_a_request_that_kills_every_replica_it_meets_is_not_sent_to_all_of_them(
    local_cluster,
):
    cluster = local_cluster(prefill=False)
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    client.window_tokens = 16  # a replica is at most this far ahead
    stream = await client.open(request(9, 10, 2000), n=1, remaining_s=60.0)
    batches = aiter(stream)

    async def meet(k: int) -> None:
        while not cluster.decodes[f"d{k}"].streams.num_streams:
            await anext(batches)
        await cluster.add_decode(f"d{k + 1}")
        await lose(cluster, f"d{k}")

    for k in range(MAX_LOST_REPLICAS + 1):
        await meet(k)
    with pytest.raises(Overloaded, match=r"5 replicas were lost.*d4.*may be the cause") as raised:
        await rest(batches)
    # A client that tried again by itself would end five more.
    failure = describe(raised.value, "r9")
    assert (failure.status, failure.code) == (503, "replicas_lost")
    assert failure.headers == ((b"x-should-retry", b"false"),)
    await stream.aclose()
    assert cluster.decodes["d5"].streams.counters.submits == 0
    assert client.num_streams == 0


async def test_what_was_admitted_before_goes_ahead_of_who_waits(local_cluster):
    cluster = local_cluster(prefill=False, max_running_requests=1)
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    order: list[str] = []

    async def ask(name: str, one: Request) -> None:
        await answer(client, one)
        order.append(name)

    first = Reader(await client.open(request(4, 10, 400), n=1, remaining_s=60.0))
    first.task.add_done_callback(lambda _: order.append("first"))
    await first.each_has(3)
    waiting = [asyncio.create_task(ask(f"w{i}", request(10 + i, 4, 4))) for i in range(3)]
    while client._queue.num_waiting < 3:
        await asyncio.sleep(0.005)
    await lose(cluster, "d0")
    while client._queue.num_waiting < 4:
        await asyncio.sleep(0.005)
    await cluster.add_decode("d1")
    await asyncio.gather(first.task, *waiting)
    assert order == ["first", "w0", "w1", "w2"]


async def test_who_only_tried_while_the_queue_was_away_stands_behind_more_urgent_ones(
    local_cluster,
):
    """Only what had been admitted goes ahead of others. Who may wait does not even try."""
    cluster = local_cluster(prefill=False, max_running_requests=1)
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    order: list[str] = []

    async def ask(tier: str, rank: int, **place) -> None:
        one = replace(request(40 + rank, 4, 4), priority=rank, preemptible=False)
        stream = await client.open(one, n=1, remaining_s=60.0, place=Place(tier=tier, **place))
        await Reader(stream).task
        order.append(tier)

    long = replace(request(4, 10, 4000), preemptible=False)
    first = Reader(await client.open(long, n=1, remaining_s=60.0))
    await first.each_has(3)
    waiting = [
        asyncio.create_task(ask("batch", 30, may_wait=True)),
        asyncio.create_task(ask("default", 10)),
        asyncio.create_task(ask("priority", 0)),
    ]
    while client._queue.num_waiting < 3:
        await asyncio.sleep(0.005)
    before, cluster.queue = cluster.queue, QueueActor("app", SECRET, host="127.0.0.1")
    # Both sides look for it in one place, which is nowhere for a while.
    away = asyncio.Event()

    async def find() -> str:
        await away.wait()
        return await cluster.queue.address()

    client._queue._queues._kept[0]._find_address = find
    assert decode.reporter is not None
    decode.reporter._queues._kept[0]._find_address = find
    await before.close()
    while decode.streams.counters.refused.get("full", 0) < 3:
        await asyncio.sleep(0.005)
    assert client.placements.by_own_choice >= 3
    assert decode.streams.counters.submits == 1
    away.set()
    while client._queue.num_waiting < 3:
        await asyncio.sleep(0.005)
    late = asyncio.create_task(ask("urgent", -1))
    while client._queue.num_waiting < 4:
        await asyncio.sleep(0.005)
    first.task.cancel()
    await asyncio.gather(late, *waiting)
    assert order == ["urgent", "priority", "default", "batch"]


async def test_who_may_wait_for_the_queue_waits_as_long_as_its_tier_does(local_cluster):
    """Not for the time of its answer besides."""
    cluster = local_cluster(prefill=False)
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    await answer(client, request(5, 4, 4))

    async def nowhere() -> str:
        await asyncio.Event().wait()
        raise AssertionError

    client._queue._queues._kept[0]._find_address = nowhere
    await cluster.queue.close()
    while client._queue.available:
        await asyncio.sleep(0.005)
    place = Place(may_wait=True, answer_s=600.0, wait_until_s=time.monotonic() + 0.2)
    with pytest.raises(Overloaded) as refused:
        await client.open(request(6, 4, 4), n=1, remaining_s=4200.0, place=place)
    assert refused.value.code == "queue_timeout"


async def test_a_replica_that_serve_takes_back_gets_work_again(local_cluster):
    cluster = local_cluster(prefill=False)
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    await answer(client, request(5, 4, 4))
    address = cluster.decode_directory.replicas()["d0"]["link"]
    cluster.decode_directory.drop("d0")
    while not decode.draining:
        await asyncio.sleep(0.005)
    cluster.decode_directory.put("d0", address)
    assert len((await answer(client, request(6, 4, 4)))[0]) == 4
    assert not decode.draining


async def test_without_the_queue_a_dead_replica_is_not_asked_again_and_again(local_cluster):
    cluster = local_cluster(prefill=False)
    await cluster.add_decode("d0")
    await cluster.add_decode("d1")
    client = await cluster.add_gateway("g0")
    await cluster.queue.close()
    while client._queue.available:
        await asyncio.sleep(0.005)
    busy = [
        Reader(await client.open(request(20 + i, 4, 2000), n=1, remaining_s=60.0)) for i in range(2)
    ]
    for reader in busy:
        await reader.each_has(3)
    # Dead, while Serve does not know it yet: the one with the least to do.
    await cluster.decodes.pop("d0").close()
    for i in range(5):
        assert len((await answer(client, request(30 + i, 4, 3)))[0]) == 3
    for reader in busy:
        assert not reader.task.done()
        reader.task.cancel()
    await asyncio.wait([reader.task for reader in busy])


async def test_a_link_that_ends_under_the_submit_means_another_placement(
    local_cluster, monkeypatch
):
    cluster = local_cluster(prefill=False)
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    one = request(7, 10, 10)
    expected = await answer(client, one)
    lost = [True]
    send = Link.send

    def ended_once(link: Link, message, **how) -> bool:
        if message[0] == Kind.SUBMIT and lost:
            lost.pop()
            return False
        return send(link, message, **how)

    monkeypatch.setattr(Link, "send", ended_once)
    assert await answer(client, replace(one, request_id="again")) == expected
    assert lost == []


async def test_the_time_for_an_answer_counts_from_its_grant(local_cluster, monkeypatch):
    cluster = local_cluster(prefill=False, max_running_requests=1)
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    told: dict[str, int | None] = {}
    send = Link.send

    def seen(link: Link, message, **how) -> bool:
        if message[0] == Kind.SUBMIT:
            submit = Submit.from_wire(message)
            told[submit.request.request_id] = submit.remaining_ms
        return send(link, message, **how)

    monkeypatch.setattr(Link, "send", seen)
    place = Place(answer_s=50.0)
    first = Reader(await client.open(request(4, 10, 4000), n=1, remaining_s=900.0, place=place))
    await first.each_has(3)
    # The wait and the answer had 30 s together; what is left of that is not what the answer has.
    second = asyncio.create_task(client.open(request(5, 4, 4), n=1, remaining_s=30.0, place=place))
    while client._queue.num_waiting < 1:
        await asyncio.sleep(0.005)
    waited_s = time.monotonic()
    await asyncio.sleep(0.3)
    first.task.cancel()
    await asyncio.wait([first.task])
    stream = await second
    assert stream.admitted_s is not None
    assert stream.admitted_s - waited_s >= 0.3
    await Reader(stream).task
    # Of what the replica is told nothing went to the wait; a client in more haste is told instead.
    assert stream._deadline == stream.admitted_s + 50.0
    assert told["r5"] is not None
    assert 30_000 < told["r5"] <= 50_000
    place = replace(place, whole_until_s=time.monotonic() + 40.0)
    hasty = await client.open(request(6, 4, 4), n=1, remaining_s=40.0, place=place)
    await Reader(hasty).task
    assert told["r6"] is not None
    assert told["r6"] <= 40_000


async def test_a_link_that_ended_while_its_replica_lives_is_dialled_again(
    local_cluster, monkeypatch
):
    monkeypatch.setattr("deployments.gateway.dispatch.LOOK_AGAIN_S", 0.05)
    monkeypatch.setattr("deployments.decode.LOOK_AGAIN_S", 0.05)
    cluster = local_cluster()
    prefill = await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    await cluster.add_gateway("g0")
    for service, peer in ((decode, "g0"), (prefill, "d0")):
        links = service._server.links
        while peer not in links:
            await asyncio.sleep(0.005)
        ended = links[peer]
        ended.close()
        while links.get(peer) in (None, ended):
            await asyncio.sleep(0.005)


async def test_a_request_in_slots_that_its_tier_keeps_is_not_preempted(local_cluster):
    cluster = local_cluster(prefill=False, max_running_requests=8)
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    client.set_policy(TierTable([TierRule(name="batch", rank=30, share=0.2)], 1), QueueLimits())
    readers: list[Reader] = []
    for i in range(2):
        one = replace(request(60 + i, 4, 2000), priority=30)
        stream = await client.open(one, n=1, remaining_s=60.0, place=Place(tier="batch"))
        readers.append(Reader(stream))
        await readers[-1].each_has(1)
    # A fifth of eight slots is one.
    assert sorted(decode.streams.alive(), key=str) == [(30, 30, 1, 4), (30, None, 1, 4)]
    for reader in readers:
        reader.task.cancel()
    await asyncio.wait([reader.task for reader in readers])
