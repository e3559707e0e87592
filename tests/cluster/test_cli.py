from __future__ import annotations

import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def tailrace(
    home: Path, *args: str, stdin: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster.cli", *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "TAILRACE_HOME": str(home), **environment},
    )


class Chat(http.server.BaseHTTPRequestHandler):
    """Says how many messages it was sent."""

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "counter"}]}), "application/json")

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = f"{len(request['messages'])} messages"
        events = [
            {"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 1}},
        ]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        self._send(body + "data: [DONE]\n\n", "text/event-stream")

    def _send(self, text: str, kind: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@pytest.fixture
def server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Chat) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_help_lists_the_commands_and_imports_no_ray():
    code = (
        "import sys; from click.testing import CliRunner; from cluster.cli import commands\n"
        "print(CliRunner().invoke(commands, ['--help']).output)\n"
        "print('IMPORTED', [m for m in ('ray', 'torch', 'transformers') if m in sys.modules])"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT)
    for command in ("chat", "down", "status", "up"):
        assert f"\n  {command} " in output
    assert "IMPORTED []" in output


def test_no_module_of_the_command_line_brings_in_torch():
    code = (
        "import importlib, pathlib, sys\n"
        "for file in pathlib.Path('cluster').glob('*.py'):\n"
        "    importlib.import_module('cluster.' + file.stem)\n"
        "from cluster import config; config.load()\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT) == "[]\n"


def test_down_with_nothing_running_is_fine(tmp_path: Path):
    done = tailrace(tmp_path, "down", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["stopped"] is False


def test_status_with_nothing_running_exits_with_3(tmp_path: Path):
    done = tailrace(tmp_path, "status", "--json")
    assert done.returncode == 3
    assert json.loads(done.stdout)["running"] is False
    assert "start one: tailrace up" in done.stderr
    assert "Traceback" not in done.stderr


def test_wrong_usage_exits_with_2(tmp_path: Path):
    assert tailrace(tmp_path, "up", "--port", "0").returncode == 2
    assert tailrace(tmp_path, "upp").returncode == 2


def test_a_bad_file_is_one_error_and_starts_nothing(tmp_path: Path):
    file = tmp_path / "bad.yaml"
    file.write_text("applications: [")
    done = tailrace(tmp_path / "home", "up", str(file), "--json")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {file}:1:16: not YAML")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "home").exists()


def test_a_busy_port_is_refused_before_anything_starts(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = tailrace(tmp_path, "up", "--detach", "--port", str(port))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"error: http_options.port={port}: port {port} on 127.0.0.1 is taken by "
        f"{_name_of_this_process()} (pid {os.getpid()}); end it, or choose another port: "
        "tailrace up --port N"
    )
    assert not (tmp_path / "session.json").exists()


def test_an_address_where_no_ray_answers_is_named(tmp_path: Path):
    done = tailrace(tmp_path, "up", "--address", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert "http://127.0.0.1:1: no Ray dashboard answers" in done.stderr


def test_chat_reads_a_pipe_and_keeps_the_conversation(tmp_path: Path, server: str):
    done = tailrace(tmp_path, "chat", "--url", server, "--system", "s", stdin="one\n\ntwo\n")
    assert done.returncode == 0
    assert done.stdout == "2 messages\n4 messages\n"
    assert done.stderr.count("1 tokens, prompt 4") == 2


def test_chat_with_json_gives_one_object(tmp_path: Path, server: str):
    done = tailrace(tmp_path, "chat", "--url", server, "--json", stdin="one\n")
    result = json.loads(done.stdout)
    assert result["model"] == "counter"
    assert [(t["question"], t["answer"]) for t in result["turns"]] == [("one", "1 messages")]
    assert result["turns"][0]["prompt_tokens"] == 4


def test_chat_names_the_models_there_are(tmp_path: Path, server: str):
    done = tailrace(tmp_path, "chat", "--url", server, "--model", "other")
    assert done.returncode == 1
    assert done.stderr == "error: model 'other' is not served here; there are: counter\n"


def test_chat_with_nobody_there_exits_with_3(tmp_path: Path):
    done = tailrace(tmp_path, "chat", "--url", "http://127.0.0.1:1")
    assert done.returncode == 3
    assert "start it with `tailrace up`" in done.stderr


def _name_of_this_process() -> str:
    import psutil

    return psutil.Process().name()
