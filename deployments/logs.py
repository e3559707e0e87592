"""Structured logs: one line a request, and every line of ours in Serve's own log.

In a replica, records of `deployments` and `engine` go to Serve's logger `ray.serve` and from there
into the replica's file under `logs/serve/` of Ray's session directory, in the encoding that the
deployment's `logging_config` asks for. Elsewhere (tests, the command) nothing is changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

from deployments.explain.request import RequestRecord

SERVE = "ray.serve"
REQUESTS = "ray.serve.tailrace"
"""Below Serve's logger, so that its handlers get the lines."""

MAX_PROMPT_BYTES = 65_536


class _ToServe(logging.Handler):
    """Hands records to Serve's handlers, which Serve replaces when it configures itself anew."""

    def emit(self, record: logging.LogRecord) -> None:
        serve = logging.getLogger(SERVE)
        if record.levelno >= serve.level:
            serve.handle(record)


def adopt_serve() -> None:
    """Send what `deployments` and `engine` log where Serve logs. Call in a replica; idempotent."""
    for name in ("deployments", "engine"):
        own = logging.getLogger(name)
        if not any(isinstance(handler, _ToServe) for handler in own.handlers):
            own.addHandler(_ToServe())
            own.setLevel(logging.INFO)
            own.propagate = False


def tenant_of(salt: str) -> str:
    """A tenant's name in logs: a hash of its salt, `default` without one."""
    return hashlib.sha256(salt.encode()).hexdigest()[:12] if salt else "default"


def request_line(record: RequestRecord, prompt: bytes | None = None) -> dict[str, Any]:
    """The fields of a request's line. Times in milliseconds; absent fields do not apply.

    `prompt` is the request's body, for those who want prompts in their logs.
    """
    start_s = record.received_s
    line: dict[str, Any] = {
        "event": "request",
        "request_id": record.request_id,
        "answer_id": record.answer_id,
        "tenant": tenant_of(record.salt),
        "endpoint": record.endpoint,
        "model": record.model,
        "tier": record.tier,
        "stream": record.stream,
        "outcome": record.outcome,
        "status": record.status,
        "code": record.code,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "cached_tokens": record.cached_tokens,
        "received_at": record.received_unix_s,
        "duration_ms": _ms(record.duration_s),
        "ttft_ms": _ms(record.first_token_s - start_s) if record.first_token_s else None,
        "phases_ms": {name: _ms(seconds) for name, seconds in record.phases()},
        "external_ms": _ms(sum(span.duration_s for span in record.spans)) if record.spans else None,
        "gateway": record.gateway,
        "replica": record.legs[-1].replica if record.legs else "",
        "migrations": sum(leg.end == "lost" for leg in record.legs) or None,
        "notes": [note.kind for note in record.notes] or None,
        "trace_id": record.trace[0] if record.trace is not None else None,
    }
    line = {name: value for name, value in line.items() if value is not None and value != ""}
    if prompt is not None:
        line["prompt"] = prompt[:MAX_PROMPT_BYTES].decode("utf-8", "replace")
    return line


class RequestLines:
    """Writes the lines. In JSON-encoded logs the fields are the record's own, under `request`; in
    text the line's message is the JSON object."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger(REQUESTS)

    def write(self, record: RequestRecord, prompt: bytes | None = None) -> None:
        """Never raises: a line that cannot be written must not cost the answer."""
        try:
            if not self._logger.isEnabledFor(logging.INFO):
                return
            line = request_line(record, prompt)
            if _encodes_json(self._logger):
                extra = {"request_id": record.request_id, "request": line}
                self._logger.info("request", extra=extra)
            else:
                self._logger.info(json.dumps(line))
        except Exception:
            logging.getLogger(__name__).exception("the line of a request could not be written")


def _encodes_json(logger: logging.Logger) -> bool:
    """Whether the handlers that get this logger's records write JSON already."""
    seen: logging.Logger | None = logger
    while seen is not None:
        for handler in seen.handlers:
            target = getattr(handler, "target", None) or handler
            if type(getattr(target, "formatter", None)).__name__ == "JSONFormatter":
                return True
        seen = seen.parent if seen.propagate else None
    return False


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
