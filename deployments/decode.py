"""The decode pool: owns its streams, asks prefill for what is missing, sends a frame a step."""

# Serve's decorators and handles are only partly typed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUntypedClassDecorator=false, reportMissingTypeArgument=false
# pyright: reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.schema import ApplicationStatus

from deployments.admission.actor import create_or_find_queue, find_queue, remove_queue
from deployments.admission.client import QueueReporter
from deployments.background import background
from deployments.engine_host import EngineHost
from deployments.explain.asking import Answerer, Asker
from deployments.garbage import spare_startup
from deployments.holds import HoldKeeper, PairHolds
from deployments.lifecycle.machine import LifecycleConfig
from deployments.lifecycle.prefill_pool import PrefillPool, ReplicaSource
from deployments.lifecycle.pull import PullClient
from deployments.lifecycle.reads import BlockReads, start_agents
from deployments.lifecycle.streams import StreamTable
from deployments.link.client import Dialer
from deployments.link.link import Link, LinkDown, LinkHandlers
from deployments.link.messages import Kind, Report
from deployments.link.server import LinkServer
from deployments.link.wire import CloseReason
from deployments.logs import adopt_serve
from deployments.pool_replica import PoolReplica
from deployments.prefill import advertised, launcher_of
from deployments.replica_metrics import ReplicaMetrics
from deployments.routing.replicas import Directory
from deployments.secret import read_link_secret
from deployments.settings import ModelArgs, PoolSettings
from engine.errors import EngineError
from engine.outputs import StepOutput
from engine.request import FinishReason
from engine.transfer.manifest import Prefilled

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from engine.transfer.nixl_group import AgentGroup

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 2.0
"""A link that ended while its prefill replica lives is dialled again after at most this long."""


