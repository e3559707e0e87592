from __future__ import annotations

import asyncio
import threading

import pytest

from deployments.routing.directory import Directory


def test_a_process_has_one_directory_per_deployment() -> None:
    assert Directory.of("app", "Decode") is Directory.of("app", "Decode")
    assert Directory.of("app", "Decode") is not Directory.of("app", "Prefill")
    assert Directory.of("app", "Decode") is not Directory.of("other", "Decode")


async def test_listeners_hear_of_changes_published_by_another_thread() -> None:
    directory = Directory()
    waiting = asyncio.create_task(directory.changed())
    await asyncio.sleep(0)
    thread = threading.Thread(target=directory.publish, args=({"d1": {"link": "h:1"}},))
    thread.start()
    await asyncio.wait_for(waiting, 240)
    thread.join()
    assert directory.replicas() == {"d1": {"link": "h:1"}}


async def test_publishing_the_same_again_wakes_nobody() -> None:
    directory = Directory()
    directory.publish({"d1": {"link": "h:1"}})
    before = directory.replicas()
    waiting = asyncio.create_task(directory.changed())
    await asyncio.sleep(0)
    directory.publish({"d1": {"link": "h:1"}})
    directory.drop("d2")
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert directory.replicas() is before
    directory.drop("d1")
    await asyncio.wait_for(waiting, 240)
    assert directory.replicas() == {}


async def test_a_change_between_looking_and_waiting_is_not_missed() -> None:
    directory = Directory()
    seen = directory.replicas()
    directory.publish({"d1": {}})
    await asyncio.wait_for(directory.changed(seen), 240)


async def test_changes_begin_with_the_present_and_skip_what_was_never_seen() -> None:
    directory = Directory()
    directory.publish({"d1": {}})
    changes = directory.changes()
    assert set(await anext(changes)) == {"d1"}
    directory.publish({"d1": {}, "d2": {}})
    directory.publish({"d2": {}})
    assert set(await anext(changes)) == {"d2"}
    await changes.aclose()


async def test_a_cancelled_listener_leaves_nothing_behind() -> None:
    directory = Directory()
    waiting = asyncio.create_task(directory.changed())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert directory._waiters == []


def test_a_snapshot_cannot_be_changed() -> None:
    directory = Directory()
    directory.publish({"d1": {"link": "h:1"}})
    with pytest.raises(TypeError):
        directory.replicas()["d1"]["link"] = "h:2"  # type: ignore[index]
