"""The P/D state machine: events in, exact actions out."""

import json

import pytest

from deployments.lifecycle.machine import (
    Cancelled,
    ComputeHere,
    End,
    Failed,
    KVArrived,
    Lifecycle,
    LifecycleConfig,
    Pull,
    PullFailed,
    Refuse,
    Reserved,
    Start,
    State,
    Stepped,
    Stop,
    StopPull,
    Submitted,
    event_from_json,
    event_to_json,
    replay,
)
from engine.request import FinishReason

CONFIG = LifecycleConfig(local_prefill_tokens=10, max_pull_attempts=2, max_fallback_tokens=1000)
STOP = FinishReason.STOP


def test_a_short_missing_part_is_computed_here():
    machine = Lifecycle(CONFIG)
    assert machine.on(Submitted(30, 20, 1, "p1")) == [Start(0, remote=False)]
    assert (machine.decision, machine.reason) == ("local", "short")


def test_without_a_healthy_prefill_replica_everything_is_computed_here():
    machine = Lifecycle(CONFIG)
    assert machine.on(Submitted(500, 0, 1, None)) == [Start(0, remote=False)]
    assert machine.reason == "no_prefill_replica"


def test_a_long_prompt_is_pulled_from_where_the_local_cache_ends():
    machine = Lifecycle(CONFIG)
    assert machine.on(Submitted(500, 16, 1, "p1")) == [Start(0, remote=True)]
    assert machine.on(Reserved(32)) == [Pull("p1", 32)]
    assert machine.on(KVArrived(48, None)) == []
    assert machine.num_cached_tokens == 48
    assert machine.on(Stepped(0, 3, STOP, 0)) == [End()]
    assert machine.num_output_tokens == 4
    assert machine.decision == "disaggregated"


def test_what_became_cached_while_waiting_for_blocks_is_not_pulled():
    machine = Lifecycle(CONFIG)
    machine.on(Submitted(500, 0, 1, "p1"))
    assert machine.on(Reserved(496)) == [ComputeHere("cached_meanwhile")]
    assert machine.state is State.RUNNING


def test_a_failed_pull_goes_to_another_replica_then_comes_home():
    machine = Lifecycle(CONFIG)
    machine.on(Submitted(500, 0, 1, "p1"))
    machine.on(Reserved(0))
    assert machine.on(PullFailed("link", "gone", "p2")) == [Pull("p2", 0)]
    assert machine.on(PullFailed("checksum", "bad", "p1")) == [ComputeHere("checksum")]
    assert (machine.decision, machine.reason) == ("fallback", "checksum")


def test_a_prompt_too_long_to_compute_here_is_refused_when_every_pull_failed():
    machine = Lifecycle(CONFIG)
    machine.on(Submitted(5000, 0, 1, "p1"))
    machine.on(Reserved(0))
    stop, refuse, end = machine.on(PullFailed("link", "gone", None))[-3:]
    assert stop == Stop(0)
    assert isinstance(refuse, Refuse)
    assert "5000 tokens" in refuse.message
    assert end == End()
    assert machine.state is State.ENDED


def test_other_choices_start_with_the_first_token_of_choice_0():
    machine = Lifecycle(CONFIG)
    machine.on(Submitted(5, 0, 3, "p1"))
    assert machine.on(Stepped(0, 1, None, 0)) == [
        Start(1, remote=False),
        Start(2, remote=False),
    ]
    assert machine.on(Stepped(1, 1, STOP, 0)) == []
    assert machine.on(Stepped(0, 4, STOP, 0)) == []
    assert machine.on(Stepped(2, 2, STOP, 0)) == [End()]
    assert machine.num_output_tokens == 8


def test_other_choices_run_although_choice_0_ended_with_its_first_token():
    machine = Lifecycle(CONFIG)
    machine.on(Submitted(500, 0, 2, "p1"))
    machine.on(Reserved(0))
    assert machine.on(KVArrived(0, STOP)) == [Start(1, remote=False)]
    assert machine.on(Stepped(1, 1, STOP, 0)) == [End()]


def test_a_cancel_while_pulling_stops_the_pull_before_the_blocks_are_freed():
    machine = Lifecycle(CONFIG)
    machine.on(Submitted(500, 0, 1, "p1"))
    machine.on(Reserved(0))
    assert machine.on(Cancelled("gateway")) == [StopPull(), Stop(0), End()]
    assert machine.on(KVArrived(0, None)) == []
    assert machine.on(PullFailed("link", "", "p2")) == []


def test_an_engine_failure_stops_everything_and_tells_the_gateway():
    machine = Lifecycle(CONFIG)
    machine.on(Submitted(5, 0, 2, None))
    machine.on(Stepped(0, 1, None, 0))
    assert machine.on(Failed("broken")) == [Stop(0), Stop(1), Refuse("broken", "engine"), End()]


@pytest.mark.parametrize(
    "events",
    [
        [
            Submitted(500, 0, 2, "p1"),
            Reserved(16),
            PullFailed("link", "x", "p2"),
            KVArrived(3, STOP),
        ],
        [Submitted(5, 0, 1, None), Stepped(0, 1, None, 2), Stepped(0, 9, FinishReason.LENGTH, 2)],
        [Submitted(5, 0, 1, None), Cancelled("deadline")],
    ],
)
def test_a_log_written_as_json_replays_to_the_same_actions(events):
    lines = [json.dumps({"t": 1.5, **event_to_json(event)}) for event in events]
    again = [event_from_json(json.loads(line)) for line in lines]
    assert again == events
    assert replay(CONFIG, again)[1] == replay(CONFIG, events)[1]
