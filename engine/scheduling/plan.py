"""The step plan: what one forward pass computes. A value, so that it can be broadcast to ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.cache.blocks import BlockCopy
from engine.request import RequestId, SampledToken, SamplingParams

PENDING = -1
"""Stands for a token that the pass before this one samples, in a plan made while that one runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A run of consecutive tokens of one request, computed in this pass.

    # |<---------- already in KV ---------->|<--- token_ids --->|
    # 0                                first_token    first_token + len(token_ids)

    In a plan made ahead the only token may be `PENDING`.
    """

    request_id: RequestId
    first_token: int
    """Absolute position of `token_ids[0]`."""

    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]
    """Block table of the request, covering position 0 up to the end of this chunk."""

    sample: bool
    """The last token of the chunk is the request's last known one: sample its successor."""

    @property
    def end(self) -> int:
        return self.first_token + len(self.token_ids)

    @property
    def pending(self) -> bool:
        """Its token is the one that the pass before samples for this request."""
        return self.token_ids[0] == PENDING


@dataclass(frozen=True, slots=True, kw_only=True)
class Entered:
    """A request that starts running (for the first time, or again after preemption).

    The executor keeps what sampling needs (parameters, counts) from here until `left`.
    """

    request_id: RequestId
    params: SamplingParams
    token_ids: tuple[int, ...]
    """Everything known so far: prompt and output."""

    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one forward pass computes, and what was taken back to afford it."""

    chunks: tuple[Chunk, ...]
    entered: tuple[Entered, ...] = ()
    preempted: tuple[RequestId, ...] = ()
    left: tuple[RequestId, ...] = ()
    """Requests that finished, were cancelled or preempted since the last plan: forget them.

    Applied before `entered`: an id that left and came back is in both.
    """

    copies: tuple[BlockCopy, ...] = ()
    """Made before the pass, in any order: chunks read what was copied."""

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the pass produced: one token for each chunk with `sample`, keyed by request."""

    tokens: dict[RequestId, SampledToken]


def resolved(plan: StepPlan, last: StepResult) -> StepPlan:
    """The plan with the tokens of the pass before it instead of `PENDING`."""
    if not any(chunk.pending for chunk in plan.chunks):
        return plan
    chunks = tuple(
        replace(chunk, token_ids=(last.tokens[chunk.request_id].token_id,))
        if chunk.pending
        else chunk
        for chunk in plan.chunks
    )
    return replace(plan, chunks=chunks)
