"""What every process of ours reports of itself: version, start, processor time, memory."""

from __future__ import annotations

import time
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import psutil

from deployments.metrics import Registry


class ProcessFigures:
    """Figures of this process under one role. `sample` brings them up to date."""

    def __init__(self, registry: Registry, role: str) -> None:
        self._process = psutil.Process()
        self._cpu = registry.counter("tailrace_process_cpu_seconds_total", role=role)
        self._memory = registry.gauge("tailrace_process_resident_memory_bytes", role=role)
        registry.gauge("tailrace_build_info", role=role, version=installed_version()).set(1)
        registry.gauge("tailrace_process_start_time_seconds", role=role).set(
            self._process.create_time()
        )
        self.sample()

    def sample(self) -> None:
        """Microseconds; once a second is plenty."""
        self._cpu.value = max(self._cpu.value, time.process_time())
        self._memory.set(self._process.memory_info().rss)


@lru_cache(maxsize=1)
def installed_version() -> str:
    """Of this package; `unknown` in a checkout that is not installed."""
    try:
        return version("tailrace")
    except PackageNotFoundError:
        return "unknown"
