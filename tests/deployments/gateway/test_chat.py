from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai
import pytest

from deployments.gateway.events import PHASES, replay
from deployments.link.messages import StreamEvent, TokenLogprob, Usage
from engine.errors import EngineError, Overloaded, RequestError, TransferError
from engine.request import FinishReason

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"model": "tiny", "messages": HELLO}


async def test_a_chat_is_answered_with_every_key_that_clients_require(gateway: Any) -> None:
    reply = await gateway.post("/v1/chat/completions", BODY)
    answer = reply.json()
    assert reply.status == 200
    assert answer.pop("id").startswith("chatcmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("fp_")
    # "user: hello\nassistant: " in bytes
    prompt_tokens = len(b"user: hello\nassistant: ")
    assert answer == {
        "object": "chat.completion",
        "model": "tiny",
        "service_tier": "default",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "the quick brown fox",
                    "refusal": None,
                },
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 4,
            "total_tokens": prompt_tokens + 4,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


async def test_the_openai_client_reads_answer_request_id_and_usage(gateway: Any) -> None:
    async with gateway.client() as client:
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
    assert answer.choices[0].message.content == "the quick"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer._request_id.startswith("req_")


async def test_max_completion_tokens_wins_over_max_tokens(gateway: Any) -> None:
    body = BODY | {"max_tokens": 50, "max_completion_tokens": 3}
    await gateway.post("/v1/chat/completions", body)
    assert gateway.backend.request.params.max_tokens == 3


async def test_without_max_tokens_the_answer_may_fill_the_context(gateway: Any) -> None:
    await gateway.post("/v1/chat/completions", BODY)
    request = gateway.backend.request
    assert request.params.max_tokens == 256 - len(request.prompt_ids)


async def test_sampling_fields_reach_the_engine(gateway: Any) -> None:
    body = BODY | {
        "temperature": 0.25,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "logit_bias": {"65": -100, "66": 5},
        "seed": -1,
        "stop": "END",
        "stop_token_ids": [3],
        "min_tokens": 2,
        "ignore_eos": True,
        "max_tokens": 9,
        "n": 2,
    }
    await gateway.post("/v1/chat/completions", body)
    _, request, n, _ = gateway.backend.opened[-1]
    params = request.params
    assert n == 2
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.25, 0.5, 7, 0.1)
    assert (params.repetition_penalty, params.presence_penalty) == (1.5, -1)
    assert params.frequency_penalty == 2
    assert params.logit_bias == ((65, -100.0), (66, 5.0))
    assert params.seed == 2**64 - 1
    assert (params.stop, params.stop_token_ids) == (("END",), (3,))
    assert (params.min_tokens, params.ignore_eos, params.max_tokens) == (2, True, 9)


async def test_a_missing_seed_is_drawn_anew_for_each_request(gateway: Any) -> None:
    for _ in range(2):
        await gateway.post("/v1/chat/completions", BODY)
    first, second = (request.params.seed for _, request, _, _ in gateway.backend.opened)
    assert first != second


async def test_content_parts_and_the_developer_role_reach_the_template(gateway: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "brief"}, {"role": "user", "content": parts}]
    await gateway.post("/v1/chat/completions", BODY | {"messages": messages})
    assert bytes(gateway.backend.request.prompt_ids) == b"system: brief\nuser: a\nb\nassistant: "


async def test_an_alias_is_answered_under_the_models_own_name(gateway: Any) -> None:
    reply = await gateway.post("/v1/chat/completions", BODY | {"model": "gpt-4o"})
    assert reply.json()["model"] == "tiny"


async def test_a_long_prompt_is_tokenised_like_a_short_one(gateway: Any) -> None:
    gateway.backend.serve("wide", max_context_tokens=100_000)
    content = "ä" * 20_000
    await gateway.post(
        "/v1/chat/completions",
        {"model": "wide", "messages": [{"role": "user", "content": content}]},
    )
    assert bytes(gateway.backend.request.prompt_ids).decode() == f"user: {content}\nassistant: "


