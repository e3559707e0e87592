"""AIPerf and guidellm as processes: what they are told, and what their exports say.

Both send prompts that they are given, to `/v1/completions`, with token counts as the server tells
them: so neither needs the model's own tokenizer, only one that loads. Written against AIPerf 0.13
and guidellm 0.8.

AIPerf's ITL is (end of answer - TTFT) / (tokens - 1) of a request, guidellm's the mean gap behind
the first token of a request; both then summarise requests.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from cluster.bench.summary import rounded
from cluster.errors import ClusterError

PATH = "/v1/completions"
GRACE_S = 240.0
"""For a tool's own start and end, on top of the seconds it offers load."""

_SNAPSHOT = "0" * 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """The load of one run."""

    url: str
    model: str
    rate: float
    """Requests a second, at even distances."""

    prompts: tuple[str, ...]
    """One a request."""

    input_tokens: int
    output_tokens: int
    api_key: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Milliseconds. None where whoever measured does not tell."""

    mean: float | None = None
    p50: float | None = None
    p99: float | None = None

    def to_json(self) -> dict[str, float | None]:
        told = {name: getattr(self, name) for name in ("mean", "p50", "p99")}
        return {**told, **rounded({n: v for n, v in told.items() if v is not None})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one client, or the server, says of one run."""

    num_requests: int
    """Answered in full."""

    ttft_ms: Latency
    itl_ms: Latency
    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    """Output tokens."""

    def to_json(self) -> dict[str, Any]:
        rates = {"requests_per_s": self.requests_per_s, "tokens_per_s": self.tokens_per_s}
        return {
            "num_requests": self.num_requests,
            "ttft_ms": self.ttft_ms.to_json(),
            "itl_ms": self.itl_ms.to_json(),
            **{n: v if v is None else rounded({n: v})[n] for n, v in rates.items()},
        }


class LoadTool(Protocol):
    """A client that is not ours."""

    name: str

    def command(self, offered: Offered, directory: Path) -> list[str]:
        """Writes its input into `directory` and says what to run there."""
        ...

    def read(self, directory: Path) -> Measured:
        """Of the exports in `directory`. Raises ClusterError."""
        ...


class AIPerf:
    """`aiperf profile`."""

    name: str = "aiperf"

    def __init__(self, executable: str) -> None:
        self._executable = executable

    def command(self, offered: Offered, directory: Path) -> list[str]:
        prompts = directory / "prompts.jsonl"
        _write_lines(
            prompts,
            [{"text": text, "output_length": offered.output_tokens} for text in offered.prompts],
        )
        command = [
            *(self._executable, "profile", "--ui", "none"),
            *("--url", offered.url, "--model", offered.model, "--tokenizer", "local/tokenizer"),
            *("--endpoint-type", "completions", "--streaming", "--use-server-token-count"),
            *("--input-file", str(prompts), "--custom-dataset-type", "single_turn"),
            *("--dataset-sampling-strategy", "sequential"),
            *("--request-rate", f"{offered.rate:g}", "--arrival-pattern", "constant"),
            *("--request-count", str(len(offered.prompts)), "--use-legacy-max-tokens"),
            *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
            *("--no-server-metrics", "--no-gpu-telemetry"),
            *("--output-artifact-dir", str(directory / "export")),
        ]
        if offered.api_key is not None:
            command += ["--api-key", offered.api_key]
        return command

    def read(self, directory: Path) -> Measured:
        found = sorted((directory / "export").rglob("profile_export_aiperf.json"))
        if not found:
            raise ClusterError(f"aiperf left no profile_export_aiperf.json in {directory}")
        return from_aiperf(_read_json(found[0]))


class GuideLLM:
    """`guidellm run`."""

    name: str = "guidellm"

    def __init__(self, executable: str) -> None:
        self._executable = executable

    def command(self, offered: Offered, directory: Path) -> list[str]:
        prompts, export = directory / "prompts.jsonl", directory / "export"
        export.mkdir()
        _write_lines(
            prompts,
            [
                {
                    "prompt": text,
                    "prompt_tokens_count": offered.input_tokens,
                    "output_tokens_count": offered.output_tokens,
                }
                for text in offered.prompts
            ],
        )
        backend = {
            "kind": "openai_http",
            "target": offered.url,
            "model": offered.model,
            "request_format": PATH,
            # It would ask for /health, which is not of OpenAI's API.
            "validate_backend": False,
            "extras": {"body": {"temperature": 0}},
        }
        if offered.api_key is not None:
            backend["api_key"] = offered.api_key
        return [
            *(self._executable, "run", "--disable-console-interactive"),
            *("--backend", json.dumps(backend)),
            *("--profile", f"kind=constant,rate={offered.rate:g}"),
            *("--constraint", f"kind=max_requests,count={len(offered.prompts)}"),
            *("--tokenizer", f"kind=hf_auto,model={tokenizer_folder(directory)}"),
            *("--data", f"kind=json_file,path={prompts}"),
            *("--output", f"kind=json,path={export / 'benchmarks.json'}"),
        ]

    def read(self, directory: Path) -> Measured:
        path = directory / "export" / "benchmarks.json"
        if not path.exists():
            raise ClusterError(f"guidellm left no {path}")
        return from_guidellm(_read_json(path))


