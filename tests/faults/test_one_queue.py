"""The one queue of a running cluster: floods, deaths of queue and gateways, two queues at once.

Two gateways, one decode replica with four slots. Bounds are those of the configuration in force:
the tiers' longest waits, the expiry of a grant. What the kills took is printed and recorded.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from pace import again
from serving import end, wait_for
from tiered import (
    KEY_MARK,
    MODEL,
    PASSWORD,
    SLOTS,
    TIERS,
    TOKENS_A_MINUTE,
    Answered,
    Caller,
    TieredCluster,
)

from deployments.admission.queue import QueueLimits

pytestmark = pytest.mark.cluster

FOREVER = 8000
"""Tokens of a stream that holds its slot until it is left: 80 s."""

Note = Callable[[str, float], None]


@pytest.fixture(scope="module")
def tiered() -> Iterator[TieredCluster]:
    cluster = TieredCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    def note(what: str, seconds: float) -> None:
        record_property(what, round(seconds, 4))
        print(f"{what}: {seconds * 1000:.1f} ms")

    return note


@pytest.fixture
async def callers(tiered: TieredCluster) -> AsyncIterator[Callable[[int, str], Caller]]:
    """Of a tenant at the first or the second gateway."""
    await asyncio.to_thread(tiered.settled)
    tiered.watch(MODEL, tiered.decode)  # another than before, maybe
    urls = [url for _, (_, url) in sorted(tiered.gateways().items())]
    made: dict[tuple[int, str], Caller] = {}

    def caller(gateway: int, tenant: str = "operator") -> Caller:
        if (gateway, tenant) not in made:
            made[gateway, tenant] = Caller(urls[gateway], tenant)
        return made[gateway, tenant]

    yield caller
    for each in made.values():
        await each.client.aclose()
    await asyncio.to_thread(tiered.settled)


class Held:
    """A slot that is taken until it is let go."""

    def __init__(self, caller: Caller) -> None:
        self._leave = asyncio.Event()
        self._there = asyncio.Event()
        self.task = asyncio.create_task(self._hold(caller))

    async def _hold(self, caller: Caller) -> None:
        async with caller.streamed("priority", FOREVER) as lines:
            leaving = asyncio.create_task(self._leave.wait())
            reading = asyncio.create_task(self._read(lines))
            await asyncio.wait({leaving, reading}, return_when=asyncio.FIRST_COMPLETED)
            leaving.cancel()
            reading.cancel()
            await asyncio.gather(leaving, reading, return_exceptions=True)

    async def _read(self, lines: AsyncIterator[str]) -> None:
        async for _ in lines:
            self._there.set()

    async def there(self) -> Held:
        await asyncio.wait_for(self._there.wait(), 240)
        return self

    async def let_go(self) -> None:
        self._leave.set()
        await asyncio.gather(self.task, return_exceptions=True)


async def hold(*callers: Caller) -> list[Held]:
    """A slot for each of these."""
    return list(await asyncio.gather(*(Held(caller).there() for caller in callers)))


async def until_queue(
    cluster: TieredCluster, true: Callable[[dict[str, Any]], bool], name: str = MODEL
) -> dict[str, Any]:
    """The queue's snapshot as soon as that is true of it."""

    def look() -> dict[str, Any] | None:
        snapshot = cluster.queue(name, timeout_s=2.0)
        return snapshot if true(snapshot) else None

    return await asyncio.to_thread(wait_for, look, every_s=0.02)


async def first_token(caller: Caller, tier: str, tokens: int = 20) -> float:
    """When it came. The answer is read to its end."""
    at = 0.0
    async with caller.streamed(tier, tokens) as lines:
        async for line in lines:
            at = at or time.monotonic()
            assert "error" not in line, line
    return at


def most_streams(cluster: TieredCluster, since: float) -> int:
    """That the decode replica had at any moment since then."""
    changes = cluster.watched(MODEL, cluster.decode)
    before = [streams for at, streams, _ in changes if at <= since][-1:]
    return max([*before, *(streams for at, streams, _ in changes if at > since)])


