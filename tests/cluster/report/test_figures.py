"""Figures of outcomes whose answers can be worked out by hand."""

import json
import math

import pytest
from outcomes import failed, outcome, run, simulated

from cluster.replay.outcome import Outcome, RunEnd
from cluster.report.figures import (
    MAX_GROUPS,
    OTHER_GROUP,
    Bootstrap,
    duration_of,
    goodput_by_multiple,
    is_good,
    itl_s,
    summarise,
)
from cluster.report.prices import Price, PriceTable
from cluster.report.targets import Targets

FEW = Bootstrap(num_resamples=50)
LOOSE = {"*": Targets(ttft_s=1.0, itl_s=0.1)}


def figures(outcomes: list[Outcome], **more):
    return summarise(run(), outcomes, more.pop("slo", LOOSE), bootstrap=FEW, **more)


def assert_plain(value, path="report"):
    """What JSON can carry, and no NaN or infinity anywhere."""
    if isinstance(value, dict):
        for key, inner in value.items():
            assert isinstance(key, str), path
            assert_plain(inner, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for inner in value:
            assert_plain(inner, path)
    elif isinstance(value, float):
        assert math.isfinite(value), path
    else:
        assert value is None or isinstance(value, str | int | bool), (path, type(value))


@pytest.mark.parametrize(
    "outcomes",
    [
        [],
        [outcome()],
        [failed(0, "error")],
        [failed(i, "shed") for i in range(30)],
        [outcome(0, chunk_times=(), first_token_s=None, output_tokens=0)],
        [outcome(0, output_tokens=1, chunk_times=(0.1,), end_s=0.1)],
        [outcome(0, result="disconnected", input_tokens=None, output_tokens=None)],
        [outcome(0, end_s=0.0, first_token_s=0.0, chunk_times=(0.0,), output_tokens=1)],
        [outcome(i, cached_tokens=None, phases={}) for i in range(20)],
    ],
    ids=[
        *("none", "one", "one failed", "all shed", "nothing said", "one token", "left"),
        *("no time at all", "a server that tells little"),
    ],
)
def test_degenerate_runs_give_numbers_or_null(outcomes):
    prices = PriceTable(items=(Price(name="cpu", per_hour=1.0),))
    summary = figures(outcomes, prices=prices)
    assert_plain(summary)
    json.dumps(summary, allow_nan=False)
    assert summary["all"]["requests"]["offered"] == len(outcomes)


def test_latencies_count_from_sending_and_from_the_schedule():
    late = outcome(0, scheduled_s=1.0, sent_s=3.0)
    latency = figures([late])["all"]["latency"]
    assert latency["ttft_s"]["p50"]["value"] == pytest.approx(0.1)
    assert latency["ttft_scheduled_s"]["p50"]["value"] == pytest.approx(2.1)
    assert latency["e2e_s"]["p50"]["value"] == pytest.approx(0.3)
    assert latency["e2e_scheduled_s"]["p50"]["value"] == pytest.approx(2.3)
    assert figures([late])["lateness_s"]["max"] == pytest.approx(2.0)


def test_time_between_tokens_in_all_its_forms():
    # First token at 0.1, last content at 0.3, last byte at 0.5; 5 tokens in 3 chunks.
    one = outcome(
        0, first_token_s=0.1, chunk_times=(0.1, 0.1, 0.3), end_s=0.5, output_tokens=5, sent_s=0.0
    )
    latency = figures([one])["all"]["latency"]
    assert latency["itl_s"]["mean"]["value"] == pytest.approx(0.2 / 4)
    assert latency["tpot_s"]["mean"]["value"] == pytest.approx(0.4 / 4)
    assert latency["ntpot_s"]["mean"]["value"] == pytest.approx(0.3 / 5)
    assert latency["icl_s"]["count"] == 2
    assert latency["icl_s"]["max"] == pytest.approx(0.2)
    assert latency["itl_by_token_s"]["count"] == 4


def test_an_answer_of_one_token_has_no_gap():
    one = outcome(0, output_tokens=1, chunk_times=(0.1,), end_s=0.2)
    latency = figures([one])["all"]["latency"]
    assert (latency["itl_s"], latency["tpot_s"], latency["icl_s"]) == (None, None, None)


def test_chunks_stand_for_tokens_where_the_server_does_not_count():
    assert itl_s(outcome(0, output_tokens=None)) == pytest.approx(0.05)


def test_latencies_are_of_whole_answers_only():
    cut = outcome(1, result="error")
    summary = figures([outcome(0), cut])
    assert summary["all"]["latency"]["ttft_s"]["count"] == 1


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        (
            {"scheduled_s": 0.0, "sent_s": 0.95},
            False,
        ),  # Its first token came 1.05 s after it was due.
        ({"output_tokens": 3}, False),  # 0.2 s for two gaps
        ({"result": "error"}, False),
        ({"first_token_s": None, "chunk_times": (), "end_s": 0.9, "output_tokens": 9}, True),
        ({"first_token_s": None, "chunk_times": (), "end_s": 1.1, "output_tokens": 9}, False),
    ],
)
def test_a_good_request_meets_every_target(changes, good):
    targets = Targets(ttft_s=1.0, itl_s=0.09)
    assert is_good(outcome(0, **changes), targets) is good


