"""Prefill's side of a KV transfer over links: compute, stream what is computed, hold, let go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deployments.explain.clocks import clock_name
from deployments.explain.costs import StepCosts
from deployments.explain.prefill import ChunkLog
from deployments.link.link import Link
from deployments.link.messages import Kind
from deployments.link.wire import CloseReason
from engine.errors import EngineError, Overloaded, RequestError
from engine.outputs import Computed, Output, StepOutput
from engine.request import Request
from engine.transfer.export import KVExport
from engine.transfer.manifest import Manifest
from engine.transfer.nixl_offers import OfferingExport

if TYPE_CHECKING:
    from deployments.lifecycle.reads import BlockOffers
    from engine.engine import Engine
    from engine.models.model import KVPart
    from engine.transfer.memory import KVMemory

LEASE_S = 30.0
"""Renewed by the decode replica every 5 s; what is not renewed is freed."""

ALIVE_EVERY_S = 1.0
"""Receivers hear this often of transfers that have nothing to send yet."""


@dataclass(slots=True)
class _Session:
    link: Link
    transfer: int
    request_id: str
    export: KVExport | OfferingExport
    chain: tuple[bytes, ...]
    chain_tokens: int
    first_token: int
    log: ChunkLog
    readers: tuple[KVPart, ...] | None
    """What each rank of the receiver reads of a block; None where blocks are sent."""

    announced: bool = False


class ExportServer:
    """Answers PREFILL messages of decode replicas. Lives on the event loop; the engine is shared.

    A session ends with DONE (commit, or nobody wants it any more), with the link, or with its
    lease. Every way out cancels the computation and frees the lease.
    """

    def __init__(
        self,
        engine: Engine,
        pool: KVMemory,
        *,
        chain: Callable[[Request, int], tuple[bytes, ...]],
        max_unacked_bytes: int,
    ) -> None:
        self.bytes_sent = 0
        self._engine = engine
        self._pool = pool
        self._chain = chain
        self.max_unacked_bytes = max_unacked_bytes
        self.offers: BlockOffers | None = None
        """Set where receivers may read whole blocks themselves."""

        self.costs = StepCosts()
        self._sessions: dict[str, _Session] = {}
        self._broken: str | None = None

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def sessions_of(self, peer_id: str) -> int:
        return sum(1 for session in self._sessions.values() if session.link.peer_id == peer_id)

    @property
    def unacked_bytes(self) -> int:
        return sum(session.export.unacked_bytes for session in self._sessions.values())

    def on_message(self, link: Link, message: list[Any]) -> None:
        request_id = f"{link.peer_id}:{message[1]}"
        match message[0]:
            case Kind.PREFILL:
                self._begin(link, request_id, message)
            case Kind.ACK:
                session = self._sessions.get(request_id)
                if session is not None:
                    session.export.acked(message[2])
                    self._pump_all(session)
            case Kind.RENEW:
                if request_id in self._sessions:
                    self._engine.renew(request_id, LEASE_S)
            case Kind.DONE:
                self._end(request_id)
            case Kind.HELD:
                if request_id in self._sessions:
                    link.send([Kind.HELD, message[1]])
            case _:
                pass

    def on_close(self, link: Link, reason: CloseReason) -> None:
        for request_id, session in list(self._sessions.items()):
            if session.link is link:
                self._end(request_id)

    def on_step(self, step: StepOutput) -> None:
        """Ship what the step computed."""
        now = time.monotonic()
        self._note(step, now)
        finals: list[Output] = [out for out in step.outputs if out.finish is not None]
        for out in finals:
            session = self._sessions.get(out.request_id)
            if session is None:
                continue
            if out.token is None:
                session.link.send(
                    [Kind.FAIL, session.transfer, "prefill", "the logits hold no token"]
                )
                self._end(out.request_id)
            else:
                # Before the last chunks: the receiver measures from here how long they took.
                session.link.send(
                    [
                        Kind.FINAL,
                        session.transfer,
                        out.token.to_wire(),
                        session.log.facts(clock_name(), time.monotonic(), self.costs).to_wire(),
                    ]
                )
        for computed in step.computed:
            self._computed(computed)

    async def run_signs(self) -> None:
        """For ever: `tell_alive`, every `ALIVE_EVERY_S`."""
        while True:
            await asyncio.sleep(ALIVE_EVERY_S)
            self.tell_alive()

    def tell_alive(self) -> None:
        """Tell receivers which of their transfers the engine has: they wait or are computed. Of the
        others the bytes speak, or nothing does."""
        if not self._sessions:
            return
        unfinished = self._engine.unfinished(self._sessions)
        alive: dict[Link, list[int]] = {}
        for request_id, session in self._sessions.items():
            if request_id in unfinished:
                alive.setdefault(session.link, []).append(session.transfer)
        for link, transfers in alive.items():
            link.send([Kind.ALIVE, transfers])

    def expired(self, request_ids: Iterable[str]) -> None:
        """The engine freed these leases: their receivers went silent."""
        for request_id in request_ids:
            session = self._sessions.get(request_id)
            if session is not None:
                session.link.send(
                    [Kind.FAIL, session.transfer, "lease", f"no renewal for {LEASE_S:g} s"]
                )
                self._end(request_id)

    def fail_all(self, message: str) -> None:
        """The engine is broken: tell every receiver at once."""
        self._broken = message
        for request_id, session in list(self._sessions.items()):
            session.link.send([Kind.FAIL, session.transfer, "prefill", message])
            self._end(request_id)

    def _begin(self, link: Link, request_id: str, message: list[Any]) -> None:
        _, transfer, wire, first_token, window_bytes, chain_tokens, *agent = message
        if self._broken is not None:
            link.send([Kind.FAIL, transfer, "prefill", self._broken])
            return
        try:
            given = Request.from_wire(wire)
            request = Request(
                request_id=request_id,
                prompt_ids=given.prompt_ids,
                params=given.params,
                output_ids=given.output_ids,
                priority=given.priority,
                salt=given.salt,
                itl_target_ms=given.itl_target_ms,
                first_token_ms=given.first_token_ms,
                preemptible=given.preemptible,
            )
            readers = None
            if self.offers is not None:
                readers = self.offers.readers(agent[0] if agent else None)
            self._sessions[request_id] = _Session(
                link,
                transfer,
                request_id,
                (KVExport if readers is None else OfferingExport)(
                    self._pool,
                    first_token=first_token,
                    num_tokens=request.num_tokens,
                    window_bytes=window_bytes,
                ),
                self._chain(request, chain_tokens),
                chain_tokens,
                first_token,
                ChunkLog(time.monotonic()),
                readers,
            )
            self._engine.submit(request, hold_s=LEASE_S)
        except (RequestError, Overloaded) as error:
            self._sessions.pop(request_id, None)
            stage = "full" if isinstance(error, Overloaded) else "request"
            link.send([Kind.FAIL, transfer, stage, str(error)])
        except EngineError as error:
            self._sessions.pop(request_id, None)
            link.send([Kind.FAIL, transfer, "prefill", str(error)])

    def _note(self, step: StepOutput, now: float) -> None:
        """What this step was, for whoever explains the requests in it."""
        for computed in step.computed:
            session = self._sessions.get(computed.request_id)
            if session is not None:
                log, tokens = session.log, computed.num_tokens - computed.first_token
                if not log.num_chunks:
                    log.cached_tokens = computed.first_token
                log.add(now, step.duration_s, tokens, step.num_tokens - tokens)
        if step.num_tokens:
            prompts = step.prompts
            tokens = sum(count for _, count in prompts)
            self.costs.observe(
                step.duration_s, step.num_tokens, len(step.outputs), len(prompts), tokens
            )

    def _computed(self, computed: Computed) -> None:
        session = self._sessions.get(computed.request_id)
        if session is None:
            return
        if not session.announced:
            session.announced = True
            self._announce(session, computed.first_token)
        export = session.export
        ready = export.computed(computed.num_tokens, computed.blocks)
        if ready and self.offers is not None and isinstance(export, OfferingExport):
            assert session.readers is not None
            self.bytes_sent += len(ready) * export.block_bytes
            self.offers.offer(session.link, session.transfer, ready, session.readers)
        self._pump(session)

    def _announce(self, session: _Session, num_cached_tokens: int) -> None:
        layout = self._pool.layout
        manifest = Manifest(
            fingerprint=layout.fingerprint,
            dtype=layout.dtype,
            scale_dtype=layout.scale_dtype,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            head_range=(0, layout.num_kv_heads),
            first_token=session.first_token,
            num_tokens=session.export.num_tokens,
            chain=session.chain,
            chain_tokens=session.chain_tokens,
            num_cached_tokens=num_cached_tokens,
            lease_ms=int(LEASE_S * 1000),
        )
        session.link.send([Kind.MANIFEST, session.transfer, manifest.to_wire()])

    def _pump(self, session: _Session) -> None:
        while self.unacked_bytes < self.max_unacked_bytes or not session.export.unacked_bytes:
            chunk = session.export.next()
            if chunk is None:
                return
            self.bytes_sent += len(chunk.payload)
            head = [Kind.CHUNK, session.transfer, chunk.head.to_wire()]
            session.link.send_payload(head, chunk.payload)

    def _pump_all(self, first: _Session) -> None:
        self._pump(first)
        for session in self._sessions.values():
            if session is not first and session.announced:
                self._pump(session)

    def _end(self, request_id: str) -> None:
        if self._sessions.pop(request_id, None) is not None:
            self._engine.cancel(request_id)
            self._engine.release(request_id)
