"""Replicas of several ranks: served, split between pools of unequal sizes, and losing a rank."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from ranked import MODEL, RankedCluster
from serving import end, locally, wait_for

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def ranked() -> Iterator[RankedCluster]:
    cluster = RankedCluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
async def client(ranked: RankedCluster):
    async with httpx.AsyncClient(base_url=ranked.url, timeout=120, trust_env=False) as client:
        yield client


def asked(seed: int, length: int, max_tokens: int, **params: Any) -> dict[str, Any]:
    prompt = [32 + (seed * 31 + i * i) % 90 for i in range(length)]
    return {"prompt": prompt, "max_tokens": max_tokens, "seed": seed, **params}


def expected(params: dict[str, Any]) -> str:
    (answer,) = locally(MODEL, ignore_eos=True, **params)
    return answer.text


async def answer(client: httpx.AsyncClient, params: dict[str, Any]) -> str:
    body = {"model": MODEL, "ignore_eos": True, **params}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


async def test_prefill_on_two_stages_and_decode_on_two_ranks_answer_as_one_engine(
    ranked: RankedCluster, client: httpx.AsyncClient
):
    requests = [
        asked(i, length, 12, temperature=float(i % 2))
        for i, length in enumerate([5, 40, 100, 333, 40, 9])
    ]
    texts = await asyncio.gather(*(answer(client, params) for params in requests))
    assert texts == [expected(params) for params in requests]
    assert ranked.stats(MODEL, "Decode")["bytes_received"] > 0
    await asyncio.to_thread(ranked.settled)


@pytest.mark.parametrize(
    ("pool", "number"),
    [("Decode", signal.SIGKILL), ("Decode", signal.SIGSTOP), ("Prefill", signal.SIGKILL)],
    ids=["decode, killed", "decode, stopped", "prefill, killed"],
)
async def test_a_lost_rank_replaces_its_replica_and_answers_go_on(
    ranked: RankedCluster, client: httpx.AsyncClient, pool: str, number: int, record_property: Any
):
    pids = ranked.ranks(pool)
    (replica, pid) = next(iter(ranked.pids(MODEL, pool).items()))
    long = [asked(20 + i, 60, 600, temperature=1.0) for i in range(2)]
    texts = [asyncio.create_task(answer(client, params)) for params in long]
    await asyncio.to_thread(
        wait_for, lambda: ranked.stats(MODEL, "Decode")["engine"]["num_running"] == 2
    )
    lost = end(pids[-1], number)
    if pool == "Prefill":
        texts.append(asyncio.create_task(answer(client, asked(30, 200, 5))))
        long.append(asked(30, 200, 5))

    def replaced() -> bool:
        now = ranked.pids(MODEL, pool)
        return len(now) == 1 and replica not in now

    await asyncio.to_thread(wait_for, replaced, within_s=60.0)
    record_property("replaced after", round(time.monotonic() - lost, 2))
    assert [await text for text in texts] == [expected(params) for params in long]
    assert not any(map(psutil.pid_exists, [pid, *pids])), "a process of the lost group is left"
    await asyncio.to_thread(ranked.settled)
