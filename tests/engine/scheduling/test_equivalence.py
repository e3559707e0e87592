"""The same tokens, whatever the schedule: alone, batched, chunked, preempted, cached, imported.

The fake model keeps a real (if tiny) KV pool: a cell depends on its token and on every cell before
it, and the next token on all cells of the sequence, read through the block table. A wrong table, a
block shared wrongly or freed too early, or a token sampled too soon changes what comes out.
"""

from collections import deque
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.cache import BlockManager
from engine.config import CacheConfig, SchedulerConfig
from engine.request import FinishReason, Request, SampledToken, SamplingParams
from engine.scheduling import Scheduler, StepResult
from engine.scheduling.plan import resolved

EOS = 0
VOCAB = 12
MASK = (1 << 61) - 1


def mix(a, b):
    return (a * 6364136223846793005 + b * 1442695040888963407 + 1) & MASK


def cells_of(token_ids, before=17):
    cells = []
    for token_id in token_ids:
        before = mix(before, token_id)
        cells.append(before)
    return cells


def next_token(cells, seed):
    total = seed
    for cell in cells:
        total = mix(total, cell)
    return (total >> 20) % VOCAB


def expected(request):
    """What the request must emit, computed without any scheduler, and how it ends."""
    params, tokens, emitted = request.params, list(request.token_ids), []
    while True:
        token = next_token(cells_of(tokens), params.seed)
        tokens.append(token)
        emitted.append(token)
        num_output = len(tokens) - len(request.prompt_ids)
        ends = (token == EOS and not params.ignore_eos) or token in params.stop_token_ids
        if ends and num_output >= params.min_tokens:
            return emitted, FinishReason.STOP
        if num_output == params.max_tokens:
            return emitted, FinishReason.LENGTH


