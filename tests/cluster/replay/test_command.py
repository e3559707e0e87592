from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from stub_openai import Reply, StubOpenAI, prompt_tokens

from cluster.replay.command import _mix, _profile, _source
from cluster.replay.formats import read_trace
from cluster.replay.outcome import read_result
from engine.errors import ConfigError

ROOT = Path(__file__).parents[3]
SAMPLES = ROOT / "tests" / "traces"
CONV, MOONCAKE = SAMPLES / "azure2023_conv.jsonl", SAMPLES / "mooncake_conversation.jsonl"


async def start(home: Path, *arguments: object) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "cluster.cli", "replay", *map(str, arguments)),
        cwd=ROOT,
        env={**os.environ, "TAILRACE_HOME": str(home), "TAILRACE_API_KEY": "sk-hidden"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_a_mix_of_two_traces_is_replayed_and_reported(tmp_path):
    """The plan is what the server counts, to the token, and no key is written down."""
    async with StubOpenAI(lambda seen: Reply(ttft_s=0.01, itl_s=0.001)) as stub:
        process = await start(
            tmp_path,
            *(f"conv={CONV}", SAMPLES / "arxiv_summarization_lengths.csv", "--url", stub.url),
            *("--mix", "conv=0.7:default,arxiv=0.3:batch", "--rate", 60, "--requests", 60),
            *("--length-factor", 0.05, "--out", tmp_path / "out", "--json", "--label", "two"),
        )
        stdout, stderr = await process.communicate()
        assert process.returncode == 0, stderr.decode()
        counted = [prompt_tokens(seen) for seen in stub.seen]
        assert {seen.headers["authorization"] for seen in stub.seen} == {"Bearer sk-hidden"}
    summary = json.loads(stdout)
    assert summary["label"] == "two"
    assert summary["complete"] is True
    assert {tier: figures["requests"]["ok"] for tier, figures in summary["tiers"].items()} == {
        tier: sum(
            (seen.body.get("service_tier") == "flex") == (tier == "batch") for seen in stub.seen
        )
        for tier in ("default", "batch")
    }
    run, outcomes = read_result(tmp_path / "out" / "outcomes.jsonl")
    assert len(outcomes) == run.num_requests == 60
    assert [o.input_tokens for o in outcomes] == [o.planned_input_tokens for o in outcomes]
    assert sorted(counted) == sorted(o.planned_input_tokens for o in outcomes)
    assert [o.output_tokens for o in outcomes] == [o.planned_output_tokens for o in outcomes]
    assert run.end is not None
    assert run.end.client_cpu_s > 0
    assert [source["num_rows"] for source in run.sources] == [300, 300]
    assert "<html" in (tmp_path / "out" / "report.html").read_text()[:200]
    for file in (tmp_path / "out").iterdir():
        assert b"sk-hidden" not in file.read_bytes()


async def test_ctrl_c_gives_the_report_so_far(tmp_path):
    # One user: what has been asked for has been answered, but for the last.
    async with StubOpenAI(lambda seen: Reply(ttft_s=0.2)) as stub:
        process = await start(
            tmp_path, CONV, "--url", stub.url, "--users", 1, "--json",
            *("--length-factor", 0.05),
        )  # fmt: skip
        while len(stub.seen) < 5:
            await asyncio.sleep(0.02)
        process.send_signal(signal.SIGINT)
        stdout, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    summary = json.loads(stdout)
    assert summary["complete"] is False
    assert summary["all"]["requests"]["ok"] >= 4
    assert summary["num_unfinished"] == 300 - summary["all"]["requests"]["offered"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((CONV, "--url", "http://127.0.0.1:9"), "nobody answers"),
        ((SAMPLES / "README.md",), "of no format known here"),
        ((CONV, "--prompts", "ids"), "only --endpoint completions takes token ids"),
    ],
)
async def test_what_cannot_be_replayed_is_one_line_of_error(tmp_path, arguments, message):
    process = await start(tmp_path, *arguments)
    _, stderr = await process.communicate()
    assert process.returncode in (1, 3)
    assert stderr.decode().startswith("error: ")
    assert message in stderr.decode()
    assert "Traceback" not in stderr.decode()


OPTIONS = {
    "mix": None,
    "tier": None,
    "model": None,
    "sampling": None,
    "stop": (),
    "free_length": False,
    "turns": None,
    "think": None,
    "disconnects": None,
}


def test_options_are_for_parts_that_do_not_say_it_themselves(tmp_path):
    path = tmp_path / "mix.yaml"
    path.write_text("- {source: azure, turns: 2}\n- {source: moon}\n")
    traces = [read_trace(CONV), read_trace(MOONCAKE)]
    said = {"mix": str(path), "turns": 5, "sampling": '{"top_p": 0.5}'}
    first, second = _mix({**OPTIONS, **said}, traces)
    assert (first.source, second.source) == ("azure2023_conv", "mooncake_conversation")
    assert (first.turns, second.turns) == (2, 5)
    assert first.sampling == second.sampling == {"top_p": 0.5}
    with pytest.raises(ConfigError, match="'conversation' is none of"):
        _source("conversation", traces[:1])
    with pytest.raises(ConfigError, match="'conv' is more than one of"):
        _source("conv", traces)
    with pytest.raises(ConfigError, match="leave --tier out"):
        _mix({**OPTIONS, "mix": "conv", "tier": "flex"}, traces)
    with pytest.raises(ConfigError, match="there are priority"):
        _mix({**OPTIONS, "tier": "gold"}, traces)


def test_profiles_are_three_numbers():
    profile = _profile("0:2:10", "60:5:4")
    assert (profile.ramp.last, profile.bursts.every_s) == (2.0, 60.0)
    with pytest.raises(ConfigError, match=r"--ramp '1:2': must be three numbers"):
        _profile("1:2", None)
