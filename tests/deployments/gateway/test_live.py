"""The last minute as one value: rates and quantiles from what the registry holds."""

from __future__ import annotations

import inspect
import json
import random
import re
from typing import Any

import pytest
from fake_nvml import Driver, Gpu, installed

from deployments.gateway import live
from deployments.gateway.live import LiveView, quantile
from deployments.gpu.reader import GpuReader
from deployments.gpu.series import GpuSeries
from deployments.metrics import Registry
from deployments.process_figures import ProcessFigures
from engine.metrics import CATALOGUE

OF = {"model": "m", "tier": "default"}


def view(registry: Registry) -> LiveView:
    return LiveView(registry, lambda: 1_700_000_000.0)


def ttft(registry: Registry, *seconds: float, streaming: str = "true") -> None:
    registry.counter("tailrace_requests_total", code="200", **OF).inc(len(seconds))
    series = registry.histogram("tailrace_request_ttft_seconds", streaming=streaming, **OF)
    series.observe_many(seconds)


def decode_replica() -> Registry:
    registry = Registry()
    ProcessFigures(registry, "decode")
    for name, value in (("running", 3), ("waiting", 1)):
        registry.gauge(f"vllm:num_requests_{name}", model_name="m").set(value)
    registry.gauge("vllm:kv_cache_usage_perc", model_name="m").set(0.25)
    registry.counter("vllm:generation_tokens_total", model_name="m").inc(1000)
    return registry


def test_every_series_that_is_looked_at_is_declared():
    named = re.findall(r'"((?:tailrace_|vllm:)\w+)"', inspect.getsource(live))
    assert set(named) - set(CATALOGUE) == set()


def test_quantiles_interpolate_inside_a_bucket_as_prometheus_does():
    bounds = (1.0, 2.0, 4.0)
    assert quantile(bounds, [10, 0, 0, 0], 0.5) == 0.5
    assert quantile(bounds, [10, 10, 0, 0], 0.5) == 1.0
    assert quantile(bounds, [0, 10, 10, 0], 0.75) == 3.0
    assert quantile(bounds, [0, 0, 0, 5], 0.5) == 4.0


def test_quantiles_of_many_observations_lie_within_their_bucket():
    generator = random.Random(7)
    drawn = sorted(generator.lognormvariate(-2, 0.7) for _ in range(5000))
    registry = Registry()
    looked = view(registry)
    looked.checkpoint(0.0)
    ttft(registry, *drawn)
    (tier,) = looked.snapshot(10.0)["tiers"]
    bounds = (0.0, *CATALOGUE["tailrace_request_ttft_seconds"].buckets)
    for q, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99")):
        exact = drawn[int(q * len(drawn))]
        low = max(b for b in bounds if b < exact)
        high = min(b for b in bounds if b >= exact)
        assert low <= tier["ttft"][name] <= high
    assert tier["ttft"]["count"] == 5000
    assert tier["ttft"]["mean"] == pytest.approx(sum(drawn) / 5000, rel=1e-5)


def test_only_the_last_minute_counts():
    registry = Registry()
    looked = view(registry)
    looked.checkpoint(0.0)
    ttft(registry, *[5.0] * 100)
    for second in range(5, 200, 5):
        looked.checkpoint(float(second))
    ttft(registry, *[0.05] * 6)
    shown = looked.snapshot(200.0)
    assert shown["window_s"] == 60.0
    (tier,) = shown["tiers"]
    assert (tier["requests"], tier["requests_per_s"]) == (6.0, 0.1)
    assert 0.04 < tier["ttft"]["p99"] <= 0.06


def test_who_looks_first_sees_what_the_gateway_has_kept_since_it_began():
    registry = Registry()
    looked = view(registry)
    looked.checkpoint(100.0)
    ttft(registry, 0.05)
    shown = looked.snapshot(103.0)
    assert (shown["window_s"], shown["at"]) == (3.0, 1_700_000_000.0)
    assert shown["tiers"][0]["requests"] == 1


def test_streamed_and_whole_answers_of_a_tier_are_one_distribution():
    registry = Registry()
    looked = view(registry)
    looked.checkpoint(0.0)
    ttft(registry, 0.05)
    ttft(registry, 0.5, streaming="false")
    assert looked.snapshot(1.0)["tiers"][0]["ttft"]["count"] == 2