class FakeExecutor:
    """A pool of cells and the per-request state that a sampler would keep."""

    def __init__(self, blocks):
        self.blocks = blocks
        self.block_tokens = blocks.config.block_tokens
        self.pool = {}
        self.known = {}
        self.seeds = {}
        self.num_copies = 0

    def slots(self, table, first, end):
        pages = [(table[p // self.block_tokens], p % self.block_tokens) for p in range(first, end)]
        assert all(block != 0 for block, _ in pages)
        return pages

    def read(self, table, end):
        return [self.pool[slot] for slot in self.slots(table, 0, end)]

    def write(self, table, first, token_ids):
        before = self.read(table, first)[-1] if first else 17
        slots = self.slots(table, first, first + len(token_ids))
        self.pool.update(zip(slots, cells_of(token_ids, before), strict=True))
        return slots

    def poison(self):
        """Worthless blocks may hold anything."""
        for block in self.blocks._blank:
            for offset in range(self.block_tokens):
                self.pool[block, offset] = -1

    def copy(self, copies):
        """Behind what is asked for, a target may hold anything."""
        for copy in copies:
            for offset in range(self.block_tokens):
                wanted = offset < copy.num_tokens
                self.pool[copy.target, offset] = self.pool[copy.source, offset] if wanted else -1
        self.num_copies += len(copies)

    def execute(self, plan):
        self.poison()
        self.copy(plan.copies)
        for request_id in plan.left:
            del self.known[request_id]
        for entered in plan.entered:
            assert entered.request_id not in self.known, "entered twice without leaving"
            self.known[entered.request_id] = list(entered.token_ids)
            self.seeds[entered.request_id] = entered.params.seed
        written = [s for c in plan.chunks for s in self.write(c.blocks, c.first_token, c.token_ids)]
        assert len(set(written)) == len(written), "two requests write the same slot"
        tokens = {}
        for chunk in plan.chunks:
            known = self.known[chunk.request_id]
            assert tuple(known[chunk.first_token : chunk.end]) == chunk.token_ids
            assert chunk.sample == (chunk.end == len(known)), "sampled an unfinished prompt"
            assert len(chunk.blocks) == self.blocks.config.blocks_for(chunk.end)
            if chunk.sample:
                cells = self.read(chunk.blocks, chunk.end)
                tokens[chunk.request_id] = next_token(cells, self.seeds[chunk.request_id])
        for request_id, token in tokens.items():
            self.known[request_id].append(token)
        return StepResult({r: SampledToken(t) for r, t in tokens.items()})

    def forget(self, result):
        """What was sampled does not count."""
        for request_id in result.tokens:
            if request_id in self.known:  # it may have left by a later plan
                self.known[request_id].pop()

    def import_kv(self, reservation, token_ids):
        """What a transport does: fill the reserved blocks beyond the cached prefix."""
        first = reservation.num_cached_tokens
        self.write(reservation.blocks, first, token_ids[first:])

    def import_garbage(self, reservation, token_ids):
        first = reservation.num_cached_tokens
        for slot in self.slots(reservation.blocks, first, len(token_ids)):
            self.pool[slot] = -2


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One way to serve a workload. Blocks beyond the largest request's own make the pool roomy."""

    block_tokens: int = 4
    spare_blocks: int = 200
    slots: int = 8
    step_tokens: int = 64
    chunk_tokens: int = 64
    prefix_caching: bool = True
    reuse_tokens: int | None = None
    alone: bool = False
    warm: bool = False
    remote: bool = False
    others: bool = False
    """Strangers with the same prompts come along and are cancelled on the way."""

    stages: int = 1
    """Plans under way at once, each over requests of its own."""

    failing: int = 0
    """Of so many passes one computes its KV but samples nothing. 0: none does."""

    ahead: bool = False
    """A step is planned while the one before is computed."""


def make_engine(requests, setup):
    largest = max(len(r.prompt_ids) + r.params.max_tokens for r in requests)
    cache = CacheConfig(
        num_blocks=1 + -(-largest // setup.block_tokens) + setup.spare_blocks,
        block_tokens=setup.block_tokens,
        prefix_caching=setup.prefix_caching,
        reuse_tokens=setup.reuse_tokens,
    )
    limits = SchedulerConfig(
        max_running_requests=setup.slots,
        max_step_tokens=setup.step_tokens,
        max_chunk_tokens=setup.chunk_tokens,
        ageing_s=3.0,
    )
    blocks = BlockManager(cache, "fake")
    scheduler = Scheduler(limits, blocks, eos_token_ids=(EOS,), max_context_tokens=10_000)
    scheduler.num_stages = setup.stages
    return scheduler, FakeExecutor(blocks)


class Served:
    """Collects what each request emitted."""

    def __init__(self, scheduler, executor, ahead=False):
        self.scheduler = scheduler
        self.executor = executor
        self.failing = 0
        self.draining = False
        self.num_landed = 0
        self.ahead = ahead
        self.now = 0.0
        self.under_way = deque()
        self.most_under_way = 0
        self.out = {}
        self.finish = {}
        self.flights = []
        self.num_ahead = 0
        self.last = StepResult({})

    def take(self, committed):
        for c in committed:
            assert c.request_id not in self.finish, "a token after the last"
            self.out.setdefault(c.request_id, []).append(c.token.token_id)
            if c.finish is not None:
                self.finish[c.request_id] = c.finish

    def import_reserved(self):
        for reservation in self.scheduler.take_reservations():
            token_ids = self.scheduler.token_ids(reservation.request_id)
            self.executor.import_kv(reservation, token_ids)
            seed = self.scheduler._requests[reservation.request_id].request.params.seed
            token = SampledToken(next_token(cells_of(token_ids), seed))
            self.take([self.scheduler.kv_arrived(reservation.request_id, token, self.now)])

    def step(self):
        """Plan for every stage that is free, then commit the oldest plan."""
        if self.ahead:
            return self.step_ahead()
        self.now += 1.0
        while len(self.under_way) < self.scheduler.num_stages and not self.draining:
            plan = self.scheduler.plan(self.now)
            self.import_reserved()
            self.scheduler.check()
            if plan is None:
                break
            self.under_way.append((plan, self.executor.execute(plan)))
        self.most_under_way = max(self.most_under_way, len(self.under_way))
        if not self.under_way:
            return None
        plan, result = self.under_way.popleft()
        self.num_landed += 1
        if self.failing and self.num_landed % self.failing == 0:
            self.executor.forget(result)
            self.scheduler.abandon(plan, sampling=self.scheduler.num_stages > 1)
            self.draining = True
        else:
            self.take(self.scheduler.commit(plan, result, self.now))
        self.draining = self.draining and bool(self.under_way)
        self.scheduler.check()
        return plan

    def step_ahead(self):
        """Plan behind the pass under way, let that end, begin the next, take in the first."""
        self.now += 1.0
        if not self.flights:
            self.put(self.scheduler.plan(self.now))
        if not self.flights:
            return
        self.put(self.scheduler.plan(self.now))
        self.import_reserved()
        plan = self.flights.pop(0)
        self.last = self.executor.execute(resolved(plan, self.last))
        self.take(self.scheduler.commit(plan, self.last, self.now))
        self.scheduler.check()

    def put(self, plan):
        if plan is not None:
            self.num_ahead += bool(self.flights)
            self.flights.append(plan)

    def run(self, most=3000):
        for _ in range(most):
            self.import_reserved()
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the schedule makes no progress")


def serve(requests, setup):
    served = Served(*make_engine(requests, setup), ahead=setup.ahead)
    served.failing = setup.failing
    scheduler = served.scheduler
    if setup.warm:
        for request in requests:
            scheduler.add(replace(request, request_id=f"warm {request.request_id}"), 0.0)
        served.run()
    for request in requests:
        scheduler.add(request, served.now, remote=setup.remote)
        if setup.others:
            stranger = replace(request, request_id=f"stranger {request.request_id}")
            scheduler.add(stranger, served.now, remote=setup.remote)
            served.step()
            scheduler.cancel(stranger.request_id)
        if setup.alone:
            served.run()
    served.run()
    assert scheduler.blocks.num_held_blocks == 0
    assert scheduler.blocks.num_leases == 0
    return served, scheduler


@st.composite
def requests(draw, request_id):
    common = draw(st.sampled_from([(), (1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 3, 4, 9, 9)]))
    own = draw(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=12))
    max_tokens = draw(st.integers(1, 14))
    request = Request(
        request_id=request_id,
        prompt_ids=(*common, *own),
        params=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)),
            seed=draw(st.integers(0, 3)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from([(), (3,)])),
        ),
        priority=draw(st.integers(0, 2)),
        salt=draw(st.sampled_from(["", "tenant"])),
    )
    emitted, _ = expected(request)
    # A migrated request brings what it has emitted elsewhere.
    return replace(request, output_ids=tuple(emitted[: draw(st.integers(0, len(emitted) - 1))]))


