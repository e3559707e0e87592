"""A whole gateway over the pools of one process, for tests that ask where the time went."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from deployments.explain.clocks import Offset
from deployments.explain.decode import DecodeFacts
from deployments.explain.request import Leg, PromptJournal
from deployments.gateway.api import create_app
from deployments.gateway.backend import ANYWHERE, ModelInfo, Place, Stream
from deployments.gateway.state import GatewayState
from deployments.metrics import Registry
from engine.request import Request
from engine.text.text_model import load_text

Sent = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass
class LocalBackend:
    """`backend.Backend` and `explain.JournalSource` over one `ModelClient`."""

    client: Any
    source: str = "fake"

    def models(self) -> list[ModelInfo]:
        return [
            ModelInfo(
                name="m",
                root=self.source,
                created=0,
                max_context_tokens=1024,
                max_output_tokens=None,
                text=load_text(self.source),
            )
        ]

    async def model(self, name: str) -> ModelInfo:
        return self.models()[0]

    async def open(
        self,
        model: str,
        request: Request,
        *,
        n: int,
        remaining_s: float | None,
        journal: PromptJournal | None = None,
        place: Place = ANYWHERE,
    ) -> Stream:
        return await self.client.open(
            request, n=n, remaining_s=remaining_s, journal=journal, place=place
        )

    async def journal(self, model: str, leg: Leg) -> tuple[DecodeFacts, Offset | None] | None:
        return await self.client.journal(leg)

    async def elsewhere(self, what: str, *arguments: Any) -> list[Any]:
        return await self.client.elsewhere(what, *arguments) or []


@dataclass
class Got:
    """An answer as the client got it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        blocks = self.body.decode().removesuffix("\n\n").split("\n\n")
        data = [block.removeprefix("data: ") for block in blocks]
        return [item if item == "[DONE]" else json.loads(item) for item in data]


class Gateway:
    """The application, called without a socket. `state` is its own."""

    def __init__(self, client: Any, source: str = "fake", own_id: str = "g1") -> None:
        self.backend = LocalBackend(client, source)
        self.state = GatewayState(self.backend, Registry())
        self.state.explainer.gateway = own_id
        client._answerer._handlers = self.state.explainer.answers()
        self._app = create_app(lambda: self.state)

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        *,
        slow: Sent | None = None,
        query: str = "",
    ) -> Got:
        """`slow` is awaited before each message is taken: a client that reads slowly."""
        got = Got()
        sent = False
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                data = b"" if body is None else json.dumps(body).encode()
                return {"type": "http.request", "body": data, "more_body": False}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            if slow is not None:
                await slow(message)
            if message["type"] == "http.response.start":
                got.status = message["status"]
                got.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                got.body += message.get("body", b"")

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
            "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
        }
        await self._app(scope, receive, send)  # type: ignore[arg-type]
        return got

    async def complete(
        self,
        tokens: int = 80,
        max_tokens: int = 12,
        headers: dict[str, str] | None = None,
        **more: Any,
    ) -> Got:
        """One completion over a prompt of that many tokens. `slow` and other fields as given."""
        slow = more.pop("slow", None)
        body = {
            "model": "m",
            "prompt": [32 + (7 * i + tokens) % 90 for i in range(tokens)],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            **more,
        }
        return await self.call("POST", "/v1/completions", body, headers, slow=slow)

    async def explain(self, request_id: str) -> Any:
        got = await self.call("GET", f"/tailrace/explain/{request_id}")
        assert got.status == 200, got.body
        return got.json()
