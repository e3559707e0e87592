"""Who leads the admission queues, read from a gateway's metrics."""

from cluster.queues import Queues, from_metrics

METRICS = """\
# TYPE tailrace_queue_leads gauge
tailrace_queue_leads{model="m",replica="tailrace-queue:m"} 0
tailrace_queue_leads{model="m",replica="tailrace-queue:m:2"} 1
tailrace_queue_leads{model="n",replica="tailrace-queue:n"} 0
tailrace_queue_slots{model="m",replica="tailrace-queue:m"} 1
"""


def test_each_model_has_one_that_leads_and_one_that_stands_by():
    queues = from_metrics(METRICS)
    assert queues["m"] == Queues(
        model="m", leading=("tailrace-queue:m:2",), standing_by=("tailrace-queue:m",)
    )
    assert str(queues["m"]) == "tailrace-queue:m:2 leads, tailrace-queue:m stands by"
    assert str(queues["n"]) == "no queue leads, tailrace-queue:n stands by"


def test_a_queue_that_died_a_moment_ago_is_not_taken_for_the_one_that_leads():
    after = METRICS.replace('tailrace-queue:m"} 0', 'tailrace-queue:m"} 1')
    queues = from_metrics(after)["m"]
    assert queues.leading == ("tailrace-queue:m", "tailrace-queue:m:2")
    assert str(queues) == (
        "one of tailrace-queue:m and tailrace-queue:m:2 has just taken over, none stands by"
    )
