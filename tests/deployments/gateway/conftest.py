"""A gateway on a loopback socket, in this process, over a backend that plays a script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import openai
import pytest
import uvicorn

from deployments.explain.request import PromptJournal
from deployments.gateway.api import create_app
from deployments.gateway.backend import ANYWHERE, ModelInfo, Place
from deployments.gateway.config import GatewayConfig
from deployments.gateway.state import GatewayState
from deployments.link.messages import StreamEvent, TokenLogprob, Usage
from deployments.metrics import Registry
from engine.errors import RequestError
from engine.request import FinishReason, Request
from engine.text.text_model import load_text

Step = Any
"""Events to hand out together, an exception to raise, or a coroutine function to wait on."""

Script = Callable[[Request, int], list[Step]]


def spell(request: Request, n: int, *, words: str = "the quick brown fox") -> list[Step]:
    """Every choice says `words`, one word and token a step, cut at max_tokens."""
    tokens = [w if i == 0 else f" {w}" for i, w in enumerate(words.split())]
    count = min(len(tokens), request.params.max_tokens)
    reason = FinishReason.STOP if count == len(tokens) else FinishReason.LENGTH
    usage = Usage(
        prompt_tokens=len(request.prompt_ids), completion_tokens=count * n, cached_tokens=2
    )
    steps: list[Step] = []
    for t in range(count):
        events: list[StreamEvent] = []
        for choice in range(n):
            event = StreamEvent(1, choice, tokens[t], [1000 + t])
            if request.params.logprobs is not None:
                top = [(1000 + t, tokens[t].encode(), -0.5), (7, b"\xe2\x80", -2.0)]
                event.logprobs = [
                    TokenLogprob(
                        1000 + t, tokens[t].encode(), -0.5, tuple(top[: request.params.logprobs])
                    )
                ]
            if t == count - 1:
                event.finish = reason
                event.usage = usage if choice == n - 1 else None
            events.append(event)
        steps.append(events)
    return steps


@dataclass
class FakeStream:
    backend: FakeBackend
    steps: list[Step]
    replica: str = "decode-1"
    closed: int = 0
    ended: bool = False

    async def __aiter__(self) -> AsyncIterator[list[StreamEvent]]:
        for step in self.steps:
            await asyncio.sleep(0)
            if isinstance(step, BaseException):
                raise step
            if isinstance(step, list):
                yield cast("list[StreamEvent]", step)
            else:
                await step()
        self.ended = True

    async def aclose(self) -> None:
        self.closed += 1
        self.backend.closed.set()


@dataclass
class FakeBackend:
    script: Script = spell
    infos: dict[str, ModelInfo] = field(default_factory=dict)
    before_open: Callable[[], Any] | None = None
    opened: list[tuple[str, Request, int, float | None]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    open_cancelled: bool = False

    def serve(self, name: str, **changes: Any) -> None:
        values: dict[str, Any] = {
            "root": "fake",
            "created": 1_700_000_000,
            "max_context_tokens": 256,
            "max_output_tokens": None,
            "text": load_text("fake"),
        }
        self.infos[name] = ModelInfo(name=name, **(values | changes))

    def models(self) -> list[ModelInfo]:
        return list(self.infos.values())

    async def model(self, name: str) -> ModelInfo:
        if name not in self.infos:
            raise RequestError(
                f"model {name!r} is not served: {', '.join(self.infos)}",
                code="model_not_found",
                param="model",
                status=404,
            )
        return self.infos[name]

    async def open(
        self,
        model: str,
        request: Request,
        *,
        n: int,
        remaining_s: float | None,
        journal: PromptJournal | None = None,
        place: Place = ANYWHERE,
    ) -> FakeStream:
        self.places.append(place)
        self.opened.append((model, request, n, remaining_s))
        if self.before_open is not None:
            try:
                result = self.before_open()
                if asyncio.iscoroutine(result):
                    await result
            except asyncio.CancelledError:
                self.open_cancelled = True
                raise
        stream = FakeStream(self, self.script(request, n))
        self.streams.append(stream)
        return stream

    @property
    def request(self) -> Request:
        """The last that was opened."""
        return self.opened[-1][1]


class QuietServer(uvicorn.Server):
    """Takes no signals and stops at once: uvicorn looks every 0.1 s whether it should."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class Gateway:
    """The running gateway and everything a test looks at."""

    port: int
    backend: FakeBackend
    metrics: Registry
    state: GatewayState

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        options = {"max_retries": 0, "timeout": 120.0} | options
        return openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", **options
        )

    async def raw(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> Reply:
        """One request over a bare socket, read to the end of the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = {
            "host": "test",
            "connection": "close",
            "content-length": str(len(body)),
            "content-type": "application/json",
        } | (headers or {})
        lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in head.items())]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        try:
            return Reply.parse(await asyncio.wait_for(reader.read(), 120))
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> Reply:
        return await self.raw("POST", path, json.dumps(body).encode(), headers)

    async def settle(self) -> None:
        """Until no request is being answered."""
        limit = time.monotonic() + 120
        while any(self.state.inflight.values()):
            assert time.monotonic() < limit, "a request never ended"
            await asyncio.sleep(0.005)


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes]
    """Pieces of a chunked body as they were framed."""

    @classmethod
    def parse(cls, data: bytes) -> Reply:
        head, _, rest = data.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers: dict[str, str] = {}
        for line in lines:
            name, _, value = line.partition(": ")
            assert name.lower() not in headers, f"header {name} is sent twice"
            headers[name.lower()] = value
        chunks: list[bytes] = []
        if headers.get("transfer-encoding") == "chunked":
            while True:
                size, _, rest = rest.partition(b"\r\n")
                length = int(size, 16)
                if length == 0:
                    assert rest == b"\r\n", "the chunked body does not end properly"
                    break
                chunks.append(rest[:length])
                assert rest[length : length + 2] == b"\r\n"
                rest = rest[length + 2 :]
            rest = b"".join(chunks)
        return cls(int(first.split()[1]), headers, rest, chunks)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, with the four keys that every error has."""
        body = self.json()
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return body["error"]

    def events(self) -> list[Any]:
        """The `data:` payloads, decoded, `[DONE]` as it is."""
        assert self.body.endswith(b"\n\n")
        out: list[Any] = []
        for block in self.body.decode().removesuffix("\n\n").split("\n\n"):
            assert block.startswith("data: ")
            assert "\n" not in block
            data = block.removeprefix("data: ")
            out.append(data if data == "[DONE]" else json.loads(data))
        return out


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    backend, metrics = FakeBackend(), Registry()
    backend.serve("tiny")
    config = GatewayConfig.parse(
        {"models": [{"name": "tiny", "app": "tiny", "aliases": ["gpt-4o"]}]}
    )
    state = GatewayState(backend=backend, metrics=metrics, config=config)
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    server = QuietServer(
        uvicorn.Config(create_app(lambda: state), lifespan="off", ws="none", log_level="critical")
    )
    task = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0.005)
    yield Gateway(sock.getsockname()[1], backend, metrics, state)
    server.force_exit = True
    server.stop.set()
    await task
    sock.close()


@pytest.fixture
def spell_words() -> Callable[..., list[Step]]:
    return spell
