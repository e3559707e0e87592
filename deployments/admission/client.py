"""Both kinds of client of the admission queue: a gateway asks, a decode replica reports."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deployments.admission.leading import STANDING_BY
from deployments.admission.queue import QueueLimits
from deployments.admission.tiers import TierTable
from deployments.link.client import Backoff, KeptLink
from deployments.link.link import Link, LinkHandlers, LinkSettings
from deployments.link.messages import Acquire, Grant, Kind, Report, refusal_from_wire
from deployments.link.wire import CloseReason
from engine.errors import EngineError

logger = logging.getLogger(__name__)

FindAddress = Callable[[], Awaitable[str]]
"""May create the queue when it is not there. Asked before every attempt to dial; whatever it raises
counts as a failed one."""

LOOK_AGAIN = Backoff(max_s=0.3)
"""How soon a queue that is away is looked for again: Ray takes seconds to restart it."""

TAKE_OVER_S = 1.0
"""How long callers wait for the standby to lead before the queue counts as away. It takes
milliseconds where the one that led died, and longer than this where it hangs."""


class QueueAway(EngineError):
    """The queue cannot be reached now. Work that may not wait goes to decode's own limits."""


def _ignore(*_: object) -> None:
    return None


class _QueueLinks:
    """A link to each queue of a model, and which of them leads: the highest epoch that one says."""

    def __init__(
        self,
        finders: Sequence[FindAddress],
        secret: bytes,
        role: str,
        own_id: str,
        *,
        settings: LinkSettings | None,
        backoff: Backoff | None,
        on_message: Callable[[Link, list[Any]], None],
        on_open: Callable[[Link], None] = _ignore,
        on_close: Callable[[Link, CloseReason], None] = _ignore,
        on_leads: Callable[[Link], None] = _ignore,
        on_change: Callable[[Link | None], None] = _ignore,
    ) -> None:
        """`on_leads`: this one says that it does. `on_change` gets who led before, with `leader`
        set; after `on_close` of a link that ended."""
        self._on_message = on_message
        self._on_close = on_close
        self._on_leads = on_leads
        self._on_change = on_change
        self._kept = [
            KeptLink(
                find,
                secret,
                role,
                own_id,
                LinkHandlers(on_message=self._message, on_open=on_open, on_close=self._closed),
                settings=settings,
                expect_role="queue",
                backoff=backoff or LOOK_AGAIN,
            )
            for find in finders
        ]
        self._epochs: dict[Link, int] = {}
        self._led = asyncio.Event()
        self._leader: Link | None = None

    @property
    def leader(self) -> Link | None:
        """None while no queue that leads can be reached."""
        leader = self._leader
        return leader if leader is not None and leader.is_open else None

    @property
    def led(self) -> bool:
        """Whether one leads, or one that did has not been missed yet: `on_change` is to come."""
        return self._leader is not None

    @property
    def leading(self) -> list[Link]:
        """Of all that say so. Two, for a while, where they cannot hear each other."""
        return [link for link, epoch in self._epochs.items() if epoch != STANDING_BY]

    @property
    def open(self) -> list[Link]:
        return [kept.link for kept in self._kept if kept.link is not None]

    def start(self) -> None:
        for kept in self._kept:
            kept.start()

    async def wait_led(self) -> None:
        while self.leader is None:
            self._led.clear()
            await self._led.wait()

    async def close(self) -> None:
        for kept in self._kept:
            await kept.close()

    def _message(self, link: Link, message: list[Any]) -> None:
        if message[0] != Kind.LEADS:
            self._on_message(link, message)
            return
        self._epochs[link] = message[1]
        if message[1] != STANDING_BY:
            self._on_leads(link)
        self._choose()

    def _closed(self, link: Link, reason: CloseReason) -> None:
        self._epochs.pop(link, None)
        self._on_close(link, reason)
        self._choose()

    def _choose(self) -> None:
        leading = self.leading
        best = max(leading, key=lambda link: self._epochs[link]) if leading else None
        if best is self._leader:
            return
        before, self._leader = self._leader, best
        if best is not None:
            self._led.set()
        self._on_change(before)


@dataclass(slots=True)
class _Asked:
    answer: asyncio.Future[Grant]
    acquire: Acquire
    at: float


