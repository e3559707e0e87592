"""The receiving half of a transfer: where each payload goes, and whether everything came."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import TransferError
from engine.transfer.checksum import checksum
from engine.transfer.manifest import ChunkHead

if TYPE_CHECKING:
    from engine.models.model import KVLayout
    from engine.transfer.memory import KVMemory


class KVIntake:
    """Collects one prompt's KV into reserved blocks. All of it or nothing counts.

    The owner must call `close` before the blocks are freed: from then on no memory is given out,
    and bytes still on their way are discarded.
    """

    def __init__(
        self, pool: KVMemory, blocks: tuple[int, ...], *, first_token: int, num_tokens: int
    ) -> None:
        self.first_token = first_token
        self.num_tokens = num_tokens
        self.received_bytes = 0
        self._pool = pool
        self._blocks = blocks
        # One bit for each layer's heads of each token still to come.
        everything = (1 << pool.layout.num_layers * pool.layout.num_kv_heads) - 1
        self._missing = dict.fromkeys(range(first_token, num_tokens), everything)
        self._staged: dict[ChunkHead, bytearray] = {}
        self._closed = False

    @property
    def layout(self) -> KVLayout:
        """What an offer must match."""
        return self._pool.layout

    @property
    def complete(self) -> bool:
        return not self._missing and not self._closed

    def close(self) -> None:
        self._closed = True
        self._staged.clear()

    def memory(self, head: ChunkHead) -> memoryview | None:
        """Where the payload of `head` is to be written; None when nobody wants it any more.

        A whole local block of one part of the pool lies in wire order: its bytes go straight there.
        Raises TransferError for a chunk outside what was asked for, seen before or of a wrong size.
        """
        if self._closed:
            return None
        self._require(head)
        page = self._pool.block_tokens
        if head.num_tokens == page and head.first_token % page == 0:
            memory = self._pool.piece(
                self._blocks[head.first_token // page],
                (head.first_layer, head.last_layer),
                (head.first_head, head.last_head),
                write=True,
            )
            if memory is not None:
                return memory
        staged = self._staged[head] = bytearray(head.num_bytes)
        return memoryview(staged)

    def _require(self, head: ChunkHead) -> None:
        """Raise TransferError unless `head` is a part of the transfer that is still to come."""
        layout = self._pool.layout
        last_token = head.first_token + head.num_tokens
        if (
            not self.first_token <= head.first_token < last_token <= self.num_tokens
            or not head.first_layer < head.last_layer <= layout.num_layers
            or not head.first_head < head.last_head <= layout.num_kv_heads
        ):
            raise TransferError(f"chunk {head} lies outside the transfer", stage="chunk")
        layers = head.last_layer - head.first_layer
        cell_bytes = layout.bytes_per_token // (layout.num_layers * layout.num_kv_heads)
        expected = layers * head.num_tokens * (head.last_head - head.first_head) * cell_bytes
        if head.num_bytes != expected:
            raise TransferError(
                f"chunk of {head.num_bytes} bytes, its shape needs {expected}", stage="chunk"
            )
        mask = self._cells(head)
        if any(self._missing.get(t, 0) & mask != mask for t in range(head.first_token, last_token)):
            raise TransferError(f"chunk {head} came twice", stage="chunk")

    def received(self, head: ChunkHead, payload: memoryview) -> None:
        """The payload of `head` is complete in the memory that was given out.

        Raises TransferError on a checksum that differs; the transfer is then worthless.
        """
        if self._closed:
            return
        self._check(head, checksum(payload))
        self._check_scales(head, payload)
        staged = self._staged.pop(head, None)
        if staged is not None:
            self._pool.scatter(
                self._blocks,
                head.first_token,
                head.first_layer,
                head.last_layer,
                staged,
                (head.first_head, head.last_head),
            )
        self._arrived(head)

    @staticmethod
    def _check(head: ChunkHead, found: int) -> None:
        if found != head.checksum:
            raise TransferError(
                f"checksum {found:016x} of tokens {head.first_token}.."
                f"{head.first_token + head.num_tokens}, {head.checksum:016x} was sent",
                stage="checksum",
            )

    def _check_scales(self, head: ChunkHead, payload: memoryview) -> None:
        shape = head.last_layer - head.first_layer, head.last_head - head.first_head
        if self._pool.layout.coded and not self._pool.has_sound_scales(payload, *shape):
            raise TransferError(
                f"tokens {head.first_token}..{head.first_token + head.num_tokens} came with scales "
                "that no codes have: negative or not finite",
                stage="chunk",
            )

    def _arrived(self, head: ChunkHead) -> None:
        mask = self._cells(head)
        for token in range(head.first_token, head.first_token + head.num_tokens):
            left = self._missing[token] & ~mask
            if left:
                self._missing[token] = left
            else:
                del self._missing[token]
        self.received_bytes += head.num_bytes

    def _cells(self, head: ChunkHead) -> int:
        width = self._pool.layout.num_kv_heads
        heads = (1 << head.last_head) - (1 << head.first_head)
        return sum(heads << layer * width for layer in range(head.first_layer, head.last_layer))
