"""The prefill pool as a decode replica sees it: who is there, whom to ask, how it went."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from deployments.explain.decode import PullRecord
from deployments.explain.queueing import top
from deployments.holds import HoldKeeper
from deployments.routing.choice import ReplicaChooser
from engine.cache.hashing import hash_chain, root_hash
from engine.errors import TransferError
from engine.outputs import Output
from engine.request import Request
from engine.transfer.manifest import Prefilled
from engine.transfer.nixl_intake import ReadIntake
from engine.transfer.transport import KVTransport

if TYPE_CHECKING:
    from engine.build import BuiltEngine


_REPLICAS_FAULT = frozenset({"connect", "link", "offer", "prefill", "stall"})
"""Stages after which a replica rests. A prompt's own fault, say, tells nothing of it."""


class ReplicaSource(Protocol):
    """Where the running set of a deployment comes from."""

    def replicas(self) -> Mapping[str, Mapping[str, Any]]:
        """Metadata by replica id."""
        ...

    async def changed(self, seen: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Wait until the running set is no longer the snapshot `seen`."""
        ...


class PrefillPool:
    """Implements `streams.RemotePrefill` over a KV transport."""

    def __init__(
        self,
        built: BuiltEngine,
        transport: KVTransport,
        source: ReplicaSource,
        *,
        hold: HoldKeeper,
    ) -> None:
        self._built = built
        self._transport = transport
        self._source = source
        self._hold = hold
        self._chooser = ReplicaChooser()
        self._attempts = itertools.count()

    @property
    def num_replicas(self) -> int:
        return len(self._source.replicas())

    def choose(self, num_tokens: int, excluding: str | None) -> str | None:
        """See `RemotePrefill`. Skips replicas that failed a moment ago."""
        replicas = self._source.replicas()
        self._chooser.set_replicas(replicas.keys())
        return self._chooser.choose(time.monotonic(), () if excluding is None else (excluding,))

    async def pull(
        self,
        replica: str,
        request: Request,
        blocks: tuple[int, ...],
        first_token: int,
        record: PullRecord,
    ) -> Prefilled:
        """See `RemotePrefill`."""
        metadata = self._source.replicas().get(replica)
        if metadata is None:
            raise TransferError(f"prefill replica {replica} left the pool", stage="connect")
        pool, engine = self._built.pool, self._built.engine
        intake = ReadIntake(pool, blocks, first_token=first_token, num_tokens=request.num_tokens)
        root = root_hash(engine.layout.fingerprint, request.salt)
        chain = tuple(hash_chain(root, request.token_ids, pool.block_tokens))
        attempt = str(next(self._attempts))
        record.scores = top(self._chooser.tokens().items(), highest=False)
        self._chooser.begin(replica, attempt, request.num_tokens - first_token)
        self._hold.begin(replica)
        try:
            prefilled = await self._transport.pull(
                metadata["link"],
                request,
                intake,
                chain=chain,
                chain_tokens=pool.block_tokens,
                note=record.note,
            )
        except BaseException as error:
            if isinstance(error, TransferError) and error.stage in _REPLICAS_FAULT:
                self._chooser.failed(replica, time.monotonic())
            if intake.lent:
                self._set_aside(request.request_id, intake)
            raise
        else:
            self._chooser.succeeded(replica)
            return prefilled
        finally:
            self._chooser.end(replica, attempt)
            self._hold.end(replica)

    def blocks(self, request_id: str) -> tuple[int, ...]:
        """See `RemotePrefill`."""
        return self._built.engine.import_blocks(request_id)

    def _set_aside(self, request_id: str, intake: ReadIntake) -> None:
        """What the pull began may still write: nobody gets these blocks before it has ended."""
        engine, lease_id = self._built.engine, f"{request_id}:{next(self._attempts)}"
        engine.set_aside(request_id, lease_id)
        intake.on_quiet = lambda: engine.release(lease_id)

    def arrived(self, request: Request, prefilled: Prefilled) -> Output | None:
        """See `RemotePrefill`."""
        return self._built.engine.kv_arrived(request.request_id, prefilled.first)

    def failed(self, request_id: str) -> None:
        """See `RemotePrefill`."""
        self._built.engine.kv_failed(request_id)
