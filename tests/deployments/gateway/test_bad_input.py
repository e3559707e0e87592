from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import openai
import pytest

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER: list[Any] = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": USER} | fields


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi"} | fields


@pytest.mark.parametrize(
    ("path", "body", "param", "code"),
    [
        (CHAT, {"messages": USER}, "model", "missing_required_parameter"),
        (CHAT, {"model": "tiny"}, "messages", "missing_required_parameter"),
        (CHAT, chat(messages=[]), "messages", "invalid_value"),
        (CHAT, chat(messages="hi"), "messages", "invalid_type"),
        (CHAT, chat(messages=["hi"]), "messages[0]", "invalid_type"),
        (CHAT, chat(messages=[{"content": "x"}]), "messages[0].role", "missing_required_parameter"),
        (
            CHAT,
            chat(messages=[{"role": "king", "content": "x"}]),
            "messages[0].role",
            "invalid_value",
        ),
        (
            CHAT,
            chat(messages=[{"role": "user", "content": 5}]),
            "messages[0].content",
            "invalid_type",
        ),
        (
            CHAT,
            chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
            "messages[0].content",
            "unsupported_value",
        ),
        (CHAT, chat(model=5), "model", "invalid_type"),
        (CHAT, chat(temperature="0.7"), "temperature", "invalid_type"),
        (CHAT, chat(temperature=2.5), "temperature", "invalid_value"),
        (CHAT, chat(temperature=-1), "temperature", "invalid_value"),
        (CHAT, chat(top_p=0), "top_p", "invalid_value"),
        (CHAT, chat(repetition_penalty=5e-324), "repetition_penalty", "invalid_value"),
        (CHAT, chat(top_k=1.5), "top_k", "invalid_type"),
        (CHAT, chat(max_tokens=0), "max_tokens", "invalid_value"),
        (CHAT, chat(max_tokens=-5), "max_tokens", "invalid_value"),
        (CHAT, chat(max_completion_tokens=-5), "max_completion_tokens", "invalid_value"),
        (CHAT, chat(max_tokens=10, min_tokens=11), "min_tokens", "invalid_value"),
        (CHAT, chat(max_tokens=10**40), "max_tokens", "invalid_value"),
        (CHAT, chat(n=0), "n", "invalid_value"),
        (CHAT, chat(n=17), "n", "invalid_value"),
        (CHAT, chat(n=True), "n", "invalid_type"),
        (CHAT, chat(stream="yes"), "stream", "invalid_type"),
        (CHAT, chat(stop=5), "stop", "invalid_type"),
        (CHAT, chat(stop=["a", 5]), "stop", "invalid_type"),
        (CHAT, chat(stop=[""]), "stop", "invalid_value"),
        (CHAT, chat(stop=["x"] * 17), "stop", "invalid_value"),
        (CHAT, chat(seed=2**63), "seed", "invalid_value"),
        (CHAT, chat(seed=1.5), "seed", "invalid_type"),
        (CHAT, chat(logprobs=3), "logprobs", "invalid_type"),
        (CHAT, chat(top_logprobs=3), "top_logprobs", "invalid_value"),
        (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "invalid_value"),
        (CHAT, chat(logit_bias={"cat": 1}), "logit_bias", "invalid_value"),
        (CHAT, chat(logit_bias={"65": "much"}), "logit_bias", "invalid_type"),
        (CHAT, chat(logit_bias={"65": 101}), "logit_bias", "invalid_value"),
        (CHAT, chat(logit_bias={"512": 1}), "logit_bias", "invalid_value"),
        (CHAT, chat(logit_bias=[1]), "logit_bias", "invalid_type"),
        (CHAT, chat(stop_token_ids=[512]), "stop_token_ids", "invalid_value"),
        (CHAT, chat(service_tier="gold"), "service_tier", "invalid_value"),
        (CHAT, chat(metadata={"a": 1}), "metadata.a", "invalid_type"),
        (CHAT, chat(stream_options={"include_usage": 1}), "stream_options.include_usage", None),
        (CHAT, chat(response_format={"type": "json_object"}), "response_format", None),
        (CHAT, chat(tool_choice="required"), "tool_choice", "unsupported_value"),
        (CHAT, chat(tool_choice={"type": "function"}), "tool_choice", "unsupported_value"),
        (CHAT, chat(tools=[{"type": "function"}]), "tools[0].function", None),
        (TEXT, text(prompt=[]), "prompt", "invalid_value"),
        (TEXT, text(prompt=[[]]), "prompt", "invalid_value"),
        (TEXT, text(prompt=""), "prompt", "invalid_value"),
        (TEXT, text(prompt=["a", 1]), "prompt", "invalid_type"),
        (TEXT, text(prompt=[1.5]), "prompt", "invalid_type"),
        (TEXT, text(prompt=[True]), "prompt", "invalid_type"),
        (TEXT, text(prompt=[-1]), "prompt", "invalid_value"),
        (TEXT, text(prompt=[512]), "prompt", "invalid_value"),
        (TEXT, text(prompt=[10**30]), "prompt", "invalid_value"),
        (TEXT, text(prompt=["a"] * 129), "prompt", "invalid_value"),
        (TEXT, text(prompt=["a"] * 100, n=2), "n", "invalid_value"),
        (TEXT, text(best_of=3), "best_of", "unsupported_value"),
        (TEXT, text(suffix="end"), "suffix", "unsupported_value"),
        (TEXT, text(echo=True, logprobs=1), "echo", "unsupported_value"),
        (TEXT, text(logprobs=True), "logprobs", "invalid_type"),
        ("/tokenize", {"model": "tiny"}, "prompt", "invalid_value"),
        ("/detokenize", {"tokens": "x"}, "tokens", "invalid_type"),
        ("/detokenize", {}, "tokens", "missing_required_parameter"),
    ],
)
async def test_a_wrong_field_is_refused_by_its_name(
    gateway: Any, path: str, body: dict[str, Any], param: str, code: str | None
) -> None:
    reply = await gateway.post(path, body)
    error = reply.error
    assert (reply.status, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error"
    assert code is None or error["code"] == code
    assert gateway.backend.opened == []


async def test_unknown_fields_and_nulls_are_accepted(gateway: Any) -> None:
    known = ("max_tokens", "temperature", "stop", "seed", "n", "stream", "tools", "logit_bias")
    body = chat(what={"ever": [1, None]}, verbosity="low", **dict.fromkeys(known))
    assert (await gateway.post(CHAT, body)).status == 200


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"{'model': 1}", "invalid_json"),
        (b"\xff\xfe{}", "invalid_json"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"x":' * 5000 + b"1" + b"}" * 5000, "invalid_json"),
        (b"[]", "invalid_type"),
        (b"null", "invalid_type"),
        (b'"text"', "invalid_type"),
        (b"1e999", "invalid_type"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
async def test_a_body_that_is_no_json_object_is_a_400(
    gateway: Any, path: str, sent: bytes, code: str
) -> None:
    reply = await gateway.raw("POST", path, sent)
    assert (reply.status, reply.error["code"]) == (400, code)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999"])
async def test_a_number_that_is_none_is_refused(gateway: Any, number: bytes) -> None:
    body = b'{"model": "tiny", "prompt": "a", "temperature": ' + number + b"}"
    reply = await gateway.raw("POST", TEXT, body)
    assert (reply.status, reply.error["param"]) == (400, "temperature")


async def test_a_body_without_content_type_is_read_as_json(gateway: Any) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    reply = await gateway.raw("POST", TEXT, json.dumps(text()).encode(), headers)
    assert reply.status == 200


async def test_a_megabyte_of_garbage_is_refused_and_the_next_request_served(gateway: Any) -> None:
    noise = random.Random(7)
    for garbage in (noise.randbytes(1 << 20), b"a" * (1 << 20), b'{"a":"' + b"b" * (1 << 20)):
        reply = await gateway.raw("POST", CHAT, garbage)
        assert (reply.status, reply.error["code"]) == (400, "invalid_json")
    prompt = noise.randbytes(1 << 19).hex()
    reply = await gateway.post(TEXT, text(prompt=prompt))
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    assert (await gateway.post(TEXT, text())).status == 200


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_beyond_the_limit_is_a_413(gateway: Any, declared: bool) -> None:
    gateway.state.apply({"limits": {"max_body_bytes": 2000}})
    body = json.dumps(text(prompt="x" * 3000)).encode()
    if declared:
        reply = await gateway.raw("POST", TEXT, body)
    else:
        chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
        headers = {"transfer-encoding": "chunked", "content-length": ""}
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        del headers["content-length"]
        head = f"POST {TEXT} HTTP/1.1\r\nhost: t\r\nconnection: close\r\n"
        head += "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n"
        writer.write(head.encode() + chunked)
        data = await asyncio.wait_for(reader.read(), 240)
        writer.close()
        assert data.startswith(b"HTTP/1.1 413")
        assert b'"code":"request_too_large"' in data
        return
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert "2000" in reply.error["message"]


async def test_an_unknown_model_is_a_404_with_its_name(gateway: Any) -> None:
    async with gateway.client() as client:
        with pytest.raises(openai.NotFoundError) as raised:
            await client.chat.completions.create(model="gpt-9", messages=USER)
    assert raised.value.code == "model_not_found"
    assert "gpt-9" in raised.value.message
    labels = {"model": "unknown", "tier": "default", "code": "404"}
    assert gateway.metrics.counter("tailrace_requests_total", **labels).value == 1


@pytest.mark.parametrize(
    ("body", "numbers"),
    [
        (text(prompt="x" * 300), ("300", "256")),
        (text(prompt="x" * 256), ("256", "255")),
        (text(prompt="x" * 200, max_tokens=57), ("200", "57", "256", "56")),
        (text(prompt=[1] * 300), ("300", "256")),
        (text(prompt=["ok", "x" * 300]), ("300", "256")),
        (chat(max_completion_tokens=300), ("20", "300", "256")),
    ],
)
async def test_what_does_not_fit_the_context_is_refused_with_the_numbers(
    gateway: Any, body: dict[str, Any], numbers: tuple[str, ...]
) -> None:
    reply = await gateway.post(CHAT if "messages" in body else TEXT, body)
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
    words = reply.error["message"].replace(":", " ").replace(",", " ").replace("=", " ").split()
    for number in numbers:
        assert number in words


async def test_a_prompt_that_leaves_room_for_one_token_is_served(gateway: Any) -> None:
    reply = await gateway.post(TEXT, text(prompt="x" * 255))
    assert reply.status == 200
    assert gateway.backend.request.params.max_tokens == 1


async def test_output_limits_refuse_what_was_asked_and_cut_what_was_not(gateway: Any) -> None:
    gateway.state.apply({"limits": {"max_output_tokens": 20, "default_max_tokens": 10}})
    refused = await gateway.post(CHAT, chat(max_completion_tokens=21))
    assert (refused.status, refused.error["param"]) == (400, "max_completion_tokens")
    await gateway.post(CHAT, chat())
    assert gateway.backend.request.params.max_tokens == 10


async def test_a_prompt_limit_is_named(gateway: Any) -> None:
    gateway.state.apply({"limits": {"max_prompt_tokens": 5}})
    reply = await gateway.post(TEXT, text(prompt="123456"))
    assert reply.status == 400
    assert "at most 5 tokens" in reply.error["message"]


async def test_a_model_without_chat_template_points_to_completions(gateway: Any) -> None:
    object.__setattr__(gateway.backend.infos["tiny"].text, "chat_template", None)
    reply = await gateway.post(CHAT, chat())
    assert (reply.status, reply.error["code"]) == (400, "unsupported_value")
    assert "/v1/completions" in reply.error["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/gpt-9", 404, "model_not_found"),
        ("GET", "/docs", 404, "not_found"),
    ],
)
async def test_routing_errors_have_the_same_four_keys(
    gateway: Any, method: str, path: str, status: int, code: str
) -> None:
    reply = await gateway.raw(method, path)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert "x-request-id" in reply.headers
    if status == 405:
        assert reply.headers["allow"]


