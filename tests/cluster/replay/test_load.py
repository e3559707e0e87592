from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from stub_openai import MODEL, TEXT, Reply, Seen, StubOpenAI, prompt_tokens
from virtual_time import in_virtual_time

from cluster.replay.load import Load, Patience, Target, server_timing
from cluster.replay.outcome import Outcome
from cluster.replay.prefixes import Segment
from cluster.replay.prompts import PromptWriter
from cluster.replay.retry import RetryPolicy
from cluster.replay.vocabulary import ChatFrame, Vocabulary
from cluster.replay.workload import Offer, Schedule

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCABULARY = Vocabulary(words=tuple(LETTERS), ids=tuple(TEXT.tokenizer.encode(LETTERS)))
FRAME = ChatFrame(head=6, tail=12, join=7)


def offer(index: int, at_s: float | None = 0.0, tokens: int = 20, out: int = 3, **more) -> Offer:
    total = tokens + FRAME.head + FRAME.tail
    return Offer(
        index=index,
        at_s=at_s,
        segments=(Segment(("own", index), tokens),),
        **{
            "source": "t",
            "tier": "default",
            "tenant": "default",
            "model": MODEL,
            "input_tokens": total,
            "output_tokens": out,
            "predicted_cached_tokens": 0,
            **more,
        },
    )


async def run(
    stub: StubOpenAI,
    offers: Sequence[Offer],
    *,
    users: int | None = None,
    patience: Patience | None = None,
    stop_after_s: float | None = None,
    **target,
) -> list[Outcome]:
    outcomes: list[Outcome] = []
    load = Load(
        Schedule(offers=tuple(offers), sources=(), users=users),
        Target(url=stub.url, run_id="run", **target),
        {MODEL: PromptWriter(VOCABULARY, 0)},
        patience or Patience(timeout_s=20),
        outcomes.append,
    )
    if stop_after_s is not None:
        asyncio.get_running_loop().call_later(stop_after_s, load.stop)
    whole = await load.run()
    assert whole == (stop_after_s is None)
    assert load.in_flight == 0
    return sorted(outcomes, key=lambda outcome: outcome.index)


@in_virtual_time
async def test_what_the_server_counts_and_tells_is_in_the_outcome():
    timing = ("server-timing", "tokenize;dur=0.5, queue;dur=12.5")
    script = Reply(
        ttft_s=0.02, itl_s=0.01, cached_tokens=7, headers=[timing, ("x-request-id", "q")]
    )
    async with StubOpenAI(lambda seen: script) as stub:
        (got,) = await run(stub, [offer(0, 0.05, tier="batch")])
    assert (got.result, got.status, got.finish_reason) == ("ok", 200, "length")
    assert got.input_tokens == got.planned_input_tokens == 38
    assert (got.output_tokens, got.cached_tokens) == (3, 7)
    assert got.phases == {"tokenize": 0.0005, "queue": 0.0125}
    assert len(got.chunk_times) == 3
    assert got.scheduled_s == pytest.approx(0.05)
    assert got.scheduled_s <= got.sent_s <= got.first_token_s == got.chunk_times[0] <= got.end_s
    assert got.request_id == "q"
    (seen,) = stub.seen
    assert seen.body["service_tier"] == "flex"
    assert seen.headers["x-request-id"] == "run-0"
    assert seen.headers["x-stainless-retry-count"] == "0"