def test_without_observations_there_is_no_quantile_rather_than_a_zero():
    registry = Registry()
    registry.counter("tailrace_requests_total", code="200", **OF)
    (tier,) = view(registry).snapshot(0.0)["tiers"]
    assert (tier["ttft"], tier["itl"], tier["e2e"]) == (None, None, None)
    assert tier["requests_per_s"] is None  # nothing lies between now and now


def test_a_quantile_above_the_last_bucket_says_so():
    registry = Registry()
    looked = view(registry)
    looked.checkpoint(0.0)
    ttft(registry, *[0.05] * 97, *[9999.0] * 3)
    found = looked.snapshot(1.0)["tiers"][0]["ttft"]
    assert found["beyond"] == ["p99"]
    assert found["p99"] == CATALOGUE["tailrace_request_ttft_seconds"].buckets[-1]


def test_attainment_stands_beside_its_target():
    registry = Registry()
    registry.counter("tailrace_requests_total", code="200", **OF)
    registry.gauge("tailrace_slo_target_seconds", tier="default", slo="ttft").set(0.5)
    registry.gauge("tailrace_slo_objective_ratio", tier="default").set(0.99)
    looked = view(registry)
    looked.checkpoint(0.0)
    for met, times in (("true", 3), ("false", 1)):
        registry.counter("tailrace_slo_requests_total", slo="ttft", met=met, **OF).inc(times)
    registry.counter("tailrace_slo_requests_total", slo="itl", met="true", **OF)
    (tier,) = looked.snapshot(1.0)["tiers"]
    assert tier["attainment"] == {
        "ttft": {"judged": 4, "ratio": 0.75},
        "itl": {"judged": 0, "ratio": None},
    }
    assert tier["targets"] == {"queue": None, "ttft": 0.5, "itl": None, "e2e": None}
    assert tier["objective"] == 0.99


def test_phases_are_shares_of_the_time_of_requests_that_ended():
    registry = Registry()
    registry.counter("tailrace_requests_total", code="200", **OF)
    looked = view(registry)
    looked.checkpoint(0.0)
    for phase, seconds in (("queue", 1.0), ("decode", 3.0), ("route", 0.0)):
        registry.histogram("tailrace_request_phase_seconds", phase=phase, **OF).observe(seconds)
    assert looked.snapshot(1.0)["tiers"][0]["phases"] == {"queue": 0.25, "decode": 0.75}


def test_failures_are_ours_and_not_the_client_s():
    registry = Registry()
    looked = view(registry)
    for code in ("200", "400", "404", "429", "499", "500", "503"):
        registry.counter("tailrace_requests_total", code=code, **OF)
    looked.checkpoint(0.0)
    for code in ("200", "400", "404", "429", "499", "500", "503"):
        registry.counter("tailrace_requests_total", code=code, **OF).inc()
    totals = looked.snapshot(1.0)["totals"]
    assert (totals["failed_per_s"], totals["left_per_s"], totals["requests_per_s"]) == (3, 1, 7)


def test_pools_list_replicas_by_what_they_say_they_are():
    registry, decode, prefill = Registry(), decode_replica(), Registry()
    ProcessFigures(prefill, "prefill")
    prefill.gauge("vllm:num_requests_running", model_name="m").set(2)
    prefill.histogram("vllm:iteration_tokens_total", model_name="m").observe(10)
    looked = view(registry)
    for replica, series in (("d1", decode), ("p1", prefill)):
        registry.merge(replica, series.snapshot())
    for role, up, stale in (("decode", 1, 1), ("prefill", 1, 0), ("queue", 1, 0)):
        registry.gauge("tailrace_replicas_up", model="m", role=role).set(up)
        registry.gauge("tailrace_stale_endpoints", model="m", role=role).set(stale)
    looked.checkpoint(0.0)
    decode.counter("vllm:generation_tokens_total", model_name="m").inc(50)
    prefill.histogram("vllm:iteration_tokens_total", model_name="m").observe_many([512, 256])
    for replica, series in (("d1", decode), ("p1", prefill)):
        registry.merge(replica, series.snapshot())
    first, second = looked.snapshot(2.0)["pools"]
    assert (first["role"], first["up"], first["stale"]) == ("decode", 1, 1)
    (shown,) = first["replicas"]
    assert {key: shown[key] for key in ("id", "running", "waiting", "kv_usage")} == {
        "id": "d1",
        "running": 3,
        "waiting": 1,
        "kv_usage": 0.25,
    }
    assert shown["tokens_per_s"] == 25.0
    assert shown["gpus"] == []
    assert (second["role"], second["replicas"][0]["tokens_per_s"]) == ("prefill", 384.0)


