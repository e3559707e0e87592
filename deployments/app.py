"""Builders that `config.yaml` names: `deployments.app:gateway` and `deployments.app:model`.

`args` holds what needs new processes; what an operator tunes while running is each deployment's
`user_config`. Neither this module nor what it imports at the top brings in torch: Serve imports it
in the controller and pickles its classes into every proxy.
"""

# Serve's decorators and handles are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedClassDecorator=false, reportMissingTypeArgument=false
# pyright: reportUnknownParameterType=false

# No `from __future__ import annotations` here: Serve reads the builders' annotations as classes.
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from deployments.decode import Decode
from deployments.gateway.deployment import Gateway
from deployments.prefill import Prefill
from deployments.settings import (
    ROOT_DEPLOYMENT,
    GatewayArgs,
    LinkArgs,
    ModelArgs,
    PoolSettings,
    rank_bundles,
)

__all__ = ["GatewayArgs", "LinkArgs", "ModelArgs", "PoolSettings", "gateway", "model"]

ROUTER = "deployments.routing.replicas:DirectoryRouter"


@serve.deployment(
    name=ROOT_DEPLOYMENT,
    autoscaling_config={"min_replicas": 0, "initial_replicas": 0, "max_replicas": 1},
    ray_actor_options={"num_cpus": 0},
)
class Root:
    """Root of a model application. Nobody calls it, so it stays at zero replicas.

    It is there because Serve refuses a custom request router, which the pools need, on the root
    deployment of any application where HAProxy is on.
    """

    def __init__(self, decode: DeploymentHandle) -> None:
        del decode


def gateway(args: GatewayArgs) -> serve.Application:
    """The OpenAI-compatible front door."""
    return Gateway.bind(args.model_dump())


def model(args: ModelArgs) -> serve.Application:
    """One model: a decode pool, and a prefill pool unless `args.prefill` is off."""
    router = RequestRouterConfig(request_router_class=ROUTER)  # pyright: ignore[reportArgumentType]
    wire = args.model_dump()
    decode = Decode.options(request_router_config=router, **_placement(args))
    if not args.prefill:
        return Root.bind(decode.bind(wire, None))
    own = args.of_prefill()
    prefill = Prefill.options(request_router_config=router, **_placement(own))
    return Root.bind(decode.bind(wire, prefill.bind(own.model_dump())))


def _placement(args: ModelArgs) -> dict[str, Any]:
    """Where a replica's ranks run: with it, but for stages, which may be on other machines."""
    if args.num_ranks == 1:
        return {}
    return {
        "placement_group_bundles": rank_bundles(args.num_ranks, args.accelerator),
        "placement_group_strategy": "STRICT_PACK" if args.pipeline_parallel == 1 else "PACK",
    }
