"""Prefill and decode as two pools over real links, in one process: tokens, routes, conservation."""

from __future__ import annotations

import asyncio
import random

import pytest
from pools import Passes, alone, ask, reference, request, settled

from engine.request import FinishReason


@pytest.mark.parametrize("source", ["fake", "tiny"])
async def test_two_pools_give_the_tokens_of_one_engine(local_cluster, source):
    cluster = local_cluster(source)
    prefill = await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    requests = [request(i, length) for i, length in enumerate([3, 20, 40, 64, 65, 100, 130, 7])]
    expected = reference(source, requests)
    answers = await asyncio.gather(*(ask(client, one) for one in requests))
    for one, (tokens, text, finish, usage) in zip(requests, answers, strict=True):
        assert (tokens[0], text[0]) == expected[one.request_id]
        assert finish[0] in (FinishReason.STOP, FinishReason.LENGTH)
        assert usage.prompt_tokens == len(one.prompt_ids)
        assert usage.completion_tokens == len(tokens[0])
    assert prefill.exports.bytes_sent > 0
    decisions = decode.streams.counters.decisions
    assert decisions[("disaggregated", "")] == 6
    assert decisions[("local", "short")] == 2
    await settled(cluster)


async def test_a_second_turn_is_cached_where_the_first_was_decoded(local_cluster):
    cluster = local_cluster()
    await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    first = request(1, 100)
    await ask(client, first)
    *_, usage = await ask(client, first)
    assert usage.cached_tokens == 96
    assert decode.streams.counters.decisions[("local", "short")] == 1
    await settled(cluster)


async def test_choices_share_one_prefill_and_have_their_own_seeds(local_cluster):
    cluster = local_cluster()
    prefill = await cluster.add_prefill("p0")
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    one = request(5, 90)
    tokens, _, finish, usage = await ask(client, one, n=3)
    alone, *_ = await ask(client, one)
    assert tokens[0] == alone[0]
    assert len({tuple(t) for t in tokens}) == 3
    assert None not in finish
    assert usage.completion_tokens == sum(map(len, tokens))
    bytes_one = 90 * prefill.host.built.model.layout.bytes_per_token
    assert prefill.exports.bytes_sent == bytes_one
    await settled(cluster)


async def test_300_requests_with_random_disconnects_leave_nothing_behind(local_cluster):
    cluster = local_cluster(max_running_requests=12)
    await cluster.add_prefill("p0")
    await cluster.add_prefill("p1")
    await cluster.add_decode("d0")
    await cluster.add_decode("d1")
    clients = [await cluster.add_gateway("g0"), await cluster.add_gateway("g1")]
    rng = random.Random(11)
    finished, cancelled = [], 0

    async def one(i: int) -> None:
        nonlocal cancelled
        await asyncio.sleep(rng.random() * 2.0)
        shape = request(i, rng.choice([2, 10, 30, 80, 150]), rng.choice([1, 4, 30]))
        task = asyncio.create_task(ask(rng.choice(clients), shape, n=rng.choice([1, 1, 1, 3])))
        if rng.random() < 0.6:
            await asyncio.sleep(rng.random() ** 3 * 0.4)
            task.cancel()
        try:
            tokens, *_ = await task
            finished.append((shape, tokens))
        except asyncio.CancelledError:
            cancelled += 1

    await asyncio.gather(*(one(i) for i in range(300)))
    assert len(finished) > 50
    assert cancelled > 50
    await settled(cluster)
    for shape, tokens in finished:
        assert tokens == [alone("fake", shape, choice).tokens for choice in range(len(tokens))]


async def test_a_slow_reader_stalls_only_itself(local_cluster):
    cluster = local_cluster(prefill=False)
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    client.window_tokens = 8
    slow = await client.open(request(1, 4, 200, ignore_eos=True), n=1, remaining_s=30.0)
    fast = await ask(client, request(2, 4, 100, ignore_eos=True))
    assert len(fast[0][0]) == 100
    assert [s.paused for s in decode.streams._streams.values()] == [True]
    # The engine may be some steps ahead of the loop that pauses it, but not by a whole answer.
    assert sum(len(e.token_ids) for e in slow._events) < 100
    assert decode.streams.num_streams == 1
    tokens = []
    async for batch in slow:
        for event in batch:
            tokens.extend(event.token_ids)
    assert len(tokens) == 200
    await slow.aclose()
    await settled(cluster)


async def test_a_dead_decode_replica_is_not_the_clients_problem(local_cluster):
    cluster = local_cluster("tiny")
    await cluster.add_prefill("p0")
    first = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    passes = Passes(first)
    requests = [request(i, 60, 90, ignore_eos=True) for i in range(4)]
    expected = reference("tiny", requests)
    streams = [await client.open(one, n=1, remaining_s=60.0) for one in requests]
    got = {one.request_id: [] for one in requests}
    texts = dict.fromkeys(got, "")

    async def read(one, stream):
        async for events in stream:
            for event in events:
                got[one.request_id].extend(event.token_ids)
                texts[one.request_id] += event.text
        await stream.aclose()

    readers = [
        asyncio.create_task(read(one, stream))
        for one, stream in zip(requests, streams, strict=True)
    ]
    while min(map(len, got.values())) < 5:
        await asyncio.sleep(0.01)
    while not passes.reached:  # its engine goes on in the meantime
        passes.hold_at = passes.count + 2
        await asyncio.sleep(0.01)
    await cluster.add_decode("d1")
    cluster.decode_directory.drop("d0")
    passes.release()
    await first.close()
    await asyncio.gather(*readers)
    assert {k: (v, texts[k]) for k, v in got.items()} == expected
    assert sum(s.migrations for s in streams) >= 1


async def test_a_dead_prefill_replica_means_another_one(local_cluster):
    cluster = local_cluster("tiny")
    doomed = await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    one = request(3, 120)
    expected = reference("tiny", [one])
    await doomed.close()
    tokens, text, *_ = await ask(client, one)
    assert (tokens[0], text[0]) == expected["r3"]
    assert decode.streams.counters.decisions == {("fallback", "connect"): 1}
    await settled(cluster)


async def test_without_the_queue_decodes_own_limits_admit(local_cluster):
    cluster = local_cluster(prefill=False, max_running_requests=2)
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    await cluster.queue.close()
    while client._queue.available:
        await asyncio.sleep(0.01)
    answers = await asyncio.gather(*(ask(client, request(i, 4)) for i in range(2)))
    assert all(a[2][0] is not None for a in answers)


async def test_more_than_the_slots_wait_their_turn(local_cluster):
    cluster = local_cluster(prefill=False, max_running_requests=2)
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    answers = await asyncio.gather(*(ask(client, request(i, 4)) for i in range(12)))
    assert all(a[2][0] is not None for a in answers)
    assert decode.streams.counters.refused == {}
    await settled(cluster)
