"""CPU seconds of the cluster's processes, by what they do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil

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

    def __init__(self, stack: Stack, *, model_app: str, gateway_app: str) -> None:
        self._processes = {process.pid: process for process in stack.processes()}
        by_deployment = stack.pids()
        self.roles: dict[str, list[int]] = {
            "gateway": by_deployment.get((gateway_app, "Gateway"), []),
            "decode": by_deployment.get((model_app, "Decode"), []),
            HAPROXY: [pid for pid, process in self._processes.items() if _name(process) == HAPROXY],
            ALL: list(self._processes),
        }

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


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""
