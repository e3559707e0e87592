"""Replicas of several ranks: served, split between pools of unequal sizes, and losing a rank."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
from ranked import MODEL, RankedCluster, Size, name_of, transport_of
from serving import end, locally, wait_for

pytestmark = pytest.mark.cluster


SIZES: list[Size] = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]
STAGES_FEED_RANKS: tuple[Size, Size] = ((1, 2), (2, 1))
APP = name_of(*STAGES_FEED_RANKS)

ROUNDS: list[list[tuple[Size, Size]]] = [
    [((2, 1), (4, 1)), ((2, 1), (1, 1)), STAGES_FEED_RANKS],
    [((4, 1), (2, 1)), ((1, 1), (2, 1)), ((1, 2), (2, 2))],
]
"""Served together, each pair an application. With TAILRACE_EVERY_PAIR set: all pairs there are."""

if os.environ.get("TAILRACE_EVERY_PAIR"):
    every = [pair for pair in itertools.permutations(SIZES, 2) if pair != STAGES_FEED_RANKS]
    ROUNDS = [[*every[i : i + 3], STAGES_FEED_RANKS] for i in range(0, len(every), 3)]


@pytest.fixture(scope="module")
def session() -> Iterator[RankedCluster]:
    cluster = RankedCluster(ROUNDS[0])
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def ranked(session: RankedCluster) -> RankedCluster:
    """Decode on two ranks that share layers, prefill on two stages."""
    serve(session, [STAGES_FEED_RANKS])
    return session


def serve(session: RankedCluster, pairs: list[tuple[Size, Size]]) -> None:
    if session.apps != [name_of(*pair) for pair in pairs]:
        session.serve_pairs(pairs)
        code, _, errors = session.up()
        assert code == 0, errors
        session.settled(within_s=90)
    for app, pair in zip(session.apps, pairs, strict=True):
        if transport_of(*pair) == "nixl":
            wait_for(lambda app=app: session.stats(app, "Decode")["reads_connected"])


@pytest.fixture
async def client(session: RankedCluster):
    async with httpx.AsyncClient(base_url=session.url, timeout=120, trust_env=False) as client:
        yield client


def asked(seed: int, length: int, max_tokens: int, **params: Any) -> dict[str, Any]:
    prompt = [32 + (seed * 31 + i * i) % 90 for i in range(length)]
    return {"prompt": prompt, "max_tokens": max_tokens, "seed": seed, **params}


def expected(params: dict[str, Any]) -> str:
    (answer,) = locally(MODEL, ignore_eos=True, **params)
    return answer.text


async def answer(client: httpx.AsyncClient, params: dict[str, Any], app: str = APP) -> str:
    body = {"model": app, "ignore_eos": True, **params}
    reply = await client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["text"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("pairs", ROUNDS, ids=lambda pairs: ", ".join(name_of(*p) for p in pairs))
async def test_pools_of_unequal_sizes_answer_as_one_engine(
    session: RankedCluster, client: httpx.AsyncClient, pairs: list[tuple[Size, Size]]
):
    serve(session, pairs)
    requests = [
        asked(i, length, 12, temperature=float(i % 2))
        for i, length in enumerate([5, 40, 100, 333, 40, 9])
    ]
    wanted = [expected(params) for params in requests]
    for app, (prefill, decode) in zip(session.apps, pairs, strict=True):
        texts = await asyncio.gather(*(answer(client, params, app) for params in requests))
        assert texts == wanted, app
        for pool, (tensor, stages) in (("Prefill", prefill), ("Decode", decode)):
            ranks = tensor * stages
            assert len(session.ranks(app, pool)) == (0 if ranks == 1 else ranks)
        assert session.counted(app, "decisions").get("disaggregated/") == 4, app
        stats = session.stats(app, "Decode")
        assert stats["bytes_received"] > 0, app
        carried_by = {pull["connector"] for pull in stats["recent_pulls"]}
        assert carried_by == {transport_of(prefill, decode)}, app
    await asyncio.to_thread(session.settled)


async def test_verify_finds_tokens_and_kv_of_ranks_to_be_those_of_one_engine(ranked: RankedCluster):
    code, said, errors = await asyncio.to_thread(ranked.command, "verify", "--model", APP)
    assert code == 0, errors
    assert said["dtype"] == "float64"
    assert said["num_forks"] == 0
    assert said["num_blocks"] > 100
    await asyncio.to_thread(ranked.settled)


async def test_an_overlap_that_ranks_cannot_do_is_refused_before_anything_is_replaced(
    ranked: RankedCluster, client: httpx.AsyncClient
):
    pids = {pool: ranked.pids(APP, pool) for pool in ("Prefill", "Decode")}
    before = ranked.config
    ranked.config = copy.deepcopy(before)
    try:
        (application,) = (a for a in ranked.config["applications"] if a["name"] == APP)
        (decode,) = (d for d in application["deployments"] if d["name"] == "Decode")
        decode["user_config"] |= {"overlap": True, "local_prefill_tokens": 9}
        code, _, errors = await asyncio.to_thread(ranked.up)
    finally:
        ranked.config = before
    assert code == 1
    assert "user_config.overlap: true: 2 ranks of one stage" in errors
    assert {pool: ranked.pids(APP, pool) for pool in pids} == pids
    # Below the old limit and above the new one: it is not sent away.
    one = asked(40, 14, 5)
    away = ranked.counted(APP, "decisions").get("disaggregated/", 0)
    assert await answer(client, one) == expected(one)
    assert ranked.counted(APP, "decisions").get("disaggregated/", 0) == away


@pytest.mark.parametrize(
    ("pool", "number"),
    list(itertools.product(["Decode", "Prefill"], [signal.SIGKILL, signal.SIGSTOP])),
    ids=["decode, killed", "decode, stopped", "prefill, killed", "prefill, stopped"],
)
async def test_a_lost_rank_replaces_its_replica_and_answers_go_on(
    ranked: RankedCluster, client: httpx.AsyncClient, pool: str, number: int, record_property: Any
):
    pids = ranked.ranks(APP, pool)
    (replica, pid) = next(iter(ranked.pids(APP, pool).items()))
    long = [asked(20 + i, 60, 600, temperature=1.0) for i in range(4)]
    texts = [asyncio.create_task(answer(client, params)) for params in long]
    await asyncio.to_thread(
        wait_for, lambda: ranked.stats(APP, "Decode")["engine"]["num_running"] == 4
    )
    lost = end(pids[-1], number)
    if pool == "Prefill":
        texts.append(asyncio.create_task(answer(client, asked(30, 200, 5))))
        long.append(asked(30, 200, 5))

    def replaced() -> bool:
        now = ranked.pids(APP, pool)
        return len(now) == 1 and replica not in now

    await asyncio.to_thread(wait_for, replaced, within_s=60.0)
    record_property("replaced after", round(time.monotonic() - lost, 2))
    assert [await text for text in texts] == [expected(params) for params in long]
    assert not any(map(psutil.pid_exists, [pid, *pids])), "a process of the lost group is left"
    await asyncio.to_thread(ranked.settled)
