"""`tailrace bench tiers`: what interactive users feel of batch work that fills the cluster.

Four loads on one cluster, one after the other: batch alone; interactive requests alone; both, with
as many batch callers as fill every slot and then some; the same again with everybody in one tier.
Interactive requests are the same each time: a trace's lengths and gaps, scaled to the engine.

What interactive leaves to batch is what batch does alone, less the interactive tokens that were
served. What batch gets where nobody goes first, beside the very same requests, is told too.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from cluster.bench.client import StreamResult
from cluster.bench.loads import Ask, Target, at_times
from cluster.bench.stack import SYNTHETIC, Stack, own_stack_of, synthetic_stack
from cluster.bench.summary import percentile, significant
from cluster.bench.tier_traffic import Kind, Size, Traffic, traffic
from cluster.bench.worker import Server
from cluster.errors import ClusterError
from cluster.replay.trace import Trace

Say = Callable[[str], None]
T = TypeVar("T")

INTERACTIVE, BATCH, ONE_TIER = "priority", "batch", "default"

LABEL_TOKENS = 8
"""About what the words take that tell a prompt from all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Targets, loads and budgets, stated before anything is measured."""

    model: str
    slots: int
    ttft_s: float
    itl_s: float
    """A request's mean gap between tokens."""

    interactive_rate: float
    interactive_samples: int
    interactive: Kind
    batch_callers: int
    batch: Kind
    alone_s: float
    """How long batch runs alone."""

    def traffic(self, trace: Trace | None) -> Traffic:
        """All requests of it. Raises TraceError for a trace without arrivals."""
        return traffic(
            trace,
            rate=self.interactive_rate,
            samples=self.interactive_samples,
            interactive=self.interactive,
            batch=self.batch,
        )

    def gateway(self) -> dict[str, Any]:
        """`user_config` that promises this to the interactive tier."""
        promise = {"ttft_s": self.ttft_s, "itl_s": self.itl_s, "queue_s": self.ttft_s / 2}
        patient = {"queue_s": None, "ttft_s": None, "itl_s": None, "e2e_s": None}
        return {
            "tiers": {
                INTERACTIVE: {"rank": 0, "preemptible": False, **promise},
                ONE_TIER: {"rank": 10, **promise},
                BATCH: {"rank": 30, "max_wait_s": 3600, **patient},
            }
        }


def synthetic_plan(*, quick: bool) -> Plan:
    """Slots are what is scarce: 8 of them, 100 tokens a second each."""
    return Plan(
        model=SYNTHETIC,
        slots=8,
        ttft_s=0.25,
        itl_s=0.03,
        interactive_rate=25.0,
        interactive_samples=50 if quick else 1000,
        interactive=Kind(fixed=Size(18, 10), factor=0.04),
        batch_callers=16,
        batch=Kind(fixed=Size(18, 60), factor=0.25),
        alone_s=2.0 if quick else 10.0,
    )


def laptop_plan(model: str, *, quick: bool) -> Plan:
    """Two cores are what is scarce, shared by both pools of a small model."""
    return Plan(
        model=model,
        slots=8,
        ttft_s=1.0,
        itl_s=0.15,
        interactive_rate=5.0 if quick else 10.0,
        interactive_samples=20 if quick else 1000,
        interactive=Kind(fixed=Size(20, 4), factor=0.02),
        batch_callers=12,
        batch=Kind(fixed=Size(68, 48), factor=0.16),
        alone_s=5.0 if quick else 30.0,
    )


@dataclass(frozen=True, slots=True)
class Part:
    """One load, as it went."""

    interactive: list[StreamResult]
    batch_tokens: int
    """That came within the load's time, whole answers or not."""

    over_s: float

    @property
    def batch_rate(self) -> float:
        """Tokens a second."""
        return self.batch_tokens / self.over_s

    @property
    def interactive_rate(self) -> float:
        """Tokens a second that were served: all answers end within the time."""
        return sum(map(tokens_of, self.interactive)) / self.over_s


def tokens_of(result: StreamResult) -> int:
    """What came of an answer, whole or not."""
    return result.completion_tokens or len(result.arrivals_s)


def bench_tiers(*, real: bool, quick: bool, trace: Trace | None, say: Say) -> dict[str, Any]:
    """On the synthetic engine, or on the packaged configuration's model (`real`).

    Raises ClusterError, DeployFailed where no cluster can be started or asked, TraceError for a
    trace without arrivals.
    """
    plan = laptop_plan("", quick=quick) if real else synthetic_plan(quick=quick)
    offered = plan.traffic(trace)
    if not real:
        with synthetic_stack(say, gateway=plan.gateway(), slots=plan.slots) as stack:
            return measure(stack, plan, offered, say)
    pool = {"max_running_requests": plan.slots}
    with own_stack_of(say, gateway=plan.gateway(), pool=pool) as stack:
        models = [each.name for each in stack.models()]
        return measure(stack, replace(plan, model=models[0]), offered, say)


