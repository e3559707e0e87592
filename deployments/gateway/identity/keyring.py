"""From an `Authorization` header to who asks and what it may do."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from deployments.gateway.identity.config import (
    DEFAULT_TENANT,
    Ceilings,
    Directory,
    Key,
    Tenant,
)
from deployments.gateway.limits.store import Claim
from engine.errors import ConfigError, RequestError

PREFIX = "tr-"
"""Of keys we make, so that secret scanners know them."""

CEILINGS = tuple(Ceilings.model_fields)


def new_key() -> str:
    """256 random bits."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def tenant_salt(tenant: str) -> str:
    """Root of the tenant's prefix cache. Two tenants never share a block."""
    if tenant == DEFAULT_TENANT:
        return ""
    return hashlib.sha256(b"tailrace tenant\0" + tenant.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who asks. Holds no part of the key."""

    tenant: str
    key_id: str | None
    """None: no keys are configured."""

    salt: str
    weight: float
    operator: bool
    tiers: tuple[str, ...] | None
    models: frozenset[str] | None
    ceilings: Ceilings
    quotas: tuple[tuple[str, Tenant | Key], ...]
    """`(owner, limits)`, the key's own before its tenant's."""

    def claims(self, *, tokens: int, retry: bool) -> list[Claim]:
        """What a request takes. `tokens`: prompt and all the output it may get."""
        out: list[Claim] = []
        for owner, quota in self.quotas:
            if retry and quota.most_retries is not None:
                out.append(Claim(owner, "retries", quota.most_retries, 1))
            if quota.requests_per_minute is not None:
                out.append(Claim(owner, "requests", quota.requests_per_minute, 1))
            if quota.tokens_per_minute is not None:
                out.append(Claim(owner, "tokens", quota.tokens_per_minute, tokens))
            if quota.concurrency is not None:
                out.append(Claim(owner, "concurrency", quota.concurrency, 1))
        return out

    def may_see(self, tenant: str) -> bool:
        """Requests of this tenant, in explain and on the dashboard."""
        return self.operator or tenant == self.tenant


class KeyRing:
    """All keys in force. Immutable: a change of configuration makes a new one."""

    def __init__(self, directory: Directory, clock: Callable[[], float] = time.time) -> None:
        """`clock`: Unix seconds, for keys that expire.

        Raises ConfigError for a key of a tenant that is not declared where others are, `default`
        too: with a slip of the pen, or no pen at all, it would be a tenant without limits.
        """
        declared = directory.tenants
        for key in directory.keys:
            if declared and key.tenant not in declared:
                unnamed = "" if "tenant" in key.model_fields_set else " (it names none)"
                raise ConfigError(
                    f"key {key.id!r}: there is no tenant {key.tenant!r}{unnamed}; tenants are: "
                    f"{', '.join(sorted(declared))}; correct it, or add the tenant"
                )
        self._clock = clock
        self._tenants = directory.tenants
        # Looked up by the hash: how long that takes tells about hashes, which nobody can steer.
        self._keys = {key.sha256: (key, self._identity(key)) for key in directory.keys}
        self._everybody = self._identity(None)

    @property
    def open(self) -> bool:
        """No keys: everybody is the tenant `default`."""
        return not self._keys

    def identify(self, authorization: bytes | None) -> Identity:
        """Raises RequestError (401)."""
        if self.open:
            return self._everybody
        if authorization is None:
            raise _unauthorised("no API key was sent; send `Authorization: Bearer KEY`")
        scheme, _, presented = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not presented.strip():
            raise _unauthorised(
                "the Authorization header is not `Bearer KEY`; send the API key in that form"
            )
        digest = hashlib.sha256(presented.strip()).hexdigest()
        found = self._keys.get(digest)
        if found is None or not hmac.compare_digest(found[0].sha256, digest):
            raise _unauthorised("the API key is not known here; check it, or ask for a new one")
        key, identity = found
        if key.expires is not None and self._clock() >= key.expires.timestamp():
            raise _unauthorised(
                f"the API key {key.id!r} expired on {key.expires.isoformat()}; ask for a new one"
            )
        return identity

    def _identity(self, key: Key | None) -> Identity:
        name = DEFAULT_TENANT if key is None else key.tenant
        tenant = self._tenants.get(name) or Tenant()
        rights = [r for r in (key, tenant) if r is not None]
        quotas: list[tuple[str, Tenant | Key]] = [(f"tenant:{name}", tenant)]
        if key is not None:
            quotas.insert(0, (f"key:{key.id}", key))
        models = _both([r.models for r in rights])
        return Identity(
            tenant=name,
            key_id=None if key is None else key.id,
            salt=tenant_salt(name),
            weight=tenant.weight,
            operator=key is None or key.operator,
            tiers=_both([r.tiers for r in rights]),
            models=None if models is None else frozenset(models),
            ceilings=Ceilings(
                **{name: _least([getattr(r, name) for r in rights]) for name in CEILINGS}
            ),
            quotas=tuple(quotas),
        )


def _unauthorised(message: str) -> RequestError:
    return RequestError(message, code="invalid_api_key", status=401)


def _least(values: list[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _both(values: list[tuple[str, ...] | None]) -> tuple[str, ...] | None:
    """Names that every list has, in the order of the first."""
    lists = [value for value in values if value is not None]
    if not lists:
        return None
    return tuple(name for name in lists[0] if all(name in other for other in lists[1:]))
