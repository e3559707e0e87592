"""Which requests this gateway remembers, and how it explains them.

A record is written while its request is answered. Journals of decode replicas are fetched when
somebody asks, and at once for the slowest of each tier, so that those stay whole for as long as
they are remembered. Requests of other gateways are asked for through a decode replica, to which
every gateway has a link.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from deployments.explain.asking import Handler
from deployments.explain.clocks import Offset
from deployments.explain.decode import DecodeFacts
from deployments.explain.request import Leg, RequestRecord
from deployments.explain.ring import Ring
from deployments.explain.waterfall import Phase, Waterfall, assemble
from deployments.link.link import Link
from engine.errors import RequestError

logger = logging.getLogger(__name__)

MAX_FETCHING = 64
"""Explanations being put together in the background at once; more wait until somebody asks."""

MAX_LISTED = 200
MAX_JOURNALS = 32
"""Submits of one request whose replicas are asked."""

ELSEWHERE_S = 2.0


@runtime_checkable
class JournalSource(Protocol):
    """The way to what other processes know."""

    async def journal(self, model: str, leg: Leg) -> tuple[DecodeFacts, Offset | None] | None:
        """A decode replica's journal of one submit of ours, and its clock. None: not to be had."""
        ...

    async def elsewhere(self, what: str, *arguments: Any) -> list[Any]:
        """What the other gateways answer."""
        ...


@dataclass(slots=True)
class Kept:
    """A request that ended."""

    record: RequestRecord
    waterfall: Waterfall | None = None
    """Put together already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What to list."""

    slowest: bool = True
    """The slowest first; else the latest."""

    limit: int = 20
    tier: str | None = None
    model: str | None = None
    salt: str | None = None
    """Only that tenant's. None: everybody's."""

    def __post_init__(self) -> None:
        if not 1 <= self.limit <= MAX_LISTED:
            raise RequestError(
                f"limit={self.limit}: between 1 and {MAX_LISTED} requests are listed", param="limit"
            )

    def to_wire(self) -> list[Any]:
        return [self.slowest, self.limit, self.tier, self.model, self.salt]

    @classmethod
    def from_wire(cls, wire: Sequence[Any]) -> Listing:
        slowest, limit, tier, model, salt = wire
        return cls(slowest=slowest, limit=limit, tier=tier, model=model, salt=salt)


