from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvloop

from deployments.link.client import dial
from deployments.link.link import Link, LinkHandlers, LinkSettings
from deployments.link.server import LinkServer
from deployments.link.wire import CloseReason, Target

SECRET = b"the secret of the test cluster!!"


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Ray's replicas run uvloop, the command line and many tests asyncio's own: both must work."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@dataclass
class Recorder:
    """Handlers that write down what happens; `memory` is what payloads are received into."""

    events: list[tuple[str, Any]] = field(default_factory=list)
    memory: Target = None
    reply: Callable[[Link, list[Any]], None] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, what: str, value: Any) -> None:
        self.events.append((what, value))
        self.changed.set()

    def of(self, what: str) -> list[Any]:
        return [value for name, value in self.events if name == what]

    async def until(self, condition: Callable[[Recorder], bool]) -> None:
        async def wait() -> None:
            while not condition(self):
                self.changed.clear()
                await self.changed.wait()

        await asyncio.wait_for(wait(), 240)

    @property
    def handlers(self) -> LinkHandlers:
        def on_message(link: Link, message: list[Any]) -> None:
            self.note("message", message)
            if self.reply is not None:
                self.reply(link, message)

        def on_payload(link: Link, head: list[Any]) -> Target:
            self.note("payload", head)
            return self.memory

        def on_close(link: Link, reason: CloseReason) -> None:
            self.note("close", reason)

        return LinkHandlers(
            on_message=on_message,
            on_open=lambda link: self.note("open", link),
            on_payload=on_payload,
            on_payload_done=lambda link, head: self.note("done", head),
            on_close=on_close,
        )


@dataclass
class Pair:
    """A server and one client, linked."""

    server: LinkServer
    client: Link
    at_server: Recorder
    at_client: Recorder

    @property
    def served(self) -> Link:
        return self.server.links["gateway-1"]


MakePair = Callable[..., Awaitable[Pair]]


@pytest.fixture
async def make_server() -> AsyncIterator[Callable[..., Awaitable[LinkServer]]]:
    servers: list[LinkServer] = []

    async def make(recorder: Recorder, **options: Any) -> LinkServer:
        server = LinkServer(SECRET, "decode", "decode-1", handlers=recorder.handlers, **options)
        await server.start()
        servers.append(server)
        return server

    yield make
    for server in servers:
        await server.close()


@pytest.fixture
async def make_pair(make_server: Callable[..., Awaitable[LinkServer]]) -> AsyncIterator[MakePair]:
    clients: list[Link] = []

    async def make(**settings: Any) -> Pair:
        at_server, at_client = Recorder(), Recorder()
        made = LinkSettings(**settings)
        server = await make_server(at_server, settings=made)
        client = await dial(
            server.address, SECRET, "gateway", "gateway-1", at_client.handlers, settings=made
        )
        clients.append(client)
        await at_server.until(lambda r: bool(r.of("open")))
        return Pair(server, client, at_server, at_client)

    yield make
    for client in clients:
        client.close()
        await asyncio.wait([client.closed])
