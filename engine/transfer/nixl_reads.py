"""Which one-sided READs may be posted, and when nothing writes into their destination any more.

```
 submit ──► QUEUED ──post──► FLYING ──DONE──► gone (landed)
               │                │ ERR
               │                └──────► SETTLING ──peer dropped, settle_s──► gone
               └── cancelled, peer lost ────────────────────────────────────► gone
```

A READ that was posted writes into its destination until it has ended, whatever its owner thinks of
it: UCX cannot take one back (nixl#2044, nixl#2048), a stopped peer answers when it is continued,
and a READ of several parts that reports an error may have parts under way. So a cancelled READ
flies on, watched, and `Quiet` says when its blocks may be used again.

No clock, thread or library here: calls go in, actions come out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from engine.errors import ConfigError

ReadId = int
PeerId = Hashable


class Polled(str, Enum):
    """What the library says of a posted READ."""

    DONE = "DONE"
    PROC = "PROC"
    ERR = "ERR"


@dataclass(frozen=True, slots=True)
class Post:
    """Post this READ now; answer with `posted`."""

    read: ReadId


@dataclass(frozen=True, slots=True)
class Landed:
    """Every byte is there and nothing will be written any more."""

    read: ReadId


@dataclass(frozen=True, slots=True)
class Failed:
    """It will never land whole. Its blocks may still be written until `Quiet`."""

    read: ReadId
    why: str


@dataclass(frozen=True, slots=True)
class Quiet:
    """Nothing writes into the blocks of this failed or cancelled READ any more."""

    read: ReadId


@dataclass(frozen=True, slots=True)
class Release:
    """Free what the library keeps for this READ."""

    read: ReadId


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Disconnect and forget this peer: none of its READs is in flight."""

    peer: PeerId


ReadAction = Post | Landed | Failed | Quiet | Release | DropPeer


class _State(Enum):
    QUEUED = "queued"
    FLYING = "flying"
    SETTLING = "settling"


@dataclass(slots=True)
class _Read:
    peer: PeerId
    num_bytes: int
    state: _State = _State.QUEUED
    cancelled: bool = False
    settled_at: float = 0.0


@dataclass(slots=True)
class _Peer:
    lost: bool = False
    """Nothing is posted any more."""

    dropped: bool = False
    flying: set[ReadId] = field(default_factory=set[ReadId])
    settling: set[ReadId] = field(default_factory=set[ReadId])


