from dataclasses import replace

import pytest

from engine.cache import BlockManager
from engine.config import CacheConfig, SchedulerConfig
from engine.errors import Overloaded, RequestError
from engine.request import FinishReason, Request, SampledToken, SamplingParams
from engine.scheduling import Committed, Reservation, Scheduler, StepResult

EOS = 0


def make_scheduler(
    *, num_blocks=100, block_tokens=4, max_context_tokens=1000, prefix_caching=True, **limits
):
    cache = CacheConfig(
        num_blocks=num_blocks, block_tokens=block_tokens, prefix_caching=prefix_caching
    )
    return Scheduler(
        SchedulerConfig(**limits),
        BlockManager(cache, "weights"),
        eos_token_ids=(EOS,),
        max_context_tokens=max_context_tokens,
    )


def make_request(request_id, prompt=4, priority=0, output_ids=(), salt=None, **params):
    """`prompt`: token ids, or how many; then no two requests share any."""
    if isinstance(prompt, int):
        base = 1000 * (1 + sum(request_id.encode()))
        prompt = range(base, base + prompt)
    return Request(
        request_id=request_id,
        prompt_ids=tuple(prompt),
        params=SamplingParams(**{"max_tokens": 50, **params}),
        output_ids=output_ids,
        priority=priority,
        salt=salt or "",
    )


def result_of(plan, token_id=7):
    return StepResult({c.request_id: SampledToken(token_id) for c in plan.chunks if c.sample})


def step(scheduler, now=0.0, token_id=7):
    """One whole step; returns the plan."""
    plan = scheduler.plan(now)
    if plan is not None:
        scheduler.commit(plan, result_of(plan, token_id), now)
    scheduler.check()
    return plan


def shape(plan):
    """(request, first token, number of tokens) of each chunk."""
    return [(c.request_id, c.first_token, len(c.token_ids)) for c in plan.chunks]


def ids(entries):
    return [entry.request_id for entry in entries]


# What a step computes


def test_a_prompt_is_computed_whole_and_then_decoded():
    s = make_scheduler()
    s.add(make_request("a", range(10, 16), max_tokens=2), 0.0)
    assert (s.num_waiting, s.num_running) == (1, 0)
    plan = s.plan(0.0)
    [chunk] = plan.chunks
    assert (chunk.first_token, chunk.token_ids) == (0, (10, 11, 12, 13, 14, 15))
    assert (chunk.blocks, chunk.sample) == ((1, 2), True)
    [entered] = plan.entered
    assert (entered.token_ids, entered.num_prompt_tokens) == ((10, 11, 12, 13, 14, 15), 6)
    assert s.commit(plan, result_of(plan, 7), 0.0) == [
        Committed(request_id="a", token=SampledToken(7), finish=None, num_cached_tokens=0)
    ]
    assert s.token_ids("a") == (10, 11, 12, 13, 14, 15, 7)
    plan = s.plan(0.0)
    [chunk] = plan.chunks
    assert (chunk.first_token, chunk.token_ids, chunk.blocks) == (6, (7,), (1, 2))
    assert plan.entered == ()
    [done] = s.commit(plan, result_of(plan, 8), 0.0)
    assert done.finish is FinishReason.LENGTH
    assert s.plan(0.0) is None
    assert s.blocks.num_held_blocks == 0
    s.check()


def test_a_long_prompt_goes_in_chunks_and_samples_only_at_its_end():
    s = make_scheduler(max_chunk_tokens=4)
    s.add(make_request("a", 10), 0.0)
    chunks = [step(s).chunks[0] for _ in range(4)]
    assert [(c.first_token, len(c.token_ids), c.sample) for c in chunks] == [
        (0, 4, False),
        (4, 4, False),
        (8, 2, True),
        (10, 1, True),
    ]
    # Blocks for the whole prompt were taken at once, each chunk names those up to its end.
    assert [c.blocks for c in chunks] == [(1,), (1, 2), (1, 2, 3), (1, 2, 3)]


def test_one_prompt_leaves_the_rest_of_the_budget_to_the_next():
    s = make_scheduler(max_step_tokens=8, max_chunk_tokens=5)
    for name in ("a", "b", "c"):
        s.add(make_request(name, 6), 0.0)
    assert shape(step(s)) == [("a", 0, 5), ("b", 0, 3)]
    assert s.num_waiting == 1
    assert shape(step(s)) == [("a", 5, 1), ("b", 3, 3), ("c", 0, 4)]


def test_decoding_requests_come_before_prompts_in_progress():
    s = make_scheduler(max_step_tokens=6, max_chunk_tokens=6)
    s.add(make_request("long", 20), 0.0)
    assert shape(step(s)) == [("long", 0, 6)]
    s.add(make_request("short", 2, priority=-1), 0.0)
    assert shape(step(s)) == [("short", 0, 2), ("long", 6, 4)]
    assert shape(step(s)) == [("short", 2, 1), ("long", 10, 5)]