@again(3)
async def test_nobody_starves_under_a_flood_from_above_or_beside(
    tiered: TieredCluster, callers: Callable[..., Caller]
):
    quiet = {"polite": "default", "flex": "flex", "batch": "batch"}
    served: dict[str, list[Answered]] = defaultdict(list)
    over = asyncio.Event()

    async def ask_on(caller: Caller, tier: str, name: str) -> None:
        while not over.is_set():
            answer = await caller.ask(tier, 20)
            served[name].append(answer)
            if all(len(served[each]) >= 15 for each in quiet):
                over.set()
            if answer.status != 200:
                await asyncio.sleep(0.5)

    await asyncio.gather(
        *(ask_on(callers(i % 2), "priority", "urgent") for i in range(8)),
        *(ask_on(callers(i % 2, "flood"), "default", "flood") for i in range(24)),
        ask_on(callers(0, "polite"), "default", "polite"),
        # So many that some always wait: who makes way in the engine takes longer, asks less often.
        *(ask_on(callers(i % 2, "guest"), "flex", "flex") for i in range(5)),
        *(ask_on(callers(i % 2, "guest"), "batch", "batch") for i in range(5)),
    )
    for name, tier in quiet.items():
        assert [answer.body for answer in served[name] if answer.status != 200] == []
        assert {answer.body["service_tier"] for answer in served[name]} == {tier}
        longest_s = max(answer.queued_s for answer in served[name])
        assert longest_s <= TIERS[tier]["max_wait_s"], name
    # All answers are of one size.
    whole = {name: sum(a.status == 200 for a in answers) for name, answers in served.items()}
    for tier in ("flex", "batch"):
        assert whole[tier] >= 0.8 * TIERS[tier]["share"] * sum(whole.values()), whole
    # The flood was one: above, most of all; and of its own tenant more than can be served in time.
    assert whole["urgent"] > max(whole[name] for name in quiet)
    late = [answer.body["error"]["code"] for answer in served["flood"] if answer.status != 200]
    assert set(late) == {"queue_timeout"}


async def wait_in(
    tiered: TieredCluster, asks: list[tuple[Caller, str]], order: list[str]
) -> list[asyncio.Task[None]]:
    """Requests of these tiers, all of them waiting; each says in `order` when it was answered."""

    async def ask(caller: Caller, tier: str) -> None:
        answer = await caller.ask(tier, 20)
        assert answer.status == 200, answer.body
        order.append(tier)

    tasks = [asyncio.create_task(ask(*each)) for each in asks]
    await until_queue(tiered, lambda queue: queue["waiting"] == len(asks))
    return tasks


async def test_tiers_keep_their_order_over_the_death_of_the_queue(
    tiered: TieredCluster, callers: Callable[..., Caller]
):
    held = await hold(*(callers(i % 2) for i in range(SLOTS)))
    since, order = time.monotonic(), list[str]()
    asks = [(callers(i % 2), tier) for tier in reversed(TIERS) for i in range(2)]
    waiting = await wait_in(tiered, asks, order)
    before = await asyncio.to_thread(tiered.queue, MODEL)
    end(before["pid"], signal.SIGKILL)
    await until_queue(
        tiered, lambda now: now["epoch"] > before["epoch"] and now["waiting"] == len(asks)
    )
    # One slot, through which all of them go.
    await held[0].let_go()
    await asyncio.gather(*waiting)
    assert order == [tier for tier in TIERS for _ in range(2)]
    assert most_streams(tiered, since) == SLOTS
    for each in held:
        await each.let_go()


@again(3)
async def test_the_first_grant_comes_within_two_seconds_of_the_death_of_the_queue(
    tiered: TieredCluster, callers: Callable[..., Caller], note: Note
):
    await asyncio.to_thread(tiered.settled)
    led = list[int]()
    for _ in range(2):  # each place takes over from the other
        before = await asyncio.to_thread(tiered.queue, MODEL)
        standing = await asyncio.to_thread(tiered.standby)
        held = await hold(*(callers(i % 2) for i in range(SLOTS)))
        since = time.monotonic()
        asks = [(callers(i % 2), tier) for i, tier in enumerate(TIERS)]
        waiting = await wait_in(tiered, asks, [])
        killed = end(before["pid"], signal.SIGKILL)

        def look(standing: dict[str, Any] = standing) -> dict[str, Any] | None:
            now = tiered.queue_at(MODEL, standing["place"])
            return now if now is not None and now["granted"] > standing["granted"] else None

        first = asyncio.create_task(asyncio.to_thread(wait_for, look, every_s=0.02))
        await asyncio.gather(*(each.let_go() for each in held))
        now = await first
        took_s = time.monotonic() - killed
        note("queue killed: the one that stood by had granted after", took_s)
        assert now["pid"] == standing["pid"]
        assert now["epoch"] > before["epoch"]
        await asyncio.gather(*waiting)
        assert most_streams(tiered, since) <= SLOTS
        assert took_s <= 2.0
        led.append(now["place"])
        await asyncio.to_thread(tiered.settled)
    assert sorted(led) == [0, 1]


