"""A real session for tests of the one queue: two gateways before a model of few slots.

Tiers have short waits, every tenant has a key, and what limits count lies in a Redis behind a
password. The model is synthetic, so that a slot's time is the only thing that is scarce.
"""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import orjson
import psutil
import redis
from redis_server import RedisServer
from serving import Cluster, model_application, wait_for

from deployments.gateway.identity.keyring import hash_key

MODEL = "synthetic"
SLOTS = 4
TIERS: dict[str, dict[str, Any]] = {
    "priority": {"rank": 0, "max_wait_s": 20, "preemptible": False},
    "default": {"rank": 10, "share": 0.3, "max_wait_s": 3},
    "flex": {"rank": 20, "share": 0.1, "max_wait_s": 8, "queue_s": None, "ttft_s": 60},
    "batch": {"rank": 30, "share": 0.1, "max_wait_s": 8, "queue_s": None, "ttft_s": None},
}
TOKENS_A_MINUTE = 1049
"""Of the tenant `limited`."""

# Words that occur nowhere else: nothing but a leak makes them appear in a file.
PASSWORD = "pw-Kingfisher-83f1"
KEY_MARK = "tr-Heron-52c9-"
KEYS = {name: KEY_MARK + name for name in ("operator", "flood", "polite", "limited", "guest")}


def configuration(limits_store: Any) -> dict[str, Any]:
    model = model_application(MODEL, MODEL, decodes=1, prefills=0)
    model["args"] = {"name": MODEL, "source": MODEL, "prefill": False}
    model["deployments"][0]["user_config"] = {
        "max_running_requests": SLOTS,
        "max_waiting_requests": 256,
    }
    tenants: dict[str, dict[str, Any]] = {name: {} for name in KEYS}
    tenants["limited"] = {"tokens_per_minute": TOKENS_A_MINUTE}
    keys = [
        {
            "id": f"key-{name}",
            "sha256": hash_key(key),
            "tenant": name,
            "operator": name == "operator",
            "tiers": list(TIERS),
        }
        for name, key in KEYS.items()
    ]
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
                        "num_replicas": 2,
                        "max_surge_percent": 100,
                        "max_ongoing_requests": 1000,
                        "graceful_shutdown_timeout_s": 60,
                        "ray_actor_options": {"num_cpus": 0.1},
                        "user_config": {
                            "revision": 1,
                            "models": [{"name": MODEL, "app": MODEL}],
                            "tiers": TIERS,
                            "keys": keys,
                            "tenants": tenants,
                            "limits_store": limits_store,
                        },
                    }
                ],
            },
            model,
        ],
    }


