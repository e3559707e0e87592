"""The memory channel: an answer belongs to its question, or there are no more answers."""

from __future__ import annotations

import socket
import threading

import pytest

from engine.execution.pool import KVPool
from engine.execution.ranks.channel import Channel, ChannelError, Kind
from engine.execution.ranks.memory import RemoteMemory, serve_memory
from engine.models.model import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=2, dtype="float32", fingerprint="f")


def pair(timeout_s=60.0):
    left, right = socket.socketpair()
    here, there = Channel(left), Channel(right)
    here.max_frame_bytes = there.max_frame_bytes = 1 << 20
    return RemoteMemory(here, LAYOUT, timeout_s=timeout_s), there


def read(memory, block, num_tokens=1):
    return memory.read(block, 0, num_tokens, 0, 2, (0, 2))


def test_a_late_answer_is_never_taken_for_that_of_the_next_question():
    memory, rank = pair(timeout_s=0.05)
    lost = []
    memory.on_lost = lost.append
    with pytest.raises(ChannelError, match=r"nothing heard for 0\.05 s"):
        read(memory, 1)
    with pytest.raises(ChannelError, match="gone"):
        rank.send([Kind.PIECE, b"1" * 64])  # late, of the first
    for _ in range(2):
        with pytest.raises(ChannelError, match=r"lost: nothing heard for 0\.05 s"):
            read(memory, 2)
    assert lost == ["the memory of a rank is lost: nothing heard for 0.05 s"]
    rank.close()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([Kind.PIECE, b"short"], "a piece of 5 bytes where 64 were due"),
        ([Kind.PIECE, "text"], "where PIECE was due"),
        ([Kind.WRITTEN], "where PIECE was due"),
        ([Kind.FAILED, "RuntimeError: no"], "could not move it: RuntimeError: no"),
    ],
)
def test_an_answer_that_is_none_ends_the_channel(answer, said):
    memory, rank = pair()
    rank.send(answer)
    with pytest.raises(ChannelError, match=said):
        read(memory, 1)
    assert rank.receive(5)[0] == Kind.READ
    with pytest.raises(ChannelError, match="closed the channel"):
        rank.receive(5)
    with pytest.raises(ChannelError, match="is lost"):
        read(memory, 1)
    rank.close()


def test_pieces_go_both_ways_and_a_rank_that_fails_closes_its_side():
    memory, rank = pair()
    thread = threading.Thread(target=serve_memory, args=(rank, KVPool(LAYOUT, 4, 8)))
    thread.start()
    piece = bytes(range(64))
    memory.write(3, 0, 0, 2, (0, 2), piece)
    assert read(memory, 3) == piece
    with pytest.raises(ChannelError, match="could not move it: IndexError"):
        read(memory, 99)
    thread.join(240)
    assert not thread.is_alive()
    assert rank.fileno() == -1