class QueueClient:
    """A gateway's side. `acquire` gives a grant or raises; whoever gets a grant must `release` it.

    Links are kept up in the background. Who waited when the queue that led went is asked for again
    at the one that leads next, in the order of before. Without one, or when none leads in time,
    `acquire` raises `QueueAway`, at once while it lasts.
    """

    def __init__(
        self,
        find_address: FindAddress,
        secret: bytes,
        own_id: str,
        *,
        find_other: FindAddress | None = None,
        settings: LinkSettings | None = None,
        backoff: Backoff | None = None,
        on_snapshot: Callable[[str, str, list[Any]], None] | None = None,
    ) -> None:
        """`find_other`: of the model's second queue. `on_snapshot` gets the queues' figures every
        second: an id, a role, its series."""
        self._on_snapshot = on_snapshot
        self._queues = _QueueLinks(
            [find_address, *([find_other] if find_other else [])],
            secret,
            "gateway",
            own_id,
            settings=settings,
            backoff=backoff,
            on_message=self._message,
            on_open=self._opened,
            on_close=self._closed,
            on_change=self._changed,
        )
        self._take_over_s = TAKE_OVER_S if find_other is not None else 0.0
        self._giving_up: asyncio.TimerHandle | None = None
        """Armed while a queue that takes over is waited for."""

        self._policy: list[Any] | None = None
        self._tickets = 0
        self._waiting: dict[int, _Asked] = {}
        self._held: dict[tuple[int, int], Link] = {}
        """Grants taken and not released, with the link they came by: ids mean nothing elsewhere."""

    def start(self) -> None:
        """Begin to keep the links. Call once, on the gateway's loop."""
        self._queues.start()

    async def wait_available(self, timeout_s: float | None) -> bool:
        """Wait for a queue that leads, at most `timeout_s`; None: for as long as it takes."""
        try:
            await asyncio.wait_for(self._queues.wait_led(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Every waiter gets `QueueAway`; the queue voids what this gateway was promised."""
        self._take_over_s = 0.0
        await self._queues.close()
        self._give_up()

    @property
    def available(self) -> bool:
        return self._queues.leader is not None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def set_policy(self, tiers: TierTable, limits: QueueLimits) -> None:
        """What the queues are to go by, unless they have seen a higher revision."""
        self._policy = [Kind.POLICY, tiers.to_wire(), limits.to_wire()]
        for link in self._queues.open:
            link.send(self._policy)

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
        leader = self._queues.leader
        # Neither led, nor about to hear that the one who led is gone, nor waiting for the next.
        if not self._queues.led and self._giving_up is None:
            raise QueueAway("the admission queue cannot be reached; it is being looked for")
        loop = asyncio.get_running_loop()
        self._tickets += 1
        ticket = self._tickets
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
        answer: asyncio.Future[Grant] = loop.create_future()
        self._waiting[ticket] = _Asked(answer, acquire, loop.time())
        if leader is not None:
            leader.send(acquire.to_wire())
        try:
            return await answer
        except asyncio.CancelledError:
            if self._waiting.pop(ticket, None) is not None:
                leader = self._queues.leader
                if leader is not None:
                    leader.send([Kind.ABANDON, ticket])
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
            # Of a queue that leads no more: whoever it is for is asked for elsewhere.
            asked = self._waiting.pop(ticket, None) if link is self._queues.leader else None
            if asked is None or asked.answer.done():
                link.send([Kind.RELEASE, grant.grant_id])
                return
            self._held[grant.epoch, grant.grant_id] = link
            asked.answer.set_result(grant)
        elif kind == Kind.REFUSE:
            asked = self._waiting.pop(message[1], None) if link is self._queues.leader else None
            if asked is not None and not asked.answer.done():
                asked.answer.set_exception(refusal_from_wire(message))
        elif kind == Kind.SNAPSHOT:
            if self._on_snapshot is not None:
                self._on_snapshot(message[1], message[2], message[3])
        else:
            raise ValueError(f"the queue must not send {Kind(kind).name}")

    def _closed(self, link: Link, reason: CloseReason) -> None:
        self._held = {key: held for key, held in self._held.items() if held is not link}
        logger.info("the link to a queue ended (%d callers wait): %s", len(self._waiting), reason)

    def _changed(self, before: Link | None) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        leader = self._queues.leader
        if leader is None:
            if self._take_over_s > 0:
                loop = asyncio.get_running_loop()
                self._giving_up = loop.call_later(self._take_over_s, self._give_up)
            else:
                self._give_up()
            return
        now = asyncio.get_running_loop().time()
        for ticket, asked in self._waiting.items():
            if before is not None:
                before.send([Kind.ABANDON, ticket])  # nothing where that link has ended
            acquire = asked.acquire
            if acquire.remaining_ms is not None:
                left_ms = acquire.remaining_ms - int(1000 * (now - asked.at))
                acquire = replace(acquire, remaining_ms=max(1, left_ms))
            leader.send(acquire.to_wire())

    def _give_up(self) -> None:
        """None leads: whoever waits decides what to do about it."""
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        waiting, self._waiting = self._waiting, {}
        for asked in waiting.values():
            if not asked.answer.done():
                asked.answer.set_exception(QueueAway("the admission queue went away"))


class QueueReporter:
    """A decode replica's side: a queue that leads knows the latest report, over any restart."""

    def __init__(
        self,
        find_address: FindAddress,
        secret: bytes,
        own_id: str,
        *,
        find_other: FindAddress | None = None,
        settings: LinkSettings | None = None,
        backoff: Backoff | None = None,
        coalesce_s: float = 0.0,
    ) -> None:
        """`find_other`: of the model's second queue. `coalesce_s` 0 sends at most one report per
        loop iteration."""
        self._queues = _QueueLinks(
            [find_address, *([find_other] if find_other else [])],
            secret,
            "decode",
            own_id,
            settings=settings,
            backoff=backoff,
            on_message=self._message,
            on_leads=self._leads,
        )
        self._coalesce_s = coalesce_s
        self._latest: Report | None = None
        self._pending: asyncio.Handle | None = None

    def start(self) -> None:
        """Begin to keep the links. Call once, on the loop that calls `changed`."""
        self._queues.start()

    async def close(self) -> None:
        """The queue stops granting this replica as soon as the link is gone."""
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        await self._queues.close()

    @property
    def available(self) -> bool:
        return self._queues.leader is not None

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
        for link in self._queues.leading:
            self._leads(link)

    def _leads(self, link: Link) -> None:
        if self._latest is not None:
            link.send(self._latest.to_wire())

    def _message(self, link: Link, message: list[Any]) -> None:
        raise ValueError(f"the queue must not send {Kind(message[0]).name} to a decode replica")
