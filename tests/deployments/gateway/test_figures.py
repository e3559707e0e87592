"""What a gateway says of the cluster, from what it heard and when."""

from dataclasses import dataclass, field

from deployments.gateway.dispatch import Placements
from deployments.gateway.figures import ClusterFigures
from deployments.metrics import Registry

NAMES = {"app": "m"}


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
        figures.sample(7, NAMES, [("m", client)], now)
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
    figures.sample(0, NAMES, [("m", Client(Running("d1")))], 5.0)
    assert shown(registry, "stale_endpoints") == {("m", "decode"): 1}
    assert shown(registry, "replicas_up") == {("m", "decode"): 0}


def test_placements_and_the_queue_link_are_reported_until_the_model_is_taken_out():
    registry = Registry()
    figures, client = ClusterFigures(registry), Client(Running())
    client.placements.by_queue, client.placements.by_own_choice = 5, 2
    client.placements.again["lost"] = 3
    client.queue_connected = False
    figures.sample(0, NAMES, [("m", client)], 1.0)
    assert shown(registry, "queue_connected") == {("m",): 0}
    assert shown(registry, "route_decisions_total") == {("m", "queue"): 5, ("m", "own"): 2}
    assert shown(registry, "resubmissions_total") == {("m", "full"): 0, ("m", "lost"): 3}
    figures.received("app", "p1", "prefill", [], 2.0)
    figures.sample(0, {}, [], 2.0)
    for name in ("queue_connected", "route_decisions_total", "resubmissions_total"):
        assert shown(registry, name) == {}
    assert shown(registry, "replicas_up") == {}
