"""Offers a schedule to a server and says what came of each request.

An open loop sends a request when it is due, whatever became of those before it. Bodies are written
ahead of time, so that at the moment itself there is nothing left to do but to send.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from cluster.replay.answer import Answer
from cluster.replay.http import ConnectionBroken, Connections, Response, TimeUp
from cluster.replay.mix import SERVICE_TIERS
from cluster.replay.outcome import Outcome, Result
from cluster.replay.prompts import PromptWriter
from cluster.replay.retry import RetryPolicy
from cluster.replay.workload import Offer, Schedule

Endpoint = Literal["chat", "completions"]
Prompts = Literal["text", "ids"]

LEAD_S = 0.2
"""Before the first request: time for connections to open."""

AHEAD_BYTES = 64 * 1024 * 1024
"""Bodies written before they are due."""

LEAVE_WITHIN_S = 1.0
"""A client that leaves before the first token does so at a random point of this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go, and in what form."""

    url: str
    """Without `/v1`."""

    endpoint: Endpoint = "chat"
    prompts: Prompts = "text"
    """`ids` needs `completions`."""

    stream: bool = True
    count_tokens: bool = False
    """Ask for the usage so far on every chunk (vLLM's `continuous_usage_stats`)."""

    api_key: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict[str, str])
    """API keys by tenant; `api_key` for those without one."""

    run_id: str = ""
    """Begins every `x-request-id`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """What a client puts up with."""

    timeout_s: float = 600.0
    """For the whole request, retries included."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)


class _Left(ConnectionBroken):
    """The client left as planned."""


