"""The life of a generation at the gateway, whole or streamed.

read → validate → tokenise → open → collect or stream → close, and close whatever happens.

The task that the server called does the work. What may end it early (the client leaves, its
patience or the gateway's limit runs out) notes why and cancels that task; the `finally` blocks of
the work cancel the streams in every process.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from enum import Enum
from typing import Any, Protocol, cast

import orjson
from starlette.types import Message, Receive, Scope, Send

from deployments.explain.request import NOBODY, Note, RequestRecord
from deployments.gateway.backend import Backend, Place, Stream
from deployments.gateway.config import GatewayConfig
from deployments.gateway.degradation import Action, Waits
from deployments.gateway.edge import ClientGone, call_of, read_body, send_failure
from deployments.gateway.errors import Failure, TimedOut, describe
from deployments.gateway.events import (
    Admitted,
    Disconnected,
    Failed,
    Finished,
    FirstToken,
    Received,
    Submitted,
    Tokenised,
)
from deployments.gateway.identity.keyring import Identity
from deployments.gateway.limits.quotas import Headers, LimitExceeded, Quota
from deployments.gateway.measure import (
    UNKNOWN,
    Pace,
    mean_gap_s,
    report_end,
    report_finish,
    report_verdict,
)
from deployments.gateway.openai import Collector, Tally
from deployments.gateway.prepare import Plan, limits_of
from deployments.gateway.request_log import Noted, unix_s
from deployments.gateway.slo import Timing
from deployments.gateway.spans import count as count_spans
from deployments.gateway.spans import told_by
from deployments.gateway.sse import EventWriter
from deployments.gateway.state import GatewayState
from deployments.link.messages import StreamEvent
from deployments.tracing import traceparent
from engine.errors import Overloaded, RequestError


class Prepare(Protocol):
    """Makes the plan of a body. `model` answers instead of the one that the body names."""

    def __call__(
        self,
        backend: Backend,
        config: GatewayConfig,
        identity: Identity,
        body: bytes,
        model: str | None = None,
    ) -> Awaitable[Plan]: ...


Events = AsyncGenerator[tuple[int, list[StreamEvent]], None]
"""`(prompt, its events)`."""

Take = Callable[[int, list[StreamEvent]], Awaitable[None]]
"""Does with `(prompt, its events)` what the client asked for."""

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

LAST_WORD_S = 2.0
"""For the error that ends an answer: a client that reads nothing is cut off."""

HEADROOM = 0.05
"""Part of a client's own timeout kept back (100 ms at most), so that our answer comes before it
hangs up, and before Serve, which reads the same header, answers in its stead."""


class Cut(Enum):
    """Why the work was ended early."""

    DISCONNECT = "disconnect"
    TIMEOUT = "timeout"


class Generation:
    """Answers one request to `/v1/chat/completions` or `/v1/completions`. An ASGI application."""

    def __init__(self, state: GatewayState, endpoint: str, prepare: Prepare) -> None:
        self.started = False
        """The head of the answer is out."""

        self._state = state
        self._config = state.config
        self._endpoint = endpoint
        self._prepare = prepare
        self._series = state.meter.of(UNKNOWN)
        self._plan: Plan | None = None
        self._tally: Tally | None = None
        self._marks: list[tuple[str, float]] = []
        """When each phase began."""

        self._cut: Cut | None = None
        self._expired = ""
        """The limit that ran out, in words."""

        self._patient_until: tuple[float, str] | None = None
        """When the client gives up on the whole answer, and that in words."""

        self._ungranted = 0
        """Prompts that wait for their grants."""

        self._working = False
        self._complete = False
        """The last of the answer is going out: the client may leave."""

        self._explain = False
        """The client wants to be told with its answer."""

        self._body: bytes | None = None
        """What the client sent, where prompts are logged."""

        self._waits: Waits | None = None
        """Where the wait for a grant is noted, if its tier has a ladder."""

        self._shed: Overloaded | None = None
        """For which it is refused, once it is counted as offered."""

        self._told_degraded: tuple[tuple[bytes, bytes], ...] = ()
        self._identity: Identity | None = None
        self._quota: Quota | None = None
        """What it holds of its owners' limits."""

        self._admitted_tokens = 0
        """Of the prompts that a replica has taken."""

        self._first_token_s: float | None = None
        self._whole_timer: asyncio.TimerHandle | None = None
        self._first_timer: asyncio.TimerHandle | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._call = call_of(scope)
        self._send = send
        record = self._record = RequestRecord(
            call.request_id, self._endpoint, call.received_s, time.time(), salt=NOBODY
        )
        self._state.explainer.begin(record)
        if self._state.tracer is not None:
            record.trace = self._state.tracer.begin(call.headers)
        self._marks.append(("tokenize", call.received_s))
        self._state.log.append(
            Received(
                request_id=call.request_id,
                at_s=call.received_s,
                endpoint=self._endpoint,
            )
        )
        total_s, self._first_s = _patience(call.headers)
        if total_s is not None:
            self._patient_until = call.received_s + total_s, f"{total_s:g} s"
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._be_whole_in(self._config.limits.request_timeout_s, call.received_s)
        self._model = UNKNOWN
        self._inflight(+1)
        try:
            await self._supervise(scope, receive)
        finally:
            for timer in (self._whole_timer, self._first_timer):
                if timer is not None:
                    timer.cancel()
            if self._watch is not None:
                self._watch.cancel()
            self._inflight(-1)
            if self._quota is not None:
                self._quota.close(self._unused_tokens())

    async def _supervise(self, scope: Scope, receive: Receive) -> None:
        """Do the work, then say how it ended: to the client, the log and the metrics."""
        self._working = True
        try:
            try:
                await self._run(scope, receive)
            finally:
                self._working = False
        except asyncio.CancelledError:
            if self._cut is None or not _uncancelled(self._task):
                # The server stops, or it saw the client leave before we did.
                self._record_disconnect()
                raise
            if self._cut is Cut.TIMEOUT:
                await self._fail(self._timed_out())
            else:
                self._record_disconnect()
        except ClientGone:
            self._record_disconnect()
        except Exception as error:
            await self._fail(error)
        else:
            self._record_finish()

    async def _run(self, scope: Scope, receive: Receive) -> None:
        state, call = self._state, self._call
        identity = self._identity = state.identify(call.headers)
        self._record.salt = identity.salt
        limits = limits_of(self._config, identity)
        body = await read_body(call, receive, limits.max_body_bytes)
        record = self._record
        record.read_s = time.monotonic()
        if self._config.logs.log_prompts:
            self._body = body
        self._watch = self._loop.create_task(self._watch_client(receive))
        plan = await self._prepare(state.backend, self._config, identity, body)
        if self._config.tiers[plan.tier].ladder:
            plan = await self._degrade(plan, identity, body)
        record.spans, self._explain = told_by(call.headers, plan.extension, record.received_unix_s)
        self._plan, self._tally = plan, Tally(plan)
        now_s = time.monotonic()
        self._marks.append(("queue", now_s))
        model = plan.info.name
        state.log.append(
            Tokenised(
                request_id=call.request_id,
                at_s=now_s,
                answer_id=plan.answer_id,
                model=model,
                stream=plan.stream,
                prompts=len(plan.requests),
                prompt_tokens=plan.prompt_tokens,
                max_tokens=plan.requests[0].params.max_tokens,
                n=plan.n,
            )
        )
        first = plan.requests[0]
        record.answer_id, record.model, record.stream = plan.answer_id, model, plan.stream
        record.tokenised_s, record.tier = now_s, plan.tier
        record.prompt_tokens, record.num_choices = plan.prompt_tokens, plan.num_choices
        record.max_tokens = first.params.max_tokens
        if record.spans and self._config.metrics:
            count_spans(state.metrics, model, plan.tier, record.spans)
        self._inflight(-1)
        self._series, self._model = state.meter.of(model, plan.tier), model
        self._series.offered.inc()
        self._inflight(+1)
        if self._shed is not None:
            raise self._shed
        targets = self._config.tiers[plan.tier]
        self._be_patient(plan.stream)
        # The longest wait is the queue's to end; from the grant on the answer has its own limit.
        longest_s = targets.max_wait_s + limits.request_timeout_s
        self._be_whole_in(longest_s, call.received_s)
        self._ungranted = len(plan.requests)
        claims = identity.claims(tokens=plan.max_tokens, retry=_is_retry(call.headers))
        if claims:
            lease = f"{state.explainer.gateway}:{plan.answer_id}"
            self._quota = await state.quotas.take(lease, claims)
        self._place = Place(
            tier=plan.tier,
            tenant=identity.tenant,
            weight=identity.weight,
            due_s=None if targets.ttft_s is None else call.received_s + targets.ttft_s,
            may_wait=targets.ttft_s is None,
            patient_until_s=None if self._first_s is None else call.received_s + self._first_s,
            answer_s=limits.request_timeout_s,
            whole_until_s=None if self._patient_until is None else self._patient_until[0],
            wait_until_s=call.received_s + targets.max_wait_s,
        )
        self._pace = Pace(self._series.itl if self._config.metrics else None)
        if plan.stream:
            self._writer = EventWriter(plan, self._tally)
            await self._follow(plan, self._stream)
            if not self._complete:
                self._tally.close()  # says what is missing
        else:
            self._collector = Collector(plan)
            await self._follow(plan, self._collect)
            await self._answer(self._tally)

    async def _degrade(self, plan: Plan, identity: Identity, body: bytes) -> Plan:
        """Give up what the tier's ladder says at the pressure of now; `_shed` to give up all."""
        state, name, tier = self._state, plan.tier, self._config.tiers[plan.tier]
        model, now_s = plan.info.name, time.monotonic()
        self._waits, ladder = state.pressures.of(model, name)
        wait_s = self._waits.seconds(now_s)
        pressure = wait_s / (tier.queue_s or math.inf)
        steps = ladder.steps(tier.ladder, pressure, now_s)
        if not steps:
            return plan

        done: list[str] = []

        def did(action: Action) -> None:
            state.pressures.count(model, name, action)
            detail = {"action": action, "pressure": round(pressure, 2)}
            self._record.notes.append(Note(time.monotonic(), "degraded", detail))
            done.append(action)
            self._told_degraded = ((b"x-tailrace-degraded", ", ".join(done).encode()),)

        for step in steps:
            optional = plan.extension is not None and plan.extension.optional
            if step.action == "shed" or (step.action == "drop_extras" and optional):
                did(step.action)
                self._shed = _refused(wait_s, optional=step.action != "shed")
                return plan
        # The model first: its plan is a new one, and the other steps change that.
        for step in sorted(steps, key=lambda step: step.action != "model"):
            before = plan
            if step.model is not None:
                # Where it does not fit, or nobody serves it, this is as good as it gets.
                with contextlib.suppress(RequestError, Overloaded):
                    smaller = self._config.canonical(step.model)
                    if smaller != plan.info.name:
                        plan = await self._prepare(
                            state.backend, self._config, identity, body, smaller
                        )
            elif step.max_tokens is not None:
                if max(r.params.max_tokens for r in plan.requests) > step.max_tokens:
                    plan = plan.shortened(step.max_tokens)
            elif step.tier is not None:
                plan = plan.at_tier(step.tier, self._config.tiers[step.tier])
            elif plan.n > 1 or plan.logprobs:
                plan = plan.without_extras()
            if plan is not before:
                did(step.action)
        # Who was sent elsewhere waits there: its wait is no pressure on the tier that it left.
        self._waits, _ = state.pressures.of(plan.info.name, plan.tier)
        return plan

    async def _follow(self, plan: Plan, take: Take) -> None:
        """Hand on the events of all prompts as they come; close every stream."""
        if len(plan.requests) > 1:
            async with aclosing(self._merged(plan)) as merged:
                async for prompt, events in merged:
                    await take(prompt, events)
            return
        stream = await self._open(plan, 0)
        try:
            async for events in stream:
                await take(0, events)
        finally:
            await stream.aclose()

    async def _merged(self, plan: Plan) -> Events:
        sources = [self._one(plan, prompt) for prompt in range(len(plan.requests))]
        looking = {asyncio.create_task(_next(source)): source for source in sources}
        try:
            while looking:
                done, _ = await asyncio.wait(looking, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    source = looking.pop(task)
                    item = task.result()
                    if item is not None:
                        yield item
                        # Only now: what the client has not taken keeps its own stream waiting.
                        looking[asyncio.create_task(_next(source))] = source
        finally:
            for task in looking:
                task.cancel()
            await asyncio.gather(*looking, return_exceptions=True)
            for source in sources:
                await source.aclose()

    async def _one(self, plan: Plan, prompt: int) -> Events:
        """Opens inside, so that a prompt waiting for its turn does not hold up those admitted."""
        stream = await self._open(plan, prompt)
        try:
            async for events in stream:
                yield prompt, events
        finally:
            await stream.aclose()

    async def _open(self, plan: Plan, prompt: int) -> Stream:
        began_s, waits = time.monotonic(), self._waits
        ticket = None if waits is None else waits.began(began_s)
        try:
            stream = await self._state.backend.open(
                plan.info.name,
                plan.requests[prompt],
                n=plan.n,
                remaining_s=max(0.0, self._deadline_s - began_s),
                journal=self._record.prompt(prompt),
                place=self._place,
            )
        finally:
            if waits is not None and ticket is not None:
                waits.ended(ticket, time.monotonic())
        if self._cut is not None:
            # Before Python 3.12 `asyncio.wait_for`, on the way there, may swallow a cancellation.
            await stream.aclose()
            raise asyncio.CancelledError
        self._admitted_tokens += plan.requests[prompt].num_tokens
        self._ungranted -= 1
        if not self._ungranted:
            granted_s = cast("float | None", getattr(stream, "admitted_s", None))
            limit_s = self._config.limits.request_timeout_s
            since_s = time.monotonic() if granted_s is None else granted_s
            self._be_whole_in(limit_s, since_s, " from its grant on")
        if self._marks[-1][0] == "queue":
            self._mark_submitted(stream)
        return stream

    async def _collect(self, prompt: int, events: list[StreamEvent]) -> None:
        now_s = time.monotonic()
        self._tally_of().count(prompt, events)
        self._collector.add(prompt, events)
        self._pace.count(prompt, events, now_s)
        if self._first_token_s is None:
            self._mark_first_token(now_s, streaming=False)

    async def _answer(self, tally: Tally) -> None:
        tally.close()
        body = self._collector.body(tally)
        if self._explain:
            explanation = orjson.dumps(await self._explanation(tally))
            body = body[:-1] + b',"explain":' + explanation + b"}"
        self.started = self._complete = True
        headers = (
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            *self._told_headers(),
        )
        before_s = time.monotonic()
        await self._to_client(self._call.head(200, headers))
        await self._to_client({"type": "http.response.body", "body": body, "more_body": False})
        self._record.wrote(time.monotonic() - before_s)

    async def _stream(self, prompt: int, events: list[StreamEvent]) -> None:
        tally, writer = self._tally_of(), self._writer
        tally.count(prompt, events)
        body = writer.write(prompt, events)
        if tally.complete:
            # The end goes out together with what came before it: one write instead of two.
            tally.close()
            if self._explain:
                body += writer.explained(await self._explanation(tally))
            body += writer.close()
            self._complete = True
        elif not body:
            self._pace.hold(prompt, events)
            return
        if not self.started:
            # Not before there is something to send: until then an error still has its status.
            self.started = True
            head = self._call.head(200, (*_STREAM_HEADERS, *self._told_headers()))
            await self._to_client(head)
        before_s = time.monotonic()
        await self._to_client(
            {"type": "http.response.body", "body": body, "more_body": not self._complete}
        )
        now_s = time.monotonic()
        self._record.wrote(now_s - before_s)
        self._pace.count(prompt, events, now_s)
        if self._first_token_s is None:
            self._mark_first_token(now_s, streaming=True)

    async def _to_client(self, message: Message) -> None:
        """Some servers raise OSError when the client has left, others say so to `receive` only."""
        try:
            await self._send(message)
        except OSError as error:
            raise ClientGone from error

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._end(Cut.DISCONNECT)

    def _be_patient(self, stream: bool) -> None:
        """As the client is: its read timeout is for the first byte, which of an answer in one piece
        is the last one, too."""
        if self._first_s is None:
            return
        until = self._call.received_s + self._first_s, f"{self._first_s:g} s"
        if stream:
            self._first_timer = self._expire_at(*until)
        elif self._patient_until is None or until < self._patient_until:
            self._patient_until = until

    def _be_whole_in(self, seconds: float, since_s: float, words: str = "") -> None:
        """When the answer must be whole by a limit of ours, or when the client gives up before."""
        until = since_s + seconds, f"{seconds:g} s{words}"
        if self._patient_until is not None:
            until = min(until, self._patient_until)
        self._deadline_s = until[0]
        if self._whole_timer is not None:
            self._whole_timer.cancel()
        self._whole_timer = self._expire_at(*until)

    def _expire_at(self, at_s: float, limit: str) -> asyncio.TimerHandle:
        return self._loop.call_later(max(0.0, at_s - time.monotonic()), self._expire, limit)

    def _expire(self, limit: str) -> None:
        self._expired = limit
        self._end(Cut.TIMEOUT)

    def _end(self, why: Cut) -> None:
        """From a callback or another task, so that the work is between two steps of its own."""
        if self._working and not self._complete and self._cut is None:
            self._cut = why
            self._task.cancel()

    def _timed_out(self) -> TimedOut:
        tokens = self._tally.completion_tokens if self._tally is not None else 0
        return TimedOut(
            f"no whole answer after {self._expired} (in phase {self._phase}, {tokens} "
            "tokens so far): allow more time, ask for fewer tokens, or stream",
            answering=tokens > 0,
        )

    async def _fail(self, error: BaseException) -> None:
        failure = describe(error, self._call.request_id)
        self._record_failure(failure)
        told = await self._standing(error)
        failure = replace(failure, headers=(*failure.headers, *told, *self._told_degraded))
        if self._complete:
            return
        self._complete = True
        if self.started:
            # Then the end of the body and no [DONE], which would call the answer whole.
            last = {"type": "http.response.body", "body": failure.sse_event(), "more_body": False}
            sending = self._send(last)
        else:
            self.started = True
            sending = send_failure(failure, self._call, self._send)
        # A client that reads nothing does not read this either: the server then cuts it off.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(sending, LAST_WORD_S)

    async def _standing(self, error: BaseException) -> Headers:
        """Of the limits, to tell with a failure: also of one that took nothing of them."""
        if self._quota is not None:
            return self._quota.headers
        if self._identity is None or self.started or isinstance(error, LimitExceeded):
            return ()
        return await self._state.quotas.standing(self._identity.claims(tokens=0, retry=False))

    @property
    def _phase(self) -> str:
        return self._marks[-1][0]

    def _phases(self, now_s: float) -> list[tuple[str, float]]:
        """Seconds in each phase that was entered, up to now."""
        marks = self._marks
        ends = [at_s for _, at_s in marks[1:]]
        ends.append(now_s)
        return [(mark[0], end_s - mark[1]) for mark, end_s in zip(marks, ends, strict=True)]

    def _told_headers(self) -> list[tuple[bytes, bytes]]:
        """What an answer's head tells of how it went so far."""
        headers = [(b"server-timing", self._server_timing())]
        if self._quota is not None:
            headers += self._quota.headers
        headers += self._told_degraded
        if self._record.trace is not None:
            headers.append((b"traceparent", traceparent(self._record.trace)))
        return headers

    async def _explanation(self, tally: Tally) -> dict[str, Any]:
        """How the request went up to its last token: the writing of it is still to come."""
        record = self._record
        record.completion_tokens = tally.completion_tokens
        record.cached_tokens = tally.cached_tokens
        return (await self._state.explainer.waterfall(record)).to_json()

    def _server_timing(self) -> bytes:
        """Milliseconds in each phase so far, in the words of W3C Server Timing."""
        phases = self._phases(time.monotonic())
        return ", ".join([f"{name};dur={1000 * s:.1f}" for name, s in phases]).encode()

    def _inflight(self, change: int) -> None:
        inflight, model = self._state.inflight, self._model
        inflight[model] = count = inflight[model] + change
        self._series.inflight.set(count)

    def _unused_tokens(self) -> int:
        """Of what the request was allowed: output that never came."""
        plan, tally = self._plan, self._tally
        assert plan is not None
        assert tally is not None
        if self._marks[-1][0] == "queue":
            return plan.max_tokens  # never admitted: not even its prompt was computed
        return max(0, plan.max_tokens - plan.prompt_tokens - tally.completion_tokens)

    def _tally_of(self) -> Tally:
        assert self._tally is not None
        return self._tally

    def _mark_submitted(self, stream: Stream) -> None:
        now_s = time.monotonic()
        admitted_s = cast("float | None", getattr(stream, "admitted_s", None))
        replica = cast("str | None", getattr(stream, "replica", None))
        request_id, log = self._call.request_id, self._state.log
        at_s = now_s if admitted_s is None else min(admitted_s, now_s)
        log.append(Admitted(request_id=request_id, at_s=at_s, replica=replica))
        log.append(Submitted(request_id=request_id, at_s=now_s))
        self._series.queue("granted").observe(at_s - self._marks[-1][1])
        self._marks += (("route", at_s), ("prefill", now_s))

    def _mark_first_token(self, now_s: float, *, streaming: bool) -> None:
        self._first_token_s = self._record.first_token_s = now_s
        self._marks.append(("stream", now_s))
        self._state.log.append(FirstToken(request_id=self._call.request_id, at_s=now_s))
        if streaming and self._first_timer is not None:
            self._first_timer.cancel()
        self._series.ttft(streaming).observe(now_s - self._call.received_s)

    def _record_finish(self) -> None:
        tally, now_s = self._tally_of(), time.monotonic()
        usage = tally.usage
        self._state.log.append(
            Finished(
                request_id=self._call.request_id,
                at_s=now_s,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                reasons=tuple([r.value for r in tally.reasons if r is not None]),
            )
        )
        if self._config.metrics:
            report_finish(self._series, usage, self._timing(now_s).itl_s)
        self._record.outcome = "finished"
        self._record_end("200", now_s)

    def _record_failure(self, failure: Failure) -> None:
        now_s = time.monotonic()
        self._state.log.append(
            Failed(
                request_id=self._call.request_id,
                at_s=now_s,
                code=failure.code or "",
                status=failure.status,
                message=failure.message,
            )
        )
        self._record.outcome, self._record.code = "failed", failure.code or ""
        self._record_end(str(failure.status), now_s, failure.code)

    def _record_disconnect(self) -> None:
        now_s = time.monotonic()
        self._state.log.append(
            Disconnected(request_id=self._call.request_id, at_s=now_s, phase=self._phase)
        )
        self._series.disconnects(self._phase).inc()
        self._record.outcome = "disconnected"
        self._record_end("499", now_s)

    def _record_end(self, status: str, now_s: float, code: str | None = None) -> None:
        duration_s = now_s - self._call.received_s
        if self._config.metrics:
            self._report_end(status, now_s, code)
        if self._state.request_log is not None and self._plan is not None:
            self._state.request_log.note(self._noted(self._plan, int(status), code, duration_s))
        record, tally = self._record, self._tally
        record.ended_s, record.status = now_s, int(status)
        if tally is not None:
            record.completion_tokens = tally.completion_tokens
            record.cached_tokens = tally.cached_tokens
        self._state.ended(record, self._body)

    def _report_end(self, status: str, now_s: float, code: str | None) -> None:
        """To the metrics."""
        series, plan, tokens = self._series, self._plan, 0
        report_end(series, status, now_s - self._call.received_s, self._phases(now_s))
        if plan is None:
            series.offered.inc()  # whatever it was: others are counted once they are understood
        else:
            tally = self._tally_of()
            tokens = tally.completion_tokens
            series.tokens_in.inc(self._admitted_tokens)
            series.tokens_out.inc(tokens)
            for reason in tally.reasons:
                if reason is not None:
                    series.finishes(reason.value).inc()
            if self._phase == "queue":
                outcome = code or ("cancelled" if status == "499" else "failed")
                series.queue(outcome).observe(now_s - self._marks[-1][1])
        targets = None if plan is None else self._config.tiers[plan.tier]
        report_verdict(series, targets, int(status), self._timing(now_s), tokens)

    def _timing(self, now_s: float) -> Timing:
        """What was measured of this request so far."""
        received_s, marks, first_s = self._call.received_s, self._marks, self._first_token_s
        queue_s = None
        if len(marks) > 2:
            queue_s = marks[2][1] - marks[1][1]
        ttft_s = itl_s = None
        if first_s is not None:
            tally = self._tally_of()
            ttft_s = first_s - received_s
            itl_s = mean_gap_s(
                now_s - received_s, ttft_s, tally.completion_tokens, len(tally.reasons)
            )
        return Timing(duration_s=now_s - received_s, queue_s=queue_s, ttft_s=ttft_s, itl_s=itl_s)

    def _noted(self, plan: Plan, status: int, code: str | None, duration_s: float) -> Noted:
        """This request for the request log."""
        tally, call = self._tally_of(), self._call
        first_s = self._first_token_s
        return Noted(
            at_unix_s=unix_s(call.received_s),
            endpoint=self._endpoint,
            stream=plan.stream,
            model=plan.info.name,
            tier=plan.tier,
            tenant=plan.identity.tenant,
            requests=plan.requests,
            n=plan.n,
            completion_tokens=tally.completion_tokens,
            cached_tokens=tally.cached_tokens,
            finish=tuple([reason.value for reason in tally.reasons if reason is not None]),
            status=status,
            code=code,
            phases=self._phases(call.received_s + duration_s),
            ttft_s=None if first_s is None else first_s - call.received_s,
            duration_s=duration_s,
        )


async def _next(source: Events) -> tuple[int, list[StreamEvent]] | None:
    return await anext(source, None)


def _uncancelled(task: asyncio.Task[Any]) -> bool:
    """Take our own cancellation of `task` back. False if somebody else wants it to end as well,
    which Python 3.10 cannot tell."""
    uncancel = getattr(task, "uncancel", None)
    return uncancel is None or uncancel() == 0


def _patience(headers: Mapping[bytes, bytes]) -> tuple[float | None, float | None]:
    """The client's seconds for the whole answer, and for its first byte, if it told them.

    The first is `x-request-timeout-seconds`; the second the read timeout that OpenAI's clients
    tell, which bounds the whole answer where that comes in one piece.
    """
    whole = headers.get(b"x-request-timeout-seconds")
    reading = headers.get(b"x-stainless-read-timeout")
    return (
        None if whole is None else _seconds(whole),
        None if reading is None else _seconds(reading),
    )


def _seconds(value: bytes) -> float | None:
    try:
        seconds = float(value)
    except ValueError:
        return None
    if not math.isfinite(seconds) or seconds <= 0:
        return None
    return seconds - min(HEADROOM * seconds, 0.1)


def _refused(wait_s: float, *, optional: bool) -> Overloaded:
    """By a ladder. `optional`: because the client can do without it."""
    what = "it refuses what clients call optional" if optional else "it sheds load"
    return Overloaded(
        f"requests of this tier wait {wait_s:.1f} s for a slot, and {what} until that is "
        "shorter: try again later",
        code="slow_down",
        retry_after_s=min(max(wait_s, 1.0), 60.0),
    )


def _is_retry(headers: Mapping[bytes, bytes]) -> bool:
    """Whether the client says that it asked before."""
    return headers.get(b"x-stainless-retry-count", b"0") not in (b"0", b"")
