"""The KV of all ranks as one pool, for transfers and digests: the coordinator computes nothing.

```
        heads 0-5      heads 6-8            each rank's part is a pool of its own, in memory that
layers  ┌──────────┬──────────┐             rank and coordinator share (CPU ranks of this machine)
0-14    │  rank 0  │  rank 1  │             or behind the rank's memory channel (devices, other
        ├──────────┼──────────┤             machines)
15-29   │  rank 2  │  rank 3  │
        └──────────┴──────────┘
```

A block's number is the same in every part. Transfers move whole parts where both sides cut alike,
and pieces of them where they do not.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.errors import ConfigError
from engine.execution.pool import KVPool
from engine.execution.ranks.executor import shared_file
from engine.execution.wire_order import sound_scales, wire_views
from engine.models.model import KVLayout, KVPart

if TYPE_CHECKING:
    from collections.abc import Callable

    from engine.execution.ranks.channel import Channel
    from engine.execution.ranks.memory import RemoteMemory
    from engine.execution.ranks.wire import RankReady
    from engine.models.shard import Span


def whole_layout(ready: Sequence[RankReady]) -> KVLayout:
    """The layout of the model that these ranks hold together."""
    return replace(
        ready[0].layout,
        num_layers=max(rank.layers[1] for rank in ready),
        num_kv_heads=max(rank.kv_heads[1] for rank in ready),
    )


@dataclass(slots=True)
class _Held:
    """One rank's pool."""

    part: KVPart
    """All it holds, copies of other ranks' heads included."""

    owned: Span
    pool: KVPool | None
    remote: RemoteMemory | None = None

    def read(
        self, block: int, offset: int, num_tokens: int, layers: Span, heads: Span
    ) -> memoryview | bytes:
        """Wire order."""
        where = (*self._own(layers), self._own_heads(heads))
        if self.pool is not None:
            return self.pool.gather(block, offset, num_tokens, *where)
        assert self.remote is not None
        return self.remote.read(block, offset, num_tokens, *where)

    def write(self, block: int, offset: int, layers: Span, heads: Span, payload: bytearray) -> None:
        first, last = self._own(layers)
        heads = self._own_heads(heads)
        if self.pool is not None:
            self.pool.scatter((block,), offset, first, last, payload, heads)
            return
        assert self.remote is not None
        self.remote.write(block, offset, first, last, heads, bytes(payload))

    def bytes_of(self, block: int, layers: Span) -> memoryview | None:
        if self.pool is None:
            return None
        return self.pool.block_bytes(block, *self._own(layers))

    def _own(self, layers: Span) -> Span:
        first = self.part.layers[0]
        return layers[0] - first, layers[1] - first

    def _own_heads(self, heads: Span) -> Span:
        first = self.part.heads[0]
        return heads[0] - first, heads[1] - first


