"""Service tiers: what each promises, how it is queued, and which one a request gets.

The `service_tier` of OpenAI's API asks, the key's rights bound it, the answer says what it got.

| asked              | served                                                              |
|--------------------|---------------------------------------------------------------------|
| nothing, `auto`    | the first tier that the key may use; without such rights, `default` |
| `fast`             | as `priority`: OpenAI's other name for it                           |
| `scale`            | as `auto`: capacity bought ahead is a matter of the key's own tier  |
| a tier's name      | that tier, or if the key may not use it, as `auto`                  |
| anything           | 403 where the key may use none of the tiers there are               |
| any other name     | 400 with the names there are                                        |
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deployments.admission.tiers import TierRule
from deployments.gateway.degradation import Step, check_ladder
from engine.errors import RequestError

DEFAULT_TIER = "default"


class Targets(BaseModel):
    """What a tier promises. A target of null is not judged."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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


class Tier(Targets):
    """One row of the table. Its targets also pace the engines' steps."""

    rank: int = Field(default=10, ge=-1000, le=1000)
    """Lower is served first, in the admission queue, the prefill queues and the engines."""

    share: float = Field(default=0.0, ge=0, le=1)
    """Part of what is granted that it gets at least while it waits, whatever comes from above."""

    reserved_slots: int = Field(default=0, ge=0)
    """Slots that less urgent tiers leave free for it, over all replicas of a model."""

    max_wait_s: float = Field(default=60.0, gt=0, le=86_400)
    """Longest wait for admission: then the request is refused. `limits.request_timeout_s` counts
    from the grant, so that all of this can be waited by who has the patience: OpenAI's clients have
    600 s unless they are told otherwise."""

    preemptible: bool = True
    """Its running requests make way for more urgent ones, and come back later."""

    ladder: tuple[Step, ...] = ()
    """What it gives up while its requests wait too long, most bearable first."""

    @model_validator(mode="after")
    def _ladder_holds(self) -> Tier:
        check_ladder(self.ladder)
        if self.ladder and self.queue_s is None:
            raise ValueError(
                "ladder: pressure is the wait over queue_s, so it needs queue_s; set it"
            )
        given = self.queue_s if "queue_s" in self.model_fields_set else None
        if given is not None and given > self.max_wait_s:
            raise ValueError(
                f"queue_s={given:g} is above max_wait_s={self.max_wait_s:g}, after which a "
                "request is refused: nobody could miss that target and be served; lower queue_s or "
                "raise max_wait_s"
            )
        return self

    def rule(self, name: str) -> TierRule:
        """What the admission queue goes by."""
        return TierRule(
            name=name,
            rank=self.rank,
            share=self.share,
            reserved_slots=self.reserved_slots,
            max_wait_s=self.max_wait_s,
            preemptible=self.preemptible,
        )


def standard_tiers() -> dict[str, Tier]:
    """The table of an operator who wrote none."""
    return {
        "priority": Tier(
            rank=0, queue_s=0.5, ttft_s=1.0, itl_s=0.1, max_wait_s=30.0, preemptible=False
        ),
        DEFAULT_TIER: Tier(rank=10, share=0.3),
        "flex": Tier(
            rank=20, queue_s=None, ttft_s=60.0, itl_s=1.0, e2e_s=600.0, share=0.1, max_wait_s=300.0
        ),
        "batch": Tier(
            rank=30, queue_s=None, ttft_s=None, itl_s=None, e2e_s=None, share=0.1, max_wait_s=3600.0
        ),
    }


def served_tier(asked: str | None, tiers: Collection[str], allowed: tuple[str, ...] | None) -> str:
    """The tier a request gets. `allowed`: the key's, in its order; None: all.

    Raises RequestError for a name that is no tier, and for a key that may use none there is.
    """
    usable = [name for name in allowed if name in tiers] if allowed is not None else [DEFAULT_TIER]
    if not usable:
        # Never `default`: it may be better than everything the key was given.
        raise RequestError(
            f"service_tier: this API key may use none of the tiers here, which are "
            f"{', '.join(tiers)}; ask the operator for one of them",
            param="service_tier",
            code="no_tier",
            status=403,
        )
    fallback = usable[0]
    if asked in (None, "auto", "scale"):
        return fallback
    wanted = "priority" if asked == "fast" else asked
    if wanted not in tiers:
        if asked in ("fast", "priority", "flex", DEFAULT_TIER):
            return fallback  # one of OpenAI's, which this operator does not offer
        raise RequestError(
            f"service_tier={asked!r}: there is no such tier here; send auto or one of "
            f"{', '.join(tiers)}",
            param="service_tier",
        )
    if allowed is not None and wanted not in allowed:
        return fallback
    return wanted


def check_tiers(tiers: Mapping[str, Tier]) -> None:
    """Raises ValueError for a table that cannot work."""
    if DEFAULT_TIER not in tiers:
        raise ValueError(f"tiers: there is none called {DEFAULT_TIER!r}; add it")
    taken = sorted({"auto", "scale", "fast"} & tiers.keys())
    if taken:
        raise ValueError(f"tiers: {taken[0]!r} has another meaning in service_tier; rename it")
    for name, tier in tiers.items():
        for step in tier.ladder:
            if step.tier is not None and (step.tier not in tiers or step.tier == name):
                raise ValueError(
                    f"tiers.{name}.ladder: there is no tier {step.tier!r} to defer to; tiers are: "
                    f"{', '.join(tiers)}"
                )
    shares = sum(tier.share for tier in tiers.values())
    if shares > 1 + 1e-9:
        raise ValueError(f"tiers: the shares add up to {shares:g}; at most 1 can be given away")
