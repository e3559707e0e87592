"""`user_config` that changes while streams run: new limits at once, running streams untouched."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from pools import Passes, alone, answers, opened, request, settled, until

from deployments.engine_host import EngineHost
from deployments.pool_replica import PoolReplica
from deployments.settings import PoolSettings
from engine.errors import ConfigError


def changed(cluster, **changes) -> PoolSettings:
    return cluster.settings.model_copy(update=changes)


async def begun(client, decode, i: int):
    """The `i`th stream: it fills its window of 16 tokens and then waits for its reader."""
    stream = await client.open(request(i, 4, 400, ignore_eos=True), n=1, remaining_s=60.0)
    table = decode.streams
    await until(lambda: sum(s.paused for s in table._streams.values()) == i, "a full window")
    return stream


async def finished(stream) -> list[int]:
    tokens = []
    async for events in stream:
        for event in events:
            tokens.extend(event.token_ids)
    await stream.aclose()
    return tokens


async def test_more_slots_are_handed_out_at_once(local_cluster):
    cluster = local_cluster(prefill=False, max_running_requests=1)
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    client.window_tokens = 16
    running = await begun(client, decode, 1)
    waits = asyncio.create_task(answers(client, request(2, 4)))
    await until(lambda: client._queue.num_waiting == 1, "a request in the queue")
    decode.apply(changed(cluster, max_running_requests=2))
    assert await waits == [alone("fake", request(2, 4))]
    assert decode.streams.num_streams == 1
    assert await finished(running) == alone("fake", request(1, 4, 400, ignore_eos=True)).tokens
    await settled(cluster)


async def test_fewer_slots_end_no_stream_and_hold_new_ones_back(local_cluster):
    cluster = local_cluster(prefill=False, max_running_requests=2)
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    client.window_tokens = 16
    running = [await begun(client, decode, i) for i in (1, 2)]
    decode.apply(changed(cluster, max_running_requests=1))
    waits = asyncio.create_task(answers(client, request(3, 4)))
    await until(lambda: client._queue.num_waiting == 1, "a request in the queue")
    for i, stream in enumerate(running, start=1):
        assert not waits.done()
        assert decode.streams.num_choices == 3 - i
        assert await finished(stream) == alone("fake", request(i, 4, 400, ignore_eos=True)).tokens
    assert await waits == [alone("fake", request(3, 4))]
    assert decode.streams.counters.refused == {}
    await settled(cluster)


async def test_an_engine_that_computes_nothing_takes_new_limits_too(local_cluster):
    """Serve gives a replica its settings once it is built: what it was built with is not theirs."""
    cluster = local_cluster("synthetic", prefill=False)
    decode = await cluster.add_decode("d0")
    decode.apply(changed(cluster, max_running_requests=3, max_waiting_requests=5))
    limits = decode.host.engine.config.scheduler
    assert (limits.max_running_requests, limits.max_waiting_requests) == (3, 5)


async def test_what_is_worth_sending_away_changes_at_once(local_cluster):
    cluster = local_cluster()
    await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    for i, local_prefill_tokens in enumerate([16, 100, 99]):
        decode.apply(changed(cluster, local_prefill_tokens=local_prefill_tokens))
        assert await answers(client, request(i, 100)) == [alone("fake", request(i, 100))]
    assert [entry["decision"] for entry in decode.streams.log] == [
        "disaggregated",
        "local",
        "disaggregated",
    ]
    await settled(cluster)


async def test_the_newest_limits_of_patience_hold(local_cluster):
    cluster = local_cluster(pull_stall_s=5.0)
    await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    decode.apply(
        changed(
            cluster,
            pull_stall_s=0.25,
            pull_silence_s=2.5,
            step_limit_s=7.0,
            transfer_window_bytes=77,
        )
    )
    pulls = decode.pulls
    assert (pulls.stall_s, pulls.silence_s, pulls.window_bytes) == (0.25, 2.5, 77)
    assert decode.host.step_limit_s == 7.0


async def test_prefill_takes_smaller_steps_under_a_running_transfer(local_cluster):
    cluster = local_cluster("tiny")
    prefill = await cluster.add_prefill("p0")
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    passes = Passes(prefill)
    passes.hold_at = 1
    first, second = request(1, 100), request(2, 100)
    try:
        reader = await opened(client, first)
        await until(lambda: passes.reached, "the pass under way")
        prefill.apply(changed(cluster, max_chunk_tokens=20, max_unacked_bytes=1))
    finally:
        passes.release()
    await reader.task
    assert reader.answers == [alone("tiny", first)]
    assert passes.count == 1
    assert await answers(client, second) == [alone("tiny", second)]
    assert passes.count == 1 + 5
    assert prefill.exports.max_unacked_bytes == 1
    assert decode.streams.counters.decisions == {("disaggregated", ""): 2}
    await settled(cluster)


async def test_an_overlap_that_ranks_cannot_do_is_refused_and_the_old_settings_stay_in_force(
    local_cluster, monkeypatch
):
    # A replica whose ranks are lost ends its process, which here is the test's.
    monkeypatch.setattr(EngineHost, "watching", lambda self, on_failure: [])
    cluster = local_cluster("tiny", prefill=False, max_running_requests=2)
    cluster.args = cluster.args.model_copy(update={"tensor_parallel": 2})
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    client.window_tokens = 16
    served = SimpleNamespace(service=decode)  # all of a replica that its `reconfigure` reads
    before = (decode._settings, decode.host.engine._scheduler.config, decode.streams.config)
    running = await begun(client, decode, 1)
    with pytest.raises(ConfigError, match=r"overlap=True: ranks of one stage .* one rank"):
        await PoolReplica.reconfigure(
            served,
            {
                **cluster.settings.model_dump(),
                "overlap": True,
                "max_running_requests": 1,
                "step_limit_s": 7.0,
                "rank_silence_s": 77.0,
                "metrics": False,
            },
        )
    engine = decode.host.engine
    assert (decode._settings, engine._scheduler.config, decode.streams.config) == before
    assert not engine.overlaps
    assert decode.streams.slots == 2
    assert decode.host.step_limit_s == cluster.settings.step_limit_s
    assert decode.host.built.ranks.silence_s == cluster.settings.rank_silence_s
    assert decode.metrics.recording
    # The second slot is still handed out, and the stream that ran goes on.
    assert await answers(client, request(2, 4)) == [alone("tiny", request(2, 4))]
    assert await finished(running) == alone("tiny", request(1, 4, 400, ignore_eos=True)).tokens
    await PoolReplica.reconfigure(served, {**cluster.settings.model_dump(), "step_limit_s": 7.0})
    assert decode.host.step_limit_s == 7.0
    await settled(cluster)


@pytest.mark.parametrize(
    ("setting", "value", "limit"), [("pull_silence_s", 1.9, 2), ("step_limit_s", 0, 1)]
)
def test_limits_of_patience_below_what_can_work_are_refused(setting, value, limit):
    with pytest.raises(
        ConfigError, match=rf"{setting}={value}: .*greater than or equal to {limit}"
    ):
        PoolSettings.parse({setting: value})
