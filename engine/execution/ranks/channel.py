"""The step channel between a coordinator and one rank: frames over a Unix socket or TCP.

```
| u32 length | msgpack array [kind, ...] |
```

A connection opens with a mutual proof (HMAC-SHA256) of a key that is drawn for each group and
reaches the ranks by the way they are started; both proofs cover version, rank and both nonces.
Nothing is unpickled. Whatever breaks the form raises `ChannelError`: a channel that lied once is
not read again.

```
coordinator                               rank
HELLO version nonce        ─────────►
                           ◄─────────     HELLO version rank purpose nonce proof
WELCOME proof              ─────────►
```
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Literal, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from engine.errors import EngineError

CHANNEL_VERSION = 1
MAX_FRAME_BYTES = 1 << 28
"""A step of ten thousand requests with full block tables stays far below."""

_MAX_HELLO_BYTES = 1024
_NONCE_BYTES = 32
_BUFFER_BYTES = 1 << 16
_LENGTH = struct.Struct(">I")
_TIMEVAL = struct.Struct("@ll")
_PROOF_LIMIT_S = 10.0
"""For a rank that connected: its machine may be busy with loading."""

Purpose = Literal["steps", "memory", "reads"]

pack = cast("Callable[[Any], bytes]", msgpack.Packer().pack)  # pyright: ignore[reportUnknownMemberType]
_unpack = cast("Callable[..., Any]", msgpack.unpackb)  # pyright: ignore[reportUnknownMemberType]


class Kind(IntEnum):
    """First item of every frame."""

    HELLO = 1
    WELCOME = 2
    BEAT = 3
    """Rank: alive. Once a second, whatever it computes."""

    READY = 10
    """Rank: weights are loaded. What it holds."""

    ALLOCATE = 11
    """Coordinator: make a KV pool of so many blocks."""

    ALLOCATED = 12
    STEP = 20
    """Coordinator: number of the step, plan."""

    DONE = 21
    """Rank: number of the step; its tokens from the sampling rank."""

    UNUSABLE = 22
    """Sampling rank: no token can be drawn for a request (`UnusableLogits`)."""

    FAILED = 23
    """Rank: it cannot go on, and why."""

    READ = 30
    """Memory: a piece of this rank's KV."""

    PIECE = 31
    WRITE = 32
    WRITTEN = 33

    OPEN_AGENT = 40
    """Reads, coordinator: make an agent that keeps READs of so many bytes in flight."""

    AGENT_OPEN = 41
    """Its card, or why there is none."""

    ADD_PEER = 42
    PEER_ADDED = 43
    """Or not: stage and message of the error."""

    LOSE_PEER = 44
    READ_BLOCKS = 45
    """Number, peer, blocks here, blocks there."""

    READ_ENDED = 46
    """Rank: number, checksums, error, seconds to post, seconds in all, soundness of scales."""

    READ_QUIET = 47
    """Rank: nothing writes into the blocks of this READ any more."""

    CANCEL_READ = 48
    SUM_BLOCKS = 49
    """Coordinator: number, blocks, parts of them."""

    BLOCK_SUMS = 50
    READ_WINDOW = 51


class ChannelError(EngineError):
    """The other side closed, died, lied or fell silent."""


