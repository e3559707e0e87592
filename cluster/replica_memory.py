"""What each replica's memory is used for, as a gateway's `/metrics` says it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from cluster.serve_api import Application
from engine.memory import MemoryPlan

_SERIES: Final = re.compile(r"tailrace_(weight|kv_pool|context)_(bytes|tokens)\{(.*)\} (\S+)")
_REPLICA: Final = re.compile(r'replica="([^"]*)"')
_NEEDED: Final = frozenset({"weight_bytes", "kv_pool_bytes", "kv_pool_tokens", "context_tokens"})


def from_metrics(text: str) -> dict[str, MemoryPlan]:
    """The plan of every replica that reports one, by the replica's id."""
    values: dict[str, dict[str, int]] = {}
    for line in text.splitlines():
        match = _SERIES.fullmatch(line)
        replica = match and _REPLICA.search(match[3])
        if match and replica:
            values.setdefault(replica[1], {})[f"{match[1]}_{match[2]}"] = int(float(match[4]))
    return {
        replica: MemoryPlan(
            weight_bytes=found["weight_bytes"],
            kv_bytes=found["kv_pool_bytes"],
            kv_tokens=found["kv_pool_tokens"],
            context_tokens=found["context_tokens"],
            free_bytes=None,
        )
        for replica, found in values.items()
        if found.keys() >= _NEEDED
    }


def by_pool(
    applications: Sequence[Application], pools: Collection[tuple[str, str]], text: str
) -> dict[tuple[str, str], list[MemoryPlan | None]]:
    """The plan of every running replica of these pools, by application and deployment. None: it
    has not told yet. Pools that Serve does not know are not there."""
    plans = from_metrics(text)
    return {
        (application.name, deployment.name): [
            plans.get(replica.replica_id)
            for replica in deployment.replicas
            if replica.state == "RUNNING"
        ]
        for application in applications
        for deployment in application.deployments
        if (application.name, deployment.name) in pools
    }


def to_json(plan: MemoryPlan, context_tokens: int) -> dict[str, int]:
    """With the largest batch of requests of so many tokens, or of the longest there are."""
    return {
        "weight_bytes": plan.weight_bytes,
        "kv_bytes": plan.kv_bytes,
        "kv_tokens": plan.kv_tokens,
        "context_tokens": plan.context_tokens,
        "largest_batch": plan.batch_at(min(context_tokens, plan.context_tokens)),
        "largest_batch_of_longest": plan.full_batch,
    }
