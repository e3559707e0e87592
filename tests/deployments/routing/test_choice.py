from __future__ import annotations

from deployments.routing.choice import ReplicaChooser


def make(*replicas: str) -> ReplicaChooser:
    chooser = ReplicaChooser(first_rest_s=1.0, max_rest_s=3.0)
    chooser.set_replicas(replicas)
    return chooser


def test_the_least_outstanding_prompt_tokens_win() -> None:
    chooser = make("a", "b", "c")
    chooser.begin("a", "1", 100)
    chooser.begin("b", "1", 10)
    chooser.begin("b", "2", 20)
    chooser.begin("c", "1", 40)
    assert chooser.choose(0.0) == "b"
    chooser.begin("b", "3", 20)
    assert chooser.choose(0.0) == "c"
    chooser.end("a", "1")
    assert chooser.choose(0.0) == "a"
    chooser.check()


def test_equals_take_turns() -> None:
    chooser = make("a", "b", "c")
    assert [chooser.choose(0.0) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_nobody_is_chosen_from_nobody() -> None:
    assert make().choose(0.0) is None
    assert make("a").choose(0.0, excluding={"a"}) is None


def test_a_replica_that_failed_rests_twice_as_long_each_time_up_to_a_bound() -> None:
    chooser = make("a")
    for rest in (1.0, 2.0, 3.0, 3.0):
        chooser.failed("a", 10.0)
        assert chooser.choose(10.0 + rest - 0.01) is None
        assert chooser.choose(10.0 + rest) == "a"
    chooser.succeeded("a")
    assert chooser.choose(0.0) == "a"
    chooser.failed("a", 20.0)
    assert chooser.choose(21.0) == "a"


def test_while_one_rests_the_others_work() -> None:
    chooser = make("a", "b")
    chooser.failed("a", 0.0)
    assert [chooser.choose(0.5) for _ in range(3)] == ["b", "b", "b"]


def test_a_replica_that_left_and_came_back_starts_anew() -> None:
    chooser = make("a", "b")
    chooser.begin("a", "1", 100)
    chooser.failed("a", 0.0)
    chooser.set_replicas(["b"])
    chooser.end("a", "1")
    chooser.failed("a", 0.0)
    chooser.set_replicas(["a", "b"])
    assert chooser.choose(0.0, excluding={"b"}) == "a"
    chooser.check()


def test_replicas_that_stay_keep_their_work() -> None:
    chooser = make("a", "b")
    chooser.begin("a", "1", 100)
    chooser.set_replicas(["a", "b", "c"])
    chooser.begin("b", "1", 1)
    chooser.begin("c", "1", 2)
    assert chooser.choose(0.0) == "b"
    chooser.end("b", "1")
    chooser.end("b", "1")
    chooser.check()