async def test_n_choices_have_their_own_index_and_text(gateway: Any) -> None:
    def script(request: Any, n: int) -> list[Any]:
        usage = Usage(prompt_tokens=1, completion_tokens=4, cached_tokens=0)
        return [
            [StreamEvent(1, 1, "b", [1])],
            [StreamEvent(1, 0, "a", [1]), StreamEvent(1, 1, "B", [1], finish=FinishReason.STOP)],
            [StreamEvent(1, 0, "A", [1], finish=FinishReason.LENGTH, usage=usage)],
        ]

    gateway.backend.script = script
    async with gateway.client() as client:
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, n=2)
    assert [(c.index, c.message.content, c.finish_reason) for c in answer.choices] == [
        (0, "aA", "length"),
        (1, "bB", "stop"),
    ]
    assert answer.usage.completion_tokens == 4


async def test_logprobs_carry_bytes_and_alternatives(gateway: Any) -> None:
    async with gateway.client() as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=1, logprobs=True, top_logprobs=2
        )
    (entry,) = answer.choices[0].logprobs.content
    assert (entry.token, entry.logprob, entry.bytes) == ("the", -0.5, [116, 104, 101])
    assert [(t.token, t.bytes) for t in entry.top_logprobs] == [
        ("the", [116, 104, 101]),
        ("\\xe2\\x80", [0xE2, 0x80]),
    ]


async def test_an_impossible_logprob_is_minus_9999(gateway: Any) -> None:
    def script(request: Any, n: int) -> list[Any]:
        top = ((5, b"x", float("-inf")), (6, b"y", float("nan")))
        entry = TokenLogprob(5, b"x", -123456.0, top)
        usage = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
        event = StreamEvent(1, 0, "x", [5], [entry], FinishReason.STOP, usage)
        return [[event]]

    gateway.backend.script = script
    reply = await gateway.post("/v1/chat/completions", BODY | {"logprobs": True})
    (entry,) = reply.json()["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == -9999.0
    assert [t["logprob"] for t in entry["top_logprobs"]] == [-9999.0, -9999.0]


async def test_tools_are_shown_to_the_template_unless_tool_choice_is_none(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []

    class Template:
        def render(self, messages: Any, *, add_generation_prompt: bool, tools: Any) -> str:
            shown.append(tools)
            return "x"

    text = gateway.backend.infos["tiny"].text
    object.__setattr__(text, "chat_template", Template())
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    await gateway.post("/v1/chat/completions", BODY | {"tools": [tool]})
    await gateway.post("/v1/chat/completions", BODY | {"tools": [tool], "tool_choice": "none"})
    assert shown == [[tool], None]


async def test_a_stream_delivers_the_same_text_to_the_openai_client(gateway: Any) -> None:
    async with gateway.client() as client:
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == "the quick brown fox"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert len({(c.id, c.created) for c in chunks}) == 1
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_stream_chunks_are_framed_to_the_letter(gateway: Any) -> None:
    reply = await gateway.post("/v1/chat/completions", BODY | {"stream": True, "max_tokens": 2})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = reply.events()
    assert done == "[DONE]"
    heads = [{k: v for k, v in chunk.items() if k != "choices"} for chunk in chunks]
    assert all(head == heads[0] for head in heads)
    assert heads[0]["object"] == "chat.completion.chunk"
    assert "usage" not in heads[0]

    def choice(delta: dict[str, Any], reason: str | None = None) -> list[Any]:
        return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]

    assert [chunk["choices"] for chunk in chunks] == [
        choice({"role": "assistant", "content": ""}),
        choice({"content": "the"}),
        choice({"content": " quick"}),
        choice({}, "length"),
    ]


async def test_the_role_chunk_comes_in_one_write_with_the_first_token(gateway: Any) -> None:
    reply = await gateway.post("/v1/chat/completions", BODY | {"stream": True})
    assert reply.chunks[0].count(b"data: ") == 2
    assert b'"role":"assistant"' in reply.chunks[0]
    assert b'"content":"the"' in reply.chunks[0]


async def test_events_that_queued_up_go_out_in_one_write(gateway: Any, spell_words: Any) -> None:
    gateway.backend.script = lambda request, n: [
        [event for step in spell_words(request, n) for event in step]
    ]
    reply = await gateway.post("/v1/chat/completions", BODY | {"stream": True})
    (whole,) = reply.chunks
    assert whole.count(b"data: ") == 1 + 4 + 1 + 1
    assert whole.endswith(b"data: [DONE]\n\n")


async def test_the_end_of_a_stream_comes_in_one_write_with_its_last_token(gateway: Any) -> None:
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    reply = await gateway.post("/v1/chat/completions", body)
    assert len(reply.chunks) == 4  # one a token
    last = [json.loads(event[6:]) for event in reply.chunks[-1].split(b"\n\n")[:-2]]
    assert [e["choices"][0]["delta"] for e in last[:-1]] == [{"content": " fox"}, {}]
    assert last[-1]["usage"]["completion_tokens"] == 4
    assert reply.chunks[-1].endswith(b"data: [DONE]\n\n")


async def test_held_back_text_makes_no_empty_chunk(gateway: Any) -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=3, cached_tokens=0)
    gateway.backend.script = lambda request, n: [
        [StreamEvent(1, 0, "", [1])],
        [StreamEvent(1, 0, "é", [2])],
        [StreamEvent(1, 0, "", [3], finish=FinishReason.STOP, usage=usage)],
    ]
    reply = await gateway.post("/v1/chat/completions", BODY | {"stream": True})
    deltas = [e["choices"][0]["delta"] for e in reply.events()[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "é"}, {}]


