from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_openai import Reply, StubOpenAI

from cluster.replay.http import ConnectionBroken, Connections, Response, TimeUp

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5;ext=1\r\nhello\r\n1\r\n \r\n5\r\nworld\r\n0\r\nx-trailer: 1\r\n\r\n"
)
SIZED = b"HTTP/1.1 429 Too Many\r\nRetry-After: 1\r\ncontent-length: 4\r\n\r\nslow"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n" + SIZED


def feed(data: bytes, cuts) -> tuple[Response, bytes]:
    response, body, last = Response(), b"", 0
    for cut in [*sorted(cuts), len(data)]:
        body += response.feed(data[last:cut])
        last = cut
    return response, body


@given(cuts=st.sets(st.integers(1, len(CHUNKED) - 1)))
def test_chunks_are_joined_however_they_arrive(cuts):
    response, body = feed(CHUNKED, cuts)
    assert (response.status, body, response.done, response.keep_alive) == (
        200,
        b"hello world",
        True,
        True,
    )


@given(cuts=st.sets(st.integers(1, len(INTERIM) - 1)))
def test_an_interim_answer_is_not_the_answer(cuts):
    response, body = feed(INTERIM, cuts)
    assert (response.status, body, response.done) == (429, b"slow", True)
    assert response.headers["retry-after"] == "1"


def test_a_body_without_length_ends_with_the_connection():
    response = Response()
    assert response.feed(b"HTTP/1.0 200 OK\r\n\r\nabc") == b"abc"
    assert (response.done, response.end_of_file()) == (False, True)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabcd\r\n",
    ],
)
def test_what_is_no_http_is_refused(data):
    with pytest.raises(ConnectionBroken):
        Response().feed(data)


async def post(connections: Connections, within_s: float = 5.0) -> tuple[int, bytes]:
    parts: list[bytes] = []
    head = connections.head("/v1/completions", {})
    body = b'{"prompt": "a", "max_tokens": 2}'
    response = await connections.post(head, body, lambda r, part, at: parts.append(part), within_s)
    return response.status, b"".join(parts)


async def test_a_connection_is_kept_and_any_number_is_opened():
    async with StubOpenAI(lambda seen: Reply(ttft_s=0.05)) as stub:
        connections = Connections(stub.url)
        assert [status for status, _ in [await post(connections) for _ in range(3)]] == [200] * 3
        assert stub.num_connections == 1
        done = await asyncio.gather(*(post(connections) for _ in range(20)))
        assert [status for status, _ in done] == [200] * 20
        assert stub.num_connections == 20
        connections.close()


async def test_a_kept_connection_that_the_server_closed_is_replaced_unseen():
    async with StubOpenAI() as stub:
        connections = Connections(stub.url)
        await post(connections)
        for writer in list(stub._writers):
            writer.close()
        assert (await post(connections))[0] == 200  # before or after we know of the close
        connections.close()


async def test_time_that_is_up_and_servers_that_are_not_there():
    async with StubOpenAI(lambda seen: Reply(ttft_s=5.0)) as stub:
        with pytest.raises(TimeUp):
            await post(Connections(stub.url), within_s=0.05)
    with pytest.raises(ConnectionBroken, match="no connection"):
        await post(Connections(stub.url))
