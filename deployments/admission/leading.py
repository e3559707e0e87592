"""Which of a model's two queues leads: the other stands by, imported and listening.

```
gateways, decodes ──► both queues; ask and report to whoever says the highest epoch
queue             ──► the other queue: hears its epoch, notices at once when it is gone
```
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from deployments.link.client import Backoff, dial
from deployments.link.link import Link, LinkHandlers, LinkSettings
from deployments.link.messages import Kind

logger = logging.getLogger(__name__)

STANDING_BY = 0
"""The epoch of a queue that does not lead."""

_FIND_S = 10.0
"""A peer whose address is not known by then does not lead. One that is not there is known at once;
a busy machine must not make a queue that has just started take the lead from one that has it."""

_REDIAL_S = 1.0
"""As long may a peer whose link has just ended take to answer before it counts as gone."""

_LOOK_AGAIN = Backoff(first_s=0.1, max_s=1.0)


class Leadership:
    """One queue's part of it. No clock, no I/O: `now_ns` since 1970 gives epochs their order.

    Of two that can hear each other the higher epoch stays, and no epoch is used twice. Of two that
    cannot both may lead; then gateways follow the higher one they hear, and decode replicas, which
    own their slots, admit no more than they have.
    """

    def __init__(self, place: int | None = None) -> None:
        """`place` is 0 or 1. None: there is no other, so it leads from the start."""
        self._place = place
        self._seen = 0
        self.epoch = STANDING_BY

    @property
    def leads(self) -> bool:
        return self.epoch != STANDING_BY

    def peer_says(self, epoch: int, now_ns: int) -> None:
        """The other one's epoch, `STANDING_BY` if it does not lead."""
        self._seen = max(self._seen, epoch)
        if epoch > self.epoch:
            self.epoch = STANDING_BY
        elif epoch == STANDING_BY and not self.leads and self._place == 0:
            self._lead(now_ns)

    def peer_away(self, now_ns: int) -> None:
        """The other one cannot be reached."""
        if not self.leads:
            self._lead(now_ns)

    def _lead(self, now_ns: int) -> None:
        # The lowest bit is the place, so that two that begin in one nanosecond differ.
        epoch = max(now_ns, self._seen + 2)
        self.epoch = self._seen = epoch - (epoch & 1) + (self._place or 0)


class PeerWatch:
    """The link to the other queue, dialled for as long as this one lives.

    A link that ends is dialled again before anything is said: `on_away` is for a peer that does not
    answer, not for a connection that broke.
    """

    def __init__(
        self,
        find_address: Callable[[], Awaitable[str]],
        secret: bytes,
        own_id: str,
        *,
        on_says: Callable[[int], None],
        on_away: Callable[[], None],
        settings: LinkSettings | None = None,
    ) -> None:
        self._find_address = find_address
        self._secret = secret
        self._own_id = own_id
        self._on_says = on_says
        self._on_away = on_away
        self._settings = settings or LinkSettings()
        self._redial = replace(self._settings, connect_s=_REDIAL_S, handshake_s=_REDIAL_S)
        self.linked = False

    async def run(self) -> None:
        """For ever."""
        handlers = LinkHandlers(on_message=self._message)
        known: str | None = None
        failures = 0
        while True:
            try:
                address = known or await asyncio.wait_for(self._find_address(), _FIND_S)
                link = await dial(
                    address,
                    self._secret,
                    "queue",
                    self._own_id,
                    handlers,
                    settings=self._redial if known else self._settings,
                    expect_role="queue",
                )
            except Exception as error:  # whatever Ray raises of an actor that is not there
                failures += 1
                logger.debug("the other queue is away: %s: %s", type(error).__name__, error)
                self._on_away()
                if known is None:
                    await asyncio.sleep(_LOOK_AGAIN.after(failures))
                known = None
                continue
            known, failures, self.linked = address, 0, True
            try:
                reason = await asyncio.shield(link.closed)
            finally:
                self.linked = False
                link.close()
            logger.info("the link to the other queue ended: %s", reason)

    def _message(self, link: Link, message: list[Any]) -> None:
        if message[0] != Kind.LEADS:
            raise ValueError(f"a queue must not send {Kind(message[0]).name} to the other")
        self._on_says(message[1])
