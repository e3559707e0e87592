from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from cluster.bench.load_tools import (
    AIPerf,
    GuideLLM,
    Latency,
    Measured,
    Offered,
    from_aiperf,
    from_guidellm,
    run_tool,
    tokenizer_folder,
)
from cluster.errors import ClusterError

OFFERED = Offered(
    url="http://127.0.0.1:1",
    model="m",
    rate=10.0,
    prompts=("one two", "three four"),
    input_tokens=2,
    output_tokens=4,
)


def aiperf_export() -> dict[str, Any]:
    """The parts of `profile_export_aiperf.json` that are read."""
    return {
        "request_count": {"unit": "requests", "avg": 2.0},
        "time_to_first_token": {"unit": "ms", "avg": 50.5, "p50": 50.0, "p99": 61.0, "std": 4.0},
        "inter_token_latency": {"unit": "ms", "avg": 10.0, "p50": 9.9, "p99": 10.4},
        "request_throughput": {"unit": "requests/sec", "avg": 9.5},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 38.0},
    }


def guidellm_export() -> dict[str, Any]:
    """The parts of `--output kind=json` that are read."""

    def latency(mean: float) -> dict[str, Any]:
        percentiles = {"p50": mean - 1, "p95": mean, "p99": mean + 5}
        return {"successful": {"mean": mean, "count": 2, "percentiles": percentiles}}

    def request(start: float) -> dict[str, Any]:
        return {
            "request_start_time": start,
            "request_end_time": start + 0.4,
            "output_tokens": 4,
            "info": {},
        }

    return {
        "metadata": {},
        "benchmarks": [
            {
                "metrics": {
                    "time_to_first_token_ms": latency(51.0),
                    "inter_token_latency_ms": latency(10.0),
                    "requests_per_second": {"successful": {"mean": 777.0}},
                },
                "requests": {"successful": [request(100.1), request(100.0)], "errored": []},
            }
        ],
    }


def test_aiperfs_export_is_taken_as_it_says():
    assert from_aiperf(aiperf_export()) == Measured(
        num_requests=2,
        ttft_ms=Latency(mean=50.5, p50=50.0, p99=61.0),
        itl_ms=Latency(mean=10.0, p50=9.9, p99=10.4),
        requests_per_s=9.5,
        tokens_per_s=38.0,
    )


def test_guidellms_rates_are_over_the_time_from_the_first_request_to_the_last_answer():
    assert from_guidellm(guidellm_export()) == Measured(
        num_requests=2,
        ttft_ms=Latency(mean=51.0, p50=50.0, p99=56.0),
        itl_ms=Latency(mean=10.0, p50=9.0, p99=15.0),
        requests_per_s=pytest.approx(2 / 0.5),
        tokens_per_s=pytest.approx(8 / 0.5),
    )


def test_another_unit_and_another_form_are_refused():
    export = aiperf_export()
    export["inter_token_latency"]["unit"] = "s"
    with pytest.raises(ClusterError, match="in 's', not in ms"):
        from_aiperf(export)
    with pytest.raises(ClusterError, match="not an export of AIPerf"):
        from_aiperf({"request_count": None})
    empty = guidellm_export()
    empty["benchmarks"][0]["requests"]["successful"] = []
    with pytest.raises(ClusterError, match="without an answer"):
        from_guidellm(empty)


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_tool_gets_prompts_and_a_tokenizer_that_loads_and_its_export_is_read(tmp_path: Path):
    export = json.dumps(aiperf_export())
    aiperf = script(
        tmp_path / "aiperf",
        f'echo "$HF_HOME" > told; mkdir -p export/run\n'
        f"cat > export/run/profile_export_aiperf.json <<'END'\n{export}\nEND",
    )
    directory = tmp_path / "run"
    assert run_tool(AIPerf(aiperf), OFFERED, directory) == from_aiperf(aiperf_export())
    lines = [json.loads(line) for line in (directory / "prompts.jsonl").read_text().splitlines()]
    assert lines[0] == {"text": "one two", "output_length": 4}
    assert (directory / "told").read_text().strip() == str(directory / "cache")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_folder(directory) / "tokenizer.json"))
    assert tokenizer.encode("any words").ids == [0, 0]


def test_a_tool_that_fails_or_is_not_there_says_where_to_look(tmp_path: Path):
    failing = GuideLLM(script(tmp_path / "guidellm", "exit 3"))
    with pytest.raises(ClusterError, match=r"guidellm ended with status 3: see .*log\.txt"):
        run_tool(failing, OFFERED, tmp_path / "a")
    with pytest.raises(ClusterError, match="left no"):
        run_tool(GuideLLM(script(tmp_path / "quiet", ":")), OFFERED, tmp_path / "b")
    with pytest.raises(ClusterError, match="give its path with --aiperf"):
        run_tool(AIPerf(str(tmp_path / "missing")), OFFERED, tmp_path / "c")
