import asyncio
import time
from dataclasses import asdict, replace
from itertools import pairwise
from typing import ClassVar

import pytest

from cluster.bench import tier_traffic, tiers
from cluster.bench.client import StreamResult
from cluster.bench.tier_traffic import SAMPLE, Kind, Size, chosen_trace, traffic
from cluster.bench.tiers import (
    BATCH,
    INTERACTIVE,
    LABEL_TOKENS,
    Part,
    ask_of,
    figures,
    headline,
    laptop_plan,
    synthetic_plan,
    table,
    tokens_between,
)
from cluster.errors import ClusterError
from cluster.replay.formats import read_trace
from cluster.replay.trace import TraceError
from deployments.gateway.config import GatewayConfig

PLAN = replace(synthetic_plan(quick=True), ttft_s=0.25, itl_s=0.03)
KINDS = ("interactive", "batch")


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


def test_batch_is_measured_by_what_it_does_alone_less_the_interactive_tokens():
    fast, slow = [answer(0.1)] * 10, [answer(0.2)] * 10
    found = headline(
        PLAN,
        batch=Part([], 2100, 20.0),  # 105 a second, of which interactive takes 50 in 10 seconds
        alone=Part(fast, 0, 10.0),
        tiered=Part(slow, 900, 10.0),
        untiered=Part([answer(0.9)] * 10, 1600, 20.0),
    )
    assert found["batch_capacity_share"] == 0.9
    assert found["batch_share_of_untiered"] == 1.125
    assert found["interactive_attainment"] == 1.0
    assert found["interactive_attainment_untiered"] == 0.0
    assert found["interactive_ttft_p99_ratio"] == 2.0


def test_where_nothing_is_left_there_is_no_share_of_it():
    busy = Part([answer(0.1, tokens=50)] * 10, 0, 5.0)
    found = headline(PLAN, batch=Part([], 100, 1.0), alone=busy, tiered=busy, untiered=busy)
    assert found["batch_capacity_share"] is None
    assert found["batch_share_of_untiered"] is None


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


def test_a_request_says_its_tier_and_its_label_before_anything_else():
    ask = ask_of("m", "3 batch 7", "default", Size(LABEL_TOKENS + 2, 5))
    assert ask.body["service_tier"] == "default"
    assert ask.body["prompt"] == "3 batch 7: river river"
    assert (ask.max_tokens, ask.body["max_tokens"]) == (5, 5)


class Server:
    """Answers at once, and keeps what it was asked."""

    asked: ClassVar[list] = []

    def __init__(self, url):
        self.url = url

    async def warm(self, count):
        pass

    async def ask(self, ask):
        self.asked.append(ask)
        now = time.monotonic()
        await asyncio.sleep(0.02)
        return StreamResult(
            now, end_s=now, arrivals_s=[now] * ask.max_tokens, completion_tokens=ask.max_tokens
        )

    def close(self):
        pass


def test_every_load_asks_for_what_was_planned_and_for_no_prompt_twice(monkeypatch):
    monkeypatch.setattr(tiers, "Server", Server)
    monkeypatch.setattr(Server, "asked", [])
    offered = replace(PLAN.traffic(read_trace(SAMPLE)), times_s=tuple(0.001 * i for i in range(50)))
    loads = tiers._Loads("http://nowhere", replace(PLAN, batch_callers=3), offered)
    alone = loads.run(50, INTERACTIVE, None, 0.1)
    assert [ask.max_tokens for ask in Server.asked] == [s.tokens for s in offered.interactive]
    assert sum(result.completion_tokens for result in alone.interactive) == sum(
        size.tokens for size in offered.interactive
    )
    both = loads.run(50, INTERACTIVE, BATCH, 0.1)
    assert len(both.interactive) == 50
    batch = [ask for ask in Server.asked if ask.body["service_tier"] == BATCH]
    # A caller's requests follow each other; those of three begin with the first three lengths.
    assert [ask.max_tokens for ask in batch[:3]] == [size.tokens for size in offered.batch[:3]]
    assert len(batch) > 3
    prompts = [ask.body["prompt"].split(":")[0] for ask in Server.asked]
    assert len(set(prompts)) == len(prompts) == 100 + len(batch)


