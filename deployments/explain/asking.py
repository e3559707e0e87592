"""Questions over a link: one message there, one back, each with the times that align the clocks.

```
ASK  [Kind.ASK, number, what, arguments]
TELL [Kind.TELL, number, value, clock, received_s, sent_s]     value None: not known
```
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from deployments.explain.clocks import Exchange, clock_name
from deployments.link.link import Link
from deployments.link.messages import Kind

logger = logging.getLogger(__name__)

ASK_S = 1.0
"""How long an answer is waited for. Nobody's request hangs on a replica that does not explain."""

Handler = Callable[..., Awaitable[Any] | Any]


@dataclass(frozen=True, slots=True)
class Told:
    """An answer, and what it says about the peer's clock."""

    value: Any
    clock: str
    exchange: Exchange


class Asker:
    """The asking side, over any number of links. For one event loop."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._open: dict[int, tuple[Link, float, asyncio.Future[Told]]] = {}

    async def ask(
        self, link: Link, what: str, *arguments: Any, timeout_s: float = ASK_S
    ) -> Told | None:
        """None: the peer does not know, is gone, or did not answer in time."""
        number = next(self._numbers)
        answer: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
        self._open[number] = (link, time.monotonic(), answer)
        try:
            if not link.send([Kind.ASK, number, what, list(arguments)]):
                return None
            told = await asyncio.wait_for(answer, timeout_s)
        except (asyncio.TimeoutError, ConnectionError):
            return None
        finally:
            del self._open[number]
        return None if told.value is None else told

    def told(self, link: Link, message: list[Any]) -> None:
        """A TELL came. Late ones, and those of a link that was not asked, are ignored."""
        _, number, value, clock, received_s, sent_s = message
        owner, asked_s, answer = self._open.get(number, (None, 0.0, None))
        if owner is link and answer is not None and not answer.done():
            exchange = (asked_s, float(received_s), float(sent_s), time.monotonic())
            answer.set_result(Told(value, str(clock), exchange))

    def lost(self, link: Link) -> None:
        """The link ended: nobody waits for it any longer."""
        for owner, _, answer in list(self._open.values()):
            if owner is link and not answer.done():
                answer.set_exception(ConnectionError())


class Answerer:
    """The answering side. A handler returns the value, or an awaitable of it; None is not known."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        """Each is called as `handler(link, *arguments)`."""
        self._handlers = handlers
        self._running: set[asyncio.Task[None]] = set()

    def asked(self, link: Link, message: list[Any]) -> None:
        """An ASK came. A question that nobody here understands is answered with not known."""
        received_s = time.monotonic()
        _, number, what, arguments = message
        handler = self._handlers.get(what)
        try:
            value = None if handler is None else handler(link, *arguments)
        except Exception:
            logger.exception("the question %r of %s could not be answered", what, link.peer_id)
            value = None
        if isinstance(value, Awaitable):
            later = cast("Awaitable[Any]", value)
            task = asyncio.ensure_future(self._later(link, number, later, received_s))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        else:
            self._tell(link, number, value, received_s)

    def close(self) -> None:
        for task in list(self._running):
            task.cancel()

    async def _later(
        self, link: Link, number: int, value: Awaitable[Any], received_s: float
    ) -> None:
        try:
            told = await value
        except Exception:
            logger.exception("a question of %s could not be answered", link.peer_id)
            told = None
        self._tell(link, number, told, received_s)

    @staticmethod
    def _tell(link: Link, number: int, value: Any, received_s: float) -> None:
        link.send([Kind.TELL, number, value, clock_name(), received_s, time.monotonic()])
