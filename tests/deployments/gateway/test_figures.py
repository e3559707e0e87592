"""What a gateway says of the cluster, from what it heard and when."""

from dataclasses import dataclass, field

from deployments.gateway.config import GatewayConfig
from deployments.gateway.dispatch import Placements
from deployments.gateway.figures import ClusterFigures
from deployments.metrics import Registry

CONFIG = GatewayConfig.parse({"revision": 7, "models": [{"name": "m", "app": "app"}]})


class Running:
    def __init__(self, *replicas: str) -> None:
        self.ids = set(replicas)

    def replicas(self):
        return {replica: {} for replica in self.ids}

    async def changed(self, seen=None):
        raise AssertionError("nobody waits here")


@dataclass
class Client:
    directory: Running
    placements: Placements = field(default_factory=Placements)
    queue_connected: bool = True


def shown(registry: Registry, name: str) -> dict[tuple[str, ...], float]:
    return {
        labels: series.value
        for metric, labels, series in registry.series()
        if metric.name == f"tailrace_{name}"
    }


def test_figures_are_fresh_then_stale_then_gone():
    registry = Registry()
    figures, client = ClusterFigures(registry), Client(Running("d1", "d2"))
    figures.received("app", "d1", "decode", [], 100.0)
    figures.received("app", "d2", "decode", [], 102.0)
    figures.received("app", "p1", "prefill", [], 102.0)

    def at(now: float):
        figures.sample(CONFIG, [("m", client)], now)
        return [shown(registry, n) for n in ("replicas_up", "stale_endpoints")]

    assert at(103.0) == [
        {("m", "decode"): 2, ("m", "prefill"): 1},
        {("m", "decode"): 0, ("m", "prefill"): 0},
    ]
    assert at(104.0) == [
        {("m", "decode"): 1, ("m", "prefill"): 1},
        {("m", "decode"): 1, ("m", "prefill"): 0},
    ]
    assert shown(registry, "snapshot_age_seconds") == {
        ("m", "decode"): 4.0,
        ("m", "prefill"): 2.0,
    }
    assert registry.replicas == ("d1", "d2", "p1")
    # Serve still counts the decode replicas as running; of the prefill replica nobody speaks.
    assert at(113.0) == [
        {("m", "decode"): 0, ("m", "prefill"): 0},
        {("m", "decode"): 2, ("m", "prefill"): 0},
    ]
    assert registry.replicas == ()
    assert shown(registry, "config_revision") == {(): 7}


def test_a_replica_that_runs_and_never_spoke_is_stale():
    registry = Registry()
    figures = ClusterFigures(registry)
    figures.sample(CONFIG, [("m", Client(Running("d1")))], 5.0)
    assert shown(registry, "stale_endpoints") == {("m", "decode"): 1}
    assert shown(registry, "replicas_up") == {("m", "decode"): 0}


def test_placements_and_the_queue_link_are_reported_until_the_model_is_taken_out():
    registry = Registry()
    figures, client = ClusterFigures(registry), Client(Running())
    client.placements.by_queue, client.placements.by_own_choice = 5, 2
    client.placements.again["lost"] = 3
    client.placements.migrated["died"] = 2
    client.queue_connected = False
    figures.sample(CONFIG, [("m", client)], 1.0)
    assert shown(registry, "queue_connected") == {("m",): 0}
    assert shown(registry, "route_decisions_total") == {("m", "queue"): 5, ("m", "own"): 2}
    assert shown(registry, "resubmissions_total") == {("m", "full"): 0, ("m", "lost"): 3}
    migrations = {("m", "closed"): 0, ("m", "died"): 2, ("m", "hung"): 0}
    assert shown(registry, "migrations_total") == migrations
    figures.received("app", "p1", "prefill", [], 2.0)
    figures.sample(GatewayConfig(), [], 2.0)
    for name in (
        "queue_connected",
        "route_decisions_total",
        "resubmissions_total",
        "migrations_total",
    ):
        assert shown(registry, name) == {}
    assert shown(registry, "replicas_up") == {}


def test_targets_in_force_are_shown_and_those_taken_back_are_not():
    registry = Registry()
    figures = ClusterFigures(registry)
    slo = {"default": {"ttft_s": 0.5, "queue_s": None, "objective": 0.95}}
    figures.sample(GatewayConfig.parse({"tiers": slo}), [], 1.0)
    assert shown(registry, "slo_target_seconds") == {
        ("default", "ttft"): 0.5,
        ("default", "itl"): 0.2,
        ("default", "e2e"): 60.0,
    }
    assert shown(registry, "slo_objective_ratio") == {("default",): 0.95}
    none = dict.fromkeys(("queue_s", "ttft_s", "itl_s", "e2e_s"))
    figures.sample(GatewayConfig.parse({"tiers": {"default": none}}), [], 2.0)
    assert shown(registry, "slo_target_seconds") == {}
    figures.sample(GatewayConfig(), [], 3.0)
    assert {tier for tier, _ in shown(registry, "slo_target_seconds")} == {
        "priority",
        "default",
        "flex",
    }
    figures.sample(GatewayConfig.parse({"tiers": slo}), [], 4.0)
    assert shown(registry, "slo_objective_ratio") == {("default",): 0.95}