class TieredCluster(Cluster):
    """Starts its Redis first and ends it last."""

    def __init__(self) -> None:
        super().__init__()
        self.redis = RedisServer(str(self.home), password=PASSWORD)
        self.secret_file = self.home / "limits-store"
        """Where the password belongs."""

        self.secret_file.write_text(self.redis.url + "\n")
        self.config = configuration({"file": str(self.secret_file)})
        self._urls: dict[int, str] = {}

    def start(self) -> None:
        self.redis.start()
        super().start()

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            self.redis.kill()

    @property
    def decode(self) -> str:
        """The one decode replica's id."""
        (replica,) = self.pids(MODEL, "Decode")
        return replica

    def gateways(self) -> dict[str, tuple[int, str]]:
        """By replica id: process id, and the address at which it answers without the balancer."""
        there = self.pids("gateway", "Gateway")
        for pid in there.values():
            if pid not in self._urls:
                self._urls[pid] = wait_for(lambda pid=pid: _own_address(pid))
        return {replica: (pid, self._urls[pid]) for replica, pid in there.items()}

    def stored(self) -> Iterator[tuple[str, str]]:
        """What Serve and Redis keep, as text."""
        assert self._serve is not None
        yield "Serve", self._serve.get("/api/serve/applications/").raise_for_status().text
        store = redis.Redis.from_url(self.redis.url)
        try:
            for key in store.scan_iter():
                kept = store.hgetall(key) if store.type(key) == b"hash" else store.type(key)
                yield "Redis", f"{key}: {kept}"
        finally:
            store.close()

    def second_queue(self, gateway: str) -> None:
        """A second queue of the model, in a process of its own: the decode replica reports to both,
        and this gateway asks the second one."""
        assert self._probe is not None
        self._probe("second_queue", app=MODEL, decode=self.decode, gateway=gateway)

    def one_queue(self, gateway: str) -> None:
        """As it was before."""
        assert self._probe is not None
        self._probe("one_queue", app=MODEL, decode=self.decode, gateway=gateway)

    def left(self) -> list[Any]:
        stats = self.stats(MODEL, "Decode", self.decode)
        queues = [self.queue_at(MODEL, place) for place in (0, 1)]
        there = set(self.pids("gateway", "Gateway"))
        left: list[Any] = []
        if stats["streams"] or stats["choices"]:
            left.append(("decode", stats["streams"], stats["choices"]))
        if any(queue is None for queue in queues):
            return [*left, ("a queue is away", queues)]
        leading, standing = sorted(filter(None, queues), key=lambda queue: -queue["epoch"])
        if leading["waiting"] or leading["free_slots"] != {self.decode: SLOTS}:
            left.append(("queue", leading))
        if standing["leads"] or not standing["peer_linked"]:
            left.append(("does not stand by", standing))
        for queue in (leading, standing):
            if not there <= set(queue["gateways"]) or queue["decodes"] != [self.decode]:
                left.append(("not all are linked to this queue", queue))
        return left

    def settled(self, *, within_s: float = 120.0) -> None:
        """Also until a queue stands by: Ray takes as long as a process takes to start."""
        super().settled(within_s=within_s)

    def standby(self) -> dict[str, Any]:
        """What the queue that does not lead says."""
        queues = [self.queue_at(MODEL, place) for place in (0, 1)]
        (standing,) = [queue for queue in queues if queue is not None and not queue["leads"]]
        return standing


def _own_address(pid: int) -> str | None:
    """Where this process answers HTTP. None: nowhere yet."""
    for connection in psutil.Process(pid).net_connections(kind="tcp"):
        if connection.status != psutil.CONN_LISTEN:
            continue
        port = connection.laddr.port
        with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
            asked = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            try:
                asked.request("GET", "/health")
                answer = asked.getresponse()
                if answer.status == 200 and "revision" in orjson.loads(answer.read()):
                    return f"http://127.0.0.1:{port}"
            finally:
                asked.close()
    return None


@dataclass
class Answered:
    """A whole answer that was not streamed."""

    status: int
    body: dict[str, Any]
    headers: httpx.Headers

    @property
    def queued_s(self) -> float:
        """What the request waited for its grant."""
        (phase,) = [
            p for p in self.headers["server-timing"].split(", ") if p.startswith("queue;dur=")
        ]
        return float(phase.partition("=")[2]) / 1000


class Caller:
    """One tenant at one gateway."""

    def __init__(self, url: str, tenant: str) -> None:
        self.tenant = tenant
        self.client = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {KEYS[tenant]}"},
            limits=httpx.Limits(max_connections=200),
            timeout=240,
            trust_env=False,
        )

    def body(self, tier: str, tokens: int, **more: Any) -> dict[str, Any]:
        asked = {"prompt": [1] * 10, "max_tokens": tokens, "service_tier": tier}
        return {"model": MODEL, "ignore_eos": True, **asked, **more}

    async def ask(self, tier: str, tokens: int) -> Answered:
        answer = await self.client.post("/v1/completions", json=self.body(tier, tokens))
        return Answered(answer.status_code, answer.json(), answer.headers)

    @contextlib.asynccontextmanager
    async def streamed(self, tier: str, tokens: int) -> AsyncIterator[AsyncIterator[str]]:
        """The lines of a stream that is left at the end of the block."""
        body = self.body(tier, tokens, stream=True)
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise AssertionError((answer.status_code, await answer.aread()))
            yield answer.aiter_lines()