@in_virtual_time
async def test_an_open_loop_stays_open_while_the_server_stalls():
    """No coordinated omission: what was due during a stall is sent during it, and its latency
    counts from when it was due."""
    stall_s, every_s = 1.5, 0.02
    offers = [offer(i, i * every_s) for i in range(120)]
    async with StubOpenAI() as stub:
        asyncio.get_running_loop().call_later(0.6, stub.stall, stall_s)
        outcomes = await run(stub, offers)
    assert [o.result for o in outcomes] == ["ok"] * 120
    # The server saw every request when it was due, none after the stall that belonged before it.
    due = [o.scheduled_s for o in outcomes]
    assert due == pytest.approx([i * every_s for i in range(120)])
    stalled_until = max(o.first_token_s for o in outcomes if o.first_token_s - o.scheduled_s > 0.3)
    held = [o for o in outcomes if o.scheduled_s < stalled_until - 0.3 < o.first_token_s]
    assert len(held) >= 50  # of the 75 that are due in the stall's 1.5 s
    assert all(o.sent_s < stalled_until for o in held)
    # They waited less and less, down from nearly all of the stall.
    waits = [o.first_token_s - o.scheduled_s for o in held]
    assert max(waits) > stall_s - 0.3
    assert waits[0] > waits[len(waits) // 2] > waits[-1]
    # A closed loop of one would have had a single slow answer among the 120.
    assert sum(wait > stall_s / 2 for wait in waits) >= 20


@in_virtual_time
async def test_a_closed_loop_keeps_its_users_and_no_more():
    at_once, most = 0, 0

    def script(seen: Seen) -> Reply:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        asyncio.get_running_loop().call_later(0.03, leave)
        return Reply(ttft_s=0.03)

    def leave() -> None:
        nonlocal at_once
        at_once -= 1

    async with StubOpenAI(script) as stub:
        outcomes = await run(stub, [offer(i, None, out=1) for i in range(12)], users=3)
    assert len(outcomes) == 12
    assert most == 3
    due = [round(o.scheduled_s, 2) for o in outcomes]
    assert sorted(due) == [at for at in (0.0, 0.03, 0.06, 0.09) for _ in range(3)]


@in_virtual_time
async def test_a_conversation_carries_its_answers():
    turns = [
        offer(0, 0.0, session="s", turn=0, tokens=5),
        offer(1, None, session="s", turn=1, tokens=4, think_s=0.05),
        offer(2, None, session="s", turn=2, tokens=3),
    ]
    async with StubOpenAI(lambda seen: Reply(ttft_s=0.01)) as stub:
        first, second, third = await run(stub, turns)
    roles = [[m["role"] for m in seen.body["messages"]] for seen in stub.seen]
    assert roles == [["user"], ["user", "assistant", "user"], ["user", "assistant"] * 2 + ["user"]]
    last = stub.seen[2].body["messages"]
    assert [m["content"] for m in last][1::2] == ["xxx", "xxx"]
    assert last[:3] == stub.seen[1].body["messages"]
    assert [len(m["content"]) for m in last][::2] == [5, 4, 3]
    assert second.scheduled_s == pytest.approx(first.end_s + 0.05)
    assert third.scheduled_s == pytest.approx(second.end_s)


@in_virtual_time
async def test_a_turn_that_fails_is_followed_by_the_next():
    turns = [offer(i, 0.0 if not i else None, session="s", turn=i) for i in range(2)]
    async with StubOpenAI(lambda seen: Reply(status=500)) as stub:
        outcomes = await run(stub, turns)
    assert [o.result for o in outcomes] == ["error", "error"]
    assert stub.seen[1].body["messages"][1] == {"role": "assistant", "content": "..."}


@in_virtual_time
async def test_retries_wait_as_told_and_are_one_outcome():
    def script(seen: Seen) -> Reply:
        if seen.headers["x-stainless-retry-count"] == "2":
            return Reply()
        return Reply(status=429, headers=[("retry-after-ms", "60")])

    async with StubOpenAI(script) as stub:
        (got,) = await run(stub, [offer(0)], patience=Patience(retry=RetryPolicy(2)))
    assert (got.result, got.retries, got.status) == ("ok", 2, 200)
    assert got.attempt_s - got.sent_s == pytest.approx(0.12)
    assert [seen.headers["x-request-id"] for seen in stub.seen] == ["run-0"] * 3


@pytest.mark.parametrize(
    ("reply", "result", "code"),
    [
        (Reply(status=429), "shed", "slow_down"),
        (Reply(status=503), "shed", "slow_down"),
        (Reply(status=504), "timeout", "slow_down"),
        (Reply(status=400), "error", "slow_down"),
        (Reply(close_after=1), "error", "connection"),
        (Reply(close_after=0), "error", "connection"),
        (Reply(ttft_s=5.0), "timeout", "client_timeout"),
        (Reply(body=b'data: {"error": {"message": "m", "code": "c"}}\n\n'), "error", "c"),
        (Reply(body=b'data: {"choices": []}\n\n'), "error", "incomplete"),
    ],
)
@in_virtual_time
async def test_what_became_of_a_request_has_one_name(reply, result, code):
    patience = Patience(timeout_s=0.5 if reply.ttft_s else 20)
    async with StubOpenAI(lambda seen: reply) as stub:
        (got,) = await run(stub, [offer(0)], patience=patience)
    assert (got.result, got.code, got.retries) == (result, code, 0)
    assert got.first_token_s is None or reply.close_after == 1


@in_virtual_time
async def test_a_broken_connection_before_the_answer_is_tried_again():
    replies = iter([Reply(close_after=0), Reply()])
    async with StubOpenAI(lambda seen: next(replies)) as stub:
        (got,) = await run(stub, [offer(0)], patience=Patience(retry=RetryPolicy(1)))
    assert (got.result, got.retries) == ("ok", 1)


@in_virtual_time
async def test_clients_leave_where_they_were_to():
    offers = [offer(0, out=100, leave_at=0.05), offer(1, out=100, leave_at=0.001)]
    script = Reply(ttft_s=0.3, itl_s=0.01)
    async with StubOpenAI(lambda seen: script) as stub:
        middle, early = await run(stub, offers)
        assert (middle.result, early.result) == ("disconnected", "disconnected")
        assert len(middle.chunk_times) == 5
        assert (early.first_token_s, early.status) == (None, None)
        await asyncio.sleep(0.4)
        assert [seen.left for seen in stub.seen] == [True, True]


@in_virtual_time
async def test_stopping_sends_nothing_more_and_leaves_what_is_in_flight():
    offers = [offer(0), offer(1, 0.02, out=1000), offer(2, 30.0)]

    def script(seen: Seen) -> Reply:
        return Reply(itl_s=0.05 if seen.body["max_tokens"] == 1000 else 0.0)

    async with StubOpenAI(script) as stub:
        outcomes = await run(stub, offers, stop_after_s=1.5)
        assert [o.index for o in outcomes] == [0]
        assert len(stub.seen) == 2


@in_virtual_time
async def test_bare_prompts_as_text_and_as_ids_and_without_streaming():
    async with StubOpenAI() as stub:
        (text,) = await run(stub, [offer(0)], endpoint="completions")
        (ids,) = await run(stub, [offer(0)], endpoint="completions", prompts="ids")
        (whole,) = await run(stub, [offer(0)], stream=False)
    assert (text.input_tokens, ids.input_tokens, whole.input_tokens) == (20, 20, 38)
    assert [prompt_tokens(seen) for seen in stub.seen] == [20, 20, 38]
    assert stub.seen[1].body["prompt"] == TEXT.tokenizer.encode(stub.seen[0].body["prompt"])
    assert (whole.result, whole.first_token_s, whole.output_tokens) == ("ok", None, 3)


@in_virtual_time
async def test_every_tenant_has_a_key_of_its_own():
    offers = [offer(i, tenant=name) for i, name in enumerate(("a", "b"))]
    async with StubOpenAI() as stub:
        await run(stub, offers, api_key="shared", keys={"a": "secret-a"})
    keys = {seen.headers["x-request-id"]: seen.headers["authorization"] for seen in stub.seen}
    assert keys == {"run-0": "Bearer secret-a", "run-1": "Bearer shared"}


@in_virtual_time
async def test_a_server_that_is_not_there_is_an_outcome_too():
    async with StubOpenAI() as stub:
        pass
    (got,) = await run(stub, [offer(0)])
    assert (got.result, got.code, got.status) == ("error", "connection", None)


def test_server_timing_keeps_durations_and_nothing_else():
    header = 'a;desc="x";dur=1.5, b, c;dur=x, d;DUR="2"'
    assert server_timing(header) == {"a": 0.0015, "d": 0.002}
    assert server_timing("") == {}
