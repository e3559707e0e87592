"""Both stores keep the same promises."""

import asyncio
import math
import time

import pytest
from pace import at_some_pace
from redis_server import redis_server

from deployments.gateway.limits.quotas import LimitExceeded, Quotas
from deployments.gateway.limits.redis import RedisStore
from deployments.gateway.limits.store import Claim, Denied, MemoryStore, Taken


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with redis_server(str(tmp_path_factory.mktemp("redis"))) as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def store(request):
    if request.param == "memory":
        store = MemoryStore()
    else:
        url = request.getfixturevalue("redis").url
        store = RedisStore(url, prefix=request.node.name, timeout_s=120)
    yield store
    await store.close()


def tokens(cost, limit=1000, owner="tenant:a"):
    return Claim(owner, "tokens", limit, cost)


def requests(limit=5, owner="tenant:a"):
    return Claim(owner, "requests", limit, 1)


def at_once(limit=2, owner="tenant:a"):
    return Claim(owner, "concurrency", limit, 1)


async def test_fifty_calls_at_once_cannot_take_a_token_more_than_the_limit(store):
    began = time.monotonic()
    answers = await asyncio.gather(*(store.take(f"r{i}", [tokens(70)]) for i in range(50)))
    took_s = time.monotonic() - began
    assert sum(isinstance(answer, Taken) for answer in answers) == 1000 // 70
    denied = next(answer for answer in answers if isinstance(answer, Denied))
    assert denied.claim.kind == "tokens"
    assert 59 - took_s < denied.wait_s <= 62
    assert denied.standings["tenant:a:tokens"].remaining == 1000 % 70


async def test_who_leaves_while_redis_is_asked_holds_nothing(redis):
    quotas = Quotas()
    await quotas.configure(redis.url)
    claims = [at_once(1, owner="tenant:leaver"), tokens(900, owner="tenant:leaver")]
    for i in range(20):
        asking = asyncio.create_task(quotas.take(f"gone{i}", claims))
        for _ in range(i):
            await asyncio.sleep(0)
        asking.cancel()
        for quota in await asyncio.gather(asking, return_exceptions=True):
            if not isinstance(quota, BaseException):
                quota.close(900)
    for _ in range(6000):
        try:
            (await quotas.take("stayed", claims)).close(900)
            break
        except LimitExceeded:
            await asyncio.sleep(0.01)
    else:
        raise AssertionError("a place or tokens stayed taken")
    await quotas.close()


async def test_two_gateways_share_one_limit(redis):
    stores = [RedisStore(redis.url, prefix="two", timeout_s=120) for _ in range(2)]
    answers = await asyncio.gather(*(stores[i % 2].take(f"r{i}", [tokens(70)]) for i in range(50)))
    assert sum(isinstance(answer, Taken) for answer in answers) == 1000 // 70
    for store in stores:
        await store.close()


async def test_a_request_takes_all_of_its_claims_or_none(store):
    first = await store.take("a", [requests(), at_once(1), tokens(900)])
    assert isinstance(first, Taken)
    for _ in range(10):
        denied = await store.take("b", [requests(), at_once(1), tokens(50)])
        assert isinstance(denied, Denied)
        assert denied.claim.kind == "concurrency"
        assert denied.wait_s is None
    await store.give_back(first, unused_tokens=900)
    # Ten refusals took nothing: the request of before is the only one that counts.
    again = await store.take("c", [requests(2), at_once(1), tokens(1000)])
    assert isinstance(again, Taken)
    assert again.standings["tenant:a:requests"].remaining == 0


async def test_unused_tokens_come_back_and_used_ones_do_not(store):
    taken = await store.take("a", [tokens(800)])
    assert isinstance(await store.take("b", [tokens(300)]), Denied)
    await store.give_back(taken, unused_tokens=100)
    assert isinstance(await store.take("c", [tokens(301)]), Denied)
    assert isinstance(await store.take("d", [tokens(300)]), Taken)


