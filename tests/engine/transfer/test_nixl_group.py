"""Agents of several ranks as one: a block is there, and is quiet, when all of it is."""

from __future__ import annotations

import itertools

import pytest

from engine.errors import TransferError
from engine.models.model import KVPart
from engine.transfer.nixl import AgentCard, Read, ReadResult
from engine.transfer.nixl_cut import combined
from engine.transfer.nixl_group import AgentGroup, ReplicaCard


def card(name, layers, heads, owned=None) -> AgentCard:
    return AgentCard(
        epoch=name,
        metadata=b"",
        address=0,
        block_bytes=1,
        num_blocks=8,
        block_tokens=4,
        device="cpu",
        fingerprint="f",
        layers=layers,
        heads=heads,
        owned_heads=owned or heads,
    )


class Member:
    """Keeps what it is asked until the test answers."""

    def __init__(self, its_card: AgentCard) -> None:
        self.card = its_card
        self.adding: list = []
        self.lost: list[int] = []
        self.reads: list[Read] = []
        self.cancelled: list[Read] = []
        self.summing: list = []
        self._ids = itertools.count(1)

    def add_peer(self, peer, its_card, done) -> None:
        self.adding.append((peer, its_card.epoch, done))

    def lose_peer(self, peer) -> None:
        self.lost.append(peer)

    def read(self, peer, local, remote, *, ended, quiet) -> Read:
        read = Read(next(self._ids), peer, tuple(local), tuple(remote), ended, quiet)
        self.reads.append(read)
        return read

    def cancel(self, read) -> None:
        self.cancelled.append(read)

    def checksums(self, blocks, parts, done) -> None:
        self.summing.append((tuple(blocks), list(parts), done))


TWO_RANKS = [card("a", (0, 4), (0, 1)), card("b", (0, 4), (1, 2))]
PEER = ReplicaCard("peer", (card("x", (0, 2), (0, 2)), card("y", (2, 4), (0, 2))))
"""Two stages, which each rank of the group reads from: four pieces."""


class Owner:
    """A group of two ranks that is connected, and what it was told of one READ."""

    def __init__(self) -> None:
        self.members = [Member(each) for each in TWO_RANKS]
        self.group = AgentGroup(self.members)
        self.connected: list[TransferError | None] = []
        self.ended: list[ReadResult] = []
        self.quiet: list[bool] = []
        self.group.add_peer("peer", PEER, self.connected.append)

    def connect(self) -> None:
        for member in self.members:
            for _, _, done in member.adding:
                done(None)

    def read(self) -> list[Read]:
        """Of blocks 5 and 6. Its pieces, in their order."""
        self.whole = self.group.read(
            "peer",
            [1, 2],
            [5, 6],
            ended=lambda read, result: self.ended.append(result),
            quiet=lambda read: self.quiet.append(True),
        )
        return [read for member in self.members for read in member.reads]


def land(read: Read, *sums: int | None, sound: bool = True) -> None:
    read.quiet(read)
    read.ended(read, ReadResult(sums, None, 0.25, 0.5, sound))


def fail(read: Read) -> None:
    read.ended(read, ReadResult((), "broken", 0.0, 0.0))


@pytest.fixture
def owner() -> Owner:
    return Owner()


def test_every_rank_connects_to_the_agents_that_hold_what_it_reads(owner):
    assert [[name for _, name, _ in m.adding] for m in owner.members] == [["x", "y"]] * 2
    *first, last = [done for member in owner.members for _, _, done in member.adding]
    for done in first:
        done(None)
    assert owner.connected == []
    last(None)
    assert owner.connected == [None]


def test_the_first_agent_that_cannot_be_connected_is_the_answer(owner):
    first, second, *_ = [done for member in owner.members for _, _, done in member.adding]
    error = TransferError("no", stage="connect")
    first(None)
    second(error)
    second(TransferError("too late", stage="connect"))
    first(None)
    assert owner.connected == [error]
    owner.group.lose_peer("peer")
    keys = [[peer for peer, _, _ in member.adding] for member in owner.members]
    assert [member.lost for member in owner.members] == keys


