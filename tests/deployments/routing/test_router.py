"""`DirectoryRouter` inside a real Serve application of two replicas."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.cluster

APP = "routed"


def build_app() -> Any:
    """The classes are local, so Serve pickles them by value; the router travels by its path."""
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    @serve.deployment(
        num_replicas=2,
        max_ongoing_requests=4,
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=RequestRouterConfig(
            request_router_class="deployments.routing.replicas:DirectoryRouter"
        ),
    )
    class Pool:
        def __init__(self) -> None:
            from ray import serve

            self.name = serve.get_replica_context().replica_id.unique_id
            self.waits = 0

        def record_replica_metadata(self) -> dict[str, Any]:
            return {"link": f"127.0.0.1:{os.getpid()}", "pid": os.getpid()}

        async def who(self, call: dict[str, Any] | None = None) -> str:
            return self.name

        async def wait(self, call: dict[str, Any]) -> str:
            import asyncio

            self.waits += 1
            try:
                await asyncio.sleep(call["seconds"])
            finally:
                self.waits -= 1
            return self.name

        async def waiting(self, call: dict[str, Any]) -> int:
            return self.waits

    @serve.deployment(ray_actor_options={"num_cpus": 0.1})
    class Front:
        """Calls the pool from inside one request, so that its calls share Serve's internal id."""

        def __init__(self, pool: Any) -> None:
            from deployments.routing.replicas import Directory

            self.pool = pool
            self.directory = Directory.of("routed", "Pool")
            self.directory.watch(pool)

        async def seen(self) -> dict[str, dict[str, Any]]:
            return {name: dict(meta) for name, meta in self.directory.replicas().items()}

        async def who(self, targets: list[str | None]) -> list[str]:
            import asyncio

            calls = [self.pool.who.remote({"target": t} if t else None) for t in targets]
            return list(await asyncio.gather(*calls))

        async def pid(self) -> int:
            return os.getpid()

        async def call_all(self, targets: list[str], seconds: float) -> list[str]:
            """A call of that length to each."""
            import asyncio

            calls = [self.pool.wait.remote({"target": t, "seconds": seconds}) for t in targets]
            return list(await asyncio.gather(*calls))

        async def error_of(self, target: str) -> str:
            import asyncio

            try:
                await asyncio.wait_for(self.pool.who.remote({"target": target}), 240)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
            return "none"

        async def die_while_waiting(self, target: str) -> str:
            """Fill the target, have one call wait for a place, and kill it."""
            import asyncio
            import os
            import signal

            busy = [self.pool.wait.remote({"target": target, "seconds": 60}) for _ in range(4)]
            await asyncio.sleep(2)
            late = asyncio.ensure_future(self._call(target))
            await asyncio.sleep(0.5)
            assert not late.done()
            os.kill(self.directory.replicas()[target]["pid"], signal.SIGKILL)
            results = await asyncio.wait_for(
                asyncio.gather(*(self._settle(b) for b in busy), late, return_exceptions=True), 240
            )
            return type(results[-1]).__name__

        async def _call(self, target: str) -> str:
            return await self.pool.who.remote({"target": target})

        async def _settle(self, response: Any) -> Any:
            return await response

    return Front.bind(Pool.bind())


@pytest.fixture(scope="module")
def front() -> Iterator[Any]:
    import ray
    from ray import serve

    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100_000_000)
    yield serve.run(build_app(), name=APP, route_prefix=None)
    serve.shutdown()
    ray.shutdown()


async def until_two_run(front: Any) -> dict[str, dict[str, Any]]:
    async def poll() -> dict[str, dict[str, Any]]:
        while len(seen := await front.seen.remote()) != 2:
            await asyncio.sleep(0.05)
        return seen

    return await asyncio.wait_for(poll(), 240)


async def test_targets_are_met_exactly_and_the_directory_carries_the_metadata(front: Any) -> None:
    seen = await until_two_run(front)
    first, second = sorted(seen)
    assert all(meta["link"] == f"127.0.0.1:{meta['pid']}" for meta in seen.values())
    # In rounds, all calls of a round at once and from one request, more than the places there are.
    for _ in range(5):
        targets = [first, second] * 10
        assert await front.who.remote(targets) == targets
    # Without a target both get work; one that is too busy to say how much it has is left alone.
    anywhere = set[str]()
    for _ in range(60):
        anywhere |= set(await front.who.remote([None] * 40))
        if anywhere == {first, second}:
            break
        await asyncio.sleep(0.5)
    assert anywhere == {first, second}


async def test_an_unknown_target_fails_at_once(front: Any) -> None:
    seen = await until_two_run(front)
    error = await front.error_of.remote("nobody")
    assert error.startswith("ReplicaGone: replica 'nobody' of 'Pool' is not running")
    assert all(name in error for name in seen)


async def test_a_caller_that_hangs_takes_no_replica_with_it(front: Any) -> None:
    """The calls it has open end while it cannot hear of that."""
    from ray import serve

    seen = await until_two_run(front)
    pool = serve.get_deployment_handle("Pool", APP)
    calling = front.call_all.remote(sorted(seen), 1.0)
    pid = await front.pid.remote()
    while not all([await pool.waiting.remote({"target": each}) for each in seen]):
        await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGSTOP)
    try:
        while any([await _within(pool.waiting.remote({"target": each})) for each in seen]):
            await asyncio.sleep(0.05)
        # Beyond the end of the calls, too.
        await asyncio.sleep(1)
        names = [await _within(pool.who.remote({"target": each})) for each in seen]
        assert names == list(seen)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert await calling == sorted(seen)


async def _within(response: Any) -> Any:
    return await asyncio.wait_for(response, 240)


async def test_a_killed_replica_leaves_the_directory_and_fails_who_waits_for_it(front: Any) -> None:
    seen = await until_two_run(front)
    dead, alive = sorted(seen)
    assert await front.die_while_waiting.remote(dead) == "ReplicaGone"
    assert dead not in await front.seen.remote()
    assert (await front.error_of.remote(dead)).startswith("ReplicaGone")
    assert await front.who.remote([alive] * 10) == [alive] * 10
    again = await until_two_run(front)
    assert dead not in again


async def test_a_replica_that_dies_unobserved_is_dropped_when_serve_notices(front: Any) -> None:
    seen = await until_two_run(front)
    victim = min(seen)
    os.kill(seen[victim]["pid"], signal.SIGKILL)

    async def poll() -> None:
        while victim in await front.seen.remote():
            await asyncio.sleep(0.1)

    await asyncio.wait_for(poll(), 240)
