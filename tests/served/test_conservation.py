"""Clients that leave at every stage of 300 requests leave nothing behind in any process."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections import Counter

import pytest
from serving import Cluster

pytestmark = pytest.mark.cluster

COUNT = 300


def body(rng: random.Random) -> bytes:
    length = rng.choice([1, 10, 30, 80, 150, 400])
    asked = {
        "model": rng.choice(["fake", "tiny"]),
        "prompt": [rng.randrange(32, 127) for _ in range(length)],
        "max_tokens": rng.choice([1, 5, 40, 150]),
        "n": rng.choice([1, 1, 1, 3]),
        "stream": rng.random() < 0.5,
        "ignore_eos": True,
    }
    return json.dumps(asked).encode()


async def one(address: tuple[str, int], rng: random.Random) -> str:
    """Send a request, or a part of one, and leave: politely, abruptly, or with the answer."""
    content = body(rng)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
    ).encode()
    leave = rng.random()
    whole = head + content
    sent = whole if leave > 0.1 else whole[: rng.randrange(1, len(whole))]
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(sent)
        await writer.drain()
        if sent is not whole:
            await asyncio.sleep(rng.random() * 0.2)
            return "while sending"
        if leave < 0.4:
            await asyncio.sleep(rng.random() ** 3 * 2.0)
            return "after a while"
        if leave < 0.6:
            await asyncio.wait_for(reader.readexactly(rng.randrange(1, 300)), 600)
            return "while reading"
        answer = await asyncio.wait_for(reader.read(), 600)
        return answer.split(b" ", 2)[1].decode()
    except asyncio.IncompleteReadError:
        return "200"  # a short answer, read whole
    finally:
        if rng.random() < 0.5:
            linger = struct.pack("ii", 1, 0)  # a reset instead of an orderly end
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()


async def test_300_requests_with_clients_that_leave_at_every_stage(cluster: Cluster):
    rng = random.Random(21)
    outcomes: Counter[str] = Counter()
    at_once = asyncio.Semaphore(64)  # more than can run, and no more than a slow machine can answer

    async def later(seed: int) -> None:
        own = random.Random(seed)
        await asyncio.sleep(own.random() * 8.0)
        async with at_once:
            outcomes[await one(cluster.address, own)] += 1

    await asyncio.gather(*(later(rng.getrandbits(32)) for _ in range(COUNT)))
    assert sum(outcomes.values()) == COUNT
    assert min(outcomes[how] for how in ("while sending", "after a while", "while reading")) > 15
    assert outcomes["200"] > 50
    # Whoever stayed was served: there was room for all of them to wait.
    assert set(outcomes) == {"while sending", "after a while", "while reading", "200"}
    await asyncio.to_thread(cluster.settled)
    cancelled = sum(
        cluster.stats("tiny", "Decode", replica)["counters"]["cancelled"]
        for replica in cluster.pids("tiny", "Decode")
    )
    assert cancelled > 10
