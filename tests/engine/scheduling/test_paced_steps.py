"""A scheduler on a machine whose steps cost 2 ms, 1 ms a row and 0.1 ms a prompt token."""

import pytest

from engine.cache import BlockManager
from engine.config import CacheConfig, SchedulerConfig
from engine.errors import ConfigError, RequestError
from engine.request import Request, SampledToken, SamplingParams
from engine.scheduling import Scheduler, StepResult

BASE_S, ROW_S, TOKEN_S = 2e-3, 1e-3, 1e-4


class Machine:
    """Runs plans and keeps the clock."""

    def __init__(self, **limits) -> None:
        cache = CacheConfig(num_blocks=5000, block_tokens=4, prefix_caching=False)
        self.scheduler = Scheduler(
            SchedulerConfig(**{"max_running_requests": 128, **limits}),
            BlockManager(cache, "weights"),
            eos_token_ids=(0,),
            max_context_tokens=4000,
        )
        self.now = 0.0
        self.count = 0
        self.first_at: dict[str, float] = {}
        self.gaps: dict[str, list[float]] = {}
        self._last: dict[str, float] = {}

    def add(self, name, prompt=4, *, priority=0, itl_ms=None, first_ms=None, max_tokens=400):
        self.count += 1
        ids = tuple(range(10_000 * self.count, 10_000 * self.count + prompt))
        request = Request(
            request_id=name,
            prompt_ids=ids,
            params=SamplingParams(max_tokens=max_tokens),
            priority=priority,
            itl_target_ms=itl_ms,
            first_token_ms=first_ms,
        )
        self.scheduler.add(request, self.now)

    def step(self):
        plan = self.scheduler.plan(self.now)
        rows = sum(len(c.token_ids) == 1 for c in plan.chunks)
        self.now += BASE_S + rows * ROW_S + (plan.num_tokens - rows) * TOKEN_S
        tokens = {c.request_id: SampledToken(7) for c in plan.chunks if c.sample}
        for entry in self.scheduler.commit(plan, StepResult(tokens), self.now):
            name = entry.request_id
            self.first_at.setdefault(name, self.now)
            if name in self._last:
                self.gaps.setdefault(name, []).append(self.now - self._last[name])
            self._last[name] = self.now
        self.scheduler.check()
        return plan

    def learn(self):
        """Serve enough of a mixture to know what steps cost."""
        for i in range(12):
            self.add(f"learn{i}", 37 * i % 300 + 2, max_tokens=5 + i)
            self.step()
        while self.scheduler.num_running:
            self.step()

    def until_first_token(self, name):
        while name not in self.first_at:
            self.step()
        return self.first_at[name]


def start(machine, count, **request):
    names = [f"s{machine.count}-{i}" for i in range(count)]
    for name in names:
        machine.add(name, **request)
    while any(name not in machine.first_at for name in names):
        machine.step()
    machine.gaps.clear()
    return names


def prompt_tokens(plan):
    return sum(len(c.token_ids) for c in plan.chunks if len(c.token_ids) > 1)


def test_a_long_prompt_does_not_stretch_gaps_beyond_their_target():
    paced, fixed = Machine(), Machine(pacing=False)
    worst = {}
    for machine in (paced, fixed):
        machine.learn()
        streams = start(machine, 4, itl_ms=20)
        machine.add("long", 1500)
        machine.until_first_token("long")
        worst[machine] = max(max(machine.gaps[name]) for name in streams)
    assert worst[paced] <= 0.020
    assert worst[fixed] > 0.025


def test_without_targets_steps_are_those_of_a_fixed_budget():
    paced, fixed = Machine(), Machine(pacing=False)
    plans = []
    for machine in (paced, fixed):
        machine.learn()
        start(machine, 4)
        machine.add("long", 1500)
        plans.append([machine.step() for _ in range(12)])
    assert plans[0] == plans[1]


def test_an_urgent_first_token_that_would_be_late_gets_larger_steps():
    at = {}
    for first_ms in (10_000, 200):
        machine = Machine()
        machine.learn()
        start(machine, 10, itl_ms=20)
        asked = machine.now
        machine.add("prompt", 900, priority=-1, first_ms=first_ms)
        at[first_ms] = machine.until_first_token("prompt") - asked
    assert at[200] <= 0.2 < at[10_000]