workloads = st.integers(1, 5).flatmap(lambda n: st.tuples(*(requests(f"r{i}") for i in range(n))))

SETUPS = {
    "alone": Setup(alone=True),
    "batched": Setup(),
    "without cache": Setup(prefix_caching=False),
    "chunk of 7": Setup(chunk_tokens=7, step_tokens=10),
    "chunk of 1": Setup(chunk_tokens=1, step_tokens=3),
    "tiny pool": Setup(spare_blocks=0, block_tokens=2),
    "tiny pool without cache": Setup(spare_blocks=1, block_tokens=2, prefix_caching=False),
    "tiny pool, chunks": Setup(spare_blocks=2, block_tokens=2, chunk_tokens=3, step_tokens=5),
    "few slots": Setup(slots=2),
    "blocks of 1": Setup(block_tokens=1),
    "blocks of 16": Setup(block_tokens=16),
    "warm prefix": Setup(warm=True),
    "remote": Setup(remote=True),
    "remote, tiny pool": Setup(remote=True, spare_blocks=1, block_tokens=2),
    "remote, warm": Setup(remote=True, warm=True),
    "cancelled others": Setup(others=True, chunk_tokens=5),
    "cancelled others, tiny pool": Setup(others=True, spare_blocks=2, block_tokens=2),
    "copied parts": Setup(others=True, block_tokens=8, reuse_tokens=2, chunk_tokens=5),
    "copied parts, tiny pool": Setup(others=True, block_tokens=4, reuse_tokens=1, spare_blocks=1),
    "two stages": Setup(stages=2, chunk_tokens=5),
    "three stages, tiny pool": Setup(stages=3, spare_blocks=1, block_tokens=2, chunk_tokens=3),
    "two stages, few slots": Setup(stages=2, slots=2, warm=True),
    "two stages, remote": Setup(stages=2, remote=True, spare_blocks=1, block_tokens=2),
    "two stages, failing": Setup(stages=2, failing=3, chunk_tokens=3, step_tokens=5),
    "three stages, failing, copied parts": Setup(
        stages=3, failing=4, chunk_tokens=3, reuse_tokens=2, block_tokens=8, others=True
    ),
    "failing": Setup(failing=2, chunk_tokens=3),
    "three stages, cancelled others": Setup(stages=3, others=True, reuse_tokens=2, block_tokens=8),
    "ahead": Setup(ahead=True, slots=3),
    "ahead, chunks, tiny pool": Setup(
        ahead=True, spare_blocks=2, block_tokens=2, chunk_tokens=3, step_tokens=5
    ),
    "ahead, remote, tiny pool": Setup(ahead=True, remote=True, spare_blocks=1, block_tokens=2),
    "ahead, cancelled others, tiny pool": Setup(
        ahead=True, others=True, spare_blocks=2, block_tokens=2
    ),
    "ahead, copied parts": Setup(
        ahead=True, others=True, block_tokens=8, reuse_tokens=2, chunk_tokens=5
    ),
}


