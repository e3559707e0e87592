"""Both kinds of client of the admission queue: a gateway asks, a decode replica reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from deployments.admission.queue import QueueLimits
from deployments.admission.tiers import TierTable
from deployments.link.client import Backoff, KeptLink
from deployments.link.link import Link, LinkHandlers, LinkSettings
from deployments.link.messages import Acquire, Grant, Kind, Report, refusal_from_wire
from deployments.link.wire import CloseReason
from engine.errors import EngineError

logger = logging.getLogger(__name__)

LOOK_AGAIN = Backoff(max_s=0.3)
"""How soon a queue that is away is looked for again: Ray takes about a second to restart it."""


class QueueAway(EngineError):
    """The queue cannot be reached now. Work that may not wait goes to decode's own limits."""


class QueueClient:
    """A gateway's side. `acquire` gives a grant or raises; whoever gets a grant must `release` it.

    The link is kept up in the background. While it is down, `acquire` raises `QueueAway` at once,
    as do all callers that were waiting when it went.
    """

    def __init__(
        self,
        find_address: Callable[[], Awaitable[str]],
        secret: bytes,
        own_id: str,
        *,
        settings: LinkSettings | None = None,
        backoff: Backoff | None = None,
        on_snapshot: Callable[[str, str, list[Any]], None] | None = None,
    ) -> None:
        """`on_snapshot` gets the queue's figures every second: its id, its role, its series."""
        self._on_snapshot = on_snapshot
        self._kept = KeptLink(
            find_address,
            secret,
            "gateway",
            own_id,
            LinkHandlers(on_message=self._message, on_open=self._opened, on_close=self._closed),
            settings=settings,
            expect_role="queue",
            backoff=backoff or LOOK_AGAIN,
        )
        self._policy: list[Any] | None = None
        self._tickets = 0
        self._waiting: dict[int, asyncio.Future[Grant]] = {}
        self._held: dict[tuple[int, int], Link] = {}
        """Grants taken and not released, with the link they came by: ids mean nothing elsewhere."""

    def start(self) -> None:
        """Begin to keep the link. Call once, on the gateway's loop."""
        self._kept.start()

    async def wait_available(self, timeout_s: float | None) -> bool:
        """Wait for the link, at most `timeout_s`; None: for as long as it takes."""
        try:
            await asyncio.wait_for(self._kept.wait_up(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Every waiter gets `QueueAway`; the queue voids what this gateway was promised."""
        await self._kept.close()

    @property
    def available(self) -> bool:
        return self._kept.link is not None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def set_policy(self, tiers: TierTable, limits: QueueLimits) -> None:
        """What the queue is to go by, unless it has seen a higher revision."""
        self._policy = [Kind.POLICY, tiers.to_wire(), limits.to_wire()]
        if self._kept.link is not None:
            self._kept.link.send(self._policy)

    async def acquire(
        self,
        *,
        cost_tokens: int,
        prompt_tokens: int,
        n: int = 1,
        priority: int = 0,
        remaining_ms: int | None = None,
        tier: str = "default",
        tenant: str = "",
        weight: float = 1.0,
        resumed: bool = False,
    ) -> Grant:
        """Wait for a slot. Raises `Overloaded` (no room in time), `RequestError` (never will be) or
        `QueueAway`. Cancelling gives up the place in the queue, and the grant if one was under way.
        """
        link = self._kept.link
        if link is None:
            raise QueueAway("the admission queue cannot be reached; it is being looked for")
        self._tickets += 1
        ticket = self._tickets
        answer: asyncio.Future[Grant] = asyncio.get_running_loop().create_future()
        self._waiting[ticket] = answer
        acquire = Acquire(
            ticket=ticket,
            cost_tokens=cost_tokens,
            prompt_tokens=prompt_tokens,
            n=n,
            priority=priority,
            remaining_ms=remaining_ms,
            tier=tier,
            tenant=tenant,
            weight=weight,
            resumed=resumed,
        )
        link.send(acquire.to_wire())
        try:
            return await answer
        except asyncio.CancelledError:
            if self._waiting.pop(ticket, None) is not None:
                link.send([Kind.ABANDON, ticket])
            elif not answer.cancelled() and answer.exception() is None:
                self.release(answer.result())
            raise

    def release(self, grant: Grant) -> None:
        """The grant's request ended, or will not be submitted. Idempotent; once the link it came by
        has ended there is nothing to release."""
        link = self._held.pop((grant.epoch, grant.grant_id), None)
        if link is not None:
            link.send([Kind.RELEASE, grant.grant_id])

    def _opened(self, link: Link) -> None:
        if self._policy is not None:
            link.send(self._policy)

    def _message(self, link: Link, message: list[Any]) -> None:
        kind = message[0]
        if kind == Kind.GRANT:
            _, ticket, wire = message
            grant = Grant.from_wire(wire)
            answer = self._waiting.pop(ticket, None)
            if answer is None or answer.done():
                link.send([Kind.RELEASE, grant.grant_id])
                return
            self._held[grant.epoch, grant.grant_id] = link
            answer.set_result(grant)
        elif kind == Kind.REFUSE:
            answer = self._waiting.pop(message[1], None)
            if answer is not None and not answer.done():
                answer.set_exception(refusal_from_wire(message))
        elif kind == Kind.SNAPSHOT:
            if self._on_snapshot is not None:
                self._on_snapshot(message[1], message[2], message[3])
        else:
            raise ValueError(f"the queue must not send {Kind(kind).name}")

    def _closed(self, link: Link, reason: CloseReason) -> None:
        waiting, self._waiting = self._waiting, {}
        self._held = {key: held for key, held in self._held.items() if held is not link}
        logger.info("the admission queue is away (%d callers waited): %s", len(waiting), reason)
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(QueueAway(f"the admission queue went away: {reason}"))


class QueueReporter:
    """A decode replica's side: the queue knows the latest report, over any restart of either.

    `find_address` may create the queue when it is not there.
    """

    def __init__(
        self,
        find_address: Callable[[], Awaitable[str]],
        secret: bytes,
        own_id: str,
        *,
        settings: LinkSettings | None = None,
        backoff: Backoff | None = None,
        coalesce_s: float = 0.0,
    ) -> None:
        """`coalesce_s` 0 sends at most one report per loop iteration."""
        self._kept = KeptLink(
            find_address,
            secret,
            "decode",
            own_id,
            LinkHandlers(on_message=self._message, on_open=self._opened),
            settings=settings,
            expect_role="queue",
            backoff=backoff or LOOK_AGAIN,
        )
        self._coalesce_s = coalesce_s
        self._latest: Report | None = None
        self._pending: asyncio.Handle | None = None

    def start(self) -> None:
        """Begin to keep the link. Call once, on the loop that calls `changed`."""
        self._kept.start()

    async def close(self) -> None:
        """The queue stops granting this replica as soon as the link is gone."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        await self._kept.close()

    @property
    def available(self) -> bool:
        return self._kept.link is not None

    def changed(self, report: Report) -> None:
        """The replica's account as of now. Only the latest of several at once is sent."""
        self._latest = report
        if self._pending is None:
            loop = asyncio.get_running_loop()
            if self._coalesce_s > 0:
                self._pending = loop.call_later(self._coalesce_s, self._send)
            else:
                self._pending = loop.call_soon(self._send)

    def _send(self) -> None:
        self._pending = None
        link = self._kept.link
        if link is not None and self._latest is not None:
            link.send(self._latest.to_wire())

    def _opened(self, link: Link) -> None:
        if self._latest is not None:
            link.send(self._latest.to_wire())

    def _message(self, link: Link, message: list[Any]) -> None:
        raise ValueError(f"the queue must not send {Kind(message[0]).name} to a decode replica")
