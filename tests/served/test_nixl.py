"""The served cluster whose decode replicas read KV by NIXL: tokens, bytes, and how they came."""

from __future__ import annotations

import pytest
from serving import TINY_TRANSPORT, Cluster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(
        TINY_TRANSPORT != "nixl", reason="install the extra: pip install 'tailrace[nixl]'"
    ),
]


def test_verify_passes_and_the_kv_came_by_nixl(cluster: Cluster):
    code, said, errors = cluster.command("verify", "--model", "tiny")
    assert code == 0, errors
    assert said["num_blocks"] > 0
    pulls = [
        pull
        for replica in cluster.pids("tiny", "Decode")
        for pull in cluster.stats("tiny", "Decode", replica)["recent_pulls"]
    ]
    assert "nixl" in {pull["connector"] for pull in pulls}
    lines = [
        line
        for line in cluster.metrics().splitlines()
        if line.startswith("tailrace_kv_transfer_bytes_total{") and 'connector="nixl"' in line
    ]
    assert lines
    assert sum(float(line.rpartition(" ")[2]) for line in lines) > 0
    cluster.settled()