async def test_a_stream_without_any_text_still_has_role_and_reason(gateway: Any) -> None:
    usage = Usage(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
    gateway.backend.script = lambda request, n: [
        [StreamEvent(1, 0, "", [2], finish=FinishReason.STOP, usage=usage)]
    ]
    reply = await gateway.post("/v1/chat/completions", BODY | {"stream": True})
    role, last, done = reply.events()
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert done == "[DONE]"


async def test_include_usage_adds_null_to_every_chunk_and_one_chunk_without_choices(
    gateway: Any,
) -> None:
    body = BODY | {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = (await gateway.post("/v1/chat/completions", body)).events()
    assert done == "[DONE]"
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 4
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert usage["id"] == chunks[0]["id"]


async def test_continuous_usage_counts_up_on_every_chunk(gateway: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = BODY | {"stream": True, "stream_options": options}
    *chunks, _ = (await gateway.post("/v1/chat/completions", body)).events()
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 1, 2, 3, 4, 4, 4]


@pytest.mark.parametrize(
    ("options", "usage"),
    [({}, True), ({"stream_options": {"include_usage": False}}, False)],
    ids=["nothing said", "explicit false"],
)
async def test_the_operators_usage_default_yields_to_an_explicit_false(
    gateway: Any, options: dict[str, Any], usage: bool
) -> None:
    gateway.state.apply({"include_usage": True})
    reply = await gateway.post("/v1/chat/completions", BODY | {"stream": True} | options)
    assert any(e != "[DONE]" and not e["choices"] for e in reply.events()) is usage


async def test_streamed_logprobs_cover_the_tokens_of_their_chunk(gateway: Any) -> None:
    def entry(text: bytes) -> TokenLogprob:
        return TokenLogprob(1, text, -1.0, ())

    usage = Usage(prompt_tokens=1, completion_tokens=3, cached_tokens=0)
    gateway.backend.script = lambda request, n: [
        [StreamEvent(1, 0, "", [1], [entry(b"\xc3")])],
        [StreamEvent(1, 0, "é", [2], [entry(b"\xa9")])],
        [StreamEvent(1, 0, "", [3], [entry(b"!")], FinishReason.STOP, usage)],
    ]
    body = BODY | {"stream": True, "logprobs": True}
    events = (await gateway.post("/v1/chat/completions", body)).events()
    told = [
        [bytes(t["bytes"]) for t in (e["choices"][0]["logprobs"] or {"content": []})["content"]]
        for e in events[:-1]
    ]
    assert told == [[], [b"\xc3", b"\xa9"], [b"!"], []]


async def test_the_clients_request_id_comes_back_and_an_unfit_one_does_not(gateway: Any) -> None:
    path = "/v1/chat/completions"
    sane = await gateway.post(path, BODY, {"x-request-id": "trace-7"})
    unfit = await gateway.post(path, BODY, {"x-request-id": "a b" * 100})
    assert sane.headers["x-request-id"] == "trace-7"
    assert unfit.headers["x-request-id"].startswith("req_")
    assert int(sane.headers["openai-processing-ms"]) >= 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (Overloaded("full", code="queue_full", retry_after_s=2.5), 429, "rate_limit_error", None),
        (Overloaded("slow", code="queue_timeout"), 429, "rate_limit_error", None),
        (Overloaded("late", code="deadline_exceeded"), 504, "server_error", None),
        (Overloaded("none", code="no_replicas"), 503, "server_error", None),
        (Overloaded("busy"), 503, "server_error", "server_is_overloaded"),
        (TransferError("late", stage="chunk"), 503, "server_error", "kv_transfer_failed"),
        (RequestError("no", code="c", param="seed"), 400, "invalid_request_error", "c"),
        (EngineError("broken"), 500, "server_error", "internal_error"),
        (ZeroDivisionError("secret"), 500, "server_error", "internal_error"),
    ],
)
async def test_an_error_before_the_first_token_has_its_own_status(
    gateway: Any, stream: bool, error: Exception, status: int, kind: str, code: str | None
) -> None:
    gateway.backend.script = lambda request, n: [error]
    reply = await gateway.post("/v1/chat/completions", BODY | {"stream": stream})
    assert reply.status == status
    assert reply.error["type"] == kind
    assert reply.error["code"] == (code or vars(error)["code"])
    assert "secret" not in reply.error["message"]
    assert gateway.backend.streams[0].closed == 1


