from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import processes

SLEEP = "print('there', flush=True); import time; time.sleep(3600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP
# Starts a child in a session of its own and dies: nobody's child, nobody's group.
ORPHAN = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True,
                         stdout=subprocess.PIPE)
child.stdout.readline()
print('there', flush=True)
"""


class Started:
    """Starts marked processes; whatever a test leaves behind is ended with it."""

    def __init__(self) -> None:
        self.session = uuid.uuid4().hex
        self.home = f"/nowhere/{self.session}"
        self.children: list[subprocess.Popen[bytes]] = []

    def __call__(self, code: str, *, marked: bool = True) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        if marked:
            environment.update(TAILRACE_SESSION=self.session, TAILRACE_HOME=self.home)
        child = subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"there\n"
        self.children.append(child)
        return child

    def close(self) -> None:
        for process in processes.of_session(self.session):
            process.kill()
        for child in self.children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()


@pytest.fixture
def start() -> Iterator[Started]:
    started = Started()
    yield started
    started.close()


def find(start: Started) -> list[int]:
    return sorted(p.pid for p in processes.of_session(start.session))


def test_marked_processes_are_ended_and_others_are_not(start: Started):
    ours, theirs = start(SLEEP), start(SLEEP, marked=False)
    assert processes.end(lambda: processes.of_session(start.session)) == [ours.pid]
    assert ours.wait() == -15
    assert theirs.poll() is None


def test_a_process_that_ignores_sigterm_is_killed(start: Started):
    child = start(STUBBORN)
    processes.end(lambda: processes.of_session(start.session))
    assert child.wait() == -9


def test_an_orphan_in_a_session_of_its_own_is_found_and_ended(start: Started):
    parent = start(ORPHAN)
    parent.wait()
    (orphan,) = find(start)
    assert orphan != parent.pid
    assert processes.end(lambda: processes.of_session(start.session)) == [orphan]
    assert find(start) == []


def test_without_a_record_the_directory_names_the_processes(start: Started):
    child = start(SLEEP)
    assert [p.pid for p in processes.of_home(start.home)] == [child.pid]
    assert processes.of_home(start.home + "/other") == []


def test_we_are_not_among_our_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    # As when `down` is typed into a shell that a replica started.
    code = (
        "import os; from cluster import processes; "
        "print([p.pid for p in processes.of_session(os.environ['TAILRACE_SESSION'])])"
    )
    monkeypatch.setenv("TAILRACE_SESSION", uuid.uuid4().hex)
    assert subprocess.check_output([sys.executable, "-c", code]) == b"[]\n"


def test_ending_nothing_is_fine():
    assert processes.end(list) == []


def test_a_pid_that_somebody_else_has_now_is_not_ours(start: Started):
    child = start(SLEEP)
    created = processes.started_at(child.pid)
    assert created is not None
    assert processes.is_alive(child.pid, created)
    assert not processes.is_alive(child.pid, created - 5)
    child.kill()
    child.wait()
    assert not processes.is_alive(child.pid, created)
