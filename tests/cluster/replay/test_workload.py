from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.replay.formats import read_trace
from cluster.replay.mix import Part, parse_mix
from cluster.replay.prefixes import Segment
from cluster.replay.server import ServedModel
from cluster.replay.trace import Trace, TraceRequest
from cluster.replay.vocabulary import ChatFrame
from cluster.replay.workload import Factors, plan, scaled
from engine.errors import ConfigError

SAMPLES = Path(__file__).parents[2] / "traces"
MODEL = ServedModel(name="m", max_context_tokens=None)
FRAME = ChatFrame(head=5, tail=3, join=4)


def trace(*requests: TraceRequest, block_tokens: int = 0, name: str = "t") -> Trace:
    return Trace(
        name=name,
        path=Path(name),
        format="test",
        sha256="",
        requests=requests,
        block_tokens=block_tokens,
    )


def request(at_s: float | None = 0.0, tokens: int = 100, out: int = 10, **more) -> TraceRequest:
    return TraceRequest(at_s=at_s, input_tokens=tokens, output_tokens=out, **more)


def schedule(traces, mix=None, models=(MODEL,), frame=None, **factors):
    parts = mix or [Part(source=each.name) for each in traces]
    return plan(traces, parts, Factors(**factors), list(models), {"m": frame})


def test_lengths_and_gaps_have_one_factor_each():
    made = schedule([trace(request(0.0, 100, 10), request(4.0, 30, 1))], length=0.25, time=0.5)
    assert [(o.at_s, o.input_tokens, o.output_tokens) for o in made.offers] == [
        (0.0, 25, 2),
        (2.0, 8, 1),
    ]
    (source,) = made.sources
    assert (source.time_factor, source.num_offered, source.num_shortened) == (0.5, 2, 0)


def test_a_wanted_rate_sets_the_time_factor():
    made = schedule([trace(*(request(2.0 * i) for i in range(11)))], rate=5.0)
    assert made.rate == pytest.approx(5.0)
    assert made.sources[0].time_factor == pytest.approx(0.1)


def test_blocks_of_a_chain_keep_their_share_when_lengths_are_scaled():
    made = schedule(
        [
            trace(
                request(0.0, 1124, chain=(0, 1, 2)),
                request(1.0, 1400, chain=(0, 1, 3)),
                block_tokens=512,
            )
        ],
        length=0.125,
    )
    first, second = made.offers
    assert first.segments == (Segment(("t", 0), 64), Segment(("t", 1), 64), Segment(("t", 2), 12))
    assert (first.input_tokens, second.input_tokens) == (140, 175)
    assert (first.predicted_cached_tokens, second.predicted_cached_tokens) == (0, 128)


def test_the_public_mooncake_sample_is_predicted_as_its_blocks_say():
    sample = read_trace(SAMPLES / "mooncake_conversation.jsonl")
    for length in (1.0, 1 / 16):
        offers = schedule([sample], length=length).offers
        share = sum(o.predicted_cached_tokens for o in offers) / sum(o.input_tokens for o in offers)
        assert share == pytest.approx(0.636, abs=0.005)


