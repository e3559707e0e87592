from __future__ import annotations

from cluster.bench.cpu import Bystanders, CpuTimes


def test_cpu_time_is_what_was_spent_in_between_by_those_who_were_there_all_along():
    before = CpuTimes({1: 10.0, 2: 5.0, 3: 1.0})
    after = CpuTimes({1: 10.5, 2: 5.25, 4: 100.0})
    assert after.since(before, [1, 2, 3, 4]) == 0.75
    assert after.since(before, [2]) == 0.25
    assert after.since(before, []) == 0.0


def test_the_share_of_others_lies_between_nothing_and_everything():
    bystanders = Bystanders(list)
    sum(range(200_000))
    assert 0.0 <= bystanders.share() <= 1.0
