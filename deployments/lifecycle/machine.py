"""One submit's way through a decode replica, as a state machine without clock, task or socket.

```
            ┌────────────── local ──────────────┐
 NEW ──► RESERVING ──► PULLING ──► (KVArrived) ─┴► RUNNING ──► ENDED
             ▲             │ PullFailed: another replica, then local, then refused
             └─────────────┘
```

Events go in, actions come out; the replica carries them out. A recorded list of events replays to
the same actions, which is how an incident becomes a unit test.

Choice 0 takes the prompt through prefill. The other choices start when its first token is there: by
then the prompt is in the local prefix cache and costs them one block at most.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from engine.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class LifecycleConfig:
    """When a prompt is worth sending away."""

    local_prefill_tokens: int = 64
    """A missing part up to this long is computed here."""

    max_pull_attempts: int = 2
    """Prefill replicas tried before falling back."""

    max_fallback_tokens: int = 1_000_000
    """A missing part up to this long is computed here when every pull failed; above, refused."""


class State(str, Enum):
    NEW = "new"
    RESERVING = "reserving"
    PULLING = "pulling"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Submitted:
    num_tokens: int
    num_cached_tokens: int
    """Found in the local prefix cache when the submit came."""

    n: int
    prefill: str | None
    """Replica to ask, or None when no prefill replica is healthy."""

    pooled: bool = True
    """This model has a prefill pool, whether or not one of its replicas can be asked now."""


@dataclass(frozen=True, slots=True)
class Reserved:
    num_cached_tokens: int
    """What the local cache held when the blocks were reserved."""


@dataclass(frozen=True, slots=True)
class PullFailed:
    stage: str
    message: str
    prefill: str | None
    """Another replica to ask, or None."""


@dataclass(frozen=True, slots=True)
class KVArrived:
    num_cached_tokens: int
    """Tokens the prefill replica did not have to compute."""

    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class Stepped:
    choice: int
    num_tokens: int
    finish: FinishReason | None
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    reason: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine refused or lost the submit."""

    message: str


Event = Submitted | Reserved | PullFailed | KVArrived | Stepped | Cancelled | Failed


@dataclass(frozen=True, slots=True)
class Start:
    """Give choice `choice` to the engine."""

    choice: int
    remote: bool


@dataclass(frozen=True, slots=True)
class Pull:
    """Ask `prefill` for tokens from `first_token` on, into the reserved blocks."""

    prefill: str
    first_token: int


