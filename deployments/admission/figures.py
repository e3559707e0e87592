"""What an admission queue reports: to the gateways over their links, and to Ray's agent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from deployments.admission.queue import AdmissionQueue
from deployments.link.link import Link
from deployments.link.messages import Kind
from deployments.metrics import Registry
from deployments.process_figures import ProcessFigures
from deployments.replica_metrics import EXPORT_EVERY_S, SNAPSHOT_EVERY_S, exporter, raise_to

logger = logging.getLogger(__name__)

ROLE = "queue"


class QueueFigures:
    """One queue's registry. Whoever performs its actions keeps `leads`, `granted`, `refused`."""

    def __init__(self, queue: AdmissionQueue, model: str, own_id: str) -> None:
        self.registry = registry = Registry()
        self.leads = False
        self.granted = 0
        self.refused: dict[str, int] = {}
        self._queue = queue
        self._model = model
        self._own_id = own_id
        self._leads = registry.gauge("tailrace_queue_leads", model=model)
        self._tokens = registry.gauge("tailrace_queue_tokens", model=model)
        self._prefilling = registry.gauge("tailrace_queue_prefilling_tokens", model=model)
        self._tiers: set[str] = set()
        """With series: those in force, and those that somebody waited in."""

        self._slots = registry.gauge("tailrace_queue_slots", model=model)
        self._free = registry.gauge("tailrace_queue_free_slots", model=model)
        self._grants = registry.counter("tailrace_queue_grants_total", model=model)
        for reason in ("queue_full", "queue_timeout", "no_replicas"):
            registry.counter("tailrace_queue_refusals_total", model=model, reason=reason)
        self._process = ProcessFigures(registry, ROLE)

    def sample(self, now: float) -> None:
        """Bring all of it up to date. `now` is that of the queue's clock."""
        queue = self._queue
        self._sample_tiers(now)
        self._leads.set(self.leads)
        self._tokens.set(queue.waiting_tokens)
        self._prefilling.set(queue.prefilling_tokens)
        self._slots.set(queue.num_slots)
        self._free.set(sum(queue.free_slots.values()))
        raise_to(self._grants, self.granted)
        for reason, total in self.refused.items():
            raise_to(
                self.registry.counter(
                    "tailrace_queue_refusals_total", model=self._model, reason=reason
                ),
                total,
            )
        self._process.sample()

    def _sample_tiers(self, now: float) -> None:
        registry, model, queue = self.registry, self._model, self._queue
        sizes, ages_s = queue.waiting(), queue.oldest_ages_s(now)
        there = queue.tiers.rules.keys() | sizes.keys()
        for tier in self._tiers | there:
            labels = {"model": model, "tier": tier}
            if tier in there:
                registry.gauge("tailrace_queue_size", **labels).set(sizes.get(tier, 0))
                age = registry.gauge("tailrace_queue_oldest_age_seconds", **labels)
                age.set(ages_s.get(tier, 0.0))
            else:
                registry.remove("tailrace_queue_size", **labels)
                registry.remove("tailrace_queue_oldest_age_seconds", **labels)
        self._tiers = set(there)

    async def run(self, gateways: Callable[[], Iterable[Link]]) -> None:
        """For ever: sample, send a snapshot to every gateway, now and then tell Ray's agent."""
        to_ray = exporter(self.registry, self._own_id, ROLE)
        rounds = 0
        while True:
            await asyncio.sleep(SNAPSHOT_EVERY_S)
            rounds += 1
            try:
                self.sample(asyncio.get_running_loop().time())
                message = [Kind.SNAPSHOT, self._own_id, ROLE, self.registry.snapshot()]
                for link in list(gateways()):
                    link.send(message)
                if to_ray is not None and rounds % int(EXPORT_EVERY_S / SNAPSHOT_EVERY_S) == 0:
                    to_ray.export()
            except Exception:
                # Figures must never take the queue down, nor go silent for ever.
                logger.exception("metrics of %s could not be reported", self._own_id)