def run_tool(tool: LoadTool, offered: Offered, directory: Path) -> Measured:
    """Raises ClusterError where it does not start, fails or takes for ever; its words are in
    `directory`."""
    directory.mkdir(parents=True)
    cache = _write_tokenizer(directory)
    log = directory / "log.txt"
    limit_s = len(offered.prompts) / offered.rate + GRACE_S
    environment = {
        **os.environ,
        "HF_HOME": str(cache),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "NO_PROXY": "*",
        "no_proxy": "*",
    }
    try:
        with log.open("wb") as out:
            ended = subprocess.run(
                tool.command(offered, directory),
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=limit_s,
                check=False,
            )
    except OSError as error:
        raise ClusterError(f"{tool.name}: {error}; give its path with --{tool.name}") from error
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{tool.name} did not end within {limit_s:.0f} s: see {log}") from None
    if ended.returncode:
        raise ClusterError(f"{tool.name} ended with status {ended.returncode}: see {log}")
    return tool.read(directory)


def tokenizer_folder(directory: Path) -> Path:
    """Where `_write_tokenizer` puts it."""
    return directory / "cache/hub/models--local--tokenizer/snapshots" / _SNAPSHOT


def _write_tokenizer(directory: Path) -> Path:
    """A tokenizer that loads without a network, laid out as a hub's cache, which is the form that
    all loaders take. It knows one token; nothing is counted with it."""
    folder = tokenizer_folder(directory)
    folder.mkdir(parents=True)
    refs = folder.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text(_SNAPSHOT)
    unknown = "<unk>"
    token = {"id": 0, "content": unknown, "special": True, "normalized": False}
    token |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [token],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {unknown: 0}, "unk_token": unknown},
        **dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder")),
    }
    _write_lines(folder / "tokenizer.json", [tokenizer])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": unknown}
    _write_lines(folder / "tokenizer_config.json", [{**settings, "eos_token": unknown}])
    _write_lines(folder / "config.json", [{"model_type": "llama"}])
    return directory / "cache"


def from_aiperf(export: Mapping[str, Any]) -> Measured:
    """Of `profile_export_aiperf.json`. Raises ClusterError for anything else."""
    try:
        return Measured(
            num_requests=round(export["request_count"]["avg"]),
            ttft_ms=_aiperf_latency(export["time_to_first_token"]),
            itl_ms=_aiperf_latency(export["inter_token_latency"]),
            requests_per_s=export["request_throughput"]["avg"],
            tokens_per_s=export["output_token_throughput"]["avg"],
        )
    except (KeyError, TypeError) as error:
        raise ClusterError(
            f"not an export of AIPerf 0.13, or of a run without an answer: {error!r}"
        ) from error


def _aiperf_latency(metric: Mapping[str, Any]) -> Latency:
    if metric["unit"] != "ms":
        raise ClusterError(f"aiperf tells latencies in {metric['unit']!r}, not in ms")
    return Latency(mean=metric["avg"], p50=metric["p50"], p99=metric["p99"])


def from_guidellm(export: Mapping[str, Any]) -> Measured:
    """Of `--output kind=json` with one benchmark. Raises ClusterError for anything else.

    Rates are requests and tokens over the benchmark's time from the first request to the last
    answer: its own `requests_per_second` summarises the rate between neighbours.
    """
    try:
        (benchmark,) = export["benchmarks"]
        metrics = benchmark["metrics"]
        requests = cast("Sequence[Mapping[str, Any]]", benchmark["requests"]["successful"])
        began = min(request["request_start_time"] for request in requests)
        seconds = max(request["request_end_time"] for request in requests) - began
        tokens = sum(request["output_tokens"] for request in requests)
        return Measured(
            num_requests=len(requests),
            ttft_ms=_guidellm_latency(metrics["time_to_first_token_ms"]),
            itl_ms=_guidellm_latency(metrics["inter_token_latency_ms"]),
            requests_per_s=len(requests) / seconds,
            tokens_per_s=tokens / seconds,
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ClusterError(
            f"not an export of guidellm 0.8, or of a run without an answer: {error!r}"
        ) from error


def _guidellm_latency(metric: Mapping[str, Any]) -> Latency:
    of = metric["successful"]
    return Latency(mean=of["mean"], p50=of["percentiles"]["p50"], p99=of["percentiles"]["p99"])


def _write_lines(path: Path, values: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ClusterError(f"{path}: {error}") from error
