"""The sending half of a transfer: which bytes are ready, and how many may be in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.transfer.checksum import checksum
from engine.transfer.manifest import ChunkHead

if TYPE_CHECKING:
    from engine.transfer.memory import KVMemory

DEFAULT_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class OutgoingChunk:
    """One payload ready to send. `payload` may alias the pool: do not write to it."""

    head: ChunkHead
    payload: memoryview


class KVExport:
    """Turns a prompt's blocks into chunks, as its tokens are computed.

    Holds no references itself: the caller's lease keeps the blocks until the receiver is done.
    `first_token` need not lie on a block border; whole blocks are sent from where they lie, ragged
    ends through a copy.
    """

    def __init__(
        self,
        pool: KVMemory,
        *,
        first_token: int,
        num_tokens: int,
        window_bytes: int,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        self.num_tokens = num_tokens
        self.unacked_bytes = 0
        self.sent_bytes = 0
        self._pool = pool
        self._window_bytes = window_bytes
        self._chunk_bytes = chunk_bytes
        self._blocks: tuple[int, ...] = ()
        self._ready = first_token
        self._token = first_token
        self._part = 0
        self._layer = 0

    def computed(self, num_tokens: int, blocks: tuple[int, ...]) -> None:
        """Positions below `num_tokens` are now in `blocks`. Never goes back."""
        if num_tokens > self._ready:
            self._ready = min(num_tokens, self.num_tokens)
            self._blocks = blocks

    def acked(self, num_bytes: int) -> None:
        self.unacked_bytes = max(0, self.unacked_bytes - num_bytes)

    @property
    def all_sent(self) -> bool:
        return self._token >= self.num_tokens

    @property
    def done(self) -> bool:
        return self.all_sent and self.unacked_bytes == 0

    def next(self) -> OutgoingChunk | None:
        """The next chunk, or None until more is computed or acknowledged.

        A chunk never crosses a block border nor leaves a part of the pool, and is a whole block,
        ragged ends excepted. At least one chunk may always be in flight, however small the window.
        """
        if self._token >= self._ready:
            return None
        page = self._pool.block_tokens
        end = min((self._token // page + 1) * page, self.num_tokens)
        if self._ready < end:
            return None
        layout = self._pool.layout
        num_tokens = end - self._token
        parts = self._pool.parts
        part = parts[self._part]
        first_head, last_head = part.heads
        cell_bytes = layout.bytes_per_token // (layout.num_layers * layout.num_kv_heads)
        layer_bytes = num_tokens * (last_head - first_head) * cell_bytes
        layers = max(1, self._chunk_bytes // layer_bytes)
        first = max(self._layer, part.layers[0])
        last = min(first + layers, part.layers[1])
        num_bytes = (last - first) * layer_bytes
        if self.unacked_bytes and self.unacked_bytes + num_bytes > self._window_bytes:
            return None
        block = self._blocks[self._token // page]
        payload = None
        if num_tokens == page:
            payload = self._pool.piece(block, (first, last), part.heads)
        if payload is None:
            payload = self._pool.gather(
                block, self._token % page, num_tokens, first, last, part.heads
            )
        head = ChunkHead(
            first_layer=first,
            last_layer=last,
            first_token=self._token,
            num_tokens=num_tokens,
            first_head=first_head,
            last_head=last_head,
            num_bytes=num_bytes,
            checksum=checksum(payload),
        )
        self.unacked_bytes += num_bytes
        self.sent_bytes += num_bytes
        self._layer = last
        if last == part.layers[1]:
            self._part, self._layer = self._part + 1, 0
        if self._part == len(parts):
            self._token, self._part = end, 0
        return OutgoingChunk(head, payload)
