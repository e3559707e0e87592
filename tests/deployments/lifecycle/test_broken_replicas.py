"""Engines that raise or hang: the replica gives up by itself, and clients never hear of it."""

from __future__ import annotations

import asyncio

from pools import Passes, alone, answers, opened, reference, request, settled, until


async def test_streams_of_an_engine_that_raises_go_on_elsewhere(local_cluster):
    cluster = local_cluster("tiny", prefill=False)
    broken = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    Passes(broken).fail_at = 30
    requests = [request(i, 20, 60, ignore_eos=True) for i in range(3)]
    readers = [await opened(client, one, n=2) for one in requests]
    other = await cluster.add_decode("d1")
    await asyncio.gather(*(reader.task for reader in readers))
    for one, reader in zip(requests, readers, strict=True):
        assert reader.answers == [alone("tiny", one, choice) for choice in range(2)]
        assert reader.stream.migrations == 2
        assert reader.usage.completion_tokens == 120
    assert broken.report().draining
    del cluster.decodes["d0"]
    await broken.close()
    await settled(cluster)
    assert other.streams.counters.refused == {}


async def test_an_engine_that_raised_gets_no_new_work(local_cluster):
    cluster = local_cluster(prefill=False)
    broken = await cluster.add_decode("d0")
    await cluster.add_decode("d1")
    client = await cluster.add_gateway("g0")
    Passes(broken).fail_at = 1
    broken.host.engine.submit(request(99, 5))
    await until(lambda: broken.host.failure is not None, "the engine's failure")
    requests = [request(i, 5) for i in range(10)]
    for one in requests:
        assert await answers(client, one) == [alone("fake", one)]
    assert broken.streams.counters.submits == 0
    assert broken.streams.num_streams == 0


async def test_streams_of_an_engine_that_hangs_go_on_elsewhere(local_cluster):
    cluster = local_cluster(prefill=False, step_limit_s=1.5)
    hung = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    passes = Passes(hung)
    passes.hold_at = 30
    try:
        one = request(1, 20, 100, ignore_eos=True)
        reader = await opened(client, one)
        await cluster.add_decode("d1")
        await reader.task
        assert reader.answers == [alone("fake", one)]
        assert passes.reached
        assert hung.host.failure is not None
    finally:
        passes.release()


async def test_a_prefill_replica_whose_engine_raises_tells_its_receivers(local_cluster):
    cluster = local_cluster("tiny", max_chunk_tokens=16)
    broken = await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    Passes(broken).fail_at = 4
    one = request(1, 120)
    assert await answers(client, one) == [alone("tiny", one)]
    assert decode.streams.counters.pull_failures == {"prefill": 1}
    assert decode.streams.counters.decisions == {("fallback", "prefill"): 1}
    assert decode.pulls.bytes_received > 0
    del cluster.prefills["p0"]
    await broken.close()
    await settled(cluster)


async def test_a_prefill_replica_whose_engine_raised_refuses_at_once(local_cluster):
    cluster = local_cluster()
    broken = await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    Passes(broken).fail_at = 1
    first, second = request(1, 100), request(2, 100)
    await answers(client, first)
    assert broken.host.failure is not None
    decode.streams.remote._chooser.succeeded("p0")  # as if its rest were over
    assert await answers(client, second) == [alone("fake", second)]
    assert decode.streams.counters.pull_failures == {"prefill": 2}
    assert broken.exports.num_sessions == 0


async def test_a_prefill_replica_whose_engine_hangs_tells_its_receivers(local_cluster):
    cluster = local_cluster(pull_stall_s=0.2, step_limit_s=1.5)
    hung = await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    passes = Passes(hung)
    passes.hold_at = 1
    try:
        one = request(1, 100)
        assert await answers(client, one) == [alone("fake", one)]
        assert passes.reached
        assert decode.streams.counters.pull_failures == {"prefill": 1}
        assert hung.exports.num_sessions == 0
    finally:
        passes.release()


async def test_one_streams_fault_does_not_cost_the_others_their_tokens(local_cluster, monkeypatch):
    cluster = local_cluster(prefill=False)
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")

    def faulty(token):
        raise AssertionError("a fault in one stream")

    monkeypatch.setattr(decode.streams, "_logprob", faulty)
    good = request(2, 5, 200, ignore_eos=True)
    bad = await opened(client, request(1, 5, 50, ignore_eos=True, logprobs=1))
    assert await answers(client, good) == [alone("fake", good)]
    (error,) = await asyncio.gather(bad.task, return_exceptions=True)
    assert "internal fault" in str(error)
    await settled(cluster)


async def test_three_replicas_in_a_row_die_under_one_stream(local_cluster):
    cluster = local_cluster(prefill=False)
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    # A window of 16 tokens: the replica stops there until the client reads on.
    client.window_tokens = 16
    one = request(1, 10, 120, ignore_eos=True)
    stream = await client.open(one, n=3, remaining_s=60.0)
    got = [[] for _ in range(3)]
    batches = aiter(stream)

    async def read(count: int) -> None:
        while min(map(len, got)) < count:
            for event in await anext(batches):
                got[event.choice].extend(event.token_ids)

    for k in range(3):
        await read(20 * (k + 1))
        await cluster.add_decode(f"d{k + 1}")
        cluster.decode_directory.drop(f"d{k}")
        await cluster.decodes.pop(f"d{k}").close()
    await read(120)
    assert got == [alone("fake", one, choice).tokens for choice in range(3)]
    await stream.aclose()
    assert 3 <= stream.migrations <= 9
    await settled(cluster)


async def test_the_last_resort_is_the_cluster_without_prefill(local_cluster):
    cluster = local_cluster("tiny")
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    one = request(1, 100)
    told = (await answers(client, one))[0]
    assert {"r1": (told.tokens, told.text)} == reference("tiny", [one])
    assert cluster.decodes["d0"].streams.counters.decisions == {("local", "no_prefill_replica"): 1}
