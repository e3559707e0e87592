"""Two pools whose KV is read by NIXL: the tokens of one engine, whatever becomes of a READ."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("nixl_cu12", reason="install the extra: pip install 'tailrace[nixl]'")

from pools import alone, answers, ask, opened, reference, request, settled, until

from deployments.lifecycle import pull, reads
from engine.errors import TransferError
from engine.transfer.nixl import SETTLE_S
from engine.transfer.nixl_intake import ReadIntake
from engine.transfer.nixl_reads import Polled


async def pools(local_cluster, source: str = "tiny", **settings):
    """One replica of each kind, connected."""
    cluster = local_cluster(source, transport="nixl", **settings)
    prefill = await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    await connected(decode, 1)
    return cluster, prefill, decode, client


async def connected(decode, count: int) -> None:
    await until(lambda: decode.pulls.reads.num_connected == count, "the agents' connection")


class Flight:
    """READs of a decode replica, kept in flight or broken as far as it can see."""

    def __init__(self, decode) -> None:
        (agent,) = decode._agents.members
        self.held = True
        self.broken = False
        self._look, self._post = agent._state, agent._post
        agent._state = self._state
        agent._post = self._posted

    def _state(self, read):
        if self.broken:
            return Polled.ERR
        return Polled.PROC if self.held else self._look(read)

    def _posted(self, read):
        state = self._post(read)
        return state if state is Polled.ERR else Polled.PROC


@pytest.mark.parametrize("source", ["fake", "tiny"])
async def test_pools_that_read_give_the_tokens_of_one_engine(local_cluster, source):
    cluster, prefill, decode, client = await pools(local_cluster, source)
    lengths = [3, 20, 40, 64, 65, 100, 130, 7]
    requests = [request(i, length) for i, length in enumerate(lengths)]
    expected = reference(source, requests)
    given = await asyncio.gather(*(ask(client, one) for one in requests))
    for one, (tokens, text, _, _) in zip(requests, given, strict=True):
        assert (tokens[0], text[0]) == expected[one.request_id]
    assert decode.streams.counters.pull_failures == {}
    token_bytes = prefill.host.built.model.layout.bytes_per_token
    whole = sum(length // 8 * 8 for length in lengths if length > 16)
    assert decode.pulls.reads.bytes_read == whole * token_bytes
    assert decode.pulls.bytes_received == sum(n for n in lengths if n > 16) * token_bytes
    assert prefill.exports.bytes_sent == decode.pulls.bytes_received
    assert {each["connector"] for each in decode.stats()["recent_pulls"]} == {"nixl"}
    await settled(cluster)
    assert decode.pulls.reads.num_open == 0


async def test_codes_are_read_with_their_scales(local_cluster):
    given = []
    for transport in ("link", "nixl"):
        cluster = local_cluster("tiny", transport=transport)
        cluster.args = cluster.args.model_copy(update={"kv_dtype": "int8"})
        await cluster.add_prefill("p0")
        decode = await cluster.add_decode("d0")
        client = await cluster.add_gateway("g0")
        if transport == "nixl":
            await connected(decode, 1)
        given.append([await answers(client, request(i, 100)) for i in range(3)])
        assert decode.streams.counters.decisions == {("disaggregated", ""): 3}
        await settled(cluster)
    assert decode.pulls.reads.bytes_read > 0
    assert given[0] == given[1]


async def test_a_cancel_at_every_turn_of_a_read_leaves_nothing_behind(local_cluster):
    cluster, _, decode, client = await pools(local_cluster)
    for turns in range(0, 150, 5):
        stream = await client.open(request(turns, 200, 3), n=2, remaining_s=20.0)
        for _ in range(turns):
            await asyncio.sleep(0)
        await stream.aclose()
    await settled(cluster)
    one = request(1000, 200)
    assert await answers(client, one) == [alone("tiny", one)]
    assert decode.streams.counters.pull_failures == {}
    await settled(cluster)


async def test_before_the_agents_are_connected_the_link_carries_kv(local_cluster, monkeypatch):
    monkeypatch.setattr(reads.BlockReads, "on_agent", lambda self, link, wire: None)
    cluster = local_cluster("tiny", transport="nixl")
    await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    one = request(1, 100)
    assert await answers(client, one) == [alone("tiny", one)]
    assert decode.streams.counters.decisions == {("disaggregated", ""): 1}
    assert decode.pulls.reads.bytes_read == 0
    assert [each["connector"] for each in decode.stats()["recent_pulls"]] == ["link"]
    await settled(cluster)


async def test_bytes_that_are_not_those_offered_are_noticed(local_cluster):
    cluster, prefill, decode, client = await pools(local_cluster)
    (agent,) = prefill.exports.offers._agents.members
    sum_up = agent._checksums
    agent._checksums = lambda *what: tuple(found ^ 1 for found in sum_up(*what))
    one = request(1, 100)
    assert await answers(client, one) == [alone("tiny", one)]
    assert decode.pulls.checksum_mismatches == 1
    assert decode.streams.counters.decisions == {("fallback", "checksum"): 1}
    await settled(cluster)


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("held", [True, False])
async def test_memory_without_checksums_counts_only_while_prefill_holds_it(
    local_cluster, held, side
):
    cluster, prefill, decode, client = await pools(local_cluster, pull_stall_s=1.0)
    agents = prefill.exports.offers._agents if side == "prefill" else decode._agents
    agents.members[0]._checksums = lambda blocks, piece: (None,) * len(blocks)
    if not held:
        engine = prefill.host.built.engine
        on_message = prefill.exports.on_message

        def forget(link, message):
            """The lease runs out just before decode asks."""
            if message[0] == 39:
                for request_id in list(prefill.exports._sessions):
                    engine.release(request_id)
                    prefill.exports.expired([request_id])
            on_message(link, message)

        for link in prefill._server.links.values():
            link._handlers = type(link._handlers)(
                on_message=forget,
                on_open=link._handlers.on_open,
                on_close=link._handlers.on_close,
            )
    one = request(1, 100)
    assert await answers(client, one) == [alone("tiny", one)]
    decision = ("disaggregated", "") if held else ("fallback", "lease")
    assert decode.streams.counters.decisions == {decision: 1}
    await settled(cluster)


async def test_a_read_that_does_not_end_costs_its_blocks_and_nothing_else(local_cluster):
    cluster, _, decode, client = await pools(local_cluster, pull_stall_s=0.5)
    flight = Flight(decode)
    one = request(1, 100)
    assert await answers(client, one) == [alone("tiny", one)]
    assert decode.streams.counters.decisions == {("fallback", "stall"): 1}
    stats = decode.host.engine.stats()
    assert (stats.num_leases, stats.num_held_blocks) == (1, 13)
    assert decode.pulls.reads.num_open > 0
    flight.held = False
    await settled(cluster)
    assert decode.host.engine.stats().num_leases == 0
    assert decode.pulls.reads.num_open == 0


async def test_a_client_that_leaves_frees_its_blocks_when_the_read_has_ended(local_cluster):
    cluster, _, decode, client = await pools(local_cluster)
    flight = Flight(decode)
    reader = await opened(client, request(1, 100))
    await until(lambda: decode.pulls.reads.num_open, "a READ")
    await reader.stream.aclose()
    await until(lambda: not decode.streams.num_streams, "the end of the stream")
    await until(lambda: decode.host.engine.stats().num_leases == 1, "the blocks set aside")
    flight.held = False
    await settled(cluster)
    assert decode.host.engine.stats().num_leases == 0


async def test_after_a_read_that_failed_the_link_carries_kv_until_agents_connect_again(
    local_cluster, monkeypatch
):
    monkeypatch.setattr(reads, "RECONNECT_S", 0.5)
    cluster, _, decode, client = await pools(local_cluster)
    flight = Flight(decode)
    flight.broken = True
    first, second, third = (request(i, 100) for i in range(3))
    assert await answers(client, first) == [alone("tiny", first)]
    assert decode.streams.counters.decisions == {("fallback", "link"): 1}
    flight.broken = flight.held = False
    assert decode.pulls.reads.num_connected == 0
    await connected(decode, 1)
    await until(lambda: not decode.host.engine.stats().num_leases, "settled blocks")
    before = decode.pulls.reads.bytes_read
    for one in (second, third):
        assert await answers(client, one) == [alone("tiny", one)]
    assert decode.pulls.reads.bytes_read > before
    await settled(cluster)


async def test_nobody_waits_until_a_read_that_failed_has_settled(local_cluster):
    cluster, _, decode, client = await pools(local_cluster)
    table = decode._agents.members[0]._table
    table._settle_s = 1e9
    flight = Flight(decode)
    flight.broken = True
    one = request(1, 100)
    assert await answers(client, one) == [alone("tiny", one)]
    assert decode.streams.counters.decisions == {("fallback", "link"): 1}
    assert table.num_settling > 0
    assert decode.host.engine.stats().num_leases == 1
    assert pull.QUIET_S < SETTLE_S
    table._settle_s = 0.0
    for read in list(table._reads.values()):
        read.settled_at = 0.0
    await settled(cluster)
    assert decode.host.engine.stats().num_leases == 0


async def test_a_replica_that_was_replaced_under_its_name_is_read_anew(local_cluster):
    cluster, old, decode, client = await pools(local_cluster)
    one, two = request(1, 100), request(2, 100)
    assert await answers(client, one) == [alone("tiny", one)]
    await old.close()
    await until(lambda: decode.pulls.reads.num_connected == 0, "the old agent forgotten")
    new = await cluster.add_prefill("p0")
    assert new.exports.offers.epoch != old.exports.offers.epoch
    await connected(decode, 1)
    assert await answers(client, two) == [alone("tiny", two)]
    assert {each["connector"] for each in decode.stats()["recent_pulls"]} == {"nixl"}
    cluster.prefills["p0"] = new
    await settled(cluster)


@pytest.mark.parametrize(
    ("entries", "epoch", "said"),
    [
        ([(0, 4000, 1)], None, "block 4000 of 400"),
        ([(0, 0, 1)], None, "block 0 of 400"),
        ([(8, 1, 1), (8, 2, 1)], None, "offered twice"),
        ([(1000, 1, 1)], None, "outside the transfer"),
        ([(0, 1, None), (8, "x", None)], None, "malformed offer"),
        ([(0, 1, 1)], "another", "its process was replaced"),
    ],
)
async def test_offers_that_cannot_be_are_refused(local_cluster, entries, epoch, said):
    _, _, decode, _ = await pools(local_cluster)
    block_reads, pool = decode.pulls.reads, decode.host.built.pool
    (link,) = block_reads._agents
    intake = ReadIntake(pool, (1, 2), first_token=0, num_tokens=16)
    with pytest.raises(TransferError, match=said):
        block_reads.ready(
            link,
            epoch or block_reads.epoch(link),
            entries,
            intake,
            landed=lambda num_bytes, summed: None,
            failed=lambda error: None,
        )
    assert (intake.lent, block_reads.num_open) == (0, 0)


async def test_metrics_tell_what_carried_kv(local_cluster):
    cluster, _, decode, client = await pools(local_cluster)
    await answers(client, request(1, 100))
    decode._sample()
    told = {(name, *labels): value for name, labels, value in decode.metrics.registry.snapshot()}
    read = [key for key in told if "tailrace_kv_transfer_bytes_total" in key and "nixl" in key]
    assert len(read) == 1
    assert told[read[0]] > 0
    assert any("tailrace_kv_post_seconds" in key for key in told)
    await settled(cluster)
