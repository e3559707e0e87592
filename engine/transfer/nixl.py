"""KV blocks read straight from another replica's pool into this one's, by NIXL.

One agent a pool, on a thread of its own: the library is used from that thread alone (its Python
agent has no locks) and never from an event loop. A replica of several ranks has a pool and an agent
in each (`nixl_group` makes one of them). The pool is registered once; descriptor lists (one
descriptor a block, the pool being block-major) are prepared once here and once a peer. Where both
sides cut KV heads differently a block is many descriptors (`nixl_cut`), and lists of them are made
for each READ: those of a whole pool would be tens of millions.

An agent's name is new with every process, and travels with every offer as its `epoch`: what was
offered by a process that is gone can't be read from the one that took its place.

NIXL's own notifications are not used: they come on a connection that proves nothing about its other
end, and everything they could say is said on the link, in order with everything else.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.errors import ConfigError, TransferError
from engine.models.model import KVPart
from engine.transfer.checksum import checksum
from engine.transfer.nixl_cut import block_runs, meeting, piece_bytes
from engine.transfer.nixl_reads import (
    DropPeer,
    Failed,
    Landed,
    PeerId,
    Polled,
    Post,
    Quiet,
    ReadAction,
    ReadId,
    ReadTable,
    Release,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.models.shard import Span
    from engine.transfer.memory import KVMemory

logger = logging.getLogger(__name__)

AGENT_CARD_VERSION = 2
SETTLE_S = 1.0
"""How long blocks of a READ that failed stay untouched after its endpoint was closed: what the
network card had begun ends within it."""

START_LIMIT_S = 60.0
CLOSE_LIMIT_S = 5.0
_PROGRESS_PAUSE_US = 10_000
_POLL_FIRST_S = 50e-6
_POLL_LAST_S = 1e-3
_POLL_UNWANTED_S = 20e-3
"""READs that nobody waits for are looked at this often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCard:
    """What a peer needs in order to read from this pool. Only an authenticated link carries it:
    with it anybody who reaches the agent's ports reads the whole pool."""

    epoch: str
    """Name of the agent: new with every process."""

    metadata: bytes
    """The library's own: addresses and keys of the registered memory."""

    address: int
    """Of block 0, in the memory of the process that made this card."""

    block_bytes: int
    num_blocks: int
    block_tokens: int
    device: str
    """`cpu` or `cuda:0`."""

    fingerprint: str
    """Of the model whose KV it is."""

    layers: Span
    heads: Span
    """Of the model, that this pool holds."""

    owned_heads: Span
    """Those of them that are read here; the others are copies of another rank's."""

    version: int = AGENT_CARD_VERSION

    def to_wire(self) -> list[Any]:
        return [
            self.version,
            self.epoch,
            self.metadata,
            self.address,
            self.block_bytes,
            self.num_blocks,
            self.block_tokens,
            self.device,
            self.fingerprint,
            self.layers,
            self.heads,
            self.owned_heads,
        ]

    @classmethod
    def from_wire(cls, wire: list[Any]) -> AgentCard:
        """Raises TransferError for another version or a malformed list."""
        if not wire or wire[0] != AGENT_CARD_VERSION or len(wire) != 12:
            raise TransferError(
                f"agent card version {wire[0] if wire else None}, this side speaks "
                f"{AGENT_CARD_VERSION}: run equal releases on both pools",
                stage="offer",
            )
        _, epoch, metadata, address, block_bytes, num_blocks, block_tokens, device, *model = wire
        fingerprint, layers, heads, owned_heads = model
        return cls(
            epoch=epoch,
            metadata=metadata,
            address=address,
            block_bytes=block_bytes,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            device=device,
            fingerprint=fingerprint,
            layers=_span(layers),
            heads=_span(heads),
            owned_heads=_span(owned_heads),
        )

    @property
    def held(self) -> KVPart:
        """What the pool holds."""
        return KVPart(self.layers, self.heads)

    @property
    def owned(self) -> KVPart:
        """What is read of it."""
        return KVPart(self.layers, self.owned_heads)


def _span(wire: Any) -> Span:
    match wire:
        case [int(first), int(last)] if 0 <= first <= last:
            return first, last
        case _:
            raise TransferError(f"malformed agent card: {wire!r}"[:200], stage="offer")


def require_nixl() -> None:
    """Raise ConfigError, with what to install, where NIXL can't be imported."""
    _library()