def test_a_more_urgent_prompt_takes_its_share_from_a_less_urgent_one():
    s = make_scheduler(max_step_tokens=8, max_chunk_tokens=8)
    s.add(make_request("batch", 100, priority=9), 0.0)
    assert shape(step(s)) == [("batch", 0, 8)]
    s.add(make_request("equal", 3, priority=9), 0.0)
    assert shape(step(s)) == [("batch", 8, 8)]
    s.add(make_request("urgent", 3, priority=0), 0.0)
    assert shape(step(s)) == [("urgent", 0, 3), ("batch", 16, 5)]
    assert shape(step(s)) == [("urgent", 3, 1), ("batch", 21, 7)]


def test_a_cached_prefix_is_not_computed_again():
    s = make_scheduler()
    s.add(make_request("a", range(10), max_tokens=1), 0.0)
    step(s)
    s.add(make_request("b", (*range(8), 50, 51)), 0.0)
    plan = s.plan(0.0)
    assert shape(plan) == [("b", 8, 2)]
    assert plan.chunks[0].blocks[:2] == (1, 2)
    assert plan.entered[0].token_ids == (*range(8), 50, 51)
    [done] = s.commit(plan, result_of(plan), 0.0)
    assert done.num_cached_tokens == 8


def test_tenants_with_different_salts_never_share():
    s = make_scheduler()
    s.add(make_request("a", range(9), salt="one"), 0.0)
    step(s)
    s.add(make_request("b", range(9), salt="two"), 0.0)
    s.add(make_request("c", range(9), salt="one"), 0.0)
    plan = step(s)
    assert shape(plan) == [("a", 9, 1), ("b", 0, 9), ("c", 8, 1)]
    tables = {c.request_id: set(c.blocks) for c in plan.chunks}
    assert not tables["b"] & (tables["a"] | tables["c"])


# Who is admitted


def test_no_more_requests_run_than_there_are_slots():
    s = make_scheduler(max_running_requests=2)
    for name in ("a", "b", "c"):
        s.add(make_request(name, max_tokens=2), 0.0)
    assert ids(step(s).chunks) == ["a", "b"]
    assert (s.num_running, s.num_waiting) == (2, 1)
    step(s)  # both end
    assert ids(step(s).chunks) == ["c"]


def test_blocks_for_the_whole_prompt_are_reserved_before_it_starts():
    s = make_scheduler(num_blocks=7, max_chunk_tokens=4)
    s.add(make_request("a", 16), 0.0)
    s.add(make_request("b", 16), 0.0)
    assert shape(step(s)) == [("a", 0, 4)]  # two of them would deadlock half-way
    assert s.blocks.num_held_blocks == 4


def test_nobody_overtakes_the_first_in_the_queue():
    s = make_scheduler(num_blocks=7)
    s.add(make_request("a", 12), 0.0)
    step(s)
    s.add(make_request("large", 20), 0.0)
    s.add(make_request("small", 4), 0.0)
    assert ids(step(s).chunks) == ["a"]
    s.cancel("a")
    assert ids(step(s).chunks) == ["large", "small"]


def test_priority_comes_before_arrival():
    s = make_scheduler(max_running_requests=1)
    for name, priority in (("low", 5), ("high", 0), ("mid", 3), ("high2", 0)):
        s.add(make_request(name, priority=priority, max_tokens=1), 0.0)
    assert [ids(step(s).chunks) for _ in range(4)] == [["high"], ["high2"], ["mid"], ["low"]]


def test_waiting_raises_priority():
    s = make_scheduler(max_running_requests=1, ageing_s=10.0)
    s.add(make_request("running", priority=0, max_tokens=2), 0.0)
    step(s, 0.0)
    s.add(make_request("batch", priority=3, max_tokens=1), 0.0)
    s.add(make_request("normal", priority=1, max_tokens=1), 19.0)
    step(s, 19.0)  # ends
    assert ids(step(s, 19.9).chunks) == ["normal"]
    s.add(make_request("normal2", priority=1, max_tokens=1), 19.9)
    assert ids(step(s, 20.0).chunks) == ["batch"]  # aged from 3 to 1, and arrived earlier


def test_one_that_may_not_be_preempted_takes_no_blocks_of_more_urgent_ones():
    s = make_scheduler(num_blocks=5, block_tokens=4)
    s.add(replace(make_request("kept", prompt=7, priority=30), preemptible=False), 0.0)
    s.add(make_request("urgent", prompt=7, priority=10, max_tokens=4), 0.0)
    step(s)
    step(s)
    # Both need a third block now, and there is none: "kept" goes, not "urgent".
    assert ids(step(s).chunks) == ["urgent"]
    while "urgent" in s:
        assert ids(step(s).chunks) == ["urgent"]
    assert ids(step(s).chunks) == ["kept"]


def test_requests_that_may_not_be_preempted_outgrow_the_pool_one_after_the_other():
    s = make_scheduler(num_blocks=5)
    for name in ("first", "second"):
        s.add(replace(make_request(name, prompt=7), preemptible=False), 0.0)
    assert ids(step(s).chunks) == ["first", "second"]
    step(s)
    plan = step(s)
    assert (plan.preempted, ids(plan.chunks)) == (("second",), ["first"])
    s.finish("first", FinishReason.STOP)
    assert ids(step(s).chunks) == ["second"]


