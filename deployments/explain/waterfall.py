"""One request's time, told without gap or overlap from what every process noted about it.

```
 tool  retrieval | tokenize | queue | route | link | decode_queue | link | prefill_queue | prefill
                 ^ arrival
   | kv_transfer | decode | deliver | stream |
                                             ^ end
```

The line is that of the prompt that ended last: its queue, its replica, its prefill. Where it moved
to another replica, the line goes through `recovery` and the same stations again. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, cast

from deployments.explain.clocks import Offset, offset
from deployments.explain.decode import ChoiceFacts, DecodeFacts, PullRecord
from deployments.explain.request import ExternalSpan, Leg, RequestRecord


class Phase(str, Enum):
    """Who is to be asked about the time."""

    TOOL = "tool"
    RETRIEVAL = "retrieval"
    OTHER = "other"
    CLIENT = "client"
    """Between the client's own spans, and while its body came in."""

    TOKENIZE = "tokenize"
    QUEUE = "queue"
    ROUTE = "route"
    PREFILL = "prefill"
    TRANSFER = "transfer"
    DECODE = "decode"
    STREAM = "stream"
    RECOVERY = "recovery"
    UNACCOUNTED = "unaccounted"


_EXTERNAL = {"tool": Phase.TOOL, "retrieval": Phase.RETRIEVAL, "other": Phase.OTHER}

_TRANSFER_STAGES = frozenset({"offer", "chunk", "checksum", "stall", "final", "lease"})


