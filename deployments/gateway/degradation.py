"""What a tier gives up, step by step, while requests wait too long. Pure: times come in.

```
pressure = wait of late / queue target

   shed      ──────────────────────────── above 8 ┐        down again only below `below`,
   model     ──────────────────── above 4 ┐       │        and no step within `hold_s` of the last
   shorten   ──────────── above 2 ┐       │       │
   all given ─────────────────────┴───────┴───────┴──► pressure
```

A request gets everything up to the step its tier is on. What was done is told in the header
`x-tailrace-degraded` of whatever is answered, in a metric, in the request's log line (`degraded`)
and in explain. A request that is refused because it is optional counts as `drop_extras`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

Action = Literal["shorten", "drop_extras", "model", "defer", "shed"]

ACTIONS: tuple[Action, ...] = get_args(Action)

HOLD_S = 5.0
"""Shortest stay on a step before the next one down: load that swings does not flap."""

HALF_LIFE_S = 5.0
"""Of the memory of waits: half of the weight lies on the last five seconds."""


class Step(BaseModel):
    """One thing that is given up, from a pressure on."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    action: Action
    """`shorten`: outputs are cut to `max_tokens`. `drop_extras`: one choice, no log-probabilities,
    and what the client called optional is refused. `model`: `model` answers instead, where the
    request fits it. `defer`: served at `tier`. `shed`: refused, with the time to wait."""

    above: float = Field(gt=0)
    """Pressure from which it is done: 2 is a wait of twice the tier's `queue_s`."""

    below: float | None = Field(default=None, gt=0)
    """Pressure under which it ends. None: half of `above`."""

    max_tokens: int | None = Field(default=None, ge=1)
    model: str | None = Field(default=None, min_length=1)
    tier: str | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _is_whole(self) -> Step:
        needs = {"shorten": "max_tokens", "model": "model", "defer": "tier"}.get(self.action)
        for name in ("max_tokens", "model", "tier"):
            given = getattr(self, name) is not None
            if name == needs and not given:
                raise ValueError(f"action {self.action!r} needs {name}; add it")
            if name != needs and given:
                raise ValueError(f"action {self.action!r} has no {name}; remove it")
        if self.below is not None and self.below > self.above:
            raise ValueError(f"below={self.below:g} is over above={self.above:g}; swap them")
        return self

    @property
    def ends_below(self) -> float:
        return self.above / 2 if self.below is None else self.below


def check_ladder(steps: Sequence[Step]) -> None:
    """Raises ValueError for steps that do not follow each other."""
    for step, following in pairwise(steps):
        if following.above < step.above:
            raise ValueError(
                f"ladder: {following.action!r} above {following.above:g} comes after "
                f"{step.action!r} above {step.above:g}; order them by pressure"
            )
        if step.action == "shed":
            raise ValueError(f"ladder: nothing comes after 'shed'; remove {following.action!r}")


class Waits:
    """How long requests of one model and tier wait for a grant, of late and right now."""

    def __init__(self) -> None:
        self._waiting: dict[int, float] = {}  # by ticket, in order of arrival
        self._tickets = 0
        self._mean_s = 0.0
        self._weight = 0.0
        self._at_s = 0.0

    def began(self, now: float) -> int:
        """A request asks for a grant. Returns the ticket for `ended`."""
        self._tickets += 1
        self._waiting[self._tickets] = now
        return self._tickets

    def ended(self, ticket: int, now: float) -> None:
        """It waits no more, granted or not. Idempotent."""
        since = self._waiting.pop(ticket, None)
        if since is None:
            return
        self._decay(now)
        self._weight += 1.0
        self._mean_s += (max(0.0, now - since) - self._mean_s) / self._weight

    def seconds(self, now: float) -> float:
        """The wait of late, or of who waits longest now if that is more."""
        self._decay(now)
        # With the memory of it the wait itself fades: silence means that nobody has to wait.
        of_late = self._mean_s * min(1.0, self._weight)
        oldest = next(iter(self._waiting.values()), now)
        return max(of_late, now - oldest)

    def _decay(self, now: float) -> None:
        self._weight *= 0.5 ** (max(0.0, now - self._at_s) / HALF_LIFE_S)
        self._at_s = now


class Ladder:
    """Which step one model and tier is on."""

    def __init__(self) -> None:
        self.level = 0
        """Steps that are in force, from the first one on."""

        self._moved_s = -math.inf

    def steps(self, steps: Sequence[Step], pressure: float, now: float) -> Sequence[Step]:
        """The steps in force at this pressure. Up at once, down one by one."""
        self.level = min(self.level, len(steps))
        while self.level < len(steps) and pressure >= steps[self.level].above:
            self.level += 1
            self._moved_s = now
        if (
            self.level
            and pressure < steps[self.level - 1].ends_below
            and now - self._moved_s >= HOLD_S
        ):
            self.level -= 1
            self._moved_s = now
        return steps[: self.level]


class Pressures:
    """Waits and steps of every model and tier at one gateway."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], tuple[Waits, Ladder]] = {}
        self.done: dict[tuple[str, str, Action], int] = {}
        """Requests by model, tier and what was done to them."""

    def of(self, model: str, tier: str) -> tuple[Waits, Ladder]:
        found = self._found.get((model, tier))
        if found is None:
            found = self._found[model, tier] = (Waits(), Ladder())
        return found

    def count(self, model: str, tier: str, action: Action) -> None:
        key = (model, tier, action)
        self.done[key] = self.done.get(key, 0) + 1