def test_who_was_raised_by_waiting_is_told_once_with_the_level_that_protects_it():
    s = make_scheduler(max_running_requests=1, ageing_s=10.0)
    s.add(make_request("first", priority=2, max_tokens=1), 0.0)
    s.add(make_request("batch", priority=3), 0.0)
    step(s, 9.0)
    assert s.take_aged() == ()
    step(s, 25.0)
    assert s.take_aged() == (("batch", 1),)
    assert s.take_aged() == ()
    s.add(make_request("equal", priority=1), 26.0)
    assert step(s, 26.0).preempted == ()
    s.add(make_request("urgent", priority=0), 26.0)
    assert step(s, 26.0).preempted == ("batch",)


def test_what_was_earned_by_waiting_protects_but_does_not_preempt():
    s = make_scheduler(max_running_requests=1, ageing_s=10.0)
    s.add(make_request("first", priority=2, max_tokens=2), 0.0)
    step(s, 0.0)
    s.add(make_request("batch", priority=3), 0.0)
    assert step(s, 95.0).preempted == ()  # aged to -6, but that preempts nobody
    assert ids(step(s, 96.0).chunks) == ["batch"]
    s.add(make_request("normal", priority=0), 96.0)
    assert ids(step(s, 97.0).chunks) == ["batch"]  # admitted at -6: nor is it preempted
    s.add(make_request("urgent", priority=-7), 97.0)
    plan = step(s, 98.0)
    assert (plan.preempted, ids(plan.chunks)) == (("batch",), ["urgent"])


# Preemption


def test_the_youngest_gives_way_when_a_running_request_needs_a_block():
    s = make_scheduler(num_blocks=5)
    s.add(make_request("a", 8), 0.0)
    s.add(make_request("b", 8), 0.0)
    assert [c.blocks for c in step(s).chunks] == [(1, 2), (3, 4)]
    plan = s.plan(0.0)
    assert (plan.preempted, plan.left) == (("b",), ("b",))
    assert [(c.request_id, c.blocks) for c in plan.chunks] == [("a", (1, 2, 4))]
    assert (s.num_running, s.num_waiting) == (1, 1)
    s.check()


def test_a_request_may_have_to_preempt_itself():
    s = make_scheduler(num_blocks=5)
    s.add(make_request("a", 5), 0.0)
    s.add(make_request("b", 8), 0.0)
    step(s)
    plan = step(s)  # a still has room in its second block, b needs a third
    assert (plan.preempted, ids(plan.chunks)) == (("b",), ["a"])


def test_the_least_urgent_gives_way_whoever_came_first():
    s = make_scheduler(num_blocks=5)
    s.add(make_request("background", 8, priority=9), 0.0)
    s.add(make_request("urgent", 8, priority=0), 0.0)
    step(s)
    plan = step(s)
    assert (plan.preempted, ids(plan.chunks)) == (("background",), ["urgent"])


def test_a_chunk_already_planned_is_taken_back_with_its_budget():
    s = make_scheduler(num_blocks=6, max_step_tokens=5, max_chunk_tokens=5)
    s.add(make_request("high", 5, priority=0), 0.0)
    step(s)
    s.add(make_request("low", 4, priority=9), 0.0)
    assert shape(step(s)) == [("high", 5, 1), ("low", 0, 4)]
    step(s)
    assert shape(step(s)) == [("high", 7, 1), ("low", 5, 1)]
    s.add(make_request("mid", 8, priority=5), 0.0)
    plan = step(s)  # high takes the last block, mid what low had, its one token of budget included
    assert (plan.preempted, shape(plan)) == (("low",), [("high", 8, 1), ("mid", 0, 4)])


def test_a_preempted_request_keeps_its_output_and_resumes_from_the_cache():
    s = make_scheduler(num_blocks=5)
    s.add(make_request("a", 8, max_tokens=3), 0.0)
    s.add(make_request("b", 8), 0.0)
    step(s)
    assert step(s).preempted == ("b",)
    before = s.token_ids("b")
    assert len(before) == 9
    assert ids(step(s).chunks) == ["a"]  # ends
    plan = s.plan(0.0)
    # b's second block went to a; its first is still known, and the token after it is kept.
    assert shape(plan) == [("b", 4, 5)]
    assert plan.entered[0].token_ids == before
    assert plan.entered[0].num_prompt_tokens == 8
    assert plan.left == ("a",)
    [done] = s.commit(plan, result_of(plan), 0.0)
    assert done.num_cached_tokens == 0  # of its prompt, when it first came


def test_nobody_is_admitted_in_a_step_that_preempted():
    s = make_scheduler(num_blocks=8)
    s.add(make_request("a", 12), 0.0)
    s.add(make_request("b", 16, priority=1), 0.0)
    step(s)
    s.add(make_request("tiny", 1, priority=0), 0.0)
    plan = s.plan(0.0)
    assert (plan.preempted, ids(plan.chunks)) == (("b",), ["a"])
    s.commit(plan, result_of(plan), 0.0)
    assert ids(step(s).chunks) == ["a", "tiny"]


def test_a_preempted_request_goes_first_among_its_priority():
    s = make_scheduler(num_blocks=5)
    s.add(make_request("a", 8, max_tokens=2), 0.0)
    s.add(make_request("b", 8), 0.0)
    step(s, 0.0)
    s.add(make_request("c", 4), 0.0)
    assert step(s, 1.0).preempted == ("b",)  # a ends in this step
    assert ids(step(s, 25.0).chunks) == ["b", "c"]


