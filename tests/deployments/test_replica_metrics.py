"""What replicas report of their engines."""

from dataclasses import replace

from deployments.replica_metrics import ReplicaMetrics
from engine.outputs import EngineStats, StepOutput
from engine.request import FinishReason

IDLE = EngineStats(
    num_running=0,
    num_waiting=0,
    num_waiting_remote=0,
    num_free_blocks=10,
    num_held_blocks=0,
    num_blocks=10,
    num_leases=0,
    prefix_query_tokens=0,
    prefix_hit_tokens=0,
    num_preemptions=0,
    num_leases_expired=0,
)


def test_blocks_count_as_leaked_once_an_idle_replica_held_them_twice():
    metrics = ReplicaMetrics("m", "decode", "d1")
    leaked = metrics.registry.gauge("tailrace_kv_leaked_blocks", model="m")
    seen = []
    for held, running in ((3, 0), (2, 0), (0, 0), (4, 0), (4, 1), (4, 0), (4, 0)):
        metrics.sample_engine(replace(IDLE, num_held_blocks=held, num_running=running), 16)
        seen.append(leaked.value)
    assert seen == [0, 2, 0, 0, 0, 0, 4]


def test_what_a_decode_replica_counts_is_there_before_it_happens():
    counted = {
        (metric.name, labels): series.value
        for metric, labels, series in ReplicaMetrics("m", "decode", "d1").registry.series()
        if metric.kind == "counter" and metric.name.startswith("tailrace_")
    }
    assert counted["tailrace_prefill_fallbacks_total", ("m", "local")] == 0
    assert counted["tailrace_kv_transfer_failures_total", ("m", "link", "stall", "stall")] == 0
    assert counted["tailrace_admission_rejections_total", ("m", "full")] == 0


def test_a_replica_whose_metrics_are_off_records_nothing_until_they_are_on():
    metrics = ReplicaMetrics("m", "decode", "d1")
    metrics.recording = False
    before = metrics.registry.snapshot()

    def work() -> None:
        metrics.step(StepOutput(num_tokens=3, duration_s=0.01))
        metrics.gaps([(0.01, 3)])
        metrics.first_token(0.1)
        metrics.ended(FinishReason.LENGTH, 0.2, 0.1, 3)
        metrics.sample_engine(replace(IDLE, num_running=1), 16)
        metrics.settle()

    work()
    assert metrics.registry.snapshot() == before
    metrics.recording = True
    work()
    told = {name: value for name, _, value in metrics.registry.snapshot()}
    assert told["vllm:num_requests_running"] == 1
    assert sum(told["vllm:inter_token_latency_seconds"][1:]) == 3
    assert sum(told["tailrace_engine_step_seconds"][1:]) == 1


def test_steps_planned_ahead_and_what_was_computed_for_nothing_are_counted():
    metrics = ReplicaMetrics("m", "prefill", "p1")
    for ahead, discarded in ((0, 0), (5, 1), (9, 1)):
        metrics.sample_engine(
            replace(IDLE, num_steps_ahead=ahead, num_discarded_rows=discarded), 16
        )
        pool = {"model": "m", "role": "prefill"}
        counters = [
            metrics.registry.counter(f"tailrace_engine_{name}_total", **pool).value
            for name in ("steps_ahead", "discarded_tokens")
        ]
        assert counters == [ahead, discarded]
