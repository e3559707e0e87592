"""The read channel: agents of ranks, and the coordinator that tells them what to read.

Each rank has an agent of its own (`engine.transfer.nixl`) over its own pool, since only the process
that holds memory of a device can register it. The coordinator's event loop never touches a channel:
one thread sends to all ranks, another hears all of them.

A rank that is lost ends the group, and with it the replica. READs into its pool are never said to
be quiet: whoever waits for their blocks ends with the replica, too.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import select
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, EngineError, TransferError
from engine.execution.ranks.channel import Channel, ChannelError, Kind
from engine.execution.ranks.wire import pack_ints, unpack_ints
from engine.transfer.nixl import START_LIMIT_S, AgentCard, NixlAgent, Read, ReadResult
from engine.transfer.nixl_cut import parts_from_wire, parts_to_wire

if TYPE_CHECKING:
    from engine.execution.pool import KVPool
    from engine.execution.ranks.pool import ShardedPool
    from engine.models.model import KVPart
    from engine.models.shard import Span

logger = logging.getLogger(__name__)

_CLOSE_LIMIT_S = 5.0

Sums = list[tuple[int | None, ...]]


class RankAgents:
    """The agents of all ranks of one group."""

    def __init__(self, pool: ShardedPool, deliver: Callable[..., Any]) -> None:
        """`deliver` carries every callback to the thread that owns the agents."""
        self._pool = pool
        self._channels = pool.read_channels
        self._deliver = deliver
        self._agents: list[RankAgent] = []
        self._outbox: queue.SimpleQueue[tuple[Channel, list[Any]] | None] = queue.SimpleQueue()
        self._closed = False
        self._threads = [
            threading.Thread(target=run, name=name, daemon=True)
            for run, name in ((self._send, "reads out"), (self._hear, "reads in"))
        ]

    def start(self, window_bytes: int) -> list[RankAgent]:
        """Have every rank make its agent: all at once. Raises ConfigError, naming the rank, where
        one cannot."""
        if not self._channels:
            raise ConfigError(
                "transport=nixl: the ranks of this engine were started without it: set kv_reads"
            )
        for channel in self._channels:
            with contextlib.suppress(ChannelError):  # its answer is missed below
                channel.send([Kind.OPEN_AGENT, window_bytes])
        deadline = time.monotonic() + 2 * START_LIMIT_S
        for rank, channel in enumerate(self._channels):
            try:
                card = _card(channel.receive(max(1.0, deadline - time.monotonic())))
            except (ChannelError, TransferError) as error:
                raise ConfigError(f"transport=nixl: rank {rank} has no agent: {error}") from error
            self._agents.append(RankAgent(self, channel, card))
        for thread in self._threads:
            thread.start()
        return list(self._agents)

    def send(self, channel: Channel, message: list[Any]) -> None:
        """To a rank, soon. Never waits."""
        self._outbox.put((channel, message))

    def close(self) -> None:
        """Idempotent. Ends the threads; the agents end with their ranks."""
        if self._closed:
            return
        self._closed = True
        self._outbox.put(None)
        for channel in self._channels:
            channel.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(_CLOSE_LIMIT_S)

    def _send(self) -> None:
        while (item := self._outbox.get()) is not None:
            channel, message = item
            with contextlib.suppress(ChannelError):  # whoever hears it says so
                channel.send(message)

    def _hear(self) -> None:
        poll = select.poll()
        agents = {agent.fileno: agent for agent in self._agents}
        for descriptor in agents:
            poll.register(descriptor, select.POLLIN)
        agent = None
        try:
            while True:
                for descriptor, _ in poll.poll():
                    agent = agents[descriptor]
                    for message in agent.arrived():
                        self.tell(agent.heard, message)
        except (ChannelError, OSError) as error:
            self._lost(self._agents.index(agent) if agent is not None else 0, error)

    def _lost(self, rank: int, error: Exception) -> None:
        if self._closed:
            return
        reason = f"the agent of rank {rank} is lost: {error}"
        for agent in self._agents:
            self.tell(agent.lost, reason)
        if self._pool.on_lost is not None:
            self._pool.on_lost(reason)

    def tell(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call it on the owner's thread, later."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to be told
            self._deliver(call, *arguments)


def _card(message: list[Any]) -> AgentCard:
    match message:
        case [Kind.AGENT_OPEN, card, None]:
            return AgentCard.from_wire(card)
        case [Kind.AGENT_OPEN, None, str(error)]:
            raise TransferError(error, stage="connect")
        case _:
            raise ChannelError(f"malformed frame: kind {message[0]} where AGENT_OPEN was due")


@dataclass(slots=True)
class _Flight:
    """A READ that a rank was asked for."""

    read: Read
    cancelled: bool = False
    ended: bool = False
    quiet: bool = False

    @property
    def is_over(self) -> bool:
        """Nothing more is heard of it. One that nobody wants may end without a word."""
        return self.quiet and (self.ended or self.cancelled)


class RankAgent:
    """The agent of one rank, as the coordinator has it: see `NixlAgent`, whose calls these are.
    Lives on the thread that `deliver` brings callbacks to."""

    def __init__(self, agents: RankAgents, channel: Channel, card: AgentCard) -> None:
        self.card = card
        self.fileno = channel.fileno()
        self._agents = agents
        self._channel = channel
        self._ids = itertools.count(1)
        self._adding: dict[Hashable, Callable[[TransferError | None], None]] = {}
        self._flights: dict[int, _Flight] = {}
        self._summing: dict[int, Callable[[Sums], None]] = {}
        self._why_lost: str | None = None

    @property
    def num_open(self) -> int:
        """READs that are not over."""
        return len(self._flights)

    def add_peer(
        self, peer: Hashable, card: AgentCard, done: Callable[[TransferError | None], None]
    ) -> None:
        """See `NixlAgent.add_peer`. `peer` is a number."""
        self._adding[peer] = done
        self._send([Kind.ADD_PEER, peer, card.to_wire()])
        if self._why_lost is not None:
            self._later(self._added, [peer, "connect", self._why_lost])

    def lose_peer(self, peer: Hashable) -> None:
        """See `NixlAgent.lose_peer`."""
        self._adding.pop(peer, None)
        self._send([Kind.LOSE_PEER, peer])

    def read(
        self,
        peer: Hashable,
        local: Sequence[int],
        remote: Sequence[int],
        *,
        ended: Callable[[Read, ReadResult], None],
        quiet: Callable[[Read], None],
    ) -> Read:
        """See `NixlAgent.read`."""
        assert len(local) == len(remote), "as many blocks on both sides"
        read = Read(next(self._ids), peer, tuple(local), tuple(remote), ended, quiet)
        self._flights[read.read_id] = _Flight(read)
        if self._why_lost is not None:  # it was never begun
            self._later(self._fail, read.read_id, self._why_lost)
            self._later(self._quiet, read.read_id)
        else:
            blocks = pack_ints(read.local), pack_ints(read.remote)
            self._send([Kind.READ_BLOCKS, read.read_id, peer, *blocks])
        return read

    def cancel(self, read: Read) -> None:
        """See `NixlAgent.cancel`."""
        flight = self._flights.get(read.read_id)
        if flight is None:
            return
        flight.cancelled = True
        self._settle(flight)
        self._send([Kind.CANCEL_READ, read.read_id])

    def checksums(
        self, blocks: Sequence[int], parts: Sequence[KVPart], done: Callable[[Sums], None]
    ) -> None:
        """See `NixlAgent.checksums`. Never answered by a rank that is lost."""
        number = next(self._ids)
        self._summing[number] = done
        self._send([Kind.SUM_BLOCKS, number, pack_ints(tuple(blocks)), parts_to_wire(parts)])

    def reconfigure(self, window_bytes: int) -> None:
        """See `NixlAgent.reconfigure`."""
        self._send([Kind.READ_WINDOW, window_bytes])

    def close(self) -> None:
        """Ends the whole group's."""
        self._agents.close()

    def arrived(self) -> list[list[Any]]:
        """What came, on the thread that hears. Raises ChannelError, also for what no rank says."""
        messages = self._channel.arrived()
        for message in messages:
            _require_answer(message)
        return messages

    def heard(self, message: list[Any]) -> None:
        match message:
            case [Kind.PEER_ADDED, *error]:
                self._added(error)
            case [Kind.READ_ENDED, read_id, sums, error, post_s, seconds, sound]:
                self._ended(read_id, ReadResult(tuple(sums), error, post_s, seconds, sound))
            case [Kind.READ_QUIET, read_id]:
                self._quiet(read_id)
            case [_, number, sums]:
                done = self._summing.pop(number, None)
                if done is not None:
                    done([tuple(of_part) for of_part in sums])
            case _:
                raise AssertionError("checked where it arrived")

    def lost(self, reason: str) -> None:
        """The rank is gone, or this channel is. What it was reading may go on being written."""
        self._why_lost = reason
        self._summing.clear()
        for peer in list(self._adding):
            self._added([peer, "connect", reason])
        for read_id in list(self._flights):
            self._fail(read_id, reason)

    def _added(self, answer: list[Any]) -> None:
        peer, stage, error = answer
        done = self._adding.pop(peer, None)
        if done is not None:
            done(None if error is None else TransferError(error, stage=stage))

    def _fail(self, read_id: int, why: str) -> None:
        self._ended(read_id, ReadResult((), why, 0.0, 0.0))

    def _ended(self, read_id: int, result: ReadResult) -> None:
        flight = self._flights.get(read_id)
        if flight is None or flight.ended:
            return
        flight.ended = True
        self._settle(flight)
        if not flight.cancelled:
            flight.read.ended(flight.read, result)

    def _quiet(self, read_id: int) -> None:
        flight = self._flights.get(read_id)
        if flight is None or flight.quiet:
            return
        flight.quiet = True
        self._settle(flight)
        flight.read.quiet(flight.read)

    def _settle(self, flight: _Flight) -> None:
        if flight.is_over:
            self._flights.pop(flight.read.read_id, None)

    def _send(self, message: list[Any]) -> None:
        self._agents.send(self._channel, message)

    def _later(self, call: Callable[..., None], *arguments: Any) -> None:
        self._agents.tell(call, *arguments)


