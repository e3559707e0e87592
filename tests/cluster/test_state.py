from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from cluster.errors import ClusterError
from cluster.state import Record, StateDir

RECORD = Record(
    session="abc",
    head_pid=1,
    head_started=2.0,
    host="127.0.0.1",
    port=8000,
    dashboard_port=3,
    gcs_port=4,
    stats_port=5,
    metrics_port=6,
    temp_dir="/tmp/tr-x",
    config="config.yaml",
    code_dir=None,
    started_at=7.0,
)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_directory_and_what_is_in_it_are_the_users_alone(tmp_path: Path):
    state = StateDir(tmp_path / "deep" / "home")
    state.save(RECORD)
    assert mode(state.path) == 0o700
    assert mode(state.path / "session.json") == 0o600
    assert mode(state.link_secret()) == 0o600
    assert mode(state.ray_token()) == 0o600


def test_a_directory_others_may_read_is_closed(tmp_path: Path):
    tmp_path.chmod(0o755)
    assert mode(StateDir(tmp_path).path) == 0o700


def test_a_secret_is_made_once(tmp_path: Path):
    first = StateDir(tmp_path).link_secret().read_text()
    assert StateDir(tmp_path).link_secret().read_text() == first
    assert len(bytes.fromhex(first)) == 32
    assert StateDir(tmp_path).ray_token().read_text() != first


def test_a_secret_that_others_may_read_is_closed(tmp_path: Path):
    state = StateDir(tmp_path)
    state.link_secret().chmod(0o644)
    assert mode(state.link_secret()) == 0o600


def test_a_record_survives_the_process(tmp_path: Path):
    StateDir(tmp_path).save(RECORD)
    assert StateDir(tmp_path).load() == RECORD


def test_writing_leaves_nothing_but_the_record(tmp_path: Path):
    state = StateDir(tmp_path)
    state.save(RECORD)
    state.save(dataclasses.replace(RECORD, port=9))
    assert os.listdir(tmp_path) == ["session.json"]


def test_a_forgotten_record_is_none_and_forgetting_twice_is_fine(tmp_path: Path):
    state = StateDir(tmp_path)
    state.save(RECORD)
    state.forget()
    state.forget()
    assert state.load() is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', '{"version": 1}'])
def test_a_record_that_cannot_be_read_names_the_way_out(tmp_path: Path, text: str):
    state = StateDir(tmp_path)
    (tmp_path / "session.json").write_text(text)
    with pytest.raises(ClusterError, match=r"not a session record .*`tailrace down`"):
        state.load()


def test_two_starts_at_once_are_refused_by_pid(tmp_path: Path):
    one, two = StateDir(tmp_path), StateDir(tmp_path)
    with (
        one.starting(),
        pytest.raises(ClusterError, match=rf"another `tailrace up` \(pid {os.getpid()}\)"),
        two.starting(),
    ):
        pass
    with two.starting():
        pass


def test_the_variable_chooses_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TAILRACE_HOME", str(tmp_path / "there"))
    assert StateDir.from_environment().path == tmp_path / "there"


def test_a_file_in_the_way_is_named(tmp_path: Path):
    (tmp_path / "home").write_text("")
    with pytest.raises(ClusterError, match=r"home: .*; set TAILRACE_HOME to a directory of yours"):
        StateDir(tmp_path / "home")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("10.0.0.7", "http://10.0.0.7:8000"),
    ],
)
def test_the_url_is_one_a_client_can_reach(host: str, url: str):
    assert dataclasses.replace(RECORD, host=host).url == url
