"""The unary call that makes Serve's drain wait for work that travels on a link."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

IDLE_S = 1.0
"""A pair without work for this long lets its call go; the peer makes a new one with new work."""


class PairHolds:
    """Open `hold` calls of one replica, by the peer on the other end of the link."""

    def __init__(self, busy: Callable[[str], bool]) -> None:
        self._busy = busy
        self._lost: dict[str, asyncio.Event] = {}

    async def hold(self, peer_id: str) -> str:
        """Return `idle` when the pair has had no work for a second, `lost` when its link ended."""
        lost = self._lost.setdefault(peer_id, asyncio.Event())
        idle = False
        while True:
            try:
                await asyncio.wait_for(lost.wait(), IDLE_S)
                return "lost"
            except asyncio.TimeoutError:
                if self._busy(peer_id):
                    idle = False
                elif idle:
                    if self._lost.get(peer_id) is lost:
                        del self._lost[peer_id]
                    return "idle"
                else:
                    idle = True

    def lost(self, peer_id: str) -> None:
        """The link to this peer ended: its calls return now."""
        event = self._lost.pop(peer_id, None)
        if event is not None:
            event.set()


class HoldKeeper:
    """Keeps one unary `hold` call open to every replica this process has work on.

    A call that returned while there is still work is made again. Failures are of no consequence
    beyond the log: the call only slows Serve's drain down, the link itself tells of death.
    """

    def __init__(self, call: Callable[[str, str], Awaitable[str]], own_id: str) -> None:
        """`call(replica, own_id)` is one `hold` on that replica."""
        self._call = call
        self._own_id = own_id
        self._work: dict[str, int] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, replica: str) -> None:
        self._work[replica] = self._work.get(replica, 0) + 1
        if replica not in self._tasks:
            self._tasks[replica] = asyncio.create_task(self._keep(replica))

    def end(self, replica: str) -> None:
        left = self._work.get(replica, 0) - 1
        if left > 0:
            self._work[replica] = left
        else:
            self._work.pop(replica, None)

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()

    async def _keep(self, replica: str) -> None:
        try:
            while self._work.get(replica):
                try:
                    await self._call(replica, self._own_id)
                except Exception as error:
                    logger.debug("hold on %s ended: %s", replica, error)
                    await asyncio.sleep(1.0)
        finally:
            self._tasks.pop(replica, None)