class DecodeService:
    """Everything a decode replica does, without Serve."""

    def __init__(
        self,
        replica_id: str,
        host: EngineHost,
        args: ModelArgs,
        settings: PoolSettings,
        secret: bytes,
    ) -> None:
        self.replica_id = replica_id
        self.host = host
        self.pulls: PullClient | None = None
        self._drained_by: set[str] = set()
        """Gateways whose running set this replica is not in; what they said ends with them."""

        self.reporter: QueueReporter | None = None
        self._report_due = False
        self._args = args
        self._settings = settings
        self._secret = secret
        self._server: LinkServer | None = None
        self._dialer: Dialer | None = None
        self._agents: AgentGroup | None = None
        self._prefill_holds: HoldKeeper | None = None
        self._recent_pulls: deque[dict[str, Any]] = deque(maxlen=256)
        self.metrics = ReplicaMetrics(args.name, "decode", replica_id, connector=args.transport)
        if host.built is not None:
            self.metrics.memory(host.built.memory)
        self.metrics.recording = settings.metrics
        self._tasks: list[asyncio.Task[None]] = []
        self.streams = StreamTable(
            host.engine,
            self._lifecycle_config(settings),
            slots=settings.max_running_requests,
            remote=None,
            changed=self._report,
            observer=self,
        )
        self.holds = PairHolds(self._busy)
        self._asker = Asker()
        self._answerer = Answerer({"journal": self._journal, "relay": self._relay})

    async def start(self, advertise_host: str) -> str:
        """Listen and begin stepping. Returns the link's address."""
        built, args = self.host.built, self._args
        if args.transport == "nixl" and args.prefill and built is not None:
            window = self._settings.max_unacked_bytes
            self._agents = await start_agents(built.pool, window_bytes=window)
        self.host.start(self._on_step, self.streams.fail_all)
        self._server = LinkServer(
            self._secret,
            "decode",
            self.replica_id,
            handlers=LinkHandlers(on_message=self._on_message, on_close=self._on_close),
            host=self._args.link.host,
            advertise_host=advertise_host,
            ports=self._args.link.ports,
        )
        await self._server.start()
        server = self._server
        self._tasks.append(
            background(self.metrics.run(self._sample, lambda: server.links.values()), "metrics")
        )
        self._tasks += self.host.watching(self.streams.fail_all)
        return self._server.address

    def use_prefill(self, source: ReplicaSource, holds: HoldKeeper) -> None:
        """Send long prompts to the replicas of `source` from now on."""
        built = self.host.built
        assert built is not None
        pulls = PullClient(
            built.engine.layout,
            window_bytes=self._settings.transfer_window_bytes,
            stall_s=self._settings.pull_stall_s,
            silence_s=self._settings.pull_silence_s,
        )
        if self._agents is not None:
            pulls.reads = BlockReads(self._agents, built.engine.layout, built.pool.block_tokens)
        self._dialer = Dialer(
            self._secret,
            "decode",
            self.replica_id,
            LinkHandlers(
                on_message=self._from_prefill,
                on_payload=pulls.on_payload,
                on_payload_done=pulls.on_payload_done,
                on_close=pulls.on_close,
            ),
            expect_role="prefill",
        )
        pulls.dialer = self._dialer
        self.pulls = pulls
        self._prefill_holds = holds
        self.streams.remote = PrefillPool(built, pulls, source, hold=holds)
        self._tasks.append(background(self._greet_prefills(source, self._dialer), "greeting"))

    def report_to(self, reporter: QueueReporter) -> None:
        """Tell this model's admission queue what is alive here, now and after every change."""
        self.reporter = reporter
        reporter.changed(self.report())
        reporter.start()

    def apply(self, settings: PoolSettings) -> None:
        """Adopt what can change while running. Raises ConfigError, and changes nothing, for what
        the engine cannot do."""
        self.host.reconfigure(settings)
        self._settings = settings
        self.metrics.recording = settings.metrics
        self.streams.slots = settings.max_running_requests
        self.streams.config = self._lifecycle_config(settings)
        if self.pulls is not None:
            self.pulls.window_bytes = settings.transfer_window_bytes
            self.pulls.stall_s = settings.pull_stall_s
            self.pulls.silence_s = settings.pull_silence_s
        if self._agents is not None:
            self._agents.reconfigure(settings.max_unacked_bytes)
        self._report()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self.reporter is not None:
            await self.reporter.close()
        if self._prefill_holds is not None:
            await self._prefill_holds.close()
        self._answerer.close()
        if self._server is not None:
            await self._server.close("replica stops")
        if self._dialer is not None:
            await self._dialer.close()
        self.host.close()
        if self._agents is not None:
            await asyncio.to_thread(self._agents.close)

    @property
    def draining(self) -> bool:
        return bool(self._drained_by)

    def report(self) -> Report:
        """What the queue needs to know of this replica now."""
        return Report(
            replica_id=self.replica_id,
            slots=self.streams.slots,
            capacity_tokens=self.host.capacity_tokens,
            held_tokens=self.host.held_tokens,
            alive=self.streams.alive(),
            prefilling_tokens=self.streams.prefilling_tokens,
            prefill_replicas=0 if self.streams.remote is None else self.streams.remote.num_replicas,
            grants=self.streams.grants(),
            ungranted=self.streams.num_ungranted,
            draining=self.draining or self.host.failure is not None,
        )

    def stats(self) -> dict[str, Any]:
        counters = asdict(self.streams.counters)
        counters["decisions"] = {"/".join(k): v for k, v in counters["decisions"].items()}
        pulls = self.pulls
        return {
            "replica": self.replica_id,
            "pid": os.getpid(),
            "ranks": self.host.rank_pids,
            "engine": asdict(self.host.engine.stats()),
            "counters": counters,
            "streams": self.streams.num_streams,
            "choices": self.streams.num_choices,
            "pulls_active": 0 if pulls is None else pulls.num_active,
            "bytes_received": 0 if pulls is None else pulls.bytes_received,
            "checksum_mismatches": 0 if pulls is None else pulls.checksum_mismatches,
            "reads_connected": 0
            if pulls is None or pulls.reads is None
            else pulls.reads.num_connected,
            "reads_open": 0 if pulls is None or pulls.reads is None else pulls.reads.num_open,
            "recent_pulls": list(self._recent_pulls),
            "log": list(self.streams.log)[-32:],
        }

    def first_token(self, seconds: float) -> None:
        self.metrics.first_token(seconds)

    def gaps(self, counted: Sequence[tuple[float, int]]) -> None:
        self.metrics.gaps(counted)

    def ended(
        self, finish: FinishReason, total_s: float, decode_s: float | None, num_tokens: int
    ) -> None:
        self.metrics.ended(finish, total_s, decode_s, num_tokens)

    def pulled(self, prefilled: Prefilled, seconds: float) -> None:
        self.metrics.pulled(prefilled, seconds)
        self._recent_pulls.append(
            {
                "bytes": prefilled.num_bytes,
                "seconds": seconds,
                "exposed_s": prefilled.exposed_s,
                "cached_tokens": prefilled.num_cached_tokens,
                "connector": prefilled.connector,
            }
        )

    def _report(self) -> None:
        """Tell the queue once this turn of the loop has made all of its changes."""
        if self.reporter is not None and not self._report_due:
            self._report_due = True
            asyncio.get_running_loop().call_soon(self._send_report)

    def _send_report(self) -> None:
        self._report_due = False
        if self.reporter is not None:
            self.reporter.changed(self.report())

    @staticmethod
    def _lifecycle_config(settings: PoolSettings) -> LifecycleConfig:
        return LifecycleConfig(
            local_prefill_tokens=settings.local_prefill_tokens,
            max_pull_attempts=settings.max_pull_attempts,
            max_fallback_tokens=settings.max_fallback_tokens,
        )

    def _busy(self, peer_id: str) -> bool:
        link = self._server.links.get(peer_id) if self._server is not None else None
        return link is not None and self.streams.streams_of(link) > 0

    def _on_message(self, link: Link, message: list[Any]) -> None:
        if message[0] == Kind.DRAIN:
            if message[1]:
                self._drained_by.add(link.peer_id)
            else:
                self._drained_by.discard(link.peer_id)
            self._report()
        elif message[0] == Kind.ASK:
            self._answerer.asked(link, message)
        elif message[0] == Kind.TELL:
            self._asker.told(link, message)
        else:
            self.streams.on_message(link, message)

    def _journal(self, link: Link, stream_id: int) -> dict[str, Any] | None:
        """What a gateway's own submit went through here."""
        facts = self.streams.journal.tell(link.peer_id, stream_id, self.replica_id)
        return None if facts is None else facts.to_wire()

    async def _relay(self, link: Link, what: str, arguments: list[Any]) -> list[Any]:
        """A gateway's question to all the others, which have no links to each other."""
        assert self._server is not None
        others = [
            other
            for other in self._server.links.values()
            if other is not link and other.peer_role == "gateway"
        ]
        asked = (self._asker.ask(other, what, *arguments) for other in others)
        told = await asyncio.gather(*asked)
        return [None if answer is None else answer.value for answer in told]

    async def _greet_prefills(self, source: ReplicaSource, dialer: Dialer) -> None:
        """Have a link to every prefill replica before a prompt needs it; metrics use it, too."""
        while True:
            snapshot = source.replicas()
            for replica, metadata in snapshot.items():
                try:
                    await dialer.get(metadata["link"], expect_id=replica)
                except LinkDown as error:
                    logger.info("no link to prefill %s yet: %s", replica, error)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(source.changed(snapshot), LOOK_AGAIN_S)

    def _from_prefill(self, link: Link, message: list[Any]) -> None:
        if message[0] == Kind.SNAPSHOT:
            if self._server is not None:
                for gateway in list(self._server.links.values()):
                    gateway.send(message)
            return
        assert self.pulls is not None
        self.pulls.on_message(link, message)

    def _sample(self) -> None:
        failure = self.host.failure
        if failure is not None:
            self.streams.fail_all(EngineError(f"the engine failed: {failure}"))
        self.metrics.sample_engine(self.host.engine.stats(), self._args.block_tokens)
        mismatches = 0 if self.pulls is None else self.pulls.checksum_mismatches
        self.metrics.sample_streams(self.streams.counters, mismatches)
        reads = None if self.pulls is None else self.pulls.reads
        if reads is not None:
            self.metrics.posted(reads.take_posts())

    def _on_step(self, step: StepOutput) -> None:
        self.metrics.step(step)
        self.streams.on_step(step)

    def _on_close(self, link: Link, reason: CloseReason) -> None:
        self.streams.on_close(link, reason)
        self._asker.lost(link)
        self._drained_by.discard(link.peer_id)
        self._report()
        self.holds.lost(link.peer_id)


