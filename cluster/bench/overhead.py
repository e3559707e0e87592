"""`tailrace bench overhead`: what the stack adds to its engine, in time and in CPU.

Two questions. How much later does the first token come than from the same engine in a process of
its own (pairs in turn, so that a machine whose speed drifts is equally unkind to both)? And what
does everything around the engine cost, priced with an engine that computes nothing?

Time to first token is from sending the request to the first content that is not empty.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from cluster.bench.cpu import Bystanders, CpuMeter
from cluster.bench.loads import Ask
from cluster.bench.prompts import text_of
from cluster.bench.stack import ServedModel, Stack, own_stack
from cluster.bench.summary import Summary, compare, significant
from cluster.bench.worker import Load, Worker
from cluster.errors import ClusterError
from engine.text.text_model import load_text
from engine.text.tokenizer import Tokenizer

Say = Callable[[str], None]

LOCAL_TOKENS = 16
"""Prompt of the pairs that the decode replica computes itself."""

REMOTE_TOKENS = 512
"""Prompt of the pairs that a prefill replica computes."""

STREAMS = (1, 16, 64)
SYNTHETIC_TOKENS = 100
CONCURRENCY = (1, 8, 32)

KEYS = (
    "ttft_added_ms",
    "ttft_added_pd_ms",
    "transfer_exposed_ratio",
    "burst64_e2e_p50_s",
    "burst64_ttft_p50_ms",
    "burst64_ttft_p99_ms",
    "spread64_ttft_p50_ms",
    "spread64_ttft_p99_ms",
    "gateway_us_per_token",
    "gateway_us_per_request",
    "decode_us_per_token",
)
"""Always there; None where this cluster cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How often everything is measured."""

    pairs: int = 50
    rounds: int = 3
    """Of each closed loop, and of each synthetic pattern at 64 streams."""

    short_requests: int = 300
    """Of one token each, for the CPU of a request."""


def bench_overhead(
    url: str | None, config: Path | None, *, model: str | None, effort: Effort, say: Say
) -> dict[str, Any]:
    """Measure a cluster of our own, or the one at `url`.

    Raises:
        EngineError: it cannot be started, looked into or asked.
    """
    if url is not None:
        stack = Stack.running(url)
        try:
            return measure(stack, model=model, effort=effort, say=say)
        finally:
            stack.close()
    with own_stack(config, say) as stack:
        return measure(stack, model=model, effort=effort, say=say)


def measure(stack: Stack, *, model: str | None, effort: Effort, say: Say) -> dict[str, Any]:
    """All of it on one running cluster."""
    served = stack.models()
    synthetic = next((each for each in served if each.args.source == "synthetic"), None)
    real = _choose(served, model)
    out: dict[str, Any] = dict.fromkeys(KEYS)
    out["url"] = stack.url
    if synthetic is not None:
        say("synthetic engine")
        out.update(_synthetic(stack, synthetic, effort, say))
    else:
        say(f"no synthetic model at {stack.url}: nothing is said of CPU and of 64 streams")
    out.update(_beside_engine(stack, real, effort, say))
    return out


def _choose(served: Sequence[ServedModel], name: str | None) -> ServedModel:
    real = [each for each in served if each.args.source != "synthetic"]
    if name is not None:
        real = [each for each in real if each.name == name]
    if not real:
        names = ", ".join(each.name for each in served) or "none"
        raise ClusterError(f"model {name or 'that computes'}: not served here; there are: {names}")
    return real[0]


# Beside the same engine in one process


def _beside_engine(stack: Stack, model: ServedModel, effort: Effort, say: Say) -> dict[str, Any]:
    tokenizer = load_text(model.args.source).tokenizer
    prompts = _Prompts(model.name, tokenizer, random.Random(time.time_ns()))
    with Worker() as worker:
        say(f"{model.name}: building the engine to compare with")
        built = worker.engine(model.args.model_dump(), model.settings.model_dump())
        worker.server(stack.url)
        bystanders = Bystanders(lambda: [*stack.processes(), psutil.Process(worker.pid)])
        for side in ("engine", "server"):
            worker.closed(side, [prompts.ask(LOCAL_TOKENS, 4) for _ in range(4)], 1)
            worker.closed(side, [prompts.ask(REMOTE_TOKENS, 4) for _ in range(2)], 1)
        out: dict[str, Any] = {
            "model": model.name,
            "dtype": built["dtype"],
            "threads": built["threads"],
        }
        say(f"{effort.pairs} pairs of {LOCAL_TOKENS} tokens, computed by the decode replica")
        local = _pairs(worker, prompts, LOCAL_TOKENS, effort.pairs)
        out["ttft_added_ms"] = significant(local.added_ms)
        out["ttft_local_ms"] = local.to_json()
        out.update(_remote(stack, model, worker, prompts, effort, say))
        out["closed_loop"] = {
            str(concurrency): _closed_loop(worker, prompts, concurrency, effort, say)
            for concurrency in CONCURRENCY
        }
        out["others_cpu_share"] = significant(bystanders.share())
    return out


@dataclass(frozen=True, slots=True)
class _Pairs:
    stack_s: list[float]
    engine_s: list[float]

    @property
    def added_ms(self) -> float:
        """Median over the pairs of what the stack took longer."""
        return statistics.median(
            1000 * (ours - alone) for ours, alone in zip(self.stack_s, self.engine_s, strict=True)
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "stack": Summary.of(self.stack_s, 1000).to_json(),
            "in_process": Summary.of(self.engine_s, 1000).to_json(),
            "added_median": significant(self.added_ms),
        }


class _Prompts:
    """Requests with prompts of an exact length that nobody has seen."""

    def __init__(self, model: str, tokenizer: Tokenizer, rng: random.Random) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._rng = rng

    def ask(self, num_tokens: int, max_tokens: int) -> Ask:
        text, ids = text_of(self._tokenizer, self._rng, num_tokens)
        body = {
            "model": self._model,
            "prompt": text,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Ask(prompt_ids=tuple(ids), body=body, max_tokens=max_tokens)


def _pairs(worker: Worker, prompts: _Prompts, num_tokens: int, count: int) -> _Pairs:
    """The same prompt to both sides, one after the other, first one side first, then the other."""
    taken = _Pairs([], [])
    for i in range(count):
        ask = prompts.ask(num_tokens, 4)
        for side in ("server", "engine") if i % 2 else ("engine", "server"):
            # Compute threads spin for some milliseconds after their last work.
            time.sleep(0.02)
            (result,) = worker.closed(side, [ask], 1).results
            if result["prompt_tokens"] != num_tokens:
                raise ClusterError(
                    f"the server counts {result['prompt_tokens']} tokens where {num_tokens} were "
                    "sent: it has another tokenizer than this machine"
                )
            times = taken.stack_s if side == "server" else taken.engine_s
            times.append(_ttft_s(result))
    return taken


def _ttft_s(result: dict[str, Any]) -> float:
    arrivals = result["arrivals_s"]
    return arrivals[0] if arrivals else result["e2e_s"]


def _remote(
    stack: Stack, model: ServedModel, worker: Worker, prompts: _Prompts, effort: Effort, say: Say
) -> dict[str, Any]:
    """Pairs whose prompt a prefill replica computes, and how much of the transfer shows."""
    if not model.args.prefill:
        say(f"{model.name} has no prefill pool: nothing is said of transfers")
        return {}
    say(f"{effort.pairs} pairs of {REMOTE_TOKENS} tokens, computed by a prefill replica")
    before = _num_pulls(stack, model)
    remote = _pairs(worker, prompts, REMOTE_TOKENS, effort.pairs)
    stats = stack.ask_replicas(model.app, "Decode", "stats", {})
    pulled = _num_pulls(stack, model) - before
    out: dict[str, Any] = {
        "ttft_added_pd_ms": significant(remote.added_ms),
        "ttft_pd_ms": remote.to_json(),
        "num_pulls": pulled,
    }
    if pulled != effort.pairs or len(stats) != 1:
        say(
            f"{pulled} of {effort.pairs} prompts came from prefill, {len(stats)} decode replicas: "
            "the exposed part of the transfers is only known of one replica that pulled every time"
        )
        return out
    pulls = stats[0]["recent_pulls"][-effort.pairs :]
    if len(pulls) == effort.pairs:
        out["transfer_exposed_ratio"] = significant(
            statistics.median(
                pull["exposed_s"] / ttft for pull, ttft in zip(pulls, remote.stack_s, strict=True)
            )
        )
        out["transfer"] = {
            "exposed_ms": Summary.of([p["exposed_s"] for p in pulls], 1000).to_json(),
            "pull_ms": Summary.of([p["seconds"] for p in pulls], 1000).to_json(),
            "bytes": pulls[-1]["bytes"],
        }
    return out


def _num_pulls(stack: Stack, model: ServedModel) -> int:
    return sum(
        count
        for stats in stack.ask_replicas(model.app, "Decode", "stats", {})
        for decision, count in stats["counters"]["decisions"].items()
        if decision.startswith("disaggregated")
    )


def _closed_loop(
    worker: Worker, prompts: _Prompts, concurrency: int, effort: Effort, say: Say
) -> dict[str, Any]:
    """Short prompts and 64 tokens out, both sides in turn, their figures pooled over the rounds."""
    num_requests = {1: 4, 8: 16}.get(concurrency, 2 * concurrency)
    say(f"closed loop, {concurrency} at once, {effort.rounds} rounds")
    loads: dict[str, list[Load]] = {"server": [], "engine": []}
    for i in range(effort.rounds):
        asks = [prompts.ask(32, 64) for _ in range(num_requests)]
        for side in ("server", "engine") if i % 2 else ("engine", "server"):
            time.sleep(0.02)
            loads[side].append(worker.closed(side, asks, concurrency))
    figures = {side: _Figures.of(taken) for side, taken in loads.items()}
    ours, alone = figures["server"], figures["engine"]
    return {
        "ttft_ms": compare(ours.ttft_ms.p50, alone.ttft_ms.p50),
        "itl_ms": compare(ours.itl_ms.p50, alone.itl_ms.p50),
        "e2e_s": compare(ours.e2e_s.p50, alone.e2e_s.p50),
        "throughput_tok_s": compare(ours.throughput_tok_s, alone.throughput_tok_s),
        "stack": ours.to_json(),
        "in_process": alone.to_json(),
    }


@dataclass(frozen=True, slots=True)
class _Figures:
    """Of all requests of some loads. ITL is the gap between two arrivals of content, pooled."""

    ttft_ms: Summary
    itl_ms: Summary
    e2e_s: Summary
    throughput_tok_s: float
    num_tokens: int

    @classmethod
    def of(cls, loads: Sequence[Load]) -> _Figures:
        results = [result for load in loads for result in load.results]
        gaps = [
            later - earlier
            for result in results
            for earlier, later in zip(result["arrivals_s"], result["arrivals_s"][1:], strict=False)
        ]
        num_tokens = sum(result["completion_tokens"] for result in results)
        return cls(
            ttft_ms=Summary.of([_ttft_s(result) for result in results], 1000),
            itl_ms=Summary.of(gaps or [0.0], 1000),
            e2e_s=Summary.of([result["e2e_s"] for result in results]),
            throughput_tok_s=num_tokens / sum(load.wall_s for load in loads),
            num_tokens=num_tokens,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "ttft_ms": self.ttft_ms.to_json(),
            "itl_ms": self.itl_ms.to_json(),
            "e2e_s": self.e2e_s.to_json(),
            "throughput_tok_s": significant(self.throughput_tok_s),
        }


# With an engine that computes nothing


def _synthetic(stack: Stack, model: ServedModel, effort: Effort, say: Say) -> dict[str, Any]:
    out: dict[str, Any] = {}
    patterns: dict[str, Any] = {}
    with Worker() as worker:
        client = psutil.Process(worker.pid)
        meter = CpuMeter(stack, model_app=model.app, gateway_app=stack.gateway(), client=client)
        worker.server(stack.url)
        bystanders = Bystanders(lambda: [*stack.processes(), client])
        worker.closed("server", [synthetic_chat(model.name, i, 8) for i in range(64)], 16)
        idle = _idle(meter)
        for streams in STREAMS:
            # One stream is a hundred tokens: more rounds, or the CPU is a handful of ticks.
            rounds = effort.rounds if streams == 64 else effort.rounds * (8 if streams == 1 else 2)
            for pattern, over_s in (("burst", 0.0), ("spread", 1.0)):
                say(f"{streams} streams, {pattern}, {rounds} rounds")
                figures, cpu = _pattern(worker, meter, model.name, streams, over_s, rounds)
                patterns[f"{pattern}{streams}"] = {**figures.to_json(), "cpu_us_per_token": cpu}
                if streams == 64:
                    out[f"{pattern}64_ttft_p50_ms"] = significant(figures.ttft_ms.p50)
                    out[f"{pattern}64_ttft_p99_ms"] = significant(figures.ttft_ms.p99)
                if streams == 64 and pattern == "burst":
                    out["burst64_e2e_p50_s"] = significant(figures.e2e_s.p50)
                    out["gateway_us_per_token"] = cpu["gateway"]
                    out["decode_us_per_token"] = cpu["decode"]
        say(f"{effort.short_requests} requests of one token")
        before = meter.read()
        asks = [synthetic_chat(model.name, i, 1) for i in range(effort.short_requests)]
        worker.closed("server", asks, 16)
        spent = meter.between(before, meter.read())
        per_request = {
            role: significant(1e6 * seconds / len(asks)) for role, seconds in spent.items()
        }
        out["synthetic_others_cpu_share"] = significant(bystanders.share())
    out["gateway_us_per_request"] = per_request["gateway"]
    out["synthetic"] = {**patterns, "cpu_us_per_request": per_request, "cpu_idle_ms_per_s": idle}
    return out


def _idle(meter: CpuMeter, seconds: float = 5.0) -> dict[str, float]:
    """CPU milliseconds a second by role while nobody asks: what Ray and the links cost anyway.

    Nothing else has it subtracted.
    """
    began_s, before = time.monotonic(), meter.read()
    time.sleep(seconds)
    spent = meter.between(before, meter.read())
    wall_s = time.monotonic() - began_s
    return {role: significant(1000 * cpu_s / wall_s) for role, cpu_s in spent.items()}


def _pattern(
    worker: Worker, meter: CpuMeter, model: str, streams: int, over_s: float, rounds: int
) -> tuple[_Figures, dict[str, float]]:
    """Figures of all rounds, and CPU microseconds a token by role."""
    loads: list[Load] = []
    before = meter.read()
    for i in range(rounds):
        asks = [synthetic_chat(model, i * streams + j, SYNTHETIC_TOKENS) for j in range(streams)]
        loads.append(worker.arrivals("server", asks, over_s))
    spent = meter.between(before, meter.read())
    figures = _Figures.of(loads)
    expected = rounds * streams * SYNTHETIC_TOKENS
    if figures.num_tokens != expected:
        raise ClusterError(f"{figures.num_tokens} tokens came where {expected} were asked for")
    return figures, {
        role: significant(1e6 * seconds / figures.num_tokens) for role, seconds in spent.items()
    }


def synthetic_chat(model: str, i: int, max_tokens: int) -> Ask:
    """Through template, tokeniser and admission, like any other."""
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": f"Question {i}: how far is it to the sea, and by which road?"},
    ]
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Ask(path="/v1/chat/completions", body=body, max_tokens=max_tokens)


def table(result: dict[str, Any]) -> list[str]:
    """For people: the headline figures, then each pattern."""
    lines: list[str] = []
    for key in KEYS:
        value = result[key]
        lines.append(f"{key:26}{'unknown' if value is None else value:>10}")
    for key in ("synthetic_others_cpu_share", "others_cpu_share"):
        if key in result:
            lines.append(f"{key:26}{result[key]:>10}")
    for concurrency, figures in result.get("closed_loop", {}).items():
        lines.append(f"{concurrency} at once{'':14}    stack  in process  difference   ratio")
        lines += [
            f"  {name:18}{f['stack']:13}{f['in_process']:12}{f['difference']:12}{f['ratio']:8}"
            for name, f in figures.items()
            if name not in ("stack", "in_process")
        ]
    for name, figures in result.get("synthetic", {}).items():
        if "ttft_ms" not in figures:
            continue
        ttft, cpu = figures["ttft_ms"], figures["cpu_us_per_token"]
        lines.append(
            f"synthetic {name:9} ttft p50/p99 {ttft['p50']}/{ttft['p99']} ms, e2e p50 "
            f"{figures['e2e_s']['p50']} s, CPU us a token: gateway {cpu['gateway']}, decode "
            f"{cpu['decode']}, haproxy {cpu['haproxy']}, all {cpu['all']}, client {cpu['client']}"
        )
    return lines
