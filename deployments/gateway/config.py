"""What an operator tunes on a running gateway: Serve's `user_config`, as one validated value.

Applying a configuration replaces this value whole; requests in flight keep the one they started
with. A configuration that cannot work is refused whole, and the gateway goes on with the old one.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.errors import ConfigError


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
    """From the first byte of the request to the last of the answer."""


TIERS = ("default",)
"""Service tiers that requests can have."""


class Targets(_Strict):
    """What a tier promises. A target of null is not judged."""

    queue_s: float | None = Field(default=1.0, gt=0)
    """Longest wait for admission."""

    ttft_s: float | None = Field(default=2.0, gt=0)
    """Arrival to the first token written, the queue included."""

    itl_s: float | None = Field(default=0.2, gt=0)
    """A request's mean gap between tokens."""

    e2e_s: float | None = Field(default=60.0, gt=0)
    """Arrival to the last byte."""

    objective: float = Field(default=0.99, gt=0, lt=1)
    """Share of requests that must meet each target; the rest is the error budget."""

    @model_validator(mode="after")
    def _one_after_the_other(self) -> Targets:
        order = [("queue_s", self.queue_s), ("ttft_s", self.ttft_s), ("e2e_s", self.e2e_s)]
        limits = [(name, value) for name, value in order if value is not None]
        for (name, value), (later, most) in pairwise(limits):
            if value > most:
                raise ValueError(
                    f"{name}={value:g} is above {later}={most:g}, which includes it: a request "
                    f"would miss {later} first; lower {name} or raise {later}"
                )
        return self


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

    headers: dict[str, str] = Field(default_factory=dict[str, str])
    """Sent to the collector, for its authentication."""

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
    slo: dict[str, Targets] = Field(default_factory=lambda: {tier: Targets() for tier in TIERS})
    """By service tier: metrics and dashboards judge by them, nothing is refused for them."""

    include_usage: bool = False
    """Send the usage chunk of a stream to clients that did not say whether they want it."""

    event_log_size: int = Field(default=65_536, ge=16)
    """Events of requests kept for replay, in the gateway's memory."""

    explain: Explaining = Explaining()
    tracing: Tracing = Tracing()
    logs: Logging = Logging()
    request_log: RequestLogging | None = None
    """None: off."""

    @model_validator(mode="after")
    def _tiers_exist(self) -> GatewayConfig:
        for tier in self.slo:
            if tier not in TIERS:
                raise ValueError(f"slo: there is no tier {tier!r}; tiers are: {', '.join(TIERS)}")
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

    def canonical(self, model: str) -> str:
        """The model's own name if `model` is an alias, else `model` unchanged."""
        for route in self.models:
            if model in route.aliases:
                return route.name
        return model


def _explain(error: ValidationError) -> str:
    lines: list[str] = []
    for detail in error.errors(include_url=False):
        field = ".".join(str(part) for part in detail["loc"])
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
            value = repr(detail["input"])[:80]
            lines.append(f"user_config.{field}={value}: {_lower(detail['msg'])}; correct it")
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
            "slo": Targets,
            "explain": Explaining,
            "tracing": Tracing,
            "logs": Logging,
            "request_log": RequestLogging,
        }
        section = sections.get(str(part), section)
    return sorted(section.model_fields)
