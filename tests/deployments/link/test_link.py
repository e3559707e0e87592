from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from pace import paced

from deployments.link.auth import Handshake
from deployments.link.client import Backoff, Dialer, KeptLink, dial
from deployments.link.link import Link, LinkDown, LinkHandlers, LinkRefused, LinkSettings
from deployments.link.messages import Kind
from deployments.link.server import LinkServer
from deployments.link.wire import CloseCode, CloseReason, WireError
from engine.errors import ConfigError

SECRET = b"the secret of the test cluster!!"


def ignore(link: Link, message: list[Any]) -> None:
    return None


HANDLERS = LinkHandlers(on_message=ignore)


async def test_messages_arrive_whole_and_in_order_both_ways(make_pair: Any) -> None:
    pair = await make_pair()
    pair.at_server.reply = lambda link, message: link.send([Kind.STEP, message[1]])
    for i in range(500):
        assert pair.client.send([Kind.SUBMIT, i, "text é", b"\x00\xff", None, 1.5])
    await pair.at_client.until(lambda r: len(r.of("message")) == 500)
    assert [m[1] for m in pair.at_client.of("message")] == list(range(500))
    assert pair.at_server.of("message")[0] == [Kind.SUBMIT, 0, "text é", b"\x00\xff", None, 1.5]
    assert (pair.served.peer_role, pair.served.peer_id) == ("gateway", "gateway-1")
    assert (pair.client.peer_role, pair.client.peer_id) == ("decode", "decode-1")


async def test_messages_of_one_iteration_leave_eight_in_a_write(make_pair: Any) -> None:
    pair = await make_pair()
    writes: list[int] = []
    transport = pair.client._transport
    original = transport.write

    class Counting:
        def write(self, data: bytes) -> None:
            writes.append(len(data))
            original(data)

        def __getattr__(self, name: str) -> Any:
            return getattr(transport, name)

    pair.client._transport = Counting()
    for i in range(10):
        pair.client.send([Kind.CREDIT, i, 1])
    assert pair.client.write_buffer_size > 0
    await pair.at_server.until(lambda r: len(r.of("message")) == 10)
    assert writes == [64, 16]


async def test_a_large_payload_lands_in_the_memory_offered_for_it(make_pair: Any) -> None:
    pair = await make_pair()
    sent = os.urandom(5_000_000)
    memory = bytearray(len(sent))
    pair.at_server.memory = memoryview(memory)
    pair.client.send([Kind.MANIFEST, 1])
    pair.client.send_payload([Kind.CHUNK, 7], memoryview(sent))
    pair.client.send([Kind.FINAL, 1])
    await pair.at_server.until(lambda r: len(r.of("message")) == 2)
    assert [name for name, _ in pair.at_server.events] == [
        "open",
        "message",
        "payload",
        "done",
        "message",
    ]
    assert memory == sent


async def test_pieces_are_gathered_on_one_side_and_scattered_on_the_other(make_pair: Any) -> None:
    pair = await make_pair()
    sent = os.urandom(300_000)
    view, memory = memoryview(sent), bytearray(len(sent))
    target = memoryview(memory)
    pair.at_server.memory = [target[200_000:], target[:0], target[:200_000]]
    pair.client.send_payload([Kind.CHUNK, 7], [view[:100], view[100:]])
    await pair.at_server.until(lambda r: bool(r.of("done")))
    assert memory[200_000:] + memory[:200_000] == sent


async def test_a_discarded_payload_is_not_reported_done(make_pair: Any) -> None:
    pair = await make_pair()
    pair.client.send_payload([Kind.CHUNK, 7], b"x" * 1_000_000)
    pair.client.send([Kind.FINAL, 1])
    await pair.at_server.until(lambda r: bool(r.of("message")))
    assert (len(pair.at_server.of("payload")), pair.at_server.of("done")) == (1, [])


