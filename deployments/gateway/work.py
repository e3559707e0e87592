"""The life of a generation at the gateway, whole or streamed.

read → validate → tokenise → open → collect or stream → close, and close whatever happens.

One task does the work. What may end it early (the client leaves, its patience or the gateway's
limit runs out, the server stops) cancels that task and notes why; the task's `finally` blocks
cancel the streams in every process.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from enum import Enum
from typing import cast

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from deployments.gateway.backend import Backend, Stream
from deployments.gateway.config import GatewayConfig
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
from deployments.gateway.measure import Pace, RequestMeter
from deployments.gateway.openai import Collector, Tally
from deployments.gateway.prepare import Plan
from deployments.gateway.sse import EventWriter
from deployments.gateway.state import GatewayState
from deployments.link.messages import StreamEvent

Prepare = Callable[[Backend, GatewayConfig, bytes], Awaitable[Plan]]
Events = AsyncGenerator[tuple[int, list[StreamEvent]], None]
"""`(prompt, its events)`."""

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


class Generation(Response):
    """Answers one request to `/v1/chat/completions` or `/v1/completions`. An ASGI application."""

    def __init__(self, state: GatewayState, endpoint: str, prepare: Prepare) -> None:
        super().__init__()
        self._state = state
        self._config = state.config
        self._endpoint = endpoint
        self._prepare = prepare
        self._plan: Plan | None = None
        self._tally: Tally | None = None
        self._marks: list[tuple[str, float]] = []
        """When each phase began."""

        self._cut: Cut | None = None
        self._patience_s = 0.0
        self._started = False
        """The head of the answer is out."""

        self._complete = False
        """The last of the answer is going out: the client may leave."""

        self._first_token_s: float | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._watch: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        self._call = call_of(scope)
        self._meter = RequestMeter(state.metrics)
        self._enter("tokenize", self._call.received_s)
        state.log.append(
            Received(
                request_id=self._call.request_id,
                at_s=self._call.received_s,
                endpoint=self._endpoint,
            )
        )
        total_s, self._first_s = _patience(scope, self._config.limits.request_timeout_s)
        self._deadline_s = self._call.received_s + total_s
        self._work = asyncio.create_task(self._run(scope, receive, send))
        self._expire_at(self._deadline_s, total_s)
        self._inflight(+1)
        try:
            await self._supervise(send)
        finally:
            for timer in self._timers:
                timer.cancel()
            if self._watch is not None:
                self._watch.cancel()
            self._inflight(-1)

    async def _supervise(self, send: Send) -> None:
        """Wait for the work, then say how it ended: to the client, the log and the metrics."""
        work = self._work
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            # The server stops, or Serve saw the client leave before we did.
            work.cancel()
            await asyncio.wait({work})
            self._record_disconnect()
            raise
        if work.cancelled():
            if self._cut is Cut.TIMEOUT:
                await self._fail(self._timed_out(), send)
            else:
                self._record_disconnect()
            return
        error = work.exception()
        if error is None:
            self._record_finish()
        elif isinstance(error, ClientGone):
            self._record_disconnect()
        else:
            await self._fail(error, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._config.limits.max_body_bytes)
        self._watch = asyncio.create_task(self._watch_client(receive))
        plan = await self._prepare(self._state.backend, self._config, body)
        self._plan, self._tally = plan, Tally(plan)
        now_s = time.monotonic()
        self._enter("queue", now_s)
        self._state.log.append(
            Tokenised(
                request_id=self._call.request_id,
                at_s=now_s,
                answer_id=plan.answer_id,
                model=plan.info.name,
                stream=plan.stream,
                prompts=len(plan.requests),
                prompt_tokens=plan.prompt_tokens,
                max_tokens=plan.requests[0].params.max_tokens,
                n=plan.n,
            )
        )
        self._inflight(-1)
        self._meter.model = plan.info.name
        self._inflight(+1)
        if self._first_s is not None:
            at_s = self._call.received_s + self._first_s
            if not plan.stream:
                self._deadline_s = min(self._deadline_s, at_s)
            self._expire_at(at_s, self._first_s)
        async with aclosing(self._events(plan)) as events:
            if plan.stream:
                await self._stream(plan, events, send)
            else:
                await self._collect(plan, events, send)

    async def _collect(self, plan: Plan, events: Events, send: Send) -> None:
        tally, collector, pace = self._tally_of(), Collector(plan), Pace(self._meter)
        async for prompt, batch in events:
            now_s = time.monotonic()
            tally.count(prompt, batch)
            collector.add(prompt, batch)
            pace.count(prompt, batch, now_s)
            if self._first_token_s is None:
                self._mark_first_token(now_s)
        tally.close()
        body = collector.body(tally)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
        ]
        self._started = self._complete = True
        await _to_client(send, {"type": "http.response.start", "status": 200, "headers": headers})
        await _to_client(send, {"type": "http.response.body", "body": body, "more_body": False})

    async def _stream(self, plan: Plan, events: Events, send: Send) -> None:
        tally, pace = self._tally_of(), Pace(self._meter)
        writer = EventWriter(plan, tally)
        async for prompt, batch in events:
            tally.count(prompt, batch)
            body = writer.write(prompt, batch)
            if not body:
                continue
            if not self._started:
                # Not before there is something to send: until then an error still has its status.
                self._started = True
                start = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
                await _to_client(send, start)
            await _to_client(send, {"type": "http.response.body", "body": body, "more_body": True})
            now_s = time.monotonic()
            pace.count(prompt, batch, now_s)
            if self._first_token_s is None:
                self._mark_first_token(now_s)
        tally.close()
        self._complete = True
        last = {"type": "http.response.body", "body": writer.close(), "more_body": False}
        await _to_client(send, last)

    def _events(self, plan: Plan) -> Events:
        """Events of all prompts as they come. Closing this closes every stream."""
        return self._one(plan, 0) if len(plan.requests) == 1 else self._merged(plan)

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
        remaining_s = max(0.0, self._deadline_s - time.monotonic())
        stream = await self._state.backend.open(
            plan.info.name, plan.requests[prompt], n=plan.n, remaining_s=remaining_s
        )
        try:
            if self._phase == "queue":
                self._mark_submitted(stream)
            async for events in stream:
                yield prompt, events
        finally:
            await stream.aclose()

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._end(Cut.DISCONNECT)

    def _expire_at(self, at_s: float, patience_s: float) -> None:
        def expire() -> None:
            self._patience_s = patience_s
            self._end(Cut.TIMEOUT)

        delay_s = max(0.0, at_s - time.monotonic())
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, expire))

    def _end(self, why: Cut) -> None:
        if not self._complete and self._cut is None:
            self._cut = why
            self._work.cancel()

    def _timed_out(self) -> TimedOut:
        tokens = self._tally.completion_tokens if self._tally is not None else 0
        return TimedOut(
            f"no whole answer after {self._patience_s:g} s (in phase {self._phase}, {tokens} "
            "tokens so far): allow more time, ask for fewer tokens, or stream",
            answering=tokens > 0,
        )

    async def _fail(self, error: BaseException, send: Send) -> None:
        failure = describe(error, self._call.request_id)
        self._record_failure(failure)
        if self._complete:
            return
        self._complete = True
        if self._started:
            # Then the end of the body and no [DONE], which would call the answer whole.
            last = {"type": "http.response.body", "body": failure.sse_event(), "more_body": False}
            sending = send(last)
        else:
            sending = send_failure(failure, send)
        # A client that reads nothing does not read this either: the server then cuts it off.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(sending, LAST_WORD_S)

    @property
    def _phase(self) -> str:
        return self._marks[-1][0]

    def _enter(self, phase: str, at_s: float) -> None:
        self._marks.append((phase, at_s))

    def _inflight(self, change: int) -> None:
        inflight, model = self._state.inflight, self._meter.model
        inflight[model] += change
        self._meter.inflight(inflight[model])

    def _tally_of(self) -> Tally:
        assert self._tally is not None
        return self._tally

    def _mark_submitted(self, stream: Stream) -> None:
        now_s = time.monotonic()
        admitted_s = cast("float | None", getattr(stream, "admitted_s", None))
        replica = cast("str | None", getattr(stream, "replica", None))
        request_id = self._call.request_id
        at_s = now_s if admitted_s is None else min(admitted_s, now_s)
        self._state.log.append(Admitted(request_id=request_id, at_s=at_s, replica=replica))
        self._state.log.append(Submitted(request_id=request_id, at_s=now_s))
        self._enter("route", at_s)
        self._enter("prefill", now_s)

    def _mark_first_token(self, now_s: float) -> None:
        self._first_token_s = now_s
        self._enter("stream", now_s)
        self._state.log.append(FirstToken(request_id=self._call.request_id, at_s=now_s))
        streaming = self._plan is not None and self._plan.stream
        if streaming and len(self._timers) > 1:
            self._timers[1].cancel()  # the patience for a first byte; the one for the whole runs on
        self._meter.first_token(now_s - self._call.received_s, streaming)

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
                reasons=tuple(reason.value for reason in tally.reasons if reason is not None),
            )
        )
        ttft_s = None
        if self._first_token_s is not None:
            ttft_s = self._first_token_s - self._call.received_s
        self._meter.finished(now_s - self._call.received_s, ttft_s, usage, len(tally.reasons))
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
        self._record_end(str(failure.status), now_s)

    def _record_disconnect(self) -> None:
        now_s = time.monotonic()
        self._state.log.append(
            Disconnected(request_id=self._call.request_id, at_s=now_s, phase=self._phase)
        )
        self._meter.disconnected(self._phase)
        self._record_end("499", now_s)

    def _record_end(self, code: str, now_s: float) -> None:
        edges = [at_s for _, at_s in self._marks[1:]] + [now_s]
        phases = [(p, end_s - s) for (p, s), end_s in zip(self._marks, edges, strict=True)]
        self._meter.ended(code, now_s - self._call.received_s, phases)


async def _to_client(send: Send, message: Message) -> None:
    """Some servers raise OSError when the client has left, others say so to `receive` only."""
    try:
        await send(message)
    except OSError as error:
        raise ClientGone from error


async def _next(source: Events) -> tuple[int, list[StreamEvent]] | None:
    return await anext(source, None)


def _patience(scope: Scope, limit_s: float) -> tuple[float, float | None]:
    """Seconds for the whole answer, and for its first byte.

    The first is `x-request-timeout-seconds`; the second the read timeout that OpenAI's clients
    tell, which bounds the whole answer where that comes in one piece.
    """
    total_s, first_s = limit_s, None
    for name, value in scope["headers"]:
        if name == b"x-request-timeout-seconds":
            total_s = min(total_s, _seconds(value) or total_s)
        elif name == b"x-stainless-read-timeout":
            first_s = _seconds(value)
    return total_s, first_s


def _seconds(value: bytes) -> float | None:
    try:
        seconds = float(value)
    except ValueError:
        return None
    if not math.isfinite(seconds) or seconds <= 0:
        return None
    return seconds - min(HEADROOM * seconds, 0.1)
