from cluster.bench.queue import Effort, bench_queue, table


def test_a_short_run_over_a_live_queue_has_every_key_and_loses_nothing():
    said = []
    result = bench_queue(Effort(repeats=1, rate=100.0, over_s=1.0), said.append)
    assert result["makespan_best_s"] == 1.0
    # A live queue cannot beat its own rules; a hair less is the clock's.
    assert result["makespan_ratio"] >= 0.99
    assert result["worst_interactive_ratio"] >= 0.99
    assert result["acquires"] > 50
    assert 0 < result["acquire_p50_ms"] <= result["acquire_p99_ms"]
    assert said[0] == "20 requests of 100 ms, 1/1"
    assert table(result)[0].startswith("16 batch and 4 interactive")
