"""The three figures of `bench engine` without a server: of ours, and of llama.cpp's own tools."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from cluster.bench.engine import RATES, measure_once
from cluster.bench.engine_worker import DECODE_PROMPT_TOKENS, DECODE_TOKENS, PREFILL_TOKENS
from cluster.compare.peers import PeerOptions
from cluster.compare.peers.llama_cpp import INSTALL
from cluster.compare.peers.model import program
from cluster.errors import ClusterError

_TIMEOUT_S = 600.0


def ours(source: Path, *, quantisation: str, group: int | None, threads: int) -> dict[str, float]:
    """One engine in one process. Raises ConfigError, ClusterError."""
    measured = measure_once(
        str(source), quantisation=quantisation, quantisation_group=group, threads=threads
    )
    return {name: measured[name] for name in RATES}


class LlamaTools:
    """`llama-bench` and `llama-batched-bench`."""

    def __init__(self, options: PeerOptions, threads: int) -> None:
        """Raises ConfigError where they are not installed."""
        self._bench = program("llama-bench", options, install=INSTALL)
        self._batched = program("llama-batched-bench", options, install=INSTALL)
        self._threads = str(threads)

    def figures(self, file: Path) -> dict[str, float]:
        """Raises ClusterError."""
        alone = _run(
            [
                *(self._bench, "-m", str(file), "-t", self._threads, "-fa", "1", "-r", "1"),
                *("-p", str(PREFILL_TOKENS), "-n", str(DECODE_TOKENS), "-o", "json"),
            ]
        )
        batch = _run(
            [
                *(self._batched, "-m", str(file), "-t", self._threads, "-fa", "on"),
                *("-c", "4096", "-b", "512", "-npp", str(DECODE_PROMPT_TOKENS)),
                *("-ntg", str(DECODE_TOKENS), "-npl", "16", "--output-format", "jsonl"),
            ]
        )
        out = alone_rates(json.loads(alone))
        out["decode_16_tok_s"] = batched_rate(batch)
        return out


def alone_rates(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of `llama-bench -o json`."""
    out: dict[str, float] = {}
    for row in rows:
        if row["n_gen"] == 0:
            out["prefill_512_tok_s"] = row["avg_ts"]
        elif row["n_prompt"] == 0:
            out["decode_1_tok_s"] = row["avg_ts"]
    return out


def batched_rate(text: str) -> float:
    """Of `llama-batched-bench --output-format jsonl`: tokens a second of all sequences."""
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return next(row["speed_tg"] for row in rows if row["pl"] == 16)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise ClusterError(
            f"{' '.join(command)}: status {done.returncode}:\n{done.stderr.strip()[-2000:]}"
        )
    return done.stdout
