"""The error tree. Every message carries the value, the limit and the way out.

EngineError
├── ConfigError        the operator must act; raised at start-up or when a configuration is applied
├── RequestError       the client must act                                             (400, 404)
├── Overloaded         try again later                                                 (429, 503)
└── TransferError      KV never arrived, or arrived wrong; recompute or refuse, never guess  (503)
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of everything Tailrace raises on purpose."""


class ConfigError(EngineError):
    """A configuration that cannot work. Start-up stops; a live change is refused whole."""


class RequestError(EngineError):
    """A request that can never succeed as it is.

    `code` is the OpenAI error code (`context_length_exceeded`, `model_not_found`, ...), `param` the
    field of the body at fault, `status` the HTTP status.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "invalid_value",
        param: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.param = param
        self.status = status


class Overloaded(EngineError):
    """No room now. `retry_after_s` is the honest estimate of when to try again."""

    def __init__(
        self, message: str, *, code: str = "server_is_overloaded", retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class TransferError(EngineError):
    """KV is missing, late or wrong. `stage` names where: offer, chunk, checksum, final, lease."""

    def __init__(self, message: str, *, stage: str) -> None:
        super().__init__(message)
        self.stage = stage
