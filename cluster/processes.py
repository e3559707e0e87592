"""The processes of a session: known by a mark in their environment, ended to the last one.

`ray stop` ends every Ray on the machine; process groups and parents miss the workers (each leads a
group) and an HAProxy whose manager died. The environment is inherited by all of them and stays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

from cluster.errors import ClusterError
from cluster.state import HOME_VARIABLE, SESSION_VARIABLE

_GRACE_S = 2.0
_GIVE_UP_S = 15.0


def started_at(pid: int) -> float | None:
    """When the process was created (Unix seconds), None if it is gone or a zombie."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def is_alive(pid: int, started: float) -> bool:
    """Whether `pid` is still the process that was created at `started`."""
    now = started_at(pid)
    return now is not None and abs(now - started) < 0.1


def of_session(session: str) -> list[psutil.Process]:
    """Every live process of this session, ours and our ancestors left out."""
    return _marked(lambda environment: environment.get(SESSION_VARIABLE) == session)


def of_home(home: str) -> list[psutil.Process]:
    """Every live process of any session of this state directory: what to end without a record."""
    return _marked(
        lambda environment: (
            SESSION_VARIABLE in environment and environment.get(HOME_VARIABLE) == home
        )
    )


def end(find: Callable[[], list[psutil.Process]]) -> list[int]:
    """End all that `find` returns, and what they start meanwhile. Returns the pids that were ended.

    Asked first (SIGTERM), killed after two seconds: Serve would wait half a minute for requests
    to drain, and the one who says `down` does not.

    Raises:
        ClusterError: some are still there after 15 s (a process stuck in the kernel).
    """
    ended: set[int] = set()
    asked: set[int] = set()
    began = time.monotonic()
    while processes := find():
        elapsed = time.monotonic() - began
        if elapsed > _GIVE_UP_S:
            pids = sorted(process.pid for process in processes)
            raise ClusterError(
                f"processes {pids} are still there {_GIVE_UP_S:g} s after SIGKILL; "
                "look at them with `ps` and run `tailrace down` again"
            )
        for process in processes:
            ended.add(process.pid)
            try:
                if elapsed > _GRACE_S:
                    process.kill()
                elif process.pid not in asked:
                    asked.add(process.pid)
                    process.terminate()
            except psutil.Error:
                continue  # It ended by itself.
        time.sleep(0.1)
    return sorted(ended)


def _marked(matches: Callable[[dict[str, str]], bool]) -> list[psutil.Process]:
    us = {os.getpid()}
    us.update(parent.pid for parent in psutil.Process().parents())
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        if process.pid in us:
            continue
        try:
            if process.status() != psutil.STATUS_ZOMBIE and matches(process.environ()):
                found.append(process)
        except (psutil.Error, OSError):
            continue  # Gone, or somebody else's: not one of ours.
    return found
