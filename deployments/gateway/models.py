"""The models that this gateway serves: `backend.Backend` over one `ModelClient` each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from deployments.background import background
from deployments.explain.clocks import Offset
from deployments.explain.decode import DecodeFacts
from deployments.explain.request import Leg, PromptJournal
from deployments.gateway.backend import ANYWHERE, ModelInfo, Place, Stream
from deployments.gateway.config import GatewayConfig, ModelRoute
from deployments.gateway.dispatch import ModelClient
from engine.errors import EngineError, Overloaded, RequestError
from engine.request import Request
from engine.text.text_model import TextModel, load_text

logger = logging.getLogger(__name__)

RETIRE_LOOK_S = 0.2
RELOAD_PAUSE_S = 0.5


@dataclass(slots=True)
class _Served:
    route: ModelRoute
    client: ModelClient
    loading: asyncio.Task[None] | None = None
    info: ModelInfo | None = None
    """Of the replicas that run now; None until one has been seen and the text side is loaded."""


class ClusterModels:
    """Opens and closes clients as the configuration names applications.

    `connect` makes the client of an application. A model becomes visible once a decode replica has
    told what it serves and the tokenizer is loaded.
    """

    def __init__(self, connect: Callable[[str], ModelClient]) -> None:
        self._connect = connect
        self._served: dict[str, _Served] = {}
        self._names: dict[str, str] = {}
        self._retiring: dict[str, tuple[_Served, asyncio.Task[None]]] = {}
        """By application: no longer configured, and still answering."""

    async def apply(self, config: GatewayConfig) -> None:
        """Serve exactly the models of this configuration from now on."""
        wanted = {route.app: route for route in config.models}  # by application: names may move
        for app, served in list(self._served.items()):
            if app not in wanted:
                del self._served[app]
                self._retiring[app] = (served, asyncio.create_task(self._retire(app, served)))
        for app, route in wanted.items():
            served = self._served.get(app) or self._returned(app)
            if served is None:
                client = self._connect(app)
                client.start()
                served = _Served(route, client)
                served.loading = background(self._follow(served), f"following {app}")
            self._served[app] = served
            served.route = route
            served.client.set_policy(*config.policy())
        self._names = {
            alias: app for app, route in wanted.items() for alias in (route.name, *route.aliases)
        }

    async def _retire(self, app: str, served: _Served) -> None:
        """Let what is being answered end, then close."""
        while served.client.num_streams:
            await asyncio.sleep(RETIRE_LOOK_S)
        del self._retiring[app]
        await _close(served)

    def _returned(self, app: str) -> _Served | None:
        """What was taken out and is wanted again before its last answer ended, as it was.

        A second client of the same application would take the first one's links away.
        """
        if app not in self._retiring:
            return None
        served, task = self._retiring.pop(app)
        task.cancel()
        return served

    async def close(self) -> None:
        retiring = list(self._retiring.values())
        self._retiring.clear()
        for _, task in retiring:
            task.cancel()
        for served in (*self._served.values(), *(served for served, _ in retiring)):
            await _close(served)
        self._served.clear()

    @property
    def num_streams(self) -> int:
        retiring = (served for served, _ in self._retiring.values())
        return sum(served.client.num_streams for served in (*self._served.values(), *retiring))

    def clients(self) -> Iterator[tuple[str, ModelClient]]:
        """Each configured model's name and its client."""
        for served in self._served.values():
            yield served.route.name, served.client

    def models(self) -> list[ModelInfo]:
        """See `Backend`."""
        return [info for served in self._served.values() if (info := _loaded(served)) is not None]

    async def model(self, name: str) -> ModelInfo:
        """See `Backend`. Raises Overloaded for a configured model that no replica serves yet."""
        served = self._find(name)
        info = _loaded(served)
        if info is None:
            raise Overloaded(
                f"model {served.route.name!r} is starting: try again",
                code="model_starting",
                retry_after_s=2.0,
            )
        return info

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
        """See `Backend`."""
        client = self._find(model).client
        return await client.open(
            request, n=n, remaining_s=remaining_s, journal=journal, place=place
        )

    async def journal(self, model: str, leg: Leg) -> tuple[DecodeFacts, Offset | None] | None:
        """See `explain.JournalSource`."""
        served = self._served.get(self._names.get(model, ""))
        return None if served is None else await served.client.journal(leg)

    async def elsewhere(self, what: str, *arguments: Any) -> list[Any]:
        """See `explain.JournalSource`. Every gateway has links to the replicas of every model."""
        for served in list(self._served.values()):
            told = await served.client.elsewhere(what, *arguments)
            if told is not None:
                return told
        return []

    def _find(self, name: str) -> _Served:
        served = self._served.get(self._names.get(name, ""))
        if served is None:
            known = ", ".join(sorted(s.route.name for s in self._served.values())) or "none"
            raise RequestError(
                f"model {name!r} does not exist here; served are: {known}",
                code="model_not_found",
                param="model",
                status=404,
            )
        return served

    async def _follow(self, served: _Served) -> None:
        """Keep `info` what the running replicas say: a redeploy may bring another model."""
        while True:
            snapshot = served.client.directory.replicas()
            metadata = next((dict(m) for m in snapshot.values() if "source" in m), None)
            if metadata is not None and _said(metadata) != _known(served.info):
                try:
                    text: TextModel = await asyncio.to_thread(load_text, metadata["source"])
                except EngineError:
                    logger.exception("the text side of %s cannot be loaded here", served.route.name)
                    await asyncio.sleep(RELOAD_PAUSE_S)
                    continue
                served.info = ModelInfo(
                    name=served.route.name,
                    root=metadata["source"],
                    created=metadata["created"],
                    max_context_tokens=metadata["max_context_tokens"],
                    max_output_tokens=metadata["max_output_tokens"],
                    text=text,
                )
            await served.client.directory.changed(snapshot)


async def _close(served: _Served) -> None:
    if served.loading is not None:
        served.loading.cancel()
    await served.client.close()


def _said(metadata: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(metadata[name] for name in ("source", "max_context_tokens", "max_output_tokens"))


def _known(info: ModelInfo | None) -> tuple[Any, ...] | None:
    return info and (info.root, info.max_context_tokens, info.max_output_tokens)


def _loaded(served: _Served) -> ModelInfo | None:
    info = served.info
    name = served.route.name
    return info if info is None or info.name == name else replace(info, name=name)
