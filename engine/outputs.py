"""What an engine gives back, as values. Importable without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from engine.request import FinishReason, RequestId, SampledToken
from engine.scheduling.scheduler import Reservation


@dataclass(slots=True)
class Output:
    """What one step gave one request."""

    request_id: RequestId
    token: SampledToken | None
    """None with `FinishReason.ERROR`: nothing could be sampled."""

    text: str
    """New text; empty while half a character or a possible stop string is held back."""

    finish: FinishReason | None
    num_cached_tokens: int
    """Prompt tokens whose KV this engine already had when the request was admitted."""


@dataclass(slots=True)
class Computed:
    """How much of a held request's prompt is in its blocks now (prefill role)."""

    request_id: RequestId
    first_token: int
    """Where this step's chunk began; in the first step of a request, what was cached."""

    num_tokens: int
    """Positions below this are computed."""

    blocks: tuple[int, ...]


def _none() -> list[Any]:
    # Not `list[Output]`: calling that takes as long as the rest of a StepOutput.
    return []


@dataclass(slots=True)
class StepOutput:
    """Everything one step produced, handed to the event loop in one call."""

    outputs: list[Output] = field(default_factory=_none)
    computed: list[Computed] = field(default_factory=_none)
    reservations: list[Reservation] = field(default_factory=_none)
    num_tokens: int = 0
    """Tokens computed by the forward pass."""

    duration_s: float = 0.0
    """Plan, forward pass, sampling and commit; no two steps count the same time. With overlap: pass
    and sampling alone, the rest lies beside other passes. With stages: the part after the end of
    the step before, though it began in the first stage while others were in later ones."""

    prompts: list[tuple[RequestId, int]] = field(default_factory=_none)
    """Requests of which a share of the prompt was computed, and of how many tokens."""

    preempted: tuple[RequestId, ...] = ()
    """Requests that lost their blocks before this step."""

    aged: tuple[tuple[RequestId, int], ...] = ()
    """Requests admitted since the last step at a more urgent level than their priority, for they
    had waited long, and that level: only what is more urgent still can preempt them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges and running totals, read between steps."""

    num_running: int
    num_waiting: int
    num_waiting_remote: int
    num_free_blocks: int
    num_held_blocks: int
    num_blocks: int
    num_leases: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    num_preemptions: int
    num_leases_expired: int
    num_steps: int = 0
    num_steps_ahead: int = 0
    """Of those, planned while the one before was computed."""

    num_discarded_rows: int = 0
    """Tokens sampled for requests that had ended."""
