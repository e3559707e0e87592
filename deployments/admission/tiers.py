"""What the queue must know of the service tiers. Gateways tell it; the highest revision holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRule:
    """One service tier, resolved."""

    name: str
    rank: int = 0
    """Lower is served first; also the priority that its requests have in the engines."""

    share: float = 0.0
    """Part of what is granted, in token cost, that the tier gets at least while it waits, whatever
    comes from above."""

    reserved_slots: int = 0
    """Slots that less urgent tiers leave free for this one, over all replicas."""

    max_wait_s: float = 60.0
    """Nobody waits longer for a grant: then it is refused."""

    preemptible: bool = True
    """Its running requests make way for more urgent ones, and come back later."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.share <= 1.0:
            raise ConfigError(f"tier {self.name!r}: share={self.share}: must lie between 0 and 1")
        if self.reserved_slots < 0:
            raise ConfigError(
                f"tier {self.name!r}: reserved_slots={self.reserved_slots}: must be 0 or more"
            )
        if not self.max_wait_s > 0:
            raise ConfigError(f"tier {self.name!r}: max_wait_s={self.max_wait_s}: must be above 0")


class TierTable:
    """The tiers in force. Starts with one, `default`."""

    def __init__(self, rules: Iterable[TierRule] = (), revision: int = -1) -> None:
        """Raises ConfigError for shares of more than 1 together, or a name that is there twice."""
        self.revision = revision
        self.rules: dict[str, TierRule] = {}
        for rule in rules:
            if rule.name in self.rules:
                raise ConfigError(f"tier {rule.name!r} is there twice: give it another name")
            self.rules[rule.name] = rule
        shares = sum(rule.share for rule in self.rules.values())
        if shares > 1.0 + 1e-9:
            raise ConfigError(f"the shares of all tiers add up to {shares:g}: at most 1")
        self._unknown: dict[tuple[str, int], TierRule] = {}

    def rule(self, name: str, rank: int) -> TierRule:
        """The rule of a tier. One that is not known yet, or no more, is served by its rank."""
        found = self.rules.get(name)
        if found is None:
            key = (name, rank)
            found = self._unknown.get(key)
            if found is None:
                found = self._unknown[key] = TierRule(name=name, rank=rank)
        return found

    def to_wire(self) -> list[Any]:
        return [self.revision, [astuple(rule) for rule in self.rules.values()]]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> TierTable:
        revision, rules = wire
        return cls([_rule(values) for values in rules], revision)


def _rule(values: list[Any]) -> TierRule:
    name, rank, share, reserved_slots, max_wait_s, preemptible = values
    return TierRule(
        name=name,
        rank=rank,
        share=share,
        reserved_slots=reserved_slots,
        max_wait_s=max_wait_s,
        preemptible=preemptible,
    )
