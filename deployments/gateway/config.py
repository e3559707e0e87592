"""What an operator tunes on a running gateway: Serve's `user_config`, as one validated value.

Applying a configuration replaces this value whole; requests in flight keep the one they started
with. A configuration that cannot work is refused whole, and the gateway goes on with the old one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from deployments.admission.queue import QueueLimits
from deployments.admission.tiers import TierTable
from deployments.gateway.identity.config import Directory, Key, Name, Tenant
from deployments.gateway.secret_text import SECRET_TAGS, SecretSource, SecretText
from deployments.gateway.tiers import Tier, check_tiers, standard_tiers
from engine.errors import ConfigError

REDIS_SCHEMES = ("redis://", "rediss://", "unix://")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelRoute(_Strict):
    """One model that clients may ask for, and the Serve application that serves it."""

    name: str = Field(min_length=1, max_length=256)
    app: str = Field(min_length=1, max_length=256)
    aliases: tuple[str, ...] = ()
    """Other names that clients may send. Answers carry `name`."""


class Limits(_Strict):
    """What one request may ask for. A request beyond a limit gets 400 (413 for the body)."""

    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """None: the model's context is the limit."""

    max_conversation_tokens: int | None = Field(default=None, ge=1)
    """Prompt of a chat that goes on, which is one with more than one message of the user: what may
    be kept of a conversation, while a single question may be as long as `max_prompt_tokens`."""

    max_tool_output_bytes: int | None = Field(default=None, ge=1)
    """Text, in UTF-8, of one message of the role `tool` (or `function`, its older name), all of
    its parts together."""

    max_retrieved_chunks: int | None = Field(default=None, ge=0)
    """Passages of a retrieval that the prompt holds, as the client tells in the body's
    `tailrace: {"retrieved": N}`. One that tells nothing is held by the limits on prompts alone."""

    max_output_tokens: int | None = Field(default=None, ge=1)
    """None: the model's own limit, or what the context leaves."""

    default_max_tokens: int | None = Field(default=None, ge=1)
    """Output of a chat request that names none. None: as much as the other limits leave."""

    max_n: int = Field(default=16, ge=1, le=128)
    max_prompts: int = Field(default=128, ge=1)
    """Prompts in one `/v1/completions` request."""

    max_choices: int = Field(default=128, ge=1)
    """`n` times the number of prompts."""

    max_stop: int = Field(default=16, ge=1, le=16)
    max_messages: int = Field(default=4096, ge=1)
    request_timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """From the grant of a place to the last byte of the answer, and before, to read the request.
    Waiting for the grant has a limit of its own, `max_wait_s` of the tier."""


class Admission(_Strict):
    """The admission queues of all models (`deployments.admission.queue.QueueLimits`)."""

    max_waiting: int = Field(default=1024, ge=0)
    """Requests that may wait for one model; one more is refused."""

    no_replica_wait_s: float = Field(default=10.0, gt=0)
    """Longest wait while no decode replica takes work."""

    reserve_output_tokens: int = Field(default=256, ge=1)
    """KV set aside for each choice's output, if it asks for so much."""

    max_prefilling_tokens: int = Field(default=65_536, ge=1)
    """Prompt tokens under way for each prefill replica; more wait in the queue."""

    refuse_hopeless: bool = True
    """Refuse at once who would wait longer than it may or cares to."""

    def queue_limits(self, max_wait_s: float) -> QueueLimits:
        return QueueLimits(
            max_waiting=self.max_waiting,
            max_wait_s=max_wait_s,
            no_replica_wait_s=self.no_replica_wait_s,
            reserve_output_tokens=self.reserve_output_tokens,
            max_prefilling_tokens=self.max_prefilling_tokens,
            refuse_hopeless=self.refuse_hopeless,
        )


class Explaining(_Strict):
    """Which requests a gateway remembers, for `tailrace explain`."""

    recent: int = Field(default=1024, ge=1, le=1_000_000)
    """The latest."""

    slowest: int = Field(default=32, ge=0, le=10_000)
    """The slowest of each tier, kept longer and whole."""

    keep_s: float = Field(default=3600.0, gt=0)
    """How long a slow one stays that no slower one displaces."""


