"""Transfers that go wrong between two healthy engines: answers are exact, nothing stays behind."""

from __future__ import annotations

import asyncio

import pytest
from pace import at_some_pace
from pools import Passes, Payloads, alone, answers, opened, request, settled, until

from deployments.lifecycle import export, pull
from engine.errors import Overloaded, RequestError, TransferError
from engine.transfer.export import KVExport, OutgoingChunk

ONE_CHUNK_AT_A_TIME = {"transfer_window_bytes": 1}


async def test_a_transfer_that_stalls_in_the_middle_goes_to_another_replica(
    local_cluster, monkeypatch
):
    async def check(seconds: float) -> None:
        cluster = local_cluster("tiny", pull_stall_s=seconds, **ONE_CHUNK_AT_A_TIME)
        stalls = await cluster.add_prefill("p0")
        decode = await cluster.add_decode("d0")
        client = await cluster.add_gateway("g0")
        chunks = Payloads(monkeypatch, stalls, 2, lambda link: False)
        one = request(1, 100)
        reader = await opened(client, one)
        await until(lambda: chunks.acted, "the chunk that is lost")
        works = await cluster.add_prefill("p1")
        await reader.task
        assert reader.answers == [alone("tiny", one)]
        counters = decode.streams.counters
        assert counters.pull_failures == {"stall": 1}
        assert counters.fallbacks == {"other_replica": 1}
        assert counters.decisions == {("disaggregated", ""): 1}
        assert works.exports.bytes_sent == 100 * works.host.built.model.layout.bytes_per_token
        await settled(cluster)

    await at_some_pace(check, 0.5)


async def test_a_transfer_that_stalls_with_nobody_else_to_ask_is_computed_here(
    local_cluster, monkeypatch
):
    cluster = local_cluster("tiny", pull_stall_s=0.5)
    stalls = await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    Payloads(monkeypatch, stalls, 3, lambda link: False)
    one = request(1, 100)
    assert await answers(client, one, n=2) == [alone("tiny", one, c) for c in range(2)]
    assert decode.streams.counters.decisions == {("fallback", "stall"): 1}
    await settled(cluster)


@pytest.fixture
def impatient(monkeypatch):
    """Settings of a decode replica that soon gives up a transfer of which it hears nothing."""

    def settings(silence_s: float) -> dict[str, float]:
        monkeypatch.setattr(export, "ALIVE_EVERY_S", silence_s / 8)
        return {"pull_silence_s": silence_s}

    return settings


async def test_a_prompt_that_waits_its_turn_is_no_stall(local_cluster, impatient):
    async def check(seconds: float) -> None:
        cluster = local_cluster(pull_stall_s=seconds / 4)
        busy = await cluster.add_prefill("p0")
        decode = await cluster.add_decode("d0", **impatient(seconds))
        client = await cluster.add_gateway("g0")
        passes = Passes(busy)
        passes.hold_at = 1
        first, second = request(1, 100), request(2, 100)
        try:
            readers = [await opened(client, one) for one in (first, second)]
            await until(lambda: passes.reached, "the pass that is held up")
            await asyncio.sleep(2.5 * seconds)  # more than twice what a transfer may be silent
            assert decode.pulls.num_active == 2
        finally:
            passes.release()
        for one, reader in zip((first, second), readers, strict=True):
            await reader.task
            assert reader.answers == [alone("fake", one)]
        assert decode.streams.counters.decisions == {("disaggregated", ""): 2}
        await settled(cluster)

    await at_some_pace(check, 0.4)


async def test_a_prompt_half_computed_is_no_stall(local_cluster, impatient):
    async def check(seconds: float) -> None:
        cluster = local_cluster(pull_stall_s=seconds / 4, max_chunk_tokens=16)
        busy = await cluster.add_prefill("p0")
        decode = await cluster.add_decode("d0", **impatient(seconds))
        client = await cluster.add_gateway("g0")
        passes = Passes(busy)
        passes.hold_at = 4
        one = request(1, 100)
        try:
            reader = await opened(client, one)
            sent = 48 * busy.host.built.model.layout.bytes_per_token
            await until(lambda: decode.pulls.bytes_received == sent, "three passes' KV")
            await asyncio.sleep(2.5 * seconds)
            assert decode.pulls.num_active == 1
        finally:
            passes.release()
        await reader.task
        assert reader.answers == [alone("fake", one)]
        assert decode.streams.counters.decisions == {("disaggregated", ""): 1}
        await settled(cluster)

    await at_some_pace(check, 0.4)


