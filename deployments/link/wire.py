"""Framing: how messages and payloads lie on the byte stream, and how they are taken off it.

```
|  word  | [payload length] |  head: msgpack array  | [payload bytes] |
   u32          u32             word & 0x7FFFFFFF       only if flagged
```

All integers are big-endian. The top bit of `word` says that a payload follows; only `PAYLOAD_KINDS`
may carry one. Nothing here knows sockets, so the decoder can be fed any split of any bytes.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from deployments.link.messages import Kind
from engine.errors import EngineError

Payload = bytes | bytearray | memoryview
"""Contiguous bytes to send."""

Target = memoryview | Sequence[memoryview] | None
"""Writable memory for a payload, filled in order; together exactly as long as the payload. None
discards it."""

PAYLOAD_KINDS = frozenset({Kind.CHUNK})

# msgpack ships no types for its C module. One packer for all: making one costs as much as packing.
pack = cast("Callable[[Any], bytes]", msgpack.Packer().pack)  # pyright: ignore[reportUnknownMemberType]
_unpack = cast("Callable[..., Any]", msgpack.unpackb)  # pyright: ignore[reportUnknownMemberType]

_KINDS = frozenset(int(kind) for kind in Kind)
_U32 = struct.Struct(">I")
_PAYLOAD_FLAG = 0x8000_0000
_BUFFER_BYTES = 64 * 1024
_SCRATCH_BYTES = 256 * 1024


class CloseCode(str, Enum):
    """Why a link ended."""

    CLOSED = "closed"
    """By this side, on purpose."""

    PEER_CLOSED = "closed by peer"
    CONNECTION_LOST = "connection lost"
    LEASE_EXPIRED = "lease expired"
    """Nothing arrived for the lease time: the peer hangs or its host is gone."""

    PEER_STALLED = "peer stalled"
    """The peer reads too slowly: more waits to be written than the bound allows."""

    REPLACED = "replaced"
    """The same peer connected again."""

    MALFORMED = "malformed frame"
    OVERSIZED = "oversized frame"
    UNKNOWN_KIND = "unknown kind"
    PAYLOAD_SIZE = "payload size"
    """A payload was not as long as the memory that waited for it."""

    HANDLER_FAILED = "handler failed"
    """Our own code raised on a message, or the message did not hold what its kind promises."""

    HANDSHAKE_TIMEOUT = "handshake timeout"
    WRONG_VERSION = "wrong protocol version"
    WRONG_SECRET = "wrong secret"
    UNEXPECTED_PEER = "unexpected peer"
    BUSY = "too many unauthenticated connections"


@dataclass(frozen=True, slots=True)
class CloseReason:
    """Why a link ended: a code to branch on, a detail to read."""

    code: CloseCode
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.code.value}: {self.detail}" if self.detail else self.code.value


class WireError(EngineError):
    """The bytes break the format. The link ends with `code`."""

    def __init__(self, code: CloseCode, detail: str) -> None:
        super().__init__(f"{code.value}: {detail}")
        self.code = code
        self.detail = detail


def encode_frame(message: Sequence[Any]) -> bytes:
    """One message without payload. Raises TypeError for a value msgpack cannot carry."""
    body = pack(message)
    return _U32.pack(len(body)) + body


def encode_payload_head(head: Sequence[Any], payload_bytes: int) -> bytes:
    """What precedes `payload_bytes` bytes of payload on the wire."""
    body = pack(head)
    return _U32.pack(len(body) | _PAYLOAD_FLAG) + _U32.pack(payload_bytes) + body


class FrameSink(Protocol):
    """Where decoded frames go. All calls come from inside `FrameReader.received`."""

    def frame_received(self, message: list[Any]) -> None:
        """A message without payload."""
        ...

    def payload_offered(self, head: list[Any], payload_bytes: int) -> Target:
        """A payload begins. Its memory, or None to discard it."""
        ...

    def payload_received(self, head: list[Any]) -> None:
        """The memory given for `head` is filled. Not called for a discarded payload."""
        ...


class FrameReader:
    """Incremental decoder that hands out the memory to receive into.

    Control frames go through one buffer. Once the head of a payload frame is known, `get_buffer`
    returns the sink's own memory, so the payload arrives there without passing through the buffer
    (all but what shared a read with the head: at most 64 KiB, moved once).

    # buffer:  |-- parsed --|---- received ----|---- free: get_buffer() ----|
    #          0          start               end
    """

    def __init__(self, sink: FrameSink, *, max_frame_bytes: int, max_payload_bytes: int) -> None:
        self.max_frame_bytes = max_frame_bytes
        self._max_payload_bytes = max_payload_bytes
        self._sink = sink
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start: int = 0
        self._end: int = 0
        self._stopped = False
        self._head: list[Any] | None = None
        self._targets: deque[memoryview] = deque()
        self._discarding = False
        self._payload_left = 0
        self._scratch: memoryview | None = None

    def stop(self) -> None:
        """Ignore everything from now on, also what is already in the buffer."""
        self._stopped = True

    def discard_payload(self) -> None:
        """Let go of the memory of the payload that is arriving: its rest is read and dropped."""
        if self._payload_left and not self._discarding:
            self._discarding = True
            self._targets.clear()

    def get_buffer(self) -> memoryview:
        """Never empty. Valid until `received`."""
        if self._stopped or self._discarding:
            if self._scratch is None:
                self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
            return self._scratch if self._stopped else self._scratch[: self._payload_left]
        if self._payload_left:
            return self._targets[0]
        return self._buffer[self._end :]

    def received(self, num_bytes: int) -> None:
        """`num_bytes` lie in the memory of the last `get_buffer`. Raises `WireError`."""
        if self._stopped:
            return
        if self._payload_left:
            self._advance_payload(num_bytes)
            return
        self._end += num_bytes
        self._parse()

    def _advance_payload(self, num_bytes: int) -> None:
        self._payload_left -= num_bytes
        if not self._discarding:
            target = self._targets[0][num_bytes:]
            if len(target):
                self._targets[0] = target
            else:
                self._targets.popleft()
        if self._payload_left == 0:
            self._finish_payload()

    def _finish_payload(self) -> None:
        head, self._head = self._head, None
        discarded, self._discarding = self._discarding, False
        self._scratch = None
        if not discarded:
            assert head is not None
            self._sink.payload_received(head)

    def _parse(self) -> None:
        while not self._stopped:
            available = self._end - self._start
            if available < 4:
                break
            word: int = _U32.unpack_from(self._buffer, self._start)[0]
            has_payload = bool(word & _PAYLOAD_FLAG)
            head_bytes = word & ~_PAYLOAD_FLAG
            if head_bytes > self.max_frame_bytes:
                raise WireError(
                    CloseCode.OVERSIZED,
                    f"a frame of {head_bytes} bytes was announced, the limit is "
                    f"{self.max_frame_bytes}",
                )
            skip = 8 if has_payload else 4
            if available < skip + head_bytes:
                self._make_room(skip + head_bytes)
                return
            body = self._start + skip
            head = _decode(self._buffer[body : body + head_bytes])
            if has_payload:
                size: int = _U32.unpack_from(self._buffer, self._start + 4)[0]
                self._start = body + head_bytes
                self._begin_payload(head, size)
                if self._payload_left:
                    break
            else:
                self._start = body + head_bytes
                self._sink.frame_received(head)
        if not self._stopped:
            self._make_room(_BUFFER_BYTES // 4)

    def _begin_payload(self, head: list[Any], size: int) -> None:
        if head[0] not in PAYLOAD_KINDS:
            raise WireError(CloseCode.MALFORMED, f"kind {head[0]} cannot carry a payload")
        if not 0 < size <= self._max_payload_bytes:
            raise WireError(
                CloseCode.OVERSIZED,
                f"a payload of {size} bytes was announced, it must lie between 1 and "
                f"{self._max_payload_bytes}",
            )
        targets = self._sink.payload_offered(head, size)
        if self._stopped:
            return
        self._head = head
        self._payload_left = size
        if targets is None:
            self._discarding = True
        else:
            views = [targets] if isinstance(targets, memoryview) else targets
            self._targets.extend(view.cast("B") for view in views if view.nbytes)
            room = sum(len(view) for view in self._targets)
            if room != size:
                raise WireError(
                    CloseCode.PAYLOAD_SIZE, f"{size} bytes were sent where {room} were expected"
                )
        while self._payload_left and self._start < self._end:
            got = min(self._end - self._start, self._payload_left)
            if not self._discarding:
                got = min(got, len(self._targets[0]))
                self._targets[0][:got] = self._buffer[self._start : self._start + got]
            self._start += got
            self._advance_payload(got)

    def _make_room(self, needed: int) -> None:
        """At least `needed` bytes from `start` on, and some of them free."""
        held = self._end - self._start
        size = max(needed, _BUFFER_BYTES)
        if held == 0:
            self._start = self._end = 0
        if len(self._buffer) == size and len(self._buffer) - self._start > max(needed - 1, held):
            return
        # A new buffer when it must grow or may shrink; else the rest moves to the front.
        target = self._buffer if len(self._buffer) == size else memoryview(bytearray(size))
        target[:held] = bytes(self._buffer[self._start : self._end])
        self._buffer, self._start, self._end = target, 0, held


def _decode(body: memoryview) -> list[Any]:
    try:
        message = _unpack(body, strict_map_key=False)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise WireError(
            CloseCode.MALFORMED, f"a frame of {len(body)} bytes is not msgpack: {error}"
        ) from None
    if not isinstance(message, list) or not message:
        raise WireError(CloseCode.MALFORMED, "a frame is not a non-empty array")
    frame = cast("list[Any]", message)
    kind = frame[0]
    if type(kind) is not int or kind not in _KINDS:
        raise WireError(
            CloseCode.UNKNOWN_KIND,
            f"kind {str(kind)[:32]!r}: this side speaks {sorted(_KINDS)}; is the peer newer?",
        )
    return frame
