"""The sending half of a transfer whose receiver reads: which blocks it may read, what it can't.

```
first_token ──► piece ┊ whole blocks, read where they lie ┊ piece ◄── num_tokens
                sent                  offered               sent
```
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.transfer.export import DEFAULT_CHUNK_BYTES, KVExport, OutgoingChunk

if TYPE_CHECKING:
    from engine.transfer.memory import KVMemory


@dataclass(frozen=True, slots=True)
class Offer:
    """One whole block, ready to be read."""

    first_token: int
    block: int
    """Id in the pool of the sender."""


class OfferingExport:
    """Stands where a `KVExport` stands. Ragged ends of a prompt are sent as chunks; whole blocks
    are offered (`offers`) as soon as they are computed, and the caller's lease keeps them."""

    def __init__(
        self,
        pool: KVMemory,
        *,
        first_token: int,
        num_tokens: int,
        window_bytes: int,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
    ) -> None:
        page = pool.block_tokens
        self.num_tokens = num_tokens
        self.block_bytes = page * pool.layout.bytes_per_token
        self._page = page
        self._next = min(-(-first_token // page) * page, num_tokens)
        self._end = max(self._next, num_tokens // page * page)
        self._pieces = [
            KVExport(
                pool,
                first_token=first,
                num_tokens=end,
                window_bytes=window_bytes,
                chunk_bytes=chunk_bytes,
            )
            for first, end in ((first_token, self._next), (self._end, num_tokens))
            if first < end
        ]

    def computed(self, num_tokens: int, blocks: tuple[int, ...]) -> list[Offer]:
        """Positions below `num_tokens` are now in `blocks`. Returns the blocks that became ready to
        be read. Never goes back."""
        for piece in self._pieces:
            piece.computed(num_tokens, blocks)
        ready: list[Offer] = []
        while self._next + self._page <= min(num_tokens, self._end):
            ready.append(Offer(self._next, blocks[self._next // self._page]))
            self._next += self._page
        return ready

    def acked(self, num_bytes: int) -> None:
        for piece in self._pieces:
            taken = min(num_bytes, piece.unacked_bytes)
            piece.acked(taken)
            num_bytes -= taken

    @property
    def unacked_bytes(self) -> int:
        """Of what was sent. What is offered weighs on nobody's buffers."""
        return sum(piece.unacked_bytes for piece in self._pieces)

    def next(self) -> OutgoingChunk | None:
        """The next chunk to send, or None until more is computed or acknowledged."""
        for piece in self._pieces:
            chunk = piece.next()
            if chunk is not None:
                return chunk
        return None
