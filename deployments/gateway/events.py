"""What happened to each request at the gateway: typed events, a bounded log and a pure replay.

```
Received ── Tokenised ── Admitted ── Submitted ── FirstToken ── Finished | Failed | Disconnected
   |  tokenize  |  queue   |   route   |  prefill    |  stream    |
```

Times are seconds of one process's monotonic clock: differences mean something, values do not.

Events are written once and never changed. They are not frozen all the same: a frozen one takes more
than twice as long to make, and every request makes six.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Union


@dataclass(slots=True, kw_only=True)
class _Event:
    request_id: str
    at_s: float


@dataclass(slots=True, kw_only=True)
class Received(_Event):
    """The head of the request has arrived."""

    endpoint: str
    kind: ClassVar[str] = "received"


@dataclass(slots=True, kw_only=True)
class Tokenised(_Event):
    """Body read, validated, templated, tokenised."""

    answer_id: str
    """Of the answer; a decode replica's log of the same request goes by it."""

    model: str
    stream: bool
    prompts: int
    prompt_tokens: int
    max_tokens: int
    n: int
    kind: ClassVar[str] = "tokenised"


@dataclass(slots=True, kw_only=True)
class Admitted(_Event):
    """The (first) grant came."""

    replica: str | None
    kind: ClassVar[str] = "admitted"


@dataclass(slots=True, kw_only=True)
class Submitted(_Event):
    """The (first) submit is on the link."""

    kind: ClassVar[str] = "submitted"


@dataclass(slots=True, kw_only=True)
class FirstToken(_Event):
    """The first text went to the client; without streaming, the first event came."""

    kind: ClassVar[str] = "first_token"


@dataclass(slots=True, kw_only=True)
class Finished(_Event):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasons: tuple[str, ...]
    """Finish reason of each choice."""

    kind: ClassVar[str] = "finished"


@dataclass(slots=True, kw_only=True)
class Failed(_Event):
    code: str
    status: int
    """HTTP status of the failure, also where 200 had been sent already."""

    message: str
    kind: ClassVar[str] = "failed"


@dataclass(slots=True, kw_only=True)
class Disconnected(_Event):
    """The client went away."""

    phase: str
    """The phase it left in, as in `PHASES`."""

    kind: ClassVar[str] = "disconnected"


Event = Union[  # noqa: UP007 - a runtime alias that also 3.10 can iterate
    Received, Tokenised, Admitted, Submitted, FirstToken, Finished, Failed, Disconnected
]

_KINDS: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        Received,
        Tokenised,
        Admitted,
        Submitted,
        FirstToken,
        Finished,
        Failed,
        Disconnected,
    )
}

PHASES = ("tokenize", "queue", "route", "prefill", "stream")
"""Phase i runs from milestone i to milestone i+1. Names are those of `engine.metrics.PHASES`."""

_MILESTONES = (Received, Tokenised, Admitted, Submitted, FirstToken)
_ENDS = (Finished, Failed, Disconnected)


def to_json(event: Event) -> dict[str, Any]:
    """Plain values, with `kind` first. `from_json` is the inverse."""
    return {"kind": event.kind, **asdict(event)}


def from_json(value: dict[str, Any]) -> Event:
    """Raises KeyError or TypeError on what `to_json` did not write."""
    cls = _KINDS[value["kind"]]
    arguments = {f.name: value[f.name] for f in fields(cls)}
    if "reasons" in arguments:
        arguments["reasons"] = tuple(arguments["reasons"])
    return cls(**arguments)


class EventLog:
    """The last `size` events of all requests. Appending costs a deque append."""

    def __init__(self, size: int) -> None:
        self._ring: deque[Event] = deque(maxlen=size)
        self.append = self._ring.append

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._ring))

    def __len__(self) -> int:
        return len(self._ring)

    def of(self, request_id: str) -> list[Event]:
        return [event for event in self if event.request_id == request_id]

    def resize(self, size: int) -> None:
        """Keeps the newest."""
        if size != self._ring.maxlen:
            self._ring = deque(self._ring, maxlen=size)
            self.append = self._ring.append


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSummary:
    """One request, folded."""

    request_id: str
    endpoint: str | None
    model: str | None
    outcome: str
    """`finished`, `failed`, `disconnected` or `open`."""

    code: str | None
    """Error code of a failure."""

    duration_s: float
    """From the first event to the last: exactly the sum of `phases`."""

    ttft_s: float | None
    phases: tuple[tuple[str, float], ...]
    """Seconds in each phase that was entered, in order."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


def replay(events: Iterable[Event]) -> RequestSummary:
    """Fold one request's events, in order of time.

    A phase ends where the next milestone that happened begins, so the phases add up to the duration
    whatever was skipped. Raises ValueError without events, or on events of two requests.
    """
    history = list(events)
    if not history:
        raise ValueError("nothing to replay: no events")
    request_id = history[0].request_id
    endpoint = model = code = None
    outcome = "open"
    prompt_tokens = completion_tokens = cached_tokens = 0
    marks: list[tuple[str, float]] = []
    first_token_s = None
    for event in history:
        if event.request_id != request_id:
            raise ValueError(f"events of two requests: {request_id} and {event.request_id}")
        if isinstance(event, _MILESTONES):
            marks.append((PHASES[_MILESTONES.index(type(event))], event.at_s))
        match event:
            case Received():
                endpoint = event.endpoint
            case Tokenised():
                model, prompt_tokens = event.model, event.prompt_tokens
            case FirstToken():
                first_token_s = event.at_s
            case Finished():
                outcome = event.kind
                prompt_tokens = event.prompt_tokens
                completion_tokens = event.completion_tokens
                cached_tokens = event.cached_tokens
            case Failed():
                outcome, code = event.kind, event.code
            case Disconnected():
                outcome = event.kind
            case _:
                pass
    start_s, end_s = history[0].at_s, history[-1].at_s
    edges = [at_s for _, at_s in marks[1:]] + [end_s]
    phases = tuple(
        (name, edge - at_s) for (name, at_s), edge in zip(marks, edges, strict=bool(marks))
    )
    return RequestSummary(
        request_id=request_id,
        endpoint=endpoint,
        model=model,
        outcome=outcome,
        code=code,
        duration_s=end_s - start_s,
        ttft_s=None if first_token_s is None else first_token_s - start_s,
        phases=phases,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=cached_tokens,
    )
