"""Structured logs: one line a request, and every line of ours in Serve's own log.

In a replica, records of `deployments` and `engine` go to Serve's logger `ray.serve` and from there
into the replica's file under `logs/serve/` of Ray's session directory, as JSON unless the
deployment's `logging_config` says otherwise. Elsewhere (tests, the command) nothing is changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from typing import Any

import orjson

from deployments.explain.request import NOBODY, RequestRecord

SERVE = "ray.serve"
REQUESTS = "ray.serve.tailrace"
"""Below Serve's logger, so that its handlers get the lines."""

MAX_PROMPT_BYTES = 65_536
GATHER_S = 0.1


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
    if salt == NOBODY:
        return salt
    return hashlib.sha256(salt.encode()).hexdigest()[:12] if salt else "default"


def request_line(record: RequestRecord, prompt: bytes | None = None) -> dict[str, Any]:
    """The fields of a request's line. Times in milliseconds; absent fields do not apply.

    `prompt` is the request's body, for those who want prompts in their logs.
    """
    line: dict[str, Any] = {
        "request_id": record.request_id,
        "tenant": tenant_of(record.salt),
        "endpoint": record.endpoint,
        "outcome": record.outcome,
        "status": record.status,
        "received_at": record.received_unix_s,
        "duration_ms": _ms(record.duration_s),
        "phases_ms": {name: _ms(seconds) for name, seconds in record.phases()},
    }
    if record.model:
        line["answer_id"] = record.answer_id
        line["model"] = record.model
        line["tier"] = record.tier
        line["stream"] = record.stream
        line["prompt_tokens"] = record.prompt_tokens
        line["completion_tokens"] = record.completion_tokens
        line["cached_tokens"] = record.cached_tokens
    if record.first_token_s:
        line["ttft_ms"] = _ms(record.first_token_s - record.received_s)
    if record.code:
        line["code"] = record.code
    if record.gateway:
        line["gateway"] = record.gateway
    legs = record.legs
    if legs:
        line["replica"] = legs[-1].replica
        if len(legs) > 1:
            line["migrations"] = sum(leg.end == "lost" for leg in legs)
    if record.spans:
        line["external_ms"] = _ms(sum(span.duration_s for span in record.spans))
    degraded = [note.detail["action"] for note in record.notes if note.kind == "degraded"]
    if degraded:
        line["degraded"] = degraded
    others = [note.kind for note in record.notes if note.kind != "degraded"]
    if others:
        line["notes"] = others
    if record.trace is not None:
        line["trace_id"] = record.trace[0]
    if prompt is not None:
        line["prompt"] = prompt[:MAX_PROMPT_BYTES].decode("utf-8", "replace")
    return line


class _Line(str):
    """A message that is a whole line already."""

    __slots__ = ()


class _Whole(logging.Formatter):
    """Leaves whole lines as they are: Serve's formatters, which work on each line twice and write
    down worker, node, actor and task, cost several times what the line does."""

    def __init__(self, inner: logging.Formatter) -> None:
        super().__init__()
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        message = record.msg
        return message if type(message) is _Line else self._inner.format(record)


class RequestLines:
    """Writes the lines: JSON objects into Serve's file, whatever encoding that has.

    Where a loop runs they are gathered for `GATHER_S`: a record of the logging package, and the
    handlers that it passes, cost several times what a line does.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger(REQUESTS)
        self._gathered: list[str] = []
        self._due: asyncio.TimerHandle | None = None

    def write(self, record: RequestRecord, prompt: bytes | None = None) -> None:
        """Never raises: a line that cannot be written must not cost the answer."""
        try:
            if not self._logger.isEnabledFor(logging.INFO):
                return
            head = {"timestamp_ns": time.time_ns(), "levelname": "INFO", "message": "request"}
            self._gathered.append(orjson.dumps(head | request_line(record, prompt)).decode())
        except Exception:
            logging.getLogger(__name__).exception("the line of a request could not be written")
            return
        if self._due is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                self.flush()
            else:
                self._due = loop.call_later(GATHER_S, self.flush)

    def flush(self) -> None:
        """Write what was gathered. Never raises. Call at the end of the process."""
        if self._due is not None:
            self._due.cancel()
            self._due = None
        lines, self._gathered = self._gathered, []
        try:
            # Only Serve's file is known to take several lines in one record.
            for line in ["\n".join(lines)] if _prepare(self._logger) and lines else lines:
                self._logger.handle(_record(self._logger.name, _Line(line)))
        except Exception:
            logging.getLogger(__name__).exception("the lines of requests could not be written")


_BLANK = logging.LogRecord(REQUESTS, logging.INFO, __file__, 0, "", None, None)
_BLANK.skip_context_filter = True  # of Serve's filters, which look up the context
_BLANK.log_to_stderr = False  # where Serve would format it once more


def _record(name: str, line: _Line) -> logging.LogRecord:
    """A record of this moment. Its own constructor looks up file, thread and process each time."""
    made = logging.LogRecord.__new__(logging.LogRecord)
    made.__dict__.update(_BLANK.__dict__)
    made.name, made.msg, made.created = name, line, time.time()
    return made


def _prepare(logger: logging.Logger) -> bool:
    """Have the files that this logger's lines reach take whole ones; False if it reaches none.
    Serve replaces its handlers when it is configured anew."""
    found = False
    seen: logging.Logger | None = logger
    while seen is not None:
        for handler in seen.handlers:
            target: logging.Handler | None = getattr(handler, "target", None)
            if target is None:
                continue
            found = True
            if type(target.formatter) is not _Whole:
                target.setFormatter(_Whole(target.formatter or logging.Formatter()))
        seen = seen.parent if seen.propagate else None
    return found


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
