"""Plans made while the pass before them is under way."""

import pytest

from engine.cache import BlockManager
from engine.config import CacheConfig, SchedulerConfig
from engine.request import FinishReason, Request, SampledToken, SamplingParams
from engine.scheduling import Scheduler, StepResult
from engine.scheduling.cost import row_work
from engine.scheduling.plan import PENDING, Chunk, StepPlan, resolved

EOS = 0


def make_scheduler(*, num_blocks=100, **limits):
    cache = CacheConfig(num_blocks=num_blocks, block_tokens=4)
    return Scheduler(
        SchedulerConfig(**limits),
        BlockManager(cache, "weights"),
        eos_token_ids=(EOS,),
        max_context_tokens=1000,
    )


def add(scheduler, request_id, prompt=4, max_tokens=50, **how):
    base = 1000 * ord(request_id)
    request = Request(
        request_id=request_id,
        prompt_ids=tuple(range(base, base + prompt)),
        params=SamplingParams(max_tokens=max_tokens),
        priority=how.pop("priority", 0),
    )
    scheduler.add(request, 0.0, **how)


def commit(scheduler, plan, token_id=7):
    tokens = {c.request_id: SampledToken(token_id) for c in plan.chunks if c.sample}
    committed = scheduler.commit(plan, StepResult(tokens), 0.0)
    scheduler.check()
    return [(c.request_id, c.finish) for c in committed]


def shape(plan):
    return [(c.request_id, c.first_token, c.token_ids) for c in plan.chunks]


def test_the_token_that_is_being_sampled_is_pending_and_follows_at_its_place():
    s = make_scheduler()
    add(s, "a")
    first = s.plan(0.0)
    ahead = s.plan(0.0)
    assert shape(ahead) == [("a", 4, (PENDING,))]
    assert ahead.chunks[0].sample
    assert ahead.chunks[0].blocks == (1, 2)
    s.check()
    assert commit(s, first) == [("a", None)]
    assert commit(s, ahead) == [("a", None)]
    assert shape(s.plan(0.0)) == [("a", 5, (7,))]
    assert (s.num_steps, s.num_steps_ahead) == (2, 1)


def test_pending_tokens_are_those_of_the_pass_before():
    chunk = Chunk(request_id="a", first_token=4, token_ids=(PENDING,), blocks=(1,), sample=True)
    known = Chunk(request_id="b", first_token=0, token_ids=(5, 6), blocks=(2,), sample=True)
    plan = resolved(StepPlan(chunks=(chunk, known)), StepResult({"a": SampledToken(9)}))
    assert shape(plan) == [("a", 4, (9,)), ("b", 0, (5, 6))]
    whole = StepPlan(chunks=(known,))
    assert resolved(whole, StepResult({})) is whole


def test_the_rest_of_a_prompt_is_planned_behind_its_beginning():
    s = make_scheduler(max_chunk_tokens=4)
    add(s, "a", prompt=6)
    first, ahead = s.plan(0.0), s.plan(0.0)
    assert [(c.first_token, c.end, c.sample) for c in first.chunks] == [(0, 4, False)]
    assert [(c.first_token, c.end, c.sample) for c in ahead.chunks] == [(4, 6, True)]


@pytest.mark.parametrize("how", [{"max_tokens": 1}, {"hold_until": 9.0}])
def test_who_surely_ends_is_not_planned_again(how):
    s = make_scheduler()
    add(s, "a", **how)
    first = s.plan(0.0)
    assert s.plan(0.0) is None
    assert commit(s, first) == [("a", FinishReason.LENGTH)]


def test_who_ends_unforeseen_keeps_its_blocks_until_the_pass_made_for_nothing_is_over():
    s = make_scheduler()
    add(s, "a")
    add(s, "b")
    first, ahead = s.plan(0.0), s.plan(0.0)
    assert commit(s, first, EOS) == [("a", FinishReason.STOP), ("b", FinishReason.STOP)]
    assert s.blocks.request_ids == {"a", "b"}
    assert commit(s, ahead) == []
    assert s.num_discarded_rows == 2
    assert s.blocks.num_held_blocks == 0
    assert s.plan(0.0) is None


