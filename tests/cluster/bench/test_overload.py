import json

import pytest

from cluster.bench.client import StreamResult
from cluster.bench.overload import Promise, capacity_of, ends_of, headline, judge, table
from cluster.errors import ClusterError

PROMISE = Promise(ttft_s=1.0, itl_s=0.05, max_wait_s=0.7, prompt_s=0.1)
BODY = json.dumps({"error": {"message": "m", "type": "t", "code": "c"}})
HEADERS = {"x-request-id": "r", "retry-after": "1", "retry-after-ms": "500"}


def answered(at, first, gap, tokens=5):
    times = [at + first + gap * i for i in range(tokens)]
    return StreamResult(at, end_s=times[-1], arrivals_s=times, completion_tokens=tokens, status=200)


def refused(at, after, headers=HEADERS):
    return StreamResult(
        at, refused_s=at + after, status=429, headers=headers, text=BODY, error="status 429"
    )


def test_goodput_counts_what_kept_both_targets_after_the_load_has_settled():
    results = [
        answered(1.0, 0.5, 0.01),  # in the first fifth
        answered(2.5, 0.5, 0.01),
        answered(3.0, 1.5, 0.01),  # first token late
        answered(4.0, 0.5, 0.06),  # tokens slow
        refused(5.0, 0.02),
        StreamResult(6.0, error="the connection was closed"),
    ]
    load = judge(results, [r.sent_s for r in results], 10.0, PROMISE)
    assert (load["requests"], load["accepted"], load["refused"], load["failed"]) == (5, 3, 1, 1)
    assert load["goodput_rate"] == pytest.approx(1 / 8)
    assert load["ttft_p99_s"] == pytest.approx(1.5)
    assert load["accepted_p99_within_target"] is False
    assert load["refusal_p99_ms"] == pytest.approx(20.0)
    assert load["refusals_prompt_share"] == 1.0
    assert load["malformed"] == {}


def test_a_refusal_without_a_time_to_come_back_is_counted_by_its_fault():
    load = judge([refused(3.0, 0.3, {"x-request-id": "r"})], [3.0], 10.0, PROMISE)
    assert load["malformed"] == {"no retry-after": 1}
    assert load["refusals_prompt_share"] == 0.0
    assert load["ttft_p99_s"] is None
    assert load["accepted_p99_within_target"] is False


def test_the_headline_sets_the_highest_load_against_the_best():
    def load(factor, good):
        base = judge([answered(5.0, 0.5, 0.01)], [5.0], 10.0, PROMISE)
        return {**base, "factor": factor, "goodput_rate": good, "gateway_rss_mb": [100.0, 101.0]}

    loads = [load(0.5, 5.0), load(10.0, 8.0), load(1.0, 10.0)]
    found = headline(loads)
    assert found["goodput_ratio_at_10x"] == 0.8
    assert found["accepted_p99_within_target"] is True
    assert found["gateway_rss_growth_mb"] == 1.0
    promise = {"ttft_s": 1, "itl_s": 1, "max_wait_s": 1}
    lines = table({"promise": promise, "capacity_rate": 10.0, "loads": loads, **found})
    assert lines[-4].split() == ["goodput_ratio_at_10x", "0.8"]


def test_capacity_is_answers_over_the_time_they_took_and_a_failure_gives_none():
    assert capacity_of([answered(0.0, 0.5, 0.0), answered(0.5, 0.5, 0.0)]) == 2.0
    with pytest.raises(ClusterError, match="1 of 1 requests failed: status 429"):
        capacity_of([refused(0.0, 0.1)])


def test_growth_of_memory_compares_the_middle_with_the_end():
    assert ends_of([1.0, 50.0, 100.0, 100.0, 101.0, 101.0]) == (100.0, 101.0)
    assert ends_of([7.0]) == (7.0, 7.0)
