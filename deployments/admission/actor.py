"""The admission queue as a process: one of two named Ray actors that gateways and decodes dial."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from deployments.admission.figures import QueueFigures
from deployments.admission.leading import Leadership, PeerWatch
from deployments.admission.queue import Action, AdmissionQueue, Granted, QueueLimits, Refused
from deployments.admission.tiers import TierTable
from deployments.background import background
from deployments.garbage import spare_startup
from deployments.link.link import Link, LinkHandlers, LinkSettings
from deployments.link.messages import Acquire, Kind, Report, refusal_to_wire
from deployments.link.server import LinkServer
from deployments.link.wire import CloseReason
from deployments.secret import read_link_secret

logger = logging.getLogger(__name__)

NAMESPACE = "tailrace"
_FIND_S = 10.0


class QueueActor:
    """One model's queue. A plain class: Ray makes the actor, tests use it as it is.

    Every answer leaves as soon as it is known, one by one: an answer that waited for another's
    could wait for a release that waits behind it. Whoever begins to lead counts a higher epoch and
    knows what is taken once the decode replicas have reported.
    """

    def __init__(
        self,
        app: str,
        secret: bytes | None = None,
        *,
        model: str | None = None,
        host: str | None = None,
        advertise_host: str | None = None,
        ports: Sequence[int] | None = None,
        limits: QueueLimits | None = None,
        settings: LinkSettings | None = None,
        place: int = 0,
        find_peer: Callable[[], Awaitable[str]] | None = None,
        alone: bool = False,
    ) -> None:
        """`model` is the name that its figures carry, if not the application's. `host` None binds
        the address by which Ray knows this node; where `host` is all of them, that is what others
        are told. `secret` None reads the cluster's: as an argument of an actor it would lie in
        Ray's control store. `find_peer` tells where the queue at the other `place` listens; without
        one this queue leads at once and for ever. `alone`: in a process of its own."""
        if alone:
            spare_startup()
        secret = read_link_secret() if secret is None else secret
        self._place = place
        name = queue_name(app, place)
        if advertise_host is None and host in ("0.0.0.0", "::"):
            advertise_host = _node_address()
        self._leadership = Leadership(None if find_peer is None else place)
        self._queue = AdmissionQueue(0, limits)
        self._server = LinkServer(
            secret,
            "queue",
            name,
            handlers=LinkHandlers(
                on_message=self._message, on_open=self._opened, on_close=self._closed
            ),
            host=host if host is not None else _node_address(),
            advertise_host=advertise_host,
            ports=ports,
            settings=settings,
        )
        self._starting = asyncio.Lock()
        self._started = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._replica_of: dict[Link, str] = {}
        self._figures = QueueFigures(self._queue, model or app, name)
        self._tasks: list[asyncio.Task[None]] = []
        self._peer: PeerWatch | None = None
        if find_peer is None:
            self._peer_away()
        else:
            self._peer = PeerWatch(
                find_peer,
                secret,
                name,
                on_says=self._peer_says,
                on_away=self._peer_away,
                settings=settings,
            )

    async def address(self) -> str:
        """`host:port` to dial. Binds on the first call; raises ConfigError when it cannot."""
        async with self._starting:
            if not self._started:
                await self._server.start()
                self._tasks = [
                    background(self._figures.run(partial(self._linked, "gateway")), "metrics")
                ]
                if self._peer is not None:
                    self._tasks.append(background(self._peer.run(), "watching the other queue"))
                self._started = True
        return self._server.address

    async def snapshot(self) -> dict[str, Any]:
        """Counters and levels, for status and metrics."""
        return {
            "place": self._place,
            "pid": os.getpid(),
            "leads": self._leadership.leads,
            "epoch": self._queue.epoch,
            "peer_linked": self._peer is not None and self._peer.linked,
            "waiting": self._queue.num_waiting,
            "free_slots": self._queue.free_slots,
            "tiers": sorted(self._queue.tiers.rules),
            "revision": self._queue.tiers.revision,
            "waiting_by_tier": self._queue.waiting(),
            "granted": self._figures.granted,
            "refused": dict(self._figures.refused),
            "gateways": sorted(link.peer_id for link in self._linked("gateway")),
            "decodes": sorted(link.peer_id for link in self._linked("decode")),
        }

    async def close(self) -> None:
        """End all links. The actor itself ends by `remove_queue`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for task in self._tasks:
            task.cancel()
        await self._server.close("the queue is closing")

    def _linked(self, role: str) -> list[Link]:
        return [link for link in self._server.links.values() if link.peer_role == role]

    # Leading

    def _peer_says(self, epoch: int) -> None:
        self._leadership.peer_says(epoch, time.time_ns())
        self._adopt()

    def _peer_away(self) -> None:
        self._leadership.peer_away(time.time_ns())
        self._adopt()

    def _adopt(self) -> None:
        epoch, before = self._leadership.epoch, self._queue.epoch
        if epoch == before:
            return
        self._queue.lead(epoch)
        self._figures.leads = self._leadership.leads
        links = list(self._server.links.values())
        if epoch > before:
            logger.info("this queue leads with epoch %d", epoch)
            for link in links:
                link.send([Kind.LEADS, epoch])
            return
        # Whatever was promised to a link ends with it, and whoever comes back is told.
        logger.warning("the other queue leads with a higher epoch than %d: standing by", before)
        for link in links:
            link.close("another queue leads")

    # Handlers

    def _opened(self, link: Link) -> None:
        link.send([Kind.LEADS, self._queue.epoch])

    def _message(self, link: Link, message: list[Any]) -> None:
        kind, role, now = message[0], link.peer_role, _now()
        if role == "gateway" and kind == Kind.ACQUIRE:
            actions = self._queue.acquire(link.peer_id, Acquire.from_wire(message), now)
        elif role == "gateway" and kind == Kind.ABANDON:
            actions = self._queue.abandon(link.peer_id, message[1], now)
        elif role == "gateway" and kind == Kind.RELEASE:
            actions = self._queue.release(link.peer_id, message[1], now)
        elif role == "gateway" and kind == Kind.POLICY:
            tiers, limits = TierTable.from_wire(message[1]), QueueLimits.from_wire(message[2])
            actions = self._queue.policy(tiers, limits, now)
        elif role == "decode" and kind == Kind.REPORT:
            report = Report.from_wire(message)
            self._replica_of[link] = report.replica_id
            actions = self._queue.replica_reported(report, now)
        else:
            raise ValueError(f"a {role} must not send {Kind(kind).name} to the queue")
        self._perform(actions)

    def _closed(self, link: Link, reason: CloseReason) -> None:
        now = _now()
        if link.peer_role == "gateway":
            logger.info("gateway %s left the queue: %s", link.peer_id, reason)
            self._perform(self._queue.gateway_lost(link.peer_id, now))
        replica_id = self._replica_of.pop(link, None)
        if replica_id is not None:
            logger.info("decode %s left the queue: %s", replica_id, reason)
            self._perform(self._queue.replica_lost(replica_id, now))

    def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            # A gateway that is gone needs no answer: its `_closed` voids what it was granted.
            link = self._server.links.get(action.gateway_id)
            if isinstance(action, Granted):
                self._figures.granted += 1
                answer = [Kind.GRANT, action.ticket, action.grant.to_wire()]
            else:
                self._count_refusal(action)
                answer = refusal_to_wire(action.ticket, action.error)
            if link is not None:
                link.send(answer)
        self._arm()

    def _count_refusal(self, refused: Refused) -> None:
        code: str = getattr(refused.error, "code", "internal_error")
        totals = self._figures.refused
        totals[code] = totals.get(code, 0) + 1

    def _arm(self) -> None:
        """One timer, for the next moment at which anything can expire."""
        at = self._queue.next_alarm()
        if self._timer is not None and (at is None or at < self._timer_at):
            self._timer.cancel()
            self._timer = None
        if at is not None and self._timer is None:
            self._timer_at = at
            self._timer = asyncio.get_running_loop().call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._perform(self._queue.tick(_now()))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _ray() -> Any:
    """Ray, imported only where an actor is wanted, and untyped as most of it is."""
    import ray

    return ray