@pytest.mark.parametrize("landed", [0, 1, 2])
def test_cancelled_at_any_stage_nothing_is_emitted_and_no_block_is_held(landed):
    s = make_scheduler()
    add(s, "a")
    plans = [s.plan(0.0), s.plan(0.0)]
    emitted = [done for plan in plans[:landed] for done in commit(s, plan)]
    assert s.cancel("a")
    emitted += [done for plan in plans[landed:] for done in commit(s, plan)]
    assert emitted == [("a", None)] * landed
    assert s.blocks.num_held_blocks == 0
    assert s.blocks.request_ids == set()


def test_kv_of_a_token_that_nobody_knows_is_not_shared():
    s = make_scheduler()
    add(s, "a", prompt=7)
    plans = [s.plan(0.0), s.plan(0.0)]
    s.cancel("a")
    for plan in plans:  # the eighth token fills a block, and was sampled when "a" was gone
        commit(s, plan)
    known = tuple(range(97_000, 97_007))
    assert s.blocks.cached_blocks((*known, 7), "") == s.blocks.cached_blocks(known, "") != ()


def test_no_blocks_are_taken_from_anybody_while_a_pass_may_use_them():
    s = make_scheduler(num_blocks=4)
    add(s, "a")
    add(s, "b")
    first = s.plan(0.0)
    ahead = s.plan(0.0)  # wants two more blocks, one is left
    assert ahead is None
    assert s.num_preemptions == 0
    commit(s, first)
    assert s.plan(0.0).preempted == ("b",)


def test_urgent_work_takes_blocks_after_the_pass_not_beside_it():
    s = make_scheduler(num_blocks=5)
    add(s, "a", prompt=12, priority=9)
    first = s.plan(0.0)
    add(s, "b", prompt=12, priority=0)
    assert s.plan(0.0) is None
    commit(s, first)
    plan = s.plan(0.0)
    assert plan.preempted == ("a",)
    assert [c.request_id for c in plan.chunks] == ["b"]


def test_a_newcomer_is_planned_behind_the_pass_under_way():
    s = make_scheduler()
    add(s, "a")
    s.plan(0.0)
    add(s, "b")
    ahead = s.plan(0.0)
    assert [c.request_id for c in ahead.chunks] == ["a", "b"]
    assert [e.request_id for e in ahead.entered] == ["b"]


def test_a_plan_that_was_recalled_is_made_again_with_what_came_up():
    s = make_scheduler()
    add(s, "a")
    first = s.plan(0.0)
    add(s, "b")
    waiting = s.plan(0.0)
    add(s, "c")
    s.recall(waiting)
    s.check()
    again = s.plan(0.0)
    assert [c.request_id for c in again.chunks] == ["a", "b", "c"]
    assert [e.request_id for e in again.entered] == ["b", "c"]
    commit(s, first)
    assert commit(s, again) == [("a", None), ("b", None), ("c", None)]


def test_who_entered_with_a_recalled_plan_and_is_gone_is_not_said_to_have_left():
    s = make_scheduler()
    add(s, "a")
    add(s, "z")
    first = s.plan(0.0)
    s.cancel("z")
    add(s, "b")
    waiting = s.plan(0.0)
    assert waiting.left == ("z",)
    s.cancel("b")
    s.recall(waiting)
    s.check()
    again = s.plan(0.0)
    assert (again.left, again.entered) == (("z",), ())
    assert [c.request_id for c in again.chunks] == ["a"]
    commit(s, first)
    commit(s, again)
    s.cancel("a")
    assert s.blocks.num_held_blocks == 0


def test_after_a_failed_pass_its_requests_want_the_same_again():
    s = make_scheduler()
    add(s, "a")
    first, ahead = s.plan(0.0), s.plan(0.0)
    s.recall(ahead)
    s.abandon(first)
    s.check()
    assert [(c.first_token, c.end) for c in s.plan(0.0).chunks] == [(0, 4)]


def test_costs_are_learnt_from_how_long_a_pass_ran():
    s = make_scheduler()
    add(s, "a")
    for _ in range(20):
        plan = s.plan(0.0)
        tokens = StepResult({"a": SampledToken(7)})
        s.commit(plan, tokens, 100.0, took_s=0.5)
    assert 0.4 < s.cost.seconds(row_work(20)) < 0.6
