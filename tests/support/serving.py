"""A real session for tests: two models behind one gateway on Ray Serve, and eyes inside it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from cluster import processes
from cluster.ports import free_ports

ROOT = Path(__file__).resolve().parent.parent.parent
MODELS = ("fake", "tiny")
BLOCK_TOKENS = 8
NUM_BLOCKS = 4000
LOCAL_PREFILL_TOKENS = 16
SLOTS = 16
"""Choices each decode replica runs at once."""

TINY_TRANSPORT = "nixl" if find_spec("nixl_cu12") else "link"
"""Of one of the two models, so that every served test runs on both ways that KV can go."""

PATIENCE_S = 240.0
"""For what takes a second on a machine that does nothing else."""

POOL = {"local_prefill_tokens": LOCAL_PREFILL_TOKENS, "max_running_requests": SLOTS}


def configuration() -> dict[str, Any]:
    """`fake` with one decode replica, `tiny` in float64 with two, each with a prefill replica."""
    return {
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [
            {
                "name": "gateway",
                "import_path": "deployments.app:gateway",
                "route_prefix": "/",
                "deployments": [
                    {
                        "name": "Gateway",
                        "num_replicas": 1,
                        "max_surge_percent": 100,
                        "max_ongoing_requests": 1000,
                        "graceful_shutdown_timeout_s": 60,
                        "ray_actor_options": {"num_cpus": 0.1},
                        "user_config": {
                            "revision": 1,
                            "models": [
                                {"name": "fake", "app": "fake"},
                                {"name": "tiny", "app": "tiny", "aliases": ["small"]},
                            ],
                        },
                    }
                ],
            },
            model_application("fake", "fake", decodes=1),
            model_application("tiny", "tiny", decodes=2, transport=TINY_TRANSPORT),
        ],
    }


def model_application(
    name: str, source: str, *, decodes: int, prefills: int = 1, transport: str = "link"
) -> dict[str, Any]:
    """One model's entry in the configuration."""
    pools = [("Decode", decodes), *([("Prefill", prefills)] if prefills else [])]
    return {
        "name": name,
        "import_path": "deployments.app:model",
        "route_prefix": None,
        "runtime_env": {
            "env_vars": {
                "RAY_SERVE_ENABLE_HA_PROXY": "0",
                "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
            }
        },
        "args": {
            "name": name,
            "source": source,
            "dtype": "float64",
            "block_tokens": BLOCK_TOKENS,
            "num_blocks": NUM_BLOCKS,
            "num_threads": 1,
            "prefill": prefills > 0,
            "transport": transport,
        },
        "deployments": [
            {
                "name": pool,
                "num_replicas": replicas,
                "max_surge_percent": 100,
                "max_ongoing_requests": 1000,
                "graceful_shutdown_timeout_s": 60,
                "ray_actor_options": {"num_cpus": 0.1},
                "user_config": dict(POOL),
            }
            for pool, replicas in pools
        ],
    }


class ProbeError(Exception):
    """The replica or queue could not be asked; its message says why."""