async def test_a_refusal_for_load_says_when_to_come_back(gateway: Any) -> None:
    def refuse() -> None:
        raise Overloaded("the queue is full", code="queue_full", retry_after_s=2.2)

    gateway.backend.before_open = refuse
    reply = await gateway.post("/v1/chat/completions", BODY | {"stream": True})
    assert reply.status == 429
    assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("3", "2200")


async def test_the_openai_client_retries_an_overload_after_the_told_wait(gateway: Any) -> None:
    def refuse_once() -> None:
        if len(gateway.backend.opened) == 1:
            raise Overloaded("busy", retry_after_s=0.01)

    gateway.backend.before_open = refuse_once
    async with gateway.client(max_retries=1) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].message.content == "the quick brown fox"
    assert len(gateway.backend.opened) == 2


async def test_an_error_midway_is_one_event_and_the_body_ends(
    gateway: Any, spell_words: Any
) -> None:
    gateway.backend.script = lambda request, n: [
        *spell_words(request, n)[:2],
        TransferError("chunk 3 is late", stage="chunk"),
    ]
    reply = await gateway.post("/v1/chat/completions", BODY | {"stream": True})
    assert reply.status == 200
    *chunks, error = reply.events()
    assert [c["choices"][0]["delta"].get("content") for c in chunks] == ["", "the", " quick"]
    assert error == {
        "error": {
            "message": "chunk 3 is late",
            "type": "server_error",
            "param": None,
            "code": "kv_transfer_failed",
        }
    }
    labels = {"model": "tiny", "tier": "default", "code": "503"}
    assert gateway.metrics.counter("tailrace_requests_total", **labels).value == 1


async def test_the_openai_client_raises_on_an_error_midway(gateway: Any, spell_words: Any) -> None:
    gateway.backend.script = lambda request, n: [
        *spell_words(request, n)[:1],
        Overloaded("replica lost"),
    ]
    async with gateway.client() as client:
        stream = await client.chat.completions.create(model="tiny", messages=HELLO, stream=True)
        with pytest.raises(openai.APIError, match="replica lost"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.CANCELLED])
async def test_a_choice_that_the_engine_gave_up_is_an_error_not_an_answer(
    gateway: Any, reason: FinishReason
) -> None:
    gateway.backend.script = lambda request, n: [[StreamEvent(1, 0, "x", [1], finish=reason)]]
    reply = await gateway.post("/v1/chat/completions", BODY)
    assert reply.status == 500
    assert reason.value in reply.error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stream_that_stops_short_is_an_error_not_an_answer(
    gateway: Any, spell_words: Any, stream: bool
) -> None:
    gateway.backend.script = lambda request, n: spell_words(request, n)[:2]
    reply = await gateway.post("/v1/chat/completions", BODY | {"stream": stream})
    if stream:
        assert "before choice 0 was whole" in reply.events()[-1]["error"]["message"]
    else:
        assert reply.status == 500


