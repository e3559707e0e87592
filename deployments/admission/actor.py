"""The admission queue as a process: a named Ray actor that gateways and decodes dial."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Any

from deployments.admission.figures import QueueFigures
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
    could wait for a release that waits behind it. A restarted actor counts a higher epoch and knows
    what is taken once the decode replicas have dialled it again and reported.
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
        alone: bool = False,
    ) -> None:
        """`model` is the name that its figures carry, if not the application's. `host` None binds
        the address by which Ray knows this node. `secret` None reads the cluster's: as an argument
        of an actor it would lie in Ray's control store. `alone`: in a process of its own."""
        if alone:
            spare_startup()
        self._queue = AdmissionQueue(time.time_ns(), limits)
        self._server = LinkServer(
            read_link_secret() if secret is None else secret,
            "queue",
            queue_name(app),
            handlers=LinkHandlers(on_message=self._message, on_close=self._closed),
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
        self._figures = QueueFigures(self._queue, model or app, queue_name(app))
        self._reporting: asyncio.Task[None] | None = None

    async def address(self) -> str:
        """`host:port` to dial. Binds on the first call; raises ConfigError when it cannot."""
        async with self._starting:
            if not self._started:
                await self._server.start()
                self._reporting = background(self._figures.run(self._gateways), "metrics")
                self._started = True
        return self._server.address

    async def snapshot(self) -> dict[str, Any]:
        """Counters and levels, for status and metrics."""
        return {
            "epoch": self._queue.epoch,
            "waiting": self._queue.num_waiting,
            "free_slots": self._queue.free_slots,
            "tiers": sorted(self._queue.tiers.rules),
            "revision": self._queue.tiers.revision,
            "waiting_by_tier": self._queue.waiting(),
            "granted": self._figures.granted,
            "refused": dict(self._figures.refused),
            "gateways": sorted(link.peer_id for link in self._gateways()),
        }

    async def close(self) -> None:
        """End all links. The actor itself ends by `remove_queue`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._reporting is not None:
            self._reporting.cancel()
        await self._server.close("the queue is closing")

    def _gateways(self) -> list[Link]:
        return [link for link in self._server.links.values() if link.peer_role == "gateway"]

    # Handlers

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


def queue_name(app: str) -> str:
    return f"tailrace-queue:{app}"


def ensure_queue(
    app: str,
    *,
    model: str | None = None,
    host: str | None = None,
    advertise_host: str | None = None,
    ports: Sequence[int] | None = None,
    limits: QueueLimits | None = None,
    settings: LinkSettings | None = None,
) -> Any:
    """The actor handle of the model's queue, created if it is not there. Blocks; safe to race.

    It is detached, outlives whoever created it and restarts for ever, until `remove_queue`. The
    arguments of whoever created it hold; later callers' are ignored.
    """
    actor = (
        _ray()
        .remote(QueueActor)
        .options(
            name=queue_name(app),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            num_cpus=0,
            # Not in the placement group of the replica that creates it: it outlives that.
            scheduling_strategy="DEFAULT",
        )
    )
    return actor.remote(
        app,
        model=model,
        host=host,
        advertise_host=advertise_host,
        ports=ports,
        limits=limits,
        settings=settings,
        alone=True,
    )


def _handle(app: str) -> Any:
    return _ray().get_actor(queue_name(app), namespace=NAMESPACE)


def remove_queue(app: str) -> bool:
    """End the model's queue for good; False when there is none. Blocks."""
    try:
        handle = _handle(app)
    except ValueError:
        return False
    _ray().kill(handle, no_restart=True)
    return True


async def find_queue(app: str) -> str:
    """Address of the model's queue. Raises ValueError when nobody has created it, or Ray's errors
    and TimeoutError while it restarts."""
    handle = await asyncio.to_thread(_handle, app)
    return await asyncio.wait_for(handle.address.remote(), _FIND_S)


async def create_or_find_queue(app: str, **options: Any) -> str:
    """As `find_queue`, creating the actor first if need be; `options` as for `ensure_queue`."""
    handle = await asyncio.to_thread(ensure_queue, app, **options)
    return await asyncio.wait_for(handle.address.remote(), _FIND_S)
