"""Processes die or hang while requests run: whoever is asked answers, and nothing stays behind.

The times at which the others noticed are printed and recorded as properties, not asserted beyond
seconds: replicas' logs and these tests share the machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import httpx
import psutil
import pytest
from serving import Cluster, ProbeError, end, locally, wait_for

from cluster import processes

pytestmark = pytest.mark.cluster

Note = Callable[[str, float], None]


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    def note(what: str, seconds: float) -> None:
        record_property(what, round(seconds, 4))
        print(f"{what}: {seconds * 1000:.1f} ms")

    return note


@pytest.fixture
async def client(cluster: Cluster):
    async with httpx.AsyncClient(base_url=cluster.url, timeout=600, trust_env=False) as client:
        yield client


class Over(Exception):
    """What was to be interrupted had ended by itself: the machine stood still in between."""


def until_interrupted(test: Callable[..., Any]) -> Callable[..., Any]:
    """Again where the test was too late for what it is about."""

    @wraps(test)
    async def run(cluster: Cluster, client: httpx.AsyncClient, note: Note) -> None:
        for _ in range(4):
            try:
                return await test(cluster, client, note)
            except Over:
                await asyncio.to_thread(cluster.settled)
        await test(cluster, client, note)

    return run


@dataclass(frozen=True)
class Asked:
    """A completion of exactly `max_tokens` tokens at temperature 1."""

    model: str
    seed: int
    length: int
    max_tokens: int
    n: int = 1

    @property
    def params(self) -> dict[str, Any]:
        rng = random.Random(self.seed)
        prompt = [rng.randrange(32, 127) for _ in range(self.length)]
        return {"prompt": prompt, "max_tokens": self.max_tokens, "seed": self.seed}


@cache
def expected(asked: Asked) -> list[str]:
    """What one local engine answers."""
    answers = locally(asked.model, n=asked.n, temperature=1.0, ignore_eos=True, **asked.params)
    return [answer.text for answer in answers]


class Reader:
    """One streamed completion, read in the background and as cheaply as can be: where the machine
    is busy, a slow client would see the middle of an answer when decode is long done with it."""

    def __init__(self, client: httpx.AsyncClient, asked: Asked) -> None:
        self.asked = asked
        self.texts = [""] * asked.n
        self.finishes: list[str | None] = [None] * asked.n
        self._some = asyncio.Event()
        self.task = asyncio.create_task(self._read(client))

    async def _read(self, client: httpx.AsyncClient) -> None:
        asked = self.asked
        body = {"model": asked.model, "n": asked.n, "stream": True, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body | asked.params) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return
                if line:
                    self._take(json.loads(line.removeprefix("data: ")))
        raise AssertionError("the answer has no end")

    def _take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            self.texts[choice["index"]] += choice["text"]
            self.finishes[choice["index"]] = choice["finish_reason"]
        if all(self.texts):
            self._some.set()

    async def running(self) -> None:
        """Wait until each choice has some text."""
        waiting = asyncio.create_task(self._some.wait())
        await asyncio.wait({waiting, self.task}, return_when=asyncio.FIRST_COMPLETED)
        assert self._some.is_set(), self.task.exception()
        waiting.cancel()

    async def exact(self) -> None:
        """Wait for the end: it is the answer of one local engine."""
        await self.task
        assert self.texts == expected(self.asked)
        assert self.finishes == ["length"] * self.asked.n


async def running(client: httpx.AsyncClient, *asked: Asked) -> list[Reader]:
    """Start them all and wait until each is in the middle of its answer."""
    for one in asked:
        expected(one)  # beforehand: the machine has few cores
    readers = [Reader(client, one) for one in asked]
    await asyncio.gather(*(reader.running() for reader in readers))
    if any(reader.task.done() for reader in readers):
        await asyncio.gather(*(reader.task for reader in readers))
        raise Over
    return readers


def events(stats: dict[str, Any], name: str, since: float) -> list[dict[str, Any]]:
    """Events of the submits that ended on a decode replica, later than `since`."""
    return [
        event
        for submit in stats["log"]
        for event in submit["events"]
        if event["event"] == name and event["t"] > since
    ]


@until_interrupted
async def test_a_killed_decode_replica_is_not_the_clients_problem(
    cluster: Cluster, client: httpx.AsyncClient, note: Note
):
    (victim, pid), (survivor, _) = cluster.pids("tiny", "Decode").items()
    long = [Asked("tiny", i, 50, 1000) for i in range(2)]  # one on each
    readers = await running(client, *long, Asked("tiny", 9, 20, 300, n=3))
    killed = end(pid, signal.SIGKILL)
    for reader in readers:
        await reader.exact()
    stats = await asyncio.to_thread(cluster.stats, "tiny", "Decode", survivor)
    if not (moved := events(stats, "Submitted", killed)):
        raise Over
    note("decode killed: gateway placed its streams elsewhere after", moved[0]["t"] - killed)
    await asyncio.to_thread(cluster.settled)
    assert victim not in cluster.pids("tiny", "Decode")


async def patiently(client: httpx.AsyncClient) -> dict[str, Any]:
    """A newcomer's answer, who tries again when it is told to."""
    body = {"model": "fake", "prompt": "new here", "max_tokens": 4, "ignore_eos": True}
    while True:
        answer = await client.post("/v1/completions", json=body)
        if answer.status_code == 200:
            return answer.json()
        assert answer.status_code == 503, answer.text
        await asyncio.sleep(float(answer.headers["retry-after"]))