class Tracing(_Strict):
    """OpenTelemetry spans of requests. Needs the extra `tracing`."""

    endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s/]+(/\S*)?$")
    """An OTLP/HTTP collector, such as http://collector:4318. None: no tracing."""

    sample: float = Field(default=0.01, ge=0, le=1)
    """Share of requests traced that bring no trace context; one they bring decides for them."""

    headers: dict[str, SecretText] = Field(default_factory=dict[str, str | SecretSource])
    """Sent to the collector, for its authentication. A value is written here, or read from
    `{env: NAME}` or `{file: PATH}`."""

    timeout_s: float = Field(default=10.0, gt=0, le=300)
    delay_s: float = Field(default=5.0, gt=0, le=300)
    """How long spans are gathered before they are sent."""


class Logging(_Strict):
    """The line a request in the gateway's log."""

    requests: bool = True
    log_prompts: bool = False
    """Also the request's body, up to 64 KiB of it: prompts and all."""


class RequestLogging(_Strict):
    """A line of JSON for each request, without its text: lengths, times, prefix hashes, outcome.
    `tailrace replay` takes the file."""

    path: str = Field(min_length=1)
    """On the gateway's machine. A gateway that finds it taken puts its own name behind it."""

    max_bytes: int = Field(default=64 * 1024 * 1024, ge=4096)
    """Then it is renamed to `PATH.1`, that to `PATH.2`, ..."""

    keep: int = Field(default=4, ge=0, le=1000)
    """Renamed files that are kept."""


class GatewayConfig(_Strict):
    """The whole of `user_config`."""

    revision: int = Field(default=0, ge=0)
    """Counted up by the operator with every change; `/health` says which one is in force."""

    models: tuple[ModelRoute, ...] = ()
    limits: Limits = Limits()
    tiers: dict[Name, Tier] = Field(default_factory=standard_tiers)
    """By name. Metrics and dashboards judge by their targets, queues and engines order by them."""

    admission: Admission = Admission()
    keys: tuple[Key, ...] = ()
    """API keys by their hashes. None here and in `keys_file`: everybody is tenant `default`."""

    tenants: dict[Name, Tenant] = Field(default_factory=dict[str, Tenant])
    keys_file: str | None = Field(default=None, min_length=1)
    """A YAML or JSON file with `keys` and `tenants`, read again when it changes."""

    limits_store: SecretText | None = None
    """URL of a Redis that all gateways share (`redis`, `rediss` or `unix`), or where it is written,
    since it may hold a password: `{env: NAME}` or `{file: PATH}`. None: each gateway counts for
    itself."""

    metrics: bool = True
    """False: this gateway's series stand still, for comparison."""

    include_usage: bool = False
    """Send the usage chunk of a stream to clients that did not say whether they want it."""

    event_log_size: int = Field(default=65_536, ge=16)
    """Events of requests kept for replay, in the gateway's memory."""

    explain: Explaining = Explaining()
    tracing: Tracing = Tracing()
    logs: Logging = Logging()
    request_log: RequestLogging | None = None
    """None: off."""

    @field_validator("limits_store")
    @classmethod
    def _is_a_redis(cls, store: str | SecretSource | None) -> str | SecretSource | None:
        if isinstance(store, str) and not store.startswith(REDIS_SCHEMES):
            raise ValueError(f"must begin with one of {', '.join(REDIS_SCHEMES)}")
        return store

    @model_validator(mode="after")
    def _tiers_and_keys_fit(self) -> GatewayConfig:
        check_tiers(self.tiers)
        models = {name for route in self.models for name in (route.name, *route.aliases)}
        for name, tier in self.tiers.items():
            for step in tier.ladder:
                if step.model is not None and step.model not in models:
                    raise ValueError(
                        f"tiers.{name}.ladder: there is no model {step.model!r}; models are: "
                        f"{', '.join(sorted(models)) or 'none'}"
                    )
        owners = [(f"key {key.id!r}", key.tiers) for key in self.directory.keys]
        owners += [(f"tenant {name!r}", tenant.tiers) for name, tenant in self.tenants.items()]
        for owner, tiers in owners:
            for tier in tiers or ():
                if tier not in self.tiers:
                    raise ValueError(
                        f"{owner}: there is no tier {tier!r}; tiers are: {', '.join(self.tiers)}"
                    )
        return self

    @model_validator(mode="after")
    def _names_are_unique(self) -> GatewayConfig:
        owner: dict[str, str] = {}
        for route in self.models:
            for name in (route.name, *route.aliases):
                if name in owner:
                    raise ValueError(
                        f"models: {name!r} names both {owner[name]!r} and {route.name!r}; "
                        "give each model and alias a name of its own"
                    )
                owner[name] = route.name
        apps: dict[str, str] = {}
        for route in self.models:
            if route.app in apps:
                raise ValueError(
                    f"models: {apps[route.app]!r} and {route.name!r} both name the application "
                    f"{route.app!r}; give one of them the other's name as an alias"
                )
            apps[route.app] = route.name
        return self

    @classmethod
    def parse(cls, user_config: Mapping[str, Any] | None) -> GatewayConfig:
        """The value in `user_config`. Raises ConfigError naming field, value and way out."""
        try:
            return cls.model_validate(dict(user_config or {}))
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    @property
    def directory(self) -> Directory:
        """Keys and tenants that are written here."""
        return Directory(keys=self.keys, tenants=self.tenants)

    def policy(self) -> tuple[TierTable, QueueLimits]:
        """What the admission queues go by."""
        rules = [tier.rule(name) for name, tier in self.tiers.items()]
        longest_s = max(rule.max_wait_s for rule in rules)
        return TierTable(rules, self.revision), self.admission.queue_limits(longest_s)

    def canonical(self, model: str) -> str:
        """The model's own name if `model` is an alias, else `model` unchanged."""
        for route in self.models:
            if model in route.aliases:
                return route.name
        return model


