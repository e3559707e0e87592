"""The queue as a real, named, restarting Ray actor."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Iterator
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


async def test_the_named_actor_grants_restarts_with_a_higher_epoch_and_can_be_removed(
    ray_cluster: Any,
) -> None:
    ray = ray_cluster
    with pytest.raises(ValueError, match="tailrace-queue:m"):
        await find_queue("m")
    address = await create_or_find_queue("m")
    assert await create_or_find_queue("m") == address
    assert await find_queue("m") == address

    gateway = QueueClient(lambda: find_queue("m"), SECRET, "g1")
    reporter = QueueReporter(lambda: create_or_find_queue("m"), SECRET, "d1")
    gateway.start()
    reporter.start()
    reporter.changed(Report(replica_id="d1", slots=2, capacity_tokens=10, grants=()))
    assert await gateway.wait_available(20)
    first = await asyncio.wait_for(gateway.acquire(cost_tokens=1, prompt_tokens=1), 20)
    assert first.replica_id == "d1"

    handle = ray.get_actor(queue_name("m"), namespace=NAMESPACE)
    ray.kill(handle, no_restart=False)
    while gateway.available:
        await asyncio.sleep(0.01)
    assert await gateway.wait_available(60)
    second = await asyncio.wait_for(gateway.acquire(cost_tokens=1, prompt_tokens=1), 20)
    assert second.replica_id == "d1"
    assert second.epoch > first.epoch

    await gateway.close()
    await reporter.close()
    assert await asyncio.to_thread(remove_queue, "m")
    assert not await asyncio.to_thread(remove_queue, "m")