async def test_a_payload_of_another_size_than_expected_ends_the_link(make_pair: Any) -> None:
    pair = await make_pair()
    pair.at_server.memory = memoryview(bytearray(10))
    pair.client.send_payload([Kind.CHUNK, 7], b"x" * 11)
    await pair.at_server.until(lambda r: bool(r.of("close")))
    assert pair.at_server.of("close")[0].code is CloseCode.PAYLOAD_SIZE
    assert pair.at_server.of("done") == []


async def test_close_tells_each_side_once_and_later_sends_say_no(make_pair: Any) -> None:
    pair = await make_pair()
    pair.client.send([Kind.SUBMIT, 1])
    pair.client.close("shutting down")
    assert not pair.client.send([Kind.SUBMIT, 2])
    assert not pair.client.send_payload([Kind.CHUNK], b"x")
    await pair.at_server.until(lambda r: bool(r.of("close")))
    await pair.at_client.until(lambda r: bool(r.of("close")))
    await asyncio.sleep(0.01)
    assert pair.at_server.of("message") == [[Kind.SUBMIT, 1]]
    assert pair.at_server.of("close") == [CloseReason(CloseCode.PEER_CLOSED, "shutting down")]
    assert pair.at_client.of("close") == [CloseReason(CloseCode.CLOSED, "shutting down")]
    assert pair.client.closed.result() == CloseReason(CloseCode.CLOSED, "shutting down")
    assert pair.server.links == {}
    with pytest.raises(LinkDown, match="shutting down"):
        await pair.client.drain()


async def test_a_vanished_peer_is_noticed_by_its_fin(make_pair: Any) -> None:
    pair = await make_pair()
    pair.client._transport.abort()
    await pair.at_server.until(lambda r: bool(r.of("close")))
    assert pair.at_server.of("close")[0].code is CloseCode.CONNECTION_LOST


async def test_a_silent_peer_loses_its_lease(make_pair: Any) -> None:
    pair = await make_pair(beat_s=0.05, lease_s=0.3)
    pair.client._timer.cancel()  # half-open: it no longer beats, and no FIN comes
    await pair.at_server.until(lambda r: bool(r.of("close")))
    reason = pair.at_server.of("close")[0]
    assert reason.code is CloseCode.LEASE_EXPIRED
    assert str(reason).startswith("lease expired: nothing from 127.0.0.1:")


async def test_beats_keep_an_idle_link_alive(make_pair: Any) -> None:
    pair = await make_pair(beat_s=0.02, lease_s=0.15)
    await asyncio.sleep(0.6)
    assert pair.client.is_open
    assert pair.served.is_open
    assert pair.at_server.of("message") == []


async def test_a_blocked_loop_does_not_blame_its_peers(make_pair: Any) -> None:
    pair = await make_pair(beat_s=0.05, lease_s=0.2)
    time.sleep(0.5)
    await asyncio.sleep(0.1)
    assert pair.client.is_open
    assert pair.served.is_open


async def test_a_peer_that_stops_reading_is_cut_off(make_pair: Any) -> None:
    pair = await make_pair(high_water_bytes=1000, max_write_buffer_bytes=20_000_000)
    pair.served._transport.pause_reading()
    block = b"x" * 1_000_000
    while pair.client.send([Kind.STEP, block]):
        await asyncio.sleep(0)
    await pair.at_client.until(lambda r: bool(r.of("close")))
    assert pair.at_client.of("close")[0].code is CloseCode.PEER_STALLED


async def test_drain_waits_until_the_peer_reads_again(make_pair: Any) -> None:
    pair = await make_pair(high_water_bytes=1000)
    pair.served._transport.pause_reading()
    block = b"x" * 1_000_000
    while pair.client.writable:
        pair.client.send([Kind.STEP, block])
        await asyncio.sleep(0)
    waiting = asyncio.create_task(pair.client.drain())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    pair.served._transport.resume_reading()
    await asyncio.wait_for(waiting, 240)
    assert pair.client.writable


