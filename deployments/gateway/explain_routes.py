"""`GET /tailrace/explain/{id}` and `GET /tailrace/requests`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.responses import Response

from deployments.gateway.explain import Listing
from deployments.gateway.state import GatewayState


def add_explain(
    app: FastAPI, get_state: Callable[[], GatewayState], responses: dict[int | str, dict[str, Any]]
) -> None:
    """`responses` describes the errors, for the OpenAPI document."""

    @app.get("/tailrace/explain/{request_id:path}", responses=responses)
    async def explain(request_id: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        return _json(await get_state().explainer.find(request_id))

    @app.get("/tailrace/requests", responses=responses)
    async def requests(  # pyright: ignore[reportUnusedFunction]
        slowest: bool = True, limit: int = 20, tier: str | None = None, model: str | None = None
    ) -> Response:
        listing = Listing(slowest=slowest, limit=limit, tier=tier, model=model)
        return _json(await get_state().explainer.list_all(listing))


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
