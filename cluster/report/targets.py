"""What is quick enough: the targets of a tier."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Seconds that a request may take; None where anything whole is good enough."""

    ttft_s: float | None = None
    """From when the request was due to its first token."""

    itl_s: float | None = None
    """Mean gap between its tokens."""

    e2e_s: float | None = None
    """From when it was due to its end."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{field.name}={value}: a target is a number of seconds above 0")

    def times(self, factor: float) -> Targets:
        return Targets(
            **{
                field.name: None if value is None else factor * value
                for field in fields(self)
                for value in (getattr(self, field.name),)
            }
        )

    def to_json(self) -> dict[str, float | None]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


EVERY_TIER = "*"

DEFAULT_TARGETS: Mapping[str, Targets] = {
    "priority": Targets(ttft_s=0.5, itl_s=0.05),
    "default": Targets(ttft_s=1.0, itl_s=0.1),
    "flex": Targets(ttft_s=10.0, itl_s=0.2),
    "batch": Targets(),
    EVERY_TIER: Targets(ttft_s=1.0, itl_s=0.1),
}
"""By tier. Our own choice, for want of anybody's promise: say `--slo` where there is one."""


def targets_of(slo: Mapping[str, Targets], tier: str) -> Targets:
    """A tier's own targets, else those of every tier."""
    return slo.get(tier) or slo.get(EVERY_TIER) or Targets()


def parse_slo(texts: Iterable[str]) -> dict[str, Targets]:
    """`TIER:ttft=0.3,itl=0.05,e2e=10`, each overriding the default targets of its tier whole.

    `*` is every tier, and replaces the default targets of all tiers that are not named themselves;
    `TIER:` alone sets no target. Raises ConfigError.
    """
    asked: dict[str, Targets] = {}
    for text in texts:
        tier, colon, rest = text.partition(":")
        if not colon or not tier.strip():
            raise ConfigError(f"{text!r}: targets read TIER:ttft=0.3,itl=0.05,e2e=10, in seconds")
        values: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in rest.split(","))):
            name, _, value = part.partition("=")
            if name not in ("ttft", "itl", "e2e"):
                raise ConfigError(f"{text!r}: {name!r} is no target; there are ttft, itl, e2e")
            try:
                values[f"{name}_s"] = float(value)
            except ValueError:
                raise ConfigError(f"{text!r}: {value!r} is not a number of seconds") from None
        asked[tier.strip()] = Targets(**values)
    base = {} if EVERY_TIER in asked else DEFAULT_TARGETS
    return {**base, **asked}
