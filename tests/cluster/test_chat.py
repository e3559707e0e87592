from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cluster.chat import Answer, ChatClient
from cluster.errors import ClusterError, NotRunning
from engine.errors import Overloaded, RequestError

USAGE = {
    "prompt_tokens": 20,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 16},
}
HELLO = [{"role": "user", "content": "Hello"}]


def content(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}, "finish_reason": finish}]}


def sse(*events: Any, done: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n" if done else ""]).encode()


class Server:
    """An OpenAI-compatible server in this process."""

    def __init__(self, answer: httpx.Response | Exception) -> None:
        self.answer = answer
        self.seen: list[Any] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        self.seen.append(json.loads(request.content))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def talk(
    server: Callable[[httpx.Request], httpx.Response], show: Callable[[str], None] | None = None
) -> tuple[Answer, list[str]]:
    """One answer. The clock counts whole seconds, one a look."""
    ticks = itertools.count()
    client = ChatClient(
        "http://x/v1", transport=httpx.MockTransport(server), clock=lambda: float(next(ticks))
    )
    pieces: list[str] = []
    try:
        return client.ask("m", HELLO, max_tokens=5, show=show or pieces.append), pieces
    finally:
        client.close()


def test_an_answer_is_shown_in_pieces_with_what_it_cost():
    body = sse(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        content("Good "),
        content("day"),
        content("!", "stop"),
        {"choices": [], "usage": USAGE},
    )
    answer, pieces = talk(Server(httpx.Response(200, content=body)))
    assert pieces == ["Good ", "day", "!"]
    # Sent at 0, pieces at 1, 2 and 3: two tokens after the first, over two seconds.
    assert answer == Answer(
        text="Good day!",
        finish_reason="stop",
        ttft_s=1.0,
        tokens_per_s=1.0,
        prompt_tokens=20,
        completion_tokens=3,
        cached_tokens=16,
    )
    assert answer.summary() == "TTFT 1000 ms, 1.0 tokens/s, 3 tokens, prompt 20 (16 cached)"


def test_the_request_streams_and_asks_for_usage():
    server = Server(httpx.Response(200, content=sse(content("x", "length"))))
    answer, _ = talk(server)
    assert server.seen == [
        {
            "model": "m",
            "messages": HELLO,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_completion_tokens": 5,
        }
    ]
    assert answer.summary() == "TTFT 1000 ms, cut at the limit"


def test_ctrl_c_keeps_what_was_said_and_closes_the_connection():
    closed: list[bool] = []

    class Endless(httpx.SyncByteStream):
        def __iter__(self) -> Iterator[bytes]:
            yield sse(content("once"), done=False)
            yield sse(content("more"), done=False)
            raise AssertionError("read on after it was cancelled")

        def close(self) -> None:
            closed.append(True)

    shown: list[str] = []

    def interrupt(text: str) -> None:
        shown.append(text)
        raise KeyboardInterrupt

    answer, _ = talk(Server(httpx.Response(200, stream=Endless())), interrupt)
    assert answer.text == "once"
    assert answer.finish_reason is None
    assert answer.summary().endswith("cancelled")
    assert shown == ["once"]
    assert closed == [True]


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, RequestError), (404, RequestError), (429, Overloaded), (503, Overloaded)],
)
def test_a_refusal_is_its_typed_error_with_the_servers_words(status: int, kind: type[Exception]):
    refusal = {"error": {"message": "too long: 9 of 8", "code": "c", "param": "p", "type": "t"}}
    with pytest.raises(kind, match="too long: 9 of 8"):
        talk(Server(httpx.Response(status, json=refusal)))


def test_a_refusal_that_is_no_json_is_still_an_error():
    with pytest.raises(ClusterError, match=r"the server failed \(500\): Internal Server Error"):
        talk(Server(httpx.Response(500, text="Internal Server Error")))


def test_an_error_in_the_middle_of_a_stream_is_raised():
    body = sse(content("Go"), {"error": {"message": "KV never arrived"}}, done=False)
    with pytest.raises(ClusterError, match="KV never arrived"):
        talk(Server(httpx.Response(200, content=body)))


def test_a_stream_without_its_end_is_not_taken_for_an_answer():
    with pytest.raises(ClusterError, match="broke off before its end"):
        talk(Server(httpx.Response(200, content=sse(content("Go"), done=False))))


def test_a_broken_connection_is_named():
    with pytest.raises(ClusterError, match="the answer broke off"):
        talk(Server(httpx.RemoteProtocolError("peer closed connection")))


def test_nobody_there_says_how_to_start():
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    client = ChatClient("http://x", transport=httpx.MockTransport(refuse))
    with pytest.raises(NotRunning, match="start it with `tailrace up`, or give --url"):
        client.models()
    client.close()


def test_a_server_of_another_kind_is_named():
    client = ChatClient(
        "http://x", transport=httpx.MockTransport(lambda _: httpx.Response(200, json=[1]))
    )
    with pytest.raises(ClusterError, match="not an OpenAI-compatible list of models"):
        client.models()
    client.close()
