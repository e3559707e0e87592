"""A streaming client that costs next to nothing, since it shares the cores with what it measures.

One connection carries one request at a time and is kept open. What HTTP allows and the gateway
never sends (compression, trailers) is an error here.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import orjson

from cluster.errors import ClusterError

_LINE_END = b"\r\n"
_HEAD_END = b"\r\n\r\n"
_HEARING_S = 0.01


class ProtocolError(ClusterError):
    """The server does not speak the HTTP that was asked for."""


@dataclass(slots=True)
class StreamResult:
    """What one streamed answer did. Times are `time.monotonic()`."""

    sent_s: float
    end_s: float | None = None
    """The answer was whole."""

    arrivals_s: list[float] = field(default_factory=list[float])
    """Of each read that carried content, empty content left out."""

    text: str = ""
    finish: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    status: int | None = None
    """Of the answer, None where none came."""

    refused_s: float | None = None
    """A whole answer came, and it was an error."""

    headers: dict[str, str] = field(default_factory=dict[str, str])
    """Of a refusal, in small letters; of an answer none are kept."""

    def content(self, text: str, now_s: float) -> None:
        self.text += text
        if not self.arrivals_s or self.arrivals_s[-1] != now_s:
            self.arrivals_s.append(now_s)

    def to_json(self) -> dict[str, Any]:
        """As durations in seconds, from sending the request."""
        return {
            "arrivals_s": [arrival - self.sent_s for arrival in self.arrivals_s],
            "e2e_s": None if self.end_s is None else self.end_s - self.sent_s,
            "text": self.text,
            "finish": self.finish,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "error": self.error,
        }


class ResponseParser:
    """Bytes in, body out: one response with `content-length` or chunked."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        """Names and values in small letters."""

        self.keep_alive = True
        self.done = False
        self._buffer = b""
        self._length: int | None = None
        """Of what is left of the body; None where it is chunked."""

    def feed(self, data: bytes) -> bytes:
        """What of the body came with `data`. Raises ProtocolError."""
        self._buffer = self._buffer + data if self._buffer else data
        if not self.status and not self._take_head():
            return b""
        return self._take_chunks() if self._length is None else self._take_length(self._length)

    def _take_head(self) -> bool:
        head, end, rest = self._buffer.partition(_HEAD_END)
        if not end:
            return False
        status, *lines = head.split(_LINE_END)
        headers = {
            name.strip().lower(): value.strip().lower()
            for name, _, value in (line.partition(b":") for line in lines)
        }
        try:
            version, code = status.split(b" ", 2)[:2]
            self.status = int(code)
            if headers.get(b"transfer-encoding") != b"chunked":
                self._length = int(headers[b"content-length"])
        except (ValueError, KeyError) as error:
            raise ProtocolError(f"not an answer in HTTP: {head[:200]!r}") from error
        self.headers = headers
        self.keep_alive = version == b"HTTP/1.1" and headers.get(b"connection") != b"close"
        self._buffer = rest
        return True

    def _take_length(self, length: int) -> bytes:
        body, self._buffer = self._buffer[:length], self._buffer[length:]
        self._length = length - len(body)
        self.done = self._length == 0
        return body

    def _take_chunks(self) -> bytes:
        """Whole chunks only: the gateway writes an event a chunk, so halves are rare."""
        parts: list[bytes] = []
        buffer, at = self._buffer, 0
        while not self.done:
            line = buffer.find(_LINE_END, at)
            if line < 0:
                break
            try:
                size = int(buffer[at:line], 16)
            except ValueError as error:
                raise ProtocolError(f"not the size of a chunk: {buffer[at:line][:40]!r}") from error
            end = line + 2 + size
            if len(buffer) < end + 2:
                break
            if buffer[end : end + 2] != _LINE_END:
                raise ProtocolError(f"a chunk of {size} bytes does not end where it should")
            parts.append(buffer[line + 2 : end])
            at = end + 2
            self.done = size == 0
        self._buffer = buffer[at:]
        return b"".join(parts)


class EventReader:
    """Server-sent events of OpenAI's two streaming endpoints, into a `StreamResult`."""

    def __init__(self, result: StreamResult) -> None:
        self._result = result
        self._rest = b""
        self.done = False
        """`[DONE]` came."""

    def feed(self, body: bytes, now_s: float) -> None:
        *events, self._rest = (self._rest + body if self._rest else body).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                self.done = True
            elif data:
                self._take(orjson.loads(data), now_s)

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        result = self._result
        if "error" in event:
            result.error = str(event["error"].get("message"))
            return
        for choice in event["choices"]:
            text = choice["delta"].get("content") if "delta" in choice else choice["text"]
            if text:
                result.content(text, now_s)
            if choice["finish_reason"]:
                result.finish = choice["finish_reason"]
        usage = event.get("usage")
        if usage:
            result.prompt_tokens = usage["prompt_tokens"]
            result.completion_tokens = usage["completion_tokens"]
            # Not every server tells.
            result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