async def test_drain_raises_when_the_link_ends_meanwhile(make_pair: Any) -> None:
    pair = await make_pair(high_water_bytes=1000)
    pair.served._transport.pause_reading()
    while pair.client.writable:
        pair.client.send([Kind.STEP, b"x" * 1_000_000])
        await asyncio.sleep(0)
    waiting = asyncio.create_task(pair.client.drain())
    await asyncio.sleep(0.01)
    pair.client._transport.abort()
    with pytest.raises(LinkDown):
        await waiting


async def test_a_handler_that_fails_ends_only_its_link(
    make_pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pair = await make_pair()
    other = await dial(pair.server.address, SECRET, "gateway", "gateway-2", HANDLERS)

    def fail(link: Link, message: list[Any]) -> None:
        if link.peer_id == "gateway-1":
            raise ValueError("not enough values to unpack")

    pair.at_server.reply = fail
    pair.client.send([Kind.SUBMIT])
    await pair.at_client.until(lambda r: bool(r.of("close")))
    assert pair.at_server.of("close") == [
        CloseReason(CloseCode.HANDLER_FAILED, f"kind {int(Kind.SUBMIT)}: ValueError")
    ]
    assert pair.at_client.of("close")[0].code is CloseCode.PEER_CLOSED
    assert other.is_open
    other.close()


async def test_a_message_above_the_limit_is_refused_at_its_sender(make_pair: Any) -> None:
    pair = await make_pair(max_frame_bytes=10_000)
    with pytest.raises(WireError, match="limit of 10000"):
        pair.client.send([Kind.SUBMIT, b"x" * 10_000])
    assert pair.client.send([Kind.SUBMIT, 1])
    await pair.at_server.until(lambda r: r.of("message") == [[Kind.SUBMIT, 1]])


async def test_a_megabyte_of_garbage_hurts_nobody_else(make_pair: Any) -> None:
    pair = await make_pair()
    host, port = pair.server.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(os.urandom(1 << 20))
    with contextlib.suppress(ConnectionError):  # a reset is as good an end as an EOF
        await asyncio.wait_for(reader.read(), 240)
    writer.close()
    pair.client.send([Kind.SUBMIT, 1])
    await pair.at_server.until(lambda r: r.of("message") == [[Kind.SUBMIT, 1]])
    assert list(pair.server.links) == ["gateway-1"]


async def test_a_peer_that_connects_again_replaces_its_old_link(make_pair: Any) -> None:
    pair = await make_pair()
    old = pair.served
    again = await dial(pair.server.address, SECRET, "gateway", "gateway-1", HANDLERS)
    await pair.at_client.until(lambda r: bool(r.of("close")))
    await pair.at_server.until(lambda r: len(r.of("open")) == 2)
    names = [name for name, _ in pair.at_server.events]
    assert names == ["open", "close", "open"]
    assert pair.at_client.of("close")[0].code is CloseCode.REPLACED
    assert pair.served is not old
    assert again.is_open
    again.close()


async def test_another_secret_is_refused_by_name(
    make_pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    pair = await make_pair()
    wrong = b"some other secret, long enough!!"
    with pytest.raises(LinkRefused) as caught:
        await dial(pair.server.address, wrong, "gateway", "gateway-9", HANDLERS)
    assert caught.value.reason.code is CloseCode.WRONG_SECRET
    said = caplog.text + str(caught.value)
    assert wrong.decode() not in said
    assert SECRET.decode() not in said
    assert len(pair.at_server.of("open")) == 1


async def test_another_version_is_refused_by_name(
    make_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await make_pair()
    sent = Handshake.opening

    def newer(self: Any) -> list[list[Any]]:
        return [[kind, version + 1, *rest] for kind, version, *rest in sent(self)]

    monkeypatch.setattr(Handshake, "opening", newer)
    with pytest.raises(LinkRefused) as caught:
        await dial(pair.server.address, SECRET, "gateway", "gateway-9", HANDLERS)
    assert caught.value.reason.code is CloseCode.WRONG_VERSION


async def test_an_address_in_use_by_a_newer_replica_is_refused(make_pair: Any) -> None:
    pair = await make_pair()
    address = pair.server.address
    with pytest.raises(LinkRefused, match="id 'decode-1' where 'decode-0' was expected"):
        await dial(address, SECRET, "gateway", "g", HANDLERS, expect_id="decode-0")
    with pytest.raises(LinkRefused, match="role 'decode' where 'queue' was expected"):
        await dial(address, SECRET, "gateway", "g", HANDLERS, expect_role="queue")


@paced(0.1, LinkDown)
async def test_a_client_that_does_not_prove_itself_is_dropped(
    make_pair: Any, seconds: float
) -> None:
    pair = await make_pair(handshake_s=seconds)
    host, port = pair.server.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answer = await asyncio.wait_for(reader.read(), 240)
    assert CloseCode.HANDSHAKE_TIMEOUT.value.encode() in answer
    writer.close()
    await writer.wait_closed()


async def test_unproven_connections_are_bounded_and_real_peers_still_get_in(make_pair: Any) -> None:
    pair = await make_pair(max_unauthenticated=2)
    host, port = pair.server.address.split(":")
    strangers = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
    link = await dial(pair.server.address, SECRET, "gateway", "gateway-2", HANDLERS)
    assert link.is_open
    for reader, _ in strangers[:3]:
        answer = await asyncio.wait_for(reader.read(), 240)
        assert CloseCode.BUSY.value.encode() in answer or answer == b""
    link.close()
    for _, writer in strangers:
        writer.close()


async def test_nobody_at_the_address_is_a_link_down(unused_port: int) -> None:
    with pytest.raises(LinkDown, match=f"127.0.0.1:{unused_port} cannot be reached") as caught:
        await dial(f"127.0.0.1:{unused_port}", SECRET, "gateway", "g", HANDLERS)
    assert not isinstance(caught.value, LinkRefused)


async def test_a_server_takes_the_first_free_port_of_its_range() -> None:
    ports = free_run(3)
    unused_port = ports[0]
    first = LinkServer(SECRET, "decode", "a", handlers=HANDLERS, ports=ports)
    second = LinkServer(SECRET, "decode", "b", handlers=HANDLERS, ports=ports)
    third = LinkServer(SECRET, "decode", "c", handlers=HANDLERS, ports=ports[:2])
    await first.start()
    await second.start()
    assert first.address == f"127.0.0.1:{unused_port}"
    assert second.address == f"127.0.0.1:{unused_port + 1}"
    with pytest.raises(ConfigError, match=f"ports {unused_port} to {unused_port + 1}"):
        await third.start()
    await first.close()
    await second.close()


async def test_an_address_nobody_can_dial_is_refused_at_start() -> None:
    server = LinkServer(SECRET, "decode", "a", handlers=HANDLERS, host="0.0.0.0")
    with pytest.raises(ConfigError, match=r"advertise_host='0\.0\.0\.0'"):
        await server.start()


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"beat_s=5, lease_s=5"):
        LinkSettings(beat_s=5, lease_s=5)
    with pytest.raises(ConfigError, match="max_write_buffer_bytes=10"):
        LinkSettings(max_write_buffer_bytes=10)
    with pytest.raises(ConfigError, match="connect_s=0"):
        LinkSettings(connect_s=0)


async def test_a_dialer_shares_one_link_per_address_and_dials_again_after_its_end(
    make_pair: Any,
) -> None:
    pair = await make_pair()
    dialer = Dialer(SECRET, "gateway", "gateway-2", HANDLERS)
    links = await asyncio.gather(*(dialer.get(pair.server.address) for _ in range(10)))
    assert len(set(links)) == 1
    links[0].close()
    again = await dialer.get(pair.server.address)
    assert again is not links[0]
    assert await dialer.get(pair.server.address, expect_id="decode-1") is again
    with pytest.raises(LinkDown, match="'decode-0' is gone"):
        await dialer.get(pair.server.address, expect_id="decode-0")
    await dialer.close()
    assert not again.is_open
    with pytest.raises(LinkDown, match="closed"):
        await dialer.get(pair.server.address)


async def test_a_dead_address_rests_between_attempts(unused_port: int) -> None:
    dialer = Dialer(SECRET, "gateway", "g", HANDLERS, backoff=Backoff(first_s=30, max_s=30))
    address = f"127.0.0.1:{unused_port}"
    with pytest.raises(LinkDown, match="cannot be reached"):
        await dialer.get(address)
    with pytest.raises(LinkDown, match="tried again in"):
        await dialer.get(address)
    await dialer.close()


async def test_one_callers_cancellation_costs_the_others_nothing(make_pair: Any) -> None:
    pair = await make_pair()
    dialer = Dialer(SECRET, "gateway", "gateway-2", HANDLERS)
    impatient = asyncio.create_task(dialer.get(pair.server.address))
    patient = asyncio.create_task(dialer.get(pair.server.address))
    await asyncio.sleep(0)
    impatient.cancel()
    assert (await patient).is_open
    assert impatient.cancelled() or impatient.done()
    await dialer.close()


async def test_forgetting_an_address_while_it_is_dialled_is_a_link_down(make_pair: Any) -> None:
    pair = await make_pair()
    dialer = Dialer(SECRET, "gateway", "gateway-2", HANDLERS)
    caller = asyncio.create_task(dialer.get(pair.server.address))
    await asyncio.sleep(0)
    dialer.forget(pair.server.address)
    with pytest.raises(LinkDown, match="forgotten while dialling"):
        await caller
    await dialer.close()


@pytest.mark.parametrize("caller_first", [True, False])
async def test_a_caller_that_is_cancelled_together_with_the_attempt_ends(
    make_pair: Any, caller_first: bool
) -> None:
    """As when a loop ends all of its tasks: one that went on instead would keep it for ever."""
    pair = await make_pair()
    dialer = Dialer(SECRET, "gateway", "gateway-2", HANDLERS)
    before = asyncio.all_tasks()
    caller = asyncio.create_task(dialer.get(pair.server.address))
    await asyncio.sleep(0)
    (attempt,) = asyncio.all_tasks() - before - {caller}
    for task in (caller, attempt) if caller_first else (attempt, caller):
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await dialer.close()


def test_backoff_doubles_up_to_its_bound() -> None:
    backoff = Backoff(first_s=0.1, max_s=0.5)
    assert [backoff.after(n) for n in (1, 2, 3, 4, 99)] == [0.1, 0.2, 0.4, 0.5, 0.5]


async def test_a_kept_link_follows_its_peer_to_a_new_address(
    make_server: Callable[..., Any], make_pair: Any
) -> None:
    first = (await make_pair()).server
    addresses = [first.address]

    async def find() -> str:
        return addresses[-1]

    kept = KeptLink(find, SECRET, "gateway", "gateway-2", HANDLERS, backoff=Backoff(first_s=0.01))
    kept.start()
    link = await asyncio.wait_for(kept.wait_up(), 240)
    second = (await make_pair()).server
    await first.close()
    assert kept.link is None
    addresses.append(second.address)
    again = await asyncio.wait_for(kept.wait_up(), 240)
    assert again is not link
    assert "gateway-2" in second.links
    await kept.close()
    assert kept.link is None


def free_run(count: int) -> range:
    """Ports one after the other, below those that systems give to connections by themselves."""
    for first in range(20_000 + os.getpid() % 10_000, 32_000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + count):
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port))
            return range(first, first + count)
    raise AssertionError("no ports are free")


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
