"""A whole model's cluster in one process: queue, prefill, decode and gateway over real links."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Literal

import pytest

from deployments.admission.actor import QueueActor
from deployments.admission.client import QueueClient, QueueReporter
from deployments.admission.queue import QueueLimits
from deployments.decode import DecodeService
from deployments.engine_host import EngineHost
from deployments.gateway.dispatch import ModelClient
from deployments.holds import HoldKeeper
from deployments.prefill import PrefillService
from deployments.settings import ModelArgs, PoolSettings

SECRET = b"a secret of the tests, long enough to be one"
PATIENT = QueueLimits(max_wait_s=600.0, grant_expiry_s=20.0)
"""For machines that may stand still for seconds."""


class FakeDirectory:
    """The running set, set by hand instead of by Serve."""

    def __init__(self) -> None:
        self._replicas: dict[str, dict[str, Any]] = {}
        self._changed = asyncio.Event()

    def replicas(self) -> Mapping[str, Mapping[str, Any]]:
        return self._replicas

    async def changed(self, seen=None) -> None:
        if seen is None or seen is self._replicas:
            await self._changed.wait()

    def put(self, replica: str, link: str) -> None:
        self._replicas = {**self._replicas, replica: {"link": link}}
        self._tell()

    def drop(self, replica: str) -> None:
        self._replicas = {r: m for r, m in self._replicas.items() if r != replica}
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class LocalCluster:
    """`holds` go to the replica objects directly, as Serve would carry them."""

    def __init__(self, args: ModelArgs, settings: PoolSettings) -> None:
        self.args = args
        self.settings = settings
        self.queue = QueueActor("app", SECRET, host="127.0.0.1", limits=PATIENT)
        self.decodes: dict[str, DecodeService] = {}
        self.prefills: dict[str, PrefillService] = {}
        self.decode_directory = FakeDirectory()
        self.prefill_directory = FakeDirectory()
        self.clients: list[ModelClient] = []

    async def add_prefill(self, name: str, **changes: Any) -> PrefillService:
        settings = self.settings.model_copy(update=changes)
        args = self.args.of_prefill()
        host = await EngineHost.build(args, settings)
        service = PrefillService(name, host, settings, SECRET)
        self.prefill_directory.put(name, await service.start(args, "127.0.0.1"))
        self.prefills[name] = service
        return service

    async def add_decode(self, name: str, *, report: bool = True, **changes: Any) -> DecodeService:
        settings = self.settings.model_copy(update=changes)
        host = await EngineHost.build(self.args, settings)
        service = DecodeService(name, host, self.args, settings, SECRET)
        address = await service.start("127.0.0.1")
        if self.args.prefill:

            async def hold(replica: str, peer: str) -> str:
                return await self.prefills[replica].holds.hold(peer)

            service.use_prefill(self.prefill_directory, HoldKeeper(hold, name))
        if report:
            service.report_to(QueueReporter(self.queue.address, SECRET, name))
        self.decodes[name] = service
        self.decode_directory.put(name, address)
        return service

    async def add_gateway(self, name: str) -> ModelClient:
        async def hold(replica: str, peer: str) -> str:
            return await self.decodes[replica].holds.hold(peer)

        client = ModelClient(
            name,
            SECRET,
            self.decode_directory,
            QueueClient(self.queue.address, SECRET, name),
            HoldKeeper(hold, name),
        )
        client.start()
        await client._queue.wait_available(240.0)
        self.clients.append(client)
        return client

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        for decode in self.decodes.values():
            await decode.close()
        for prefill in self.prefills.values():
            await prefill.close()
        await self.queue.close()


@pytest.fixture
async def local_cluster():
    """`await local_cluster(args, settings)` makes one; all are closed at the end."""
    made: list[LocalCluster] = []

    def make(
        source: str = "fake",
        *,
        prefill: bool = True,
        transport: Literal["link", "nixl"] = "link",
        **settings: Any,
    ) -> LocalCluster:
        args = ModelArgs(
            name="m",
            source=source,
            prefill=prefill,
            transport=transport,
            num_blocks=400,
            block_tokens=8,
            num_threads=1,
        )
        values = {"local_prefill_tokens": 16, "pull_stall_s": 60.0, **settings}
        cluster = LocalCluster(args, PoolSettings.model_validate(values))
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        await cluster.close()
