"""Differences that were put in, and none where there is none."""

from dataclasses import replace

import pytest
from outcomes import failed, outcome, simulated

from cluster.compare.pairs import FIGURES, Comparison, compare
from cluster.report.figures import Bootstrap
from cluster.report.targets import Targets

BOOT = Bootstrap(num_resamples=100)
SLO = {"*": Targets(ttft_s=1.0, itl_s=0.1)}
FIGURE = {each.key: each for each in FIGURES}


def slower(outcomes, factor):
    """The same requests, each taking `factor` times as long."""

    def late(each, at):
        return each.sent_s + factor * (at - each.sent_s)

    return [
        replace(
            each,
            scheduled_s=each.sent_s,
            first_token_s=late(each, each.first_token_s),
            chunk_times=tuple(late(each, at) for at in each.chunk_times),
            end_s=late(each, each.end_s),
        )
        for each in outcomes
    ]


def figures(rounds_a, rounds_b):
    return {each.figure.key: each for each in compare(rounds_a, rounds_b, SLO, BOOT)}


def quiet(seed):
    """No queue, so that a slower server is slower by a factor."""
    return slower(simulated(60, rate=0.5, seed=seed), 1.0)


def test_a_side_that_is_slower_by_a_factor_is_found_to_be_so():
    rounds = [quiet(1), quiet(2)]
    found = figures(rounds, [slower(each, 1.5) for each in rounds])
    for key in ("ttft_scheduled_s_p50", "itl_s_p99", "e2e_scheduled_s_p95", "icl_s_p99"):
        assert found[key].change == pytest.approx(1.5, rel=1e-6), key
        # Equal resamples of both sides leave nothing to chance.
        assert found[key].low == pytest.approx(1.5, rel=1e-6)
        assert found[key].verdict == "worse"


def test_equal_sides_are_not_told_apart():
    rounds = [simulated(80, rate=3.0, seed=seed) for seed in (1, 2)]
    found = figures(rounds, rounds)
    assert {each.verdict for each in found.values()} == {"same", None}
    assert found["goodput"].change == 0.0


def test_independent_runs_of_one_system_rarely_differ():
    a = [simulated(80, rate=2.0, seed=seed) for seed in (1, 2, 3)]
    b = [simulated(80, rate=2.0, seed=seed) for seed in (4, 5, 6)]
    told = [each.verdict for each in figures(a, b).values() if each.verdict]
    assert told.count("same") >= 0.7 * len(told)


def test_rounds_that_disagree_widen_the_interval():
    one = quiet(1)
    agree = figures([one, one], [slower(one, 1.5), slower(one, 1.5)])["ttft_scheduled_s_p50"]
    differ = figures([one, one], [slower(one, 1.0), slower(one, 2.25)])["ttft_scheduled_s_p50"]
    assert agree.change == pytest.approx(1.5)
    assert differ.change == pytest.approx(1.5)
    assert differ.high / differ.low > 2
    assert differ.verdict == "same"


def test_throughput_needs_three_rounds_for_a_verdict():
    fast, slow = ([outcome(i, scheduled_s=gap * i) for i in range(40)] for gap in (1.0, 1.5))
    two = figures([fast] * 2, [slow] * 2)["output_tokens_per_s"]
    three = figures([fast] * 3, [slow] * 3)["output_tokens_per_s"]
    assert two.change == pytest.approx(1 / 1.5, rel=0.01)
    assert (two.verdict, three.verdict) == (None, "worse")


def test_what_differs_by_next_to_nothing_is_the_same_however_certain():
    one = quiet(1)
    for factor, verdict in ((1.015, "same"), (1.03, "worse")):
        assert figures([one], [slower(one, factor)])["e2e_scheduled_s_p50"].verdict == verdict


def test_shares_are_compared_by_difference():
    good = [outcome(i) for i in range(40)]
    half = [outcome(i) if i % 2 else failed(i, "shed") for i in range(40)]
    found = figures([good], [half])
    assert found["goodput"].change == pytest.approx(-0.5)
    assert found["goodput"].verdict == "worse"
    assert found["unanswered_share"].change == pytest.approx(0.5)
    assert found["unanswered_share"].verdict == "worse"


def test_waits_that_are_next_to_nothing_are_equal():
    a = [outcome(i, phases={"queue": 1e-15}) for i in range(20)]
    b = [outcome(i, phases={"queue": 0.0}) for i in range(20)]
    assert figures([a], [b])["queue_s_p99"].change == 1.0


def test_what_a_side_does_not_tell_is_not_compared():
    told = [outcome(i, phases={"queue": 0.1}) for i in range(20)]
    silent = [outcome(i) for i in range(20)]
    queue = figures([told], [silent])["queue_s_p99"]
    assert (queue.change, queue.low, queue.verdict) == (None, None, None)
    assert queue.values_a == (0.1,)


def test_too_few_requests_have_a_difference_but_no_verdict():
    few = [outcome(i) for i in range(5)]
    found = figures([few], [slower(few, 2.0)])["ttft_scheduled_s_p50"]
    assert found.change == pytest.approx(2.0)
    assert found.verdict is None


def test_nothing_at_all_is_compared_without_failing():
    found = figures([[]], [[]])
    assert {each.change for each in found.values()} == {None}


@pytest.mark.parametrize(
    ("key", "low", "high", "verdict"),
    [
        ("itl_s_p50", 0.5, 0.9, "better"),
        ("itl_s_p50", 1.1, 1.9, "worse"),
        ("itl_s_p50", 0.9, 1.1, "same"),
        ("output_tokens_per_s", 1.1, 1.2, "better"),
        ("itl_s_p50", 1.001, 1.9, "same"),
        ("goodput", -0.2, -0.1, "worse"),
        ("cached_share", 0.1, 0.2, "better"),
    ],
)
def test_a_verdict_is_of_the_second_side(key, low, high, verdict):
    made = Comparison(
        figure=FIGURE[key], values_a=(1.0,), values_b=(1.0,), change=low, low=low, high=high
    )
    assert made.verdict == verdict
