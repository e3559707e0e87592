from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.replay.outcome import Outcome
from cluster.replay.progress import Progress, RoughQuantiles

OUTCOME = Outcome(
    index=0,
    source="t",
    scheduled_s=1.0,
    sent_s=1.1,
    attempt_s=1.1,
    first_token_s=1.25,
    end_s=3.0,
    planned_input_tokens=1,
    planned_output_tokens=1,
    result="ok",
)


def test_quantiles_are_right_to_two_percent():
    rough = RoughQuantiles()
    for i in range(1000, 0, -1):
        rough.add(i / 100)
    assert rough.quantile(0.5) == pytest.approx(5.0, rel=0.02)
    assert rough.quantile(0.99) == pytest.approx(9.9, rel=0.02)
    assert RoughQuantiles().quantile(0.5) is None


def test_a_line_says_how_things_stand_from_when_requests_were_due():
    progress = Progress(10)
    assert "0/10 done" in progress.line(0.0, 0, 0)
    progress.add(OUTCOME)
    progress.add(replace(OUTCOME, result="shed", first_token_s=None))
    progress.add(replace(OUTCOME, result="timeout", first_token_s=None))
    line = progress.line(2.0, 8, 5)
    assert line.startswith("2 s  3/10 done  4.0 sent/s  5 in flight  TTFT p50 24")
    assert line.endswith("1 shed, 1 failed")
