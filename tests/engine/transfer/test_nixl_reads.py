"""When a READ may be posted and when its blocks are free again, without a library."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import ConfigError
from engine.transfer.nixl_reads import (
    DropPeer,
    Failed,
    Landed,
    Polled,
    Post,
    Quiet,
    ReadTable,
    Release,
)

SETTLE_S = 1.0


@pytest.fixture
def table() -> ReadTable:
    made = ReadTable(window_bytes=100, settle_s=SETTLE_S)
    made.add_peer("p")
    return made


def test_a_read_is_posted_at_once_and_lands(table):
    assert table.submit(1, "p", 60) == [Post(1)]
    assert table.posted(1, Polled.PROC, 0.0) == []
    assert table.posted(1, Polled.DONE, 0.0) == [Release(1), Landed(1)]
    assert (table.num_flying, table.flying_bytes) == (0, 0)
    table.check()


def test_what_does_not_fit_the_window_waits_in_order(table):
    assert table.submit(1, "p", 60) == [Post(1)]
    assert table.submit(2, "p", 60) == []
    assert table.submit(3, "p", 10) == []  # it would fit, and would starve the one before it
    assert table.posted(1, Polled.DONE, 0.0) == [Release(1), Landed(1), Post(2), Post(3)]
    table.check()


def test_a_read_larger_than_the_window_flies_alone(table):
    assert table.submit(1, "p", 500) == [Post(1)]
    assert table.submit(2, "p", 1) == []
    table.check()


def test_cancelled_before_its_post_it_is_quiet_at_once(table):
    table.submit(1, "p", 60)
    table.submit(2, "p", 60)
    assert table.cancel(2) == [Quiet(2)]
    assert table.posted(1, Polled.DONE, 0.0) == [Release(1), Landed(1)]
    table.check()


def test_cancelled_in_flight_it_is_quiet_only_when_the_library_has_ended_it(table):
    table.submit(1, "p", 60)
    assert table.cancel(1) == []
    assert table.flying() == [(1, False)]
    assert table.posted(1, Polled.PROC, 50.0) == []
    assert table.posted(1, Polled.DONE, 60.0) == [Release(1), Quiet(1)]


def test_cancelled_after_its_end_nothing_happens(table):
    table.submit(1, "p", 60)
    table.posted(1, Polled.DONE, 0.0)
    assert table.cancel(1) == []


def test_an_error_ends_the_peer_and_its_blocks_settle_before_they_are_quiet(table):
    table.submit(1, "p", 60)
    table.submit(2, "p", 60)
    actions = table.posted(1, Polled.ERR, 5.0)
    assert actions[:2] == [Release(1), Failed(1, "the transfer library reports an error")]
    assert actions[2:] == [Failed(2, "its peer failed"), Quiet(2), DropPeer("p")]
    assert table.tick(5.9) == []
    assert table.tick(6.0) == [Quiet(1)]
    assert not table.knows("p")
    table.check()


def test_a_failing_peer_is_dropped_only_when_none_of_its_reads_flies(table):
    table.submit(1, "p", 40)
    table.submit(2, "p", 40)
    assert DropPeer("p") not in table.posted(1, Polled.ERR, 5.0)
    assert table.tick(100.0) == []  # read 1 shares an endpoint with read 2, which still flies
    assert table.posted(2, Polled.DONE, 200.0) == [Release(2), Landed(2), DropPeer("p")]
    assert table.tick(201.0) == [Quiet(1)]


def test_a_lost_peer_posts_nothing_more_and_its_flight_is_watched(table):
    table.submit(1, "p", 60)
    table.submit(2, "p", 60)
    assert table.lose_peer("p", 0.0) == [Failed(2, "its peer is gone"), Quiet(2)]
    assert table.submit(3, "p", 1) == [Failed(3, "its peer is gone"), Quiet(3)]
    assert table.flying() == [(1, True)]
    assert table.posted(1, Polled.DONE, 9.0) == [Release(1), Landed(1), DropPeer("p")]
    assert table.lose_peer("p", 9.0) == []


def test_an_idle_peer_that_is_lost_is_dropped_once(table):
    assert table.lose_peer("p", 0.0) == [DropPeer("p")]
    assert table.lose_peer("p", 0.0) == []


def test_one_peers_failure_lets_another_one_post(table):
    table.add_peer("q")
    table.submit(1, "p", 100)
    table.submit(2, "q", 100)
    assert table.posted(1, Polled.ERR, 0.0)[-1] == Post(2)


def test_a_window_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="window_bytes=0"):
        ReadTable(window_bytes=0, settle_s=1.0)


class Reads(RuleBasedStateMachine):
    """Any order of calls: no READ is told free while the library may write, none is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ReadTable(window_bytes=100, settle_s=SETTLE_S)
        self.now = 0.0
        self.count = 0
        self.peers: set[int] = set()
        self.dropped_at: dict[int, float] = {}
        self.peer_of: dict[int, int] = {}
        self.writing: set[int] = set()
        self.errored: set[int] = set()
        self.told: dict[int, list[str]] = {}
        self.cancelled: set[int] = set()

    def take(self, actions) -> None:
        for action in actions:
            match action:
                case Post(read):
                    self.writing.add(read)
                case Landed(read):
                    assert read not in self.writing
                    self.told[read].append("landed")
                case Failed(read, _):
                    self.told[read].append("failed")
                case Quiet(read):
                    assert read not in self.writing, "told quiet while it is being written"
                    if read in self.errored:
                        dropped = self.dropped_at[self.peer_of[read]]
                        assert self.now >= dropped + SETTLE_S
                    self.told[read].append("quiet")
                case DropPeer(peer):
                    assert peer not in self.dropped_at, "dropped twice"
                    assert all(self.peer_of[r] != peer for r in self.writing)
                    self.dropped_at[peer] = self.now
                case Release(read):
                    assert read not in self.writing

    @rule()
    def peer(self) -> None:
        self.count += 1
        self.peers.add(self.count)
        self.table.add_peer(self.count)

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), size=st.sampled_from([1, 30, 60, 150]))
    def submit(self, data, size) -> None:
        self.count += 1
        peer = data.draw(st.sampled_from(sorted(self.peers)))
        self.peer_of[self.count] = peer
        self.told[self.count] = []
        self.take(self.table.submit(self.count, peer, size))

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), state=st.sampled_from(list(Polled)))
    def poll(self, data, state) -> None:
        read = data.draw(st.sampled_from(sorted(self.writing)))
        if state is not Polled.PROC:
            self.writing.discard(read)
            if state is Polled.ERR:
                self.errored.add(read)
        self.take(self.table.posted(read, state, self.now))

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        read = data.draw(st.sampled_from(sorted(self.told)))
        self.cancelled.add(read)
        self.take(self.table.cancel(read))

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def lose(self, data) -> None:
        peer = data.draw(st.sampled_from(sorted(self.peers)))
        self.take(self.table.lose_peer(peer, self.now))

    @rule(dt=st.sampled_from([0.3, 1.0, 5.0]))
    def wait(self, dt) -> None:
        self.now += dt
        self.take(self.table.tick(self.now))

    @invariant()
    def holds(self) -> None:
        self.table.check()
        for told in self.told.values():
            assert told in ([], ["landed"], ["failed"], ["failed", "quiet"], ["quiet"])

    def teardown(self) -> None:
        while self.writing:
            for read in sorted(self.writing):
                self.writing.discard(read)
                self.take(self.table.posted(read, Polled.DONE, self.now))
        for peer in self.peers:
            self.take(self.table.lose_peer(peer, self.now))
        self.now += SETTLE_S
        self.take(self.table.tick(self.now))
        for read, told in self.told.items():
            assert told, f"nobody heard how READ {read} ended"
            assert read in self.cancelled or told[0] in ("landed", "failed")
        assert (self.table.num_flying, self.table.num_queued, self.table.num_settling) == (0, 0, 0)


TestReads = Reads.TestCase
TestReads.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
