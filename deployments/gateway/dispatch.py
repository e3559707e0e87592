"""The gateway's way to a model: a grant from its queue, a submit over the link, frames back.

```
 open ──► acquire ──► link to the granted replica ──► SUBMIT ──► frames ──► RELEASE
             ▲   full, or the replica is gone │                    │ link lost
             └────────────────────────────────┘◄───────────────────┘ resubmit what was not finished
```

A replica's death is not the client's problem: every choice that had not ended is submitted again
with the tokens it had emitted. Noise is a function of (seed, position, token), so it goes on as it
would have.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from deployments.admission.client import QueueAway, QueueClient
from deployments.admission.queue import QueueLimits
from deployments.admission.tiers import TierTable
from deployments.background import background
from deployments.explain.asking import Answerer, Asker, Handler
from deployments.explain.clocks import Offset, clock_name, offset
from deployments.explain.decode import DecodeFacts
from deployments.explain.queueing import QueueFacts, top
from deployments.explain.request import Leg, PromptJournal
from deployments.gateway.backend import ANYWHERE, Place
from deployments.holds import HoldKeeper
from deployments.link.client import Dialer
from deployments.link.link import Link, LinkDown, LinkHandlers
from deployments.link.messages import (
    Grant,
    Kind,
    StreamEvent,
    Submit,
    Usage,
    refusal_from_wire,
)
from deployments.link.wire import CloseCode, CloseReason
from deployments.routing.choice import ReplicaChooser
from engine.errors import EngineError, Overloaded, TransferError
from engine.request import Request, derive_seed

logger = logging.getLogger(__name__)

MAX_PLACEMENTS = 8
"""Times in a row that a submit is placed without a single token coming of it."""

MAX_LOST_REPLICAS = 4
"""A stream that outlived this many replicas may be what kills them: the next loss is its end."""

TAKE_OVER_S = 120.0
"""How long what a lost replica had begun waits for another one, within the client's deadline: a
replica that Serve restarts loads its weights first."""

UNKNOWN_REPLICA_WAIT_S = 5.0
"""A new replica reports to the queue a moment before Serve tells the gateways of it."""

RETRY_PAUSE_S = 0.05
NO_REPLICA_PAUSE_S = 0.5

RELAY_S = 2.0
"""How long other gateways' answers are waited for; each of them is asked for half of it."""

LOOK_AGAIN_S = 2.0
"""A link that ended while its replica lives is dialled again after at most this long."""

_LOST: Mapping[CloseCode, str] = {
    CloseCode.CONNECTION_LOST: "died",
    CloseCode.LEASE_EXPIRED: "hung",
    CloseCode.PEER_STALLED: "hung",
}


@dataclass(slots=True)
class Placements:
    """Totals since start, read once a second for the metrics."""

    by_queue: int = 0
    by_own_choice: int = 0
    """While the queue was away."""

    again: dict[str, int] = field(default_factory=lambda: {"full": 0, "lost": 0})
    """Choices placed again, by what became of the placement before."""

    migrated: dict[str, int] = field(default_factory=lambda: {"closed": 0, "died": 0, "hung": 0})
    """Choices whose answer had begun and goes on elsewhere, by how their replica's link ended."""