@until_interrupted
async def test_the_only_decode_replica_is_restarted_and_its_streams_go_on(
    cluster: Cluster, client: httpx.AsyncClient, note: Note
):
    (pid,) = cluster.pids("fake", "Decode").values()
    readers = await running(client, *(Asked("fake", 20 + i, 40, 1500) for i in range(2)))
    killed = end(pid, signal.SIGKILL)
    newcomer = asyncio.create_task(patiently(client))
    for reader in readers:
        await reader.exact()
    assert (await newcomer)["choices"][0]["finish_reason"] == "length"
    (replica,) = cluster.pids("fake", "Decode")
    if not (resumed := events(cluster.stats("fake", "Decode", replica), "Submitted", killed)):
        raise Over
    note("only decode killed: its streams went on after", resumed[0]["t"] - killed)
    await asyncio.to_thread(cluster.settled)


@until_interrupted
async def test_a_prefill_replica_killed_mid_transfer_costs_nothing_but_time(
    cluster: Cluster, client: httpx.AsyncClient, note: Note
):
    asked = [Asked("tiny", 30 + i, 3500, 10) for i in range(8)]
    for one in asked:
        expected(one)
    before = cluster.counted("tiny", "decisions")
    ((replica, prefill),) = cluster.pids("tiny", "Prefill").items()
    sent = cluster.stats("tiny", "Prefill", replica)["bytes_sent"]

    def transferring() -> bool:
        now = cluster.stats("tiny", "Prefill", replica)
        return now["sessions"] > 1 and now["bytes_sent"] > sent

    readers = [Reader(client, one) for one in asked]
    await asyncio.to_thread(wait_for, transferring, every_s=0.0)
    killed = end(prefill, signal.SIGKILL)
    for reader in readers:
        await reader.exact()
    failed = [
        event["t"]
        for replica in cluster.pids("tiny", "Decode")
        for event in events(cluster.stats("tiny", "Decode", replica), "PullFailed", killed)
    ]
    if not failed:
        raise Over
    note("prefill killed: decode knew after", min(failed) - killed)
    after = cluster.counted("tiny", "decisions")
    assert after.get("fallback/link", 0) > before.get("fallback/link", 0)
    await asyncio.to_thread(cluster.settled)


def placed(cluster: Cluster, policy: str) -> float:
    """Requests whose replica was chosen so, by the queue or by the gateway's `own` choice."""
    return sum(
        float(line.split()[-1])
        for line in cluster.metrics().splitlines()
        if line.startswith("tailrace_route_decisions_total{")
        and 'model="tiny"' in line
        and f'policy="{policy}"' in line
    )


@until_interrupted
async def test_requests_are_served_while_both_queues_are_away(
    cluster: Cluster, client: httpx.AsyncClient, note: Note
):
    def both() -> list[dict[str, Any]] | None:
        queues = [cluster.queue_at("tiny", place) for place in (0, 1)]
        return None if None in queues else [queue for queue in queues if queue is not None]

    before = await asyncio.to_thread(wait_for, both)
    (long,) = await running(client, Asked("tiny", 40, 30, 1000))
    killed, _ = [end(queue["pid"], signal.SIGKILL) for queue in before]
    epoch = max(queue["epoch"] for queue in before)

    def back() -> dict[str, Any] | None:
        now = cluster.queue("tiny", timeout_s=1.0)
        return now if now["epoch"] > epoch and now["granted"] else None

    by_itself = placed(cluster, "own")
    waiting = asyncio.create_task(asyncio.to_thread(wait_for, back))
    answered = 0
    while not waiting.done() or answered < 2:
        one = Reader(client, Asked("tiny", 50 + answered, 10, 20))
        await one.exact()
        answered += 1
    now = await waiting
    await asyncio.sleep(2)  # figures are renewed every second
    if placed(cluster, "own") == by_itself:
        raise Over
    note("queues killed: a new one had granted after", time.monotonic() - killed)
    assert now["pid"] not in {queue["pid"] for queue in before}
    await long.exact()
    await asyncio.to_thread(cluster.settled)