@pytest.mark.parametrize("another", [True, False])
async def test_a_transfer_that_a_healthy_replica_forgets_is_not_waited_for(
    local_cluster, impatient, another
):
    async def check(seconds: float) -> None:
        cluster = local_cluster("tiny", max_chunk_tokens=16)
        forgets = await cluster.add_prefill("p0")
        decode = await cluster.add_decode("d0", **impatient(seconds))
        client = await cluster.add_gateway("g0")
        passes = Passes(forgets)
        passes.hold_at = 4
        one = request(1, 100)
        try:
            reader = await opened(client, one)
            sent = 48 * forgets.host.built.model.layout.bytes_per_token
            await until(lambda: decode.pulls.bytes_received == sent, "three passes' KV")
            if another:
                await cluster.add_prefill("p1")
            (lost,) = forgets.exports._sessions
            forgets.host.engine.cancel(lost)
        finally:
            passes.release()
        await reader.task
        assert reader.answers == [alone("tiny", one)]
        counters = decode.streams.counters
        assert counters.pull_failures == {"stall": 1}
        assert counters.fallbacks == {"other_replica" if another else "local": 1}
        (decision,) = counters.decisions
        assert decision == (("disaggregated", "") if another else ("fallback", "stall"))
        assert forgets.host.failure is None
        await settled(cluster)

    await at_some_pace(check, 0.4)


async def test_a_prompt_waits_for_prefill_no_longer_than_its_deadline(local_cluster):
    async def check(seconds: float) -> None:
        cluster = local_cluster(pull_stall_s=seconds / 10)
        busy = await cluster.add_prefill("p0")
        await cluster.add_decode("d0")
        client = await cluster.add_gateway("g0")
        passes = Passes(busy)
        passes.hold_at = 1
        try:
            reader = await opened(client, request(1, 100), remaining_s=seconds)
            with pytest.raises(Overloaded) as late:
                await reader.task
            assert late.value.code == "deadline_exceeded"
            assert passes.reached
        finally:
            passes.release()
        await settled(cluster)

    await at_some_pace(check, 1.0, Overloaded)


async def test_a_lease_that_nobody_renews_expires_and_decode_computes_itself(
    local_cluster, monkeypatch
):
    monkeypatch.setattr(export, "LEASE_S", 1.0)
    monkeypatch.setattr(pull, "RENEW_EVERY_S", 3600.0)
    cluster = local_cluster("tiny", pull_stall_s=3600.0)
    prefill = await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    Payloads(monkeypatch, prefill, 2, lambda link: False)
    one = request(1, 100)
    assert await answers(client, one) == [alone("tiny", one)]
    assert decode.streams.counters.pull_failures == {"lease": 1}
    assert decode.streams.counters.decisions == {("fallback", "lease"): 1}
    await settled(cluster)


async def test_a_lease_that_is_renewed_outlives_its_first_term(local_cluster, monkeypatch):
    async def check(seconds: float) -> None:
        monkeypatch.setattr(export, "LEASE_S", seconds)
        monkeypatch.setattr(pull, "RENEW_EVERY_S", seconds / 10)
        cluster = local_cluster(pull_stall_s=1.5 * seconds)
        prefill = await cluster.add_prefill("p0")
        decode = await cluster.add_decode("d0")
        client = await cluster.add_gateway("g0")
        Payloads(monkeypatch, prefill, 2, lambda link: False)
        one = request(1, 100)
        assert await answers(client, one) == [alone("fake", one)]
        assert decode.streams.counters.pull_failures == {"stall": 1}
        await settled(cluster)

    await at_some_pace(check, 2.0)


async def test_prefill_that_fails_the_transfer_half_way(local_cluster, monkeypatch):
    cluster = local_cluster("tiny", **ONE_CHUNK_AT_A_TIME)
    fails = await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")

    def fail_soon(link) -> bool:
        asyncio.get_running_loop().call_soon(fails.exports.fail_all, "out of order")
        return True

    Payloads(monkeypatch, fails, 3, fail_soon)
    one = request(1, 100)
    assert await answers(client, one) == [alone("tiny", one)]
    assert decode.streams.counters.decisions == {("fallback", "prefill"): 1}
    received = decode.pulls.bytes_received // fails.host.built.model.layout.bytes_per_token
    assert 16 <= received < 100
    await settled(cluster)