async def test_a_look_takes_nothing(store):
    claims = [requests(), tokens(70), at_once()]
    before = await store.look(claims)
    assert [(s.remaining, s.reset_s) for s in before.values()] == [(5, 0.0), (1000, 0.0), (2, 0.0)]
    assert isinstance(await store.take("a", claims), Taken)
    for _ in range(3):
        after = await store.look(claims)
    assert [s.remaining for s in after.values()] == [4, 930, 1]
    assert 0 < after["tenant:a:requests"].reset_s <= 62


async def test_more_than_the_whole_limit_is_told_so(store):
    denied = await store.take("a", [tokens(1001)])
    assert isinstance(denied, Denied)
    assert denied.wait_s == math.inf


async def test_owners_do_not_share(store):
    assert isinstance(await store.take("a", [tokens(1000)]), Taken)
    assert isinstance(await store.take("b", [tokens(1000, owner="tenant:b")]), Taken)
    assert isinstance(await store.take("c", [tokens(1), tokens(1, owner="key:k")]), Denied)
    assert isinstance(await store.take("d", [tokens(1000, owner="key:k")]), Taken)


async def test_a_denial_names_the_first_limit_without_room(store):
    assert isinstance(await store.take("a", [requests(1), tokens(1000)]), Taken)
    denied = await store.take("b", [requests(1), tokens(1)])
    assert isinstance(denied, Denied)
    assert denied.claim == requests(1)


async def test_a_window_passes_in_redis_too(redis):
    async def check(window_s):
        store = RedisStore(redis.url, prefix=f"passes{window_s}", window_s=window_s, timeout_s=120)
        try:
            taken = await store.take("a", [tokens(1000)])
            assert isinstance(taken, Taken)
            denied = await store.take("b", [tokens(10)])
            assert isinstance(denied, Denied)
            assert 0 < denied.wait_s <= window_s + 0.02
            await asyncio.sleep(denied.wait_s)
            assert isinstance(await store.take("c", [tokens(1000)]), Taken)
        finally:
            await store.close()

    await at_some_pace(check, 0.6)


async def test_places_of_a_gateway_that_died_come_back_and_renewed_ones_stay(redis):
    async def check(lease_s):
        store = RedisStore(redis.url, prefix=f"dies{lease_s}", lease_s=lease_s, timeout_s=120)
        try:
            kept = await store.take("kept", [at_once(2)])
            assert isinstance(await store.take("lost", [at_once(2)]), Taken)
            assert isinstance(await store.take("c", [at_once(2)]), Denied)
            for _ in range(3):
                await asyncio.sleep(lease_s / 2)
                await store.renew([kept])
            assert isinstance(await store.take("d", [at_once(2)]), Taken)
            assert isinstance(await store.take("e", [at_once(2)]), Denied)
        finally:
            await store.close()

    await at_some_pace(check, 0.4)


async def test_a_gateway_without_redis_counts_alone_and_goes_back(tmp_path):
    now = 0.0
    with redis_server(str(tmp_path)) as server:
        store = RedisStore(server.url, timeout_s=120, clock=lambda: now)
        shared = await store.take("a", [tokens(900), at_once(1)])
        server.kill()
        alone = await store.take("b", [tokens(900), at_once(1)])
        assert isinstance(alone, Taken)
        assert store.alone
        assert isinstance(await store.take("c", [tokens(200)]), Denied)
        await store.give_back(shared, 900)  # lost with Redis, and no error
        server.start()
        now = 6.0
        assert isinstance(await store.take("d", [tokens(1000)]), Taken)
        assert not store.alone
        await store.give_back(alone, 900)
        assert store.failures == 1
        await store.close()


def test_windows_that_nobody_uses_are_forgotten():
    now = 0.0
    store = MemoryStore(clock=lambda: now)
    for i in range(100):
        taken = store.take_now(f"r{i}", [tokens(1, owner=f"key:{i}")])
        store.give_back_now(taken, 0)
    now = 1000.0
    store.take_now("last", [tokens(1)])
    assert len(store._owners) == 1
