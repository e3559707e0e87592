"""Requests of a served cluster, explained by its gateway through HAProxy and by the command."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import Cluster, wait_for

pytestmark = pytest.mark.cluster


def ask(cluster: Cluster, tokens: int, request_id: str, **more: Any) -> httpx.Response:
    headers = {"x-request-id": request_id, **more.pop("headers", {})}
    body = {
        "model": "fake",
        "prompt": [32 + (5 * i + tokens) % 90 for i in range(tokens)],
        "max_tokens": 8,
        "ignore_eos": True,
        **more,
    }
    return httpx.post(
        f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=600, trust_env=False
    )


def explained(cluster: Cluster, request_id: str) -> dict[str, Any]:
    code, told, progress = cluster.command("explain", request_id, "--url", cluster.url)
    assert code == 0, progress
    return told


def test_a_request_computed_by_two_pools_is_accounted_for_whole(cluster: Cluster) -> None:
    spans = json.dumps([{"name": "search", "kind": "retrieval", "duration_ms": 30_000}])
    got = ask(cluster, 120, "explain-whole", headers={"x-tailrace-spans": spans})
    assert got.status_code == 200
    told = explained(cluster, got.json()["id"])
    assert told["request_id"] == "explain-whole"
    assert told["accounted"] >= 0.99
    assert told["clock_uncertainty_s"] == 0.0  # one machine, one clock
    assert sum(told["phases"].values()) == pytest.approx(told["total_s"], abs=1e-4)
    assert told["dominant_phase"] == "retrieval"  # half a minute of it
    assert told["prefill"]["decision"] == "disaggregated"
    assert told["prefix"]["computed_tokens"] == 120
    assert told["transfer"]["bytes"] > 0
    assert told["decode"]["choices"][0]["tokens"] == 8
    assert told["idle"]["phases"]["retrieval"] == pytest.approx(30.0)
    page = cluster.metrics()
    assert 'tailrace_external_span_seconds_count{model="fake",tier="default",kind="ret' in page


def test_a_request_behind_a_full_pool_was_in_the_queue(cluster: Cluster) -> None:
    (decode,) = cluster.pids("fake", "Decode")
    slots = cluster.queue("fake")["free_slots"][decode]
    long = {"n": slots, "max_tokens": 1500, "stream": True}
    for i in range(5):  # until the machine does not stand still between the two
        threads = [
            threading.Thread(target=ask, args=(cluster, 20, f"explain-holder-{i}"), kwargs=long),
            threading.Thread(target=ask, args=(cluster, 21, f"explain-queued-{i}")),
        ]
        threads[0].start()
        wait_for(
            lambda holder=threads[0]: (
                cluster.queue("fake")["free_slots"][decode] == 0 or not holder.is_alive()
            )
        )
        threads[1].start()
        for thread in threads:
            thread.join()
        told = explained(cluster, f"explain-queued-{i}")
        if told["dominant_phase"] == "queue":
            break
        cluster.settled()
    assert told["dominant_phase"] == "queue", told["phases"]
    assert told["accounted"] >= 0.99
    assert told["most_delayed_phase"] == "queue"
    listed = httpx.get(
        f"{cluster.url}/tailrace/requests?slowest=true&model=fake&limit=200",
        timeout=120,
        trust_env=False,
    ).json()
    assert f"explain-holder-{i}" in [row["request_id"] for row in listed["data"]]


def test_a_request_has_one_line_in_serves_log_without_its_prompt(cluster: Cluster) -> None:
    ask(cluster, 30, "explain-line", prompt="a secret of the client")
    folder = Path(cluster.ready["log_dir"]) / "serve"

    def lines() -> list[dict[str, Any]]:
        text = "".join(path.read_text() for path in folder.glob("replica_gateway_Gateway_*.log"))
        assert "a secret of the client" not in text
        return [json.loads(line) for line in text.splitlines() if "explain-line" in line]

    (line,) = wait_for(lines)
    assert (line["message"], line["model"], line["status"]) == ("request", "fake", 200)
    assert (line["outcome"], line["completion_tokens"]) == ("finished", 8)
    assert list(line["phases_ms"]) == ["tokenize", "queue", "route", "prefill", "stream"]
    assert sum(line["phases_ms"].values()) == pytest.approx(line["duration_ms"], abs=0.01)
