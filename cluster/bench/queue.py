"""`tailrace bench queue`: how near the live admission queue comes to its own rules at their best.

Two questions. What of the optimum is left once grants, reports and releases travel over links
between processes? And how long does a grant take when there is room?

The queue runs in a process of its own. This one is gateway and decode replica: what a request does
there is a timer, so that nothing but the queue and its links is measured.
"""

from __future__ import annotations

import asyncio
import gc
import random
import secrets
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.bench.queue_load import (
    BATCH,
    INTERACTIVE,
    TIERS,
    Caller,
    Course,
    best_course,
    mixed_callers,
    report_of,
)
from cluster.bench.queue_worker import QueueProcess
from cluster.bench.summary import Summary, percentile, significant
from cluster.errors import ClusterError
from deployments.admission.client import QueueClient, QueueReporter
from deployments.admission.queue import QueueLimits
from deployments.link.messages import Grant

Say = Callable[[str], None]
T = TypeVar("T")

SLOTS = 2
SERVICE_S = 0.1
AMPLE_SLOTS = 4096
HELD_S = 0.02
"""How long a request of the second question keeps its slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured."""

    repeats: int = 5
    rate: float = 400.0
    """Acquires a second, Poisson."""

    over_s: float = 15.0
    seed: int = 1


def bench_queue(effort: Effort, say: Say) -> dict[str, Any]:
    """Both answers. Raises ClusterError if the queue cannot be started or refuses a request."""
    callers = mixed_callers()
    best = best_course(callers, slots=SLOTS, service_s=SERVICE_S)
    secret = secrets.token_bytes(32)
    courses: list[Course] = []
    for repeat in range(effort.repeats):
        say(f"{len(callers)} requests of {1000 * SERVICE_S:.0f} ms, {repeat + 1}/{effort.repeats}")
        with QueueProcess(secret) as process:
            courses.append(_run(_mixed(process.address, secret, callers)))
    say(f"{effort.rate:g} acquires a second for {effort.over_s:g} s")
    with QueueProcess(secret) as process:
        waits_s = _run(_acquires(process.address, secret, effort))
    worst_best_s = best.worst_start_s(callers, INTERACTIVE)
    makespans = [course.makespan_s for course in courses]
    worsts = [course.worst_start_s(callers, INTERACTIVE) for course in courses]
    return {
        "callers": {
            "batch": sum(c.tier == BATCH for c in callers),
            "interactive": sum(c.tier == INTERACTIVE for c in callers),
            "slots": SLOTS,
            "service_s": SERVICE_S,
        },
        "repeats": effort.repeats,
        "makespan_best_s": significant(best.makespan_s),
        "makespan_s": [significant(value) for value in makespans],
        "makespan_ratio": significant(statistics.median(makespans) / best.makespan_s),
        "worst_interactive_best_s": significant(worst_best_s),
        "worst_interactive_s": [significant(value) for value in worsts],
        "worst_interactive_ratio": significant(statistics.median(worsts) / worst_best_s),
        "acquire_rate": effort.rate,
        "acquires": len(waits_s),
        "acquire_p50_ms": significant(1000 * statistics.median(waits_s)),
        "acquire_p99_ms": significant(1000 * percentile(waits_s, 99)),
        "acquire_ms": Summary.of(waits_s, 1000).to_json(),
    }


def table(result: dict[str, Any]) -> list[str]:
    """For people."""
    callers, acquire = result["callers"], result["acquire_ms"]
    return [
        f"{callers['batch']} batch and {callers['interactive']} interactive requests of "
        f"{1000 * callers['service_s']:.0f} ms, {callers['slots']} slots, median of "
        f"{result['repeats']}:",
        f"  makespan           {result['makespan_ratio']:.3f} x the best of "
        f"{result['makespan_best_s']:.2f} s",
        f"  worst interactive  {result['worst_interactive_ratio']:.3f} x the best of "
        f"{result['worst_interactive_best_s']:.2f} s",
        f"acquire at {result['acquire_rate']:g} a second: p50 {acquire['p50']} ms, p99 "
        f"{acquire['p99']} ms, max {acquire['max']} ms ({acquire['count']})",
    ]


