"""State of a server's replicas while it is loaded, from its metrics."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import httpx

_SERIES: Mapping[str, str] = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
}
_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_REPLICA = re.compile(r'\breplica="([^"]*)"')


class PoolSampler:
    """Reads `URL/metrics` every second on a thread of its own, between `with` and its end.

    A server without such metrics gives no samples. `names` says what replicas are called; those
    that it does not know keep the name they have.
    """

    def __init__(
        self, url: str, *, names: Mapping[str, str] | None = None, every_s: float = 1.0
    ) -> None:
        self._url = f"{url.rstrip('/').removesuffix('/v1')}/metrics"
        self._names = names or {}
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.samples: list[dict[str, Any]] = []
        """`at_s` from the beginning of the `with`, and by kind of figure a value a replica."""

        self._span_s = 0.0

    def __enter__(self) -> PoolSampler:
        self._began_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._span_s = time.monotonic() - self._began_s
        self._stop.set()
        self._thread.join()

    def during(self, duration_s: float) -> list[dict[str, Any]]:
        """Samples of the last `duration_s` before the `with` ended, counted from their beginning:
        a run that writes its requests before it begins ends with its last answer."""
        first_s = max(0.0, self._span_s - duration_s)
        return [
            {**each, "at_s": round(each["at_s"] - first_s, 3)}
            for each in self.samples
            if each["at_s"] >= first_s
        ]

    def _read(self) -> None:
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while not self._stop.wait(self._every_s):
                try:
                    answer = client.get(self._url)
                except httpx.HTTPError:
                    continue  # Too busy to answer, or gone: the outcomes will tell.
                if answer.status_code != 200:
                    return
                at_s = time.monotonic() - self._began_s
                if figures := parse(answer.text, self._names):
                    self.samples.append({"at_s": round(at_s, 3), **figures})


def parse(text: str, names: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """By kind of figure, a value a replica (all models of it together)."""
    figures: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        found = _LINE.match(line)
        kind = _SERIES.get(found[1]) if found else None
        if found is None or kind is None:
            continue
        replica = _REPLICA.search(found[2] or "")
        name = replica[1] if replica else ""
        values = figures.setdefault(kind, {})
        name = names.get(name, name)
        values[name] = values.get(name, 0.0) + float(found[3])
    return figures
