"""A real session for tests of ranks: models whose replicas are several processes each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from serving import TINY_TRANSPORT, Cluster, configuration, model_application

MODEL = "tiny"

Size = tuple[int, int]
"""Ranks that share a layer, and stages."""


READ: set[tuple[Size, Size]] = {((1, 2), (2, 1)), ((2, 1), (4, 1))}
"""Prefill and decode between which KV is read by NIXL, where it is installed; else the link carries
it, as it does between all others."""


def transport_of(prefill: Size, decode: Size) -> str:
    return TINY_TRANSPORT if (prefill, decode) in READ else "link"


def name_of(prefill: Size, decode: Size) -> str:
    return " feeds ".join(f"{tensor}x{stages}" for tensor, stages in (prefill, decode))


class RankedCluster(Cluster):
    """One application for each pair of sizes, of one prefill and one decode replica."""

    def __init__(self, pairs: Sequence[tuple[Size, Size]]) -> None:
        super().__init__()
        self.serve_pairs(pairs)

    def serve_pairs(self, pairs: Sequence[tuple[Size, Size]]) -> None:
        """What the next `up` is to serve: prefill of the first size feeds decode of the second."""
        self.apps = [name_of(*pair) for pair in pairs]
        gateway = configuration()["applications"][0]
        gateway["deployments"][0]["user_config"]["models"] = [
            {"name": app, "app": app} for app in self.apps
        ]
        models = [
            _model(app, prefill, decode)
            for app, (prefill, decode) in zip(self.apps, pairs, strict=True)
        ]
        self.config = {**configuration(), "applications": [gateway, *models]}

    def ranks(self, app: str, pool: str) -> list[int]:
        """Process ids of the only replica's ranks."""
        return self.stats(app, pool)["ranks"]

    def left(self) -> list[Any]:
        """See `Cluster.left`."""
        return [left for app in self.apps for left in self._left(app)]

    def _left(self, app: str) -> list[Any]:
        decode, prefill = self.stats(app, "Decode"), self.stats(app, "Prefill")
        alive = {
            "streams": decode["streams"],
            "pulls": decode["pulls_active"],
            "reads": decode["reads_open"],
            "blocks": decode["engine"]["num_held_blocks"],
            "sessions": prefill["sessions"],
            "unacked_bytes": prefill["unacked_bytes"],
            "blocks of prefill": prefill["engine"]["num_held_blocks"],
            "leases": prefill["engine"]["num_leases"],
            "waiting": self.queue(app)["waiting"],
        }
        return [(app, alive)] if any(alive.values()) else []


def _model(app: str, prefill: Size, decode: Size) -> dict[str, Any]:
    model = model_application(app, MODEL, decodes=1, transport=transport_of(prefill, decode))
    model["args"] |= {
        "tensor_parallel": decode[0],
        "pipeline_parallel": decode[1],
        "prefill_tensor_parallel": prefill[0],
        "prefill_pipeline_parallel": prefill[1],
    }
    return model
