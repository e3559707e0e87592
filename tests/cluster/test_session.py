"""The real command on a real Ray, with an application that takes no time to start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from cluster import processes
from cluster.ports import free_ports

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parent.parent.parent

APP = """\
import os
from fastapi import FastAPI
from ray import serve

web = FastAPI()

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Inner:
    def __init__(self):
        self.word = None

    def reconfigure(self, user_config):
        self.word = user_config["word"]

    def say(self):
        return {"word": self.word, "pid": os.getpid()}

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
@serve.ingress(web)
class Outer:
    def __init__(self, inner):
        self.inner = inner

    @web.get("/say")
    async def say(self):
        return await self.inner.say.remote()

@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Broken:
    def __init__(self):
        raise ValueError("the weights end after 12 of 91 bytes")

def build(args):
    return Outer.bind(Inner.bind())

def broken(args):
    return Broken.bind()
"""


@dataclass(frozen=True)
class Command:
    """`tailrace` in a state directory and with applications of its own."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "TAILRACE_HOME": str(self.folder / "home")}

    def start(self, *args: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "cluster.cli", *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
            cwd=ROOT,
        )

    def __call__(self, *args: str) -> tuple[int, Any, str]:
        """Exit code, the JSON object on standard output, standard error."""
        command = self.start(*args, "--json")
        output, errors = command.communicate(timeout=900)
        return command.returncode, json.loads(output) if output else None, errors

    def config(self, *, word: str = "one", builder: str = "build") -> str:
        (self.folder / "trivial.py").write_text(APP)
        file = self.folder / f"{builder}-{word}.yaml"
        deployments = (
            f"    deployments: [{{name: Inner, user_config: {{word: {word}}}}}]\n"
            if builder == "build"
            else ""
        )
        file.write_text(
            "applications:\n"
            "  - name: trivial\n"
            f"    import_path: trivial:{builder}\n"
            "    route_prefix: /\n" + deployments
        )
        return str(file)


def marked(session: str) -> list[str]:
    return [" ".join(p.cmdline()) for p in processes.of_session(session)]


def kept_of(session: dict[str, Any]) -> Path:
    """The session's temporary directory."""
    return Path(session["log_dir"]).parents[2]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    command = Command(tmp_path_factory.mktemp("session"))
    yield command
    command("down")


@pytest.fixture(scope="module")
def session(command: Command) -> dict[str, Any]:
    """A session that was brought up with `--detach`."""
    port = str(free_ports(1)[0])
    code, ready, errors = command("up", command.config(), "--detach", "--port", port)
    assert code == 0, errors
    assert ready["url"] == f"http://127.0.0.1:{port}"
    assert "trivial: RUNNING (Inner 1/1, Outer 1/1)" in errors
    return ready


def say(session: dict[str, Any]) -> dict[str, Any]:
    return httpx.get(f"{session['url']}/say", timeout=240).raise_for_status().json()


def test_the_application_answers_through_haproxy(session: dict[str, Any]):
    assert session["haproxy"] is True
    assert say(session)["word"] == "one"


def test_status_shows_replicas_and_the_processes_that_carry_the_mark(
    command: Command, session: dict[str, Any]
):
    code, status, _ = command("status")
    assert code == 0
    assert status["running"]
    assert status["healthy"]
    deployments = status["applications"]["trivial"]["deployments"]
    assert {name: d["status"] for name, d in deployments.items()} == {
        "Inner": "HEALTHY",
        "Outer": "HEALTHY",
    }
    (inner,) = deployments["Inner"]["replicas"]
    assert inner["pid"] == say(session)["pid"]
    # Workers, HAProxy and Ray's own: all of them carry the mark, renamed or not.
    names = {psutil.Process(pid).name().partition(":")[0] for pid in status["pids"]}
    assert {"haproxy", "raylet", "gcs_server", "ray"} <= names
    assert {inner["pid"], status["head_pid"]} <= set(status["pids"])


def test_everything_but_haproxys_own_ports_listens_on_this_machine_only(
    command: Command, session: dict[str, Any]
):
    pids = set(command("status")[1]["pids"])
    outside = {
        psutil.Process(c.pid).name().partition(":")[0]
        for c in psutil.net_connections("inet")
        if c.pid in pids
        and c.status == psutil.CONN_LISTEN
        and c.laddr.ip not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")
    }
    # Serve opens one gRPC port a replica on every interface; Ray's token guards it.
    assert outside <= {"haproxy", "ray"}


def test_user_config_changes_in_place(command: Command, session: dict[str, Any]):
    before = say(session)
    code, updated, errors = command("up", command.config(word="two"))
    assert code == 0, errors
    assert updated["updated"]
    assert updated["session"] == session["session"]
    assert say(session) == {"word": "two", "pid": before["pid"]}


def test_a_running_session_keeps_its_port(command: Command, session: dict[str, Any]):
    code, _, errors = command("up", command.config(), "--port", str(free_ports(1)[0]))
    assert code == 1
    assert "Serve cannot move; run `tailrace down` first" in errors


def test_an_update_that_fails_leaves_the_session_up(command: Command, session: dict[str, Any]):
    code, ready, errors = command("up", command.config(builder="broken"))
    assert (code, ready) == (1, None)
    assert errors.splitlines()[-1] == "ValueError: the weights end after 12 of 91 bytes"
    assert command("status")[0] == 0


def test_down_leaves_no_process_and_no_file(command: Command, session: dict[str, Any]):
    (haproxy,) = [p.pid for p in processes.of_session(session["session"]) if p.name() == "haproxy"]
    code, result, errors = command("down")
    assert code == 0, errors
    assert result["stopped"]
    assert result["num_processes"] > 10
    assert marked(session["session"]) == []
    assert not psutil.pid_exists(haproxy)
    assert not kept_of(session).exists()
    assert command("down")[1]["stopped"] is False
    assert command("status")[0] == 3


def test_in_the_foreground_a_signal_takes_everything_down(command: Command):
    up = command.start("up", command.config(), "--port", str(free_ports(1)[0]), "--json")
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(up.stderr or ()))
    reader.start()
    assert up.stdout is not None
    ready = json.loads(up.stdout.readline())
    assert say(ready)["word"] == "one"
    up.send_signal(signal.SIGINT)
    assert up.wait(timeout=600) == 0
    reader.join()
    up.communicate()
    assert lines[-1].startswith("stopped in ")
    assert marked(ready["session"]) == []
    assert command("status")[0] == 3


def test_a_start_that_fails_is_taken_down_and_keeps_its_logs(command: Command):
    port = str(free_ports(1)[0])
    code, ready, errors = command("up", command.config(builder="broken"), "--port", port)
    assert (code, ready) == (1, None)
    *_, cause, logs = errors.splitlines()
    assert cause == "ValueError: the weights end after 12 of 91 bytes"
    folder = Path(logs.removeprefix("logs: "))
    assert (folder / "ray" / "serve").is_dir()
    assert (folder / "head.log").is_file()
    assert marked(folder.name) == []


def test_interrupting_a_start_leaves_nothing(command: Command):
    up = command.start("up", command.config(), "--port", str(free_ports(1)[0]))
    record = command.folder / "home" / "session.json"
    deadline = time.monotonic() + 600
    while not record.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    session = json.loads(record.read_text())["session"]
    assert marked(session) != []
    up.send_signal(signal.SIGTERM)
    output, errors = up.communicate(timeout=600)
    assert up.returncode == 130
    assert output == ""
    assert errors.endswith("interrupted\n")
    assert marked(session) == []
    assert not record.exists()