class _Probe:
    def __init__(self, home: Path) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("probe.py")), str(home)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self._read()

    def __call__(self, op: str, **call: Any) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            print(json.dumps({"op": op, **call}), file=self._process.stdin, flush=True)
            return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ProbeError("the probe's process ended")
        answer = json.loads(line)
        if "error" in answer:
            raise ProbeError(answer["error"])
        return answer["ok"]

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Cluster:
    """One session: started by the command, changed by the command, looked into by a probe."""

    def __init__(self) -> None:
        self.home = Path(tempfile.mkdtemp(prefix="tl-", dir="/tmp"))
        self.config = configuration()
        self.ready: dict[str, Any] = {}
        self.progress = ""
        """What the command said while it started the session."""

        self._probe: _Probe | None = None
        self._serve: httpx.Client | None = None

    # Its life

    def start(self) -> None:
        code, self.ready, self.progress = self.up("--port", str(free_ports(1)[0]))
        assert code == 0, self.progress
        token = (self.home / "ray.token").read_text().strip()
        self._serve = httpx.Client(
            base_url=self.ready["dashboard_url"],
            headers={"Authorization": f"Bearer {token}"},
            timeout=120.0,
            trust_env=False,
        )
        self._probe = _Probe(self.home)
        self.settled()  # also makes the probe's handles, which takes a moment

    def up(self, *args: str) -> tuple[int, Any, str]:
        """`tailrace up` with `self.config`: exit code, its JSON object, standard error."""
        file = self.home / "config.yaml"
        file.write_text(yaml.safe_dump(self.config, sort_keys=False))
        return self.command("up", str(file), "--detach", *args)

    def command(self, *args: str) -> tuple[int, Any, str]:
        done = subprocess.run(
            [sys.executable, "-m", "cluster.cli", *args, "--json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, "TAILRACE_HOME": str(self.home)},
            cwd=ROOT,
            timeout=600,
        )
        return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr

    def stop(self) -> None:
        """End it and prove that nothing is left: no process, no file, no listener."""
        if self._probe is not None:
            self._probe.close()
        if self._serve is not None:
            self._serve.close()
        code, _, errors = self.command("down")
        assert code == 0, errors
        if self.ready:
            left = [" ".join(p.cmdline()) for p in processes.of_session(self.ready["session"])]
            assert left == []
            assert not Path(self.ready["log_dir"]).parents[2].exists()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(self.address, timeout=5)
        assert self.command("status")[0] == 3
        shutil.rmtree(self.home)

    # Where it is

    @property
    def url(self) -> str:
        return self.ready["url"]

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.rpartition("/")[2].partition(":")
        return host, int(port)

    @property
    def log_dir(self) -> Path:
        return Path(self.ready["log_dir"])

    # What is inside

    def pids(self, app: str, deployment: str) -> dict[str, int]:
        """Process ids of the running replicas, by replica id."""
        assert self._serve is not None
        details = self._serve.get("/api/serve/applications/").raise_for_status().json()
        # While an application changes Serve may not list its deployments for a moment.
        there = details["applications"].get(app, {}).get("deployments", {}).get(deployment, {})
        return {
            r["replica_id"]: r["pid"] for r in there.get("replicas", ()) if r["state"] == "RUNNING"
        }

    def all_pids(self) -> dict[tuple[str, str], dict[str, int]]:
        pools = [(app, pool) for app in MODELS for pool in ("Prefill", "Decode")]
        return {at: self.pids(*at) for at in [("gateway", "Gateway"), *pools]}

    def stats(
        self, app: str, deployment: str, replica: str | None = None, *, timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """What a replica says of itself; without `replica`, the only one.

        Raises ProbeError when it is gone or silent.
        """
        assert self._probe is not None
        if replica is None:
            (replica,) = self.pids(app, deployment)
        return self._probe(
            "stats", app=app, deployment=deployment, replica=replica, timeout_s=timeout_s
        )

    def queue(self, app: str, *, timeout_s: float = 10.0) -> dict[str, Any]:
        """What the admission queue that leads says, or the other one while none does. Raises
        ProbeError while both are away."""
        assert self._probe is not None
        return self._probe("queue", app=app, timeout_s=timeout_s)

    def queue_at(self, app: str, place: int, *, timeout_s: float = 5.0) -> dict[str, Any] | None:
        """What one of an application's two queues says; None while it does not answer."""
        assert self._probe is not None
        return self._probe("queue_at", app=app, place=place, timeout_s=timeout_s)

    def queue_exists(self, app: str) -> bool:
        assert self._probe is not None
        return self._probe("queue_exists", app=app)

    def watch(self, app: str, replica: str) -> None:
        """Have a decode replica note when what it holds changes."""
        assert self._probe is not None
        self._probe("watch", app=app, deployment="Decode", replica=replica)

    def watched(self, app: str, replica: str) -> list[tuple[float, int, int]]:
        """`(monotonic seconds, streams, blocks held)` at every change since `watch`."""
        assert self._probe is not None
        changes = self._probe("watched", app=app, deployment="Decode", replica=replica)
        return [(at, int(streams), int(blocks)) for at, streams, blocks in changes]

    def counted(self, app: str, counter: str) -> dict[str, int]:
        """A counter of the decode replicas, summed over them."""
        total: dict[str, int] = {}
        for replica in self.pids(app, "Decode"):
            for key, value in self.stats(app, "Decode", replica)["counters"][counter].items():
                total[key] = total.get(key, 0) + value
        return total

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=120, trust_env=False).text

    def left(self) -> list[Any]:
        """What is alive although nobody asks for anything. Empty is as it should be."""
        left: list[Any] = []
        for app in MODELS:
            for replica in self.pids(app, "Decode"):
                stats = self.stats(app, "Decode", replica)
                engine = stats["engine"]
                alive = {
                    "streams": stats["streams"],
                    "choices": stats["choices"],
                    "pulls": stats["pulls_active"],
                    **_held(engine),
                }
                left += [(app, replica, alive)] if any(alive.values()) else []
            for replica in self.pids(app, "Prefill"):
                stats = self.stats(app, "Prefill", replica)
                alive = {
                    "sessions": stats["sessions"],
                    "unacked_bytes": stats["unacked_bytes"],
                    **_held(stats["engine"]),
                }
                left += [(app, replica, alive)] if any(alive.values()) else []
            queue = self.queue(app)
            slots = dict.fromkeys(self.pids(app, "Decode"), self._slots(app))
            if queue["waiting"] or queue["free_slots"] != slots:
                left.append((app, "queue", queue, slots))
            if not queue["gateways"]:
                left.append((app, "queue", "no gateway is linked to it"))
        left += [
            line
            for line in self.metrics().splitlines()
            if line.startswith("tailrace_requests_inflight{") and not line.endswith(" 0")
        ]
        return left

    def settled(self, *, within_s: float = PATIENCE_S) -> None:
        """Wait until nothing is alive anywhere and every replica is there, or fail saying what."""
        wanted = {
            (application["name"], deployment["name"]): deployment["num_replicas"]
            for application in self.config["applications"]
            for deployment in application["deployments"]
        }
        deadline = time.monotonic() + within_s
        while True:
            try:
                there = {at: len(self.pids(*at)) for at in wanted}
                left = self.left() if there == wanted else [there]
            except (ProbeError, httpx.HTTPError) as error:
                left = [repr(error)]
            if not left:
                return
            if time.monotonic() > deadline:
                pytest.fail(f"still alive after {within_s:g} s: {left}")
            time.sleep(0.2)

    def _slots(self, app: str) -> int:
        for application in self.config["applications"]:
            for deployment in application["deployments"]:
                if (application["name"], deployment["name"]) == (app, "Decode"):
                    return deployment["user_config"]["max_running_requests"]
        raise AssertionError(app)


def _held(engine: dict[str, Any]) -> dict[str, int]:
    names = ("num_running", "num_waiting", "num_waiting_remote", "num_held_blocks", "num_leases")
    return {name: engine[name] for name in names}


def wait_for(
    what: Callable[[], Any], *, within_s: float = PATIENCE_S, every_s: float = 0.05
) -> Any:
    """Poll until `what()` is true and return it. ProbeError counts as not yet."""
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(ProbeError, httpx.HTTPError):
            if found := what():
                return found
        if time.monotonic() > deadline:
            pytest.fail(f"did not come true within {within_s:g} s")
        time.sleep(every_s)


def end(pid: int, number: int) -> float:
    """Send a signal; the monotonic time at which it was sent, which replicas' logs share."""
    process = psutil.Process(pid)
    now = time.monotonic()
    process.send_signal(number)
    return now


@lru_cache(maxsize=4)
def _loaded(source: str) -> tuple[Any, Any]:
    from engine.config import ModelConfig
    from engine.models.load import load_model
    from engine.text.text_model import load_text

    return load_model(ModelConfig(name=source, source=source)), load_text(source).tokenizer


class Choice:
    """What one local engine answers for one choice."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float | None] = []
        self.text = ""
        self.finish = ""


def locally(source: str, prompt: list[int], n: int = 1, **params: Any) -> tuple[Choice, ...]:
    """The answer of one engine in this process that serves nothing else. The same question is
    computed once."""
    return _answer(source, tuple(prompt), n, tuple(sorted(params.items())))


@cache
def _answer(
    source: str, prompt: tuple[int, ...], n: int, params: tuple[tuple[str, Any], ...]
) -> tuple[Choice, ...]:
    from engine.build import assemble
    from engine.config import EngineConfig, ModelConfig, SchedulerConfig
    from engine.request import Request, SamplingParams

    model, tokenizer = _loaded(source)
    config = EngineConfig(
        model=ModelConfig(name=source, source=source),
        num_blocks=NUM_BLOCKS,
        block_tokens=16,
        scheduler=SchedulerConfig(max_step_tokens=4096, max_chunk_tokens=4096),
    )
    whole = SamplingParams(**dict(params))
    choices: list[Choice] = []
    for i in range(n):
        engine = assemble(config, model, tokenizer).engine
        request = Request(request_id="r", prompt_ids=prompt, params=whole.for_choice(i))
        engine.submit(request)
        choice = Choice()
        while (step := engine.step()) is not None:
            for output in step.outputs:
                assert output.token is not None
                choice.tokens.append(output.token.token_id)
                choice.logprobs.append(output.token.logprob)
                choice.text += output.text
                choice.finish = output.finish.value if output.finish else ""
        choices.append(choice)
    return tuple(choices)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The session that all tests marked `cluster` in tests/served and tests/faults share."""
    cluster = Cluster()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
