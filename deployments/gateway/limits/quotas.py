"""What a request takes of its owners' limits, and gives back when it ends."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Coroutine, Mapping
from typing import Any

from deployments.background import background
from deployments.gateway.limits.redis import LEASE_S, RedisStore
from deployments.gateway.limits.store import Claim, Denied, Kind, LimitStore, MemoryStore, Taken
from deployments.gateway.limits.window import Standing
from engine.errors import Overloaded

logger = logging.getLogger(__name__)

BUSY_RETRY_S = 1.0
"""Until a place may be free: nobody knows when another request ends."""

SHOWN: tuple[Kind, ...] = ("requests", "tokens")
"""Kinds of limits that have headers."""

Headers = tuple[tuple[bytes, bytes], ...]


class LimitExceeded(Overloaded):
    """A tenant or key has used up what it may take."""

    def __init__(self, denied: Denied) -> None:
        claim, wait_s = denied.claim, denied.wait_s
        self.kind = claim.kind
        self.owner = claim.owner
        self.hopeless = wait_s is not None and math.isinf(wait_s)
        """Waiting does not help: the request alone is above the limit."""

        self.headers = standing_headers(denied.standings)
        super().__init__(
            _message(claim, denied.standings[claim.name].remaining, wait_s),
            code="rate_limit_exceeded",
            retry_after_s=BUSY_RETRY_S if wait_s is None or self.hopeless else wait_s,
        )


class Quotas:
    """One gateway's way to the limits: the store that its configuration names."""

    def __init__(self) -> None:
        self._store: LimitStore = MemoryStore()
        self._url: str | None = None
        self._held: dict[str, Taken] = {}
        self._errands: set[asyncio.Task[None]] = set()
        self._renewing: asyncio.Task[None] | None = None
        self.denials: dict[tuple[str, Kind], int] = {}
        """By owner and kind."""

    async def configure(self, url: str | None) -> None:
        """Keep limits in memory, or in the Redis at `url`. Raises ConfigError, changing nothing.

        What is held goes back to the store it was taken from.
        """
        if url == self._url:
            return
        fresh: LimitStore = MemoryStore() if url is None else RedisStore(url)
        before, self._store, self._url = self._store, fresh, url
        if self._renewing is not None:
            self._renewing.cancel()
            self._renewing = None
        if url is not None:
            self._renewing = background(self._renew(fresh), "renewing limits")
        self._soon(self._retire(before, set(self._held)))

    @property
    def alone(self) -> bool:
        """Other gateways' takings are not seen now, although they should be."""
        return isinstance(self._store, RedisStore) and self._store.alone

    async def take(self, lease: str, claims: list[Claim]) -> Quota:
        """All of it. Raises LimitExceeded. The result is to be closed whatever happens."""
        store = self._store
        if isinstance(store, MemoryStore):
            taken = store.take_now(lease, claims)
        else:
            taking = asyncio.ensure_future(store.take(lease, claims))
            try:
                taken = await asyncio.shield(taking)
            except asyncio.CancelledError:
                # The store may count it already, whoever asked for it.
                self._soon(_undo(store, taking))
                raise
        if isinstance(taken, Denied):
            key = taken.claim.owner, taken.claim.kind
            self.denials[key] = self.denials.get(key, 0) + 1
            raise LimitExceeded(taken)
        self._held[lease] = taken
        return Quota(self, store, taken)

    async def standing(self, claims: list[Claim]) -> Headers:
        """`x-ratelimit-*` as it is now, for an answer that takes nothing."""
        shown = [claim for claim in claims if claim.kind in SHOWN]
        return standing_headers(await self._store.look(shown)) if shown else ()

    def give_back(self, store: LimitStore, taken: Taken, unused_tokens: int) -> None:
        """At once where the store is here, soon where it is not."""
        self._held.pop(taken.lease, None)
        if isinstance(store, MemoryStore):
            store.give_back_now(taken, unused_tokens)
        else:
            self._soon(store.give_back(taken, unused_tokens))

    async def close(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        if self._errands:
            await asyncio.wait(self._errands, timeout=2.0)
        await self._store.close()

    async def _renew(self, store: LimitStore) -> None:
        while True:
            await asyncio.sleep(LEASE_S / 3)
            await store.renew(list(self._held.values()))

    async def _retire(self, store: LimitStore, leases: set[str]) -> None:
        """Requests that hold something of the old store still give it back there."""
        while leases & self._held.keys():
            await asyncio.sleep(1.0)
        await store.close()

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)


async def _undo(store: LimitStore, taking: asyncio.Future[Taken | Denied]) -> None:
    taken = await taking
    if isinstance(taken, Taken):
        await store.give_back(taken, sum(claim.cost for claim in taken.claims))


class Quota:
    """What one request holds."""

    def __init__(self, quotas: Quotas, store: LimitStore, taken: Taken) -> None:
        self._quotas = quotas
        self._store = store
        self._taken: Taken | None = taken
        self.headers = standing_headers(taken.standings)

    def close(self, unused_tokens: int) -> None:
        """The request ended. Idempotent."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self._quotas.give_back(self._store, taken, unused_tokens)


def standing_headers(standings: Mapping[str, Standing]) -> Headers:
    """`x-ratelimit-*`, of the tightest limit of each kind. Durations as OpenAI writes them."""
    out: list[tuple[bytes, bytes]] = []
    for kind in SHOWN:
        of_kind = [s for name, s in standings.items() if name.rpartition(":")[2] == kind]
        if not of_kind:
            continue
        tightest = min(of_kind, key=lambda s: s.remaining)
        for name, value in (
            (f"x-ratelimit-limit-{kind}", str(tightest.limit)),
            (f"x-ratelimit-remaining-{kind}", str(tightest.remaining)),
            (f"x-ratelimit-reset-{kind}", f"{tightest.reset_s:.3f}s"),
        ):
            out.append((name.encode(), value.encode()))
    return tuple(out)


def _message(claim: Claim, remaining: int, wait_s: float | None) -> str:
    whose = claim.owner.replace(":", " ", 1)
    match claim.kind:
        case "concurrency":
            return (
                f"{whose} has {claim.limit} requests running, which is its limit; try again when "
                "one has ended"
            )
        case "tokens":
            asked = f"{claim.cost} tokens (prompt and the output it may get)"
        case "retries":
            asked = "a retry"
        case _:
            asked = "another request"
    limit = f"{whose} may take {claim.limit} {claim.kind} a minute and has {remaining} left"
    if wait_s is not None and math.isinf(wait_s):
        return f"{limit}, this one needs {asked}; ask for less, waiting does not help"
    return f"{limit}, this one needs {asked}; try again in {wait_s or 0.0:.1f} s"