def test_a_full_house_of_streams_still_leaves_prompts_their_minimum():
    machine = Machine(min_prompt_tokens=24)
    machine.learn()
    start(machine, 40, itl_ms=10)
    machine.add("prompt", 200)
    assert prompt_tokens(machine.step()) == 24


def test_batch_rows_sit_out_what_an_interactive_stream_has_no_time_for():
    machine = Machine(ageing_s=1.0)
    machine.learn()
    batch = start(machine, 30, priority=5)
    (name,) = start(machine, 1, priority=0, itl_ms=20)
    plans = [machine.step() for _ in range(200)]
    assert all(any(c.request_id == name for c in plan.chunks) for plan in plans)
    assert max(len(plan.chunks) for plan in plans[:40]) < 16
    # Nobody sits out for ever: who waited for a second is computed, whatever the target.
    assert set(batch) <= {c.request_id for plan in plans for c in plan.chunks}
    mean = sum(machine.gaps[name]) / len(machine.gaps[name])
    assert mean < 0.020


def step_ahead(machine, under_way, *, fails=False):
    """One pass to its end, behind it a plan that is recalled once and made again. Returns that.

    fails: what is made again fails in its turn, and is planned a third time.
    """
    now = machine.now
    waiting = machine.scheduler.plan(now)
    machine.scheduler.recall(waiting)
    machine.scheduler.check()
    behind = machine.scheduler.plan(now)
    tokens = {c.request_id: SampledToken(7) for c in under_way.chunks if c.sample}
    took_s = BASE_S + len(under_way.chunks) * ROW_S
    machine.now += took_s
    machine.scheduler.commit(under_way, StepResult(tokens), machine.now, took_s=took_s)
    if fails:
        machine.scheduler.abandon(behind)
        behind = machine.scheduler.plan(machine.now)
    machine.scheduler.check()
    return behind


@pytest.mark.parametrize("fails", [False, True], ids=["recalled", "recalled, and failed"])
def test_a_stream_that_sits_out_is_computed_in_time_though_every_plan_is_made_again(fails):
    limit_s = 1.0
    machine = Machine(ageing_s=limit_s)
    machine.learn()
    batch = start(machine, 30, priority=5, max_tokens=3000)
    start(machine, 1, priority=0, itl_ms=20, max_tokens=3000)
    last = dict.fromkeys(batch, machine.now)
    longest_s = 0.0
    under_way = machine.scheduler.plan(machine.now)
    for _ in range(400):
        at = machine.now
        for chunk in under_way.chunks:
            if chunk.request_id in last:
                longest_s = max(longest_s, at - last[chunk.request_id])
                last[chunk.request_id] = at
        under_way = step_ahead(machine, under_way, fails=fails)
    longest_s = max(longest_s, *(machine.now - at for at in last.values()))
    whole_house_s = BASE_S + 31 * ROW_S
    assert limit_s < longest_s < limit_s + 4 * whole_house_s


@pytest.mark.parametrize("field", ["min_prompt_tokens"])
def test_limits_are_checked(field):
    with pytest.raises(ConfigError, match=f"{field}=0: must be 1 or more"):
        SchedulerConfig(**{field: 0})


def test_targets_are_checked_and_travel():
    request = Request(
        request_id="a",
        prompt_ids=(1,),
        params=SamplingParams(max_tokens=1),
        itl_target_ms=50,
        first_token_ms=-3,
    )
    assert Request.from_wire(request.to_wire()) == request
    with pytest.raises(RequestError, match="itl_target_ms=0"):
        Request(
            request_id="a", prompt_ids=(1,), params=SamplingParams(max_tokens=1), itl_target_ms=0
        )


def test_an_urgent_prompt_is_in_sight_behind_many_that_came_before_it():
    machine = Machine(max_running_requests=1)
    machine.add("runs", itl_ms=100)
    machine.step()
    for i in range(40):
        machine.add(f"batch-{i}", 50, priority=30)
    machine.add("urgent", 60, priority=10, first_ms=1000)
    in_sight = [d for d in machine.scheduler._demands(machine.now) if d.due_s is not None]
    assert [demand.tokens for demand in in_sight] == [60]