def _library() -> tuple[Any, Any]:
    """NIXL's Python API and the bindings under it. `nixl` is but a chooser between the two others,
    which come for CUDA 12 and 13 and need neither."""
    # Both write to standard output by default, which belongs to whoever runs this process.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    raises = logging.raiseExceptions
    failure: ImportError | None = None
    for package in ("nixl_cu13", "nixl_cu12"):
        try:
            with _handlers_kept():
                found = import_module(f"{package}._api"), import_module(f"{package}._bindings")
        except ImportError as error:
            if failure is None or not isinstance(error, ModuleNotFoundError):
                failure = error
            continue
        theirs = logging.getLogger("nixl")
        theirs.handlers.clear()
        theirs.propagate = True
        logging.raiseExceptions = raises  # it turns them off
        return found
    raise ConfigError(
        f"transport=nixl: NIXL can't be imported ({failure}); install it with "
        "`pip install 'tailrace[nixl]'`, or set transport: link"
    ) from failure


@contextmanager
def _handlers_kept() -> Generator[None, None, None]:
    """NIXL configures logging when it is imported, and `dictConfig` closes every handler that there
    is: a replica's own file, too, without which Serve's controller takes the replica for broken."""
    handlers: list[Any] = vars(logging)["_handlerList"]
    hidden = handlers[:]
    handlers.clear()
    try:
        yield
    finally:
        handlers[:0] = hidden


def _make_agent(name: str) -> Any:
    """An agent whose progress thread sleeps while there is nothing to do.

    `nixl_agent` fixes its pause at 0, which is a thread that never sleeps: a third of a core here.
    What there is to do wakes it in any case; the pause only bounds how long it trusts that.
    """
    api, bindings = _library()
    agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
    config = bindings.nixlAgentConfig()
    config.useProgThread, config.pthrDelay = True, _PROGRESS_PAUSE_US
    config.useListenThread, config.listenPort = False, 0
    config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
    config.captureTelemetry = False
    agent.agent = bindings.nixlAgent(name, config)
    agent.create_backend("UCX")
    return agent


@dataclass(frozen=True, slots=True)
class ReadResult:
    """How a READ ended, for its owner. Exactly one a READ, unless it was cancelled before."""

    checksums: tuple[int | None, ...]
    """Of what was read of each block that landed, in the order asked for; empty when it failed.
    None where nobody can compute one: in the memory of a device."""

    error: str | None
    post_s: float
    """Time the library took to post it."""

    seconds: float
    """From the post to the last byte."""

    sound: bool = True
    """Every scale that was read is one that codes can have, as far as this side can see."""