class Explainer:
    """One gateway's memory of its requests. For one event loop."""

    def __init__(
        self,
        source: JournalSource | None = None,
        *,
        gateway: str = "",
        recent: int = 1024,
        slowest: int = 32,
        keep_s: float = 3600.0,
    ) -> None:
        self.source = source
        self.gateway = gateway
        self.on_traced: Callable[[Waterfall], None] | None = None
        """Gets the waterfall of each request that is traced."""

        self._ring: Ring[Kept] = Ring(recent=recent, slowest=slowest, keep_s=keep_s)
        self._open: dict[int, RequestRecord] = {}
        self._fetching: set[asyncio.Task[None]] = set()

    def resize(self, *, recent: int, slowest: int, keep_s: float) -> None:
        self._ring.resize(recent=recent, slowest=slowest, keep_s=keep_s)

    def begin(self, record: RequestRecord) -> None:
        """A request is being answered. `end` must follow."""
        record.gateway = self.gateway
        self._open[id(record)] = record

    def end(self, record: RequestRecord) -> None:
        """`ended_s`, `outcome` and `status` are set."""
        self._open.pop(id(record), None)
        kept = Kept(record)
        slow = self._ring.add(
            _key(record.salt, record.request_id),
            kept,
            tier=record.tier,
            duration_s=record.duration_s,
            now=record.ended_s,
        )
        traced = record.trace is not None and record.trace[3]
        if (slow or traced) and len(self._fetching) < MAX_FETCHING:
            task = asyncio.create_task(self._settle(kept, traced))
            self._fetching.add(task)
            task.add_done_callback(self._fetching.discard)

    def answers(self) -> dict[str, Handler]:
        """For other gateways' questions."""

        async def explain(link: Link, request_id: str, salt: str | None) -> dict[str, Any] | None:
            return await self.explain(request_id, salt)

        def requests(link: Link, listing: list[Any]) -> list[dict[str, Any]]:
            return self.list_here(Listing.from_wire(listing))

        return {"explain": explain, "requests": requests}

    async def close(self) -> None:
        for task in list(self._fetching):
            task.cancel()

    async def waterfall(self, record: RequestRecord) -> Waterfall:
        """As far as the request is, with what its replicas tell now."""
        journals: dict[tuple[str, int], tuple[DecodeFacts, Offset | None]] = {}
        source = self.source
        if source is not None:
            legs = [leg for leg in record.legs if leg.submitted_s][-MAX_JOURNALS:]
            found = await asyncio.gather(*(source.journal(record.model, leg) for leg in legs))
            for leg, journal in zip(legs, found, strict=True):
                if journal is not None:
                    journals[leg.replica, leg.stream_id] = journal
        return assemble(record, journals, time.monotonic())

    async def explain(self, request_id: str, salt: str | None = None) -> dict[str, Any] | None:
        """The explanation of a request of this gateway: of the latest one with that id, which may
        be the client's or the answer's. None: not remembered here, or another tenant's."""
        for record in reversed(self._open.values()):
            if _is(record, request_id, salt):
                return (await self.waterfall(record)).to_json()
        kept = None if salt is None else self._ring.get(_key(salt, request_id))
        if kept is None:
            kept = self._ring.find(lambda kept: _is(kept.record, request_id, salt))
        if kept is None:
            return None
        return (await self._whole(kept)).to_json()

    async def find(self, request_id: str, salt: str | None = None) -> dict[str, Any]:
        """As `explain`, of any gateway. Raises RequestError (404)."""
        told = await self.explain(request_id, salt)
        if told is not None:
            return told
        others: list[Any] = []
        if self.source is not None:
            others = await self.source.elsewhere("explain", request_id, salt)
        for other in others:
            if other is not None:
                return other
        raise RequestError(
            f"request {request_id[:128]!r}: none of {1 + len(others)} gateways remembers it; "
            "they keep the latest requests and the slowest of each tier, see "
            "/tailrace/requests and `explain` in the gateway's user_config",
            code="request_not_found",
            param="request_id",
            status=404,
        )

    def list_here(self, listing: Listing) -> list[dict[str, Any]]:
        """This gateway's requests."""
        if listing.slowest:
            entries = sorted(self._ring.slow(listing.tier), key=lambda k: -k.record.duration_s)
        else:
            entries = list(self._ring)
        wanted = [kept for kept in entries if _wanted(kept.record, listing)]
        return [_row(kept) for kept in wanted[: listing.limit]]

    async def list_all(self, listing: Listing) -> dict[str, Any]:
        """Every gateway's requests that can be had."""
        others: list[Any] = []
        if self.source is not None:
            others = await self.source.elsewhere("requests", listing.to_wire())
        rows = [*self.list_here(listing), *(row for other in others if other for row in other)]
        key = "duration_s" if listing.slowest else "received_at"
        rows.sort(key=lambda row: -row[key])
        return {"object": "list", "gateways": 1 + len(others), "data": rows[: listing.limit]}

    async def _whole(self, kept: Kept) -> Waterfall:
        """Put together once, unless a replica's part is missing: it may tell it later."""
        waterfall = kept.waterfall or await self.waterfall(kept.record)
        if not waterfall.unaccounted_s:
            kept.waterfall = waterfall
        return waterfall

    async def _settle(self, kept: Kept, traced: bool) -> None:
        """Have what a replica knows before it forgets."""
        try:
            waterfall = await self._whole(kept)
            if traced and self.on_traced is not None:
                self.on_traced(waterfall)
        except Exception:
            logger.exception(
                "request %s could not be explained",
                kept.record.request_id,
                extra={"request_id": kept.record.request_id},
            )


def _key(salt: str, request_id: str) -> str:
    """Clients choose their ids: one tenant's must not take the place of another's."""
    return f"{salt}/{request_id}"


def _is(record: RequestRecord, request_id: str, salt: str | None) -> bool:
    return request_id in (record.request_id, record.answer_id) and salt in (None, record.salt)


def _wanted(record: RequestRecord, listing: Listing) -> bool:
    return (
        listing.tier in (None, record.tier)
        and listing.model in (None, record.model)
        and listing.salt in (None, record.salt)
    )


def _row(kept: Kept) -> dict[str, Any]:
    record = kept.record
    # Without a replica's journal only what the gateway saw itself can be blamed.
    waterfall = kept.waterfall or assemble(record, {}, record.ended_s)
    dominant = waterfall.dominant
    if dominant is Phase.UNACCOUNTED:
        dominant = None
    return {
        "request_id": record.request_id,
        "answer_id": record.answer_id or None,
        "gateway": record.gateway,
        "model": record.model or None,
        "tier": record.tier,
        "received_at": record.received_unix_s,
        "duration_s": round(record.duration_s, 6),
        "ttft_s": (
            round(record.first_token_s - record.received_s, 6) if record.first_token_s else None
        ),
        "outcome": record.outcome,
        "status": record.status,
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "dominant_phase": None if dominant is None else dominant.value,
        "replica": record.legs[-1].replica if record.legs else None,
    }
