import pytest

from deployments.gateway.slo import Ending, Timing, verdicts
from deployments.gateway.tiers import Targets

TARGETS = Targets(queue_s=1.0, ttft_s=2.0, itl_s=0.1, e2e_s=10.0)
GOOD = {"queue": True, "ttft": True, "e2e": True, "itl": True}
WHOLE = Timing(duration_s=10.0, queue_s=1.0, ttft_s=2.0, itl_s=0.1)


def test_a_target_met_exactly_is_met():
    assert verdicts(TARGETS, Ending.ANSWERED, WHOLE) == GOOD


@pytest.mark.parametrize(
    ("kind", "timing"),
    [
        ("queue", Timing(duration_s=5, queue_s=1.01, ttft_s=1.5, itl_s=0.1)),
        ("ttft", Timing(duration_s=5, queue_s=0.1, ttft_s=2.01, itl_s=0.1)),
        ("itl", Timing(duration_s=5, queue_s=0.1, ttft_s=1.5, itl_s=0.11)),
        ("e2e", Timing(duration_s=11, queue_s=0.1, ttft_s=1.5, itl_s=0.1)),
    ],
)
def test_each_target_is_judged_by_itself(kind, timing):
    assert verdicts(TARGETS, Ending.ANSWERED, timing) == {**GOOD, kind: False}


def test_one_token_has_no_gap_to_judge():
    timing = Timing(duration_s=1, queue_s=0, ttft_s=1)
    assert verdicts(TARGETS, Ending.ANSWERED, timing) == {
        kind: True for kind in ("queue", "ttft", "e2e")
    }


def test_a_failure_misses_what_it_had_not_met():
    assert verdicts(TARGETS, Ending.FAILED, Timing(duration_s=0.1)) == dict.fromkeys(GOOD, False)
    late = Timing(duration_s=3, queue_s=0.1, ttft_s=0.5)
    assert verdicts(TARGETS, Ending.FAILED, late) == {**GOOD, "itl": False, "e2e": False}


def test_who_leaves_in_time_says_nothing_of_what_it_did_not_wait_for():
    assert verdicts(TARGETS, Ending.LEFT, Timing(duration_s=0.5)) == {}
    half = Timing(duration_s=3, queue_s=0.1, ttft_s=0.5, itl_s=0.2)
    assert verdicts(TARGETS, Ending.LEFT, half) == {"queue": True, "ttft": True, "itl": False}


def test_who_leaves_after_a_target_passed_has_missed_it():
    assert verdicts(TARGETS, Ending.LEFT, Timing(duration_s=2.5)) == {"queue": False, "ttft": False}


def test_a_request_at_fault_itself_is_not_judged():
    assert verdicts(TARGETS, Ending.REFUSED, WHOLE) == {}


def test_a_target_that_is_not_set_is_not_judged():
    none = Targets(queue_s=None, ttft_s=None, itl_s=None, e2e_s=None)
    assert verdicts(none, Ending.FAILED, WHOLE) == {}
