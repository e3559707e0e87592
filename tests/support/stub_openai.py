"""An OpenAI server without a model: real HTTP on a real socket, and a script for what it does.

In a test: `async with StubOpenAI() as stub:` and `stub.url`. As a process of its own, which prints
its address: `python stub_openai.py --ttft 0.02 --itl 0.005`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.text.text_model import load_text

MODEL = "stub"
CONTEXT = 8192
TEXT = load_text("fake")
"""Bytes are tokens, and the template is `user: ...`."""


@dataclass(frozen=True)
class Reply:
    """What the server does with one request. The default is a whole answer at once."""

    status: int = 200
    headers: Sequence[tuple[str, str]] = ()
    ttft_s: float = 0.0
    itl_s: float = 0.0
    tokens: int | None = None
    """None: as many as were asked for."""

    close_after: int | None = None
    """Close the connection after so many tokens."""

    role_first_s: float | None = None
    """Send a chunk with the role alone so long before the first token."""

    cached_tokens: int = 0
    body: bytes | None = None
    """In place of everything, with `content-length`."""

    error: dict[str, Any] = field(
        default_factory=lambda: {"message": "no", "type": "t", "param": None, "code": "slow_down"}
    )


@dataclass
class Seen:
    """One request as it came in."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at_s: float
    """Loop time."""

    left: bool = False
    """The client went before the answer was whole."""


Script = Callable[[Seen], Reply]


class StubOpenAI:
    """The server. `seen` grows with every POST to a generating route."""

    def __init__(self, script: Script = lambda seen: Reply(), *, tokenizes: bool = True) -> None:
        self.script = script
        self.seen: list[Seen] = []
        self._tokenizes = tokenizes
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server
        self._writers: set[asyncio.StreamWriter] = set()
        self.num_connections = 0

    async def __aenter__(self) -> StubOpenAI:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.close()
        await asyncio.sleep(0)

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=4096)
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stall(self, seconds: float) -> None:
        """Write nothing to anybody for so long, as a process that hangs."""
        self._open.clear()
        asyncio.get_running_loop().call_later(seconds, self._open.set)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.num_connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        request, *lines = head.decode().split("\r\n")
        method, path, _ = request.split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines if line)
        }
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        body = json.loads(data) if data else {}
        if method == "GET" and path == "/v1/models":
            model = {"id": MODEL, "object": "model", "max_model_len": CONTEXT}
            _whole(writer, 200, json.dumps({"object": "list", "data": [model]}).encode())
        elif path == "/tokenize" and self._tokenizes:
            _whole(writer, 200, json.dumps(_tokenize(body)).encode())
        elif path in ("/v1/chat/completions", "/v1/completions"):
            seen = Seen(path, headers, body, asyncio.get_running_loop().time())
            self.seen.append(seen)
            return await self._answer(reader, writer, seen)
        else:
            _whole(writer, 404, b'{"error": {"message": "no such route", "code": "not_found"}}')
        return True

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Seen
    ) -> bool:
        reply = self.script(seen)
        loop = asyncio.get_running_loop()
        await self._open.wait()
        if reply.body is not None or reply.status != 200:
            await asyncio.sleep(reply.ttft_s)
            body = reply.body or json.dumps({"error": reply.error}).encode()
            _whole(writer, reply.status, body, reply.headers)
            return True
        tokens = seen.body.get("max_tokens", 16) if reply.tokens is None else reply.tokens
        usage = {
            "prompt_tokens": prompt_tokens(seen),
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens(seen) + tokens,
            "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        }
        chat = seen.path.endswith("chat/completions")
        if not seen.body.get("stream"):
            await asyncio.sleep(reply.ttft_s + reply.itl_s * (tokens - 1))
            text = "x" * tokens
            choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choice |= {"index": 0, "finish_reason": "length"}
            _whole(writer, 200, json.dumps({"choices": [choice], "usage": usage}).encode())
            return True
        extra = "".join(f"{name}: {value}\r\n" for name, value in reply.headers)
        head = (
            f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{extra}"
            "transfer-encoding: chunked\r\n\r\n"
        ).encode()
        began_s = loop.time()
        if reply.role_first_s is not None:
            await asyncio.sleep(max(0.0, reply.ttft_s - reply.role_first_s))
            delta = {"role": "assistant", "content": ""}
            writer.write(head + _event({"choices": [{"index": 0, "delta": delta}]}))
            head = b""
        content = {"delta": {"content": "x"}} if chat else {"text": "x"}
        # Some clients go by what an event says it is.
        kind = {"id": "c", "object": "chat.completion.chunk" if chat else "text_completion"}
        token = _event({**kind, "choices": [{"index": 0, **content, "finish_reason": None}]})
        for i in range(tokens):
            wait_s = began_s + reply.ttft_s + i * reply.itl_s - loop.time()
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            if not self._open.is_set():
                await self._open.wait()
            if writer.is_closing() or reader.at_eof():
                seen.left = True
                return False
            if reply.close_after == i:
                return False
            writer.write(head + token)
            head = b""
        end = {"index": 0, "delta": {}} if chat else {"index": 0, "text": ""}
        last = [{**kind, "choices": [{**end, "finish_reason": "length"}]}]
        if (seen.body.get("stream_options") or {}).get("include_usage"):
            last.append({**kind, "choices": [], "usage": usage})
        writer.write(
            head + b"".join(_event(event) for event in last) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        )
        return True


def prompt_tokens(seen: Seen) -> int:
    """As the server counts them."""
    if "messages" in seen.body:
        return len(TEXT.chat_ids(seen.body["messages"]))
    prompt = seen.body["prompt"]
    return len(TEXT.tokenizer.encode(prompt)) if isinstance(prompt, str) else len(prompt)


def _tokenize(body: dict[str, Any]) -> dict[str, Any]:
    if "messages" in body:
        ids = TEXT.chat_ids(body["messages"])
    else:
        ids = TEXT.tokenizer.encode(body["prompt"])
    strings = [TEXT.tokenizer.token_bytes(token).decode("latin-1") for token in ids]
    return {"count": len(ids), "tokens": ids, "token_strs": strings, "max_model_len": CONTEXT}


def _event(value: dict[str, Any]) -> bytes:
    data = b"data: " + json.dumps(value).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def _whole(
    writer: asyncio.StreamWriter,
    status: int,
    body: bytes,
    headers: Sequence[tuple[str, str]] = (),
) -> None:
    extra = "".join(f"{name}: {value}\r\n" for name, value in headers)
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n{extra}"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft", type=float, default=0.02)
    parser.add_argument("--itl", type=float, default=0.005)
    options = parser.parse_args()
    stub = StubOpenAI(lambda seen: Reply(ttft_s=options.ttft, itl_s=options.itl))
    await stub.start(options.port)
    print(stub.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