@serve.deployment(
    name="Decode",
    max_ongoing_requests=10_000,
    ray_actor_options={"num_cpus": 0.5},
    graceful_shutdown_timeout_s=600,
    graceful_shutdown_wait_loop_s=0.5,
    health_check_period_s=2,
    health_check_timeout_s=30,
    logging_config={"encoding": "JSON"},
)
class Decode(PoolReplica[DecodeService]):
    """Serve's view of a decode replica: placement, and what it is called for."""

    async def __init__(self, args: dict[str, Any], prefill: DeploymentHandle | None) -> None:
        adopt_serve()
        parsed = ModelArgs.model_validate(args)
        context = serve.get_replica_context()
        replica_id = context.replica_id.unique_id
        settings = PoolSettings()
        secret = read_link_secret()
        host = await EngineHost.build(parsed, settings, launcher_of(parsed))
        service = DecodeService(replica_id, host, parsed, settings, secret)
        self.service = service
        self.args = parsed
        self._app = context.app_name
        self._created = int(time.time())
        self._address = await service.start(advertised(parsed))
        if prefill is not None and host.built is not None:
            directory = Directory.of(context.app_name, "Prefill")
            directory.watch(prefill)
            handle = prefill.hold

            async def hold(target: str, peer: str) -> str:
                return await handle.remote({"target": target, "peer": peer})

            service.use_prefill(directory, HoldKeeper(hold, replica_id))
        app, link = context.app_name, parsed.link

        async def queue_address() -> str:
            return await create_or_find_queue(
                app,
                model=parsed.name,
                host=link.host,
                advertise_host=link.advertise_host,
                ports=link.ports,
            )

        spare_startup()
        service.report_to(
            QueueReporter(queue_address, secret, replica_id, find_other=lambda: find_queue(app, 1))
        )

    def record_replica_metadata(self) -> dict[str, Any]:
        engine = self.service.host.engine
        return {
            "link": self._address,
            "pid": os.getpid(),
            "model": self.args.name,
            "source": self.args.source,
            "created": self._created,
            "max_context_tokens": engine.max_context_tokens,
            "max_output_tokens": self.args.max_output_tokens,
        }

    async def __del__(self) -> None:
        await super().__del__()
        if hasattr(self, "service"):
            await asyncio.to_thread(self._end_queue_of_deleted_app)

    def _end_queue_of_deleted_app(self) -> None:
        """The queue outlives replicas and redeploys, but not the model's application."""
        try:
            app = serve.status().applications.get(self._app)
            if app is None or app.status == ApplicationStatus.DELETING:
                remove_queue(self._app)
        except Exception:
            logger.exception("the admission queue of %s could not be looked after", self._app)
