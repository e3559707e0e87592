"""Serve's view of a gateway replica."""

# Serve's decorators and handles are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedClassDecorator=false, reportMissingTypeArgument=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

from typing import Any

from ray import serve

from deployments.gateway.events import to_json
from deployments.gateway.process import GatewayProcess, build_app
from deployments.logs import adopt_serve
from deployments.secret import read_link_secret


@serve.deployment(
    name="Gateway",
    max_ongoing_requests=1000,
    ray_actor_options={"num_cpus": 0.1},
    graceful_shutdown_timeout_s=600,
    health_check_period_s=2,
    # Every request has a line of its own (`deployments.logs`), and that says more.
    logging_config={"encoding": "JSON", "enable_access_log": False},
)
@serve.ingress(build_app)
class Gateway:
    """Thin: the process does the work, the ASGI app answers."""

    async def __init__(self, args: dict[str, Any]) -> None:
        adopt_serve()
        context = serve.get_replica_context()
        # Serve's wrapper is what counts requests for it to scale by. Where this version does not
        # tell whether it does, it may.
        config = getattr(context, "_deployment_config", None)
        scaled = getattr(config, "autoscaling_config", True) is not None
        self._process = GatewayProcess(
            context.replica_id.unique_id, read_link_secret(), straight_in=not scaled
        )

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        await self._process.apply(user_config)

    async def events(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """The typed events of request `call["request_id"]` that this gateway still remembers."""
        log = self._process.state.log
        return [to_json(event) for event in log.of(call["request_id"])]

    async def __del__(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None:
            await process.close()
