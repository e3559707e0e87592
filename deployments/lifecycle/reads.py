"""Both halves of a pull whose whole blocks are read by NIXL: what is said on the link about it.

```
prefill → decode   AGENT   on every new link: how to read from this replica's pool, or its ranks'
decode → prefill   PREFILL with the epoch that it is connected to, and what each of its ranks reads
prefill → decode   READY   these blocks are computed, and what the bytes so read add up to
```

Manifest, ragged ends, first token, signs of life, lease and commit are those of any pull.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from deployments.link.link import Link
from deployments.link.messages import Kind
from engine.errors import TransferError
from engine.models.model import KVLayout, KVPart
from engine.transfer.intake import KVIntake
from engine.transfer.manifest import ChunkHead
from engine.transfer.nixl import ReadResult
from engine.transfer.nixl_cut import parts_from_wire, parts_to_wire
from engine.transfer.nixl_group import AgentGroup, GroupRead, ReplicaCard, open_agents
from engine.transfer.nixl_intake import ReadIntake
from engine.transfer.nixl_offers import Offer

if TYPE_CHECKING:
    from engine.transfer.memory import KVMemory

logger = logging.getLogger(__name__)

RECONNECT_S = 5.0
"""After a READ that failed, KV comes over the link this long, then READs are tried again."""

RUN_BYTES = 32 << 20
"""Of one READ. What is heard of a READ is its end: of a longer one nothing would be heard for long,
as if it had stalled, and other pulls would wait behind it."""

_RUNS_AT_ONCE = 2
"""READs of one offer that are asked for at a time: one flies while the next is waited for."""

Entry = tuple[int, int, int | None]
"""First token, block in the sender's pool, checksum; no checksum of what lies on a device."""


@dataclass(slots=True)
class _Agent:
    """The agents at the other end of one link."""

    card: ReplicaCard
    peer: tuple[str, int]
    """Its name, and which attempt at connecting to any agent this is: READs of one connection may
    settle while the next, over another link, begins."""

    connected: bool = False


@dataclass(frozen=True, slots=True)
class _Block:
    """One that is to be read."""

    head: ChunkHead
    local: int
    remote: int
    summed: bool
    """The sender knows what its bytes add up to."""


async def start_agents(pool: KVMemory, *, window_bytes: int) -> AgentGroup:
    """Agents whose callbacks run on the calling loop. Raises ConfigError where there can be
    none."""
    deliver = asyncio.get_running_loop().call_soon_threadsafe
    return await asyncio.to_thread(open_agents, pool, deliver, window_bytes=window_bytes)


class BlockOffers:
    """Prefill's half. Lives on the event loop."""

    def __init__(self, agents: AgentGroup) -> None:
        self._agents = agents

    @property
    def epoch(self) -> str:
        return self._agents.card.epoch

    def announce(self, link: Link) -> None:
        """Tell a new link's other end how to read from here."""
        link.send([Kind.AGENT, 0, self._agents.card.to_wire()])

    def readers(self, wish: Any) -> tuple[KVPart, ...] | None:
        """What each rank of a receiver reads of a block, by what PREFILL says; None where it reads
        nothing here: it is not connected, or not to this process."""
        match wish:
            case [self.epoch, [_, *_] as parts]:
                with contextlib.suppress(TransferError):
                    readers = parts_from_wire(parts)
                    self._agents.require_whole(readers)
                    return readers
            case _:
                pass
        return None

    def offer(
        self, link: Link, transfer: int, offers: Sequence[Offer], readers: Sequence[KVPart]
    ) -> None:
        """Let the receiver, whose ranks hold `readers`, read these blocks, once their checksums are
        known."""
        if not offers:
            return

        def summed(sums: tuple[int | None, ...]) -> None:
            entries = [[o.first_token, o.block, s] for o, s in zip(offers, sums, strict=True)]
            link.send([Kind.READY, transfer, self.epoch, entries])

        self._agents.checksums([offer.block for offer in offers], readers, summed)

    def close(self) -> None:
        self._agents.close()