_SECRET = frozenset({"keys", "limits_store", "tracing"})
"""What stands here is not repeated: a key instead of its hash, a password, a collector's token."""

_OF_NUMBERS = frozenset(
    {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "int_from_float"}
)
"""Errors of a field that takes a number, which is no secret wherever it stands. A number where text
belongs may be one that wants quotes."""


def _explain(error: ValidationError) -> str:
    lines: list[str] = []
    for detail in error.errors(include_url=False):
        field = ".".join(str(part) for part in detail["loc"] if part not in SECRET_TAGS)
        if detail["type"] == "extra_forbidden":
            lines.append(
                f"user_config.{field}: no such field; remove it or correct its name "
                f"(here are: {', '.join(_siblings(detail['loc']))})"
            )
        elif not field:
            lines.append(f"user_config: {detail['msg'].removeprefix('Value error, ')}")
        elif detail["type"] == "missing":
            lines.append(f"user_config.{field}: missing; add it")
        else:
            told = detail["type"] in _OF_NUMBERS or detail["loc"][0] not in _SECRET
            value = f"={detail['input']!r}"[:80] if told else ""
            message = _lower(detail["msg"].removeprefix("Value error, "))
            lines.append(f"user_config.{field}{value}: {message}; correct it")
    return "\n".join(lines)


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _siblings(loc: tuple[int | str, ...]) -> list[str]:
    """Fields of the section that `loc` lies in."""
    section: type[BaseModel] = GatewayConfig
    for part in loc[:-1]:
        sections: dict[str, type[BaseModel]] = {
            "limits": Limits,
            "models": ModelRoute,
            "tiers": Tier,
            "admission": Admission,
            "keys": Key,
            "tenants": Tenant,
            "explain": Explaining,
            "tracing": Tracing,
            "logs": Logging,
            "request_log": RequestLogging,
            "source": SecretSource,
        }
        section = sections.get(str(part), section)
    return sorted(section.model_fields)
