"""From traces, a mix and a few factors to a schedule: who is due when, with what.

The schedule is a value made before anything is sent, and the same for the same seed on any machine,
so that two servers can be offered the same.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from cluster.replay.arrivals import Profile, constant, poisson
from cluster.replay.mix import Part
from cluster.replay.prefixes import InfiniteCache, Segment
from cluster.replay.server import ServedModel
from cluster.replay.trace import Trace, TraceError, TraceRequest
from cluster.replay.vocabulary import ChatFrame
from engine.errors import ConfigError

Arrivals = Literal["trace", "poisson", "constant"]

_ROOM = 0.95
"""Part of the context that conversations fill: an answer may take more tokens when it is sent back
than it took when it was generated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """How a trace becomes a load."""

    length: float = 1.0
    """Token counts are multiplied by this; blocks keep their order and what they share."""

    time: float = 1.0
    """Gaps between arrivals are multiplied by this. Not with `rate`."""

    rate: float | None = None
    """Requests a second wanted of all parts together."""

    arrivals: Arrivals = "trace"
    profile: Profile = field(default_factory=Profile)
    users: int | None = None
    """A closed loop: so many, each sending its next request when the last one was answered."""

    max_requests: int | None = None
    max_duration_s: float | None = None
    skip_s: float = 0.0
    """What of a trace's beginning is left out, in the trace's own seconds."""

    max_context_tokens: int | None = None
    """Overrides what the server says of its models."""

    max_output_tokens: int | None = None
    block_tokens: int = 1
    """Of the server's prefix cache, for the prediction of what it holds."""

    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("length", "time"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} factor {getattr(self, name):g}: must be above 0")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"--rate {self.rate:g}: must be above 0 requests a second")
        if self.rate is not None and self.time != 1.0:
            raise ConfigError(
                f"--rate {self.rate:g} and --time-factor {self.time:g}: one follows from the "
                "other; give one"
            )
        if self.arrivals != "trace" and self.rate is None and self.users is None:
            raise ConfigError(f"--arrivals {self.arrivals}: needs --rate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One request of a schedule."""

    index: int
    source: str
    tier: str
    tenant: str
    model: str
    session: str | None = None
    turn: int = 0
    at_s: float | None
    """When it is due. None in a closed loop, and for a turn that is due `think_s` after the answer
    before it; a turn with a time is due then, but not before that answer is there."""

    think_s: float = 0.0
    segments: tuple[Segment, ...]
    """The text of this turn's message."""

    input_tokens: int
    """Of the whole prompt as the server should count it."""

    output_tokens: int
    predicted_cached_tokens: int
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further fields of the request."""

    leave_at: float | None = None
    """The client leaves at this part of the answer, before its first token where that comes to
    no token. None: it stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """What became of one trace."""

    name: str
    file: str
    format: str
    sha256: str
    num_rows: int
    num_skipped: int
    num_offered: int
    num_shortened: int
    """Requests cut to what the model's context or the limits hold."""

    time_factor: float | None
    """What its gaps were multiplied by; None where its arrivals were not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All offers: in order of time, turns of a conversation after each other."""

    offers: tuple[Offer, ...]
    sources: tuple[SourceFacts, ...]
    users: int | None = None

    @property
    def span_s(self) -> float:
        """To the last arrival. 0 in a closed loop."""
        return max((offer.at_s or 0.0 for offer in self.offers), default=0.0)

    @property
    def rate(self) -> float | None:
        """Arrivals of requests and conversations a second. None in a closed loop."""
        timed = sum(1 for offer in self.offers if offer.at_s is not None)
        return (timed - 1) / self.span_s if self.span_s > 0 else None


def plan(
    traces: Sequence[Trace],
    mix: Sequence[Part],
    factors: Factors,
    models: Sequence[ServedModel],
    frames: Mapping[str, ChatFrame | None],
) -> Schedule:
    """The schedule. `frames` holds the chat frame of each model by name, None (or nothing) where
    prompts are bare.

    Raises:
        ConfigError, TraceError: what was asked does not go together.
    """
    return _Planner(traces, mix, factors, models, frames).schedule()


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A trace's request, or several as one conversation, when it is due."""

    at_s: float
    order: int
    part: Part
    trace: Trace
    requests: tuple[TraceRequest, ...]
    times: tuple[float | None, ...]
    """When each of `requests` is due; None: after the answer before it."""


class _Planner:
    def __init__(
        self,
        traces: Sequence[Trace],
        mix: Sequence[Part],
        factors: Factors,
        models: Sequence[ServedModel],
        frames: Mapping[str, ChatFrame | None],
    ) -> None:
        self._traces = {trace.name: trace for trace in traces}
        if len(self._traces) != len(traces):
            raise ConfigError("two traces have the same name: write NAME=PATH for one of them")
        for part in mix:
            if part.source not in self._traces:
                raise ConfigError(
                    f"--mix: source {part.source!r} is none of the traces given "
                    f"({', '.join(self._traces)})"
                )
            if part.model is not None and part.model not in {model.name for model in models}:
                raise ConfigError(
                    f"model {part.model!r} is not served; there are "
                    f"{', '.join(model.name for model in models)}"
                )
        self._mix = mix
        self._factors = factors
        self._models = models
        self._frames = frames
        self._cache = InfiniteCache(factors.block_tokens)
        self._time_factors: dict[str, float | None] = {}
        self._shortened: dict[str, int] = dict.fromkeys(self._traces, 0)
        self._offered: dict[str, int] = dict.fromkeys(self._traces, 0)
        self._conversations = 0

    def schedule(self) -> Schedule:
        offers: list[Offer] = []
        factors = self._factors
        for arrival in self._arrivals():
            if factors.max_duration_s is not None and arrival.at_s >= factors.max_duration_s:
                break
            if factors.max_requests is not None and len(offers) >= factors.max_requests:
                break
            offers += self._conversation(arrival, len(offers))
        return Schedule(
            offers=tuple(self._predicted(offers)),
            sources=tuple(self._facts(trace) for trace in self._traces.values()),
            users=factors.users,
        )

    # Arrivals

    def _arrivals(self) -> Iterator[_Arrival]:
        """Of all sources, in order, until the first of them has no more: then the mix is over."""
        by_source: dict[str, list[Part]] = {}
        for part in self._mix:
            by_source.setdefault(part.source, []).append(part)
        total = sum(part.share for part in self._mix)
        shares = {
            name: sum(part.share for part in parts) / total for name, parts in by_source.items()
        }
        rate = self._rate(shares)
        streams = [
            self._of_source(order, self._traces[name], parts, rate, shares[name])
            for order, (name, parts) in enumerate(by_source.items())
        ]
        merged = heapq.merge(*map(_ended, streams), key=lambda item: (item[0], item[1]))
        starts: Iterator[_Arrival] = (
            arrival for _, _, arrival in itertools.takewhile(lambda item: item[2], merged)
        )  # pyright: ignore[reportAssignmentType]
        if self._factors.users is not None:
            yield from starts
            return
        first, second = itertools.tee(starts)
        warped = self._factors.profile.warp(arrival.at_s for arrival in first)
        for arrival, at_s in zip(second, warped, strict=True):
            yield _moved(arrival, at_s)

    def _rate(self, shares: Mapping[str, float]) -> float | None:
        """Requests a second of everything; None: each source keeps its own time."""
        factors = self._factors
        if factors.rate is not None or factors.users is not None:
            return factors.rate or 1.0
        if len(shares) == 1 and next(iter(self._traces_of(shares))).has_arrivals:
            return None
        for trace in self._traces_of(shares):
            if trace.has_arrivals:
                return trace.rate / factors.time / shares[trace.name]
        raise ConfigError(
            f"{', '.join(shares)}: no arrivals in it: give --rate (and --arrivals), or --users"
        )

    def _traces_of(self, shares: Mapping[str, float]) -> Iterator[Trace]:
        return (self._traces[name] for name in shares)

    def _of_source(
        self, order: int, trace: Trace, parts: Sequence[Part], rate: float | None, share: float
    ) -> Iterator[_Arrival]:
        factors = self._factors
        rng = random.Random(f"{factors.seed}/{trace.name}/arrivals")
        requests = [r for r in trace.requests if (r.at_s or 0.0) >= factors.skip_s]
        if not requests:
            raise ConfigError(
                f"--skip {factors.skip_s:g}: {trace.path} has {trace.span_s:g} s; skip less"
            )
        groups = self._groups(requests, parts, rng)
        own = rate if rate is None else rate * share
        self._time_factors[trace.name] = None
        if factors.arrivals == "trace" and trace.has_arrivals and factors.users is None:
            factor = factors.time if own is None else trace.rate / own
            self._time_factors[trace.name] = factor
            began_s = cast("float", requests[0].at_s)
            for part, group in groups:
                times = [(cast("float", r.at_s) - began_s) * factor for r in group]
                yield _Arrival(times[0], order, part, trace, tuple(group), _times(part, times))
            return
        assert own is not None, "a rate is there wherever arrivals are made"
        made = constant(own) if factors.arrivals == "constant" else poisson(own, rng)
        for (part, group), at_s in zip(groups, made, strict=False):
            nones = (None,) * (len(group) - 1)
            yield _Arrival(at_s, order, part, trace, tuple(group), (at_s, *nones))

    def _groups(
        self, requests: Sequence[TraceRequest], parts: Sequence[Part], rng: random.Random
    ) -> Iterator[tuple[Part, list[TraceRequest]]]:
        """Requests on their own, and conversations, at the place of their first request."""
        weights = [part.share for part in parts]
        sessions: dict[str, list[TraceRequest]] = {}
        for request in requests:
            if request.session is not None:
                sessions.setdefault(request.session, []).append(request)
        waiting: list[list[TraceRequest]] = [[] for _ in parts]
        begun: set[str] = set()
        for request in requests:
            if request.session is not None:
                if request.session not in begun:
                    begun.add(request.session)
                    yield rng.choices(parts, weights)[0], sessions[request.session]
                continue
            place = rng.choices(range(len(parts)), weights)[0]
            part = parts[place]
            waiting[place].append(request)
            if len(waiting[place]) == part.turns:
                yield part, waiting[place]
                waiting[place] = []

    # Conversations

    def _conversation(self, arrival: _Arrival, index: int) -> Iterator[Offer]:
        part, trace, factors = arrival.part, arrival.trace, self._factors
        first = arrival.requests[0]
        model = self._model(part, first)
        frame = self._frames.get(model.name)
        draw = random.Random(f"{factors.seed}/{trace.name}/{self._conversations}/{index}")
        session = None
        if len(arrival.requests) > 1:
            session = f"{trace.name}-{self._conversations}"
        self._conversations += 1
        tenant = draw.choice(part.tenants) if part.tenants else first.tenant or "default"
        tier = part.tier or first.tier or "default"
        said = 0
        """Tokens of the conversation before this turn's message, the template's among them."""

        for turn, request in enumerate(arrival.requests):
            room = self._room(model, conversation=session is not None)
            whole = first.session is not None
            lengths = self._lengths(request, trace, frame, said, room, whole=whole)
            if lengths is None:
                return  # the context is full: the conversation ends here
            message, output, shortened = lengths
            self._shortened[trace.name] += shortened
            self._offered[trace.name] += 1
            head, tail, join = (frame.head, frame.tail, frame.join) if frame else (0, 0, 0)
            before = said + (join if turn else head)
            total = before + message + tail
            leave = draw.random() if draw.random() < part.disconnects else None
            yield Offer(
                index=index + turn,
                source=part.label,
                tier=tier,
                tenant=tenant,
                model=model.name,
                session=session,
                turn=turn,
                at_s=None if factors.users is not None else arrival.times[turn],
                think_s=part.think_s if turn else 0.0,
                segments=self._segments(request, trace, message, index + turn),
                input_tokens=total,
                output_tokens=output,
                predicted_cached_tokens=0,
                body=self._body(request, part, draw),
                leave_at=leave,
            )
            said = total + output

    def _model(self, part: Part, request: TraceRequest) -> ServedModel:
        wanted = part.model or request.model
        for model in self._models:
            if model.name == wanted:
                return model
        return self._models[0]

    def _room(self, model: ServedModel, *, conversation: bool) -> int | None:
        room = self._factors.max_context_tokens or model.max_context_tokens
        return room if room is None or not conversation else int(room * _ROOM)

    def _lengths(
        self,
        request: TraceRequest,
        trace: Trace,
        frame: ChatFrame | None,
        said: int,
        room: int | None,
        *,
        whole: bool,
    ) -> tuple[int, int, int] | None:
        """Tokens of the message and of the answer, and 1 if one of them was cut. None: no room.

        `whole` says that the trace's input counts the conversation so far.
        """
        factors = self._factors
        around = 0
        if frame is not None:
            around = frame.tail + (frame.join if said else frame.head)
        wanted = scaled(request.input_tokens, trace.block_tokens, factors.length)
        output = wanted_output = max(1, round(request.output_tokens * factors.length))
        if factors.max_output_tokens is not None:
            output = min(output, factors.max_output_tokens)
        message = max(1, wanted - around - (said if whole else 0))
        if room is not None:
            left = room - said - around
            output = min(output, max(1, left // 2))
            if left - output < 1:
                if said:
                    return None
                raise ConfigError(
                    f"a context of {room} tokens leaves no room beside the {around} of the chat "
                    "template: use --endpoint completions, or another model"
                )
            cut = min(message, left - output)
        else:
            cut = message
        return cut, output, int(cut < message or output < wanted_output)

    def _segments(
        self, request: TraceRequest, trace: Trace, num_tokens: int, index: int
    ) -> tuple[Segment, ...]:
        """The first `num_tokens` of the request's blocks, and of text of its own behind them."""
        segments: list[Segment] = []
        left = num_tokens
        if request.chain:
            block = scaled(trace.block_tokens, 0, self._factors.length)
            for block_id in request.chain:
                size = min(left, block)
                if size <= 0:
                    break
                segments.append(Segment((trace.name, block_id), size))
                left -= size
        if left > 0:
            segments.append(Segment((trace.name, "own", index), left))
        return tuple(segments)

    def _body(self, request: TraceRequest, part: Part, draw: random.Random) -> dict[str, Any]:
        body: dict[str, Any] = {"seed": draw.getrandbits(31), **request.sampling, **part.sampling}
        if part.stop:
            body["stop"] = list(part.stop)
        if part.fixed_length:
            body["ignore_eos"] = True
        return body

    def _predicted(self, offers: Sequence[Offer]) -> Iterator[Offer]:
        """Offers in order, with what an infinite cache holds when each is due."""
        said: dict[str, list[Segment]] = {}
        for offer in offers:
            frame = self._frames.get(offer.model)
            prompt = said.get(offer.session or "", [])
            if not prompt:
                domain: Hashable = ("head", offer.model, offer.tenant)
                # Nothing is shared across models and tenants, with a head or without one.
                prompt = [Segment(domain, frame.head if frame else 0)]
            elif frame:
                prompt = [*prompt, Segment("join", frame.join)]
            prompt = [*prompt, *offer.segments]
            if frame:
                prompt.append(Segment("tail", frame.tail))
            cached = self._cache.offer(prompt)
            if offer.session is not None:
                answer = ("answer", offer.session, offer.turn)
                said[offer.session] = [*prompt, Segment(answer, offer.output_tokens)]
                # The answer's tokens are computed too, all but the last.
                self._cache.offer([*prompt, Segment(answer, offer.output_tokens)])
            yield replace(offer, predicted_cached_tokens=cached)

    def _facts(self, trace: Trace) -> SourceFacts:
        return SourceFacts(
            name=trace.name,
            file=trace.path.name,
            format=trace.format,
            sha256=trace.sha256,
            num_rows=len(trace.requests) + trace.num_skipped,
            num_skipped=trace.num_skipped,
            num_offered=self._offered[trace.name],
            num_shortened=self._shortened[trace.name],
            time_factor=self._time_factors.get(trace.name),
        )


def scaled(tokens: int, block_tokens: int, factor: float) -> int:
    """Tokens times `factor`, one at least: blocks become whole blocks of a smaller size, so that
    prompts share what they shared, and only what is left of the last one is rounded."""
    if not block_tokens:
        return max(1, round(tokens * factor))
    full, rest = divmod(tokens, block_tokens)
    return max(1, full * max(1, round(block_tokens * factor)) + round(rest * factor))


def _times(part: Part, times: Sequence[float]) -> tuple[float | None, ...]:
    """Turns that `turns` made of single requests are due after each other, whatever their own
    arrivals; turns of the trace's own conversations keep theirs."""
    if part.turns > 1:
        return (times[0], *(None for _ in times[1:]))
    return tuple(times)


def _moved(arrival: _Arrival, at_s: float) -> _Arrival:
    """Begun at `at_s`; later turns of its conversation keep their distances."""
    shift = at_s - arrival.at_s
    times = tuple(None if each is None else each + shift for each in arrival.times)
    return _Arrival(at_s, arrival.order, arrival.part, arrival.trace, arrival.requests, times)


def _ended(stream: Iterator[_Arrival]) -> Iterator[tuple[float, int, _Arrival | None]]:
    """Keys for merging; the end of a stream is an item of its own, right behind its last."""
    at_s, order = 0.0, -1
    for arrival in stream:
        at_s, order = arrival.at_s, arrival.order
        yield at_s, order, arrival
    if order < 0:
        raise TraceError("a source of the mix has no request to offer: give it a larger share")
    yield at_s, order, None
