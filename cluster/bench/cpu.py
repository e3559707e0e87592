"""CPU seconds of the cluster's processes, by what they do, and of everybody else's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from cluster.bench.stack import Stack

HAPROXY = "haproxy"
ALL = "all"


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds so far, by process. The kernel counts in ticks of 10 ms on most systems."""

    seconds: Mapping[int, float]

    def since(self, before: CpuTimes, pids: Iterable[int]) -> float:
        """Spent by `pids` since `before`. Those that ended or began meanwhile do not count."""
        return sum(
            self.seconds[pid] - before.seconds[pid]
            for pid in pids
            if pid in self.seconds and pid in before.seconds
        )


class CpuMeter:
    """Reads the processes of one stack."""

    def __init__(
        self, stack: Stack, *, model_app: str, gateway_app: str, client: psutil.Process
    ) -> None:
        """`client` puts the load on. It is a role of its own and no part of `all`: what it takes a
        token says how fast the machine was that day."""
        self._processes = {process.pid: process for process in stack.processes()}
        by_deployment = stack.pids()
        self.roles: dict[str, list[int]] = {
            "gateway": by_deployment.get((gateway_app, "Gateway"), []),
            "decode": by_deployment.get((model_app, "Decode"), []),
            HAPROXY: [pid for pid, process in self._processes.items() if _name(process) == HAPROXY],
            ALL: list(self._processes),
            "client": [client.pid],
        }
        self._processes[client.pid] = client

    def read(self) -> CpuTimes:
        seconds: dict[int, float] = {}
        for pid, process in self._processes.items():
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            seconds[pid] = times.user + times.system
        return CpuTimes(seconds)

    def between(self, before: CpuTimes, after: CpuTimes) -> dict[str, float]:
        """CPU seconds by role."""
        return {role: after.since(before, pids) for role, pids in self.roles.items()}


class Bystanders:
    """How much of the machine others took while something was measured: figures of a busy machine
    are not worth much, and whoever reads them later must be able to see it."""

    def __init__(self, ours: Callable[[], Iterable[psutil.Process]]) -> None:
        """`ours` are the processes that take part; this one always does."""
        self._ours = [psutil.Process(), *ours()]
        self._began_s = time.monotonic()
        self._busy_s = _busy_s()
        self._ours_s = self._sum()

    def share(self) -> float:
        """Of all cores' time since construction, 0 to 1."""
        busy_s = _busy_s() - self._busy_s - (self._sum() - self._ours_s)
        wall_s = (time.monotonic() - self._began_s) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, busy_s / wall_s)) if wall_s > 0 else 0.0

    def _sum(self) -> float:
        total = 0.0
        for process in self._ours:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            total += times.user + times.system
        return total


def _busy_s() -> float:
    """CPU seconds that all cores have worked since boot. Linux counts guests in `user` too."""
    times = psutil.cpu_times()._asdict()
    idle = ("idle", "iowait", "guest", "guest_nice", "steal")
    return sum(seconds for name, seconds in times.items() if name not in idle)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""