class Load:
    """One run over one schedule. Times in outcomes count from `began_s`."""

    def __init__(
        self,
        schedule: Schedule,
        target: Target,
        writers: Mapping[str, PromptWriter],
        patience: Patience,
        on_outcome: Callable[[Outcome], None],
        *,
        seed: int = 0,
    ) -> None:
        """`writers` by model, for every model of the schedule."""
        self._schedule = schedule
        self._target = target
        self._writers = writers
        self._patience = patience
        self._on_outcome = on_outcome
        self._seed = seed
        self._connections = Connections(target.url)
        self._path = "/v1/chat/completions" if target.endpoint == "chat" else "/v1/completions"
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = asyncio.Event()
        self._mistake: BaseException | None = None
        """Of ours, in a request's task."""

        self._cpu_before = 0.0
        self.began_s = 0.0
        """Loop time of the run's beginning."""

        self.in_flight = 0
        self.num_sent = 0
        self.num_ended = 0
        self.cpu_s = 0.0
        """This process's, from the beginning to the end of the run."""

    def stop(self) -> None:
        """Send nothing more and leave what is in flight."""
        self._stopped.set()

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return asyncio.get_running_loop().time() - self.began_s

    async def run(self) -> bool:
        """Whether the schedule was offered whole (False after `stop`). May be called once."""
        conversations = _conversations(self._schedule.offers)
        users = self._schedule.users
        work = self._closed(conversations, users) if users else self._open(conversations)
        with _few_collections():
            doing = asyncio.create_task(work)
            stopping = asyncio.create_task(self._stopped.wait())
            await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            self.cpu_s = time.process_time() - self._cpu_before
            whole = doing.done()
            left: list[asyncio.Task[Any]] = [doing, stopping, *self._tasks]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        self._connections.close()
        if self._mistake is not None:
            raise self._mistake
        if whole:
            doing.result()
        return whole

    def _begin(self) -> None:
        self.began_s = asyncio.get_running_loop().time() + LEAD_S
        self._cpu_before = time.process_time()

    # Loops

    async def _open(self, conversations: Iterator[list[Offer]]) -> None:
        loop = asyncio.get_running_loop()
        self._ahead = 0
        self._room = asyncio.Event()
        written: deque[tuple[list[Offer], bytes]] = deque()
        for offers in conversations:
            body = self._first_body(offers[0])
            written.append((offers, body))
            self._ahead += len(body)
            if self._ahead > AHEAD_BYTES:
                break
        self._begin()
        for offers, body in itertools.chain(_drain(written), self._written_later(conversations)):
            while self._ahead > AHEAD_BYTES and not written:
                self._room.clear()
                await self._room.wait()
            due_s = self.began_s + (offers[0].at_s or 0.0)
            loop.call_at(due_s, self._send, offers, body, due_s)
            if not written:
                await asyncio.sleep(0)
        last_s = self.began_s + self._schedule.span_s
        await asyncio.sleep(max(0.0, last_s - loop.time()) + 0.01)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _written_later(
        self, conversations: Iterator[list[Offer]]
    ) -> Iterator[tuple[list[Offer], bytes]]:
        for offers in conversations:
            body = self._first_body(offers[0])
            self._ahead += len(body)
            yield offers, body

    def _send(self, offers: list[Offer], body: bytes, due_s: float) -> None:
        if self._stopped.is_set():
            return
        self._ahead -= len(body)
        if self._ahead <= AHEAD_BYTES:
            self._room.set()
        task = asyncio.create_task(self._converse(offers, due_s, body))
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._mistake = error
            self._stopped.set()

    async def _closed(self, conversations: Iterator[list[Offer]], users: int) -> None:
        self._begin()
        await asyncio.sleep(LEAD_S)

        async def user() -> None:
            for offers in conversations:
                body = self._first_body(offers[0])
                await self._converse(offers, asyncio.get_running_loop().time(), body)

        self._tasks |= {asyncio.create_task(user()) for _ in range(users)}
        await asyncio.gather(*self._tasks)

    # Requests

    async def _converse(self, offers: Sequence[Offer], due_s: float, body: bytes) -> None:
        """One conversation, or one request."""
        loop = asyncio.get_running_loop()
        history: list[str] = []
        """What was said, by turns: user, assistant, user, ..."""

        for offer in offers:
            if offer.turn:
                due_s = loop.time() + offer.think_s
                if offer.at_s is not None:
                    due_s = max(due_s, self.began_s + offer.at_s)
                if offer.think_s:
                    # Written before it is due, like the first.
                    body = self._body(offer, history)
                    await asyncio.sleep(due_s - loop.time())
                else:
                    await asyncio.sleep(max(0.0, due_s - loop.time()))
                    body = self._body(offer, history)
            elif len(offers) > 1:
                history.append(self._message(offer))
            answer = await self._perform(offer, due_s, body, keep_text=len(offers) > 1)
            if len(offers) > 1:
                # A turn that failed is followed by the next one all the same, so that every server
                # is offered the same; its answer is then text of our own.
                text = answer.text if answer is not None and answer.text else "..."
                history.append(text)

    async def _perform(
        self, offer: Offer, due_s: float, body: bytes, *, keep_text: bool
    ) -> Answer | None:
        """Send, try again as far as patience goes, report. The answer if there is a whole one."""
        loop = asyncio.get_running_loop()
        self.in_flight += 1
        self.num_sent += 1
        sent_s = loop.time()
        ends_s = sent_s + self._patience.timeout_s
        retries, rng = 0, random.Random(f"{self._seed}/{offer.index}/retries")
        try:
            while True:
                attempt = _Attempt(offer, keep_text=keep_text, stream=self._target.stream)
                attempt.began_s = loop.time()
                await self._attempt(attempt, offer, body, ends_s, retries)
                if attempt.result == "ok" or attempt.may_retry is False:
                    break
                delay_s = self._patience.retry.delay_s(
                    retries,
                    attempt.status,
                    attempt.headers,
                    now_unix_s=time.time(),
                    rng=rng,
                )
                if delay_s is None or loop.time() + delay_s >= ends_s:
                    break
                await asyncio.sleep(delay_s)
                retries += 1
        finally:
            self.in_flight -= 1
        self.num_ended += 1
        self._on_outcome(self._outcome(offer, attempt, due_s, sent_s, retries))
        return attempt.answer if attempt.result == "ok" else None

    async def _attempt(
        self, attempt: _Attempt, offer: Offer, body: bytes, ends_s: float, retries: int
    ) -> None:
        loop = asyncio.get_running_loop()
        left_s = max(0.001, ends_s - attempt.began_s)
        within_s = left_s if attempt.leave_s is None else min(left_s, attempt.leave_s)
        head = self._connections.head(self._path, self._headers(offer, retries))
        response: Response | None = None
        try:
            response = await self._connections.post(head, body, attempt.on_body, within_s)
        except TimeUp as error:
            leaving = attempt.leave_s is not None and attempt.leave_s <= left_s
            if leaving:
                attempt.fail("disconnected", None, None)
            else:
                attempt.fail("timeout", "client_timeout", str(error))
        except _Left:
            attempt.fail("disconnected", None, None)
        except ConnectionBroken as error:
            attempt.fail("error", "connection", str(error))
            attempt.may_retry = attempt.status is None
        finally:
            attempt.ended_s = loop.time()
        if response is not None:
            attempt.close(response)

    def _headers(self, offer: Offer, retries: int) -> dict[str, str]:
        target, timeout_s = self._target, self._patience.timeout_s
        headers = {
            "accept": "text/event-stream" if target.stream else "application/json",
            "user-agent": "tailrace-replay",
            "x-request-id": f"{target.run_id}-{offer.index}",
            "x-request-timeout-seconds": f"{timeout_s:g}",
            # What OpenAI's client tells of its patience and of its retries.
            "x-stainless-read-timeout": f"{timeout_s:g}",
            "x-stainless-retry-count": str(retries),
        }
        key = target.keys.get(offer.tenant, target.api_key)
        if key:
            headers["authorization"] = f"Bearer {key}"
        return headers

    def _outcome(
        self, offer: Offer, attempt: _Attempt, due_s: float, sent_s: float, retries: int
    ) -> Outcome:
        began_s, answer = self.began_s, attempt.answer
        times = tuple(at_s - began_s for at_s in answer.chunk_times)
        tokens = None
        if answer.chunk_tokens and len(answer.chunk_tokens) == len(times):
            tokens = tuple(answer.chunk_tokens)
        return Outcome(
            index=offer.index,
            source=offer.source,
            session=offer.session,
            turn=offer.turn,
            tier=offer.tier,
            tenant=offer.tenant,
            model=offer.model,
            scheduled_s=due_s - began_s,
            sent_s=sent_s - began_s,
            attempt_s=attempt.began_s - began_s,
            first_token_s=times[0] if times else None,
            end_s=attempt.ended_s - began_s,
            chunk_times=times,
            chunk_tokens=tokens,
            planned_input_tokens=offer.input_tokens,
            planned_output_tokens=offer.output_tokens,
            input_tokens=answer.input_tokens,
            output_tokens=answer.output_tokens,
            cached_tokens=answer.cached_tokens,
            predicted_cached_tokens=offer.predicted_cached_tokens,
            phases=server_timing(attempt.headers.get("server-timing", "")),
            status=attempt.status,
            result=attempt.result,
            code=attempt.code,
            message=attempt.message,
            retries=retries,
            finish_reason=answer.finish_reason,
            request_id=attempt.headers.get("x-request-id")
            or f"{self._target.run_id}-{offer.index}",
        )

    # Bodies

    def _first_body(self, offer: Offer) -> bytes:
        if self._target.prompts == "ids":
            return self._dumps(offer, {"prompt": self._writers[offer.model].ids(offer.segments)})
        return self._body(offer, [], keep=False)

    def _body(self, offer: Offer, history: list[str], *, keep: bool = True) -> bytes:
        """The request of a turn; its message becomes part of `history`."""
        said = history if keep else list(history)
        said.append(self._message(offer))
        if self._target.endpoint == "completions":
            return self._dumps(offer, {"prompt": " ".join(said)})
        messages = [
            {"role": "assistant" if i % 2 else "user", "content": text}
            for i, text in enumerate(said)
        ]
        return self._dumps(offer, {"messages": messages})

    def _message(self, offer: Offer) -> str:
        return self._writers[offer.model].text(offer.segments)

    def _dumps(self, offer: Offer, prompt: Mapping[str, Any]) -> bytes:
        target = self._target
        body: dict[str, Any] = {
            "model": offer.model,
            **prompt,
            "max_tokens": offer.output_tokens,
            "stream": target.stream,
        }
        if target.stream:
            body["stream_options"] = {"include_usage": True}
            if target.count_tokens:
                body["stream_options"]["continuous_usage_stats"] = True
        tier = SERVICE_TIERS.get(offer.tier, offer.tier)
        if tier is not None:
            body["service_tier"] = tier
        return orjson.dumps({**body, **offer.body})


