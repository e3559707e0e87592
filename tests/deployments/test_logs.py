"""One structured line a request, in whatever encoding Serve writes."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from dataclasses import replace
from logging.handlers import MemoryHandler
from typing import Any
from uuid import uuid4

import pytest
from ray._common.formatters import JSONFormatter

from deployments import logs
from deployments.explain.request import ExternalSpan, Leg, Note, RequestRecord
from deployments.logs import MAX_PROMPT_BYTES, RequestLines, adopt_serve, request_line, tenant_of


def record(**changes: Any) -> RequestRecord:
    leg = Leg(0, (0,), asked_s=11.0, granted_s=12.0, submitted_s=12.5, replica="d1")
    values: dict[str, Any] = {
        "request_id": "req_1",
        "endpoint": "chat",
        "received_s": 10.0,
        "received_unix_s": 1_700_000_000.0,
        "gateway": "g1",
        "answer_id": "chatcmpl-1",
        "model": "m",
        "stream": True,
        "read_s": 10.5,
        "tokenised_s": 11.0,
        "first_token_s": 13.0,
        "ended_s": 15.0,
        "outcome": "finished",
        "status": 200,
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "legs": [leg],
    }
    return RequestRecord(**(values | changes))


@pytest.fixture
def lines() -> Any:
    """`(logger, what it wrote)` with a formatter of choice."""
    made: list[logging.Logger] = []

    def make(formatter: logging.Formatter) -> tuple[logging.Logger, io.StringIO]:
        out = io.StringIO()
        handler = logging.StreamHandler(out)
        handler.setFormatter(formatter)
        logger = logging.getLogger(f"tests.lines.{uuid4().hex}")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
        made.append(logger)
        return logger, out

    yield make
    for logger in made:
        logger.handlers.clear()


def test_a_line_has_what_became_of_the_request_and_where_its_time_went() -> None:
    assert request_line(record()) == {
        "request_id": "req_1",
        "answer_id": "chatcmpl-1",
        "tenant": "default",
        "endpoint": "chat",
        "model": "m",
        "tier": "default",
        "stream": True,
        "outcome": "finished",
        "status": 200,
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "received_at": 1_700_000_000.0,
        "duration_ms": 5000.0,
        "ttft_ms": 3000.0,
        "phases_ms": {
            "tokenize": 1000.0,
            "queue": 1000.0,
            "route": 500.0,
            "prefill": 500.0,
            "stream": 2000.0,
        },
        "gateway": "g1",
        "replica": "d1",
    }


TOLD = ("code", "external_ms", "migrations", "notes", "degraded")


def test_what_applies_is_added_and_the_tenant_is_a_hash() -> None:
    told = record(
        salt="secret salt",
        outcome="failed",
        status=503,
        code="no_replicas",
        spans=(ExternalSpan(name="x", kind="tool", before_s=2.0, duration_s=1.5),),
        notes=[
            Note(1.0, "degraded", {"action": "model", "pressure": 4.0}),
            Note(1.5, "routed", {}),
            Note(2.0, "degraded", {"action": "shorten", "pressure": 4.0}),
        ],
        trace=("ab" * 16, "cd" * 8, None, True),
    )
    told.legs.append(told.legs[0])
    told.legs[0] = replace(told.legs[0], end="lost")
    line = request_line(told)
    assert {name: line[name] for name in TOLD} == {
        "code": "no_replicas",
        "external_ms": 1500.0,
        "migrations": 1,
        "notes": ["routed"],
        "degraded": ["model", "shorten"],
    }
    assert line["trace_id"] == "ab" * 16
    assert line["tenant"] == tenant_of("secret salt") != "secret salt"


def test_a_request_that_was_not_understood_has_a_line_too() -> None:
    line = request_line(
        RequestRecord("r", "chat", 1.0, 2.0, ended_s=1.25, outcome="failed", status=400, code="x")
    )
    assert (line["phases_ms"], line["duration_ms"]) == ({"tokenize": 250.0}, 250.0)
    assert "model" not in line


def test_no_prompt_without_asking_and_a_bounded_one_with_it() -> None:
    assert "prompt" not in request_line(record())
    assert len(request_line(record(), b"x" * 100_000)["prompt"]) == MAX_PROMPT_BYTES


@pytest.mark.parametrize("formatter", [JSONFormatter(), logging.Formatter("%(message)s!")])
def test_in_serves_file_a_line_is_one_json_object_whatever_the_encoding(
    lines: Any, formatter: logging.Formatter
) -> None:
    logger, out = lines(formatter)
    (stream,) = logger.handlers
    logger.handlers = [MemoryHandler(1, target=stream)]  # as Serve writes its files
    RequestLines(logger).write(record())
    line = json.loads(out.getvalue())
    assert (line["message"], line["levelname"], line["request_id"]) == (
        *("request", "INFO", "req_1"),
    )
    assert line["phases_ms"]["queue"] == 1000.0
    logger.info("and others go on as they were")
    assert out.getvalue().count("\n") == 2
    assert "and others go on as they were" in out.getvalue()


async def test_lines_of_a_moment_reach_serves_file_in_one_write(
    lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "GATHER_S", 0.01)
    logger, _ = lines(logging.Formatter())
    (stream,) = logger.handlers
    written: list[str] = []
    monkeypatch.setattr(stream, "emit", lambda made: written.append(stream.format(made)))
    logger.handlers = [MemoryHandler(1, target=stream)]
    writer = RequestLines(logger)
    for i in range(3):
        writer.write(record(request_id=f"req_{i}"))
    assert written == []
    while not written:
        await asyncio.sleep(0.005)
    (text,) = written
    assert [json.loads(line)["request_id"] for line in text.split("\n")] == [
        *("req_0", "req_1", "req_2"),
    ]
    writer.write(record(request_id="last"))
    writer.flush()
    assert json.loads(written[1])["request_id"] == "last"


def test_elsewhere_the_message_is_the_json_object(lines: Any) -> None:
    logger, out = lines(logging.Formatter("%(levelname)s %(message)s"))
    RequestLines(logger).write(record())
    level, _, message = out.getvalue().partition(" ")
    assert (level, json.loads(message)["request_id"]) == ("INFO", "req_1")


def test_a_line_that_cannot_be_written_costs_no_answer(
    lines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    logger, _ = lines(logging.Formatter())
    broken = record()
    broken.legs = None  # type: ignore[assignment]
    RequestLines(logger).write(broken)
    assert "the line of a request could not be written" in caplog.text


def test_what_our_modules_log_goes_to_serves_handlers_with_its_level_and_request(
    lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve, out = lines(JSONFormatter())
    monkeypatch.setattr("deployments.logs.SERVE", serve.name)
    own = logging.getLogger("deployments")
    before = own.handlers[:], own.level, own.propagate
    engine = logging.getLogger("engine")
    engine_before = engine.handlers[:], engine.level, engine.propagate
    try:
        own.handlers = []
        adopt_serve()
        adopt_serve()
        named = {"request_id": "req_1"}
        logging.getLogger("deployments.lifecycle.streams").warning("a pull failed", extra=named)
        line = json.loads(out.getvalue())  # exactly one
    finally:
        own.handlers, own.propagate = before[0], before[2]
        own.setLevel(before[1])
        engine.handlers, engine.propagate = engine_before[0], engine_before[2]
        engine.setLevel(engine_before[1])
    assert (line["levelname"], line["message"], line["request_id"]) == (
        *("WARNING", "a pull failed", "req_1"),
    )
