import math
import socket
import subprocess
import sys
import time
import urllib.request

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from deployments.metrics import CONTENT_TYPE, CappedLabel, RayExporter, Registry
from engine.metrics import CATALOGUE, Metric

SMALL = {
    m.name: m
    for m in (
        Metric(name="hits_total", kind="counter", unit="", labels=("path",), help="Hits."),
        Metric(name="up", kind="gauge", unit="", labels=(), help="Up\\down,\nsecond line."),
        Metric(
            name="wait_seconds",
            kind="histogram",
            unit="seconds",
            labels=("tier",),
            help="Wait.",
            buckets=(0.1, 1.0, 5.0),
        ),
        Metric(
            name="x:bare_seconds", kind="histogram", unit="", labels=(), help="X.", buckets=(1.0,)
        ),
    )
}


def samples(registry: Registry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What Prometheus's own parser reads from a rendered registry."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(registry.render().decode())
        for sample in family.samples
    }


def test_the_text_is_exactly_the_exposition_format():
    registry = Registry(SMALL)
    registry.counter("hits_total", path="/a").inc(2)
    registry.gauge("up").set(0.25)
    wait = registry.histogram("wait_seconds", tier="default")
    wait.observe_many([0.05, 0.1, 0.5, 100.0])
    registry.histogram("x:bare_seconds").observe(0.5)
    assert registry.render().decode() == (
        "# HELP hits_total Hits.\n"
        "# TYPE hits_total counter\n"
        'hits_total{path="/a"} 2\n'
        "# HELP up Up\\\\down,\\nsecond line.\n"
        "# TYPE up gauge\n"
        "up 0.25\n"
        "# HELP wait_seconds Wait.\n"
        "# TYPE wait_seconds histogram\n"
        'wait_seconds_bucket{tier="default",le="0.1"} 2\n'
        'wait_seconds_bucket{tier="default",le="1.0"} 3\n'
        'wait_seconds_bucket{tier="default",le="5.0"} 3\n'
        'wait_seconds_bucket{tier="default",le="+Inf"} 4\n'
        'wait_seconds_sum{tier="default"} 100.65\n'
        'wait_seconds_count{tier="default"} 4\n'
        "# HELP x:bare_seconds X.\n"
        "# TYPE x:bare_seconds histogram\n"
        'x:bare_seconds_bucket{le="1.0"} 1\n'
        'x:bare_seconds_bucket{le="+Inf"} 1\n'
        "x:bare_seconds_sum 0.5\n"
        "x:bare_seconds_count 1\n"
    )
    assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"


def test_prometheus_reads_back_every_kind_of_the_real_catalogue():
    registry = Registry()
    for metric in CATALOGUE.values():
        labels = {label: f"{label} of {metric.name}" for label in metric.labels}
        if metric.kind == "counter":
            registry.counter(metric.name, **labels).inc(3)
        elif metric.kind == "gauge":
            registry.gauge(metric.name, **labels).set(-1.5)
        else:
            registry.histogram(metric.name, **labels).observe_many([0.3, 1e9])
    families = {
        family.name: family for family in text_string_to_metric_families(registry.render().decode())
    }
    for metric in CATALOGUE.values():
        name = metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name
        family = families[name]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        if metric.kind != "histogram":
            assert [s.value for s in family.samples] == [3 if metric.kind == "counter" else -1.5]
            continue
        buckets = [s for s in family.samples if s.name == f"{metric.name}_bucket"]
        bounds = [float(s.labels["le"]) for s in buckets]
        assert bounds == [*metric.buckets, math.inf]
        assert [s.value for s in buckets] == [(bound >= 0.3) + (bound >= 1e9) for bound in bounds]


@given(st.text(max_size=30))
def test_any_label_value_survives_the_text(value):
    registry = Registry(SMALL)
    registry.counter("hits_total", path=value).inc()
    # The parser splits lines as Python does; Prometheus ends them at \n alone.
    if len(value.splitlines()) <= 1 and not value.endswith(("\r", "\x0b", "\x0c")):
        assert samples(registry) == {("hits_total", (("path", value),)): 1.0}
    text = registry.render().decode()
    assert text.count("\n") == 3


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (math.nan, "NaN"),
        (3.0, "3"),
        (1e-7, "1e-07"),
        (2.0**60, "1.152921504606847e+18"),
    ],
)
def test_special_values_are_written_as_prometheus_reads_them(value, text):
    registry = Registry(SMALL)
    registry.gauge("up").set(value)
    assert f"\nup {text}\n" in registry.render().decode()
    (read,) = samples(registry).values()
    assert read == value or (math.isnan(read) and math.isnan(value))


