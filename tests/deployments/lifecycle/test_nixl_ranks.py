"""Pools of several ranks whose KV is read by NIXL: real ranks and agents, sizes that differ."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

pytest.importorskip("nixl_cu12", reason="install the extra: pip install 'tailrace[nixl]'")

import torch
from nixl_source import stop
from pools import alone, answers, opened, request, settled, until

from deployments.engine_host import EngineHost
from engine.execution.ranks.pool import ShardedPool
from engine.models.model import KVPart

Size = tuple[int, int]
"""Ranks that share a layer, and stages."""

PAIRS: list[tuple[Size, Size]] = [
    ((2, 1), (1, 1)),
    ((1, 1), (2, 1)),
    ((2, 1), (4, 1)),
    ((4, 1), (2, 1)),
    ((1, 2), (2, 1)),
]
"""Prefill and decode. The model has two KV heads: of four ranks two keep a copy each."""


async def ranked(local_cluster, prefill: Size, decode: Size, *, kv_dtype="auto", **settings):
    """One replica of each kind, connected."""
    cluster = local_cluster("tiny", transport="nixl", **settings)
    cluster.args = cluster.args.model_copy(
        update={
            "tensor_parallel": decode[0],
            "pipeline_parallel": decode[1],
            "prefill_tensor_parallel": prefill[0],
            "prefill_pipeline_parallel": prefill[1],
            "kv_dtype": kv_dtype,
        }
    )
    there = await cluster.add_prefill("p0")
    here = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    await until(lambda: here.pulls.reads.num_connected == 1, "the agents' connection")
    return cluster, there, here, client


class BeforeRead:
    """Does something just before the next READ of a decode replica is asked for."""

    def __init__(self, decode, act) -> None:
        group = decode._agents
        read = group.read
        self.done = False

        def asked(*args, **kwargs):
            group.read = read
            act()
            self.done = True
            return read(*args, **kwargs)

        group.read = asked


def require_equal_copies(pool) -> None:
    """A head that several ranks keep is the same on each, block 0 aside, which takes padding."""
    if not isinstance(pool, ShardedPool):
        return
    kept: dict[KVPart, torch.Tensor] = {}
    for held in pool._held:
        first = kept.setdefault(held.part, held.pool.data)
        assert first[1:].any()
        assert torch.equal(first[1:], held.pool.data[1:])
    assert set(pool.parts) == kept.keys()


@pytest.fixture
def alive(monkeypatch):
    """A replica whose ranks are lost ends its process, which here is the test's."""
    monkeypatch.setattr(EngineHost, "watching", lambda self, on_failure: [])


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
async def test_ranks_read_what_they_hold_from_those_that_hold_it(local_cluster, prefill, decode):
    cluster, there, here, client = await ranked(local_cluster, prefill, decode)
    requests = [request(i, length, 6) for i, length in enumerate([40, 64, 101, 133])]
    given = await asyncio.gather(*(answers(client, one) for one in requests))
    assert given == [[alone("tiny", one)] for one in requests]
    assert here.streams.counters.decisions == {("disaggregated", ""): 4}
    layout = there.host.built.engine.layout
    whole = sum(one.num_tokens // 8 * 8 for one in requests)
    assert here.pulls.reads.bytes_read == whole * layout.bytes_per_token
    assert {each["connector"] for each in here.stats()["recent_pulls"]} == {"nixl"}
    for one in requests:
        sent = await there.host.kv_digests(one.prompt_ids, "")
        kept = await here.host.kv_digests(one.prompt_ids, "")
        assert len(sent) == one.num_tokens // 8
        assert kept[: len(sent)] == sent
    require_equal_copies(here.host.built.pool)
    await settled(cluster)
    assert (here.pulls.reads.num_open, here.host.engine.stats().num_leases) == (0, 0)


@pytest.mark.timeout(600)
async def test_codes_are_read_with_their_scales_by_ranks(local_cluster):
    cluster, there, here, client = await ranked(local_cluster, (1, 1), (2, 1), kv_dtype="int8")
    one = request(1, 100, 3)
    await answers(client, one)
    assert here.streams.counters.decisions == {("disaggregated", ""): 1}
    assert here.pulls.reads.bytes_read > 0
    sent = await there.host.kv_digests(one.prompt_ids, "")
    assert len(sent) == 12
    assert (await here.host.kv_digests(one.prompt_ids, ""))[:12] == sent
    await settled(cluster)


@pytest.mark.timeout(600)
async def test_a_pull_that_is_left_in_the_middle_keeps_its_blocks_until_every_rank_is_done(
    local_cluster, monkeypatch, alive
):
    monkeypatch.setenv("UCX_TLS", "tcp")  # the ranks of prefill answer READs themselves
    cluster, there, here, client = await ranked(local_cluster, (2, 1), (1, 1))
    stopped = there.host.rank_pids[1]
    reading = BeforeRead(here, lambda: stop(stopped))
    try:
        reader = await opened(client, request(1, 100))
        await until(lambda: reading.done, "a READ")
        await reader.stream.aclose()
        await until(lambda: not here.streams.num_streams, "the end of the stream")
        await until(lambda: here.host.engine.stats().num_leases == 1, "the blocks set aside")
        await asyncio.sleep(0.3)
        assert here.pulls.reads.num_open > 0, "one rank answers no READ, and all are over"
    finally:
        os.kill(stopped, signal.SIGCONT)
    await until(lambda: not here.host.engine.stats().num_leases, "the blocks back")
    assert here.pulls.reads.num_open == 0
    one = request(2, 100)
    assert await answers(client, one) == [alone("tiny", one)]
    await settled(cluster)


@pytest.mark.timeout(600)
async def test_a_rank_of_prefill_killed_in_the_middle_costs_a_computation_and_nothing_else(
    local_cluster, monkeypatch, alive
):
    monkeypatch.setenv("UCX_TLS", "tcp")
    cluster, there, here, client = await ranked(local_cluster, (2, 1), (1, 1), pull_stall_s=5.0)
    killed = there.host.rank_pids[1]

    def kill() -> None:
        stop(killed)
        asyncio.get_running_loop().call_later(0.2, os.kill, killed, signal.SIGKILL)

    reading = BeforeRead(here, kill)
    one = request(1, 100)
    assert await answers(client, one) == [alone("tiny", one)]
    assert reading.done
    assert here.streams.counters.decisions.get(("disaggregated", "")) is None
    await until(lambda: not here.host.engine.stats().num_leases, "the blocks back")
    assert here.pulls.reads.num_open == 0
    assert here.host.engine.stats().num_held_blocks == 0
    cluster.prefill_directory.drop("p0")
    await cluster.prefills.pop("p0").close()
    await until(lambda: here.pulls.reads.num_connected == 0, "its agents forgotten")
    await cluster.add_prefill("p1")
    await until(lambda: here.pulls.reads.num_connected == 1, "the new ones' connection")
    two = request(2, 100)
    assert await answers(client, two) == [alone("tiny", two)]
    assert here.streams.counters.decisions[("disaggregated", "")] == 1
    await settled(cluster)


@pytest.mark.timeout(600)
async def test_a_rank_of_decode_killed_in_the_middle_gives_none_of_its_blocks_back(
    local_cluster, monkeypatch, alive
):
    monkeypatch.setenv("UCX_TLS", "tcp")
    _, there, here, client = await ranked(local_cluster, (2, 1), (2, 1))
    killed, holding = here.host.rank_pids[1], there.host.rank_pids[0]

    def kill() -> None:
        stop(holding)
        os.kill(killed, signal.SIGKILL)

    reading = BeforeRead(here, kill)
    try:
        reader = await opened(client, request(1, 100))
        await until(lambda: reading.done, "a READ")
        await until(lambda: here.host.failure is not None, "the loss of the rank")
    finally:
        os.kill(holding, signal.SIGCONT)
    assert here.pulls.reads.num_open > 0
    assert not any(agent.num_open == 0 for agent in here._agents.members[1:])
    await reader.stream.aclose()
