"""A peer that is one command: started, waited for, ended with everything it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from cluster.compare.sides import Say, Served
from cluster.errors import ClusterError
from cluster.ports import free_ports

READY_TIMEOUT_S = 300.0
"""Servers that compile at their start take minutes."""

_END_TIMEOUT_S = 20.0
PORT = "{port}"
"""In a command: the port to listen on."""


class ProcessSide:
    """Serves by a command of its own."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """`PORT` in `command` becomes a free port; `notes` go into the report."""
        self._name = name
        self._command = list(command)
        self._environment = dict(environment or {})
        self._notes = list(notes)

    @property
    def name(self) -> str:
        return self._name

    def describe(self) -> dict[str, Any]:
        return {
            "name": self._name,
            "kind": "peer",
            "changes": self._notes,
            "command": self._command,
            "environment": self._environment,
        }

    @contextmanager
    def serving(self, say: Say) -> Iterator[Served]:
        began = time.monotonic()
        (port,) = free_ports(1)
        command = [word.replace(PORT, str(port)) for word in self._command]
        say(f"starting {self._name}: {' '.join(command)}")
        with tempfile.TemporaryDirectory(prefix="tr-peer-") as directory:
            log = Path(directory) / "log"
            with log.open("wb") as output:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **self._environment},
                    start_new_session=True,
                )
            try:
                url = f"http://127.0.0.1:{port}"
                self._await(url, child, log, began)
                yield Served(
                    url=url,
                    ready_s=time.monotonic() - began,
                    processes=lambda: _tree(child.pid),
                )
            finally:
                _end(child)

    def _await(self, url: str, child: subprocess.Popen[bytes], log: Path, began: float) -> None:
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while True:
                if child.poll() is not None:
                    raise ClusterError(
                        f"{self._name} ended with code {child.returncode} while it started:\n"
                        f"{_tail(log)}"
                    )
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{url}/v1/models").status_code == 200:
                        return
                if time.monotonic() - began > READY_TIMEOUT_S:
                    raise ClusterError(
                        f"{self._name} does not answer after {READY_TIMEOUT_S:g} s:\n{_tail(log)}"
                    )
                time.sleep(0.2)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])


def _tree(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _end(child: subprocess.Popen[bytes]) -> None:
    """The child and whatever it started: they share a process group of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        try:
            child.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue
    # Children that outlive their parent keep its group.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