def measure(stack: Stack, plan: Plan, offered: Traffic, say: Say) -> dict[str, Any]:
    """All loads on one running cluster."""
    planned = {**asdict(plan), "traffic": offered.told()}
    say(f"plan: {planned}")
    count, over_s = plan.interactive_samples, offered.times_s[-1]
    loads = _Loads(stack.url, plan, offered)
    loads.run(plan.slots, INTERACTIVE, BATCH, 2.0)  # warm
    say(f"batch alone for {plan.alone_s:g} s")
    batch = loads.run(0, INTERACTIVE, BATCH, plan.alone_s)
    say(f"interactive alone: {count} requests in {over_s:.0f} s")
    alone = loads.run(count, INTERACTIVE, None, over_s)
    say(f"the same, with {plan.batch_callers} batch callers for {plan.slots} slots")
    tiered = loads.run(count, INTERACTIVE, BATCH, over_s)
    say("the same, all in one tier")
    untiered = loads.run(count, ONE_TIER, ONE_TIER, over_s)
    return {
        "plan": planned,
        **headline(plan, batch, alone, tiered, untiered),
        "interactive_alone": figures(plan, alone),
        "tiered": figures(plan, tiered),
        "untiered": figures(plan, untiered),
        "batch_alone_tokens_rate": significant(batch.batch_rate),
    }


def headline(plan: Plan, batch: Part, alone: Part, tiered: Part, untiered: Part) -> dict[str, Any]:
    """The keys that are asked for. `batch`: it alone."""
    left = batch.batch_rate - tiered.interactive_rate
    got, equal = tiered.batch_rate, untiered.batch_rate
    with_batch, without = figures(plan, tiered), figures(plan, alone)
    p99, p99_alone = with_batch["ttft_p99_s"], without["ttft_p99_s"]
    return {
        "interactive_samples": len(tiered.interactive),
        "interactive_attainment": with_batch["attainment"],
        "interactive_attainment_untiered": figures(plan, untiered)["attainment"],
        "batch_capacity_share": significant(got / left) if left > 0 else None,
        "batch_share_of_untiered": significant(got / equal) if equal > 0 else None,
        "interactive_ttft_p99_ratio": (
            significant(p99 / p99_alone) if p99 is not None and p99_alone else None
        ),
        "interactive_itl_p99_s": with_batch["itl_p99_s"],
    }


def figures(plan: Plan, part: Part) -> dict[str, Any]:
    """One load's interactive side: a request attains if it keeps both targets; a refused or failed
    one does not."""
    whole = [result for result in part.interactive if result.end_s is not None]
    ttfts = [r.arrivals_s[0] - r.sent_s for r in whole if r.arrivals_s]
    gaps = [mean_gap_s(r) for r in whole if len(r.arrivals_s) > 1]
    kept = sum(
        bool(r.arrivals_s)
        and r.arrivals_s[0] - r.sent_s <= plan.ttft_s
        and mean_gap_s(r) <= plan.itl_s
        for r in whole
    )
    return {
        "requests": len(part.interactive),
        "answered": len(whole),
        "attainment": significant(kept / len(part.interactive)) if part.interactive else None,
        "ttft_p50_s": significant(statistics.median(ttfts)) if ttfts else None,
        "ttft_p99_s": significant(percentile(ttfts, 99)) if ttfts else None,
        "itl_p99_s": significant(percentile(gaps, 99)) if gaps else None,
        "tokens_rate": significant(part.interactive_rate),
        "batch_tokens_rate": significant(part.batch_rate),
    }


def mean_gap_s(result: StreamResult) -> float:
    """Between two tokens of one answer, 0 where there is but one."""
    arrivals = result.arrivals_s
    return (arrivals[-1] - arrivals[0]) / max(1, tokens_of(result) - 1)


