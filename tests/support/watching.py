"""A cluster under mixed load, watched by a real Prometheus in both ways there are."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from prometheus import Prometheus, prometheus
from serving import Cluster

from cluster.state import StateDir
from dashboards.alerts import alerts
from dashboards.ray_names import JOB as RAY_JOB
from dashboards.ray_names import ray_names
from dashboards.rules import Group, to_yaml
from dashboards.service_level import service_level

GATEWAY_JOB = "tailrace"
_WITHIN_S = 240.0
"""Ray's agents are ten seconds late by themselves, on a busy machine a minute."""


@dataclass(frozen=True)
class Watched:
    cluster: Cluster
    prometheus: Prometheus
    load: Load


class Load:
    """Mixed traffic until it is stopped: streams and whole answers, prompts computed here and
    there, cached prompts, several choices, clients that leave, requests at fault."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stopped = threading.Event()
        self._failed: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(seed,), daemon=True) for seed in range(2)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Twice does no harm."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(240)
        assert self._failed == []

    def _run(self, seed: int) -> None:
        rng = random.Random(seed)
        shared = [rng.randrange(32, 127) for _ in range(64)]
        with httpx.Client(base_url=self._cluster.url, timeout=240, trust_env=False) as http:
            try:
                while not self._stopped.is_set():
                    self._round(http, rng, shared)
                    self._stopped.wait(0.2)
            except BaseException as error:
                self._failed.append(error)

    def _round(self, http: httpx.Client, rng: random.Random, shared: list[int]) -> None:
        for model in ("fake", "tiny"):
            fresh = [rng.randrange(32, 127) for _ in range(rng.choice([4, 40, 90]))]
            spans = '[{"name": "search", "kind": "retrieval", "duration_ms": 40}]'
            asked = {"model": model, "prompt": fresh, "max_tokens": 12, "ignore_eos": True}
            headers = {"x-tailrace-spans": spans}
            assert http.post("/v1/completions", json=asked, headers=headers).status_code == 200
            asked["prompt"] = [*shared, *fresh]
            assert http.post("/v1/completions", json=asked | {"n": 2}).status_code == 200
            with http.stream("POST", "/v1/completions", json=asked | {"stream": True}) as answer:
                assert answer.read().endswith(b"data: [DONE]\n\n")
            endless = asked | {"stream": True, "max_tokens": 400}
            with http.stream("POST", "/v1/completions", json=endless) as answer:
                next(answer.iter_bytes())  # and leave
            assert http.post("/v1/completions", json=asked | {"n": 0}).status_code == 400
        assert http.post("/v1/completions", json=asked | {"model": "nobody's"}).status_code == 404


def _scrape(cluster: Cluster) -> list[dict[str, Any]]:
    record = StateDir(cluster.home).load()
    assert record is not None
    discovery = f"{record.temp_dir}/ray/prom_metrics_service_discovery.json"
    host, port = cluster.address
    return [
        {"job_name": GATEWAY_JOB, "static_configs": [{"targets": [f"{host}:{port}"]}]},
        {
            "job_name": "ray",
            "file_sd_configs": [{"files": [discovery]}],
            # A page of a megabyte, whose figures change every ten seconds.
            "scrape_interval": "3s",
        },
    ]


def _quick(group: Group) -> Group:
    return replace(group, interval="1s")


@contextlib.contextmanager
def watching(cluster: Cluster, directory: Path) -> Iterator[Watched]:
    """After load that both ways of scraping have seen grow."""
    groups = tuple(_quick(g) for g in (ray_names(), service_level(), *alerts()))
    rules = directory / "rules.yaml"
    rules.write_text(to_yaml(groups))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": _scrape(cluster),
        "rule_files": [str(rules)],
    }
    with prometheus(directory, config) as server, contextlib.ExitStack() as stack:
        load = Load(cluster)
        stack.callback(load.stop)
        seen = 'sum(tailrace_requests_total{{job="{}"}})'
        for job in (GATEWAY_JOB, RAY_JOB):
            server.wait_for(seen.format(job), within_s=_WITHIN_S)
        # Rates need a growth that both have seen.
        for job in (GATEWAY_JOB, RAY_JOB):
            grown = f'sum(rate(tailrace_engine_step_seconds_count{{job="{job}"}}[1m])) > 0'
            server.wait_for(grown, within_s=_WITHIN_S)
        yield Watched(cluster, server, load)
