"""The step channel against strangers, liars and broken bytes."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.execution.ranks.channel import (
    CHANNEL_VERSION,
    Channel,
    ChannelError,
    Kind,
    Listener,
    _dial,
    _greet,
    connect,
    frame,
    parse,
)

KEY = b"k" * 32


def pair():
    left, right = socket.socketpair()
    a, b = Channel(left), Channel(right)
    a.max_frame_bytes = b.max_frame_bytes = 1 << 20
    return a, b


def accepted(listener, *, key=KEY, rank=1, purpose="steps"):
    """What the listener and the rank get to see of each other."""
    found, failed = [], []

    def join():
        try:
            found.append(connect(listener.address, key, rank, purpose, timeout_s=60))
        except ChannelError as error:
            failed.append(error)

    thread = threading.Thread(target=join)
    thread.start()
    got = listener.accept(1.0 if key != KEY else 5.0)
    thread.join()
    return got, found, failed


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_both_sides_are_proven_and_then_talk(host):
    listener = Listener(KEY, host=host)
    (rank, purpose, here), (there,), _ = accepted(listener, rank=3, purpose="memory")
    assert (rank, purpose) == (3, "memory")
    here.send([Kind.STEP, 1, ["x" * 100_000]])
    there.send([Kind.DONE, 1, None])
    assert there.receive(5) == [Kind.STEP, 1, ["x" * 100_000]]
    assert here.receive(5) == [Kind.DONE, 1, None]
    for each in (listener, here, there):
        each.close()


def test_a_rank_may_take_longer_to_prove_itself_than_the_wait_for_a_connection():
    listener = Listener(KEY)
    there = Channel(_dial(listener.address, 5))
    thread = threading.Timer(0.3, _greet, (there, KEY, 1, "steps", 5))
    thread.start()
    got = listener.accept(0.05)
    thread.join()
    assert got is not None
    assert got[:2] == (1, "steps")
    for each in (listener, got[2], there):
        each.close()


def test_who_takes_nothing_is_not_waited_for():
    here, there = pair()
    here.limit_sends(0.05)
    with pytest.raises(ChannelError, match="takes nothing"):
        here.send([Kind.STEP, 1, b"x" * 4_000_000])
    here.close()
    there.close()


def test_another_key_is_turned_away():
    listener = Listener(KEY)
    got, found, failed = accepted(listener, key=b"other" * 8)
    assert got is None
    assert found == []
    assert len(failed) == 1
    listener.close()


def test_a_stranger_does_not_end_the_wait_for_ranks():
    listener = Listener(KEY)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect("\0" + listener.address.removeprefix("unix:"))
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    (_, _, here), (there,), _ = accepted(listener)
    for each in (listener, stranger, here, there):
        each.close()


def test_a_long_greeting_is_refused_unread():
    left, right = socket.socketpair()
    channel = Channel(left)
    right.sendall(struct.pack(">I", 1 << 20))
    with pytest.raises(ChannelError, match="a length of 1048576 bytes"):
        channel.receive(5)
    channel.close()
    right.close()


def test_another_version_is_refused_by_name():
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind("\0tailrace-test-version")
    server.listen()

    def answer():
        connection, _ = server.accept()
        connection.sendall(frame([Kind.HELLO, CHANNEL_VERSION + 1, b"n" * 32]))
        connection.recv(1)
        connection.close()

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(ChannelError, match=f"version {CHANNEL_VERSION + 1}, this rank"):
        connect("unix:tailrace-test-version", KEY, 0, "steps", timeout_s=60)
    thread.join()
    server.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgpack.packb({"kind": 20}),
        msgpack.packb([]),
        msgpack.packb([999]),
        msgpack.packb(["STEP"]),
        msgpack.packb([20, 1]) + b"\x00",
        msgpack.packb([20, "cut short"])[:-3],
    ],
)
def test_malformed_frames_end_the_channel(body):
    here, there = pair()
    there._socket.sendall(struct.pack(">I", len(body)) + body)
    with pytest.raises(ChannelError, match="malformed frame"):
        here.receive(5)
    here.close()
    there.close()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_malformed(body):
    with contextlib.suppress(ChannelError):
        assert isinstance(parse(body), list)


@given(st.lists(st.binary(max_size=300), max_size=8), st.integers(1, 50))
def test_frames_survive_any_split(payloads, step):
    here, there = pair()
    stream = b"".join(frame([Kind.PIECE, payload]) for payload in payloads)
    got = []
    for at in range(0, len(stream), step):
        there._socket.sendall(stream[at : at + step])
        got += here.arrived()
    assert got == [[Kind.PIECE, payload] for payload in payloads]
    here.close()
    there.close()


def test_the_end_and_silence_are_told():
    here, there = pair()
    with pytest.raises(ChannelError, match=r"nothing heard for 0\.05 s"):
        here.receive(0.05)
    there.close()
    with pytest.raises(ChannelError, match="closed the channel"):
        here.receive(5)
    with pytest.raises(ChannelError, match="gone"):
        here.send([Kind.BEAT])
    here.close()
