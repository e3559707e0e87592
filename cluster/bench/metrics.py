"""`tailrace bench metrics`: what metrics cost, in processor time.

The same load around an engine that computes nothing, with metrics switched off and on in turn on
one running cluster (`metrics: false` of the gateway and of the pools, applied in place), and the
processor time of all of the cluster's processes but Ray's own divided by the tokens. Pairs, so that
a machine whose speed drifts is equally unkind to both.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

from cluster.bench.cpu import HAPROXY, Bystanders, CpuMeter
from cluster.bench.overhead import SYNTHETIC_TOKENS, synthetic_chat
from cluster.bench.stack import (
    GATEWAY_BUILDER,
    MODEL_BUILDER,
    SYNTHETIC,
    Stack,
    synthetic_stack,
)
from cluster.bench.summary import significant
from cluster.bench.worker import Worker
from cluster.errors import ClusterError

Say = Callable[[str], None]

STREAMS = 64
AIM = 1.05
LEVEL = 0.95
NUM_RESAMPLES = 10_000
ROLES = ("gateway", "decode", HAPROXY)
"""Whose processor time is compared. Ray's own processes are busy by themselves, by amounts that
would drown the difference; what Ray's agent takes for our series is told beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    pairs: int = 10
    rounds: int = 3
    """Bursts of 64 streams that make one side of a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """CPU seconds by role, for the same number of tokens."""

    off: Mapping[str, float]
    on: Mapping[str, float]
    num_tokens: int

    @property
    def ratio(self) -> float:
        return _sum(self.on) / _sum(self.off)


def bench_metrics(effort: Effort, say: Say) -> dict[str, Any]:
    """Start a cluster with the synthetic engine alone, measure, and take it down.

    Raises:
        EngineError: it cannot be started, changed or asked.
    """
    with synthetic_stack(say, gateway={}, slots=STREAMS) as stack:
        return measure(stack, effort, say)


def measure(stack: Stack, effort: Effort, say: Say) -> dict[str, Any]:
    """On a cluster of our own that serves the synthetic engine."""
    with Worker() as worker:
        client = psutil.Process(worker.pid)
        worker.server(stack.url)
        meter = CpuMeter(stack, model_app=SYNTHETIC, gateway_app=stack.gateway(), client=client)
        bystanders = Bystanders(lambda: [*stack.processes(), client])
        for metrics in (False, True):
            _switch(stack, metrics)
            _side(worker, meter, 1)
        pairs: list[Pair] = []
        for number in range(effort.pairs):
            spent: dict[bool, Mapping[str, float]] = {}
            for metrics in (True, False) if number % 2 else (False, True):
                _switch(stack, metrics)
                spent[metrics] = _side(worker, meter, effort.rounds)
            tokens = effort.rounds * STREAMS * SYNTHETIC_TOKENS
            pairs.append(Pair(off=spent[False], on=spent[True], num_tokens=tokens))
            say(f"pair {number + 1} of {effort.pairs}: ratio {pairs[-1].ratio:.3f}")
        share = bystanders.share()
    return {**summary(pairs), "others_cpu_share": significant(share)}


def summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Median ratio with the interval of a bootstrap over pairs, and seconds a 1,000 tokens."""
    ratios = np.array([pair.ratio for pair in pairs])
    rng = np.random.default_rng(0)
    drawn = np.median(rng.choice(ratios, (NUM_RESAMPLES, len(ratios))), axis=1)
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(drawn, [tail, 100 - tail])
    ratio = statistics.median(ratios.tolist())
    return {
        "metrics_cpu_ratio": significant(ratio),
        "interval": [significant(float(low)), significant(float(high))],
        "aim": AIM,
        "ratios": [significant(pair.ratio) for pair in pairs],
        "cpu_s_per_1000_tokens": {
            side: {
                role: significant(
                    statistics.median(
                        1000 * getattr(pair, side)[role] / pair.num_tokens for pair in pairs
                    )
                )
                for role in pairs[0].on
            }
            for side in ("off", "on")
        },
        "pairs": len(pairs),
        "streams": STREAMS,
        "tokens_a_side": pairs[0].num_tokens,
    }


def table(result: Mapping[str, Any]) -> list[str]:
    """For people."""
    low, high = result["interval"]
    lines = [
        f"CPU with metrics, without = 1: {result['metrics_cpu_ratio']} ({low} to {high}), "
        f"{result['pairs']} pairs at {result['streams']} streams; aim {result['aim']}",
        f"{'CPU s a 1,000 tokens':24}{'off':>10}{'on':>10}",
    ]
    off, on = (result["cpu_s_per_1000_tokens"][side] for side in ("off", "on"))
    lines += [f"  {role:22}{off[role]:>10}{on[role]:>10}" for role in off]
    lines.append(f"others took {100 * result['others_cpu_share']:.1f} % of the machine")
    return lines


def _sum(spent: Mapping[str, float]) -> float:
    return sum(spent[role] for role in ROLES)


def _side(worker: Worker, meter: CpuMeter, rounds: int) -> dict[str, float]:
    """CPU seconds by role."""
    before = meter.read()
    for i in range(rounds):
        asks = [
            synthetic_chat(SYNTHETIC, i * STREAMS + j, SYNTHETIC_TOKENS) for j in range(STREAMS)
        ]
        tokens = sum(
            result["completion_tokens"] for result in worker.arrivals("server", asks, 0.0).results
        )
        if tokens != STREAMS * SYNTHETIC_TOKENS:
            raise ClusterError(f"{tokens} tokens came where {STREAMS * SYNTHETIC_TOKENS} were due")
    return meter.between(before, meter.read())


def _switch(stack: Stack, metrics: bool) -> None:
    """In place: a replica that was replaced would be another process to measure."""
    before = stack.pids()
    stack.reconfigure(lambda data: with_metrics(data, metrics))
    if stack.pids() != before:
        raise ClusterError("switching metrics replaced a replica: they cannot be compared")
    # What was recorded before the switch is still settled and sent.
    time.sleep(1.2)


def with_metrics(data: Mapping[str, Any], metrics: bool) -> dict[str, Any]:
    """A Serve configuration with metrics switched everywhere."""
    changed = copy.deepcopy(dict(data))
    for application in changed["applications"]:
        if application.get("import_path") in (GATEWAY_BUILDER, MODEL_BUILDER):
            for deployment in application.get("deployments", ()):
                deployment["user_config"] = {**(deployment.get("user_config") or {})}
                deployment["user_config"]["metrics"] = metrics
    return changed
