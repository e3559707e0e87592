"""The receiving half of a transfer: where each payload goes, and whether everything came."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import TransferError
from engine.transfer.checksum import checksum
from engine.transfer.manifest import ChunkHead

if TYPE_CHECKING:
    from engine.execution.pool import KVPool


class KVIntake:
    """Collects one prompt's KV into reserved blocks. All of it or nothing counts.

    The owner must call `close` before the blocks are freed: from then on no memory is given out,
    and bytes still on their way are discarded.
    """

    def __init__(
        self, pool: KVPool, blocks: tuple[int, ...], *, first_token: int, num_tokens: int
    ) -> None:
        self.first_token = first_token
        self.num_tokens = num_tokens
        self.received_bytes = 0
        self._pool = pool
        self._blocks = blocks
        # One bit a layer for each token still to come.
        all_layers = (1 << pool.layout.num_layers) - 1
        self._missing = dict.fromkeys(range(first_token, num_tokens), all_layers)
        self._staged: dict[ChunkHead, bytearray] = {}
        self._closed = False

    @property
    def complete(self) -> bool:
        return not self._missing and not self._closed

    def close(self) -> None:
        self._closed = True
        self._staged.clear()

    def memory(self, head: ChunkHead) -> memoryview | None:
        """Where the payload of `head` is to be written; None when nobody wants it any more.

        A whole local block lies in wire order, so its bytes go straight into the pool.
        Raises TransferError for a chunk outside what was asked for, seen before or of a wrong size.
        """
        if self._closed:
            return None
        layout, page = self._pool.layout, self._pool.block_tokens
        last_token = head.first_token + head.num_tokens
        if (
            not self.first_token <= head.first_token < last_token <= self.num_tokens
            or not head.first_layer < head.last_layer <= layout.num_layers
            or (head.first_head, head.last_head) != (0, layout.num_kv_heads)
        ):
            raise TransferError(f"chunk {head} lies outside the transfer", stage="chunk")
        layers = head.last_layer - head.first_layer
        expected = layers * head.num_tokens * layout.bytes_per_token // layout.num_layers
        if head.num_bytes != expected:
            raise TransferError(
                f"chunk of {head.num_bytes} bytes, its shape needs {expected}", stage="chunk"
            )
        mask = self._layers(head)
        if any(self._missing.get(t, 0) & mask != mask for t in range(head.first_token, last_token)):
            raise TransferError(f"chunk {head} came twice", stage="chunk")
        if head.num_tokens == page and head.first_token % page == 0:
            block = self._blocks[head.first_token // page]
            return self._pool.block_bytes(block, head.first_layer, head.last_layer)
        staged = self._staged[head] = bytearray(head.num_bytes)
        return memoryview(staged)

    def received(self, head: ChunkHead, payload: memoryview) -> None:
        """The payload of `head` is complete in the memory that was given out.

        Raises TransferError on a checksum that differs; the transfer is then worthless.
        """
        if self._closed:
            return
        found = checksum(payload)
        if found != head.checksum:
            raise TransferError(
                f"checksum {found:016x} of tokens {head.first_token}.."
                f"{head.first_token + head.num_tokens}, {head.checksum:016x} was sent",
                stage="checksum",
            )
        staged = self._staged.pop(head, None)
        if staged is not None:
            self._pool.scatter(
                self._blocks, head.first_token, head.first_layer, head.last_layer, staged
            )
        mask = self._layers(head)
        for token in range(head.first_token, head.first_token + head.num_tokens):
            left = self._missing[token] & ~mask
            if left:
                self._missing[token] = left
            else:
                del self._missing[token]
        self.received_bytes += head.num_bytes

    @staticmethod
    def _layers(head: ChunkHead) -> int:
        return (1 << head.last_layer) - (1 << head.first_layer)
