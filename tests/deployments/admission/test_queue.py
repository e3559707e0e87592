from __future__ import annotations

import pytest

from deployments.admission.queue import Action, AdmissionQueue, Granted, QueueLimits, Refused
from deployments.explain.queueing import QueueFacts
from deployments.link.messages import Acquire, Grant, Report
from engine.errors import ConfigError, Overloaded, RequestError

EPOCH = 7


def make_queue(**limits: float) -> AdmissionQueue:
    return AdmissionQueue(EPOCH, QueueLimits(**limits))


def ask(
    ticket: int,
    *,
    n: int = 1,
    priority: int = 0,
    remaining_ms: int | None = None,
    tier: str = "default",
) -> Acquire:
    return Acquire(
        ticket=ticket,
        cost_tokens=10,
        prompt_tokens=5,
        n=n,
        priority=priority,
        remaining_ms=remaining_ms,
        tier=tier,
    )


def report(
    replica: str,
    slots: int,
    *grants: tuple[int, int, int],
    ungranted: int = 0,
    draining: bool = False,
) -> Report:
    return Report(
        replica_id=replica,
        slots=slots,
        capacity_tokens=1000,
        grants=grants,
        ungranted=ungranted,
        draining=draining,
    )


def granted(actions: list[Action]) -> list[tuple[int, str]]:
    """`(ticket, replica)` of each grant; fails when there is anything else."""
    assert all(isinstance(a, Granted) for a in actions)
    return [(a.ticket, a.grant.replica_id) for a in actions if isinstance(a, Granted)]


def refusal(actions: list[Action]) -> tuple[int, str]:
    [action] = actions
    assert isinstance(action, Refused)
    assert isinstance(action.error, Overloaded)
    return action.ticket, action.error.code


def test_a_free_slot_is_granted_at_once_with_epoch_and_expiry() -> None:
    queue = make_queue(grant_expiry_s=1.5)
    queue.replica_reported(report("d1", 2), 0.0)
    grant = Grant(grant_id=1, epoch=EPOCH, replica_id="d1", expiry_ms=1500)
    assert queue.acquire("g1", ask(5), 0.0) == [Granted("g1", 5, grant)]
    assert queue.free_slots == {"d1": 1}
    queue.check()


def test_a_freed_slot_wakes_the_first_who_waits() -> None:
    queue = make_queue()
    queue.replica_reported(report("d1", 1), 0.0)
    assert granted(queue.acquire("g1", ask(1), 0.0)) == [(1, "d1")]
    assert queue.acquire("g2", ask(1), 0.0) == []
    assert queue.acquire("g1", ask(2), 0.0) == []
    [action] = queue.release("g1", 1, 0.1)
    assert isinstance(action, Granted)
    assert (action.gateway_id, action.ticket) == ("g2", 1)
    queue.check()


def test_lower_priority_numbers_go_first_and_equals_in_order_of_arrival() -> None:
    queue = make_queue()
    for ticket, priority in ((1, 5), (2, 0), (3, 5), (4, 0)):
        assert queue.acquire("g", ask(ticket, priority=priority), 0.0) == []
    served = granted(queue.replica_reported(report("d1", 4), 0.0))
    assert [ticket for ticket, _ in served] == [2, 4, 1, 3]


def test_the_replica_with_the_most_free_slots_is_chosen_and_ties_take_turns() -> None:
    queue = make_queue()
    queue.replica_reported(report("d1", 2), 0.0)
    queue.replica_reported(report("d2", 4), 0.0)
    chosen = [granted(queue.acquire("g", ask(t), 0.0))[0][1] for t in range(6)]
    assert chosen == ["d2", "d2", "d1", "d2", "d1", "d2"]


def test_slots_are_counted_in_choices_and_nobody_passes_a_large_request() -> None:
    queue = make_queue()
    queue.replica_reported(report("d1", 4), 0.0)
    assert granted(queue.acquire("g", ask(1, n=3), 0.0)) == [(1, "d1")]
    assert queue.acquire("g", ask(2, n=2), 0.0) == []
    assert queue.acquire("g", ask(3, n=1), 0.0) == []
    assert granted(queue.release("g", 1, 0.0)) == [(2, "d1"), (3, "d1")]


