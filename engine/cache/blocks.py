"""Who holds which KV block: tables, prefix cache, eviction, leases. Bookkeeping only, no memory.

A block is in exactly one of three places:

    held        in one or more tables or leases; `refs` counts them
    evictable   nobody holds it, but its content is known by hash: a later prompt may share it
    blank       nobody holds it and its content is worth nothing

Blank blocks are handed out first, then evictable ones, least recently used first. Tables only grow
at the end: a step in flight may hold them, so two blocks of equal content are left as they are.

With `reuse_tokens` the leading parts of a block are known by hash as well. A prompt that shares
part of a block gets a block of its own and a copy of that part (`BlockCopy`), made by whoever
computes the next step; both blocks are held until it is made.

    |<- shared whole ->|<- copied ->|<- computed ->|
    0        block_tokens      + reuse_tokens      len(token_ids)
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.cache.hashing import block_hash, root_hash
from engine.config import CacheConfig
from engine.request import RequestId

LeaseId = str

MAX_EVENTS = 8192
"""Undrained events kept. Beyond that the listener is told to forget everything (`Cleared`)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A block's content became shareable."""

    block_hash: bytes
    parent_hash: bytes
    """Hash of the block before it, or the root of its isolation domain."""


@dataclass(frozen=True, slots=True)
class Removed:
    """The last block with this content was evicted."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """Forget every hash reported so far. Later `Removed` may name hashes forgotten here."""


CacheEvent = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first `num_tokens` tokens of `source` are also those of `target`, which is new."""

    source: int
    target: int
    num_tokens: int


@dataclass(slots=True)
class _Table:
    blocks: list[int]
    parent: bytes | None
    """Hash of the last hashed block; None once its content no longer belongs to the cache."""

    num_hashed: int
    num_parts: int = 0
    """Known leading parts of the block behind the hashed ones."""

    frozen: tuple[int, ...] | None = None
    """`tuple(blocks)` while it is current: plans are made far more often than tables grow."""


@dataclass(slots=True)
class _Lease:
    blocks: tuple[int, ...]
    deadline: float


@dataclass(slots=True)
class _Copying:
    request_id: RequestId | None
    """Whose block is the target; None once it was given up."""

    copy: BlockCopy
    in_flight: bool = False


@dataclass(slots=True)
class _Lookup:
    """Hashes of the prompt looked up last: one that waits for room is looked up every step."""

    token_ids: tuple[int, ...] = ()
    salt: str = ""
    hashes: list[bytes] = field(default_factory=lambda: list[bytes]())