class ReplicaDirectory(Protocol):
    """The running set of a model's decode pool, as Serve tells it."""

    def replicas(self) -> Mapping[str, Mapping[str, Any]]: ...

    async def changed(self, seen: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Wait until the running set is no longer the snapshot `seen`."""
        ...


@dataclass(slots=True)
class _Leg:
    """One submit of a stream on one link."""

    stream: ClusterStream
    stream_id: int
    link: Link
    replica: str
    grant: Grant | None
    choices: tuple[int, ...]
    """The client's choice for each choice of this submit."""

    told: Leg
    """Its part of the request's journal."""

    unconsumed: int = 0
    """Tokens yielded since the last credit."""

    placements: int = 1
    """Times in a row that these choices were placed, this time included; 0 once a token came."""

    live: set[int] = field(default_factory=set[int])


class ClusterStream:
    """`backend.Stream` over the cluster. Made by `ModelClient.open`."""

    def __init__(
        self,
        client: ModelClient,
        request: Request,
        n: int,
        deadline: float | None,
        journal: PromptJournal | None = None,
        place: Place = ANYWHERE,
    ) -> None:
        self._journal = journal
        self._place = place
        self.admitted_s: float | None = None
        self.replica: str | None = None
        self.migrations = 0
        self._client = client
        self._request = request
        self._n = n
        self._deadline = deadline
        self._legs: list[_Leg] = []
        self._events: list[StreamEvent] = []
        self._waiter: asyncio.Future[None] | None = None
        self._failure: EngineError | None = None
        self._again: list[tuple[_Leg, Overloaded]] = []
        self._lost: set[str] = set()
        self._emitted: list[list[int]] = [[] for _ in range(n)]
        self._unfinished = set(range(n))
        self._cached_tokens: int | None = None
        self._closed = False

    @property
    def num_prompt_tokens(self) -> int:
        return self._request.num_tokens

    @property
    def remaining_s(self) -> float | None:
        return None if self._deadline is None else self._deadline - time.monotonic()

    async def place(
        self,
        choices: tuple[int, ...],
        last: EngineError | None = None,
        placements: int = 0,
        *,
        resumed: bool = False,
    ) -> None:
        """Find a replica for these choices and submit them. Raises EngineError when none will.

        `last` says why they have to be placed again, after `placements` attempts in a row;
        `resumed`, that they had been admitted before.
        """
        request, window = self._request, self._client.window_tokens
        if len(choices) != self._n or any(self._emitted[c] for c in choices):
            assert len(choices) == 1
            (choice,) = choices
            request = replace(
                request,
                output_ids=(*request.output_ids, *self._emitted[choice]),
                params=replace(request.params, seed=derive_seed(request.params.seed, choice)),
            )
        while True:
            placements += 1
            if placements > MAX_PLACEMENTS:
                raise last or Overloaded(f"no replica took it in {MAX_PLACEMENTS} attempts")
            told = self._told(choices)
            try:
                replica, grant = await self._admit(request, len(choices), resumed)
            except EngineError as error:
                _closed(told, "refused", str(error))
                raise
            except BaseException:
                _closed(told, "cancelled")
                raise
            told.granted_s = time.monotonic()
            told.replica = replica
            told.direct = grant is None
            told.queue = self._client.why() if grant is None else grant.facts
            try:
                link = await self._client.link_to(replica)
            except (LinkDown, TransferError) as error:
                _closed(told, "unreachable", str(error))
                self._client.release(grant)
                self._client.unreachable(replica)
                last = Overloaded(f"replica {replica} cannot be reached: {error}")
                await asyncio.sleep(RETRY_PAUSE_S)
                continue
            except BaseException:
                _closed(told, "cancelled")
                self._client.release(grant)
                raise
            break
        if self._closed:
            _closed(told, "cancelled")
            self._client.release(grant)
            raise EngineError("the stream was closed while it was placed")
        if self.admitted_s is None:
            self.admitted_s = time.monotonic()
            if self._place.answer_s is not None:
                # The wait is over, however long it was: what is left is for the answer.
                ends = self.admitted_s + self._place.answer_s
                client_s = self._place.whole_until_s
                self._deadline = ends if client_s is None else min(ends, client_s)
        self.replica = replica
        leg = _Leg(
            self,
            next(self._client.stream_ids),
            link,
            replica,
            grant,
            choices,
            told,
            placements=placements,
            live=set(choices),
        )
        remaining = self.remaining_s
        if self._place.due_s is not None and not resumed:
            left_ms = round(1000 * (self._place.due_s - time.monotonic()))
            request = replace(request, first_token_ms=left_ms)
        submit = Submit(
            stream_id=leg.stream_id,
            request=request,
            n=len(choices),
            grant=grant,
            remaining_ms=None if remaining is None else max(1, int(remaining * 1000)),
            window_tokens=window,
        )
        told.stream_id = leg.stream_id
        told.submitted_s = time.monotonic()
        self._legs.append(leg)
        self._client.opened(leg)
        if not link.send(submit.to_wire()):
            # It ended before this leg was there to be told.
            self.on_lost(leg, CloseReason(CloseCode.CONNECTION_LOST, "before the submit"))

    def _told(self, choices: tuple[int, ...]) -> Leg:
        now = time.monotonic()
        if self._journal is None:
            return Leg(0, choices, now)
        return self._journal.leg(choices, now)

    async def _admit(self, request: Request, n: int, resumed: bool) -> tuple[str, Grant | None]:
        """As `ModelClient.admit`; what was admitted before goes on asking while no replica runs."""
        give_up = time.monotonic() + TAKE_OVER_S
        while True:
            try:
                return await self._client.admit(
                    request, n, self._patience_s(resumed), place=self._place, resumed=resumed
                )
            except Overloaded as error:
                remaining = self.remaining_s
                late = time.monotonic() >= give_up or (remaining is not None and remaining <= 0)
                if late or not resumed or error.code != "no_replicas":
                    raise
            await asyncio.sleep(NO_REPLICA_PAUSE_S)

    def _patience_s(self, resumed: bool) -> float | None:
        """What is left until the client gives up waiting for a grant."""
        remaining, until = self.remaining_s, self._place.patient_until_s
        if resumed or until is None:
            return remaining
        first = until - time.monotonic()
        return first if remaining is None else min(remaining, first)

    def on_event(self, leg: _Leg, event: StreamEvent) -> None:
        """A frame's entry for this stream, on the event loop."""
        choice = leg.choices[event.choice]
        event.choice = choice
        self._emitted[choice].extend(event.token_ids)
        if leg.placements:
            leg.placements = 0
            leg.told.first_s = time.monotonic()
        if event.usage is not None and self._cached_tokens is None:
            # A later replica finds what the lost one computed: that was for this request.
            self._cached_tokens = 0 if self.migrations else event.usage.cached_tokens
        event.usage = None
        if event.finish is not None:
            leg.live.discard(choice)
            self._unfinished.discard(choice)
            if not leg.live:
                self._end(leg)
            if not self._unfinished:
                event.usage = Usage(
                    prompt_tokens=len(self._request.prompt_ids),
                    completion_tokens=sum(map(len, self._emitted)),
                    cached_tokens=self._cached_tokens or 0,
                )
        leg.unconsumed += len(event.token_ids)
        self._events.append(event)
        self._wake()

    def on_refused(self, leg: _Leg, error: EngineError) -> None:
        """Decode will not, or no longer, serve this leg."""
        _closed(leg.told, "refused", str(error))
        self._end(leg)
        if isinstance(error, Overloaded) and error.code == "full":
            self._again.append((leg, error))
        else:
            self._failure = error
        self._wake()

    def on_lost(self, leg: _Leg, reason: CloseReason) -> None:
        """The replica is gone. What it had not finished goes elsewhere."""
        _closed(leg.told, "lost", str(reason))
        self._end(leg)
        if leg.live:
            self._lost.add(leg.replica)
            error = Overloaded(f"replica {leg.replica} was lost ({reason}): try again")
            if len(self._lost) <= MAX_LOST_REPLICAS:
                self._again.append((leg, error))
                begun = sum(bool(self._emitted[choice]) for choice in leg.live)
                self._client.placements.migrated[_LOST.get(reason.code, "closed")] += begun
            else:
                self._failure = Overloaded(
                    f"{len(self._lost)} replicas were lost while they worked on this "
                    f"request, the last one {leg.replica} ({reason}): it may be the cause; change "
                    "it or look at the replicas' logs before sending it again",
                    code="replicas_lost",
                )
        self._wake()

    def _wake(self) -> None:
        """Have the reader, if it waits, look again. A future of its own: an event costs thrice."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> AsyncIterator[list[StreamEvent]]:
        return self._run()

    async def _run(self) -> AsyncIterator[list[StreamEvent]]:
        while True:
            if self._events:
                events, self._events = self._events, []
                yield events
                for leg in self._legs:
                    if leg.unconsumed >= self._client.window_tokens // 4:
                        leg.link.send([Kind.CREDIT, leg.stream_id, leg.unconsumed])
                        leg.unconsumed = 0
                continue
            if not self._unfinished:
                return
            if self._failure is not None:
                raise self._failure
            if self._again:
                await self._replace()
                continue
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def _replace(self) -> None:
        again, self._again = self._again, []
        for leg, error in again:
            full = error.code == "full"
            if full:
                pause_s = min(0.1 * 2 ** (leg.placements - 1), 2.0)
                await self._client.rest(pause_s, for_queue=leg.grant is None)
            reason = "full" if full else "lost"
            # Who only tried, while the queue was away, has no place before those that wait there.
            admitted = not full or leg.grant is not None
            self._client.placements.again[reason] += len(leg.live)
            whole = tuple(leg.choices)
            if len(whole) == self._n and not any(self._emitted):
                await self.place(whole, error, leg.placements, resumed=admitted)
                continue
            for choice in sorted(leg.live):
                self.migrations += 1
                await self.place((choice,), error, leg.placements, resumed=True)

    async def aclose(self) -> None:
        self._closed = True
        for leg in list(self._legs):
            leg.link.send([Kind.CANCEL, leg.stream_id])
            self._end(leg)
        self._client.left(self)

    def _end(self, leg: _Leg) -> None:
        if leg in self._legs:
            _closed(leg.told, "cancelled" if leg.live else "finished")
            self._legs.remove(leg)
            self._client.closed(leg)


def _closed(told: Leg, end: str, why: str = "") -> None:
    """A placement is over. What ended it first is what counts."""
    if not told.end:
        told.end, told.why, told.ended_s = end, why, time.monotonic()


class ModelClient:
    """This gateway's connections for one model: its queue, and a link to each decode replica."""

    def __init__(
        self,
        own_id: str,
        secret: bytes,
        directory: ReplicaDirectory,
        queue: QueueClient,
        holds: HoldKeeper,
        *,
        window_tokens: int = 1024,
        on_snapshot: Callable[[str, str, list[Any]], None] | None = None,
        answers: Mapping[str, Handler] | None = None,
    ) -> None:
        """`on_snapshot` gets each replica's figures as they come: its id, its role, its series.
        `answers` are for other gateways' questions (`explain.asking.Answerer`)."""
        self.placements = Placements()
        self.window_tokens = window_tokens
        self.stream_ids = itertools.count(1)
        self.directory = directory
        self._queue = queue
        self._holds = holds
        self._chooser = ReplicaChooser()
        self._streams: set[ClusterStream] = set()
        self._legs: dict[tuple[Link, int], _Leg] = {}
        self._on_snapshot = on_snapshot
        self._asker = Asker()
        self._answerer = Answerer(answers or {})
        self._dropped: dict[str, str] = {}
        """Replicas that Serve dropped while they lived: id to address."""

        self._known: dict[str, str] = {}
        self._dialer = Dialer(
            secret,
            "gateway",
            own_id,
            LinkHandlers(on_message=self._on_message, on_close=self._on_close),
            expect_role="decode",
        )
        self._watcher: asyncio.Task[None] | None = None
        self._errands: set[asyncio.Task[None]] = set()

    @property
    def num_streams(self) -> int:
        """Streams not closed yet, also those that wait for a replica or for another one."""
        return len(self._streams)

    @property
    def queue_connected(self) -> bool:
        """Whether the admission queue can be asked now."""
        return self._queue.available

    def start(self) -> None:
        self._queue.start()
        self._watcher = background(self._watch(), "watching replicas")

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        for errand in list(self._errands):
            errand.cancel()
        self._answerer.close()
        await self._queue.close()
        await self._holds.close()
        await self._dialer.close()

    async def open(
        self,
        request: Request,
        *,
        n: int,
        remaining_s: float | None,
        journal: PromptJournal | None = None,
        place: Place = ANYWHERE,
    ) -> ClusterStream:
        """Every placement is noted in `journal`."""
        deadline = None if remaining_s is None else time.monotonic() + remaining_s
        stream = ClusterStream(self, request, n, deadline, journal, place)
        self._streams.add(stream)
        try:
            await stream.place(tuple(range(n)))
        except BaseException:
            await stream.aclose()
            raise
        return stream

    def set_policy(self, tiers: TierTable, limits: QueueLimits) -> None:
        """What the model's queue is to go by."""
        self._queue.set_policy(tiers, limits)

    async def admit(
        self,
        request: Request,
        n: int,
        remaining_s: float | None,
        *,
        place: Place = ANYWHERE,
        resumed: bool = False,
    ) -> tuple[str, Grant | None]:
        """A replica to submit to, with the queue's grant or, while it is away, without: unless it
        may wait, then it waits for the queue.

        `resumed` goes ahead of what was never admitted. Raises Overloaded.
        """
        until = None if remaining_s is None else time.monotonic() + remaining_s

        def left_s() -> float | None:
            return None if until is None else until - time.monotonic()

        while True:
            try:
                grant = await self._ask_queue(request, n, left_s(), place, resumed)
            except QueueAway:
                if resumed or not place.may_wait:
                    return self._own_choice(), None
            else:
                self.placements.by_queue += 1
                return grant.replica_id, grant
            limits = [at_s for at_s in (until, place.wait_until_s) if at_s is not None]
            away_s = min(limits) - time.monotonic() if limits else None
            if not await self._queue.wait_available(away_s):
                raise Overloaded(
                    "the admission queue is away, and this request may wait for it: try again",
                    code="queue_timeout",
                    retry_after_s=2.0,
                )

    async def _ask_queue(
        self, request: Request, n: int, remaining_s: float | None, place: Place, resumed: bool
    ) -> Grant:
        prompt = request.num_tokens
        left = request.params.max_tokens - len(request.output_ids)
        return await self._queue.acquire(
            cost_tokens=prompt + n * left,
            prompt_tokens=prompt,
            n=n,
            priority=request.priority,
            tier=place.tier,
            tenant=place.tenant,
            weight=place.weight,
            resumed=resumed,
            remaining_ms=None if remaining_s is None else max(1, int(remaining_s * 1000)),
        )

    def _own_choice(self) -> str:
        """A replica without the queue's word. Raises Overloaded where none runs."""
        self._chooser.set_replicas(self.directory.replicas().keys())
        replica = self._chooser.choose(time.monotonic())
        if replica is None:
            raise Overloaded(
                "no decode replica is running: try again", code="no_replicas", retry_after_s=2.0
            )
        self.placements.by_own_choice += 1
        return replica

    async def rest(self, seconds: float, *, for_queue: bool) -> None:
        """Before somebody asks again who was told that there is no room. `for_queue`: no longer
        than the queue is away, which knows who is next."""
        if for_queue:
            await self._queue.wait_available(seconds)
        else:
            await asyncio.sleep(seconds)

    def why(self) -> QueueFacts:
        """What the choice goes by while the queue is away."""
        scores = top(self._chooser.tokens().items(), highest=False)
        return QueueFacts(rule="fewest prompt tokens under way", scores=scores)

    async def journal(self, leg: Leg) -> tuple[DecodeFacts, Offset | None] | None:
        """What the replica of one of our submits tells about it, and its clock. None: not to be
        had, because the replica is gone or has forgotten."""
        link = await self._open_link(leg.replica)
        if link is None:
            return None
        told = await self._asker.ask(link, "journal", leg.stream_id)
        if told is None:
            return None
        try:
            facts = DecodeFacts.from_wire(told.value)
        except (TypeError, ValueError, KeyError):
            logger.exception("replica %s told a journal that nobody understands", leg.replica)
            return None
        exchanges = [told.exchange]
        if leg.first_s and facts.first_sent_s:
            exchanges.append((leg.submitted_s, facts.begun_s, facts.first_sent_s, leg.first_s))
        return facts, offset(exchanges, clock_name(), facts.clock)

    async def elsewhere(self, what: str, *arguments: Any) -> list[Any] | None:
        """What the other gateways answer, asked through a decode replica. None: there is no link
        to any."""
        for replica in list(self._known):
            link = await self._open_link(replica)
            if link is not None:
                told = await self._asker.ask(
                    link, "relay", what, list(arguments), timeout_s=RELAY_S
                )
                if told is not None:
                    return told.value
        return None

    async def _open_link(self, replica: str) -> Link | None:
        address = self._known.get(replica) or self._dropped.get(replica)
        if address is None or not self._dialer.is_open(address):
            return None
        try:
            return await self._dialer.get(address, expect_id=replica)
        except LinkDown:
            return None

    async def link_to(self, replica: str) -> Link:
        """The link to a replica that Serve counts as running. Raises LinkDown, TransferError."""
        metadata = self.directory.replicas().get(replica)
        if metadata is None and replica not in self._dropped:
            try:
                metadata = await asyncio.wait_for(self._appears(replica), UNKNOWN_REPLICA_WAIT_S)
            except asyncio.TimeoutError:
                metadata = None
        if metadata is None:
            raise TransferError(f"replica {replica} is not running", stage="connect")
        return await self._dialer.get(metadata["link"], expect_id=replica)

    async def _appears(self, replica: str) -> Mapping[str, Any]:
        while True:
            snapshot = self.directory.replicas()
            metadata = snapshot.get(replica)
            if metadata is not None:
                return metadata
            await self.directory.changed(snapshot)

    def release(self, grant: Grant | None) -> None:
        if grant is not None:
            self._queue.release(grant)

    def unreachable(self, replica: str) -> None:
        """Choose others for a moment while the queue is away; it sees for itself what is gone."""
        self._chooser.failed(replica, time.monotonic())

    def opened(self, leg: _Leg) -> None:
        self._legs[leg.link, leg.stream_id] = leg
        self._holds.begin(leg.replica)
        tokens = leg.stream.num_prompt_tokens
        self._chooser.begin(leg.replica, str(leg.stream_id), tokens)

    def closed(self, leg: _Leg) -> None:
        if self._legs.pop((leg.link, leg.stream_id), None) is not None:
            self._holds.end(leg.replica)
            self._chooser.end(leg.replica, str(leg.stream_id))
            self.release(leg.grant)

    def left(self, stream: ClusterStream) -> None:
        """The stream is closed. Idempotent."""
        self._streams.discard(stream)

    def _on_message(self, link: Link, message: list[Any]) -> None:
        match message[0]:
            case Kind.STEP:
                legs = self._legs
                for wire in message[1]:
                    leg = legs.get((link, wire[0]))
                    if leg is not None:
                        leg.stream.on_event(leg, StreamEvent.from_wire(wire))
            case Kind.REFUSE:
                leg = self._legs.get((link, message[1]))
                if leg is not None:
                    leg.stream.on_refused(leg, refusal_from_wire(message))
            case Kind.TELL:
                self._asker.told(link, message)
            case Kind.ASK:
                self._answerer.asked(link, message)
            case Kind.SNAPSHOT:
                if self._on_snapshot is not None:
                    self._on_snapshot(message[1], message[2], message[3])
            case _:
                pass

    def _on_close(self, link: Link, reason: CloseReason) -> None:
        self._asker.lost(link)
        for (owner, _), leg in list(self._legs.items()):
            if owner is link:
                leg.stream.on_lost(leg, reason)

    async def _watch(self) -> None:
        """Tell replicas that Serve dropped, or took back, whether to expect new work."""
        while True:
            snapshot = self.directory.replicas()
            now = {r: m["link"] for r, m in snapshot.items() if "link" in m}
            # None of it waits for a peer: what is dropped must be known before the next grant.
            for replica, address in self._known.items():
                if replica not in now:
                    self._dropped[replica] = address
                    self._soon(self._say_goodbye(replica, address))
            for replica, address in now.items():
                returned = self._dropped.pop(replica, None) is not None
                if returned or not self._dialer.is_open(address):
                    self._soon(self._greet(replica, address, returned))
            self._known = now
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.directory.changed(snapshot), LOOK_AGAIN_S)

    def _soon(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def _greet(self, replica: str, address: str, returned: bool) -> None:
        """Have the link before a request needs it; metrics come over it, too."""
        try:
            link = await self._dialer.get(address, expect_id=replica)
        except LinkDown as error:
            logger.info("no link to decode %s yet: %s", replica, error)
            return
        if returned and replica not in self._dropped:
            link.send([Kind.DRAIN, False])

    async def _say_goodbye(self, replica: str, address: str) -> None:
        try:
            link = await self._dialer.get(address, expect_id=replica)
        except LinkDown:
            self._dialer.forget(address)
            return
        if replica in self._dropped:
            link.send([Kind.DRAIN, True])
