"""The queue as a real, named, restarting Ray actor."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from deployments.admission.actor import (
    NAMESPACE,
    create_or_find_queue,
    find_queue,
    queue_name,
    remove_queue,
)
from deployments.admission.client import QueueClient, QueueReporter
from deployments.link.messages import Report
from deployments.secret import SECRET_FILE_VARIABLE

pytestmark = pytest.mark.cluster

SECRET = b"the secret of the test cluster!!"


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    import ray

    secret = tmp_path_factory.mktemp("secret") / "link"
    secret.write_bytes(SECRET)
    with pytest.MonkeyPatch.context() as patch:  # the actor's process inherits it
        patch.setenv(SECRET_FILE_VARIABLE, str(secret))
        yield from _cluster(ray)


def _cluster(ray: Any) -> Iterator[Any]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100_000_000)
    yield ray
    ray.shutdown()
    # Ray leaves its child processes to the garbage collector, which complains of each.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


async def test_each_of_two_named_actors_takes_over_from_the_other_and_both_can_be_removed(
    ray_cluster: Any,
) -> None:
    ray = ray_cluster
    with pytest.raises(ValueError, match="tailrace-queue:m"):
        await find_queue("m")
    address = await create_or_find_queue("m")
    assert await create_or_find_queue("m") == address
    assert await find_queue("m") == address

    ways: dict[str, Any] = {"find_other": lambda: find_queue("m", 1)}
    gateway = QueueClient(lambda: find_queue("m"), SECRET, "g1", **ways)
    reporter = QueueReporter(lambda: create_or_find_queue("m"), SECRET, "d1", **ways)
    gateway.start()
    reporter.start()
    reporter.changed(Report(replica_id="d1", slots=2, capacity_tokens=10, grants=()))

    async def standing_by(place: int) -> Any:
        """Its handle, as soon as it does."""
        while True:
            with suppress(ValueError, ray.exceptions.RayError):
                handle = ray.get_actor(queue_name("m", place), namespace=NAMESPACE)
                now = await asyncio.wait_for(handle.snapshot.remote(), 20)
                if now["peer_linked"] and now["gateways"] and now["decodes"] and not now["leads"]:
                    return handle
            await asyncio.sleep(0.1)

    epoch = 0
    for leading in (0, 1, 0):
        standing = await asyncio.wait_for(standing_by(1 - leading), 240)
        assert await gateway.wait_available(240)
        grant = await asyncio.wait_for(gateway.acquire(cost_tokens=1, prompt_tokens=1), 240)
        assert grant.replica_id == "d1"
        assert grant.epoch > epoch
        epoch = grant.epoch
        gateway.release(grant)
        killed = ray.get_actor(queue_name("m", leading), namespace=NAMESPACE)
        ray.kill(killed, no_restart=False)
        while not (await standing.snapshot.remote())["leads"]:
            await asyncio.sleep(0.01)

    await gateway.close()
    await reporter.close()
    assert await asyncio.to_thread(remove_queue, "m")
    assert not await asyncio.to_thread(remove_queue, "m")
