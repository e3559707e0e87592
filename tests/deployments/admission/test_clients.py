"""Gateways and decode replicas against a queue in process, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from deployments.admission.actor import QueueActor
from deployments.admission.client import QueueAway, QueueClient, QueueReporter
from deployments.admission.queue import QueueLimits
from deployments.link.client import Backoff, dial
from deployments.link.link import LinkHandlers
from deployments.link.messages import Grant, Kind, Report
from deployments.link.wire import CloseCode
from engine.errors import Overloaded, RequestError

SECRET = b"the secret of the test cluster!!"
QUICK = Backoff(first_s=0.01, max_s=0.05)


class Cluster:
    """One queue that can be killed and restarted, and the clients that look for it."""

    def __init__(self) -> None:
        self.queue: QueueActor | None = None
        self.closers: list[Callable[[], Awaitable[None]]] = []

    async def start_queue(self, **limits: Any) -> None:
        self.queue = QueueActor("m", SECRET, host="127.0.0.1", limits=QueueLimits(**limits))
        await self.queue.address()

    async def stop_queue(self) -> None:
        queue, self.queue = self.queue, None
        assert queue is not None
        await queue.close()

    async def find(self) -> str:
        if self.queue is None:
            raise LookupError("no queue")
        return await self.queue.address()

    async def gateway(self, name: str = "g1") -> QueueClient:
        client = QueueClient(self.find, SECRET, name, backoff=QUICK)
        client.start()
        self.closers.append(client.close)
        if self.queue is not None:
            assert await client.wait_available(240)
        return client

    async def decode(self, name: str, slots: int) -> Decode:
        decode = Decode(self, name, slots)
        decode.reporter.start()
        self.closers.append(decode.reporter.close)
        decode.report()
        if self.queue is not None:
            await self.until(lambda s: name in s["free_slots"])
        return decode

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        async def poll() -> None:
            while self.queue is None or not condition(await self.queue.snapshot()):
                await asyncio.sleep(0.002)

        await asyncio.wait_for(poll(), 240)


class Decode:
    """A decode replica as the queue sees it: it lists what it runs and reports every change."""

    def __init__(self, cluster: Cluster, name: str, slots: int) -> None:
        self.name = name
        self.slots = slots
        self.running: dict[tuple[int, int], int] = {}
        self.reporter = QueueReporter(cluster.find, SECRET, name, backoff=QUICK)

    def report(self) -> None:
        self.reporter.changed(
            Report(
                replica_id=self.name,
                slots=self.slots,
                capacity_tokens=1000,
                grants=tuple((epoch, g, n) for (epoch, g), n in self.running.items()),
            )
        )

    def begin(self, grant: Grant, n: int = 1) -> None:
        self.running[grant.epoch, grant.grant_id] = n
        self.report()

    def finish(self, grant: Grant) -> None:
        del self.running[grant.epoch, grant.grant_id]
        self.report()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    for close in cluster.closers:
        await close()
    if cluster.queue is not None:
        await cluster.queue.close()


async def acquire(client: QueueClient, **options: Any) -> Grant:
    return await asyncio.wait_for(client.acquire(cost_tokens=10, prompt_tokens=5, **options), 240)


async def test_a_grant_names_the_replica_and_its_end_frees_the_slot(cluster: Cluster) -> None:
    await cluster.start_queue()
    gateway, decode = await cluster.gateway(), await cluster.decode("d1", 1)
    grant = await acquire(gateway)
    assert grant.replica_id == "d1"
    decode.begin(grant)
    waiting = asyncio.create_task(acquire(gateway))
    await cluster.until(lambda s: s["waiting"] == 1)
    decode.finish(grant)
    gateway.release(grant)
    second = await waiting
    assert (second.epoch, second.grant_id) == (grant.epoch, grant.grant_id + 1)
    gateway.release(second)
    gateway.release(second)
    await cluster.until(lambda s: s["free_slots"] == {"d1": 1})
    assert (gateway.num_waiting, gateway.num_held) == (0, 0)


async def test_many_callers_share_few_slots_and_all_are_served(cluster: Cluster) -> None:
    await cluster.start_queue()
    gateways = [await cluster.gateway(f"g{i}") for i in range(2)]
    decodes = {name: await cluster.decode(name, 3) for name in ("d1", "d2")}
    most = 0

    async def request(i: int) -> None:
        nonlocal most
        gateway = gateways[i % 2]
        grant = await acquire(gateway)
        decode = decodes[grant.replica_id]
        decode.begin(grant)
        most = max(most, *(len(d.running) for d in decodes.values()))
        await asyncio.sleep(0.001)
        decode.finish(grant)
        gateway.release(grant)

    await asyncio.gather(*(request(i) for i in range(100)))
    assert most == 3
    await cluster.until(lambda s: s["free_slots"] == {"d1": 3, "d2": 3} and s["waiting"] == 0)


async def test_refusals_reach_the_caller_as_the_errors_they_are(cluster: Cluster) -> None:
    await cluster.start_queue(max_waiting=1)
    gateway = await cluster.gateway()
    decode = await cluster.decode("d1", 1)
    decode.begin(await acquire(gateway))
    waiting = asyncio.create_task(acquire(gateway))
    await cluster.until(lambda s: s["waiting"] == 1)
    with pytest.raises(Overloaded, match="1 requests wait") as full:
        await acquire(gateway)
    waiting.cancel()
    await asyncio.wait([waiting])
    await cluster.until(lambda s: s["waiting"] == 0)
    with pytest.raises(Overloaded) as late:
        await acquire(gateway, remaining_ms=300)
    with pytest.raises(RequestError, match="n=2") as never:
        await acquire(gateway, n=2)
    assert (full.value.code, late.value.code) == ("queue_full", "queue_timeout")
    assert never.value.param == "n"
    assert cluster.queue is not None
    refused = (await cluster.queue.snapshot())["refused"]
    assert refused == {"queue_full": 1, "queue_timeout": 1, "invalid_value": 1}


async def test_a_grant_that_nobody_uses_comes_back_by_the_timer(cluster: Cluster) -> None:
    await cluster.start_queue(grant_expiry_s=0.1)
    gateway = await cluster.gateway()
    await cluster.decode("d1", 1)
    first = await acquire(gateway)
    second = await acquire(gateway)
    assert second.grant_id == first.grant_id + 1


async def test_a_cancelled_caller_leaves_the_queue(cluster: Cluster) -> None:
    await cluster.start_queue()
    gateway = await cluster.gateway()
    await cluster.decode("d1", 1)
    await acquire(gateway)
    waiting = asyncio.create_task(acquire(gateway))
    await cluster.until(lambda s: s["waiting"] == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await cluster.until(lambda s: s["waiting"] == 0)
    assert gateway.num_waiting == 0


@pytest.mark.parametrize("yields", range(12))
async def test_a_grant_on_its_way_to_a_cancelled_caller_is_given_back(
    cluster: Cluster, yields: int
) -> None:
    await cluster.start_queue(grant_expiry_s=600)
    gateway = await cluster.gateway()
    await cluster.decode("d1", 1)
    caller = asyncio.create_task(gateway.acquire(cost_tokens=1, prompt_tokens=1))
    for _ in range(yields):  # cancel at every stage between asking and receiving
        await asyncio.sleep(0)
    caller.cancel()
    [result] = await asyncio.gather(caller, return_exceptions=True)
    if isinstance(result, Grant):
        gateway.release(result)
    await cluster.until(lambda s: s["free_slots"] == {"d1": 1} and s["waiting"] == 0)
    assert (gateway.num_waiting, gateway.num_held) == (0, 0)


async def test_without_a_queue_callers_are_told_at_once(cluster: Cluster) -> None:
    gateway = await cluster.gateway()
    assert not gateway.available
    with pytest.raises(QueueAway):
        await gateway.acquire(cost_tokens=1, prompt_tokens=1)
    assert not await gateway.wait_available(0.01)


async def test_callers_that_wait_when_the_queue_dies_are_told(cluster: Cluster) -> None:
    await cluster.start_queue()
    gateway = await cluster.gateway()
    await cluster.decode("d1", 1)
    held = await acquire(gateway)
    waiting = asyncio.create_task(acquire(gateway))
    await cluster.until(lambda s: s["waiting"] == 1)
    await cluster.stop_queue()
    with pytest.raises(QueueAway, match="went away"):
        await waiting
    gateway.release(held)  # nothing to release it to, and no error
    assert (gateway.num_waiting, gateway.num_held) == (0, 0)


async def test_a_restarted_queue_learns_from_reports_what_is_taken(cluster: Cluster) -> None:
    await cluster.start_queue()
    gateway, decode = await cluster.gateway(), await cluster.decode("d1", 2)
    old = await acquire(gateway)
    decode.begin(old)
    await cluster.stop_queue()
    await cluster.start_queue()
    await cluster.until(lambda s: s["free_slots"] == {"d1": 1} and s["gateways"] == ["g1"])
    new = await acquire(gateway)
    assert new.epoch > old.epoch
    decode.begin(new)
    waiting = asyncio.create_task(acquire(gateway))
    await cluster.until(lambda s: s["waiting"] == 1)
    gateway.release(old)
    decode.finish(old)
    assert (await waiting).replica_id == "d1"


async def test_a_dead_gateways_place_goes_to_the_others(cluster: Cluster) -> None:
    await cluster.start_queue()
    dying, other = await cluster.gateway("g1"), await cluster.gateway("g2")
    await cluster.decode("d1", 1)
    await acquire(dying)
    waiting = asyncio.create_task(acquire(other))
    await cluster.until(lambda s: s["waiting"] == 1)
    link = dying._queues.leader
    assert link is not None
    link._transport.abort()
    assert (await waiting).replica_id == "d1"


async def test_a_dead_replica_gets_nothing(cluster: Cluster) -> None:
    await cluster.start_queue()
    gateway = await cluster.gateway()
    dead, _ = await cluster.decode("d1", 9), await cluster.decode("d2", 1)
    await dead.reporter.close()
    await cluster.until(lambda s: s["free_slots"] == {"d2": 1})
    assert (await acquire(gateway)).replica_id == "d2"


async def test_only_the_latest_of_several_reports_at_once_is_sent(cluster: Cluster) -> None:
    await cluster.start_queue()
    decode = await cluster.decode("d1", 1)
    link = decode.reporter._queues.leader
    assert link is not None
    sent: list[Any] = []
    original = link.send
    link.send = lambda message: bool(sent.append(message)) or original(message)
    for decode.slots in range(2, 9):
        decode.report()
    await cluster.until(lambda s: s["free_slots"] == {"d1": 8})
    assert [(m[0], m[2]) for m in sent] == [(Kind.REPORT, 8)]


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ("gateway", [Kind.REPORT, "d1", 1, 1, [], 0, False]),
        ("decode", [Kind.ACQUIRE, 1, 1, 1, 1, 0, None]),
        ("prefill", [Kind.RELEASE, 1]),
        ("gateway", [Kind.ACQUIRE, 1]),
    ],
)
async def test_whoever_breaks_the_protocol_loses_only_its_own_link(
    cluster: Cluster, role: str, message: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    await cluster.start_queue()
    gateway = await cluster.gateway()
    await cluster.decode("d1", 1)
    handlers = LinkHandlers(on_message=lambda link, message: None)
    link = await dial(await cluster.find(), SECRET, role, "rogue", handlers)
    link.send(message)
    reason = await asyncio.wait_for(link.closed, 240)
    assert reason.code is CloseCode.PEER_CLOSED
    assert (await acquire(gateway)).replica_id == "d1"
