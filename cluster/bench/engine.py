"""`tailrace bench engine`: one engine, no cluster, beside the limit its linear layers set."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.bench.engine_worker import DECODE_PROMPT_TOKENS, EngineJob
from cluster.bench.summary import significant
from cluster.errors import ClusterError
from engine.errors import ConfigError

Say = Callable[[str], None]

RATES = ("prefill_512_tok_s", "decode_1_tok_s", "decode_16_tok_s")


def bench_engine(
    source: str,
    *,
    dtype: str = "auto",
    quantisation: str = "keep",
    quantisation_group: int | None = None,
    kv_dtype: str = "auto",
    context: int | None = None,
    threads: int = 2,
    repeats: int = 5,
    starts: int = 3,
    max_chunk_tokens: int | None = None,
    say: Say,
) -> dict[str, Any]:
    """Measure in processes with a fixed number of threads. Medians of `repeats` and `starts`.

    context: tokens that come before those that are decoded. None: 32.

    Raises:
        ConfigError: the model cannot be loaded.
        ClusterError: the measuring process died.
    """

    def job(repeats: int) -> EngineJob:
        return EngineJob(
            source=source,
            dtype=dtype,
            quantisation=quantisation,
            quantisation_group=quantisation_group,
            kv_dtype=kv_dtype,
            threads=threads,
            repeats=repeats,
            spawned_s=time.monotonic(),
            max_chunk_tokens=max_chunk_tokens,
            decode_prompt_tokens=context or DECODE_PROMPT_TOKENS,
        )

    started: list[float] = []
    for i in range(starts):
        started.append(_run(job(0), threads)["startup_s"])
        say(f"start {i + 1} of {starts}: {started[-1]:.2f} s")
    say(f"measuring, {repeats} times")
    measured = _run(job(repeats), threads)
    return {"quantisation": quantisation} | assemble(source, started, measured)


def measure_once(
    source: str, *, quantisation: str, quantisation_group: int | None, threads: int
) -> dict[str, Any]:
    """Each rate once, for those who take turns with somebody else. Raises as `bench_engine`."""
    job = EngineJob(
        source=source,
        dtype="auto",
        quantisation=quantisation,
        quantisation_group=quantisation_group,
        threads=threads,
        repeats=1,
        spawned_s=time.monotonic(),
        rates_only=True,
    )
    return _run(job, threads)


def bench_split(
    source: str, *, quantisation: str, quantisation_group: int | None, rounds: int, say: Say
) -> dict[str, Any]:
    """Two engines of one thread each at the same time, beside one of two, in turn.

    `split_ratio.<figure>` is what the two do together over what the one does, median of rounds.
    Raises as `bench_engine`.
    """

    def run(threads: int) -> dict[str, float]:
        measured = measure_once(
            source,
            quantisation=quantisation,
            quantisation_group=quantisation_group,
            threads=threads,
        )
        return {name: measured[name] for name in RATES}

    rows: dict[str, list[float]] = {name: [] for name in RATES}
    with ThreadPoolExecutor(2) as pool:
        for number in range(rounds):
            both = list(pool.map(run, (1, 1)))
            whole = run(2)
            for name, ratios in rows.items():
                ratios.append(sum(each[name] for each in both) / whole[name])
            told = ", ".join(f"{ratios[-1]:.2f}" for ratios in rows.values())
            say(f"round {number + 1} of {rounds}: two of one thread do {told} of one of two")
    return {
        **{f"split_ratio.{n}": significant(statistics.median(v)) for n, v in rows.items()},
        "rounds": {name: [significant(v) for v in ratios] for name, ratios in rows.items()},
        "model": source,
        "quantisation": quantisation,
    }


def assemble(source: str, started: Sequence[float], measured: dict[str, Any]) -> dict[str, Any]:
    """The command's one JSON object. Limits are None for a model without linear layers."""
    out: dict[str, Any] = {
        "model": source,
        "dtype": measured["dtype"],
        "kv_dtype": measured["kv_dtype"],
        "kv_bytes_per_token": measured["kv_bytes_per_token"],
        "decode_context_tokens": measured["decode_context_tokens"],
        "threads": measured["num_threads"],
        "torch": measured["torch"],
        "cpu_flags": measured["cpu_flags"],
        "max_chunk_tokens": measured["max_chunk_tokens"],
        "others_cpu_share": significant(measured["others_cpu_share"]),
        "startup_s": significant(statistics.median(started)),
    }
    for name in RATES:
        out[name] = significant(measured[name])
        limit = measured.get(f"{name}_limit")
        out[f"{name}_limit"] = None if limit is None else significant(limit)
    for name, share in measured["step_overhead"].items():
        out[f"step_overhead_{name}_ratio"] = significant(share)
    for name, gain in measured["overlap_gain"].items():
        out[f"overlap_{name}_ratio"] = significant(gain)
    out["samples"] = {
        "startup_s": [significant(value) for value in started],
        **{
            name: [significant(value) for value in values]
            for name, values in measured["samples"].items()
        },
        **{
            f"overlap_{name}_ratio": [significant(value) for value in values]
            for name, values in measured["overlap_gain_samples"].items()
        },
    }
    return out


def table(result: dict[str, Any]) -> list[str]:
    """For people: each rate, its limit, and how much of the limit is reached."""
    lines = [
        f"{result['model']}  {result['dtype']}  weights: {result.get('quantisation', 'keep')}  "
        f"KV: {result['kv_dtype']}  {result['threads']} threads  "
        f"torch {result['torch']}",
        f"others' share of the CPUs {100 * result['others_cpu_share']:7.0f} %",
        f"start-up                {result['startup_s']:8.2f} s",
    ]
    labels = {
        "prefill_512_tok_s": "prefill, 512 tokens",
        "decode_1_tok_s": "decode, batch 1",
        "decode_16_tok_s": "decode, batch 16",
    }
    lines.append(
        f"decode behind           {result['decode_context_tokens']:8} tokens of "
        f"{result['kv_bytes_per_token']} bytes each"
    )
    for name, label in labels.items():
        line = f"{label:22}{result[name]:10.1f} tokens/s"
        limit = result[f"{name}_limit"]
        if limit is not None:
            share = 100 * result[name] / limit
            line += f"   {share:3.0f} % of its linear layers alone ({limit:.1f})"
        lines.append(line)
    shares = ", ".join(
        f"{100 * result[f'step_overhead_{name}_ratio']:.1f} % {name}"
        for name in ("greedy", "sampled")
    )
    lines.append(f"of a step at batch 16, outside the model: {shares}")
    gains = ", ".join(
        f"{result[f'overlap_{name}_ratio']:.2f} {name}" for name in ("greedy", "sampled")
    )
    lines.append(f"decode at batch 16, overlap on over off: {gains}")
    return lines


def _run(job: EngineJob, threads: int) -> dict[str, Any]:
    # Before torch is imported: its thread pool reads this once.
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    child = subprocess.run(
        [sys.executable, "-m", "cluster.bench.engine_worker"],
        input=job.to_json(),
        stdout=subprocess.PIPE,
        stderr=None,
        text=True,
        env=environment,
        check=False,
    )
    if child.returncode != 0 or not child.stdout.strip():
        raise ClusterError(
            f"the measuring process ended with status {child.returncode}; its last words are above"
        )
    result = json.loads(child.stdout.splitlines()[-1])
    if "error" in result:
        raise ConfigError(result["error"])
    return result