@pytest.mark.parametrize("name", SETUPS)
@given(workload=workloads)
@settings(max_examples=25, deadline=None)
def test_every_schedule_emits_the_same_tokens(name, workload):
    served, _ = serve(workload, SETUPS[name])
    for request in workload:
        emitted, finish = expected(request)
        assert served.out[request.request_id] == emitted
        assert served.finish[request.request_id] is finish


def test_a_tiny_pool_does_preempt():
    workload = [
        Request(
            request_id=f"r{i}",
            prompt_ids=(i, 5, 5, 5),
            params=SamplingParams(max_tokens=14, ignore_eos=True),
        )
        for i in range(1, 5)
    ]
    served, scheduler = serve(workload, Setup(spare_blocks=1, block_tokens=2))
    assert scheduler.num_preemptions > 3
    assert served.out == {r.request_id: expected(r)[0] for r in workload}


def test_stages_share_streams_and_follow_prompts():
    """Four streams on two stages: two each; then a prompt, whose parts follow each other."""
    workload = [
        Request(
            request_id=f"r{i}",
            prompt_ids=(i, 5),
            params=SamplingParams(max_tokens=30, ignore_eos=True),
        )
        for i in range(1, 5)
    ]
    scheduler, executor = make_engine(workload, Setup(stages=2, chunk_tokens=4, step_tokens=6))
    served = Served(scheduler, executor)
    for request in workload:
        scheduler.add(request, 0.0)
    for _ in range(6):
        served.step()
    assert [len(plan.chunks) for plan, _ in served.under_way] == [2]
    long = replace(workload[0], request_id="long", prompt_ids=(7,) * 12)
    scheduler.add(long, served.now)
    plans = [served.step() for _ in range(4)][1:]
    parts = [[c for c in plan.chunks if c.request_id == "long"] for plan in plans]
    assert [[c.first_token for c in part] for part in parts] == [[0], [4], [8]]
    streams = [{c.request_id for c in plan.chunks} - {"long"} for plan in plans]
    assert streams[0] == streams[2]
    assert streams[0] | streams[1] == {"r1", "r2", "r3", "r4"}
    assert not streams[0] & streams[1]
    served.run()
    assert served.most_under_way == 2
    assert served.out == {r.request_id: expected(r)[0] for r in (*workload, long)}


def test_a_step_is_planned_ahead_unless_somebody_waits_for_what_the_pass_gives_back():
    def request(name, max_tokens):
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return Request(request_id=name, prompt_ids=(1, 2, 3), params=params)

    workload = [request("a", 9), request("b", 4), request("c", 2)]
    served, scheduler = serve(workload, Setup(ahead=True, slots=2))
    # Eight of nine steps of "a" come after another. In one of them "b" ends, and "c" waits for it.
    assert (scheduler.num_steps, scheduler.num_steps_ahead) == (9, 7)
    assert scheduler.num_discarded_rows == 0
    assert served.out == {r.request_id: expected(r)[0] for r in workload}


def test_parts_of_blocks_are_copied():
    workload = [
        Request(
            request_id=f"r{i}",
            prompt_ids=(*range(1, 7), i),
            params=SamplingParams(max_tokens=4, ignore_eos=True),
        )
        for i in (8, 9)
    ]
    served, _ = serve(workload, Setup(block_tokens=16, reuse_tokens=2, alone=True))
    assert served.executor.num_copies == 1
    assert served.out == {r.request_id: expected(r)[0] for r in workload}


