"""Replicas that Serve takes out of the running set: who said so, and for how long it holds."""

from __future__ import annotations

import asyncio

from pools import alone, answers, opened, request, settled, until

from deployments.holds import PairHolds


async def test_a_replica_taken_out_ends_its_streams_and_takes_no_new_ones(local_cluster):
    cluster = local_cluster(prefill=False)
    leaving = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    client.window_tokens = 16
    one = request(1, 10, 400, ignore_eos=True)
    stream = await client.open(one, n=1, remaining_s=60.0)
    staying = await cluster.add_decode("d1")
    cluster.decode_directory.drop("d0")
    await until(lambda: leaving.draining, "the drain")
    for i in range(2, 6):
        assert await answers(client, request(i, 5)) == [alone("fake", request(i, 5))]
    assert leaving.streams.counters.submits == 1
    assert staying.streams.counters.submits == 4
    tokens = []
    async for events in stream:
        for event in events:
            tokens.extend(event.token_ids)
    await stream.aclose()
    assert tokens == alone("fake", one).tokens
    assert stream.migrations == 0
    await settled(cluster)


async def test_a_drain_ends_with_the_gateway_that_asked_for_it(local_cluster):
    cluster = local_cluster(prefill=False)
    decode = await cluster.add_decode("d0")
    first = await cluster.add_gateway("g0")
    await answers(first, request(1, 5))
    address = cluster.decode_directory.replicas()["d0"]["link"]
    cluster.decode_directory.drop("d0")
    await until(lambda: decode.draining, "the drain")
    cluster.clients.remove(first)
    await first.close()
    await until(lambda: not decode.draining, "the end of the drain")
    cluster.decode_directory.put("d0", address)
    second = await cluster.add_gateway("g1")
    assert await answers(second, request(2, 5)) == [alone("fake", request(2, 5))]
    await settled(cluster)


async def test_a_replica_drains_until_every_gateway_has_it_back(local_cluster):
    cluster = local_cluster(prefill=False)
    decode = await cluster.add_decode("d0")
    gateways = [await cluster.add_gateway(f"g{i}") for i in range(2)]
    for i, gateway in enumerate(gateways):
        await answers(gateway, request(i, 5))
    address = cluster.decode_directory.replicas()["d0"]["link"]
    cluster.decode_directory.drop("d0")
    await until(lambda: decode._drained_by == {"g0", "g1"}, "the drain by both")
    gone = gateways.pop(0)
    cluster.clients.remove(gone)
    await gone.close()
    await until(lambda: decode._drained_by == {"g1"}, "the end of what the first said")
    assert decode.draining
    cluster.decode_directory.put("d0", address)
    await until(lambda: not decode.draining, "the end of the drain")


async def test_holds_of_peers_that_are_idle_are_forgotten():
    holds = PairHolds(lambda peer: False)
    told = await asyncio.gather(*(holds.hold(f"g{i}") for i in range(3)))
    assert told == ["idle"] * 3
    assert holds._lost == {}


async def test_a_hold_lasts_as_long_as_its_pair_has_work(local_cluster):
    cluster = local_cluster(prefill=False)
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    client.window_tokens = 16
    stream = await client.open(request(1, 4, 400, ignore_eos=True), n=1, remaining_s=60.0)
    hold = asyncio.create_task(decode.holds.hold("g0"))
    await asyncio.sleep(2.5)  # longer than an idle pair's call lasts
    assert not hold.done()
    await stream.aclose()
    assert await hold == "idle"


async def test_a_hold_ends_with_its_link(local_cluster):
    cluster = local_cluster(prefill=False)
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    reader = await opened(client, request(1, 4, 400, ignore_eos=True))
    hold = asyncio.create_task(decode.holds.hold("g0"))
    await reader.each_has(3)
    cluster.clients.remove(client)
    reader.task.cancel()
    await client.close()
    assert await hold == "lost"
    await settled(cluster)
