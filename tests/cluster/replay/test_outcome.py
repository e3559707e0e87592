from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cluster.replay.outcome import Outcome, ResultError, ResultWriter, Run, RunEnd, read_result

RUN = Run(
    label="r",
    started_at="2026-11-30T12:00:00.000+00:00",
    url="http://x",
    endpoint="chat",
    seed=3,
    sources=({"name": "conv", "num_offered": 2},),
    mix=({"source": "conv", "share": 1.0},),
    rate=2.0,
    num_requests=2,
    command=("tailrace", "replay", "conv.jsonl"),
)
FIRST = Outcome(
    index=0,
    source="conv",
    scheduled_s=0.5,
    sent_s=0.75,
    attempt_s=0.75,
    first_token_s=1.0,
    end_s=2.0,
    chunk_times=(1.0, 1.5),
    chunk_tokens=(1, 2),
    planned_input_tokens=10,
    planned_output_tokens=3,
    input_tokens=10,
    output_tokens=3,
    phases={"queue": 0.125},
    status=200,
    result="ok",
    finish_reason="length",
)
SECOND = replace(FIRST, index=1, result="shed", status=429, chunk_times=(), chunk_tokens=None)
END = RunEnd(duration_s=2.0, num_outcomes=2, client_cpu_s=0.1)


def write(path: Path, *, end: bool = True) -> None:
    with path.open("wb") as file:
        writer = ResultWriter(file, RUN)
        writer.outcome(SECOND)
        writer.outcome(FIRST)
        if end:
            writer.end(END)


def test_a_raw_result_reads_back_as_it_was_in_order_of_the_schedule(tmp_path: Path):
    write(tmp_path / "r.jsonl")
    run, outcomes = read_result(tmp_path / "r.jsonl")
    assert run == replace(RUN, end=END)
    assert outcomes == [FIRST, SECOND]
    assert FIRST.lateness_s == 0.25


def test_a_killed_replay_leaves_a_result_without_its_cut_off_line(tmp_path: Path):
    path = tmp_path / "r.jsonl"
    write(path, end=False)
    path.write_bytes(path.read_bytes()[:-20])
    run, outcomes = read_result(path)
    assert run.end is None
    assert outcomes == [SECOND]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ('{"kind": "outcome"}\n', ":1: the first line must be the run"),
        ('{"kind": "run", "schema": 99}\n', ":1: schema 99: this version reads 1"),
        ("[1]\n", ":1: list: must be an object"),
        ("no\n", ":1: not JSON"),
    ],
)
def test_what_is_no_result_is_refused_with_its_line(tmp_path: Path, text: str, message: str):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(ResultError) as refused:
        read_result(path)
    assert str(refused.value).startswith(str(path))
    assert message in str(refused.value)


def test_an_outcome_with_a_result_of_another_kind_is_refused():
    with pytest.raises(ResultError, match=r"result='fine'.*ok, shed, error, timeout"):
        Outcome.from_json({**FIRST.to_json(), "result": "fine"})
