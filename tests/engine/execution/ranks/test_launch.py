"""Ranks end with their coordinator, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

COORDINATOR = """
import time
from engine.execution.ranks.executor import RankGroupStart
from engine.execution.ranks.launch import LocalProcesses
from engine.models.shard import Grid

start = RankGroupStart(
    None, Grid(tensor_parallel=2), LocalProcesses(), block_tokens=8, num_threads=1, limit_s=60.0
)
start.allocate(2, ["/dev/null"] * 2)
executor = start.executor()
print(*executor.pids, flush=True)
time.sleep(3600)
"""


def test_a_killed_coordinator_leaves_no_rank_behind():
    with subprocess.Popen(
        [sys.executable, "-c", COORDINATOR], stdout=subprocess.PIPE, text=True
    ) as coordinator:
        assert coordinator.stdout is not None
        pids = [int(pid) for pid in coordinator.stdout.readline().split()]
        assert len(pids) == 2
        os.kill(coordinator.pid, signal.SIGKILL)
    deadline = time.monotonic() + 240
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(pid: int) -> bool:
    """A process that ended may wait for whoever adopted it to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