@given(tokens=st.integers(1, 10**6), block=st.sampled_from([0, 64, 512]), factor=st.floats(0.01, 4))
def test_scaled_lengths_are_at_least_one_and_near_their_share(tokens, block, factor):
    got = scaled(tokens, block, factor)
    assert got >= 1
    per_block = abs(max(1, round(block * factor)) - block * factor) if block else 0
    assert abs(got - tokens * factor) <= 1 + per_block * (tokens // block if block else 0) + 1e-6


def test_prompts_are_cut_to_the_context_and_counted():
    models = [ServedModel(name="m", max_context_tokens=100)]
    made = schedule([trace(request(0.0, 300, 20), request(1.0, 10, 400))], models=models)
    assert [(o.input_tokens, o.output_tokens) for o in made.offers] == [(80, 20), (10, 50)]
    assert made.sources[0].num_shortened == 2


def test_a_chat_template_is_a_part_of_the_prompt_not_on_top_of_it():
    (offer,) = schedule([trace(request(0.0, 100))], frame=FRAME).offers
    assert offer.input_tokens == 100
    assert sum(segment.num_tokens for segment in offer.segments) == 92
    (tiny,) = schedule([trace(request(0.0, 2))], frame=FRAME).offers
    assert tiny.input_tokens == 9  # the template and one token


def test_shares_tiers_and_seeds_of_a_mix():
    conv = trace(*(request(0.5 * i) for i in range(4000)), name="conv")
    arxiv = trace(*(request(None, 900) for _ in range(4000)), name="arxiv")
    mix = parse_mix("conv=0.7:default,arxiv=0.3:batch")
    made = schedule([conv, arxiv], mix, rate=50.0, max_duration_s=40.0, seed=1)
    offers = made.offers
    assert len(offers) == pytest.approx(2000, rel=0.05)
    batch = [o for o in offers if o.tier == "batch"]
    assert len(batch) / len(offers) == pytest.approx(0.3, abs=0.03)
    assert {o.input_tokens for o in batch} == {900}
    assert [o.at_s for o in offers] == sorted(o.at_s for o in offers)
    assert [o.index for o in offers] == list(range(len(offers)))
    again = schedule([conv, arxiv], mix, rate=50.0, max_duration_s=40.0, seed=1)
    assert again == made
    other = schedule([conv, arxiv], mix, rate=50.0, max_duration_s=40.0, seed=2)
    assert other != made


def test_the_schedule_ends_with_the_first_source_that_does():
    short = trace(*(request(float(i)) for i in range(3)), name="a")
    long = trace(*(request(float(i)) for i in range(100)), name="b")
    made = schedule([short, long], parse_mix("a=1,b=1"))
    assert [sum(o.source == name for o in made.offers) for name in "ab"] == [3, 2]


def test_one_source_split_over_two_tiers_offers_each_request_once():
    source = trace(*(request(float(i), 100 + i) for i in range(200)))
    made = schedule([source], parse_mix("t=1:default,t=3:flex"), rate=10.0)
    assert sorted(o.input_tokens for o in made.offers) == list(range(100, 300))
    assert sum(o.tier == "flex" for o in made.offers) == pytest.approx(150, abs=25)


def test_turns_made_of_single_requests_grow_and_wait_for_each_other():
    source = trace(*(request(float(i), 20 + i, 10) for i in range(4)))
    mix = [Part(source="t", turns=2, think_s=1.5)]
    offers = schedule([source], mix, frame=FRAME).offers
    assert [(o.session, o.turn, o.at_s, o.think_s) for o in offers] == [
        ("t-0", 0, 0.0, 0.0),
        ("t-0", 1, None, 1.5),
        ("t-1", 0, 2.0, 0.0),
        ("t-1", 1, None, 1.5),
    ]
    # 20 of the first prompt, 10 of its answer, then 21 with the template between.
    assert [o.input_tokens for o in offers] == [20, 51, 22, 55]
    # What was said is in the cache, all but the last token that was generated... and is asked for.
    assert [o.predicted_cached_tokens for o in offers] == [0, 30, 5, 32]


def test_a_traces_own_conversations_count_the_whole_prompt():
    source = trace(request(0.0, 50, 10, session="s"), request(3.0, 100, 10, session="s"))
    first, second = schedule([source], frame=FRAME).offers
    assert (first.input_tokens, second.input_tokens) == (50, 100)
    assert second.at_s == 3.0
    assert sum(segment.num_tokens for segment in second.segments) == 100 - 60 - 4 - 3


def test_a_conversation_ends_where_the_context_does():
    models = [ServedModel(name="m", max_context_tokens=120)]
    source = trace(*(request(float(i), 40, 10) for i in range(5)))
    offers = schedule([source], [Part(source="t", turns=5)], models=models).offers
    assert [o.input_tokens + o.output_tokens <= 120 for o in offers] == [True] * len(offers)
    assert 2 <= len(offers) < 5


def test_tenants_never_share_a_predicted_prefix():
    same = [request(float(i), 100, chain=(1,), tenant=t) for i, t in enumerate("aab")]
    offers = schedule([trace(*same, block_tokens=512)]).offers
    assert [o.predicted_cached_tokens for o in offers] == [0, 99, 0]


def test_a_closed_loop_has_no_times_and_disconnects_are_a_share():
    source = trace(*(request(float(i)) for i in range(500)))
    made = schedule([source], [Part(source="t", disconnects=0.2)], users=4)
    assert {o.at_s for o in made.offers} == {None}
    assert (made.users, made.rate) == (4, None)
    assert sum(o.leave_at is not None for o in made.offers) == pytest.approx(100, abs=30)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        ({"rate": 1.0, "time": 2.0}, "one follows from the other"),
        ({"arrivals": "poisson"}, "needs --rate"),
        ({"length": 0.0}, "length factor 0"),
        ({"skip_s": 99.0}, "skip less"),
    ],
)
def test_what_does_not_go_together_is_refused(factors, message):
    with pytest.raises(ConfigError, match=message):
        schedule([trace(request(0.0), request(1.0))], **factors)


def test_a_trace_without_arrivals_needs_a_rate_and_models_must_be_served():
    with pytest.raises(ConfigError, match="no arrivals"):
        schedule([trace(request(None))])
    with pytest.raises(ConfigError, match="model 'x' is not served; there are m"):
        schedule([trace(request())], [Part(source="t", model="x")])
    with pytest.raises(ConfigError, match="source 'y' is none of the traces"):
        schedule([trace(request())], [Part(source="y")])