def test_a_replica_that_began_anew_does_not_count_backwards():
    registry, replica = Registry(), decode_replica()
    registry.merge("d1", replica.snapshot())
    looked = view(registry)
    looked.checkpoint(0.0)
    again = decode_replica()
    again.counter("vllm:generation_tokens_total", model_name="m").value = 30
    registry.merge("d1", again.snapshot())
    (pool,) = looked.snapshot(1.0)["pools"]
    assert pool["replicas"][0]["tokens_per_s"] == 30.0


def test_gpus_are_shown_with_their_replica():
    registry, replica = Registry(), decode_replica()
    driver = Driver(Gpu("GPU-a", throttle=0x41), Gpu("GPU-b", lost=15))
    with installed(driver):
        reader = GpuReader()
        GpuSeries(replica, "m", "decode").show(reader.read())
        reader.close()
    registry.merge("d1", replica.snapshot())
    ((well, lost),) = [
        pool["replicas"][0]["gpus"] for pool in view(registry).snapshot(0.0)["pools"]
    ]
    assert well == {
        "gpu": "0",
        "uuid": "GPU-a",
        "product": "NVIDIA H200",
        "up": True,
        "busy": 0.87,
        "memory_used_bytes": float(40 << 30),
        "memory_total_bytes": float(140 << 30),
        "power_w": 512.3,
        "power_limit_w": 700.0,
        "temperature_c": 61.0,
        "throttled": ["hardware_thermal"],
    }
    assert (lost["gpu"], lost["up"], lost["busy"], lost["throttled"]) == ("1", False, None, [])


def test_queues_are_shown_also_when_they_cannot_be_reached():
    registry, queue = Registry(), Registry()
    registry.gauge("tailrace_queue_connected", model="gone").set(0)
    registry.gauge("tailrace_queue_connected", model="m").set(1)
    for tier, waiting, age_s in (("default", 3, 1.5), ("batch", 1, 0.5)):
        queue.gauge("tailrace_queue_size", model="m", tier=tier).set(waiting)
        queue.gauge("tailrace_queue_oldest_age_seconds", model="m", tier=tier).set(age_s)
    registry.merge("q", queue.snapshot())
    gone, there = view(registry).snapshot(0.0)["queues"]
    assert (gone["model"], gone["connected"], gone["waiting"]) == ("gone", 0, None)
    assert (there["model"], there["waiting"], there["oldest_age_s"]) == ("m", 4, 1.5)


def test_however_many_look_the_figures_are_put_together_once_a_second():
    built: list[dict[str, Any]] = []

    def build(shown: dict[str, Any]) -> dict[str, Any]:
        built.append(shown)
        return shown | {"number": len(built)}

    looked = view(Registry())
    answers = [looked.body(10.0 + i / 100, build) for i in range(100)]
    assert len(built) == 1
    assert len(set(answers)) == 1
    assert json.loads(looked.body(11.0, build))["number"] == 2


def test_checkpoints_are_few_however_often_it_is_asked():
    looked = view(Registry())
    for tenth in range(6000):
        looked.checkpoint(tenth / 10)
    assert len(looked._checkpoints) <= live.WINDOW_S / live.CHECKPOINT_EVERY_S + 2


def test_a_hundred_replicas_are_put_together_from_one_pass_over_each_family():
    class Counting(Registry):
        passes = 0

        def family(self, name: str) -> Any:
            type(self).passes += 1
            return super().family(name)

    registry = Counting()
    replica = decode_replica().snapshot()
    for i in range(100):
        registry.merge(f"d{i:02}", replica)
    looked = view(registry)
    looked.checkpoint(0.0)
    before = Counting.passes
    shown = looked.snapshot(1.0)
    assert len(shown["pools"][0]["replicas"]) == 100
    assert Counting.passes - before <= len(CATALOGUE)
