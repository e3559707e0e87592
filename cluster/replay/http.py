"""HTTP/1.1 for load: one request at a time on a connection, as many connections as it takes.

No limit on connections, for that would close an open loop. Written on asyncio's protocols because
the general clients cost a multiple of it for each piece of a stream.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import urlsplit

from cluster.errors import ClusterError

_LINE_END = b"\r\n"
_HEAD_END = b"\r\n\r\n"
_LARGEST_HEAD = 256 * 1024


class ConnectionBroken(ClusterError):
    """The connection could not be made, broke, or does not speak HTTP/1.1."""

    fresh = True
    """False where a kept connection was closed before a byte of the answer: the server may have
    closed it for idleness while the request was on its way, so that nobody saw it."""


class Response:
    """Bytes in, body out: one response."""

    def __init__(self) -> None:
        self.status = 0
        """0 until the head is there."""

        self.headers: dict[str, str] = {}
        """Names in lower case; of several, the last."""

        self.keep_alive = True
        self.done = False
        self._buffer = b""
        self._left: int | None = None
        """Bytes of the body that are to come, None where it is chunked."""

        self._until_close = False
        self._trailers = False

    def feed(self, data: bytes) -> bytes:
        """What of the body came with `data`. Raises ConnectionBroken."""
        self._buffer = self._buffer + data if self._buffer else data
        while not self.status:
            if not self._take_head():
                return b""
        if self._until_close:
            body, self._buffer = self._buffer, b""
            return body
        return self._take_chunks() if self._left is None else self._take_length(self._left)

    def end_of_file(self) -> bool:
        """Nothing more comes. Whether the response is whole."""
        self.keep_alive = False
        if self._until_close:
            self.done = True
        return self.done

    def _take_head(self) -> bool:
        head, end, rest = self._buffer.partition(_HEAD_END)
        if not end:
            if len(head) > _LARGEST_HEAD:
                raise ConnectionBroken(f"a head of more than {_LARGEST_HEAD} bytes")
            return False
        status, *lines = head.split(_LINE_END)
        try:
            version, code = status.split(b" ", 2)[:2]
            number = int(code)
        except ValueError:
            raise ConnectionBroken(f"not an answer in HTTP: {head[:200]!r}") from None
        self._buffer = rest
        if 100 <= number < 200:
            return bool(rest)  # interim: the answer's own head follows
        self.headers = {
            name.strip().lower().decode("latin-1"): value.strip().decode("latin-1")
            for name, _, value in (line.partition(b":") for line in lines)
        }
        self.status = number
        connection = self.headers.get("connection", "").lower()
        self.keep_alive = version == b"HTTP/1.1" and "close" not in connection
        self._find_length(number)
        return True

    def _find_length(self, status: int) -> None:
        length = self.headers.get("content-length")
        if self.headers.get("transfer-encoding", "").lower().endswith("chunked"):
            self._left = None
        elif status in (204, 304):
            self._left, self.done = 0, True
        elif length is not None:
            if not length.isdecimal():
                raise ConnectionBroken(f"content-length {length!r}: not a number")
            self._left = int(length)
            self.done = self._left == 0
        else:
            self._until_close = True

    def _take_length(self, left: int) -> bytes:
        body, self._buffer = self._buffer[:left], self._buffer[left:]
        self._left = left - len(body)
        self.done = self._left == 0
        return body

    def _take_chunks(self) -> bytes:
        """Whole chunks only: servers write an event a chunk, so halves are rare."""
        parts: list[bytes] = []
        buffer, at = self._buffer, 0
        while not self.done:
            line = buffer.find(_LINE_END, at)
            if line < 0:
                break
            if self._trailers:
                self.done = line == at
                at = line + 2
                continue
            try:
                size = int(buffer[at:line].partition(b";")[0], 16)
            except ValueError:
                raise ConnectionBroken(
                    f"not the size of a chunk: {buffer[at:line][:40]!r}"
                ) from None
            if size == 0:
                self._trailers = True
                at = line + 2
                continue
            end = line + 2 + size
            if len(buffer) < end + 2:
                break
            if buffer[end : end + 2] != _LINE_END:
                raise ConnectionBroken(f"a chunk of {size} bytes does not end where it should")
            parts.append(buffer[line + 2 : end])
            at = end + 2
        self._buffer = buffer[at:]
        return b"".join(parts)


class TimeUp(ConnectionBroken):
    """We left: the time that was given for the request is over."""


OnBody = Callable[[Response, bytes, float], None]
"""`(response, a piece of its body, loop time at which it was read)`. A ConnectionBroken that it
raises closes the connection and ends the request."""


class Connection(asyncio.Protocol):
    """One connection. A request must have ended before the next one is sent."""

    def __init__(self) -> None:
        self.usable = False
        self.num_requests = 0
        self._transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._response = Response()
        self._on_body: OnBody | None = None
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of classes of their own.
        self._transport = cast("asyncio.Transport", transport)
        self.usable = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        response = self._response
        if response.status and response.end_of_file():
            self._end(None)
            return
        error = ConnectionBroken(f"the connection was closed ({exc or 'end of file'})")
        error.fresh = self.num_requests == 1 or bool(response.status)
        self._end(error)

    def data_received(self, data: bytes) -> None:
        if self._on_body is None:
            self.close()  # bytes that nobody asked for
            return
        now_s = self._loop.time()
        response = self._response
        try:
            body = response.feed(data)
            if body:
                self._on_body(response, body, now_s)
        except ConnectionBroken as error:
            self.close()
            self._end(error)
            return
        if response.done:
            if not response.keep_alive:
                self.close()
            self._end(None)

    async def request(self, data: bytes, on_body: OnBody, within_s: float) -> Response:
        """Write one request and follow the answer to its end.

        Cancelling this closes the connection, which is how a client leaves. Raises
        ConnectionBroken.
        """
        self.num_requests += 1
        self._response, self._on_body = Response(), on_body
        self._done = self._loop.create_future()
        timer = self._loop.call_later(within_s, self._expire)
        self._transport.write(data)
        try:
            await self._done
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            timer.cancel()
        return self._response

    def _expire(self) -> None:
        self.close()
        self._end(TimeUp("the time for the request is over"))

    def close(self) -> None:
        """At once: what was not read or written is dropped."""
        if self.usable:
            self.usable = False
            self._transport.abort()

    def _end(self, error: ConnectionBroken | None) -> None:
        done, self._on_body = self._done, None
        if done is None or done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


class Connections:
    """Connections to one server: kept ones are used again, and there is no limit."""

    def __init__(self, url: str, *, connect_timeout_s: float = 5.0) -> None:
        """Raises ClusterError for anything but `http(s)://HOST[:PORT][/PATH]`."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClusterError(f"url {url!r}: must be like http://HOST:PORT")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._path = parts.path.rstrip("/")
        self._authority = parts.netloc.rpartition("@")[2]
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[Connection] = []

    def head(self, path: str, headers: Mapping[str, str]) -> bytes:
        """A POST's head up to its length, for `post` to complete."""
        lines = [
            f"POST {self._path}{path} HTTP/1.1",
            f"host: {self._authority}",
            "content-type: application/json",
            *(f"{name}: {value}" for name, value in headers.items()),
            "content-length: ",
        ]
        return "\r\n".join(lines).encode("latin-1")

    async def warm(self, count: int) -> None:
        """Have so many connections open. Raises ConnectionBroken."""
        missing = max(0, count - len(self._idle))
        self._idle += await asyncio.gather(*(self._connect() for _ in range(missing)))

    async def post(self, head: bytes, body: bytes, on_body: OnBody, within_s: float) -> Response:
        """Send on an idle connection, on a new one if there is none.

        Raises ConnectionBroken, TimeUp when the answer is not whole after `within_s`.
        """
        data = b"%b%d\r\n\r\n%b" % (head, len(body), body)
        while True:
            connection = self._take() or await self._connect()
            try:
                return await connection.request(data, on_body, within_s)
            except ConnectionBroken as error:
                if error.fresh:
                    raise
            finally:
                if connection.usable:
                    self._idle.append(connection)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _connect(self) -> Connection:
        try:
            connecting = asyncio.get_running_loop().create_connection(
                Connection, self._host, self._port, ssl=self._tls
            )
            _, connection = await asyncio.wait_for(connecting, self._connect_timeout_s)
        except (OSError, asyncio.TimeoutError) as error:
            raise ConnectionBroken(
                f"{self._host}:{self._port}: no connection "
                f"({str(error) or f'none within {self._connect_timeout_s:g} s'})"
            ) from error
        return connection