def _require_answer(message: list[Any]) -> None:
    """Raise ChannelError for anything that `serve_reads` does not send."""
    match message:
        case [Kind.PEER_ADDED, int(), str(), None | str()]:
            return
        case [Kind.READ_ENDED, int(), list(), None | str(), float(), float(), bool()]:
            return
        case [Kind.READ_QUIET, int()] | [Kind.BLOCK_SUMS, int(), list()]:
            return
        case _:
            raise ChannelError(f"malformed frame: kind {message[0]} on the read channel")


def serve_reads(channel: Channel, pool: KVPool, held: KVPart, owned_heads: Span) -> None:
    """The rank's side: do what the coordinator says until the channel ends."""
    try:
        _RankReads(channel, pool, held, owned_heads).run()
    except ChannelError:
        pass  # the coordinator is gone, or gave this rank up
    except Exception:
        logger.exception("READs of this rank cannot go on")
    finally:
        channel.close()


class _RankReads:
    def __init__(self, channel: Channel, pool: KVPool, held: KVPart, owned_heads: Span) -> None:
        self._channel = channel
        self._pool = pool
        self._held = held
        self._owned_heads = owned_heads
        self._reads: dict[int, Read] = {}
        self._lock = threading.Lock()
        """Of `_reads`: the agent's thread may end a READ before this one has noted it."""

    def run(self) -> None:
        message = self._channel.receive()
        if message[0] != Kind.OPEN_AGENT or len(message) != 2:
            raise ChannelError(f"malformed frame: kind {message[0]} where OPEN_AGENT was due")
        agent = NixlAgent(
            self._pool,
            _call,
            window_bytes=message[1],
            held=self._held,
            owned_heads=self._owned_heads,
        )
        try:
            card = agent.start()
        except EngineError as error:
            self._channel.send([Kind.AGENT_OPEN, None, str(error)])
            return
        try:
            self._channel.send([Kind.AGENT_OPEN, card.to_wire(), None])
            while True:
                self._obey(agent, self._channel.receive())
        finally:
            agent.close()

    def _obey(self, agent: NixlAgent, message: list[Any]) -> None:
        match message:
            case [Kind.ADD_PEER, int(peer), card]:
                self._add_peer(agent, peer, card)
            case [Kind.LOSE_PEER, int(peer)]:
                agent.lose_peer(peer)
            case [Kind.READ_BLOCKS, int(read_id), int(peer), bytes(local), bytes(remote)]:
                self._read(agent, read_id, peer, unpack_ints(local), unpack_ints(remote))
            case [Kind.CANCEL_READ, int(read_id)]:
                with self._lock:
                    read = self._reads.get(read_id)
                if read is not None:
                    agent.cancel(read)
            case [Kind.SUM_BLOCKS, int(number), bytes(blocks), parts]:
                agent.checksums(
                    unpack_ints(blocks),
                    parts_from_wire(parts),
                    lambda sums: self._say([Kind.BLOCK_SUMS, number, sums]),
                )
            case [Kind.READ_WINDOW, int(window_bytes)]:
                agent.reconfigure(window_bytes)
            case _:
                raise ChannelError(f"malformed frame: kind {message[0]} on the read channel")

    def _add_peer(self, agent: NixlAgent, peer: int, wire: list[Any]) -> None:
        def done(error: TransferError | None) -> None:
            said = ("", None) if error is None else (error.stage, str(error))
            self._say([Kind.PEER_ADDED, peer, *said])

        try:
            card = AgentCard.from_wire(wire)
        except TransferError as error:
            done(error)
        else:
            agent.add_peer(peer, card, done)

    def _read(
        self,
        agent: NixlAgent,
        read_id: int,
        peer: int,
        local: tuple[int, ...],
        remote: tuple[int, ...],
    ) -> None:
        def ended(read: Read, result: ReadResult) -> None:
            said = (result.checksums, result.error, result.post_s, result.seconds, result.sound)
            self._say([Kind.READ_ENDED, read_id, *said])

        def quiet(read: Read) -> None:
            with self._lock:
                self._reads.pop(read_id, None)
            self._say([Kind.READ_QUIET, read_id])

        with self._lock:
            self._reads[read_id] = agent.read(peer, local, remote, ended=ended, quiet=quiet)

    def _say(self, message: list[Any]) -> None:
        with contextlib.suppress(ChannelError):  # nobody is there: this process ends soon
            self._channel.send(message)


def _call(call: Callable[..., None], *arguments: Any) -> None:
    """Callbacks run on the agent's thread."""
    call(*arguments)
