"""What a decode replica knows about one submit: kept while it runs, told to whoever explains it.

Hot path: one append to an array a token, a few numbers a step in which some of the prompt was
computed here, and one record a pull. Everything else is worked out when somebody asks.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from deployments.explain.clocks import clock_name
from deployments.explain.costs import NOTHING, Estimate, StepCosts
from deployments.explain.prefill import ChunkFacts, ChunkLog, PrefillFacts
from deployments.explain.queueing import Scores
from deployments.explain.steps import Step, StepRing
from engine.transfer.transport import TransferNote

STALL_FACTOR = 4.0
"""A gap this many times the median of its choice's gaps is a stall."""

STALL_FLOOR_S = 0.002
MAX_STALLS = 8
MAX_CHOICES = 16


@dataclass(slots=True)
class PullRecord:
    """One attempt to have the prompt's KV from a prefill replica. Times are of this replica."""

    replica: str
    began_s: float
    scores: Scores = ()
    """Prompt tokens under way at each prefill replica when this one was chosen."""

    note: TransferNote = field(default_factory=TransferNote)
    ended_s: float = 0.0
    num_bytes: int = 0
    error: str = ""
    """Stage of the failure; empty: it succeeded, or is under way."""

    alone: bool = False
    """No other pull was under way here."""

    @property
    def prefill(self) -> PrefillFacts | None:
        """What the prefill replica did for it; None until it said so."""
        return None if self.note.told is None else PrefillFacts.from_wire(self.note.told)


