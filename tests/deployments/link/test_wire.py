from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.link.messages import Kind
from deployments.link.wire import (
    CloseCode,
    FrameReader,
    Target,
    WireError,
    encode_frame,
    encode_payload_head,
)


class Sink:
    def __init__(self, *, piece: int | None = None, discard: bool = False) -> None:
        self.got: list[tuple[list[Any], bytes | None]] = []
        self._piece = piece
        self._discard = discard
        self._memory: bytearray | None = None

    def frame_received(self, message: list[Any]) -> None:
        self.got.append((message, None))

    def payload_offered(self, head: list[Any], payload_bytes: int) -> Target:
        if self._discard:
            return None
        self._memory = bytearray(payload_bytes)
        view = memoryview(self._memory)
        if self._piece is None:
            return view
        return [view[i : i + self._piece] for i in range(0, payload_bytes, self._piece)]

    def payload_received(self, head: list[Any]) -> None:
        assert self._memory is not None
        self.got.append((head, bytes(self._memory)))


def reader_for(sink: Sink) -> FrameReader:
    return FrameReader(sink, max_frame_bytes=1 << 20, max_payload_bytes=1 << 22)


def feed(reader: FrameReader, data: bytes, cuts: list[int]) -> None:
    """Deliver `data` as a transport would: cut anywhere, never more than the buffer takes."""
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for first, last in pairwise(edges):
        while first < last:
            buffer = reader.get_buffer()
            assert len(buffer) > 0
            n = min(len(buffer), last - first)
            buffer[:n] = data[first : first + n]
            reader.received(n)
            first += n


frames = st.lists(
    st.tuples(
        st.integers(0, 1 << 62),
        st.binary(max_size=200) | st.just(b"x" * 70_000),
        st.none() | st.binary(min_size=1, max_size=300) | st.just(b"payload " * 30_000),
    ),
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(
    frames, st.lists(st.integers(0, 1 << 20), max_size=12), st.sampled_from([None, 1000, 70_001])
)
def test_any_split_of_the_stream_gives_the_same_frames(
    items: list[tuple[int, bytes, bytes | None]], cuts: list[int], piece: int | None
) -> None:
    stream, expected = b"", []
    for number, blob, payload in items:
        if payload is None:
            message = [int(Kind.STEP), number, blob]
            stream += encode_frame(message)
        else:
            message = [int(Kind.CHUNK), number, blob]
            stream += encode_payload_head(message, len(payload)) + payload
        expected.append((message, payload))
    sink = Sink(piece=piece)
    feed(reader_for(sink), stream, cuts)
    assert sink.got == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1 << 20), max_size=12))
def test_a_discarded_payload_leaves_the_frames_around_it_whole(cuts: list[int]) -> None:
    before, after = [int(Kind.STEP), "before"], [int(Kind.STEP), "after"]
    chunk = encode_payload_head([Kind.CHUNK, 1], 300_000) + b"z" * 300_000
    sink = Sink(discard=True)
    feed(reader_for(sink), encode_frame(before) + chunk + encode_frame(after), cuts)
    assert sink.got == [(before, None), (after, None)]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=4000), st.lists(st.integers(0, 4000), max_size=5))
def test_garbage_is_either_a_frame_or_a_typed_error(data: bytes, cuts: list[int]) -> None:
    with contextlib.suppress(WireError):  # anything else fails the test
        feed(reader_for(Sink()), data, cuts)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ((1 << 20) + 1, CloseCode.OVERSIZED),
        (b"\xc1", CloseCode.MALFORMED),
        (msgpack.packb({"kind": 13}), CloseCode.MALFORMED),
        (msgpack.packb([]), CloseCode.MALFORMED),
        (msgpack.packb([13, 1]) + b"\x00", CloseCode.MALFORMED),
        (b"\xdd\xff\xff\xff\xff", CloseCode.MALFORMED),
        (b"\x91" * 100_000, CloseCode.MALFORMED),
        (msgpack.packb([99]), CloseCode.UNKNOWN_KIND),
        (msgpack.packb([True]), CloseCode.UNKNOWN_KIND),
        (msgpack.packb(["13"]), CloseCode.UNKNOWN_KIND),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_a_broken_frame_is_named(data: bytes | int, code: CloseCode) -> None:
    body = b"" if isinstance(data, int) else data
    size = data if isinstance(data, int) else len(data)
    with pytest.raises(WireError) as caught:
        feed(reader_for(Sink()), size.to_bytes(4, "big") + body, [])
    assert caught.value.code is code


def test_only_a_chunk_may_carry_a_payload() -> None:
    with pytest.raises(WireError, match="kind 13 cannot carry a payload"):
        feed(reader_for(Sink()), encode_payload_head([Kind.STEP], 4) + b"abcd", [])


@pytest.mark.parametrize("size", [0, (1 << 22) + 1])
def test_a_payload_outside_the_bounds_is_refused(size: int) -> None:
    with pytest.raises(WireError, match=f"{size} bytes"):
        feed(reader_for(Sink()), encode_payload_head([Kind.CHUNK], size), [])


def test_a_payload_longer_than_the_memory_for_it_writes_nothing() -> None:
    memory = bytearray(3)

    class Short(Sink):
        def payload_offered(self, head: list[Any], payload_bytes: int) -> Target:
            return memoryview(memory)

    with pytest.raises(WireError) as caught:
        feed(reader_for(Short()), encode_payload_head([Kind.CHUNK], 4) + b"abcd", [])
    assert (caught.value.code, memory) == (CloseCode.PAYLOAD_SIZE, bytearray(3))


def test_payload_bytes_are_received_straight_into_the_memory_given() -> None:
    memory = bytearray(500_000)

    class Direct(Sink):
        def payload_offered(self, head: list[Any], payload_bytes: int) -> Target:
            return memoryview(memory)

    reader = reader_for(Direct())
    feed(reader, encode_payload_head([Kind.CHUNK], 500_000), [])
    buffer = reader.get_buffer()
    assert len(buffer) == 500_000
    buffer[:5] = b"hello"
    assert memory[:5] == b"hello"


def test_the_buffer_shrinks_back_after_a_large_frame() -> None:
    sink = Sink()
    reader = reader_for(sink)
    feed(reader, encode_frame([Kind.STEP, b"x" * 900_000]), [])
    assert len(sink.got) == 1
    assert len(reader.get_buffer()) == 64 * 1024