def test_more_choices_than_any_replica_runs_can_never_be_served() -> None:
    queue = make_queue()
    queue.replica_reported(report("d1", 4), 0.0)
    [action] = queue.acquire("g", ask(1, n=5), 0.0)
    assert isinstance(action, Refused)
    assert isinstance(action.error, RequestError)
    assert str(action.error).startswith("n=5: no replica of this model runs more than 4")
    queue.check()


def test_a_reported_grant_holds_its_slot_until_the_reports_drop_it() -> None:
    queue = make_queue()
    queue.replica_reported(report("d1", 1), 0.0)
    queue.acquire("g", ask(1), 0.0)
    queue.acquire("g", ask(2), 0.0)
    assert queue.replica_reported(report("d1", 1, (EPOCH, 1, 1)), 0.1) == []
    assert queue.release("g", 1, 0.2) == []  # decode still runs it
    assert queue.tick(50.0) == []  # no expiry for what decode lists
    assert granted(queue.replica_reported(report("d1", 1), 50.1)) == [(2, "d1")]
    queue.check()


def test_a_report_made_before_the_submit_arrived_frees_nothing() -> None:
    queue = make_queue()
    queue.replica_reported(report("d1", 1), 0.0)
    queue.acquire("g", ask(1), 0.0)
    queue.acquire("g", ask(2), 0.0)
    assert queue.replica_reported(report("d1", 1), 0.1) == []
    assert queue.free_slots == {"d1": 0}


def test_a_grant_that_no_report_shows_in_time_is_reclaimed() -> None:
    queue = make_queue(grant_expiry_s=2.0)
    queue.replica_reported(report("d1", 1), 0.0)
    queue.acquire("g", ask(1), 0.0)
    queue.acquire("g", ask(2), 0.0)
    assert queue.next_alarm() == 2.0
    assert queue.tick(1.9) == []
    assert granted(queue.tick(2.0)) == [(2, "d1")]
    queue.check()


def test_a_restarted_queue_counts_grants_of_the_old_epoch_until_decode_drops_them() -> None:
    queue = make_queue()
    assert queue.acquire("g", ask(1), 0.0) == []
    assert queue.replica_reported(report("d1", 3, (EPOCH - 1, 1, 2), ungranted=1), 0.0) == []
    assert queue.release("g", 1, 0.0) == []  # grant 1 of another epoch is not ours
    assert granted(queue.replica_reported(report("d1", 3, (EPOCH - 1, 1, 2)), 0.0)) == [(1, "d1")]
    assert queue.free_slots == {"d1": 0}


def test_a_replica_over_granted_by_two_queues_gets_nothing_more() -> None:
    queue = make_queue()
    queue.replica_reported(report("d1", 2, (1, 1, 1), (2, 1, 1), (2, 2, 1)), 0.0)
    assert queue.free_slots == {"d1": -1}
    assert queue.acquire("g", ask(1), 0.0) == []


def test_a_request_whose_time_runs_out_is_refused_with_an_estimate() -> None:
    queue = make_queue()
    queue.replica_reported(report("d1", 1, (1, 1, 1)), 0.0)
    assert queue.acquire("g", ask(1, remaining_ms=500), 10.0) == []
    assert queue.acquire("g", ask(2), 10.0) == []
    assert queue.next_alarm() == 10.5
    actions = queue.tick(10.5)
    assert refusal(actions) == (1, "queue_timeout")
    assert isinstance(actions[0], Refused)
    assert "waited 0.5 s of at most 0.5 s" in str(actions[0].error)
    assert queue.num_waiting == 1
    queue.check()


