"""The page at `/dashboard`, for those without Grafana, and the figures it polls.

The files in `page/` are written by hand and served as they are. They ask nobody but this gateway
for anything, and a strict content security policy holds them to it. The page itself holds no
figure: who may see them is decided where they are asked for.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from deployments.gateway.state import GatewayState

Check = Callable[[Request], Awaitable[None]]
"""Raises RequestError (401, 403) for a request that may not see the figures."""

_TYPES = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)

_HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


async def everyone(request: Request) -> None:
    """Without keys everyone may look: the gateway then listens on loopback alone."""


def add_page(
    app: FastAPI,
    get_state: Callable[[], GatewayState],
    responses: dict[int | str, dict[str, Any]],
    check: Check = everyone,
) -> None:
    """Add `/dashboard`, its files and `/tailrace/live`. `check` guards the figures; `responses`
    describes the errors, for the OpenAPI document."""
    folder = files("deployments.gateway").joinpath("page")
    served = {
        name: _File(folder.joinpath(name).read_bytes(), kind) for name, kind in _TYPES.items()
    }

    @app.get("/dashboard", include_in_schema=False)
    async def page(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        return served["page.html"].answer(request)

    for name in ("page.css", "page.js", "icon.svg"):
        app.get(f"/dashboard/{name}", include_in_schema=False)(served[name].answer)

    @app.get("/tailrace/live", responses=responses)
    async def live(request: Request) -> Response:  # pyright: ignore[reportUnusedFunction]
        await check(request)
        state = get_state()
        body = state.live.body(time.monotonic(), lambda shown: shown | _beside(state))
        headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
        return Response(body, media_type="application/json", headers=headers)


def _beside(state: GatewayState) -> dict[str, Any]:
    """What the page shows and no metric tells."""
    return {"models": sorted(info.name for info in state.backend.models())}


class _File:
    """One file of the page. Browsers keep it and ask whether it is still the same."""

    def __init__(self, body: bytes, kind: str) -> None:
        self._body = body
        self._headers = {
            **_HEADERS,
            "content-type": kind,
            "etag": f'"{hashlib.sha256(body).hexdigest()[:32]}"',
        }

    def answer(self, request: Request) -> Response:
        known = request.headers.get("if-none-match", "")
        if self._headers["etag"] in known:
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers)
