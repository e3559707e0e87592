"""What the gateway's API asks of the system behind it.

The real backend asks the admission queue for a grant, submits over the link and holds the replica;
the tests script one. Nothing here knows HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from deployments.explain.request import PromptJournal
from deployments.link.messages import StreamEvent
from engine.request import Request
from engine.text.text_model import TextModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """A model as clients see it."""

    name: str
    root: str
    """Where its weights came from (`engine.config.ModelConfig.source`)."""

    created: int
    """Unix seconds."""

    max_context_tokens: int
    max_output_tokens: int | None
    """None: whatever the context leaves."""

    text: TextModel


class Stream(Protocol):
    """One submit on its way: every event of its choices, in order within a choice.

    Two more attributes are read where they exist: `admitted_s` (monotonic seconds of this process
    when the grant came) and `replica` (where it runs).
    """

    def __aiter__(self) -> AsyncIterator[list[StreamEvent]]:
        """Yields all events that came since the last look, never an empty list; ends after the last
        event of the last choice. Raises EngineError subclasses before the first event or midway.

        Asking for the next list says that the last one was consumed: a slow reader stalls its own
        stream only.
        """
        ...

    async def aclose(self) -> None:
        """Cancel in gateway, queue, decode and prefill, unless it ended. Called always.

        Idempotent. The cancellation is on its way before the first suspension, so that an
        interrupted `aclose` has still cancelled.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a request stands among others."""

    tier: str = "default"
    tenant: str = "default"
    weight: float = 1.0
    """Of the tenant beside others of the tier."""

    due_s: float | None = None
    """When its first token is due, in monotonic seconds of this process."""

    may_wait: bool = False
    """Nothing is promised of its first token: while the queue is away it waits for that."""

    patient_until_s: float | None = None
    """When the client gives up unless a first token came. None: it told only its whole patience."""

    answer_s: float | None = None
    """Longest that may be worked on it from its grant on, by the gateway's own limit."""

    whole_until_s: float | None = None
    """When the client gives up on the whole answer. None: it has as long as the gateway allows."""

    wait_until_s: float | None = None
    """When its tier's longest wait is over, also while the queue is away."""


ANYWHERE = Place()
"""Of a request that nobody placed."""


class Backend(Protocol):
    """Everything behind the API."""

    def models(self) -> list[ModelInfo]:
        """Models that can be asked for now."""
        ...

    async def model(self, name: str) -> ModelInfo:
        """The model, its text side loaded off the event loop: using it afterwards does not block.

        Raises RequestError(code="model_not_found", status=404).
        """
        ...

    async def open(
        self,
        model: str,
        request: Request,
        *,
        n: int,
        remaining_s: float | None,
        journal: PromptJournal | None = None,
        place: Place = ANYWHERE,
    ) -> Stream:
        """Admit and submit `n` choices over one prompt.

        `remaining_s` is what is left for the whole answer, by the client's patience or the longest
        wait and the longest answer together (`place.answer_s` is the latter); the backend may
        refuse (Overloaded) what cannot make it. When this is cancelled nothing stays behind.
        Where it was placed, and when, is noted in `journal`; `place` orders it among others.

        Raises RequestError, Overloaded, TransferError.
        """
        ...
