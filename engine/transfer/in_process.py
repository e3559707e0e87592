"""KV between two engines of one process: for colocated pools and for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from engine.cache.hashing import hash_chain, root_hash
from engine.engine import Engine
from engine.errors import EngineError, TransferError
from engine.request import Request
from engine.transfer.export import KVExport, OutgoingChunk
from engine.transfer.intake import KVIntake
from engine.transfer.manifest import Manifest, Prefilled
from engine.transfer.memory import KVMemory
from engine.transfer.transport import TransferNote

_HOLD_S = 30.0


class InProcessTransport:
    """Steps the prefill engine itself and copies each chunk as soon as it is computed.

    `tamper` sees every chunk on its way: fault tests change, drop or repeat it.
    """

    def __init__(
        self,
        engine: Engine,
        pool: KVMemory,
        *,
        window_bytes: int = 1 << 24,
        chunk_bytes: int = 1 << 20,
        tamper: Callable[[OutgoingChunk], list[OutgoingChunk]] = lambda chunk: [chunk],
    ) -> None:
        self._engine = engine
        self._pool = pool
        self._window_bytes = window_bytes
        self._chunk_bytes = chunk_bytes
        self._tamper = tamper
        self._count = 0

    async def pull(
        self,
        address: str,
        request: Request,
        intake: KVIntake,
        *,
        chain: tuple[bytes, ...],
        chain_tokens: int,
        note: TransferNote | None = None,
    ) -> Prefilled:
        """See `KVTransport`. `address` is not used, `note` stays as it is."""
        self._count += 1
        held = replace(request, request_id=f"in-process:{self._count}")
        export = KVExport(
            self._pool,
            first_token=intake.first_token,
            num_tokens=request.num_tokens,
            window_bytes=self._window_bytes,
            chunk_bytes=self._chunk_bytes,
        )
        layout = self._pool.layout
        first, cached = None, None
        try:
            self._engine.submit(held, hold_s=_HOLD_S)
            while first is None:
                step = self._engine.step()
                if step is None:
                    raise TransferError("the prefill engine has nothing to do", stage="prefill")
                for computed in step.computed:
                    if computed.request_id != held.request_id:
                        continue
                    if cached is None:
                        cached = computed.first_token
                        root = root_hash(layout.fingerprint, request.salt)
                        self._offer(request, intake, chain, chain_tokens, root, cached)
                    export.computed(computed.num_tokens, computed.blocks)
                    self._ship(export, intake)
                for output in step.outputs:
                    if output.request_id == held.request_id:
                        first = output.token
                        if first is None:
                            raise TransferError("no token could be drawn", stage="prefill")
                await asyncio.sleep(0)
            if not intake.complete:
                raise TransferError("chunks are missing at the end", stage="final")
            return Prefilled(first, cached or 0, intake.received_bytes, 0.0)
        except TransferError:
            raise
        except EngineError as error:
            raise TransferError(str(error), stage="prefill") from error
        finally:
            intake.close()
            self._engine.cancel(held.request_id)
            self._engine.release(held.request_id)

    def _offer(
        self,
        request: Request,
        intake: KVIntake,
        chain: tuple[bytes, ...],
        chain_tokens: int,
        root: bytes,
        cached: int,
    ) -> None:
        layout = self._pool.layout
        Manifest(
            fingerprint=layout.fingerprint,
            dtype=layout.dtype,
            scale_dtype=layout.scale_dtype,
            num_layers=layout.num_layers,
            num_kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            head_range=(0, layout.num_kv_heads),
            first_token=intake.first_token,
            num_tokens=request.num_tokens,
            chain=tuple(hash_chain(root, request.token_ids, chain_tokens)),
            chain_tokens=chain_tokens,
            num_cached_tokens=cached,
            lease_ms=int(_HOLD_S * 1000),
        ).require(intake.layout, chain, intake.first_token, intake.num_tokens)

    def _ship(self, export: KVExport, intake: KVIntake) -> None:
        while (chunk := export.next()) is not None:
            for sent in self._tamper(chunk):
                memory = intake.memory(sent.head)
                if memory is not None:
                    memory[:] = sent.payload
                    intake.received(sent.head, memory)
            export.acked(chunk.head.num_bytes)
