"""One gateway process: the API, its models, its place in the cluster.

The state lives in this module and not in the deployment class: Serve pickles that class by value,
and the ASGI app is built separately from it.
"""

# Serve's decorators and handles are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedClassDecorator=false, reportMissingTypeArgument=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray import serve

from deployments.admission.actor import find_queue
from deployments.admission.client import QueueClient
from deployments.background import background
from deployments.garbage import spare_startup
from deployments.gateway import edge, ingress
from deployments.gateway.api import create_app, generations
from deployments.gateway.config import GatewayConfig, RequestLogging
from deployments.gateway.dispatch import ModelClient
from deployments.gateway.figures import ClusterFigures
from deployments.gateway.models import ClusterModels
from deployments.gateway.request_log import RequestLog
from deployments.gateway.secret_text import read_secret
from deployments.gateway.state import GatewayState
from deployments.holds import HoldKeeper
from deployments.metrics import Registry
from deployments.replica_metrics import EXPORT_EVERY_S, SNAPSHOT_EVERY_S, exporter
from deployments.routing.replicas import Directory
from engine.errors import ConfigError, Overloaded

logger = logging.getLogger(__name__)

KEYS_EVERY = 2
"""Rounds of figures between two looks at the file of keys."""

_state: GatewayState | None = None


def get_state() -> GatewayState:
    """This process's state. Raises Overloaded while the replica starts."""
    if _state is None:
        raise Overloaded("the gateway is starting: try again")
    return _state


def build_app() -> edge.FrontDoor:
    """For `serve.ingress`: called once in the replica, before its constructor."""
    return create_app(get_state, echo_request_id=False)


class GatewayProcess:
    """Everything a gateway replica does besides HTTP."""

    def __init__(self, own_id: str, secret: bytes, *, straight_in: bool = False) -> None:
        """`straight_in` lets generations in past Serve's wrapper: see `ingress`."""
        global _state
        self._own_id = own_id
        self._secret = secret
        self.registry = Registry(replica=own_id)
        self.models = ClusterModels(self._connect)
        self._figures = ClusterFigures(self.registry)
        self._reporter: asyncio.Task[None] | None = None
        self._request_log = RequestLog(secret, own_id)
        self._store_url: str | None = None
        """Of the limits in force."""

        _state = self.state = GatewayState(self.models, self.registry)
        self.state.explainer.gateway = own_id
        self._figures.degraded = self.state.pressures.done
        self._figures.denied = self.state.quotas.denials
        spare_startup()
        if straight_in:
            ingress.open_door(edge.straight_in(generations(get_state)))

    async def apply(self, user_config: dict[str, Any]) -> GatewayConfig:
        """Adopt a configuration. Raises ConfigError and changes nothing."""
        parsed, before = GatewayConfig.parse(user_config), self.state.config
        store = parsed.limits_store
        url = None if store is None else read_secret(store, "limits_store")
        try:
            await self._keep(url, parsed.request_log)
            config = self.state.apply(user_config)
        except ConfigError:
            await self._keep(self._store_url, before.request_log)
            raise
        self._store_url = url
        self.state.request_log = self._request_log if config.request_log else None
        await self.models.apply(config)
        if self._reporter is None:
            self._reporter = background(self._report(), "metrics")
        return config

    async def _keep(self, store_url: str | None, request_log: RequestLogging | None) -> None:
        """Limits and the request log where a configuration has them. Raises ConfigError."""
        await self.state.quotas.configure(store_url)
        await self._request_log.configure(request_log)

    async def close(self) -> None:
        ingress.open_door(None)
        self.state.lines.flush()
        if self._reporter is not None:
            self._reporter.cancel()
        await self.state.close()
        await self.models.close()
        await self._request_log.close()

    def _connect(self, app: str) -> ModelClient:
        # Unchecked: a model may be routed to before its application is there, as when a whole
        # configuration is deployed, and the check would block this loop on the controller.
        handle = serve.get_deployment_handle("Decode", app_name=app, _check_exists=False)
        directory = Directory.of(app, "Decode")
        directory.watch(handle)

        async def hold(target: str, peer: str) -> str:
            return await handle.hold.remote({"target": target, "peer": peer})

        def figures(replica: str, role: str, series: list[Any]) -> None:
            self._figures.received(app, replica, role, series, asyncio.get_running_loop().time())

        queue = QueueClient(
            lambda: find_queue(app),
            self._secret,
            self._own_id,
            find_other=lambda: find_queue(app, 1),
            on_snapshot=figures,
        )
        return ModelClient(
            self._own_id,
            self._secret,
            directory,
            queue,
            HoldKeeper(hold, self._own_id),
            on_snapshot=figures,
            answers=self.state.explainer.answers(),
        )

    async def _report(self) -> None:
        """For ever: what this gateway knows of the cluster, and now and then all to Ray's agent."""
        to_ray = exporter(self.registry, self._own_id, "gateway")
        rounds = 0
        while True:
            await asyncio.sleep(SNAPSHOT_EVERY_S)
            rounds += 1
            try:
                now = asyncio.get_running_loop().time()
                if self.state.config.keys_file is not None and rounds % KEYS_EVERY == 0:
                    await asyncio.to_thread(self.state.keys.refresh)
                if not self.state.config.metrics:
                    continue
                self._figures.sample(self.state.config, self.models.clients(), now)
                self.state.live.checkpoint(asyncio.get_running_loop().time())
                if to_ray is not None and rounds % int(EXPORT_EVERY_S / SNAPSHOT_EVERY_S) == 0:
                    to_ray.export()
            except Exception:
                logger.exception("metrics of this gateway could not be reported")
