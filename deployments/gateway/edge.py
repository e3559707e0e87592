"""The outermost layer: request ids, the time spent, and an answer whatever happens inside.

```
          ┌ POST of a generation ─────────────────────────────────► its own ASGI application
FrontDoor ┤
          └ all else ── FastAPI's layers ── Edge ── router ── endpoint
```

Pure ASGI, because a `BaseHTTPMiddleware` costs every chunk of every stream some 12 µs; and past
FastAPI where load is, because its layers and its router cost a request as much as our own work.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from fastapi import FastAPI
from starlette.routing import BaseRoute, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.gateway.errors import Failure, describe
from deployments.gateway.ids import draw_name
from engine.errors import RequestError

_CALL = "tailrace.call"
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class ClientGone(Exception):
    """The client left; there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request as it came in."""

    headers: Mapping[bytes, bytes]
    """By name, which the server has made small letters. The last of several of one name counts."""

    request_id: str
    """The client's `x-request-id` if it is sane, else a new one. Clients may repeat theirs."""

    received_s: float
    echo_request_id: bool = True

    @classmethod
    def of(cls, scope: Scope, echo_request_id: bool) -> Call:
        """As it comes in now; `call_of` finds it again."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        theirs = headers.get(b"x-request-id")
        if theirs is not None and _SANE_ID.fullmatch(theirs):
            request_id = theirs.decode()
        else:
            request_id = "req_" + draw_name()
        call = cls(headers, request_id, time.monotonic(), echo_request_id)
        scope[_CALL] = call
        return call

    def head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> Message:
        """The start of an answer, with the headers that every answer has."""
        took_ms = b"%d" % round((time.monotonic() - self.received_s) * 1000)
        named = [*headers, (b"openai-processing-ms", took_ms)]
        if self.echo_request_id:
            named.append((b"x-request-id", self.request_id.encode()))
        return {"type": "http.response.start", "status": status, "headers": named}


def call_of(scope: Scope) -> Call:
    return cast("Call", scope[_CALL])


class Application(Protocol):
    """Answers one request. Made for it, and making it may fail."""

    started: bool
    """The head of the answer is out."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with the head of the request's own `Call`."""
        ...


Posts = Mapping[str, Callable[[], Application]]
"""What makes the application of a POST, by path."""


class FrontDoor:
    """The whole application: some POSTs answered at once, everything else by `app`.

    The routes of `posts` are declared in `app` too, for the OpenAPI document and other methods.
    """

    def __init__(self, app: FastAPI, posts: Posts, echo_request_id: bool) -> None:
        self._app = app
        self._posts = posts
        self._echo_request_id = echo_request_id

    @property
    def routes(self) -> list[BaseRoute]:
        """All there are. Serve names its own figures after them."""
        return self._app.routes

    @property
    def router(self) -> Router:
        return self._app.router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        make = find_post(self._posts, scope)
        if make is None:
            await self._app(scope, receive, send)
        else:
            await answer(make, self._echo_request_id, scope, receive, send)


def find_post(posts: Posts, scope: Scope) -> Callable[[], Application] | None:
    """What makes the application of this request, if it is one of `posts`."""
    if scope["type"] != "http" or scope["method"] != "POST":
        return None
    path, root = cast("str", scope["path"]), cast("str", scope.get("root_path", ""))
    return posts.get(path[len(root) :] if root and path.startswith(root + "/") else path)


def straight_in(posts: Posts) -> Callable[[Scope, Receive, Send], Awaitable[None] | None]:
    """A door for `ingress.open_door` that lets `posts` in."""

    def door(scope: Scope, receive: Receive, send: Send) -> Awaitable[None] | None:
        make = find_post(posts, scope)
        return None if make is None else answer(make, True, scope, receive, send)

    return door


async def answer(
    make: Callable[[], Application],
    echo_request_id: bool,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Name the request, make its application and run it."""
    call = Call.of(scope, echo_request_id)
    started = False
    try:
        application = make()
        try:
            await application(scope, receive, send)
        finally:
            started = application.started
    except ClientGone:
        return
    except Exception as error:
        if started:
            raise  # the server must cut the connection: half an answer is out
        await send_failure(describe(error, call.request_id), call, send)


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
        call = Call.of(scope, self._echo_request_id)
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = call.head(message["status"], message.get("headers", ()))
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except ClientGone:
            return
        except Exception as error:
            if started:
                raise  # the server must cut the connection: half an answer is out
            await send_failure(describe(error, call.request_id), call, send)


async def send_failure(failure: Failure, call: Call, send: Send) -> None:
    body = failure.body()
    headers = (
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *failure.headers,
    )
    await send(call.head(failure.status, headers))
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def read_body(call: Call, receive: Receive, limit: int) -> bytes:
    """The whole body. Raises RequestError (413) as soon as it is too long, ClientGone."""
    announced = call.headers.get(b"content-length", b"")
    if announced.isdigit() and int(announced) > limit:
        raise _too_long(int(announced), limit)
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
        more = message.get("more_body", False)
        if not (more or chunks):
            return chunk
        chunks.append(chunk)
        if not more:
            return b"".join(chunks)


def _too_long(size: int, limit: int) -> RequestError:
    return RequestError(
        f"the body has {size} bytes or more: at most {limit} are read; shorten it or send several "
        "requests",
        code="request_too_large",
        status=413,
    )
