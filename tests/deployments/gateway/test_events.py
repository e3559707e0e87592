from __future__ import annotations

import json

import pytest

from deployments.gateway.events import (
    Admitted,
    Disconnected,
    Event,
    Failed,
    Finished,
    FirstToken,
    Received,
    Submitted,
    Tokenised,
    from_json,
    replay,
    to_json,
)


def history(*ends: Event) -> list[Event]:
    """Dyadic times, so that sums are exact."""
    return [
        Received(request_id="r", at_s=8.0, endpoint="chat"),
        Tokenised(
            answer_id="chatcmpl-1",
            request_id="r",
            at_s=8.25,
            model="tiny",
            stream=True,
            prompts=1,
            prompt_tokens=7,
            max_tokens=9,
            n=1,
        ),
        Admitted(request_id="r", at_s=8.75, replica="d1"),
        Submitted(request_id="r", at_s=9.0),
        FirstToken(request_id="r", at_s=10.0),
        *ends,
    ]


FINISHED = Finished(
    request_id="r",
    at_s=12.0,
    prompt_tokens=7,
    completion_tokens=3,
    cached_tokens=4,
    reasons=("stop",),
)


def test_the_phases_of_a_finished_request_add_up_to_its_duration() -> None:
    summary = replay(history(FINISHED))
    assert summary.phases == (
        ("tokenize", 0.25),
        ("queue", 0.5),
        ("route", 0.25),
        ("prefill", 1.0),
        ("stream", 2.0),
    )
    assert sum(seconds for _, seconds in summary.phases) == summary.duration_s == 4.0
    assert (summary.outcome, summary.ttft_s, summary.completion_tokens) == ("finished", 2.0, 3)


@pytest.mark.parametrize("length", range(1, 6))
def test_phases_add_up_wherever_a_request_failed(length: int) -> None:
    end = Failed(request_id="r", at_s=16.0, code="queue_full", status=429, message="full")
    summary = replay([*history()[:length], end])
    assert sum(seconds for _, seconds in summary.phases) == summary.duration_s == 8.0
    assert len(summary.phases) == length
    assert (summary.outcome, summary.code) == ("failed", "queue_full")


def test_a_request_without_an_end_is_open() -> None:
    assert replay(history()).outcome == "open"


def test_events_of_two_requests_do_not_replay_as_one() -> None:
    with pytest.raises(ValueError, match="two requests"):
        replay([*history(), Submitted(request_id="other", at_s=11.0)])


def test_nothing_does_not_replay() -> None:
    with pytest.raises(ValueError, match="no events"):
        replay([])


def test_events_survive_json() -> None:
    events = history(
        FINISHED,
        Failed(request_id="r", at_s=13.0, code="c", status=500, message="m"),
        Disconnected(request_id="r", at_s=14.0, phase="stream"),
    )
    back = [from_json(json.loads(json.dumps(to_json(event)))) for event in events]
    assert back == events
    assert [value["kind"] for value in map(to_json, events)][:2] == ["received", "tokenised"]
