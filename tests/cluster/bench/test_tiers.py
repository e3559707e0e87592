from dataclasses import replace

import pytest

from cluster.bench.client import StreamResult
from cluster.bench.tiers import (
    BATCH,
    INTERACTIVE,
    Part,
    ask_of,
    figures,
    headline,
    laptop_plan,
    synthetic_plan,
    table,
    tokens_between,
)
from deployments.gateway.config import GatewayConfig

PLAN = replace(synthetic_plan(quick=True), ttft_s=0.25, itl_s=0.03)


def answer(first, gap=0.01, tokens=5, at=0.0):
    times = [at + first + gap * i for i in range(tokens)]
    return StreamResult(at, end_s=times[-1], arrivals_s=times, completion_tokens=tokens)


def test_an_answer_attains_when_first_token_and_mean_gap_are_in_time_and_a_refusal_never():
    part = Part(
        [
            answer(0.2),
            answer(0.3),
            answer(0.2, gap=0.04),
            StreamResult(0.0, refused_s=0.1, error="status 429"),
        ],
        batch_tokens=100,
        over_s=10.0,
    )
    found = figures(PLAN, part)
    assert (found["requests"], found["answered"]) == (4, 3)
    assert found["attainment"] == 0.25
    assert found["ttft_p99_s"] == pytest.approx(0.3)
    assert found["itl_p99_s"] == pytest.approx(0.04)
    assert found["batch_tokens_rate"] == 10.0


def test_batch_is_measured_by_what_it_gets_where_nobody_goes_first():
    fast, slow = [answer(0.1)] * 10, [answer(0.2)] * 10
    found = headline(
        PLAN,
        alone=Part(fast, 0, 10.0),
        tiered=Part(slow, 855, 10.0),
        untiered=Part([answer(0.9)] * 10, 1900, 20.0),
    )
    assert found["batch_capacity_share"] == 0.9
    assert found["interactive_attainment"] == 1.0
    assert found["interactive_attainment_untiered"] == 0.0
    assert found["interactive_ttft_p99_ratio"] == 2.0


def test_tokens_count_by_when_they_came_whatever_came_together():
    within = answer(0.5, gap=0.1, tokens=4)  # 0.5 to 0.8
    merged = replace(answer(0.5, gap=0.2, tokens=2), completion_tokens=6)  # three a read
    assert tokens_between([within, merged], 0.55, 0.75) == 2 + 3
    assert tokens_between([answer(2.0)], 0.0, 1.0) == 0


@pytest.mark.parametrize("plan", [PLAN, laptop_plan("m", quick=False)])
def test_a_plan_is_a_configuration_that_the_gateway_takes(plan):
    config = GatewayConfig.parse(plan.gateway())
    assert config.tiers[INTERACTIVE].ttft_s == plan.ttft_s
    assert config.tiers[INTERACTIVE].rank < config.tiers[BATCH].rank
    assert config.tiers[BATCH].preemptible
    assert plan.batch_callers > plan.slots


def test_full_runs_have_at_least_a_thousand_interactive_samples():
    assert synthetic_plan(quick=False).interactive_samples >= 1000
    assert laptop_plan("m", quick=False).interactive_samples >= 1000


def test_a_request_says_its_tier_and_no_two_share_a_prefix():
    asks = [ask_of(PLAN, kind, "default", i) for kind in (INTERACTIVE, BATCH) for i in (1, 2)]
    assert {ask.body["service_tier"] for ask in asks} == {"default"}
    assert len({ask.body["prompt"].split(":")[0] for ask in asks}) == 4
    assert [ask.max_tokens for ask in asks] == [
        *[PLAN.interactive_tokens] * 2,
        *[PLAN.batch_tokens] * 2,
    ]


def test_the_table_begins_with_what_was_promised():
    row = figures(PLAN, Part([answer(0.1)], 10, 1.0))
    result = {
        "plan": {name: getattr(PLAN, name) for name in PLAN.__dataclass_fields__},
        "interactive_alone": row,
        "tiered": row,
        "untiered": row,
        "batch_alone_tokens_rate": 700.0,
        "batch_capacity_share": 0.9,
        "interactive_ttft_p99_ratio": 1.5,
    }
    lines = table(result)
    assert lines[0].startswith("synthetic: first token within 0.25 s, 0.03 s a token")
    assert lines[-2].split() == ["batch_capacity_share", "0.9"]
