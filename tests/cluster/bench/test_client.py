from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bench.client import (
    Client,
    EventReader,
    ProtocolError,
    ResponseParser,
    StreamResult,
)
from cluster.errors import ClusterError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


def event(text: str | None, finish: str | None = None, **more: Any) -> bytes:
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}\n\n'
)
DONE = b"data: [DONE]\n\n"
ANSWER = (event(""), event("He"), event("llo"), event(None, "length"), USAGE, DONE)


def parse(pieces: list[bytes]) -> tuple[ResponseParser, bytes]:
    parser = ResponseParser()
    return parser, b"".join(parser.feed(piece) for piece in pieces)


@given(st.lists(st.integers(0, 400), max_size=8))
def test_a_chunked_answer_is_the_same_however_it_is_cut(cuts):
    whole = HEAD + chunked(b"one", b"two\r\nthree" * 9, b"4")
    edges = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    parser, body = parse([whole[a:b] for a, b in itertools.pairwise(edges)])
    assert (parser.status, parser.done) == (200, True)
    assert body == b"one" + b"two\r\nthree" * 9 + b"4"


@given(st.integers(0, 80))
def test_a_body_of_known_length_is_the_same_however_it_is_cut(cut):
    whole = b"HTTP/1.1 404 Not Found\r\ncontent-length: 5\r\nconnection: close\r\n\r\nhello"
    parser, body = parse([whole[:cut], whole[cut:]])
    assert (parser.status, parser.done, parser.keep_alive, body) == (404, True, False, b"hello")


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
        HEAD + b"zz\r\n",
        HEAD + b"3\r\nabcd\r\n",
    ],
)
def test_what_is_not_the_expected_http_is_an_error(raw):
    with pytest.raises(ProtocolError):
        ResponseParser().feed(raw)


@given(st.integers(1, 1000))
def test_events_are_the_same_however_they_are_cut(size):
    raw = b"".join(ANSWER)
    result = StreamResult(0.0)
    reader = EventReader(result)
    for now, at in enumerate(range(0, len(raw), size)):
        reader.feed(raw[at : at + size], float(now))
    assert reader.done
    assert (result.text, result.finish) == ("Hello", "length")
    assert (result.prompt_tokens, result.completion_tokens, result.cached_tokens) == (7, 2, 4)


def test_empty_content_is_no_first_token_and_one_read_is_one_arrival():
    result = StreamResult(10.0)
    reader = EventReader(result)
    reader.feed(event(""), 11.0)
    reader.feed(event("a") + event("b"), 12.0)
    reader.feed(event("c"), 15.0)
    assert result.to_json()["arrivals_s"] == [2.0, 5.0]
    assert result.text == "abc"


def test_text_completions_are_read_too():
    result = StreamResult(0.0)
    EventReader(result).feed(
        b'data: {"choices":[{"index":0,"text":"hi","finish_reason":"stop"}]}\n\n', 1.0
    )
    assert (result.text, result.finish, result.arrivals_s) == ("hi", "stop", [1.0])


Handler = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that hands each request's body to `handler`, and the heads it saw."""
    heads: list[bytes] = []

    async def on_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                heads.append(head)
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await handler(await reader.readexactly(length), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(on_connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", heads
    finally:
        server.close()
        await server.wait_closed()


async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunked(*ANSWER))


async def test_a_connection_is_kept_and_used_again():
    peers: list[Any] = []

    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        peers.append(writer.get_extra_info("peername"))
        await answer(body, writer)

    async with serving(handler) as (url, heads):
        client = Client(url)
        for _ in range(3):
            result = await client.stream("/v1/chat/completions", b'{"n":1}')
            assert (result.error, result.text, result.completion_tokens) == (None, "Hello", 2)
            assert result.end_s is not None
        client.close()
    assert len(set(peers)) == 1
    assert heads[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:")


async def test_warm_connections_are_the_ones_that_requests_use():
    peers: set[Any] = set()

    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        peers.add(writer.get_extra_info("peername"))
        await answer(body, writer)

    async with serving(handler) as (url, _):
        client = Client(url)
        await client.warm(3)
        await asyncio.gather(*(client.stream("/", b"{}") for _ in range(3)))
        await client.warm(3)
        await asyncio.gather(*(client.stream("/", b"{}") for _ in range(3)))
        client.close()
    assert len(peers) == 3


async def test_a_connection_closed_while_the_loop_did_not_run_is_not_warm():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_one() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(HEAD + chunked(*ANSWER))

        client = Client(f"http://127.0.0.1:{listener.getsockname()[1]}")
        await client.warm(1)
        listener.accept()[0].close()
        server = threading.Thread(target=answer_one, daemon=True)
        server.start()
        await client.warm(1)
        result = await client.stream("/", b"{}")
        assert (result.error, result.text) == (None, "Hello")
        server.join()


@pytest.mark.parametrize("resend", [False, True])
async def test_a_request_that_a_kept_connection_ends_under_is_sent_again_where_that_is_wanted(
    resend,
):
    count = 0

    async def handler(body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        if count == 2:
            writer.close()
        else:
            await answer(body, writer)

    async with serving(handler) as (url, _):
        client = Client(url, resend=resend)
        first = await client.stream("/", b"{}")
        second = await client.stream("/", b"{}")
        client.close()
    assert first.error is None
    assert second.error == (None if resend else "the connection was closed (end of file)")
    assert count == 2 + resend


async def test_a_refusal_is_the_results_error():
    async def refuse(_: bytes, writer: asyncio.StreamWriter) -> None:
        body = b'{"error":{"message":"all slots are taken"}}'
        writer.write(
            b"HTTP/1.1 503 Unavailable\r\nRetry-After: 2\r\ncontent-length: %d\r\n\r\n%s"
            % (len(body), body)
        )

    async with serving(refuse) as (url, _):
        client = Client(url)
        result = await client.stream("/", b"{}")
        client.close()
    assert result.error == 'status 503: {"error":{"message":"all slots are taken"}}'
    assert result.end_s is None
    assert result.status == 503
    assert result.headers["retry-after"] == "2"
    assert result.refused_s is not None
    assert result.refused_s >= result.sent_s


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (HEAD + chunked(event("He"))[:-5], "the connection was closed (end of file)"),
        (HEAD + chunked(event("He")), "the stream ended without [DONE]"),
        (
            HEAD + chunked(event("He"), b'data: {"error":{"message":"lost"}}\n\n'),
            "lost",
        ),
        (HEAD + chunked(b"data: {\n\n"), "JSONDecodeError"),
        (b"220 smtp ready\r\n\r\n", "ProtocolError"),
    ],
)
async def test_an_answer_that_is_not_whole_is_an_error(sent, error):
    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()
        writer.close()

    async with serving(handler) as (url, _):
        client = Client(url)
        result = await client.stream("/", b"{}")
        client.close()
    assert result.error is not None
    assert error in result.error


async def test_a_connection_that_the_server_closes_is_not_used_again():
    async def handler(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n") + chunked(*ANSWER))
        await writer.drain()
        writer.close()

    async with serving(handler) as (url, heads):
        client = Client(url)
        for _ in range(2):
            assert (await client.stream("/", b"{}")).error is None
        client.close()
    assert len(heads) == 2


async def test_nobody_there_is_said_with_the_way_out():
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(ClusterError, match=r"nobody answers .*`tailrace up`"):
        await Client(f"http://127.0.0.1:{port}").stream("/", b"{}")


@pytest.mark.parametrize("url", ["https://host", "host:8000", "http://"])
def test_only_plain_http_is_spoken(url):
    with pytest.raises(ClusterError, match="plain http"):
        Client(url)
