"""The receiving half of a transfer that reads: which blocks READs may still write into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.errors import TransferError
from engine.transfer.intake import KVIntake
from engine.transfer.manifest import ChunkHead

if TYPE_CHECKING:
    from engine.transfer.memory import KVMemory


class ReadIntake(KVIntake):
    """A `KVIntake` whose whole blocks a one-sided READ may fill."""

    def __init__(
        self, pool: KVMemory, blocks: tuple[int, ...], *, first_token: int, num_tokens: int
    ) -> None:
        super().__init__(pool, blocks, first_token=first_token, num_tokens=num_tokens)
        self.lent = 0
        """Blocks that a READ may still write into, also after `close`: they must not be used for
        anything else until `on_quiet`."""

        self.on_quiet: Callable[[], None] | None = None
        """Called when `lent` is 0 again after `close`."""

        self._lent: set[int] = set()
        """First tokens of every block that was ever lent."""

        self._sent: set[int] = set()
        """First tokens of every block of which a part ever came over the link."""

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def complete(self) -> bool:
        """See `KVIntake`. Never while a READ may still write."""
        return not self.lent and super().complete

    def memory(self, head: ChunkHead) -> memoryview | None:
        """See `KVIntake.memory`. Raises TransferError for a chunk over a block that was lent: two
        writers, of which the checksum of neither says what stays."""
        memory = super().memory(head)
        if memory is not None:
            self._sent.update(self._firsts(head))
        return memory

    def lend(self, head: ChunkHead) -> int:
        """The block that a READ of `head`, a whole block, is to fill. Say `landed` when its bytes
        are there and `give_back` when nothing writes into it any more.

        Raises TransferError as `memory` does, for anything but a whole block of this pool, and for
        one that was lent before.
        """
        pool = self._pool
        layout, page, first_token = pool.layout, pool.block_tokens, head.first_token
        layers, heads = (head.first_layer, head.last_layer), (head.first_head, head.last_head)
        if (layers, heads) != ((0, layout.num_layers), (0, layout.num_kv_heads)) or (
            head.num_tokens,
            first_token % page,
        ) != (page, 0):
            raise TransferError(f"{head} is no whole block here: it can't be read", stage="chunk")
        if first_token in self._lent:
            raise TransferError(f"block {head} was offered twice", stage="chunk")
        if first_token in self._sent:
            raise TransferError(f"block {head} was offered and sent", stage="chunk")
        assert not self._closed, "lend after close"
        self._require(head)
        self._lent.add(first_token)
        self.lent += 1
        return self._blocks[first_token // page]

    def landed(self, head: ChunkHead, found: int | None) -> None:
        """The block lent for `head` is filled. Raises TransferError as `received` does.

        found: checksum of its bytes. None: they lie where no side can compute one, on a device.
        Whether its scales are sound is for who read it to say (`ReadResult.sound`).
        """
        if self._closed:
            return
        if found is not None:
            self._check(head, found)
        self._arrived(head)

    def give_back(self, num_blocks: int) -> None:
        """Nothing writes into this many lent blocks any more."""
        self.lent -= num_blocks
        if not self.lent and self._closed and self.on_quiet is not None:
            self.on_quiet()

    def _require(self, head: ChunkHead) -> None:
        super()._require(head)
        if not self._lent.isdisjoint(self._firsts(head)):
            raise TransferError(f"chunk {head} lies over a block that is read", stage="chunk")

    def _firsts(self, head: ChunkHead) -> range:
        """First tokens of the blocks that `head` touches."""
        page = self._pool.block_tokens
        return range(head.first_token // page * page, head.first_token + head.num_tokens, page)