class _Replica:
    """A decode replica that runs timers."""

    def __init__(self, address: str, secret: bytes, slots: int) -> None:
        async def find() -> str:
            return address

        self.client = QueueClient(find, secret, "g1")
        self._reporter = QueueReporter(find, secret, "d1")
        self._slots = slots
        self._alive: dict[int, tuple[int, int, int]] = {}

    async def open(self) -> None:
        self.client.set_policy(TIERS, QueueLimits())
        self.client.start()
        self._reporter.start()
        self._changed()
        if not await self.client.wait_available(20.0):
            raise ClusterError("the queue does not answer within 20 s")
        while not self._reporter.available:
            await asyncio.sleep(0.01)
        # By the time that a grant comes back the first report has arrived, too.
        self.client.release(await self.client.acquire(cost_tokens=1, prompt_tokens=1))

    async def close(self) -> None:
        await self.client.close()
        await self._reporter.close()

    async def acquire(self, caller: Caller) -> Grant:
        return await self.client.acquire(
            cost_tokens=10, prompt_tokens=1, priority=caller.rank, tier=caller.tier
        )

    def begin(self, grant: Grant, caller: Caller) -> None:
        self._alive[grant.grant_id] = (grant.epoch, grant.grant_id, caller.rank)
        self._changed()

    def end(self, grant: Grant) -> None:
        del self._alive[grant.grant_id]
        self._changed()
        self.client.release(grant)

    def _changed(self) -> None:
        self._reporter.changed(report_of(list(self._alive.values()), self._slots))


async def _mixed(address: str, secret: bytes, callers: Sequence[Caller]) -> Course:
    replica = _Replica(address, secret, SLOTS)
    await replica.open()
    loop = asyncio.get_running_loop()
    began_s = loop.time() + 0.05

    async def one(caller: Caller) -> tuple[float, float]:
        await asyncio.sleep(began_s + caller.at_s - loop.time())
        grant = await replica.acquire(caller)
        started_s = loop.time()
        replica.begin(grant, caller)
        await asyncio.sleep(SERVICE_S)
        ended_s = loop.time()
        replica.end(grant)
        return started_s - began_s, ended_s - began_s

    try:
        times = await asyncio.gather(*(one(caller) for caller in callers))
    finally:
        await replica.close()
    return Course(tuple(t[0] for t in times), tuple(t[1] for t in times))


async def _acquires(address: str, secret: bytes, effort: Effort) -> list[float]:
    """Seconds of each acquire, those of the first second left out."""
    replica = _Replica(address, secret, AMPLE_SLOTS)
    await replica.open()
    loop = asyncio.get_running_loop()
    rng = random.Random(effort.seed)
    waits: list[float] = []
    ends: set[asyncio.Task[None]] = set()

    async def one(counts: bool) -> None:
        caller = Caller(0.0, INTERACTIVE)
        # Not the loop's own clock, which stands still between two looks and counts milliseconds.
        asked_s = time.perf_counter()
        grant = await replica.acquire(caller)
        if counts:
            waits.append(time.perf_counter() - asked_s)
        replica.begin(grant, caller)
        await asyncio.sleep(HELD_S)
        replica.end(grant)

    gc.collect()
    gc.freeze()
    began_s = due_s = loop.time()
    try:
        while due_s < began_s + 1.0 + effort.over_s:
            due_s += rng.expovariate(effort.rate)
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            task = asyncio.ensure_future(one(due_s > began_s + 1.0))
            ends.add(task)
            task.add_done_callback(ends.discard)
        await asyncio.gather(*ends)
    finally:
        gc.unfreeze()
        await replica.close()
    return waits


def _run(main: Coroutine[Any, Any, T]) -> T:
    """As a gateway's: on uvloop where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
