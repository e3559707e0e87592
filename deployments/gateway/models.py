"""The models that this gateway serves: `backend.Backend` over one `ModelClient` each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deployments.gateway.backend import ModelInfo, Stream
from deployments.gateway.config import GatewayConfig, ModelRoute
from deployments.gateway.dispatch import ModelClient
from engine.errors import EngineError, Overloaded, RequestError
from engine.request import Request
from engine.text.text_model import TextModel, load_text

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Served:
    route: ModelRoute
    client: ModelClient
    loading: asyncio.Task[ModelInfo]
    """Done when a replica has been seen and the text side is loaded."""


class ClusterModels:
    """Opens and closes clients as the configuration names applications.

    `connect` makes the client of an application. A model becomes visible once a decode replica has
    told what it serves and the tokenizer is loaded.
    """

    def __init__(self, connect: Callable[[str], ModelClient]) -> None:
        self._connect = connect
        self._served: dict[str, _Served] = {}
        self._names: dict[str, str] = {}

    async def apply(self, config: GatewayConfig) -> None:
        """Serve exactly the models of this configuration from now on."""
        wanted = {route.name: route for route in config.models}
        for name, served in list(self._served.items()):
            route = wanted.get(name)
            if route is None or route.app != served.route.app:
                del self._served[name]
                served.loading.cancel()
                await served.client.close()
        for name, route in wanted.items():
            served = self._served.get(name)
            if served is not None:
                served.route = route
                continue
            client = self._connect(route.app)
            client.start()
            loading = asyncio.create_task(self._load(name, client))
            self._served[name] = _Served(route, client, loading)
        self._names = {
            alias: name for name, route in wanted.items() for alias in (name, *route.aliases)
        }

    async def close(self) -> None:
        for served in self._served.values():
            served.loading.cancel()
            await served.client.close()
        self._served.clear()

    @property
    def num_streams(self) -> int:
        return sum(served.client.num_streams for served in self._served.values())

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
        self, model: str, request: Request, *, n: int, remaining_s: float | None
    ) -> Stream:
        """See `Backend`."""
        return await self._find(model).client.open(request, n=n, remaining_s=remaining_s)

    def _find(self, name: str) -> _Served:
        served = self._served.get(self._names.get(name, ""))
        if served is None:
            known = ", ".join(sorted(self._served)) or "none"
            raise RequestError(
                f"model {name!r} does not exist here; served are: {known}",
                code="model_not_found",
                param="model",
                status=404,
            )
        return served

    async def _load(self, name: str, client: ModelClient) -> ModelInfo:
        metadata: dict[str, Any] = {}
        while not metadata:
            snapshot = client.directory.replicas()
            for candidate in snapshot.values():
                if "source" in candidate:
                    metadata = dict(candidate)
            if not metadata:
                await client.directory.changed(snapshot)
        try:
            text: TextModel = await asyncio.to_thread(load_text, metadata["source"])
        except EngineError:
            logger.exception("the text side of %s cannot be loaded on this gateway", name)
            raise
        return ModelInfo(
            name=name,
            root=metadata["source"],
            created=metadata["created"],
            max_context_tokens=metadata["max_context_tokens"],
            max_output_tokens=metadata["max_output_tokens"],
            text=text,
        )


def _loaded(served: _Served) -> ModelInfo | None:
    task = served.loading
    if not task.done() or task.cancelled() or task.exception() is not None:
        return None
    return task.result()