async def test_the_request_log_replays_into_phases_that_add_up(gateway: Any) -> None:
    await gateway.post("/v1/chat/completions", BODY, {"x-request-id": "r1"})
    await gateway.settle()
    summary = replay(gateway.state.log.of("r1"))
    assert summary.outcome == "finished"
    assert [name for name, _ in summary.phases] == [
        "tokenize",
        "queue",
        "route",
        "prefill",
        "stream",
    ]
    assert sum(s for _, s in summary.phases) == pytest.approx(summary.duration_s)
    assert (summary.model, summary.completion_tokens, summary.cached_tokens) == ("tiny", 4, 2)


async def test_metrics_count_the_request_once_with_its_tokens_and_phases(gateway: Any) -> None:
    await gateway.post("/v1/chat/completions", BODY | {"stream": True})
    await gateway.settle()
    labels = {"model": "tiny", "tier": "default"}
    metrics = gateway.metrics
    assert metrics.counter("tailrace_requests_total", **labels, code="200").value == 1
    assert metrics.gauge("tailrace_requests_inflight", model="tiny").value == 0

    def seen(name: str, **more: str) -> tuple[int, float]:
        series = metrics.histogram(name, **labels, **more)
        return series.count, series.sum

    assert seen("tailrace_request_output_tokens") == (1, 4)
    assert seen("tailrace_request_cached_tokens") == (1, 2)
    assert seen("tailrace_request_ttft_seconds", streaming="true")[0] == 1
    assert seen("tailrace_request_itl_seconds")[0] == 3
    assert seen("tailrace_request_tpot_seconds")[0] == 1
    phases = [seen("tailrace_request_phase_seconds", phase=phase) for phase in PHASES]
    assert [count for count, _ in phases] == [1, 1, 1, 1, 1]
    count, duration_s = seen("tailrace_request_duration_seconds")
    assert (count, duration_s) == (1, pytest.approx(sum(seconds for _, seconds in phases)))
    text = (await gateway.raw("GET", "/metrics")).body
    assert b'tailrace_requests_total{model="tiny",tier="default",code="200"} 1\n' in text


async def test_many_streams_at_once_keep_their_own_text(gateway: Any) -> None:
    gateway.backend.serve("wide", max_context_tokens=4096)

    def script(request: Any, n: int) -> list[Any]:
        said = bytes(request.prompt_ids).decode()
        usage = Usage(prompt_tokens=1, completion_tokens=len(said), cached_tokens=0)
        steps = [[StreamEvent(1, 0, char, [1])] for char in said]
        return [*steps, [StreamEvent(1, 0, "", [], finish=FinishReason.STOP, usage=usage)]]

    gateway.backend.script = script

    async def ask(client: Any, i: int) -> str:
        messages = [{"role": "user", "content": f"request {i}"}]
        stream = await client.chat.completions.create(model="wide", messages=messages, stream=True)
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async with gateway.client() as client:
        texts = await asyncio.gather(*(ask(client, i) for i in range(32)))
    assert texts == [f"user: request {i}\nassistant: " for i in range(32)]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_the_phases_so_far_are_told_as_server_timing(
    gateway: Any, path: str, stream: bool
) -> None:
    async def half_a_second() -> None:
        await asyncio.sleep(0.5)

    gateway.backend.before_open = half_a_second
    body = {"model": "tiny", "messages": HELLO, "prompt": "hello", "stream": stream}
    began = time.monotonic()
    reply = await gateway.post(path, body)
    entries = [entry.split(";dur=") for entry in reply.headers["server-timing"].split(", ")]
    assert [name for name, _ in entries] == list(PHASES if not stream else PHASES[:-1])
    times = {name: float(duration) for name, duration in entries}
    assert all(duration.partition(".")[2].isdigit() for _, duration in entries)
    assert times["queue"] >= 500
    assert sum(times.values()) < 1000 * (time.monotonic() - began) + 1


async def test_the_openai_client_does_not_send_again_what_ends_replicas(gateway: Any) -> None:
    error = Overloaded("5 replicas were lost while they worked on it", code="replicas_lost")
    gateway.backend.script = lambda request, n: [error]
    reply = await gateway.post("/v1/chat/completions", BODY)
    assert (reply.status, reply.error["code"]) == (503, "replicas_lost")
    assert reply.headers["x-should-retry"] == "false"
    assert not {"retry-after", "retry-after-ms"} & reply.headers.keys()
    gateway.backend.opened.clear()
    async with gateway.client(max_retries=2) as client:
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(**BODY)
    assert len(gateway.backend.opened) == 1