def test_a_value_on_a_boundary_belongs_to_the_bucket_below():
    histogram = Registry(SMALL).histogram("wait_seconds", tier="a")
    for value in (0.1, 0.1000001, 1.0, 5.0, 5.1):
        histogram.observe(value)
    assert histogram.counts == [1, 2, 1, 1]


@given(st.lists(st.floats(0, 10)))
def test_many_observations_at_once_equal_the_same_one_by_one(values):
    registry = Registry(SMALL)
    one, many = (registry.histogram("wait_seconds", tier=tier) for tier in ("one", "many"))
    for value in values:
        one.observe(value)
    many.observe_many(values)
    assert one.counts == many.counts
    assert one.sum == pytest.approx(many.sum)
    assert many.count == len(values)


def test_asking_twice_gives_the_same_series_whatever_the_order_of_labels():
    registry = Registry()
    a = registry.counter("tailrace_client_disconnects_total", model="m", phase="decode")
    b = registry.counter("tailrace_client_disconnects_total", phase="decode", model="m")
    assert a is b


def test_unknown_names_kinds_and_label_sets_are_refused():
    registry = Registry(SMALL)
    with pytest.raises(ValueError, match="'nonsense' is not in the catalogue"):
        registry.counter("nonsense")
    with pytest.raises(ValueError, match=r"has the labels \['path'\], not \['paths'\]"):
        registry.counter("hits_total", paths="a")
    with pytest.raises(ValueError, match=r"has the labels \['path'\], not \[\]"):
        registry.counter("hits_total")
    with pytest.raises(ValueError, match=r"has the labels \[\], not \['replica'\]"):
        registry.gauge("up", replica="a")
    with pytest.raises(ValueError, match="'up' is a gauge, not a histogram"):
        registry.histogram("up")
    with pytest.raises(ValueError, match="counter increment -1"):
        registry.counter("hits_total", path="a").inc(-1)
    assert next(registry.series())[2].value == 0


def test_a_removed_series_is_no_longer_shown():
    registry = Registry(SMALL)
    registry.counter("hits_total", path="a").inc()
    registry.counter("hits_total", path="b").inc()
    registry.remove("hits_total", path="a")
    registry.remove("hits_total", path="never was")
    assert samples(registry) == {("hits_total", (("path", "b"),)): 1.0}


def filled(hits: int) -> Registry:
    registry = Registry(SMALL)
    registry.counter("hits_total", path="a").inc(hits)
    registry.gauge("up").set(1)
    registry.histogram("wait_seconds", tier="t").observe_many([0.5] * hits)
    return registry


def test_the_first_values_of_a_capped_label_keep_their_names_and_the_rest_share_one():
    tenant = CappedLabel(2)
    named = [tenant(value) for value in ("a", "b", "c", "a", "d", "b")]
    assert named == ["a", "b", "other", "a", "other", "b"]


def test_a_capped_label_of_none_names_nobody():
    assert CappedLabel(0)("a") == "other"
    with pytest.raises(ValueError, match="label limit -1"):
        CappedLabel(-1)


def test_own_series_carry_the_process_id_beside_those_of_others():
    registry = Registry(SMALL, replica="g1")
    registry.counter("hits_total", path="/").inc()
    registry.gauge("up").set(1)
    registry.histogram("x:bare_seconds").observe(2.0)
    registry.merge("d1", [["up", [], 0]])
    assert samples(registry) == {
        ("hits_total", (("path", "/"), ("replica", "g1"))): 1,
        ("up", (("replica", "g1"),)): 1,
        ("up", (("replica", "d1"),)): 0,
        ("x:bare_seconds_bucket", (("le", "1.0"), ("replica", "g1"))): 0,
        ("x:bare_seconds_bucket", (("le", "+Inf"), ("replica", "g1"))): 1,
        ("x:bare_seconds_sum", (("replica", "g1"),)): 2,
        ("x:bare_seconds_count", (("replica", "g1"),)): 1,
    }
    assert registry.snapshot()[0] == ["hits_total", ["/"], 1.0]


def test_a_snapshot_survives_msgpack_and_shows_under_its_replica():
    gateway = filled(1)
    wire = msgpack.unpackb(msgpack.packb(filled(7).snapshot()))
    assert gateway.merge("decode#1", wire) == 0
    shown = samples(gateway)
    assert shown["hits_total", (("path", "a"),)] == 1
    assert shown["hits_total", (("path", "a"), ("replica", "decode#1"))] == 7
    assert shown["up", (("replica", "decode#1"),)] == 1
    assert shown["wait_seconds_count", (("replica", "decode#1"), ("tier", "t"))] == 7
    assert (
        shown["wait_seconds_bucket", (("le", "0.1"), ("replica", "decode#1"), ("tier", "t"))] == 0
    )
    assert (
        shown["wait_seconds_bucket", (("le", "1.0"), ("replica", "decode#1"), ("tier", "t"))] == 7
    )


