"""Starting the processes of ranks."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Protocol

from engine.execution.ranks.wire import RankOrder


class RankProcesses(Protocol):
    """The processes of one group, started."""

    def failures(self) -> list[str]:
        """What is known of ranks that ended, for messages. Never waits."""
        ...

    def kill(self) -> None:
        """End all of them now, stopped ones too; their memory is free when it returns, or soon.
        Idempotent."""
        ...


class RankLauncher(Protocol):
    """Where ranks run: plain processes, or actors of a cluster."""

    host: str | None
    """Address the coordinator listens on. None: all ranks run on this machine."""

    own_gpu: bool
    """Each rank sees the one GPU that it computes on, rather than those of the machine."""

    def start(self, orders: list[RankOrder]) -> RankProcesses:
        """Start one process an order, all at once, without waiting for any to come up."""
        ...


class LocalProcesses:
    """Ranks as children of this process. They end within a second of it, even if it is killed: its
    end closes their channels, which their beats notice."""

    host: str | None = None
    own_gpu = False

    def start(self, orders: list[RankOrder]) -> RankProcesses:
        """See `RankLauncher.start`."""
        return _Children(orders)


class _Children:
    def __init__(self, orders: list[RankOrder]) -> None:
        self._children: list[subprocess.Popen[str]] = []
        try:
            for order in orders:
                child = subprocess.Popen(
                    [sys.executable, "-m", "engine.execution.ranks.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": str(order.num_threads)},
                )
                self._children.append(child)
                assert child.stdin is not None
                with contextlib.suppress(BrokenPipeError):  # it died at once: told later
                    child.stdin.write(json.dumps(order.to_json()) + "\n")
                    child.stdin.close()
        except BaseException:
            self.kill()
            raise

    def failures(self) -> list[str]:
        """See `RankProcesses.failures`."""
        return [
            f"rank {rank} (pid {child.pid}) ended with status {child.returncode}"
            for rank, child in enumerate(self._children)
            if child.poll() is not None
        ]

    def kill(self) -> None:
        """See `RankProcesses.kill`."""
        for child in self._children:
            if child.poll() is None:
                child.kill()
        for child in self._children:
            child.wait()
