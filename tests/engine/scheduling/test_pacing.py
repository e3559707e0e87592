import pytest

from engine.scheduling.cost import StepCost, StepWork, prompt_work, row_work
from engine.scheduling.pacing import DUE_MARGIN, MARGIN, STRETCHED, Demand, Stream, pace

BASE_S, ROW_S, TOKEN_S = 2e-3, 1e-3, 1e-4


@pytest.fixture
def cost() -> StepCost:
    """2 ms a step, 1 ms a row, 0.1 ms a prompt token; context costs nothing."""
    learnt = StepCost()
    for i in range(400):
        rows, tokens = i % 9, 37 * i % 301
        work = StepWork(rows=rows, prompt_tokens=tokens, reads=(7919 * i) % 10_000)
        learnt.observe(work, BASE_S + rows * ROW_S + tokens * TOKEN_S)
    return learnt


def decide(
    cost, streams=(), demands=(), *, now=0.0, most=1000, least=16, max_skip_s=10.0, stages=1
):
    return pace(
        cost,
        streams,
        demands,
        now=now,
        max_prompt_tokens=most,
        min_prompt_tokens=least,
        max_skip_s=max_skip_s,
        num_stages=stages,
    )


def streams(count: int, level: int = 0, itl_s: float | None = 0.02, **more) -> list[Stream]:
    return [Stream(level, itl_s, row_work(50), **more) for _ in range(count)]


def prompt(tokens: int, due_s: float | None = None, level: int = 0) -> Demand:
    return Demand(level, tokens, due_s)


def test_without_streams_or_targets_nothing_is_held_back(cost):
    assert decide(cost, [], [prompt(5000)]).prompt_tokens == 1000
    assert decide(cost, streams(4, itl_s=None), [prompt(5000)]).prompt_tokens == 1000
    assert decide(StepCost(), streams(4), [prompt(5000)]).prompt_tokens == 1000


def test_prompts_get_the_time_that_the_tightest_stream_leaves(cost):
    both = [*streams(2, itl_s=0.02), *streams(2, itl_s=0.05)]
    left_s = STRETCHED * 0.02 - BASE_S - 4 * ROW_S
    decided = decide(cost, both, [prompt(5000)])
    assert decided.prompt_tokens == pytest.approx(left_s / TOKEN_S, rel=0.05)
    assert not decided.skipped


def test_prompts_are_never_starved_by_streams(cost):
    assert decide(cost, streams(30), [prompt(5000)]).prompt_tokens == 16


def test_a_step_grows_for_a_more_urgent_first_token_that_can_still_be_in_time(cost):
    eight = streams(8)
    relaxed = decide(cost, eight, [prompt(400, due_s=10.0, level=-1)]).prompt_tokens
    urgent = decide(cost, eight, [prompt(400, due_s=0.07, level=-1)]).prompt_tokens
    streams_s = BASE_S + 8 * ROW_S
    assert relaxed == pytest.approx((STRETCHED * 0.02 - streams_s) / TOKEN_S, rel=0.1)
    # 400 tokens in steps of x take 400 / x * (streams + x * token) <= 0.9 * 0.07
    assert urgent == pytest.approx(400 * streams_s / (DUE_MARGIN * 0.07 - 400 * TOKEN_S), rel=0.1)
    assert urgent > relaxed


def test_for_a_first_token_of_the_streams_own_tier_no_gap_grows_beyond_its_target(cost):
    relaxed = decide(cost, streams(8), [prompt(400, due_s=10.0)])
    assert decide(cost, streams(8), [prompt(400, due_s=0.07)]) == relaxed


def test_a_less_urgent_prompt_leaves_the_streams_their_whole_margin(cost):
    streams_s = BASE_S + 8 * ROW_S
    less = decide(cost, streams(8), [prompt(400, level=2)]).prompt_tokens
    assert less == pytest.approx((MARGIN * 0.02 - streams_s) / TOKEN_S, rel=0.1)


def test_earlier_prompts_count_towards_a_later_deadline(cost):
    alone = decide(cost, streams(8), [prompt(200, due_s=0.06, level=-1)]).prompt_tokens
    behind = [prompt(200, due_s=0.055, level=-1), prompt(200, due_s=0.06, level=-1)]
    assert decide(cost, streams(8), behind).prompt_tokens > alone


def test_a_lost_deadline_makes_nobody_else_late(cost):
    relaxed = decide(cost, streams(8), [prompt(400, due_s=10.0, level=-1)])
    assert decide(cost, streams(8), [prompt(400, due_s=-1.0, level=-1)]) == relaxed
    assert decide(cost, streams(8), [prompt(400, due_s=0.03, level=-1)]) == relaxed


def test_steps_under_way_together_bring_a_first_token_sooner(cost):
    # One after another, steps that let the streams keep their target would be too late.
    eight, due = streams(8), [prompt(400, due_s=0.07, level=-1)]
    relaxed = decide(cost, eight, [prompt(400, due_s=10.0, level=-1)])
    assert decide(cost, eight, due).prompt_tokens > relaxed.prompt_tokens
    assert decide(cost, eight, due, stages=4) == relaxed
    # Where they are too late as well, steps grow until the last one has passed every stage in time.
    hard = decide(cost, eight, [prompt(400, due_s=0.0392, level=-1)], stages=4).prompt_tokens
    step_s = BASE_S + 8 * ROW_S + hard * TOKEN_S
    assert (400 / hard + 3) * step_s / 4 == pytest.approx(DUE_MARGIN * 0.0392, rel=0.05)
    assert hard > relaxed.prompt_tokens


def test_a_less_urgent_prompt_does_not_stretch_a_more_urgent_stream(cost):
    relaxed = decide(cost, streams(8), [prompt(400, due_s=10.0, level=2)])
    assert decide(cost, streams(8), [prompt(400, due_s=0.08, level=2)]) == relaxed


def test_less_urgent_rows_that_do_not_fit_sit_the_step_out(cost):
    mixed = [*streams(4, level=0, itl_s=0.02), *streams(20, level=3, itl_s=None)]
    decided = decide(cost, mixed)
    fitting = int((MARGIN * 0.02 - BASE_S) / ROW_S)
    assert decided.skipped == frozenset(range(fitting, 24))


def test_rows_of_the_same_tier_are_never_left_out(cost):
    assert not decide(cost, streams(40)).skipped


def test_a_row_that_sat_out_too_long_is_computed(cost):
    waited = [*streams(16, level=0), *streams(2, level=3, itl_s=None, skipped_s=10.0)]
    assert not decide(cost, waited).skipped


def test_a_row_of_a_long_context_costs_what_it_reads():
    learnt = StepCost()
    for i in range(400):
        work = StepWork(rows=1 + i % 8, prompt_tokens=31 * i % 200, reads=(7919 * i) % 50_000)
        learnt.observe(work, 1e-3 + 1e-6 * work.reads + 1e-4 * work.prompt_tokens)
    short = decide(learnt, [Stream(0, 0.02, row_work(10))], [prompt(5000)])
    long = decide(learnt, [Stream(0, 0.02, row_work(10_000))], [prompt(5000)])
    assert short.prompt_tokens - long.prompt_tokens == pytest.approx(100, rel=0.1)
    assert prompt_work(0, 1) == StepWork(prompt_tokens=1, reads=1)