def frame(message: list[Any]) -> bytes:
    """A message as it lies on the stream."""
    body = pack(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ChannelError(f"a frame of {len(body)} bytes: at most {MAX_FRAME_BYTES} are sent")
    return _LENGTH.pack(len(body)) + body


class Channel:
    """One connected, proven side. Sending is safe from several threads, receiving from one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._sending = threading.Lock()
        self.last_heard = time.monotonic()
        self.max_frame_bytes = _MAX_HELLO_BYTES
        """Longer ones are malformed; raised once the other side is proven."""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: list[Any]) -> None:
        self.send_frame(frame(message))

    def send_frame(self, data: bytes) -> None:
        """Send what `frame` made. Raises ChannelError when nobody is there."""
        try:
            with self._sending:
                self._socket.sendall(data)
        except BlockingIOError as error:  # see `limit_sends`
            raise ChannelError("the other side is stuck: it takes nothing") from error
        except OSError as error:
            raise ChannelError(f"the other side is gone: {error}") from error

    def limit_sends(self, limit_s: float) -> None:
        """Sending raises where the other side takes no byte for so long."""
        seconds = int(limit_s)
        limit = _TIMEVAL.pack(seconds, int((limit_s - seconds) * 1e6))
        with contextlib.suppress(OSError):  # closed: sending raises anyway
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def receive(self, timeout_s: float | None = None) -> list[Any]:
        """The next message. Raises ChannelError at the end, on a malformed frame, on timeout."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            message = self.take()
            if message is not None:
                return message
            if deadline is not None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ChannelError(f"nothing heard for {timeout_s:g} s")
                self._socket.settimeout(left)
            try:
                self._fill(0)
            except TimeoutError as error:
                raise ChannelError(f"nothing heard for {timeout_s:g} s") from error
            finally:
                if deadline is not None:
                    self._socket.settimeout(None)

    def arrived(self) -> list[list[Any]]:
        """The messages that are complete now, without waiting. Raises as `receive`."""
        try:
            while self._fill(socket.MSG_DONTWAIT) == _BUFFER_BYTES:
                pass
        except BlockingIOError:
            pass
        messages: list[list[Any]] = []
        while (message := self.take()) is not None:
            messages.append(message)
        return messages

    def take(self) -> list[Any] | None:
        """The next message of what was read already, if it is complete."""
        buffer = self._buffer
        if len(buffer) < 4:
            return None
        (length,) = _LENGTH.unpack_from(buffer)
        if not 0 < length <= self.max_frame_bytes:
            raise ChannelError(f"malformed frame: a length of {length} bytes")
        if len(buffer) < 4 + length:
            return None
        with memoryview(buffer) as view:
            body = bytes(view[4 : 4 + length])
        del buffer[: 4 + length]
        return parse(body)

    def close(self) -> None:
        """Idempotent. Wakes whoever waits in `receive`."""
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _fill(self, flags: int) -> int:
        try:
            data = self._socket.recv(_BUFFER_BYTES, flags)
        except (TimeoutError, BlockingIOError):
            raise
        except OSError as error:
            raise ChannelError(f"the other side is gone: {error}") from error
        if not data:
            raise ChannelError("the other side closed the channel")
        self._buffer += data
        self.last_heard = time.monotonic()
        return len(data)


def parse(body: bytes) -> list[Any]:
    """One frame's message. Raises ChannelError unless it is an array that begins with a kind."""
    try:
        message = _unpack(body, use_list=True, strict_map_key=True)
    except Exception as error:  # msgpack raises half a dozen types
        raise ChannelError(f"malformed frame: {error or type(error).__name__}") from error
    if not isinstance(message, list) or not message:
        raise ChannelError("malformed frame: not an array")
    items = cast("list[Any]", message)
    if type(items[0]) is not int or items[0] not in _KINDS:
        raise ChannelError(f"malformed frame: kind {items[0]!r} is not known")
    return items


_KINDS = frozenset(int(kind) for kind in Kind)


class Listener:
    """Where ranks of one group connect: a Unix socket without a name in the file system, or TCP."""

    def __init__(self, key: bytes, *, host: str | None = None) -> None:
        """`host`: the address to listen on for ranks of other machines. None: this machine only."""
        self._key = key
        if host is None:
            name = f"tailrace-ranks-{secrets.token_hex(8)}"
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(f"\0{name}")
            self.address = f"unix:{name}"
        else:
            self._socket = socket.create_server((host, 0))
            self.address = f"tcp:{host}:{self._socket.getsockname()[1]}"
        self._socket.listen(128)

    def accept(self, timeout_s: float) -> tuple[int, Purpose, Channel] | None:
        """The next rank that proves itself: its number, what for. None after `timeout_s` without a
        connection; who connects has ten seconds more to prove itself.

        Strangers are turned away and do not end the wait.
        """
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                return None
            connection.settimeout(None)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            channel = Channel(connection)
            try:
                return (*self._prove(channel, _PROOF_LIMIT_S), channel)
            except ChannelError:
                channel.close()
        return None

    def close(self) -> None:
        self._socket.close()

    def _prove(self, channel: Channel, timeout_s: float) -> tuple[int, Purpose]:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        channel.send([Kind.HELLO, CHANNEL_VERSION, nonce])
        answer = channel.receive(timeout_s)
        if len(answer) != 6 or answer[0] != Kind.HELLO or answer[1] != CHANNEL_VERSION:
            raise ChannelError("the rank's greeting is malformed or of another version")
        _, _, rank, purpose, theirs, proof = answer
        if (
            type(rank) is not int
            or purpose not in ("steps", "memory", "reads")
            or type(proof) is not bytes
        ):
            raise ChannelError("the rank's greeting is malformed")
        expected = _proof(self._key, "rank", rank, purpose, nonce, theirs)
        if not hmac.compare_digest(proof, expected):
            raise ChannelError("who connected does not hold this group's key")
        channel.send([Kind.WELCOME, _proof(self._key, "coordinator", rank, purpose, nonce, theirs)])
        channel.max_frame_bytes = MAX_FRAME_BYTES
        return rank, purpose


def connect(
    address: str, key: bytes, rank: int, purpose: Purpose, *, timeout_s: float = 30.0
) -> Channel:
    """A rank's side. Raises ChannelError when the coordinator is not there or not the right one."""
    channel = Channel(_dial(address, timeout_s))
    try:
        _greet(channel, key, rank, purpose, timeout_s)
    except BaseException:
        channel.close()
        raise
    channel.max_frame_bytes = MAX_FRAME_BYTES
    return channel


def _dial(address: str, timeout_s: float) -> socket.socket:
    scheme, _, place = address.partition(":")
    try:
        if scheme == "unix":
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(timeout_s)
                connection.connect(f"\0{place}")
            except BaseException:
                connection.close()
                raise
        else:
            host, _, port = place.rpartition(":")
            connection = socket.create_connection((host, int(port)), timeout_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise ChannelError(f"the coordinator at {address} cannot be reached: {error}") from error
    connection.settimeout(None)
    return connection


def _greet(channel: Channel, key: bytes, rank: int, purpose: Purpose, timeout_s: float) -> None:
    hello = channel.receive(timeout_s)
    if len(hello) != 3 or hello[0] != Kind.HELLO or type(hello[2]) is not bytes:
        raise ChannelError("the coordinator's greeting is malformed")
    if hello[1] != CHANNEL_VERSION:
        raise ChannelError(
            f"the coordinator speaks version {hello[1]}, this rank {CHANNEL_VERSION}: run the same "
            "release everywhere"
        )
    theirs, nonce = hello[2], secrets.token_bytes(_NONCE_BYTES)
    proof = _proof(key, "rank", rank, purpose, theirs, nonce)
    channel.send([Kind.HELLO, CHANNEL_VERSION, rank, purpose, nonce, proof])
    welcome = channel.receive(timeout_s)
    expected = _proof(key, "coordinator", rank, purpose, theirs, nonce)
    if (
        len(welcome) != 2
        or welcome[0] != Kind.WELCOME
        or type(welcome[1]) is not bytes
        or not hmac.compare_digest(welcome[1], expected)
    ):
        raise ChannelError("who answers as coordinator does not hold this group's key")


def _proof(
    key: bytes, side: str, rank: int, purpose: str, coordinators: bytes, ranks: bytes
) -> bytes:
    # msgpack is self-delimiting: no two different transcripts share an encoding.
    said = pack(["tailrace ranks", CHANNEL_VERSION, side, rank, purpose, coordinators, ranks])
    return hmac.digest(key, said, hashlib.sha256)
