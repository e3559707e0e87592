"""READs between two processes on host memory: the bytes, every way they end, and what is left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("nixl_cu12", reason="install the extra: pip install 'tailrace[nixl]'")

from nixl_source import Source, block_sum, make_pool

from engine.errors import TransferError
from engine.transfer.nixl import AgentCard, NixlAgent, Read, ReadResult

NUM_BLOCKS = 256
"""256 KiB each."""


class Reader:
    """An agent whose callbacks run here, in the order they came."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, window_bytes: int = 1 << 30) -> None:
        self.pool = make_pool(num_blocks, None)
        self.ended: dict[int, ReadResult] = {}
        self.quiet: set[int] = set()
        self.said = threading.Condition()
        self.agent = NixlAgent(self.pool, self._deliver, window_bytes=window_bytes, settle_s=0.2)
        self.agent.start()

    def _deliver(self, call, *args) -> None:
        with self.said:
            call(*args)
            self.said.notify_all()

    def until(self, true: Callable[[], object], limit_s: float = 240.0) -> None:
        deadline = time.monotonic() + limit_s
        with self.said:
            while not true():
                assert time.monotonic() < deadline, "nothing came"
                self.said.wait(0.02)  # counters change without a word

    def connect(self, card: AgentCard) -> TransferError | None:
        answers: list[TransferError | None] = []
        self.agent.add_peer(card.epoch, card, answers.append)
        self.until(lambda: answers)
        return answers[0]

    def read(self, card: AgentCard, local, remote) -> Read:
        def ended(read: Read, result: ReadResult) -> None:
            self.ended[read.read_id] = result

        return self.agent.read(
            card.epoch, local, remote, ended=ended, quiet=lambda r: self.quiet.add(r.read_id)
        )

    def result(self, read: Read) -> ReadResult:
        self.until(lambda: read.read_id in self.ended)
        return self.ended[read.read_id]

    def until_quiet(self, read: Read) -> None:
        self.until(lambda: read.read_id in self.quiet)


@pytest.fixture(params=["tcp", "all"])
def transport(request, monkeypatch) -> str:
    """With TCP alone the source's own process answers each READ; else the kernel or a card may."""
    monkeypatch.setenv("UCX_TLS", request.param)
    return request.param


