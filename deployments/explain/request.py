"""What a gateway knows about one request: written as it happens, a few times a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deployments.explain.queueing import QueueFacts

NOBODY = "nobody"
"""Salt of a request of which nobody knows whose it is; no tenant's is this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalSpan:
    """Time outside the model that the client or its framework told of."""

    name: str
    kind: str
    """`tool`, `retrieval` or `other`."""

    before_s: float
    """It began this long before the request arrived."""

    duration_s: float


@dataclass(slots=True)
class Leg:
    """One placement of some choices of one prompt on one decode replica. Times: this process's
    monotonic clock, 0 for never."""

    prompt: int
    choices: tuple[int, ...]
    asked_s: float
    """The queue was asked."""

    granted_s: float = 0.0
    submitted_s: float = 0.0
    first_s: float = 0.0
    """Its first event came."""

    ended_s: float = 0.0
    replica: str = ""
    stream_id: int = 0
    queue: QueueFacts | None = None
    """None: the queue was away, or told nothing."""

    direct: bool = False
    """Placed without the queue."""

    end: str = ""
    """`finished`, `cancelled`, `lost`, `refused` or `unreachable`; empty while it runs."""

    why: str = ""
    """Words to an end that was none."""


@dataclass(frozen=True, slots=True)
class Note:
    """Something done to a request besides serving it: a shorter answer, a smaller model, a wait."""

    at_s: float
    kind: str
    """`degraded`, `deferred`, `routed`, `cached`, ..."""

    detail: dict[str, Any]


@dataclass(slots=True)
class RequestRecord:
    """One client request at one gateway. Times are of this process's monotonic clock, 0 for never.

    Milestones follow each other without a gap: received, read, tokenised, then what the legs tell,
    first token, ended.
    """

    request_id: str
    endpoint: str
    received_s: float
    received_unix_s: float
    gateway: str = ""
    answer_id: str = ""
    model: str = ""
    tier: str = "default"
    salt: str = ""
    """Of its tenant: nobody else is told of it."""

    stream: bool = False
    read_s: float = 0.0
    """The body is complete."""

    tokenised_s: float = 0.0
    first_token_s: float = 0.0
    """The first token is with the client's connection; whole answers: known here."""

    ended_s: float = 0.0
    outcome: str = "open"
    """`finished`, `failed`, `disconnected` or `open`."""

    status: int = 0
    code: str = ""
    """Of a failure."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    num_choices: int = 0
    max_tokens: int = 0
    write_s: float = 0.0
    """Spent waiting for the client's connection to take what was written."""

    worst_write_s: float = 0.0
    num_writes: int = 0
    spans: tuple[ExternalSpan, ...] = ()
    legs: list[Leg] = field(default_factory=list[Leg])
    notes: list[Note] = field(default_factory=list[Note])
    trace: tuple[str, str, str | None, bool] | None = None
    """Trace id, own span id, parent's span id and whether it is sampled. None: not traced."""

    @property
    def duration_s(self) -> float:
        return max(0.0, self.ended_s - self.received_s)

    def prompt(self, index: int) -> PromptJournal:
        """Where the placements of one of its prompts are noted."""
        return PromptJournal(self, index)

    def wrote(self, seconds: float) -> None:
        """One write to the client took this long."""
        self.num_writes += 1
        self.write_s += seconds
        if seconds > self.worst_write_s:
            self.worst_write_s = seconds

    def phases(self) -> list[tuple[str, float]]:
        """Seconds in each phase that this gateway sees itself; they add up to the duration."""
        first = next((leg for leg in self.legs if leg.granted_s), None)
        marks = [
            ("tokenize", self.received_s),
            ("queue", self.tokenised_s),
            ("route", first.granted_s if first is not None else 0.0),
            ("prefill", first.submitted_s if first is not None else 0.0),
            ("stream", self.first_token_s),
        ]
        passed = [(name, at_s) for name, at_s in marks if at_s]
        ends = [at_s for _, at_s in passed[1:]] + [self.ended_s]
        return [
            (name, max(0.0, end_s - at_s)) for (name, at_s), end_s in zip(passed, ends, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class PromptJournal:
    """One prompt of a request, as whoever places it sees it."""

    record: RequestRecord
    index: int

    def leg(self, choices: tuple[int, ...], asked_s: float) -> Leg:
        """A placement begins: the queue is about to be asked."""
        leg = Leg(self.index, choices, asked_s)
        self.record.legs.append(leg)
        return leg