class BlockReads:
    """Decode's half. Lives on the event loop."""

    def __init__(self, agents: AgentGroup, layout: KVLayout, block_tokens: int) -> None:
        self.bytes_read = 0
        self.num_failures = 0
        self._group = agents
        self._layout = layout
        self._page = block_tokens
        self._agents: dict[Link, _Agent] = {}
        self._attempts = itertools.count(1)
        self._open: dict[ReadIntake, set[GroupRead]] = {}
        self._posts: list[float] = []

    @property
    def num_open(self) -> int:
        """READs that may still write, whoever waits for them."""
        return sum(map(len, self._open.values()))

    @property
    def num_connected(self) -> int:
        """Replicas that are read from now."""
        return sum(agent.connected for agent in self._agents.values())

    def take_posts(self) -> list[float]:
        """Seconds that posting each READ took, since the last call."""
        posts, self._posts = self._posts, []
        return posts

    def epoch(self, link: Link) -> str | None:
        """Of the agents at the other end, while they can be read from."""
        agent = self._agents.get(link)
        return agent.card.epoch if agent is not None and agent.connected else None

    def wish(self, link: Link) -> list[Any] | None:
        """What PREFILL says of READs: see `BlockOffers.readers`."""
        epoch = self.epoch(link)
        return None if epoch is None else [epoch, parts_to_wire(self._group.parts)]

    def on_agent(self, link: Link, wire: list[Any]) -> None:
        """The other end said how to read from it: connect, and read a first block."""
        try:
            card = ReplicaCard.from_wire(wire)
        except TransferError as error:
            logger.warning("KV of %s comes over the link: %s", link.peer_id, error)
            return
        self.on_close(link)
        self._agents[link] = agent = _Agent(card, (card.epoch, 0))
        self._connect(link, agent)

    def on_close(self, link: Link) -> None:
        """The other end is gone: forget its agent."""
        agent = self._agents.pop(link, None)
        if agent is not None:
            self._group.lose_peer(agent.peer)

    def _connect(self, link: Link, agent: _Agent) -> None:
        if self._agents.get(link) is not agent:
            return
        epoch = agent.card.epoch
        agent.peer = peer = (epoch, next(self._attempts))

        def done(error: TransferError | None) -> None:
            if self._agents.get(link) is not agent or agent.peer != peer:
                return
            if error is None:
                agent.connected = True
                logger.info(
                    "KV of %s is read from %d agents, %s",
                    link.peer_id,
                    len(agent.card.agents),
                    epoch,
                )
            else:
                self._disconnect(link, agent, error)

        self._group.add_peer(peer, agent.card, done)

    def _disconnect(self, link: Link, agent: _Agent, error: TransferError) -> None:
        """Until it is tried again, the link carries what would be read."""
        logger.warning("KV of %s comes over the link: %s", link.peer_id, error)
        agent.connected = False
        self._group.lose_peer(agent.peer)
        if error.stage != "offer":  # what does not fit now never will
            asyncio.get_running_loop().call_later(RECONNECT_S, self._connect, link, agent)

    def ready(
        self,
        link: Link,
        epoch: str,
        entries: Any,
        intake: ReadIntake,
        *,
        landed: Callable[[int, bool], None],
        failed: Callable[[TransferError], None],
    ) -> None:
        """Read the blocks that `entries` offer, as they came over the link. `landed` gets the bytes
        of each READ that is there, and whether both sides could sum all of them and agreed;
        `failed` says why one is not.

        Raises TransferError for an offer that is malformed, of another process or outside the
        transfer; nothing is lent then.
        """
        agent = self._agents.get(link)
        if agent is None or not agent.connected or agent.card.epoch != epoch:
            raise TransferError(
                f"blocks of agent {epoch} are offered, {self.epoch(link)} is connected: its "
                "process was replaced, or a READ from it failed",
                stage="link",
            )
        offered = _entries(entries, agent.card.num_blocks)
        if intake.closed or not offered:
            return
        blocks: list[_Block] = []
        try:
            for first_token, remote, checksum in offered:
                head = self._whole_block(first_token, checksum or 0)
                blocks.append(_Block(head, intake.lend(head), remote, checksum is not None))
        except Exception as error:
            intake.give_back(len(blocks))
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"blocks cannot be read: {error!r}", stage="offer") from error
        at_once = max(1, RUN_BYTES // (self._page * self._layout.bytes_per_token))
        runs = deque(blocks[i : i + at_once] for i in range(0, len(blocks), at_once))
        peer = agent.peer

        def post() -> None:
            """Ask for the next run, while anybody waits for it."""
            if not runs:
                return
            if intake.closed:
                left = sum(map(len, runs))
                runs.clear()
                intake.give_back(left)
            elif self._agents.get(link) is not agent or (agent.peer, agent.connected) != (
                peer,
                True,
            ):
                left = sum(map(len, runs))
                runs.clear()
                failed(TransferError("its peer is gone", stage="link"))
                intake.give_back(left)
            else:
                self._read(link, agent, peer, runs.popleft(), intake, landed, failed, post)

        for _ in range(_RUNS_AT_ONCE):
            post()

    def _read(
        self,
        link: Link,
        agent: _Agent,
        peer: tuple[str, int],
        blocks: Sequence[_Block],
        intake: ReadIntake,
        landed: Callable[[int, bool], None],
        failed: Callable[[TransferError], None],
        over: Callable[[], None],
    ) -> None:
        """One READ. `over`: nothing writes into its blocks any more, which were given back."""

        def ended(read: GroupRead, result: ReadResult) -> None:
            self._posts.append(result.post_s)
            if result.error is not None:
                self.num_failures += 1
                error = TransferError(f"READ failed: {result.error}", stage="link")
                if agent.connected and agent.peer == peer and self._agents.get(link) is agent:
                    self._disconnect(link, agent, error)
                failed(error)
                return
            if not result.sound:
                error = TransferError(
                    "blocks were read with scales that no codes have: negative or not finite",
                    stage="chunk",
                )
                failed(error)
                return
            summed = True
            try:
                for block, found in zip(blocks, result.checksums, strict=True):
                    found = found if block.summed else None
                    summed &= found is not None
                    intake.landed(block.head, found)
            except TransferError as error:
                failed(error)
                return
            num_bytes = sum(block.head.num_bytes for block in blocks)
            self.bytes_read += num_bytes
            landed(num_bytes, summed)

        def quiet(read: GroupRead) -> None:
            reads = self._open[intake]
            reads.discard(read)
            if not reads:
                del self._open[intake]
            intake.give_back(len(blocks))
            over()

        read = self._group.read(
            peer,
            [block.local for block in blocks],
            [block.remote for block in blocks],
            ended=ended,
            quiet=quiet,
        )
        self._open.setdefault(intake, set()).add(read)

    def cancel(self, intake: KVIntake) -> None:
        """Nobody waits for this intake's READs any more. What flies ends by itself: see
        `ReadIntake.lent`."""
        if isinstance(intake, ReadIntake):
            for read in self._open.get(intake, ()):
                self._group.cancel(read)

    def close(self) -> None:
        self._group.close()

    def _whole_block(self, first_token: int, checksum: int) -> ChunkHead:
        layout = self._layout
        return ChunkHead(
            first_layer=0,
            last_layer=layout.num_layers,
            first_token=first_token,
            num_tokens=self._page,
            first_head=0,
            last_head=layout.num_kv_heads,
            num_bytes=self._page * layout.bytes_per_token,
            checksum=checksum,
        )


def _entries(wire: Any, num_blocks: int) -> list[Entry]:
    """What READY offers of a pool of `num_blocks`. Raises TransferError for anything else."""
    items = cast("list[Any]", wire) if isinstance(wire, list) else [wire]
    entries: list[Entry] = []
    for item in items:
        match item:
            case [int(first_token), int(block), int() | None as checksum]:
                if not 0 < block < num_blocks:
                    raise TransferError(f"block {block} of {num_blocks} was offered", stage="offer")
                entries.append((first_token, block, checksum))
            case _:
                raise TransferError(f"malformed offer of a block: {item!r}"[:200], stage="offer")
    return entries