def test_each_family_is_headed_once_however_many_replicas_it_has():
    gateway = filled(1)
    gateway.merge("a", filled(2).snapshot())
    gateway.merge("b", filled(3).snapshot())
    text = gateway.render().decode()
    assert text.count("# TYPE hits_total") == 1
    assert [line for line in text.splitlines() if line.startswith("hits_total")] == [
        'hits_total{path="a"} 1',
        'hits_total{path="a",replica="a"} 2',
        'hits_total{path="a",replica="b"} 3',
    ]


def test_a_new_snapshot_replaces_the_last_and_a_dropped_replica_is_gone():
    gateway = Registry(SMALL)
    gateway.merge("a", filled(2).snapshot())
    gateway.merge("a", [["up", [], 5.0]])
    assert samples(gateway) == {("up", (("replica", "a"),)): 5.0}
    assert gateway.replicas == ("a",)
    gateway.drop("a")
    gateway.drop("never came")
    assert gateway.render() == b""
    assert gateway.replicas == ()


def test_merged_series_are_neither_passed_on_nor_exported():
    gateway = Registry(SMALL)
    gateway.merge("a", filled(2).snapshot())
    assert gateway.snapshot() == []
    assert list(gateway.series()) == []


def test_series_of_another_version_are_left_out_and_the_rest_is_shown():
    gateway = Registry(SMALL)
    left_out = gateway.merge(
        "a",
        [
            ["not_yet_known_total", [], 1.0],
            ["hits_total", ["a", "b"], 1.0],
            ["wait_seconds", ["t"], [1.0, 1, 0]],
            ["wait_seconds", ["t"], 3.0],
            ["up", [], [1.0]],
            ["up", [], 1.0],
        ],
    )
    assert left_out == 5
    assert samples(gateway) == {("up", (("replica", "a"),)): 1.0}


def test_what_is_no_snapshot_is_refused_and_the_last_one_stays():
    gateway = Registry(SMALL)
    gateway.merge("a", [["up", [], 1.0]])
    for broken in ([["up", []]], [[1, [], 1.0]], [["up", "x", 1.0]]):
        with pytest.raises(ValueError, match=r"snapshot of a|unpack"):
            gateway.merge("a", broken)
    assert samples(gateway) == {("up", (("replica", "a"),)): 1.0}


