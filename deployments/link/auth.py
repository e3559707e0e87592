"""Who is at the other end: mutual challenge and response with the cluster's secret (HMAC-SHA256).

```
client                                    server
HELLO version role id nonce  ──────────►
                             ◄──────────  HELLO version role id nonce
PROOF hmac(client, all of it) ─────────►  checks
checks                       ◄──────────  PROOF hmac(server, all of it)
```

The client proves first, so an open port answers strangers with a nonce and nothing else. Both
proofs cover both sides' version, role, id and nonce, and name the side that speaks, so neither can
be replayed or reflected. The bytes after the handshake are neither encrypted nor signed: the links
run inside the cluster's network, and the secret keeps out whoever can merely reach a port.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Any

from deployments.link.messages import PROTOCOL_VERSION, Kind
from deployments.link.wire import CloseCode, WireError, pack
from engine.errors import ConfigError

MAX_HANDSHAKE_FRAME_BYTES = 2048
_NONCE_BYTES = 32
_MIN_SECRET_BYTES = 16
_MAX_NAME_CHARS = 200


@dataclass(frozen=True, slots=True)
class Peer:
    """What the handshake established about the other side."""

    role: str
    peer_id: str


class Handshake:
    """One side of one handshake, without I/O: messages in, messages out.

    `opening()` is what to send first (nothing, for the server). Each received message goes to
    `answer`, which returns what to send back. `peer` is set once the other side is proven.
    """

    def __init__(self, secret: bytes, role: str, own_id: str, *, client: bool) -> None:
        check_secret(secret)
        self.peer: Peer | None = None
        self._secret = secret
        self._client = client
        self._own = _Hello(PROTOCOL_VERSION, role, own_id, secrets.token_bytes(_NONCE_BYTES))
        self._theirs: _Hello | None = None

    def opening(self) -> list[list[Any]]:
        return [self._own.to_wire()] if self._client else []

    def answer(self, message: list[Any]) -> list[list[Any]]:
        """Raises `WireError` when the peer is not who it must be, without a trace of the secret."""
        if self._theirs is None:
            self._theirs = _Hello.from_wire(message)
            return [self._proof(self._client)] if self._client else [self._own.to_wire()]
        if message[0] == Kind.BYE:
            raise _refused(message)
        theirs = self._theirs
        if len(message) != 2 or message[0] != Kind.PROOF or type(message[1]) is not bytes:
            raise WireError(CloseCode.MALFORMED, "expected a PROOF frame in the handshake")
        if not hmac.compare_digest(message[1], self._digest(not self._client)):
            raise WireError(
                CloseCode.WRONG_SECRET,
                f"{theirs.role} {theirs.peer_id!r} does not hold this cluster's link secret",
            )
        self.peer = Peer(theirs.role, theirs.peer_id)
        return [] if self._client else [self._proof(self._client)]

    def _proof(self, client: bool) -> list[Any]:
        return [Kind.PROOF, self._digest(client)]

    def _digest(self, client: bool) -> bytes:
        assert self._theirs is not None
        first, second = self._own, self._theirs
        if not self._client:
            first, second = second, first
        # msgpack is self-delimiting: no two different transcripts share an encoding.
        transcript = pack(
            ["tailrace link", "client" if client else "server", first.fields(), second.fields()]
        )
        return hmac.digest(self._secret, transcript, hashlib.sha256)


def check_secret(secret: bytes) -> None:
    """Raises ConfigError for a secret too short to keep anyone out."""
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(
            f"the link secret has {len(secret)} bytes: {_MIN_SECRET_BYTES} or more are needed, "
            "for example `openssl rand -hex 32`"
        )


@dataclass(frozen=True, slots=True)
class _Hello:
    version: int
    role: str
    peer_id: str
    nonce: bytes

    def fields(self) -> list[Any]:
        return [self.version, self.role, self.peer_id, self.nonce]

    def to_wire(self) -> list[Any]:
        return [Kind.HELLO, *self.fields()]

    @classmethod
    def from_wire(cls, message: list[Any]) -> _Hello:
        """Kind and version keep their places in every version: a stranger's can be named."""
        if message[0] == Kind.BYE:
            raise _refused(message)
        if len(message) < 2 or message[0] != Kind.HELLO or type(message[1]) is not int:
            raise WireError(CloseCode.MALFORMED, "expected a HELLO frame first")
        if message[1] != PROTOCOL_VERSION:
            raise WireError(
                CloseCode.WRONG_VERSION,
                f"the peer speaks version {message[1]}, this side {PROTOCOL_VERSION}: run the same "
                "release everywhere",
            )
        if len(message) != 5:
            raise WireError(CloseCode.MALFORMED, "a HELLO frame has five items")
        _, version, role, peer_id, nonce = message
        if (
            type(role) is not str
            or type(peer_id) is not str
            or len(role) > _MAX_NAME_CHARS
            or not 0 < len(peer_id) <= _MAX_NAME_CHARS
            or type(nonce) is not bytes
            or len(nonce) != _NONCE_BYTES
        ):
            raise WireError(CloseCode.MALFORMED, "role, id or nonce of a HELLO frame is not valid")
        return cls(version, role, peer_id, nonce)


def bye(code: CloseCode, detail: str) -> list[Any]:
    return [Kind.BYE, code.value, detail]


def read_bye(message: list[Any]) -> tuple[CloseCode | None, str]:
    """Code and detail of a BYE; None for a code this side does not know."""
    code = message[1] if len(message) > 1 else None
    detail = message[2] if len(message) > 2 and isinstance(message[2], str) else ""
    known = {value.value: value for value in CloseCode}
    return known.get(code) if isinstance(code, str) else None, detail[:500]


def _refused(message: list[Any]) -> WireError:
    code, detail = read_bye(message)
    return WireError(code or CloseCode.PEER_CLOSED, detail)