def test_background_request_yields_its_blocks_to_an_urgent_one():
    s = make_scheduler(num_blocks=5)
    s.add(make_request("background", 12, priority=9), 0.0)
    step(s)
    s.add(make_request("urgent", 12, priority=0), 0.0)
    plan = step(s)
    assert (plan.preempted, plan.left) == (("background",), ("background",))
    assert shape(plan) == [("urgent", 0, 12)]
    assert ids(plan.entered) == ["urgent"]


def test_an_urgent_request_takes_a_slot_from_the_least_urgent_youngest():
    s = make_scheduler(max_running_requests=3)
    for name, priority in (("a", 1), ("b", 9), ("c", 9)):
        s.add(make_request(name, priority=priority), 0.0)
    step(s)
    s.add(make_request("equal", priority=9), 0.0)
    assert step(s).preempted == ()
    s.add(make_request("urgent", priority=0), 0.0)
    plan = step(s)
    assert (plan.preempted, ids(plan.chunks)) == (("c",), ["a", "b", "urgent"])


def test_nobody_is_preempted_for_a_request_that_would_still_not_fit():
    s = make_scheduler(num_blocks=9)
    s.add(make_request("same", 16, priority=0), 0.0)
    s.add(make_request("background", 8, priority=9), 0.0)
    step(s)
    s.add(make_request("urgent", 20, priority=0), 0.0)
    plan = step(s)
    assert (plan.preempted, ids(plan.chunks)) == ((), ["same", "background"])


def test_an_urgent_request_preempts_even_behind_an_aged_one_that_cannot():
    s = make_scheduler(max_running_requests=1, ageing_s=10.0)
    s.add(make_request("background", priority=9), 0.0)
    step(s, 0.0)
    s.add(make_request("old", priority=9), 0.0)
    s.add(make_request("urgent", priority=0, max_tokens=1), 200.0)
    plan = step(s, 200.0)
    assert (plan.preempted, ids(plan.chunks)) == (("background",), ["urgent"])
    assert ids(step(s, 200.0).chunks) == ["background"]


def test_what_one_request_gave_up_is_not_handed_back_in_the_same_step():
    s = make_scheduler(num_blocks=8, max_running_requests=3, ageing_s=10.0)
    s.add(make_request("big", 11, priority=5), 0.0)
    s.add(make_request("small", 3, priority=9), 0.0)
    step(s, 0.0)
    s.add(make_request("old", 16, priority=9), 0.0)  # lacks a block, and ages
    s.add(make_request("urgent", 20, priority=0), 100.0)
    plan = step(s, 100.0)
    # Two blocks are left over. "small" would fit, and stands in front of "old" now.
    assert (plan.preempted, ids(plan.chunks)) == (("small", "big"), ["urgent"])
    assert ids(step(s, 100.0).entered) == ["small"]


def test_time_waited_before_a_preemption_still_counts():
    s = make_scheduler(max_running_requests=1, ageing_s=10.0)
    s.add(make_request("a", max_tokens=2), 0.0)
    step(s, 0.0)
    s.add(make_request("batch", priority=3), 0.0)
    step(s, 9.0)  # a ends
    assert ids(step(s, 10.0).chunks) == ["batch"]
    s.add(make_request("urgent", priority=0, max_tokens=1), 12.0)
    s.add(make_request("other", priority=2), 12.0)
    assert step(s, 12.0).preempted == ("batch",)
    assert ids(step(s, 12.0).chunks) == ["batch"]  # aged from 3 to 2, and arrived earlier


def test_a_request_put_back_does_not_hide_an_older_one_behind_it():
    s = make_scheduler(max_running_requests=1, ageing_s=10.0)
    s.add(make_request("background", priority=9, max_tokens=3), 0.0)
    step(s, 0.0)
    s.add(make_request("old", priority=9), 0.0)
    s.add(make_request("urgent", priority=0, max_tokens=1), 100.0)
    s.add(make_request("fresh", priority=1), 100.0)
    assert ids(step(s, 100.0).chunks) == ["urgent"]
    # "old" has aged to -1. "background" goes first among theirs, and so does as if it had, too.
    assert [ids(step(s, 100.0).chunks) for _ in range(3)] == [
        ["background"],
        ["background"],
        ["old"],
    ]


def test_a_step_whose_only_request_preempted_itself_still_admits():
    s = make_scheduler(num_blocks=5)
    s.add(make_request("import", 8), 0.0, remote=True)
    s.add(make_request("background", 8, priority=9), 0.0)
    step(s)
    s.add(make_request("urgent", 8, priority=0), 0.0)
    plan = step(s)
    assert (plan.preempted, ids(plan.chunks)) == (("background",), ["urgent"])


def test_nobody_is_preempted_for_a_slot_that_would_not_come_free():
    s = make_scheduler(max_chunk_tokens=2)
    s.add(make_request("held", 8), 0.0, hold_until=30.0)
    s.add(make_request("held too", 8), 0.0, hold_until=30.0)
    s.add(make_request("background", 8, priority=9), 0.0)
    step(s)
    s.config = SchedulerConfig(max_running_requests=2, max_chunk_tokens=2)
    s.add(make_request("urgent", 8, priority=0), 0.0)
    assert step(s).preempted == ()