def test_a_peer_that_does_not_hold_everything_is_refused_before_anybody_connects(owner):
    answers: list = []
    owner.group.add_peer("half", ReplicaCard("half", PEER.agents[:1]), answers.append)
    (refused,) = answers
    assert refused.stage == "offer"
    assert all(len(member.adding) == 2 for member in owner.members)


def test_a_read_has_landed_when_every_piece_has(owner):
    owner.connect()
    *first, last = owner.read()
    for i, read in enumerate(first):
        land(read, i, 10 + i)
    assert (owner.ended, owner.quiet) == ([], [])
    land(last, 3, 13)
    (result,) = owner.ended
    assert result.checksums == (combined([0, 1, 2, 3]), combined([10, 11, 12, 13]))
    assert (result.error, result.sound, owner.quiet) == (None, True, [True])


def test_one_piece_that_cannot_be_summed_or_is_unsound_tells_of_the_block(owner):
    owner.connect()
    *first, last = owner.read()
    for read in first:
        land(read, 1, None)
    land(last, 1, 1, sound=False)
    (result,) = owner.ended
    assert result.checksums == (combined([1, 1, 1, 1]), None)
    assert not result.sound


def test_one_piece_that_fails_fails_the_read_and_the_others_keep_its_blocks(owner):
    owner.connect()
    first, second, third, last = owner.read()
    land(first, 1, 1)
    fail(second)
    assert [result.error for result in owner.ended] == ["broken"]
    assert [*owner.members[0].cancelled, *owner.members[1].cancelled] == [first, third, last]
    second.quiet(second)
    third.quiet(third)
    fail(last)
    assert owner.quiet == []
    last.quiet(last)
    assert (len(owner.ended), owner.quiet) == (1, [True])


def test_a_cancelled_read_is_quiet_when_every_rank_says_so(owner):
    owner.connect()
    reads = owner.read()
    owner.group.cancel(owner.whole)
    assert [read for member in owner.members for read in member.cancelled] == reads
    land(reads[0], 1, 1)  # it was on its way
    for read in reads[1:-1]:
        read.quiet(read)
    assert (owner.ended, owner.quiet) == ([], [])
    reads[-1].quiet(reads[-1])
    assert (owner.ended, owner.quiet) == ([], [True])


def test_what_is_offered_is_summed_as_it_is_read(owner):
    """One reader of everything, and one of a copy of the second head."""
    readers = [KVPart((0, 4), (0, 2)), KVPart((2, 4), (1, 2))]
    told: list = []
    owner.group.checksums([7, 8], readers, told.append)
    (left,), (right,) = (member.summing for member in owner.members)
    assert left[:2] == ((7, 8), [KVPart((0, 4), (0, 1))])
    assert right[:2] == ((7, 8), [KVPart((0, 4), (1, 2)), KVPart((2, 4), (1, 2))])
    right[2]([(3, 4), (5, 6)])
    assert told == []
    left[2]([(1, 2)])
    assert told == [(combined([1, 3, 5]), combined([2, 4, 6]))]


def test_a_card_arrives_as_it_was():
    wire = PEER.to_wire()
    as_lists = [
        wire[0],
        wire[1],
        [[list(v) if type(v) is tuple else v for v in a] for a in wire[2]],
    ]
    assert ReplicaCard.from_wire(as_lists) == PEER


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda wire: wire.__setitem__(0, 1), "version 1"),
        (lambda wire: wire.__setitem__(1, 5), "malformed"),
        (lambda wire: wire.__setitem__(2, []), "malformed"),
        (lambda wire: wire[2][0].pop(), "card version"),
        (lambda wire: wire[2][0].__setitem__(9, [3, 1]), "malformed"),
    ],
)
def test_a_card_that_is_none_is_refused(edit, said):
    wire = PEER.to_wire()
    edit(wire)
    with pytest.raises(TransferError, match=said):
        ReplicaCard.from_wire(wire)