def test_an_end_to_end_target_is_judged_too():
    assert not is_good(outcome(0), Targets(e2e_s=0.29))
    assert is_good(outcome(0), Targets(e2e_s=0.31))


def test_goodput_is_over_everything_offered_what_the_client_left_included():
    outcomes = [
        *(outcome(i) for i in range(6)),
        failed(6, "shed"),
        failed(7, "error"),
        failed(8, "timeout"),
        outcome(9, result="disconnected"),
    ]
    every = figures(outcomes)["all"]
    assert every["goodput"]["value"] == pytest.approx(6 / 10)
    assert every["shed_share"]["value"] == pytest.approx(1 / 10)
    assert every["failed_share"]["value"] == pytest.approx(2 / 10)
    assert every["goodput"]["requests_per_s"] == pytest.approx(6 / 9.3)
    assert every["requests"] == {
        **{"offered": 10, "ok": 6, "shed": 1, "error": 1, "timeout": 1, "disconnected": 1},
        "retries": 0,
    }


def test_goodput_grows_with_the_targets_and_stops_below_one_where_requests_failed():
    outcomes = [outcome(0), outcome(1, scheduled_s=0.0, sent_s=1.5), failed(2, "shed")]
    shares = {p["multiple"]: p["share"] for p in goodput_by_multiple(outcomes, LOOSE)}
    assert shares[0.25] == 0.0
    assert shares[1.0] == pytest.approx(1 / 3)
    assert shares[8.0] == pytest.approx(2 / 3)


def test_tiers_have_targets_and_figures_of_their_own():
    slow = [outcome(i, tier="batch", sent_s=i + 5.0) for i in range(3)]
    quick = [outcome(i + 3, tier="priority") for i in range(3)]
    slo = {"batch": Targets(), "*": Targets(ttft_s=0.2)}
    summary = figures([*slow, *quick], slo=slo)
    assert {tier: group["goodput"]["value"] for tier, group in summary["tiers"].items()} == {
        "batch": 1.0,
        "priority": 1.0,
    }
    assert summary["slo"]["priority"]["ttft_s"] == 0.2
    assert summary["tiers"]["batch"]["latency"]["ttft_scheduled_s"]["max"] == pytest.approx(5.1)


def test_few_tenants_are_told_apart_and_the_many_small_ones_together():
    outcomes = [outcome(i, tenant=f"t{i % (MAX_GROUPS + 10)}") for i in range(3 * MAX_GROUPS + 40)]
    tenants = figures(outcomes)["tenants"]
    assert len(tenants) == MAX_GROUPS + 1
    assert list(tenants)[-1] == OTHER_GROUP
    assert sum(group["requests"]["offered"] for group in tenants.values()) == len(outcomes)


def test_cached_share_weighs_tokens_and_leaves_out_who_does_not_tell():
    outcomes = [
        outcome(0, input_tokens=100, cached_tokens=80, predicted_cached_tokens=64,
                planned_input_tokens=96),
        outcome(1, input_tokens=300, cached_tokens=0, planned_input_tokens=304),
        outcome(2, input_tokens=1000, cached_tokens=None, predicted_cached_tokens=1000),
    ]  # fmt: skip
    every = figures(outcomes)["all"]
    assert every["cached_share"]["value"] == pytest.approx(0.2)
    assert every["predicted_cached_share"]["value"] == pytest.approx(0.16)


