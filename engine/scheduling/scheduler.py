"""Decide what each forward pass computes. No clock, tensor, lock or await: events in, plans out.

One rule covers chunked prefill, decoding, mixed batches and resumption: a request wants
`len(token_ids) - num_computed` tokens. Running requests come first, decoding ones before those
still in their prompt; then waiting ones, until token budget, slots or blocks are used up.

Blocks for a whole prompt are reserved at admission: two half-computed giants would otherwise wait
for each other for ever. When a running request cannot get its next block, the least urgent one
(it may be the same) gives all of its blocks up and goes back to the queue; it keeps its tokens, and
most of its KV is usually still in the prefix cache when it returns.

A prompt that is computed for another replica is read from its blocks while it grows, so it never
gives them up. It is parked instead: somebody more urgent takes its slot, and it goes on later. That
more urgent prompts find blocks, such work leaves `urgent_kv_reserve` of the pool free, unless it is
more urgent itself than any of its kind.

A plan may be made ahead, while the pass before it still runs, on what is sure of that pass: how far
it computes, and that each request it samples for has one token more, whichever it is (`PENDING`),
and does not end with it unless by its length. Who ends all the same is computed for nothing, and
keeps its blocks until that is over. A plan that would have to take blocks from somebody is not made
ahead: the pass under way may use them.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from engine.cache.blocks import BlockManager
from engine.config import SchedulerConfig
from engine.errors import Overloaded, RequestError
from engine.request import FinishReason, Request, RequestId, SampledToken
from engine.scheduling.cost import StepCost, StepWork, prompt_work, row_work
from engine.scheduling.pacing import Demand, Stream, pace
from engine.scheduling.plan import PENDING, Chunk, Entered, StepPlan, StepResult
from engine.scheduling.requests import State, Tracked
from engine.scheduling.waiting import WaitingQueue

_LOOK_AHEAD = 32
"""Waiting prompts whose deadlines a step's budget takes into account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """One token that a request got."""

    request_id: RequestId
    token: SampledToken
    finish: FinishReason | None
    """Set with the request's last token, which may be the EOS token itself."""

    num_cached_tokens: int
    """Prompt tokens that were found in the local cache when the request was first admitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Blocks that wait for imported KV, for every token the request knows."""

    request_id: RequestId
    blocks: tuple[int, ...]
    num_cached_tokens: int
    """Whole blocks at the start that need no import: their KV is here."""


@dataclass(frozen=True, slots=True)
class _Skip:
    """What a plan, if it is carried out, changes about how long a stream has sat out."""

    tracked: Tracked
    before: float | None
    after: float | None

    def apply(self) -> None:
        self.tracked.skipped_since = self.after

    def take_back(self) -> None:
        """Unless another plan has changed it since."""
        if self.tracked.skipped_since == self.after:
            self.tracked.skipped_since = self.before


@dataclass(slots=True)
class _Step:
    """A plan in the making."""

    now: float
    budget: int
    prompt_budget: int
    """Part of the budget that chunks of more than one token may take."""

    skipped: frozenset[RequestId]
    """Streams that sit this step out."""

    ahead: bool
    """Another pass is under way."""

    premature: bool = False
    """What that pass uses, or will give back, is needed: the step is to be planned after it."""

    skips: tuple[_Skip, ...] = ()
    scheduled: dict[RequestId, tuple[Tracked, int]] = field(
        default_factory=lambda: dict[RequestId, tuple[Tracked, int]]()
    )
    preempted: set[RequestId] = field(default_factory=lambda: set[RequestId]())

    @property
    def room(self) -> int:
        """Tokens of prompts that still fit."""
        return min(self.budget, self.prompt_budget)

    def schedule(self, tracked: Tracked, num_tokens: int) -> None:
        self.scheduled[tracked.request_id] = (tracked, num_tokens)
        self.budget -= num_tokens
        if num_tokens > 1:
            self.prompt_budget -= num_tokens

    def drop(self, tracked: Tracked) -> None:
        _, num_tokens = self.scheduled.pop(tracked.request_id, (tracked, 0))
        self.budget += num_tokens
        if num_tokens > 1:
            self.prompt_budget += num_tokens

    def outranked(self, level: int) -> Tracked | None:
        """Least urgent request whose share of a prompt should make way for one of `level`."""
        prompts = [t for t, num_tokens in self.scheduled.values() if num_tokens > 1]
        return max((t for t in prompts if t.level > level), key=lambda t: t.rank, default=None)


@dataclass(slots=True, eq=False)
class _Flight:
    """A plan that is neither committed nor given up."""

    plan: StepPlan
    ids: frozenset[RequestId]
    work: StepWork
    planned_at: float
    ahead: bool
    skips: tuple[_Skip, ...]


