"""Requests that end early: clients that leave, patience that runs out, servers that stop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

import openai
import pytest
from pace import at_some_pace

from deployments.gateway.events import Disconnected, replay
from deployments.link.messages import StreamEvent

BODY: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
}


async def forever() -> None:
    await asyncio.Event().wait()


async def send_only(gateway: Any, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
    """A client that has sent its request and reads nothing yet."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: t\r\nx-request-id: gone\r\ncontent-length: {len(data)}\r\n"
    )
    writer.write(head.encode() + b"\r\n" + data)
    await writer.drain()
    return reader, writer


def disconnects(gateway: Any) -> list[str]:
    return [e.phase for e in gateway.state.log if isinstance(e, Disconnected)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 2])
async def test_a_client_that_leaves_cancels_its_stream(
    gateway: Any, spell_words: Any, stream: bool, tokens: int
) -> None:
    gateway.backend.script = lambda request, n: [*spell_words(request, n)[:tokens], forever]
    _, writer = await send_only(gateway, BODY | {"stream": stream})
    phase = "stream" if tokens else "prefill"
    while not gateway.backend.streams or len(gateway.state.log) < (5 if tokens else 4):
        await asyncio.sleep(0.005)
    assert gateway.backend.streams[0].closed == 0
    writer.close()
    await asyncio.wait_for(gateway.backend.closed.wait(), 120)
    await gateway.settle()
    assert gateway.backend.streams[0].closed == 1
    assert disconnects(gateway) == [phase]
    labels = {"model": "tiny", "phase": phase}
    assert gateway.metrics.counter("tailrace_client_disconnects_total", **labels).value == 1
    assert replay(gateway.state.log.of("gone")).outcome == "disconnected"


async def test_a_client_that_leaves_the_queue_cancels_its_place(gateway: Any) -> None:
    gateway.backend.before_open = forever
    _, writer = await send_only(gateway, BODY)
    while not gateway.backend.opened:
        await asyncio.sleep(0.005)
    writer.close()
    await gateway.settle()
    assert gateway.backend.open_cancelled
    assert disconnects(gateway) == ["queue"]


@pytest.mark.parametrize("prompts", [["a"], ["a", "b"]])
async def test_a_cancellation_that_is_swallowed_on_the_way_still_ends_the_request(
    gateway: Any, prompts: list[str]
) -> None:
    """As by `asyncio.wait_for` before Python 3.12, where what it waits for is just done."""

    async def swallow() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await forever()

    gateway.backend.before_open = swallow
    gateway.backend.script = lambda request, n: [forever]
    body = {"model": "tiny", "prompt": prompts, "stream": True}
    _, writer = await send_only(gateway, body, "/v1/completions")
    while len(gateway.backend.opened) < len(prompts):
        await asyncio.sleep(0.005)
    writer.close()
    await gateway.settle()
    assert [stream.closed for stream in gateway.backend.streams] == [1] * len(prompts)
    assert disconnects(gateway) == ["queue"]


async def test_patience_that_runs_out_while_it_is_swallowed_is_told(gateway: Any) -> None:
    async def swallow() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await forever()

    gateway.backend.before_open = swallow
    gateway.backend.script = lambda request, n: [forever]

    async def check(seconds: float) -> None:
        gateway.backend.streams.clear()
        headers = {"x-request-timeout-seconds": str(seconds)}
        answer = await gateway.post("/v1/chat/completions", BODY, headers)
        assert (answer.status, answer.error["code"]) == (504, "request_timeout")
        assert [stream.closed for stream in gateway.backend.streams] == [1]

    await at_some_pace(check, 0.2)


async def test_a_client_that_leaves_several_prompts_cancels_them_all(gateway: Any) -> None:
    gateway.backend.script = lambda request, n: [forever]
    body = {"model": "tiny", "prompt": ["a", "b", "c"]}
    _, writer = await send_only(gateway, body, "/v1/completions")
    while len(gateway.backend.streams) < 3:
        await asyncio.sleep(0.005)
    writer.close()
    await gateway.settle()
    assert [stream.closed for stream in gateway.backend.streams] == [1, 1, 1]