class SchedulerMachine(RuleBasedStateMachine):
    """Everything at any moment: arrivals, cancels, pauses, imports, leases, failed passes."""

    reuse_tokens = None

    def __init__(self):
        super().__init__()
        cache = CacheConfig(num_blocks=15, block_tokens=2, reuse_tokens=self.reuse_tokens)
        limits = SchedulerConfig(
            max_running_requests=3, max_step_tokens=8, max_chunk_tokens=5, ageing_s=3.0
        )
        blocks = BlockManager(cache, "fake")
        scheduler = Scheduler(limits, blocks, eos_token_ids=(EOS,), max_context_tokens=10_000)
        self.executor = FakeExecutor(blocks)
        self.scheduler = scheduler
        self.served = Served(scheduler, self.executor)
        self.requests = {}
        self.held = set()
        self.cancelled = set()
        self.importing = {}
        self.plan = None

    def alive(self):
        return sorted(r for r in self.requests if r in self.scheduler)

    def collect(self):
        for reservation in self.scheduler.take_reservations():
            self.importing[reservation.request_id] = reservation

    @rule(data=st.data(), kind=st.sampled_from(["local", "local", "remote", "held"]))
    def add(self, data, kind):
        request = data.draw(requests(f"r{len(self.requests)}"))
        prompt = request.prompt_ids[:12]
        request = replace(
            request,
            prompt_ids=prompt,
            output_ids=() if prompt != request.prompt_ids else request.output_ids,
        )
        hold_until = None
        if kind == "held":
            hold_until = self.served.now + data.draw(st.integers(0, 20))
            self.held.add(request.request_id)
        self.requests[request.request_id] = request
        self.scheduler.add(request, self.served.now, remote=kind == "remote", hold_until=hold_until)
        self.collect()

    @precondition(lambda self: self.plan is None)
    @rule(passed=st.integers(0, 4))
    def begin_step(self, passed):
        self.served.now += passed
        self.plan = self.scheduler.plan(self.served.now)
        self.collect()
        if self.plan is None:
            return
        assert 0 < self.plan.num_tokens <= 8
        assert all(len(c.token_ids) <= 5 for c in self.plan.chunks)
        assert len({c.request_id for c in self.plan.chunks}) == len(self.plan.chunks)
        assert self.scheduler.num_running + self.scheduler.num_waiting_remote <= 3
        for request_id in self.held & set(self.plan.preempted):  # parked, its blocks are read
            assert self.scheduler.blocks.holds(request_id)
        self.result = self.executor.execute(self.plan)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def end_step(self):
        plan, self.plan = self.plan, None
        committed = self.scheduler.commit(plan, self.result, self.served.now)
        assert not {c.request_id for c in committed} & self.cancelled
        self.served.take(committed)

    @precondition(lambda self: self.plan is not None)
    @rule()
    def step_fails(self):
        plan, self.plan = self.plan, None
        self.scheduler.abandon(plan)
        for request_id in self.result.tokens:
            self.executor.known[request_id].pop()

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def cancel(self, data):
        request_id = data.draw(st.sampled_from(self.alive()))
        self.importing.pop(request_id, None)
        assert self.scheduler.cancel(request_id)
        assert not self.scheduler.cancel(request_id)
        self.cancelled.add(request_id)

    @precondition(lambda self: self.alive())
    @rule(data=st.data(), paused=st.booleans())
    def pause_or_resume(self, data, paused):
        request_id = data.draw(st.sampled_from(self.alive()))
        assert (self.scheduler.pause if paused else self.scheduler.resume)(request_id)

    @precondition(lambda self: self.importing)
    @rule(data=st.data(), fails=st.booleans())
    def import_ends(self, data, fails):
        request_id = data.draw(st.sampled_from(sorted(self.importing)))
        self.end_import(request_id, fails)

    def end_import(self, request_id, fails):
        reservation = self.importing.pop(request_id)
        request = self.requests[request_id]
        if fails:
            self.executor.import_garbage(reservation, request.token_ids)
            assert self.scheduler.kv_failed(request_id)
            return
        self.executor.import_kv(reservation, request.token_ids)
        first = SampledToken(expected(request)[0][0])
        self.served.take([self.scheduler.kv_arrived(request_id, first, self.served.now)])

    @rule()
    def leases_expire(self):
        for request_id in self.scheduler.blocks.expire(self.served.now):
            assert request_id in self.held

    @invariant()
    def books_balance(self):
        self.scheduler.check()

    @invariant()
    def emitted_so_far_is_right(self):
        for request_id, tokens in self.served.out.items():
            right, _ = expected(self.requests[request_id])
            assert tokens == right[: len(tokens)]

    @invariant()
    def leased_kv_of_a_finished_prefill_stays_intact(self):
        for request_id in self.held & self.served.finish.keys():
            table = self.scheduler.blocks.leased_table(request_id)
            if table is not None:
                token_ids = self.requests[request_id].token_ids
                assert self.executor.read(table, len(token_ids)) == cells_of(token_ids)

    def teardown(self):
        if self.plan is not None:
            self.end_step()
        for request_id in self.alive():
            self.scheduler.resume(request_id)
        for _ in range(2000):
            self.collect()
            for request_id in sorted(self.importing):
                self.end_import(request_id, fails=False)
            self.scheduler.blocks.expire(float("inf"))
            if not self.alive():
                break
            self.begin_step(1)
            if self.plan is not None:
                self.end_step()
        assert not self.alive(), "the schedule makes no progress"
        for request_id, request in self.requests.items():
            if request_id in self.cancelled:
                continue
            emitted, finish = expected(request)
            if request_id in self.held:
                emitted, finish = emitted[:1], FinishReason.LENGTH
            assert self.served.out[request_id] == emitted
            assert self.served.finish[request_id] is finish
        self.scheduler.check()
        self.scheduler.blocks.expire(float("inf"))
        assert self.scheduler.blocks.num_held_blocks == 0
        assert self.scheduler.blocks.num_leases == 0
        assert not self.scheduler.has_work


