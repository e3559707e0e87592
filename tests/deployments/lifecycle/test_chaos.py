"""Links that break, bytes that change and clients that leave, all at once: never a wrong token."""

from __future__ import annotations

import asyncio
import random

import pytest
from pools import alone, ask, request, settled

from engine.transfer.export import KVExport, OutgoingChunk

REQUESTS = 60


@pytest.mark.parametrize("source", ["fake", "tiny"])
async def test_cancels_kills_and_tampering_never_change_a_token(local_cluster, monkeypatch, source):
    cluster = local_cluster(
        source,
        local_prefill_tokens=4,
        pull_stall_s=2.0,
        max_running_requests=8,
        transfer_window_bytes=20_000,
    )
    prefills = [await cluster.add_prefill(f"p{i}") for i in range(2)]
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    rng = random.Random(3)
    requests = [
        request(i, rng.choice([30, 130, 200, 260]), rng.choice([1, 3, 12])) for i in range(REQUESTS)
    ]
    make = KVExport.next

    def now_and_then_wrong(self):
        chunk = make(self)
        if chunk is None or rng.random() > 0.01:
            return chunk
        payload = bytearray(chunk.payload)
        payload[0] ^= 1
        return OutgoingChunk(chunk.head, memoryview(payload))

    monkeypatch.setattr(KVExport, "next", now_and_then_wrong)
    compared = 0

    async def one(i: int) -> None:
        nonlocal compared
        await asyncio.sleep(rng.random() * 3.0)
        task = asyncio.create_task(ask(client, requests[i]))
        if rng.random() < 0.4:
            await asyncio.sleep(rng.random() ** 2 * 0.3)
            task.cancel()
        try:
            tokens, text, *_ = await task
        except asyncio.CancelledError:
            return
        expected = alone(source, requests[i])
        assert (tokens[0], text[0]) == (expected.tokens, expected.text)
        compared += 1

    async def kill() -> None:
        while True:
            await asyncio.sleep(0.15)
            for prefill in prefills if rng.random() < 0.3 else prefills[:1]:
                for link in list(prefill._server.links.values()):
                    link._transport.abort()

    killer = asyncio.create_task(kill())
    try:
        await asyncio.gather(*(one(i) for i in range(REQUESTS)))
    finally:
        killer.cancel()
    assert compared > REQUESTS // 3
    assert sum(decode.streams.counters.pull_failures.values()) > 0
    await settled(cluster)
