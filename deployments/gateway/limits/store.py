"""Where limits are kept: the interface, and the store in this process's memory.

A request takes all of what it needs or nothing: requests, tokens (its prompt and all the output it
may get) and a place among those running at once. What it did not use is given back when it ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from deployments.gateway.limits.window import SlidingWindow, Standing

Kind = Literal["requests", "tokens", "retries", "concurrency"]
KINDS: tuple[Kind, ...] = get_args(Kind)

IDLE_LOOK_S = 300.0


@dataclass(frozen=True, slots=True)
class Claim:
    """One limit that a request falls under, and what it asks of it."""

    owner: str
    """`tenant:NAME` or `key:ID`: limits of one owner are shared by all of its requests."""

    kind: Kind
    limit: int
    """Of the last 60 seconds; of `concurrency`: at once."""

    cost: int

    @property
    def name(self) -> str:
        return f"{self.owner}:{self.kind}"


@dataclass(frozen=True, slots=True)
class Taken:
    """What a request holds. To be handed back once, whatever happens."""

    lease: str
    claims: tuple[Claim, ...]
    slots: Mapping[str, int]
    """By claim name: where in the window it was counted."""

    standings: Mapping[str, Standing]
    """By claim name, with this request counted."""


@dataclass(frozen=True, slots=True)
class Denied:
    """The first limit that has no room."""

    claim: Claim
    wait_s: float | None
    """Until it would fit. Infinite: never, the request alone is above the limit. None: nobody
    knows, somebody has to end first."""

    standings: Mapping[str, Standing]


class LimitStore(Protocol):
    async def take(self, lease: str, claims: Sequence[Claim]) -> Taken | Denied:
        """All claims or none, atomically. `lease` is unique."""
        ...

    async def look(self, claims: Sequence[Claim]) -> Mapping[str, Standing]:
        """How the limits of these claims stand, by claim name. Takes nothing."""
        ...

    async def give_back(self, taken: Taken, unused_tokens: int) -> None:
        """The request ended; `unused_tokens` of its token claims were not needed."""
        ...

    async def renew(self, leases: Sequence[Taken]) -> None:
        """These requests still run. Whoever stops saying so loses its places after a while."""
        ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class _Owner:
    window: SlidingWindow = field(default_factory=SlidingWindow)
    running: set[str] = field(default_factory=set[str])


class MemoryStore:
    """Limits of one gateway, exact because its event loop is one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owners: dict[str, _Owner] = {}
        self._looked = clock()

    async def take(self, lease: str, claims: Sequence[Claim]) -> Taken | Denied:
        return self.take_now(lease, claims)

    def take_now(self, lease: str, claims: Sequence[Claim]) -> Taken | Denied:
        """`take` without a suspension."""
        now = self._clock()
        self._forget_idle(now)
        for claim in claims:
            wait_s = self._wait_s(claim, now)
            if wait_s is None or wait_s > 0:
                return Denied(claim, wait_s, self._standings(claims, now))
        slots: dict[str, int] = {}
        for claim in claims:
            owner = self._owners.setdefault(claim.name, _Owner())
            if claim.kind == "concurrency":
                owner.running.add(lease)
            else:
                slots[claim.name] = owner.window.take(claim.cost, now)
        return Taken(lease, tuple(claims), slots, self._standings(claims, now))

    async def look(self, claims: Sequence[Claim]) -> Mapping[str, Standing]:
        return self._standings(claims, self._clock())

    async def give_back(self, taken: Taken, unused_tokens: int) -> None:
        self.give_back_now(taken, unused_tokens)

    def give_back_now(self, taken: Taken, unused_tokens: int) -> None:
        """`give_back` without a suspension."""
        for claim in taken.claims:
            owner = self._owners.get(claim.name)
            if owner is None:
                continue
            if claim.kind == "concurrency":
                owner.running.discard(taken.lease)
            elif claim.kind == "tokens":
                owner.window.give_back(taken.slots[claim.name], min(unused_tokens, claim.cost))

    async def renew(self, leases: Sequence[Taken]) -> None:
        """Nothing to do: this store dies with those who hold leases."""

    async def close(self) -> None:
        """Nothing is held outside of this process."""

    def _wait_s(self, claim: Claim, now: float) -> float | None:
        owner = self._owners.setdefault(claim.name, _Owner())
        if claim.kind == "concurrency":
            return 0.0 if len(owner.running) + claim.cost <= claim.limit else None
        return owner.window.wait_s(claim.limit, claim.cost, now)

    def _standings(self, claims: Sequence[Claim], now: float) -> dict[str, Standing]:
        standings: dict[str, Standing] = {}
        for claim in claims:
            owner = self._owners.get(claim.name)
            if claim.kind == "concurrency":
                running = len(owner.running) if owner else 0
                standings[claim.name] = Standing(claim.limit, max(0, claim.limit - running), 0.0)
            else:
                window = owner.window if owner else SlidingWindow()
                standings[claim.name] = window.standing(claim.limit, now)
        return standings

    def _forget_idle(self, now: float) -> None:
        """Keys come and go; what nobody used for a window is as good as new."""
        if now - self._looked < IDLE_LOOK_S:
            return
        self._looked = now
        for name, owner in list(self._owners.items()):
            owner.window.taken(now)
            if owner.window.idle and not owner.running:
                del self._owners[name]