@pytest.fixture
def tcp(monkeypatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture(scope="module")
def sources() -> Iterator[dict[tuple[str, int], Source]]:
    """By UCX transports and seed: a process that survived a test serves the next one."""
    made: dict[tuple[str, int], Source] = {}
    yield made
    for each in made.values():
        each.close()


@pytest.fixture
def source(sources) -> Callable[..., Source]:
    def make(seed: int = 1) -> Source:
        key = (os.environ["UCX_TLS"], seed)
        old = sources.get(key)
        if old is not None and old.process.poll() is not None:
            old.close()
            old = None
        if old is None:
            sources[key] = Source(NUM_BLOCKS, seed)
        sources[key].go_on()  # a test that failed may have left it stopped
        return sources[key]

    return make


@pytest.fixture
def reader() -> Iterator[Callable[..., Reader]]:
    made: list[Reader] = []

    def make(**options) -> Reader:
        made.append(Reader(**options))
        return made[-1]

    yield make
    for each in made:
        each.agent.close()
        assert not each.agent._thread.is_alive()


def test_blocks_arrive_as_they_were_and_no_other_is_touched(transport, source, reader):
    there, here = source(), reader()
    assert here.connect(there.card) is None
    remote, local = [5, 9, 1, 255], [7, 2, 60, 8]
    result = here.result(here.read(there.card, local, remote))
    assert result.error is None
    sent = [there.sum(block) for block in remote]
    assert sent == [block_sum(here.pool, block) for block in local]
    others = [block for block in range(1, NUM_BLOCKS) if block not in local]
    assert not here.pool.data[others].any()
    assert here.agent.num_open == 0


def test_a_thousand_reads_leave_nothing_behind(tcp, source, reader):
    there, here = source(), reader(window_bytes=8 << 18)
    here.connect(there.card)
    reads = [here.read(there.card, [i % 60 + 1], [i % 50 + 1]) for i in range(1000)]
    here.until(lambda: len(here.ended) == 1000)
    assert all(result.error is None for result in here.ended.values())
    here.until(lambda: all(read.read_id in here.quiet for read in reads))
    assert here.agent.num_open == 0
    assert here.agent.counters.bytes_landed == 1001 * there.card.block_bytes  # and the first one


def test_cancelled_before_its_post_it_never_writes(tcp, source, reader):
    there, here = source(), reader(window_bytes=1)
    here.connect(there.card)
    there.stop()
    first = here.read(there.card, [1], [1])
    second = here.read(there.card, [2], [2])
    here.agent.cancel(second)
    here.until_quiet(second)
    there.go_on()
    assert here.result(first).error is None
    assert not here.pool.data[2].any()
    assert second.read_id not in here.ended


def test_cancelled_in_flight_its_blocks_are_quiet_only_when_it_has_ended(tcp, source, reader):
    there, here = source(), reader()
    here.connect(there.card)
    blocks = list(range(1, NUM_BLOCKS))
    there.stop()
    read = here.read(there.card, blocks, blocks)
    here.until(lambda: here.agent.counters.posts == 2)
    here.agent.cancel(read)
    time.sleep(0.3)
    assert read.read_id not in here.quiet
    assert here.agent.num_open == 1
    there.go_on()
    here.until_quiet(read)
    assert read.read_id not in here.ended
    here.pool.data.zero_()
    time.sleep(0.3)
    assert not here.pool.data.any(), "written after it was told quiet"
    assert here.agent.num_open == 0


def test_cancelled_after_its_end_nothing_comes(tcp, source, reader):
    there, here = source(), reader()
    here.connect(there.card)
    read = here.read(there.card, [1], [1])
    here.until_quiet(read)
    here.agent.cancel(read)
    assert here.result(here.read(there.card, [2], [2])).error is None
    assert len(here.quiet) == 2


def test_a_peer_killed_in_the_middle_fails_the_read_and_frees_its_blocks(transport, source, reader):
    dies, lives, here = source(), source(seed=2), reader()
    assert here.connect(dies.card) is None
    assert here.connect(lives.card) is None
    blocks = list(range(1, NUM_BLOCKS))
    dies.stop()
    reads = [here.read(dies.card, blocks, blocks) for _ in range(2)]
    here.until(lambda: here.agent.counters.posts >= 3)
    dies.kill()
    here.agent.lose_peer(dies.card.epoch)  # the link tells of it
    results = [here.result(read) for read in reads]
    if transport == "tcp":
        assert results[0].error is not None
    for read in reads:
        here.until_quiet(read)
    here.pool.data.zero_()
    assert here.result(here.read(lives.card, [3], [4])).error is None
    assert block_sum(here.pool, 3) == lives.sum(4)
    others = [block for block in blocks if block != 3]
    assert not here.pool.data[others].any(), "written after it was told quiet"
    assert here.agent.num_open == 0
    assert list(here.agent.counters.peers) == [lives.card.epoch]


def test_a_stopped_peer_holds_up_nobody_elses_reads(tcp, source, reader):
    hangs, lives, here = source(), source(seed=2), reader()
    here.connect(hangs.card)
    here.connect(lives.card)
    hangs.stop()
    held = here.read(hangs.card, [1], [1])
    here.until(lambda: here.agent.counters.posts == 3)
    here.agent.lose_peer(hangs.card.epoch)
    assert here.result(here.read(lives.card, [2], [2])).error is None
    assert block_sum(here.pool, 2) == lives.sum(2)
    refused = here.result(here.read(hangs.card, [3], [3]))
    assert refused.error == "its peer is gone"
    assert held.read_id not in here.quiet
    hangs.go_on()
    here.until_quiet(held)


def test_a_peer_that_was_restarted_is_another_one(tcp, source, reader):
    old, here = source(seed=1), reader()
    assert here.connect(old.card) is None
    old.kill()
    new = source(seed=1)
    assert new.card.epoch != old.card.epoch
    here.agent.lose_peer(old.card.epoch)
    assert here.connect(new.card) is None
    stale = here.result(here.read(old.card, [1], [1]))
    assert stale.error == "its peer is gone"
    assert not here.pool.data[1].any()
    assert here.result(here.read(new.card, [2], [2])).error is None
    assert block_sum(here.pool, 2) == new.sum(2)


def test_blocks_of_another_model_are_refused(tcp, source, reader):
    there, here = source(), reader()
    other = AgentCard.from_wire(
        [*there.card.to_wire()[:8], "another model", *there.card.to_wire()[9:]]
    )
    error = here.connect(other)
    assert error is not None
    assert error.stage == "offer"


def test_the_library_writes_nothing_to_standard_output(tcp, reader, capfd):
    reader(num_blocks=2)
    assert capfd.readouterr().out == ""


def test_a_card_of_another_release_is_refused(source):
    with pytest.raises(TransferError, match="version 99"):
        AgentCard.from_wire([99, "x"])