async def test_random_json_is_never_a_500(gateway: Any) -> None:
    """Bodies near enough to right ones to get past the first check."""
    noise = random.Random(3)
    values: list[Any] = [
        *(None, True, 0, -1, 1.5, 10**25, "", "x", "\0", "🦜" * 9, [], {}, [None], [[1]], {"a": 1}),
        *(["x"], [1, 2], [{"type": "text"}], [{"role": "user"}], {"type": "text"}, {"65": 1}),
    ]
    fields = [
        *("model", "messages", "prompt", "max_tokens", "n", "stop", "seed", "logit_bias", "tools"),
        *("stream_options", "response_format", "tool_choice", "logprobs", "echo", "metadata"),
        *("top_logprobs", "min_tokens", "stop_token_ids", "temperature", "tokens", "top_k"),
    ]
    statuses: set[int] = set()
    for _ in range(300):
        path = noise.choice([CHAT, TEXT, "/tokenize", "/detokenize"])
        body = chat(prompt="hi", tokens=[1])
        for field in noise.sample(fields, noise.randint(1, 3)):
            body[field] = noise.choice(values)
        if path == "/tokenize":
            body.pop(noise.choice(["prompt", "messages"]), None)
        reply = await gateway.post(path, body)
        statuses.add(reply.status)
        if reply.status != 200:
            assert reply.error["message"]
    assert statuses <= {200, 400, 404}
    assert {200, 400} <= statuses


