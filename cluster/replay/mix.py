"""Who the traffic is: how much of it comes from which trace, and as what it is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.errors import ConfigError

TIERS = ("priority", "default", "flex", "batch")

SERVICE_TIERS: Mapping[str, str | None] = {
    "priority": "priority",
    "default": None,
    "flex": "flex",
    "batch": "flex",
}
"""`service_tier` of a request's body. OpenAI's API has no `batch` outside `/v1/batches`: as single
requests, batch work is `flex`. None leaves the field out, which every server understands."""


class Part(BaseModel):
    """One part of the mix."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    source: str = Field(min_length=1)
    """Name of a trace."""

    share: float = Field(default=1.0, gt=0)
    """Of all requests offered; shares are divided by their sum."""

    tier: str | None = None
    """None: the trace's own, else `default`."""

    tenants: tuple[str, ...] = ()
    """One is drawn for each request (each conversation). Empty: the trace's own, else `default`."""

    model: str | None = None
    """None: the trace's own where it is served, else the first that the server lists."""

    sampling: dict[str, Any] = Field(default_factory=dict)
    """Fields of the body: temperature, top_p, ... They win over the trace's own."""

    stop: tuple[str, ...] = ()
    fixed_length: bool = True
    """Answers have the trace's length: `ignore_eos`. False lets the model end them earlier."""

    turns: int = Field(default=1, ge=1)
    """So many requests of the trace in a row become one conversation; each turn adds its own
    input to what was said. The first keeps its arrival."""

    think_s: float = Field(default=0.0, ge=0)
    """From the end of an answer to the next turn, of conversations made by `turns`."""

    disconnects: float = Field(default=0.0, ge=0, le=1)
    """Share of requests whose client leaves at a random point."""

    @property
    def label(self) -> str:
        return self.source if self.tier is None else f"{self.source}:{self.tier}"


def parse_mix(text: str) -> tuple[Part, ...]:
    """`SOURCE[=SHARE][:TIER],...`, or the path of a YAML or JSON file with a list of parts.

    Raises ConfigError naming part, field and value.
    """
    path = Path(text)
    if path.suffix in (".yaml", ".yml", ".json"):
        try:
            document = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ConfigError(f"--mix {text}: {error.strerror}") from None
        except yaml.YAMLError as error:
            raise ConfigError(f"--mix {text}: {error}") from None
        if isinstance(document, dict):
            document = cast("dict[str, Any]", document).get("parts")
        if not isinstance(document, list):
            raise ConfigError(f"--mix {text}: must be a list of parts, or have one under `parts`")
        return _checked([_part(each, text) for each in cast("list[Any]", document)], text)
    parts: list[Part] = []
    for item in text.split(","):
        head, _, tier = item.strip().partition(":")
        source, equals, share = head.partition("=")
        values: dict[str, Any] = {"source": source.strip()}
        if tier:
            values["tier"] = tier.strip()
        if equals:
            try:
                values["share"] = float(share)
            except ValueError:
                raise ConfigError(
                    f"--mix {item.strip()!r}: the share {share!r} must be a number; write "
                    "SOURCE=SHARE:TIER"
                ) from None
        parts.append(_part(values, text))
    return _checked(parts, text)


def _part(values: Any, origin: str) -> Part:
    try:
        return Part.model_validate(values)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in detail["loc"]) or "part"
        message = detail["msg"][:1].lower() + detail["msg"][1:]
        if detail["type"] == "extra_forbidden":
            message = f"no such field; here are {', '.join(sorted(Part.model_fields))}"
        raise ConfigError(
            f"--mix {origin}: {field}={detail['input']!r:.80}: {message}; correct it"
        ) from None


def _checked(parts: Sequence[Part], origin: str) -> tuple[Part, ...]:
    for part in parts:
        if part.tier is not None and part.tier not in TIERS:
            raise ConfigError(f"--mix {origin}: tier={part.tier!r}: there are {', '.join(TIERS)}")
        if not math.isfinite(part.share):
            raise ConfigError(f"--mix {origin}: share={part.share}: must be a finite number")
    if not parts:
        raise ConfigError(f"--mix {origin}: no part in it")
    return tuple(parts)
