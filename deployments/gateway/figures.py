"""What a gateway knows of the cluster: whose figures are fresh, whether queues can be reached."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from deployments.gateway.config import GatewayConfig
from deployments.gateway.degradation import ACTIONS, Action
from deployments.gateway.dispatch import Placements, ReplicaDirectory
from deployments.gateway.limits.store import KINDS, Kind
from deployments.metrics import Registry
from deployments.process_figures import ProcessFigures
from deployments.replica_metrics import raise_to
from engine.metrics import SLO_KINDS

STALE_AFTER_S = 3.0
"""Figures come every second; three in a row are missing."""

SILENT_AFTER_S = 10.0
"""A replica whose figures did not come for this long is shown no more."""


class Client(Protocol):
    """What is asked of a `ModelClient`."""

    placements: Placements
    directory: ReplicaDirectory

    @property
    def queue_connected(self) -> bool: ...


@dataclass(slots=True)
class _Seen:
    app: str
    role: str
    at_s: float


class ClusterFigures:
    """Takes in the figures of others and reports on them. Times are of one steady clock."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._seen: dict[str, _Seen] = {}
        self._shown: set[tuple[str, str]] = set()
        """`(model, role)` with series."""

        self._models: set[str] = set()
        self._tiers: set[str] = set()
        self.degraded: Mapping[tuple[str, str, Action], int] = {}
        """Of `degradation.Pressures`."""

        self.denied: Mapping[tuple[str, Kind], int] = {}
        """Of `limits.quotas.Quotas`."""

        self._revision = registry.gauge("tailrace_config_revision")
        self._process = ProcessFigures(registry, "gateway")

    def received(self, app: str, replica: str, role: str, series: list[Any], now: float) -> None:
        """A snapshot came. Raises ValueError for what is none."""
        self._registry.merge(replica, series)
        self._seen[replica] = _Seen(app, role, now)

    def sample(
        self, config: GatewayConfig, clients: Iterable[tuple[str, Client]], now: float
    ) -> None:
        """Bring all of it up to date. `clients` are those of the configured models, by name."""
        self._revision.set(config.revision)
        self._sample_targets(config)
        self._process.sample()
        self._sample_degradation(config)
        names = {route.app: route.name for route in config.models}
        for replica, seen in list(self._seen.items()):
            if now - seen.at_s > SILENT_AFTER_S:
                del self._seen[replica]
                self._registry.drop(replica)
        running: dict[str, set[str]] = {}
        for model, client in clients:
            running[model] = set(client.directory.replicas())
            self._sample_client(model, client)
        self._sample_replicas(names, running, now)
        for model in self._models - running.keys():
            self._forget_client(model)
        self._models = set(running)

    def _sample_targets(self, config: GatewayConfig) -> None:
        registry = self._registry
        for tier in config.tiers.keys() | self._tiers:
            targets = config.tiers.get(tier)
            for kind in SLO_KINDS:
                seconds = targets and getattr(targets, f"{kind}_s")
                if seconds is None:
                    registry.remove("tailrace_slo_target_seconds", tier=tier, slo=kind)
                else:
                    registry.gauge("tailrace_slo_target_seconds", tier=tier, slo=kind).set(seconds)
            if targets is None:
                registry.remove("tailrace_slo_objective_ratio", tier=tier)
            else:
                registry.gauge("tailrace_slo_objective_ratio", tier=tier).set(targets.objective)
        self._tiers = set(config.tiers)

    def _sample_degradation(self, config: GatewayConfig) -> None:
        """From the first moment on with zeros: a rate needs a start."""
        for route in config.models:
            for tier in config.tiers:
                for action in ACTIONS:
                    raise_to(
                        self._registry.counter(
                            "tailrace_degradations_total",
                            model=route.name,
                            tier=tier,
                            action=action,
                        ),
                        self.degraded.get((route.name, tier, action), 0),
                    )
        totals = {(scope, kind): 0 for scope in ("tenant", "key") for kind in KINDS}
        for (owner, kind), count in self.denied.items():
            totals[owner.partition(":")[0], kind] += count
        for (scope, kind), count in totals.items():
            raise_to(
                self._registry.counter("tailrace_limit_denials_total", scope=scope, kind=kind),
                count,
            )

    def _sample_client(self, model: str, client: Client) -> None:
        registry, placements = self._registry, client.placements
        registry.gauge("tailrace_queue_connected", model=model).set(client.queue_connected)
        for policy, total in (("queue", placements.by_queue), ("own", placements.by_own_choice)):
            raise_to(
                registry.counter("tailrace_route_decisions_total", model=model, policy=policy),
                total,
            )
        for reason, total in placements.again.items():
            raise_to(
                registry.counter("tailrace_resubmissions_total", model=model, reason=reason), total
            )
        for reason, total in placements.migrated.items():
            raise_to(
                registry.counter("tailrace_migrations_total", model=model, reason=reason), total
            )

    def _forget_client(self, model: str) -> None:
        registry = self._registry
        registry.remove("tailrace_queue_connected", model=model)
        for policy in ("queue", "own"):
            registry.remove("tailrace_route_decisions_total", model=model, policy=policy)
        for reason in ("full", "lost"):
            registry.remove("tailrace_resubmissions_total", model=model, reason=reason)
        for reason in Placements().migrated:
            registry.remove("tailrace_migrations_total", model=model, reason=reason)

    def _sample_replicas(
        self, names: Mapping[str, str], running: Mapping[str, set[str]], now: float
    ) -> None:
        # Serve tells a gateway which decode replicas run; of the others it knows what it heard.
        up: dict[tuple[str, str], int] = {}
        stale: dict[tuple[str, str], int] = {}
        age_s: dict[tuple[str, str], float] = {}
        for model in running:
            up[model, "decode"] = 0
        for seen in self._seen.values():
            if seen.app not in names:  # taken out, and still answering what it had begun
                continue
            at = (names[seen.app], seen.role)
            fresh = now - seen.at_s <= STALE_AFTER_S
            up[at] = up.get(at, 0) + fresh
            stale[at] = stale.get(at, 0) + (not fresh)
            age_s[at] = max(age_s.get(at, 0.0), now - seen.at_s)
        for model, replicas in running.items():
            silent = len(replicas - self._seen.keys())
            stale[model, "decode"] = stale.get((model, "decode"), 0) + silent
        for model, role in up.keys() | self._shown:
            # A role whose last replica went stays shown at 0: that it is gone is the news.
            at, labels = (model, role), {"model": model, "role": role}
            if model not in running:
                for name in ("replicas_up", "stale_endpoints", "snapshot_age_seconds"):
                    self._registry.remove(f"tailrace_{name}", **labels)
                self._shown.discard(at)
                continue
            self._shown.add(at)
            self._registry.gauge("tailrace_replicas_up", **labels).set(up.get(at, 0))
            self._registry.gauge("tailrace_stale_endpoints", **labels).set(stale.get(at, 0))
            self._registry.gauge("tailrace_snapshot_age_seconds", **labels).set(age_s.get(at, 0.0))
