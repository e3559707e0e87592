"""Decode's half of READs over agents that do what a test says: keys, runs, what is lent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deployments.lifecycle import reads as reads_module
from deployments.lifecycle.reads import BlockReads
from engine.errors import TransferError
from engine.execution.pool import KVPool
from engine.models.model import KVLayout
from engine.transfer.nixl import AgentCard, ReadResult
from engine.transfer.nixl_group import GroupRead, ReplicaCard
from engine.transfer.nixl_intake import ReadIntake

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", fingerprint="f")
PAGE = 4
BLOCK_BYTES = PAGE * LAYOUT.bytes_per_token
AGENT_CARD = AgentCard(
    epoch="agent of its pool",
    metadata=b"",
    address=0,
    block_bytes=BLOCK_BYTES,
    num_blocks=20,
    block_tokens=PAGE,
    device="cpu",
    fingerprint="f",
    layers=(0, 3),
    heads=(0, 2),
    owned_heads=(0, 2),
)
CARD = ReplicaCard("agent", (AGENT_CARD,))


class FakeLink:
    peer_id = "p0"


class FakeAgents:
    """A group that connects at once, and keeps READs in flight until `land`."""

    def __init__(self) -> None:
        self.refusal: TransferError | None = None
        self.keys: list[object] = []
        self.lost: list[object] = []
        self.flying: list[GroupRead] = []

    def add_peer(self, peer, card, done) -> None:
        self.keys.append(peer)
        done(self.refusal)

    def lose_peer(self, peer) -> None:
        self.lost.append(peer)

    def read(self, peer, local: Sequence[int], remote: Sequence[int], *, ended, quiet) -> GroupRead:
        assert peer in self.keys
        assert peer not in self.lost
        read = GroupRead(tuple(local), tuple(remote), ended, quiet)
        self.flying.append(read)
        return read

    def land(self, found: int | None = 1) -> None:
        """The first READ: every byte is there."""
        read = self.flying.pop(0)
        read.quiet(read)
        read.ended(read, ReadResult((found,) * len(read.local), None, 0.0, 0.0))


class Pull:
    """What a pull says of its READs."""

    def __init__(self, reads: BlockReads, num_blocks: int) -> None:
        self._reads = reads
        blocks = tuple(range(1, 1 + num_blocks))
        self.intake = ReadIntake(
            KVPool(LAYOUT, 20, PAGE), blocks, first_token=0, num_tokens=num_blocks * PAGE
        )
        self.landed: list[tuple[int, bool]] = []
        self.failures: list[TransferError] = []

    def ready(self, link: FakeLink, entries: object = None) -> None:
        """Its blocks, or what `entries` says, are offered."""
        last = self.intake.num_tokens // PAGE
        self._reads.ready(
            link,
            CARD.epoch,
            [[i * PAGE, 19 - i, 1] for i in range(last)] if entries is None else entries,
            self.intake,
            landed=lambda num_bytes, summed: self.landed.append((num_bytes, summed)),
            failed=self.failures.append,
        )


@pytest.fixture
def agent() -> FakeAgents:
    return FakeAgents()


@pytest.fixture
def reads(agent) -> BlockReads:
    return BlockReads(agent, LAYOUT, PAGE)


@pytest.fixture
def link(reads) -> FakeLink:
    """Connected."""
    made = FakeLink()
    reads.on_agent(made, CARD.to_wire())
    return made


def test_an_agent_that_comes_back_over_another_link_has_another_key(agent, reads, link):
    reads.on_close(link)
    again = FakeLink()
    reads.on_agent(again, CARD.to_wire())
    first, second = agent.keys
    assert first != second
    assert agent.lost == [first]
    pull = Pull(reads, 1)
    pull.ready(again)
    agent.land()
    assert pull.intake.complete
    assert reads.num_connected == 1


async def test_a_link_that_is_refused_ends_no_other_links_connection(agent, reads, link):
    agent.refusal = TransferError("not over", stage="connect")
    reads.on_agent(FakeLink(), CARD.to_wire())
    first, second = agent.keys
    assert agent.lost == [second]
    assert first != second
    assert reads.epoch(link) == CARD.epoch


def test_a_long_offer_is_read_in_runs_that_are_told_one_by_one(agent, reads, link, monkeypatch):
    monkeypatch.setattr(reads_module, "RUN_BYTES", 2 * BLOCK_BYTES + 1)
    pull = Pull(reads, 7)
    pull.ready(link)
    asked, received = [len(agent.flying)], [0]
    while agent.flying:
        assert not pull.intake.complete
        agent.land()
        asked.append(len(agent.flying))
        received.append(pull.intake.received_bytes // BLOCK_BYTES)
    assert (asked, received) == ([2, 2, 2, 1, 0], [0, 2, 4, 6, 7])
    assert pull.landed == [(n * BLOCK_BYTES, True) for n in (2, 2, 2, 1)]
    assert pull.intake.complete
    assert (pull.intake.lent, reads.num_open) == (0, 0)


def test_when_the_pull_is_over_no_further_run_is_asked_for(agent, reads, link, monkeypatch):
    monkeypatch.setattr(reads_module, "RUN_BYTES", BLOCK_BYTES)
    pull, quiet = Pull(reads, 5), []
    pull.ready(link)
    pull.intake.on_quiet = lambda: quiet.append(True)
    pull.intake.close()
    agent.land()
    assert (pull.intake.lent, quiet, len(agent.flying)) == (1, [], 1)
    agent.land()
    assert (pull.intake.lent, quiet, agent.flying) == (0, [True], [])
    assert reads.num_open == 0


@pytest.mark.parametrize(("offered", "found"), [(None, 1), (1, None), (None, None)])
def test_bytes_that_one_side_cannot_sum_are_told_as_such(agent, reads, link, offered, found):
    pull = Pull(reads, 1)
    pull.ready(link, [[0, 1, offered]])
    agent.land(found)
    assert pull.landed == [(BLOCK_BYTES, False)]
    assert pull.intake.complete


@pytest.mark.parametrize(
    "entries",
    [
        [(0, 1, None), (PAGE, "x", None)],
        [(0, 1, None), ("x", 2, None)],
        [(0, 1, None), (PAGE, 2, "x")],
        [(0, 1, None), (PAGE, 2)],
        [(0, 1, None), 7],
        [(0, 1, None), (PAGE, 0, None)],
        7,
        {},
    ],
)
def test_an_offer_that_is_malformed_lends_nothing(agent, reads, link, entries):
    pull = Pull(reads, 2)
    with pytest.raises(TransferError) as refused:
        pull.ready(link, entries)
    assert refused.value.stage == "offer"
    assert (pull.intake.lent, agent.flying) == (0, [])


def test_whatever_goes_wrong_while_blocks_are_lent_they_are_all_given_back(
    agent, reads, link, monkeypatch
):
    pull = Pull(reads, 2)
    lend = pull.intake.lend

    def fails(head):
        if head.first_token:
            raise KeyError(head.first_token)
        return lend(head)

    monkeypatch.setattr(pull.intake, "lend", fails)
    with pytest.raises(TransferError, match="KeyError"):
        pull.ready(link)
    assert (pull.intake.lent, agent.flying) == (0, [])
