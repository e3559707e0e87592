"""One authenticated connection between two processes: messages, payloads, beats, one end."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from deployments.link.auth import MAX_HANDSHAKE_FRAME_BYTES, Handshake, Peer, bye, read_bye
from deployments.link.messages import Kind
from deployments.link.wire import (
    CloseCode,
    CloseReason,
    FrameReader,
    Payload,
    Target,
    WireError,
    encode_frame,
    encode_payload_head,
)
from engine.errors import ConfigError, EngineError

logger = logging.getLogger(__name__)

_MIB = 1024 * 1024
_BEAT = encode_frame([Kind.BEAT])
_BATCH = 8
"""Messages that may wait for the end of a loop iteration to leave in one write. More leave at once:
in a burst the peer would idle until the last of them was made."""

_LINGER_S = 1.0
"""How long a closing link may take to write what it holds."""

# What a BYE with one of these codes says is taken over; any other means "closed by peer".
_CODES_OF_BYE = frozenset(
    {CloseCode.REPLACED, CloseCode.WRONG_SECRET, CloseCode.WRONG_VERSION, CloseCode.BUSY}
)


class LinkDown(EngineError):
    """There is no link: the peer cannot be reached, or the link ended. `reason` says why."""

    def __init__(self, message: str, reason: CloseReason) -> None:
        super().__init__(message)
        self.reason = reason


class LinkRefused(LinkDown):
    """The peer answered, and the handshake failed: wrong version, secret, role or id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Times and bounds of links. Both sides of a link should have the same."""

    beat_s: float = 1.0
    """A link that sent nothing for this long sends a beat."""

    lease_s: float = 5.0
    """A link that received nothing for this long is dead."""

    connect_s: float = 3.0
    handshake_s: float = 3.0

    max_frame_bytes: int = 16 * _MIB
    max_payload_bytes: int = 256 * _MIB
    high_water_bytes: int = _MIB
    """Above this many unwritten bytes `writable` is false and `drain` waits."""

    max_write_buffer_bytes: int = 256 * _MIB
    """Above this many unwritten bytes the link ends: the peer has stopped reading."""

    max_unauthenticated: int = 64
    """Connections a server holds that have not proven themselves. One more ends the oldest."""

    def __post_init__(self) -> None:
        if not 0 < self.beat_s < self.lease_s:
            raise ConfigError(
                f"beat_s={self.beat_s}, lease_s={self.lease_s}: a beat must be above 0 and shorter "
                "than the lease, best a fifth of it"
            )
        if self.max_write_buffer_bytes <= self.high_water_bytes:
            raise ConfigError(
                f"max_write_buffer_bytes={self.max_write_buffer_bytes}: must be above "
                f"high_water_bytes={self.high_water_bytes}"
            )
        for name in (
            "connect_s",
            "handshake_s",
            "max_frame_bytes",
            "max_payload_bytes",
            "high_water_bytes",
            "max_unauthenticated",
        ):
            value = getattr(self, name)
            if value <= 0:
                raise ConfigError(f"{name}={value}: must be above 0")


def _ignore(*_: Any) -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkHandlers:
    """What a link calls, always on its loop and never concurrently. They must not block.

    A handler that raises ends the link with `HANDLER_FAILED`: a message that does not hold what its
    kind promises leaves nothing to talk about.
    """

    on_message: Callable[[Link, list[Any]], None]
    on_open: Callable[[Link], None] = _ignore
    """Before any message. On the client side also before `dial` returns."""

    on_payload: Callable[[Link, list[Any]], Target] = _ignore
    """A payload begins: writable memory of exactly its length (one view, or several filled in
    order), or None to discard it."""

    on_payload_done: Callable[[Link, list[Any]], None] = _ignore
    """The memory is filled. Not called for a discarded payload, nor when the link ends before: then
    `on_close` tells that the memory is free again."""

    on_close: Callable[[Link, CloseReason], None] = _ignore
    """Exactly once for a link that was opened, whatever ended it."""


@dataclass(slots=True)
class LinkHooks:
    """What the owner of links (a server, a dialer) wants to know before the handlers do."""

    opened: Callable[[Link], None] = field(default=_ignore)
    ended: Callable[[Link], None] = field(default=_ignore)
    """Also for a link that never opened."""

    expect_role: str | None = None
    expect_id: str | None = None


class Link(asyncio.BufferedProtocol):
    """A connection and its protocol state. Use it from its own event loop only.

    Made by `LinkServer` and `dial`. `closed` is done, with the reason, when the connection is gone.
    """

    def __init__(
        self,
        handshake: Handshake,
        handlers: LinkHandlers,
        settings: LinkSettings,
        hooks: LinkHooks,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._handlers = handlers
        self._settings = settings
        self._hooks = hooks
        self._handshake = handshake
        self._peer: Peer | None = None
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(
            self,
            max_frame_bytes=MAX_HANDSHAKE_FRAME_BYTES,
            max_payload_bytes=settings.max_payload_bytes,
        )
        self._reason: CloseReason | None = None
        self._ended = False
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._flush_due = False
        self._corked = False
        self._paused = False
        self._drain_waiters: list[asyncio.Future[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._tick_due = 0.0
        self._last_received = 0.0
        self._sent = False
        self.remote = "?"
        """Address of the other end, for logs."""

        self.ready: asyncio.Future[None] = self._loop.create_future()
        """Done when the handshake is: with `LinkRefused` or `LinkDown` when it failed."""

        self.closed: asyncio.Future[CloseReason] = self._loop.create_future()

    # What users call

    @property
    def peer(self) -> Peer | None:
        """None until the handshake is over; kept when the link has ended."""
        return self._peer

    @property
    def peer_id(self) -> str:
        assert self._peer is not None, "the handshake is not over"
        return self._peer.peer_id

    @property
    def peer_role(self) -> str:
        assert self._peer is not None, "the handshake is not over"
        return self._peer.role

    @property
    def is_open(self) -> bool:
        """True between the handshake and the first sign of the end."""
        return self._peer is not None and self._reason is None

    @property
    def writable(self) -> bool:
        """False while more than `high_water_bytes` wait to be written."""
        return not self._paused

    @property
    def write_buffer_size(self) -> int:
        """Bytes accepted by `send` and `send_payload` that the operating system has not taken."""
        transport = self._transport
        return self._outgoing_bytes + (transport.get_write_buffer_size() if transport else 0)

    def send(self, message: Sequence[Any], *, last: bool = False) -> bool:
        """Queue one message. The messages of one loop iteration leave together, eight in a write.
        `last`: nothing follows it soon, so that it need not wait for the end of the iteration.

        False, and nothing is sent, when the link is not open: `on_close` tells everybody once, so
        that senders need not. Raises `WireError` for a message above the frame limit.
        """
        if not self.is_open:
            return False
        frame = encode_frame(message)
        if len(frame) - 4 > self._settings.max_frame_bytes:
            raise WireError(
                CloseCode.OVERSIZED,
                f"a message of {len(frame) - 4} bytes is above the limit of "
                f"{self._settings.max_frame_bytes}: split it or raise max_frame_bytes on all sides",
            )
        self._queue(frame, last)
        return True

    def send_payload(self, head: Sequence[Any], payload: Payload | Sequence[Payload]) -> bool:
        """Send `head` and behind it the bytes of `payload`, several pieces as one run.

        The memory is handed to the transport as it is: keep it alive and unchanged until the peer
        acknowledges it in its own protocol. Returns and raises as `send`.
        """
        if not self.is_open:
            return False
        pieces = [payload] if isinstance(payload, (bytes, bytearray, memoryview)) else payload
        views = [memoryview(piece).cast("B") for piece in pieces]
        size = sum(len(view) for view in views)
        if not 0 < size <= self._settings.max_payload_bytes:
            raise WireError(
                CloseCode.OVERSIZED,
                f"a payload of {size} bytes: must lie between 1 and "
                f"{self._settings.max_payload_bytes}",
            )
        self._outgoing.append(encode_payload_head(head, size))
        self._outgoing_bytes += len(self._outgoing[-1])
        self._flush()
        transport = self._transport
        assert transport is not None
        for view in views:
            if len(view):
                transport.write(view)
        self._check_write_buffer()
        return True

    def discard_payload(self) -> None:
        """Drop what is still to come of the payload that is arriving, if any.

        From here on the memory that `on_payload` gave is the caller's again. `on_payload_done` is
        not called for it.
        """
        self._reader.discard_payload()

    async def drain(self) -> None:
        """Wait until `writable`. Raises `LinkDown` when the link ends first."""
        self._flush()
        while self._paused and self._reason is None:
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._drain_waiters.append(waiter)
            try:
                await waiter
            finally:
                if waiter in self._drain_waiters:
                    self._drain_waiters.remove(waiter)
        if self._reason is not None:
            raise self._down()

    def close(self, detail: str = "") -> None:
        """End the link after what was sent is written. `on_close` follows on a later iteration."""
        self.end(CloseReason(CloseCode.CLOSED, detail))

    # What its owner calls

    def end(self, reason: CloseReason) -> None:
        """End the link for `reason`, telling the peer where it can still hear."""
        if self._reason is not None or self._ended:
            return
        self._reason = reason
        self._reader.stop()
        self._wake_drains()
        transport = self._transport
        if transport is None:
            return
        if reason.code in (CloseCode.LEASE_EXPIRED, CloseCode.PEER_STALLED):
            transport.abort()
            return
        if reason.code is not CloseCode.PEER_CLOSED:
            self._outgoing.append(encode_frame(bye(reason.code, reason.detail)))
        if self._outgoing:
            self._write_outgoing()
        transport.close()
        self._set_timer(_LINGER_S, transport.abort)

    def abandon(self) -> None:
        """The connection was given up while it was made. Nothing is left to write to."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def supersede(self, reason: CloseReason) -> None:
        """End the link now: `on_close` runs inside this call. Only from a loop callback."""
        self.end(reason)
        self._finish()

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._settings.high_water_bytes)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = transport.get_extra_info("peername")
        if name:
            self.remote = f"{name[0]}:{name[1]}"
        if self._reason is not None:
            self._transport.abort()
            return
        self._set_timer(self._settings.handshake_s, self._handshake_expired)
        for message in self._handshake.opening():
            self._queue(encode_frame(message))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._last_received = self._loop.time()
        self._corked = True  # answers to everything in this read leave together
        try:
            self._reader.received(nbytes)
        except WireError as error:
            self.end(CloseReason(error.code, error.detail))
        finally:
            self._corked = False
            if self._outgoing:
                self._flush()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._wake_drains()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reason is None:
            detail = "" if exc is None else f"{type(exc).__name__}: {exc}"
            self._reason = CloseReason(CloseCode.CONNECTION_LOST, detail)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._finish()

    # FrameSink

    def frame_received(self, message: list[Any]) -> None:
        if self._peer is None:
            self._answer_handshake(message)
            return
        kind = message[0]
        if kind == Kind.BEAT:
            return
        if kind == Kind.BYE:
            code, detail = read_bye(message)
            self._reader.stop()
            if code is None or code is CloseCode.CLOSED:
                self.end(CloseReason(CloseCode.PEER_CLOSED, detail))
            elif code in _CODES_OF_BYE:
                self.end(CloseReason(code, detail))
            else:
                self.end(CloseReason(CloseCode.PEER_CLOSED, f"{code.value}: {detail}"))
            return
        if kind in (Kind.HELLO, Kind.PROOF):
            raise WireError(CloseCode.MALFORMED, "the handshake is already over")
        try:
            self._handlers.on_message(self, message)
        except Exception as error:
            self._handler_failed(kind, error)

    def payload_offered(self, head: list[Any], payload_bytes: int) -> Target:
        if self._peer is None:
            raise WireError(CloseCode.MALFORMED, "a payload came before the handshake")
        try:
            return self._handlers.on_payload(self, head)
        except Exception as error:
            self._handler_failed(head[0], error)
            return None

    def payload_received(self, head: list[Any]) -> None:
        try:
            self._handlers.on_payload_done(self, head)
        except Exception as error:
            self._handler_failed(head[0], error)

    # Inside

    def _answer_handshake(self, message: list[Any]) -> None:
        for answer in self._handshake.answer(message):
            self._queue(encode_frame(answer))
        peer = self._handshake.peer
        if peer is None:
            return
        for what, expected, actual in (
            ("role", self._hooks.expect_role, peer.role),
            ("id", self._hooks.expect_id, peer.peer_id),
        ):
            if expected is not None and expected != actual:
                raise WireError(
                    CloseCode.UNEXPECTED_PEER,
                    f"{self.remote} has {what} {actual!r} where {expected!r} was expected: its "
                    "address is probably in use by a newer process",
                )
        self._peer = peer
        self._reader.max_frame_bytes = self._settings.max_frame_bytes
        self._schedule_tick()
        self._hooks.opened(self)
        try:
            self._handlers.on_open(self)
        except Exception as error:
            self._handler_failed(Kind.HELLO, error)
        if not self.ready.done():
            self.ready.set_result(None)

    def _handshake_expired(self) -> None:
        self.end(
            CloseReason(
                CloseCode.HANDSHAKE_TIMEOUT,
                f"{self.remote} did not prove itself within {self._settings.handshake_s:g} s",
            )
        )

    def _handler_failed(self, kind: int, error: Exception) -> None:
        logger.exception("handling kind %s from %s failed", kind, self.remote)
        self.end(CloseReason(CloseCode.HANDLER_FAILED, f"kind {kind}: {type(error).__name__}"))

    def _queue(self, frame: bytes, last: bool = False) -> None:
        self._outgoing.append(frame)
        self._outgoing_bytes += len(frame)
        if last or len(self._outgoing) >= _BATCH:
            self._flush()
        elif not (self._corked or self._flush_due):
            self._flush_due = True
            self._loop.call_soon(self._flush_soon)

    def _flush_soon(self) -> None:
        self._flush_due = False
        self._flush()

    def _flush(self) -> None:
        if self._outgoing and self._reason is None:
            self._write_outgoing()
            self._check_write_buffer()

    def _write_outgoing(self) -> None:
        outgoing = self._outgoing
        data = outgoing[0] if len(outgoing) == 1 else b"".join(outgoing)
        outgoing.clear()
        self._outgoing_bytes = 0
        self._sent = True
        assert self._transport is not None
        self._transport.write(data)

    def _check_write_buffer(self) -> None:
        assert self._transport is not None
        size = self._transport.get_write_buffer_size()
        if size > self._settings.max_write_buffer_bytes:
            self.end(
                CloseReason(
                    CloseCode.PEER_STALLED,
                    f"{size} bytes wait to be written to {self.remote}, the limit is "
                    f"{self._settings.max_write_buffer_bytes}",
                )
            )

    def _wake_drains(self) -> None:
        for waiter in self._drain_waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _set_timer(self, delay_s: float, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, call)

    def _schedule_tick(self) -> None:
        self._tick_due = self._loop.time() + self._settings.beat_s
        self._set_timer(self._settings.beat_s, self._tick)

    def _tick(self) -> None:
        if self._reason is not None:
            return
        now = self._loop.time()
        late_s = now - self._tick_due
        if late_s > self._settings.beat_s:
            # This loop itself was blocked and has not read what came meanwhile (uvloop runs timers
            # before it polls), so that time proves nothing about the peer.
            self._last_received += late_s
        if now - self._last_received >= self._settings.lease_s:
            self.end(
                CloseReason(
                    CloseCode.LEASE_EXPIRED,
                    f"nothing from {self.remote} for {now - self._last_received:.1f} s",
                )
            )
            return
        if not self._sent and not self.write_buffer_size:
            self._outgoing.append(_BEAT)
            self._write_outgoing()
        self._sent = False
        self._schedule_tick()

    def _down(self) -> LinkDown:
        reason = self._reason
        assert reason is not None
        if self._peer is None and reason.code not in (
            CloseCode.CONNECTION_LOST,
            CloseCode.HANDSHAKE_TIMEOUT,
            CloseCode.CLOSED,
        ):
            return LinkRefused(f"link to {self.remote} refused: {reason}", reason)
        return LinkDown(f"link to {self.remote} is down: {reason}", reason)

    def _finish(self) -> None:
        if self._ended:
            return
        self._ended = True
        assert self._reason is not None
        self._reader.stop()
        self._outgoing.clear()
        self._outgoing_bytes = 0
        self._wake_drains()
        self._hooks.ended(self)
        if not self.ready.done():
            self.ready.set_exception(self._down())
            self.ready.exception()  # a server never awaits it
        if not self.closed.done():
            self.closed.set_result(self._reason)
        if self._peer is not None:
            self._handlers.on_close(self, self._reason)
        else:
            logger.info(
                "connection with %s ended before it was a link: %s", self.remote, self._reason
            )