# How a request ends


@pytest.mark.parametrize(
    ("params", "token_id", "finish"),
    [
        ({}, EOS, FinishReason.STOP),
        ({"ignore_eos": True}, EOS, None),
        ({"min_tokens": 1}, EOS, FinishReason.STOP),
        ({"min_tokens": 2}, EOS, None),
        ({"stop_token_ids": (5,)}, 5, FinishReason.STOP),
        ({"stop_token_ids": (5,), "ignore_eos": True}, 5, FinishReason.STOP),
        ({"stop_token_ids": (5,), "min_tokens": 2}, 5, None),
        ({"max_tokens": 1}, 7, FinishReason.LENGTH),
        ({"max_tokens": 1}, EOS, FinishReason.STOP),
        ({"max_tokens": 2}, 7, None),
    ],
)
def test_a_token_ends_its_request(params, token_id, finish):
    s = make_scheduler()
    s.add(make_request("a", **params), 0.0)
    plan = s.plan(0.0)
    [done] = s.commit(plan, result_of(plan, token_id), 0.0)
    assert (done.token.token_id, done.finish) == (token_id, finish)
    assert ("a" in s) == (finish is None)
    s.check()


def test_tokens_emitted_before_a_migration_count():
    s = make_scheduler()
    s.add(make_request("a", 4, output_ids=(7, 8), max_tokens=3), 0.0)
    plan = s.plan(0.0)
    assert shape(plan) == [("a", 0, 6)]
    assert plan.entered[0].num_prompt_tokens == 4
    [done] = s.commit(plan, result_of(plan), 0.0)
    assert done.finish is FinishReason.LENGTH


def test_a_sequence_ends_with_the_context():
    s = make_scheduler(max_context_tokens=6)
    s.add(make_request("a", 4), 0.0)
    step(s)
    plan = s.plan(0.0)
    [done] = s.commit(plan, result_of(plan), 0.0)
    assert done.finish is FinishReason.LENGTH


def test_a_sequence_ends_with_the_pool_instead_of_preempting_itself_for_ever():
    s = make_scheduler(num_blocks=3)
    s.add(make_request("a", 4), 0.0)
    for _ in range(4):
        assert step(s).preempted == ()
    assert "a" not in s
    assert s.num_preemptions == 0


def test_a_request_that_leaves_is_named_once_in_the_next_plan():
    s = make_scheduler()
    s.add(make_request("a", max_tokens=1), 0.0)
    step(s)
    assert s.plan(0.0) is None
    assert not s.has_work
    s.add(make_request("never started"), 0.0)
    s.cancel("never started")
    s.add(make_request("b"), 0.0)
    assert step(s).left == ("a",)
    assert step(s).left == ()


def test_cancelling_is_idempotent_and_unknown_ids_are_said_to_be():
    s = make_scheduler(max_running_requests=1)
    s.add(make_request("a"), 0.0)
    s.add(make_request("b"), 0.0)
    step(s)
    assert [s.cancel("a"), s.cancel("a"), s.cancel("nobody")] == [True, False, False]
    assert s.cancel("b")
    s.check()
    assert s.blocks.num_held_blocks == 0
    assert not s.has_work


def test_blocks_in_flight_are_freed_at_commit_and_the_token_is_dropped():
    s = make_scheduler()
    s.add(make_request("a", 8), 0.0)
    s.add(make_request("b", 8), 0.0)
    plan = s.plan(0.0)
    assert s.cancel("a")
    assert not s.cancel("a")
    s.check()
    assert s.blocks.table("a") == (1, 2)
    assert s.has_work
    with pytest.raises(RequestError, match="request_id='a' is in use"):
        s.add(make_request("a"), 0.0)
    assert ids(s.commit(plan, result_of(plan), 0.0)) == ["b"]
    s.check()
    assert s.blocks.num_held_blocks == 2
    assert step(s).left == ("a",)
    # What it computed is not lost on the next one with its prompt.
    assert s.blocks.match(plan.chunks[0].token_ids, "") == 4


def test_a_failed_pass_counts_for_nothing():
    s = make_scheduler()
    s.add(make_request("a", 8), 0.0)
    s.add(make_request("b", 8), 0.0)
    plan = s.plan(0.0)
    s.cancel("b")
    s.abandon(plan)
    s.check()
    assert s.blocks.match(plan.chunks[0].token_ids, "") == 0
    again = step(s)
    assert shape(again) == [("a", 0, 8)]
    assert (again.entered, again.left) == ((), ("b",))


# Refusals


def test_a_full_queue_refuses():
    s = make_scheduler(max_running_requests=1, max_waiting_requests=2)
    s.add(make_request("running"), 0.0)
    step(s)
    s.add(make_request("a"), 0.0)
    s.add(make_request("b"), 0.0)
    with pytest.raises(Overloaded, match="2 requests are waiting, max_waiting_requests=2"):
        s.add(make_request("c"), 0.0)
    s.cancel("running")
    s.add(make_request("c"), 0.0)
    s.check()


