"""Choices 1 and up: they start with the first token of choice 0, and may be refused then."""

from __future__ import annotations

import pytest
from pools import alone, answers, request, settled

from engine.errors import EngineError, Overloaded


async def test_choices_that_fit_the_slots_need_no_place_in_the_waiting_line(local_cluster):
    cluster = local_cluster(prefill=False, max_waiting_requests=0)
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    one = request(1, 10, 20, ignore_eos=True)
    assert await answers(client, one, n=4) == [alone("fake", one, c) for c in range(4)]
    await settled(cluster)


async def test_a_refused_sibling_ends_its_stream_and_leaves_nothing_behind(
    local_cluster, monkeypatch
):
    cluster = local_cluster(prefill=False)
    decode = await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    client.window_tokens = 16
    engine = decode.host.engine
    submit = engine.submit

    def refuse_choice_2(one, **options):
        if one.request_id.endswith("/2"):
            raise Overloaded("the waiting line is full", code="full", retry_after_s=0.1)
        return submit(one, **options)

    monkeypatch.setattr(engine, "submit", refuse_choice_2)
    with pytest.raises(EngineError, match="the waiting line is full"):
        await answers(client, request(1, 10, 400, ignore_eos=True), n=4)
    await settled(cluster)
    assert decode.streams._choices == {}
    one = request(2, 10)
    assert await answers(client, one, n=2) == [alone("fake", one, c) for c in range(2)]


async def test_choices_share_a_window_of_one_token(local_cluster):
    cluster = local_cluster()
    await cluster.add_prefill("p0")
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    client.window_tokens = 1
    one = request(1, 100, 30, ignore_eos=True)
    assert await answers(client, one, n=3) == [alone("fake", one, c) for c in range(3)]
    await settled(cluster)


async def test_more_choices_than_slots_are_refused_for_good(local_cluster):
    cluster = local_cluster(prefill=False, max_running_requests=2)
    await cluster.add_decode("d0")
    client = await cluster.add_gateway("g0")
    with pytest.raises(EngineError, match="n=3: no replica of this model runs more than 2"):
        await answers(client, request(1, 10), n=3)
    await settled(cluster)
