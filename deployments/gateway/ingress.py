"""Straight into a gateway replica: past the wrapper that Serve puts around an application.

```
HAProxy ── uvicorn ── StraightIn ──► a generation
                          └── Serve's wrapper ── FrontDoor ── everything else
```

Serve's wrapper costs a request as much CPU as the gateway's own work. Serve installs this layer
around it where `RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` names `middlewares`, which `tailrace up`
sees to; elsewhere nothing changes but the CPU. What a request that goes straight in is not part of:

- Serve's count of ongoing requests. Drains wait for it all the same, since the replica's HTTP
  server finishes what it has begun; but a gateway that Serve scales by that count keeps the door
  shut (`GatewayProcess`).
- Serve's own figures of requests, `max_ongoing_requests` and `request_timeout_s`. The gateway's
  metrics, its admission queue and its limits are in their place.

Every process that serves HTTP for Serve imports this module, so it imports next to nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.middleware import Middleware

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    Door = Callable[[Scope, Receive, Send], Awaitable[None] | None]
    """What answers a request, or None for one that is to go Serve's way."""

_door: Door | None = None


def open_door(door: Door | None) -> None:
    """Let requests straight in from now on, in this process; None shuts the door."""
    global _door
    _door = door


class StraightIn:
    """The layer around Serve's wrapper, which is `app`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = None if _door is None else _door(scope, receive, send)
        await (self._app(scope, receive, send) if answering is None else answering)


def middlewares() -> list[Middleware]:
    """For Serve to put around its HTTP servers."""
    return [Middleware(StraightIn)]