def test_a_free_slot_is_room_whatever_may_wait():
    s = make_scheduler(max_running_requests=2, max_waiting_requests=0)
    s.add(make_request("a"), 0.0)
    s.add(make_request("b"), 0.0)
    with pytest.raises(Overloaded):
        s.add(make_request("c"), 0.0)
    step(s)
    with pytest.raises(Overloaded):
        s.add(make_request("c"), 0.0)
    s.check()


def test_renewing_a_lease_counts_while_its_prompt_still_waits_for_blocks():
    s = make_scheduler(num_blocks=4, block_tokens=4)
    s.add(make_request("busy", 8), 0.0)
    step(s)
    s.add(make_request("held", 8), 0.0, hold_until=30.0)
    s.renew("held", 60.0)
    s.cancel("busy")
    step(s)
    assert s.blocks.expire(59.0) == []
    assert s.blocks.expire(60.0) == ["held"]


def test_a_prompt_beyond_the_context_is_refused():
    s = make_scheduler(max_context_tokens=8)
    s.add(make_request("fits", 7), 0.0)
    with pytest.raises(RequestError, match=r"8 tokens .* limited to 8 tokens") as refused:
        s.add(make_request("a", 8), 0.0)
    assert refused.value.code == "context_length_exceeded"
    assert s.num_waiting == 1


def test_a_prompt_beyond_the_pool_is_refused():
    s = make_scheduler(num_blocks=3)
    s.add(make_request("fits", 7), 0.0)
    with pytest.raises(RequestError, match=r"8 tokens .* holds 8 tokens \(2 blocks of 4\)"):
        s.add(make_request("a", 8), 0.0)


def test_an_id_in_use_is_refused():
    s = make_scheduler()
    s.add(make_request("a"), 0.0)
    with pytest.raises(RequestError, match="request_id='a' is in use"):
        s.add(make_request("a"), 0.0)


# Imported KV


def test_a_remote_request_is_reserved_at_once_when_nobody_waits_ahead():
    s = make_scheduler()
    s.add(make_request("warm", range(4)), 0.0)
    step(s)
    s.add(make_request("r", range(10)), 0.0, remote=True)
    [reservation] = s.take_reservations()
    assert reservation == Reservation(request_id="r", blocks=(1, 2, 3), num_cached_tokens=4)
    assert s.take_reservations() == []
    assert (s.num_running, s.num_waiting, s.num_waiting_remote) == (1, 0, 1)
    assert ids(step(s).chunks) == ["warm"]


def test_imported_kv_is_committed_with_its_first_token():
    s = make_scheduler()
    s.add(make_request("r", range(10)), 0.0, remote=True)
    s.take_reservations()
    assert not s.has_work
    assert s.blocks.match(range(10), "") == 0
    assert s.kv_arrived("r", SampledToken(7), 0.0) == Committed(
        request_id="r", token=SampledToken(7), finish=None, num_cached_tokens=0
    )
    s.check()
    assert s.blocks.match(range(10), "") == 8
    plan = step(s)
    assert shape(plan) == [("r", 10, 1)]
    assert plan.entered[0].token_ids == (*range(10), 7)


def test_an_imported_first_token_may_be_the_last():
    s = make_scheduler()
    s.add(make_request("r"), 0.0, remote=True)
    assert s.kv_arrived("r", SampledToken(EOS), 0.0).finish is FinishReason.STOP
    assert s.blocks.num_held_blocks == 0
    assert s.kv_arrived("r", SampledToken(EOS), 0.0) is None
    s.add(make_request("b"), 0.0)
    assert step(s).left == ()  # the executor never heard of it
    s.check()


def test_a_failed_import_is_computed_from_the_local_prefix():
    s = make_scheduler()
    s.add(make_request("warm", range(4), max_tokens=1), 0.0)
    step(s)
    s.add(make_request("r", range(10)), 0.0, remote=True)
    assert s.kv_failed("r")
    assert not s.kv_failed("r")
    assert s.take_reservations() == []
    assert shape(step(s)) == [("r", 4, 6)]


def test_a_remote_request_waits_its_turn():
    s = make_scheduler(max_running_requests=1)
    s.add(make_request("a", max_tokens=2), 0.0)
    s.add(make_request("r"), 0.0, remote=True)
    assert s.take_reservations() == []
    step(s)
    step(s)
    assert s.plan(0.0) is None
    assert ids(s.take_reservations()) == ["r"]
    s.check()


def test_a_remote_request_needs_no_token_budget():
    s = make_scheduler(max_step_tokens=4, max_chunk_tokens=4)
    s.add(make_request("a", 8), 0.0)
    s.add(make_request("r"), 0.0, remote=True)
    assert ids(step(s).chunks) == ["a"]
    assert ids(s.take_reservations()) == ["r"]


def test_an_awaited_import_keeps_its_blocks_and_its_slot():
    s = make_scheduler(num_blocks=5, max_running_requests=2)
    s.add(make_request("r", 8, priority=9), 0.0, remote=True)
    s.add(make_request("a", 8), 0.0)
    step(s)
    s.add(make_request("urgent", 1, priority=-1), 0.0)
    plan = step(s)
    assert plan.preempted == ("a",)  # not r, although it is the least urgent
    assert s.num_waiting_remote == 1