@pytest.mark.parametrize("nth", [1, 2, 9])
async def test_prefill_that_loses_the_link_half_way(local_cluster, monkeypatch, nth):
    cluster = local_cluster("tiny", **ONE_CHUNK_AT_A_TIME)
    killed = await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")

    def abort(link) -> bool:
        link._transport.abort()
        return False

    chunks = Payloads(monkeypatch, killed, nth, abort)
    one = request(1, 100)
    assert await answers(client, one, n=2) == [alone("tiny", one, c) for c in range(2)]
    assert chunks.acted
    assert decode.streams.counters.pull_failures == {"link": 1}
    assert decode.streams.counters.decisions == {("fallback", "link"): 1}
    await settled(cluster)


async def test_prefill_that_closes_half_way_means_another_one(local_cluster, monkeypatch):
    cluster = local_cluster("tiny", **ONE_CHUNK_AT_A_TIME)
    closes = await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    chunks = Payloads(monkeypatch, closes, 4, lambda link: False)
    one = request(1, 100)
    reader = await opened(client, one)
    await until(lambda: chunks.acted, "the fourth chunk")
    other = await cluster.add_prefill("p1")
    await closes.close()
    await reader.task
    assert reader.answers == [alone("tiny", one)]
    assert decode.streams.counters.fallbacks == {"other_replica": 1}
    assert decode.streams.counters.decisions == {("disaggregated", ""): 1}
    assert other.exports.bytes_sent == 100 * other.host.built.model.layout.bytes_per_token
    await settled(cluster)


async def test_a_chunk_that_arrives_changed_is_noticed(local_cluster, monkeypatch):
    cluster = local_cluster("tiny")
    await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    make, made = KVExport.next, []

    def changed(self):
        chunk = make(self)
        made.append(chunk)
        if chunk is None or len(made) != 5:
            return chunk
        payload = bytearray(chunk.payload)
        payload[-1] ^= 1
        return OutgoingChunk(chunk.head, memoryview(payload))

    monkeypatch.setattr(KVExport, "next", changed)
    one = request(1, 100)
    assert await answers(client, one) == [alone("tiny", one)]
    assert decode.pulls.checksum_mismatches == 1
    assert decode.streams.counters.decisions == {("fallback", "checksum"): 1}
    await settled(cluster)


async def test_a_prompt_at_fault_does_not_rest_the_replica(local_cluster, monkeypatch):
    cluster = local_cluster()
    prefill = await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    engine = prefill.host.built.engine
    submit = engine.submit

    def refuse_long(one, **options):
        if one.num_tokens > 200:
            raise RequestError("too long for this pool")
        return submit(one, **options)

    monkeypatch.setattr(engine, "submit", refuse_long)
    for one in (request(1, 250), request(2, 100)):
        assert await answers(client, one) == [alone("fake", one)]
    assert decode.streams.counters.decisions == {
        ("fallback", "request"): 1,
        ("disaggregated", ""): 1,
    }


async def test_the_limit_of_what_decode_computes_holds_while_prefill_rests(local_cluster):
    cluster = local_cluster(max_fallback_tokens=50)
    prefill = await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    await prefill.close()
    for i in range(2):  # the second finds the replica resting
        with pytest.raises(TransferError, match=r"200 tokens .* \(50\)"):
            await answers(client, request(i, 200))
    assert decode.streams.counters.pull_failures == {"connect": 1}
    await settled(cluster)


async def test_a_cancel_at_every_turn_of_a_pull_leaves_nothing_behind(local_cluster):
    cluster = local_cluster("tiny")
    await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    for turns in range(0, 150, 5):
        stream = await client.open(request(turns, 200, 3), n=2, remaining_s=20.0)
        for _ in range(turns):
            await asyncio.sleep(0)
        await stream.aclose()
    await settled(cluster)
    one = request(1000, 200)
    assert await answers(client, one) == [alone("tiny", one)]
    assert decode.streams.counters.pull_failures == {}
