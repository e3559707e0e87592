"""A delay injected into one phase of a real request, over real links: the explanation names it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from pace import paced
from pools import Passes, lose, until
from told import Gateway

from deployments.link.link import Link

LATE_S = 0.8
"""Long beside what a busy machine adds by itself."""


async def gateway(cluster: Any, *, slots: int = 8) -> Gateway:
    await cluster.add_prefill("p1")
    await cluster.add_decode("d1", max_running_requests=slots)
    made = Gateway(await cluster.add_gateway("g1"))
    await until(lambda: bool(made.backend.client._known), "a link to decode")
    await made.complete(tokens=40)  # warm: what is measured below is not the first of its kind
    return made


def slower(service: Any, seconds: float, only: Any = lambda plan: True) -> None:
    """Every forward pass of a replica for which `only` holds takes that much longer."""
    executor = service.host.built.engine._executor
    execute = executor.execute

    def late(plan: Any) -> Any:
        if only(plan):
            time.sleep(seconds)
        return execute(plan)

    executor.execute = late


def named(told: Any, phase: str, seconds: float) -> None:
    assert told["dominant_phase"] == phase, told["phases"]
    assert told["dominant_s"] >= 0.9 * seconds
    assert told["accounted"] >= 0.99
    assert sum(told["phases"].values()) == pytest.approx(told["total_s"], abs=1e-4)


@paced(LATE_S)
async def test_a_wait_for_a_slot_is_the_queues(local_cluster, seconds):
    cluster = local_cluster()
    own = await gateway(cluster, slots=1)
    passes = Passes(cluster.decodes["d1"])
    passes.hold_at = passes.count + 1
    first = asyncio.create_task(own.complete(headers={"x-request-id": "first"}))
    await until(lambda: passes.reached, "the first in its step")
    second = asyncio.create_task(own.complete(headers={"x-request-id": "second"}))
    third = asyncio.create_task(own.complete(headers={"x-request-id": "third"}))
    await until(lambda: cluster.queue._queue.num_waiting == 2, "two in the queue")
    await asyncio.sleep(seconds)
    passes.release()
    await asyncio.gather(first, second, third)
    told = await own.explain("third")
    named(told, "queue", seconds)
    assert told["queue"]["at_arrival"] == {"ahead": 1, "waiting": {"default": 1}}
    assert told["queue"]["granted_before"] == {"default": 1}
    assert told["route"]["decode"]["rule"] == "most free slots"
    assert told["most_delayed_phase"] == "queue"


@paced(LATE_S)
async def test_slow_steps_of_the_prefill_replica_are_prefills(local_cluster, seconds):
    cluster = local_cluster(max_chunk_tokens=32)
    own = await gateway(cluster)
    slower(cluster.prefills["p1"], seconds / 2)
    await own.complete(tokens=81, headers={"x-request-id": "late"})
    told = await own.explain("late")
    named(told, "prefill", seconds)
    assert told["prefill"]["replica"] == "p1"
    assert told["prefill"]["decision"] == "disaggregated"
    assert [chunk["tokens"] for chunk in told["prefill"]["chunks"]] == [32, 32, 17]
    assert min(chunk["duration_s"] for chunk in told["prefill"]["chunks"]) >= seconds / 2
    assert told["prefix"]["computed_tokens"] == 81


@paced(LATE_S)
async def test_a_late_last_chunk_is_the_transfers(local_cluster, monkeypatch, seconds):
    cluster = local_cluster(max_chunk_tokens=32)
    own = await gateway(cluster)
    links = cluster.prefills["p1"]._server.links.values()
    send, held = Link.send_payload, list[Any]()

    def late(link: Link, head: Any, payload: Any) -> bool:
        _, _, first, tokens, *_ = head[2]
        if link in links and first + tokens == 82 and not held:
            held.append(head)
            chunk = bytes(payload)
            asyncio.get_running_loop().call_later(seconds, lambda: send(link, head, chunk))
            return True
        return send(link, head, payload)

    monkeypatch.setattr(Link, "send_payload", late)
    await own.complete(tokens=82, headers={"x-request-id": "late"})
    assert held, "no chunk was held up"
    told = await own.explain("late")
    named(told, "transfer", seconds)
    assert told["transfer"]["exposed_s"] >= 0.9 * seconds
    assert 0 < told["transfer"]["hidden_bytes"] < told["transfer"]["bytes"]


@paced(LATE_S)
async def test_slow_steps_of_the_decode_replica_are_decodes(local_cluster, seconds):
    cluster = local_cluster()
    own = await gateway(cluster)
    slower(cluster.decodes["d1"], seconds / 8)
    await own.complete(tokens=83, max_tokens=12, headers={"x-request-id": "late"})
    told = await own.explain("late")
    named(told, "decode", seconds)
    (choice,) = told["decode"]["choices"]
    assert choice["tokens"] == 12
    assert choice["mean_rows"] == 1.0
    assert choice["step_s"] >= 11 * seconds / 8
    assert told["idle"]["phases"]["decode"] > 0  # by this replica's own steps


@paced(LATE_S, ValueError)
async def test_one_stalled_step_is_found_and_told_with_its_company(local_cluster, seconds):
    cluster = local_cluster(local_prefill_tokens=400, max_chunk_tokens=256, max_step_tokens=512)
    own = await gateway(cluster)
    decode = cluster.decodes["d1"]
    slower(decode, seconds, lambda plan: any(len(c.token_ids) > 99 for c in plan.chunks))
    first = asyncio.create_task(
        own.complete(max_tokens=200, tokens=30, headers={"x-request-id": "late"})
    )
    await until(lambda: decode.streams.counters.tokens_out > 30, "the first is decoding")
    await own.complete(tokens=200)
    await first
    told = await own.explain("late")
    named(told, "decode", seconds)
    company = {"tokens": 201, "rows": 2, "prompts": 1, "prompt_tokens": 200}
    stalls = told["decode"]["choices"][0]["stalls"]
    (stall,) = [stall for stall in stalls if stall["longest_step"] == company]
    assert (stall["cause"], stall["steps"]) == ("slow_step", 1)
    assert stall["gap_s"] >= stall["step_s"] >= seconds


@paced(LATE_S)
async def test_time_in_a_tool_is_the_tools_and_not_the_models(local_cluster, seconds):
    cluster = local_cluster()
    own = await gateway(cluster)
    ago_s, took_s = 2.5 * seconds, 2.4 * seconds
    span = {"name": "search", "kind": "tool"}
    spans = json.dumps([span | {"start_ms_ago": 1000 * ago_s, "duration_ms": 1000 * took_s}])
    headers = {"x-request-id": "late", "x-tailrace-spans": spans}
    await own.complete(tokens=84, headers=headers)
    told = await own.explain("late")
    named(told, "tool", seconds)
    assert told["external_s"] == pytest.approx(ago_s)
    assert told["segments"][0]["name"] == "search"
    assert told["idle"]["phases"]["tool"] == pytest.approx(took_s)


@pytest.mark.parametrize("stream", [True, False])
@paced(LATE_S)
async def test_a_client_that_reads_slowly_is_the_streams(local_cluster, stream, seconds):
    cluster = local_cluster()
    own = await gateway(cluster)

    async def slow(message: Any) -> None:
        await asyncio.sleep(seconds / 2)

    await own.complete(tokens=85, headers={"x-request-id": "late"}, slow=slow, stream=stream)
    told = await own.explain("late")
    named(told, "stream", seconds)
    assert told["backpressure"]["blocked_s"] >= seconds / 2


async def test_a_move_to_another_replica_is_told_with_what_it_cost(local_cluster):
    cluster = local_cluster()
    await cluster.add_prefill("p1")
    await cluster.add_decode("d1")
    own = Gateway(await cluster.add_gateway("g1"))
    await until(lambda: bool(own.backend.client._known), "a link to decode")
    slower(cluster.decodes["d1"], 0.02)
    asked = asyncio.create_task(
        own.complete(tokens=91, max_tokens=60, headers={"x-request-id": "moved"})
    )
    await until(lambda: cluster.decodes["d1"].streams.counters.tokens_out > 9, "tokens")
    await cluster.add_decode("d2")
    await lose(cluster, "d1")
    assert (await asked).json()["usage"]["completion_tokens"] == 60
    told = await own.explain("moved")
    (move,) = told["migrations"]
    assert (move["replica"], move["to"]) == ("d1", "d2")
    assert told["accounted"] >= 0.99
    assert [part["end"] for part in told["submits"]] == ["lost", "finished"]
    assert {"d1", "d2"} <= {segment["where"] for segment in told["segments"]}


async def test_a_journal_that_comes_later_is_asked_for_again(local_cluster):
    own = await gateway(local_cluster())
    await own.complete(tokens=92, headers={"x-request-id": "late"})
    explainer = own.state.explainer
    explainer._ring.find(lambda kept: kept.record.request_id == "late").waterfall = None
    source = explainer.source
    explainer.source = None
    first = await own.explain("late")
    assert first["unaccounted_s"] > 0
    assert first["submits"][0]["journal"] is False
    explainer.source = source
    assert (await own.explain("late"))["accounted"] == 1.0


async def test_the_answer_carries_its_explanation_where_asked(local_cluster):
    own = await gateway(local_cluster())
    got = await own.complete(tokens=86, headers={"x-tailrace-explain": "1"})
    told = got.json()["explain"]
    assert (told["complete"], told["model"], told["accounted"]) == (False, "m", 1.0)
    assert told["usage"]["completion_tokens"] == 12

    streamed = await own.complete(tokens=87, stream=True, tailrace={"explain": True})
    *_, chunk, done = streamed.events()
    assert done == "[DONE]"
    assert chunk["choices"] == []
    assert chunk["explain"]["answer_id"] == chunk["id"]
    assert chunk["explain"]["decode"]["choices"][0]["tokens"] == 12

    plain = await own.complete(tokens=88)
    assert "explain" not in plain.json()


async def test_any_gateway_explains_and_lists_the_requests_of_all(local_cluster):
    cluster = local_cluster()
    first = await gateway(cluster)
    second = Gateway(await cluster.add_gateway("g2"), own_id="g2")
    await until(lambda: bool(second.backend.client._known), "its link to decode")
    got = await first.complete(tokens=89, headers={"x-request-id": "here"})
    await until(
        lambda: second.backend.client._dialer.is_open(
            cluster.decode_directory.replicas()["d1"]["link"]
        ),
        "the link is up",
    )
    told = await second.explain(got.json()["id"])
    assert (told["gateway"], told["request_id"]) == ("g1", "here")
    assert told == await first.explain("here")
    listed = (await second.call("GET", "/tailrace/requests", query="slowest=false")).json()
    assert listed["gateways"] == 2
    assert listed["data"][0]["request_id"] == "here"
    missing = await second.call("GET", "/tailrace/explain/nobody")
    assert missing.status == 404
    assert "none of 2 gateways remembers it" in missing.json()["error"]["message"]


async def test_another_tenant_is_told_nothing(local_cluster):
    own = await gateway(local_cluster())
    await own.complete(tokens=90, headers={"x-request-id": "mine"})
    explainer = own.state.explainer
    assert await explainer.explain("mine", salt="another tenant") is None
    assert await explainer.explain("mine", salt="") is not None
