"""`GET /tailrace/explain/{id}` and `GET /tailrace/requests`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from fastapi import FastAPI, Request
from starlette.responses import Response

from deployments.gateway.edge import call_of
from deployments.gateway.explain import Listing
from deployments.gateway.state import GatewayState


def add_explain(
    app: FastAPI, get_state: Callable[[], GatewayState], responses: dict[int | str, dict[str, Any]]
) -> None:
    """`responses` describes the errors, for the OpenAPI document."""

    @app.get("/tailrace/explain/{request_id:path}", responses=responses)
    async def explain(request: Request, request_id: str) -> Response:  # pyright: ignore[reportUnusedFunction]
        state = get_state()
        return _json(await state.explainer.find(request_id, _bound(request, state)))

    @app.get("/tailrace/requests", responses=responses)
    async def requests(  # pyright: ignore[reportUnusedFunction]
        request: Request,
        slowest: bool = True,
        limit: int = 20,
        tier: str | None = None,
        model: str | None = None,
    ) -> Response:
        state = get_state()
        salt = _bound(request, state)
        listing = Listing(slowest=slowest, limit=limit, tier=tier, model=model, salt=salt)
        return _json(await state.explainer.list_all(listing))


def _bound(request: Request, state: GatewayState) -> str | None:
    """The tenant whose requests may be seen; None: everybody's. Raises RequestError (401)."""
    identity = state.identify(call_of(request.scope).headers)
    return None if identity.operator else identity.salt


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
