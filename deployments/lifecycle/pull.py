"""Decode's side of a KV transfer over links: ask, receive into the pool, acknowledge, finish."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deployments.link.client import Dialer
from deployments.link.link import Link, LinkDown
from deployments.link.messages import Kind
from deployments.link.wire import CloseReason
from engine.errors import TransferError
from engine.models.model import KVLayout
from engine.request import Request, SampledToken
from engine.transfer.intake import KVIntake
from engine.transfer.manifest import ChunkHead, Manifest, Prefilled
from engine.transfer.nixl_intake import ReadIntake
from engine.transfer.transport import TransferNote

if TYPE_CHECKING:
    from deployments.lifecycle.reads import BlockReads

RENEW_EVERY_S = 5.0
QUIET_S = 0.1
"""A pull that failed waits this long for what it began to end, before its blocks are set aside.
Enough for READs that fly on: they end in milliseconds. Those that failed are not waited for: they
settle for `SETTLE_S`, and the client would wait with them before its prompt is computed again."""


@dataclass(slots=True)
class _Job:
    intake: KVIntake
    chain: tuple[bytes, ...]
    done: asyncio.Future[Prefilled]
    link: Link
    transfer: int
    note: TransferNote
    manifest: Manifest | None = None
    first: SampledToken | None = None
    first_at: float = 0.0
    signs: int = 0
    """How often the replica let hear of this transfer, other than by bytes."""

    connector: str = "link"
    unsummed: bool = False
    """Blocks were read whose bytes one side could not sum: that they were held until then must be
    asked."""

    asked: bool = False
    held: bool = False


class PullClient:
    """Pulls prompts' KV from prefill replicas, any number at a time over one link a replica.

    Pass `on_message`, `on_payload`, `on_payload_done` and `on_close` to the dialer's handlers.
    """

    def __init__(
        self, layout: KVLayout, *, window_bytes: int, stall_s: float, silence_s: float
    ) -> None:
        """`silence_s`: a transfer whose prompt is not computed yet, and of which nothing is heard
        for this long, has failed. `stall_s`: the same for the bytes of one that is computed."""
        self.dialer: Dialer
        self.bytes_received = 0
        self.checksum_mismatches = 0
        self.reads: BlockReads | None = None
        """Set where whole blocks are read by NIXL."""

        self._layout = layout
        self.window_bytes = window_bytes
        self.stall_s = stall_s
        self.silence_s = silence_s
        self._jobs: dict[tuple[Link, int], _Job] = {}
        self._receiving: dict[Link, tuple[_Job, memoryview]] = {}
        self._ids = itertools.count(1)

    @property
    def num_active(self) -> int:
        return len(self._jobs)

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
        """Bring tokens `[intake.first_token, intake.num_tokens)` of the request into the intake.

        Returns only when every byte is there and checked. Raises TransferError when the replica
        cannot be reached, sends something else, stalls or dies. Whatever the outcome, nothing is
        written into the intake's blocks after this returns or is cancelled, but for what
        `ReadIntake.lent` counts.
        """
        transfer = next(self._ids)
        reads = self.reads
        link: Link | None = None
        try:
            try:
                link = await self.dialer.get(address)
            except LinkDown as error:
                raise TransferError(f"prefill replica: {error}", stage="connect") from error
            done: asyncio.Future[Prefilled] = asyncio.get_running_loop().create_future()
            note = note or TransferNote()
            note.asked_s = time.monotonic()
            self._jobs[link, transfer] = job = _Job(intake, chain, done, link, transfer, note)
            asked = link.send(
                [
                    Kind.PREFILL,
                    transfer,
                    request.to_wire(),
                    intake.first_token,
                    self.window_bytes,
                    chain_tokens,
                    None if reads is None else reads.wish(link),
                ]
            )
            if not asked:
                raise TransferError("prefill replica lost before it was asked", stage="link")
            return await self._wait(job, link, transfer)
        except TransferError:
            if reads is not None:
                intake.close()
                reads.cancel(intake)
                await _quiet(intake)
            raise
        finally:
            intake.close()
            if reads is not None:
                reads.cancel(intake)
            if link is not None:
                self._detach(link, self._jobs.pop((link, transfer), None))
                link.send([Kind.DONE, transfer])

    async def _wait(self, job: _Job, link: Link, transfer: int) -> Prefilled:
        looked = renewed = time.monotonic()
        seen, quiet_s = (0, 0), 0.0
        while True:
            # A prompt may wait its turn or be computed for as long as the replica says that it is.
            limit_s = self.silence_s if job.first is None else self.stall_s
            pause_s = min(RENEW_EVERY_S, limit_s / 4)
            finished, _ = await asyncio.wait([job.done], timeout=pause_s)
            if finished:
                return job.done.result()
            now = time.monotonic()
            heard = (job.intake.received_bytes, job.signs)
            if heard != seen:
                seen, quiet_s = heard, 0.0
            else:
                # While this process itself stood still it could not have heard anything.
                quiet_s += min(now - looked, 2 * pause_s)
            looked = now
            if quiet_s >= limit_s:
                what = "no sign of life" if job.first is None else "no byte"
                raise TransferError(
                    f"{what} for {limit_s:g} s with {seen[0]} received", stage="stall"
                )
            if now - renewed >= RENEW_EVERY_S:
                renewed = now
                link.send([Kind.RENEW, transfer])

    def on_message(self, link: Link, message: list[Any]) -> None:
        """MANIFEST, READY, FINAL, FAIL, HELD and ALIVE of running pulls; others are late and
        ignored. And AGENT, which is about none of them."""
        if message[0] == Kind.AGENT:
            if self.reads is not None:
                self.reads.on_agent(link, message[2])
            return
        if message[0] == Kind.ALIVE:
            for transfer in message[1]:
                job = self._jobs.get((link, transfer))
                if job is not None:
                    job.signs += 1
            return
        job = self._jobs.get((link, message[1]))
        if job is None:
            return
        job.signs += 1
        try:
            match message[0]:
                case Kind.MANIFEST:
                    manifest = Manifest.from_wire(message[2])
                    intake = job.intake
                    manifest.require(self._layout, job.chain, intake.first_token, intake.num_tokens)
                    job.manifest = manifest
                case Kind.FINAL:
                    job.first = SampledToken.from_wire(message[2])
                    job.first_at = job.note.final_s = time.monotonic()
                    job.note.bytes_at_final = job.intake.received_bytes
                    job.note.told = message[3] if len(message) > 3 else None
                    self._maybe_finish(job)
                case Kind.READY:
                    self._ready(job, message)
                case Kind.HELD:
                    job.held = True
                    self._maybe_finish(job)
                case Kind.FAIL:
                    raise TransferError(message[3], stage=message[2])
                case _:
                    pass
        except TransferError as error:
            self._fail(job, error)

    def _ready(self, job: _Job, message: list[Any]) -> None:
        """Blocks are ready to be read."""
        if job.manifest is None:
            raise TransferError("blocks were offered before their manifest", stage="chunk")
        intake = job.intake
        if self.reads is None or not isinstance(intake, ReadIntake):
            raise TransferError("blocks were offered that nobody can read here", stage="chunk")
        if job.done.done():
            return
        _, _, epoch, entries = message

        def landed(num_bytes: int, summed: bool) -> None:
            self.bytes_received += num_bytes
            job.unsummed |= not summed
            self._maybe_finish(job)

        def failed(error: TransferError) -> None:
            self.checksum_mismatches += error.stage == "checksum"
            self._fail(job, error)

        job.connector = "nixl"
        job.note.first_byte_s = job.note.first_byte_s or time.monotonic()
        self.reads.ready(job.link, epoch, entries, intake, landed=landed, failed=failed)

    def on_payload(self, link: Link, head: list[Any]) -> memoryview | None:
        """Memory for the payload that follows `head`, or None to discard it."""
        job = self._jobs.get((link, head[1]))
        if job is None or job.done.done():
            return None
        try:
            if job.manifest is None:
                raise TransferError("a chunk came before its manifest", stage="chunk")
            memory = job.intake.memory(ChunkHead.from_wire(head[2]))
        except TransferError as error:
            self._fail(job, error)
            return None
        if memory is not None:
            self._receiving[link] = (job, memory)
            if not job.note.first_byte_s:
                job.note.first_byte_s = time.monotonic()
        return memory

    def on_payload_done(self, link: Link, head: list[Any]) -> None:
        """A payload is complete: check and acknowledge it."""
        link.send([Kind.ACK, head[1], head[2][6]])
        job, payload = self._receiving.pop(link, (None, None))
        if job is None or payload is None or job.done.done():
            return
        try:
            job.intake.received(ChunkHead.from_wire(head[2]), payload)
        except TransferError as error:
            self.checksum_mismatches += error.stage == "checksum"
            self._fail(job, error)
            return
        self.bytes_received += len(payload)
        self._maybe_finish(job)

    def on_close(self, link: Link, reason: CloseReason) -> None:
        self._receiving.pop(link, None)
        if self.reads is not None:
            self.reads.on_close(link)
        for (owner, _), job in list(self._jobs.items()):
            if owner is link:
                self._fail(job, TransferError(f"prefill replica lost: {reason}", stage="link"))

    def _detach(self, link: Link, job: _Job | None) -> None:
        # The link may be in the middle of a payload: its rest must not reach blocks that are
        # about to belong to another request.
        receiving, _ = self._receiving.get(link, (None, None))
        if receiving is not None and receiving is job:
            del self._receiving[link]
            link.discard_payload()

    def _maybe_finish(self, job: _Job) -> None:
        if job.first is None or job.manifest is None or not job.intake.complete:
            return
        if job.unsummed and not job.held:
            # Bytes read after the lease had ended would be another request's.
            if not job.asked:
                job.asked = True
                job.link.send([Kind.HELD, job.transfer])
            return
        if not job.done.done():
            job.done.set_result(
                Prefilled(
                    job.first,
                    job.manifest.num_cached_tokens,
                    job.intake.received_bytes,
                    time.monotonic() - job.first_at,
                    job.connector,
                )
            )

    @staticmethod
    def _fail(job: _Job, error: TransferError) -> None:
        job.intake.close()
        if not job.done.done():
            job.done.set_exception(error)
            job.done.exception()  # the waiter may have been cancelled: then nobody else reads it


async def _quiet(intake: KVIntake) -> None:
    """Give READs that nobody wants any more a moment to end."""
    if isinstance(intake, ReadIntake) and intake.lent:
        quiet: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        intake.on_quiet = lambda: None if quiet.done() else quiet.set_result(None)
        await asyncio.wait([quiet], timeout=QUIET_S)
        intake.on_quiet = None