class FakeRay:
    """Holds what Ray would: gauges keep the last value, tags must be complete."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self.names: set[str] = set()
        self.calls = 0

    def Gauge(self, name, description, tag_keys):
        assert ":" not in name
        assert name not in self.names, "a metric is made once"
        assert description
        self.names.add(name)
        return FakeRay.Metric(self, name, tag_keys)

    class Metric:
        def __init__(self, ray, name, tag_keys):
            self.ray, self.name, self.tag_keys = ray, name, tag_keys

        def _key(self, tags):
            self.ray.calls += 1
            assert set(tags) == set(self.tag_keys)
            return self.name, tuple(sorted(tags.items()))

        def set(self, value, tags):
            self.ray.values[self._key(tags)] = value


def test_ray_gets_what_prometheus_would_with_underscores_for_colons():
    registry, ray = filled(3), FakeRay()
    registry.histogram("x:bare_seconds").observe(0.5)
    exporter = RayExporter(registry, {"replica_id": "r1"}, ray)
    for hits in (0, 2):
        registry.counter("hits_total", path="a").inc(hits)
        registry.histogram("wait_seconds", tier="t").observe_many([0.05] * hits)
        exporter.export()
        expected = {
            (name.replace(":", "_"), tuple(sorted([*labels, ("replica_id", "r1")]))): value
            for (name, labels), value in samples(registry).items()
        }
        assert ray.values == expected


def test_what_did_not_change_is_said_again_all_of_it_early_on_and_in_turns_later():
    registry, ray = Registry(SMALL), FakeRay()
    for path in "abcde":
        registry.counter("hits_total", path=path).inc()
    exporter = RayExporter(registry, {}, ray)
    early, every, often = exporter.EARLY_EXPORTS, exporter.REPEAT_EVERY, exporter.REPEAT_EARLY
    calls = []
    for _ in range(early + 2 * every):
        before = ray.calls
        exporter.export()
        calls.append(ray.calls - before)
    assert calls[:early] == [5, *[0] * (often - 2), 5] + [*[0] * (often - 1), 5] * (
        early // often - 1
    )
    for begin in (early, early + every):
        assert sum(calls[begin : begin + every]) == 5
    assert max(calls[early:]) == 1


def test_what_changed_is_said_at_once():
    registry, ray = filled(3), FakeRay()
    exporter = RayExporter(registry, {}, ray)
    for _ in range(10):
        exporter.export()
    registry.gauge("up").set(0)
    exporter.export()
    assert ray.values["up", ()] == 0


def test_a_counter_is_there_before_its_first_event():
    registry, ray = Registry(SMALL), FakeRay()
    registry.counter("hits_total", path="a")
    RayExporter(registry, {}, ray).export()
    assert ray.values == {("hits_total", (("path", "a"),)): 0.0}


def test_a_counter_that_starts_again_is_a_reset_as_prometheus_knows_them():
    registry, ray = Registry(SMALL), FakeRay()
    exporter = RayExporter(registry, {}, ray)
    registry.counter("hits_total", path="a").inc(5)
    exporter.export()
    registry.remove("hits_total", path="a")
    registry.counter("hits_total", path="a").inc(2)
    exporter.export()
    assert ray.values == {("hits_total", (("path", "a"),)): 2.0}


def test_the_module_brings_in_neither_ray_nor_torch_until_exporting():
    script = (
        "import sys, deployments.metrics;"
        "bad = {'torch', 'ray', 'prometheus_client', 'numpy'} & set(sys.modules);"
        "sys.exit(str(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


@pytest.mark.cluster
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_the_agent_of_a_real_ray_serves_the_exported_series():
    import ray

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        _metrics_export_port=port,
        _system_config={"metrics_report_interval_ms": 1000},
    )
    try:
        registry = Registry()
        registry.gauge("vllm:num_requests_running", model_name="m").set(3)
        registry.counter("tailrace_kv_leases_expired_total", model="m").inc(2)
        histogram = registry.histogram("tailrace_engine_step_seconds", model="m", role="decode")
        histogram.observe_many([0.003, 0.3, 99.0])
        exporter = RayExporter(registry, {"replica": "r1"})
        exporter.export()
        histogram.observe(0.003)
        registry.counter("tailrace_kv_leases_expired_total", model="m").inc(1)
        exporter.export()
        served = poll(port, until=("ray_tailrace_engine_step_seconds_count", 4))
    finally:
        ray.shutdown()
    step = "ray_tailrace_engine_step_seconds"
    decode = {"model": "m", "role": "decode", "replica": "r1"}
    assert value(served, "ray_vllm_num_requests_running", model_name="m", replica="r1") == 3
    assert value(served, "ray_tailrace_kv_leases_expired_total", model="m", replica="r1") == 3
    assert value(served, f"{step}_count", **decode) == 4
    assert value(served, f"{step}_sum", **decode) == pytest.approx(99.306)
    assert value(served, f"{step}_bucket", le="0.002", **decode) == 0
    assert value(served, f"{step}_bucket", le="0.005", **decode) == 2
    assert value(served, f"{step}_bucket", le="+Inf", **decode) == 4


def poll(port: int, until: tuple[str, float]):
    """Samples of Ray's agent as soon as that name and value is among them."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
                families = list(text_string_to_metric_families(page.read().decode()))
        except OSError:
            families = []
        served = [sample for family in families for sample in family.samples]
        if until in [(sample.name, sample.value) for sample in served]:
            return served
        time.sleep(0.5)
    raise AssertionError(f"Ray's agent did not serve {until} within 300 s")


def value(served, name: str, **labels: str) -> float:
    (found,) = [
        sample.value
        for sample in served
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return found


def test_a_family_lists_this_process_s_series_and_those_it_shows():
    shown, other = Registry(SMALL), Registry(SMALL)
    shown.counter("hits_total", path="/a").inc(2)
    other.counter("hits_total", path="/b").inc(3)
    other.histogram("wait_seconds", tier="x").observe_many([0.05, 7.0])
    shown.merge("r1", other.snapshot())
    assert list(shown.family("hits_total")) == [
        (None, {"path": "/a"}, 2.0),
        ("r1", {"path": "/b"}, 3.0),
    ]
    assert list(shown.family("wait_seconds")) == [("r1", {"tier": "x"}, [7.05, 1, 0, 0, 1])]
    assert list(shown.family("never_declared")) == []
