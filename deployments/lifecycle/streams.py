"""Every submit alive on a decode replica: from SUBMIT to its last frame, on the event loop.

The state machine (`machine.py`) decides; this carries out. All engine calls here return in
microseconds; the engine's steps come in through `on_step`, one call a step.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from deployments.explain.decode import DecodeJournal, DecodeRecord, PullRecord
from deployments.lifecycle.machine import (
    Action,
    Cancelled,
    ComputeHere,
    End,
    Event,
    Failed,
    KVArrived,
    Lifecycle,
    LifecycleConfig,
    Pull,
    PullFailed,
    Refuse,
    Reserved,
    Start,
    State,
    Stepped,
    Stop,
    StopPull,
    Submitted,
    event_to_json,
)
from deployments.link.link import Link
from deployments.link.messages import (
    UNTAKABLE,
    Kind,
    StreamEvent,
    Submit,
    TokenLogprob,
    Usage,
    refusal_to_wire,
)
from deployments.link.wire import CloseReason
from engine.errors import EngineError, Overloaded, RequestError, TransferError
from engine.outputs import Output, StepOutput
from engine.protocol import EngineLike
from engine.request import FinishReason, Request, SampledToken
from engine.transfer.manifest import Prefilled

logger = logging.getLogger(__name__)


class RemotePrefill(Protocol):
    """Where prompts can be computed elsewhere. None of it exists on a replica served together."""

    @property
    def num_replicas(self) -> int:
        """Running, as this replica sees it."""
        ...

    def choose(self, num_tokens: int, excluding: str | None) -> str | None:
        """A healthy prefill replica, or None."""
        ...

    async def pull(
        self,
        replica: str,
        request: Request,
        blocks: tuple[int, ...],
        first_token: int,
        record: PullRecord,
    ) -> Prefilled:
        """Fill `blocks` from `first_token` on. Raises TransferError; never half done. `record` is
        filled in on the way."""
        ...

    def blocks(self, request_id: str) -> tuple[int, ...]:
        """Those to fill now: others than before where a failed pull may still write into some.
        Empty: there are none, and the engine computes the prompt when it has some."""
        ...

    def arrived(self, request: Request, prefilled: Prefilled) -> Output | None:
        """Commit the blocks and get the first token's output; None if the request is gone."""
        ...

    def failed(self, request_id: str) -> None:
        """Let the engine compute the prompt itself."""
        ...


class StreamObserver(Protocol):
    """Who is told how long things took. All times in seconds."""

    def first_token(self, seconds: float) -> None: ...
    def gaps(self, counted: Sequence[tuple[float, int]]) -> None:
        """Gaps between two tokens of a choice in one step, each with how often it came."""
        ...

    def ended(
        self, finish: FinishReason, total_s: float, decode_s: float | None, num_tokens: int
    ) -> None: ...
    def pulled(self, prefilled: Prefilled, seconds: float) -> None: ...


LONG_PROMPT_TOKENS = 512
"""The queue is told at once when a prompt of this length is done; shorter ones with the next
report."""


@dataclass(slots=True)
class Counters:
    """Totals since start, read by the metric exporter."""

    submits: int = 0
    tokens_out: int = 0
    frames: int = 0
    cancelled: int = 0
    refused: dict[str, int] = field(default_factory=dict[str, int])
    decisions: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    pull_failures: dict[str, int] = field(default_factory=dict[str, int])
    fallbacks: dict[str, int] = field(default_factory=dict[str, int])
    """After a failed pull: other_replica, local or refused."""

    prompt_tokens: dict[str, int] = field(default_factory=dict[str, int])
    """By source: local_compute, local_cache_hit, external_kv_transfer."""