class _Attempt:
    """One request on the wire."""

    def __init__(self, offer: Offer, *, keep_text: bool, stream: bool) -> None:
        self.answer = Answer(keep_text=keep_text)
        self.began_s = 0.0
        self.ended_s = 0.0
        self.status: int | None = None
        self.headers: Mapping[str, str] = {}
        self.result: Result = "error"
        self.code: str | None = None
        self.message: str | None = None
        self.may_retry = True
        self.leave_s: float | None = None
        """Seconds after which the client leaves, however far the answer is."""

        self._leave_after = 0
        """Chunks with content after which it leaves; 0: it does not."""

        self._stream = stream
        self._body: list[bytes] = []
        if offer.leave_at is not None:
            tokens = offer.leave_at * offer.output_tokens
            if stream and tokens >= 1:
                self._leave_after = int(tokens)
            else:
                self.leave_s = max(0.001, (tokens % 1.0) * LEAVE_WITHIN_S)

    def on_body(self, response: Response, body: bytes, now_s: float) -> None:
        self.status, self.headers = response.status, response.headers
        if response.status != 200 or not self._stream:
            self._body.append(body)
            return
        answer = self.answer
        answer.feed(body, now_s)
        if self._leave_after and len(answer.chunk_times) >= self._leave_after:
            raise _Left("left as planned")

    def fail(self, result: Result, code: str | None, message: str | None) -> None:
        self.answer.close()
        self.result, self.code, self.message = result, code, message
        self.may_retry = False

    def close(self, response: Response) -> None:
        """The response is whole."""
        self.status, self.headers = response.status, response.headers
        answer = self.answer
        if response.status != 200 or not self._stream:
            answer.whole(b"".join(self._body), response.status)
        answer.close()
        if answer.error is not None:
            self.code, self.message = answer.error
            self.result = _refused(response.status)
        elif response.status == 200 and (answer.done or answer.finish_reason is not None):
            self.result = "ok"
        else:
            self.code, self.message = "incomplete", "the answer ended before it was whole"
        self.may_retry = response.status != 200


def _refused(status: int) -> Result:
    if status in (429, 503):
        return "shed"
    return "timeout" if status in (408, 504) else "error"


def server_timing(header: str) -> dict[str, float]:
    """Seconds by name from a `server-timing` header (milliseconds, W3C). What is no duration is
    left out."""
    phases: dict[str, float] = {}
    for entry in header.split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip().lower() == "dur" and name:
                try:
                    phases[name] = float(value.strip().strip('"')) / 1000
                except ValueError:
                    continue
    return phases


def _conversations(offers: Sequence[Offer]) -> Iterator[list[Offer]]:
    """Turns of a conversation together; they follow each other in a schedule."""
    for _, group in itertools.groupby(
        offers, key=lambda offer: offer.session if offer.session is not None else offer.index
    ):
        yield list(group)


def _drain(
    written: deque[tuple[list[Offer], bytes]],
) -> Iterator[tuple[list[Offer], bytes]]:
    while written:
        yield written.popleft()


@contextmanager
def _few_collections() -> Iterator[None]:
    """No full garbage collections meanwhile: over many outcomes one takes longer than a request
    may be late."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(before[0], before[1], 1_000_000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