async def test_a_client_that_leaves_within_its_body_leaves_nothing(gateway: Any) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 100\r\n\r\n{")
    await writer.drain()
    while not gateway.state.inflight["unknown"]:
        await asyncio.sleep(0.005)
    writer.close()
    await gateway.settle()
    assert gateway.backend.opened == []
    assert disconnects(gateway) == ["tokenize"]


async def test_the_openai_client_breaking_off_a_stream_cancels_it(
    gateway: Any, spell_words: Any
) -> None:
    gateway.backend.script = lambda request, n: [*spell_words(request, n)[:1], forever]
    async with gateway.client() as client:
        stream = await client.chat.completions.create(**BODY, stream=True)
        async for _ in stream:
            break
        await stream.close()
        await asyncio.wait_for(gateway.backend.closed.wait(), 120)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_backend_that_breaks_is_not_mistaken_for_a_client_that_left(
    gateway: Any, stream: bool
) -> None:
    gateway.backend.script = lambda request, n: [ConnectionResetError("link")]
    reply = await gateway.post("/v1/chat/completions", BODY | {"stream": stream})
    assert reply.status == 500
    assert disconnects(gateway) == []


@pytest.mark.parametrize("stream", [False, True])
async def test_patience_that_runs_out_before_a_token_is_a_504_that_may_be_retried(
    gateway: Any, stream: bool
) -> None:
    gateway.backend.script = lambda request, n: [forever]

    async def check(seconds: float) -> None:
        gateway.backend.streams.clear()
        headers = {"x-request-timeout-seconds": str(seconds)}
        reply = await gateway.post("/v1/chat/completions", BODY | {"stream": stream}, headers)
        assert reply.status == 504
        assert reply.error["code"] == "request_timeout"
        assert "x-should-retry" not in reply.headers
        assert [each.closed for each in gateway.backend.streams] == [1]

    await at_some_pace(check, 0.2)


async def test_patience_that_runs_out_amid_an_answer_must_not_be_retried(
    gateway: Any, spell_words: Any
) -> None:
    gateway.backend.script = lambda request, n: [*spell_words(request, n)[:2], forever]

    async def check(seconds: float) -> None:
        headers = {"x-request-timeout-seconds": str(seconds)}
        reply = await gateway.post("/v1/chat/completions", BODY, headers)
        assert reply.status == 504
        assert reply.headers.get("x-should-retry") == "false"
        assert "2 tokens so far" in reply.error["message"]

    await at_some_pace(check, 0.2)


async def test_a_stream_that_outlives_its_limit_ends_with_an_error_event(
    gateway: Any, spell_words: Any
) -> None:
    gateway.backend.script = lambda request, n: [*spell_words(request, n)[:2], forever]

    async def check(seconds: float) -> None:
        gateway.state.apply({"limits": {"request_timeout_s": seconds}})
        reply = await gateway.post("/v1/chat/completions", BODY | {"stream": True})
        assert reply.status == 200
        assert reply.events()[-1]["error"]["code"] == "request_timeout"

    await at_some_pace(check, 0.2)


async def test_the_openai_clients_read_timeout_bounds_the_first_token_of_a_stream_only(
    gateway: Any, spell_words: Any
) -> None:
    async def check(seconds: float) -> None:
        async def pause() -> None:
            await asyncio.sleep(1.5 * seconds)

        def slowly(request: Any, n: int) -> list[Any]:
            first, *rest = spell_words(request, n)
            return [first, pause, *rest]

        gateway.backend.script = slowly
        headers = {"x-stainless-read-timeout": str(seconds)}
        streamed = await gateway.post("/v1/chat/completions", BODY | {"stream": True}, headers)
        assert streamed.status == 200
        assert streamed.events()[-1] == "[DONE]"
        whole = await gateway.post("/v1/chat/completions", BODY, headers)
        assert whole.status == 504

    await at_some_pace(check, 0.2)


async def test_the_openai_client_sees_our_timeout_before_its_own(gateway: Any) -> None:
    gateway.backend.script = lambda request, n: [forever]
    for _ in range(5):  # until the machine does not stand still in the moment between the two
        async with gateway.client(timeout=1.0) as client:
            with pytest.raises(openai.APIError) as raised:
                await client.chat.completions.create(**BODY)
        if not isinstance(raised.value, openai.APITimeoutError):
            break
    assert isinstance(raised.value, openai.InternalServerError)
    assert raised.value.status_code == 504
    assert raised.value.code == "request_timeout"


@pytest.mark.parametrize(
    ("headers", "most"),
    [
        ({}, 660.0),  # the tier's longest wait and the longest answer
        ({"x-request-timeout-seconds": "10"}, 9.9),
        ({"x-stainless-read-timeout": "30"}, 29.9),
        ({"x-stainless-read-timeout": "30", "x-request-timeout-seconds": "10"}, 9.9),
        ({"x-stainless-read-timeout": "not-given", "x-request-timeout-seconds": "-1"}, 660.0),
        ({"x-request-timeout-seconds": "1e9"}, 660.0),
    ],
)
async def test_the_backend_is_told_what_is_left_of_the_clients_patience(
    gateway: Any, headers: dict[str, str], most: float
) -> None:
    began = time.monotonic()
    await gateway.post("/v1/chat/completions", BODY, headers)
    took_s = time.monotonic() - began
    remaining_s = gateway.backend.opened[0][3]
    assert most - took_s <= remaining_s < most


@pytest.mark.parametrize("stream", [False, True])
async def test_a_wait_as_long_as_the_tier_allows_takes_nothing_off_the_answers_time(
    gateway: Any, spell_words: Any, stream: bool
) -> None:
    async def check(seconds: float) -> None:
        limits = {"request_timeout_s": seconds}
        gateway.state.apply({"limits": limits, "tiers": {"default": {"max_wait_s": 1000}}})

        async def wait() -> None:
            await asyncio.sleep(2 * seconds)

        gateway.backend.before_open = wait
        gateway.backend.script = spell_words
        reply = await gateway.post("/v1/chat/completions", BODY | {"stream": stream})
        assert reply.status == 200
        assert gateway.backend.places[-1].answer_s == seconds
        # From the grant on it is limited.
        gateway.backend.script = lambda request, n: [forever]
        late = await gateway.post("/v1/chat/completions", BODY | {"stream": stream})
        assert late.status == 504
        assert f"after {seconds:g} s from its grant on" in late.error["message"]

    await at_some_pace(check, 0.2)


async def test_the_last_of_several_prompts_to_be_granted_has_its_time_as_well(
    gateway: Any, spell_words: Any
) -> None:
    async def check(seconds: float) -> None:
        limits = {"request_timeout_s": seconds}
        gateway.state.apply({"limits": limits, "tiers": {"default": {"max_wait_s": 1000}}})
        turns = 0

        async def wait() -> None:
            nonlocal turns
            turns += 1
            await asyncio.sleep(2 * seconds * turns)

        gateway.backend.before_open = wait
        gateway.backend.script = spell_words
        reply = await gateway.post("/v1/completions", {"model": "tiny", "prompt": ["a", "b"]})
        assert [choice["index"] for choice in reply.json()["choices"]] == [0, 1]

    await at_some_pace(check, 0.2)


async def test_the_clients_own_timeout_counts_from_the_start_whatever_the_grant(
    gateway: Any,
) -> None:
    async def check(seconds: float) -> None:
        async def wait() -> None:
            await asyncio.sleep(0.5 * seconds)

        gateway.backend.before_open = wait
        gateway.backend.script = lambda request, n: [forever]
        headers = {"x-request-timeout-seconds": str(seconds)}
        reply = await gateway.post("/v1/chat/completions", BODY, headers)
        assert reply.status == 504
        assert f"after {0.95 * seconds:g} s (in phase prefill" in reply.error["message"]

    await at_some_pace(check, 0.2)


async def test_a_stalled_body_is_timed_out(gateway: Any) -> None:
    gateway.state.apply({"limits": {"request_timeout_s": 0.1}})
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: t\r\ncontent-length: 100\r\n\r\n{")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 120)
    assert head.startswith(b"HTTP/1.1 504")
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def test_a_slow_reader_stalls_its_own_stream_only(gateway: Any, spell_words: Any) -> None:
    taken = 0

    def endless(request: Any, n: int) -> Any:
        if request.params.max_tokens != 100:
            return spell_words(request, n)

        def events() -> Any:
            nonlocal taken
            while True:
                taken += 1
                yield [StreamEvent(1, 0, "x" * 10_000, [1])]

        return events()

    gateway.backend.script = endless
    _, writer = await send_only(gateway, BODY | {"stream": True, "max_tokens": 100})
    counts = [-1, 0]
    while len(set(counts[-8:])) > 1:  # until the kernel's buffers are full
        await asyncio.sleep(0.1)
        counts.append(taken)
    assert taken > 0
    other = await gateway.post("/v1/chat/completions", BODY)
    assert other.status == 200
    assert taken == counts[-1]
    writer.transport.abort()
    await gateway.settle()
    assert gateway.backend.streams[0].closed == 1


async def test_a_server_that_stops_cancels_what_is_running(gateway: Any) -> None:
    from deployments.gateway.api import create_app

    async def never_closed() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    messages = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await never_closed()

    async def send(message: Any) -> None:
        raise AssertionError("nobody is there to read this")

    gateway.backend.script = lambda request, n: [forever]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    task = asyncio.create_task(create_app(lambda: gateway.state)(scope, receive, send))
    while not gateway.backend.streams:
        await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gateway.backend.streams[0].closed == 1
    assert not any(gateway.state.inflight.values())


async def test_thirty_random_departures_leave_no_stream_open(gateway: Any) -> None:
    """Clients leave after 0, 1, 2, ... milliseconds: in the body, queue, prefill or stream."""

    async def tick() -> None:
        await asyncio.sleep(0.002)

    def script(request: Any, n: int) -> list[Any]:
        return [step for _ in range(50) for step in ([StreamEvent(1, 0, "x", [1])], tick)]

    gateway.backend.script = script
    gateway.backend.before_open = tick

    async def leave(i: int) -> None:
        _, writer = await send_only(gateway, BODY | {"stream": i % 2 == 0})
        await asyncio.sleep(i / 1000)
        writer.transport.abort()

    await asyncio.gather(*(leave(i) for i in range(30)))
    await gateway.settle()
    assert all(stream.closed == 1 for stream in gateway.backend.streams)
