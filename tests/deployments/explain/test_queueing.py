from __future__ import annotations

from deployments.explain.queueing import MAX_SCORES, QueueFacts, Standing, top


def test_what_went_first_is_what_was_granted_while_it_waited() -> None:
    standing = Standing()
    standing.granted("a", standing.arrived({}, 0), 0.0, "rule", ())
    arrival = standing.arrived({"a": 2, "b": 1, "gone": 0}, 2)
    for tier in ("a", "b", "b"):
        standing.granted(tier, standing.arrived({}, 0), 0.0, "rule", ())
    facts = standing.granted("a", arrival, 1.5, "most free slots", (("d1", 3.0),))
    assert facts == QueueFacts(
        ahead=2,
        waiting=(("a", 2), ("b", 1)),
        granted_before=(("a", 1), ("b", 2)),
        waited_s=1.5,
        rule="most free slots",
        scores=(("d1", 3.0),),
    )
    assert QueueFacts.from_wire(facts.to_wire()) == facts


def test_only_the_best_scores_are_told() -> None:
    scores = top((f"d{i:02}", float(i)) for i in range(20))
    assert [replica for replica, _ in scores] == [
        f"d{i:02}" for i in range(19, 19 - MAX_SCORES, -1)
    ]
    assert top([("b", 1.0), ("a", 1.0), ("c", 0.0)], highest=False) == (
        ("c", 0.0),
        ("a", 1.0),
        ("b", 1.0),
    )