async def test_a_queue_that_hangs_loses_its_lead_and_stands_by_when_it_goes_on(
    tiered: TieredCluster, callers: Callable[..., Caller], note: Note
):
    before = await asyncio.to_thread(tiered.queue, MODEL)
    standing = await asyncio.to_thread(tiered.standby)
    held = await hold(*(callers(i % 2) for i in range(SLOTS)))
    since = time.monotonic()
    asks = [(callers(i), tier) for tier in ("priority", "batch") for i in range(2)]
    waiting = await wait_in(tiered, asks, [])
    stopped = end(before["pid"], signal.SIGSTOP)
    try:

        def look() -> dict[str, Any] | None:
            now = tiered.queue_at(MODEL, standing["place"])
            return now if now is not None and now["waiting"] == len(asks) else None

        now = await asyncio.to_thread(wait_for, look)
        note("queue stopped: the other one was asked after", time.monotonic() - stopped)
        assert now["epoch"] > before["epoch"]
        assert now["free_slots"] == {tiered.decode: 0}
        await held[0].let_go()
        await asyncio.gather(*waiting)
    finally:
        end(before["pid"], signal.SIGCONT)
    # For a moment both believe that they lead.
    more = [callers(i % 2).ask("batch", 5) for i in range(20)]
    assert [answer.status for answer in await asyncio.gather(*more)] == [200] * 20
    assert most_streams(tiered, since) == SLOTS
    for each in held:
        await each.let_go()
    await asyncio.to_thread(tiered.settled)
    assert (await asyncio.to_thread(tiered.standby))["pid"] == before["pid"]


async def test_what_a_killed_gateway_held_goes_to_those_who_wait_at_another(
    tiered: TieredCluster, callers: Callable[..., Caller], note: Note
):
    (pid, _), _ = (there for _, there in sorted(tiered.gateways().items()))
    dying, other = callers(0), callers(1)
    held = await hold(dying, dying, other, other)
    since = time.monotonic()
    lost = asyncio.create_task(dying.ask("priority", 20))
    await until_queue(tiered, lambda queue: queue["waiting"] == 1)
    waiting = [asyncio.create_task(first_token(other, "batch")) for _ in range(3)]
    before = await until_queue(tiered, lambda queue: queue["waiting"] == 4)
    # It gets a grant that it can neither use nor give back.
    end(pid, signal.SIGSTOP)
    await held[2].let_go()
    await until_queue(tiered, lambda queue: queue["granted"] == before["granted"] + 1)
    killed = end(pid, signal.SIGKILL)
    first_s = [await each - killed for each in waiting]
    # Else they would have been refused: no batch request waits for more than 8 s.
    note("gateway killed: its unused grant and its slots were in use again after", max(first_s))
    with pytest.raises(httpx.TransportError):
        await lost
    for each in held:
        await each.let_go()
    assert most_streams(tiered, since) <= SLOTS
    await asyncio.to_thread(tiered.settled)
    assert pid not in tiered.pids("gateway", "Gateway").values()


async def test_a_gateway_that_hangs_keeps_a_grant_no_longer_than_it_lives(
    tiered: TieredCluster, callers: Callable[..., Caller], note: Note
):
    (pid, _), _ = (there for _, there in sorted(tiered.gateways().items()))
    hanging, other = callers(0), callers(1)
    # Its call that holds the decode replica for a drain is open still, and ends unheard.
    held = await hold(*(other for _ in range(SLOTS - 1)))
    last, decode = await hold(hanging), tiered.decode
    await last[0].let_go()
    held += await hold(other)
    asked = asyncio.create_task(hanging.ask("priority", 20))
    await until_queue(tiered, lambda queue: queue["waiting"] == 1)
    waiting = asyncio.create_task(first_token(other, "batch"))
    await until_queue(tiered, lambda queue: queue["waiting"] == 2)
    end(pid, signal.SIGSTOP)
    try:
        await held[0].let_go()
        let_go = time.monotonic()
        took = await waiting - let_go
        note("gateway stopped: its unused grant was another's after", took)
        # Not before it expired, nor after 8 s: it would have been refused.
        assert QueueLimits().grant_expiry_s - 0.2 <= took
    finally:
        end(pid, signal.SIGCONT)
    # What it was granted is void, and decode has a slot for it again: it is served all the same.
    assert (await asked).status == 200
    assert tiered.decode == decode
    for each in held:
        await each.let_go()