def test_a_traces_lengths_and_gaps_are_scaled_and_keep_their_proportions():
    trace = read_trace(SAMPLE)
    kinds = {"interactive": Kind(fixed=Size(1, 1), factor=0.1), "batch": PLAN.batch}
    offered = traffic(trace, rate=20.0, samples=700, **kinds)
    assert len(offered.times_s) == len(offered.interactive) == 700
    assert offered.times_s[0] == 0.0
    assert 699 / offered.times_s[-1] == pytest.approx(20.0)
    few = traffic(trace, rate=20.0, samples=50, **kinds)
    assert 49 / few.times_s[-1] == pytest.approx(20.0)
    rows = trace.requests
    gaps = [later - sooner for sooner, later in pairwise(offered.times_s)]
    wanted = [b.at_s - a.at_s for a, b in pairwise(rows)]
    scale = sum(gaps[: len(wanted)]) / sum(wanted)
    wanted = [scale * gap for gap in wanted]
    assert gaps[: len(wanted)] == pytest.approx(wanted, abs=1e-6)
    assert gaps[len(rows) : len(rows) + len(wanted)] == pytest.approx(wanted, abs=1e-6)
    assert [(size.prompt, size.tokens) for size in offered.interactive[300:303]] == [
        (round(0.1 * row.input_tokens), round(0.1 * row.output_tokens)) for row in rows[:3]
    ]
    scaled = [PLAN.batch.scaled(row.input_tokens, row.output_tokens) for row in rows]
    assert sorted(map(str, offered.batch)) == sorted(map(str, scaled))
    assert list(offered.batch) != scaled
    assert offered == traffic(trace, rate=20.0, samples=700, **kinds)


def test_the_plan_says_where_its_traffic_is_from_and_how_large_it_is():
    trace = read_trace(SAMPLE)
    told = laptop_plan("m", quick=False).traffic(trace).told()
    assert (told["trace"], told["trace_sha256"]) == ("azure2023_conv", trace.sha256)
    # Prompt and answer in one proportion for both, so that tokens of both are of one worth.
    ratios = [told[kind]["prompt_mean"] / told[kind]["tokens_mean"] for kind in KINDS]
    assert ratios[0] == pytest.approx(ratios[1], rel=0.02)
    assert all(told[kind]["prompt_most"] < 1024 for kind in KINDS)
    # Three times so long, and all that is told in between, within eight minutes.
    assert 3 * told["over_s"] < 400
    fixed = PLAN.traffic(None)
    assert fixed.told()["arrivals"] == "poisson"
    assert fixed.interactive == (PLAN.interactive.fixed,) * 50
    assert fixed.batch == (PLAN.batch.fixed,)
    assert 49 / fixed.times_s[-1] == pytest.approx(25.0, rel=0.4)


def test_a_trace_is_named_left_out_or_none(tmp_path, monkeypatch):
    sample = chosen_trace(None)
    assert sample is not None
    assert sample.path == SAMPLE
    assert chosen_trace("none") is None
    lengths = chosen_trace(str(SAMPLE.with_name("arxiv_summarization_lengths.csv")))
    with pytest.raises(TraceError, match=r"lengths without arrivals: .* --trace none"):
        PLAN.traffic(lengths)
    monkeypatch.setattr(tier_traffic, "SAMPLE", tmp_path / "gone.jsonl")
    with pytest.raises(ClusterError, match=r"gone.jsonl: no sample .* --trace none"):
        chosen_trace(None)


def test_the_table_begins_with_what_was_promised():
    row = figures(PLAN, Part([answer(0.1)], 10, 1.0))
    result = {
        "plan": {**asdict(PLAN), "traffic": PLAN.traffic(read_trace(SAMPLE)).told()},
        "interactive_alone": row,
        "tiered": row,
        "untiered": row,
        "batch_alone_tokens_rate": 700.0,
        "batch_capacity_share": 0.9,
        "batch_share_of_untiered": 1.1,
        "interactive_ttft_p99_ratio": 1.5,
    }
    lines = table(result)
    assert lines[0].startswith("synthetic: first token within 0.25 s, 0.03 s a token")
    assert lines[1].startswith("lengths and gaps of azure2023_conv, times 0.04 for interactive and")
    assert [line.split() for line in lines[-3:-1]] == [
        ["batch_capacity_share", "0.9"],
        ["batch_share_of_untiered", "1.1"],
    ]
    result["plan"]["traffic"] = PLAN.traffic(None).told()
    assert table(result)[1] == (
        "fixed lengths and Poisson arrivals: interactive 18 tokens in (at most 18), 10 out (10); "
        "batch 18 tokens in (at most 18), 60 out (60)"
    )
