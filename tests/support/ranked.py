"""A real session for tests of ranks: one model whose replicas are several processes each."""

from __future__ import annotations

from typing import Any

from serving import Cluster, configuration, model_application

MODEL = "tiny"


class RankedCluster(Cluster):
    """Decode on two ranks that share layers, prefill on two stages. One replica of each."""

    def __init__(self) -> None:
        super().__init__()
        config = configuration()
        model = model_application(MODEL, MODEL, decodes=1)
        model["args"] |= {
            "tensor_parallel": 2,
            "prefill_tensor_parallel": 1,
            "prefill_pipeline_parallel": 2,
        }
        gateway = config["applications"][0]
        gateway["deployments"][0]["user_config"]["models"] = [{"name": MODEL, "app": MODEL}]
        config["applications"] = [gateway, model]
        self.config = config

    def ranks(self, pool: str) -> list[int]:
        """Process ids of the only replica's ranks."""
        return self.stats(MODEL, pool)["ranks"]

    def left(self) -> list[Any]:
        """See `Cluster.left`."""
        decode, prefill = self.stats(MODEL, "Decode"), self.stats(MODEL, "Prefill")
        alive = {
            "streams": decode["streams"],
            "pulls": decode["pulls_active"],
            "blocks": decode["engine"]["num_held_blocks"],
            "sessions": prefill["sessions"],
            "unacked_bytes": prefill["unacked_bytes"],
            "blocks of prefill": prefill["engine"]["num_held_blocks"],
            "leases": prefill["engine"]["num_leases"],
            "waiting": self.queue(MODEL)["waiting"],
        }
        return [alive] if any(alive.values()) else []
