"""Replicas' memory, read from a gateway's metrics."""

import http.server
import threading
from dataclasses import replace

from cluster import session
from cluster.cli import _announce, _memory_lines
from cluster.config import ServeConfig
from cluster.replica_memory import by_pool, from_metrics, to_json
from cluster.serve_api import Application, Deployment, Replica
from cluster.session import Up, memory_of_pools
from cluster.state import StateDir
from engine.memory import MemoryPlan

METRICS = """\
# TYPE tailrace_weight_bytes gauge
tailrace_weight_bytes{model="m",role="decode",replica="Decode#1"} 150000000
tailrace_kv_pool_bytes{model="m",role="decode",replica="Decode#1"} 5.12e+08
tailrace_kv_pool_tokens{model="m",role="decode",replica="Decode#1"} 22000
tailrace_context_tokens{model="m",role="decode",replica="Decode#1"} 8192
tailrace_weight_bytes{model="m",role="prefill",replica="Prefill#2"} 150000000
tailrace_kv_sent_bytes_total{model="m",replica="Decode#1"} 12
"""


def test_a_replica_has_a_plan_once_all_of_it_is_there():
    plans = from_metrics(METRICS)
    assert set(plans) == {"Decode#1"}
    assert to_json(plans["Decode#1"], 2000) == {
        "weight_bytes": 150_000_000,
        "kv_bytes": 512_000_000,
        "kv_tokens": 22_000,
        "context_tokens": 8192,
        "largest_batch": 11,
        "largest_batch_of_longest": 2,
    }
    assert str(plans["Decode#1"]) == (
        "weights 150 MB, KV 512 MB: 22000 tokens; largest batch 21 of 1024 tokens, 2 of 8192 tokens"
    )
    assert plans["Decode#1"].told(9000).endswith("largest batch 2 of 8192 tokens")


def plan(kv_tokens: int, **changes: int) -> MemoryPlan:
    usual = {"weight_bytes": 150_000_000, "kv_bytes": 512_000_000, "context_tokens": 8192}
    return MemoryPlan(**{**usual, "kv_tokens": kv_tokens, "free_bytes": None, **changes})


def application(name: str, **pools: dict[str, str]) -> Application:
    """Each pool: replica ids and their states."""
    deployments = tuple(
        Deployment(
            pool, "HEALTHY", "", 1, tuple(Replica(id_, at, 1, None) for id_, at in there.items())
        )
        for pool, there in pools.items()
    )
    return Application(name, "RUNNING", "", None, deployments)


def test_replicas_are_sorted_into_their_pools_and_those_that_stop_are_left_out():
    running = application(
        "a",
        Decode={"Decode#1": "RUNNING", "Decode#0": "STOPPING"},
        Prefill={"Prefill#2": "RUNNING"},
        Root={"Root#1": "RUNNING"},
    )
    told = METRICS.replace("Decode#1", "Decode#0") + METRICS
    pools = {("a", "Decode"), ("a", "Prefill"), ("b", "Decode")}
    assert by_pool([running], pools, told) == {
        ("a", "Decode"): [plan(22_000)],
        ("a", "Prefill"): [None],  # it has told its weights alone so far
    }


def serve_config(**user_config: bool) -> ServeConfig:
    gateway = {
        "name": "g",
        "import_path": "deployments.app:gateway",
        "deployments": [
            {
                "name": "Gateway",
                "user_config": {"models": [{"name": "m", "app": "a"}, {"name": "s", "app": "s"}]},
            }
        ],
    }
    models = [
        {
            "name": name,
            "import_path": "deployments.app:model",
            "args": {"name": name, "source": source},
            "deployments": [{"name": "Decode", "user_config": {"revision": 1, **user_config}}],
        }
        for name, source in (("a", "fake"), ("s", "synthetic"), ("unserved", "fake"))
    ]
    return ServeConfig(source="c.yaml", data={"applications": [gateway, *models]})


def test_pools_that_compute_nothing_or_tell_nothing_are_not_waited_for():
    assert serve_config().telling_pools == {("a", "Decode"), ("a", "Prefill")}
    assert serve_config(metrics=False).telling_pools == {("a", "Prefill")}


PREFILL_TOO = METRICS + METRICS.replace("Decode#1", "Prefill#2")


def test_up_waits_until_every_replica_has_told(tmp_path, monkeypatch):
    """The first time a gateway is asked it knows of half of them."""
    answers = [METRICS, METRICS, PREFILL_TOO]
    asked: list[str] = []

    class Gateway(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            body = answers[min(len(asked), len(answers)) - 1].encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format, *args):
            """Nobody reads it."""

    class Api:
        """Serve, which knows of both from the beginning."""

        def applications(self):
            return [
                application("a", Decode={"Decode#1": "RUNNING"}, Prefill={"Prefill#2": "RUNNING"})
            ]

        def close(self):
            pass

    monkeypatch.setattr(session, "_api_at", lambda address: Api())
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        up = replace(UP, url=f"http://127.0.0.1:{listening.server_port}")
        found = memory_of_pools(up, serve_config(), StateDir(tmp_path), "http://elsewhere")
        listening.shutdown()
        thread.join()
    assert asked == ["/metrics"] * 3
    assert found == {("a", "Decode"): (plan(22_000),), ("a", "Prefill"): (plan(22_000),)}


UP = Up(
    record=None, url="http://127.0.0.1:1", models=("m",), haproxy=True, ready_s=9.0, updated=False
)


def test_up_prints_a_line_for_each_pool(capsys):
    memory = {
        ("m", "Prefill"): (plan(22_000),),
        ("m", "Decode"): (plan(22_000), plan(21_000, kv_bytes=490_000_000)),
    }
    assert list(_memory_lines(memory, 2000)) == [
        "m Decode (2 replicas, the smallest): weights 150 MB, KV 490 MB: 21000 tokens; largest "
        "batch 10 of 2000 tokens, 2 of 8192 tokens",
        "m Prefill: weights 150 MB, KV 512 MB: 22000 tokens; largest batch 11 of 2000 tokens, 2 of "
        "8192 tokens",
    ]
    _announce(UP, memory, 2000, foreground=False, as_json=False)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in said if line.startswith("  memory")] == [
        ["memory", "m", "Decode"],
        ["memory", "m", "Prefill:"],
    ]