class Scheduler:
    """Continuous batching over one block manager, which no one else allocates from.

    The caller alternates `plan` and `commit`, or plans once more before it commits; every other
    method may be called at any moment, also between the two, while the planned pass is running.
    `now` is any clock that only runs forwards.

    With `num_stages` above 1 so many plans may be in flight, for the stages of a pipeline. None of
    them needs a token that another samples: each has its share of the streams, and later parts of
    prompts follow earlier ones.

    A sequence ends at `max_context_tokens` or at what the whole KV pool holds, whichever is less.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        *,
        eos_token_ids: Iterable[int],
        max_context_tokens: int,
    ) -> None:
        self._config = config
        self.blocks = blocks
        self.num_preemptions = 0
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_context_tokens = max_context_tokens
        self._num_arrived = 0
        self._requests: dict[RequestId, Tracked] = {}
        self._waiting = WaitingQueue(config.ageing_s)
        self._entitled: dict[RequestId, Tracked] = {}  # not preemptible, never admitted yet
        self._remote: dict[RequestId, Tracked] = {}  # in WAITING_REMOTE_KV
        self._running: list[Tracked] = []  # by rank
        self._parked: dict[RequestId, Tracked] = {}  # without a slot, blocks kept
        self._reservations: dict[RequestId, Reservation] = {}  # not yet taken
        self._aged: list[tuple[RequestId, int]] = []  # not yet taken
        self.num_stages = 1
        self._flights: list[_Flight] = []  # oldest first, at most two or one a stage
        self._deferred: dict[RequestId, Tracked] = {}  # ended while in flight, blocks still held
        self._preempted: list[RequestId] = []  # not yet announced in a plan
        self._left: list[RequestId] = []  # not yet announced in a plan
        self.cost = StepCost()
        self.num_steps = 0
        self.num_steps_ahead = 0
        """Of those, planned while the one before was computed."""

        self.num_discarded_rows = 0
        """Tokens sampled for requests that had ended."""

    @property
    def config(self) -> SchedulerConfig:
        return self._config

    @config.setter
    def config(self, config: SchedulerConfig) -> None:
        """New limits hold from the next decision on; whoever is admitted keeps its slot."""
        self._config = config
        self._waiting.ageing_s = config.ageing_s

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, preempted and parked ones included."""
        return len(self._waiting) + len(self._parked)

    @property
    def num_waiting_remote(self) -> int:
        """Admitted requests whose KV is on its way."""
        return len(self._remote)

    @property
    def num_in_flight(self) -> int:
        """Plans that were neither committed nor given up."""
        return len(self._flights)

    @property
    def has_work(self) -> bool:
        """A plan is in flight, or a request may be computed or admitted.

        `plan` may still answer None, while leases or imports hold what the next request needs: plan
        again after an event (an arrival, an end, a lease released or expired).
        """
        return (
            bool(self._flights)
            or any(not t.paused for t in (*self._running, *self._parked.values()))
            or self._waiting.most_urgent() is not None
        )

    def __contains__(self, request_id: RequestId) -> bool:
        """Is the request known and unfinished?"""
        return request_id in self._requests

    def token_ids(self, request_id: RequestId) -> tuple[int, ...]:
        """Prompt and output of an unfinished request."""
        return self._requests[request_id].known

    # Requests come and go

    def add(
        self,
        request: Request,
        now: float,
        *,
        remote: bool = False,
        hold_until: float | None = None,
    ) -> None:
        """Queue a request.

        remote: its KV will be imported. It is admitted like any other, at once if nobody waits
        ahead, and announced by `take_reservations`; then `kv_arrived` or `kv_failed` lets it run.

        hold_until: prefill role. The request finishes with its first token and keeps its blocks
        until then, though it may lose its slot for a while; from admission on they are leased under
        its own id until that deadline. The lease outlives the request, unless that is ended from
        outside before.

        Raises `RequestError` when the request could never run, `Overloaded` when the queue is full.
        """
        assert not (remote and hold_until is not None), "a prefill request imports nothing"
        self._check_fits(request)
        room = max(0, self.config.max_running_requests - self._num_admitted)
        if len(self._waiting) >= self.config.max_waiting_requests + room:
            raise Overloaded(
                f"{len(self._waiting)} requests are waiting, max_waiting_requests="
                f"{self.config.max_waiting_requests}: try again later or raise the limit"
            )
        tracked = Tracked(
            request=request,
            arrival=self._num_arrived,
            queued_at=now,
            limit_tokens=min(self._max_context_tokens, self.blocks.config.capacity_tokens),
            due_s=None if request.first_token_ms is None else now + request.first_token_ms / 1000,
            itl_s=None if request.itl_target_ms is None else request.itl_target_ms / 1000,
            remote=remote,
            hold_until=hold_until,
            token_ids=list(request.token_ids),
        )
        self._num_arrived += 1
        self._requests[request.request_id] = tracked
        self._waiting.append(tracked)
        if not request.preemptible and hold_until is None:
            self._entitled[request.request_id] = tracked
        if remote and self._waiting.first(now) is tracked and self._has_slot():
            self._reserve(tracked, now)

    def finish(self, request_id: RequestId, reason: FinishReason) -> bool:
        """End a request now, whatever it is doing. False: it is unknown or has ended already.

        If passes in flight compute it, its blocks are freed at the last one's `commit` and its
        tokens are dropped. An import into its blocks must have been stopped before.
        """
        tracked = self._requests.get(request_id)
        if tracked is None:
            return False
        self._end(tracked, reason)
        if self._flies(request_id):
            self._deferred[request_id] = tracked
        else:
            self._release(tracked)
        return True

    def renew(self, request_id: RequestId, deadline: float) -> None:
        """Move the deadline of a held request's lease, also of one that still waits for blocks."""
        tracked = self._requests.get(request_id)
        if tracked is not None and tracked.hold_until is not None:
            tracked.hold_until = deadline
        self.blocks.renew(request_id, deadline)

    def cancel(self, request_id: RequestId) -> bool:
        """`finish` for a client that went away."""
        return self.finish(request_id, FinishReason.CANCELLED)

    def pause(self, request_id: RequestId) -> bool:
        """Stop computing a request whose reader is slow. False: it is unknown or has ended.

        It keeps its blocks until somebody of its own or a more urgent priority lacks them.
        """
        return self._set_paused(request_id, True)

    def resume(self, request_id: RequestId) -> bool:
        return self._set_paused(request_id, False)

    # Imported KV

    def take_reservations(self) -> list[Reservation]:
        """Remote requests admitted since the last call, in order: import their KV now.

        To be asked after every `add` of a remote request and every `plan`, also one that is None.
        """
        reservations = list(self._reservations.values())
        self._reservations.clear()
        return reservations

    def take_aged(self) -> tuple[tuple[RequestId, int], ...]:
        """Requests admitted since the last call whose wait had raised them, each with its level."""
        if not self._aged:
            return ()
        aged = tuple(self._aged)
        self._aged.clear()
        return aged

    def kv_arrived(
        self, request_id: RequestId, first: SampledToken, now: float
    ) -> Committed | None:
        """KV of every known token is in the reserved blocks, and `first` is what follows them.

        None: the request ended while its KV was on the way.
        """
        tracked = self._remote.get(request_id)
        if tracked is None:
            return None
        tracked.num_computed = len(tracked.token_ids)
        self.blocks.commit(request_id, tracked.token_ids, tracked.num_computed)
        self._run(tracked)
        return self._append(tracked, first)

    def kv_failed(self, request_id: RequestId) -> bool:
        """Compute here what the local cache lacks. False: the request ended meanwhile."""
        tracked = self._remote.get(request_id)
        if tracked is None:
            return False
        self._run(tracked)
        return True

    def import_blocks(self, request_id: RequestId) -> tuple[int, ...]:
        """Table of a request whose KV is being imported; empty when that is not so."""
        return self.blocks.table(request_id) if request_id in self._remote else ()

    def set_aside(self, request_id: RequestId, lease_id: str, now: float) -> tuple[int, ...]:
        """The import of this request failed and may still write into its blocks: keep those under
        a lease, until it is released, and import or compute into others.

        Returns its table as it is now. Empty: the request ended meanwhile, or there are no other
        blocks; then it waits for some, and is computed here.
        """
        tracked = self._remote.get(request_id)
        if tracked is None:
            return ()
        first_block = tracked.num_computed // self.blocks.config.block_tokens
        if self.blocks.set_aside(lease_id, request_id, first_block):
            return self.blocks.table(request_id)
        self.blocks.free(request_id)
        del self._remote[request_id]
        self._reservations.pop(request_id, None)
        tracked.remote = False
        tracked.num_computed = 0
        tracked.move(State.PREEMPTED)
        self._waiting.put_back(tracked, now)
        return ()

    # Steps

    def plan(self, now: float) -> StepPlan | None:
        """Choose what the next pass computes. None: nothing can be computed now.

        The caller executes the plan and answers with `commit` or `abandon`. Before that it may plan
        once more, ahead: None then also where the step has to wait for that pass to be planned.
        """
        assert len(self._flights) < max(2, self.num_stages), "too many plans are in flight"
        step = self._begin_step(now)
        self._unpark(step, before_newcomers=True)
        self._plan_running(step)
        # Blocks taken from one request to keep others running are not for a newcomer, unless
        # nobody is left to use them.
        if not step.preempted or not step.scheduled:
            self._plan_waiting(step)
        self._unpark(step, before_newcomers=False)
        if step.premature or not step.scheduled:
            return None
        plan = StepPlan(
            chunks=tuple(self._chunk(t, n) for t, n in step.scheduled.values()),
            entered=tuple(self._enter(t) for t, _ in step.scheduled.values() if not t.entered),
            preempted=tuple(self._preempted),
            left=tuple(self._left),
            copies=self.blocks.take_copies(),
        )
        self._preempted.clear()
        self._left.clear()
        work = _work_of(step.scheduled.values())
        for tracked, num_tokens in step.scheduled.values():
            tracked.in_flight_samples += tracked.first_planned + num_tokens == (
                tracked.planned_tokens
            )
            tracked.in_flight_tokens += num_tokens
        # Who neither sits out nor fits waits on.
        skips = tuple(
            skip
            for skip in step.skips
            if skip.after is not None or skip.tracked.request_id in step.scheduled
        )
        for skip in skips:
            skip.apply()
        self._flights.append(_Flight(plan, frozenset(step.scheduled), work, now, step.ahead, skips))
        return plan

    def commit(
        self, plan: StepPlan, result: StepResult, now: float, *, took_s: float | None = None
    ) -> list[Committed]:
        """Take in what the oldest pass produced, in the order of the plan's chunks.

        took_s: how long it ran, where that is not the time since it was planned. With stages it is:
        a stream's next token is planned when this one has been through all of them.
        """
        flight = self._land(plan)
        self.blocks.settle_copies(plan.copies, made=True)
        seconds = now - flight.planned_at if took_s is None else took_s
        self.cost.observe(flight.work, max(0.0, seconds))
        self.num_steps += 1
        self.num_steps_ahead += flight.ahead
        committed: list[Committed] = []
        for chunk in plan.chunks:
            ended = self._deferred.get(chunk.request_id)
            tracked = ended or self._requests[chunk.request_id]
            self._come_down(tracked, chunk)
            # Who ended before its last token was known has KV of one token more than it knows.
            tracked.num_computed = min(chunk.end, len(tracked.token_ids))
            self.blocks.commit(chunk.request_id, tracked.token_ids, tracked.num_computed)
            if ended is not None:
                self.num_discarded_rows += chunk.sample
                self._release_deferred(ended)
            elif chunk.sample:
                committed.append(self._append(tracked, result.tokens[chunk.request_id]))
        return committed

    def abandon(self, plan: StepPlan, *, sampling: bool = False) -> None:
        """The oldest pass failed: none of its tokens count, and its requests want the same ones
        again. With several stages: once those in flight are committed, before which nothing may be
        planned.

        sampling: that is what failed, so that copies are made and later parts of its prompts, which
        may be in flight, follow KV that is there.
        """
        assert sampling or len(self._flights) == 1, "the plan ahead was not recalled"
        flight = self._land(plan)
        self.blocks.settle_copies(plan.copies, made=sampling)
        self._ground(flight)

    def recall(self, plan: StepPlan) -> None:
        """The newest pass, planned ahead, has not begun and will not: take its plan back."""
        flight = self._flights.pop()
        assert plan is flight.plan, "this plan is not the one made last"
        self.blocks.settle_copies(plan.copies, made=False)
        self._ground(flight)
        entered = {each.request_id for each in plan.entered}
        for request_id in entered:
            tracked = self._requests.get(request_id)
            if tracked is not None:
                tracked.entered = False
        # Nobody heard of those who entered with this plan, so they need not be said to have left.
        self._left[:] = [*plan.left, *(r for r in self._left if r not in entered)]
        self._preempted[:] = [*plan.preempted, *self._preempted]

    def check(self) -> None:
        """Assert every invariant, those of the block manager included."""
        self.blocks.check()
        waiting = {tracked.request_id for tracked in self._waiting}
        running = {tracked.request_id for tracked in self._running}
        assert len(waiting) == len(self._waiting), "the queue miscounts"
        assert len(running) == len(self._running), "a request runs twice"
        remote, parked = self._remote.keys(), self._parked.keys()
        assert self._requests.keys() == waiting | running | remote | parked, "a request is lost"
        assert len(waiting) + len(running) + len(remote) + len(parked) == len(self._requests), (
            "a request is in two places"
        )
        assert self._running == sorted(self._running, key=lambda t: t.rank), "running out of order"
        assert self.blocks.request_ids == running | remote | parked | self._deferred.keys(), (
            "blocks are held for a request that is not admitted"
        )
        assert self._entitled.keys() <= waiting, "a slot is due to one that has it or is gone"
        assert self._reservations.keys() <= self._remote.keys(), (
            "a reservation outlived its request"
        )
        flying = {request_id for flight in self._flights for request_id in flight.ids}
        assert self._deferred.keys() <= flying, "blocks wait for a pass that is over"
        for request_id, tracked in self._requests.items():
            flown = [c for f in self._flights for c in f.plan.chunks if c.request_id == request_id]
            assert tracked.in_flight_tokens == sum(len(c.token_ids) for c in flown), (
                f"{request_id}: tokens in flight"
            )
            assert tracked.in_flight_samples == sum(c.sample for c in flown), (
                f"{request_id}: samples in flight"
            )
            if request_id in waiting:
                assert tracked.state in (State.WAITING, State.PREEMPTED), f"{request_id}: state"
                assert tracked.num_computed == 0, f"{request_id}: computed without blocks"
                assert not tracked.entered, f"{request_id}: the executor keeps it while it waits"
            else:
                admitted = State.RUNNING if request_id in running else State.WAITING_REMOTE_KV
                if request_id in parked:
                    admitted = State.PARKED
                    assert not tracked.entered, f"{request_id}: the executor keeps it while parked"
                assert tracked.state is admitted, f"{request_id}: state"
                held = len(self.blocks.table(request_id)) * self.blocks.config.block_tokens
                assert tracked.first_planned <= held, f"{request_id}: computed beyond its blocks"
            assert tracked.num_computed < len(tracked.token_ids), (
                f"{request_id}: nothing to compute"
            )

    # Planning

    def _begin_step(self, now: float) -> _Step:
        """An empty step with the budgets that the targets of requests allow."""
        most = self.config.max_step_tokens
        ahead = bool(self._flights)
        if not self.config.pacing or all(t.itl_s is None for t in self._running):
            return _Step(now, most, most, frozenset(), ahead)
        decoding = [
            t
            for t in self._running
            if t.decoding and not t.paused and not t.ending and not self._elsewhere(t)
        ]
        streams = [
            Stream(
                t.level,
                t.itl_s,
                row_work(t.planned_tokens),
                0.0 if t.skipped_since is None else now - t.skipped_since,
            )
            for t in decoding
        ]
        decided = pace(
            self.cost,
            streams,
            self._demands(now),
            now=now,
            max_prompt_tokens=most,
            min_prompt_tokens=min(self.config.min_prompt_tokens, most),
            max_skip_s=self.config.ageing_s,
            num_stages=self.num_stages,
        )
        skipped = frozenset(decoding[i].request_id for i in decided.skipped)
        skips: list[_Skip] = []
        for tracked in decoding:
            since = tracked.skipped_since
            sits_out = tracked.request_id in skipped
            if sits_out == (since is None):
                skips.append(_Skip(tracked, since, now if sits_out else None))
        return _Step(now, most, decided.prompt_tokens, skipped, ahead, skips=tuple(skips))

    def _demands(self, now: float) -> Iterable[Demand]:
        """Prompts in sight: those that run, and the first that wait."""
        for t in self._running:
            if not t.decoding and not t.paused:
                left = t.planned_tokens - t.first_planned
                yield Demand(t.level, left, t.due_s, t.first_planned)
        for t in islice(self._waiting, _LOOK_AHEAD):
            if not t.remote and not t.paused:
                yield Demand(self._waiting.aged_priority(t, now), len(t.token_ids), t.due_s)

    def _plan_running(self, step: _Step) -> None:
        decoding = [t for t in self._running if t.decoding]
        prompting = [t for t in self._running if not t.decoding]
        share = -(-sum(not t.paused for t in decoding) // self.num_stages)
        for tracked in (*decoding, *prompting):
            if step.budget == 0:
                return
            if tracked.paused or tracked.state is not State.RUNNING:  # or preempted a moment ago
                continue
            if tracked.ending or self._elsewhere(tracked):
                continue
            if tracked.request_id in step.skipped:
                continue
            if tracked.decoding and len(step.scheduled) >= share:
                continue  # the others are for the other stages
            num_tokens = self._share(tracked, step)
            if num_tokens == 0:
                continue
            if self._extend(tracked, tracked.first_planned + num_tokens, step):
                step.schedule(tracked, num_tokens)
            elif step.premature:
                return

    def _elsewhere(self, tracked: Tracked) -> bool:
        """Does another stage compute what its next token follows from?"""
        return self.num_stages > 1 and tracked.in_flight_samples > 0

    def _extend(self, tracked: Tracked, num_tokens: int, step: _Step) -> bool:
        """Get blocks for `num_tokens` positions, at the cost of requests that are no more urgent.

        Less urgent ones go first, of those the preemptible, but the others too where that is not
        enough: what may not be preempted keeps its slot, and no memory that more urgent ones need.
        """
        while not self.blocks.extend(tracked.request_id, num_tokens):
            if step.ahead:
                step.premature = True
                return False
            victim = max(
                (t for t in self._running if t.hold_until is None and t.level >= tracked.level),
                key=lambda t: (
                    t.level > tracked.level,
                    t.request.preemptible,
                    t.level,
                    t.paused,
                    t.arrival,
                ),
            )
            self._preempt(victim, step)
            if victim is tracked:
                return False
        return True

    def _plan_waiting(self, step: _Step) -> None:
        self._admit_waiting(step)
        while not step.premature and self._admit_entitled(step):
            pass
        # Those who end with the pass under way leave their slots and blocks to the next in line.
        if step.ahead and self.num_stages == 1 and any(t.ending for t in self._running):
            step.premature |= self._waiting.first(step.now) is not None

    def _admit_waiting(self, step: _Step) -> None:
        while not step.premature and (tracked := self._waiting.first(step.now)) is not None:
            if step.room == 0 and not tracked.remote:
                level = self._waiting.aged_priority(tracked, step.now)
                if step.outranked(level) is None:
                    return
            if not self._admit(tracked, step):
                # No one overtakes the first in the queue, or large prompts would never get in. One
                # that is urgent in its own right may take what less urgent ones hold.
                urgent = self._waiting.most_urgent()
                if urgent is None or not self._admit_by_preempting(urgent, step):
                    return

    def _admit(self, tracked: Tracked, step: _Step) -> bool:
        if tracked.request_id in step.preempted or not self._has_slot():
            return False
        if not self._reserve(tracked, step.now):
            return False
        if tracked.state is State.RUNNING:
            self._schedule_admitted(tracked, step)
        return True

    def _schedule_admitted(self, tracked: Tracked, step: _Step) -> None:
        outranked = step.outranked(tracked.level) if step.room == 0 else None
        if outranked is not None:
            step.drop(outranked)
        for candidate in (tracked, outranked):
            if candidate is not None and (share := self._share(candidate, step)) > 0:
                step.schedule(candidate, share)

    def _admit_by_preempting(self, tracked: Tracked, step: _Step) -> bool:
        priority = tracked.request.priority
        victims = [
            t
            for t in self._running
            # A paused one makes way for its equals: a slow reader stalls only itself.
            if (
                t.preemptible
                and (t.level > priority or (t.paused and t.request.priority >= priority))
            )
            or (t.parkable and t.level > priority)
        ]
        if tracked.request_id in step.preempted:
            return False
        if self._outranks_held(priority) and self._admit(tracked, step):
            return True  # the first in the queue had to leave blocks for this one
        if not victims or not self._has_slot(freeing=len(victims)):
            return False
        if not self._leaves_reserve(tracked, step.now):
            return False
        if not self.blocks.fits(
            tracked.known,
            tracked.request.salt,
            len(tracked.known),
            freeing=[t.request_id for t in victims if t.preemptible],
        ):
            return False
        if step.ahead:
            step.premature = True
            return False
        for victim in sorted(victims, key=lambda t: (t.level, t.paused, t.arrival), reverse=True):
            if victim.preemptible:
                self._preempt(victim, step)
            elif not self._has_slot():
                self._park(victim, step)
            if self._admit(tracked, step):
                return True
        return False

    def _admit_entitled(self, step: _Step) -> bool:
        """Admit one that may not be preempted and was overtaken on its way to its slot.

        Whoever came later and went first was to have the slot of somebody less urgent than itself,
        and took this one's instead.
        """
        tracked = next((t for t in self._entitled.values() if not t.paused), None)
        if tracked is None or not self._has_slot(freeing=1) or self._has_slot():
            return False
        victim = max(
            (t for t in self._running if t.preemptible),
            key=lambda t: (t.level, t.paused, t.arrival),
            default=None,
        )
        if victim is None or not any(
            t.arrival > tracked.arrival and t.request.priority < victim.level
            for t in (*self._running, *self._remote.values())
        ):
            return False
        known, salt = tracked.known, tracked.request.salt
        if not self.blocks.fits(known, salt, len(known), freeing=[victim.request_id]):
            return False
        if step.ahead:
            step.premature = True
            return False
        self._preempt(victim, step)
        return self._admit(tracked, step)

    def _share(self, tracked: Tracked, step: _Step) -> int:
        """Tokens of this request that the step computes."""
        wanted = tracked.planned_tokens - tracked.first_planned
        room = step.budget if wanted == 1 else step.room
        return min(wanted, room, self.config.max_chunk_tokens)

    def _chunk(self, tracked: Tracked, num_tokens: int) -> Chunk:
        first = tracked.first_planned
        end = first + num_tokens
        known = tuple(tracked.token_ids[first:end])
        table = self.blocks.table(tracked.request_id)
        num_blocks = self.blocks.config.blocks_for(end)
        return Chunk(
            request_id=tracked.request_id,
            first_token=first,
            token_ids=known or (PENDING,),
            blocks=table if len(table) == num_blocks else table[:num_blocks],
            sample=end == tracked.planned_tokens,
        )

    def _enter(self, tracked: Tracked) -> Entered:
        tracked.entered = True
        return Entered(
            request_id=tracked.request_id,
            params=tracked.request.params,
            token_ids=tracked.known,
            num_prompt_tokens=len(tracked.request.prompt_ids),
        )

    # Slots and blocks

    @property
    def _num_admitted(self) -> int:
        return len(self._running) + len(self._remote)

    def _has_slot(self, *, freeing: int = 0) -> bool:
        return self._num_admitted - freeing < self.config.max_running_requests

    def _reserve(self, tracked: Tracked, now: float) -> bool:
        """Admit a waiting request if there are blocks for all it knows."""
        request_id, known = tracked.request_id, tracked.known
        if not self._leaves_reserve(tracked, now):
            return False
        num_cached = self.blocks.allocate(
            request_id,
            known,
            tracked.request.salt,
            len(known),
            copies=not tracked.remote,  # what arrives is whole, and no step has to run before it
        )
        if num_cached is None:
            return False
        tracked.level = self._waiting.aged_priority(tracked, now)
        if tracked.level < tracked.request.priority:
            self._aged.append((request_id, tracked.level))
        tracked.waited_s = now - tracked.queued_at
        tracked.num_computed = num_cached
        if tracked.num_cached is None:
            tracked.num_cached = min(num_cached, len(tracked.request.prompt_ids))
        self._waiting.remove(tracked)
        self._entitled.pop(request_id, None)
        if tracked.hold_until is not None:
            self.blocks.lease(request_id, request_id, tracked.hold_until)
        if tracked.remote:
            tracked.move(State.WAITING_REMOTE_KV)
            self._remote[request_id] = tracked
            self._reservations[request_id] = Reservation(
                request_id=request_id,
                blocks=self.blocks.table(request_id),
                num_cached_tokens=num_cached,
            )
        else:
            self._run(tracked)
        return True

    def _run(self, tracked: Tracked) -> None:
        self._remote.pop(tracked.request_id, None)
        self._reservations.pop(tracked.request_id, None)
        tracked.remote = False  # should it be preempted, it is computed here
        tracked.move(State.RUNNING)
        insort(self._running, tracked, key=lambda t: t.rank)

    def _preempt(self, victim: Tracked, step: _Step) -> None:
        step.drop(victim)
        victim.move(State.PREEMPTED)
        victim.num_computed = 0
        self._running.remove(victim)
        self.blocks.free(victim.request_id)
        self._waiting.put_back(victim, step.now)
        self._leave(victim)
        step.preempted.add(victim.request_id)
        self._preempted.append(victim.request_id)
        self.num_preemptions += 1

    def _park(self, victim: Tracked, step: _Step) -> None:
        step.drop(victim)
        victim.move(State.PARKED)
        victim.parked_at = step.now
        self._running.remove(victim)
        self._parked[victim.request_id] = victim
        self._leave(victim)
        self._preempted.append(victim.request_id)
        self.num_preemptions += 1

    def _unpark(self, step: _Step, *, before_newcomers: bool) -> None:
        """Give free slots back, the most urgent first. Time without one counts like time in the
        queue. Newcomers that are more urgent come first, and what they leave is for the parked: the
        blocks that a newcomer waits for may be theirs."""
        if not self._parked or step.premature:
            return
        urgent = self._waiting.most_urgent() if before_newcomers else None
        parked = [(self._parked_level(t, step.now), t) for t in self._parked.values()]
        for level, tracked in sorted(parked, key=lambda each: (each[0], each[1].arrival)):
            if not self._has_slot() or (urgent is not None and urgent.request.priority < level):
                return
            if tracked.paused:
                continue
            del self._parked[tracked.request_id]
            tracked.level = level
            tracked.move(State.RUNNING)
            insort(self._running, tracked, key=lambda t: t.rank)
            if not before_newcomers and (share := self._share(tracked, step)) > 0:
                step.schedule(tracked, share)

    def _parked_level(self, tracked: Tracked, now: float) -> int:
        waited_s = max(0.0, now - tracked.parked_at)
        return tracked.level - int(waited_s // self.config.ageing_s)

    def _held(self) -> Iterable[Tracked]:
        """Admitted prompts for other replicas that are not whole yet."""
        for tracked in (*self._running, *self._parked.values()):
            if tracked.hold_until is not None:
                yield tracked

    def _outranks_held(self, level: int) -> bool:
        return any(t.level > level for t in self._held())

    def _leaves_reserve(self, tracked: Tracked, now: float) -> bool:
        """May this one have its blocks, for all that more urgent prompts may need soon?"""
        pool = self.blocks.config
        reserve = int(self.config.urgent_kv_reserve * (pool.num_blocks - 1))
        if tracked.hold_until is None or not reserve or next(iter(self._held()), None) is None:
            return True
        if self._outranks_held(self._waiting.aged_priority(tracked, now)):
            return True
        num_tokens = len(tracked.known) + reserve * pool.block_tokens
        return self.blocks.fits(tracked.known, tracked.request.salt, num_tokens)

    def _append(self, tracked: Tracked, token: SampledToken) -> Committed:
        finish = tracked.append(token.token_id, self._eos_token_ids)
        if finish is not None:
            self._end(tracked, finish)
            if self._flies(tracked.request_id):
                self._deferred[tracked.request_id] = tracked
            else:
                # A lease on them stays: the hand-over begins.
                self.blocks.free(tracked.request_id)
        return Committed(
            request_id=tracked.request_id,
            token=token,
            finish=finish,
            num_cached_tokens=tracked.num_cached or 0,
        )

    def _end(self, tracked: Tracked, reason: FinishReason) -> None:
        """Take a request out of every list. Its blocks are the caller's business."""
        request_id = tracked.request_id
        del self._requests[request_id]
        if tracked.state is State.RUNNING:
            self._running.remove(tracked)
        elif tracked.state is State.PARKED:
            del self._parked[request_id]
        elif tracked.state is State.WAITING_REMOTE_KV:
            del self._remote[request_id]
            self._reservations.pop(request_id, None)
        else:
            self._waiting.remove(tracked)
            self._entitled.pop(request_id, None)
        tracked.move(State.FINISHED)
        tracked.finish = reason
        self._leave(tracked)

    def _release(self, tracked: Tracked) -> None:
        """Free what a request that ended early holds; nobody will ask for its prefilled KV."""
        if self.blocks.holds(tracked.request_id):
            self.blocks.free(tracked.request_id)
        if tracked.hold_until is not None:
            self.blocks.release(tracked.request_id)

    def _leave(self, tracked: Tracked) -> None:
        if tracked.entered:
            tracked.entered = False
            self._left.append(tracked.request_id)

    def _flies(self, request_id: RequestId) -> bool:
        """Does a pass that is planned or under way compute it?"""
        return any(request_id in flight.ids for flight in self._flights)

    def _land(self, plan: StepPlan) -> _Flight:
        assert self._flights, "no plan is in flight"
        flight = self._flights.pop(0)
        assert plan is flight.plan, "this plan is not the oldest in flight"
        return flight

    def _come_down(self, tracked: Tracked, chunk: Chunk) -> None:
        tracked.in_flight_tokens -= len(chunk.token_ids)
        tracked.in_flight_samples -= chunk.sample

    def _ground(self, flight: _Flight) -> None:
        """None of the plan's chunks is computed."""
        for skip in flight.skips:
            skip.take_back()
        for chunk in flight.plan.chunks:
            ended = self._deferred.get(chunk.request_id)
            self._come_down(ended or self._requests[chunk.request_id], chunk)
            if ended is not None:
                self._release_deferred(ended)

    def _release_deferred(self, ended: Tracked) -> None:
        """Free what it holds, unless another pass computes it."""
        if not self._flies(ended.request_id):
            del self._deferred[ended.request_id]
            self._release(ended)

    def _set_paused(self, request_id: RequestId, paused: bool) -> bool:
        tracked = self._requests.get(request_id)
        if tracked is None:
            return False
        tracked.paused = paused
        return True

    def _check_fits(self, request: Request) -> None:
        if request.request_id in self._requests or request.request_id in self._deferred:
            raise RequestError(
                f"request_id={request.request_id!r} is in use: choose one that is unique",
                param="request_id",
            )
        num_tokens, pool = request.num_tokens, self.blocks.config
        if num_tokens + 1 > self._max_context_tokens:
            raise RequestError(
                f"the request has {num_tokens} tokens and needs room for one more: the context is "
                f"limited to {self._max_context_tokens} tokens; shorten the prompt",
                code="context_length_exceeded",
                param="messages",
            )
        if num_tokens + 1 > pool.capacity_tokens:
            raise RequestError(
                f"the request has {num_tokens} tokens and needs room for one more: the KV pool "
                f"holds {pool.capacity_tokens} tokens ({pool.num_blocks - 1} blocks of "
                f"{pool.block_tokens}); shorten the prompt or give the pool more memory",
                code="context_length_exceeded",
                param="messages",
            )


def _work_of(scheduled: Iterable[tuple[Tracked, int]]) -> StepWork:
    rows = prompt_tokens = reads = 0
    for tracked, num_tokens in scheduled:
        if num_tokens == 1:
            rows += 1
            reads += tracked.first_planned + 1
        else:
            part = prompt_work(tracked.first_planned, num_tokens)
            prompt_tokens += part.prompt_tokens
            reads += part.reads
    return StepWork(rows, prompt_tokens, reads)
