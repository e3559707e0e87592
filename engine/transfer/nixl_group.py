"""The agents of one replica as one: of its own pool, or of the pool of each rank.

```
decode   AgentGroup ── agent of rank 0 ◄── pieces ── agents of those ranks of prefill that hold
                    └─ agent of rank 1 ◄── pieces ──   any of what this rank holds
```

A block is read when each rank has every piece of it, and may be used for something else when each
rank has said that nothing writes into it any more.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

from engine.errors import TransferError
from engine.models.model import KVPart
from engine.transfer.nixl import AGENT_CARD_VERSION, AgentCard, NixlAgent, Read, ReadResult
from engine.transfer.nixl_cut import Piece, combined, pieces, require_whole

if TYPE_CHECKING:
    from engine.transfer.memory import KVMemory


@dataclass(frozen=True, slots=True)
class ReplicaCard:
    """What a peer needs in order to read from a replica; the same secret as each `AgentCard`."""

    epoch: str
    """New with every process and every group of ranks."""

    agents: tuple[AgentCard, ...]
    """Of rank 0, 1, ..."""

    @property
    def num_blocks(self) -> int:
        """Of each pool: a block has the same number in all of them."""
        return min(agent.num_blocks for agent in self.agents)

    def to_wire(self) -> list[Any]:
        return [AGENT_CARD_VERSION, self.epoch, [agent.to_wire() for agent in self.agents]]

    @classmethod
    def from_wire(cls, wire: Any) -> ReplicaCard:
        """Raises TransferError for another version or anything malformed."""
        match wire:
            case [version, *_] if version != AGENT_CARD_VERSION:
                raise TransferError(
                    f"agent card version {version}, this side speaks {AGENT_CARD_VERSION}: run "
                    "equal releases on both pools",
                    stage="offer",
                )
            case [_, str(epoch), [_, *_] as agents]:
                cards = cast("list[Any]", agents)
                return cls(epoch, tuple(AgentCard.from_wire(card) for card in cards))
            case _:
                raise TransferError(f"malformed agent card: {wire!r}"[:200], stage="offer")


class Member(Protocol):
    """One agent of a group: see `NixlAgent`, which is one. Calls return at once, and callbacks come
    where the group lives, never while a call runs."""

    @property
    def card(self) -> AgentCard: ...
    def add_peer(
        self, peer: Hashable, card: AgentCard, done: Callable[[TransferError | None], None]
    ) -> None: ...
    def lose_peer(self, peer: Hashable) -> None: ...
    def read(
        self,
        peer: Hashable,
        local: Sequence[int],
        remote: Sequence[int],
        *,
        ended: Callable[[Read, ReadResult], None],
        quiet: Callable[[Read], None],
    ) -> Read: ...
    def cancel(self, read: Read) -> None: ...
    def checksums(
        self,
        blocks: Sequence[int],
        parts: Sequence[KVPart],
        done: Callable[[list[tuple[int | None, ...]]], None],
    ) -> None: ...
    def reconfigure(self, window_bytes: int) -> None: ...
    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class GroupRead:
    """Blocks that are read into every pool of the group, as their owner holds them."""

    local: tuple[int, ...]
    remote: tuple[int, ...]
    ended: Callable[[GroupRead, ReadResult], None]
    quiet: Callable[[GroupRead], None]
    """As of `Read`: the last rank's."""

    reads: list[tuple[Member, Read]] = field(default_factory=list["tuple[Member, Read]"])
    results: dict[int, ReadResult] = field(default_factory=dict[int, ReadResult])
    """By number of the piece."""

    is_over: bool = False
    """`ended` was called, or nobody wants to hear it."""

    num_loud: int = 0
    """Pieces that may still be written."""


@dataclass(slots=True)
class _Connection:
    """Of one member to one agent of a peer."""

    member: Member
    key: int