def test_cancelling_a_remote_request_withdraws_its_reservation():
    s = make_scheduler()
    s.add(make_request("r"), 0.0, remote=True)
    assert s.cancel("r")
    assert s.take_reservations() == []
    assert s.blocks.num_held_blocks == 0
    assert s.kv_arrived("r", SampledToken(7), 0.0) is None
    s.check()


def test_blocks_that_a_failed_import_may_still_write_are_kept_and_replaced():
    s = make_scheduler(num_blocks=9)
    s.add(make_request("warm", range(4), max_tokens=1), 0.0)
    step(s)
    s.add(make_request("r", range(10)), 0.0, remote=True)
    s.take_reservations()
    assert s.import_blocks("r") == (1, 2, 3)
    assert s.set_aside("r", "aside", 0.0) == (1, 4, 5)
    s.check()
    assert s.blocks.leased_table("aside") == (2, 3)
    assert s.blocks.expire(1e9) == []  # only whoever set them aside knows when they are quiet
    assert s.kv_failed("r")
    assert s.import_blocks("r") == ()
    assert shape(step(s)) == [("r", 4, 6)]
    s.cancel("r")
    assert s.blocks.num_held_blocks == 2
    s.blocks.release("aside")
    s.check()
    assert s.blocks.num_held_blocks == 0


def test_without_other_blocks_a_failed_import_waits_for_some_and_is_computed():
    s = make_scheduler(num_blocks=5)
    s.add(make_request("r", 10), 0.0, remote=True)
    s.take_reservations()
    assert s.set_aside("r", "aside", 0.0) == ()
    s.check()
    assert (s.num_waiting, s.num_waiting_remote, s.blocks.num_held_blocks) == (1, 0, 3)
    assert not s.kv_failed("r")
    assert s.plan(0.0) is None
    s.blocks.release("aside")
    assert shape(step(s)) == [("r", 0, 10)]
    assert s.take_reservations() == []


def test_an_import_that_is_over_has_nothing_to_set_aside():
    s = make_scheduler()
    s.add(make_request("r"), 0.0, remote=True)
    s.cancel("r")
    assert s.set_aside("r", "aside", 0.0) == ()
    assert s.blocks.num_leases == 0


# Prefill role


def test_a_held_request_ends_after_one_token_and_leaves_a_lease():
    s = make_scheduler()
    s.add(make_request("p", 10), 0.0, hold_until=30.0)
    plan = s.plan(0.0)
    assert s.blocks.num_leases == 1
    assert s.blocks.leased_table("p") == (1, 2, 3)
    [done] = s.commit(plan, result_of(plan, EOS), 0.0)
    assert done.finish is FinishReason.LENGTH
    s.check()
    assert "p" not in s
    assert s.blocks.num_held_blocks == 3
    assert s.blocks.expire(30.0) == ["p"]
    assert s.blocks.num_held_blocks == 0


def test_a_held_request_gives_its_slot_to_a_more_urgent_one_and_keeps_its_blocks():
    s = make_scheduler(max_running_requests=1, max_chunk_tokens=4)
    s.add(make_request("p", 8, priority=9), 0.0, hold_until=30.0)
    step(s)
    blocks = s.blocks.table("p")
    s.add(make_request("peer", 4, priority=9), 0.0, hold_until=30.0)
    s.add(make_request("urgent", 6, priority=0), 0.0, hold_until=30.0)
    plan = step(s)
    assert (plan.preempted, plan.left, shape(plan)) == (("p",), ("p",), [("urgent", 0, 4)])
    assert (s.num_running, s.num_waiting, s.num_preemptions) == (1, 2, 1)
    assert s.blocks.table("p") == s.blocks.leased_table("p") == blocks
    assert shape(step(s)) == [("urgent", 4, 2)]
    # It goes on where it was, before its peers.
    plan = step(s)
    assert (ids(plan.entered), shape(plan)) == (["p"], [("p", 4, 4)])
    assert plan.chunks[0].blocks == blocks
    assert shape(step(s)) == [("peer", 0, 4)]


@pytest.mark.parametrize("preemptible", [True, False])
def test_a_held_request_keeps_its_slot_from_its_equals_and_if_it_may_not_be_preempted(preemptible):
    s = make_scheduler(max_running_requests=1, max_chunk_tokens=4)
    held = replace(make_request("p", 8, priority=9), preemptible=preemptible)
    s.add(held, 0.0, hold_until=30.0)
    step(s)
    s.add(make_request("other", 4, priority=9 if preemptible else 0), 0.0, hold_until=30.0)
    plan = step(s)
    assert (plan.preempted, shape(plan)) == ((), [("p", 4, 4)])


def test_a_parked_request_ages_and_gets_its_slot_before_a_flood_of_urgent_ones():
    s = make_scheduler(max_running_requests=1, max_chunk_tokens=4, ageing_s=2.0)
    s.add(make_request("p", 8, priority=3), 0.0, hold_until=30.0)
    step(s)
    for turn in range(12):
        s.add(make_request(f"urgent{turn}", 4, priority=0), float(turn), hold_until=30.0)
        if "p" in ids(step(s, float(turn)).chunks):
            break
    assert turn == 6
    assert "p" not in s


