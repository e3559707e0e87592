from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster import head, ports
from cluster.ports import free_ports
from cluster.state import StateDir


def test_no_port_of_the_head_is_the_one_the_front_will_listen_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    front, *others = free_ports(40)
    candidates = ports._candidates
    # The front's comes first whenever ports are looked for: nobody listens on it yet.
    monkeypatch.setattr(ports, "_candidates", lambda: iter([front, *others, *candidates()]))
    started: list[tuple[list[str], dict[str, str]]] = []

    class Child:
        pid = os.getpid()

        def __init__(self, command: list[str], *, env: dict[str, str], **_: Any) -> None:
            started.append((command, env))

    monkeypatch.setattr(subprocess, "Popen", Child)
    made = head.start(
        StateDir(tmp_path), host="127.0.0.1", port=front, num_cpus=1, config="c", code_dir=None
    )
    record = made.record
    shutil.rmtree(record.temp_dir)
    ((command, environment),) = started
    given = {part.rpartition("=")[2] for part in command} | {
        value for name, value in environment.items() if name.endswith("_PORT")
    }
    assert record.port == front
    assert str(record.gcs_port) in given
    assert str(record.metrics_port) in given
    assert str(front) not in given
    first, last = (
        int(environment[f"RAY_SERVE_DIRECT_INGRESS_{end}_HTTP_PORT"]) for end in ("MIN", "MAX")
    )
    assert not first <= front <= last