@dataclass(slots=True, eq=False)
class _Stream:
    link: Link
    stream_id: int
    submit: Submit
    machine: Lifecycle
    deadline: float | None
    begun: float
    key: str
    """Unique on this replica; choice i runs in the engine as `{key}/{i}`."""

    record: DecodeRecord
    level: int
    """Priority at which the engine runs it: more urgent than its own if it had to wait long."""

    timer: asyncio.TimerHandle | None = None
    pull: asyncio.Task[None] | None = None
    blocks: tuple[int, ...] = ()
    first_token: int = 0
    window_tokens: int = 0
    ahead: int = 0
    """Tokens sent that the gateway has not consumed yet, apart from what its choices took of their
    room since."""

    paused: bool = False
    choices: dict[int, _Choice] = field(default_factory=lambda: dict[int, _Choice]())
    """Those the engine has now."""

    log: list[tuple[float, Event]] = field(default_factory=list[tuple[float, Event]])

    @property
    def num_kept(self) -> int:
        """Choices, the first ones, that nothing preempts."""
        submit = self.submit
        if not submit.request.preemptible:
            return submit.n
        return 0 if submit.grant is None else min(submit.grant.kept, submit.n)

    def makes_way_for(self, priority: int) -> int:
        """Choices whose slots the engine takes back within a step."""
        return self.submit.n - self.num_kept if self.outranked_below > priority else 0

    @property
    def outranked_below(self) -> int:
        """Priorities below this one go before those of its choices that are not kept: none while
        somebody fills its blocks."""
        return UNTAKABLE if self.machine.state is State.PULLING else self.level


@dataclass(slots=True, eq=False)
class _Choice:
    """A choice that the engine has: one of its requests.

    What nearly every token needs is here, so that it touches no other object of the stream.
    """

    stream: _Stream
    link: Link
    stream_id: int
    index: int
    engine_id: str
    came: Callable[[float], None]
    """To be told when each of its tokens came."""

    plain: bool = False
    """Its tokens are text and nothing else: the first one has been told, and nobody asked for
    log-probabilities."""

    num_tokens: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    unlogged: int = 0
    """Tokens since the machine was last told, as far as they are settled."""

    room: int = 0
    """Tokens it may send before its stream has to be looked at again."""

    given: int = 0
    """What `room` was when that was done last."""


@dataclass(slots=True)
class _Ended:
    """What is remembered of a submit."""

    request_id: str
    decision: str
    reason: str
    events: list[tuple[float, Event]]