class ShardedPool:
    """What the engine and transfers need of a KV pool, over the pools of ranks."""

    def __init__(
        self, ready: Sequence[RankReady], num_blocks: int, block_tokens: int, *, host: str
    ) -> None:
        """Makes shared memory for each rank that runs on `host`. Pass `files` to the ranks, then
        what they answer to `connect`, which ends this process's hold on the files."""
        self.layout = whole_layout(ready)
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self._descriptors: list[int] = []
        self.files: list[str | None] = []
        """Of each rank: the memory it is to keep its KV in, None for its own."""

        self._held: list[_Held] = []
        try:
            for rank in ready:
                pool = None
                if rank.host == host and rank.on_host:
                    pool = self._share(rank.layout)
                else:
                    self.files.append(None)
                part = KVPart(rank.layers, rank.kv_heads)
                self._held.append(_Held(part, rank.owned_kv_heads, pool))
        except BaseException:
            self._close_files()
            raise
        self.parts = tuple(
            KVPart(held.part.layers, held.owned)
            for held in self._held
            if held.owned[0] < held.owned[1]
        )
        """What is stored apart, each layer and head once."""

        self.read_channels: tuple[Channel, ...] = ()
        """To the ranks' agents, where KV is read of their pools and into them."""

        self.on_lost: Callable[[str], None] | None = None
        """Told why, when what reads into a rank's pool is lost; on any thread."""

    def connect(
        self, remote: Sequence[RemoteMemory | None], read_channels: Sequence[Channel] = ()
    ) -> None:
        """Every rank has its pool; `remote` is how to reach those that are not shared."""
        self.read_channels = tuple(read_channels)
        for held, memory in zip(self._held, remote, strict=True):
            held.remote = memory
            if held.pool is None and memory is None:
                raise ConfigError("a rank keeps its KV where it cannot be reached")
        self._close_files()

    def close(self) -> None:
        """Give up the memory channels. The memory itself goes with the last who maps it."""
        self._close_files()
        for held in self._held:
            if held.remote is not None:
                held.remote.close()
        for channel in self.read_channels:
            channel.close()

    def block_bytes(self, block: int, first_layer: int, last_layer: int) -> memoryview:
        """A copy of one block in wire order, all heads (see `KVPool.block_bytes`)."""
        return self.gather(block, 0, self.block_tokens, first_layer, last_layer)

    def piece(
        self, block: int, layers: Span, heads: Span, *, write: bool = False
    ) -> memoryview | None:
        """The bytes of one whole block where they lie, in wire order. None where they do not lie in
        one piece, and for writing also where another rank holds a copy of these heads."""
        holders = [held for held in self._held if _meet(held.part, layers, heads)]
        if not holders or holders[0].part.heads != heads or (write and len(holders) > 1):
            return None
        first, last = holders[0].part.layers
        if not first <= layers[0] < layers[1] <= last:
            return None
        return holders[0].bytes_of(block, layers)

    def gather(
        self,
        block: int,
        offset: int,
        num_tokens: int,
        first_layer: int,
        last_layer: int,
        heads: Span | None = None,
    ) -> memoryview:
        """A copy in wire order; see `KVPool.gather`. Copies of a head are read from its owner."""
        h0, h1 = heads or (0, self.layout.num_kv_heads)
        layers = last_layer - first_layer
        out = bytearray(2 * layers * num_tokens * (h1 - h0) * self.layout.row_bytes)
        targets = wire_views(out, self.layout, layers, h1 - h0)
        for held in self._held:
            l0, l1 = _overlap(held.part.layers, (first_layer, last_layer))
            o0, o1 = _overlap(held.owned, (h0, h1))
            if l0 >= l1 or o0 >= o1:
                continue
            found = held.read(block, offset, num_tokens, (l0, l1), (o0, o1))
            views = wire_views(found, self.layout, l1 - l0, o1 - o0)
            for target, view in zip(targets, views, strict=True):
                target[l0 - first_layer : l1 - first_layer, :, :, o0 - h0 : o1 - h0] = view
        return memoryview(out)

    def scatter(
        self,
        blocks: tuple[int, ...],
        first_token: int,
        first_layer: int,
        last_layer: int,
        payload: bytearray,
        heads: Span | None = None,
    ) -> None:
        """Write a payload in wire order, to every rank that holds a copy; see `KVPool.scatter`."""
        h0, h1 = heads or (0, self.layout.num_kv_heads)
        sources = wire_views(payload, self.layout, last_layer - first_layer, h1 - h0)
        num_tokens, done = sources[0].shape[2], 0
        while done < num_tokens:
            offset = (first_token + done) % self.block_tokens
            run = min(self.block_tokens - offset, num_tokens - done)
            block = blocks[(first_token + done) // self.block_tokens]
            for held in self._held:
                l0, l1 = _overlap(held.part.layers, (first_layer, last_layer))
                o0, o1 = _overlap(held.part.heads, (h0, h1))
                if l0 >= l1 or o0 >= o1:
                    continue
                part = bytearray(2 * (l1 - l0) * run * (o1 - o0) * self.layout.row_bytes)
                targets = wire_views(part, self.layout, l1 - l0, o1 - o0)
                for target, source in zip(targets, sources, strict=True):
                    target[:] = source[
                        l0 - first_layer : l1 - first_layer,
                        :,
                        done : done + run,
                        o0 - h0 : o1 - h0,
                    ]
                held.write(block, offset, (l0, l1), (o0, o1), part)
            done += run

    def has_sound_scales(self, payload: memoryview, num_layers: int, num_heads: int) -> bool:
        """See `KVPool.has_sound_scales`."""
        return sound_scales(payload, self.layout, num_layers, num_heads)

    def _share(self, layout: KVLayout) -> KVPool:
        size = self.num_blocks * self.block_tokens * layout.bytes_per_token
        descriptor = os.memfd_create("tailrace-kv", os.MFD_CLOEXEC)
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, size)
        self.files.append(shared_file(descriptor))
        memory = mmap.mmap(descriptor, size)
        return KVPool(layout, self.num_blocks, self.block_tokens, memory=memory)

    def _close_files(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def _overlap(one: Span, other: Span) -> Span:
    return max(one[0], other[0]), min(one[1], other[1])


def _meet(part: KVPart, layers: Span, heads: Span) -> bool:
    """Whether a part holds any of these."""
    l0, l1 = _overlap(part.layers, layers)
    h0, h1 = _overlap(part.heads, heads)
    return l0 < l1 and h0 < h1