@dataclass(frozen=True, slots=True)
class Segment:
    name: str
    """What it was: finer than the phase. Names are those of `engine.metrics.PHASES` and `read`,
    `link`, `deliver`, `recovery`, `failed_pull`."""

    phase: Phase
    start_s: float
    """After the arrival; negative before it."""

    duration_s: float
    where: str
    """`client`, `gateway`, `queue` or a replica."""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "phase": self.phase.value,
            "start_s": round(self.start_s, 6),
            "duration_s": round(self.duration_s, 6),
            "where": self.where,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """What the same request would have taken with nobody else in the cluster."""

    phases: dict[Phase, float]
    basis: dict[str, str]
    """How each modelled phase was estimated."""

    @property
    def total_s(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """See the module."""

    record: RequestRecord
    segments: tuple[Segment, ...]
    ends_s: float
    """End of the line, after the arrival."""

    complete: bool
    """The request has ended; else this is how far it is."""

    clock_uncertainty_s: float
    idle: Idle | None
    details: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def phases(self) -> dict[Phase, float]:
        """Seconds by phase, largest first."""
        total: dict[Phase, float] = {}
        for segment in self.segments:
            total[segment.phase] = total.get(segment.phase, 0.0) + segment.duration_s
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    @property
    def dominant(self) -> Phase | None:
        """The phase that took the most; the unaccounted only where nothing else is."""
        named = [p for p, s in self.phases.items() if p is not Phase.UNACCOUNTED and s > 0]
        return named[0] if named else (Phase.UNACCOUNTED if self.phases else None)

    @property
    def delays(self) -> dict[Phase, float]:
        """Seconds beyond the idle cluster's by phase, largest first; empty without that model."""
        if self.idle is None:
            return {}
        extra = {p: s - self.idle.phases.get(p, 0.0) for p, s in self.phases.items()}
        return dict(sorted(((p, s) for p, s in extra.items() if s > 0), key=lambda i: -i[1]))

    @property
    def total_s(self) -> float:
        """Time before the arrival that the client told of, and the request's own."""
        return sum(segment.duration_s for segment in self.segments)

    @property
    def unaccounted_s(self) -> float:
        return self.phases.get(Phase.UNACCOUNTED, 0.0)

    @property
    def accounted(self) -> float:
        """Share of the request's own duration that has a name."""
        return 1.0 if self.ends_s <= 0 else 1.0 - min(1.0, self.unaccounted_s / self.ends_s)

    def to_json(self) -> dict[str, Any]:
        """The answer of `GET /tailrace/explain/{id}`. Seconds, rounded to a microsecond."""
        record, phases = self.record, self.phases
        dominant, delays = self.dominant, self.delays
        own_s = max(self.ends_s, 0.0)
        ttft_s = record.first_token_s - record.received_s if record.first_token_s else None
        told: dict[str, Any] = {
            "object": "tailrace.explanation",
            "request_id": record.request_id,
            "answer_id": record.answer_id or None,
            "gateway": record.gateway,
            "endpoint": record.endpoint,
            "model": record.model or None,
            "tier": record.tier,
            "stream": record.stream,
            "received_at": record.received_unix_s,
            "complete": self.complete,
            "outcome": record.outcome,
            "status": record.status or None,
            "code": record.code or None,
            "usage": {
                "prompt_tokens": record.prompt_tokens,
                "completion_tokens": record.completion_tokens,
                "cached_tokens": record.cached_tokens,
            },
            "duration_s": own_s,
            "ttft_s": ttft_s,
            "external_s": self.total_s - own_s,
            "total_s": self.total_s,
            "accounted": self.accounted,
            "unaccounted_s": self.unaccounted_s,
            "clock_uncertainty_s": self.clock_uncertainty_s,
            "dominant_phase": None if dominant is None else dominant.value,
            "dominant_s": None if dominant is None else phases[dominant],
            "most_delayed_phase": next((phase.value for phase in delays), None),
            "most_delayed_s": next(iter(delays.values()), None),
            "phases": {phase.value: seconds for phase, seconds in phases.items()},
            "idle": None,
            "segments": [segment.to_json() for segment in self.segments],
            **self.details,
        }
        if self.idle is not None:
            total_s = self.idle.total_s
            told["idle"] = {
                "total_s": total_s,
                "slowdown": self.total_s / total_s if total_s > 0 else None,
                "phases": {phase.value: seconds for phase, seconds in self.idle.phases.items()},
                "basis": self.idle.basis,
            }
        return _rounded(told)


class _Line:
    """A line of segments: each begins where the one before ended, none goes past the end."""

    def __init__(self, zero_s: float, end_s: float) -> None:
        self._zero_s = zero_s
        self._end_s = end_s
        self.at_s = zero_s
        self.segments: list[Segment] = []

    def to(self, until_s: float, name: str, phase: Phase, where: str) -> float:
        """Everything up to `until_s` was this. Returns its length."""
        until_s = min(max(until_s, self.at_s), self._end_s)
        length_s = until_s - self.at_s
        if length_s > 0:
            start_s = self.at_s - self._zero_s
            self.segments.append(Segment(name, phase, start_s, length_s, where))
        self.at_s = until_s
        return length_s


@dataclass(slots=True)
class _Building:
    record: RequestRecord
    line: _Line
    journals: Mapping[tuple[str, int], tuple[DecodeFacts, Offset | None]]
    end_s: float
    uncertainty_s: float = 0.0
    windows: list[tuple[float, float, DecodeFacts | None]] = field(
        default_factory=list[tuple[float, float, "DecodeFacts | None"]]
    )


def assemble(
    record: RequestRecord,
    journals: Mapping[tuple[str, int], tuple[DecodeFacts, Offset | None]],
    now_s: float,
) -> Waterfall:
    """The waterfall of a request, as far as it is.

    `journals` are what decode replicas told, by `(replica, stream id)`, each with its clock's
    offset from this process's where that is known. `now_s` ends a request that has not ended.
    """
    complete = record.ended_s > 0
    end_s = record.ended_s if complete else now_s
    line = _Line(record.received_s, end_s)
    building = _Building(record, line, journals, end_s)
    line.to(record.read_s or record.received_s, "read", Phase.CLIENT, "client")
    spine = _spine(record)
    line.to(
        record.tokenised_s or (spine[0].asked_s if spine else end_s),
        "tokenize",
        Phase.TOKENIZE,
        "gateway",
    )
    for i, leg in enumerate(spine):
        _leg(building, leg, spine[i + 1] if i + 1 < len(spine) else None)
    _rest(building, spine)
    segments = (*_external(record.spans), *line.segments)
    facts = _told(building, spine)
    return Waterfall(
        record=record,
        segments=segments,
        ends_s=end_s - record.received_s,
        complete=complete,
        clock_uncertainty_s=building.uncertainty_s,
        idle=_idle(segments, facts),
        details=_details(building, spine),
    )


def _spine(record: RequestRecord) -> list[Leg]:
    """The legs of the prompt, and of its choice, that ended last; in order."""
    if not record.legs:
        return []
    last = max(record.legs, key=lambda leg: (leg.ended_s or float("inf"), leg.asked_s))
    choice = last.choices[0] if last.choices else 0
    return [
        leg for leg in record.legs if leg.prompt == last.prompt and choice in (leg.choices or (0,))
    ]


def _leg(building: _Building, leg: Leg, following: Leg | None) -> None:
    line = building.line
    line.to(leg.asked_s, "recovery" if building.windows else "queue", _wait(building), "gateway")
    over_s = leg.ended_s or building.end_s
    line.to(leg.granted_s or over_s, "queue", Phase.QUEUE, "queue")
    if not leg.granted_s:
        return
    line.to(leg.submitted_s or over_s, "route", Phase.ROUTE, "gateway")
    if not leg.submitted_s:
        return
    told = building.journals.get((leg.replica, leg.stream_id))
    facts, away = told if told is not None else (None, None)
    if facts is not None and away is not None:
        building.uncertainty_s = max(building.uncertainty_s, away.uncertainty_s)
    first_s = leg.first_s or (following.asked_s if following is not None else over_s)
    first_s = min(first_s, over_s)
    if leg.end == "refused" and not leg.first_s:
        line.to(over_s, "refused", Phase.ROUTE, leg.replica)
        return
    if leg.end == "lost" and facts is None:
        # It took its journal with it: without a token its work was for nothing, with one the
        # gateway's own view is all there is.
        name, phase = ("prefill", Phase.PREFILL) if leg.first_s else ("lost", Phase.RECOVERY)
        line.to(first_s, name, phase, leg.replica)
    elif facts is None or away is None:
        line.to(first_s, "unaccounted", Phase.UNACCOUNTED, leg.replica)
    else:
        _prompt(building, facts, away, first_s)
    if leg.first_s:
        start_s = line.at_s
        stop_s = min(over_s, building.end_s)
        building.windows.append((start_s, max(start_s, stop_s), facts))
        if following is not None:
            _answer(building, start_s, max(start_s, stop_s), facts)


def _wait(building: _Building) -> Phase:
    return Phase.RECOVERY if building.windows else Phase.QUEUE


def _prompt(building: _Building, facts: DecodeFacts, away: Offset, first_s: float) -> None:
    """From the submit's receipt to the first event at the gateway."""
    line, here, replica = building.line, away.here, facts.replica
    line.to(min(here(facts.begun_s), first_s), "link", Phase.ROUTE, "gateway")
    for pull in facts.pulls:
        began_s = min(here(pull.began_s), first_s)
        line.to(began_s, "decode_queue", Phase.DECODE, replica)
        ended_s = min(here(pull.ended_s), first_s) if pull.ended_s else first_s
        if pull.error:
            phase = Phase.TRANSFER if pull.error in _TRANSFER_STAGES else Phase.PREFILL
            line.to(ended_s, "failed_pull", phase, pull.replica)
            continue
        _pull(building, facts, pull, away, ended_s)
    if facts.chunks:
        first = facts.chunks[0]
        line.to(
            min(here(first.end_s - first.duration_s), first_s),
            "decode_queue",
            Phase.DECODE,
            replica,
        )
        done_s = min(_first_token_s(facts) or facts.chunks[-1].end_s, facts.chunks[-1].end_s)
        line.to(min(here(done_s), first_s), "prefill", Phase.PREFILL, replica)
    sent_s = here(facts.first_sent_s) if facts.first_sent_s else first_s
    line.to(
        min(sent_s, first_s),
        "decode_queue" if not facts.chunks else "decode",
        Phase.DECODE,
        replica,
    )
    line.to(first_s, "link", Phase.STREAM, "gateway")


def _pull(
    building: _Building,
    facts: DecodeFacts,
    pull: PullRecord,
    away: Offset,
    ended_s: float,
) -> None:
    line, here = building.line, away.here
    told = pull.prefill
    final_s = min(here(pull.note.final_s), ended_s) if pull.note.final_s else ended_s
    between = None
    if told is not None:
        exchange = (pull.note.asked_s, told.asked_s, told.sent_s, pull.note.final_s)
        between = offset([exchange], facts.clock, told.clock)
    if told is None or between is None:
        line.to(final_s, "prefill", Phase.PREFILL, pull.replica)
    else:
        building.uncertainty_s = max(building.uncertainty_s, between.uncertainty_s)

        def at(prefill_s: float) -> float:
            return min(here(between.here(prefill_s)), final_s)

        line.to(at(told.asked_s), "link", Phase.ROUTE, facts.replica)
        if told.chunks:
            first = told.chunks[0]
            line.to(
                at(first.end_s - first.duration_s), "prefill_queue", Phase.PREFILL, pull.replica
            )
        line.to(at(told.sent_s), "prefill", Phase.PREFILL, pull.replica)
        line.to(final_s, "link", Phase.TRANSFER, pull.replica)
    line.to(ended_s, "kv_transfer", Phase.TRANSFER, pull.replica)


def _first_token_s(facts: DecodeFacts) -> float | None:
    firsts = [choice.first_s for choice in facts.choices if choice.num_tokens]
    return min(firsts) if firsts else None


def _rest(building: _Building, spine: Sequence[Leg]) -> None:
    """From the last first event to the end of the request."""
    line = building.line
    if building.windows and spine and spine[-1].first_s:
        start_s, _, facts = building.windows[-1]
        _answer(building, start_s, building.end_s, facts)
    elif building.windows:
        line.to(building.end_s, "recovery", Phase.RECOVERY, "gateway")
    elif spine and spine[-1].end in ("refused", "unreachable"):
        line.to(building.end_s, "route", Phase.ROUTE, "gateway")
    elif spine:
        line.to(building.end_s, "deliver", Phase.STREAM, "gateway")
    elif building.record.tokenised_s:
        line.to(building.end_s, "unaccounted", Phase.UNACCOUNTED, "gateway")


def _answer(building: _Building, start_s: float, stop_s: float, facts: DecodeFacts | None) -> None:
    """The tokens of one leg. What the client's connection took is the client's; of the rest, what
    the replica needed between its first token and its last is decode's, what is left delivery."""
    record, line = building.record, building.line
    length_s = max(0.0, stop_s - start_s)
    whole_s = max(building.end_s - (record.first_token_s or start_s), length_s, 1e-9)
    blocked_s = min(length_s, record.write_s * (length_s / whole_s))
    decode_s = length_s - blocked_s
    replica = facts.replica if facts is not None else "gateway"
    if facts is not None and facts.choices:
        spent_s = max(c.last_s for c in facts.choices) - min(c.first_s for c in facts.choices)
        decode_s = min(decode_s, spent_s)
    line.to(start_s + decode_s, "decode", Phase.DECODE, replica)
    line.to(stop_s - blocked_s, "deliver", Phase.STREAM, "gateway")
    line.to(stop_s, "stream", Phase.STREAM, "client")


def _external(spans: Sequence[ExternalSpan]) -> list[Segment]:
    """The client's spans as a line up to the arrival. Where several run, the latest begun has the
    time; where none runs, the client has it."""
    if not spans:
        return []
    edges = sorted(
        {0.0, *(-s.before_s for s in spans), *(min(0.0, s.duration_s - s.before_s) for s in spans)}
    )
    segments: list[Segment] = []
    for begin, end in itertools.pairwise(edges):
        running = [s for s in spans if -s.before_s <= begin and s.duration_s - s.before_s >= end]
        if running:
            span = min(running, key=lambda s: s.before_s)
            name, phase = span.name, _EXTERNAL.get(span.kind, Phase.OTHER)
        else:
            name, phase = "client", Phase.CLIENT
        last = segments[-1] if segments else None
        if last is not None and (last.name, last.phase) == (name, phase):
            longer = last.duration_s + end - begin
            segments[-1] = Segment(name, phase, last.start_s, longer, "client")
        else:
            segments.append(Segment(name, phase, begin, end - begin, "client"))
    return segments


def _told(building: _Building, spine: Sequence[Leg]) -> list[tuple[Leg, DecodeFacts]]:
    return [
        (leg, building.journals[leg.replica, leg.stream_id][0])
        for leg in spine
        if (leg.replica, leg.stream_id) in building.journals
    ]


def _idle(segments: Sequence[Segment], told: Sequence[tuple[Leg, DecodeFacts]]) -> Idle | None:
    """None where no replica has measured a step yet, or none told anything."""
    if not told:
        return None
    facts = told[-1][1]
    step = facts.idle_step
    if step.seconds is None:
        return None
    actual: dict[Phase, float] = {}
    for segment in segments:
        actual[segment.phase] = actual.get(segment.phase, 0.0) + segment.duration_s
    pulled = [pull for _, f in told for pull in f.pulls if not pull.error and pull.prefill]
    prompt = told[0][1].idle_prefill
    transfer_s, transfer = 0.0, "nothing was transferred"
    if pulled:
        pull = pulled[0]
        assert pull.prefill is not None
        prompt = pull.prefill.idle
        exposed_s = max(0.0, pull.ended_s - pull.note.final_s)
        known_s = facts.idle_transfer_s
        transfer_s = exposed_s if known_s is None else min(exposed_s, known_s)
        transfer = "this transfer itself" if known_s is None else "median of transfers alone"
    num_steps = max((max(0, c.num_tokens - 1) for c in _choices(told)), default=0)
    phases = {
        # What the cluster does not decide stays as it was.
        phase: actual[phase]
        for phase in (
            Phase.TOOL,
            Phase.RETRIEVAL,
            Phase.OTHER,
            Phase.CLIENT,
            Phase.TOKENIZE,
            Phase.STREAM,
        )
        if phase in actual
    }
    basis = {
        "prefill": f"{prompt.basis}, {prompt.samples} steps",
        "transfer": transfer,
        "decode": f"{num_steps} steps, each {step.basis}, {step.samples} steps",
        "others": "as they were; queue, route and recovery 0",
    }
    phases[Phase.PREFILL] = (
        prompt.seconds if prompt.seconds is not None else actual.get(Phase.PREFILL, 0.0)
    )
    phases[Phase.TRANSFER] = transfer_s
    phases[Phase.DECODE] = num_steps * step.seconds
    return Idle(phases=phases, basis=basis)


def _choices(told: Sequence[tuple[Leg, DecodeFacts]]) -> list[ChoiceFacts]:
    """For each choice its tokens over all legs, the longest first."""
    return sorted((c for _, f in told for c in f.choices), key=lambda c: -c.num_tokens)


def _details(building: _Building, spine: Sequence[Leg]) -> dict[str, Any]:
    """The sections of an explanation beside the line."""
    record, zero_s = building.record, building.record.received_s
    told = _told(building, spine)
    last = told[-1][1] if told else None
    pulls = [(f, pull) for _, f in told for pull in f.pulls]
    done = next((pull for _, pull in pulls if not pull.error), None)
    local = told[0][1].local_tokens if told else None
    computed = None
    if told:
        computed = sum(c.tokens for c in told[0][1].chunks)
        if done is not None and done.prefill is not None:
            computed = sum(c.tokens for c in done.prefill.chunks)
    return {
        "queue": _queue(spine[0]) if spine else None,
        "route": {
            "decode": {
                "replica": spine[-1].replica,
                "rule": spine[-1].queue.rule if spine[-1].queue is not None else None,
                "scores": dict(spine[-1].queue.scores) if spine[-1].queue is not None else None,
                "without_queue": spine[-1].direct,
            }
            if spine
            else None,
            "prefill": {
                "replica": done.replica,
                "rule": "fewest prompt tokens under way",
                "scores": dict(done.scores),
            }
            if done is not None
            else None,
        },
        "prefix": {
            "prompt_tokens": record.prompt_tokens,
            "local_hit_tokens": local,
            "remote_hit_tokens": (
                max(0, record.cached_tokens - (local or 0)) if done is not None else 0
            ),
            "computed_tokens": computed,
        }
        if told
        else None,
        "prefill": _prefill(told, done) if told else None,
        "transfer": _transfer(done) if done is not None else None,
        "failed_pulls": [
            {"replica": p.replica, "stage": p.error, "seconds": p.ended_s - p.began_s}
            for _, p in pulls
            if p.error
        ],
        "decode": _decode(building, told) if told else None,
        "preemptions": sum(f.num_preemptions for _, f in told),
        "backpressure": {
            "blocked_s": record.write_s,
            "worst_s": record.worst_write_s,
            "writes": record.num_writes,
            "decode_paused_s": last.paused_s if last is not None else None,
            "decode_pauses": last.num_pauses if last is not None else None,
        },
        "migrations": [
            {
                "replica": leg.replica,
                "why": leg.why,
                "at_s": leg.ended_s - zero_s,
                "to": _after(spine, leg),
            }
            for leg in spine
            if leg.end == "lost"
        ],
        "degradations": [
            {"at_s": note.at_s - zero_s, "kind": note.kind, **note.detail} for note in record.notes
        ],
        "spans": [
            {
                "name": span.name,
                "kind": span.kind,
                "start_s": -span.before_s,
                "duration_s": span.duration_s,
            }
            for span in record.spans
        ],
        "submits": [
            {
                "prompt": leg.prompt,
                "choices": list(leg.choices),
                "replica": leg.replica or None,
                "end": leg.end or "running",
                "why": leg.why or None,
                "asked_s": leg.asked_s - zero_s,
                "ended_s": leg.ended_s - zero_s if leg.ended_s else None,
                "journal": (leg.replica, leg.stream_id) in building.journals,
            }
            for leg in record.legs
        ],
    }


def _after(spine: Sequence[Leg], leg: Leg) -> str | None:
    index = spine.index(leg)
    return next((later.replica for later in spine[index + 1 :] if later.replica), None)


def _queue(leg: Leg) -> dict[str, Any]:
    waited_s = (leg.granted_s or leg.ended_s or leg.asked_s) - leg.asked_s
    told: dict[str, Any] = {"waited_s": max(0.0, waited_s), "without_queue": leg.direct}
    if leg.queue is not None:
        told["at_arrival"] = {"ahead": leg.queue.ahead, "waiting": dict(leg.queue.waiting)}
        told["granted_before"] = dict(leg.queue.granted_before)
    return told


def _prefill(told: Sequence[tuple[Leg, DecodeFacts]], done: PullRecord | None) -> dict[str, Any]:
    facts = told[0][1]
    remote = done.prefill if done is not None else None
    chunks = remote.chunks if remote is not None else facts.chunks
    begin_s = (remote.asked_s if remote is not None else facts.begun_s) if chunks else 0.0
    return {
        "decision": facts.decision or None,
        "reason": facts.reason or None,
        "replica": done.replica if done is not None else facts.replica,
        "num_chunks": remote.num_chunks if remote is not None else facts.num_chunks,
        "chunks": [
            {
                "start_s": chunk.end_s - chunk.duration_s - begin_s,
                "duration_s": chunk.duration_s,
                "tokens": chunk.tokens,
                "other_tokens": chunk.others,
            }
            for chunk in chunks
        ],
    }


def _transfer(pull: PullRecord) -> dict[str, Any]:
    hidden_s = (
        pull.note.final_s - pull.note.first_byte_s
        if pull.note.first_byte_s and pull.note.final_s
        else 0.0
    )
    exposed_s = pull.ended_s - pull.note.final_s if pull.note.final_s and pull.ended_s else 0.0
    return {
        "replica": pull.replica,
        "bytes": pull.num_bytes,
        "hidden_bytes": pull.note.bytes_at_final,
        "hidden_s": max(0.0, hidden_s),
        "exposed_s": max(0.0, exposed_s),
        "alone": pull.alone,
    }


def _decode(building: _Building, told: Sequence[tuple[Leg, DecodeFacts]]) -> dict[str, Any]:
    zero_s = building.record.received_s
    choices: list[dict[str, Any]] = []
    for leg, facts in told:
        away = building.journals[leg.replica, leg.stream_id][1]
        for c in facts.choices:
            stalls: list[dict[str, Any]] = []
            for stall in c.stalls:
                shared = {
                    "tokens": stall.tokens,
                    "rows": stall.rows,
                    "prompts": stall.prompts,
                    "prompt_tokens": stall.prompt_tokens,
                }
                stalls.append(
                    {
                        "at_s": None if away is None else away.here(stall.at_s) - zero_s,
                        "gap_s": stall.gap_s,
                        "cause": stall.cause,
                        "steps": stall.steps,
                        "step_s": stall.step_s,
                        "longest_step": shared,
                    }
                )
            choices.append(
                {
                    "choice": leg.choices[c.choice] if c.choice < len(leg.choices) else c.choice,
                    "replica": facts.replica,
                    "tokens": c.num_tokens,
                    "mean_gap_s": c.mean_gap_s,
                    "median_gap_s": c.median_gap_s,
                    "worst_gap_s": c.worst_gap_s,
                    "step_s": c.step_s,
                    "mean_rows": c.mean_rows,
                    "num_stalls": c.num_stalls,
                    "stalls": stalls,
                }
            )
    return {"choices": choices}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_rounded(v) for v in cast("list[Any]", value)]
    return value
