"""The outermost layer: request ids, the time spent, and an answer whatever happens inside.

Pure ASGI, because a `BaseHTTPMiddleware` costs every chunk of every stream some 12 µs.
"""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass
from typing import cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.gateway.errors import Failure, describe
from engine.errors import RequestError

_CALL = "tailrace.call"
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class ClientGone(Exception):
    """The client left; there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request as it came in."""

    request_id: str
    """The client's `x-request-id` if it is sane, else a new one. Clients may repeat theirs."""

    received_s: float


def call_of(scope: Scope) -> Call:
    return cast("Call", scope[_CALL])


class Edge:
    """Names each request, adds `x-request-id` and `openai-processing-ms`, turns what nobody caught
    into a well-formed 500."""

    def __init__(self, app: ASGIApp, echo_request_id: bool) -> None:
        self._app = app
        self._echo_request_id = echo_request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = Call(_request_id(scope), time.monotonic())
        scope[_CALL] = call
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                took_ms = b"%d" % round((time.monotonic() - call.received_s) * 1000)
                headers = [*message.get("headers", ()), (b"openai-processing-ms", took_ms)]
                if self._echo_request_id:
                    headers.append((b"x-request-id", call.request_id.encode()))
                message["headers"] = headers
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except ClientGone:
            return
        except Exception as error:
            if started:
                raise  # the server must cut the connection: half an answer is out
            await send_failure(describe(error, call.request_id), send_named)


def _request_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _SANE_ID.fullmatch(value):
            return value.decode()
    return "req_" + secrets.token_hex(16)


async def send_failure(failure: Failure, send: Send) -> None:
    body = failure.body()
    await send(
        {
            "type": "http.response.start",
            "status": failure.status,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                *failure.headers,
            ],
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises RequestError (413) as soon as it is too long, ClientGone."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_long(int(value), limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = cast("bytes", message.get("body", b""))
        size += len(chunk)
        if size > limit:
            raise _too_long(size, limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_long(size: int, limit: int) -> RequestError:
    return RequestError(
        f"the body has {size} bytes or more: at most {limit} are read; shorten it or send several "
        "requests",
        code="request_too_large",
        status=413,
    )