def test_a_slot_freed_after_the_deadline_does_not_go_to_the_late() -> None:
    queue = make_queue()
    queue.replica_reported(report("d1", 1), 0.0)
    queue.acquire("g", ask(1), 0.0)
    queue.acquire("g", ask(2, remaining_ms=100), 0.0)
    queue.acquire("g", ask(3), 0.0)
    late, served = queue.release("g", 1, 0.2)
    assert refusal([late]) == (2, "queue_timeout")
    assert granted([served]) == [(3, "d1")]


def test_a_request_that_arrives_without_time_left_is_refused_even_with_free_slots() -> None:
    queue = make_queue()
    queue.replica_reported(report("d1", 1), 0.0)
    assert refusal(queue.acquire("g", ask(1, remaining_ms=0), 0.0)) == (1, "queue_timeout")
    assert queue.free_slots == {"d1": 1}


def test_nobody_waits_longer_than_the_stated_maximum() -> None:
    queue = make_queue(max_wait_s=30.0)
    queue.replica_reported(report("d1", 1, (1, 1, 1)), 0.0)
    queue.acquire("g", ask(1, remaining_ms=90_000), 0.0)
    assert queue.next_alarm() == 30.0
    assert refusal(queue.tick(30.0)) == (1, "queue_timeout")


def test_the_bound_on_waiting_entries_refuses_the_newcomer() -> None:
    queue = make_queue(max_waiting=2)
    queue.replica_reported(report("d1", 1), 0.0)
    for ticket in range(3):
        queue.acquire("g", ask(ticket), 0.0)
    actions = queue.acquire("g", ask(3), 0.0)
    assert refusal(actions) == (3, "queue_full")
    assert isinstance(actions[0], Refused)
    assert "2 requests wait for this model, the limit is 2" in str(actions[0].error)
    queue.check()


def test_a_queue_without_places_still_grants_free_slots() -> None:
    queue = make_queue(max_waiting=0)
    queue.replica_reported(report("d1", 1), 0.0)
    assert granted(queue.acquire("g", ask(1), 0.0)) == [(1, "d1")]
    assert refusal(queue.acquire("g", ask(2), 0.0)) == (2, "queue_full")


def test_without_replicas_requests_wait_a_stated_time_and_are_refused_by_name() -> None:
    queue = make_queue(no_replica_wait_s=5.0)
    assert queue.acquire("g", ask(1), 1.0) == []
    assert queue.acquire("g", ask(2), 2.0) == []
    assert queue.next_alarm() == 6.0
    assert refusal(queue.tick(6.0)) == (1, "no_replicas")
    assert granted(queue.replica_reported(report("d1", 1), 6.5)) == [(2, "d1")]


def test_the_wait_for_a_replica_starts_when_the_last_one_leaves() -> None:
    queue = make_queue(no_replica_wait_s=5.0)
    queue.replica_reported(report("d1", 1, (1, 1, 1)), 0.0)
    queue.acquire("g", ask(1), 1.0)
    queue.replica_lost("d1", 20.0)
    assert queue.next_alarm() == 25.0
    assert refusal(queue.tick(25.0)) == (1, "no_replicas")


def test_a_draining_replica_gets_no_more_work() -> None:
    queue = make_queue()
    queue.replica_reported(report("d1", 8, draining=True), 0.0)
    queue.replica_reported(report("d2", 1), 0.0)
    assert granted(queue.acquire("g", ask(1), 0.0)) == [(1, "d2")]
    assert queue.acquire("g", ask(2), 0.0) == []
    assert queue.free_slots == {"d2": 0}


def test_a_lost_gateway_takes_its_entries_and_promises_along() -> None:
    queue = make_queue()
    queue.replica_reported(report("d1", 1), 0.0)
    queue.acquire("g1", ask(1), 0.0)
    queue.acquire("g1", ask(2), 0.0)
    queue.acquire("g2", ask(1), 0.0)
    [action] = queue.gateway_lost("g1", 0.1)
    assert isinstance(action, Granted)
    assert action.gateway_id == "g2"
    assert queue.num_waiting == 0
    queue.check()