class AgentGroup:
    """What a replica reads and is read by. Lives on one thread, where `deliver` of its members
    brings their callbacks; `peer` names a connection to a replica and is new with each."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = tuple(members)
        cards = tuple(member.card for member in self.members)
        self.card = ReplicaCard(f"tailrace-{uuid.uuid4().hex}", cards)
        self.parts = tuple(card.held for card in cards)
        """What each member reads of a block, copies of other members' heads included."""

        self._owned = tuple(card.owned for card in cards)
        self._peers: dict[Hashable, list[_Connection]] = {}
        self._keys = itertools.count(1)

    def add_peer(
        self, peer: Hashable, card: ReplicaCard, done: Callable[[TransferError | None], None]
    ) -> None:
        """Connect every member to all agents that it is to read from; see `NixlAgent.add_peer`.

        `done` is told once: that all are connected, or what the first failure was, also before
        this returns. Call `lose_peer` then, too.
        """
        try:
            found = require_whole(self.parts, [agent.owned for agent in card.agents])
        except TransferError as error:
            done(error)
            return
        connections = [_Connection(self.members[piece.reader], next(self._keys)) for piece in found]
        self._peers[peer] = connections
        left = len(found)

        def connected(error: TransferError | None) -> None:
            nonlocal left
            if left <= 0:
                return  # what was told is told
            left = 0 if error is not None else left - 1
            if not left:
                done(error)

        for piece, connection in zip(found, connections, strict=True):
            connection.member.add_peer(connection.key, card.agents[piece.owner], connected)

    def lose_peer(self, peer: Hashable) -> None:
        """See `NixlAgent.lose_peer`."""
        for connection in self._peers.pop(peer, ()):
            connection.member.lose_peer(connection.key)

    def read(
        self,
        peer: Hashable,
        local: Sequence[int],
        remote: Sequence[int],
        *,
        ended: Callable[[GroupRead, ReadResult], None],
        quiet: Callable[[GroupRead], None],
    ) -> GroupRead:
        """Copy the peer's blocks `remote` over the blocks `local` of every pool, in order. `peer`
        was added and is not lost. Checksums of the result are `combined` ones."""
        connections = self._peers[peer]
        whole = GroupRead(tuple(local), tuple(remote), ended, quiet, num_loud=len(connections))
        for number, connection in enumerate(connections):

            def over(read: Read, result: ReadResult, number: int = number) -> None:
                self._ended(whole, number, result)

            read = connection.member.read(
                connection.key,
                local,
                remote,
                ended=over,
                quiet=lambda read: self._quiet(whole),
            )
            whole.reads.append((connection.member, read))
        return whole

    def cancel(self, read: GroupRead) -> None:
        """See `NixlAgent.cancel`."""
        read.is_over = True
        for member, part in read.reads:
            member.cancel(part)

    def checksums(
        self,
        blocks: Sequence[int],
        readers: Sequence[KVPart],
        done: Callable[[tuple[int | None, ...]], None],
    ) -> None:
        """Of each block, the one that readers which hold these parts find in all of its pieces."""
        found = pieces(readers, self._owned)
        wanted: list[list[KVPart]] = [
            list(dict.fromkeys(piece.part for piece in found if piece.owner == number))
            for number in range(len(self.members))
        ]
        sums: dict[tuple[int, KVPart], tuple[int | None, ...]] = {}
        left = sum(map(bool, wanted))

        def summed(owner: int, answers: list[tuple[int | None, ...]]) -> None:
            nonlocal left
            sums.update(
                ((owner, part), answer) for part, answer in zip(wanted[owner], answers, strict=True)
            )
            left -= 1
            if not left:
                done(_by_block(found, sums, len(blocks)))

        for number, member in enumerate(self.members):
            if wanted[number]:
                member.checksums(
                    blocks, wanted[number], lambda answers, owner=number: summed(owner, answers)
                )

    def require_whole(self, readers: Sequence[KVPart]) -> None:
        """Raise TransferError unless all that these readers hold can be read here."""
        require_whole(readers, self._owned)

    def reconfigure(self, window_bytes: int) -> None:
        for member in self.members:
            member.reconfigure(window_bytes)

    def close(self) -> None:
        """End every member: blocks for seconds at most."""
        for member in self.members:
            member.close()

    def _ended(self, whole: GroupRead, number: int, result: ReadResult) -> None:
        if whole.is_over:
            return
        whole.results[number] = result
        if result.error is not None:
            whole.is_over = True
            for other, (member, read) in enumerate(whole.reads):
                if other != number:
                    member.cancel(read)  # of no use without this one
            whole.ended(whole, result)
        elif len(whole.results) == len(whole.reads):
            whole.is_over = True
            results = [whole.results[i] for i in range(len(whole.reads))]
            whole.ended(
                whole,
                ReadResult(
                    tuple(map(combined, zip(*(r.checksums for r in results), strict=True))),
                    None,
                    max(r.post_s for r in results),
                    max(r.seconds for r in results),
                    all(r.sound for r in results),
                ),
            )

    @staticmethod
    def _quiet(whole: GroupRead) -> None:
        whole.num_loud -= 1
        if not whole.num_loud:
            whole.quiet(whole)


def _by_block(
    found: Sequence[Piece], sums: dict[tuple[int, KVPart], tuple[int | None, ...]], num_blocks: int
) -> tuple[int | None, ...]:
    columns = [sums[piece.owner, piece.part] for piece in found]
    return tuple(combined([column[i] for column in columns]) for i in range(num_blocks))


def open_agents(pool: KVMemory, deliver: Callable[..., Any], *, window_bytes: int) -> AgentGroup:
    """An agent for this pool, or for that of each of its ranks. Blocks until all are ready.

    `deliver` carries callbacks to the thread of the group's owner. `window_bytes`: of READs that
    fly at a time, of each agent. Raises ConfigError where there can be none.
    """
    from engine.execution.ranks.pool import ShardedPool

    if isinstance(pool, ShardedPool):
        from engine.execution.ranks.reads import RankAgents

        return AgentGroup(RankAgents(pool, deliver).start(window_bytes))
    agent = NixlAgent(pool, deliver, window_bytes=window_bytes)
    agent.start()
    return AgentGroup([agent])