class DecodeRecord:
    """One submit. Written by the stream table, on its event loop."""

    __slots__ = (
        "_times",
        "begun_s",
        "chunks",
        "ended_s",
        "first_sent_s",
        "outcome",
        "pauses",
        "preempted",
        "pulls",
        "request_id",
        "reserved_s",
        "salt",
        "stream_id",
    )

    def __init__(self, request_id: str, stream_id: int, salt: str, begun_s: float) -> None:
        self.request_id = request_id
        self.stream_id = stream_id
        self.salt = salt
        self.begun_s = begun_s
        self.reserved_s = 0.0
        self.first_sent_s = 0.0
        self.ended_s = 0.0
        self.outcome = ""
        self.pulls: list[PullRecord] = []
        self.chunks = ChunkLog(begun_s)
        self.pauses = array("d")
        """Begin and end of each time that the reader's window was full."""

        self.preempted = array("d")
        self._times: dict[int, array[float]] = {}

    def times(self, choice: int) -> array[float]:
        """When each of the choice's tokens came. Append to it; keep the append."""
        times = self._times.get(choice)
        if times is None:
            times = self._times[choice] = array("d")
        return times

    def fold(self, steps: StepRing, costs: StepCosts, *, replica: str, **told: Any) -> DecodeFacts:
        """Everything worked out. `told` are the fields of `DecodeFacts` that the caller knows."""
        choices = [
            _choice(choice, times, self, steps)
            for choice, times in list(self._times.items())[:MAX_CHOICES]
        ]
        chunks = self.chunks.chunks()
        return DecodeFacts(
            replica=replica,
            clock=clock_name(),
            request_id=self.request_id,
            stream_id=self.stream_id,
            salt=self.salt,
            begun_s=self.begun_s,
            reserved_s=self.reserved_s,
            first_sent_s=self.first_sent_s,
            ended_s=self.ended_s,
            outcome=self.outcome or "running",
            pulls=tuple(self.pulls),
            chunks=chunks,
            num_chunks=self.chunks.num_chunks,
            idle_prefill=costs.prefill([c.tokens for c in chunks]) if chunks else NOTHING,
            idle_step=costs.decode_step(),
            choices=tuple(choices),
            num_preemptions=len(self.preempted),
            paused_s=_paused(self.pauses, self.ended_s),
            num_pauses=(len(self.pauses) + 1) // 2,
            **told,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A gap between two tokens of one choice, far above its median, and what it was spent on."""

    at_s: float
    """When the token before it came."""

    gap_s: float
    cause: str
    """`slow_step`, `other_steps` (it sat out some), `client` (its reader's window was full),
    `preempted`, `between_steps` (the engine was idle or the process busy) or `forgotten`."""

    steps: int = 0
    step_s: float = 0.0
    """Spent inside the steps of the gap."""

    tokens: int = 0
    rows: int = 0
    prompts: int = 0
    prompt_tokens: int = 0
    """What the longest of those steps computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFacts:
    """One choice's tokens. Seconds; nothing but the count below two tokens."""

    choice: int
    num_tokens: int
    first_s: float
    last_s: float
    mean_gap_s: float | None = None
    median_gap_s: float | None = None
    worst_gap_s: float | None = None
    step_s: float | None = None
    """Spent inside the steps that gave these tokens. None: no longer known."""

    mean_rows: float | None = None
    """Requests that got a token in such a step, on average."""

    num_stalls: int = 0
    stalls: tuple[Stall, ...] = ()
    """The worst, worst first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFacts:
    """A submit's journal as it travels. Times are of the decode replica's clock, 0 for never."""

    replica: str
    clock: str
    request_id: str
    stream_id: int
    salt: str
    begun_s: float
    reserved_s: float
    first_sent_s: float
    ended_s: float
    outcome: str
    prompt_tokens: int = 0
    output_tokens: int = 0
    local_tokens: int = 0
    """Of the prompt, found in this replica's own prefix cache."""

    decision: str = ""
    reason: str = ""
    pulls: tuple[PullRecord, ...] = ()
    chunks: tuple[ChunkFacts, ...] = ()
    """Shares of the prompt that were computed here."""

    num_chunks: int = 0
    idle_prefill: Estimate = NOTHING
    idle_step: Estimate = NOTHING
    idle_transfer_s: float | None = None
    choices: tuple[ChoiceFacts, ...] = ()
    num_preemptions: int = 0
    paused_s: float = 0.0
    num_pauses: int = 0

    def to_wire(self) -> dict[str, Any]:
        wire = asdict(self)
        wire["idle_prefill"] = self.idle_prefill.to_wire()
        wire["idle_step"] = self.idle_step.to_wire()
        wire["chunks"] = [chunk.to_wire() for chunk in self.chunks]
        return wire

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> DecodeFacts:
        """Inverse of `to_wire`. Raises TypeError, ValueError or KeyError on anything else."""
        values: dict[str, Any] = dict(wire)
        values["pulls"] = tuple(_pull_from_wire(told) for told in wire["pulls"])
        values["chunks"] = tuple(ChunkFacts(*chunk) for chunk in wire["chunks"])
        values["idle_prefill"] = Estimate(*wire["idle_prefill"])
        values["idle_step"] = Estimate(*wire["idle_step"])
        values["choices"] = tuple(_choice_from_wire(told) for told in wire["choices"])
        return cls(**values)


def _pull_from_wire(told: dict[str, Any]) -> PullRecord:
    values: dict[str, Any] = dict(told)
    values["scores"] = tuple((replica, score) for replica, score in told["scores"])
    values["note"] = TransferNote(**told["note"])
    return PullRecord(**values)


def _choice_from_wire(told: dict[str, Any]) -> ChoiceFacts:
    values: dict[str, Any] = dict(told)
    values["stalls"] = tuple(Stall(**stall) for stall in told["stalls"])
    return ChoiceFacts(**values)


def _paused(pauses: Sequence[float], end_s: float) -> float:
    ends = [*pauses[1::2], *([end_s] if len(pauses) % 2 else [])]
    return sum(max(0.0, end - begin) for begin, end in zip(pauses[::2], ends, strict=True))


def _choice(
    choice: int, times: Sequence[float], record: DecodeRecord, steps: StepRing
) -> ChoiceFacts:
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    if not gaps:
        first_s = times[0] if times else 0.0
        return ChoiceFacts(choice=choice, num_tokens=len(times), first_s=first_s, last_s=first_s)
    middle_s = median(gaps)
    least_s = max(STALL_FACTOR * middle_s, STALL_FLOOR_S)
    stalled = sorted((i for i, gap in enumerate(gaps) if gap > least_s), key=lambda i: -gaps[i])
    spent_s, mean_rows = steps.spent(times[1:]) or (None, None)
    return ChoiceFacts(
        choice=choice,
        num_tokens=len(times),
        first_s=times[0],
        last_s=times[-1],
        mean_gap_s=(times[-1] - times[0]) / len(gaps),
        median_gap_s=middle_s,
        worst_gap_s=max(gaps),
        step_s=spent_s,
        mean_rows=mean_rows,
        num_stalls=len(stalled),
        stalls=tuple(_stall(times[i], times[i + 1], record, steps) for i in stalled[:MAX_STALLS]),
    )


def _stall(from_s: float, to_s: float, record: DecodeRecord, steps: StepRing) -> Stall:
    gap_s = to_s - from_s
    within = steps.between(from_s, to_s)
    oldest_s = steps.oldest_s
    longest: Step | None = max(within, key=lambda step: step.duration_s, default=None)
    spent_s = sum(step.duration_s for step in within)

    def overlap() -> float:
        ends = [*record.pauses[1::2], *([to_s] if len(record.pauses) % 2 else [])]
        pairs = zip(record.pauses[::2], ends, strict=True)
        return sum(max(0.0, min(end, to_s) - max(begin, from_s)) for begin, end in pairs)

    if overlap() > gap_s / 2:
        cause = "client"
    elif any(from_s < at <= to_s for at in record.preempted):
        cause = "preempted"
    elif oldest_s is None or oldest_s > to_s:
        cause = "forgotten"
    elif spent_s < gap_s / 2:
        cause = "between_steps"
    else:
        cause = "slow_step" if len(within) == 1 else "other_steps"
    stall = Stall(at_s=from_s, gap_s=gap_s, cause=cause, steps=len(within), step_s=spent_s)
    if longest is None:
        return stall
    return Stall(
        at_s=from_s,
        gap_s=gap_s,
        cause=cause,
        steps=len(within),
        step_s=spent_s,
        tokens=longest.tokens,
        rows=longest.rows,
        prompts=longest.prompts,
        prompt_tokens=longest.prompt_tokens,
    )


class DecodeJournal:
    """A decode replica's memory of its submits, running ones and the last `size`."""

    def __init__(self, size: int = 512, steps: int = 16_384) -> None:
        self.steps = StepRing(steps)
        self.costs = StepCosts()
        self.transfers = deque[float](maxlen=64)
        """Exposed seconds of the last transfers that had the links to themselves."""

        self._size = size
        self._records: OrderedDict[tuple[str, int], DecodeRecord] = OrderedDict()
        self._told: dict[tuple[str, int], Callable[[], dict[str, Any]]] = {}

    def __len__(self) -> int:
        return len(self._records)

    def begin(
        self,
        gateway: str,
        record: DecodeRecord,
        told: Callable[[], dict[str, Any]],
    ) -> DecodeRecord:
        """Remember a submit. `told` gives what only its owner knows, until `settle` fixes it."""
        key = (gateway, record.stream_id)
        self._records.pop(key, None)
        self._records[key] = record
        self._told[key] = told
        while len(self._records) > self._size:
            old, _ = self._records.popitem(last=False)
            self._told.pop(old, None)
        return record

    def settle(self, gateway: str, record: DecodeRecord, now_s: float, outcome: str) -> None:
        """The submit ended: what `told` says now is kept, and what it refers to is let go."""
        record.ended_s = now_s
        record.outcome = outcome
        key = (gateway, record.stream_id)
        told = self._told.get(key)
        if told is not None and self._records.get(key) is record:
            values = told()
            self._told[key] = lambda: values

    def find(self, gateway: str, stream_id: int) -> DecodeRecord | None:
        return self._records.get((gateway, stream_id))

    def tell(self, gateway: str, stream_id: int, replica: str) -> DecodeFacts | None:
        """The journal of a submit of this gateway, as far as it is known. None: forgotten."""
        key = (gateway, stream_id)
        record = self._records.get(key)
        if record is None:
            return None
        return record.fold(
            self.steps,
            self.costs,
            replica=replica,
            idle_transfer_s=median(self.transfers) if self.transfers else None,
            **self._told[key](),
        )
