"""Every error body has four keys: `{"error": {"message", "type", "param", "code"}}`.

Statuses follow what OpenAI's clients do with them: they retry 408, 409, 429 and 5xx, after
`retry-after-ms` or `retry-after` seconds, not at all if that is above 120 s, and obey
`x-should-retry`.

| raised                             | status  | a client's retry                               |
|------------------------------------|---------|------------------------------------------------|
| RequestError                       | its own | none                                           |
| Overloaded, our queue              | 429     | after `retry-after`                            |
| LimitExceeded                      | 429     | after `retry-after`; none if it never fits     |
| Overloaded, nobody to serve it     | 503     | after `retry-after`                            |
| Overloaded, `replicas_lost`        | 503     | none: it may be what ends the replicas         |
| TransferError                      | 503     | after `retry-after`                            |
| TimedOut before the first token    | 504     | yes: another moment may be quicker             |
| TimedOut while tokens were coming  | 504     | none (`x-should-retry: false`): as long again  |
| anything else                      | 500     | yes                                            |
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import orjson

from deployments.gateway.limits.quotas import LimitExceeded
from engine.errors import ConfigError, EngineError, Overloaded, RequestError, TransferError

logger = logging.getLogger(__name__)

Headers = tuple[tuple[bytes, bytes], ...]

_OVERLOADED = {
    "queue_full": 429,
    "queue_timeout": 429,
    "rate_limit_exceeded": 429,
    "slow_down": 429,
    "insufficient_quota": 429,
    "deadline_exceeded": 504,
}
"""Status by code of `Overloaded`: 429 for "you, or all of you, ask too much", 504 where the
client's own deadline passed in another process a moment before it did here. The others are 503."""

_HOPELESS = frozenset({"replicas_lost"})
"""Codes of `Overloaded` where the same request is not to come again, however long it waits."""

_NEVER: Headers = ((b"x-should-retry", b"false"),)

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class TimedOut(EngineError):
    """The client's patience, or the gateway's limit, ran out before the answer was whole."""

    def __init__(self, message: str, *, answering: bool) -> None:
        super().__init__(message)
        self.answering = answering
        """Tokens had been coming."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it goes to the client."""

    status: int
    message: str
    type: str
    param: str | None
    code: str | None
    headers: Headers = ()

    def body(self) -> bytes:
        return orjson.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    def sse_event(self) -> bytes:
        """The same for a stream whose 200 is already sent."""
        return b"data: " + self.body() + b"\n\n"


def refusal(
    status: int,
    message: str,
    code: str | None,
    *,
    param: str | None = None,
    headers: Headers = (),
) -> Failure:
    """A failure with the type that belongs to its status."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return Failure(status, message, kind, param, code, headers)


def describe(error: BaseException, request_id: str) -> Failure:
    """What the client is told. What nobody meant to raise is logged here, with the request's id."""
    if isinstance(error, RequestError):
        return refusal(error.status, str(error), error.code, param=error.param)
    if isinstance(error, LimitExceeded):
        again = retry_after(error.retry_after_s)
        headers = _NEVER if error.hopeless else again
        return refusal(429, str(error), error.code, headers=(*headers, *error.headers))
    if isinstance(error, Overloaded):
        status = _OVERLOADED.get(error.code, 503)
        again = retry_after(error.retry_after_s)
        headers = _NEVER if error.code in _HOPELESS else again
        return refusal(status, str(error), error.code, headers=headers)
    if isinstance(error, TransferError):
        return refusal(503, str(error), "kv_transfer_failed", headers=retry_after(1.0))
    if isinstance(error, TimedOut):
        headers = _NEVER if error.answering else ()
        return refusal(504, str(error), "request_timeout", headers=headers)
    logger.error("request %s failed", request_id, exc_info=error)
    if isinstance(error, EngineError) and not isinstance(error, ConfigError):
        return refusal(500, f"{error} (request {request_id})", "internal_error")
    return refusal(
        500,
        f"the server failed on this request; its log names the cause under {request_id}",
        "internal_error",
    )


def retry_after(seconds: float) -> Headers:
    """Both headers that clients read. `retry-after` is whole seconds, by RFC 9110."""
    seconds = max(0.0, seconds)
    return (
        (b"retry-after", b"%d" % max(1, math.ceil(seconds))),
        (b"retry-after-ms", b"%d" % max(1, math.ceil(seconds * 1000))),
    )