class BlockManager:
    """KV block accounting for one engine. Block 0 is never handed out.

    `fingerprint` names weights and arithmetic: it roots the hashes, so that they mean the same on
    every node that serves the model, and nothing on any other.
    """

    def __init__(self, config: CacheConfig, fingerprint: str) -> None:
        self.config = config
        self.num_query_tokens = 0
        """Tokens of all prompts that got blocks."""

        self.num_hit_tokens = 0
        """Of those, the ones found in the cache."""

        self._fingerprint = fingerprint
        self._block_tokens = config.block_tokens
        self._refs = [0] * config.num_blocks
        self._hashes: list[bytes | None] = [None] * config.num_blocks
        self._cached: dict[bytes, list[int]] = {}  # more than one block where content is duplicated
        self._blank: deque[int] = deque(range(1, config.num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._tables: dict[RequestId, _Table] = {}
        self._leases: dict[LeaseId, _Lease] = {}
        self._reuse_tokens = config.reuse_tokens or config.block_tokens
        self._shares_parts = self._reuse_tokens < config.block_tokens
        self._parts: list[list[bytes]] = [[] for _ in range(config.num_blocks)]
        self._by_part: dict[bytes, list[int]] = {}
        self._copying: list[_Copying] = []
        self._events: deque[CacheEvent] = deque()
        self._lookup = _Lookup()

    # What there is

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now, evictable ones included."""
        return len(self._blank) + len(self._evictable)

    @property
    def num_held_blocks(self) -> int:
        return self.config.num_blocks - 1 - self.num_free_blocks

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def request_ids(self) -> frozenset[RequestId]:
        """Requests that have a table."""
        return frozenset(self._tables)

    def holds(self, request_id: RequestId) -> bool:
        """Does the request have a table?"""
        return request_id in self._tables

    def table(self, request_id: RequestId) -> tuple[int, ...]:
        """Block ids of a request, position 0 first. The same object until the table grows."""
        table = self._tables[request_id]
        if table.frozen is None:
            table.frozen = tuple(table.blocks)
        return table.frozen

    def leased_table(self, lease_id: LeaseId) -> tuple[int, ...] | None:
        """Blocks under a lease, position 0 first; None when there is no such lease (any more)."""
        lease = self._leases.get(lease_id)
        return lease.blocks if lease else None

    def match(self, token_ids: Sequence[int], salt: str) -> int:
        """Tokens of the prefix that are cached: whole blocks, at most `len(token_ids) - 1`.

        One token is always left to compute, because sampling needs its logits.
        """
        return len(self._hits(token_ids, salt)) * self._block_tokens

    def cached_blocks(self, token_ids: Sequence[int], salt: str) -> tuple[int, ...]:
        """Blocks that hold the longest cached prefix, the last whole block included."""
        return tuple(self._hits((*token_ids, 0), salt))

    def fits(
        self,
        token_ids: Sequence[int],
        salt: str,
        num_tokens: int,
        *,
        freeing: Iterable[RequestId] = (),
    ) -> bool:
        """Would `allocate` succeed if the requests `freeing` gave up their blocks first?"""
        hits = self._hits(token_ids, salt)
        freed = set(freeing)
        given_up = Counter(b for request_id in freed for b in self._tables[request_id].blocks)
        for copying in self._copying:
            if copying.request_id in freed and not copying.in_flight:  # see `free`
                given_up.update((copying.copy.source, copying.copy.target))
        shared = set(hits)
        reclaimed = sum(
            1 for b, count in given_up.items() if count == self._refs[b] and b not in shared
        )
        return self._shortage(hits, num_tokens) <= reclaimed

    # A request's blocks

    def allocate(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        salt: str,
        num_tokens: int,
        *,
        copies: bool = True,
    ) -> int | None:
        """Give a request a table for `num_tokens` positions, its cached prefix shared.

        Returns how many leading tokens are cached; None, with nothing changed: no room. Without
        `copies` that is whole blocks; with them the part behind may count too, and is there once
        the copies of the next step are made.
        """
        assert request_id not in self._tables, f"{request_id} already has blocks"
        hits = self._hits(token_ids, salt)
        if self._shortage(hits, num_tokens) > 0:
            return None
        for block in hits:  # before taking any: a hit must not be evicted for its own request
            self._hold(block)
        num_whole = len(hits)
        parent = self._lookup.hashes[num_whole - 1] if hits else self._root(salt)
        table = _Table(blocks=hits, parent=parent, num_hashed=num_whole)
        num_cached = num_whole * self._block_tokens
        source, num_copied = None, 0
        missing = self.config.blocks_for(num_tokens) - num_whole
        # Fewer positions than known tokens may leave no block for a part.
        if copies and self._shares_parts and parent is not None and missing > 0:
            source, num_copied = self._part_hit(parent, token_ids, num_cached)
        if source is not None:
            self._hold(source)
            if missing > self.num_free_blocks:  # the source was the last free one
                self._let_go((source,))
                source, num_copied = None, 0
        self._tables[request_id] = table
        self._grow(table, num_tokens)
        if source is not None:
            target = table.blocks[num_whole]
            self._hold(target)
            self._copying.append(_Copying(request_id, BlockCopy(source, target, num_copied)))
            num_cached += num_copied
        self.num_query_tokens += len(token_ids)
        self.num_hit_tokens += num_cached
        return num_cached

    def extend(self, request_id: RequestId, num_tokens: int) -> bool:
        """Grow a table to hold `num_tokens` positions. False, with nothing changed: no room."""
        table = self._tables[request_id]
        missing = self.config.blocks_for(num_tokens) - len(table.blocks)
        if missing > self.num_free_blocks:
            return False
        if missing > 0:
            self._grow(table, num_tokens)
        return True

    def commit(self, request_id: RequestId, token_ids: Sequence[int], num_computed: int) -> None:
        """The KV of `token_ids[:num_computed]` is in the blocks: make the full ones shareable."""
        table = self._tables[request_id]
        if table.parent is None:
            return
        num_full = num_computed // self._block_tokens
        for index in range(table.num_hashed, num_full):
            first = index * self._block_tokens
            self._store_parts(table, index, token_ids, first + self._block_tokens)
            digest = block_hash(table.parent, token_ids[first : first + self._block_tokens])
            self._store(table.blocks[index], digest, table.parent)
            table.parent = digest
            table.num_parts = 0
            table.num_hashed = index + 1
        if self._shares_parts and num_computed > table.num_hashed * self._block_tokens:
            self._store_parts(table, table.num_hashed, token_ids, num_computed)

    def free(self, request_id: RequestId) -> None:
        """Give a request's blocks up. Leases on them stay, and so do copies that are being made."""
        self._let_go(self._tables.pop(request_id).blocks)
        for copying in [c for c in self._copying if c.request_id == request_id]:
            copying.request_id = None
            if not copying.in_flight:
                self._end_copy(copying)

    # Copies of parts of blocks

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Copies to make before the next pass computes, in any order, and not taken yet. Answer
        with `settle_copies`."""
        if not self._copying:
            return ()
        taken = [copying for copying in self._copying if not copying.in_flight]
        for copying in taken:
            copying.in_flight = True
        return tuple(copying.copy for copying in taken)

    def settle_copies(self, copies: Sequence[BlockCopy] | None = None, *, made: bool) -> None:
        """These copies, taken before, were made; or not, and those still wanted are taken again.
        None: all that were taken."""
        if copies is None:
            settled = [c for c in self._copying if c.in_flight]
        elif copies:
            targets = {copy.target for copy in copies}  # held, so each is that of one copy
            settled = [c for c in self._copying if c.copy.target in targets]
        else:
            return
        for copying in settled:
            copying.in_flight = False
            if made or copying.request_id is None:
                self._end_copy(copying)

    # Leases: blocks that are being read from outside

    def lease(self, lease_id: LeaseId, request_id: RequestId, deadline: float) -> None:
        """Hold all blocks of the request's table as it is now, until released or past `deadline`.

        Survives `free(request_id)`.
        """
        assert lease_id not in self._leases, f"lease {lease_id} exists"
        blocks = self.table(request_id)
        for block in blocks:
            self._hold(block)
        self._leases[lease_id] = _Lease(blocks, deadline)

    def renew(self, lease_id: LeaseId, deadline: float) -> bool:
        """Move the deadline. False: there is no such lease (any more)."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.deadline = deadline
        return True

    def release(self, lease_id: LeaseId) -> bool:
        """End a lease. False: there is no such lease (any more)."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        self._let_go(lease.blocks)
        return True

    def expire(self, now: float) -> list[LeaseId]:
        """End the leases whose deadline has come, and name them."""
        expired = [lease_id for lease_id, lease in self._leases.items() if lease.deadline <= now]
        for lease_id in expired:
            self.release(lease_id)
        return expired

    def set_aside(self, lease_id: LeaseId, request_id: RequestId, first_block: int) -> bool:
        """Somebody outside may still write into the table's blocks from index `first_block` on:
        hold them under a lease without deadline and give the request others. False: there are
        none, and the table ends at `first_block`."""
        assert lease_id not in self._leases, f"lease {lease_id} exists"
        table = self._tables[request_id]
        assert first_block >= table.num_hashed, "shareable blocks can't be set aside"
        written = table.blocks[first_block:]
        del table.blocks[first_block:]
        table.frozen = None
        self._leases[lease_id] = _Lease(tuple(written), math.inf)
        if len(written) > self.num_free_blocks:
            return False
        table.blocks.extend(self._take() for _ in written)
        return True

    # The cache as a whole

    def drain_events(self) -> list[CacheEvent]:
        """What changed in the cache since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def reset(self) -> None:
        """Forget all cached content, as after a change of weights. Tables and leases stay.

        What was computed before the reset is never hashed afterwards.
        """
        for block in self._evictable:
            self._blank.append(block)
        self._evictable.clear()
        self._cached.clear()
        self._hashes = [None] * self.config.num_blocks
        self._by_part.clear()
        self._parts = [[] for _ in range(self.config.num_blocks)]
        for table in self._tables.values():
            table.parent = None
        self._events.clear()
        self._events.append(Cleared())

    def check(self) -> None:
        """Assert every invariant. Cost grows with the pool: for tests and idle moments."""
        held = Counter(b for table in self._tables.values() for b in table.blocks)
        held.update(b for lease in self._leases.values() for b in lease.blocks)
        held.update(b for c in self._copying for b in (c.copy.source, c.copy.target))
        blank, evictable = set(self._blank), set(self._evictable)
        assert self._refs == [held[b] for b in range(self.config.num_blocks)], (
            "reference counts drifted"
        )
        assert len(blank) == len(self._blank), "a block is blank twice"
        assert not blank & evictable, "a block is both blank and evictable"
        assert not held.keys() & (blank | evictable), "a block is both free and held"
        assert held.keys() | blank | evictable == set(range(1, self.config.num_blocks)), (
            "a block is lost, or block 0 was handed out"
        )
        assert not any(self._known(b) for b in blank), "a blank block has a hash"
        assert all(self._known(b) for b in evictable), "an evictable block has no hash"
        parts = {(b, key) for key, blocks in self._by_part.items() for b in blocks}
        assert parts == {(b, key) for b, keys in enumerate(self._parts) for key in keys}, (
            "the index of parts and the blocks disagree"
        )
        assert all(self._by_part.values()), "the index of parts names one without a block"
        assert sum(map(len, self._by_part.values())) == sum(map(len, self._parts)), (
            "a part is indexed twice"
        )
        assert all(c.in_flight for c in self._copying if c.request_id is None), "an orphaned copy"
        by_hash = {b: digest for digest, blocks in self._cached.items() for b in blocks}
        assert by_hash == {b: h for b, h in enumerate(self._hashes) if h is not None}, (
            "the cache index and the blocks disagree"
        )
        assert all(self._cached.values()), "the cache index names a hash without a block"
        assert sum(map(len, self._cached.values())) == len(by_hash), "a block is indexed twice"
        for request_id, table in self._tables.items():
            assert len(set(table.blocks)) == len(table.blocks), f"{request_id}: a block twice"
            assert table.num_hashed <= len(table.blocks), f"{request_id}: hashed beyond its table"
            assert table.frozen in (None, tuple(table.blocks)), f"{request_id}: stale table"
            if table.num_hashed and table.parent is not None:
                last = self._hashes[table.blocks[table.num_hashed - 1]]
                assert last == table.parent, f"{request_id}: hash chain broken"
        assert len(self._events) <= MAX_EVENTS, "events are not bounded"

    def _root(self, salt: str) -> bytes | None:
        return root_hash(self._fingerprint, salt) if self.config.prefix_caching else None

    def _hits(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """Cached blocks of the longest known prefix; their hashes are left in `_lookup`."""
        root = self._root(salt)
        if root is None:
            return []
        if self._lookup.token_ids is not token_ids or self._lookup.salt != salt:
            self._lookup = _Lookup(tuple(token_ids), salt)  # of a tuple, tuple() is itself
        hashes = self._lookup.hashes
        hits: list[int] = []
        for index in range((len(token_ids) - 1) // self._block_tokens):
            if index == len(hashes):
                first = index * self._block_tokens
                block = token_ids[first : first + self._block_tokens]
                hashes.append(block_hash(hashes[-1] if hashes else root, block))
            same = self._cached.get(hashes[index])
            if same is None:
                break
            hits.append(same[0])
        return hits

    def _part_hit(
        self, parent: bytes, token_ids: Sequence[int], first: int
    ) -> tuple[int | None, int]:
        """A block that begins as the prompt goes on at `first`, and how far it agrees."""
        source, agreed = None, 0
        most = min(self._block_tokens - 1, len(token_ids) - 1 - first)
        for num_tokens in range(self._reuse_tokens, most + 1, self._reuse_tokens):
            same = self._by_part.get(block_hash(parent, token_ids[first : first + num_tokens]))
            if same is None:
                break
            source, agreed = same[0], num_tokens
        return source, agreed

    def _store_parts(
        self, table: _Table, index: int, token_ids: Sequence[int], num_computed: int
    ) -> None:
        """Make the leading parts of one block shareable, the whole of it excepted."""
        first = index * self._block_tokens
        most = min(num_computed - first, self._block_tokens - 1) // self._reuse_tokens
        assert table.parent is not None
        for part in range(table.num_parts, most):
            end = first + (part + 1) * self._reuse_tokens
            key = block_hash(table.parent, token_ids[first:end])
            self._parts[table.blocks[index]].append(key)
            self._by_part.setdefault(key, []).append(table.blocks[index])
        table.num_parts = max(table.num_parts, most)

    def _end_copy(self, copying: _Copying) -> None:
        self._copying.remove(copying)
        self._let_go((copying.copy.source,))
        self._let_go((copying.copy.target,))

    def _known(self, block: int) -> bool:
        """Is any of the block's content known by hash?"""
        return self._hashes[block] is not None or bool(self._parts[block])

    def _shortage(self, hits: list[int], num_tokens: int) -> int:
        """Blocks missing to hold `num_tokens` positions, `hits` being shared."""
        idle_hits = sum(1 for block in hits if self._refs[block] == 0)
        wanted = max(0, self.config.blocks_for(num_tokens) - len(hits))
        return wanted - (self.num_free_blocks - idle_hits)

    def _grow(self, table: _Table, num_tokens: int) -> None:
        while len(table.blocks) < self.config.blocks_for(num_tokens):
            table.blocks.append(self._take())
        table.frozen = None

    def _take(self) -> int:
        if self._blank:
            block = self._blank.popleft()
        else:
            block, _ = self._evictable.popitem(last=False)
            self._forget(block)
        self._refs[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if self._refs[block] == 0:
            del self._evictable[block]
        self._refs[block] += 1

    def _let_go(self, blocks: Sequence[int]) -> None:
        # Tail first, so that a prefix outlives what follows it: without it the rest is unreachable.
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._known(block):
                    self._evictable[block] = None
                else:
                    self._blank.appendleft(block)

    def _store(self, block: int, digest: bytes, parent: bytes) -> None:
        self._hashes[block] = digest
        same = self._cached.setdefault(digest, [])
        same.append(block)
        if len(same) == 1:
            self._emit(Stored(digest, parent))

    def _forget(self, block: int) -> None:
        digest = self._hashes[block]
        assert self._known(block), f"block {block} was evictable without a hash"
        for key in self._parts[block]:
            blocks = self._by_part[key]
            blocks.remove(block)
            if not blocks:
                del self._by_part[key]
        self._parts[block] = []
        if digest is None:
            return
        self._hashes[block] = None
        same = self._cached[digest]
        same.remove(block)
        if not same:
            del self._cached[digest]
            self._emit(Removed(digest))

    def _emit(self, event: CacheEvent) -> None:
        if len(self._events) >= MAX_EVENTS:
            # A listener that missed events must not believe in blocks that are gone. Knowing less
            # is harmless: it costs a hit, not an answer.
            self._events.clear()
            self._events.append(Cleared())
        self._events.append(event)
