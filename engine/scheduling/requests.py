"""One request as the scheduler sees it, and the states it passes through."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from engine.request import FinishReason, Request, RequestId


class State(Enum):
    """
    WAITING ──────┬──────────► RUNNING ──► FINISHED
                  │             ▲  ▲ │
                  ▼             │  │ ▼
           WAITING_REMOTE_KV ───┘  PREEMPTED, PARKED
    """

    WAITING = "waiting"
    """In the queue, without blocks."""

    WAITING_REMOTE_KV = "waiting_remote_kv"
    """Admitted: it has a slot and blocks for its whole prompt, and somebody fills them."""

    RUNNING = "running"
    """Admitted, and computed whenever the budget allows."""

    PREEMPTED = "preempted"
    """Back in the queue without blocks. Nothing that was generated is lost."""

    PARKED = "parked"
    """Prefill role: made way for somebody more urgent. It keeps its blocks, which are being read
    from outside, and goes on where it was."""

    FINISHED = "finished"


_NEXT: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.WAITING_REMOTE_KV, State.FINISHED}),
    State.WAITING_REMOTE_KV: frozenset({State.RUNNING, State.PREEMPTED, State.FINISHED}),
    State.RUNNING: frozenset({State.PREEMPTED, State.PARKED, State.FINISHED}),
    State.PREEMPTED: frozenset({State.RUNNING, State.FINISHED}),
    State.PARKED: frozenset({State.RUNNING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False, kw_only=True)
class Tracked:
    """A request and how far it has come.

    # |<- cached ->|<- computed ->|<- in flight ->|<- to compute ->|
    # 0        num_cached    num_computed     first_planned   planned_tokens
    """

    request: Request
    arrival: int
    """Running number; breaks ties between equal priorities."""

    queued_at: float
    """Start of its wait, for ageing. After preemption: as far back as it had waited before."""

    limit_tokens: int
    """Prompt and output together."""

    due_s: float | None = None
    """When its first token is due, on the scheduler's clock."""

    itl_s: float | None = None
    """Gap between two tokens that it was promised."""

    skipped_since: float | None = None
    """First of the steps in a row that left it out for the sake of more urgent streams."""

    remote: bool = False
    """Its KV will be imported, unless that fails."""

    hold_until: float | None = None
    """Prefill role: deadline of the lease on its blocks."""

    parked_at: float = 0.0
    """When it gave its slot up last, if it is parked."""

    state: State = State.WAITING
    level: int = 0
    """Priority it was admitted at, ageing included: what it earned by waiting protects it."""

    waited_s: float = 0.0
    """Time spent in the queue up to its last admission."""

    token_ids: list[int] = field(default_factory=lambda: list[int]())
    """Prompt and output. Only ever appended to."""

    num_computed: int = 0
    in_flight_tokens: int = 0
    """Tokens that passes under way compute, behind `num_computed`."""

    in_flight_samples: int = 0
    """Tokens that they sample, behind `token_ids`: 0 or 1 whenever a plan is made."""

    num_cached: int | None = None
    """Prompt tokens found in the cache when it was first admitted."""

    paused: bool = False
    entered: bool = False
    """The executor was told of it and keeps state for it."""

    finish: FinishReason | None = None
    _known: tuple[int, ...] = ()

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def known(self) -> tuple[int, ...]:
        """`token_ids` as a tuple, the same object until a token is appended."""
        if len(self._known) != len(self.token_ids):
            self._known = tuple(self.token_ids)
        return self._known

    @property
    def first_planned(self) -> int:
        """Position that the next plan computes first: passes under way will have got this far."""
        return self.num_computed + self.in_flight_tokens

    @property
    def planned_tokens(self) -> int:
        """Tokens that it has once the passes under way have ended."""
        return len(self.token_ids) + self.in_flight_samples

    @property
    def decoding(self) -> bool:
        """All it lacks is the KV of its last token: the next step gives it a new one."""
        return self.first_planned + 1 == self.planned_tokens

    @property
    def ending(self) -> bool:
        """The token that is being sampled is its last, whichever it is."""
        if self.in_flight_samples == 0:
            return False
        num_tokens = self.planned_tokens
        return (
            self.hold_until is not None
            or num_tokens - len(self.request.prompt_ids) >= self.request.params.max_tokens
            or num_tokens >= self.limit_tokens
        )

    @property
    def preemptible(self) -> bool:
        """It may lose slot and blocks."""
        return self.hold_until is None and self.request.preemptible

    @property
    def parkable(self) -> bool:
        """It may lose its slot, and no more: its prompt is not whole yet."""
        return self.hold_until is not None and self.request.preemptible and not self.ending

    @property
    def rank(self) -> tuple[int, int]:
        """Order among the running: most urgent first."""
        return (self.level, self.arrival)

    def move(self, state: State) -> None:
        """Every change of state goes through here."""
        assert state in _NEXT[self.state], f"{self.request_id}: {self.state} cannot become {state}"
        self.state = state

    def append(self, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
        """Take a sampled token; say whether it was the last one, and why."""
        self.token_ids.append(token_id)
        if self.hold_until is not None:
            # Hand-over after one token, whatever it is: who takes over judges it again.
            return FinishReason.LENGTH
        params = self.request.params
        num_output = len(self.token_ids) - len(self.request.prompt_ids)
        if num_output >= params.min_tokens:
            if token_id in eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP
            if token_id in params.stop_token_ids:
                return FinishReason.STOP
        if num_output >= params.max_tokens or len(self.token_ids) >= self.limit_tokens:
            return FinishReason.LENGTH
        return None