class StreamTable:
    """The decode replica's streams.

    `slots` is the last authority on how many choices may be alive; a submit past it is refused with
    the code `full`. `changed` is called after every change of what is alive, for the report to the
    queue.
    """

    def __init__(
        self,
        engine: EngineLike,
        config: LifecycleConfig,
        *,
        slots: int,
        remote: RemotePrefill | None,
        changed: Callable[[], None],
        observer: StreamObserver,
        log_size: int = 512,
    ) -> None:
        self.config = config
        self.slots = slots
        self.remote = remote
        self.counters = Counters()
        self.journal = DecodeJournal(size=log_size)
        self._engine = engine
        self._changed = changed
        self._observer = observer
        self._ended: deque[_Ended] = deque(maxlen=log_size)
        self._streams: dict[tuple[Link, int], _Stream] = {}
        self._choices: dict[str, _Choice] = {}
        self._num_choices = 0
        self._serial = itertools.count(1)
        self._pulling = 0
        self._broken: EngineError | None = None

    @property
    def log(self) -> list[dict[str, Any]]:
        """Ended submits, newest last: id, decision and every event with its time."""
        return [
            {
                "request_id": ended.request_id,
                "decision": ended.decision,
                "reason": ended.reason,
                "events": [{"t": at, **event_to_json(event)} for at, event in ended.events],
            }
            for ended in self._ended
        ]

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def num_choices(self) -> int:
        """Slots taken: all choices of every live submit."""
        return self._num_choices

    def grants(self) -> tuple[tuple[int, int, int], ...]:
        """`(epoch, grant id, n)` of live submits that carried a grant."""
        return tuple(
            (s.submit.grant.epoch, s.submit.grant.grant_id, s.submit.n)
            for s in self._streams.values()
            if s.submit.grant is not None
        )

    @property
    def num_ungranted(self) -> int:
        return sum(s.submit.n for s in self._streams.values() if s.submit.grant is None)

    def alive(self) -> tuple[tuple[int, int | None, int, int], ...]:
        """As `Report.alive`: by `(priority, level)`, choices and KV tokens of their prompts."""
        found: dict[tuple[int, int | None], list[int]] = {}
        for stream in self._streams.values():
            request, kept = stream.submit.request, stream.num_kept
            tokens = request.num_tokens  # shared by its choices
            for level, n in ((None, kept), (stream.outranked_below, stream.submit.n - kept)):
                if n:
                    counts = found.setdefault((request.priority, level), [0, 0])
                    counts[0] += n
                    counts[1] += tokens
                    tokens = 0
        return tuple((*key, n, tokens) for key, (n, tokens) in found.items())

    @property
    def prefilling_tokens(self) -> tuple[tuple[int, int], ...]:
        """As `Report.prefilling_tokens`: prompts of streams without a token yet, by priority."""
        found: Counter[int] = Counter()
        for stream in self._streams.values():
            if not stream.record.first_sent_s:
                found[stream.submit.request.priority] += stream.submit.request.num_tokens
        return tuple(found.items())

    def _room_for(self, submit: Submit) -> bool:
        """A free slot for each choice, or one of work that makes way for it in the engine."""
        over = self._num_choices + submit.n - self.slots
        if over <= 0:
            return True
        priority = submit.request.priority
        return over <= sum(s.makes_way_for(priority) for s in self._streams.values())

    def streams_of(self, link: Link) -> int:
        return sum(1 for owner, _ in self._streams if owner is link)

    def on_message(self, link: Link, message: list[Any]) -> None:
        match message[0]:
            case Kind.SUBMIT:
                self._submit(link, message)
            case Kind.CANCEL:
                self._event((link, message[1]), Cancelled("gateway"))
            case Kind.CREDIT:
                self._credit((link, message[1]), message[2])
            case _:
                pass

    def on_close(self, link: Link, reason: CloseReason) -> None:
        """The gateway is gone: everything it asked for ends now."""
        for key in [key for key in self._streams if key[0] is link]:
            self._event(key, Cancelled(f"link: {reason}"))

    def on_step(self, step: StepOutput) -> None:
        """Turn one engine step into one frame a gateway."""
        for reservation in step.reservations:
            choice = self._choices.get(reservation.request_id)
            if choice is not None:
                choice.stream.blocks = reservation.blocks
                self._run(choice.stream, Reserved(reservation.num_cached_tokens))
        if step.aged:
            self._raise_levels(step.aged)
        now = time.monotonic()
        self._note(step, now)
        find = self._choices.get
        gaps: dict[float, int] = {}
        frames: dict[Link, list[list[Any]]] = {}
        link: Link | None = None
        events: list[list[Any]] = []
        for output in step.outputs:
            choice = find(output.request_id)
            if choice is None:
                continue
            token = output.token
            if choice.room and token is not None and output.finish is None:
                # All but the first and the last token: this loop is most of what a token costs.
                # The wire form is that of `StreamEvent`.
                event = [choice.stream_id, choice.index, output.text, (token.token_id,)]
                last = choice.last_at
                choice.last_at = now
                came = choice.came  # not `choice.came(now)`: what is no method is slow to call so
                came(now)
                choice.room -= 1
                gaps[last] = gaps.get(last, 0) + 1
            else:
                try:
                    event = self._take(choice, output, now, gaps)
                except Exception:
                    # One stream's fault must not cost the others of this step their tokens.
                    logger.exception("output of %s could not be taken", output.request_id)
                    self._run(choice.stream, Failed("an internal fault; send the request again"))
                    continue
                if event is None:
                    continue
            if choice.link is not link:
                link = choice.link
                events = frames.setdefault(link, [])
            events.append(event)
        if gaps:
            self._observer.gaps([(now - last, times) for last, times in gaps.items()])
        for link, events in frames.items():
            self._send_step(link, events)

    def _raise_levels(self, aged: Sequence[tuple[str, int]]) -> None:
        for engine_id, level in aged:
            choice = self._choices.get(engine_id)
            if choice is not None:
                choice.stream.level = min(choice.stream.level, level)
        self._changed()

    def _note(self, step: StepOutput, now: float) -> None:
        """What this step was, for whoever explains the requests in it."""
        prompts, rows = step.prompts, len(step.outputs)
        prompt_tokens = 0
        if prompts:
            choices = self._choices
            for request_id, tokens in prompts:
                prompt_tokens += tokens
                choice = choices.get(request_id)
                if choice is not None and choice.index == 0:
                    others = step.num_tokens - tokens
                    choice.stream.record.chunks.add(now, step.duration_s, tokens, others)
        for request_id in step.preempted:
            choice = self._choices.get(request_id)
            if choice is not None:
                choice.stream.record.preempted.append(now)
        if step.num_tokens:
            count = len(prompts)
            journal, seconds = self.journal, step.duration_s
            journal.steps.add(
                now, seconds, step.num_tokens, rows, count, prompt_tokens, len(step.preempted)
            )
            journal.costs.observe(seconds, step.num_tokens, rows, count, prompt_tokens)

    def fail_all(self, error: EngineError) -> None:
        """The engine is broken: refuse everything now and from now on."""
        # `full` and a lost link: gateways take both elsewhere, and go on where the client was.
        self._broken = Overloaded(str(error), code="full", retry_after_s=1.0)
        for link in {link for link, _ in self._streams}:
            link.close(str(error))
        self._changed()

    def _submit(self, link: Link, message: list[Any]) -> None:
        stream_id = int(message[1])
        try:
            submit = Submit.from_wire(message)
            self._admit(link, submit)
        except EngineError as error:
            code = getattr(error, "code", "internal_error")
            self.counters.refused[code] = self.counters.refused.get(code, 0) + 1
            link.send(refusal_to_wire(stream_id, error))
            self._changed()

    def _admit(self, link: Link, submit: Submit) -> None:
        if self._broken is not None:
            raise self._broken
        if submit.n < 1 or submit.n > self.slots:
            raise RequestError(
                f"n={submit.n}: this model runs at most {self.slots} choices at once", param="n"
            )
        if not self._room_for(submit):
            raise Overloaded(
                f"{self._num_choices} of {self.slots} slots are taken, {submit.n} more were asked "
                "for: try again",
                code="full",
                retry_after_s=0.1,
            )
        now = time.monotonic()
        key = (link, submit.stream_id)
        if key in self._streams:
            raise RequestError(f"stream {submit.stream_id} is already open", param=None)
        deadline = None if submit.remaining_ms is None else now + submit.remaining_ms / 1000
        stream = _Stream(
            link,
            submit.stream_id,
            submit,
            Lifecycle(self.config),
            deadline,
            now,
            f"{link.peer_id}:{submit.stream_id}:{next(self._serial)}",
            DecodeRecord(submit.request.request_id, submit.stream_id, submit.request.salt, now),
            submit.request.priority,
            window_tokens=submit.window_tokens,
        )
        self._streams[key] = stream
        self.journal.begin(link.peer_id, stream.record, lambda: _told(stream))
        self._num_choices += submit.n
        self.counters.submits += 1
        if deadline is not None:
            loop = asyncio.get_running_loop()
            stream.timer = loop.call_later(deadline - now, self._expired, key)
        request = submit.request
        prefill, cached = None, 0
        if self.remote is not None:
            prefill = self.remote.choose(request.num_tokens, None)
            if prefill is not None:
                cached = self._engine.cached_tokens(request)
        try:
            self._run(
                stream,
                Submitted(request.num_tokens, cached, submit.n, prefill, self.remote is not None),
            )
        except EngineError:
            self._forget(stream)
            raise
        self._changed()

    def _expired(self, key: tuple[Link, int]) -> None:
        stream = self._streams.get(key)
        if stream is None:
            return
        link, stream_id = key
        error = Overloaded(
            f"the deadline of {stream.submit.remaining_ms} ms passed", code="deadline_exceeded"
        )
        self._event(key, Cancelled("deadline"))
        link.send(refusal_to_wire(stream_id, error))

    def _event(self, key: tuple[Link, int], event: Event) -> None:
        stream = self._streams.get(key)
        if stream is not None:
            if isinstance(event, Cancelled):
                self.counters.cancelled += 1
            self._run(stream, event)

    def _run(self, stream: _Stream, event: Event) -> None:
        """Feed the machine, carry out what it says."""
        stream.log.append((time.monotonic(), event))
        for action in stream.machine.on(event):
            self._act(stream, action)

    def _act(self, stream: _Stream, action: Action) -> None:
        match action:
            case Start(choice, remote):
                if stream.machine.state is not State.ENDED:  # a sibling before this was refused
                    self._start(stream, choice, remote)
            case Pull(prefill, first_token):
                if stream.pull is not None:
                    self._count_fallback("other_replica")
                stream.first_token = first_token
                stream.pull = asyncio.get_running_loop().create_task(
                    self._pull(stream, prefill, first_token)
                )
                self._changed()  # nothing preempts it from now on
            case ComputeHere():
                assert self.remote is not None
                if stream.machine.decision == "fallback":
                    self._count_fallback("local")
                self.remote.failed(stream.choices[0].engine_id)
            case StopPull():
                if stream.pull is not None:
                    stream.pull.cancel()
            case Stop(choice):
                self._stop(stream, choice)
            case Refuse(message, stage):
                if stage != "engine":
                    self._count_fallback("refused")
                error = TransferError(message, stage=stage)
                if stage == "engine":
                    stream.link.send(refusal_to_wire(stream.stream_id, EngineError(message)))
                else:
                    stream.link.send(refusal_to_wire(stream.stream_id, error))
            case End():
                self._forget(stream)
                self._changed()

    def _count_fallback(self, action: str) -> None:
        fallbacks = self.counters.fallbacks
        fallbacks[action] = fallbacks.get(action, 0) + 1

    def _start(self, stream: _Stream, index: int, remote: bool) -> None:
        request = self._request_of(stream, index)
        engine_id = request.request_id
        came = stream.record.times(index).append
        choice = _Choice(stream, stream.link, stream.stream_id, index, engine_id, came)
        stream.choices[index] = self._choices[engine_id] = choice
        try:
            reservation = self._engine.submit(request, remote=remote)
        except EngineError as error:
            del self._choices[engine_id]
            del stream.choices[index]
            if index == 0:
                raise
            # Choice 0 was accepted, so this is a full waiting list, not a request at fault.
            self._run(stream, Failed(str(error)))
            return
        if reservation is not None:
            stream.blocks = reservation.blocks
            self._run(stream, Reserved(reservation.num_cached_tokens))

    @staticmethod
    def _request_of(stream: _Stream, index: int) -> Request:
        """What the engine gets for one choice."""
        request = stream.submit.request
        return Request(
            request_id=f"{stream.key}/{index}",
            prompt_ids=request.prompt_ids,
            params=request.params.for_choice(index),
            output_ids=request.output_ids,
            priority=request.priority,
            salt=request.salt,
            itl_target_ms=request.itl_target_ms,
            first_token_ms=request.first_token_ms,
            preemptible=index >= stream.num_kept,
        )

    async def _pull(self, stream: _Stream, prefill: str, first_token: int) -> None:
        remote = self.remote
        assert remote is not None
        request = self._request_of(stream, 0)
        record = PullRecord(prefill, time.monotonic())
        stream.record.pulls.append(record)
        self._pulling += 1
        record.alone = self._pulling == 1
        named = {"request_id": stream.record.request_id}
        try:
            prefilled = await remote.pull(prefill, request, stream.blocks, first_token, record)
        except TransferError as error:
            record.error = error.stage
            failures = self.counters.pull_failures
            failures[error.stage] = failures.get(error.stage, 0) + 1
            logger.warning("pull of %s from %s failed: %s", stream.key, prefill, error, extra=named)
            stream.blocks = remote.blocks(request.request_id)
            other = remote.choose(request.num_tokens, prefill) if stream.blocks else None
            self._run(stream, PullFailed(error.stage, str(error), other))
            return
        except Exception as error:
            # A fault of ours must not leave the stream waiting for ever: compute here instead.
            record.error = "internal"
            logger.exception("pull of %s from %s broke", stream.key, prefill, extra=named)
            self._run(stream, PullFailed("internal", repr(error), None))
            return
        except asyncio.CancelledError:
            record.error = "cancelled"
            raise
        finally:
            self._pulling -= 1
            record.ended_s = time.monotonic()
            self._changed()
        record.num_bytes = prefilled.num_bytes
        if record.alone:
            self.journal.transfers.append(prefilled.exposed_s)
        self._observer.pulled(prefilled, record.ended_s - record.began_s)
        output = remote.arrived(request, prefilled)
        if output is None:
            return
        choice = self._choices.get(output.request_id)
        if choice is not None:
            event = self._take_token(choice, output, time.monotonic(), prefilled)
            self._send_step(stream.link, [event])

    def _take(
        self, choice: _Choice, output: Output, now: float, gaps: dict[float, int]
    ) -> list[Any] | None:
        """Any output of a step. Returns the wire form of its event, None when there is none."""
        if output.token is None:
            failed = Failed("the model gave no usable logits for this request")
            self._run(choice.stream, failed)
            return None
        if choice.num_tokens:
            gaps[choice.last_at] = gaps.get(choice.last_at, 0) + 1
        return self._take_token(choice, output, now)

    def _take_token(
        self, choice: _Choice, output: Output, now: float, prefilled: Prefilled | None = None
    ) -> list[Any]:
        stream, token, finish = choice.stream, output.token, output.finish
        assert token is not None
        submit = stream.submit
        logprobs = submit.request.params.logprobs is not None
        is_first = choice.num_tokens == 0
        self._settle(stream)
        choice.unlogged += 1
        choice.last_at = now
        choice.came(now)
        if is_first:
            stream.record.first_sent_s = stream.record.first_sent_s or now
            choice.first_at = now
            choice.plain = not logprobs
            if choice.index == 0:
                self._observer.first_token(now - stream.begun)
                if submit.request.num_tokens >= LONG_PROMPT_TOKENS:
                    self._changed()  # the queue holds others back for prompts under way
        event: Event | None = None
        if prefilled is not None:
            event = KVArrived(prefilled.num_cached_tokens, finish)
        elif is_first or finish is not None:
            # The machine hears of the first token and of the end; what lies between is a count.
            event = Stepped(choice.index, choice.unlogged, finish, output.num_cached_tokens)
        if event is not None:
            choice.num_tokens += choice.unlogged
            choice.unlogged = 0
        if finish is not None:
            del stream.choices[choice.index]
            del self._choices[choice.engine_id]
            self._observer.ended(
                finish, now - stream.begun, now - choice.first_at, choice.num_tokens
            )
        if event is not None:
            self._run(stream, event)
        stream.ahead += 1
        if stream.ahead >= stream.window_tokens:
            self._pause(stream)
        self._make_room(stream)
        return StreamEvent(
            stream.stream_id,
            choice.index,
            output.text,
            (token.token_id,),
            [self._logprob(token)] if logprobs else None,
            finish,
            self._usage(stream) if finish is not None and not stream.choices else None,
        ).to_wire()

    @staticmethod
    def _settle(stream: _Stream) -> None:
        """Count what the choices took of their room."""
        for choice in stream.choices.values():
            taken = choice.given - choice.room
            choice.given = choice.room = 0
            choice.unlogged += taken
            stream.ahead += taken

    @staticmethod
    def _make_room(stream: _Stream) -> None:
        """Let each choice go on for as long as none of them can fill the reader's window."""
        left = stream.window_tokens - stream.ahead - 1
        if left > 0 and stream.choices:
            share = left // len(stream.choices)
            for choice in stream.choices.values():
                if choice.plain:
                    choice.given = choice.room = share

    def _send_step(self, link: Link, events: list[list[Any]]) -> None:
        self.counters.frames += 1
        self.counters.tokens_out += len(events)
        link.send([Kind.STEP, events], last=True)

    @staticmethod
    def _usage(stream: _Stream) -> Usage:
        machine, request = stream.machine, stream.submit.request
        return Usage(
            prompt_tokens=len(request.prompt_ids),
            completion_tokens=machine.num_output_tokens + len(request.output_ids),
            cached_tokens=min(machine.num_cached_tokens, len(request.prompt_ids)),
        )

    def _logprob(self, token: SampledToken) -> TokenLogprob:
        tokenizer = self._engine.tokenizer
        assert token.logprob is not None
        return TokenLogprob(
            token.token_id,
            tokenizer.token_bytes(token.token_id),
            token.logprob,
            tuple((t, tokenizer.token_bytes(t), p) for t, p in token.top),
        )

    def _pause(self, stream: _Stream) -> None:
        if not stream.paused:
            stream.paused = True
            stream.record.pauses.append(time.monotonic())
            for choice in stream.choices.values():
                self._engine.pause(choice.engine_id)

    def _credit(self, key: tuple[Link, int], tokens: int) -> None:
        stream = self._streams.get(key)
        if stream is None:
            return
        self._settle(stream)
        stream.ahead -= tokens
        self._make_room(stream)
        if stream.paused and stream.ahead <= stream.window_tokens // 2:
            stream.paused = False
            stream.record.pauses.append(time.monotonic())
            for choice in stream.choices.values():
                self._engine.resume(choice.engine_id)

    def _stop(self, stream: _Stream, index: int) -> None:
        choice = stream.choices.pop(index, None)
        if choice is None:
            return
        engine_id = choice.engine_id
        self._choices.pop(engine_id, None)
        if index == 0 and stream.pull is not None and not stream.pull.done():
            # The pull's own clean-up takes its hands off the blocks; only then may they be freed.
            stream.pull.add_done_callback(lambda _: self._engine.cancel(engine_id))
        else:
            self._engine.cancel(engine_id)

    def _forget(self, stream: _Stream) -> None:
        key = (stream.link, stream.stream_id)
        if self._streams.pop(key, None) is None:
            return
        self._num_choices -= stream.submit.n
        if stream.timer is not None:
            stream.timer.cancel()
        for choice in stream.choices.values():
            self._choices.pop(choice.engine_id, None)
        machine = stream.machine
        decision = (machine.decision, machine.reason)
        self.counters.decisions[decision] = self.counters.decisions.get(decision, 0) + 1
        sources, prompt = self.counters.prompt_tokens, stream.submit.request.num_tokens
        cached = min(machine.num_cached_tokens, prompt)
        how = "external_kv_transfer" if machine.decision == "disaggregated" else "local_compute"
        sources[how] = sources.get(how, 0) + prompt - cached
        sources["local_cache_hit"] = sources.get("local_cache_hit", 0) + cached
        self.journal.settle(stream.link.peer_id, stream.record, time.monotonic(), _outcome(stream))
        self._ended.append(
            _Ended(stream.submit.request.request_id, machine.decision, machine.reason, stream.log)
        )


def _told(stream: _Stream) -> dict[str, Any]:
    """What its journal does not hold itself: fields of `DecodeFacts`."""
    machine = stream.machine
    elsewhere = machine.decision == "disaggregated"
    return {
        "prompt_tokens": len(stream.submit.request.prompt_ids),
        "output_tokens": machine.num_output_tokens,
        "local_tokens": stream.first_token if elsewhere else machine.num_cached_tokens,
        "decision": machine.decision,
        "reason": machine.reason,
    }


def _outcome(stream: _Stream) -> str:
    last = stream.log[-1][1] if stream.log else None
    if isinstance(last, Cancelled):
        return "cancelled"
    return "finished" if isinstance(last, Stepped | KVArrived) else "failed"
