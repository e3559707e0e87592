"""What replicas report of their engines."""

from dataclasses import replace

from deployments.replica_metrics import ReplicaMetrics
from engine.outputs import EngineStats

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
    assert counted["tailrace_kv_transfer_failures_total", ("m", "stall", "stall")] == 0
    assert counted["tailrace_admission_rejections_total", ("m", "full")] == 0
