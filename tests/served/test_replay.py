"""A public trace replayed against a real cluster: what is cached is what the trace's blocks say."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import BLOCK_TOKENS, Cluster

from cluster.replay.formats import read_trace
from cluster.replay.mix import Part
from cluster.replay.replay import Spec, offer, prepare
from cluster.replay.workload import Factors

pytestmark = pytest.mark.cluster

MOONCAKE = Path(__file__).parents[1] / "traces" / "mooncake_conversation.jsonl"


def test_a_mooncake_replay_is_cached_as_its_blocks_predict(cluster: Cluster):
    """One user, so that whatever a prompt shares was computed before it came."""
    spec = Spec(
        traces=(read_trace(MOONCAKE),),
        mix=(Part(source="mooncake_conversation", model="fake"),),
        factors=Factors(
            length=BLOCK_TOKENS / 512,
            users=1,
            max_requests=100,
            max_output_tokens=2,
            block_tokens=BLOCK_TOKENS,
            seed=4,
        ),
    )
    prepared = prepare(spec, cluster.url)
    run, outcomes = offer(prepared)
    assert {outcome.result for outcome in outcomes} == {"ok"}
    assert [o.input_tokens for o in outcomes] == [o.planned_input_tokens for o in outcomes]
    assert run.end is not None
    assert run.end.num_outcomes == 100
    prompt = sum(outcome.input_tokens for outcome in outcomes)
    measured = sum(outcome.cached_tokens for outcome in outcomes) / prompt
    predicted = sum(outcome.predicted_cached_tokens for outcome in outcomes) / prompt
    assert predicted > 0.3
    assert measured == pytest.approx(predicted, abs=0.02)
    # Tokens move as whole blocks: none more is cached than the arithmetic allows.
    for outcome in outcomes:
        assert outcome.cached_tokens <= outcome.predicted_cached_tokens + BLOCK_TOKENS
    cluster.settled()
