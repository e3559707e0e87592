"""Keys and tenants as an operator writes them, in `user_config` or in a file of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""Of a key or a tenant. It appears in logs and metrics."""

DEFAULT_TENANT = "default"

_SHA256 = re.compile(r"[0-9a-f]{64}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Quota(_Strict):
    """Limits that all requests of one owner share. Null: none, if nothing else is said."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Prompt and output. A request takes its prompt and all the output it may get, and gives back
    what it did not use."""

    concurrency: int | None = Field(default=None, ge=1)
    """Requests being answered at once."""

    retries_per_minute: int | None = Field(default=None, ge=0)
    """Requests that a client says are repetitions (`x-stainless-retry-count`), so that a storm of
    them cannot push first attempts out. Null: a quarter of `requests_per_minute`, one at least,
    where that is set; as many as that turns the limit off."""

    @property
    def most_retries(self) -> int | None:
        """Retries a minute, the default included. None: as many as come."""
        if self.retries_per_minute is not None or self.requests_per_minute is None:
            return self.retries_per_minute
        return max(1, self.requests_per_minute // 4)


class Ceilings(_Strict):
    """Those of the gateway's `Limits` that an owner narrows. Null: what the gateway allows."""

    max_body_bytes: int | None = Field(default=None, ge=1024)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    max_conversation_tokens: int | None = Field(default=None, ge=1)
    max_tool_output_bytes: int | None = Field(default=None, ge=1)
    max_retrieved_chunks: int | None = Field(default=None, ge=0)
    max_output_tokens: int | None = Field(default=None, ge=1)
    max_n: int | None = Field(default=None, ge=1)


class Rights(Ceilings):
    """What a request may ask for, at most. Null: all there is."""

    tiers: tuple[str, ...] | None = None
    """Service tiers, the first one where none is asked for."""

    models: tuple[str, ...] | None = None
    """By their own names, not by aliases."""

    @model_validator(mode="after")
    def _not_empty(self) -> Rights:
        for name in ("tiers", "models"):
            if getattr(self, name) == ():
                raise ValueError(f"{name} is empty: name some, or leave it out for all")
        return self


class Tenant(Rights, Quota):
    """Somebody whose requests share limits, a prefix cache and a place in the queue's fairness."""

    weight: float = Field(default=1.0, gt=0, le=1000)
    """Of its share beside other tenants of the same tier."""


class Key(Rights, Quota):
    """One API key. Only its hash is written down."""

    id: Name
    sha256: str
    """Hexadecimal SHA-256 of the key, as `tailrace keys new` prints it. Keys are 256 random bits,
    so a fast hash gives nothing away."""

    tenant: Name = DEFAULT_TENANT
    """Where any tenants are declared this must be one of them, `default` too."""

    expires: datetime | None = None
    """With its time zone."""

    operator: bool = False
    """May look at every tenant's requests (explain, dashboard)."""

    @model_validator(mode="after")
    def _is_a_hash(self) -> Key:
        if not _SHA256.fullmatch(self.sha256):
            raise ValueError(
                f"key {self.id!r}: sha256 must be 64 lowercase hexadecimal digits; write the hash "
                "that `tailrace keys new` prints, never the key"
            )
        if self.expires is not None and self.expires.tzinfo is None:
            raise ValueError(f"key {self.id!r}: expires has no time zone; end it with Z for UTC")
        return self


class Directory(_Strict):
    """Keys and tenants together: the content of a `keys_file`, and the same two fields inline.

    Without keys everybody is the tenant `default`.
    """

    keys: tuple[Key, ...] = ()
    tenants: Mapping[Name, Tenant] = Field(default_factory=dict[str, Tenant])

    @model_validator(mode="after")
    def _unique(self) -> Directory:
        ids: set[str] = set()
        hashes: dict[str, str] = {}
        for key in self.keys:
            if key.id in ids:
                raise ValueError(f"keys: {key.id!r} is there twice; give each an id of its own")
            ids.add(key.id)
            if key.sha256 in hashes:
                raise ValueError(
                    f"keys: {hashes[key.sha256]!r} and {key.id!r} are the same key; make a new one"
                )
            hashes[key.sha256] = key.id
        return self

    def joined(self, other: Directory) -> Directory:
        """Both together. Raises ValueError where they name the same key or tenant."""
        twice = self.tenants.keys() & other.tenants.keys()
        if twice:
            raise ValueError(
                f"tenants: {', '.join(sorted(twice))} in keys_file and inline; keep one of them"
            )
        return Directory(keys=(*self.keys, *other.keys), tenants={**self.tenants, **other.tenants})
