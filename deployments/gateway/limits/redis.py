"""Limits shared by several gateways: one script in Redis takes everything or nothing.

The algorithm is that of `window.SlidingWindow`, on Redis's clock, so gateways need not agree on the
time. All keys of one request must lie in one cluster slot: they share the hash tag `{tailrace}`.
"""

# The client of Redis is only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingModuleSource=false

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from deployments.gateway.limits.store import Claim, Denied, MemoryStore, Taken
from deployments.gateway.limits.window import SLOTS, Standing
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

LEASE_S = 30.0
"""Places of a gateway that died come back after this long; `renew` is due more often."""

TIMEOUT_S = 0.5
"""Longest that a request waits for Redis before this gateway decides alone."""

CONNECTIONS = 8

AWAY_S = 5.0
"""How long Redis is left alone after it failed."""

# Without a lease it only looks.
_TAKE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local slot_ms, slots, lease_ms, lease = ARGV[1] + 0, ARGV[2] + 0, ARGV[3] + 0, ARGV[4]
local slot = math.floor(now / slot_ms)
local denied, wait = 0, 0
local out, totals = {}, {}
for i = 1, #KEYS do
  local kind, limit, cost = ARGV[2 + 3 * i], ARGV[3 + 3 * i] + 0, ARGV[4 + 3 * i] + 0
  if kind == 'concurrency' then
    redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', now)
    local running = redis.call('ZCARD', KEYS[i])
    totals[i] = {running, 0}
    if denied == 0 and running + cost > limit then denied, wait = i, -1 end
  else
    local fields = redis.call('HGETALL', KEYS[i])
    local held, total, last = {}, 0, 0
    for j = 1, #fields, 2 do
      local at, amount = fields[j] + 0, fields[j + 1] + 0
      if at + 1 + slots <= now / slot_ms then
        redis.call('HDEL', KEYS[i], fields[j])
      else
        total = total + amount
        if amount > 0 then
          held[#held + 1] = {at, amount}
          if at > last then last = at end
        end
      end
    end
    local reset = 0
    if last > 0 then reset = (last + 1 + slots) * slot_ms - now end
    totals[i] = {total, reset}
    if denied == 0 and total + cost > limit then
      denied = i
      if cost > limit then
        wait = -2
      else
        table.sort(held, function(a, b) return a[1] < b[1] end)
        local excess = total + cost - limit
        for j = 1, #held do
          excess = excess - held[j][2]
          if excess <= 0 then
            wait = math.max(1, (held[j][1] + 1 + slots) * slot_ms - now)
            break
          end
        end
      end
    end
  end
end
if denied == 0 and lease ~= '' then
  for i = 1, #KEYS do
    local kind, cost = ARGV[2 + 3 * i], ARGV[4 + 3 * i] + 0
    if kind == 'concurrency' then
      redis.call('ZADD', KEYS[i], now + lease_ms, lease)
      redis.call('PEXPIRE', KEYS[i], 2 * lease_ms)
      totals[i][1] = totals[i][1] + 1
    else
      redis.call('HINCRBY', KEYS[i], slot, cost)
      redis.call('PEXPIRE', KEYS[i], (slots + 2) * slot_ms)
      totals[i][1] = totals[i][1] + cost
      totals[i][2] = (slot + 1 + slots) * slot_ms - now
    end
  end
end
for i = 1, #KEYS do
  out[2 * i - 1], out[2 * i] = totals[i][1], math.floor(totals[i][2])
end
return {denied, math.floor(wait), slot, unpack(out)}
"""

_GIVE_BACK = """
for i = 1, #KEYS do
  local kind, slot, amount = ARGV[3 * i - 1], ARGV[3 * i], ARGV[3 * i + 1] + 0
  if kind == 'concurrency' then
    redis.call('ZREM', KEYS[i], ARGV[1])
  elseif amount > 0 then
    local held = redis.call('HGET', KEYS[i], slot)
    if held then
      redis.call('HINCRBY', KEYS[i], slot, -math.min(held + 0, amount))
    end
  end
end
return 1
"""

_RENEW = """
local time = redis.call('TIME')
local until_ms = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[1]
for i = 1, #KEYS do
  redis.call('ZADD', KEYS[i], 'XX', until_ms, ARGV[i + 1])
  redis.call('PEXPIRE', KEYS[i], 2 * ARGV[1])
end
return 1
"""


class RedisStore:
    """Limits in Redis (or Valkey). While it cannot be asked this gateway keeps its own count: each
    gateway then enforces the limits alone, and `alone` says so.

    url: `redis://…` or `rediss://…`. Raises ConfigError for anything else, and when the client is
    not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "limit",
        window_s: float = 60.0,
        lease_s: float = LEASE_S,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            module: Any = import_module("redis.asyncio")
        except ImportError:
            raise ConfigError(
                f"limits_store={_without_password(url)!r} needs the package redis: pip install "
                "'tailrace[redis]', or leave limits_store out to keep limits in memory"
            ) from None
        # A burst waits for one of a few connections rather than opening one each.
        try:
            pool: Any = module.BlockingConnectionPool.from_url(
                url,
                max_connections=CONNECTIONS,
                timeout=timeout_s,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
            )
        except ValueError:
            # Not the parser's own message: it quotes what a password may be part of.
            raise ConfigError(
                "limits_store: no URL of a Redis; write redis://[USER:PASSWORD@]HOST[:PORT][/DB], "
                "special characters of the password percent-encoded"
            ) from None
        self._client: Any = module.Redis.from_pool(pool)
        self._timeout_s = timeout_s
        self._failures: tuple[type[BaseException], ...] = (
            import_module("redis.exceptions").RedisError,
            OSError,
            asyncio.TimeoutError,
        )
        self._prefix = prefix
        self._slot_ms = max(1, round(1000 * window_s / SLOTS))
        self._lease_ms = round(1000 * lease_s)
        self._clock = clock
        self._take: Any = self._client.register_script(_TAKE)
        self._give_back: Any = self._client.register_script(_GIVE_BACK)
        self._renew: Any = self._client.register_script(_RENEW)
        self._local = MemoryStore(clock)
        self._here: set[str] = set()
        self._away_until: float | None = None
        self.failures = 0
        """Times that Redis could not be asked."""

    @property
    def alone(self) -> bool:
        """Redis was away when it was last asked."""
        return self._away_until is not None

    async def take(self, lease: str, claims: Sequence[Claim]) -> Taken | Denied:
        """See `LimitStore`."""
        if not claims:
            return Taken(lease, (), {}, {})
        arguments: list[Any] = [self._slot_ms, SLOTS, self._lease_ms, lease]
        for claim in claims:
            arguments += [claim.kind, claim.limit, claim.cost]
        answer = await self._ask(self._take, [self._key(c) for c in claims], arguments)
        if answer is None:
            taken = self._local.take_now(lease, claims)
            if isinstance(taken, Taken):
                self._here.add(lease)
            return taken
        denied, wait_ms, slot, *totals = (int(value) for value in answer)
        standings = _standings(claims, totals)
        if denied:
            wait_s = {-1: None, -2: math.inf}.get(wait_ms, wait_ms / 1000)
            return Denied(claims[denied - 1], wait_s, standings)
        slots = {claim.name: slot for claim in claims}
        return Taken(lease, tuple(claims), slots, standings)

    async def look(self, claims: Sequence[Claim]) -> Mapping[str, Standing]:
        """See `LimitStore`."""
        if not claims:
            return {}
        arguments: list[Any] = [self._slot_ms, SLOTS, self._lease_ms, ""]
        for claim in claims:
            arguments += [claim.kind, claim.limit, 0]
        answer = await self._ask(self._take, [self._key(c) for c in claims], arguments)
        if answer is None:
            return await self._local.look(claims)
        return _standings(claims, [int(value) for value in answer[3:]])

    async def give_back(self, taken: Taken, unused_tokens: int) -> None:
        """See `LimitStore`. What cannot be given back runs out of the window by itself."""
        if taken.lease in self._here:
            self._here.discard(taken.lease)
            self._local.give_back_now(taken, unused_tokens)
            return
        arguments: list[Any] = [taken.lease]
        for claim in taken.claims:
            unused = min(unused_tokens, claim.cost) if claim.kind == "tokens" else 0
            arguments += [claim.kind, taken.slots[claim.name], unused]
        if taken.claims:
            await self._ask(self._give_back, [self._key(c) for c in taken.claims], arguments)

    async def renew(self, leases: Sequence[Taken]) -> None:
        """See `LimitStore`. To be called every third of `LEASE_S` or so."""
        held = [
            (self._key(claim), taken.lease)
            for taken in leases
            if taken.lease not in self._here
            for claim in taken.claims
            if claim.kind == "concurrency"
        ]
        if held:
            names = [lease for _, lease in held]
            await self._ask(self._renew, [key for key, _ in held], [self._lease_ms, *names])

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, script: Any, keys: list[str], arguments: list[Any]) -> Any:
        """The script's answer; None while Redis is away."""
        if self._away_until is not None and self._clock() < self._away_until:
            return None
        try:
            answer = await asyncio.wait_for(script(keys=keys, args=arguments), 2 * self._timeout_s)
        except self._failures as error:
            self.failures += 1
            if self._away_until is None:
                logger.warning(
                    "limits: Redis cannot be asked, this gateway counts alone: %s", error
                )
            self._away_until = self._clock() + AWAY_S
            return None
        if self._away_until is not None:
            logger.info("limits: Redis answers again")
            self._away_until = None
        return answer

    def _key(self, claim: Claim) -> str:
        return f"{self._prefix}:{{tailrace}}:{claim.name}"


def _standings(claims: Sequence[Claim], totals: Sequence[int]) -> dict[str, Standing]:
    """`totals`: what is taken of each claim's limit, and milliseconds until it is reset."""
    return {
        claim.name: Standing(claim.limit, max(0, claim.limit - total), reset_ms / 1000)
        for claim, total, reset_ms in zip(claims, totals[::2], totals[1::2], strict=True)
    }


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