class CopyingMachine(SchedulerMachine):
    reuse_tokens = 1


class AheadMachine(SchedulerMachine):
    """As much, with two plans at a time: one that runs, or has run, and one behind it.

    A pass computes at any moment between its begin and its end, so that whoever writes into blocks
    that it still uses is found out. It may begin before the one ahead is committed.
    """

    reuse_tokens = 1

    def __init__(self):
        super().__init__()
        self.flights = []  # plans, oldest first
        self.results = []  # of those that have run, oldest first
        self.last = StepResult({})

    # What the plain machine calls a step.
    begin_step = end_step = step_fails = None

    @precondition(lambda self: len(self.flights) < 2)
    @rule(passed=st.integers(0, 4))
    def plan_step(self, passed):
        self.served.now += passed
        plan = self.scheduler.plan(self.served.now)
        self.collect()
        if plan is None:
            return
        assert not (self.flights and plan.preempted)
        assert not self.held & set(plan.preempted)
        self.flights.append(plan)

    @precondition(lambda self: len(self.results) < len(self.flights))
    @rule()
    def compute(self):
        self.last = self.executor.execute(resolved(self.flights[len(self.results)], self.last))
        self.results.append(self.last)

    @precondition(lambda self: self.results)
    @rule()
    def land(self):
        plan, result = self.flights.pop(0), self.results.pop(0)
        committed = self.scheduler.commit(plan, result, self.served.now)
        assert not {c.request_id for c in committed} & self.cancelled
        self.served.take(committed)

    @precondition(lambda self: len(self.flights) == 2 and len(self.results) < 2)
    @rule()
    def recall(self):
        self.scheduler.recall(self.flights.pop())

    @precondition(lambda self: len(self.flights) == len(self.results) == 1)
    @rule()
    def pass_fails(self):
        self.scheduler.abandon(self.flights.pop())
        for request_id in self.results.pop().tokens:
            self.executor.known[request_id].pop()

    def teardown(self):
        while self.flights:
            if not self.results:
                self.compute()
            self.land()
        self.begin_step = self.plan_and_land
        super().teardown()

    def plan_and_land(self, passed):
        self.plan_step(passed)
        if self.flights:
            self.compute()
            self.land()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestCopies = CopyingMachine.TestCase
TestCopies.settings = settings(max_examples=30, stateful_step_count=50, deadline=None)
TestAhead = AheadMachine.TestCase
TestAhead.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
