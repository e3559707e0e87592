"""An agent's connections over a library that does what a test says: each has a key of its own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from engine.errors import TransferError
from engine.execution.pool import KVPool
from engine.models.model import KVLayout
from engine.transfer.nixl import AgentCard, NixlAgent

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=4, dtype="float32", fingerprint="f")
CARD = AgentCard(
    epoch="agent",
    metadata=b"agent",
    address=0,
    block_bytes=4 * LAYOUT.bytes_per_token,
    num_blocks=8,
    block_tokens=4,
    device="cpu",
    fingerprint="f",
    layers=(0, 3),
    heads=(0, 2),
    owned_heads=(0, 2),
)


class FakeLibrary:
    """Every READ ends as `state` says while it is posted."""

    def __init__(self) -> None:
        self.state = "DONE"
        self.connected: list[str] = []
        self.prepared = 0
        """Lists of peers' descriptors that were not released."""

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self.connected.append(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.connected.remove(name)

    def make_connection(self, name: str) -> None:
        assert name in self.connected

    def prep_xfer_dlist(self, name, rows, kind):
        if name == "NIXL_INIT_AGENT":  # of its own pool: kept for the next peer
            return SimpleNamespace()
        self.prepared += 1
        return SimpleNamespace(release=self._released)

    def _released(self) -> None:
        self.prepared -= 1

    def make_prepped_xfer(self, *_):
        return SimpleNamespace(release=lambda: None)

    def transfer(self, handle) -> str:
        return self.state


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary()


@pytest.fixture
def agent(library) -> NixlAgent:
    """Without its thread: `work` does what it would."""
    made = NixlAgent(
        KVPool(LAYOUT, 8, 4),
        lambda call, *args: call(*args),
        window_bytes=1 << 20,
        settle_s=1e9,
    )
    made._agent, made._card = library, CARD
    return made


def work(agent: NixlAgent) -> None:
    while agent._inbox:
        agent._inbox.popleft()()


def connect(agent: NixlAgent, attempt: int) -> TransferError | None:
    answers: list[TransferError | None] = []
    agent.add_peer((CARD.epoch, attempt), CARD, answers.append)
    work(agent)
    (answer,) = answers
    return answer


def read(agent: NixlAgent, attempt: int) -> str | None:
    errors: list[str | None] = []
    agent.read(
        (CARD.epoch, attempt),
        [1],
        [2],
        ended=lambda read, result: errors.append(result.error),
        quiet=lambda read: None,
    )
    work(agent)
    (error,) = errors
    return error


def test_a_peer_is_connected_again_while_a_read_of_its_last_connection_settles(agent, library):
    assert connect(agent, 1) is None
    library.state = "ERR"
    assert read(agent, 1) is not None
    assert (agent._table.num_settling, library.connected, library.prepared) == (1, [], 0)
    library.state = "DONE"
    assert connect(agent, 2) is None
    assert read(agent, 2) is None
    assert list(agent._peers) == [(CARD.epoch, 2)]


def test_a_key_that_is_still_in_use_is_an_error_that_is_told_and_leaves_nothing(agent, library):
    assert connect(agent, 1) is None
    library.state = "ERR"
    read(agent, 1)
    library.state = "DONE"
    error = connect(agent, 1)
    assert isinstance(error, TransferError)
    assert error.stage == "connect"
    assert (dict(agent._peers), library.connected, library.prepared) == ({}, [], 0)
    assert connect(agent, 2) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fingerprint": "g"}, "KV of model g, here it is of f"),
        ({"block_tokens": 8}, "blocks of 8 tokens, here they have 4"),
        ({"block_bytes": 7}, "blocks of 7 bytes, 768 are what"),
        ({"owned_heads": (1, 1)}, "nothing of it"),
    ],
)
def test_blocks_that_do_not_fit_are_refused_with_the_reason(agent, library, changes, said):
    answers: list[TransferError | None] = []
    agent.add_peer("peer", replace(CARD, **changes), answers.append)
    work(agent)
    (refused,) = answers
    assert refused is not None
    assert refused.stage == "offer"
    assert said in str(refused)
    assert (library.connected, library.prepared) == ([], 0)