class Connection(asyncio.Protocol):
    """One kept-open connection. `stream` must not be called while it is under way."""

    def __init__(self, host: str) -> None:
        self._host = host.encode()
        self._transport: asyncio.Transport
        self._parser = ResponseParser()
        self._result = StreamResult(0.0)
        self._events = EventReader(self._result)
        self._done: asyncio.Future[None] | None = None
        self.usable = False

    @property
    def answered(self) -> bool:
        """Something of the last request's answer came."""
        return self._parser.status != 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of classes of their own.
        self._transport = cast("asyncio.Transport", transport)
        self.usable = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._end(f"the connection was closed ({exc or 'end of file'})")

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        parser = self._parser
        try:
            body = parser.feed(data)
            if parser.status == 200:
                self._events.feed(body, now_s)
            elif body:
                self._result.text += body.decode(errors="replace")
        except (ProtocolError, orjson.JSONDecodeError, KeyError, TypeError) as error:
            self._transport.close()
            self._end(f"{type(error).__name__}: {error}")
            return
        if not parser.done:
            return
        self.usable = parser.keep_alive
        self._result.status = parser.status
        if parser.status != 200:
            self._result.refused_s = now_s
            self._result.headers = {
                name.decode("latin-1"): value.decode("latin-1")
                for name, value in parser.headers.items()
            }
            self._end(f"status {parser.status}: {self._result.text[:300]}")
        elif not self._events.done and self._result.error is None:
            self._end("the stream ended without [DONE]")
        else:
            self._result.end_s = now_s
            self._end(None)

    async def stream(self, path: str, body: bytes) -> StreamResult:
        """POST `body` and follow the answer. Failures are in the result's `error`."""
        self._parser = ResponseParser()
        self._done = asyncio.get_running_loop().create_future()
        request = b"".join(
            (
                b"POST ",
                path.encode(),
                b" HTTP/1.1\r\nhost: ",
                self._host,
                b"\r\ncontent-type: application/json\r\ncontent-length: ",
                str(len(body)).encode(),
                _HEAD_END,
                body,
            )
        )
        result = self._result = StreamResult(time.monotonic())
        self._events = EventReader(result)
        self._transport.write(request)
        await self._done
        return result

    def close(self) -> None:
        if self.usable:
            self._transport.close()
        self.usable = False

    def _end(self, error: str | None) -> None:
        if self._done is None or self._done.done():
            return
        if error is not None and self._result.error is None:
            self._result.error = error
        self._done.set_result(None)


class Client:
    """A pool of connections to one server."""

    def __init__(self, url: str, *, resend: bool = False) -> None:
        """resend: what a kept connection ended under before a byte of its answer came is sent again
        on a new one, as browsers do: some servers close connections without saying so.

        Raises ClusterError for anything but `http://HOST[:PORT]`.
        """
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ClusterError(f"url {url!r}: the load client speaks plain http://HOST:PORT only")
        self._host, self._port = parts.hostname, parts.port or 80
        self._idle: list[Connection] = []
        self._resend = resend

    async def warm(self, count: int) -> None:
        """Have so many connections open: what follows measures requests, not connects."""
        # Servers close what was idle for seconds, and the loop did not run since: it hears it now.
        await asyncio.sleep(_HEARING_S)
        self._idle = [connection for connection in self._idle if connection.usable]
        missing = max(0, count - len(self._idle))
        self._idle += await asyncio.gather(*(self._connect() for _ in range(missing)))

    async def stream(self, path: str, body: bytes) -> StreamResult:
        """Send on an idle connection, on a new one if there is none."""
        while self._idle and not self._idle[-1].usable:
            self._idle.pop()
        kept = self._idle.pop() if self._idle else None
        result = await self._send(kept or await self._connect(), path, body)
        if kept is not None and self._resend and result.error is not None and not kept.answered:
            sent_s = result.sent_s
            result = await self._send(await self._connect(), path, body)
            result.sent_s = sent_s
        return result

    async def _send(self, connection: Connection, path: str, body: bytes) -> StreamResult:
        try:
            return await connection.stream(path, body)
        finally:
            if connection.usable:
                self._idle.append(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connect(self) -> Connection:
        try:
            _, connection = await asyncio.get_running_loop().create_connection(
                lambda: Connection(f"{self._host}:{self._port}"), self._host, self._port
            )
        except OSError as error:
            raise ClusterError(
                f"http://{self._host}:{self._port}: nobody answers ({error}); start it with "
                "`tailrace up`, or give --url"
            ) from error
        return connection