@dataclass(slots=True, eq=False)
class Read:
    """A READ as its owner holds it."""

    read_id: ReadId
    peer: PeerId
    local: tuple[int, ...]
    remote: tuple[int, ...]
    ended: Callable[[Read, ReadResult], None]
    quiet: Callable[[Read], None]
    """Called once: nothing writes into the blocks any more. Before `ended` when they landed, some
    time after it, or after a cancel, when not."""

    # What follows is the agent's thread's alone.
    handle: Any = None
    num_bytes: int = 0
    posted_s: float = 0.0
    post_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Side:
    """Where the bytes of each block lie that are read, here or there."""

    address: int
    block_bytes: int
    kind: str
    device: int
    runs: NDArray[np.int64]
    """See `block_runs`."""

    def rows(self, blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
        """`[descriptors, 3]`: address, length and device. NumPy, because NIXL takes a list of
        tuples element by element (vllm#48209)."""
        import numpy as np

        rows = np.empty((len(blocks), len(self.runs), 3), dtype=np.uint64)
        starts = self.address + blocks * self.block_bytes
        rows[:, :, 0] = (starts[:, None] + self.runs[:, 0]).astype(np.uint64)
        rows[:, :, 1] = self.runs[:, 1].astype(np.uint64)
        rows[:, :, 2] = self.device
        return np.reshape(rows, (-1, 3))


@dataclass(slots=True)
class _Peer:
    name: str
    piece: KVPart
    """What is read of its blocks, in the model's own numbering."""

    piece_bytes: int
    here: _Side
    there: _Side
    local: Any = None
    """Prepared descriptor lists of both pools; None where a block is many descriptors."""

    blocks: Any = None


@dataclass(slots=True)
class AgentCounters:
    """Totals since start. Written by the agent's thread."""

    posts: int = 0
    post_s: float = 0.0
    bytes_landed: int = 0
    failures: int = 0
    peers: dict[PeerId, str] = field(default_factory=lambda: dict[PeerId, str]())


class NixlAgent:
    """The agent's thread. Its methods may be called from any thread and return at once.

    `deliver` carries every callback to the thread that owns the requests (an event loop's
    `call_soon_threadsafe`). `start` blocks until the pool is registered.
    """

    def __init__(
        self,
        pool: KVMemory,
        deliver: Callable[..., Any],
        *,
        window_bytes: int,
        settle_s: float = SETTLE_S,
        held: KVPart | None = None,
        owned_heads: Span | None = None,
    ) -> None:
        """`held`: what part of the model's KV the pool holds, and `owned_heads` those of its heads
        that are read here. None: all."""
        layout = pool.layout
        self.counters = AgentCounters()
        self._held = held or KVPart((0, layout.num_layers), (0, layout.num_kv_heads))
        self._owned_heads = owned_heads or self._held.heads
        self._pool = pool
        self._deliver = deliver
        self._table = ReadTable(window_bytes=window_bytes, settle_s=settle_s)
        self._reads: dict[ReadId, Read] = {}
        self._peers: dict[PeerId, _Peer] = {}
        self._ids = itertools.count(1)
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._card: AgentCard | None = None
        self._thread = threading.Thread(target=self._run, name="nixl", daemon=True)
        # The library's, all of them the thread's alone.
        self._agent: Any = None
        self._local: dict[tuple[int, int], Any] = {}
        """Prepared descriptor lists of the own pool, by the run of each block that is read into."""

        self._registered: Any = None
        self._on_host = True

    # For owners

    def start(self) -> AgentCard:
        """Make the agent and register the pool. Raises ConfigError where that can't be done."""
        require_nixl()
        self._thread.start()
        if not self._ready.wait(START_LIMIT_S):
            raise ConfigError(
                f"transport=nixl: the agent did not start within {START_LIMIT_S:g} s; "
                "set transport: link"
            )
        if self._error is not None:
            raise ConfigError(
                f"transport=nixl: the pool could not be registered ({self._error}); see the UCX "
                "messages above, or set transport: link"
            ) from self._error
        return self.card

    @property
    def card(self) -> AgentCard:
        assert self._card is not None, "the agent has not started"
        return self._card

    def add_peer(
        self, peer: PeerId, card: AgentCard, done: Callable[[TransferError | None], None]
    ) -> None:
        """Connect to a peer, prepare its descriptors and read a few bytes, so that the first
        request finds everything warm. `peer` names this connection, and must be new with each:
        what was read over one may settle while the next is made. `lose_peer` forgets it."""
        self._do(lambda: self._add_peer(peer, card, done))

    def lose_peer(self, peer: PeerId) -> None:
        """The peer is gone. What is in flight from it is watched to its end."""
        self._do(lambda: self._act(self._table.lose_peer(peer, time.monotonic())))

    def read(
        self,
        peer: PeerId,
        local: Sequence[int],
        remote: Sequence[int],
        *,
        ended: Callable[[Read, ReadResult], None],
        quiet: Callable[[Read], None],
    ) -> Read:
        """Copy the peer's blocks `remote`, or what part of them this pool holds, over the blocks
        `local`, in order."""
        assert len(local) == len(remote), "as many blocks on both sides"
        read = Read(next(self._ids), peer, tuple(local), tuple(remote), ended, quiet)

        def submit() -> None:
            known = self._peers.get(peer)
            read.num_bytes = 0 if known is None else len(local) * known.piece_bytes
            self._reads[read.read_id] = read
            self._act(self._table.submit(read.read_id, peer, read.num_bytes))

        self._do(submit)
        return read

    def cancel(self, read: Read) -> None:
        """`ended` may still come if it was on its way; `quiet` comes in any case."""
        self._do(lambda: self._act(self._table.cancel(read.read_id)))

    def checksums(
        self,
        blocks: Sequence[int],
        parts: Sequence[KVPart],
        done: Callable[[list[tuple[int | None, ...]]], None],
    ) -> None:
        """Of parts of blocks of this pool, computed off the caller's thread: for each part those of
        all blocks. None for each in the memory of a device."""
        chosen, wanted = tuple(blocks), tuple(parts)
        self._do(lambda: self._tell(done, [self._checksums(chosen, part) for part in wanted]))

    def reconfigure(self, window_bytes: int) -> None:
        self._table.window_bytes = window_bytes

    @property
    def num_open(self) -> int:
        """READs that are not over: queued, in flight or settling."""
        return len(self._reads)

    def close(self) -> None:
        """End the thread. READs in flight are given up: the process is about to end."""
        self._closing = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_LIMIT_S)

    # The thread

    def _do(self, command: Callable[[], None]) -> None:
        self._inbox.append(command)
        self._wake.set()

    def _run(self) -> None:
        try:
            self._open()
        except BaseException as error:
            self._error = error
            return
        finally:
            self._ready.set()
        pause_s: float | None = None
        while not self._closing:
            self._wake.wait(pause_s)
            self._wake.clear()
            busy = bool(self._inbox)
            while self._inbox:
                command = self._inbox.popleft()
                try:
                    command()
                except Exception:
                    logger.exception("a command of the NIXL agent failed")
            try:
                busy |= self._poll()
            except Exception:
                logger.exception("looking at READs failed")
            pause_s = self._pause(pause_s, busy)
        self._shut()

    def _pause(self, last_s: float | None, busy: bool) -> float | None:
        """How long to sleep: READs end without waking anybody, so they are looked at often when
        something happens and ever less while nothing does."""
        if not self._reads:
            return None
        if not any(wanted for _, wanted in self._table.flying()):
            return _POLL_UNWANTED_S
        if busy or last_s is None:
            return _POLL_FIRST_S
        return min(2 * last_s, _POLL_LAST_S)

    def _poll(self) -> bool:
        """Look at every READ in flight. True if one ended."""
        ended = False
        for read_id, _ in self._table.flying():
            state = self._state(self._reads[read_id])
            if state is not Polled.PROC:
                ended = True
                self._act(self._table.posted(read_id, state, time.monotonic()))
        if self._table.num_settling:
            self._act(self._table.tick(time.monotonic()))
        return ended

    def _act(self, actions: Iterable[ReadAction]) -> None:
        left = deque(actions)
        while left:
            match left.popleft():
                case Post(read_id):
                    state = self._post(self._reads[read_id])
                    left.extend(self._table.posted(read_id, state, time.monotonic()))
                case Landed(read_id):
                    self._landed(self._reads.pop(read_id))
                case Failed(read_id, why):
                    self.counters.failures += 1
                    read = self._reads[read_id]
                    result = ReadResult((), why, read.post_s, 0.0)
                    self._tell(read.ended, read, result)
                case Quiet(read_id):
                    read = self._reads.pop(read_id)
                    self._tell(read.quiet, read)
                case Release(read_id):
                    self._release(self._reads[read_id])
                case DropPeer(peer):
                    self._drop(peer)

    def _landed(self, read: Read) -> None:
        seconds = time.monotonic() - read.posted_s
        self.counters.bytes_landed += read.num_bytes
        # Here and not where it is told: that is an event loop.
        piece = self._peers[read.peer].piece
        sums, sound = self._checksums(read.local, piece), self._sound(read.local, piece)
        result = ReadResult(sums, None, read.post_s, seconds, sound)
        self._tell(read.quiet, read)
        self._tell(read.ended, read, result)

    def _tell(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self._deliver(call, *arguments)
        except RuntimeError as error:  # the loop is closed: nobody is there to be told
            logger.debug("not told: %s", error)

    def _checksums(self, blocks: Sequence[int], piece: KVPart) -> tuple[int | None, ...]:
        if not self._on_host:
            return (None,) * len(blocks)
        return tuple(checksum(self._payload(block, piece)) for block in blocks)

    def _sound(self, blocks: Sequence[int], piece: KVPart) -> bool:
        """Whether scales of codes that were read are such; True of what a device keeps."""
        pool = self._pool
        if not self._on_host or not pool.layout.coded:
            return True
        shape = piece.layers[1] - piece.layers[0], piece.heads[1] - piece.heads[0]
        return all(pool.has_sound_scales(self._payload(block, piece), *shape) for block in blocks)

    def _payload(self, block: int, piece: KVPart) -> memoryview:
        """Those bytes of a block in wire order, where they lie if they lie together."""
        first_layer, first_head = self._held.layers[0], self._held.heads[0]
        layers = piece.layers[0] - first_layer, piece.layers[1] - first_layer
        heads = piece.heads[0] - first_head, piece.heads[1] - first_head
        pool = self._pool
        payload = pool.piece(block, layers, heads)
        if payload is None:
            payload = pool.gather(block, 0, pool.block_tokens, *layers, heads)
        return payload

    # The library

    def _open(self) -> None:
        import torch

        from engine.execution.pool import KVPool

        pool = self._pool
        if not isinstance(pool, KVPool):
            raise ConfigError("ranks keep a pool each, and each needs an agent of its own")
        data = pool.data
        self._on_host = data.device.type == "cpu"
        if not self._on_host:
            torch.cuda.set_device(data.device)  # of this thread
        block_bytes = data[0].numel() * data.element_size()
        epoch = f"tailrace-{uuid.uuid4().hex}"
        agent = self._agent = _make_agent(epoch)
        self._registered = agent.register_memory(data)
        self._card = AgentCard(
            epoch=epoch,
            metadata=agent.get_agent_metadata(),
            address=data.data_ptr(),
            block_bytes=block_bytes,
            num_blocks=pool.num_blocks,
            block_tokens=pool.block_tokens,
            device=str(data.device),
            fingerprint=pool.layout.fingerprint,
            layers=self._held.layers,
            heads=self._held.heads,
            owned_heads=self._owned_heads,
        )
        # What is read by a replica that is cut alike, before the first of them is there.
        self._local_list(self._side(self.card, self._held, whole=True))

    def _side(self, card: AgentCard, piece: KVPart, *, whole: bool) -> _Side:
        layout, page = self._pool.layout, self._pool.block_tokens
        runs = block_runs(card.held, piece, layout, page, whole=whole)
        return _Side(card.address, card.block_bytes, *_place(card.device), runs)

    def _local_list(self, side: _Side) -> Any:
        """Prepared once for every cut that a peer may have."""
        import numpy as np

        ((offset, length),) = side.runs.tolist()
        prepared = self._local.get((offset, length))
        if prepared is None:
            rows = side.rows(np.arange(self._pool.num_blocks, dtype=np.int64))
            prepared = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows, side.kind)
            self._local[offset, length] = prepared
        return prepared

    def _fitting(self, card: AgentCard) -> KVPart:
        """What is read of a peer's blocks. Raises TransferError where they do not fit these."""
        ours, layout = self.card, self._pool.layout
        if card.fingerprint != ours.fingerprint:
            raise TransferError(
                f"KV of model {card.fingerprint}, here it is of {ours.fingerprint}: it comes over "
                "the link instead",
                stage="offer",
            )
        if card.block_tokens != ours.block_tokens:
            raise TransferError(
                f"blocks of {card.block_tokens} tokens, here they have {ours.block_tokens}: KV "
                "comes over the link instead, which cuts it by token; for READs give both pools "
                "one block_tokens",
                stage="offer",
            )
        expected = piece_bytes(card.held, layout, card.block_tokens)
        if card.block_bytes != expected:
            raise TransferError(
                f"blocks of {card.block_bytes} bytes, {expected} are what {card.held} has here: KV "
                "comes over the link instead",
                stage="offer",
            )
        piece = meeting(self._held, card.owned)
        if piece is None:
            raise TransferError(
                f"{card.owned} is offered, and {self._held} read here: nothing of it",
                stage="offer",
            )
        return piece

    def _add_peer(
        self, peer: PeerId, card: AgentCard, done: Callable[[TransferError | None], None]
    ) -> None:
        import numpy as np

        agent = self._agent
        try:
            piece = self._fitting(card)
        except TransferError as error:
            self._tell(done, error)
            return
        if any(known.name == card.epoch for known in self._peers.values()):
            # Dropping the old connection would take the new one's keys along.
            error = TransferError("READs of its last connection are not over", stage="connect")
            self._tell(done, error)
            return
        name, blocks, local = "", None, None
        whole = piece.heads == self._held.heads == card.heads
        here, there = (self._side(c, piece, whole=whole) for c in (self.card, card))
        try:
            answered: bytes | str = agent.add_remote_agent(card.metadata)
            name = answered.decode() if isinstance(answered, bytes) else answered
            if name != card.epoch:
                raise TransferError(
                    f"agent {name!r} answers where {card.epoch!r} was announced", stage="offer"
                )
            agent.make_connection(name)
            if whole:
                local = self._local_list(here)
                rows = there.rows(np.arange(card.num_blocks, dtype=np.int64))
                blocks = agent.prep_xfer_dlist(name, rows, there.kind)
            self._table.add_peer(peer)
        except Exception as error:
            if blocks is not None:
                self._release_blocks(name, blocks)
            if name:
                self._forget_agent(name)
            self._tell(done, _as_transfer_error(error))
            return
        size = piece_bytes(piece, self._pool.layout, card.block_tokens)
        self._peers[peer] = _Peer(name, piece, size, here, there, local, blocks)
        if not whole:
            logger.warning(
                "a block of %s is read in %d runs, %d bytes in all, since both sides share out KV "
                "heads differently: equal tensor_parallel reads one run, transport: link packs",
                name,
                len(here.runs),
                size,
            )
        self.counters.peers[peer] = name

        def warm(read: Read, result: ReadResult) -> None:
            failed = None if result.error is None else TransferError(result.error, stage="connect")
            done(failed)

        # Block 0 holds padding on both sides and is nobody's.
        self.read(peer, (0,), (0,), ended=warm, quiet=lambda read: None)

    def _post(self, read: Read) -> Polled:
        peer, agent = self._peers[read.peer], self._agent
        import numpy as np

        read.posted_s = began = time.monotonic()
        try:
            if peer.blocks is None:
                ours, theirs = (
                    agent.get_xfer_descs(side.rows(np.asarray(blocks, dtype=np.int64)), side.kind)
                    for side, blocks in ((peer.here, read.local), (peer.there, read.remote))
                )
                read.handle = agent.initialize_xfer("READ", ours, theirs, peer.name)
            else:
                read.handle = agent.make_prepped_xfer(
                    "READ",
                    peer.local,
                    np.asarray(read.local, dtype=np.int32),
                    peer.blocks,
                    np.asarray(read.remote, dtype=np.int32),
                )
            state = Polled(agent.transfer(read.handle))
        except Exception as error:
            logger.warning("READ from %s could not be posted: %s", peer.name, error)
            state = Polled.ERR
        read.post_s = time.monotonic() - began
        self.counters.posts += 1
        self.counters.post_s += read.post_s
        return state

    def _state(self, read: Read) -> Polled:
        try:
            return Polled(self._agent.check_xfer_state(read.handle))
        except Exception as error:
            logger.warning("READ from %s failed: %s", self._peers[read.peer].name, error)
            return Polled.ERR

    def _release(self, read: Read) -> None:
        handle, read.handle = read.handle, None
        if handle is None:
            return
        try:
            handle.release()
        except Exception as error:
            logger.warning("the handle of a READ could not be released: %s", error)

    def _drop(self, peer_id: PeerId) -> None:
        peer = self._peers.pop(peer_id)
        self.counters.peers.pop(peer_id, None)
        if peer.blocks is not None:
            self._release_blocks(peer.name, peer.blocks)
        self._forget_agent(peer.name)

    def _release_blocks(self, name: str, blocks: Any) -> None:
        try:
            blocks.release()
        except Exception as error:
            logger.warning("descriptors of %s could not be released: %s", name, error)

    def _forget_agent(self, name: str) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            logger.warning("agent %s could not be forgotten: %s", name, error)

    def _shut(self) -> None:
        if self._table.num_flying:
            # What flies writes into the pool and needs the library: both stay until the process
            # ends, which is about to.
            _KEPT.append((self._agent, self._pool, self._reads))
            return
        for peer_id in list(self._peers):
            self._drop(peer_id)
        try:
            for prepared in self._local.values():
                prepared.release()
            self._agent.deregister_memory(self._registered)
        except Exception as error:
            logger.warning("the NIXL agent did not end cleanly: %s", error)
        self._local.clear()
        self._registered = self._agent = None


_KEPT: list[Any] = []


def _place(device: str) -> tuple[str, int]:
    """Memory kind and device number, as NIXL names them."""
    kind, _, number = device.partition(":")
    return ("VRAM" if kind == "cuda" else "DRAM"), int(number or 0)


def _as_transfer_error(error: Exception) -> TransferError:
    if isinstance(error, TransferError):
        return error
    return TransferError(f"no NIXL connection: {type(error).__name__}: {error}", stage="connect")