def test_rates_are_over_the_time_from_the_first_sending_to_the_last_byte():
    outcomes = [outcome(0), outcome(1, scheduled_s=9.7)]
    summary = figures(outcomes)
    assert duration_of(outcomes) == pytest.approx(10.0)
    assert summary["all"]["output_tokens_per_s"] == pytest.approx(1.0)
    assert summary["all"]["input_tokens_per_s"] == pytest.approx(2.0)


def test_cost_follows_from_prices_time_and_tokens():
    prices = PriceTable(items=(Price(name="gpu", per_hour=3.6, units=2, replicas=5),))
    outcomes = [outcome(0), outcome(1, scheduled_s=0.0, sent_s=9.7)]
    cost = figures(outcomes, prices=prices)["cost"]
    assert cost["spent"] == pytest.approx(36 * 10 / 3600)
    assert cost["per_million_output_tokens"] == pytest.approx(0.1 / 10 * 1e6)
    assert cost["per_million_tokens"] == pytest.approx(0.1 / 30 * 1e6)
    assert cost["per_million_good_output_tokens"] == pytest.approx(0.1 / 5 * 1e6)


def test_percentiles_over_everything_offered_end_where_requests_have_no_answer():
    outcomes = [*(outcome(i) for i in range(97)), *(failed(97 + i, "shed") for i in range(3))]
    over = figures(outcomes)["all"]["latency"]["ttft_scheduled_s"]["over_offered"]
    assert over["p95"] == pytest.approx(0.1)
    assert over["p99"] is None


def test_a_percentile_that_is_only_the_largest_says_so():
    ttft = figures([outcome(i) for i in range(50)])["all"]["latency"]["ttft_s"]
    assert (ttft["p50"]["is_max"], ttft["p99"]["is_max"]) == (False, True)
    assert ttft["count"] == 50


def test_an_open_loop_shows_a_stall_that_a_closed_one_would_hide():
    # 10 a second for 20 s; the server answers within 0.1 s but stalls from 10 s to 15 s.
    outcomes = []
    for i in range(200):
        due = i / 10
        begins = 15.0 if 10.0 <= due < 15.0 else due
        first = begins + 0.1
        outcomes.append(
            outcome(i, scheduled_s=due, first_token_s=first, chunk_times=(first,), end_s=first)
        )
    ttft = figures(outcomes)["all"]["latency"]["ttft_scheduled_s"]
    assert ttft["p50"]["value"] == pytest.approx(0.1)
    assert ttft["p95"]["value"] == pytest.approx(4.1, abs=0.2)
    assert ttft["max"] == pytest.approx(5.1)


def test_errors_are_told_with_an_example_the_most_frequent_first():
    outcomes = [
        failed(0, "error", status=500, code="internal", message="it broke"),
        *(failed(i, "shed", status=429, code="overloaded") for i in (1, 2)),
    ]
    errors = figures(outcomes)["errors"]
    assert [(e["result"], e["status"], e["count"]) for e in errors] == [
        ("shed", 429, 2),
        ("error", 500, 1),
    ]
    assert errors[1]["example"] == "it broke"


def test_an_interrupted_run_is_not_called_complete():
    end = RunEnd(duration_s=1.0, num_outcomes=1, interrupted=True, num_unfinished=4)
    cut = summarise(run(end=end), [outcome()], bootstrap=FEW)
    assert (cut["complete"], cut["num_unfinished"]) == (False, 4)
    assert summarise(run(end=None), [outcome()], bootstrap=FEW)["complete"] is False
    assert summarise(run(), [outcome()], bootstrap=FEW)["complete"] is True


def test_the_same_seed_gives_the_same_intervals_in_any_order_of_outcomes():
    outcomes = simulated(60, rate=4.0)
    assert figures(outcomes) == figures(outcomes[::-1])


def test_intervals_hold_their_figures():
    latency = figures(simulated(200, rate=4.0))["all"]["latency"]
    for name, each in latency.items():
        for key in ("p50", "p95", "p99", "mean"):
            figure = each[key]
            assert figure["low"] <= figure["value"] <= figure["high"], (name, key)
