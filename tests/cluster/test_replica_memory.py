"""Replicas' memory, read from a gateway's metrics."""

from cluster.replica_memory import from_metrics, to_json

METRICS = """\
# TYPE tailrace_weight_bytes gauge
tailrace_weight_bytes{model="m",role="decode",replica="Decode#1"} 150000000
tailrace_kv_pool_bytes{model="m",role="decode",replica="Decode#1"} 5.12e+08
tailrace_kv_pool_tokens{model="m",role="decode",replica="Decode#1"} 22000
tailrace_context_tokens{model="m",role="decode",replica="Decode#1"} 8192
tailrace_weight_bytes{model="m",role="prefill",replica="Prefill#2"} 150000000
tailrace_kv_sent_bytes_total{model="m",replica="Decode#1"} 12
"""


def test_a_replica_has_a_plan_once_all_of_it_is_there():
    plans = from_metrics(METRICS)
    assert set(plans) == {"Decode#1"}
    assert to_json(plans["Decode#1"], 2000) == {
        "weight_bytes": 150_000_000,
        "kv_bytes": 512_000_000,
        "kv_tokens": 22_000,
        "context_tokens": 8192,
        "largest_batch": 11,
        "largest_batch_of_longest": 2,
    }
    assert str(plans["Decode#1"]) == (
        "weights 150 MB, KV 512 MB: 22000 tokens; largest batch 21 of 1024 tokens, 2 of 8192 tokens"
    )
    assert plans["Decode#1"].told(9000).endswith("largest batch 2 of 8192 tokens")
