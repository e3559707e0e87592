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
        model="m", leading="tailrace-queue:m:2", standing_by=("tailrace-queue:m",)
    )
    assert str(queues["m"]) == "tailrace-queue:m:2 leads, tailrace-queue:m stands by"
    assert str(queues["n"]) == "no queue leads, tailrace-queue:n stands by"