def test_promises_survive_a_lost_link_to_their_replica() -> None:
    queue = make_queue(grant_expiry_s=2.0)
    queue.replica_reported(report("d1", 2), 0.0)
    queue.acquire("g", ask(1), 0.0)
    queue.replica_lost("d1", 0.1)
    queue.replica_reported(report("d1", 2), 0.2)
    assert queue.free_slots == {"d1": 1}
    queue.tick(2.0)
    assert queue.free_slots == {"d1": 2}
    queue.check()


def test_abandoning_the_head_lets_those_behind_it_pass() -> None:
    queue = make_queue()
    queue.replica_reported(report("d1", 2), 0.0)
    queue.acquire("g", ask(1), 0.0)
    queue.acquire("g", ask(2, n=2), 0.0)
    queue.acquire("g", ask(3), 0.0)
    assert granted(queue.abandon("g", 2, 0.0)) == [(3, "d1")]
    assert queue.abandon("g", 2, 0.0) == []
    queue.check()


def test_only_the_gateway_that_holds_a_grant_can_release_it() -> None:
    queue = make_queue()
    queue.replica_reported(report("d1", 1), 0.0)
    queue.acquire("g1", ask(1), 0.0)
    assert queue.release("g2", 1, 0.0) == []
    assert queue.free_slots == {"d1": 0}


def test_a_ticket_cannot_wait_twice() -> None:
    queue = make_queue()
    queue.acquire("g", ask(1), 0.0)
    with pytest.raises(ValueError, match="ticket 1 of 'g' already waits"):
        queue.acquire("g", ask(1), 0.0)


def test_the_estimate_follows_the_pace_of_late() -> None:
    queue = make_queue(max_waiting=4, grant_expiry_s=60.0, refuse_hopeless=False)
    queue.replica_reported(report("d1", 1), 0.0)
    for ticket in range(5):
        queue.acquire("g", ask(ticket), 0.0)
    for i in range(7):
        queue.release("g", i + 1, 10.0 * (i + 1))
        queue.acquire("g", ask(100 + i), 10.0 * (i + 1))
    [action] = queue.acquire("g", ask(200), 70.0)
    assert isinstance(action, Refused)
    assert isinstance(action.error, Overloaded)
    assert action.error.retry_after_s == pytest.approx(40.0)


def test_ten_thousand_abandoned_requests_leave_nothing_behind() -> None:
    queue = make_queue()
    queue.replica_reported(report("d1", 1), 0.0)
    queue.acquire("g", ask(0), 0.0)
    for ticket in range(1, 10_001):
        queue.acquire("g", ask(ticket), 0.0)
        queue.abandon("g", ticket, 0.0)
    assert len(queue._order) < 100
    assert len(queue._alarms.heap) < 200
    queue.check()


def test_limits_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_waiting=-1"):
        QueueLimits(max_waiting=-1)
    with pytest.raises(ConfigError, match="grant_expiry_s=0"):
        QueueLimits(grant_expiry_s=0)


def test_a_grant_tells_behind_whom_its_entry_stood_and_who_went_first() -> None:
    queue = make_queue(grant_expiry_s=60.0)
    queue.replica_reported(report("d1", 1), 0.0)
    queue.acquire("g1", ask(1), 0.0)  # takes the slot
    queue.acquire("g1", ask(2), 1.0)
    queue.acquire("g1", ask(3, priority=5, tier="batch"), 1.0)
    queue.acquire("g1", ask(4), 2.0)
    queue.check()
    facts: dict[int, QueueFacts | None] = {}
    for now in (3.0, 4.0):
        for action in queue.release("g1", len(facts) + 1, now):
            assert isinstance(action, Granted)
            facts[action.ticket] = action.grant.facts
    assert facts[4] == QueueFacts(
        ahead=1,  # ticket 2; ticket 3 is less urgent
        waiting=(("batch", 1), ("default", 1)),
        granted_before=(("default", 1),),
        waited_s=2.0,
        rule="most free slots",
        scores=(("d1", 1.0),),
    )
    queue.check()