async def test_two_queues_alive_at_once_admit_no_more_than_there_are_slots(
    tiered: TieredCluster, callers: Callable[..., Caller]
):
    second, since = sorted(tiered.gateways())[1], time.monotonic()
    before = await asyncio.to_thread(tiered.queue, MODEL)
    tiered.second_queue(second)
    try:
        await until_queue(tiered, lambda queue: second not in queue["gateways"])
        # It owns all slots, too.
        owner = {"gateways": [second], "free_slots": {tiered.decode: SLOTS}}
        await until_queue(tiered, lambda queue: owner.items() <= queue.items(), "second")

        async def ask(caller: Caller) -> int:
            return (await caller.ask("batch", 5)).status

        statuses = await asyncio.gather(*(ask(callers(i % 2)) for i in range(60)))
        assert statuses == [200] * 60
        first, other = [await asyncio.to_thread(tiered.queue, name) for name in (MODEL, "second")]
        assert first["granted"] - before["granted"] >= 30
        assert other["granted"] >= 30
        assert most_streams(tiered, since) == SLOTS
    finally:
        tiered.one_queue(second)
    await until_queue(tiered, lambda queue: second in queue["gateways"])


async def test_fifty_calls_at_two_gateways_cannot_exceed_a_token_limit_by_one(
    callers: Callable[..., Caller],
):
    clients = [callers(gateway, "limited") for gateway in (0, 1)]
    calls: list[Awaitable[Answered]] = [clients[i % 2].ask("priority", 40) for i in range(50)]
    answers = await asyncio.gather(*calls)
    whole = [answer for answer in answers if answer.status == 200]
    # Each takes 10 + 40, so that one token less than one more is left.
    assert {answer.body["usage"]["total_tokens"] for answer in whole} == {50}
    assert len(whole) == TOKENS_A_MINUTE // 50
    assert TOKENS_A_MINUTE % 50 == 49
    denied = [answer for answer in answers if answer.status != 200]
    assert {answer.status for answer in denied} == {429}
    assert {answer.body["error"]["code"] for answer in denied} == {"rate_limit_exceeded"}
    assert all(float(answer.headers["retry-after-ms"]) > 0 for answer in denied)
    assert min(int(a.headers["x-ratelimit-remaining-tokens"]) for a in answers) == 49


SECRETS = (KEY_MARK, PASSWORD)


def leaks(text: str) -> list[str]:
    return [text[max(0, text.find(s) - 80) :][:160] for s in SECRETS if s in text]


async def test_no_key_and_no_password_is_in_an_answer_a_metric_an_explanation_or_a_file(
    tiered: TieredCluster, callers: Callable[..., Caller]
):
    """The last test here, so that all that was logged before is looked through as well."""
    told: dict[str, str] = {}
    stranger = {"authorization": f"Bearer {KEY_MARK}stranger"}
    for gateway in (0, 1):
        caller = callers(gateway)
        for i, (body, headers) in enumerate(
            [
                (caller.body("default", 5), {}),
                (caller.body("default", 5), stranger),
                (caller.body("default", 5), {"authorization": f"{KEY_MARK}bare"}),
                ({**caller.body("default", 5), "model": "nobody's"}, {}),
                ({**caller.body("nothing", 5)}, {}),
                ({**caller.body("default", 5), "max_tokens": 10**6}, {}),
            ]
        ):
            headers = {**headers, "x-request-id": f"seen-{gateway}-{i}"}
            answer = await caller.client.post("/v1/completions", json=body, headers=headers)
            told[f"{gateway}/{i}: {answer.status_code}"] = f"{answer.headers}{answer.text}"
        for path in (
            *("/metrics", "/health", "/v1/models", "/openapi.json", "/dashboard"),
            *("/tailrace/live", "/tailrace/requests?slowest=false&limit=200"),
            *(f"/tailrace/explain/seen-{gateway}-{i}" for i in range(6)),
        ):
            answer = await caller.client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            told[f"{gateway}{path}"] = f"{answer.headers}{answer.text}"
    assert [name for name in told if name.endswith(": 200")] == ["0/0: 200", "1/0: 200"]
    assert {name: leaks(text) for name, text in told.items() if leaks(text)} == {}
    await asyncio.to_thread(tiered.settled)
    for what, text in tiered.stored():
        assert leaks(text) == [], what
    # Ray's and Serve's logs, the session's record, everything that was written for it.
    files = [
        path
        for folder in (tiered.home, tiered.log_dir.parents[2])
        for path in folder.rglob("*")
        if path.is_file() and path != tiered.secret_file
    ]
    texts = {path: path.read_bytes().decode("utf-8", "replace") for path in files}
    assert any('"request_id":"seen-0-0"' in text for text in texts.values()), "no log was read"
    assert {path: leaks(text) for path, text in texts.items() if leaks(text)} == {}