@until_interrupted
async def test_a_killed_gateway_leaves_no_stream_on_decode(
    cluster: Cluster, client: httpx.AsyncClient, note: Note
):
    replicas = cluster.pids("tiny", "Decode")
    for replica in replicas:
        cluster.watch("tiny", replica)
    ((gateway, pid),) = cluster.pids("gateway", "Gateway").items()
    readers = [Reader(client, Asked("tiny", 60 + i, 40, 3000)) for i in range(6)]
    await asyncio.gather(*(reader.running() for reader in readers))
    killed = end(pid, signal.SIGKILL)
    ended = await asyncio.gather(*(reader.task for reader in readers), return_exceptions=True)
    if None in ended:
        raise Over
    assert {type(error) for error in ended} == {httpx.RemoteProtocolError}
    note("gateway killed: all clients had seen the end after", time.monotonic() - killed)

    def let_go(replica: str) -> float | None:
        changes = cluster.watched("tiny", replica)
        assert max(streams for _, streams, _ in changes) >= 2
        at, streams, blocks = changes[-1]
        return at if (streams, blocks) == (0, 0) else None

    for replica in replicas:
        at = await asyncio.to_thread(wait_for, lambda replica=replica: let_go(replica))
        note(f"gateway killed: {replica} held nothing after", at - killed)
    told = [
        event
        for replica in replicas
        for event in events(cluster.stats("tiny", "Decode", replica), "Cancelled", killed)
    ]
    if len(told) < len(readers):
        raise Over
    assert len(told) == len(readers)
    # By the end of its connection, seconds before its silence would have told.
    assert all(event["reason"].startswith("link: connection lost") for event in told)
    note("gateway killed: decode knew after", max(event["t"] for event in told) - killed)
    await asyncio.to_thread(cluster.settled)
    note("gateway killed: another was in its place after", time.monotonic() - killed)
    assert gateway not in cluster.pids("gateway", "Gateway")
    again = Reader(client, Asked("tiny", 69, 30, 20))
    await again.exact()


@until_interrupted
async def test_a_decode_replica_that_hangs_loses_its_streams_to_the_other(
    cluster: Cluster, client: httpx.AsyncClient, note: Note
):
    (_, pid), (survivor, _) = cluster.pids("tiny", "Decode").items()
    readers = await running(client, *(Asked("tiny", 70 + i, 50, 1000) for i in range(2)))
    stopped = end(pid, signal.SIGSTOP)
    try:
        for reader in readers:
            await reader.exact()
        stats = await asyncio.to_thread(cluster.stats, "tiny", "Decode", survivor)
        if not (moved := events(stats, "Submitted", stopped)):
            raise Over
        # Links expire after 5 s of silence; before that a slow peer must be left in peace.
        assert moved[0]["t"] - stopped > 3.0
        note("decode stopped: its streams went on elsewhere after", moved[0]["t"] - stopped)
    finally:
        end(pid, signal.SIGCONT)
    await asyncio.to_thread(cluster.settled)
    assert pid in cluster.pids("tiny", "Decode").values()


@until_interrupted
async def test_serves_controller_may_die(cluster: Cluster, client: httpx.AsyncClient, note: Note):
    pids = cluster.all_pids()
    (long,) = await running(client, Asked("tiny", 80, 30, 1000))
    (controller,) = [
        process
        for process in processes.of_session(cluster.ready["session"])
        if process.name().startswith("ray::ServeContr")
    ]
    killed = end(controller.pid, signal.SIGKILL)
    deadline = time.monotonic() + 8.0
    answered = 0
    while time.monotonic() < deadline or answered < 2:
        one = Reader(client, Asked("tiny", 90 + answered, 10, 20))
        await one.exact()
        answered += 1
    await long.exact()

    def recovered() -> bool:
        with contextlib.suppress(psutil.Error, ProbeError):
            return cluster.all_pids() == pids
        return False

    await asyncio.to_thread(wait_for, recovered)
    note("controller killed: all replicas were accounted for after", time.monotonic() - killed)
    # No replica thinks it is to drain: each takes its share of new work.
    await asyncio.to_thread(cluster.settled)
