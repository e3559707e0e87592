"""Watches a replica's GPUs from a thread of its own, and hands what it saw to the metrics.

NVML calls take milliseconds, and on a device that is falling off the bus they may not return: the
thread is a daemon, and the replica neither waits for it nor ends later because of it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from deployments.gpu.reader import GpuReader, NoGpu
from deployments.gpu.reading import Sample
from deployments.gpu.series import GpuSeries
from deployments.gpu.visible import Selection, owned
from deployments.metrics import Registry

logger = logging.getLogger(__name__)

EVERY_S = 5.0
STALE_AFTER_S = 3 * EVERY_S
"""A sample this old says nothing of now."""

REOPEN_ROUNDS = 12
"""Rounds after which a reader with a lost device is opened anew: a reset brings devices back."""


class Reader(Protocol):
    """What the watch needs of `GpuReader`."""

    def read(self) -> Sample: ...
    def close(self) -> None: ...


class GpuWatch:
    """Samples every few seconds. `report` writes the last sample into a registry.

    Where there is no GPU, no driver or nothing that this replica owns, the thread ends at once and
    `report` does nothing.
    """

    def __init__(
        self,
        registry: Registry,
        model: str,
        role: str,
        *,
        open_reader: Callable[[Selection | None], Reader] = GpuReader,
        every_s: float = EVERY_S,
        environ: Mapping[str, str] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._series = GpuSeries(registry, model, role)
        self._open_reader = open_reader
        self._every_s = every_s
        self._environ = os.environ if environ is None else environ
        self._now = now
        self._samples: deque[Sample] = deque(maxlen=8)
        """Taken and not reported yet: each is reported, as XIDs are in one of them only."""

        self._shown_s: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless this process owns no device. Idempotent."""
        selection = owned(self._environ, _assigned())
        if self._thread is not None or selection == ():
            return
        self._thread = threading.Thread(
            target=self._run, args=(selection,), name="gpu-watch", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; it is not waited for."""
        self._stop.set()

    def report(self) -> None:
        """Bring the series up to date with what was sampled. Costs nothing where nothing was."""
        while self._samples:
            sample = self._samples.popleft()
            self._series.show(sample)
            self._shown_s = sample.at_s
        if self._shown_s is not None and self._now() - self._shown_s > STALE_AFTER_S:
            self._series.clear()
            self._shown_s = None

    def _run(self, selection: Selection | None) -> None:
        try:
            reader = self._open_reader(selection)
        except NoGpu as error:
            logger.debug("%s", error)
            return
        except Exception:
            logger.exception("GPU telemetry is off")
            return
        try:
            self._sample(selection, reader)
        except Exception:
            # Whatever a driver comes up with, the replica serves on without these series.
            logger.exception("GPU telemetry ends")

    def _sample(self, selection: Selection | None, reader: Reader) -> None:
        lost: frozenset[str] = frozenset()
        rounds = 0
        while not self._stop.is_set():
            sample = reader.read()
            self._samples.append(sample)
            now_lost = frozenset(r.device.gpu for r in sample.readings if r.lost)
            for gpu in sorted(now_lost - lost):
                logger.warning("GPU %s is lost: it fell off the bus or needs a reset", gpu)
            for gpu in sorted(lost - now_lost):
                logger.warning("GPU %s is back", gpu)
            lost = now_lost
            rounds += 1
            if lost and rounds % REOPEN_ROUNDS == 0:
                reader.close()
                reopened = self._reopen(selection)
                if reopened is None:
                    return
                reader = reopened
            self._stop.wait(self._every_s)
        reader.close()

    def _reopen(self, selection: Selection | None) -> Reader | None:
        """None when asked to stop before a driver was there again."""
        while True:
            try:
                return self._open_reader(selection)
            except NoGpu as error:
                logger.debug("%s", error)
            if self._stop.wait(self._every_s * REOPEN_ROUNDS):
                return None


def _assigned() -> Sequence[str] | None:
    """The GPUs that Ray gave to this actor; None outside Ray."""
    import ray

    if not ray.is_initialized():
        return None
    ids: dict[str, Any] = ray.get_runtime_context().get_accelerator_ids()
    return [str(gpu) for gpu in ids.get("GPU", ())]