def _node_address() -> str:
    return _ray().util.get_node_ip_address()


def queue_name(app: str, place: int = 0) -> str:
    """Of the actor. Either place may lead."""
    return f"tailrace-queue:{app}" if place == 0 else f"tailrace-queue:{app}:2"


def ensure_queue(
    app: str,
    *,
    place: int = 0,
    model: str | None = None,
    host: str | None = None,
    advertise_host: str | None = None,
    ports: Sequence[int] | None = None,
    limits: QueueLimits | None = None,
    settings: LinkSettings | None = None,
) -> Any:
    """The actor handle of the model's queue, created if it is not there. Blocks; safe to race.

    It is detached, outlives whoever created it and restarts for ever, until `remove_queue`. The
    arguments of whoever created it hold; later callers' are ignored. The queue at place 0 creates
    the other one, which stands by.
    """
    options: dict[str, Any] = {
        "model": model,
        "host": host,
        "advertise_host": advertise_host,
        "ports": ports,
        "limits": limits,
        "settings": settings,
    }
    find_peer = (
        partial(_find_or_create_standby, app, options) if place == 0 else partial(find_queue, app)
    )
    actor = (
        _ray()
        .remote(QueueActor)
        .options(
            name=queue_name(app, place),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            # Not in the placement group of the replica that creates it: it outlives that. And where
            # there are several nodes, not both on one.
            scheduling_strategy="DEFAULT" if place == 0 else "SPREAD",
        )
    )
    return actor.remote(app, **options, place=place, find_peer=find_peer, alone=True)


def _handle(app: str, place: int = 0) -> Any:
    return _ray().get_actor(queue_name(app, place), namespace=NAMESPACE)


def remove_queue(app: str) -> bool:
    """End the model's queues for good; False when there is none. Blocks, a second where there was
    one."""
    found = False
    # In this order: the first is who creates the second, and may have begun to when it is killed.
    for place, looks in ((0, 1), (1, 5)):
        for look in range(looks):
            try:
                handle = _handle(app, place)
            except ValueError:
                if not found:
                    break
                if look + 1 < looks:
                    time.sleep(0.2)
                continue
            _ray().kill(handle, no_restart=True)
            found = True
    return found


async def find_queue(app: str, place: int = 0) -> str:
    """Address of a queue of the model. Raises ValueError when nobody has created it, or Ray's
    errors and TimeoutError while it restarts."""
    handle = await asyncio.to_thread(_handle, app, place)
    return await asyncio.wait_for(handle.address.remote(), _FIND_S)


async def create_or_find_queue(app: str, **options: Any) -> str:
    """As `find_queue`, creating the actor first if need be; `options` as for `ensure_queue`."""
    handle = await asyncio.to_thread(ensure_queue, app, **options)
    return await asyncio.wait_for(handle.address.remote(), _FIND_S)


async def _find_or_create_standby(app: str, options: dict[str, Any]) -> str:
    """As `find_queue`. One that is not there is made, which nobody waits for: whoever makes it has
    to lead until then."""
    try:
        return await find_queue(app, 1)
    except ValueError:
        await asyncio.to_thread(ensure_queue, app, place=1, **options)
        raise
