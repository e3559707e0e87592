"""A client that sends a request and then reads nothing."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from deployments.link.messages import StreamEvent


async def test_a_reader_that_never_reads_is_given_up_at_its_deadline(gateway: Any) -> None:
    def flood(request: Any, n: int) -> list[Any]:
        return [[StreamEvent(1, 0, "x" * 60_000, [1])] for _ in range(2000)]

    gateway.backend.script = flood
    body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    data = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: t\r\ncontent-type: application/json\r\n"
        f"x-request-timeout-seconds: 1\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", gateway.port))
        await loop.sock_sendall(client, head.encode() + data)
        await asyncio.wait_for(gateway.backend.closed.wait(), 120)
        await gateway.settle()
        (stream,) = gateway.backend.streams
        assert not stream.ended
        assert stream.closed == 1