@dataclass(frozen=True, slots=True)
class ComputeHere:
    """Give up on remote KV for choice 0."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopPull:
    """End the running pull; nothing may be written into the blocks afterwards."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Cancel choice `choice` in the engine."""

    choice: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the gateway that no answer will come."""

    message: str
    stage: str


@dataclass(frozen=True, slots=True)
class End:
    """Nothing of this submit is left here: forget it and tell the queue."""


Action = Start | Pull | ComputeHere | StopPull | Stop | Refuse | End


@dataclass(slots=True)
class Lifecycle:
    """State of one submit. `on` is the only way it changes."""

    config: LifecycleConfig
    state: State = State.NEW
    decision: str = ""
    """`local`, `disaggregated` or `fallback`, and why, for the metric and the log."""

    reason: str = ""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    _num_tokens: int = 0
    _n: int = 1
    _attempts: int = 0
    _prefill: str | None = None
    _first_token: int = 0
    _alive: set[int] = field(default_factory=set[int])

    def on(self, event: Event) -> list[Action]:
        """Take one event. Events that come after the end are ignored."""
        if self.state is State.ENDED:
            return []
        match event:
            case Submitted():
                return self._submitted(event)
            case Reserved():
                return self._reserved(event)
            case PullFailed():
                return self._pull_failed(event)
            case KVArrived():
                if self.state is not State.PULLING:
                    return []
                self.num_cached_tokens = event.num_cached_tokens
                self.num_output_tokens += 1
                return self._first_token_of(0, event.finish)
            case Stepped():
                return self._stepped(event)
            case Cancelled():
                return self._stop_all()
            case Failed():
                return [*self._stop_all()[:-1], Refuse(event.message, "engine"), End()]

    def _submitted(self, event: Submitted) -> list[Action]:
        self._num_tokens, self._n = event.num_tokens, event.n
        self._alive = {0}
        missing = event.num_tokens - event.num_cached_tokens
        if missing <= self.config.local_prefill_tokens:
            return self._run_here("local", "short")
        if event.prefill is None:
            if event.pooled and missing > self.config.max_fallback_tokens:
                self.state = State.ENDED
                return [self._refusal("no prefill replica is healthy", "no_prefill"), End()]
            return self._run_here("local", "no_prefill_replica")
        self.state = State.RESERVING
        self._prefill = event.prefill
        return [Start(0, remote=True)]

    def _run_here(self, decision: str, reason: str) -> list[Action]:
        self.state, self.decision, self.reason = State.RUNNING, decision, reason
        return [Start(0, remote=False)]

    def _reserved(self, event: Reserved) -> list[Action]:
        if self.state is not State.RESERVING:
            return []
        missing = self._num_tokens - event.num_cached_tokens
        if missing <= self.config.local_prefill_tokens or self._prefill is None:
            self.state, self.decision, self.reason = State.RUNNING, "local", "cached_meanwhile"
            return [ComputeHere("cached_meanwhile")]
        self.state, self.decision = State.PULLING, "disaggregated"
        self._first_token = event.num_cached_tokens
        self._attempts = 1
        return [Pull(self._prefill, self._first_token)]

    def _pull_failed(self, event: PullFailed) -> list[Action]:
        if self.state is not State.PULLING:
            return []
        if event.prefill is not None and self._attempts < self.config.max_pull_attempts:
            self._attempts += 1
            self._prefill = event.prefill
            return [Pull(event.prefill, self._first_token)]
        if self._num_tokens - self._first_token <= self.config.max_fallback_tokens:
            self.state, self.decision, self.reason = State.RUNNING, "fallback", event.stage
            return [ComputeHere(event.stage)]
        return [*self._stop_all()[:-1], self._refusal(event.message, event.stage), End()]

    def _refusal(self, why: str, stage: str) -> Refuse:
        missing = self._num_tokens - self._first_token
        return Refuse(
            f"KV did not arrive ({why}) and {missing} tokens are more than this replica computes "
            f"itself ({self.config.max_fallback_tokens}): try again",
            stage,
        )

    def _stepped(self, event: Stepped) -> list[Action]:
        if event.choice not in self._alive:
            return []
        self.num_output_tokens += event.num_tokens
        if event.choice == 0 and len(self._alive) == 1 and self._n > 1:
            self.num_cached_tokens = event.num_cached_tokens
            return self._first_token_of(0, event.finish)
        if event.choice == 0 and self.decision != "disaggregated":
            self.num_cached_tokens = event.num_cached_tokens
        return self._ended(event.choice) if event.finish is not None else []

    def _first_token_of(self, choice: int, finish: FinishReason | None) -> list[Action]:
        self.state = State.RUNNING
        siblings = list(range(1, self._n))
        self._n = 1  # started once
        self._alive.update(siblings)
        actions: list[Action] = [Start(i, remote=False) for i in siblings]
        if finish is not None:
            actions += self._ended(choice)
        return actions

    def _ended(self, choice: int) -> list[Action]:
        self._alive.discard(choice)
        if self._alive:
            return []
        self.state = State.ENDED
        return [End()]

    def _stop_all(self) -> list[Action]:
        actions: list[Action] = [StopPull()] if self.state is State.PULLING else []
        actions += [Stop(choice) for choice in sorted(self._alive)]
        self._alive.clear()
        self.state = State.ENDED
        return [*actions, End()]


_EVENTS: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (Submitted, Reserved, PullFailed, KVArrived, Stepped, Cancelled, Failed)
}


def event_to_json(event: Event) -> dict[str, Any]:
    """A flat, JSON-able record of one event."""
    return {"event": type(event).__name__, **asdict(event)}


def event_from_json(record: dict[str, Any]) -> Event:
    """Inverse of `event_to_json`; unknown extra keys (times, ids) are ignored."""
    cls = _EVENTS[record["event"]]
    values = {name: record[name] for name in cls.__dataclass_fields__}
    if values.get("finish") is not None:
        values["finish"] = FinishReason(values["finish"])
    return cls(**values)


def replay(config: LifecycleConfig, events: list[Event]) -> tuple[Lifecycle, list[Action]]:
    """Run recorded events through a fresh machine."""
    machine = Lifecycle(config)
    actions: list[Action] = []
    for event in events:
        actions += machine.on(event)
    return machine, actions
