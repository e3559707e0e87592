"""The read channel: what a rank says reaches its owner once, and a lost rank is never quiet."""

from __future__ import annotations

import queue
import socket
import threading
from types import SimpleNamespace

import pytest

from engine.errors import ConfigError, TransferError
from engine.execution.ranks.channel import Channel, Kind
from engine.execution.ranks.reads import RankAgents
from engine.models.model import KVPart
from engine.transfer.nixl import AgentCard, ReadResult

CARD = AgentCard(
    epoch="a",
    metadata=b"m",
    address=0,
    block_bytes=1,
    num_blocks=8,
    block_tokens=4,
    device="cpu",
    fingerprint="f",
    layers=(0, 4),
    heads=(0, 2),
    owned_heads=(0, 2),
)


class Ranks:
    """The coordinator's side over channels whose other ends are the test's. Callbacks run when
    `turn` is called, as on a loop."""

    def __init__(self, num_ranks: int = 2) -> None:
        pairs = [socket.socketpair() for _ in range(num_ranks)]
        channels = [tuple(map(Channel, pair)) for pair in pairs]
        for channel in sum(channels, ()):
            channel.max_frame_bytes = 1 << 20
        self.there = [there for _, there in channels]
        self.lost: list[str] = []
        self.told: list = []
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        pool = SimpleNamespace(
            read_channels=tuple(here for here, _ in channels), on_lost=self.lost.append
        )
        self.agents = RankAgents(pool, lambda call, *args: self._inbox.put((call, args)))

    def start(self, *answers) -> None:
        for there, answer in zip(self.there, answers or [[CARD.to_wire(), None]] * 2, strict=True):
            there.send([Kind.AGENT_OPEN, *answer])
        self.members = self.agents.start(1000)
        assert [there.receive(60) for there in self.there] == [[Kind.OPEN_AGENT, 1000]] * 2

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            call, args = self._inbox.get(timeout=60)
            call(*args)

    def read(self, rank: int):
        return self.members[rank].read(
            7,
            [1, 2],
            [3, 4],
            ended=lambda read, result: self.told.append((read, result)),
            quiet=lambda read: self.told.append((read, "quiet")),
        )


@pytest.fixture
def ranks():
    made = Ranks()
    yield made
    made.agents.close()
    for there in made.there:
        there.close()


def test_a_read_is_asked_for_and_its_end_is_told(ranks):
    ranks.start()
    read = ranks.read(1)
    asked = ranks.there[1].receive(60)
    assert asked[:3] == [Kind.READ_BLOCKS, read.read_id, 7]
    ranks.there[1].send([Kind.READ_QUIET, read.read_id])
    ranks.there[1].send([Kind.READ_ENDED, read.read_id, [5, None], None, 0.25, 0.5, True])
    ranks.turn(2)
    assert ranks.told == [
        (read, "quiet"),
        (read, ReadResult((5, None), None, 0.25, 0.5, True)),
    ]
    assert ranks.members[1].num_open == 0


def test_a_cancelled_read_stays_open_until_its_rank_says_quiet(ranks):
    ranks.start()
    read = ranks.read(0)
    ranks.members[0].cancel(read)
    assert [ranks.there[0].receive(60)[0] for _ in range(2)] == [
        Kind.READ_BLOCKS,
        Kind.CANCEL_READ,
    ]
    assert ranks.members[0].num_open == 1
    ranks.there[0].send([Kind.READ_QUIET, read.read_id])
    ranks.there[0].send([Kind.READ_ENDED, read.read_id, [1, 2], None, 0.0, 0.0, True])
    ranks.turn(2)
    assert ranks.told == [(read, "quiet")]
    assert ranks.members[0].num_open == 0


def test_reads_of_a_rank_that_is_lost_fail_and_are_never_quiet(ranks):
    ranks.start()
    flying, errors, sums = ranks.read(0), [], []
    ranks.members[0].add_peer(9, CARD, errors.append)
    ranks.members[0].checksums([1], [KVPart((0, 4), (0, 2))], sums.append)
    ranks.there[0].close()
    ranks.turn(2)  # both ranks are told: the group is lost
    ((told, result),) = ranks.told
    assert told is flying
    assert result.error.startswith("the agent of rank 0 is lost")
    assert [error.stage for error in errors] == ["connect"]
    assert ranks.members[0].num_open == 1
    assert sums == []
    assert len(ranks.lost) == 1
    ranks.told.clear()
    later = ranks.read(0)  # of which nothing was begun
    ranks.turn(2)
    assert [read for read, _ in ranks.told] == [later, later]
    assert ranks.told[1][1] == "quiet"
    assert ranks.members[0].num_open == 1


@pytest.mark.parametrize(
    "said",
    [
        [Kind.READ_ENDED, 1, [], None, 0.0],
        [Kind.READ_QUIET, "x"],
        [Kind.DONE, 1, None],
        [Kind.BLOCK_SUMS, 1, 7],
    ],
)
def test_a_rank_that_says_what_no_rank_says_is_lost(ranks, said):
    ranks.start()
    ranks.there[1].send(said)
    ranks.turn(2)
    assert [reason.split(": ")[:2] for reason in ranks.lost] == [
        ["the agent of rank 1 is lost", "malformed frame"]
    ]


def test_a_connection_and_sums_are_answered_by_number(ranks):
    ranks.start()
    member, there = ranks.members[0], ranks.there[0]
    answers, sums = [], []
    for peer in (1, 2):
        member.add_peer(peer, CARD, lambda error, peer=peer: answers.append((peer, error)))
    assert there.receive(60) == [Kind.ADD_PEER, 1, [*CARD.to_wire()[:9], [0, 4], [0, 2], [0, 2]]]
    there.send([Kind.PEER_ADDED, 2, "offer", "no"])
    there.send([Kind.PEER_ADDED, 1, "", None])
    member.checksums([1, 2], [KVPart((0, 2), (0, 1))], sums.append)
    there.receive(60)
    kind, number, _, parts = there.receive(60)
    assert (kind, parts) == (Kind.SUM_BLOCKS, [[0, 2, 0, 1]])
    there.send([Kind.BLOCK_SUMS, number, [[2**64 - 1, None]]])
    ranks.turn(3)
    assert [(peer, str(error or "")) for peer, error in answers] == [(2, "no"), (1, "")]
    assert isinstance(answers[0][1], TransferError)
    assert sums == [[(2**64 - 1, None)]]


def test_a_rank_without_an_agent_is_named_with_its_reason(ranks):
    with pytest.raises(ConfigError, match="rank 1 has no agent: NIXL can't be imported"):
        ranks.start([CARD.to_wire(), None], [None, "NIXL can't be imported"])


def test_a_stuck_rank_holds_up_nobody_who_asks(ranks):
    """Its channel is full: whoever asks must not wait for it, an event loop least of all."""
    ranks.start()
    asked = threading.Event()

    def ask() -> None:
        for _ in range(2000):
            ranks.members[0].checksums(range(1000), [KVPart((0, 4), (0, 2))], ranks.told.append)
        asked.set()

    threading.Thread(target=ask, daemon=True).start()
    assert asked.wait(120)