def tool(content: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": content}


@pytest.mark.parametrize(
    ("content", "status"),
    [
        ("é" * 5, 200),
        ("é" * 5 + "x", 400),
        ([{"type": "text", "text": "x" * 4}, {"type": "text", "text": "y" * 5}], 200),
        ([{"type": "text", "text": "x" * 5}, {"type": "text", "text": "y" * 5}], 400),
        (None, 200),
    ],
)
async def test_a_tools_output_is_bounded_in_bytes_over_all_its_parts(
    gateway: Any, content: Any, status: int
) -> None:
    gateway.state.apply({"limits": {"max_tool_output_bytes": 10}})
    messages = [*USER, tool("x"), tool(content), {"role": "user", "content": "y" * 50}]
    reply = await gateway.post(CHAT, chat(messages=messages))
    assert reply.status == status
    if status == 400:
        assert reply.error["param"] == "messages[2].content"
        assert "of 11 bytes, at most 10" in reply.error["message"]
        assert "summary" in reply.error["message"]


async def test_a_conversation_is_bounded_from_its_second_turn_on(gateway: Any) -> None:
    long = {"role": "user", "content": "x" * 100}
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}, long]
    used = (await gateway.post(CHAT, chat(messages=turns))).json()["usage"]["prompt_tokens"]
    gateway.state.apply({"limits": {"max_conversation_tokens": used}})
    assert (await gateway.post(CHAT, chat(messages=turns))).status == 200
    gateway.state.apply({"limits": {"max_conversation_tokens": used - 1}})
    reply = await gateway.post(CHAT, chat(messages=turns))
    error = reply.error
    assert (reply.status, error["param"]) == (400, "messages")
    assert error["code"] == "context_length_exceeded"
    for words in (f"has {used} tokens", f"at most {used - 1}", "summarise older messages"):
        assert words in error["message"]
    # A single question may be as long.
    question = [{"role": "user", "content": "x" * 150}]
    assert (await gateway.post(CHAT, chat(messages=question))).status == 200


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_retrieved_passages_are_bounded_as_the_client_tells_them(
    gateway: Any, path: str
) -> None:
    make = chat if path == CHAT else text
    gateway.state.apply({"limits": {"max_retrieved_chunks": 3}})
    for told in ({"retrieved": 3}, {"retrieved": 0}, {}):
        assert (await gateway.post(path, make(tailrace=told))).status == 200
    reply = await gateway.post(path, make(tailrace={"retrieved": 4}))
    assert (reply.status, reply.error["param"]) == (400, "tailrace.retrieved")
    assert "tailrace.retrieved=4: at most 3" in reply.error["message"]
    wrong = await gateway.post(path, make(tailrace={"retrieved": -1}))
    assert (wrong.status, wrong.error["param"]) == (400, "tailrace.retrieved")
