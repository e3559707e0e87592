"""What the queue says of itself, and that gateways hear it over their link."""

import asyncio

from deployments.admission.actor import QueueActor
from deployments.admission.client import QueueClient
from deployments.admission.figures import QueueFigures
from deployments.admission.queue import AdmissionQueue, QueueLimits
from deployments.admission.tiers import TierRule, TierTable
from deployments.link.messages import Acquire, Report

SECRET = b"a secret of the tests, long enough to be one"


def values(figures: QueueFigures) -> dict[str, float]:
    """Queue series by name, without those of the process."""
    return {
        " ".join([name.removeprefix("tailrace_queue_"), *labels[1:]]): value
        for name, labels, value in figures.registry.snapshot()
        if name.startswith("tailrace_queue_")
    }


def acquire(ticket: int, tokens: int, tier: str = "default") -> Acquire:
    return Acquire(ticket=ticket, cost_tokens=tokens, prompt_tokens=1, tier=tier)


def table(*names: str) -> TierTable:
    return TierTable([TierRule(name=name) for name in names], revision=1)


def test_levels_are_those_of_the_queue_at_the_moment_asked():
    queue = AdmissionQueue(1)
    figures = QueueFigures(queue, "m", "q")
    queue.replica_reported(
        Report(replica_id="d", slots=2, capacity_tokens=100, grants=(), ungranted=1), 10.0
    )
    for ticket, tokens, tier in ((1, 5, "default"), (2, 7, "default"), (3, 11, "batch")):
        queue.acquire("g", acquire(ticket, tokens, tier), 10.0 + ticket / 8)
    figures.leads = True
    figures.granted = 1
    figures.refused["queue_full"] = 2
    figures.sample(11.25)
    assert values(figures) == {
        "leads": 1,
        "size default": 1,
        "size batch": 1,
        "tokens": 18,
        "oldest_age_seconds default": 1.0,
        "oldest_age_seconds batch": 0.875,
        "prefilling_tokens": 1,
        "slots": 2,
        "free_slots": 0,
        "grants_total": 1,
        "refusals_total queue_full": 2,
        "refusals_total queue_timeout": 0,
        "refusals_total no_replicas": 0,
    }


def test_tiers_in_force_are_shown_empty_and_those_taken_out_no_more():
    queue = AdmissionQueue(1, tiers=table("default", "batch"))
    figures = QueueFigures(queue, "m", "q")
    figures.sample(1e6)
    sizes = {name: value for name, value in values(figures).items() if name.startswith("size")}
    assert sizes == {"size default": 0, "size batch": 0}
    assert values(figures)["oldest_age_seconds batch"] == 0
    queue.policy(table("default"), QueueLimits(), 1e6)
    figures.sample(1e6)
    assert "size batch" not in values(figures)
    assert "oldest_age_seconds batch" not in values(figures)


async def test_a_gateway_gets_the_figures_over_its_link():
    actor = QueueActor("app", SECRET, model="m", host="127.0.0.1")
    told: asyncio.Queue[tuple[str, str, list]] = asyncio.Queue()
    client = QueueClient(
        actor.address, SECRET, "g", on_snapshot=lambda *said: told.put_nowait(said)
    )
    client.start()
    try:
        replica, role, series = await asyncio.wait_for(told.get(), 240)
    finally:
        await client.close()
        await actor.close()
    assert (replica, role) == ("tailrace-queue:app", "queue")
    assert ["tailrace_queue_slots", ["m"], 0.0] in series