class ReadTable:
    """Every READ of one agent that is not over.

    At most `window_bytes` fly at a time, at least one READ always may; the others wait their turn.
    `settle_s` is how long after a failed READ's peer was dropped its blocks stay untouched.
    """

    def __init__(self, *, window_bytes: int, settle_s: float) -> None:
        if window_bytes < 1:
            raise ConfigError(f"window_bytes={window_bytes}: must be 1 or more")
        self.window_bytes = window_bytes
        self._settle_s = settle_s
        self._reads: dict[ReadId, _Read] = {}
        self._queued: OrderedDict[ReadId, None] = OrderedDict()
        self._peers: dict[PeerId, _Peer] = {}
        self._flying_bytes = 0

    @property
    def num_queued(self) -> int:
        return len(self._queued)

    @property
    def num_flying(self) -> int:
        return sum(len(peer.flying) for peer in self._peers.values())

    @property
    def flying_bytes(self) -> int:
        return self._flying_bytes

    @property
    def num_settling(self) -> int:
        return sum(len(peer.settling) for peer in self._peers.values())

    def flying(self) -> list[tuple[ReadId, bool]]:
        """READs to poll, and whether anybody waits for each."""
        return [
            (read_id, not self._reads[read_id].cancelled)
            for peer in self._peers.values()
            for read_id in peer.flying
        ]

    def knows(self, peer: PeerId) -> bool:
        """Can READs of this peer be submitted?"""
        known = self._peers.get(peer)
        return known is not None and not known.lost

    def add_peer(self, peer: PeerId) -> None:
        assert peer not in self._peers, f"{peer} is known"
        self._peers[peer] = _Peer()

    def submit(self, read_id: ReadId, peer: PeerId, num_bytes: int) -> list[ReadAction]:
        """Ask for a READ. One of a peer that is unknown or lost fails at once."""
        assert read_id not in self._reads, f"READ {read_id} exists"
        if not self.knows(peer):
            return [Failed(read_id, "its peer is gone"), Quiet(read_id)]
        self._reads[read_id] = _Read(peer, num_bytes)
        self._queued[read_id] = None
        return list(self._fill())

    def posted(self, read_id: ReadId, state: Polled, now: float) -> list[ReadAction]:
        """What posting it, or looking at it later, said."""
        read = self._reads[read_id]
        assert read.state is _State.FLYING, f"READ {read_id} does not fly"
        if state is Polled.PROC:
            return []
        peer = self._peers[read.peer]
        peer.flying.discard(read_id)
        self._flying_bytes -= read.num_bytes
        actions: list[ReadAction] = [Release(read_id)]
        if state is Polled.DONE:
            del self._reads[read_id]
            actions.append(Quiet(read_id) if read.cancelled else Landed(read_id))
        else:
            read.state = _State.SETTLING
            peer.settling.add(read_id)
            if not read.cancelled:
                actions.append(Failed(read_id, "the transfer library reports an error"))
            actions += self._lose(read.peer, "its peer failed")
        actions += self._maybe_drop(read.peer, now)
        return [*actions, *self._fill()]

    def cancel(self, read_id: ReadId) -> list[ReadAction]:
        """Nobody wants it any more. Unknown READs are over and are ignored."""
        read = self._reads.get(read_id)
        if read is None:
            return []
        read.cancelled = True
        if read.state is not _State.QUEUED:
            return []
        del self._queued[read_id], self._reads[read_id]
        return [Quiet(read_id)]

    def lose_peer(self, peer: PeerId, now: float) -> list[ReadAction]:
        """The peer is gone or hangs: nothing more is posted; what flies is watched to its end."""
        if peer not in self._peers:
            return []
        actions = self._lose(peer, "its peer is gone")
        return [*actions, *self._maybe_drop(peer, now), *self._fill()]

    def tick(self, now: float) -> list[ReadAction]:
        """Time has passed: which failed READs have settled."""
        actions: list[ReadAction] = []
        for peer_id, peer in list(self._peers.items()):
            if not peer.dropped:
                continue
            for read_id in [r for r in peer.settling if self._reads[r].settled_at <= now]:
                peer.settling.discard(read_id)
                del self._reads[read_id]
                actions.append(Quiet(read_id))
            if not peer.settling:
                del self._peers[peer_id]
        return actions

    def check(self) -> None:
        """Assert the invariants."""
        flying = [r for peer in self._peers.values() for r in peer.flying]
        settling = [r for peer in self._peers.values() for r in peer.settling]
        assert sorted([*flying, *settling, *self._queued]) == sorted(self._reads), "a READ is lost"
        assert self._flying_bytes == sum(self._reads[r].num_bytes for r in flying), "bytes drifted"
        assert all(self._reads[r].state is _State.FLYING for r in flying), "flying: state"
        assert all(self._reads[r].state is _State.SETTLING for r in settling), "settling: state"
        assert all(not self._reads[r].cancelled for r in self._queued), "a cancelled READ waits"
        assert all(not self._peers[self._reads[r].peer].lost for r in self._queued), (
            "a READ waits for a lost peer"
        )
        if self._queued:
            assert flying, "READs wait and none flies"

    def _lose(self, peer_id: PeerId, why: str) -> list[ReadAction]:
        self._peers[peer_id].lost = True
        actions: list[ReadAction] = []
        for read_id in [r for r in self._queued if self._reads[r].peer == peer_id]:
            del self._queued[read_id], self._reads[read_id]
            actions += [Failed(read_id, why), Quiet(read_id)]
        return actions

    def _maybe_drop(self, peer_id: PeerId, now: float) -> Iterator[ReadAction]:
        peer = self._peers[peer_id]
        if not peer.lost or peer.dropped or peer.flying:
            return
        peer.dropped = True
        for read_id in peer.settling:
            self._reads[read_id].settled_at = now + self._settle_s
        yield DropPeer(peer_id)
        if not peer.settling:
            del self._peers[peer_id]

    def _fill(self) -> Iterator[ReadAction]:
        while self._queued:
            read_id = next(iter(self._queued))
            read = self._reads[read_id]
            if self._flying_bytes and self._flying_bytes + read.num_bytes > self.window_bytes:
                return
            del self._queued[read_id]
            read.state = _State.FLYING
            self._flying_bytes += read.num_bytes
            self._peers[read.peer].flying.add(read_id)
            yield Post(read_id)
