"""What clients tell of time outside the model: read, bounded, placed before the request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deployments.explain.request import ExternalSpan
from deployments.gateway.spans import (
    MAX_HEADER_BYTES,
    MAX_SPANS,
    Extension,
    Span,
    asks_to_explain,
    spans_of_header,
    told_by,
)
from engine.errors import RequestError

NOW = 1_700_000_000.0


def header(*spans: dict[str, Any]) -> bytes:
    return json.dumps(spans).encode()


def test_header_and_body_are_joined_and_either_asks_to_explain() -> None:
    spans, explain = told_by(
        {
            b"x-tailrace-spans": header(
                {"name": "search", "kind": "retrieval", "start_ms_ago": 420, "duration_ms": 400}
            )
        },
        Extension.model_validate_json(
            '{"spans": [{"name": "sql", "kind": "tool", "duration_ms": 30}], "explain": true}'
        ),
        NOW,
    )
    assert explain
    assert spans == (
        ExternalSpan(name="search", kind="retrieval", before_s=0.42, duration_s=0.4),
        ExternalSpan(name="sql", kind="tool", before_s=0.03, duration_s=0.03),
    )


def test_a_start_in_unix_seconds_is_placed_and_what_reaches_past_the_arrival_is_cut() -> None:
    span = Span(name="a", start=NOW - 2.0, duration_ms=5000.0)
    assert span.external(NOW) == ExternalSpan(name="a", kind="other", before_s=2.0, duration_s=2.0)


@pytest.mark.parametrize("start", [NOW + 1.0, NOW - 90_000.0])
def test_a_start_after_the_arrival_or_days_before_it_is_refused(start: float) -> None:
    with pytest.raises(RequestError, match=r"span 'a' began .* correct start or the clock"):
        Span(name="a", start=start, duration_ms=1.0).external(NOW)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"nonsense", ["x-tailrace-spans", "JSON"]),
        (b"{}", ["the list"]),
        (header({"name": "a"}), ["[0].duration_ms", "required"]),
        (header({"name": "", "duration_ms": 1}), ["[0].name", "at least 1"]),
        (header({"name": "a" * 65, "duration_ms": 1}), ["[0].name", "at most 64"]),
        (header({"name": "a\n", "duration_ms": 1}), ["[0].name"]),
        (header({"name": "a", "duration_ms": -1}), ["[0].duration_ms"]),
        (header({"name": "a", "duration_ms": 1e12}), ["[0].duration_ms"]),
        (header({"name": "a", "duration_ms": "1"}), ["[0].duration_ms"]),
        (header({"name": "a", "kind": "model", "duration_ms": 1}), ["[0].kind", "retrieval"]),
        (header({"name": "a", "duration_ms": 1, "text": "x"}), ["[0].text"]),
        (
            header({"name": "a", "duration_ms": 1, "start": 1, "start_ms_ago": 1}),
            ["start and start_ms_ago exclude each other"],
        ),
        (header(*({"name": "a", "duration_ms": 1},) * (MAX_SPANS + 1)), [f"{MAX_SPANS}"]),
        (b"[" + b" " * MAX_HEADER_BYTES + b"]", [f"at most {MAX_HEADER_BYTES}"]),
    ],
)
def test_a_header_that_cannot_be_meant_is_refused_with_what_is_wrong(
    value: bytes, words: list[str]
) -> None:
    with pytest.raises(RequestError) as refused:
        spans_of_header(value)
    assert refused.value.param == "x-tailrace-spans"
    for word in words:
        assert word in str(refused.value)


def test_header_and_body_share_one_limit() -> None:
    body = Extension.model_validate({"spans": [{"name": "a", "duration_ms": 1}] * MAX_SPANS})
    one = {b"x-tailrace-spans": header({"name": "a", "duration_ms": 1})}
    with pytest.raises(RequestError, match=rf"{MAX_SPANS + 1} spans .* at most {MAX_SPANS}"):
        told_by(one, body, NOW)


def test_only_yes_and_no_ask_or_do_not_ask() -> None:
    assert [asks_to_explain(word) for word in (b"1", b"TRUE", b"0", b"")] == [
        *(True, True, False, False)
    ]
    with pytest.raises(RequestError, match="neither 1 nor 0"):
        asks_to_explain(b"maybe")


async def test_a_request_with_a_bad_span_gets_400_and_a_good_one_is_counted(gateway: Any) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    bad = await gateway.post("/v1/chat/completions", body | {"tailrace": {"spans": [{"name": 1}]}})
    assert (bad.status, bad.error["param"]) == (400, "tailrace.spans[0].name")
    bad = await gateway.post("/v1/chat/completions", body, {"x-tailrace-spans": "[1]"})
    assert (bad.status, bad.error["param"]) == (400, "x-tailrace-spans")

    spans = [{"name": "search", "kind": "retrieval", "start_ms_ago": 700, "duration_ms": 600}]
    good = await gateway.post("/v1/chat/completions", body | {"tailrace": {"spans": spans}})
    assert good.status == 200
    page = gateway.metrics.render()
    page = page.decode() if isinstance(page, bytes) else page
    labels = 'model="tiny",tier="default",kind="retrieval"'
    assert f"tailrace_external_span_seconds_sum{{{labels}}} 0.6" in page
    assert f"tailrace_external_span_seconds_count{{{labels}}} 1" in page