def test_a_parked_request_runs_when_nobody_more_urgent_can():
    """Those wait for blocks, and it holds them."""
    s = make_scheduler(num_blocks=5, max_running_requests=2, max_chunk_tokens=4)
    s.add(make_request("p", 12, priority=9), 0.0, hold_until=30.0)
    step(s)
    s.add(make_request("small", 4, priority=0), 0.0, hold_until=30.0)
    s.config = replace(s.config, max_running_requests=1)
    assert shape(step(s)) == [("small", 0, 4)]
    s.add(make_request("large", 15, priority=0), 0.0, hold_until=30.0)
    assert [shape(step(s)) for _ in range(2)] == [[("p", 4, 4)], [("p", 8, 4)]]


def test_a_parked_request_that_is_cancelled_leaves_nothing_behind():
    s = make_scheduler(max_running_requests=1, max_chunk_tokens=4)
    s.add(make_request("p", 8, priority=9), 0.0, hold_until=30.0)
    step(s)
    s.add(make_request("urgent", 4, priority=0), 0.0)
    step(s)
    assert s.cancel("p")
    s.check()
    assert (s.num_waiting, s.blocks.num_leases, s.blocks.num_held_blocks) == (0, 0, 1)


def test_held_requests_leave_blocks_to_more_urgent_ones():
    s = make_scheduler(num_blocks=9, max_chunk_tokens=2, urgent_kv_reserve=0.25)
    s.add(make_request("b1", 12, priority=9), 0.0, hold_until=30.0)
    s.add(make_request("b2", 12, priority=9), 0.0, hold_until=30.0)
    s.add(make_request("b3", 4, priority=9), 0.0, hold_until=30.0)
    # Six of eight blocks are theirs, two are left.
    assert ids(step(s).chunks) == ["b1", "b2"]
    s.add(make_request("urgent", 8, priority=0), 0.0, hold_until=30.0)
    plan = step(s)
    assert plan.preempted == ()
    assert "urgent" in ids(plan.chunks)
    assert s.blocks.num_free_blocks == 0


def test_a_held_request_that_is_alone_may_have_all_blocks():
    s = make_scheduler(num_blocks=9, urgent_kv_reserve=0.25)
    s.add(make_request("p", 31, priority=9), 0.0, hold_until=30.0)
    assert ids(step(s).chunks) == ["p"]


def test_cancelling_a_held_request_ends_its_lease_too():
    s = make_scheduler(max_chunk_tokens=4)
    s.add(make_request("p", 8), 0.0, hold_until=30.0)
    step(s)
    plan = s.plan(0.0)
    s.cancel("p")
    assert s.blocks.num_leases == 1  # the pass in flight still writes
    s.commit(plan, result_of(plan), 0.0)
    assert (s.blocks.num_leases, s.blocks.num_held_blocks) == (0, 0)
    s.check()


# Slow readers


def test_a_paused_request_keeps_its_blocks_and_is_not_computed():
    s = make_scheduler()
    s.add(make_request("a"), 0.0)
    s.add(make_request("b"), 0.0)
    step(s)
    assert s.pause("a")
    assert ids(step(s).chunks) == ["b"]
    assert s.blocks.num_held_blocks == 3
    s.pause("b")
    assert s.plan(0.0) is None
    assert not s.has_work
    s.resume("a")
    assert s.has_work
    assert ids(step(s).chunks) == ["a"]
    assert not s.pause("nobody")


def test_a_paused_request_gives_way_before_its_equals():
    s = make_scheduler(num_blocks=5)
    s.add(make_request("slow", 8), 0.0)
    s.add(make_request("a", 8), 0.0)
    step(s)
    s.pause("slow")
    assert step(s).preempted == ("slow",)


def test_a_paused_request_yields_its_slot_to_an_equal_that_waits():
    s = make_scheduler(max_running_requests=1)
    s.add(make_request("slow"), 0.0)
    step(s)
    s.add(make_request("a", max_tokens=2), 0.0)
    assert step(s).preempted == ()
    s.pause("slow")
    plan = step(s)
    assert (plan.preempted, ids(plan.chunks)) == (("slow",), ["a"])
    step(s)
    assert s.plan(0.0) is None  # still paused, so it stands aside
    s.resume("slow")
    assert ids(step(s).chunks) == ["slow"]


def test_a_paused_request_does_not_hold_up_the_queue():
    s = make_scheduler(max_running_requests=1)
    s.add(make_request("slow"), 0.0)
    s.add(make_request("a"), 0.0)
    s.pause("slow")
    assert ids(step(s).chunks) == ["a"]


# Live changes


def test_new_limits_hold_from_the_next_plan_on_and_evict_nobody():
    s = make_scheduler(max_running_requests=3, ageing_s=10.0)
    for name in ("a", "b", "c"):
        s.add(make_request(name, max_tokens=3), 0.0)
    step(s)
    s.config = SchedulerConfig(max_running_requests=1, ageing_s=1.0)
    s.add(make_request("d", priority=5, max_tokens=1), 0.0)
    assert ids(step(s, 3.0).chunks) == ["a", "b", "c"]
    assert ids(step(s, 3.0).chunks) == ["a", "b", "c"]  # they end
    s.add(make_request("e", priority=2, max_tokens=1), 4.0)
    assert ids(step(s, 4.0).chunks) == ["d"]  # aged from 5 to 1
    assert ids(step(s, 4.0).chunks) == ["e"]