def table(result: dict[str, Any]) -> list[str]:
    """For people: the plan first."""
    plan, offered = result["plan"], result["plan"]["traffic"]
    source = (
        "fixed lengths and Poisson arrivals"
        if offered["trace"] is None
        else f"lengths and gaps of {offered['trace']}, times {plan['interactive']['factor']:g} for "
        f"interactive and {plan['batch']['factor']:g} for batch"
    )
    lines = [
        f"{plan['model']}: first token within {plan['ttft_s']:g} s, {plan['itl_s']:g} s a token; "
        f"{plan['interactive_samples']} interactive requests at {plan['interactive_rate']:g}/s, "
        f"{plan['batch_callers']} batch callers, {plan['slots']} slots",
        f"{source}: interactive {_lengths(offered['interactive'])}; batch "
        f"{_lengths(offered['batch'])}",
        f"{'':20}{'attained':>10}{'TTFT p50':>10}{'p99 s':>10}{'ITL p99':>10}{'batch tok/s':>13}",
    ]
    for name in ("interactive_alone", "tiered", "untiered"):
        row = result[name]
        columns = ("attainment", "ttft_p50_s", "ttft_p99_s", "itl_p99_s")
        cells = "".join(f"{row[column]!s:>10}" for column in columns)
        lines.append(f"{name:20}{cells}{row['batch_tokens_rate']:>13}")
    lines.append(f"batch alone: {result['batch_alone_tokens_rate']} tokens a second")
    for key in ("batch_capacity_share", "batch_share_of_untiered", "interactive_ttft_p99_ratio"):
        lines.append(f"{key:28}{result[key]}")
    return lines


def _lengths(told: dict[str, Any]) -> str:
    return (
        f"{told['prompt_mean']:g} tokens in (at most {told['prompt_most']}), "
        f"{told['tokens_mean']:g} out ({told['tokens_most']})"
    )


def ask_of(model: str, label: str, tier: str, size: Size) -> Ask:
    """`label` comes first, so that no prompt finds another's prefix."""
    words = max(0, size.prompt - LABEL_TOKENS)
    body = {
        "model": model,
        "prompt": " ".join([f"{label}:", *("river" for _ in range(words))]),
        "max_tokens": size.tokens,
        "ignore_eos": True,
        "stream": True,
        "service_tier": tier,
        "stream_options": {"include_usage": True},
    }
    return Ask(path="/v1/completions", body=body, max_tokens=size.tokens)


class _Loads:
    """Loads on one cluster, one after the other. No prompt of one is met again in another."""

    def __init__(self, url: str, plan: Plan, offered: Traffic) -> None:
        self._url = url
        self._plan = plan
        self._offered = offered
        self._number = 0

    def run(
        self, num_interactive: int, interactive_tier: str, batch_tier: str | None, over_s: float
    ) -> Part:
        """The first interactive arrivals, with batch callers from a moment before to the end."""
        self._number += 1
        return _run(self._load(num_interactive, interactive_tier, batch_tier, over_s))

    async def _load(
        self, num_interactive: int, interactive_tier: str, batch_tier: str | None, over_s: float
    ) -> Part:
        plan, offered = self._plan, self._offered
        server = Server(self._url)
        done: list[StreamResult] = []
        ending = asyncio.Event()
        callers: list[asyncio.Task[None]] = []
        if batch_tier is not None:
            callers = [
                asyncio.ensure_future(self._caller(server, batch_tier, i, done, ending))
                for i in range(plan.batch_callers)
            ]
            await asyncio.sleep(1.0)  # every slot is taken
        try:
            await server.warm(plan.slots)
            began_s = time.monotonic()
            pause = asyncio.ensure_future(asyncio.sleep(over_s))
            asks = [
                ask_of(plan.model, f"{self._number} asks {i}", interactive_tier, size)
                for i, size in enumerate(offered.interactive[:num_interactive])
            ]
            results = await at_times(server, asks, offered.times_s[:num_interactive])
            await pause
            ended_s = time.monotonic()
            # The last answers are waited for: what came of them before the end counts.
            ending.set()
            await asyncio.gather(*callers)
        finally:
            for caller in callers:
                caller.cancel()
            server.close()
        return Part(results, tokens_between(done, began_s, ended_s), ended_s - began_s)

    async def _caller(
        self,
        server: Target,
        tier: str,
        caller: int,
        done: list[StreamResult],
        ending: asyncio.Event,
    ) -> None:
        """One answer after the other until the end. Raises ClusterError if one fails."""
        sizes, i = self._offered.batch, caller
        while not ending.is_set():
            label = f"{self._number} batch {i}"
            ask = ask_of(self._plan.model, label, tier, sizes[i % len(sizes)])
            result = await server.ask(ask)
            if result.refused_s is not None:
                await asyncio.sleep(0.2)
            elif result.error is not None:
                raise ClusterError(f"a batch request failed: {result.error}")
            else:
                done.append(result)
            i += self._plan.batch_callers


def tokens_between(results: Sequence[StreamResult], began_s: float, ended_s: float) -> int:
    """Tokens of batch answers that came within a time. Several of one read came together."""
    total = 0.0
    for result in results:
        inside = sum(began_s <= at <= ended_s for at in result.arrivals_s)
        if inside:
            total += tokens_of(result) * inside / len(result.arrivals_s)
    return round(total)


def _run(main: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)
