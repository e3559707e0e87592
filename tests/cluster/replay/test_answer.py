from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.replay.answer import Answer


def sse(*events, end="\n\n") -> bytes:
    return b"".join(f"data: {json.dumps(e)}{end}".encode() for e in events)


def chat(delta, finish=None, **more):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 4},
}
STREAM = sse(
    chat({"role": "assistant", "content": ""}),
    chat({"content": "Hé"}),
    chat({"content": "llo"}),
    chat({}, "stop"),
    {"choices": [], "usage": USAGE},
)


def read(*parts: tuple[bytes, float]) -> Answer:
    answer = Answer(keep_text=True)
    for body, at_s in parts:
        answer.feed(body, at_s)
    answer.close()
    return answer


def test_the_role_chunk_is_not_the_first_token():
    answer = read(
        (sse(chat({"role": "assistant", "content": ""})), 1.0),
        (sse(chat({"content": None})), 2.0),
        (sse(chat({"content": "a"})), 3.0),
    )
    assert answer.chunk_times == [3.0]


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
    ],
)
def test_reasoning_and_tool_calls_are_tokens(delta):
    assert read((sse(chat(delta)), 1.0)).chunk_times == [1.0]


@given(cuts=st.sets(st.integers(1, len(STREAM) - 1)))
def test_a_stream_reads_the_same_however_it_is_cut(cuts):
    answer, last = Answer(keep_text=True), 0
    for i, cut in enumerate([*sorted(cuts), len(STREAM)]):
        answer.feed(STREAM[last:cut], float(i))
        last = cut
    answer.feed(b"data: [DONE]\n\n", 99.0)
    answer.close()
    assert (answer.text, answer.finish_reason, answer.done) == ("Héllo", "stop", True)
    assert (answer.input_tokens, answer.output_tokens, answer.cached_tokens) == (9, 3, 4)
    assert len(answer.chunk_times) == 2
    assert answer.error is None


def test_other_servers_ways_are_understood():
    body = b": ping\r\n\r\nevent: message\r\ndata:" + json.dumps(chat({"content": "a"})).encode()
    body += b"\r\n\r\n" + sse({"id": "x"}, {"choices": None}, end="\r\n\r\n") + b"data: [DONE]"
    answer = read((body, 1.0))
    assert (answer.text, answer.done, answer.error) == ("a", True, None)


def test_tokens_are_counted_by_chunk_where_the_server_counts_as_it_goes():
    def usage(n):
        return {"usage": {"prompt_tokens": 1, "completion_tokens": n}}

    answer = read(
        (sse(chat({"role": "assistant", "content": ""}, **usage(1))), 1.0),
        (sse(chat({"content": "a"}, **usage(1))), 1.0),
        (sse(chat({"content": "b"}, **usage(4))), 2.0),
        (sse(chat({}, "stop", **usage(5))), 2.0),
    )
    assert answer.chunk_tokens == [1, 4]


def test_an_error_in_the_stream_or_in_place_of_it_has_code_and_message():
    answer = read((sse({"error": {"message": "gone", "code": "x", "type": "t"}}), 1.0))
    assert answer.error == ("x", "gone")
    for body, expected in (
        (
            b'{"error": {"message": "slow", "type": "rate_limit_error"}}',
            ("rate_limit_error", "slow"),
        ),
        (b'{"detail": "no"}', (None, "no")),
        (b"<html>", (None, "<html>")),
        (b"", (None, "status 502")),
    ):
        answer = Answer()
        answer.whole(body, 502)
        assert answer.error == expected


def test_a_whole_answer():
    answer = Answer()
    body = {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": USAGE}
    answer.whole(json.dumps(body).encode(), 200)
    answer.close()
    assert (answer.text, answer.finish_reason, answer.done) == ("hi", "stop", True)
    assert answer.output_tokens == 3
