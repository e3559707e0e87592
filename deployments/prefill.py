"""The prefill pool: computes prompts for decode replicas and streams their KV to them."""

# Serve's decorators and handles are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedClassDecorator=false, reportMissingTypeArgument=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from typing import Any

import ray
from ray import serve

from deployments.background import background
from deployments.engine_host import EngineHost
from deployments.garbage import spare_startup
from deployments.holds import PairHolds
from deployments.lifecycle.export import ExportServer
from deployments.lifecycle.reads import BlockOffers, start_agents
from deployments.link.link import Link, LinkHandlers
from deployments.link.server import LinkServer
from deployments.link.wire import CloseReason
from deployments.logs import adopt_serve
from deployments.pool_replica import PoolReplica
from deployments.ranks import ActorRanks
from deployments.replica_metrics import ReplicaMetrics
from deployments.secret import read_link_secret
from deployments.settings import ModelArgs, PoolSettings
from engine.cache.hashing import hash_chain, root_hash
from engine.errors import ConfigError, EngineError
from engine.outputs import StepOutput
from engine.request import Request


class PrefillService:
    """Everything a prefill replica does, without Serve."""

    def __init__(
        self, replica_id: str, host: EngineHost, settings: PoolSettings, secret: bytes
    ) -> None:
        built = host.built
        if built is None:
            raise ConfigError(
                "the synthetic engine has no KV to hand over: set prefill: false in args"
            )
        self.replica_id = replica_id
        self.host = host
        self._layout = built.engine.layout
        self._pool = built.pool
        self._window_bytes = settings.max_unacked_bytes
        self.exports = ExportServer(
            built.engine,
            built.pool,
            chain=self._chain,
            max_unacked_bytes=settings.max_unacked_bytes,
        )
        self.holds = PairHolds(self._busy)
        self.metrics = ReplicaMetrics(host.engine.config.model.name, "prefill", replica_id)
        self.metrics.memory(built.memory)
        self.metrics.recording = settings.metrics
        self._tasks: list[asyncio.Task[None]] = []
        self._secret = secret
        self._server: LinkServer | None = None

    async def start(self, args: ModelArgs, advertise_host: str) -> str:
        """Listen and begin stepping. Returns the link's address."""
        if args.transport == "nixl":
            agents = await start_agents(self._pool, window_bytes=self._window_bytes)
            self.exports.offers = BlockOffers(agents)
        self.host.start(self._on_step, self._on_failure)
        self._server = LinkServer(
            self._secret,
            "prefill",
            self.replica_id,
            handlers=LinkHandlers(
                on_message=self.exports.on_message, on_open=self._on_open, on_close=self._on_close
            ),
            host=args.link.host,
            advertise_host=advertise_host,
            ports=args.link.ports,
        )
        await self._server.start()
        server = self._server
        self._tasks = [
            background(self.host.expire_leases(self.exports.expired), "leases"),
            background(self.exports.run_signs(), "signs of life"),
            *self.host.watching(self._on_failure),
            background(self.metrics.run(self._sample, lambda: server.links.values()), "metrics"),
        ]
        return self._server.address

    def apply(self, settings: PoolSettings) -> None:
        """As of the decode pool."""
        self.host.reconfigure(settings)
        self.metrics.recording = settings.metrics
        self.exports.max_unacked_bytes = settings.max_unacked_bytes

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            await self._server.close("replica stops")
        self.host.close()
        if self.exports.offers is not None:
            await asyncio.to_thread(self.exports.offers.close)

    def stats(self) -> dict[str, Any]:
        return {
            "replica": self.replica_id,
            "pid": os.getpid(),
            "ranks": self.host.rank_pids,
            "engine": asdict(self.host.engine.stats()),
            "sessions": self.exports.num_sessions,
            "bytes_sent": self.exports.bytes_sent,
            "unacked_bytes": self.exports.unacked_bytes,
        }

    def _busy(self, peer_id: str) -> bool:
        return self.exports.sessions_of(peer_id) > 0

    def _chain(self, request: Request, chain_tokens: int) -> tuple[bytes, ...]:
        root = root_hash(self._layout.fingerprint, request.salt)
        return tuple(hash_chain(root, request.token_ids, chain_tokens))

    def _sample(self) -> None:
        failure = self.host.failure
        if failure is not None:
            self.exports.fail_all(f"the engine failed: {failure}")
        engine = self.host.engine
        self.metrics.sample_engine(engine.stats(), engine.config.block_tokens)
        exports = self.exports
        self.metrics.sample_exports(exports.num_sessions, exports.bytes_sent, exports.unacked_bytes)

    def _on_step(self, step: StepOutput) -> None:
        self.metrics.step(step)
        self.exports.on_step(step)

    def _on_failure(self, error: EngineError) -> None:
        self.exports.fail_all(str(error))

    def _on_open(self, link: Link) -> None:
        if self.exports.offers is not None:
            self.exports.offers.announce(link)

    def _on_close(self, link: Link, reason: CloseReason) -> None:
        self.exports.on_close(link, reason)
        self.holds.lost(link.peer_id)


@serve.deployment(
    name="Prefill",
    max_ongoing_requests=10_000,
    ray_actor_options={"num_cpus": 0.5},
    graceful_shutdown_timeout_s=60,
    graceful_shutdown_wait_loop_s=0.5,
    health_check_period_s=2,
    health_check_timeout_s=30,
    logging_config={"encoding": "JSON"},
)
class Prefill(PoolReplica[PrefillService]):
    """Serve's view of a prefill replica: placement, and what it is called for."""

    async def __init__(self, args: dict[str, Any]) -> None:
        adopt_serve()
        parsed = ModelArgs.model_validate(args)
        replica_id = serve.get_replica_context().replica_id.unique_id
        settings = PoolSettings()
        host = await EngineHost.build(parsed, settings, launcher_of(parsed))
        self.service = PrefillService(replica_id, host, settings, read_link_secret())
        self._address = await self.service.start(parsed, advertised(parsed))
        self.args = parsed
        spare_startup()

    def record_replica_metadata(self) -> dict[str, Any]:
        return {"link": self._address, "model": self.args.name, "pid": os.getpid()}


def launcher_of(args: ModelArgs) -> ActorRanks | None:
    """Where this replica's ranks run. Call in the constructor of a deployment."""
    if args.num_ranks == 1:
        return None
    address = advertised(args)
    return ActorRanks(host=None if address == "127.0.0.1" else address)


def advertised(args: ModelArgs) -> str:
    """The address of this replica's link that others can dial."""
    if args.link.advertise_host:
        return args.link.advertise_host
    if args.link.host in ("0.0.0.0", "::"):
        return ray.util.get_node_ip_address()
    return args.link.host
