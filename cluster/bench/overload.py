"""`tailrace bench overload`: what becomes of accepted work when far more is asked than can be done.

A cluster of one replica with an engine that computes nothing, so that capacity is a number of slots
and all the rest is what this bench is about: gateway, limits and admission queue. An open loop
asks for half to ten times what a closed loop got out of it; who is refused does not come back.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil

from cluster.bench.client import StreamResult
from cluster.bench.loads import Ask, at_times, closed_loop, poisson_times
from cluster.bench.refusal import fault
from cluster.bench.stack import SYNTHETIC, Stack, synthetic_stack
from cluster.bench.summary import Summary, percentile, significant
from cluster.bench.worker import Server
from cluster.errors import ClusterError

Say = Callable[[str], None]
T = TypeVar("T")

SLOTS = 8
TOKENS = 32
"""Output of a request: 0.32 s at the synthetic engine's pace."""

FACTORS = (0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """Targets of the one tier, stated before anything is measured."""

    ttft_s: float = 1.0
    itl_s: float = 0.05
    max_wait_s: float = 0.7
    """Longest wait for a slot: what is left of the TTFT target is for the way there and back."""

    prompt_s: float = 0.1
    """A refusal within this is prompt."""

    def gateway(self) -> dict[str, Any]:
        """`user_config` that says so."""
        return {
            "tiers": {
                "default": {
                    "rank": 10,
                    "queue_s": self.max_wait_s,
                    "ttft_s": self.ttft_s,
                    "itl_s": self.itl_s,
                    "max_wait_s": self.max_wait_s,
                }
            }
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured."""

    over_s: float = 15.0
    """Of each load, a fifth of it to get under way."""

    factors: tuple[float, ...] = FACTORS
    seed: int = 1


def bench_overload(effort: Effort, say: Say, promise: Promise | None = None) -> dict[str, Any]:
    """Raises ClusterError, DeployFailed where no cluster can be started or asked."""
    promise = promise or Promise()
    with synthetic_stack(say, gateway=promise.gateway(), slots=SLOTS) as stack:
        return measure(stack, effort, promise, say)


def measure(stack: Stack, effort: Effort, promise: Promise, say: Say) -> dict[str, Any]:
    """All of it on one running cluster with the synthetic model."""
    asks = [_ask(i) for i in range(SLOTS * 16)]
    _run(_closed(stack.url, asks[: SLOTS * 2]))  # connections, code paths
    results = _run(_closed(stack.url, asks))
    capacity = capacity_of(results)
    say(f"capacity: {capacity:.1f} requests a second in a closed loop of {SLOTS}")
    pids = stack.pids().get((stack.gateway(), "Gateway"), [])
    gateways = [psutil.Process(pid) for pid in pids]
    loads: list[dict[str, Any]] = []
    rng = random.Random(effort.seed)
    for factor in effort.factors:
        times_s = poisson_times(capacity * factor, effort.over_s, rng)
        say(f"{factor:g} x capacity: {len(times_s)} requests in {effort.over_s:g} s")
        before_s = _cpu_s(gateways)
        results, rss = _run(_open(stack.url, times_s, gateways))
        cpu_s = _cpu_s(gateways) - before_s
        load = judge(results, times_s, effort.over_s, promise)
        load.update(factor=factor, offered_rate=significant(len(times_s) / effort.over_s))
        load["gateway_cpu_us_per_request"] = significant(1e6 * cpu_s / max(1, len(times_s)))
        load["gateway_rss_mb"] = [significant(value / 2**20) for value in ends_of(rss)]
        loads.append(load)
    return {
        "promise": {
            "ttft_s": promise.ttft_s,
            "itl_s": promise.itl_s,
            "max_wait_s": promise.max_wait_s,
            "prompt_s": promise.prompt_s,
        },
        "capacity_rate": significant(capacity),
        "slots": SLOTS,
        "loads": loads,
        **headline(loads),
    }


def headline(loads: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The keys that are asked for, of the most extreme load against the best of all."""
    worst = max(loads, key=lambda load: load["factor"])
    peak = max(load["goodput_rate"] for load in loads)
    before, after = worst["gateway_rss_mb"]
    return {
        "goodput_ratio_at_10x": significant(worst["goodput_rate"] / peak) if peak else 0.0,
        "accepted_p99_within_target": worst["accepted_p99_within_target"],
        "accepted_ttft_p99_s": worst["ttft_p99_s"],
        "refusal_p99_ms": worst["refusal_p99_ms"],
        "refusals_malformed": sum(sum(load["malformed"].values()) for load in loads),
        "failed": sum(load["failed"] for load in loads),
        "gateway_rss_growth_mb": significant(after - before),
    }


def judge(
    results: Sequence[StreamResult], times_s: Sequence[float], over_s: float, promise: Promise
) -> dict[str, Any]:
    """One load: what was accepted and how well, what was refused and how fast.

    Goodput counts what arrived after the first fifth of the load and kept both targets, over the
    rest of its time.
    """
    settled = [r for r, at in zip(results, times_s, strict=True) if at >= over_s / 5]
    accepted = [r for r in settled if r.end_s is not None]
    refused = [r for r in settled if r.refused_s is not None]
    ttfts = [r.arrivals_s[0] - r.sent_s for r in accepted if r.arrivals_s]
    refusals = [r.refused_s - r.sent_s for r in refused if r.refused_s is not None]
    malformed: dict[str, int] = {}
    for result in refused:
        found = fault(result.status, result.headers, result.text)
        if found is not None:
            malformed[found] = malformed.get(found, 0) + 1
    p99_s = percentile(ttfts, 99) if ttfts else None
    return {
        "requests": len(settled),
        "accepted": len(accepted),
        "refused": len(refused),
        "failed": len(settled) - len(accepted) - len(refused),
        "goodput_rate": significant(sum(_in_time(r, promise) for r in accepted) / (0.8 * over_s)),
        "ttft_p50_s": significant(statistics.median(ttfts)) if ttfts else None,
        "ttft_p99_s": None if p99_s is None else significant(p99_s),
        "accepted_p99_within_target": p99_s is not None and p99_s <= promise.ttft_s,
        "refusal_p99_ms": significant(1000 * percentile(refusals, 99)) if refusals else None,
        "refusal_ms": Summary.of(refusals, 1000).to_json() if refusals else None,
        "refusals_prompt_share": (
            significant(sum(s <= promise.prompt_s for s in refusals) / len(refusals))
            if refusals
            else None
        ),
        "malformed": malformed,
    }


def _in_time(result: StreamResult, promise: Promise) -> bool:
    arrivals = result.arrivals_s
    if not arrivals or arrivals[0] - result.sent_s > promise.ttft_s:
        return False
    tokens = result.completion_tokens or len(arrivals)
    return (arrivals[-1] - arrivals[0]) / max(1, tokens - 1) <= promise.itl_s


def capacity_of(results: Sequence[StreamResult]) -> float:
    """Requests a second of a closed loop. Raises ClusterError if one failed."""
    failed = [result.error for result in results if result.error]
    if failed:
        raise ClusterError(f"{len(failed)} of {len(results)} requests failed: {failed[0]}")
    ends = [result.end_s for result in results if result.end_s is not None]
    return len(results) / (max(ends) - min(result.sent_s for result in results))


def ends_of(rss: Sequence[float]) -> tuple[float, float]:
    """Median of the second third and of the last: what still grows when all is warm."""
    third = max(1, len(rss) // 3)
    return statistics.median(rss[third : 2 * third] or rss), statistics.median(rss[-third:])


def table(result: dict[str, Any]) -> list[str]:
    """For people."""
    promise = result["promise"]
    lines = [
        f"targets: first token within {promise['ttft_s']:g} s, {promise['itl_s']:g} s a token; "
        f"longest wait for a slot {promise['max_wait_s']:g} s",
        f"capacity {result['capacity_rate']} requests a second",
        "    load  goodput/s  accepted  refused  failed  TTFT p50/p99 s  refusal p99 ms",
    ]
    lines += [
        f"{load['factor']:6g} x {load['goodput_rate']:10} {load['accepted']:9} {load['refused']:8} "
        f"{load['failed']:7}  {load['ttft_p50_s']}/{load['ttft_p99_s']}  {load['refusal_p99_ms']}"
        for load in result["loads"]
    ]
    keys = (
        "goodput_ratio_at_10x",
        "accepted_p99_within_target",
        "refusals_malformed",
        "gateway_rss_growth_mb",
    )
    return [*lines, *(f"{key:28}{result[key]}" for key in keys)]


def _cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def _ask(i: int) -> Ask:
    body = {
        "model": SYNTHETIC,
        "messages": [{"role": "user", "content": f"Question {i}: how far is it to the sea?"}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return Ask(path="/v1/chat/completions", body=body, max_tokens=TOKENS)


async def _closed(url: str, asks: Sequence[Ask]) -> list[StreamResult]:
    server = Server(url)
    try:
        return await closed_loop(server, asks, SLOTS)
    finally:
        server.close()


async def _open(
    url: str, times_s: Sequence[float], gateways: Sequence[psutil.Process]
) -> tuple[list[StreamResult], list[float]]:
    """Results, and the gateways' resident bytes every half second."""
    server = Server(url)
    rss: list[float] = []

    async def watch() -> None:
        while True:
            rss.append(float(sum(process.memory_info().rss for process in gateways)))
            await asyncio.sleep(0.5)

    await server.warm(4 * SLOTS)
    watching = asyncio.ensure_future(watch())
    try:
        results = await at_times(server, [_ask(i) for i in range(len(times_s))], times_s)
    finally:
        watching.cancel()
        server.close()
    return results, rss


def _run(main: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
